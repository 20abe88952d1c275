"""The clock that chooses a tree: the best tree of a size, what calls cost here, and what pays."""
import itertools
import math
import random

import pytest

from cli.run import TimedLM
from common import CachedLM
from families import tiny
from support.clock import (MASK_ROWS, best_tree, fastest, fill_tree, list_mask_trees,
                           row_costs)


def test_the_best_tree_is_the_best_of_all():
    """No tree of n nodes has a larger sum of chances. The first m nodes are the best tree of m."""
    rng = random.Random(0)
    for _ in range(8):
        accept = [[rng.random() for _ in range(2)] for _ in range(3)]
        chances = {ranks: math.prod(accept[depth][rank] for depth, rank in enumerate(ranks))
                   for n in range(4) for ranks in itertools.product(range(2), repeat=n)}
        tree, paths = best_tree(accept, 7), [()]
        for chance, parent, depth, rank in tree[1:]:
            paths.append((*paths[parent], rank))
            assert len(paths[-1]) == depth and chance == pytest.approx(chances[paths[-1]])
        for n in range(1, 8):
            most = max(sum(map(chances.get, some)) for some in itertools.combinations(chances, n)
                       if all(ranks[:-1] in some for ranks in some))
            assert sum(chance for chance, *_ in tree[:n]) == pytest.approx(most)
            assert best_tree(accept, n) == tree[:n]
    assert best_tree([], 4) == [(1.0, -1, 0, 0)] and len(best_tree([[0.5, 0.1]], 9)) == 3


def test_costs_are_those_of_calls_with_room_and_counted_nowhere(monkeypatch):
    """The machine is busy during the first five and the last five calls, of whatever width."""
    lm, ran = CachedLM(tiny("llama")), []
    lm.start([3, 4, 5])
    counted = lm.calls, lm.rows, lm.seconds, lm.parents, lm.length
    seconds = {1: 5, 2: 7, 4: 6, 8: 3, 16: 8}

    def timed(act, number):
        act()
        ran.append(len(lm.parents))
        return seconds[ran[-1]] + 9 * (len(ran) % 20 not in range(6, 16))
    monkeypatch.setattr("timeit.timeit", timed)
    assert row_costs(lm, 9)[1:10] == [3] * 8 + [8]
    assert row_costs(lm, 4)[1:5] == [5, 6, 6, 6]
    assert (lm.calls, lm.rows, lm.seconds, lm.parents, lm.length) == counted


def test_the_fastest_choice_is_asked_for_again_when_the_context_has_doubled():
    lm, asked = CachedLM(tiny("llama", max_position_embeddings=2000)), []

    def choices():
        asked.append(lm.length)
        yield from [("a", 1.0, 2.0), ("b", 3.0, 4.0), ("c", 5.0, 7.0)]
    for lm.length in (0, 3, 255, 256, 511, 512, 100, 1100):
        assert fastest(lm, "x", choices) == "b"
    assert asked == [0, 256, 512, 1100] and fastest(lm, "y", lambda: [("d", 1.0, 9.0)]) == "d"


def test_the_tree_with_masks_that_pays(monkeypatch):
    """As many nodes and masks as a call's rows are worth."""
    accept = [[0.5, 0.2], [0.4, 0.1]]
    for costs, nodes, M in (([1] * 7, 7, 2), ([1, 1, 1, 1.2, 9, 9, 9], 2, 1),
                            ([1, 1.6, 2, 4, 9, 9, 9], 1, 0), ([1, 1, 1, 1, 1.1, 9, 9], 5, 2)):
        costs = [costs[max(n - 1, 0).bit_length()] for n in range(MASK_ROWS + 1)]
        monkeypatch.setattr("support.clock.row_costs", lambda *_: costs)
        tree, found = max(list_mask_trees(None, accept), key=lambda plan: plan[1] / plan[2])[0]
        assert (len(tree), found) == (nodes, M) and tree == best_tree(accept[:M], nodes)
    filled = fill_tree(best_tree(accept, 4), [[7, 8], [9]], 3)
    assert filled == ([3, 7, 8, 9], [-1, 0, 0, 1])


def test_what_is_made_once_is_set_up(monkeypatch):
    """The time of a nested `once` counts once."""
    lm, now = TimedLM(tiny("llama")), [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def make():
        now[0] += 3
        return now[0]
    assert [lm.once("x", make), lm.once("x", make)] == [3, 3]
    assert lm.once("outer", lambda: lm.once("inner", make)) == 6
    assert (lm.setup_seconds, lm.seconds) == (6, 0)
