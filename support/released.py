"""This file reads heads that others have trained and released.

A released head is a directory or a hub id, with config.json and files of tensors. The names of the
tensors tell what kind of head it is, since configurations say it in many ways or not at all:

    kind        a name by which it is known                            read by
    EAGLE-3     midlayer.hidden_norm.weight, or with layers.0          eagle3.py
    Medusa      0.0.… or 0.1.…, of head 0                              medusa.py
    DFlash      hidden_norm.weight                                     dflash.py
    EAGLE       fc.weight, and none of the others'                     eagle.py

A head of any other kind is refused, and so is a file with a tensor whose name is not expected. No
code of a pickled file is run, and only its tensors are kept.

Drafts of DFlash and DSpark come in three layouts. They agree in the names of the layers' tensors:

    z-lab          `target_layer_ids` are the layers whose outputs are read, in the order of the
                   columns of `fc`. Settings may be in `dflash_config`. The root's row guesses only
                   if `sample_from_anchor`, or a setting with this meaning, says so
    DeepSpec       the root's row guesses, too. The Markov head is markov_head.markov_w1 and _w2,
                   and a confidence head is left out. There are copies of the target's embeddings
                   and LM head
    speculators    `aux_hidden_state_layer_ids` are one more. An LM head of its own has rows for
                   some tokens, which d2t lists. Sliding layers look ahead in a block if
                   `sliding_window_non_causal` says so
"""
import math
import re
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

from common import InputError, context_length
from support.engine import depth_of, require
from support.files import ask_hub, check_file, explain_errors, read_json
from support.layers import choose_taps, make_config, share_weights, tap_widths
from support.packed import plain
from support.parts import Part, belongs, fill, load_trained, match_type, some_embeddings

import torch
from safetensors import safe_open
from transformers import LlamaConfig, Qwen3Config
from transformers.utils import cached_file

# The first of these files that a repository has is read, since some have their weights in two
# forms. The weights of a large head may come in parts, which an index lists.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
           "pytorch_model.bin.index.json", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
# What a message calls a kind of head, and names by which it is known. The kinds are tried in this
# order, since EAGLE-3 and DFlash have the name of EAGLE, too.
KINDS = {
    "an EAGLE-3 head": r"(midlayer|layers\.0)\.hidden_norm\.weight",
    "Medusa heads": r"(medusa_head\.)?0\.[01]\..*",
    "a DFlash draft": r"hidden_norm\.weight",
    "an EAGLE head": r"fc\.weight"}
# The settings of a layer that are read from a head's configuration:
SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "head_dim", "rms_norm_eps", "hidden_act")
# The settings of its rotary positions. A configuration has the first two or the third:
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
# The settings that are read of the layers of a draft of DFlash as well:
DFLASH = ("num_hidden_layers", "layer_types", "attention_bias", "sliding_window",
          "use_sliding_window", "max_window_layers")
# Those of DSpark's tensors that have other names here:
DSPARK = {"markov_head.markov_w1": "W1", "markov_head.markov_w2": "W2"}


# ------------------------------------------------------------------------------------- reading

def is_released(path: str | Path) -> bool:
    """Tell the path of a released head, a directory or hub id, from that of a file made here."""
    return not Path(path).is_file() and Path(path).suffix != ".safetensors"


def find_file(path: str, names: Sequence[str]) -> Path:
    """Find the first of some files that a directory or hub id has. FileNotFoundError if none is."""
    for name in names:
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if found:
            return Path(found)
    raise FileNotFoundError(f"there is no {' or '.join(names)}")


def read_files(path: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Read the files of a released head.

    path     a directory or hub id
    returns  the settings of its config.json, made flat if they were nested, and its tensors by
             name. Any error if something is missing or damaged
    """
    config = read_json(find_file(path, ["config.json"]))
    if config.get("transformer_layer_config"):  # the package speculators writes nested ones
        layer = {name: x for name, x in config["transformer_layer_config"].items() if x is not None}
        # If such a file does not say norm_before_residual, it means true.
        config = {"norm_before_residual": True} | config | layer
    return config, read_tensors(path, lambda name: name.removeprefix("model."))


def read_tensors(path: str, rename: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """Read tensors of a directory or hub id. Any error if a file is missing or damaged.

    path     the directory or hub id
    rename   gives a tensor the name that it has here, or an empty one if it is not wanted
    returns  the wanted tensors by these names
    """
    files = [find_file(path, WEIGHTS)]
    if files[0].name.endswith(".index.json"):
        listed = read_json(files[0])["weight_map"]
        files = [find_file(path, [part])
                 for part in {part for name, part in listed.items() if rename(name)}]
    tensors = {}
    for file in files:
        check_file(file)
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys() if rename(name)}
        else:  # a pickled file. With weights_only none of its code is run
            tensors |= torch.load(file, weights_only=True, map_location="cpu")
    return {rename(name): x for name, x in tensors.items() if rename(name) and torch.is_tensor(x)}


def read_head(path: str, kind: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Read a released head of one kind.

    path     a directory or hub id
    kind     the kind, in the words of KINDS
    returns  its settings, and its tensors by name, without a leading "model.". InputError if a file
             is missing or damaged, and for a head of another kind
    """
    ask_hub(path, WEIGHTS)
    with explain_errors("a trained file, or a directory or hub id with config.json and weights",
                        path):
        config, tensors = read_files(path)
    found = next((name for name, pattern in KINDS.items()
                  if any(re.fullmatch(pattern, tensor) for tensor in tensors)),
                 "a file without a head that is known here")
    require(found == kind, "adapter", kind, f"{path!r}, {found}")
    return config, tensors


# ---------------------------------------------------------------------------------- the layer

def read_layer_config(path: str, config: dict, model, kind: type = LlamaConfig,
                      more: Sequence[str] = ()):
    """Make the configuration of a released layer, whose rotary base is not always its target's.

    path     the head's, for messages
    config   its own configuration
    model    the target, whose texts may be longer than those that the head was trained on
    kind     the configuration's class
    more     other settings that are read, such as the number of layers, which is 1 otherwise
    returns  the configuration. InputError for settings that describe no layer
    """
    with explain_errors("a head whose config.json describes a layer", path):
        names = {*SHAPE, *ROPE, *more}
        kept = {name: config[name] for name in names if config.get(name) is not None}
        return kind(**{"num_hidden_layers": 1} | kept,
                    max_position_embeddings=context_length(model))


def read_eagle(path: str, model) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
    """Read a head of EAGLE or EAGLE-2, whose forms are the same.

    path     a directory or hub id
    model    the target
    returns  the configuration of its layer, and its tensors by name
    """
    config, tensors = read_head(path, "an EAGLE head")
    layer = read_layer_config(path, config, model)
    layer.attention_bias = "layers.0.self_attn.q_proj.bias" in tensors
    if layer.attention_bias:  # in Qwen2 the attention's output has none, and in Llama it has one
        tensors.setdefault("layers.0.self_attn.o_proj.bias", torch.zeros(layer.hidden_size))
    return layer, tensors


def read_eagle3(path: str, model) -> tuple:
    """Read a head of EAGLE-3 as EAGLE's code, SpecForge and SGLang write it.

    path     a directory or hub id
    model    the target
    returns  the configuration of its layer, the numbers of the layers whose inputs it reads, the
             tokens that it guesses, its form, and its other tensors by name. The form is {name:
             whether it has that} of "norm_before_residual", "norm_output" and "fc_norm"
    """
    config, found = read_head(path, "an EAGLE-3 head")
    taps = choose_taps(model)
    # Some engines give the layers whose inputs are read, and others the layers before these, whose
    # outputs they are.
    key = "eagle_aux_hidden_state_layer_ids"
    listed = config.get(key) or (config.get("eagle_config") or {}).get(key) or taps
    outputs = [i - 1 for i in taps]
    require([*listed] in (taps, outputs), "adapter", f"a head that reads layers {taps}",
            f"{path!r} with {key} {listed}")
    tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): x for name, x in found.items()}
    form = {name: bool(config.get(name)) for name in ("norm_before_residual", "norm_output")}
    form["fc_norm"] = any(name.startswith("fc_norm.") for name in tensors)
    vocab = take_vocab(tensors, path, model).tolist()
    return read_layer_config(path, config, model), taps, vocab, form, tensors


def take_vocab(tensors: dict[str, torch.Tensor], path: str, model) -> torch.Tensor:
    """Take out of a head's tensors what says for which tokens its LM head has rows.

    tensors  the head's
    path     the head's, for messages
    model    the target
    returns  the tokens [V']. InputError if the target lacks one of them
    """
    # Row i of the LM head stands for token i + d2t[i]. t2d says whether a token has a row.
    V = len(model.get_output_embeddings().weight)
    offsets = tensors.pop("d2t", torch.zeros(V, dtype=torch.int64))
    tensors.pop("t2d", None)
    vocab = torch.arange(len(offsets)) + offsets
    require(0 <= vocab.min() <= vocab.max() < V, "adapter", f"a head for {V} tokens",
            f"{path!r} for others")
    return vocab


def describe_dflash(model, ids: list[int], mask: int, layers: int, B: int, markov: int) -> dict:
    """Describe a draft of DFlash to train for a model, by what a released config.json says.

    ids      the layers of the target whose outputs it reads, by number
    mask     the token whose embedding the masks read
    layers   how many layers the draft has
    B        how many rows a block has
    markov   the rank of the Markov head, which released drafts lack. 0: there is none
    """
    config = make_config(model)
    return {name: getattr(config, name) for name in SHAPE} | {
        "vocab_size": len(model.get_output_embeddings().weight), "tie_word_embeddings": False,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers, "attention_bias": False, "block_size": B,
        "num_target_layers": depth_of(model), "markov_rank": markov,
        "dflash_config": {"target_layer_ids": ids, "mask_token_id": mask}}


class Form(NamedTuple):
    """Describe a draft of DFlash, in whatever layout it was released."""
    layers: Qwen3Config  # the configuration of its layers
    listed: list[int]  # the layers whose inputs it reads, in the order of the columns of `fc`
    rows: int  # of a block
    mask: int  # the token whose embedding the masks read
    first: int  # the first row of a block that guesses: 0, the root's, or 1
    # {kind of a layer: (low, high)}. The row at position i sees positions i - high + 1 to i - low.
    # If low is negative, it looks ahead within the block
    sees: dict[str, tuple]
    scale: float  # of embeddings
    multiplier: float  # of logits
    cap: float  # of logits. 0: there is none
    rank: int  # of the Markov head. 0: there is none


def read_dflash(config: dict, model) -> Form:
    """Read what config.json says of a draft of DFlash. Any error if its settings do not fit.

    config   its settings. Some may be in `dflash_config`
    model    the target
    """
    settings = config | (config.get("dflash_config") or {})
    if "aux_hidden_state_layer_ids" in settings:  # speculators: layers whose inputs are read
        listed = settings["aux_hidden_state_layer_ids"]
        # Layers of another kind than Qwen3's have windows, which the file does not say.
        usual = {"use_sliding_window": settings.get("model_type") != "qwen3"}
    else:  # z-lab and DeepSpec: layers whose outputs are read
        listed = [1 + i for i in settings["target_layer_ids"]]
        usual = {"sample_from_anchor": "DSpark" in str(settings.get("architectures"))}
    settings = usual | settings
    if settings.get("sliding_window", 0) is None:  # Qwen3's configuration would have one of 4096
        settings["use_sliding_window"] = False
    layers = read_layer_config("config.json", settings, model, Qwen3Config, DFLASH)
    layers._attn_implementation = "grouped"  # the attention of support/engine.py
    causal = settings.get("is_causal", settings.get("causal"))  # None: the file does not say
    # Whether rows of sliding layers see no later ones
    looks_back = not settings.get("sliding_window_non_causal") if causal is None else causal
    window = layers.sliding_window or math.inf
    sees = {"full_attention": (0 if causal else -math.inf, math.inf),
            "sliding_attention": (0 if looks_back else 1 - window, window)}
    root_guesses = any(settings.get(name) for name in (
        "sample_from_anchor", "query_zero_predicts_next", "shift_label"))
    form = Form(layers=layers, listed=listed, rows=settings["block_size"],
                mask=settings["mask_token_id"], first=0 if root_guesses else 1, sees=sees,
                scale=settings.get("input_embedding_scale") or 1.0,
                multiplier=settings.get("output_multiplier") or 1.0,
                cap=settings.get("final_logit_softcapping") or 0.0,
                rank=settings.get("markov_rank") or 0)
    check_dflash(settings, form, model)
    return form


def check_dflash(settings: dict, form: Form, model) -> None:
    """Raise an InputError if a draft of DFlash does not fit a model. See `read_dflash`."""
    table, h, L = model.get_input_embeddings().weight, form.layers.hidden_size, depth_of(model)
    depth, taps = settings.get("num_target_layers"), sorted(form.listed)
    # With these settings a draft has other layers or masks than are computed here.
    odd = [x for x in ("use_swa", "attention_sink_bias") if settings.get(x)]
    widths = [table.shape[1], *tap_widths(model, taps)]
    # In speculators' layout layer L would be read before the norm that stands before the LM head.
    last = L - ("aux_hidden_state_layer_ids" in settings)
    for fits, expected, got in (
            (not odd, "without settings that are not known here", odd),
            (depth in (None, L), f"for a model of {L} layers", depth),
            (len({*taps}) == len(taps) and 0 <= taps[0] and taps[-1] <= last,
             f"that reads the inputs of different layers from 0 to {last}", taps),
            (widths == [h] * len(widths),
             f"of embeddings and hidden states of {h} numbers, as its own are", widths),
            (isinstance(form.rows, int) and form.rows > form.first,
             f"with a block_size above {form.first}", form.rows),
            (isinstance(form.mask, int) and 0 <= form.mask < len(table),
             f"whose mask_token_id is a token below {len(table)}", form.mask)):
        if not fits:
            raise InputError(f"expected a draft {expected}, got {got!r}")


def fill_layer(draft: torch.nn.Module, parameters: dict[str, torch.nn.Parameter],
               tensors: dict[str, torch.Tensor], path: str, model):
    """Give a layer the tensors of a released head.

    A head may bring embeddings. They are used in place of the target's if they differ.

    draft       EAGLE's or EAGLE-3's layer, whose `lm` has the target's embeddings
    parameters  its parameters by the names of the released files
    tensors     the head's
    path        the head's, for messages
    model       the target
    returns     the layer. InputError if tensors are missing or unknown, or if the embeddings are of
                another model
    """
    # A released head reads rows of the table as they are, even if its target scales them.
    table = torch.nn.Embedding.from_pretrained(draft.lm.get_input_embeddings().weight.detach())
    own = take_own(table, tensors, "embed_tokens.weight", path, width=draft.config.hidden_size)
    draft.lm.set_input_embeddings(own)
    fill(parameters, tensors, path)
    # Embeddings of another width than the target's cannot be compared with them.
    require(own.weight.shape != table.weight.shape or belongs(some_embeddings(draft.lm), model),
            "adapter", "a head for this model", f"{path!r}, which is for another")
    return match_type(draft, model)


def take_own(module: torch.nn.Module, tensors: dict[str, torch.Tensor], name: str, path: str,
             rows: int = 0, width: int = 0) -> torch.nn.Module:
    """Take an LM head or embeddings out of a head's tensors, and use them if they are others.

    module   the target's
    tensors  the head's
    name     the name of the table among them
    path     the head's, for messages
    rows     how many rows its table has. 0: as many as the target's
    width    how many numbers a row has. 0: as many as the target's
    returns  the target's module if the head has no table or the same one, and otherwise a module
             with the head's. InputError if that table is damaged or of another shape
    """
    table = plain(module.weight)
    given = tensors.pop(name, table)
    shape = rows or len(table), width or table.shape[1]
    if shape == table.shape and torch.equal(given.to(table), table):
        return module
    own = share_weights(module)
    own.weight = torch.nn.Parameter(table.new_empty(shape), requires_grad=False)
    fill({name: own.weight}, {name: given}, path)
    return own


def load_dflash(path: str | Path, title: str, model, make: Callable[[dict], Part]) -> Part:
    """Read a draft of DFlash from its file, or a released one in any of its layouts.

    path     the file, or the directory or hub id
    title    what the part must be, in the words of KINDS
    model    the target
    make     a function from {"config": what a released config.json says} to a draft with any
             weights
    returns  the draft, in the type of its model. InputError if it does not fit
    """
    if not is_released(path):
        return load_trained(path, title, model, make)
    path = str(path)
    config, found = read_head(path, title)
    tensors = {}
    for name, x in found.items():
        stem, _, last = name.rpartition(".")
        # verifier_… are copies of the target's tensors. No guess reads a confidence head.
        if not name.startswith(("verifier_", "confidence_head.")):
            tensors[f"{DSPARK.get(stem, stem)}.{last}".removeprefix(".")] = x
    vocab = take_vocab(tensors, path, model)
    with explain_errors("a head whose config.json fits this model", path):
        draft = make({"config": config | {"draft_vocab_size": len(vocab)}})
        listed = draft.form.listed  # features come by the layers' numbers
        columns = sorted(range(len(listed)), key=listed.__getitem__)
        fc = tensors["fc.weight"].unflatten(1, (len(listed), -1))
        tensors["fc.weight"] = fc[:, columns].flatten(1)
    draft.vocab = vocab.to(draft.vocab)
    draft.embed = take_own(draft.embed, tensors, "embed_tokens.weight", path)
    draft.head = take_own(draft.head, tensors, "lm_head.weight", path, len(vocab))
    fill(draft.trainable(), tensors, path)
    return match_type(draft, model)
