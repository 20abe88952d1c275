"""Tells which file of a model is at fault when loading fails, and runs chat templates.

`common.load` says what transformers says. The functions here look at a directory that could not be
loaded, so that its user learns which file is wrong and what to do about it."""
import re
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import constants, get_session, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.utils import chat_template_utils

from common import CachedLM, InputError, check, encode, eos_ids, load
from training.files import check_file, read_json, shorten, write_text
from training.loop import Pair, Settings

LORA = "a LoRA adapter, which must be merged into its base model first"


# --------------------------------------------------------------------------------- the files

def load_checked(path: str, device: str | None, dtype: str | None) -> tuple:
    """Load a model and its tokenizer, and say in one line which file is wrong where one is.

    path, device, dtype   as `common.load` takes them
    returns               the model and its tokenizer; InputError for what cannot be used
    """
    folder = Path(path)
    if folder.is_file():
        raise InputError(f"expected a model that can be loaded, got {path!r}: it is a file, not a "
                         "directory")
    if (folder / "adapter_config.json").exists():  # transformers may load it, or may ignore it
        raise InputError(f"expected a whole model, got {path!r} with adapter_config.json: it holds "
                         f"{LORA}")
    try:
        if not (folder.exists() or try_to_load_from_cache(path, "config.json")):
            get_session().head(constants.ENDPOINT, timeout=9)  # offline, `load` tries a minute
    except Exception as error:  # the name is no hub id, or the network fails in one of many ways
        raise InputError("expected a model directory or hub id that can be reached, got "
                         f"{path!r}: {shorten(error)}") from error
    try:
        model, tokenizer = load(path, device, dtype, **change_settings(path))
        if window_of(model) is not None:  # else `load` has checked all that there is
            check_passes(model)
        return model, tokenizer
    except InputError as error:
        found = find_fault(folder, str(error.__cause__))  # whole: the error's own text is cut
        if found:
            raise InputError(f"expected a model that can be loaded, got {path!r}: "
                             f"{found}") from error
        raise
    except Exception as error:  # a pass that does not take what it is given raises anything
        raise InputError("expected a model that takes positions, a mask and a cache, got "
                         f"{path!r}: {shorten(error)}") from error


def change_settings(path: str) -> dict:
    """Return arguments for `common.load`: the configuration of a model, if it must be another one.

    A pass must return its logits by name. A mixture of experts that returns its router's logits
    computes a loss of them as well, which expects a mask of another form.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception:  # `load` meets the same error, and says it
        return {}
    text = config.get_text_config()
    if config.return_dict and not getattr(text, "output_router_logits", False):
        return {}
    config.return_dict = True
    text.output_router_logits = False
    return {"config": config}


def window_of(model) -> int | None:
    """Return the window of a model's configuration, which not all families heed."""
    return getattr(model.config.get_text_config(), "sliding_window", None)


def check_passes(model, run_as: type[CachedLM] = CachedLM):
    """Check a model once more, with windows that are narrower than the tree of the check.

    Some families ignore the setting of a window, which a conversion may have left in the file. A
    model that passes the check only without windows loses the setting.

    model    a model that `common.check` lets pass, whose settings are changed in place
    run_as   the kind of CachedLM that is checked
    returns  the same model. InputError if it fails
    """
    config, window = model.config.get_text_config(), window_of(model)
    try:
        if window is not None:
            config.sliding_window = 2
            try:
                return check(model, run_as)
            except InputError:
                window = None
            finally:
                config.sliding_window = window
        return check(model, run_as)
    except InputError:
        raise
    except Exception as error:  # a pass that does not take them raises anything
        raise InputError("expected a model that takes positions, a mask and a cache, got "
                         f"{type(model).__name__}: {shorten(error)}") from error


def find_fault(folder: Path, said: str) -> str:
    """Say what is wrong with a model's directory; an empty text where no file shows it.

    folder   the directory
    said     what transformers said about it
    """
    if "trust_remote_code" in said:
        return "it brings code of its own, which is never run here"
    if folder.is_dir() and not (folder / "config.json").exists():
        return "it has no config.json, which every model of transformers has"
    weights = sorted(folder.glob("*.safetensors"))
    names = []
    for file in [*weights, *sorted(folder.glob("*.bin")), *sorted(folder.glob("*.json"))]:
        try:
            check_file(file)
            if file in weights:
                with safe_open(file, "pt") as tensors:
                    names += tensors.keys()
            is_told = file.name.endswith((".index.json", "config.json"))
            facts = read_json(file) if is_told else {}
        except (SafetensorError, OSError, ValueError) as error:
            return f"{file.name} is cut off or damaged: {shorten(error)}"
        listed = {*facts.get("weight_map", {}).values()}
        lacking = sorted(name for name in listed if not (folder / name).exists())
        if lacking:
            return f"{len(lacking)} of its {len(listed)} files are missing, as {lacking[0]}"
        if file.name == "config.json" and {"quantization", "quantization_config"} & {*facts}:
            return "its weights are quantised; take the model that it was made from"
    if any(".base_layer." in name or ".lora_" in name for name in names):
        return f"its names show {LORA}"
    return ""


# ------------------------------------------------------------------------------- the prompts

def encode_prompts(models: list, tokenizer, texts: list[str], chat: bool) -> list[list[int]]:
    """Turn prompts into token ids that all models have embeddings for.

    models   all models that read the prompts
    texts    the prompts
    chat     whether each is put into the model's chat template
    returns  token ids, a list for each prompt. InputError for a prompt that cannot be used
    """
    rows = min(len(model.get_input_embeddings().weight) for model in models)
    found = []
    for text in texts:
        text.encode()  # UnicodeError for halves of characters, which no tokenizer takes
        try:
            ids = encode_chat(tokenizer, text) if chat else encode(tokenizer, text)
        except InputError:
            raise
        except Exception as error:  # tokenizers raises no kinds of its own
            raise InputError("expected a tokenizer that takes the prompt, but the model's says: "
                             f"{shorten(error)}") from error
        if max(ids) >= rows:
            token = tokenizer.convert_ids_to_tokens(max(ids))
            raise InputError(f"expected tokens that the model has embeddings for, {rows} of them, "
                             f"got {token!r} with id {max(ids)}")
        found.append(ids)
    return found


def encode_data(model, tokenizer, args: Namespace, settings: Settings) -> tuple:
    """Turn what a command learns from into token ids: --prompts, or --data where it is given.

    args      the parsed command line
    settings  those of the training
    returns   token ids of the prompts, and the settings, which hold the pairs of --data
    """
    rows = getattr(args, "data", None)
    with keep_date(tokenizer, args):
        if rows is None:
            return encode_prompts([model], tokenizer, args.prompts, args.chat), settings
        pairs = [encode_pair(model, tokenizer, row, args.chat) for row in rows]
    return [prompt for prompt, _ in pairs], replace(settings, pairs=pairs)


@contextmanager
def keep_date(tokenizer, args: Namespace):
    """Let a chat template that writes today's date write the same date on every later day.

    The date is kept in the command's work folder. Otherwise a stopped run would have other prompts
    the next day, and would begin anew.

    args   the parsed command line. Without an --out nothing is kept
    """
    if "out" not in args or "strftime_now" not in str(tokenizer.chat_template):
        yield
        return
    file = (getattr(args, "work", None) or Path(f"{args.out}.work")) / "date"
    if not file.exists():
        write_text(file, datetime.now().isoformat())
    date = datetime.fromisoformat(file.read_text(encoding="utf-8"))
    clock = chat_template_utils.datetime  # which `strftime_now` reads
    chat_template_utils.datetime = SimpleNamespace(now=lambda: date)
    try:
        yield
    finally:
        chat_template_utils.datetime = clock


def encode_pair(model, tokenizer, row: dict, chat: bool) -> Pair:
    """Turn a line of --data into token ids; InputError that names the line if it cannot be used.

    row      what `read_pairs` returned for the line
    chat     whether a prompt is put into the chat template. Messages always are
    returns  token ids of the prompt and of the answer. The answer of a text ends as `end_answer`
             says
    """
    try:
        prompt, answer, messages = (row.get(name) for name in ("prompt", "answer", "messages"))
        if messages is None and chat and isinstance(prompt, str):
            messages = make_messages(tokenizer, prompt, answer)
        if messages is not None:
            prompt, answer = render_pair(tokenizer, messages, row.get("tools"))
        if isinstance(prompt, str):
            prompt, answer = split_texts(tokenizer, prompt, answer, messages is None)
            answer = end_answer(tokenizer, answer, eos_ids(model, tokenizer), messages is not None)
        if not prompt or not answer:
            raise ValueError("nothing is left of it as tokens")
    except Exception as error:  # a template and a tokenizer raise errors of any kind
        raise InputError(f"--data must hold texts that the model's tokenizer takes, got "
                         f"{row['where']}: {shorten(error)}") from error
    rows = len(model.get_input_embeddings().weight)
    if max(prompt + answer) >= rows:
        raise InputError(f"--data must hold tokens of the model's {rows}, got {row['where']}: "
                         f"{max(prompt + answer)}")
    return prompt, answer


def end_answer(tokenizer, answer: list[int], eos: set[int], templated: bool) -> list[int]:
    """Cut an answer after its end, or give it the tokenizer's EOS, if there is one.

    answer     token ids
    eos        the tokens that end an answer
    templated  whether the chat template wrote the answer. Its special token at the end of a turn
               is an end even if the model's settings do not list it
    """
    for i, token in enumerate(answer):
        if token in eos:
            return answer[:i + 1]
    if templated:
        turn = list(answer)
        while turn and not tokenizer.decode(turn[-1:]).strip():  # a template adds line ends
            del turn[-1]
        added = tokenizer.added_tokens_decoder.get(turn[-1]) if turn else None
        if added is not None and added.special:
            return turn
    usual = tokenizer.eos_token_id
    return answer if usual is None else [*answer, usual]


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


def encode_chat(tokenizer, text: str) -> list[int]:
    """Put a prompt into the model's chat template, as the message of a user; its token ids."""
    encode(tokenizer, text)  # a prompt without text is refused
    return tokenizer.encode(fill_template(tokenizer, text), add_special_tokens=False)


def open_chat(tokenizer) -> list[int]:
    """Return the tokens that the chat template puts before the words of a user."""
    # Two texts with no letter in common show where the words of a user begin.
    before = commonprefix([fill_template(tokenizer, text) for text in ("one", "Two")])
    return tokenizer.encode(before, add_special_tokens=False)


def fill_template(tokenizer, text: str) -> str:
    """Fill the chat template with one message of a user; InputError where it does not take it."""
    return render(tokenizer, make_messages(tokenizer, text))


def make_messages(tokenizer, *texts: str) -> list[dict]:
    """Make the messages of a chat; InputError where the chat template does not take the first one.

    texts    what the user says and, if it is given, what the assistant answers
    returns  the messages
    """
    if not tokenizer.chat_template:
        raise InputError("expected a model with a chat template for --chat, got one without")
    messages = [{"role": role, "content": text}
                for role, text in zip(("user", "assistant"), texts)]
    try:
        lost = find_lost(tokenizer, messages[:1])
    except Exception as error:  # a template is a program of somebody else's
        raise InputError("expected a chat template that takes a prompt, but the model's says: "
                         f"{shorten(error) or type(error).__name__}") from error
    if lost:
        raise InputError("expected a chat template that takes a prompt, but the model's leaves it "
                         "out")
    return messages


def render_pair(tokenizer, messages: list[dict], tools: list | None) -> tuple[str, str]:
    """Run the chat template on messages that end with one of the assistant.

    tools    what the assistant may call
    returns  the text up to the answer, and the answer with all that the template adds to it
    raises   ValueError where the template leaves something out, or begins an answer in two ways.
             Only a thought that it opens is left out of the text for an answer without a thought
    """
    whole = render(tokenizer, messages, tools, speaks=False)
    lost = find_lost(tokenizer, messages, tools)
    if lost:
        raise ValueError(f"the chat template leaves out {lost}")
    prompt = render(tokenizer, messages[:-1], tools)
    if not whole.startswith(prompt):
        common = commonprefix([prompt, whole])
        begin = prompt[len(common):]
        # Some templates open a thought for the model, and render answers without a thought. An
        # answer with its thought written in the content would lose the thought there.
        content = messages[-1].get("content")
        opens = re.fullmatch(r"<[^<>]*think[^<>]*>\s*", begin)
        if not (opens and isinstance(content, str) and content.strip() in whole[len(common):]):
            raise ValueError(f"the chat template begins answers with {begin!r}, but not this one")
        prompt = common
    if not render(tokenizer, messages, tools).startswith(whole):
        # Some templates end a text with an EOS that does not end a turn within a text.
        whole = whole.removesuffix(tokenizer.eos_token or "")
    return prompt, whole[len(prompt):]


def find_lost(tokenizer, messages: list[dict], tools: list | None = None) -> str:
    """Name the first thing of messages that the chat template leaves out; an empty text if none.

    Of the last message all keys count. Templates leave out the thoughts of earlier answers, and the
    model never reads them, so of earlier messages only contents and calls of tools count.
    """
    whole = render(tokenizer, messages, tools, speaks=False)

    def is_lost(messages: list[dict], tools: list | None) -> bool:
        try:
            return render(tokenizer, messages, tools, speaks=False) == whole
        except Exception:  # a template that asks for what is missing does not leave it out
            return False
    if tools and is_lost(messages, None):
        return "'tools'"
    for number, message in enumerate(messages, 1):
        before, after = messages[:number - 1], messages[number:]
        for key, value in message.items():
            counts = key in ("content", "tool_calls") if after else key != "role"
            if not counts or not isinstance(value, (str, list, dict)) or not value:
                continue
            # A thought may be given under two names. A template needs to read only one of them.
            emptied = {name: type(x)() for name, x in message.items()
                       if x == value and name != "role"}
            if str(value).strip() and is_lost([*before, message | emptied, *after], tools):
                return f"{key!r} of message {number}"
    return ""


def render(tokenizer, messages: list[dict], tools: list | None = None, speaks: bool = True) -> str:
    """Run the chat template on messages.

    tools    what the assistant may call
    speaks   whether the text goes on to where the assistant speaks
    """
    if not tokenizer.chat_template:
        raise InputError("expected a model with a chat template for messages, got one without")
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False,
                                         add_generation_prompt=speaks)
