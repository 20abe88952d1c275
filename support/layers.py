"""This file takes a model apart: it reads, splits and copies its layers.

    taps     which layers a draft reads. EngineLM (engine.py) keeps what enters them
    views    a model of its own that has only some of the layers, and copies no weights
    layers   some layers are copied into a smaller model, to be trained, saved and loaded
    new      the configuration of a layer that is trained for a model
"""
import copy
from typing import Iterable

from common import InputError, context_length
from support.engine import EngineLM, depth_of, list_layers, name_of
from support.files import explain_errors

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

# Three kinds of settings change with the layers. Lists with an entry for each layer, such as
# layer_types, need no names here, since their length tells. Ids of tokens may be as many by chance.
NUMBERS = ("mlp_only_layers", "moe_layers", "attn_layer_indices")  # the numbers of some layers
# How many of a model's first layers are of one kind:
COUNTS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def name_norm(decoder: torch.nn.Module) -> str:
    """Return a decoder's name for the norm after its last layer. InputError if it has none."""
    return name_of(decoder, lambda x: "Norm" in type(x).__name__)


def share_weights(model):
    """Copy a model's modules and configuration, but none of its weights.

    model    the model. It stays as it is
    returns  a model with the same weights, whose modules can be changed and replaced
    """
    return copy.deepcopy(model, {id(x): x for x in [*model.parameters(), *model.buffers()]})


def choose_taps(model) -> list[int]:
    """Choose the three layers that EAGLE-3 taps: an early, a middle and a late one.

    model    the target
    returns  the numbers 2, L/2 and L - 3 in ascending order. A model of fewer than 7 layers may
             lack some of these layers, or have fewer than three different ones
    """
    L = depth_of(model)
    return sorted({min(2, L - 1), L // 2, max(0, L - 3)})


def read_taps(text: str, model) -> list[int]:
    """Read the option `--taps`.

    text     numbers of layers with commas between them
    model    the target
    returns  the numbers. InputError if they are not in ascending order, or no layers of the model
    """
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


# ------------------------------------------------------------------------------------------- views
# A view of a model is a model of its own that has only some of the layers, and copies no weights.
#
# layerskip.py and early_exit.py split a model into two views. The first one drafts, and the second
# goes on from the hidden states of the first. Here E = 2 of L = 3 layers are early ones:
#
#     the model   tokens ── 1 ── 2 ── 3 ── norm ── LM head
#     early       tokens ── 1 ── 2 ─┬─ norm ── LM head         or: ─┬─ adapter ── norm ── LM head
#                                   x                          x is [n, d], the features of `early`
#     late                          └─ 3 ── norm ── LM head
#
# A layer keeps its number in a view, since a cache finds the layer's rows by this number. So each
# view has a cache that holds only its own layers.


def view(model, first: int, last: int, adapter: torch.nn.Module | None = None):
    """Make a view of a model.

    The features of a view that ends early are the hidden states after its own last layer, without
    a norm. So another view can go on with them. The LM head reads them through the norm.

    first    how many layers the view lacks at the beginning of the model
    last     how many layers of the model come before the end of the view. So the view has the
             layers first + 1 … last, if the first layer of the model is layer 1
    adapter  one more layer at the end of the view, and the norm after it, `adapter.norm`. Then what
             enters this layer is tapped as the features. None: there is no such layer
    returns  the view, with a config of its own
    """
    new = share_weights(model)
    decoder, layers = new.get_decoder(), list_layers(new)
    text, norm = new.config.get_text_config(), name_norm(decoder)
    del layers[last:]
    del layers[:first]
    if adapter:
        layers.append(adapter)
        decoder._modules[norm] = adapter.norm
    elif last < depth_of(model):
        # The norm moves from the decoder, whose output is the features, to the LM head.
        end = torch.nn.Sequential(decoder._modules[norm], new.get_output_embeddings())
        new.set_output_embeddings(end)
        decoder._modules[norm] = torch.nn.Identity()
    renumber(text, range(first, first + len(layers)))
    if adapter and getattr(text, "layer_types", None):
        # The adapter has the number of the layer in whose place it stands, but attends to all rows.
        text.layer_types[-1] = "full_attention"
    return new


def split_layers(target: EngineLM, E: int, adapter: torch.nn.Module | None = None):
    """Split a model into two views, and check that one after the other is the whole model.

    Families fail the check if a layer reads more than hidden states and positions, or if the model
    adds positions before its first layer, as GPT-2 does.

    target   the whole model
    E        how many layers the first view has, 1 or more and fewer than all
    adapter  one more layer of the first view, with its norm, as for `view`. None: there is none
    returns  early and late, each a CachedLM with a cache of its own. The features of `early` are
             the hidden states after layer E, if it starts with taps [E]. InputError if E does not
             fit or the check fails
    """
    model = target.model
    L = depth_of(model)
    if not 1 <= E < L:
        raise InputError(f"--E must be 1 to {L - 1} for a model of {L} layers, got {E}")
    with explain_errors("a model that can be split after any layer", type(model).__name__):
        parts = view(model, 0, E, adapter), view(model, E, L)
        whole, early, late = (type(target)(x, target.vocab) for x in (model, *parts))
        # A tree, so masks are checked too. The smallest vocabularies have only some of its tokens.
        ids, parents = [x % whole.vocab for x in (3, 1, 2, 0, 3)], [-1, 0, 0, 1, 2]
        right = whole.forward(ids, parents).float()
        early.taps = [E]
        early.forward(ids, parents)
        both = late.forward(early.features, parents).float()
    # A view may round differently in 16 bits, and a wrong one is off by far more than this.
    error = (both - right).abs().mean() / right.abs().mean()
    if not error < (1e-5 if model.dtype == torch.float32 else 0.05):
        raise InputError("expected a model whose early and late layers make the whole, got "
                         f"{type(model).__name__}: off by {error:.1e}")
    return tuple(type(target)(x, target.vocab) for x in parts)  # which have made no pass yet


def move_counts(part: EngineLM, whole: EngineLM) -> None:
    """Move the counts of a model that ran in the place of another to the counts of the other.

    part   the model that ran: late layers, a tuned copy or a draft with fewer rows. Afterwards its
           counts are 0
    whole  the model in whose place it ran. A report shows only the counts of this model
    """
    whole.passes += part.passes
    whole.calls += part.calls
    part.passes = []
    part.calls = 0


# ----------------------------------------------------------------------------------- copied layers
# Some layers of a model become a smaller model, to be trained, saved and loaded. The configuration
# says by number what each layer is like: its window, its rotary positions, its experts. So the
# smaller model needs a configuration with new numbers. Here layers 2 and 5 of six are taken:
#
#     layer            0      1      2      3      4      5      ->    0      1
#     layer_types      slide  full   slide  full   slide  full   ->    slide  full
#     mlp_only_layers  [0, 5]                                    ->    [1]         layer 5 is now 1
#     first_k_dense…   3, which are layers 0, 1 and 2            ->    1           layer 2 is now 0
#
# The smaller model is made from this configuration, as it would be loaded from a file. It computes
# what the model itself computes when all its other layers pass their input on.


def renumber(text, numbers: Iterable[int]) -> None:
    """Keep what a configuration says of some layers, by the new numbers of these layers.

    text      the configuration of a model that reads text only, which is changed
    numbers   the layers that are kept, in ascending order
    """
    total = text.num_hidden_layers
    for name, value in [*vars(text).items()]:
        if name in NUMBERS and value is not None:
            setattr(text, name, [new for new, old in enumerate(numbers) if old in value])
        elif name in COUNTS and value is not None:
            setattr(text, name, sum(old < value for old in numbers))
        elif isinstance(value, list) and len(value) == total and "token_id" not in name:
            setattr(text, name, [value[old] for old in numbers])
    text.num_hidden_layers = len(numbers)


def copy_weights(model, small, numbers: list[int]) -> None:
    """Copy some layers of a model into a smaller one, and all else of the same name and shape.

    model     the model that is copied from
    small     the smaller model that is copied into
    numbers   the layers of the model that the layers of the smaller one are
    """
    # Outside the layers names tell what belongs together. A model that reads images too has other
    # names than its text model, but not inside the decoder and inside the LM head.
    for source, part in ((model.get_decoder(), small.get_decoder()),
                         (model.get_output_embeddings(), small.get_output_embeddings())):
        weights, own = source.state_dict(), part.state_dict()
        alike = [name for name in own if name in weights and weights[name].shape == own[name].shape]
        part.load_state_dict({name: weights[name] for name in alike}, strict=False)
    for layer, old in zip(list_layers(small), numbers, strict=True):
        layer.load_state_dict(list_layers(model)[old].state_dict())


def pass_on(layer, args: tuple, kwargs: dict, output):
    """Make a layer pass its input on, as its forward hook.

    layer         the layer, whose own result is thrown away
    args, kwargs  what the layer was given: its input comes first, or by name
    output        what the layer computed, the hidden state or a tuple that begins with it
    returns       the same as `output`, with the layer's input for the hidden state
    """
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def take_layers(model, numbers: list[int], **changes):
    """Make a smaller model of some layers of a model, in its type and on its device.

    model     the model whose layers are taken
    numbers   the layers, in ascending order
    changes   other settings of the text model, such as a vocabulary of another size
    returns   the smaller model. Its LM head and embeddings are copies of the model's, if their
              sizes are the same. InputError if the family's configuration cannot describe these
              layers alone
    """
    text = model.config.get_text_config()
    with explain_errors(f"a model whose layers {numbers} can be a model", type(model).__name__):
        # A model that reads images too has a text model inside, which alone is made.
        config = copy.deepcopy(text)
        renumber(config, numbers)
        config = type(text).from_dict(config.to_dict() | changes)  # as it would be read from a file
        # The new model begins with random weights. Drawing them must not change what is drawn
        # later.
        with torch.random.fork_rng():
            small = AutoModelForCausalLM.from_config(config, dtype=model.dtype,
                                                     attn_implementation=text._attn_implementation)
        small = small.to(model.device).eval()
        copy_weights(model, small, numbers)
        with torch.no_grad():  # some layers of Zamba2 do not run without others
            small(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device),
                  use_cache=False)
        return small


# --------------------------------------------------------------------------------------- new layers

def make_config(model, mlp: int = 0) -> LlamaConfig:
    """Make the configuration of a Llama layer to train for a model, as wide as the model's layers.

    mlp   the width of the MLP. 0: that of the model's MLPs
    """
    text, h = model.config.get_text_config(), model.get_input_embeddings().weight.shape[1]
    heads = text.num_attention_heads
    with explain_errors("layers of one size", type(model).__name__):
        return LlamaConfig(
            hidden_size=h, num_attention_heads=heads, num_hidden_layers=1, rms_norm_eps=1e-5,
            intermediate_size=mlp or getattr(text, "intermediate_size", None) or 4 * h,
            num_key_value_heads=getattr(text, "num_key_value_heads", heads),
            head_dim=getattr(text, "head_dim", None) or h // heads,
            max_position_embeddings=context_length(model))
