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
import functools
import random
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import islice, product
from pathlib import Path
from typing import Iterator

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common import (WIDTHS, CachedLM, InputError, Sampler, context_length, greedy, own_answers,
                    row_costs, trie, walk)

DATASTORE = str(Path(__file__).resolve().parent.parent / "models/rest.safetensors")
LONGEST, AFTER = 16, 10  # tokens: of s at most, and of what follows it
MATCHES = 100  # places that are counted
BEGIN = 2  # tokens of its prompt before an answer
MOST = 64  # rows of a call
BOUNDARY = "\0"  # between texts; as a token -1


def as_text(tokens: list[int]) -> str:
    """Tokens as a string: Python slices and compares strings fast."""
    return "".join(chr(token + 1) for token in tokens)


def as_tokens(text: str) -> list[int]:
    return [ord(x) - 1 for x in text]


class Datastore:
    """Texts and their suffix array: `order` has all positions, sorted by what stands there.
    `gain[m][grow]`: tokens per call where a call has m rows at most, measured on texts held out;
    grow 0: with the datastore alone, 1: with it and the text itself."""

    def __init__(self, tokens: list[int] = (), gain: dict[int, list[float]] | None = None):
        self.text, self.order, self.gain = "", [], gain
        self.add(tokens)

    def add(self, tokens: list[int]) -> None:
        self.order += range(len(self.text), len(self.text) + len(tokens))
        self.text += as_text(tokens)
        self.order.sort(key=lambda i: self.text[i:i + LONGEST + AFTER])  # few are out of order

    def following(self, s: str) -> list[str]:
        """What stands after s wherever it does, up to AFTER tokens and no BOUNDARY."""
        def here(i: int) -> str:
            return self.text[i:i + len(s)]
        first = bisect_left(self.order, s, key=here)
        end = bisect_right(self.order, s, first, key=here)
        places = self.order[first:end:1 + (end - first) // MATCHES]
        texts = (self.text[i + len(s):i + len(s) + AFTER] for i in places)
        return [text.partition(BOUNDARY)[0] for text in texts]


def retrieve(stores: list[Datastore], text: str, n: int, longest: int = LONGEST):
    """(ids, parents) of up to n guesses below the last token of `text`: the most frequent prefixes
    of what follows its suffixes, the longest suffix first, and for each the first store."""
    best, [root] = {}, as_tokens(text[-1])  # best: the best first
    for size, store in product(range(min(longest, len(text)), 0, -1), stores):
        if len(best) >= n:
            break
        found = store.following(text[-size:])
        counts = Counter(x[:end] for end in range(1, AFTER + 1) for x in found if len(x) >= end)
        best |= dict(counts.most_common())  # of equals the shorter first; what is there stays
    return trie(root, map(as_tokens, islice(best, n)))[:2]


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
    store = store or load_datastore(datastore, target.model)
    if nodes == 0 and store.gain is None:
        raise InputError("expected nodes of 1 or more where the store has no gain, got 0")
    target.start(prompt[:-1], width=nodes + 1 if nodes else MOST)
    if nodes == 0:
        costs = row_costs(target, MOST)
        nodes = max(costs, key=lambda m: store.gain[m][grow] / costs[m]) - 1
    text, own = as_text(prompt), Datastore(prompt if grow else ())
    while True:
        ids, parents = retrieve([own, store], text, nodes, longest)
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents)))
        target.commit(path)
        text += as_text(chunk)
        own.add(chunk if grow else ())
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1})
        yield chunk


def some_embeddings(model) -> torch.Tensor:
    """[64, 64], less their mean: another model has others, a tuned one nearly these."""
    some = model.get_input_embeddings().weight[:1024:16, :64].detach().float().cpu()
    return some - some.mean(0)


@functools.lru_cache(maxsize=1)  # for many prompts it is sorted once
def load_datastore(path: str, model) -> Datastore:
    """InputError where the file was made for another model."""
    try:
        file = load_file(path)
        tokens, kept, gain = file["tokens"], file["model"], file["tokens_per_call"]
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError(f"expected a file made by `build`, got {str(path)!r}: {error}") from error
    here, vocab = some_embeddings(model), len(model.get_input_embeddings().weight)
    if (kept.shape != here.shape or F.cosine_similarity(kept.flatten(), here.flatten(), 0) < 0.5
            or tokens.max() >= vocab):
        raise InputError(f"expected a datastore of this model, got {str(path)!r}: another model's")
    return Datastore(tokens.tolist(), dict(zip(WIDTHS, gain.tolist())))


def tokens_per_call(store: Datastore, data: list[tuple[list[int], list[int]]], n: int,
                    grow: bool) -> float:
    """Of (prompt, answer) pairs with trees of n guesses; the answers are what the target chooses
    (texts may not be), so it need not be asked."""
    calls = 0
    for prompt, answer in data:
        text, own, at = as_text(prompt + answer), Datastore(prompt if grow else ()), 0
        while at < len(answer):
            ids, parents = retrieve([own, store], text[:len(prompt) + at], n)
            children = {edge: i for i, edge in enumerate(zip(parents, ids))}
            node, calls, before = 0, calls + 1, at
            while node is not None and at < len(answer):
                node, at = children.get((node, answer[at])), at + 1
            own.add(answer[before:at] if grow else ())
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
    work, longest = work or Path(f"{out}.work"), context_length(model) - max_new_tokens
    prompts = [list(p) for p in dict.fromkeys(map(tuple, prompts)) if text or len(p) <= longest]
    data = [(p[:1], p[1:]) for p in prompts if text and len(p) > 1]
    if not text:
        work.mkdir(parents=True, exist_ok=True)
        data = list(zip(prompts, own_answers(model, tokenizer, prompts, max_new_tokens, work)))
    if len(data) < 2:
        raise InputError(f"expected 2 texts or more, or prompts of at most {longest} tokens, "
                         f"got {len(data)}")
    texts = [p[-BEGIN:] + a + [-1] for p, a in data]
    held_out = random.Random(0).sample(range(len(data)), max(1, min(50, len(data) // 10)))
    some = Datastore([t for i, x in enumerate(texts) if i not in held_out for t in x])
    asked = [(data[i][0], data[i][1][:max_new_tokens]) for i in held_out]
    gain = [[tokens_per_call(some, asked, m - 1, grow) for grow in (False, True)]
            for m in WIDTHS if m <= MOST]
    tokens = torch.tensor([t for x in texts for t in x])
    print(f"{len(texts)} texts, {len(tokens):,} tokens; tokens per call of {len(held_out)} held "
          "out, by rows, with the datastore alone and with the text itself as well: "
          + ", ".join(f"{m}: {x:.2f}, {y:.2f}" for m, (x, y) in zip(WIDTHS, gain)))
    kind = torch.int16 if tokens.max() < 2 ** 15 else torch.int32
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({"tokens": tokens.to(kind), "model": some_embeddings(model),
               "tokens_per_call": torch.tensor(gain)}, out)
    load_datastore.cache_clear()


def report(run) -> str:
    guessed, accepted = (sum(r[name] for r in run.log) / len(run.log)
                         for name in ("guessed", "accepted"))
    none = sum(r["guessed"] == 0 for r in run.log)
    return (f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted; no guess in {none} of "
            f"{len(run.log)} calls")


if __name__ == "__main__":
    from cli import main
    sys.exit(main([rest], report, commands=[build], ranges={"nodes": (1, 3, 7, 15, 31, 63)}))
