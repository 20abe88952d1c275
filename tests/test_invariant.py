"""Batch-invariant models (support/invariant.py): a row has the same bits whatever stands beside it,
in three types, so that all methods and transformers' `generate` write one text."""
import copy
import functools
import random

import pytest
import torch
from torch.nn import SiLU

import families
from cli.run import kind_for
from common import CachedLM
from families import CONTEXT, FAMILIES, LOOKUPS, MORE_FAMILIES, OTHERS, RECURRENT, SCALED, tiny
from fake_cuda import FakeCuda
from fake_models import path_to
from helpers import check_refused, tokens_of
from methods import METHODS, autoregressive_text, chunks_of
from support import invariant, packed
from support.engine import EngineLM
from support.graphs import GraphedLM
from support.invariant import SIZE, find_size, make_invariant, prove, run_double
from support.packed import is_packed, list_types, pack

EVERY = [*FAMILIES, *MORE_FAMILIES, *OTHERS, *SCALED, *LOOKUPS]
REFUSED = {*RECURRENT, *OTHERS, "stablelm"}  # states, or attention of the family's own
TYPES = [torch.bfloat16, torch.float16, torch.float32]
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(autouse=True)
def short_proof(monkeypatch):
    """Let each change end with two trees, since these tests compare more of them."""
    monkeypatch.setattr(invariant, "TREES", invariant.TREES[:2])


# ------------------------------------------------------------------------- layers one by one

def test_an_activation_does_not_depend_on_a_numbers_place():
    """Of 7 numbers a CPU computes some outside vectors, and of 64 rows of them others."""
    layer, x = SiLU(), torch.randn(500, 7, generator=torch.manual_seed(0))
    alone = [run_double(layer, row) for row in x[:, None]]
    assert torch.equal(run_double(layer, x), torch.cat(alone))


class Halves(torch.nn.Linear):
    """Sum one half of the inputs after the other if a call has an odd number of rows."""

    def forward(self, x):
        n = self.in_features // (1 + len(x) % 2)
        parts = zip(x.float().split(n, 1), self.weight.float().split(n, 1))
        return (sum(some @ weight.T for some, weight in parts) + self.bias).to(x.dtype)


@pytest.mark.parametrize("dtype, d", [(x, 64) for x in TYPES] + [(torch.float32, 4)], ids=str)
def test_another_order_of_summing_shows(dtype, d):
    """In half precision both orders nearly always round to the same bits, and then they do not."""
    torch.manual_seed(0)
    found = [find_size(Halves(d, 8).to(dtype), torch.ones(3, d, dtype=dtype)) for _ in range(20)]
    assert found == [4] * 20


def test_experts_get_one_row():
    """Elsewhere a kernel may be chosen by the number of rows that an expert gets."""
    model, rows = make_invariant(tiny("qwen3-moe")), []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    EngineLM(model).forward([1, 2, 3])
    assert rows == [1, 1, 1]


def test_a_model_whose_rows_depend_on_others_is_refused():
    """Such as one with a layer that knows how many rows there are."""
    model = tiny("llama")
    model.model.layers[0].register_forward_hook(
        lambda layer, args, output: output * (1 + 1e-6 * (output.shape[1] > SIZE)))
    check_refused("^--invariant needs trees with the bits of [^\n]*$", make_invariant, model)


def test_a_model_that_would_compute_something_else_is_refused(monkeypatch):
    """Such as one whose attention has an argument that this attention does not know."""
    monkeypatch.setattr(invariant, "run_double", lambda layer, x: x)
    check_refused("^--invariant changes the logits of Llama", make_invariant, tiny("llama"))


def test_a_short_context_limits_the_proof():
    prove(make_invariant(tiny("gpt2", n_positions=24)), EngineLM)


def test_caps_of_scores_and_of_logits_count():
    """A change that forgot them would compute something else, and be refused."""
    model = tiny("gemma2", attn_logit_softcapping=0.5, final_logit_softcapping=0.5)
    model.set_attn_implementation("eager")  # other attention has no caps in transformers 5.17
    make_invariant(model)


# ------------------------------------------------------------------------------------------ trees

def check_trees(lm: CachedLM, seed: str, nodes=(1, 64), trees: int = 3) -> None:
    """Check the bits of random trees against those of a path each, one row a call."""
    rng, alone = random.Random(seed), type(lm)(lm.model)
    for _ in range(trees):
        n = rng.randint(*nodes)
        ids = [rng.randrange(lm.vocab) for _ in range(n)]
        parents = [-1, *(rng.randrange(i) for i in range(1, n))]
        context = [rng.randrange(lm.vocab) for _ in range(rng.randint(0, CONTEXT - 70))]
        lm.start(context)
        tree = lm.forward(ids, parents)
        alone.start(context[:-1])
        for token in context[-1:]:
            alone.forward([token])
            alone.commit([0])
        for node in path_to(rng.randrange(n), parents):
            assert torch.equal(alone.forward([ids[node]])[0], tree[node]), (n, len(context), node)
            alone.commit([0])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("family", EVERY)
def test_trees_have_the_bits_of_their_paths(family, dtype):
    model = tiny(family).to(dtype)
    if family in REFUSED:
        check_refused("^--invariant needs layers that attend by [^\n]*$", make_invariant, model)
        return
    most = TYPES[EVERY.index(family) % 3] == dtype  # families take turns
    check_trees(EngineLM(make_invariant(model)), f"{family} {dtype}", trees=3 if most else 1)


@pytest.mark.parametrize("dtype", sorted(list_types(), key=str), ids=str)
def test_packed_weights_of_a_copy(dtype, monkeypatch):
    """A model that was packed before, whose copy has ordinary weights, and other bits."""
    monkeypatch.setattr(packed, "LEAST", 0)
    monkeypatch.setattr(packed, "is_faster", lambda layers, tables: True)
    model = make_invariant(pack(tiny("llama").to(dtype)))
    assert is_packed(model)
    for some in model, copy.deepcopy(model):
        check_trees(EngineLM(some), "packed")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gpt-oss"])
def test_passes_of_few_shapes(family, dtype):
    """All slots of their buffers are attended to, and rows are repeated."""
    model = make_invariant(tiny(family).to(dtype), GraphedLM)
    check_trees(GraphedLM(model), family)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("run_as", [EngineLM, GraphedLM])
@pytest.mark.parametrize("family", ["llama", "gemma2-capped", "gpt2", "qwen3", "cohere2"])
def test_a_gpu(family, run_as, dtype):
    """Graphs are captured, too. Experts cannot be captured, so these families have none."""
    check_trees(run_as(make_invariant(tiny(family).to("cuda").to(dtype), run_as)), family)


def test_graphs_of_a_simulated_gpu():
    with FakeCuda() as gpu:
        model = make_invariant(tiny("llama").to("cuda").to(torch.bfloat16), GraphedLM)
        check_trees(GraphedLM(model), "simulated", (9, 16))
    assert gpu.counts["replays"] > 0


# ------------------------------------------------------------------------------------------ texts

def tie_logits(model) -> None:
    """Give each token a twin with nearly its logits: a rounding decides which of both is chosen."""
    head = model.get_output_embeddings().weight.data
    half = len(head) // 2
    noise = 1 + 0.01 * torch.randn(half, head.shape[1], generator=torch.manual_seed(0))
    head[half:2 * half] = head[:half] * noise


@functools.cache
@torch.inference_mode(False)
def model_of(dtype: torch.dtype, changed: bool = True):
    model = tiny("llama", tie_word_embeddings=False)
    tie_logits(model)
    model = model.to(dtype)
    return make_invariant(model) if changed else model


def texts_of(name: str, model, n: int = 40) -> tuple[list[int], list[int]]:
    """Return a method's text, and the autoregressive one of the model that writes it. Its trained
    parts are of the model's type."""
    torch.set_default_dtype(model.dtype)
    try:
        line = METHODS[name](model)
    finally:
        torch.set_default_dtype(torch.float32)
    target = kind_for(line.method, EngineLM)(model)
    found = tokens_of(chunks_of(line, target, PROMPT), n)
    return found, autoregressive_text(line.text_of or model, tuple(PROMPT), n)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "triforce"])
def test_every_method_writes_one_text_in_bfloat16(name):
    """TriForce replaces the attention of the target, and refuses this one."""
    found, expected = texts_of(name, model_of(torch.bfloat16), 24)
    assert found == expected and len({*expected}) > 3


def test_texts_part_without_the_change():
    """Or the test above would show nothing. Without vector instructions a CPU may not need it."""
    lm = EngineLM(model_of(torch.bfloat16, False))
    lm.start(PROMPT)
    tree = lm.forward(range(20), [-1] * 20)
    lm.truncate(len(PROMPT))
    if all(torch.equal(lm.forward([i], [-1])[0], row) for i, row in enumerate(tree)):
        pytest.skip("on this CPU the bits of a row do not depend on the other rows")
    names = ["lookahead", "speculative", "bita", "recycling", "sequoia", "hybrid, n-grams"]
    pairs = [texts_of(name, model_of(torch.bfloat16, False)) for name in names]
    assert sum(found != expected for found, expected in pairs) >= 3


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("how", ["plain", "prompt lookup", "a draft"])
def test_generate_writes_this_text(how, dtype):
    """Masks of `generate` are boolean, or there are none."""
    model, ids = model_of(dtype), torch.tensor([PROMPT])
    options = {"plain": {}, "prompt lookup": {"prompt_lookup_num_tokens": 4},
               "a draft": {"assistant_model": families.near(model, 0.01)}}[how]
    [found] = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40,
                             do_sample=False, eos_token_id=None, pad_token_id=1, **options)
    assert found[len(PROMPT):].tolist() == autoregressive_text(model, tuple(PROMPT), 40)


@pytest.mark.parametrize("family", ["llama", "gpt-oss", "gemma2"])
def test_few_rows_read_many_slots_in_parts(family, monkeypatch):
    """With windows, sinks and caps the bits are those of one part."""
    lm, found = CachedLM(make_invariant(tiny(family))), []
    for part in (1024, 7):
        monkeypatch.setattr(invariant, "PART", part)
        lm.start(range(30))
        found.append(lm.forward(range(5), [-1, 0, 0, 1, 2]))
    assert torch.equal(*found)
