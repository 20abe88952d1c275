"""Passes of few shapes over whole buffers (cli/graphs.py): as they are, as on a CPU; captured by a
stand-in for CUDA graphs; and captured by CUDA where there is a GPU."""
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bita import Tuning, bita, shape_of
from cli import graphs
from cli.graphs import GraphedLM, capture
from cllm import cllm
from common import WIDTHS, CachedLM, InputError, autoregressive, load, prepare
from families import CONTEXT, near, tiny
from helpers import ROOT, main, prefill, tokens_of
from jacobi import jacobi, lookahead
from mjsd import mjgd, mjsd
from ouroboros import ouroboros
from speculative import report, speculative
from survey.lossy import bild
from survey.several_drafts import specinfer, spectr
from test_common import CLOSE, alone, buffers_of, check_trees

PROMPT = [5, 9, 3, 14, 7] * 24
LONGER = [*PROMPT, *PROMPT[:15]]  # too long for a pass of few widths


def random_tuning(model, design: str = "deep", M: int = 3, seed: int = 0) -> Tuning:
    """Far from zero, so that a real token that saw any of it would notice."""
    tuning, rng = Tuning(shape_of(model), design, 4, M), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in tuning.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    return tuning.to(model.device)


# -------------------------------------------------------------------------------- not captured

METHODS = {  # (method, options): greedy output is the target's
    "autoregressive": (autoregressive, {}),
    "speculative": (speculative, dict(gamma=5)),
    "specinfer": (specinfer, dict(gamma=3, K=3)),
    "spectr": (spectr, dict(gamma=3, K=2)),
    "bild, rollback": (bild, dict(rollback=0.0, fallback=0.1)),
    "bild, fallback": (bild, dict(fallback=1.1)),
    "jacobi": (jacobi, dict(n=8)),
    "lookahead": (lookahead, dict(W=5, N=4, G=3)),
    "cllm": (cllm, dict(n=16)),
    "bita, efficient": (bita, dict(tree="efficient", k=3)),
    "bita, full": (bita, dict(tree="full", k=2)),
    "bita, chain": (bita, dict(tree="chain")),
    "ouroboros": (ouroboros, dict(W=3, beta=4)),
    "mjgd": (mjgd, dict(K=1)),
    "mjsd": (mjsd, dict(tau=1.0, width=2)),
}
WITH_DRAFT = (speculative, specinfer, spectr, bild, ouroboros, mjsd)


def decoded(name: str, target: CachedLM, draft: CachedLM, prompt: list[int], n: int) -> list[int]:
    method, options = METHODS[name]
    if method is bita:
        options = options | dict(tuning=random_tuning(target.model))
    models = [target, draft] if method in WITH_DRAFT else [target]
    return tokens_of(method(*models, prompt, **options), n)


@pytest.mark.parametrize("name", ["gpt2", "qwen2-window", "gemma3"])
def test_every_method_equals_autoregressive(name):
    """Up to the end of the context: there the passes that are filled up reach furthest beyond."""
    model, left = tiny(name, run_as=GraphedLM), CONTEXT - len(LONGER)
    draft = near(model, 0.02)
    expected = tokens_of(autoregressive(CachedLM(model), LONGER), left)
    for method in METHODS:
        output = decoded(method, GraphedLM(model), GraphedLM(draft), LONGER, left)
        assert output == expected, method


def shapes_of(model) -> list[tuple[int, int]]:
    """(rows, slots) of the passes from now on."""
    seen = []
    model.register_forward_pre_hook(
        lambda _, args, options: seen.append(tuple(options["attention_mask"].shape[2:])),
        with_kwargs=True)
    return seen


def test_shapes_are_few():
    """A pass of up to 128 rows has a width of the list and all slots; a wider one has its own, and
    is not captured. What fills a pass up is not counted."""
    model, rng = tiny("llama", max_position_embeddings=900), random.Random(0)
    lm, seen = GraphedLM(model), shapes_of(model)
    lm.start([5] * 300)
    assert [rows for rows, _ in seen] == [128, 128, 64]
    assert [slots for _, slots in seen] == [256, 640, 640]  # twice 128; 3 x 128 and 256 more
    lm.forward([5] * 140)
    del seen[:]
    widths = (1, 2, 3, 5, 8, 9, 31, 64, 100, 128, 129)
    for n in widths:
        lm.truncate(250)
        assert len(lm.forward([rng.randrange(60) for _ in range(n)])) == n
    assert [rows for rows, _ in seen] == [1, 2, 4, 8, 8, 16, 32, 64, 128, 128, 129]
    assert {slots for _, slots in seen} == {lm.cache.slots} == {640}
    assert lm.rows == sum(widths) + 140 and lm.calls == len(widths) + 1
    assert {shape[1] for shape in lm.captured} <= set(WIDTHS)
    plain = CachedLM(model)
    del seen[:]
    plain.start([5] * 30)
    plain.forward([1, 2, 3])
    assert seen == [(30, 30), (3, 33)]


@torch.inference_mode()
def test_padding_reaches_nothing():
    """What a pass leaves behind the pending tree is never seen: garbage there changes no logit."""
    model = tiny("llama")
    lm, plain = GraphedLM(model), CachedLM(model)
    for each in (lm, plain):
        each.start([3, 14, 15])
        each.forward([9])
        each.commit([0])
    for buffer in buffers_of(lm):
        buffer[:, :, lm.length:] = 1e4
    ids, parents = [2, 6, 5], [-1, 0, 0]
    torch.testing.assert_close(lm.forward(ids, parents), plain.forward(ids, parents), **CLOSE)


@pytest.mark.parametrize("n", [1, 33, 65, 127])
def test_the_last_slots(n):
    """Trees that need larger buffers, or just do not: what fills the pass up has slots, too."""
    model = tiny("llama", max_position_embeddings=900)
    lm, plain = GraphedLM(model), CachedLM(model)
    for length in range(20, 24):
        for each in (lm, plain):
            each.start([*range(length)])
        ids, parents = [i % 50 for i in range(n)], [-1] + [i // 2 for i in range(n - 1)]
        torch.testing.assert_close(lm.forward(ids, parents), plain.forward(ids, parents), **CLOSE)
        for ours, theirs in zip(buffers_of(lm), buffers_of(plain)):
            end = length + n
            torch.testing.assert_close(ours[:, :, :end], theirs[:, :, :end], **CLOSE)


# ---------------------------------------------------------------------------------- infinities

def overflow(model, part: str, row: int, value: float):
    """From now on the keys or values of this row of a pass are `value`, in the first layer."""
    def spoil(_, args, out):
        if out.shape[1] <= row:
            return out
        out = out.clone()
        out[:, row].fill_(value)
        return out
    return getattr(model.model.layers[0].self_attn, part).register_forward_hook(spoil)


VALUES = pytest.mark.parametrize("part, value", [("k_proj", torch.inf), ("v_proj", -torch.inf),
                                                 ("v_proj", torch.nan)])


@VALUES
@pytest.mark.parametrize("n", [3, 130])
def test_an_infinity_of_a_rejected_node_reaches_nothing(n, part, value):
    """Unseen rows are multiplied by 0, so one that is not finite would make all others nan: in the
    pass that writes it the nodes beside it, and then all that follows."""
    model = tiny("llama")
    lm, plain = GraphedLM(model), CachedLM(model)
    for each in (lm, plain):
        each.start([5, 9, 3])
    ids, parents = [7, 8, 9] + [6] * (n - 3), [-1, 0, 0] + [2] * (n - 3)
    hook = overflow(model, part, 1, value)
    logits = lm.forward(ids, parents)
    hook.remove()
    expected = plain.forward(ids, parents)
    torch.testing.assert_close(logits[[0, 2]], expected[[0, 2]], **CLOSE)
    plain.truncate(3)
    plain.forward([7, 9])
    for each, path in ((lm, [0, 2]), (plain, [0, 1])):
        each.commit(path)
    for ids in ([4], [2, 6, 1]):
        torch.testing.assert_close(lm.forward(ids), plain.forward(ids), **CLOSE)


@VALUES
@pytest.mark.parametrize("n", [40, 150])
def test_an_infinity_does_not_outlive_its_prompt(n, part, value):
    model = tiny("llama")
    lm, expected = GraphedLM(model), alone(model, [5, 9, 3])
    hook = overflow(model, part, n - 10, value)
    lm.start([5] * n)
    hook.remove()
    torch.testing.assert_close(prefill(lm, [5, 9, 3]), expected, **CLOSE)


# ------------------------------------------------------------------------------------ captured

WAITING = {"aten::" + name for name in ("item", "is_nonzero", "_local_scalar_dense", "nonzero",
                                        "equal", "masked_select", "lift_fresh")}


class Tape(TorchDispatchMode):
    """Stands in for a CUDA graph: records every operation of a pass and, when it is called, does
    the same ones on the same memory. As CUDA it raises a RuntimeError at what would have to wait
    for the GPU, or to copy to it what a list holds."""

    def __init__(self, function, inputs):
        super().__init__()
        self.inputs, self.steps, self.replays = inputs, [], 0
        function(*inputs)  # warm-up, in which buffers are made
        with self:
            self.out = function(*inputs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        chosen = name in ("aten::index", "aten::index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1])
        if name in WAITING or chosen:
            raise RuntimeError(f"called a synchronizing operation: {func}")
        out = func(*args, **kwargs or {})
        self.steps.append((func, args, kwargs or {}, out))
        return out

    def __call__(self, *inputs):
        for own, new in zip(self.inputs, inputs):
            own.copy_(new)
        for func, args, kwargs, out in self.steps:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self.replays += 1
        return self.out


@pytest.fixture
def tapes(monkeypatch) -> list[Tape]:
    """Passes are captured by tapes: those made so far."""
    made = []
    monkeypatch.setattr(graphs, "capture",
                        lambda function, inputs: made.append(Tape(function, inputs)) or made[-1])
    return made


def check_captured(method: str, model) -> tuple[CachedLM, CachedLM]:
    """AR's output; then, when the buffers have grown and all shapes were met, again, and every pass
    is a captured one: Python does not run the models. Target and draft, after all of it."""
    expected = tokens_of(autoregressive(CachedLM(model), PROMPT), 30)
    target, draft = GraphedLM(model), GraphedLM(near(model, 0.01))
    for _ in range(2):
        assert decoded(method, target, draft, PROMPT, 30) == expected
    captured, ran = [dict(lm.captured) for lm in (target, draft)], []
    for lm in (target, draft):
        lm.model.register_forward_pre_hook(
            lambda _, args, options: ran.append(options.get("past_key_values")), with_kwargs=True)
        lm.calls = 0
    assert decoded(method, target, draft, PROMPT, 30) == expected
    assert not {target.cache, draft.cache} & set(ran)
    assert [lm.captured for lm in (target, draft)] == captured and captured[0]
    return target, draft


@pytest.mark.parametrize("method", ["speculative", "ouroboros"])
def test_captured_methods_equal_autoregressive(method, family, tapes):
    """Everything that changes from pass to pass goes through the inputs of the graphs: replays give
    what fresh passes do. One for each pass of the last run, at least."""
    model = tiny(family, run_as=GraphedLM)
    target, draft = check_captured(method, model)
    for lm in (target, draft):
        assert sum(tape.replays for tape in lm.captured.values()) >= lm.calls + 1
    if method == "speculative":  # the prompt; then 6 rows, or 1 and 2
        assert {shape[1] for shape in target.captured} == {128, 8}
        assert {128, 1} <= {shape[1] for shape in draft.captured} <= {128, 1, 2}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_captured_embeddings_and_prefix_rows(name, tapes):
    """BiTA: also the graphs stay when as many prefix rows are given again, as for every prompt."""
    model = tiny(name, run_as=GraphedLM)
    del tapes[:]
    target, _ = check_captured("bita, full", model)
    assert {len(shape) for shape in target.captured} == {2, 3} and target.prefix == 4
    expected = tokens_of(autoregressive(CachedLM(model), PROMPT), 20)
    made = len(tapes)
    for seed in (1, 2):  # other rows
        tuning = random_tuning(model, seed=seed)
        assert tokens_of(bita(target, PROMPT, tree="full", k=2, tuning=tuning), 20) == expected
    assert len(tapes) == made


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-window"])
def test_captured_trees(name, tapes):
    lm = check_trees(tiny(name, run_as=GraphedLM), run_as=GraphedLM)
    assert sum(tape.replays for tape in lm.captured.values()) > 2 * len(lm.captured) > 6


def check_new_buffers(model) -> CachedLM:
    """Longer texts take larger buffers, shorter ones the same."""
    lm, plain = GraphedLM(model), CachedLM(model)
    for length in (3, 100, 40, 3):
        before = list(lm.captured.values())
        for each in (lm, plain):
            each.start([5, 9, 3, 7] * (length // 4) + [8])
        for token in (7, 8, 9):
            torch.testing.assert_close(lm.forward([token]), plain.forward([token]), **CLOSE)
            for each in (lm, plain):
                each.commit([0])
        kept = [made for made in lm.captured.values() if any(made is old for old in before)]
        assert kept == (before if length == 40 else kept) and bool(kept) == (length < 100
                                                                            and bool(before))
    return lm


def test_new_buffers_need_new_captures(tapes):
    """What was captured over the old is dropped."""
    lm = check_new_buffers(tiny("llama", run_as=GraphedLM))
    assert all(tape.inputs[-1].shape[3] == lm.cache.slots for tape in lm.captured.values())


def check_logits_stay(model) -> None:
    """The next replay overwrites what the last one gave: `forward` hands out a copy."""
    lm = GraphedLM(model)
    lm.start([5, 9, 3])
    lm.forward([6] * 8)  # the buffers grow
    lm.truncate(3)
    first = lm.forward([7])
    before = first.clone()
    second = lm.forward([8])
    assert torch.equal(first, before) and not torch.equal(first, second)


def test_logits_are_not_overwritten(tapes):
    check_logits_stay(tiny("llama", run_as=GraphedLM))


def test_infinities_are_captured_too(tapes):
    """The hook of `overflow` is on the tape of 4 rows; a pass of 1 row is a tape without it."""
    model = tiny("llama", run_as=GraphedLM)
    lm, plain = GraphedLM(model), CachedLM(model)
    for each in (lm, plain):
        each.start([5, 9])
        each.forward([3])
        each.commit([0])
    expected = plain.forward([7, 8, 9], [-1, 0, 0])
    hook = overflow(model, "v_proj", 1, torch.inf)
    for _ in range(2):
        lm.truncate(3)
        logits = lm.forward([7, 8, 9], [-1, 0, 0])
        torch.testing.assert_close(logits[[0, 2]], expected[[0, 2]], **CLOSE)
    hook.remove()
    for each in (lm, plain):
        each.commit([0, 2])
    torch.testing.assert_close(lm.forward([4]), plain.forward([4]), **CLOSE)


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


DYNAMIC = dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_baked_in_at_capture_is_refused(name, tapes):
    """The check compares what a replay gives, not what the pass gave that was captured."""
    model = tiny(name)
    bake_in(model)
    prepare(model)
    assert not tapes
    with pytest.raises(InputError, match="token trees equal their paths"):
        prepare(model, run_as=GraphedLM)


def test_what_is_not_captured_may_be_baked_in():
    model = tiny("llama")
    bake_in(model)
    prepare(model, run_as=GraphedLM)


def test_a_pass_that_waits_is_refused(tapes):
    """It cannot be captured. Dynamic rotary embeddings look at the largest position."""
    model = tiny("llama")
    wait(model)
    for name, changes in ((None, {}), ("llama", DYNAMIC)):
        model = tiny(name, **changes) if name else model
        prepare(model)
        with pytest.raises(InputError, match="got LlamaForCausalLM: called a synchronizing") as no:
            prepare(model, run_as=GraphedLM)
        assert "\n" not in str(no.value)


def test_only_what_is_asked_for_is_captured(tapes):
    model, _ = load(ROOT / "models/draft", "cpu")
    assert not tapes
    prepare(model, GraphedLM)
    assert tapes


def test_command_line(capfd):
    out = []
    for more in ([], ["--graphs"]):
        argv = ["--device", "cpu", "--compare", "--max-new-tokens", "20", "--prompt", "a = [1, 2"]
        assert main([speculative], report, argv + more) == 0
        text = capfd.readouterr()
        assert "output equals autoregressive output" in text.err
        out.append(text.out)
    assert out[0] == out[1]


# --------------------------------------------------------------------------------------- a GPU

def on_gpu(name: str, **changes):
    return prepare(tiny(name, **changes).cuda(), run_as=GraphedLM)


@pytest.mark.cuda
@pytest.mark.parametrize("method", ["speculative", "ouroboros", "bita, full"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-window", "gemma3"])
def test_gpu_methods_equal_autoregressive(name, method, monkeypatch):
    """In float32; every pass of up to 128 rows is captured once, and replayed from then on."""
    model, made = on_gpu(name), []

    def counted(function, inputs):
        made.append(capture(function, inputs))
        return made[-1]
    monkeypatch.setattr(graphs, "capture", counted)
    target, _ = check_captured(method, model)
    assert target.whole_pass not in made and any(x in made for x in target.captured.values())


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-window", "gemma3"])
def test_gpu_trees(name):
    check_trees(on_gpu(name), run_as=GraphedLM)


@pytest.mark.cuda
def test_gpu_new_buffers_need_new_captures():
    check_new_buffers(on_gpu("llama"))


@pytest.mark.cuda
def test_gpu_logits_are_not_overwritten():
    check_logits_stay(on_gpu("llama"))


@pytest.mark.cuda
def test_gpu_embedded_pair():
    target, draft = (prepare(load(ROOT / "models" / name, "cuda", "float32")[0], GraphedLM)
                     for name in ("target", "draft"))
    expected = tokens_of(autoregressive(CachedLM(target), PROMPT), 60)
    lms = [GraphedLM(lm) for lm in (target, draft)]
    assert tokens_of(speculative(*lms, PROMPT), 60) == expected
    assert tokens_of(ouroboros(*lms, PROMPT), 60) == expected


@pytest.mark.cuda
@pytest.mark.parametrize("changes", [None, DYNAMIC])
def test_gpu_a_pass_that_cannot_be_captured_is_refused(changes, monkeypatch):
    """A capture that fails can leave its stream current and its pool in use: here of its own."""
    monkeypatch.setattr(graphs, "graph_memory", torch.cuda.graph_pool_handle)
    model = tiny("llama", **changes or {}).cuda()
    if changes is None:
        wait(model)
    prepare(model)
    with torch.cuda.stream(torch.cuda.current_stream()):
        with pytest.raises(InputError, match="a mask and a cache, got LlamaForCausalLM"):
            prepare(model, run_as=GraphedLM)
