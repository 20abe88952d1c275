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
"""
import itertools
import math
import sys
from typing import Iterator

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
        target.start(prompt[:-1], width=len(output))
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


def beam_search(lm: CachedLM, unseen: list[int], depth: int, beams: int, sample: Sampler,
                eos: set[int]) -> tuple[list[int], list[int], list[float], list[int]]:
    """Grow up to `depth` levels below the root, the last of `unseen`, in the pending tree of `lm`.
    The best `beams` leaves of a level stay; one that is an EOS has no children, and stays as likely
    as it is.

    Returns ids, parents, logps (joint, nats), node 0 being the root, and the leaves, best first.
    Node i is node len(unseen) - 1 + i of `lm`, where the last level has not been fed."""
    base, ids, parents, logps = len(unseen) - 1, unseen[-1:], [-1], [0.0]
    fresh, ended, logits = [0], [], lm.forward(unseen)[-1:]  # fresh: the nodes that logits are of
    while True:
        grown = [(logps[node] + logp, node, token)
                 for node, row in zip(fresh, children(logits, beams, sample)) if node not in ended
                 for token, logp in row]
        grown += [(logps[node], node, None) for node in ended]
        first, leaves = len(ids), []
        for score, node, token in sorted(grown, key=lambda x: x[0], reverse=True)[:beams]:
            if token is not None:
                ids, parents, logps = ids + [token], parents + [node], logps + [score]
                node = len(ids) - 1
            leaves.append(node)
        ended = [node for node in leaves if ids[node] in eos]
        depth -= 1
        if depth == 0 or len(ended) == len(leaves):
            return ids, parents, logps, leaves
        fresh = list(range(first, len(ids)))
        logits = lm.forward(ids[first:], [base + parent for parent in parents[first:]])


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
    target.start(prompt[:-1], width=1 + (K - 1) * beams)
    root = prompt[-1]
    while True:
        ids, parents, logps, leaves = beam_search(target, [root], K, beams, sample, eos)
        path = path_to(leaves[0], parents)
        target.commit(path[:-1])  # the leaf is the next root
        root = ids[leaves[0]]
        if log is not None:
            log.append({"logp": logps[leaves[0]]})
        yield [ids[node] for node in path[1:]]


def longest_prefix(target_logp: list[float], draft_logp: list[float], tau: float) -> int:
    """The length of the longest prefix with min(1, p / q) > τ, from the joint log-probabilities of
    all prefixes. Alg. 1, lines 6 to 13."""
    threshold = math.log(tau) if tau > 0 else -math.inf
    return max((i for i, (p, q) in enumerate(zip(target_logp, draft_logp), 1)
                if tau < 1 and p - q > threshold), default=0)


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
    target.start(prompt[:-1], width=1 + gamma * width)
    draft.start(prompt[:-1], width=2 + (gamma - 1) * beams)
    unseen = prompt[-1:]
    while True:
        # Line 3: x and q. The draft model's beams, and the same as a tree of the target's
        tokens, parents, logps, leaves = beam_search(draft, unseen, gamma, beams, sample, eos)
        paths = [path_to(leaf, parents) for leaf in leaves[:width]]
        ids, tree, nodes_of = trie(unseen[-1], [[tokens[i] for i in path[1:]] for path in paths])
        # Line 4: p in one call
        logits = target.forward(ids, tree)  # [nodes, V]
        node_logp = log_probs(logits, sample)[tree, ids].tolist()  # node 0, the root: nothing
        # Lines 6 to 13: of each beam the longest prefix that passes, and the longest of these
        verified = []
        for path, nodes in zip(paths, nodes_of):
            target_logp = list(itertools.accumulate(node_logp[n] for n in nodes[1:]))  # line 9
            draft_logp = [logps[node] for node in path[1:]]
            eta = longest_prefix(target_logp, draft_logp, tau)
            verified.append((eta, path, nodes, target_logp, draft_logp))
        eta, path, nodes, target_logp, draft_logp = max(  # whole with an EOS: as good as gamma
            verified, key=lambda beam: gamma if beam[0] == len(beam[1]) - 1 else beam[0])
        # Lines 15 and 16: one more token of the target's after the accepted prefix
        [token] = sample(logits[nodes[eta]][None])
        target.commit(nodes[:1 + eta])
        base, guesses = len(unseen) - 1, [tokens[node] for node in path[1:1 + eta]]
        fed = [node for node in path[:1 + eta] if base + node < len(draft.parents)]
        draft.commit([*range(base), *(base + node for node in fed)])
        unseen = guesses[len(fed) - 1:] + [token]
        if log is not None:
            log.append({"drafted": len(path) - 1, "accepted": eta,
                        "target_logp": target_logp, "draft_logp": draft_logp})
        yield guesses + [token]


def report(run) -> str:
    """Perplexity, and what a round of MJSD accepts."""
    target, prompts = run.models["target"], run.prompts
    outputs = [output for output in run.outputs if output]
    text = f"perplexity of the output under the target: {perplexity(target, prompts, outputs):.3f}"
    if run.method is mjgd:
        return text
    drafted, accepted = (sum(r[name] for r in run.log) / len(run.log)
                         for name in ("drafted", "accepted"))
    return (f"a round: {drafted:.2f} tokens drafted, {accepted:.2f} accepted; "
            f"{run.models['draft'].calls} draft calls; {text}")


if __name__ == "__main__":
    from cli import main
    sys.exit(main([mjsd, mjgd], report, lossy=[mjsd, mjgd],
                  ranges={"gamma": (1, 2, 3, 4, 5, 6, 8), "beams": (1, 2, 4, 8)}))
