"""This file reads files of prompts; argparse prints what is wrong with them."""
import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Callable

from support.engine import MODELS
from support.files import explain


def read_prompts(path: str | Path = MODELS / "examples.jsonl") -> list[str]:
    """Read the prompts of a file, one a line or JSON lines; argparse takes this function as a type.

    path     a file that `read_rows` reads, for example what `python models/tasks.py N` prints. The
             default has three examples, for a command line without prompts
    """
    return [row["prompt"] for row in read_rows(path)]


def read_rows(path: str | Path) -> list[dict]:
    """Read the lines of a file of prompts.

    path     the file. Lines that begin with "{" are JSON
    returns  a dictionary for each line, as `read_lines` does. Its "prompt" is what the line has as
             "prompt", as "question" or first in "turns", or a plain line itself
    raises   ArgumentTypeError for a line without a prompt
    """
    return read_lines(path, parse_row, "a file of prompts, one a line or JSON lines, in UTF-8")


def read_lines(path: str | Path, parse: Callable, expected: str) -> list[dict]:
    """Read all lines of a file in UTF-8, with or without a byte order mark, that are not blank.

    parse     turns a line into a dictionary, or raises an error
    expected  what the message of an ArgumentTypeError says was expected
    returns   the dictionary of each line, to which "where" is added: the file and the line's number
    raises    ArgumentTypeError, a line that argparse prints
    """
    rows, where = [], str(path)
    try:
        if Path(path).suffix.lower() in (".csv", ".tsv"):
            raise ValueError("a table, which has a header and columns")
        text = Path(path).read_text(encoding="utf-8-sig")
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                where = f"{path}, line {number}"
                rows.append({**parse(line), "where": where})  # a list is no mapping
        if not rows:
            raise ValueError("nothing is in it")
    except Exception as error:  # json and a line of another form raise errors of many kinds
        raise ArgumentTypeError(f"expected {expected}, got {where!r}: {explain(error)}") from error
    return rows


def parse_row(line: str) -> dict:
    """Return what a line of a file of prompts says; an error if it has no prompt."""
    text = line.strip()
    if text != "[" and not text.startswith(("{", "[{")):  # with [ a list of dictionaries begins
        return {"prompt": line}
    row = {**json.loads(text)}
    turns = row.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    prompt = row.get("prompt") or row.get("question") or first
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'no text under "prompt", "question" or first in "turns", only {[*row]}')
    return row | {"prompt": prompt}
