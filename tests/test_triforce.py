"""TriForce: a part of a cache is the cache under a mask, and rows are retrieved by what attention
asks for. That the text is the target's is in test_lossless.py."""
import copy
import functools

import pytest
import torch

from common import attention_mask, windows_of
from families import near, tiny
from helpers import check_refused, note_calls
from support.engine import EngineLM
from survey import triforce as module
from survey.triforce import PartialLM, choose_ends, record_queries, retrieve_chunks, triforce


# -------------------------------------------------------------------------------- a part of a cache

def taken(model, text: list[int], slots, kept: int) -> tuple[EngineLM, PartialLM]:
    """Cache a text, and take the rows of these slots, for all heads or for each."""
    whole, part = EngineLM(model), PartialLM(model)
    whole.start(text)
    index = torch.tensor(slots).expand(whole.cache.layers[0][0].shape[1], -1)
    part.take(whole, {layer: index for layer in whole.cache.layers}, kept, len(text))
    return whole, part


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "opt"])
def test_kept_rows_are_the_whole_context_under_a_mask(name):
    """The kept rows have gaps between them. They are used in one call, in two, and after a
    rollback."""
    model, text, kept = tiny(name), [5, 3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9], [0, 1, 4, 5, 9, 10, 11]
    _, part = taken(model, text, kept, 4)
    visible, at = torch.ones(16, 16).tril().bool(), torch.arange(16)[None]
    visible[12:, [2, 3, 6, 7, 8]] = False
    mask = attention_mask(windows_of(model), visible[None], at, at, model.lm_head.weight)
    expected = model(input_ids=torch.tensor([text + [7, 9, 3, 1]]), position_ids=at,
                     attention_mask=mask).logits[0, 12:].detach()
    close = functools.partial(torch.testing.assert_close, atol=2e-4, rtol=1e-4)
    close(part.forward([7, 9, 3]), expected[:3])
    part.commit([0, 1])
    close(part.forward([3, 1]), expected[2:])
    part.truncate(len(text))
    close(part.forward([7, 9, 3]), expected[:3])


def test_no_window_hides_kept_rows_and_windows_count_places_in_the_text():
    model = tiny("mistral")
    [window] = windows_of(model).values()
    _, part = taken(model, [*range(2, 32)], [0, 1, *range(15, 30)], 2)
    part.forward([7, 9])
    visible, *positions = (x[None] for x in part.layout(part.parents, 2))
    mask = attention_mask(part.windows, visible, *positions, part.weight)
    for row, place in enumerate((30, 31)):
        seen = [place - window < slot <= place for slot in range(15, 32)]
        assert (mask[0, 0, row] == 0).tolist() == [True, True, *seen]


def test_heads_may_keep_different_rows():
    slots = [[0, 3, 9], [2, 5, 9]]
    whole, part = taken(tiny("llama"), [*range(2, 12)], slots, 2)
    for i, buffers in part.cache.layers.items():
        for ours, theirs in zip(buffers, whole.cache.layers[i]):
            for head, some in enumerate(slots):
                torch.testing.assert_close(ours[0, head, :3], theirs[0, head, some])


def test_the_ends_are_chosen_also_of_a_cache_that_was_cut_before():
    lm = EngineLM(tiny("llama"))
    lm.start([*range(12)])
    slots, kept = choose_ends(lm, 3, 9)
    assert kept == 0 and slots[0].tolist() == [[*range(12)]] * 2  # it has no more rows than that
    slots, kept = choose_ends(lm, 2, 4)
    assert kept == 2 and slots[1].tolist() == [[0, 1, 8, 9, 10, 11]] * 2
    part = PartialLM(lm.model)
    part.take(lm, slots, kept, 12)
    part.forward([7, 9])
    part.commit([0, 1])
    slots, kept = choose_ends(part, 2, 3)
    assert kept == 2 and slots[0].tolist() == [[0, 1, 5, 6, 7]] * 2
    before = copy.deepcopy(part.cache.layers)
    part.take(part, slots, kept, (part.skipped + part.length))
    assert (part.prefix, part.length, (part.skipped + part.length)) == (2, 3, 14)
    for layer, buffers in part.cache.layers.items():
        for ours, theirs in zip(buffers, before[layer]):
            assert torch.equal(ours[:, :, :5], theirs[:, :, [0, 1, 5, 6, 7]])


# ---------------------------------------------------------------------------------------- retrieval

def test_what_is_retrieved_is_what_the_last_row_looks_at():
    """The queries make the attention of transformers' own eager path. The chunks are the best of
    it by their mean keys, for each key head, in the order of the text."""
    model, text = tiny("llama"), [5, 3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7, 2, 1, 4, 6, 3]
    lm, cached, eager = EngineLM(model), EngineLM(model), copy.deepcopy(model)
    lm.start(text)
    cached.start(text + [11])
    with record_queries(model) as found:
        lm.forward([11], keep=0)
    lm.truncate(len(text))
    eager.set_attn_implementation("eager")
    attentions = eager(torch.tensor([text + [11]]), output_attentions=True).attentions
    slots, kept = retrieve_chunks(lm, 11, budget=12, chunk=4)
    assert kept == 12 and lm.length == len(text) and lm.calls == 0
    assert model.config._attn_implementation == "grouped"
    for layer, query in found.items():
        keys = cached.cache.layers[layer][0][0, :, :len(text) + 1]
        groups = len(query) // len(keys)
        scores = torch.einsum("hd,hsd->hs", query, keys.repeat_interleave(groups, 0))
        weights = (scores / query.shape[1] ** 0.5).softmax(-1)
        torch.testing.assert_close(weights, attentions[layer][0, :, -1], atol=1e-5, rtol=1e-4)
        for head, some in enumerate(slots[layer].tolist()):
            likes = scores[head * groups:(head + 1) * groups, :16].sum(0).view(4, 4).mean(1)
            chunks = sorted([0, *(1 + likes[1:].topk(2).indices).tolist()])
            assert some == [*(4 * c + i for c in chunks for i in range(4)), 16, 17]


# ----------------------------------------------------------------------------------------- decoding

@pytest.mark.parametrize("target, draft, said", [
    ("qwen3.5", "qwen3.5", "--target must be .*, got Qwen3"),
    ("llama", "qwen3.5", "--draft must be .*, got Qwen3"), ("gemma4-shared", "llama", "all have")])
def test_layers_without_keys_of_their_own_are_refused(target, draft, said):
    """Parts of a cache have no states. Of two such models the target is named."""
    lms = [EngineLM(tiny(target)), EngineLM(tiny(draft))]
    check_refused(said, next, triforce(*lms, [3, 1, 4]))


def test_the_caches_after_a_round_have_the_rows_of_the_text(monkeypatch):
    """C_p has all of them. C_r has those of the newest tokens bit for bit from C_p. C_q never has
    more than the first ones and two windows."""
    model, draft = tiny("llama"), near(tiny("llama"), 0.1)
    parts = note_calls(monkeypatch, PartialLM, "__init__")
    text, target, sizes = [x % 50 + 2 for x in range(0, 300, 7)], EngineLM(model), []
    chunks = triforce(target, EngineLM(draft), text, gamma=3, budget=8, chunk=4, sinks=2, window=6)
    for _ in range(12):
        text = text + next(chunks)
        (part, *_), (small, *_) = parts
        assert target.length == part.skipped + part.length == len(text) - 1
        assert small.skipped + small.length < len(text)
        assert part.prefix == 8 and part.skipped == 40 and small.prefix == 2
        sizes.append(small.length)
        for layer, (keys, _) in part.cache.layers.items():
            whole = target.cache.layers[layer][0][:, :, 43:len(text) - 1]
            assert torch.equal(keys[:, :, 8 + 3:8 + part.length], whole)
    assert 6 < max(sizes) <= 12 and sizes != sorted(sizes)


def test_a_round_is_one_call_of_the_target_and_the_last_token_asks(monkeypatch):
    """Calls of the draft go on over all prompts. The head reads no row of a prompt or of the
    retrieval: two reviews of one guess each have two rows, and the verification has γ + 1."""
    model, rows, calls = tiny("llama"), [], []
    asked = note_calls(monkeypatch, module, "retrieve_chunks")
    target, draft = EngineLM(model), EngineLM(near(model, 0.0))
    with model.lm_head.register_forward_hook(lambda *x: rows.append(x[2].shape[1])):
        for prompt in ([5] * 140 + [20], [5, 6, 7]):
            next(triforce(target, draft, prompt, gamma=4, inner=1))
            calls.append((target.calls, draft.calls))
    assert [token for _, token, *_ in asked] == [20, 7] and calls == [(1, 2), (2, 4)]
    assert [n for n in rows if n] == [2, 2, 5] * 2
