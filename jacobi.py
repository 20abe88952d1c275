"""Jacobi and lookahead decoding: a model guesses its own next tokens, all positions at once.

jacobi      Santilli et al., "Accelerating Transformer Inference for Translation via Parallel
            Decoding", arXiv 2305.10427; with the KV cache as in Kou et al., "CLLMs: Consistency
            Large Language Models", arXiv 2403.00835, Alg. 3
lookahead   Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
            arXiv 2402.02057

    Jacobi:     y_i <- argmax p(. | y_<i, x) for all i of a block at once, until nothing changes
    lookahead:  W columns run this iteration ahead of the text, and the n-grams that a column passes
                through become guesses

Both are lossless. A guess becomes final only where it equals the token that the target chooses in
its place. The target chooses the argmax, or at a temperature one sample after each node.

A block of Jacobi decoding with n = 5, where the text ends in "sat". What stands left of the bar is
final. A call is fed the last final token and all guesses, and gives the argmax after each of them.
The argmax after a token stands one position behind that token:

    position      0     1      2      3      4      5
    y(0)         sat │ the    cat    sat    the            the root and random tokens of the prompt
    call 1             on     cat    sat    on     mat     after "sat" comes "on" and not "the"
    y(1)         sat   on  │  cat    sat    on
    call 2                    the    mat    on     the     after "on" comes "the" and not "cat"
    y(2)         sat   on     the  │ mat    on
    call 3                           mat    and    the     the guess "mat" was right, so that its
    y(3)         sat   on     the    mat    and  │         argmax "and" is final as well

Each state is the final tokens and the newest argmaxes, cut off after n tokens. Call 2 guessed "mat"
in the right place, although it was fed wrong tokens before it. So three calls make four tokens
final. The last of them, "and", is the next root. Were the guess at position 4 right too, the argmax
at position 5 would be final, and would be the next root.

The lookahead window with W = 3 columns and N = 4 has N - 1 = 3 levels. A letter is a level. A
number says how many positions after the root the token would stand:

    column       0      1      2            the same window as a token tree
    level 0    root    a1     a2
    level 1     b1     b2     b3            root ─┬─ a1 ─┬─ a2 ─── b3 ─── c4 ─> d5
    level 2     c2     c3     c4                  │      └─ b2 ─── c3 ─> d4
    new         d3     d4     d5                  └─ b1 ─── c2 ─> d3

One call gives the new level d, which is the argmax (─>) after every token of level 2. Each column,
read downwards, is now an n-gram: (root, b1, c2, d3), (a1, b2, c3, d4), (a2, b3, c4, d5). Then level
0 is dropped, b becomes level 0, and the next root stands in the place of b1.

Departures (paper / here / why):
    first guesses: Santilli has padding / random tokens of the prompt / this is CLLM's rule
    first root: CLLM's Alg. 3 computes it from the prompt / it is the prompt's last token / that
        saves a call
    end of a block: CLLM's Alg. 3 as printed never ends, since i* is at most len - 1 / a block ends
        when its last token is final, and the last token that is final is the next root / the next
        root needs no call of its own
    end of the text: Santilli's third algorithm goes on token by token after a given length / blocks
        follow one another, and the driver stops at EOS / how long an answer is, nobody knows before
    sampling with Jacobi: Santilli and CLLM are greedy / at a temperature too / one sample after
        each node is exact
    sampling with lookahead: Fu's Alg. 4 tries a position's guesses one after the other, each
        against what p has left / one sample after each node is compared with the guesses / the law
        is the same, and a call draws once
    n-grams of the text: Fu's pool has the n-grams of the window, and the released code may add
        the prompt's / the n-grams of the growing text enter too / answers copy from the text
    no window: W is 1 or more / with W = 0 the pool has the n-grams of the text alone / this is
        prompt lookup with several candidates in one call

Left out: several GPUs.
"""
import random
import sys
from typing import Iterator

from common import CachedLM, InputError, Sampler, greedy, trie, walk


# ------------------------------------------------------------------------------------ Jacobi

def jacobi(target: CachedLM, prompt: list[int], *, n: int = 16, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Guess the n - 1 tokens that follow the root in a block, and recompute in each call all
    guesses that are not final yet. The block ends when all are final. CLLM, Alg. 3 and Eq. 3.

    n: tokens of a block, its root included, 2 or more

    Yields chunks of 1 to n tokens; logs {"states", "final"} a block. Every call extends both lists.
    The state y(j) of the Jacobi trajectory is states[j], a list of n tokens with the root first.
    The number of its leading tokens that are final is final[j]. Where the token after the block is
    final as well, final[j] is n + 1, and that token is the next root.
    """
    if n < 2:
        raise InputError(f"--n must be 2 or more, got {n}")
    rng = random.Random(sample.seed)
    root = prompt[-1]
    target.start(prompt[:-1])
    while True:
        # Alg. 3, lines 2 and 5: a block is the root and n - 1 random tokens of the prompt
        y = [root, *rng.choices(prompt, k=n - 1)]
        final = 1  # how many leading tokens of y are final
        trajectory = {"states": [y], "final": [final]}
        if log is not None:
            log.append(trajectory)
        while final < n:  # lines 6 and 15
            # Line 8: one call on the last final token and all guesses after it
            logits = target.forward(y[final - 1:])  # [n - final + 1, V]
            guesses = greedy(logits)
            chosen = guesses
            if sample.temperature > 0:
                chosen = sample(logits)
            # Line 9: count the leading guesses that the target chooses too
            agreed = 0
            while final + agreed < n and y[final + agreed] == chosen[agreed]:
                agreed += 1
            # They are final, and so is the token that the target chooses after them
            chunk = chosen[:agreed + 1]
            # Line 13: keep the cache of the last final token and of the guesses that agreed
            target.commit(range(agreed + 1))
            # Lines 10 and 14: the other guesses become argmaxes, also with sampling. The next call
            # draws every token anew, and the argmax is the likeliest to be drawn
            y = (y[:final] + chunk + guesses[agreed + 1:])[:n]
            final += agreed + 1  # line 11
            trajectory["states"].append(y)  # line 12
            trajectory["final"].append(final)
            yield chunk
        root = chunk[-1]  # y's last token where final is n, the token after y where it is n + 1


# --------------------------------------------------------------------------------- lookahead

def remember(pool: dict[int, dict[tuple, None]], ngram: tuple[int, ...], G: int) -> None:
    """Put an n-gram into the pool as the newest one of its first token.

    If the pool then has more than G n-grams of this first token, the oldest of them is dropped.

    pool    for each first token the other N - 1 tokens of its n-grams, the oldest first; changed in
            place. The keys of a dictionary serve as a set with an order
    ngram   N tokens
    G       how many n-grams of one first token are kept
    """
    rests = pool.setdefault(ngram[0], {})
    rests.pop(ngram[1:], None)  # an n-gram that is known already becomes the newest again
    rests[ngram[1:]] = None
    if len(rests) > G:
        oldest = next(iter(rests))
        del rests[oldest]


def list_ngrams(text: list[int], N: int, first: int = 0) -> list[tuple[int, ...]]:
    """Return the n-grams of a text that begin at token number `first` or later.

    text      tokens
    N         tokens of an n-gram
    first     a number of a token, counted from 0. A negative one stands for 0
    returns   the n-grams in the order of the text
    """
    return [tuple(text[i:i + N]) for i in range(max(first, 0), len(text) - N + 1)]


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


def check_lookahead(W: int, N: int, G: int, prompt_ngrams: bool) -> None:
    """Raise InputError if an option of lookahead cannot be used."""
    if W < 0:
        raise InputError(f"--W must be 0 or more, got {W}")
    if N < 2:
        raise InputError(f"--N must be 2 or more, got {N}")
    if G < 1:
        raise InputError(f"--G must be 1 or more, got {G}")
    if W == 0 and not prompt_ngrams:
        raise InputError("--W must be 1 or more with --no-prompt-ngrams, got 0: nothing is left "
                         "to guess from")


def lookahead(target: CachedLM, prompt: list[int], *, W: int = 15, N: int = 5, G: int = 15,
              prompt_ngrams: bool = True, sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Run W columns of Jacobi iteration, and verify up to G n-grams that earlier calls have found.
    Both happen in one call. Fu et al., Sections 3.1 to 3.3.

    W: columns of the window, or 0 for no window
    N: tokens of an n-gram, 2 or more. The window has N - 1 levels, and a guess has N - 1 tokens
    G: how many n-grams are kept for each first token. All n-grams of the root are verified
    prompt_ngrams: the n-grams of the prompt and of the text as it grows enter the pool too

    Yields chunks of 1 to N tokens; logs {"guessed", "accepted", "rows", "ngrams"} a call. These are
    the numbers of guesses, of accepted guesses and of rows, and a list of n-grams. The call has put
    these n-grams into the pool.
    """
    check_lookahead(W, N, G, prompt_ngrams)
    target.start(prompt[:-1])
    root = prompt[-1]
    text = list(prompt)
    pool = {}
    # levels[l][i] guesses the token i + l positions after the root. The window always moves by one
    # position. So its positions are only roughly right once a call has accepted a guess.
    levels = []
    if W > 0:
        # The window starts as one level of W + N - 2 tokens, the root and random ones. It loses a
        # column each time that it gets a level, which happens N - 2 times.
        levels = [[root, *random.Random(sample.seed).choices(prompt, k=W + N - 3)]]
    if prompt_ngrams:
        for ngram in list_ngrams(text, N):
            remember(pool, ngram, G)
    while True:
        # Verification branch (Section 3.2): the n-grams that begin with the root make a trie
        ids, parents, _ = trie(root, pool.get(root, ()))
        size = len(ids)
        # Lookahead branch (Section 3.1): the window hangs below the root too. Its nodes are not
        # merged with those of the trie, since the walk goes over the trie alone.
        last_level = add_window(levels, ids, parents)
        # Section 3.3: both branches in one call
        logits = target.forward(ids, parents)  # [nodes, V]
        path, chunk = walk(ids[:size], parents[:size], sample(logits[:size]))
        target.commit(path)
        found = []
        if levels:
            levels, found = move_window(levels, root, greedy(logits[last_level]), N)
        root = chunk[-1]
        text += chunk
        if prompt_ngrams:  # add the n-grams of the text that end in the chunk
            found += list_ngrams(text, N, len(text) - len(chunk) - N + 1)
        for ngram in found:
            remember(pool, ngram, G)
        if log is not None:
            log.append({"guessed": size - 1, "accepted": len(path) - 1, "rows": len(ids),
                        "ngrams": found})
        yield chunk


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    """Return a line that says what the calls of a run did.

    run   a run of the command line
    """
    if run.method is jacobi:
        calls = [len(block["states"]) - 1 for block in run.log]
        return f"{len(calls)} blocks, {sum(calls) / len(calls):.2f} calls for each"
    rows, guessed, accepted = (sum(r[name] for r in run.log) / len(run.log)
                               for name in ("rows", "guessed", "accepted"))
    return f"a call: {rows:.1f} rows, {guessed:.1f} of them guesses, {accepted:.2f} accepted"


if __name__ == "__main__":
    from cli.main import main  # the command line is in cli/, a folder of this project
    from cli.trajectory import show_trajectory
    sys.exit(main([jacobi, lookahead], report, viewers={jacobi: show_trajectory}, ranges={
        "n": (2, 4, 8, 16, 32), "W": (0, 2, 5, 10, 15), "N": (3, 4, 5, 7), "G": (1, 3, 7, 15)}))
