"""SpecInfer and SpecTr: rules that are exact at a node, and trees that are those of the drafts.
That whole texts have the target's law is in test_lossless.py."""
import pytest
import torch

from common import Sampler, greedy
from fake_models import ScriptedLM
from laws import law_of_node, random_pairs
from survey.several_drafts import (DrawnDraft, decode_by_rule, find_rho, k_seq, multi_step,
                                   specinfer, verify_tree)


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


# ------------------------------------------------------------------------- several draft models

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
