"""Makes the options of a command line from the signatures of methods, which alone declare them.

    def lookahead(target, prompt, *, W: int = 5, exact: bool = True, sample=greedy, log=None):
        \"\"\"Guess by n-grams. …

        W:     columns of the window, 1 or more
        exact: …\"\"\"

becomes `--W 7` and `--exact` or `--no-exact`, and --help prints the docstring. `--W 0` is refused,
since a sentence about W ends with its range (`read_ranges`). Keyword arguments of other kinds
(`sample`, `log`, objects) are no options. main.py fills them in.
"""
import json
import math
import re
import sys
from argparse import (SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace,
                      RawDescriptionHelpFormatter)
from inspect import Parameter, getdoc, getfile, signature
from pathlib import Path
from typing import Iterable

from cli.prompts import read_prompts
from cli.text import Parser
from common import SAMPLING, InputError, Sampler
from support.engine import MODELS, require

# The annotations of keyword arguments that are options, and how argparse reads each of them
KINDS = {bool: {"action": BooleanOptionalAction},
         int: {"type": int, "metavar": "N"},
         float: {"type": float, "metavar": "X"},
         str: {"type": str},
         Path: {"type": Path, "metavar": "FILE"},
         list[int]: {"type": int, "nargs": "+", "metavar": "N"}}
# The meaning of each option of sampling
SAMPLES = {"temperature": "0 takes the likeliest token, more samples",
           "top_k": "sample from the N likeliest tokens, 0: from all",
           "top_p": "sample from the likeliest tokens, which have probability X together",
           "min_p": "sample from tokens that have X times the largest probability",
           "seed": "another seed, other samples",
           "coupling": "draft and target sample by the same numbers, so methods write one text"}


def read_options(function) -> dict[str, tuple[type, object]]:
    """Return {name: (type, default)} of a function's keyword arguments that are options."""
    return {name: (argument.annotation, argument.default)
            for name, argument in signature(function).parameters.items()
            if argument.kind is Parameter.KEYWORD_ONLY and argument.annotation in KINDS}


# A range at the end of a sentence: ", 1 or more", ", 0 to 64" or ", above 0".
RANGE = re.compile(r", ([\d.]*\d or more|[\d.]*\d to [\d.]*\d|above [\d.]*\d)(?:\.|$)")


def read_ranges(function) -> dict[str, str]:
    """Return the ranges of a function's options, in the words that its docstring has for them."""
    found = {}
    for lines in (getdoc(function) or "").split("\n\n"):
        # An entry begins at a line with one name, or with some as in "W, N: …".
        for entry in re.split(r"\n *(?=\w+(?:, \w+)*: )", f"\n{lines}"):
            names, _, text = entry.partition(": ")
            words = RANGE.search(" ".join(text.split()))
            if words:
                found |= dict.fromkeys(names.split(", "), words[1])
    return found


def fits(value: float, words: str) -> bool:
    """Tell whether a value is in a range that `read_ranges` found; nan is in none."""
    least, most = [*map(float, re.findall(r"[\d.]*\d", words)), math.inf][:2]
    return least <= value <= most and (value > least or not words.startswith("above"))


def write_option(name: str) -> str:
    """Return how an argument is given on the command line."""
    return f"--{name.replace('_', '-')}"


def make_parser(function, calls: list[str], target: str) -> ArgumentParser:
    """Make a parser that has the options of loading a model.

    Its help begins with the command lines of the function's file and with the first paragraph of
    the file's docstring. The rest of the docstring comes after the options. The usage line of
    argparse is left out, since it would repeat a hundred lines of options.

    function  a method or a command of the file
    calls     what may follow the name of the file on a command line
    target    the default model, a folder of models/
    """
    file = Path(getfile(function))
    name = "models/train.py" if file.parent == MODELS else f"-m cli {file.stem}"
    usage = "\n       ".join(f"python {name} {call}" for call in calls)
    doc = sys.modules[function.__module__].__doc__ or ""  # none under `python -OO`
    first, _, rest = doc.partition("\n\n")
    parser = Parser(description=f"usage: {usage}\n\n{first}", epilog=rest, usage=SUPPRESS,
                    formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--target", default=str(MODELS / target), metavar="MODEL",
        help=f"the model: a directory or hub id (default: models/{target})")
    add("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--dtype", help="float32, bfloat16 or float16 (default: the model's own, float32 on a CPU)")
    return parser


def add_prompt_options(parser: ArgumentParser):
    """Add the options of prompts in a file; return the group, in which only one may be given."""
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        "--prompts", type=read_prompts, metavar="FILE",
        help='prompts, a line each, plain or {"prompt": "..."} (default: three examples)')
    parser.add_argument("--chat", nargs="?", const={}, type=json.loads, metavar="JSON",
                        help='use the chat template, with settings as {"enable_thinking": false}. '
                             "A method without a prompt holds a conversation then")
    return files


def add_decoding_options(parser: ArgumentParser, methods: list) -> None:
    """Add the options that all methods have in common."""
    add = parser.add_argument
    add("--draft", action="append", metavar="MODEL",
        help="the small model that guesses, if the method takes one (default: models/draft)")
    add("--prompt", action="append", metavar="TEXT",
        help="a prompt, or - for standard input, repeatable")
    add("--max-new-tokens", type=int, default=256, metavar="N",
        help="the most tokens of an answer (default: 256)")
    for name, default in SAMPLING.items():
        add(write_option(name), default=default, help=f"{SAMPLES[name]} (default: {default})",
            **KINDS[type(default)])
    add("--graphs", action=BooleanOptionalAction,
        help="run models by CUDA graphs, which saves launches (default: on a GPU)")
    add("--pack", action=BooleanOptionalAction, default=True,
        help="on a CPU, put large weights into another order where that is faster (default)")
    add("--invariant", action="store_true",
        help="make the target batch-invariant: all lossless methods write one text in every type")
    add("--show", nargs="?", const="always", default="auto", choices=["auto", "always", "never"],
        help="print right guesses in green; auto, the default: on a terminal")
    add("--compare", action="store_true",
        help="also decode token by token; print the speed-up, and whether the text is the same")
    add("--trace", type=Path, metavar="FILE.html",
        help="write a page for a browser that steps through every call")
    add("--tune", action="store_true",
        help="search the fastest options for these prompts, instead of printing answers")
    names = [method.__name__ for method in methods]
    add("--method", default=names[0], choices=names,
        help=f"a method of those below (default: {names[0]})" if names[1:] else SUPPRESS)


def make_sampler(args: Namespace) -> Sampler:
    """Make the Sampler that a command line asks for."""
    return Sampler(**{name: vars(args)[name] for name in SAMPLING})


def add_own_options(parser: ArgumentParser, functions: list) -> None:
    """Add the options of methods, or of a command, with their docstrings.

    An option that several functions share is printed under the first of them. An option that is
    not given is left out of what is parsed, so that the function's own default counts.
    """
    added = set()
    for function in functions:
        options = read_options(function)
        shown = [name if default is Parameter.empty else f"{name}={default!r}"
                 for name, (_, default) in options.items()]
        group = parser.add_argument_group(f"{function.__name__}({', '.join(shown)})",
                                          getdoc(function))
        for name, (kind, default) in options.items():
            if name not in added:
                group.add_argument(write_option(name), default=SUPPRESS,
                                   required=default is Parameter.empty, **KINDS[kind])
        added |= {*options}


def parse_decoding(methods: list, commands: Iterable, target: str, argv: list[str]) -> Namespace:
    """Parse the command line of a decoding, which may have options of any of the methods.

    commands  functions that --help names
    target    the default target, a folder of models/
    """
    calls = ["[options]", *(f"{command.__name__} --help" for command in commands)]
    parser = make_parser(methods[0], calls, target)
    add_prompt_options(parser)
    add_decoding_options(parser, methods)
    add_own_options(parser, methods)
    return parser.parse_args(argv)


def select_options(args: Namespace, function, others: Iterable = (), ranges: dict = {}) -> dict:
    """Return the function's own options that were given.

    args     what was parsed
    others   functions of the same file, whose options are parsed too
    ranges   ranges that count where the function's docstring says none, as `read_ranges` finds them
    returns  a value for each of these options. InputError for an option of another function, and
             for a value outside its range
    """
    own = read_options(function)
    for other in others:
        for name in read_options(other):
            if name in args and name not in own:
                raise InputError(f"{write_option(name)} is no option of {function.__name__}")
    given = {name: vars(args)[name] for name in own if name in args}
    for name, words in (ranges | read_ranges(function)).items():
        if name in given:
            require(fits(given[name], words), name, words, given[name])
    return given
