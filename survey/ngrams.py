"""An n-gram model tells with which chance each token follows the last tokens of a text.

    python -m survey.hybrid fit        # measures the trust; hybrid.py decodes with it

The last 8, 4, 2 and 1 tokens are looked up, each in the text itself, then in a datastore (rest.py).
What followed them there is an entry. The longest entry comes first. Each entry takes a part of the
belief that is left, its trust, and splits it among its followers by their shares. What it leaves
goes to the next entry. After "… sat on the":

    entry       followers             trust    takes           and gives
    "on the"    mat 2, hat 1           .6      .6 of 1         mat .40, hat .20
    "the"       mat 4, hat 2, cat 4    .5      .2 of the .4    mat .08, hat .04, cat .08
                                               in all          mat .48, hat .24, cat .08

Trust depends on the source of an entry (the text or the datastore), on how often the entry was seen
and on how many different tokens followed it. These are 2 x 5 x 3 numbers, fitted by EM. So the
model is smoothed like that of Jelinek and Mercer, 1980, with weights by counts.

A place in the trust is a triple (source, often, variety), as `list_entries` makes it.
"""
from collections import Counter
from itertools import product
from typing import Iterable, Iterator

from survey.rest import BOUNDARY, MATCHES, Datastore

import torch

LENGTHS = (8, 4, 2, 1)  # of the suffixes that are looked up, in tokens
SOURCES = TEXT, STORE = (0, 1)
SEEN = (1, 2, 5, 15)  # five classes: an entry was seen once, twice, up to 5 times, up to 15, more
LEAST = 0.01  # a smaller rest of the belief is given to no token


class NGrams:
    """Predict what follows a text, by what followed its last tokens earlier.

    text    the text so far, as rest.as_text writes it
    store   the datastore that is searched beside the text
    trust   [source][often][variety]: which part of the belief that is left an entry takes
    """

    def __init__(self, text: str, store: Datastore, trust: list):
        self.text = ""
        self.store = store
        self.trust = trust
        self.text_followers = {}  # suffix: the tokens that followed it, the last MATCHES times
        self.store_followers = {}  # suffix: a Counter
        self.add(text)

    def add(self, text: str) -> None:
        """Append tokens to the text."""
        for token in text:
            for n in LENGTHS:
                if n <= len(self.text):
                    s = self.text[-n:]
                    earlier = self.text_followers.get(s, "")
                    self.text_followers[s] = (earlier + token)[-MATCHES:]
            self.text += token

    def count_followers(self, source: int, s: str) -> Counter:
        """Count the tokens that followed a suffix s in a source, the TEXT or the STORE."""
        if source == TEXT:
            return Counter(self.text_followers.get(s, ""))
        if s not in self.store_followers:
            counts = Counter(self.store.text[i:i + 1] for i in self.store.find_places(s))
            del counts[BOUNDARY], counts[""]  # the ends of texts are followed by nothing
            self.store_followers[s] = counts
        return self.store_followers[s]

    def list_entries(self, path: str) -> Iterator[tuple[tuple[int, int, int], Counter]]:
        """Yield the entries for the text and a path of guesses below it.

        The longest entry comes first, and of two equally long ones the text's.

        path    the guesses, "" for none
        yields  (place in the trust, Counter of the followers) for each entry that was seen
        """
        end = self.text[-LENGTHS[0]:] + path
        found = {}
        for source in SOURCES:
            for n in reversed(LENGTHS):
                counts = self.count_followers(source, end[-n:]) if n <= len(end) else None
                if not counts:
                    break  # a longer suffix was not seen either
                found[n, source] = counts
        for n, source in product(LENGTHS, SOURCES):
            if (n, source) in found:
                counts = found[n, source]
                often = sum(counts.total() > limit for limit in SEEN)
                yield (source, often, class_of_variety(counts)), counts

    def predict(self, path: str) -> dict[str, float]:
        """Return {next token: its chance} after the text and a path. Their sum is below 1."""
        return mix_entries(self.list_entries(path), self.trust)


def class_of_variety(counts: Counter) -> int:
    """Return 0 for one follower, 1 for different ones that are at most a third of all, else 2."""
    if len(counts) == 1:
        return 0
    return 1 if 3 * len(counts) <= counts.total() else 2


def mix_entries(entries: Iterable[tuple], trust: list) -> dict[str, float]:
    """Mix entries into {next token: its chance}.

    entries   what `list_entries` yields
    trust     as for `NGrams`
    """
    left = 1.0  # of the belief
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
    """Split the chance of a token into what each entry gave to it.

    chain     for each entry, in order, its place in the trust and the token's share of followers
    trust     as for `NGrams`
    returns   the part of each entry, and the belief that is left in the end
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

    chains    for each token a chain, as `split_chance` takes it
    rounds    steps of EM
    returns   [source][often][variety], numbers from 0 to 0.99
    """
    trust = torch.full((len(SOURCES), len(SEEN) + 1, 3), 0.5)
    for _ in range(rounds):
        # Count how often the belief of a token reached an entry of each place, and how often the
        # entry took it. Each place begins with one imagined token, half of which was taken. Without
        # that token, a place that never occurred would have no trust at all.
        reached = torch.ones_like(trust)
        took = reached / 2
        table = trust.tolist()
        for chain in chains:
            # E step: which entry did this token come from? Any token can come from none of them.
            parts, left = split_chance(chain, table)
            total = sum(parts) + left * 1e-4
            remaining = total  # the chance that no entry so far gave the token
            for (place, _), part in zip(chain, parts):
                reached[place] += remaining / total
                took[place] += part / total
                remaining -= part
        # M step. An entry that took everything would leave nothing to those after it.
        trust = (took / reached).clamp(max=0.99)
    return trust.tolist()


def fit_weight(p: list[float], q: list[float]) -> float:
    """Find the w for which the mixture w p + (1 - w) q makes tokens likeliest, by EM.

    Tokens with no chance by either have no influence on it.

    p         the chance of each token by a trained part
    q         the chance of each token by n-grams
    returns   w
    """
    p, q = torch.tensor(p), torch.tensor(q)
    w = 0.5
    for _ in range(50):
        total = w * p + (1 - w) * q + 1e-6
        by_part = (w * p / total).sum()
        by_ngrams = ((1 - w) * q / total).sum()
        w = (by_part / (by_part + by_ngrams + 1e-6)).item()
    return w
