"""One tree from all that guesses: output is the target's; chances are what is accepted; the width
is what pays; trust is fitted to what happened."""
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from common import CachedLM, InputError, Sampler, autoregressive
from conftest import (FAMILIES, MORE_FAMILIES, ROOT, chi_square_ok, main, said_in_one_line, tiny,
                      tokens_of)
from survey import hybrid as module
from survey.eagle import Draft, Pairs
from survey.hybrid import Trained, fit, grow, hybrid, load_trust, report, weight
from survey.medusa import Heads
from survey.ngrams import NGrams, fitted, made
from survey.rest import BOUNDARY, MATCHES, Datastore, as_text, as_tokens

HALF = [[[0.5] * 3] * 5] * 2
KINDS = module.GUESSES[1:]


def prepared(model, vocab=None, texts=((3, 14, 15, 9, 2, 6),), w=0.5) -> CachedLM:
    """With a datastore, trust and heads at hand."""
    target = CachedLM(model, vocab)
    text = BOUNDARY.join(as_text(x) for x in texts)
    target.prepared["rest", "store"] = Datastore(text)
    weights = {"none": 0.0} | dict.fromkeys(KINDS, w)
    target.prepared["trust", "trust"] = {"trust": HALF, "w": weights}
    for kind in ("medusa", "hydra"):
        torch.manual_seed(3)
        heads = Heads(model, kind, 2)
        for p in heads.own().values():
            p.data.normal_(0, 0.3)
        target.prepared[kind, "part"] = heads
    draft = Draft(model, seed=3)
    draft.accept = [[0.5]]
    target.prepared["eagle", "part"] = draft
    return target


FILES = dict(datastore="store", trust="trust", adapter="part")


# ---------------------------------------------------------------------------------- decoding

@pytest.mark.parametrize("name", {**FAMILIES, **MORE_FAMILIES})
def test_greedy_equals_autoregressive(name):
    """With EOS and limits inside trees, to the end of the context, whatever guesses."""
    model, eos = tiny(name, max_position_embeddings=60), {7, 30}
    for prompt, n, stops in (([3, 14, 15], 40, eos), ([5], 59, ()), ([2] * 50, 10, ())):
        expected = tokens_of(autoregressive(CachedLM(model), prompt), n, stops)
        target = prepared(model, texts=[expected[5:], prompt])
        for guess, nodes in (("none", 0), ("medusa", 9), ("hydra", 64), ("eagle", 0)):
            chunks = hybrid(target, prompt, guess=guess, nodes=nodes, **FILES)
            assert tokens_of(chunks, n, stops) == expected


def test_what_stands_in_the_datastore_is_accepted_whole():
    model = tiny("llama")
    answer = tokens_of(autoregressive(CachedLM(model), [3, 14, 15]), 60)
    target = prepared(model, texts=[answer])
    log = []
    chunks = hybrid(target, [3, 14, 15], guess="none", nodes=64, log=log, **FILES)
    assert tokens_of(chunks, 60) == answer
    assert target.calls < 25 and all(0 <= r["accepted"] <= r["guessed"] for r in log)


def test_sampling_is_exact():
    """The first two tokens of 1,500 texts: chi-square, false failures below 1e-6."""
    model, sample = tiny("llama"), Sampler(1.0, seed=1)
    target = prepared(model, 4, texts=[(3, 1, 2, 0), (1, 2, 2), (1, 0, 3)])
    first = CachedLM(model, 4)
    first.start([3])
    p = first.forward([1])[0].softmax(-1)
    first.commit([0])
    q = first.forward([0, 1, 2, 3], [-1] * 4).softmax(-1)
    counts = torch.zeros(4, 4)
    for _ in range(1500):
        chunks = hybrid(target, [3, 1], guess="medusa", nodes=8, sample=sample, **FILES)
        x, y = tokens_of(chunks, 2)
        counts[x, y] += 1
    assert chi_square_ok(counts.flatten(), (p[:, None] * q).flatten())


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
    assert [place for place, _ in ngrams.entries("")] == [(0, 0, 0), (0, 0, 0), (1, 2, 2)]
    many = NGrams("xz", Datastore("ab" * 9 + BOUNDARY + "a"), trust)
    assert [*many.entries("a")] == [((1, 3, 0), Counter(b=9))]
    third = NGrams("xz", Datastore(BOUNDARY.join(["ab", "ac"] * 3)), trust)
    assert [*third.entries("a")] == [((1, 3, 1), Counter(b=3, c=3))]


def test_a_text_that_grows_is_as_one_that_is_whole_and_the_latest_count():
    text = "".join(random.Random(0).choices("abc", k=400))
    grown = NGrams(text[:7], Datastore("q"), HALF)
    for i in range(7, 400, 3):
        grown.add(text[i:i + 3])
    whole = NGrams(text, Datastore("q"), HALF)
    assert grown.text == text and grown.own == whole.own
    assert {len(s) for s in whole.own} == {1, 2, 4, 8}
    after = [text[i + 1] for i in range(399) if text[i] == "a"][-MATCHES:]
    counts = whole.followers(0, "a")
    assert len(after) == MATCHES and counts == Counter(after)


def test_the_best_nodes_first_and_a_guess_at_the_root_alone():
    ngrams = NGrams("abcabdab", Datastore("q"), HALF)
    asked = []

    def guess():
        asked.append(1)
        return {"x": 0.9, "c": 0.1}
    ids, parents, chances = grow(ngrams, guess, 0.4, 20, 0.01)
    text = ["", *"bcd"]
    paths = []
    for node, parent in zip(ids, parents):
        paths.append(paths[parent] + as_text([node]) if parent >= 0 else "")
    assert len(asked) == 1 and paths[0] == "" and as_text(ids[:1]) == "b" and text
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


@pytest.mark.parametrize("kind", [*KINDS, "unshifted"])
def test_a_trained_part_reads_all_final_tokens(kind):
    """Asked after every token or after some, as told in a prompt or later: the same chances."""
    model, text = tiny("llama"), [3, 14, 15, 9, 2, 6, 5, 35, 8]
    target = prepared(model)
    if kind == "unshifted":  # a layer that reads the pairs' other tokens
        kind = "eagle"
        target.prepared["eagle", "part"] = Draft(model, inputs="unshifted", seed=3)
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
    """Of tokens drawn by a mixture, two kinds of equally many."""
    p = torch.tensor([0.9, 0.1] * 50)
    assert weight(p, 1 - p) == pytest.approx(0.5, abs=0.01)
    assert weight(p, p / 100) > 0.99 and weight(p / 100, p) < 0.01
    a, b = torch.tensor([0.8, 0.2]), torch.tensor([0.4, 0.6])
    drawn = torch.multinomial(0.3 * a + 0.7 * b, 40_000, True,
                              generator=torch.Generator().manual_seed(0))
    assert weight(a[drawn], b[drawn]) == pytest.approx(0.3, abs=0.05)


def rows_a_call(monkeypatch, measured: float, real: float, overhead: float = 0.0) -> list[int]:
    """Of each call, where a call takes 1 s and each row more `real`, and besides it `overhead`
    passes; `measured` is a row's price by `row_costs`. The datastore has the answer."""
    model = tiny("llama")
    answer = tokens_of(autoregressive(CachedLM(model), [3, 14, 15]), 60)
    target, now, rows = prepared(model, texts=[answer, answer[::-1], answer[1::2]]), [0.0], []

    def forward(ids, parents=None, **how):
        if parents is not None:
            now[0] += 1 + real * (len(ids) - 1) + overhead
            rows.append(len(ids))
        return CachedLM.forward(target, ids, parents, **how)
    target.forward = forward
    monkeypatch.setattr(module, "row_costs", lambda *_: [1 + measured * n for n in range(-1, 16)])
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


def test_a_call_that_takes_longer_for_another_reason_does_not_end_all_guessing(monkeypatch):
    rows = rows_a_call(monkeypatch, 0.01, 0.01, overhead=0.3)
    assert sum(rows[-10:]) >= 20


# ------------------------------------------------------------------------------------ the trust

def test_em_finds_the_trust_that_made_the_tokens():
    """4,000 tokens drawn from chains of three entries with known trust: each within 0.06, four
    standard deviations."""
    rng, true = random.Random(0), {(0, 0, 0): 0.8, (1, 2, 1): 0.3, (1, 4, 2): 0.6}
    chains = []
    for _ in range(4000):
        shares = {place: rng.choice([0.2, 0.5, 1.0]) for place in true}
        produced = next((place for place in true if rng.random() < true[place]), None)
        chains.append([(place, (shares[place] if rng.random() < shares[place] else 0.0)
                        if place == produced else 0.0) for place in true])
    found = fitted([[(place, 1.0 if place == produced else 0.0) for place in true]
                    for produced in (next((x for x in true if rng.random() < true[x]), None)
                                     for _ in range(4000))])
    for (k, often, variety), trust in true.items():
        assert found[k][often][variety] == pytest.approx(trust, abs=0.06)
    assert made([((0, 0, 0), 0.5), ((1, 0, 0), 1.0)], HALF) == ([0.25, 0.25], 0.25)
    assert chains


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
    with pytest.raises(InputError, match="a guess that"):
        next(hybrid(CachedLM(model), [1], guess="eagle", trust=str(tmp_path / "t.json")))
    with pytest.raises(InputError, match="another model's"):
        load_trust(str(tmp_path / "t.json"), tiny("llama", seed=1))


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
    for argv in (["--guess", "rest"], ["--nodes", "65"], ["--nodes", "-1"], ["--trust", "none"],
                 ["--datastore", "none"], ["--adapter", "none"]):
        assert main([hybrid], report, [*argv, "--prompt", "x"]) == 2
        said_in_one_line("expected", capfd)


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
