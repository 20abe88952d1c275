"""PaSS and SPACE: guesses are what training sees, and as many are accepted as the measured chances
say."""
import copy
import random

import pytest
import torch
from safetensors.torch import load_file

from bita import Tuning, load_tuning
from common import CachedLM, Sampler, autoregressive, greedy
from families import tiny
from helpers import mask_logits, per_call, tokens_of
from survey import masks as module
from survey.masks import plan_space, load_space, measure_all_right, pass_sampling, space, tune
from training import loop as training
from training.low_rank import add_low_rank
from training.parts import save_part
from trainings import PROMPTS, WORDLESS

def random_tokens(model, L=3) -> Tuning:
    tokens = Tuning(model, 0, L)
    rng = torch.Generator().manual_seed(0)
    for p in tokens.parameters():
        p.data = 0.5 * torch.randn(p.shape, generator=rng)
    return tokens.requires_grad_(False)


def random_space(path, model, size=0.1, right=(0.5, 0.5, 0.5), mask=None) -> str:
    """Make a file of random changes of a model, and of a mask, which is random too."""
    rng, own = torch.Generator().manual_seed(7), add_low_rank(copy.deepcopy(model), 2)
    for p in own.values():
        p.data = size * torch.randn(p.shape, generator=rng)
    width = model.get_input_embeddings().weight.shape[1]
    own["mask"] = 0.5 * torch.randn(1, width, generator=rng) if mask is None else mask
    save_part(path, "a SPACE tuning", model, own, rank=2, right=[*right])
    return str(path)


# ---------------------------------------------------------------------------------- decoding

@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_pass_guesses_from_what_training_sees(name, monkeypatch):
    """Round by round."""
    model, drawn = tiny(name), []
    tokens, verify = random_tokens(model), module.verify
    monkeypatch.setattr(module, "verify",
                        lambda p, q, *more: drawn.append(q.clone()) or verify(p, q, *more))
    text, target = [5, 3, 14, 15, 9, 2, 6], CachedLM(model)
    chunks = pass_sampling(target, text, L=2, trained=tokens, sample=Sampler(1.0))
    for _ in range(5):
        chunk = next(chunks)
        ids, at = torch.tensor([text]), torch.tensor([[len(text) - 1]])
        with torch.inference_mode():
            expected = mask_logits(model, tokens.masks[:2], [], ids, at)[0, 0].softmax(-1)
        torch.testing.assert_close(drawn[-1], expected, atol=1e-4, rtol=1e-4)
        text = text + chunk


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "opt"])
def test_spaces_candidates_are_those_behind_the_last_accepted_token(name, tmp_path, monkeypatch):
    """Call by call, against the logits of training."""
    model, fed = tiny(name), []
    file, target = random_space(tmp_path / "t", model, size=0.3), CachedLM(model, 6)
    lm, mask, _ = target.once(("space", file), lambda: load_space(file, target))
    walk = module.walk
    monkeypatch.setattr(module, "walk", lambda ids, *more: fed.append(ids) or walk(ids, *more))
    text = [5, 3, 1, 4, 2]
    chunks = space(target, text, k=2, tuning=file, sample=Sampler(1.0, seed=2))
    lengths = set()
    for _ in range(20):
        expected = None if not lengths else [text[-1], *greedy(logits[:, :6])]
        chunk = next(chunks)
        assert expected in (None, fed[-1])
        text, lengths = text + chunk, lengths | {len(chunk)}
        ids, at = torch.tensor([text[:-1]]), torch.tensor([[len(text) - 2]])
        with torch.inference_mode():
            logits = mask_logits(lm.model, mask.expand(2, -1), [], ids, at)[0, 0]
    assert len(lengths) > 1


def test_as_many_masks_as_pay(monkeypatch):
    """11 masks behind each of 12 tokens are 144 rows, and the clock ends at 128."""
    monkeypatch.setattr(module, "row_costs", lambda lm, most: [0.0, *range(1, most + 1)])
    assert list(plan_space(None, [0.5, 0.25])) == [(1, 1.5, 4), (2, 1.75, 9)]
    assert [k for k, _, _ in plan_space(None, [0.9] * 11)] == [*range(1, 11)]


# ---------------------------------------------------------------------------------- training

def test_how_often_all_guesses_are_right_by_hand():
    model, rng, hits, total = tiny("llama", vocab_size=6), random.Random(1), [0, 0], 0
    data = [([rng.randrange(6) for _ in range(3)], [rng.randrange(6) for _ in range(n)])
            for n in (9, 2, 14, 3)]
    masks = random_tokens(model, 2).masks
    for prompt, answer in data:
        text = prompt + answer
        for a in range(len(prompt) - 1, len(text) - 3):
            ids = torch.tensor([text[:a + 1]])
            guesses = mask_logits(model, masks, [], ids, torch.tensor([[a]]))[0, 0].argmax(-1)
            right = (guesses == torch.tensor(text[a + 2:a + 4])).tolist()
            hits = [hits[0] + right[0], hits[1] + all(right)]
            total += 1
    assert hits[0] > hits[1] > 0
    assert measure_all_right(model, masks, data) == pytest.approx([x / total for x in hits])
    assert measure_all_right(model, masks, []) == [0, 0]


SMALL = dict(k=2, max_new_tokens=8, steps=6, batch=4)


def test_plain_text_counts_as_much_as_masks(tmp_path, monkeypatch):
    """By its divergence from the untuned model, which is 0 at first, and learnt from afterwards."""
    model, given, divergence = tiny("llama"), [], training.divergence

    def spy(kind, p, q):
        given.append((kind, divergence(kind, p, q).mean().item(), q.requires_grad))
        return factor * divergence(kind, p, q)
    monkeypatch.setattr(training, "divergence", spy)
    masks = []
    for factor in (1.0, 0.0):
        tune(model, WORDLESS, PROMPTS, out=tmp_path / "t", work=tmp_path / f"{factor}", **SMALL)
        masks.append(load_file(tmp_path / "t")["mask"])
    assert given[0][0] == "forward-kl" and given[0][1] == pytest.approx(0, abs=1e-5)
    assert all(x[2] for x in given) and len(given) == 12 and given[5][1] > 0
    assert not torch.equal(*masks)


# ------------------------------------------------------------------------- the committed parts

@pytest.mark.parametrize("L", [1, 4])
def test_the_embedded_tokens_and_the_formula(embedded, held_out, L):
    """PaSS's tokens per call on held-out prompts: (2 + Σ chances) / 2, where the chances are those
    of all places of these answers, within 0.1 (rounds begin at other places than others)."""
    model, _, _ = embedded
    tokens = load_tuning(module.TOKENS, model)
    right = measure_all_right(model, tokens.masks[:L], held_out[::2], anchors=200)
    found = per_call(pass_sampling, model, held_out[::2], L=L, trained=tokens)
    assert found == pytest.approx((2 + sum(right)) / 2, abs=0.1)


def test_the_embedded_tuning(embedded, held_out):
    """Output is the tuned model's; it guesses better than BiTA's efficient tree, 1.84."""
    target = CachedLM(embedded[0])
    lm, *_ = target.once(("space", module.TUNED), lambda: load_space(module.TUNED, target))
    tuned = CachedLM(lm.model)
    answers = [(p, tokens_of(autoregressive(tuned, p), 50)) for p, _ in held_out[::2]]
    for prompt, expected in answers:
        assert tokens_of(space(target, prompt, k=4), 50) == expected
    assert 50 * len(answers) / target.calls > 1.84
