"""Ouroboros: a draft model drafts phrase by phrase, and what verification discards becomes phrases.

Zhao et al., "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster Speculative Decoding",
arXiv 2402.13720

    speed-up = (A(γ + β) + 1) t_target / (γ / c · t_draft + t_target)                        Eq. 6
    A(γ + β): accepted tokens of a draft of γ + β tokens, which takes γ / c draft calls

Four mechanisms, each with a switch (Table 4 is their ablation): `phrases` (Section 3.1), `lengthen`
(3.2), `verification` (3.3) and `history` (3.4). Without any of them this is speculative decoding
with a greedy draft. Lossless: drafts are only guesses, and a guess becomes final only where it
equals the token that the target chooses there, greedily or by one draw a node of the tree.
Departures: all suffixes that were tried are corrected, after a rejected draft too (the paper: after
a full acceptance, those not accepted); a draft may be longer than γ by part of a phrase (the
released code cuts it); the target's argmax makes phrases also when sampling; W and β default to
what suits a CPU (the paper: W 15 to 20, β 5 to 7). Left out: batches.
"""
import itertools
import random
import sys
from typing import Iterator

from common import CachedLM, InputError, Sampler, greedy, trie, walk


class PhrasePool:
    """Phrases (tuples of tokens) by their first token. The oldest ones are dropped beyond `most` of
    one first token and beyond `size` in all."""

    def __init__(self, most: int = 16, size: int = 100_000):
        self.most = most
        self.size = size
        self.phrases = {}  # {phrase: None}, the oldest first
        self.rests = {}  # {first token: {the rest of a phrase: None}}

    def add(self, phrase: tuple[int, ...]) -> None:
        self.remove(phrase)
        rests = self.rests.setdefault(phrase[0], {})
        self.phrases[phrase] = rests[phrase[1:]] = None
        if len(rests) > self.most:
            self.remove((phrase[0], *next(iter(rests))))
        if len(self.phrases) > self.size:
            self.remove(next(iter(self.phrases)))

    def remove(self, phrase: tuple[int, ...]) -> None:
        if phrase in self.phrases:
            del self.phrases[phrase], self.rests[phrase[0]][phrase[1:]]

    def newest(self, token: int, n: int) -> list[tuple[int, ...]]:
        """The rests of the n newest phrases that begin with this token, newest first."""
        return list(itertools.islice(reversed(self.rests.get(token, {})), n))


class Drafter:
    """Greedy decoding of the draft model, several tokens a call: lookahead decoding (Fu et al.,
    arXiv 2402.02057) with the pool's phrases as guesses. Section 3.1."""

    def __init__(self, draft: CachedLM, prompt: list[int], pool: PhrasePool, W: int, beta: int,
                 G: int, seed: int):
        self.draft = draft
        self.pool = pool
        self.beta = beta
        self.G = G
        # levels[l][i] guesses the token at position i + l after the root, roughly: the window moves
        # by one a call. levels[0][0] stands for the root. W = 0: no levels, one token a call
        rng = random.Random(seed)
        self.levels = [[prompt[-1], *rng.choices(prompt, k=W + beta - 3)]] if W else []

    def step(self, unseen: list[int]) -> list[int]:
        """One draft call: `unseen` are the tokens that are not cached yet, the root last; returns
        those that follow, and caches all but the last."""
        root = unseen[-1]
        base = len(unseen) - 1  # the root's node in the draft's pending tree
        rests = self.pool.newest(root, self.G) if self.levels else []
        ids, parents, _ = trie(root, [rest[:self.beta - 1] for rest in rests])
        size = len(ids)
        last = self.window(ids, parents)
        below = [base + parent for parent in parents]
        logits = self.draft.forward(unseen[:-1] + ids, [*range(-1, base - 1), *below])[base:]
        path, tokens = walk(ids[:size], parents[:size], greedy(logits[:size]))
        self.draft.commit([*range(base), *(base + node for node in path)])
        if self.levels:
            self.move(root, greedy(logits[last]))
        return tokens

    def window(self, ids: list[int], parents: list[int]) -> list[int]:
        """Add the window to a tree with node 0 as its root; the nodes of the last level. The first
        level is a chain below the root, every other token hangs below the one a level up."""
        above = []
        for level in self.levels:
            nodes = [] if above else [0]
            for i, token in enumerate(level[len(nodes):], len(nodes)):
                nodes.append(len(ids))
                ids.append(token)
                parents.append(above[i] if above else nodes[i - 1])
            above = nodes
        return above

    def move(self, root: int, new: list[int]) -> None:
        """Move the window on; `new` is what follows its last level. Once it has grown to β - 1
        levels every column is a phrase."""
        if len(self.levels) < self.beta - 1:
            self.levels = [level[1:] for level in self.levels] + [new[1:]]
            return
        self.levels[0] = [root, *self.levels[0][1:]]
        for phrase in zip(*self.levels, new):
            self.pool.add(phrase)
        self.levels = [*self.levels[1:], new]


def phrases_of(d: list[int], v: list[int], A: int, beta: int) -> list[tuple[int, ...]]:
    """Phrases from a draft d of which A tokens were accepted (Section 3.3, Fig. 4): v[i] is the
    target's choice after d[:i]. From each discarded token on, the target's choices for as long as
    the draft agrees with them, where that makes a phrase of β tokens."""
    found = []
    for i in range(A, len(d)):
        phrase, j = [d[i]], i + 1
        while len(phrase) < beta:
            phrase.append(v[j])
            if j == len(d) or d[j] != v[j]:
                break
            j += 1
        if len(phrase) == beta:
            found.append(tuple(phrase))
    return found


def learn(pool: PhrasePool, d: list[int], v: list[int], rests: list[tuple], tried: list[list[int]],
          A: int, beta: int) -> list[tuple[int, ...]]:
    """Put the tried suffixes into the pool as the target corrects them, and phrases of what it
    discards: Section 3.3. Returns them, the newest last. `tried`: the nodes of each suffix, after
    those of the root and of d."""
    for rest in rests:
        pool.remove((d[-1], *rest))
    found = [(d[-1], *(v[node] for node in nodes[len(d):-1])) for nodes in reversed(tried)]
    found += phrases_of(d, v, A, beta)
    for phrase in found:
        pool.add(phrase)
    return found


def ouroboros(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6, W: int = 2,
              beta: int = 3, K: int = 3, G: int = 4, phrases: bool = True,
              lengthen: bool = True, verification: bool = True, history: bool = True,
              pool: PhrasePool | None = None, sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Draft at least gamma tokens phrase by phrase; verify them, and the suffixes that may follow,
    in one target call.

    gamma:   tokens drafted a round, at least (γ)
    W:       columns of the draft's lookahead window
    beta:    tokens of a phrase (β), 2 or more; the first one is its key
    K:       phrases tried as suffixes of a draft
    G:       phrases tried in one draft call
    phrases: draft by lookahead, with phrases (Section 3.1), or token by token
    lengthen: hang phrases below the last draft token (3.2)
    verification: make phrases of what the target discards (3.3)
    history: keep the phrases of earlier prompts (3.4)
    Yields chunks of 1 to gamma + 2 beta - 1 tokens. `pool` is changed in place. Logs a record a
    round: {"drafted", "calls" of the draft model, "accepted", of suffixes too, "matched" (Eq. 10),
    "phrases" made by verification}.
    """
    if gamma < 1 or W < 1 or beta < 2 or K < 1 or G < 1:
        raise InputError("expected gamma, W, K and G of 1 or more and beta of 2 or more, got "
                         f"{gamma}, {W}, {K}, {G} and {beta}")
    pool = PhrasePool() if pool is None or not history else pool
    pool.most = max(pool.most, K, G)
    target.start(prompt[:-1])
    draft.start(prompt[:-1])
    drafter = Drafter(draft, prompt, pool, W if phrases else 0, beta, G, sample.seed)
    root = prompt[-1]
    text = list(prompt)
    while True:
        # Section 3.1: draft d_1 … d_γ, or a few more; the draft goes on from what it has cached
        d = []
        calls = draft.calls
        while len(d) < gamma:
            d += drafter.step((text + d)[draft.length:])
        # Eq. 7: the K newest phrases that begin with d_γ lengthen it
        rests = pool.newest(d[-1], K) if lengthen else []
        lengthened = [d + list(rest[:beta - 1]) for rest in rests]
        ids, parents, paths = trie(root, [d, *lengthened])
        # Eq. 2 and 8: v of all of it in one target call; Eq. 3 and 9: the longest accepted path
        logits = target.forward(ids, parents)
        v = greedy(logits)  # v[node]: the target's argmax after it; nodes 0 … γ: the root and d
        path, chunk = walk(ids, parents, v if sample.temperature == 0 else sample(logits))
        target.commit(path)
        accepted = len(path) - 1
        text += chunk
        root = chunk[-1]
        draft.truncate(min(draft.length, len(text) - 1))  # d_γ was never cached
        found = learn(pool, d, v, rests, paths[1:], accepted, beta) if verification else []
        if log is not None:
            log.append({"drafted": len(d), "calls": draft.calls - calls, "accepted": accepted,
                        "matched": sum(x == y for x, y in zip(d, v)), "phrases": found})
        yield chunk


def report(run) -> str:
    """What a round did, and the speed-up to be expected (Eq. 6) with the costs of this run."""
    target, draft, rounds = run.models["target"], run.models["draft"], len(run.log)
    drafted, calls, accepted, matched = (sum(r[name] for r in run.log) / rounds
                                         for name in ("drafted", "calls", "accepted", "matched"))
    suffix = sum(max(0, r["accepted"] - r["drafted"]) for r in run.log) / rounds
    cost = (draft.seconds / draft.calls) / (target.seconds / target.calls)
    kept = f"; {len(run.options['pool'].phrases)} phrases kept"
    return (f"a round: {drafted:.2f} tokens drafted in {calls:.2f} draft calls, {matched:.2f} are "
            f"the target's choice, {accepted:.2f} accepted, {suffix:.2f} of them from suffixes"
            f"{kept if run.options.get('history', True) else ''}\npredicted, a draft call costing "
            f"{cost:.2f} of a target call: speed-up {(accepted + 1) / (calls * cost + 1):.2f}x")


if __name__ == "__main__":
    from cli import main
    sys.exit(main([ouroboros], report, shared={"pool": PhrasePool}, ranges={
        "gamma": (2, 3, 4, 6, 8, 10, 12, 14), "W": (1, 2, 4, 8, 12, 16, 20),
        "beta": (3, 4, 5, 6, 7)}))
