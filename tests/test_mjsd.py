"""Joint decoding: the likeliest tokens together, and the longest prefix that passes."""
import itertools
import math

import pytest
import torch

import mjsd as module
from common import CachedLM, Sampler, autoregressive, greedy
from fake_models import Recorder, ScriptedLM, drifting, uncached
from families import tiny
from helpers import tokens_of
from laws import chi_square_ok
from mjsd import beam_search, mjgd, mjsd, perplexity, propose_children


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


def count_accepted(target, draft, context, tokens, tau: float, sample: Sampler = greedy) -> int:
    """Count the tokens of the longest prefix that passes."""
    p, q = (joints(model, context, tokens, sample) for model in (target, draft))
    return max((i for i in range(1, len(p) + 1) if math.exp(min(0, p[i - 1] - q[i - 1])) > tau),
               default=0)


def absorbed(K: int, eos, vocab: int = 5) -> list[tuple]:
    """All texts of K tokens without an EOS before the last, and the shorter ones that end in it."""
    return [tokens for n in range(1, K + 1) for tokens in itertools.product(range(vocab), repeat=n)
            if not eos & {*tokens[:-1]} and (n == K or tokens[-1] in eos)]


def tabled(rows: dict, last: bool = True) -> Recorder:
    """The distribution after a text is rows[its last token], or rows[the text]."""
    return Recorder(lambda text: torch.tensor(rows[text[-1] if last else tuple(text)]).log())


# ----------------------------------------------------------------------------- the beam search

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
    assert counts.diag().sum() == 0 and chi_square_ok(counts.flatten(), pairs.flatten())


def test_each_row_has_as_many_children_as_have_a_probability():
    """A narrow row does not throttle the others, and more than the vocabulary may be asked for."""
    probs = torch.tensor([[0.9, 0.1, 0, 0, 0], [0.3, 0.25, 0.2, 0.15, 0.1], [0, 0, 0, 1, 0]])
    for sample, numbers in (greedy, [2, 5, 1]), (Sampler(1.0, top_k=3), [2, 3, 1]):
        rows = propose_children(probs.log(), 9, sample)
        assert [len(row) for row in rows] == numbers
        assert all(probs[i, token] > 0 for i, row in enumerate(rows) for token, _ in row)


def beams_of(logits_of, unseen, depth, beams, sample, eos) -> list[tuple]:
    """What `beam_search` finds after the text 0 and `unseen`: as `search` gives it."""
    lm = ScriptedLM(logits_of)
    lm.start([0])
    found = beam_search(lm, unseen, depth, beams, sample, eos)
    for beam in found:  # its nodes hold its tokens, and all have those that have a child
        fed = [lm.ids[node] for node in beam.nodes][len(unseen):]
        assert fed == beam.tokens[:-1]
    return [(tuple(beam.tokens), beam.logp) for beam in found]


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
            found = beams_of(drifting(seed), unseen, depth, beams, greedy, eos)
            assert same(found, search(drifting(seed), [0, *unseen], depth, beams, eos))
            lengths.add(tuple(len(tokens) for tokens, _ in found))
    mixed = any(a < b for each in lengths for a, b in zip(each, each[1:]))
    assert mixed == bool(eos)  # some that ended come before longer ones


# ------------------------------------------------------------------------------------------- MJGD

@pytest.mark.parametrize("eos", [set(), {4}, {1, 3}])
def test_mjgd_with_enough_beams_is_the_joint_argmax(eos):
    """V = 5, K = 3: against all texts, chunk after chunk, also after an EOS; greedy decoding gives
    another text."""
    for seed in range(3):
        model, context, log = drifting(seed), [0, 1], []
        chunks = mjgd(ScriptedLM(model), context, K=3, beams=25, eos=eos, log=log)
        for chunk in itertools.islice(chunks, 6):
            best = max((joints(model, context, x)[-1], x) for x in absorbed(3, eos))
            assert tuple(chunk) == best[1] and abs(log[-1]["logp"] - best[0]) < 1e-4
            context = context + chunk
        greedily = tokens_of(autoregressive(ScriptedLM(model), [0, 1]), len(context) - 2)
        assert eos or context[2:] != greedily


def test_nothing_counts_after_an_eos():
    """p(EOS) = 0.6, p(A) = 0.4 and p(A | A) = 0.98: texts of A are likelier than the EOS with any
    junk behind it, but none is likelier than the EOS alone. A root that is an EOS goes on: 0.21
    for A, and hardly less for texts of A."""
    root, end, a, flat = 0, 1, 2, [0.2, 0.2, 0.21, 0.2, 0.19]
    rows = {root: [0, 0.6, 0.4, 0, 0], end: flat, a: [0.005, 0.005, 0.98, 0.005, 0.005],
            3: flat, 4: flat}
    for K, without in ((1, [end]), (2, [a, a]), (3, [a, a, a])):
        assert next(mjgd(tabled(rows), [root], K=K, eos={end})) == [end]
        assert next(mjgd(tabled(rows), [root], K=K)) == without
        assert next(mjgd(tabled(rows), [root, end], K=K, eos={end})) == [a] * K


# ------------------------------------------------------------------------------------------- MJSD

def test_the_round_of_the_header():
    """The beams, the calls and the numbers that the file draws, for the tokens "the" 1, "a" 2,
    "cat" 3, "dog" 4, "sat" 5 and "ran" 6. "The cat" fails, and the longer prefix passes. At τ = 0.2
    only "the" passes, and at 0.8 nothing does."""
    draft = tabled({(0,): [0, 0.7, 0.3, 0, 0, 0, 0], (0, 1): [0, 0, 0, 5 / 7, 1 / 7, 0, 1 / 7],
                    (0, 2): [0.4, 0, 0, 0.6, 0, 0, 0], (0, 1, 3): [0.2, 0, 0, 0, 0, 0.6, 0.2],
                    (0, 2, 3): [1 / 6, 0, 0, 0, 0, 0, 5 / 6]}, last=False)
    target = tabled({0: [0.5, 0.5, 0, 0, 0, 0, 0], 1: [0, 0, 0, 0.08, 0.92, 0, 0],
                     3: [0.025, 0, 0, 0, 0, 0.975, 0], 5: [0, 0, 0, 0, 1, 0, 0]})
    draft.start([])
    found = beam_search(draft, [0], 3, 2, greedy, set())
    assert [beam.tokens for beam in found] == [[1, 3, 5], [2, 3, 6]]
    q = [[math.exp(logp) for logp in beam.logps] for beam in found]
    assert q == [pytest.approx([1, 0.7, 0.5, 0.3]), pytest.approx([1, 0.3, 0.18, 0.15])]
    for tau, chunk in (0.1, [1, 3, 5, 4]), (0.2, [1, 4]), (0.8, [0]):
        draft.trees, target.trees, log = [], [], []
        chunks = mjsd(target, draft, [0], gamma=3, beams=2, tau=tau, log=log)
        assert next(chunks) == chunk and log == [{"drafted": 3, "accepted": len(chunk) - 1}]
        assert draft.trees == [([0], None), ([1, 2], [0, 0]), ([3, 3], [1, 2])]
        assert target.trees == [([0, 1, 3, 5], None)]
        assert draft.tokens == [0, 1, 3][:len(chunk)]  # nothing is computed after the last token
        assert target.tokens == [0, 1, 3, 5][:len(chunk)]


@pytest.mark.parametrize("sample", [dict(temperature=0.7), dict(temperature=1.2, top_k=3)])
@pytest.mark.parametrize("eos", [set(), {3}])
def test_the_accepted_length_counts_what_the_sampler_warps(sample, eos, monkeypatch):
    """The longest prefix that passes, by probabilities that are computed anew. The token after it
    is drawn."""
    def spy(*args):
        found.append(beam_search(*args))
        return found[-1]
    found, target, draft, sample = [], drifting(1), drifting(2), Sampler(**sample, seed=3)
    monkeypatch.setattr(module, "beam_search", spy)
    context, lengths, drawn = [0, 1], set(), 0
    chunks = mjsd(ScriptedLM(target), ScriptedLM(draft), context, gamma=4, beams=4, tau=0.6,
                  sample=sample, eos=eos)
    for chunk in itertools.islice(chunks, 60):
        x = found[-1][0].tokens
        eta = count_accepted(target, draft, context, x, 0.6, sample)
        assert chunk[:-1] == x[:eta] and len(chunk) == eta + 1
        lengths.add(eta)
        drawn += chunk[-1] != target(context + x[:eta]).argmax()
        context = context + chunk
    assert len(lengths) > 2 and drawn > 10


def test_tau_0_accepts_what_the_target_gives_a_chance():
    """Token 3 has probability 0 in the target and is likely in the draft: exactly the prefixes with
    it do not pass, and it never enters the text."""
    def without(tokens):
        return drifting(1)(tokens).index_fill(0, torch.tensor([3]), -torch.inf)
    log = []
    chunks = mjsd(ScriptedLM(without), ScriptedLM(drifting(2)), [0, 1], gamma=4, beams=4, tau=0.0,
                  log=log)
    assert 3 not in tokens_of(chunks, 150)
    assert {r["accepted"] for r in log} >= {4} and len({r["accepted"] for r in log}) > 1


# ------------------------------------------------------------------- perplexity

def test_perplexity_is_that_of_the_model_itself():
    model, prompts, outputs = tiny("llama"), [[3, 4, 5], [7]], [[8, 9, 10, 11], [2]]
    logits_of = uncached(model).logits_of
    nll = -sum(joints(logits_of, p, o)[-1] for p, o in zip(prompts, outputs))
    found = perplexity(CachedLM(model), prompts, outputs)
    assert found == pytest.approx(math.exp(nll / 5), rel=1e-4)
