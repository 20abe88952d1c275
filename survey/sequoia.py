"""Sequoia: the tree that a pair of models and a machine call for, sampled without replacement.

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", arXiv 2402.12374

    python -m survey.sequoia calibrate --draft-model DIR --prompts FILE --out rates.json
    python -m survey.sequoia --draft DIR --rates rates.json --prompt "..." --temperature 0.6

P_b, measured beforehand, is how often the b-th child of a node is the accepted one. G(n, d), the
most tokens a call that n nodes in d levels give, comes from a dynamic program (Section 3.1 of v3);
the measured times of calls choose n and d (Section 4.1):

    G(n, d) = max_b T(n, b),  T(n, b) = max_m T(n - m, b - 1) + P_b G(m, d - 1)
    n, d    = argmax G(n, d) / (t_target(n) + Σ_levels t_draft(rows of the level))

So the shape is fixed before a token is drawn. Exactness asks for that, since a tree pruned by what
was drawn is no sample of q any more; and a whole level is one draft call.

A node's children are drawn from the draft's q without replacement, and tried in that order:

    accept x with probability min(1, p(x) / q(x));                                        Alg. 2
    else p <- norm(max(0, p - q)), q(x) <- 0, q <- norm(q); after the last child draw from p

Lossless: the target's own distribution, or at temperature 0, where the children are the draft's
likeliest tokens, its greedy output. Top-k and top-p warp p alone, so that q covers it.

Departures: a draft level is paid by its rows (paper: all alike); the rates are those of the nearest
temperature measured; noise is fresh in every round (the released code draws it once a text).
"""
import functools
import json
import sys
from itertools import product
from pathlib import Path
from typing import Iterator

import torch
from tqdm import tqdm

from common import (WIDTHS, CachedLM, InputError, Sampler, digest, eos_ids, greedy, load, row_costs,
                    until, walk)

MODELS = Path(__file__).resolve().parent.parent / "models"
TEMPERATURES = (0.0, 0.3, 0.6, 1.0)  # that rates are measured at
B, TOKENS = 16, 128  # children of a node; tokens of a text that rates are measured on
RANGES = {"nodes": WIDTHS[1:7], "depth": tuple(range(1, 17))}  # 2 to 64 nodes, 1 to 16 levels


@functools.cache
def tables(P: tuple[float, ...], N: int, D: int) -> tuple[list[list[float]], list[tuple]]:
    """Alg. 1 and 4, for trees of up to n <= N nodes, the root among them, and d <= D levels below
    it: (G[d][n], how[d]), where how[d] is (branches of the root [n], size of the last [b][n])."""
    left = (torch.arange(N + 1)[:, None] - torch.arange(1, N + 1)).clamp(min=0)  # [n, m]: n - m
    root = torch.tensor([-torch.inf] + [1.0] * N, dtype=torch.float64)  # one token, if n > 0
    G, how = [root], [([0] * (N + 1), [])]
    for _ in range(D):
        T, last = [root], [[]]
        for rate in P:
            row, m = (T[-1][left] + rate * G[-1][1:]).max(1)  # Alg. 1, line 9
            T, last = T + [row], last + [(1 + m).tolist()]
        most, branches = torch.stack(T).max(0)  # line 11
        G, how = G + [most], how + [(branches.tolist(), last)]
    return [row.tolist() for row in G], how


def shape(how: list[tuple], n: int, d: int) -> list[int]:
    """The parents of the best tree's nodes, level by level."""
    parents, subtrees = [-1], [(n, d)]
    for node, (n, d) in enumerate(subtrees):  # which grow on the way
        (branches, last), sizes = how[d], []
        for b in range(branches[n], 0, -1):
            sizes.insert(0, last[b][n])
            n -= sizes[0]
        parents += [node] * len(sizes)
        subtrees += [(m, d - 1) for m in sizes]
    return parents


def levels(parents: list[int]) -> list[list[int]]:
    """The nodes that have children, level by level: the rows of each draft call."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return [[i for i in sorted(set(parents[1:])) if depths[i] == d] for d in range(max(depths))]


def fastest(P: tuple, sizes, depths, target: CachedLM, draft: CachedLM) -> list[int]:
    """The parents of the tree of the most tokens a second here. Section 4.1."""
    G, how = tables(P, max(sizes), max(depths))
    if len(sizes) == len(depths) == 1:
        return shape(how, *sizes, *depths)
    speeds, costs = {}, {lm: row_costs(lm, 2 * max(sizes) - 1) for lm in (target, draft)}
    for n, d in product(sizes, depths):
        parents = shape(how, n, d)
        calls = [(target, len(parents)), *((draft, len(level)) for level in levels(parents))]
        seconds = sum(next(costs[lm][w] for w in WIDTHS if w >= rows) for lm, rows in calls)
        speeds[tuple(parents)] = G[d][n] / seconds
    return list(max(speeds, key=speeds.get))


def draw_children(log_q: torch.Tensor, k: int, sample: Sampler) -> list[list[int]]:
    """k tokens in draw order for each row of log q [n, V]: with Gumbel noise the largest is a draw
    from q, the next one from the rest of q, …; at temperature 0 the k likeliest."""
    if sample.temperature > 0:
        noise = sample.uniform(log_q.shape, log_q.device).clamp(min=1e-30)
        log_q = log_q - (-noise.log()).log()
    return log_q.topk(k).indices.tolist()


def verify(p: torch.Tensor, log_q: torch.Tensor, draws: list[int],
           sample: Sampler) -> tuple[int | None, torch.Tensor]:
    """(which draw is accepted or None, what is then left of p [V]). Alg. 2; uses up log q [V]. In
    draw order, and in no other, is each one a draw from what q is when it is tried."""
    for i, r in enumerate(sample.uniform(len(draws), p.device)):
        q = log_q.softmax(-1)  # line 16
        if r < p[draws[i]] / q[draws[i]]:  # line 6
            return i, p
        left = (p - q).clamp(min=0)  # line 9
        p = left / left.sum() if left.sum() > 0 else p  # nothing left: only rounding rejected
        log_q[draws[i]] = -torch.inf  # line 10
    return None, p


def decode(target: CachedLM, draft: CachedLM, root: int, parents: list[int], sample: Sampler,
           log: list | None) -> Iterator[list[int]]:
    """Rounds with trees of this shape, from a root that is not cached yet. Logs {"drafted",
    "accepted", "ranks": which child of its parent each accepted node was, from 0}."""
    children = [[c for c, parent in enumerate(parents) if parent == i] for i in range(len(parents))]
    calls = levels(parents)
    row = {node: i for i, node in enumerate(sum(calls, []))}  # of the draft, which is fed no leaf
    unseen = [root]  # final tokens that the draft has not been fed; the root is the last
    while True:
        # Step 1: grow, a draft call a level. Node i is row base + row[i] of the draft's tree
        base, ids, log_q = len(unseen) - 1, unseen[-1:] + [0] * (len(parents) - 1), {}
        for level in calls:
            fed = unseen if level == [0] else [ids[i] for i in level]
            under = None if level == [0] else [base + row[parents[i]] for i in level]
            logits = draft.forward(fed, under)[-len(level):].double() / (sample.temperature or 1)
            logits = logits.clamp(min=-1e9)  # where q has no mass left: evenly (Alg. 2, line 14)
            most = max(len(children[i]) for i in level)
            for i, draws in zip(level, draw_children(logits, most, sample)):
                for child, token in zip(children[i], draws):
                    ids[child] = token
            log_q |= zip(level, logits)
        # Step 2: verify, in one target call
        logits = target.forward(ids, parents)  # [n, V]
        if sample.temperature == 0:
            path, chunk = walk(ids, parents, sample(logits))
        else:
            path, rest = [0], None
            while rest is None:
                tried = children[path[-1]]  # none at a leaf: there p stays whole
                i, left = verify(sample.probs(logits[path[-1]]), log_q.get(path[-1]),
                                 [ids[child] for child in tried], sample)
                path, rest = (path, left) if i is None else (path + [tried[i]], None)
            chunk = [ids[i] for i in path[1:]] + sample.draw(rest[None])
        # Step 3: cache what became final; a leaf that was accepted is still unseen
        target.commit(path)
        draft.commit([*range(base), *(base + row[i] for i in path if i in row)])
        unseen = [ids[i] for i in path if i not in row] + chunk[-1:]
        if log is not None:
            ranks = [children[parent].index(i) for parent, i in zip(path, path[1:])]
            log.append({"drafted": len(ids) - 1, "accepted": len(ranks), "ranks": ranks})
        yield chunk


def sequoia(target: CachedLM, draft: CachedLM, prompt: list[int], *, nodes: int = 0, depth: int = 0,
            rates: str = f"{MODELS}/sequoia.json", sample: Sampler = greedy,
            log=None) -> Iterator[list[int]]:
    """Draft the best tree for this pair of models and this machine; verify it in one target call.

    nodes: rows of a target call, the root among them; 0: as many as are fastest by the clock
    depth: levels below the root, at most; 0: as many as are fastest by the clock
    rates: the acceptance rates of this pair, a file that `calibrate` made
    Yields chunks of 1 to depth + 1 tokens; logs {"drafted", "accepted", "ranks"} a round. The same
    seed draws the same tokens only where the clock chooses neither.
    """
    if nodes not in (0, *range(2, 129)) or not 0 <= depth < 128:
        raise InputError(f"expected 2 to 128 nodes, a depth up to 127, or 0, got {nodes}, {depth}")
    measured = load_rates(rates, target.model, draft.model)
    P = measured[min(measured, key=lambda t: abs(t - sample.temperature))]
    for lm in (target, draft):
        lm.start(prompt[:-1], width=WIDTHS[-1])
    sizes, depths = [nodes] if nodes else RANGES["nodes"], [depth] if depth else RANGES["depth"]
    parents = fastest(P, sizes, depths, target, draft)
    yield from decode(target, draft, prompt[-1], parents, sample, log)


def calibrate(model, tokenizer, prompts: list[list[int]], *, out: Path,
              draft_model: str = f"{MODELS}/draft") -> None:
    """Measure P_b at several temperatures: decode with one level, count which child is accepted.

    out, draft_model: the JSON file to make; the small model
    """
    draft, its_tokenizer = load(draft_model, str(model.device), model.dtype)
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InputError("expected a draft with the target's tokenizer, got another vocabulary")
    lms = [CachedLM(x, max(map(len, prompts)) + TOKENS, len(tokenizer)) for x in (model, draft)]
    rates = {}
    for t in TEMPERATURES:
        log, sample = [], Sampler(t)
        for prompt in tqdm(prompts, desc=f"temperature {t}"):
            for lm in lms:
                lm.start(prompt[:-1], width=WIDTHS[-1])
            chunks = decode(*lms, prompt[-1], [-1] + [0] * B, sample, log)
            list(until(chunks, TOKENS, eos_ids(model, tokenizer)))
        rates[t] = [round(sum(r["ranks"] == [b] for r in log) / len(log), 4) for b in range(B)]
    out.write_text(json.dumps({"pair": digest(model, digest(draft)), "rates": rates}) + "\n")


@functools.lru_cache(maxsize=4)
def load_rates(path: str, target, draft) -> dict[float, tuple[float, ...]]:
    """{temperature: P_1, P_2, …}. A child that was never accepted is better than none."""
    try:
        file = json.loads(Path(path).read_text())
        if file["pair"] != digest(target, digest(draft)):
            raise ValueError("those of another pair")
        return {float(t): tuple(max(x, 1e-9) for x in P) for t, P in file["rates"].items()}
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError("expected rates that `python -m survey.sequoia calibrate` measured on "
                         f"this target and draft, got {path!r}: {error}") from error


def report(run) -> str:
    drafted, accepted = (sum(r[x] for r in run.log) / len(run.log) for x in ("drafted", "accepted"))
    return f"accepted {accepted:.2f} of {drafted:.0f} drafted tokens a round"


if __name__ == "__main__":
    from cli import main
    sys.exit(main([sequoia], report, commands=[calibrate], ranges=RANGES))
