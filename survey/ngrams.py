"""An interpolated n-gram model whose chances are measured: what follows the last tokens of a text.

    python -m survey.hybrid fit        # measures the trust; hybrid.py decodes with it

The last 8, 4, 2 and 1 tokens are looked up in the text itself, then in a datastore (rest.py). Every
entry that was seen takes `trust` of the belief that is left, by the share of each next token, and
leaves the rest to the next entry. Trust depends on the store, on how often an entry was seen and on
how many different tokens followed it: 30 numbers, fitted by EM. So the model is smoothed as that of
Jelinek and Mercer, 1980, with the weights by counts.
"""
import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Iterable, Iterator

import torch

from common import InputError
from survey.parts import belongs
from survey.rest import BOUNDARY, MATCHES, Datastore

LENGTHS = (8, 4, 2, 1)  # of suffixes, in tokens
SEEN = (1, 2, 5, 15)  # how often: up to each of these, or more
LEAST = 0.01  # of belief: what is left of less is nobody's


class NGrams:
    """What follows the last tokens of a text, in the text itself and in a datastore."""

    def __init__(self, text: str, store: Datastore, trust: list):
        self.text, self.store = "", store
        self.trust = trust  # [store][seen][variety]
        self.own = {}  # of the text: what followed each suffix, the last MATCHES times
        self.known = {}  # of the datastore: Counters
        self.add(text)

    def add(self, text: str) -> None:
        for token in text:
            for n in LENGTHS:
                if n <= len(self.text):
                    s = self.text[-n:]
                    self.own[s] = (self.own.get(s, "") + token)[-MATCHES:]
            self.text += token

    def followers(self, k: int, s: str) -> Counter:
        """What follows a suffix: in the text for k = 0, in the datastore for k = 1."""
        if k == 0:
            return Counter(self.own.get(s, ""))
        if s not in self.known:
            self.known[s] = Counter(self.store.text[i:i + 1] for i in self.store.places(s))
            del self.known[s][BOUNDARY], self.known[s][""]
        return self.known[s]

    def entries(self, path: str) -> Iterator[tuple[tuple[int, int, int], Counter]]:
        """(its place in `trust`, its followers) of each entry that was seen, below the text and a
        path; the longest first, of equals the text's."""
        end, found = self.text[-LENGTHS[0]:] + path, {}
        for k in (0, 1):
            for n in reversed(LENGTHS):
                counts = self.followers(k, end[-n:]) if n <= len(end) else None
                if not counts:
                    break  # what is longer was not seen either
                found[n, k] = counts
        for n, k in product(LENGTHS, (0, 1)):
            if counts := found.get((n, k)):
                seen = counts.total()
                often = sum(seen > limit for limit in SEEN)
                variety = 0 if len(counts) == 1 else 1 if 3 * len(counts) <= seen else 2
                yield (k, often, variety), counts

    def predict(self, path: str) -> dict[str, float]:
        """{next token: its chance} below the text and a path; the sum is below 1."""
        return interpolated(self.entries(path), self.trust)


def interpolated(entries: Iterable[tuple], trust: list) -> dict[str, float]:
    """{next token: its chance} by `entries` of NGrams, each of which takes its trust of what those
    before it left."""
    left, chances = 1.0, {}
    for (k, often, variety), counts in entries:
        mass = left * trust[k][often][variety]
        seen = counts.total()
        for token, n in counts.items():
            chances[token] = chances.get(token, 0.0) + mass * n / seen
        left -= mass
        if left < LEAST:
            break
    return chances


# ------------------------------------------------------------------------------- how far to trust

def made(chain: list, trust: list) -> tuple[list[float], float]:
    """(how much of a token's chance each entry of its chain makes, the belief left in the end)."""
    left, parts = 1.0, []
    for (k, often, variety), share in chain:
        parts.append(left * trust[k][often][variety] * share)
        left *= 1 - trust[k][often][variety]
    return parts, left


def fitted(chains: list, rounds: int = 15) -> list:
    """The trust that makes tokens likeliest, by EM. Of each token its `chain`: for the entries that
    were seen, (place in the trust, the token's share of it)."""
    trust = torch.full((2, len(SEEN) + 1, 3), 0.5)
    for _ in range(rounds):
        reached = torch.ones_like(trust)  # as if once, in vain as often as not: else what was
        took = reached / 2  # never seen would stay untrusted for ever
        table = trust.tolist()
        for chain in chains:
            parts, left = made(chain, table)
            rest = total = sum(parts) + left * 1e-4  # by none of them any token may come
            for (place, _), part in zip(chain, parts):
                reached[place] += rest / total
                took[place] += part / total
                rest -= part
        trust = (took / reached).clamp(max=0.99)
    return trust.tolist()


def weight(p: list[float], q: list[float]) -> float:
    """w of the mixture w p + (1 - w) q that makes tokens likeliest, by EM; p and q: of each token
    its chance by a trained part and by n-grams. A token that neither guesses says nothing."""
    p, q = torch.tensor(p), torch.tensor(q)
    w = 0.5
    for _ in range(50):
        total = w * p + (1 - w) * q + 1e-6
        by_part = (w * p / total).sum()
        by_ngrams = ((1 - w) * q / total).sum()
        w = (by_part / (by_part + by_ngrams + 1e-6)).item()
    return w


def load_trust(path: str, model) -> dict:
    """InputError for what is no such file, or another model's."""
    try:
        known = json.loads(Path(path).read_text(encoding="utf-8"))
        numbers = torch.tensor(known["trust"])
        if not belongs(torch.tensor(known["model"]), model):
            raise ValueError("another model's")
        if numbers.shape != (2, len(SEEN) + 1, 3) or not all(
                0 <= x <= 1 for x in (*numbers.flatten(), *known["w"].values())):
            raise ValueError("not 2 x 5 x 3 numbers and weights of 0 to 1")
        return known
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError,
            ArithmeticError) as error:
        raise InputError("expected a file that `python -m survey.hybrid fit` made for this model, "
                         f"got {path!r}: {error}") from error
