"""Speculative decoding and sampling: a small draft model guesses tokens, the target checks them all in one forward pass.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192, Alg. 1
Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", arXiv 2302.01318, Alg. 2

    accept the draft's x ~ q with probability min(1, p(x) / q(x)); at the first rejection draw from norm(max(0, p - q))

p is the target's distribution and q the draft's, both after temperature, top-k and top-p (Chen swaps the letters; here they are
`target_probs` and `draft_probs`). Lossless: what comes out has exactly the target's distribution (survey, appendix), and at temperature
0, where p and q are one-hot, it is the target's greedy output: the same rule accepts while the draft guesses the target's argmax.
Left out: batches, and drafts of a length chosen as it goes.
"""
import sys
from typing import Iterator

import torch

from common import CachedLM, InputError, Run, Sampler, greedy, main


def verify(target_probs: torch.Tensor, draft_probs: torch.Tensor, guesses: list[int], sample: Sampler) -> tuple[int, int]:
    """(number of accepted guesses, the token that follows them). Leviathan, Alg. 1; Chen, Theorem 1.

    target_probs [γ+1, V]: the target's distribution at each guess, and after the last one
    draft_probs [γ, V]:    what each guess was drawn from
    """
    at = torch.arange(len(guesses)), torch.tensor(guesses)
    ratio = target_probs[at] / draft_probs[at]  # [γ], p(x) / q(x)
    passed = sample.uniform(len(guesses), ratio.device) < ratio
    accepted = int(passed.cumprod(0).sum())
    rest = target_probs[accepted]  # [V]
    if accepted < len(guesses):
        residual = (rest - draft_probs[accepted]).clamp(min=0)
        rest = residual / residual.sum() if residual.sum() > 0 else rest  # 0 only by rounding, when p and q are equal
    return accepted, sample.draw(rest[None])[0]


def speculative(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5, sample: Sampler = greedy,
                log: list | None = None) -> Iterator[list[int]]:
    """Draft gamma tokens one by one, verify them in one target call, keep the accepted ones and one more from the target.

    gamma: tokens drafted a round, 1 or more
    Yields chunks of 1 to gamma + 1 tokens; logs a record {"drafted", "accepted"} a round.
    """
    if gamma < 1:
        raise InputError(f"expected gamma of 1 or more, got {gamma}")
    [root] = sample(target.prefill(prompt, width=gamma + 1))
    draft.prefill(prompt, width=gamma + 1)
    yield [root]
    unseen = [root]  # final tokens that the draft model has not been fed
    while True:
        # Step 1: draw gamma guesses x_i ~ q_i; the draft's pending chain grows by unseen, then by each guess but the last
        guesses, draft_probs, ids = [], [], unseen
        for _ in range(gamma):
            draft_probs.append(sample.probs(draft.forward(ids)[-1:]))  # [1, V]
            ids = sample.draw(draft_probs[-1])
            guesses += ids
        # Step 2: p_1 … p_{γ+1} in one call
        target_probs = sample.probs(target.forward([root, *guesses]))  # [γ+1, V]
        # Steps 3 and 4: accept or reject; draw one more token from the residual or from p_{γ+1}
        accepted, token = verify(target_probs, torch.cat(draft_probs), guesses, sample)
        # Step 5: cache what became final. The last guess was never fed to the draft: it is unseen if accepted
        target.commit(range(1 + accepted))
        draft.commit(range(len(unseen) + min(accepted, gamma - 1)))
        unseen, root = (guesses[-1:] if accepted == gamma else []) + [token], token
        if log is not None:
            log.append({"drafted": gamma, "accepted": accepted})
        yield guesses[:accepted] + [token]


def report(run: Run) -> str:
    """Acceptance rate and predicted speed-up (Leviathan, Theorem 3.8) with the costs of this run: a draft call over a target call."""
    target, draft = run.models["target"], run.models["draft"]
    if not run.log:
        return "no round was needed"
    rounds, tried = len(run.log), sum(min(r["accepted"] + 1, r["drafted"]) for r in run.log)  # guesses after a rejected one were not tried
    accepted, gamma = sum(r["accepted"] for r in run.log), run.log[0]["drafted"]
    alpha, cost = accepted / tried, (draft.seconds / draft.calls) / (target.seconds / target.calls)
    expected = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return (f"accepted {accepted} of {rounds * gamma} drafted tokens, {accepted / rounds:.2f} a round; "
            f"acceptance rate {alpha:.1%} of {tried} tried; {draft.calls} draft calls\n"
            f"predicted at this rate, with a draft call at {cost:.2f} of a target call: "
            f"{expected:.2f} tokens per call, speed-up {expected / (gamma * cost + 1):.2f}x")


if __name__ == "__main__":
    sys.exit(main([speculative], report))
