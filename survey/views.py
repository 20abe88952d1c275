"""A view of a model is a model of its own that has only some of the layers, and copies no weights.

layerskip.py and early_exit.py split a model into two views. The first one drafts and the second one
goes on from the hidden states of the first. Here E = 2 of L = 3 layers are early ones:

    the model   tokens ── 1 ── 2 ── 3 ── norm ── LM head
    early       tokens ── 1 ── 2 ─┬─ end ── LM head          `end` is the norm, or a trained exit
                                  x                          x is [n, d], the features of `early`
    late                          └─ 3 ── norm ── LM head

A layer keeps its number in a view, since a cache finds the layer's rows by this number. So each
view has a cache that holds only its own layers.

draft_verify.py uses the helpers alone. Its draft has all layers, but not all of their blocks.
"""
import copy
from typing import Callable, Iterator

from common import CachedLM, InputError

import torch


def depth_of(model) -> int:
    """Count a model's layers."""
    return model.config.get_text_config().num_hidden_layers


def context_length(model) -> int:
    """Find how many tokens a model is made for.

    With LongRoPE the limit is the original length. Beyond it all keys are turned at another rate,
    so the keys in the cache would be wrong.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(x for x in rope.values() if isinstance(x, dict))]  # nested by kind of layer
    lengths = [x["original_max_position_embeddings"] for x in kinds if "longrope" in x.values()]
    return min([getattr(config, "max_position_embeddings", None) or 10 ** 9, *lengths])


def copy_shallow(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module so that its parts can be replaced in the copy.

    module   any module
    returns  a copy that has the same parts and weights, not copies of them
    """
    new = copy.copy(module)
    new._modules = dict(module._modules)
    return new


def name_of(parts: Iterator[tuple[str, torch.nn.Module]], fits: Callable,
            expected: str = "a decoder of layers with a norm after the last") -> str:
    """Find the name of the first module that fits.

    parts     pairs of a name and a module, such as `named_children` gives
    fits      fits(module) says whether a module is the wanted one
    expected  what the InputError says was expected, if no module fits
    returns   the name
    """
    for name, part in parts:
        if fits(part):
            return name
    raise InputError(f"expected {expected}")


def open_model(model) -> tuple:
    """Copy a model down to its list of layers, so that the list can be replaced in the copy.

    The modules on the way from the model to its list of layers are copied. The list itself, all
    layers and all weights are those of the model.

    returns  the copy, its decoder, the decoder's name for its list of layers, and its name for the
             norm after the last layer. InputError if the model has no such list or no such norm
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
    """Make a view of a model.

    The features of a view that ends early are the hidden states after its own last layer, without
    a norm. So another view can go on with them. The LM head reads them through `end`.

    first    how many layers the view lacks at the beginning of the model
    last     how many layers of the model come before the end of the view. So the view has the
             layers first + 1 … last, if the first layer of the model is layer 1
    end      the module before the LM head of a view that ends early. None: the model's last norm
    returns  the view, with a config of its own
    """
    new, decoder, layers, norm = open_model(model)
    decoder._modules[layers] = decoder._modules[layers][first:last]
    L = depth_of(model)
    new.config = copy.deepcopy(model.config)
    decoder.config = new.config.get_text_config()
    for name, value in vars(decoder.config).items():
        # A list with a value for each layer, such as the layer's kind of attention, is cut as well.
        if isinstance(value, list) and len(value) == L:
            setattr(decoder.config, name, value[first:last])
    decoder.config.num_hidden_layers = last - first
    if last < L:
        head = name_of(model.named_children(), lambda x: x is model.get_output_embeddings())
        if end is None:
            end = decoder._modules[norm]
        # The norm moves from the decoder, whose output is the features, to the LM head.
        new._modules[head] = torch.nn.Sequential(end, new._modules[head])
        decoder._modules[norm] = torch.nn.Identity()
    return new


def split_layers(target: CachedLM, E: int, end: torch.nn.Module | None = None):
    """Split a model into two views, and check that one after the other is the whole model.

    Families fail the check if a layer reads more than hidden states and positions, or if the model
    adds positions before its first layer, as GPT-2 does.

    target   the whole model. What it has cached is lost in the check
    E        how many layers the first view has, 1 or more and fewer than all
    end      the module before the LM head of the first view. None: the model's last norm
    returns  early and late, each a CachedLM with a cache of its own. InputError if E does not fit
             or the check fails
    """
    model = target.model
    L = depth_of(model)
    if not 1 <= E < L:
        raise InputError(f"--E must be 1 to {L - 1} for a model of {L} layers, got {E}")
    early = type(target)(view(model, 0, E, end), target.vocab)
    late = type(target)(view(model, E, L), target.vocab)
    ids, parents = [3, 1, 2, 0, 3], [-1, 0, 0, 1, 2]  # a tree, so masks are checked too
    for lm in (target, early, late):
        lm.start([])
    whole = target.forward(ids, parents, counts=False).float()
    early.forward(ids, parents, counts=False)
    both = late.forward(early.features, parents, counts=False).float()
    # A view may round differently in 16 bits, and a wrong one is off by far more than this.
    error = (both - whole).abs().mean() / whole.abs().mean()
    if not error < (1e-5 if model.dtype == torch.float32 else 0.05):
        raise InputError("expected a model whose early and late layers make the whole, got "
                         f"{type(model).__name__}: off by {error:.1e}")
    return early, late


def move_counts(part: CachedLM, whole: CachedLM) -> None:
    """Move the counts of a model that ran in the place of another to the counts of the other.

    part   the model that ran: late layers, a tuned copy or a draft with fewer rows. Afterwards its
           counts are 0
    whole  the model in whose place it ran. A report shows the counts of this model alone
    """
    whole.calls += part.calls
    whole.rows += part.rows
    whole.seconds += part.seconds
    part.calls = 0
    part.rows = 0
    part.seconds = 0.0
