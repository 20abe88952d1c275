"""Speculative decoding: the target's own output, exactly, and full use of a good draft."""
import itertools
import random

import pytest
import torch

from common import CachedLM, InputError, Sampler, autoregressive, greedy
from conftest import CONTEXT, ScriptedLM, chi_square_ok, markov, near, tiny, tokens_of
from speculative import speculative, verify

PROMPT = [3, 14, 15]


def test_greedy_equals_autoregressive(family):
    """Up to the last token of the context, where drafts reach past it; a draft that is often right and one that is not."""
    model = tiny(family)
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT), PROMPT), CONTEXT - len(PROMPT))
    for draft, gamma in itertools.product((near(model, 0.02), tiny(family, seed=7)), range(1, 13)):
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
        assert target.calls == 1 + -(-299 // (gamma + 1)) and draft.calls == 1 + gamma * (target.calls - 1)


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
        for example in tasks.take(task, "test", 4, seed=20):
            prompt = tokenizer(example.prompt)["input_ids"]
            expected = tokens_of(autoregressive(CachedLM(target, 600), prompt), 256)
            assert tokens_of(speculative(CachedLM(target, 600), CachedLM(draft, 600), prompt, gamma=rng.randint(1, 12)), 256) == expected
