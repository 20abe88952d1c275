"""Ouroboros: the target's own output whatever the phrases are, and each of the four mechanisms on its own."""
import itertools
import random

import pytest
import torch

import ouroboros as module
from common import CachedLM, InputError, Sampler, autoregressive, main
from conftest import CONTEXT, ScriptedLM, chi_square_ok, markov, near, tiny, tokens_of
from ouroboros import PhrasePool, ouroboros, phrases_of

PROMPT = [3, 14, 15, 3, 14]
SWITCHES = [dict(zip(("phrases", "lengthen", "verification", "history"), on)) for on in itertools.product((True, False), repeat=4)]


def warm_pool() -> PhrasePool:
    """Full of phrases of unrelated texts, of several lengths."""
    pool, rng = PhrasePool(), random.Random(5)
    for _ in range(1500):
        pool.add(tuple(rng.choices(range(2, 61), k=rng.choice([2, 3, 4, 6]))))
    return pool


def test_greedy_equals_autoregressive(family):
    """Every combination of the switches, each with other hyper-parameters, one warm pool for all; up to the last token of the context."""
    model = tiny(family)
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT), PROMPT), CONTEXT - len(PROMPT))
    rng, pool, pairs = random.Random(2), warm_pool(), [near(model, 0.02), tiny(family, seed=7), tiny("llama" if family == "gpt2" else "gpt2")]
    for number, switches in enumerate(SWITCHES):
        options = dict(gamma=rng.randint(1, 9), window=rng.randint(1, 8), phrase=rng.randint(2, 6), suffixes=rng.randint(1, 5), guesses=rng.randint(1, 5), **switches)
        draft, n = pairs[number % 3], (70, CONTEXT - len(PROMPT))[number % 4 == 0]
        got = tokens_of(ouroboros(CachedLM(model, CONTEXT), CachedLM(draft, CONTEXT), PROMPT, pool=pool, **options), n)
        assert got == expected[:n], (draft.config.model_type, options)


def test_eos_and_limits_inside_drafts_and_suffixes(embedded):
    model, draft, tokenizer = embedded
    prompt = tokenizer("Mia has 12 apples. She buys 3 bags of 4 apples each. How many apples does Mia have now?")["input_ids"]
    target, pool, log = CachedLM(model, 300), PhrasePool(), []
    expected = tokens_of(autoregressive(target, prompt), 50)
    for helper in (CachedLM(draft, 300), CachedLM(model, 300)):  # the target as its own draft: always up to the suffixes
        for limit in (1, 2, 3, 5, 7, 11, 18, 29, 47, 50):
            assert tokens_of(ouroboros(target, helper, prompt, pool=pool, log=log), limit) == expected[:limit]
        for eos in set(expected):
            assert tokens_of(ouroboros(target, helper, prompt, pool=pool, log=log), 50, {eos}) == expected[:expected.index(eos) + 1]
    assert sum(r["suffix"] for r in log) > 0  # suffixes were accepted in all this


def test_the_target_as_its_own_draft_is_always_accepted(family):
    """A draft cache that misses a row, or a window or trie with a wrong mask or position, shows here."""
    model, log, pool = tiny(family), [], PhrasePool()
    for switches in (dict(), dict(lengthen=False), dict(phrases=False), dict(phrases=False, lengthen=False)):
        tokens_of(ouroboros(CachedLM(model, CONTEXT), CachedLM(model, CONTEXT), PROMPT, gamma=5, phrase=3, pool=pool, log=log, **switches), CONTEXT - len(PROMPT) - 20)
    assert len(log) > 40 and all(r["accepted"] == r["drafted"] + r["suffix"] >= 5 for r in log)


def test_phrases_save_draft_calls(embedded):
    """On text with repeated phrases, once they are in the pool; token by token a draft takes a call for each token."""
    model, draft, tokenizer = embedded
    prompt = tokenizer("def sum_even_squares(nums):\n    \"\"\"Return the sum of the squares of the even numbers in nums.\"\"\"")["input_ids"]
    for phrases in (True, False):
        log, pool = [], PhrasePool()
        for _ in range(3):
            tokens_of(ouroboros(CachedLM(model, 300), CachedLM(draft, 300), prompt, phrases=phrases, pool=pool, log=log), 60, {tokenizer.eos_token_id})
        calls = sum(r["calls"] for r in log) / sum(r["drafted"] for r in log)
        assert calls < 0.75 if phrases else calls == 1


# ---------------------------------------------------------------- the mechanisms

def counting(vocab=20, **exceptions):
    """A model that counts, but for {token: what follows it}."""
    exceptions = {int(name[1:]): value for name, value in exceptions.items()}
    return ScriptedLM(lambda tokens: torch.nn.functional.one_hot(torch.tensor(exceptions.get(tokens[-1], (tokens[-1] + 1) % vocab)), vocab).float())


def test_phrases_of_a_rejection():
    """By hand: d = 5 6 7 8 9 with target choices v = 5 1 7 8 2 4. d_2 is rejected; d_3 and d_4 match, d_5 does not."""
    assert phrases_of([5, 6, 7, 8, 9], [5, 1, 7, 8, 2, 4], 1, 3) == [(6, 7, 8), (7, 8, 2)]
    assert phrases_of([5, 6, 7, 8, 9], [5, 1, 7, 8, 2, 4], 1, 2) == [(6, 7), (7, 8), (8, 2), (9, 4)]
    assert phrases_of([5, 6, 7, 8, 9], [5, 1, 7, 8, 2, 4], 1, 4) == [(6, 7, 8, 2)]
    assert phrases_of([5, 6], [5, 6, 7], 2, 2) == []


def test_phrases_from_verification_enter_the_pool():
    """Target: 6 is followed by 9 and not by 7; the draft 4 5 6 7 8 of root 3 is rejected at 7, whose choices 8 9 go on rightly."""
    pool, log = PhrasePool(), []
    chunks = ouroboros(counting(_6=9), counting(), [2, 3], gamma=5, phrase=3, phrases=False, lengthen=False, pool=pool, log=log)
    assert next(chunks) == [4, 5, 6, 9]
    assert log == [{"drafted": 5, "calls": 5, "accepted": 3, "suffix": 0, "matched": 4, "phrases": [(7, 8, 9)]}]
    assert list(pool.phrases) == [(7, 8, 9)]
    pool = PhrasePool()
    assert next(ouroboros(counting(_6=9), counting(), [2, 3], gamma=5, phrase=3, phrases=False, lengthen=False, verification=False, pool=pool))
    assert not pool.phrases


def test_a_suffix_is_accepted_after_a_full_draft_only():
    for target, chunk in ((counting(), [4, 5, 6, 7, 8, 9]), (counting(_6=8), [4, 5, 6, 8, 9, 10]), (counting(_6=9), [4, 5, 6, 9]), (counting(_5=9), [4, 5, 9])):
        pool = PhrasePool()
        for phrase in [(6, 8, 9), (6, 7, 8), (6, 7, 3), (5, 6, 7)]:
            pool.add(phrase)
        chunks = ouroboros(target, counting(), [2, 3], gamma=3, phrase=3, phrases=False, verification=False, pool=pool)
        assert next(chunks) == chunk


def test_of_several_suffixes_the_longest_match_counts():
    pool = PhrasePool()
    for phrase in [(6, 7, 8), (6, 7, 9), (6, 9, 9)]:
        pool.add(phrase)
    chunks = ouroboros(counting(), counting(), [2, 3], gamma=3, phrase=3, phrases=False, pool=pool, suffixes=3)
    assert next(chunks) == [4, 5, 6, 7, 8, 9]
    pool = PhrasePool()
    for phrase in [(6, 7, 8), (6, 7, 9), (6, 9, 9)]:
        pool.add(phrase)
    chunks = ouroboros(counting(), counting(), [2, 3], gamma=3, phrase=3, phrases=False, pool=pool, suffixes=2)  # the two newest
    assert next(chunks) == [4, 5, 6, 7, 8]


def test_tried_suffixes_are_corrected_also_after_a_rejection():
    """p1 v2 v3 replaces p1 p2 p3: v2 is the target's choice after p1, v3 after p2."""
    for target, kept in ((counting(), 4), (counting(_4=9), 1)):
        pool, log = PhrasePool(), []
        for phrase in [(6, 7, 3), (6, 11, 2)]:
            pool.add(phrase)
        next(ouroboros(target, counting(), [2, 3], gamma=3, phrase=3, phrases=False, pool=pool, log=log))
        assert log[0]["accepted"] == kept
        assert set(pool.tails[6]) == {(7, 8), (7, 12)}


def test_phrases_outlive_a_prompt_or_not():
    for history, chunk in ((True, [4, 5, 6, 7, 8, 9]), (False, [4, 5, 6, 7])):
        pool = PhrasePool()
        next(itertools.islice(ouroboros(counting(), counting(), [2, 3], gamma=3, phrase=3, window=4, pool=pool, history=history), 9, None))
        assert bool(pool.phrases) == history
        assert next(ouroboros(counting(), counting(), [9, 3], gamma=3, phrase=3, phrases=False, pool=pool, history=history)) == chunk


def test_the_draft_decodes_by_lookahead():
    """A draft that counts: its window holds the period soon, and then every draft call gives a phrase."""
    log = []
    next(itertools.islice(ouroboros(counting(6), counting(6), [1, 2, 3], gamma=4, phrase=5, window=6, lengthen=False, log=log), 30, None))
    assert log[0]["calls"] == 4 and all((r["drafted"], r["calls"]) == (5, 1) for r in log[-10:])


def test_the_pool_is_bounded_and_keeps_the_newest():
    pool = PhrasePool(each=2, size=4)
    for phrase in [(1, 2), (1, 3), (1, 2), (1, 4), (2, 1), (3, 1), (4, 1)]:
        pool.add(phrase)
    assert list(pool.phrases) == [(1, 4), (2, 1), (3, 1), (4, 1)]
    assert pool.after(1, 5, 1) == [(4,)] and pool.after(2, 5, 1) == [(1,)] and pool.after(9, 5, 1) == []
    pool.add((1, 5, 6, 7))
    assert pool.after(1, 1, 2) == [(5, 6)]
    pool.remove((7, 7))


def test_sampled_output_has_the_targets_distribution():
    """12,000 seeded runs with suffixes, from one pool: chi-square test of the first four tokens (256 cells) at a false-failure probability
    of 1e-6; every mechanism is at work."""
    target, draft, sample, pool, log = markov(1), markov(2), Sampler(0.9, seed=4), PhrasePool(), []
    counts = torch.zeros(4, 4, 4, 4)
    for _ in range(12000):
        counts[tuple(tokens_of(ouroboros(ScriptedLM(target), ScriptedLM(draft), [0, 1], gamma=1, phrase=3, window=2, pool=pool, sample=sample, log=log), 4))] += 1
    expected = torch.ones(4, 4, 4, 4)
    for tokens in itertools.product(range(4), repeat=4):
        for i in range(4):
            expected[tokens] *= sample.probs(target([0, 1, *tokens[:i]]))[tokens[i]]
    assert chi_square_ok(counts.flatten(), expected.flatten())
    assert sum(r["suffix"] for r in log) > 1000 and any(r["phrases"] for r in log)


@pytest.mark.parametrize("name", ["gamma", "window", "suffixes", "guesses", "phrase"])
def test_bad_options_are_refused(name):
    with pytest.raises(InputError, match="of 1 or more and phrases of 2 tokens or more"):
        next(ouroboros(counting(), counting(), [1], **{name: 0}))


def test_command_line(capfd, monkeypatch):
    def run(*argv):
        status = main([ouroboros], module.report, ["--device", "cpu", "--prompt", "Mia has 12 apples. She buys 3 bags of 4 apples each. How many apples does Mia have now?", *argv], {"tune": module.tune})
        return status, *capfd.readouterr()
    status, out, err = run("--prompt", "Tom has 3 apples. He buys 4 apples. How many apples does Tom have now?", "--compare")
    assert status == 0 and "output equals autoregressive output" in err and "phrases in the pool" in err and out.count("####") == 2
    status, out, err = run("--no-phrases", "--no-lengthen", "--no-verification", "--no-history", "--compare")
    assert status == 0 and "output equals autoregressive output" in err
    status, out, err = run("--tune", "--max-new-tokens", "6")
    assert status == 0 and out.count("\n| ") == 1 + 20 and "python ouroboros.py --gamma" in out
    assert run("--phrase", "1")[0] == 2
