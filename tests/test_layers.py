"""Some layers of a model are used as a smaller model, or as views, which share the model's weights.
The oracle of the smaller model is the model itself, with its other layers made to pass their input
on."""
import copy

import pytest
import torch
from transformers import (AutoModelForCausalLM, Gemma3Config, OPTConfig, Qwen3MoeConfig,
                          SiglipVisionConfig, SmolLM3Config)

from common import InputError
from families import (CONTEXT, FAMILIES, MOE, MORE_FAMILIES, SCALED, SHAPE, SMALL, SPECIAL, WINDOWS,
                      deep, tiny)
from support.engine import EngineLM, depth_of, list_layers
from support.layers import pass_on, split_layers, take_layers
import train as recipe
from training import loop as training
from trainings import WORDLESS

DEEP = SHAPE | dict(num_hidden_layers=4)
KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
VISION = SiglipVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                            num_attention_heads=2, image_size=8, patch_size=4)
MIXED = {  # four layers of several kinds
    "smollm3": SmolLM3Config(**DEEP, no_rope_layers=[1, 0, 0, 1]),
    "qwen3-moe-listed": Qwen3MoeConfig(**DEEP, **MOE, head_dim=8, num_experts=4,
                                       mlp_only_layers=[0, 2]),
    "opt-projected": OPTConfig(**SMALL | dict(num_hidden_layers=4), hidden_size=32, ffn_dim=48,
                               word_embed_proj_dim=16, max_position_embeddings=CONTEXT,
                               tie_word_embeddings=False),
    "gemma3-with-images": Gemma3Config(
        text_config=DEEP | WINDOWS | dict(layer_types=KINDS, tie_word_embeddings=False),
        vision_config=VISION.to_dict(), mm_tokens_per_image=4, **SPECIAL)}


@pytest.fixture
def make(monkeypatch):
    """make(name): a tiny model of 4 layers."""
    for name, config in (SCALED | MIXED).items():
        monkeypatch.setitem(MORE_FAMILIES, name, config)
    return lambda name: tiny(name) if name in MIXED else deep(name)


# ------------------------------------------------------------------------------ a smaller model

def without_other_layers(model, numbers: list[int]):
    """A copy whose other layers pass their input on."""
    model = copy.deepcopy(model)
    for i, layer in enumerate(list_layers(model)):
        if i not in numbers:
            layer.register_forward_hook(pass_on, with_kwargs=True)
    return model


IDS = torch.tensor([[7, 3, 50, 12, 3, 44, 9, 30, 31, 5, 8, 27, 2, 19, 40, 11, 6, 23, 55, 14]])


@torch.inference_mode()
def off_by(small, model) -> float:
    """How far the logits after 20 tokens, more than any window, are apart."""
    a, b = (x(input_ids=IDS, use_cache=False).logits for x in (small, model))
    return ((a - b).abs().mean() / b.abs().mean()).item()


@pytest.mark.parametrize("name", [*FAMILIES, *MORE_FAMILIES, *SCALED, *MIXED])
def test_layers_are_those_that_were_asked_for(name, make):
    model = make(name)
    assert depth_of(model) == len(list_layers(model)) == 4
    for numbers in [0], [1, 2]:
        oracle, small = without_other_layers(model, numbers), take_layers(model, numbers)
        assert off_by(small, oracle) < 1e-4, numbers
        assert len(list_layers(small)) == len(numbers)


def test_layers_of_a_family_that_lists_those_with_keys():
    """Bamba gives the numbers of its layers with keys, which change with those of the layers."""
    model = tiny("bamba", num_hidden_layers=4, attn_layer_indices=[1, 3])
    assert off_by(take_layers(model, [3]), without_other_layers(model, [3])) < 1e-4
    split_layers(EngineLM(model), 3)  # it checks that early and late layers are the whole


def test_layers_that_no_configuration_makes_are_refused():
    """Every second layer has experts, and a configuration has only one step."""
    model = tiny("qwen3-moe", decoder_sparse_step=2)
    with pytest.raises(InputError, match=r"layers .1. can be a model, got 'Qwen3MoeForCausalLM': .*"
                                         "Missing key"):
        take_layers(model, [1])


def test_a_draft_of_a_model_that_reads_images_is_distilled(make, tmp_path, monkeypatch):
    """The draft is a model of text. One step at a rate of nearly 0 leaves its layers as they are.
    """
    model, prompts = make("gemma3-with-images"), [[5, 9, 3], [7, 3], [4, 4, 17]]
    monkeypatch.setattr(training, "collect_answers", lambda *_: prompts)
    recipe.distil(model, WORDLESS, prompts, layers=[1, 3], steps=1, lr=1e-9, max_new_tokens=8,
                  out=tmp_path / "out", work=tmp_path)
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()
    assert off_by(draft, without_other_layers(model, [1, 3])) < 0.02  # it was kept in bfloat16
    assert len(list_layers(draft)) == 2 and not hasattr(draft.config, "vision_config")


# ---------------------------------------------------------------------------------------- views

# That early and late layers are the whole is in test_lossless.py, in the lines of early_exit.
@pytest.mark.parametrize("name, E, said", [
    ("gpt2", 1, "early and late layers make the whole, got .*: off by"),
    ("opt", 1, "early and late layers make the whole, got .*: off by"),
    ("zamba2", 1, "can be split after any layer, got .*: it has no 0"),
    ("mamba2", 1, "can be split after any layer, got .*: 'Sequential'"),
    ("llama", 0, "--E must be 1 to 1 for .* 2 layers, got 0"),
    ("llama", 2, "--E must be 1 to 1 for .* 2 layers, got 2")])
def test_models_that_cannot_be_split_are_refused(name, E, said):
    with pytest.raises(InputError, match=said):
        split_layers(EngineLM(tiny(name)), E)
