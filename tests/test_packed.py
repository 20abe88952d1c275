"""Packed weights (support/packed.py): a model computes the same, and is trained, copied and saved
as before."""
import pickle
from copy import deepcopy

import torch
from torch.nn import Linear

from common import CachedLM, autoregressive
from families import near, tiny
from helpers import tokens_of
from speculative import speculative
from support import packed
from support.engine import check
from support.layers import share_weights
from support.packed import PackedLinear, pack
from support.parts import match_type


def layer(out: int = 520) -> Linear:
    torch.manual_seed(0)
    return Linear(512, out)


@torch.inference_mode()
def same(ours: Linear, theirs: Linear) -> bool:
    """Tell whether two layers compute the same for passes of any number of rows."""
    shapes = [(512,), (0, 512), (1, 512), (1, 3, 512), (2, 8, 512), (300, 512)]
    return all(torch.allclose(ours(x), theirs(x), atol=1e-5) for x in map(torch.randn, shapes))


def test_a_packed_layer_computes_the_same():
    assert type(pack(layer())) is PackedLinear and same(pack(layer()), layer())
    assert type(pack(layer(3))) is Linear and type(pack(layer().bfloat16())) is Linear


def test_a_packed_layer_is_trained_as_any_other():
    """Gradients are those of a plain layer. Weights that have changed are packed anew."""
    ours, theirs = pack(layer()), layer()
    for _ in range(2):
        for one in ours, theirs:
            one(torch.ones(2, 512)).square().sum().backward()
            torch.optim.SGD(one.parameters(), 1e-3).step()
        assert same(ours, theirs)
    ours.weight.data = layer().weight.data  # as of Module.to
    assert not same(ours, theirs)


def test_copies_are_packed_by_themselves_and_no_blocks_stay():
    before = len(packed.BLOCKS)
    ours = pack(layer())
    other = deepcopy(ours)
    with torch.no_grad():
        other.weight.mul_(2)
    assert same(ours, layer()) and not same(other, ours)
    assert same(pickle.loads(pickle.dumps(ours)), ours)
    del ours, other
    assert len(packed.BLOCKS) == before


def test_what_cannot_be_packed_is_left_alone():
    """Such are weights of inference mode, passes under autocast, and models in half precision."""
    with torch.inference_mode():
        assert type(pack(Linear(512, 520))) is Linear
        ours, x = pack(layer().requires_grad_(False)), torch.ones(2, 512)
        with torch.autocast("cpu", torch.bfloat16):
            assert ours(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(pack(layer()).bfloat16()(x.bfloat16()), layer().bfloat16()(x.bfloat16()))


def test_a_packed_model_decodes_as_before(monkeypatch):
    """A view of the model has the model's blocks and none of its own."""
    monkeypatch.setattr(packed, "LEAST", 0)
    plain = tiny("llama")
    ours = check(pack(deepcopy(plain)))
    assert {type(x) for x in ours.modules() if isinstance(x, Linear)} == {PackedLinear}
    view = share_weights(ours)
    # Heads are packed if their model is.
    assert [type(match_type(layer(), x)) for x in (plain, ours)] == [Linear, PackedLinear]
    expected = tokens_of(autoregressive(CachedLM(plain), [5, 6, 7]), 40)
    for model in ours, view:
        chunks = speculative(CachedLM(model), CachedLM(pack(near(plain, 0.03))), [5, 6, 7])
        assert tokens_of(chunks, 40) == expected
    heads = [packed.BLOCKS[model.get_output_embeddings().weight] for model in (ours, view)]
    assert heads[0] is heads[1]
