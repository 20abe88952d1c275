"""The options of a command line, read from the signatures of methods: one place to declare them.

    def lookahead(target, prompt, *, W: int = 5, exact: bool = True, sample=greedy, log=None):
        \"\"\"Guess by n-grams. …

        W:     columns of the window
        exact: …\"\"\"

becomes `--W 7` and `--exact` or `--no-exact`, and --help prints the docstring. Keyword arguments of
other kinds (`sample`, `log`, objects) are filled in by the command line itself and are no options.
"""
import sys
from argparse import (SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace,
                      RawDescriptionHelpFormatter)
from inspect import Parameter, getdoc, signature
from pathlib import Path

from cli.text import Parser
from common import InputError
from models.tasks import read_prompts

MODELS = Path(__file__).resolve().parent.parent / "models"
KINDS = (bool, int, float, str, Path)  # annotations of keyword arguments that are options


def read_options(function) -> dict[str, tuple[type, object]]:
    """Return {name: (type, default)} of a function's arguments that a command line can give."""
    options = {}
    for name, argument in signature(function).parameters.items():
        if argument.kind is Parameter.KEYWORD_ONLY and argument.annotation in KINDS:
            options[name] = argument.annotation, argument.default
    return options


def write_option(name: str) -> str:
    """Return how an argument is given on the command line."""
    return f"--{name.replace('_', '-')}"


def make_parser(functions: list) -> ArgumentParser:
    """Make a parser without options; the docstring of the functions' file is its help.

    Methods of a file may share an option, so a later one takes the place of an earlier one. The
    usage line is left out, since it would repeat a hundred lines of options.
    """
    return Parser(description=sys.modules[functions[0].__module__].__doc__,
                  formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False,
                  usage=SUPPRESS, conflict_handler="resolve")


def add_model_options(parser: ArgumentParser, target: str, dtype: str | None) -> None:
    """Add the options of loading a model; target and dtype are defaults."""
    add = parser.add_argument
    add("--target", default=str(MODELS / target), help="model directory or hub id")
    add("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--dtype", default=dtype, help="float32, bfloat16 or float16")


def add_prompt_options(parser: ArgumentParser) -> None:
    """Add the options of prompts in a file."""
    add = parser.add_argument
    add("--prompts", type=read_prompts, default=f"{MODELS}/examples.jsonl", help="a file")
    add("--chat", action="store_true", help="put prompts into the model's chat template")


def add_decoding_options(parser: ArgumentParser, methods: list) -> None:
    """Add the options that all methods have in common."""
    add = parser.add_argument
    add("--draft", action="append", help="a small model with its tokenizer; repeatable")
    add("--prompt", action="append", help="a text, or - for standard input; repeatable")
    add("--max-new-tokens", type=int, default=256, help="at most; 256 (default)")
    add("--temperature", type=float, default=0.0, help="0 (default): greedy")
    add("--top-k", type=int, default=0, help="draw from the k likeliest; 0 (default): from all")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest of this mass")
    add("--seed", type=int, default=0)
    add("--graphs", action="store_true", help="passes of few widths, on a GPU as CUDA graphs")
    add("--show", nargs="?", const="always", default="auto", choices=["auto", "always", "never"],
        help="colour guessed tokens (auto: on a terminal)")
    add("--compare", action="store_true", help="also decode token by token, and compare")
    add("--trace", type=Path, metavar="FILE.html", help="a page that steps through every call")
    add("--tune", action="store_true", help="search the fastest options for these prompts")
    add("--method", default=methods[0].__name__, choices=[f.__name__ for f in methods])


def add_own_options(parser: ArgumentParser, function) -> None:
    """Add the options of one method or command. An option that is not given is left out of what is
    parsed, so that the function's own default counts."""
    options = read_options(function)
    shown = []
    for name, (_, default) in options.items():
        shown.append(name if default is Parameter.empty else f"{name}={default!r}")
    group = parser.add_argument_group(f"{function.__name__}({', '.join(shown)})", getdoc(function))
    for name, (kind, default) in options.items():
        how = {"action": BooleanOptionalAction} if kind is bool else {"type": kind}
        group.add_argument(write_option(name), default=SUPPRESS,
                           required=default is Parameter.empty, **how)


def parse_command(command, argv: list[str]) -> Namespace:
    """Parse the command line of a command, such as `train`, which may take prompts or not."""
    parser = make_parser([command])
    add_model_options(parser, "target", "float32")
    if "prompts" in signature(command).parameters:
        add_prompt_options(parser)
    add_own_options(parser, command)
    return parser.parse_args(argv)


def parse_decoding(methods: list, target: str, argv: list[str]) -> Namespace:
    """Parse the command line of a decoding, which may have options of any of the methods."""
    parser = make_parser(methods)
    add_model_options(parser, target, None)
    add_prompt_options(parser)
    add_decoding_options(parser, methods)
    for method in methods:
        add_own_options(parser, method)
    return parser.parse_args(argv)


def select_options(args: Namespace, function, others: list) -> dict:
    """Return the function's own options that were given.

    args    what was parsed
    others  functions of the same file, whose options are parsed too. InputError for an option of
            theirs that the function does not have
    """
    own = read_options(function)
    for other in others:
        for name in read_options(other):
            if name in args and name not in own:
                raise InputError(f"{write_option(name)} is no option of {function.__name__}")
    return {name: vars(args)[name] for name in own if name in args}
