"""DFlash drafts a whole block in one pass; a Markov head lets its guesses fit each other.

    dflash      Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding",
                arXiv 2602.06036
    --markov    the Markov head of "DSpark", arXiv 2607.05147
    the tree    the likeliest paths of a block, as in "DDTree", arXiv 2604.12989

    python -m survey.dflash train --prompts FILE --out my.safetensors
    python -m survey.dflash --adapter my.safetensors --prompt "..."

The h of a token is what enters the tapped layers of the target there. The draft reads the h of all
final tokens but the root, whose own h is not known yet. Its block has one row for the root and
B - 1 rows for a learned mask. Row k makes the guess g_k. Here B = 4, and x_5 is the root:

    target    h of x_0 … x_4
                  │
                  fc, norm
                  │
    draft     H_0 H_1 H_2 H_3 H_4 │  x_5  mask mask mask
               └───┴───┴───┴───┴──┴───┴────┴────┴────┘     some layers, in which a row of the block
                                     │    │    │    │      sees every H and the whole block
                                    z_1  z_2  z_3  z_4     LM head
    Markov                      x_5 ─┴ g_1 ┴ g_2 ┴ g_3 ┴   read from left to right
    guesses                         g_1  g_2  g_3  g_4     of the tokens x_6 to x_9

z_k does not know which tokens the rows before it guess, so two likely guesses need not fit each
other. The Markov head reads the token before, which for g_1 is the root g_0. It costs one product
with a matrix for each node of a tree, and no further pass of the layers:

    p(g_k | g_{k-1}) = softmax(z_k + W_2 W_1[g_{k-1}])

The chance of a node is the product of the p along its path. The tree has the n likeliest nodes, and
is verified as EAGLE's (eagle.py).

Training packs many blocks, whose roots are at random anchors, into one pass over a text. A block
sees itself and the H before its anchor. Of two blocks with B = 2, a row on the left sees each x:

                H_0 H_1 H_2 H_3 H_4   x_2 mask   x_4 mask
        H_1      x   x
        x_2      x   x                 x   x
        mask     x   x                 x   x
        x_4      x   x   x   x                    x   x
        mask     x   x   x   x                    x   x

    loss = Σ_k w_k CrossEntropy(target's distribution, p of row k) / Σ_k w_k
    w_k  = exp(-(k - 1) / 4)                                           Eq. 4 of DFlash, with γ = 4

The sums run over the rows of all blocks. Here g_{k-1} is the token of the text.

Departures, besides those of EAGLE's sampling and tree (eagle.py):
- The network. Paper: the keys and values of all 5 layers come from H, of five taps. Here: H of
  three taps (`--taps`) are rows of 2 layers. A row also reads the H before the root and a vector
  for its place, and the root guesses too, as in DSpark. Why: the draft is an ordinary model with an
  ordinary cache, and the newest H predicts best. But no released draft can be loaded.
- The Markov head. Paper: of rank 256. Here: 64 (`--markov`). Why: small models have few tokens.
- Training. Paper: random layers, labels are tokens, γ is 7, 5 or 4 by the length of the block, a
  rate of 6e-4. Here: layers begin as the target's last ones, labels are the target's distributions,
  γ is 4, the rate 3e-3. Why: small models learn faster so.
"""
import heapq
import random
import sys
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

from common import InputError, KVCache, Sampler, greedy, grouped_attention, walk
from support.clock import MOST, RANKS, Choice, Clock
from support.files import explain_errors
from support.layers import FeatureLM, depth_of, read_taps, tap_widths
from support.parts import (MODELS, Part, fill, follow, head_for, load_trained, match_type, require,
                           save_trained, score_with)
from support.released import (describe_layer, is_released, make_config, read_head,
                              read_layer_config)
from training.acceptance import Text, compute_features
from training.loop import (compute_frozen, count_tokens, find_frequent, fit_part, low_precision,
                           prepare_training, sample_alike, warm_cosine)

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (Qwen3DecoderLayer, Qwen3RMSNorm,
                                                      Qwen3RotaryEmbedding, rotate_half)

ADAPTER = f"{MODELS}/dflash.safetensors"
GAMMA = 4.0  # the loss of guess k weighs exp(-(k - 1) / GAMMA)
DRAFT = ("num_hidden_layers", "layer_types", "attention_bias")  # more of a draft's settings
EVERY = 4  # held-out answers are measured by a tree at each EVERY-th of their places


# ----------------------------------------------------------------------------------- the draft

class DraftLayer(Qwen3DecoderLayer):
    """Be a layer of Qwen3 whose rows also see keys and values of the context."""

    def forward(self, x: torch.Tensor, c: torch.Tensor, rotary: tuple, mask: torch.Tensor,
                cache: KVCache | None) -> torch.Tensor:
        """Compute the rows of blocks.

        x        [N, n, h], the rows
        c        [N, m, h], the new context. It has no input norm, and no row of its own
        rotary   the cosines and sines [N, m + n, d] of the positions of c and x
        mask     [N, 1, n, slots]
        cache    the keys and values of the earlier context. None: there is none
        returns  [N, n, h]
        """
        attn, y = self.self_attn, self.input_layernorm(x)
        both = torch.cat([c.to(y.dtype), y], 1)
        q, k, v = (project(z).unflatten(-1, (-1, attn.head_dim)) for project, z in (
            (attn.q_proj, y), (attn.k_proj, both), (attn.v_proj, both)))
        q, k, v = (z.transpose(1, 2) for z in (attn.q_norm(q), attn.k_norm(k), v))
        cos, sin = (z[:, None] for z in rotary)
        k = k * cos + rotate_half(k) * sin
        m = c.shape[1]
        q = q * cos[:, :, m:] + rotate_half(q) * sin[:, :, m:]
        if cache is not None:
            k, v = cache.update(k, v, attn.layer_idx)
        seen, _ = grouped_attention(attn, q, k, v, mask, scaling=attn.scaling)
        x = x + attn.o_proj(seen.flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockDraft(Part):
    """Guess a block of tokens in one pass. Making a draft freezes the target.

    model    the target
    config   what config.json of a released draft says (`describe_draft`)
    vocab    the tokens that the rows of the LM head stand for, V' of them. None: all
    seed     a seed for the random weights

    tokens   tokens[n - 1] is how many tokens a call with a tree of n nodes gave on held-out answers
    """
    title = "a DFlash draft"
    facts = ("tokens",)

    def __init__(self, model, config: dict, vocab: list[int] | None = None, seed: int = 0):
        super().__init__()
        told = config | config.get("dflash_config", {})
        self.config, self.tokens, self.B = config, [], told["block_size"]
        self.mask, self.taps = told["mask_token_id"], [1 + i for i in told["target_layer_ids"]]
        if not 0 < min(self.taps) <= max(self.taps) <= depth_of(model):
            raise InputError(f"expected target_layer_ids from 0 on, all layers below "
                             f"{depth_of(model)}, got {told['target_layer_ids']}")
        self.scale = told.get("input_embedding_scale", 1.0)
        self.factor = told.get("output_multiplier", 1.0)
        self.cap = told.get("final_logit_softcapping") or 0.0
        self.window = told.get("sliding_window") or 0
        shape = read_layer_config("config", config, model, Qwen3Config, DRAFT)
        self.kinds, h, markov = shape.layer_types, shape.hidden_size, told.get("markov_rank", 0)
        self.embed, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        widths = [self.embed.weight.shape[1], *tap_widths(model, self.taps)]
        if widths != [h] * len(widths):
            raise InputError(f"expected embeddings and hidden states of {h} numbers, as the draft "
                             f"has, got {widths}")
        V = len(self.head.weight)
        self.vocab = torch.tensor(range(V) if vocab is None else vocab, device=model.device)
        size = len(self.vocab)  # V'
        # The row of each token in the LM head and in W_1. All tokens that cannot be guessed share
        # one more row, which only W_1 has.
        self.row = torch.full((V,), size, device=model.device)
        self.row[self.vocab] = torch.arange(size, device=model.device)
        model.requires_grad_(False)
        if vocab is not None:
            self.head = head_for(self.head, self.vocab)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc = torch.nn.Linear(len(self.taps) * h, h, bias=False)
            self.layers = torch.nn.ModuleList(DraftLayer(shape, i) for i in range(len(self.kinds)))
            self.W1 = torch.nn.Embedding(size + 1, markov) if markov else None
            self.W2 = torch.nn.Linear(markov, size, bias=False) if markov else None
        if markov:
            torch.nn.init.zeros_(self.W2.weight)  # at first the Markov head adds nothing
        self.hidden_norm, self.norm = (Qwen3RMSNorm(h, shape.rms_norm_eps) for _ in range(2))
        self.rotary = Qwen3RotaryEmbedding(shape)
        self.to(model.device)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return the context c [..., h] of what was tapped, [..., t], the width of all taps."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def embed_blocks(self, roots: torch.Tensor) -> torch.Tensor:
        """Return what the rows of blocks read, [..., B, h], of their first tokens [...]."""
        ids = F.pad(roots[..., None], (0, self.B - 1), value=self.mask)
        return self.embed(ids).to(self.fc.weight.dtype) * self.scale

    def forward(self, x: torch.Tensor, c: torch.Tensor, positions: torch.Tensor,
                visible: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Run the layers over rows of blocks.

        x          [N, n, h], what the rows read
        c          [N, m, h], the context that is not in the cache
        positions  [N, slots] of the cached context, of c and of x
        visible    bool [N, n, slots], what a row sees if its layer has no window
        cache      as for a layer. Afterwards it has c, too
        returns    [N, n, h], what the LM head reads
        """
        m, n = c.shape[1], x.shape[1]
        past = positions[:, positions.shape[1] - n:, None] - positions[:, None]
        near = visible & (0 <= past) & (past < self.window)
        masks = {kind: torch.where(seen[:, None], 0.0, -torch.inf).to(x)
                 for kind, seen in (("full_attention", visible), ("sliding_attention", near))}
        rotary = self.rotary(x, positions[:, positions.shape[1] - m - n:])
        for layer, kind in zip(self.layers, self.kinds):
            x = layer(x, c, rotary, masks[kind], cache)
        if cache is not None:
            cache.start += m  # rows of a block never join the context
        return self.norm(x)

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V'] of what the LM head reads, without the Markov head."""
        z = self.factor * self.head(hidden.to(self.head.weight.dtype)).float()
        return self.cap * (z / self.cap).tanh() if self.cap else z

    def add_markov(self, z: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Add to logits z [..., V'] what the Markov head says of the tokens [...] before them."""
        if self.W1 is None:
            return z
        # Logits that stand for no token are cut off in decoding. So z may be the narrower one.
        return z + self.W2(self.W1(self.row[tokens]))[..., :z.shape[-1]]


def describe_draft(model, ids: list[int], *, mask: int = 0, layers: int = 2, B: int = 9,
                   markov: int = 64) -> dict:
    """Describe a draft to train for a model, as config.json of a released draft does.

    ids      the layers of the target whose outputs it reads, by number
    mask     the token whose embedding the masks read
    layers   how many layers the draft has
    B        how many rows a block has
    markov   the rank of the Markov head, which released drafts lack. 0: there is none
    """
    own = {"target_layer_ids": ids, "mask_token_id": mask}
    return describe_layer(make_config(model), model) | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers, "attention_bias": False, "block_size": B,
        "num_target_layers": depth_of(model), "dflash_config": own, "markov_rank": markov}


# ---------------------------------------------------------------------------------- decoding

@torch.inference_mode()
def run_block(draft: BlockDraft, cache: KVCache, features: torch.Tensor,
              root: int) -> torch.Tensor:
    """Add new features to the draft's context, and run a block after it.

    cache     the keys and values of the draft's context
    features  [m, t], what was tapped of the tokens that became final since the last block
    returns   z [B - 1, V'], the logits of the guesses, without the Markov head
    """
    c = draft.fuse(features)[None]
    x = draft.embed_blocks(torch.tensor([root], device=features.device))
    positions = torch.arange(cache.start + c.shape[1] + x.shape[1], device=features.device)[None]
    visible = torch.ones_like(positions, dtype=torch.bool).expand(x.shape[1], -1)[None]
    return draft.score(draft(x, c, positions, visible, cache)[0, 1:])


@torch.inference_mode()
def grow_block(draft: BlockDraft, z: torch.Tensor, root: int, n: int) -> tuple[list, list]:
    """Grow the tree of the n likeliest nodes below a root. A node has at most RANKS children.

    z        [B, V'], the logits of a block, without the Markov head
    returns  ids and parents of the nodes, the likeliest first. So the first m are the tree of m
    """
    ids, parents, chances = [root], [-1], [1.0]
    leaves = [0]
    for z_k in z:
        # The nodes of a level share z_k. The Markov head adds what depends on their tokens.
        tokens = torch.tensor([ids[x] for x in leaves], device=z.device)
        logits = draft.add_markov(z_k.expand(len(leaves), -1), tokens).float()
        # A draft that overflows gives NaN, which has no order. Such guesses get a chance of 0.
        probs, rows = logits.softmax(-1).nan_to_num(0.0).topk(min(RANKS, n, z.shape[-1]))
        newest = len(ids)  # the first node of the level that begins here
        for leaf, children, factors in zip(leaves, draft.vocab[rows].tolist(), probs.tolist()):
            ids += children
            parents += [leaf] * len(children)
            chances += [chances[leaf] * p for p in factors]
        # A child is at most as likely as its parent, and comes later. So only the n likeliest nodes
        # so far can have a child among the n likeliest of all.
        kept = heapq.nlargest(n, range(len(ids)), key=chances.__getitem__)
        leaves = [x for x in kept if x >= newest and chances[x] > 0]
        if not leaves:
            break
    new_number = {old: new for new, old in enumerate(kept)}
    return [ids[x] for x in kept], [-1, *(new_number[parents[x]] for x in kept[1:])]


def plan_block(draft: BlockDraft) -> Iterator[Choice]:
    """Yield all sizes of a tree, for the clock to choose from: plans that are numbers of nodes.

    The tokens to be expected are those that a call with so many nodes gave on held-out answers. A
    released draft has none, and gets B nodes, as many as its own code verifies.
    """
    for n, tokens in enumerate(draft.tokens, 1):
        yield Choice(n, tokens, n, n > 1, n)  # a tree of one node needs no block
    if not draft.tokens:
        yield Choice(draft.B, draft.B, draft.B, 1, draft.B)


def dflash(target: FeatureLM, prompt: list[int], *, nodes: int = 0, adapter: str = ADAPTER,
           trained: BlockDraft | None = None, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Draft a block in one pass, verify the tree of its likeliest nodes in one call, keep a path.

    trained   a draft to use in place of a file's

    nodes:   how many nodes a tree has with its root, 0 to 64. With 0, as many as pay on this
             machine
    adapter: file of a draft, made by `python -m survey.dflash train`, or the directory or hub id of
             a released one, whose tree has a node for each row of its block if --nodes is 0
    Yields chunks of 1 to B tokens. Logs {"guessed", "accepted"} a call.
    """
    draft = trained or target.once(("dflash", adapter), lambda: load_draft(adapter, target.model))
    target.start(prompt[:-1], taps=draft.taps)
    root, cache = prompt[-1], KVCache()
    # What was tapped of the final tokens that the draft has not read yet. A prompt of one token has
    # none, so its first call has only the root.
    unread = [target.features] if len(prompt) > 1 else []
    clock = target.once((draft, "clock"), lambda: Clock(target))
    while True:
        n = nodes or clock.choose(lambda: plan_block(draft))
        ids, parents = [root], [-1]
        if n > 1 and unread:
            z = run_block(draft, cache, torch.cat(unread), root)[:, :target.vocab]
            ids, parents = grow_block(draft, z, root, n)
            unread = []
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents)))
        unread.append(target.features[path])
        root = chunk[-1]
        target.commit(path)
        if nodes == 0 and n > 1:
            clock.note(1, n)
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1})
        yield chunk


# ------------------------------------------------------------------------------------ training

def list_anchors(text: Text) -> range:
    """Return the places of all roots: at least one token of the answer comes after each."""
    return range(text.length - 1, len(text.ids) - 1)


def sample_roots(text: Text, n: int, rng: random.Random) -> list[int]:
    """Sample n places of roots. No place comes twice, unless a text has fewer than n places."""
    places = list_anchors(text)
    return rng.sample(places, n, counts=[-(-n // len(places))] * len(places))


class Blocks(NamedTuple):
    """Hold what the B - 1 guesses of G blocks of each of N texts computed, and what they learn."""
    hidden: torch.Tensor  # [N, G, B - 1, h], what the LM head reads
    target: torch.Tensor  # [N, G, B - 1, h], what it reads of the target before the same token
    previous: torch.Tensor  # [N, G, B - 1], the text's token before each guess
    learns: torch.Tensor  # bool [N, G, B - 1], whether the text has a token of the vocabulary there


def make_blocks(draft: BlockDraft, texts: list[Text], anchors: list[list[int]]) -> Blocks:
    """Run the draft over texts and their blocks in one pass, as the header's table shows it.

    texts     their features are what was tapped and, at the end, what the LM head read
    anchors   for each text the places of the roots of G blocks
    """
    device = draft.fc.weight.device
    ids = pad_sequence([x.ids for x in texts], batch_first=True).to(device)  # [N, T]
    features = pad_sequence([x.features for x in texts], batch_first=True).to(device)
    last = features[..., draft.fc.in_features:]
    N, T = ids.shape
    text = torch.arange(N, device=device)[:, None]
    roots = torch.tensor(anchors, device=device)  # [N, G]
    c = draft.fuse(features[..., :draft.fc.in_features])  # [N, T, h]
    x = draft.embed_blocks(ids[text, roots]).flatten(1, 2)  # [N, G B, h]
    at = roots[..., None] + torch.arange(draft.B, device=device)  # [N, G, B], places in the text
    places = torch.arange(T, device=device).expand(N, -1)
    # A row sees the c before its anchor, and its block.
    block = torch.arange(x.shape[1], device=device) // draft.B
    sees_block = (block[:, None] == block).expand(N, -1, -1)
    reach = roots.repeat_interleave(draft.B, 1)[..., None]
    visible = torch.cat([places[:, None] < reach, sees_block], 2)
    hidden = draft(x, c, torch.cat([places, at.flatten(1)], 1), visible)
    lengths = torch.tensor([len(x.ids) for x in texts], device=device)
    at, text = at[..., 1:], text[..., None]
    inside, at = at < lengths[:, None, None], at.clamp(max=T - 1)
    known = draft.row[ids[text, at]] < len(draft.vocab)
    return Blocks(hidden.unflatten(1, (-1, draft.B))[:, :, 1:], last[text, at - 1],
                  ids[text, at - 1], inside & known)


def block_loss(draft: BlockDraft, score: Callable, texts: list[Text],
               anchors: list[list[int]]) -> torch.Tensor:
    """Compute the loss of the header, the weighted mean over all guesses of all blocks.

    score     turns what the target's LM head reads into logits [..., V'] (parts.score_with)
    texts     the texts of a step
    anchors   for each text equally many places of roots
    """
    hidden, target, previous, learns = make_blocks(draft, texts, anchors)
    logits = draft.add_markov(draft.score(hidden[learns]), previous[learns])
    with torch.no_grad():  # the target's distribution over the tokens that the draft can guess
        target_probs = score(target[learns]).softmax(-1)  # [guesses, V']
    each = F.cross_entropy(logits, target_probs, reduction="none")
    k = learns.nonzero()[:, 2]  # from 0 on, the number of the guess in its block
    weights = torch.exp(-k / GAMMA)
    return (weights * each).sum() / weights.sum().clamp(min=1e-9)


@torch.inference_mode()
def count_tree_tokens(draft: BlockDraft, texts: list[Text]) -> list[float]:
    """Measure how many tokens calls with trees of 1, 2, … nodes give on held-out texts."""
    counts, trees = torch.zeros(MOST), 0
    for text in texts:
        ids, anchors = text.ids.tolist(), list_anchors(text)[::EVERY]
        for anchor, hidden in zip(anchors, make_blocks(draft, [text], [[*anchors]]).hidden[0]):
            tree, parents = grow_block(draft, draft.score(hidden), ids[anchor], MOST)
            counts[follow(tree, parents, ids[anchor + 1:])] += 1
            trees += 1
    # The first n nodes are the tree of n nodes, which keeps those nodes of the path that it has.
    return (counts.cumsum(0) / max(1, trees)).tolist()


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          layers: int = 2, B: int = 9, markov: int = 64, taps: str = "", vocab: int = 0,
          anchors: int = 24, max_new_tokens: int = 200, steps: int = 1500, batch: int = 16,
          lr: float = 3e-3, seed: int = 0) -> None:
    """Train a block draft for a frozen model on its own answers. A stopped run goes on.

    layers:  how many layers the draft has, 1 or more
    B:       how many rows a block has, one more than its guesses, 2 or more
    markov:  the rank of the Markov head, 0 or more. With 0, guesses ignore each other
    taps:    numbers of the layers whose inputs are read, as 2,6,11, from 1 on. The number of all
             layers stands for what the LM head reads. The default is layers 2, L/2 and L - 1
    anchors: how many blocks each answer of a step has, 1 or more
    batch:   how many answers a step learns from
    """
    L = depth_of(model)
    numbers = read_taps(taps, model) if taps else sorted({min(2, L), max(1, L // 2), max(1, L - 1)})
    require(numbers[0] > 0, "taps", "numbers from 1 on", taps)
    # No block begins with the EOS, so its embedding may stand for the masks.
    config = describe_draft(model, [i - 1 for i in numbers], layers=layers, B=B, markov=markov,
                            mask=tokenizer.eos_token_id or 0)
    work, data, held_out = prepare_training(model, tokenizer, prompts, out, work, seed=seed,
                                            max_new_tokens=max_new_tokens, most=50)
    known = sorted(find_frequent(data, vocab)) if vocab else None
    draft = BlockDraft(model, config, known, seed)
    score = score_with(model, draft.head)
    tapped = [*numbers, L]  # the loss needs what the LM head reads, too
    texts_of, _ = compute_frozen(lambda pairs: compute_features(model, pairs, tapped), data,
                                 sum(tap_widths(model, tapped)))
    held_texts = compute_features(model, held_out, tapped)
    # What the LM head reads begins as large as what it reads of the target. The first token of a
    # text may have a far larger feature than all others.
    [(_, features, _)] = texts_of([0])
    read = features[1:, draft.fc.in_features:].float()
    torch.nn.init.constant_(draft.norm.weight, read.square().mean(-1).sqrt().median().item())

    def loss_of(rng: random.Random) -> torch.Tensor:
        some = texts_of(sample_alike(range(len(data)), batch, rng, lambda i: count_tokens(data[i])))
        return block_loss(draft, score, some, [sample_roots(text, anchors, rng) for text in some])

    def evaluate() -> tuple[dict, str]:
        with low_precision(model.device, model):
            tokens = count_tree_tokens(draft, held_texts)
        some = [round(tokens[n - 1], 2) for n in (4, 16, 64)]
        return {"tokens": tokens}, f"held-out tokens per call {some} with 4, 16 and 64 nodes"
    fit_part(draft, model, (config, draft.vocab.tolist(), batch, anchors), data, held_out, loss_of,
             evaluate, steps=steps, lr=lr, seed=seed, work=work, name="dflash", rate=warm_cosine,
             models=(draft,))
    save_draft(out, draft, model)


# ------------------------------------------------------------------------------------ the file

def save_draft(path: Path, draft: BlockDraft, model) -> None:
    """Write a draft's file, which says for which model it is."""
    save_trained(path, draft, model, config=draft.config)


def load_draft(path: str | Path, model) -> BlockDraft:
    """Read a draft from its file, or a released one. InputError if it does not fit the model."""
    if is_released(path):
        config, tensors = read_head(str(path), BlockDraft.title)
        with explain_errors("a draft whose config.json fits this model", path):
            draft = BlockDraft(model, config)
        fill(draft.trainable(), tensors, path)
        return match_type(draft, model)
    return load_trained(path, BlockDraft.title, model, lambda header: BlockDraft(
        model, header["config"], header.get("vocab")))


if __name__ == "__main__":
    from cli.main import main  # the command line is in cli/, a folder of this project
    sys.exit(main([dflash], commands=[train], ranges={"nodes": (4, 8, 16, 32, 64)}))
