"""Ouroboros: the draft model drafts phrase by phrase, phrases lengthen the draft, and what verification discards becomes phrases.

Zhao et al., "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster Speculative Decoding", arXiv 2402.13720

    speed-up = (A(γ + β) + 1) t_target / (γ / c · t_draft + t_target)        Eq. 6: a draft of γ + β tokens for γ / c draft calls

Four mechanisms, each with a switch (Table 4 is their ablation): `phrases` (Section 3.1), `lengthen` (3.2), `verification` (3.3) and
`history` (3.4). Without any of them this is greedy-draft speculative decoding. Lossless: drafts are only guesses, and a guess becomes
final only where it equals the token that the target chooses there, greedily or by one draw a node of the tree.
Departures: suffixes that were tried are corrected after a rejected draft too (the paper: after a full acceptance); a draft may overshoot
γ by part of a phrase (the released code cuts it); the target's argmax makes phrases also when sampling. Left out: batches.
"""
import itertools
import random
import sys
import time
from statistics import median
from typing import Iterator

from tqdm import tqdm

from common import CachedLM, InputError, Job, Run, Sampler, greedy, main, trie, walk


class PhrasePool:
    """Phrases (tuples of tokens) by their first token. At most `each` of one first token and `size` in all are kept, the newest ones."""

    def __init__(self, each: int = 16, size: int = 100_000):
        self.each, self.size = each, size
        self.phrases, self.tails = {}, {}  # {phrase: None} and {first token: {tail: None}}, oldest first

    def add(self, phrase: tuple[int, ...]) -> None:
        self.remove(phrase)
        self.phrases[phrase] = self.tails.setdefault(phrase[0], {})[phrase[1:]] = None
        if len(self.tails[phrase[0]]) > self.each:
            self.remove((phrase[0], *next(iter(self.tails[phrase[0]]))))
        if len(self.phrases) > self.size:
            self.remove(next(iter(self.phrases)))

    def remove(self, phrase: tuple[int, ...]) -> None:
        if phrase in self.phrases:
            del self.phrases[phrase], self.tails[phrase[0]][phrase[1:]]

    def after(self, token: int, n: int, length: int) -> list[tuple[int, ...]]:
        """The tails, cut to `length` tokens, of the n newest phrases that begin with this token, newest first."""
        return [tail[:length] for tail in itertools.islice(reversed(self.tails.get(token, {})), n)]


class Drafter:
    """Greedy decoding of the draft model, several tokens a call: lookahead decoding (Fu et al., arXiv 2402.02057). Section 3.1."""

    def __init__(self, draft: CachedLM, prompt: list[int], pool: PhrasePool, window: int, phrase: int, guesses: int, seed: int):
        self.draft, self.pool, self.phrase, self.guesses = draft, pool, phrase, guesses
        # levels[l][i] guesses the token at position i + l after the root, levels[0][0]; no window: no levels, one token a call
        self.levels = [[prompt[-1], *random.Random(seed).choices(prompt, k=window + phrase - 3)]] if window else []

    def step(self, unseen: list[int]) -> list[int]:
        """One draft call: `unseen` are the tokens not cached yet, the root last; returns the tokens that follow, and caches all but the last."""
        root, base = unseen[-1], len(unseen) - 1
        tree, above = trie(root, self.pool.after(root, self.guesses, self.phrase - 1) if self.levels else []), []
        ids, parents = unseen[:-1] + tree[0], [*range(-1, base), *(base + p for p in tree[1][1:])]
        size = len(ids)
        for level in self.levels:  # the first is a chain below the root, every other token hangs below the one a level up
            nodes = [] if above else [base]
            for i, token in enumerate(level[len(nodes):], len(nodes)):
                nodes.append(len(ids))
                ids.append(token)
                parents.append(above[i] if above else nodes[i - 1])
            above = nodes
        chosen = greedy(self.draft.forward(ids, parents))
        path, tokens = walk(*tree, chosen[base:size])
        self.draft.commit([*range(base), *(base + node for node in path)])
        if self.levels:
            new = [chosen[node] for node in above]
            if len(self.levels) < self.phrase - 1:  # still growing: one level more, one column less
                self.levels = [level[1:] for level in self.levels] + [new[1:]]
            else:  # every column is a phrase, and the levels move down
                for phrase in zip(*([root, *self.levels[0][1:]], *self.levels[1:], new)):
                    self.pool.add(phrase)
                self.levels = [*self.levels[1:], new]
        return tokens


def phrases_of(guesses: list[int], best: list[int], accepted: int, length: int) -> list[tuple[int, ...]]:
    """Phrases from a rejected draft (Section 3.3, Fig. 4): best[i] is the target's choice after guesses[:i]. From each discarded guess
    on, the target's choices for as long as the draft agrees with them, where that makes a phrase of `length` tokens."""
    found = []
    for i in range(accepted, len(guesses)):
        phrase, j = [guesses[i]], i + 1
        while len(phrase) < length:
            phrase.append(best[j])
            if j == len(guesses) or guesses[j] != best[j]:
                break
            j += 1
        if len(phrase) == length:
            found.append(tuple(phrase))
    return found


def ouroboros(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6, window: int = 2, phrase: int = 3, suffixes: int = 3,
              guesses: int = 4, phrases: bool = True, lengthen: bool = True, verification: bool = True, history: bool = True,
              pool: PhrasePool | None = None, sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Draft at least gamma tokens phrase by phrase, verify them and the suffixes that may follow in one target call.

    gamma: tokens drafted a round, at least (γ)
    window: columns of the draft's lookahead window (W)
    phrase: tokens of a phrase (β), 2 or more; its first one is the key
    suffixes: phrases tried at the end of a draft (K)
    guesses: phrases tried in one draft call
    phrases: draft by lookahead, with phrases (Section 3.1), or token by token
    lengthen: hang phrases below the last draft token (3.2)
    verification: make phrases of what the target discards (3.3)
    history: keep the phrases of earlier prompts (3.4)
    Yields chunks of 1 to gamma + 2 phrase - 1 tokens. `pool` is changed in place. Logs a record a round: {"drafted", "calls" of the
    draft model, "accepted", "suffix": those of them below the draft, "matched": Eq. 10, "phrases": made of what was discarded}.
    """
    if gamma < 1 or window < 1 or phrase < 2 or suffixes < 1 or guesses < 1:
        raise InputError("expected gamma, window, suffixes and guesses of 1 or more and phrases of 2 tokens or more, got "
                         f"{gamma}, {window}, {suffixes}, {guesses} and {phrase}")
    pool = PhrasePool() if pool is None or not history else pool
    longest, tail = gamma + phrase - 1, phrase - 1
    target.start(prompt[:-1], width=1 + longest + suffixes * tail)
    draft.start(prompt[:-1], width=2 * longest + tail + (guesses + window + phrase) * tail)
    root, text, drafter = prompt[-1], list(prompt), Drafter(draft, prompt, pool, window if phrases else 0, phrase, guesses, sample.seed)
    while True:
        # Section 3.1: draft; the draft model goes on from what it has cached
        drafted, calls = [], draft.calls
        while len(drafted) < gamma:
            drafted += drafter.step((text + drafted)[draft.length:])
        # Eq. 7: the phrases that begin with the last draft token lengthen it
        tried = pool.after(drafted[-1], suffixes, tail) if lengthen else []
        ids, parents = trie(root, [drafted, *((*drafted, *suffix) for suffix in tried)])  # nodes 0 … γ: the root and the draft
        # Eq. 2 and 8: one target call over all of it; Eq. 3 and 9: the longest path that the target agrees with
        logits = target.forward(ids, parents)
        chosen, best = sample(logits), greedy(logits)
        path, chunk = walk(ids, parents, chosen)
        target.commit(path)
        kept, found = len(path) - 1, []
        text, root = text + chunk, chunk[-1]
        draft.truncate(min(draft.length, len(text) - 1))  # its last drafted token was never cached
        # Section 3.3: phrases from what was discarded, and the tried suffixes with the target's corrections
        if verification:
            found = phrases_of(drafted, best, kept, phrase)
            edges = {edge: node for node, edge in enumerate(zip(parents, ids))}
            for suffix in tried:
                nodes = list(itertools.accumulate(suffix[:-1], lambda node, token: edges[node, token], initial=len(drafted)))
                pool.remove((drafted[-1], *suffix))
                found.append((drafted[-1], *(best[node] for node in nodes)))
            for each in found:
                pool.add(each)
        if log is not None:
            log.append({"drafted": len(drafted), "calls": draft.calls - calls, "accepted": kept, "suffix": max(0, kept - len(drafted)),
                        "matched": sum(d == v for d, v in zip(drafted, best)), "phrases": found})
        yield chunk


ouroboros.shared = {"pool": PhrasePool}  # the command line gives one pool to all prompts


def report(run: Run) -> str:
    """What a round did, and the predicted speed-up (Eq. 6) with the costs of this run: a draft call over a target call."""
    target, draft = run.models["target"], run.models["draft"]
    drafted, calls, accepted, suffix, matched = (sum(r[name] for r in run.log) / len(run.log)
                                                 for name in ("drafted", "calls", "accepted", "suffix", "matched"))
    cost = (draft.seconds / draft.calls) / (target.seconds / target.calls)
    return (f"a round: {drafted:.2f} tokens drafted in {calls:.2f} draft calls, {matched:.2f} match the target's choice, {accepted:.2f} accepted, "
            f"{suffix:.2f} of them from suffixes; {len(run.options['pool'].phrases)} phrases in the pool\n"
            f"predicted with a draft call at {cost:.2f} of a target call: speed-up {(accepted + 1) / (calls * cost + 1):.2f}x")


def tune(job: Job) -> int:
    """Search gamma, then window, then phrase by clock time on the given prompts (App. B, Alg. 1). Prints the table it walked to stdout.

    Wider than the paper's ranges (γ 2 to 14, W 15 to 20, β 5 to 7), downwards: where a draft call's rows are not free, narrow windows win.
    """
    best = {"gamma": 6, "window": 8, "phrase": 5} | job.options
    ranges = {"gamma": (2, 3, 4, 6, 8, 10, 12, 14), "window": (1, 2, 4, 8, 12, 16, 20), "phrase": (3, 4, 5, 6, 7)}
    began = time.perf_counter()
    job.finished(ouroboros, best)  # warm-up
    print("| gamma | window | phrase | seconds | tokens per target call | draft calls |\n| --- | --- | --- | --- | --- | --- |")
    bar = tqdm(total=sum(map(len, ranges.values())), desc="tune")
    for name, values in ranges.items():
        times = {}
        for value in values:
            options = best | {name: value}
            runs = [job.finished(ouroboros, options) for _ in range(3)]
            times[value], run = median(run.seconds for run in runs), runs[-1]
            bar.write(f"| {options['gamma']} | {options['window']} | {options['phrase']} | {times[value]:.2f} | "
                      f"{run.tokens / run.models['target'].calls:.2f} | {run.models['draft'].calls} |", file=sys.stdout)
            bar.update()
        best[name] = min(times, key=times.get)
    bar.close()
    print(f"\nbest of {time.perf_counter() - began:.0f} s of search:\npython ouroboros.py "
          + " ".join(f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name} {value}" for name, value in best.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main([ouroboros], report, actions={"tune": tune}))
