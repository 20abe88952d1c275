"""How far to trust guesses of several sources, fitted on known texts (survey/ngrams.py).

    fit_trust      the trust of each class of n-grams, by EM
    pool_chances   one chance of the n-grams' and of a trained part's, by three numbers
    fit_pool       these numbers, by logistic regression
"""
import math
from heapq import nlargest

import torch

FLOOR = 0.001  # the least chance that a trained part or the n-grams give, if both are joined


def fit_trust(chains: list, classes: tuple[int, ...], rounds: int = 15) -> list:
    """Find the trust that makes tokens likeliest, by EM.

    A token has a chain of entries 1, 2, …, n. Entry i has the trust t_i of its class. So it takes
    t_i r_i, where r_i is the mass that is left, and it gives the share s_i of this to the token:

        r_1 = 1,    r_{i+1} = (1 - t_i) r_i
        part_i = r_i t_i s_i                       what entry i gives to the token
        total  = Σ_i part_i + r_{n+1} · 1e-4       the chance of the token. From the mass that is
                                                   left each token gets a little

    E step. Given the token, these are the chances that it came from entry i, and that the mass it
    came from got as far as entry i:

        took_i    = part_i / total
        reached_i = (total - part_1 - … - part_{i-1}) / total

    M step. Sums over all entries of a class c, in all chains, give its new trust:

        t_c = (1/2 + Σ took_i) / (1 + Σ reached_i)

    The pseudo-counts 1/2 and 1 keep a class that never occurred at 1/2.

    chains    for each token a chain, which has for each entry, in order, its class and its share.
              The share is the token's count over the counts of all followers
    classes   how many classes there are: sources, values of `often`, values of `variety`
    rounds    steps of EM
    returns   the trust [source][often][variety], numbers from 0 to 0.99
    """
    trust = torch.full(classes, 0.5)
    for _ in range(rounds):
        # Both sums begin with the pseudo-counts.
        reached = torch.ones_like(trust)
        took = reached / 2
        table = trust.tolist()
        for chain in chains:
            left = 1.0  # the mass that is left
            parts = []  # what each entry gives to the token
            for (source, often, variety), share in chain:
                taken = table[source][often][variety]
                parts.append(left * taken * share)
                left *= 1 - taken
            # The E step asks which entry this token came from. It may have come from none.
            total = sum(parts) + left * 1e-4
            remaining = total  # what this entry and all after it gave
            for (group, _), part in zip(chain, parts):
                reached[group] += remaining / total
                took[group] += part / total
                remaining -= part
        # The M step. An entry with a trust of 1 would leave nothing to the entries after it.
        trust = (took / reached).clamp(max=0.99)
    return trust.tolist()


def pool_chances(guessed: dict[str, float], chances: dict[str, float],
                 exponents: list[float]) -> dict[str, float]:
    """Compute one chance from the chances p of a trained part and q of the n-grams.

        score(x) = e^c p(x)^a q(x)^b          chance(x) = score(x) / (1 + Σ score)

    The 1 stands for all tokens that neither names. A token that both name is likelier than either
    says, as in a product of experts. A token that only one of them names has FLOOR from the other.

    guessed     {token: p}
    chances     {token: q}
    exponents   c, a and b
    returns     {token: its chance}, for all tokens that either names
    """
    c, a, b = exponents
    scores = {x: math.exp(c) * max(guessed.get(x, 0.0), FLOOR) ** a
              * max(chances.get(x, 0.0), FLOOR) ** b for x in chances | guessed}
    total = 1 + sum(scores.values())
    return {x: score / total for x, score in scores.items()}


def fit_pool(tokens: str, guessed: list[dict], chances: list[dict]) -> list[float]:
    """Find the c, a and b with which `pool_chances` makes tokens likeliest.

    log score is linear in them, so there is one best choice. A little decay keeps it finite.

    tokens    the right tokens
    guessed   for each of them what a trained part gave before it
    chances   for each of them what the n-grams gave before it
    returns   c, a, b and mended, the share of the n-grams' errors that the part mends. The errors
              are how often the n-grams' likeliest token is wrong, by its own chance. Of those the
              part mends as many as there are more right tokens among the two likeliest with it than
              without it. A tree mostly has the two likeliest of a node's children
    """
    # Each token that is to be guessed is a case. Each token that is named in a case has one row.
    features, cases, right = [], [], []
    for case, (token, p, q) in enumerate(zip(tokens, guessed, chances)):
        for x in p | q:
            features.append([1.0, *(math.log(max(y.get(x, 0.0), FLOOR)) for y in (p, q))])
            cases.append(case)
            right.append(x == token)
    X = torch.tensor(features, dtype=torch.float64).view(-1, 3)
    cases, right = torch.tensor(cases, dtype=torch.long), torch.tensor(right, dtype=torch.bool)
    exponents = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([exponents], max_iter=200, line_search_fn="strong_wolfe")

    def compute_loss() -> torch.Tensor:
        optimizer.zero_grad()
        scores = X @ exponents
        totals = torch.ones(len(tokens), dtype=torch.float64).index_add(0, cases, scores.exp())
        loss = totals.log().sum() - scores[right].sum()
        loss = loss / (1 + len(tokens)) + 1e-5 * exponents.square().sum()
        loss.backward()
        return loss
    optimizer.step(compute_loss)
    found = exponents.tolist()
    wrong, mended = 1e-6, 0
    for token, p, q in zip(tokens, guessed, chances):
        pooled = pool_chances(p, q, found)
        wrong += 1 - max(q.values(), default=0.0)
        mended += token in nlargest(2, pooled, pooled.get)
        mended -= token in nlargest(2, q, q.get)
    return [*found, min(1.0, max(0.0, mended / wrong))]
