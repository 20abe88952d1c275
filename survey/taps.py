"""This file taps layers of a target: it keeps what enters them, for a draft to read.

A tap is the number of the layer that it stands before. The number of all layers stands for what the
LM head reads. Here taps 2, 3 and 6 of a model of six layers are read:

    tokens ── 0 ── 1 ─┬─ 2 ─┬─ 3 ── 4 ── 5 ── norm ─┬─ LM head
                      │     │                       │
                    tap 2  tap 3                  tap 6          joined: [n, 3h]

Hooks keep what is tapped. They hang on the model only while it runs for a draft, so that other
passes cost nothing more. eagle3.py, dflash.py and hybrid.py read taps.
"""
from contextlib import contextmanager

from common import CachedLM, InputError
from survey.layers import list_layers
from survey.views import depth_of

import torch


def choose_taps(model) -> list[int]:
    """Choose the three layers that EAGLE-3 taps: an early, a middle and a late one.

    model    the target
    returns  the numbers 2, L/2 and L - 3. InputError if the model has fewer than 7 layers, since
             these are not three numbers in ascending order then
    """
    L = depth_of(model)
    if L < 7:
        raise InputError("expected a model of 7 layers or more, of which layers 2, L/2 and L - 3 "
                         f"are read, got {L} layers: train a draft for it with --taps")
    return [2, L // 2, L - 3]


def read_taps(text: str, model) -> list[int]:
    """Read the option `--taps`.

    text     numbers of layers with commas between them. If it is empty, `choose_taps` chooses them
    model    the target
    returns  the numbers. InputError if they are not in ascending order, or no layers of the model
    """
    if not text:
        return choose_taps(model)
    numbers = [int(x) if x.strip().isdecimal() else -1 for x in text.split(",")]
    if sorted(set(numbers)) != numbers or not 0 <= numbers[0] <= numbers[-1] <= depth_of(model):
        raise InputError(f"--taps must be numbers from 0 to {depth_of(model)} in ascending "
                         f"order, got {text}")
    return numbers


def tap_widths(model, taps: list[int]) -> list[int]:
    """Return the width of what each tap reads. InputError if the model lacks a layer.

    The LM head's input may be of another width than the layers' (in OPT-350m, for one).
    """
    L, inside = depth_of(model), model.config.get_text_config().hidden_size
    if not 0 <= min(taps) <= max(taps) <= L:
        raise InputError(f"expected numbers of layers from 0 to {L}, got {taps}")
    last = model.get_output_embeddings().weight.shape[1]
    return [inside if i < L else last for i in taps]


@contextmanager
def tap_layers(model, taps: list[int] | None, seen: list):
    """Keep what enters some layers in every pass of a model, until the `with` block ends.

    model   the target
    taps    numbers of layers, in ascending order. The number of all layers stands for what the LM
            head reads, as None does
    seen    a list, which grows by one tensor [B, n, h] for each of `taps` in every pass
    """
    layers = [] if taps is None else list_layers(model)

    def keep_input(module, args, kwargs) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    hooks = [layers[i].register_forward_pre_hook(keep_input, with_kwargs=True)
             for i in taps or [] if i < len(layers)]
    if taps is None or len(layers) in taps:
        hooks.append(model.get_decoder().register_forward_hook(
            lambda module, args, output: seen.append(output[0])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class FeatureLM(CachedLM):
    """Be a CachedLM that keeps what the LM head read.

    features   [n, d], of the rows of the last call. After `start`: of all tokens of the text
    taps       the numbers of the layers whose inputs are the features instead, in `tap_target`
    """

    def __init__(self, model, vocab: int | None = None):
        super().__init__(model, vocab)
        self.taps = None
        self.parts = None  # the features of each part of a prompt, while there is one

    def start(self, ids: list[int], prefix: list[tuple] = ()) -> None:
        self.parts = []
        super().start(ids, prefix)
        self.features = torch.cat(self.parts) if self.parts else self.weight[:0]
        self.parts = None

    def forward(self, *args, **options) -> torch.Tensor:
        logits = super().forward(*args, **options)
        if self.parts is not None:
            self.parts.append(self.features)
        return logits

    def run_model(self, inputs: torch.Tensor, positions: torch.Tensor, mask, keep: int):
        seen = []
        with tap_layers(self.model, self.taps, seen):
            logits = super().run_model(inputs, positions, mask, keep)
        self.features = torch.cat(seen, -1)[0]
        return logits


@contextmanager
def tap_target(target: FeatureLM, taps: list[int]):
    """Make what enters some layers the features of a target, until the `with` block ends.

    target  its `features` [n, t] are then what was tapped in the last call, where t is the width of
            all taps
    taps    numbers of layers, as for `tap_layers`
    """
    before = target.taps
    target.taps = taps
    try:
        yield
    finally:
        target.taps = before
