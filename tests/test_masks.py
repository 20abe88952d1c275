"""PaSS and SPACE: guesses are what training sees, and what is planned and measured is right."""
import random

import pytest
import torch
from safetensors.torch import load_file

from bita import mask_logits
from common import Sampler
from families import tiny
from support.engine import EngineLM
from survey import masks as module
from survey.masks import accuracy, pass_sampling, plan_space, space, tune
from training import loop as training
from methods import tuning_of
from trainings import PROMPTS, WORDLESS


# ---------------------------------------------------------------------------------- decoding

@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_pass_guesses_from_what_training_sees(name, monkeypatch):
    """The distributions of the guesses are compared round by round."""
    model, drawn = tiny(name), []
    tokens, verify = tuning_of(model, 0, 3), module.verify
    monkeypatch.setattr(module, "verify",
                        lambda p, q, *more: drawn.append(q.clone()) or verify(p, q, *more))
    text, target = [5, 3, 14, 15, 9, 2, 6], EngineLM(model)
    chunks = pass_sampling(target, text, L=2, trained=tokens, sample=Sampler(1.0))
    for _ in range(5):
        chunk = next(chunks)
        ids, at = torch.tensor([text]), torch.tensor([[len(text) - 1]])
        with torch.inference_mode():
            expected = mask_logits(model, tokens.masks[:2], [], ids, at)[0, 0].softmax(-1)
        torch.testing.assert_close(drawn[-1], expected, atol=1e-4, rtol=1e-4)
        text = text + chunk


def test_space_guesses_from_what_training_sees(monkeypatch):
    """Of few tokens guesses are often accepted. They are the likeliest ones at any temperature."""
    model, made, lengths = tiny("llama", vocab_size=8), [], set()
    mask = tuning_of(model, 0, 1).masks
    monkeypatch.setattr(module, "greedy", lambda x: made.append(x.argmax(-1).tolist()) or made[-1])
    text, target = [5, 3, 4, 1, 2, 6], EngineLM(model)
    target.memo[module.load_space, ("own", target)] = EngineLM(model), mask
    chunks = space(target, text, k=2, tuning="own", sample=Sampler(1.0))
    for _ in range(9):
        chunk = next(chunks)
        text, lengths = text + chunk, lengths | {len(chunk)}
        ids, at = torch.tensor([text[:-1]]), torch.tensor([[len(text) - 2]])
        expected = mask_logits(model, mask.expand(2, -1), [], ids, at)[0, 0].argmax(-1)
        assert made[-1] == expected.tolist()
    assert len(lengths) > 1 and target.calls == 9


def test_what_masks_bring():
    assert [*plan_space(0.5)][:2] == [(1, 1.5, 4, 0, 0), (2, 1.75, 9, 0, 0)]


# ---------------------------------------------------------------------------------- training

def test_how_often_guesses_are_right_by_hand():
    model, rng, hits, total = tiny("llama", vocab_size=6), random.Random(1), [0, 0], [0, 0]
    data = [([rng.randrange(6) for _ in range(3)], [rng.randrange(6) for _ in range(n)])
            for n in (9, 2, 14)]
    masks = tuning_of(model, 0, 2).masks
    for prompt, answer in data:
        text = prompt + answer
        for a in range(len(prompt) - 1, len(text) - 2):
            ids = torch.tensor([text[:a + 1]])
            guesses = mask_logits(model, masks, [], ids, torch.tensor([[a]]))[0, 0].argmax(-1)
            for j, token in enumerate(text[a + 2:a + 4]):
                hits[j], total[j] = hits[j] + (guesses[j] == token).item(), total[j] + 1
    assert min(hits) > 0
    assert accuracy(model, masks, data) == pytest.approx([x / n for x, n in zip(hits, total)])


def test_plain_text_counts_as_much_as_masks(tmp_path, monkeypatch):
    """By its divergence from the untuned model, which is 0 at first, and learnt from afterwards. It
    reaches the changes of the layers directly, and the mask hardly."""
    model, given, divergence = tiny("llama"), [], training.divergence

    def spy(kind, p, q):
        given.append((kind, divergence(kind, p, q).mean().item(), q.requires_grad))
        return factor * divergence(kind, p, q)
    monkeypatch.setattr(training, "divergence", spy)
    changes = []
    for factor in (1.0, 0.0):
        out = tmp_path / f"t{factor}"
        tune(model, WORDLESS, PROMPTS, out=out, work=tmp_path / f"{factor}", k=2,
             max_new_tokens=6, steps=3, batch=2)
        changes.append(load_file(out)["0.self_attn.q_proj.B"])
    assert given[0][0] == "forward-kl" and given[0][1] == pytest.approx(0, abs=1e-5)
    assert all(x[2] for x in given) and len(given) == 6 and given[2][1] > 0
    assert torch.dist(*changes, p=torch.inf) > 5e-4  # of 2e-3, the largest number there
