"""Tiny random models of every family that the tests run, and drafts for them.

    FAMILIES       the families of most tests
    MORE_FAMILIES  families whose attention is peculiar, for what depends on attention
    OTHERS         more families, for the tests of trees and of AR: with recurrent layers, and
                   such that only the numbers of `check` admit
    LOOKUPS        families whose layers look up embeddings of their own by the token
    LAYERED        families whose four layers are of several kinds
    SCALED         configurations whose logits are not what the LM head says
    tiny(family)   a random model of a family, prepared for EngineLM
    near(model)    a copy with noise in its weights, so a draft that is often right
    rand(part)     a trained part with random weights
    DEVICE         where test_lossless.py runs its models, pytest's option --device

All have VOCAB tokens and a context of CONTEXT positions, so that a test reaches the end of it."""
import copy
import itertools

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.loading import check

DEVICE = "cpu"
VOCAB, CONTEXT = 61, 160
SPECIAL = dict(bos_token_id=0, eos_token_id=1, pad_token_id=1)
SMALL = dict(**SPECIAL, vocab_size=VOCAB, num_hidden_layers=2, num_attention_heads=4)
SIZES = dict(**SMALL, hidden_size=32, intermediate_size=48, max_position_embeddings=CONTEXT)
SHAPE = dict(**SIZES, num_key_value_heads=2)
UNTIED = dict(tie_word_embeddings=False)
WINDOWS = dict(head_dim=8, sliding_window=9, layer_types=["sliding_attention", "full_attention"])
GEMMA = dict(**SHAPE, **WINDOWS, **UNTIED)
MOE = dict(moe_intermediate_size=16, num_experts_per_tok=2)
MIXED = ["linear_attention", "full_attention"]
DELTA = dict(**SHAPE, head_dim=8, layer_types=MIXED, linear_num_value_heads=4,
             linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
             linear_conv_kernel_dim=4)
MAMBA = dict(mamba_d_state=8, mamba_n_groups=2, mamba_d_conv=4, mamba_expand=2, mamba_n_heads=8,
             mamba_d_head=8, mamba_chunk_size=16)
MLA = dict(num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
           v_head_dim=12)
GPT = dict(**SPECIAL, vocab_size=VOCAB, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4)
config_of = AutoConfig.for_model
RECURRENT = {  # one for each kind of layer with a state
    "qwen3.5": config_of("qwen3_5_text", **DELTA),
    "granite4": config_of("granitemoehybrid", **SHAPE, **MAMBA, layer_types=MIXED,
                          num_local_experts=0, shared_intermediate_size=32),
    "lfm2": config_of("lfm2", **SHAPE, layer_types=["conv", "full_attention"], block_ff_dim=64,
                      conv_L_cache=3)}
FAMILIES = {
    "llama": config_of("llama", **SHAPE),
    "gpt2": config_of("gpt2", **GPT),
    "opt": config_of("opt", **SMALL, **UNTIED, hidden_size=32, ffn_dim=48, word_embed_proj_dim=32,
                     max_position_embeddings=CONTEXT),
    "qwen2": config_of("qwen2", **SHAPE),
    "qwen2-window": config_of("qwen2", **SHAPE, use_sliding_window=True, sliding_window=9,
                              max_window_layers=1),
    "qwen3": config_of("qwen3", **SHAPE, head_dim=8),
    "neox": config_of("gpt_neox", **SIZES),
    "mistral": config_of("mistral", **SHAPE, head_dim=8, sliding_window=9),
    "gemma3": config_of("gemma3_text", **GEMMA)}
MORE_FAMILIES = {  # whose attention is peculiar: for the tests of trees
    "gemma2": config_of("gemma2", **GEMMA, query_pre_attn_scalar=8),
    "phi3": config_of("phi3", **SHAPE, sliding_window=9),
    "stablelm": config_of("stablelm", **SHAPE),
    "gpt-oss": config_of("gpt_oss", **SHAPE, **WINDOWS, num_local_experts=4,
                         num_experts_per_tok=2),
    "deepseek-v3": config_of("deepseek_v3", **SHAPE | MLA, **MOE, n_group=1, topk_group=1,
                             n_routed_experts=4, first_k_dense_replace=1, q_lora_rank=16),
    "cohere2": config_of("cohere2", **SHAPE, **WINDOWS),
    "qwen3-moe": config_of("qwen3_moe", **SHAPE, **MOE, head_dim=8, num_experts=4),
    **RECURRENT}
OTHERS = dict(  # their settings
    qwen3_next=DELTA | MOE | dict(num_experts=4, shared_expert_intermediate_size=16),
    qwen3_5_moe_text=DELTA | MOE | dict(num_experts=4, shared_expert_intermediate_size=16),
    olmo_hybrid=DELTA,
    kimi_linear=SHAPE | MLA | MOE | dict(
        layer_types=MIXED, linear_num_heads=4, linear_head_dim=8, linear_conv_kernel_dim=4,
        num_experts=4, first_k_dense_replace=1),
    lfm2_moe=SHAPE | MOE | dict(layer_types=["conv", "full_attention"], conv_L_cache=3,
                                num_experts=4, num_dense_layers=1),
    bamba=SHAPE | MAMBA | dict(attn_layer_indices=[1]),
    falcon_h1=SHAPE | MAMBA | dict(mamba_d_ssm=64),
    nemotron_h=SHAPE | dict(
        layers_block_type=["mamba", "attention", "mlp"], num_hidden_layers=3, mamba_num_heads=8,
        mamba_head_dim=8, ssm_state_size=8, n_groups=2, conv_kernel=4, chunk_size=16, head_dim=8),
    zamba2=SHAPE | dict(layers_block_type=["mamba", "hybrid"], mamba_d_state=8, mamba_ngroups=2,
                        n_mamba_heads=8, mamba_headdim=8, chunk_size=16),
    mamba2=SMALL | dict(hidden_size=32, num_heads=8, head_dim=8, state_size=8, n_groups=2,
                        conv_kernel=4, expand=2, chunk_size=16, max_position_embeddings=CONTEXT),
    gptj=GPT | dict(rotary_dim=4),
    codegen=GPT | dict(rotary_dim=4),
    xglm=SPECIAL | UNTIED | dict(vocab_size=VOCAB, d_model=32, ffn_dim=48, num_layers=2,
                                 attention_heads=4, max_position_embeddings=CONTEXT),
    biogpt=SIZES | UNTIED,
    falcon=SMALL | dict(hidden_size=32, alibi=False, max_position_embeddings=CONTEXT))
OTHERS = {name.replace("_", "-"): config_of(name, **settings) for name, settings in OTHERS.items()}
DEEP = SHAPE | dict(num_hidden_layers=4)
TABLE = DEEP | WINDOWS | dict(pad_token_id=0, layer_types=2 * WINDOWS["layer_types"],
                              hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB)
GEMMA3N = TABLE | dict(laurel_rank=8, activation_sparsity_pattern=[0.0] * 4)
LOOKUPS = {  # the third one and the last share keys, and the heads of the fourth are of two sizes
    "gemma4": config_of("gemma4_text", **TABLE, global_head_dim=8),
    "gemma3n": config_of("gemma3n_text", **GEMMA3N, num_kv_shared_layers=0),
    "gemma4-shared": config_of("gemma4_text", **TABLE, global_head_dim=8, num_kv_shared_layers=2),
    "gemma4-sizes": config_of("gemma4_text", **TABLE, global_head_dim=16),
    "gemma3n-shared": config_of("gemma3n_text", **GEMMA3N, num_kv_shared_layers=2)}
SCALED = {  # whose logits are not what the LM head says
    "granite": config_of("granite", **SHAPE, logits_scaling=4.0, embedding_multiplier=3.0),
    "cohere": config_of("cohere", **SHAPE, logit_scale=0.25),
    "gemma2-capped": config_of("gemma2", **GEMMA, query_pre_attn_scalar=8,
                               final_logit_softcapping=4.0)}
KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              image_size=8, patch_size=4)
LAYERED = {  # four layers of several kinds
    "smollm3": config_of("smollm3", **DEEP, no_rope_layers=[1, 0, 0, 1]),
    "gemma3-with-images": config_of(
        "gemma3", text_config=DEEP | WINDOWS | UNTIED | dict(layer_types=KINDS),
        vision_config=VISION, mm_tokens_per_image=4, **SPECIAL)}

MADE = {}  # all models that `tiny` has made, each with torch's random state after that


@torch.inference_mode(False)  # the next test that asks for the model may want gradients
def tiny(family: str, seed: int = 0, **changes):
    """Make a random model of a family, whose weights are large: the output depends on the whole
    context and does not loop at once.

    changes  fields of the configuration that differ from the family's

    A model is made and checked once, and every call gets a copy, which takes less time."""
    key = family, seed, str(changes)
    if key not in MADE:
        config = (FAMILIES | MORE_FAMILIES | OTHERS | SCALED | LOOKUPS | LAYERED)[family]
        config = type(config).from_dict({**config.to_dict(), **changes})
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # some families ignore initializer_range
            for name, p in model.named_parameters():
                if p.ndim == 2:  # Gemma scales its embeddings up
                    p.normal_(0, 0.1 if family.startswith("gemma") and "embed" in name else 0.3)
        MADE[key] = check(model), torch.get_rng_state()
    model, state = MADE[key]
    torch.set_rng_state(state)
    return copy.deepcopy(model)


def deep(name: str, layers: int = 4, **changes):
    """Make a tiny model of more layers, with windows of the kinds that the family has, turn by
    turn."""
    if kinds := getattr((FAMILIES | MORE_FAMILIES | SCALED)[name], "layer_types", None):
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


def rand(part: torch.nn.Module, scale: float = 0.5):
    """Set the weights of a trained part to random numbers."""
    rng = torch.Generator().manual_seed(0)
    for p in part.parameters():
        if p.requires_grad:
            p.data = (scale * torch.randn(p.shape, generator=rng)).to(p.device)
    return part.requires_grad_(False)
