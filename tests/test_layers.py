"""Some layers of a model as a model of its own: they are the ones that were asked for, of the right
kind, also after they were saved and loaded again. The oracle is the model itself, with its other
layers made to pass their input on."""
import copy

import pytest
import torch
from transformers import (AutoModelForCausalLM, Gemma3Config, OPTConfig, Qwen3MoeConfig,
                          SiglipVisionConfig, SmolLM3Config)

import train as recipe
from common import InputError
from families import (CONTEXT, FAMILIES, MOE, MORE_FAMILIES, SCALED, SHAPE, SMALL, SPECIAL, WINDOWS,
                      tiny)
from training import loop as training
from training.layers import list_layers, pass_on, take_layers
from trainings import WORDLESS

DEEP = SHAPE | dict(num_hidden_layers=4)
KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
VISION = SiglipVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                            num_attention_heads=2, image_size=8, patch_size=4)


def deepened(config):
    """The same family with 4 layers; where layers are of two kinds, of both."""
    changes = config.to_dict()
    changes["n_layer" if "n_layer" in changes else "num_hidden_layers"] = 4
    if "use_sliding_window" in changes:  # Qwen's, which lists the layers itself
        changes.pop("layer_types", None)
    if changes.get("layer_types"):
        changes["layer_types"] = KINDS
    return type(config).from_dict(changes)


MIXED = {  # layers of several kinds
    "smollm3": SmolLM3Config(**DEEP, no_rope_layers=[1, 0, 0, 1]),
    "qwen3-moe-listed": Qwen3MoeConfig(**DEEP, **MOE, head_dim=8, num_experts=4,
                                       mlp_only_layers=[0, 2]),
    "qwen3-moe-every-second": Qwen3MoeConfig(**DEEP, **MOE, head_dim=8, num_experts=4,
                                             decoder_sparse_step=2),
    "deepseek-two-dense": type(MORE_FAMILIES["deepseek-v3"]).from_dict(
        MORE_FAMILIES["deepseek-v3"].to_dict() | dict(num_hidden_layers=4,
                                                      first_k_dense_replace=2)),
    "opt-projected": OPTConfig(**SMALL | dict(num_hidden_layers=4), hidden_size=32, ffn_dim=48,
                               word_embed_proj_dim=16, max_position_embeddings=CONTEXT,
                               tie_word_embeddings=False),
    "gemma3-with-images": Gemma3Config(
        text_config=DEEP | WINDOWS | dict(layer_types=KINDS, tie_word_embeddings=False),
        vision_config=VISION.to_dict(), mm_tokens_per_image=4, **SPECIAL),
    "four-ends": type(FAMILIES["llama"]).from_dict(
        FAMILIES["llama"].to_dict() | dict(num_hidden_layers=4, eos_token_id=[1, 2, 3, 4]))}
ALL = {name: deepened(config) for name, config in (FAMILIES | MORE_FAMILIES | SCALED).items()}
ALL |= MIXED


@pytest.fixture
def make(monkeypatch):
    """make(name): a tiny model of 4 layers."""
    for name, config in ALL.items():
        monkeypatch.setitem(MORE_FAMILIES, name, config)  # which comes before FAMILIES
    return tiny


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


@pytest.mark.parametrize("name", ALL)
def test_layers_are_those_that_were_asked_for(name, make, tmp_path):
    """Also after they were saved and loaded again. All layers are the model itself."""
    model = make(name)
    for numbers in [0], [2], [1, 3]:
        oracle, small = without_other_layers(model, numbers), take_layers(model, numbers)
        assert off_by(small, oracle) < 1e-4, numbers
    small.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert off_by(loaded, oracle) < 1e-4 and len(list_layers(loaded)) == 2
    assert off_by(take_layers(model, [0, 1, 2, 3]), model) < 1e-4


def test_a_list_of_ends_is_no_list_of_layers(make):
    assert take_layers(make("four-ends"), [1, 3]).config.eos_token_id == [1, 2, 3, 4]


def test_the_text_model_alone_is_taken_out_of_a_model_that_reads_images(make):
    small = take_layers(make("gemma3-with-images"), [1, 3])
    assert type(small).__name__ == "Gemma3ForCausalLM"


def test_layers_that_no_configuration_makes_are_refused(make):
    """GPT-2 may divide each layer's scores by the layer's number; the first layers keep theirs."""
    model = make("gpt2", scale_attn_by_inverse_layer_idx=True)
    assert off_by(take_layers(model, [0, 1]), without_other_layers(model, [0, 1])) < 1e-4
    with pytest.raises(InputError, match="layers 1, 3 of GPT2LMHeadModel cannot be made into a "
                       "model of their own: .*, outputs are off by"):
        take_layers(model, [1, 3])


@pytest.mark.parametrize("name", ["gpt2", "granite", "gemma2-capped", "gemma3-with-images"])
def test_a_draft_of_any_family_is_distilled(name, make, tmp_path, monkeypatch, capsys):
    """Of layers 1 and 3; one step at a rate of nearly 0 leaves them as they are. What the command
    says of them is about the model's logits, scaled or capped as the model does."""
    model, prompts = make(name), [[5, 9, 3], [7, 3], [4, 4, 17]]
    monkeypatch.setattr(training, "collect_answers", lambda *_: [p[::-1] for p in prompts])
    recipe.distil(model, WORDLESS, prompts, layers=[1, 3], steps=1, lr=1e-9, max_new_tokens=8,
                  out=tmp_path / "out", work=tmp_path)
    oracle = without_other_layers(model, [1, 3])
    said = capsys.readouterr().out.splitlines()[-1]
    accepted = float(said.split("1 - TVD ")[1])  # on one of the answers
    assert min(abs(agreement(model, oracle, p) - accepted) for p in prompts) < 0.01


@torch.inference_mode()
def agreement(model, draft, prompt: list[int]) -> float:
    """1 - TVD on the tokens of the answer, which is the prompt in reverse."""
    ids = torch.tensor([prompt + prompt[::-1]])
    p, q = (x(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1:-1].softmax(-1)
            for x in (model, draft))
    return torch.minimum(p, q).sum(-1).mean().item()
