"""This file performs the commands of a method file: train, collect, measure.

A command is a function command(model, tokenizer, prompts if it takes them, **options). Its options
are made from its signature, as those of methods are, and one that trains has those of Settings too.
A training learns from prompts, which the model answers, or with --data from other answers.
"""
from argparse import Namespace
from contextvars import copy_context
from inspect import signature

from cli.main import Table, perform
from cli.options import (add_own_options, add_prompt_options, make_parser, read_options,
                         select_options)
from cli.prompts import encode_data, read_pairs
from support.engine import require
from support.files import check_result
from support.loading import load_checked
from training.settings import RANGES, SETTINGS, Settings

DATA = ('learn from answers made elsewhere, not from the model\'s own: {"prompt": "...", "answer": '
        '"..."} on a line, both texts or both lists of token ids, or {"messages": [...]}, of which '
        "the assistant's last one is the answer")


# ---------------------------------------------------------------------------------- its options

def is_training(command) -> bool:
    """Tell whether a command trains by training/loop.py, so that it has the options of Settings."""
    return {"steps", "lr", "work"} <= {*read_options(command)}


def parse_command(command, argv: list[str]) -> Namespace:
    """Parse the command line of a command, such as `train`, which may take prompts or not."""
    parser = make_parser(command, [f"{command.__name__} [options]"], "target")
    if "prompts" in signature(command).parameters:
        files = add_prompt_options(parser)
        if is_training(command):
            files.add_argument("--data", type=read_pairs, metavar="FILE", help=DATA)
    add_own_options(parser, [command, Settings] if is_training(command) else [command])
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------- the steps

def perform_command(command, argv: list[str]) -> int | None:
    """Call command(model, tokenizer, prompts if it takes them, **options): train, collect, measure.

    argv     the command line after the command's name
    returns  the exit status, or nothing if all went well
    """
    args = parse_command(command, argv)
    options = select_options(args, command, ranges=RANGES)
    settings = select_options(args, Settings, ranges=RANGES)
    if "out" in options:
        check_result("out", options["out"], "")
        require(options.get("work") != options["out"], "work", "another place than --out",
                repr(str(options["out"])))
    model, tokenizer = load_checked(args.target, args.device, args.dtype)
    if "prompts" in args:
        options["prompts"], settings["pairs"] = encode_data(model, tokenizer, args)
    context = copy_context()  # in which the settings end with the command
    context.run(SETTINGS.set, Settings(**settings))
    return context.run(command, model, tokenizer, **options)


def main(argv: list[str], **table) -> int | None:
    """Do what a command line of a method file says. Errors are raised, as a notebook wants it.

    argv     the command line after the file's name
    table    what the file says in its COMMAND_LINE, the fields of Table
    returns  the exit status. It is 1 if --compare found a difference
    """
    table = Table(**table)
    for command in table.commands:
        if argv[:1] == [command.__name__]:
            return perform_command(command, argv[1:])
    return perform(table, argv)
