"""Speculative decoding and sampling: a small draft model guesses, the target checks in one pass.

speculative   Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
              arXiv 2211.17192, Alg. 1; Chen et al., "Accelerating Large Language Model Decoding
              with Speculative Sampling", arXiv 2302.01318, Alg. 2
specinfer     Miao et al., "SpecInfer", arXiv 2305.09781: several drafts, of one draft model or of
              several, as one tree
spectr        Sun et al., "SpecTr", arXiv 2310.15141: the same tree, accepted by k-SEQ
bild          Kim et al., "Speculative Decoding with Big Little Decoder", arXiv 2302.07863: drafts
              of confident tokens; lossy
specdec       Xia et al., "Speculative Decoding: Exploiting Speculative Execution for Accelerating
              Seq2seq Generation", arXiv 2203.16487: a guess that is nearly the best passes; lossy

    accept the draft's x ~ q with probability min(1, p(x) / q(x));
    at the first rejection draw from norm(max(0, p - q)) instead

p is the target's distribution and q the draft's, both after temperature, top-k and top-p (Chen
swaps the letters; here they are `target_probs` and `draft_probs`). All but bild and specdec are
lossless: what comes out has exactly the target's distribution, and at temperature 0, where p and q
are one-hot, it is the target's greedy output. Left out: batches, trees of fixed shape, the drafter
of SpecDec, an encoder-decoder model that writes a block of 25 tokens in one pass.
"""
import itertools
import sys
from typing import Callable, Iterator, NamedTuple, Sequence

import torch

from common import CachedLM, InputError, Sampler, greedy, trie


# ------------------------------------------------------------------------------- one draft

def verify(target_probs: torch.Tensor, draft_probs: torch.Tensor, guesses: list[int],
           sample: Sampler) -> tuple[int, int]:
    """(number of accepted guesses, the token after them). Leviathan, Alg. 1; Chen, Theorem 1.

    target_probs [γ+1, V]: the target's distribution at each guess, and after the last one
    draft_probs [γ, V]:    what each guess was drawn from
    """
    at = torch.arange(len(guesses)), torch.tensor(guesses, dtype=torch.long)
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
    target.start(prompt[:-1])
    draft.start(prompt[:-1])
    root = prompt[-1]
    unseen = [root]  # final tokens that the draft has not been fed
    while True:
        # Step 1: draw gamma guesses x_i ~ q_i; fed to the draft: unseen, all guesses but the last
        guesses, draft_probs = [], []
        for _ in range(gamma):
            logits = draft.forward(guesses[-1:] or unseen)
            draft_probs.append(sample.probs(logits[-1:]))  # [1, V]
            guesses += sample.draw(draft_probs[-1])
        # Step 2: p_1 … p_{γ+1} in one call
        target_probs = sample.probs(target.forward([root, *guesses]))  # [γ+1, V]
        # Steps 3 and 4: accept or reject; one more token from the residual or from p_{γ+1}
        accepted, token = verify(target_probs, torch.cat(draft_probs), guesses, sample)
        # Step 5: cache what became final; a last guess that was accepted is still unseen
        target.commit(range(1 + accepted))
        draft.commit(range(len(unseen) + min(accepted, gamma - 1)))
        unseen = guesses[gamma - 1:accepted] + [token]
        root = token
        if log is not None:
            log.append({"drafted": gamma, "accepted": accepted})
        yield guesses[:accepted] + [token]


# ---------------------------------------------------------------------------- several drafts

def multi_step(p: torch.Tensor, q: torch.Tensor,
               draws: list[int]) -> tuple[list[float], torch.Tensor]:
    """SpecInfer's rule for draws x_1 … x_K at one node, each from its own row of q [K, V]: (the
    probability that each is accepted once those before it were not, the distribution [V] of the
    token when none is). One draw after the other is tried, against what the last one left of p.
    Miao et al., Alg. 2."""
    accept = []
    for x, q_x in zip(draws, q):
        accept.append(min((p[x] / q_x[x]).item(), 1.0))  # of nan nan, which no coin is below
        p = residual(p, q_x)
    return accept, p


def k_seq(p: torch.Tensor, q: torch.Tensor, draws: list[int]) -> tuple[list[float], torch.Tensor]:
    """SpecTr's rule, as `multi_step` but all rows of q are the same: each of K draws is accepted
    with min(1, p / (ρ q)), ρ in [1, K] the root of 1 - (1 - β(ρ))^K = ρ β(ρ), where β(ρ) =
    Σ_x min(q, p / ρ) is the probability that a draw is. Sun et al., Alg. 2 and 3."""
    K, p, q = len(draws), p.double(), q[0].double()

    def beta(rho: float) -> float:
        return torch.minimum(q, p / rho).sum().item()
    low, rho = 1.0, float(K)
    for _ in range(30 if K > 1 else 0):  # keep the upper end: below the root p - taken < 0
        middle = (low + rho) / 2
        if 1 - (1 - beta(middle)) ** K <= middle * beta(middle):
            rho = middle
        else:
            low = middle
    accept = [min((p[x] / (rho * q[x])).item(), 1.0) for x in draws]
    p_acc = 1 - (1 - beta(rho)) ** K
    if 0 < p_acc < 1:
        taken = torch.minimum(q, p / rho) * (p_acc / beta(rho))
        p = (p - taken).clamp(min=0)
    return accept, (p / p.sum()).float()


class Drafts(NamedTuple):
    """Some drafts of one model; those that begin alike share what belongs to a prefix of them."""
    texts: list[tuple[int, ...]]
    probs: dict[tuple[int, ...], torch.Tensor]  # what the token after a prefix was drawn from [V]
    nodes: dict[tuple[int, ...], int]  # a prefix' node in the model's pending tree


def draw_drafts(draft: CachedLM, unseen: list[int], gamma: int, K: int, sample: Sampler) -> Drafts:
    """K drafts of gamma tokens, drawn independently; a call for each level of their tree."""
    texts = [()] * K
    nodes = {(): len(unseen) - 1}
    probs = {(): sample.probs(draft.forward(unseen)[-1:])[0]}
    for depth in range(gamma):
        if depth > 0:  # the last tokens are never fed
            fresh = list(dict.fromkeys(texts))
            nodes |= zip(fresh, itertools.count(len(draft.parents)))
            logits = draft.forward([x[-1] for x in fresh], [nodes[x[:-1]] for x in fresh])
            probs |= zip(fresh, sample.probs(logits))
        tokens = sample.draw(torch.stack([probs[x] for x in texts]))
        texts = [(*x, token) for x, token in zip(texts, tokens)]
    return Drafts(texts, probs, nodes)


def verify_tree(rule: Callable, target_probs: torch.Tensor, drafts: list[tuple[int, tuple]],
                paths: list[list[int]], drawn: list[Drafts],
                sample: Sampler) -> tuple[tuple[int, ...], list[int], torch.Tensor]:
    """(the accepted guesses, the root's node and theirs, what the next token is drawn from [V]), by
    `rule` from node to node. `drafts`: (model, text), with its nodes in `paths`. At a node all
    drafts that begin with what was accepted have a draw, equal ones too: without them both rules
    would be biased."""
    guesses, path = (), [0]
    for depth in range(len(drafts[0][1])):
        here = [i for i, (_, text) in enumerate(drafts) if text[:depth] == guesses]
        q = torch.stack([drawn[drafts[i][0]].probs[guesses] for i in here])  # [draws, V]
        accept, rest = rule(target_probs[path[-1]], q, [drafts[i][1][depth] for i in here])
        coins = sample.uniform(len(here), rest.device).tolist()
        passed = [i for i, chance, coin in zip(here, accept, coins) if coin < chance]
        if not passed:
            return guesses, path, rest
        guesses = drafts[passed[0]][1][:depth + 1]
        path = paths[passed[0]][:depth + 2]
    return guesses, path, target_probs[path[-1]]  # one whole draft: one more of the target's


def several_drafts(rule: Callable, target: CachedLM, models: list[CachedLM], prompt: list[int],
                   gamma: int, K: int, sample: Sampler, log: list | None) -> Iterator[list[int]]:
    """Draw K drafts, the models taking turns; merge equal prefixes into one tree; verify it in one
    target call."""
    n = len(models)
    if gamma < 1 or K < 1:
        raise InputError(f"expected gamma and K of 1 or more, got {gamma} and {K}")
    if K < n:
        raise InputError(f"expected K of {n} or more, a draft of each model, got {K}")
    for lm in (target, *models):
        lm.start(prompt[:-1])
    turns = [i % n for i in range(K)]  # the model of each draft
    root = prompt[-1]
    unseen = [[root]] * n  # for each model final tokens that it has not been fed
    while True:
        drawn = [draw_drafts(lm, unseen[m], gamma, turns.count(m), sample)
                 for m, lm in enumerate(models)]
        texts = [iter(some.texts) for some in drawn]
        drafts = [(m, next(texts[m])) for m in turns]
        ids, parents, paths = trie(root, [text for _, text in drafts])
        target_probs = sample.probs(target.forward(ids, parents))  # [nodes, V]
        guesses, path, rest = verify_tree(rule, target_probs, drafts, paths, drawn, sample)
        [root] = sample.draw(rest[None])
        target.commit(path)
        prefixes = [guesses[:length] for length in range(len(path))]
        for m, lm in enumerate(models):
            nodes = drawn[m].nodes
            fed = [nodes[prefix] for prefix in prefixes if prefix in nodes]  # of what is final
            lm.commit([*range(fed[0]), *fed])  # fed[0]: the root, after what was unseen before it
            unseen[m] = [*guesses[len(fed) - 1:], root]
        if log is not None:
            log.append({"drafted": len(ids) - 1, "accepted": len(guesses)})
        yield [*guesses, root]


def specinfer(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5, K: int = 2,
              more_drafts: Sequence[CachedLM] = (), sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Several drafts, each node's draws tried one after the other. Miao et al., Section 4.3. More
    models that draft (`more_drafts`; --draft again) take turns with the first; a draw is judged by
    the q of its own model.

    gamma: tokens of a draft
    K:     drafts a round, drawn independently (at temperature 0 those of a model are the same)
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted": nodes, "accepted"} a round.
    """
    models = [draft, *more_drafts]
    return several_drafts(multi_step, target, models, prompt, gamma, K, sample, log)


def spectr(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5, K: int = 2,
           sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Several drafts, accepted by k-SEQ. Sun et al., Alg. 1 to 3. Options and log: as specinfer."""
    return several_drafts(k_seq, target, [draft], prompt, gamma, K, sample, log)


# ------------------------------------------------------------------------------------ lossy

def relaxed(passes: Callable, target: CachedLM, draft: CachedLM, prompt: list[int], gamma: int,
            fallback: float, sample: Sampler, log: list | None) -> Iterator[list[int]]:
    """Draft gamma tokens, fewer where the draft's largest probability (at temperature 1) falls
    below `fallback`. The target's choice takes the place of the first guess that does not pass:
    passes(the target's logits [n, V], guesses [n, 1]) -> bool [n, 1]."""
    target.start(prompt[:-1])
    draft.start(prompt[:-1])
    root = prompt[-1]
    unseen = [root]
    while True:
        guesses = []
        while len(guesses) < gamma:
            logits = draft.forward(guesses[-1:] or unseen)[-1:]  # [1, V]
            if logits.float().softmax(-1).max() < fallback:
                break
            guesses += sample(logits)
        logits = target.forward([root, *guesses]).float()  # [n + 1, V]
        column = torch.tensor(guesses, dtype=torch.long, device=logits.device)[:, None]  # [n, 1]
        accepted = int(passes(logits[:-1], column).cumprod(0).sum())
        [root] = sample(logits[accepted:accepted + 1])
        target.commit(range(1 + accepted))
        # What the draft was fed becomes final; a last guess that passed may still be unseen
        known = unseen + guesses[:accepted]
        fed = min(len(known), len(draft.parents))
        draft.commit(range(fed))
        unseen = known[fed:] + [root]
        if log is not None:
            log.append({"drafted": len(guesses), "accepted": accepted})
        yield guesses[:accepted] + [root]


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

    def passes(logits: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
        return -logits.log_softmax(-1).gather(-1, guesses) <= rollback
    return relaxed(passes, target, draft, prompt, gamma, fallback, sample, log)


def specdec(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6, beta: int = 5,
            tau: float = 3.0, sample: Sampler = greedy, log: list | None = None):
    """A guess passes if it is among the target's beta likeliest tokens and nearly as likely as the
    best of them, an end of the text like any other; the target replaces the first that does not.
    Xia et al., "Spec-Verification". Lossy: greedy output is the target's with beta 1 or tau 0,
    where the argmax alone passes and nothing that ties with it. The paper is greedy; at a
    temperature guesses and replacements are drawn, and the test stays what it is.

    gamma: tokens drafted a round (the paper's block)
    beta:  a guess must be among so many tokens (β)
    tau:   log p of a guess may lie so far below that of the best (τ, nats, at temperature 1)
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted"} a round.
    """
    if gamma < 1 or beta < 1 or not tau >= 0:
        raise InputError("expected gamma and beta of 1 or more and tau of 0 or more, "
                         f"got {gamma}, {beta} and {tau}")

    def passes(logits: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
        if beta == 1 or tau == 0:
            return guesses == logits.argmax(-1, keepdim=True)
        guessed = logits.gather(-1, guesses)  # log p but for a constant of each row
        better = (logits > guessed).sum(-1, keepdim=True)
        return (better < beta) & (logits.amax(-1, keepdim=True) - guessed <= tau)
    return relaxed(passes, target, draft, prompt, gamma, 0.0, sample, log)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    """Acceptance; with one draft also its rate α, and the speed-up to be expected (Leviathan,
    Theorem 3.8) where a draft call costs what it did in this run, as a share c of a target call."""
    target, *drafts = run.models.values()
    rounds = len(run.log)
    drafted = sum(r["drafted"] for r in run.log)
    accepted = sum(r["accepted"] for r in run.log)
    text = (f"accepted {accepted} of {drafted} drafted tokens, {accepted / rounds:.2f} a round; "
            f"{sum(draft.calls for draft in drafts)} draft calls")
    if run.method is not speculative:
        return text
    tried = sum(r["accepted"] if "cut" in r else min(r["accepted"] + 1, r["drafted"])
                for r in run.log)  # up to a rejected one, or to where EOS or the limit cut
    alpha, gamma = accepted / tried, run.log[0]["drafted"]
    c = (drafts[0].seconds / drafts[0].calls) / (target.seconds / target.calls)
    expected = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return (f"{text}\nacceptance rate {alpha:.1%} of {tried} tried; predicted from it, a draft "
            f"call costing {c:.2f} of a target call: {expected:.2f} tokens per call, "
            f"speed-up {expected / (gamma * c + 1):.2f}x")


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([speculative, specinfer, spectr, bild, specdec], report, lossy=[bild, specdec],
                  ranges={"gamma": (1, 2, 3, 4, 5, 6, 8, 10, 12), "K": (1, 2, 3, 4)}))
