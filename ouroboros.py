"""Ouroboros: a draft model drafts phrase by phrase, and what verification discards becomes phrases.

Zhao et al., "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster Speculative Decoding",
arXiv 2402.13720

    speed-up = (A(γ + β) + 1) t_target / (γ / c · t_draft + t_target)                        Eq. 6
    A(γ + β)   how many tokens of a draft of γ + β tokens are accepted
    c          how many tokens one draft call drafts, so that γ tokens take γ / c calls
    t_draft    seconds of a draft call; t_target alike

A phrase is β tokens, and its first token is its key. A round with γ = 3 and β = 3, where the pool
holds the phrases "sat on the", "mat and then" and "mat by me", and the text ends in "sat":

    draft (3.1)      sat ── on ── the                          one draft call is fed the root and
                     on     the   mat                          the phrase "sat on the". It chooses
                                                               these tokens: d is on, the, mat
    lengthen (3.2)   sat ── on ── the ── mat ─┬─ and ── then   one target call is fed the root, d
                                              └─ by ─── me     and both phrases that begin with mat
    verify           on     the   mat    and    slept          the target chooses these tokens after
                                                               sat, on, the, mat, and: the chunk
    learn (3.3)      mat and then ─> mat and slept             in the pool the target's choices
                     mat by me    ─> mat and …                 replace the tokens of both suffixes

The target chose "slept" after "and", so "then" is rejected. It chose "and" after "mat", so "by" is
rejected too, and … stands for what it chose after "by". No token of d was discarded, else phrases
would be made of the discarded tokens as well.

Four mechanisms, each with a switch (Table 4 is their ablation):
    phrases       Section 3.1: the draft decodes by lookahead, with phrases as guesses
    lengthen      Section 3.2: phrases that begin with the last drafted token hang below it, and the
                  target verifies them too
    verification  Section 3.3: discarded tokens and corrected suffixes become phrases
    history       Section 3.4: phrases outlive the prompt that they come from
Without any of them this is speculative decoding with a greedy draft.

The method is lossless. A guess becomes final only where it equals the token that the target chooses
in its place. The target chooses the argmax, or at a temperature one sample after each node.

Departures (paper / here / why):
    phrases of a discarded draft: the segments of it that match the target's choices / every
        discarded token, the rejected one too, begins a phrase, which goes on with the target's
        choices / this is the rule of the released code (github.com/thunlp/Ouroboros,
        add_extra_ngram)
    corrected suffixes: the unused ones, after a full acceptance / all that were tried, after a
        rejection too / this is the rule of the released code (update_in_place)
    length of a draft: the released code cuts it to γ / the last phrase is kept whole / its tokens
        are guessed already, and may be right
    window after a rejection: not said / the draft's window moves on as if nothing had happened /
        its tokens are only guesses, and the released code does the same (continue_ctx)
    which phrases: not said / the newest K as suffixes, as in the released code, and the newest G in
        a draft call / recent text is the likeliest to come again
    size of the pool: not said / 16 phrases a key, or K or G where that is more, and 100,000 in all
        / so the memory that it takes is bounded
    sampling: v_i is drawn from the target (Eq. 2) / what is verified is drawn, but phrases and
        #Match are made of the target's argmaxes / the draft is greedy, and the argmax is the
        likeliest to be drawn later
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
    """Keep phrases, which are tuples of tokens, and find them by their first token.

    most      how many phrases with the same first token are kept
    size      how many phrases are kept in all
    phrases   all phrases. The oldest comes first
    rests     for each first token the rests of its phrases. The oldest comes first. The rest of a
              phrase is its tokens without the first one

    Where there would be more phrases than `most` or `size` allows, the oldest of them is dropped.
    The keys of a dictionary serve as a set with an order.
    """

    def __init__(self, most: int = 16, size: int = 100_000):
        self.most = most
        self.size = size
        self.phrases = {}  # the keys are phrases
        self.rests = {}  # first token: a dictionary whose keys are rests

    def add(self, phrase: tuple[int, ...]) -> None:
        """Add a phrase, a tuple of tokens, as the newest one. It may be known already."""
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
        """Remove a phrase, a tuple of tokens, if the pool has it."""
        if phrase in self.phrases:
            del self.phrases[phrase]
            del self.rests[phrase[0]][phrase[1:]]

    def newest(self, token: int, n: int) -> list[tuple[int, ...]]:
        """Find the n newest phrases that begin with a token.

        token     the first token of the phrases
        n         how many phrases are wanted at most
        returns   the rests of these phrases, the newest first
        """
        rests = reversed(self.rests.get(token, {}))
        return list(itertools.islice(rests, n))


# ------------------------------------------------------- Section 3.1: drafting phrase by phrase

def add_window(levels: list[list[int]], ids: list[int], parents: list[int]) -> list[int]:
    """Add the lookahead window to a tree whose node 0 is the root.

    levels    the tokens of each level, level 0 first. An empty list adds nothing
    ids       the tree's tokens, changed in place
    parents   the tree's parents, changed in place
    returns   the nodes of the last level. The argmaxes after these nodes are the window's new level

    The root stands for the first token of level 0, so `levels[0][0]` is not read. The other tokens
    of level 0 are a chain below the root. Every token of a later level hangs below the token that
    stands in the same column one level up.
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

    levels    the tokens of each level in this call. Level 0 comes first
    root      the root of this call. It stood for the first token of level 0
    new       the argmaxes after the last level's tokens
    N         tokens of an n-gram. A window that has grown to its size has N - 1 levels
    returns   the levels of the next call, and the n-grams that this call completed

    A window that still grows completes no n-gram. It gets one level more and has one column less.
    """
    if len(levels) < N - 1:
        levels = [level[1:] for level in levels]
        return [*levels, new[1:]], []
    first = [root, *levels[0][1:]]
    columns = zip(first, *levels[1:], new)
    return [*levels[1:], new], list(columns)


class Drafter:
    """Decode greedily with the draft model, several tokens a call.

    This is lookahead decoding (Fu et al., arXiv 2402.02057) with the pool's phrases as guesses.
    jacobi.py has a picture of the window.

    draft    the model that drafts
    prompt   the text. The window starts with random tokens of it
    pool     the PhrasePool whose phrases are tried. The phrases that the window finds are added
    W        columns of the window. 0 switches phrases off. Then a call drafts one token
    beta     tokens of a phrase (β). It is the N of lookahead decoding
    G        how many phrases are tried in one call, at most
    seed     a number that chooses the window's first tokens
    """

    def __init__(self, draft: CachedLM, prompt: list[int], pool: PhrasePool, W: int, beta: int,
                 G: int, seed: int):
        self.draft = draft
        self.pool = pool
        self.beta = beta
        self.G = G
        # levels[l][i] guesses the token i + l positions after the root. The window always moves by
        # one position. So its positions are only roughly right once a call has drafted several
        # tokens, or once the target has rejected some.
        self.levels = []
        if W > 0:
            # The window starts as one level of W + β - 2 tokens, the root and random ones. It loses
            # a column each time that it gets a level, which happens β - 2 times.
            first = random.Random(seed).choices(prompt, k=W + beta - 3)
            self.levels = [[prompt[-1], *first]]

    def step(self, unseen: list[int]) -> list[int]:
        """Draft the next tokens in one call.

        unseen    the last tokens of what there is, the text and behind it what this round has
                  drafted. The draft model has not cached them. The last one is the root of the tree
        returns   the tokens that follow, 1 or more. All of them but the last are now cached
        """
        root = unseen[-1]
        guesses = []
        if self.levels:
            # A pool that the caller gave may hold longer phrases, of another β
            guesses = [rest[:self.beta - 1] for rest in self.pool.newest(root, self.G)]
        ids, parents, _ = trie(root, guesses)
        size = len(ids)  # how many nodes the root and the guesses are. The window comes after them
        last_level = add_window(self.levels, ids, parents)
        # The unseen tokens before the root are a chain of `base` nodes. The tree hangs below this
        # chain, so node i of the tree is pending node base + i.
        base = len(unseen) - 1
        chain = list(range(-1, base - 1))
        below = [base + parent for parent in parents]
        logits = self.draft.forward(unseen[:-1] + ids, chain + below)[base:]
        # Only these rows are read. All of them are read at once, since a GPU makes Python wait.
        chosen = greedy(logits[[*range(size), *last_level]])
        path, tokens = walk(ids[:size], parents[:size], chosen[:size])
        accepted = [base + node for node in path]
        self.draft.commit([*range(base), *accepted])
        if self.levels:
            self.levels, phrases = move_window(self.levels, root, chosen[size:], self.beta)
            for phrase in phrases:
                self.pool.add(phrase)
        return tokens


# -------------------------------------------------- Section 3.3: phrases from the verification

def phrases_of(d: list[int], v: list[int], A: int, beta: int) -> list[tuple[int, ...]]:
    """List the phrases that the discarded tokens of a draft make (Fig. 4), by the released code's
    rule.

    d         the drafted tokens
    v         v[i] is the target's choice after d[:i], so that d[i] is right if it equals v[i].
              Entries behind v[len(d)] are not read
    A         how many of the drafted tokens were accepted
    beta      tokens of a phrase
    returns   the phrases, each a tuple of β tokens

    A phrase begins with a discarded token. The target's choices for the next places follow. The
    first choice that differs from the drafted token ends the phrase, since the next choice was made
    after the drafted token. A phrase of fewer than β tokens is dropped.

        d   5  6  7  8  9         A = 1: the target chose 1 in place of 6
        v   5  1  7  8  2  4      β = 3: the phrases are 6 7 8 and 7 8 2. After 8 the target chose 2
                                  and not 9, so 8 2 is too short. So is 9 4, where d ends
    """
    found = []
    for i in range(A, len(d)):
        phrase = [d[i]]
        j = i + 1
        while len(phrase) < beta:
            phrase.append(v[j])
            if j == len(d) or d[j] != v[j]:
                break  # v[j + 1] was chosen after d[j] and not after v[j], or does not exist
            j += 1
        if len(phrase) == beta:
            found.append(tuple(phrase))
    return found


def learn(pool: PhrasePool, d: list[int], v: list[int], rests: list[tuple], tried: list[list[int]],
          A: int, beta: int) -> list[tuple[int, ...]]:
    """Put corrected suffixes and phrases of discarded tokens into the pool (Section 3.3).

    pool      the PhrasePool, changed in place
    d         the drafted tokens
    v         for each node of the tree the target's argmax after it
    rests     the rests of the phrases that were tried as suffixes. Each of these phrases begins
              with the last token of d. The newest phrase comes first
    tried     for each of `rests` a path. It has the nodes of the root, of d and of the suffix
    A         how many tokens were accepted. Those of a suffix count too
    beta      tokens of a phrase
    returns   the phrases that were put into the pool, the newest last

    Node 0 is the root, and node i is the i-th token of d, since the tree was built with d first. So
    v[i] is the choice after node i, and for i up to len(d) it is also the choice after d[:i].
    """
    # The phrases as they were tried leave the pool.
    key = d[-1]
    for rest in rests:
        pool.remove((key, *rest))
    found = []
    # `rests` has the newest phrase first. The reverse order keeps that phrase the newest.
    for nodes in reversed(tried):
        # The phrase p_1 p_2 … p_β becomes p_1 v_2 … v_β, where v_i is the target's choice after
        # p_(i-1). Node len(d) is p_1, and nothing is chosen after p_β, the last node.
        choosing = nodes[len(d):-1]
        found.append((key, *(v[node] for node in choosing)))
    found += phrases_of(d, v, A, beta)
    for phrase in found:
        pool.add(phrase)
    return found


# ------------------------------------------------------------------------------------ the method

def check_options(**options: int) -> None:
    """Raise InputError if a number is too small.

    options   numbers by the names of their options. beta must be 2 or more, all others 1 or more
    """
    for name, value in options.items():
        least = 2 if name == "beta" else 1
        if value < least:
            raise InputError(f"--{name} must be {least} or more, got {value}")


def ouroboros(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6, W: int = 2,
              beta: int = 3, K: int = 3, G: int = 4, phrases: bool = True,
              lengthen: bool = True, verification: bool = True, history: bool = True,
              pool: PhrasePool | None = None, sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Draft at least gamma tokens phrase by phrase. Verify the drafted tokens, and the phrases that
    may follow them as suffixes, in one target call.

    gamma:   tokens drafted a round, at least (γ)
    W:       columns of the draft's lookahead window
    beta:    tokens of a phrase (β), 2 or more. The first one is its key
    K:       phrases tried as suffixes of a draft, at most
    G:       phrases tried in one draft call, at most
    phrases: draft by lookahead, with phrases (Section 3.1). Without it draft token by token
    lengthen: hang phrases below the last drafted token (3.2)
    verification: make phrases of what the target discards (3.3)
    history: keep the phrases of earlier prompts (3.4)

    Yields chunks of 1 to gamma + 2 beta - 1 tokens; logs {"drafted", "calls", "accepted",
    "matched", "phrases"} a round. The first three are numbers of drafted tokens, of draft calls and
    of accepted tokens, those of a suffix included. Then come #Match of Eq. 10 and the list of the
    phrases that verification made.

    The PhrasePool `pool` is changed in place. Its `most` rises to K or G where one of them is more.
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
        # Section 3.1: draft d_1 … d_γ, and a few tokens more where the last phrase is longer. Each
        # call is fed the tokens that the draft model has not cached yet.
        d = []
        calls_before = draft.calls
        while len(d) < gamma:
            unseen = (text + d)[draft.length:]
            d += drafter.step(unseen)
        # Section 3.2, Eq. 7: the K newest phrases that begin with d_γ lengthen the draft. The trie
        # is given d first, which `learn` relies on.
        rests = pool.newest(d[-1], K) if lengthen else []
        lengthened = [d + list(rest[:beta - 1]) for rest in rests]
        ids, parents, paths = trie(root, [d, *lengthened])
        # Eq. 2 and 8: compute in one call what the target chooses after every node
        logits = target.forward(ids, parents)  # [nodes, V]
        v = greedy(logits)
        chosen = v if sample.temperature == 0 else sample(logits)
        # Eq. 3 and 9: find the longest path that the target chooses, through d and at most one
        # suffix
        path, chunk = walk(ids, parents, chosen)
        target.commit(path)
        accepted = len(path) - 1
        text += chunk
        root = chunk[-1]
        # Drop rejected tokens from the draft model's cache. Where all of d was accepted nothing is
        # dropped. Then the cache is shorter than the text, since d_γ and a suffix are not in it.
        draft.truncate(min(draft.length, len(text) - 1))
        # Section 3.3: discarded tokens become phrases, which the next rounds may draft with
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
    """Return lines that say what a round did, and which speed-up Eq. 6 predicts for its costs.

    run   a run of the command line
    """
    target = run.models["target"]
    draft = run.models["draft"]
    rounds = len(run.log)
    drafted, calls, accepted, matched = (sum(r[name] for r in run.log) / rounds
                                         for name in ("drafted", "calls", "accepted", "matched"))
    suffix = sum(max(0, r["accepted"] - r["drafted"]) for r in run.log) / rounds
    cost = (draft.seconds / draft.calls) / (target.seconds / target.calls)
    kept = ""
    if run.options.get("history", True):  # then all prompts of the run shared one pool
        kept = f"; {len(run.options['pool'].phrases)} phrases kept"
    return (f"a round: {drafted:.2f} tokens drafted in {calls:.2f} draft calls, {matched:.2f} are "
            f"the target's choice, {accepted:.2f} accepted, {suffix:.2f} of them from suffixes"
            f"{kept}\npredicted, a draft call costing {cost:.2f} of a target call: speed-up "
            f"{(accepted + 1) / (calls * cost + 1):.2f}x")


if __name__ == "__main__":
    from cli.main import main  # the command line is in cli/, a folder of this project
    sys.exit(main([ouroboros], report, shared={"pool": PhrasePool}, ranges={
        "gamma": (2, 3, 4, 6, 8, 10, 12, 14), "W": (1, 2, 4, 8, 12, 16, 20),
        "beta": (3, 4, 5, 6, 7)}))
