"""The static path: passes of fixed widths over the whole buffer, as they are (on a CPU) and captured (on a GPU; here by a stand-in)."""
import contextlib
import random
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import test_bita
import test_cllm
import test_common
import test_jacobi
import test_mjsd
import test_speculative
from bita import bita
from common import WIDTHS, CachedLM, Run, autoregressive, greedy
from conftest import CONTEXT, near, tiny, tokens_of
from ouroboros import ouroboros
from speculative import speculative


@pytest.fixture(autouse=True)
def static(monkeypatch):
    monkeypatch.setattr(CachedLM.__init__, "__defaults__", (None, True))


# the tests of exactness once more, on the static path
test_trees = test_common.test_forward_over_random_trees_equals_each_path_alone
test_embeds = test_common.test_embeds_stand_in_for_ids
test_prefix = test_common.test_prefix_rows_are_seen_only_by_the_nodes_that_ask
test_long_prompts = test_common.test_long_prompts_are_cached_in_chunks
test_misuse = test_common.test_misuse_of_the_cache_is_an_error
test_autoregressive = test_common.test_autoregressive_equals_generate
test_several_drafts = test_speculative.test_several_drafts_on_real_caches
test_bild = test_speculative.test_bild_is_exact_in_its_limits
test_own_draft = test_speculative.test_the_target_as_its_own_draft_is_always_accepted
test_greedy_jacobi = test_jacobi.test_greedy_jacobi_equals_autoregressive
test_greedy_lookahead = test_jacobi.test_greedy_lookahead_equals_autoregressive
test_greedy_cllm = test_cllm.test_greedy_equals_autoregressive
test_greedy_bita = test_bita.test_greedy_equals_autoregressive
test_bita_rows = test_bita.test_prompt_and_mask_tokens_leave_real_tokens_alone
test_mjgd = test_mjsd.test_mjgd_of_one_token_is_greedy_decoding
test_mjsd_tau_1 = test_mjsd.test_tau_1_is_greedy_decoding
test_mjsd_caches = test_mjsd.test_mjsd_on_real_caches


def test_methods_with_a_draft(family):
    model = tiny(family)
    target, draft, prompt = CachedLM(model, CONTEXT), CachedLM(near(model, 0.02), CONTEXT), [5, 9, 3, 14, 7]
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT, static=False), prompt), 60)
    assert tokens_of(speculative(target, draft, prompt, gamma=5), 60) == expected
    assert tokens_of(ouroboros(target, draft, prompt), 60) == expected


def widths_of(monkeypatch) -> list[tuple]:
    """(rows, slots) of the passes from now on."""
    seen, run = [], CachedLM._run

    def spy(self, tokens, positions, mask, *more, **options):
        seen.append(tuple(mask.shape[2:]))
        return run(self, tokens, positions, mask, *more, **options)
    monkeypatch.setattr(CachedLM, "_run", spy)
    return seen


def test_shapes_are_few(monkeypatch):
    """Every pass of up to 128 rows has a width of the list and all slots; wider ones run as they are."""
    lm, rng = CachedLM(tiny("llama", max_position_embeddings=900), capacity=600), random.Random(0)
    seen = widths_of(monkeypatch)
    lm.start([5] * 300, width=140)
    lm.forward([7])
    assert seen == [(301, 301)]  # the prompt and the tree at once, over the slots in use
    del seen[:]
    for n in (1, 2, 3, 5, 8, 9, 31, 64, 100, 128, 129):
        lm.truncate(250)
        lm.forward([rng.randrange(60) for _ in range(n)])
    assert [rows for rows, _ in seen] == [1, 2, 4, 8, 8, 16, 32, 64, 128, 128, 129]
    assert {slots for rows, slots in seen if rows in WIDTHS} == {872} and seen[-1] == (129, 250 + 129)  # 600 + 140 + 128, rounded up to 8
    assert lm.rows == 301 + sum((1, 2, 3, 5, 8, 9, 31, 64, 100, 128, 129))  # padding is not counted


@torch.inference_mode()
def test_padding_reaches_nothing():
    """The rows that padding leaves behind the pending tree are never seen: garbage there changes no logit."""
    lm, plain = (CachedLM(tiny("llama"), CONTEXT, static=static) for static in (True, False))
    for model in (lm, plain):
        model.start([3, 14, 15], width=20)
        model.forward([9])
        model.commit([0])
    for buffer in (b for pair in lm.cache.layers.values() for b in pair):
        buffer[:, :, lm.length:] = 1e4
    torch.testing.assert_close(lm.forward([2, 6, 5], [-1, 0, 0]), plain.forward([2, 6, 5], [-1, 0, 0]), atol=1e-4, rtol=1e-4)


WAITING = {"aten::" + name for name in ("item", "is_nonzero", "_local_scalar_dense", "nonzero", "equal", "masked_select", "lift_fresh")}


class Watched(TorchDispatchMode):
    """As the debug mode of CUDA does, raises RuntimeError at what has to wait for a GPU, or copies to it what a list held."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_bool = func._schema.name in ("aten::index", "aten::index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1])
        if func._schema.name in WAITING or by_bool:
            raise RuntimeError(f"called a synchronizing operation: {func}")
        return func(*args, **kwargs or {})


class Graph(Watched):
    """Stands in for a CUDA graph: records each operation and, replayed, does the same ones on the same memory."""

    def __init__(self):
        super().__init__()
        self.tape, self.replays = [], 0

    def pool(self):
        return "pool"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.tape.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.tape:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def captured(monkeypatch):
    """CachedLM captures its passes, with stand-ins for CUDA; the pools that graphs asked for."""
    pools, init, watch = [], CachedLM.__init__, Watched()

    class Stream:
        def wait_stream(self, _):
            pass

    def graph(graph, pool, stream):
        pools.append(pool)
        return graph

    def set_sync_debug_mode(mode):
        (watch.__enter__ if mode == "error" else lambda: watch.__exit__(None, None, None))()

    def capturing(self, model, capacity, vocab=None, static=True):
        init(self, model, capacity, vocab, static)
        self.graphs = {}
    monkeypatch.setattr(CachedLM, "__init__", capturing)
    for name, fake in dict(device=lambda _: contextlib.nullcontext(), stream=lambda _: contextlib.nullcontext(), Stream=Stream, current_stream=Stream,
                           CUDAGraph=Graph, graph=graph, get_sync_debug_mode=lambda: 0, set_sync_debug_mode=set_sync_debug_mode).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    return pools


def test_captured_passes_are_replayed(captured, family):
    """Everything that changes from pass to pass goes through the graph's own inputs: replays give what fresh passes do."""
    model, prompt = tiny(family), [5, 9, 3, 14, 7]
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT, static=False), prompt), 60)
    target, draft = CachedLM(model, CONTEXT), CachedLM(near(model, 0.02), CONTEXT)
    del captured[:]  # those of the check on loading
    for _ in range(2):
        assert tokens_of(speculative(target, draft, prompt, gamma=5), 60) == expected
    assert {shape[1] for shape, made in target.graphs.items() if made} == {8, 16} and 1 in {shape[1] for shape in draft.graphs}
    assert sum(made[0].replays for made in target.graphs.values()) == target.calls - 2  # the first of each width was not captured
    assert captured.count(None) == 2 and set(captured) == {None, "pool"}  # one pool a model
    assert target.capturing > 0


def test_capturing_is_not_counted_as_decoding(captured, monkeypatch):
    hours, clock, graph = [], time.perf_counter, torch.cuda.graph
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * len(hours))
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: (hours.append(1), graph(*args, **options))[1])  # an hour each
    lm = CachedLM(tiny("llama"), CONTEXT)
    run, started = Run(autoregressive, {"target": lm}, {}), len(hours)
    for _ in range(2):
        for _ in run.chunks([5, 9, 3], 5, set(), greedy):
            pass
    assert len(hours) == started + 2 and 7200 < run.capturing < 7260  # for 4 rows and for 1
    assert 0 < lm.seconds < run.seconds < 60 and "2 CUDA graphs captured in 72" in run.figures()


def test_a_pass_that_waits_is_not_captured(captured):
    """Dynamic rotary embeddings look at the largest position: such a model runs as it is, and says so."""
    rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    model = tiny("llama", rope_parameters=rope)
    lm = CachedLM(model, CONTEXT)
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT, static=False), [5, 9, 3]), 30)
    with pytest.warns(UserWarning, match="LlamaForCausalLM runs without CUDA graphs: called a synchronizing operation") as seen:
        assert tokens_of(autoregressive(lm, [5, 9, 3]), 30) == expected
    assert len(seen) == 1 and not lm.static and not any(lm.graphs.values())


@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_captured_trees(captured, family):
    test_common.test_forward_over_random_trees_equals_each_path_alone(family)


def test_captured_embeddings_and_prefix_rows(captured, monkeypatch):
    """Also the graphs stay when the same number of prefix rows is set again, as for every prompt."""
    test_common.test_prefix_rows_are_seen_only_by_the_nodes_that_ask("llama")
    del captured[:]
    test_bita.test_greedy_equals_autoregressive("llama")
    made = len(captured)
    test_bita.test_greedy_equals_autoregressive("llama")
    assert len(captured) == 2 * made
    model, tuning = tiny("llama"), None
    tuning = test_bita.random_tuning(model)
    lm = CachedLM(model, CONTEXT)
    del captured[:]
    counts = []
    for _ in range(4):
        tokens_of(bita(lm, [5, 9, 3], tuning=tuning), 40)
        counts.append(len(captured))
    assert 0 < counts[1] == counts[2] == counts[3]


def test_new_buffers_need_new_graphs(captured):
    """A wider tree than before takes a larger buffer: what was captured over the old one is dropped."""
    model, plain = tiny("llama"), CachedLM(tiny("llama"), CONTEXT, static=False)
    lm = CachedLM(model, CONTEXT)
    for width in (1, 40, 2):
        for each in (lm, plain):
            each.start([5, 9, 3], width=width)
        for _ in range(3):
            torch.testing.assert_close(lm.forward([7]), plain.forward([7]), atol=1e-4, rtol=1e-4)
            for each in (lm, plain):
                each.commit([0])
    made = [made for made in lm.graphs.values() if made]
    assert made and all(own[2].shape[3] == lm.cache.slots for _, own, _ in made)


@torch.inference_mode()
def test_an_infinity_does_not_outlive_its_prompt():
    lm, plain = (CachedLM(tiny("llama"), CONTEXT, static=static) for static in (True, False))
    lm.prefill([5, 9, 3])
    for pair in lm.cache.layers.values():
        pair[1][:, :, 20] = torch.inf
    torch.testing.assert_close(lm.prefill([5, 9, 3]), plain.prefill([5, 9, 3]), atol=1e-4, rtol=1e-4)


def test_command_line(capfd):
    import speculative as module
    from common import main
    out = []
    for switch in ("--static", "--no-static"):
        assert main([module.speculative], argv=["--device", "cpu", "--compare", "--max-new-tokens", "30", switch]) == 0
        captured = capfd.readouterr()
        assert "output equals autoregressive output" in captured.err
        out.append(captured.out)
    assert out[0] == out[1]
