"""Sequoia: the tree that a pair of models and a machine call for, sampled without replacement.

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", arXiv 2402.12374

    python -m survey.sequoia calibrate --draft DIR --prompts FILE --out rates.json
    python -m survey.sequoia --draft DIR --rates rates.json --prompt "..." --temperature 0.6

P_b, measured beforehand, is how often the b-th child of a node is the accepted one. G(n, d), the
most tokens a call that n nodes in d levels give, comes from a dynamic program (Section 3.1 of v3);
the measured times of calls choose n and d (Section 4.1):

    G(n, d) = max_b T(n, b),  T(n, b) = max_m T(n - m, b - 1) + P_b G(m, d - 1),  T(n, 0) = 1
    n, d    = argmax G(n, d) / (t_target(n) + Σ_levels t_draft(rows of the level))

So the shape is fixed before a token is drawn. Exactness asks for that, since a tree pruned by what
was drawn is no sample of q any more. It also makes a level one draft call.

A node's children are drawn from the draft's q without replacement, and tried in that order:

    accept x with probability min(1, p(x) / q(x));                                        Alg. 2
    else p <- norm(max(0, p - q)), q(x) <- 0, q <- norm(q); after the last child draw from p

Lossless: the target's own distribution, or at temperature 0, where the children are the draft's
likeliest tokens, its greedy output. The temperature is for p and q, top-k and top-p for p alone.

Departures: a draft level is paid by its rows (paper: all alike); the rates are those of the nearest
temperature measured; noise is fresh in every round (the released code draws it once a text).
"""
import functools
import json
import sys
from itertools import product
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import torch
from tqdm import tqdm

from common import (WIDTHS, CachedLM, InputError, Sampler, context_length, eos_ids, fastest,
                    greedy, row_costs, until, walk)
from survey.parts import MODELS, belongs, draft_for, some_embeddings

TEMPERATURES = (0.0, 0.3, 0.6, 1.0)  # that rates are measured at
B = 16  # children of a node
TOKENS = 128  # of a text that rates are measured on
RANGES = {"nodes": WIDTHS[1:7], "depth": tuple(range(1, 17))}  # 2 to 64 nodes, 1 to 16 levels


# ---------------------------------------------------------------------------------- the tree

class Best(NamedTuple):
    """The best trees of up to n nodes, the root among them, and at most d levels below it."""
    G: list[float]  # [n]: tokens a call
    branches: list[int]  # [n]: children of the root
    size_of_last: list[list[int]]  # [b][n]: nodes of the last of b branches


@functools.cache
def tables(P: tuple[float, ...], N: int, D: int) -> list[Best]:
    """For d = 0 … D and n = 0 … N, by a dynamic program: Alg. 1 and 4."""
    rest_of = (torch.arange(N + 1)[:, None] - torch.arange(1, N + 1)).clamp(min=0)  # [n, m]: n - m
    alone = torch.tensor([-torch.inf] + [1.0] * N, dtype=torch.float64)  # one token, if n > 0
    found = [Best(alone.tolist(), [0] * (N + 1), [])]
    G = alone  # G(., d - 1)
    for _ in range(D):
        T = [alone]  # T[b][n], b branches
        size_of_last = [[]]
        for P_b in P:
            most, i = (T[-1][rest_of] + P_b * G[1:]).max(1)  # Alg. 1, line 9, over m = 1 + i
            T.append(most)
            size_of_last.append((1 + i).tolist())
        G, branches = torch.stack(T).max(0)  # line 11
        found.append(Best(G.tolist(), branches.tolist(), size_of_last))
    return found


def parents_of(best: list[Best], n: int, d: int) -> list[int]:
    """The parents of the best tree's nodes, n with the root, level by level."""
    parents = [-1]
    subtrees = [(n, d)]  # of each node: how many nodes, in how many levels below it
    for node, (rest, depth) in enumerate(subtrees):  # which grow on the way
        sizes = []
        for b in range(best[depth].branches[rest], 0, -1):  # the last branch comes off first
            sizes.insert(0, best[depth].size_of_last[b][rest])
            rest -= sizes[0]
        parents += [node] * len(sizes)
        subtrees += [(m, depth - 1) for m in sizes]
    return parents


class Shape(NamedTuple):
    """A tree's parents and what follows from them."""
    parents: list[int]
    children: list[list[int]]
    levels: list[list[int]]  # the nodes that have children: the rows of each draft call
    row: dict[int, int]  # of each of these nodes: its row, counted through all levels


def shape_of(parents: list[int]) -> Shape:
    nodes = range(len(parents))
    children = [[child for child in nodes if parents[child] == node] for node in nodes]
    levels = []
    level = [0] if children[0] else []
    while level:
        levels.append(level)
        level = [x for node in level for x in children[node] if children[x]]
    row = {node: i for i, node in enumerate(node for level in levels for node in level)}
    return Shape(parents, children, levels, row)


def plans(P: tuple[float, ...], sizes, depths, target: CachedLM,
          draft: CachedLM) -> Iterator[tuple]:
    """(shape, expected tokens, seconds of the draft's calls and of the target's): Section 4.1."""
    best = tables(P, max(sizes), max(depths))
    target_costs, draft_costs = (row_costs(lm, max(sizes)) for lm in (target, draft))
    for n, d in product(sizes, depths):
        shape = shape_of(parents_of(best, n, d))
        seconds = target_costs[len(shape.parents)]
        seconds += sum(draft_costs[len(level)] for level in shape.levels)
        yield shape, best[d].G[n], seconds


# ---------------------------------------------------------------------------------- decoding

def draw_children(q_logits: torch.Tensor, k: int, sample: Sampler) -> list[list[int]]:
    """k tokens in draw order for each row of logits [n, V] of q: with Gumbel noise the largest is a
    draw from q, the next one from the rest of q, …; at temperature 0 the k likeliest."""
    if sample.temperature > 0:
        noise = sample.uniform(q_logits.shape, q_logits.device).clamp(min=1e-30)
        q_logits = q_logits - (-noise.log()).log()
    return q_logits.topk(k).indices.tolist()


def grow(draft: CachedLM, unseen: list[int], shape: Shape,
         sample: Sampler) -> tuple[list[int], dict[int, torch.Tensor]]:
    """(ids of the tree, {node: logits [V] of the q of its children}): a draft call a level.
    Below the root, the last of `unseen`, all that the draft has not been fed."""
    ids = unseen[-1:] + [0] * (len(shape.parents) - 1)
    q_logits_of = {}

    def draw(level: list[int], logits: torch.Tensor) -> None:
        logits = logits.double() / (sample.temperature or 1)
        logits = logits.clamp(min=-1e9)  # not -inf: once all others are drawn, q is even (line 14)
        k = max(len(shape.children[node]) for node in level)
        for node, draws in zip(level, draw_children(logits, k, sample)):
            for child, token in zip(shape.children[node], draws):  # a node takes the first of them
                ids[child] = token
        q_logits_of.update(zip(level, logits))
    base = len(unseen) - 1  # the root's row in the draft's pending tree
    draw([0], draft.forward(unseen)[-1:])
    for level in shape.levels[1:]:
        parent_rows = [base + shape.row[shape.parents[node]] for node in level]
        draw(level, draft.forward([ids[node] for node in level], parent_rows))
    return ids, q_logits_of


def verify(p: torch.Tensor, q_logits: torch.Tensor, draws: list[int],
           sample: Sampler) -> tuple[int | None, torch.Tensor]:
    """(which draw is accepted or None, what is then left of p [V]). Alg. 2, whose norm of q (line
    16) is at the loop's head here; uses up `q_logits` [V]. Only in draw order was each token drawn
    from the q that it is tried against."""
    for i, r in enumerate(sample.uniform(len(draws), p.device)):
        q = q_logits.softmax(-1)
        if r < p[draws[i]] / q[draws[i]]:  # line 6
            return i, p
        left = (p - q).clamp(min=0)  # line 9
        if left.sum() > 0:  # else only rounding rejected
            p = left / left.sum()
        q_logits[draws[i]] = -torch.inf  # line 10
    return None, p


def sampled_path(ids: list[int], shape: Shape, logits: torch.Tensor, q_logits_of: dict,
                 sample: Sampler) -> tuple[list[int], list[int]]:
    """(path, chunk): from node to node as long as a child is accepted; then one more token."""
    path = [0]
    while True:
        p = sample.probs(logits[path[-1]])
        tried = shape.children[path[-1]]
        i = None
        if tried:
            i, p = verify(p, q_logits_of[path[-1]], [ids[child] for child in tried], sample)
        if i is None:
            return path, [ids[node] for node in path[1:]] + sample.draw(p[None])
        path.append(tried[i])


def decode(target: CachedLM, draft: CachedLM, root: int, choose: Callable[[], Shape],
           sample: Sampler, log: list | None) -> Iterator[list[int]]:
    """Rounds with trees of the shape choose(), from a root that is not cached yet. Logs {"drafted",
    "accepted", "ranks": which child of its parent each accepted node was, from 0}."""
    unseen = [root]  # final tokens that the draft has not been fed
    while True:
        shape = choose()
        ids, q_logits_of = grow(draft, unseen, shape, sample)
        logits = target.forward(ids, shape.parents)  # [n, V]
        if sample.temperature == 0:
            path, chunk = walk(ids, shape.parents, sample(logits))
        else:
            path, chunk = sampled_path(ids, shape, logits, q_logits_of, sample)
        target.commit(path)
        before = len(unseen) - 1  # the draft's pending rows above the root's
        fed = [node for node in path if node in shape.row]  # to the draft: all but a leaf
        draft.commit([*range(before), *(before + shape.row[node] for node in fed)])
        unseen = [ids[node] for node in path[len(fed):]] + chunk[-1:]  # a leaf, the target's token
        if log is not None:
            ranks = [shape.children[above].index(node) for above, node in zip(path, path[1:])]
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
        raise InputError("expected 2 to 128 nodes and a depth of 1 to 127, or 0 for either, got "
                         f"{nodes} and {depth}")
    measured = target.once((rates, draft.model),
                           lambda: load_rates(rates, target.model, draft.model))
    nearest = min(measured, key=lambda t: abs(t - sample.temperature))
    P = measured[nearest][:draft.vocab]  # no more children than tokens
    for lm in (target, draft):
        lm.start(prompt[:-1])

    settings = P, nodes, depth  # the name of what is kept

    def choose() -> Shape:
        if nodes and depth:
            return target.once(settings, lambda: shape_of(
                parents_of(tables(P, nodes, depth), nodes, depth)))
        sizes = [nodes] if nodes else RANGES["nodes"]
        depths = [depth] if depth else RANGES["depth"]
        return fastest(target, settings, lambda: plans(P, sizes, depths, target, draft))
    yield from decode(target, draft, prompt[-1], choose, sample, log)


# --------------------------------------------------------------------------------- the rates

def calibrate(model, tokenizer, prompts: list[list[int]], *, out: Path,
              draft: str = f"{MODELS}/draft") -> None:
    """Measure P_b at several temperatures: decode with one level, count which child is accepted.

    out:   the JSON file to make
    draft: the small model
    """
    small = draft_for(model, tokenizer, draft)
    longest = min(map(context_length, (model, small))) - TOKENS
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if not fitting:
        raise InputError(f"expected prompts of at most {longest} tokens, got none")
    lms = [CachedLM(x, len(tokenizer)) for x in (model, small)]
    one_level = shape_of([-1] + [0] * min(B, len(tokenizer)))
    P = {}
    for t in TEMPERATURES:
        log = []
        sample = Sampler(t)
        for prompt in tqdm(fitting, desc=f"temperature {t}"):
            for lm in lms:
                lm.start(prompt[:-1])
            chunks = decode(*lms, prompt[-1], lambda: one_level, sample, log)
            list(until(chunks, TOKENS, eos_ids(model, tokenizer)))  # fills the log
        P[t] = [round(sum(call["ranks"] == [b] for call in log) / len(log), 4)  # P_1 first
                for b in range(len(one_level.parents) - 1)]
    facts = {"target": known(model), "draft": known(small), "rates": P}
    out.write_text(json.dumps(facts) + "\n", encoding="utf-8")


def known(model) -> list[list[float]]:
    """Enough of a model's embeddings to know it by."""
    return [[round(x, 4) for x in row] for row in some_embeddings(model)[:16, :16].tolist()]


def load_rates(path: str, target, draft) -> dict[float, tuple[float, ...]]:
    """{temperature: P_1, P_2, …}. A rate of 0 becomes 1e-9: trees still have their nodes."""
    try:
        file = json.loads(Path(path).read_text(encoding="utf-8"))
        for model, name in (target, "target"), (draft, "draft"):
            if not belongs(torch.tensor(file[name]), model):
                raise ValueError(f"another {name}'s")
        rates = {float(t): tuple(max(x, 1e-9) for x in P) for t, P in file["rates"].items()}
        if not rates or not all(P and all(x <= 1 for x in P) for P in rates.values()):
            raise ValueError("rates from 0 to 1 at one temperature or more were expected")
        return rates
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError("expected rates that `python -m survey.sequoia calibrate` measured on "
                         f"this target and draft, got {path!r}: {error}") from error


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    drafted, accepted = (sum(r[x] for r in run.log) / len(run.log) for x in ("drafted", "accepted"))
    return f"accepted {accepted:.2f} of {drafted:.0f} drafted tokens a round"


if __name__ == "__main__":
    from cli import main
    sys.exit(main([sequoia], report, commands=[calibrate], ranges=RANGES))
