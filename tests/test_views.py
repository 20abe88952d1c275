"""Views of a model: early and late layers are the whole model, and share its weights."""
import pytest
import torch

from common import InputError
from families import FAMILIES, MORE_FAMILIES, deep, tiny
from training.layers import FeatureLM, depth_of, move_counts, split_layers, view

PROMPT = [3, 14, 15]
# GPT-2 and OPT add positions before the first layer
WHOLE = [name for name in {**FAMILIES, **MORE_FAMILIES} if name not in ("gpt2", "opt")]


@pytest.mark.parametrize("name", WHOLE)
def test_early_and_late_are_the_whole(name):
    """On a text that is longer than any window."""
    whole, ids = FeatureLM(deep(name)), [i * i % 61 for i in range(20)]
    for E in (1, 3):
        early, late = split_layers(whole, E)
        for lm in (whole, early, late):
            lm.start([])
        expected = whole.forward(ids)
        early.forward(ids)
        found = late.forward(early.features)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(late.features, whole.features, atol=1e-5, rtol=1e-5)


def test_views_share_weights_and_leave_the_model_alone():
    model = deep("gemma3")
    expected = model(input_ids=torch.tensor([PROMPT])).logits
    early, late = view(model, 0, 1), view(model, 1, 4)
    owned = {id(p) for p in model.parameters()}
    assert {id(p) for x in (early, late) for p in x.parameters()} == owned
    assert (depth_of(early), depth_of(late), depth_of(model)) == (1, 3, 4)
    assert late.config.layer_types == model.config.layer_types[1:]
    torch.testing.assert_close(model(input_ids=torch.tensor([PROMPT])).logits, expected)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_models_whose_positions_come_before_the_layers_are_refused(name):
    with pytest.raises(InputError, match="early and late layers make the whole, got .*: off by"):
        split_layers(FeatureLM(tiny(name)), 1)


def test_layers_that_there_are_not_are_refused():
    for E in (0, 2, 7):
        with pytest.raises(InputError, match=f"--E must be 1 to 1 for .* 2 layers, got {E}"):
            split_layers(FeatureLM(tiny("llama")), E)


def test_the_calls_of_a_part_become_those_of_the_whole():
    """Once: what was moved does not count again."""
    whole, part = FeatureLM(tiny("llama")), FeatureLM(tiny("llama"))
    whole.calls, whole.rows, whole.seconds = 3, 40, 2.0
    part.calls, part.rows, part.seconds = 2, 3, 0.5
    for _ in range(2):
        move_counts(part, whole)
        assert (whole.calls, whole.rows, whole.seconds) == (5, 43, 2.5)
        assert (part.calls, part.rows, part.seconds) == (0, 0, 0)
