"""Jacobi and lookahead decoding: a model guesses its own next tokens, all positions at once.

jacobi      Santilli et al., "Accelerating Transformer Inference for Translation via Parallel
            Decoding", arXiv 2305.10427; with the KV cache as in Kou et al., "CLLMs: Consistency
            Large Language Models", arXiv 2403.00835, Alg. 3
lookahead   Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
            arXiv 2402.02057

    Jacobi:     y_i <- argmax p(. | y_<i, x) for all i of a block at once, until nothing changes
    lookahead:  W columns run such an iteration ahead of the text; the n-grams that they pass
                through become guesses

Both are lossless: a guess becomes final only where it equals the token that the target chooses
there, greedily or by one draw a node. Departures: the prompt's last token is the first block's root
(CLLM, Alg. 3 spends a call on the prompt alone); a block's last token needs no call of its own, it
is the next block's root (Alg. 3 as printed never ends: its i* stops at len - 1); sampling (Santilli
and CLLM are greedy); n-grams of the text itself may enter the pool, and with W = 0 they alone do,
which is prompt lookup with several candidates in one call. Left out: several GPUs.
"""
import random
import sys
from typing import Iterator

from common import CachedLM, InputError, Sampler, greedy, trie, walk


# ------------------------------------------------------------------------------------ Jacobi

def jacobi(target: CachedLM, prompt: list[int], *, n: int = 16, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Solve for the n - 1 tokens after the root, and the next root, by fixed-point iteration. CLLM,
    Alg. 3 and Eq. 3. --show draws the trajectories.

    n: tokens of a block, its root included, 2 or more
    Yields chunks of 1 to n tokens. Logs {"states", "final"} a block, which grows with every call:
    the Jacobi trajectory y(0), y(1), … (lists of n tokens, the root first), and how many leading
    tokens of each state are final; n + 1 where the next block's root is too.
    """
    if n < 2:
        raise InputError(f"expected n of 2 or more, got {n}")
    rng = random.Random(sample.seed)
    root = prompt[-1]
    target.start(prompt[:-1])
    while True:
        y = [root, *rng.choices(prompt, k=n - 1)]  # lines 2 and 5
        final = 1
        trajectory = {"states": [y], "final": [final]}
        if log is not None:
            log.append(trajectory)
        while final < n:  # lines 6 and 15
            logits = target.forward(y[final - 1:])  # line 8, [n - final + 1, V]
            guesses = greedy(logits)
            chosen = guesses if sample.temperature == 0 else sample(logits)
            agreed = 0  # guesses that are what the target chooses there: line 9
            while final + agreed < n and y[final + agreed] == chosen[agreed]:
                agreed += 1
            target.commit(range(1 + agreed))  # line 13
            root = chosen[agreed]  # the token chosen after the last agreed one is final too
            y = (y[:final] + chosen[:agreed + 1] + guesses[agreed + 1:])[:n]  # lines 10 and 14
            final += agreed + 1  # line 11; n + 1 where all agreed: the root opens the next block
            trajectory["states"].append(y)  # line 12
            trajectory["final"].append(final)
            yield chosen[:agreed + 1]


# --------------------------------------------------------------------------------- lookahead

def remember(pool: dict[int, dict[tuple, None]], ngram: tuple[int, ...], G: int) -> None:
    """Put an n-gram into the pool under its first token: newest last, at most G of them."""
    rests = pool.setdefault(ngram[0], {})
    rests.pop(ngram[1:], None)
    rests[ngram[1:]] = None
    if len(rests) > G:
        del rests[next(iter(rests))]


def lookahead_branch(levels: list[list[int]], ids: list[int], parents: list[int]) -> list[int]:
    """Add the window to a tree with node 0 as its root; the nodes of the last level. The first
    level is a chain below the root, every other token hangs below the one a level up."""
    above = []
    for level in levels:
        nodes = [] if above else [0]
        for i, token in enumerate(level[len(nodes):], len(nodes)):
            nodes.append(len(ids))
            ids.append(token)
            parents.append(above[i] if above else nodes[i - 1])
        above = nodes
    return above


def moved(levels: list[list[int]], new: list[int], root: int,
          N: int) -> tuple[list[list[int]], list[tuple]]:
    """(the window after a call, the n-grams that it found): `new` follows its last level, `root` is
    the next root. It grows to N - 1 levels, each time by a level and less by a column; then every
    column is an n-gram, and the levels move down."""
    if len(levels) < N - 1:
        levels, found = [level[1:] for level in levels] + [new[1:]], []
    else:
        found = list(zip(*levels, new))
        levels = [*levels[1:], new]
    levels[0] = [root, *levels[0][1:]]
    return levels, found


def lookahead(target: CachedLM, prompt: list[int], *, W: int = 15, N: int = 5, G: int = 15,
              prompt_ngrams: bool = True, sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Run W columns of Jacobi iteration and verify up to G n-grams of their past, all in one call.
    Fu et al., Sections 3.1 to 3.3.

    W: columns of the lookahead branch; 0 switches it off
    N: tokens of an n-gram, 2 or more: the window has N - 1 levels, a guess N - 1 tokens
    G: n-grams verified a call, at most, and kept for each first token
    prompt_ngrams: the n-grams of the prompt and of the text as it grows enter the pool too
    Yields chunks of 1 to N tokens; logs {"guessed", "accepted", "rows", "ngrams"} a call: tokens
    verified, those of them that became final, rows of the call, n-grams that it found.
    """
    if W < 0 or N < 2 or G < 1:
        raise InputError("expected W of 0 or more, N of 2 or more and G of 1 or more, "
                         f"got {W}, {N} and {G}")
    if W == 0 and not prompt_ngrams:
        raise InputError("expected W of 1 or more, or n-grams of the prompt: nothing is left to "
                         "guess from")
    target.start(prompt[:-1])
    root = prompt[-1]
    text, pool = list(prompt), {}
    # levels[l][i] guesses the token at position i + l after the root, which is levels[0][0]; after
    # a call that accepts tokens only roughly, for the window moves by one. One level at first
    levels = [[root, *random.Random(sample.seed).choices(prompt, k=W + N - 3)]] if W else []
    if prompt_ngrams:
        for i in range(len(text) - N + 1):
            remember(pool, tuple(text[i:i + N]), G)
    while True:
        # Verification branch: the root's n-grams as a trie, node 0 the root
        ids, parents, _ = trie(root, pool.get(root, ()))
        size = len(ids)
        last = lookahead_branch(levels, ids, parents)
        logits = target.forward(ids, parents)  # [nodes, V]
        path, chunk = walk(ids[:size], parents[:size], sample(logits[:size]))
        target.commit(path)
        root = chunk[-1]
        found = []
        if levels:
            levels, found = moved(levels, greedy(logits[last]), root, N)
        text += chunk
        if prompt_ngrams:
            first = max(N, len(text) - len(chunk) + 1)
            found += [tuple(text[end - N:end]) for end in range(first, len(text) + 1)]
        for ngram in found:
            remember(pool, ngram, G)
        if log is not None:
            log.append({"guessed": size - 1, "accepted": len(path) - 1, "rows": len(ids),
                        "ngrams": found})
        yield chunk


# ------------------------------------------------------------------------- the command line

def show_trajectory(chunks, tokenizer, colour: bool, log: list) -> None:
    """Print each block's trajectory when it is final, as CLLM's Fig. 2: a line a state, a column a
    token, wrong ones red (in brackets where stdout is no terminal), and the text at the end."""
    text, shown = [], len(log) - 1  # the last block has begun
    for chunk in chunks:
        text += chunk
        while shown < len(log) and log[shown]["final"][-1] >= len(log[shown]["states"][0]):
            print_states(log[shown]["states"], tokenizer)
            shown += 1
    for block in log[shown:]:  # of one that EOS or the limit cut what is final
        final = block["final"][-1]
        print_states([y[:final] for y in block["states"]], tokenizer)
    print(tokenizer.decode(text, skip_special_tokens=True), flush=True)


def print_states(states: list[list[int]], tokenizer) -> None:
    terminal = sys.stdout.isatty()
    y_star = states[-1]

    def cell(i: int, token: int) -> str:
        word = repr(tokenizer.decode([token]))[1:-1]
        return word if terminal or token == y_star[i] else f"[{word}]"
    rows = [[cell(i, token) for i, token in enumerate(y)] for y in states]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for number, (y, row) in enumerate(zip(states, rows)):
        cells = [word.ljust(width) for word, width in zip(row, widths)]
        if terminal:
            colours = [32 if token == right else 31 for token, right in zip(y, y_star)]
            cells = [f"\033[{colour}m{x}\033[0m" for colour, x in zip(colours, cells)]
        print(f"{number:3}: {' '.join(cells)}".rstrip())
    print(flush=True)


def report(run) -> str:
    if run.method is jacobi:
        states = [len(r["states"]) - 1 for r in run.log]
        return f"{len(states)} blocks, {sum(states) / len(states):.2f} calls for each"
    rows, guessed, accepted = (sum(r[name] for r in run.log) / len(run.log)
                               for name in ("rows", "guessed", "accepted"))
    return f"a call: {rows:.1f} rows, {guessed:.1f} of them guesses, {accepted:.2f} accepted"


if __name__ == "__main__":
    from cli import main
    sys.exit(main([jacobi, lookahead], report, viewers={jacobi: show_trajectory}, ranges={
        "n": (2, 4, 8, 16, 32), "W": (0, 2, 5, 10, 15), "N": (3, 4, 5, 7), "G": (1, 3, 7, 15)}))
