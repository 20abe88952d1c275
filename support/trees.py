"""This file plans trees of guesses before their tokens are known, by how often guesses are right.

    Acceptance     learns how often the guess of each rank is right, while a method decodes
    best_tree      plans the tree of the nodes that are likeliest to be accepted
    rank_tokens    gives the likeliest tokens of logits
    Growth         grows a tree by a draft's own probabilities

    rank      of a node among its siblings. The likeliest guess has rank 0
    rate      how often a guess is accepted whose parent was
    chance    how often a node is accepted: the product of the rates along its path

Nothing is measured before decoding. A method names one number, how often its best guess should be
right. Each round then shows the truth at every accepted node that had guesses below it. Here ✓ is
on the accepted nodes:

    root ✓ ─┬─ on ✓ ─┬─ the         The root's guess of rank 0 was right. Below "on" rank 0 was
            │        └─ my ✓        wrong and rank 1 right. What follows "in" is not known, since
            └─ in ─── a             "in" itself was wrong. "my" had no guesses.

    tried     rank 0: 2, rank 1: 2
    right     rank 0: 1, rank 1: 1
"""
import heapq
from itertools import accumulate
from typing import NamedTuple

import torch

RANKS = 10  # the most children of a node
TRIALS = 8  # so many imagined trials stand behind the rates before anything is known


class Node(NamedTuple):
    """Describe a node of a tree that is planned before its tokens are known."""
    chance: float  # that the node is accepted: the product of the rates along its path
    parent: int
    depth: int  # the root has depth 0
    rank: int  # among the children of its parent. The likeliest has rank 0


def best_tree(accept: list[list[float]], n: int) -> list[Node]:
    """Plan the tree of the n nodes that are likeliest to be accepted.

    A node's children are never likelier than the node itself, so the heap gives the nodes in the
    order of their chances, and each after its parent.

    accept    accept[depth][rank] is how often the child of this rank is accepted, given that its
              parent, which is at this depth, is accepted
    n         how many nodes the tree has at most, the root among them
    returns   the nodes, the root first. The first m of them are the best tree of m nodes. The sum
              of all chances is the number of tokens to be expected of a call
    """
    rates = [*accept, []]  # nodes of the last level have no children
    tree, heap = [], [(-1.0, Node(1.0, -1, 0, 0))]
    while heap and len(tree) < n:
        _, node = heapq.heappop(heap)
        tree.append(node)
        for rank, rate in enumerate(rates[node.depth]):
            child = Node(node.chance * rate, len(tree) - 1, node.depth + 1, rank)
            heapq.heappush(heap, (-child.chance, child))
    return tree


class Acceptance:
    """Learn how often the guess of each rank is right, at all levels of trees alike.

    Levels are not told apart, since deep ones are seldom reached. Only guesses below accepted nodes
    count.

    prior    how often the best guess is expected to be right. The guesses of rank 1 are expected to
             be right in a quarter of the other cases, those of rank 2 in an eighth, and so on

    hits     [RANKS], how often the guess of each rank was right
    tried    [RANKS], how often there was one
    """

    def __init__(self, prior: float):
        others = [(1 - prior) / 2 ** (rank + 1) for rank in range(1, RANKS)]
        self.hits = [TRIALS * rate for rate in (prior, *others)]
        self.tried = [TRIALS] * RANKS

    def rates(self) -> list[float]:
        """Return the rate of each rank. None is above that of the rank before it."""
        return [*accumulate((hit / n for hit, n in zip(self.hits, self.tried)), min)]

    def learn(self, parents: list[int], path: list[int], pruned: bool = False) -> None:
        """Count the guesses below each accepted node of a tree.

        parents   of all nodes. Siblings stand in the order of their ranks
        path      the accepted nodes, the root first
        pruned    whether the draft left out of the tree what it found unlikely. Such guesses count
                  as wrong, if the node has others
        """
        for node, right in zip(path, [*path[1:], -1]):
            children = [child for child, parent in enumerate(parents) if parent == node]
            if pruned and children:
                children += [None] * RANKS
            for rank, child in enumerate(children[:RANKS]):
                self.tried[rank] += 1
                self.hits[rank] += child == right


def rank_tokens(logits: torch.Tensor, vocab: torch.Tensor) -> tuple[list, list]:
    """Return the RANKS likeliest tokens of logits [..., V'], and their chances, both [..., RANKS].

    vocab   the token of each logit, [V'] or longer. A longer one has tokens whose logits were cut
    """
    # A draft that overflows gives NaN, which has no order. Such guesses get a chance of 0.
    chances = logits.float().softmax(-1).nan_to_num(0.0)
    best = chances.topk(min(RANKS, chances.shape[-1]))
    # Both come from a GPU at once. A double holds every token exactly.
    tokens, chances = torch.stack([vocab[best.indices].double(), best.values.double()]).cpu()
    return tokens.long().tolist(), chances.tolist()


class Growth:
    """Grow a tree below a root, level by level, where the n likeliest nodes are kept.

    A node's chance is the product of a draft's own probabilities along its path. A node is at most
    as likely as its parent, and comes later. So a node that is not kept now is not kept later, and
    neither are nodes below it.

    root      the token of node 0
    n         how many nodes are kept, the root among them

    kept      the nodes that are kept, the likeliest first
    newest    those of them on the newest level with a chance above 0, the likeliest first
    """

    def __init__(self, root: int, n: int):
        self.ids, self.parents, self.chances = [root], [-1], [1.0]
        self.n = n
        self.kept = self.newest = [0]

    def add_level(self, nodes: list[int], logits: torch.Tensor, vocab: torch.Tensor) -> None:
        """Give some of the newest nodes their likeliest tokens as children.

        logits   [nodes, V'], after each of these nodes
        vocab    as for `rank_tokens`
        """
        first = len(self.ids)
        for node, tokens, factors in zip(nodes, *rank_tokens(logits, vocab)):
            self.ids += tokens
            self.parents += [node] * len(tokens)
            self.chances += [self.chances[node] * p for p in factors]
        self.kept = heapq.nlargest(self.n, range(len(self.ids)), key=self.chances.__getitem__)
        self.newest = [x for x in self.kept if x >= first and self.chances[x] > 0]

    def finish(self) -> tuple[list[int], list[int]]:
        """Return ids and parents of the nodes that are kept, the likeliest first."""
        new_number = {-1: -1} | {old: new for new, old in enumerate(self.kept)}
        parents = [new_number[self.parents[x]] for x in self.kept]
        return [self.ids[x] for x in self.kept], parents
