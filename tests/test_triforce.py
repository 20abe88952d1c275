"""TriForce: a part of a cache is the cache under a mask; rows are retrieved by what attention asks
for; output is the target's."""
import copy

import pytest
import torch

from common import CachedLM, InputError, Sampler, attention_mask, windows_of
from families import near, tiny
from helpers import main, said_in_one_line, tokens_of
from survey import triforce as module
from survey.triforce import (PartialLM, choose_ends, record_queries, report_acceptance, retrieve,
                             triforce)

PROMPT = [3, 14, 15]
# -------------------------------------------------------------------------------- a part of a cache

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
    whole, part = CachedLM(model), PartialLM(model)
    whole.start(text)
    kept = [0, 1, 4, 5, 9, 10, 11]
    heads = whole.cache.layers[0][0].shape[1]
    part.take(whole, {i: torch.tensor(kept).expand(heads, -1) for i in whole.cache.layers}, 4, 12)
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
    whole, part = CachedLM(model), PartialLM(model)
    whole.start(text)
    kept = [0, 1, *range(15, 30)]
    part.take(whole, {i: torch.tensor(kept).expand(2, -1) for i in whole.cache.layers}, 2, 30)
    part.forward([7, 9])
    _, mask = part.layout(part.parents, [False, False])
    slots = [-1, -1, *range(15, 30), 30, 31]  # -1: seen by all
    for row, place in enumerate((30, 31)):
        expected = [slot < 0 or place - window < slot <= place for slot in slots]
        assert (mask[0, 0, row] == 0).tolist() == expected


def test_heads_may_keep_different_rows():
    model, text = tiny("llama"), list(range(2, 12))
    whole, part = CachedLM(model), PartialLM(model)
    whole.start(text)
    slots = {i: torch.tensor([[0, 3, 9], [2, 5, 9]]) for i in whole.cache.layers}
    part.take(whole, slots, 2, 10)
    for i, buffers in part.cache.layers.items():
        for ours, theirs in zip(buffers, whole.cache.layers[i]):
            for head, some in enumerate(slots[i].tolist()):
                torch.testing.assert_close(ours[0, head, :3], theirs[0, head, some])


def test_the_whole_context_takes_the_place_of_new_rows():
    model, text = tiny("llama"), list(range(2, 14))
    whole, part = CachedLM(model), PartialLM(model)
    whole.start(text)
    heads = whole.cache.layers[0][0].shape[1]
    slots = torch.tensor([0, 1, 8, 9, 10, 11]).expand(heads, -1)
    part.take(whole, {i: slots for i in whole.cache.layers}, 2, 12)
    for lm in (part, whole):
        lm.forward([7, 9])
        lm.commit([0, 1])
    part.copy_newest(whole, 12)
    assert part.text_length == 14 and part.length == 4 + 2
    for i, buffers in part.cache.layers.items():
        for ours, theirs in zip(buffers, whole.cache.layers[i]):
            torch.testing.assert_close(ours[:, :, 6:8], theirs[:, :, 12:14])


def test_first_and_newest_rows():
    model = tiny("llama")
    lm = CachedLM(model)
    lm.start(list(range(12)))
    slots, kept = choose_ends(lm, 3, 9)
    assert kept == 0 and slots[0].tolist() == [[*range(12)]] * 2
    slots, kept = choose_ends(lm, 2, 4)
    assert kept == 2 and slots[1].tolist() == [[0, 1, 8, 9, 10, 11]] * 2
    part = PartialLM(model)
    part.take(lm, slots, kept, 12)
    part.forward([7, 9])
    part.commit([0, 1])
    again, kept = choose_ends(part, 2, 3)
    assert kept == 2 and again[0].tolist() == [[0, 1, 5, 6, 7]] * 2
    before = copy.deepcopy(part.cache.layers)
    part.take(part, again, kept, part.text_length)
    assert (part.prefix, part.length, part.text_length) == (2, 3, 14)
    for layer, buffers in part.cache.layers.items():
        for ours, theirs in zip(buffers, before[layer]):
            torch.testing.assert_close(ours[:, :, :5], theirs[:, :, [0, 1, 5, 6, 7]])


# ---------------------------------------------------------------------------------------- retrieval

def test_what_is_retrieved_is_what_the_last_row_looks_at():
    """Queries and cached keys make the attention of transformers' own eager path; the chunks are
    the best of it, by their mean keys, for each key head."""
    model, text = tiny("llama"), [5, 3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7, 2, 1, 4, 6, 3]
    lm = CachedLM(model)
    lm.start(text)
    with record_queries(model) as found:
        lm.forward([11])
        assert model.config._attn_implementation != "grouped"
    lm.truncate(len(text))
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    ids = torch.tensor([text + [11]])
    attentions = eager(input_ids=ids, output_attentions=True).attentions
    cached = CachedLM(model)
    cached.start(text + [11])
    slots, kept = retrieve(lm, 11, budget=8, chunk=4)
    assert kept == 8 and lm.length == len(text) and lm.calls == 1
    assert model.config._attn_implementation == "grouped"
    for layer, query in found.items():
        keys = cached.cache.layers[layer][0][0, :, :len(text) + 1]
        groups = len(query) // len(keys)
        scores = torch.einsum("hd,hsd->hs", query, keys.repeat_interleave(groups, 0))
        weights = (scores / query.shape[1] ** 0.5).softmax(-1)
        torch.testing.assert_close(weights, attentions[layer][0, :, -1], atol=1e-5, rtol=1e-4)
        for head, some in enumerate(slots[layer].tolist()):
            likes = scores[head * groups:(head + 1) * groups, :16].sum(0).view(4, 4).mean(1)
            best = 1 + likes[1:].argmax().item()
            assert some == [*range(4), *range(4 * best, 4 * best + 4), 16, 17]


def test_a_model_whose_attention_cannot_be_replaced_is_refused():
    model = tiny("llama", attn_implementation="eager")
    with pytest.raises(InputError, match="attention that can be replaced, got Llama"):
        next(triforce(CachedLM(model), CachedLM(model), PROMPT))


# ----------------------------------------------------------------------------------------- decoding

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


def test_the_caches_after_a_round_have_the_rows_of_the_text():
    """C_p all of them; C_r those of the newest tokens bit for bit from C_p; positions go on."""
    model, draft = tiny("llama"), near(tiny("llama"), 0.1)
    text = [x % 50 + 2 for x in range(0, 300, 7)]
    made = []
    real = PartialLM.__init__
    try:
        PartialLM.__init__ = lambda self, *args: made.append(self) or real(self, *args)
        target = CachedLM(model)
        chunks = triforce(target, CachedLM(draft), text, gamma=3, budget=8, chunk=4, sinks=2,
                          window=6)
        for _ in range(6):
            text = text + next(chunks)
            part, small = made
            assert target.length == part.text_length == len(text) - 1 >= small.text_length
            assert part.prefix == 8 and part.skipped == 40 and small.prefix == 2
            for layer, (keys, _) in part.cache.layers.items():
                slots = slice(8, 8 + part.length)
                whole = target.cache.layers[layer][0]
                assert torch.equal(keys[:, :, slots][:, :, 3:], whole[:, :, 43:len(text) - 1])
    finally:
        PartialLM.__init__ = real


def test_the_head_reads_only_what_somebody_asks_for():
    """No row of a prompt or of the retrieval; γ + 1 rows of the whole target's verification."""
    model, rows = tiny("llama"), []
    draft = near(model, 0.0)  # agrees, and has a head of its own
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: rows.append(inputs[0].shape[-2]))
    next(triforce(CachedLM(model), CachedLM(draft), [5] * 140, gamma=4, inner=1))
    assert [n for n in rows if n] == [2, 2, 5]  # two reviews of one guess give four tokens


def test_calls_are_counted_and_the_last_token_asks(monkeypatch):
    """One of the target a round; those of the draft, over all prompts; rows are retrieve for the
    prompt's last token."""
    model, tokens = tiny("llama"), []
    monkeypatch.setattr(module, "retrieve", lambda lm, token, *more:
                        tokens.append(token) or retrieve(lm, token, *more))
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
    real = PartialLM.layout

    def layout(part, parents, sees_prefix):
        positions, mask = real(part, parents, sees_prefix)
        if part.model is draft:
            widths.append(mask.shape[-1])
        return positions, mask
    monkeypatch.setattr(PartialLM, "layout", layout)
    chunks = triforce(CachedLM(model), CachedLM(draft), PROMPT, gamma=3, sinks=2, window=8)
    tokens_of(chunks, 60)
    assert 20 < max(widths) <= 2 + 2 * 8 + 2 * (3 + 1) + 2


# ---------------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize("argv, said", [
    (["--gamma", "0"], "--gamma must be 1 or more, got 0"),
    (["--inner", "-1"], "--inner must be 0 or more, got -1"),
    (["--budget", "7"], "--budget must be 8 or more, got 7"),
    (["--chunk", "0"], "--chunk must be 1 or more, got 0"),
    (["--sinks", "0"], "--sinks must be 1 or more, got 0"),
    (["--window", "0"], "--window must be 1 or more, got 0"),
    (["--graphs"], "--graphs must be off"),
    (["--draft", "x", "--draft", "y"], "--draft must be given once for triforce, got 2")])
def test_bad_input_is_one_line(argv, said, capfd):
    assert main([triforce], report_acceptance, [*argv, "--prompt", "x", "--device", "cpu"]) == 2
    said_in_one_line(said, capfd)


def test_the_embedded_pair(embedded, held_out):
    target, draft, _ = embedded
    for prompt, expected in held_out[:3]:
        chunks = triforce(CachedLM(target), CachedLM(draft), prompt, budget=16)
        assert tokens_of(chunks, len(expected)) == expected
