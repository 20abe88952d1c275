"""Cascade Speculative Drafting: drafts draft for drafts, down to one that has no weights.

Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference", arXiv 2312.11462.

    python -m survey.cascade --draft SMALL --draft SMALLER --prompt "..."

A vertical cascade: a draft does not draw its tokens one by one. It reviews guesses of the next
cheaper draft, as the target does. The last of them is Max-Gram, which has no weights: it copies
what followed earlier in the text.

A horizontal cascade: early guesses of a round are accepted more often than late ones. So the better
drafts write the early guesses, and the cheaper drafts the late ones.

A round with two drafts, γ = 5, tail = 2 and inner = 3. A token is shown as 1 or 2, the draft that
drew it, or as m for Max-Gram:

    target     root  1 1 1 1 1  2 2  m m    one call reviews guesses of all levels    (horizontal)
                     └───┬───┘  └┬┘
    draft 1            2 2 2     │          reviews `inner` tokens of draft 2 at a time, and adds
                       └─┬─┘     │          one of its own, until it has γ              (vertical)
    draft 2            m m m   m m m        reviews `inner` tokens of Max-Gram at a time, until it
                                            has what draft 1 or the target asked for

The output is lossless. Every review is `verify_block` of ../speculative.py, so a token that leaves
a level has exactly the distribution of that level's model. This is the q that the next better level
divides by.

Departures from the paper or its released code:
- How many tokens a level gives. Paper: a matrix of numbers, which is searched. Here: `gamma`,
  `tail` and `inner` fill it, so that a draft reviews only tokens of the next cheaper one. Why:
  three options can be tuned by hand.
- Review by a draft. Paper: lenient, so that more guesses pass. Here: exact. Why: with leniency,
  samples would not have the target's distribution.
- Temperature. Paper: 0 in the experiments. Here: any. Why: every token comes with the distribution
  of the level that gave it, and exact sampling needs no more.
- Tokens beyond a count. Released code: Max-Gram guesses 10 whenever it is asked, and a draft gives
  all that its last review brings. Here: both are cut at the count. Why: the options then say how
  wide a call is.
- Max-Gram's match. Released code: the first one of any length, so that the prompt comes first. If
  too few tokens follow it, one more search and then bigrams give the rest. Here: the latest one of
  at most 16 tokens, as in rest.py, and one more search whenever tokens are missing. Why: a search
  of every length would take longer with every token. Which match guesses better was not measured.
- Bigrams. Paper: counted in a corpus of text. Here: in the datastore of rest.py. Why: it is there
  already, and it has the model's own answers.

Left out: encoder-decoder models, as everywhere (common.py).
"""
from collections import Counter
from itertools import takewhile
from typing import Iterator, Sequence

from common import Sampler, begin, greedy
from speculative import verify_block
from support.engine import EngineLM, log_round, run_as_program
from survey.rest import BOUNDARY, DATASTORE, LONGEST, as_text, as_tokens, load_datastore

import torch
import torch.nn.functional as F


# -------------------------------------------------------------------------- levels and reviews

class Level:
    """Hold a model together with the text whose rows are in its cache.

    lm     the model
    text   the tokens whose rows are in the cache. A text to be scored may differ from them
    """

    def __init__(self, lm: EngineLM, text: list[int]):
        self.lm = lm
        self.text = text

    def keep(self, text: list[int]) -> int:
        """Keep the rows of the tokens with which the cached text and another begin, and no others.

        text     the other text
        returns  how many tokens keep their rows
        """
        same = min(len(self.text), len(text))
        while self.text[:same] != text[:same]:  # rejected guesses are few, so it takes few steps
            same -= 1
        self.lm.truncate(same)
        self.text = text[:same]
        return same

    def score(self, text: list[int], n: int) -> torch.Tensor:
        """Compute the logits after each of the last n tokens of a text, and cache the whole text.

        text     the whole text, guesses included
        n        how many of its last tokens are scored. They are fed even if they have rows. Of the
                 tokens before them only those without rows are fed
        returns  [n, V]
        """
        same = self.keep(text[:-n])
        logits = self.lm.forward(text[same:], keep=n)
        self.lm.commit(range(len(text) - same))
        self.text = text
        return logits


class MaxGram:
    """Guess without a model: look up what followed the end of the text where it occurred earlier.

    bigrams  {a token: the token that follows it most often in other texts}, as characters of
             `as_text`. They are asked if the text's last token did not occur earlier
    V        how many tokens the vocabulary has. A guess that is not below V ends the guesses
    """

    def __init__(self, bigrams: dict[str, str], V: int):
        self.bigrams = bigrams
        self.V = V

    def following(self, text: str) -> str:
        """Find what followed the longest end of a text that occurred earlier.

        text     characters, as `as_text` writes them
        returns  all characters after its latest earlier occurrence. If not even the last token
                 occurred earlier: its most frequent follower, or nothing
        """
        for n in range(min(LONGEST, len(text) - 1), 0, -1):
            at = text.rfind(text[-n:], 0, len(text) - 1)
            if at >= 0:
                return text[at + n:]
        return self.bigrams.get(text[-1], "")

    def guess(self, text: list[int], most: int) -> list[int]:
        """Guess the tokens after a text.

        text     the tokens
        most     how many tokens are guessed. They are fewer if nothing is found
        returns  the guesses
        """
        written = as_text(text)
        wanted = len(text) + most
        while len(written) < wanted:
            more = self.following(written)  # of the text with the guesses so far
            if not more:
                break
            written += more
        tokens = as_tokens(written[len(text):wanted])
        return list(takewhile(lambda token: token < self.V, tokens))


def review(levels: list, counts: list[list[int]], text: list[int],
           sample: Sampler) -> tuple[list[int], torch.Tensor]:
    """Let the first level review guesses of the other levels, in one call of its model.

    `review` and `draw` call each other, each time with fewer levels and fewer rows of `counts`. For
    the round of the header, where levels are the target, draft 1, draft 2 and Max-Gram:

        counts = [[5, 2, 2],      the target reviews 5 tokens of draft 1, then 2 and 2 of the others
                  [3],            draft 1 reviews 3 tokens of draft 2
                  [3]]            draft 2 reviews 3 tokens of Max-Gram

        review   target, draft 1, draft 2, Max-Gram    [[5, 2, 2], [3], [3]]
          draw 5 tokens   draft 1, draft 2, Max-Gram   [[3], [3]]
            review        draft 1, draft 2, Max-Gram   [[3], [3]]      again, until there are 5
              draw 3      draft 2, Max-Gram            [[3]]
                review    draft 2, Max-Gram            [[3]]           again, until there are 3
                  draw 3  Max-Gram                     []
          draw 2 tokens   draft 2, Max-Gram            [[3]]           and so on
          draw 2 tokens   Max-Gram                     []

    levels   from the best model to the cheapest
    counts   counts[i][j]: how many tokens of level i + 1 + j level i reviews. Max-Gram has no row,
             because it reviews nothing
    text     the tokens so far, whose last one is the root of this call
    sample   makes distributions, flips the coins and draws tokens
    returns  the n tokens after the text, which are the accepted guesses and one more; and probs
             [n, V], the first level's distribution at each of them
    """
    first, *others = levels
    # Horizontal: each level goes on after the guesses of the better ones
    guesses, guess_probs = [], []
    for i, count in enumerate(counts[0]):
        if count > 0:
            tokens, probs = draw(others[i:], counts[1 + i:], text + guesses, count, sample)
            guesses += tokens
            guess_probs.append(probs)
    # One call of the first level scores the root and all guesses: p is [guesses + 1, V]
    p = sample.probs(first.score(text + guesses, len(guesses) + 1), first.lm.places)
    # q[i] is the distribution of the level that drew guess i, so the review is exact. p[:0] has no
    # rows: it makes an empty q if nothing was guessed
    q = torch.cat([p[:0], *(probs.to(p.device) for probs in guess_probs)])  # [guesses, V]
    accepted, token = verify_block(p, q, guesses, sample)
    return guesses[:accepted] + [token], p[:accepted + 1]


def draw(levels: list, counts: list[list[int]], text: list[int], most: int,
         sample: Sampler) -> tuple[list[int], torch.Tensor]:
    """Let the first level draw tokens after a text, with the help of the other levels.

    levels   from the one that draws to the cheapest
    counts   as in `review`, for these levels only
    text     the tokens so far
    most     how many tokens are drawn. Max-Gram may give fewer
    sample   makes distributions, flips the coins and draws tokens
    returns  the n tokens; and probs [n, V], the first level's distribution at each of them
    """
    if isinstance(levels[0], MaxGram):
        # Max-Gram is sure of each of its tokens: its distributions are one-hot
        tokens = levels[0].guess(text, most)
        return tokens, F.one_hot(torch.tensor(tokens, dtype=torch.long), levels[0].V).float()
    # Vertical: a review gives one token or more, even if all guesses are rejected
    tokens, probs = [], []
    while len(tokens) < most:
        new_tokens, new_probs = review(levels, counts, text + tokens, sample)
        tokens += new_tokens
        probs.append(new_probs)
    return tokens[:most], torch.cat(probs)[:most]


# ------------------------------------------------------------------ Cascade Speculative Drafting

def count_bigrams(path: str, model) -> dict[str, str]:
    """Find the most frequent follower of each token in a datastore of survey/rest.py.

    path     the file of the datastore. With an empty path no token has a follower
    model    the datastore must have been made with it
    returns  {token: its follower}, as characters of `as_text`
    """
    if not path:
        return {}
    text = load_datastore(path, model).text
    best = {}
    # The most frequent pairs come first, so the first follower of a token is the one that is wanted
    for (x, y), _ in Counter(zip(text, text[1:])).most_common():
        if BOUNDARY not in (x, y):
            best.setdefault(x, y)
    return best


def cascade(target: EngineLM, draft: EngineLM, prompt: list[int], *, gamma: int = 5, inner: int = 3,
            tail: int = 2, grams: str = DATASTORE, more_drafts: Sequence[EngineLM] = (),
            sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Let drafts draft for drafts. Chen et al., Alg. 1.

    Each further --draft (`more_drafts`) is the next cheaper one. Max-Gram is always the last.

    gamma: tokens a round that the first draft gives the target, 0 or more
    inner: tokens of the next cheaper draft that a draft reviews in a call, 0 or more. With 0 it
           draws alone
    tail:  tokens a round that every other draft, Max-Gram too, gives the target after those, 0 or
           more
    grams: path of a datastore (python -m survey.rest build), whose bigrams Max-Gram uses. An empty
           path means no bigrams

    Yields chunks of 1 to gamma + D tail + 1 tokens, with D times --draft; logs {"guessed",
    "accepted"} a round.
    """
    followers = target.once(count_bigrams, grams, target.model)
    lms = [target, draft, *more_drafts]
    drafts = len(lms) - 1
    text = begin(prompt, *lms)
    levels = [*(Level(lm, text[:-1]) for lm in lms), MaxGram(followers, target.vocab)]
    # The target reviews tokens of all drafts. Each draft reviews tokens of the next cheaper one
    counts = [[gamma] + [tail] * drafts] + [[inner]] * drafts
    while True:
        tokens, _ = review(levels, counts, text, sample)
        text = text + tokens
        # The target's call had a row for the root, and one for each guess.
        rows, _, _ = target.passes[-1]
        log_round(log, guessed=rows - 1, accepted=len(tokens) - 1)
        yield tokens


COMMAND_LINE = dict(methods=[cascade], ranges={"gamma": (1, 3, 5, 8), "inner": (0, 2, 4)})

if __name__ == "__main__":
    run_as_program(__file__)
