"""Kangaroo's exit: its equations, where a draft ends, its rows in the cache, and its loss. The loop
is LayerSkip's (test_layerskip.py), and the text is the model's own (test_lossless.py)."""
import random

import pytest
import torch

from common import autoregressive
from families import deep, rand
from helpers import tokens_of
from support.layers import FeatureLM, split_layers
from survey.early_exit import Exit, early_exit, exit_loss, fit
from survey.layerskip import collect_states

PROMPT, E = [3, 1, 4, 1, 5], 2


def run_by_hand(network, x: torch.Tensor) -> torch.Tensor:
    """Compute norm_2(x + Attention(norm_1(x))) of x [T, 32], head by head: 4 of queries, 2 of keys,
    8 numbers each, of which numbers j and j + 4 are turned together."""
    def turn(row, t: int):
        angle = t * 10000 ** (-torch.arange(4) / 4)
        a, b = row[:4], row[4:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])
    y = network.before.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    of = network.attention
    q, k, v = ((y @ part.weight.T).view(len(x), -1, 8)
               for part in (of.q_proj, of.k_proj, of.v_proj))
    rows = []
    for i in range(len(x)):
        heads = []
        for head in range(4):
            scores = [turn(q[i, head], i) @ turn(k[j, head // 2], j) / 8 ** 0.5
                      for j in range(i + 1)]
            heads.append(torch.stack(scores).softmax(0) @ v[:i + 1, head // 2])
        rows.append(x[i] + torch.cat(heads) @ of.o_proj.weight.T)
    return network.norm(torch.stack(rows))


@torch.no_grad()
def draft_by_hand(model, network, text: list[int], gamma: int, threshold: float) -> list[int]:
    guesses, sure = [], True
    while sure and len(guesses) < gamma:
        ids = torch.tensor([text + guesses])
        x = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[E][0]
        probs = model.lm_head(run_by_hand(network, x)[-1]).softmax(-1)
        guesses.append(probs.argmax().item())
        sure = probs.max() >= threshold
    return guesses


def make_pair(vocab: int = 8):
    """Make a model and an exit that is sometimes right."""
    model = deep("llama", vocab_size=vocab)
    return model, rand(Exit(model, E), scale=0.3)


@pytest.mark.parametrize("threshold", [0.0, 0.25])
def test_rounds_are_those_of_the_equations_and_the_cache_is_that_of_the_text(threshold):
    """Whatever was rejected, the rows of all early layers and of the adapter are those of the text.
    """
    model, network = make_pair()
    target, text, log = FeatureLM(model), PROMPT, []
    early, _ = target.once(split_layers, target, E, network)
    chunks = early_exit(target, text, gamma=3, threshold=threshold, trained=network, log=log)
    for _ in range(12):
        guesses = draft_by_hand(model, network, text, 3, threshold)
        chunk = next(chunks)
        text = text + chunk
        assert chunk[:-1] == guesses[:len(chunk) - 1]
        assert (log[-1]["drafted"], log[-1]["accepted"]) == (len(guesses), len(chunk) - 1)
        assert log[-1]["layers"] == (len(guesses) + 1) * 2.5 + 2
        fresh, _ = split_layers(FeatureLM(model), E, network)
        fresh.start(text[:-1], taps=[E])
        assert early.length == fresh.length and early.cache.layers.keys() == {0, 1, 2}
        for layer, found in early.cache.layers.items():
            for rows, expected in zip(found, fresh.cache.layers[layer]):
                n = early.length
                torch.testing.assert_close(rows[:, :, :n], expected[:, :, :n], atol=1e-4, rtol=1e-4)
    assert text[5:] == tokens_of(autoregressive(FeatureLM(model), PROMPT), len(text) - 5)
    assert len({record["accepted"] for record in log}) > 1
    assert {record["drafted"] for record in log} == ({1, 2, 3} if threshold else {3})


def test_a_perfect_exit_is_accepted_whole():
    """The layers after it add nothing, and a new exit is the model's own."""
    model = deep("llama")
    for layer in model.model.layers[E:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    x = torch.randn(1, 3, 32)
    network = Exit(model, E)
    new = network.norm(network(x, position_ids=torch.arange(3)[None]))
    torch.testing.assert_close(new, model.model.norm(x))
    chunks = early_exit(FeatureLM(model), PROMPT, gamma=3, threshold=0.0, trained=network)
    assert [len(next(chunks)) for _ in range(5)] == [4] * 5


def test_the_loss_is_the_cross_entropy_with_the_model_and_reaches_the_exit_alone():
    """The second text is shorter, and its answer is longer."""
    model, network = make_pair(61)
    model.requires_grad_(False)
    network.requires_grad_(True)
    batch = [(torch.randn(T, 32), torch.randn(n, 32)) for T, n in ((7, 2), (5, 4))]
    loss = exit_loss(lambda x: 2 * model.lm_head(x), network, batch, 61)
    each = []
    for early, last in batch:
        read = run_by_hand(network, early)[-len(last):]
        p, log_q = (2 * model.lm_head(last)).softmax(-1), (2 * model.lm_head(read)).log_softmax(-1)
        each.append(-(p * log_q).sum(-1))
    assert loss.item() == pytest.approx(torch.cat(each).mean().item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in network.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_the_figure_of_held_out_answers_counts_all_their_tokens():
    """There are 600 of them, and a figure of the last answer alone would be another one."""
    model, rng = deep("llama"), random.Random(0)
    data = [([rng.randrange(61)], [rng.randrange(61) for _ in range(100)]) for _ in range(6)]
    network = Exit(model, 1)
    fit(model, network, data[:1], data, steps=1, batch=1, lr=1e-9)
    early, last = (torch.cat(collect_states(model, data, layers)).float() for layers in (1, 4))
    right = model.lm_head(model.model.norm(early)).argmax(-1) == model.lm_head(last).argmax(-1)
    assert network.right == pytest.approx(right.float().mean().item())
    assert right.float().mean() != right[500:].float().mean()
