"""How far to trust n-grams and a trained part: EM and a pool by hand, and answers that are replayed
as in decoding."""
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from common import InputError
from families import tiny
from hybrid import fit as module
from hybrid import guessers
from hybrid import hybrid as hybrid_module
from hybrid.fit import CLASSES, fit, fit_pool, fit_trust, replay_answers, replay_part
from hybrid.guessers import load_trust, pool_chances
from hybrid.hybrid import hybrid
from hybrid.ngrams import NGrams
from support.engine import EngineLM
from support.released import is_head
from survey.medusa import Heads
from survey.mtp import MTPBlock
from survey.rest import BOUNDARY, Datastore, as_text, as_tokens
from trainings import WORDLESS


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
    two times, and the parts name y."""
    model, stores, texts, file = tiny("llama"), [], [""], str(tmp_path / "t.json")
    group, guessed = (0, 2, 1), [{"y": 0.6}] * 2
    (tmp_path / "hydra.safetensors").touch()

    def replay(lm, data, store, parts):
        stores.append(store.text)
        texts[0] = BOUNDARY.join([*(as_text(p[-2:] + a) for p, a in data), "kept"])
        return "xy", [[(group, Counter(x=3, z=1))]] * 2, dict.fromkeys(parts, guessed)
    monkeypatch.setattr(guessers, "load_mtp", lambda path, model: MTPBlock(model, len(path)))
    for place in module, hybrid_module:
        monkeypatch.setattr(place, "load_datastore", lambda *_: Datastore(texts[0]))
    monkeypatch.setattr(module, "replay_answers", replay)
    monkeypatch.setattr(guessers, "load_heads", lambda *_: Heads(model, "hydra", 4 - len(stores)))

    def fit_to(name: str) -> None:
        fit(model, WORDLESS, [[x, 9, 7] for x in range(4, 24)], out=tmp_path / name,
            work=tmp_path, max_new_tokens=12, adapters=tmp_path)
    fit_to("first.json")
    fit_to("t.json")
    known, trust = load_trust(file, model), fit_trust([[(group, 0.75)], [(group, 0.0)]], CLASSES)
    chances = [{x: trust[0][2][1] * share for x, share in (("x", 0.75), ("z", 0.25))}] * 2
    assert stores == ["", "kept"] and known["trust"] == trust
    assert known["pools"] == {"none": []} | dict.fromkeys(
        ("hydra", "mtp"), fit_pool("xy", guessed, chances))
    assert is_head(known["parts"]["mtp"], MTPBlock(model))  # of the target's own files: path ""
    for guess, said in (("dflash", "--guess must be one that .* was fitted for, got dflash"),
                        ("hydra", "--trust must be a .* fitted for this part of hydra, got")):
        with pytest.raises(InputError, match=said):
            next(hybrid(EngineLM(model), [1], guess=guess, trust=file))

    def refuse(*_):
        raise InputError("a block that is quantised")
    monkeypatch.setattr(guessers, "load_mtp", refuse)
    fit_to("last.json")
    assert {*load_trust(tmp_path / "last.json", model)["pools"]} == {"none", "hydra"}
    assert "mtp is left out: a block that is quantised\n" in capsys.readouterr().err


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
