"""In a cascade of drafts every review has the distribution of the model that reviews. The cheapest
guesser is checked by hand. That the text is the target's is in test_lossless.py."""
import pytest
import torch

from common import Sampler
from fake_models import ScriptedLM, markov
from helpers import tokens_of
from laws import WARM, Choosing, law, outcomes
from survey.rest import as_text
from survey.cascade import Level, MaxGram, cascade, count_bigrams, review


# ---------------------------------------------------------------------------------- levels, reviews

@pytest.mark.parametrize("counts, drafts, grams", [
    ([[2], [1]], 1, True), ([[1, 1], [2]], 1, True), ([[0, 2], [0]], 1, True),
    ([[2], [1], []], 2, False), ([[2, 1], [1], []], 2, False), ([[1, 1, 1], [1], [1]], 2, True)])
def test_reviews_have_the_first_models_distribution(counts, drafts, grams):
    """By enumeration of all choices over two tokens, at every level: what a round gives, and what a
    draft gives to a round. The tokens that follow are appended by the chain rule."""
    models, text = [markov(seed, vocab=2) for seed in range(drafts + 1)], [0, 1, 1, 0]
    sample = Sampler(WARM)
    for first in range(drafts):
        def run(choose):
            levels = [Level(ScriptedLM(logits), text[:2]) for logits in models[first:]]
            for level in levels:
                level.lm.start(text[:2])
            return review(levels + [MaxGram({}, 2)] * grams, counts[first:], text, Choosing(choose))
        found, lengths = torch.zeros(2, 2, 2, dtype=torch.float64), set()
        for chance, (tokens, probs) in outcomes(run):
            lengths.add(len(tokens))
            for i, row in enumerate(probs):
                known = sample.probs(models[first](text + tokens[:i]))
                torch.testing.assert_close(row, known)
            assert len(probs) == len(tokens)
            begun, left = tokens[:3], max(0, 3 - len(tokens))
            after = law(models[first], sample, text + begun, left, 2) if left else torch.ones(1)
            found[tuple(begun)] += chance * after.view([2] * left)
        assert len(lengths) > 1
        expected = law(models[first], sample, text, 3, 2).double()
        torch.testing.assert_close(found.flatten(), expected, atol=1e-6, rtol=0)


def test_better_drafts_write_first_and_each_reviews_the_next():
    """Each token comes once, so Max-Gram has nothing to say. The draft needs two reviews of two
    tokens and one of its own, and the cheap draft draws these and the last three."""
    target, draft, cheap = (ScriptedLM(lambda text: torch.eye(20)[(text[-1] + 1) % 20])
                            for _ in range(3))
    target.full_vocab, target.model, log = 20, None, []
    chunks = cascade(target, draft, [0, 1], gamma=4, inner=2, tail=3, grams="",
                     more_drafts=[cheap], log=log)
    assert next(chunks) == [*range(2, 10)] and log == [{"guessed": 7, "accepted": 7}]
    assert (target.calls, draft.calls, cheap.calls) == (1, 2, 4 + 3)
    assert tokens_of(chunks, 20) == [(10 + i) % 20 for i in range(20)]


# ----------------------------------------------------------------------------------------- Max-Gram

@pytest.mark.parametrize("text, most, guesses", [
    ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
    ([1, 2, 3, 2, 4, 1, 2], 1, [3]),  # "1 2" comes before the later "2"
    ([1, 2, 3, 2, 4, 5, 2], 1, [4]),  # of equals the latest
    ([1, 2, 3], 2, []), ([1], 2, []), ([1, 1], 0, []),
    ([5, 1, 1], 4, [1, 1, 1, 1])])  # what it guessed goes on
def test_max_gram_copies_what_followed_the_longest_end_of_the_text(text, most, guesses):
    assert MaxGram({}, 9).guess(text, most) == guesses


@pytest.mark.parametrize("text, most, guesses", [
    ([1, 2, 3], 5, [1, 2, 3, 1, 2]), ([2, 3], 9, [1, 8]),
    ([4], 2, [])])  # 9 is no token of the model, and ends the guesses
def test_max_gram_asks_bigrams_about_a_token_that_is_new(text, most, guesses):
    bigrams = {as_text([x]): as_text([y]) for x, y in ((3, 1), (1, 8), (4, 9), (9, 1))}
    assert MaxGram(bigrams, 9).guess(text, most) == guesses


def test_bigrams_are_the_most_frequent_followers_within_a_text(monkeypatch):
    store = type("Store", (), {"text": as_text([1, 2, 1, 2, 1, 3, -1, 3, 4, -1, 3, -1, 3])})
    monkeypatch.setattr("survey.cascade.load_datastore", lambda *_: store)
    expected = {as_text([x]): as_text([y]) for x, y in ((1, 2), (2, 1), (3, 4))}
    assert count_bigrams("x", None) == expected and count_bigrams("", None) == {}
