"""One tree from all that guesses: output is the target's; chances are what is accepted; the width
is what pays; trust is fitted to what happened."""
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from common import CachedLM, InputError, autoregressive
from families import FAMILIES, SCALED, tiny
from helpers import ROOT, main, said_in_one_line, tokens_of
from survey import hybrid as module
from survey.eagle import Draft, Pairs
from survey.hybrid import (Trained, choose_width, estimate_prices, fit, fit_weight, grow, hybrid,
                           load_trust, report)
from survey.medusa import Heads
from survey.ngrams import NGrams, fit_trust, split_chance
from survey.rest import BOUNDARY, MATCHES, Datastore, as_text, as_tokens

HALF = [[[0.5] * 3] * 5] * 2
KINDS = module.GUESSES[1:]


def prepared(model, vocab=None, texts=((3, 14, 15, 9, 2, 6),), w=0.5) -> CachedLM:
    """With a datastore, trust and heads at hand."""
    target = CachedLM(model, vocab)
    text = BOUNDARY.join(as_text(x) for x in texts)
    target.memo["rest", "store"] = Datastore(text)
    weights = {"none": 0.0} | dict.fromkeys(KINDS, w)
    target.memo["trust", "trust"] = {"trust": HALF, "w": weights}
    for kind in ("medusa", "hydra"):
        torch.manual_seed(3)
        heads = Heads(model, kind, 2)
        for p in heads.trainable().values():
            p.data.normal_(0, 0.3)
        target.memo[kind, "part"] = heads
    draft = Draft(model, seed=3)
    draft.accept = [[0.5]]
    target.memo["eagle", "part"] = draft
    return target


FILES = dict(datastore="store", trust="trust", adapter="part")


# ---------------------------------------------------------------------------------- decoding

def test_what_stands_in_the_datastore_is_accepted_whole():
    model = tiny("llama")
    answer = tokens_of(autoregressive(CachedLM(model), [3, 14, 15]), 60)
    target = prepared(model, texts=[answer])
    log = []
    chunks = hybrid(target, [3, 14, 15], guess="none", nodes=64, log=log, **FILES)
    assert tokens_of(chunks, 60) == answer
    assert target.calls < 25 and all(0 <= r["accepted"] <= r["guessed"] for r in log)


# ------------------------------------------------------------------------------------ the tree

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
    many = NGrams("xz", Datastore("ab" * 9 + BOUNDARY + "a"), trust)
    assert [*many.list_entries("a")] == [((1, 3, 0), Counter(b=9))]
    third = NGrams("xz", Datastore(BOUNDARY.join(["ab", "ac"] * 3)), trust)
    assert [*third.list_entries("a")] == [((1, 3, 1), Counter(b=3, c=3))]


def test_the_longest_suffix_first_and_of_equals_the_text():
    """Of 8 tokens too; shorter ones are asked until nearly no belief is left."""
    sure = [[[0.8] * 3] * 5] * 2
    ngrams = NGrams("abcdefghxabcdefgh", Datastore("fghy"), sure)
    found = [(k, dict(counts)) for (k, *_), counts in ngrams.list_entries("")]
    assert found == [*[(0, {"x": 1})] * 3, (1, {"y": 1}), (0, {"x": 1}), (1, {"y": 1})]
    assert ngrams.predict("")["x"] == pytest.approx(1 - 0.2 ** 3)
    ngrams = NGrams("pqbxxab", Datastore("aby"), sure)
    assert ngrams.predict("") == pytest.approx({"y": 0.8 + 0.2 * 0.2 * 0.8, "x": 0.2 * 0.8})


def test_a_text_that_grows_is_as_one_that_is_whole_and_the_latest_count():
    text = "".join(random.Random(0).choices("abc", k=400))
    grown = NGrams(text[:7], Datastore("q"), HALF)
    for i in range(7, 400, 3):
        grown.add(text[i:i + 3])
    whole = NGrams(text, Datastore("q"), HALF)
    assert grown.text == text and grown.text_followers == whole.text_followers
    assert {len(s) for s in whole.text_followers} == {1, 2, 4, 8}
    after = [text[i + 1] for i in range(399) if text[i] == "a"][-MATCHES:]
    counts = whole.count_followers(0, "a")
    assert len(after) == MATCHES and counts == Counter(after)


def test_the_best_nodes_first_and_a_guess_at_the_root_alone():
    ngrams = NGrams("abcabdab", Datastore("q"), HALF)
    asked = []

    def guess():
        asked.append(1)
        return {"x": 0.9, "c": 0.1}
    ids, parents, chances = grow(ngrams, guess, 0.4, 20, 0.01)
    paths = []
    for node, parent in zip(ids, parents):
        paths.append(paths[parent] + as_text([node]) if parent >= 0 else "")
    assert len(asked) == 1 and paths[0] == "" and as_text(ids[:1]) == "b"
    assert chances == sorted(chances, reverse=True) and chances[0] == 1
    own = ngrams.predict("")
    known = dict(zip(paths, chances))
    assert known["x"] == pytest.approx(0.36)
    assert known["c"] == pytest.approx(0.4 * 0.1 + 0.6 * own["c"])
    assert known["ca"] == pytest.approx(known["c"] * ngrams.predict("c")["a"])
    assert len(set(paths)) == len(paths) and min(chances) >= 0.01
    assert grow(ngrams, guess, 0.4, 3, 0.01)[0] == ids[:3]
    sure = NGrams("zyzyzyzy", Datastore("q"), [[[0.9] * 3] * 5] * 2)
    grow(sure, guess, 0.4, 3, 0.01)
    assert len(asked) == 2  # not where the n-grams are sure
    grow(ngrams, guess, 0.4, 1, 0.01)
    assert len(asked) == 2  # nor for the root alone
    for nothing in ({}, {"x": 0.0}):  # which takes no weight
        assert grow(ngrams, lambda: nothing, 0.97, 20, 0.01) == grow(ngrams, None, 0.0, 20, 0.01)
    equals = NGrams("abxacyaa", Datastore("q"), HALF)  # b, c, a once each: as they were pushed
    assert as_text(grow(equals, None, 0, 4, 0.01)[0]) == "abca"


def test_prices():
    """By hand: a call of r rows takes 2 + 0.1 r seconds, as measured; late calls 0.4 a row more."""
    costs = [0.0] + [2 + 0.1 * r for r in range(1, 17)]
    assert estimate_prices(costs, []) == pytest.approx((0.1, 1 / 2.1))
    alone = [(1, 9.0, 2)] * 20  # whatever takes long where nothing is guessed is no row's price
    row, rate = estimate_prices(costs, alone)
    assert row == 0 and rate == pytest.approx(41 / (2.1 + 180))
    late = [(r, 2 + 0.5 * r, 3) for r in (2, 4, 8, 12) * 16]
    row, rate = estimate_prices(costs, late)
    assert row == pytest.approx(0.5, abs=0.06)
    assert rate == pytest.approx((1 + 3 * 64) / (2.1 + sum(x[1] for x in late)))


def test_width():
    """As many as gain most: 0.8 and 0.1 tokens more for 0.6 seconds; 1 token for 1 second."""
    inf = torch.inf
    assert choose_width([1, .5, .3, .1], [inf, 1, 1.6, 1.6, 1.6], 1.0) == 4
    assert choose_width([1, .5], [inf, 1, 2], 1.0) == 1
    assert choose_width([1, .5], [inf, 1, 2], 0.1) == 2


@pytest.mark.parametrize("kind", [*KINDS, "unshifted"])
def test_a_trained_part_reads_all_final_tokens(kind):
    """Asked after every token or after some, as told in a prompt or later: the same chances."""
    model, text = tiny("llama"), [3, 14, 15, 9, 2, 6, 5, 35, 8]
    target = prepared(model)
    if kind == "unshifted":  # a layer that reads the pairs' other tokens
        kind = "eagle"
        target.memo["eagle", "part"] = Draft(model, inputs="unshifted", seed=3)
    target.start(text)
    features = target.features
    found = []
    for first, ends in ((1, range(2, 9)), (1, [3, 4, 8]), (7, [8])):
        part = Trained(target, kind, "part")
        part.start(Pairs(text[:first], features[:first], text[1:first + 1]))
        for end in ends:
            part.add(Pairs(text[first:end], features[first:end], text[first + 1:end + 1]))
            chances = part.predict()
            first = end
        found.append(chances)
    for chances in found[1:]:
        assert found[0] == pytest.approx(chances, rel=1e-4)
    assert len(found[0]) == module.RANKS and 0 < sum(found[0].values()) <= 1.0001
    part.start(Pairs([], features[:0], []))
    assert part.predict() == {}


def test_the_weight_that_makes_tokens_likeliest():
    """Of tokens drawn by a mixture, two kinds of equally many; those that neither guesses, and
    none at all, say nothing."""
    p, q = [0.9, 0.1] * 50, [0.1, 0.9] * 50
    low = [x / 100 for x in p]
    assert fit_weight(p, q) == pytest.approx(0.5, abs=0.01)
    assert fit_weight(p, low) > 0.99 and fit_weight(low, p) < 0.01
    a, b = torch.tensor([0.8, 0.2]), torch.tensor([0.4, 0.6])
    drawn = torch.multinomial(0.3 * a + 0.7 * b, 40_000, True,
                              generator=torch.Generator().manual_seed(0))
    p, q = a[drawn].tolist(), b[drawn].tolist()
    assert fit_weight(p, q) == pytest.approx(0.3, abs=0.05)
    nothing = [0.0] * 40_000
    assert fit_weight(p + nothing, q + nothing) == pytest.approx(fit_weight(p, q), abs=1e-3)
    assert fit_weight([], []) == fit_weight([0.0], [0.0]) == 0


def test_a_head_by_hand():
    """Hydra's first reads the last feature and the token after it; what the model makes of its LM
    head's output counts; a part that overflows says nothing."""
    model, text = tiny("llama"), [3, 14, 15, 9]
    target = prepared(model)
    target.start(text)
    pairs = Pairs(text[:3], target.features[:3], text[1:])
    heads, part = target.memo["hydra", "part"], Trained(target, "hydra", "part")
    part.start(pairs)
    read = torch.cat([pairs.features[-1:], model.get_input_embeddings()(torch.tensor([9]))], 1)
    x = heads.R[0](read) + torch.nn.functional.silu(heads.W[0](read))
    p = model.lm_head(x).softmax(-1)[0]
    best = p.topk(module.RANKS).indices.tolist()
    assert part.predict() == pytest.approx({as_text([i]): p[i].item() for i in best})
    part.to_logits = lambda x: 2 * x
    p = (2 * model.lm_head(x)).softmax(-1)[0]
    assert part.predict() == pytest.approx({as_text([i]): p[i].item() for i in best})
    for kind in KINDS:
        few = prepared(model).memo[kind, "part"]
        few.keep([2, 3, 5, 7, 11, 13])
        target.memo[kind, "part"] = few
        part = Trained(target, kind, "part")
        part.start(pairs)
        assert {*as_tokens("".join(part.predict()))} == {2, 3, 5, 7, 11, 13}
        for q in (p for p in few.parameters() if p.requires_grad):
            q.data.fill_(torch.nan)
        part.start(pairs)
        assert {*part.predict().values()} == {0.0}


@pytest.mark.parametrize("name, config", SCALED.items())
def test_heads_of_models_that_scale_or_cap_their_logits(name, config, monkeypatch):
    """A head without weights guesses what the model itself chooses after the same feature."""
    monkeypatch.setitem(FAMILIES, name, config)
    model = tiny(name)
    target = prepared(model)
    for p in target.memo["medusa", "part"].trainable().values():
        p.data.zero_()
    target.start([3, 14])
    pairs = Pairs([3, 14], target.features, [14, 15])
    logits = model(torch.tensor([[3, 14]])).logits[0, -1]
    part = Trained(target, "medusa", "part")
    part.start(pairs)
    best = logits.softmax(-1).topk(module.RANKS)
    expected = dict(zip(as_text(best.indices.tolist()), best.values.tolist()))
    assert part.predict() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", [*KINDS, "unshifted"])
def test_a_part_knows_the_text_in_a_run(kind, monkeypatch):
    """What it says in a run, over two prompts and accepted branches, is what a fresh one says that
    is told the whole text."""
    model, log, asked = tiny("llama"), [], []
    answers = {p: tokens_of(autoregressive(CachedLM(model), [*p]), 40) for p in ((3, 14), (5, 9))}
    texts = []
    for p, answer in answers.items():  # and wrong siblings, which come first
        whole = [*p, *answer]
        wrong = [[whole[i], (whole[i + 1] + 1) % 50 + 2] for i in range(1, 41, 3)]
        texts += [whole, *(3 * wrong)]
    target, other = prepared(model, texts=texts), prepared(model)
    if kind == "unshifted":
        kind = "eagle"
        for lm in (target, other):
            lm.memo["eagle", "part"] = Draft(model, inputs="unshifted", seed=3)
    real = Trained.predict

    def predict(self):
        found = real(self)
        text = [*prompt, *answers[prompt]][:target.length + 1]
        other.start(text[:-1])
        part = Trained(other, kind, "part")
        part.start(Pairs(text[:-1], other.features, text[1:]))
        assert found == pytest.approx(real(part), rel=1e-3, abs=1e-5)
        asked.append(found)
        return found
    monkeypatch.setattr(Trained, "predict", predict)
    monkeypatch.setattr(module, "SURE", 0.9)
    for prompt in answers:
        tokens_of(hybrid(target, [*prompt], guess=kind, nodes=12, log=log, **FILES), 35)
    assert len(asked) > 3
    assert any(r["path"] and r["path"] != [*range(len(r["path"]))] for r in log)
    assert all(len(r["chances"]) == r["guessed"] <= 11 for r in log)
    assert all(r["accepted"] <= len(r["path"]) for r in log)


def rows_a_call(monkeypatch, measured: float, real: float, overhead: float = 0.0,
                step: float = 0.0) -> list[int]:
    """Of each call, where a call takes 1 s and each row more `real`, and besides it `overhead`
    passes; `measured` is a row's price by `row_costs`, `step` what the third takes besides. The
    datastore has the answer."""
    model = tiny("llama")
    answer = tokens_of(autoregressive(CachedLM(model), [3, 14, 15]), 60)
    target, now, rows = prepared(model, texts=[answer, answer[::-1], answer[1::2]]), [0.0], []

    def forward(ids, parents=None, **how):
        if parents is not None:
            now[0] += 1 + real * (len(ids) - 1) + overhead
            rows.append(len(ids))
        return CachedLM.forward(target, ids, parents, **how)
    target.forward = forward
    monkeypatch.setattr(module, "row_costs", lambda *_: [
        1 + measured * n + step * (n > 1) for n in range(-1, 16)])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    chunks = hybrid(target, [3, 14, 15], guess="none", **FILES)
    assert tokens_of(chunks, 60) == answer
    return rows


def test_a_tree_is_narrow_where_rows_are_dear(monkeypatch):
    """By what was measured at first, by what they took later."""
    cheap, dear = (rows_a_call(monkeypatch, x, x) for x in (0.001, 0.3))
    assert sum(cheap) / len(cheap) > 1.5 * sum(dear) / len(dear)
    turned = rows_a_call(monkeypatch, 0.001, 0.3)
    assert turned[0] == cheap[0] > dear[0] and max(turned[-5:]) < max(cheap[-5:])


def test_a_tree_ends_before_a_step_that_it_does_not_pay_for(monkeypatch):
    assert rows_a_call(monkeypatch, 0.001, 0.001, step=2.0)[0] == 2
    assert rows_a_call(monkeypatch, 0.001, 0.001, step=0.1)[0] > 2


def test_a_call_that_takes_longer_for_another_reason_does_not_end_all_guessing(monkeypatch):
    rows = rows_a_call(monkeypatch, 0.01, 0.01, overhead=0.3)
    assert sum(rows[-10:]) >= 20


# ------------------------------------------------------------------------------------ the trust

def test_em_finds_the_trust_that_made_the_tokens():
    """4,000 tokens, each drawn from what one of three entries saw, one token or two of six, by a
    known trust: found within 0.06, four standard deviations. Where nothing was seen, a half."""
    rng, true = random.Random(0), {(0, 0, 0): 0.8, (1, 2, 1): 0.3, (1, 4, 2): 0.6}
    chains = []
    for _ in range(4000):
        seen = {place: rng.sample(range(6), rng.choice([1, 2])) for place in true}
        producer = next((place for place in true if rng.random() < true[place]), None)
        token = rng.choice(seen[producer]) if producer else "another"
        chains.append([(place, (token in some) / len(some)) for place, some in seen.items()])
    found = fit_trust(chains)
    for (k, often, variety), trust in true.items():
        assert found[k][often][variety] == pytest.approx(trust, abs=0.06)
    assert fit_trust([]) == HALF and found[0][1][1] == 0.5
    sure = fit_trust([[((0, 0, 0), 1.0)]] * 500)
    assert sure[0][0][0] == pytest.approx(0.99)
    assert split_chance([((0, 0, 0), 0.5), ((1, 0, 0), 1.0)], HALF) == ([0.25, 0.25], 0.25)


def test_a_text_that_goes_round_is_predicted():
    """However often it did, by the committed trust too."""
    files = (ROOT / "models/hybrid.json", ROOT / "models/smollm2/hybrid.json")
    for trust in (fit_trust([]), *(json.loads(file.read_text())["trust"] for file in files)):
        for times in (2, 3, 7, 20):
            ngrams = NGrams("abcdefghij" * times, Datastore(""), trust)
            assert ngrams.predict("")["a"] > 0.4, times


def test_chances_are_honest(embedded, held_out):
    """Of the nodes of all places of six held-out answers, by predicted chance, the share that is
    right lies within a third of the mean prediction and four standard errors."""
    target, _, _ = embedded
    known = load_trust(f"{ROOT}/models/hybrid.json", target)
    store = module.load_datastore(module.DATASTORE, target)
    bins = {}
    for prompt, answer in held_out:
        ngrams = NGrams(as_text(prompt), store, known["trust"])
        for i, token in enumerate(answer):
            ids, parents, chances = grow(ngrams, None, 0.0, 24, 0.05)
            right = [True]
            depth = [0]
            for node, parent in zip(ids[1:], parents[1:]):
                depth.append(depth[parent] + 1)
                place = i + depth[-1] - 1
                right.append(right[parent] and answer[place:place + 1] == [node])
            for chance, hit in zip(chances[1:], right[1:]):
                key = next(x for x in (0.5, 0.2, 0.1, 0.05) if chance >= x)
                bins.setdefault(key, []).append((chance, hit))
            ngrams.add(as_text([token]))
    assert len(bins) == 4
    for pairs in bins.values():
        predicted, share = (sum(x) / len(pairs) for x in zip(*pairs))
        error = 4 * (share * (1 - share) / len(pairs)) ** 0.5
        assert abs(share - predicted) < predicted / 3 + error, (predicted, share, len(pairs))


class Tokenizer:
    eos_token_id = None


def test_trust_is_measured_and_kept_for_its_model(tmp_path, monkeypatch, capsys):
    """What the datastore has of the answers is left out of it."""
    model = tiny("llama")
    prompts = [[x, y, 7] for x in range(4, 14) for y in (3, 9)]
    seen = []
    answers = [tokens_of(autoregressive(CachedLM(model), p), 12, {1}) for p in prompts]
    text = BOUNDARY.join(as_text(p[-2:] + a) for p, a in zip(prompts, answers))
    monkeypatch.setattr(module, "load_datastore",
                        lambda *_: Datastore(text + BOUNDARY + as_text([5, 5, 5, 5, 5, 5])))
    monkeypatch.setattr(module, "load_heads", lambda path, kind, model: Heads(model, kind, 1))
    real = module.Datastore
    monkeypatch.setattr(module, "Datastore", lambda x="": seen.append(x) or real(x))
    for kind in ("medusa", "hydra"):  # which of the parts there are
        (tmp_path / f"{kind}.safetensors").touch()
    fit(model, Tokenizer, prompts, out=tmp_path / "t.json", work=tmp_path, max_new_tokens=12,
        adapters=tmp_path)
    assert seen[0] == as_text([5] * 6)
    known = load_trust(str(tmp_path / "t.json"), model)
    assert torch.tensor(known["trust"]).shape == (2, 5, 3)
    assert [*known["w"]] == ["none", "medusa", "hydra"] and known["w"]["none"] == 0
    assert "weights of the trained parts" in capsys.readouterr().out
    with pytest.raises(InputError, match="--guess must be one that"):
        next(hybrid(CachedLM(model), [1], guess="eagle", trust=str(tmp_path / "t.json")))
    with pytest.raises(InputError, match="another model's"):
        load_trust(str(tmp_path / "t.json"), tiny("llama", seed=1))


def test_what_the_trust_is_measured_on(tmp_path, monkeypatch):
    """A part is told each pair of the text and asked before every token; its weight is of tokens of
    which the n-grams were not sure."""
    model, prompts = tiny("llama"), [[x, 9, 7] for x in range(4, 24)]
    answers = [tokens_of(autoregressive(CachedLM(model), p), 12, {1}) for p in prompts]
    told, asked, sizes = [], [], []

    class Told:
        def __init__(self, *_):
            self.start = lambda pairs: told.append([pairs])
            self.add = lambda pairs: told[-1].append(pairs)
            self.predict = lambda: asked.append(len(told[-1])) or {}
    monkeypatch.setattr(module, "Trained", Told)
    monkeypatch.setattr(module, "load_datastore", lambda *_: Datastore(BOUNDARY))
    monkeypatch.setattr(module, "fit_weight", lambda p, q: sizes.append((len(p), len(q))) or 0.5)
    (tmp_path / "hydra.safetensors").touch()
    for sure in (0.0, 0.5, 2.0):
        monkeypatch.setattr(module, "SURE", sure)
        fit(model, Tokenizer, prompts, out=tmp_path / "t.json", work=tmp_path, max_new_tokens=12,
            adapters=tmp_path)
    total = sum(map(len, answers))
    (none, half, every) = sizes
    assert none == (0, 0) and every == (total, total) and 0 < half[0] == half[1] < total
    lm = CachedLM(model)
    texts = {tuple(p): p + answer for p, answer in zip(prompts, answers)}
    expected = []
    for some in told:
        before, features, tokens = zip(*some)
        text = texts[tuple(before[0] + tokens[0][-1:])]
        assert sum(before, []) == text[:-1] and sum(tokens, []) == text[1:]
        lm.start(text)
        torch.testing.assert_close(torch.cat(features), lm.features[:-1])
        expected += range(1, len(text) - 2)
    assert len(told) == 60 and asked == expected


@pytest.mark.parametrize("change", [
    lambda x: x.pop("trust"), lambda x: x.pop("w"), lambda x: x.update(trust=[[1]]),
    lambda x: x.update(w={"none": 0.0, "hydra": 2.0}), lambda x: x.update(w=[1]),
    lambda x: x["trust"][0][0].__setitem__(0, -1.0)])
def test_damaged_files_are_refused(tmp_path, change, capfd):
    file = tmp_path / "t.json"
    known = json.loads((ROOT / "models/hybrid.json").read_text())
    change(known)
    for text in (json.dumps(known), "{", "[]"):
        file.write_text(text)
        assert main([hybrid], report, ["--trust", str(file), "--prompt", "x"]) == 2
        said_in_one_line("expected a file that", capfd)


def test_bad_input_is_one_line(capfd):
    for option, value, said in (
            ("guess", "rest", "--guess must be none, medusa, hydra, eagle, got rest"),
            ("nodes", "65", "--nodes must be 1 to 64, or 0, got 65"),
            ("nodes", "-1", "--nodes must be 1 to 64, or 0, got -1"),
            ("trust", "none", "expected a file"), ("datastore", "none", "expected a file"),
            ("adapter", "none", "expected a file")):
        assert main([hybrid], report, [f"--{option}", value, "--prompt", "x"]) == 2
        said_in_one_line(said, capfd)


@pytest.mark.parametrize("guess", module.GUESSES)
def test_the_embedded_target(embedded, held_out, guess):
    """AR's output; more tokens a call than the datastore's matches alone give, 2.4 here."""
    target, _, tokenizer = embedded
    lm = CachedLM(target, len(tokenizer))
    for prompt, answer in held_out:
        chunks = hybrid(lm, prompt, guess=guess, nodes=16)
        assert tokens_of(chunks, len(answer)) == answer
    assert sum(len(answer) for _, answer in held_out) / lm.calls > 2.8
    assert as_tokens(as_text([3])) == [3]
