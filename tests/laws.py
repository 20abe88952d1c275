"""These functions compute the law of an output, a distribution of tokens, by enumeration. They also
test counts against a law.

    law(logits_of, sample, prompt, n)    what n sampled tokens must follow: the chain rule
    random_pairs()                       pairs p, q that a rule is tried on
    chi_square_ok(counts, law)           whether these counts may come from this law
    outcomes(experiment)                 every way in which an experiment of choices can end, with
                                         its probability, which is exact: nothing is drawn
    law_of_node(judge, p)                that of the token after one node
    Choosing(choose)                     a sampler whose draws and coins are such choices"""
import itertools
import math

import torch

from common import Sampler


def law(logits_of, sample, prompt: list[int], n: int, vocab: int = 4) -> torch.Tensor:
    """Compute the probability of each continuation of n tokens, [vocab ** n], by the chain rule."""
    result = torch.ones([vocab] * n)
    for i in range(n):
        for tokens in itertools.product(range(vocab), repeat=i):
            probs = sample.probs(logits_of([*prompt, *tokens]))
            result[tokens] *= probs.view(vocab, *[1] * (n - 1 - i))
    return result.flatten()


def random_pairs():
    """Yield pairs of distributions p, q that are close, far apart, equal, one-hot or have zeros."""
    torch.manual_seed(0)
    for scale in (0.3, 1.0, 3.0):
        yield tuple((scale * torch.randn(4)).double().softmax(-1) for _ in "pq")
    p, (x, y, z, _) = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), torch.eye(4).double()
    yield from ((p, p), ((x + y) / 2, p), (p, 0.2 * y + 0.8 * z), (z, z), (z, y))


def chi_square_ok(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Pearson's test of counts [k] against expected probabilities [k] at a false-failure
    probability of 1e-6 (normal deviate 4.75, by the Wilson-Hilferty approximation of the quantile).
    Cells expected fewer than 5 times are pooled."""
    expected = expected.double() * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]]).double()
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    k = len(expected) - 1
    most = k * (1 - 2 / (9 * k) + 4.75 * (2 / (9 * k)) ** 0.5) ** 3
    return bool(((counts - expected) ** 2 / expected).sum() < most)


def outcomes(experiment):
    """Yield (probability, result) of every way in which experiment(choose) can end, where
    choose(odds) is i with probability odds[i]."""
    todo = [[]]  # beginnings of the lists of choices
    while todo:
        script, taken, weights = todo.pop(), [], []

        def choose(odds):
            if len(taken) == len(script):
                first, *others = [i for i, odd in enumerate(odds) if odd > 0]
                todo.extend([*taken, i] for i in others)
                script.append(first)
            taken.append(script[len(taken)])
            weights.append(odds[taken[-1]])
            return taken[-1]
        result = experiment(choose)
        yield math.prod(weights), result


def law_of_node(judge, p: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Compute the law [V] of the token after one node, and how often it is a guess, where
    judge(choose) gives both."""
    found, accepted = torch.zeros_like(p), 0.0
    for chance, (token, guessed) in outcomes(judge):
        found[token] += chance
        accepted += chance * guessed
    return found, accepted


WARM = 3.0  # the temperature: target and draft differ in many tokens, and none is rare


class Coins:
    """Holds numbers drawn from [0, 1). Whether one is below a chance is a choice.

    Each number is compared with one chance. If it were compared again, two events would have the
    same coin. A rule may ask only whether a coin is below: a coin of 0 is not above a chance of 0.

    choose   as in `outcomes`
    unused   bool, as the numbers lie: whether each still waits for its chance. A part of the coins
             has a view of it
    """

    def __init__(self, choose, unused: torch.Tensor):
        self.choose, self.unused = choose, unused

    def __getitem__(self, part):
        return Coins(self.choose, self.unused[part])

    def __lt__(self, chances) -> torch.Tensor:
        chances = torch.as_tensor(chances).nan_to_num(0).clamp(max=1)
        assert chances.shape == self.unused.shape and self.unused.all(), "a coin for each chance"
        self.unused.zero_()
        below = [self.choose([1 - chance, chance]) for chance in chances.flatten().tolist()]
        return torch.tensor(below).view_as(chances) == 1


class Choosing(Sampler):
    """Sample by choices: choose(odds) gives i with probability odds[i] (`outcomes`)."""

    def __init__(self, choose):
        super().__init__(WARM)
        self.choose = choose

    def draw(self, probs):
        return torch.tensor([self.choose(row) for row in probs.double().tolist()])

    def __call__(self, logits, places):
        return self.draw(self.probs(logits)).tolist()

    def uniform(self, shape, device):
        return Coins(self.choose, torch.ones(shape, dtype=torch.bool))


def draw_by_choices(q_logits: torch.Tensor, k: int, sample: Choosing) -> list[list[int]]:
    """Stand in for Sequoia's Gumbel noise: k draws without replacement from each row, evenly where
    it has no mass left."""
    rows = []
    for q in q_logits.softmax(-1).double():
        draws = []
        for _ in range(k):
            left = q if q.sum() > 0 else torch.ones_like(q)
            left[draws] = 0
            draws.append(sample.choose((left / left.sum()).tolist()))
            q[draws[-1]] = 0
        rows.append(draws)
    return rows
