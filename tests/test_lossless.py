"""Every lossless method gives the target's own output, greedy or sampled, token by token. This is
the page to open first if you doubt it.

It proves that for tiny random models in float32. The exact methods of the six files run over 19
families. Others that read more of a model than logits run over 14, and the rest over four. It does
not prove that a trained part guesses well, that anything is fast, or that half precision rounds
alike. The tests of the single methods check that each of them is its paper's method. That text is
cut rightly at a limit or at the end of an answer is in test_common.py.

METHODS of methods.py is the one table. A line says how a method is run on a tiny random model. The
tests take each line through these columns, on a CPU or, with
`pytest --device cuda tests/test_lossless.py`, on a GPU:

    text                 equals autoregressive text, greedy and of a seed, at temperatures of 0.7 to
                         1.5 with top-k and top-p. The greedy one goes to the last token of the
                         context, past which the last guesses reach. It also follows a prompt that
                         is cached in parts
    several prompts      are served one after the other, and a sampled text ends with its EOS
    autoregressive text  equals that of transformers' own generate
    no caches            guesses and acceptances are those of models without a cache (naive.py),
                         where guesses are often accepted. And nothing stale is left of earlier
                         rounds: a method that begins anew with the text so far guesses the same
    passes of few shapes give the same text (support/graphs.py)
    a GPU                writes the CPU's text, and so do its captured graphs: a simulated GPU
                         (fake_cuda.py), and the real one where there is one
    perfect drafts       are accepted whole: a guess that is right is never lost
    planned trees        are learnt from in each round, which is one call of the target
    broken drafts        change no token, even if guesses and features are no finite numbers
    rules of papers      by enumeration of every draw and every coin that a method can meet, not by
                         statistics: the probability of every text of three tokens is the target's.
                         That the Sampler's own law is p is in test_common.py

A new method joins by one line. MJSD, MJGD, BiLD and Medusa's typical acceptance are lossy, so only
their rounds are compared (LOSSY). BiLD and SpecDec are also here with the options that make them
exact in greedy decoding."""
import copy
import functools
import random
from contextlib import nullcontext, suppress

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import bita
import families
from cli.run import kind_for
from common import CachedLM, InputError, Sampler, autoregressive, greedy
from fake_cuda import FakeCuda
from families import FAMILIES, MORE_FAMILIES, OTHERS, RECURRENT, SMALL, rand, tiny
from helpers import check_refused, take, tokens_of
from laws import WARM, Choosing, draw_by_choices, law, outcomes
from methods import (END, LOSSY, METHODS, PROMPT, Line, autoregressive_text, chunks_of,
                     play_rounds)
from naive import NaiveLM
from sources import FILES, functions_of
from support.engine import EngineLM
from support.graphs import GraphedLM
from support.trees import RANKS, TRIALS, Acceptance
from survey import (dflash, draft_verify, eagle, eagle3, early_exit, lossy, medusa, mtp, online,
                    sequoia, triforce)
from toy_tokenizers import TOKENIZERS

ALL = FAMILIES | MORE_FAMILIES
# Four families have all that a method can meet that only feeds tokens and reads logits: rotary
# positions, positions from a table, layers with windows, and a layer with a state. They suffice as
# well for a method that reads of a model what another one reads too: LayerSkip as an early exit,
# PaSS and SPACE as BiTA. That each kind of state is that of a path is in test_common.py. But SIX,
# which users copy and readers ask about, run over all families.
FOUR = ["llama", "gpt2", "gemma3", "qwen3.5"]
SIX = ["speculative", "jacobi", "lookahead", "prompt_lookup", "ouroboros", "cllm"]
# A method that reads more than logits runs over these: one of the families with the same parts.
PARTS = [x for x in ALL if x not in ("qwen2", "mistral", "phi3", "cohere2", "qwen3-moe")]
READING = [bita, dflash, draft_verify, eagle, eagle3, early_exit, medusa, mtp, triforce]
SAMPLERS = [  # families take turns. Without coupling papers' rules have other texts
    Sampler(temperature, top_k=top_k, top_p=top_p, seed=seed, coupling=True)
    for seed, (temperature, top_k, top_p) in enumerate([
        (0.7, 20, 1.0), (1.5, 20, 0.9), (0.7, 0, 0.9), (1.5, 0, 0.9), (1.0, 0, 1.0)])]
SAMPLED = SAMPLERS[1]


REFUSED = {  # families that a method says it cannot run
    "bita": ["deepseek-v3", *RECURRENT], "bita, full tree": [*RECURRENT], "pass": [*RECURRENT],
    "triforce": ["gemma2", "stablelm", "gpt-oss", *RECURRENT],
    "early_exit": ["gpt2", "opt", "granite4"], "layerskip": ["gpt2"]}


# ------------------------------------------------------------------------------------ greedy text

@functools.cache
def model_of(family: str, device: str = "", context: int = END, **changes):
    """Make the model of a family, on a device: that of pytest's option --device, or another."""
    return tiny(family, max_position_embeddings=context, **changes).to(device or families.DEVICE)


def check_text(line: Line, model, prompt: list[int], n: int, run_as: type = EngineLM,
               sample: Sampler = greedy) -> None:
    """Check n tokens against autoregressive ones of the same seed."""
    expected = autoregressive_text(line.text_of or model, tuple(prompt), n, sample)
    target = kind_for(line.method, run_as)(model)
    assert tokens_of(chunks_of(line, target, prompt, run_as, sample=sample), n) == expected


LINES = {name: line(model_of("llama")) for name, line in METHODS.items()}  # to see, not to run


def list_rows() -> list[tuple[str, str]]:
    """List each method with the families that it is run over."""
    rows, reading = [], {module.__name__ for module in READING}
    for name in METHODS:
        file = LINES[name].method.__module__
        over = ALL if name in [*SIX, "bita"] else PARTS if file in reading else FOUR
        rows += [(name, family) for family in over]
        reading.discard(file)  # its other lines have nothing more that depends on the family
    return rows


def test_every_method_has_a_line():
    """A method that is in no table here could accept every guess, and no test would notice."""
    every = {method for name in FILES for method in functions_of(name)[0]}
    missing = every - {line(model_of("llama")).method for line in (METHODS | LOSSY).values()}
    assert missing == set(), (f"{missing}: add a line to METHODS of tests/methods.py, or to LOSSY. "
                              "survey/README.md, \"A new method\", has all steps")


@pytest.mark.parametrize("name, family", list_rows())
def test_text_is_autoregressive_text(name, family, monkeypatch):
    """Texts are longer than any window. Llama's are greedy and sampled, and other families take
    turns: a sampler sees nothing of a family. In some families there are two more greedy texts.
    One follows a prompt of one token. The other goes to the last token of the context, where tables
    of positions end, and its prompt is cached in parts, with its windows and states."""
    model = model_of(family)
    if family in REFUSED.get(name, []):
        either = family == "gemma2"  # transformers 5.17 lets TriForce replace its attention
        with suppress(InputError) if either else pytest.raises(InputError):
            check_text(METHODS[name](model), model, PROMPT, 16)
        return
    line = METHODS[name](model)
    number, far = [*ALL].index(family), family in ["gpt2", "opt", "gemma3", "qwen3.5"]
    samples = [greedy, SAMPLERS[number % len(SAMPLERS)]]
    if line.method is lossy.specdec:
        samples = [greedy]
    elif family != "llama":
        turn = 1 if far else (number + [*METHODS].index(name)) % 2
        samples = [samples[turn]]
    for sample in samples:
        check_text(line, model, PROMPT, 16 if family == "llama" else 10, sample=sample)
    if far:
        monkeypatch.setattr(CachedLM, "PART", 16)
        check_text(line, model, [2] * (END - 5), 5)
        check_text(line, model, [5], 4)


@pytest.mark.parametrize("family", [*ALL, *OTHERS])
def test_autoregressive_text_is_that_of_transformers(family):
    """Also where a window is a stray key of the configuration, which the family does not use."""
    context = 26  # a longer text would show no more than this one, of nearly three windows
    model = model_of(family, context=context)
    check_generate(EngineLM(model_of(family, context=context, sliding_window=9)), model, context)


def check_generate(lm: CachedLM, model, context: int = END) -> None:
    """Compare autoregressive text with what transformers' own generate writes."""
    n = context - len(PROMPT)
    ids = torch.tensor([PROMPT], device=families.DEVICE)
    # Without a mask `generate` would hide the prompt's tokens that look like padding.
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n,
                              do_sample=False, eos_token_id=None, pad_token_id=1)[0, 3:].tolist()
    assert tokens_of(autoregressive(lm, PROMPT), n) == expected and len({*expected}) > 3


def test_a_window_that_a_configuration_makes_of_another_setting_counts():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "modernbert-decoder", **SMALL | dict(num_hidden_layers=3), hidden_size=32,
        intermediate_size=48, local_attention=9, global_attn_every_n_layers=2)).eval()
    for p in rand(model.to(families.DEVICE), 0.3).parameters():
        p.data = p if p.ndim == 2 else torch.ones_like(p)
    check_generate(CachedLM(model), model)


@pytest.mark.parametrize("name", METHODS)
def test_a_model_serves_one_method_after_another(name):
    """Nothing is left of one that was stopped in the middle. A prompt may be a tensor, and must
    have a token. A sampled text ends with its EOS, also within a chunk."""
    model = model_of("llama")
    line, run_as = METHODS[name](model), functools.cache(EngineLM)  # each draft once
    target = kind_for(line.method, EngineLM)(model)
    sample = greedy if line.method is lossy.specdec else SAMPLED
    first, second, third = (chunks_of(line, target, prompt, run_as, sample=sample)
                            for prompt in (PROMPT, torch.tensor([5, 2]), []))
    next(first)
    expected = autoregressive_text(line.text_of or model, (5, 2), 9, sample)
    assert tokens_of(second, 9, expected[7:8]) == expected[:expected.index(expected[7]) + 1]
    assert target.memo.get("writer", model) is (line.text_of or model)
    check_refused(r"1 or more token ids below \d+, got \[\]", next, third)


# ---------------------------------------------------------------- no caches, passes of few shapes

# Methods that remember more than the text: guesses of the last call, phrases, or rejected tokens.
REMEMBERING = {"jacobi", "lookahead", "cllm", "ouroboros", "bita", "bita, full tree", "space",
               "recycling", "another_tokenizer"}
@pytest.mark.parametrize("name", sorted({*METHODS, *LOSSY} - {"triforce"}))
def test_rounds_are_those_without_caches(name, monkeypatch):
    """A mistake of a mask, a position or a row changes a guess. TriForce is about parts of a cache,
    so it cannot do without. A position that is off by one everywhere shows with GPT-2's table. Of
    seven tokens guesses are often right, so a round follows on many accepted paths. Nothing is left
    of an earlier prompt. Heads guess no row that is no token."""
    family = "llama" if "gpt2" in REFUSED.get(name, []) else "gpt2"
    model = model_of(family, context=120, vocab_size=8, seed=4)
    prompt, earlier = [i ** 3 // 3 % 7 for i in range(20)], [5, 2, 2, 6, 1] * 4
    # A method that begins anew has learnt nothing of its trees.
    monkeypatch.setattr(Acceptance, "learn", lambda *_, **__: None)
    with monkeypatch.context() as patch:
        patch.setattr(CachedLM, "PART", 16)
        found = play_rounds(name, model, prompt, EngineLM, earlier=earlier)
    monkeypatch.setattr(online, "EngineLM", NaiveLM)  # the draft that learns
    assert play_rounds(name, model, prompt, NaiveLM, anew=name not in REMEMBERING) == found
    if name.startswith(("dflash", "eagle", "hydra", "medusa", "mtp")):
        assert max(max(ids) for fed, *_ in found for ids, _ in fed) < 7
    own = 2 if name == "pass" else 1  # tokens of a round that no guess made
    assert all(log.get("accepted", len(chunk) - own) == len(chunk) - own for _, chunk, log in found)
    accepted = sum(len(chunk) > 1 for _, chunk, _ in found)
    assert accepted > 0 or name in ("bild, rollback 0", "another_tokenizer")


@pytest.mark.parametrize("name", sorted({*METHODS} - {"triforce"}))
def test_greedy_text_in_passes_of_few_shapes(name):
    """Up to the end of the context: there the passes that are filled up reach furthest beyond.
    TriForce reaches into a pass, and is refused (test_cli.py)."""
    model = model_of("llama" if name in ("early_exit", "layerskip") else "gpt2")
    check_text(METHODS[name](model), model, PROMPT * 10, 10, GraphedLM)


# ------------------------------------------------------------------------------ planned trees

@pytest.mark.parametrize("name", [*(x for x in LINES if "nodes" in LINES[x].options), "space"])
def test_trees_are_learnt_from_and_no_call_is_made_to_be_timed(name, monkeypatch):
    """Accepted guesses count as right. A round is one pass of the target, even if the clock chooses
    the tree, which may have no guess. No tree has more nodes than were asked for."""
    model, made = model_of("gpt2", context=120, vocab_size=8, seed=1), []
    begin = Acceptance.__init__
    monkeypatch.setattr(Acceptance, "__init__", lambda self, *given, **how: begin(
        self, *given, **how) or made.append((self, sum(self.hits))))
    for more in {}, {"k" if name == "space" else "nodes": 0}:
        made.clear()
        line, log, passes = METHODS[name](model), [], []
        target = kind_for(line.method, EngineLM)(model)
        chunks = chunks_of(line, target, PROMPT, log=log, **more)
        next(chunks)  # what files hold is checked
        writer = target.memo.get("writer", model)
        with writer.register_forward_pre_hook(lambda *_: passes.append(0)):
            take(chunks, 8)
        assert len(log) == target.calls == len(target.passes) - 1 == len(passes) + 1 == 9
        most = line.options.get("nodes", 99) - 1  # the root is a node, too
        assert more or max(x["guessed"] for x in log) <= most
        if not name.startswith("hybrid"):  # its chances are those of its guessers
            [(learnt, hits)] = made
            assert sum(learnt.hits) == pytest.approx(hits + sum(x["accepted"] for x in log))
            assert more or learnt.tried[0] > TRIALS
            if name == "space":  # its masks are no guesses
                assert sum(learnt.tried) == RANKS * TRIALS + sum(
                    min(x["guessed"], 1 + x["accepted"]) for x in log)


# ---------------------------------------------------------------------------------- a GPU

ALIKE = {  # methods all of whose tensors another line of their file makes, too
    "speculative, unsure", "specinfer", "bita, full tree", "suffixdecoding", "hybrid, n-grams",
    "hybrid, mtp"}


def texts_on(device: str, name: str, run_as=EngineLM) -> list[list[list[int]]]:
    """Write two chunks of a greedy text and one of a sampled one, with all models on a device. The
    second round goes on from what the first one kept."""
    model = model_of("llama", device)
    line = METHODS[name](model)
    kind = kind_for(line.method, run_as)
    return [take(chunks_of(line, kind(model), PROMPT, run_as, sample=sample), n)
            for sample, n in ((Sampler(0), 2), (Sampler(0.7, seed=1), 1))]


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.cuda)],
                         ids=["simulated", "real"])
@pytest.mark.parametrize("name, run_as", [
    *((name, EngineLM) for name in METHODS if name not in ALIKE),
    *((name, GraphedLM) for name in ("speculative", "bita", "eagle", "dflash", "draft_verify"))])
def test_a_gpu_writes_the_text_of_the_cpu(name, run_as, real):
    """It refuses a mask or an index that was left on the CPU, and so on. All that changes from call
    to call must be an input of a captured graph, since a replay is blind."""
    if not real and families.DEVICE != "cpu":
        pytest.skip("a simulated GPU takes models of the CPU")
    likeliest, sampled = texts_on("cpu", name)
    with nullcontext() if real else FakeCuda() as gpu:
        found = texts_on("cuda:0" if real else "cuda", name, run_as)  # so each has its own models
    assert found[0] == likeliest and len(found[1]) == 1
    if not real:  # a real GPU has other random numbers, and counts nothing
        assert found[1] == sampled
        assert gpu.counts["launches"] > 100 or gpu.counts["replays"] > 4


# --------------------------------------------------------------------------------- perfect drafts

PERFECT = {  # where the draft is the target itself: (options, tokens that each round must give)
    **dict.fromkeys(("speculative", "specinfer", "spectr", "online"), ({}, 5)),
    "ouroboros": (dict(phrases=False), 5), "cascade": ({}, 5), "specinfer, two drafts": ({}, 3),
    "another_tokenizer": (dict(tokenizers=TOKENIZERS[:1] * 2), 5),
    "draft_verify": (dict(threshold=0.0, skipped={"attention": [], "mlp": []}), 5),
    "sequoia": (dict(nodes=5), 5), "triforce": (dict(budget=40, chunk=40), 5)}


@pytest.mark.parametrize("sample", [Sampler(0), Sampler(1.3, seed=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", PERFECT)
def test_perfect_drafts_are_accepted_whole(name, sample):
    """A guess that the target would choose too is never lost, so no cache misses a row: of a table
    of positions, of windows and of states."""
    if name == "ouroboros" and sample.temperature > 0:
        pytest.skip("its guesses are the draft's likeliest tokens at any temperature")
    options, whole = PERFECT[name]
    for family in {*FOUR[1:]} - {*REFUSED.get(name, [])}:
        model = model_of(family)
        line = METHODS[name](model)
        line = line._replace(drafts=[model for _ in line.drafts])
        target = kind_for(line.method, EngineLM)(model)
        chunks = chunks_of(line, target, PROMPT, sample=sample, **options)
        assert min(map(len, take(chunks, 4))) >= whole, family


# ---------------------------------------------------------------------------------- broken drafts

DRAFTING = [name for name, line in LINES.items() if line.drafts]
SPOIL = [  # what becomes of the logits [n, V] of a call
    lambda logits: logits.fill_(torch.nan),
    lambda logits: logits[::2, 7].fill_(torch.nan),
    lambda logits: logits[:, 5:9].fill_(torch.inf),
    lambda logits: logits.fill_(-torch.inf)]


def check_broken(line: Line, run_as: type = EngineLM) -> None:
    """Guesses that are wrong leave the text as it is, and a draw from nan is refused."""
    for sample in greedy, Sampler(1e-4):  # of the second only the likeliest token has any mass
        try:
            check_text(line, model_of("llama"), PROMPT, 8, run_as, sample)
        except InputError as error:
            assert "expected logits that are numbers" in str(error)


@pytest.mark.parametrize("name", ["draft_verify", *DRAFTING])
def test_a_draft_model_that_overflows(name):
    """Each of its calls is spoiled in another way."""
    rng = random.Random(0)

    class Broken(EngineLM):
        def forward(self, *args, **options):
            logits = super().forward(*args, **options).clone()
            if self.model is not model_of("llama"):
                rng.choice(SPOIL)(logits)
            return logits
    check_broken(METHODS[name](model_of("llama")), Broken)


@pytest.mark.parametrize("name", METHODS | LOSSY)
def test_a_target_that_overflows_is_refused(name):
    """So is a model that writes in the target's place."""
    class Broken(EngineLM):
        def run_model(self, *args):
            return super().run_model(*args) * torch.nan
    line = (METHODS | LOSSY)[name](model_of("llama"))
    target = kind_for(line.method, Broken)(model_of("llama"))
    check_refused("got nan|off by nan$", tokens_of, chunks_of(line, target, PROMPT, Broken), 8)


@pytest.mark.parametrize("sample", [greedy, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [name for name in DRAFTING if name != "another_tokenizer"])
def test_a_draft_with_tokens_that_the_target_lacks(name, sample):
    """As where tokens were added to a tokenizer and not to the target, which then has 61 rows."""
    line, target = METHODS[name](model_of("llama")), EngineLM(model_of("llama"), 99)
    drafts = copy.deepcopy(line.drafts)
    for draft in drafts:
        draft.resize_token_embeddings(99)
    found = tokens_of(chunks_of(line._replace(drafts=drafts), target, PROMPT,
                                lambda x, _: EngineLM(x, 99), sample=sample), 8)
    assert max(found) < target.vocab and target.vocab == 61
    text = autoregressive_text(target.model, tuple(PROMPT), 8, sample)
    assert found == text or sample is SAMPLED and line.method is lossy.specdec


@pytest.mark.parametrize("name", [x for x in METHODS if x.startswith(
    ("eagle", "medusa", "hydra", "dflash", "early_exit", "mtp"))])
def test_heads_and_layers_whose_weights_overflow(name):
    line = METHODS[name](model_of("llama"))
    shared = {p.data_ptr() for p in model_of("llama").parameters()}
    for p in line.options["trained"].parameters():
        if p.data_ptr() not in shared:
            p.data[:1] = torch.inf
    check_broken(line)


# ----------------------------------------------------------------------------------- sampled text

@pytest.mark.parametrize("name", [name for name, line in LINES.items() if line.few is not None])
def test_a_rule_of_a_paper_leaves_the_targets_law(name, monkeypatch):
    """Where the seed does not fix the text. A model of three tokens; all first rounds, and after a
    first round of one token all second ones, once for each token. If this holds for every
    beginning, what follows has the target's law. So the chain rule appends it."""
    monkeypatch.setattr(sequoia, "draw_children", draw_by_choices)
    prompt = [0, 1, 2, 0, 1] if name in ("cascade", "triforce") else [1]  # these two read contexts
    model, lengths, first = tiny("llama", vocab_size=8), set(), {}
    line = METHODS[name](model)
    run_as = functools.cache(EngineLM)  # each model once
    V, target = line.vocab, run_as(model, line.vocab)

    @functools.cache
    def true_law(text: tuple, n: int) -> torch.Tensor:
        """Compute the law [V ** n] of the n tokens after a text."""
        def logits_of(tokens):
            return model(input_ids=torch.tensor([tokens])).logits[0, -1, :V].detach()
        return law(logits_of, Sampler(WARM), [*text], n, V)

    def run(choose) -> list[int]:
        for key in [key for key in target.memo if key[0] is Acceptance]:
            del target.memo[key]  # each text begins with trees of the same forms
        taken = []

        def note(odds):
            taken.append(choose(odds))
            return taken[-1]
        chunks = chunks_of(line, target, prompt, run_as, sample=Choosing(note), **line.few)
        text = next(chunks)
        lengths.add(len(text))
        if len(text) == 1 and first.setdefault(*text, [*taken]) == taken:
            text = [*text, *next(chunks)]
        return text
    found = torch.zeros(V, V, V, dtype=torch.float64)
    for chance, text in outcomes(run):
        text = text[:3]
        rest_law = true_law((*prompt, *text), 3 - len(text)) if len(text) < 3 else torch.ones(1)
        found[tuple(text)] += chance * rest_law.view([V] * (3 - len(text)))
    assert len(lengths) > 1  # some rounds accepted guesses and others did not
    torch.testing.assert_close(found.flatten(), true_law((*prompt,), 3).double(), atol=1e-5, rtol=0)


# --------------------------------------------------------------------------------- a second turn

@pytest.mark.parametrize("name", METHODS)
def test_a_second_turn_costs_what_is_new(name):
    """A model that keeps its old text reads only what a longer text adds, four tokens here."""
    family = ("llama", "qwen3.5")[[*METHODS].index(name) % 2]
    model = model_of("llama" if family in REFUSED.get(name, []) else family)
    line = METHODS[name](model)
    target = kind_for(line.method, EngineLM)(model)
    target.keeps = True
    prompt = PROMPT + tokens_of(chunks_of(line, target, PROMPT), 8) + [5, 9, 2, 6]
    target.passes.clear()
    text = tokens_of(chunks_of(line, target, prompt), 8)
    assert text == autoregressive_text(line.text_of or model, tuple(prompt), 8)
    read = sum(rows for rows, read, _ in target.passes if not read)
    if line.method.__module__ not in ("bita", "survey.masks"):  # which feed embeddings
        assert read <= 4 or line.method.__name__ in ("early_exit", "layerskip")  # layers apart


@pytest.mark.parametrize("taps", [None, [0, 2]])
def test_kept_features_are_those_of_a_text_that_is_read_anew(taps):
    model = model_of("llama")
    kept, anew = EngineLM(model), EngineLM(model)
    kept.keeps = True
    kept.start([3, 1, 4], [1])
    kept.start([3, 1, 4], taps)  # the features of other taps do not count
    kept.forward([1, 5, 9, 2, 6], [-1, 0, 0, 2, 2])
    kept.commit([0, 2, 4])
    for text in [3, 1, 4, 1, 9, 6, 5, 3], [3, 1, 4, 1], [2, 7, 1]:
        kept.start(text, taps)
        anew.start(text, taps)
        torch.testing.assert_close(kept.features, anew.features)
        assert kept.length == anew.length == len(text)
