"""This file keeps what was trained or measured for a model, and has helpers of trained parts.

    save_part, load_part      a safetensors file of trained tensors, with a header of other facts
    Part, LayerPart           a module that is trained beside a frozen model, and one with a layer
    seeded                    weights that a seed draws
    save_trained, load_trained    a file of a Part, which is one of `save_part`
    save_facts, load_facts    a JSON file of what was measured
    logits_of                 a function from the output of a model's LM head to its logits
    score_with                a function from what a model's LM head reads to its logits
    head_for                  an LM head that has only some of a model's tokens
    fill, match_type          tensors into parameters, and a part to the type of its model

A model's *fingerprint* is some of its embeddings. Every file holds the fingerprint of each model
that it was made for. So a file of another model is refused.
"""
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Callable

from common import InputError
from support.engine import EngineLM
from support.files import check_file, explain_errors, read_json, write_text, write_whole
from support.packed import is_packed, pack

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

# ------------------------------------------------------------------- which model a file is for

def some_embeddings(model) -> torch.Tensor:
    """Take the fingerprint of a model out of its table of embeddings: some, less their mean.

    The mean is taken off because the embeddings of two models can be alike in their mean alone.

    returns  float32 [64, 64], or less of a small model: every 16th of the first 1,024 tokens, and
             the first 64 numbers of each. All tokens if they are 16 or fewer, since one token less
             the mean would be 0
    """
    table = model.get_input_embeddings().weight
    step = 16 if len(table) > 16 else 1
    some = table[:1024:step, :64].detach().float().cpu()
    return some - some.mean(0)


def belongs(fingerprint: torch.Tensor, model) -> bool:
    """Tell whether a fingerprint is of this model, or of one that was tuned or quantised from it.

    fingerprint  what `some_embeddings` gave for the model that a file is for, or the first rows and
                 columns of that
    model        the model that the file is to be used with
    returns      whether the file may be used
    """
    here = some_embeddings(model)[:fingerprint.shape[0], :fingerprint.shape[1]]
    if fingerprint.shape != here.shape:
        return False
    # The cosine similarity of two models is near 0 if they were trained apart, and near 1 if one
    # was made from the other.
    return F.cosine_similarity(fingerprint.float().flatten(), here.flatten(), 0).item() > 0.5


# ------------------------------------------------------------------------------ trained tensors

def save_part(path: Path, kind: str, model, tensors: dict[str, torch.Tensor], **header) -> None:
    """Write trained tensors for a model to a safetensors file, floating-point ones in bfloat16.

    path     the file to make. Its folder is made if there is none
    kind     what the tensors are, in words that an error message can use
    model    the model that they are for
    tensors  the tensors, by name
    header   other facts about the part, which JSON can hold
    """
    kept = {}
    for name, x in (tensors | {"model": some_embeddings(model)}).items():
        kept[name] = (x.bfloat16() if x.is_floating_point() else x).detach().cpu()
    facts = {"part": json.dumps({"kind": kind} | header)}
    write_whole(path, lambda fresh: save_file(kept, fresh, facts))


def load_part(path: str | Path, kind: str, model) -> tuple[dict, dict[str, torch.Tensor]]:
    """Read a file that `save_part` made.

    path     the file
    kind     what it must hold, in the words that `save_part` was given
    model    the model that it must be for
    returns  the header, a dictionary of the other facts, and the tensors by name
    raises   any error if the file is damaged, of another kind, or for another model. The caller has
             it explained by `explain_errors`
    """
    check_file(path)
    with safe_open(path, "pt") as file:
        facts = file.metadata() or {}
        if "part" not in facts:
            raise ValueError("it was not written here; of a head that others released, name the "
                             "folder")
        header = json.loads(facts["part"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    found = header.pop("kind")
    if found != kind:
        raise ValueError(f"it is one of {found}")
    if not belongs(tensors.pop("model"), model):
        raise ValueError("it was made for another model")
    return header, tensors


def fill(parameters: dict[str, torch.nn.Parameter], tensors: dict[str, torch.Tensor],
         path: str | Path) -> None:
    """Set the parameters of a part to the tensors of its file.

    An InputError is raised if names or shapes differ, and for integers, nan and infinity. Integers
    are quantised weights, which mean nothing without their scales.

    parameters  the parameters that are set, by name
    tensors     their values, by name
    path        the file that the tensors are from, for the message of the error
    """
    expected = {name: tuple(p.shape) for name, p in parameters.items()}
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    wanted = dict(sorted(expected.items() - shapes.items()))
    given = dict(sorted(shapes.items() - expected.items()))
    if wanted or given:
        raise InputError(f"expected tensors {wanted}, got {str(path)!r} with {given}")
    for name, x in tensors.items():
        if not (x.is_floating_point() and x.float().isfinite().all()):  # float8 has no isfinite
            raise InputError(f"expected finite numbers, got {str(path)!r} with others in {name}")
    for name, p in parameters.items():
        p.data.copy_(tensors[name])


@contextmanager
def seeded(seed: int):
    """Draw weights by a seed inside a `with`, which leaves what is drawn later as it is."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class Part(torch.nn.Module):
    """This is a module that is trained beside a frozen model, such as a head.

    Another class, such as `Tuned` of low_rank.py, counts as a part too if it has `title`, `vocab`,
    `trainable()`, `parameters()` and `header()`.

    title   what it is, in words that an error message can use
    taps    the layers whose inputs it reads (layers.py). None: it reads what the LM head reads
    vocab   [V'], the tokens that it can guess. None: it is for all tokens of the model
    """
    title = ""
    taps = None

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return by name the parameters that are trained, and kept in a file."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def header(self) -> dict:
        """Return what `make` of `load_trained` needs to make such a part, and JSON can hold."""
        return {}


class LayerPart(Part):
    """This is a part whose `lm` is a model of one layer, which reads tokens beside features."""

    def borrow(self, model) -> None:
        """Let `lm` use the embeddings and the LM head of a model, and freeze the model."""
        model.requires_grad_(False)
        head = model.get_output_embeddings()
        self.to(model.device)
        self.lm.set_input_embeddings(model.get_input_embeddings())
        self.lm.set_output_embeddings(head)
        self.vocab = torch.arange(len(head.weight), device=head.weight.device)

    def keep(self, vocab: list[int]) -> None:
        """Guess only the tokens of `vocab`, whose rows the new LM head has in this order."""
        self.vocab = self.vocab[vocab]
        self.lm.set_output_embeddings(head_for(self.lm.get_output_embeddings(), self.vocab))

    def to_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits that `lm` gave as x. EAGLE scales and caps them as its target does."""
        return x

    def embed(self, tokens) -> torch.Tensor:
        """Return the embeddings [..., e] of tokens [...], a list or a tensor."""
        table = self.lm.get_input_embeddings()
        return table(torch.as_tensor(tokens, dtype=torch.long, device=table.weight.device))


def save_trained(path: Path, part: Part, model) -> None:
    """Write a part to a file, which names the part's tokens only if it lacks some of the model's.

    path    the safetensors file to make
    part    the part
    model   the model that it is for
    """
    header = part.header()
    every = len(model.get_output_embeddings().weight)
    if part.vocab is not None and len(part.vocab) < every:
        header["vocab"] = part.vocab.tolist()
    save_part(path, part.title, model, part.trainable(), **header)


def load_trained(path: str | Path, title: str, model, make: Callable[[dict], Part]) -> Part:
    """Read a part from a file that `save_trained` made, to run it in the type of its model.

    path     the file
    title    what the part must be
    model    the model that it must be for
    make     a function from the part's `header()` to a part with any weights. It may raise any
             error if the header is wrong
    returns  the part. InputError if the file is damaged, of another kind, or for another model
    """
    with explain_errors(f"a file of {title} for this model", path):
        header, tensors = load_part(path, title, model)
        part = make(header)
        if "vocab" in header and len(header["vocab"]) < len(part.vocab):
            part.keep(header["vocab"])
    fill(part.trainable(), tensors, path)
    return match_type(part, model)


def match_type(part: torch.nn.Module, model):
    """Give a part's weights the type of a model. Pack them if the model is packed. Return the part.

    Buffers keep theirs. Rotary frequencies would lose most of their digits in bfloat16.
    """
    for p in part.parameters():
        if p.dtype != model.dtype:
            p.data = p.data.to(model.dtype)
    return pack(part) if is_packed(model) and isinstance(part, torch.nn.Module) else part


# ------------------------------------------------------------------------------- measured facts

def save_facts(path: Path, models: dict, **facts) -> None:
    """Write what was measured on some models to a JSON file.

    path    the file to make. Its folder is made if there is none
    models  {the name of a model in the file: the model}. Their fingerprints are kept
    facts   what was measured, which JSON can hold, by names that no model has
    """
    fingerprints = {}
    for name, model in models.items():
        rows = some_embeddings(model)[:16, :16].tolist()
        # Four significant digits are enough to tell models apart. A fixed number of decimals would
        # round small embeddings to 0.
        fingerprints[name] = [[float(f"{x:.4g}") for x in row] for row in rows]
    write_text(path, json.dumps(fingerprints | facts) + "\n")


def load_facts(path: str | Path, models: dict, expected: str, parse: Callable):
    """Read a file that `save_facts` made, and return what `parse` makes of its facts.

    path      the file
    models    {the name of a model in the file: the model that the file must be for}
    expected  how the message of an InputError describes a good file
    parse     a function of a dictionary, which is all of the file. It returns what the caller
              needs, and raises any error if facts are missing or wrong.
    returns   what `parse` returned. InputError if the file is damaged, or for another model
    """
    with explain_errors(expected, path):
        check_file(path)
        facts = read_json(path)
        for name, model in models.items():
            if not belongs(torch.tensor(facts[name]), model):
                raise ValueError(f"it was made for another {name}")
        return parse(facts)


# ----------------------------------------------------------------------- helpers of trained parts

@torch.inference_mode()
def logits_of(model) -> Callable[[torch.Tensor], torch.Tensor]:
    """Find out how a model turns the output x of its LM head into logits.

        logits = cap · tanh(c x / cap)

    Most models have c = 1 and no cap. Then the logits are x itself. Granite and Cohere scale by c,
    and Gemma 2 has a cap. The cap is read from the config. The factor c has a different name in
    each config, so it is measured in one pass over up to four tokens. It is the slope of the
    logits over x, once the cap is undone.

    model    the model
    returns  a function from x to logits
    """
    lm = EngineLM(model)
    lm.start([])
    logits = lm.forward(range(min(4, lm.vocab))).float()
    x = model.get_output_embeddings()(lm.features).float()
    # A model without a cap has cap = 1e9 here. The formula then gives c x, and c x is computed.
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 1e9
    before = cap * (logits / cap).clamp(-0.999, 0.999).atanh()  # logits before the cap: c x
    c = ((before * x).sum() / x.square().sum()).item()  # by least squares

    def to_logits(x: torch.Tensor) -> torch.Tensor:
        return cap * (c * x / cap).tanh() if cap < 1e9 else c * x
    return to_logits


def score_with(model, head: torch.nn.Linear | None = None) -> Callable:
    """Return a function from what a model's LM head reads, [..., d], to its logits [..., V].

    The logits are float32, and scaled or capped where the model does so.

    head   an LM head with some of the model's rows, to use in its place
    """
    head, to_logits = head or model.get_output_embeddings(), logits_of(model)

    def score(x: torch.Tensor) -> torch.Tensor:
        return to_logits(head(x.to(head.weight.dtype)).float())
    return score


def head_for(head: torch.nn.Linear, vocab: torch.Tensor) -> torch.nn.Linear:
    """Make an LM head of some rows of another, so that a pass costs less.

    This is the idea of FR-Spec, Zhao et al., arXiv 2502.14856: a draft only needs to guess frequent
    tokens.

    head     the LM head with a row for each token of the vocabulary
    vocab    the tokens that the new head's rows stand for, in this order
    returns  the new head, which is not trained
    """
    few = torch.nn.Linear(head.weight.shape[1], len(vocab), head.bias is not None)
    rows = {name: x[vocab] for name, x in head.state_dict().items()}
    few.to(head.weight.device, head.weight.dtype).load_state_dict(rows)  # it may be packed
    return few.requires_grad_(False)
