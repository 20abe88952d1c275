"""This file taps layers of a target: it keeps what enters them, for a draft to read.

A tap is the number of the layer that it stands before. The number of all layers stands for what the
LM head reads. Here taps 2, 3 and 6 of a model of six layers are read:

    tokens ── 0 ── 1 ─┬─ 2 ─┬─ 3 ── 4 ── 5 ── norm ─┬─ LM head
                      │     │                       │
                    tap 2  tap 3                  tap 6          joined: [n, 3h]

Hooks keep what is tapped. They hang on the model only while a draft decodes or is trained, so that
other passes cost nothing more. eagle3.py, dflash.py and hybrid.py read taps.
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
    """Return the width of what each tap reads.

    The LM head's input may be of another width than the layers' (in OPT-350m, for one).
    """
    L, inside = depth_of(model), model.config.get_text_config().hidden_size
    last = model.get_output_embeddings().weight.shape[1]
    return [inside if i < L else last for i in taps]


@contextmanager
def tap_layers(model, taps: list[int]):
    """Keep what enters some layers in every pass of a model, until the `with` block ends.

    model   the target
    taps    numbers of layers, in ascending order. The number of all layers stands for what the LM
            head reads
    yields  a list, which grows by one tensor [B, n, h] for each of `taps` in every pass
    """
    seen, layers = [], list_layers(model)

    def keep_input(module, args, kwargs) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    hooks = [layers[i].register_forward_pre_hook(keep_input, with_kwargs=True)
             for i in taps if i < len(layers)]
    if len(layers) in taps:
        hooks.append(model.get_decoder().register_forward_hook(
            lambda module, args, output: seen.append(output[0])))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def refuse_graphs(target: CachedLM, method: str) -> None:
    """Raise an InputError if a target replays graphs, in which no hook runs.

    method   what the message calls the method that taps layers
    """
    if type(target) is not CachedLM:
        raise InputError(f"--graphs must be off for {method}, since a replayed graph taps no layer")


def join_taps(seen: list[torch.Tensor], taps: list[int]) -> torch.Tensor:
    """Join what `tap_layers` kept since the list was empty, and empty it.

    seen     what `tap_layers` yields: for each pass one tensor [B, n, h] for each tap
    taps     the numbers of the layers
    returns  [B, n, t], the rows of all passes one after the other, where t is the width of all taps
    """
    passes = [torch.cat(seen[i:i + len(taps)], -1) for i in range(0, len(seen), len(taps))]
    seen.clear()
    return torch.cat(passes, 1)


class Tapped:
    """Stand in for a target whose features are what enters some layers.

    target  the target
    taps    the numbers of the layers
    seen    the list of `tap_layers` for them

    features   [n, t], what was tapped in the last call. After `start`: for all tokens of the text
    """

    def __init__(self, target: CachedLM, taps: list[int], seen: list):
        self.target, self.taps, self.seen = target, taps, seen

    def __getattr__(self, name: str):
        return getattr(self.target, name)

    def start(self, ids: list[int]) -> None:
        self.target.start(ids)
        # A text without tokens has no pass, and so no features.
        self.features = join_taps(self.seen, self.taps)[0] if ids else self.target.features

    def forward(self, *given, **how) -> torch.Tensor:
        logits = self.target.forward(*given, **how)
        self.features = join_taps(self.seen, self.taps)[0]
        return logits
