"""Distributions of tokens: the law of an output by enumeration, and a test of counts against it.

    law(logits_of, sample, prompt, n)    what n sampled tokens must follow: the chain rule
    chi_square_ok(counts, law)           whether these counts may come from this law
    outcomes(experiment)                 every way in which an experiment of choices can end, with
                                         its probability, which is exact: nothing is drawn"""
import itertools
import math

import torch


def law(logits_of, sample, prompt: list[int], n: int, vocab: int = 4) -> torch.Tensor:
    """Compute the probability of each continuation of n tokens, [vocab ** n], by the chain rule."""
    result = torch.ones([vocab] * n)
    for tokens in itertools.product(range(vocab), repeat=n):
        for i in range(n):
            result[tokens] *= sample.probs(logits_of([*prompt, *tokens[:i]]))[tokens[i]]
    return result.flatten()


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
