"""These tests check the rule of acceptance of speculative decoding, and its report. That whole
texts have the target's law is in test_lossless.py."""
import functools
from types import SimpleNamespace

import pytest
import torch

from cli.run import count_guesses
from common import Sampler
from laws import Choosing, law, outcomes
from speculative import report, verify_block, verify_tokens


# ------------------------------------------------------------------------------------ the rule

def expand(logits: torch.Tensor, sample: Sampler, gamma: int, verify) -> tuple:
    """Enumerate a round: all drafts, coins and replacements. Token x is followed by row 1 + x of
    the target's logits and of the draft's [2, 1 + V, V]; row 0 is for the first token.

    returns  the law [V ** (gamma + 1)] of the tokens that begin with the round's chunk, and the
             number of guesses to be expected of the round
    """
    (p_of, q_of), V = sample.probs(logits).double(), logits.shape[-1]

    def round_of(choose):
        guesses, rows = [], [0]
        for _ in range(gamma):
            guesses.append(choose(q_of[rows[-1]].tolist()))
            rows.append(1 + guesses[-1])
        accepted, token = verify(p_of[rows], q_of[rows[:-1]], guesses, Choosing(choose))
        return [*guesses[:accepted], token]
    found, expected = torch.zeros([V] * (gamma + 1), dtype=torch.float64), 0.0
    continued = functools.cache(lambda *text: continue_text(logits[0], sample, *text))
    for chance, text in outcomes(round_of):
        left = gamma + 1 - len(text)
        expected += chance * (len(text) - 1)
        found[tuple(text)] += chance * continued(text[-1], left).view([V] * left)
    return found.flatten(), expected


def continue_text(logits: torch.Tensor, sample: Sampler, token: int, n: int) -> torch.Tensor:
    """Compute the target's law [V ** n] of the n tokens after a token, -1 for the first of all."""
    return law(lambda text: logits[1 + text[-1]], sample, [token], n, logits.shape[-1]).double()


@pytest.mark.parametrize("gamma, V, temperature, top_k, top_p", [
    (2, 5, 0.5, 0, 1), (2, 4, 2, 3, 1), (3, 4, 1, 0, 0.7), (3, 4, 0.8, 2, 0.9), (2, 4, 0, 0, 1),
    (4, 3, 1.5, 0, 1)])
def test_both_rules_are_exact_by_enumeration(gamma, V, temperature, top_k, top_p):
    """The text's tokens have the target's joint law. With top-k and top-p q is 0 where p is not,
    and the reverse. A block never accepts fewer guesses. It accepts more where many tokens have a
    chance."""
    logits = 1.5 * torch.randn(2, 1 + V, V, generator=torch.Generator().manual_seed(0))
    sample, counts = Sampler(temperature, top_k, top_p), {}
    for name, verify in ("token", verify_tokens), ("block", verify_block):
        found, counts[name] = expand(logits, sample, gamma, verify)
        expected = continue_text(logits[0], sample, -1, gamma + 1)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert counts["block"] > counts["token"] - 1e-6
    if temperature > 0 and top_p == 1:
        assert counts["block"] > counts["token"] + 1e-3


# ----------------------------------------------------------------------------------- the report

def test_the_report():
    """By hand: a draft call costs a tenth of a target call. Leviathan, Theorem 3.8."""
    models = {"target": SimpleNamespace(calls=3, seconds=6.0),
              "draft": SimpleNamespace(calls=12, seconds=2.4)}

    def run_of(*accepted):
        log = [{"guessed": 4, "accepted": n} for n in accepted]
        return SimpleNamespace(models=models, log=log)
    assert report(run_of(4, 1, 0)) == (  # α = 5 / 7: the first rejected guess is tried too
        "accepted 5 of 12 drafted tokens, 1.67 a round; 12 draft calls\n"
        "acceptance rate 71.4% of 7 tried; predicted from it, a draft call costing 0.10 "
        "of a target call: 2.85 tokens per call, speed-up 2.04x")
    assert report(run_of(4, 4, 4)).endswith(": 5.00 tokens per call, speed-up 3.57x")
    assert report(run_of(0, 0, 0)).endswith(": 1.00 tokens per call, speed-up 0.71x")
    cut = run_of(4, 1, 0)
    cut.log[1]["cut"] = True  # the limit: the guess after the one that was kept is not tried
    assert "83.3% of 6 tried" in report(cut)
    models["draft 2"] = SimpleNamespace(calls=8, seconds=1.0)
    assert count_guesses(run_of(4, 1, 0)) == "a round: 4.0 guesses, 1.67 accepted; 20 draft calls"
    log = [{"guessed": 7, "accepted": 3, "layers": 20}, {"guessed": 3, "accepted": 0, "layers": 20}]
    text = count_guesses(SimpleNamespace(log=log, tokens=6, models={}))
    assert text == "a round: 5.0 guesses, 1.50 accepted; 6.7 layers run a token"
