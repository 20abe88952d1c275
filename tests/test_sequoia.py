"""Sequoia: the best tree, exact sampling without replacement, and the rates of this pair alone."""
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import survey.sequoia as module
from common import CachedLM, InputError, Sampler, autoregressive, greedy
from survey.clock import best_tree
from fake_models import ScriptedLM, Zeros, markov
from families import CONTEXT, VOCAB, near, tiny
from helpers import check_without_caches, tokens_of
from laws import chi_square_ok, law, outcomes
from survey.sequoia import (calibrate, decode, draw_children, plan_sequoia, load_rates, parents_of,
                            sequoia, shape_of, tabulate, verify)
from training import parts
from training.parts import save_facts
from test_lossless import Choosing, draw_by_choices

PROMPT = [3, 14, 15]
BUSHY = [-1, 0, 0, 0, 1, 1, 2, 4, 4]  # of depth 3; nodes 3, 5, 6, 7 and 8 are leaves


def rates_file(folder, target, draft, name="rates.json", **rates) -> str:
    """Write what `calibrate` would write for this pair."""
    rates = rates or {"0.0": (0.6, 0.3, 0.1)}
    save_facts(folder / name, {"target": target, "draft": draft}, rates=rates)
    return str(folder / name)


def decoding(target, draft, prompt, *, parents, sample=greedy, log=None):
    """Start `decode` as `sequoia` does, with one shape for all rounds."""
    for lm in (target, draft):
        lm.start(prompt[:-1])
    shape = shape_of(parents)
    return decode(target, draft, prompt[-1], lambda: shape, sample, log)


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


def some_rates():
    """Yield rates that fall and that do not, with zeros, few and many, certain ones."""
    torch.manual_seed(0)
    yield from [(0.6, 0.3, 0.1), (0.9, 0.05), (0.2, 0.5, 0.3), (1.0,), (0.5, 0.0, 0.4), (1e-9,) * 3]
    for k in (2, 4, 6):
        P = torch.rand(k) * torch.tensor([0.9 ** i for i in range(k)])
        yield tuple((P / max(1, P.sum())).tolist())


def test_the_dynamic_program_equals_brute_force():
    """Over all trees of up to 7 nodes, for every bound on the depth."""
    trees = {(n, d): [*ordered_trees(n, d)] for n in range(1, 8) for d in range(7)}
    assert [len(trees[n, 6]) for n in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]
    for P in some_rates():
        best = tabulate(P, 7, 6)
        for n, d in trees:
            possible = [tokens_a_call(tree, P) for m in range(1, n + 1) for tree in trees[m, d]
                        if len(tree) <= len(P)]
            assert math.isclose(best[d].G[n], max(possible), rel_tol=1e-12), (P, n, d)
            parents = parents_of(best, n, d)
            assert math.isclose(tokens_a_call(nested(parents), P), best[d].G[n], rel_tol=1e-12)
            assert len(parents) <= n and len(shape_of(parents).levels) <= d
            assert parents == sorted(parents)  # level by level, siblings side by side


def test_best_first_gives_the_same_trees_where_rates_fall():
    """On trees too large for brute force. To choose greedily is right there, and only there."""
    for P in [(0.7, 0.15, 0.06, 0.03), (0.3, 0.25, 0.2)]:
        best = tabulate(P, 64, 12)
        for n, d in itertools.product((9, 64), (1, 3, 12)):
            greedily = sum(node.chance for node in best_tree([list(P)] * d, n))
            assert math.isclose(best[d].G[n], greedily, rel_tol=1e-12), (P, n, d)


def test_the_picture_of_the_header():
    best = tabulate((0.6, 0.2, 0.1), 7, 3)
    assert parents_of(best, 7, 3) == [-1, 0, 0, 1, 1, 2, 3] and best[3].G[7] == pytest.approx(2.616)
    assert shape_of(parents_of(best, 7, 3)).levels == [[0], [1, 2], [3]]


def test_the_levels_are_the_draft_calls():
    """Their nodes are the rows of these calls. Nodes without children are never fed."""
    shape = shape_of(BUSHY)
    assert shape.parents == BUSHY and shape.levels == [[0], [1, 2], [4]]
    assert shape.children == [[1, 2, 3], [4, 5], [6], [], [7, 8], [], [], [], []]
    assert shape.row == {0: 0, 1: 1, 2: 2, 4: 3} and shape_of([-1]).levels == []


@pytest.mark.parametrize("t_target, t_draft, nodes, levels", [
    (lambda n: 1, lambda n: 0, 64, None),  # all is free: the largest tree
    (lambda n: n, lambda n: 0, 2, None),   # each row is paid
    (lambda n: 1, lambda n: 9, None, 1),   # draft calls are expensive: one level
    (lambda n: 1, lambda n: 0.05 * n, None, None)])
def test_measured_costs_choose_the_tree(monkeypatch, t_target, t_draft, nodes, levels):
    """The most tokens a second of all sizes and depths, where a draft call is paid by its rows."""
    costs = {"target": t_target, "draft": t_draft}
    monkeypatch.setattr(module, "row_costs", lambda lm, most: [costs[lm](n) for n in range(65)]
                        if most == 64 else None)
    P, (sizes, depths) = (0.6, 0.2, 0.1), module.RANGES.values()
    found, best = [*plan_sequoia(P, sizes, depths, "target", "draft")], tabulate(P, 64, 16)
    for (n, d), (shape, tokens, seconds) in zip(itertools.product(sizes, depths), found,
                                                strict=True):
        assert shape == shape_of(parents_of(best, n, d))
        assert math.isclose(tokens, tokens_a_call(nested(shape.parents), P), rel_tol=1e-12)
        rows = [len(level) for level in shape.levels]
        assert math.isclose(seconds, t_target(len(shape.parents)) + sum(map(t_draft, rows)))
    shape, *_ = max(found, key=lambda x: x[1] / x[2])
    assert nodes in (None, len(shape.parents)) and levels in (None, len(shape.levels))


# --------------------------------------------------------------------- sampling, by enumeration

def log_of(q: torch.Tensor) -> torch.Tensor:
    """Turn q into logits as `draw_tree` makes them."""
    return q.log().clamp(min=-1e9)


def law_of_one_node(p, q, k, reorder=lambda draws: draws):
    """Return the distribution of the token after one node with k children, and the probability
    that a child is accepted."""
    def run(choose):
        [draws] = draw_by_choices(log_of(q)[None], k, Choosing(choose))
        draws = reorder(draws)
        i, left = verify(p, log_of(q), draws, Choosing(choose))
        return (choose(left.tolist()), False) if i is None else (draws[i], True)
    found, accepted = torch.zeros_like(p), 0.0
    for chance, (token, is_child) in outcomes(run):
        found[token] += chance
        accepted += chance * is_child
    return found, accepted


def random_pairs():
    """Yield distributions (p, q) of four tokens: close, far, equal, with zeros on either side,
    one-hot; p after top-p and top-k."""
    torch.manual_seed(0)
    for scale, sampling in ((0.3, (1.0,)), (1.0, (0.7, 0, 0.8)), (3.0, (1.3, 2)), (1.0, (1.0,))):
        p, q = scale * torch.randn(2, 4, dtype=torch.float64)
        p = Sampler(*sampling).probs(p).double()
        yield p / p.sum(), q.softmax(-1)
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    ends = torch.eye(4, dtype=torch.float64)
    yield from ((p, p), ((ends[0] + ends[1]) / 2, p), (p, 0.2 * ends[1] + 0.8 * ends[2]),
                (p, ends[1]), (ends[2], ends[2]), (ends[2], ends[1]))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_verification_is_exact_by_enumeration(k):
    """The token has the target's distribution. Theorem 3.7: one child is accepted with the best
    rate there is, and all tokens as children leave nothing to reject."""
    for p, q in random_pairs():
        found, accepted = law_of_one_node(p, q, k)
        torch.testing.assert_close(found, p, atol=1e-9, rtol=0)
        assert k > 1 or abs(accepted - torch.minimum(p, q).sum()) < 1e-9
        assert k < 4 or abs(accepted - 1) < 1e-9


def test_children_must_be_tried_in_draw_order():
    """In the order of their tokens, or of their probability, the law is wrong."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
    for wrong in (sorted, lambda draws: sorted(draws, key=lambda x: -q[x])):
        assert (law_of_one_node(p, q, 3, wrong)[0] - p).abs().max() > 1e-3


def test_a_guess_of_no_probability_is_never_accepted():
    p, q = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
    assert verify(p, q.log(), [0], Zeros())[0] is None


def test_draws_are_without_replacement():
    """20,000 rows of three draws: chi-square test of their order (24 cells) at a false-failure
    probability of 1e-6. Where q has mass for two of five tokens, the third is any of the others."""
    sample = Sampler(1.0, seed=5)
    q = torch.tensor([0.45, 0.3, 0.2, 0.05]).double()
    expected = {tuple(draws): chance for chance, draws in outcomes(
        lambda choose: draw_by_choices(log_of(q)[None], 3, Choosing(choose))[0])}
    found = [*map(tuple, draw_children(log_of(q).expand(20000, 4), 3, sample))]
    counts = torch.tensor([found.count(draws) for draws in expected])
    assert len(expected) == 24 and counts.sum() == 20000
    assert chi_square_ok(counts, torch.tensor([*expected.values()]))
    q = torch.tensor([0, 0.7, 0, 0.3, 0]).double()
    rows = torch.tensor(draw_children(log_of(q).expand(6000, 5), 3, sample))
    assert {1, 3} == set(rows[:, :2].flatten().tolist())
    assert chi_square_ok(rows[:, 2].bincount(minlength=5)[[0, 2, 4]], torch.ones(3) / 3)
    assert draw_children(torch.tensor([[0.1, 3.0, 2.0, 2.5]]), 3, greedy) == [[1, 3, 2]]


def test_noise_reaches_the_rarest_tokens():
    """A token of 2⁻⁴⁰ is drawn where its random number is that near to 1."""
    class Noise(Sampler):
        def uniform(self, shape, device):
            u = torch.full(shape, 0.5, dtype=torch.float64)
            u[:, 1] = 1 - 2.0 ** -43
            return u
    p = torch.tensor([[0.5, 2.0 ** -40, 0.5 - 2.0 ** -40]], dtype=torch.float64)
    assert draw_children(p.log(), 2, Noise(1.0))[0][0] == 1


def test_noise_is_fresh_in_every_round():
    """A hundred rounds of the same distribution: the tree is not the same each time."""
    flat = ScriptedLM(lambda tokens: torch.zeros(5)), ScriptedLM(lambda tokens: torch.zeros(5))
    chunks = decoding(*flat, [0], parents=[-1, 0, 1, 1], sample=Sampler(1.0, seed=2))
    firsts = [next(chunks)[0] for _ in range(100)]
    assert set(firsts) == set(range(5)) and max(map(firsts.count, range(5))) < 45


def test_where_q_has_no_mass_left_children_are_drawn_evenly():
    """A draft that knows one token of five: the other child is any of the rest, 300 rounds."""
    log, sure = [], torch.tensor([0.0] + [-torch.inf] * 4)
    lms = ScriptedLM(lambda tokens: torch.zeros(5)), ScriptedLM(lambda tokens: sure)
    chunks = decoding(*lms, [0], parents=[-1, 0, 0], sample=Sampler(1.0, seed=2), log=log)
    firsts = [next(chunks)[0] for _ in range(300)]
    assert all(r["ranks"] == [token > 0] for r, token in zip(log, firsts))
    assert chi_square_ok(torch.tensor([firsts.count(x) for x in range(5)]), torch.ones(5) / 5)


@pytest.mark.parametrize("missing", [[], [1, 2]])
@pytest.mark.parametrize("parents", [[-1, 0, 0, 1, 1], [-1, 0, 0, 2, 2, 2], [-1, 0, 1]])
def test_a_round_is_exact_by_enumeration(monkeypatch, parents, missing):
    """There are three tokens. The draft gives no mass to the missing ones, and the target samples
    with top-k."""
    monkeypatch.setattr(module, "draw_children", draw_by_choices)
    monkeypatch.setattr(Choosing, "probs", Sampler(1.2, top_k=2).probs)
    target, logits_of, prompt = markov(1, vocab=3), markov(2, vocab=3), [0, 1]

    def draft(tokens):
        return logits_of(tokens).index_fill(0, torch.tensor(missing, dtype=int), -torch.inf)

    def true_law(text, n):
        return law(target, Sampler(1.2, top_k=2), [*prompt, *text], n, 3).view([3] * n).double()

    def run(choose):
        return next(decoding(ScriptedLM(target), ScriptedLM(draft), prompt, parents=parents,
                             sample=Choosing(choose)))
    found = torch.zeros(3, 3, 3, dtype=torch.float64)
    for chance, text in outcomes(run):
        found[tuple(text)] += chance * true_law(text, 3 - len(text))
    torch.testing.assert_close(found, true_law([], 3), atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------ with real models

@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sampled_output_of_real_caches_is_that_without_caches(family):
    model = tiny(family)
    check_without_caches(decoding, model, [near(model, 0.04)], PROMPT, parents=BUSHY)


def test_a_low_temperature_comes_down_to_temperature_0():
    """The same trees and the same tokens: where q has next to no mass left, the likeliest of the
    others are still the next children."""
    model, found = tiny("llama"), []
    for sample in (greedy, Sampler(1e-4, seed=1)):
        log, lms = [], [CachedLM(m) for m in (model, near(model, 0.05))]
        chunks = decoding(*lms, PROMPT, parents=BUSHY, sample=sample, log=log)
        found.append((tokens_of(chunks, 40), log))
    assert found[0] == found[1] and {rank for r in log for rank in r["ranks"]} >= {0, 1}


@pytest.mark.parametrize("options, sizes, depths", [
    ({}, (2, 4, 8, 16, 32, 64), range(1, 17)), (dict(nodes=8), [8], range(1, 17)),
    (dict(depth=2), (2, 4, 8, 16, 32, 64), [2])])
def test_the_clock_chooses_what_is_not_given(tmp_path, monkeypatch, options, sizes, depths):
    """What is timed counts as no call."""
    model = tiny("llama")
    target, draft, seen, log = CachedLM(model), CachedLM(near(model, 0.02)), [], []

    def spy(P, sizes, depths, *lms):
        seen.append((tuple(sizes), tuple(depths)))
        return plan_sequoia(P, sizes, depths, *lms)
    monkeypatch.setattr(module, "plan_sequoia", spy)
    rates = rates_file(tmp_path, model, draft.model)
    tokens_of(sequoia(target, draft, PROMPT, rates=rates, log=log, **options), 30)
    assert target.calls == len(log) and seen == [(tuple(sizes), tuple(depths))]


def test_trees_are_those_of_their_rates_and_options(tmp_path):
    """Also where the same models decode one text after another."""
    model, seen = tiny("llama"), []
    lms = CachedLM(model), CachedLM(model)
    rates = rates_file(tmp_path, model, model, **{"0.0": (0.9, 0.05), "1.0": (0.4, 0.3, 0.2)})
    forward = lms[0].forward
    lms[0].forward = lambda *args, **how: seen.append(args[-1]) or forward(*args, **how)
    for (t, P), nodes, depth in [*itertools.product(
            ((0, (0.9, 0.05)), (1, (0.4, 0.3, 0.2))), (4, 6), (1, 3))] * 2:
        next(sequoia(*lms, PROMPT, nodes=nodes, depth=depth, rates=rates, sample=Sampler(t)))
        assert seen[-1] == parents_of(tabulate(P, nodes, depth), nodes, depth)


def test_the_tree_is_chosen_again_when_the_context_has_doubled(tmp_path, monkeypatch):
    """Rows cost nothing until it has 256 tokens, then each as much as the first."""
    model = tiny("llama", max_position_embeddings=400)
    lms, log = [CachedLM(model), CachedLM(near(model, 0.02))], []
    monkeypatch.setattr(module, "row_costs", lambda lm, most: [
        1.0 if lms[0].length < 256 else float(n) for n in range(most + 1)])
    rates = rates_file(tmp_path, model, lms[1].model)
    chunks = sequoia(*lms, [n * 7 % 61 for n in range(241)], rates=rates, log=log)
    tokens_of(chunks, 40)
    assert log[0]["drafted"] > 8 and log[-1]["drafted"] == 1


# --------------------------------------------------------------------------------- calibration

def test_rates_are_those_of_the_nearest_temperature(tmp_path, monkeypatch):
    model, seen = tiny("llama"), []
    rates = rates_file(tmp_path, model, model, **{"0.0": [0.5], "0.6": [0.6, 0], "1.0": [0.7]})
    monkeypatch.setattr(module, "tabulate", lambda P, *_: seen.append(P) or tabulate(P, 2, 1))
    for t in (0, 0.2, 0.4, 0.75, 0.9, 3.0):
        lms = CachedLM(model), CachedLM(model)
        next(sequoia(*lms, PROMPT, nodes=2, depth=1, rates=rates, sample=Sampler(t)))
    assert seen == [(0.5,), (0.5,), (0.6, 1e-9), (0.6, 1e-9), (0.7,), (0.7,)]


@pytest.mark.parametrize("rates, message", [
    (3, "has no attribute 'items'"), ({}, "from 0 to 1"), ({"0": []}, "from 0 to 1"),
    ({"0": [0.5, math.nan]}, "from 0 to 1"), ({"0": [1.5]}, "from 0 to 1"),
    ({"0": 3}, "'int' object is not iterable"), ({"0": [None]}, "not supported")])
def test_broken_rates_are_refused(tmp_path, rates, message):
    model, file = tiny("llama"), tmp_path / "rates.json"
    save_facts(file, {"target": model, "draft": model}, rates=rates)
    with pytest.raises(InputError, match=f"survey.sequoia calibrate.*{message}"):
        load_rates(str(file), model, model)


def test_rates_of_another_pair_are_refused(tmp_path):
    """Also after the right pair. Tuned models, and models in another type, are the same ones."""
    target, draft = tiny("llama"), tiny("llama", seed=7)
    rates = rates_file(tmp_path, target, draft)
    for pair in [(near(target, 0.05), draft), (target, near(draft, 0.05).half())]:
        assert load_rates(rates, *pair) == {0.0: (0.6, 0.3, 0.1)}
    lm, options = CachedLM(target), dict(nodes=2, depth=1, rates=rates)
    next(sequoia(lm, CachedLM(draft), PROMPT, **options))
    with pytest.raises(InputError, match="another draft's"):
        next(sequoia(lm, CachedLM(target), PROMPT, **options))
    with pytest.raises(InputError, match="another target's"):
        load_rates(rates, draft, draft)


class Vocabulary(SimpleNamespace):
    """Stand in for a tokenizer, of which only the vocabulary is read."""

    def get_vocab(self):
        return {f"t{i}": i for i in range(self.n)}


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    """calibrated(model, small, …) runs `calibrate`: it returns its file and the ids of trees."""
    def run(model, small, prompts=(PROMPT,), vocab=VOCAB, eos=(), temperatures=(0.0,)):
        tokenizer, seen, draw = Vocabulary(n=vocab), [], module.draw_tree
        monkeypatch.setattr(module, "TEMPERATURES", temperatures)
        monkeypatch.setattr(parts, "load", lambda *_: (small, tokenizer))
        monkeypatch.setattr(module, "eos_ids", lambda *_: {*eos})
        monkeypatch.setattr(module, "draw_tree",
                            lambda *given: seen.append(draw(*given)) or seen[-1])
        calibrate(model, tokenizer, [*prompts], out=tmp_path / "rates.json")
        return tmp_path / "rates.json", [ids for ids, _ in seen]
    return run


def test_calibration_counts_the_children_of_one_level(calibrated, monkeypatch):
    """The draft's guesses in order of rank at each token of the target's own output: by hand, from
    passes without a cache. After an accepted child the token behind it is skipped."""
    model = tiny("llama")
    small = near(model, 0.05)
    monkeypatch.setattr(module, "TOKENS", 60)
    file, _ = calibrated(model, small, temperatures=(0.0, 5.0))
    text = PROMPT + tokens_of(autoregressive(CachedLM(model), PROMPT), 61)
    with torch.inference_mode():
        order = small(input_ids=torch.tensor([text]), use_cache=False).logits[0].argsort(
            -1, descending=True)
    ranks, at = [], len(PROMPT)
    while at < len(PROMPT) + 60:
        ranks.append(order[at - 1].tolist().index(text[at]))
        at += 2 if ranks[-1] < 16 else 1
    rates = load_rates(file, model, small)
    expected = [max(ranks.count(b) / len(ranks), 1e-9) for b in range(16)]
    assert rates[0.0] == pytest.approx(expected, abs=1e-4) and expected[1] > 1e-9
    assert rates[5.0][0] > 0.9 > rates[0.0][0]  # where both are nearly flat they agree


def test_calibration_keeps_to_the_context_and_to_answers(calibrated):
    """Prompts without room are not measured; nothing after an EOS is."""
    model = tiny("llama")
    answer = tokens_of(autoregressive(CachedLM(model), PROMPT), 30)
    for prompts in ([[9] * 33, PROMPT], [PROMPT, [9] * (CONTEXT - 1)]):
        _, trees = calibrated(model, model, prompts, eos=answer[5:6])
        roots = [PROMPT[-1], *answer[1:answer.index(answer[5]):2]]  # two tokens a round
        assert [ids[0] for ids in trees] == roots
    with pytest.raises(InputError, match="expected prompts of at most 32 tokens, got none"):
        calibrated(model, model, [[9] * 33])


def test_no_more_children_than_tokens(calibrated, tmp_path, monkeypatch):
    """A pair of 20 tokens, with rates of its own or of more children. Embeddings may be padded
    beyond the tokenizer: a row there is no child."""
    model = tiny("llama")
    draft = near(model, 0.05)
    monkeypatch.setattr(module, "B", 30)
    file, trees = calibrated(model, draft, [[3, 4]], vocab=20)
    assert max(max(ids) for ids in trees) == 19
    assert {len(P) for P in load_rates(file, model, draft).values()} == {20}
    more = rates_file(tmp_path, model, draft, "more", **{"0.0": [0.03] * 30})
    for path in file, more:
        chunks = sequoia(CachedLM(model, 20), CachedLM(draft, 20), [3, 4], nodes=31, depth=1,
                         rates=str(path))
        assert next(chunks)


def test_the_rates_of_the_embedded_pair(embedded):
    """models/sequoia.json is this pair's, and a guess is rarely right at a late rank."""
    target, draft, _ = embedded
    measured = load_rates(f"{module.MODELS}/sequoia.json", target, draft)
    assert [*measured] == [*module.TEMPERATURES]
    for P in measured.values():
        assert len(P) == module.B and 0.8 < P[0] < 0.95 and 0.98 < sum(P) <= 1.001
        assert P[0] > P[1] > P[2] > max(P[6:])
