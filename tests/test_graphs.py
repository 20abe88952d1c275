"""Passes of few shapes over whole buffers (support/graphs.py): as they are on a CPU, and captured.
The simulated GPU of fake_cuda.py captures them, and so does CUDA where there is a GPU. It refuses
what CUDA refuses. Every method decodes with them in test_lossless.py."""
import functools
import gc

import pytest
import torch

from bita import bita
from support import graphs
from cli.run import kind_for
from common import InputError, autoregressive
from fake_cuda import FakeCuda
from families import near, tiny
from helpers import CLOSE, check_refused, main, rows_of, tokens_of
from methods import tuning_of
from speculative import report, speculative
from support.engine import EngineLM
from support.graphs import WIDTHS, GraphedLM
from support.loading import check

PROMPT = [5, 9, 3, 14, 7] * 24


# -------------------------------------------------------------------------------- not captured

def test_shapes_are_few():
    """A pass of up to 128 rows has a width of the list and all slots; a wider one has its own, and
    is not captured. Rows that fill a pass up are not counted."""
    model, seen = tiny("llama", max_position_embeddings=900), []
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
        assert len(lm.forward([5] * n)) == n
    assert [rows for rows, _ in seen] == [1, 2, 4, 8, 8, 16, 32, 64, 128, 128, 129]
    assert {slots for _, slots in seen} == {lm.cache.slots} == {640}
    assert rows_of(lm) == sum(widths) + 140 and lm.calls == len(widths) + 1
    assert {shape[1] for *_, shape in lm.captured} <= set(WIDTHS)


@pytest.mark.parametrize("part, value", [("k_proj", torch.inf), ("v_proj", torch.nan)])
def test_an_infinity_reaches_nothing(part, value):
    """Unseen rows are multiplied by 0, so one whose keys or values overflow in the first layer
    would make all others nan. These are the nodes beside it in the pass that writes it, then all
    that follows."""
    model = tiny("llama")
    lms = GraphedLM(model, waits=False), EngineLM(model)
    for lm in lms:
        lm.start([5, 9, 3])
    with getattr(model.model.layers[0].self_attn, part).register_forward_hook(
            lambda _, args, out: out.index_fill(1, torch.tensor([1]), value)):
        ours = lms[0].forward([7, 8, 9], [-1, 0, 0])
    torch.testing.assert_close(ours[[0, 2]], lms[1].forward([7, 8, 9], [-1, 0, 0])[[0, 2]], **CLOSE)
    for lm in lms:
        lm.commit([0, 2])
    torch.testing.assert_close(*(lm.forward([2, 6, 1]) for lm in lms), **CLOSE)


# -------------------------------------------------------------------------- what CUDA refuses

def in_a_capture(function):
    return graphs.capture(function, (torch.arange(3.0, device="cuda"),))


REFUSED = {
    "a sum": lambda here, there: here + there,
    "a table and its index": lambda here, there: here[there.long()],
    "numbers that are put": lambda here, there: there.index_put_((there.long(),), here),
    "a layer": lambda here, there: torch.nn.Linear(3, 3)(there),
    "numpy": lambda here, there: there.numpy(),
    "the CPU's generator": lambda here, there: there.uniform_(generator=torch.Generator()),
    "the GPU's generator": lambda here, there: here.uniform_(generator=torch.Generator("cuda")),
    "an item in a capture": lambda here, there: in_a_capture(lambda x: x * x[0].item()),
    "a list in a capture": lambda here, there: in_a_capture(lambda x: x * x.new_tensor([2.0])),
    "a mask in a capture": lambda here, there: in_a_capture(lambda x: x[x > 1]),
    "a stream": lambda here, there: torch.cuda.current_stream(),
    "a choice of GPUs": lambda here, there: torch.accelerator.set_device_index(0)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses(name):
    with FakeCuda(), pytest.raises((RuntimeError, TypeError, InputError), match="cuda|cpu|captur"):
        REFUSED[name](torch.arange(3.0), torch.arange(3.0, device="cuda"))


# ------------------------------------------------------------------------------------ captured

@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.cuda)])
def gpu(request):
    """Use a GPU, a simulated one or one that is there, where a failed capture leaves its stream."""
    simulated = request.param == "simulated"
    with FakeCuda() if simulated else torch.cuda.stream(torch.cuda.current_stream()):
        yield


def check_replayed(method, lms: list[GraphedLM], **options) -> None:
    """Check the text of a method against AR's. When the buffers have grown and all shapes were met,
    each pass is a replay: Python runs no model."""
    def decode() -> list[int]:
        return tokens_of(method(*lms, PROMPT, **options), 5)
    expected, ran = tokens_of(autoregressive(EngineLM(lms[0].model), PROMPT), 5), []
    assert decode() == decode() == expected
    for lm in lms:
        lm.model.register_forward_pre_hook(
            lambda _, args, given: ran.append(given.get("past_key_values")), with_kwargs=True)
    assert decode() == expected
    assert not {lm.cache for lm in lms} & {*ran}


def test_masks_of_two_kinds_are_captured(gpu):
    model = check(tiny("gemma3").to("cuda"), GraphedLM)
    check_replayed(speculative, [GraphedLM(model), GraphedLM(near(model, 0.01))])


def test_captured_embeddings_and_prefix_rows(gpu):
    """The graphs stay when as many prefix rows are given again, as for every prompt."""
    model = check(tiny("gpt2").to("cuda"), GraphedLM)
    lm = kind_for(bita, GraphedLM)(model)
    for _ in range(2):
        check_replayed(bita, [lm], tree="full", k=2, tuning=tuning_of(model, 4, 3))
    assert {len(shape) for *_, shape in lm.captured} == {2, 3} and lm.prefix == 4


def test_new_buffers_need_new_captures(gpu):
    """Longer texts take larger buffers and drop what was captured; shorter ones keep both. The next
    replay overwrites what the last one gave, so a pass hands out copies."""
    model, captured = check(tiny("llama").to("cuda"), GraphedLM), []
    lms = GraphedLM(model, waits=False), EngineLM(model)
    for length in 3, 100, 40:
        found = []
        for lm in lms:
            lm.start([5, 9, 3, 7] * (length // 4) + [8])
            for ids in [7, 8, 9], [2, 6, 1]:
                found.append((lm.forward(ids), lm.features))
        torch.testing.assert_close(found[:2], found[2:], **CLOSE)
        captured.append(dict(lms[0].captured))
    short, long, again = captured
    assert not {*short.values()} & {*long.values()} and long.items() <= again.items()


def test_no_garbage_is_collected_during_a_capture(gpu):
    """CUDA breaks off a capture if an old graph is freed meanwhile."""
    enabled, given = [], (torch.ones(3, device="cuda"),)
    graphs.capture(lambda x: enabled.append(gc.isenabled()) or x + 1, given)
    assert enabled == [True, False] and gc.isenabled()


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
    """Let Python ask for a number that a pass computed, and so wait for it."""
    model.model.layers[0].register_forward_pre_hook(lambda _, args: args[0].max().item() and None)


@pytest.mark.parametrize("spoil, said", [
    (bake_in, "token trees equal their paths"), (wait, "a pass that can be captured")])
def test_a_pass_that_no_graph_replays_is_refused(spoil, said, gpu):
    """The check compares what a replay gives, not what the pass gave that was captured. What is not
    captured may be baked in, and may wait."""
    model = tiny("llama")
    spoil(model)
    at_once = functools.partial(GraphedLM, waits=False)
    check(model, at_once)
    check(model.to("cuda"), EngineLM)
    check_refused(said, check, model, at_once)


# ---------------------------------------------------------------------------- command lines

@pytest.mark.parametrize("how", [["--no-graphs"], []], ids=["eager", "graphs"])
def test_a_command_line_runs_on_the_simulated_gpu(how, models, capsys):
    """The GPU is the default where there is one. --compare fails if AR writes another text."""
    argv = [*models[:4], "--dtype", "float32", "--compare", "--prompt", "Tom has 3",
            "--max-new-tokens", "5", *how]
    with FakeCuda() as gpu:
        assert main([speculative], report, argv) == 0
    assert gpu.counts["launches"] > 100 and bool(how) == (gpu.counts["replays"] == 0)
    assert "cuda" in capsys.readouterr().err
