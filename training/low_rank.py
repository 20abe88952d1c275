"""Changes of low rank: a matrix W of a model becomes W + B A, and only A and B are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.

layerskip.py and masks.py tune a model this way, while their papers train all of its weights. So
what is trained is small beside the model, and so is its file.

    x ──┬── W [out, in], frozen ─────────────────────────── + ── y
        └── A [rank, in] ── B [out, rank]: the branch ──────┘

A is random at first. B is zero at first, so that training begins with the model as it is. While A
and B are trained, the branch computes y = W x + B (A x). The matrix W + B A would be one more copy
of the model in each pass.

A tuned model shares all weights with the model that it was made from, and has branches of its own.
So both can be run, and the model is in memory once. When training has ended, W + B A takes the
place of a branch, which makes a call faster. These matrices are new, so they are made only where
they are small. In a model of 8B they would be 14 GB, and there the branches stay.

Departures from LoRA:
- Scale. Paper: W + (α / rank) B A. Here: W + B A. Why: the factor would do little more than
  change the learning rate.
- Matrices. Paper: those of the attention. Here: all matrices of the layers. Why: the papers of
  layerskip.py and masks.py tune the whole model.
"""
from common import InputError
from support.engine import list_layers
from support.layers import share_weights
from support.packed import is_packed, pack, plain
from support.parts import seeded

import torch
import torch.nn.functional as F

MERGED = 2 ** 32  # the most bytes that the matrices W + B A of a model may have in all


class LowRank(torch.nn.Module):
    """Compute the branch B A beside a matrix W; a hook adds it to what W gives.

    linear  the layer of W [out, in], which gets the hook
    rank    the rank of the change: the rows of A and the columns of B
    """

    def __init__(self, linear: torch.nn.Linear, rank: int):
        super().__init__()
        out, width = linear.weight.shape
        self.A = torch.nn.Parameter(torch.randn(rank, width) / width ** 0.5)
        self.B = torch.nn.Parameter(torch.zeros(out, rank))
        self.hook = linear.register_forward_hook(self.add_branch)

    def add_branch(self, linear, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        [x] = inputs
        return output + F.linear(F.linear(x, self.A.to(x)), self.B.to(x))


def add_low_rank(model, rank: int) -> dict[str, torch.nn.Parameter]:
    """Give every matrix of a model's layers a change of low rank, in place.

    model    the model that is changed. One of `share_weights` leaves the original as it is
    rank     the rank of each change
    returns  the parameters A and B, float32, by the name of their matrix within the layers.
             InputError for a model whose matrices are not of torch's class Linear (GPT-2)
    """
    changes = {}
    for name, part in [*list_layers(model).named_modules()]:
        if isinstance(part, torch.nn.Linear):
            part.change = LowRank(part, rank).to(part.weight.device)
            changes |= {f"{name}.A": part.change.A, f"{name}.B": part.change.B}
    if not changes:
        raise InputError(f"expected matrices of type Linear in {type(model).__name__}")
    return changes


class Tuned:
    """This is a model with changes of low rank, as a part that `save_trained` takes.

    title     what the tuning is, in words that an error message can use
    original  the model that is tuned. It stays as it is, and shares its weights
    rank      the rank of each change
    seed      the seed of the changes
    facts     what else the file says of the tuning

    model     the tuned model
    changes   all that is trained, by name
    """
    vocab = None

    def __init__(self, title: str, original, rank: int, seed: int = 0, **facts):
        self.title = title
        self.facts = {"rank": rank} | facts
        self.model = share_weights(original)
        with seeded(seed):
            self.changes = add_low_rank(self.model.requires_grad_(False), rank)

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return self.changes

    def parameters(self):
        return self.changes.values()

    def header(self) -> dict:
        return self.facts


def list_changed(model) -> list[torch.nn.Linear]:
    """List the matrices of a model that have a branch."""
    return [x for x in model.modules() if isinstance(getattr(x, "change", None), LowRank)]


@torch.no_grad()
def merge_changes(model):
    """Put W + B A in the place of each matrix W and its branch.

    The sum is a new tensor, since another model may share W.

    model    a model to which `add_low_rank` gave changes
    returns  the same model, without branches and with no weight that is trained
    """
    packed = is_packed(model)
    for part in list_changed(model):
        change, W = part.change, plain(part.weight)
        part.weight = torch.nn.Parameter(W + (change.B @ change.A).to(W))
        change.hook.remove()
        del part.change
    model.requires_grad_(False)
    return pack(model) if packed else model


def prepare_changes(model):
    """Make a tuned model ready for decoding: merge small changes, and keep the others as branches.

    model    a model to which `add_low_rank` gave changes
    returns  the same model. The A and B of branches have the type of W now
    """
    parts = list_changed(model)
    if sum(part.weight.numel() * part.weight.element_size() for part in parts) <= MERGED:
        return merge_changes(model)
    for part in parts:
        part.change.to(part.weight)
    return model.requires_grad_(False)
