"""Trees that are planned by how often guesses are right, and how this is learnt while decoding.
That every method with trees learns is in test_lossless.py."""
import itertools
import math
import random

import pytest

from support.trees import RANKS, TRIALS, Acceptance, best_tree


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


# ------------------------------------------------------------------- how often guesses are right

TREE = [-1, 0, 0, 0, 2, 2, 4]  # the root has three guesses, node 2 two, and node 4 one


def test_how_often_guesses_are_right_by_hand():
    """The path is 0, 2, 4: of the root rank 1 was right, of node 2 rank 0, and of node 4 none. The
    second round rejects all guesses of the root, and a node without guesses says nothing. Guesses
    that a draft left out are wrong, but a node from which it grew nothing has none."""
    learnt, pruned = Acceptance(0.6), Acceptance(0.6)
    assert learnt.rates()[:3] == pytest.approx([0.6, 0.1, 0.05])
    learnt.learn(TREE, [0, 2, 4])
    learnt.learn([-1, 0, 0], [0])
    learnt.learn([-1], [0])
    tried = [TRIALS + 4, TRIALS + 3, TRIALS + 1, TRIALS]
    hits = [0.6 * TRIALS + 1, 0.1 * TRIALS + 1, 0.05 * TRIALS, 0.025 * TRIALS]
    assert learnt.rates()[:4] == pytest.approx([x / n for x, n in zip(hits, tried)])
    pruned.learn(TREE, [0, 2, 5], pruned=True)
    assert pruned.rates()[1] == pytest.approx((0.1 * TRIALS + 2) / (TRIALS + 2))
    assert pruned.rates()[2] == pytest.approx(0.05 * TRIALS / (TRIALS + 2))


def test_no_rank_is_likelier_than_the_one_before():
    """So siblings of a planned tree stand in the order of their ranks. A tree may have more guesses
    than there are ranks."""
    learnt = Acceptance(0.6)
    for _ in range(50):
        learnt.learn([-1, *[0] * 12], [0, 3])
        learnt.learn([-1, *[0] * 12], [0, 12])
    rates = learnt.rates()
    assert len(rates) == RANKS and rates[0] > rates[1] == rates[2] > rates[3]
    tree = best_tree([rates] * 2, 40)
    for parent in range(40):
        ranks = [node.rank for node in tree if node.parent == parent]
        assert ranks == [*range(len(ranks))]
