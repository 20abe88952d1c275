"""These tests take common.py function by function: trees, passes, sampling, loading, the clock."""
import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import (AutoModelForCausalLM, BloomConfig, Llama4TextConfig, MambaConfig,
                          MptConfig)
from transformers.generation.logits_process import (TemperatureLogitsWarper, TopKLogitsWarper,
                                                    TopPLogitsWarper)

from cli.graphs import GraphedLM
from cli.loading import check_passes, load_checked
from cli.run import Run, TimedLM
from common import (CachedLM, InputError, KVCache, Sampler, ancestor_mask, attention_mask,
                    eos_ids, greedy, load, trie, until, walk)
from survey.clock import best_tree, fastest, row_costs
from training.layers import context_length
from fake_models import Zeros, path_to
from families import CONTEXT, FAMILIES, MORE_FAMILIES, VOCAB, tiny
from helpers import ROOT, prefill
from laws import chi_square_ok

CLOSE = dict(atol=1e-4, rtol=1e-4)
BOTH = pytest.mark.parametrize("run_as", [TimedLM, GraphedLM])
ALL = {**FAMILIES, **MORE_FAMILIES}
FEW = ("llama", "gpt2", "gemma3", "gpt-oss", "deepseek-v3")  # as graphs: one of each kind of mask
ALL_AND_FEW = pytest.mark.parametrize("name, run_as", [*((name, TimedLM) for name in ALL),
                                                       *((name, GraphedLM) for name in FEW)])


def random_tree(rng, n: int, start: int = 0, deep: float = 0.5) -> list[int]:
    """Draw the parents of n nodes after `start` earlier ones; `deep` makes long paths likely."""
    return [i - 1 if rng.random() < deep and i else rng.randrange(-1, i)
            for i in range(start, start + n)]


@torch.inference_mode()
def alone(model, *texts: list[int]) -> torch.Tensor:
    """Compute the logits [texts, V] after each text, without a cache, tree or mask of ours.

    Shorter texts have padding behind them, which no token of them looks at.
    """
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


def test_trie_merges_equal_prefixes():
    ids, parents, paths = trie(9, [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 6], []])
    assert ids == [9, 1, 2, 3, 4, 5, 6] and parents == [-1, 0, 1, 2, 2, 0, 3]
    assert paths == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 5], [0, 1, 2, 3, 6], [0]]
    assert trie(9, [[1, 2], [2, 1]])[:2] == ([9, 1, 2, 2, 1], [-1, 0, 1, 0, 3])


def test_walk_follows_what_the_target_chose():
    ids, parents, _ = trie(9, [[1, 2], [1, 3], [4]])  # nodes 9:0 1:1 2:2 3:3 4:4
    assert walk(ids, parents, [1, 3, 7, 8, 7]) == ([0, 1, 3], [1, 3, 8])
    assert walk(ids, parents, [5, 3, 7, 8, 7]) == ([0], [5])


# ------------------------------------------------------------------------- the model's passes

def grow(lm, rng, context: list[int], ids: list[int]) -> None:
    """Add random nodes to the pending tree `ids`; check their logits against those of their paths.

    They are fed as tokens or embeddings, as a chain or not, with the LM head on some or on all.
    """
    n, old = rng.randint(1, 9), len(ids)
    parents = None if rng.random() < 0.2 else random_tree(rng, n, old, rng.random())
    tokens = fed = rng.choices(range(VOCAB), k=n)
    if rng.random() < 0.3:
        fed = lm.model.get_input_embeddings()(torch.tensor(tokens, device=lm.model.device)).detach()
    keep = rng.choice([None, 0, 1, n])
    logits = lm.forward(fed, parents, keep=keep)
    ids += tokens
    assert logits.shape == (n if keep is None else keep, VOCAB)
    assert lm.parents[old:] == list(range(old - 1, old + n - 1) if parents is None else parents)
    texts = [context + [ids[j] for j in path_to(i, lm.parents)] for i in range(old, old + n)]
    if keep != 0:
        expected = alone(lm.model, *texts[n - len(logits):])
        torch.testing.assert_close(logits, expected, **CLOSE)


def check_trees(model, run_as=CachedLM) -> CachedLM:
    """Check that random trees equal their paths, and that the cache is always as a fresh one.

    One CachedLM does it all, so that what earlier trees left in its buffers must reach nothing.
    """
    rng, lm = random.Random(1), run_as(model)
    for length in (0, 4, 30) * 2:  # less than a sliding window, and more
        context = rng.choices(range(VOCAB), k=length)
        lm.start(context + [7, 7])
        lm.truncate(length)
        for _ in range(3):
            ids = []
            for _ in range(rng.randint(1, 3)):
                grow(lm, rng, context, ids)
            if rng.random() < 0.8:
                path = path_to(rng.randrange(len(ids)), lm.parents)[:rng.randint(0, 9)]
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


@ALL_AND_FEW
def test_random_trees_equal_their_paths_and_the_cache_a_fresh_one(name, run_as):
    check_trees(tiny(name), run_as)


@ALL_AND_FEW
def test_features_are_what_the_head_reads(name, run_as):
    """That holds for a prompt of two parts, and for each node of a tree as on its path alone."""
    model, read = tiny(name), []
    lm, context = run_as(model), random.Random(2).choices(range(VOCAB), k=135)
    ids, parents = [4, 2, 0, 3, 1], [-1, 0, 0, 1, 2]
    lm.start(context)
    prompt = lm.features
    lm.forward(ids, parents, keep=1)
    model.get_output_embeddings().register_forward_pre_hook(lambda _, x: read.append(x[0]))
    alone(model, context, *(context + [ids[j] for j in path_to(i, parents)] for i in range(5)))
    torch.testing.assert_close(prompt, read[0][0, :135], **CLOSE)
    ends = [134 + len(path_to(i, parents)) for i in range(5)]
    torch.testing.assert_close(lm.features, read[0][range(1, 6), ends], **CLOSE)


ROWS = [(torch.ones(2, 3, 8), torch.ones(2, 3, 8))] * 2  # of a prefix for the tiny Llama


@BOTH
def test_a_prefix_is_nothing_to_nodes_that_do_not_ask(run_as):
    """Node 1 asks, and node 0 above it does not. What node 1 computes is in test_lossless.py."""
    lm, plain = run_as(tiny("gemma3")), CachedLM(tiny("gemma3"))
    plain.start([5, 9, 2, 7])
    expected = plain.forward([8, 3])
    for _ in range(2):  # the second time in buffers of full size
        lm.start([5, 9, 2, 7], prefix=ROWS)
        found = lm.forward([8, 3], sees_prefix=[False, True])
        torch.testing.assert_close(found[0], expected[0], **CLOSE)
        assert lm.length == 4 and not torch.allclose(found[1], expected[1], atol=1e-2)
    lm.start([5, 9, 2, 7])
    torch.testing.assert_close(lm.forward([8, 3]), expected, **CLOSE)  # there is no prefix


def test_no_window_hides_the_prefix():
    """All layers have windows of 9 tokens. A node far behind the prefix still sees it."""
    lm = CachedLM(tiny("mistral"))
    lm.start([5, 9, 2, 7] * 4, prefix=ROWS)
    seen, unseen = (lm.forward([3], [-1], sees_prefix=[sees]) for sees in (True, False))
    assert not torch.allclose(seen, unseen)


def test_only_the_first_so_many_logits_count():
    lm, cut = CachedLM(tiny("llama")), CachedLM(tiny("llama"), vocab=50)
    assert torch.equal(prefill(cut, [3, 4, 5]), prefill(lm, [3, 4, 5])[:, :50])


def test_eager_attention_too():
    """Models without an sdpa path add the mask to their scores."""
    model = tiny("gemma3", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    expected = alone(tiny("gemma3"), [*range(60)])
    torch.testing.assert_close(prefill(CachedLM(model), [*range(60)]), expected, **CLOSE)


# ------------------------------------------------------------------------ buffers and counters

def test_each_layer_has_its_buffers_where_its_keys_are():
    """A model may be spread over devices, prompts come in batches, values have another size."""
    cache = KVCache()
    for layer, device in enumerate(("cpu", "meta")):
        new = [torch.ones(3, 2, 4, size, device=device) for size in (8, 6)]
        keys, values = cache.update(*new, layer)
        assert keys.device.type == device == cache.layers[layer][0].device.type
        assert (keys.shape, values.shape) == ((3, 2, 4, 8), (3, 2, 4, 6))


@BOTH
def test_a_prompt_is_no_call_and_has_its_own_time(run_as):
    lm, counted = run_as(tiny("llama")), []
    for _ in range(2):
        lm.start([3, 4, 5])
        counted.append((lm.calls, lm.rows, lm.seconds, lm.prompt_seconds))
        lm.forward([6, 7, 8], keep=1)
    assert counted[0][:3] == (0, 0, 0) and counted[1][:2] == (1, 3)
    assert lm.seconds > counted[1][2] > 0 and lm.prompt_seconds == counted[1][3] > counted[0][3] > 0


# -------------------------------------------------------------------------------------- misuse

def test_a_prompt_too_long_is_refused_and_changes_nothing():
    lm, fresh = CachedLM(tiny("llama")), CachedLM(tiny("llama"))
    for each in (lm, fresh):
        each.start([1, 2, 3])
    with pytest.raises(InputError, match=f"at most {CONTEXT} tokens, got {CONTEXT + 1}"):
        lm.start([9] * (CONTEXT + 1))
    assert torch.equal(lm.forward([4]), fresh.forward([4]))
    lm.start([5] * CONTEXT)
    assert lm.length == CONTEXT == context_length(lm.model)
    endless = AutoModelForCausalLM.from_config(REFUSED[0][0])  # BLOOM has no limit
    assert context_length(endless) > 10 ** 6


def test_a_commit_takes_a_path_and_a_context_is_cut_to_a_length_that_it_has():
    lm = CachedLM(tiny("llama"))
    lm.start([1, 2, 3, 4])
    lm.forward([5, 6, 7], [-1, -1, 0])
    for path in ([2], [0, 1], [1, 2], [-1]):
        with pytest.raises(ValueError, match="path from the context"):
            lm.commit(path)
    for length in (5, -1):
        with pytest.raises(ValueError, match="length of 0 to 4"):
            lm.truncate(length)


WRONG = {
    "no node": dict(ids=[]),
    "a parent too few": dict(ids=[4, 5], parents=[-1]),
    "a parent too many": dict(ids=[4], parents=[-1, 0]),
    "its own parent": dict(ids=[4, 5], parents=[-1, 3]),
    "a parent below -1": dict(ids=[4, 5], parents=[-1, -2]),
    "too few see": dict(ids=[4, 5, 6], sees_prefix=[True] * 2),
    "too many see": dict(ids=[4, 5, 6], sees_prefix=[True] * 4),
    "an unknown token": dict(ids=[4, VOCAB]),
    "Ctrl-C in the second layer": dict(ids=[4, 5]),
}


@BOTH
@pytest.mark.parametrize("wrong", WRONG)
def test_a_call_that_fails_changes_nothing(wrong, run_as):
    """After the error the next calls give what they would have given, to the last bit."""
    model = tiny("llama")
    lm, fresh = run_as(model), run_as(model)
    for each in (lm, fresh):
        each.start([1, 2, 3], prefix=ROWS)
        each.forward([4, 5], [-1, -1])
    seconds, hooks = lm.seconds, []

    def interrupt(*_):
        raise KeyboardInterrupt
    if "Ctrl-C" in wrong:  # when the first layer has written its rows
        hooks.append(model.model.layers[1].register_forward_pre_hook(interrupt))
    errors = ValueError, IndexError, RuntimeError, KeyboardInterrupt
    with pytest.raises(ValueError if "parent" in wrong else errors):
        lm.forward(**WRONG[wrong])
    for hook in hooks:
        hook.remove()
    assert (lm.calls, lm.rows, lm.seconds) == (1, 2, seconds)
    assert (lm.length, lm.parents) == (3, [-1, -1])
    ours, theirs = (each.forward([6, 4], [1, -1]) for each in (lm, fresh))
    assert torch.equal(ours, theirs)
    for each in (lm, fresh):
        each.commit([1, 2])
    assert torch.equal(lm.forward([4]), fresh.forward([4]))


# --------------------------------------------------------------------------------------- masks

@pytest.mark.parametrize("windows", [{"sliding_attention": None}, {"sliding_attention": 3},
                                     {"full_attention": None, "sliding_attention": 4}])
def test_attention_mask_equals_a_double_loop(windows):
    """Texts of a batch stand at other positions; a slot at 10 ** 9 is hidden by no window."""
    rng = torch.Generator().manual_seed(0)
    visible = torch.rand(3, 5, 11, generator=rng) < 0.7
    rows, slots = (torch.randint(0, 12, (3, n), generator=rng) for n in (5, 11))
    slots[:, 0] = 10 ** 9
    masks = attention_mask(windows, visible, rows, slots, torch.zeros(1, dtype=torch.bfloat16))
    masks = masks if len(windows) > 1 else dict(zip(windows, [masks]))
    for kind, window in windows.items():
        assert masks[kind].dtype == torch.bfloat16 and masks[kind].shape == (3, 1, 5, 11)
        for b, i, j in itertools.product(range(3), range(5), range(11)):
            near = window is None or rows[b, i] - slots[b, j] < window
            expected = 0 if visible[b, i, j] and near else -torch.inf
            assert masks[kind][b, 0, i, j].item() == expected, (kind, b, i, j)


# ------------------------------------------------------------------------------------ sampling

@pytest.mark.parametrize("temperature, top_k, top_p", [
    (1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.8), (0.5, 20, 0.9), (2.0, 1, 0.3),
    (1.0, 99, 0.05), (1.0, 3, 0.6)])
def test_probs_equal_transformers_warpers(temperature, top_k, top_p):
    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    sample = Sampler(temperature, top_k, top_p)
    torch.testing.assert_close(sample.probs(logits), expected.softmax(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sample.probs(logits[3]), expected[3].softmax(-1))  # [V] alone
    assert sample.probs(logits.bfloat16()).dtype == torch.float32


def test_the_smallest_and_the_largest_temperature():
    """They are next to greedy and next to uniform, without overflow."""
    logits = 1e4 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    greedily = logits.argmax(-1)
    for cold in greedy, Sampler(1e-6), Sampler(temperature=0, top_k=3, seed=1):
        assert torch.equal(cold.probs(logits).argmax(-1), greedily)
        assert cold(logits) == cold.draw(cold.probs(logits)).tolist() == greedily.tolist()
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
        assert sample.draw(rare).tolist() == [1 + i]


def test_no_coin_draws_a_token_without_probability(monkeypatch):
    """Not the smallest, and not the largest where probabilities sum to a little less than 1."""
    few = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.0, 0.0]])
    assert Zeros().draw(few).tolist() == [1, 0, 1]
    largest = torch.tensor([[1 - 2.0 ** -53]], dtype=torch.float64)
    monkeypatch.setattr(Sampler, "uniform", lambda *_: largest)
    assert Sampler().draw(torch.tensor([[0.5, 0.5 - 1e-7, 0.0]])).tolist() == [1]


def test_draws_have_their_distribution():
    """Two rows of one call are independent, and so are two calls. Odds need not sum to 1."""
    p = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05, 0.0], [0.0, 0.01, 0.04, 0.0, 0.35, 0.6]])
    sample = Sampler(seed=5)
    draws = sample.draw(3 * p.repeat(20_000, 1)).view(-1, 2)
    expected = (p[0][:, None] * p[1]).flatten()  # of pairs
    counts = torch.bincount(draws[:, 0] * 6 + draws[:, 1], minlength=36)
    assert chi_square_ok(counts, expected) and counts[expected == 0].sum() == 0
    calls = torch.tensor([sample(p[:1].log())[0] for _ in range(4000)])
    assert chi_square_ok(torch.bincount(calls, minlength=6), p[0])


def test_a_sampler_is_seeded_by_any_integer():
    logits = torch.randn(100, 30, generator=torch.Generator().manual_seed(0))
    for seed in (3, -1, 2 ** 64, 10 ** 30):
        assert Sampler(seed=seed)(logits) == Sampler(seed=seed)(logits) != Sampler(seed=4)(logits)
    again = Sampler(seed=3)
    assert again(logits) != again(logits)


@pytest.mark.parametrize("option, wrong", [
    ("temperature", -1.0), ("temperature", 1e-7), ("temperature", 1e7), ("temperature", math.inf),
    ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan)])
def test_a_sampler_names_the_number_that_is_wrong(option, wrong):
    with pytest.raises(InputError, match=f"^expected .*{option}.*, got .*{wrong}"):
        Sampler(**{option: wrong})


# ------------------------------------------------------------------------------------ decoding

def test_until_cuts_at_eos_and_at_the_limit():
    def chunks():
        yield from ([1], [2, 3, 4], [5, 6])
        raise AssertionError("asked for more than was needed")
    assert list(until(chunks(), 3)) == [[1], [2, 3]]
    assert list(until(chunks(), 4)) == [[1], [2, 3, 4]]
    assert list(until(chunks(), 99, eos=[6])) == [[1], [2, 3, 4], [5, 6]]
    assert list(until(chunks(), 99, eos=[3, 2])) == [[1], [2]]
    assert list(until(chunks(), 0)) == []


@pytest.mark.parametrize("limit, eos, accepted, cut", [
    (4, [], [0, 2], False), (3, [], [0, 2], True), (2, [], [0, 1], True), (1, [], [0], False),
    (9, [3], [0, 2], True), (9, [2], [0, 1], True), (9, [1], [0], False)])
def test_what_is_cut_off_counts_as_accepted_no_longer(limit, eos, accepted, cut):
    """This changes the last record alone, and says that it is cut."""
    def chunks(log, **_):
        for chunk in ([1], [2, 3, 4], [5, 6, 7]):
            log.append({"drafted": 2, "accepted": len(chunk) - 1})
            yield chunk
    run = Run(chunks, {}, {}, eos)
    list(run.decode([0], limit, greedy))
    assert [r["accepted"] for r in run.log] == accepted
    assert [r.get("cut", False) for r in run.log] == [False] * (len(run.log) - 1) + [cut]


@pytest.mark.parametrize("listed, said, ends", [
    (None, 2, {2}), (3, 2, {2, 3}), ([3, 4], 2, {2, 3, 4}), (3, None, {3}), (None, None, set())])
def test_an_answer_ends_by_the_tokenizer_and_by_the_settings(listed, said, ends):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=listed))
    assert eos_ids(model, SimpleNamespace(eos_token_id=said)) == ends


# ------------------------------------------------------------------------------------- loading

ROPES = {
    "longrope": dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4),
    "dynamic": {}, "yarn": {}, "llama3": dict(low_freq_factor=1.0, high_freq_factor=4.0)}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_embeddings_that_change_with_the_length(kind):
    """Beyond its first length LongRoPE turns all keys another way, cached ones too, so the context
    ends there. The others do so beyond the context, or never."""
    rope = dict(rope_type=kind, rope_theta=10000.0, factor=2.0, **ROPES[kind])
    if kind != "dynamic":
        rope["original_max_position_embeddings"] = 64
    model = tiny("llama", rope_parameters=rope)
    length = 64 if kind == "longrope" else CONTEXT
    assert context_length(model) == length
    text = [i * i % VOCAB for i in range(length)]
    found = prefill(CachedLM(model), text)
    torch.testing.assert_close(found, alone(tiny("llama", rope_parameters=rope), text), **CLOSE)


SMALL = dict(vocab_size=61, hidden_size=32)
HEADS = dict(num_hidden_layers=2, num_attention_heads=4)
REFUSED = [
    (BloomConfig(**SMALL, n_layer=2, n_head=4), "positions, a mask and a cache, got Bloom"),
    (MptConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4), "trees equal their paths"),
    (MambaConfig(**SMALL, num_hidden_layers=1), "linear_attention"),
    (Llama4TextConfig(**SMALL, **HEADS, num_key_value_heads=2, num_local_experts=2),
     "chunked_attention"),
]


@BOTH
@pytest.mark.parametrize("config, said", REFUSED, ids=lambda x: getattr(x, "model_type", ""))
def test_models_that_a_tree_would_get_wrong_are_refused(config, said, run_as):
    torch.manual_seed(0)
    with pytest.raises(InputError, match=f"^expected .*{said}") as raised:
        check_passes(AutoModelForCausalLM.from_config(config), run_as)
    assert "\n" not in str(raised.value)


def hook(part, change) -> None:
    """Change the arguments that a module is called with."""
    part.register_forward_pre_hook(lambda _, args, options: (args, options | change(options)),
                                   with_kwargs=True)


def move_leaf(options: dict) -> dict:
    """Give the last node of a tree of five the next position."""
    positions = options["position_ids"]
    if positions is None or positions.shape[1] < 5:
        return {}
    return {"position_ids": positions + (torch.arange(positions.shape[1]) == 4)}


def show_all(options: dict) -> dict:
    mask = options["attention_mask"]
    return {"attention_mask": None if mask is None else torch.zeros_like(mask)}


TREES = "trees equal their paths"
BROKEN = {
    "positions": (TREES, lambda model: hook(model.transformer, lambda _: {"position_ids": None})),
    "a leaf": (TREES, lambda model: hook(model.transformer, move_leaf)),
    "the mask": (TREES, lambda model: hook(model.transformer, show_all)),
    "the cache": ("takes positions, a mask and a cache, got GPT2LMHeadModel: ", lambda model: hook(
        model.transformer, lambda _: {"past_key_values": None})),
    "a nan": (TREES + ".* off by nan", lambda model: model.transformer.ln_f.weight.data.fill_(
        math.nan))}


@BOTH
@pytest.mark.parametrize("broken", BROKEN)
def test_a_model_that_ignores_what_it_is_given_is_refused(broken, run_as):
    model, (said, act) = tiny("gpt2"), BROKEN[broken]
    act(model)
    with pytest.raises(InputError, match=said) as raised:
        check_passes(model, run_as)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", None])
def test_load_in_a_type(dtype):
    """On a CPU float32 is the default; the cache has the type of the model."""
    model, tokenizer = load(ROOT / "models/draft", "cpu", dtype)
    wanted = getattr(torch, dtype or "float32")
    assert model.dtype == wanted and not model.training
    assert model.config._attn_implementation == "grouped"
    lm, ids = CachedLM(model), tokenizer("Mia has 3 apples and 4 pears.")["input_ids"]
    assert prefill(lm, ids).dtype == wanted and {b.dtype for b in buffers_of(lm)} == {wanted}


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch):
    """It is asked for seconds, not for a minute, and only where nothing of the model lies here."""
    asked, files = [], []

    def ask(self, url, timeout):
        asked.append(timeout)
        raise OSError("no\n network")

    def read(path, **_):
        files.append(path)
        raise OSError("not here")
    monkeypatch.setattr("cli.loading.get_session", type("Session", (), {"head": ask}))
    monkeypatch.setattr("common.AutoTokenizer.from_pretrained", read)
    monkeypatch.setattr("cli.loading.AutoConfig.from_pretrained", read)  # it would ask the network
    with pytest.raises(InputError, match="got 'nope/model': no network$"):
        load_checked("nope/model", None, None)
    assert len(asked) == 1 and asked[0] < 10 and files == []
    monkeypatch.setattr("cli.loading.try_to_load_from_cache", lambda path, name: "config.json")
    for path in ("nope/model", str(ROOT / "models/target")):
        with pytest.raises(InputError, match="not here$"):
            load_checked(path, None, None)
    assert len(asked) == 1 and {*files} == {"nope/model", str(ROOT / "models/target")}


# ----------------------------------------------------------------------------------- the clock

def test_the_best_tree_is_the_best_of_all():
    """No tree of n nodes has a larger sum of chances. The first m nodes are the best tree of m."""
    rng = random.Random(0)
    for _ in range(8):
        accept = [[rng.random() for _ in range(2)] for _ in range(3)]
        chances = {(): 1.0}  # of every node, by the ranks on its path
        for depth in range(3):
            for ranks in itertools.product(range(2), repeat=depth + 1):
                chances[ranks] = chances[ranks[:-1]] * accept[depth][ranks[-1]]
        tree, paths = best_tree(accept, 7), []
        for chance, parent, depth, rank in tree:
            paths.append(paths[parent] + (rank,) if paths else ())
            assert len(paths[-1]) == depth and chance == pytest.approx(chances[paths[-1]])
        for n in range(1, 8):
            trees = (set(some) for some in itertools.combinations(chances, n))
            most = max(sum(map(chances.get, some)) for some in trees
                       if all(not ranks or ranks[:-1] in some for ranks in some))
            assert sum(chance for chance, *_ in tree[:n]) == pytest.approx(most)
            assert best_tree(accept, n) == tree[:n]
    assert best_tree([], 4) == [(1.0, -1, 0, 0)] and len(best_tree([[0.5, 0.1]], 9)) == 3


def test_costs_are_those_of_calls_with_room_and_counted_nowhere(monkeypatch):
    """The machine is busy during the first six calls, of whatever width."""
    lm, ran = CachedLM(tiny("llama")), []
    lm.start([3, 4, 5])
    counted = lm.calls, lm.rows, lm.seconds, lm.parents, lm.length
    seconds, forward = {1: 5, 2: 7, 4: 6, 8: 3, 16: 8}, lm.forward

    def run(ids, **options):
        ran.append(len(ids))
        return forward(ids, **options)

    def timed(act, number):
        act()
        return seconds[ran[-1]] + 9 * (len(ran) < 6)
    monkeypatch.setattr(lm, "forward", run)
    monkeypatch.setattr("timeit.timeit", timed)
    assert row_costs(lm, 9)[1:10] == [3] * 8 + [8]
    assert row_costs(lm, 4)[1:5] == [5, 6, 6, 6]
    assert (lm.calls, lm.rows, lm.seconds, lm.parents, lm.length) == counted


def test_the_fastest_choice_is_asked_for_again_when_the_context_has_doubled():
    lm, asked = CachedLM(tiny("llama", max_position_embeddings=2000)), []

    def choices():
        asked.append(lm.length)
        yield from [("a", 1.0, 2.0), ("b", 3.0, 4.0), ("c", 5.0, 7.0)]
    for lm.length in (0, 3, 255, 256, 511, 512, 100, 1100):
        assert fastest(lm, "x", choices) == "b"
    assert asked == [0, 256, 512, 1100]


def test_what_is_made_once_is_set_up(monkeypatch):
    """Each model has its own. The time of a nested `once` counts once."""
    now, made = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    lm, other = TimedLM(tiny("llama")), TimedLM(tiny("llama"))

    def make():
        now[0] += 3
        made.append(len(made))
        return made[-1]
    assert [lm.once("x", make), lm.once("x", make)] == [0, 0]
    assert lm.once("outer", lambda: lm.once("inner", make)) == 1
    assert (lm.setup_seconds, lm.seconds, other.setup_seconds) == (6, 0, 0)
    assert other.once("x", make) == 2
