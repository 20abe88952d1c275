"""Kangaroo's exit: its equations, where a draft ends, and its loss. The loop is LayerSkip's
(test_layerskip.py), and the text is the model's own (test_lossless.py)."""
import random

import pytest
import torch
import torch.nn.functional as F

from families import deep, rand
from heads import attend
from helpers import note_calls
from support.engine import EngineLM
from support.layers import view
from survey import layerskip
from survey.early_exit import Exit, early_exit, exit_loss, fit
from training.loop import read_texts
from training.texts import Text

PROMPT, E = [3, 1, 4, 1, 5], 2


def run_by_hand(network, x: torch.Tensor) -> torch.Tensor:
    """Compute norm_2(x + Attention(norm_1(x))) of x [T, 32]."""
    read = F.rms_norm(x, (32,), network.before.weight, 1e-6)
    return network.norm(x + attend(dict(network.named_parameters()), "attention.", read, {}))


@pytest.mark.parametrize("family, threshold, drafts", [
    ("llama", 0.0, {3}), ("llama", 0.25, {1, 2, 3}), ("gemma3", 0.0, {3})])
@torch.no_grad()
def test_rounds_are_those_of_the_equations(family, threshold, drafts, monkeypatch):
    """The adapter sees the whole text, also in the place of a layer with a window of nine tokens.
    That the caches are those of the text is in test_lossless.py, where a method that begins anew
    guesses alike."""
    model, judged = deep(family, vocab_size=8), note_calls(monkeypatch, layerskip, "verify")
    network = rand(Exit(model, E), scale=0.3)
    target, text, log = EngineLM(model), PROMPT, []
    chunks = early_exit(target, text, gamma=3, threshold=threshold, trained=network, log=log)
    for _ in range(12):
        guesses, sure = [], True
        while sure and len(guesses) < 3:
            states = model(input_ids=torch.tensor([text + guesses]), output_hidden_states=True)
            probs = model.lm_head(run_by_hand(network, states.hidden_states[E][0])[-1]).softmax(-1)
            guesses.append(probs.argmax().item())
            sure = probs.max() >= threshold
        chunk = next(chunks)
        text = text + chunk
        assert judged[-1][2] == guesses and chunk[:-1] == guesses[:len(chunk) - 1]
        assert log[-1] == {"guessed": len(guesses), "accepted": len(chunk) - 1,
                           "layers": (len(guesses) + 1) * 2.5 + 2}
    assert {record["guessed"] for record in log} == drafts
    assert len({record["accepted"] for record in log}) > 1


def test_a_new_exit_is_the_models_own():
    model, x = deep("llama"), torch.randn(1, 3, 32)
    network = Exit(model, E)
    new = network.norm(network(x, position_ids=torch.arange(3)[None]))
    torch.testing.assert_close(new, model.model.norm(x))


def test_the_loss_is_the_cross_entropy_with_the_model_and_reaches_the_exit_alone():
    model = deep("llama").requires_grad_(False)
    network = rand(Exit(model, E)).requires_grad_(True)
    batch = [Text(torch.zeros(T), torch.randn(T, 64), length) for T, length in ((8, 6), (6, 2))]
    loss, each = exit_loss(lambda x: 2 * model.lm_head(x), network, batch, 61), []
    for _, features, length in batch:
        read, last = run_by_hand(network, features[:, :32]), features[:, 32:]
        p, log_q = (2 * model.lm_head(last)).softmax(-1), (2 * model.lm_head(read)).log_softmax(-1)
        each.append(-(p * log_q).sum(-1)[length - 1:-1])
    assert loss.item() == pytest.approx(torch.cat(each).mean().item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in network.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_the_figure_of_held_out_answers_counts_all_their_tokens(tmp_path, capsys):
    model, rng = deep("llama"), random.Random(0)
    data = [([rng.randrange(61)], [rng.randrange(61) for _ in range(100)]) for _ in range(6)]
    network = Exit(model, 1)
    fit(model, network, data[:1], data, out=tmp_path / "exit", work=tmp_path, steps=1, batch=1,
        lr=1e-9)
    texts = [prompt + answer[:-1] for prompt, answer in data]
    early, last = (torch.cat(read_texts(view(model, 0, n), texts)).float() for n in (1, 4))
    right = model.lm_head(model.model.norm(early)).argmax(-1) == model.lm_head(last).argmax(-1)
    assert f"held-out guesses right {right.float().mean().item():.3f}\n" in capsys.readouterr().out
