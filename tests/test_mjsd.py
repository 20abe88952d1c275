"""Joint decoding: the likeliest tokens together, and the longest prefix that passes."""
import itertools
import math

import pytest
import torch

import mjsd as module
from common import CachedLM, Sampler, autoregressive, greedy
from fake_models import ScriptedLM, drifting, markov, uncached
from families import CONTEXT, few_families, near, tiny
from helpers import main, tokens_of
from laws import chi_square_ok
from mjsd import (beam_search, longest_prefix, mjgd, mjsd, path_to, perplexity,
                  propose_children)

PROMPT = [3, 14, 15]
APPLES = "Mia has 12 apples. She buys 3 bags of 4 apples each. How many apples does Mia have now?"
WARPED = Sampler(0.8, top_k=12, top_p=0.9)


# ----------------------------------------------------- references: no cache, no tree, no ids

def joints(logits_of, context: list[int], tokens, sample: Sampler = greedy) -> list[float]:
    """log p(tokens[:i] | context) for i from 1, of the model or as a sampler warps it."""
    steps = []
    for i, token in enumerate(tokens):
        logits = logits_of(context + list(tokens[:i]))
        probs = sample.probs(logits) if sample.temperature else logits.softmax(-1)
        steps.append(probs[token].log().item())
    return list(itertools.accumulate(steps))


def search(logits_of, context: list[int], depth: int, beams: int, eos) -> list[tuple]:
    """(tokens, log-probability) of the best beams by beam search over whole sequences."""
    leaves = [((), 0.0)]
    for _ in range(depth):
        grown = []
        for tokens, logp in leaves:
            if tokens and tokens[-1] in eos:
                grown.append((tokens, logp))
                continue
            steps = logits_of(context + list(tokens)).log_softmax(-1).tolist()
            grown += [((*tokens, x), logp + step) for x, step in enumerate(steps)]
        leaves = sorted(grown, key=lambda leaf: -leaf[1])[:beams]
    return leaves


def one_round(target, draft, context: list[int], gamma, beams, tau, width, eos) -> tuple:
    """A greedy round of MJSD after a context, with its record: Alg. 1 by the letter."""
    best = None
    for tokens, _ in search(draft, context, gamma, beams, eos)[:width]:
        p, q = joints(target, context, tokens), joints(draft, context, tokens)
        eta = 0
        for i in range(1, len(tokens) + 1):
            if min(1, math.exp(p[i - 1] - q[i - 1])) > tau:
                eta = i
        length = gamma if eta == len(tokens) else eta  # accepted whole, up to an EOS
        if best is None or length > best[0]:
            best = length, eta, list(tokens), p, q
    _, eta, tokens, p, q = best
    bonus = target(context + tokens[:eta]).argmax().item()
    return tokens[:eta] + [bonus], {"drafted": len(tokens), "accepted": eta, "target_logp": p,
                                    "draft_logp": q}


def check_rounds(models, references, rounds: int, context=PROMPT, eos=frozenset(), **options):
    """Greedy MJSD on CachedLMs or stand-ins equals `one_round` on the text so far, round by round;
    returns the log."""
    log = []
    chunks = mjsd(*models, context, eos=eos, log=log, **options)
    for chunk in itertools.islice(chunks, rounds):
        expected, record = one_round(*references, context, eos=eos, **options)
        assert chunk == expected and log[-1]["drafted"] == record["drafted"]
        assert log[-1]["accepted"] == record["accepted"] == len(chunk) - 1
        for name in ("target_logp", "draft_logp"):
            assert log[-1][name] == pytest.approx(record[name], abs=1e-3)
        context = context + chunk
    return log


def absorbed(K: int, eos, vocab: int = 5) -> list[tuple]:
    """All texts of K tokens without an EOS before the last, and the shorter ones that end in it."""
    return [tokens for n in range(1, K + 1) for tokens in itertools.product(range(vocab), repeat=n)
            if not eos & {*tokens[:-1]} and (n == K or tokens[-1] in eos)]


# -------------------------------------------------------------------------------- the beam search

def test_children_are_the_likeliest_or_draws_without_replacement():
    """20,000 rows at once: the first draw has the sampler's distribution, the pair of the first two
    that of drawing one after the other (20 cells). False-failure probability 1e-6."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    [row] = propose_children(logits[None], 3, greedy)
    assert [token for token, _ in row] == [0, 1, 2]
    assert [logp for _, logp in row] == pytest.approx(logits.log_softmax(-1)[:3].tolist())
    sample, counts = Sampler(1.7, seed=1), torch.zeros(5, 5)
    p = sample.probs(logits)
    logp = p.log().tolist()
    for (x, first), (y, second) in propose_children(logits.expand(20000, -1), 2, sample):
        counts[x, y] += 1
        assert abs(first - logp[x]) < 1e-5 and abs(second - logp[y]) < 1e-5
    pairs = p[:, None] * p / (1 - p[:, None]) * (1 - torch.eye(5))
    assert chi_square_ok(counts.sum(1), p)
    assert counts.diag().sum() == 0 and chi_square_ok(counts.flatten(), pairs.flatten())
    assert not chi_square_ok(counts.sum(1), logits.softmax(-1))  # it would notice the temperature


@pytest.mark.parametrize("sample, numbers", [
    (greedy, [2, 4, 1]), (Sampler(1.0), [2, 4, 1]), (Sampler(1.0, top_k=3), [2, 3, 1]),
    (Sampler(1.0, top_p=0.7), [1, 3, 1])])
def test_each_row_has_as_many_children_as_have_a_probability(sample, numbers):
    """A narrow row does not throttle the others, and no token of probability 0 is ever drawn."""
    probs = torch.tensor([[0.9, 0.1, 0, 0, 0], [0.3, 0.25, 0.2, 0.15, 0.1], [0, 0, 0, 1, 0]])
    support = probs if sample is greedy else sample.probs(probs.log())
    for _ in range(50):
        rows = [{token for token, _ in row} for row in propose_children(probs.log(), 4, sample)]
        assert [len(row) for row in rows] == numbers
        assert all(support[i, token] > 0 for i, row in enumerate(rows) for token in row)
    rows = propose_children(probs.log(), 9, sample)  # more than the vocabulary
    assert [len(row) for row in rows] == (support > 0).sum(-1).tolist()


def leaves_of(logits_of, unseen, depth, beams, sample, eos) -> list[tuple]:
    """What `beam_search` finds after the text 0 and `unseen`: as `search` gives it."""
    lm = ScriptedLM(logits_of)
    lm.start([0])
    found = beam_search(lm, unseen, depth, beams, sample, eos)
    return [(tuple(found.ids[node] for node in path_to(leaf, found.parents)[1:]), found.logps[leaf])
            for leaf in found.leaves]


def same(found: list[tuple], expected: list[tuple]) -> bool:
    return ([tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
            and all(abs(x - y) < 1e-4 for (_, x), (_, y) in zip(found, expected)))


@pytest.mark.parametrize("eos", [set(), {4}, {1, 3}])
def test_the_beam_search_is_that_over_whole_sequences(eos):
    """Beams that ended compete with the others and keep their score; a root that is an EOS is
    expanded all the same; other tokens may come before the root."""
    lengths = set()
    for seed, beams, depth in itertools.product(range(3), (1, 3, 8), (1, 2, 4)):
        for unseen in ([1], [2, 4], [3, 3, 0]):
            found = leaves_of(drifting(seed), unseen, depth, beams, greedy, eos)
            assert same(found, search(drifting(seed), [0, *unseen], depth, beams, eos))
            lengths.add(tuple(len(tokens) for tokens, _ in found))
    mixed = any(a < b for each in lengths for a, b in zip(each, each[1:]))
    assert mixed == bool(eos)  # some that ended stand before longer ones


@pytest.mark.parametrize("sample", [Sampler(1.3, seed=2), Sampler(0.9, top_k=3, top_p=0.9)])
@pytest.mark.parametrize("eos", [set(), {2}])
def test_a_wide_beam_search_at_a_temperature_finds_all_texts(sample, eos):
    """With more beams than texts all are drawn that have a probability, in the order of it."""
    for seed in range(2):
        model = drifting(seed)
        texts = [(tokens, joints(model, [0, 1], tokens, sample)[-1])
                 for tokens in absorbed(3, eos)]
        texts = sorted((x for x in texts if x[1] > -math.inf), key=lambda x: -x[1])
        assert same(leaves_of(model, [1], 3, 125, sample, eos), texts)


# ------------------------------------------------------------------------------------------- MJGD

@pytest.mark.parametrize("eos", [set(), {4}, {1, 3}])
def test_mjgd_with_enough_beams_is_the_joint_argmax(eos):
    """V = 5, K = 3: against all texts, chunk after chunk, also after an EOS; greedy decoding gives
    another text."""
    lengths = set()
    for seed in range(3):
        model, context, log = drifting(seed), [0, 1], []
        chunks = mjgd(ScriptedLM(model), context, K=3, beams=25, eos=eos, log=log)
        for chunk in itertools.islice(chunks, 6):
            best = max((joints(model, context, x)[-1], x) for x in absorbed(3, eos))
            assert tuple(chunk) == best[1] and abs(log[-1]["logp"] - best[0]) < 1e-4
            context = context + chunk
            lengths.add(len(chunk))
        greedily = tokens_of(autoregressive(ScriptedLM(model), [0, 1]), len(context) - 2)
        assert eos or context[2:] != greedily
    assert (len(lengths) > 1) == bool(eos)


def by_last(rows: dict[int, list[float]]) -> ScriptedLM:
    """The distribution after a token x is rows[x]."""
    return ScriptedLM(lambda tokens: torch.tensor(rows[tokens[-1]]).log())


def test_nothing_counts_after_an_eos():
    """p(EOS) = 0.6, p(A) = 0.4 and p(A | A) = 0.98: texts of A are likelier than the EOS with any
    junk behind it, but none is likelier than the EOS alone. A root that is an EOS goes on: 0.21
    for A, and hardly less for texts of A."""
    root, end, a, flat = 0, 1, 2, [0.2, 0.2, 0.21, 0.2, 0.19]
    rows = {root: [0, 0.6, 0.4, 0, 0], end: flat, a: [0.005, 0.005, 0.98, 0.005, 0.005],
            3: flat, 4: flat}
    for K, without in ((1, [end]), (2, [a, a]), (3, [a, a, a])):
        assert next(mjgd(by_last(rows), [root], K=K, eos={end})) == [end]
        assert next(mjgd(by_last(rows), [root], K=K)) == without
        assert next(mjgd(by_last(rows), [root, end], K=K, eos={end})) == [a] * K


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_mjgd_on_a_real_cache(name):
    """Equal to a search without a cache, also where some chunks end in an EOS."""
    model = tiny(name)
    for eos in (set(), set(range(0, 61, 4))):
        context, logits_of, lengths = PROMPT, uncached(model).logits_of, set()
        chunks = mjgd(CachedLM(model), PROMPT, K=3, beams=4, eos=eos)
        for chunk in itertools.islice(chunks, 14):
            assert tuple(chunk) == search(logits_of, context, 3, 4, eos)[0][0]
            context = context + chunk
            lengths.add(len(chunk))
        assert (len(lengths) > 1) == bool(eos)


# ------------------------------------------------------------------------------------------- MJSD

@few_families
def test_mjgd_of_one_token_and_mjsd_at_tau_1_are_greedy_decoding(family):
    model = tiny(family)
    expected = tokens_of(autoregressive(CachedLM(model), PROMPT), 60)
    assert tokens_of(mjgd(CachedLM(model), PROMPT, K=1, beams=3), 60) == expected
    for tau in (1.0, 2.0):
        models = CachedLM(model), CachedLM(near(model, 0.02))
        assert tokens_of(mjsd(*models, PROMPT, gamma=3, beams=4, tau=tau), 60) == expected


@few_families
def test_the_target_as_its_own_draft_is_always_accepted(family):
    """For all τ below 1, to the last token of the context: the two models' rows of a path are the
    same, in whatever tree they stand."""
    model = tiny(family)
    for tau, width, sample in (0.0, 1, Sampler()), (0.5, 3, WARPED), (0.99, 1, greedy):
        log, models = [], [CachedLM(model), CachedLM(model)]
        tokens_of(mjsd(*models, PROMPT, gamma=3, beams=4, tau=tau, width=width, sample=sample,
                       log=log), CONTEXT - len(PROMPT))
        assert len(log) >= 39 and all(r["accepted"] == r["drafted"] == 3 for r in log)
        assert all(abs(p - q) < 1e-3 for r in log
                   for p, q in zip(r["target_logp"], r["draft_logp"]))


@few_families
def test_drafts_on_real_caches_equal_those_without_a_cache(family):
    """Round by round, past the window of those that have one, one beam verified or three; and with
    a quarter of the tokens EOS, so that some drafts end early, before or after other beams."""
    model, draft = tiny(family), near(tiny(family), 0.05)
    references, drafted = (uncached(model).logits_of, uncached(draft).logits_of), []
    for width, eos in ((1, set()), (3, set(range(0, 61, 4))), (1, set(range(0, 61, 4)))):
        options = dict(gamma=3, beams=4, width=width, tau=0.3, eos=eos)
        models = CachedLM(model), CachedLM(draft)
        log = check_rounds(models, references, 12, **options)
        drafted += [(r["drafted"], r["accepted"]) for r in log]
    assert {1, 2, 3} == {n for n, _ in drafted} and {0, 3} <= {n for _, n in drafted}
    assert any(n == accepted < 3 for n, accepted in drafted)  # the EOS was accepted


@pytest.mark.parametrize("sample, width", [
    (dict(temperature=0.0), 3), (dict(temperature=0.7), 2), (dict(temperature=1.2, top_k=3), 1),
    (dict(temperature=1.0, top_k=4, top_p=0.9), 4)])
@pytest.mark.parametrize("eos", [set(), {3}])
def test_accepted_length_equals_an_independent_computation(sample, width, eos, monkeypatch):
    """Of every beam that is verified the joint probabilities as the sampler warps them; the longest
    prefix that passes, whatever stands before it; of the longest ones the first beam's. One that
    ends in an EOS is as long as any."""
    def spy(*args):
        found.append(beam_search(*args))
        return found[-1]
    found, target, draft, sample = [], drifting(1), drifting(2), Sampler(**sample, seed=3)
    monkeypatch.setattr(module, "beam_search", spy)
    context, log, skipped, other = [0, 1], [], 0, 0
    chunks = mjsd(ScriptedLM(target), ScriptedLM(draft), context, gamma=4, beams=4, tau=0.6,
                  width=width, sample=sample, eos=eos, log=log)
    for chunk in itertools.islice(chunks, 120):
        beams, verified = found[-1], []
        for leaf in beams.leaves[:width]:
            tokens = [beams.ids[node] for node in path_to(leaf, beams.parents)[1:]]
            p, q = (joints(m, context, tokens, sample) for m in (target, draft))
            passes = [math.exp(x - y) > 0.6 for x, y in zip(p, q)]
            eta = max((i for i, well in enumerate(passes, 1) if well), default=0)
            verified.append((eta, tokens, p, q, passes))
        lengths = [4 if eta == len(tokens) else eta for eta, tokens, *_ in verified]
        eta, tokens, p, q, passes = verified[lengths.index(max(lengths))]
        assert log[-1]["drafted"] == len(tokens) and chunk[:-1] == tokens[:eta]
        assert log[-1]["accepted"] == eta and len(chunk) == eta + 1
        assert log[-1]["target_logp"] == pytest.approx(p, abs=1e-4)
        assert log[-1]["draft_logp"] == pytest.approx(q, abs=1e-4)
        skipped += not all(passes[:eta])
        other += max(lengths) > lengths[0]
        context = context + chunk
    assert skipped > 0  # a prefix failed and a longer one passed
    assert (other > 0) == (width > 1)  # the longest was not always the first beam's


def test_tau_0_accepts_what_the_target_gives_a_chance():
    """Token 3 has probability 0 in the target and is likely in the draft: exactly the prefixes with
    it do not pass."""
    def without(tokens):
        return drifting(1)(tokens).index_fill(0, torch.tensor([3]), -torch.inf)
    log = []
    chunks = mjsd(ScriptedLM(without), ScriptedLM(drifting(2)), [0, 1], gamma=4, beams=4, tau=0.0,
                  log=log)
    next(itertools.islice(chunks, 60, None))
    assert {r["accepted"] for r in log} >= {4} and len({r["accepted"] for r in log}) > 1
    assert all(r["accepted"] == sum(p > -math.inf for p in r["target_logp"]) for r in log)


@pytest.mark.parametrize("target_logp, draft_logp, tau, length", [
    ([-1.0, -3.0, -3.1, -9.0], [-1.0, -1.0, -3.0, -4.0], 0.5, 3),  # it follows one that fails
    ([-5.0], [-1.0], 0.5, 0), ([-5.0], [-1.0], 0.0, 1), ([-math.inf], [-1.0], 0.0, 0),
    ([-2.0], [-2.0 - math.log(0.5)], 0.5, 0),  # exactly tau is not above it
    ([-1.0], [-5.0], 1.0, 0)])
def test_the_longest_prefix_that_passes(target_logp, draft_logp, tau, length):
    assert longest_prefix(target_logp, draft_logp, tau) == length


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_sampled_tokens_have_the_distribution_of_their_model(tau):
    """2,000 seeded runs, the first two tokens (16 cells), at a false-failure probability of 1e-6.
    τ = 1: both are the target's. τ = 0 and one beam: the first is the draft's, which is accepted,
    the second the target's after it."""
    target, draft = markov(1), markov(2)
    counts, sample = torch.zeros(4, 4), Sampler(0.9, top_k=3 if tau else 0, seed=6)
    for _ in range(2000):
        chunks = mjsd(ScriptedLM(target), ScriptedLM(draft), [0, 1], gamma=1, beams=1, tau=tau,
                      sample=sample)
        counts[tuple(tokens_of(chunks, 2))] += 1
    first = sample.probs((target if tau else draft)([0, 1]))
    second = torch.stack([sample.probs(target([1, x])) for x in range(4)])
    assert chi_square_ok(counts.flatten(), (first[:, None] * second).flatten())


# ------------------------------------------------------------------- perplexity, and command line

def test_perplexity_is_that_of_the_model_itself():
    model, prompts, outputs = tiny("llama"), [[3, 4, 5], [7]], [[8, 9, 10, 11], [2]]
    logits_of = uncached(model).logits_of
    nll = -sum(joints(logits_of, p, o)[-1] for p, o in zip(prompts, outputs))
    found = perplexity(CachedLM(model), prompts, outputs)
    assert found == pytest.approx(math.exp(nll / 5), rel=1e-4)


def test_the_report(capfd):
    runs = []

    def report(run) -> str:
        runs.append(run)
        return module.report(run)

    def run(*argv):
        argv = ["--device", "cpu", "--prompt", APPLES, *argv]
        assert main([mjsd, mjgd], report, argv, lossy=[mjsd, mjgd]) == 0
        return capfd.readouterr().err
    err = run()
    assert " accepted; " in err and " draft calls; perplexity" in err
    assert any(r["drafted"] < 4 for r in runs[0].log)  # a draft ended in the model's EOS
    err = run("--method", "mjgd", "--K", "2")
    assert "perplexity" in err and "draft calls" not in err
