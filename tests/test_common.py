"""Trees, cache, masks, sampling and loading."""
import itertools
import math
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import (AutoModelForCausalLM, BloomConfig, DynamicCache, FalconConfig,
                          GPTNeoConfig, Llama4TextConfig, MambaConfig, MptConfig)
from transformers.generation.logits_process import (TemperatureLogitsWarper, TopKLogitsWarper,
                                                    TopPLogitsWarper)

from cli.loading import load_checked
from cli.graphs import GraphedLM
from common import (CachedLM, InputError, KVCache, Sampler, ancestor_mask, attention_mask,
                    autoregressive, best_tree, context_length, eos_ids, fastest, greedy, load,
                    prepare, row_costs, trie, until, walk, windows_of)
from fake_models import Zeros, path_to
from families import CONTEXT, FAMILIES, MORE_FAMILIES, VOCAB, tiny
from helpers import ROOT, prefill, tokens_of
from laws import chi_square_ok

CLOSE = dict(atol=1e-4, rtol=1e-4)
BOTH = pytest.mark.parametrize("run_as", [CachedLM, GraphedLM])
ALL = {**FAMILIES, **MORE_FAMILIES}
FEW = ("llama", "gpt2", "gemma3", "gpt-oss", "deepseek-v3")  # as graphs: one of each kind of mask
ALL_AND_FEW = pytest.mark.parametrize("name, run_as", [*((name, CachedLM) for name in ALL),
                                                       *((name, GraphedLM) for name in FEW)])


def random_tree(rng, n: int, start: int = 0, deep: float = 0.5) -> list[int]:
    """Parents of n nodes after `start` earlier ones; the larger `deep`, the longer its paths."""
    return [i - 1 if rng.random() < deep and i else rng.randrange(-1, i)
            for i in range(start, start + n)]


@torch.inference_mode()
def alone(model, *texts: list[int]) -> torch.Tensor:
    """The logits [texts, V] after each text, without a cache, tree or mask of ours. Shorter ones
    have padding behind them, which no token of them looks at."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits
    return logits[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])]


def buffers_of(lm) -> list[torch.Tensor]:
    return [buffer for pair in lm.cache.layers.values() for buffer in pair]


# ------------------------------------------------------------------------------------- trees

def test_ancestor_mask():
    rng = random.Random(0)
    for n in range(1, 30):
        parents = random_tree(rng, n)
        expected = [[j in path_to(i, parents) for j in range(n)] for i in range(n)]
        assert ancestor_mask(parents).tolist() == expected
    assert ancestor_mask([-1, 0, 1]).tolist() == [[True, False, False], [True, True, False],
                                                  [True, True, True]]


def test_the_best_tree_is_the_best_of_all():
    """Of all trees of n nodes in which any node may have any child, the sum of the chances is
    largest; the first m nodes are the best tree of m."""
    rng = random.Random(0)
    for _ in range(20):
        accept = [[rng.random() for _ in range(2)] for _ in range(3)]
        chances = {(): 1.0}  # of every node, by the ranks on its path
        for depth in range(3):
            for ranks in itertools.product(range(2), repeat=depth + 1):
                chances[ranks] = chances[ranks[:-1]] * accept[depth][ranks[-1]]
        tree = best_tree(accept, 7)
        for n in range(1, 8):
            trees = (set(some) for some in itertools.combinations(chances, n))
            most = max(sum(map(chances.get, some)) for some in trees
                       if all(not ranks or ranks[:-1] in some for ranks in some))
            assert sum(chance for chance, *_ in tree[:n]) == pytest.approx(most)
            assert best_tree(accept, n) == tree[:n]
        paths = []
        for chance, parent, depth, rank in tree:
            paths.append(paths[parent] + (rank,) if paths else ())
            assert len(paths[-1]) == depth and chance == pytest.approx(chances[paths[-1]])
    assert best_tree([], 4) == [(1.0, -1, 0, 0)] and len(best_tree([[0.5, 0.1]], 9)) == 3


def test_costs_are_measured_and_counted_nowhere(monkeypatch):
    """No call is cheaper than one of fewer rows: it costs the least of all that have as many."""
    lm = CachedLM(tiny("llama"))
    lm.start([3, 4, 5])
    counted = lm.calls, lm.rows, lm.seconds, lm.prompt_seconds, lm.parents, lm.length
    costs = row_costs(lm, 8)
    assert min(costs[1:9]) > 0 and costs[1:9] == sorted(costs[1:9])
    assert (lm.calls, lm.rows, lm.seconds, lm.prompt_seconds, lm.parents, lm.length) == counted
    seconds, ran, forward = {1: 5, 2: 7, 4: 6, 8: 3, 16: 8}, [], lm.forward

    def timed(act, number):
        """The machine is busy for the first calls, of whatever width."""
        act()
        return seconds[ran[-1]] + 9 * (len(ran) < 6)
    monkeypatch.setattr(lm, "forward", lambda ids, **how: ran.append(len(ids)) or forward(
        ids, **how))
    monkeypatch.setattr("timeit.timeit", timed)
    assert row_costs(lm, 9)[1:10] == [3] * 8 + [8] and row_costs(lm, 2)[1:3] == [5, 7]
    assert row_costs(lm, 4)[1:5] == [5, 6, 6, 6] and lm.rows == 0


def test_the_fastest_choice_is_asked_for_again_when_the_context_has_doubled():
    """The most tokens a second; the time of choosing is set-up."""
    lm, asked = CachedLM(tiny("llama", max_position_embeddings=2000)), []

    def choices():
        asked.append(lm.length)
        yield from [("a", 1.0, 2.0), ("b", 3.0, 4.0), ("c", 5.0, 7.0)]
    for length in (0, 3, 200, 255, 256, 511, 512, 100, 300, 1100):
        lm.start([5] * length)
        assert fastest(lm, "x", choices) == "b"
    assert asked == [0, 256, 512, 1100]
    assert fastest(lm, "y", lambda: [("d", 1, 1)]) == "d"


def test_what_is_prepared_once_is_set_up(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    lm, other, made = CachedLM(tiny("llama")), CachedLM(tiny("llama")), []

    def make():
        now[0] += 3
        made.append(len(made))
        return made[-1]
    assert [lm.once("x", make), lm.once("x", make), lm.once("y", make)] == [0, 0, 1]
    assert (lm.setup_seconds, lm.seconds, other.setup_seconds) == (6, 0, 0)
    assert other.once("x", make) == 2


def test_trie_merges_equal_prefixes():
    ids, parents, paths = trie(9, [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 6], []])
    assert ids == [9, 1, 2, 3, 4, 5, 6] and parents == [-1, 0, 1, 2, 2, 0, 3]
    assert paths == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 5], [0, 1, 2, 3, 6], [0]]
    assert trie(9, [[1, 2], [2, 1]])[:2] == ([9, 1, 2, 2, 1], [-1, 0, 1, 0, 3])
    assert trie(9, []) == ([9], [-1], [])


def test_walk_follows_what_the_target_chose():
    ids, parents, _ = trie(9, [[1, 2], [1, 3], [4]])  # nodes 9:0 1:1 2:2 3:3 4:4
    assert walk(ids, parents, [1, 3, 7, 8, 7]) == ([0, 1, 3], [1, 3, 8])
    assert walk(ids, parents, [5, 3, 7, 8, 7]) == ([0], [5])
    assert walk([9], [-1], [9]) == ([0], [9])


# ------------------------------------------------------------------------- the model's passes

def check_trees(model, run_as=CachedLM) -> CachedLM:
    """Every node of random trees gives the logits of its path alone, and after each commit and
    truncation the cache holds what a fresh one does.

    Contexts of no token, of fewer than a sliding window and of more; trees grown in several calls
    by ids or embeddings, chains by default; commits of any path, the empty one included;
    truncations, with or without a commit before. All with one CachedLM: what earlier trials left in
    its buffers must reach nothing."""
    rng, lm = random.Random(1), run_as(model)
    embed = model.get_input_embeddings()
    for trial in range(6):
        context = [rng.randrange(VOCAB) for _ in range([0, 4, 30][trial % 3])]
        if trial % 2 and context:
            torch.testing.assert_close(prefill(lm, context), alone(model, context), **CLOSE)
        else:
            lm.start(context + [7, 7])
            lm.truncate(len(context))
        for _ in range(3):
            ids, parents, rows = [], [], []
            for n in [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]:
                new = random_tree(rng, n, len(ids), rng.random())
                tokens = rng.choices(range(VOCAB), k=n)
                chain = rng.random() < 0.2
                if chain:
                    new = list(range(len(ids) - 1, len(ids) - 1 + n))
                keep = rng.choice([None, None, 0, 1, n])
                fed = tokens
                if rng.random() < 0.3:
                    fed = embed(torch.tensor(tokens, device=model.device)).detach()
                logits = lm.forward(fed, None if chain else new, keep=keep)
                assert logits.shape == (n if keep is None else keep, VOCAB)
                first = len(ids) + n - len(logits)
                ids, parents = ids + tokens, parents + new
                rows += zip(range(first, len(ids)), logits)
            assert lm.parents == parents and lm.length == len(context)
            texts = [context + [ids[j] for j in path_to(i, parents)] for i, _ in rows]
            torch.testing.assert_close(torch.stack([row for _, row in rows]),
                                       alone(model, *texts), **CLOSE)
            if rng.random() < 0.8:
                path = path_to(rng.randrange(len(ids)), parents)
                path = path[:rng.randint(0, len(path))]
                lm.commit(path)
                context = context + [ids[j] for j in path]
            if lm.parents or rng.random() < 0.5:
                context = context[:rng.randint(len(context) // 2, len(context))]
                lm.truncate(len(context))
            assert lm.length == len(context) and lm.parents == []
            fresh = CachedLM(model)
            fresh.start(context)
            for ours, theirs in zip(buffers_of(lm), buffers_of(fresh)):
                torch.testing.assert_close(ours[:, :, :lm.length], theirs[:, :, :lm.length],
                                           **CLOSE)
    return lm


@pytest.mark.parametrize("name", ALL)
def test_a_tree_of_two_branches_equals_its_paths(name):
    """
        3   4   5 ──── 7 ─┬─ 8 ─── 9      in one call: 7, then 8 and 10 as rivals, then 9 after 8
         context     root └─ 10
    """
    model = tiny(name)
    lm = CachedLM(model)
    lm.start([3, 4, 5])
    logits = lm.forward([7, 8, 10, 9], [-1, 0, 0, 1])
    paths = [3, 4, 5, 7], [3, 4, 5, 7, 8], [3, 4, 5, 7, 10], [3, 4, 5, 7, 8, 9]
    torch.testing.assert_close(logits, alone(model, *paths), **CLOSE)
    lm.commit([0, 2])  # 7 and 10 stay, 8 and 9 vanish
    torch.testing.assert_close(lm.forward([11]), alone(model, [3, 4, 5, 7, 10, 11]), **CLOSE)


@ALL_AND_FEW
def test_a_tree_equals_its_paths_and_the_cache_a_fresh_one(name, run_as):
    check_trees(tiny(name), run_as)


@ALL_AND_FEW
def test_features_are_what_the_head_reads(name, run_as):
    """For all tokens of a prompt of two parts, and for each node of a tree as on its path alone."""
    model, rng, read = tiny(name), random.Random(2), []
    lm, context = run_as(model), rng.choices(range(VOCAB), k=135)
    ids, parents = [4, 2, 0, 3, 1], [-1, 0, 0, 1, 2]
    lm.start(context)
    prompt = lm.features
    lm.forward(ids, parents, keep=1)
    model.get_output_embeddings().register_forward_pre_hook(lambda _, x: read.append(x[0]))
    alone(model, context, *(context + [ids[j] for j in path_to(i, parents)] for i in range(5)))
    torch.testing.assert_close(prompt, read[0][0, :135], **CLOSE)
    ends = [134 + len(path_to(i, parents)) for i in range(5)]
    torch.testing.assert_close(lm.features, read[0][range(1, 6), ends], **CLOSE)
    lm.start([])
    assert len(lm.features) == 0


@BOTH
def test_embeddings_stand_in_for_ids(family, run_as):
    model = tiny(family)
    lm = run_as(model)
    prefill(lm, [3, 4, 5])
    by_ids = lm.forward([6, 7, 8], [-1, 0, 0])
    lm.truncate(3)
    by_embeds = lm.forward(model.get_input_embeddings()(torch.tensor([6, 7, 8])), [-1, 0, 0])
    assert torch.equal(by_ids, by_embeds)


@BOTH
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "qwen3", "neox", "gemma3"])
def test_prefix_rows_are_seen_only_by_the_nodes_that_ask(name, run_as):
    model, rng = tiny(name), random.Random(2)
    context, ids, parents = [5, 9, 2, 7], [8, 3, 4, 6], [-1, 0, 0, 1]
    sees = [False, True, False, True]
    plain = CachedLM(model)
    plain.start(context)
    without = plain.forward(ids, parents)
    donor = CachedLM(model)
    donor.start([11, 12, 13])
    rows = [tuple(x[0, :, :3].clone() for x in pair) for pair in donor.cache.layers.values()]
    lm = run_as(model)
    lm.start(context, prefix=rows)
    seen = lm.forward(ids, parents, sees_prefix=sees)
    torch.testing.assert_close(seen[[0, 2]], without[[0, 2]], **CLOSE)
    assert lm.length == 4
    lm.start(context, prefix=rows)
    embeds = model.get_input_embeddings()(torch.tensor(ids))
    by_ids, seen = seen, lm.forward(embeds, parents, sees_prefix=sees)  # in buffers of full size
    torch.testing.assert_close(seen, by_ids, **CLOSE)
    assert not torch.allclose(seen[[1, 3]], without[[1, 3]], atol=1e-2)
    # node 1 alone: prefix, context and node 0 as one past of transformers' own cache
    past = DynamicCache()
    plain.commit([0])
    for layer, ((k, v), (pk, pv)) in enumerate(zip(plain.cache.layers.values(), rows)):
        past.update(torch.cat([pk[None], k[:, :, :5]], 2), torch.cat([pv[None], v[:, :, :5]], 2),
                    layer)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[3]]), position_ids=torch.tensor([[5]]),
                         past_key_values=past).logits[0]
    torch.testing.assert_close(seen[1:2], expected, **CLOSE)
    # other rows: not one bit of the nodes and of the context that did not ask changes
    before = [buffer[:, :, 3:7].clone() for buffer in buffers_of(lm)]
    lm.start(context, prefix=[(k + rng.random(), v - 1) for k, v in rows])
    assert all(torch.equal(buffer[:, :, 3:7], old) for buffer, old in zip(buffers_of(lm), before))
    again = lm.forward(ids, parents, sees_prefix=sees)
    assert torch.equal(again[[0, 2]], seen[[0, 2]]) and not torch.equal(again[[1, 3]], seen[[1, 3]])
    # without sees_prefix no node does, and without a prefix all is as before
    torch.testing.assert_close(lm.forward([3], [0]), without[1:2], **CLOSE)
    lm.start(context)
    assert lm.prefix == 0
    torch.testing.assert_close(lm.forward(ids, parents), without, **CLOSE)


@BOTH
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_guesses_beyond_the_end_of_the_context(name, run_as):
    """They are cut later, but the model must bear them, and those before them are right."""
    model, text = tiny(name), [i * 7 % VOCAB for i in range(CONTEXT + 5)]
    lm = run_as(model)
    lm.start(text[:CONTEXT - 2])
    logits = lm.forward(text[CONTEXT - 2:])
    assert logits.shape == (7, VOCAB)
    expected = alone(model, text[:CONTEXT - 1], text[:CONTEXT])
    torch.testing.assert_close(logits[:2], expected, **CLOSE)


@BOTH
def test_long_prompts_are_cached_in_chunks(run_as):
    model = tiny("qwen2-window", max_position_embeddings=2000)
    ids = random.Random(3).choices(range(VOCAB), k=1300)
    widths = []
    model.register_forward_pre_hook(
        lambda _, args, options: widths.append(options["input_ids"].shape[1]), with_kwargs=True)
    lm = run_as(model)
    torch.testing.assert_close(prefill(lm, ids), alone(model, ids), **CLOSE)
    end = 32 if run_as is GraphedLM else 19
    assert widths == [*[128] * 10, end, 1, 1300]  # the last is not ours
    assert (lm.length, lm.calls, lm.rows) == (1300, 1, 1)
    lm.start(ids[:-2])
    assert (lm.length, lm.calls, lm.rows) == (1298, 1, 1)
    rows = lm.forward([ids[-2], ids[-1], 5], [-1, 0, 0])
    expected = alone(model, ids[:-1], ids, ids[:-1] + [5])
    torch.testing.assert_close(rows, expected, **CLOSE)
    assert (lm.calls, lm.rows) == (2, 4)


def test_only_the_first_so_many_logits_count():
    model = tiny("llama")
    lm, cut = CachedLM(model), CachedLM(model, vocab=50)
    assert torch.equal(prefill(cut, [3, 4, 5]), prefill(lm, [3, 4, 5])[:, :50])


def test_eager_attention_too():
    """Models without an sdpa path add the mask to their scores."""
    model = tiny("gemma3", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    expected = alone(tiny("gemma3"), [*range(60)])
    torch.testing.assert_close(prefill(CachedLM(model), [*range(60)]), expected, **CLOSE)


# ------------------------------------------------------------------------ buffers and counters

@BOTH
def test_what_is_cached_stays_when_buffers_grow(run_as):
    """Also the pending tree, and the prefix; a longer prompt, and then a short one again."""
    model, rng = tiny("llama", max_position_embeddings=900), random.Random(0)
    lm = run_as(model)
    for length in (3, 130, 700, 20):
        ids = rng.choices(range(VOCAB), k=length)
        lm.start(ids, prefix=ROWS)
        first = lm.forward([7, 8], [-1, -1])
        second = lm.forward([9] * 140, [0] * 140, keep=1)
        expected = alone(model, ids + [7], ids + [8], ids + [7, 9])
        torch.testing.assert_close(torch.cat([first, second]), expected, **CLOSE)
        lm.commit([1])
        torch.testing.assert_close(lm.forward([5]), alone(model, ids + [8, 5]), **CLOSE)
        for keys, values in lm.cache.layers.values():
            assert torch.equal(keys[0, :, :3], ROWS[0][0]) and torch.equal(values[0, :, :3],
                                                                           ROWS[0][1])


def test_a_prompt_longer_than_the_context_is_refused():
    model = tiny("llama")
    lm = CachedLM(model)
    assert lm.max_length == context_length(model) == CONTEXT
    lm.start([5] * CONTEXT)
    assert lm.length == CONTEXT
    with pytest.raises(InputError, match=f"at most {CONTEXT} tokens, got {CONTEXT + 1}"):
        lm.start([5] * (CONTEXT + 1))
    endless = AutoModelForCausalLM.from_config(REFUSED[0][0])  # BLOOM has no limit
    assert context_length(endless) > 10 ** 6


def test_memory_that_is_used_up_leaves_the_cache_as_it_was(monkeypatch):
    lm, fresh = CachedLM(tiny("llama")), CachedLM(tiny("llama"))
    for each in (lm, fresh):
        each.start([3, 4, 5])
    pad = torch.nn.functional.pad

    def full(x, *how, **more):
        if x.ndim == 4:
            raise RuntimeError("can't allocate memory: you tried to allocate 9 GiB")
        return pad(x, *how, **more)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="allocate memory"):
        patch.setattr("torch.nn.functional.pad", full)
        lm.forward([7] * 40)
    assert torch.equal(lm.forward([6, 7]), fresh.forward([6, 7]))


def test_each_layer_has_its_buffers_where_its_keys_are():
    """A model that is spread over devices; batches of prompts; values of another size."""
    cache = KVCache()
    for layer, device in enumerate(("cpu", "meta")):
        new = [torch.ones(3, 2, 4, size, device=device) for size in (8, 6)]
        keys, values = cache.update(*new, layer)
        assert keys.device.type == device == cache.layers[layer][0].device.type
        assert (keys.shape, values.shape) == ((3, 2, 4, 8), (3, 2, 4, 6))


def test_the_cache_writes_from_its_start_on():
    """And all up to there is read."""
    cache, new = KVCache(), torch.arange(1.0, 4).view(1, 1, 3, 1)
    cache.update(new, -new, 0)
    cache.start = 2
    keys, values = cache.update(new, -new, 0)
    assert keys.flatten().tolist() == [1, 2, 1, 2, 3] and torch.equal(values, -keys)
    assert cache.get_seq_length() == 2
    cache.start = 1
    keys, _ = cache.update(10 * new, new, 0)
    assert keys.flatten().tolist() == [1, 10, 20, 30]


@BOTH
def test_counters(run_as):
    """A prompt is no call, its time is its own, and what fills a pass up is no row."""
    lm = run_as(tiny("llama"))
    lm.start([3, 4, 5])
    assert (lm.calls, lm.rows, lm.seconds) == (0, 0, 0) and lm.prompt_seconds > 0
    prompt_seconds = lm.prompt_seconds
    lm.forward([6, 7, 8], keep=1)
    assert (lm.calls, lm.rows) == (1, 3) and lm.seconds > 0 and lm.prompt_seconds == prompt_seconds
    seconds = lm.seconds
    lm.start([3, 4, 5])
    assert (lm.calls, lm.rows, lm.seconds) == (1, 3, seconds)
    assert lm.prompt_seconds > prompt_seconds
    lm = run_as(lm.model)
    tokens_of(autoregressive(lm, [3, 4, 5]), 8)
    assert (lm.calls, lm.rows) == (8, 8) and lm.seconds > 0 and lm.prompt_seconds > 0


# -------------------------------------------------------------------------------------- misuse

@BOTH
def test_misuse_of_the_cache_is_an_error(run_as):
    lm = run_as(tiny("llama"))
    lm.start([1, 2, 3, 4])
    with pytest.raises(ValueError, match="2 parents, earlier nodes or -1"):
        lm.forward([1, 2], [-1, 1])
    lm.forward([1, 2], [-1, -1])
    with pytest.raises(ValueError, match="path from the context"):
        lm.commit([0, 1])
    with pytest.raises(ValueError, match="length of 0 to 4"):
        lm.truncate(5)
    with pytest.raises(ValueError, match="length of 0 to 4"):
        lm.truncate(-1)


ROWS = [(torch.ones(2, 3, 8), torch.ones(2, 3, 8))] * 2
WRONG = {
    "no node": dict(ids=[]),
    "a parent too few": dict(ids=[4, 5], parents=[-1]),
    "a parent too many": dict(ids=[4], parents=[-1, 0]),
    "its own parent": dict(ids=[4, 5], parents=[-1, 9]),
    "a parent below -1": dict(ids=[4, 5], parents=[-1, -2]),
    "one sees": dict(ids=[4, 5, 6], sees_prefix=[True]),
    "too few see": dict(ids=[4, 5, 6], sees_prefix=[True] * 2),
    "too many see": dict(ids=[4, 5, 6], sees_prefix=[True] * 4),
    "an unknown token": dict(ids=[4, VOCAB]),
}


@BOTH
@pytest.mark.parametrize("pending", [[], [4, 5]])
@pytest.mark.parametrize("wrong", WRONG)
def test_forward_checks_before_it_changes_anything(wrong, pending, run_as):
    """After the error the next calls give what they would have given, to the last bit."""
    model = tiny("llama")
    lm, fresh = (run_as(model) for _ in range(2))
    for each in (lm, fresh):
        each.start([1, 2, 3], prefix=ROWS)
        if pending:
            each.forward(pending, [-1, -1])
    counters = lm.calls, lm.rows, lm.seconds
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        lm.forward(**WRONG[wrong])
    assert (lm.calls, lm.rows, lm.seconds) == counters
    assert (lm.length, lm.parents) == (3, [-1] * len(pending))
    ours, theirs = (each.forward([6, 4], [len(pending) - 1, -1]) for each in (lm, fresh))
    assert torch.equal(ours, theirs)
    for each in (lm, fresh):
        each.commit([1, 2] if pending else [0])
    assert torch.equal(lm.forward([4]), fresh.forward([4]))


@BOTH
def test_nothing_is_lost_where_a_model_raises_in_the_middle_of_a_pass(run_as):
    model = tiny("llama")
    lm, fresh = (run_as(model) for _ in range(2))
    for each in (lm, fresh):
        each.start([1, 2, 3])
        each.forward([7])

    def interrupt(*_):
        raise KeyboardInterrupt
    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):  # when the first layer has written its rows
        lm.forward([5, 6])
    hook.remove()
    assert (lm.calls, lm.rows, lm.length, lm.parents) == (1, 1, 3, [-1])
    assert torch.equal(lm.forward([4, 8], [-1, 0]), fresh.forward([4, 8], [-1, 0]))


def test_a_prompt_too_long_leaves_the_context_as_it_is():
    model = tiny("llama")
    lm, fresh = CachedLM(model), CachedLM(model)
    for each in (lm, fresh):
        each.start([1, 2, 3])
    with pytest.raises(InputError):
        lm.start([9] * (CONTEXT + 1))
    assert torch.equal(lm.forward([4]), fresh.forward([4]))


# --------------------------------------------------------------------------------------- masks

@pytest.mark.parametrize("windows", [{"sliding_attention": None}, {"sliding_attention": 3},
                                     {"full_attention": None, "sliding_attention": 4}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_mask_equals_a_double_loop(windows, dtype):
    """Batches whose rows and slots stand at other positions; slots that no window leaves out."""
    rng = torch.Generator().manual_seed(0)
    B, n, m = 3, 5, 11
    visible = torch.rand(B, n, m, generator=rng) < 0.7
    rows = torch.randint(0, 12, (B, n), generator=rng)
    slots = torch.randint(0, 12, (B, m), generator=rng)
    slots[:, 0] = 10 ** 9
    masks = attention_mask(windows, visible, rows, slots, torch.zeros(1, dtype=dtype))
    masks = masks if len(windows) > 1 else dict(zip(windows, [masks]))
    assert list(masks) == list(windows)
    for kind, window in windows.items():
        assert masks[kind].dtype == dtype and masks[kind].shape == (B, 1, n, m)
        for b, i, j in itertools.product(range(B), range(n), range(m)):
            near = window is None or rows[b, i] - slots[b, j] < window
            expected = 0 if visible[b, i, j] and near else -torch.inf
            assert masks[kind][b, 0, i, j].item() == expected, (kind, b, i, j)
    elsewhere = attention_mask({"all": None}, visible, rows, slots, torch.zeros(1, device="meta"))
    assert elsewhere.device.type == "meta"


def test_windows_of():
    expected = {"llama": {"sliding_attention": None}, "qwen2": {"full_attention": None},
                "mistral": {"sliding_attention": 9}, "gpt2": {"sliding_attention": None},
                "gemma3": {"full_attention": None, "sliding_attention": 9},
                "qwen2-window": {"full_attention": None, "sliding_attention": 9}}
    for name, windows in expected.items():
        found = windows_of(tiny(name))
        assert found == windows or list(found.values()) == list(windows.values()) == [None], name


# ------------------------------------------------------------------------------------ sampling

def test_probs_equal_transformers_warpers():
    torch.manual_seed(0)
    for temperature, top_k, top_p in [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.8),
                                      (0.5, 20, 0.9), (2.0, 1, 0.3), (1.0, 99, 0.05),
                                      (1.0, 3, 0.6)]:
        logits = 3 * torch.randn(50, 40)
        expected = TemperatureLogitsWarper(temperature)(None, logits)
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        probs = Sampler(temperature, top_k, top_p).probs(logits)
        torch.testing.assert_close(probs, expected.softmax(-1), atol=1e-6, rtol=1e-5)
        one = Sampler(temperature, top_k, top_p).probs(logits[3])  # without a batch
        torch.testing.assert_close(one, probs[3], atol=1e-6, rtol=1e-5)
    assert torch.equal(greedy.probs(logits).argmax(-1), logits.argmax(-1))
    assert torch.equal(greedy.probs(logits).sum(-1), torch.ones(50))
    assert Sampler().probs(logits.bfloat16()).dtype == torch.float32


def test_the_smallest_and_the_largest_temperature():
    """Next to greedy and next to uniform, without overflow."""
    logits = 1e4 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Sampler(1e-6).probs(logits), greedy.probs(logits))
    assert Sampler(1e-6, top_k=3, top_p=0.5)(logits) == greedy(logits)
    hot = Sampler(1e6).probs(logits)
    torch.testing.assert_close(hot, torch.full_like(hot, 1 / 40), atol=2e-3, rtol=0)


def test_rare_tokens_are_drawn_as_often_as_they_should(monkeypatch):
    """In float32 sums and random numbers move in steps of 2⁻²⁴: a token of 1e-8 would never come,
    or as often as one of 6e-8."""
    sample = Sampler(1.0)
    u = sample.uniform((10000,), torch.device("cpu"))
    assert u.dtype == torch.float64 and ((u * 2 ** 24) % 1 != 0).float().mean() > 0.99
    rare = torch.tensor([[0.5, *[1e-8] * 20, 0.5 - 2e-7]])
    for i in range(20):
        at = (0.5 + (i + 0.5) * 1e-8) / rare.double().sum().item()
        monkeypatch.setattr(Sampler, "uniform", lambda *_: torch.tensor([[at]], dtype=u.dtype))
        assert sample.draw(rare) == [1 + i]


def test_the_smallest_number_draws_no_token_without_probability():
    assert Zeros().draw(torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.0, 0.0]])) == [1, 0, 1]


def test_the_largest_number_draws_no_token_without_probability(monkeypatch):
    """Also where probabilities in float32 sum to a little less than 1."""
    largest = torch.tensor([[1 - 2.0 ** -53]], dtype=torch.float64)
    monkeypatch.setattr(Sampler, "uniform", lambda *_: largest)
    assert Sampler().draw(torch.tensor([[0.5, 0.5 - 1e-7, 0.0]])) == [1]


def test_draws_have_their_distribution():
    """Each of 20,000 pairs is two rows of one call: both rows' distributions, and that the rows are
    independent. Tokens of probability 0 are never drawn."""
    p = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05, 0.0], [0.0, 0.01, 0.04, 0.0, 0.35, 0.6]])
    sample = Sampler(seed=5)
    draws = torch.tensor(sample.draw(p.repeat(20_000, 1))).view(-1, 2)
    pairs = draws[:, 0] * 6 + draws[:, 1]
    expected = (p[0][:, None] * p[1]).flatten()
    counts = torch.bincount(pairs, minlength=36)
    assert chi_square_ok(counts, expected) and counts[expected == 0].sum() == 0
    for row in range(2):
        assert chi_square_ok(torch.bincount(draws[:, row], minlength=6), p[row])
    # one call after the other, with weights that sum to anything, and through logits
    calls = torch.tensor([sample.draw(3 * p[:1])[0] for _ in range(4000)])
    assert chi_square_ok(torch.bincount(calls, minlength=6), p[0])
    sample = Sampler(0.5, top_k=3, seed=1)
    tokens = torch.tensor(sample(p[:1].log().repeat(20_000, 1)))
    expected = torch.tensor([0.25, 0.04, 0.0225, 0, 0, 0])
    assert chi_square_ok(torch.bincount(tokens, minlength=6), expected / expected.sum())
    assert tokens.max() == 2


def test_sampler_is_seeded_and_greedy_at_0():
    logits = torch.randn(100, 30, generator=torch.Generator().manual_seed(0))
    assert Sampler(seed=3)(logits) == Sampler(seed=3)(logits) != Sampler(seed=4)(logits)
    again = Sampler(seed=3)
    assert again(logits) != again(logits)
    greedily = logits.argmax(-1).tolist()
    assert greedy(logits) == greedily == Sampler(temperature=0, top_k=3, seed=1)(logits)
    assert greedy.draw(greedy.probs(logits)) == greedily
    assert torch.equal(*(Sampler(seed=3).uniform((4, 5), "cpu") for _ in range(2)))
    uniform = again.uniform(10_000, "cpu")
    assert 0 <= uniform.min() and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.02


@pytest.mark.parametrize("option, wrong", [
    ("temperature", -1.0), ("temperature", 1e-7), ("temperature", 1e7), ("temperature", math.inf),
    ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan)])
def test_a_sampler_names_the_option_that_is_wrong(option, wrong):
    with pytest.raises(InputError, match=f"^--{option.replace('_', '-')} must be .*, got {wrong}$"):
        Sampler(**{option: wrong})


# ----------------------------------------------------------------------------------- the rest

def test_until_cuts_at_eos_and_at_the_limit():
    def chunks():
        yield from ([1], [2, 3, 4], [5, 6])
        raise AssertionError("asked for more than was needed")
    assert list(until(chunks(), 3)) == [[1], [2, 3]]
    assert list(until(chunks(), 4)) == [[1], [2, 3, 4]]
    assert list(until(chunks(), 99, eos=[6])) == [[1], [2, 3, 4], [5, 6]]
    assert list(until(chunks(), 99, eos=[3, 2])) == [[1], [2]]
    assert list(until(chunks(), 0)) == []


@pytest.mark.parametrize("listed, said, ends", [
    (None, 2, {2}), (3, 2, {2, 3}), ([3, 4], 2, {2, 3, 4}), (3, None, {3}), (None, None, set())])
def test_an_answer_ends_by_the_tokenizer_and_by_the_settings(listed, said, ends):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=listed))
    assert eos_ids(model, SimpleNamespace(eos_token_id=said)) == ends


def test_what_is_cut_counts_as_accepted_no_longer():
    """Of the last record, where it has such a count; nothing else in the log changes."""
    def chunks(log, key):
        for chunk in ([1], [2, 3, 4], [5, 6, 7]):
            log.append({"drafted": 2, key: len(chunk) - 1})
            yield chunk
    for limit, eos, accepted in ((7, [], [0, 2, 2]), (6, [], [0, 2, 2]), (5, [], [0, 2, 1]),
                                 (4, [], [0, 2]), (3, [], [0, 2]), (2, [], [0, 1]), (1, [], [0]),
                                 (9, [3], [0, 2]), (9, [2], [0, 1]), (9, [1], [0]),
                                 (9, [6], [0, 2, 2]), (9, [5], [0, 2, 1])):
        log, other = [], []
        list(until(chunks(log, "accepted"), limit, eos, log))
        assert [r["accepted"] for r in log] == accepted and all(r["drafted"] == 2 for r in log)
        assert [r.get("cut", False) for r in log] == [
            r is log[-1] and (limit, eos) not in ((7, []), (4, []), (1, []), (9, [1]))
            for r in log]
        list(until(chunks(other, "states"), limit, eos, other))
        assert [r["states"] for r in other] == [0, 2, 2][:len(accepted)]


ROPES = {
    "longrope": dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4),
    "dynamic": {}, "yarn": {}, "llama3": dict(low_freq_factor=1.0, high_freq_factor=4.0)}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_embeddings_that_change_with_the_length(kind):
    """LongRoPE turns all keys another way beyond its first length, also those that are cached: the
    context ends there. The others do so beyond the context, or never."""
    rope = dict(rope_type=kind, rope_theta=10000.0, factor=2.0, **ROPES[kind])
    if kind != "dynamic":
        rope["original_max_position_embeddings"] = 64
    model = tiny("llama", rope_parameters=rope)
    length = 64 if kind == "longrope" else CONTEXT
    lm = CachedLM(model)
    assert context_length(model) == lm.max_length == length
    ids = torch.tensor([[3, 4, 5]])
    expected = model.generate(ids, max_new_tokens=CONTEXT - 3, do_sample=False, use_cache=False,
                              eos_token_id=None, pad_token_id=1)[0, 3:].tolist()
    found = tokens_of(autoregressive(lm, [3, 4, 5]), length - 3)
    assert found == expected[:length - 3]
    more = tokens_of(autoregressive(CachedLM(tiny("llama", rope_parameters=rope)),
                                    [3, 4, 5]), 10)
    assert more == expected[:10]


SMALL = dict(vocab_size=61, hidden_size=32)
HEADS = dict(num_hidden_layers=2, num_attention_heads=4)
REFUSED = [
    (BloomConfig(**SMALL, n_layer=2, n_head=4), "positions, a mask and a cache, got Bloom"),
    (FalconConfig(**SMALL, **HEADS, alibi=True), "positions, a mask and a cache, got Falcon"),
    (MptConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4), "trees equal their paths"),
    (MambaConfig(**SMALL, num_hidden_layers=1), "linear_attention"),
    (GPTNeoConfig(**SMALL, num_layers=2, num_heads=4,
                  attention_types=[[["global", "local"], 1]]), "global, local"),
    (Llama4TextConfig(**SMALL, **HEADS, num_key_value_heads=2, num_local_experts=2),
     "chunked_attention"),
]


@BOTH
@pytest.mark.parametrize("config, said", REFUSED, ids=lambda x: getattr(x, "model_type", ""))
def test_models_that_a_tree_would_get_wrong_are_refused(config, said, run_as):
    """In one line, also where the forward pass of the model itself raises."""
    torch.manual_seed(0)
    with pytest.raises(InputError, match=said) as raised:
        prepare(AutoModelForCausalLM.from_config(config), run_as)
    assert str(raised.value).startswith("expected ") and "\n" not in str(raised.value)


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError, AttributeError])
def test_a_model_that_raises_is_refused_in_one_line(error):
    model = tiny("llama")

    def fail(*_):
        raise error("this\n  and " + "that " * 100)
    model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(InputError, match="cache, got LlamaForCausalLM: this and that") as raised:
        prepare(model)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


@BOTH
@pytest.mark.parametrize("ignored, said", [
    ("position_ids", "trees equal their paths"), ("attention_mask", "trees equal their paths"),
    ("past_key_values", "takes positions, a mask and a cache")])
def test_a_model_that_ignores_what_it_is_given_is_refused(ignored, said, run_as):
    """A mask of zeros lets every row look at all others."""
    def ignore(_, args, options):
        given = options.get(ignored)
        mask = ignored == "attention_mask" and given is not None
        return args, options | {ignored: torch.zeros_like(given) if mask else None}
    model = tiny("gpt2")
    model.transformer.register_forward_pre_hook(ignore, with_kwargs=True)
    with pytest.raises(InputError, match=said):
        prepare(model, run_as)


@pytest.mark.parametrize("dtype, run_as", [("bfloat16", CachedLM), ("bfloat16", GraphedLM),
                                           ("float16", CachedLM)])
def test_load_in_half_precision(dtype, run_as):
    model, tokenizer = load(ROOT / "models/target", "cpu", dtype)
    assert model.dtype == getattr(torch, dtype) and not model.training
    lm = run_as(model)
    ids = tokenizer("Mia has 3 apples and 4 pears.")["input_ids"]
    assert prefill(lm, ids).dtype == model.dtype
    assert {b.dtype for b in buffers_of(lm)} == {model.dtype}


def test_a_hub_that_is_asked_and_cannot_be_reached(monkeypatch):
    """Once, not for a minute, and only where nothing of the model lies here."""
    asked, read = [], []

    class Session:
        def head(self, url, timeout):
            asked.append((url, timeout))
            raise OSError("no\n network")

    def reader(path, **_):
        read.append(path)
        raise OSError("not here")
    monkeypatch.setattr("cli.loading.get_session", Session)
    monkeypatch.setattr("common.AutoTokenizer.from_pretrained", reader)
    with pytest.raises(InputError, match="got 'nope/model': no network$"):
        load_checked("nope/model", None, None)
    assert len(asked) == 1 and asked[0][0].startswith("https://") and asked[0][1] < 10 and not read
    monkeypatch.setattr("cli.loading.try_to_load_from_cache", lambda path, name: "config.json")
    for path in ("nope/model", str(ROOT / "tests")):
        with pytest.raises(InputError, match="not here$"):
            load_checked(path, None, None)
    assert read == ["nope/model", str(ROOT / "tests")] and len(asked) == 1


def test_load_by_default_in_float32_on_a_cpu():
    model, tokenizer = load(ROOT / "models/draft", "cpu")
    assert model.dtype == torch.float32 and model.config._attn_implementation == "grouped"
    assert len(tokenizer.decode(tokens_of(autoregressive(CachedLM(model), [5, 9, 3]), 9))) > 3


@pytest.mark.parametrize("path, device, dtype, said", [
    ("no/such/model", "cpu", None, "no/such/model"),
    (ROOT / "tests", "cpu", None, "can load as float32"),
    (ROOT / "models/draft", "cpu", "float99", "load as float99"),
    (ROOT / "models/draft", "cpu", "int8", "load as int8"),
    (ROOT / "models/draft", "gpu", None, "gpu can load as auto"),
    (ROOT / "models/draft", "cuda:99", None, "cuda:99 can load as auto"),
])
def test_what_cannot_be_loaded_is_an_error_of_one_line(path, device, dtype, said, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=said) as raised:
        load(path, device, dtype)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_a_broken_checkpoint_is_an_error_of_one_line(tmp_path):
    shutil.copytree(ROOT / "models/draft", tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="expected a model directory or hub id") as raised:
        load(tmp_path, "cpu")
    assert "\n" not in str(raised.value)


@BOTH
@pytest.mark.parametrize("node", [3, 4])
def test_every_leaf_of_the_checked_tree_counts(node, run_as):
    """A model that is wrong about one of them is refused."""
    def shift(_, args, options):
        rows = options.get("position_ids")
        if rows is not None and rows.shape[1] >= 5:
            options = options | {"position_ids": rows.index_add(
                1, torch.tensor([node]), torch.ones_like(rows[:, :1]))}
        return args, options
    model = tiny("gpt2")
    model.transformer.register_forward_pre_hook(shift, with_kwargs=True)
    with pytest.raises(InputError, match="trees equal their paths"):
        prepare(model, run_as)


def test_any_integer_is_a_seed():
    for seed in (-1, -10 ** 30, 2 ** 63, 2 ** 64, 10 ** 30):
        assert Sampler(seed=seed)(torch.zeros(3, 5)) == Sampler(seed=seed)(torch.zeros(3, 5))
