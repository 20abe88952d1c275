"""An n-gram model tells with which chance each token follows the last tokens of a text.

    python -m hybrid fit        # measures the trust; hybrid.py decodes with it

The last 8, 4, 2 and 1 tokens are looked up, each in the text itself, then in a datastore (rest.py).
An *entry* is one of these suffixes in one of these sources, with the tokens that followed it there
and how often each did.

A third source has entries only for the last token: what the target itself said the last time that
it was fed this token (recycling.py). These are its likeliest tokens, without their chances. SAID
stands for how often they followed.

Start with a mass of 1. Each entry, the longest suffix first, takes a fixed share of what is left,
its *trust*, and divides it among its followers in proportion to their counts. After "… sat on the":

    entry       followers             trust    takes              and gives
    "on the"    mat 2, hat 1           .6      .6 of 1  = .6      mat .40, hat .20
    "the"       mat 4, hat 2, cat 4    .5      .5 of .4 = .2      mat .08, hat .04, cat .08
                                               all: .8            mat .48, hat .24, cat .08

The last .2 is given to no token.

The trust of an entry depends on three things: on its source, on how often its suffix was seen, and
on how many different tokens followed. Classes of these make 3 x 5 x 3 numbers, which are fitted by
EM (fit.py). So the model is smoothed like that of Jelinek and Mercer, 1980, with weights
by counts.

The *class* of an entry is a triple (source, often, variety) of indices into these numbers:

    source     0 for the text, 1 for the datastore, 2 for what the target said
    often      0 for a suffix that was seen once, 1 for twice, 2 for up to 5 times, 3 for up to 15
               times, 4 for more
    variety    0 for one follower, 1 for several that are at most a third of the times seen, 2 for
               more
"""
from collections import Counter, defaultdict
from itertools import product
from typing import Iterable, Iterator, Sequence

from survey.recycling import Successors
from survey.rest import Datastore, as_text, as_tokens

LENGTHS = (8, 4, 2, 1)  # of the suffixes that are looked up, in tokens
TEXT, STORE, TARGET = 0, 1, 2
SOURCES = (TEXT, STORE, TARGET)
SEEN = (1, 2, 5, 15)  # the upper bounds of the first four values of `often`
# How often the target's eight likeliest tokens follow a token the next time, in proportion
# (results/survey.md, Token Recycling).
SAID = (24, 4, 2, 2, 1, 1, 1, 1)
LEAST = 0.01  # where less mass than this is left, no further entry is asked


class NGrams:
    """Tell what follows a text, by what followed its last tokens before.

    text         the text so far, as `as_text` writes it
    store        the datastore that is searched beside the text. Each of its texts has ended
    trust        the trust of each class of entries, [source][often][variety]
    successors   what the target said after each token, which the caller keeps up to date
    """

    def __init__(self, text: list[int], store: Datastore, trust: list,
                 successors: Successors | None = None):
        self.text = ""
        self.store = store
        self.trust = trust
        self.successors = successors or Successors()
        self.text_followers = defaultdict(Counter)
        self.store_followers = {}  # suffix: a Counter
        self.add(text)

    def add(self, tokens: list[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            for n in LENGTHS:
                if n <= len(self.text):
                    self.text_followers[self.text[-n:]][token] += 1
            self.text += as_text([token])

    def count_followers(self, source: int, s: str) -> Counter:
        """Count the tokens that followed a suffix in a source.

        source   TEXT, STORE or TARGET
        s        the suffix, as `as_text` writes it
        returns  {token: how often it followed}. In the datastore, this is counted at a sample of
                 many places
        """
        if source == TEXT:
            return self.text_followers.get(s, Counter())
        if source == TARGET:
            row = self.successors.rows.get(as_tokens(s)[0], []) if len(s) == 1 else []
            return Counter(dict(zip(row, SAID)))
        if s not in self.store_followers:
            found = self.store.find_following(s, 1)  # nothing follows the end of a text
            self.store_followers[s] = Counter(as_tokens("".join(found)))
        return self.store_followers[s]

    def list_entries(self, path: Sequence[int]) -> Iterator[tuple[tuple[int, int, int], Counter]]:
        """Yield the entries for the end of the text and of a path of guesses below it.

        The entries of the longest suffix come first. Those of the same suffix are in the order of
        SOURCES.

        path    the tokens that are guessed
        yields  for each entry its class, and the counts of its followers
        """
        end = self.text[-LENGTHS[0]:] + as_text(path)
        found = {}
        for source in SOURCES:
            for n in reversed(LENGTHS):
                counts = self.count_followers(source, end[-n:]) if n <= len(end) else None
                if not counts:
                    break  # a longer suffix ends in this one, so it was not seen either
                found[n, source] = counts
        for n, source in product(LENGTHS, SOURCES):
            if (n, source) in found:
                counts = found[n, source]
                often = sum(counts.total() > limit for limit in SEEN)
                yield (source, often, class_of_variety(counts)), counts

    def predict(self, path: Sequence[int] = ()) -> dict[int, float]:
        """Tell with which chance each token comes next.

        path     the tokens that are guessed below the text
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


def mix_entries(entries: Iterable[tuple], trust: list) -> dict[int, float]:
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
