"""SpecInfer and SpecTr: exact rules, trees that are those of the drafts, no waiting for a GPU."""
import itertools

import pytest
import torch

from common import CachedLM, InputError, Sampler, greedy
from fake_models import ScriptedLM, Zeros, markov, uncached
from families import near, tiny
from helpers import check_without_caches, tokens_of
from laws import outcomes, remember_logits
from survey.several_drafts import (Draft, decode_by_rule, draw_drafts, find_rho, k_seq, multi_step,
                                   specinfer, spectr, verify_tree)
from test_common import CLOSE, buffers_of

PROMPT = [3, 14, 15]
RULES = {"multi_step": multi_step, "k_seq": k_seq}


def random_pairs(n=6, vocab=4):
    """Distributions (p, q): close, far, equal, with zeros, one-hot."""
    torch.manual_seed(0)
    for scale in (0.3, 1.0, 3.0):
        for _ in range(n):
            yield tuple((scale * torch.randn(vocab)).softmax(-1).double() for _ in "pq")
    p = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    yield p, p
    yield torch.tensor([0.5, 0.5, 0, 0]).double(), p
    yield p, torch.tensor([0, 0.2, 0.8, 0]).double()
    yield torch.tensor([0, 0, 1, 0]).double(), torch.tensor([0, 0, 1, 0]).double()
    yield torch.tensor([0, 0, 1, 0]).double(), torch.tensor([0, 1, 0, 0]).double()


def outcome(rule, p, q, distinct=False):
    """(the distribution of the token at one node, the probability that a draw is accepted), by
    enumeration of all K draws, each from its row of q [K, V]."""
    result, accepted = torch.zeros_like(p), 0.0
    for draws in itertools.product(range(len(p)), repeat=len(q)):
        weight = torch.prod(q[range(len(q)), draws]).item()
        if weight == 0:
            continue
        draws = list(dict.fromkeys(draws)) if distinct else list(draws)
        accept, rest = rule(p, q[:len(draws)], draws)
        for x, a in zip(draws, accept):
            result[x] += weight * a
            accepted, weight = accepted + weight * a, weight * (1 - a)
        result += weight * rest
    return result, accepted


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_several_drafts_are_exact_by_enumeration(rule):
    """V = 4: the token has the target's distribution whatever the number of drafts, and acceptance
    never falls as it grows. With one draft it is that of speculative sampling."""
    for p, q in random_pairs():
        rates = []
        for K in (1, 2, 3):
            result, accepted = outcome(rule, p, q.expand(K, -1))
            torch.testing.assert_close(result, p, atol=1e-6, rtol=0)
            rates.append(accepted)
        assert rates[0] <= rates[1] + 1e-6 and rates[1] <= rates[2] + 1e-6
        assert abs(rates[0] - torch.minimum(p, q).sum()) < 1e-6


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_one_draft_is_plain_speculative_sampling(rule):
    for p, q in random_pairs():
        for x in range(4):
            if q[x] > 0:
                [accept], rest = rule(p, q[None], [x])
                assert abs(accept - min(1, p[x] / q[x])) < 1e-9
                if accept < 1:
                    left = (p - q).clamp(min=0)
                    torch.testing.assert_close(rest.double(), left / left.sum(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_equal_draws_must_be_kept(rule):
    """With each token once, as a trie has it, the outcome is wrong by far more than rounding."""
    errors = [(outcome(rule, p, q.expand(3, -1), distinct=True)[0] - p).abs().max().item()
              for p, q in random_pairs()]
    assert max(errors) > 1e-3


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_equal_draws_on_real_caches(rule):
    """Drafts of few tokens share some nodes and part at others. The rule gets all draws of a node,
    equal ones too, and with the same seed the output is that without caches."""
    model, seen, outputs = tiny("llama", vocab_size=7), [], []

    def spy(p, q, draws):
        seen.append(draws)
        return rule(p, q, draws)
    for make in (CachedLM, uncached):
        log, sample = [], Sampler(seed=3)
        drafts = [make(near(model, 0.1))]
        chunks = decode_by_rule(spy, make(model), drafts, [3, 4], 3, 4, sample, log)
        outputs.append(tokens_of(chunks, 60))
    assert outputs[0] == outputs[1]
    assert any(len(draws) == 4 > len(set(draws)) > 1 for draws in seen)
    assert any(4 > len(draws) > len(set(draws)) for draws in seen)  # below the root
    assert min(r["drafted"] for r in log) < 3 * 4 and len({r["accepted"] for r in log}) == 4


# ------------------------------------------------------------------------- several draft models

def test_draws_of_several_models_are_exact_by_enumeration():
    """V = 4: each draw from another q. Judged by the q of another one they are biased."""
    pairs, errors = list(random_pairs()), []
    for (p, q), (_, other), (_, third) in zip(pairs, pairs[1:], pairs[2:]):
        for some in ([q, other], [q, p], [q, other, third]):
            some = torch.stack(some)
            result, _ = outcome(multi_step, p, some)
            torch.testing.assert_close(result, p, atol=1e-6, rtol=0)
            wrong, _ = outcome(lambda p, q, x: multi_step(p, q[:1].expand_as(q), x), p, some)
            errors.append((wrong - p).abs().max().item())
    assert max(errors) > 0.1


class Chosen:
    """A sampler whose every draw is a choice. Coins are not: `decided` makes them certain."""

    def __init__(self, choose):
        self.choose = choose

    def probs(self, logits):
        return logits.double().softmax(-1)

    def draw(self, probs):
        return [self.choose(row) for row in probs.tolist()]

    def uniform(self, n, device):
        return torch.full((n,), 0.5)

    def decided(self, p, q, draws):
        """`multi_step`, but whether a draw is accepted is a choice: 1 or 0."""
        accept, rest = multi_step(p, q, draws)
        taken = next((i for i, a in enumerate(accept) if self.choose([1 - a, a])), None)
        return [float(i == taken) for i in range(len(draws))], rest


@pytest.mark.parametrize("vocab, models, K", [(3, 2, 2), (2, 2, 3), (2, 3, 3), (2, 1, 2)])
def test_a_round_of_several_models_is_exact_by_enumeration(vocab, models, K):
    """All draws, acceptances and replacements of a round with gamma = 2: the first three tokens
    have the target's distribution. Those after the chunk are the target's."""
    logits_of, *drafts = (remember_logits(markov(seed, vocab)) for seed in range(1 + models))

    def first_chunk(choose):
        sample = Chosen(choose)
        lms = [ScriptedLM(draft) for draft in drafts]
        return next(decode_by_rule(sample.decided, ScriptedLM(logits_of), lms, [0, 1], 2, K, sample,
                                   None))

    def p_of(tokens):
        return logits_of([0, 1, *tokens]).double().softmax(-1)
    expected, found = torch.ones(2, *[vocab] * 3, dtype=torch.float64)
    for tokens in itertools.product(range(vocab), repeat=3):
        for i in range(3):
            expected[tokens] *= p_of(tokens[:i])[tokens[i]]
    found, total, lengths = torch.zeros_like(expected), 0, set()
    for weight, chunk in outcomes(first_chunk):
        total, lengths = total + weight, lengths | {len(chunk)}
        for rest in itertools.product(range(vocab), repeat=3 - len(chunk)):
            tokens, odds = (*chunk, *rest), weight
            for i in range(len(chunk), 3):
                odds *= p_of(tokens[:i])[tokens[i]]
            found[tokens] += odds
    assert abs(total - 1) < 1e-9 and lengths == {1, 2, 3}
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("sample", [greedy, Sampler(0.8, seed=5)], ids=["greedy", "sampled"])
def test_a_model_is_fed_its_own_drafts_and_keeps_what_became_final(sample):
    """After each round its cache is that of a fresh one. A round feeds it what it has not seen and
    its own draft but for the last token; a draft that fails early leaves more unseen."""
    model = tiny("llama")
    target = CachedLM(model)
    drafts = [CachedLM(near(model, noise)) for noise in (0.02, 0.04)]
    fresh = [CachedLM(draft.model) for draft in drafts]
    text, gamma, unseen, seen = list(PROMPT), 4, [1, 1], set()
    chunks = specinfer(target, drafts[0], PROMPT, gamma=gamma, more_drafts=drafts[1:],
                       sample=sample)
    for chunk in itertools.islice(chunks, 15):
        text += chunk
        for m, (draft, other) in enumerate(zip(drafts, fresh)):
            assert draft.rows == unseen[m] + gamma - 1 and draft.calls == gamma
            draft.rows = draft.calls = 0
            unseen[m] = len(text) - draft.length
            other.start(text[:draft.length])
            for ours, theirs in zip(buffers_of(draft), buffers_of(other)):
                rows = slice(0, draft.length)
                torch.testing.assert_close(ours[:, :, rows], theirs[:, :, rows], **CLOSE)
        assert target.length == len(text) - 1
        seen.add(tuple(unseen))
    assert (1, 1) in seen and any(a != b for a, b in seen) and max(map(max, seen)) > 2


def test_models_take_turns():
    """Draft i is of model i mod n, and is judged by its q; equal draws stay apart."""
    drafts = [ScriptedLM(lambda tokens, x=x: 9.0 * torch.eye(4)[x]) for x in (2, 3, 2)]
    seen = []

    def spy(p, q, draws):
        seen.append((q.argmax(-1).tolist(), draws))
        return multi_step(p, q, draws)
    target = ScriptedLM(lambda tokens: torch.eye(4)[3])
    chunks = decode_by_rule(spy, target, drafts, [0, 1], 2, 5, greedy, [])
    assert next(chunks) == [3, 3, 3] and [draft.rows for draft in drafts] == [2, 2, 2]
    assert seen == [([2, 3, 2, 2, 3], [2, 3, 2, 2, 3]), ([3, 3], [3, 3])]
    assert next(chunks) == [3, 3, 3] and [draft.rows for draft in drafts] == [6, 5, 6]


def test_each_model_makes_its_own_drafts_alone():
    """Of 3 drafts the second of two models makes one: a row for each of its tokens."""
    target, first, second = (ScriptedLM(lambda tokens: torch.zeros(10 ** 6)) for _ in range(3))
    next(specinfer(target, first, [1, 2], gamma=3, K=3, more_drafts=[second], sample=Sampler(1.0)))
    assert (first.rows, second.rows) == (5, 3)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_guess_of_no_probability_is_never_accepted(rule):
    p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([0.5, 0.5])
    drafts = [Draft((0,), {(): q}, [0, 1])]
    assert verify_tree(rule, p, drafts, Zeros())[:2] == ((), [0])


def test_draws_of_the_targets_own_distribution_are_accepted():
    """Rounding alone can reject them, and p itself is left."""
    p = torch.tensor([0.5, 0.4, 0.1, 0])
    accept, left = multi_step(p, p.expand(3, -1), [0, 0, 1])
    assert accept == [1, 1, 1] and torch.equal(left, p)


def test_two_drafts_that_begin_alike():
    """The example of `verify_tree`: sat on the mat, sat on my hat."""
    on, the, mat, my, hat = range(5)
    eye = torch.eye(5)
    asked = []

    def rule(p, q, draws):
        asked.append((p.argmax().item(), q.argmax(-1).tolist(), draws))
        return [float(x in (on, my)) for x in draws], eye[3]
    first = {(): eye[0], (on,): eye[1], (on, the): eye[2]}
    second = {(): eye[4], (on,): eye[3], (on, my): eye[2]}
    drafts = [Draft((on, the, mat), first, [0, 1, 2, 3]),
              Draft((on, my, hat), second, [0, 1, 4, 5])]
    target_probs = eye[[0, 1, 2, 3, 4, 0]]
    accepted, path, rest = verify_tree(rule, target_probs, drafts, Sampler())
    assert (accepted, path, rest.argmax()) == ((on, my), [0, 1, 4], 3)
    # at each node: the target's row, the q of each draw's own model, the draws
    assert asked == [(0, [0, 4], [on, on]), (1, [1, 3], [the, my]), (4, [2], [hat])]
    # where several draws pass, the first of them counts
    accepted, path, _ = verify_tree(lambda p, q, draws: ([1.0] * len(draws), p), target_probs,
                                    drafts, Sampler())
    assert (accepted, path) == ((on, the, mat), [0, 1, 2, 3])


def test_drafts_that_begin_alike_are_fed_once():
    """By hand: two unseen tokens, then a level of the drafts' tree in each call."""
    draft = ScriptedLM(lambda tokens: torch.zeros(3))
    draft.start([])

    class Dealt(Sampler):
        """Deals these tokens out in place of draws."""
        dealt = [[0, 0, 1], [2, 1, 1], [0, 0, 0]]

        def draw(self, probs):
            return self.dealt.pop(0)
    drawn = draw_drafts(draft, [7, 8], 3, 3, Dealt())
    assert drawn.texts == [(0, 2, 0), (0, 1, 0), (1, 1, 0)]
    assert drawn.nodes == {(): 1, (0,): 2, (1,): 3, (0, 2): 4, (0, 1): 5, (1, 1): 6}
    assert draft.ids == [7, 8, 0, 1, 2, 1, 1] and draft.parents == [-1, 0, 1, 1, 2, 2, 3]
    assert drawn.probs.keys() == drawn.nodes.keys() and draft.calls == 3


# ----------------------------------------------------------------------------------- SpecTr's ρ

def bisect_rho(p, q, K):
    """Find ρ by bisection, the upper end after 30 steps: slow, and plain to see."""
    low, rho = 1.0, float(K)
    for _ in range(30):
        middle = (low + rho) / 2
        beta = torch.minimum(q, p / middle).sum().item()
        if 1 - (1 - beta) ** K <= middle * beta:
            rho = middle
        else:
            low = middle
    return rho


@pytest.mark.parametrize("K", [1, 2, 3, 5, 9])
def test_rho_is_that_of_a_bisection(K):
    """Within 1e-6, and never so small that the residual would have negative entries."""
    torch.manual_seed(1)
    wide = [tuple((3 * torch.randn(500)).double().softmax(-1) for _ in "pq") for _ in range(20)]
    for p, q in [*random_pairs(), *wide]:
        rho = find_rho(p, q, K)
        assert rho.dtype == torch.float64 and abs(rho.item() - bisect_rho(p, q, K)) < 1e-6
        each = torch.minimum(q, p / rho)
        p_acc = 1 - (1 - each.sum()) ** K
        if p_acc > 0:
            assert (p - each * (p_acc / each.sum())).min() > -1e-12


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("K", [2, 8])
def test_a_rule_waits_for_the_device_once(rule, K, waits):
    """For the chances of all draws together, however many there are."""
    p, q = (torch.randn(50).softmax(-1) for _ in "pq")
    rule(p, q.expand(K, -1), list(range(K)))
    assert len(waits) <= 1


# ------------------------------------------------------------------------ all of it, and mistakes

@pytest.mark.parametrize("method, options", [(specinfer, dict(gamma=3, K=3)),
                                             (spectr, dict(gamma=2, K=4))])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sampled_output_of_real_caches_is_that_without_caches(family, method, options):
    """With the same seed, token by token: a row out of place would change some draws."""
    model = tiny(family)
    check_without_caches(method, model, near(model, 0.04), PROMPT, **options)


@pytest.mark.parametrize("method, options, message", [
    (specinfer, dict(gamma=0), "--gamma must be 1 or more, got 0"),
    (specinfer, dict(K=0), "--K must be 1 or more, got 0"),
    (spectr, dict(gamma=0), "--gamma must be 1 or more, got 0"),
    (spectr, dict(K=-1), "--K must be 1 or more, got -1"),
    (specinfer, dict(more_drafts=[1, 2]), "--K must be 3 or more with 3 drafts, got 2")])
def test_bad_options_are_refused(method, options, message):
    with pytest.raises(InputError) as error:
        next(method(ScriptedLM(markov(1)), ScriptedLM(markov(2)), [0, 1], **options))
    assert str(error.value) == message
