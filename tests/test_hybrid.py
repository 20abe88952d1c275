"""The hybrid's chances are checked by hand, and the rows and passes that pay. How far n-grams and
trained parts are trusted is fitted by EM and by a pool, to answers that are replayed as in
decoding. That the text is the target's is in test_lossless.py, and that chances are honest in
test_bench.py."""
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from common import autoregressive
from fake_models import paths_of
from families import tiny
from helpers import check_refused, tokens_of
from hybrid import fit as fit_module
from hybrid import guessers
from hybrid import hybrid as module
from hybrid.fit import CLASSES, fit, fit_pool, fit_trust, replay_answers, replay_part
from hybrid.guessers import KINDS, load_trust, pool_chances
from hybrid.hybrid import PASS, grow_hybrid, hybrid
from hybrid.ngrams import STORE, NGrams, class_of_variety
from methods import FILES, METHODS, trusting
from support.clock import Clock
from support.engine import EngineLM
from support.parts import save_trained
from support.trees import RANKS
from survey.medusa import Heads
from survey.mtp import MTPBlock
from survey.recycling import Successors
from survey.rest import BOUNDARY, Datastore, as_text, as_tokens, build
from trainings import WORDLESS

HALF = [[[0.5] * 3] * 5] * 3
POOL = [3.0, 0.5, 0.5]


def random_part(model, kind: str):
    """Make a random part of a kind, and a target that finds it in the file "part". Of 61 rows of
    the LM head 50 are tokens."""
    target = EngineLM(model, 50)
    part = METHODS[kind](model).options["trained"]
    target.memo = trusting(model, part, kind)(target)
    return target, part


def as_letters(chances: dict[int, float]) -> dict[str, float]:
    """Write the tokens of a dictionary as letters."""
    return {as_text([token]): chance for token, chance in chances.items()}


# ----------------------------------------------------------------------------------- n-grams

def test_the_example_of_the_header():
    """Here x y is "on the". After it came m, m, h; after other y came m, m, h, c, c, c, c."""
    trust = [[[0.0] * 3 for _ in range(5)] for _ in range(2)]
    trust[0][2][2], trust[0][3][1] = 0.6, 0.5
    ngrams = NGrams(as_tokens("xym1xym2xyh3ym4ym5yh6yc7yc8yc9yc0xy"), Datastore(), trust)
    assert as_letters(ngrams.predict()) == pytest.approx({"m": 0.48, "h": 0.24, "c": 0.08})
    assert [class_of_variety(Counter(x)) for x in ("aaa", "aaabbb", "aabbb")] == [0, 1, 2]


def test_the_longest_suffix_comes_first_and_of_equals_the_text():
    """A suffix may end in the path. Shorter ones are asked until nearly no mass is left. The end of
    a text of the datastore is no follower."""
    sure = [[[0.8] * 3] * 5] * 2
    store, fgh = Datastore("fghy" + BOUNDARY + "gh" + BOUNDARY), as_tokens("fgh")
    ngrams = NGrams(as_tokens("abcdefghxabcde"), store, sure)
    found = [(k, as_letters(counts)) for (k, *_), counts in ngrams.list_entries(fgh)]
    assert found == [*[(0, {"x": 1})] * 3, (1, {"y": 1}), (0, {"x": 1}), (1, {"y": 1})]
    assert as_letters(ngrams.predict(fgh))["x"] == pytest.approx(1 - 0.2 ** 3)
    assert ngrams.count_followers(STORE, "g") is ngrams.count_followers(STORE, "g")  # kept
    assert len([*NGrams(as_tokens("a"), Datastore("ab" + BOUNDARY), sure).list_entries(())]) == 1
    found = as_letters(NGrams(as_tokens("pqbxxab"), Datastore("aby"), sure).predict())
    assert found == pytest.approx({"y": 0.8 + 0.2 * 0.2 * 0.8, "x": 0.2 * 0.8})


def test_what_the_target_said_comes_last():
    """The text has z once, after "ab" and so after "b". The target said c, a and d after b."""
    trust = [[[0.5] * 3] * 5, [[0.0] * 3] * 5, [[0.4] * 3] * 5]
    successors = Successors()
    successors.rows = {as_tokens("b")[0]: as_tokens("cad")}
    ngrams = NGrams(as_tokens("abzq"), Datastore("q"), trust, successors)
    found, mass = as_letters(ngrams.predict(as_tokens("ab"))), 0.25 * 0.4 / 30
    assert found == pytest.approx({"z": 0.75, "c": mass * 24, "a": mass * 4, "d": mass * 2})


# ------------------------------------------------------------------------------------ the tree

def part_of(predict, depth=1) -> SimpleNamespace:
    """Make a part that guesses by a function of the path."""
    return SimpleNamespace(predict=predict, depth=depth)


def test_the_best_nodes_come_first_and_a_part_is_asked_as_deep_as_it_guesses():
    """A part that says nothing makes no difference."""
    (a, b, c, x), asked = as_tokens("abcx"), []
    ngrams = NGrams(as_tokens("abcabdab"), Datastore("q"), HALF)

    def guess(path, worth):
        asked.append(path)
        return {x: 0.9, c: 0.1}
    ids, parents, chances = grow_hybrid(b, ngrams, part_of(guess), POOL, 20, 0.01, 1.0)
    pooled = pool_chances({x: 0.9, c: 0.1}, ngrams.predict(), POOL)
    edges = [(ids[parent], node) for node, parent in zip(ids, parents)]
    assert asked == [()] and chances == sorted(chances, reverse=True) and chances[0] == 1
    assert chances[edges.index((b, c))] == pytest.approx(pooled[c])
    assert chances[edges.index((c, a))] == pytest.approx(pooled[c] * ngrams.predict([c])[a])
    assert grow_hybrid(b, ngrams, part_of(guess), POOL, 3, 0.01, 1.0)[0] == ids[:3]
    found = grow_hybrid(b, ngrams, part_of(lambda *_: {x: 0.0}), POOL, 20, 0.01, 1.0)
    assert found == grow_hybrid(b, ngrams, None, [], 20, 0.01, 1.0)


def test_a_pass_pays_where_the_n_grams_are_unsure():
    """It brings two tokens, times the chance of the node, times that of their best guess being
    wrong. It costs 0.2 tokens."""
    ngrams, asked = NGrams(as_tokens("abcabdab"), Datastore("q"), HALF), {}
    part = part_of(lambda path, worth: asked.update({path: worth}) or {}, 2)
    ids, parents, chances = grow_hybrid(as_tokens("b")[0], ngrams, part, POOL, 20, 0.01, 0.2)
    assert len(asked) == 3 and asked == pytest.approx({
        path: 2 * chance * (1 - max(ngrams.predict(path).values())) / 0.2
        for path, chance in zip(paths_of(ids, parents), chances) if len(path) < 2})


# ------------------------------------------------------------------------------ a trained part

@pytest.mark.parametrize("kind", KINDS)
def test_a_part_reads_all_that_waits(kind):
    """The chances are the same if the part is asked after every few tokens, or after a prompt that
    has all of them. A part that overflows gives none, and one without a feature gives no token."""
    model, text = tiny("llama"), [3, 14, 15, 9, 2, 6, 5, 35, 8]
    target, weights = random_part(model, kind)
    part = KINDS[kind](target, kind, "part")
    target.start(text, taps=part.taps)
    part.start(target.features[:0], [])
    assert part.predict() == {}
    for first, end in (0, 1), (1, 3), (3, 4), (4, 8):
        part.add(target.features[first:end], text[first + 1:end + 1])
        if end != 3:
            chances = part.predict()
    assert len(chances) == RANKS and max(chances) < 50
    if kind == "dflash":  # each depth by its own row of the block
        logits = weights.add_markov(part.made[()][1], torch.tensor(6))[:50]
        assert max(part.predict([6]).values()) == pytest.approx(logits.softmax(-1).max().item())
    if kind == "mtp":  # a pass for each path, and for the paths above it, if they are worth it
        lm, rows = EngineLM(weights.lm, 50), (target.features[:8], text[1:])
        lm.forward(weights.join(*rows))
        for token in 6, 9:
            logits = lm.forward(weights.join(lm.features[-1:], [token]))[0]
        assert part.predict([6, 9], 1.9) == {} == part.predict([6], 0.9)
        assert part.predict([5], 1) != {} and len(part.made) == 2
        found_below = part.predict([6, 9], 2)
        assert max(found_below.values()) == pytest.approx(logits.softmax(-1).max().item())
        assert part.predict([6, 9], 0) == found_below and len(part.made) == 4
        part.add(target.features[8:], [2])
        assert part.predict([6], 0) == {}  # in another round
    # Row i of the part's LM head stands for token vocab[i], here for 60 in the place of 0.
    weights.vocab = weights.vocab.flip(0)
    part.start(target.features[:8], text[1:])
    expected = {60 - token: chance for token, chance in chances.items()}
    assert part.predict() == pytest.approx(expected, rel=1e-4)
    for p in weights.parameters():
        p.requires_grad_(False).fill_(torch.nan)
    part.start(target.features, text)
    assert not any(part.predict().values())


def test_a_round_is_grown_by_its_prices(monkeypatch):
    """But no node has a chance below LEAST, and with --nodes there are no prices. The steps are the
    passes. The target's choices after rejected nodes are learnt too."""
    target, weights = random_part(tiny("llama"), "mtp")
    known, prices, grown, noted = Successors(), [0.2, 0.001, 0.3], [], []
    monkeypatch.setattr(Clock, "find_prices", lambda clock: (0.1, prices.pop()))
    monkeypatch.setattr(KINDS["mtp"], "seconds", 0.1)
    monkeypatch.setattr(Clock, "note", lambda clock, *note: noted.append(note))
    monkeypatch.setattr(module, "grow_hybrid",
                        lambda *given: grown.append(given[4:]) or grow_hybrid(*given[:4], 9, 0.01,
                                                                              given[6]))
    chunks = hybrid(target, [3, 1, 4], guess="mtp", successors=known, **FILES)
    lengths = [len(next(chunks)) for _ in range(3)]
    passes = target.once(EngineLM, weights.lm, 50).passes
    assert sum(steps for steps, *_ in noted) == len(passes) > 3
    next(hybrid(target, [3, 1, 4], guess="mtp", nodes=5, **FILES))
    assert grown == [*((64, row, pytest.approx(0.01)) for row in (0.3, 0.01, 0.2)), (5, 0.01, PASS)]
    assert [tokens for *_, tokens in noted] == lengths
    assert len(known.rows) > sum(lengths)


# ------------------------------------------------------------------------- what is fitted

def test_em_by_hand():
    """Of 100 tokens 30 are the first entry's, 35 the second's, and 35 came from neither. The second
    is reached in 70 cases. Where nothing was seen, the trust is a half, and it stays below 1."""
    A, B = (0, 0, 0), (1, 2, 1)
    found = fit_trust([[(A, 1.0), (B, 0.0)]] * 30 + [[(A, 0.0), (B, 1.0)]] * 35
                      + [[(A, 0.0), (B, 0.0)]] * 35, CLASSES)
    assert found[0][0][0] == pytest.approx(30.5 / 101, abs=1e-3) and found[0][1][1] == 0.5
    assert found[1][2][1] == pytest.approx(35.5 / 71, abs=1e-3)
    assert fit_trust([[(A, 1.0)]] * 99, CLASSES)[0][0][0] == pytest.approx(0.99)
    # In the first step A gives 1/2 · 1/2 and B gives 1/4 · 1/4: .8 comes from A, and .2 from B. In
    # the second step A gives .65 · 1/2 and B gives .35 · .583 · 1/4: .864 and .136.
    chains = [[(A, 0.5), (B, 0.25)]]
    for rounds, of_A, of_B in (1, 1.3 / 2, 0.7 / 1.2), (2, 1.364 / 2, 0.636 / 1.136):
        found = fit_trust(chains, CLASSES, rounds)
        assert (found[0][0][0], found[1][2][1]) == pytest.approx((of_A, of_B), abs=1e-3)


def test_a_pool_by_hand():
    """The score e^c p^a q^b of x is 2 x .81 x .5. Only the part names y, so q is .001 there. Only
    the n-grams name z, so p is .001 there."""
    exponents = [torch.tensor(2.0).log().item(), 2.0, 1.0]
    found = pool_chances({"x": 0.9, "y": 0.3}, {"x": 0.5, "z": 0.2}, exponents)
    x, y, z = 2 * 0.81 * 0.5, 2 * 0.09 * 0.001, 2 * 0.001 ** 2 * 0.2
    total = 1 + x + y + z
    assert found == pytest.approx({"x": x / total, "y": y / total, "z": z / total}, rel=1e-4)


def test_a_pool_is_fitted_to_what_is_right():
    """In three kinds of cases a token is named by both, by the part, or by the n-grams, and it is
    right in .95, .8 and .1 of 100."""
    tokens = "".join("x" * n + "y" * (100 - n) for n in (95, 80, 10))
    guessed, chances = [{"x": 0.6}, {"x": 0.6}, {}], [{"x": 0.5}, {}, {"x": 0.5}]
    exponents = fit_pool(tokens, *([x for x in some for _ in range(100)]
                                   for some in (guessed, chances)))
    for p, q, share in zip(guessed, chances, (0.95, 0.8, 0.1)):
        assert pool_chances(p, q, exponents)["x"] == pytest.approx(share, abs=0.01)
    assert fit_pool("", [], []) == [0, 0, 0] == fit_pool("x", [{}], [{}])


def test_trust_is_of_a_model_and_its_parts(tmp_path, monkeypatch, capsys):
    """Answers that the datastore has are left out of it. The n-grams name x, which is right once of
    two times, and the parts name y. A part is left out if the target has none, or if it is another
    model's."""
    model, stores, prompts = tiny("llama"), [], [[x, 9, 7] for x in range(4, 24)]
    group, guessed, first, file = (0, 2, 1), [{"y": 0.6}] * 2, tmp_path / "first", tmp_path / "t"

    def replay(lm, data, store, parts):
        stores.append(as_tokens(store.text))
        return "xy", [[(group, Counter(x=3, z=1))]] * 2, dict.fromkeys(parts, guessed)
    monkeypatch.setattr(fit_module, "replay_answers", replay)
    store, most = str(tmp_path / "store"), dict(max_new_tokens=12)
    build(model, WORDLESS, [*prompts, [3, 1, 4]], out=tmp_path / "store", **most)
    for kind, owner in ("hydra", model), ("medusa", tiny("gpt2")):
        save_trained(tmp_path / f"{kind}.safetensors", Heads(owner, kind, 2), owner)
    how = dict(work=tmp_path, datastore=store, adapters=tmp_path) | most
    fit(model, WORDLESS, prompts, out=first, **how)
    said = capsys.readouterr().err
    assert "mtp is left out: " in said and "medusa is left out: " in said
    monkeypatch.setattr(guessers, "load_mtp", lambda path, model: MTPBlock(model, len(path)))
    fit(model, WORDLESS, prompts, out=file, **how)
    known, trust = load_trust(file, model), fit_trust([[(group, 0.75)], [(group, 0.0)]], CLASSES)
    chances = [{x: trust[0][2][1] * share for x, share in (("x", 0.75), ("z", 0.25))}] * 2
    answer = tokens_of(autoregressive(EngineLM(model), [3, 1, 4]), 12, {1})
    assert stores == [[1, 4, *answer, -1]] * 2 and known["trust"] == trust
    pools = {"none": []} | dict.fromkeys(("hydra", "mtp"), fit_pool("xy", guessed, chances))
    assert known["pools"] == pools and load_trust(first, model)["pools"].keys() == {"none", "hydra"}
    check_refused("--guess must be one that .* was fitted for, got dflash", next,
                  hybrid(EngineLM(model), [1], guess="dflash", trust=file, datastore=store))


def test_a_part_is_replayed_in_rounds():
    """The prompt is 1 2 and the answer 3 to 9. A round ends after a token that the part gives less
    than .1, here 4, or nothing, here 8, and at the part's depth of three. Then the part is told the
    round's pairs. Pair i has feature i and the token after it."""
    told, asked = [], []

    def predict(path):
        asked.append(path)
        return {2 + len(asked): 0.05 if len(asked) == 2 else 0.1} if len(asked) != 6 else {}
    part = SimpleNamespace(depth=3, predict=predict, start=lambda *pairs: told.append(pairs),
                           add=lambda *pairs: told.append(pairs))
    found = replay_part(part, [1, 2], [3, 4, 5, 6, 7, 8, 9], torch.arange(9.0)[:, None])
    assert asked == [[], [3], [], [5], [5, 6], [], []] and [*found[1].values()] == [0.05]
    assert [tokens for _, tokens in told] == [[2], [3, 4], [5, 6, 7], [8]]
    assert torch.cat([features for features, _ in told]).flatten().tolist() == [*range(7)]


def test_answers_are_replayed_as_in_decoding(monkeypatch):
    """A part is told what enters its taps, side by side. The target's choices are read after the
    text's own tokens, before the next token is known, and are kept for the next answer. Entries are
    as they were before each token."""
    model, told, seen, real = tiny("llama"), {}, [], NGrams.list_entries
    parts = {kind: SimpleNamespace(
        taps=taps, depth=1, start=lambda x, tokens, kind=kind: told.setdefault(kind, x),
        add=lambda *pairs: None, predict=lambda path: {})
        for kind, taps in (("hydra", [2]), ("dflash", [0, 1]))}
    monkeypatch.setattr(NGrams, "list_entries", lambda self, path: seen.append(
        (as_tokens(self.text), dict(self.successors.rows))) or real(self, path))
    data = [([3, 9, 7], [4, 5, 4, 9]), ([9, 3], [5, 4])]
    store = Datastore(as_text([7, 6]) + BOUNDARY)
    tokens, entries, guessed = replay_answers(EngineLM(model, 50), data, store, parts)
    assert tokens == [4, 5, 4, 9, 5, 4] and [*map(len, guessed.values())] == [6, 6]
    assert entries[0] == [((1, 0, 0), Counter([6]))]
    assert entries[3][0] == ((0, 0, 0), Counter([5]))
    expected = {}
    for text, rows in seen:
        assert rows == expected
        logits = model(torch.tensor([text])).logits[0, -1, :50]
        expected[text[-1]] = logits.topk(8).indices.tolist()
    states = model.model(torch.tensor([[3, 9]]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(told["hydra"], states[2][0])
    torch.testing.assert_close(told["dflash"], torch.cat(states[:2], -1)[0])
