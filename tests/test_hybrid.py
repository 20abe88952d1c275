"""The hybrid: chances by hand, rows and passes that pay. That its text is the target's is in
test_lossless.py, that its chances are honest in test_embedded.py, and the trust in test_fit.py.
"""
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from families import tiny
from hybrid import guessers
from hybrid import hybrid as module
from hybrid.guessers import RANKS, Trained, pool_chances
from hybrid.hybrid import choose_tree, estimate_prices, grow_hybrid, hybrid, measure_costs
from hybrid.ngrams import STORE, NGrams, class_of_variety
from support.layers import FeatureLM
from survey.eagle import Pairs
from survey.recycling import Successors
from survey.rest import BOUNDARY, Datastore, as_text, as_tokens
from test_lossless import FILES, METHODS

HALF = [[[0.5] * 3] * 5] * 3
POOL = [3.0, 0.5, 0.5, 0.9]


def random_part(model, kind: str):
    """Make a random part of a kind, and a target that finds it under ("KIND", "part")."""
    target = FeatureLM(model)
    ours, others = METHODS[kind](model), METHODS["hybrid, eagle"](model)
    target.memo = {(kind, "part"): ours.options["trained"]} | others.memo(target)
    return target, target.memo[kind, "part"]


# ----------------------------------------------------------------------------------- n-grams

def test_the_example_of_the_header():
    """x y stands for "on the". After it came m, m, h; after other y came m, m, h, c, c, c, c."""
    trust = [[[0.0] * 3 for _ in range(5)] for _ in range(2)]
    trust[0][2][2], trust[0][3][1] = 0.6, 0.5
    ngrams = NGrams("xym1xym2xyh3ym4ym5yh6yc7yc8yc9yc0xy", Datastore(), trust)
    assert ngrams.predict("") == pytest.approx({"m": 0.48, "h": 0.24, "c": 0.08})
    assert [class_of_variety(Counter(x)) for x in ("aaa", "aaabbb", "aabbb")] == [0, 1, 2]


def test_the_longest_suffix_comes_first_and_of_equals_the_text():
    """A suffix may end in the path. Shorter ones are asked until nearly no mass is left. The end of
    a text of the datastore is no follower."""
    sure = [[[0.8] * 3] * 5] * 2
    ngrams = NGrams("abcdefghxabcde", Datastore("fghy" + BOUNDARY + "gh" + BOUNDARY), sure)
    found = [(k, dict(counts)) for (k, *_), counts in ngrams.list_entries("fgh")]
    assert found == [*[(0, {"x": 1})] * 3, (1, {"y": 1}), (0, {"x": 1}), (1, {"y": 1})]
    assert ngrams.predict("fgh")["x"] == pytest.approx(1 - 0.2 ** 3)
    assert ngrams.count_followers(STORE, "g") is ngrams.count_followers(STORE, "g")  # kept
    assert len([*NGrams("a", Datastore("ab" + BOUNDARY), sure).list_entries("")]) == 1
    ngrams = NGrams("pqbxxab", Datastore("aby"), sure)
    assert ngrams.predict("") == pytest.approx({"y": 0.8 + 0.2 * 0.2 * 0.8, "x": 0.2 * 0.8})


def test_what_the_target_said_comes_last():
    """"ab" and "b" were followed by z once in the text. The target said c, a and d after b."""
    trust = [[[0.5] * 3] * 5, [[0.0] * 3] * 5, [[0.4] * 3] * 5]
    successors = Successors()
    successors.rows = {as_tokens("b")[0]: as_tokens("cad")}
    successors.hits[:3] = [420, 110, 50]
    found = NGrams("abzq", Datastore("q"), trust, successors).predict("ab")
    mass = 0.25 * 0.4 / 580
    assert found == pytest.approx({"z": 0.75, "c": mass * 420, "a": mass * 110, "d": mass * 50})


# ------------------------------------------------------------------------------------ the tree

def part_of(predict, depth=1, passes=0) -> SimpleNamespace:
    """Make a part that guesses by a function of the path, for which it takes so many passes."""
    return SimpleNamespace(predict=predict, depth=depth, count_passes=lambda path: passes)


def test_the_best_nodes_come_first_and_a_part_is_asked_as_deep_as_it_guesses():
    """A part that says nothing changes nothing."""
    ngrams, asked = NGrams("abcabdab", Datastore("q"), HALF), []

    def guess(path):
        asked.append(path)
        return {"x": 0.9, "c": 0.1}
    ids, parents, chances = grow_hybrid(ngrams, part_of(guess), POOL, 20, 0.01)
    pooled = pool_chances({"x": 0.9, "c": 0.1}, ngrams.predict(""), POOL[:3])
    edges = [as_text([ids[parent], node]) for node, parent in zip(ids, parents)]
    assert asked == [""] and chances == sorted(chances, reverse=True) and chances[0] == 1
    assert chances[edges.index("bc")] == pytest.approx(pooled["c"])
    assert chances[edges.index("ca")] == pytest.approx(pooled["c"] * ngrams.predict("c")["a"])
    assert grow_hybrid(ngrams, part_of(guess), POOL, 3, 0.01)[0] == ids[:3]
    found = grow_hybrid(ngrams, part_of(lambda path: {"x": 0.0}), POOL, 20, 0.01)
    assert found == grow_hybrid(ngrams, None, [], 20, 0.01)


@pytest.mark.parametrize("passes, price, asked", [
    (0, 9.0, ["", "d", "c"]), (1, 0.3, [""]), (1, 0.46, []), (2, 0.22, [""]), (2, 0.24, []),
    (1, 0.1, ["", "d"])])
def test_passes_are_bought_where_they_pay(passes, price, asked, monkeypatch):
    """A pass brings the node's chance x the chance that the n-grams are wrong x .9 tokens. These
    are .5 x .9 at the root, and below it .45 x .25 x .9 and .1 x 1 x .9. What takes no pass is
    always asked."""
    ngrams, seen = NGrams("ab", Datastore("q"), HALF), []
    known = {"": {"d": 0.5}, "d": {"e": 0.75}}
    monkeypatch.setattr(ngrams, "predict", lambda path: known.get(path, {}))
    found = {"d": 0.45, "c": 0.1}
    monkeypatch.setattr(module, "pool_chances", lambda p, q, exponents: found if "d" in q else {})
    part = part_of(lambda path: seen.append(path) or {"c": 1.0}, 9, passes)
    grow_hybrid(ngrams, part, [0.0, 1.0, 1.0, 0.9], 20, 0.01, price)
    assert [path for path in seen if path in ("", "d", "c")] == asked


@pytest.mark.parametrize("recent, row, rate", [
    ([], 0.1, 1 / 2.1), ([(1, 9.0, 0.0, 2)] * 20, 0, 41 / (2.1 + 180)),  # no slope without width
    ([(r, 2 + 0.5 * r, 0.4 * r, 3) for r in (2, 4, 8, 12) * 16], 0.1, 193 / (2.1 + 64 * 5.25))])
def test_prices(recent, row, rate, monkeypatch):
    """As measured at first, then as late calls took, without the passes of the part. A row and a
    pass of 3 s must bring what their time is worth."""
    costs = [0.0] + [2 + 0.1 * r for r in range(1, 17)]  # of r rows
    assert estimate_prices(costs, recent) == pytest.approx((row, rate))
    monkeypatch.setattr(module, "grow_hybrid", lambda *given: (given[4:], [-1, 0], [1.0, 1.0]))
    found = choose_tree(None, None, [], costs, 3.0, recent)[0]
    assert found == pytest.approx((max(0.01, row * rate), 3 * rate))


# ------------------------------------------------------------------------------ a trained part

@pytest.mark.parametrize("kind", module.GUESSES[1:])
def test_a_part_reads_all_pairs_that_wait(kind):
    """Asked after every token, after some, or told most in a prompt: the same chances. A part that
    overflows gives none, and one without a pair no token."""
    model, text, found = tiny("llama"), [3, 14, 15, 9, 2, 6, 5, 35, 8], []
    target, weights = random_part(model, kind)
    part = Trained(target, kind, "part")
    target.start(text, taps=part.taps)
    for ends in (range(1, 9), [1, 3, 4, 8], [7, 8]):
        part.start(Pairs(target.features[:0], []))
        assert part.predict() == {}
        for first, end in zip([0, *ends], ends):
            part.add(Pairs(target.features[first:end], text[first + 1:end + 1]))
            if end != 3:
                chances = part.predict()
        found.append(chances)
    for chances in found[1:]:
        assert found[0] == pytest.approx(chances, rel=1e-4) and len(chances) == RANKS
    if kind == "dflash":  # each depth by its own row of the block
        logits = weights.add_markov(part.passes[""][1], torch.tensor(6))
        assert max(part.predict("\x07").values()) == pytest.approx(logits.softmax(-1).max().item())
    if kind in guessers.LAYERS:  # branches in any order, each below its own path
        paths = ["\x07", "\x08", "\x07\x09"]
        asked = {path: part.predict(path) for path in paths}
        assert part.layer.parents == [-1, -1, 0]
        part.start(Pairs(target.features[:3], text[1:4]))
        part.add(Pairs(target.features[3:8], text[4:]))  # six pairs wait
        for path in reversed(paths):
            assert part.predict(path) == pytest.approx(asked[path], rel=1e-4)
    # Row i of the part's LM head stands for token vocab[i], here for 60 in the place of 0.
    weights.vocab = weights.vocab.flip(0)
    part.start(Pairs(target.features[:8], text[1:]))
    expected = {as_text([60 - as_tokens(x)[0]]): chance for x, chance in found[0].items()}
    assert part.predict() == pytest.approx(expected, rel=1e-4)
    for p in weights.parameters():
        p.requires_grad_(False).fill_(torch.nan)
    part.start(Pairs(target.features, text))
    assert not any(part.predict().values())


@pytest.mark.parametrize("kind, seconds", [("dflash", 2.0), ("eagle", 8.0)])
def test_each_depth_of_a_block_pays_its_share(kind, seconds, monkeypatch):
    """A pass takes 8 s here, and the block guesses for four depths. A path takes a pass for each of
    EAGLE's nodes."""
    monkeypatch.setattr(guessers, "row_costs", lambda lm, rows: [8.0] * (1 + rows))
    part = Trained(random_part(tiny("llama"), kind)[0], kind, "part")
    part.passes = {}
    assert part.time_pass() == seconds and part.count_passes("xy") == (1 if kind == "dflash" else 3)


@pytest.mark.parametrize("step, slope, least, most", [
    (0.0, 0.0, 20, 64), (0.0, 0.1, 2, 18), (9.0, 0.0, 1, 1)])
def test_trees_are_as_wide_as_pays(step, slope, least, most):
    """A second row takes a step by the clock, and each row more a slope by the latest calls."""
    recent = [(n, 1 + slope * (n - 1), 0.0, 1) for n in (1, 8, 16)] * 20
    costs = [1 + step * (n > 1) for n in range(65)]
    ngrams = NGrams("abcabdab", Datastore("q"), HALF)
    ids, parents, chances = choose_tree(ngrams, None, [], costs, 0.0, recent)
    assert least <= len(ids) == len(parents) == len(chances) <= most


def test_costs_are_measured_anew_for_a_longer_context_and_for_another_part(monkeypatch):
    target, found = FeatureLM(tiny("llama")), []
    parts = [None, *(SimpleNamespace(part=x, time_pass=lambda x=x: x) for x in (7, 8))]
    monkeypatch.setattr(module, "row_costs", lambda lm, most: [lm.length, most])
    for target.length in 3, 300, 4:
        found += [measure_costs(target, part) for part in parts]
    assert found == [([n, 64], x) for n in (3, 300, 3) for x in (0.0, 7, 8)]


def test_prices_are_those_of_the_latest_calls(monkeypatch):
    """Each call is noted with its rows, its passes of 0.5 s and its tokens, and the time in which
    costs are measured is no part of it. What the target said after rejected nodes is learnt too."""
    target, _ = random_part(tiny("llama"), "eagle")
    noted, log, known, measured = [], [], Successors(), []
    monkeypatch.setattr(module, "RECENT", 3)
    monkeypatch.setattr("time.perf_counter", lambda: len(measured))
    monkeypatch.setattr(module, "measure_costs",
                        lambda *_: measured.append(0) or ([1.0] * 65, 0.5))
    monkeypatch.setattr(module, "choose_tree", lambda ngrams, part, pool, costs, a_pass, recent:
                        noted.append([*recent]) or grow_hybrid(ngrams, part, pool, 9, 0.01))
    chunks = hybrid(target, [3, 1, 4], log=log, successors=known, **FILES)
    lengths = [len(next(chunks)) for _ in range(5)]
    calls = [(r["guessed"] + 1, 0, 0.5 * r["passes"], n) for r, n in zip(log, lengths)]
    assert noted[-1] == calls[1:4] and log[0]["passes"]
    assert len(known.rows) > sum(lengths)
