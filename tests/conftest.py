"""Tiny random models of every family, the embedded pair, and scripted stand-ins for models."""
import copy
import itertools
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import (AutoModelForCausalLM, Cohere2Config, CohereConfig, DeepseekV3Config,
                          Gemma2Config, Gemma3TextConfig, GPT2Config, GPTNeoXConfig, GptOssConfig,
                          GraniteConfig, LlamaConfig, MistralConfig, OPTConfig, Phi3Config,
                          Qwen2Config, Qwen3Config, Qwen3MoeConfig, StableLmConfig)

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "models"), str(ROOT / "results")]
torch.set_num_threads(1)  # tiny models gain nothing from more
torch.backends.cuda.matmul.allow_tf32 = False

import cli  # noqa: E402  (the path is set above)
from common import CachedLM, Sampler, autoregressive, encode, load, prepare, until  # noqa: E402

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
}
SCALED = {  # whose logits are not what the LM head says
    "granite": GraniteConfig(**SHAPE, logits_scaling=4.0, embedding_multiplier=3.0),
    "cohere": CohereConfig(**SHAPE, logit_scale=0.25),
    "gemma2-capped": Gemma2Config(**SHAPE, **WINDOWS, tie_word_embeddings=False,
                                  query_pre_attn_scalar=8, final_logit_softcapping=4.0),
}


def tiny(family: str, seed: int = 0, run_as=CachedLM, **changes):
    """A random model of a family. Its weights are large, so that its output depends on the whole
    context and does not loop at once."""
    config = (FAMILIES | MORE_FAMILIES)[family]
    config = type(config).from_dict({**config.to_dict(), **changes})
    torch.manual_seed(seed)
    implementation = changes.get("attn_implementation", config._attn_implementation)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():  # some families ignore initializer_range
        for name, p in model.named_parameters():
            if p.ndim == 2:  # Gemma scales its embeddings up
                p.normal_(0, 0.1 if family.startswith("gemma") and "embed" in name else 0.3)
    return prepare(model, run_as)


def near(model, noise: float):
    """A copy with noise in its weights: a draft that is often right."""
    torch.manual_seed(1)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(noise * torch.randn_like(p))
    return draft


def prefill(lm, ids: list[int]) -> torch.Tensor:
    """Cache all of ids; the logits [1, V] after the last."""
    lm.start(ids[:-1])
    logits = lm.forward(ids[-1:])
    lm.commit([0])
    return logits


class ScriptedLM:
    """Stands in for a CachedLM: `logits_of(tokens)` gives the logits [V] after a whole sequence,
    prompt included. Fast, and whatever a test wants."""

    def __init__(self, logits_of):
        self.logits_of, self.tokens, self.parents, self.ids = logits_of, [], [], []
        self.calls, self.rows = 0, 0
        self.prepared = {}

    once = CachedLM.once
    setup_seconds = 0.0

    @property
    def length(self):
        return len(self.tokens)

    def start(self, ids, prefix=()):
        self.tokens, self.parents, self.ids = list(ids), [], []

    def forward(self, ids, parents=None):
        start = len(self.parents)
        self.parents += range(start - 1, start + len(ids) - 1) if parents is None else parents
        self.ids, self.calls, self.rows = self.ids + list(ids), self.calls + 1, self.rows + len(ids)
        texts = ([self.ids[j] for j in path_to(i, self.parents)]
                 for i in range(start, len(self.parents)))
        return torch.stack([self.logits_of(self.tokens + text) for text in texts])

    def commit(self, path):
        path = list(path)
        assert all(self.parents[node] == parent for parent, node in zip([-1, *path], path))
        self.tokens, self.parents = self.tokens + [self.ids[i] for i in path], []
        self.ids = []

    def truncate(self, length):
        assert length <= len(self.tokens)
        self.tokens, self.parents, self.ids = self.tokens[:length], [], []


class Decoder(torch.nn.Module):
    """Of a scripted transformers model: what it is called with are the features."""

    def forward(self, features=None, **_):
        return (features,)


class Zeros(Sampler):
    """Coins of 0, the smallest there are."""

    def uniform(self, shape, device):
        return torch.zeros(shape, dtype=torch.float64)


def markov(seed, vocab=4, scale=1.2):
    """Logits that depend on the last two tokens."""
    rng = torch.Generator().manual_seed(seed)
    table = scale * torch.randn(vocab, vocab, vocab, generator=rng)
    return lambda tokens: table[tokens[-2], tokens[-1]]


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root of the tree down to this one."""
    return [] if node < 0 else path_to(parents[node], parents) + [node]


def interrupting(act, number: int, after: bool = False):
    """`act`, whose call of this number Ctrl-C stops: before it does anything, or after it."""
    calls = itertools.count(1)

    def stopped(*args, **options):
        last = next(calls) == number
        if last and not after:
            raise KeyboardInterrupt
        result = act(*args, **options)
        if last:
            raise KeyboardInterrupt
        return result
    return stopped


def tokens_of(chunks, n: int, eos=()) -> list[int]:
    return [token for chunk in until(chunks, n, eos) for token in chunk]


def main(*args, **special) -> int:
    """`cli.main`, also where argparse ends the process."""
    try:
        return cli.main(*args, **special)
    except SystemExit as end:
        return end.code


def chi_square_ok(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Pearson's test of counts [k] against expected probabilities [k] at a false-failure
    probability of 1e-6 (normal deviate 4.75, by the Wilson-Hilferty approximation of the quantile).
    Cells expected fewer than 5 times are pooled."""
    expected = expected.double() * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]]).double()
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    k = len(expected) - 1
    most = k * (1 - 2 / (9 * k) + 4.75 * (2 / (9 * k)) ** 0.5) ** 3
    return bool(((counts - expected) ** 2 / expected).sum() < most)


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")


def pytest_collection_modifyitems(items):
    """`make test` runs two halves at once, PART=0 and PART=1: a core for each."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))
    if "PART" in os.environ:
        items[:] = items[int(os.environ["PART"])::2]


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


# for variants of what is tested over all
few_families = pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])


@pytest.fixture(scope="session")
def embedded():
    """(target, draft, tokenizer) of models/, in float32 on the CPU."""
    target, tokenizer = load(ROOT / "models/target", "cpu", "float32")
    return target, load(ROOT / "models/draft", "cpu", "float32")[0], tokenizer


@pytest.fixture(scope="module")
def worked(request, tmp_path_factory):
    """A folder that a training of two steps has worked in: the test module's `fitted`."""
    folder = tmp_path_factory.mktemp("work")
    request.module.fitted(folder, steps=2)
    return folder


def said_in_one_line(said: str, capfd) -> None:
    """A refused command's only line, on stderr, but for progress bars."""
    out, err = capfd.readouterr()
    lines = [line for line in err.replace("\r", "\n").splitlines() if line and "it/s" not in line]
    assert out == "" and len(lines) == 1 and said in lines[0], err


@pytest.fixture(scope="session")
def held_out(embedded) -> list[tuple[list[int], list[int]]]:
    """Held-out prompts of each task for the embedded target, and its first 100 greedy tokens."""
    import tasks
    model, _, tokenizer = embedded
    prompts = [encode(tokenizer, example.prompt) for task in tasks.TASKS
               for example in tasks.take(task, "test", 2, seed=40)]
    target, eos = CachedLM(model), {tokenizer.eos_token_id}
    return [(p, tokens_of(autoregressive(target, p), 100, eos)) for p in prompts]


def per_call(method, model, held_out, **options) -> float:
    """Tokens per target call on held-out prompts, where the output is AR's."""
    target = CachedLM(model)
    for prompt, expected in held_out:
        assert tokens_of(method(target, prompt, **options), len(expected)) == expected
    return sum(len(expected) for _, expected in held_out) / target.calls
