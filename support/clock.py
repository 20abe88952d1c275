"""This file chooses how large a tree is: what makes the most tokens a second on this machine.

A larger tree gives more tokens and costs more. The methods that plan trees know how often each
guess is right. This file measures what calls take here, and compares.

    rate      how often a guess is accepted whose parent was
    chance    how often a node is accepted: the product of the rates along its path
    tokens    to be expected of a call: the sum of the chances of all nodes, 1 of the root included
    speed     tokens / (seconds of the call + seconds of the guessing)
"""
import heapq
import timeit
from typing import Callable, Iterable, Iterator, NamedTuple

from common import CachedLM

import torch

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # rows of the calls that the clock measures
MASK_ROWS = 64  # the most rows of a call with masks after each node


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

    accept    accept[depth][rank] is the rate at which the child of this rank is accepted, if its
              parent is accepted, which is a node of this depth
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


def time_calls(lm: CachedLM, most: int) -> list[tuple[int, float]]:
    """Measure what calls of some widths take at the present length of the context.

    most      a number of rows, 128 or fewer. The widest call is the narrowest of WIDTHS that has
              this many rows or more
    returns   (rows, seconds) of each width, the least seconds that one of its calls took
    """
    least = {width: torch.inf for width in WIDTHS if width < 2 * most}
    # All widths take turns, four times each, so that a busy moment of the machine meets all alike.
    for n in 4 * [*least]:
        seconds = timeit.timeit(lambda: lm.forward([0] * n, counts=False), number=1)
        least[n] = min(least[n], seconds)
        lm.truncate(lm.length)
    return [*least.items()]


def row_costs(lm: CachedLM, most: int) -> list[float]:
    """Measure what calls of 1 to `most` rows take at the present length of the context.

    most      how many rows, 128 or fewer
    returns   costs, where costs[n] is what the cheapest measured call took that has n rows or more,
              in seconds
    """
    table = time_calls(lm, most)
    return [min(cost for width, cost in table if width >= n) for n in range(1 + table[-1][0])]


def count_doublings(lm: CachedLM) -> int:
    """Return a number that grows when the length of the context reaches 256, 512, 1024 and so on.

    Calls cost more on longer contexts. So what was measured is measured again at each number.
    """
    return max(lm.length, 255).bit_length()


def fastest(lm: CachedLM, name, choices: Callable[[], Iterable[tuple]]):
    """Choose what makes the most tokens a second on this machine, again after each doubling.

    name      a name for the question, as for `CachedLM.once`
    choices   a function that gives triples: a choice, the tokens to be expected of a round, and
              the seconds that the round takes
    returns   the choice with the most tokens a second
    """
    name = (name, count_doublings(lm))
    return lm.once(name, lambda: max(choices(), key=lambda x: x[1] / x[2])[0])


def fill_plan(plan: list[Node], root: int, guess: Callable) -> tuple[list[int], list[int]]:
    """Put tokens into a planned tree.

    A node for which there is no guess of its rank is left out, with all nodes below it.

    plan      the nodes of the planned tree, the root first
    root      the token of node 0
    guess     guess(node, token) gives the guesses for a planned node after its parent's token, the
              likeliest first
    returns   ids and parents of the nodes that are kept
    """
    ids, parents = [root], [-1]
    built = {0: 0}  # for each planned node that is kept its number in the tree
    for i, node in enumerate(plan[1:], 1):
        if node.parent not in built:
            continue
        parent = built[node.parent]
        guesses = guess(node, ids[parent])
        if node.rank < len(guesses):
            built[i] = len(ids)
            ids.append(guesses[node.rank])
            parents.append(parent)
    return ids, parents


# ------------------------------------------------------- a tree with masks after each node (BiTA)

def list_mask_trees(target: CachedLM, accept: list[list[float]]) -> Iterator[tuple]:
    """Yield the trees that `bita --tree best` has to choose from, for `fastest`.

    target   the model, whose calls are timed
    accept   accept[j][rank]: how often the guess of this rank of mask j + 1 is right. It is the
             rate for a node of depth j, as in bita's `Tuning`
    yields   a pair (nodes, M), the tokens to be expected of a call, and the seconds of the call.
             Each node has M masks after it, and is at most M levels below the root
    """
    costs = row_costs(target, MASK_ROWS)
    for M in range(len(accept) + 1):
        tree = best_tree(accept[:M], MASK_ROWS // (1 + M))
        for n in range(1, len(tree) + 1):
            tokens = sum(node.chance for node in tree[:n])
            yield (tree[:n], M), tokens, costs[n * (1 + M)]  # a node and its masks are 1 + M rows


def fill_tree(plan: list[Node], candidates: list[list[int]],
              root: int) -> tuple[list[int], list[int]]:
    """Put tokens into a planned tree. Levels for which there are no candidates are left out.

    candidates   for each level below the root its likeliest tokens, the best first

    The other arguments, and what is returned, are those of `fill_plan`.
    """
    levels = dict(enumerate(candidates, 1))
    return fill_plan(plan, root, lambda node, token: levels.get(node.depth, []))
