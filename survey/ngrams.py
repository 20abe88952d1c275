"""An n-gram model tells with which chance each token follows the last tokens of a text.

    python -m survey.hybrid fit        # measures the trust; hybrid.py decodes with it

The last 8, 4, 2 and 1 tokens are looked up, each in the text itself, then in a datastore (rest.py).
An *entry* is one of these suffixes in one of these sources, with the tokens that followed it there
and how often each did. The entry of the longest suffix comes first.

A third source has entries of one token: what the target itself said the last time that it was fed
this token (recycling.py). These are its likeliest tokens without their chances. How often a token
of each rank was right so far stands for how often each followed.

At first a mass of 1 is left to be given to tokens. Each entry takes a share of the mass that is
left, and this share is its *trust*. It splits what it takes among its followers, in proportion to
their counts. What it did not take is left to the next entry. After "… sat on the":

    entry       followers             trust    takes              and gives
    "on the"    mat 2, hat 1           .6      .6 of 1  = .6      mat .40, hat .20
    "the"       mat 4, hat 2, cat 4    .5      .5 of .4 = .2      mat .08, hat .04, cat .08
                                               all: .8            mat .48, hat .24, cat .08

The last .2 is given to no token.

The trust of an entry depends on three things: on its source, on how often its suffix was seen, and
on how many different tokens followed. Classes of these make 3 x 5 x 3 numbers, which are fitted by
EM (`fit_trust`). So the model is smoothed like that of Jelinek and Mercer, 1980, with weights by
counts.

The *class* of an entry is a triple (source, often, variety) of indices into these numbers:

    source     0 for the text, 1 for the datastore, 2 for what the target said
    often      0 for a suffix that was seen once, 1 for twice, 2 for up to 5 times, 3 for up to 15
               times, 4 for more
    variety    0 for one follower, 1 for several that are at most a third of the times seen, 2 for
               more
"""
import math
from collections import Counter, defaultdict
from heapq import nlargest
from itertools import product
from typing import Iterable, Iterator

from survey.recycling import Successors
from survey.rest import BOUNDARY, Datastore, as_text, as_tokens

import torch

LENGTHS = (8, 4, 2, 1)  # of the suffixes that are looked up, in tokens
SOURCES = TEXT, STORE, TARGET = (0, 1, 2)
SEEN = (1, 2, 5, 15)  # the upper bounds of the first four values of `often`
LEAST = 0.01  # where less mass than this is left, no further entry is asked
FLOOR = 0.001  # the least chance that a trained part or the n-grams give, where both are joined


class NGrams:
    """Tell what follows a text, by what followed its last tokens before.

    text         the text so far, as rest.as_text writes it
    store        the datastore that is searched beside the text
    trust        the trust of each class of entries, [source][often][variety]
    successors   what the target said after each token, which the caller keeps up to date
    """

    def __init__(self, text: str, store: Datastore, trust: list,
                 successors: Successors | None = None):
        self.text = ""
        self.store = store
        self.trust = trust
        self.successors = successors or Successors()
        self.text_followers = defaultdict(Counter)
        self.store_followers = {}  # suffix: a Counter
        self.add(text)

    def add(self, text: str) -> None:
        """Append tokens to the text.

        text   the tokens, as rest.as_text writes them
        """
        for token in text:
            for n in LENGTHS:
                if n <= len(self.text):
                    self.text_followers[self.text[-n:]][token] += 1
            self.text += token

    def count_followers(self, source: int, s: str) -> Counter:
        """Count the tokens that followed a suffix in a source.

        source   TEXT, STORE or TARGET
        s        the suffix
        returns  {token: how often it followed}. Of many places in the datastore an even sample
                 counts. Of what the target said, how often a token of its rank was right
        """
        if source == TEXT:
            return self.text_followers.get(s, {})
        if source == TARGET:
            row = self.successors.rows.get(*as_tokens(s), []) if len(s) == 1 else []
            return Counter(dict(zip(as_text(row), self.successors.hits)))
        if s not in self.store_followers:
            counts = Counter(self.store.text[i:i + 1] for i in self.store.find_places(s))
            del counts[BOUNDARY], counts[""]  # the ends of texts are followed by nothing
            self.store_followers[s] = counts
        return self.store_followers[s]

    def list_entries(self, path: str) -> Iterator[tuple[tuple[int, int, int], Counter]]:
        """Yield the entries for the end of the text and of a path of guesses below it.

        The entry of the longest suffix comes first, and of those with the same suffix the text's,
        then the datastore's.

        path    the guesses, "" for none
        yields  for each entry its class, and the counts of its followers
        """
        end = self.text[-LENGTHS[0]:] + path
        found = {}
        for source in SOURCES:
            for n in reversed(LENGTHS):
                counts = self.count_followers(source, end[-n:]) if n <= len(end) else None
                if not counts:
                    break  # no longer suffix was seen, because it would end in this one
                found[n, source] = counts
        for n, source in product(LENGTHS, SOURCES):
            if (n, source) in found:
                counts = found[n, source]
                often = sum(counts.total() > limit for limit in SEEN)
                yield (source, often, class_of_variety(counts)), counts

    def predict(self, path: str) -> dict[str, float]:
        """Tell with which chance each token comes next.

        path     guesses below the text, "" for none
        returns  {token: its chance} after the text and the path. The chances sum to 1 or less
        """
        return mix_entries(self.list_entries(path), self.trust)


def class_of_variety(counts: Counter) -> int:
    """Return the variety of an entry, as the file's header lists it.

    counts   the counts of the followers
    returns  0, 1 or 2
    """
    if len(counts) == 1:
        return 0
    return 1 if 3 * len(counts) <= counts.total() else 2


def mix_entries(entries: Iterable[tuple], trust: list) -> dict[str, float]:
    """Give the mass to tokens, entry by entry, as the table of the file's header shows it.

    entries   what `list_entries` yields
    trust     as for `NGrams`
    returns   {next token: its chance}
    """
    left = 1.0  # the mass that no entry has taken so far
    chances = {}
    for (source, often, variety), counts in entries:
        mass = left * trust[source][often][variety]
        seen = counts.total()
        for token, n in counts.items():
            chances[token] = chances.get(token, 0.0) + mass * n / seen
        left -= mass
        if left < LEAST:
            break
    return chances


# ------------------------------------------------------------------------------- how far to trust

def split_chance(chain: list, trust: list) -> tuple[list[float], float]:
    """Split the chance of one token into what each entry gave to it.

    chain     for each entry, in order, its class and its share: the token's count over the counts
              of all followers
    trust     as for `NGrams`
    returns   the part that each entry gave to the token, and the mass that is left in the end
    """
    left = 1.0
    parts = []
    for (source, often, variety), share in chain:
        taken = trust[source][often][variety]
        parts.append(left * taken * share)
        left *= 1 - taken
    return parts, left


def fit_trust(chains: list, rounds: int = 15) -> list:
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

    The 1/2 and the 1 are an imagined token that reached the class and was taken with chance 1/2. A
    class that never occurred would have 0 / 0 without them.

    chains    for each token a chain, as `split_chance` takes it
    rounds    steps of EM
    returns   the trust [source][often][variety], numbers from 0 to 0.99
    """
    trust = torch.full((len(SOURCES), len(SEEN) + 1, 3), 0.5)
    for _ in range(rounds):
        # Both sums begin with the imagined token.
        reached = torch.ones_like(trust)
        took = reached / 2
        table = trust.tolist()
        for chain in chains:
            # The E step asks which entry this token came from. It may have come from none.
            parts, left = split_chance(chain, table)
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
    """Join the chances p of a trained part and q of the n-grams.

        score(x) = e^c p(x)^a q(x)^b          chance(x) = score(x) / (1 + Σ score)

    The 1 stands for all tokens that neither names. A token that both name is likelier than either
    says, as in a product of experts. One that only one of them names has FLOOR in the other.

    guessed     {token: p}
    chances     {token: q}
    exponents   c, a and b
    returns     {token: its chance}, for all tokens that one of them names
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
    returns   c, a, b and mended: of the cases in which the n-grams' likeliest token is expected to
              be wrong, the share in which the right token comes to be one of the two likeliest,
              which are what a tree mostly has of a node's children
    """
    features, owner, right = [], [], []  # of each token that is named
    for i, (token, p, q) in enumerate(zip(tokens, guessed, chances)):
        for x in p | q:
            features.append([1.0, *(math.log(max(y.get(x, 0.0), FLOOR)) for y in (p, q))])
            owner.append(i)
            right.append(x == token)
    X = torch.tensor(features, dtype=torch.float64).view(-1, 3)
    owner, right = torch.tensor(owner, dtype=torch.long), torch.tensor(right, dtype=torch.bool)
    exponents = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([exponents], max_iter=200, line_search_fn="strong_wolfe")

    def compute_loss() -> torch.Tensor:
        optimizer.zero_grad()
        scores = X @ exponents
        totals = torch.ones(len(tokens), dtype=torch.float64).index_add(0, owner, scores.exp())
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
