"""MTP: a block that ships with the model guesses on from a feature and the token after it.

    mtp    DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, Section 2.2;
           Cai et al., "FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction",
           arXiv 2509.18362, whose one block reads its own output

    python -m survey.mtp --target Qwen/Qwen3.5-0.8B --compare    # its own block, not tried here
    python -m survey.mtp train --target DIR --prompts FILE --out my.safetensors
    python -m survey.mtp --target DIR --adapter my.safetensors --prompt "..."

transformers 5.23 has generate(use_mtp=True) for DeepSeek-V3, GLM-4.5 and some others: a chain of
one guess a block. It refuses models with a state, such as Qwen3.5.

The feature f_i of position i is what the LM head reads to choose token t_{i+1}, after the target's
final norm. Row i has position i:

    e(t_{i+1}) ── norm_e ──┐
                           fc ── layer ── norm ──> f̂_{i+1} ── LM head ──> guesses of t_{i+2}
    f_i ───────── norm_h ──┘

The row of a guess reads f̂ in place of f. This is EAGLE's layer with two more norms, and EAGLE's
trees and cache (eagle.py). The loss is another, since f̂ need not be the target's own feature. The
layer learns from what it guessed itself, as EAGLE-3's does (training/unroll.py):

    loss = Σ_n 0.6^n CrossEntropy(target's distribution, the guess of pass n)

The block is a layer of the target's family with full attention. It has experts if the target's last
such layer has some. Other blocks, such as Mellum's and K-EXAONE's, are refused. Checkpoints name
the tensors in two ways, where N is the number of the target's layers. from_pretrained drops them,
so they are read from the safetensors files:

    Qwen3-Next, Qwen3.5                 DeepSeek-V3, GLM-4.5: model.layers.N.…
    mtp.pre_fc_norm_embedding.weight    enorm.weight
    mtp.pre_fc_norm_hidden.weight       hnorm.weight
    mtp.fc.weight                       eh_proj.weight
    mtp.layers.0.…                      …                       as in the target's layers
    mtp.norm.weight                     shared_head.norm.weight
    the target's                        shared_head.head.weight, embed_tokens.weight

A wrong norm or a wrong order leaves the text as it is, and only fewer guesses are right. Engines
found that more are accepted if f and f̂ are read after the final norms: vLLM in DeepSeek's form
(pull request 45895), and llama.cpp in Qwen's (24025).

Departures, besides those of EAGLE's tree (eagle.py):
- Blocks. DeepSeek-V3's paper: a block for each depth. Here: one block, which reads its own output,
  as in FastMTP. Why: most checkpoints have one. Step-3.7 has three, which are not read, and neither
  are MiMo's, whose names are others.
- Training. DeepSeek-V3's paper: the target learns too, and row j of a later pass sees the rows of
  its pass up to j. Both papers: labels are tokens. Here: the target stays frozen, as in FastMTP,
  rows see what they see in decoding, and labels are the target's distributions. Why: the output is
  then still the target's own, and a distribution says more than a token.
- Begin. DeepSeek-V3's paper: blocks begin at random, like the target. Here: `train` begins with the
  target's last layer of full attention and its final norm. Why: the target has learned already.
"""
import copy
import re
from pathlib import Path
from typing import Iterator

from common import InputError, Sampler, greedy
from support.engine import MODELS, EngineLM, depth_of, list_layers, require, run_as_program
from support.files import ask_hub, explain_errors
from support.layers import name_norm, take_layers
from support.parts import LayerPart, load_trained, score_with, seeded
from support.released import WEIGHTS, fill_layer, is_released, read_tensors, take_own
from survey.eagle import decode
from training.texts import find_frequent, prepare_training
from training.unroll import fit_unrolled

import torch

ADAPTER = f"{MODELS}/mtp.safetensors"
NAMES = {  # what belongs to the layer beyond the last one, and not to a layer of the target
    "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm", "shared_head.head": "lm_head", "embed_tokens": "embed_tokens"}
EXPERTS = "mtp.layers.0.mlp.experts."
# Families whose blocks have full attention, if their configurations do not say which they have:
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite")


# ----------------------------------------------------------------------------------- the draft

class MTPBlock(LayerPart):
    """Guess the token after next from a feature and the next token. The target is frozen.

    `lm` is a model of one layer of the target's family, with the target's embeddings and LM head.

    seed     of the random weights of `fc`
    dtype    of the weights

    vocab    [V'], the tokens that the rows of the LM head stand for
    """
    title = "an MTP block"
    prior = 0.9  # for `Acceptance`. The embedded block guesses 0.93 of held-out tokens
    decay = 0.6  # of the loss from pass to pass

    def __init__(self, model, seed: int = 0, dtype: torch.dtype = torch.float32):
        super().__init__()
        table = model.get_input_embeddings().weight
        h, f = table.shape[1], model.get_output_embeddings().weight.shape[1]
        if h != f:
            raise InputError(f"expected features of {h} numbers, as embeddings have, got {f}")
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
        full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
        last = full[-1] if full else depth_of(model) - 1
        EngineLM(model).forward(table[:1])  # refuses layers that read more than embeddings
        # The model has 8 tokens, in whose place come the target's embeddings and LM head.
        self.lm = take_layers(model, [last], vocab_size=8, pad_token_id=None)
        for x in [*self.lm.parameters(), *self.lm.buffers()]:
            if x.is_floating_point():  # buffers choose experts in float32, as in transformers
                x.data = x.data.to(dtype if isinstance(x, torch.nn.Parameter) else torch.float32)
        self.config = self.lm.config
        decoder = self.lm.get_decoder()
        self.norm = decoder._modules[name_norm(decoder)]
        self.norm_e, self.norm_h = copy.deepcopy(self.norm), copy.deepcopy(self.norm)
        with seeded(seed):
            self.fc = torch.nn.Linear(2 * h, h, bias=False, dtype=dtype)
        self.borrow(model)

    def parts(self) -> dict[str, torch.Tensor]:
        """Return all weights of the block by the names of `mtp.…`."""
        named = {"pre_fc_norm_embedding": self.norm_e, "pre_fc_norm_hidden": self.norm_h,
                 "fc": self.fc, "layers.0": list_layers(self.lm)[0], "norm": self.norm}
        return {f"mtp.{name}.{inner}": x for name, module in named.items()
                for inner, x in module.state_dict(keep_vars=True).items()}

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return what is trained and kept in a file: all weights that can have a gradient."""
        return {name: x for name, x in self.parts().items() if x.requires_grad}

    def join(self, features: torch.Tensor, tokens) -> torch.Tensor:
        """Return the layer's inputs [..., h], of tokens [...] and features [..., h]."""
        e, f = (x.to(self.fc.weight.dtype) for x in (self.embed(tokens), features))
        return self.fc(torch.cat([self.norm_e(e), self.norm_h(f)], -1))


# ------------------------------------------------------------------------- the target's own block

def rename(name: str, layers: int) -> str:
    """Return the name that a tensor of a block has here. Empty: it is one of the target itself.

    name     its name in the checkpoint
    layers   how many layers the target has
    """
    if name.startswith("mtp."):
        return name
    found = re.fullmatch(r"model\.(?:language_model\.)?layers\.(\d+)\.(.+)", name)
    if not found or int(found[1]) < layers:
        return ""
    number = int(found[1]) - layers
    stem, _, last = found[2].rpartition(".")
    if stem in NAMES and number == 0:
        return f"{NAMES[stem]}.{last}"
    return f"mtp.layers.{number}.{found[2]}"


def fuse_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Join the matrices of single experts, as transformers has them in its layers."""
    E = sum(name.startswith(EXPERTS) and name.endswith(".gate_proj.weight") for name in tensors)
    if E:
        gate, up, down = (torch.stack([tensors.pop(f"{EXPERTS}{i}.{kind}_proj.weight")
                                       for i in range(E)]) for kind in ("gate", "up", "down"))
        tensors[f"{EXPERTS}gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"{EXPERTS}down_proj"] = down


def read_block(path: str, layers: int, option: str) -> dict[str, torch.Tensor]:
    """Read the tensors of a checkpoint's block, and no other ones.

    path     the checkpoint's directory or hub id
    layers   how many layers the target has
    option   the option that named the checkpoint, for messages
    returns  tensors by the names of `mtp.…`, of its embeddings and LM head if it has some, and none
             if there is no block. InputError for several blocks, and for one that is quantised
    """
    ask_hub(path, WEIGHTS)
    with explain_errors("a checkpoint whose files can be read", path):
        tensors = read_tensors(path, lambda name: rename(name, layers))
        fuse_experts(tensors)
    several = any(re.match(r"mtp\.layers\.[^0]", name) for name in tensors)
    require(not several, option, "a checkpoint with one MTP block", f"several in {path!r}")
    coded = [name for name, x in tensors.items() if x.itemsize == 1 or "_scale" in name]
    require(not coded, option, "a checkpoint with an MTP block that is not quantised",
            f"{path!r} with {coded[:1]}")
    return tensors


def load_block(path: str, tensors: dict[str, torch.Tensor], model, option: str) -> MTPBlock:
    """Make the block of a checkpoint. InputError if it does not fit the model.

    A block may bring embeddings and an LM head. They are used if they differ from the target's.

    path      the checkpoint's directory or hub id, for messages
    tensors   what `read_block` read there
    option    as for `read_block`
    """
    text = model.config.get_text_config()
    kinds, family = getattr(text, "mtp_layer_types", None), text.model_type.removesuffix("_text")
    full = {*kinds} == {"full_attention"} if kinds else family in FAMILIES
    require(full, option, "a checkpoint whose MTP block is known to have full attention",
            f"{path!r} of the family {family}")
    draft = MTPBlock(model, dtype=model.dtype)
    head = take_own(model.get_output_embeddings(), tensors, "lm_head.weight", path)
    draft.lm.set_output_embeddings(head)
    return fill_layer(draft, draft.parts(), tensors, path, model)


def load_draft(adapter: str | Path, model) -> MTPBlock:
    """Read a block from its file, from another checkpoint or from that of the model itself.

    InputError if the block does not fit the model, and if there is none.
    """
    own = Path(model.name_or_path).resolve() == (MODELS / "target").resolve()
    file = adapter or (ADAPTER if own else "")
    if file and not is_released(file):
        return load_trained(file, MTPBlock.title, model,
                            lambda _: MTPBlock(model, dtype=model.dtype))
    path = str(adapter or model.name_or_path)
    option = "adapter" if adapter else "target"
    tensors = read_block(path, depth_of(model), option)
    require(tensors != {}, option, "a checkpoint with an MTP block (for another one, `python -m "
            "survey.mtp train` makes a block)", repr(path))
    return load_block(path, tensors, model, option)


# ---------------------------------------------------------------------------------- decoding

def mtp(target: EngineLM, prompt: list[int], *, nodes: int = 0,
        adapter: str = "", trained: MTPBlock | None = None, sample: Sampler = greedy,
        log: list | None = None) -> Iterator[list[int]]:
    """Grow a tree from guessed features, verify it in one call of the target, and keep one path.

    trained   a block to use in place of a file's

    nodes:   how many nodes a tree has with its root, 0 to 64. With 0, as many as pay on this
             machine
    adapter: file of a block, made by `python -m survey.mtp train`, or the directory or hub id of a
             checkpoint that has one. Without it the block is that of the target's own files, and
             for the embedded target models/mtp.safetensors

    Yields chunks of 1 to 9 tokens; logs {"guessed", "accepted"} a call.
    """
    draft = trained or target.once(load_draft, adapter, target.model)
    yield from decode(target, draft, prompt, nodes, sample, log)


# ------------------------------------------------------------------------------------ training

def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          passes: int = 3, vocab: int = 0, max_new_tokens: int = 200, steps: int = 1000,
          batch: int = 16, lr: float = 1e-3, seed: int = 0) -> None:
    """Train a block for a frozen model on its own answers. A stopped run goes on.

    passes:  how many passes the training has, 1 or more. With 1 the block never reads its own
             guesses in training
    """
    draft = MTPBlock(model, seed)  # it refuses a model that does not fit, before any answer is made
    lessons = prepare_training(model, tokenizer, prompts, out, work, max_new_tokens, seed, most=50)
    if vocab:
        draft.keep(find_frequent(lessons.data, vocab))
    score = score_with(model, draft.lm.get_output_embeddings())
    fit_unrolled(draft, model, lessons, score, score, batch=batch, passes=passes, steps=steps,
                 lr=lr, seed=seed, out=out, name="mtp")


COMMAND_LINE = dict(methods=[mtp], commands=[train], ranges={"nodes": (4, 8, 16, 32, 64)})

if __name__ == "__main__":
    run_as_program(__file__)
