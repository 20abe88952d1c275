"""BiTA: a frozen model learns to look ahead through a few prompt and mask tokens, and drafts and verifies in one call.

Lin et al., "BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models", arXiv 2401.12522

    python bita.py train --prompts FILE --out models/bita.safetensors     # tune (Section 3.1)
    python bita.py --prompt "..."                                         # decode (Section 3.2)

Mask token j after a real token at position a stands at position a + j and predicts the token of position a + j + 1 (the token of a + 1 is the
real token's own prediction). Only mask tokens see the P prompt tokens, real tokens never do, so the output stays the model's own: lossless,
greedily or by one draw of the model at each node of the tree. Departures: Eq. 1's index is off by one against Fig. 4, which is
followed; sampling (the paper is greedy). Left out: Falcon-style fused heads, tuning on several GPUs.
"""
import argparse
import hashlib
import json
import math
import os
import random
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Iterator

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from common import HERE, CachedLM, InputError, Parser, Run, Sampler, encode, eos_ids, greedy, load, main, read_prompt_file, walk

DESIGNS = ("deep", "shallow", "none")  # Table 3


# ---------------------------------------------------------------- what is tuned

class Rows:
    """Stands in for transformers' Cache: `prefix` rows (keys, values) [B, heads, P, d] stand before a layer's own; `new` keeps those."""

    def __init__(self, prefix=None):
        self.prefix, self.new = prefix, []

    def update(self, keys, values, layer, *_, **__):
        self.new.append((keys, values))
        if self.prefix is None:
            return keys, values
        return tuple(torch.cat([old.to(new.dtype).expand(new.shape[0], -1, -1, -1), new], 2) for old, new in zip(self.prefix[layer], (keys, values)))

    def get_seq_length(self, *_) -> int:
        return 0


def shape_of(model) -> dict:
    """What prompt rows must fit: layers, key heads, head size, width, and the model's name and a digest of its first embeddings."""
    config, table = model.config.get_text_config(), model.get_input_embeddings().weight
    rows = Rows()
    with torch.inference_mode():
        model(input_ids=torch.tensor([[0]], device=table.device), past_key_values=rows, use_cache=True, attention_mask=mask_of(torch.ones(1, 1, 1, dtype=torch.bool), model),
              position_ids=torch.tensor([[0]], device=table.device))
    keys = rows.new[0][0]
    digest = hashlib.sha256(table[:64].detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()).hexdigest()[:16]
    return {"model": type(model).__name__, "layers": len(rows.new), "heads": keys.shape[1], "head_dim": keys.shape[3], "width": table.shape[1],
            "vocabulary": config.vocab_size, "embeddings": digest}


def mask_of(visible: torch.Tensor, model):
    """Additive attention mask [B, 1, n, slots] of bool [B, n, slots]; the same for all kinds of layers, so sequences must fit a window."""
    mask = torch.zeros(visible.shape, dtype=model.dtype).masked_fill_(~visible, -torch.inf)[:, None].to(model.device)
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    return {kind: mask for kind in kinds} if len(kinds) > 1 else mask


class Tuning(torch.nn.Module):
    """P prompt tokens and M mask tokens. `masks` [M, width]; `prompts`: keys and values of every layer [layers, 2, heads, P, head_dim] (deep:
    P · layers · 2 · heads · head_dim parameters), or embeddings [P, width] that are run once, alone, at positions 0 to P - 1 (shallow)."""

    def __init__(self, shape: dict, design: str = "deep", prompts: int = 16, masks: int = 3, seed: int = 0):
        super().__init__()
        if design not in DESIGNS or masks < 1 or prompts < 1:
            raise InputError(f"expected a design of {', '.join(DESIGNS)} with 1 prompt and 1 mask or more, got {design}, {prompts} and {masks}")
        self.shape, self.design = shape, design
        sizes = {"deep": (shape["layers"], 2, shape["heads"], prompts, shape["head_dim"]), "shallow": (prompts, shape["width"]), "none": (0,)}
        generator = torch.Generator().manual_seed(seed)
        self.prompts = torch.nn.Parameter(0.02 * torch.randn(sizes[design], generator=generator))
        self.masks = torch.nn.Parameter(0.02 * torch.randn(masks, shape["width"], generator=generator))

    def rows(self, model) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """(keys, values) [heads, P, head_dim] of each layer; no rotary on deep ones, as released."""
        if self.design == "none":
            return None
        if self.design == "deep":
            return [tuple(pair.to(model.dtype)) for pair in self.prompts]
        n, cache = len(self.prompts), Rows()
        model(inputs_embeds=self.prompts[None].to(model.dtype), position_ids=torch.arange(n, device=self.prompts.device)[None], past_key_values=cache,
              use_cache=True, attention_mask=mask_of(torch.ones(1, n, n, dtype=torch.bool).tril(), model))
        return [(keys[0], values[0]) for keys, values in cache.new]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"bita": json.dumps(self.shape | {"design": self.design})}
        save_file({"prompts": self.prompts.detach().cpu().to(torch.bfloat16), "masks": self.masks.detach().cpu().to(torch.bfloat16)}, path, header)


@lru_cache(maxsize=4)
def load_tuning(path: str, model) -> tuple[Tuning, list | None]:
    """(the tuning of a file, its prompt rows); InputError where it was made for another model."""
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get("bita", "null"))
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"expected a file made by `python bita.py train`, got {path!r}: {error}") from error
    if header is None or set(tensors) != {"prompts", "masks"}:
        raise InputError(f"expected a file made by `python bita.py train`, got {path!r} without its header")
    design, shape = header.pop("design"), shape_of(model)
    if header != shape:
        differs = next(name for name in shape if header.get(name) != shape[name])
        raise InputError(f"expected a tuning of this model, got one of another: {differs} is {header.get(differs)} there and {shape[differs]} here")
    tuning = Tuning(shape, design)
    tuning.prompts, tuning.masks = (torch.nn.Parameter(tensors[name], requires_grad=False) for name in ("prompts", "masks"))
    tuning = tuning.to(model.device)
    return tuning, prompt_rows(tuning, model)


@torch.inference_mode()
def prompt_rows(tuning: Tuning, model):
    return tuning.rows(model)


# ---------------------------------------------------------------- decoding

def efficient_tree(top: list[list[int]]) -> tuple[list[int], list[int]]:
    """(ids, parents) below the root, node 0, from the k likeliest tokens of each mask: level j has those of mask j, and only the first of a
    level has children (Fig. 5). 1 + M k nodes with the root, whose own id is left to the caller."""
    ids, parents, first = [-1], [-1], 0
    for tokens in top:
        parent, first = first, len(ids)
        ids, parents = ids + tokens, parents + [parent] * len(tokens)
    return ids, parents


def full_tree(top: list[list[int]]) -> tuple[list[int], list[int]]:
    """As `efficient_tree`, every node with children: 1 + k + … + k^M nodes."""
    ids, parents, level = [-1], [-1], [0]
    for tokens in top:
        start = len(ids)
        parents += [parent for parent in level for _ in tokens]
        ids, level = ids + tokens * len(level), range(start, start + len(tokens) * len(level))
    return ids, parents


def bita(target: CachedLM, prompt: list[int], *, tree: str = "efficient", k: int = 5, adapter: str = str(HERE / "models/bita.safetensors"),
         tuning: tuple | None = None, sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Verify the last call's candidates and produce the next ones in the same call. Section 3.2.

    tree: efficient (only the likeliest candidate of a mask has children), full (all have), or chain (one group of masks, after the root)
    k: candidates for each mask token; a chain has 1
    adapter: file of prompt and mask tokens, made by `python bita.py train`
    Yields chunks of 1 to M + 1 tokens; `tuning`, a (Tuning, rows) pair, replaces the file. Logs a record {"guessed", "accepted", "rows"} a call.
    """
    if tree not in ("efficient", "full", "chain") or k < 1:
        raise InputError(f"expected a tree of efficient, full or chain with k of 1 or more, got {tree} and {k}")
    tuning, rows = tuning or load_tuning(adapter, target.model)
    masks, table = tuning.masks.to(target.dtype), target.model.get_input_embeddings()
    m, k = len(masks), 1 if tree == "chain" else k
    nodes = {"efficient": 1 + m * k, "full": sum(k ** i for i in range(m + 1)), "chain": 1 + m}[tree]
    if rows is not None:
        target.set_prefix(rows)
    target.start(prompt[:-1], width=nodes + m * (1 if tree == "chain" else nodes))
    root, top = prompt[-1], []  # the k likeliest tokens of each mask
    while True:
        ids, parents = (full_tree if tree == "full" else efficient_tree)(top)
        ids[0], size = root, len(ids)
        owners = [0] if tree == "chain" else range(size)  # nodes with a group of masks below them
        parents = parents + [size + owner * m + j - 1 if j else owner for owner in owners for j in range(m)]
        with torch.inference_mode():
            embeds = torch.cat([table(torch.tensor(ids, device=target.device)), masks.repeat(len(owners), 1)])
        logits = target.forward(None, parents, embeds=embeds, sees_prefix=[False] * size + [rows is not None] * (len(parents) - size))
        path, chunk = walk(ids, parents[:size], sample(logits[:size]))
        target.commit(path)
        owner, stale = (0, len(path) - 1) if tree == "chain" else (path[-1], 0)  # a chain's first masks predicted what is final now
        top = logits[size + owner * m + stale:size + (owner + 1) * m].topk(k).indices.tolist()
        root = chunk[-1]
        if log is not None:
            log.append({"guessed": size - 1, "accepted": len(path) - 1, "rows": len(parents)})
        yield chunk


# ---------------------------------------------------------------- tuning

@torch.inference_mode()
def self_generate(model, tokenizer, prompts: list[list[int]], limit: int, file: Path, size: int = 64) -> list[list[int]]:
    """Greedy answers of the model itself, batch after batch; `file` keeps what is done, so that a stopped run goes on."""
    done = {row["prompt"]: row["answer"] for row in map(json.loads, file.read_text().splitlines())} if file.exists() else {}
    eos = eos_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos, default=0)
    todo = sorted((i for i, p in enumerate(prompts) if str(p) not in done), key=lambda i: len(prompts[i]))
    with open(file, "a") as out, tqdm(total=len(prompts), initial=len(prompts) - len(todo), desc="answers") as bar:
        for start in range(0, len(todo), size):
            some = todo[start:start + size]
            width = max(len(prompts[i]) for i in some)
            ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in some], device=model.device)
            seen = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in some], device=model.device)
            answers = model.generate(ids, attention_mask=seen, max_new_tokens=limit, do_sample=False, pad_token_id=pad, eos_token_id=sorted(eos) or None)[:, width:].tolist()
            for i, answer in zip(some, answers):
                end = next((n + 1 for n, token in enumerate(answer) if token in eos), len(answer))
                done[str(prompts[i])] = answer[:end]
                out.write(json.dumps({"prompt": str(prompts[i]), "answer": answer[:end]}) + "\n")
            out.flush()
            bar.update(len(some))
    return [done[str(p)] for p in prompts]


def anchored(sequences: list[tuple[list[int], list[int]]], masks: int, anchors: int, pad: int, rng: random.Random):
    """One batch of (prompt, answer) pairs with mask groups after up to `anchors` of their tokens: Section 3.1, Fig. 3.

    Returns ids [B, T] of the real tokens; positions [B, n] and visible [B, n, n] of all n = T + G · masks nodes, real ones first; labels
    [B, G, masks], -100 where the answer has ended. Mask j (1-based) of an anchor at position a has the label of position a + j + 1.
    """
    width = max(len(p) + len(a) for p, a in sequences)
    chosen = []
    for prompt, answer in sequences:
        last = range(len(prompt) - 1, len(prompt) + len(answer) - 2)  # an anchor has at least one token to predict
        chosen.append(sorted(rng.sample(last, min(anchors, len(last)))))
    groups = max(1, max(map(len, chosen)))
    n = width + groups * masks
    ids = torch.full((len(sequences), width), pad)
    positions = torch.zeros(len(sequences), n, dtype=torch.long)
    visible = torch.zeros(len(sequences), n, n, dtype=torch.bool)
    labels = torch.full((len(sequences), groups, masks), -100)
    visible[:, :width, :width] = torch.ones(width, width, dtype=torch.bool).tril()
    visible |= torch.eye(n, dtype=torch.bool)  # also rows that stand for nothing see something
    for b, ((prompt, answer), anchor) in enumerate(zip(sequences, chosen)):
        tokens = torch.tensor(prompt + answer)
        ids[b, :len(tokens)] = tokens
        positions[b, :width] = torch.arange(width)
        for g, a in enumerate(anchor):
            start, known = width + g * masks, tokens[a + 2:a + 2 + masks]
            positions[b, start:start + masks] = a + 1 + torch.arange(masks)
            visible[b, start:start + masks, :a + 1] = True
            visible[b, start:start + masks, start:start + masks] = torch.ones(masks, masks, dtype=torch.bool).tril()
            labels[b, g, :len(known)] = known
    return ids, positions, visible, labels


def mask_logits(model, tuning: Tuning, ids, positions, visible) -> torch.Tensor:
    """Logits [B, G, masks, V] of the mask nodes of an anchored batch."""
    width, masks = ids.shape[1], len(tuning.masks)
    groups, rows = (positions.shape[1] - width) // masks, tuning.rows(model)
    embeds = torch.cat([model.get_input_embeddings()(ids), tuning.masks.to(model.dtype).repeat(groups, 1)[None].expand(len(ids), -1, -1)], 1)
    if rows is not None:
        seen = torch.zeros(*visible.shape[:2], rows[0][0].shape[1], dtype=torch.bool)
        seen[:, width:] = True
        visible = torch.cat([seen, visible], 2)
        rows = [tuple(x[None] for x in pair) for pair in rows]
    logits = model(inputs_embeds=embeds, position_ids=positions.to(model.device), attention_mask=mask_of(visible, model), past_key_values=Rows(rows), use_cache=True,
                   logits_to_keep=groups * masks).logits
    return logits.unflatten(1, (groups, masks))


def loss_and_hits(logits, labels):
    """(mean cross-entropy in nats, [masks] right top-1 predictions, [masks] labels)."""
    labels = labels.to(logits.device)
    loss = F.cross_entropy(logits.float().flatten(0, 2), labels.flatten(), ignore_index=-100)
    return loss, ((logits.argmax(-1) == labels) & (labels >= 0)).sum((0, 1)), (labels >= 0).sum((0, 1))


@torch.inference_mode()
def accuracy(model, tuning: Tuning, sequences, anchors: int, pad: int, size: int = 16) -> tuple[float, list[float]]:
    """(mean loss, top-1 accuracy of each mask position) on (prompt, answer) pairs."""
    rng, losses, hits, total = random.Random(0), [], 0, 0
    for start in range(0, len(sequences), size):
        ids, positions, visible, labels = anchored(sequences[start:start + size], len(tuning.masks), anchors, pad, rng)
        loss, right, counted = loss_and_hits(mask_logits(model, tuning, ids.to(model.device), positions, visible), labels)
        losses, hits, total = [*losses, loss.item()], hits + right, total + counted
    return sum(losses) / len(losses), (hits / total.clamp(min=1)).tolist()


def fit(model, tuning: Tuning, data, held_out, pad: int, *, steps: int, batch: int, anchors: int, lr: float, seed: int, checkpoint: Path | None = None,
        say=print) -> list[tuple[int, float, list[float]]]:
    """Tune on `data` for `steps` batches: AdamW, cosine to 0 (Section 4.1); the model is frozen. Returns [(step, held-out loss, accuracies)]."""
    model.requires_grad_(False)
    optimizer = torch.optim.AdamW(tuning.parameters(), lr=lr, weight_decay=0.0)
    first, curve, saved = 0, [], time.time()
    if checkpoint and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        tuning.load_state_dict(state["tuning"])
        optimizer.load_state_dict(state["optimizer"])
        first, curve = state["step"], state["curve"]
    bar = tqdm(range(first, steps), initial=first, total=steps, desc="tune")
    for step in bar:
        rng = random.Random(f"{seed} {step}")
        ids, positions, visible, labels = anchored(rng.sample(data, min(batch, len(data))), len(tuning.masks), anchors, pad, rng)
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            loss, _, _ = loss_and_hits(mask_logits(model, tuning, ids.to(model.device), positions, visible), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tuning.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if (step + 1) % max(1, steps // 10) == 0 or step + 1 == steps:
            curve.append((step + 1, *accuracy(model, tuning, held_out, anchors, pad)))
            say(f"step {step + 1}: held-out loss {curve[-1][1]:.3f}, accuracy by mask position {' '.join(f'{x:.3f}' for x in curve[-1][2])}")
        if checkpoint and (time.time() - saved > 120 or step + 1 == steps):
            torch.save({"tuning": tuning.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1, "curve": curve}, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
            saved = time.time()
    return curve


def train(argv: list[str]) -> int:
    parser = Parser(prog="bita.py train", description="Tune prompt and mask tokens for a frozen model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", default=str(HERE / "models/target"))
    parser.add_argument("--prompts", type=Path, required=True, help="a prompt a line, or JSON lines with \"prompt\"")
    parser.add_argument("--chat", action="store_true", help="put the prompts into the model's chat template")
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to make")
    parser.add_argument("--work", type=Path, help="folder of answers and checkpoint: a stopped run goes on there (default: OUT.work)")
    parser.add_argument("--design", default="deep", choices=DESIGNS, help="prompt tokens in every layer, at the input alone, or none")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-masks", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="answers a step (the paper: 128)")
    parser.add_argument("--anchors", type=int, default=64, help="mask groups an answer, at most")
    parser.add_argument("--lr", type=float, default=3e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    args = parser.parse_args(argv)
    if min(args.steps, args.batch, args.anchors, args.max_new_tokens) < 1 or args.lr <= 0:
        raise InputError("expected steps, batch, anchors and max-new-tokens of 1 or more and a learning rate above 0")
    texts = read_prompt_file(args.prompts)
    if len(texts) < 2:
        raise InputError(f"expected 2 prompts or more, got {len(texts)}")
    work = args.work or Path(f"{args.out}.work")
    work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(args.target, args.device, args.dtype)
    prompts = [encode(tokenizer, text, args.chat) for text in texts]
    answers = self_generate(model, tokenizer, prompts, args.max_new_tokens, work / "answers.jsonl")
    data = [(p, a) for p, a in zip(prompts, answers) if len(a) > 2]
    few = max(1, min(100, len(data) // 10))
    held_out, data = data[:few], data[few:]
    tuning = Tuning(shape_of(model), args.design, args.num_prompts, args.num_masks, args.seed).to(model.device)
    print(f"{sum(p.numel() for p in tuning.parameters()):,} parameters; {len(data)} answers of {sum(len(a) for _, a in data):,} tokens, {len(held_out)} held out")
    fit(model, tuning, data, held_out, tokenizer.pad_token_id or 0, steps=args.steps, batch=args.batch, anchors=args.anchors, lr=args.lr, seed=args.seed,
        checkpoint=work / f"{args.design}-{args.num_prompts}-{args.num_masks}-{args.steps}.pt", say=tqdm.write)
    tuning.save(args.out)
    return 0


# ---------------------------------------------------------------- the command line

def report(run: Run) -> str:
    guessed, accepted, rows = (sum(r[name] for r in run.log) / len(run.log) for name in ("guessed", "accepted", "rows"))
    return f"a call: {rows:.1f} rows, {guessed:.1f} of them candidates, {accepted:.2f} accepted"


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        try:
            sys.exit(train(sys.argv[2:]))
        except (InputError, OSError) as error:
            print(f"bita.py train: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from here", file=sys.stderr)
            sys.exit(130)
    sys.exit(main([bita], report))
