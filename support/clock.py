"""This file chooses how large a tree is: what makes the most tokens a second on this machine.

A larger tree gives more tokens and costs more. How often each guess is right is learnt in trees.py.
This file learns from the calls that are made what a call takes, and compares.

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
import itertools
import time
from typing import Callable, Iterable, NamedTuple

from support.engine import EngineLM
from support.trees import Acceptance, best_tree

MOST = 64  # the most nodes of a tree
# One more row of a call takes this share of the call's fixed part, before anything is known. The
# numbers are those of 10M to 1B parameters on two CPU cores, and of 8B on a GPU.
SLOPES = {"cpu": 0.03, "cuda": 0.003}
FADE = 0.98  # each new note multiplies the weight of the older ones by this, since contexts grow
PRIOR = 64  # two imagined notes, of 0 and of this many rows, keep the line from tilting by chance
EVERY = 64  # a choice is made again after as many passes, at the latest


class Costs:
    """Learn what something takes by its number of rows: the line of least squares.

    slope   what a row takes as a share of the fixed part, as long as little is known
    """

    def __init__(self, slope: float):
        self.slope = slope
        self.sums = [0.0] * 5  # of 1, rows, seconds, rows², and rows · seconds, of all notes

    def note(self, rows: float, seconds: float) -> None:
        """Add a note. A time above twice the line's counts as twice: something else ran then."""
        a, b = self.line()
        seconds = min(seconds, 2 * (a + b * rows)) if a + b * rows > 0 else seconds
        new = 1.0, rows, seconds, rows * rows, rows * seconds
        self.sums = [FADE * old + x for old, x in zip(self.sums, new)]

    def line(self) -> tuple[float, float]:
        """Return a and b, in seconds. Both are 0 if nothing was noted."""
        n, x, y, xx, xy = self.sums
        if n == 0:
            return 0.0, 0.0
        # If the slope were right, y = a n + a slope x. The two imagined notes lie on this line.
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

    hybrid.py, which adds node after node to a tree, asks `find_prices` in place of `choose`. A
    method whose guesses cost nothing besides the call leaves out `note`.

    lm        the model that verifies, whose passes are the calls
    draft     a model whose passes are the steps of the guessing. Those over the prompt are the
              first notes of what a step takes. None: guesses are free before the first note
    calls     the Costs of calls by their rows
    steps     the Costs of steps of the guessing by their rows, with all else in a round
    """

    def __init__(self, lm: EngineLM, draft: EngineLM | None = None):
        slope = SLOPES.get(lm.weight.device.type, SLOPES["cuda"])
        self.lm, self.calls, self.steps = lm, Costs(slope), Costs(slope)
        for rows, _, seconds in draft.passes if draft else ():
            self.steps.note(rows, seconds)
        self.tokens, self.seconds = 0.0, 0.0  # of the latest rounds
        self.seen = 0  # passes of the model that are noted
        self.due = 0  # the number of passes at which the next choice is made

    def choose(self, list_choices: Callable[[], Iterable[Choice]]):
        """Begin a round, and return the plan of the choice with the most tokens a second.

        It chooses anew when the passes have doubled since it last chose, or EVERY more were made.

        list_choices   a function that gives the choices
        """
        self.read_passes()
        if self.seen >= self.due:
            (a, b), (c, d) = self.calls.line(), self.steps.line()

            def rate(choice: Choice) -> float:
                _, tokens, rows, steps, guesses = choice
                # Before anything is known all takes no time, and most tokens are best.
                return tokens / (1e-9 + a + b * rows + c * steps + d * guesses)
            self.plan = max(list_choices(), key=rate).plan
            self.due = self.seen + min(self.seen, EVERY)
        self.began = time.perf_counter()
        return self.plan

    def find_prices(self) -> tuple[float, float]:
        """Begin a round, and return a rate and a price for hybrid.py.

        returns  the rate, the final tokens a second of the latest rounds, and the price, how many
                 tokens could be made in the time of one more row of call and guessing. Before the
                 first round the rate is that of a call of one row, which gives one token
        """
        self.read_passes()
        self.began = time.perf_counter()
        (one, row), (_, guess) = self.calls.line(), self.steps.line()
        tokens, seconds = 1, one + row
        if self.seconds:
            tokens, seconds = self.tokens, self.seconds
        rate = tokens / max(seconds, 1e-9)
        return rate, rate * (row + guess)

    def read_passes(self) -> float:
        """Note the passes that the model has made meanwhile; return their seconds.

        Before the first round these are the passes over the prompt.
        """
        new = self.lm.passes[self.seen:]
        self.seen += len(new)
        for rows, _, seconds in new:
            self.calls.note(rows, seconds)
        return sum(seconds for _, _, seconds in new)

    def note(self, steps: int, guesses: float, tokens: int = 0) -> None:
        """End a round, and add a note of the time that it took beside the model's passes.

        steps     of the guessing. They are taken to be alike
        guesses   rows of all steps together
        tokens    how many tokens became final. Only `find_prices` reads them
        """
        seconds = time.perf_counter() - self.began
        self.tokens, self.seconds = FADE * self.tokens + tokens, FADE * self.seconds + seconds
        seconds = max(0.0, seconds - self.read_passes())
        for _ in range(steps):
            self.steps.note(guesses / steps, seconds / steps)


def recall(target: EngineLM, prior: float, guesser: tuple, sizes: tuple = (),
           draft: EngineLM | None = None) -> tuple[Acceptance, Clock]:
    """Return what a method learns while it decodes one prompt after another.

    target    the model that verifies
    prior     how often the best guess is expected to be right (trees.py)
    guesser   what guesses. Each guesser has chances of its own
    sizes     the options that say which trees there are. Each choice of them has its own clock
    draft     as for `Clock`
    """
    learnt = target.once(Acceptance, prior, key=guesser)
    return learnt, target.once(Clock, target, draft, key=(*guesser, *sizes))


def list_sizes(rates: list[float], depth: int, nodes: int = 0) -> list[Choice]:
    """Return the best trees of all sizes, for a method that fills a tree in one step.

    A tree of one node needs no step.

    rates   how often the guess of each rank is right (trees.py)
    depth   the most levels of guesses
    nodes   how many nodes a tree has, the root among them. 0: any number
    returns choices whose plans are trees
    """
    tree = best_tree([rates] * depth, nodes or MOST)
    tokens = itertools.accumulate(node.chance for node in tree)
    choices = [Choice(tree[:n], x, n, int(n > 1), n) for n, x in enumerate(tokens, 1)]
    return choices[-1:] if nodes else choices
