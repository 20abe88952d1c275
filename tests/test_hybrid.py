"""The hybrid: chances are what is accepted, the width is what pays, trust fits what happened."""
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from common import InputError, autoregressive
from families import FAMILIES, SCALED, tiny
from helpers import ROOT, per_call, tokens_of
from survey import dflash, eagle3
from survey import hybrid as module
from survey.eagle import EagleLayer, Pairs, feed
from survey import guessers
from survey import trust as fitting
from survey.guessers import LAYERS, RANKS, Trained
from survey.hybrid import choose_width, estimate_prices, grow_hybrid, hybrid, report
from survey.medusa import Heads
from survey.ngrams import NGrams
from survey.recycling import Successors
from survey.rest import BOUNDARY, Datastore, as_text, as_tokens
from survey.trust import CLASSES, fit, load_trust, replay_part
from training.layers import FeatureLM
from training.parts import save_facts
from training.trust import fit_pool, fit_trust, pool_chances, split_chance
from training.released import some_weights

HALF = [[[0.5] * 3] * 5] * 3
KINDS = module.GUESSES[1:]
POOL = [3.0, 0.5, 0.5, 0.9]
FILES = dict(datastore="store", trust="trust", adapter="part")


def prepared(model, texts=((3, 14, 15, 9, 2, 6),)) -> FeatureLM:
    """Make a target with a datastore of texts, trust of one half, and random parts at hand."""
    target = FeatureLM(model)
    pools = {"none": []} | dict.fromkeys(KINDS, POOL)
    draft = EagleLayer(model, seed=3)
    draft.accept = [[0.5]]
    target.memo |= {("rest", "store"): Datastore(BOUNDARY.join(as_text(x) for x in texts)),
                    ("trust", "trust"): {"trust": HALF, "pools": pools}, ("eagle", "part"): draft}
    for kind in ("medusa", "hydra"):
        torch.manual_seed(3)
        heads = Heads(model, kind, 2)
        for p in heads.trainable().values():
            p.data.normal_(0, 0.3)
        target.memo[kind, "part"] = heads
    target.memo["dflash", "part"] = block_draft(model)
    target.memo["eagle3", "part"] = eagle3_draft(model)
    target.memo["trust", "trust"]["parts"] = {
        kind: some_weights(target.memo[kind, "part"]) for kind in KINDS}
    return target


def eagle3_draft(model, vocab=None) -> eagle3.Eagle3Layer:
    """Make a random draft of EAGLE-3. It taps what the LM head reads, as the other parts do."""
    vocab = vocab or range(len(model.get_output_embeddings().weight))
    return eagle3.Eagle3Layer(model, eagle3.make_config(model), [2], vocab, seed=3)


def block_draft(model, vocab=None) -> dflash.BlockDraft:
    """Make a random draft of blocks. It taps what the LM head reads, as the other parts do."""
    draft = dflash.BlockDraft(model, [2], B=4, markov=8, vocab=vocab)
    rng = torch.Generator().manual_seed(3)
    for p in draft.trainable().values():
        p.data = 0.3 * torch.randn(p.shape, generator=rng)
    draft.temperatures = [0.8, 1.0, 1.3, 1.7]
    return draft


# ----------------------------------------------------------------------------------- n-grams

def test_the_example_of_the_header():
    """x y stands for "on the". After it came m, m, h; after other y came m, m, h, c, c, c, c."""
    trust = [[[0.0] * 3 for _ in range(5)] for _ in range(2)]
    trust[0][2][2], trust[0][3][1] = 0.6, 0.5
    ngrams = NGrams("xym1xym2xyh3ym4ym5yh6yc7yc8yc9yc0xy", Datastore(), trust)
    assert ngrams.predict("") == pytest.approx({"m": 0.48, "h": 0.24, "c": 0.08})


def test_predictions_by_hand():
    """Text "a b a c" and path "a b": after "a b" once a; after "b" once a, in the text; the store
    has "b" before c three times and before d once."""
    trust = [[[0.1 * (1 + k) + 0.01 * often + 0.001 * kind for kind in range(3)]
              for often in range(5)] for k in range(2)]
    store = Datastore("bcbcbcbd")
    found = NGrams("abac", store, trust).predict("ab")
    ngrams = NGrams("abacab", store, trust)
    assert ngrams.predict("") == pytest.approx(found)
    t1, t2, t3 = 0.1, 0.1, 0.2 + 0.01 * 2 + 0.001 * 2  # 4 times, 2 followers: more than a third
    left = (1 - t1) * (1 - t2)
    assert found == pytest.approx({"a": t1 + (1 - t1) * t2, "c": left * t3 * 0.75,
                                   "d": left * t3 * 0.25})
    assert [place for place, _ in ngrams.list_entries("")] == [(0, 0, 0), (0, 0, 0), (1, 2, 2)]


@pytest.mark.parametrize("text, entries", [
    ("ab" * 9 + BOUNDARY + "a", [((1, 3, 0), Counter(b=9))]),
    (BOUNDARY.join(["ab", "ac"] * 3), [((1, 3, 1), Counter(b=3, c=3))])])
def test_ends_of_texts_are_no_followers_and_a_third_is_few(text, entries):
    assert [*NGrams("xz", Datastore(text), HALF).list_entries("a")] == entries


def test_the_longest_suffix_comes_first_and_of_equals_the_text():
    """Of 8 tokens too; shorter ones are asked until nearly no belief is left."""
    sure = [[[0.8] * 3] * 5] * 2
    ngrams = NGrams("abcdefghxabcdefgh", Datastore("fghy"), sure)
    found = [(k, dict(counts)) for (k, *_), counts in ngrams.list_entries("")]
    assert found == [*[(0, {"x": 1})] * 3, (1, {"y": 1}), (0, {"x": 1}), (1, {"y": 1})]
    assert ngrams.predict("")["x"] == pytest.approx(1 - 0.2 ** 3)
    ngrams = NGrams("pqbxxab", Datastore("aby"), sure)
    assert ngrams.predict("") == pytest.approx({"y": 0.8 + 0.2 * 0.2 * 0.8, "x": 0.2 * 0.8})


def test_what_the_target_said_comes_last():
    """The text and a path end with b. The target said c, a and b after b, and x after others."""
    trust = [[[0.0] * 3 for _ in range(5)] for _ in range(3)]
    trust[0][0][0] = 0.5  # "ab" and "b" in the text, followed by z once
    trust[2][4][1] = trust[2][4][0] = 0.4  # many times by the rates, one token or several
    successors = Successors()
    successors.rows = {token: as_tokens(row) for token, row in zip(as_tokens("bz"), ("cad", "x"))}
    ngrams = NGrams("abzq", Datastore("q"), trust, successors)
    successors.hits[:4] = [420, 110, 50, 30]
    mass = 0.25 * 0.4
    assert ngrams.predict("ab") == pytest.approx({
        "z": 0.75, "c": mass * 420 / 580, "a": mass * 110 / 580, "d": mass * 50 / 580})
    assert ngrams.predict("xz") == pytest.approx({"q": 0.5, "x": 0.5 * 0.4})
    assert ngrams.predict("y") == {}


def test_a_run_learns_from_all_nodes_and_keeps_what_it_learnt():
    """What it learns after a token is what the target says after the token's latest node, from
    prompt to prompt. Then it is guessed: the same prompt takes fewer calls the second time."""
    model = tiny("llama")
    answer = tokens_of(autoregressive(FeatureLM(model), [3, 14, 15]), 40)
    target, successors, fed = prepared(model), Successors(), {}

    def forward(ids, parents=None, **how):
        logits = FeatureLM.forward(target, ids, parents, **how)
        if parents is not None:
            fed.update(zip(ids, logits.topk(8).indices.tolist()))
        return logits
    target.forward = forward
    calls = []
    for _ in range(2):
        before = target.calls
        assert tokens_of(hybrid(target, [3, 14, 15], guess="none", nodes=16, successors=successors,
                                **FILES), 40) == answer
        calls.append(target.calls - before)
        assert {token: successors.rows[token] for token in fed} == fed
    assert calls[1] < calls[0] and len({*fed} - {*answer, 15}) > 3


def test_a_text_that_grows_is_as_one_that_is_whole():
    text = "".join(random.Random(0).choices("abc", k=400))
    grown = NGrams(text[:7], Datastore("q"), HALF)
    for i in range(7, 400, 3):
        grown.add(text[i:i + 3])
    whole = NGrams(text, Datastore("q"), HALF)
    assert grown.text == text and grown.text_followers == whole.text_followers
    assert {len(s) for s in whole.text_followers} == {1, 2, 4, 8}
    after = [text[i + 1] for i in range(399) if text[i] == "a"]
    assert whole.count_followers(0, "a") == Counter(after)


# ------------------------------------------------------------------------------------ the tree

def part_of(predict, depth=1, passes=0) -> SimpleNamespace:
    """Make a part that guesses by a function of the path, for which it takes so many passes."""
    return SimpleNamespace(predict=predict, depth=depth, count_passes=lambda path: passes)


def test_the_best_nodes_come_first_and_a_guess_at_the_root_alone():
    ngrams, asked = NGrams("abcabdab", Datastore("q"), HALF), []

    def guess(path):
        asked.append(1)
        return {"x": 0.9, "c": 0.1}
    ids, parents, chances = grow_hybrid(ngrams, part_of(guess), POOL, 20, 0.01)
    paths = [""]
    for node, parent in zip(ids[1:], parents[1:]):
        paths.append(paths[parent] + as_text([node]))
    known = dict(zip(paths, chances))
    assert len(asked) == 1 and as_text(ids[:1]) == "b" and len(known) == len(paths)
    assert chances == sorted(chances, reverse=True) and chances[0] == 1 and chances[-1] >= 0.01
    pooled = pool_chances({"x": 0.9, "c": 0.1}, ngrams.predict(""), POOL[:3])
    assert known["x"] == pytest.approx(pooled["x"]) and known["c"] == pytest.approx(pooled["c"])
    assert known["ca"] == pytest.approx(known["c"] * ngrams.predict("c")["a"])
    assert grow_hybrid(ngrams, part_of(guess), POOL, 3, 0.01)[0] == ids[:3]


@pytest.mark.parametrize("passes, price, asked", [
    (0, 9.0, ["", "d", "c"]),  # what takes no pass is always asked
    (1, 0.0, ["", "d", "c"]),  # and so is what costs nothing
    (1, 0.3, [""]),  # .5 x .9 at the root. Below it .45 x .25 x .9 and .1 x 1 x .9 tokens
    (1, 0.46, []), (2, 0.22, [""]), (2, 0.24, []),
    (1, 0.1, ["", "d"])])
def test_passes_are_bought_where_they_pay(passes, price, asked, monkeypatch):
    """A pass brings the node's chance x the chance that the n-grams are wrong x .9 tokens."""
    ngrams, seen = NGrams("ab", Datastore("q"), HALF), []
    known = {"": {"d": 0.5}, "d": {"e": 0.75}}
    monkeypatch.setattr(ngrams, "predict", lambda path: known.get(path, {}))
    found = {"d": 0.45, "c": 0.1}
    monkeypatch.setattr(module, "pool_chances", lambda p, q, exponents: found if "d" in q else {})

    def guess(path):
        seen.append(path)
        return {"c": 1.0}
    grow_hybrid(ngrams, part_of(guess, 9, passes), [0.0, 1.0, 1.0, 0.9], 20, 0.01, price)
    assert [path for path in seen if path in ("", "d", "c")] == asked


def test_a_part_that_says_nothing_changes_nothing():
    """And a tree of the root alone asks none."""
    ngrams, asked = NGrams("abcabdab", Datastore("q"), HALF), []
    grow_hybrid(ngrams, part_of(asked.append), POOL, 1, 0.01)
    assert asked == []
    for nothing in ({}, {"x": 0.0}):
        found = grow_hybrid(ngrams, part_of(lambda path: nothing), POOL, 20, 0.01)
        assert found == grow_hybrid(ngrams, None, [], 20, 0.01)


def test_a_pool_by_hand():
    """e^c p^a q^b of x is 2 x .81 x .5, of y .1 in place of .3 x q, since the part alone names it.
    z is named by the n-grams alone."""
    exponents = [torch.tensor(2.0).log().item(), 2.0, 1.0]
    found = pool_chances({"x": 0.9, "y": 0.3}, {"x": 0.5, "z": 0.2}, exponents)
    x, y, z = 2 * 0.81 * 0.5, 2 * 0.09 * 0.001, 2 * 0.001 ** 2 * 0.2
    total = 1 + x + y + z
    assert found == pytest.approx({"x": x / total, "y": y / total, "z": z / total}, rel=1e-4)


def test_of_equally_likely_nodes_the_first_comes_first():
    ngrams = NGrams("abxacyaa", Datastore("q"), HALF)  # b, c, a, once each
    assert as_text(grow_hybrid(ngrams, None, [], 4, 0.01)[0]) == "abca"


COSTS = [0.0] + [2 + 0.1 * r for r in range(1, 17)]  # of r rows


@pytest.mark.parametrize("recent, row, rate", [
    ([], 0.1, 1 / 2.1),
    ([(1, 9.0, 0.0, 2)] * 20, 0, 41 / (2.1 + 180)),  # long without guesses: no row's price
    ([(r, 2 + 0.5 * r, 0.0, 3) for r in (2, 4, 8, 12) * 16], 0.5, 193 / (2.1 + 64 * 5.25)),
    ([(r, 2 + 0.5 * r, 0.4 * r, 3) for r in (2, 4, 8, 12) * 16], 0.1, 193 / (2.1 + 64 * 5.25))])
def test_prices(recent, row, rate):
    """As measured at first, then as late calls took, without the passes of the part."""
    assert estimate_prices(COSTS, recent) == pytest.approx((row, rate), abs=0.06)
    assert estimate_prices(COSTS, recent)[1] == pytest.approx(rate)


@pytest.mark.parametrize("chances, costs, rate, width", [
    ([1, .5, .3, .1], [1, 1.6, 1.6, 1.6], 1.0, 4), ([1, .5], [1, 2], 1.0, 1),
    ([1, .5], [1, 2], 0.1, 2)])
def test_width(chances, costs, rate, width):
    """0.9 more tokens for 0.6 seconds more, half a token for a second, or for a tenth of one."""
    assert choose_width(chances, [torch.inf, *costs], rate) == width


# ------------------------------------------------------------------------------ a trained part

def guesses_of(logits) -> dict[str, float]:
    best = logits.softmax(-1).topk(RANKS)
    return dict(zip(as_text(best.indices.tolist()), best.values.tolist()))


def test_a_head_by_hand():
    """Hydra's first head reads the last feature and the token after it. What the model makes of its
    LM head's output counts."""
    model, text = tiny("llama"), [3, 14, 15, 9]
    target = prepared(model)
    target.start(text)
    heads, part = target.memo["hydra", "part"], Trained(target, "hydra", "part")
    part.start(Pairs(target.features[:3], text[1:]))
    embedding = model.get_input_embeddings()(torch.tensor([9]))
    read = torch.cat([target.features[2:3], embedding], 1)
    logits = model.lm_head(heads.R[0](read) + torch.nn.functional.silu(heads.W[0](read)))[0]
    assert part.predict() == pytest.approx(guesses_of(logits))
    part.to_logits = lambda x: 2 * x
    assert part.predict() == pytest.approx(guesses_of(2 * logits))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_guesses_the_tokens_that_it_has(kind):
    """A part that overflows gives them no chance. One without a pair gives no token."""
    model, text = tiny("llama"), [3, 14, 15, 9]
    target = prepared(model)
    target.start(text)
    if kind in ("dflash", "eagle3"):
        make = block_draft if kind == "dflash" else eagle3_draft
        target.memo[kind, "part"] = make(model, [2, 3, 5, 7, 11, 13])
    else:
        target.memo[kind, "part"].keep([2, 3, 5, 7, 11, 13])
    part = Trained(target, kind, "part")
    for weight in 0.1, torch.nan:
        for p in part.part.parameters():
            if p.requires_grad:
                p.data.fill_(weight)
        part.start(Pairs(target.features[:3], text[1:]))
        chances = part.predict()
        assert {*as_tokens("".join(chances))} == {2, 3, 5, 7, 11, 13}
        assert any(chances.values()) == (weight == 0.1)
    part.start(Pairs(target.features[:0], []))
    assert part.predict() == {}


def test_a_block_guesses_for_all_depths_by_hand():
    """Asked after a path, it says what its row of that depth says after the path's last token, and
    the block runs once a round."""
    model, text = tiny("llama"), [3, 14, 15, 9]
    target = prepared(model)
    target.start(text)
    draft, part = target.memo["dflash", "part"], Trained(target, "dflash", "part")
    part.start(Pairs(target.features[:3], text[1:]))
    lm = dflash.BlockLM(draft.lm)
    lm.start([])
    with torch.inference_mode():
        z = dflash.run_block(draft, lm, draft.fuse(target.features[:3]), 9)
    before = part.layer.calls
    assert part.count_passes("") == part.count_passes("x") == 1 and part.layer.length == 2
    for path, last in (([7, 5], 5), ([], 9), ([7, 6, 8], 8)):
        with torch.inference_mode():
            logits = draft.add_markov(z[len(path)], torch.tensor(last))
        expected = guesses_of(logits / draft.temperatures[len(path)])
        assert part.predict(as_text(path)) == pytest.approx(expected, rel=1e-4)
        assert part.count_passes("") == part.count_passes("xyz") == 0
    assert part.layer.calls == before + 1 and part.layer.length == 3 and part.depth == 4


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_guesses_after_a_path_by_hand(kind):
    """The row of a guess reads it and its parent's feature, below its parent's row. A path whose
    parents were not asked takes a pass for each of them, and no row stays in the context."""
    model, text = tiny("llama"), [3, 14, 15, 9]
    target = prepared(model)
    target.start(text)
    draft, part = target.memo[kind, "part"], Trained(target, kind, "part")
    pairs = Pairs(target.features[:3], text[1:])
    part.start(pairs)
    assert part.layer.length == 2  # the prompt is read, up to the pair with the root
    lm = FeatureLM(draft.lm)
    lm.start([])
    with torch.inference_mode():
        feed(draft, lm, [pairs])
        lm.forward(draft.join(*Pairs(lm.features[-1:], [7])), [-1])
        first = lm.features[-1:]
        logits = {"75": lm.forward(draft.join(*Pairs(first, [5])), [0])[0]}
        logits["76"] = lm.forward(draft.join(*Pairs(first, [6])), [0])[0]
    paths = {"75": as_text([7, 5]), "76": as_text([7, 6])}
    for name, passes in (("75", 3), ("76", 1)):
        assert part.count_passes(paths[name]) == passes
        expected = guesses_of(logits[name])
        assert part.predict(paths[name]) == pytest.approx(expected, rel=1e-4)
    assert len(part.rows) == 4 and part.count_passes("") == 0
    part.add(Pairs(target.features[3:], [7]))
    assert part.layer.length == 3 and part.layer.parents == [] and part.count_passes("") == 1


@pytest.mark.parametrize("kind, seconds", [("dflash", 2.0), ("eagle", 8.0), ("eagle3", 8.0)])
def test_each_depth_of_a_block_pays_its_share(kind, seconds, monkeypatch):
    """A pass takes 8 s here, and the block guesses for four depths."""
    monkeypatch.setattr(guessers, "row_costs", lambda lm, rows: [8.0] * (1 + rows))
    assert Trained(prepared(tiny("llama")), kind, "part").time_pass() == seconds


def test_deeper_nodes_are_asked_as_far_as_a_block_goes():
    ngrams, asked = NGrams("abcabdab", Datastore("q"), HALF), []

    def guess(path):
        asked.append(path)
        return {"xyz"[len(path)]: 0.8}
    ids, _, chances = grow_hybrid(ngrams, part_of(guess, 2), [9.0, 1.0, 1.0, 0.9], 20, 0.01)
    assert {len(path) for path in asked} == {0, 1} and len({*asked}) == len(asked)
    x = 2.718281828 ** 9 * 0.8 * 0.001
    place, alone = as_text(ids).index("y"), x / (1 + x)  # no n-gram names what comes after x
    assert chances[place] == pytest.approx(chances[as_text(ids).index("x")] * alone)


@pytest.mark.parametrize("name, config", SCALED.items())
def test_heads_of_models_that_scale_or_cap_their_logits(name, config, monkeypatch):
    """A head without weights guesses what the model itself chooses after the same feature."""
    monkeypatch.setitem(FAMILIES, name, config)
    model = tiny(name)
    target = prepared(model)
    for p in target.memo["medusa", "part"].trainable().values():
        p.data.zero_()
    target.start([3, 14])
    part = Trained(target, "medusa", "part")
    part.start(Pairs(target.features, [14, 15]))
    logits = model(torch.tensor([[3, 14]])).logits[0, -1]
    assert part.predict() == pytest.approx(guesses_of(logits), rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_reads_all_pairs_that_wait(kind):
    """Asked after every token, after some, or told most in a prompt: the same chances."""
    model, text, found = tiny("llama"), [3, 14, 15, 9, 2, 6, 5, 35, 8], []
    target = prepared(model)
    target.start(text)
    for ends in (range(1, 9), [1, 3, 4, 8], [7, 8]):
        part, first = Trained(target, kind, "part"), 0
        part.start(Pairs(target.features[:0], []))
        for end in ends:
            part.add(Pairs(target.features[first:end], text[first + 1:end + 1]))
            first = end
            if end != 3:
                chances = part.predict()
        found.append(chances)
    for chances in found[1:]:
        assert found[0] == pytest.approx(chances, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_knows_the_text_in_a_run(kind, monkeypatch):
    """What it says in a run, over two prompts and accepted branches, is what a fresh one says that
    is told the whole text."""
    model, log, asked, texts = tiny("llama"), [], [], []
    answers = {p: tokens_of(autoregressive(FeatureLM(model), [*p]), 40) for p in ((3, 14), (5, 9))}
    for p, answer in answers.items():  # and wrong siblings, which come first
        whole = [*p, *answer]
        wrong = [[whole[i], (whole[i + 1] + 1) % 50 + 2] for i in range(1, 41, 3)]
        texts += [whole, *(3 * wrong)]
    target, other = (prepared(model, texts) for _ in range(2))
    predict = Trained.predict

    def checked(self, path=""):
        text = [*prompt, *answers[prompt]][:target.length + 1]
        other.start(text[:-1])
        part = Trained(other, kind, "part")
        part.start(Pairs(other.features, text[1:]))
        asked.append(predict(self, path))
        assert asked[-1] == pytest.approx(predict(part, path), rel=1e-3, abs=1e-5)
        return asked[-1]
    monkeypatch.setattr(Trained, "predict", checked)
    monkeypatch.setattr(module, "PASS", 0.001)
    for prompt in answers:
        tokens_of(hybrid(target, [*prompt], guess=kind, nodes=12, log=log, **FILES), 35)
    assert len(asked) > 3
    assert any(r["path"] and r["path"] != [*range(len(r["path"]))] for r in log)
    assert all(len(r["chances"]) == r["guessed"] <= 11 for r in log)
    assert all(r["accepted"] <= len(r["path"]) for r in log)


# ------------------------------------------------------------------------------------ a run

def test_what_stands_in_the_datastore_is_accepted_whole():
    model = tiny("llama")
    answer = tokens_of(autoregressive(FeatureLM(model), [3, 14, 15]), 60)
    target = prepared(model, texts=[answer])
    assert tokens_of(hybrid(target, [3, 14, 15], guess="none", nodes=64, **FILES), 60) == answer
    assert target.calls < 25


def rows_a_call(monkeypatch, measured: float, real: float, overhead=0.0, step=0.0) -> list[int]:
    """Count the rows of each call, where a call takes 1 s and each row more `real`, and `overhead`
    passes besides it. `measured` is a row's price by `row_costs`, and `step` what the second row
    takes besides. The datastore has the answer."""
    model = tiny("llama")
    answer = tokens_of(autoregressive(FeatureLM(model), [3, 14, 15]), 60)
    target, now, rows = prepared(model, texts=[answer, answer[::-1], answer[1::2]]), [0.0], []

    def forward(ids, parents=None, **how):
        if parents is not None:
            now[0] += 1 + real * (len(ids) - 1) + overhead
            rows.append(len(ids))
        return FeatureLM.forward(target, ids, parents, **how)
    target.forward = forward
    monkeypatch.setattr(module, "row_costs", lambda *_: [
        1 + measured * n + step * (n > 1) for n in range(-1, 16)])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert tokens_of(hybrid(target, [3, 14, 15], guess="none", **FILES), 60) == answer
    return rows


def test_a_tree_is_narrow_where_rows_are_expensive(monkeypatch):
    """By what was measured at first, by what they took later."""
    cheap, costly = (rows_a_call(monkeypatch, x, x) for x in (0.001, 0.3))
    assert sum(cheap) / len(cheap) > 1.5 * sum(costly) / len(costly)
    turned = rows_a_call(monkeypatch, 0.001, 0.3)
    assert turned[0] == cheap[0] > costly[0] and max(turned[-5:]) < max(cheap[-5:])


def test_a_tree_ends_before_a_step_that_it_does_not_pay_for(monkeypatch):
    assert rows_a_call(monkeypatch, 0.001, 0.001, step=2.0)[0] == 2
    assert rows_a_call(monkeypatch, 0.001, 0.001, step=0.1)[0] > 2


def test_a_call_that_takes_longer_for_another_reason_does_not_end_all_guessing(monkeypatch):
    assert sum(rows_a_call(monkeypatch, 0.01, 0.01, overhead=0.3)[-10:]) >= 20


# ------------------------------------------------------------------------------------ the trust

def test_em_finds_the_trust_that_made_the_tokens():
    """1,500 tokens, each drawn from what one of three entries saw, one token or two of six, by a
    known trust: found within 0.1, four standard deviations. Where nothing was seen, a half."""
    rng, true = random.Random(0), {(0, 0, 0): 0.8, (1, 2, 1): 0.3, (1, 4, 2): 0.6}
    chains = []
    for _ in range(1500):
        seen = {place: rng.sample(range(6), rng.choice([1, 2])) for place in true}
        producer = next((place for place in true if rng.random() < true[place]), None)
        token = rng.choice(seen[producer]) if producer else "another"
        chains.append([(place, (token in some) / len(some)) for place, some in seen.items()])
    found = fit_trust(chains, CLASSES)
    for (k, often, variety), trust in true.items():
        assert found[k][often][variety] == pytest.approx(trust, abs=0.1)
    assert fit_trust([], CLASSES) == HALF and found[0][1][1] == 0.5
    sure = fit_trust([[((0, 0, 0), 1.0)]] * 500, CLASSES)
    assert sure[0][0][0] == pytest.approx(0.99)
    assert split_chance([((0, 0, 0), 0.5), ((1, 0, 0), 1.0)], HALF) == ([0.25, 0.25], 0.25)


def test_a_pool_is_fitted_to_what_is_right():
    """In three kinds of cases a token is named by both, by the part, or by the n-grams, and it is
    right in .95, .8 and .1 of them. Three numbers can say that. The n-grams are expected to be
    wrong in .5, all and .5 of the 300 cases. In 95 + 10 they are right, and the pool in as many and
    in the 80 that the part alone names."""
    tokens = "".join("x" * n + "y" * (100 - n) for n in (95, 80, 10))
    guessed = [*[{"x": 0.6}] * 200, *[{}] * 100]
    chances = [*[{"x": 0.5}] * 100, *[{}] * 100, *[{"x": 0.5}] * 100]
    *exponents, mended = fit_pool(tokens, guessed, chances)
    for place, share in ((0, 0.95), (100, 0.8), (200, 0.1)):
        found = pool_chances(guessed[place], chances[place], exponents)
        assert found["x"] == pytest.approx(share, abs=0.01)
    assert mended == pytest.approx(80 / (50 + 100 + 50), abs=1e-3)
    assert fit_pool("", [], []) == [0, 0, 0, 0] == fit_pool("x", [{}], [{}])
    sure = fit_pool("x" * 9, [{"x": 1.0}] * 9, [{"y": 1.0}] * 9)  # finite, though never wrong
    assert pool_chances({"x": 1.0}, {}, sure[:3])["x"] > 0.9 and max(map(abs, sure)) < 99


@pytest.mark.parametrize("name", [None, "hybrid", "smollm2/hybrid"])
def test_a_text_that_goes_round_is_predicted(name):
    """However often it did, by the committed trust too."""
    trust = json.loads((ROOT / f"models/{name}.json").read_text())["trust"] if name else HALF
    for times in (2, 3, 7, 20):
        ngrams = NGrams("abcdefghij" * times, Datastore(""), trust)
        assert ngrams.predict("")["a"] > 0.4, times


def test_chances_are_honest(embedded, held_out):
    """Of the nodes of all places of three held-out answers, by predicted chance, the share that is
    right lies within a third of the mean prediction and four standard errors."""
    target, _, _ = embedded
    trust = load_trust(f"{ROOT}/models/hybrid.json", target)["trust"]
    store, bins = module.load_datastore(module.DATASTORE, target), {}
    for prompt, answer in held_out[::2]:
        ngrams = NGrams(as_text(prompt), store, trust)
        for i, token in enumerate(answer):
            ids, parents, chances = grow_hybrid(ngrams, None, [], 24, 0.05)
            places = {0: i - 1}  # of each node that is right, its place in the answer
            for x in range(1, len(ids)):
                place = places.get(parents[x], len(answer)) + 1
                hit = answer[place:place + 1] == [ids[x]]
                places |= {x: place} if hit else {}
                key = next(least for least in (0.5, 0.2, 0.1, 0.05) if chances[x] >= least)
                bins.setdefault(key, []).append((chances[x], hit))
            ngrams.add(as_text([token]))
    assert len(bins) == 4
    for pairs in bins.values():
        predicted, share = (sum(x) / len(pairs) for x in zip(*pairs))
        error = 4 * (share * (1 - share) / len(pairs)) ** 0.5
        assert abs(share - predicted) < predicted / 3 + error, (predicted, share, len(pairs))


class Tokenizer:
    eos_token_id = None


PROMPTS = [[x, 9, 7] for x in range(4, 24)]


@pytest.fixture
def fitted(tmp_path, monkeypatch):
    """fitted(…) runs `fit` on tiny answers with the parts of these kinds, and returns its file."""
    def run(model, kinds, text=BOUNDARY):
        for file in (module, fitting):
            monkeypatch.setattr(file, "load_datastore", lambda *_: Datastore(text))
        for kind in kinds:
            (tmp_path / f"{kind}.safetensors").touch()
        fit(model, Tokenizer, PROMPTS, out=tmp_path / "t.json", work=tmp_path, max_new_tokens=12,
            adapters=tmp_path)
        return str(tmp_path / "t.json")
    return run


def answers_of(model) -> list[list[int]]:
    return [tokens_of(autoregressive(FeatureLM(model), p), 12, {1}) for p in PROMPTS]


def test_trust_is_measured_and_kept_for_its_model(fitted, monkeypatch, capsys):
    """What the datastore has of the answers is left out of it."""
    model, seen, real = tiny("llama"), [], module.NGrams
    texts = [as_text(p[-2:] + a) for p, a in zip(PROMPTS, answers_of(model))]
    monkeypatch.setattr(guessers, "load_heads", lambda path, kind, model: Heads(model, kind, 1))
    monkeypatch.setattr(fitting, "NGrams", lambda text, store, *others: seen.append(store.text)
                        or real(text, store, *others))
    file = fitted(model, ["medusa", "hydra"], BOUNDARY.join([*texts, as_text([5] * 6)]))
    known = load_trust(file, model)
    assert {*seen} == {as_text([5] * 6)} and torch.tensor(known["trust"]).shape == (3, 5, 3)
    assert [*known["pools"]] == ["none", "medusa", "hydra"] and known["pools"]["none"] == []
    assert "the n-grams' errors that each part" in capsys.readouterr().out
    with pytest.raises(InputError, match="--guess must be one that .* was fitted for, got eagle"):
        next(hybrid(FeatureLM(model), [1], guess="eagle", trust=file))
    with pytest.raises(InputError, match="another model's"):
        load_trust(file, tiny("llama", seed=1))
    monkeypatch.setattr(guessers, "load_heads", lambda path, kind, model: Heads(model, kind, 2))
    with pytest.raises(InputError, match="--trust must be a .* fitted for this part of hydra, got"):
        next(hybrid(FeatureLM(model), [1], guess="hydra", trust=file))


def test_a_part_is_replayed_in_rounds():
    """The prompt is 1 2 and the answer 3 4 5 6 7 8. A round ends after a token that the part gives
    less than .1, here 4, and at the part's depth of three. Then the part is told the round's pairs,
    of which pair i has feature i and the token after it."""
    told, asked = [], []
    part = SimpleNamespace(depth=3, start=told.append, add=told.append)

    def predict(path):
        asked.append(as_tokens(path))
        token = as_text([3 + len(asked) - 1])
        return {token: 0.05 if len(asked) == 2 else 0.1}
    part.predict = predict
    features = torch.arange(8.0)[:, None]
    found = replay_part(part, [1, 2], [3, 4, 5, 6, 7, 8], features)
    assert asked == [[], [3], [], [5], [5, 6], []] and [*found[1].values()] == [0.05]
    assert [pairs.tokens for pairs in told] == [[2], [3, 4], [5, 6, 7]]
    assert torch.cat([pairs.features for pairs in told]).flatten().tolist() == [*range(6)]


def test_each_part_is_fitted_on_its_own_features(fitted, monkeypatch):
    """A part is told what enters its taps, side by side."""
    model, widths = tiny("llama"), {}

    class Told:
        depth, part = 1, torch.nn.Linear(1, 1)

        def __init__(self, lm, kind, path):
            self.taps = [0, 1] if kind == "dflash" else [2]
            self.start = lambda pairs: widths.setdefault(kind, pairs.features)
            self.add = lambda pairs: None
            self.predict = lambda path: {}
    monkeypatch.setattr(fitting, "Trained", Told)
    fitted(model, ["hydra", "dflash"])
    lm = FeatureLM(model)
    lm.start(as_tokens(as_text(PROMPTS[0]))[:-1])
    h = model.config.hidden_size
    assert widths["hydra"].shape[1] == h and widths["dflash"].shape[1] == 2 * h
    first = [p for p in PROMPTS if torch.allclose(
        model.get_input_embeddings()(torch.tensor(p[:-1])), widths["dflash"][:, :h])]
    lm.start(first[0][:-1])
    torch.testing.assert_close(widths["hydra"], lm.features)


def test_what_the_target_said_is_measured_before_each_token(fitted, monkeypatch):
    """It is what the target says after the text's own tokens, before the token is known."""
    model, seen, real = tiny("llama"), [], NGrams.list_entries
    monkeypatch.setattr(NGrams, "list_entries", lambda self, path: seen.append(
        (as_tokens(self.text), {t: [*row] for t, row in self.successors.rows.items()}))
        or real(self, path))
    fitted(model, [])
    expected = {}
    for text, rows in seen:
        assert rows == expected
        said = model(torch.tensor([text])).logits[0, -1]  # read once the next token is known
        expected[text[-1]] = said.topk(8).indices.tolist()
    assert len(seen) > 200


@pytest.mark.parametrize("wrong", [
    dict(pools={}), dict(trust=HALF), dict(trust=[[1]], pools={"none": []}),
    dict(trust=HALF, pools={"none": [], "hydra": [2.0]}), dict(trust=HALF, pools=[1]),
    dict(trust=HALF, pools={"none": []}),
    dict(trust=HALF, pools={"none": []}, parts={"eagle": []})])
def test_damaged_files_are_refused(tmp_path, wrong):
    model = tiny("llama")
    save_facts(tmp_path / "t.json", {"model": model}, **wrong)
    with pytest.raises(InputError, match="expected a file that `python -m survey.hybrid fit` made"):
        load_trust(str(tmp_path / "t.json"), model)


def test_the_report():
    log = [{"guessed": 8, "accepted": 3, "chances": [0.5, 0.25], "passes": 3},
           {"guessed": 0, "accepted": 0, "chances": [], "passes": 0}]
    assert report(SimpleNamespace(log=log)) == (
        "a call: 4.0 guesses, 1.50 accepted, 0.38 expected by their chances, 1.50 "
        "passes of the part")


@pytest.mark.parametrize("guess", module.GUESSES)
def test_the_embedded_target(embedded, held_out, guess):
    """More tokens a call than the datastore's matches alone give, 2.4 here."""
    assert per_call(hybrid, embedded[0], held_out[::2], guess=guess, nodes=16) > 2.8
