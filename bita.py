"""BiTA: a frozen model learns to look ahead through a few prompt and mask tokens.

Lin et al., "BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models",
arXiv 2401.12522

    python bita.py train --prompts FILE --out my.safetensors        # tune (Section 3.1)
    python bita.py --adapter my.safetensors --prompt "..."          # decode (Section 3.2)

A mask token is a trained embedding that stands for a token which is not known yet. A group of M
mask tokens follows a real token. If the real token is at position a, mask token j (1 … M) stands at
position a + j and predicts the token of position a + j + 1. The token of position a + 1 needs no
mask: it is the real token's own prediction.

The P prompt tokens are trained too. Together they are the soft prompt, which only mask tokens see.
Real tokens see neither the soft prompt nor masks, so the output stays the model's own. It is
lossless, greedily or with one sample of the model after each node of the tree.

These are the rows of one call, with M = 2 and two candidates a and b for the root's next token. An
x says that the row on the left sees the column:

                     soft prompt   text   root   a   b   root's masks   a's masks   b's masks
    root                  .          x      x    .   .      .  .          .  .        .  .
    a                     .          x      x    x   .      .  .          .  .        .  .
    b                     .          x      x    .   x      .  .          .  .        .  .
    mask 1 of root        x          x      x    .   .      x  .          .  .        .  .
    mask 2 of root        x          x      x    .   .      x  x          .  .        .  .
    mask 1 of a           x          x      x    x   .      .  .          x  .        .  .
    mask 2 of a           x          x      x    x   .      .  .          x  x        .  .
    mask 1 of b           x          x      x    .   x      .  .          .  .        x  .
    mask 2 of b           x          x      x    .   x      .  .          .  .        x  x

If the target chooses a after the root, a is accepted. What the target chooses after a is the next
root, and the masks of a give the candidates that follow the next root. If it chooses neither a nor
b, its choice is the next root, and the root's masks give the candidates.

    L_SAR = - sum_{i=k+2}^{k+M+1} log P(y_i | X, y_0 … y_k; prompt and mask tokens)     Eq. 1

Departures in decoding (paper / here / why):
    tree: one of 1 + M k nodes, in which only the first node of each level has children (Fig. 5) /
        by default the nodes that are likeliest to be accepted, as many as pay on this machine /
        rows that are free on a GPU are expensive on a CPU. The paper's tree is --tree efficient
    masks behind a node: all M / with the default tree only the first M', as many as pay / a node
        with its masks is 1 + M' rows
    candidates: the 5 likeliest of each mask / with efficient and full trees --k of them, 5 by
        default; with the default tree those of its nodes, of the 10 likeliest / there the tree is
        planned by how often each is right
    --k with another tree: the paper has no such option / it is refused with the default tree and
        with a chain / they have no k, and an option that is ignored misleads
    sampling: the paper is greedy / at a temperature too / one sample after each node is exact

Departures in training (paper / here / why):
    Eq. 1: its sum runs from k + 1 to k + M / from k + 2 to k + M + 1 / by Section 3.2 and Fig. 4
        position k + 1 is predicted by the last real token, and the masks predict what follows it
    loss: a sum / a mean over labels / a good rate does not depend on the number of labels then
    trained positions: one k of an answer at random, in the released code up to 64 neighbouring
        ones / up to --anchors of them, 64 by default, anywhere in the answer / one pass over the
        text serves them all
    their range: all labels lie inside the answer, and y_0 is always seen / from the prompt's last
        token on, and masks beyond the answer's end have no label / decoding meets these places too
    length: 4 epochs, 128 answers a step / --steps steps of --batch x --accumulate answers, 16 by
        default / a small model needs less
    deep soft prompt: the released code has a key and a value for each query head / for each key
        head / a model with grouped queries has no other heads for keys
    shallow soft prompt: embeddings before the text / they are run alone, once / real tokens must
        not see them

Left out: several GPUs.
"""
import json
import random
import sys
from pathlib import Path
from typing import Callable, Iterator

from common import CachedLM, InputError, Sampler, attention_mask, greedy, walk, windows_of

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

DESIGNS = ("deep", "shallow", "none")  # Table 3
TREES = ("best", "efficient", "full", "chain")
RANKS = 10  # guesses of a mask token whose accuracies are measured, and candidates in a best tree
MOST = 64  # the most rows of a call with a best tree
CANDIDATES = 5  # candidates of a mask token in efficient and full trees
ADAPTER = str(Path(__file__).resolve().parent / "models/bita.safetensors")


# ----------------------------------------------------------------------------- what is tuned

class TrainingCache:
    """Let a pass in training see the rows of earlier passes. It stands in for transformers' cache.

    before   for each earlier pass a list of the (keys, values) of each layer. Both are
             [B or 1, heads, n, d].

    new      the (keys, values) of each layer that this pass has computed so far
    """

    def __init__(self, *before: list):
        self.before = before
        self.new = []

    def update(self, keys, values, layer, *_, **__):
        """Take a layer's new keys and values, and return those of `before` followed by them."""
        self.new.append((keys, values))
        rows = [[x.to(keys.dtype).expand(len(keys), -1, -1, -1) for x in older[layer]]
                for older in self.before]
        return [torch.cat(parts, 2) for parts in zip(*rows, (keys, values))]

    def get_seq_length(self, *_) -> int:
        return 0


def run_model(model, inputs, visible, positions, slots=None, before=()):
    """Run a model, without its LM head, over n new rows, each of which sees the slots that
    `visible` names. The m slots are the rows of `before`, followed by the new rows themselves.

    inputs     ids [B, n] or embeddings [B, n, d] of the new rows
    positions  positions of the new rows, [B, n]

    visible    bool [B, n, m], whether a new row sees a slot
    slots      positions of the slots, [B, m]. None is enough where `before` is empty.
    before     rows of earlier passes, as in `TrainingCache`

    returns    what the LM head would read, [B, n, d], and the new rows' (keys, values) of each
               layer
    """
    like = model.get_input_embeddings().weight
    cache = TrainingCache(*before)
    slots = positions if slots is None else slots
    mask = attention_mask(windows_of(model), visible, positions, slots, like)
    name = "input_ids" if inputs.ndim == 2 else "inputs_embeds"
    output = model.get_decoder()(
        **{name: inputs.to(like.device)}, position_ids=positions.to(like.device),
        attention_mask=mask, past_key_values=cache, use_cache=True)
    return output[0], cache.new


def causal_mask(n: int) -> torch.Tensor:
    """Return the mask [1, n, n] with which each of n rows sees the rows before it and itself."""
    return torch.ones(1, n, n, dtype=torch.bool).tril()


def shape_of(model) -> dict:
    """Return what a tuning has in common with its model.

    returns   the name of the model's class as "model", and numbers: "layers", "heads" (the key
              heads of a layer), "head_dim" (the size of a key) and "width" (that of an embedding)
    """
    with torch.inference_mode():
        _, layers = run_model(model, torch.tensor([[0]]), causal_mask(1), torch.tensor([[0]]))
    keys, values = layers[0]
    if keys.shape != values.shape:
        raise InputError(f"expected keys and values of one size, got {type(model).__name__}")
    return {"model": type(model).__name__, "layers": len(layers), "heads": keys.shape[1],
            "head_dim": keys.shape[3], "width": model.get_input_embeddings().weight.shape[1]}


class Tuning(torch.nn.Module):
    """Hold what is tuned: P prompt tokens and M mask tokens.

    shape        what `shape_of` returns for the model
    design       where the soft prompt enters, one of DESIGNS
    seed         seed of the numbers that the tuning begins with

    masks        embeddings of the mask tokens, [M, width]

    soft_prompt  With the deep design these are keys and values of every layer,
                 [layers, 2, heads, P, head_dim]. With the shallow design they are embeddings
                 [P, width], which are run once, alone, at positions 0 to P - 1.
    accept       accept[j - 1][r] is how often the guess of rank r of mask j is right on held-out
                 answers. Rank 0 is the likeliest. The list is empty until the tuning is measured.
    """

    def __init__(self, shape: dict, design: str = "deep", P: int = 16, M: int = 3, seed: int = 0):
        super().__init__()
        if design not in DESIGNS:
            raise InputError(f"--design must be {', '.join(DESIGNS)}, got {design}")
        self.shape = shape
        self.design = design
        self.accept = []
        sizes = {"deep": (shape["layers"], 2, shape["heads"], P, shape["head_dim"]),
                 "shallow": (P, shape["width"]), "none": (0,)}
        rng = torch.Generator().manual_seed(seed)
        self.soft_prompt = torch.nn.Parameter(0.02 * torch.randn(sizes[design], generator=rng))
        self.masks = torch.nn.Parameter(0.02 * torch.randn(M, shape["width"], generator=rng))

    def soft_rows(self, model) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the soft prompt as (keys, values) [heads, P, head_dim] of each layer. Without a
        soft prompt the list is empty.

        The deep design tunes keys as attention reads them. No position is rotated into them, as in
        the released code.
        """
        if self.design == "none":
            return []
        if self.design == "deep":
            return [tuple(pair.to(model.dtype)) for pair in self.soft_prompt]
        n, embeds = len(self.soft_prompt), self.soft_prompt[None].to(model.dtype)
        _, layers = run_model(model, embeds, causal_mask(n), torch.arange(n)[None])
        return [(keys[0], values[0]) for keys, values in layers]

    @torch.inference_mode()
    def for_decoding(self, model) -> tuple[list, torch.Tensor]:
        """Return `soft_rows` and the mask tokens [M, width], in the model's type."""
        return self.soft_rows(model), self.masks.to(model.dtype)


# ---------------------------------------------------------------------------------- the loss

def sample_anchors(data: list[tuple[list[int], list[int]]], M: int, most: int, rng: random.Random):
    """Make a batch of prompts with their answers, and draw anchors in each answer. An anchor is a
    real token with a group of masks after it, the paper's token k.

    data     pairs of a prompt and its answer, token ids

    M        number of masks of a group
    most     the most anchors of an answer
    rng      the source of randomness

    returns  ids [B, T], the anchors' positions [B, G], and labels [B, G, M]. Mask j after position
             a has the token of position a + j + 1 for its label. A label is -100 where there is no
             anchor, or where the answer has ended before.
    """
    # From the prompt's last token on, as long as the answer has a token for mask 1 to predict
    spans = [range(len(p) - 1, len(p) + len(a) - 2) for p, a in data]
    chosen = [sorted(rng.sample(span, min(most, len(span)))) for span in spans]
    G = max(1, max(map(len, chosen)))
    ids = torch.zeros(len(data), max(len(p) + len(a) for p, a in data), dtype=torch.long)
    anchors = torch.zeros(len(data), G, dtype=torch.long)
    labels = torch.full((len(data), G, M), -100)
    for b, ((prompt, answer), positions) in enumerate(zip(data, chosen)):
        tokens = torch.tensor(prompt + answer)
        ids[b, :len(tokens)] = tokens
        anchors[b, :len(positions)] = torch.tensor(positions, dtype=torch.long)
        for g, a in enumerate(positions):
            following = tokens[a + 2:a + 2 + M]
            labels[b, g, :len(following)] = following
    return ids, anchors, labels


def mask_states(model, masks: torch.Tensor, soft_rows: list, ids: torch.Tensor,
                anchors: torch.Tensor) -> torch.Tensor:
    """Return what the LM head reads at groups of mask tokens behind anchors.

    Real tokens see neither masks nor soft prompt, so their keys and values are computed first,
    without gradients.

    masks      embeddings of the mask tokens, [M, width]
    soft_rows  what `Tuning.soft_rows` returns. Only mask tokens see these rows.
    ids        real tokens [B, T]
    anchors    positions [B, G] of the real tokens that have a group behind them

    returns    hidden states [B, G, M, d]. Their logits would take more memory than all else
    """
    (B, T), G, M = ids.shape, anchors.shape[1], len(masks)
    # Run the text first. It needs no gradients, for nothing tuned changes it. With gradients its
    # activations would be stored, which takes memory
    context = torch.arange(T).expand(B, -1)
    with torch.no_grad():
        _, text = run_model(model, ids, causal_mask(T).expand(B, -1, -1), context)
    # Fig. 3: mask j of the group behind position a stands at a + j. It sees the text up to a, the
    # masks of its own group up to itself, and the soft prompt
    positions = (anchors[:, :, None] + 1 + torch.arange(M)).flatten(1)  # [B, G · M]
    sees = context[:, None] <= anchors.repeat_interleave(M, 1)[:, :, None]  # [B, G · M, T]
    groups = torch.block_diag(*[causal_mask(M)[0]] * G).bool()  # [G · M, G · M]
    visible = torch.cat([sees, groups.expand(B, -1, -1)], 2)
    slots = torch.cat([context, positions], 1)
    before = [text]
    if soft_rows:
        P = soft_rows[0][0].shape[1]
        visible = F.pad(visible, (P, 0), value=True)
        slots = F.pad(slots, (P, 0), value=10 ** 9)  # no sliding window leaves it out
        before.insert(0, [(keys[None], values[None]) for keys, values in soft_rows])
    embeds = masks.to(model.dtype).repeat(G, 1).expand(B, -1, -1)
    states, _ = run_model(model, embeds, visible, positions, slots, before)
    return states.unflatten(1, (G, M))


def sar_loss(states: torch.Tensor, labels: torch.Tensor, score: Callable,
             vocab: int) -> torch.Tensor:
    """Return Eq. 1 as a mean over the labels, in nats.

    states  what the LM head reads at masks, [B, G, M, d]
    labels  [B, G, M], -100 where there is none
    score   a function from what the LM head reads to logits, as `score_with` of training/parts.py
            makes it
    vocab   the number of logits
    """
    from training.loop import compute_in_parts

    def losses_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropies of masks with states x [n, d] and labels y [n]."""
        return F.cross_entropy(score(x), y, reduction="none")
    known = labels >= 0
    return compute_in_parts(losses_of, vocab, states[known], labels[known]).mean()


# ---------------------------------------------------------------------------------- decoding

def build_efficient_tree(candidates: list[list[int]]) -> tuple[list[int], list[int]]:
    """Build the tree of Fig. 5, which has 1 + M k nodes. Level j has the k likeliest tokens of mask
    j, and only the first node of a level has children.

    candidates  for each mask its likeliest tokens, the best first
    returns     ids and parents. The id of the root, node 0, is -1, and the caller replaces it.
    """
    ids, parents = [-1], [-1]
    first = 0
    for tokens in candidates:
        parent, first = first, len(ids)
        ids += tokens
        parents += [parent] * len(tokens)
    return ids, parents


def build_full_tree(candidates: list[list[int]]) -> tuple[list[int], list[int]]:
    """Build a tree in which every node has children, 1 + k + … + k^M nodes. Arguments and result
    are those of `build_efficient_tree`."""
    ids, parents = [-1], [-1]
    level = [0]
    for tokens in candidates:
        first = len(ids)
        parents += [parent for parent in level for _ in tokens]
        ids += tokens * len(level)
        level = range(first, len(ids))
    return ids, parents


def build_planned_tree(plan: list,
                       candidates: list[list[int]]) -> tuple[list[int], list[int]]:
    """Build the tree that `best_tree` planned. Where candidates lack for the deepest levels, these
    levels are left out.

    plan        the nodes of the planned tree, which say depth, rank and parent
    candidates  for each mask its likeliest tokens, the best first
    returns     ids and parents. The id of the root, node 0, is -1, and the caller replaces it.
    """
    ids, parents = [-1], [-1]
    built = {0: 0}  # for each node of the plan its number in the tree
    for i, node in enumerate(plan[1:], 1):
        if node.depth <= len(candidates):
            built[i] = len(ids)
            ids.append(candidates[node.depth - 1][node.rank])
            parents.append(built[node.parent])
    return ids, parents


def build_tree(tree: str, plan: list, candidates: list[list[int]],
               root: int) -> tuple[list[int], list[int]]:
    """Build the tree of candidates below a root, and return its ids and parents.

    tree        one of TREES
    plan        the nodes of the planned tree, which only a best tree reads
    candidates  for each mask its likeliest tokens, the best first
    root        the token of node 0

    A chain is an efficient tree with one candidate on each level.
    """
    if tree == "best":
        ids, parents = build_planned_tree(plan, candidates)
    elif tree == "full":
        ids, parents = build_full_tree(candidates)
    else:
        ids, parents = build_efficient_tree(candidates)
    ids[0] = root
    return ids, parents


def list_plans(target: CachedLM, accept: list[list[float]]) -> Iterator[tuple]:
    """Yield plans of a best tree, for `fastest` to choose one.

    target  the model, whose calls are timed
    accept  how often the guess of each rank of each mask is right, as in `Tuning.accept`

    yields  a plan (nodes, M'), the tokens that a call is expected to make final, and the seconds
            that it takes. Each node of the plan has M' masks below it, and lies no deeper than M'.
    """
    from survey.clock import best_tree, row_costs
    costs = row_costs(target, MOST)
    for M in range(len(accept) + 1):
        tree = best_tree(accept[:M], MOST // (1 + M))
        for n in range(1, len(tree) + 1):
            tokens = sum(node.chance for node in tree[:n])
            yield (tree[:n], M), tokens, costs[n * (1 + M)]  # a node and its masks are 1 + M rows


def attach_masks(parents: list[int], owners: list[int], M: int) -> list[int]:
    """Add a group of masks below some nodes of a tree. A group is a chain of M mask tokens.

    parents  parents of the tree of real tokens
    owners   the nodes that get a group
    M        number of masks of a group

    returns  parents of the real tokens, followed by those of the masks, group after group
    """
    parents = list(parents)
    if M == 0:
        return parents
    for owner in owners:
        first = len(parents)
        parents += [owner, *range(first, first + M - 1)]
    return parents


def count_candidates(tree: str, k: int) -> int:
    """Return how many candidates of each mask a tree uses.

    tree   `bita`'s option. InputError is raised if it is not one of TREES.
    k      `bita`'s option. InputError is raised if it is negative, or if it is given for a tree
           that would ignore it.
    """
    if tree not in TREES:
        raise InputError(f"--tree must be {', '.join(TREES)}, got {tree}")
    if k < 0:
        raise InputError(f"--k must be 0 or more, got {k}")
    if tree in ("efficient", "full"):
        return k if k > 0 else CANDIDATES
    if k > 0:
        raise InputError(f"--k must be left out with --tree {tree}, got {k}")
    return 1 if tree == "chain" else RANKS


def bita(target: CachedLM, prompt: list[int], *, tree: str = "best", k: int = 0,
         adapter: str = ADAPTER, tuning: "Tuning | None" = None, sample: Sampler = greedy,
         log: list | None = None) -> Iterator[list[int]]:
    """Verify the last call's candidates and produce the next ones in the same call. Section 3.2.

    tuning   a tuning that is used instead of the file of --adapter

    tree:    best has the likeliest nodes, as many as pay on this machine. efficient is the paper's
             tree, in which only the likeliest candidate of a mask has children. full has children
             below every node. chain is the paper's straightforward decoding, which has one
             candidate of each mask, and one group of masks, after the root
    k:       candidates of each mask token in efficient and full trees, where 0 means 5. The other
             trees refuse it
    adapter: file of prompt and mask tokens, made by `python bita.py train`

    Yields chunks of 1 to M + 1 tokens; logs {"guessed", "accepted", "rows"} a call. They are the
    numbers of candidates, of accepted candidates, and of all rows of the call.
    """
    k = count_candidates(tree, k)
    tuning = tuning or target.once(("bita", adapter), lambda: load_tuning(adapter, target.model))
    prefix, masks = tuning.for_decoding(target.model)
    embed = target.model.get_input_embeddings()
    target.start(prompt[:-1], prefix=prefix)
    plan, M = [], len(masks)
    root = prompt[-1]
    candidates = []  # for each mask its k likeliest tokens
    while True:
        if tree == "best":  # ours: more nodes or masks only where their rows pay on this machine
            from survey.clock import fastest
            plan, M = fastest(target, tuning, lambda: list_plans(target, tuning.accept))
        # Fig. 5: the last call's candidates become a tree of real tokens below the root. `real` has
        # the parents of these
        ids, real = build_tree(tree, plan, candidates, root)
        n = len(real)
        # Section 3.2: whichever node is accepted last, masks behind it have looked ahead already.
        # Masks behind the root alone would leave nothing to guess from after an accepted token
        owners = [0] if tree == "chain" else range(n)  # nodes with a group of masks below them
        parents = attach_masks(real, owners, M)
        with torch.inference_mode():
            tokens = embed(torch.tensor(ids, device=masks.device))
            inputs = torch.cat([tokens, masks[:M].repeat(len(owners), 1)])
        sees_prefix = [False] * n + [True] * (len(inputs) - n)  # real tokens never do
        logits = target.forward(inputs, parents, sees_prefix=sees_prefix)
        # Verification: the accepted guesses and the target's own token are final. The cache keeps
        # real tokens alone, for a mask's row in it would change the output
        path, chunk = walk(ids, real, sample(logits[:n]))
        target.commit(path)
        root = chunk[-1]
        # Generation: the masks behind the last accepted node predict what follows the new root
        groups = logits[n:].view(len(owners), M, logits.shape[1])
        if tree == "chain":
            # The only group stands behind the old root. Its first masks predicted tokens that are
            # final by now, one for each accepted candidate
            stale = len(path) - 1
            group = groups[0, stale:]
        else:
            group = groups[path[-1]]
        candidates = group.topk(min(k, group.shape[1])).indices.tolist()
        if log is not None:
            log.append({"guessed": n - 1, "accepted": len(path) - 1, "rows": len(parents)})
        yield chunk


# ------------------------------------------------------------------------------------ tuning

@torch.inference_mode()
def accuracy(model, tuning: Tuning, data: list, anchors: int,
             size: int = 16) -> tuple[float, list[list[float]]]:
    """Measure a tuning on pairs of a prompt and its answer.

    tuning   the tuning
    data     the pairs
    anchors  the most anchors of an answer
    size     how many pairs a pass has

    returns  the loss, a mean over passes, and how often each mask's guess of each rank is right, as
             in `Tuning.accept`
    """
    from training.loop import compute_in_parts
    from training.parts import score_with
    score, vocab = score_with(model), len(model.get_output_embeddings().weight)
    rng = random.Random(0)
    losses = []
    hits, total = 0, 0
    for i in range(0, len(data), size):
        batch = sample_anchors(data[i:i + size], len(tuning.masks), anchors, rng)
        ids, positions, labels = batch
        labels = labels.to(tuning.masks.device)
        states = mask_states(model, tuning.masks, tuning.soft_rows(model), ids, positions)
        losses.append(sar_loss(states, labels, score, vocab).item())
        ranked = compute_in_parts(lambda x: score(x).topk(min(RANKS, vocab)).indices, vocab,
                                  states.flatten(0, 2))
        ranked = ranked.view(*labels.shape, -1)  # [B, G, M, RANKS]
        hits = hits + (ranked == labels[..., None]).sum((0, 1))
        total = total + (labels >= 0).sum((0, 1))
    return sum(losses) / len(losses), (hits / total.clamp(min=1)[:, None]).tolist()


def fit(model, tuning: Tuning, data: list, held_out: list, *, steps: int, batch: int, anchors: int,
        lr: float, seed: int = 0, work: Path | None = None) -> dict:
    """Tune on pairs of a prompt and its answer, the model frozen, and set `tuning.accept`.

    In Section 4.1 the learning rate is a cosine that begins at 3e-2, and a step has 128 answers.
    Gradients are cut to length 1, and AdamW has no weight decay, as in the released scripts.

    tuning    the tuning, which changes in place
    data      pairs to learn from
    held_out  pairs to measure the tuning on
    work      the folder of the checkpoints. None writes no checkpoint.

    steps, batch, anchors, lr, seed   are options of `train`, which explains them

    returns   {step: {"loss", "accept"}}, measured on `held_out`
    """
    from training.loop import Training, count_tokens, digest, sample_alike, tokens_of_pass
    from training.parts import score_with
    model.requires_grad_(False)
    score, vocab = score_with(model), len(model.get_output_embeddings().weight)

    def loss_of(rng: random.Random) -> torch.Tensor:
        pairs = sample_alike(data, batch, rng, count_tokens)
        ids, positions, labels = sample_anchors(pairs, len(tuning.masks), anchors, rng)
        states = mask_states(model, tuning.masks, tuning.soft_rows(model), ids, positions)
        return sar_loss(states, labels.to(model.device), score, vocab)

    def evaluate() -> tuple[dict, str]:
        loss, accept = accuracy(model, tuning, held_out, anchors)
        right = " ".join(f"{ranks[0]:.3f}" for ranks in accept)
        return ({"loss": loss, "accept": accept},
                f"held-out loss {loss:.3f}, accuracy by mask {right}")
    of = digest(model.state_dict()), tuning.design, data, held_out, batch, anchors
    curve = Training(dict(tuning.named_parameters()), of, name="tuning", steps=steps, lr=lr,
                     seed=seed, folder=work, models=(model,),
                     tokens=tokens_of_pass(data, batch)).train(loss_of, evaluate)
    tuning.accept = curve[steps]["accept"]
    return curve


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          design: str = "deep", P: int = 16, M: int = 3, max_new_tokens: int = 200,
          steps: int = 1000, batch: int = 16, anchors: int = 64, lr: float = 3e-2,
          seed: int = 0) -> None:
    """Tune prompt and mask tokens for a frozen model on its own answers. A stopped run goes on.

    out:    the safetensors file to make
    work:   folder of answers and checkpoints, by default OUT.work
    design: where the prompt tokens enter. With deep they enter in every layer, with shallow only
            at the input. With none there are no prompt tokens
    P, M:   numbers of prompt tokens and of mask tokens
    max_new_tokens: the most tokens of an answer
    batch:  answers of a pass. A step of the paper has 128 answers
    anchors: the most mask groups of an answer
    lr:     where the cosine of the learning rate begins. 3e-2 is the paper's, for 7B to 70B
            parameters, and suited 10M to 135M
    """
    from training.loop import collect_examples, require_training_options
    require_training_options(lr, P=P, M=M, max_new_tokens=max_new_tokens, steps=steps, batch=batch,
                             anchors=anchors)
    work = work or Path(f"{out}.work")
    tuning = Tuning(shape_of(model), design, P, M, seed).to(model.device)
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed)
    fit(model, tuning, data, held_out, steps=steps, batch=batch, anchors=anchors, lr=lr, seed=seed,
        work=work)
    save_tuning(out, tuning, model)


# ---------------------------------------------------------------------------------- its file

def some_embeddings(model) -> torch.Tensor:
    """Return a corner of a model's embeddings, [16, 16] in float32, which is enough to recognise
    the model."""
    return model.get_input_embeddings().weight[:16, :16].detach().float().cpu()


def save_tuning(path: Path, tuning: Tuning, model) -> None:
    """Write a tuning to a file, with the model that it is for."""
    from training.files import write_whole
    tensors = {"prompts": tuning.soft_prompt, "masks": tuning.masks,
               "model": some_embeddings(model)}
    kept = {name: x.detach().cpu().to(torch.bfloat16) for name, x in tensors.items()}
    header = json.dumps(tuning.shape | {"design": tuning.design, "accept": tuning.accept})
    write_whole(path, lambda fresh: save_file(kept, fresh, {"bita": header}))


def load_tuning(path: str, model) -> Tuning:
    """Read a tuning from a file. Raise InputError where the file was made for another model."""
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get("bita", "null"))
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"expected a file made by `python bita.py train`, got {path!r}: "
                         f"{error}") from error
    if "accept" not in (header or ()) or tensors.keys() != {"prompts", "masks", "model"}:
        raise InputError(f"expected a file made by `python bita.py train`, got {path!r} without "
                         "its header")
    design, accept, shape = header.pop("design"), header.pop("accept"), shape_of(model)
    for name in shape:
        if header[name] != shape[name]:
            raise InputError(f"expected a tuning of this model, got one of another: {name} is "
                             f"{header[name]} there and {shape[name]} here")
    there, here = (x - x.mean(0) for x in (tensors["model"], some_embeddings(model)))
    # About 1 where the model was tuned or quantised since, about 0 for another model
    if F.cosine_similarity(there.flatten(), here.flatten(), 0) < 0.5:
        raise InputError("expected a tuning of this model, got one of another: embeddings differ")
    if not all(x.isfinite().all() for x in tensors.values()):
        raise InputError(f"expected finite numbers, got {path!r} with others")
    tuning = Tuning(shape, design)
    tuning.accept = accept
    tuning.soft_prompt = torch.nn.Parameter(tensors["prompts"], requires_grad=False)
    tuning.masks = torch.nn.Parameter(tensors["masks"], requires_grad=False)
    return tuning.to(model.device)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    """Return a line with the mean rows, candidates and accepted candidates of a call."""
    guessed, accepted, rows = (sum(r[name] for r in run.log) / len(run.log)
                               for name in ("guessed", "accepted", "rows"))
    return f"a call: {rows:.1f} rows, {guessed:.1f} of them candidates, {accepted:.2f} accepted"


if __name__ == "__main__":
    from cli.main import main  # the command line is in cli/, a folder of this project
    sys.exit(main([bita], report, commands=[train],
                  ranges={"tree": TREES, "k": (1, 2, 3, 5)}))
