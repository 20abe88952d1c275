"""Sequoia drafts the tree that suits two models and a machine. It draws without replacement.

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", arXiv 2402.12374,
whose version 3 has the sections and algorithms that are named here.

    python -m survey.sequoia --draft DIR --prompt "..." --temperature 0.6

The draft guesses a tree, level by level, with one call for each level. The shape of the tree is
fixed before a token is drawn. It follows from the rates P_b. P_b is how often the b-th child of a
node is the accepted one. The paper takes it to be the same at all nodes (positional acceptance).
With P = .6, .2, .1 this is the best tree of n = 7 nodes, the root among them, with at most d = 3
levels below the root:

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

As long as P_b falls with b, `best_tree` of trees.py finds the same trees, node by node.

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
  with offloading. Here: a level costs what its rows cost, and the clock tries 2 to 64 nodes, in
  powers of two, and 1 to 16 levels. Why: rows cost time on a CPU, and sizes in between give nearly
  the same.
- Rates. Paper: measured beforehand, for each pair of models and each temperature. Here: learnt
  while decoding (trees.py). Why: so they are those of the text at hand, at its temperature.
- Noise. Released code: noise and coins are drawn once for a text. Here: in every round. Why: rounds
  must be independent.

Left out: offloading, where the target's weights lie in main memory.
"""
from itertools import chain, product
from typing import Iterator, NamedTuple, Sequence

from common import Sampler, begin, greedy, walk
from support.clock import Choice, recall
from support.engine import EngineLM, log_round, require, run_as_program

import torch

PRIOR = 0.9  # for `Acceptance`. The embedded draft guesses 0.91 of the embedded target's tokens
RANGES = {"nodes": (2, 4, 8, 16, 32, 64), "depth": tuple(range(1, 17))}


# ---------------------------------------------------------------------------------- the tree

class Best(NamedTuple):
    """Hold the best trees of at most d levels, for one d and for every number of nodes n.

    The root is one of the n nodes. The d levels lie below it.
    """
    G: list[float]  # G[n]: how many tokens a call gives with the best tree of n nodes
    branches: list[list[int]]  # branches[n]: how many nodes each branch of this tree has


def tabulate(P: Sequence[float], N: int, D: int) -> list[Best]:
    """Find the best trees of all sizes by a dynamic program (Alg. 1 and 4).

    P        P_1, P_2, …, how often each child of a node is the accepted one
    N        the most nodes
    D        the most levels below the root
    returns  [d]: the best trees of at most d levels, for d = 0 … D
    """
    # A root without children gives one token: T(n, 0) = 1. A tree without a root does not exist, so
    # T(0, 0) is -inf, and so is T(n, b) of all n below 0, which stand before it.
    none = torch.full((N,), -torch.inf, dtype=torch.float64)
    alone = torch.tensor([-torch.inf] + [1.0] * N, dtype=torch.float64)  # [n]
    found = [Best(alone.tolist(), [[]] * (N + 1))]
    G = alone  # [n]: G(n, d - 1)
    for _ in range(D):
        T = [alone]  # [b][n]: T(n, b)
        sizes = [[[]] * (N + 1)]  # [b][n]: the nodes of each branch of the tree that gives T(n, b)
        for P_b in P:
            # Row n of the first term is T(n - m, b - 1) for m = N, …, 1.
            others = torch.cat([none, T[-1]]).unfold(0, N, 1)[:-1]
            most, column = (others + P_b * G[1:].flip(0)).max(1)  # over m: Alg. 1, line 9
            T.append(most)
            last = (N - column).tolist()  # m, the nodes of branch b. If T is -inf it means nothing
            sizes.append([[*sizes[-1][n - m], m] for n, m in enumerate(last)])
        G, b = torch.stack(T).max(0)  # line 11
        found.append(Best(G.tolist(), [sizes[x][n] for n, x in enumerate(b.tolist())]))
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
    subtrees = [(n, d)]  # for each node the nodes of its subtree and the levels below it
    for node, (size, depth) in enumerate(subtrees):  # it also visits what is appended
        for branch in best[depth].branches[size]:
            parents.append(node)
            subtrees.append((branch, depth - 1))
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
    children = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    levels = []
    level = [0] if children[0] else []
    while level:
        levels.append(level)
        level = [x for node in level for x in children[node] if children[x]]
    row = {node: i for i, node in enumerate(chain(*levels), -1)}
    return Shape(parents, children, levels, row)


def plan_sequoia(P: Sequence[float], sizes: Sequence[int], depths: Sequence[int]) -> list[Choice]:
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
    token with the next sum is a draw from q without the first token, and so on. A sampler that is
    sure adds no noise.

    q_logits  logits of q [n, V]
    k         how many tokens a node gets
    sample    gives the noise
    returns   the tokens [n][k] in the order in which they were drawn
    """
    if not sample.sure:
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
    returns  ids, the token of each node, and q_logits_of: for each node with children the logits
             [V] of the q that its children were drawn from
    """
    ids = unseen[-1:] + [0] * (len(shape.parents) - 1)
    q_logits_of = {}

    def draw(level: list[int], logits: torch.Tensor) -> None:
        if sample.sure:  # the winner of the draft's race is first, and then the next ones
            logits = sample.race(logits, draft.places[-len(level):])
        # At temperature 0 only the order of the logits matters, and any divisor but 0 keeps it.
        logits = logits.double() / (sample.temperature or 1.0)
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
        children = shape.children[node]
        draws = [ids[child] for child in children]  # a leaf has none
        p = sample.probs(logits[node])
        accepted, p = verify(p, q_logits_of.get(node), draws, sample)
        if accepted is None:
            return path, [ids[x] for x in path[1:]] + sample.draw(p[None]).tolist()
        path.append(children[accepted])


def sequoia(target: EngineLM, draft: EngineLM, prompt: list[int], *, nodes: int = 0, depth: int = 0,
            sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Draft the best tree for this pair of models and this machine; verify it in one target call.

    nodes: nodes of a tree, the root among them, 0 to 128. With 0, as many as are fastest by the
           clock
    depth: the most levels below the root, 0 to 127. With 0, as many as are fastest by the clock

    Yields chunks of 1 to depth + 1 tokens; logs {"guessed", "accepted"} a round.

    The same seed draws the same tokens only with nodes and depth, or with --coupling, because the
    clock chooses anew in each run.
    """
    require(nodes != 1, "nodes", "2 to 128, or 0", nodes)
    text = begin(prompt, target, draft)
    sizes = (nodes,) if nodes else RANGES["nodes"]
    depths = (depth,) if depth else RANGES["depth"]
    learnt, clock = recall(target, PRIOR, (draft,), (sizes, depths), draft)
    while True:
        # The shape is fixed by earlier rounds, before anything of this round is drawn.
        shape = clock.choose(lambda: plan_sequoia(learnt.rates(), sizes, depths))
        ids, q_logits_of = draw_tree(draft, text[draft.length:], shape, sample)
        logits = target.forward(ids, shape.parents)  # [n, V]
        if sample.sure:
            path, chunk = walk(ids, shape.parents, sample(logits, target.places))
        else:
            path, chunk = sample_path(ids, shape, logits, q_logits_of, sample)
        target.commit(path)
        learnt.learn(shape.parents, path)
        # The draft keeps its rows of the path. The root's row is in the context already. The draft
        # was fed no leaf. So a leaf at the end of the path is unseen, and the last token of the
        # chunk always is.
        draft.commit([shape.row[node] for node in path[1:] if node in shape.row])
        text += chunk
        clock.note(len(shape.levels), sum(map(len, shape.levels)))
        log_round(log, guessed=len(ids) - 1, accepted=len(path) - 1)
        yield chunk


COMMAND_LINE = dict(methods=[sequoia], ranges=RANGES)

if __name__ == "__main__":
    run_as_program(__file__)
