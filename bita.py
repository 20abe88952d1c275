"""BiTA: a frozen model learns to look ahead through a few prompt and mask tokens.

Lin et al., "BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models",
arXiv 2401.12522

    python bita.py train --prompts FILE --out my.safetensors        # tune (Section 3.1)
    python bita.py --adapter my.safetensors --prompt "..."          # decode (Section 3.2)

Mask token j (1 … M) after a real token at position a stands at position a + j and predicts the
token of position a + j + 1; that of a + 1 is the real token's own prediction. Only mask tokens see
the P prompt tokens, real tokens never do, so the output stays the model's own: lossless, greedily
or by one draw of the model at each node of the tree.

    L_SAR = - sum_{i=k+2}^{k+M+1} log P(y_i | X, y_0 … y_k; prompt and mask tokens)
            Eq. 1, whose i is one too small against Section 3.2 and Fig. 4

Departures: the loss is a mean; many k of an answer are trained on at once, as in the released code
(up to 64 neighbours, all labels inside the answer; here anywhere from the prompt's last token on);
deep prompt rows have the model's key heads, not all of its query heads; shallow ones are run alone,
so that real tokens do not see them; sampling (the paper is greedy). Left out: several GPUs.
"""
import json
import random
import sys
from pathlib import Path
from typing import Iterator

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import (CachedLM, InputError, Node, Sampler, attention_mask, best_tree, fastest, greedy,
                    row_costs, walk, windows_of)

DESIGNS = ("deep", "shallow", "none")  # Table 3
TREES = ("best", "efficient", "full", "chain")
RANKS = 10  # guesses of a mask whose accuracies are measured
MOST = 64  # rows of a call with a best tree
ADAPTER = str(Path(__file__).resolve().parent / "models/bita.safetensors")


# ---------------------------------------------------------------------------------- decoding

def efficient_tree(candidates: list[list[int]]) -> tuple[list[int], list[int]]:
    """(ids, parents) below the root, node 0, whose id is left to the caller: level j has the k
    likeliest tokens of mask j, and only a level's first has children (Fig. 5). 1 + M k nodes."""
    ids, parents = [-1], [-1]
    first = 0
    for tokens in candidates:
        parent, first = first, len(ids)
        ids += tokens
        parents += [parent] * len(tokens)
    return ids, parents


def full_tree(candidates: list[list[int]]) -> tuple[list[int], list[int]]:
    """As `efficient_tree`, every node with children: 1 + k + … + k^M nodes."""
    ids, parents = [-1], [-1]
    level = [0]
    for tokens in candidates:
        first = len(ids)
        parents += [parent for parent in level for _ in tokens]
        ids += tokens * len(level)
        level = range(first, len(ids))
    return ids, parents


def planned_tree(plan: list[Node], candidates: list[list[int]]) -> tuple[list[int], list[int]]:
    """As `efficient_tree`, of the nodes that `best_tree` chose, as deep as there are candidates."""
    ids, parents = [-1], [-1]
    place = {0: 0}  # of a node of the plan in the tree
    for i, node in enumerate(plan[1:], 1):
        if node.depth <= len(candidates):
            place[i] = len(ids)
            ids.append(candidates[node.depth - 1][node.rank])
            parents.append(place[node.parent])
    return ids, parents


def plans(target: CachedLM, accept: list[list[float]]) -> Iterator[tuple]:
    """((the nodes of a best tree, M' masks below each of them), expected tokens, seconds): n nodes
    are n (1 + M') rows; there are as many masks as the tree is deep."""
    costs = row_costs(target, MOST)
    for M in range(len(accept) + 1):
        tree = best_tree(accept[:M], MOST // (1 + M))
        for n in range(1, len(tree) + 1):
            tokens = sum(node.chance for node in tree[:n])
            yield (tree[:n], M), tokens, costs[n * (1 + M)]


def attach_masks(parents: list[int], owners: list[int], M: int) -> list[int]:
    """The parents of a tree with a chain of M mask tokens below each of the nodes `owners`."""
    parents = list(parents)
    for owner in owners if M else []:
        parents += [owner, *range(len(parents), len(parents) + M - 1)]
    return parents


def bita(target: CachedLM, prompt: list[int], *, tree: str = "best", k: int = 5,
         adapter: str = ADAPTER, tuning: "Tuning | None" = None, sample: Sampler = greedy,
         log: list | None = None) -> Iterator[list[int]]:
    """Verify the last call's candidates and produce the next ones in the same call. Section 3.2.

    tree:    best (the likeliest nodes, as many as pay on this machine), efficient (only the
             likeliest candidate of a mask has children), full (all have), or chain
             (straightforward: one group of masks, after the root)
    k:       candidates of each mask token in efficient and full trees
    adapter: file of prompt and mask tokens, made by `python bita.py train`
    Yields chunks of 1 to M + 1 tokens; `tuning` replaces the file. Logs a record a call:
    {"guessed", "accepted", "rows"}.
    """
    if tree not in TREES or k < 1:
        raise InputError(f"expected a tree of {', '.join(TREES)} and k of 1 or more, "
                         f"got {tree} and {k}")
    tuning = tuning or target.once(("bita", adapter), lambda: load_tuning(adapter, target.model))
    prefix, masks = tuning.inputs(target.model)
    embed = target.model.get_input_embeddings()
    target.start(prompt[:-1], prefix=prefix)
    M = len(masks)
    k = {"chain": 1, "best": RANKS}.get(tree, k)
    root = prompt[-1]
    candidates = []  # for each mask its k likeliest tokens
    while True:
        if tree == "best":
            plan, M = fastest(target, tuning, lambda: plans(target, tuning.accept))
            ids, real = planned_tree(plan, candidates)
        else:
            ids, real = full_tree(candidates) if tree == "full" else efficient_tree(candidates)
        ids[0] = root
        n = len(real)
        owners = [0] if tree == "chain" else range(n)  # nodes with a group of masks below them
        parents = attach_masks(real, owners, M)
        with torch.inference_mode():
            tokens = embed(torch.tensor(ids, device=masks.device))
            rows = torch.cat([tokens, masks[:M].repeat(len(owners), 1)])
        sees = [False] * n + [True] * (len(rows) - n)
        logits = target.forward(rows, parents, sees_prefix=sees)
        path, chunk = walk(ids, real, sample(logits[:n]))
        target.commit(path)
        root = chunk[-1]
        groups = logits[n:].view(len(owners), M, logits.shape[1])
        if tree == "chain":  # one group, behind the root: its first masks are stale by now
            stale = len(path) - 1
            group = groups[0, stale:]
        else:
            group = groups[path[-1]]
        candidates = group.topk(min(k, group.shape[1])).indices.tolist()
        if log is not None:
            log.append({"guessed": n - 1, "accepted": len(path) - 1, "rows": len(parents)})
        yield chunk


# ----------------------------------------------------------------------------- what is tuned

class Rows:
    """Stands in for transformers' cache in training: the rows of a pass come behind those of
    `before`, lists of (keys, values) [B or 1, heads, n, d] for each layer; `new` keeps them."""

    def __init__(self, *before: list):
        self.before = before
        self.new = []

    def update(self, keys, values, layer, *_, **__):
        self.new.append((keys, values))
        rows = [[x.to(keys.dtype).expand(len(keys), -1, -1, -1) for x in older[layer]]
                for older in self.before]
        return [torch.cat(parts, 2) for parts in zip(*rows, (keys, values))]

    def get_seq_length(self, *_) -> int:
        return 0


def forward(model, inputs, visible, positions, slots=None, before=(), head: bool = True):
    """(logits [B, n, V], None without `head`; new (keys, values) of each layer) of ids [B, n] or
    embeddings [B, n, d] at `positions` [B, n]. `visible` [B, n, m]: what they see of the rows
    `before` and of themselves, at positions `slots` [B, m] (default: without `before`)."""
    like = model.get_input_embeddings().weight
    cache = Rows(*before)
    slots = positions if slots is None else slots
    mask = attention_mask(windows_of(model), visible, positions, slots, like)
    name = "input_ids" if inputs.ndim == 2 else "inputs_embeds"
    run = model if head else model.get_decoder()
    output = run(**{name: inputs.to(like.device)}, position_ids=positions.to(like.device),
                 attention_mask=mask, past_key_values=cache, use_cache=True)
    return output.logits if head else None, cache.new


def causal(n: int) -> torch.Tensor:
    return torch.ones(1, n, n, dtype=torch.bool).tril()


def shape_of(model) -> dict:
    """What a tuning must fit: the model's layers, key heads, head size and width."""
    with torch.inference_mode():
        _, rows = forward(model, torch.tensor([[0]]), causal(1), torch.tensor([[0]]), head=False)
    keys, values = rows[0]
    if keys.shape != values.shape:
        raise InputError(f"expected keys and values of one size, got {type(model).__name__}")
    return {"model": type(model).__name__, "layers": len(rows), "heads": keys.shape[1],
            "head_dim": keys.shape[3], "width": model.get_input_embeddings().weight.shape[1]}


class Tuning(torch.nn.Module):
    """P prompt tokens and M mask tokens. `masks` [M, width]; `prompts`: keys and values of every
    layer [layers, 2, heads, P, head_dim] (deep: P · layers · 2 · heads · head_dim parameters), or
    embeddings [P, width] that are run once, alone, at positions 0 to P - 1 (shallow).
    `accept[j - 1][r]`: how often the guess of rank r of mask j is right on held-out answers."""

    def __init__(self, shape: dict, design: str = "deep", P: int = 16, M: int = 3, seed: int = 0):
        super().__init__()
        if design not in DESIGNS or M < 1 or P < 1:
            raise InputError(f"expected a design of {', '.join(DESIGNS)}, P and M of 1 or more, "
                             f"got {design}, {P} and {M}")
        self.shape = shape
        self.design = design
        self.accept = []
        sizes = {"deep": (shape["layers"], 2, shape["heads"], P, shape["head_dim"]),
                 "shallow": (P, shape["width"]), "none": (0,)}
        rng = torch.Generator().manual_seed(seed)
        self.prompts = torch.nn.Parameter(0.02 * torch.randn(sizes[design], generator=rng))
        self.masks = torch.nn.Parameter(0.02 * torch.randn(M, shape["width"], generator=rng))

    def rows(self, model) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(keys, values) [heads, P, head_dim] of each layer, as prompt rows; [] without any. Deep
        ones are not rotated, as released."""
        if self.design == "none":
            return []
        if self.design == "deep":
            return [tuple(pair.to(model.dtype)) for pair in self.prompts]
        n, embeds = len(self.prompts), self.prompts[None].to(model.dtype)
        _, rows = forward(model, embeds, causal(n), torch.arange(n)[None], head=False)
        return [(keys[0], values[0]) for keys, values in rows]

    @torch.inference_mode()
    def inputs(self, model) -> tuple[list, torch.Tensor]:
        """(`rows`, the mask tokens [M, width]), as the model takes them."""
        return self.rows(model), self.masks.to(model.dtype)


# ------------------------------------------------------------------------------------ tuning

def sample_anchors(data: list[tuple[list[int], list[int]]], M: int, most: int, rng: random.Random):
    """A batch of (prompt, answer) pairs with up to `most` anchors in each: real tokens, the paper's
    k, with a group of masks after them (Section 3.1: one at random; a group's mask is Fig. 3's).

    Returns ids [B, T], the anchors' positions [B, G], and labels [B, G, M], -100 where there is no
    anchor or the answer has ended. Mask j after position a has the label of position a + j + 1."""
    spans = [range(len(p) - 1, len(p) + len(a) - 2) for p, a in data]  # what a mask can predict
    chosen = [sorted(rng.sample(span, min(most, len(span)))) for span in spans]
    G = max(1, max(map(len, chosen)))
    ids = torch.zeros(len(data), max(len(p) + len(a) for p, a in data), dtype=torch.long)
    anchors = torch.zeros(len(data), G, dtype=torch.long)
    labels = torch.full((len(data), G, M), -100)
    for b, ((prompt, answer), some) in enumerate(zip(data, chosen)):
        tokens = torch.tensor(prompt + answer)
        ids[b, :len(tokens)] = tokens
        anchors[b, :len(some)] = torch.tensor(some, dtype=torch.long)
        for g, a in enumerate(some):
            known = tokens[a + 2:a + 2 + M]
            labels[b, g, :len(known)] = known
    return ids, anchors, labels


def mask_logits(model, masks: torch.Tensor, prompts: list, ids: torch.Tensor,
                anchors: torch.Tensor) -> torch.Tensor:
    """Logits [B, G, M, V] of mask tokens [M, width], which see `prompts` (`Tuning.rows`). Real
    tokens see neither: their rows are computed first, without gradients."""
    (B, T), G, M = ids.shape, anchors.shape[1], len(masks)
    context = torch.arange(T).expand(B, -1)
    with torch.no_grad():
        _, rows = forward(model, ids, causal(T).expand(B, -1, -1), context, head=False)
    positions = (anchors[:, :, None] + 1 + torch.arange(M)).flatten(1)  # [B, G · M]
    sees = context[:, None] <= anchors.repeat_interleave(M, 1)[:, :, None]  # [B, G · M, T]
    group = torch.block_diag(*[causal(M)[0]] * G).bool().expand(B, -1, -1)  # [B, G · M, G · M]
    visible = torch.cat([sees, group], 2)
    slots = torch.cat([context, positions], 1)
    before = [rows]
    if prompts:
        P = prompts[0][0].shape[1]
        visible = F.pad(visible, (P, 0), value=True)
        slots = F.pad(slots, (P, 0), value=10 ** 9)
        before.insert(0, [(keys[None], values[None]) for keys, values in prompts])
    embeds = masks.to(model.dtype).repeat(G, 1).expand(B, -1, -1)
    return forward(model, embeds, visible, positions, slots, before)[0].unflatten(1, (G, M))


def sar_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Eq. 1, as a mean over the labels, in nats."""
    return F.cross_entropy(logits.float().flatten(0, 2), labels.flatten(), ignore_index=-100)


@torch.inference_mode()
def accuracy(model, tuning: Tuning, data: list, anchors: int,
             size: int = 16) -> tuple[float, list[list[float]]]:
    """(mean loss, how often each mask's guess of each rank is right) on (prompt, answer) pairs."""
    rng = random.Random(0)
    losses = []
    hits, total = 0, 0
    for i in range(0, len(data), size):
        ids, at, labels = sample_anchors(data[i:i + size], len(tuning.masks), anchors, rng)
        labels = labels.to(tuning.masks.device)
        logits = mask_logits(model, tuning.masks, tuning.rows(model), ids, at)
        losses.append(sar_loss(logits, labels).item())
        ranked = logits.topk(min(RANKS, logits.shape[-1])).indices  # [B, G, M, RANKS]
        hits = hits + (ranked == labels[..., None]).sum((0, 1))
        total = total + (labels >= 0).sum((0, 1))
    return sum(losses) / len(losses), (hits / total.clamp(min=1)[:, None]).tolist()


def fit(model, tuning: Tuning, data: list, held_out: list, *, steps: int, batch: int, anchors: int,
        lr: float, accumulate: int = 1, seed: int = 0, work: Path | None = None) -> dict:
    """Tune on (prompt, answer) pairs, the model frozen. Section 4.1: the rate a cosine from 3e-2,
    128 answers a step; released scripts: gradients cut to length 1, AdamW without decay. Returns
    {step: {"loss", "accept"}} on `held_out`; sets `tuning.accept`."""
    from models.training import Training, sample_alike, digest, count_tokens
    model.requires_grad_(False)

    def loss_of(rng: random.Random) -> torch.Tensor:
        some = sample_alike(data, batch, rng, count_tokens)
        ids, at, labels = sample_anchors(some, len(tuning.masks), anchors, rng)
        logits = mask_logits(model, tuning.masks, tuning.rows(model), ids, at)
        return sar_loss(logits, labels.to(model.device))

    def evaluate() -> tuple[dict, str]:
        loss, accept = accuracy(model, tuning, held_out, anchors)
        right = " ".join(f"{ranks[0]:.3f}" for ranks in accept)
        return ({"loss": loss, "accept": accept},
                f"held-out loss {loss:.3f}, accuracy by mask {right}")
    of = digest(model.state_dict()), tuning.design, data, held_out, batch, anchors
    curve = Training(dict(tuning.named_parameters()), of, name="tuning", steps=steps, lr=lr,
                     accumulate=accumulate, seed=seed, folder=work).train(loss_of, evaluate)
    tuning.accept = curve[steps]["accept"]
    return curve


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          design: str = "deep", P: int = 16, M: int = 3, max_new_tokens: int = 200,
          steps: int = 1000, batch: int = 16, accumulate: int = 1, anchors: int = 64,
          lr: float = 3e-2, seed: int = 0) -> None:
    """Tune prompt and mask tokens for a frozen model on its own answers. A stopped run goes on.

    out:    the safetensors file to make
    work:   folder of answers and checkpoints (default: OUT.work)
    design: deep (prompt tokens in every layer), shallow (at the input alone) or none
    P, M:   prompt tokens and mask tokens
    max_new_tokens: of an answer
    batch, accumulate: answers a pass, passes a step (the paper: 128 answers)
    anchors: mask groups of an answer, at most
    lr:     where the cosine begins
    """
    from models.training import collect_examples
    if min(steps, batch, accumulate, anchors, max_new_tokens) < 1 or not lr > 0:
        raise InputError("expected steps, batch, accumulate, anchors and max-new-tokens of 1 or "
                         "more and a learning rate above 0")
    work = work or Path(f"{out}.work")
    tuning = Tuning(shape_of(model), design, P, M, seed).to(model.device)
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed,
                                      size=4 * batch)
    print(f"{sum(p.numel() for p in tuning.parameters()):,} parameters")
    fit(model, tuning, data, held_out, steps=steps, batch=batch, anchors=anchors, lr=lr,
        accumulate=accumulate, seed=seed, work=work)
    save_tuning(out, tuning, model)


# ---------------------------------------------------------------------------------- its file

def some_embeddings(model) -> torch.Tensor:
    """Enough of a model's embeddings [16, 16] to know it by, in whatever type it is."""
    return model.get_input_embeddings().weight[:16, :16].detach().float().cpu()


def save_tuning(path: Path, tuning: Tuning, model) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"prompts": tuning.prompts, "masks": tuning.masks, "model": some_embeddings(model)}
    save_file({name: x.detach().cpu().to(torch.bfloat16) for name, x in tensors.items()}, path,
              {"bita": json.dumps(tuning.shape | {"design": tuning.design,
                                                  "accept": tuning.accept})})


def load_tuning(path: str, model) -> Tuning:
    """InputError where the file was made for another model."""
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
    known, here = (x - x.mean(0) for x in (tensors["model"], some_embeddings(model)))
    if F.cosine_similarity(known.flatten(), here.flatten(), 0) < 0.5:  # tuned or quantised: ~1
        raise InputError("expected a tuning of this model, got one of another: embeddings differ")
    if not all(x.isfinite().all() for x in tensors.values()):
        raise InputError(f"expected finite numbers, got {path!r} with others")
    tuning = Tuning(shape, design)
    tuning.accept = accept
    for name in ("prompts", "masks"):
        setattr(tuning, name, torch.nn.Parameter(tensors[name], requires_grad=False))
    return tuning.to(model.device)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    guessed, accepted, rows = (sum(r[name] for r in run.log) / len(run.log)
                               for name in ("guessed", "accepted", "rows"))
    return f"a call: {rows:.1f} rows, {guessed:.1f} of them candidates, {accepted:.2f} accepted"


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([bita], report, commands=[train],
                  ranges={"tree": TREES, "k": (1, 2, 3, 5)}))
