"""Ouroboros: a draft model drafts phrase by phrase, and what verification discards becomes phrases.

Zhao et al., "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster Speculative Decoding",
arXiv 2402.13720

    speed-up = (A(γ + β) + 1) t_target / (γ / c · t_draft + t_target)                        Eq. 6
    A(γ + β): accepted tokens of a draft of γ + β tokens, which takes γ / c draft calls

A phrase is β tokens, and its first token is its key. A round with γ = 3 and β = 3, where the pool
holds the phrases "sat on the", "mat and then" and "mat by me", and the text ends in "sat":

    draft (3.1)      sat ── on ── the                   one draft call on the root and a phrase: "on
                                                        the" is right, and "mat" comes after it
    lengthen (3.2)   sat ── on ── the ── mat ─┬─ and ── then    one target call on the draft, which
                                              └─ by ─── me      is "on the mat", and two suffixes
    verify           the target chooses on, the, mat, and, slept: they are the chunk
    learn (3.3)      "mat and slept" takes the place of "mat and then" in the pool, and "mat and"
                     with what the target chose after "by" that of "mat by me"

Four mechanisms, each with a switch (Table 4 is their ablation):
    phrases       Section 3.1: the draft model decodes by lookahead, with phrases as guesses
    lengthen      Section 3.2: phrases that begin with the last draft token are verified below it
    verification  Section 3.3: discarded draft tokens and corrected suffixes become phrases
    history       Section 3.4: phrases outlive the prompt that they come from
Without any of them this is speculative decoding with a greedy draft. Lossless: drafts are only
guesses, and a guess becomes final only where it equals the token that the target chooses there, by
the argmax or by one sample a node.

Where the paper's text and the released code differ, two rules here are the released code's:
    phrases of a discarded draft: the paper keeps segments that match the target's choices / a
        phrase begins at every discarded token, also at the rejected one, and ends with the target's
        choice (add_extra_ngram)
    corrected suffixes: the paper corrects the unused ones after a full acceptance / all that were
        tried are corrected, also after a rejection (update_in_place)
Departures (paper / here / why):
    length of a draft: the released code cuts it to γ / the last phrase is kept whole / it is free
    window after a rejection: not said / the draft's window runs on, with positions that are
        approximate / its tokens are only guesses
    which phrases: not said / the newest K and G / recent text is the likeliest to come again
    size of the pool: not said / 16 phrases a key, more where K or G is more, and 100,000 in all
    sampling: the paper's drafts and phrases are greedy too / phrases are made of the target's
        argmax, which is the likeliest to be drawn
    W and β: W 15 to 20, β 5 to 7 / 2 and 3 / they suit a CPU, where every row of a call costs
Left out: batches.
"""
import itertools
import random
import sys
from typing import Iterator

from common import CachedLM, InputError, Sampler, greedy, trie, walk


# -------------------------------------------------------------------------- the pool of phrases

class PhrasePool:
    """Keeps phrases, which are tuples of tokens, by their first token.

    most     phrases of one first token that are kept; beyond that the oldest of them is dropped
    size     phrases that are kept in all; beyond that the oldest is dropped
    phrases  all phrases, the oldest first; the keys of a dictionary serve as a set with an order
    rests    for each first token the other tokens of its phrases, the oldest first
    """

    def __init__(self, most: int = 16, size: int = 100_000):
        self.most = most
        self.size = size
        self.phrases = {}  # {phrase: None}
        self.rests = {}  # {first token: {the rest of a phrase: None}}

    def add(self, phrase: tuple[int, ...]) -> None:
        """Add a phrase as the newest one, also if it is known already."""
        self.remove(phrase)
        key = phrase[0]
        rests = self.rests.setdefault(key, {})
        rests[phrase[1:]] = None
        self.phrases[phrase] = None
        if len(rests) > self.most:
            oldest = next(iter(rests))
            self.remove((key, *oldest))
        if len(self.phrases) > self.size:
            oldest = next(iter(self.phrases))
            self.remove(oldest)

    def remove(self, phrase: tuple[int, ...]) -> None:
        """Remove a phrase, if the pool has it."""
        if phrase in self.phrases:
            del self.phrases[phrase]
            del self.rests[phrase[0]][phrase[1:]]

    def newest(self, token: int, n: int) -> list[tuple[int, ...]]:
        """List what follows `token` in the n newest phrases that begin with it, newest first."""
        rests = reversed(self.rests.get(token, {}))
        return list(itertools.islice(rests, n))


# ------------------------------------------------------- Section 3.1: drafting phrase by phrase

def add_window(levels: list[list[int]], ids: list[int], parents: list[int]) -> list[int]:
    """Add the lookahead window to a tree whose node 0 is the root.

    levels        the tokens of each level, the top level first; none while the window is off
    ids, parents  the tree's tokens and parents, changed in place
    returns       the nodes of the last level, whose argmaxes are the window's new level

    The root stands for the first token of the first level. The other tokens of the first level are
    a chain below the root. Every token of a later level hangs below the token that stands in its
    column one level up.
    """
    if not levels:
        return []
    nodes = [0]
    for token in levels[0][1:]:
        ids.append(token)
        parents.append(nodes[-1])
        nodes.append(len(ids) - 1)
    for level in levels[1:]:
        above = nodes
        nodes = []
        for token, parent in zip(level, above):
            ids.append(token)
            parents.append(parent)
            nodes.append(len(ids) - 1)
    return nodes


def move_window(levels: list[list[int]], root: int, new: list[int],
                N: int) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Move the lookahead window by one position after a call.

    levels   the tokens of each level in this call
    root     the root of this call, which stood for the first token of the first level
    new      the argmaxes after the last level's tokens
    N        tokens of an n-gram; the grown window has N - 1 levels
    returns  the levels of the next call, and the n-grams that this call completed
    """
    if len(levels) < N - 1:  # still growing: one level more, one column less
        levels = [level[1:] for level in levels]
        return [*levels, new[1:]], []
    first = [root, *levels[0][1:]]
    columns = zip(first, *levels[1:], new)
    return [*levels[1:], new], list(columns)


class Drafter:
    """Decodes greedily with the draft model, several tokens a call: lookahead decoding (Fu et al.,
    arXiv 2402.02057) with the pool's phrases as guesses.

    draft   the draft model
    prompt  the window starts with random tokens of it
    pool    the phrases that are tried, and where the window's phrases go
    W       columns of the window; 0 switches phrases off, so that a call drafts one token
    beta    tokens of a phrase (β); it is the N of lookahead decoding
    G       phrases tried in one call, at most
    seed    of the window's first tokens
    """

    def __init__(self, draft: CachedLM, prompt: list[int], pool: PhrasePool, W: int, beta: int,
                 G: int, seed: int):
        self.draft = draft
        self.pool = pool
        self.beta = beta
        self.G = G
        # levels[l][i] guesses the token at position i + l after the root. That is exact only while
        # every call drafts one token and none is rejected, for the window moves by one position
        self.levels = []
        if W > 0:
            # One level of random tokens, wide enough to lose a column β - 2 times
            first = random.Random(seed).choices(prompt, k=W + beta - 3)
            self.levels = [[prompt[-1], *first]]

    def step(self, unseen: list[int]) -> list[int]:
        """Draft the next tokens in one call of the draft model.

        unseen   the tokens at the end of the text and draft that the draft model has not cached,
                 the root last
        returns  the tokens that follow, 1 or more; all of them but the last are now cached
        """
        root = unseen[-1]
        guesses = []
        if self.levels:
            guesses = [rest[:self.beta - 1] for rest in self.pool.newest(root, self.G)]
        ids, parents, _ = trie(root, guesses)
        size = len(ids)  # nodes of the root and of the guesses; the window's come after them
        last_level = add_window(self.levels, ids, parents)
        # What is unseen before the root is a chain of `base` nodes, and the tree hangs below it
        base = len(unseen) - 1
        chain = list(range(-1, base - 1))
        below = [base + parent for parent in parents]
        logits = self.draft.forward(unseen[:-1] + ids, chain + below)[base:]
        path, tokens = walk(ids[:size], parents[:size], greedy(logits[:size]))
        accepted = [base + node for node in path]
        self.draft.commit([*range(base), *accepted])
        if self.levels:
            new = greedy(logits[last_level])
            self.levels, phrases = move_window(self.levels, root, new, self.beta)
            for phrase in phrases:
                self.pool.add(phrase)
        return tokens


# -------------------------------------------------- Section 3.3: phrases from the verification

def phrases_of(d: list[int], v: list[int], A: int, beta: int) -> list[tuple[int, ...]]:
    """List the phrases that the discarded tokens of a draft make (Fig. 4), by the released code's
    rule.

    d        the draft
    v        the target's choices: v[i] after d[:i], so that d[i] is right if it equals v[i]
    A        accepted tokens of the draft
    beta     tokens of a phrase
    returns  a phrase for each discarded token that begins one of β tokens: first that token, then
             the target's choices, up to the first choice that the draft does not agree with

    For example d = 5 6 7 8 9 and v = 5 1 7 8 2 4: the draft's 5 is accepted, its 7 and 8 agree
    again. With β = 3 the phrases are 6 7 8 and 7 8 2; from 8 on there is 8 2, which is too short.
    """
    found = []
    for i in range(A, len(d)):
        phrase = [d[i]]
        j = i + 1
        while len(phrase) < beta:
            phrase.append(v[j])
            if j == len(d) or d[j] != v[j]:
                break  # v[j + 1] is chosen after another token than v[j]
            j += 1
        if len(phrase) == beta:
            found.append(tuple(phrase))
    return found


def learn(pool: PhrasePool, d: list[int], v: list[int], rests: list[tuple], tried: list[list[int]],
          A: int, beta: int) -> list[tuple[int, ...]]:
    """Put corrected suffixes and phrases of discarded tokens into the pool: Section 3.3.

    d, A     the draft and how many of its tokens were accepted
    v        the target's choice after every node: nodes 0 … γ are the root and d, so that v[i] is
             also the choice after d[:i]; the suffixes' nodes come after those
    rests    the suffixes that were tried, without their first token, which is d's last
    tried    for each of them the nodes of root, d and suffix, as far as it was tried
    returns  the phrases that were put into the pool, the newest last
    """
    key = d[-1]
    for rest in rests:
        pool.remove((key, *rest))
    found = []
    # In reverse, for `rests` has the newest first, and the newest is to stay the newest
    for nodes in reversed(tried):
        # p_1 v_2 … v_β replaces p_1 p_2 … p_β: v_i is the choice after p_(i-1)
        choosing = nodes[len(d):-1]
        found.append((key, *(v[node] for node in choosing)))
    found += phrases_of(d, v, A, beta)
    for phrase in found:
        pool.add(phrase)
    return found


# ------------------------------------------------------------------------------------ the method

def check_options(**options: int) -> None:
    """Raise InputError if a number is too small; beta is 2 or more, all others are 1 or more."""
    for name, value in options.items():
        least = 2 if name == "beta" else 1
        if value < least:
            raise InputError(f"--{name} must be {least} or more, got {value}")


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
    Yields chunks of 1 to gamma + 2 beta - 1 tokens; logs a record a round: {"drafted", "calls" of
    the draft model, "accepted", of suffixes too, "matched" (Eq. 10), "phrases" made by
    verification}. `pool` is changed in place: its phrases, and its `most` where K or G is more.
    """
    check_options(gamma=gamma, W=W, beta=beta, K=K, G=G)
    if pool is None or not history:
        pool = PhrasePool()
    pool.most = max(pool.most, K, G)
    target.start(prompt[:-1])
    draft.start(prompt[:-1])
    drafter = Drafter(draft, prompt, pool, W if phrases else 0, beta, G, sample.seed)
    root = prompt[-1]
    text = list(prompt)
    while True:
        # Section 3.1: draft d_1 … d_γ, or a few more; the draft goes on from what it has cached
        d = []
        calls_before = draft.calls
        while len(d) < gamma:
            unseen = (text + d)[draft.length:]
            d += drafter.step(unseen)
        # Section 3.2, Eq. 7: the K newest phrases that begin with d_γ lengthen the draft
        rests = pool.newest(d[-1], K) if lengthen else []
        lengthened = [d + list(rest[:beta - 1]) for rest in rests]
        ids, parents, paths = trie(root, [d, *lengthened])
        # Eq. 2 and 8: what the target chooses after every node, in one call
        logits = target.forward(ids, parents)  # [nodes, V]
        v = greedy(logits)
        chosen = v if sample.temperature == 0 else sample(logits)
        # Eq. 3 and 9: the longest path that the target chooses
        path, chunk = walk(ids, parents, chosen)
        target.commit(path)
        accepted = len(path) - 1
        text += chunk
        root = chunk[-1]
        # Drop rejected tokens from the draft's cache, which may end before them: it lacks d_γ
        draft.truncate(min(draft.length, len(text) - 1))
        # Section 3.3
        found = []
        if verification:
            found = learn(pool, d, v, rests, paths[1:], accepted, beta)
        if log is not None:
            log.append({"drafted": len(d), "calls": draft.calls - calls_before,
                        "accepted": accepted, "matched": sum(x == y for x, y in zip(d, v)),
                        "phrases": found})
        yield chunk


# ------------------------------------------------------------------------------ the command line

def report(run) -> str:
    """Describe what a round did, and predict the speed-up (Eq. 6) from the costs of this run."""
    target = run.models["target"]
    draft = run.models["draft"]
    rounds = len(run.log)
    drafted, calls, accepted, matched = (sum(r[name] for r in run.log) / rounds
                                         for name in ("drafted", "calls", "accepted", "matched"))
    suffix = sum(max(0, r["accepted"] - r["drafted"]) for r in run.log) / rounds
    cost = (draft.seconds / draft.calls) / (target.seconds / target.calls)
    kept = ""
    if run.options.get("history", True):  # the pool that all prompts of the run shared
        kept = f"; {len(run.options['pool'].phrases)} phrases kept"
    return (f"a round: {drafted:.2f} tokens drafted in {calls:.2f} draft calls, {matched:.2f} are "
            f"the target's choice, {accepted:.2f} accepted, {suffix:.2f} of them from suffixes"
            f"{kept}\npredicted, a draft call costing {cost:.2f} of a target call: speed-up "
            f"{(accepted + 1) / (calls * cost + 1):.2f}x")


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([ouroboros], report, shared={"pool": PhrasePool}, ranges={
        "gamma": (2, 3, 4, 6, 8, 10, 12, 14), "W": (1, 2, 4, 8, 12, 16, 20),
        "beta": (3, 4, 5, 6, 7)}))
