"""Multi-token joint decoding: several tokens at a time by their joint likelihood, on the target alone or drafted by a small model.

Qin et al., "Multi-Token Joint Speculative Decoding for Accelerating Large Language Model Inference", arXiv 2407.09722

    MJGD   x_{t+1:t+K} = argmax p(x_{t+1:t+K} | x_{1:t})                                     Def. 3.1, approximated by beam search
    MJSD   accept the longest prefix of the draft with min(1, p(x_{t+1:t+i} | x_{1:t}) / q(x_{t+1:t+i} | x_{1:t})) > τ       Alg. 1

Lossy by design: the aim is a likelier text (lower perplexity), not the target's own. p and q are joint probabilities, the target's and
the draft's, after temperature, top-k and top-p; at temperature 0 both are taken as they are and the next token is the target's argmax.
Departures: Alg. 1 misprints η ← -1 and η ← j, read 0 and i; the released code takes a softmax over the beams for q, here it is the joint;
`width` verifies several beams in the one call. Left out: batches.
"""
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Iterator

import torch

from common import CachedLM, InputError, Run, Sampler, greedy, main, trie

COUNTERS = Path("/sys/class/powercap")  # a CPU's energy counters, where the kernel offers them


# ---------------------------------------------------------------- what the paper measures

def perplexity(target: CachedLM, prompts: list[list[int]], outputs: list[list[int]]) -> float:
    """exp of the mean -log p (nats a token) of the outputs after their prompts under the unwarped target: Eq. 1."""
    total = 0.0
    for prompt, output in zip(prompts, outputs):
        target.start(prompt[:-1], width=len(output))
        logp = target.forward([prompt[-1], *output[:-1]]).float().log_softmax(-1)  # [n, V]
        total -= logp[torch.arange(len(output)), torch.tensor(output)].sum().item()
    return math.exp(total / sum(map(len, outputs)))


class EnergyMeter:
    """Context manager: `joules` used inside it, or None where this machine has no power reading. App. B.

    On a GPU the power that nvidia-smi reports every `interval` seconds, integrated over time; else the CPU package's own counters.
    """

    def __init__(self, device: torch.device, interval: float = 0.1):
        self.device, self.interval, self.joules = device, interval, None

    def __enter__(self):
        self.began = time.perf_counter()
        if self.device.type == "cuda":
            index = self.device.index or 0
            self.process = subprocess.Popen(["nvidia-smi", f"--id={torch.cuda.get_device_properties(index).uuid}", "--query-gpu=power.draw",
                                             "--format=csv,noheader,nounits", f"--loop-ms={round(1000 * self.interval)}"], stdout=subprocess.PIPE, text=True)
            self.watts, self.reader = [], threading.Thread(target=self._read)
            self.reader.start()
        else:
            self.before = self._counters()
        return self

    def _read(self):
        for line in self.process.stdout:
            self.watts.append((time.perf_counter(), float(line)))

    def _counters(self) -> list[tuple[int, int]]:
        """(microjoules, the value after which the counter begins again) of each CPU package; [] without a counter that may be read."""
        try:
            return [tuple(int((zone / name).read_text()) for name in ("energy_uj", "max_energy_range_uj"))
                    for zone in sorted(COUNTERS.glob("intel-rapl:?"))]
        except OSError:
            return []

    def __exit__(self, *_):
        if self.device.type == "cuda":
            ended = time.perf_counter()
            self.process.terminate()
            self.reader.join()
            self.joules = integral(self.watts, self.began, ended)
        elif self.before:
            self.joules = sum((after - before) % (top + 1) for (before, top), (after, _) in zip(self.before, self._counters())) / 1e6


def integral(readings: list[tuple[float, float]], began: float, ended: float) -> float | None:
    """Joules of (seconds, watts) readings between two times by the trapezoid rule, the first and the last held outwards; None without any."""
    if not readings:
        return None
    readings = [(began, readings[0][1]), *(r for r in readings if began < r[0] < ended), (ended, readings[-1][1])]
    return sum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in zip(readings, readings[1:]))


# ---------------------------------------------------------------- the methods

class Beams:
    """Beam search down a model's pending tree: `ids`, `parents` and `logps` [n] (cumulative log-probability, nats) of its nodes, node 0
    the root. The nodes of the deepest level have not been fed."""

    def __init__(self, lm: CachedLM, unseen: list[int], depth: int, beams: int, sample: Sampler, draw: bool):
        """Grow `depth` levels below the root, the last of `unseen`. With `draw` each beam draws its children from the warped
        distribution (beam sampling), else the likeliest ones of the unwarped one are tried; the best `beams` leaves stay."""
        self.base = len(unseen) - 1
        self.ids, self.parents, self.logps, self.leaves = unseen[-1:], [-1], [0.0], [0]
        logits = lm.forward(unseen)[-1:]
        for level in range(depth):
            logp = sample.probs(logits).log() if draw else logits.float().log_softmax(-1)  # [beams, V]
            if draw:
                some = min(beams, int((logp > -torch.inf).sum(-1).min()))  # a narrow distribution has fewer
                tokens = torch.multinomial(logp.exp(), some, generator=sample.generator_on(logp.device))
            else:
                tokens = logp.topk(min(beams, logp.shape[-1])).indices  # [beams, some]
            scores = torch.tensor([self.logps[leaf] for leaf in self.leaves], device=logp.device)[:, None] + logp.gather(-1, tokens)
            best = scores.flatten().topk(min(beams, scores.numel()))
            owners, tokens = (best.indices // tokens.shape[1]).tolist(), tokens.flatten()[best.indices].tolist()
            leaves = list(range(len(self.ids), len(self.ids) + len(tokens)))
            self.parents += [self.leaves[owner] for owner in owners]
            self.ids, self.logps, self.leaves = self.ids + tokens, self.logps + best.values.tolist(), leaves  # best first
            if level < depth - 1:
                logits = lm.forward(tokens, [self.base + self.parents[leaf] for leaf in leaves])

    def path(self, leaf: int) -> list[int]:
        """The nodes from the root down to this one."""
        path = [leaf]
        while path[0] != 0:
            path.insert(0, self.parents[path[0]])
        return path


def mjgd(target: CachedLM, prompt: list[int], *, k: int = 3, beams: int = 8, sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Multi-token joint greedy decoding: the likeliest K tokens at a time, by beam search on the target itself. Def. 3.1.

    k: tokens decoded together (K); 1 is greedy decoding, and vocabulary ** (k - 1) beams make it exact
    beams: sequences kept at each step of the beam search
    Yields chunks of k tokens, for k target calls; logs a record {"logp"} a chunk: its joint log-probability.
    """
    if k < 1 or beams < 1:
        raise InputError(f"expected k and beams of 1 or more, got {k} and {beams}")
    if sample.temperature > 0:
        raise InputError(f"expected temperature 0 for joint greedy decoding, got {sample.temperature}")
    target.start(prompt[:-1], width=1 + (k - 1) * beams)
    root = prompt[-1]
    while True:
        tree = Beams(target, [root], k, beams, sample, draw=False)
        path = tree.path(tree.leaves[0])
        target.commit(path[:-1])  # the leaf was never fed
        root = tree.ids[path[-1]]
        if log is not None:
            log.append({"logp": tree.logps[path[-1]]})
        yield [tree.ids[node] for node in path[1:]]


mjgd.lossy = True


def longest_prefix(target_logp: list[float], draft_logp: list[float], tau: float) -> int:
    """The length of the longest prefix with min(1, p / q) > τ, from the joint log-probabilities of all prefixes. Alg. 1, lines 6-13."""
    threshold = math.log(tau) if tau > 0 else -math.inf
    return max((i for i, (p, q) in enumerate(zip(target_logp, draft_logp), 1) if tau < 1 and p - q > threshold), default=0)


def mjsd(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 4, beams: int = 8, tau: float = 0.1, width: int = 1,
         sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Multi-token joint speculative decoding: a beam-decoded draft, of which the longest prefix that is jointly likely enough stays. Alg. 1.

    gamma: tokens of a draft
    beams: beams of the draft's beam search
    tau: accept a prefix where min(1, p / q) is above this; 1 accepts nothing (greedy output is then the target's), 0 whatever is possible
    width: best beams verified in one call, as one tree; the longest accepted prefix of all stays
    Yields chunks of 1 to gamma + 1 tokens; logs a record {"drafted", "accepted", "target_logp", "draft_logp"} a round: tokens, and
    the joint log-probabilities (nats) of the chosen beam's prefixes.
    """
    if gamma < 1 or beams < 1 or not 1 <= width <= beams or tau < 0:
        raise InputError(f"expected gamma, beams and tau of at least 1, 1 and 0, and width of 1 to beams, got {gamma}, {beams}, {tau} and {width}")
    target.start(prompt[:-1], width=1 + gamma * width)
    draft.start(prompt[:-1], width=2 + (gamma - 1) * beams)
    unseen, warped = prompt[-1:], sample.temperature > 0
    while True:
        tree = Beams(draft, unseen, gamma, beams, sample, draw=warped)  # line 3: x and q
        paths = [tree.path(leaf) for leaf in tree.leaves[:width]]
        ids, parents = trie(unseen[-1], [[tree.ids[node] for node in path[1:]] for path in paths])
        logits = target.forward(ids, parents)  # line 4: [nodes, V]
        logp = (sample.probs(logits).log() if warped else logits.float().log_softmax(-1))
        step, edges = logp[parents, ids].tolist(), {edge: node for node, edge in enumerate(zip(parents, ids))}
        best = (-1,)
        for path in paths:
            nodes, target_logp = [0], []
            for node in path[1:]:
                nodes.append(edges[nodes[-1], tree.ids[node]])
                target_logp.append(step[nodes[-1]] + (target_logp[-1] if target_logp else 0.0))  # line 9
            draft_logp = [tree.logps[node] for node in path[1:]]
            accepted = longest_prefix(target_logp, draft_logp, tau)  # lines 10 to 12
            if accepted > best[0]:
                best = accepted, path, nodes, target_logp, draft_logp
        accepted, path, nodes, target_logp, draft_logp = best
        [token] = sample(logits[nodes[accepted]][None])  # lines 15 and 16: after the accepted prefix
        target.commit(nodes[:1 + accepted])
        fed = path[:min(1 + accepted, gamma)]  # the leaf was never fed
        draft.commit([*range(tree.base), *(tree.base + node for node in fed)])
        guesses = [tree.ids[node] for node in path[1:1 + accepted]]
        unseen = guesses[len(fed) - 1:] + [token]
        if log is not None:
            log.append({"drafted": gamma, "accepted": accepted, "target_logp": target_logp, "draft_logp": draft_logp})
        yield guesses + [token]


mjsd.lossy = True


def report(run: Run) -> str:
    """Perplexity, and what a round of MJSD accepts."""
    text = f"perplexity of the output under the target: {perplexity(run.models['target'], run.prompts, run.outputs):.3f}"
    if run.method is mjgd:
        return text
    drafted, accepted = (sum(r[name] for r in run.log) / len(run.log) for name in ("drafted", "accepted"))
    return f"a round: {drafted:.0f} tokens drafted, {accepted:.2f} accepted; {run.models['draft'].calls} draft calls; {text}"


if __name__ == "__main__":
    sys.exit(main([mjsd, mjgd], report))
