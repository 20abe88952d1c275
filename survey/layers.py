"""This file makes some layers of a model into a smaller model, to be trained, saved and loaded.

The model's configuration says by number what each layer is like: its window, its rotary positions,
its experts. So layers that are taken out need a configuration with new numbers. Here layers 2 and 5
of six are taken:

    layer            0      1      2      3      4      5      ->    0      1
    layer_types      slide  full   slide  full   slide  full   ->    slide  full
    mlp_only_layers  [0, 5]                                    ->    [1]         layer 5 is now 1
    first_k_dense…   3, which are layers 0, 1 and 2            ->    1           layer 2 is now 0

The smaller model is made from this configuration, as it would be loaded from a file. It must then
compute what the model itself computes when all its other layers pass their input on. Layers that no
configuration of the family can describe are refused.
"""
import copy
import json
from contextlib import contextmanager

from common import InputError
from survey.views import depth_of

import torch
from transformers import AutoModelForCausalLM

# Three kinds of settings change with the layers. Lists with an entry for each layer, such as
# layer_types, need no names here, since their length tells.
NUMBERS = ("mlp_only_layers", "moe_layers")  # lists of the numbers of some layers
# How many of a model's first layers are of one kind:
COUNTS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def list_layers(model) -> torch.nn.ModuleList:
    """Find the list of a model's decoder layers.

    model     any causal model
    returns   the module that lists them. InputError if there is none of the model's depth
    """
    for part in model.get_decoder().modules():
        if isinstance(part, torch.nn.ModuleList) and len(part) == depth_of(model):
            return part
    raise InputError(f"{type(model).__name__} has no list of {depth_of(model)} layers")


def renumber(config, numbers: list[int]):
    """Copy a model's configuration, and keep in the copy what it says of some layers.

    config    the model's configuration, whose text part may be nested
    numbers   the layers that are kept, in ascending order
    returns   the copy, as it would be read back from a file
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    total = text.num_hidden_layers
    step = getattr(text, "decoder_sparse_step", None)
    if step:
        # Qwen has experts in every step-th layer that is not listed as having none. The new numbers
        # would break the step. So each layer without experts is listed, and the step becomes 1.
        text.mlp_only_layers = [i for i in range(total)
                                if i in text.mlp_only_layers or (i + 1) % step > 0]
        text.decoder_sparse_step = 1
    for name, value in list(vars(text).items()):
        if name in NUMBERS and value is not None:
            setattr(text, name, [new for new, old in enumerate(numbers) if old in value])
        elif name in COUNTS and value is not None:
            setattr(text, name, sum(old < value for old in numbers))
        elif isinstance(value, list) and len(value) == total and "token_id" not in name:
            setattr(text, name, [value[old] for old in numbers])
    text.num_hidden_layers = len(numbers)
    return type(config).from_dict(json.loads(config.to_json_string()))


@torch.no_grad()
def copy_weights(model, small, numbers: list[int]) -> None:
    """Copy some layers of a model into a smaller one, and all else of the same name and shape.

    model     the model that is copied from
    small     the smaller model that is copied into
    numbers   the layers of the model that the layers of the smaller one are
    """
    layers, few = list_layers(model), list_layers(small)
    for layer, old in zip(few, numbers, strict=True):
        layer.load_state_dict(layers[old].state_dict())
    copied = {id(x) for x in few.state_dict(keep_vars=True).values()}
    # Outside the layers names tell what belongs together. Two models of different classes, one with
    # images and one without, have the same names only inside the decoder and inside the LM head.
    pairs = [(model.get_decoder(), small.get_decoder()),
             (model.get_output_embeddings(), small.get_output_embeddings())]
    if type(small) is type(model):
        pairs = [(model, small)]
    for source, part in pairs:
        weights = source.state_dict()
        for name, x in part.state_dict(keep_vars=True).items():
            if id(x) not in copied and name in weights and weights[name].shape == x.shape:
                x.copy_(weights[name])


def pass_on(layer, args: tuple, kwargs: dict, output):
    """Make a layer pass its input on, as its forward hook.

    layer         the layer, whose own result is thrown away
    args, kwargs  what the layer was given: its input comes first, or by name
    output        what the layer computed, the hidden state or a tuple that begins with it
    returns       the same as `output`, with the layer's input for the hidden state
    """
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


@contextmanager
def narrow_windows(config):
    """Let layers with a sliding window see 3 tokens for a while.

    A check runs few tokens. With a wide window they would not show which layers have one.

    config   the model's configuration, which gets its window back at the end
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if window is not None:
        text.sliding_window = 3
    try:
        yield
    finally:
        if window is not None:
            text.sliding_window = window


@torch.inference_mode()
def run_layers(model, numbers: list[int], inputs: torch.Tensor) -> list[torch.Tensor]:
    """Run a model of which only some layers compute. All others pass their input on.

    model     the model
    numbers   the layers that compute
    inputs    input embeddings [1, n, d]
    returns   features [1, n, f] and logits [1, n, V], in float32
    """
    hooks = [layer.register_forward_hook(pass_on, with_kwargs=True)
             for i, layer in enumerate(list_layers(model)) if i not in numbers]
    features = []
    hooks.append(model.get_decoder().register_forward_hook(
        lambda module, args, output: features.append(output[0].float())))
    try:
        with narrow_windows(model.config):
            output = model(inputs_embeds=inputs, use_cache=False, return_dict=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [features[0], output.logits.float()]


def check_layers(model, small, numbers: list[int]) -> None:
    """Raise an InputError unless a smaller model computes what some layers of a model do.

    model     the model
    small     the smaller model
    numbers   the layers of the model that the layers of the smaller one are
    """
    table = model.get_input_embeddings()
    first = len(table.weight) // 2  # the first tokens of a vocabulary are special ones
    ids = torch.arange(first, first + 12, device=table.weight.device) % len(table.weight)
    with torch.inference_mode():
        inputs = table(ids[None])
    expected = run_layers(model, numbers, inputs)
    found = run_layers(small, list(range(len(numbers))), inputs)
    for x, y in zip(expected, found):
        if x.shape != y.shape:  # the smaller model has another vocabulary: features must do
            continue
        error = (y - x).abs().mean() / x.abs().mean()
        if not error < (1e-3 if model.dtype == torch.float32 else 0.02):
            raise InputError(f"no configuration makes them alone, outputs are off by {error:.1e}")


def make_smaller(model, config, numbers: list[int], changes: dict):
    """Make a smaller model from one configuration.

    model     the model whose layers are taken
    config    its configuration, or that of its text model
    numbers   the layers, in ascending order
    changes   other settings of the text model, by name
    returns   the smaller model, which was checked
    """
    config = renumber(config, numbers)
    text = config.get_text_config()
    for name, value in changes.items():
        setattr(text, name, value)
    attention = model.config.get_text_config()._attn_implementation
    # The new model begins with random weights. Drawing them must not change what is drawn later.
    with torch.random.fork_rng():
        small = AutoModelForCausalLM.from_config(config, dtype=model.dtype,
                                                 attn_implementation=attention)
    small = small.to(model.device).eval()
    copy_weights(model, small, numbers)
    check_layers(model, small, numbers)
    return small


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
    # A model that reads images too has a text model inside. That is tried first, for it is smaller.
    configs = [model.config] if text is model.config else [text, model.config]
    for config in configs:
        try:
            return make_smaller(model, config, numbers, changes)
        except Exception as error:  # each family has its own ways of refusing a configuration
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    listed = ", ".join(map(str, numbers))
    raise InputError(f"layers {listed} of {type(model).__name__} cannot be made into a model of "
                     f"their own: {said}")
