"""BiTA: a frozen model learns to look ahead through a few prompt and mask tokens.

Lin et al., "BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models",
arXiv 2401.12522

    python bita.py train --prompts FILE --out my.safetensors        # tune (Section 3.1)
    python bita.py --adapter my.safetensors --prompt "..."          # decode (Section 3.2)

A mask token is a trained embedding in the place of a token that is not known yet. A group of M mask
tokens follows a real token, their anchor. If the anchor is at position i, mask token j (1 … M) is
at position i + j and predicts the token of position i + j + 1. The token of position i + 1 needs no
mask, because the anchor predicts it.

The P prompt tokens are trained too. They are keys and values in every layer, and only mask tokens
see them. Real tokens see neither prompt tokens nor masks, so the output is the model's own: BiTA is
lossless. Above temperature 0 the model's choice after a node is the sample of the seed.

One call verifies the candidates of the last call and makes the next ones. These are the rows of a
call with M = 2 and k = 2. Mask 1 had the candidates a and b. Those of mask 2, below a, are left
out. An x says that the row on the left sees the column:

                     prompt tokens   text   root   a   b   root's masks   a's masks   b's masks
    root                   .          x      x     .   .      .  .          .  .        .  .
    a                      .          x      x     x   .      .  .          .  .        .  .
    b                      .          x      x     .   x      .  .          .  .        .  .
    mask 1 of root         x          x      x     .   .      x  .          .  .        .  .
    mask 2 of root         x          x      x     .   .      x  x          .  .        .  .
    mask 1 of a            x          x      x     x   .      .  .          x  .        .  .
    mask 2 of a            x          x      x     x   .      .  .          x  x        .  .
    mask 1 of b            x          x      x     .   x      .  .          .  .        x  .
    mask 2 of b            x          x      x     .   x      .  .          .  .        x  x

Say that the model chooses a after the root, and after a the token z, which is no candidate. Then a
is accepted, z is the next root, and the masks of a have already predicted what follows z. If the
model chooses neither a nor b after the root, its choice is the next root, and the root's masks have
already predicted what follows it.

    L_SAR = - sum_{i=a+2}^{a+M+1} log P(y_i | X, y_0 … y_a; prompt and mask tokens)
                                                             Eq. 1, with its bounds moved by one

X is the prompt and y its answer. A group of masks follows the anchor y_a. The paper's k is both
this a and the number of candidates, here --k. SAR stands for semi-autoregressive: several tokens a
call.

Departures:
- The sum of Eq. 1. Paper: it runs from a + 1 to a + M. Here: it runs from a + 2 to a + M + 1, as in
  the released code. Why: by Section 3.2 and Fig. 4 the last real token y_a predicts y_{a+1}, and
  the masks predict the tokens after it.
- The mean. Paper: Eq. 1 is a sum. Here: it is the mean over all labels, as in the released code.
  Why: a sum grows with the number of labels.
- Anchors. Paper: one random a of each answer, 0 < a < N - M. Here: up to --anchors random
  positions, which may be the prompt's last token. Groups near the end of an answer have fewer than
  M labels. Why: one pass over the text serves them all. The released code takes up to 64
  consecutive positions.
- Steps. Paper: 128 answers a step and four epochs of 150,000. Here: 16 random answers of at most
  200 tokens a step, and 1,000 steps. Why: tuning the model in models/ then takes minutes. Gradients
  are clipped to a norm of 1, as in the released code.
- Choices that the paper leaves open. The optimizer is Adam. The keys of prompt tokens have no
  position: they are read as they are.
- Sampling. Paper: only greedy decoding. Here: above temperature 0 too.

Smaller departures are in results/masks.md. None changes the text. Left out: several GPUs, and
Table 3's shallow prompt tokens, which are input embeddings.
"""
import copy
import functools
import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Iterator

from common import (FAR, CachedLM, InputError, Sampler, ancestor_mask, attention_mask,
                    autoregressive, begin, eos_ids, greedy, main, trie, until, walk)

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

TREES = ("efficient", "full", "chain")
ADAPTER = str(Path(__file__).resolve().parent / "models/bita.safetensors")


# ---------------------------------------------------------------------------- the tree of a call
def build_tree(candidates: list[list[int]], root: int, full: bool = False):
    """Build a tree with the likeliest tokens of mask j on level j.

    candidates  for each mask its k likeliest tokens, the best first
    root        the token of node 0
    full        True: every node above the last level has children, which makes 1 + k + … + k^M
                nodes. False: only the first node of each such level has children, which makes the
                1 + M k nodes of Fig. 5
    returns     ids and parents
    """
    best = [tokens[0] for tokens in candidates]
    if full:
        paths = itertools.product(*candidates)
    else:
        paths = [[*best[:j], x] for j, tokens in enumerate(candidates) for x in tokens]
    return trie(root, paths)[:2]


def attach_masks(parents: list[int], owners: list[int], M: int) -> list[int]:
    """Add a group of masks below some nodes of a tree. A group is a chain of M mask tokens.

    parents  parents of the tree of real tokens
    owners   the nodes that get a group
    M        number of masks of a group
    returns  parents of the real tokens, followed by those of the masks, group after group
    """
    parents = list(parents)
    for owner in owners:
        first = len(parents)
        parents += [owner, *range(first, first + M - 1)][:M]  # none if M is 0
    return parents


# ---------------------------------------------------------------------------------- decoding
class PrefixLM(CachedLM):
    """Be a CachedLM with P rows before the context, the prompt tokens, which only masks see.

        │ prompt tokens │ … the cat │ sat  on  … │ free …

    They have no position, so no window hides them.
    """

    @torch.inference_mode()
    def start(self, ids: list[int], prefix: list = (), **options) -> None:
        """Cache a context as CachedLM does, after prompt tokens.

        prefix   for each layer keys and values [key heads, P, head size]
        options  other arguments of `start`, which are passed on
        """
        self.prefix, self.cache.start = 0, 0
        for layer, (keys, values) in enumerate(prefix):
            self.cache.update(keys[None], values[None], layer)
            self.prefix = keys.shape[1]
        super().start(ids, **options)

    def layout(self, parents: list[int], n: int, sees_prefix: list[bool] | None = None):
        """Compute what CachedLM's `layout` does, with a slot for each prompt token.

        sees_prefix  for each of the newest n nodes whether it sees the prompt tokens. None: no
                     node does. It is given to `forward`, which passes it on
        """
        visible, positions, slots = super().layout(parents, n)
        sees = torch.tensor(sees_prefix or [False] * n)[:, None].expand(-1, self.prefix)
        slots = F.pad(slots, (self.prefix, 0), value=FAR)
        return torch.cat([sees, visible], 1), positions, slots


def bita(target: PrefixLM, prompt: list[int], *, tree: str = "efficient", k: int = 5,
         adapter: str = ADAPTER, tuning: "Tuning | None" = None, sample: Sampler = greedy,
         log: list | None = None) -> Iterator[list[int]]:
    """Verify the last call's candidates and produce the next ones in the same call. Section 3.2.

    tree:    efficient is the paper's tree, in which only the likeliest candidate of a mask has
             children. full gives children to all candidates but those of the last mask. chain is
             the paper's straightforward decoding. It has one candidate of each mask, and masks
             after the root only
    k:       candidates of each mask token, 1 or more. A chain has one. A full tree has 1 + k + … +
             k^M nodes with M masks after each. 2 is its best in Table 4
    adapter: file of prompt and mask tokens, made by `python bita.py train`

    Yields chunks of 1 to M + 1 tokens. For each call it logs {"guessed", "accepted", "rows"}, the
    numbers of candidates, of accepted candidates, and of all rows.

    `tuning` is used instead of the file.
    """
    if tree not in TREES or k < 1:
        raise InputError(f"expected --tree {', '.join(TREES)} and --k 1 or more, got {tree}, {k}")
    k = 1 if tree == "chain" else k
    tuning = tuning or load_tuning(adapter, target.model)
    masks = tuning.masks.detach().to(target.weight)
    M = len(masks)  # the number of masks of a group
    embed = target.model.get_input_embeddings()
    prefix = list(tuning.prompts.detach().to(target.weight))
    prompt = begin(prompt, target, prefix=prefix)
    root = prompt[-1]
    candidates = []  # the guesses: for each mask its k likeliest tokens. The first call has none
    while True:
        # Fig. 5: the candidates become a tree of n real tokens, the root first.
        ids, tree_parents = build_tree(candidates, root, full=tree == "full")
        n = len(ids)
        # Whichever node is accepted last, the masks after it have looked ahead already. In a chain
        # only the root has masks.
        owners = [0] if tree == "chain" else range(n)
        parents = attach_masks(tree_parents, owners, M)
        with torch.inference_mode():
            tokens = embed(torch.tensor(ids, device=masks.device))
            inputs = torch.cat([tokens, masks.repeat(len(owners), 1)])
        sees_prefix = [False] * n + [True] * (len(inputs) - n)  # real tokens never do
        logits = target.forward(inputs, parents, sees_prefix=sees_prefix)
        # Verification: the accepted candidates and the model's own token are final. The rows of
        # masks leave the cache, since they are not text.
        path, chunk = walk(ids, tree_parents, sample(logits[:n], target.places[:n]))
        target.commit(path)
        root = chunk[-1]
        # Generation: the masks after the last accepted node predict what follows the new root.
        groups = logits[n:].view(len(owners), M, logits.shape[1])
        # A chain has masks after the old root only. If c candidates were accepted, the first c
        # masks predicted tokens up to the new root (Fig. 4). Only the later masks are of use.
        group = groups[0, len(path) - 1:] if tree == "chain" else groups[path[-1]]
        candidates = group.topk(min(k, group.shape[1])).indices.tolist()
        if log is not None:
            log.append({"guessed": n - 1, "accepted": len(path) - 1, "rows": len(parents)})
        yield chunk


# ----------------------------------------------------------------------------- what is tuned
class Tuning(torch.nn.Module):
    """Hold what is tuned: P prompt tokens and M mask tokens. Its file is called an adapter.

    model     the model that they are for
    P, M      numbers of prompt tokens and of mask tokens. With P 0 there are only mask tokens
    seed      seed of the numbers that the tuning begins with

    prompts   keys and values of the prompt tokens, [layers, 2, key heads, P, head size]. Attention
              reads them as they are: no position is rotated into them
    masks     embeddings of the mask tokens, [M, width]
    """
    title = "prompt and mask tokens"  # in its file, and in error messages

    def __init__(self, model, P: int = 16, M: int = 3, seed: int = 0):
        super().__init__()
        lm = CachedLM(model)  # refuses layers without keys and values
        # A pass over one embedding puts keys and values into the cache, each [1, heads, slots, d].
        lm.forward(lm.weight[:1])
        shapes = {rows.shape for pair in lm.cache.layers.values() for rows in pair}
        if len(shapes) > 1:
            raise InputError(f"expected keys and values of one size, got {type(model).__name__}")
        _, heads, _, size = shapes.pop()
        shape = len(lm.cache.layers), 2, heads, P, size
        rng = torch.Generator().manual_seed(seed)
        # Section 4.1: both begin with normal numbers of a standard deviation of 0.02.
        self.prompts = torch.nn.Parameter(0.02 * torch.randn(shape, generator=rng))
        self.masks = torch.nn.Parameter(0.02 * torch.randn(M, lm.weight.shape[1], generator=rng))


def some_embeddings(model) -> torch.Tensor:
    """Take some numbers of a model's embeddings, by which a file can tell its model from others.

    They are the first 64 numbers of the embeddings of tokens 0, 16, 32, … 1008, minus their mean
    over these tokens. Of a model of 16 tokens or fewer, every token counts.
    """
    table = model.get_input_embeddings().weight
    every = 16 if len(table) > 16 else 1
    some = table[:1024:every, :64].detach().float().cpu()
    return some - some.mean(0)


def save_tuning(path: Path, tuning: Tuning, model) -> None:
    """Write a tuning to a file, in bfloat16, with numbers of the model that it is for."""
    facts = {"kind": tuning.title, "P": tuning.prompts.shape[3], "M": len(tuning.masks)}
    tensors = tuning.state_dict() | {"model": some_embeddings(model)}
    fresh = f"{path}.new"  # an old file stays as it is until the new one is whole
    save_file({name: x.cpu().bfloat16() for name, x in tensors.items()}, fresh,
              {"part": json.dumps(facts)})
    os.replace(fresh, path)
    load_tuning.cache_clear()  # it may have read the old file


@functools.lru_cache(maxsize=1)  # each prompt asks for it anew
def load_tuning(path: str, model) -> Tuning:
    """Read a tuning from a file, which `train` made.

    path     the safetensors file
    model    the model that it must be for. The file has some of its embeddings
    returns  the tuning. InputError if the file is damaged, of another kind, or for another model
    """
    try:
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["part"])
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}
        if header["kind"] != Tuning.title:
            raise ValueError(f"it is one of {header['kind']}")
        known, here = tensors.pop("model").flatten(), some_embeddings(model).flatten()
        if F.cosine_similarity(known, here, 0) < 0.5:  # that of models trained apart is near 0
            raise ValueError("it was made for another model")
        if not all(x.isfinite().all() for x in tensors.values()):
            raise ValueError("it has numbers that are not finite")
        tuning = Tuning(model, header["P"], header["M"])
        tuning.load_state_dict(tensors)
    except Exception as error:  # readers of files raise all kinds, and so does a wrong header
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"expected a file of {Tuning.title} for this model, got {str(path)!r}: "
                         f"{said}") from error
    return tuning.to(model.device, model.dtype)


# ---------------------------------------------------------------------------------- training
def collect_answers(model, tokenizer, prompts: list[list[int]], limit: int) -> list[tuple]:
    """Let a model answer prompts greedily; return pairs of a prompt and its answer, token ids.

    limit   the most tokens of an answer
    """
    lm = CachedLM(model)
    eos = eos_ids(model, tokenizer)
    data = []
    for prompt in tqdm(prompts, "answers"):
        chunks = until(autoregressive(lm, prompt), min(limit, lm.max_length - len(prompt)), eos)
        answer = [token for chunk in chunks for token in chunk]
        if len(answer) > 1:  # the first token is no label, since no mask predicts it
            data.append((prompt, answer))
    if not data:
        raise InputError(f"expected answers of 2 tokens or more, got {len(prompts)} shorter ones")
    return data


def sample_anchors(data: list[tuple], M: int, most: int, rng: random.Random):
    """Make a batch of texts, and draw anchors, the positions that groups of masks follow.

    data     pairs of a prompt and its answer, token ids. An answer has two tokens or more
    M        number of masks of a group
    most     the most anchors of an answer
    rng      the source of randomness
    returns  ids [B, T], anchors [B, G] and labels [B, G, M]. G is the most anchors that a text has.
             Anchors are 0 where a text has fewer. The label of mask j after position a is the token
             of position a + j + 1. It is -100 where there is no anchor, and beyond the end of the
             answer
    """
    # From the prompt's last token on, as long as two tokens follow: the anchor itself predicts the
    # first one, and mask 1 the second one.
    spans = [range(len(prompt) - 1, len(prompt) + len(answer) - 2) for prompt, answer in data]
    chosen = [torch.tensor(sorted(rng.sample(span, min(most, len(span))))) for span in spans]
    texts = [torch.tensor(prompt + answer) for prompt, answer in data]
    # The positions of the predicted tokens are [G, M]
    labels = [F.pad(text, (0, M), value=-100)[anchors[:, None] + 2 + torch.arange(M)]
              for text, anchors in zip(texts, chosen)]
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return pad(texts), pad(chosen), pad(labels, padding_value=-100)


def mask_logits(model, masks: torch.Tensor, prefix, ids: torch.Tensor, anchors: torch.Tensor):
    """Compute the logits [B, G, M, V] of groups of mask tokens after anchors. Fig. 3.

    CachedLM runs one text without gradients. This is the same layout for a batch, with gradients.
    Texts of a batch are filled up at their end, which no real token before it sees.

    masks     embeddings of the mask tokens, [M, width]
    prefix    the prompt tokens, as `Tuning` has them. An empty list: there are none
    ids       real tokens [B, T]
    anchors   positions [B, G] of the real tokens that have a group after them
    """
    lm = CachedLM(model)
    B, T = ids.shape
    P = prefix[0].shape[2] if len(prefix) else 0
    # A text is a tree as in decoding: a chain of T real tokens, with a group of masks below each
    # anchor. `sees` [B, T + G M, T + G M] says which nodes a node sees.
    trees = [attach_masks(range(-1, T - 1), owners, len(masks)) for owners in anchors.tolist()]
    sees = torch.stack([ancestor_mask(tree) for tree in trees]).to(lm.weight.device)
    positions = (sees.sum(-1) - 1).clamp(max=lm.max_length - 1)  # as in CachedLM.layout
    slots = F.pad(positions, (P, 0), value=FAR)  # first those of prompt tokens, as in decoding

    def run(inputs: torch.Tensor, first: int, sees_prefix: bool, keep: int) -> torch.Tensor:
        """Run the model over the nodes from `first` on; return the logits of the last `keep`."""
        end = first + inputs.shape[1]
        rows = positions[:, first:end]
        visible = F.pad(sees[:, first:end, :end], (P, 0), value=sees_prefix)
        mask = attention_mask(lm.windows, visible, rows, slots[:, :P + end], lm.weight)
        lm.cache.start = P + first
        return lm.run_model(inputs, rows, mask, keep)

    with torch.no_grad():  # real tokens see nothing that is tuned
        run(ids.to(sees.device), 0, False, keep=0)
    # The prompt tokens fill their slots only now: under no_grad they would get no gradients.
    lm.cache.start = 0
    for layer, (keys, values) in enumerate(prefix):
        lm.cache.update(keys.expand(B, -1, -1, -1), values.expand(B, -1, -1, -1), layer)
    groups = masks.to(model.dtype).repeat(B, anchors.shape[1], 1)  # [B, G M, width]
    return run(groups, T, True, keep=groups.shape[1]).unflatten(1, (-1, len(masks)))


def sar_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute Eq. 1, as a mean over the labels.

    logits  of masks, [B, G, M, V]
    labels  [B, G, M], -100 where there is none, which cross_entropy leaves out
    """
    return F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten().to(logits.device))


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, start: str = "", P: int = 16,
          M: int = 3, max_new_tokens: int = 200, steps: int = 1000, batch: int = 16,
          anchors: int = 64, lr: float = 3e-2, seed: int = 0) -> None:
    """Tune prompt and mask tokens for a frozen model on its own answers. Section 3.1.

    Ctrl-C stops it and saves what was learnt. With --start another run goes on from there. It has
    a learning rate and an optimizer that begin anew.

    out:    the safetensors file to make, in a folder that exists
    start:  a file to go on from, whose P and M count instead of --P and --M
    P:      prompt tokens, 0 or more. With 0 there are only mask tokens
    M:      mask tokens, 1 or more
    max_new_tokens: the most tokens of an answer, 2 or more
    steps:  updates, 1 or more
    batch:  answers of a step, 1 or more. The logits of all their masks are in memory at once
    anchors: the most mask groups of an answer, 1 or more
    lr:     learning rate at the start of its cosine, above 0. The paper's 3e-2 also suits 10M
            parameters
    seed:   seed of the first numbers, and of the batches
    """
    if min(M, steps, batch, anchors) < 1 or P < 0 or not lr > 0:
        raise InputError("expected --M, --steps, --batch and --anchors of 1 or more, --P of 0 or "
                         f"more, --lr above 0, got {M}, {steps}, {batch}, {anchors}, {P}, {lr}")
    if out.is_dir() or not out.parent.is_dir():
        raise InputError(f"expected --out to be a file in a folder that exists, got {out}")
    # `load_tuning` keeps what it has read, which this training must not change.
    tuning = copy.deepcopy(load_tuning(start, model)) if start else Tuning(model, P, M, seed)
    tuning.to(model.device, torch.float32)
    model.requires_grad_(False)
    # Section 3.1: questions X and the model's own answers Y.
    data = collect_answers(model, tokenizer, prompts, max_new_tokens)
    rng = random.Random(seed)
    adam = torch.optim.Adam(tuning.parameters(), lr)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    bar = tqdm(range(steps), "tuning")
    try:
        for _ in bar:
            pairs = rng.sample(data, min(batch, len(data)))
            # The anchors y_a, at random positions
            ids, chosen, labels = sample_anchors(pairs, len(tuning.masks), anchors, rng)
            logits = mask_logits(model, tuning.masks, tuning.prompts, ids, chosen)
            loss = sar_loss(logits, labels)
            adam.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(tuning.parameters(), 1.0)
            if not (loss + norm).isfinite():
                raise InputError(f"expected a finite loss, got {loss.item()}: lower --lr from {lr}")
            adam.step()  # the model is frozen, so only prompt and mask tokens change
            rate.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
    except KeyboardInterrupt:
        save_tuning(out, tuning, model)
        print(f"\nstopped after {bar.n} steps: saved what was learnt to {out}", file=sys.stderr)
        raise
    save_tuning(out, tuning, model)


# ------------------------------------------------------------------------- the command line
def report(run) -> str:
    """Return a line with the mean rows, candidates and accepted candidates of a call."""
    means = {name: sum(call[name] for call in run.log) / len(run.log) for name in run.log[0]}
    return "a call: {rows:.1f} rows, {guessed:.1f} guessed, {accepted:.2f} accepted".format(**means)


COMMAND_LINE = dict(methods=[bita], commands=[train], report=report, ranges={"tree": TREES})

if __name__ == "__main__":
    sys.exit(main(**COMMAND_LINE))
