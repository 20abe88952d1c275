"""Cascades of drafts: exact at every level; a part of a cache is the cache under a mask; the
cheapest guesser by hand."""
import copy
import itertools

import pytest
import torch

from common import CachedLM, InputError, Sampler, attention_mask, autoregressive, windows_of
from fake_models import ScriptedLM, markov
from families import FAMILIES, MORE_FAMILIES, near, tiny
from helpers import main, said_in_one_line, tokens_of
from laws import chi_square_ok
from survey import cascade as module
from survey.cascade import (Level, MaxGram, Part, bigrams, cascade, ends, queries, report,
                            retrieved, review, triforce)
from survey.rest import as_text, load_datastore

PROMPT = [3, 14, 15]
ALL = {**FAMILIES, **MORE_FAMILIES}
REPLACED = [name for name in ALL if tiny(name).config._attn_implementation == "grouped"]


# ------------------------------------------------------------------------------- levels, reviews

@pytest.mark.parametrize("name", ALL)
def test_greedy_cascade_equals_autoregressive(name):
    """Two drafts and Max-Gram, with EOS and limits inside drafts, to the end of the context."""
    model, eos = tiny(name, max_position_embeddings=60), {7, 30}
    drafts = [near(model, 0.02), near(model, 0.05)]
    for prompt, n, stops in (([3, 14, 15], 40, eos), ([5], 59, ()), ([2] * 50, 10, ())):
        expected = tokens_of(autoregressive(CachedLM(model), prompt), n, stops)
        for gamma, inner, tail in ((4, 2, 2), (1, 0, 0), (0, 1, 3)):
            first, *more = map(CachedLM, drafts)
            chunks = cascade(CachedLM(model), first, prompt, gamma=gamma, inner=inner, tail=tail,
                             grams="", more_drafts=more)
            assert tokens_of(chunks, n, stops) == expected


@pytest.mark.parametrize("name", REPLACED)
def test_greedy_triforce_equals_autoregressive(name):
    model, eos = tiny(name, max_position_embeddings=60), {7, 30}
    draft = near(model, 0.03)
    for prompt, n, stops in (([3, 14, 15], 40, eos), ([5], 59, ()), ([2] * 50, 10, ())):
        expected = tokens_of(autoregressive(CachedLM(model), prompt), n, stops)
        for how in (dict(), dict(gamma=3, inner=0, budget=6, chunk=2, sinks=2, window=5),
                    dict(gamma=1, inner=4, budget=3, chunk=3, sinks=1, window=1)):
            chunks = triforce(CachedLM(model), CachedLM(draft), prompt, **how)
            assert tokens_of(chunks, n, stops) == expected


def test_a_level_drops_what_is_no_longer_in_the_text():
    model = tiny("llama")
    level = Level(CachedLM(model), [])
    level.lm.start([])
    for text, n in (([3, 1, 4], 1), ([3, 1, 4, 1], 1), ([3, 1, 5, 9, 2], 3), ([3, 1, 5], 2),
                    ([3, 1, 5], 1), ([7, 7], 2)):
        logits = level.after(text, n)
        expected = model(input_ids=torch.tensor([text])).logits[0, -n:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert level.lm.length == len(text)


def test_only_what_is_new_is_fed():
    level = Level(ScriptedLM(lambda tokens: torch.zeros(4)), [1, 2])
    level.lm.start([1, 2])
    level.after([1, 2, 3, 0], 1)
    assert level.lm.rows == 2
    level.after([1, 2, 3, 1, 1], 2)
    assert level.lm.rows == 4
    level.after([1, 2, 3, 1, 1], 1)
    assert level.lm.rows == 5


class Branches:
    """All outcomes of a random computation: its choices go through `choose`, which takes them one
    after the other, over all runs."""

    def __init__(self):
        self.script, self.options, self.weight = [], [], 1.0

    def choose(self, probs: list[float]) -> int:
        i = len(self.options)
        possible = [x for x, p in enumerate(probs) if p > 0]
        if i == len(self.script):
            self.script.append(0)
        self.options.append(len(possible))
        outcome = possible[self.script[i]]
        self.weight *= probs[outcome]
        return outcome

    def all(self, run):
        """(outcome, weight) of every run."""
        while True:
            self.options, self.weight = [], 1.0
            yield run(), self.weight
            while self.script and self.script[-1] + 1 == self.options[len(self.script) - 1]:
                self.script.pop()
            if not self.script:
                return
            self.script[-1] += 1


class Chooser(Sampler):
    def __init__(self, branches):
        super().__init__(1.0)
        self.branches = branches


def chosen_verify(p, q, guesses, sample):
    """Leviathan's rule, in double precision, by choices."""
    p, q = p.double(), q.double()
    for i, x in enumerate(guesses):
        accept = min(1.0, (p[i, x] / q[i, x]).item())
        if not sample.branches.choose([1 - accept, accept]):
            left = (p[i] - q[i]).clamp(min=0)
            return i, sample.branches.choose((left / left.sum()).tolist())
    return len(guesses), sample.branches.choose((p[-1] / p[-1].sum()).tolist())


@pytest.mark.parametrize("counts, drafts, grams", [
    ([[2], [1]], 1, True), ([[1, 1], [2]], 1, True), ([[0, 2], [0]], 1, True),
    ([[2], [1], []], 2, False), ([[1, 1], [1], []], 2, False), ([[2, 1], [2], []], 2, False),
    ([[1, 1, 1], [1], [1]], 2, True)])
def test_reviews_have_the_first_models_distribution(counts, drafts, grams, monkeypatch):
    """By enumeration of all choices over 3 tokens, at every level: what a round gives, and what a
    draft gives to a round; the tokens after it are the model's."""
    monkeypatch.setattr(module, "verify", chosen_verify)
    models = [markov(seed, vocab=3) for seed in range(drafts + 1)]
    text = [0, 1, 2, 1]
    for first in range(drafts):
        branches = Branches()

        def run():
            levels = [Level(ScriptedLM(logits), text[:2]) for logits in models[first:]]
            for level in levels:
                level.lm.start(text[:2])
            levels += [MaxGram({}, 3)] * grams
            return review(levels, counts[first:], text, Chooser(branches))
        law = torch.zeros(3, 3, 3, dtype=torch.float64)
        runs = 0
        for (tokens, probs), weight in branches.all(run):
            runs += 1
            assert len(tokens) == len(probs)
            for i in range(len(tokens)):
                known = models[first](text + tokens[:i]).softmax(-1)
                torch.testing.assert_close(probs[i], known)
            law += weight * going_on(models[first], text, tokens[:3])
        expected = going_on(models[first], text, [])
        assert runs > 3 and law.sum().item() == pytest.approx(1)
        torch.testing.assert_close(law, expected, atol=1e-6, rtol=1e-6)


def going_on(logits, text, tokens) -> torch.Tensor:
    """[3, 3, 3]: of the three tokens after a text that begin with these, drawn one by one."""
    law = torch.zeros(3, 3, 3, dtype=torch.float64)
    for new in itertools.product(range(3), repeat=3 - len(tokens)):
        known, weight = [*tokens], 1.0
        for x in new:
            weight *= logits(text + known).double().softmax(-1)[x].item()
            known.append(x)
        law[tuple(known)] += weight
    return law


def test_better_drafts_write_first_and_each_reviews_the_next():
    """How many tokens each model is fed in a round."""
    class Agreeing(ScriptedLM):
        def __init__(self):
            super().__init__(lambda tokens: 50 * torch.eye(9)[(tokens[-1] + 1) % 9])
    target, draft, cheap = Agreeing(), Agreeing(), Agreeing()
    target.vocab, target.model = 9, None
    log = []
    chunks = cascade(target, draft, [0, 1], gamma=4, inner=2, tail=3, grams="",
                     more_drafts=[cheap], log=log)
    assert next(chunks) == [2, 3, 4, 5, 6, 7, 8, 0]  # 4 + 3 and one more; no token came twice yet
    assert log == [{"drafted": 7, "accepted": 7}] and target.calls == 1
    assert draft.calls == 2  # each reviews two of the cheap one's, and adds one
    assert cheap.calls == 4 + 3  # alone: Max-Gram has nothing to say
    assert tokens_of(chunks, 20) == [(i + 1) % 9 for i in range(20)]


def test_a_perfect_draft_is_accepted_whole():
    model = tiny("llama")
    for sample in (Sampler(0), Sampler(1.0, seed=3)):
        log = []
        chunks = cascade(CachedLM(model), CachedLM(model), PROMPT, gamma=5, inner=0, tail=0,
                         grams="", sample=sample, log=log)
        tokens_of(chunks, 30)
        assert log == [{"drafted": 5, "accepted": 5}] * 5


# ------------------------------------------------------------------------------------ Max-Gram

def test_max_gram_by_hand():
    known = MaxGram({}, 9)
    assert known.guess([1, 2, 3, 4, 1, 2], 2) == [3, 4]
    assert known.guess([1, 2, 3, 2, 4, 1, 2], 1) == [3]  # "1 2" before the later "2"
    assert known.guess([1, 2, 3, 2, 4, 5, 2], 1) == [4]  # of equals the latest
    assert known.guess([1, 2, 3], 2) == [] == known.guess([1], 2) == known.guess([1, 1], 0)
    assert known.guess([5, 1, 1], 4) == [1, 1, 1, 1]  # and what it guessed goes on
    followers = MaxGram({as_text([3]): as_text([1]), as_text([1]): as_text([8])}, 9)
    assert followers.guess([1, 2, 3], 5) == [1, 2, 3, 1, 2]
    assert followers.guess([2, 3], 9) == [1, 8]
    beyond = MaxGram({as_text([3]): as_text([9]), as_text([9]): as_text([1])}, 9)
    assert beyond.guess([3], 2) == []  # 9 is no token of the model, and ends the guesses


def test_bigrams_are_the_most_frequent_followers(embedded, monkeypatch):
    target, _, _ = embedded
    store = type("Store", (), {"text": as_text([1, 2, 1, 2, 1, 3, -1, 3, 4, -1, 3, -1, 3])})
    monkeypatch.setattr(module, "load_datastore", lambda *_: store)
    assert bigrams("x", target) == {as_text([x]): as_text([y]) for x, y in ((1, 2), (2, 1), (3, 4))}
    assert bigrams("", target) == {}


def test_the_datastores_bigrams(embedded):
    target, _, _ = embedded
    found = bigrams(module.DATASTORE, target)
    text = load_datastore(module.DATASTORE, target).text
    some = max(found, key=text.count)
    counts = [text.count(some + y) for y in set(text) - {"\0"}]
    assert len(found) > 100 and text.count(some + found[some]) == max(counts)


# ------------------------------------------------------------------------- a part of the cache

def masked(model, text: list[int], new: list[int], kept: list[int]) -> torch.Tensor:
    """Logits of `new` behind a text, of which only the rows `kept` are seen; all at once."""
    T, n = len(text), len(new)
    visible = torch.ones(T + n, T + n).tril().bool()
    hidden = [i for i in range(T) if i not in kept]
    visible[T:, hidden] = False
    at = torch.arange(T + n)[None]
    mask = attention_mask(windows_of(model), visible[None], at, at, model.lm_head.weight)
    ids = torch.tensor([text + new])
    return model(input_ids=ids, position_ids=at, attention_mask=mask).logits[0, T:].detach()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "opt"])
def test_rows_keep_their_positions(name):
    """Kept rows with gaps between them are the whole context under a mask; so are more calls."""
    model, text = tiny(name), [5, 3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9]
    whole, part = CachedLM(model), Part(model)
    whole.start(text)
    kept = [0, 1, 4, 5, 9, 10, 11]
    heads = whole.cache.layers[0][0].shape[1]
    part.take(whole, {i: torch.tensor(kept).expand(heads, -1) for i in whole.cache.layers}, 4)
    logits = part.forward([7, 9, 3])
    torch.testing.assert_close(logits, masked(model, text, [7, 9, 3], kept), atol=2e-4, rtol=1e-4)
    part.commit([0, 1])
    torch.testing.assert_close(part.forward([3, 1]), masked(model, text, [7, 9, 3, 1], kept)[2:],
                               atol=2e-4, rtol=1e-4)
    part.truncate(len(text))
    torch.testing.assert_close(part.forward([7, 9, 3]), logits)


def test_no_window_leaves_the_first_rows_out():
    """And windows count from the newest rows' own places."""
    model, text = tiny("mistral"), list(range(2, 32))
    [window] = windows_of(model).values()
    whole, part = CachedLM(model), Part(model)
    whole.start(text)
    kept = [0, 1, *range(15, 30)]
    part.take(whole, {i: torch.tensor(kept).expand(2, -1) for i in whole.cache.layers}, 2)
    part.forward([7, 9])
    _, mask = part.layout(part.parents, [False, False])
    slots = [-1, -1, *range(15, 30), 30, 31]  # -1: seen by all
    for row, place in enumerate((30, 31)):
        expected = [slot < 0 or place - window < slot <= place for slot in slots]
        assert (mask[0, 0, row] == 0).tolist() == expected


def test_heads_may_keep_different_rows():
    model, text = tiny("llama"), list(range(2, 12))
    whole, part = CachedLM(model), Part(model)
    whole.start(text)
    slots = {i: torch.tensor([[0, 3, 9], [2, 5, 9]]) for i in whole.cache.layers}
    part.take(whole, slots, 2)
    for i, buffers in part.cache.layers.items():
        for ours, theirs in zip(buffers, whole.cache.layers[i]):
            for head, some in enumerate(slots[i].tolist()):
                torch.testing.assert_close(ours[0, head, :3], theirs[0, head, some])


def test_the_whole_context_takes_the_place_of_new_rows():
    model, text = tiny("llama"), list(range(2, 14))
    whole, part = CachedLM(model), Part(model)
    whole.start(text)
    heads = whole.cache.layers[0][0].shape[1]
    slots = torch.tensor([0, 1, 8, 9, 10, 11]).expand(heads, -1)
    part.take(whole, {i: slots for i in whole.cache.layers}, 2)
    for lm in (part, whole):
        lm.forward([7, 9])
        lm.commit([0, 1])
    part.follow(whole, 12)
    assert part.length == 14
    for i, buffers in part.cache.layers.items():
        for ours, theirs in zip(buffers, whole.cache.layers[i]):
            torch.testing.assert_close(ours[:, :, 6:8], theirs[:, :, 12:14])


def test_what_is_retrieved_is_what_the_last_row_looks_at():
    """Queries and cached keys make the attention of transformers' own eager path; the chunks are
    the best of it, by their mean keys, for each key head."""
    model, text = tiny("llama"), [5, 3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7, 2, 1, 4, 6, 3]
    lm = CachedLM(model)
    lm.start(text)
    found = queries(lm, 11)
    assert lm.length == len(text) and model.config._attn_implementation == "grouped"
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    ids = torch.tensor([text + [11]])
    attentions = eager(input_ids=ids, output_attentions=True).attentions
    cached = CachedLM(model)
    cached.start(text + [11])
    slots, P = retrieved(lm, 11, budget=8, chunk=4)
    assert P == 8
    for layer, query in found.items():
        keys = cached.cache.layers[layer][0][0, :, :len(text) + 1]
        groups = len(query) // len(keys)
        scores = torch.einsum("hd,hsd->hs", query, keys.repeat_interleave(groups, 0))
        weights = (scores / query.shape[1] ** 0.5).softmax(-1)
        torch.testing.assert_close(weights, attentions[layer][0, :, -1], atol=1e-5, rtol=1e-4)
        for head, some in enumerate(slots[layer].tolist()):
            own = scores[head * groups:(head + 1) * groups, :16].sum(0).view(4, 4).mean(1)
            best = 1 + own[1:].argmax().item()
            assert some == [*range(4), *range(4 * best, 4 * best + 4), 16, 17]


def test_first_and_newest_rows():
    model = tiny("llama")
    lm = CachedLM(model)
    lm.start(list(range(12)))
    slots, P = ends(lm, 3, 9)
    assert P == 0 and slots[0].tolist() == [[*range(12)]] * 2
    slots, P = ends(lm, 2, 4)
    assert P == 2 and slots[1].tolist() == [[0, 1, 8, 9, 10, 11]] * 2
    part = Part(model)
    part.take(lm, slots, P)
    part.forward([7, 9])
    part.commit([0, 1])
    again, P = ends(part, 2, 3)
    assert P == 2 and again[0].tolist() == [[0, 1, 5, 6, 7]] * 2
    kept = copy.deepcopy(part.cache.layers)
    part.take(part, again, P)
    assert part.length == 14 and part.prefix == 5 - 14
    for layer, buffers in part.cache.layers.items():
        for ours, before in zip(buffers, kept[layer]):
            torch.testing.assert_close(ours[:, :, :5], before[:, :, [0, 1, 5, 6, 7]])


def test_a_budget_as_large_as_the_context_is_the_target():
    """All that the middle level drafts is accepted; a small one's is not."""
    model, draft = tiny("llama"), near(tiny("llama"), 0.1)
    text = [x % 50 + 2 for x in range(0, 300, 7)]
    shares = []
    for budget in (64, 4):
        log = []
        chunks = triforce(CachedLM(model), CachedLM(draft), text, budget=budget, chunk=4, sinks=2,
                          window=6, sample=Sampler(1.0, seed=1), log=log)
        tokens_of(chunks, 36)
        shares.append(sum(r["accepted"] for r in log[:-1]) / sum(r["drafted"] for r in log[:-1]))
    assert shares[0] == 1 > shares[1] + 0.2


def test_calls_are_counted_and_the_last_token_asks(monkeypatch):
    """One of the target a round; those of the draft, over all prompts; rows are retrieved for the
    prompt's last token."""
    model, tokens = tiny("llama"), []
    monkeypatch.setattr(module, "retrieved", lambda lm, token, *more:
                        tokens.append(token) or retrieved(lm, token, *more))
    target, draft = CachedLM(model), CachedLM(near(model, 0.1))
    calls = []
    for prompt in ([3, 9, 27, 20], [5, 6, 7]):
        chunks = triforce(target, draft, prompt)
        for _ in range(4):
            next(chunks)
        calls.append((target.calls, draft.calls))
    assert calls[0][0] == 4 and calls[1][0] == 8 and 4 <= calls[0][1] < calls[1][1]
    assert tokens == [20, 7]


def test_the_draft_never_keeps_more_than_sinks_and_two_windows(monkeypatch):
    model, draft = tiny("llama"), near(tiny("llama"), 0.1)
    widths = []
    real = Part.layout

    def layout(part, parents, sees_prefix):
        positions, mask = real(part, parents, sees_prefix)
        if part.model is draft:
            widths.append(mask.shape[-1])
        return positions, mask
    monkeypatch.setattr(Part, "layout", layout)
    chunks = triforce(CachedLM(model), CachedLM(draft), PROMPT, gamma=3, sinks=2, window=8)
    tokens_of(chunks, 60)
    assert 20 < max(widths) <= 2 + 2 * 8 + 2 * (3 + 1) + 2


def test_sampling_with_triforce_is_exact():
    """The first two tokens of 1,000 texts: chi-square, false failures below 1e-6."""
    model, draft = tiny("llama"), near(tiny("llama"), 0.2)
    sample, prompt = Sampler(1.0, seed=5), [5, 3, 14, 15, 9, 2, 6, 5]
    target, small = CachedLM(model, 4), CachedLM(draft, 4)
    target.start(prompt)
    expected = torch.zeros(4, 4)
    with torch.no_grad():
        p = model(input_ids=torch.tensor([prompt])).logits[0, -1, :4].softmax(-1)
        for x in range(4):
            q = model(input_ids=torch.tensor([prompt + [x]])).logits[0, -1, :4].softmax(-1)
            expected[x] = p[x] * q
    counts = torch.zeros(4, 4)
    for _ in range(1000):
        chunks = triforce(target, small, prompt, gamma=2, inner=1, budget=2, chunk=2, sinks=1,
                          window=2, sample=sample)
        x, y = tokens_of(chunks, 2)
        counts[x, y] += 1
    assert chi_square_ok(counts.flatten(), expected.flatten())


# --------------------------------------------------------------------------- what is refused

def test_bad_input_is_one_line(capfd):
    for argv in (["--gamma", "-1"], ["--inner", "-1"], ["--tail", "-1"], ["--grams", "nothing"],
                 ["--method", "triforce", "--gamma", "0"],
                 ["--method", "triforce", "--budget", "7"],
                 ["--method", "triforce", "--window", "0"], ["--method", "triforce", "--graphs"],
                 ["--method", "triforce", "--draft", "x", "--draft", "y"]):
        assert main([cascade, triforce], report, [*argv, "--prompt", "x"]) == 2
        said_in_one_line("expected", capfd)


def test_a_model_whose_attention_cannot_be_replaced_is_refused():
    model = tiny("llama", attn_implementation="eager")
    with pytest.raises(InputError, match="attention that can be replaced, got Llama"):
        next(triforce(CachedLM(model), CachedLM(model), PROMPT))


def test_the_embedded_pair(embedded, held_out):
    """AR's output; Max-Gram's tokens make a round longer than the draft's alone."""
    target, draft, _ = embedded
    per_call = []
    for tail in (0, 2):
        lm = CachedLM(target)
        for prompt, expected in held_out:
            chunks = cascade(lm, CachedLM(draft), prompt, tail=tail)
            assert tokens_of(chunks, len(expected)) == expected
        per_call.append(sum(len(expected) for _, expected in held_out) / lm.calls)
    assert per_call[1] > per_call[0] + 0.2 > 4
    for prompt, expected in held_out[:3]:
        chunks = triforce(CachedLM(target), CachedLM(draft), prompt, budget=16)
        assert tokens_of(chunks, len(expected)) == expected
