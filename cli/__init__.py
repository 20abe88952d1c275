"""This is the rich command line of the method files, `python -m cli NAME`. No method needs it.

__main__.py    finds the file that a NAME means. Then read main.py
main.py        loads models, decodes, prints, compares and tunes, as a command line says
commands.py    trains, collects and measures, for files that have such commands
options.py     makes options of a method's keyword arguments, and --help of its docstring
run.py         runs one method on prompts, and counts its tokens, calls and seconds
prompts.py     reads prompts, also with answers, and makes token ids of them
text.py        shortens messages, and prints tokens as text while they come
trace.py       records every call for --trace; trace.html shows them
trajectory.py  draws a Jacobi decoding for --show
"""
