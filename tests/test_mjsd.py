"""Joint decoding finds the tokens that are likeliest together, and accepts the longest prefix that
passes."""
import itertools
import math
from collections import Counter

import pytest
import torch

from common import CachedLM, Sampler, greedy
from fake_models import ScriptedLM, markov, tabled
from families import tiny
from laws import Choosing, chi_square_ok, draw_by_choices, outcomes
from mjsd import beam_search, log_probs, mjgd, mjsd, perplexity, propose_children


def search(logits_of, context: list[int], depth: int, beams: int, eos) -> list[tuple]:
    """Return tokens and log-probability of the best beams, by beam search over whole sequences."""
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


@pytest.mark.parametrize("eos", [set(), {4}, {1, 3}])
def test_the_beam_search_is_that_over_whole_sequences(eos):
    """Beams that ended compete with the others and keep their score. A root that is an EOS is
    expanded all the same. Other tokens may come before the root."""
    lengths = set()
    for seed, beams, depth in itertools.product(range(3), (1, 3, 8), (1, 2, 4)):
        for unseen in ([1], [2, 4], [3, 3, 0]):
            lm = ScriptedLM(markov(seed, 5))
            lm.start([0])
            some = beam_search(lm, unseen, depth, beams, greedy, eos)
            for beam in some:  # its nodes hold its tokens, and all have those that have a child
                assert [lm.ids[node] for node in beam.nodes][len(unseen):] == beam.tokens[:-1]
            found = {tuple(beam.tokens): beam.logps[-1] for beam in some}
            expected = dict(search(markov(seed, 5), [0, *unseen], depth, beams, eos))
            assert [*found] == [*expected] and found == pytest.approx(expected, abs=1e-4)
            lengths.add(tuple(map(len, found)))
    mixed = any(a < b for each in lengths for a, b in zip(each, each[1:]))
    assert mixed == bool(eos)  # some that ended come before longer ones


# ------------------------------------------------------------------------------------------- MJGD

def test_the_joint_argmax_and_nothing_counts_after_an_eos():
    """Here p(EOS) is 0.6, p(A) is 0.4 and p(A | A) is 0.98. Texts of A are likelier than the EOS
    with any junk after it, but none is likelier than the EOS itself. A root that is an EOS goes on:
    0.21 for A, and hardly less for texts of A."""
    root, end, a, flat = 0, 1, 2, [0.2, 0.2, 0.21, 0.2, 0.19]
    rows = {root: [0, 0.6, 0.4, 0, 0], end: flat, a: [0.005, 0.005, 0.98, 0.005, 0.005],
            3: flat, 4: flat}
    for K, best, chance in ((1, [end], 0.6), (2, [a, a], 0.392), (3, [a, a, a], 0.38416)):
        log = []
        assert next(mjgd(tabled(rows), [root], K=K, eos={end})) == [end]
        assert next(mjgd(tabled(rows), [root], K=K, log=log)) == best
        assert math.exp(log[0]["logp"]) == pytest.approx(chance)
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
        log = []
        chunks = mjsd(target, draft, [0], gamma=3, beams=2, tau=tau, log=log)
        assert next(chunks) == chunk and log == [{"guessed": 3, "accepted": len(chunk) - 1}]
        assert draft.trees[-3:] == [([0], None), ([1, 2], [0, 0]), ([3, 3], [1, 2])]
        assert target.trees[-1] == ([0, 1, 3, 5], None)


@pytest.mark.parametrize("tau", [0.0, 0.8])
def test_a_sampled_chunk_has_the_law_of_algorithm_1(tau, monkeypatch):
    """All draws are enumerated. With one beam the draft is a sample of q. Its longest prefix that
    passes is kept, and a sample of p follows. The target never says 2, which is accepted at no τ.
    """
    def choose_children(logits, beams, sample):
        logp = log_probs(logits, sample)
        drawn = draw_by_choices(logp, beams, sample)
        return [[(x, row[x].item()) for x in tokens] for tokens, row in zip(drawn, logp)]
    monkeypatch.setattr("mjsd.propose_children", choose_children)
    p, q = torch.tensor([[[0.4, 0.6, 0], [0.2, 0.8, 0], [0.5, 0.5, 0]],
                         [[0.7, 0.1, 0.2], [0.8, 0.1, 0.1], [0.4, 0.4, 0.2]]])
    found, expected = Counter(), Counter()
    for chance, chunk in outcomes(lambda choose: next(mjsd(
            tabled(p), tabled(q), [0], gamma=2, beams=1, tau=tau, sample=Choosing(choose)))):
        found[tuple(chunk)] += chance
    p, q = Choosing(None).probs(p.log()), Choosing(None).probs(q.log())  # as the sampler warps them
    for x, y, t in itertools.product(range(3), repeat=3):
        ratios = [1, p[0, x] / q[0, x], p[0, x] / q[0, x] * p[x, y] / q[x, y]]
        kept = (x, y)[:max(i for i in range(3) if ratios[i] > tau)]
        expected[(*kept, t)] += (q[0, x] * q[x, y] * p[[0, *kept][-1], t]).item()
    assert found == pytest.approx({text: x for text, x in expected.items() if x > 0})
    assert {*map(len, found)} == {1, 2, 3}


# ------------------------------------------------------------------- perplexity

def test_perplexity_is_that_of_the_model_itself():
    model, prompts, outputs = tiny("llama"), [[3, 4, 5], [7]], [[8, 9, 10, 11], [2]]
    nll = 0.0
    for prompt, output in zip(prompts, outputs):
        logp = model(input_ids=torch.tensor([prompt + output])).logits[0].log_softmax(-1)
        nll -= sum(logp[len(prompt) - 1 + i, x].item() for i, x in enumerate(output))
    found = perplexity(CachedLM(model), prompts, outputs)
    assert found == pytest.approx(math.exp(nll / 5), rel=1e-4)
