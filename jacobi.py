"""Jacobi decoding, lookahead decoding and prompt lookup: guesses without a second model.

jacobi          y_i <- argmax p(. | y_<i, x) for all i of a block at once, until all are final.
                Santilli et al., "Accelerating Transformer Inference for Translation via Parallel
                Decoding", arXiv 2305.10427; with the KV cache as in Kou et al., "CLLMs: Consistency
                Large Language Models", arXiv 2403.00835, Alg. 3
lookahead       A window of W columns of guesses stands ahead of the text. Each call runs one Jacobi
                iteration on it, which adds a token to every column. One token of each level and the
                new one make an n-gram. When its first token is the root, the others are guessed. Fu
                et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
                arXiv 2402.02057
prompt_lookup   Tokens that followed an earlier copy of the text's last token become guesses.
                Saxena, "Prompt Lookup Decoding", 2023, which is a repository without a paper

All are lossless. A guess becomes final only if it is the token that the target chooses there. This
is the argmax or, above temperature 0, the sample of the seed, which no guess changes.

A block of Jacobi decoding with n = 5, where the text ends in "sat". A call is fed the last final
token and all guesses, and gives the argmax after each of them. Tokens left of the bar are final:

    position      0     1      2      3      4      5
    y(0)         sat │ the    cat    sat    the            the root and random tokens of the prompt
    call 1             on     cat    sat    on     mat     after "sat" comes "on" and not "the"
    y(1)         sat   on  │  cat    sat    on
    call 2                    the    mat    on     the     after "on" comes "the" and not "cat"
    y(2)         sat   on     the  │ mat    on
    call 3                           mat    and    the     the guess "mat" was right, so that its
    y(3)         sat   on     the    mat    and  │         argmax "and" is final as well

Call 2 guessed "mat" in the right place, although the "cat" before it was wrong. So three calls
make four tokens final. The last of them, "and", is the next root. If the guess at position 4 had
also been right, the argmax at position 5 would be final, and would be the next root.

The lookahead window with W = 3 columns and N = 4 has N - 1 = 3 levels. Column i is a path below the
root: i tokens of level 0, then one token of each later level. The letters a, b and c are the levels
0, 1 and 2. A number says how many positions after the root the token would stand:

    level 0                   level 1    level 2    new
    root ─┬─ a1 ─┬─ a2 ────── b3 ─────── c4 ──────> d5      column 2
          │      └─────────── b2 ─────── c3 ──────> d4      column 1
          └────────────────── b1 ─────── c2 ──────> d3      column 0

All columns and the guesses of the pool make one trie, which a call is fed. The argmax (─>) after
each column is its new token. One token of each level and the new one make an n-gram. In column 2 it
is a2 b3 c4 d5, in column 1 a1 b2 c3 d4, and in column 0 root b1 c2 d3. Then level 0 is dropped, and
the next root takes the place of b1. At first the window is one level of W + N - 2 = 5 tokens. While
it grows, each call adds a level and drops a column.

Departures:
- Jacobi, blocks. CLLM: a block is n new tokens, and ends when a call changes nothing (Section 3.1).
  Alg. 3 as printed never ends, since its i* keeps n_t below n. Here: a block is the root and n - 1
  random tokens of the prompt. It ends when its last token is final, and adds n - 1 or n tokens.
  Why: our prefill gives no logits, so y_0 would cost a call, as would confirming the end.
- Jacobi, first guesses. CLLM: they come from x, which grows with the answer. Santilli's code begins
  with padding. Here: they come from the prompt. Why: the loop need not keep the text.
- Jacobi, sampling. CLLM and Santilli are greedy. Here: above temperature 0 too.
- Lookahead, sampling. Fu: Alg. 4 tries the guesses of a position one after the other, without a
  tree. Here: n-grams with equal beginnings share nodes, and one sample after each node is compared
  with the guesses. Why: the distribution is the same, with fewer rows, and each node needs one
  draw.
- Lookahead, one tree. Fu: only the n-grams of the pool are verified, in rows apart from the
  window's. Here: the window is verified too. Why: one trie is simpler, and rows that window and
  n-grams share are computed once.
- Lookahead, the window. Released code, when sampling: it may move by all tokens that a call adds
  (ALWAYS_FWD_ONE = 0), and random tokens of the prompt replace an EOS in the newest level. Here: it
  moves by one position a call, and an EOS stays. So after j accepted guesses each token of the
  window stands j positions later than the one it was computed for. Why: n-grams are only guesses.
- Lookahead, the pool. Released code: it has the window's n-grams, and the text's only with
  POOL_FROM_PROMPT. It holds at most GUESS_SET_SIZE n-grams of a first token, and is read once the
  window is full. Here: it has both unless `prompt_ngrams` is off, holds all of them, and is read
  from the first call. An n-gram that comes again counts as the newest. Why: answers repeat the
  text, and G bounds what a call costs.
- Prompt lookup. Saxena: a guess has 10 tokens, those after the first match of the last 3 tokens, or
  else of 2 or 1. Here: N - 1 tokens after each of the G newest different matches of the last token
  that N - 1 tokens follow. Why: one pool serves both methods.

Left out: lookahead on several GPUs, and Santilli's PJ and HGJ. PJ runs Jacobi iteration over the
whole answer. HGJ goes on token by token after a given length. `jacobi` is Santilli's PGJ.
"""
import itertools
import random
import sys
from typing import Iterator

from common import CachedLM, InputError, Sampler, begin, greedy, main, trie, walk


# ------------------------------------------------------------------------ the pool of n-grams
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


# -------------------------------------------------------------------------------- the methods
def jacobi(target: CachedLM, prompt: list[int], *, n: int = 16, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Guess the n - 1 tokens that follow the root in a block, and recompute in each call all
    guesses that are not final yet. The block ends when all are final. CLLM, Alg. 3 and Eq. 3.

    n: tokens of a block, its root included, 2 or more

    Yields chunks of 1 to n tokens. For each block it logs {"states", "final"}, lists that each call
    extends. The state y(j) of the Jacobi trajectory is states[j], n tokens with the root first. Its
    leading final[j] tokens are final. The last entry of `final` is n + 1 if the token after the
    block is final too.
    """
    if n < 2:
        raise InputError(f"--n must be 2 or more, got {n}")
    rng = random.Random(sample.seed)
    prompt = begin(prompt, target)
    root = prompt[-1]
    while True:
        # Alg. 3, lines 2 and 5: a block is the root and n - 1 random tokens of the prompt
        y = [root, *rng.choices(prompt, k=n - 1)]
        final = 1  # line 3: how many leading tokens of y are final, n_t + 1
        record = {"states": [y], "final": [final]}
        if log is not None:
            log.append(record)
        while final < n:  # lines 6 and 15
            # Line 8: one call on the last final token and all guesses after it
            logits = target.forward(y[final - 1:])  # [n - final + 1, V]
            chosen = sample(logits, target.places)
            # Line 9: count the leading guesses that the target chooses too. i* counts y[final - 1]
            # as well. Line 9 compares z with the next z, which is shifted here (see cllm.py)
            agreed = 0
            while final + agreed < n and y[final + agreed] == chosen[agreed]:
                agreed += 1
            # They are final, and so is the token that the target chooses after them
            chunk = chosen[:agreed + 1]
            # Line 13: keep the cache of the last final token and of the guesses that agreed
            target.commit(range(agreed + 1))
            # Lines 10 and 14: each guess becomes what the target chose after the token before it.
            # Above temperature 0 a place keeps its random numbers, so an equal text before it
            # always gets the same token
            y = (y[:final] + chosen)[:n]
            final += agreed + 1  # line 11
            record["states"].append(y)  # line 12
            record["final"].append(final)
            yield chunk
        root = chunk[-1]  # the last final token: y[-1], or the token after it


def prompt_lookup(target: CachedLM, prompt: list[int], *, N: int = 5, G: int = 15,
                  sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Guess the tokens that followed the text's last token earlier in the text.

    N: tokens of an n-gram, 2 or more. It gives N - 1 guesses
    G: how many n-grams a call verifies, the newest ones, 1 or more

    Yields chunks of 1 to N tokens. For each call it logs {"guessed", "accepted"}, the numbers of
    guesses and of accepted guesses.
    """
    if N < 2 or G < 1:
        raise InputError(f"--N must be 2 or more and --G 1 or more, got {N=}, {G=}")
    chunk = begin(prompt, target)  # the prompt is the first chunk of the text
    text = []
    pool = NgramPool()
    while True:
        text += chunk
        pool.add(last_ngrams(text, N, len(chunk)))
        # The guesses, which followed the root earlier in the text, make a tree
        root = text[-1]
        ids, parents, _ = trie(root, [ngram[1:] for ngram in pool.newest(root, G)])
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents), target.places))
        target.commit(path)
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1})
        yield chunk


def lookahead(target: CachedLM, prompt: list[int], *, W: int = 15, N: int = 5, G: int = 15,
              prompt_ngrams: bool = True, sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Run W columns of Jacobi iteration, and verify up to G n-grams of the pool in the same call.
    Fu et al., Sections 3.1 to 3.3.

    W: columns of the window, 1 or more
    N: tokens of an n-gram, 2 or more. The window has N - 1 levels
    G: how many n-grams that begin with the root a call verifies, the newest ones, 1 or more
    prompt_ngrams: the n-grams of the prompt and of the text as it grows enter the pool too

    Yields chunks of 1 to N tokens, or to W + N - 2 if the window is right. It logs what
    prompt_lookup logs, and counts the window's tokens as guesses.
    """
    if N < 2 or min(W, G) < 1:
        raise InputError(f"--N must be 2 or more, --W and --G 1 or more, got {N=}, {W=}, {G=}")
    chunk = begin(prompt, target)  # the prompt is the first chunk of the text
    text = []
    pool = NgramPool()
    # levels[l][i] guesses the token about i + l positions after the root. The window starts as one
    # level of W + N - 2 tokens, the root and random ones. It loses a column each time that it gets
    # a level, which happens N - 2 times.
    levels = [[chunk[-1], *random.Random(sample.seed).choices(chunk, k=W + N - 3)]]
    while True:
        text += chunk
        root = text[-1]
        levels[0][0] = root  # whatever was guessed in its place
        if prompt_ngrams:
            pool.add(last_ngrams(text, N, len(chunk)))
        # Verification branch (Section 3.2): what followed the root in the pool's n-grams
        guesses = [ngram[1:] for ngram in pool.newest(root, G)]
        # Lookahead branch (Section 3.1): the columns. One call is fed both branches (Section 3.3)
        ids, parents, paths = trie(root, guesses + columns_of(levels))
        logits = target.forward(ids, parents)  # [nodes, V]
        path, chunk = walk(ids, parents, sample(logits, target.places))
        target.commit(path)
        # The last node of each column. The argmaxes after them are the window's new level
        ends = [nodes[-1] for nodes in paths[len(guesses):]]
        levels, ngrams = move_window(levels, greedy(logits[ends]), N)
        pool.add(ngrams)
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1})
        yield chunk


# -------------------------------------------------------------------- n-grams and the window
def last_ngrams(text: list[int], N: int, new: int) -> list[tuple[int, ...]]:
    """Return the n-grams (of N tokens) that end in one of the last `new` tokens of a text."""
    first = max(len(text) - new - N + 1, 0)
    return [tuple(text[i:i + N]) for i in range(first, len(text) - N + 1)]


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


# -------------------------------------------------------------------------- the command line
def report(run) -> str:
    """Return a line that says what the calls of a run of the command line did."""
    if run.method is jacobi:
        calls = [len(block["states"]) - 1 for block in run.log]
        return f"{len(calls)} blocks, {sum(calls) / len(calls):.2f} calls for each"
    guessed, accepted = (sum(r[name] for r in run.log) / len(run.log)
                         for name in ("guessed", "accepted"))
    return f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted"


COMMAND_LINE = dict(
    methods=[jacobi, lookahead, prompt_lookup], report=report,
    ranges={"n": (2, 4, 8, 16, 32), "W": (1, 2, 5, 10, 15), "N": (3, 4, 5, 7), "G": (1, 3, 7, 15)})

if __name__ == "__main__":
    sys.exit(main(**COMMAND_LINE))
