"""Views of a model: some of its layers, or none of some blocks, as a model that shares its weights;
and low-rank changes of all its layers.

layerskip.py drafts with the first layers and verifies with the others; draft_verify.py leaves out
blocks. Layers keep their numbers, which is all that a cache asks of them."""
import copy
from typing import Callable, Iterator

import torch
from torch.nn.utils import parametrize

from common import CachedLM, InputError


def depth_of(model) -> int:
    """L, its layers."""
    return model.config.get_text_config().num_hidden_layers


def copy_shallow(module: torch.nn.Module) -> torch.nn.Module:
    """A copy that shares the weights, and whose parts can be replaced."""
    new = copy.copy(module)
    new._modules = dict(module._modules)
    return new


def name_of(parts: Iterator[tuple[str, torch.nn.Module]], right: Callable,
            expected: str = "a decoder of layers with a norm after the last") -> str:
    """The name of the first module for which right(module); InputError if there is none."""
    for name, part in parts:
        if right(part):
            return name
    raise InputError(f"expected {expected}")


def open_model(model) -> tuple:
    """(a copy of a model, its decoder, what this calls its layers and its last norm), down to the
    list of layers; all weights are shared."""
    top = copy_shallow(model)
    decoder = top
    for name in name_of(model.named_modules(), lambda x: x is model.get_decoder()).split("."):
        decoder._modules[name] = copy_shallow(decoder._modules[name])
        decoder = decoder._modules[name]
    layers = name_of(decoder.named_children(), lambda x: isinstance(x, torch.nn.ModuleList))
    norm = name_of(decoder.named_children(), lambda x: "Norm" in type(x).__name__)
    return top, decoder, layers, norm


def view(model, first: int, last: int, end: torch.nn.Module | None = None):
    """Layers first + 1 … last of a model as a model that shares its weights. The early ones, where
    last < L, give the hidden states as they are, for others to go on with; before their LM head
    stands the model's last norm, or `end`."""
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
        new._modules[head] = torch.nn.Sequential(end or decoder._modules[norm], new._modules[head])
        decoder._modules[norm] = torch.nn.Identity()
    return new


def split_layers(target: CachedLM, E: int, end: torch.nn.Module | None = None):
    """(early, late): the first E layers with their exit, and the others. InputError where one after
    the other is not the whole model: where layers read more than hidden states and positions, or
    positions are added before the first."""
    model = target.model
    L = depth_of(model)
    if not 1 <= E < L:
        raise InputError(f"expected to exit after 1 to {L - 1} layers, got {E}")
    early, late = (type(target)(view(model, *span, end), target.vocab)
                   for span in ((0, E), (E, L)))
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


# -------------------------------------------------------------------------- low-rank changes

class LowRank(torch.nn.Module):
    """A weight W as W + B A, A [rank, in] and B [out, rank]."""

    def __init__(self, weight: torch.Tensor, rank: int):
        super().__init__()
        self.A = torch.nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.B = torch.nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (self.B @ self.A).to(weight)


def add_low_rank(model, rank: int) -> dict[str, torch.nn.Parameter]:
    """Give every matrix of the layers a change of low rank, in place; its parameters. InputError
    where they have none of torch's Linear (GPT-2)."""
    _, decoder, layers, _ = open_model(model)
    own = {}
    for name, part in decoder._modules[layers].named_modules():
        if isinstance(part, torch.nn.Linear):
            change = LowRank(part.weight, rank).to(part.weight.device)
            parametrize.register_parametrization(part, "weight", change)
            own |= {f"{name}.A": change.A, f"{name}.B": change.B}
    if not own:
        raise InputError(f"expected matrices of type Linear in {type(model).__name__}")
    return own


def merge_changes(model):
    """The model with its changes in its weights, to be trained no more."""
    for part in model.modules():
        if parametrize.is_parametrized(part, "weight"):
            parametrize.remove_parametrizations(part, "weight")  # the changed weight stays
    return model.requires_grad_(False)
