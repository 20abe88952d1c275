"""TriForce: for long texts, the target drafts with a part of its cache, and a small model for it.

Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical
Speculative Decoding", arXiv 2404.11912. Released code: Infini-AI-Lab/TriForce

    python -m survey.triforce --budget 512 --prompt "a long text"

On a long text a call waits for its cache more than for its weights. Attention looks at a few places
of the text only. So there are two models and three caches. Each line drafts for the line below it:

    M_q, C_q   the draft, with the first and the newest rows of its cache
    M_p, C_r   the target, with the rows of its cache that it looks at most
    M_p, C_p   the target, with all rows

A row of a cache is the key and the value of one token. A round with γ1 = 2 and
γ2 = 4, whose two columns of words are two reviews:

    M_q, C_q   draws γ1 tokens       the cat         on my
    M_p, C_r   reviews them          the cat sat     on the         "sat" and "the" are its own
    M_p, C_p   verifies γ2 tokens    the cat sat on                 one call
    chunk                            the cat sat by                 "on" is rejected, for "by"

Here two reviews give five tokens. The fifth is cut off, because γ2 = 4.

Rows are retrieved by chunks. As in the paper, a chunk of a cache is a block of rows that lie
together. Below are the rows (#) of a key head's cache after a context of 24 tokens and 3 more. A
chunk has 4 rows, and the budget is 12 rows. There are 2 first rows (`sinks`) and a window of 4:

    C_q   ##..................#######     the first rows, the window, and what came after it
    C_r   ####....####....####....###     the first chunk, two by attention, and what came later
    C_p   ###########################     all

The output is lossless. Every review follows a rule of ../speculative.py, so a token that leaves
a level has exactly the distribution of that level. The next level divides by this distribution.

Departures:
- The rule. Paper: tokens are judged one by one. Here: by `verify_block` of speculative.py. Why: on
  average it accepts more.
- Tokens of a round. Paper: all tokens of the reviews are verified, γ2 or more (Alg. 1, line 20).
  Here: those beyond γ2 are cut off. Why: every call of M_p then has as many rows.
- A rejection by M_p with C_r. Released code: a token is drawn from p. Here: from the residual of p,
  as in the paper (line 13). Why: only so has it the distribution p, which the next level divides
  by.
- γ1. Released code: 1. Here: `inner`, 2 by default. Why: the best number depends on the two models.
- The newest rows in C_r. Paper: they overwrite the least important rows (Section 4.3). Here: they
  come beside the retrieved rows. Why: nothing that was retrieved is lost in a long answer.
- The prompt of the draft. Released code: it is read with the few rows of C_q, under positions
  within C_q. Here: it is read with full attention and cut to C_q afterwards, and rows keep their
  positions. Why: all drafts here read prompts alike. The paper's own draft has 2,048 positions, so
  it cannot read a longer text here.
- The cut of C_q. Released code: after every round. Here: when it has two windows of newest rows.
  Why: a cut copies all rows.
- Models. Released code: each query head has keys of its own. Here: a group of query heads may share
  keys, and their scores are summed. Why: newer models share keys.

Left out: retrieving again later, which the paper does at a stride or when fewer guesses are
accepted (Section 4.3). The released code does not.
"""
from contextlib import contextmanager
from typing import Iterator

from common import FAR, KVCache, Sampler, begin, greedy
from speculative import verify_block as verify
from support.engine import (EngineLM, grouped_attention, log_round, require, require_keys,
                            run_as_program)
from support.layers import move_counts
from survey.cascade import Level, review

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface


# ------------------------------------------------------------------------- a part of a cache

class PartialLM(EngineLM):
    """Run a model whose cache has some rows of a text: chosen ones, and those of the newest tokens.

        rows        [  kept rows  |      newest rows       |  pending nodes  ]
        how many       prefix            length              len(parents)
        positions      their own         skipped …           skipped + length …

    Kept rows are a prefix that every node sees. So no window of a layer hides them, however far
    before a node their tokens stand. Their keys hold the positions of these tokens in the text.

    skipped   how many tokens of the text stand before the first of the newest rows. Some of them
              have kept rows, and the others have no row
    """

    skipped = 0

    @torch.inference_mode()
    def take(self, lm: EngineLM, slots: dict[int, torch.Tensor], kept: int, length: int) -> None:
        """Replace all rows by copies of chosen rows from a cache of the same model.

        A text has 12 tokens. Rows 0, 1, 4 and 5 are kept beside the newest three:

            slots   [ 0  1  4  5  |  9 10 11 ]     kept = 4, length = 12
                      kept rows      newest        then prefix = 4, self.length = 3, skipped = 9

        lm      has the cache that is read. It may be this PartialLM itself
        slots   {layer: [heads, n]}, the slots that are read. First come the slots of kept rows,
                which heads may choose differently, and then those of the newest rows
        kept    how many of the n slots are those of kept rows
        length  how many tokens the whole text has, whose last tokens the newest rows belong to
        """
        n = kept  # an empty context has no layers in its cache, and then kept is 0
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
    def copy_newest(self, lm: EngineLM, position: int) -> None:
        """Copy the newest rows of another cache over those of this one, from one position on.

        lm        has all rows of the text, of the same model
        position  of the first token whose row is overwritten, `skipped` or more
        """
        self.cache.start = self.prefix + position - self.skipped
        for layer, buffers in lm.cache.layers.items():
            self.cache.update(*(x[:, :, position:lm.length] for x in buffers), layer)
        self.length = lm.length - self.skipped
        self.parents = []

    def truncate(self, length: int) -> None:
        """Keep the rows of the first `length` tokens of the text, and no pending node.

        length   `skipped` or more, since kept rows cannot be cut
        """
        super().truncate(length - self.skipped)

    def layout(self, parents: list[int], n: int):
        """Compute what CachedLM's `layout` does, in the whole text. All nodes see the kept rows."""
        visible, *positions = super().layout(parents, n)
        visible = F.pad(visible, (self.prefix, 0), value=True)
        rows, slots = (x + self.skipped for x in positions)
        rows = rows.clamp(max=self.max_length - 1)
        return visible, rows, F.pad(slots, (self.prefix, 0), value=FAR)


def choose_ends(lm: EngineLM, sinks: int, window: int) -> tuple[dict[int, torch.Tensor], int]:
    """Choose the first and the newest rows of a cache. StreamingLLM, Xiao et al., arXiv 2309.17453.

    lm       has the cache, whole or already cut to its ends
    sinks    how many of the first rows are chosen
    window   how many of the newest rows are chosen
    returns  slots and kept, as `PartialLM.take` reads them. If the cache has no more rows than
             sinks + window, all are chosen and count as newest rows, so that kept is 0. Otherwise
             kept is sinks
    """
    # Rows that an earlier cut kept are the prefix, so that the first rows stay the same
    slots = torch.arange(lm.prefix + lm.length)
    kept = 0
    if len(slots) > sinks + window:
        slots = torch.cat([slots[:sinks], slots[-window:]])
        kept = sinks
    buffers = lm.cache.layers.items()
    return {layer: slots.expand(keys.shape[1], -1) for layer, (keys, _) in buffers}, kept


# -------------------------------------------------------------------------------- retrieval

@contextmanager
def record_queries(model) -> Iterator[dict[int, torch.Tensor]]:
    """Record the queries of a model's last row, as long as the `with` block runs.

    model    its attention must be `grouped_attention`, which `load` chooses where a model allows it
    yields   {layer: [heads, d]}, the queries of the last row of the latest call
    """
    require(model.config._attn_implementation == "grouped", "target",
            "a model with attention that can be replaced", type(model).__name__)
    queries = {}

    def record(module, query, key, value, attention_mask, **options):
        queries[module.layer_idx] = query[0, :, -1]
        return grouped_attention(module, query, key, value, attention_mask, **options)
    AttentionInterface.register("recording", record)
    AttentionMaskInterface.register("recording", AttentionMaskInterface()["grouped"])
    model.set_attn_implementation("recording")  # of this model only: others may run meanwhile
    try:
        yield queries
    finally:
        model.set_attn_implementation("grouped")


@torch.inference_mode()
def retrieve_chunks(lm: EngineLM, token: int, budget: int,
                    chunk: int) -> tuple[dict[int, torch.Tensor], int]:
    """Choose the rows of the context that a token looks at most. Section 4.1.

    Rows are chosen by chunks, for each layer and each key head. A chunk scores the product of its
    mean key and the token's query. The first chunk is always chosen. The rows after the last whole
    chunk are chosen too, and count as newest rows.

    lm       has the whole context in its cache
    token    the token after the context, whose queries are asked. Its row does not stay in the
             cache
    budget   how many rows of whole chunks are chosen, at most
    chunk    how many rows a chunk has
    returns  slots and kept, as `PartialLM.take` reads them
    """
    # 1. Record the queries of the token, in a call whose row is forgotten
    with record_queries(lm.model) as queries:
        lm.forward([token], keep=0)
    lm.truncate(lm.length)
    # 2. How many chunks there are, and how many are chosen
    chunks = lm.length // chunk
    chosen = min(chunks, max(1, budget // chunk))
    slots = {}
    for layer, query in queries.items():
        # 3. Score each chunk by its mean key, summed over the query heads that share a key head
        keys = lm.cache.layers[layer][0][0, :, :chunks * chunk]  # [heads, slots, d]
        means = keys.unflatten(1, (chunks, chunk)).float().mean(2)  # [heads, chunks, d]
        groups = query.float().unflatten(0, (len(keys), -1))  # [heads, queries of a head, d]
        scores = torch.einsum("hcd,hgd->hc", means, groups)
        scores[:, :1] = torch.inf  # the first chunk, which attention falls back on (sinks)
        # 4. Choose the best chunks, in the order of the text, and all rows after the last chunk
        best = scores.topk(chosen).indices.sort().values.cpu()  # [heads, chosen]
        inside = (best[:, :, None] * chunk + torch.arange(chunk)).flatten(1)
        behind = torch.arange(chunks * chunk, lm.length).expand(len(keys), -1)
        slots[layer] = torch.cat([inside, behind], 1)
    return slots, chosen * chunk


# ---------------------------------------------------------------------------------- decoding

def triforce(target: EngineLM, draft: EngineLM, prompt: list[int], *, gamma: int = 5,
             inner: int = 2, budget: int = 512, chunk: int = 8, sinks: int = 16, window: int = 240,
             sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Draft for the target's whole cache with a part of it, and for this part with a small model.

    Section 4, Alg. 1. It is made for long texts.

    gamma:  tokens a round that the target with a part of its cache drafts (γ2), 1 or more
    inner:  tokens that the small model drafts for each review by this part (γ1), 0 or more. With 0
            the small model is never called
    budget: rows of the prompt that the part has, at least those of one chunk, 1 or more
    chunk:  rows of the prompt that are retrieved together, 1 or more
    sinks:  first rows that the small model's cache keeps, 1 or more
    window: newest rows that the small model's cache keeps, 1 or more

    Yields chunks of 1 to gamma + 1 tokens; logs {"guessed", "accepted", "reviews"} a round. A
    review is a call of the target with a part of its cache. It is not counted as a call of the
    target.
    """
    require(budget >= chunk, "budget", f"{chunk} or more", budget)
    for option, lm in (("target", target), ("draft", draft)):
        require(type(lm.cache) is KVCache, option, "a model whose layers all have keys and values, "
                "and --graphs must be off", type(lm.model).__name__)
    require_keys(target.model)  # a layer without keys of its own could not choose its rows
    # Alg. 1, before its loop: fill C_p with the context, build C_r out of it, and fill C_q
    text = begin(prompt, target, draft)
    context = text[:-1]
    part, small = PartialLM(target.model, target.vocab), PartialLM(draft.model, draft.vocab)
    part.take(target, *retrieve_chunks(target, text[-1], budget, chunk), len(context))
    small.take(draft, *choose_ends(draft, sinks, window), len(context))
    whole, retrieved, ends = (Level(lm, context) for lm in (target, part, small))
    while True:
        # Alg. 1, lines 5 to 18: M_p with C_r reviews γ1 tokens of M_q at a time, until there are γ2
        # tokens. A review gives the accepted ones and one more token. [[inner], []] says that M_p
        # reviews `inner` tokens of M_q, and that M_q reviews none
        guesses, guess_probs, reviews = [], [], 0
        while len(guesses) < gamma:
            tokens, probs = review([retrieved, ends], [[inner], []], text + guesses, sample)
            guesses += tokens
            guess_probs.append(probs)
            reviews += 1
        # The last review may have given more than γ2 tokens
        guesses = guesses[:gamma]
        draft_probs = torch.cat(guess_probs)[:gamma]  # [γ2, V]
        # Lines 20 to 29. M_p with C_p verifies the γ2 tokens, and adds one token: [γ2 + 1, V]
        target_probs = sample.probs(whole.score(text + guesses, gamma + 1), target.places)
        accepted, root = verify(target_probs, draft_probs, guesses, sample)
        old = len(text) - 1  # how many tokens the context had before this round
        text = text + guesses[:accepted] + [root]
        # Line 30: drop the rows of rejected guesses from all three caches. The root has no row yet
        context = text[:-1]
        whole.keep(context)
        ends.keep(context)
        # The newest rows that C_r made itself saw only a part of the text. Those of C_p saw all
        part.copy_newest(target, old)
        retrieved.text = context
        # Cut C_q, if its newest rows fill two windows
        if small.prefix + small.length > sinks + 2 * window:
            small.take(small, *choose_ends(small, sinks, window), small.skipped + small.length)
        move_counts(small, draft)  # `draft` itself was only called for the prompt
        log_round(log, guessed=gamma, accepted=accepted, reviews=reviews)
        yield text[old + 1:]


COMMAND_LINE = dict(methods=[triforce], ranges={"gamma": (1, 3, 5, 8), "inner": (0, 2, 4)},
                    graphs=False)

if __name__ == "__main__":
    run_as_program(__file__)
