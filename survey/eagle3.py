"""EAGLE-3: one layer reads three layers of the target, and learns from what it guessed itself.

    eagle3    Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
              Training-Time Test", arXiv 2503.01840

    python -m survey.eagle3 train --prompts FILE --out my.safetensors
    python -m survey.eagle3 --adapter my.safetensors --prompt "..."

A star marks what differs from EAGLE (eagle.py):

    target     h_2  h_6  h_9       what enters layers 2, L/2 and L - 3 of 12 at position i  *
                 └────┼────┘
                     fc                                                                      *
                      │
    final tokens     g_i      e(t_{i+1})                 drafted tokens:  a_i in place of g_i
                      ├── norm ──┐ │
                      │          └─┴─ norm ── attention of the two, twice as wide            *
                      └────── + ──────────────────┘
                              └── + MLP ──> a_{i+1} ── norm, own LM head ──> guesses of t_{i+2}

EAGLE's loss on features ties a_{i+1} to the target's own feature, and more data does not help then.
Without it a_{i+1} may be anything useful, but then it differs from g, and a layer trained on g
alone has never read an a. So training does what decoding will do, the *training-time test* (Section
3.2). The layer makes several passes over a text, and pass n reads the a of pass n - 1. A picture is
in training/unroll.py.

    loss = Σ_n 0.8^n CrossEntropy(target's distribution, the guess of pass n)

Trees are grown and verified as in EAGLE, so greedy output and samples are the target's.

Departures, besides those of EAGLE's tree (eagle.py):
- Training. Paper: 7 passes, a rate of 5e-5, answers of a fixed set, an LM head that begins at
  random. Here: 5 passes (`--passes`), 1e-3 after a warm-up, and the target's own greedy answers.
  The LM head begins as the target's. Why: pass n weighs 0.8^n and costs as much as the first, and
  the draft guesses these answers.
"""
from pathlib import Path
from typing import Iterable, Iterator, NamedTuple

from common import Sampler, greedy
from support.engine import MODELS, EngineLM, run_as_program
from support.layers import choose_taps, make_config, read_taps, tap_widths
from support.loading import check
from support.packed import plain
from support.parts import LayerPart, head_for, load_trained, score_with, seeded
from support.released import fill_layer, is_released, read_eagle3
from survey.eagle import decode
from training.texts import find_frequent, prepare_training
from training.unroll import fit_unrolled

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

ADAPTER = f"{MODELS}/eagle3.safetensors"


# ----------------------------------------------------------------------------------- the draft

class Form(NamedTuple):
    """Say which variant a draft is, as released heads do. None of these is trained here."""
    norm_before_residual: bool = False  # the residual stream begins with the normed g
    fc_norm: bool = False  # each tapped layer is normed before `fc` (EAGLE-3.1)
    norm_output: bool = False  # the normed output is what the next level reads (EAGLE-3.1)


class Layer(LlamaDecoderLayer):
    """Be a Llama layer whose attention reads a token and a feature side by side."""

    def __init__(self, config: LlamaConfig, form: Form):
        super().__init__(config, 0)
        self.norm_before_residual = form.norm_before_residual
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            wider = torch.nn.Linear(2 * config.hidden_size, width, bias=False)
            setattr(self.self_attn, name, wider)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Compute a [B, n, h] of hidden_states [B, n, 2h], which are embeddings and features.

        `check` runs the layer on tokens, whose embeddings [B, n, h] are taken for both.
        """
        e, g = hidden_states[..., :self.hidden_size], hidden_states[..., -self.hidden_size:]
        normed = self.hidden_norm(g)
        both = torch.cat([self.input_layernorm(e), normed], -1)
        attended, _ = self.self_attn(hidden_states=both, **kwargs)
        x = attended + (normed if self.norm_before_residual else g)
        return x + self.mlp(self.post_attention_layernorm(x))


class NormedHead(torch.nn.Linear):
    """Norm a feature before the LM head reads it; the feature itself goes on to the next level."""

    def __init__(self, h: int, vocab: int, eps: float):
        super().__init__(h, vocab, bias=False)
        self.norm = LlamaRMSNorm(h, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Eagle3Layer(LayerPart):
    """Guess tokens from tapped features; `lm` is a Llama of one layer with an LM head of its own.

    model     the target, which is frozen and lends its embeddings
    config    of the layer, as `make_config` makes it or as a released file has it
    taps      numbers of the layers of the target whose inputs it reads
    vocab     the D tokens that it can guess, in the order of the LM head's rows
    form      the variant that it is
    seed      of the random weights that it begins with
    """
    title = "an EAGLE-3 layer"
    prior = 0.9  # for `Acceptance`. The embedded layer guesses 0.91 of held-out tokens
    decay = 0.8  # of the loss from pass to pass

    def __init__(self, model, config: LlamaConfig, taps: list[int], vocab: Iterable[int],
                 form: Form = Form(), seed: int = 0):
        super().__init__()
        self.taps, self.form = taps, form
        self.vocab = torch.tensor([*vocab], device=model.device)
        self.config, self.h = config, config.hidden_size
        widths = tap_widths(model, taps)
        small = LlamaConfig(**config.to_dict() | dict(vocab_size=8, pad_token_id=None))
        with seeded(seed):
            lm = LlamaForCausalLM(small)  # with 8 embeddings, which the target's replace below
            lm.model.layers[0] = Layer(lm.config, form)
            lm.lm_head = NormedHead(self.h, len(self.vocab), config.rms_norm_eps)
            self.fc = None  # a single tapped layer of the same width is read as it is
            if widths != [self.h]:
                self.fc = torch.nn.Linear(sum(widths), self.h, bias=False)
        lm.model.norm = torch.nn.Identity()
        if form.norm_output:  # features are normed already when the LM head reads them
            lm.model.norm, lm.lm_head.norm = lm.lm_head.norm, lm.model.norm
        self.norms = torch.nn.ModuleList(LlamaRMSNorm(width, config.rms_norm_eps)
                                         for width in widths if form.fc_norm)
        rows = plain(model.get_output_embeddings().weight).detach()
        if rows.shape[1] == self.h:
            lm.lm_head.weight.data.copy_(rows[self.vocab])
        model.requires_grad_(False)
        self.lm = check(lm)  # while its embeddings are its own, of 8 tokens
        self.to(model.device)
        lm.set_input_embeddings(model.get_input_embeddings())

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return what is trained and kept in a file, by the names of released files."""
        head, decoder = self.lm.lm_head, self.lm.model
        norm = decoder.norm if self.form.norm_output else head.norm
        parts = {"norm.weight": norm.weight, "lm_head.weight": head.weight}
        if self.fc is not None:
            parts["fc.weight"] = self.fc.weight
        parts |= {f"midlayer.{name}": p for name, p in decoder.layers[0].named_parameters()}
        return parts | {f"fc_norm.{name}": p for name, p in self.norms.named_parameters()}

    def header(self) -> dict:
        return {"config": self.config.to_dict(), "form": self.form._asdict(), "taps": self.taps,
                "vocab": self.vocab.tolist()}

    def join(self, features: torch.Tensor, tokens) -> torch.Tensor:
        """Return the layer's inputs [..., 2h]: embeddings of tokens [...] beside features.

        features  [..., w]. Those of final tokens are tapped, and `fc` maps them to g. Those of
                  drafted tokens are the layer's own, h wide. So w tells which they are
        """
        g = features.to(self.lm.lm_head.weight.dtype)
        if g.shape[-1] != self.h:
            if self.norms:
                each = g.split([len(norm.weight) for norm in self.norms], -1)
                g = torch.cat([norm(x) for norm, x in zip(self.norms, each)], -1)
            g = self.fc(g)
        return torch.cat([self.embed(tokens).to(g.dtype), g], -1)


# ---------------------------------------------------------------------------------- decoding

def eagle3(target: EngineLM, prompt: list[int], *, nodes: int = 0,
           adapter: str = ADAPTER, trained: Eagle3Layer | None = None, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Grow a tree from tapped and guessed features, verify it in one target call, keep a path.

    trained   a draft to use in place of a file's

    nodes:   how many nodes a tree has with its root, 0 to 64. With 0, as many as pay on this
             machine
    adapter: file of a draft layer, made by `python -m survey.eagle3 train`, or the directory or hub
             id of a released head

    Yields chunks of 1 to 9 tokens; logs {"guessed", "accepted"} a call.
    """
    draft = trained or target.once(load_draft, adapter, target.model)
    yield from decode(target, draft, prompt, nodes, sample, log)


# ------------------------------------------------------------------------------------ training

def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          taps: str = "", passes: int = 5, mlp: int = 0, vocab: int = 0, max_new_tokens: int = 200,
          steps: int = 1000, batch: int = 16, lr: float = 1e-3, seed: int = 0) -> None:
    """Train a draft layer for a frozen model on its own answers. A stopped run goes on.

    taps:    numbers of the layers whose inputs are read, as 2,6,9. The number of all layers stands
             for what the LM head reads. The default is layers 2, L/2 and L - 3
    passes:  how many passes the training-time test has, 1 or more. With 1 the layer never reads its
             own guesses in training
    mlp:     width of the layer's MLP, 0 or more. 0 stands for the target's
    """
    numbers = read_taps(taps, model) if taps else choose_taps(model)
    lessons = prepare_training(model, tokenizer, prompts, out, work, max_new_tokens, seed, most=50)
    every = range(len(model.get_output_embeddings().weight))
    known = sorted(find_frequent(lessons.data, vocab)) if vocab else every
    draft = Eagle3Layer(model, make_config(model, mlp), numbers, known, seed=seed)
    score = score_with(model, head_for(model.get_output_embeddings(), draft.vocab))
    fit_unrolled(draft, model, lessons, score, draft.lm.lm_head, batch=batch, passes=passes,
                 steps=steps, lr=lr, seed=seed, out=out, name="eagle3")


# ------------------------------------------------------------------------------------ the file

def load_draft(path: str | Path, model) -> Eagle3Layer:
    """Read a draft from its file, or a released one. InputError if it does not fit the model."""
    if is_released(path):
        config, taps, vocab, form, tensors = read_eagle3(str(path), model)
        draft = Eagle3Layer(model, config, taps, vocab, Form(**form))
        return fill_layer(draft, draft.trainable(), tensors, str(path), model)
    return load_trained(path, Eagle3Layer.title, model, lambda header: Eagle3Layer(
        model, LlamaConfig(**header["config"]), header["taps"], header["vocab"],
        Form(*(header["form"][name] for name in Form._fields))))  # older files have more of them


COMMAND_LINE = dict(methods=[eagle3], commands=[train], ranges={"nodes": (4, 8, 16, 32, 64)})

if __name__ == "__main__":
    run_as_program(__file__)
