"""REST: guesses are looked up in a datastore of earlier text. No draft model, no training.

He et al., "REST: Retrieval-Based Speculative Decoding", arXiv 2311.08252; the text itself is
searched as well (not with --no-grow), after Oliaro et al., "SuffixDecoding", arXiv 2411.04975

    python -m survey.rest build --prompts FILE --out my.safetensors    # a datastore
    python -m survey.rest --datastore my.safetensors --prompt "..."    # decode

    s      the longest suffix of the text, of 16 tokens at most, that something follows elsewhere
    tree   of what follows s there, 10 tokens each time, the n prefixes that occur most often: a
           prefix occurs at least as often as what extends it, so with the root they are a tree;
           where there are fewer, a shorter s brings the others

Lossless: the tree depends on the datastore and on final text alone, and the target draws once at
each node, so `walk` is exact.
Departures: shorter suffixes fill the tree, down to a single token (released: the longest alone, of
2 or more); of 100 matches or more an even sample counts (released: the first 5,000 in sorted order,
which low token ids follow); nothing follows the end of an answer (released: no boundaries); an
answer is kept with two tokens of its prompt, to find its beginning by; n is chosen by the clock; a
file serves the model that it was made for (released: all of that tokenizer).
SuffixDecoding also keeps what was written before, takes the better of two trees and limits guesses
by the length of s; here for each s what the text has comes before what the datastore has.
"""
import math
import random
import sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from itertools import islice, product
from pathlib import Path
from typing import Iterator, NamedTuple

import torch

from common import (WIDTHS, CachedLM, InputError, Sampler, context_length, fastest, greedy,
                    row_costs, trie, walk)
from survey.parts import MODELS, load_part, save_part

DATASTORE = f"{MODELS}/rest.safetensors"
LONGEST, AFTER = 16, 10  # tokens: of s at most, and of what follows it
MATCHES = 100  # places that are counted, at most, and at least half as many of more
BEGIN = 2  # tokens of its prompt before an answer
CALLS = WIDTHS[:7]  # rows of the calls that it is measured for: 1 to 64
BOUNDARY = "\0"  # between texts


def as_text(tokens: list[int]) -> str:
    """Tokens as a string: Python slices and compares strings fast. -1 is a BOUNDARY."""
    return "".join(chr(token + 1) for token in tokens)


def as_tokens(text: str) -> list[int]:
    return [ord(x) - 1 for x in text]


class Gain(NamedTuple):
    """Tokens per call, measured on texts held out, of the datastore alone and with the text itself
    searched as well."""
    alone: float
    with_text: float


class Datastore:
    """Texts, a string of tokens, and their suffix array: `order` has all positions, sorted by what
    stands there. `gain[m]`: what it is worth where a call has m rows at most."""

    def __init__(self, text: str = "", gain: dict[int, Gain] | None = None):
        self.text = text
        self.gain = gain
        self.order = sorted(range(len(text)), key=self.here)

    def here(self, i: int) -> str:
        return self.text[i:i + LONGEST + AFTER]

    def add(self, text: str) -> None:
        """What stands at the last positions goes on now: they get other places, and only they."""
        old = len(self.text)
        first = max(0, old - LONGEST - AFTER + 1)
        for i in range(first, old):
            del self.order[bisect_left(self.order, self.here(i), key=self.here)]
        self.text += text
        for i in range(first, len(self.text)):
            insort(self.order, i, key=self.here)

    def places(self, s: str) -> list[int]:
        """Where s ends; of more than MATCHES places some, evenly."""
        def begin(i: int) -> str:
            return self.text[i:i + len(s)]
        first = bisect_left(self.order, s, key=begin)
        if first == len(self.order) or begin(self.order[first]) != s:
            return []
        end = bisect_right(self.order, s, first, key=begin)
        some = self.order[first:end:max(1, math.ceil((end - first) / MATCHES))]
        return [i + len(s) for i in some]

    def following(self, s: str) -> list[str]:
        """What stands after s wherever it does, up to AFTER tokens and no BOUNDARY."""
        found = (self.text[i:i + AFTER] for i in self.places(s))
        return [text.partition(BOUNDARY)[0] for text in found]


# ---------------------------------------------------------------------------------- decoding

def retrieve(stores: list[Datastore], text: str, n: int,
             longest: int = LONGEST) -> tuple[list[int], list[int]]:
    """(ids, parents) of up to n guesses below the last token of `text`: the most frequent prefixes
    of what follows its suffixes, the longest suffix first, and for each the first store."""
    best = {}  # prefix: None, the best first
    for size, store in product(range(min(longest, len(text)), 0, -1), stores):
        if len(best) >= n:
            break
        found = store.following(text[-size:])
        counts = Counter(x[:end] for end in range(1, AFTER + 1) for x in found if len(x) >= end)
        for prefix, _ in counts.most_common():  # of equals the shorter first
            best.setdefault(prefix)
    [root] = as_tokens(text[-1])
    return trie(root, map(as_tokens, islice(best, n)))[:2]


def plans(store: Datastore, grow: bool, target: CachedLM) -> Iterator[tuple]:
    """(guesses, expected tokens, seconds of a call)."""
    costs = row_costs(target, CALLS[-1])
    for m, gain in store.gain.items():
        yield m - 1, gain.with_text if grow else gain.alone, costs[m]


def rest(target: CachedLM, prompt: list[int], *, nodes: int = 0, longest: int = LONGEST,
         grow: bool = True, datastore: str = DATASTORE, store: Datastore | None = None,
         sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Verify what followed the end of the text elsewhere, all in one call.

    nodes:     guesses a call, at most; 0: as many as pay on this machine
    longest:   tokens of the suffix that is looked up, at most; from 1 to 16
    grow:      look it up in the prompt and in the text as it is written, too
    datastore: a file made by `python -m survey.rest build`
    Yields chunks of 1 to 11 tokens; logs {"guessed", "accepted"} a call. `store` replaces the file;
    one without `gain` needs `nodes`.
    """
    if nodes < 0 or not 1 <= longest <= LONGEST:
        raise InputError(f"expected nodes of 0 or more and longest of 1 to {LONGEST}, "
                         f"got {nodes} and {longest}")
    store = store or target.once(("rest", datastore),
                                 lambda: load_datastore(datastore, target.model))
    if nodes == 0 and store.gain is None:
        raise InputError("expected nodes of 1 or more where the store has no gain, got 0")
    target.start(prompt[:-1])
    text = as_text(prompt)
    own = Datastore(text if grow else "")
    while True:
        n = nodes or fastest(target, (store, grow), lambda: plans(store, grow, target))
        ids, parents = retrieve([own, store], text, n, longest)
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents)))
        target.commit(path)
        text += as_text(chunk)
        if grow:
            own.add(as_text(chunk))
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1})
        yield chunk


# ----------------------------------------------------------------------------- the datastore

def load_datastore(path: str | Path, model) -> Datastore:
    """InputError where the file was made for another model, or is damaged."""
    header, tensors = load_part(path, "a REST datastore", model)
    try:
        text = "".join(map(chr, tensors["tokens"].tolist()))  # as in `as_text`
        gain = {m: Gain(*map(float, header["tokens_per_call"][i])) for i, m in enumerate(CALLS)}
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"expected a REST datastore, got {str(path)!r}: {error!r}") from error
    last = chr(len(model.get_input_embeddings().weight))
    if not BOUNDARY < max(text, default=BOUNDARY) <= last:
        raise InputError(f"expected tokens that the model has, got {str(path)!r} with others")
    return Datastore(text, gain)


def tokens_per_call(store: Datastore, data: list[tuple[list[int], list[int]]], n: int,
                    grow: bool) -> float:
    """Of (prompt, answer) pairs with trees of n guesses; the answers are what the target chooses
    (texts may not be), so it need not be asked."""
    calls = 0
    for prompt, answer in data:
        text = as_text(prompt + answer)
        own = Datastore(as_text(prompt) if grow else "")
        at = 0  # tokens of the answer that are final
        while at < len(answer):
            ids, parents = retrieve([own, store], text[:len(prompt) + at], n)
            node_of = {edge: node for node, edge in enumerate(zip(parents, ids))}
            node, before = 0, at
            while node is not None and at < len(answer):
                node = node_of.get((node, answer[at]))
                at += 1
            calls += 1
            if grow:
                own.add(as_text(answer[before:at]))
    return sum(len(answer) for _, answer in data) / calls


def build(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          text: bool = False, max_new_tokens: int = 200) -> None:
    """Make a datastore of the model's own greedy answers to prompts; on a tenth of them, 50 at
    most, measure what the others are worth.

    out:  the safetensors file to make
    work: folder of answers (default: OUT.work)
    text: of the file's texts themselves, not of answers to them
    max_new_tokens: of an answer
    """
    from models.training import collect_answers
    if max_new_tokens < 1:
        raise InputError(f"expected max-new-tokens of 1 or more, got {max_new_tokens}")
    longest = context_length(model) - max_new_tokens
    prompts = [list(p) for p in dict.fromkeys(map(tuple, prompts)) if text or len(p) <= longest]
    if text:
        data = [(p[:1], p[1:]) for p in prompts if len(p) > 1]
    else:
        work = work or Path(f"{out}.work")
        data = list(zip(prompts, collect_answers(model, tokenizer, prompts, max_new_tokens, work)))
    if len(data) < 2:
        raise InputError(f"expected 2 texts or more, or prompts of at most {longest} tokens, "
                         f"got {len(data)}")
    texts = [as_text(p[-BEGIN:] + a) + BOUNDARY for p, a in data]
    held_out = random.Random(0).sample(range(len(data)), max(1, min(50, len(data) // 10)))
    others = Datastore("".join(x for i, x in enumerate(texts) if i not in held_out))
    replayed = [(data[i][0], data[i][1][:max_new_tokens]) for i in held_out]
    gain = [Gain(*(tokens_per_call(others, replayed, m - 1, grow) for grow in (False, True)))
            for m in CALLS]
    tokens = torch.tensor([ord(x) for x in "".join(texts)])
    print(f"{len(texts)} texts, {len(tokens):,} tokens; tokens per call of {len(held_out)} held "
          "out, by rows, with the datastore alone and with the text itself as well: "
          + ", ".join(f"{m}: {x.alone:.2f}, {x.with_text:.2f}" for m, x in zip(CALLS, gain)))
    kind = torch.uint16 if tokens.max() < 2 ** 16 else torch.int32
    save_part(out, "a REST datastore", model, {"tokens": tokens.to(kind)}, tokens_per_call=gain)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    guessed = sum(r["guessed"] for r in run.log) / len(run.log)
    accepted = sum(r["accepted"] for r in run.log) / len(run.log)
    none = sum(r["guessed"] == 0 for r in run.log)
    return (f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted; no guess in {none} of "
            f"{len(run.log)} calls")


if __name__ == "__main__":
    from cli import main
    sys.exit(main([rest], report, commands=[build], ranges={"nodes": (1, 3, 7, 15, 31, 63)}))
