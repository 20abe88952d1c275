"""This file reads files of prompts, and of prompts with answers; argparse prints what is wrong."""
import argparse
import json
from pathlib import Path
from typing import Callable


def read_prompts(path: str | Path) -> list[str]:
    """Read the prompts of a file, one a line or JSON lines; argparse takes this function as a type.

    path     a file that `read_rows` reads, for example what `python models/tasks.py N` prints
    returns  for each line what it has as "prompt", as "question" or first in "turns";
             a plain line itself
    """
    return [prompt_of(row) for row in read_rows(path)]


def read_lines(path: str | Path):
    """Yield (number from 1, line) for each line of a file in UTF-8 that is not blank."""
    text = Path(path).read_text(encoding="utf-8-sig")
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removeprefix("\ufeff")  # several files in one have their marks within
        if line.strip():
            yield number, line


def read_rows(path: str | Path) -> list[dict]:
    """Read the lines of a file of prompts, which is UTF-8 with or without a byte order mark.

    path     the file. Lines that begin with "{" are JSON, and so are all lines of a file that is
             named *.jsonl. Blank lines are left out.
    returns  a dictionary for each line, {"prompt": line} for a plain one
    raises   ArgumentTypeError, a line that argparse prints, where no prompts are to be had
    """
    is_json = Path(path).suffix.lower() == ".jsonl"
    rows = parse_lines(path, lambda line: parse_line(line, is_json), prompt_of,
                       "a file of prompts, one a line or JSON lines, in UTF-8")
    return [*rows.values()]


def read_pairs(path: str | Path) -> list[dict]:
    """Read a file of prompts with answers, JSON lines; argparse takes this function as a type.

    path     the file, UTF-8 with or without a byte order mark. A line is {"prompt", "answer"}, both
             texts or both lists of token ids, or {"messages"}, of which the last one is the
             assistant's, and which may come with {"tools"}. Blank lines are left out
    returns  the dictionary of each line, to which "where" is added: the file and the line's number
    raises   ArgumentTypeError, a line that argparse prints, for a line that is none of these
    """
    rows = parse_lines(path, parse_pair, str, 'lines of {"prompt", "answer"} or {"messages"}')
    return [row | {"where": f"{str(path)!r}, line {number}"} for number, row in rows.items()]


def parse_lines(path: str | Path, parse: Callable, text_of: Callable,
                expected: str) -> dict[int, dict]:
    """Read all lines of a file.

    parse     turns a line into a dictionary, or raises a ValueError
    text_of   gives the text of a dictionary. One line at least must have some
    expected  what the message of an ArgumentTypeError says was expected
    returns   the dictionaries by the numbers of their lines, from 1
    """
    rows, where = {}, ""
    try:
        for number, line in read_lines(path):
            where = f", line {number}"
            rows[number] = parse(line)
        where = ""
        if not "".join(map(text_of, rows.values())):
            raise ValueError("nothing in it")
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {str(path)!r}{where}: "
                                         f"{error}") from error
    return rows


def parse_json(line: str):
    """Parse a line; the ValueError for one that is no JSON says where."""
    try:
        return json.loads(line.strip())
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at column {error.colno}") from error


def parse_pair(line: str) -> dict:
    """Return what a line says; ValueError unless it has a prompt with an answer, or messages."""
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    if row.get("messages") is not None:
        check_messages(row["messages"])
        return row
    kinds = set()
    for name in "prompt", "answer":
        if name not in row:
            raise ValueError(f"it has no {name}")
        value = row[name]
        ids = isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)
        if not (ids or isinstance(value, str)) or not value:
            raise ValueError(f"its {name} is no text and no list of token ids, or is empty")
        kinds.add(type(value))
    if len(kinds) > 1:
        raise ValueError("prompt and answer are not both texts or both token ids")
    return row


def check_messages(messages: object) -> None:
    """Raise a ValueError unless these are messages, and the last one says something."""
    whole = isinstance(messages, list) and len(messages) > 1 and all(
        isinstance(x, dict) and isinstance(x.get("role"), str)
        and isinstance(x.get("content"), str | None) for x in messages)
    if not whole:
        raise ValueError('messages are not two or more of {"role", "content"}')
    if messages[-1]["role"] != "assistant":
        raise ValueError("the last message is not the assistant's")
    if not any(value for key, value in messages[-1].items() if key != "role"):
        raise ValueError("the last message says nothing")


def parse_line(line: str, is_json: bool) -> dict:
    """Return what a line of a file of prompts says; ValueError where it has no prompt."""
    if not is_json and not line.lstrip().startswith("{"):
        return {"prompt": line}
    row = parse_json(line)
    try:
        prompt = prompt_of(row)
    except (LookupError, TypeError, AttributeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ValueError('no text under "prompt", "question" or "turns"')
    return row


def prompt_of(row: dict) -> str:
    """Return the prompt of a line: "prompt", or else "question", or else the first of "turns"."""
    prompt = row.get("prompt", row.get("question"))
    return prompt if prompt else row["turns"][0]
