"""Passes of few shapes over whole buffers (cli/graphs.py): as they are on a CPU, and captured. The
simulated GPU of fake_cuda.py captures them, and so does CUDA where there is a GPU. Every method
decodes with them in test_lossless.py."""
import collections
import gc
import random

import pytest
import torch

from bita import bita
from cli import graphs
from cli.graphs import GraphedLM
from cli.run import TimedLM
from common import InputError, autoregressive, check
from survey.clock import WIDTHS
from fake_cuda import FakeCuda
from families import few_families, near, tiny
from helpers import prefill, tokens_of
from speculative import speculative
from test_common import CLOSE, alone, check_trees
from test_lossless import tuning_of

PROMPT = [5, 9, 3, 14, 7] * 24


def both(model) -> tuple[GraphedLM, TimedLM]:
    return GraphedLM(model), TimedLM(model)


# -------------------------------------------------------------------------------- not captured

def test_shapes_are_few():
    """A pass of up to 128 rows has a width of the list and all slots; a wider one has its own, and
    is not captured. What fills a pass up is not counted."""
    model, rng, seen = tiny("llama", max_position_embeddings=900), random.Random(0), []
    model.register_forward_pre_hook(
        lambda _, args, options: seen.append(tuple(options["attention_mask"].shape[2:])),
        with_kwargs=True)
    lm = GraphedLM(model)
    lm.start([5] * 300)
    assert seen == [(128, 256), (128, 640), (64, 640)]  # twice 128; 3 x 128 and 256 more
    lm.forward([5] * 140)
    del seen[:]
    widths = (1, 2, 3, 5, 8, 9, 31, 64, 100, 128, 129)
    for n in widths:
        lm.truncate(250)
        assert len(lm.forward([rng.randrange(60) for _ in range(n)])) == n
    assert [rows for rows, _ in seen] == [1, 2, 4, 8, 8, 16, 32, 64, 128, 128, 129]
    assert {slots for _, slots in seen} == {lm.cache.slots} == {640}
    assert lm.rows == sum(widths) + 140 and lm.calls == len(widths) + 1
    assert {shape[1] for *_, shape in lm.captured} <= set(WIDTHS)


@pytest.mark.parametrize("part, value", [("k_proj", torch.inf), ("v_proj", torch.nan)])
@pytest.mark.parametrize("n", [3, 130])
def test_an_infinity_reaches_nothing(part, value, n):
    """Unseen rows are multiplied by 0, so one that is not finite would make all others nan: in the
    pass that writes it the nodes beside it, then all that follows, and the next prompt."""
    model = tiny("llama")
    lms = both(model)

    def run_broken(row: int, act):
        """Run a pass in whose first layer the keys or values of a row overflow."""
        layer = getattr(model.model.layers[0].self_attn, part)
        with layer.register_forward_hook(lambda _, args, out: out.index_fill(
                1, torch.tensor([row]), value)):
            return act()
    ids, parents = [7, 8, 9] + [6] * (n - 3), [-1, 0, 0] + [2] * (n - 3)
    for lm in lms:
        lm.start([5, 9, 3])
    ours = run_broken(1, lambda: lms[0].forward(ids, parents))
    torch.testing.assert_close(ours[[0, 2]], lms[1].forward(ids, parents)[[0, 2]], **CLOSE)
    for lm in lms:
        lm.commit([0, 2])
    torch.testing.assert_close(*(lm.forward([2, 6, 1]) for lm in lms), **CLOSE)
    lms[0].truncate(0)
    run_broken(n - 1, lambda: lms[0].forward([5] * n))
    torch.testing.assert_close(prefill(lms[0], [5, 9, 3]), alone(model, [5, 9, 3])[0], **CLOSE)


# ------------------------------------------------------------------------------------ captured

@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.cuda)])
def gpu(request, monkeypatch):
    """Use a GPU, a simulated one or one that is there; count the graphs and their replays."""
    counts, capture = collections.Counter(), graphs.capture

    def counting(function, inputs):
        graph = capture(function, inputs)
        counts["graphs"] += 1

        def replay(*inputs):
            counts["replays"] += 1
            return graph(*inputs)
        return replay
    monkeypatch.setattr(graphs, "capture", counting)
    if request.param == "simulated":
        with FakeCuda():
            yield counts
    else:  # a capture that fails can leave its stream current
        with torch.cuda.stream(torch.cuda.current_stream()):
            yield counts


def on_gpu(family: str, run_as=GraphedLM, **changes):
    return check(tiny(family, **changes).to("cuda"), run_as)


def check_replayed(method, lms: list[GraphedLM], gpu, **options) -> None:
    """Check the text of a method against AR's. When the buffers have grown and all shapes were met,
    each pass is a replay: Python runs no model, and captures nothing."""
    def decode() -> list[int]:
        return tokens_of(method(*lms, PROMPT, **options), 8)
    expected, ran = tokens_of(autoregressive(TimedLM(lms[0].model), PROMPT), 8), []
    assert decode() == decode() == expected
    for lm in lms:
        lm.model.register_forward_pre_hook(
            lambda _, args, given: ran.append(given.get("past_key_values")), with_kwargs=True)
        lm.calls = 0
    before = gpu.copy()
    assert decode() == expected
    assert not {lm.cache for lm in lms} & {*ran} and gpu["graphs"] == before["graphs"]
    prompts = len(lms)  # of fewer than 128 rows: a pass each
    assert gpu["replays"] - before["replays"] == sum(lm.calls for lm in lms) + prompts


@few_families
def test_families_can_be_captured(family, gpu):
    model = on_gpu(family)
    check_replayed(speculative, [GraphedLM(model), GraphedLM(near(model, 0.01))], gpu)


def test_captured_embeddings_and_prefix_rows(gpu):
    """The graphs stay when as many prefix rows are given again, as for every prompt."""
    model = on_gpu("gpt2")
    lm = GraphedLM(model)
    for _ in range(2):
        check_replayed(bita, [lm], gpu, tree="full", k=2, tuning=tuning_of(model, 4, 3))
    assert {len(shape) for *_, shape in lm.captured} == {2, 3} and lm.prefix == 4


def test_captured_random_trees_equal_their_paths(gpu):
    check_trees(on_gpu("qwen2-window"), GraphedLM)
    assert gpu["replays"] > 2 * gpu["graphs"] > 6


def test_new_buffers_need_new_captures(gpu):
    """Longer texts take larger buffers and drop what was captured; shorter ones keep both."""
    lms, captured = both(on_gpu("llama")), []
    for length in 3, 100, 40:
        for lm in lms:
            lm.start([5, 9, 3, 7] * (length // 4) + [8])
        torch.testing.assert_close(*(lm.forward([7, 8, 9]) for lm in lms), **CLOSE)
        captured.append(dict(lms[0].captured))
    short, long, again = captured
    assert not {*short.values()} & {*long.values()} and long.items() <= again.items()


def test_no_graph_is_freed_while_another_is_captured(gpu):
    """CUDA breaks off the capture. Garbage would be collected at any moment, with old graphs."""
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(3):
            lm = GraphedLM(on_gpu("llama"))
            lm.start([5, 9, 3])
            lm.forward([6] * 8)
            lm.itself = lm  # only the garbage collector frees it
    finally:
        gc.set_threshold(*threshold)


def test_logits_are_not_overwritten(gpu):
    """The next replay overwrites what the last one gave: `forward` hands out a copy."""
    lm = GraphedLM(on_gpu("llama"))
    lm.start([5, 9, 3])
    lm.forward([6] * 8)  # the buffers grow
    lm.truncate(3)
    first = lm.forward([7])
    before = first.clone()
    second = lm.forward([8])
    assert torch.equal(first, before) and not torch.equal(first, second)


# ------------------------------------------------------------------------ the check on loading

def bake_in(model) -> None:
    """Positions are counted from a number that the cache told Python, in a graph the first one."""
    def shift(_, args, options):
        positions, cache = options.get("position_ids"), options.get("past_key_values")
        if positions is not None:
            options["position_ids"] = positions - positions[:, :1] + cache.get_seq_length()
        return args, options
    model.register_forward_pre_hook(shift, with_kwargs=True)


def wait(model) -> None:
    """Python asks for a number that a pass computed."""
    model.model.layers[0].register_forward_pre_hook(lambda _, args: args[0].max().item() and None)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_baked_in_at_capture_is_refused(name, gpu):
    """The check compares what a replay gives, not what the pass gave that was captured. What is not
    captured may be baked in."""
    model = tiny(name)
    bake_in(model)
    check(model, GraphedLM)
    check(model.to("cuda"), TimedLM)
    with pytest.raises(InputError, match="token trees equal their paths"):
        check(model, GraphedLM)


DYNAMIC = dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0))


@pytest.mark.parametrize("changes", [{}, DYNAMIC], ids=["waiting", "dynamic"])
def test_a_pass_that_waits_is_refused(changes, gpu):
    """It cannot be captured. Dynamic rotary embeddings look at the largest position."""
    model = on_gpu("llama", TimedLM, **changes)
    if not changes:
        wait(model)
    with pytest.raises(InputError, match="a pass that can be captured") as no:
        check(model, GraphedLM)
    assert "\n" not in str(no.value)
