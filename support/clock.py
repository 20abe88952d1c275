"""This file chooses how large a tree is: what makes the most tokens a second on this machine.

A larger tree gives more tokens and costs more. The methods that plan trees know how often each
guess is right. This file learns from the calls that they make what a call takes, and compares.

    rate      how often a guess is accepted whose parent was
    chance    how often a node is accepted: the product of the rates along its path
    tokens    to be expected of a call: the sum of the chances of all nodes, 1 of the root included
    speed     tokens / (seconds of the call + seconds of the guessing)

No call is made to be timed. Any tree gives the right text, so learning is free: the first trees are
only a little too large or too small. Seconds lie near a straight line over rows. So a line through
the calls that were made, and through the pass over the prompt, also says what calls of other widths
would take:

    seconds of a call  =  a + b · rows

        │                          ·  x  the pass over the prompt, 60 rows
        │               ·
        │    · x x x                     calls of the first rounds, about 12 rows
        │ ·
        a
        └────────────────────────────    rows
"""
import heapq
import itertools
import time
from typing import Callable, Iterable, Iterator, NamedTuple

from support.engine import EngineLM

import torch

# One more row of a call takes this share of the call's fixed part, before anything is known. The
# numbers are those of 10M to 1B parameters on two CPU cores, and of 8B on a GPU.
SLOPES = {"cpu": 0.03, "cuda": 0.003}
FADE = 0.98  # each new note multiplies the weight of the older ones by this, since contexts grow
PRIOR = 64  # two imagined notes, of 0 and of this many rows, keep the line from tilting by chance
EVERY = 64  # a choice is made again after as many passes, at the latest
MOST = 64  # the most nodes of a tree
RANKS = 10  # the most children of a node


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


# ------------------------------------------------------------------------------------- the clock

class Costs:
    """Learn what something takes by its number of rows: the line of least squares.

    slope   what a row takes as a share of the fixed part, as long as little is known
    """

    def __init__(self, slope: float):
        self.slope = slope
        self.sums = [0.0] * 5  # of 1, rows, seconds, rows², and rows · seconds, of all notes

    def note(self, rows: float, seconds: float) -> None:
        """Add a note that rows took so many seconds. At most twice the line's seconds count."""
        a, b = self.line()
        seconds = min(seconds, 2 * (a + b * rows)) if a > 0 else seconds
        new = 1.0, rows, seconds, rows * rows, rows * seconds
        self.sums = [FADE * old + x for old, x in zip(self.sums, new)]

    def line(self) -> tuple[float, float]:
        """Return a and b, in seconds. Both are 0 if nothing was noted."""
        n, x, y, xx, xy = self.sums
        if n == 0:
            return 0.0, 0.0
        # The imagined notes lie on a line of the given slope through the middle of the others.
        a = y / (n + self.slope * x)
        far = a * (1 + self.slope * PRIOR)
        n, x, y, xx, xy = n + 2, x + PRIOR, y + a + far, xx + PRIOR ** 2, xy + PRIOR * far
        b = max(0.0, (n * xy - x * y) / (n * xx - x * x))
        return max(0.0, (y - b * x) / n), b


class Choice(NamedTuple):
    """Describe a round that a method could make."""
    plan: object  # what the method needs to make it
    tokens: float  # to be expected of the round
    rows: float  # of the call
    steps: float = 0  # of the guessing, such as passes of a draft
    guesses: float = 0  # rows of all steps together


class Clock:
    """Choose, round after round, what makes the most tokens a second.

    A method asks `choose` when a round begins, and says `note` when it ends:

        while True:
            tree = clock.choose(lambda: …)
            …                                    guess, verify and commit
            clock.note(1, len(tree))
            yield chunk

    lm        the model that verifies, whose passes are the calls
    draft     a model whose passes are the steps of the guessing. Those over the prompt are the
              first notes of what a step takes. None: guesses are free before the first note
    of        what guesses, by which `once` tells the clocks of a model apart
    calls     the Costs of calls by their rows
    steps     the Costs of steps of the guessing by their rows, with all else in a round
    """

    def __init__(self, lm: EngineLM, draft: EngineLM | None = None, of=None):
        slope = SLOPES.get(lm.weight.device.type, SLOPES["cuda"])
        self.lm, self.calls, self.steps = lm, Costs(slope), Costs(slope)
        for rows, _, seconds in draft.passes if draft else ():
            self.steps.note(rows, seconds)
        self.seen = 0  # passes of the model that are noted
        self.due = 0  # the number of passes at which is chosen again
        self.plan = None

    def choose(self, list_choices: Callable[[], Iterable[Choice]]):
        """Begin a round, and return the plan of the choice with the most tokens a second.

        It chooses again once the passes are twice as many, and at the latest after EVERY more.

        list_choices   a function that gives the choices
        """
        self.begin()
        if self.plan is None or self.seen >= self.due:
            (a, b), (c, d) = self.calls.line(), self.steps.line()

            def rate(choice: Choice) -> float:
                _, tokens, rows, steps, guesses = choice
                # Before anything is known all takes no time, and most tokens are best.
                return tokens / (1e-9 + a + b * rows + c * steps + d * guesses)
            self.plan = max(list_choices(), key=rate).plan
            self.due = self.seen + min(self.seen, EVERY)
        return self.plan

    def begin(self) -> None:
        """Start a round, and note the passes over the prompt, if there were any."""
        self.read_passes()
        self.began = time.perf_counter()

    def read_passes(self) -> float:
        """Note the passes that the model has made meanwhile; return their seconds."""
        new = self.lm.passes[self.seen:]
        self.seen += len(new)
        for rows, _, seconds in new:
            self.calls.note(rows, seconds)
        return sum(seconds for _, _, seconds in new)

    def note(self, steps: int, guesses: float) -> None:
        """End a round, and add a note of the time that it took beside the model's passes.

        steps     of the guessing. They are taken to be alike
        guesses   rows of all steps together
        """
        seconds = time.perf_counter() - self.began - self.read_passes()
        for _ in range(steps):
            self.steps.note(guesses / steps, max(0.0, seconds) / steps)


def list_sizes(tree: list[Node]) -> Iterator[Choice]:
    """Yield the sizes of a tree that one step fills: choices whose plans are its first n nodes.

    tree   the nodes, the likeliest first
    """
    for n, tokens in enumerate(itertools.accumulate(node.chance for node in tree), 1):
        yield Choice(tree[:n], tokens, n, 1, n)


# ------------------------------------------------------------------------------ planned trees

def rank_tokens(logits: torch.Tensor, vocab: torch.Tensor) -> tuple[list, list]:
    """Return the RANKS likeliest tokens of logits [..., V'], and their chances, both [..., RANKS].

    vocab   the tokens that the logits stand for, V' or more
    """
    # A draft that overflows gives NaN, which has no order. Such guesses get a chance of 0.
    chances = logits.float().softmax(-1).nan_to_num(0.0)
    best = chances.topk(min(RANKS, chances.shape[-1]))
    # Both come from a GPU at once. A double holds every token exactly.
    tokens, chances = torch.stack([vocab[best.indices].double(), best.values.double()]).cpu()
    return tokens.long().tolist(), chances.tolist()


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


def keep_nodes(ids: list[int], parents: list[int], kept: list[int]) -> tuple[list, list]:
    """Keep some nodes of a tree.

    kept      the nodes, each after its parent; the first one is the root
    returns   their ids and parents, in this order
    """
    new_number = {old: new for new, old in enumerate(kept)}
    return [ids[x] for x in kept], [-1, *(new_number[parents[x]] for x in kept[1:])]
