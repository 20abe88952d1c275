"""Helpers that many test files use: the first tokens of a method, a command line, a call that is
refused, and one that Ctrl-C stops.

Tiny models are in families.py, scripted ones in fake_models.py, distributions in laws.py."""
import functools
import importlib
import itertools
import logging
import os
import runpy
import signal
import sys
from multiprocessing import get_context
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import common
from cli.commands import main as run_command_line
from cli.main import run_script
from cli.run import count_guesses
from common import InputError, until
from sources import ROOT
from support.loading import load

CLOSE = dict(atol=1e-4, rtol=1e-4)  # of numbers in float32
loaded = functools.cache(load)  # for command lines in one process: each model is read once


def tokens_of(chunks, n: int, eos=()) -> list[int]:
    """Take the first n tokens of a method's chunks, or those up to the first of `eos`."""
    return [token for chunk in until(chunks, n, eos) for token in chunk]


def check_refused(said: str, act, *args, **how) -> None:
    """Call act(*args, **how), which must raise an InputError of one line with this pattern."""
    with pytest.raises(InputError, match=said) as error:
        act(*args, **how)
    assert "\n" not in str(error.value)


def take(chunks, n: int) -> list[list[int]]:
    """Take a method's first n chunks."""
    return [*itertools.islice(chunks, n)]


def note_calls(monkeypatch, place, name: str) -> list[tuple]:
    """Let a function note the arguments of each call, and return the list of them."""
    given, act = [], getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args, **how: given.append(args) or act(*args, **how))
    return given


def status_of(act) -> int | None:
    """Return what act() returns, or the exit status with which it would end the process."""
    try:
        return act()
    except SystemExit as end:
        return end.code


def main(methods: list, report=count_guesses, argv: list = (), **table) -> int:
    """Run the command line of cli/, and return the exit status."""
    act = functools.partial(run_command_line, argv, methods=methods, report=report, **table)
    return status_of(lambda: run_script(act))


def file_of(*methods, commands: list = []) -> SimpleNamespace:
    """Make a method file, as far as a command line needs it."""
    return SimpleNamespace(COMMAND_LINE={"methods": methods, "commands": commands})


def run_small(file, argv: list[str]) -> int:
    """Run the command line of common.py for a method file, a module; return the exit status."""
    return status_of(lambda: common.main(argv=argv, **file.COMMAND_LINE)) or 0


def script(name: str, *argv) -> int:
    """Run the command line of cli/ for a method file, or another file as `python NAME.py ARGV`
    does; return the exit status."""
    module = importlib.import_module(name)
    if hasattr(module, "COMMAND_LINE"):
        return main(argv=[*argv], **module.COMMAND_LINE)
    with patch.object(sys, "argv", [f"{name}.py", *argv]):
        return status_of(lambda: runpy.run_module(name, run_name="__main__"))


def rows_of(lm) -> int:
    """Count the rows of all calls of a model."""
    return sum(rows for rows, read, _ in lm.passes if read)


def forget_project(folder=ROOT) -> None:
    """Forget all modules of a copy of the project, and where it is. Packages stay imported."""
    def lies_there(path: str) -> bool:
        return path.startswith(f"{folder}{os.sep}") and ".venv" not in path
    for name, module in [*sys.modules.items()]:
        # A folder without an __init__.py is a module too, which knows its modules, but has no file.
        known = vars(module)  # an attribute of a lazy module would be looked for in other packages
        if lies_there(str(known.get("__file__") or [*known.get("__path__", []), ""][0])):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if not lies_there(os.path.abspath(path) + os.sep)]


def fork(act, *args) -> tuple:
    """Start a process that ends with the status act(*args). As a fork of this one it need not
    import torch again, which takes seconds.

    returns  the process, and files for its output and its errors
    """
    ours, theirs = zip(os.pipe(), os.pipe())
    process = get_context("fork").Process(target=be_process, args=(theirs, ours, act, args))
    process.start()
    for number in theirs:
        os.close(number)
    return process, *map(open, ours)


def be_process(streams: list[int], others: list[int], act, args: tuple) -> None:
    """Be a process with these two streams; `others` are the ends that its parent holds."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    for number in [*streams, *others]:
        os.close(number)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")
    logging.getLogger("transformers").handlers = [logging.StreamHandler()]  # not its parent's
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores Ctrl-C
    # torch makes its pool of threads anew after a fork. Two threads that did so at once would fail.
    torch.set_num_threads(torch.get_num_threads())
    sys.exit(act(*args))


def interrupting(act, number: int):
    """Wrap `act` so that Ctrl-C comes at the end of its call of this number."""
    calls = itertools.count(1)

    def stopped(*args, **options):
        result = act(*args, **options)
        if next(calls) == number:
            raise KeyboardInterrupt
        return result
    return stopped
