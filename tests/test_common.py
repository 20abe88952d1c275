"""Trees, cache, sampling and the driver."""
import random

import pytest
import torch
from transformers import BloomConfig, DynamicCache, GPTNeoConfig, Llama4TextConfig, MambaConfig, AutoModelForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from common import CachedLM, InputError, KVCache, Sampler, ancestor_mask, autoregressive, greedy, load, prepare, probs, trie, until, walk
from conftest import CONTEXT, FAMILIES, ROOT, VOCAB, path_to, tiny, tokens_of


def random_tree(rng, n, start=0, deep=0.5):
    """Parents of n nodes after `start` earlier ones; the larger `deep`, the longer its paths."""
    return [i - 1 if rng.random() < deep and i else rng.randrange(-1, i) for i in range(start, start + n)]


def alone(model, ids):
    """Logits [len(ids), V] without any cache, tree or mask of ours."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def test_ancestor_mask():
    rng = random.Random(0)
    for n in range(1, 30):
        parents = random_tree(rng, n)
        expected = [[j in path_to(i, parents) for j in range(n)] for i in range(n)]
        assert ancestor_mask(parents).tolist() == expected
    assert ancestor_mask([-1, 0, 1]).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_trie_merges_equal_prefixes():
    ids, parents = trie(9, [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 6], []])
    assert ids == [9, 1, 2, 3, 4, 5, 6] and parents == [-1, 0, 1, 2, 2, 0, 3]


def test_walk_follows_what_the_target_chose():
    ids, parents = trie(9, [[1, 2], [1, 3], [4]])  # nodes 9:0 1:1 2:2 3:3 4:4
    assert walk(ids, parents, [1, 3, 7, 8, 7]) == ([0, 1, 3], [1, 3, 8])
    assert walk(ids, parents, [5, 3, 7, 8, 7]) == ([0], [5])
    assert walk([9], [-1], [9]) == ([0], [9])


def test_forward_over_random_trees_equals_each_path_alone(family):
    """Trees grown in several calls, after commits of arbitrary paths and truncations; sliding windows are shorter than the context."""
    model, rng = tiny(family), random.Random(1)
    lm = CachedLM(model, capacity=CONTEXT)
    for trial in range(6):
        context = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 4, 30]))]
        if trial % 2:  # the context's rows come along with the first tree
            lm.start(context + [7, 7], width=40)
            lm.truncate(len(context))
        else:
            torch.testing.assert_close(lm.prefill(context, width=40), alone(model, context)[-1:], atol=1e-4, rtol=1e-4)
        for _ in range(3):
            ids, parents, rows = [], [], []
            for _ in range(rng.randint(1, 3)):
                new = random_tree(rng, rng.randint(1, 9), len(ids), deep=rng.random())
                tokens = [rng.randrange(VOCAB) for _ in new]
                rows.append(lm.forward(tokens, new))
                ids, parents = ids + tokens, parents + new
            rows = torch.cat(rows)
            assert lm.parents == parents and lm.depths == [len(path_to(i, parents)) - 1 for i in range(len(ids))]
            for i in range(len(ids)):
                path = path_to(i, parents)
                torch.testing.assert_close(rows[i], alone(model, context + [ids[j] for j in path])[-1], atol=1e-4, rtol=1e-4)
            path = path_to(rng.randrange(len(ids)), parents)
            path = path[:rng.randint(0, len(path))]
            lm.commit(path)
            context = context + [ids[j] for j in path]
            if rng.random() < 0.5:
                context = context[:rng.randint(1, len(context))]
                lm.truncate(len(context))
            fresh = CachedLM(model, capacity=CONTEXT)
            fresh.prefill(context)
            assert lm.length == fresh.length == len(context) and lm.parents == []
            for layer, pair in fresh.cache.layers.items():
                for ours, theirs in zip(lm.cache.layers[layer], pair):
                    torch.testing.assert_close(ours[:, :, :lm.length], theirs[:, :, :lm.length], atol=1e-4, rtol=1e-4)


def test_embeds_stand_in_for_ids(family):
    model = tiny(family)
    lm = CachedLM(model, capacity=20)
    lm.prefill([3, 4, 5], width=8)
    by_ids = lm.forward([6, 7, 8], [-1, 0, 0])
    lm.truncate(3)
    by_embeds = lm.forward(None, [-1, 0, 0], embeds=model.get_input_embeddings()(torch.tensor([6, 7, 8])))
    assert torch.equal(by_ids, by_embeds)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "qwen3", "neox", "gemma3"])
def test_prefix_rows_are_seen_only_by_the_nodes_that_ask(name):
    model, rng = tiny(name), random.Random(2)
    context, ids, parents, sees = [5, 9, 2, 7], [8, 3, 4, 6], [-1, 0, 0, 1], [False, True, False, True]
    plain = CachedLM(model, capacity=10)
    plain.prefill(context, width=8)
    without = plain.forward(ids, parents)
    donor = CachedLM(model, capacity=10)
    donor.prefill([11, 12, 13])
    rows = [tuple(x[0, :, :3].clone() for x in pair) for pair in donor.cache.layers.values()]
    lm = CachedLM(model, capacity=10)
    lm.set_prefix(rows)
    lm.prefill(context, width=8)
    seen = lm.forward(ids, parents, sees_prefix=sees)
    assert torch.equal(seen[[0, 2]], without[[0, 2]]) and lm.length == 4
    lm.start(context, width=8)  # no row of the context sees the prefix either
    torch.testing.assert_close(lm.forward(None, parents, embeds=model.get_input_embeddings()(torch.tensor(ids)), sees_prefix=sees), seen, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(seen[[1, 3]], without[[1, 3]], atol=1e-2)
    # node 1 alone: prefix, context and node 0 as one past of transformers' own cache, where a single row sees all
    past = DynamicCache()
    plain.commit([0])
    for layer, ((k, v), (pk, pv)) in enumerate(zip(plain.cache.layers.values(), rows)):
        past.update(torch.cat([pk[None], k[:, :, :5]], 2), torch.cat([pv[None], v[:, :, :5]], 2), layer)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[3]]), position_ids=torch.tensor([[5]]), past_key_values=past).logits[0]
    torch.testing.assert_close(seen[1:2], expected, atol=1e-4, rtol=1e-4)
    changed = [(k + rng.random(), v - 1) for k, v in rows]
    lm.set_prefix(changed)
    lm.prefill(context, width=8)
    again = lm.forward(ids, parents, sees_prefix=sees)
    assert torch.equal(again[[0, 2]], without[[0, 2]]) and not torch.equal(again[[1, 3]], seen[[1, 3]])


def test_buffers_are_made_once_and_nothing_else_grows():
    """2,000 tokens: the same memory from the first step to the last, and as many bytes as slots x heads x size say."""
    lm = CachedLM(tiny("llama", max_position_embeddings=2100), capacity=2000)
    chunks = until(autoregressive(lm, [3, 4]), 1990)
    next(chunks)
    buffers = [b for pair in lm.cache.layers.values() for b in pair]
    places = [b.data_ptr() for b in buffers]
    assert all(b.untyped_storage().nbytes() == (2000 + 1) * 2 * 8 * 4 for b in buffers)  # slots, key heads, head size, float32
    for _ in chunks:
        pass
    assert [b.data_ptr() for pair in lm.cache.layers.values() for b in pair] == places and lm.length == 1990 + 1
    assert lm.cache.layers[0][0].shape[2] == 2001


def test_long_prompts_are_cached_in_chunks():
    model = tiny("qwen2-window", max_position_embeddings=2000)
    ids = [random.Random(3).randrange(VOCAB) for _ in range(1300)]
    lm = CachedLM(model, capacity=1300)
    torch.testing.assert_close(lm.prefill(ids), alone(model, ids)[-1:], atol=1e-4, rtol=1e-4)
    assert (lm.length, lm.calls, lm.rows) == (1300, 1, 1300)
    lm.start(ids[:-2], width=3)
    assert lm.calls == 1 and lm.length == 1298
    rows = lm.forward([ids[-2], ids[-1], 5], [-1, 0, 0])
    torch.testing.assert_close(rows[1], alone(model, ids)[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows[2], alone(model, ids[:-1] + [5])[-1], atol=1e-4, rtol=1e-4)
    assert lm.calls == 2 and lm.rows == 2601


def test_counters():
    lm = CachedLM(tiny("llama"), capacity=20)
    tokens_of(autoregressive(lm, [3, 4, 5]), 8)
    assert (lm.calls, lm.rows) == (8, 3 + 7) and lm.seconds > 0


def test_misuse_of_the_cache_is_an_error():
    lm = CachedLM(tiny("llama"), capacity=4)
    with pytest.raises(InputError, match="1 to 4 tokens, got 0"):
        lm.prefill([])
    with pytest.raises(InputError, match="1 to 4 tokens, got 5"):
        lm.prefill([1] * 5)
    lm.prefill([1, 2, 3, 4], width=2)
    with pytest.raises(ValueError, match="6 rows and 7 are needed"):
        lm.forward([1, 2, 3])
    with pytest.raises(ValueError, match="a parent between -1"):
        lm.forward([1, 2], [-1, 1])
    lm.forward([1, 2], [-1, -1])
    with pytest.raises(ValueError, match="path from the context"):
        lm.commit([0, 1])
    with pytest.raises(ValueError, match="length of 0 to 4"):
        lm.truncate(5)


@pytest.mark.parametrize("name", FAMILIES)
def test_autoregressive_equals_generate(name):
    model = tiny(name)
    expected = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=CONTEXT - 3, do_sample=False, eos_token_id=None, pad_token_id=1)[0, 3:].tolist()
    assert tokens_of(autoregressive(CachedLM(model, CONTEXT), [3, 4, 5]), CONTEXT - 3) == expected
    assert len(set(expected)) > 3


def test_attention_reads_the_buffers_themselves(monkeypatch):
    """Grouped-query attention under a mask gets views of the cache, with a head for each key head: no copy for each query head."""
    lm, seen = CachedLM(tiny("llama"), capacity=20), []
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, **kw: seen.append((k, v)) or attention(q, k, v, **kw))
    lm.prefill([3, 4, 5], width=4)
    lm.forward([6, 7, 8, 9], [-1, 0, 0, 1])
    assert len(seen) == 4 and all(x.data_ptr() == b.data_ptr() and x.shape[1] == 2 for pair, buffers in zip(seen[2:], lm.cache.layers.values()) for x, b in zip(pair, buffers))


def test_each_layer_has_its_buffers_where_its_keys_are():
    """A model that is spread over devices; batches of prompts."""
    cache = KVCache(10)
    for layer, device in enumerate(("cpu", "meta")):
        keys, values = cache.update(torch.ones(3, 2, 4, 8, device=device), torch.ones(3, 2, 4, 6, device=device), layer)
        assert (keys.device.type, keys.shape, values.shape) == (device, (3, 2, 4, 8), (3, 2, 4, 6)) and cache.layers[layer][0].shape[2] == 10


def test_eager_attention_too():
    """Models without an sdpa path add the mask to their scores."""
    model = tiny("gemma3", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(CachedLM(model, 60).prefill(list(range(60))), alone(tiny("gemma3"), list(range(60)))[-1:], atol=1e-4, rtol=1e-4)


def test_models_that_a_tree_would_get_wrong_are_refused():
    small = dict(vocab_size=61, hidden_size=32)
    for config, said in [(BloomConfig(**small, n_layer=2, n_head=4), "position_ids"), (MambaConfig(**small, num_hidden_layers=1), "past_key_values"),
                         (GPTNeoConfig(**small, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]), "global, local"),
                         (Llama4TextConfig(**small, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2), "chunked_attention")]:
        with pytest.raises(InputError, match=said):
            prepare(AutoModelForCausalLM.from_config(config))


def test_a_model_that_ignores_positions_is_refused(monkeypatch):
    model = tiny("gpt2")
    forward = type(model.transformer).forward
    monkeypatch.setattr(type(model.transformer), "forward", lambda self, *a, position_ids=None, **k: forward(self, *a, **k))
    with pytest.raises(InputError, match="token trees equal their paths"):
        prepare(model)


def test_probs_equal_transformers_warpers():
    torch.manual_seed(0)
    for temperature, top_k, top_p in [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.8), (0.5, 20, 0.9), (2.0, 1, 0.3), (1.0, 99, 0.05)]:
        logits = 3 * torch.randn(50, 40)
        expected = TemperatureLogitsWarper(temperature)(None, logits)
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        torch.testing.assert_close(probs(logits, temperature, top_k, top_p), expected.softmax(-1), atol=1e-6, rtol=1e-5)
    assert torch.equal(probs(logits, 0).argmax(-1), logits.argmax(-1)) and torch.equal(probs(logits, 0).sum(-1), torch.ones(50))


def test_sampler_is_seeded_and_greedy_at_0():
    logits = torch.randn(100, 30)
    assert Sampler(seed=3)(logits) == Sampler(seed=3)(logits) != Sampler(seed=4)(logits)
    assert greedy(logits) == logits.argmax(-1).tolist() == Sampler(temperature=0, top_k=3, seed=1)(logits)
    assert greedy.draw(greedy.probs(logits)) == greedy(logits)


def test_until_cuts_at_eos_and_at_the_limit():
    def chunks():
        yield from ([1], [2, 3, 4], [5, 6])
        raise AssertionError("asked for more than was needed")
    assert list(until(chunks(), 3)) == [[1], [2, 3]]
    assert list(until(chunks(), 4)) == [[1], [2, 3, 4]]
    assert list(until(chunks(), 99, eos=[6])) == [[1], [2, 3, 4], [5, 6]]
    assert list(until(chunks(), 99, eos=[3, 2])) == [[1], [2]]
    assert list(until(chunks(), 0)) == []


def test_load_in_half_precision():
    model, tokenizer = load(ROOT / "models/target", "cpu", "bfloat16")
    assert model.dtype == torch.bfloat16 and CachedLM(model, 9).prefill(tokenizer("Mia has 3")["input_ids"]).dtype == torch.bfloat16
