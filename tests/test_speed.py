"""Tests of what costs time or memory and changes no output: copies that must not be made, logits
that nobody asked for, tensors that must not be kept.

These tests say HOW something is computed. Where one of them fails and the output is right, the code
may be better than the test. Measure it with results/bench.py, and then change the test."""
import collections
import gc
import random

import pytest
import torch
import torch.nn.functional as F

import bita
from cli.graphs import GraphedLM
from common import CachedLM
from families import tiny
from helpers import note_calls, prefill

from test_common import buffers_of


def test_the_head_reads_rows_that_lie_together():
    """It reads no row of a prompt, whose logits nobody asks for. Where rows lie apart, a CPU in
    bfloat16 would copy the whole LM head."""
    model, seen = tiny("llama"), []
    lm = CachedLM(model)
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    for keep in None, 0, 1, 2:
        lm.start([3, 1, 4])
        lm.forward([4, 5, 6], keep=keep)
    hook.remove()
    assert [x.shape[1] for x in seen] == [0, 3, 0, 0, 0, 1, 0, 2]
    assert all(x.stride(0) == x[0].numel() for x in seen if x.numel())


def test_attention_reads_the_buffers_themselves(monkeypatch):
    """Grouped-query attention under a mask gets views of the cache, with a head for each key head:
    no copy for each query head."""
    lm, seen = CachedLM(tiny("llama")), note_calls(monkeypatch, F, "scaled_dot_product_attention")
    prefill(lm, [3, 4, 5])
    lm.forward([6, 7, 8, 9], [-1, 0, 0, 1])
    assert len(seen) == 3 * 2  # passes and layers
    for (_, *pair, _), buffers in zip(seen[-2:], lm.cache.layers.values()):
        assert all(x.data_ptr() == b.data_ptr() and x.shape[1] == 2 for x, b in zip(pair, buffers))


@pytest.mark.parametrize("run_as", [CachedLM, GraphedLM])
def test_buffers_double_and_nothing_else_grows(run_as):
    """The buffers are renewed a few times for 500 tokens in 125 calls. They never have more than
    twice the slots that were used, and the number of tensors, lists and other objects stays."""
    lm = run_as(tiny("llama", max_position_embeddings=600))
    lm.start([3, 4])
    sizes, before = [], None
    while lm.length < 498:
        lm.forward([5, 6, 7, 8, 9, 10], [-1, 0, 0, 2, 3, 1])
        used = lm.length + 6
        for buffer in buffers_of(lm):  # two key heads, a head size of 8, float32
            assert buffer.untyped_storage().nbytes() == buffer.shape[2] * 2 * 8 * 4
        sizes.append(buffers_of(lm)[0].shape[2])
        assert used <= sizes[-1] <= (2 * used if run_as is CachedLM else 3 * used + 300)
        lm.commit([0, 2, 3, 4])
        if lm.length == 202:
            before = collections.Counter(map(type, gc.get_objects()))
    gc.collect()
    grown = collections.Counter(map(type, gc.get_objects())) - before
    assert max(grown.values(), default=0) < 100, grown
    assert len({*sizes}) < 12 and sizes == sorted(sizes)


def test_nothing_is_kept_of_the_context(monkeypatch):
    """Of a longer prompt the backward pass of BiTA's training keeps only what the mask tokens' own
    attention reads: keys, values and a mask. The model's weights may want gradients or not."""
    model, kept, passes = tiny("llama"), [], []
    forward, tuning = bita.run_rows, bita.Tuning(model, 4, 3)

    def spy(*args, **options):
        passes.append(forward(*args, **options))
        return passes[-1]
    monkeypatch.setattr(bita, "run_rows", spy)
    assert all(p.requires_grad for p in model.parameters())
    for n in (20, 120):
        ids, anchors, _ = bita.sample_anchors([([7] * n, [1, 2, 3, 4])], 3, 2, random.Random(0))
        seen = {}  # by storage: some tensors are views of one

        def keep(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            bita.mask_states(model, tuning.masks, tuning.prompts, ids, anchors)
        kept.append(sum(storage.nbytes() for storage in seen.values()))
        context, masks = passes[-2:]
        assert context.shape[-1] == masks.shape[-1] == 32  # states, not logits of 61 tokens
        assert masks.requires_grad and not context.requires_grad
    # Keys and values of 2 heads of 8, in buffers that have doubled; a mask for 2 x 2 groups of 3
    per_layer = 2 * 2 * 2 * 8 + 2 * 6
    assert 0 < kept[1] - kept[0] <= 100 * 2 * per_layer * 4
