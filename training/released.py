"""This file reads heads that others have trained and released, and writes heads as they do.

A released head is a directory or a hub id, with config.json and files of tensors. The names of the
tensors tell what kind of head it is, since configurations say it in many ways or not at all:

    kind        a name by which it is known                            read by
    EAGLE-3     midlayer.hidden_norm.weight, or with layers.0          eagle3.py
    EAGLE       fc.weight, and none of EAGLE-3's                       eagle.py
    Medusa      0.0.linear.weight, of head 0                           medusa.py

A head of any other kind is refused, and so is a file with a tensor whose name is not expected. A
pickled file may hold tensors alone, and no code of it is run.
"""
import json
import re
from pathlib import Path
from typing import Collection, Iterable

from common import InputError
from training.files import check_file, explain, read_json, shorten, write_whole
from training.layers import choose_taps, context_length
from training.parts import belongs, check_numbers, fill, match_type, some_rows

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config
from transformers.utils import cached_file

# The first of these files that a repository has is read, since some have their weights in two
# forms. The weights of a large head may come in parts, which an index lists.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
           "pytorch_model.bin.index.json", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
# What a message calls a kind of head, and names by which it is known. The kinds are tried in this
# order, since EAGLE-3 has the name of EAGLE, too.
KINDS = {
    "an EAGLE-3 head": r"(midlayer|layers\.0)\.hidden_norm\.weight",
    "Medusa heads": r"(medusa_head\.)?0\.[01]\..*",
    "an EAGLE head": r"fc\.weight"}
SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "head_dim", "rms_norm_eps")  # what a configuration says of a layer, except its positions
RANKS = 10  # how many guesses of a head are measured, and how many children a node may have
# The tree `mc_sim_7b_63` of Medusa's released code, for heads whose acceptance is not known.
# A word is a node below the root: its digits are the ranks along its path.
MEDUSA_TREE = """
    0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40
    21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90
    060 0001 16 070""".split()
ROTARY = ("default", "linear", "llama3")  # rotary positions that do not depend on a text's length


# ------------------------------------------------------------------------------------- reading

def is_released(path: str | Path) -> bool:
    """Tell the path of a released head, a directory or hub id, from that of a file made here."""
    return not Path(path).is_file() and Path(path).suffix != ".safetensors"


def find_file(path: str, name: str) -> Path | None:
    """Find a file of a directory or of a hub id; None if it has none of this name."""
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.exists() else None
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None


def need_file(path: str, name: str) -> Path:
    """Find a file as `find_file` does. FileNotFoundError if there is none of this name."""
    file = find_file(path, name)
    if file is None:
        raise FileNotFoundError(f"there is no {name}")
    return file


def find_weights(path: str) -> list[Path]:
    """Find the files that hold the tensors of a head.

    path     a directory or hub id
    returns  the first file of WEIGHTS that is there, or all files that it lists if it is an index.
             FileNotFoundError if one of them is missing
    """
    for name in WEIGHTS:
        file = find_file(path, name)
        if file is not None and not name.endswith(".index.json"):
            return [file]
        if file is not None:
            parts = read_json(file)["weight_map"].values()
            return [need_file(path, part) for part in sorted({*parts})]
    raise FileNotFoundError(f"there is no {WEIGHTS[0]}, nor another file of weights")


def read_config(file: Path) -> dict:
    """Read a config.json, and make its settings flat if they are nested.

    file     the file
    returns  the settings. ValueError or TypeError if the file does not hold dictionaries
    """
    config = read_json(file)
    if not isinstance(config, dict):
        raise TypeError("config.json does not hold a dictionary")
    if "transformer_layer_config" in config:  # the package speculators writes nested ones
        # Where such a configuration does not say whether the residual stream is normed, it is.
        config = {"norm_before_residual": True} | config | config["transformer_layer_config"]
    return config


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Read a file of tensors. A pickled file may hold tensors alone: no code of it is run."""
    check_file(file)
    if file.suffix == ".safetensors":
        return load_file(file)
    return torch.load(file, weights_only=True, map_location="cpu")


def read_released(path: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Read a released head.

    path     a directory or hub id
    returns  the settings of its config.json, made flat if they were nested, and its tensors by
             name. InputError if something is missing or damaged
    """
    try:
        config = read_config(need_file(path, "config.json"))
        tensors = {}
        for file in find_weights(path):
            tensors |= read_weights(file)
        return config, {name: x for name, x in tensors.items() if x.numel() > 0}
    except Exception as error:  # the readers of the file formats raise all kinds
        raise InputError(f"expected a trained file, or a directory or hub id with config.json and "
                         f"weights, got {path!r}: {explain(error)}") from error


def tell_kind(names: Collection[str]) -> str:
    """Tell from the names of its tensors what kind of head a file has, in the words of KINDS."""
    for kind, pattern in KINDS.items():
        if any(re.fullmatch(pattern, name) for name in names):
            return kind
    return "a file without a head that is known here"


def read_head(path: str, kind: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Read a released head of one kind.

    path     a directory or hub id
    kind     the kind, in the words of KINDS
    returns  its settings, as `read_released` gives them, and its tensors by name, where "model."
             is left out. InputError for a head of another kind
    """
    config, tensors = read_released(path)
    tensors = {name.removeprefix("model."): x for name, x in tensors.items()}
    found = tell_kind(tensors)
    if found != kind:
        raise InputError(f"--adapter must be {kind}, got {path!r}, {found}")
    return config, tensors


def refuse_settings(path: str, config: dict, tensors: Iterable[str],
                    names: Iterable[str] = ()) -> None:
    """Raise an InputError for a head of several layers, or with settings that are not computed
    here.

    The tensors say how many layers there are. The configuration may say how many the target has.

    path     the head's, for the message
    config   its configuration
    tensors  the names of its tensors
    names    further settings that must be false or absent
    """
    layers = {layer for name in tensors for layer in re.findall(r"^layers\.\d+|^midlayer", name)}
    if len(layers) > 1:
        raise InputError(f"--adapter must be a head of one layer, got {path!r} with "
                         f"{', '.join(sorted(layers))}")
    refused = [name for name in names if config.get(name)]
    if config.get("hidden_act", "silu") != "silu":
        refused.append("hidden_act")
    if refused:
        raise InputError(f"--adapter must be a head without {refused[0]}, got {path!r} with "
                         f"{config[refused[0]]}")


# ---------------------------------------------------------------------------------- the layer

def make_config(model, mlp: int = 0) -> LlamaConfig:
    """Describe a Llama layer that is to be trained for a model, as wide as the model's own.

    mlp   the width of the MLP. 0: as wide as the model's
    """
    text, h = model.config.get_text_config(), model.get_input_embeddings().weight.shape[1]
    heads = text.num_attention_heads
    return LlamaConfig(
        hidden_size=h, intermediate_size=mlp or getattr(text, "intermediate_size", None) or 4 * h,
        num_attention_heads=heads, num_key_value_heads=getattr(text, "num_key_value_heads", heads),
        head_dim=getattr(text, "head_dim", None) or h // heads, num_hidden_layers=1,
        rms_norm_eps=1e-5, max_position_embeddings=context_length(model))


def read_layer_config(path: str, config: dict, model,
                      family: type[PreTrainedConfig] = LlamaConfig) -> PreTrainedConfig:
    """Make the configuration of a released layer, whose rotary base is not always its target's.

    path     the head's, for messages
    config   its own configuration
    model    the target, whose texts may be longer than those that the head was trained on
    family   the class of the configuration
    returns  the configuration. InputError for rotary positions that are not computed here, and for
             settings that describe no layer
    """
    try:
        rope = {}
        for name in "rope_parameters", "rope_scaling":
            rope |= config.get(name) or {}
        kind = rope.setdefault("rope_type", rope.pop("type", "default"))
        if kind not in ROTARY or any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(f"rotary positions must be of type {', '.join(ROTARY)}, not {rope}")
        # The released code turns keys by the base 10,000 where a configuration names none.
        rope["rope_theta"] = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
        kept = {name: config[name] for name in SHAPE if config.get(name) is not None}
        for name, value in (kept | {"rope_theta": rope["rope_theta"]}).items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        return family(**kept, num_hidden_layers=1, rope_parameters=rope,
                      max_position_embeddings=context_length(model))
    except Exception as error:  # transformers raises all kinds for settings that do not fit
        raise InputError(f"--adapter must be a head whose config.json describes a layer, got "
                         f"{path!r}: {shorten(error)}") from error


def read_eagle(path: str, model) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    """Read a head of EAGLE or EAGLE-2, whose forms are the same.

    path     a directory or hub id
    model    the target
    returns  the configuration of its layer, and its tensors by name
    """
    config, tensors = read_head(path, "an EAGLE head")
    refuse_settings(path, config, tensors)
    biases = [x for x in "qkvo" if f"layers.0.self_attn.{x}_proj.bias" in tensors]
    # With biases of queries, keys and values alone the attention is Qwen2's.
    family = Qwen2Config if biases == [*"qkv"] else LlamaConfig
    layer = read_layer_config(path, config, model, family)
    layer.attention_bias = "o" in biases
    return layer, tensors


def fill_layer(draft: torch.nn.Module, parameters: dict[str, torch.nn.Parameter],
               tensors: dict[str, torch.Tensor], path: str, model):
    """Give a layer the tensors of a released head, and the head's embeddings where they differ.

    draft       EAGLE's or EAGLE-3's layer, whose `lm` has the target's embeddings
    parameters  its parameters by the names of the released files
    tensors     the head's
    path        the head's, for messages
    model       the target
    returns     the layer. InputError if tensors are missing or unknown, or if the embeddings are of
                another model, or if the head needs some and has none
    """
    table, h = draft.lm.get_input_embeddings().weight, draft.config.hidden_size
    found = tensors.pop("embed_tokens.weight", None)
    if (table if found is None else found).shape != (len(table), h):
        said = "none" if found is None else f"those of the shape {tuple(found.shape)}"
        raise InputError(f"--adapter must be a head with embeddings of {len(table)} tokens, each "
                         f"of {h} numbers, got {path!r} with {said}")
    if found is not None:
        check_numbers({"embed_tokens.weight": found}, path)
        if found.shape == table.shape and not belongs(some_rows(found), model):
            raise InputError(f"--adapter must be a head for this model, got {path!r}, another's")
        if not torch.equal(found.to(table), table):
            own = torch.nn.Embedding.from_pretrained(found.to(table), freeze=True)
            draft.lm.set_input_embeddings(own)
    fill(parameters, tensors, path)
    return match_type(draft, model)


# --------------------------------------------------------------------- of EAGLE-3's heads alone

def check_taps(path: str, config: dict, taps: list[int]) -> None:
    """Raise an InputError for a head that reads other layers, if its configuration says so.

    path     the head's, for the message
    config   its configuration
    taps     numbers of the layers that it must read, in ascending order
    """
    name = "eagle_aux_hidden_state_layer_ids"
    inner = config.get("eagle_config")
    listed = config.get(name) or (inner.get(name) if isinstance(inner, dict) else None)
    # Engines count differently: to some, layer i is what enters it, to others what layer i gives.
    allowed = [{*map(str, taps)}, {str(i - 1) for i in taps}]
    given = {*map(str, listed)} if isinstance(listed, list) else listed
    if listed and given not in allowed:
        raise InputError(f"--adapter must be a head that reads layers {taps}, got {path!r} with "
                         f"{name} {listed}")


def read_vocab(path: str, tensors: dict[str, torch.Tensor], V: int) -> torch.Tensor:
    """Read which tokens the rows of a head's LM head stand for.

    A head for a part of the vocabulary may say so twice. Row i stands for token i + d2t[i], and
    t2d[x] says whether any row stands for token x. One of the two may be missing, or all zeros.
    Without d2t the rows stand for the tokens of t2d in ascending order.

    path     the head's, for messages
    tensors  the head's, from which d2t and t2d are taken
    V        how many tokens the target has
    returns  the tokens [D]. InputError if d2t and t2d do not say which D tokens they are
    """
    head = tensors.get("lm_head.weight")
    if head is None or head.ndim != 2:
        raise InputError(f"--adapter must have an LM head of its own, got {path!r} without")
    D = len(head)
    offsets = tensors.pop("d2t", torch.zeros(D, dtype=torch.int64))
    if offsets.shape != (D,) or offsets.is_floating_point():
        raise InputError(f"--adapter must be a head whose d2t has {D} whole numbers, got {path!r} "
                         f"with {tuple(offsets.shape)} of {offsets.dtype}")
    listed = tensors.pop("t2d", torch.zeros(V)).flatten().nonzero()[:, 0]
    vocab = torch.arange(D) + offsets
    if D < V and not offsets.any():
        vocab = listed
    same = len(listed) == 0 or D == V or torch.equal(vocab.sort().values, listed)
    if not same or len(vocab.unique()) != D:
        raise InputError(f"--adapter must be a head whose d2t and t2d name the same {D} tokens, "
                         f"got {path!r} with {len(vocab.unique())} and {len(listed)} tokens")
    if not 0 <= vocab.min() <= vocab.max() < V:
        raise InputError(f"--adapter must be a head for {V} tokens, got {path!r} for others")
    return vocab


def read_eagle3(path: str, model) -> tuple:
    """Read a head of EAGLE-3 as EAGLE's code, SpecForge and SGLang write it.

    path     a directory or hub id
    model    the target
    returns  the configuration of its layer, the layers that it reads, the tokens that it guesses,
             {a setting of its form: whether it has that}, and its other tensors by name
    """
    config, found = read_head(path, "an EAGLE-3 head")
    refuse_settings(path, config, found, ("attention_bias", "norm_before_fc"))
    taps = choose_taps(model)
    check_taps(path, config, taps)
    tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): x for name, x in found.items()}
    form = {name: bool(config.get(name)) for name in ("norm_before_residual", "norm_output")}
    form["fc_norm"] = any(name.startswith("fc_norm.") for name in tensors)
    vocab = read_vocab(path, tensors, len(model.get_output_embeddings().weight))
    return read_layer_config(path, config, model), taps, vocab.tolist(), form, tensors


# ------------------------------------------------------------------------------------- writing

def describe_layer(config: PreTrainedConfig, model) -> dict:
    """Describe a layer by the settings that engines read in a head's config.json.

    Older engines read no dictionary of rotary positions, but a base and a scaling beside it.

    config   the layer's configuration
    model    the target
    """
    rope = dict(config.rope_parameters)
    told = {name: getattr(config, name) for name in SHAPE}
    told |= {"model_type": "llama", "num_hidden_layers": 1, "rope_theta": rope.pop("rope_theta"),
             "vocab_size": len(model.get_output_embeddings().weight),
             "max_position_embeddings": context_length(model), "tie_word_embeddings": False,
             "hidden_act": "silu", "torch_dtype": str(model.dtype).removeprefix("torch.")}
    if rope["rope_type"] != "default":
        told["rope_scaling"] = rope | {"type": rope["rope_type"]}  # older code reads this name
    return told


def write_head(out: Path, config: dict, tensors: dict[str, torch.Tensor],
               name: str = "model.safetensors") -> None:
    """Write a head as a directory.

    out      the directory to make
    config   what its config.json says
    tensors  the head's, by the names of the released form
    name     the file of the tensors
    """
    kept = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}

    def write(folder: Path) -> None:
        folder.mkdir()
        save_file(kept, folder / name, {"format": "pt"})
        told = json.dumps(config, indent=2) + "\n"
        (folder / "config.json").write_text(told, encoding="utf-8")
    write_whole(out, write)


def require_all_tokens(adapter: Path, part: torch.nn.Module, model) -> None:
    """Raise an InputError for a part of --adapter that guesses fewer tokens than its model has."""
    if len(part.vocab) < len(model.get_output_embeddings().weight):
        raise InputError(f"--adapter must guess all tokens, got {str(adapter)!r}, trained with "
                         "--vocab")


# ------------------------------------------------------------------------------- which head it is

def some_weights(part: torch.nn.Module) -> list[float]:
    """Take the fingerprint of a head: the first numbers of each tensor that can be trained."""
    trained = [p for p in part.parameters() if p.requires_grad]
    numbers = torch.cat([p.detach().flatten()[:8].float().cpu() for p in trained])
    return [float(f"{x:.4g}") for x in numbers.tolist()]


def is_head(fingerprint: list[float], part: torch.nn.Module) -> bool:
    """Tell whether a fingerprint, which `some_weights` took of a head, is of this head."""
    there, here = torch.tensor(fingerprint), torch.tensor(some_weights(part))
    # A head may have been asked in another type, whose numbers are rounded.
    return there.shape == here.shape and torch.allclose(there, here, rtol=0.02, atol=1e-6)
