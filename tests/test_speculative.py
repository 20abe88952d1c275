"""Speculative decoding: the rule of acceptance, real caches, the report. That whole texts have the
target's law is in test_lossless.py."""
from types import SimpleNamespace

import pytest
import torch

from common import CachedLM, Sampler, autoregressive
from fake_models import Zeros
from families import near, tiny
from helpers import check_without_caches, tokens_of
from laws import outcomes
from speculative import report, report_acceptance, residual, speculative, verify
from test_lossless import Choosing

PROMPT = [3, 14, 15]


# ------------------------------------------------------------------------------------ the rule

@pytest.mark.parametrize("temperature, top_k, top_p", [
    (0.5, 0, 1), (2, 3, 1), (1, 0, 0.7), (0.8, 4, 0.9), (0, 0, 1)])
def test_accept_or_residual_is_exact_by_enumeration(temperature, top_k, top_p):
    """Of V = 5 tokens and gamma = 2: all drafts, coins and replacements. The first token has the
    target's distribution, and so has the second given the first."""
    torch.manual_seed(0)
    logits = 1.5 * torch.randn(2, 6, 5)  # row 0: at the start; row 1 + x: after token x
    p_of, q_of = Sampler(temperature, top_k, top_p).probs(logits).double()
    found = torch.zeros(5, 5, dtype=torch.float64)  # of the first two tokens

    def round_of(choose):
        x = choose(q_of[0].tolist())
        y = choose(q_of[1 + x].tolist())
        accepted, token = verify(p_of[[0, 1 + x, 1 + y]], q_of[[0, 1 + x]], [x, y],
                                 Choosing(choose))
        return [*[x, y][:accepted], token]
    for chance, text in outcomes(round_of):
        if len(text) == 1:  # the next call of the target gives the second token
            found[text[0]] += chance * p_of[1 + text[0]]
        else:
            found[text[0], text[1]] += chance
    torch.testing.assert_close(found, p_of[0][:, None] * p_of[1:], atol=1e-6, rtol=0)


def test_residual():
    """By hand. A draw from q = p is rejected by rounding alone, and then p itself is left."""
    p, q = torch.tensor([0.5, 0.4, 0.1, 0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    torch.testing.assert_close(residual(p, q), torch.tensor([2, 1, 0, 0]) / 3)
    torch.testing.assert_close(residual(q, p), torch.tensor([0, 0, 1, 2]) / 3)
    assert torch.equal(residual(p, p), p)


def test_a_guess_of_no_probability_is_never_accepted():
    p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[0.5, 0.5]])
    assert verify(p, q, [0], Zeros()) == (0, 1)


# ---------------------------------------------------------------------------------- real models

@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sampled_output_of_real_caches_is_that_without_caches(family):
    model = tiny(family)
    check_without_caches(speculative, model, [near(model, 0.04)], PROMPT, gamma=2)


def test_sampling_is_seeded():
    model, draft = tiny("llama"), near(tiny("llama"), 0.05)
    runs = [tokens_of(speculative(CachedLM(model), CachedLM(draft), PROMPT,
                                  sample=Sampler(seed=seed)), 30) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_models_of_different_families_and_vocabularies():
    """A target with 61 rows of logits and a draft with 70: `vocab` cuts both to real tokens."""
    target, draft = CachedLM(tiny("llama")), CachedLM(tiny("gpt2", vocab_size=70), vocab=61)
    expected = tokens_of(autoregressive(target, PROMPT), 80)
    assert tokens_of(speculative(target, draft, PROMPT, gamma=3), 80) == expected


# ----------------------------------------------------------------------------------- the report

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
