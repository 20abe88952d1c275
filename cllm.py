"""Consistency LLMs: a model learns to map any state of its own Jacobi iteration to the fixed point, and so needs fewer iterations.

Kou et al., "CLLMs: Consistency Large Language Models", arXiv 2403.00835

    python cllm.py collect --prompts FILE --out trajectories.jsonl       # Alg. 1: Jacobi trajectories of a model's own answers
    python cllm.py train --data trajectories.jsonl --out my-cllm         # Alg. 2: consistency loss and AR loss
    python cllm.py --target my-cllm --prompt "..."                       # Alg. 3: Jacobi decoding
    python cllm.py profile --target my-cllm                              # Table 3

    L_consistency = sum_i D( stopgrad q(. | y*_<i, x) || q(. | y_<i, x) )      y a state on the trajectory, y* its fixed point    Eq. 4
    L             = L_consistency + w L_AR                                                                                        Eq. 7

Decoding is lossless for the trained model: greedy output is its own AR output, samples have its own distribution. It is another model than
the one it was trained from, so its quality has to be measured, on text that it writes itself: one that repeats itself is fast.
Departures: the root, the last token before the block's unknown ones, counts as one of the n, and a block that is final but for its last
token's own call hands that token to the next; guesses come from the prompt, also late in an answer; sampling (the paper is greedy). Both
losses are means over the tokens of a batch, where Eqs. 4 and 6 sum: for D over the positions after the first disagreement, as in the
released code. A step takes several states of all blocks of an answer: one forward pass over a token tree evaluates them together
with the answer itself. Left out: training on several GPUs.
"""
import argparse
import functools
import json
import math
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Iterator

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers.utils import logging

from common import (HERE, PROMPTS, CachedLM, InputError, KVCache, Parser, Run, Sampler, ancestor_mask, context_length, encode, eos_ids, greedy, load,
                    main, read_prompt_file, until, windows_of)


# ---------------------------------------------------------------- decoding

def cllm(target: CachedLM, prompt: list[int], *, block: int = 16, sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Jacobi decoding with the KV cache: solve for `block` tokens at a time by fixed-point iteration. Alg. 3.

    block: tokens of a block, its root included, 2 or more; best that of the training
    Yields chunks of 1 to block tokens. Logs a record {"states", "final"} a block, which grows with every call: the states y(0), y(1), …
    (lists of `block` tokens, the root first), and how many leading tokens of each are final; block + 1 where the next block's root is too.
    """
    if block < 2:
        raise InputError(f"expected a block of 2 tokens or more, got {block}")
    rng, root = random.Random(sample.seed), prompt[-1]
    target.start(prompt[:-1], width=block)
    while True:
        state, final = [root, *rng.choices(prompt, k=block - 1)], 1  # lines 2 and 5
        trajectory = {"states": [state], "final": [final]}
        if log is not None:
            log.append(trajectory)
        while final < block:  # line 6
            logits = target.forward(state[final - 1:])  # line 8, [block - final + 1, V]
            chosen, guesses = sample(logits), greedy(logits)
            agreed = 0  # line 9
            while final + agreed < block and state[final + agreed] == chosen[agreed]:
                agreed += 1
            target.commit(range(1 + agreed))  # lines 10, 11 and 13
            root = chosen[agreed]
            state = (state[:final] + chosen[:agreed + 1] + guesses[agreed + 1:])[:block]  # lines 12 and 14
            final += agreed + 1
            trajectory["states"].append(state)
            trajectory["final"].append(final)
            yield chosen[:agreed + 1]


cllm.target = "models/cllm"  # what to decode with by default


def profile_of(log: list[dict], eos: set[int] = frozenset()) -> tuple[int, float, float]:
    """(blocks, fast-forwarded tokens a call, stationary tokens a block) of the complete blocks of a log that no EOS cuts: Table 3.

    Fast-forwarded: final tokens a call, the one that autoregressive decoding would also give included. Stationary: predicted right
    in a state in which a token before it is wrong, and right ever after.
    """
    blocks = [r for r in log if r["final"][-1] >= len(r["states"][0]) and not eos & set(r["states"][-1][1:])]
    calls = sum(len(r["states"]) - 1 for r in blocks)
    gained, stationary = sum(r["final"][-1] - 1 for r in blocks), 0
    for states in (r["states"] for r in blocks):
        for i, token in enumerate(states[-1]):
            wrong = max(j for j, state in enumerate(states) if j == 0 or state[i] != token)  # y(0) was not predicted
            stationary += any(state[:i] != states[-1][:i] for state in states[wrong + 1:])
    return len(blocks), gained / max(calls, 1), stationary / max(len(blocks), 1)


# ---------------------------------------------------------------- Alg. 1: collecting trajectories

def masks_of(model, visible: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor):
    """Additive attention mask [B, 1, n, m] of bool [B, n, m] for rows at `positions` [B, n] and the slots that they see, at `seen` [B, m], as far as
    a layer's window reaches; by kind of layer where a model has two."""
    masks = {}
    for kind, window in windows_of(model).items():
        near = visible if window is None else visible & (positions[:, :, None] - seen[:, None] < window)
        masks[kind] = torch.zeros(near.shape, dtype=model.dtype, device=model.device).masked_fill_(~near.to(model.device), -torch.inf)[:, None]
    return masks if len(masks) > 1 else masks.popitem()[1]


@torch.inference_mode()
def trajectories(model, prompts: list[list[int]], numbers: list[int], *, block: int, limit: int, eos: set[int], seed: int = 0) -> list[list[list[list[int]]]]:
    """The Jacobi trajectories of each prompt's blocks until EOS or at least `limit` new tokens: [prompt][block][state][token of the block].

    All blocks have `block` tokens but the last, whose states end where y* has its EOS: what follows has no part in the answer.
    Prompts stand side by side, padded on the left, and rewrite the same cache rows until every block is its fixed point; then all go on
    to the next block, so no prompt is ever rolled back alone. A block's guesses are seeded by `seed`, the prompt's number and the block's.
    """
    width, blocks = max(map(len, prompts)) - 1, limit // block + 1  # the prompt's last token is the first block's root
    padding = torch.tensor([width + 1 - len(p) for p in prompts])[:, None]
    cache = KVCache(width + blocks * block)

    def forward(ids: list[list[int]], start: int, keep: int = 0) -> list[list[int]]:
        """The argmax after each of ids [B, n], which take the place of the rows from `start` on."""
        cache.used = start
        slots = torch.arange(start + len(ids[0]))
        rows, positions = slots[start:, None], (slots - padding).clamp(0, context_length(model) - 1)  # [n, 1], [B, m]
        visible = (slots <= rows) & (slots >= padding[:, None]) | (slots == rows)  # [B, n, m]; padding sees itself
        return model(input_ids=torch.tensor(ids, device=model.device), position_ids=positions[:, start:].to(model.device), past_key_values=cache, use_cache=True,
                     attention_mask=masks_of(model, visible, positions[:, start:], positions), logits_to_keep=keep).logits.argmax(-1).tolist()
    if width:
        forward([[p[0]] * (width + 1 - len(p)) + p[:-1] for p in prompts], 0, keep=1)
    roots, found, ended = [p[-1] for p in prompts], [[] for _ in prompts], [False] * len(prompts)
    for number in range(blocks):  # while <EOS> is not generated and length generated < N
        states = [[root, *random.Random(f"{seed} {i} {number}").choices(p, k=block - 1)] for root, i, p in zip(roots, numbers, prompts)]
        history = [states]
        for final in range(block):  # the root and at least `final` tokens after it are final, and so are the cache rows before the last of them
            chosen = forward([state[final:] for state in states], width + number * block + final)
            new = [state[:final + 1] + row[:-1] for state, row in zip(states, chosen)]
            if new == states:
                break
            states = new
            history.append(states)
        for b, path in enumerate(zip(*history)):
            if not ended[b]:
                end = next((i for i, token in enumerate(path[-1]) if token in eos and (i or number)), block)  # a prompt may end in an EOS
                path = [state[:end + 1] for state in path]
                found[b].append([state for state, after in zip(path, [*path[1:], None]) if state != after])
                ended[b] = end < block
        roots = [row[-1] for row in chosen]
        if all(ended):
            break
    return found


def augmented(path: list[list[int]], share: float, rng: random.Random) -> list[list[int]]:
    """In half of the states before y* each wrong token is set right with probability `share`: Section 3.2.1."""
    right = path[-1]
    return [[r if t != r and rng.random() < share else t for t, r in zip(state, right)] if rng.random() < 0.5 else state for state in path[:-1]] + [right]


def repeats(tokens: list[int], text: str) -> bool:
    """Does an answer repeat itself (Section 3.2.1)? Token level: the same 1 to 8 tokens five times or more in a row, 12 tokens or more in
    all. Sentence level: the same line or sentence of 20 characters or more three times. Ordinary code with its short lines passes."""
    for period in range(1, 9):
        run = period
        for before, token in zip(tokens, tokens[period:]):
            run = run + 1 if token == before else period
            if run >= max(12, 5 * period):
                return True
    long = [s for s in map(str.strip, re.split(r"\n|(?<=[.!?])\s", text)) if len(s) >= 20]
    return any(long.count(s) >= 3 for s in long)


# ---------------------------------------------------------------- Alg. 2: the losses

def divergence(kind: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """D(p || q) in nats from the logits [..., V] of p, the stopped side, and q: forward KL(p, q), reverse KL(q, p), or Jensen-Shannon."""
    p, q = (x.log_softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (p, q))

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)
    if kind == "jsd":
        mean = torch.logaddexp(p, q) - math.log(2)
        return (kl(p, mean) + kl(q, mean)) / 2
    return kl(p, q) if kind == "forward-kl" else kl(q, p)


def training_tree(row: dict, pairs: list[tuple]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """One sequence's tree (ids, parents): the prompt and the answer, and states y of its blocks as branches that leave the answer at
    their first wrong token. `pairs`: (index of the block's root, y, the state y is to agree with, y*).

    Also the (teacher, student) nodes of every position from the first disagreement on: before, they are the same node, and D is 0.
    """
    ids, compared = row["prompt"] + row["answer"], []
    parents = [*range(-1, len(ids) - 1)]
    for root, state, goal, right in pairs:
        def nodes(y: list[int]) -> list[int]:
            path = [root]
            for i in range(1, len(y) - 1):  # the last token predicts nothing in its block
                if path[-1] == root + i - 1 and y[i] == right[i]:
                    path.append(root + i)
                else:
                    ids.append(y[i])
                    parents.append(path[-1])
                    path.append(len(ids) - 1)
            return path
        compared += [(t, s) for t, s in zip(nodes(goal), nodes(state)) if t != s]
    return ids, parents, compared


def losses(model, rows: list[dict], pairs: list[list[tuple]], kind: str = "forward-kl") -> tuple[torch.Tensor, torch.Tensor]:
    """(consistency loss, AR loss) of rows {"prompt", "answer"}, with `pairs` of states for each as in `training_tree`: Eq. 4 where
    the goal is y*, Eq. 5 where it is the next state; and Eq. 6. Both are means over tokens, in nats; 0 where nothing is to be compared.

    One forward pass gives all: the answer's own nodes are Eq. 6 and Eq. 4's teacher, the branches are the students."""
    trees = [training_tree(row, some) for row, some in zip(rows, pairs)]
    n = -(-max(len(ids) for ids, _, _ in trees) // 16) * 16  # few shapes: kernels are made anew for each
    ids, positions = torch.zeros(2, len(rows), n, dtype=torch.long)
    visible = torch.eye(n, dtype=torch.bool).repeat(len(rows), 1, 1)  # padding sees itself
    for b, (tokens, parents, _) in enumerate(trees):
        m, seen = len(tokens), ancestor_mask(parents)
        ids[b, :m], positions[b, :m], visible[b, :m, :m] = torch.tensor(tokens), seen.sum(-1) - 1, seen
    logits = model(input_ids=ids.to(model.device), position_ids=positions.to(model.device), use_cache=False,
                   attention_mask=masks_of(model, visible, positions, positions)).logits
    ar = torch.cat([logits[b, len(row["prompt"]) - 1:][:len(row["answer"])] for b, row in enumerate(rows)])
    labels = torch.tensor([token for row in rows for token in row["answer"]], device=logits.device)
    at = [(b, t, s) for b, (_, _, compared) in enumerate(trees) for t, s in compared]
    if not at:
        return logits[:0].sum(), F.cross_entropy(ar, labels)
    b, t, s = torch.tensor(at, device=logits.device).T
    return divergence(kind, logits[b, t].detach(), logits[b, s]).mean(), F.cross_entropy(ar, labels)


# ---------------------------------------------------------------- Alg. 2: training

def drawn(rows: list[dict], n: int, states: int, local: bool, rng: random.Random) -> tuple[list[dict], list[list[tuple]]]:
    """n of the rows, and for every block of theirs up to `states` states y, as `training_tree` wants them: uniform among those that are
    behind their goal, which leaves out y*, and for the local loss what augmentation brought further than the next state."""
    rows, pairs = rng.sample(rows, min(n, len(rows))), []
    for row in rows:
        pairs.append([])
        for root, path in row["blocks"]:
            right = [next((i for i, (t, r) in enumerate(zip(state, path[-1])) if t != r), len(state)) for state in path]
            goals = [j + 1 if local else len(path) - 1 for j in range(len(path) - 1)]
            behind = [j for j, goal in enumerate(goals) if right[j] < right[goal]]
            pairs[-1] += [(root, path[j], path[goals[j]], path[-1]) for j in rng.sample(behind, min(states, len(behind)))]
    return rows, pairs


def tokens_per_call(model, rows: list[dict], eos: set[int], block: int) -> float:
    """By Jacobi decoding of the rows' prompts, up to as many tokens as their answers have."""
    lm, tokens = CachedLM(model, max(len(row["prompt"]) + len(row["answer"]) for row in rows), static=False), 0
    for row in rows:
        tokens += sum(map(len, until(cllm(lm, row["prompt"], block=block), len(row["answer"]), eos)))
    return tokens / lm.calls


def fit(model, rows: list[dict], held_out: list[dict], eos: set[int], block: int, *, steps: int, batch: int, states: int = 1, accumulate: int = 1,
        lr: float, w: float, divergence: str = "forward-kl", local: bool = False, seed: int = 0, checkpoint: Path | None = None,
        say=print) -> list[tuple[int, float, float, float]]:
    """Train all weights for `steps` updates of `accumulate` batches: AdamW, warm-up over a twentieth, then linearly to 0. Returns
    [(step, consistency loss, AR loss, Jacobi tokens per call)] on `held_out`, for every tenth of the steps. Goes on from a checkpoint of
    the same settings; InputError if it has others."""
    settings = dict(block=block, rows=len(rows), steps=steps, batch=batch, states=states, accumulate=accumulate, lr=lr, w=w, divergence=divergence,
                    local=local, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    autocast = functools.partial(torch.autocast, model.device.type, dtype=torch.bfloat16)
    first, curve, saved = 0, [], time.time()
    if checkpoint and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True, map_location="cpu")
        if state["settings"] != settings or {k: x.shape for k, x in state["model"].items()} != {k: x.shape for k, x in model.state_dict().items()}:
            raise InputError(f"expected a checkpoint of this model and of {settings}, got {checkpoint} of {state['settings']}; --work names another folder")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, curve = state["step"], state["curve"]

    def evaluate(step: int) -> None:
        rng = random.Random(0)
        with torch.inference_mode(), autocast():
            consistency, ar = zip(*(losses(model, *drawn(held_out, batch, states, local, rng), divergence) for _ in range(4)))
        curve.append((step, sum(consistency).item() / 4, sum(ar).item() / 4, tokens_per_call(model, held_out[:20], eos, block)))
        say("step {}: held-out consistency loss {:.4f}, AR loss {:.4f}, {:.2f} Jacobi tokens per call".format(*curve[-1]))
    if not curve:
        evaluate(0)
    bar = tqdm(range(first, steps), initial=first, total=steps, desc="train")
    for step in bar:  # until convergence
        rng = random.Random(f"{seed} {step}")
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / max(1, 0.05 * steps), 1 - step / steps)
        for _ in range(accumulate):
            with autocast():
                consistency, ar = losses(model, *drawn(rows, batch, states, local, rng), divergence)
            ((consistency + w * ar) / accumulate).backward()  # Eq. 7
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(consistency=f"{consistency.item():.3f}", ar=f"{ar.item():.4f}")
        if (step + 1) % max(1, steps // 10) == 0 or step + 1 == steps:
            evaluate(step + 1)
        if checkpoint and (time.time() - saved > 120 or step + 1 == steps):
            state = {"settings": settings, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1, "curve": curve}
            torch.save(state, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
            saved = time.time()
    return curve


# ---------------------------------------------------------------- the command line

def read_trajectories(path: Path) -> tuple[dict, list[dict]]:
    """(settings, rows) of a file that `collect` made. The first line has the settings, every other one a prompt, its answer and its blocks."""
    try:
        settings, *rows = map(json.loads, path.read_text().split("\n")[:-1])  # what follows the last newline was cut off while it was written
        if not settings.keys() >= {"target", "block"} or not all(row.keys() == {"number", "prompt", "answer", "blocks"} for row in rows):
            raise ValueError("not its lines")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"expected a file made by `python cllm.py collect`, got {str(path)!r}: {error}") from error
    return settings, rows


def parser_of(function, target: str) -> Parser:
    parser = Parser(prog=f"cllm.py {function.__name__}", description=function.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", default=str(HERE / target), help="model directory or hub id")
    parser.add_argument("--device")
    return parser


def collect(argv: list[str]) -> int:
    """Alg. 1: collect the Jacobi trajectories of a model's own answers. A stopped run goes on where it was."""
    parser = parser_of(collect, "models/target")
    parser.add_argument("--prompts", type=Path, required=True, help="a prompt a line, or JSON lines with \"prompt\"")
    parser.add_argument("--chat", action="store_true", help="put the prompts into the model's chat template")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--block", type=int, default=16, help="tokens of a block (n)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer (N), which may run on to the end of a block")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--augment", type=float, default=0.3, help="probability of setting a wrong token right, in half of the states; 0 is off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype")
    args = parser.parse_args(argv)
    if args.block < 2 or args.max_new_tokens < 1 or args.batch < 1 or not 0 <= args.augment <= 1:
        raise InputError("expected a block of 2 or more, max-new-tokens and batch of 1 or more and an augment of 0 to 1")
    texts, settings = read_prompt_file(args.prompts), {name: getattr(args, name) for name in ("target", "block", "max_new_tokens", "augment", "seed")}
    before, rows = read_trajectories(args.out) if args.out.exists() else (settings, [])
    model, tokenizer = load(args.target, args.device, args.dtype)
    eos, prompts = eos_ids(model, tokenizer), [encode(tokenizer, text, args.chat) for text in texts]
    if before != settings or any(prompts[row["number"]:][:1] != [row["prompt"]] for row in rows):
        raise InputError(f"expected {str(args.out)!r} to hold trajectories of these prompts and settings, got {before}")
    longest = context_length(model) - args.max_new_tokens - args.block
    if max(map(len, prompts)) > longest:
        raise InputError(f"expected prompts of at most {longest} tokens, got {max(map(len, prompts))}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    todo, dropped = sorted(set(range(len(prompts))) - {row["number"] for row in rows}, key=lambda i: (len(prompts[i]), i)), 0
    fresh = args.out.with_name(args.out.name + ".new")
    fresh.write_text("".join(json.dumps(line) + "\n" for line in [settings, *rows]))  # without a line that was cut off
    os.replace(fresh, args.out)
    with open(args.out, "a") as out, tqdm(total=len(prompts), initial=len(rows), desc="trajectories") as bar:
        for some in (todo[i:i + args.batch] for i in range(0, len(todo), args.batch)):
            found = trajectories(model, [prompts[i] for i in some], some, block=args.block, limit=args.max_new_tokens, eos=eos, seed=args.seed)
            for i, paths in zip(some, found):
                rng = random.Random(f"{args.seed} {i}")
                answer = [token for path in paths for token in path[-1]][1:]  # the first root is the prompt's
                blocks = [(len(prompts[i]) - 1 + n * args.block, augmented(path, args.augment, rng)) for n, path in enumerate(paths)]
                if repeats(answer, tokenizer.decode(answer)):
                    blocks, dropped = [], dropped + 1
                out.write(json.dumps({"number": i, "prompt": prompts[i], "answer": answer, "blocks": blocks}) + "\n")
            out.flush()
            bar.update(len(some))
    print(f"{len(todo)} prompts, {dropped} answers dropped for repetition")
    return 0


def train(argv: list[str]) -> int:
    """Alg. 2: teach a model to solve its own Jacobi iteration in fewer steps. A stopped run goes on from its checkpoint."""
    parser = parser_of(train, "models/target")
    parser.add_argument("--data", type=Path, required=True, help="made by cllm.py collect")
    parser.add_argument("--out", type=Path, required=True, help="model directory to make, in bfloat16")
    parser.add_argument("--work", type=Path, help="folder of the checkpoint (default: OUT.work)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="answers")
    parser.add_argument("--states", type=int, default=4, help="states of each block of an answer")
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step")
    parser.add_argument("--lr", type=float, default=5e-4, help="this suits a model of 10M parameters; the paper's recipe for 7B has 2e-5")
    parser.add_argument("--w", type=float, default=10.0, help="weight of the AR loss, Eq. 7")
    parser.add_argument("--divergence", default="forward-kl", choices=["forward-kl", "reverse-kl", "jsd"])
    parser.add_argument("--local", action="store_true", help="local consistency, Eq. 5, in place of global, Eq. 4")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if min(args.steps, args.batch, args.states, args.accumulate) < 1 or args.lr <= 0 or args.w < 0:
        raise InputError("expected steps, batch, states and accumulate of 1 or more, a learning rate above 0 and w of 0 or more")
    settings, rows = read_trajectories(args.data)
    rows = [row for row in rows if row["blocks"]]
    if len(rows) < 2:
        raise InputError(f"expected trajectories of 2 prompts or more in {str(args.data)!r}, got {len(rows)}")
    model, tokenizer = load(args.target, args.device, "float32")
    if max(max(row["prompt"] + row["answer"]) for row in rows) >= len(model.get_input_embeddings().weight):
        raise InputError(f"expected trajectories of this model, got some of {settings['target']}")
    work = args.work or Path(f"{args.out}.work")
    for folder in (work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    random.Random(args.seed).shuffle(rows)
    few = max(1, min(100, len(rows) // 10))
    recipe = {name: getattr(args, name) for name in ("steps", "batch", "states", "accumulate", "lr", "w", "divergence", "local", "seed")}
    fit(model, rows[few:], rows[:few], eos_ids(model, tokenizer), settings["block"], **recipe, checkpoint=work / "checkpoint.pt", say=tqdm.write)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    return 0


def profile(argv: list[str]) -> int:
    """Count fast-forwarded and stationary tokens of Jacobi decoding before and after training (Table 3)."""
    parser = parser_of(profile, "models/cllm")
    parser.add_argument("--before", default=str(HERE / "models/target"), help="the model it was trained from")
    parser.add_argument("--prompts", type=Path, help="a file of prompts (default: three examples)")
    parser.add_argument("--chat", action="store_true", help="put the prompts into the model's chat template")
    parser.add_argument("--block", type=int, default=16, help="tokens of a block (n)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype")
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1:
        raise InputError(f"expected max-new-tokens of 1 or more, got {args.max_new_tokens}")
    texts, lines = read_prompt_file(args.prompts) if args.prompts else PROMPTS, []
    for path in (args.before, args.target):
        model, tokenizer = load(path, args.device, args.dtype)
        prompts, eos = [encode(tokenizer, text, args.chat) for text in texts], eos_ids(model, tokenizer)
        capacity = max(map(len, prompts)) + args.max_new_tokens
        if capacity > context_length(model):
            raise InputError(f"expected prompts and {args.max_new_tokens} tokens in a context of {context_length(model)}, got {capacity}")
        run = Run(cllm, {"target": CachedLM(model, capacity)}, {"block": args.block})
        for prompt in tqdm(prompts, desc=f"profile {Path(path).name}"):
            for _ in run.chunks(prompt, args.max_new_tokens, eos, greedy):
                pass
        blocks, gained, stationary = profile_of(run.log, eos)
        lines.append(f"| {path} | {blocks} | {args.block} | {gained:.2f} | {stationary:.2f} |")
    print("| model | complete blocks | n-token sequence length | fast-forward token count | stationary token count |",
          "| --- | --- | --- | --- | --- |", *lines, sep="\n")
    return 0


def report(run: Run) -> str:
    blocks, gained, stationary = profile_of(run.log, run.eos)
    return f"{blocks} complete blocks: {gained:.2f} tokens fast-forwarded a call, {stationary:.2f} stationary tokens a block"


if __name__ == "__main__":
    command = {"collect": collect, "train": train, "profile": profile}.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if not command:
        sys.exit(main([cllm], report))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        sys.exit(command(sys.argv[2:]))
    except (InputError, OSError) as error:
        print(f"cllm.py {sys.argv[1]}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; collect and train go on from here", file=sys.stderr)
        sys.exit(130)
