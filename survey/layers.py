"""Some layers of a model as a smaller model of their own, to be trained, saved and loaded.

What a layer is like (its window, rotary positions, experts) stands in the model's configuration, by
the layer's number. The smaller model is made from a configuration that was renumbered, as it would
be loaded from a file, and must then compute what the model itself computes when all its other
layers pass their input on. Layers that no configuration of the family can describe are refused."""
import copy
import json
from contextlib import contextmanager

from common import InputError
from survey.views import depth_of

import torch
from transformers import AutoModelForCausalLM

# Settings that hold numbers of layers, and settings that count a model's first layers. Lists with
# an entry for each layer need no names: their length tells.
NUMBERS = ("mlp_only_layers", "moe_layers")
COUNTS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def list_layers(model) -> torch.nn.ModuleList:
    """Return a model's decoder layers."""
    for part in model.get_decoder().modules():
        if isinstance(part, torch.nn.ModuleList) and len(part) == depth_of(model):
            return part
    raise InputError(f"{type(model).__name__} has no list of {depth_of(model)} layers")


def renumber(config, numbers: list[int]):
    """Describe some layers of a model: copy its configuration and keep what it says of them.

    config   the model's configuration, whose text part may be nested
    numbers  the layers, in ascending order
    returns  the copy, as it would be read back from a file
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    total = text.num_hidden_layers
    step = getattr(text, "decoder_sparse_step", None)
    if step:  # Qwen's layers have experts at every step, unless they are listed as having none
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
    """Copy the layers of these numbers, and whatever else has the same name and shape."""
    layers, few = list_layers(model), list_layers(small)
    for layer, old in zip(few, numbers, strict=True):
        layer.load_state_dict(layers[old].state_dict())
    copied = {id(x) for x in few.state_dict(keep_vars=True).values()}
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
    """Replace what a layer gives by what it was given: a forward hook."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


@contextmanager
def narrow_windows(config):
    """Let layers with a sliding window see 3 tokens, so that few tokens show which have one."""
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
    """Run a model with all layers but those of these numbers passing their input on.

    inputs   input embeddings [1, n, d]
    returns  features [1, n, f] and logits [1, n, V], in float32
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
    """Raise an InputError unless the smaller model computes what these layers of the model do."""
    table = model.get_input_embeddings()
    first = len(table.weight) // 2  # the first tokens of a vocabulary are special ones
    ids = torch.arange(first, first + 12, device=table.weight.device) % len(table.weight)
    with torch.inference_mode():
        inputs = table(ids[None])
    expected = run_layers(model, numbers, inputs)
    found = run_layers(small, list(range(len(numbers))), inputs)
    for x, y in zip(expected, found):
        if x.shape != y.shape:  # logits of another vocabulary
            continue
        error = (y - x).abs().mean() / x.abs().mean()
        if not error < (1e-3 if model.dtype == torch.float32 else 0.02):
            raise InputError(f"no configuration makes them alone, outputs are off by {error:.1e}")


def make_smaller(model, config, numbers: list[int], changes: dict):
    """Make a smaller model from a configuration; the arguments are those of `take_layers`."""
    config = renumber(config, numbers)
    text = config.get_text_config()
    for name, value in changes.items():
        setattr(text, name, value)
    attention = model.config.get_text_config()._attn_implementation
    with torch.random.fork_rng():
        small = AutoModelForCausalLM.from_config(config, dtype=model.dtype,
                                                 attn_implementation=attention)
    small = small.to(model.device).eval()
    copy_weights(model, small, numbers)
    check_layers(model, small, numbers)
    return small


def take_layers(model, numbers: list[int], **changes):
    """Make a smaller model of some layers of a model, in its type and on its device.

    numbers  the layers, in ascending order
    changes  other settings of the text model, such as a vocabulary of another size
    returns  the smaller model; its LM head and embeddings are copies of the model's, where their
             sizes are the same
    raises   InputError where the family's configuration cannot describe these layers alone
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
