"""Drafts for drafts: a chain of ever cheaper guessers, each reviewed by the next better one.

cascade   Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference", arXiv
          2312.11462: models, the last one without weights; the better ones write the early guesses
triforce  Sun et al., "TriForce", arXiv 2404.11912: a small draft that sees the text's beginning and
          end, the target with the part of its cache that it looks at most, the target

    python -m survey.cascade --draft SMALL --draft SMALLER --prompt "..."
    python -m survey.cascade --method triforce --budget 512 --prompt "a long text"

    target   reviews   γ tokens of draft 1, tail of draft 2, …, tail of Max-Gram      (horizontal)
    draft 1  reviews   inner tokens of draft 2, until it has γ                          (vertical)
    draft 2  reviews   inner tokens of Max-Gram, until it has what draft 1 asked for

Every review is Leviathan's rule (../speculative.py), so a token that leaves a level has exactly the
distribution of that level's model, and the next better level judges it by that one: lossless.

Departures: cascade's counts are one for each direction (the paper: a matrix that is searched); no
lenient review, which is not exact when sampling; bigrams are counted in REST's datastore.
TriForce's rows keep their positions, within the model's context; it retrieves once, at the prompt.
"""
import sys
from collections import Counter
from itertools import takewhile
from typing import Iterator, Sequence

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from common import (CachedLM, InputError, KVCache, Sampler, ancestor_mask, attention_mask, greedy,
                    grouped_attention)
from speculative import report, verify
from survey.rest import BOUNDARY, DATASTORE, LONGEST, as_text, as_tokens, load_datastore
from survey.views import move_counts


# -------------------------------------------------------------------------- levels and reviews

class Level:
    """A model and the text that it has rows of."""

    def __init__(self, lm: CachedLM, text: list[int]):
        self.lm, self.text = lm, text

    def keep(self, text: list[int]) -> int:
        """Drop all but what this text begins with; how many tokens that are."""
        same = min(len(self.text), len(text))
        while self.text[:same] != text[:same]:
            same -= 1
        self.lm.truncate(same)
        self.text = text[:same]
        return same

    def after(self, text: list[int], n: int) -> torch.Tensor:
        """Logits [n, V] after each of the last n tokens of a text."""
        same = self.keep(text[:-n])
        logits = self.lm.forward(text[same:])
        self.lm.commit(range(len(text) - same))
        self.text = text
        return logits[-n:]


class MaxGram:
    """The cheapest guesser: what followed the latest of the longest earlier occurrences of the
    text's end, or the follower of its last token in `bigrams`, characters as in `as_text`."""

    def __init__(self, bigrams: dict[str, str], V: int):
        self.bigrams, self.V = bigrams, V

    def following(self, text: str) -> str:
        for n in range(min(LONGEST, len(text) - 1), 0, -1):
            at = text.rfind(text[-n:], 0, len(text) - 1)
            if at >= 0:
                return text[at + n:]
        return self.bigrams.get(text[-1], "")

    def guess(self, text: list[int], most: int) -> list[int]:
        """Up to `most` tokens; a guess is followed by what followed it."""
        known = as_text(text)
        while len(known) < len(text) + most and (more := self.following(known)):
            known += more
        tokens = as_tokens(known[len(text):len(text) + most])
        return [*takewhile(lambda token: token < self.V, tokens)]


def review(levels: list, counts: list[list[int]], text: list[int],
           sample: Sampler) -> tuple[list[int], torch.Tensor]:
    """One call of the first level: (tokens after `text`, what it drew each from [n, V]). It reviews
    counts[0][0] tokens of the second level, then counts[0][1] of the third, and so on."""
    first, *others = levels
    guesses, q = [], []
    for i, many in enumerate(counts[0]):
        if many > 0:
            tokens, probs = drawn(others[i:], counts[1 + i:], text + guesses, many, sample)
            guesses += tokens
            q.append(probs)
    p = sample.probs(first.after(text + guesses, len(guesses) + 1))  # [guesses + 1, V]
    q = torch.cat([p[:0], *(x.to(p.device) for x in q)])
    accepted, token = verify(p, q, guesses, sample)
    return guesses[:accepted] + [token], p[:accepted + 1]


def drawn(levels: list, counts: list[list[int]], text: list[int], most: int,
          sample: Sampler) -> tuple[list[int], torch.Tensor]:
    """(`most` tokens after `text` that the first level drew, with the help of the others; what it
    drew each from [most, V]); fewer of Max-Gram, which is sure of each."""
    if isinstance(levels[0], MaxGram):
        tokens = levels[0].guess(text, most)
        return tokens, F.one_hot(torch.tensor(tokens, dtype=torch.long), levels[0].V).float()
    tokens, probs = [], []
    while len(tokens) < most:
        new, its = review(levels, counts, text + tokens, sample)
        tokens += new
        probs.append(its)
    return tokens[:most], torch.cat(probs)[:most]


# ------------------------------------------------------------------ Cascade Speculative Drafting

def bigrams(path: str, model) -> dict[str, str]:
    """The most frequent follower of each token in a datastore of survey/rest.py; {} for no path."""
    text = load_datastore(path, model).text if path else ""
    best = {}
    for (x, y), _ in Counter(zip(text, text[1:])).most_common():
        if BOUNDARY not in (x, y):
            best.setdefault(x, y)
    return best


def cascade(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5, inner: int = 3,
            tail: int = 2, grams: str = DATASTORE, more_drafts: Sequence[CachedLM] = (),
            sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Drafts draft for drafts. Chen et al., Alg. 1. `more_drafts` (--draft again): the next cheaper
    ones, in order; the last is always Max-Gram.

    gamma: tokens a round that the first draft gives the target
    inner: tokens that a draft is given by the next one for a review
    tail:  tokens a round that each later draft appends to those, the better one first
    grams: a datastore of `python -m survey.rest build`, whose bigrams are counted, or nothing
    Yields chunks of 1 to gamma + (drafts) tail + 1 tokens; logs {"drafted", "accepted"} a round.
    """
    if min(gamma, inner, tail) < 0:
        raise InputError(f"expected 0 or more, got gamma {gamma}, inner {inner} and tail {tail}")
    followers = target.once(("bigrams", grams), lambda: bigrams(grams, target.model))
    lms = [target, draft, *more_drafts]
    for lm in lms:
        lm.start(prompt[:-1])
    V = target.vocab or target.model.get_output_embeddings().weight.shape[0]
    levels = [*(Level(lm, prompt[:-1]) for lm in lms), MaxGram(followers, V)]
    counts = [[gamma] + [tail] * len(lms[1:]), *([inner] for _ in lms[1:])]
    text = list(prompt)
    while True:
        rows = target.rows
        tokens, _ = review(levels, counts, text, sample)
        text = text + tokens
        if log is not None:
            log.append({"drafted": target.rows - rows - 1, "accepted": len(tokens) - 1})
        yield tokens


# ----------------------------------------------------------------------------------- TriForce

class Part(CachedLM):
    """A model with a part of its context: P rows of the beginning, seen by all, whatever their
    positions are, and the newest tokens. `prefix` + a newest token's position is its slot."""

    @torch.inference_mode()
    def take(self, lm: CachedLM, slots: dict[int, torch.Tensor], P: int) -> None:
        """Rows of a context of the same model, layer by layer: `slots` [heads, n], of which those
        from the P-th on are the newest tokens'."""
        n = 0
        for layer, buffers in lm.cache.layers.items():
            n = slots[layer].shape[1]
            at = slots[layer][None, :, :, None].to(buffers[0].device)
            rows = [x.gather(2, at.expand(-1, -1, -1, x.shape[3])) for x in buffers]
            self.cache.start = 0
            self.cache.update(*rows, layer)
        self.P, self.length, self.parents = P, lm.length, []
        self.prefix = n - lm.length

    @torch.inference_mode()
    def follow(self, lm: CachedLM, length: int) -> None:
        """From this length on, the rows of the whole context in place of its own."""
        self.cache.start = self.prefix + length
        for layer, rows in lm.cache.layers.items():
            self.cache.update(*(x[:, :, length:lm.length] for x in rows), layer)
        self.length, self.parents = lm.length, []

    def layout(self, parents: list[int], sees_prefix: list[bool]):
        n = len(sees_prefix)
        ancestors = ancestor_mask(parents)
        nodes = self.length - 1 + ancestors.sum(-1)  # positions
        slots = torch.cat([torch.full((self.P,), 10 ** 9),  # no window leaves these out
                           torch.arange(self.P - self.prefix, self.length), nodes])
        visible = F.pad(ancestors[-n:], (self.prefix + self.length, 0), value=True)
        rows = nodes[-n:].clamp(max=self.context - 1)
        mask = attention_mask(self.windows, visible[None], rows[None], slots[None], self.weight)
        return rows[None].to(self.weight.device), mask


def ends(lm: CachedLM, sinks: int, window: int) -> tuple[dict[int, torch.Tensor], int]:
    """(slots, P) of the first and the newest rows (StreamingLLM, Xiao et al., arXiv 2309.17453)."""
    slots = torch.arange(lm.prefix + lm.length)
    P = 0 if len(slots) <= sinks + window else sinks
    if P:
        slots = torch.cat([slots[:sinks], slots[-window:]])
    return {i: slots.expand(keys.shape[1], -1) for i, (keys, _) in lm.cache.layers.items()}, P


asked = {}  # layer: the queries [heads, d] of the last row that it ran


def asking_attention(module, query, key, value, attention_mask, **options):
    asked[module.layer_idx] = query[0, :, -1]
    return grouped_attention(module, query, key, value, attention_mask, **options)


AttentionInterface.register("asking", asking_attention)
AttentionMaskInterface.register("asking", sdpa_mask)


def queries(lm: CachedLM, token: int) -> dict[int, torch.Tensor]:
    """Of the row of a token after the context, for each layer [heads, d]."""
    if lm.model.config._attn_implementation != "grouped":
        raise InputError(f"expected attention that can be replaced, got {type(lm.model).__name__}")
    asked.clear()
    lm.model.set_attn_implementation("asking")
    try:
        lm.forward([token], counts=False)
    finally:
        lm.model.set_attn_implementation("grouped")
    lm.truncate(lm.length)
    return dict(asked)


@torch.inference_mode()
def retrieved(lm: CachedLM, token: int, budget: int,
              chunk: int) -> tuple[dict[int, torch.Tensor], int]:
    """(slots, P) of the chunks of the context whose mean key the token's query likes best, for each
    layer and key head, the first always; and of what is left behind the last chunk. Section 4.1."""
    chunks = lm.length // chunk
    few = min(chunks, max(1, budget // chunk))
    slots = {}
    for layer, query in queries(lm, token).items():
        keys = lm.cache.layers[layer][0][0, :, :chunks * chunk]  # [heads, slots, d]
        means = keys.unflatten(1, (chunks, chunk)).float().mean(2)  # [heads, chunks, d]
        scores = torch.einsum("hcd,hgd->hc", means, query.float().unflatten(0, (len(keys), -1)))
        scores[:, :1] = torch.inf
        best = scores.topk(few).indices.sort().values.cpu()  # [heads, few]
        inside = (best[:, :, None] * chunk + torch.arange(chunk)).flatten(1)
        rest = torch.arange(chunks * chunk, lm.length).expand(len(keys), -1)
        slots[layer] = torch.cat([inside, rest], 1)
    return slots, few * chunk


def triforce(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5,
             inner: int = 2, budget: int = 512, chunk: int = 8, sinks: int = 16, window: int = 240,
             sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """The draft with the ends of its cache drafts for the target with the retrieved part of its
    cache, which drafts for the target. Section 4, Alg. 1. For long texts.

    gamma:  tokens a round for the target (γ2)
    inner:  tokens of the draft for a review by the target with a part of its cache (γ1)
    budget, chunk: rows of the prompt that are retrieved; how many of them together
    sinks, window: first and newest rows that the draft keeps
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted", "reviews" by a part}.
    """
    if min(gamma, chunk, sinks, window) < 1 or inner < 0 or budget < chunk:
        raise InputError("expected 1 or more of each, inner of 0 or more, a budget of a chunk")
    if type(target.cache) is not KVCache:
        raise InputError("expected no --graphs: a part of a cache is copied")
    for lm in (target, draft):
        lm.start(prompt[:-1])
    middle, small = (Part(lm.model, lm.vocab) for lm in (target, draft))
    middle.take(target, *retrieved(target, prompt[-1], budget, chunk))
    small.take(draft, *ends(draft, sinks, window))
    text = list(prompt)
    levels = [Level(lm, text[:-1]) for lm in (target, middle, small)]
    while True:
        reviews = middle.calls
        tokens, _ = review(levels, [[gamma], [inner], []], text, sample)
        move_counts(small, draft)
        text = text + tokens
        levels[0].keep(text[:-1])
        middle.follow(target, len(text) - len(tokens) - 1)
        levels[1].text = text[:-1]
        levels[2].keep(text[:-1])
        if small.prefix + small.length > sinks + 2 * window:
            small.take(small, *ends(small, sinks, window))
        if log is not None:
            log.append({"drafted": gamma, "accepted": len(tokens) - 1,
                        "reviews": middle.calls - reviews})
        yield tokens


if __name__ == "__main__":
    from cli import main
    sys.exit(main([cascade, triforce], report, ranges={"gamma": (1, 3, 5, 8), "inner": (0, 2, 4)}))
