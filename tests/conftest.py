"""Tiny random models of every family, and the embedded pair."""
import copy
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import (AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, MistralConfig, OPTConfig, Qwen2Config, Qwen3Config)

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "models")]
torch.set_num_threads(1)  # tiny models gain nothing from more
torch.backends.cuda.matmul.allow_tf32 = False

from common import load, prepare, until  # noqa: E402  (the path is set above)

VOCAB, CONTEXT = 61, 160
SPECIAL = dict(bos_token_id=0, eos_token_id=1, pad_token_id=1)
SHAPE = dict(**SPECIAL, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT)
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, **SPECIAL),
    "opt": OPTConfig(vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=CONTEXT, word_embed_proj_dim=32, tie_word_embeddings=False, **SPECIAL),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "neox": GPTNeoXConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=CONTEXT, **SPECIAL),
    "mistral": MistralConfig(**SHAPE, head_dim=8, sliding_window=9),
    "gemma3": Gemma3TextConfig(**SHAPE, tie_word_embeddings=False, head_dim=8, sliding_window=9, layer_types=["sliding_attention", "full_attention"]),
}


def tiny(family: str, seed: int = 0, **changes):
    """A random model of a family. Its weights are large, so that its output depends on the whole context and does not loop at once."""
    config = type(FAMILIES[family]).from_dict({**FAMILIES[family].to_dict(), **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=changes.get("attn_implementation", "sdpa"))
    with torch.no_grad():  # some families ignore initializer_range
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 0.1 if family == "gemma3" and "embed" in name else 0.3)  # Gemma scales its embeddings up
    return prepare(model)


def near(model, noise: float):
    """A copy with noise in its weights: a draft that is often right."""
    torch.manual_seed(1)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(noise * torch.randn_like(p))
    return draft


class ScriptedLM:
    """Stands in for a CachedLM: `logits_of(tokens)` gives the logits [V] after a whole sequence, prompt included. Fast, and whatever a test wants."""

    def __init__(self, logits_of):
        self.logits_of, self.tokens, self.parents, self.ids, self.calls, self.rows = logits_of, [], [], [], 0, 0

    @property
    def length(self):
        return len(self.tokens)

    def start(self, ids, width=1):
        self.tokens, self.parents, self.ids = list(ids), [], []

    def forward(self, ids, parents=None):
        start = len(self.parents)
        self.parents += range(start - 1, start + len(ids) - 1) if parents is None else parents
        self.ids, self.calls, self.rows = self.ids + list(ids), self.calls + 1, self.rows + len(ids)
        return torch.stack([self.logits_of(self.tokens + [self.ids[j] for j in path_to(i, self.parents)]) for i in range(start, len(self.parents))])

    def commit(self, path):
        path = list(path)
        assert all(self.parents[node] == parent for parent, node in zip([-1, *path], path))
        self.tokens, self.parents, self.ids = self.tokens + [self.ids[i] for i in path], [], []

    def truncate(self, length):
        assert length <= len(self.tokens)
        self.tokens, self.parents, self.ids = self.tokens[:length], [], []


def markov(seed, vocab=4, scale=1.2):
    """Logits that depend on the last two tokens."""
    table = scale * torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed))
    return lambda tokens: table[tokens[-2], tokens[-1]]


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root of the tree down to this one."""
    return [] if node < 0 else path_to(parents[node], parents) + [node]


def tokens_of(chunks, n: int, eos=()) -> list[int]:
    return [token for chunk in until(chunks, n, eos) for token in chunk]


def chi_square_ok(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Pearson's test of counts [k] against expected probabilities [k] at a false-failure probability of 1e-6 (normal deviate 4.75, by
    the Wilson-Hilferty approximation of the chi-square quantile). Cells expected fewer than 5 times are pooled."""
    expected = expected.double() * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]]).double()
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    k = len(expected) - 1
    return bool(((counts - expected) ** 2 / expected).sum() < k * (1 - 2 / (9 * k) + 4.75 * (2 / (9 * k)) ** 0.5) ** 3)


def pytest_collection_modifyitems(items):
    """`make test` runs two halves at once, PART=0 and PART=1: a core for each."""
    if "PART" in os.environ:
        items[:] = items[int(os.environ["PART"])::2]


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="session")
def embedded():
    """(target, draft, tokenizer) of models/, in float32 on the CPU."""
    target, tokenizer = load(ROOT / "models/target", "cpu", "float32")
    return target, load(ROOT / "models/draft", "cpu", "float32")[0], tokenizer
