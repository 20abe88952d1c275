"""Passes of few shapes over whole buffers (cli/graphs.py): as they are on a CPU, and captured. The
simulated GPU of fake_cuda.py captures them, and so does CUDA where there is a GPU."""
import collections
import gc
import random

import pytest
import torch

import test_lossless as lossless
from bita import Tuning, bita
from cli import graphs
from cli.graphs import GraphedLM
from cli.run import TimedLM
from common import InputError, autoregressive, check
from survey.clock import WIDTHS
from fake_cuda import FakeCuda
from families import near, tiny
from helpers import prefill, tokens_of
from ouroboros import ouroboros
from speculative import speculative
from test_common import CLOSE, alone, check_trees

PROMPT = [5, 9, 3, 14, 7] * 24


def both(model) -> tuple[GraphedLM, TimedLM]:
    return GraphedLM(model), TimedLM(model)


# -------------------------------------------------------------------------------- not captured

@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_every_method_equals_autoregressive(family, monkeypatch):
    """Up to the end of the context: there the passes that are filled up reach furthest beyond."""
    model, prompt, n = lossless.model_of(family), (3, 1, 4) * 10, lossless.END - 30
    lines = {name: line(model) for name, line in lossless.METHODS.items()
             if family not in lossless.REFUSED.get(name, [])}
    expected = {name: lossless.autoregressive_text(line.text_of or model, prompt, n)
                for name, line in lines.items()}
    monkeypatch.setattr(lossless, "TimedLM", GraphedLM)  # of the drafts
    for name, line in lines.items():
        chunks = lossless.chunks_of(line, GraphedLM(model), [*prompt])
        if name == "triforce":  # it reaches into a pass
            with pytest.raises(InputError, match="^--graphs "):
                next(chunks)
        else:
            assert tokens_of(chunks, n) == expected[name], name


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


def overflow(model, part: str, row: int, value: float):
    """From now on the keys or values of this row of a pass are `value`, in the first layer."""
    def spoil(_, args, out):
        if out.shape[1] <= row:
            return out
        out = out.clone()
        out[:, row].fill_(value)
        return out
    return getattr(model.model.layers[0].self_attn, part).register_forward_hook(spoil)


@pytest.mark.parametrize("part, value", [("k_proj", torch.inf), ("v_proj", -torch.inf),
                                         ("v_proj", torch.nan)])
def test_an_infinity_reaches_nothing(part, value):
    """Unseen rows are multiplied by 0, so one that is not finite would make all others nan: in the
    pass that writes it the nodes beside it, then all that follows, and the next prompt."""
    model = tiny("llama")
    for n in 3, 130:
        lm, plain = both(model)
        for each in lm, plain:
            each.start([5, 9, 3])
        ids, parents = [7, 8, 9] + [6] * (n - 3), [-1, 0, 0] + [2] * (n - 3)
        hook = overflow(model, part, 1, value)
        logits = lm.forward(ids, parents)
        hook.remove()
        torch.testing.assert_close(logits[[0, 2]], plain.forward(ids, parents)[[0, 2]], **CLOSE)
        for each in lm, plain:
            each.commit([0, 2])
        for ids in [4], [2, 6, 1]:
            torch.testing.assert_close(lm.forward(ids), plain.forward(ids), **CLOSE)
        hook = overflow(model, part, n - 1, value)
        lm.start([5] * n)
        hook.remove()
        torch.testing.assert_close(prefill(lm, [5, 9, 3]), alone(model, [5, 9, 3]), **CLOSE)


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


def random_tuning(model, seed: int) -> Tuning:
    """Make weights far from zero, so that a real token that saw any of them would notice."""
    torch.manual_seed(seed)
    tuning = Tuning(model, 4, 3)
    for p in tuning.parameters():
        p.data.normal_()
    return tuning.to(model.device)


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


def test_every_family_can_be_captured(family, gpu):
    model = on_gpu(family)
    check_replayed(speculative, [GraphedLM(model), GraphedLM(near(model, 0.01))], gpu)


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_captured_trees_embeddings_and_prefix_rows(name, gpu):
    """The graphs also stay when as many prefix rows are given again, as for every prompt."""
    model = on_gpu(name)
    lms = [GraphedLM(model), GraphedLM(near(model, 0.01))]
    check_replayed(ouroboros, lms, gpu, W=3, beta=4)
    lm = GraphedLM(model)
    check_replayed(bita, [lm], gpu, tree="full", k=2, tuning=random_tuning(model, 0))
    check_replayed(bita, [lm], gpu, tree="full", k=2, tuning=random_tuning(model, 1))
    assert {len(shape) for *_, shape in lm.captured} == {2, 3} and lm.prefix == 4


def test_captured_random_trees_equal_their_paths(gpu):
    check_trees(on_gpu("qwen2-window"), GraphedLM)
    assert gpu["replays"] > 2 * gpu["graphs"] > 6


def test_new_buffers_need_new_captures(gpu):
    """Longer texts take larger buffers and drop what was captured; shorter ones keep both."""
    lms, captured = both(on_gpu("llama")), []
    for length in 3, 100, 40, 3:
        for lm in lms:
            lm.start([5, 9, 3, 7] * (length // 4) + [8])
        for token in 7, 8, 9:
            ours, theirs = (lm.forward([token]) for lm in lms)
            torch.testing.assert_close(ours, theirs, **CLOSE)
            for lm in lms:
                lm.commit([0])
        captured.append(dict(lms[0].captured))
    short, long, same, again = captured
    assert not {*short.values()} & {*long.values()}
    assert long.items() <= same.items() <= again.items()


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
