"""Sequoia drafts the tree that suits a pair of models and a machine, drawn without replacement.

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", arXiv 2402.12374

    python -m survey.sequoia calibrate --draft DIR --prompts FILE --out rates.json
    python -m survey.sequoia --draft DIR --rates rates.json --prompt "..." --temperature 0.6

The draft guesses a tree, level by level, with one call for each level. Its shape is fixed before a
token is drawn. P_b, measured beforehand, is how often the b-th child of a node is the accepted one.
With P = .6, .2, .1 this is the best tree of n = 7 nodes in at most d = 3 levels:

    root ─┬─ 1  .60 ─┬─ 3  .36 ─── 6  .216    A node's chance is its parent's times P of its rank.
          │          └─ 4  .12                The target call brings 1 + .60 + .20 + .36 + .12
          └─ 2  .20 ─── 5  .12                + .12 + .216 = 2.616 tokens on average.

    draft calls: {root}, {1, 2}, {3}          Leaves are not fed to the draft.

A dynamic program finds G(n, d), the most tokens a call that n nodes in d levels give (Section 3.1
of version 3). T(n, b) is the same with b branches below the root. The last branch has m nodes, and
the other branches share the rest:

    G(n, d) = max_b T(n, b),    T(n, b) = max_m T(n - m, b - 1) + P_b G(m, d - 1),    T(n, 0) = 1

Above, the second branch has m = 2 nodes: T(7, 2) = T(5, 1) + P_2 G(2, 2) = 2.296 + .2 · 1.6. The
measured times of calls choose n and d (Section 4.1):

    n, d = argmax G(n, d) / (t_target(n) + Σ_levels t_draft(rows of the level))

The children of a node are drawn from the draft's q without replacement, and tried in that order:

    accept x with probability min(1, p(x) / q(x));                                        Alg. 2
    else p <- norm(max(0, p - q)), q(x) <- 0, q <- norm(q); after the last child draw from p

Lossless: the output has the target's own distribution. This needs a fixed shape, because the
children of a tree that was pruned by what was drawn are no sample of q any more. At temperature 0
the children are the draft's likeliest tokens, and the output is the target's greedy one. The
temperature is for p and q. Top-k and top-p are for p alone.

Departures (paper or released code / here / why):
- all draft levels cost the same / a level costs what its rows cost / rows are not free on a CPU.
- 64 to 128 nodes on an A100, 768 with offloading / the clock tries 2 to 64 nodes, and --nodes takes
  at most 128 / rows are not free on a CPU, and no call of more than 128 rows is timed.
- rates are measured at the temperature of decoding / they are measured at four temperatures, and
  the nearest one counts / one file serves all temperatures.
- the released code draws its noise once a text / in every round / rounds must be independent.

Left out: offloading, where the target's weights lie in main memory.
"""
import functools
import sys
from collections import deque
from itertools import product
from pathlib import Path
from typing import Callable, Iterable, Iterator, NamedTuple

from common import (WIDTHS, CachedLM, InputError, Sampler, context_length, eos_ids, fastest,
                    greedy, row_costs, until, vocab_size, walk)
from survey.parts import MODELS, draft_for, load_facts, save_facts

import torch
from tqdm import tqdm

TEMPERATURES = (0.0, 0.3, 0.6, 1.0)  # at which rates are measured
B = 16  # children of a node while rates are measured
TOKENS = 128  # tokens of each text on which rates are measured
RANGES = {"nodes": WIDTHS[1:7], "depth": tuple(range(1, 17))}  # 2 to 64 nodes, 1 to 16 levels


# ---------------------------------------------------------------------------------- the tree

class Best(NamedTuple):
    """Hold the best trees of at most d levels, for one d and for every number of nodes n.

    The nodes include the root, and the levels lie below it.
    """
    G: list[float]  # [n]: the tokens of a call
    branches: list[int]  # [n]: how many children the root has
    size_of_last: list[list[int]]  # [b][n]: nodes of the last branch, where the root has b


@functools.cache
def tabulate(P: tuple[float, ...], N: int, D: int) -> list[Best]:
    """Find the best trees of all sizes by a dynamic program (Alg. 1 and 4).

    P        P_1, P_2, …, how often each child of a node is the accepted one
    N        the most nodes
    D        the most levels below the root
    returns  [d]: the best trees of at most d levels, for d = 0 … D
    """
    n = torch.arange(N + 1)[:, None]
    m = torch.arange(1, N + 1)
    # Where a last branch of m nodes leaves nothing, n - m points at entry 0, which is no tree.
    nodes_before = (n - m).clamp(min=0)  # [n, m]
    # A root alone gives one token. There is no tree without it, so that n = 0 is never chosen.
    alone = torch.tensor([-torch.inf] + [1.0] * N, dtype=torch.float64)
    found = [Best(alone.tolist(), [0] * (N + 1), [])]
    G = alone  # [n]: G(n, d - 1)
    for _ in range(D):
        T = [alone]  # [b][n]: T(n, b)
        size_of_last = [[]]
        for P_b in P:
            tokens = T[-1][nodes_before] + P_b * G[1:]  # [n, m]: Alg. 1, line 9
            most, column = tokens.max(1)
            T.append(most)
            size_of_last.append(m[column].tolist())
        G, branches = torch.stack(T).max(0)  # line 11
        found.append(Best(G.tolist(), branches.tolist(), size_of_last))
    return found


def parents_of(best: list[Best], n: int, d: int) -> list[int]:
    """Build a best tree from what the dynamic program noted.

    best     what `tabulate` found
    n        the most nodes, with the root
    d        the most levels below the root
    returns  the parent of each node, the nodes being numbered level by level
    """
    parents = [-1]
    waiting = deque([(0, n, d)])  # (node, nodes of its subtree, levels below it)
    while waiting:
        node, nodes, depth = waiting.popleft()
        sizes = []
        for b in range(best[depth].branches[nodes], 0, -1):  # the last branch comes off first
            size = best[depth].size_of_last[b][nodes]
            sizes.insert(0, size)
            nodes -= size
        for size in sizes:
            waiting.append((len(parents), size, depth - 1))
            parents.append(node)
    return parents


class Shape(NamedTuple):
    """Hold the parents of a tree and what follows from them."""
    parents: list[int]
    children: list[list[int]]
    levels: list[list[int]]  # the nodes with children by level: the rows of each draft call
    row: dict[int, int]  # {node with children: its row, counted through all draft calls}


def shape_of(parents: list[int]) -> Shape:
    """Compute the shape of a tree from the parents of its nodes."""
    nodes = range(len(parents))
    children = [[child for child in nodes if parents[child] == node] for node in nodes]
    levels = []
    level = [0] if children[0] else []
    while level:
        levels.append(level)
        level = [x for node in level for x in children[node] if children[x]]
    row = {node: i for i, node in enumerate(node for level in levels for node in level)}
    return Shape(parents, children, levels, row)


def list_plans(P: tuple[float, ...], sizes: Iterable[int], depths: Iterable[int], target: CachedLM,
               draft: CachedLM) -> Iterator[tuple]:
    """Yield what `fastest` chooses from: (shape, expected tokens, seconds) of trees (Section 4.1).

    P        the rates, as for `tabulate`
    sizes    numbers of nodes to try
    depths   numbers of levels to try, each with each size
    """
    best = tabulate(P, max(sizes), max(depths))
    target_costs = row_costs(target, max(sizes))
    draft_costs = row_costs(draft, max(sizes))
    for n, d in product(sizes, depths):
        shape = shape_of(parents_of(best, n, d))
        seconds = target_costs[len(shape.parents)]
        seconds += sum(draft_costs[len(level)] for level in shape.levels)
        yield shape, best[d].G[n], seconds


# ---------------------------------------------------------------------------------- decoding

def draw_children(q_logits: torch.Tensor, k: int, sample: Sampler) -> list[list[int]]:
    """Draw k different tokens from the draft's q for each of n nodes.

    With Gumbel noise the largest logit is a draw from q, the next one a draw from the rest of q,
    and so on. At temperature 0 there is no noise, and the tokens are the k likeliest.

    q_logits  [n, V]: logits of q
    k         how many tokens a node gets
    returns   [n][k]: the tokens in draw order
    """
    if sample.temperature > 0:
        noise = sample.uniform(q_logits.shape, q_logits.device).clamp(min=1e-30)
        q_logits = q_logits - (-noise.log()).log()
    return q_logits.topk(k).indices.tolist()


def grow(draft: CachedLM, unseen: list[int], shape: Shape,
         sample: Sampler) -> tuple[list[int], dict[int, torch.Tensor]]:
    """Draw the tokens of a tree, with a draft call for each level.

    unseen   the final tokens that the draft has not been fed, the root last
    shape    the tree
    returns  ids, the token of each node, and q_logits_of, {node: logits [V] of its children's q}
    """
    root = unseen[-1]
    ids = [root] + [0] * (len(shape.parents) - 1)
    q_logits_of = {}
    temperature = 1.0 if sample.temperature == 0 else sample.temperature

    def draw(level: list[int], logits: torch.Tensor) -> None:
        logits = logits.double() / temperature
        # Where q has no mass left, the next children are drawn evenly (Alg. 2, line 14). With
        # logits of -inf that q would be no number.
        logits = logits.clamp(min=-1e9)
        k = max(len(shape.children[node]) for node in level)
        for node, draws in zip(level, draw_children(logits, k, sample)):
            for child, token in zip(shape.children[node], draws):  # which may be fewer than k
                ids[child] = token
        q_logits_of.update(zip(level, logits))
    first = len(unseen) - 1  # the root's row in the draft's pending tree
    draw([0], draft.forward(unseen)[-1:])
    for level in shape.levels[1:]:
        parent_rows = [first + shape.row[shape.parents[node]] for node in level]
        draw(level, draft.forward([ids[node] for node in level], parent_rows))
    return ids, q_logits_of


def verify(p: torch.Tensor, q_logits: torch.Tensor, draws: list[int],
           sample: Sampler) -> tuple[int | None, torch.Tensor]:
    """Try the children of a node in draw order (Alg. 2).

    The order matters, because each child was drawn from the q that is left when its turn comes.

    p         [V]: the target's distribution after the node
    q_logits  [V]: logits of the draft's distribution. They are changed in place
    draws     the children's tokens in draw order
    returns   the index of the accepted draw, or None, and what is left of p [V]
    """
    coins = sample.uniform(len(draws), p.device)
    for i, r in enumerate(coins):
        # Line 16: normalise what is left of q. (Here it stands at the head of the loop.)
        q = q_logits.softmax(-1)
        # Line 6: accept with probability p(x) / q(x).
        if r < p[draws[i]] / q[draws[i]]:
            return i, p
        # Line 9: p keeps what q did not offer. Where nothing is left, p and q are equal and only
        # rounding rejected the draw, so that p stays.
        left = (p - q).clamp(min=0)
        if left.sum() > 0:
            p = left / left.sum()
        # Line 10: a token is drawn once.
        q_logits[draws[i]] = -torch.inf
    return None, p


def sample_path(ids: list[int], shape: Shape, logits: torch.Tensor, q_logits_of: dict,
                sample: Sampler) -> tuple[list[int], list[int]]:
    """Go from node to node as long as a child is accepted, then draw one more token.

    ids          the token of each node
    logits       [n, V]: the target's logits after each node
    q_logits_of  what `grow` returned
    returns      path, the accepted nodes with the root first, and chunk, the tokens that are final
    """
    path = [0]
    while True:
        node = path[-1]
        p = sample.probs(logits[node])
        children = shape.children[node]
        accepted = None
        if children:
            draws = [ids[child] for child in children]
            accepted, p = verify(p, q_logits_of[node], draws, sample)
        if accepted is None:
            return path, [ids[x] for x in path[1:]] + sample.draw(p[None])
        path.append(children[accepted])


def decode(target: CachedLM, draft: CachedLM, root: int, choose: Callable[[], Shape],
           sample: Sampler, log: list | None) -> Iterator[list[int]]:
    """Run rounds without end, each with a tree, and yield their chunks.

    target   a model that has cached the text before the root
    draft    a model that has cached the same text
    root     the last token of the text
    choose   choose() returns the shape of the next tree
    log      gets {"drafted", "accepted", "ranks"} a round. The ranks say which child of its parent
             each accepted node was, from 0.
    """
    unseen = [root]  # final tokens that the draft has not been fed
    while True:
        shape = choose()
        ids, q_logits_of = grow(draft, unseen, shape, sample)
        logits = target.forward(ids, shape.parents)  # [n, V]
        if sample.temperature == 0:
            path, chunk = walk(ids, shape.parents, sample(logits))
        else:
            path, chunk = sample_path(ids, shape, logits, q_logits_of, sample)
        target.commit(path)
        # The draft keeps its rows of the path. It was never fed a leaf, so a leaf stays unseen.
        first = len(unseen) - 1  # the root's row in the draft's pending tree
        fed = [node for node in path if node in shape.row]
        draft.commit([*range(first), *(first + shape.row[node] for node in fed)])
        unseen = [ids[node] for node in path[len(fed):]]
        unseen.append(chunk[-1])
        if log is not None:
            ranks = [shape.children[above].index(node) for above, node in zip(path, path[1:])]
            log.append({"drafted": len(ids) - 1, "accepted": len(ranks), "ranks": ranks})
        yield chunk


def sequoia(target: CachedLM, draft: CachedLM, prompt: list[int], *, nodes: int = 0, depth: int = 0,
            rates: str = f"{MODELS}/sequoia.json", sample: Sampler = greedy,
            log: list | None = None) -> Iterator[list[int]]:
    """Draft the best tree for this pair of models and this machine; verify it in one target call.

    nodes: rows of a target call, the root among them. With 0, as many as are fastest by the clock
    depth: the most levels below the root. With 0, as many as are fastest by the clock
    rates: the acceptance rates of this pair, a file that `calibrate` made

    Yields chunks of 1 to depth + 1 tokens; logs {"drafted", "accepted", "ranks"} a round.

    The same seed draws the same tokens only if nodes and depth are given.
    """
    if nodes not in (0, *range(2, 129)):
        raise InputError(f"--nodes must be 2 to 128, or 0, got {nodes}")
    if not 0 <= depth < 128:
        raise InputError(f"--depth must be 1 to 127, or 0, got {depth}")
    measured = target.once((rates, draft.model),
                           lambda: load_rates(rates, target.model, draft.model))
    nearest = min(measured, key=lambda t: abs(t - sample.temperature))
    P = measured[nearest][:draft.vocab]  # a node cannot have more children than there are tokens
    for lm in (target, draft):
        lm.start(prompt[:-1])

    settings = P, nodes, depth  # the key under which `once` and `fastest` keep the shape
    sizes = [nodes] if nodes else RANGES["nodes"]
    depths = [depth] if depth else RANGES["depth"]

    def choose() -> Shape:
        if nodes and depth:
            return target.once(settings, lambda: shape_of(
                parents_of(tabulate(P, nodes, depth), nodes, depth)))
        return fastest(target, settings, lambda: list_plans(P, sizes, depths, target, draft))
    yield from decode(target, draft, prompt[-1], choose, sample, log)


# --------------------------------------------------------------------------------- the rates

def calibrate(model, tokenizer, prompts: list[list[int]], *, out: Path,
              draft: str = f"{MODELS}/draft") -> None:
    """Decode with trees of one level, and measure how often each child is accepted.

    These rates are P_b at several temperatures.

    out:   the JSON file to make
    draft: the small model
    """
    small = draft_for(model, tokenizer, draft)
    longest = min(map(context_length, (model, small))) - TOKENS
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if not fitting:
        raise InputError(f"expected prompts of at most {longest} tokens, got none")
    vocab = vocab_size(model, tokenizer)
    lms = [CachedLM(x, vocab) for x in (model, small)]
    branches = min(B, vocab)
    one_level = shape_of([-1] + [0] * branches)
    P = {}
    for temperature in TEMPERATURES:
        log = []
        sample = Sampler(temperature)
        for prompt in tqdm(fitting, desc=f"temperature {temperature}"):
            for lm in lms:
                lm.start(prompt[:-1])
            chunks = decode(*lms, prompt[-1], lambda: one_level, sample, log)
            for _ in until(chunks, TOKENS, eos_ids(model, tokenizer)):
                pass  # only the log is read
        counts = [sum(record["ranks"] == [b] for record in log) for b in range(branches)]
        P[temperature] = [round(count / len(log), 4) for count in counts]
    save_facts(out, {"target": model, "draft": small}, rates=P)


def load_rates(path: str, target, draft) -> dict[float, tuple[float, ...]]:
    """Read the rates of a pair of models.

    A rate of 0 becomes 1e-9, so that trees still get as many nodes as they may have.

    returns  {temperature: (P_1, P_2, …)}. InputError if the file is damaged, or for other models
    """
    def parse(facts: dict) -> dict[float, tuple[float, ...]]:
        rates = {float(t): tuple(max(x, 1e-9) for x in P) for t, P in facts["rates"].items()}
        if not rates or not all(P and all(x <= 1 for x in P) for P in rates.values()):
            raise ValueError("rates from 0 to 1 at one temperature or more were expected")
        return rates
    expected = "rates that `python -m survey.sequoia calibrate` measured on this target and draft"
    return load_facts(path, {"target": target, "draft": draft}, expected, parse)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    """Say what a run's rounds were like, on average."""
    drafted, accepted = (sum(r[x] for r in run.log) / len(run.log) for x in ("drafted", "accepted"))
    return f"accepted {accepted:.2f} of {drafted:.0f} drafted tokens a round"


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([sequoia], report, commands=[calibrate], ranges=RANGES))
