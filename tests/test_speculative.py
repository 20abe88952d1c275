"""Speculative decoding: the target's own output, exactly, and full use of a good draft."""
import itertools
import random

import pytest
import torch

from common import CachedLM, InputError, Sampler, autoregressive, greedy
from conftest import CONTEXT, ScriptedLM, chi_square_ok, markov, near, tiny, tokens_of
from speculative import bild, k_seq, multi_step, specinfer, spectr, speculative, verify

PROMPT = [3, 14, 15]


def test_greedy_equals_autoregressive(family):
    """Up to the last token of the context, where drafts reach past it; a draft that is often right and one that is not."""
    model = tiny(family)
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT), PROMPT), CONTEXT - len(PROMPT))
    for draft, gamma in [*itertools.product([near(model, 0.02)], range(1, 13)), *itertools.product([tiny(family, seed=7)], (1, 5, 12))]:
        log = []
        got = tokens_of(speculative(CachedLM(model, CONTEXT), CachedLM(draft, CONTEXT), PROMPT, gamma=gamma, log=log), CONTEXT - len(PROMPT))
        assert got == expected, (draft.config.model_type, gamma)
        assert all(r["drafted"] == gamma and 0 <= r["accepted"] <= gamma for r in log)


def test_drafts_are_partly_accepted(family):
    """The test above would also pass if no draft were ever accepted, or if all were."""
    model, log = tiny(family), []
    tokens_of(speculative(CachedLM(model, CONTEXT), CachedLM(near(model, 0.02), CONTEXT), PROMPT, gamma=4, log=log), CONTEXT - len(PROMPT))
    assert len({r["accepted"] for r in log}) > 2


def test_a_draft_of_another_family():
    model = tiny("llama")
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT), PROMPT), 100)
    assert tokens_of(speculative(CachedLM(model, CONTEXT), CachedLM(tiny("gpt2"), CONTEXT), PROMPT, gamma=3), 100) == expected


def test_eos_and_limits_inside_a_draft():
    model = tiny("llama")
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT), PROMPT), 60)
    target, draft = CachedLM(model, CONTEXT), CachedLM(model, CONTEXT)
    for limit in range(1, 20):
        assert tokens_of(speculative(target, draft, PROMPT, gamma=6), limit) == expected[:limit]
    for i, eos in enumerate(expected[:40]):
        assert tokens_of(speculative(target, draft, PROMPT, gamma=6), 60, {eos}) == expected[:expected.index(eos) + 1]


@pytest.mark.parametrize("temperature, top_k, top_p", [(0, 0, 1), (1, 0, 1), (0.6, 10, 0.9), (1.7, 0, 1)])
def test_the_target_as_its_own_draft_is_always_accepted(family, temperature, top_k, top_p):
    """Hundreds of tokens: a draft cache that misses a row shows here."""
    model = tiny(family, max_position_embeddings=400) if family != "gpt2" else tiny(family, n_positions=400)
    for gamma in (1, 4, 7):
        log, target, draft = [], CachedLM(model, 400), CachedLM(model, 400)
        sample = Sampler(temperature, top_k, top_p, seed=1)
        assert len(tokens_of(speculative(target, draft, PROMPT, gamma=gamma, sample=sample, log=log), 300)) == 300
        assert all(r["accepted"] == gamma for r in log)
        assert target.calls == -(-300 // (gamma + 1)) and draft.calls == gamma * target.calls


class Script:
    """A sampler whose uniform numbers are given and which remembers the distribution that it should draw from."""

    def __init__(self, uniform):
        self.numbers = torch.tensor(uniform, dtype=torch.float64)

    def uniform(self, n, device):
        return self.numbers

    def draw(self, probs):
        self.probs = probs[0]
        return [0]


def acceptance(p, q, guesses, i):
    """The probability that `verify` accepts guess i once it has accepted those before: the u at which it stops doing so, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        accepted, _ = verify(p, q, guesses, Script([0.0] * i + [middle] + [0.0] * (len(guesses) - i - 1)))
        low, high = (middle, high) if accepted > i else (low, middle)
    return low if high < 1 else 1.0


@pytest.mark.parametrize("temperature, top_k, top_p", [(1, 0, 1), (0.5, 0, 1), (2, 3, 1), (1, 0, 0.7), (0.8, 4, 0.9), (0, 0, 1)])
def test_accept_or_residual_is_exact_by_enumeration(temperature, top_k, top_p):
    """V = 5, gamma = 2, all 25 drafts: the first token has the target's distribution, and so has the second given the first."""
    torch.manual_seed(0)
    sample = Sampler(temperature, top_k, top_p)
    for _ in range(3):
        target_logits, draft_logits = 1.5 * torch.randn(6, 5), 1.5 * torch.randn(6, 5)  # row 0: at the start; row 1 + x: after token x
        p_of, q_of = sample.probs(target_logits).double(), sample.probs(draft_logits).double()
        joint = torch.zeros(5, 5, dtype=torch.float64)  # of the first two tokens
        for x, y in itertools.product(range(5), repeat=2):
            weight = (q_of[0, x] * q_of[1 + x, y]).item()
            if weight == 0:
                continue
            p, q = p_of[[0, 1 + x, 1 + y]], q_of[[0, 1 + x]]
            first, second = acceptance(p, q, [x, y], 0), acceptance(p, q, [x, y], 1)
            if first < 1:  # rejected at once; the second token then comes from the target in a later call
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


@pytest.mark.parametrize("temperature, top_k, top_p, gamma", [(1, 0, 1, 3), (0.7, 3, 0.95, 2), (1.5, 0, 0.8, 1)])
def test_sampled_output_has_the_targets_distribution(temperature, top_k, top_p, gamma):
    """12,000 seeded runs: chi-square test of the first four tokens (256 cells) at a false-failure probability of 1e-6."""
    target, draft, sample, runs = markov(1), markov(2), Sampler(temperature, top_k, top_p, seed=11), 12000
    counts = torch.zeros(4, 4, 4, 4)
    for _ in range(runs):
        counts[tuple(tokens_of(speculative(ScriptedLM(target), ScriptedLM(draft), [0, 1], gamma=gamma, sample=sample), 4))] += 1
    expected = torch.ones(4, 4, 4, 4)
    for tokens in itertools.product(range(4), repeat=4):
        for i in range(4):
            expected[tokens] *= sample.probs(target([0, 1, *tokens[:i]]))[tokens[i]]
    assert chi_square_ok(counts.flatten(), expected.flatten())
    wrong = torch.ones(4, 4, 4, 4)
    for tokens in itertools.product(range(4), repeat=4):
        for i in range(4):
            wrong[tokens] *= sample.probs(0.85 * target([0, 1, *tokens[:i]]) + 0.15 * draft([0, 1, *tokens[:i]]))[tokens[i]]
    assert not chi_square_ok(counts.flatten(), wrong.flatten())  # the test has the power to see a small bias


def test_sampled_output_of_real_caches_has_the_targets_distribution():
    """The same on tiny transformers, 1,500 runs, the first two tokens after a fixed prompt: 1e-6."""
    model, sample = tiny("llama", vocab_size=7), Sampler(temperature=2.0, seed=5)
    target, draft = CachedLM(model, 16), CachedLM(near(model, 0.1), 16)
    counts, expected = torch.zeros(7, 7), torch.zeros(7, 7)
    for _ in range(1500):
        _, *pair = tokens_of(speculative(target, draft, [3, 4], gamma=2, sample=sample), 3)  # the first one is the prefill's
        counts[tuple(pair)] += 1
    first = sample.probs(target.prefill([3, 4]))[0]
    for a in range(7):
        second = sample.probs(target.prefill([3, 4, a]))[0]
        for b in range(7):
            expected[b] += first[a] * second[b] * sample.probs(target.prefill([3, 4, a, b]))[0]
    assert chi_square_ok(counts.flatten(), expected.flatten())


def test_sampling_is_seeded():
    model, draft = tiny("llama"), near(tiny("llama"), 0.05)
    runs = [tokens_of(speculative(CachedLM(model, 90), CachedLM(draft, 90), PROMPT, sample=Sampler(seed=seed)), 80) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_models_with_different_padding_of_the_vocabulary():
    """A target with 61 rows and a draft with 70: `vocab` cuts both to the tokens that exist."""
    target, draft = tiny("llama"), tiny("llama", seed=2, vocab_size=70)
    expected = tokens_of(autoregressive(CachedLM(target, 90), PROMPT), 80)
    assert tokens_of(speculative(CachedLM(target, 90, vocab=61), CachedLM(draft, 90, vocab=61), PROMPT), 80) == expected


def test_gamma_0_is_refused():
    with pytest.raises(InputError, match="gamma of 1 or more, got 0"):
        next(speculative(ScriptedLM(markov(1)), ScriptedLM(markov(2)), [0, 1], gamma=0))


def test_held_out_prompts_of_the_embedded_pair(embedded):
    """256 tokens each, past EOS, where the models are out of their world."""
    import tasks
    target, draft, tokenizer = embedded
    rng = random.Random(0)
    for task in tasks.TASKS:
        for example in tasks.take(task, "test", 2, seed=20):
            prompt = tokenizer(example.prompt)["input_ids"]
            expected = tokens_of(autoregressive(CachedLM(target, 600), prompt), 256)
            assert tokens_of(speculative(CachedLM(target, 600), CachedLM(draft, 600), prompt, gamma=rng.randint(1, 12)), 256) == expected


# ---------------------------------------------------------------- several drafts

RULES, SEVERAL = {"multi_step": multi_step, "k_seq": k_seq}, {"specinfer": specinfer, "spectr": spectr}


def random_pairs(n=6, vocab=4):
    """Distributions (p, q): close, far, equal, with zeros, one-hot."""
    torch.manual_seed(0)
    for scale in (0.3, 1.0, 3.0):
        for _ in range(n):
            yield (scale * torch.randn(vocab)).softmax(-1).double(), (scale * torch.randn(vocab)).softmax(-1).double()
    p = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    yield p, p
    yield torch.tensor([0.5, 0.5, 0, 0]).double(), p
    yield p, torch.tensor([0, 0.2, 0.8, 0]).double()
    yield torch.tensor([0, 0, 1, 0]).double(), torch.tensor([0, 0, 1, 0]).double()
    yield torch.tensor([0, 0, 1, 0]).double(), torch.tensor([0, 1, 0, 0]).double()


def outcome(rule, p, q, k, distinct=False):
    """(the distribution of the token at one node, the probability that a draw is accepted) by enumeration of all k draws."""
    result, accepted = torch.zeros_like(p), 0.0
    for draws in itertools.product(range(len(q)), repeat=k):
        weight = torch.prod(q[list(draws)]).item()
        if weight == 0:
            continue
        draws = list(dict.fromkeys(draws)) if distinct else list(draws)
        accept, rest = rule(p, q, draws)
        for x, a in zip(draws, accept):
            result[x] += weight * a
            accepted, weight = accepted + weight * a, weight * (1 - a)
        result += weight * rest
    return result, accepted


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_several_drafts_are_exact_by_enumeration(rule):
    """V = 4: the token has the target's distribution whatever the number of drafts, and acceptance never falls as it grows."""
    for p, q in random_pairs():
        rates = []
        for k in (1, 2, 3):
            result, accepted = outcome(rule, p, q, k)
            torch.testing.assert_close(result, p, atol=1e-6, rtol=0)
            rates.append(accepted)
        assert rates[0] <= rates[1] + 1e-6 and rates[1] <= rates[2] + 1e-6
        assert abs(rates[0] - torch.minimum(p, q).sum()) < 1e-6  # with one draft the rule of speculative sampling


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_one_draft_is_plain_speculative_sampling(rule):
    for p, q in random_pairs():
        for x in range(4):
            if q[x] > 0:
                [accept], rest = rule(p, q, [x])
                assert abs(accept - min(1, p[x] / q[x])) < 1e-9
                if accept < 1:
                    residual = (p - q).clamp(min=0)
                    torch.testing.assert_close(rest.double(), residual / residual.sum(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_equal_draws_must_be_kept(rule):
    """With each token once, as a trie would have it, the outcome is wrong by far more than rounding."""
    errors = [(outcome(rule, p, q, 3, distinct=True)[0] - p).abs().max().item() for p, q in random_pairs()]
    assert max(errors) > 1e-3


@pytest.mark.parametrize("method", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("gamma, num_drafts", [(2, 2), (1, 3)])
def test_several_sampled_drafts_have_the_targets_distribution(method, gamma, num_drafts):
    """5,000 seeded runs: chi-square test of the first three tokens (64 cells) at a false-failure probability of 1e-6."""
    target, draft, sample = markov(1), markov(2), Sampler(0.9, top_p=0.97, seed=7)
    counts, expected = torch.zeros(4, 4, 4), torch.ones(4, 4, 4)
    for _ in range(5000):
        counts[tuple(tokens_of(method(ScriptedLM(target), ScriptedLM(draft), [0, 1], gamma=gamma, num_drafts=num_drafts, sample=sample), 3))] += 1
    for tokens in itertools.product(range(4), repeat=3):
        for i in range(3):
            expected[tokens] *= sample.probs(target([0, 1, *tokens[:i]]))[tokens[i]]
    assert chi_square_ok(counts.flatten(), expected.flatten())


@pytest.mark.parametrize("method", SEVERAL.values(), ids=SEVERAL)
def test_several_drafts_on_real_caches(method, family):
    """Greedy equals AR; the target as its own draft is always accepted, sampled and greedy: a row of a cache out of place shows there."""
    model = tiny(family)
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT), PROMPT), CONTEXT - len(PROMPT))
    assert tokens_of(method(CachedLM(model, CONTEXT), CachedLM(near(model, 0.02), CONTEXT), PROMPT, gamma=4, num_drafts=3), CONTEXT - len(PROMPT)) == expected
    for sample in (greedy, Sampler(1.5, seed=2)):
        log = []
        tokens_of(method(CachedLM(model, CONTEXT), CachedLM(model, CONTEXT), PROMPT, gamma=4, num_drafts=3, sample=sample, log=log), 100)
        assert len(log) == 20 and all(r["accepted"] == 4 for r in log)
    assert sample is greedy or max(r["drafted"] for r in log) > 8  # the drafts part


# ---------------------------------------------------------------- BiLD

def table(**rows):
    """A scripted model: the distribution after the last token x is rows["t<x>"]."""
    return ScriptedLM(lambda tokens: torch.tensor(rows[f"t{tokens[-1]}"]).log())


def test_bild_follows_its_two_thresholds():
    draft = dict(t0=[0.1, 0.8, 0.1], t1=[0.2, 0.2, 0.6], t2=[0.45, 0.3, 0.25])
    target = dict(t0=[0.2, 0.5, 0.3], t1=[0.7, 0.2, 0.1], t2=[0.1, 0.8, 0.1])

    def first(**options):
        log = []
        return next(bild(table(**target), table(**draft), [0], log=log, **options)), log[0]
    # 0 -> 1 (0.8) -> 2 (0.6) -> stops at 0.45; costs: -log 0.5 = 0.69, -log 0.1 = 2.30
    assert first(fallback=0.5, rollback=2.31) == ([1, 2, 1], {"drafted": 2, "accepted": 2})
    assert first(fallback=0.5, rollback=2.30) == ([1, 0], {"drafted": 2, "accepted": 1})
    assert first(fallback=0.5, rollback=0.69) == ([1], {"drafted": 2, "accepted": 0})
    assert first(fallback=0.5, rollback=0.70) == ([1, 0], {"drafted": 2, "accepted": 1})
    assert first(fallback=0.61, rollback=9.0) == ([1, 0], {"drafted": 1, "accepted": 1})
    assert first(fallback=0.81, rollback=9.0) == ([1], {"drafted": 0, "accepted": 0})
    assert first(fallback=0.0, rollback=9.0, gamma=4) == ([1, 2, 0, 1, 0], {"drafted": 4, "accepted": 4})


def test_bild_is_exact_in_its_limits(family):
    model = tiny(family)
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT), PROMPT), 80)
    for draft, options in ((near(model, 0.02), dict(rollback=0.0, fallback=0.1)), (near(model, 0.02), dict(fallback=1.1)), (model, dict(fallback=0.1, rollback=9.0))):
        assert tokens_of(bild(CachedLM(model, CONTEXT), CachedLM(draft, CONTEXT), PROMPT, gamma=4, **options), 80) == expected


@pytest.mark.parametrize("method, options, message", [
    (specinfer, dict(num_drafts=0), "num_drafts of 1 or more, got 0"), (spectr, dict(gamma=0), "gamma of 1 or more, got 0"),
    (bild, dict(fallback=-1.0), "fallback and rollback of 0 or more"), (bild, dict(rollback=-0.1), "fallback and rollback of 0 or more")])
def test_bad_options_are_refused(method, options, message):
    with pytest.raises(InputError, match=message):
        next(method(ScriptedLM(markov(1)), ScriptedLM(markov(2)), [0, 1], **options))
