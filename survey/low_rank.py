"""Changes of low rank: a matrix W of a model becomes W + B A, and only A and B are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. layerskip.py and
masks.py tune a model this way, where their papers train all weights. What is trained and kept in a
file is then a small part of the model.

    x ──┬── W [out, in], frozen ─────────────────────────── + ── y
        └── A [rank, in] ── B [out, rank]: the branch ──────┘

A is random at first. B is zero at first, so that training begins with the model as it is. While A
and B are trained, the branch computes y = W x + B (A x). The matrix W + B A would be one more copy
of the model in each pass. It is made once, when training has ended.

Departures from LoRA:
- Scale. Paper: W + (α / rank) B A. Here: W + B A. Why: the factor would do little more than
  change the learning rate.
- Matrices. Paper: those of the attention. Here: all matrices of the layers. Why: the papers of
  layerskip.py and masks.py tune the whole model.
"""
from common import InputError
from survey.views import open_model

import torch
import torch.nn.functional as F


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
        return output + self(inputs[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.A.to(x)), self.B.to(x))


def add_low_rank(model, rank: int) -> dict[str, torch.nn.Parameter]:
    """Give every matrix of a model's layers a change of low rank, in place.

    model    the model that is changed
    rank     the rank of each change
    returns  the parameters A and B, float32, by the name of their matrix within the layers.
             InputError for a model whose matrices are not of torch's class Linear (GPT-2)
    """
    _, decoder, layers, _ = open_model(model)
    changes = {}
    for name, part in [*decoder._modules[layers].named_modules()]:
        if isinstance(part, torch.nn.Linear):
            part.change = LowRank(part, rank).to(part.weight.device)
            changes[f"{name}.A"] = part.change.A
            changes[f"{name}.B"] = part.change.B
    if not changes:
        raise InputError(f"expected matrices of type Linear in {type(model).__name__}")
    return changes


@torch.no_grad()
def merge_changes(model):
    """Write a model's changes into its weights, in place.

    model    a model to which `add_low_rank` gave changes
    returns  the same model, without branches and with no weight that is trained
    """
    for part in [*model.modules()]:
        change = getattr(part, "change", None)
        if isinstance(change, LowRank):
            part.weight += (change.B @ change.A).to(part.weight)
            change.hook.remove()
            del part.change
    return model.requires_grad_(False)
