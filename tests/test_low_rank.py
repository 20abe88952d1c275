"""Changes of low rank: nothing at first, W + B A afterwards, and the same when they are merged."""
import pytest
import torch

from common import InputError
from families import deep, tiny
from training.low_rank import add_low_rank, list_changed, prepare_changes, share_weights


def test_training_keeps_no_matrix_of_the_models_size():
    """Backward passes of a model of 8B would else keep 14 GB of changed weights."""
    model, kept = deep("llama", hidden_size=128), []
    add_low_rank(model.requires_grad_(False), 2)
    frozen = {p.data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        model(input_ids=torch.tensor([[3, 14, 15]])).logits.sum()
    assert max(x.numel() for x in kept if x.data_ptr() not in frozen) < 1000


def test_models_without_linear_layers_are_refused():
    with pytest.raises(InputError, match="matrices of type Linear in GPT2LMHeadModel"):
        add_low_rank(tiny("gpt2"), 2)


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
