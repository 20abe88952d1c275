"""REST and SuffixDecoding: what is looked up, what is guessed, and what a datastore holds. That the
text is the target's is in test_lossless.py."""
import random
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from common import CachedLM, autoregressive, eos_ids
from fake_models import paths_of, scripted
from families import near, tiny
from helpers import check_refused, tokens_of
from support.parts import save_part
from survey.rest import (AFTER, BOUNDARY, LONGEST, Datastore, as_text, as_tokens, build,
                         load_datastore, rest, retrieve, retrieve_by_score)
from trainings import WORDLESS


def store_of(*texts):
    return Datastore("".join(as_text(text) + BOUNDARY for text in texts))


# -------------------------------------------------------------------------------------- lookup

def count_prefixes(texts, suffix) -> Counter:
    """Count what follows a suffix in texts, by looking at every place."""
    found = [text[i:i + AFTER] for text in texts for i in range(len(suffix), len(text))
             if text[i - len(suffix):i] == suffix]
    return Counter(tuple(some[:end]) for some in found for end in range(1, len(some) + 1))


@pytest.mark.parametrize("vocab", [2, 8, 56322, 70000])
def test_the_lookup_equals_a_scan_of_every_place(vocab):
    """Texts repeat parts of each other or themselves, and one store grew a few tokens at a time.
    Token ids are among and beyond the surrogates too. Of equally frequent prefixes any may be
    taken."""
    rng = random.Random(vocab)
    kinds = range(max(0, vocab - 6), vocab)  # few kinds, so that suffixes are found
    for _ in range(60):
        texts = [rng.choices(kinds, k=rng.randint(1, 40)) for _ in range(4)]
        texts[0] += texts[1][:rng.randint(1, 30)] + rng.choices(kinds, k=5)
        query = rng.choice([*texts, rng.choices(kinds, k=3) * 20])[:rng.randint(1, 60)]
        own = Datastore()
        for i in range(0, len(query), 3):
            own.add(as_text(query[i:i + 3]))
        assert own.order == Datastore(own.text).order
        n, longest = rng.choice([0, 1, 2, 5, 20, 500]), rng.choice([1, 3, LONGEST])
        ids, parents = retrieve([own, store_of(*texts)], as_text(query), n, longest)
        found, seen, taken = {*paths_of(ids, parents)[1:]}, set(), 0
        assert ids[0] == query[-1] and parents[0] == -1 and len(found) == len(ids) - 1 <= n
        for size in range(min(longest, len(query)), 0, -1):
            for some in [query], texts:
                counts = count_prefixes(some, query[-size:])
                new = {path: count for path, count in counts.items() if path not in seen}
                here = sorted((new[path] for path in found & new.keys()), reverse=True)
                assert here == sorted(new.values(), reverse=True)[:n - taken]
                seen, taken = seen | new.keys(), taken + len(here)
        assert taken == len(found) == min(n, len(seen))


def test_suffixdecoding_by_hand():
    """The store has 8 once after 7 1 2, and 3 4 5 three times of four after 1 2. With two guesses
    of D = 3/4 the shorter suffix wins. If each token allows one half, the longer one does. Of equal
    scores the earlier store's counts."""
    store = store_of([7, 1, 2, 8], *[[1, 2, 3, 4, 5]] * 3)

    def guesses(alpha, n=9, text=(7, 1, 2)):
        return paths_of(*retrieve_by_score([store], as_text(text), n, LONGEST, alpha))[1:]
    assert guesses(1) == [(3,), (3, 4)] and guesses(0.5) == [(8,)]
    assert guesses(2) == [(3,), (3, 4), (3, 4, 5), (8,)] and guesses(2, n=1) == [(8,)]
    assert guesses(2, text=[6]) == []
    equal = retrieve_by_score([store_of([1, 8]), store_of([1, 9])], as_text([1]), 9, LONGEST, 1)
    assert equal == ([1, 8], [-1, 0])


@pytest.mark.parametrize("n, counted", [(100, 100), (101, 51), (201, 67)])
def test_of_more_than_100_places_an_even_sample_counts(n, counted):
    """The first in sorted order would all be followed by small tokens."""
    found = store_of(*([1, 2, 3 + i] for i in range(n))).find_following(as_text([1, 2]))
    assert len(found) == counted and sorted(as_tokens("".join(found)))[-1] >= n


# ------------------------------------------------------------------------------ what is guessed

def test_the_text_itself_is_looked_up():
    """The text has a period of 23 tokens, and the datastore has nothing. So 22 tokens come one by
    one. Then 5 is there for the second time, and every guess is accepted."""
    for grow, accepted in ((False, [0] * 111), (True, [0] * 22 + [10] * 9)):
        target, log = scripted(lambda text: (text[-1] + 1) % 23, 23), []
        tokens_of(rest(target, [5, 6], nodes=11, store=Datastore(), grow=grow, log=log), 111)
        assert [r["accepted"] for r in log] == accepted


@pytest.mark.parametrize("prompt, options, expected", [
    ([1, 2, 4, 8, 1, 2], {}, [4]), ([1, 2, 4, 8, 1, 2], dict(grow=False), [3]),
    ([1, 2, 4, 8, 1, 2], dict(nodes=10), [4, 8, 1, 2, 3, 7]), ([1, 2, 4, 6, 1, 2], {}, [7]),
    ([1, 2, 4, 6, 1, 2], dict(longest=2), [4]),
    ([1, 2, 4, 6, 1, 2], dict(longest=2, alpha=9), [3])])
def test_the_text_comes_before_the_datastore_for_a_suffix(prompt, options, expected):
    """4 follows 1 2 once in the text, 3 twice in the datastore; 7 follows a longer suffix, where
    that is looked up. By its score 3 is likelier, since nothing follows the other 1 2 of the text.
    Of equally frequent prefixes the shorter come first."""
    target, store = scripted(lambda text: 0, 9), store_of([1, 2, 3], [1, 2, 3], [6, 1, 2, 7])
    next(rest(target, prompt, store=store, **{"nodes": 2} | options))
    assert target.trees[0][0][1:] == expected


# ------------------------------------------------------------------------------- the datastore

def test_a_datastore_has_the_models_own_answers(tmp_path):
    """Each is kept after two tokens of its prompt, and a repeated prompt is kept once. A prompt
    without room for an answer is left out."""
    model, file = tiny("llama"), tmp_path / "new" / "store.safetensors"
    prompts, eos = [[a, b, 9, 7] for a in range(20, 24) for b in (30, 31)], eos_ids(model, WORDLESS)
    build(model, WORDLESS, [*prompts, prompts[0], [5] * 150], out=file, max_new_tokens=40)
    texts = [[9, 7, *tokens_of(autoregressive(CachedLM(model), p), 40, eos)] for p in prompts]
    store = load_datastore(str(file), model)
    assert sorted(store.text.split(BOUNDARY)) == sorted(["", *map(as_text, texts)])


@pytest.mark.parametrize("largest, kind", [(65534, torch.uint16), (65535, torch.int32)])
def test_texts_are_kept_in_two_bytes_a_token_where_they_fit(largest, kind, tmp_path):
    model, texts = tiny("llama", vocab_size=65536), [[3, largest, *[8] * 30], [55296, *[8] * 30]]
    build(model, None, texts, out=tmp_path / "x", text=True, max_new_tokens=1)
    assert load_file(tmp_path / "x")["tokens"].dtype == kind
    store = load_datastore(tmp_path / "x", near(model, 0.05).bfloat16())  # tuned, of another type
    assert as_tokens(store.text) == [*texts[0], -1, *texts[1], -1]
    check_refused("--prompts must be texts", build, model, None, [[3]], out="x", text=True)


def test_a_damaged_datastore_is_refused(tmp_path):
    model, tensors = tiny("llama"), {"tokens": torch.tensor([-1, 0], dtype=torch.int32)}
    save_part(tmp_path / "store", "a REST datastore", model, tensors)
    check_refused("a REST datastore", load_datastore, tmp_path / "store", model)
