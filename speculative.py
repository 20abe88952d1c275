"""Speculative decoding and sampling: a small draft model guesses, the target checks in one pass.

speculative   Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
              arXiv 2211.17192, Alg. 1; Chen et al., "Accelerating Large Language Model Decoding
              with Speculative Sampling", arXiv 2302.01318, Alg. 2
specinfer     Miao et al., "SpecInfer", arXiv 2305.09781: several drafts as one tree
spectr        Sun et al., "SpecTr", arXiv 2310.15141: the same tree, accepted by k-SEQ
bild          Kim et al., "Speculative Decoding with Big Little Decoder", arXiv 2302.07863: drafts
              of confident tokens; lossy

    accept the draft's x ~ q with probability min(1, p(x) / q(x));
    at the first rejection draw from norm(max(0, p - q)) instead

p is the target's distribution and q the draft's, both after temperature, top-k and top-p (Chen
swaps the letters; here they are `target_probs` and `draft_probs`). All but bild are lossless: what
comes out has exactly the target's distribution, and at temperature 0, where p and q are one-hot, it
is the target's greedy output. Left out: batches, trees of fixed shape.
"""
import sys
from typing import Callable, Iterator

import torch

from common import CachedLM, InputError, Sampler, greedy


# ------------------------------------------------------------------------------- one draft

def verify(target_probs: torch.Tensor, draft_probs: torch.Tensor, guesses: list[int],
           sample: Sampler) -> tuple[int, int]:
    """(number of accepted guesses, the token after them). Leviathan, Alg. 1; Chen, Theorem 1.

    target_probs [γ+1, V]: the target's distribution at each guess, and after the last one
    draft_probs [γ, V]:    what each guess was drawn from
    """
    at = torch.arange(len(guesses)), torch.tensor(guesses)
    ratio = target_probs[at] / draft_probs[at]  # [γ], p(x) / q(x)
    passed = sample.uniform(len(guesses), ratio.device) < ratio
    accepted = int(passed.cumprod(0).sum())
    rest = target_probs[accepted]  # [V]
    if accepted < len(guesses):
        rest = residual(rest, draft_probs[accepted])
    return accepted, sample.draw(rest[None])[0]


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """norm(max(0, p - q)): what is left of p [V] after a draw from q [V] was rejected. Where p
    equals q nothing is left; only rounding can have rejected there: p itself."""
    left = (p - q).clamp(min=0)
    return left / left.sum() if left.sum() > 0 else p


def speculative(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6,
                sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Draft gamma tokens one by one, verify them in one target call, and keep the accepted ones and
    one more of the target's.

    gamma: tokens drafted a round (γ), 1 or more
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted"} a round.
    """
    if gamma < 1:
        raise InputError(f"expected gamma of 1 or more, got {gamma}")
    target.start(prompt[:-1], width=gamma + 1)
    draft.start(prompt[:-1], width=gamma + 1)
    root, unseen = prompt[-1], prompt[-1:]  # unseen: final tokens that the draft has not been fed
    while True:
        # Step 1: draw gamma guesses x_i ~ q_i; fed to the draft: unseen, all guesses but the last
        guesses, draft_probs, ids = [], [], unseen
        for _ in range(gamma):
            draft_probs.append(sample.probs(draft.forward(ids)[-1:]))  # [1, V]
            ids = sample.draw(draft_probs[-1])
            guesses += ids
        # Step 2: p_1 … p_{γ+1} in one call
        target_probs = sample.probs(target.forward([root, *guesses]))  # [γ+1, V]
        # Steps 3 and 4: accept or reject; one more token from the residual or from p_{γ+1}
        accepted, token = verify(target_probs, torch.cat(draft_probs), guesses, sample)
        # Step 5: cache what became final; a last guess that was accepted is still unseen
        target.commit(range(1 + accepted))
        draft.commit(range(len(unseen) + min(accepted, gamma - 1)))
        unseen, root = (guesses[-1:] if accepted == gamma else []) + [token], token
        if log is not None:
            log.append({"drafted": gamma, "accepted": accepted})
        yield guesses[:accepted] + [token]


# ---------------------------------------------------------------------------- several drafts

def multi_step(p: torch.Tensor, q: torch.Tensor,
               draws: list[int]) -> tuple[list[float], torch.Tensor]:
    """SpecInfer's rule for draws x_1 … x_K ~ q at one node: (the probability that each is accepted
    once those before it were not, the distribution [V] of the token when none is). One draw after
    the other is tried, against what the last one left of p. Miao et al., Alg. 2."""
    accept = []
    for x in draws:
        accept.append(min(1.0, (p[x] / q[x]).item()))
        p = residual(p, q)
    return accept, p


def k_seq(p: torch.Tensor, q: torch.Tensor, draws: list[int]) -> tuple[list[float], torch.Tensor]:
    """SpecTr's rule, as `multi_step`: each of K draws is accepted with min(1, p / (ρ q)), ρ in
    [1, K] the root of 1 - (1 - β(ρ))^K = ρ β(ρ), where β(ρ) = Σ_x min(q, p / ρ) is the probability
    that a draw is. Sun et al., Alg. 2 and 3."""
    K, p, q = len(draws), p.double(), q.double()

    def beta(rho: float) -> float:
        return torch.minimum(q, p / rho).sum().item()
    low, rho = 1.0, float(K)
    for _ in range(30 if K > 1 else 0):  # keep the upper end: below the root p - taken < 0
        middle = (low + rho) / 2
        if 1 - (1 - beta(middle)) ** K <= middle * beta(middle):
            rho = middle
        else:
            low = middle
    accept = [min(1.0, (p[x] / (rho * q[x])).item()) for x in draws]
    p_acc = 1 - (1 - beta(rho)) ** K
    if 0 < p_acc < 1:
        taken = torch.minimum(q, p / rho) * (p_acc / beta(rho))
        p = (p - taken).clamp(min=0)
    return accept, (p / p.sum()).float()


def several_drafts(rule: Callable, target: CachedLM, draft: CachedLM, prompt: list[int], gamma: int,
                   K: int, sample: Sampler, log: list | None) -> Iterator[list[int]]:
    """Draw K drafts, merge equal prefixes into one tree, verify it in one target call, node by node
    by `rule`. A node keeps its draws as a list, duplicates included: without them both rules would
    be biased. Draws equal to the accepted one go on from its node."""
    if gamma < 1 or K < 1:
        raise InputError(f"expected gamma and K of 1 or more, got {gamma} and {K}")
    target.start(prompt[:-1], width=1 + K * gamma)
    draft.start(prompt[:-1], width=2 + K * gamma)
    unseen = prompt[-1:]
    while True:
        # Node n of this tree is node base + n of the draft's: it is fed what is unseen first
        base, ids, parents, draft_probs = len(unseen) - 1, unseen[-1:], [-1], {}
        draws = {}  # for each node its children, one for each draw
        ends, fresh = [0] * K, [0]  # the node each draft has come to; nodes not fed yet
        for depth in range(gamma):
            if depth == 0:
                logits = draft.forward(unseen)[-1:]
            else:
                logits = draft.forward([ids[n] for n in fresh], [base + parents[n] for n in fresh])
            draft_probs |= zip(fresh, sample.probs(logits))
            tokens, fresh = sample.draw(torch.stack([draft_probs[end] for end in ends])), []
            for i, (end, token) in enumerate(zip(ends, tokens)):
                child = next((n for n in draws.get(end, []) if ids[n] == token), len(ids))
                if child == len(ids):
                    fresh.append(child)
                    ids, parents = ids + [token], parents + [end]
                draws.setdefault(end, []).append(child)
                ends[i] = child
        target_probs = sample.probs(target.forward(ids, parents))  # [nodes, V]
        path, rest = [0], None
        while rest is None and path[-1] in draws:
            node = path[-1]
            tokens = [ids[child] for child in draws[node]]
            accept, left = rule(target_probs[node], draft_probs[node], tokens)
            coins = sample.uniform(len(accept), left.device).tolist()
            child = next((n for n, a, u in zip(draws[node], accept, coins) if u < a), None)
            path, rest = (path, left) if child is None else (path + [child], None)
        if rest is None:  # a draft was accepted whole: one more token of the target's
            rest = target_probs[path[-1]]
        token, guesses = sample.draw(rest[None])[0], [ids[node] for node in path[1:]]
        target.commit(path)
        draft.commit([*range(base), *(base + node for node in path[:gamma])])  # last: never fed
        unseen = guesses[gamma - 1:] + [token]
        if log is not None:
            log.append({"drafted": len(ids) - 1, "accepted": len(guesses)})
        yield guesses + [token]


def specinfer(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5, K: int = 2,
              sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Several drafts, each node's draws tried one after the other. Miao et al., Section 4.3.

    gamma: tokens of a draft
    K:     drafts a round, drawn independently (at temperature 0 they are all the same)
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted": nodes, "accepted"} a round.
    """
    return several_drafts(multi_step, target, draft, prompt, gamma, K, sample, log)


def spectr(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5, K: int = 2,
           sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Several drafts, accepted by k-SEQ. Sun et al., Alg. 1 to 3. Options and log: as specinfer."""
    return several_drafts(k_seq, target, draft, prompt, gamma, K, sample, log)


# ------------------------------------------------------------------------------------ lossy

def bild(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5,
         fallback: float = 0.5, rollback: float = 2.0, sample: Sampler = greedy,
         log: list | None = None) -> Iterator[list[int]]:
    """Draft while the draft model is confident; the target replaces the first guess that it finds
    too unlikely. Kim et al., Section 3. Lossy: greedy output is the target's with rollback 0, or
    with fallback above 1, where nothing is drafted.

    gamma:    tokens drafted a round, at most
    fallback: stop before a token where the draft's largest probability (at temperature 1) is below
              this
    rollback: reject a guess whose -log p under the target (nats, at temperature 1) is above this
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted"} a round.
    """
    if gamma < 1 or not fallback >= 0 or not rollback >= 0:
        raise InputError("expected gamma of 1 or more, fallback and rollback of 0 or more, "
                         f"got {gamma}, {fallback} and {rollback}")
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
        at = torch.arange(len(guesses)), torch.tensor(guesses, dtype=torch.long)
        costs = -logits.float().log_softmax(-1)[at]  # [n], nats
        rejected = (i for i, cost in enumerate(costs.tolist()) if cost > rollback)
        accepted = next(rejected, len(guesses))
        [root] = sample(logits[accepted:accepted + 1])
        target.commit(range(1 + accepted))
        known = unseen + guesses[:accepted]
        fed = min(len(known), len(draft.parents))
        draft.commit(range(fed))
        unseen = known[fed:] + [root]
        if log is not None:
            log.append({"drafted": len(guesses), "accepted": accepted})
        yield guesses[:accepted] + [root]


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    """Acceptance; with one draft also its rate α, and the speed-up to be expected (Leviathan,
    Theorem 3.8) where a draft call costs what it did in this run, as a share c of a target call."""
    target, draft, rounds = run.models["target"], run.models["draft"], len(run.log)
    drafted, accepted = (sum(r[name] for r in run.log) for name in ("drafted", "accepted"))
    text = (f"accepted {accepted} of {drafted} drafted tokens, {accepted / rounds:.2f} a round; "
            f"{draft.calls} draft calls")
    if run.method is not speculative:
        return text
    tried = sum(r["accepted"] if "cut" in r else min(r["accepted"] + 1, r["drafted"])
                for r in run.log)  # up to a rejected one, or to where EOS or the limit cut
    alpha, gamma = accepted / tried, run.log[0]["drafted"]
    c = (draft.seconds / draft.calls) / (target.seconds / target.calls)
    expected = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return (f"{text}\nacceptance rate {alpha:.1%} of {tried} tried; predicted from it, a draft "
            f"call costing {c:.2f} of a target call: {expected:.2f} tokens per call, "
            f"speed-up {expected / (gamma * c + 1):.2f}x")


if __name__ == "__main__":
    from cli import main
    sys.exit(main([speculative, specinfer, spectr, bild], report, lossy=[bild],
                  ranges={"gamma": (1, 2, 3, 4, 5, 6, 8, 10, 12), "K": (1, 2, 3, 4)}))
