"""Ouroboros: a draft model drafts phrase by phrase, and what verification discards becomes phrases.

Zhao et al., "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster Speculative Decoding",
arXiv 2402.13720

    speed-up = (A(γ + β) + 1) t_target / (γ / c · t_draft + t_target)                        Eq. 6
    A(γ + β)   the mean number of accepted tokens, of γ drafted ones and a suffix of β after them
               (in Eq. 7 a suffix is β - 1 tokens: the first token of its phrase is left out)
    c          how many tokens one draft call drafts, so that γ tokens take γ / c calls
    t_draft    seconds of a draft call; t_target alike

A phrase is β tokens. The draft makes phrases by lookahead decoding (Fu et al., arXiv 2402.02057):
besides the drafted tokens, each draft call computes a *window* of guesses of later tokens. A round
with γ = 3 and β = 3, where the pool holds the phrases "sat on the", "mat and then" and "mat by me",
and the text ends in "sat":

    draft (3.1)      sat ── on ── the                          one draft call is fed the root, the
                     on     the   mat                          window and the phrase "sat on the".
                                                               It chooses d: on, the, mat
    lengthen (3.2)   sat ── on ── the ── mat ─┬─ and ── then   one target call is fed the root, d
                                              └─ by ─── me     and both phrases that begin with mat
    verify           on     the   mat    and    slept          the target's choices after sat, on,
                                                               the, mat and "and" are the chunk
    learn (3.3)      mat and then ─> mat and slept             in the pool the target's choices
                     mat by me    ─> mat and …                 replace the tokens of both suffixes

The target chose "slept" after "and", so "then" is rejected. It chose "and" after "mat", so "by" is
rejected, and … is what it chose after "by". All of d was accepted. If tokens of d had been
discarded, they would make phrases too. Above temperature 0 phrases have argmaxes, not choices.

There are four mechanisms. Table 4 of the paper shows what each of them brings.
    phrases       Section 3.1: the draft decodes by lookahead, and guesses the phrases it has made
    lengthen      Section 3.2: phrases that begin with the last drafted token lengthen the draft
    verification  Section 3.3: discarded tokens and corrected suffixes become phrases
    pool          Section 3.4: prompts that are given the same pool share their phrases
Without any of them this is speculative decoding with a greedy draft.

The method is lossless. A guess becomes final only if it equals the token that the target chooses at
its position. The target chooses the argmax, or above temperature 0 one sample after each node.

Departures:
- Verification. Paper: segments of discarded tokens that match the target's choices make phrases,
  and unused suffixes are corrected after a full acceptance. Here: a phrase begins with a discarded
  token, even a wrong one. The target agreed with its middle tokens, and chose its last one. All
  suffixes are corrected in every round. Why: the released code (github.com/thunlp/Ouroboros) makes
  such phrases in add_extra_ngram. It means to correct suffixes after a rejection too, but counts
  lists there instead of tokens, and so corrects none.
- Sampling. Paper: phrases of verification have tokens that are drawn from the target. Here: they
  have its argmaxes. Why: the draft is greedy, and the argmax is the likeliest to be drawn later.
- Shared nodes. Paper: each suffix has a v of its own (Eq. 8). Here: equal beginnings share nodes
  and samples. Why: the best of several samples would not have the target's distribution.
- Sizes. Paper: γ is 2 to 6 or 7 to 14, W is 15 to 20 and β is 5 to 7 (Table 10). There is no number
  for G, the phrases that a draft call tries. Here: γ is 6, W is 2, β is 3 and G is 4. Why: on a CPU
  each row of a call costs time.
- The window after a rejection. Paper: nothing is said. Here: the draft's window moves on by one
  position a draft call, as if nothing had been rejected. Why: it holds only guesses, and the
  released code keeps it too (continue_ctx).
- Whole phrases. Released code: a draft is cut after γ tokens. Here: its last phrase stays whole.
  Why: the draft model has chosen these tokens already.
- The pool. Released code: at most guess_set_size phrases begin with one token, and they are tried
  once the window is full. Here: the pool keeps all, and a draft call tries the G newest, from the
  first call on. Why: G bounds what a call costs, and a shared pool has phrases from the start.
- Suffixes. Paper: it is not said which phrases are the K. Here: the newest. Why: the released code
  takes these too.
"""
import itertools
import random
import sys
from typing import Iterator

from common import CachedLM, InputError, Sampler, begin, greedy, main, trie, walk


# -------------------------------------------------------------------------- the pool of phrases
class PhrasePool:
    """Keep phrases, which are tuples of tokens, and find the newest ones by their first token.

    phrases   for each first token its phrases, the oldest first. They are the keys of a dictionary,
              which serves as a set with an order
    """

    def __init__(self):
        self.phrases = {}

    def add(self, phrase: tuple[int, ...]) -> None:
        """Add a phrase as the newest one. It may be known already."""
        self.remove(phrase)
        self.phrases.setdefault(phrase[0], {})[phrase] = None

    def remove(self, phrase: tuple[int, ...]) -> None:
        """Remove a phrase if the pool has it."""
        self.phrases.get(phrase[0], {}).pop(phrase, None)

    def newest(self, token: int, n: int) -> list[tuple[int, ...]]:
        """Return at most n phrases that begin with a token, the newest first."""
        return list(itertools.islice(reversed(self.phrases.get(token, {})), n))


# ------------------------------------------------------------------------------------ the method
def ouroboros(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6, W: int = 2,
              beta: int = 3, K: int = 3, G: int = 4, phrases: bool = True,
              lengthen: bool = True, verification: bool = True, pool: PhrasePool | None = None,
              sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Draft at least gamma tokens phrase by phrase. Verify the drafted tokens, and the phrases that
    may follow them as suffixes, in one target call.

    gamma:   the least number of tokens drafted a round (γ), 1 or more
    W:       columns of the draft's lookahead window, 1 or more
    beta:    tokens of a phrase (β), 2 or more
    K:       the most phrases tried as suffixes of a draft, 1 or more
    G:       the most phrases tried in one draft call, 1 or more
    phrases: draft by lookahead, with phrases (Section 3.1). Without it draft token by token
    lengthen: lengthen the draft by phrases that begin with its last token (3.2)
    verification: make phrases of what the target discards (3.3)

    Yields chunks of 1 to gamma + 2 beta - 1 tokens. For each round it logs {"drafted", "calls",
    "accepted", "matched", "phrases"}. "drafted" and "calls" count drafted tokens and draft calls.
    "accepted" counts accepted tokens, those of a suffix too. "matched" is #Match of Eq. 10 for the
    drafted tokens, and counts argmaxes at every temperature. "phrases" is the list of the phrases
    that verification made.

    Prompts that are given the same `pool` share its phrases (3.4). None: a new pool.
    """
    if beta < 2:
        raise InputError(f"--beta must be 2 or more, got {beta}")
    if pool is None:
        pool = PhrasePool()
    text = begin(prompt, target, draft)
    drafter = Drafter(draft, text, pool, W if phrases else 0, beta, G, sample.seed)
    while True:
        # The draft forgets rejected tokens, so it has cached at most the text without the root. If
        # all of d was accepted it has cached less, and the next draft call is fed the rest.
        draft.truncate(min(draft.length, len(text) - 1))
        # Section 3.1: draft d_1 … d_γ, and a few tokens more if the last phrase is longer. Each
        # call is fed the tokens that the draft model has not cached yet.
        d = []
        calls_before = draft.calls
        while len(d) < gamma:
            d += drafter.step((text + d)[draft.length:])
        # Section 3.2, Eq. 7: the K newest phrases that begin with the last token of d lengthen the
        # draft. The trie is given d first, which `learn` relies on.
        tried = pool.newest(d[-1], K) if lengthen else []
        lengthened = [d + list(phrase[1:]) for phrase in tried]
        ids, parents, paths = trie(text[-1], [d, *lengthened])
        # Eq. 2 and 8: compute in one call what the target chooses after every node.
        logits = target.forward(ids, parents)  # [nodes, V]
        best = greedy(logits)  # argmaxes, for the phrases of verification (Departures, Sampling)
        chosen = sample(logits)  # v of Eq. 2 and 8. At temperature 0 it equals `best`
        # Eq. 3 and 9: find the longest path that the target chooses, in d and then in one suffix.
        path, chunk = walk(ids, parents, chosen)
        target.commit(path)
        accepted = len(path) - 1
        text += chunk
        # Section 3.3: discarded tokens become phrases, which the next rounds may draft with.
        found = learn(pool, d, best, tried, paths[1:], accepted, beta) if verification else []
        if log is not None:
            log.append({"drafted": len(d), "calls": draft.calls - calls_before,
                        "accepted": accepted, "matched": sum(x == y for x, y in zip(d, best)),
                        "phrases": found})
        yield chunk


# -------------------------------------------------- Section 3.3: phrases from the verification
def learn(pool: PhrasePool, d: list[int], best: list[int], tried: list[tuple[int, ...]],
          paths: list[list[int]], A: int, beta: int) -> list[tuple[int, ...]]:
    """Put corrected suffixes and phrases of discarded tokens into the pool (Section 3.3).

    pool      the PhrasePool, changed in place
    d         the drafted tokens
    best      for each node of the tree the target's argmax after it
    tried     the phrases that were tried as suffixes, the newest first
    paths     for each of these phrases the nodes of the root, of d and of the suffix
    A         how many tokens were accepted. Those of a suffix count too
    beta      tokens of a phrase (β)
    returns   the phrases that were put into the pool, the newest last

    Node 0 is the root, and node i is the i-th token of d, since the tree was built with d first. So
    for i up to len(d), best[i] is the argmax after d[:i].
    """
    for phrase in tried:
        pool.remove(phrase)
    found = []
    # `paths` begins with the newest phrase. The reverse order keeps that phrase the newest.
    for nodes in reversed(paths):
        # The phrase p_1 … p_β becomes p_1 and the argmaxes after p_1 … p_(β-1). Node len(d) is p_1.
        # The argmax after p_β, the last node, is not needed.
        choosing = nodes[len(d):-1]
        found.append((d[-1], *(best[node] for node in choosing)))
    found += phrases_of(d, best, A, beta)
    for phrase in found:
        pool.add(phrase)
    return found


def phrases_of(d: list[int], best: list[int], A: int, beta: int) -> list[tuple[int, ...]]:
    """List the phrases that the discarded tokens of a draft make (Fig. 4).

    d         the drafted tokens
    best      best[i] is the target's argmax after d[:i], so that d[i] is right if it equals
              best[i]. What comes after best[len(d)] is not read
    A         how many tokens were accepted, those of a suffix too. With len(d) or more accepted
              tokens no token of d was discarded
    beta      tokens of a phrase
    returns   the phrases, each a tuple of β tokens

    A phrase is a discarded token d[i] and the target's argmaxes for the next β - 1 places. In all
    of these places but the last the target must have agreed with the draft. If it did not, its next
    argmax came after a drafted token that is not in the phrase.

        d      5  6  7  8  9         A = 1: the argmax was 1 and not 6
        best   5  1  7  8  2  4      β = 3: the phrases are 6 7 8 and 7 8 2. But 8 2 4 is none,
                                     since 4 was the argmax after 9 and not after 2
    """
    found = []
    for i in range(A, len(d) - beta + 2):
        agreed = d[i + 1:i + beta - 1] == best[i + 1:i + beta - 1]  # in all places but the last
        if agreed:
            found.append((d[i], *best[i + 1:i + beta]))
    return found


# ------------------------------------------------------- Section 3.1: drafting phrase by phrase
class Drafter:
    """Decode greedily with the draft model, several tokens a call.

    This is lookahead decoding (Fu et al., arXiv 2402.02057) with the pool's phrases as guesses.

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
        # levels[l][i] guesses the token about i + l positions after the root. This is inexact,
        # since the window moves by one position a call, whatever is drafted or rejected.
        self.levels = []
        if W > 0:
            # The window starts as one level of W + β - 2 tokens, the root and random ones. It loses
            # a column each time that it gets a level, which happens β - 2 times.
            first = random.Random(seed).choices(prompt, k=W + beta - 3)
            self.levels = [[prompt[-1], *first]]

    def step(self, unseen: list[int]) -> list[int]:
        """Draft the next tokens in one call.

        unseen    the newest tokens of text and draft, which the draft model has not cached. The
                  last one is the root of the tree
        returns   the tokens that follow, 1 or more. All of them but the last are now cached
        """
        *chain, root = unseen
        guesses = []  # if phrases are switched off there is neither a guess nor a window
        if self.levels:
            guesses = [phrase[1:] for phrase in self.pool.newest(root, self.G)]
        ids, parents, _ = trie(root, guesses)
        size = len(ids)  # the root and the guesses. Later nodes are the window's, never accepted
        last_level = add_window(self.levels, ids, parents) if self.levels else []
        # The chain is put above the tree, so that one call is fed both.
        logits = self.draft.forward(*hang(chain, ids, parents))[len(chain):]
        chosen = greedy(logits)
        path, tokens = walk(ids[:size], parents[:size], chosen)
        self.draft.commit([*range(len(chain)), *(len(chain) + node for node in path)])
        if self.levels:
            new = [chosen[node] for node in last_level]
            self.levels, phrases = move_window(self.levels, root, new, self.beta)
            for phrase in phrases:
                self.pool.add(phrase)
        return tokens


# ------------------------------------- the tree of a draft call: the window, and unseen tokens
# The next two functions are copied from jacobi.py. The window with W = 2 and β = 3:
#
#     level 0     sat ── p     Level 0 is a chain below the root. Level 1 hangs below it, column by
#                  │     │     column. The argmaxes complete the phrases "sat q s" and "p r t".
#     level 1      q     r     The next call has its own root and r in level 0, s and t in level 1.
#                  │     │
#     argmaxes     s     t
def add_window(levels: list[list[int]], ids: list[int], parents: list[int]) -> list[int]:
    """Add the lookahead window to a tree whose node 0 is the root.

    levels    the tokens of each level, level 0 first
    ids       the tree's tokens, changed in place
    parents   the tree's parents, changed in place
    returns   the nodes of the last level. The argmaxes after these nodes are the window's new level

    The root stands for the first token of level 0, so `levels[0][0]` is not read. The other tokens
    of level 0 are a chain below the root. Every token of a later level hangs below the token that
    stands in the same column one level up.
    """
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


def hang(chain: list[int], ids: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """Put a chain of uncached tokens above a tree, so that one call feeds both.

    A draft model needs that if its cache ends before the context does.

    Here "the" and "cat" are such a chain, and "sat" is the root of a tree of three nodes:

                                the cat sat  on   in
        node of the tree                 0    1    2
        parents of the tree             -1    0    0
        node of the whole         0   1   2    3    4        node i of the tree is len(chain) + i
        parents of the whole     -1   0   1    2    2

    chain     the tokens before the root, perhaps none
    ids       the tokens of the tree
    parents   the parents of the tree
    returns   ids and parents of the chain with the tree below it
    """
    return chain + ids, [*range(-1, len(chain) - 1), *(len(chain) + p for p in parents)]


# ------------------------------------------------------------------------------ the command line
def report(run) -> str:
    """Return lines that say what a round did, and which speed-up Eq. 6 predicts for its costs."""
    target, draft = run.models["target"], run.models["draft"]
    drafted, calls, accepted, matched = (sum(r[name] for r in run.log) / len(run.log)
                                         for name in ("drafted", "calls", "accepted", "matched"))
    cost = (draft.seconds / draft.calls) / (target.seconds / target.calls)
    return (f"a round: {drafted:.2f} tokens drafted in {calls:.2f} draft calls, {matched:.2f} are "
            f"the target's argmax, {accepted:.2f} accepted, those of suffixes too\npredicted "
            f"speed-up {(accepted + 1) / (calls * cost + 1):.2f}x, if a draft call costs "
            f"{cost:.2f} of a target call")


COMMAND_LINE = dict(
    methods=[ouroboros], report=report, shared={"pool": PhrasePool},
    ranges={"gamma": (2, 3, 4, 6, 8, 10, 12, 14), "W": (1, 2, 4, 8, 12, 16, 20),
            "beta": (3, 4, 5, 6, 7)})

if __name__ == "__main__":
    sys.exit(main(**COMMAND_LINE))
