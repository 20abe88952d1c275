"""Consistency LLMs: a model learns to map any state of its own Jacobi iteration to the fixed point.

Kou et al., "CLLMs: Consistency Large Language Models", arXiv 2403.00835

    python cllm.py collect --prompts FILE --out trajectories.jsonl     # Alg. 1: Jacobi trajectories
    python cllm.py train --data trajectories.jsonl --lr 2e-5 --out my-cllm     # Alg. 2: two losses
    python cllm.py --target my-cllm --prompt "..."                     # Alg. 3: Jacobi decoding
    python cllm.py profile --after my-cllm --prompts FILE              # Table 3

    L_GC = sum_i D( stopgrad q(. | y*_<i, x) || q(. | y_<i, x) )        global consistency, Eq. 4
    L    = L_GC + w L_AR                                                                     Eq. 7
    y a state on the trajectory, y* its fixed point: greedy output of the model before training

A block is the paper's n-token sequence: its root, which is known, and n - 1 unknown tokens.
Decoding is lossless for the trained model: greedy output is its own AR output. It is another model
than the one it was trained from, so its quality has to be measured, on text that it writes itself:
repetitive text decodes fast. Departures in decoding: the first root is the prompt's last token (no
call on the prompt alone); the last final token is the next block's root, so that no call is for a
block's last token (Alg. 3 as printed never ends: its i* stops at len - 1); guesses come from the
prompt alone; the paper decodes greedily, sampling is ours. In training: both losses are means over
the tokens of a batch, where Eqs. 4 and 6 sum, D over the positions after the first disagreement, as
in the released code. A step takes several states of all blocks of an answer: one forward pass over
a token tree evaluates them together with the answer itself. Left out: several GPUs.
"""
import itertools
import json
import math
import os
import random
import re
import sys
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import GenerationConfig

from common import (CachedLM, InputError, KVCache, Sampler, ancestor_mask, attention_mask,
                    context_length, eos_ids, greedy, load, until, windows_of)

TRAINED = str(Path(__file__).resolve().parent / "models/cllm")
DIVERGENCES = ("forward-kl", "reverse-kl", "jsd")
KEPT = 32  # tokens with which an answer counts as unchanged by the training


# ---------------------------------------------------------------------------------- decoding

def cllm(target: CachedLM, prompt: list[int], *, n: int = 16, sample: Sampler = greedy,
         log: list | None = None) -> Iterator[list[int]]:
    """Jacobi decoding with the KV cache: solve for n tokens at a time by fixed-point iteration.
    Alg. 3 and Eq. 3.

    n: tokens of a block, its root included, 2 or more; best that of the training
    Yields chunks of 1 to n tokens. Logs {"states", "final"} a block, which grows with every call:
    the Jacobi trajectory y(0), y(1), … (lists of n tokens, the root first), and how many leading
    tokens of each state are final; n + 1 where the next block's root is too.
    """
    if n < 2:
        raise InputError(f"expected n of 2 or more, got {n}")
    rng = random.Random(sample.seed)
    root = prompt[-1]
    target.start(prompt[:-1])
    while True:
        y = [root, *rng.choices(prompt, k=n - 1)]  # lines 2 and 5
        final = 1
        record = {"states": [y], "final": [final]}
        if log is not None:
            log.append(record)
        while final < n:  # lines 6 and 15
            logits = target.forward(y[final - 1:])  # line 8, [n - final + 1, V]
            guesses = greedy(logits)
            chosen = guesses if sample.temperature == 0 else sample(logits)
            agreed = 0  # tokens of y that are what the target chooses there: line 9
            while final + agreed < n and y[final + agreed] == chosen[agreed]:
                agreed += 1
            target.commit(range(1 + agreed))  # line 13
            y = (y[:final] + chosen[:agreed + 1] + guesses[agreed + 1:])[:n]  # lines 10 and 14
            final += agreed + 1  # line 11; n + 1: the token after the block is final too
            record["states"].append(y)  # line 12
            record["final"].append(final)
            yield chosen[:agreed + 1]
        root = chosen[agreed]  # y's last token where final is n, the one after it at n + 1


def profile_of(log: list[dict], eos: set[int] = frozenset()) -> tuple[int, float, float]:
    """(blocks, fast-forwarded tokens a call, stationary tokens a block) of the complete blocks of a
    log that no EOS cuts: Section 3.3, Table 3.

    Fast-forwarded: final tokens a call, the one that autoregressive decoding would also give
    included. Stationary: predicted right in a state in which a token before it is wrong, and right
    ever after."""
    blocks = [r for r in log if r["final"][-1] >= len(r["states"][0])
              and not eos & set(r["states"][-1][1:])]
    calls = sum(len(r["states"]) - 1 for r in blocks)
    gained = sum(r["final"][-1] - 1 for r in blocks)
    stationary = 0
    for states in (r["states"] for r in blocks):
        y_star = states[-1]
        for i, token in enumerate(y_star):
            last_wrong = 0  # even a right guess in y(0) does not count
            for j, y in enumerate(states):
                if y[i] != token:
                    last_wrong = j
            stationary += any(y[:i] != y_star[:i] for y in states[last_wrong + 1:])
    return len(blocks), gained / max(calls, 1), stationary / max(len(blocks), 1)


# -------------------------------------------------------------- Alg. 1: collecting trajectories

class SideBySide:
    """Prompts without their last tokens, cached side by side and padded on the left to `width`
    rows. What follows rewrites the same rows for all: no prompt is ever rolled back alone."""

    def __init__(self, model, prompts: list[list[int]]):
        self.model = model
        self.cache = KVCache()
        self.width = max(map(len, prompts)) - 1
        self.padding = torch.tensor([self.width + 1 - len(p) for p in prompts])[:, None]  # [B, 1]
        padded = [[p[0]] * (self.width + 1 - len(p)) + p[:-1] for p in prompts]
        for i in range(0, self.width, 128):
            self.forward([row[i:i + 128] for row in padded], i, keep=1)

    def forward(self, ids: list[list[int]], start: int, keep: int = 0) -> list[list[int]]:
        """The argmax after each of ids [B, m], or after the last `keep` (0: all). They take the
        place of the rows from `start` on."""
        m = len(ids[0])
        like = self.model.get_input_embeddings().weight
        slots = torch.arange(start + m)
        rows = slots[start:, None]  # [m, 1]
        causal = slots <= rows  # [m, slots]
        real = slots >= self.padding[:, None]  # [B, 1, slots]
        itself = slots == rows  # padding sees itself alone
        visible = (causal & real) | itself  # [B, m, slots]
        positions = (slots - self.padding).clamp(0, context_length(self.model) - 1)  # [B, slots]
        mask = attention_mask(windows_of(self.model), visible, positions[:, start:], positions,
                              like)
        self.cache.start = start
        kept = torch.arange(m)[-keep:]  # by index, as in CachedLM
        output = self.model(input_ids=torch.tensor(ids, device=like.device), attention_mask=mask,
                            position_ids=positions[:, start:].to(like.device),
                            past_key_values=self.cache, use_cache=True, logits_to_keep=kept)
        return greedy(output.logits)

    def solve(self, states: list[list[int]], start: int) -> tuple[list, list[int]]:
        """(trajectories, roots): each prompt's y(0), y(1), …, y*, and the token after its y*.
        Jacobi iteration from `states`, in the rows from `start` on, until all are fixed points."""
        history = [states]
        for final in range(1, len(states[0]) + 1):  # leading tokens that are y*'s, at least
            chosen = self.forward([y[final - 1:] for y in states], start + final - 1)
            new = [y[:final] + row[:-1] for y, row in zip(states, chosen)]
            if new == states:
                break
            states = new
            history.append(states)
        solved = [[y for y, _ in itertools.groupby(some)] for some in zip(*history)]  # y* once
        return solved, [row[-1] for row in chosen]


@torch.inference_mode()
def trajectories(model, prompts: list[list[int]], numbers: list[int], *, n: int, limit: int,
                 eos: set[int], seed: int = 0) -> list[list[list[list[int]]]]:
    """The Jacobi trajectories of each prompt's blocks until EOS or at least `limit` new tokens:
    [prompt][block][state][token of the block].

    All blocks have n tokens but the last, whose states end where y* has its EOS. All prompts go on
    to the next block together. A block's guesses are seeded by `seed`, the prompt's number and the
    block's."""
    side = SideBySide(model, prompts)
    roots = [p[-1] for p in prompts]
    found = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for block in range(limit // n + 1):  # Alg. 1's while: these have limit tokens or more
        states = [[root, *random.Random(f"{seed} {i} {block}").choices(p, k=n - 1)]
                  for root, i, p in zip(roots, numbers, prompts)]
        solved, roots = side.solve(states, side.width + block * n)
        new = range(0 if block else 1, n)  # the first root is the prompt's
        for b, trajectory in enumerate(solved):
            if not ended[b]:
                y_star = trajectory[-1]
                ends = [i for i in new if y_star[i] in eos]
                if ends:
                    cut = (y[:ends[0] + 1] for y in trajectory)
                    trajectory = [y for y, _ in itertools.groupby(cut)]
                    ended[b] = True
                found[b].append(trajectory)
        if all(ended):
            break
    return found


def augmented(trajectory: list[list[int]], share: float, rng: random.Random) -> list[list[int]]:
    """In half of the states before y* set each wrong token but the first right with probability
    `share`. Alg. 1 corrects tokens at random in every state and gives no rate; the released code
    leaves the first wrong one too, and keeps the state beside its corrected copy."""
    *states, y_star = trajectory
    for j, y in enumerate(states):
        if rng.random() < 0.5:
            first_wrong = right_until(y, y_star)
            states[j] = [right if i > first_wrong and x != right and rng.random() < share else x
                         for i, (x, right) in enumerate(zip(y, y_star))]
    return [*states, y_star]


def right_until(y: list[int], y_star: list[int]) -> int:
    """How many leading tokens of y are those of y*."""
    return next((i for i, (x, right) in enumerate(zip(y, y_star)) if x != right), len(y))


def repeats(tokens: list[int], text: str) -> bool:
    """Does an answer repeat itself? Section 3.2.1 wants a rule and gives none. Ours: the same 1 to
    8 tokens five times or more in a row, 12 tokens or more in all; or the same line or sentence of
    20 characters or more three times. Ordinary code with its short lines passes."""
    for period in range(1, 9):
        length = period
        for before, token in zip(tokens, tokens[period:]):
            length = length + 1 if token == before else period
            if length >= max(12, 5 * period):
                return True
    sentences = [s for s in map(str.strip, re.split(r"\n|(?<=[.!?])\s", text)) if len(s) >= 20]
    return any(sentences.count(s) >= 3 for s in sentences)


def read_trajectories(path: Path) -> tuple[dict, list[dict]]:
    """(settings, rows) of a file that `collect` made: its first line has the settings, every other
    one a prompt, its answer and its blocks."""
    try:
        # what follows the last newline was cut off
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        settings, *rows = map(json.loads, lines)
        if not settings.keys() >= {"model", "n"} or not all(
                row.keys() == {"number", "prompt", "answer", "blocks"} for row in rows):
            raise ValueError("not its lines")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"expected a file made by `python cllm.py collect`, got {str(path)!r}: "
                         f"{error}") from error
    return settings, rows


def collect(model, tokenizer, prompts: list[list[int]], *, out: Path, n: int = 16,
            max_new_tokens: int = 128, batch: int = 32, augment: float = 0.3,
            seed: int = 0) -> None:
    """Alg. 1: collect the Jacobi trajectories of a model's own answers. A stopped run goes on.

    out:     the file to make, a line a prompt
    n:       tokens of a block
    max_new_tokens: of an answer (N), which may run on to the end of a block
    batch:   prompts at a time
    augment: probability of setting a wrong token right, in half of the states; 0 is off
    """
    from models.training import digest
    if n < 2 or max_new_tokens < 1 or batch < 1 or not 0 <= augment <= 1:
        raise InputError("expected n of 2 or more, max-new-tokens and batch of 1 or more and "
                         f"augment of 0 to 1, got {n}, {max_new_tokens}, {batch} and {augment}")
    settings = {"model": digest(model.state_dict()), "n": n, "max_new_tokens": max_new_tokens,
                "augment": augment, "seed": seed}
    before, rows = read_trajectories(out) if out.exists() else (settings, [])
    if before != settings or any(prompts[row["number"]:][:1] != [row["prompt"]] for row in rows):
        raise InputError(f"expected {str(out)!r} to hold trajectories of this model, these prompts "
                         f"and {settings}, got {before}")
    eos = eos_ids(model, tokenizer)
    longest = context_length(model) - max_new_tokens - n
    numbers = {i for i, prompt in enumerate(prompts) if len(prompt) <= longest}
    todo = sorted(numbers - {row["number"] for row in rows}, key=lambda i: (len(prompts[i]), i))
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(out.name + ".new")
    lines = "".join(json.dumps(line) + "\n" for line in [settings, *rows])
    fresh.write_text(lines, encoding="utf-8")
    os.replace(fresh, out)  # without a line that was cut off
    dropped = 0
    bar = tqdm(total=len(todo), desc="trajectories")
    with bar, open(out, "a", encoding="utf-8") as file:
        for first in range(0, len(todo), batch):
            some = todo[first:first + batch]
            found = trajectories(model, [prompts[i] for i in some], some, n=n, limit=max_new_tokens,
                                 eos=eos, seed=seed)
            for i, solved in zip(some, found):
                answer = [x for *_, y_star in solved for x in y_star][1:]  # without the first root
                blocks = []
                if repeats(answer, tokenizer.decode(answer)):
                    dropped += 1
                else:
                    rng = random.Random(f"{seed} {i}")
                    starts = itertools.count(len(prompts[i]) - 1, n)
                    blocks = [(start, augmented(trajectory, augment, rng))
                              for start, trajectory in zip(starts, solved)]
                row = {"number": i, "prompt": prompts[i], "answer": answer, "blocks": blocks}
                file.write(json.dumps(row) + "\n")
            file.flush()
            bar.update(len(some))
    print(f"{len(todo)} prompts, {dropped} answers dropped for repetition, "
          f"{len(prompts) - len(numbers)} prompts too long")


# ----------------------------------------------------------------------- Alg. 2: the losses

class Pair(NamedTuple):
    """A state y of a block, and the state y_goal that it is to agree with: y* or, for the local
    loss, the next one. `start`: the place of the block's root in prompt and answer."""
    start: int
    y: list[int]
    y_goal: list[int]


def distance(kind: str, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """D in nats from the logits [..., V] of the teacher p, which is q of Eq. 4 without a gradient,
    and the student q: forward KL(p, q), reverse KL(q, p), or Jensen-Shannon."""
    p, q = (x.log_softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
            for x in (teacher, student))

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)
    if kind == "jsd":
        mean = torch.logaddexp(p, q) - math.log(2)
        return (kl(p, mean) + kl(q, mean)) / 2
    return kl(p, q) if kind == "forward-kl" else kl(q, p)


def training_tree(row: dict, pairs: list[Pair]) -> tuple[list[int], list[int], list[tuple]]:
    """One answer's tree (ids, parents): prompt and answer, and the states of pairs as branches that
    leave it at their first wrong token. Also the (teacher, student) nodes of all positions from the
    first disagreement on: before, they are the same node, and D is 0."""
    ids = row["prompt"] + row["answer"]  # whose blocks are the fixed points
    parents = [*range(-1, len(ids) - 1)]
    compared = []

    def nodes(start: int, y: list[int]) -> list[int]:
        path = [start]
        for i in range(1, len(y) - 1):  # the last token predicts nothing in its block
            if path[-1] == start + i - 1 and y[i] == ids[start + i]:  # still on the answer
                path.append(start + i)
            else:
                ids.append(y[i])
                parents.append(path[-1])
                path.append(len(ids) - 1)
        return path
    for pair in pairs:
        teachers = nodes(pair.start, pair.y_goal)
        students = nodes(pair.start, pair.y)
        compared += [(t, s) for t, s in zip(teachers, students) if t != s]
    return ids, parents, compared


def losses(model, rows: list[dict], pairs: list[list[Pair]],
           kind: str = "forward-kl") -> tuple[torch.Tensor, torch.Tensor]:
    """(consistency loss, AR loss) of rows {"prompt", "answer"}, with a list of pairs for each:
    Eq. 4 where y_goal is y*, Eq. 5 where it is the next state; and Eq. 6. Both are means over
    tokens, in nats; 0 where nothing is to be compared.

    One forward pass gives all: the answer's own nodes are Eq. 6 and Eq. 4's teacher, the branches
    are the students."""
    trees = [training_tree(row, some) for row, some in zip(rows, pairs)]
    ids, positions, visible = side_by_side([(ids, parents) for ids, parents, _ in trees])
    first = min(len(row["prompt"]) for row in rows) - 1  # no loss reads the logits before it
    like = model.get_input_embeddings().weight
    mask = attention_mask(windows_of(model), visible, positions, positions, like)
    logits = model(input_ids=ids.to(like.device), position_ids=positions.to(like.device),
                   attention_mask=mask, use_cache=False,
                   logits_to_keep=torch.arange(first, ids.shape[1])).logits
    answers = []  # the logits before each token: row i of `logits` is that of node first + i
    for x, row in zip(logits, rows):
        before = len(row["prompt"]) - 1 - first
        answers.append(x[before:before + len(row["answer"])])
    labels = torch.tensor([x for row in rows for x in row["answer"]], device=logits.device)
    ar = F.cross_entropy(torch.cat(answers), labels)
    at = [(b, t, s) for b, (_, _, compared) in enumerate(trees) for t, s in compared]
    if not at:
        return torch.zeros_like(ar), ar
    b, teacher, student = torch.tensor(at, device=logits.device).T
    stopped = logits[b, teacher - first].detach()
    return distance(kind, stopped, logits[b, student - first]).mean(), ar


def side_by_side(trees: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, ...]:
    """(ids [B, n], positions [B, n], visible [B, n, n]) of trees (ids, parents), padded behind."""
    longest = max(len(ids) for ids, _ in trees)
    width = math.ceil(longest / 16) * 16  # few shapes: kernels are made for each
    ids, positions = torch.zeros(2, len(trees), width, dtype=torch.long)
    visible = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)  # padding sees itself
    for b, (tokens, parents) in enumerate(trees):
        m = len(tokens)
        ancestors = ancestor_mask(parents)
        ids[b, :m] = torch.tensor(tokens)
        visible[b, :m, :m] = ancestors
        positions[b, :m] = ancestors.sum(-1) - 1
    return ids, positions, visible


# --------------------------------------------------------------------- Alg. 2: the training

def drawn(rows: list[dict], batch: int, per_block: int, local: bool,
          rng: random.Random) -> tuple[list[dict], list[list[Pair]]]:
    """Some of the rows, and for every block of theirs up to `per_block` pairs, uniform among the
    states before y*."""
    rows, pairs = rng.sample(rows, min(batch, len(rows))), []
    for row in rows:
        pairs.append([])
        for start, trajectory in row["blocks"]:
            *states, y_star = trajectory
            goals = trajectory[1:] if local else [y_star] * len(states)
            some = [Pair(start, y, y_goal) for y, y_goal in zip(states, goals)]
            pairs[-1] += rng.sample(some, min(per_block, len(some)))
    return rows, pairs


def decoded(model, rows: list[dict], eos: set[int], n: int) -> tuple[list[list[int]], dict]:
    """(answers, figures) of Jacobi decoding of the rows' prompts, up to as many tokens as their
    answers have. Figures: tokens per call, of all and of each; fast-forwarded and stationary
    tokens, as `profile_of`; the share of answers that begin with the same KEPT tokens as the
    rows'."""
    lm, log, answers, each = CachedLM(model), [], [], []
    for row in rows:
        before = lm.calls
        chunks = until(cllm(lm, row["prompt"], n=n, log=log), len(row["answer"]), eos)
        answers.append([x for chunk in chunks for x in chunk])
        each.append(len(answers[-1]) / (lm.calls - before))
    _, gained, stationary = profile_of(log, eos)
    kept = sum(x[:KEPT] == row["answer"][:KEPT] for x, row in zip(answers, rows))
    return answers, {"per_call": sum(map(len, answers)) / lm.calls, "each": each,
                     "fast_forwarded": gained, "stationary": stationary, "kept": kept / len(rows)}


def fit(model, rows: list[dict], held_out: list[dict], eos: set[int], n: int, *, steps: int,
        batch: int, states: int = 1, accumulate: int = 1, lr: float, w: float,
        divergence: str = "forward-kl", local: bool = False, recompute: bool = False, seed: int = 0,
        shown: list[dict] | None = None, watch: Callable = lambda answers: {}, reports: int = 10,
        work: Path | None = None) -> dict:
    """Train all weights. The paper gives no recipe; the released one is AdamW at 2e-5, warm-up,
    then a cosine; ours: warm-up over a twentieth, then linearly to 0, gradients cut to length 1.
    Returns {step: {"consistency", "ar", …}}, `reports` times: losses on `held_out`, the figures of
    `decoded` on `shown` (default: 20 of them), and those of watch(answers)."""
    from models.training import Training, warm_linear

    def loss_of(rng: random.Random) -> torch.Tensor:
        model.train(recompute)  # eval mode, without dropout, unless layers are to recompute
        consistency, ar = losses(model, *drawn(rows, batch, states, local, rng), divergence)
        return consistency + w * ar  # Eq. 7

    def evaluate() -> tuple[dict, str]:
        model.eval()
        rng = random.Random(0)
        with torch.inference_mode(), torch.autocast(model.device.type, dtype=torch.bfloat16):
            measured = [losses(model, *drawn(held_out, batch, states, local, rng), divergence)
                        for _ in range(4)]
        consistency, ar = (sum(x).item() / 4 for x in zip(*measured))
        answers, figures = decoded(model, shown or held_out[:20], eos, n)
        return ({"consistency": consistency, "ar": ar} | figures | watch(answers),
                f"held-out consistency loss {consistency:.4f}, AR loss {ar:.4f}, "
                f"{figures['per_call']:.2f} Jacobi tokens per call, {figures['kept']:.0%} of "
                f"answers as before for {KEPT} tokens")
    weights = dict(model.named_parameters())
    adam = torch.optim.AdamW(weights.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    of = n, sorted(eos), rows, held_out, batch, states, w, divergence, local
    return Training(weights, of, name="cllm", steps=steps, lr=lr, rate=warm_linear,
                    accumulate=accumulate, optimizers=[adam], seed=seed, reports=reports,
                    folder=work).train(loss_of, evaluate)


def training_rows(path: Path, model, seed: int) -> tuple[int, list[dict], list[dict]]:
    """(tokens of a block, rows to train on, rows held out) of a file that `collect` made."""
    settings, rows = read_trajectories(path)
    rows = [row for row in rows if row["blocks"]]
    if len(rows) < 2:
        raise InputError(f"expected trajectories of 2 prompts or more in {str(path)!r}, "
                         f"got {len(rows)}")
    vocabulary = len(model.get_input_embeddings().weight)
    if max(max(row["prompt"] + row["answer"]) for row in rows) >= vocabulary:
        raise InputError("expected trajectories of this model, got token ids beyond its vocabulary")
    random.Random(seed).shuffle(rows)
    few = max(1, min(100, len(rows) // 10))
    return settings["n"], rows[few:], rows[:few]


def train(model, tokenizer, *, data: Path, out: Path, lr: float, work: Path = None,
          steps: int = 1000, batch: int = 16, states: int = 4, accumulate: int = 1, w: float = 10.0,
          divergence: str = "forward-kl", local: bool = False, recompute: bool = False,
          seed: int = 0) -> None:
    """Alg. 2: teach a model to solve its Jacobi iteration in fewer steps. A stopped run goes on.

    data:   made by cllm.py collect
    out:    model directory to make, in bfloat16
    work:   folder of checkpoints (default: OUT.work)
    batch, states, accumulate: answers a pass, states of each block, passes a step
    lr:     learning rate: 5e-4 suited 10M parameters; the released script for 7B has 2e-5
    w:      weight of the AR loss, Eq. 7; Table 6 has 1 (faster) and 10 (more accurate)
    divergence: D, forward-kl, reverse-kl or jsd
    local:  local consistency, Eq. 5, in place of global, Eq. 4
    recompute: activations a second time in the backward pass: less memory
    """
    if min(steps, batch, states, accumulate) < 1 or not lr > 0 or not w >= 0:
        raise InputError("expected steps, batch, states and accumulate of 1 or more, a learning "
                         "rate above 0 and w of 0 or more")
    if divergence not in DIVERGENCES:
        raise InputError(f"expected a divergence of {', '.join(DIVERGENCES)}, got {divergence}")
    n, rows, held_out = training_rows(data, model, seed)
    eos = eos_ids(model, tokenizer)
    work = work or Path(f"{out}.work")
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    if recompute:
        model.gradient_checkpointing_enable()
    fit(model, rows, held_out, eos, n, steps=steps, batch=batch, states=states,
        accumulate=accumulate, lr=lr, w=w, divergence=divergence, local=local, recompute=recompute,
        seed=seed, work=work)
    model.generation_config = GenerationConfig(  # greedy: leftover sampling settings can fail
        bos_token_id=tokenizer.bos_token_id, eos_token_id=sorted(eos) or None,
        pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


# ------------------------------------------------------------------------- the command line

def profile(model, tokenizer, prompts: list[list[int]], *, after: str = TRAINED, n: int = 16,
            max_new_tokens: int = 128) -> None:
    """Count fast-forwarded and stationary tokens of Jacobi decoding (Table 3), for a model and for
    what was trained from it.

    after: the trained one
    n:     tokens of a block
    """
    if n < 2 or max_new_tokens < 1:
        raise InputError(f"expected n of 2 or more and max-new-tokens of 1 or more, got {n} and "
                         f"{max_new_tokens}")
    eos = eos_ids(model, tokenizer)
    new, _ = load(after, str(model.device), "float32")
    print("| model | complete blocks | n-token sequence length | fast-forward token count | "
          "stationary token count |\n| --- | --- | --- | --- | --- |")
    for name, lm in (model.name_or_path, model), (after, new):
        target, log = CachedLM(lm), []
        for prompt in tqdm(prompts, desc=f"profile {Path(name).name}"):
            limit = min(max_new_tokens, target.context - len(prompt))
            for _ in until(cllm(target, prompt, n=n, log=log), limit, eos):
                pass
        blocks, gained, stationary = profile_of(log, eos)
        print(f"| {name} | {blocks} | {n} | {gained:.2f} | {stationary:.2f} |")


def report(run) -> str:
    blocks, gained, stationary = profile_of(run.log, run.eos)
    return (f"{blocks} complete blocks: {gained:.2f} tokens fast-forwarded a call, "
            f"{stationary:.2f} stationary tokens a block")


if __name__ == "__main__":
    from cli import main
    sys.exit(main([cllm], report, target="cllm", commands=[collect, train, profile],
                  ranges={"n": (4, 8, 16, 32, 64)}))
