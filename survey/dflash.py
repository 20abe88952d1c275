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
import math
import random
import sys
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

from common import CachedLM, Sampler, attention_mask, begin, check, greedy, walk, windows_of
from support.clock import MOST, RANKS, Choice, Clock
from support.layers import (BlockLM, FeatureLM, context_length, depth_of, read_taps, take_layers,
                            tap_widths)
from support.parts import (MODELS, Part, follow, head_for, load_trained, require, save_trained,
                           score_with)
from training.acceptance import Text, compute_features
from training.loop import (compute_frozen, count_tokens, find_frequent, fit_part, low_precision,
                           prepare_training, sample_alike, warm_cosine)

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers.models.llama.modeling_llama import LlamaRMSNorm

ADAPTER = f"{MODELS}/dflash.safetensors"
GAMMA = 4.0  # the loss of guess k weighs exp(-(k - 1) / GAMMA)
EVERY = 4  # held-out answers are measured by a tree at each EVERY-th of their places


# ----------------------------------------------------------------------------------- the draft

class BlockDraft(Part):
    """Guess a block of tokens in one pass. Making a draft freezes the target.

    model    the target
    taps     the layers of the target whose inputs it reads, by number (support/layers.py)
    layers   how many layers the draft has
    B        how many rows, and how many guesses, a block has
    markov   the rank of the Markov head. 0: there is none
    vocab    the tokens that the rows of the LM head stand for, V' of them. None: all
    seed     a seed for the random weights

    tokens   tokens[n - 1] is how many tokens a call with a tree of n nodes gave on held-out answers
    """
    title = "a DFlash draft"
    facts = ("tokens",)

    def __init__(self, model, taps: list[int], *, layers: int = 2, B: int = 8, markov: int = 64,
                 vocab: list[int] | None = None, seed: int = 0):
        super().__init__()
        self.form = dict(layers=layers, B=B, markov=markov)
        self.taps, self.B, self.tokens = taps, B, [1.0]
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        V, e = len(head.weight), table.weight.shape[1]
        self.vocab = torch.tensor(range(V) if vocab is None else vocab, device=model.device)
        size = len(self.vocab)  # V'
        # The row of each token in the LM head and in W_1. All tokens that cannot be guessed share
        # one more row, which only W_1 has.
        self.row = torch.full((V,), size, device=model.device)
        self.row[self.vocab] = torch.arange(size, device=model.device)
        # The layers begin as the target's last ones, in a model of 8 tokens, in whose place come
        # the target's embeddings and LM head.
        L, widths = depth_of(model), tap_widths(model, taps)
        lm = take_layers(model, [*range(L - layers, L)], vocab_size=8, pad_token_id=None)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc = torch.nn.Linear(sum(widths), e, bias=False)
            self.W1 = torch.nn.Embedding(size + 1, markov) if markov else None
            self.W2 = torch.nn.Linear(markov, size, bias=False) if markov else None
            torch.nn.init.normal_(self.fc.weight, std=0.002)
        if widths[-1] == e:
            # H begins as the last tap, which is about what the target's last layers read.
            self.fc.weight.data[:, -e:] += torch.eye(e)
        self.norm = LlamaRMSNorm(e)
        self.mask = torch.nn.Parameter(table.weight.detach().float().mean(0))
        self.token = torch.nn.Linear(e, e, bias=False)  # reads the root's embedding or the mask
        self.before = torch.nn.Linear(e, 2 * e, bias=False)  # reads the H before the root
        torch.nn.init.eye_(self.token.weight)
        torch.nn.init.zeros_(self.before.weight)
        self.place = torch.nn.Parameter(torch.zeros(B, e))
        # At first the Markov head adds nothing, and neither does the H before the root.
        if markov:
            torch.nn.init.zeros_(self.W2.weight)
        model.requires_grad_(False)
        self.lm = check(lm.float())  # while its embeddings are its own, of 8 tokens
        self.to(model.device)
        lm.set_input_embeddings(table)
        lm.set_output_embeddings(head if vocab is None else head_for(head, self.vocab))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return H [..., e] of what was tapped, [..., t], where t is the width of all taps."""
        return self.norm(self.fc(features.to(self.fc.weight.dtype)))

    def embed_blocks(self, roots: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return what the rows of blocks read, [..., B, e].

        roots    the first token of each block, [...]
        before   H of the token before each root, [..., e]
        """
        to_root, to_masks = self.before(before).chunk(2, -1)
        root = self.token(self.lm.get_input_embeddings()(roots).to(self.mask.dtype)) + to_root
        mask = self.token(self.mask) + to_masks
        return torch.stack([root, *[mask] * (self.B - 1)], -2) + self.place

    def add_markov(self, z: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Add to logits z [..., V'] what the Markov head says of the tokens [...] before them."""
        if self.W1 is None:
            return z
        # A CachedLM cuts off logits that stand for no token. So z may be the narrower one.
        return z + self.W2(self.W1(self.row[tokens]))[..., :z.shape[-1]]


# ---------------------------------------------------------------------------------- decoding

@torch.inference_mode()
def feed(draft: BlockDraft, lm: BlockLM, features: torch.Tensor) -> None:
    """Add the H of what was tapped, [n, t], to the draft's context. Long prompts come in parts."""
    for start in range(0, len(features), lm.PART):
        lm.forward(draft.fuse(features[start:start + lm.PART]), keep=0)
        lm.commit(range(len(lm.parents)))


@torch.inference_mode()
def run_block(draft: BlockDraft, lm: BlockLM, features: torch.Tensor, root: int) -> torch.Tensor:
    """Add H to the draft's context, and run one block after it.

    lm        the draft's layers with their cache
    features  [n, t], what was tapped of the tokens that became final since the last block, n > 0
    returns   z [B, V'], the logits of the block's rows, without the Markov head
    """
    feed(draft, lm, features[:-lm.PART])
    H = draft.fuse(features[-lm.PART:])
    block = draft.embed_blocks(torch.tensor(root, device=H.device), H[-1])
    lm.block = draft.B
    z = lm.forward(torch.cat([H, block]), keep=draft.B)
    lm.block = 0
    lm.commit(range(len(H)))  # rows of a block never join the context
    return z


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

    The tokens to be expected are those that a call with so many nodes gave on held-out answers.
    """
    for n, tokens in enumerate(draft.tokens, 1):
        yield Choice(n, tokens, n, n > 1, n)  # a tree of one node needs no block


def dflash(target: FeatureLM, prompt: list[int], *, nodes: int = 0, adapter: str = ADAPTER,
           trained: BlockDraft | None = None, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Draft a block in one pass, verify the tree of its likeliest nodes in one call, keep a path.

    trained   a draft to use in place of a file's

    nodes:   how many nodes a tree has with its root, 0 to 64. With 0, as many as pay on this
             machine
    adapter: file of a draft, made by `python -m survey.dflash train`
    Yields chunks of 1 to B + 1 tokens. Logs {"guessed", "accepted"} a call.
    """
    draft = trained or target.once(("dflash", adapter), lambda: load_draft(adapter, target.model))
    lm = target.once((draft, "cached"), lambda: BlockLM(draft.lm, target.vocab))
    lm.start([])
    prompt = begin(prompt, target, taps=draft.taps)
    root = prompt[-1]
    unread = []  # what was tapped of final tokens that the draft has not read yet
    if len(prompt) > 1:
        # The last features of the context wait for the first block, which is computed in one pass
        # with them.
        feed(draft, lm, target.features[:-1])
        unread = [target.features[-1:]]
    clock = target.once((draft, "clock"), lambda: Clock(target, lm))
    while True:
        n = nodes or clock.choose(lambda: plan_block(draft))
        # A tree of one node needs no block. After a prompt of one token there is nothing to read.
        ids, parents = [root], [-1]
        if n > 1 and unread:
            z = run_block(draft, lm, torch.cat(unread), root)
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
    """Hold what the B rows of G blocks of each of N texts computed, and what they learn."""
    hidden: torch.Tensor  # [N, G, B, f], what the LM head reads
    target: torch.Tensor  # [N, G, B, f], what it reads of the target at the same place
    previous: torch.Tensor  # [N, G, B], the text's token before each guess
    learns: torch.Tensor  # bool [N, G, B], whether the text goes on with a token of the vocabulary


def make_blocks(draft: BlockDraft, texts: list[Text], anchors: list[list[int]]) -> Blocks:
    """Run the draft over texts and their blocks in one pass, as the header's table shows it.

    texts     their features are what was tapped and, at the end, what the LM head read
    anchors   for each text the places of the roots of G blocks
    """
    device = draft.place.device
    ids = pad_sequence([x.ids for x in texts], batch_first=True).to(device)  # [N, T]
    features = pad_sequence([x.features for x in texts], batch_first=True).to(device)
    last = features[..., -draft.lm.get_output_embeddings().weight.shape[1]:]
    N, T = ids.shape
    text = torch.arange(N, device=device)[:, None]
    roots = torch.tensor(anchors, device=device)  # [N, G]
    H = draft.fuse(features[..., :draft.fc.in_features])  # [N, T, e]
    before = F.pad(H, (0, 0, 1, 0))[text, roots]  # 0 where a root is the first token
    blocks = draft.embed_blocks(ids[text, roots], before).flatten(1, 2)  # [N, G B, e]
    # A row of a block stands where the token stands that it reads or hides.
    at = roots[..., None] + torch.arange(draft.B, device=device)  # [N, G, B]
    places = torch.arange(T, device=device).expand(N, -1)
    positions = torch.cat([places, at.flatten(1).clamp(max=context_length(draft.lm) - 1)], 1)
    # H sees the H up to itself. A row of a block sees the H before its anchor, and its block.
    reach = torch.cat([places + 1, roots.repeat_interleave(draft.B, 1)], 1)  # how many H it sees
    block = F.pad(torch.arange(blocks.shape[1], device=device) // draft.B, (T, 0), value=-1)
    sees_block = (block[:, None] == block[T:]).expand(N, -1, -1)
    visible = torch.cat([places[:, None] < reach[..., None], sees_block], 2)
    mask = attention_mask(windows_of(draft.lm), visible, positions, positions, H)
    hidden = draft.lm.get_decoder()(
        inputs_embeds=torch.cat([H, blocks.to(H.dtype)], 1), position_ids=positions,
        attention_mask=mask, use_cache=False)[0]
    # The row at a place guesses the token of the next place.
    lengths = torch.tensor([len(x.ids) for x in texts], device=device)
    inside = at + 1 < lengths[:, None, None]
    text, at = text[..., None], at.clamp(max=T - 2)
    known = draft.row[ids[text, at + 1]] < len(draft.vocab)
    return Blocks(hidden[:, T:].unflatten(1, (-1, draft.B)), last[text, at], ids[text, at],
                  inside & known)


def block_loss(draft: BlockDraft, score: Callable, texts: list[Text],
               anchors: list[list[int]]) -> torch.Tensor:
    """Compute the loss of the header, the weighted mean over all guesses of all blocks.

    score     turns what the LM head reads into logits [..., V'] (parts.score_with)
    texts     the texts of a step
    anchors   for each text equally many places of roots
    """
    hidden, target, previous, learns = make_blocks(draft, texts, anchors)
    logits = draft.add_markov(score(hidden[learns]), previous[learns])
    with torch.no_grad():  # the target's distribution over the tokens that the draft can guess
        target_probs = score(target[learns]).softmax(-1)  # [guesses, V']
    each = F.cross_entropy(logits, target_probs, reduction="none")
    k = learns.nonzero()[:, 2]  # from 0 on, the number of the guess in its block
    weights = torch.exp(-k / GAMMA)
    return (weights * each).sum() / weights.sum().clamp(min=1e-9)


@torch.inference_mode()
def count_tree_tokens(draft: BlockDraft, score: Callable, texts: list[Text]) -> list[float]:
    """Measure how many tokens calls with trees of 1, 2, … nodes give on held-out texts."""
    counts, trees = torch.zeros(MOST), 0
    for text in texts:
        ids, anchors = text.ids.tolist(), list_anchors(text)[::EVERY]
        for anchor, hidden in zip(anchors, make_blocks(draft, [text], [[*anchors]]).hidden[0]):
            tree, parents = grow_block(draft, score(hidden), ids[anchor], MOST)
            counts[follow(tree, parents, ids[anchor + 1:])] += 1
            trees += 1
    # The first n nodes are the tree of n nodes, which keeps those nodes of the path that it has.
    return (counts.cumsum(0) / max(1, trees)).tolist()


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          layers: int = 2, B: int = 8, markov: int = 64, taps: str = "", vocab: int = 0,
          anchors: int = 24, max_new_tokens: int = 200, steps: int = 1500, batch: int = 16,
          lr: float = 3e-3, seed: int = 0) -> None:
    """Train a block draft for a frozen model on its own answers. A stopped run goes on.

    layers:  how many layers the draft has, 1 or more
    B:       how many rows a block has, and how many guesses, 1 or more
    markov:  the rank of the Markov head, 0 or more. With 0, guesses ignore each other
    taps:    numbers of the layers whose inputs are read, as 2,6,11. The number of all layers stands
             for what the LM head reads. The default is layers 2, L/2 and L - 1
    anchors: how many blocks each answer of a step has, 1 or more
    batch:   how many answers a step learns from
    """
    L = depth_of(model)
    require(layers <= L, "layers", f"at most {L}", layers)
    numbers = read_taps(taps, model) if taps else sorted({min(2, L - 1), L // 2, L - 1})
    work, data, held_out = prepare_training(model, tokenizer, prompts, out, work, seed=seed,
                                            max_new_tokens=max_new_tokens, most=50)
    known = sorted(find_frequent(data, vocab)) if vocab else None
    draft = BlockDraft(model, numbers, layers=layers, B=B, markov=markov, vocab=known, seed=seed)
    score = score_with(model, draft.lm.get_output_embeddings())
    tapped = sorted({*numbers, L})  # the loss needs what the LM head reads, too
    texts_of, _ = compute_frozen(lambda pairs: compute_features(model, pairs, tapped), data,
                                 sum(tap_widths(model, tapped)))
    held_texts = compute_features(model, held_out, tapped)
    # H begins as large as what the target's last layers read. The first token of a text may have a
    # far larger input than all others.
    [(_, features, _)] = texts_of([0])
    read = features[1:, :draft.fc.in_features][:, -draft.place.shape[1]:].float()
    torch.nn.init.constant_(draft.norm.weight, read.square().mean(-1).sqrt().median().item())

    def loss_of(rng: random.Random) -> torch.Tensor:
        some = texts_of(sample_alike(range(len(data)), batch, rng, lambda i: count_tokens(data[i])))
        return block_loss(draft, score, some, [sample_roots(text, anchors, rng) for text in some])

    def evaluate() -> tuple[dict, str]:
        with low_precision(model.device, model):
            tokens = count_tree_tokens(draft, score, held_texts)
        some = [round(tokens[n - 1], 2) for n in (4, 16, 64)]
        return {"tokens": tokens}, f"held-out tokens per call {some} with 4, 16 and 64 nodes"
    form = numbers, draft.form, draft.vocab.tolist(), batch, anchors
    fit_part(draft, model, form, data, held_out, loss_of, evaluate, steps=steps, lr=lr, seed=seed,
             work=work, name="dflash", rate=warm_cosine)
    save_draft(out, draft, model)


# ------------------------------------------------------------------------------------ the file

def save_draft(path: Path, draft: BlockDraft, model) -> None:
    """Write a draft's file, which says for which model it is."""
    save_trained(path, draft, model, form=draft.form, taps=draft.taps)


def load_draft(path: str | Path, model) -> BlockDraft:
    """Read a draft from its file. InputError if it is damaged, or for another model."""
    return load_trained(path, BlockDraft.title, model, lambda header: BlockDraft(
        model, header["taps"], vocab=header.get("vocab"),
        **{name: header["form"][name] for name in ("layers", "B", "markov")}))


if __name__ == "__main__":
    from cli.main import main  # the command line is in cli/, a folder of this project
    sys.exit(main([dflash], commands=[train], ranges={"nodes": (4, 8, 16, 32, 64)}))
