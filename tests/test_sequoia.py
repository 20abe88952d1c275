"""Sequoia: the best tree, exact sampling without replacement, and the rates of this pair alone."""
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch

import survey.sequoia as module
from common import CachedLM, InputError, Sampler, autoregressive, best_tree, greedy, until
from fake_models import ScriptedLM, Zeros, markov, uncached
from families import CONTEXT, VOCAB, near, tiny
from helpers import ROOT, main, tokens_of
from laws import chi_square_ok, law
from survey import parts
from survey.parts import save_facts
from survey.sequoia import (calibrate, decode, draw_children, list_plans, load_rates, parents_of,
                            report, sequoia, shape_of, tabulate, verify)

PROMPT = [3, 14, 15]
BUSHY = [-1, 0, 0, 0, 1, 1, 2, 4, 4]  # of depth 3; nodes 3, 5, 6, 7 and 8 are leaves


def rates_file(folder, target, draft, P=(0.6, 0.3, 0.1), name="rates.json", **rates) -> str:
    """What `calibrate` would write for this pair."""
    file = folder / name
    save_facts(file, {"target": target, "draft": draft}, rates=rates or {"0.0": P})
    return str(file)


def decoding(target, draft, prompt, parents, sample=greedy, log=None):
    """`decode` as `sequoia` begins it."""
    for lm in (target, draft):
        lm.start(prompt[:-1])
    shape = shape_of(parents)
    return decode(target, draft, prompt[-1], lambda: shape, sample, log)


# -------------------------------------------------------------------------------------- the tree

def ordered_trees(n: int, d: int):
    """All trees of exactly n nodes and at most d levels below the root, as nested tuples."""
    def forests(n: int, d: int):
        if n == 0:
            yield ()
        for first in range(1, n + 1 if d else 1):
            for tree in ordered_trees(first, d - 1):
                yield from ((tree, *rest) for rest in forests(n - first, d))
    return forests(n - 1, d)


def tokens_a_call(tree: tuple, P: tuple) -> float:
    """Proposition 3.4: the sum over nodes of the rates along their paths."""
    return 1 + sum(rate * tokens_a_call(child, P) for rate, child in zip(P, tree))


def nested(parents: list[int], node: int = 0) -> tuple:
    return tuple(nested(parents, i) for i, parent in enumerate(parents) if parent == node)


def some_rates():
    """Falling and not falling with rank, with zeros, few and many, certain ones."""
    torch.manual_seed(0)
    yield from [(0.6, 0.3, 0.1), (0.9, 0.05), (0.2, 0.5, 0.3), (1.0,), (0.5, 0.0, 0.4), (1e-9,) * 3]
    for k in (2, 4, 6):
        for _ in range(4):
            P = torch.rand(k) * torch.tensor([0.9 ** i for i in range(k)])
            yield tuple((P / max(1, P.sum())).tolist())


def test_the_dynamic_program_equals_brute_force():
    """Over all trees of up to 7 nodes, for every bound on the depth."""
    assert [len([*ordered_trees(n, 9)]) for n in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]
    trees = {(n, d): [*ordered_trees(n, d)] for n in range(1, 8) for d in range(7)}
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
    """On trees too large for brute force; to choose greedily is right there, and only there."""
    for P in [(0.7, 0.15, 0.06, 0.03), (0.88, 0.04, 0.02, 0.01), (0.3, 0.25, 0.2)]:
        best = tabulate(P, 64, 12)
        for n, d in itertools.product((2, 9, 33, 64), (1, 3, 12)):
            greedily = sum(node.chance for node in best_tree([list(P)] * d, n))
            assert math.isclose(best[d].G[n], greedily, rel_tol=1e-12), (P, n, d)


def test_the_levels_are_the_draft_calls():
    """And their nodes the rows of these calls; nodes without children are never fed."""
    shape = shape_of(BUSHY)
    assert shape.parents == BUSHY and shape.levels == [[0], [1, 2], [4]]
    assert shape.children == [[1, 2, 3], [4, 5], [6], [], [7, 8], [], [], [], []]
    assert shape.row == {0: 0, 1: 1, 2: 2, 4: 3}
    assert shape_of([-1, 0, 1, 2]).levels == [[0], [1], [2]]
    assert shape_of([-1, 0, 0]).levels == [[0]] and shape_of([-1]).levels == []


@pytest.mark.parametrize("t_target, t_draft, expected", [
    (lambda n: 1, lambda n: 0, 64),            # drafts are free, rows too: the largest
    (lambda n: n, lambda n: 0, 2),             # each row is paid
    (lambda n: 1, lambda n: 9, "one level"),   # draft calls are dear: one level of many children
    (lambda n: 1, lambda n: 0.05 * n, "thin"), (lambda n: 1 + n / 64, lambda n: 0.05, "any")])
def test_measured_costs_choose_the_tree(monkeypatch, t_target, t_draft, expected):
    """The most tokens a second of all sizes and depths, where a draft call is paid by its rows."""
    costs = {"target": t_target, "draft": t_draft}
    monkeypatch.setattr(module, "row_costs", lambda lm, most: [costs[lm](n) for n in range(65)]
                        if most == 64 else None)
    P, (sizes, depths) = (0.6, 0.2, 0.1), module.RANGES.values()
    found, best = [*list_plans(P, sizes, depths, "target", "draft")], tabulate(P, 64, 16)
    pairs = [*itertools.product(sizes, depths)]
    assert len(found) == len(pairs)
    for (n, d), (shape, tokens, seconds) in zip(pairs, found):
        assert shape == shape_of(parents_of(best, n, d))
        assert math.isclose(tokens, tokens_a_call(nested(shape.parents), P), rel_tol=1e-12)
        rows = [len(level) for level in shape.levels]
        assert math.isclose(seconds, t_target(len(shape.parents)) + sum(map(t_draft, rows)))
    shape, *_ = max(found, key=lambda x: x[1] / x[2])
    if isinstance(expected, int):
        assert len(shape.parents) == expected
    if expected == "one level":
        assert len(shape.levels) == 1 and len(shape.parents) > 2
    if expected == "thin":  # with a call of 4 rows at the price of one it is another tree
        assert max(map(len, shape.levels)) <= 2


# --------------------------------------------------------------------- sampling, by enumeration

class Script(Sampler):
    """A sampler with scripted coins, which all fail once the script ends. `weight`: the probability
    of all that happened; `rest`: the distribution that was drawn from at last."""

    def __init__(self, passes=(), *sampling):
        super().__init__(*sampling)
        self.passes, self.used, self.weight, self.rest = [*passes], 0, 1.0, None

    def uniform(self, n, device):
        return [self] * n

    def __lt__(self, ratio):
        """A coin is compared with its chance to pass."""
        if self.used == len(self.passes):
            self.passes.append(False)
        passes, chance = self.passes[self.used], min(float(ratio), 1.0)
        self.used, self.weight = self.used + 1, self.weight * (chance if passes else 1 - chance)
        return passes

    def draw(self, probs):
        self.rest = probs[0].double()
        return [0]


def ways(run, *sampling):
    """(script, run(script)) for all ways that coins can fall."""
    todo = [()]
    while todo:
        given = todo.pop()
        script = Script(given, *sampling)
        yield script, run(script)
        todo += [(*script.passes[:i], True) for i in range(len(given), len(script.passes))]


def log_of(q: torch.Tensor) -> torch.Tensor:
    """As `decode` makes it."""
    return q.log().clamp(min=-1e9)


def orders(q: torch.Tensor, k: int):
    """All (draws, probability) of k tokens of q [V] without replacement; evenly from those left
    where q has no mass left."""
    for draws in itertools.permutations(range(len(q)), k):
        chance, rest = 1.0, q.clone()
        for x in draws:
            if rest.sum() <= 0:
                rest = torch.ones_like(q)
                rest[list(draws[:draws.index(x)])] = 0
            chance *= (rest[x] / rest.sum()).item()
            rest[x] = 0
        if chance > 0:
            yield list(draws), chance


def chances(q, k):
    return {tuple(draws): chance for draws, chance in orders(q, k)}


def outcome(p, q, k, reorder=lambda draws: draws):
    """(the distribution of the token at one node, the probability that a child is accepted)."""
    result, accepted = torch.zeros_like(p), 0.0
    for draws, chance in orders(q, k):
        draws = reorder(draws)
        for script, (i, rest) in ways(lambda script: verify(p, log_of(q), draws, script)):
            if i is None:
                result += chance * script.weight * rest
            else:
                result[draws[i]] += chance * script.weight
                accepted += chance * script.weight
    return result, accepted


def random_pairs():
    """Distributions (p, q) of four tokens: close, far, equal, with zeros on either side, one-hot; p
    after top-p and top-k."""
    torch.manual_seed(0)
    for scale in (0.3, 1.0, 3.0):
        for sampling in [(1.0,), (0.7, 0, 0.8), (1.3, 2)]:
            for _ in range(3):
                p, q = scale * torch.randn(2, 4, dtype=torch.float64)
                p = Sampler(*sampling).probs(p).double()
                yield p / p.sum(), q.softmax(-1)
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    ends = torch.eye(4, dtype=torch.float64)
    yield p, p
    yield (ends[0] + ends[1]) / 2, p
    yield p, 0.2 * ends[1] + 0.8 * ends[2]
    yield p, ends[1]
    yield ends[2], ends[2]
    yield ends[2], ends[1]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_verification_is_exact_by_enumeration(k):
    """V = 4, all orders of k draws: the token has the target's distribution. Theorem 3.7: one child
    is accepted with the best rate there is; all tokens as children leave nothing to reject."""
    for p, q in random_pairs():
        result, accepted = outcome(p, q, k)
        torch.testing.assert_close(result, p, atol=1e-9, rtol=0)
        assert k > 1 or abs(accepted - torch.minimum(p, q).sum()) < 1e-9
        assert k < 4 or abs(accepted - 1) < 1e-9


def test_children_must_be_tried_in_draw_order():
    """In the order of their tokens, or of their probability, the outcome is wrong by far more than
    rounding."""
    for p, q in random_pairs():
        for wrong in (sorted, lambda draws: sorted(draws, key=lambda x: -q[x])):
            if q.min() > 0.05 and (p - q).abs().max() > 0.1:
                assert (outcome(p, q, 3, wrong)[0] - p).abs().max() > 1e-3


def test_draws_are_without_replacement():
    """20,000 rows of three draws: chi-square test of their order (24 cells) at a false-failure
    probability of 1e-6. Where q has mass for two of five tokens the third is any of the others."""
    sample = Sampler(1.0, seed=5)
    q = torch.tensor([0.45, 0.3, 0.2, 0.05]).double()
    some = {}
    for draws in draw_children(log_of(q).expand(20000, 4), 3, sample):
        some[tuple(draws)] = some.get(tuple(draws), 0) + 1
    law = chances(q, 3)
    assert len(law) == 24
    counts = torch.tensor([some.get(draws, 0) for draws in law])
    assert chi_square_ok(counts, torch.tensor([*law.values()]))
    with_replacement = torch.tensor([math.prod(q[list(draws)].tolist()) for draws in law])
    assert not chi_square_ok(counts, with_replacement / with_replacement.sum())
    q = torch.tensor([0, 0.7, 0, 0.3, 0]).double()
    rows = torch.tensor(draw_children(log_of(q).expand(6000, 5), 3, sample))
    assert {1, 3} == set(rows[:, :2].flatten().tolist())
    assert chi_square_ok(rows[:, 2].bincount(minlength=5)[[0, 2, 4]], torch.ones(3) / 3)
    assert draw_children(torch.tensor([[0.1, 3.0, 2.0, 2.5]]), 3, greedy) == [[1, 3, 2]]


def test_noise_is_fresh_in_every_round():
    """A hundred rounds of the same distribution: the tree is not the same each time."""
    log, flat = [], ScriptedLM(lambda tokens: torch.zeros(5))
    chunks = decoding(flat, ScriptedLM(lambda tokens: torch.zeros(5)), [0], [-1, 0, 1, 1],
                      Sampler(1.0, seed=2), log)
    firsts = [next(chunks)[0] for _ in range(100)]
    assert set(firsts) == set(range(5)) and max(map(firsts.count, range(5))) < 45


def test_where_q_has_no_mass_left_children_are_drawn_evenly():
    """A draft that knows one token of five: the other child is any of the rest, 300 rounds."""
    log, sure = [], torch.tensor([0.0] + [-torch.inf] * 4)
    chunks = decoding(ScriptedLM(lambda tokens: torch.zeros(5)), ScriptedLM(lambda tokens: sure),
                      [0], [-1, 0, 0], Sampler(1.0, seed=2), log)
    firsts = [next(chunks)[0] for _ in range(300)]
    assert all(r["ranks"] == [token > 0] for r, token in zip(log, firsts))
    assert chi_square_ok(torch.tensor([firsts.count(x) for x in range(5)]), torch.ones(5) / 5)


def joint(p_of, prompt, n, vocab=3):
    """The probability of each continuation of n tokens."""
    law = torch.ones([vocab] * n, dtype=torch.float64)
    for tokens in itertools.product(range(vocab), repeat=n):
        for i in range(n):
            law[tokens] *= p_of([*prompt, *tokens[:i]])[tokens[i]]
    return law


@pytest.mark.parametrize("sampling, missing", [
    ((1.0, 0, 1.0), []), ((0.8, 0, 0.7), []), ((1.2, 2, 1.0), []), ((1.0, 0, 1.0), [1, 2])])
@pytest.mark.parametrize("parents", [[-1, 0, 0, 1, 1], [-1, 0, 0, 2, 2, 2], [-1, 0, 1]])
def test_a_round_is_exact_by_enumeration(monkeypatch, parents, sampling, missing):
    """V = 3: over all draws of the tree and all ways through it, the first three tokens have the
    target's distribution. `missing`: tokens that the draft has no mass for."""
    sample, prompt = Sampler(*sampling), [0, 1]
    target, logits_of = markov(1, vocab=3), markov(2, vocab=3)
    p_of = {text: sample.probs(target([*text])).double()
            for text in itertools.product(range(3), repeat=2)}

    def draft(tokens):
        logits = logits_of(tokens).clone()
        logits[missing] = -torch.inf
        return logits
    law = joint(lambda tokens: p_of[tuple(tokens[-2:])], prompt, 3)
    found, total, inner = torch.zeros_like(law), 0.0, [*shape_of(parents).row]
    every = [[*itertools.permutations(range(3), parents.count(i))] for i in inner]
    for draws in itertools.product(*every):
        def run(script):
            left = iter(draws)

            def draw(log_q, k, sample):
                """The next rows of the script; and what they weigh."""
                rows = [next(left) for _ in log_q]
                for row, q in zip(rows, log_q):
                    script.weight *= chances(q.softmax(-1), len(row)).get(row, 0.0)
                return [list(row) for row in rows]
            monkeypatch.setattr(module, "draw_children", draw)
            return next(decoding(ScriptedLM(target), ScriptedLM(draft), prompt, parents, script))
        for script, [*guesses, _] in ways(run, *sampling):
            total += script.weight
            if script.weight > 0:
                found[tuple(guesses)] += script.weight * behind(guesses, script.rest, prompt, p_of)
    assert abs(total - 1) < 1e-6
    torch.testing.assert_close(found, law, atol=1e-6, rtol=0)


def behind(guesses, rest, prompt, p_of):
    """The law of what comes behind the guesses, up to three tokens in all: one token of what is
    left, then the target's own."""
    law = rest if len(guesses) < 3 else torch.ones(())
    for n in range(1, 3 - len(guesses)):
        texts = itertools.product(range(3), repeat=n)
        after = [p_of[(*prompt, *guesses, *text)[-2:]] for text in texts]
        law = law[..., None] * torch.stack(after).view([3] * (n + 1))
    return law


# ------------------------------------------------------------------------------ with real models

@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sampled_output_of_real_caches_is_that_without_caches(family):
    """With the same seed, token by token: a row out of place would change some draws. So it has the
    distribution that the enumerations find."""
    model, outputs, logs = tiny(family), [], []
    draft = near(model, 0.04)
    for make in (CachedLM, uncached):
        log = []
        outputs.append(tokens_of(decoding(make(model), make(draft), PROMPT, BUSHY,
                                          Sampler(0.9, top_p=0.95, seed=4), log), 40))
        logs.append(log)
    assert outputs[0] == outputs[1] and logs[0] == logs[1]
    assert {0, 1, 3} <= {r["accepted"] for r in log}
    assert {rank for r in log for rank in r["ranks"]} == {0, 1, 2}


def test_a_low_temperature_comes_down_to_temperature_0():
    """The same trees and the same tokens: where q has next to no mass left, the likeliest of the
    others are still the next children."""
    model, found = tiny("llama"), []
    for sample in (greedy, Sampler(1e-4, seed=1)):
        log, lms = [], [CachedLM(m) for m in (model, near(model, 0.05))]
        found.append((tokens_of(decoding(*lms, PROMPT, BUSHY, sample, log), 40), log))
    assert found[0] == found[1] and {rank for r in log for rank in r["ranks"]} >= {0, 1}


def test_the_clock_chooses_what_is_not_given(tmp_path, monkeypatch):
    """What is timed counts as no call, and the output stays the target's."""
    model = tiny("llama")
    target, draft = CachedLM(model), CachedLM(near(model, 0.02))
    expected, seen = tokens_of(autoregressive(CachedLM(model), PROMPT), 30), []
    rates = rates_file(tmp_path, model, draft.model)

    def spy(P, sizes, depths, *lms):
        seen.append((sizes, depths))
        return list_plans(P, sizes, depths, *lms)
    monkeypatch.setattr(module, "list_plans", spy)
    monkeypatch.setattr(module, "row_costs", lambda lm, most, costs=module.row_costs:
                        seen.append((lm, most)) or costs(lm, most))
    sizes, depths = module.RANGES["nodes"], module.RANGES["depth"]
    for options, given, most in [({}, (sizes, depths), 64), (dict(nodes=8), ([8], depths), 8),
                                 (dict(depth=2), (sizes, [2]), 64)]:
        log, seen[:], target.calls = [], [], 0
        chunks = sequoia(target, draft, PROMPT, rates=rates, log=log, **options)
        assert tokens_of(chunks, 30) == expected and target.calls == len(log)
        assert seen == [given, (target, most), (draft, most)]
        assert 1 <= log[0]["drafted"] < options.get("nodes", 65)
    seen.clear()  # where both are given nothing is timed
    assert next(sequoia(target, draft, PROMPT, rates=rates, nodes=8, depth=2)) == expected[:3]
    assert seen == []


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
    assert len({tuple(x) for x in seen if x[0] < 0}) == 5


def test_the_tree_is_chosen_again_when_the_context_has_doubled(tmp_path, monkeypatch):
    """Rows cost nothing until it has 256 tokens, then each as much as the first."""
    model = tiny("llama", max_position_embeddings=400)
    lms, log = [CachedLM(model), CachedLM(near(model, 0.02))], []
    monkeypatch.setattr(module, "row_costs", lambda lm, most: [
        1.0 if lms[0].length < 256 else float(n) for n in range(most + 1)])
    rates = rates_file(tmp_path, model, lms[1].model)
    prompt = [n * 7 % 61 for n in range(241)]
    chunks = sequoia(*lms, prompt, rates=rates, log=log)
    lengths = [*itertools.accumulate((len(next(chunks)) for _ in range(20)), initial=240)]
    drafted = [(length < 256, r["drafted"]) for length, r in zip(lengths, log)]
    assert len({*drafted}) == 2 and drafted[0][1] > 8 and drafted[-1] == (False, 1)


# --------------------------------------------------------------------------------- calibration

def test_rates_are_those_of_the_nearest_temperature(tmp_path, monkeypatch):
    model, seen = tiny("llama"), []
    rates = rates_file(tmp_path, model, model, **{"0.0": [0.5], "0.6": [0.6, 0], "1.0": [0.7]})
    monkeypatch.setattr(module, "tabulate", lambda P, *_: seen.append(P) or tabulate(P, 2, 1))
    for t in (0, 0.2, 0.4, 0.75, 0.9, 3.0):
        lms = CachedLM(model), CachedLM(model)
        next(sequoia(*lms, PROMPT, nodes=2, depth=1, rates=rates, sample=Sampler(t)))
    assert seen == [(0.5,), (0.5,), (0.6, 1e-9), (0.6, 1e-9), (0.7,), (0.7,)]


@pytest.mark.parametrize("text, message", [
    (None, "No such file"), ("{", "Expecting property name"), ("[]", "list indices"),
    ('{"rates": {}}', "'target'"), ('{"target": [[0.5]], "rates": {"0": [0.9]}}', "another target"),
    ('{"target": 5}', "another target"), ('{"target": "x"}', "type 'str'"),
    ('{"target": [[1, 2], [3]]}', "expected sequence of length"),
    ('{"target": [[null]]}', "NoneType"),
    ("draft: [[0.5]]", "another draft's"), ("rates: 3", "has no attribute 'items'"),
    ("rates: {}", "from 0 to 1"), ('rates: {"0": []}', "from 0 to 1"),
    ('rates: {"0": [0.5, NaN]}', "from 0 to 1"), ('rates: {"0": [1.5]}', "from 0 to 1"),
    ('rates: {"0": 3}', "'int' object is not iterable"), ('rates: {"0": [null]}', "not supported")])
def test_rates_of_another_pair_and_broken_files_are_refused(tmp_path, text, message):
    """In one line that says how to make a file."""
    model, file = tiny("llama"), tmp_path / "rates.json"
    if text and text[0] in "dr":
        name, _, wrong = text.partition(": ")
        save_facts(file, {"target": model, "draft": model}, rates={"0": [0.9]})
        text = json.dumps(json.loads(file.read_text()) | {name: json.loads(wrong)})
        file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        load_rates(str(file), model, model)
    assert "python -m survey.sequoia calibrate" in str(error.value)


def test_swapped_and_other_models_are_refused(tmp_path):
    """Not tuned ones, and not what they are cast to."""
    target, draft = tiny("llama"), tiny("llama", seed=7)
    rates = rates_file(tmp_path, target, draft)
    for pair in [(target, draft), (near(target, 0.05), draft), (target, near(draft, 0.05)),
                 (tiny("llama").bfloat16(), tiny("llama", seed=7).half())]:
        assert load_rates(rates, *pair) == {0.0: (0.6, 0.3, 0.1)}
    for pair, whose in [((draft, target), "target's"), ((target, target), "draft's"),
                        ((tiny("llama", hidden_size=8), draft), "target's"),
                        ((target, tiny("gpt2")), "draft's")]:
        with pytest.raises(InputError, match=f"another {whose}"):
            load_rates(rates, *pair)


def test_rates_are_loaded_once(tmp_path, monkeypatch):
    """Of each file."""
    model, loads = tiny("llama"), []
    target, draft = CachedLM(model), CachedLM(near(model, 0.02))
    files = [rates_file(tmp_path, model, draft.model, name=name) for name in "ab"]
    monkeypatch.setattr(module, "load_rates", lambda *args: loads.append(args) or load_rates(*args))
    for rates in files * 2:
        next(sequoia(target, draft, PROMPT, nodes=2, depth=1, rates=rates))
    assert loads == [(rates, model, draft.model) for rates in files]


def test_another_draft_is_refused_after_the_right_one(tmp_path):
    model = tiny("llama")
    target, draft, other = (CachedLM(x) for x in (model, near(model, 0.02), tiny("llama", seed=7)))
    options = dict(nodes=2, depth=1, rates=rates_file(tmp_path, model, draft.model))
    next(sequoia(target, draft, PROMPT, **options))
    with pytest.raises(InputError, match="another draft's"):
        next(sequoia(target, other, PROMPT, **options))


def test_calibration_and_decoding_on_the_command_line(tmp_path, monkeypatch, capsys):
    """Rates of the embedded pair and of the target as its own draft, which is right at once; each
    file serves its own pair alone."""
    monkeypatch.setattr(module, "TEMPERATURES", (0.0, 1.0))
    monkeypatch.setattr(module, "TOKENS", 6)
    examples, pairs = tmp_path / "prompts.txt", {}
    examples.write_text((ROOT / "models/examples.jsonl").read_text().splitlines()[0])
    for name in ("draft", "target"):
        out = tmp_path / f"{name}.json"
        argv = ["calibrate", "--draft", ROOT / "models" / name, "--prompts", examples,
                "--out", out]
        assert main([sequoia], report, [*map(str, argv)], commands=[calibrate]) == 0
        pairs[name] = json.loads(out.read_text())
    assert pairs["draft"]["draft"] != pairs["target"]["draft"] == pairs["draft"]["target"]
    for rates in pairs["target"]["rates"].values():
        assert rates == [1.0] + [0.0] * 15
    for rates in pairs["draft"]["rates"].values():
        assert 0.5 < rates[0] <= sum(rates) <= 1.001 and len(rates) == 16
    argv = ["--prompt", "Question: 2 + 2", "--nodes", "4", "--depth", "2", "--max-new-tokens", "8",
            "--compare"]
    capsys.readouterr()
    good = [*argv, "--rates", str(tmp_path / "draft.json")]
    assert main([sequoia], report, good, commands=[calibrate]) == 0
    assert "output equals autoregressive output" in capsys.readouterr().err
    bad = [*argv, "--rates", str(tmp_path / "target.json")]
    assert main([sequoia], report, bad, commands=[calibrate]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "another draft's" in error


class Vocabulary(SimpleNamespace):
    """All that is asked of a tokenizer."""

    def __init__(self, n):
        super().__init__(n=n)

    def __len__(self):
        return self.n

    def get_vocab(self):
        return {f"t{i}": i for i in range(self.n)}


def test_a_draft_of_another_vocabulary_is_refused(monkeypatch, tmp_path):
    model = tiny("llama")
    monkeypatch.setattr(parts, "load", lambda *_: (model, Vocabulary(60)))
    with pytest.raises(InputError, match="got another vocabulary"):
        calibrate(model, Vocabulary(61), [PROMPT], out=tmp_path / "rates.json")


def test_calibration_counts_the_children_of_one_level(tmp_path, monkeypatch):
    """The draft's guesses in order of rank at each token of the target's own output: by hand, from
    passes without a cache. After an accepted child the token behind it is skipped."""
    model = tiny("llama")
    small, tokenizer = near(model, 0.05), Vocabulary(VOCAB)
    monkeypatch.setattr(module, "TEMPERATURES", (0.0, 5.0))
    monkeypatch.setattr(module, "TOKENS", 60)
    monkeypatch.setattr(parts, "load", lambda *_: (small, tokenizer))
    monkeypatch.setattr(module, "eos_ids", lambda *_: set())
    calibrate(model, tokenizer, [PROMPT], out=tmp_path / "rates.json")
    text = PROMPT + tokens_of(autoregressive(CachedLM(model), PROMPT), 61)
    with torch.inference_mode():
        order = small(input_ids=torch.tensor([text]), use_cache=False).logits[0].argsort(
            -1, descending=True)
    ranks, at = [], len(PROMPT)
    while at < len(PROMPT) + 60:
        ranks.append(order[at - 1].tolist().index(text[at]))
        at += 2 if ranks[-1] < 16 else 1
    rates = load_rates(str(tmp_path / "rates.json"), model, small)
    expected = [max(ranks.count(b) / len(ranks), 1e-9) for b in range(16)]
    assert rates[0.0] == pytest.approx(expected, abs=1e-4) and expected[1] > 1e-9
    assert rates[5.0][0] > 0.9 > rates[0.0][0]  # where both are nearly flat they agree


def test_the_rates_of_the_embedded_pair(embedded):
    """models/sequoia.json is this pair's, and a guess is rarely right at a late rank."""
    target, draft, _ = embedded
    measured = load_rates(f"{module.MODELS}/sequoia.json", target, draft)
    assert [*measured] == [*module.TEMPERATURES]
    for P in measured.values():
        assert len(P) == module.B and 0.8 < P[0] < 0.95 and 0.98 < sum(P) <= 1.001
        assert P[0] > P[1] > P[2] > max(P[6:])


# ---------------------------------------------------------------------- mistakes and the report

@pytest.mark.parametrize("options", [dict(nodes=1), dict(nodes=-1), dict(nodes=129),
                                     dict(depth=-1), dict(depth=128)])
def test_bad_options_are_refused(options):
    [(name, value)] = options.items()
    with pytest.raises(InputError, match=f"--{name} must be .*, or 0, got {value}$"):
        next(sequoia(None, None, PROMPT, **options))


def test_the_report():
    log = [{"drafted": 15, "accepted": n, "ranks": [0] * n} for n in (4, 0, 1)]
    assert report(SimpleNamespace(log=log)) == "accepted 1.67 of 15 drafted tokens a round"


def test_calibration_keeps_to_the_context_and_to_answers(tmp_path, monkeypatch):
    """Prompts without room are not measured; nothing after an EOS is."""
    model, tokenizer, seen = tiny("llama"), Vocabulary(VOCAB), []
    monkeypatch.setattr(parts, "load", lambda *_: (model, tokenizer))
    monkeypatch.setattr(module, "TEMPERATURES", (0.0,))
    answer = tokens_of(autoregressive(CachedLM(model), PROMPT), 30)
    monkeypatch.setattr(module, "eos_ids", lambda *_: {answer[5]})

    def spy(chunks, limit, eos):
        chunks = list(until(chunks, limit, eos))
        seen.append([token for chunk in chunks for token in chunk])
        return chunks
    monkeypatch.setattr(module, "until", spy)
    for prompts in ([[9] * 33, PROMPT], [PROMPT, [9] * (CONTEXT - 1)]):
        calibrate(model, tokenizer, prompts, out=tmp_path / "rates.json")
    assert seen == [answer[:1 + answer.index(answer[5])]] * 2
    calibrate(model, tokenizer, [[9] * 32], out=tmp_path / "rates.json")
    assert len(seen[-1]) <= 128
    with pytest.raises(InputError, match="expected prompts of at most 32 tokens, got none"):
        calibrate(model, tokenizer, [[9] * 33], out=tmp_path / "rates.json")


def test_no_more_children_than_tokens(tmp_path, monkeypatch):
    """A pair of 20 tokens, with rates of its own or of more children."""
    model, tokenizer = tiny("llama", vocab_size=20), Vocabulary(20)
    monkeypatch.setattr(module, "B", 30)
    monkeypatch.setattr(parts, "load", lambda *_: (near(model, 0.05), tokenizer))
    monkeypatch.setattr(module, "eos_ids", lambda *_: set())
    calibrate(model, tokenizer, [[3, 4]], out=tmp_path / "rates.json")
    draft = near(model, 0.05)
    rates = load_rates(tmp_path / "rates.json", model, draft)
    assert {len(P) for P in rates.values()} == {20}
    expected = tokens_of(autoregressive(CachedLM(model, 20), [3, 4]), 20)
    for path in (tmp_path / "rates.json", rates_file(tmp_path, model, draft, [0.03] * 30, "more")):
        chunks = sequoia(CachedLM(model, 20), CachedLM(draft, 20), [3, 4], nodes=31, depth=1,
                         rates=str(path))
        assert tokens_of(chunks, 20) == expected


def test_noise_reaches_the_rarest_tokens():
    """A token of 2⁻⁴⁰ is drawn where its random number is that near to 1."""
    class Noise(Sampler):
        def uniform(self, shape, device):
            u = torch.full(shape, 0.5, dtype=torch.float64)
            u[:, 1] = 1 - 2.0 ** -43
            return u
    p = torch.tensor([[0.5, 2.0 ** -40, 0.5 - 2.0 ** -40]], dtype=torch.float64)
    assert draw_children(p.log(), 2, Noise(1.0))[0][0] == 1


def test_trees_of_more_than_64_nodes_at_the_end_of_the_context(tmp_path):
    model = tiny("gpt2", n_positions=40)
    target, draft = CachedLM(model), CachedLM(near(model, 0.02))
    n, rates = 40 - len(PROMPT), rates_file(tmp_path, model, draft.model)
    expected, log = tokens_of(autoregressive(target, PROMPT), n), []
    chunks = sequoia(target, draft, PROMPT, nodes=128, depth=6, rates=rates, log=log)
    assert tokens_of(chunks, n) == expected and {r["drafted"] for r in log} == {127}


def test_calibration_counts_the_tokenizers_tokens_alone(tmp_path, monkeypatch):
    """Embeddings may be padded beyond it: a row there is no child."""
    model, tokenizer, seen = tiny("llama"), Vocabulary(20), []
    monkeypatch.setattr(parts, "load", lambda *_: (model, tokenizer))
    monkeypatch.setattr(module, "TEMPERATURES", (0.0,))
    monkeypatch.setattr(module, "eos_ids", lambda *_: set())
    real = module.grow
    monkeypatch.setattr(module, "grow", lambda *given: seen.append(real(*given)) or seen[-1])
    calibrate(model, tokenizer, [PROMPT], out=tmp_path / "rates.json")
    assert max(max(ids) for ids, _ in seen) < 20


def test_a_guess_of_no_probability_is_never_accepted():
    p, q = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
    assert verify(p, q.log(), [0], Zeros())[0] is None
