"""Sequoia drafts the tree that suits two models and a machine. It draws without replacement.

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", arXiv 2402.12374,
whose version 3 has the sections and algorithms that are named here.

    python -m survey.sequoia calibrate --draft DIR --prompts FILE --out rates.json
    python -m survey.sequoia --draft DIR --rates rates.json --prompt "..." --temperature 0.6

The draft guesses a tree, level by level, with one call for each level. The shape of the tree is
fixed before a token is drawn. It follows from the rates P_b, which are measured beforehand: P_b is
how often the b-th child of a node is the accepted one. The paper takes it to be the same at all
nodes (positional acceptance). With P = .6, .2, .1 this is the best tree of n = 7 nodes, the root
among them, with at most d = 3 levels below the root:

    root ─┬─ 1  .60 ─┬─ 3  .36 ─── 6  .216    A node's chance is its parent's times P of its rank.
          │          └─ 4  .12                The target call brings 1 + .60 + .20 + .36 + .12
          └─ 2  .20 ─── 5  .12                + .12 + .216 = 2.616 tokens on average.

    draft calls: {root}, {1, 2}, {3}          Leaves are not fed to the draft.

A dynamic program (Section 3.1) finds G(n, d). This is the most tokens that a call gives on average
with a tree of n nodes and at most d levels below its root. T(n, b) is the most tokens if the root
has b children. Each child begins a branch. The last branch has m nodes and is itself a best tree,
with one level less. The root and the other branches share the n - m other nodes:

    G(n, d) = max_b T(n, b),    T(n, b) = max_m T(n - m, b - 1) + P_b G(m, d - 1),    T(n, 0) = 1

Above, the root has b = 2 children, and the second branch is {2, 5}, m = 2 nodes:

    T(7, 2) = T(5, 1) + P_2 G(2, 2) = 2.296 + .2 · 1.6 = 2.616
    T(5, 1) = T(1, 0) + P_1 G(4, 2) = 1 + .6 · 2.16             the first branch is {1, 3, 4, 6}

As long as P_b falls with b, `best_tree` of clock.py finds the same trees, node by node. The dynamic
program also serves measured rates that rise somewhere.

The measured times of calls choose n and d (Section 4.1):

    n, d = argmax G(n, d) / (t_target(n) + Σ_levels t_draft(rows of the level))

The children of a node are drawn from the draft's q without replacement. They are tried in the order
in which they were drawn (Alg. 2):

    for each child x:  accept x with probability min(1, p(x) / q(x)), and go on below it
                       else   p <- norm(max(0, p - q))      what q did not offer
                              q(x) <- 0,  q <- norm(q)      the next child was drawn from this q
    no child accepted: draw a token from p, and end

The method is lossless: its output has the target's own distribution. This needs a shape that is
fixed before anything is drawn. Pruning unlikely draws afterwards would change their distribution,
and q would be the wrong divisor. At temperature 0 the children are the draft's likeliest tokens,
and the output is the target's greedy one. The temperature changes p and q. Top-k and top-p change
only p. If q lacked a token of p, the draft could never guess it.

Departures:
- Sizes. Paper: each draft level costs the same. Its trees have 64 to 128 nodes on an A100, and 768
  with offloading. Here: a level costs what its rows cost, and the clock tries 2 to 64 nodes and 1
  to 16 levels, in powers of two. Why: rows cost time on a CPU, and sizes in between give nearly the
  same.
- Rates. Paper: measured at the temperature of decoding. Here: those of the nearest of four
  temperatures are used. Why: one file serves all temperatures.
- Noise. Released code: noise and coins are drawn once for a text. Here: in every round. Why: rounds
  must be independent.

Left out: offloading, where the target's weights lie in main memory.
"""
import functools
import sys
from collections import deque
from itertools import chain, product
from pathlib import Path
from typing import Iterator, NamedTuple

from common import InputError, Sampler, begin, context_length, eos_ids, greedy, until, walk
from support.clock import Choice, Clock
from support.engine import EngineLM, MODELS, require, vocab_size
from support.parts import draft_for, load_facts, save_facts

import torch
from tqdm import tqdm

TEMPERATURES = (0.0, 0.3, 0.6, 1.0)  # at which rates are measured
B = 16  # children of the root while rates are measured
TOKENS = 128  # tokens of each answer on which rates are measured
RANGES = {"nodes": (2, 4, 8, 16, 32, 64), "depth": tuple(range(1, 17))}


# ---------------------------------------------------------------------------------- the tree

class Best(NamedTuple):
    """Hold the best trees of at most d levels, for one d and for every number of nodes n.

    The root is one of the n nodes. The d levels lie below it.
    """
    G: list[float]  # G[n]: how many tokens a call gives with the best tree of n nodes
    branches: list[int]  # branches[n]: how many children the root of this tree has
    # size_of_last[b][n]: how many nodes the last branch has in the best tree of n nodes whose root
    # has b children
    size_of_last: list[list[int]]


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
    # A last branch of m >= n nodes leaves no node for the root. Then n - m is replaced by 0. Entry
    # 0 of T is -inf, so that no maximum takes it.
    nodes_before = (n - m).clamp(min=0)  # [n, m]
    # A root without children gives one token: T(n, 0) = 1. A tree without a root does not exist, so
    # T(0, 0) is -inf.
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

    The nodes are numbered level by level.

    best     what `tabulate` found
    n        the most nodes, the root among them
    d        the most levels below the root
    returns  the parent of each node
    """
    parents = [-1]
    waiting = deque([(0, n, d)])  # (node, nodes of its subtree, levels below it)
    while waiting:
        node, nodes, depth = waiting.popleft()
        sizes = []
        # The last branch comes off first. The rest is the best tree that has one branch less.
        for b in range(best[depth].branches[nodes], 0, -1):
            size = best[depth].size_of_last[b][nodes]
            sizes.insert(0, size)
            nodes -= size
        for size in sizes:
            waiting.append((len(parents), size, depth - 1))
            parents.append(node)
    return parents


class Shape(NamedTuple):
    """Hold the parents of a tree and what follows from them."""
    parents: list[int]  # the parent of each node
    children: list[list[int]]  # the children of each node
    levels: list[list[int]]  # for each level its nodes with children, the rows of a draft call
    # {node with children: its number in the draft's pending tree, or -1 for the root}
    row: dict[int, int]


def shape_of(parents: list[int]) -> Shape:
    """Compute the shape of a tree.

    parents  the parent of each node, the nodes being numbered level by level
    returns  the shape
    """
    nodes = range(len(parents))
    children = [[child for child in nodes if parents[child] == node] for node in nodes]
    levels = []
    level = [0] if children[0] else []
    while level:
        levels.append(level)
        level = [x for node in level for x in children[node] if children[x]]
    row = {node: i for i, node in enumerate(chain(*levels), -1)}
    return Shape(parents, children, levels, row)


@functools.cache
def plan_sequoia(P: tuple[float, ...], sizes: tuple[int, ...],
                 depths: tuple[int, ...]) -> list[Choice]:
    """List what the clock chooses from (Section 4.1): plans that are shapes of the best trees.

    P        the rates, as for `tabulate`
    sizes    numbers of nodes to try
    depths   numbers of levels to try, each with each size
    """
    best = tabulate(P, max(sizes), max(depths))
    choices = []
    for n, d in product(sizes, depths):
        shape = shape_of(parents_of(best, n, d))
        rows = sum(map(len, shape.levels))  # a call of the draft for each level
        choices.append(Choice(shape, best[d].G[n], len(shape.parents), len(shape.levels), rows))
    return choices


# ---------------------------------------------------------------------------------- decoding

def draw_children(q_logits: torch.Tensor, k: int, sample: Sampler) -> list[list[int]]:
    """Draw k different tokens from the draft's q for each of n nodes.

    Gumbel noise is added to the logits. Then the token with the largest sum is a draw from q. The
    token with the next sum is a draw from q without the first token, and so on. At temperature 0
    there is no noise, and the tokens are the k likeliest.

    q_logits  logits of q [n, V]
    k         how many tokens a node gets
    sample    gives the noise
    returns   the tokens [n][k] in the order in which they were drawn
    """
    if sample.temperature > 0:
        noise = sample.uniform(q_logits.shape, q_logits.device).clamp(min=1e-30)
        q_logits = q_logits - (-noise.log()).log()
    return q_logits.topk(k).indices.tolist()


def draw_tree(draft: EngineLM, unseen: list[int], shape: Shape,
              sample: Sampler) -> tuple[list[int], dict[int, torch.Tensor]]:
    """Draw the tokens of a tree, with a draft call for each level.

    draft    the model that guesses
    unseen   the final tokens that the draft has not been fed, the root last
    shape    the shape of the tree
    sample   gives the temperature and the noise
    returns  ids, the token of each node, and q_logits_of. The latter has for each node with
             children the logits [V] of the q that they were drawn from.
    """
    root = unseen[-1]
    ids = [root] + [0] * (len(shape.parents) - 1)
    q_logits_of = {}
    # At temperature 0 only the order of the logits matters, and any divisor but 0 keeps it.
    temperature = 1.0 if sample.temperature == 0 else sample.temperature

    def draw(level: list[int], logits: torch.Tensor) -> None:
        logits = logits.double() / temperature
        # When all tokens with a chance have been drawn, the next children are drawn evenly from the
        # others (Alg. 2, line 14). If the logits of these were -inf, their q would be 0 / 0.
        logits = logits.clamp(min=-1e9)
        k = max(len(shape.children[node]) for node in level)
        for node, draws in zip(level, draw_children(logits, k, sample)):
            # A node may have fewer children than k. It takes the first draws.
            for child, token in zip(shape.children[node], draws):
                ids[child] = token
        q_logits_of.update(zip(level, logits))
    # The first call feeds all unseen tokens in a chain. The root is the last of them, and only its
    # logits are needed. These tokens are final, so they join the context at once.
    draw([0], draft.forward(unseen)[-1:])
    draft.commit(range(len(unseen)))
    for level in shape.levels[1:]:
        parent_rows = [shape.row[shape.parents[node]] for node in level]
        draw(level, draft.forward([ids[node] for node in level], parent_rows))
    return ids, q_logits_of


def verify(p: torch.Tensor, q_logits: torch.Tensor, draws: list[int],
           sample: Sampler) -> tuple[int | None, torch.Tensor]:
    """Try the children of a node in draw order (Alg. 2).

    The order matters, because each child was drawn from the q that is left when its turn comes.

    p         the target's distribution [V] after the node
    q_logits  logits [V] of the draft's distribution, which are changed in place
    draws     the children's tokens in the order in which they were drawn
    sample    flips the coins
    returns   the index of the accepted draw, or None if no draw was accepted, and what is left of
              p [V]
    """
    coins = sample.uniform(len(draws), p.device)
    for i, r in enumerate(coins):
        # Line 16: normalise what is left of q. The paper does this at the end of its loop, for the
        # next child.
        q = q_logits.softmax(-1)
        # Line 6: accept with probability p(x) / q(x).
        if r < p[draws[i]] / q[draws[i]]:
            return i, p
        # Line 9: p keeps what q did not offer. Where p and q are equal, nothing would be left, and
        # only rounding can have rejected the draw. Then p stays as it is.
        left = (p - q).clamp(min=0)
        if left.sum() > 0:
            p = left / left.sum()
        # Line 10: the next child was drawn from a q without this token.
        q_logits[draws[i]] = -torch.inf
    return None, p


def sample_path(ids: list[int], shape: Shape, logits: torch.Tensor, q_logits_of: dict,
                sample: Sampler) -> tuple[list[int], list[int]]:
    """Verify a tree: go from node to node as long as a child is accepted, then draw one more token.

    ids          the token of each node
    shape        the shape of the tree
    logits       the target's logits [n, V] after each node
    q_logits_of  what `draw_tree` returned
    sample       makes p of the target's logits, and draws
    returns      path, the accepted nodes with the root first, and chunk, the accepted tokens and
                 the one that was drawn last
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
            return path, [ids[x] for x in path[1:]] + sample.draw(p[None]).tolist()
        path.append(children[accepted])


def decode_trees(target: EngineLM, draft: EngineLM, root: int, choices: list[Choice],
                 clock: Clock, sample: Sampler, log: list | None) -> Iterator[list[int]]:
    """Run rounds without end, each with a tree, and yield their chunks.

    target   a model that has cached the text before the root
    draft    a model that has cached the same text
    root     the last token of the text
    choices  what `plan_sequoia` returned
    clock    it chooses one of them for each round
    sample   the sampler of the target, whose temperature the draft shares
    log      a list that gets {"drafted", "accepted", "ranks"} for each round, or None. The ranks
             say which child of its parent each accepted node was, from 0.
    yields   chunks, each the accepted tokens and one more
    """
    unseen = [root]  # final tokens that the draft has not been fed
    while True:
        shape = clock.choose(lambda: choices)
        ids, q_logits_of = draw_tree(draft, unseen, shape, sample)
        logits = target.forward(ids, shape.parents)  # [n, V]
        if sample.temperature == 0:
            path, chunk = walk(ids, shape.parents, sample(logits))
        else:
            path, chunk = sample_path(ids, shape, logits, q_logits_of, sample)
        target.commit(path)
        # The draft keeps its rows of the path. The root's row is in the context already. The draft
        # was fed no leaf. So a leaf at the end of the path is unseen, and the last token of the
        # chunk always is.
        fed = [node for node in path if node in shape.row]  # all of the path but a leaf
        draft.commit(shape.row[node] for node in fed[1:])
        unseen = [*(ids[node] for node in path[len(fed):]), chunk[-1]]
        clock.note(len(shape.levels), sum(map(len, shape.levels)))
        if log is not None:
            ranks = [shape.children[above].index(node) for above, node in zip(path, path[1:])]
            log.append({"drafted": len(ids) - 1, "accepted": len(ranks), "ranks": ranks})
        yield chunk


def sequoia(target: EngineLM, draft: EngineLM, prompt: list[int], *, nodes: int = 0, depth: int = 0,
            rates: str = f"{MODELS}/sequoia.json", sample: Sampler = greedy,
            log: list | None = None) -> Iterator[list[int]]:
    """Draft the best tree for this pair of models and this machine; verify it in one target call.

    nodes: nodes of a tree, the root among them, 0 to 128. With 0, as many as are fastest by the
           clock
    depth: the most levels below the root, 0 to 127. With 0, as many as are fastest by the clock
    rates: the file of this pair's acceptance rates, which `calibrate` made

    Yields chunks of 1 to depth + 1 tokens; logs {"drafted", "accepted", "ranks"} a round.

    The "ranks" say which child of its parent each accepted node was, from 0. The same seed draws
    the same tokens only if nodes and depth are given, because the clock chooses anew in each run.
    """
    require(nodes != 1, "nodes", "2 to 128, or 0", nodes)
    measured = target.once(load_rates, rates, target.model, draft.model)
    nearest = min(measured, key=lambda t: abs(t - sample.temperature))
    P = measured[nearest]
    prompt = begin(prompt, target, draft)
    sizes = (nodes,) if nodes else RANGES["nodes"]
    depths = (depth,) if depth else RANGES["depth"]
    choices = plan_sequoia(P, sizes, depths)
    clock = target.once(Clock, target, draft, of=(P, sizes, depths))
    yield from decode_trees(target, draft, prompt[-1], choices, clock, sample, log)


# --------------------------------------------------------------------------------- the rates

def calibrate(model, tokenizer, prompts: list[list[int]], *, out: Path,
              draft: str = f"{MODELS}/draft") -> None:
    """Decode with trees of one level, and measure how often each child is accepted.

    The rate of the b-th child is P_b. The rates are measured at several temperatures, without top-k
    and top-p. They are used for all levels of a tree.

    out:   the JSON file to make
    draft: the small model
    """
    small = draft_for(model, tokenizer, draft)
    longest = min(map(context_length, (model, small))) - TOKENS
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if not fitting:
        raise InputError(f"expected prompts of at most {longest} tokens, got none")
    vocab = vocab_size(model, tokenizer)
    lms = [EngineLM(x, vocab) for x in (model, small)]
    one_level = [Choice(shape_of([-1] + [0] * B), 1.0, 1 + B, 1, 1)]
    P = {}
    for temperature in TEMPERATURES:
        log = []
        sample = Sampler(temperature)
        for prompt in tqdm(fitting, desc=f"temperature {temperature}"):
            begin(prompt, *lms)
            chunks = decode_trees(*lms, prompt[-1], one_level, Clock(lms[0]), sample, log)
            for _ in until(chunks, TOKENS, eos_ids(model, tokenizer)):
                pass  # only the log is read
        counts = [sum(record["ranks"] == [b] for record in log) for b in range(B)]
        P[temperature] = [round(count / len(log), 4) for count in counts]
    save_facts(out, {"target": model, "draft": small}, rates=P)


def load_rates(path: str, target, draft) -> dict[float, tuple[float, ...]]:
    """Read the rates of a pair of models.

    A rate of 0 becomes 1e-9. Otherwise a child of this rank would bring nothing, and a tree would
    have fewer nodes than were asked for.

    path     the file that `calibrate` made
    target   the target's model
    draft    the draft's model
    returns  {temperature: (P_1, P_2, …)}. InputError if the file is damaged, or for other models
    """
    def parse(facts: dict) -> dict[float, tuple[float, ...]]:
        return {float(t): tuple(max(x, 1e-9) for x in P) for t, P in facts["rates"].items()}
    expected = "rates that `python -m survey.sequoia calibrate` measured on this target and draft"
    return load_facts(path, {"target": target, "draft": draft}, expected, parse)


if __name__ == "__main__":
    from cli.commands import main  # the command line is in cli/, a folder of this project
    sys.exit(main([sequoia], commands=[calibrate], ranges=RANGES))
