"""Some layers of a model are used as a smaller model, or as views, which share the model's weights.
The oracle of the smaller model is the model itself, with its other layers made to pass their input
on. A view may have changes of low rank: nothing at first, W + B A afterwards, and the same when
they are merged."""
import copy

import pytest
import torch

from families import FAMILIES, LAYERED, MORE_FAMILIES, SCALED, deep, tiny
from helpers import check_refused
from support.engine import EngineLM, depth_of, list_layers
from support.layers import pass_on, split_layers, take_layers
from training.low_rank import add_low_rank, list_changed, prepare_changes, share_weights


# ------------------------------------------------------------------------------ a smaller model

IDS = torch.tensor([[7, 3, 50, 12, 3, 44, 9, 30, 31, 5, 8, 27, 2, 19, 40, 11, 6, 23, 55, 14]])


def check_small(model, numbers: list[int]) -> None:
    """Compare a model of some layers with the whole model, whose other layers pass their input on.
    The logits are those after 20 tokens, more than any window."""
    oracle, small = copy.deepcopy(model), take_layers(model, numbers)
    for i, layer in enumerate(list_layers(oracle)):
        if i not in numbers:
            layer.register_forward_hook(pass_on, with_kwargs=True)
    ours, theirs = (x(input_ids=IDS, use_cache=False).logits for x in (small, oracle))
    assert (ours - theirs).abs().mean() < 1e-4 * theirs.abs().mean(), numbers
    assert len(list_layers(small)) == len(numbers) and not hasattr(small.config, "vision_config")


@pytest.mark.parametrize("name, changes", [
    *((name, {}) for name in [*FAMILIES, *MORE_FAMILIES, *SCALED, *LAYERED]),
    ("qwen3-moe", {"mlp_only_layers": [0, 2]}), ("opt", {"word_embed_proj_dim": 16})])
def test_layers_are_those_that_were_asked_for(name, changes):
    """A model that reads images gives a model of text."""
    model = tiny(name) if name in LAYERED else deep(name, **changes)
    assert depth_of(model) == len(list_layers(model)) == 4
    for numbers in [0], [1, 2]:
        check_small(model, numbers)


def test_layers_of_a_family_that_lists_those_with_keys():
    """Bamba gives the numbers of its layers with keys, which change with those of the layers."""
    model = tiny("bamba", num_hidden_layers=4, attn_layer_indices=[1, 3])
    check_small(model, [3])
    split_layers(EngineLM(model), 3)  # it checks that early and late layers are the whole


def test_layers_that_no_configuration_makes_are_refused():
    """Every second layer has experts, and a configuration has only one step."""
    check_refused("layers .1. can be a model, got 'Qwen3MoeForCausalLM': .*Missing key",
                  take_layers, tiny("qwen3-moe", decoder_sparse_step=2), [1])


# ---------------------------------------------------------------------------------------- views

# That early and late layers are the whole is in test_lossless.py, in the lines of early_exit.
@pytest.mark.parametrize("name, E, said", [
    ("gpt2", 1, "early and late layers make the whole, got .*: off by"),
    ("zamba2", 1, "can be split after any layer, got .*: it has no 0"),
    ("mamba2", 1, "can be split after any layer, got .*: 'Sequential'"),
    ("llama", 0, "--E must be 1 to 1 for .* 2 layers, got 0"),
    ("llama", 2, "--E must be 1 to 1 for .* 2 layers, got 2")])
def test_models_that_cannot_be_split_are_refused(name, E, said):
    check_refused(said, split_layers, EngineLM(tiny(name)), E)


# ----------------------------------------------------------------------------- changes of low rank

def test_training_keeps_no_matrix_of_the_models_size():
    """Backward passes of a model of 8B would else keep 14 GB of changed weights."""
    model, kept = deep("llama", hidden_size=128), []
    add_low_rank(model.requires_grad_(False), 2)
    frozen = {p.data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        model(input_ids=torch.tensor([[3, 14, 15]])).logits.sum()
    assert max(x.numel() for x in kept if x.data_ptr() not in frozen) < 1000


def test_models_without_linear_layers_are_refused():
    check_refused("matrices of type Linear in GPT2LMHeadModel", add_low_rank, tiny("gpt2"), 2)


@pytest.mark.parametrize("most, merged", [(0, False), (2 ** 32, True)])
def test_a_tuned_model_shares_the_weights_of_one_that_stays_as_it_is(most, merged, monkeypatch):
    """Changes are nothing at first. Small ones are merged into new matrices in the end, and large
    ones stay branches."""
    monkeypatch.setattr("training.low_rank.MERGED", most)
    model, ids = deep("llama"), torch.tensor([[3, 14, 15]])
    expected, own = model(input_ids=ids).logits, {p.data_ptr() for p in model.parameters()}
    tuned = share_weights(model)
    assert {p.data_ptr() for p in tuned.parameters()} == own
    changes = add_low_rank(tuned, 2)
    torch.testing.assert_close(tuned(input_ids=ids).logits, expected)
    for p in changes.values():
        p.data = 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p)))
    changed = tuned(input_ids=ids).logits
    assert prepare_changes(tuned) is tuned and bool(list_changed(tuned)) != merged
    torch.testing.assert_close(tuned(input_ids=ids).logits, changed, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=0, rtol=0)
    assert not torch.allclose(changed, expected)
    shared = sum(p.data_ptr() in own for p in tuned.parameters())
    assert shared == len(own) - (4 * 7 if merged else 0)
    assert not any(p.requires_grad for p in tuned.parameters())
