"""This file reads files of prompts, and of prompts with answers; argparse prints what is wrong."""
import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Callable

from support.files import explain


def read_prompts(path: str | Path) -> list[str]:
    """Read the prompts of a file, one a line or JSON lines; argparse takes this function as a type.

    path     a file that `read_rows` reads, for example what `python models/tasks.py N` prints
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


def read_pairs(path: str | Path) -> list[dict]:
    """Read a file of prompts with answers, JSON lines; argparse takes this function as a type.

    path     the file. A line is {"prompt", "answer"}, both texts or both lists of token ids, or
             {"messages"}, of which the last one is the assistant's, and which may come with
             {"tools"}
    returns  the dictionary of each line, as `read_lines` does
    raises   ArgumentTypeError for a line that is none of these
    """
    return read_lines(path, parse_pair, 'lines of {"prompt", "answer"} or {"messages"}')


def read_lines(path: str | Path, parse: Callable, expected: str) -> list[dict]:
    """Read all lines of a file in UTF-8, with or without a byte order mark, that are not blank.

    parse     turns a line into a dictionary, or raises an error
    expected  what the message of an ArgumentTypeError says was expected
    returns   the dictionary of each line, to which "where" is added: the file and the line's number
    raises    ArgumentTypeError, a line that argparse prints
    """
    rows, where = [], repr(str(path))
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                where = f"{str(path)!r}, line {number}"
                rows.append(parse(line) | {"where": where})
        if not rows:
            raise ValueError("nothing is in it")
    except Exception as error:  # json and a line of another form raise errors of many kinds
        raise ArgumentTypeError(f"expected {expected}, got {where}: {explain(error)}") from error
    return rows


def parse_row(line: str) -> dict:
    """Return what a line of a file of prompts says; an error if it has no prompt."""
    if not line.lstrip().startswith("{"):
        return {"prompt": line}
    row = json.loads(line.strip())
    prompt = row.get("prompt") or row.get("question") or row["turns"][0]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError('no text under "prompt", "question" or "turns"')
    return row | {"prompt": prompt}


def parse_pair(line: str) -> dict:
    """Return what a line says; an error unless it has a prompt with an answer, or messages."""
    row = json.loads(line.strip())
    messages = row.get("messages")
    if messages is not None:
        kinds = {type(message.get("content")) for message in messages}
        ends = messages[-1]["role"] == "assistant"
        if len(messages) < 2 or not ends or not kinds <= {str, type(None)}:
            raise ValueError('messages are not two or more of {"role", "content"}, of which the '
                             "last one is the assistant's")
        return row
    prompt, answer = row["prompt"], row["answer"]
    kinds = {type(prompt), type(answer)}
    are_texts = kinds == {str}
    are_ids = kinds == {list} and {type(token) for token in prompt + answer} == {int}
    if not prompt or not answer or not (are_texts or are_ids):
        raise ValueError("prompt and answer are not both texts or both token ids, or one is empty")
    return row
