"""Consistency LLMs: a model learns to map any state of its own Jacobi iteration to the fixed point.

Kou et al., "CLLMs: Consistency Large Language Models", arXiv 2403.00835

    python cllm.py collect --prompts FILE --out trajectories.jsonl     # Alg. 1: Jacobi trajectories
    python cllm.py train --data trajectories.jsonl --lr 2e-5 --out my-cllm     # Alg. 2: two losses
    python cllm.py --target my-cllm --prompt "..."                     # Alg. 3: Jacobi decoding
    python cllm.py profile --after my-cllm --prompts FILE              # Table 3

    L_GC = sum_i D( stopgrad q(. | y*_<i, x) || q(. | y_<i, x) )        global consistency, Eq. 4
    L    = L_GC + w L_AR                                                                     Eq. 7

y is a state on the trajectory. y* is its fixed point, the greedy output of the model before
training. A block is the paper's n-token sequence: its root, which is known, and n - 1 unknown
tokens.

A trajectory, and what the loss makes of a state that is wrong from its third token on:

    y(0)   root  w1  w2  w3         root ── a1 ─┬─ a2 ── a3     the answer: y* is the teacher
    y(1)   root  a1  x2  x3                     └─ x2           y(1) is the student
    y(2)   root  a1  a2  z3
    y*     root  a1  a2  a3         D compares what follows a2 with what follows x2

The last token of a block predicts nothing in its block, so x3 is no node of the tree. Before a2 and
x2 teacher and student are the same node, where D is 0.

One forward pass over this tree evaluates the answer and all states of its blocks together.

Decoding is lossless for the trained model: greedy output is its own autoregressive output. The
trained model is another one than the model before training. So its quality has to be measured, on
text that it writes itself, for repetitive text decodes fast.

Departures in decoding (paper / here / why):
    first root: Alg. 3 computes it from the prompt / the prompt's last token / a call less
    block's end: Alg. 3 as printed never ends, its i* is at most len - 1 / the block's last token is
        the next block's root / no call is needed for it
    first guesses: the paper's are random tokens, the released code's are of all text so far / of
        the prompt alone / as when the trajectories were collected
    sampling: the paper is greedy / at a temperature too / one sample a position is exact
Departures in training (paper / here / why):
    losses: Eqs. 4 and 6 sum over tokens / means over the tokens of a batch, D over the positions
        from the first disagreement on, as in the released code / answers differ in length. So w is
        not comparable with the paper's
    states: Alg. 2 draws one state of a trajectory, y* among them / several of each block, only
        before y*, as in the released code / at y* the loss is 0, and one pass serves them all
    augmentation: Alg. 1 corrects wrong tokens of every state and gives no rate / in half of the
        states, each with a probability / half of the states stay as decoding meets them
    labels of L_AR: the released code smooths them by 0.1 / no smoothing / Eq. 6 has none
    schedule: the paper gives none, the released code a cosine / linear to 0 / never compared
Left out: several GPUs.
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

from common import (CachedLM, InputError, KVCache, Sampler, ancestor_mask, attention_mask,
                    context_length, eos_ids, greedy, load, until, windows_of)

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import GenerationConfig

TRAINED = str(Path(__file__).resolve().parent / "models/cllm")
DIVERGENCES = ("forward-kl", "reverse-kl", "jsd")
KEPT = 32  # an answer that begins with the same KEPT tokens counts as unchanged by the training


# ---------------------------------------------------------------------------------- decoding

def cllm(target: CachedLM, prompt: list[int], *, n: int = 16, sample: Sampler = greedy,
         log: list | None = None) -> Iterator[list[int]]:
    """Guess a block of n - 1 tokens after the root, recompute all of them in one call, and repeat
    until none changes. Alg. 3 and Eq. 3. The loop is the one of jacobi.py.

    n: tokens of a block with its root, 2 or more. Best is the n of the training
    Yields chunks of 1 to n tokens; logs {"states", "final"} a block, extended by every call.
    states[j] is y(j) of the Jacobi trajectory, a list of n tokens whose first is the root. final[j]
    is how many leading tokens of states[j] are final. It is n + 1 if the token after the block, the
    next root, is final as well.
    """
    if n < 2:
        raise InputError(f"--n must be 2 or more, got {n}")
    rng = random.Random(sample.seed)
    root = prompt[-1]
    target.start(prompt[:-1])
    while True:
        # Alg. 3, lines 2 and 5: a block is the root and n - 1 random tokens of the prompt
        y = [root, *rng.choices(prompt, k=n - 1)]
        final = 1  # how many leading tokens of y are final
        trajectory = {"states": [y], "final": [final]}
        if log is not None:
            log.append(trajectory)
        while final < n:  # lines 6 and 15
            # Line 8: one call on the last final token and all guesses after it
            logits = target.forward(y[final - 1:])  # [n - final + 1, V]
            guesses = greedy(logits)
            chosen = guesses
            if sample.temperature > 0:
                chosen = sample(logits)
            # Line 9: count the leading guesses that the target chooses too
            agreed = 0
            while final + agreed < n and y[final + agreed] == chosen[agreed]:
                agreed += 1
            # They are final, and so is the token that the target chooses after them
            chunk = chosen[:agreed + 1]
            # Line 13: keep the cache of the last final token and of the guesses that agreed
            target.commit(range(agreed + 1))
            # Lines 10 and 14: the other guesses become argmaxes, also with sampling. The next call
            # draws every token anew, and the argmax is the likeliest to be drawn
            y = (y[:final] + chunk + guesses[agreed + 1:])[:n]
            final += agreed + 1  # line 11
            trajectory["states"].append(y)  # line 12
            trajectory["final"].append(final)
            yield chunk
        root = chunk[-1]  # y's last token where final is n, the token after y where it is n + 1


def profile_of(log: list[dict], eos: set[int] = frozenset()) -> tuple[int, float, float]:
    """Count what Jacobi decoding gained, over the complete blocks of a log. Section 3.3, Table 3.

    log      records of `cllm`
    eos      token ids that end an answer. A block that has one does not count
    returns  the number of complete blocks, fast-forwarded tokens a call, stationary tokens a block

    Fast-forwarded tokens are those that a call made final, with the one that autoregressive
    decoding would give too. A stationary token was right in a state in which a token before it was
    wrong, and stayed right ever after.
    """
    blocks = [r for r in log if r["final"][-1] >= len(r["states"][0])
              and not eos & set(r["states"][-1][1:])]
    calls = sum(len(r["states"]) - 1 for r in blocks)
    gained = sum(r["final"][-1] - 1 for r in blocks)
    stationary = 0
    for states in (r["states"] for r in blocks):
        y_star = states[-1]
        for i, token in enumerate(y_star):
            last_wrong = 0  # y(0) was not predicted: even a right guess in it does not count
            for j, y in enumerate(states):
                if y[i] != token:
                    last_wrong = j
            stationary += any(y[:i] != y_star[:i] for y in states[last_wrong + 1:])
    return len(blocks), gained / max(calls, 1), stationary / max(len(blocks), 1)


# ----------------------------------------------------------------------- Alg. 2: the losses

class StatePair(NamedTuple):
    """A state y of a block, and the state that it is to agree with."""
    start: int  # the place of the block's root in prompt and answer
    y: list[int]
    y_goal: list[int]  # y* for the global loss, the next state for the local one


def distance(kind: str, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Return D of Eq. 4, in nats, from logits [..., V].

    kind     forward-kl for KL(p, q), reverse-kl for KL(q, p), or jsd for Jensen-Shannon
    teacher  logits of p, the side of Eq. 4 through which no gradient flows
    student  logits of q
    """
    p, q = (x.log_softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
            for x in (teacher, student))

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)
    if kind == "jsd":
        mean = torch.logaddexp(p, q) - math.log(2)
        return (kl(p, mean) + kl(q, mean)) / 2
    return kl(p, q) if kind == "forward-kl" else kl(q, p)


def training_tree(example: dict, pairs: list[StatePair]) -> tuple[list[int], list[int], list]:
    """Build the tree of one answer and the states of its blocks, and list what is compared.

    The trunk is prompt and answer, whose blocks are the fixed points. A state is a branch that
    leaves the trunk at its first wrong token. Up to there teacher and student are the same node and
    D is 0, so only the positions after it are compared.

    example  {"prompt", "answer", …}
    pairs    states of its blocks
    returns  ids, parents, and the (teacher, student) nodes to compare
    """
    ids = example["prompt"] + example["answer"]
    parents = [*range(-1, len(ids) - 1)]
    compared = []

    def add_state(start: int, y: list[int]) -> list[int]:
        """Add a state to the tree, and return its nodes but the last: the last token of a block
        predicts nothing in its block."""
        path = [start]
        for i in range(1, len(y) - 1):
            # A wrong token changes all that follows, so a branch never comes back to the trunk
            on_trunk = path[-1] == start + i - 1
            if on_trunk and y[i] == ids[start + i]:
                path.append(start + i)
            else:
                ids.append(y[i])
                parents.append(path[-1])
                path.append(len(ids) - 1)
        return path
    for pair in pairs:
        # Node by node: the distribution after y*_<i is the teacher's, after y_<i the student's
        teachers = add_state(pair.start, pair.y_goal)
        students = add_state(pair.start, pair.y)
        compared += [(t, s) for t, s in zip(teachers, students) if t != s]
    return ids, parents, compared


def pad_trees(trees: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, ...]:
    """Put trees side by side in one batch, padded behind.

    trees    (ids, parents) of each
    returns  ids [B, n], positions [B, n], and visible [B, n, n], whether a node sees another
    """
    longest = max(len(ids) for ids, _ in trees)
    width = math.ceil(longest / 16) * 16  # few shapes, for kernels are made for each
    ids, positions = torch.zeros(2, len(trees), width, dtype=torch.long)
    visible = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)  # padding sees itself
    for b, (tokens, parents) in enumerate(trees):
        m = len(tokens)
        ancestors = ancestor_mask(parents)  # a node sees its own path from the prompt on alone
        ids[b, :m] = torch.tensor(tokens)
        visible[b, :m, :m] = ancestors
        # Branches stand at the positions of the tokens that they replace, as in decoding
        positions[b, :m] = ancestors.sum(-1) - 1
    return ids, positions, visible


def losses(model, examples: list[dict], pairs: list[list[StatePair]],
           kind: str = "forward-kl") -> tuple[torch.Tensor, torch.Tensor]:
    """Return the consistency loss and the AR loss, Eq. 6, each a mean over tokens in nats.

    One forward pass gives both: the answer's own nodes are Eq. 6 and Eq. 4's teacher, the branches
    are the students.

    examples  {"prompt", "answer", …} of each answer
    pairs     for each answer, states to compare: Eq. 4 where y_goal is y*, Eq. 5 where it is the
              next state. Where nothing is compared the consistency loss is 0
    kind      the distance D
    """
    trees = [training_tree(example, chosen) for example, chosen in zip(examples, pairs)]
    ids, positions, visible = pad_trees([(ids, parents) for ids, parents, _ in trees])
    first = min(len(example["prompt"]) for example in examples) - 1  # no loss reads logits before
    like = model.get_input_embeddings().weight
    mask = attention_mask(windows_of(model), visible, positions, positions, like)
    logits = model(input_ids=ids.to(like.device), position_ids=positions.to(like.device),
                   attention_mask=mask, use_cache=False,
                   logits_to_keep=torch.arange(first, ids.shape[1])).logits
    # Row i of `logits` is that of node first + i, for `logits_to_keep` left out the others
    before_tokens = []
    for rows, example in zip(logits, examples):
        begin = len(example["prompt"]) - 1 - first
        before_tokens.append(rows[begin:begin + len(example["answer"])])
    # Eq. 6: the answer itself is learnt, so that the model keeps its quality
    tokens = [token for example in examples for token in example["answer"]]
    ar = F.cross_entropy(torch.cat(before_tokens), torch.tensor(tokens, device=logits.device))
    compared = [(b, t, s) for b, (_, _, nodes) in enumerate(trees) for t, s in nodes]
    if not compared:
        return torch.zeros_like(ar), ar
    b, teacher, student = torch.tensor(compared, device=logits.device).T
    # Eq. 4 stops the gradient of the teacher. Else y* would move towards the states
    stopped = logits[b, teacher - first].detach()
    return distance(kind, stopped, logits[b, student - first]).mean(), ar


# --------------------------------------------------------------------- Alg. 2: the training

def sample_pairs(examples: list[dict], batch: int, per_block: int, local: bool,
                 rng: random.Random) -> tuple[list[dict], list[list[StatePair]]]:
    """Draw examples, and states of all their blocks, uniformly among the states before y*.

    batch      number of examples
    per_block  the most states of a block
    local      whether a state is to agree with the next state instead of y*
    rng        draws examples and states
    returns    the examples, and for each a list of pairs
    """
    # Alg. 2 draws a prompt and a state. One pass over an answer serves states of all its blocks
    chosen, pairs = rng.sample(examples, min(batch, len(examples))), []
    for example in chosen:
        pairs.append([])
        for start, trajectory in example["blocks"]:
            *states, y_star = trajectory
            # y* is no state to learn from, for its loss is 0. Eq. 5 pairs neighbours, Eq. 4 has y*
            goals = trajectory[1:] if local else [y_star] * len(states)
            block = [StatePair(start, y, y_goal) for y, y_goal in zip(states, goals)]
            pairs[-1] += rng.sample(block, min(per_block, len(block)))
    return chosen, pairs


def decode_examples(model, examples: list[dict], eos: set[int],
                    n: int) -> tuple[list[list[int]], dict]:
    """Decode the examples' prompts by Jacobi decoding, up to the lengths of their answers.

    n        tokens of a block
    returns  the answers, and figures by name. per_call and each are tokens per call, of all prompts
             and of each. fast_forwarded and stationary are those of `profile_of`. kept is the share
             of answers that begin with the same KEPT tokens as the examples'
    """
    lm, log, answers, each = CachedLM(model), [], [], []
    for example in examples:
        before = lm.calls
        chunks = until(cllm(lm, example["prompt"], n=n, log=log), len(example["answer"]), eos)
        answers.append([token for chunk in chunks for token in chunk])
        each.append(len(answers[-1]) / (lm.calls - before))
    _, gained, stationary = profile_of(log, eos)
    kept = sum(answer[:KEPT] == example["answer"][:KEPT]
               for answer, example in zip(answers, examples))
    return answers, {"per_call": sum(map(len, answers)) / lm.calls, "each": each,
                     "fast_forwarded": gained, "stationary": stationary,
                     "kept": kept / len(examples)}


def fit(model, examples: list[dict], held_out: list[dict], eos: set[int], n: int, *, steps: int,
        batch: int, states: int = 1, accumulate: int = 1, lr: float, w: float,
        divergence: str = "forward-kl", local: bool = False, recompute: bool = False, seed: int = 0,
        shown: list[dict] | None = None, watch: Callable = lambda answers: {}, reports: int = 10,
        work: Path | None = None) -> dict:
    """Train all weights of a model. The released recipe is AdamW at 2e-5, a warm-up, then a cosine.
    Ours is a warm-up over a twentieth of the steps, then linear to 0, gradients cut to length 1.

    examples  what `collect` made of each answer, to learn from
    held_out  answers to measure the losses on
    n         tokens of a block in the decoding that is measured
    shown     examples that are decoded for the figures of `decode_examples`, by default 20 held out
    watch     a function of the decoded answers that gives more figures
    reports   how often all this is measured
    returns   {step: {"consistency", "ar", and these figures}}
    The other arguments are options of `train`.
    """
    from models.training import Training, warm_linear

    def loss_of(rng: random.Random) -> torch.Tensor:
        model.train(recompute)  # layers recompute in train mode alone; eval mode has no dropout
        drawn = sample_pairs(examples, batch, states, local, rng)
        consistency, ar = losses(model, *drawn, divergence)
        return consistency + w * ar  # Eq. 7

    def evaluate() -> tuple[dict, str]:
        model.eval()
        rng = random.Random(0)  # the same held-out states every time
        with torch.inference_mode(), torch.autocast(model.device.type, dtype=torch.bfloat16):
            measured = [losses(model, *sample_pairs(held_out, batch, states, local, rng),
                               divergence) for _ in range(4)]
        consistency, ar = (sum(x).item() / 4 for x in zip(*measured))
        answers, figures = decode_examples(model, shown or held_out[:20], eos, n)
        return ({"consistency": consistency, "ar": ar} | figures | watch(answers),
                f"held-out consistency loss {consistency:.4f}, AR loss {ar:.4f}, "
                f"{figures['per_call']:.2f} Jacobi tokens per call, {figures['kept']:.0%} of "
                f"answers as before for {KEPT} tokens")
    weights = dict(model.named_parameters())
    adam = torch.optim.AdamW(weights.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    of = n, sorted(eos), examples, held_out, batch, states, w, divergence, local
    return Training(weights, of, name="cllm", steps=steps, lr=lr, rate=warm_linear,
                    accumulate=accumulate, optimizers=[adam], seed=seed, reports=reports,
                    folder=work).train(loss_of, evaluate)


def read_examples(path: Path, model, seed: int) -> tuple[int, list[dict], list[dict]]:
    """Read what `collect` wrote, and hold a tenth of it out, 100 examples at most.

    returns  tokens of a block, examples to train on, examples held out
    """
    settings, examples = read_trajectories(path)
    examples = [example for example in examples if example["blocks"]]
    if len(examples) < 2:
        raise InputError(f"--data must have trajectories of 2 prompts or more, got {len(examples)} "
                         f"in {str(path)!r}")
    vocabulary = len(model.get_input_embeddings().weight)
    if max(max(example["prompt"] + example["answer"]) for example in examples) >= vocabulary:
        raise InputError("--data must have trajectories of this model, got token ids beyond its "
                         "vocabulary")
    random.Random(seed).shuffle(examples)  # the file is sorted by length
    few = max(1, min(100, len(examples) // 10))
    return settings["n"], examples[few:], examples[:few]


def train(model, tokenizer, *, data: Path, out: Path, lr: float, work: Path = None,
          steps: int = 1000, batch: int = 16, states: int = 4, accumulate: int = 1, w: float = 10.0,
          divergence: str = "forward-kl", local: bool = False, recompute: bool = False,
          seed: int = 0) -> None:
    """Teach a model to solve its Jacobi iteration in fewer steps. Alg. 2. A stopped run goes on.

    data:   file of trajectories, made by `python cllm.py collect`
    out:    model directory to make, in bfloat16
    work:   folder of checkpoints, by default OUT.work
    batch:  answers of a pass
    states: states of each block of an answer
    accumulate: passes of a step
    lr:     learning rate. 5e-4 suited 10M parameters, and the released script for 7B has 2e-5
    w:      weight of the AR loss, Eq. 7. Table 6 has 1, which is faster, and 10, more accurate
    divergence: D of Eq. 4, one of forward-kl, reverse-kl and jsd
    local:  use local consistency, Eq. 5, in place of global consistency, Eq. 4
    recompute: compute activations a second time in the backward pass, to need less memory
    """
    from models.training import require, require_training_options
    require_training_options(lr, steps=steps, batch=batch, states=states, accumulate=accumulate)
    require(w >= 0, "w", "0 or more", w)
    require(divergence in DIVERGENCES, "divergence", ", ".join(DIVERGENCES), divergence)
    n, examples, held_out = read_examples(data, model, seed)
    eos = eos_ids(model, tokenizer)
    work = work or Path(f"{out}.work")
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    if recompute:  # a checkpoint a layer: activations inside are computed again
        model.gradient_checkpointing_enable()
    fit(model, examples, held_out, eos, n, steps=steps, batch=batch, states=states,
        accumulate=accumulate, lr=lr, w=w, divergence=divergence, local=local, recompute=recompute,
        seed=seed, work=work)
    model.generation_config = GenerationConfig(  # greedy: leftover sampling settings can fail
        bos_token_id=tokenizer.bos_token_id, eos_token_id=sorted(eos) or None,
        pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


# -------------------------------------------------------------- Alg. 1: collecting trajectories

class SideBySide:
    """Solve the blocks of several prompts side by side, with one cache.

    The prompts without their last tokens are padded on the left to `width` rows. All prompts go on
    block by block together, so every pass overwrites the same rows of each, and no prompt is ever
    rolled back alone.
    """

    def __init__(self, model, prompts: list[list[int]]):
        self.model = model
        self.cache = KVCache()
        self.width = max(map(len, prompts)) - 1
        self.padding = torch.tensor([self.width + 1 - len(p) for p in prompts])[:, None]  # [B, 1]
        padded = [[p[0]] * (self.width + 1 - len(p)) + p[:-1] for p in prompts]
        for i in range(0, self.width, 128):
            self.forward([row[i:i + 128] for row in padded], i, keep=1)

    def forward(self, ids: list[list[int]], start: int, keep: int | None = None) -> list[list[int]]:
        """Run the model over rows of every prompt, and return the argmax after each of them.

        ids    tokens [B, m] of the rows
        start  where the rows begin in the cache, at the same place for every prompt
        keep   return the argmaxes after the last `keep` rows alone; None returns all
        """
        m = len(ids[0])
        like = self.model.get_input_embeddings().weight
        slots = torch.arange(start + m)
        rows = slots[start:, None]  # [m, 1]
        causal = slots <= rows  # [m, slots]
        real = slots >= self.padding[:, None]  # [B, 1, slots]
        itself = slots == rows  # a row of padding sees itself alone: one that sees nothing is nan
        visible = (causal & real) | itself  # [B, m, slots]
        positions = (slots - self.padding).clamp(0, context_length(self.model) - 1)  # [B, slots]
        mask = attention_mask(windows_of(self.model), visible, positions[:, start:], positions,
                              like)
        self.cache.start = start
        kept = torch.arange(m)
        if keep is not None:
            kept = kept[m - keep:]
        output = self.model(input_ids=torch.tensor(ids, device=like.device), attention_mask=mask,
                            position_ids=positions[:, start:].to(like.device),
                            past_key_values=self.cache, use_cache=True, logits_to_keep=kept)
        return greedy(output.logits)

    def solve(self, states: list[list[int]], start: int) -> tuple[list, list[int]]:
        """Iterate a block of every prompt until all are fixed points.

        states   y(0) of each prompt, n tokens with the root first
        start    where the rows of the blocks begin in the cache
        returns  the trajectory y(0), y(1), …, y* of each prompt, and the token after its y*
        """
        history = [states]
        for final in range(1, len(states[0]) + 1):  # so many leading tokens are right, at least
            # Eq. 3: every token of y is computed anew from the tokens of the last y before it.
            # Step by step one more token is right, and its row in the cache stays
            chosen = self.forward([y[final - 1:] for y in states], start + final - 1)
            new = [y[:final] + row[:-1] for y, row in zip(states, chosen)]
            if new == states:  # the fixed points y* of all prompts
                break
            states = new
            history.append(states)
        # A prompt that was solved before the others repeats its y*: keep one
        solved = [[y for y, _ in itertools.groupby(steps)] for steps in zip(*history)]
        return solved, [row[-1] for row in chosen]


@torch.inference_mode()
def find_trajectories(model, prompts: list[list[int]], numbers: list[int], *, n: int, limit: int,
                      eos: set[int], seed: int = 0) -> list[list[list[list[int]]]]:
    """Solve the blocks of prompts until an EOS or at least `limit` new tokens.

    All blocks have n tokens but the last, whose states end where y* has its EOS.

    numbers  of the prompts; a block's first guesses are seeded by `seed`, the prompt's number and
             the block's
    returns  [prompt][block][state][token of the block]
    """
    side = SideBySide(model, prompts)
    roots = [p[-1] for p in prompts]
    found = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for block in range(limit // n + 1):  # Alg. 1's while: so many blocks have `limit` tokens
        # Alg. 1 begins every block with random tokens, here with tokens of the prompt
        states = [[root, *random.Random(f"{seed} {i} {block}").choices(p, k=n - 1)]
                  for root, i, p in zip(roots, numbers, prompts)]
        solved, roots = side.solve(states, side.width + block * n)
        # An EOS counts among new tokens: the first block's root is the prompt's last token
        new = range(0 if block else 1, n)
        for b, trajectory in enumerate(solved):
            if not ended[b]:
                y_star = trajectory[-1]
                ends = [i for i in new if y_star[i] in eos]
                if ends:  # what a state has behind the EOS of y* is never decoded, nor learnt
                    cut = (y[:ends[0] + 1] for y in trajectory)
                    trajectory = [y for y, _ in itertools.groupby(cut)]
                    ended[b] = True
                found[b].append(trajectory)
        if all(ended):
            break
    return found


def count_right(y: list[int], y_star: list[int]) -> int:
    """Count the leading tokens of y that are those of y*."""
    right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(y, y_star))
    return len(list(right))


def augment_states(trajectory: list[list[int]], share: float,
                   rng: random.Random) -> list[list[int]]:
    """Set wrong tokens right in half of the states before y*. Alg. 1.

    The first wrong token stays wrong, as in the released code, which keeps the state beside its
    corrected copy.

    share  the probability that a wrong token is set right
    """
    *states, y_star = trajectory
    for j, y in enumerate(states):
        if rng.random() < 0.5:  # the other half stays as decoding meets it
            first_wrong = count_right(y, y_star)
            states[j] = [goal if i > first_wrong and token != goal and rng.random() < share
                         else token for i, (token, goal) in enumerate(zip(y, y_star))]
    return [*states, y_star]


def repeats(tokens: list[int], text: str) -> bool:
    """Tell whether an answer repeats itself. Section 3.2.1 wants a rule and gives none.

    Ours: it has the same 1 to 8 tokens five times or more in a row, 12 tokens or more in all. Or it
    has the same line or sentence of 20 characters or more three times. Ordinary code, whose lines
    are short, passes.
    """
    for period in range(1, 9):
        length = period
        for before, token in zip(tokens, tokens[period:]):
            length = length + 1 if token == before else period
            if length >= max(12, 5 * period):
                return True
    sentences = [s for s in map(str.strip, re.split(r"\n|(?<=[.!?])\s", text)) if len(s) >= 20]
    return any(sentences.count(s) >= 3 for s in sentences)


def read_trajectories(path: Path) -> tuple[dict, list[dict]]:
    """Read a file that `collect` wrote, without a last line that was cut off.

    returns  the settings, which its first line has, and the other lines: {"number", "prompt",
             "answer", "blocks"}, where blocks are [start, trajectory] pairs
    """
    try:
        text = path.read_text(encoding="utf-8")
        whole = text.split("\n")[:-1]  # what follows the last newline was cut off
        settings, *examples = map(json.loads, whole)
        if not settings.keys() >= {"model", "n"} or not all(
                example.keys() == {"number", "prompt", "answer", "blocks"} for example in examples):
            raise ValueError("not its lines")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"expected a file made by `python cllm.py collect`, got {str(path)!r}: "
                         f"{error}") from error
    return settings, examples


def resume(out: Path, settings: dict, prompts: list[list[int]]) -> set[int]:
    """Prepare the file of trajectories, and return the numbers of the prompts that it has already.

    A file that exists must be of the same settings and prompts. It loses a line that was cut off.
    """
    before, examples = settings, []
    if out.exists():
        before, examples = read_trajectories(out)

    def is_ours(example: dict) -> bool:
        number = example["number"]
        return number < len(prompts) and prompts[number] == example["prompt"]
    if before != settings or not all(map(is_ours, examples)):
        raise InputError(f"expected {str(out)!r} to hold trajectories of this model, these prompts "
                         f"and {settings}, got {before}")
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(out.name + ".new")
    lines = "".join(json.dumps(line) + "\n" for line in [settings, *examples])
    fresh.write_text(lines, encoding="utf-8")
    os.replace(fresh, out)
    return {example["number"] for example in examples}


def make_example(number: int, prompt: list[int], solved: list[list[list[int]]], tokenizer,
                 augment: float, seed: int) -> dict:
    """Make a line of the file; an answer that repeats itself gets no blocks.

    number  of the prompt, which seeds the augmentation
    solved  the trajectory of each block
    """
    fixed_points = [trajectory[-1] for trajectory in solved]
    answer = [token for y_star in fixed_points for token in y_star]
    del answer[0]  # the first block's root is the prompt's last token
    blocks = []
    if not repeats(answer, tokenizer.decode(answer)):
        rng = random.Random(f"{seed} {number}")
        starts = itertools.count(len(prompt) - 1, len(solved[0][0]))
        blocks = [(start, augment_states(trajectory, augment, rng))
                  for start, trajectory in zip(starts, solved)]
    return {"number": number, "prompt": prompt, "answer": answer, "blocks": blocks}


def collect(model, tokenizer, prompts: list[list[int]], *, out: Path, n: int = 16,
            max_new_tokens: int = 128, batch: int = 32, augment: float = 0.3,
            seed: int = 0) -> None:
    """Collect the Jacobi trajectories of a model's own answers. Alg. 1. A stopped run goes on.

    out:     the file to make, a line a prompt
    n:       tokens of a block
    max_new_tokens: tokens of an answer (N), which may run on to the end of a block
    batch:   prompts at a time
    augment: probability of setting a wrong token right, in half of the states
    """
    from models.training import digest, require
    require(n >= 2, "n", "2 or more", n)
    require(max_new_tokens >= 1, "max_new_tokens", "1 or more", max_new_tokens)
    require(batch >= 1, "batch", "1 or more", batch)
    require(0 <= augment <= 1, "augment", "0 to 1", augment)
    settings = {"model": digest(model.state_dict()), "n": n, "max_new_tokens": max_new_tokens,
                "augment": augment, "seed": seed}
    done = resume(out, settings, prompts)
    eos = eos_ids(model, tokenizer)
    longest = context_length(model) - max_new_tokens - n
    numbers = {i for i, prompt in enumerate(prompts) if len(prompt) <= longest}
    # Prompts of like lengths are solved together, for little is padding then
    todo = sorted(numbers - done, key=lambda i: (len(prompts[i]), i))
    dropped = 0
    bar = tqdm(total=len(todo), desc="trajectories")
    with bar, open(out, "a", encoding="utf-8") as file:
        for first in range(0, len(todo), batch):
            group = todo[first:first + batch]
            found = find_trajectories(model, [prompts[i] for i in group], group, n=n,
                                      limit=max_new_tokens, eos=eos, seed=seed)
            for i, solved in zip(group, found):
                example = make_example(i, prompts[i], solved, tokenizer, augment, seed)
                dropped += not example["blocks"]
                file.write(json.dumps(example) + "\n")
            file.flush()
            bar.update(len(group))
    print(f"{len(todo)} prompts, {dropped} answers dropped for repetition, "
          f"{len(prompts) - len(numbers)} prompts too long")


# ------------------------------------------------------------------------- the command line

def profile(model, tokenizer, prompts: list[list[int]], *, after: str = TRAINED, n: int = 16,
            max_new_tokens: int = 128) -> None:
    """Count fast-forwarded and stationary tokens of Jacobi decoding, for a model and for what was
    trained from it. Table 3.

    after: directory of the trained model
    n:     tokens of a block
    max_new_tokens: the most tokens of an answer
    """
    if n < 2:
        raise InputError(f"--n must be 2 or more, got {n}")
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be 1 or more, got {max_new_tokens}")
    eos = eos_ids(model, tokenizer)
    trained, _ = load(after, str(model.device), "float32")
    print("| model | complete blocks | n-token sequence length | fast-forward token count | "
          "stationary token count |\n| --- | --- | --- | --- | --- |")
    for name, lm in (model.name_or_path, model), (after, trained):
        target, log = CachedLM(lm), []
        for prompt in tqdm(prompts, desc=f"profile {Path(name).name}"):
            limit = min(max_new_tokens, target.max_length - len(prompt))
            for _ in until(cllm(target, prompt, n=n, log=log), limit, eos):
                pass
        blocks, gained, stationary = profile_of(log, eos)
        print(f"| {name} | {blocks} | {n} | {gained:.2f} | {stationary:.2f} |")


def report(run) -> str:
    """Return a line that says what the complete blocks of a run gained."""
    blocks, gained, stationary = profile_of(run.log, run.eos)
    return (f"{blocks} complete blocks: {gained:.2f} tokens fast-forwarded a call, "
            f"{stationary:.2f} stationary tokens a block")


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([cllm], report, target="cllm", commands=[collect, train, profile],
                  ranges={"n": (4, 8, 16, 32, 64)}))
