"""TriForce: for long texts, the target drafts with a part of its cache, and a small model for it.

Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical
Speculative Decoding", arXiv 2404.11912; released code: Infini-AI-Lab/TriForce.

    python -m survey.triforce --budget 512 --prompt "a long text"

On a long text a call waits for its cache more than for its weights, and attention looks at a few
places. So there are two models and three caches, and each one drafts for the one below it:

    M_q, C_q   the draft, with the first and the newest rows of its cache      γ1 tokens a review
    M_p, C_r   the target, with the rows of its cache that it looks at most    γ2 tokens a round
    M_p, C_p   the target, with all rows                                       verifies them

Rows of a key head's cache (#) after a context of 24 tokens and 3 more, with chunks of 4, a budget
of 12, 2 first rows (`sinks`) and a window of 4:

    C_q   ##..................#######     the first rows, the window, and what came after it
    C_r   ####....####....####....###     the first chunk, two by attention, and what came later
    C_p   ###########################     all

Every review is Leviathan's rule (../speculative.py). So a token that leaves a level has exactly the
distribution of that level, and the next level judges it by that one: the output is lossless.

Departures:
- Review by C_r. Released: after a rejection it draws from p again, which is not exact. Here: from
  the residual. Why: exactness.
- γ1. Released: 1. Here: `inner`, 2 by default.
- Newest rows in C_r. Released: they overwrite the last retrieved ones, so that C_r keeps its size.
  Here: they come beside them. Why: nothing that was retrieved is lost in a long answer.
- Prompt of the draft. Released: read with C_q's few rows, under positions within C_q. Here: read
  with full attention, and cut to C_q afterwards; rows keep their positions. Why: all drafts are
  prefilled alike. So the paper's own draft, of 2,048 positions, cannot read a longer text here.
- Cut of C_q. Released: after every round. Here: when there are two windows of newest rows. Why: a
  cut copies all rows.
- Retrieval. Released: models whose heads each have keys of their own. Here also: a group of query
  heads that shares keys adds its scores up. As released, rows are retrieved once, at the prompt.
"""
import sys
from contextlib import contextmanager
from typing import Iterator

from common import CachedLM, InputError, KVCache, Sampler, greedy, grouped_attention
from speculative import report_acceptance, verify
from survey.cascade import Level, review
from survey.views import move_counts

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask


# ------------------------------------------------------------------------- a part of a cache

class PartialLM(CachedLM):
    """A model whose cache has some rows of a text: chosen ones, and all of the newest tokens.

        rows        [  kept rows  |      newest rows       |  pending nodes  ]
        how many       prefix            length              len(parents)
        positions      their own         skipped …           skipped + length …

    Kept rows are a prefix that every node sees, whatever positions they came from. So no window of
    a layer leaves them out. `skipped` counts the tokens of the text before the newest ones.
    """

    skipped = 0

    @property
    def text_length(self) -> int:
        """Count the tokens of the text, with those that have no row."""
        return self.skipped + self.length

    @torch.inference_mode()
    def take(self, lm: CachedLM, slots: dict[int, torch.Tensor], kept: int, length: int) -> None:
        """Copy rows from the cache of the same model, or from its own.

        slots   {layer: [heads, n]}, where the rows are; those of the newest tokens are the last
        kept    how many of the n are kept rows, and not the newest tokens'
        length  tokens of the text that ends with the newest rows
        """
        n = kept
        for layer, buffers in lm.cache.layers.items():
            n = slots[layer].shape[1]
            index = slots[layer][None, :, :, None].to(buffers[0].device)
            rows = [x.gather(2, index.expand(-1, -1, -1, x.shape[3])) for x in buffers]
            self.cache.start = 0
            self.cache.update(*rows, layer)
        self.prefix = kept
        self.length = n - kept
        self.skipped = length - self.length
        self.parents = []

    @torch.inference_mode()
    def copy_newest(self, lm: CachedLM, position: int) -> None:
        """Copy the rows from a position on from the cache that has all rows, over its own."""
        self.cache.start = self.prefix + position - self.skipped
        for layer, buffers in lm.cache.layers.items():
            rows = [x[:, :, position:lm.length] for x in buffers]
            self.cache.update(*rows, layer)
        self.length = lm.length - self.skipped
        self.parents = []

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the text, among them all that have no row."""
        super().truncate(length - self.skipped)

    def layout(self, parents: list[int], sees_prefix: list[bool]):
        """Let all nodes see the kept rows, and place the nodes in the whole text."""
        positions, mask = super().layout(parents, [True] * len(sees_prefix))
        return (positions + self.skipped).clamp(max=self.max_length - 1), mask


def choose_ends(lm: CachedLM, sinks: int, window: int) -> tuple[dict[int, torch.Tensor], int]:
    """Choose the first and the newest rows of a cache. StreamingLLM, Xiao et al., arXiv 2309.17453.

    sinks    how many of the first rows
    window   how many of the newest rows
    returns  slots and kept, as `PartialLM.take` has them: kept is `sinks`, or 0 if all rows fit
    """
    slots = torch.arange(lm.prefix + lm.length)
    kept = 0
    if len(slots) > sinks + window:
        slots = torch.cat([slots[:sinks], slots[-window:]])
        kept = sinks
    layers = lm.cache.layers.items()
    return {layer: slots.expand(keys.shape[1], -1) for layer, (keys, _) in layers}, kept


# -------------------------------------------------------------------------------- retrieval

@contextmanager
def record_queries(model) -> Iterator[dict[int, torch.Tensor]]:
    """Record what a model's attention asks for, in {layer: the queries [heads, d] of the last row
    of its last pass}."""
    if model.config._attn_implementation != "grouped":
        raise InputError(f"expected attention that can be replaced, got {type(model).__name__}")
    queries = {}

    def record(module, query, key, value, attention_mask, **options):
        queries[module.layer_idx] = query[0, :, -1]
        return grouped_attention(module, query, key, value, attention_mask, **options)
    AttentionInterface.register("recording", record)
    AttentionMaskInterface.register("recording", sdpa_mask)
    model.set_attn_implementation("recording")
    try:
        yield queries
    finally:
        model.set_attn_implementation("grouped")


@torch.inference_mode()
def retrieve(lm: CachedLM, token: int, budget: int,
             chunk: int) -> tuple[dict[int, torch.Tensor], int]:
    """Choose the rows of the context that a token looks at most. Section 4.1.

    Rows are chosen by chunks, for each layer and key head: the chunks whose mean key the token's
    query likes best, and always the first one. What is left behind the last chunk counts as newest.

    token    comes after the context
    budget   how many rows, at most
    chunk    how many rows lie together
    returns  slots and kept, as `PartialLM.take` has them
    """
    with record_queries(lm.model) as queries:
        lm.forward([token], keep=0, counts=False)
    lm.truncate(lm.length)
    chunks = lm.length // chunk
    chosen = min(chunks, max(1, budget // chunk))
    slots = {}
    for layer, query in queries.items():
        keys = lm.cache.layers[layer][0][0, :, :chunks * chunk]  # [heads, slots, d]
        means = keys.unflatten(1, (chunks, chunk)).float().mean(2)  # [heads, chunks, d]
        groups = query.float().unflatten(0, (len(keys), -1))  # [heads, queries of a head, d]
        scores = torch.einsum("hcd,hgd->hc", means, groups)
        scores[:, :1] = torch.inf
        best = scores.topk(chosen).indices.sort().values.cpu()  # [heads, chosen]
        inside = (best[:, :, None] * chunk + torch.arange(chunk)).flatten(1)
        behind = torch.arange(chunks * chunk, lm.length).expand(len(keys), -1)
        slots[layer] = torch.cat([inside, behind], 1)
    return slots, chosen * chunk


# ---------------------------------------------------------------------------------- decoding

def update_caches(levels: list[Level], text: list[int], old: int) -> None:
    """Drop the rows of rejected guesses from all three caches, and mend those of C_r.

    levels  M_p with C_p, M_p with C_r, and M_q with C_q
    text    without the root, whose row no cache has
    old     how many of its tokens had rows before this round
    """
    whole, retrieved, small = levels
    whole.keep(text)
    retrieved.lm.copy_newest(whole.lm, old)  # its own rows saw a part of the text alone
    retrieved.text = text
    small.keep(text)


def triforce(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 5,
             inner: int = 2, budget: int = 512, chunk: int = 8, sinks: int = 16, window: int = 240,
             sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Let the draft, with the ends of its cache, draft for the target with the retrieved part of
    its cache, which drafts for the target with its whole cache. Section 4, Alg. 1. For long texts.

    gamma:  tokens a round for the target (γ2)
    inner:  tokens of the draft for a review by the target with a part of its cache (γ1)
    budget, chunk: rows of the prompt that are retrieved; how many of them lie together
    sinks, window: first and newest rows that the draft keeps
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted", "reviews" by a part}.
    """
    for name, value, least in (("gamma", gamma, 1), ("inner", inner, 0), ("chunk", chunk, 1),
                               ("budget", budget, chunk), ("sinks", sinks, 1),
                               ("window", window, 1)):
        if value < least:
            raise InputError(f"--{name} must be {least} or more, got {value}")
    if type(target.cache) is not KVCache:
        raise InputError("--graphs must be off for triforce, which copies a part of a cache")
    # Alg. 1, before its loop: fill C_p and C_q, and build C_r
    text = list(prompt)
    context = text[:-1]
    for lm in (target, draft):
        lm.start(context)
    part, small = PartialLM(target.model, target.vocab), PartialLM(draft.model, draft.vocab)
    part.take(target, *retrieve(target, prompt[-1], budget, chunk), len(context))
    small.take(draft, *choose_ends(draft, sinks, window), len(context))
    levels = [Level(lm, context) for lm in (target, part, small)]
    while True:
        # Inner loop: M_p with C_r reviews γ1 tokens of M_q at a time, until there are γ2 tokens
        guesses, guess_probs, reviews = [], [], 0
        while len(guesses) < gamma:
            tokens, probs = review(levels[1:], [[inner], []], text + guesses, sample)
            guesses += tokens
            guess_probs.append(probs)
            reviews += 1
        guesses = guesses[:gamma]
        draft_probs = torch.cat(guess_probs)[:gamma]  # [γ2, V]
        # Outer loop: M_p with C_p verifies these, and adds a token of its own
        logits = levels[0].score(text + guesses, gamma + 1)
        target_probs = sample.probs(logits)  # [γ2 + 1, V]
        accepted, root = verify(target_probs, draft_probs, guesses, sample)
        tokens = guesses[:accepted] + [root]
        text = text + tokens
        # Update C_p, C_r and C_q; evict rows of C_q
        update_caches(levels, text[:-1], len(text) - len(tokens) - 1)
        if small.prefix + small.length > sinks + 2 * window:
            small.take(small, *choose_ends(small, sinks, window), small.text_length)
        move_counts(small, draft)
        if log is not None:
            log.append({"drafted": gamma, "accepted": accepted, "reviews": reviews})
        yield tokens


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([triforce], report_acceptance,
                  ranges={"gamma": (1, 3, 5, 8), "inner": (0, 2, 4)}))
