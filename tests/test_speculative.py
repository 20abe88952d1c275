"""These tests check the rules of acceptance of speculative decoding, with one draft and with
several (SpecInfer and SpecTr). They are exact at a node, and the trees are those of the drafts.
That whole texts have the target's law is in test_lossless.py."""
import functools
from types import SimpleNamespace

import pytest
import torch

from cli.run import count_guesses
from common import Sampler, greedy
from fake_models import ScriptedLM
from laws import Choosing, law, law_of_node, outcomes, random_pairs
from speculative import report, verify_block, verify_tokens
from survey.several_drafts import (DrawnDraft, decode_by_rule, find_rho, k_seq, multi_step,
                                   specinfer, verify_tree)


# ------------------------------------------------------------------------------- one draft

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
    sample, counts = Sampler(temperature, top_k=top_k, top_p=top_p), {}
    for name, verify in ("token", verify_tokens), ("block", verify_block):
        found, counts[name] = expand(logits, sample, gamma, verify)
        expected = continue_text(logits[0], sample, -1, gamma + 1)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert counts["block"] > counts["token"] - 1e-6
    if temperature > 0 and top_p == 1:
        assert counts["block"] > counts["token"] + 1e-3


# ------------------------------------------------------------------------------ several drafts

@pytest.mark.parametrize("rule", [multi_step, k_seq])
def test_several_drafts_are_exact_by_enumeration(rule):
    """The token has the target's distribution whatever the number of drafts. Acceptance never falls
    as that number grows; with one draft it is that of speculative sampling."""
    def judge(choose):
        draws = [choose(q.tolist()) for _ in range(K)]
        accept, rest = rule(p, q.expand(K, -1), draws)
        for x, chance in zip(draws, accept.tolist()):
            if choose([1 - chance, chance]):
                return x, True
        return choose(rest.tolist()), False
    for p, q in random_pairs():
        rates = []
        for K in (1, 2, 3):
            result, accepted = law_of_node(judge, p)
            torch.testing.assert_close(result, p, atol=1e-6, rtol=0)
            rates.append(accepted)
        assert rates[0] <= rates[1] + 1e-6 and rates[1] <= rates[2] + 1e-6
        assert abs(rates[0] - torch.minimum(p, q).sum()) < 1e-6


def test_models_take_turns():
    """Draft i is of model i mod n. Equal drafts of a model share their rows."""
    drafts = [ScriptedLM(lambda tokens, x=x: 9.0 * torch.eye(4)[x]) for x in (2, 3, 2)]
    target = ScriptedLM(lambda tokens: torch.eye(4)[3])
    chunks = decode_by_rule(multi_step, target, drafts, [0, 1], 2, 5, greedy, [])
    assert next(chunks) == [3, 3, 3] and [draft.rows for draft in drafts] == [2, 2, 2]
    assert next(chunks) == [3, 3, 3] and [draft.rows for draft in drafts] == [6, 5, 6]


def test_at_temperature_0_drafts_begin_with_different_tokens():
    """Draft k with the k-th likeliest. The target's second choice of the draft is accepted, and
    with it all that the draft says after it."""
    draft = ScriptedLM(lambda tokens: torch.eye(9)[1 + tokens[-1] % 8] + torch.eye(9)[5] / 2)
    target = ScriptedLM(lambda tokens: torch.eye(9)[5 if tokens[-1] == 2 else 1 + tokens[-1] % 8])
    log = []
    assert next(specinfer(target, draft, [7, 2], gamma=3, K=2, log=log)) == [5, 6, 7, 8]
    assert log == [{"guessed": 6, "accepted": 3}]  # 3 4 5 and 5 6 7
    assert next(specinfer(target, draft, [7, 2], gamma=3, K=1)) == [5]  # speculative decoding


def test_draws_of_the_targets_own_distribution_are_accepted():
    """Rounding alone can reject them, and p itself is left."""
    p = torch.tensor([0.5, 0.4, 0.1, 0])
    accept, left = multi_step(p, p.expand(3, -1), [0, 0, 1])
    assert accept.tolist() == [1, 1, 1] and torch.equal(left, p)


def test_two_drafts_that_begin_alike():
    """This is the example of `verify_tree`: sat on the mat, sat on my hat."""
    on, the, mat, my, hat = range(5)
    eye = torch.eye(5)
    asked = []

    def rule(p, q, draws):
        asked.append((p.argmax().item(), q.argmax(-1).tolist(), draws))
        return torch.tensor([float(x in (on, my)) for x in draws]), eye[3]
    first = {(): eye[0], (on,): eye[1], (on, the): eye[2]}
    second = {(): eye[4], (on,): eye[3], (on, my): eye[2]}
    drafts = [DrawnDraft((on, the, mat), first, [0, 1, 2, 3]),
              DrawnDraft((on, my, hat), second, [0, 1, 4, 5])]
    target_probs = eye[[0, 1, 2, 3, 4, 0]]
    accepted, path, rest = verify_tree(rule, target_probs, drafts, Sampler())
    assert (accepted, path, rest.argmax()) == ((on, my), [0, 1, 4], 3)
    # at each node: the target's row, the q of each draw's own model, the draws
    assert asked == [(0, [0, 4], [on, on]), (1, [1, 3], [the, my]), (4, [2], [hat])]
    # where several draws pass, the first of them counts
    accepted, path, _ = verify_tree(lambda p, q, draws: (torch.ones(len(draws)), p), target_probs,
                                    drafts, Sampler())
    assert (accepted, path) == ((on, the, mat), [0, 1, 2, 3])


# ----------------------------------------------------------------------------------- SpecTr's ρ

@pytest.mark.parametrize("K", [1, 3, 9])
def test_rho_is_the_smallest_that_keeps_the_rule_exact(K):
    """1 - (1 - β(ρ))^K is not above ρ β(ρ), and is above it a millionth before. So what is left of
    p has no negative entries."""
    def excess(p, q, rho):
        beta = torch.minimum(q, p / rho).sum()
        return 1 - (1 - beta) ** K - rho * beta
    torch.manual_seed(1)
    wide = [tuple((3 * torch.randn(500)).double().softmax(-1) for _ in "pq") for _ in range(20)]
    for p, q in [*random_pairs(), *wide]:
        rho = find_rho(p, q, K)
        assert rho.dtype == torch.float64 and excess(p, q, rho) < 1e-12
        assert rho < 1 + 1e-6 or excess(p, q, rho - 1e-6) > 0


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
