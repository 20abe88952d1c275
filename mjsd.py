"""Multi-token joint decoding chooses several tokens at a time by their joint likelihood.

Qin et al., "Multi-Token Joint Speculative Decoding for Accelerating Large Language Model
Inference", arXiv 2407.09722, version 1. Later versions of the paper have the title "Optimized
Multi-Token Joint Decoding with Auxiliary Model for LLM Inference", and the methods other names:

    MJGD in version 1, and here   MTJD later
    MJSD in version 1, and here   MTAD later. MMTAD verifies several beams, as --width does here

    MJGD   x_{t+1:t+K} = argmax p(x_{t+1:t+K} | x_{1:t}), here by beam search            Def. 3.1
    MJSD   accept the longest prefix of a draft x with
           min(1, p(x_{t+1:t+i} | x_{1:t}) / q(x_{t+1:t+i} | x_{1:t})) > τ                  Alg. 1

The joint probability of some tokens is p under the target and q under the draft, after temperature,
top-k and top-p. At temperature 0 both are the models' own probabilities, and the token that the
target adds after the accepted prefix is its argmax.

This is a round with gamma = 3 and 2 beams. Each call of the draft adds a level to the tree, of
which the two likeliest leaves stay. Then the target verifies the best beam in one call:

    root ─┬─ the ─┬─ cat ─── sat     q = 0.30, the best beam
          │       └─ dog             less likely than both others: dropped
          └─ a ───── cat ─── ran     q = 0.15

    prefix          q       p      p / q
    the             0.70    0.500  0.71      > τ = 0.1
    the cat         0.50    0.040  0.08      not above τ
    the cat sat     0.30    0.039  0.13      > τ: the longest that passes, so all three stay

Lossy by design: the aim is not the target's own text but a likelier one, which is a text of lower
perplexity under the target. For an accepted prefix

    -log p = -log q + log(q / p)

The first term is small if the beams find a likely text. The second is below log(1 / τ), since the
prefix passed the test. At the default τ of 0.1 that is 2.3 nats. The test does not ask how small p
itself is. So a prefix that the target finds unlikely passes where the draft finds it unlikely too.
The text is likelier than autoregressive text if there are several beams and the draft is good. On a
real model the draft was good enough where 1 - TVD was about 0.6 or more (results/mjsd.md). TVD is
the total variation distance between the next-token probabilities of draft and target.

Departures (paper / here / why):
    Alg. 1, η: it has η ← -1 and η ← j / they are η ← 0 and η ← i / the text of Section 3 shows that
        the former are misprints
    temperature 0: the paper samples / beams have the likeliest tokens, p and q are unwarped, and
        the added token is the argmax / p of an argmax is 0 or 1, so that the test would accept
        nothing but the target's own text
    top-k and top-p: 20 and 0.9 in the experiments / as the options say / they suit those models
    draft's length: γ tokens / fewer where an EOS ends the beam / nothing after an EOS may count for
        or against the beam, which stays as likely as it is
    MJGD's length: any number of tokens in each step / always K, as in Fig. 1 / Def. 3.1 leaves the
        number open
    verified beams: the best one / the best `width` ones, as a tree / the later versions' MMTAD
    choice among verified beams: v1 has one beam / the longest accepted prefix. A beam that an EOS
        ends counts as gamma tokens if it is accepted whole (`merit`) / else a short answer that is
        complete would lose to a long one that is cut
    beams at a temperature: `beams` tokens are drawn for each beam, and the likeliest sequences
        stay (Section 2.1) / the same, drawn without replacement / a token drawn twice would make
        the same beam twice. The released code (ZongyueQin/LLMSpeculativeSampling) draws the
        children of all beams at once from a softmax over beams and vocabulary, takes that softmax
        at each step for q, and verifies all beams

Left out: batches.
"""
import itertools
import math
import sys
from typing import Iterator, NamedTuple

from common import CachedLM, InputError, Sampler, greedy, trie

import torch


def log_probs(logits: torch.Tensor, sample: Sampler) -> torch.Tensor:
    """Return the log-probabilities of which joint ones are sums. They are the sampler's, but at
    temperature 0 they are the model's own.

    logits   [..., V]
    sample   the sampler, which warps the logits
    returns  log-probabilities in nats, [..., V]
    """
    if sample.temperature == 0:
        return logits.float().log_softmax(-1)
    return sample.probs(logits).log()


def perplexity(target: CachedLM, prompts: list[list[int]], outputs: list[list[int]]) -> float:
    """Compute the perplexity of outputs under the target's own distribution. Eq. 1.

    prompts  token ids of each prompt
    outputs  token ids of the text after each prompt
    returns  exp of the mean of -log p, over all tokens of all outputs together
    """
    total = 0.0
    for prompt, output in zip(prompts, outputs):
        target.start(prompt[:-1])
        logp = log_probs(target.forward([prompt[-1], *output[:-1]]), greedy)  # [n, V]
        total -= logp[torch.arange(len(output)), torch.tensor(output)].sum().item()
    return math.exp(total / sum(map(len, outputs)))


# ------------------------------------------------------------------------------- beam search

def propose_children(logits: torch.Tensor, beams: int,
                     sample: Sampler) -> list[list[tuple[int, float]]]:
    """Choose for each row of logits up to `beams` tokens that may follow it.

    The tokens are the likeliest ones. At a temperature they are drawn without replacement. A token
    of probability 0 is never among them.

    logits   [n, V]
    beams    the most tokens of a row
    sample   the sampler that draws
    returns  for each row a list of pairs (token, its log-probability)
    """
    logp = log_probs(logits, sample)
    score = logp
    if sample.temperature > 0:
        # Gumbel trick: the k largest of log p + Gumbel noise are k draws without replacement
        uniform = sample.uniform(logp.shape, logp.device).clamp(min=1e-30)
        score = logp - (-uniform.log()).log()
    tokens = score.topk(min(beams, logp.shape[-1])).indices  # [n, beams]
    rows = zip(tokens.tolist(), logp.gather(-1, tokens).tolist())
    return [[(x, value) for x, value in zip(*row) if value > -math.inf] for row in rows]


class Beams(NamedTuple):
    """Hold what a beam search found: a tree of beams, whose node 0 is the root."""
    ids: list[int]
    parents: list[int]
    logps: list[float]  # for each node the joint log-probability of its path from the root, in nats
    leaves: list[int]  # the ends of the beams, the likeliest first


class Candidate(NamedTuple):
    """Hold a sequence that may be a beam of the next level."""
    logp: float  # the joint log-probability of the sequence, in nats
    node: int  # the end of the beam that it continues
    token: int | None  # what it adds, or None where the beam ended with an EOS


def beam_search(lm: CachedLM, unseen: list[int], depth: int, beams: int, sample: Sampler,
                eos: set[int]) -> Beams:
    """Search `depth` levels below the last token of `unseen`, and keep the `beams` likeliest
    sequences of each level.

    A sequence that ended with an EOS keeps its probability and is not extended. Nodes of the last
    level are never fed to lm, for nobody needs what comes after them.

    lm      the model that proposes tokens, with its cached context
    unseen  final tokens that lm has not been fed. The last of them is the root.
    depth   the number of levels, which is the number of tokens of a beam

    beams   how many sequences of each level stay
    sample  the sampler, which warps probabilities and, at a temperature, draws children
    eos     token ids that end a sequence

    returns the tree of all beams. Node i of this tree is node len(unseen) - 1 + i of the tree that
            lm has been fed since its last commit.
    """
    base = len(unseen) - 1
    ids, parents, logps = unseen[-1:], [-1], [0.0]
    leaves, ended = [0], []
    fed = [0]  # the nodes after which `logits` come, one row each
    logits = lm.forward(unseen)[-1:]
    # Section 2.1: each beam proposes its children, and the likeliest sequences of all stay
    for level in range(1, depth + 1):
        # A beam that ended competes as it is. Else what may follow an EOS would count against it
        candidates = [Candidate(logps[node], node, None) for node in ended]
        for node, row in zip(fed, propose_children(logits, beams, sample)):
            if node not in ended:
                candidates += [Candidate(logps[node] + logp, node, x) for x, logp in row]
        if not candidates:  # every child has probability 0 or nan: the level before is the last
            break
        best = sorted(candidates, key=lambda candidate: candidate.logp, reverse=True)[:beams]
        leaves, fed = [], []
        for logp, node, token in best:
            if token is not None:
                ids.append(token)
                parents.append(node)
                logps.append(logp)
                node = len(ids) - 1
                fed.append(node)
            leaves.append(node)
        ended = [node for node in leaves if ids[node] in eos]
        if level == depth or len(ended) == len(leaves):  # nobody needs what comes after them
            break
        logits = lm.forward([ids[node] for node in fed], [base + parents[node] for node in fed])
    return Beams(ids, parents, logps, leaves)


def path_to(leaf: int, parents: list[int]) -> list[int]:
    """Return the nodes from the root, node 0, down to a leaf."""
    path = [leaf]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


# ---------------------------------------------------------------------------------- decoding

def mjgd(target: CachedLM, prompt: list[int], *, K: int = 3, beams: int = 8,
         sample: Sampler = greedy, eos: set[int] = frozenset(),
         log: list | None = None) -> Iterator[list[int]]:
    """Decode the likeliest K tokens at a time, by beam search on the target itself: multi-token
    joint greedy decoding. Def. 3.1.

    K:     tokens decoded together, of which 1 is greedy decoding
    beams: sequences that stay at each step of the beam search. With V ** (K - 1) of them the search
           finds the argmax itself

    Yields chunks of K tokens, or fewer where an EOS ends the chunk; logs {"logp"} a chunk. This is
    the chunk's joint log-probability in nats. The search takes a target call for each level.
    """
    if K < 1:
        raise InputError(f"--K must be 1 or more, got {K}")
    if beams < 1:
        raise InputError(f"--beams must be 1 or more, got {beams}")
    if sample.temperature > 0:
        raise InputError(f"--temperature must be 0 for joint greedy decoding, got "
                         f"{sample.temperature}")
    target.start(prompt[:-1])
    root = prompt[-1]
    while True:
        # Def. 3.1: the best beam stands for the argmax over all texts of K tokens
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
    """Return the length of the longest prefix with min(1, p / q) > τ. Alg. 1, lines 6 to 13.

    target_logp  the target's joint log-probabilities of the prefixes of 1, 2, … tokens
    draft_logp   the draft's joint log-probabilities of the same prefixes
    tau          the threshold τ
    """
    if tau >= 1:  # min(1, p / q) is never above 1
        return 0
    threshold = math.log(tau) if tau > 0 else -math.inf
    passing = [i for i, (p, q) in enumerate(zip(target_logp, draft_logp), 1) if p - q > threshold]
    return max(passing, default=0)


class Verified(NamedTuple):
    """Hold what the target's call said about a beam."""
    draft_nodes: list[int]  # its nodes in the draft's tree, the root first
    target_nodes: list[int]  # its nodes in the target's tree, the root first
    target_logp: list[float]  # the target's joint log p of its prefixes of 1, 2, … tokens, in nats
    draft_logp: list[float]  # the draft's joint log q of the same prefixes
    eta: int  # how many of its tokens are accepted (η)

    def merit(self, gamma: int) -> int:
        """Return the number by which beams are compared. It is gamma for a beam that is accepted
        whole, even if an EOS ends the beam earlier. For all others it is η."""
        whole = self.eta == len(self.draft_nodes) - 1
        return gamma if whole else self.eta


def check_options(gamma: int, beams: int, tau: float, width: int) -> None:
    """Raise InputError for the first option of `mjsd` that is wrong."""
    if gamma < 1:
        raise InputError(f"--gamma must be 1 or more, got {gamma}")
    if beams < 1:
        raise InputError(f"--beams must be 1 or more, got {beams}")
    if not tau >= 0:
        raise InputError(f"--tau must be 0 or more, got {tau}")
    if not 1 <= width <= beams:
        raise InputError(f"--width must be 1 to the {beams} of --beams, got {width}")


def verify_beams(found: Beams, paths: list[list[int]], nodes_of: list[list[int]],
                 node_logp: list[float], tau: float) -> list[Verified]:
    """Find the accepted prefix of each beam. Alg. 1, lines 6 to 13.

    found      the draft's tree
    paths      the nodes of each beam in the draft's tree, the root first
    nodes_of   the nodes of each beam in the target's tree, the root first

    node_logp  the target's log-probability of each node of its tree, given the nodes above it
    tau        the threshold τ
    """
    verified = []
    for path, nodes in zip(paths, nodes_of):
        target_logp = list(itertools.accumulate(node_logp[node] for node in nodes[1:]))
        draft_logp = [found.logps[node] for node in path[1:]]
        eta = longest_prefix(target_logp, draft_logp, tau)
        verified.append(Verified(path, nodes, target_logp, draft_logp, eta))
    return verified


def mjsd(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 4, beams: int = 8,
         tau: float = 0.1, width: int = 1, sample: Sampler = greedy,
         eos: set[int] = frozenset(), log: list | None = None) -> Iterator[list[int]]:
    """Draft by beam search, and accept the longest prefix that is jointly likely enough:
    multi-token joint speculative decoding. Alg. 1.

    gamma: tokens of a beam (γ), fewer where an EOS ends the beam
    beams: beams of the draft's beam search
    tau:   accept a prefix where min(1, p / q) is above this (τ). 1 accepts nothing, so that greedy
           output is the target's. 0 accepts every prefix that the target can say at all
    width: beams verified in one call, as one tree. The longest prefix that is accepted stays

    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted", "target_logp",
    "draft_logp"} a round. The first two count the chosen beam's tokens. The others are lists of the
    joint log-probabilities, in nats, of the chosen beam's prefixes.
    """
    check_options(gamma, beams, tau, width)
    target.start(prompt[:-1])
    draft.start(prompt[:-1])
    unseen = prompt[-1:]  # final tokens that the draft has not been fed
    while True:
        # Line 3: the draft searches for likely beams x and their q. The best become one tree, where
        # beams that begin alike share their first nodes
        found = beam_search(draft, unseen, gamma, beams, sample, eos)
        paths = [path_to(leaf, found.parents) for leaf in found.leaves[:width]]
        texts = [[found.ids[node] for node in path[1:]] for path in paths]
        ids, parents, nodes_of = trie(unseen[-1], texts)
        # Line 4: one call of the target gives p of every prefix. The root has no parent, so entry 0
        # of node_logp means nothing, and nobody reads it
        logits = target.forward(ids, parents)  # [nodes, V]
        node_logp = log_probs(logits, sample)[parents, ids].tolist()
        # Lines 6 to 13: the longest prefix that passes counts, also behind prefixes that fail
        verified = verify_beams(found, paths, nodes_of, node_logp, tau)
        best = max(verified, key=lambda beam: beam.merit(gamma))
        # Lines 15 and 16: the target adds one token of its own after the accepted prefix
        [token] = sample(logits[best.target_nodes[best.eta]][None])
        target.commit(best.target_nodes[:1 + best.eta])
        kept = best.draft_nodes[:1 + best.eta]
        accepted = [found.ids[node] for node in kept[1:]]
        # The draft's cache keeps `unseen` and the accepted nodes that the search has fed. A node of
        # the last level was never fed: if it is accepted, the next round feeds it first
        base = len(unseen) - 1
        fed = [base + node for node in kept if base + node < len(draft.parents)]
        draft.commit([*range(base), *fed])
        unseen = accepted[len(fed) - 1:] + [token]  # the first of `fed` is the root
        if log is not None:
            log.append({"drafted": len(best.draft_nodes) - 1, "accepted": best.eta,
                        "target_logp": best.target_logp, "draft_logp": best.draft_logp})
        yield accepted + [token]


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    """Return a line with the output's perplexity and, for MJSD, what a round accepts."""
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
    from cli.main import main  # the command line is in cli/, a folder of this project
    sys.exit(main([mjsd, mjgd], report, lossy=[mjsd, mjgd],
                  ranges={"gamma": (1, 2, 3, 4, 5, 6, 8), "beams": (1, 2, 4, 8)}))
