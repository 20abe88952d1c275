"""This file has what the command line, survey/ and hybrid/ need of a CachedLM beyond common.py.

    EngineLM            a CachedLM that times its passes, and keeps what is prepared once and what
                        enters some layers. It gives recurrent layers the cache that they need
    tap_layers          keeps what enters layers of a model
    grouped_attention   attention that does not copy the cache for each query head

Small functions are used by many methods: `require` refuses an option, `log_round` notes a round,
and others find the layers, the depth and the vocabulary of a model. A method file that is itself
run as a program ends in `run_as_program`.
"""
import runpy
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from common import MODELS, InputError  # noqa: F401  (methods take MODELS from here)
from support.recurrent import RecurrentLM, has_states


def require(fits: bool, option: str, expected: str, got) -> None:
    """Raise an InputError that names one option, unless its value fits.

    fits      whether the value fits
    option    the option, as its keyword argument is written
    expected  what the value must be, in words
    got       the value
    """
    if not fits:
        raise InputError(f"--{option.replace('_', '-')} must be {expected}, got {got}")


def log_round(log: list | None, **record) -> None:
    """Append what a round was like to a log, if there is one."""
    if log is not None:
        log.append(record)


def run_as_program(file: str) -> None:
    """Do for `python -m survey.NAME` what `python -m cli NAME` does.

    file   the path of the method file, whose name is NAME
    """
    sys.argv.insert(1, Path(file).stem)
    runpy.run_module("cli", run_name="__main__")


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

    depth = depth_of(model)
    with ExitStack() as hooks:
        for i in taps or [depth]:
            if i < depth:
                layer = list_layers(model)[i]
                hook = layer.register_forward_pre_hook(keep_input, with_kwargs=True)
            else:
                hook = model.get_decoder().register_forward_hook(keep_output)
            hooks.enter_context(hook)
        yield


class EngineLM(RecurrentLM):
    """Be a CachedLM that keeps features, runs recurrent layers and times its passes.

    The clock of a pass stops only when the GPU is done.

    features         [n, d], what the LM head would read of all rows of the newest pass, or with
                     `taps` what entered these layers. After `start`: of all tokens of the context
    whole            the features of the context. After `start` they grow only if `keeps` is set
    taps             numbers of layers, whose inputs are the features, as `start` is given them.
                     None: the features are what the LM head read
    passes           for each pass its rows, how many of them the LM head read, and its seconds
    setup_seconds    the seconds that `once` has taken, mostly to read files
    memo             what `once` made, by function, arguments and key. A method that writes the text
                     of another model, such as a tuned one, keeps that model here as "writer"
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
        self.whole, self.fed = None, []  # fed: the features of each pass since the last commit
        self.starting = False

    def start(self, ids: list[int], taps: list[int] | None = None) -> None:
        """Cache a context as CachedLM does, and keep the features of all its tokens."""
        if self.model.training or self.weight.dtype != self.dtype:
            raise InputError(f"expected a model in eval mode, and still in {self.dtype}")
        kept = 0
        if self.keeps and taps == self.taps:
            alike = [old == new for old, new in zip(self.text[:self.length], ids)]
            kept = [*alike, False].index(False)  # how many tokens both texts begin with
        if kept == 0:
            self.taps, self.whole = taps, None
        self.starting = True
        super().start(ids, kept)
        self.starting = False
        self.features = self.weight[:0] if self.whole is None else self.whole[:len(ids)]

    def forward(self, ids, parents: list[int] | None = None, **options) -> torch.Tensor:
        if not self.parents:
            self.fed = []
        began = time.perf_counter()
        logits = super().forward(ids, parents, **options)
        torch.get_device_module(logits.device).synchronize(logits.device)
        self.passes.append((len(ids), len(logits), time.perf_counter() - began))
        self.fed.append(self.features)
        return logits

    @torch.inference_mode()
    def commit(self, path: list[int]) -> None:
        first = self.length
        super().commit(path)
        # The features of a prompt are kept, since `start` returns with them. Those of rounds are
        # kept only if the next text may begin with this one.
        if path and (self.keeps or self.starting):
            known = [] if self.whole is None else [self.whole[:first]]
            self.whole = torch.cat([*known, torch.cat(self.fed)[list(path)]])

    def run_model(self, inputs: torch.Tensor, positions: torch.Tensor, mask, keep: int):
        seen = []
        with tap_layers(self.model, self.taps, seen):
            logits = super().run_model(inputs, positions, mask, keep)
        self.features = torch.cat(seen, -1)[0]
        return logits

    def once(self, make: Callable, *args, key: tuple = ()):
        """Return make(*args), which runs only the first time it is asked for.

        A method is called anew for each prompt, and prepares here what serves all prompts. All
        arguments must be hashable.

        key   what else the result depends on, such as the method whose guesses it learns from
        """
        key = make, args, *key
        if key not in self.memo:
            before, began = self.setup_seconds, time.perf_counter()
            self.memo[key] = make(*args)
            # A `make` that calls `once` itself has added its time already, so it counts once.
            self.setup_seconds = before + time.perf_counter() - began
        return self.memo[key]

    @property
    def seconds(self) -> float:
        """Return the seconds of all calls."""
        return sum(seconds for _, read, seconds in self.passes if read)


def require_keys(model) -> None:
    """Raise an InputError for a model with recurrent layers, or with layers that share keys."""
    shared = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0)
    if shared or has_states(model):
        raise InputError(f"expected layers that all have keys, got {type(model).__name__}")


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
    rows = query.reshape(B, key.shape[1], -1, d)  # all rows of one query head, then of the next
    mask = attention_mask.expand(-1, heads // key.shape[1], -1, -1).reshape(B, 1, -1, key.shape[2])
    out = F.scaled_dot_product_attention(rows, key, value, mask, scale=options.get("scaling"))
    return out.reshape(B, heads, n, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", AttentionMaskInterface()["sdpa"])
