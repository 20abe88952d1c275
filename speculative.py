"""Speculative decoding and sampling: a small draft model guesses tokens, the target checks them all in one forward pass.

speculative   Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192, Alg. 1
              Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", arXiv 2302.01318, Alg. 2
specinfer     Miao et al., "SpecInfer", arXiv 2305.09781: several drafts as one tree, multi-step speculative sampling
spectr        Sun et al., "SpecTr", arXiv 2310.15141: the same tree, accepted by k-SEQ
bild          Kim et al., "Speculative Decoding with Big Little Decoder", arXiv 2302.07863: drafts of confident tokens; lossy

    accept the draft's x ~ q with probability min(1, p(x) / q(x)); at the first rejection draw from norm(max(0, p - q))

p is the target's distribution and q the draft's, both after temperature, top-k and top-p (Chen swaps the letters; here they are
`target_probs` and `draft_probs`). All but bild are lossless: what comes out has exactly the target's distribution (survey, appendix), and
at temperature 0, where p and q are one-hot, it is the target's greedy output. Left out: batches, trees of fixed shape.
"""
import sys
from typing import Callable, Iterator

import torch

from common import CachedLM, InputError, Run, Sampler, greedy, main


# ---------------------------------------------------------------- one draft

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


def speculative(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6, sample: Sampler = greedy,
                log: list | None = None) -> Iterator[list[int]]:
    """Draft gamma tokens one by one, verify them in one target call, keep the accepted ones and one more from the target.

    gamma: tokens drafted a round (at most, with bild), 1 or more
    Yields chunks of 1 to gamma + 1 tokens; logs a record {"drafted", "accepted"} a round.
    """
    check(gamma)
    target.start(prompt[:-1], width=gamma + 1)
    draft.start(prompt[:-1], width=gamma + 1)
    root, unseen = prompt[-1], prompt[-1:]  # unseen: final tokens that the draft model has not been fed
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


def check(gamma: int, num_drafts: int = 1) -> None:
    for name, value in (("gamma", gamma), ("num_drafts", num_drafts)):
        if value < 1:
            raise InputError(f"expected {name} of 1 or more, got {value}")


# ---------------------------------------------------------------- several drafts

def multi_step(p: torch.Tensor, q: torch.Tensor, draws: list[int]) -> tuple[list[float], torch.Tensor]:
    """SpecInfer's rule for draws x_1 … x_k ~ q at one node: (the probability that each is accepted once those before it were not,
    the distribution [V] of the token when none is). Try one draw after the other, each against what the last one left of p."""
    accept = []
    for x in draws:
        accept.append(min(1.0, (p[x] / q[x]).item()))
        residual = (p - q).clamp(min=0)
        p = residual / residual.sum() if residual.sum() > 0 else p  # 0 only where p and q are equal, and then the draw was accepted
    return accept, p


def k_seq(p: torch.Tensor, q: torch.Tensor, draws: list[int]) -> tuple[list[float], torch.Tensor]:
    """SpecTr's rule k-SEQ, as `multi_step`: every draw is accepted with min(1, p / (ρ q)), ρ in [1, k] the root of
    1 - (1 - β(ρ))^k = ρ β(ρ), where β(ρ) = Σ_x min(q, p / ρ) is a draw's acceptance probability."""
    k, p, q = len(draws), p.double(), q.double()

    def beta(rho: float) -> float:
        return torch.minimum(q, p / rho).sum().item()
    low, high = 1.0, float(k)
    for _ in range(30 if k > 1 else 0):  # below the root a residual would be negative: keep the upper end
        middle = (low + high) / 2
        low, high = (low, middle) if 1 - (1 - beta(middle)) ** k <= middle * beta(middle) else (middle, high)
    rho, accepted = high, 1 - (1 - beta(high)) ** k
    accept = [min(1.0, (p[x] / (rho * q[x])).item()) for x in draws]
    if 0 < beta(rho) and accepted < 1:
        p = (p - torch.minimum(q, p / rho) * (accepted / beta(rho))).clamp(min=0) / (1 - accepted)
    return accept, (p / p.sum()).float()


def several_drafts(rule: Callable, target: CachedLM, draft: CachedLM, prompt: list[int], gamma: int, num_drafts: int, sample: Sampler,
                   log: list | None) -> Iterator[list[int]]:
    """Draw num_drafts independent drafts, merge equal prefixes into one tree, verify it in one target call, node by node by `rule`.

    A node keeps its draws as a list, duplicates included: with each token once both rules would be wrong. The draws equal to the accepted
    one go on at its node. Yields chunks of 1 to gamma + 1 tokens; logs a record {"drafted": nodes, "accepted"} a round.
    """
    check(gamma, num_drafts)
    target.start(prompt[:-1], width=1 + num_drafts * gamma)
    draft.start(prompt[:-1], width=2 + num_drafts * gamma)
    unseen = prompt[-1:]
    while True:
        base = len(unseen) - 1  # the root's place in the draft's pending tree; node n of ours is node base + n there
        ids, parents, children, draws, draft_probs = unseen[-1:], [-1], {}, {}, {}
        ends, fresh = [0] * num_drafts, [0]  # the node that each draft has come to; nodes without a distribution yet
        for depth in range(gamma):
            logits = draft.forward(unseen if depth == 0 else [ids[n] for n in fresh], None if depth == 0 else [base + parents[n] for n in fresh])
            draft_probs |= zip(fresh, sample.probs(logits[-len(fresh):]))
            tokens, fresh = sample.draw(torch.stack([draft_probs[node] for node in ends])), []
            for j, token in enumerate(tokens):
                if (ends[j], token) not in children:
                    children[ends[j], token] = len(ids)
                    fresh.append(len(ids))
                    ids.append(token)
                    parents.append(ends[j])
                draws.setdefault(ends[j], []).append(children[ends[j], token])
                ends[j] = children[ends[j], token]
        target_probs = sample.probs(target.forward(ids, parents))  # [nodes, V]
        path, accepted = [0], True
        while accepted and path[-1] in draws:
            node = path[-1]
            accept, rest = rule(target_probs[node], draft_probs[node], [ids[child] for child in draws[node]])
            coins = sample.uniform(len(accept), rest.device).tolist()
            accepted = next((child for child, a, u in zip(draws[node], accept, coins) if u < a), None)
            path += [accepted] if accepted else []
        if accepted:  # the last guess of a draft: one more token from the target
            rest = target_probs[path[-1]]
        token, guesses = sample.draw(rest[None])[0], [ids[node] for node in path[1:]]
        target.commit(path)
        draft.commit([*range(base), *(base + node for node in path[:gamma])])  # a last guess was never fed
        unseen = guesses[gamma - 1:] + [token]
        if log is not None:
            log.append({"drafted": len(ids) - 1, "accepted": len(guesses)})
        yield guesses + [token]


def specinfer(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5, num_drafts: int = 2, sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Several drafts, each node's draws tried one after the other. Miao et al., Section 4.3 (multi-step speculative sampling).

    num_drafts: drafts a round, drawn independently (at temperature 0 they are all the same)
    """
    return several_drafts(multi_step, target, draft, prompt, gamma, num_drafts, sample, log)


def spectr(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5, num_drafts: int = 2, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Several drafts, accepted by k-SEQ. Sun et al., Alg. 1 to 3."""
    return several_drafts(k_seq, target, draft, prompt, gamma, num_drafts, sample, log)


# ---------------------------------------------------------------- lossy

def bild(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5, fallback: float = 0.5, rollback: float = 2.0,
         sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Draft while the draft model is confident; the target replaces the first guess that it finds too unlikely. Kim et al., Section 3.

    fallback: stop drafting before a token where the draft's largest probability (temperature 1) is below this; above 1 never draft
    rollback: reject a guess whose -log p under the target (nats, temperature 1) is above this; at 0 only certain tokens pass
    Yields chunks of 1 to gamma + 1 tokens; logs a record {"drafted", "accepted"} a round. Lossy: its greedy output is the target's
    only in the limits rollback 0 and fallback above 1.
    """
    check(gamma)
    if fallback < 0 or rollback < 0:
        raise InputError(f"expected fallback and rollback of 0 or more, got {fallback} and {rollback}")
    target.start(prompt[:-1], width=gamma + 1)
    draft.start(prompt[:-1], width=gamma + 2)
    root, unseen = prompt[-1], prompt[-1:]
    while True:
        guesses, ids = [], unseen
        while len(guesses) < gamma:
            logits = draft.forward(ids)[-1:]  # [1, V]
            if logits.float().softmax(-1).max() < fallback:
                break
            ids = sample(logits)
            guesses += ids
        logits = target.forward([root, *guesses])  # [n + 1, V]
        costs = -logits[:-1].float().log_softmax(-1)[torch.arange(len(guesses)), torch.tensor(guesses, dtype=torch.long)]
        accepted = next((i for i, cost in enumerate(costs.tolist()) if cost > rollback), len(guesses))
        [root] = sample(logits[accepted:accepted + 1])
        target.commit(range(1 + accepted))
        known = unseen + guesses[:accepted]
        fed = min(len(known), len(draft.parents))
        draft.commit(range(fed))
        unseen = known[fed:] + [root]
        if log is not None:
            log.append({"drafted": len(guesses), "accepted": accepted})
        yield guesses[:accepted] + [root]


bild.lossy = True


# ---------------------------------------------------------------- the command line

def report(run: Run) -> str:
    """Acceptance; with one draft also its rate α and the predicted speed-up (Leviathan, Theorem 3.8) with the costs of this run:
    a draft call over a target call."""
    target, draft = run.models["target"], run.models["draft"]
    rounds, drafted, accepted = len(run.log), sum(r["drafted"] for r in run.log), sum(r["accepted"] for r in run.log)
    text = f"accepted {accepted} of {drafted} drafted tokens, {accepted / rounds:.2f} a round; {draft.calls} draft calls"
    if run.method is not speculative:
        return text
    tried = sum(min(r["accepted"] + 1, r["drafted"]) for r in run.log)  # guesses after a rejected one were not tried
    alpha, cost, gamma = accepted / tried, (draft.seconds / draft.calls) / (target.seconds / target.calls), run.log[0]["drafted"]
    expected = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return (f"{text}; acceptance rate {alpha:.1%} of {tried} tried\npredicted at this rate, with a draft call at {cost:.2f} of a target call: "
            f"{expected:.2f} tokens per call, speed-up {expected / (gamma * cost + 1):.2f}x")


if __name__ == "__main__":
    sys.exit(main([speculative, specinfer, spectr, bild], report))
