"""Multi-token joint decoding: several tokens at a time by their joint likelihood.

Qin et al., "Multi-Token Joint Speculative Decoding for Accelerating Large Language Model
Inference", arXiv 2407.09722

    MJGD   x_{t+1:t+K} = argmax p(x_{t+1:t+K} | x_{1:t}), here by beam search            Def. 3.1
    MJSD   accept the longest prefix of a draft x with
           min(1, p(x_{t+1:t+i} | x_{1:t}) / q(x_{t+1:t+i} | x_{1:t})) > τ                  Alg. 1

Lossy by design: the aim is a likelier text (lower perplexity), not the target's own. p and q are
joint probabilities, the target's and the draft's, after temperature, top-k and top-p; at
temperature 0 both are taken as they are and the next token is the target's argmax. Nothing after an
EOS counts for or against it. Departures: Alg. 1 misprints η ← -1 and η ← j, read 0 and i; `width`
verifies several beams in the one call. The released code (ZongyueQin/LLMSpeculativeSampling) draws
all beams' children at once from a softmax over beams and vocabulary, takes that softmax at each
step for q, and verifies all beams. Left out: batches.

Of an accepted prefix -log p = -log q + log(q / p). Beams lower the first term alone; the test
bounds the second alone, by log(1 / τ) = 2.3 nats, however small p is: an unlikely prefix passes
where the draft is unsure too. So a text is likelier than AR's with several beams and a good draft:
on a real model from a 1 - TVD of about 0.6 on (results/mjsd.md).
"""
import itertools
import math
import sys
from typing import Iterator, NamedTuple

import torch

from common import CachedLM, InputError, Sampler, greedy, trie


def log_probs(logits: torch.Tensor, sample: Sampler) -> torch.Tensor:
    """The factors of joint probabilities, [..., V] in nats: the sampler's, but at temperature 0 the
    model's own."""
    if sample.temperature == 0:
        return logits.float().log_softmax(-1)
    return sample.probs(logits).log()


def perplexity(target: CachedLM, prompts: list[list[int]], outputs: list[list[int]]) -> float:
    """exp of the mean -log p (nats a token) of the outputs after their prompts, under the target's
    own distribution: Eq. 1, pooled over all tokens of all outputs."""
    total = 0.0
    for prompt, output in zip(prompts, outputs):
        target.start(prompt[:-1])
        logp = log_probs(target.forward([prompt[-1], *output[:-1]]), greedy)  # [n, V]
        total -= logp[torch.arange(len(output)), torch.tensor(output)].sum().item()
    return math.exp(total / sum(map(len, outputs)))


def children(logits: torch.Tensor, beams: int, sample: Sampler) -> list[list[tuple[int, float]]]:
    """For each row of logits [n, V] up to `beams` (token, log-probability) pairs: the likeliest or,
    at a temperature, draws without replacement, as many as have any probability."""
    logp = log_probs(logits, sample)
    score = logp
    if sample.temperature > 0:  # Gumbel top-k: as Sampler.draw, but the largest few of p / E
        uniform = sample.uniform(logp.shape, logp.device).clamp(min=1e-30)
        score = logp - (-uniform.log()).log()
    tokens = score.topk(min(beams, logp.shape[-1])).indices  # [n, beams]
    rows = zip(tokens.tolist(), logp.gather(-1, tokens).tolist())
    return [[(x, value) for x, value in zip(*row) if value > -math.inf] for row in rows]


class Beams(NamedTuple):
    """A tree of beams, node 0 being the root."""
    ids: list[int]
    parents: list[int]
    logps: list[float]  # of a node's path from the root down: joint, nats
    leaves: list[int]  # the best first


def beam_search(lm: CachedLM, unseen: list[int], depth: int, beams: int, sample: Sampler,
                eos: set[int]) -> Beams:
    """Grow up to `depth` levels below the root, the last of `unseen`, in the pending tree of `lm`:
    node i is its node len(unseen) - 1 + i; the last level is not fed. The best `beams` leaves of a
    level stay; one that is an EOS has no children, and stays as likely as it is."""
    base = len(unseen) - 1
    ids, parents, logps = unseen[-1:], [-1], [0.0]
    fed = [0]  # the nodes that `logits` come after
    leaves, ended = [0], []
    logits = lm.forward(unseen)[-1:]
    for level in range(depth):
        grown = [(logps[node], node, None) for node in ended]  # (log p, node, its child's token)
        for node, row in zip(fed, children(logits, beams, sample)):
            if node not in ended:
                grown += [(logps[node] + logp, node, token) for token, logp in row]
        if not grown:  # logits of a model that overflows: the level before ends the beams
            return Beams(ids, parents, logps, leaves)
        leaves = []
        fed = []
        for score, node, token in sorted(grown, key=lambda x: x[0], reverse=True)[:beams]:
            if token is not None:
                ids.append(token)
                parents.append(node)
                logps.append(score)
                node = len(ids) - 1
                fed.append(node)
            leaves.append(node)
        ended = [node for node in leaves if ids[node] in eos]
        if level == depth - 1 or len(ended) == len(leaves):
            return Beams(ids, parents, logps, leaves)
        logits = lm.forward([ids[node] for node in fed], [base + parents[node] for node in fed])


def path_to(leaf: int, parents: list[int]) -> list[int]:
    """The nodes from the root down to this one."""
    path = [leaf]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


def mjgd(target: CachedLM, prompt: list[int], *, K: int = 3, beams: int = 8,
         sample: Sampler = greedy, eos: set[int] = frozenset(),
         log: list | None = None) -> Iterator[list[int]]:
    """Multi-token joint greedy decoding: the likeliest K tokens at a time, by beam search on the
    target itself. Def. 3.1.

    K:     tokens decoded together; 1 is greedy decoding, and V ** (K - 1) beams make it exact
    beams: sequences kept at each step of the beam search
    Yields chunks of K tokens, fewer where an EOS ends them, for as many target calls; logs {"logp"}
    a chunk: its joint log-probability.
    """
    if K < 1 or beams < 1:
        raise InputError(f"expected K and beams of 1 or more, got {K} and {beams}")
    if sample.temperature > 0:
        raise InputError(f"expected temperature 0 for joint greedy decoding, got "
                         f"{sample.temperature}")
    target.start(prompt[:-1])
    root = prompt[-1]
    while True:
        found = beam_search(target, [root], K, beams, sample, eos)
        best = found.leaves[0]
        if best == 0:
            raise InputError("expected a target with finite logits, got none")
        path = path_to(best, found.parents)
        target.commit(path[:-1])  # the leaf is the next root
        root = found.ids[best]
        if log is not None:
            log.append({"logp": found.logps[best]})
        yield [found.ids[node] for node in path[1:]]


def longest_prefix(target_logp: list[float], draft_logp: list[float], tau: float) -> int:
    """The length of the longest prefix with min(1, p / q) > τ, from the joint log-probabilities of
    all prefixes. Alg. 1, lines 6 to 13."""
    threshold = math.log(tau) if tau > 0 else -math.inf
    return max((i for i, (p, q) in enumerate(zip(target_logp, draft_logp), 1)
                if tau < 1 and p - q > threshold), default=0)


class Verified(NamedTuple):
    """A beam and its joint log-probabilities (nats, of its first token, first two, …)."""
    path: list[int]  # nodes of the draft's tree, the root first
    nodes: list[int]  # the same of the target's
    target_logp: list[float]
    draft_logp: list[float]
    eta: int  # tokens of it that are accepted (η)

    def merit(self, gamma: int) -> int:
        """η; a beam that an EOS ends and that is accepted whole is as good as a whole draft."""
        whole = self.eta == len(self.path) - 1
        return gamma if whole else self.eta


def mjsd(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 4, beams: int = 8,
         tau: float = 0.1, width: int = 1, sample: Sampler = greedy,
         eos: set[int] = frozenset(), log: list | None = None) -> Iterator[list[int]]:
    """Multi-token joint speculative decoding: a draft by beam search, of which the longest prefix
    that is jointly likely enough stays. Alg. 1.

    gamma: tokens of a draft (γ), fewer where an EOS ends it
    beams: beams of the draft's beam search
    tau:   accept a prefix where min(1, p / q) is above this (τ); 1 accepts nothing (greedy output
           is then the target's), 0 whatever is possible
    width: best beams verified in one call, as one tree; the longest accepted prefix of all stays
    Yields chunks of 1 to gamma + 1 tokens; logs a record a round: {"drafted", "accepted",
    "target_logp", "draft_logp"}, the last two of the chosen beam's prefixes (joint, nats).
    """
    if gamma < 1 or beams < 1 or not 1 <= width <= beams or not tau >= 0:
        raise InputError("expected gamma and beams of 1 or more, tau of 0 or more and width of 1 "
                         f"to beams, got {gamma}, {beams}, {tau} and {width}")
    target.start(prompt[:-1])
    draft.start(prompt[:-1])
    unseen = prompt[-1:]  # final tokens that the draft has not been fed
    while True:
        # Line 3: x and q. The draft model's beams, and the best of them as a tree of the target's
        found = beam_search(draft, unseen, gamma, beams, sample, eos)
        paths = [path_to(leaf, found.parents) for leaf in found.leaves[:width]]
        texts = [[found.ids[node] for node in path[1:]] for path in paths]
        ids, parents, nodes_of = trie(unseen[-1], texts)
        # Line 4: p in one call
        logits = target.forward(ids, parents)  # [nodes, V]
        node_logp = log_probs(logits, sample)[parents, ids].tolist()  # node 0, the root: nothing
        # Lines 6 to 13: of each beam the longest prefix that passes, and the longest of these
        verified = []
        for path, nodes in zip(paths, nodes_of):
            target_logp = list(itertools.accumulate(node_logp[node] for node in nodes[1:]))
            draft_logp = [found.logps[node] for node in path[1:]]
            eta = longest_prefix(target_logp, draft_logp, tau)
            verified.append(Verified(path, nodes, target_logp, draft_logp, eta))
        best = max(verified, key=lambda beam: beam.merit(gamma))
        # Lines 15 and 16: one more token of the target's after the accepted prefix
        [token] = sample(logits[best.nodes[best.eta]][None])
        kept = best.path[:1 + best.eta]
        guesses = [found.ids[node] for node in kept[1:]]
        target.commit(best.nodes[:1 + best.eta])
        base = len(unseen) - 1
        fed = [node for node in kept if base + node < len(draft.parents)]  # not the last level
        draft.commit([*range(base), *(base + node for node in fed)])
        unseen = guesses[len(fed) - 1:] + [token]
        if log is not None:
            log.append({"drafted": len(best.path) - 1, "accepted": best.eta,
                        "target_logp": best.target_logp, "draft_logp": best.draft_logp})
        yield guesses + [token]


def report(run) -> str:
    """Perplexity, and what a round of MJSD accepts."""
    target, prompts = run.models["target"], run.prompts
    outputs = [output for output in run.outputs if output]
    text = f"perplexity of the output under the target: {perplexity(target, prompts, outputs):.3f}"
    if run.method is mjgd:
        return text
    drafted = sum(r["drafted"] for r in run.log) / len(run.log)
    accepted = sum(r["accepted"] for r in run.log) / len(run.log)
    return (f"a round: {drafted:.2f} tokens drafted, {accepted:.2f} accepted; "
            f"{run.models['draft'].calls} draft calls; {text}")


if __name__ == "__main__":
    from cli import main
    sys.exit(main([mjsd, mjgd], report, lossy=[mjsd, mjgd],
                  ranges={"gamma": (1, 2, 3, 4, 5, 6, 8), "beams": (1, 2, 4, 8)}))
