"""Tells which file of a model is at fault when loading fails, and runs chat templates.

`common.load` says what transformers says. The functions here look at a directory that could not be
loaded, so that its user learns which file is wrong and what to do about it."""
from argparse import Namespace
from datetime import datetime
from functools import partial
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from huggingface_hub import constants, get_session, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers.utils import chat_template_utils

import support.recurrent  # noqa: F401  (it adds the cache of recurrent layers to common.py's)
from common import InputError, eos_ids, load
from support.files import check_file, explain_errors, read_json, shorten
from support.parts import refuse_integers
from training.loop import Pair

# The date that chat templates write into what a command learns from. With the date of the day a
# training that was stopped would have other prompts on the next day, and would begin anew.
DATE = datetime(2024, 7, 26)


# --------------------------------------------------------------------------------- the files

def load_checked(path: str, device: str | None, dtype: str | None) -> tuple:
    """Load a model and its tokenizer, and say in one line which file is wrong where one is.

    path, device, dtype   as `common.load` takes them
    returns               the model and its tokenizer; InputError for what cannot be used
    """
    folder = Path(path)
    if (folder / "adapter_config.json").exists():  # transformers may load it, or may ignore it
        raise InputError(f"expected a whole model, got {path!r} with adapter_config.json: a LoRA "
                         "adapter must be merged into its base model first")
    if not folder.exists():
        with explain_errors("a hub id that can be reached, as there is no such directory", path):
            if not try_to_load_from_cache(path, "config.json"):
                get_session().head(constants.ENDPOINT, timeout=9)  # offline, `load` tries a minute
    try:
        model, tokenizer = load(path, device, dtype)
        refuse_integers(model, path)
        return model, tokenizer
    except InputError as error:
        found = find_fault(folder, str(error.__cause__))  # whole: the error's own text is cut
        if not found:
            raise
        raise InputError(f"expected a model that can be loaded, got {path!r}: {found}") from error


def find_fault(folder: Path, said: str) -> str:
    """Say what is wrong with a model's directory; an empty text where no file shows it.

    folder   the directory
    said     what transformers said about it
    """
    if "trust_remote_code" in said:
        return "it brings code of its own, which is never run here"
    if folder.is_dir() and not (folder / "config.json").exists():
        config = next(folder.rglob("config.json"), None)
        return f"it has no config.json{f', but {str(config.parent)!r} has' if config else ''}"
    tensors, texts = sorted(folder.glob("*.safetensors")), sorted(folder.glob("*.json"))
    for file in [*tensors, *sorted(folder.glob("*.bin")), *texts]:
        try:
            check_file(file)
            if file in tensors:
                safe_open(file, "pt")  # it reads where each tensor lies
            facts = read_json(file) if file in texts else {}
        except (SafetensorError, OSError, ValueError) as error:
            return f"{file.name} is cut off or damaged: {shorten(error)}"
        if file.name == "config.json" and {"quantization", "quantization_config"} & {*facts}:
            return "its weights are quantised; take the model that it was made from"
    if "backend tokenizer" in said and not (folder / "tokenizer.json").exists():
        return "it has no tokenizer.json"
    return ""


# ------------------------------------------------------------------------------- the prompts

def encode_prompts(model, tokenizer, texts: list[str], chat: bool) -> list[list[int]]:
    """Turn prompts into token ids that a model has embeddings for.

    texts    the prompts
    chat     whether each is put into the model's chat template
    returns  token ids, a list for each prompt. InputError for a prompt that cannot be used
    """
    rows = len(model.get_input_embeddings().weight)
    found = []
    for text in texts:
        text.encode()  # UnicodeError for halves of characters, which no tokenizer takes
        ids = tokenizer.encode(text)  # with the special tokens that the tokenizer adds
        if set(ids) <= set(tokenizer.all_special_ids):
            raise InputError(f"expected a prompt with some text, got {text[:300]!r}")
        if chat:
            ids = tokenizer.encode(fill_template(tokenizer, text), add_special_tokens=False)
        if max(ids) >= rows:
            token = tokenizer.convert_ids_to_tokens(max(ids))
            raise InputError(f"expected tokens that the model has embeddings for, {rows} of them, "
                             f"got {token!r} with id {max(ids)}")
        found.append(ids)
    return found


def fill_template(tokenizer, text: str) -> str:
    """Put a prompt into the chat template, as the message of a user.

    raises   InputError where there is no template, or where it does not take the prompt
    """
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    try:
        filled = render([{"role": "user", "content": text}])
        # A template may change a text, such as its blanks. Then another text shows if it is used.
        if text not in filled and filled == render([{"role": "user", "content": f"{text}?"}]):
            raise ValueError("it leaves the prompt out")
    except Exception as error:  # a template is a program of somebody else's
        raise InputError("--chat must find a chat template that takes a prompt, but the model's "
                         f"says: {shorten(error) or type(error).__name__}") from error
    return filled


def open_chat(tokenizer) -> list[int]:
    """Return the tokens that the chat template puts before the words of a user."""
    # Two texts with no letter in common show where the words of a user begin.
    before = commonprefix([fill_template(tokenizer, text) for text in ("one", "Two")])
    return tokenizer.encode(before, add_special_tokens=False)


def encode_data(model, tokenizer, args: Namespace) -> tuple[list[list[int]], list[Pair] | None]:
    """Turn what a command learns from into token ids: --prompts, or --data where it is given.

    args      the parsed command line
    returns   token ids of the prompts, and the pairs of --data
    """
    rows = getattr(args, "data", None)
    # `strftime_now` of templates asks this name for the date.
    with patch.object(chat_template_utils, "datetime", SimpleNamespace(now=lambda: DATE)):
        if rows is None:
            return encode_prompts(model, tokenizer, args.prompts, args.chat), None
        pairs = [encode_pair(model, tokenizer, row, args.chat) for row in rows]
    return [prompt for prompt, _ in pairs], pairs


def encode_pair(model, tokenizer, row: dict, chat: bool) -> Pair:
    """Turn a line of --data into token ids; InputError that names the line if it cannot be used.

    row      what `read_pairs` returned for the line
    chat     whether a prompt is put into the chat template. Messages always are
    returns  token ids of the prompt and of the answer. The answer of a text ends with its first
             token that ends an answer, or else with the tokenizer's EOS
    """
    prompt, answer, messages = (row.get(name) for name in ("prompt", "answer", "messages"))
    rows, eos = len(model.get_input_embeddings().weight), eos_ids(model, tokenizer)
    try:
        if messages is None and chat and isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt},
                        {"role": "assistant", "content": answer}]
        if messages is not None:
            prompt, answer = render_pair(tokenizer, messages, row.get("tools"))
        if isinstance(prompt, str):
            prompt, answer = split_texts(tokenizer, prompt, answer, messages is None)
            if tokenizer.eos_token_id is None:
                raise ValueError("the tokenizer has no EOS, with which an answer of text ends")
            answer = [*answer, tokenizer.eos_token_id]
            end = next(i for i, token in enumerate(answer, 1) if token in eos)
            answer = answer[:end]
        if not prompt or not answer or min(prompt + answer) < 0 or max(prompt + answer) >= rows:
            raise ValueError(f"it has no tokens, or others than those from 0 to {rows - 1}")
    except Exception as error:  # a template and a tokenizer raise errors of any kind
        raise InputError("--data must hold texts that the model's tokenizer takes, got "
                         f"{row['where']}: {shorten(error)}") from error
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


def render_pair(tokenizer, messages: list[dict], tools: list | None) -> tuple[str, str]:
    """Run the chat template on messages that end with one of the assistant.

    tools    what the assistant may call
    returns  the text up to the answer, and the answer with all that the template adds to it
    raises   ValueError where the template leaves out a text of the answer, or begins answers in two
             ways. What it leaves out of the messages before, it leaves out of a prompt as well
    """
    render = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
    whole = render(messages)
    opened = render(messages[:-1], add_generation_prompt=True)
    prompt = commonprefix([opened, whole])
    # Some templates open a thought for the model, and write answers without their thoughts.
    begin = opened.removeprefix(prompt)
    if begin and "think" not in begin:
        raise ValueError(f"the chat template begins answers with {begin!r}, but not this one")
    answer = whole[len(prompt):]
    letters = "".join(answer.split())  # some templates change blanks
    for name, value in messages[-1].items():
        if name != "role" and isinstance(value, str) and "".join(value.split()) not in letters:
            raise ValueError(f"the chat template leaves out {name!r}")
    return prompt, answer
