"""BiLD and SpecDec: which guesses pass, and the limits in which output is the target's."""
import itertools
import math

import pytest
import torch

from common import CachedLM, InputError, Sampler, autoregressive
from fake_models import ScriptedLM, markov
from families import few_families, near, tiny
from helpers import check_without_caches, tokens_of
from survey.lossy import bild, specdec

PROMPT = [3, 14, 15]


# ---------------------------------------------------------------------------------------- BiLD

def table(*rows):
    """A scripted model: the distribution after the last token x is row x."""
    return ScriptedLM(lambda tokens: torch.tensor(rows[tokens[-1]]).log())


def test_bild_follows_its_two_thresholds():
    draft = [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.45, 0.3, 0.25]
    target = [0.2, 0.5, 0.3], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]

    def first(**options):
        log = []
        return next(bild(table(*target), table(*draft), [0], log=log, **options)), log[0]
    # 0 -> 1 (0.8) -> 2 (0.6) -> stops at 0.45; costs: -log 0.5 = 0.69, -log 0.1 = 2.30
    assert first(fallback=0.5, rollback=2.31) == ([1, 2, 1], {"drafted": 2, "accepted": 2})
    assert first(fallback=0.5, rollback=2.30) == ([1, 0], {"drafted": 2, "accepted": 1})
    assert first(fallback=0.5, rollback=0.69) == ([1], {"drafted": 2, "accepted": 0})
    assert first(fallback=0.5, rollback=0.70) == ([1, 0], {"drafted": 2, "accepted": 1})
    assert first(fallback=0.61, rollback=9.0) == ([1, 0], {"drafted": 1, "accepted": 1})
    assert first(fallback=0.81, rollback=9.0) == ([1], {"drafted": 0, "accepted": 0})
    assert first(fallback=0.0, rollback=9.0, gamma=4) == (
        [1, 2, 0, 1, 0], {"drafted": 4, "accepted": 4})
    # at temperature 1, whatever tokens are drawn at
    assert first(fallback=0.5, rollback=2.31, sample=Sampler(1e-3))[1]["drafted"] == 2
    assert first(fallback=0.5, rollback=2.29, sample=Sampler(1e-3))[1]["accepted"] == 1


@few_families
def test_bild_is_exact_in_its_limits(family):
    """No guess passes, none is drafted, or the draft is the target."""
    model, n = tiny(family), 80 if family == "gpt2" else 40
    target, own, close = (CachedLM(m) for m in (model, model, near(model, 0.02)))
    expected = tokens_of(autoregressive(target, PROMPT), n)
    for draft, options in ((close, dict(rollback=0.0, fallback=0.1)), (close, dict(fallback=1.1)),
                           (own, dict(fallback=0.1, rollback=9.0))):
        assert tokens_of(bild(target, draft, PROMPT, gamma=4, **options), n) == expected


# ------------------------------------------------------------------------------------- SpecDec

def saying(*draft):
    """A scripted model of four tokens that drafts these after a prompt of one token."""
    return ScriptedLM(lambda tokens: torch.eye(4)[draft[len(tokens) - 1]])


def test_specdec_follows_its_two_limits():
    """All 16 drafts of two tokens. By hand: which tokens pass after 0, 1, 2 and 3, the best one
    first. How far log p lies below the best: `gaps`; three tokens tie after 3, and of them the
    argmax alone passes where output is to be greedy."""
    rows = ([0.1, 0.4, 0.3, 0.2], [0.05, 0.05, 0.1, 0.8], [0.7, 0.1, 0.15, 0.05],
            [0.3, 0.3, 0.1, 0.3])
    gaps = [1.39, 0, 0.29, 0.69], [2.77, 2.77, 2.08, 0], [0, 1.95, 1.54, 2.64], [0, 0, 1.10, 0]
    for row, gap in zip(rows, gaps):
        assert [round(math.log(max(row) / p), 2) for p in row] == gap
    for beta, tau, *passing in (
            (1, 9.0, "1", "3", "0", "0"), (4, 0.0, "1", "3", "0", "0"),
            (4, 1e-9, "1", "3", "0", "013"),  # above 0 what ties with the best passes
            (2, 9.0, "12", "32", "02", "013"), (2, 0.28, "1", "3", "0", "013"),
            (3, 0.7, "123", "3", "0", "013"), (3, 1.6, "123", "3", "02", "013"),
            (4, 2.5, "1230", "32", "021", "0132"), (4, math.inf, "1230", "3201", "0213", "0132")):
        passing = [[int(x) for x in some] for some in passing]
        for x, y in itertools.product(range(4), repeat=2):
            expected, log = passing[0][:1], []
            if x in passing[0]:
                expected = [x, y, passing[y][0]] if y in passing[x] else [x, passing[x][0]]
            got = next(specdec(table(*rows), saying(x, y), [0], gamma=2, beta=beta, tau=tau,
                               log=log))
            assert got == expected, (beta, tau, x, y)
            assert log == [{"drafted": 2, "accepted": len(expected) - 1}]


def test_specdec_draws_at_a_temperature():
    """Guesses and replacements; the test is that of temperature 1."""
    target, draft = [[0.5, 0.3, 0.2]] * 3, [[0.0, 0.0, 1.0]] * 3
    for tau, chunk in ((0.92, [2, 2]), (0.91, [])):  # log 0.5 / 0.2 = 0.916
        chunks = specdec(table(*target), table(*draft), [0], gamma=2, tau=tau, sample=Sampler(9.0))
        got = [next(chunks) for _ in range(60)]
        assert all(x[:-1] == chunk for x in got) and {x[-1] for x in got} == {0, 1, 2}
    chunks = specdec(table(*target), table(*target), [0], gamma=1, beta=1, sample=Sampler(9.0))
    assert {*map(len, itertools.islice(chunks, 60))} == {1, 2}


@few_families
def test_specdec_is_exact_in_its_limits(family):
    """Only the best token passes, or the draft is the target."""
    model, n = tiny(family), 80 if family == "gpt2" else 20
    target, own, close = (CachedLM(m) for m in (model, model, near(model, 0.02)))
    expected = tokens_of(autoregressive(target, PROMPT), n)
    for draft, options in ((close, dict(beta=1)), (close, dict(tau=0.0)), (own, {})):
        log = []
        chunks = specdec(target, draft, PROMPT, gamma=4, log=log, **options)
        assert tokens_of(chunks, n) == expected
        assert (min(r["accepted"] for r in log[:-1]) == 4) == (draft is own)


# --------------------------------------------------------------------- both, and mistakes

@pytest.mark.parametrize("method, options", [
    (bild, dict(gamma=3, fallback=0.4, rollback=1.5)), (specdec, dict(gamma=3, beta=4, tau=1.5))])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sampled_output_of_real_caches_is_that_without_caches(family, method, options):
    """With the same seed, token by token: a row out of place would change some draws."""
    model = tiny(family)
    check_without_caches(method, model, near(model, 0.04), PROMPT, **options)


@pytest.mark.parametrize("method, options, message", [
    (bild, dict(gamma=0), "--gamma must be 1 or more, got 0"),
    (bild, dict(fallback=-1.0), "--fallback must be 0 or more, got -1.0"),
    (bild, dict(fallback=math.nan), "--fallback must be 0 or more, got nan"),
    (bild, dict(rollback=-0.1), "--rollback must be 0 or more, got -0.1"),
    (specdec, dict(gamma=0), "--gamma must be 1 or more, got 0"),
    (specdec, dict(beta=0), "--beta must be 1 or more, got 0"),
    (specdec, dict(tau=-0.1), "--tau must be 0 or more, got -0.1"),
    (specdec, dict(tau=math.nan), "--tau must be 0 or more, got nan")])
def test_bad_options_are_refused(method, options, message):
    with pytest.raises(InputError) as error:
        next(method(ScriptedLM(markov(1)), ScriptedLM(markov(2)), [0, 1], **options))
    assert str(error.value) == message


@pytest.mark.parametrize("method, options", [(bild, dict(fallback=0.0, rollback=9.0)),
                                             (specdec, {})])
def test_what_a_draft_model_knows_is_not_fed_again(method, options):
    """After four guesses that pass, the last of them and the target's token alone."""
    target, draft = ScriptedLM(markov(0)), ScriptedLM(markov(0))
    chunks = method(target, draft, [1, 2], gamma=4, **options)
    assert [len(next(chunks)) for _ in range(3)] == [5, 5, 5] and draft.rows == 4 + 5 + 5


def test_bild_keeps_what_is_certain():
    """-log p of it is 0: not above a rollback of 0."""
    row, log = [0.0, 1.0, 0.0], []
    sure = table(row, row, row)
    chunk = next(bild(sure, table(row, row, row), [0], gamma=3, fallback=0.0, rollback=0.0,
                      log=log))
    assert chunk == [1, 1, 1, 1] and log == [{"drafted": 3, "accepted": 3}]


@pytest.mark.parametrize("options", [dict(beta=1), dict(tau=0.0)])
def test_what_ties_with_the_argmax_does_not_pass_in_the_limits(options):
    target, draft, log = [0.4, 0.4, 0.2], [0.1, 0.8, 0.1], []
    chunk = next(specdec(table(*[target] * 3), table(*[draft] * 3), [0], gamma=2, log=log,
                         **options))
    assert chunk == [0] and log == [{"drafted": 2, "accepted": 0}]


def test_specdec_at_exactly_tau():
    target, draft = torch.tensor([3.0, 0.0, -1.0]), torch.tensor([0.0, 9.0, 0.0])
    chunk = next(specdec(ScriptedLM(lambda _: target), ScriptedLM(lambda _: draft), [0], gamma=1,
                         tau=3.0))
    assert chunk == [1, 0]


def test_bild_drafts_at_exactly_its_fallback():
    flat, log = lambda tokens: torch.zeros(2), []
    next(bild(ScriptedLM(flat), ScriptedLM(flat), [0], gamma=2, fallback=0.5, rollback=9.0,
              log=log))
    assert log == [{"drafted": 2, "accepted": 2}]
