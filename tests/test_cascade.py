"""Drafts of a cascade write one after the other, and the cheapest guesser is checked by hand. That
the text has the target's law is in test_lossless.py."""
import pytest

from fake_models import counting
from survey.cascade import MaxGram, cascade, count_bigrams
from survey.rest import as_text


def test_better_drafts_write_first_and_each_reviews_the_next():
    """Each token comes once, so Max-Gram has nothing to say. The draft needs two reviews of two
    tokens and one of its own, and the cheap draft draws these and the last three."""
    target, draft, cheap = (counting() for _ in range(3))
    target.full_vocab, target.model, log = 20, None, []
    chunks = cascade(target, draft, [0, 1], gamma=4, inner=2, tail=3, grams="",
                     more_drafts=[cheap], log=log)
    assert next(chunks) == [*range(2, 10)] and log == [{"guessed": 7, "accepted": 7}]
    assert (target.calls, draft.calls, cheap.calls) == (1, 2, 4 + 3)


# ----------------------------------------------------------------------------------------- Max-Gram

BIGRAMS = {as_text([x]): as_text([y]) for x, y in ((3, 1), (1, 8), (4, 9), (9, 1))}


@pytest.mark.parametrize("bigrams, text, most, guesses", [
    ({}, [1, 2, 3, 4, 1, 2], 2, [3, 4]),
    ({}, [1, 2, 3, 2, 4, 1, 2], 1, [3]),  # "1 2" comes before the later "2"
    ({}, [1, 2, 3, 2, 4, 5, 2], 1, [4]),  # of equals the latest
    ({}, [1, 2, 3], 2, []), ({}, [1], 2, []), ({}, [1, 1], 0, []),
    ({}, [5, 1, 1], 4, [1, 1, 1, 1]),  # what it guessed goes on
    (BIGRAMS, [1, 2, 3], 5, [1, 2, 3, 1, 2]), (BIGRAMS, [2, 3], 9, [1, 8]),
    (BIGRAMS, [4], 2, [])])  # 9 is no token of the model, and ends the guesses
def test_max_gram_copies_what_followed_the_longest_end_of_the_text(bigrams, text, most, guesses):
    """It asks bigrams about a token that is new."""
    assert MaxGram(bigrams, 9).guess(text, most) == guesses


def test_bigrams_are_the_most_frequent_followers_within_a_text(monkeypatch):
    store = type("Store", (), {"text": as_text([1, 2, 1, 2, 1, 3, -1, 3, 4, -1, 3, -1, 3])})
    monkeypatch.setattr("survey.cascade.load_datastore", lambda *_: store)
    expected = {as_text([x]): as_text([y]) for x, y in ((1, 2), (2, 1), (3, 4))}
    assert count_bigrams("x", None) == expected and count_bigrams("", None) == {}
