"""These tests take common.py function by function: trees, passes, sampling, loading."""
import collections
import functools
import gc
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import (AutoModelForCausalLM, BloomConfig, MambaConfig, MinPLogitsWarper,
                          MptConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

import common
import jacobi
import speculative as speculative_file
from cli.run import Run
from common import (CachedLM, InputError, Sampler, autoregressive, context_length, eos_ids,
                    greedy, trie, until, walk)
from fake_models import path_to
from families import CONTEXT, FAMILIES, LOOKUPS, MORE_FAMILIES, OTHERS, VOCAB, near, tiny
from helpers import CLOSE, ROOT, file_of, interrupting, run_small, tokens_of
from laws import chi_square_ok
from speculative import speculative
from support.engine import EngineLM
from support.graphs import GraphedLM
from support.loading import check, load
from survey.another_tokenizer import another_tokenizer

LOOSE = dict(atol=1e-3, rtol=1e-3)  # states add up over a text, on each CPU in another order
BOTH = pytest.mark.parametrize("run_as", [EngineLM, GraphedLM])
ALL = [*FAMILIES, *MORE_FAMILIES, *OTHERS]
FEW = ("llama", "gpt2", "gemma3", "gpt-oss", "deepseek-v3")  # as graphs: one of each kind of mask


@torch.inference_mode()
def alone(model, *texts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logits and the features after each text, without a cache, tree or mask of ours.

    Shorter texts are padded at the end, and none of their tokens looks at the padding. Features are
    what the LM head reads.
    """
    longest, read = max(map(len, texts)), []
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=model.device)
    with model.get_output_embeddings().register_forward_pre_hook(lambda _, x: read.append(x[0])):
        logits = model(input_ids=ids, use_cache=False).logits
    ends = torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])
    return logits[ends], read[0][ends]


def buffers_of(lm) -> list[torch.Tensor]:
    return [buffer for pair in lm.cache.layers.values() for buffer in pair]


# ------------------------------------------------------------------------------------- trees

def test_trie_merges_equal_prefixes_and_walk_follows_what_the_target_chose():
    ids, parents, paths = trie(9, [[1, 2, 3], [1, 2, 4], [2, 1], [1, 2, 3, 6], []])
    assert ids == [9, 1, 2, 3, 4, 2, 1, 6] and parents == [-1, 0, 1, 2, 2, 0, 5, 3]
    assert paths == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 5, 6], [0, 1, 2, 3, 7], [0]]
    assert walk(ids, parents, [1, 2, 4, 8, 7, 8, 8, 8]) == ([0, 1, 2, 4], [1, 2, 4, 7])
    assert walk(ids, parents, [5, 3, 7, 8, 7, 8, 8, 8]) == ([0], [5])


# ------------------------------------------------------------------------- the model's passes

def grow(lm, rng, context: list[int], ids: list[int]) -> None:
    """Add random nodes to the pending tree `ids`; check their logits and features against those of
    their paths.

    They are fed as tokens or embeddings, as a chain or not, with the LM head on some or on all.
    The place of what a row predicts is how many tokens come before.
    """
    n, old = rng.randint(1, 9), len(ids)
    parents, deep = None, rng.random()
    if rng.random() < 0.8:  # with a large `deep` long paths are likely
        parents = [i - 1 if rng.random() < deep and i else rng.randrange(-1, i)
                   for i in range(old, old + n)]
    tokens = fed = rng.choices(range(VOCAB), k=n)
    if rng.random() < 0.3:
        fed = lm.model.get_input_embeddings()(torch.tensor(tokens, device=lm.model.device)).detach()
    keep = rng.choice([None, 0, 1, n])
    logits = lm.forward(fed, parents, keep=keep)
    ids += tokens
    assert logits.shape == (n if keep is None else keep, VOCAB)
    assert lm.parents[old:] == list(range(old - 1, old + n - 1) if parents is None else parents)
    texts = [context + [ids[j] for j in path_to(i, lm.parents)] for i in range(old, old + n)]
    assert lm.places == [len(text) for text in texts[n - len(logits):]]
    expected, features = alone(lm.model, *texts)
    close = LOOSE if getattr(lm, "recurrent", False) else CLOSE
    torch.testing.assert_close(logits, expected[n - len(logits):], **close)
    if isinstance(lm, EngineLM):
        torch.testing.assert_close(lm.features, features, **close)


@pytest.mark.parametrize("name, run_as", [*((name, EngineLM) for name in ALL),
                                          *((name, kind) for name in FEW
                                            for kind in (CachedLM, GraphedLM))])
def test_random_trees_equal_their_paths_and_the_cache_a_fresh_one(name, run_as):
    """One model with a cache does it all, so that what earlier trees left in its buffers must reach
    nothing."""
    rng, model = random.Random(1), tiny(name)
    lm = run_as(model)
    for length in (30, 0, 4):  # less than a sliding window, and more
        context = rng.choices(range(VOCAB), k=length)
        lm.start(context + [7, 7])
        lm.truncate(length)
        for _ in range(3):
            ids = []
            for _ in range(rng.randint(1, 3)):
                grow(lm, rng, context, ids)
            if rng.random() < 0.8:
                path = path_to(rng.randrange(len(ids)), lm.parents)[:rng.randint(0, 9)]
                lm.commit(path)
                context = context + [ids[j] for j in path]
            if lm.parents or rng.random() < 0.5:
                context = context[:rng.randint(len(context) // 2, len(context))]
                lm.truncate(len(context))
            assert lm.length == len(context) and lm.parents == []
            fresh = EngineLM(model)
            fresh.start(context)
            for own, other in zip(buffers_of(lm), buffers_of(fresh)):
                torch.testing.assert_close(own[:, :, :lm.length], other[:, :, :lm.length], **CLOSE)


class Quantised(torch.nn.Parameter):
    """It is a weight that cannot be used in inference mode, as those of quanto."""
    __tensor_flatten__ = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), options=None):
        assert not torch.is_inference_mode_enabled()
        return super().__torch_function__(function, types, args, options or {})


@pytest.mark.parametrize("kind", [CachedLM, EngineLM])
def test_quantised_weights_need_no_inference_mode(kind):
    model, expected = tiny("llama"), tokens_of(autoregressive(kind(tiny("llama")), [3, 1, 4]), 9)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = Quantised(layer.mlp.up_proj.weight)
    lm = kind(model)
    assert tokens_of(autoregressive(lm, [3, 1, 4]), 9) == expected
    assert tokens_of(jacobi.prompt_lookup(lm, [3, 1, 4]), 9) == expected


LOADED = functools.cache(common.load)


@pytest.fixture
def small(models, embedded, monkeypatch, capsys, tmp_path):
    """Run a file by the command line of common.py; return its status, stdout and stderr. The draft
    has a context of 20 tokens, and no tokenizer of the embedded models has a template for chats."""
    tokenizer = embedded[2]
    draft = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=20)
    for part in draft, tokenizer:
        part.save_pretrained(tmp_path)
    monkeypatch.setattr(common, "load", LOADED)

    def small(*argv, file=speculative_file):
        capsys.readouterr()
        roles = ["--target", models[1], *["--draft", str(tmp_path)] * (file is speculative_file)]
        return run_small(file, [*roles, *argv]), *capsys.readouterr()
    return small


def test_the_small_command_line_ends_with_the_shortest_context(small, embedded):
    text = "Tom has 3 apples."
    assert f"{20 - len(embedded[2].encode(text))} tokens in " in small("--prompt", text)[2]


def test_the_small_command_line_prints_all_blanks_and_characters(small, embedded, monkeypatch):
    """The tokens are bytes of text with indents and with characters of several bytes. All ids
    count, even if some are missing below them."""
    target, _, tokenizer = embedded
    text = "def f(x):\n    if x:\n        return 'é 🍐'\n"
    ids, seen = tokenizer.encode(text), []

    def say(target: CachedLM, prompt, *, sample=greedy, log=None):
        seen.append(target.vocab)
        yield from ([token] for token in ids * 2)
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda _: {"a": 0, "b": 300})
    assert small(*SHORT[:3], str(len(ids)), file=file_of(say))[1] == text
    assert seen == [301]


SHORT = ["--prompt", "Tom", "--max-new-tokens", "3"]
MISTAKES = {  # command lines, and what is said of each
    "surrogates not allowed$": [speculative_file, "--prompt", "\udc80"],
    "strictly positive float": [speculative_file, *SHORT, "--temperature", "-1"],
    "numbers, got nan or infinity .* 1e-40$": [speculative_file, *SHORT, "--temperature", "1e-40"],
    "got models/nowhere": [jacobi, *SHORT, "--target", "models/nowhere"],
    "expected a model .* device": [speculative_file, *SHORT, "--device", "nope"],
    "expected 1 new token or more, got -[0-9]+ .room: -[0-9]+.$": [
        speculative_file, "--prompt", "apples " * 40],
    "chat_template is not set": [speculative_file, *SHORT, "--chat"],
    "unrecognized arguments: --W 3$": [jacobi, *SHORT, "--W", "3"],
    "invalid choice: 'nope'": [jacobi, "--method", "nope"]}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_on_the_small_command_line_are_named_in_one_line(small, said):
    file, *argv = MISTAKES[said]
    status, out, err = small(*argv, file=file)
    assert (status, out, err.count("\n")) == (2, "", 1) and re.search(said, err), err


@pytest.mark.parametrize("text, prompts", [
    ('\ufeff{"prompt": "a"}\nb\u2028\n\n', ["a", "b\u2028"]), ('{"prompt": 5}', []), ("\n", []),
    ('{"text": "a"}', []), ('{"prompt": "a"}\n{"prompt": null}', [])])
def test_a_command_gets_the_prompts_of_a_file(models, tmp_path, capsys, text, prompts):
    """A file that begins with a mark, as editors of Windows write it, has the same prompts."""
    file, given = tmp_path / "prompts", []
    file.write_text(text, encoding="utf-8")

    def ask(model, tokenizer, prompts: list[list[int]], *, seed: int = 0):
        given.extend(tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts)
    argv = ["ask", "--target", models[1], "--prompts", str(file)]
    assert run_small(file_of(commands=[ask]), argv) == (0 if prompts else 2) and given == prompts
    assert prompts or 'expected a "prompt" on each line' in capsys.readouterr().err


def test_the_small_command_line_stops(small, monkeypatch):
    monkeypatch.setattr("common.encode", interrupting(lambda *_: None, 1))
    assert small(*SHORT) == (130, "", "")


@pytest.mark.parametrize("run_as", [CachedLM, GraphedLM])
def test_buffers_double_and_nothing_else_grows(run_as):
    """The buffers are renewed a few times for 500 tokens in 125 calls. They never have more than
    twice the slots that were used, and the number of tensors, lists and other objects stays."""
    lm = run_as(tiny("llama", max_position_embeddings=600))
    lm.start([3, 4])
    sizes, before = [], None
    while lm.length < 498:
        lm.forward([5, 6, 7, 8, 9, 10], [-1, 0, 0, 2, 3, 1])
        used = lm.length + 6
        for buffer in buffers_of(lm):  # two key heads, a head size of 8, float32
            assert buffer.untyped_storage().nbytes() == buffer.shape[2] * 2 * 8 * 4
        sizes.append(buffers_of(lm)[0].shape[2])
        assert used <= sizes[-1] <= (2 * used if run_as is CachedLM else 3 * used + 300)
        lm.commit([0, 2, 3, 4])
        if lm.length == 202:
            before = collections.Counter(map(type, gc.get_objects()))
    gc.collect()
    grown = collections.Counter(map(type, gc.get_objects())) - before
    assert max(grown.values(), default=0) < 100, grown
    assert len({*sizes}) < 12 and sizes == sorted(sizes)


# -------------------------------------------------------------------------------------- misuse

WRONG = {
    "no node": lambda lm: lm.forward([]),
    "a parent too few": lambda lm: lm.forward([4, 5], [-1]),
    "its own parent": lambda lm: lm.forward([4, 5], [-1, 4]),
    "a parent below -1": lambda lm: lm.forward([4, 5], [-1, -2]),
    "an unknown token": lambda lm: lm.forward([4, VOCAB]),
    "Ctrl-C in the second layer": lambda lm: lm.forward([4, 5]),
    "a path from below": lambda lm: lm.commit([2]),
    "a path of siblings": lambda lm: lm.commit([0, 1]),
    "a path of no node": lambda lm: lm.commit([-1]),
    "a path beyond the tree": lambda lm: lm.commit([0, 9]),
    "a length that is too large": lambda lm: lm.truncate(4),
    "a negative length": lambda lm: lm.truncate(-1),
    "a prompt too long": lambda lm: lm.start([9] * (CONTEXT + 1))}


@BOTH
@pytest.mark.parametrize("wrong", WRONG)
def test_a_call_that_fails_changes_nothing(wrong, run_as):
    """After the error the next calls give what they would have given, to the last bit."""
    model = tiny("llama")
    lm, fresh = run_as(model), run_as(model)
    for each in (lm, fresh):
        each.start([1, 2, 3])
        each.forward([4, 5, 6], [-1, -1, 0])
    known = lm.calls, [*lm.passes], lm.length, lm.parents

    def interrupt(*_):  # when the first layer has written its rows
        if "Ctrl-C" in wrong:
            raise KeyboardInterrupt
    outside = "Ctrl-C" in wrong or "token" in wrong  # raised by Python or torch
    with model.model.layers[1].register_forward_pre_hook(interrupt), pytest.raises(
            (KeyboardInterrupt, IndexError) if outside else ValueError,
            match=None if outside else "^expected .*, got"):
        WRONG[wrong](lm)
    assert (lm.calls, lm.passes, lm.length, lm.parents) == known
    ours, theirs = (each.forward([6, 4], [1, -1]) for each in (lm, fresh))
    assert torch.equal(ours, theirs)
    for each in (lm, fresh):
        each.commit([1, 3])
    assert torch.equal(lm.forward([4]), fresh.forward([4]))


BEGIN = {  # with a CachedLM of a tiny Llama
    r"token ids below 61, got \[\[3, 1\]\]$": lambda lm: autoregressive(lm, torch.tensor([[3, 1]])),
    r"token ids below 61, got \['T'": lambda lm: autoregressive(lm, "Tom"),
    r"token ids below 61, got \[3, 61\]$": lambda lm: autoregressive(lm, [3, 61]),
    r"token ids below 61, got \[-1\]$": lambda lm: autoregressive(lm, [-1]),
    "one of them twice$": lambda lm: speculative(lm, lm, [3]),
    "own, got the target's$": lambda lm: another_tokenizer(lm, lm, [3], tokenizers=[]),
    "a draft of 61 tokens, got 45": lambda lm: speculative(
        lm, CachedLM(tiny("llama", vocab_size=45)), [3]),
    "eval mode": lambda lm: lm.model.train() and autoregressive(lm, [3]),
    "still in torch.float32": lambda lm: lm.model.half() and autoregressive(lm, [3])}


@pytest.mark.parametrize("said", BEGIN)
def test_what_no_method_can_begin_with(said):
    with pytest.raises(InputError, match=f"^(expected|--draft must) .*{said}"):
        next(BEGIN[said](EngineLM(tiny("llama", 3))))


@pytest.mark.parametrize("run_as", [CachedLM, EngineLM, GraphedLM])
@pytest.mark.parametrize("family", LOOKUPS)
def test_layers_that_look_up_more_of_a_token_are_not_fed_its_embedding(family, run_as):
    model = tiny(family)
    lm, fresh = run_as(model), run_as(model)
    with pytest.raises(InputError, match="fed by embeddings, got Gemma"):
        lm.forward(model.get_input_embeddings()(torch.tensor([5, 7])))
    torch.testing.assert_close(lm.forward([5, 7]), fresh.forward([5, 7]), **CLOSE)


def test_a_draft_serves_targets_of_several_sizes():
    """And then it is a target of its own size."""
    draft, other, text = CachedLM(tiny("llama")), CachedLM(tiny("llama")), [3, 9, 4]
    for vocab in 20, VOCAB, 30:
        tokens_of(speculative(CachedLM(tiny("llama"), vocab), draft, text), 8)
        assert draft.vocab == vocab
    next(speculative(draft, other, text))
    assert draft.vocab == other.vocab == VOCAB


# ------------------------------------------------------------------------------------ sampling

@pytest.mark.parametrize("temperature, top_k, top_p, min_p", [
    (1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.3), (1.5, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0),
    (0.5, 20, 0.9, 0.1), (2.0, 1, 0.3, 0.0), (1.0, 99, 0.05, 0.0), (1.0, 3, 0.6, 0.0)])
def test_probs_equal_transformers_warpers(temperature, top_k, top_p, min_p):
    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    expected = logits
    for warp in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k or 40),
                 TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
        expected = warp(None, expected)
    sample = Sampler(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    torch.testing.assert_close(sample.probs(logits), expected.softmax(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sample.probs(logits[3]), expected[3].softmax(-1))  # [V] alone
    assert sample.probs(logits.bfloat16()).dtype == torch.float32


def test_the_smallest_and_the_largest_temperature():
    """They are next to greedy and next to uniform, without overflow."""
    logits = 1e4 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    for cold in greedy, Sampler(1e-6), Sampler(temperature=0, top_k=3, seed=1):
        draws = cold.draw(cold.probs(logits)).tolist()
        assert cold(logits, range(50)) == draws == logits.argmax(-1).tolist()
    assert (Sampler(1e6).probs(logits) - 1 / 40).abs().max() < 2e-3


def test_numbers_are_fine_enough_for_rare_tokens():
    """Numbers of float32 have steps of 2⁻²⁴: a token of 1e-8 would never come, or as often as one
    of 6e-8. The first tokens of a larger vocabulary have the numbers of a smaller one."""
    times = Sampler().times(3, 10 ** 6, torch.device("cpu"))
    steps = 2 ** 24 * -torch.expm1(-times[times < 1e-3].double())
    assert len(steps) > 900 and ((steps - steps.round()).abs() > 0.01).float().mean() > 0.9
    assert torch.equal(Sampler().times(3, 7, torch.device("cpu")), times[:7])
    assert Sampler().uniform((9,), torch.device("cpu")).dtype == torch.float64


def test_samples_have_their_distribution():
    """Those of a place, of the next place and of another seed are independent. So are the draws
    that papers' rules make of two rows. Odds of draws need not sum to 1. Seeds below 0 count."""
    p, N = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]), 20000
    one, two = (torch.tensor(Sampler(seed=seed)(p.log().repeat(N, 1), range(N))) for seed in (5, 6))
    draws = Sampler(seed=5).draw(3 * p.repeat(3 * N, 1)).view(3, N)
    expected = (p[:, None, None] * p[:, None] * p).flatten()
    for a, b, c in (one[:-1], one[1:], two[:-1]), draws:
        counts = (25 * a + 5 * b + c).bincount(minlength=125)
        assert chi_square_ok(counts, expected) and counts[expected == 0].sum() == 0
    texts = {str(Sampler(seed=seed)(torch.zeros(9, 99), range(9))) for seed in (-2, -1, 0, 2 ** 32)}
    assert len(texts) == 4


# ------------------------------------------------------------------------------------ decoding

@pytest.mark.parametrize("limit, eos, expected, accepted, cut", [
    (0, [], [], [], []), (4, [], [[1], [2, 3, 4]], [0, 2], [False, False]),
    (3, [], [[1], [2, 3]], [0, 2], [False, True]), (9, [3, 2], [[1], [2]], [0, 1], [False, True]),
    (9, [6], [[1], [2, 3, 4], [5, 6]], [0, 2, 1], [False] * 3)])
def test_text_is_cut_at_eos_and_at_the_limit(limit, eos, expected, accepted, cut):
    """What is cut off counts as accepted no longer. This changes the last record alone, and says
    that it is cut."""
    def chunks(log, **_):
        for chunk in [1], [2, 3, 4], [5, 6]:
            log.append({"guessed": 2, "accepted": len(chunk) - 1})
            yield chunk
        raise AssertionError("asked for more than was needed")
    run = Run(chunks, {}, {}, eos)
    assert [*run.decode([0], limit, greedy)] == [*until(chunks([]), limit, eos)] == expected
    assert [r["accepted"] for r in run.log] == accepted
    assert [r.get("cut", False) for r in run.log] == cut


@pytest.mark.parametrize("listed, said, ends", [
    (None, 2, {2}), (3, 2, {2, 3}), ([3, 4], 2, {2, 3, 4}), (3, None, {3}), (None, None, set())])
def test_an_answer_ends_by_the_tokenizer_and_by_the_settings(listed, said, ends):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=listed))
    assert eos_ids(model, SimpleNamespace(eos_token_id=said)) == ends


# ------------------------------------------------------------------------------------- loading

ROPES = {"longrope": dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4),
         "dynamic": {}, "llama3": dict(low_freq_factor=1.0, high_freq_factor=4.0)}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_embeddings_that_change_with_the_length(kind):
    """Beyond its first length LongRoPE turns all keys another way, cached ones too, so the context
    ends there. The others do so beyond the context, or never."""
    rope = dict(rope_type=kind, rope_theta=10000.0, factor=2.0, **ROPES[kind])
    if kind != "dynamic":
        rope["original_max_position_embeddings"] = 64
    model = tiny("llama", rope_parameters=rope)
    length = 64 if kind == "longrope" else CONTEXT
    assert context_length(model) == length
    text = [i * i % VOCAB for i in range(length)]
    expected, _ = alone(tiny("llama", rope_parameters=rope), text)
    lm = CachedLM(model)
    lm.start(text[:-1])
    torch.testing.assert_close(lm.forward(text[-1:]), expected, **CLOSE)


make = AutoModelForCausalLM.from_config
SMALL = dict(vocab_size=61, hidden_size=32)
TREES = "trees equal their paths"
TAKES = "takes positions, a mask and a cache, got .*: "
REFUSED = {
    "Bloom": (TAKES, lambda: make(BloomConfig(**SMALL, n_layer=2, n_head=4))),
    "MPT": (TREES, lambda: make(MptConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4))),
    "Mamba": ("Mamba-2, .* got linear_attention of MambaForCausalLM",
              lambda: make(MambaConfig(**SMALL, num_hidden_layers=1))),
    "a nan": (TREES + ".* off by nan", lambda: near(tiny("gpt2"), math.nan))}


@BOTH
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_a_tree_would_get_wrong_are_refused(name, run_as):
    torch.manual_seed(0)
    said, make_model = REFUSED[name]
    with pytest.raises(InputError, match=f"^expected .*{said}") as raised:
        check(make_model(), run_as)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", None])
def test_load_in_a_type(dtype):
    """On a CPU float32 is the default; the cache has the type of the model."""
    model, tokenizer = load(ROOT / "models/draft", "cpu", dtype)
    wanted = getattr(torch, dtype or "float32")
    assert model.dtype == wanted and not model.training
    assert model.config._attn_implementation == "grouped"
    lm, ids = CachedLM(model), tokenizer("Mia has 3 apples and 4 pears.")["input_ids"]
    assert lm.forward(ids).dtype == wanted and {b.dtype for b in buffers_of(lm)} == {wanted}
