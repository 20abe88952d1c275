"""The command line of the method files, which no method knows of: begin with main.py.

main.py        what a command line does: load, decode, print, compare, tune
options.py     a method's keyword arguments as options
run.py         one method at work: its outputs, calls and seconds
loading.py     which file of a model is at fault; chat templates
text.py        encodings, messages, tokens that become text one by one
trace.py       --trace, with trace.html
trajectory.py  --show of a Jacobi decoding
graphs.py      --graphs
"""
