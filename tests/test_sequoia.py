"""Sequoia finds the best tree, samples exactly without replacement, and uses only the rates of its
pair of models."""
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from common import InputError, Sampler, autoregressive
from fake_models import Zeros
from families import near, tiny
from helpers import note_calls, tokens_of
from laws import Choosing, chi_square_ok, draw_by_choices, outcomes
from support.engine import EngineLM
from support import parts
from support.clock import Choice
from support.parts import save_facts
import survey.sequoia as module
from survey.sequoia import (calibrate, draw_children, draw_tree, load_rates, parents_of,
                            plan_sequoia, sequoia, shape_of, tabulate, verify)
from test_several_drafts import random_pairs
from trainings import WORDLESS

PROMPT = [3, 14, 15]
BUSHY = [-1, 0, 0, 0, 1, 1, 2, 4, 4]  # of depth 3; nodes 3, 5, 6, 7 and 8 are leaves


def rates_file(folder, target, draft, **rates) -> str:
    """Write what `calibrate` would write for this pair."""
    rates = rates or {"0.0": (0.6, 0.3, 0.1)}
    save_facts(folder / "rates.json", {"target": target, "draft": draft}, rates=rates)
    return str(folder / "rates.json")


# -------------------------------------------------------------------------------------- the tree

def ordered_trees(n: int, d: int):
    """Yield all trees of exactly n nodes and at most d levels below the root, as nested tuples."""
    def forests(n: int, d: int):
        if n == 0:
            yield ()
        for first in range(1, n + 1 if d else 1):
            for tree in ordered_trees(first, d - 1):
                yield from ((tree, *others) for others in forests(n - first, d))
    return forests(n - 1, d)


def tokens_a_call(tree: tuple, P: tuple) -> float:
    """Sum the rates along the paths of all nodes (Proposition 3.4)."""
    return 1 + sum(rate * tokens_a_call(child, P) for rate, child in zip(P, tree))


def nested(parents: list[int], node: int = 0) -> tuple:
    return tuple(nested(parents, i) for i, parent in enumerate(parents) if parent == node)


def test_the_dynamic_program_equals_brute_force():
    """All trees of up to 7 nodes are compared, for every bound on the depth."""
    trees = {(n, d): [*ordered_trees(n, d)] for n in range(1, 8) for d in range(7)}
    assert [len(trees[n, 6]) for n in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]
    for P in ((0.6, 0.3, 0.1), (0.2, 0.5, 0.3), (1.0,), (0.5, 0.0, 0.4), (0.3, 0.25, 0.1, 0.05)):
        best = tabulate(P, 7, 6)
        for n, d in trees:
            possible = [tokens_a_call(tree, P) for m in range(1, n + 1) for tree in trees[m, d]
                        if len(tree) <= len(P)]
            assert math.isclose(best[d].G[n], max(possible), rel_tol=1e-12), (P, n, d)
            parents = parents_of(best, n, d)
            assert math.isclose(tokens_a_call(nested(parents), P), best[d].G[n], rel_tol=1e-12)
            assert len(parents) <= n and len(shape_of(parents).levels) <= d
            assert parents == sorted(parents)  # level by level, siblings side by side


def test_shapes_by_hand():
    """These are the header's picture and a bushy tree. Nodes without children are never fed."""
    best = tabulate((0.6, 0.2, 0.1), 7, 3)
    assert parents_of(best, 7, 3) == [-1, 0, 0, 1, 1, 2, 3] and best[3].G[7] == pytest.approx(2.616)
    shape = shape_of(BUSHY)
    assert shape.parents == BUSHY and shape.levels == [[0], [1, 2], [4]]
    assert shape.children == [[1, 2, 3], [4, 5], [6], [], [7, 8], [], [], [], []]
    assert shape.row == {0: -1, 1: 0, 2: 1, 4: 2}


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


def law_of_one_node(p, q, k):
    """Return the distribution of the token after one node with k children, and the probability
    that a child is accepted."""
    def run(choose):
        [draws] = draw_by_choices(log_of(q)[None], k, Choosing(choose))
        i, left = verify(p, log_of(q), draws, Choosing(choose))
        return (choose(left.tolist()), False) if i is None else (draws[i], True)
    found, accepted = torch.zeros_like(p), 0.0
    for chance, (token, is_child) in outcomes(run):
        found[token] += chance
        accepted += chance * is_child
    return found, accepted


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_verification_is_exact_by_enumeration(k):
    """The token has the target's distribution. Theorem 3.7: one child is accepted with the best
    rate there is, and all tokens as children leave nothing to reject. A guess of no probability is
    never accepted."""
    for p, q in random_pairs():
        found, accepted = law_of_one_node(p, q, k)
        torch.testing.assert_close(found, p, atol=1e-7, rtol=0)
        assert k > 1 or abs(accepted - torch.minimum(p, q).sum()) < 1e-7
        assert k < 4 or abs(accepted - 1) < 1e-7
    assert verify(torch.tensor([0.0, 1.0]), torch.zeros(2), [0], Zeros())[0] is None


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
def test_the_clock_chooses_what_is_not_given(tmp_path, monkeypatch, options, sizes, depths):
    model, seen = tiny("llama"), []
    monkeypatch.setattr(module, "plan_sequoia", lambda P, *given: seen.append(
        given) or [Choice(shape_of(BUSHY), 1.0, 9, 3, 4)])
    lms = EngineLM(model), EngineLM(model)
    next(sequoia(*lms, PROMPT, rates=rates_file(tmp_path, model, model), **options))
    assert seen == [(sizes, depths)]


def test_trees_are_those_of_their_options_and_the_nearest_temperature(tmp_path, monkeypatch):
    """Also where the same models decode one text after another. A rate of 0 brings a child too."""
    model = tiny("llama")
    lms, P = [EngineLM(model), EngineLM(model)], {0.0: (0.9, 0.05), 0.6: (0.4, 0.3, 0)}
    rates = rates_file(tmp_path, model, model, **{str(t): some for t, some in P.items()})
    seen = note_calls(monkeypatch, lms[0], "forward")
    for t, nearest, nodes, depth in 2 * [
            (0, 0.0, 4, 1), (0.2, 0.0, 6, 3), (0.4, 0.6, 6, 1), (3.0, 0.6, 4, 3)]:
        next(sequoia(*lms, PROMPT, nodes=nodes, depth=depth, rates=rates, sample=Sampler(t)))
        known = tuple(x or 1e-9 for x in P[nearest])
        assert seen[-1][-1] == parents_of(tabulate(known, nodes, depth), nodes, depth)


# --------------------------------------------------------------------------------- calibration

@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    """calibrated(model, small, …) runs `calibrate`: it returns its file and the ids of trees."""
    def run(model, small, prompts, temperatures=(0.0,)):
        seen, draw = [], module.draw_tree
        monkeypatch.setattr(module, "TEMPERATURES", temperatures)
        monkeypatch.setattr(parts, "load", lambda *_: (small, WORDLESS))
        monkeypatch.setattr(module, "draw_tree",
                            lambda *given: seen.append(draw(*given)) or seen[-1])
        calibrate(model, WORDLESS, prompts, out=tmp_path / "rates.json")
        return tmp_path / "rates.json", [ids for ids, _ in seen]
    return run


def test_calibration_counts_the_children_of_one_level(calibrated, monkeypatch):
    """The draft's guesses in order of rank at each token of the target's own output: by hand, from
    passes without a cache. After an accepted child the next token is skipped."""
    model = tiny("llama")
    small = near(model, 0.05)
    monkeypatch.setattr(module, "TOKENS", 40)
    file, _ = calibrated(model, small, [PROMPT], temperatures=(0.0, 5.0))
    text = PROMPT + tokens_of(autoregressive(EngineLM(model), PROMPT), 41)
    with torch.inference_mode():
        order = small(input_ids=torch.tensor([text]), use_cache=False).logits[0].argsort(
            -1, descending=True)
    ranks, at = [], len(PROMPT)
    while at < len(PROMPT) + 40:
        ranks.append(order[at - 1].tolist().index(text[at]))
        at += 2 if ranks[-1] < 16 else 1
    rates = load_rates(file, model, small)
    expected = [max(ranks.count(b) / len(ranks), 1e-9) for b in range(16)]
    assert rates[0.0] == pytest.approx(expected, abs=1e-4) and expected[1] > 1e-9
    assert rates[5.0][0] > 0.9 > rates[0.0][0]  # where both are nearly flat they agree


def test_calibration_keeps_to_the_context_and_to_answers(calibrated):
    """Prompts without room are not measured, and nothing after an EOS is."""
    model = tiny("llama")
    answer = tokens_of(autoregressive(EngineLM(model), PROMPT), 30)
    model.generation_config.eos_token_id = answer[5]
    _, trees = calibrated(model, model, [[9] * 33, PROMPT])
    roots = [PROMPT[-1], *answer[1:answer.index(answer[5]):2]]  # two tokens a round
    assert [ids[0] for ids in trees] == roots
    with pytest.raises(InputError, match="expected prompts of at most 32 tokens, got none"):
        calibrated(model, model, [[9] * 33])
