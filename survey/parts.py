"""The file of a trained part: safetensors with a header that says what it is, and some embeddings
of the model that it is for. Also a draft for a model, an LM head for fewer tokens, and what a model
makes of its own."""
import json
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import CachedLM, InputError, load

MODELS = Path(__file__).resolve().parent.parent / "models"


def some_embeddings(model) -> torch.Tensor:
    """[64, 64] or fewer, less their mean: what a model is known by, in whatever type it is."""
    some = model.get_input_embeddings().weight[:1024:16, :64].detach().float().cpu()
    return some - some.mean(0)


def belongs(known: torch.Tensor, model) -> bool:
    """Is this the model of these embeddings, or was it tuned or quantised from it? Another has
    others altogether."""
    here = some_embeddings(model)[:known.shape[0], :known.shape[1]]
    return known.shape == here.shape and F.cosine_similarity(
        known.float().flatten(), here.flatten(), 0).item() > 0.5


def save_part(path: Path, kind: str, model, tensors: dict[str, torch.Tensor], **header) -> None:
    """Floating-point tensors are kept in bfloat16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: x.detach().cpu().to(torch.bfloat16 if x.is_floating_point() else x.dtype)
            for name, x in (tensors | {"model": some_embeddings(model)}).items()}
    save_file(kept, path, {"part": json.dumps({"kind": kind} | header)})


def load_part(path: str | Path, kind: str, model) -> tuple[dict, dict[str, torch.Tensor]]:
    """(header, tensors); InputError for what is no such file, or one for another model."""
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {})["part"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        known, found = tensors.pop("model"), header.pop("kind")
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise InputError(f"expected a file of {kind}, got {str(path)!r}: {error!r}") from error
    if found != kind:
        raise InputError(f"expected a file of {kind}, got {str(path)!r}, one of {found}")
    if not belongs(known, model):
        raise InputError(f"expected a file of {kind} for this model, got {str(path)!r}: another's")
    return header, tensors


def fill(own: dict[str, torch.nn.Parameter], tensors: dict[str, torch.Tensor], path) -> None:
    """Set the parameters `own` to what the file at `path` had."""
    expected = {name: tuple(p.shape) for name, p in own.items()}
    if (shapes := {name: tuple(x.shape) for name, x in tensors.items()}) != expected:
        raise InputError(f"expected tensors {expected}, got {str(path)!r} with {shapes}")
    if not all(x.isfinite().all() for x in tensors.values()):
        raise InputError(f"expected finite numbers, got {str(path)!r} with others")
    for name, p in own.items():
        p.data.copy_(tensors[name])


def draft_for(model, tokenizer, path: str):
    """A draft like the model in type and device; InputError for another tokenizer's."""
    draft, its_tokenizer = load(path, str(model.device), model.dtype)
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InputError("expected a draft with the target's tokenizer, got another vocabulary")
    return draft


@torch.inference_mode()
def logits_of(model) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the model makes of its LM head's output x, as one pass shows: logits are x itself, c x
    (Granite, Cohere), or these under a soft cap (Gemma 2)."""
    lm = CachedLM(model)
    lm.start([])
    logits = lm.forward(range(4)).float()
    x = model.get_output_embeddings()(lm.features).float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 1e9
    before = cap * (logits / cap).clamp(-0.999, 0.999).atanh()
    c = ((before * x).sum() / x.square().sum()).item()

    def own(x: torch.Tensor) -> torch.Tensor:
        return cap * (c * x / cap).tanh() if cap < 1e9 else c * x
    if (own(x) - logits).norm() > 0.02 * logits.norm():
        raise InputError(f"expected logits that are scaled or capped, got {type(model).__name__}")
    return own


def head_for(head: torch.nn.Linear, vocab: torch.Tensor) -> torch.nn.Linear:
    """The rows of an LM head for these tokens alone: a pass costs less (FR-Spec: Zhao et al.,
    arXiv 2502.14856)."""
    few = torch.nn.Linear(head.weight.shape[1], len(vocab), head.bias is not None)
    few.to(head.weight).load_state_dict({n: x[vocab] for n, x in head.state_dict().items()})
    return few.requires_grad_(False)
