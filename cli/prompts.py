"""Reads all prompts that come in: as arguments, from standard input, and from files, as texts or as
prompts with answers. It puts them into a chat template if there is one, and into token ids.

argparse calls `read_prompts` and `read_pairs` and prints what is wrong with a file. Functions that
need a model and its tokenizer raise an InputError."""
import io
import json
import sys
from argparse import ArgumentTypeError, Namespace
from datetime import datetime
from functools import partial
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace
from typing import Callable
from unittest.mock import patch

from transformers.utils import chat_template_utils

from common import InputError, eos_ids, until
from support.engine import MODELS, require
from support.files import explain_errors, shorten
from training.settings import Pair

# The date that chat templates write into what a command learns from. With the date of the day a
# training that was stopped would have other prompts on the next day, and would begin anew.
DATE = datetime(2024, 7, 26)


# ---------------------------------------------------------------------------------- the texts

def read_texts(given: list[str], others: list[str] | None) -> list[str]:
    """Return the prompts of a command line, or three examples if it has none.

    given    the texts of --prompt, among which "-" stands for standard input. With some of them
             the others are not read
    others   the texts of --prompts
    """
    texts = [read_input() if text == "-" else text for text in given]
    return texts or others or read_prompts()


def read_input() -> str:
    """Return the text on standard input.

    It is UTF-8, may begin with a byte order mark, and may have the line ends of any system.
    UnicodeError if it is not UTF-8.
    """
    return io.TextIOWrapper(io.BytesIO(sys.stdin.buffer.read()), "utf-8-sig").read()


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


def read_pairs(path: str | Path) -> list[dict]:
    """Read a file of prompts with answers, JSON lines; argparse takes this function as a type.

    path     the file. A line is {"prompt", "answer"}, both texts or both lists of token ids, or
             {"messages"}, of which the last one is the assistant's, and which may come with
             {"tools"}. `encode_pair` refuses any other line
    returns  the dictionary of each line, as `read_lines` does
    """
    return read_lines(path, json.loads, 'lines of {"prompt", "answer"} or {"messages"}')


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
        for number, line in enumerate(Path(path).read_text("utf-8-sig").split("\n"), 1):
            if line.strip():
                where = f"{path}, line {number}"
                rows.append({**parse(line), "where": where})  # a list is no mapping
        if not rows:
            raise ValueError("nothing is in it")
    except Exception as error:  # json and a line of another form raise errors of many kinds
        raise ArgumentTypeError(f"expected {expected}, got {where!r}: {shorten(error)}") from error
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


# ------------------------------------------------------------------------------ their token ids

def encode_prompts(model, tokenizer, texts: list[str], chat: dict | None,
                   said: list[dict] = []) -> list[list[int]]:
    """Turn prompts into token ids that a model has embeddings for.

    texts    the prompts
    chat     settings of the model's chat template, into which each is put. None: into no template
    said     messages that come before each prompt in the template: {"role", "content"}
    returns  token ids, a list for each prompt. InputError for a prompt that cannot be used
    """
    rows = len(model.get_input_embeddings().weight)
    found = []
    for text in texts:
        text.encode()  # UnicodeError for halves of characters, which no tokenizer takes
        ids = tokenizer.encode(text)  # with the special tokens that the tokenizer adds
        if set(ids) <= set(tokenizer.all_special_ids):
            raise InputError(f"expected a prompt with some text, got {text[:300]!r}")
        if chat is not None:
            with explain_errors("a chat template that takes a prompt, as --chat needs one",
                                tokenizer.name_or_path):  # a program of somebody else's
                messages = [*said, {"role": "user", "content": text}]
                text = tokenizer.apply_chat_template(messages, **chat, tokenize=False,
                                                     add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)
            require(ids != [], "chat", "for a chat template that says something", repr(text))
        if max(ids) >= rows:
            token = tokenizer.convert_ids_to_tokens(max(ids))
            raise InputError(f"expected tokens that the model has embeddings for, {rows} of them, "
                             f"got {token!r} with id {max(ids)}")
        found.append(ids)
    return found


def encode_data(model, tokenizer, args: Namespace) -> tuple[list[list[int]], list[Pair] | None]:
    """Turn what a command learns from into token ids: --prompts, or --data where it is given.

    args      the parsed command line
    returns   token ids of the prompts, and the pairs of --data
    """
    rows = getattr(args, "data", None)
    # `strftime_now` of templates asks this name for the date.
    with patch.object(chat_template_utils, "datetime", SimpleNamespace(now=lambda: DATE)):
        if rows is None:
            return encode_prompts(model, tokenizer, read_texts([], args.prompts), args.chat), None
        pairs = [encode_pair(model, tokenizer, row, args.chat) for row in rows]
    return [prompt for prompt, _ in pairs], pairs


def encode_pair(model, tokenizer, row: dict, chat: dict | None) -> Pair:
    """Turn a line of --data into token ids; InputError that names the line if it cannot be used.

    row      what `read_pairs` returned for the line
    chat     settings of the chat template, into which a prompt is put. None: only messages are
    returns  token ids of the prompt and of the answer. The answer of a text ends with its first
             token that ends an answer, or else with the tokenizer's EOS
    """
    vocab = len(model.get_input_embeddings().weight)
    messages = row.get("messages")
    # A template and a tokenizer raise errors of any kind.
    with explain_errors("prompts and answers in --data that the model's tokenizer takes",
                        row["where"]):
        if messages is None:
            prompt, answer = row["prompt"], row["answer"]
            if not prompt or not answer:
                raise ValueError("its prompt or its answer is empty")
            if chat is not None and isinstance(prompt, str):
                messages = [{"role": "user", "content": prompt},
                            {"role": "assistant", "content": answer}]
        if messages is not None:
            prompt, answer = render_pair(tokenizer, messages, row.get("tools"), chat or {})
        if isinstance(prompt, str):
            prompt, answer = split_texts(tokenizer, prompt, answer, messages is None)
            whole = [*answer, tokenizer.eos_token_id]
            answer = next(until(iter([whole]), len(whole), eos_ids(model, tokenizer)))
        wrong = [x for x in {*prompt, *answer} if x not in range(vocab)]
        if wrong:
            raise ValueError(f"the model has tokens from 0 to {vocab - 1}, and not {min(wrong)!r}")
    return prompt, answer


def split_texts(tokenizer, prompt: str, answer: str, special: bool) -> Pair:
    """Turn a prompt and the answer that follows it into token ids.

    special  whether the tokenizer adds its special tokens before the prompt
    """
    ids, whole = (tokenizer.encode(text, add_special_tokens=special)
                  for text in (prompt, prompt + answer))
    # Some tokenizers put a blank before a text. So the answer is taken out of the whole, unless a
    # token is of both.
    if whole[:len(ids)] == ids:
        return ids, whole[len(ids):]
    return ids, tokenizer.encode(answer, add_special_tokens=False)


def render_pair(tokenizer, messages: list[dict], tools: list | None,
                settings: dict) -> tuple[str, str]:
    """Run the chat template on messages that end with one of the assistant.

    tools    what the assistant may call
    settings other settings of the template
    returns  the text up to the answer, and the answer with all that the template adds to it
    raises   ValueError if the messages do not end so, or if the template leaves out a text of the
             answer or any tool call, or begins answers in two ways. What else it leaves out of the
             messages before, it leaves out of a prompt as well
    """
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError("its messages are not two or more, with the assistant's at the end")
    render = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False, **settings)
    whole = render(messages)
    opened = render(messages[:-1], add_generation_prompt=True)
    prompt = commonprefix([opened, whole])
    # Some templates open a thought for the model, and write answers without their thoughts.
    begin = opened.removeprefix(prompt)
    if begin and "think" not in begin:
        raise ValueError(f"the chat template begins answers with {begin!r}, but not this one")
    answer = whole[len(prompt):]
    require_texts(messages[-1], answer)
    require_texts({"tool_calls": [message.get("tool_calls") for message in messages]}, whole)
    return prompt, answer


def require_texts(fields: dict, rendered: str) -> None:
    """Raise a ValueError that names a field of a message if the chat template leaves it out.

    fields    values by name, texts or what has texts in it, such as calls of tools
    rendered  what the template made of the message
    """
    letters = "".join(rendered.split())  # some templates change blanks
    for name, value in fields.items():
        for text in list_texts({name: value}):
            forms = text, json.dumps(text, ensure_ascii=False)[1:-1]  # calls are often JSON
            if not any("".join(form.split()) in letters for form in forms):
                raise ValueError(f"the chat template leaves out {name!r}")


def list_texts(value) -> list[str]:
    """Return the texts in a value, but no role, and no id or type of a tool call."""
    if isinstance(value, dict):
        value = [x for name, x in value.items() if name not in ("role", "id", "type")]
    if isinstance(value, list):
        return [text for x in value for text in list_texts(x)]
    return [value] if isinstance(value, str) else []
