"""A trained exit: what it guesses, and a loss that reaches the exit alone. The loop is LayerSkip's
(test_layerskip.py), and the text is the model's own (test_lossless.py)."""
import random

import pytest
import torch

from common import Sampler
from families import deep
from survey.early_exit import Exit, early_exit, exit_loss, fit
from survey.layerskip import collect_states
from training.layers import FeatureLM

PROMPT = [3, 14, 15]


def random_exit(model, E: int) -> Exit:
    torch.manual_seed(0)
    network = Exit(model, E, 8)
    torch.nn.init.normal_(network.W_2.weight, std=30)
    return network.requires_grad_(False)


def test_a_new_exit_is_the_models_own():
    model, x = deep("llama"), torch.randn(3, 32)
    torch.testing.assert_close(Exit(model, 2, 8)(x), model.model.norm(x))


def test_the_loss_is_the_cross_entropy_with_the_model_and_reaches_the_exit_alone():
    model, early, last = deep("llama").requires_grad_(False), torch.randn(5, 32), torch.randn(5, 32)
    network = random_exit(model, 2).requires_grad_(True)
    loss = exit_loss(lambda x: 2 * model.lm_head(x), network, early, last, 61)
    p = (2 * model.lm_head(last)).softmax(-1)
    log_q = (2 * model.lm_head(network(early))).log_softmax(-1)
    assert loss.item() == pytest.approx(-(p * log_q).sum(-1).mean().item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in network.parameters())
    assert all(p.grad is None for p in model.parameters())


class Recording(Sampler):
    """Keep all tokens that were drawn."""

    def draw(self, probs):
        tokens = super().draw(probs)
        self.drawn = [*getattr(self, "drawn", []), *tokens.tolist()]
        return tokens


def test_each_guess_is_the_exits_likeliest_token_after_the_guesses_before_it():
    model, sample, text, without = deep("llama"), Recording(0), list(PROMPT), []
    network = random_exit(model, 2)
    next(early_exit(FeatureLM(model), PROMPT, gamma=3, trained=network, sample=sample))
    for guess in sample.drawn[:3]:
        with torch.inference_mode():
            state = model(input_ids=torch.tensor([text]), use_cache=False,
                          output_hidden_states=True).hidden_states[2][0, -1:]
            assert model.lm_head(network(state)).argmax().item() == guess
            without.append(model.lm_head(model.model.norm(state)).argmax().item())
        text.append(guess)
    assert without != sample.drawn[:3]  # the exit is not the model's own


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
