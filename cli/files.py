"""This file reads files of prompts, and of prompts with answers; argparse prints what is wrong."""
import argparse
import json
from pathlib import Path


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
    rows, number = [], 0
    try:
        for number, line in read_lines(path):
            rows.append(parse_line(line, Path(path).suffix.lower() == ".jsonl"))
    except (OSError, ValueError, RecursionError) as error:
        where = f"line {number}: " if number else ""
        refuse_prompts(path, f"{where}{error}", error)
    if not "".join(map(prompt_of, rows)):
        refuse_prompts(path, "no prompt in it")
    return rows


def read_pairs(path: str | Path) -> list[dict]:
    """Read a file of prompts with answers, JSON lines; argparse takes this function as a type.

    path     the file, UTF-8 with or without a byte order mark. A line is {"prompt", "answer"}, both
             texts or both lists of token ids, or {"messages"}, of which the last one is the
             assistant's, and which may come with {"tools"}. Blank lines are left out
    returns  the dictionary of each line, to which "where" is added: the file and the line's number
    raises   ArgumentTypeError, a line that argparse prints, for a line that is none of these
    """
    rows, number = [], 0
    try:
        for number, line in read_lines(path):
            row = parse_pair(line)
            rows.append(row | {"where": f"{str(path)!r}, line {number}"})
        number = 0
        if not rows:
            raise ValueError("no line in it")
    except (OSError, ValueError, RecursionError) as error:
        where = f", line {number}" if number else ""
        raise argparse.ArgumentTypeError(
            'expected lines of {"prompt", "answer"} or {"messages"}, got '
            f"{str(path)!r}{where}: {error}") from error
    return rows


def parse_pair(line: str) -> dict:
    """Return what a line says; ValueError unless it has a prompt with an answer, or messages."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at column {error.colno}") from error
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
    """Raise a ValueError unless these are messages, of which the last one says something."""
    whole = isinstance(messages, list) and len(messages) > 1 and all(
        isinstance(x, dict) and isinstance(x.get("role"), str)
        and isinstance(x.get("content"), str | None) for x in messages)
    if not whole:
        raise ValueError('messages are not two or more of {"role", "content"}')
    if messages[-1]["role"] != "assistant":
        raise ValueError("the last message is not the assistant's")
    if not any(value for key, value in messages[-1].items() if key != "role"):
        raise ValueError("the last message says nothing")


def refuse_prompts(path: str | Path, reason: str, error: Exception | None = None) -> None:
    """Raise the error that a file of prompts cannot be used, for this reason."""
    raise argparse.ArgumentTypeError("expected a file of prompts, one a line or JSON lines, in "
                                     f"UTF-8, got {str(path)!r}: {reason}") from error


def parse_line(line: str, is_json: bool) -> dict:
    """Return what a line of a file of prompts says; ValueError where it has no prompt."""
    if not is_json and not line.lstrip().startswith("{"):
        return {"prompt": line}
    try:
        row = json.loads(line.strip())
        prompt = prompt_of(row)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at column {error.colno}") from error
    except (LookupError, TypeError, AttributeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ValueError('no text under "prompt", "question" or "turns"')
    return row


def prompt_of(row: dict) -> str:
    """Return the prompt of a line: "prompt", or else "question", or else the first of "turns"."""
    prompt = row.get("prompt", row.get("question"))
    return prompt if prompt else row["turns"][0]
