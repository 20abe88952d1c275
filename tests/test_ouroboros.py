"""Each of Ouroboros' four mechanisms is checked by hand. That whole texts have the target's law is
in test_lossless.py."""
import inspect
import itertools
from types import SimpleNamespace

import torch

import jacobi
import ouroboros as module
from common import Sampler
from fake_models import Oranges, ScriptedLM, branches, counting
from helpers import take
from methods import pool_of
from ouroboros import Drafter, NgramPool, ouroboros, phrases_of

OFF = dict(phrases=False, lengthen=False, verification=False)


def phrases_in(pool: NgramPool) -> list[tuple[int, ...]]:
    """Return the phrases of a pool, those of a key in their order."""
    return [phrase for some in pool.ngrams.values() for phrase in some]


def test_phrases_of_a_rejection():
    """The draft's d_2 = 6 is rejected. After it d_3 and d_4 match, and d_5 does not."""
    d, v = [5, 6, 7, 8, 9], [5, 1, 7, 8, 2, 4]
    assert phrases_of(d, v, 1, 3) == [(6, 7, 8), (7, 8, 2)]
    assert phrases_of(d, v, 1, 2) == [(6, 7), (7, 8), (8, 2), (9, 4)]
    assert phrases_of(d, v, 1, 4) == [(6, 7, 8, 2)]
    assert phrases_of([5, 6], [5, 6, 7], 2, 2) == []


def test_phrases_from_verification_enter_the_pool():
    """The target puts 9 after 6, and not 7. So the draft 4 5 6 7 8 of root 3 is rejected at 7, but
    the target's choices 8 9 after 7 8 go on rightly."""
    for verification in (True, False):
        pool, log, found = NgramPool(), [], [(7, 8, 9)] if verification else []
        options = dict(gamma=5, beta=3, phrases=False, lengthen=False, verification=verification)
        chunks = ouroboros(counting(exceptions={6: 9}), counting(), [2, 3], pool=pool, log=log,
                           **options)
        assert next(chunks) == [4, 5, 6, 9] and phrases_in(pool) == found
        assert log == [{"guessed": 5, "accepted": 3, "calls": 5, "matched": 4, "phrases": found}]


def test_a_suffix_is_accepted_after_a_full_draft_only():
    for exceptions, chunk in (({}, [4, 5, 6, 7, 8, 9]), ({6: 8}, [4, 5, 6, 8, 9, 10]),
                              ({6: 9}, [4, 5, 6, 9]), ({5: 9}, [4, 5, 9])):
        pool = pool_of((6, 8, 9), (6, 7, 8), (6, 7, 3), (5, 6, 7))
        target, options = counting(exceptions=exceptions), OFF | dict(lengthen=True)
        chunks = ouroboros(target, counting(), [2, 3], gamma=3, beta=3, pool=pool, **options)
        assert next(chunks) == chunk


def test_tried_suffixes_are_corrected_and_stay_the_newest():
    """p1 v2 v3 replaces p1 p2 p3: v2 is the target's choice after p1, v3 after p2. Corrected
    suffixes enter the pool oldest first, before the phrases of discarded tokens, after those that
    were not tried: here two of three are. After a rejection 5 is discarded."""
    for exceptions, chunk, discarded in (({4: 9}, [4, 9], [(5, 6, 7)]), ({}, [4, 5, 6, 7, 8], [])):
        pool, log, target = pool_of((6, 2, 2), (6, 7, 3), (6, 11, 2)), [], counting(20, exceptions)
        options = dict(gamma=3, beta=3, K=2, phrases=False, pool=pool, log=log)
        assert next(ouroboros(target, counting(), [2, 3], **options)) == chunk
        assert phrases_in(pool) == [(6, 2, 2), (6, 7, 8), (6, 7, 12), *discarded]
        assert pool.newest(6, 2) == [(6, 7, 12), (6, 7, 8)]
        assert log[0]["phrases"] == [(6, 7, 8), (6, 7, 12), *discarded]
        assert (log[0]["guessed"], log[0]["accepted"]) == (3 + 2 + 2, len(chunk) - 1)


def test_prompts_share_a_pool_or_not():
    """The first prompt's window finds phrases that lengthen the second prompt's draft."""
    for shared, chunk in ((True, [4, 5, 6, 7, 8, 9]), (False, [4, 5, 6, 7])):
        options = dict(gamma=3, beta=3, W=4, pool=NgramPool() if shared else None)
        take(ouroboros(counting(), counting(), [2, 3], **options), 10)
        options["phrases"] = False
        assert next(ouroboros(counting(), counting(), [9, 3], **options)) == chunk


def test_pool_and_window_are_those_of_lookahead_decoding():
    """Word for word: who compares the two files has nothing to compare."""
    for name in ("NgramPool", "columns_of", "move_window"):
        assert inspect.getsource(getattr(module, name)) == inspect.getsource(getattr(jacobi, name))


def test_the_drafts_trees_by_hand(monkeypatch):
    """This is the window of the survey's figure, with W = 5 and N = 4. The hundreds of a token are
    its colour: 0 is blue, 1 orange, 2 green, 3 red and 4 grey. The units are its position. After
    blue p comes blue p + 1, after orange p green p + 1, and so on. Guesses and columns hang below
    the root, which hangs below the tokens that are not cached yet."""
    monkeypatch.setattr(module.random, "Random", Oranges)
    eye = torch.eye(900)
    draft = ScriptedLM(lambda tokens: eye[tokens[-1] + (1 if tokens[-1] < 100 else 101)])
    pool = pool_of((1, 2, 3), (1, 2, 9), (5, 6, 7, 8), (7, 9))
    drafter = Drafter(draft, [0], pool, W=5, beta=4, G=2, seed=0)
    draft.start([])

    assert drafter.step([0]) == [1]
    # The guesses of root 1 are 2 9 and 2 3, and the last one is right.
    assert drafter.step([1]) == [2, 3, 4]
    assert draft.tokens == [0, 1, 2, 3]
    # There are two tokens before root 5.
    assert drafter.step([3, 4, 5]) == [6, 7, 8, 9]
    assert draft.tokens == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8]
    assert [branches(tree) for tree in draft.trees] == [
        [[0, *range(101, 107)]],
        [[1, 2, 9], [1, 2, 3], *([1, *range(102, 102 + i), 202 + i] for i in range(6))],
        [[3, 4, 5, 6, 7, 8],
         *([3, 4, 5, *range(103, 103 + i), 203 + i, 304 + i] for i in range(5))]]
    assert (5, 203, 304, 405) in phrases_in(pool)


def test_phrases_are_of_the_targets_argmax_also_when_sampling():
    """A target that counts, but is sampled almost evenly."""
    log, options = [], OFF | dict(verification=True, gamma=5, sample=Sampler(1.0, seed=1))
    take(ouroboros(counting(), counting(), [2, 3], log=log, **options), 20)
    found = [phrase for r in log for phrase in r["phrases"]]
    assert len(found) > 20
    assert all((a + 1) % 20 == b for phrase in found for a, b in itertools.pairwise(phrase))


def test_the_report():
    """By hand: a draft call costs a tenth of a target call. Eq. 6: (4 + 1) / (3 · 0.1 + 1)."""
    models = {"target": SimpleNamespace(calls=2, seconds=4.0),
              "draft": SimpleNamespace(calls=6, seconds=1.2)}
    log = [dict(guessed=10, accepted=7, calls=3, matched=6),
           dict(guessed=7, accepted=1, calls=3, matched=4)]
    assert module.report(SimpleNamespace(models=models, log=log)) == (
        "a round: 8.50 guesses, 4.00 accepted; 3.00 draft calls, of whose tokens 5.00 are the "
        "target's argmax\npredicted speed-up 3.85x, a draft call costing 0.10 target calls")
