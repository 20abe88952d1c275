"""Jacobi decoding and lookahead decoding: a model guesses its own next tokens, all positions at once, without a draft model.

Santilli et al., "Accelerating Transformer Inference for Translation via Parallel Decoding", arXiv 2305.10427; with the KV cache as in
Kou et al., "CLLMs: Consistency Large Language Models", arXiv 2403.00835, Alg. 3
Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", arXiv 2402.02057

    Jacobi:     y_i <- argmax p(. | y_<i, x) for all i of a block at once, until nothing changes (CLLM, Eq. 3)
    lookahead:  W columns run such an iteration ahead of the text; the n-grams that they pass through become guesses

Both are lossless: a guess becomes final only where it equals the token that the target chooses there, greedily or by one draw a node.
Departures: the prompt's last token is the first block's root (Alg. 3 spends a call on the prompt alone), and a block that is final but
for its last token's own call goes on with that token as the root of the next one (Alg. 3 spends a call on it);
sampling (the papers are greedy); n-grams of the text itself may enter the pool, and with window 0 they alone do, which is prompt
lookup with several candidates in one call. Left out: the distribution of the window over several GPUs.
"""
import random
import sys
from typing import Iterator

from common import CachedLM, InputError, Job, Run, Sampler, Streamer, greedy, main, trie, walk


# ---------------------------------------------------------------- Jacobi decoding

def jacobi(target: CachedLM, prompt: list[int], *, block: int = 16, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Solve for `block` tokens at a time by fixed-point iteration. CLLM, Alg. 3.

    block: tokens solved for at once, 2 or more
    Yields chunks of 1 to block tokens. Logs a record {"states", "final"} a block, which grows with every call: the Jacobi trajectory
    y(0), y(1), … (lists of `block` tokens, the root first), and how many leading tokens of each state are final; block + 1 where the
    next block's root is too.
    """
    if block < 2:
        raise InputError(f"expected a block of 2 tokens or more, got {block}")
    rng, root = random.Random(sample.seed), prompt[-1]
    target.start(prompt[:-1], width=block)
    while True:
        state, final = [root, *rng.choices(prompt, k=block - 1)], 1  # lines 2 and 5
        trajectory = {"states": [state], "final": [final]}
        if log is not None:
            log.append(trajectory)
        while final < block:  # line 6
            logits = target.forward(state[final - 1:])  # line 8, [block - final + 1, V]
            chosen, guesses = sample(logits), greedy(logits)
            agreed = 0  # guesses that are what the target chooses there: line 9
            while final + agreed < block and state[final + agreed] == chosen[agreed]:
                agreed += 1
            target.commit(range(1 + agreed))  # lines 10, 11 and 13; the token chosen after the last agreed one is final too
            root = chosen[agreed]
            state = (state[:final] + chosen[:agreed + 1] + guesses[agreed + 1:])[:block]  # lines 12 and 14
            final += agreed + 1  # block + 1 where the last guess agreed: then the root opens the next block without a call of its own
            trajectory["states"].append(state)
            trajectory["final"].append(final)
            yield chosen[:agreed + 1]


class Trajectory(Streamer):
    """Prints each block's trajectory when the block is final, as CLLM's Fig. 2 does: a line a state, a column a token, right ones green
    and wrong ones red; where stdout is no terminal a wrong token is put in brackets. The text follows at the end."""

    def __init__(self, *args):
        super().__init__(*args)
        self.blocks = len(self.log)  # shown, or of earlier prompts

    def put(self, chunk: list[int]) -> None:
        self.ids += chunk
        while self.blocks < len(self.log) and self.log[self.blocks]["final"][-1] >= len(self.log[self.blocks]["states"][0]):
            self.draw(self.log[self.blocks]["states"])
            self.blocks += 1

    def draw(self, states: list[list[int]]) -> None:
        terminal = sys.stdout.isatty()
        words = [[repr(self.tokenizer.decode([token]))[1:-1] for token in state] for state in states]
        if not terminal:
            words = [[word if token == right else f"[{word}]" for word, token, right in zip(row, state, states[-1])] for row, state in zip(words, states)]
        widths = [max(map(len, column)) for column in zip(*words)]
        for number, (row, state) in enumerate(zip(words, states)):
            cells = [word.ljust(width) for word, width in zip(row, widths)]
            if terminal:
                cells = [f"\033[{32 if token == right else 31}m{cell}\033[0m" for cell, token, right in zip(cells, state, states[-1])]
            print(f"{number:3}: {' '.join(cells)}".rstrip())
        print(flush=True)

    def write(self, end: str = "") -> None:
        print(self.tokenizer.decode(self.ids, skip_special_tokens=True), end=end, flush=True)


jacobi.viewer = Trajectory


def profile_of(log: list[dict], eos: set[int] = frozenset()) -> tuple[int, float, float]:
    """(blocks, fast-forwarded tokens a call, stationary tokens a block) of the complete blocks of a log that no EOS cuts: CLLM, Table 3.

    Fast-forwarded: final tokens a call, the one that autoregressive decoding would also give included. Stationary: predicted right
    in a state in which a token before it is wrong, and right ever after.
    """
    blocks = [r for r in log if r["final"][-1] >= len(r["states"][0]) and not eos & set(r["states"][-1][1:])]
    calls = sum(len(r["states"]) - 1 for r in blocks)
    gained, stationary = sum(r["final"][-1] - 1 for r in blocks), 0
    for states in (r["states"] for r in blocks):
        for i, token in enumerate(states[-1]):
            wrong = max(j for j, state in enumerate(states) if j == 0 or state[i] != token)  # y(0) was not predicted
            stationary += any(state[:i] != states[-1][:i] for state in states[wrong + 1:])
    return len(blocks), gained / max(calls, 1), stationary / max(len(blocks), 1)


# ---------------------------------------------------------------- lookahead decoding

def remember(pool: dict[int, dict[tuple, None]], ngram: tuple[int, ...], guesses: int) -> None:
    """Put an n-gram into the pool under its first token: newest last, the oldest dropped beyond `guesses`."""
    tails = pool.setdefault(ngram[0], {})
    tails.pop(ngram[1:], None)
    tails[ngram[1:]] = None
    if len(tails) > guesses:
        del tails[next(iter(tails))]


def lookahead(target: CachedLM, prompt: list[int], *, window: int = 15, ngram: int = 5, guesses: int = 15, prompt_ngrams: bool = True,
              sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Run W columns of Jacobi iteration and verify up to G n-grams of their past, all in one call. Fu et al., Sections 3.1 to 3.3.

    window: columns W of the lookahead branch; 0 switches it off
    ngram: n-gram size N, 2 or more: the window has N - 1 levels, a guess N - 1 tokens
    guesses: candidates G verified a call, at most, and kept for each first token
    prompt_ngrams: the n-grams of the prompt and of the text as it grows enter the pool too
    Yields chunks of 1 to ngram tokens; logs a record {"guessed", "accepted", "rows", "ngrams"} a call: tokens verified, those of them
    that became final, rows of the call, and the n-grams that it put into the pool.
    """
    if window < 0 or ngram < 2 or guesses < 1:
        raise InputError(f"expected window of 0 or more, ngram of 2 or more and guesses of 1 or more, got {window}, {ngram} and {guesses}")
    if window == 0 and not prompt_ngrams:
        raise InputError("expected a window of 1 or more, or n-grams of the prompt: nothing is left to guess from")
    widest = max(levels * (window + ngram - 1 - levels) for levels in range(1, ngram)) if window else 0
    target.start(prompt[:-1], width=1 + guesses * (ngram - 1) + widest)
    root, text, pool = prompt[-1], list(prompt), {}
    # levels[l][i] guesses the token at position i + l after the root, which is levels[0][0]. They begin as one level of W + N - 2 tokens
    levels = [[root, *random.Random(sample.seed).choices(prompt, k=window + ngram - 3)]] if window else []
    if prompt_ngrams:
        for i in range(len(text) - ngram + 1):
            remember(pool, tuple(text[i:i + ngram]), guesses)
    while True:
        # Verification branch: the root's n-grams as a trie, node 0 the root
        ids, parents = trie(root, pool.get(root, ()))
        size = len(ids)
        # Lookahead branch: the first level is a chain below the root, every other token hangs below the one a level up in its column
        above = []
        for level in levels:
            nodes = [] if above else [0]
            for i, token in enumerate(level[len(nodes):], len(nodes)):
                nodes.append(len(ids))
                ids.append(token)
                parents.append(above[i] if above else nodes[i - 1])
            above = nodes
        logits = target.forward(ids, parents)  # [n, V]
        path, chunk = walk(ids[:size], parents[:size], sample(logits[:size]))
        target.commit(path)
        root, found = chunk[-1], []
        if levels:
            new = greedy(logits[above])  # what follows the last level
            if len(levels) < ngram - 1:  # still growing: one level more, one column less
                levels = [level[1:] for level in levels] + [new[1:]]
            else:  # every column gives an n-gram, and the levels move down
                found = list(zip(*levels, new))
                levels = [*levels[1:], new]
            levels[0] = [root, *levels[0][1:]]
        text += chunk
        if prompt_ngrams:
            found += [tuple(text[end - ngram:end]) for end in range(max(ngram, len(text) - len(chunk) + 1), len(text) + 1)]
        for gram in found:
            remember(pool, gram, guesses)
        if log is not None:
            log.append({"guessed": size - 1, "accepted": len(path) - 1, "rows": len(ids), "ngrams": found})
        yield chunk


# ---------------------------------------------------------------- the command line

def report(run: Run) -> str:
    if run.method is jacobi:
        blocks, gained, stationary = profile_of(run.log, run.eos)
        return f"{blocks} complete blocks: {gained:.2f} tokens fast-forwarded a call, {stationary:.2f} stationary tokens a block"
    guessed, accepted, rows = (sum(r[name] for r in run.log) / len(run.log) for name in ("guessed", "accepted", "rows"))
    return f"a call: {rows:.1f} rows, {guessed:.1f} of them guesses, {accepted:.2f} accepted"


def profile(job: Job) -> int:
    """Count fast-forwarded and stationary tokens by Jacobi decoding of the prompts (CLLM, Table 3). Prints a table to stdout."""
    if job.method is not jacobi:
        raise InputError("expected --profile with --method jacobi")
    run = job.finished(jacobi, job.options, title="profile")
    blocks, gained, stationary = profile_of(run.log, run.eos)
    if not blocks:
        raise InputError(f"expected --max-new-tokens, or answers, long enough for a block; got {run.tokens} tokens")
    n = len(run.log[0]["states"][0])
    print("| model | prompts | complete blocks | n-token sequence length | fast-forward token count | stationary token count |\n"
          f"| --- | --- | --- | --- | --- | --- |\n| {job.args.target} | {len(job.prompts)} | {blocks} | {n} | {gained:.2f} | {stationary:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main([jacobi, lookahead], report, actions={"profile": profile}))
