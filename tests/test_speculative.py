"""Speculative decoding: the target's own output, exactly, and full use of a good draft."""
import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch

from common import CachedLM, InputError, Sampler, autoregressive, greedy
from fake_models import ScriptedLM, Zeros, markov, uncached
from families import few_families, near, tiny
from helpers import choices, tokens_of
from laws import outcomes, remember_logits
from speculative import (Drafts, bild, k_seq, multi_step, report, residual, several_drafts,
                         specdec, specinfer, spectr, speculative, verify, verify_tree)
from test_common import CLOSE, buffers_of

PROMPT = [3, 14, 15]
def test_a_draft_of_another_family():
    model = tiny("llama")
    target, draft = CachedLM(model), CachedLM(tiny("gpt2"))
    expected = tokens_of(autoregressive(target, PROMPT), 100)
    assert tokens_of(speculative(target, draft, PROMPT, gamma=3), 100) == expected


# -------------------------------------------------------------------- the rule, by enumeration

class Script:
    """A sampler whose uniform numbers are given; keeps the distribution it should draw from."""

    def __init__(self, uniform):
        self.numbers = torch.tensor(uniform, dtype=torch.float64)

    def uniform(self, n, device):
        return self.numbers

    def draw(self, probs):
        self.probs = probs[0]
        return [0]


def acceptance(p, q, guesses, i):
    """The probability that `verify` accepts guess i once it has accepted those before: the u at
    which it stops doing so, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        coins = Script([0.0] * i + [middle] + [0.0] * (len(guesses) - i - 1))
        accepted, _ = verify(p, q, guesses, coins)
        low, high = (middle, high) if accepted > i else (low, middle)
    return low if high < 1 else 1.0


@pytest.mark.parametrize("temperature, top_k, top_p", [
    (1, 0, 1), (0.5, 0, 1), (2, 3, 1), (1, 0, 0.7), (0.8, 4, 0.9), (0, 0, 1)])
def test_accept_or_residual_is_exact_by_enumeration(temperature, top_k, top_p):
    """V = 5, gamma = 2, all 25 drafts: the first token has the target's distribution, and so has
    the second given the first."""
    torch.manual_seed(0)
    sample = Sampler(temperature, top_k, top_p)
    for _ in range(3):  # row 0 of the logits: at the start; row 1 + x: after token x
        target_logits, draft_logits = 1.5 * torch.randn(6, 5), 1.5 * torch.randn(6, 5)
        p_of, q_of = sample.probs(target_logits).double(), sample.probs(draft_logits).double()
        joint = torch.zeros(5, 5, dtype=torch.float64)  # of the first two tokens
        for x, y in itertools.product(range(5), repeat=2):
            weight = (q_of[0, x] * q_of[1 + x, y]).item()
            if weight == 0:
                continue
            p, q = p_of[[0, 1 + x, 1 + y]], q_of[[0, 1 + x]]
            first, second = acceptance(p, q, [x, y], 0), acceptance(p, q, [x, y], 1)
            if first < 1:  # rejected at once; a later call of the target's gives the second token
                script = Script([1.0, 0.0])
                assert verify(p, q, [x, y], script)[0] == 0
                joint += weight * (1 - first) * script.probs[:, None] * p_of[1:]
            if second < 1:
                script = Script([0.0, 1.0])
                assert verify(p, q, [x, y], script)[0] == (1 if first > 0 else 0)
                if first > 0:
                    joint[x] += weight * first * (1 - second) * script.probs
            joint[x, y] += weight * first * second
            script = Script([0.0, 0.0])
            if first > 0 and second > 0:
                assert verify(p, q, [x, y], script)[0] == 2
                torch.testing.assert_close(script.probs, p[2])  # the bonus token
        torch.testing.assert_close(joint, p_of[0][:, None] * p_of[1:], atol=1e-6, rtol=0)


def test_residual():
    """By hand. A draw from q = p is rejected by rounding alone, and then p itself is left."""
    p, q = torch.tensor([0.5, 0.4, 0.1, 0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    torch.testing.assert_close(residual(p, q), torch.tensor([2, 1, 0, 0]) / 3)
    torch.testing.assert_close(residual(q, p), torch.tensor([0, 0, 1, 2]) / 3)
    assert torch.equal(residual(p, p), p)
    script = Script([1.0])
    assert verify(torch.stack([p, q]), p[None], [0], script)[0] == 0
    assert torch.equal(script.probs, p)
    accept, left = multi_step(p, p.expand(3, -1), [0, 0, 1])
    assert accept == [1, 1, 1] and torch.equal(left, p)


# ------------------------------------------------------------------------------------ sampling

@pytest.mark.parametrize("method, options", [
    (speculative, dict(gamma=2)), (specinfer, dict(gamma=3, K=3)), (spectr, dict(gamma=2, K=4)),
    (bild, dict(gamma=3, fallback=0.4, rollback=1.5)), (specdec, dict(gamma=3, beta=4, tau=1.5))])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sampled_output_of_real_caches_is_that_without_caches(family, method, options):
    """With the same seed, token by token: a row out of place would change some draws. So it has the
    distribution that the tests on scripted models find."""
    model, outputs, logs = tiny(family), [], []
    draft = near(model, 0.04)
    for make in (CachedLM, uncached):
        log, sample = [], Sampler(0.7, seed=4)
        chunks = method(make(model), make(draft), PROMPT, sample=sample, log=log, **options)
        outputs.append(tokens_of(chunks, 40))
        logs.append(log)
    assert outputs[0] == outputs[1] and logs[0] == logs[1]
    assert len({r["accepted"] for r in log}) > 1


def test_sampling_is_seeded():
    model, draft = tiny("llama"), near(tiny("llama"), 0.05)
    runs = [tokens_of(speculative(CachedLM(model), CachedLM(draft), PROMPT,
                                  sample=Sampler(seed=seed)), 30) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_models_with_different_padding_of_the_vocabulary():
    """A target with 61 rows and a draft with 70: `vocab` cuts both to the tokens that exist."""
    model = tiny("llama")
    target = CachedLM(model, vocab=61)
    draft = CachedLM(tiny("llama", seed=2, vocab_size=70), vocab=61)
    expected = tokens_of(autoregressive(CachedLM(model), PROMPT), 80)
    assert tokens_of(speculative(target, draft, PROMPT, gamma=2), 80) == expected


def test_held_out_prompts_of_the_embedded_pair(embedded):
    """160 tokens each, past EOS, where the models are out of their world."""
    import tasks
    model, draft, tokenizer = embedded
    target, draft, rng = CachedLM(model), CachedLM(draft), random.Random(0)
    for task in tasks.TASKS:
        for example in tasks.take(task, "test", 1, seed=20):
            prompt = tokenizer(example.prompt)["input_ids"]
            got = tokens_of(speculative(target, draft, prompt, gamma=rng.randint(1, 12)), 160)
            assert len(got) == 160 and got == choices(model, prompt, got)
            assert tokenizer.eos_token_id in got[:100]


# ------------------------------------------------------------------------------ several drafts

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
        chunks = several_drafts(spy, make(model), drafts, [3, 4], 3, 4, sample, log)
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
        return next(several_drafts(sample.decided, ScriptedLM(logits_of), lms, [0, 1], 2, K, sample,
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
    chunks = several_drafts(spy, target, drafts, [0, 1], 2, 5, greedy, [])
    assert next(chunks) == [3, 3, 3] and [draft.rows for draft in drafts] == [2, 2, 2]
    assert seen == [([2, 3, 2, 2, 3], [2, 3, 2, 2, 3]), ([3, 3], [3, 3])]
    assert next(chunks) == [3, 3, 3] and [draft.rows for draft in drafts] == [6, 5, 6]


# ---------------------------------------------------------------------------------------- BiLD

def table(*rows):
    """A scripted model: the distribution after the last token x is row x."""
    return ScriptedLM(lambda tokens: torch.tensor(rows[tokens[-1]]).log())


def test_bild_follows_its_two_thresholds():
    draft = [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.45, 0.3, 0.25]
    target = [0.2, 0.5, 0.3], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]

    def first(**options):
        log = []
        return next(bild(table(*target), table(*draft), [0], log=log, **options)), log[0]
    # 0 -> 1 (0.8) -> 2 (0.6) -> stops at 0.45; costs: -log 0.5 = 0.69, -log 0.1 = 2.30
    assert first(fallback=0.5, rollback=2.31) == ([1, 2, 1], {"drafted": 2, "accepted": 2})
    assert first(fallback=0.5, rollback=2.30) == ([1, 0], {"drafted": 2, "accepted": 1})
    assert first(fallback=0.5, rollback=0.69) == ([1], {"drafted": 2, "accepted": 0})
    assert first(fallback=0.5, rollback=0.70) == ([1, 0], {"drafted": 2, "accepted": 1})
    assert first(fallback=0.61, rollback=9.0) == ([1, 0], {"drafted": 1, "accepted": 1})
    assert first(fallback=0.81, rollback=9.0) == ([1], {"drafted": 0, "accepted": 0})
    assert first(fallback=0.0, rollback=9.0, gamma=4) == (
        [1, 2, 0, 1, 0], {"drafted": 4, "accepted": 4})
    # at temperature 1, whatever tokens are drawn at
    assert first(fallback=0.5, rollback=2.31, sample=Sampler(1e-3))[1]["drafted"] == 2
    assert first(fallback=0.5, rollback=2.29, sample=Sampler(1e-3))[1]["accepted"] == 1


@few_families
def test_bild_is_exact_in_its_limits(family):
    """No guess passes, none is drafted, or the draft is the target."""
    model, n = tiny(family), 80 if family == "gpt2" else 40
    target, own, close = (CachedLM(m) for m in (model, model, near(model, 0.02)))
    expected = tokens_of(autoregressive(target, PROMPT), n)
    for draft, options in ((close, dict(rollback=0.0, fallback=0.1)), (close, dict(fallback=1.1)),
                           (own, dict(fallback=0.1, rollback=9.0))):
        assert tokens_of(bild(target, draft, PROMPT, gamma=4, **options), n) == expected


# ------------------------------------------------------------------------------------- SpecDec

def saying(*draft):
    """A scripted model of four tokens that drafts these after a prompt of one token."""
    return ScriptedLM(lambda tokens: torch.eye(4)[draft[len(tokens) - 1]])


def test_specdec_follows_its_two_limits():
    """All 16 drafts of two tokens. By hand: which tokens pass after 0, 1, 2 and 3, the best one
    first. How far log p lies below the best: `gaps`; three tokens tie after 3, and of them the
    argmax alone passes where output is to be greedy."""
    rows = ([0.1, 0.4, 0.3, 0.2], [0.05, 0.05, 0.1, 0.8], [0.7, 0.1, 0.15, 0.05],
            [0.3, 0.3, 0.1, 0.3])
    gaps = [1.39, 0, 0.29, 0.69], [2.77, 2.77, 2.08, 0], [0, 1.95, 1.54, 2.64], [0, 0, 1.10, 0]
    for row, gap in zip(rows, gaps):
        assert [round(math.log(max(row) / p), 2) for p in row] == gap
    for beta, tau, *passing in (
            (1, 9.0, "1", "3", "0", "0"), (4, 0.0, "1", "3", "0", "0"),
            (4, 1e-9, "1", "3", "0", "013"),  # above 0 what ties with the best passes
            (2, 9.0, "12", "32", "02", "013"), (2, 0.28, "1", "3", "0", "013"),
            (3, 0.7, "123", "3", "0", "013"), (3, 1.6, "123", "3", "02", "013"),
            (4, 2.5, "1230", "32", "021", "0132"), (4, math.inf, "1230", "3201", "0213", "0132")):
        passing = [[int(x) for x in some] for some in passing]
        for x, y in itertools.product(range(4), repeat=2):
            expected, log = passing[0][:1], []
            if x in passing[0]:
                expected = [x, y, passing[y][0]] if y in passing[x] else [x, passing[x][0]]
            got = next(specdec(table(*rows), saying(x, y), [0], gamma=2, beta=beta, tau=tau,
                               log=log))
            assert got == expected, (beta, tau, x, y)
            assert log == [{"drafted": 2, "accepted": len(expected) - 1}]


def test_specdec_draws_at_a_temperature():
    """Guesses and replacements; the test is that of temperature 1."""
    target, draft = [[0.5, 0.3, 0.2]] * 3, [[0.0, 0.0, 1.0]] * 3
    for tau, chunk in ((0.92, [2, 2]), (0.91, [])):  # log 0.5 / 0.2 = 0.916
        chunks = specdec(table(*target), table(*draft), [0], gamma=2, tau=tau, sample=Sampler(9.0))
        got = [next(chunks) for _ in range(60)]
        assert all(x[:-1] == chunk for x in got) and {x[-1] for x in got} == {0, 1, 2}
    chunks = specdec(table(*target), table(*target), [0], gamma=1, beta=1, sample=Sampler(9.0))
    assert {*map(len, itertools.islice(chunks, 60))} == {1, 2}


@few_families
def test_specdec_is_exact_in_its_limits(family):
    """Only the best token passes, or the draft is the target."""
    model, n = tiny(family), 80 if family == "gpt2" else 20
    target, own, close = (CachedLM(m) for m in (model, model, near(model, 0.02)))
    expected = tokens_of(autoregressive(target, PROMPT), n)
    for draft, options in ((close, dict(beta=1)), (close, dict(tau=0.0)), (own, {})):
        log = []
        chunks = specdec(target, draft, PROMPT, gamma=4, log=log, **options)
        assert tokens_of(chunks, n) == expected
        assert (min(r["accepted"] for r in log[:-1]) == 4) == (draft is own)


# ---------------------------------------------------------------------- mistakes and the report

@pytest.mark.parametrize("method, options, message", [
    (speculative, dict(gamma=0), "gamma of 1 or more, got 0"),
    (specinfer, dict(K=0), "gamma and K of 1 or more, got 5 and 0"),
    (spectr, dict(K=-1), "gamma and K of 1 or more, got 5 and -1"),
    (spectr, dict(gamma=0), "gamma and K of 1 or more, got 0 and 2"),
    (bild, dict(gamma=0), "fallback and rollback of 0 or more, got 0, 0.5 and 2.0"),
    (bild, dict(fallback=-1.0), "fallback and rollback of 0 or more, got 5, -1.0 and 2.0"),
    (bild, dict(rollback=-0.1), "fallback and rollback of 0 or more, got 5, 0.5 and -0.1"),
    (specinfer, dict(more_drafts=[1, 2]), "K of 3 or more, a draft of each model, got 2"),
    (specdec, dict(gamma=0), "of 1 or more and tau of 0 or more, got 0, 5 and 3.0"),
    (specdec, dict(beta=0), "of 1 or more and tau of 0 or more, got 6, 0 and 3.0"),
    (specdec, dict(tau=-0.1), "of 1 or more and tau of 0 or more, got 6, 5 and -0.1"),
    (specdec, dict(tau=math.nan), "of 1 or more and tau of 0 or more, got 6, 5 and nan")])
def test_bad_options_are_refused(method, options, message):
    with pytest.raises(InputError, match=message):
        next(method(ScriptedLM(markov(1)), ScriptedLM(markov(2)), [0, 1], **options))


def test_the_report():
    """By hand: a draft call costs a tenth of a target call. Leviathan, Theorem 3.8."""
    models = {"target": SimpleNamespace(calls=3, seconds=6.0),
              "draft": SimpleNamespace(calls=12, seconds=2.4)}

    def of(method, *accepted):
        log = [{"drafted": 4, "accepted": n} for n in accepted]
        return report(SimpleNamespace(method=method, models=models, log=log))
    first = "accepted 5 of 12 drafted tokens, 1.67 a round; 12 draft calls"
    assert of(specinfer, 4, 1, 0) == of(bild, 4, 1, 0) == of(specdec, 4, 1, 0) == first
    assert of(speculative, 4, 1, 0) == (  # α = 5 / 7: the first rejected guess is tried too
        f"{first}\nacceptance rate 71.4% of 7 tried; predicted from it, a draft call costing 0.10 "
        "of a target call: 2.85 tokens per call, speed-up 2.04x")
    assert of(speculative, 4, 4, 4).endswith(": 5.00 tokens per call, speed-up 3.57x")
    assert of(speculative, 0, 0, 0).endswith(": 1.00 tokens per call, speed-up 0.71x")
    models["draft 2"] = SimpleNamespace(calls=8, seconds=1.0)
    assert of(specinfer, 4, 1, 0) == first.replace("12 draft calls", "20 draft calls")


@pytest.mark.parametrize("rule", [multi_step, k_seq])
def test_a_guess_of_no_probability_is_never_accepted(rule):
    p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([0.5, 0.5])
    drawn = [Drafts([(0,)], {(): q}, {})]
    assert verify_tree(rule, p, [(0, (0,))], [[0, 1]], drawn, Zeros())[:2] == ((), [0])
    assert verify(p, q[None], [0], Zeros()) == (0, 1)


def test_each_model_makes_its_own_drafts_alone():
    """Of 3 drafts the second of two models makes one: a row for each of its tokens."""
    target, first, second = (ScriptedLM(lambda tokens: torch.zeros(10 ** 6)) for _ in range(3))
    next(specinfer(target, first, [1, 2], gamma=3, K=3, more_drafts=[second], sample=Sampler(1.0)))
    assert (first.rows, second.rows) == (5, 3)


@pytest.mark.parametrize("method, options", [(bild, dict(fallback=0.0, rollback=9.0)),
                                             (specdec, {})])
def test_what_a_draft_model_knows_is_not_fed_again(method, options):
    """After four guesses that pass, the last of them and the target's token alone."""
    target, draft = ScriptedLM(markov(0)), ScriptedLM(markov(0))
    chunks = method(target, draft, [1, 2], gamma=4, **options)
    assert [len(next(chunks)) for _ in range(3)] == [5, 5, 5] and draft.rows == 4 + 5 + 5


def test_bild_keeps_what_is_certain():
    """-log p of it is 0: not above a rollback of 0."""
    row, log = [0.0, 1.0, 0.0], []
    sure = table(row, row, row)
    chunk = next(bild(sure, table(row, row, row), [0], gamma=3, fallback=0.0, rollback=0.0,
                      log=log))
    assert chunk == [1, 1, 1, 1] and log == [{"drafted": 3, "accepted": 3}]


@pytest.mark.parametrize("options", [dict(beta=1), dict(tau=0.0)])
def test_what_ties_with_the_argmax_does_not_pass_in_the_limits(options):
    target, draft, log = [0.4, 0.4, 0.2], [0.1, 0.8, 0.1], []
    chunk = next(specdec(table(*[target] * 3), table(*[draft] * 3), [0], gamma=2, log=log,
                         **options))
    assert chunk == [0] and log == [{"drafted": 2, "accepted": 0}]


def test_specdec_at_exactly_tau():
    target, draft = torch.tensor([3.0, 0.0, -1.0]), torch.tensor([0.0, 9.0, 0.0])
    chunk = next(specdec(ScriptedLM(lambda _: target), ScriptedLM(lambda _: draft), [0], gamma=1,
                         tau=3.0))
    assert chunk == [1, 0]


def test_bild_drafts_at_exactly_its_fallback():
    flat, log = lambda tokens: torch.zeros(2), []
    next(bild(ScriptedLM(flat), ScriptedLM(flat), [0], gamma=2, fallback=0.5, rollback=9.0,
              log=log))
    assert log == [{"drafted": 2, "accepted": 2}]
