"""REST looks guesses up in a datastore of earlier text: it has no draft model and trains nothing.

REST             He et al., "REST: Retrieval-Based Speculative Decoding", arXiv 2311.08252
SuffixDecoding   Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
                 Applications", arXiv 2411.04975: search the text itself as well (here always,
                 except with --no-grow), and choose among trees by a score (here with --alpha)

    python -m survey.rest build --prompts FILE --out my.safetensors    # make a datastore
    python -m survey.rest --datastore my.safetensors --prompt "..."    # decode with it

The last tokens of a text often occur elsewhere, and what follows them there is guessed:

    text        … the cat sat │ ?       its longest suffix s that occurs elsewhere is "cat sat"
    elsewhere   … cat sat on the mat    three places where s occurs
                … cat sat on a …
                … cat sat in …
    prefixes    on 2, in 1, on the 1, on a 1, on the mat 1, …      how often each follows s

    tree of the         sat ─┬─ on ─┬─ the
    best n = 4 of            │      └─ a
    these prefixes           └─ in

A prefix is at least as frequent as its extensions. So the n most frequent prefixes contain all
their parents: they are a tree. The suffix s has at most 16 tokens, and at most 10 tokens are read
after it. If s gives fewer than n prefixes, the next shorter suffix brings the others.

SuffixDecoding instead makes two trees for each suffix s, from the datastore and from the text. A
tree has at most alpha · |s| guesses, because a longer match says more. These are the nodes with the
largest D, and the tree with the best score is verified:

    C(x)    = how often x occurs
    D(node) = the chance of the node, C(child) / C(parent) for each step of its path, multiplied
            = C(s + path) / C(s), because each count but the first and the last cancels
    score   = Σ D(node) over the guesses, the tokens that the tree is expected to bring

Above, with s = "cat sat": D(on) = 2/3 and D(on the) = 2/3 · 1/2 = 1/3. In the text itself its own
end is one of the places of s, and nothing follows it there. So what followed s once has D = 1/2.

The output is lossless. The tree depends only on the datastore and on final text, and the target is
sampled once at each node (`walk`).

Departures of REST:
- Suffixes. Released code: of 2 to 16 tokens, and only the longest that occurs guesses.
  Here: of 1 to 16, and shorter ones fill the tree. Why: rows that are paid for should have a guess.
- Matches. Paper: the first 5,000 in sorted order, which run on into the next text. Here: an even
  sample of 100, which end with their text. Why: the first in order are those that low ids follow.
- The datastore. Paper: given texts, for all models of a tokenizer. Here: the model's own answers
  (or texts, with --text), for this model, and the text so far. Why: a model repeats its own phrases
  most often.
- Size of the tree. Paper: n = 64. Here: the clock chooses n, by how often guesses of each rank were
  right so far. Why: rows cost time on a CPU.
- Sampling. Released code: each path has draws of its own. Here: paths through a node share one
  draw. Why: several draws for one node are several chances to pass, which is not exact.

Departures of SuffixDecoding:
- The datastore. Paper: finished answers join it, and all occurrences are counted. Here: it stays as
  it was built, of more than 100 places an even sample is counted, and suffixes end at 16 tokens.
  Why: each run is repeatable, and one search serves both methods.
- Guesses. Released code: a chain of the likeliest tokens by default, a tree if asked. Those with D
  below 0.1 are left out, and an offset can be added to the limit (0 by default). Here: the paper's
  tree, and neither of the two. Why: the score does not need them.

Left out: SuffixDecoding's hybrid, which asks a draft model where the score is low.
"""
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from itertools import islice, product
from pathlib import Path
from typing import Iterable, Iterator

from common import Sampler, begin, greedy, trie, walk
from support.clock import list_sizes, recall
from support.engine import MODELS, EngineLM, log_round, require, run_as_program
from support.files import explain_errors
from support.parts import load_part, save_part
from training.texts import collect_pairs

import torch

DATASTORE = f"{MODELS}/rest.safetensors"
LONGEST = 16  # tokens of s, at most
AFTER = 10  # tokens that are read after s, at most
MATCHES = 100  # the most places that are counted. Of more places an even sample counts
BEGIN = 2  # tokens at the end of a prompt that a datastore keeps before the answer
PRIOR = 0.65  # for `Acceptance`. A single guess was right for 0.63 of the embedded target's tokens
BOUNDARY = "\0"  # comes after each text where several texts are one string


# A text of tokens is a string of Python here, which finds it in C: token t is the character of
# number t + 1, since number 0 is BOUNDARY. So [96, 98, 97] is "acb". A string can be a key, too.
def as_text(tokens: Iterable[int]) -> str:
    """Write tokens as a string, one character for each token."""
    return "".join(chr(token + 1) for token in tokens)


def as_tokens(text: Iterable[str]) -> list[int]:
    """Return the tokens of the characters of a text, which has no BOUNDARY."""
    return [ord(x) - 1 for x in text]


class Datastore:
    """Hold texts as one string of tokens, and find what follows a suffix in them.

    text     the texts, each with a BOUNDARY after it. One that is being written has none yet
    order    the suffix array: all positions of `text`, sorted by what stands there
    """

    def __init__(self, text: str = ""):
        self.text = text
        self.order = sorted(range(len(text)), key=self.sort_key)

    def sort_key(self, i: int) -> str:
        """Return what stands at position i, as far as a search compares or reads it.

        i        a position in `text`
        returns  up to LONGEST + AFTER tokens from there on
        """
        return self.text[i:i + LONGEST + AFTER]

    def add(self, text: str) -> None:
        """Append tokens to the text, and keep the order sorted.

        A sort key has LONGEST + AFTER tokens. So the keys of the last LONGEST + AFTER - 1 positions
        grow, and no others. These positions leave the order, and come back with their new keys.

        text   the tokens, as `as_text` writes them
        """
        old = len(self.text)
        first = max(0, old - LONGEST - AFTER + 1)
        for i in range(first, old):
            del self.order[bisect_left(self.order, self.sort_key(i), key=self.sort_key)]
        self.text += text
        for i in range(first, len(self.text)):
            insort(self.order, i, key=self.sort_key)

    def find_following(self, s: str, after: int = AFTER) -> list[str]:
        """Find what follows a suffix s wherever s occurs, or at an even sample of many places.

        s        one token or more, LONGEST at most
        after    how many tokens are read, at most
        returns  a string for each place: up to `after` tokens, which end before a BOUNDARY
        """
        def begin(i: int) -> str:
            return self.text[i:i + len(s)]
        # In the order, all places with s are neighbours, sorted by what follows. So all that
        # follows s has its share in a sample of every step-th one. There may be no such place.
        first = bisect_left(self.order, s, key=begin)
        end = bisect_right(self.order, s, first, key=begin)
        step = max(1, math.ceil((end - first) / MATCHES))
        ends = [i + len(s) for i in self.order[first:end:step]]
        return [self.text[i:i + after].partition(BOUNDARY)[0] for i in ends]


# ---------------------------------------------------------------------------------- decoding

def rank_prefixes(following: list[str]) -> dict[str, int]:
    """Count the prefixes of texts, and sort them by how frequent they are.

    following  what `find_following` returned
    returns    {prefix: how many of the texts begin with it}, the most frequent prefix first, and of
               equally frequent ones the shortest. So a prefix comes before all that extend it
    """
    counts = Counter(found[:end] for found in following for end in range(1, len(found) + 1))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], len(item[0]))))


def make_tree(text: str, guesses: Iterable[str]) -> tuple[list[int], list[int]]:
    """Hang guesses below the last token of a text.

    text     the text, as `as_text` writes it. Its last token is the root
    guesses  prefixes of what may follow the text
    returns  ids, the token of each node, and parents, the root first
    """
    [root] = as_tokens(text[-1])
    return trie(root, map(as_tokens, guesses))[:2]


def retrieve(stores: list[Datastore], text: str, n: int,
             longest: int = LONGEST) -> tuple[list[int], list[int]]:
    """Look up REST's tree of guesses below the last token of a text.

    stores   where each suffix is looked up. Guesses of an earlier store come before those of a
             later one for the same suffix
    text     the text, as `as_text` writes it
    n        the most guesses, the root not among them
    longest  tokens of the longest suffix that is looked up
    returns  ids and parents of the tree, the root first
    """
    best = {}  # the prefixes as keys, the best first
    # A longer suffix says more than a shorter one, so its prefixes come first. The longest one that
    # occurs is the paper's s. Shorter ones are looked up only if it gives fewer than n prefixes.
    for size, store in product(range(min(longest, len(text)), 0, -1), stores):
        if len(best) >= n:
            break
        for prefix in rank_prefixes(store.find_following(text[-size:])):
            best.setdefault(prefix)
    return make_tree(text, islice(best, n))


def retrieve_by_score(stores: list[Datastore], text: str, n: int, longest: int,
                      alpha: float) -> tuple[list[int], list[int]]:
    """Look up SuffixDecoding's tree.

    It is the tree with the best score of those that the suffixes and the stores give.

    stores   where each suffix is looked up. Of trees with equal scores the first one counts, which
             has the longer suffix or the earlier store
    text     the text, as `as_text` writes it
    n        the most guesses, the root not among them
    longest  tokens of the longest suffix that is looked up
    alpha    the most guesses for each token of the suffix
    returns  ids and parents of the tree, the root first
    """
    best, highest = [], 0.0  # the guesses of the best tree so far, and its score
    for size, store in product(range(min(longest, len(text)), 0, -1), stores):
        limit = int(min(n, alpha * size))  # MAX_SPEC of the paper
        following = store.find_following(text[-size:], limit)  # no path of the tree is longer
        counts = rank_prefixes(following)
        # D is a count over the number of places, so the most frequent prefixes have the largest D.
        guesses = [*islice(counts, limit)]
        score = sum(counts[guess] for guess in guesses) / max(1, len(following))
        if score > highest:
            best, highest = guesses, score
    return make_tree(text, best)


def rest(target: EngineLM, prompt: list[int], *, nodes: int = 0, longest: int = LONGEST,
         grow: bool = True, alpha: float = 0.0, datastore: str = DATASTORE,
         store: Datastore | None = None, sample: Sampler = greedy,
         log: list | None = None) -> Iterator[list[int]]:
    """Verify what followed the end of the text elsewhere, all in one call.

    nodes:     the most nodes of a tree, the root among them, 0 or more. With 0, as many as pay on
               this machine
    longest:   tokens of the longest suffix that is looked up, 1 to 16
    grow:      look the suffix up in the prompt and in the text as it is written, too
    alpha:     choose the tree by SuffixDecoding's score, with at most alpha guesses for each token
               of the suffix, 0 or more. With 0, the tree is REST's
    datastore: a file made by `python -m survey.rest build`

    Yields chunks of 1 to 11 tokens, with --alpha up to as many as --nodes; logs {"guessed",
    "accepted"} a call.

    With --nodes 0 a tree is taken to be as good as the one that `best_tree` plans by the rates of
    the ranks.

    `store` is used instead of the file.
    """
    store = store or target.once(load_datastore, datastore, target.model)
    prompt = begin(prompt, target)
    text = as_text(prompt)
    text_store = Datastore(text if grow else "")
    stores = [text_store, store]
    learnt, clock = recall(target, PRIOR, (store, grow), (nodes,))
    while True:
        # Look up what followed the end of the text elsewhere.
        n = len(clock.choose(lambda: list_sizes(learnt.rates(), AFTER, nodes)))
        if alpha > 0:
            ids, parents = retrieve_by_score(stores, text, n - 1, longest, alpha)
        else:
            ids, parents = retrieve(stores, text, n - 1, longest)
        # Verify.
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents), target.places))
        target.commit(path)
        learnt.learn(parents, path)
        # From now on the final tokens are looked up too.
        text += as_text(chunk)
        if grow:
            text_store.add(as_text(chunk))
        clock.note(1, n)
        log_round(log, guessed=len(ids) - 1, accepted=len(path) - 1)
        yield chunk


# ----------------------------------------------------------------------------- the datastore

def load_datastore(path: str | Path, model) -> Datastore:
    """Read a datastore that `build` made for this model.

    path     the file
    model    the model that the datastore must be for
    returns  the datastore. InputError if the file is damaged, or for another model
    """
    with explain_errors("a REST datastore for this model", path):
        _, tensors = load_part(path, "a REST datastore", model)
        text = "".join(map(chr, tensors["tokens"].tolist()))  # with 1 added to each token already
    return Datastore(text)


def build(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          text: bool = False, max_new_tokens: int = 200) -> None:
    """Make a datastore of the model's own greedy answers to prompts.

    The prompts are chosen as for a training. So a prompt and the longest answer must have room in
    2,048 tokens and in the model's context, and an answer of one token is left out. With --text
    each different text of two tokens or more is kept once.

    out:  the safetensors file to make
    work: folder of answers, by default OUT.work
    text: keep the texts of the file of prompts themselves, and no answers
    max_new_tokens: the most tokens of an answer
    """
    if text:
        # A text is its own answer. Its first token stands for the prompt, since a call has a root.
        data = [(p[:1], p[1:]) for p in dict.fromkeys(map(tuple, prompts)) if len(p) > 1]
        require(data != [], "prompts", "texts of 2 tokens or more", "none")
    else:
        data = collect_pairs(model, tokenizer, prompts, max_new_tokens, work or Path(f"{out}.work"))
    kept = "".join(as_text(p[-BEGIN:] + a) + BOUNDARY for p, a in data)
    tokens = torch.tensor([ord(x) for x in kept])  # as written, with 1 added to each
    print(f"{len(data)} texts, {len(tokens):,} tokens")
    kind = torch.uint16 if tokens.max() < 2 ** 16 else torch.int32
    save_part(out, "a REST datastore", model, {"tokens": tokens.to(kind)})


COMMAND_LINE = dict(methods=[rest], commands=[build], ranges={"nodes": (2, 4, 8, 16, 32, 64)})

if __name__ == "__main__":
    run_as_program(__file__)
