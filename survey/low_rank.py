"""Changes of low rank: a matrix W of a model becomes W + B A, and only A and B are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. layerskip.py and
masks.py tune a model this way, where their papers train all weights. What is trained and kept in a
file is then a small part of the model.

    W [out, in]     frozen
    A [rank, in]    random at first
    B [out, rank]   zero at first, so that training begins with the model as it is

Departures from LoRA:
- Scale. Paper: W + (α / rank) B A. Here: W + B A. Why: the factor would do little more than
  change the learning rate.
- Matrices. Paper: those of the attention. Here: all matrices of the layers. Why: the papers of
  layerskip.py and masks.py tune the whole model.
"""
from common import InputError
from survey.views import open_model

import torch
from torch.nn.utils import parametrize


class LowRank(torch.nn.Module):
    """Turn a weight W into W + B A, each time that torch asks for the parametrized weight.

    weight  W [out, in], which gives A and B their shapes
    rank    the rank of the change: the rows of A and the columns of B
    """

    def __init__(self, weight: torch.Tensor, rank: int):
        super().__init__()
        self.A = torch.nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.B = torch.nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (self.B @ self.A).to(weight)


def add_low_rank(model, rank: int) -> dict[str, torch.nn.Parameter]:
    """Give every matrix of a model's layers a change of low rank, in place.

    model    the model that is changed
    rank     the rank of each change
    returns  the parameters A and B, float32, by the name of their matrix within the layers.
             InputError for a model whose matrices are not of torch's class Linear (GPT-2)
    """
    _, decoder, layers, _ = open_model(model)
    changes = {}
    for name, part in decoder._modules[layers].named_modules():
        if isinstance(part, torch.nn.Linear):
            change = LowRank(part.weight, rank).to(part.weight.device)
            parametrize.register_parametrization(part, "weight", change)
            changes[f"{name}.A"] = change.A
            changes[f"{name}.B"] = change.B
    if not changes:
        raise InputError(f"expected matrices of type Linear in {type(model).__name__}")
    return changes


def merge_changes(model):
    """Write a model's changes into its weights, in place.

    model    a model to which `add_low_rank` gave changes
    returns  the same model, without parametrizations and with no weight that is trained
    """
    for part in model.modules():
        if parametrize.is_parametrized(part, "weight"):
            parametrize.remove_parametrizations(part, "weight")  # the changed weight stays
    return model.requires_grad_(False)
