"""BiLD and SpecDec: which guesses pass. That their limits are exact is in test_lossless.py."""
import itertools
import math

import torch

from common import Sampler
from fake_models import ScriptedLM, tabled
from survey.lossy import bild, specdec


def test_bild_follows_its_two_thresholds():
    draft = [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.45, 0.3, 0.25]
    target = [0.2, 0.5, 0.3], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]

    def first(**options):
        log = []
        return next(bild(tabled(target), tabled(draft), [0], log=log, **options)), log[0]
    # 0 -> 1 (0.8) -> 2 (0.6) -> stops at 0.45. Costs are -log 0.5 = 0.69, -log 0.1 = 2.30
    assert first(fallback=0.5, rollback=2.31) == ([1, 2, 1], {"guessed": 2, "accepted": 2})
    assert first(fallback=0.5, rollback=2.30) == ([1, 0], {"guessed": 2, "accepted": 1})
    assert first(fallback=0.5, rollback=0.69) == ([1], {"guessed": 2, "accepted": 0})
    assert first(fallback=0.5, rollback=0.70) == ([1, 0], {"guessed": 2, "accepted": 1})
    assert first(fallback=0.61, rollback=9.0) == ([1, 0], {"guessed": 1, "accepted": 1})
    assert first(fallback=0.81, rollback=9.0) == ([1], {"guessed": 0, "accepted": 0})
    assert first(fallback=0.0, rollback=9.0, gamma=4) == (
        [1, 2, 0, 1, 0], {"guessed": 4, "accepted": 4})
    # at temperature 1, whatever tokens are drawn at
    assert first(fallback=0.5, rollback=2.31, sample=Sampler(1e-3))[1]["guessed"] == 2
    assert first(fallback=0.5, rollback=2.29, sample=Sampler(1e-3))[1]["accepted"] == 1


def test_what_reaches_a_limit_exactly_passes():
    """A guess of probability 1 is drafted at a fallback of 1, and -log 1 is not above a rollback of
    0. SpecDec's guess lies 3 below the best one. It is drafted, however unsure the draft is."""
    sure = [[0.0, 1.0, 0.0]] * 2
    chunks = bild(tabled(sure), tabled(sure), [0], gamma=3, fallback=1.0, rollback=0.0)
    assert next(chunks) == [1, 1, 1, 1]
    target, draft = torch.tensor([3.0, *[0.0] * 20]), torch.tensor([0.0, 0.1, *[0.0] * 19])
    chunk = next(specdec(ScriptedLM(lambda _: target), ScriptedLM(lambda _: draft), [0], gamma=1,
                         tau=3.0))
    assert chunk == [1, 0]


def saying(*draft):
    """Make a scripted model of four tokens that drafts these after a prompt of one token."""
    return ScriptedLM(lambda tokens: torch.eye(4)[draft[len(tokens) - 1]])


def test_specdec_follows_its_two_limits():
    """All 16 drafts of two tokens are verified after 0 and after 3. The tokens that pass after 0,
    1, 2, 3 are given by hand, with the best one first. Three tokens tie after 3, and only their
    argmax passes if the output is to be greedy."""
    rows = ([0.1, 0.4, 0.3, 0.2], [0.05, 0.05, 0.1, 0.8], [0.7, 0.1, 0.15, 0.05],
            [0.3, 0.3, 0.1, 0.3])
    # log p lies below the best by: 1.39 0 0.29 0.69, 2.77 2.77 2.08 0, 0 1.95 1.54 2.64, 0 0 1.10 0
    for beta, tau, *passing in (
            (1, 9.0, "1", "3", "0", "0"), (4, 0.0, "1", "3", "0", "0"),
            (4, 1e-9, "1", "3", "0", "013"),  # above 0 what ties with the best passes
            (2, 9.0, "12", "32", "02", "013"), (2, 0.28, "1", "3", "0", "013"),
            (3, 0.7, "123", "3", "0", "013"), (3, 1.6, "123", "3", "02", "013"),
            (4, 2.5, "1230", "32", "021", "0132"), (4, math.inf, "1230", "3201", "0213", "0132")):
        passing = [[int(x) for x in some] for some in passing]
        for root, x, y in itertools.product((0, 3), range(4), range(4)):
            expected, log = passing[root][:1], []
            if x in passing[root]:
                expected = [x, y, passing[y][0]] if y in passing[x] else [x, passing[x][0]]
            got = next(specdec(tabled(rows), saying(x, y), [root], gamma=2, beta=beta, tau=tau,
                               log=log))
            assert got == expected, (beta, tau, root, x, y)
            assert log == [{"guessed": 2, "accepted": len(expected) - 1}]


def test_specdec_draws_at_a_temperature():
    """Guesses and replacements; the test is that of temperature 1."""
    target, draft = [[0.5, 0.3, 0.2]] * 3, [[0.0, 0.0, 1.0]] * 3
    for tau, chunk in ((0.92, [2, 2]), (0.91, [])):  # log 0.5 / 0.2 = 0.916
        chunks = specdec(tabled(target), tabled(draft), [0], gamma=2, tau=tau, sample=Sampler(9.0))
        got = [next(chunks) for _ in range(60)]
        assert all(x[:-1] == chunk for x in got) and {x[-1] for x in got} == {0, 1, 2}
    chunks = specdec(tabled(target), tabled(target), [0], gamma=1, beta=1, sample=Sampler(9.0))
    assert {*map(len, itertools.islice(chunks, 60))} == {1, 2}
