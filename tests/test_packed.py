"""Packed weights (support/packed.py): a model computes the same, holds its numbers once, and is
copied, saved, tuned and moved as before."""
import ctypes
import itertools
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Linear

from families import FAMILIES, MORE_FAMILIES, OTHERS, tiny
from helpers import check_refused, note_calls
from support import packed
from support.engine import EngineLM
from support.layers import share_weights, take_layers
from support.packed import Blocks, PackedLinear, is_packed, list_types, pack, plain, unpack
from support.parts import head_for, match_type
from support.released import describe_dflash, fill_layer
from survey.dflash import BlockDraft
from survey.eagle import EagleLayer
from survey.medusa import Heads
from survey.mtp import MTPBlock
from training.low_rank import add_low_rank, merge_changes

TYPES = sorted(list_types(), key=str)
pytestmark = pytest.mark.skipif(not TYPES, reason="nothing is packed on this machine")


def layer(out: int = 520, dtype: torch.dtype = torch.float32) -> Linear:
    torch.manual_seed(0)
    return Linear(512, out).to(dtype)


@torch.inference_mode()
def same(ours: Linear, theirs: Linear) -> bool:
    """Tell whether two layers compute the same for passes of any number of rows."""
    shapes = [(512,), (0, 512), (1, 512), (1, 3, 512), (2, 8, 512), (300, 512)]
    dtype = theirs.weight.dtype
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    error = max(1e-5, 2 * torch.finfo(dtype).eps)
    return all(torch.allclose(ours(x), theirs(x), rtol=0, atol=error) for x in inputs)


@pytest.fixture(autouse=True)
def pays(monkeypatch) -> None:
    """Pack whatever can be packed, as if it were always faster."""
    times = itertools.count(0, -1)
    monkeypatch.setattr(packed, "time_calls", lambda layers: next(times))


@pytest.fixture
def every_weight(monkeypatch) -> None:
    """Let the smallest weights be packed too."""
    monkeypatch.setattr(packed, "LEAST", 0)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_packed_layer_computes_the_same(dtype):
    ours, theirs = pack(layer(dtype=dtype)), layer(dtype=dtype)
    assert type(ours.weight) is Blocks and same(ours, theirs)
    assert torch.equal(plain(ours.weight), theirs.weight)
    assert type(pack(layer(3)).weight) is torch.nn.Parameter
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert ours(torch.ones(2, 512)).dtype == torch.bfloat16


def resident() -> float:
    """Return the MiB of memory that this process has, without what was freed and is kept."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2 ** 20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_are_in_memory_once(dtype):
    """After packing, a model of 128 MiB takes less than 1.15 of its memory."""
    width = 4096 if dtype == torch.float32 else 5792  # 64 MiB a layer
    pack(layer(dtype=dtype))
    before = resident()
    model = torch.nn.Sequential(*(Linear(width, width, False, "meta", dtype) for _ in range(2)))
    model.to_empty(device="cpu").apply(lambda x: [p.data.fill_(1) for p in x.parameters(False)])
    assert resident() - before > 120
    pack(model)
    assert resident() - before < 1.15 * 128


@pytest.mark.parametrize("times", [[3.0, 2.0, 1.0, 1.5], [2.0, 3.0, 1.5, 1.0]])
def test_layers_of_a_size_are_packed_where_it_is_faster(monkeypatch, times):
    """Two sizes: of one the calls take less time with blocks, and of the other more."""
    model = torch.nn.Sequential(layer(), torch.nn.Linear(512, 640), layer())
    known = iter(times)
    monkeypatch.setattr(packed, "time_calls", lambda layers: next(known))
    first = times[1] < times[0]
    assert [x.weight.is_mkldnn for x in pack(model)] == [first, not first, first]
    assert same(model[0], layer())


def test_calls_are_timed(monkeypatch):
    """The least of three times counts, each of calls of one row and of 8."""
    monkeypatch.undo()
    clock, calls = iter([0, 5, 5, 7, 7, 11]), []
    monkeypatch.setattr(packed.time, "perf_counter", lambda: next(clock))
    one = layer()
    one.register_forward_hook(lambda layer, inputs, output: calls.append(len(inputs[0])))
    assert packed.time_calls([one]) == 2 and calls == [1, 8] * 3


def test_calls_have_few_sizes(monkeypatch):
    """oneDNN keeps memory for each number of rows: of 512 there are 36, a quarter larger at most.
    """
    given, sizes = note_calls(monkeypatch, packed, "multiply"), set()
    ours = pack(layer())
    with torch.inference_mode():
        for rows in [*range(1, 65), *range(65, 513, 5), 512]:
            assert ours(torch.ones(1, rows, 512)).shape == (1, rows, 520)
            sizes.add(given[-1][0].numel() // 512)
            assert rows <= max(sizes) <= max(16, 1.25 * rows)
    assert len(sizes) == 36 and {*range(1, 17)} < sizes


def shared(tied: bool = True) -> torch.nn.ModuleDict:
    """Make two layers that share a weight, which may be that of embeddings too."""
    table = torch.nn.Embedding(520, 512, _weight=layer().weight.detach())
    model = torch.nn.ModuleDict({"one": layer(), "two": layer(), "table": table})
    for one in [model["one"], model["two"], *[table] * tied]:
        one.weight = model["one"].weight
    return model


MODELS = {  # what is packed, and whose weight is written to
    "a layer": (lambda: torch.nn.ModuleDict({"one": layer()}), "one"),
    "a layer that shares its weight": (lambda: shared(tied=False), "one"),
    "the head of embeddings": (shared, "two")}
WRITES = {
    "multiply": lambda weight: weight.mul_(2), "a row": lambda weight: weight.__setitem__(3, 1.0),
    "rows": lambda weight: weight[:7].mul_(2), "turned": lambda weight: weight.t().mul_(2),
    "detached": lambda weight: weight.detach().mul_(2), "init": torch.nn.init.ones_,
    "data": lambda weight: weight.data.mul_(2),
    "loaded": lambda weight: weight.copy_(torch.ones(520, 512)),  # as load_state_dict does
    "replaced": lambda weight: setattr(weight, "data", torch.ones(520, 512)),
    "together": lambda weight: torch._foreach_mul_([weight], 2),
    "read": lambda weight: F.linear(torch.ones(2, 512), weight)}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("what", MODELS)
def test_a_write_to_a_packed_weight_fails(what, how):
    """And it has changed nothing. Inference mode has rules of its own for writes."""
    make, place = MODELS[what]
    ours, theirs = pack(make()), make()
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            check_refused("unpack the model first", WRITES[how], ours[place].weight)
        for one in {*ours} - {"table"}:
            assert same(ours[one], theirs[one])
            assert torch.equal(ours.state_dict()[f"{one}.weight"], theirs[one].weight)


@pytest.mark.parametrize("tied", [True, False])
def test_a_shared_weight_stays_one_weight(monkeypatch, tied):
    """A packed model has the numbers of its embeddings twice. A copy of it has ordinary layers,
    can be trained, and has them once."""
    ours = pack(shared(tied))
    assert ours["one"].weight is ours["two"].weight and type(ours["one"].weight) is Blocks
    for other in deepcopy(ours), unpack(pack(shared(tied))):
        weight = other["one"].weight
        assert weight is other["two"].weight and (weight is other["table"].weight) == tied
        assert weight.requires_grad and same(other["one"], layer())
        with torch.no_grad():
            weight.mul_(2)
        assert same(ours["one"], layer()) and not same(other["one"], layer())
        assert isinstance(pack(other)["one"].weight, Blocks)
    monkeypatch.setattr(packed, "time_calls", lambda layers: 0.0)  # it is not faster
    ours = pack(shared(tied))
    assert ours["one"].weight is ours["two"].weight
    assert (ours["one"].weight is ours["table"].weight) == tied


def test_gradients_flow_through_a_packed_layer():
    """A frozen model is packed where a part beside it is trained."""
    ours, theirs = pack(layer().requires_grad_(False)), layer().requires_grad_(False)
    inputs = [torch.ones(2, 512, requires_grad=True) for _ in range(2)]
    for one, x in zip((ours, theirs), inputs):
        one(x).square().sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-5)


class Quantised(torch.Tensor):
    """It is a weight of its own class, as those of torchao and of quanto."""


@pytest.mark.parametrize("change", [
    lambda x: setattr(x, "forward", x.forward),  # so do accelerate's hooks
    lambda x: setattr(x, "weight", torch.nn.Parameter(x.weight.detach().as_subclass(Quantised)))])
def test_other_layers_are_left_as_they_are(change):
    one, x = layer(), torch.ones(2, 512)
    change(one)
    expected = one(x)
    assert type(pack(one)) is Linear and torch.equal(one(x), expected)


@pytest.mark.parametrize("lacks", ["_reorder_linear_weight", "_linear_pointwise", "x86"])
def test_nothing_is_packed_where_oneDNN_cannot(monkeypatch, lacks):
    """As with another torch, whose operations have other names, and on ARM."""
    names = {"_reorder_linear_weight", "_linear_pointwise"} - {lacks}
    monkeypatch.setattr(packed, "OPS", SimpleNamespace(**dict.fromkeys(names)))
    if lacks == "x86":
        monkeypatch.setattr(packed.platform, "machine", lambda: "aarch64")
    assert type(pack(layer())) is Linear


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES, *OTHERS])
def test_a_packed_model_of_any_family_computes_the_same(every_weight, family):
    ids = [5, 6, 7, 8, 9]
    plain_lm, ours = EngineLM(tiny(family)), EngineLM(pack(deepcopy(tiny(family))))
    for lm in plain_lm, ours:
        lm.start(ids[:2])
    parents = [-1, 0, 0]
    assert torch.allclose(ours.forward(ids[2:], parents), plain_lm.forward(ids[2:], parents),
                          atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_parts_read_the_blocks_of_their_model(every_weight, tied):
    """So does a view of the model. A part has the LM head of its model, and moves with its own
    weights alone."""
    model = pack(tiny("llama", tie_word_embeddings=tied))
    blocks = model.lm_head.weight
    assert share_weights(model).lm_head.weight is blocks
    for make in (EagleLayer, MTPBlock, lambda model: Heads(model, "medusa", 2),
                 lambda model: BlockDraft(model, describe_dflash(model, [0, 1], 60, 1, 3, 4))):
        part = match_type(make(model), model)
        assert is_packed(part) and type(blocks) is Blocks and model.lm_head.weight is blocks
        assert any(x is model.lm_head for x in part.modules())
    part = EagleLayer(model)
    fill_layer(part, part.trainable(), part.trainable(), "a released head", model)
    check_refused("unpack the model first", model.double)


def test_what_is_made_of_a_packed_model(every_weight):
    """A head is packed if its model is. One of few tokens has their rows. Layers that are taken are
    the model's, and a merged change of low rank is packed anew."""
    model = tiny("llama")
    ours = pack(deepcopy(model))
    heads = [match_type(layer(), x) for x in (model, ours)]
    assert [type(head) for head in heads] == [Linear, PackedLinear]
    assert torch.equal(head_for(heads[1], torch.tensor([7, 0])).weight, heads[0].weight[[7, 0]])
    taken = [take_layers(x, [1]) for x in (model, ours)]
    for ours_x, x in zip(taken[1].parameters(), taken[0].parameters(), strict=True):
        assert torch.equal(ours_x, x)
    tuned = [share_weights(x).requires_grad_(False) for x in (model, ours)]
    for x in tuned:
        torch.manual_seed(0)
        for change in add_low_rank(x, 2).values():
            change.data.normal_()
        merge_changes(x)
    layers = [x for x in tuned[1].model.layers.modules() if isinstance(x, Linear)]
    assert all(x.weight.is_mkldnn for x in layers)
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        assert torch.allclose(tuned[0](ids).logits, tuned[1](ids).logits, atol=1e-4)


def test_sizes_of_packed_weights(every_weight):
    """transformers asks for them, and so does the bench."""
    plain, model = tiny("llama"), pack(tiny("llama"))
    assert is_packed(model)
    for ask in lambda x: x.nbytes, lambda x: x.itemsize * x.numel(), lambda x: x.is_leaf:
        assert [*map(ask, model.parameters())] == [*map(ask, plain.parameters())]
