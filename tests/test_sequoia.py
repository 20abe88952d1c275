"""Sequoia finds the best tree by the rates of its ranks. It samples exactly, without replacement.
"""
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from common import Sampler
from families import tiny
from helpers import note_calls
from laws import Choosing, chi_square_ok, draw_by_choices, law_of_node, outcomes, random_pairs
from support.clock import Choice
from support.engine import EngineLM
from survey.sequoia import (draw_children, draw_tree, parents_of, plan_sequoia, sequoia, shape_of,
                            tabulate, verify)

PROMPT = [3, 14, 15]
BUSHY = [-1, 0, 0, 0, 1, 1, 2, 4, 4]  # of depth 3; nodes 3, 5, 6, 7 and 8 are leaves


# -------------------------------------------------------------------------------------- the tree

def levels_of(tree: tuple) -> int:
    """Count the levels below the root of a tree of nested tuples."""
    return max((1 + levels_of(child) for child in tree), default=0)


def tokens_a_call(tree: tuple, P: tuple) -> float:
    """Sum the rates along the paths of all nodes (Proposition 3.4)."""
    return 1 + sum(rate * tokens_a_call(child, P) for rate, child in zip(P, tree))


def nested(parents: list[int], node: int = 0) -> tuple:
    return tuple(nested(parents, i) for i, parent in enumerate(parents) if parent == node)


def test_the_dynamic_program_equals_brute_force():
    """All trees of up to 7 nodes are compared, for every bound on the depth."""
    # The parent of node i is one of the i nodes before it.
    trees = {n: {nested([-1, *some]) for some in itertools.product(*map(range, range(1, n)))}
             for n in range(1, 8)}
    assert [*map(len, trees.values())] == [1, 1, 2, 5, 14, 42, 132]
    for P in ((0.6, 0.3, 0.1), (0.2, 0.5, 0.3), (1.0,), (0.5, 0.0, 0.4), (0.3, 0.25, 0.1, 0.05)):
        best = tabulate(P, 7, 6)
        for n, d in itertools.product(trees, range(7)):
            possible = [tokens_a_call(tree, P) for m in range(1, n + 1) for tree in trees[m]
                        if levels_of(tree) <= d]
            assert math.isclose(best[d].G[n], max(possible), rel_tol=1e-12), (P, n, d)
            parents = parents_of(best, n, d)
            assert math.isclose(tokens_a_call(nested(parents), P), best[d].G[n], rel_tol=1e-12)
            assert len(parents) <= n and len(shape_of(parents).levels) <= d
            assert parents == sorted(parents)  # level by level, siblings side by side


def test_the_clock_chooses_from_trees_of_all_sizes_and_depths():
    """The draft has a call for each level, with a row for each node that has children."""
    P, sizes, depths = (0.6, 0.2, 0.1), (2, 8, 64), (1, 3, 16)
    found, best = plan_sequoia(P, sizes, depths), tabulate(P, 64, 16)
    for (n, d), (shape, tokens, *costs) in zip(itertools.product(sizes, depths), found):
        assert shape == shape_of(parents_of(best, n, d))
        assert math.isclose(tokens, tokens_a_call(nested(shape.parents), P), rel_tol=1e-12)
        assert costs == [len(shape.parents), len(shape.levels), sum(map(bool, shape.children))]
    assert len(found) == 9


# --------------------------------------------------------------------- sampling, by enumeration

def log_of(q: torch.Tensor) -> torch.Tensor:
    """Return the logits that `draw_tree` draws the root's children by, where q is the draft's."""
    draft = SimpleNamespace(forward=lambda ids: q.log()[None], commit=lambda path: None)
    return draw_tree(draft, [0], shape_of([-1, 0]), Sampler(1.0))[1][0]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_verification_is_exact_by_enumeration(k):
    """The token has the target's distribution. Theorem 3.7: one child is accepted with the best
    rate there is, and all tokens as children leave nothing to reject."""
    def judge(choose):
        [draws] = draw_by_choices(log_of(q)[None], k, Choosing(choose))
        i, left = verify(p, log_of(q), draws, Choosing(choose))
        return (choose(left.tolist()), False) if i is None else (draws[i], True)
    for p, q in random_pairs():
        found, accepted = law_of_node(judge, p)
        torch.testing.assert_close(found, p, atol=1e-7, rtol=0)
        assert k > 1 or abs(accepted - torch.minimum(p, q).sum()) < 1e-7
        assert k < 4 or abs(accepted - 1) < 1e-7


def test_draws_are_without_replacement():
    """20,000 rows of three draws: chi-square test of their order (24 cells) at a false-failure
    probability of 1e-6. Where q has mass for two of five tokens, the third is any of the others."""
    sample, q = Sampler(1.0, seed=5), torch.tensor([0.45, 0.3, 0.2, 0.05]).double()
    expected = {tuple(draws): chance for chance, draws in outcomes(
        lambda choose: draw_by_choices(log_of(q)[None], 3, Choosing(choose))[0])}
    found = [*map(tuple, draw_children(log_of(q).expand(20000, 4), 3, sample))]
    counts = torch.tensor([found.count(draws) for draws in expected])
    assert counts.sum() == 20000 and chi_square_ok(counts, torch.tensor([*expected.values()]))
    q = torch.tensor([0, 0.7, 0, 0.3, 0]).double()
    rows = torch.tensor(draw_children(log_of(q).expand(6000, 5), 3, sample))
    assert {1, 3} == set(rows[:, :2].flatten().tolist())
    assert chi_square_ok(rows[:, 2].bincount(minlength=5)[[0, 2, 4]], torch.ones(3) / 3)


# ------------------------------------------------------------------------------ trees in a run

@pytest.mark.parametrize("options, sizes, depths", [
    (dict(nodes=8), (8,), (*range(1, 17),)), (dict(depth=2), (2, 4, 8, 16, 32, 64), (2,))])
def test_the_clock_chooses_what_is_not_given(monkeypatch, options, sizes, depths):
    model, seen = tiny("llama"), []
    monkeypatch.setattr("survey.sequoia.plan_sequoia", lambda P, *given: seen.append(
        given) or [Choice(shape_of(BUSHY), 1.0, 9, 3, 4)])
    next(sequoia(EngineLM(model), EngineLM(model), PROMPT, **options))
    assert seen == [(sizes, depths)]


def test_trees_are_those_of_their_options_and_of_what_was_learnt(monkeypatch):
    """Also where the same models decode one text after another."""
    model = tiny("llama")
    lms, P = [EngineLM(model), EngineLM(model)], [0.6, 0.3, 0.1]
    monkeypatch.setattr("support.trees.Acceptance.rates", lambda self: P)
    seen = note_calls(monkeypatch, lms[0], "forward")
    for nodes, depth in 2 * [(4, 1), (6, 3), (6, 1), (4, 3)]:
        next(sequoia(*lms, PROMPT, nodes=nodes, depth=depth))
        assert seen[-1][-1] == parents_of(tabulate(P, nodes, depth), nodes, depth)
