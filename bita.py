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
import functools
import json
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Iterator

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from common import (CachedLM, InputError, Sampler, attention_mask, best_tree, context_length,
                    digest, greedy, own_answers, row_costs, walk, windows_of)

DESIGNS = ("deep", "shallow", "none")  # Table 3
TREES = ("best", "efficient", "full", "chain")
RANKS = 10  # guesses of a mask whose accuracies are measured
ADAPTER = str(Path(__file__).resolve().parent / "models/bita.safetensors")


# ----------------------------------------------------------------------------- what is tuned

class Rows:
    """Stands in for transformers' cache in training: the rows of a pass come behind those of
    `before`, lists of (keys, values) [B or 1, heads, n, d] for each layer; `new` keeps them."""

    def __init__(self, *before: list):
        self.before, self.new = before, []

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
    like, cache = model.get_input_embeddings().weight, Rows(*before)
    mask = attention_mask(windows_of(model), visible, positions,
                          positions if slots is None else slots, like)
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
        self.shape, self.design, self.accept = shape, design, []
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


def some_embeddings(model) -> torch.Tensor:
    """Enough of a model's embeddings [16, 16] to know it by, in whatever type it is loaded."""
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
    except (OSError, SafetensorError) as error:
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
    if not torch.allclose(tensors["model"], some_embeddings(model), atol=1e-4, rtol=1e-2):
        raise InputError("expected a tuning of this model, got one of another: embeddings differ")
    tuning = Tuning(shape, design)
    tuning.accept = accept
    for name in ("prompts", "masks"):
        setattr(tuning, name, torch.nn.Parameter(tensors[name], requires_grad=False))
    return tuning.to(model.device)


# ---------------------------------------------------------------------------------- decoding

def efficient_tree(candidates: list[list[int]]) -> tuple[list[int], list[int]]:
    """(ids, parents) below the root, node 0, whose id is left to the caller: level j has the k
    likeliest tokens of mask j, and only a level's first has children (Fig. 5). 1 + M k nodes."""
    ids, parents, first = [-1], [-1], 0
    for tokens in candidates:
        parent, first = first, len(ids)
        ids, parents = ids + tokens, parents + [parent] * len(tokens)
    return ids, parents


def full_tree(candidates: list[list[int]]) -> tuple[list[int], list[int]]:
    """As `efficient_tree`, every node with children: 1 + k + … + k^M nodes."""
    ids, parents, level = [-1], [-1], [0]
    for tokens in candidates:
        first = len(ids)
        parents += [parent for parent in level for _ in tokens]
        ids += tokens * len(level)
        level = range(first, len(ids))
    return ids, parents


def placed_tree(tree: list, candidates: list[list[int]]) -> tuple[list[int], list[int]]:
    """As `efficient_tree`, of the nodes that `best_tree` chose; the root alone while there are no
    candidates."""
    filled = [node for node in tree if node[2] < len(candidates)]
    return [candidates[depth][rank] if depth >= 0 else -1 for _, _, depth, rank in filled], \
        [parent for _, parent, _, _ in filled]


def tree_that_pays(target: CachedLM, tuning: Tuning, most: int = 64) -> tuple[list, int]:
    """(the tree of `best_tree`, M' masks below each node) of up to `most` rows with the most
    expected tokens a second, by the measured cost of a call: n nodes, M' deep, are n (1 + M') rows,
    and masks beyond the depth of the tree are left out."""
    costs, found = row_costs(target, most), {}
    for M in range(len(tuning.accept) + 1):
        tree = best_tree(tuning.accept[:M], most)
        for rows, seconds in costs.items():
            some = tree[:rows // (1 + M)]
            found[sum(chance for chance, *_ in some) / seconds] = some, M
    return found[max(found)]


def attach_masks(parents: list[int], owners: list[int], M: int) -> list[int]:
    """The parents of a tree with a chain of M mask tokens below each of the nodes `owners`."""
    parents = list(parents)
    for owner in owners if M else []:
        parents += [owner, *range(len(parents), len(parents) + M - 1)]
    return parents


def bita(target: CachedLM, prompt: list[int], *, tree: str = "best", k: int = 5,
         adapter: str = ADAPTER, tuning: Tuning | None = None, sample: Sampler = greedy,
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
    tuning = tuning or load_tuning(adapter, target.model)
    table = target.model.get_input_embeddings()
    with torch.inference_mode():
        prefix, masks = tuning.rows(target.model), tuning.masks.to(target.model.dtype)
    M, chain = len(masks), tree == "chain"
    k = {"chain": 1, "best": RANKS}.get(tree, k)
    nodes = sum(k ** i for i in range(M + 1)) if tree == "full" else 1 + M * k
    target.start(prompt[:-1], width=max(64, nodes * (1 + M)), prefix=prefix)
    grow = full_tree if tree == "full" else efficient_tree
    if tree == "best":
        places, M = tree_that_pays(target, tuning)
        grow, masks = functools.partial(placed_tree, places), masks[:M]
    root, candidates = prompt[-1], []  # for each mask its k likeliest tokens
    while True:
        ids, real = grow(candidates)
        ids[0], n = root, len(real)
        owners = [0] if chain else range(n)  # nodes with a group of masks below them
        parents = attach_masks(real, owners, M)
        with torch.inference_mode():
            embeds = torch.cat([table(torch.tensor(ids, device=masks.device)),
                                masks.repeat(len(owners), 1)])
        sees = [False] * n + [True] * (len(parents) - n)
        logits = target.forward(embeds, parents, sees_prefix=sees)
        path, chunk = walk(ids, real, sample(logits[:n]))
        target.commit(path)
        # The group of the last accepted node; a chain has one, whose first masks are stale then
        groups = logits[n:].view(len(owners), M, logits.shape[1])  # [owners, M, V]
        group = groups[0, len(path) - 1:] if chain else groups[path[-1]]
        root, candidates = chunk[-1], group.topk(min(k, group.shape[1])).indices.tolist()
        if log is not None:
            log.append({"guessed": n - 1, "accepted": len(path) - 1, "rows": len(parents)})
        yield chunk


# ------------------------------------------------------------------------------------ tuning

def anchored(data: list[tuple[list[int], list[int]]], M: int, most: int, rng: random.Random):
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


def mask_logits(model, tuning: Tuning, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Logits [B, G, M, V] of the mask tokens. Real tokens see no mask and no prompt token: their
    rows are computed first, without gradients."""
    (B, T), G, M = ids.shape, anchors.shape[1], len(tuning.masks)
    context = torch.arange(T).expand(B, -1)
    with torch.no_grad():
        _, rows = forward(model, ids, causal(T).expand(B, -1, -1), context, head=False)
    positions = (anchors[:, :, None] + 1 + torch.arange(M)).flatten(1)  # [B, G · M]
    sees = context[:, None] <= anchors.repeat_interleave(M, 1)[:, :, None]  # [B, G · M, T]
    group = torch.block_diag(*[causal(M)[0]] * G).bool().expand(B, -1, -1)  # [B, G · M, G · M]
    visible, slots, before = torch.cat([sees, group], 2), torch.cat([context, positions], 1), [rows]
    if prompts := tuning.rows(model):
        P = prompts[0][0].shape[1]
        visible, slots = F.pad(visible, (P, 0), value=True), F.pad(slots, (P, 0), value=10 ** 9)
        before = [[(keys[None], values[None]) for keys, values in prompts], rows]
    embeds = tuning.masks.to(model.dtype).repeat(G, 1).expand(B, -1, -1)
    return forward(model, embeds, visible, positions, slots, before)[0].unflatten(1, (G, M))


def sar_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Eq. 1, as a mean over the labels, in nats."""
    return F.cross_entropy(logits.float().flatten(0, 2), labels.flatten(), ignore_index=-100)


@torch.inference_mode()
def accuracy(model, tuning: Tuning, data: list, anchors: int,
             size: int = 16) -> tuple[float, list[list[float]]]:
    """(mean loss, how often each mask's guess of each rank is right) on (prompt, answer) pairs."""
    rng, losses, hits, total = random.Random(0), [], 0, 0
    for some in (data[i:i + size] for i in range(0, len(data), size)):
        ids, at, labels = anchored(some, len(tuning.masks), anchors, rng)
        logits, labels = mask_logits(model, tuning, ids, at), labels.to(tuning.masks.device)
        losses.append(sar_loss(logits, labels).item())
        ranked = logits.topk(min(RANKS, logits.shape[-1])).indices  # [B, G, M, RANKS]
        hits = hits + (ranked == labels[..., None]).sum((0, 1))
        total = total + (labels >= 0).sum((0, 1))
    return sum(losses) / len(losses), (hits / total.clamp(min=1)[:, None]).tolist()


def fit(model, tuning: Tuning, data: list, held_out: list, *, steps: int, batch: int, anchors: int,
        lr: float, accumulate: int = 1, seed: int = 0, work: Path | None = None,
        say=print) -> list[tuple[int, float, list[float]]]:
    """Tune on (prompt, answer) pairs, the model frozen. Section 4.1: the rate a cosine from 3e-2,
    128 answers a step. Released scripts: gradients cut to length 1, their trainer's AdamW without
    decay. Returns [(step, held-out loss, accuracies)]. A file in `work` keeps what is done, also
    when it is interrupted."""
    settings = tuning.design, *tuning.masks.shape, *tuning.prompts.shape, batch, accumulate, anchors
    file = work and work / f"tuning-{digest(model, settings, steps, lr, seed, data)}.pt"
    optimizer = torch.optim.AdamW(tuning.parameters(), lr=lr, weight_decay=0.0)
    done, curve, saved = 0, [], time.time()
    if file and file.exists():
        state = torch.load(file, weights_only=True, map_location="cpu")
        tuning.load_state_dict(state["tuning"])
        optimizer.load_state_dict(state["optimizer"])
        done, curve, tuning.accept = state["done"], state["curve"], state["accept"]

    def save() -> None:
        if file:
            torch.save({"tuning": tuning.state_dict(), "optimizer": optimizer.state_dict(),
                        "done": done, "curve": curve, "accept": tuning.accept},
                       file.with_suffix(".new"))
            os.replace(file.with_suffix(".new"), file)
    model.requires_grad_(False)
    whole = True  # no update is half made
    try:
        for done in tqdm(range(done, steps + 1), initial=done, total=steps, desc="tune"):
            whole, due = True, done == steps or done and done % max(1, steps // 5) == 0
            if due and all(point[0] != done for point in curve):
                loss, tuning.accept = accuracy(model, tuning, held_out, anchors)
                curve.append((done, loss, [ranks[0] for ranks in tuning.accept]))
                right = " ".join(f"{x:.3f}" for x in curve[-1][2])
                say(f"step {done}: held-out loss {loss:.3f}, accuracy by mask {right}")
            if done == steps:
                break
            if time.time() - saved > 120:
                save()
                saved = time.time()
            rng = random.Random(f"{seed} {done}")
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * done / steps))
            for _ in range(accumulate):
                pool = sorted(rng.sample(data, min(4 * batch, len(data))),
                              key=lambda pair: sum(map(len, pair)))
                first = min(rng.randrange(0, len(pool), batch), max(0, len(pool) - batch))
                some = pool[first:first + batch]  # alike in length: little is padding
                ids, at, labels = anchored(some, len(tuning.masks), anchors, rng)
                with torch.autocast(model.device.type, dtype=torch.bfloat16):
                    loss = sar_loss(mask_logits(model, tuning, ids, at), labels.to(model.device))
                if not loss.isfinite():
                    raise InputError(f"expected a learning rate below {lr}: the loss is {loss}")
                (loss / accumulate).backward()
            torch.nn.utils.clip_grad_norm_(tuning.parameters(), 1.0)
            whole = False
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if whole:
            save()
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
    if min(steps, batch, accumulate, anchors, max_new_tokens) < 1 or not lr > 0:
        raise InputError("expected steps, batch, accumulate, anchors and max-new-tokens of 1 or "
                         "more and a learning rate above 0")
    work, longest = work or Path(f"{out}.work"), context_length(model) - max_new_tokens
    work.mkdir(parents=True, exist_ok=True)
    fitting = [list(p) for p in dict.fromkeys(map(tuple, prompts)) if len(p) <= longest]
    if len(fitting) < 2:
        raise InputError(f"expected 2 prompts or more of at most {longest} tokens, "
                         f"got {len(fitting)}")
    tuning = Tuning(shape_of(model), design, P, M, seed).to(model.device)
    answers = own_answers(model, tokenizer, fitting, max_new_tokens, work, size=4 * batch)
    data = [(p, a) for p, a in zip(fitting, answers) if len(a) > 1]
    if len(data) < 2:
        raise InputError(f"expected 2 answers or more of 2 tokens or more, got {len(data)}")
    random.Random(seed).shuffle(data)
    few = max(1, min(100, len(data) // 10))
    print(f"{sum(p.numel() for p in tuning.parameters()):,} parameters; {len(data) - few} answers "
          f"of {sum(len(a) for _, a in data[few:]):,} tokens, {few} held out, "
          f"{len(prompts) - len(fitting)} prompts too long or repeated")
    fit(model, tuning, data[few:], data[:few], steps=steps, batch=batch, anchors=anchors, lr=lr,
        accumulate=accumulate, seed=seed, work=work, say=tqdm.write)
    save_tuning(out, tuning, model)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    guessed, accepted, rows = (sum(r[name] for r in run.log) / len(run.log)
                               for name in ("guessed", "accepted", "rows"))
    return f"a call: {rows:.1f} rows, {guessed:.1f} of them candidates, {accepted:.2f} accepted"


if __name__ == "__main__":
    from cli import main
    sys.exit(main([bita], report, commands=[train],
                  ranges={"tree": TREES, "k": (1, 2, 3, 5)}))
