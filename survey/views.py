"""A view of a model has some of its layers, or lacks some of its blocks, and shares its weights.

layerskip.py and early_exit.py draft with the first layers and verify with the others, and
draft_verify.py leaves out blocks. A layer of a view keeps its number, by which a cache knows it.
"""
import copy
from typing import Callable, Iterator

from common import CachedLM, InputError

import torch


def depth_of(model) -> int:
    """Count a model's layers."""
    return model.config.get_text_config().num_hidden_layers


def copy_shallow(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module so that its parts can be replaced; the weights are shared."""
    new = copy.copy(module)
    new._modules = dict(module._modules)
    return new


def name_of(parts: Iterator[tuple[str, torch.nn.Module]], fits: Callable,
            expected: str = "a decoder of layers with a norm after the last") -> str:
    """Find the name of the first module that fits.

    parts     names and modules, such as `named_children` gives
    fits      fits(module) says whether a module is the one
    expected  what the InputError says if none fits
    """
    for name, part in parts:
        if fits(part):
            return name
    raise InputError(f"expected {expected}")


def open_model(model) -> tuple:
    """Copy a model so far down that its list of layers can be replaced; all weights are shared.

    returns  the copy, its decoder, and the names that the decoder gives to its list of layers and
             to the norm after the last layer
    """
    top = copy_shallow(model)
    decoder = top
    for name in name_of(model.named_modules(), lambda x: x is model.get_decoder()).split("."):
        decoder._modules[name] = copy_shallow(decoder._modules[name])
        decoder = decoder._modules[name]
    layers = name_of(decoder.named_children(), lambda x: isinstance(x, torch.nn.ModuleList))
    norm = name_of(decoder.named_children(), lambda x: "Norm" in type(x).__name__)
    return top, decoder, layers, norm


def view(model, first: int, last: int, end: torch.nn.Module | None = None):
    """Make a model of the layers first + 1 … last of a model, which shares its weights.

    A view that ends before the last layer gives hidden states without the last norm as features, so
    that another view can go on with them. Its LM head reads them through a norm or a small network.

    end      stands before the LM head of a view that ends early. None: the model's last norm
    returns  a model with a config of its own
    """
    new, decoder, layers, norm = open_model(model)
    decoder._modules[layers] = decoder._modules[layers][first:last]
    L = depth_of(model)
    new.config = copy.deepcopy(model.config)
    decoder.config = new.config.get_text_config()
    for name, value in vars(decoder.config).items():
        if isinstance(value, list) and len(value) == L:
            setattr(decoder.config, name, value[first:last])  # the kind of each layer
    decoder.config.num_hidden_layers = last - first
    if last < L:
        head = name_of(model.named_children(), lambda x: x is model.get_output_embeddings())
        if end is None:
            end = decoder._modules[norm]
        new._modules[head] = torch.nn.Sequential(end, new._modules[head])
        decoder._modules[norm] = torch.nn.Identity()
    return new


def split_layers(target: CachedLM, E: int, end: torch.nn.Module | None = None):
    """Split a model in two, and check that one part after the other is the whole model.

    E        how many layers the first part has, 1 or more and fewer than all
    end      what stands between the first part and its LM head. None: the model's last norm
    returns  early and late, each a CachedLM with a cache of its own. InputError where a layer reads
             more than hidden states and positions, or positions are added before the first layer
    """
    model = target.model
    L = depth_of(model)
    if not 1 <= E < L:
        raise InputError(f"--E must be 1 to {L - 1} for a model of {L} layers, got {E}")
    early = type(target)(view(model, 0, E, end), target.vocab)
    late = type(target)(view(model, E, L), target.vocab)
    ids, parents = [3, 1, 2, 0, 3], [-1, 0, 0, 1, 2]
    for lm in (target, early, late):
        lm.start([])
    whole = target.forward(ids, parents, counts=False).float()
    early.forward(ids, parents, counts=False)
    both = late.forward(early.features, parents, counts=False).float()
    error = (both - whole).abs().mean() / whole.abs().mean()
    if not error < (1e-5 if model.dtype == torch.float32 else 0.05):
        raise InputError("expected a model whose early and late layers make the whole, got "
                         f"{type(model).__name__}: off by {error:.1e}")
    return early, late


def move_counts(part: CachedLM, whole: CachedLM) -> None:
    """Count the calls of a model that ran for another as calls of the other.

    part   the model that ran: late layers, a tuned copy, a draft with fewer rows. Its counts return
           to 0
    whole  the model that it ran for, whose counts are the ones that are reported
    """
    whole.calls += part.calls
    whole.rows += part.rows
    whole.seconds += part.seconds
    part.calls = 0
    part.rows = 0
    part.seconds = 0.0
