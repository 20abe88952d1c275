"""Performs the commands of a method file: train, collect, measure.

A command is a function command(model, tokenizer, prompts if it takes them, **options). Its options
are made from its signature, as those of methods are, and one that trains has those of Settings too.
A training learns from prompts, which the model answers, or with --data from other answers.
"""
import json
import sys
from argparse import Namespace
from datetime import datetime
from functools import partial
from inspect import signature
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from transformers.utils import chat_template_utils

from cli.files import read_lines, read_prompts
from cli.loading import encode_prompts
from cli.main import Table, perform, run_script
from cli.options import (add_own_options, add_prompt_options, make_parser, read_options,
                         select_options)
from common import eos_ids, until
from support.engine import require
from support.files import check_result, explain_errors
from support.loading import load_checked
from training.settings import RANGES, Pair, Settings, use_settings

# The date that chat templates write into what a command learns from. With the date of the day a
# training that was stopped would have other prompts on the next day, and would begin anew.
DATE = datetime(2024, 7, 26)
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


# ------------------------------------------------------------------------ prompts with answers

def read_pairs(path: str | Path) -> list[dict]:
    """Read a file of prompts with answers, JSON lines; argparse takes this function as a type.

    path     the file. A line is {"prompt", "answer"}, both texts or both lists of token ids, or
             {"messages"}, of which the last one is the assistant's, and which may come with
             {"tools"}. `encode_pair` refuses any other line
    returns  the dictionary of each line, as `read_lines` does
    """
    return read_lines(path, json.loads, 'lines of {"prompt", "answer"} or {"messages"}')


def encode_data(model, tokenizer, args: Namespace) -> tuple[list[list[int]], list[Pair] | None]:
    """Turn what a command learns from into token ids: --prompts, or --data where it is given.

    args      the parsed command line
    returns   token ids of the prompts, and the pairs of --data
    """
    rows = getattr(args, "data", None)
    # `strftime_now` of templates asks this name for the date.
    with patch.object(chat_template_utils, "datetime", SimpleNamespace(now=lambda: DATE)):
        if rows is None:
            texts = args.prompts or read_prompts()
            return encode_prompts(model, tokenizer, texts, args.chat), None
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
            ended = iter([[*answer, tokenizer.eos_token_id]])
            [answer] = until(ended, len(answer) + 1, eos_ids(model, tokenizer))
        wrong = {*prompt, *answer} - {*range(vocab)}
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
    with use_settings(Settings(**settings)):
        return command(model, tokenizer, **options)


def main(argv: list[str] | None = None, **table) -> int:
    """Be the command line of a method file.

    argv     the command line. Default: the one of this process
    table    what the file says in its COMMAND_LINE, the fields of Table
    returns  the exit status. It is 1 if --compare found a difference, and else that of `run_script`
    """
    argv, table = sys.argv[1:] if argv is None else argv, Table(**table)
    for command in table.commands:
        if argv[:1] == [command.__name__]:
            return run_script(lambda: perform_command(command, argv[1:]))
    return run_script(lambda: perform(table, argv))
