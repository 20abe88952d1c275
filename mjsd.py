"""Multi-token joint decoding chooses several tokens at a time by their joint likelihood.

Qin et al., "Multi-Token Joint Speculative Decoding for Accelerating Large Language Model
Inference", arXiv 2407.09722, version 1. Later versions rename MJGD to MTJD, and MJSD to MTAD.

    MJGD   x_{t+1:t+K} = argmax p(x_{t+1:t+K} | x_{1:t}), by beam search as in Fig. 1    Def. 3.1
    MJSD   accept the longest prefix of a draft x with
           min(1, p(x_{t+1:t+i} | x_{1:t}) / q(x_{t+1:t+i} | x_{1:t})) > τ                  Alg. 1

p is a joint probability under the target, and q is one under the draft model. In the code they are
log_p and log_q.

This is a round of MJSD with gamma = 3 and 2 beams. Each call of the draft model adds a token to
each beam, and the two likeliest beams stay. Then the target verifies the best beam in one call. The
picture leaves out some dropped beams:

    root ─┬─ the ─┬─ cat ─── sat     q = 0.30, the best beam
          │       └─ dog             less likely than both others: dropped
          └─ a ───── cat ─── ran     q = 0.15

    prefix          q       p      p / q
    the             0.70    0.500  0.71      > τ = 0.1
    the cat         0.50    0.040  0.08      not above τ
    the cat sat     0.30    0.039  0.13      > τ: the longest that passes, so all three are accepted

Lossy by design: the aim is not the target's own text but a likelier one, which is a text of lower
perplexity under the target. For an accepted prefix

    -log p = -log q + log(q / p)

The first term is small if the beams find a likely text. The second is below log(1 / τ), 2.3 nats at
the default τ, since the prefix passed the test. But a prefix that the target finds unlikely passes
if the draft finds it unlikely too. Whether the text is likelier than autoregressive text depends on
the draft and on the number of beams (results/mjsd.md).

Departures:
- Temperature 0. Paper: Alg. 1 samples beams and tokens, with top-20 and top-p 0.9 (App. D). Here: a
  beam continues with the likeliest tokens, and the target adds its argmax. p and q are not warped,
  as in the paper's equations. Why: temperature 0 would warp them to 0 or 1, so that the test would
  accept only the target's own text. Above temperature 0 the sampler warps p and q. The papers'
  top-20 and top-p 0.9 are --top-k 20 --top-p 0.9.
- End of an answer. Paper: a beam has γ tokens. Here: an EOS ends a beam, which keeps its joint
  probability and competes with longer beams. Why: tokens after an EOS must not count for or against
  a beam. This favours short answers a little.
- Sampling. Paper: each beam samples the tokens that may follow it (Section 2.1), and it is not said
  whether with replacement. Here: without. Why: a token drawn twice would make the same beam twice.
  The beams draw numbers of their own also with --coupling.
- Numbers. γ 4, 8 beams and τ 0.1 are those of Table 5. A τ of 1 or more is allowed.
- A draft whose logits are nan has no beam at temperature 0, and the target decodes token by token.
  Above temperature 0 it is refused.

Left out: several verified beams, which a later version of the paper adds as MMTAD.
"""
import math
import sys
from dataclasses import dataclass
from typing import Iterator

from common import CachedLM, InputError, Sampler, begin, greedy, main

import torch


# ------------------------------------------------------------------------------- the methods
def mjgd(target: CachedLM, prompt: list[int], *, K: int = 3, beams: int = 8,
         sample: Sampler = greedy, eos: set[int] = frozenset(),
         log: list | None = None) -> Iterator[list[int]]:
    """Decode the likeliest K tokens at a time, by beam search on the target itself.

    This is multi-token joint greedy decoding (Def. 3.1). K is the same in every step, as in Fig. 1.

    K:     tokens decoded together, 1 or more. 1 is greedy decoding
    beams: beams that stay after each token of the search, 1 or more. With V ** (K - 1) of them the
           search finds the argmax itself
    eos    tokens that end a beam

    Yields chunks of K tokens, or fewer if an EOS ends the chunk. For each chunk it logs {"logp"},
    the joint log-probability in nats. The search takes a target call for each level, K at most.
    Raises InputError above temperature 0.
    """
    if min(K, beams) < 1 or sample.temperature > 0:
        raise InputError("--K and --beams must be 1 or more and --temperature 0, got "
                         f"{K=}, {beams=}, temperature={sample.temperature}")
    root = begin(prompt, target)[-1]
    while True:
        # The best Beam (below) approximates the argmax over all texts of K tokens.
        best = beam_search(target, [root], K, beams, sample, eos)[0]
        if not best.tokens:
            raise InputError("expected logits that are numbers, got nan from the target")
        target.commit(best.nodes[:len(best.tokens)])  # the root and all new tokens but the last
        root = best.tokens[-1]
        if log is not None:
            log.append({"logp": best.logps[-1]})
        yield best.tokens


def mjsd(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 4, beams: int = 8,
         tau: float = 0.1, sample: Sampler = greedy, eos: set[int] = frozenset(),
         log: list | None = None) -> Iterator[list[int]]:
    """Draft by beam search, and accept the longest prefix that is jointly likely enough:
    multi-token joint speculative decoding (Alg. 1).

    gamma: tokens of a beam (γ), 1 or more. An EOS may end it earlier
    beams: beams of the draft's beam search, 1 or more
    tau:   accept a prefix if min(1, p / q) is above this (τ), 0 or more. 1 accepts nothing, so the
           output is the target's own. 0 accepts every prefix with p > 0
    eos    tokens that end a beam

    Yields chunks of 1 to gamma + 1 tokens. For each round it logs {"guessed", "accepted"}, the
    number of tokens of the best beam, and how many of them are accepted.
    """
    if min(gamma, beams) < 1 or not tau >= 0:
        raise InputError("--gamma and --beams must be 1 or more and --tau 0 or more, got "
                         f"{gamma=}, {beams=}, {tau=}")
    text = begin(prompt, target, draft)
    while True:  # one iteration of Algorithm 1. All probabilities are logarithms here
        unseen = text[draft.length:]  # what the draft has not cached yet
        best = beam_search(draft, unseen, gamma, beams, sample, eos)[0]  # line 3
        x = best.tokens
        log_q = best.logps  # log_q[i] is the draft's joint log-probability of x_1 … x_i
        logits = target.forward([text[-1], *x])  # line 4
        rows = log_probs(logits, sample)  # [len(x) + 1, V]; row i - 1 judges x_i
        # The paper prints η ← -1 and η ← j. The text of Section 3.2 shows that 0 and i are meant.
        log_p = 0.0  # line 6
        eta = 0
        for i, j in enumerate(x, 1):  # lines 7 and 8
            log_p += rows[i - 1, j].item()  # line 9
            # Line 10: min(1, p / q) > τ. Nan never passes.
            if math.exp(min(log_p - log_q[i], 0.0)) > tau:
                eta = i  # line 11: the longest accepted prefix so far
        [t] = sample(logits[eta:eta + 1], target.places[eta:eta + 1])  # lines 15 and 16
        target.commit(range(eta + 1))
        # The draft was not fed t, nor the last token of the beam if all of it was accepted.
        draft.commit(best.nodes[:len(unseen) + eta])
        chunk = [*x[:eta], t]
        text += chunk
        if log is not None:
            log.append({"guessed": len(x), "accepted": eta})
        yield chunk  # line 17


# ------------------------------------------------------------------------------- beam search
def log_probs(logits: torch.Tensor, sample: Sampler) -> torch.Tensor:
    """Compute the log-probabilities of single tokens, whose sums are joint log-probabilities.

    logits   [..., V]
    sample   the sampler that warps the logits. At temperature 0 nothing is warped
    returns  log-probabilities in nats, [..., V]
    """
    if sample.temperature == 0:
        return logits.float().log_softmax(-1)
    return sample.probs(logits).log()


@dataclass
class Beam:
    """Hold some tokens that may follow the text.

    tokens   the tokens
    logps    logps[i] is the joint log-probability of the first i tokens, in nats. The last item is
             that of the whole beam
    nodes    the pending nodes of `unseen`, then of those of `tokens` that were fed. The newest one
             may not be fed yet
    ended    whether the last token is an EOS, so that the beam grows no more
    """
    tokens: list[int]
    logps: list[float]
    nodes: list[int]
    ended: bool


def propose_children(logits: torch.Tensor, width: int,
                     sample: Sampler) -> list[list[tuple[int, float]]]:
    """Choose the tokens that may follow each beam: at most `width`, and none of probability 0.

    logits   [n, V], a row for each beam
    width    how many tokens may follow a beam at most
    sample   the sampler. At temperature 0 the tokens are the likeliest ones. Above 0 they are drawn
             without replacement
    returns  for each row a list of pairs (token, its log-probability)
    """
    logp = log_probs(logits, sample)
    score = logp
    if sample.temperature > 0:
        # The k largest log(p / E), as in Sampler's race, are k draws without replacement (the
        # Gumbel top-k trick).
        E = -sample.uniform(logp.shape, logp.device).clamp(min=1e-300).log()
        score = logp - E.log()
    tokens = score.topk(min(width, logp.shape[-1])).indices  # [n, width]
    rows = zip(tokens.tolist(), logp.gather(-1, tokens).tolist())
    return [[(x, v) for x, v in zip(xs, vs) if v > -math.inf] for xs, vs in rows]


def beam_search(lm: CachedLM, unseen: list[int], depth: int, beams: int, sample: Sampler,
                eos: set[int]) -> list[Beam]:
    """Find the likeliest beams of `depth` tokens that may follow the text (Section 2.1).

    lm       the model that proposes tokens, with its cached context
    unseen   the last tokens of the text, which lm has not cached. They are fed as a chain, and all
             beams hang below the last one
    depth    the number of tokens of a beam. A beam that ends with an EOS may have fewer
    beams    how many beams stay after each token
    sample   the sampler that warps probabilities and, above temperature 0, draws tokens
    eos      tokens that end a beam
    returns  the beams, the likeliest first
    """
    # The search begins with one beam, which has no token yet and hangs below the text.
    found = [Beam([], [0.0], list(range(len(unseen))), ended=False)]
    growing = [*found]  # those that have not ended
    logits = lm.forward(unseen)[-1:]  # a row for each growing beam
    for level in range(1, depth + 1):
        # A beam that has ended competes as it is.
        candidates = [beam for beam in found if beam.ended]
        for beam, children in zip(growing, propose_children(logits, beams, sample)):
            candidates += [Beam(beam.tokens + [token], beam.logps + [beam.logps[-1] + logp],
                                beam.nodes, ended=token in eos) for token, logp in children]
        if not candidates:  # all probabilities are nan, so no beam can grow
            break
        found = sorted(candidates, key=lambda beam: beam.logps[-1], reverse=True)[:beams]
        growing = [beam for beam in found if not beam.ended]
        if level == depth or not growing:
            break
        # Feed the newest token of each growing beam below the token before it.
        first = len(lm.parents)
        logits = lm.forward([beam.tokens[-1] for beam in growing],
                            [beam.nodes[-1] for beam in growing])
        for node, beam in enumerate(growing, first):
            beam.nodes = beam.nodes + [node]  # a new list, since siblings share the old one
    return found


# -------------------------------------------------------------------------- the command line
def perplexity(target: CachedLM, prompts: list[list[int]], outputs: list[list[int]]) -> float:
    """Compute the perplexity of outputs under the target's own distribution. Eq. 1, over the tokens
    of all outputs as one sequence.

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


def report(run) -> str:
    """Return a line with the output's perplexity and, for MJSD, what a round accepts."""
    pairs = [(prompt, output) for prompt, output in zip(run.prompts, run.outputs) if output]
    text = (f"perplexity of the output under the target: "
            f"{perplexity(run.models['target'], *zip(*pairs)):.3f}")
    if run.method is mjgd:
        return text
    guessed = sum(r["guessed"] for r in run.log) / len(run.log)
    accepted = sum(r["accepted"] for r in run.log) / len(run.log)
    return (f"a round: {guessed:.2f} tokens drafted, {accepted:.2f} accepted; "
            f"{run.models['draft'].calls} draft calls; {text}")


COMMAND_LINE = dict(methods=[mjsd, mjgd], lossy=[mjsd, mjgd], report=report,
                    ranges={"gamma": (1, 2, 3, 4, 5, 6, 8), "beams": (1, 2, 4, 8)})

if __name__ == "__main__":
    sys.exit(main(**COMMAND_LINE))
