"""The hybrid's chances are checked by hand, and the rows and passes that pay. That its text is the
target's is in test_lossless.py, that its chances are honest in test_bench.py, and the trust in
test_fit.py."""
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from families import tiny
from hybrid import hybrid as module
from hybrid.guessers import KINDS, pool_chances
from hybrid.hybrid import PASS, grow_hybrid, hybrid
from hybrid.ngrams import STORE, NGrams, class_of_variety
from methods import FILES, METHODS, trusting
from support.clock import Clock
from support.engine import EngineLM
from support.trees import RANKS
from survey.recycling import Successors
from survey.rest import BOUNDARY, Datastore, as_text, as_tokens

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
    ngrams, asked, paths = NGrams(as_tokens("abcabdab"), Datastore("q"), HALF), {}, [()]
    part = part_of(lambda path, worth: asked.update({path: worth}) or {}, 2)
    ids, parents, chances = grow_hybrid(as_tokens("b")[0], ngrams, part, POOL, 20, 0.01, 0.2)
    for token, parent in zip(ids[1:], parents[1:]):
        paths.append((*paths[parent], token))
    assert len(asked) == 3 and asked == pytest.approx({
        path: 2 * chance * (1 - max(ngrams.predict(path).values())) / 0.2
        for path, chance in zip(paths, chances) if len(path) < 2})


# ------------------------------------------------------------------------------ a trained part

@pytest.mark.parametrize("kind", KINDS)
def test_a_part_reads_all_that_waits(kind):
    """The chances are the same if the part is asked after every token, after some, or after a
    prompt that has most of them. A part that overflows gives none, and one without a feature gives
    no token."""
    model, text, found = tiny("llama"), [3, 14, 15, 9, 2, 6, 5, 35, 8], []
    target, weights = random_part(model, kind)
    part = KINDS[kind](target, kind, "part")
    target.start(text, taps=part.taps)
    for ends in (range(1, 9), [1, 3, 4, 8], [7, 8]):
        part.start(target.features[:0], [])
        assert part.predict() == {}
        for first, end in zip([0, *ends], ends):
            part.add(target.features[first:end], text[first + 1:end + 1])
            if end != 3:
                chances = part.predict()
        found.append(chances)
    for chances in found[1:]:
        assert found[0] == pytest.approx(chances, rel=1e-4) and len(chances) == RANKS
        assert max(chances) < 50
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
    expected = {60 - token: chance for token, chance in found[0].items()}
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
