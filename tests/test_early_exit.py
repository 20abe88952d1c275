"""A trained exit: how it begins, and a loss that reaches the exit alone. The loop is LayerSkip's
(test_layerskip.py), and the text is the model's own (test_lossless.py)."""
import random

import pytest
import torch

from families import deep
from survey.early_exit import Exit, exit_loss, fit
from survey.layerskip import collect_states


def test_a_new_exit_is_the_models_own():
    model, x = deep("llama"), torch.randn(3, 32)
    torch.testing.assert_close(Exit(model, 2, 8)(x), model.model.norm(x))


def test_the_loss_is_the_cross_entropy_with_the_model_and_reaches_the_exit_alone():
    model, early, last = deep("llama").requires_grad_(False), torch.randn(5, 32), torch.randn(5, 32)
    network = Exit(model, 2, 8)
    torch.nn.init.normal_(network.W_2.weight)
    loss = exit_loss(lambda x: 2 * model.lm_head(x), network, early, last, 61)
    p = (2 * model.lm_head(last)).softmax(-1)
    log_q = (2 * model.lm_head(network(early))).log_softmax(-1)
    assert loss.item() == pytest.approx(-(p * log_q).sum(-1).mean().item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in network.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_the_figure_of_held_out_answers_counts_all_their_tokens():
    """There are 600 of them, and a figure of the first 512 would be another one."""
    model, rng = deep("llama"), random.Random(0)
    data = [([rng.randrange(61)], [rng.randrange(61) for _ in range(100)]) for _ in range(6)]
    network = Exit(model, 1, 4)
    fit(model, network, data[:1], data, steps=1, batch=1, lr=1e-9)
    early, last = (torch.cat(collect_states(model, data, layers)).float() for layers in (1, 4))
    right = model.lm_head(model.model.norm(early)).argmax(-1) == model.lm_head(last).argmax(-1)
    assert network.right == pytest.approx(right.float().mean().item())
    assert right.float().mean() != right[:512].float().mean()
