"""Cascades of drafts: exact at every level; the cheapest guesser by hand."""
import itertools

import pytest
import torch

from common import CachedLM, Sampler
from fake_models import ScriptedLM, markov
from families import tiny
from helpers import main, said_in_one_line, tokens_of
from laws import outcomes
from survey import cascade as module
from survey.cascade import Level, MaxGram, cascade, count_bigrams, report_acceptance, review
from survey.rest import as_text, load_datastore

PROMPT = [3, 14, 15]
# ---------------------------------------------------------------------------------- levels, reviews

def test_a_level_drops_what_is_no_longer_in_the_text():
    model = tiny("llama")
    level = Level(CachedLM(model), [])
    level.lm.start([])
    for text, n in (([3, 1, 4], 1), ([3, 1, 4, 1], 1), ([3, 1, 5, 9, 2], 3), ([3, 1, 5], 2),
                    ([3, 1, 5], 1), ([7, 7], 2)):
        logits = level.score(text, n)
        expected = model(input_ids=torch.tensor([text])).logits[0, -n:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert level.lm.length == len(text)


def test_only_what_is_new_is_fed():
    level = Level(ScriptedLM(lambda tokens: torch.zeros(4)), [1, 2])
    level.lm.start([1, 2])
    level.score([1, 2, 3, 0], 1)
    assert level.lm.rows == 2
    level.score([1, 2, 3, 1, 1], 2)
    assert level.lm.rows == 4
    level.score([1, 2, 3, 1, 1], 1)
    assert level.lm.rows == 5


def test_the_head_reads_the_rows_that_are_asked_for():
    """Of rows that the cache lacked only the last n."""
    model, rows = tiny("llama"), []
    level = Level(CachedLM(model), [])
    level.lm.start([])
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: rows.append(inputs[0].shape[-2]))
    assert level.score([3, 1, 4, 1, 5], 2).shape == (2, 61)
    assert level.score([3, 1, 4, 1, 5, 9], 1).shape == (1, 61)
    assert rows == [2, 1]


class Chooser(Sampler):
    def __init__(self, choose):
        super().__init__(1.0)
        self.choose = choose


def chosen_verify(p, q, guesses, sample):
    """Leviathan's rule, in double precision, by choices."""
    p, q = p.double(), q.double()
    for i, x in enumerate(guesses):
        accept = min(1.0, (p[i, x] / q[i, x]).item())
        if not sample.choose([1 - accept, accept]):
            left = (p[i] - q[i]).clamp(min=0)
            return i, sample.choose((left / left.sum()).tolist())
    return len(guesses), sample.choose((p[-1] / p[-1].sum()).tolist())


@pytest.mark.parametrize("counts, drafts, grams", [
    ([[2], [1]], 1, True), ([[1, 1], [2]], 1, True), ([[0, 2], [0]], 1, True),
    ([[2], [1], []], 2, False), ([[1, 1], [1], []], 2, False), ([[2, 1], [2], []], 2, False),
    ([[1, 1, 1], [1], [1]], 2, True)])
def test_reviews_have_the_first_models_distribution(counts, drafts, grams, monkeypatch):
    """By enumeration of all choices over 3 tokens, at every level: what a round gives, and what a
    draft gives to a round; the tokens after it are the model's."""
    monkeypatch.setattr(module, "verify", chosen_verify)
    models = [markov(seed, vocab=3) for seed in range(drafts + 1)]
    text = [0, 1, 2, 1]
    for first in range(drafts):
        def run(choose):
            levels = [Level(ScriptedLM(logits), text[:2]) for logits in models[first:]]
            for level in levels:
                level.lm.start(text[:2])
            levels += [MaxGram({}, 3)] * grams
            return review(levels, counts[first:], text, Chooser(choose))
        law = torch.zeros(3, 3, 3, dtype=torch.float64)
        runs = 0
        for weight, (tokens, probs) in outcomes(run):
            runs += 1
            assert len(tokens) == len(probs)
            for i in range(len(tokens)):
                known = models[first](text + tokens[:i]).softmax(-1)
                torch.testing.assert_close(probs[i], known)
            law += weight * going_on(models[first], text, tokens[:3])
        expected = going_on(models[first], text, [])
        assert runs > 3 and law.sum().item() == pytest.approx(1)
        torch.testing.assert_close(law, expected, atol=1e-6, rtol=1e-6)


def going_on(logits, text, tokens) -> torch.Tensor:
    """[3, 3, 3]: of the three tokens after a text that begin with these, drawn one by one."""
    law = torch.zeros(3, 3, 3, dtype=torch.float64)
    for new in itertools.product(range(3), repeat=3 - len(tokens)):
        known, weight = [*tokens], 1.0
        for x in new:
            weight *= logits(text + known).double().softmax(-1)[x].item()
            known.append(x)
        law[tuple(known)] += weight
    return law


def test_better_drafts_write_first_and_each_reviews_the_next():
    """How many tokens each model is fed in a round."""
    class Agreeing(ScriptedLM):
        def __init__(self):
            super().__init__(lambda tokens: 50 * torch.eye(9)[(tokens[-1] + 1) % 9])
    target, draft, cheap = Agreeing(), Agreeing(), Agreeing()
    target.vocab, target.model = 9, None
    log = []
    chunks = cascade(target, draft, [0, 1], gamma=4, inner=2, tail=3, grams="",
                     more_drafts=[cheap], log=log)
    assert next(chunks) == [2, 3, 4, 5, 6, 7, 8, 0]  # 4 + 3 and one more; no token came twice yet
    assert log == [{"drafted": 7, "accepted": 7}] and target.calls == 1
    assert draft.calls == 2  # each reviews two of the cheap one's, and adds one
    assert cheap.calls == 4 + 3  # alone: Max-Gram has nothing to say
    assert tokens_of(chunks, 20) == [(i + 1) % 9 for i in range(20)]


def test_a_perfect_draft_is_accepted_whole():
    model = tiny("llama")
    for sample in (Sampler(0), Sampler(1.0, seed=3)):
        log = []
        chunks = cascade(CachedLM(model), CachedLM(model), PROMPT, gamma=5, inner=0, tail=0,
                         grams="", sample=sample, log=log)
        tokens_of(chunks, 30)
        assert log == [{"drafted": 5, "accepted": 5}] * 5


# ----------------------------------------------------------------------------------------- Max-Gram

def test_max_gram_by_hand():
    known = MaxGram({}, 9)
    assert known.guess([1, 2, 3, 4, 1, 2], 2) == [3, 4]
    assert known.guess([1, 2, 3, 2, 4, 1, 2], 1) == [3]  # "1 2" before the later "2"
    assert known.guess([1, 2, 3, 2, 4, 5, 2], 1) == [4]  # of equals the latest
    assert known.guess([1, 2, 3], 2) == [] == known.guess([1], 2) == known.guess([1, 1], 0)
    assert known.guess([5, 1, 1], 4) == [1, 1, 1, 1]  # and what it guessed goes on
    followers = MaxGram({as_text([3]): as_text([1]), as_text([1]): as_text([8])}, 9)
    assert followers.guess([1, 2, 3], 5) == [1, 2, 3, 1, 2]
    assert followers.guess([2, 3], 9) == [1, 8]
    beyond = MaxGram({as_text([3]): as_text([9]), as_text([9]): as_text([1])}, 9)
    assert beyond.guess([3], 2) == []  # 9 is no token of the model, and ends the guesses


def test_bigrams_are_the_most_frequent_followers(embedded, monkeypatch):
    target, _, _ = embedded
    store = type("Store", (), {"text": as_text([1, 2, 1, 2, 1, 3, -1, 3, 4, -1, 3, -1, 3])})
    monkeypatch.setattr(module, "load_datastore", lambda *_: store)
    expected = {as_text([x]): as_text([y]) for x, y in ((1, 2), (2, 1), (3, 4))}
    assert count_bigrams("x", target) == expected
    assert count_bigrams("", target) == {}


def test_the_datastores_bigrams(embedded):
    target, _, _ = embedded
    found = count_bigrams(module.DATASTORE, target)
    text = load_datastore(module.DATASTORE, target).text
    some = max(found, key=text.count)
    counts = [text.count(some + y) for y in set(text) - {"\0"}]
    assert len(found) > 100 and text.count(some + found[some]) == max(counts)


# ---------------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize("argv, said", [
    (["--gamma", "-1"], "--gamma must be 0 or more, got -1"),
    (["--inner", "-1"], "--inner must be 0 or more, got -1"),
    (["--tail", "-1"], "--tail must be 0 or more, got -1"), (["--grams", "nothing"], "expected")])
def test_bad_input_is_one_line(argv, said, capfd):
    assert main([cascade], report_acceptance, [*argv, "--prompt", "x"]) == 2
    said_in_one_line(said, capfd)


def test_the_embedded_pair(embedded, held_out):
    """AR's output; Max-Gram's tokens make a round longer than the draft's alone."""
    target, draft, _ = embedded
    per_call = []
    for tail in (0, 2):
        lm = CachedLM(target)
        for prompt, expected in held_out:
            chunks = cascade(lm, CachedLM(draft), prompt, tail=tail)
            assert tokens_of(chunks, len(expected)) == expected
        per_call.append(sum(len(expected) for _, expected in held_out) / lm.calls)
    assert per_call[1] > per_call[0] + 0.2 > 4
