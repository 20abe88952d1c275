"""Speculative decoding: the target's own output, exactly, and full use of a good draft."""
import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from common import CachedLM, InputError, Sampler, autoregressive
from fake_models import ScriptedLM, Zeros, markov, uncached
from families import near, tiny
from helpers import choices, tokens_of
from speculative import report, report_acceptance, residual, speculative, verify

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


# ------------------------------------------------------------------------------------ sampling

@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sampled_output_of_real_caches_is_that_without_caches(family):
    """With the same seed, token by token: a row out of place would change some draws. So it has the
    distribution that the tests on scripted models find."""
    model, outputs, logs = tiny(family), [], []
    draft = near(model, 0.04)
    for make in (CachedLM, uncached):
        log, sample = [], Sampler(0.7, seed=4)
        chunks = speculative(make(model), make(draft), PROMPT, gamma=2, sample=sample, log=log)
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


# ---------------------------------------------------------------------- mistakes and the report

def test_gamma_must_be_positive():
    with pytest.raises(InputError, match="^--gamma must be 1 or more, got 0$"):
        next(speculative(ScriptedLM(markov(1)), ScriptedLM(markov(2)), [0, 1], gamma=0))


def test_the_report():
    """By hand: a draft call costs a tenth of a target call. Leviathan, Theorem 3.8."""
    models = {"target": SimpleNamespace(calls=3, seconds=6.0),
              "draft": SimpleNamespace(calls=12, seconds=2.4)}

    def run_of(*accepted):
        log = [{"drafted": 4, "accepted": n} for n in accepted]
        return SimpleNamespace(models=models, log=log)
    first = "accepted 5 of 12 drafted tokens, 1.67 a round; 12 draft calls"
    assert report(run_of(4, 1, 0)) == (  # α = 5 / 7: the first rejected guess is tried too
        f"{first}\nacceptance rate 71.4% of 7 tried; predicted from it, a draft call costing 0.10 "
        "of a target call: 2.85 tokens per call, speed-up 2.04x")
    assert report(run_of(4, 4, 4)).endswith(": 5.00 tokens per call, speed-up 3.57x")
    assert report(run_of(0, 0, 0)).endswith(": 1.00 tokens per call, speed-up 0.71x")
    cut = run_of(4, 1, 0)
    cut.log[1]["cut"] = True  # the limit: the guess after the one that was kept is not tried
    assert "83.3% of 6 tried" in report(cut)
    models["draft 2"] = SimpleNamespace(calls=8, seconds=1.0)
    assert report_acceptance(run_of(4, 1, 0)) == first.replace("12 draft calls", "20 draft calls")


def test_a_guess_of_no_probability_is_never_accepted():
    p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[0.5, 0.5]])
    assert verify(p, q, [0], Zeros()) == (0, 1)


def test_verification_waits_for_the_device_twice(waits):
    """For the number of accepted guesses and for the token: a GPU is left alone between them."""
    p, q = (torch.rand(6, 9).softmax(-1) for _ in "pq")
    p[3, 4] = 0  # the fourth guess is rejected, if none is before it
    assert verify(p, q[:5], [1, 2, 3, 4, 5], Sampler(seed=1))[0] < 5
    assert len(waits) == 2
