"""This file has what the command line, survey/ and hybrid/ need of a CachedLM beyond common.py.

    EngineLM            a CachedLM that times its passes, and keeps what is prepared once and what
                        enters some layers. It gives recurrent layers the cache that they need
    load, check         load a model, say what is wrong with it, and refuse it by numbers: a tree
                        must give the logits of its paths
    grouped_attention   attention that does not copy the cache for each query head
"""
import re
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import (AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM,
                          AutoTokenizer)
from transformers.utils import cached_file, logging

from common import InputError
from support.files import explain_errors
from support.recurrent import RecurrentLM, has_states


MODELS = Path(__file__).resolve().parent.parent / "models"
# Parts of transformers that warn of a wrong tokenizer or configuration
WARN = ("tokenization_utils_tokenizers", "configuration_utils", "modeling_rope_utils")


def require(fits: bool, option: str, expected: str, got) -> None:
    """Raise an InputError that names one option, unless its value fits.

    fits      whether the value fits
    option    the option, as its keyword argument is written
    expected  what the value must be, in words
    got       the value
    """
    if not fits:
        raise InputError(f"--{option.replace('_', '-')} must be {expected}, got {got}")


# ------------------------------------------------------------------------------ what a model has

def depth_of(model) -> int:
    """Count a model's layers."""
    return model.config.get_text_config().num_hidden_layers


def vocab_size(model, tokenizer) -> int:
    """Count the logits of a model that stand for tokens: those up to the largest id.

    The number of the tokenizer's entries would be too small where ids have gaps.
    """
    return min(len(model.get_output_embeddings().weight), 1 + max(tokenizer.get_vocab().values()))


def name_of(module: torch.nn.Module, fits: Callable,
            expected: str = "a decoder of layers with a norm after the last") -> str:
    """Find the name of the first child of a module that fits.

    fits      fits(child) says whether a child is the wanted one
    expected  what the InputError says was expected, if no child fits
    returns   the name
    """
    for name, child in module.named_children():
        if fits(child):
            return name
    raise InputError(f"expected {expected}")


def list_layers(model) -> torch.nn.ModuleList:
    """Return the list of a model's decoder layers. InputError if there is none."""
    decoder = model.get_decoder()
    return decoder._modules[name_of(decoder, lambda x: isinstance(x, torch.nn.ModuleList))]


# -------------------------------------------------------------------------------------------- taps
# A tap is the number of the layer whose input is kept for a draft to read. The number of all layers
# is the tap of what the LM head reads. Here taps 2, 3 and 6 of a model of six layers are read:
#
#     tokens ── 0 ── 1 ─┬─ 2 ─┬─ 3 ── 4 ── 5 ── norm ─┬─ LM head
#                       │     │                       │
#                     tap 2  tap 3                  tap 6          joined: [n, 3h]
#
# Hooks keep what is tapped, and hang on the model only during a pass of the CachedLM that asks.


@contextmanager
def tap_layers(model, taps: list[int] | None, seen: list):
    """Keep what enters some layers in every pass of a model, until the `with` block ends.

    model   the target
    taps    numbers of layers, in ascending order. The number of all layers stands for what the LM
            head reads, and so does None
    seen    a list, which grows by one tensor [B, n, h] for each of `taps` in every pass
    """
    def keep_input(module, args, kwargs) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    def keep_output(module, args, output) -> None:
        seen.append(output[0])

    with ExitStack() as hooks:
        for i in taps or [depth_of(model)]:
            if i < depth_of(model):
                layer = list_layers(model)[i]
                hook = layer.register_forward_pre_hook(keep_input, with_kwargs=True)
            else:
                hook = model.get_decoder().register_forward_hook(keep_output)
            hooks.enter_context(hook)
        yield


class EngineLM(RecurrentLM):
    """Be a CachedLM for methods that read features, for recurrent layers, and for runs that are
    timed.

    Each pass waits for the GPU, or it would end before the GPU does.

    features         [n, d], what the LM head read of the rows of the last call, or what `taps`
                     says. After `start`: of all tokens of the text
    known            the features of the context's tokens, in a buffer that grows when it is full
    taps             numbers of layers, whose inputs are the features, as `start` is given them.
                     None: the features are what the LM head read
    passes           for each pass its rows, how many of them the LM head read, and its seconds
    setup_seconds    of what `once` made: of files that are read
    memo             results of `once`, by what was asked for. A method that writes another model's
                     text keeps that model here as "writer"
    dtype            the model's type, which must stay as it is
    """
    def __init__(self, model, vocab: int | None = None):
        local = getattr(model.config.get_text_config(), "attention_layers", None)
        if local:  # of GPT-Neo, whose windows `windows_of` does not know
            raise InputError("expected layers of full or sliding attention, got "
                             f"{sorted(set(local))}")
        super().__init__(model, vocab)
        self.taps, self.passes, self.setup_seconds = None, [], 0.0
        self.memo, self.dtype = {}, self.weight.dtype
        self.known, self.fed = None, []  # fed: the features of each pass since the last commit

    def start(self, ids: list[int], taps: list[int] | None = None) -> None:
        """Cache a context as CachedLM does, and keep the features of all its tokens."""
        if self.model.training or self.weight.dtype != self.dtype:
            raise InputError(f"expected a model in eval mode, and still in {self.dtype}")
        alike = [old == new for old, new in zip(self.text[:self.length], ids)]
        kept = [*alike, False].index(False) if self.keeps and taps == self.taps else 0
        if kept == 0:
            self.taps, self.known = taps, None
        super().start(ids, kept)
        self.features = self.weight[:0] if self.known is None else self.known[:len(ids)]

    def forward(self, ids, parents: list[int] | None = None, **options) -> torch.Tensor:
        if not self.parents:
            self.fed = []
        began = time.perf_counter()
        logits = super().forward(ids, parents, **options)
        if logits.is_cuda:
            torch.cuda.synchronize()
        self.passes.append((len(ids), len(logits), time.perf_counter() - began))
        self.fed.append(self.features)
        return logits

    @torch.inference_mode()
    def commit(self, path: list[int]) -> None:
        first = self.length
        super().commit(path)
        if path:
            rows = torch.cat(self.fed)[list(path)]
            known = rows[:0] if self.known is None else self.known
            if self.length > len(known):
                known = F.pad(known, (0, 0, 0, self.length))  # as many more rows as the text has
            known[first:self.length] = rows
            self.known = known

    def run_model(self, inputs: torch.Tensor, positions: torch.Tensor, mask, keep: int):
        seen = []
        with tap_layers(self.model, self.taps, seen):
            logits = super().run_model(inputs, positions, mask, keep)
        self.features = torch.cat(seen, -1)[0]
        return logits

    def once(self, make: Callable, *args, **options):
        """Return make(*args, **options), which runs only the first time it is asked for.

        A method is called anew for each prompt, and prepares here what serves all prompts. All
        arguments must be hashable.
        """
        key = make, args, *options.items()
        if key not in self.memo:
            before, began = self.setup_seconds, time.perf_counter()
            self.memo[key] = make(*args, **options)
            # A `make` that calls `once` itself has added its time already, so it counts once.
            self.setup_seconds = before + time.perf_counter() - began
        return self.memo[key]

    @property
    def rows(self) -> int:
        """Return the rows of all calls."""
        return sum(rows for rows, read, _ in self.passes if read)

    @property
    def seconds(self) -> float:
        """Return the seconds of all calls."""
        return sum(seconds for _, read, seconds in self.passes if read)

    @property
    def prompt_seconds(self) -> float:
        """Return the seconds of all passes that are no calls, as those over prompts."""
        return sum(seconds for _, read, seconds in self.passes if not read)


def require_keys(model) -> None:
    """Raise an InputError for a model with recurrent layers, or with layers that share keys."""
    shared = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0)
    if shared or has_states(model):
        raise InputError(f"expected layers that all have keys, got {type(model).__name__}")


# ----------------------------------------------------------------------------------- loading

@contextmanager
def hold_warnings():
    """Let transformers warn of a wrong tokenizer or configuration once the `with` block has ended.

    This holds even if all else is quiet, as on a command line. What is refused gets no warning, so
    that a refusal is one line.
    """
    held = []
    hold = held.append  # it returns None, so a held record goes no further
    loggers = [logging.get_logger(f"transformers.{name}") for name in WARN]
    for logger in loggers:
        logger.setLevel("WARNING")
        logger.addFilter(hold)
    try:
        yield
    finally:
        for logger in loggers:
            logger.setLevel("NOTSET")  # that of transformers, as before
            logger.removeFilter(hold)
    for record in held:
        logging.get_logger(record.name).handle(record)


@hold_warnings()
def load(path: str, device: str | None = None, dtype: str | None = None, **options):
    """Load a model and its tokenizer. Code that comes with a checkpoint is never run.

    path     a Hugging Face directory or hub id
    device   cpu, cuda or cuda:N. Default: cuda if there is a GPU, else cpu
    dtype    float32, bfloat16 or float16. Default: float32 on a CPU, else the checkpoint's own
    options  other arguments of transformers' `from_pretrained`
    returns  the model, ready for CachedLM, and its tokenizer. InputError for what cannot be used
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    with explain_errors(f"a model directory or hub id that {device} can load as {dtype}", path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True, **options)  # weights of a wrong size are reported below
        model.to(device)
        listed = model.generation_config.eos_token_id  # which transformers does not check
        kinds = {*map(type, listed if isinstance(listed, list) else [listed])}
        if not kinds <= {int, type(None)}:
            raise ValueError(f"eos_token_id must be a token's id or a list of ids, not {listed!r}")
    wrong = [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]
    if not hasattr(model, "is_quantized"):  # transformers marks what it can read
        wrong += list_lost(model, found["unexpected_keys"])
    if wrong:  # what is missing would stay random, and the output would be garbage
        raise InputError(f"expected all weights of {type(model).__name__} and no others, got "
                         f"{str(path)!r} with {len(wrong)} quantised, missing, without a place or "
                         f"of another size: {min(wrong)}")
    refuse_integers(model, path)
    return check(model), tokenizer


def list_lost(model, names: set[str]) -> list[str]:
    """List the tensors of a checkpoint that should change a model's output, and do not.

    These are scales of quantised weights, LoRA, a bias where the model has none, and any part that
    a layer of the model lacks. Other tensors are harmless: masks and rotary positions of old
    versions, blocks that guess, layers after the last one, other heads, and models of images.

    model   the model
    names   the tensors that it has no place for
    """
    # Some checkpoints lack the prefix of the model without its LM head, as GPT-2's.
    parts, lost = dict([*model.named_modules(), *model.base_model.named_modules()]), []
    for name in names:
        place, _, kind = name.rpartition(".")
        layer = re.match(r".*?\.\d+(?=\.)", place)
        lacks = layer is not None and layer[0] in parts
        # A causal mask is called bias, too. It belongs to attention, which has no weight itself.
        if place in parts:
            lacks = len(parts[place]._parameters) > 0
        scales = "scale" in kind and place != "" and place in parts
        if "lora_" in name or scales or (lacks and kind in ("weight", "bias")):
            lost.append(name)
    return lost


def refuse_integers(model, path: str) -> None:
    """Raise an InputError for weights that are integers, whose scales nothing explains.

    model   what `load` made of them
    path    the directory or hub id that it was loaded from
    """
    if hasattr(model, "is_quantized"):  # transformers knew how to read them
        return
    for file in Path(cached_file(path, "config.json")).parent.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                # Old causal masks, which are called bias, are such integers as well. Floats of 8
                # bits are numbers by themselves: `load` refuses them if scales come with them.
                if tensors.get_slice(name).get_dtype() in ("I8", "U8") and "bias" not in name:
                    raise InputError(f"expected weights that are not quantised, got {str(path)!r}: "
                                     f"{name} has integers of 8 bits")


@torch.inference_mode()
def check(model, run_as: type[EngineLM] = EngineLM):
    """Refuse a model for which a tree gives other logits than each of its paths by itself.

        d b c     e ─┬─ c ── d     a to e are five ordinary tokens from the middle of the
        context      └─ a ── b     vocabulary, since the first ones are often special. A very
                                   small vocabulary gives some of them twice

    Models whose attention takes more than a mask and positions (BLOOM, MPT) fail this check.
    Settings that ask for other outputs than logits are changed.

    model    a model of transformers, which gets the attention at the end of this file
    run_as   the kind of CachedLM that is checked
    returns  the same model
    """
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        model.set_attn_implementation("grouped")
    for config in (model.eval().config, model.config.get_text_config()):
        config.update({"return_dict": True, "output_router_logits": False})  # only logits are read
    weight = model.get_input_embeddings().weight
    a, b, c, d, e = ((len(weight) // 2 + i) % len(weight) for i in range(-2, 3))
    paths = torch.tensor([[d, b, c, e, c, d], [d, b, c, e, a, b]], device=weight.device)
    with explain_errors("a model that takes positions, a mask and a cache", type(model).__name__):
        alone = model(input_ids=paths, use_cache=False).logits[:, 3:].float().flatten(0, 1)
        lm = run_as(model)
        lm.start([d, b, c])
        # Nodes 0, 1, 3 are the path e c d, and nodes 0, 2, 4 are the path e a b.
        tree = lm.forward([e, c, a, d, b], [-1, 0, 0, 1, 2])[[0, 1, 3, 0, 2, 4]].float()
    alone = alone[:, :lm.vocab]
    error = (tree - alone).abs().mean() / alone.abs().mean()
    # Half precision rounds; a wrong mask or position is off by far more. A nan is refused as well.
    if not error < (1e-3 if model.dtype == torch.float32 else 0.1):
        raise InputError(f"expected a model whose token trees equal their paths, got "
                         f"{type(model).__name__}: off by {error:.1e}")
    return model


FIRST = 64  # tokens of an answer by which a head is doubted
ENOUGH = 16  # guesses that must have been tried for that
MONOTONE = 0.7  # of the tokens are one token: a right head of three guesses is no better than it


def doubt_head(text: list[int], log: list[dict]) -> str:
    """Say in a line that a trained head fits the target badly. An empty text if it does not.

    A head that reads the wrong layers, or whose tokens are shifted, leaves the text as it is, and
    nobody would notice. Its guesses are compared with one guess for all tokens, the most frequent
    one. If this one is right more often, the head is doubted. Trees hold several guesses for a
    token, so only a head that is quite wrong is found. A text of nearly only one token says nothing
    of a head, since a round also ends if all its guesses were right.

    text   the tokens of an answer, whose first ones are looked at
    log    the records of its rounds
    """
    text, right, tried, end = text[:FIRST], 0, 0, 0
    for record in log:
        end += record["accepted"] + 1
        if record["guessed"] and end <= len(text):  # a round ends with a wrong guess
            right, tried = right + record["accepted"], tried + record["accepted"] + 1
    constant = max(map(text.count, text)) / len(text)
    if tried < ENOUGH or right / tried >= constant or constant > MONOTONE:
        return ""
    return (f"\nthe head fits this model badly: {right / tried:.0%} of its guesses are right, and "
            f"{constant:.0%} would be of one token alone")


# ------------------------------------------------------------------------- grouped attention
def grouped_attention(module, query, key, value, attention_mask, **options):
    """Compute attention, treating query heads that share a key head as extra rows of that head.

    transformers' own function, given a mask and several rows, would copy the whole cache for each
    query head.

    query           [B, heads, n, d]
    key, value      [B, key heads, slots, d]
    attention_mask  [B, 1, n, slots]. None: the pass is not one of ours
    returns         the output [B, n, heads, d], and no weights
    """
    if attention_mask is None:
        return AttentionInterface()["sdpa"](module, query, key, value, None, **options)
    B, heads, n, d = query.shape
    rows = query.reshape(B, key.shape[1], -1, d)
    mask = attention_mask.expand(-1, heads // key.shape[1], -1, -1).reshape(B, 1, -1, key.shape[2])
    out = F.scaled_dot_product_attention(rows, key, value, mask, scale=options.get("scaling"))
    return out.reshape(B, heads, n, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", AttentionMaskInterface()["sdpa"])
