"""This file chooses BiTA's tree: as many nodes, and as many masks after each, as pay here."""
from typing import Iterator

from common import CachedLM
from support.clock import Choice, Clock, best_tree, fill_plan

ROWS = 64  # the most rows of a call


def plan_mask_trees(accept: list[list[float]]) -> Iterator[Choice]:
    """Yield what the clock chooses from: plans of the nodes of a tree, and M.

    accept   accept[j][rank]: how often the guess of this rank of mask j + 1 is right. It is the
             rate for a node of depth j
    yields   choices in which each node has M masks after it, and is at most M levels below the root
    """
    for M in range(len(accept) + 1):
        tree = best_tree(accept[:M], ROWS // (1 + M))
        tokens = 0.0
        for n, node in enumerate(tree, 1):
            tokens += node.chance
            yield Choice((tree[:n], M), tokens, n * (1 + M))  # a node and its masks are 1 + M rows


class MaskTrees:
    """Fill, in each call of bita.py, the tree that makes the most tokens a second on this machine.

    The measured acceptance of the masks plans it.
    """

    def __init__(self):
        self.clock = None

    def __call__(self, target: CachedLM, accept: list[list[float]], candidates: list[list[int]],
                 root: int) -> tuple[list[int], list[int], int]:
        """Choose a tree and fill it.

        target       the model that verifies
        accept       as for `plan_mask_trees`
        candidates   for each mask of the last call its likeliest tokens, the best first
        root         the token of node 0
        returns      ids and parents of the nodes, and how many masks come after each
        """
        self.clock = self.clock or Clock(target)
        plan, M = self.clock.choose(lambda: plan_mask_trees(accept))
        levels = dict(enumerate(candidates, 1))
        ids, parents = fill_plan(plan, root, lambda node, token: levels.get(node.depth, []))
        return ids, parents, M
