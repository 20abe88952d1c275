"""This file loads models, and refuses what would write another text than the model's own.

    load            gives a model and its tokenizer, or one line that names the mistake
    check           refuses a model by numbers: a tree must give the logits of its paths
    load_checked    loads as `load` does, and tells which file is at fault if loading fails

common.py has a shorter `load`. This one also finds lost modules of a layer and weights of a wrong
shape, and it names a damaged file. Numbers decide whether the masks of a model work.
"""
import re
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from common import InputError
from support.engine import EngineLM
from support.files import ask_hub, check_file, explain_errors

# Even if all else is quiet, these parts of transformers warn of a wrong tokenizer or positions.
for name in ("tokenization_utils_tokenizers", "modeling_rope_utils"):
    logging.get_logger(f"transformers.{name}").setLevel("WARNING")


def load(path: str, device: str | None = None, dtype: str | None = None, **options):
    """Load a model and its tokenizer. Code that comes with a checkpoint is never run.

    path     a Hugging Face directory or hub id
    device   cpu, cuda or cuda:N. Default: cuda if there is a GPU, else cpu
    dtype    float32, bfloat16 or float16. Default: float32 on a CPU, else the checkpoint's own
    options  other arguments of transformers' `from_pretrained`
    returns  the model, ready for CachedLM, and its tokenizer. InputError for what cannot be used
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    with explain_errors(f"a model directory or hub id that {device} can load as {dtype}", path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True, **options)  # weights of a wrong size are reported below
        model.to(device)
    wrong = [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]
    if not hasattr(model, "is_quantized"):  # transformers marks what it can read
        wrong += list_lost(model, found["unexpected_keys"])
    if wrong:  # what is missing would stay random, and the output would be garbage
        raise InputError(f"expected all weights of {type(model).__name__} and no others, got "
                         f"{str(path)!r} with {len(wrong)} quantised, missing, without a place or "
                         f"of another size: {min(wrong)}")
    return check(model), tokenizer


def list_lost(model, names: set[str]) -> list[str]:
    """List the tensors of a checkpoint that should change a model's output, and do not.

    These are LoRA and all that a layer of the model lacks, such as a bias, a norm or the scales of
    quantised weights. Other tensors are harmless: masks and rotary positions of old versions,
    blocks that guess, layers after the last one, other heads, and models of images.

    model   the model
    names   the tensors that it has no place for
    """
    # Some checkpoints lack the prefix of the model without its LM head, as GPT-2's.
    parts = dict([*model.named_modules(), *model.base_model.named_modules()])
    lost = []
    for name in names:
        place, _, kind = name.rpartition(".")
        owns = place in parts and len(parts[place]._parameters) > 0
        layer = re.match(r".*?\.\d+(?=\.)", name)
        inside = owns or (layer is not None and layer[0] in parts)
        # An old causal mask is called bias, too, but its attention has no parameter of its own.
        mask = kind == "bias" and place in parts and not owns
        if "lora_" in name or (inside and not mask and kind not in ("masked_bias", "inv_freq")):
            lost.append(name)
    return lost


@torch.inference_mode()
def check(model, run_as: type[EngineLM] = EngineLM):
    """Refuse a model for which a tree gives other logits than each of its paths by itself.

        d b c     e ─┬─ c ── d     a to e are five ordinary tokens from the middle of the
        context      └─ a ── b     vocabulary, since the first ones are often special. A very
                                   small vocabulary gives some of them twice

    Models whose attention takes more than a mask and positions (BLOOM, MPT) fail this check.
    Settings that ask for other outputs than logits are changed.

    model    a model of transformers, which gets the attention of support/engine.py
    run_as   the kind of CachedLM that is checked
    returns  the same model
    """
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        model.set_attn_implementation("grouped")
    model.eval()
    for config in (model.config, model.config.get_text_config()):
        config.update({"return_dict": True, "output_router_logits": False})  # only logits are read
    weight = model.get_input_embeddings().weight
    a, b, c, d, e = ((len(weight) // 2 + i) % len(weight) for i in range(-2, 3))
    paths = torch.tensor([[d, b, c, e, c, d], [d, b, c, e, a, b]], device=weight.device)
    with explain_errors("a model that takes positions, a mask and a cache", type(model).__name__):
        alone = model(input_ids=paths, use_cache=False).logits[:, 3:].float().flatten(0, 1)
        lm = run_as(model)
        lm.start([d, b, c])
        # Nodes 0, 1, 3 are the path e c d, and nodes 0, 2, 4 are the path e a b.
        tree = lm.forward([e, c, a, d, b], [-1, 0, 0, 1, 2])[[0, 1, 3, 0, 2, 4]].float()
    alone = alone[:, :lm.vocab]
    error = (tree - alone).abs().mean() / alone.abs().mean()
    # Half precision rounds; a wrong mask or position is off by far more. A nan is refused as well.
    if not error < (1e-3 if model.dtype == torch.float32 else 0.1):
        raise InputError(f"expected a model whose token trees equal their paths, got "
                         f"{type(model).__name__}: off by {error:.1e}")
    return model


def load_checked(path: str, device: str | None, dtype: str | None) -> tuple:
    """Load a model and its tokenizer, and say in one line which file is wrong where one is.

    path, device, dtype   as `load` takes them
    returns               the model and its tokenizer; InputError for what cannot be used. If the
                          model is on a GPU, a line says on which
    """
    folder = Path(path)
    if (folder / "adapter_config.json").exists():  # transformers may load it, or may ignore it
        raise InputError(f"expected a whole model, got {path!r} with adapter_config.json: a LoRA "
                         "adapter must be merged into its base model first")
    ask_hub(path, ["config.json"])
    try:
        model, tokenizer = load(path, device, dtype)
    except InputError as error:
        if "trust_remote_code" in str(error.__cause__):  # whole: the error's own text is cut
            raise InputError("expected a model that needs no code of its own, which is never run "
                             f"here, got {path!r}") from error
        for file in sorted(folder.glob("*.safetensors")):
            with explain_errors("a file of weights that is not cut off or damaged", file):
                check_file(file)
                safe_open(file, "pt")  # it reads where each tensor lies
        raise
    if model.device.type != "cpu":
        print(f"{path} on {model.device} in {str(model.dtype).removeprefix('torch.')}",
              file=sys.stderr)
    return model, tokenizer
