"""DFlash drafts a whole block in one pass; a Markov head lets its guesses fit each other.

    dflash      Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding",
                arXiv 2602.06036
    --markov    the Markov head of "DSpark", arXiv 2607.05147
    the tree    the likeliest paths of a block, as in "DDTree", arXiv 2604.12989

    python -m survey.dflash train --prompts FILE --out my.safetensors
    python -m survey.dflash --adapter my.safetensors --prompt "..."
    python -m survey.dflash --adapter z-lab/Qwen3-8B-DFlash-b16 --target Qwen/Qwen3-8B \
        --chat '{"enable_thinking": false}' --prompt "..."  # a released draft, not tried here

The h of a token are the target's hidden states there, the outputs of some layers side by side. The
draft turns each h into a c. Its context is the c of all final tokens except the root, whose own h
is not known yet. A block has B rows. The first one reads the root, and each of the others reads
the mask token and guesses the token in whose place it stands. Here B = 4, and x_5 is the root:

    target    h of x_0 … x_4
                  │
                  fc, hidden_norm
                  │
    draft     c_0 c_1 c_2 c_3 c_4 │  x_5  mask mask mask
               └───┴───┴───┴───┴──┴───┴────┴────┴────┘     some layers of Qwen3, in which a row
                                           │    │    │     sees every c and the whole block
                                          z_1  z_2  z_3    norm, LM head of the target
    Markov                           x_5 ─┴ g_1 ┴ g_2 ┴    read from left to right
    guesses                               g_1  g_2  g_3    of the tokens x_6 to x_8

No layer changes c. Each has its own keys and values of c, as if c were the normed input of a row.
So a final token costs a draft two small products in each layer and is read only once.

z_k does not know which tokens the rows before it guess, so two likely guesses need not fit each
other. The Markov head reads the token before, which for g_1 is the root g_0. It costs one product
with a matrix for each node of a tree, and no further pass of the layers:

    p(g_k | g_{k-1}) = softmax(z_k + W_2 W_1[g_{k-1}])

The chance of a node is the product of the p along its path. The tree has the n likeliest nodes, and
is verified as EAGLE's (eagle.py).

Training packs many blocks, whose roots are at random anchors, into one pass over a text. A block
sees itself and the c before its anchor. Here are two blocks with B = 2. An x says that the row on
the left sees the column:

                c_0 c_1 c_2 c_3 c_4   x_2 mask   x_4 mask
        x_2      x   x                 x   x
        mask     x   x                 x   x
        x_4      x   x   x   x                    x   x
        mask     x   x   x   x                    x   x

    loss = Σ_k w_k CrossEntropy(target's distribution, p of row k) / Σ_k w_k
    w_k  = exp(-(k - 1) / 4)                                           Eq. 4 of DFlash, with γ = 4

The sums run over the guesses of all blocks. Here g_{k-1} is the token of the text.

Departures, besides those of EAGLE's sampling (eagle.py):
- The tree. DFlash: a chain, one guess a row. Here: a tree as in DDTree, of as many nodes as pay.
  Why: one pass gives the likeliest tokens of all rows.
- The Markov head, which DFlash lacks. DSpark: of rank 256. Here: 64. Why: small models have few
  tokens. With `--markov 0` a draft has DFlash's network.
- The form. Paper: 5 layers, five taps, a mask token of its own, B of 8 to 16. Here: 2 layers, three
  taps (`--taps`), the EOS for the mask, B = 9. Why: small models. The file says all of it, as a
  released config.json does.
- Training. Paper: labels are tokens, γ is 7, 5 or 4 by the length of the block, a rate of 6e-4.
  Here: labels are the target's distributions, γ is 4 for every `--B`, the rate 3e-3. Why: small
  models learn faster this way.

Left out: DSpark's confidence head and its loss. Such a head was trained beside the embedded draft,
on 41,000 guesses. It tells of a guess whether it is right less well than the guess's own p does
(cross-entropy 0.186 and 0.132). Chances with it made 4.53 tokens a call for 4.46 with trees of 6
nodes, and no more with 9 (results/dflash.md).

DSpark's drafts, and some others that released.py lists, have a guess g_1 of the root's row as well.
So a block has as many guesses as rows. They are read, and not trained here. transformers 5.23 runs
drafts of one class (`speculation_type="dflash"`).
"""
import random
from pathlib import Path
from typing import Callable, Iterator

from common import KVCache, Sampler, begin, greedy, walk
from support.clock import list_sizes, recall
from support.engine import MODELS, EngineLM, depth_of, log_round, run_as_program
from support.layers import read_taps
from support.parts import Part, score_with, seeded
from support.released import describe_dflash, load_dflash, read_dflash
from support.trees import Growth
from training.loop import fit_on_texts, low_precision, report_right, warm_cosine
from training.texts import Text, compute_features, pad_texts, prepare_training

import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import (Qwen3DecoderLayer, Qwen3RMSNorm,
                                                      Qwen3RotaryEmbedding, apply_rotary_pos_emb)

ADAPTER = f"{MODELS}/dflash.safetensors"
GAMMA = 4.0  # the loss of guess k weighs exp(-(k - 1) / GAMMA)


# ----------------------------------------------------------------------------------- the draft

class BlockDraft(Part):
    """Guess a block of tokens in one pass. Making a draft freezes the target.

    model    the target
    config   what config.json of a released draft says (released.describe_dflash)
    seed     a seed for the random weights

    B        the guesses of a block and its root. A block has B rows, or B - 1 if the root's row
             guesses
    vocab    [V'], the tokens that the rows of its LM head stand for
    """
    title = "a DFlash draft"
    prior = 0.9  # for `Acceptance`. The embedded draft guesses 0.93 of the first tokens of blocks

    def __init__(self, model, config: dict, seed: int = 0):
        super().__init__()
        self.config = config
        self.form = read_dflash(config, model)
        self.taps = sorted(self.form.listed)
        self.B = self.form.rows + 1 - self.form.first
        layers = self.form.layers
        h, rank = layers.hidden_size, self.form.rank
        self.embed, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        V = len(self.head.weight)
        self.vocab = torch.arange(config.get("draft_vocab_size") or V, device=model.device)
        model.requires_grad_(False)
        with seeded(seed):
            self.fc = torch.nn.Linear(len(self.taps) * h, h, bias=False)
            self.layers = torch.nn.ModuleList(
                Qwen3DecoderLayer(layers, i) for i in range(layers.num_hidden_layers))
            if rank:  # at first the Markov head adds nothing
                self.W1 = torch.nn.Embedding(V, rank)
                self.W2 = torch.nn.Linear(rank, len(self.vocab), bias=False)
                torch.nn.init.zeros_(self.W2.weight)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(h, layers.rms_norm_eps) for _ in range(2))
        self.rotary = Qwen3RotaryEmbedding(layers)
        self.to(model.device)

    def header(self) -> dict:
        return {"config": self.config}

    def read(self, features: torch.Tensor, cache: KVCache) -> None:
        """Add hidden states to a context: their keys and values in each layer.

        features   [N, n, t], what was tapped of the n tokens after the context
        cache      the keys and values of the context, which grow
        """
        c = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        places = torch.arange(cache.start, cache.start + c.shape[1], device=c.device)
        rotary = self.rotary(c, places[None])
        for layer in self.layers:
            attn = layer.self_attn  # the context has no input norm
            k, v = (project(c).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
                    for project in (attn.k_proj, attn.v_proj))
            k, _ = apply_rotary_pos_emb(attn.k_norm(k), k, *rotary)
            cache.update(k, v, attn.layer_idx)
        cache.start += c.shape[1]

    def forward(self, tokens: torch.Tensor, places: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Run G blocks for each of N texts. A row sees the context before its block, and the block.

        tokens    [N, G], the first token of each block
        places    [N, G], their places in the text
        cache     the keys and values of the context. Those of the blocks come after these, where
                  the next pass writes over them
        returns   [N, G, B - 1, h], what the LM head reads
        """
        rows, kinds = self.form.rows, self.form.layers.layer_types
        ids = F.pad(tokens[..., None], (0, rows - 1), value=self.form.mask).flatten(1)
        # Raw rows, as in the released code. Gemma's own module would scale them.
        x = self.form.scale * F.embedding(ids, self.embed.weight).to(self.fc.weight.dtype)
        at = (places[..., None] + torch.arange(rows, device=x.device)).flatten(1)  # [N, n]
        context = torch.arange(cache.start, device=x.device).expand(len(at), 1, -1)
        block = torch.arange(at.shape[1], device=x.device) // rows
        visible = torch.cat([context < places.repeat_interleave(rows, 1)[..., None],
                             (block[:, None] == block).expand(len(at), -1, -1)], 2)
        past = at[..., None] - torch.cat([context, at[:, None]], 2)  # [N, n, slots]
        masks = {}
        for kind in {*kinds}:
            low, high = self.form.sees[kind]
            seen = visible & (low <= past) & (past < high)
            masks[kind] = torch.where(seen[:, None], 0.0, -torch.inf).to(x)
        rotary = self.rotary(x, at)
        for layer, kind in zip(self.layers, kinds):
            x = layer(x, masks[kind], past_key_values=cache, position_embeddings=rotary)
        return self.norm(x).unflatten(1, (-1, rows))[:, :, self.form.first:]

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V'] of what the LM head reads, without the Markov head."""
        z = self.head(hidden.to(self.head.weight.dtype)).float() * self.form.multiplier
        return self.form.cap * (z / self.form.cap).tanh() if self.form.cap else z

    def add_markov(self, z: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Add to logits z [..., V'] what the Markov head says of the tokens [...] before them."""
        if not self.form.rank:
            return z
        # In decoding the logits that stand for no token are cut off.
        return z + self.W2(self.W1(tokens))[..., :z.shape[-1]]


# ---------------------------------------------------------------------------------- decoding

@torch.inference_mode()
def run_block(draft: BlockDraft, cache: KVCache, features: torch.Tensor, root: int) -> torch.Tensor:
    """Add new features to the draft's context, and run a block after it.

    cache     the keys and values of the draft's context
    features  [m, t], what was tapped of the tokens that became final since the last block
    returns   z [B - 1, V'], the logits of the guesses, without the Markov head
    """
    draft.read(features[None], cache)
    tokens, places = torch.tensor([[[root]], [[cache.start]]], device=features.device)
    return draft.score(draft(tokens, places, cache)[0, 0])


@torch.inference_mode()
def grow_block(draft: BlockDraft, z: torch.Tensor, root: int, n: int) -> tuple[list, list]:
    """Grow the tree of the n likeliest nodes below a root. A node has at most RANKS children.

    z        [B - 1, V'], the logits of a block, without the Markov head
    returns  ids and parents of the nodes, the likeliest first. So the first m are the tree of m
    """
    tree = Growth(root, n)
    for z_k in z:
        # The nodes of a level share z_k. The Markov head adds what depends on their tokens.
        tokens = [tree.ids[x] for x in tree.newest]
        before = torch.tensor(tokens, dtype=torch.long, device=z.device)
        logits = draft.add_markov(z_k.expand(len(tokens), -1), before)
        tree.add_level(tree.newest, logits, draft.vocab)
    return tree.finish()


def dflash(target: EngineLM, prompt: list[int], *, nodes: int = 0, adapter: str = ADAPTER,
           trained: BlockDraft | None = None, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Draft a block in one pass, verify the tree of its likeliest nodes in one call, keep a path.

    trained   a draft to use in place of a file's

    nodes:   how many nodes a tree has with its root, 0 to 64. With 0, as many as pay on this
             machine
    adapter: file of a draft, made by `python -m survey.dflash train`, or the directory or hub id of
             a released one
    Yields chunks of 1 to B tokens. Logs {"guessed", "accepted"} a call.

    With --nodes 0 a tree is taken to be as good as the one that `best_tree` plans by the rates of
    the ranks.
    """
    draft = trained or target.once(load_draft, adapter, target.model)
    prompt = begin(prompt, target, taps=draft.taps)
    chunk = prompt[-1:]  # the last token of a chunk is the root of the next round
    cache = KVCache()
    # `unread` has the hidden states of the final tokens that the draft has not read yet. A prompt
    # of one token has none, so its first call has only the root.
    unread = [target.features] if len(prompt) > 1 else []
    learnt, clock = recall(target, draft.prior, (draft,), (nodes,))
    while True:
        n = len(clock.choose(lambda: list_sizes(learnt.rates(), draft.B - 1, nodes)))
        ids, parents = chunk[-1:], [-1]
        if n > 1 and unread:
            z = run_block(draft, cache, torch.cat(unread), chunk[-1])[:, :target.vocab]
            ids, parents = grow_block(draft, z, chunk[-1], n)
            unread = []
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents), target.places))
        unread.append(target.features[path])
        target.commit(path)
        learnt.learn(parents, path, pruned=True)
        clock.note(int(n > 1), n)
        log_round(log, guessed=len(ids) - 1, accepted=len(path) - 1)
        yield chunk


# ------------------------------------------------------------------------------------ training

def sample_roots(text: Text, n: int, rng: random.Random) -> list[int]:
    """Sample n places of roots. No place comes twice, unless a text has fewer than n places."""
    places = range(text.length - 1, len(text.ids) - 1)  # a token of the answer comes after each
    return rng.sample(places, n, counts=[-(-n // len(places))] * len(places))


def guess_blocks(draft: BlockDraft, texts: list[Text], anchors: list[list[int]]) -> tuple:
    """Guess blocks after anchors of texts, where the Markov head reads the texts' own tokens.

    texts     the texts. Their features are what was tapped and, at the end, what the LM head read
    anchors   for each text equally many places of roots
    returns   for each guess of a token of a text the logits [guesses, V], the token [guesses], what
              the target's LM head read there [guesses, d], and how many guesses stand before it
    """
    width = draft.fc.in_features
    ids, features, _ = pad_texts(texts)
    roots, cache = torch.tensor(anchors, device=ids.device), KVCache()
    draft.read(features[..., :width], cache)
    hidden = draft(ids.gather(1, roots), roots, cache)
    before = roots[..., None] + torch.arange(draft.B - 1, device=ids.device)  # [N, G, B - 1]
    lengths = torch.tensor([len(text.ids) for text in texts], device=ids.device)
    text, block, k = (before + 1 < lengths[:, None, None]).nonzero(as_tuple=True)
    before = before[text, block, k]  # for each guess the place of the token before it
    logits = draft.add_markov(draft.score(hidden[text, block, k]), ids[text, before])
    return logits, ids[text, before + 1], features[text, before, width:], k


def block_loss(draft: BlockDraft, score: Callable, texts: list[Text],
               anchors: list[list[int]]) -> torch.Tensor:
    """Compute the loss of the header, the weighted mean over all guesses of all blocks.

    score     turns what the target's LM head reads into logits [..., V] (parts.score_with)

    The other arguments are those of `guess_blocks`.
    """
    logits, _, read, k = guess_blocks(draft, texts, anchors)
    with torch.no_grad():
        target_probs = score(read).softmax(-1)  # [guesses, V]
    each = F.cross_entropy(logits, target_probs, reduction="none")
    weights = torch.exp(-k / GAMMA)
    return (weights * each).sum() / weights.sum().clamp(min=1e-9)


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          layers: int = 2, B: int = 9, markov: int = 64, taps: str = "", anchors: int = 24,
          max_new_tokens: int = 200, steps: int = 1500, batch: int = 16,
          lr: float = 3e-3, seed: int = 0) -> None:
    """Train a block draft for a frozen model on its own answers. A stopped run goes on.

    layers:  how many layers the draft has, 1 or more
    B:       how many rows a block has, one more than its guesses, 2 or more
    markov:  the rank of the Markov head, 0 or more. With 0, guesses ignore each other
    taps:    numbers of the layers whose inputs are read, as 2,6,11. The number of all layers stands
             for what the LM head reads. The default is layers 2, L/2 and L - 1
    anchors: how many blocks each answer of a step has, 1 or more
    """
    L = depth_of(model)
    numbers = read_taps(taps, model) if taps else sorted({min(2, L - 1), L // 2, L - 1})
    # No block begins with the EOS. So its embedding can stand for the masks.
    config = describe_dflash(model, [i - 1 for i in numbers], tokenizer.eos_token_id or 0, layers,
                             B, markov)
    draft = BlockDraft(model, config, seed)
    lessons = prepare_training(model, tokenizer, prompts, out, work, max_new_tokens, seed, most=50)
    score = score_with(model)
    # At first the LM head should read numbers as large of the draft as of the target. The first
    # token of a text is left out, since its hidden state may be far larger than all others.
    [text] = compute_features(model, lessons.data[:1], None)
    size = text.features[1:].float().square().mean(-1).sqrt().median().item()
    torch.nn.init.constant_(draft.norm.weight, size)

    def loss_of(texts: list[Text], rng: random.Random) -> torch.Tensor:
        roots = [sample_roots(text, anchors, rng) for text in texts]
        return block_loss(draft, score, texts, roots)

    @torch.inference_mode()
    def evaluate(texts: list[Text]) -> tuple[dict, str]:
        right = []
        with low_precision(model.device, model):
            for text in texts:
                roots = sample_roots(text, anchors, random.Random(0))
                logits, tokens, *_ = guess_blocks(draft, [text], [roots])
                right.append(logits.argmax(-1) == tokens)
        return report_right(right)
    fit_on_texts(draft, model, [*numbers, L], (anchors,), lessons, loss_of, evaluate, batch=batch,
                 out=out, steps=steps, lr=lr, seed=seed, name="dflash", rate=warm_cosine)


# ------------------------------------------------------------------------------------ the file

def load_draft(path: str | Path, model) -> BlockDraft:
    """Read a draft from its file, or a released one. InputError if it does not fit the model."""
    return load_dflash(path, BlockDraft.title, model,
                       lambda header: BlockDraft(model, header["config"]))


COMMAND_LINE = dict(methods=[dflash], commands=[train], ranges={"nodes": (4, 8, 16, 32, 64)})

if __name__ == "__main__":
    run_as_program(__file__)
