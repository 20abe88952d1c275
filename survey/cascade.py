"""Cascade Speculative Drafting: drafts draft for drafts, down to one that has no weights.

Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference", arXiv 2312.11462.

    python -m survey.cascade --draft SMALL --draft SMALLER --prompt "..."

A round with two drafts, γ = 5, tail = 2 and inner = 3. Each token is shown as the level that drew
it: 1 and 2 are the drafts, and m is Max-Gram, which copies what followed earlier in the text.

    target     root  1 1 1 1 1  2 2  m m    one call reviews guesses of all levels    (horizontal)
                     └───┬───┘  └┬┘
    draft 1            2 2 2     │          reviews `inner` tokens of draft 2 at a time, and adds
                       └─┬─┘     │          one of its own, until it has γ              (vertical)
    draft 2            m m m   m m m        reviews `inner` tokens of Max-Gram at a time, until it
                                            has what draft 1 or the target asked for

Early guesses are accepted more often than late ones, so the better drafts write the early ones.
Every review is Leviathan's rule (../speculative.py). So a token that leaves a level has exactly the
distribution of that level's model, and the next better level judges it by that one: lossless.

Departures:
- How many tokens a level gives. Paper: a matrix, which is searched. Here: one number for each
  direction, and only the target has tokens of several levels to review. Why: three options can be
  tuned by hand.
- Review. Paper: a lenient review by drafts too. Here: none. Why: leniency is not exact when
  sampling.
- Max-Gram. Released: 10 guesses whenever it is asked. Here: as many as are asked for. Bigrams are
  counted in REST's datastore (rest.py).
"""
import sys
from collections import Counter
from itertools import takewhile
from typing import Iterator, Sequence

from common import CachedLM, InputError, Sampler, greedy
from speculative import report_acceptance, verify
from survey.rest import BOUNDARY, DATASTORE, LONGEST, as_text, as_tokens, load_datastore

import torch
import torch.nn.functional as F


# -------------------------------------------------------------------------- levels and reviews

class Level:
    """A model, and the text that its cache has the rows of."""

    def __init__(self, lm: CachedLM, text: list[int]):
        self.lm = lm
        self.text = text

    def keep(self, text: list[int]) -> int:
        """Drop all rows but those of the tokens that a text begins with.

        returns  how many tokens these are
        """
        same = min(len(self.text), len(text))
        while self.text[:same] != text[:same]:
            same -= 1
        self.lm.truncate(same)
        self.text = text[:same]
        return same

    def score(self, text: list[int], n: int) -> torch.Tensor:
        """Compute the logits [n, V] after each of the last n tokens of a text, and cache all of it.

        Only tokens that the cache does not have are fed.
        """
        same = self.keep(text[:-n])
        logits = self.lm.forward(text[same:], keep=n)
        self.lm.commit(range(len(text) - same))
        self.text = text
        return logits


class MaxGram:
    """The cheapest guesser, which looks up what followed the end of the text earlier in it.

    bigrams  {a token: the token that follows it most often}, characters as in `as_text`, for a
             token that is new to the text
    V        guesses are tokens below V
    """

    def __init__(self, bigrams: dict[str, str], V: int):
        self.bigrams = bigrams
        self.V = V

    def following(self, text: str) -> str:
        """Find all that followed the latest of the longest earlier occurrences of a text's end."""
        for n in range(min(LONGEST, len(text) - 1), 0, -1):
            at = text.rfind(text[-n:], 0, len(text) - 1)
            if at >= 0:
                return text[at + n:]
        return self.bigrams.get(text[-1], "")

    def guess(self, text: list[int], most: int) -> list[int]:
        """Guess up to `most` tokens after a text; what is found goes on from guesses, too."""
        written = as_text(text)
        wanted = len(text) + most
        while len(written) < wanted:
            more = self.following(written)
            if not more:
                break
            written += more
        tokens = as_tokens(written[len(text):wanted])
        return list(takewhile(lambda token: token < self.V, tokens))


def review(levels: list, counts: list[list[int]], text: list[int],
           sample: Sampler) -> tuple[list[int], torch.Tensor]:
    """Let the first level review guesses of the other levels, in one call of its model.

    levels   from the best model to the cheapest
    counts   counts[i][j]: how many tokens level i reviews that level i + 1 + j draws
    returns  the tokens after the text, and the distributions [n, V] of the first level from which
             they were drawn
    """
    first, *others = levels
    guesses, guess_probs = [], []
    for i, count in enumerate(counts[0]):
        if count > 0:
            tokens, probs = draw(others[i:], counts[1 + i:], text + guesses, count, sample)
            guesses += tokens
            guess_probs.append(probs)
    logits = first.score(text + guesses, len(guesses) + 1)
    p = sample.probs(logits)  # [guesses + 1, V]
    q = torch.cat([p[:0], *(probs.to(p.device) for probs in guess_probs)])  # [guesses, V]
    accepted, token = verify(p, q, guesses, sample)
    return guesses[:accepted] + [token], p[:accepted + 1]


def draw(levels: list, counts: list[list[int]], text: list[int], most: int,
         sample: Sampler) -> tuple[list[int], torch.Tensor]:
    """Let the first level draw tokens after a text, with the help of the other levels.

    most     how many; Max-Gram may have fewer
    returns  the tokens, and the distributions [n, V] from which they were drawn; Max-Gram is sure
             of each of its tokens
    """
    if isinstance(levels[0], MaxGram):
        tokens = levels[0].guess(text, most)
        return tokens, F.one_hot(torch.tensor(tokens, dtype=torch.long), levels[0].V).float()
    tokens, probs = [], []
    while len(tokens) < most:
        new_tokens, new_probs = review(levels, counts, text + tokens, sample)
        tokens += new_tokens
        probs.append(new_probs)
    return tokens[:most], torch.cat(probs)[:most]


# ------------------------------------------------------------------ Cascade Speculative Drafting

def count_bigrams(path: str, model) -> dict[str, str]:
    """Find the most frequent follower of each token in a datastore of survey/rest.py.

    path  of the datastore; an empty one means none, and no followers
    """
    if not path:
        return {}
    text = load_datastore(path, model).text
    best = {}
    for (x, y), _ in Counter(zip(text, text[1:])).most_common():
        if BOUNDARY not in (x, y):
            best.setdefault(x, y)
    return best


def cascade(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5, inner: int = 3,
            tail: int = 2, grams: str = DATASTORE, more_drafts: Sequence[CachedLM] = (),
            sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Let drafts draft for drafts. Chen et al., Alg. 1. `more_drafts` (--draft again) are the next
    cheaper ones, in order, and the last draft is always Max-Gram.

    gamma: tokens a round that the first draft gives the target
    inner: tokens that a draft is given by the next one for a review
    tail:  tokens a round that each later draft appends to those, the better one first
    grams: a datastore of `python -m survey.rest build`, whose bigrams are counted, or nothing
    Yields chunks of 1 to gamma + (drafts) tail + 1 tokens; logs {"drafted", "accepted"} a round.
    """
    for name, value in (("gamma", gamma), ("inner", inner), ("tail", tail)):
        if value < 0:
            raise InputError(f"--{name} must be 0 or more, got {value}")
    followers = target.once(("bigrams", grams), lambda: count_bigrams(grams, target.model))
    lms = [target, draft, *more_drafts]
    for lm in lms:
        lm.start(prompt[:-1])
    V = target.vocab
    if V is None:
        V = target.model.get_output_embeddings().weight.shape[0]
    levels = [*(Level(lm, prompt[:-1]) for lm in lms), MaxGram(followers, V)]
    drafts = len(lms) - 1
    counts = [[gamma] + [tail] * drafts] + [[inner]] * drafts
    text = list(prompt)
    while True:
        rows = target.rows
        tokens, _ = review(levels, counts, text, sample)
        text = text + tokens
        if log is not None:
            log.append({"drafted": target.rows - rows - 1, "accepted": len(tokens) - 1})
        yield tokens


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([cascade], report_acceptance, ranges={"gamma": (1, 3, 5, 8), "inner": (0, 2, 4)}))
