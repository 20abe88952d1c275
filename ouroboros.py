"""Ouroboros: a draft model drafts phrase by phrase, and what verification discards becomes phrases.

Zhao et al., "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster Speculative Decoding",
arXiv 2402.13720

    speed-up = (A(γ + β) + 1) t_target / ((γ / c) t_draft + t_target)                        Eq. 6
    A(γ + β)   the mean number of accepted tokens, of γ drafted ones and a suffix of β after them
               (in Eq. 7 a suffix is β - 1 tokens: the first token of its phrase is left out)
    c          how many tokens one draft call drafts, so that γ tokens take γ / c calls
    t_draft    seconds of a draft call; t_target alike

A phrase is β tokens. The draft makes phrases by lookahead decoding (Fu et al., arXiv 2402.02057):
besides the drafted tokens, each draft call computes a *window* of guesses of later tokens. A round
with γ = 3 and β = 3, where the pool holds the phrases "sat on the", "mat and then" and "mat by me",
and the text ends in "sat":

    draft (3.1)    fed     sat ── on ── the                         one draft call is fed the root,
                   chosen  on     the   mat                         the window and "sat on the". It
                                                                    drafts d: on, the, mat
    lengthen (3.2) fed     sat ── on ── the ── mat ─┬─ and ── then  one target call is fed the root,
                                                    └─ by ─── me    d and both phrases of "mat"
    verify         chosen  on     the   mat    and     slept        the chunk: on, the, mat, and,
                                                       …            slept
    learn (3.3)    mat and then ─> mat and slept                    in the pool the choices replace
                   mat by me    ─> mat and …                        the tokens of both suffixes

The target chose "slept" after "and", so "then" is rejected. It chose "and" after "mat", so "by" is
rejected, and … is what it chose after "by". All of d was accepted. If tokens of d had been
discarded, they could make phrases too. Above temperature 0 phrases have argmaxes, not choices.

There are four mechanisms. Table 4 of the paper shows what each of them brings.
    phrases       Section 3.1: the draft decodes by lookahead, and guesses the phrases it has made
    lengthen      Section 3.2: phrases that begin with the last drafted token lengthen the draft
    verification  Section 3.3: discarded tokens and corrected suffixes become phrases
    pool          Section 3.4: prompts that are given the same pool share their phrases
Without any of them this is speculative decoding with a greedy draft.

The method is lossless. A guess becomes final only if it equals the token that the target chooses at
its position: the argmax, or above temperature 0 the sample of the seed.

Departures:
- Verification. Paper: discarded tokens that match the target's choices make phrases, and Section
  3.3 corrects suffixes after a full acceptance. Here: a phrase may begin with the rejected token,
  and its last token need not match the draft (see `phrases_of`). All suffixes are corrected in
  every round. Why: the loop `ouroboros` of the released code (github.com/thunlp/Ouroboros) makes
  such phrases. After a rejection it corrects no suffix, though it tries to, since the bound of that
  loop is 0.
- Eq. 8. Paper: it is printed for the suffixes 2 … K. Here: all K are verified, as Eq. 9 needs.
- Sampling. Paper: phrases of verification have tokens that are drawn from the target. Here: they
  have its argmaxes. Why: the draft is greedy, and the argmax is the likeliest to be drawn later.
- Shared nodes. Paper: each suffix has a v of its own (Eq. 8). Here: equal beginnings share nodes
  and samples. Why: the best of several samples would not have the target's distribution.
- Sizes. Paper: γ is 7 to 14 where draft and target agree much, and else 2 to 6, W is 15 to 20 and β
  is 5 to 7 (Table 10). There is no number for G, the phrases that a draft call tries. Here: γ is 6,
  W is 2, β is 3 and G is 4. Why: on a CPU each row of a call costs time.
- The window. Paper: nothing is said. Here: it moves on by one position a draft call, as if nothing
  had been rejected. Its columns are in the tree of the draft call, so the draft model may accept
  their tokens, too. Why: it holds only guesses. The released code keeps it after a rejection too
  (continue_ctx).
- Whole phrases. Released code: a draft is cut after γ tokens. Here: all tokens of its last draft
  call stay. Why: the draft model has chosen them already.
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
# This class is copied from jacobi.py. A phrase is an n-gram of β tokens.
class NgramPool:
    """Keep n-grams, which are tuples of tokens, and find the newest ones by their first token.

    ngrams   for each first token its n-grams, the oldest first. They are the keys of a dictionary,
             which serves as a set with an order
    """

    def __init__(self):
        self.ngrams = {}

    def add(self, ngrams: list[tuple[int, ...]]) -> None:
        """Add n-grams, each as the newest one. Some may be known already."""
        for ngram in ngrams:
            self.remove(ngram)
            self.ngrams.setdefault(ngram[0], {})[ngram] = None

    def remove(self, ngram: tuple[int, ...]) -> None:
        """Remove an n-gram if the pool has it."""
        self.ngrams.get(ngram[0], {}).pop(ngram, None)

    def newest(self, token: int, most: int) -> list[tuple[int, ...]]:
        """Return at most `most` n-grams that begin with a token, the newest first."""
        return list(itertools.islice(reversed(self.ngrams.get(token, {})), most))


# ------------------------------------------------------------------------------------ the method
def ouroboros(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6, W: int = 2,
              beta: int = 3, K: int = 3, G: int = 4, phrases: bool = True,
              lengthen: bool = True, verification: bool = True, pool: NgramPool | None = None,
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

    Yields chunks of 1 to gamma + 2 beta - 3 + max(W, 2) tokens. For each round it logs {"guessed",
    "accepted", "calls", "matched", "phrases"}. The first two count guesses and accepted guesses,
    those of suffixes among them. "calls" counts draft calls. "matched" is #Match of Eq. 10 for the
    drafted tokens, and counts argmaxes at every temperature. "phrases" is the list of the phrases
    that verification made.

    Prompts that are given the same `pool` share its phrases (3.4). None: a new pool.
    """
    if min(gamma, W, K, G) < 1 or beta < 2:
        raise InputError("--gamma, --W, --K and --G must be 1 or more and --beta 2 or more, got "
                         f"{gamma=}, {W=}, {K=}, {G=}, {beta=}")
    if pool is None:
        pool = NgramPool()
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
        # draft. The trie is given d first, so node i is the i-th token of d.
        tried = pool.newest(d[-1], K) if lengthen else []
        ids, parents, paths = trie(text[-1], [d, *(d + list(phrase[1:]) for phrase in tried)])
        # Eq. 2 and 8: compute in one call what the target chooses after every node.
        logits = target.forward(ids, parents)  # [nodes, V]
        best = greedy(logits)  # argmaxes: what phrases are made of (Departures, Sampling)
        chosen = sample(logits, target.places)  # v of Eq. 2 and 8; at temperature 0 equal to `best`
        # Eq. 3 and 9: find the longest path that the target chooses, in d and then in one suffix.
        path, chunk = walk(ids, parents, chosen)
        target.commit(path)
        accepted = len(path) - 1
        text += chunk
        # Section 3.3: corrected suffixes replace the phrases that were tried, and discarded tokens
        # become phrases. The next rounds may draft with them.
        found = []
        if verification:
            found = correct_suffixes(d, best, paths[1:]) + phrases_of(d, best, accepted, beta)
            for phrase in tried:
                pool.remove(phrase)
            pool.add(found)
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": accepted,
                        "calls": draft.calls - calls_before,
                        "matched": sum(x == y for x, y in zip(d, best)), "phrases": found})
        yield chunk


# -------------------------------------------------- Section 3.3: phrases from the verification
def correct_suffixes(d: list[int], best: list[int],
                     paths: list[list[int]]) -> list[tuple[int, ...]]:
    """Replace the tokens of suffixes by the target's argmaxes: p_1 … p_β becomes p_1 v_2 … v_β.

    d         the drafted tokens. The last one is p_1, and its node is len(d)
    best      for each node of the tree the target's argmax after it
    paths     for each suffix the nodes of the root, of d and of p_2 … p_β, the newest phrase first
    returns   the corrected phrases, the newest last

    Here v_i is the argmax after p_(i-1). So the argmax after p_β is not needed.
    """
    return [(d[-1], *(best[node] for node in path[len(d):-1])) for path in reversed(paths)]


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
    of these places but the last the target must have agreed with the draft. The target computed
    each argmax after the draft's token. If that token differs from the phrase's, the next argmax
    does not continue the phrase.

        d      5  6  7  8  9         A = 1: the argmax was 1 and not 6
        best   5  1  7  8  2  4      β = 3: the phrases are 6 7 8 and 7 8 2. But 8 2 4 is none,
                                     since 4 was the argmax after 9 and not after 2
    """
    found = []
    for i in range(A, len(d) - beta + 2):
        if d[i + 1:i + beta - 1] == best[i + 1:i + beta - 1]:  # in all places but the last
            found.append((d[i], *best[i + 1:i + beta]))
    return found


# ------------------------------------------------------- Section 3.1: drafting phrase by phrase
class Drafter:
    """Decode greedily with the draft model, several tokens a call.

    This is lookahead decoding (Fu et al., arXiv 2402.02057) with the pool's phrases as guesses.

    draft    the model that drafts
    prompt   the text. The window starts with random tokens of it
    pool     the NgramPool whose phrases are tried. The phrases that the window finds are added
    W        columns of the window. 0 switches phrases off. Then a call drafts one token
    beta     tokens of a phrase (β). It is the N of lookahead decoding
    G        how many phrases are tried in one call, at most
    seed     a number that chooses the window's first tokens
    """

    def __init__(self, draft: CachedLM, prompt: list[int], pool: NgramPool, W: int, beta: int,
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
            self.levels = [[prompt[-1], *random.Random(seed).choices(prompt, k=W + beta - 3)]]

    def step(self, unseen: list[int]) -> list[int]:
        """Draft the next tokens in one call.

        unseen    the newest tokens of text and draft, which the draft model has not cached. The
                  first one is the root of the tree. Guesses and window hang below the last one
        returns   the tokens that follow, 1 or more. All of them but the last are now cached
        """
        last = unseen[-1]
        chain = unseen[1:]
        guesses = []  # if phrases are switched off there is no guess
        columns = []  # and no window
        if self.levels:
            self.levels[0][0] = last
            guesses = [list(phrase[1:]) for phrase in self.pool.newest(last, self.G)]
            columns = columns_of(self.levels)
        # [] puts the chain first, so that its nodes are 0, 1, …
        ids, parents, paths = trie(unseen[0], [chain + x for x in [[], *guesses, *columns]])
        chosen = greedy(self.draft.forward(ids, parents))
        chosen[:len(chain)] = chain  # these tokens are known, whatever the draft model chooses
        path, tokens = walk(ids, parents, chosen)
        self.draft.commit(path)
        if self.levels:
            new = [chosen[nodes[-1]] for nodes in paths[1 + len(guesses):]]
            self.levels, phrases = move_window(self.levels, new, self.beta)
            self.pool.add(phrases)
        return tokens[len(chain):]


# -------------------------------------------------------------------- the window of a draft call
# The next two functions are copied from jacobi.py. The window with W = 2 and β = 3, whose columns
# are "q" and "p r":
#
#     level 0             level 1    new
#     sat ─┬─ p ───────── r ───────> t      The argmaxes complete the phrases "sat q s" and "p r t".
#          └───────────── q ───────> s      The next call has its own root and r in level 0, and s
#                                           and t in level 1.
def columns_of(levels: list[list[int]]) -> list[list[int]]:
    """Return the columns of a lookahead window, each as a path below the root.

    levels    the tokens of each level, level 0 with the root first
    returns   for column i the first i tokens after the root in level 0, then token i of each later
              level
    """
    return [levels[0][1:i + 1] + [level[i] for level in levels[1:]] for i in range(len(levels[0]))]


def move_window(levels: list[list[int]], new: list[int],
                N: int) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Move the lookahead window by one position after a call.

    levels    the tokens of each level in this call, level 0 with the root first
    new       the argmax after each column
    N         tokens of an n-gram. A window that has grown to its size has N - 1 levels
    returns   the levels of the next call, whose root is yet to replace the first token of level 0;
              and the n-grams that this call completed

    A window that still grows completes no n-gram. It gets one level more and has one column less.
    """
    levels = [*levels, new]
    if len(levels) < N:
        return [level[1:] for level in levels], []
    return levels[1:], list(zip(*levels))


# ------------------------------------------------------------------------------ the command line
def predict(accepted: float, calls: float, cost: float) -> float:
    """Compute the speed-up that Eq. 6 predicts.

    accepted   the mean number of accepted tokens of a round, A(γ + β)
    calls      the mean number of draft calls of a round, γ / c
    cost       the time of a draft call divided by that of a target call, t_draft / t_target
    """
    return (accepted + 1) / (calls * cost + 1)


def report(run) -> str:
    """Return lines that say what a round did, and which speed-up Eq. 6 predicts for its costs."""
    target, draft = run.models["target"], run.models["draft"]
    guessed, accepted, calls, matched = (sum(r[name] for r in run.log) / len(run.log)
                                         for name in ("guessed", "accepted", "calls", "matched"))
    cost = (draft.seconds / draft.calls) / (target.seconds / target.calls)
    return (f"a round: {guessed:.2f} guesses, {accepted:.2f} accepted; {calls:.2f} draft calls, of "
            f"whose tokens {matched:.2f} are the target's argmax\npredicted speed-up "
            f"{predict(accepted, calls, cost):.2f}x, a draft call costing {cost:.2f} target calls")


COMMAND_LINE = dict(
    methods=[ouroboros], report=report, shared={"pool": NgramPool},
    ranges={"gamma": (2, 3, 4, 6, 8, 10, 12, 14), "W": (1, 2, 4, 8, 12, 16, 20),
            "beta": (3, 4, 5, 6, 7)})

if __name__ == "__main__":
    sys.exit(main(**COMMAND_LINE))
