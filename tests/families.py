"""Tiny random models of every family that the tests run, and drafts for them.

    FAMILIES       the families of all tests: pytest's fixture `family` names each of them once
    MORE_FAMILIES  families whose attention is peculiar, for what depends on attention
    SCALED         configurations whose logits are not what the LM head says
    tiny(family)   a random model of a family, prepared for CachedLM
    near(model)    a copy with noise in its weights, so a draft that is often right
    rand(part)     a trained part with random weights
    DEVICE         where test_lossless.py runs its models, pytest's option --device

All have VOCAB tokens and a context of CONTEXT positions, so that a test reaches the end of it."""
import copy
import itertools

import torch
from transformers import (AutoModelForCausalLM, Cohere2Config, CohereConfig, DeepseekV3Config,
                          Gemma2Config, Gemma3TextConfig, GPT2Config, GPTNeoXConfig, GptOssConfig,
                          GraniteConfig, LlamaConfig, MistralConfig, OPTConfig, Phi3Config,
                          Qwen2Config, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig,
                          StableLmConfig)

from common import CachedLM, check

DEVICE = "cpu"
VOCAB, CONTEXT = 61, 160
SPECIAL = dict(bos_token_id=0, eos_token_id=1, pad_token_id=1)
SMALL = dict(**SPECIAL, vocab_size=VOCAB, num_hidden_layers=2, num_attention_heads=4)
SHAPE = dict(**SMALL, hidden_size=32, intermediate_size=48, num_key_value_heads=2,
             max_position_embeddings=CONTEXT)
WINDOWS = dict(head_dim=8, sliding_window=9, layer_types=["sliding_attention", "full_attention"])
MOE = dict(moe_intermediate_size=16, num_experts_per_tok=2)
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4,
                       **SPECIAL),
    "opt": OPTConfig(**SMALL, hidden_size=32, ffn_dim=48, max_position_embeddings=CONTEXT,
                     word_embed_proj_dim=32, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=9,
                                max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "neox": GPTNeoXConfig(**SMALL, hidden_size=32, intermediate_size=48,
                          max_position_embeddings=CONTEXT),
    "mistral": MistralConfig(**SHAPE, head_dim=8, sliding_window=9),
    "gemma3": Gemma3TextConfig(**SHAPE, **WINDOWS, tie_word_embeddings=False),
}
MORE_FAMILIES = {  # whose attention is peculiar: for the tests of trees
    "gemma2": Gemma2Config(**SHAPE, **WINDOWS, tie_word_embeddings=False,
                           query_pre_attn_scalar=8),
    "phi3": Phi3Config(**SHAPE, sliding_window=9),
    "stablelm": StableLmConfig(**SHAPE),
    "gpt-oss": GptOssConfig(**SHAPE, **WINDOWS, num_local_experts=4, num_experts_per_tok=2),
    "deepseek-v3": DeepseekV3Config(**SHAPE | dict(num_key_value_heads=4), **MOE, n_group=1,
                                    topk_group=1, n_routed_experts=4, first_k_dense_replace=1,
                                    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
                                    qk_rope_head_dim=8, v_head_dim=12),
    "cohere2": Cohere2Config(**SHAPE, **WINDOWS),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, **MOE, head_dim=8, num_experts=4),
    "qwen3-5": Qwen3_5TextConfig(**SHAPE, head_dim=8, layer_types=["full_attention"] * 2),
}
SCALED = {  # whose logits are not what the LM head says
    "granite": GraniteConfig(**SHAPE, logits_scaling=4.0, embedding_multiplier=3.0),
    "cohere": CohereConfig(**SHAPE, logit_scale=0.25),
    "gemma2-capped": Gemma2Config(**SHAPE, **WINDOWS, tie_word_embeddings=False,
                                  query_pre_attn_scalar=8, final_logit_softcapping=4.0),
}

MADE = {}  # all models that `tiny` has made, each with torch's random state after that


@torch.inference_mode(False)  # the next test that asks for the model may want gradients
def tiny(family: str, seed: int = 0, run_as=CachedLM, **changes):
    """Make a random model of a family, whose weights are large: the output depends on the whole
    context and does not loop at once.

    run_as   the class that `check` checks the model with
    changes  fields of the configuration that differ from the family's

    A model is made and checked once, and every call gets a copy, which takes less time."""
    config = (FAMILIES | MORE_FAMILIES)[family]
    config = type(config).from_dict({**config.to_dict(), **changes})
    implementation = changes.get("attn_implementation", config._attn_implementation)
    key = config.to_json_string(), implementation, seed, run_as
    if key not in MADE:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        with torch.no_grad():  # some families ignore initializer_range
            for name, p in model.named_parameters():
                if p.ndim == 2:  # Gemma scales its embeddings up
                    p.normal_(0, 0.1 if family.startswith("gemma") and "embed" in name else 0.3)
        MADE[key] = check(model, run_as), torch.get_rng_state()
    model, state = MADE[key]
    torch.set_rng_state(state)
    return copy.deepcopy(model)


def deep(name: str, layers: int = 4, **changes):
    """Make a tiny model of more layers, with windows of the kinds that the family has, turn by
    turn."""
    config = (FAMILIES | MORE_FAMILIES)[name]
    kinds = getattr(config, "layer_types", None)
    if kinds:
        changes["layer_types"] = [*itertools.islice(itertools.cycle(kinds), layers)]
    return tiny(name, num_hidden_layers=layers, **changes)


def near(model, noise: float):
    """Copy a model and add noise to its weights: the copy is a draft that is often right."""
    torch.manual_seed(1)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(noise * torch.randn(p.shape).to(p))  # the same numbers on all devices
    return draft


def rand(part: torch.nn.Module, accept: list[list[float]] = (), scale: float = 0.5):
    """Set the weights of a trained part to random numbers, and its acceptance rates."""
    rng = torch.Generator().manual_seed(0)
    for p in part.parameters():
        if p.requires_grad:
            p.data = (scale * torch.randn(p.shape, generator=rng)).to(p.device)
    part.accept = [*accept]
    return part.requires_grad_(False)
