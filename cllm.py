"""Consistency LLMs: a model learns to map any state of its own Jacobi iteration to the fixed point.

Kou et al., "CLLMs: Consistency Large Language Models", arXiv 2403.00835

    python cllm.py collect --prompts FILE --out trajectories.jsonl     # Alg. 1: Jacobi trajectories
    python cllm.py train --data trajectories.jsonl --lr 2e-5 --out my-cllm     # Alg. 2: two losses
    python cllm.py --target my-cllm --prompt "..."                     # Alg. 3: Jacobi decoding
    python cllm.py profile --after my-cllm --prompts FILE              # Table 3

The models that the authors released need no training (not tried here, since they are of 7B):

    python cllm.py --target cllm/consistency-llm-7b-math --n 16 --prompt "..."

    L_GC = sum_i D( stopgrad q(. | y*_<i, x) || q(. | y_<i, x) )        global consistency, Eq. 4
    L    = L_GC + w L_AR                                                                     Eq. 7

The model in training is q, and the text before the block is x. A block is the paper's n-token
sequence: its root, which is known, and the n - 1 tokens after the root. A state of the block on the
Jacobi trajectory is y. The last state is the fixed point y*, the greedy output of the model before
training. L_AR (Eq. 6) is the ordinary loss of the whole answer, token by token.

On the left is a trajectory with n = 4. On the right is the tree that the loss makes of the state
y(1), which is wrong from its third token on:

    y(0)   root  w1  w2  w3         root ── a1 ─┬─ a2 ── a3     the answer: y* is the teacher
    y(1)   root  a1  x2  x3                     └─ x2           y(1) is the student
    y(2)   root  a1  a2  z3
    y*     root  a1  a2  a3         D compares what follows a2 with what follows x2

Up to a1 teacher and student are the same nodes, and D is 0 there. What follows the last token of a
block is outside the block. So x3 is no node of the tree, and y(2), wrong in its last token alone,
adds nothing to the loss.

One forward pass over such a tree evaluates the whole answer and states of all its blocks together.

Decoding is lossless for the trained model: its output is what it would say token by token, greedily
or at a temperature. But training changes what the model says. So the quality of the text that the
trained model writes has to be measured too. Speed alone misleads, since repetitive text decodes
fast.

Departures in decoding (paper / here / why):
    first root: Alg. 3 computes it from the prompt / it is the prompt's last token / that saves a
        call
    end of a block: Alg. 3 as printed never ends, since i* is at most len - 1 / a block ends when
        its last token is final, and the last token that is final is the next root / the next root
        needs no call of its own
    first guesses: Alg. 3 draws them from x, which in the released code is all text so far / they
        are tokens of the prompt alone, in `collect` too / a model begins where it was trained to
        begin, and the loop need not keep the text
    sampling: the paper is greedy / at a temperature too / one sample after each node is exact
    Table 3: which blocks count is not said / blocks that are complete and have no EOS / what a
        state has after an EOS is no part of the answer

Departures in training (paper / here / why):
    collecting: Alg. 1 solves one prompt at a time / several side by side, each with the same
        trajectory as alone / a batch takes less time
    repetition: samples that a rule finds are dropped, and the rule is not given / whole answers
        are dropped by the rule of `repeats` / it can be read and tested
    augmentation: Alg. 1 corrects wrong tokens of every state and gives no rate / half of the states
        are corrected, and in these each wrong token but the first is, with a probability / the
        other half stays as decoding meets it, and the released code keeps the first one wrong too
    states: Alg. 2 draws one state of a trajectory, which may be y* / several of each block are
        drawn, only before y*, as in the released code / the loss of y* is 0, and one pass serves
        all states of an answer
    losses: Eqs. 4 and 6 sum over tokens / both are means over the tokens of a batch, and D counts
        only from the first disagreement on, as in the released code / answers differ in length. So
        w is not comparable with the paper's
    labels of L_AR: the released code smooths them by 0.1 / no smoothing / Eq. 6 has none
    optimizer: the paper names none, the released recipe is AdamW / AdamW with betas of 0.9 and
        0.95, no weight decay, and gradients cut to length 1 / never compared
    schedule: the paper gives none, the released code a warm-up and a cosine / a warm-up over a
        twentieth of the steps, then linear to 0 / never compared

Left out: several GPUs.
"""
import itertools
import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

from common import (CachedLM, InputError, KVCache, Sampler, ancestor_mask, attention_mask, eos_ids,
                    greedy, load, until, windows_of)

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import GenerationConfig

TRAINED = str(Path(__file__).resolve().parent / "models/cllm")
DIVERGENCES = ("forward-kl", "reverse-kl", "jsd")
KEPT = 32  # an answer whose first KEPT tokens are those of before counts as unchanged by training


# ---------------------------------------------------------------------------------- decoding

def cllm(target: CachedLM, prompt: list[int], *, n: int = 16, sample: Sampler = greedy,
         log: list | None = None) -> Iterator[list[int]]:
    """Guess the n - 1 tokens that follow the root in a block, and recompute in each call all
    guesses that are not final yet. The block ends when all are final. Alg. 3 and Eq. 3. The loop is
    the one of jacobi.py, word for word.

    n: tokens of a block, its root included, 2 or more. Best is the n of the training

    Yields chunks of 1 to n tokens; logs {"states", "final"} a block. Every call extends both lists.
    The state y(j) of the Jacobi trajectory is states[j], a list of n tokens with the root first.
    The number of its leading tokens that are final is final[j]. Where the token after the block is
    final as well, final[j] is n + 1, and that token is the next root.
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

    log      what `cllm` logged, a record for each block
    eos      token ids that end an answer. A block that has such a token after its root is left out

    returns  the number of complete blocks, the fast-forwarded tokens per call, and the stationary
             tokens per block

    Fast-forwarded tokens are all tokens that a call makes final. As in Table 3, the one token that
    autoregressive decoding would make final too is counted with them.

    A stationary token is right in some state in which a token before it is wrong, and it is right
    in every later state.
    """
    blocks = [r for r in log if r["final"][-1] >= len(r["states"][0])
              and not eos & set(r["states"][-1][1:])]
    calls = sum(len(r["states"]) - 1 for r in blocks)
    gained = sum(r["final"][-1] - 1 for r in blocks)
    stationary = 0
    for states in (r["states"] for r in blocks):
        y_star = states[-1]
        for i, token in enumerate(y_star):
            # Nobody predicted y(0), so a guess of y(0) that happens to be right does not count
            last_wrong = 0
            for j, y in enumerate(states):
                if y[i] != token:
                    last_wrong = j
            stationary += any(y[:i] != y_star[:i] for y in states[last_wrong + 1:])
    return len(blocks), gained / max(calls, 1), stationary / max(len(blocks), 1)


# ----------------------------------------------------------------------- Alg. 2: the losses

class StatePair(NamedTuple):
    """Hold a state y of a block, and the state that y is to agree with."""
    start: int  # where the block's root stands in prompt + answer
    y: list[int]
    y_goal: list[int]  # y* for the global loss, the next state for the local one


def distance(kind: str, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Return the distance D between two distributions. Eqs. 4 and 5.

    kind     forward-kl for KL(p || q), reverse-kl for KL(q || p), or jsd for the Jensen-Shannon
             divergence. In these p is the teacher's distribution, and q is the student's.
    teacher  logits [..., V] of p. The caller stops their gradient.
    student  logits [..., V] of q

    returns  D in nats, [...]
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
    """Build one tree of an answer and of states of its blocks, and list the nodes to compare.

    The trunk of the tree is the prompt followed by the answer. The answer consists of the fixed
    points of its blocks. A state follows the trunk up to its first wrong token, where it branches
    off. Up to there teacher and student are the same nodes and D is 0. So only the nodes from the
    first wrong token on are compared.

    example  {"prompt", "answer", …}, a line that `collect` made
    pairs    the states of the example's blocks that are learnt from

    returns  ids and parents of the tree, and a list of pairs (teacher, student) of nodes. D
             compares what follows the one node with what follows the other.
    """
    ids = example["prompt"] + example["answer"]
    parents = [*range(-1, len(ids) - 1)]
    compared = []

    def add_state(start: int, y: list[int]) -> list[int]:
        """Add a state to the tree without its last token, and return the nodes of the others. What
        follows the last token is outside the block."""
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
        # Token i is predicted at the node before it: by the teacher after y*_<i, and by the student
        # after y_<i. With local consistency the next state takes the place of y*
        teachers = add_state(pair.start, pair.y_goal)
        students = add_state(pair.start, pair.y)
        compared += [(t, s) for t, s in zip(teachers, students) if t != s]
    return ids, parents, compared


def pad_trees(trees: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, ...]:
    """Put trees side by side in one batch, with padding after the shorter ones.

    trees    the ids and parents of each tree

    returns  ids [B, n] and positions [B, n] of the nodes, and visible [B, n, n]: whether the node
             of the second index sees the node of the third
    """
    longest = max(len(ids) for ids, _ in trees)
    # A GPU may compile its kernels anew for every shape. Multiples of 16 make fewer shapes
    width = math.ceil(longest / 16) * 16
    ids, positions = torch.zeros(2, len(trees), width, dtype=torch.long)
    # Padding sees itself, since the softmax of a row that sees nothing is nan
    visible = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)
    for b, (tokens, parents) in enumerate(trees):
        m = len(tokens)
        ancestors = ancestor_mask(parents)  # a node sees its path from the first token down
        ids[b, :m] = torch.tensor(tokens)
        visible[b, :m, :m] = ancestors
        # Branches stand at the positions of the tokens that they replace, as in decoding
        positions[b, :m] = ancestors.sum(-1) - 1
    return ids, positions, visible


def losses(model, examples: list[dict], pairs: list[list[StatePair]], score: Callable,
           kind: str = "forward-kl") -> tuple[torch.Tensor, torch.Tensor]:
    """Return the consistency loss and the AR loss of a batch, from one forward pass.

    Eq. 6 reads the logits of the answers' own tokens. With global consistency these nodes are the
    teachers of Eq. 4 too, and the branches are the students.

    examples  {"prompt", "answer", …} of each answer
    pairs     for each answer a list of states to learn from. The loss is Eq. 4 where y_goal is y*,
              and Eq. 5 where y_goal is the next state.
    score     a function from what the LM head reads to logits, as `score_with` of training/parts.py
              makes it
    kind      the distance D, one of DIVERGENCES

    returns   the consistency loss, a mean over all pairs of nodes that are compared, or 0 if there
              are none; and the AR loss, a mean over all tokens of the answers. Both are in nats.
    """
    from training.loop import compute_in_parts
    trees = [training_tree(example, some) for example, some in zip(examples, pairs)]
    ids, positions, visible = pad_trees([(ids, parents) for ids, parents, _ in trees])
    like, vocab = model.get_input_embeddings().weight, len(model.get_output_embeddings().weight)
    mask = attention_mask(windows_of(model), visible, positions, positions, like)
    # The LM head reads only the nodes that a loss needs. Logits of all nodes may not fit in memory
    hidden = model.get_decoder()(input_ids=ids.to(like.device), attention_mask=mask,
                                 position_ids=positions.to(like.device), use_cache=False)[0]

    def ar_losses(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(score(x), tokens, reduction="none")

    def consistency_losses(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
        # Eq. 4 stops the teacher's gradient. Else what follows y* would move towards what follows y
        with torch.no_grad():
            p = score(teacher)
        return distance(kind, p, score(student))
    # Eq. 6: the answer itself is learnt. Else the model could agree with itself on worse text
    before = [(b, len(example["prompt"]) - 1 + i) for b, example in enumerate(examples)
              for i in range(len(example["answer"]))]  # the node before each token
    b, nodes = torch.tensor(before, device=like.device).T
    tokens = [token for example in examples for token in example["answer"]]
    tokens = torch.tensor(tokens, device=like.device)
    ar = compute_in_parts(ar_losses, vocab, hidden[b, nodes], tokens).mean()
    compared = [(b, t, s) for b, (_, _, nodes) in enumerate(trees) for t, s in nodes]
    if not compared:
        return torch.zeros_like(ar), ar
    b, teacher, student = torch.tensor(compared, device=like.device).T
    apart = compute_in_parts(consistency_losses, vocab, hidden[b, teacher].detach(),
                             hidden[b, student])
    return apart.mean(), ar


# --------------------------------------------------------------------- Alg. 2: the training

def sample_pairs(examples: list[dict], batch: int, per_block: int, local: bool,
                 rng: random.Random) -> tuple[list[dict], list[list[StatePair]]]:
    """Draw examples, and in each of their blocks some of the states before y*, all equally likely.

    examples   lines that `collect` made
    batch      how many examples are drawn
    per_block  the most states that are drawn in a block
    local      whether a state is to agree with the next state instead of y*
    rng        the source of randomness

    returns    the examples, and for each of them a list of pairs of states
    """
    # Alg. 2 draws a prompt and a state. One pass over an answer serves states of all its blocks
    drawn, pairs = rng.sample(examples, min(batch, len(examples))), []
    for example in drawn:
        pairs.append([])
        for start, trajectory in example["blocks"]:
            *states, y_star = trajectory
            # Nothing is to be learnt from y* as a state, since its loss is 0. A state's goal is the
            # next state in Eq. 5, and y* in Eq. 4
            goals = trajectory[1:] if local else [y_star] * len(states)
            block = [StatePair(start, y, y_goal) for y, y_goal in zip(states, goals)]
            pairs[-1] += rng.sample(block, min(per_block, len(block)))
    return drawn, pairs


def decode_examples(model, examples: list[dict], eos: set[int],
                    n: int) -> tuple[list[list[int]], dict]:
    """Answer the examples' prompts by Jacobi decoding, and measure speed and change.

    examples  {"prompt", "answer", …}. A new answer is no longer than the answer of its example.
    eos       token ids that end an answer
    n         tokens of a block

    returns   the new answers, and a dictionary of figures:

        per_call         tokens per call, over all prompts together
        each             a list of the tokens per call of every prompt
        fast_forwarded   fast-forwarded tokens per call, as `profile_of` counts them
        stationary       stationary tokens per block, as `profile_of` counts them
        kept             the share of new answers whose first KEPT tokens are those of the example
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
        batch: int, states: int = 1, lr: float, w: float, divergence: str = "forward-kl",
        local: bool = False, seed: int = 0, changes: dict | None = None,
        shown: list[dict] | None = None, watch: Callable = lambda answers: {}, reports: int = 10,
        work: Path | None = None) -> dict:
    """Train a model on both losses, and measure the model now and then. Alg. 2.

    What is learnt:

        model       the model, whose weights change in place
        changes     the only parameters that are trained, by name. None trains all weights
        examples    lines that `collect` made, to learn from
        held_out    lines that `collect` made, on which the losses are measured
        eos         token ids that end an answer
        n           tokens of a block in the decoding that is measured

    Options of `train`, which explains them:

        steps, batch, states, lr, w, divergence, local, seed

    What is measured. `train` leaves the first three as they are:

        shown       examples that are decoded for the figures of `decode_examples`. None takes the
                    first 20 of `held_out`.
        watch       a function that is given the decoded answers and returns more figures by name
        reports     how often the model is measured in training, besides before the first step and
                    after the last
        work        the folder of the checkpoints. None writes no checkpoint.

    returns a dictionary with an entry for each step at which the model was measured. The entry has
    the held-out losses "consistency" and "ar", the figures of `decode_examples` and those of
    `watch`.
    """
    from training.loop import Training, digest, low_precision, tokens_of_pass, warm_linear
    from training.parts import score_with
    score = score_with(model.eval())  # dropout is not wanted

    def loss_of(rng: random.Random) -> torch.Tensor:
        drawn = sample_pairs(examples, batch, states, local, rng)
        consistency, ar = losses(model, *drawn, score, divergence)
        return consistency + w * ar  # Eq. 7

    def evaluate() -> tuple[dict, str]:
        rng = random.Random(0)  # the same held-out states every time
        with torch.inference_mode(), low_precision(model.device, model):
            measured = [losses(model, *sample_pairs(held_out, batch, states, local, rng), score,
                               divergence) for _ in range(4)]
        consistency, ar = (sum(x).item() / 4 for x in zip(*measured))
        answers, figures = decode_examples(model, shown or held_out[:20], eos, n)
        return ({"consistency": consistency, "ar": ar} | figures | watch(answers),
                f"held-out consistency loss {consistency:.4f}, AR loss {ar:.4f}, "
                f"{figures['per_call']:.2f} Jacobi tokens per call, {figures['kept']:.0%} of "
                f"answers as before for {KEPT} tokens")
    weights = changes or dict(model.named_parameters())
    adam = torch.optim.AdamW(weights.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0,
                             foreach=False)
    of = n, sorted(eos), examples, held_out, batch, states, w, divergence, local
    if changes:  # the frozen weights are none of those that a checkpoint's name is made of
        of += digest(model.state_dict()),
    texts = [(example["prompt"], example["answer"]) for example in examples]
    return Training(weights, of, name="cllm", steps=steps, lr=lr, rate=warm_linear,
                    optimizers=[adam], seed=seed, reports=reports, folder=work, models=(model,),
                    tokens=tokens_of_pass(texts, batch)).train(loss_of, evaluate)


def read_examples(path: Path, model, seed: int) -> tuple[int, list[dict], list[dict]]:
    """Read what `collect` wrote, and hold out a tenth of the examples, 100 at most.

    path     the file that `collect` wrote
    model    the model to be trained. Its vocabulary must have every token of the file.
    seed     the seed of the order of the examples, and so of which are held out

    returns  tokens of a block, the examples to train on, and the examples held out. Answers that
             repeat themselves are in neither list, nor are texts that are longer than the training
             may have. InputError is raised if fewer than 2 are left.
    """
    from training.loop import SETTINGS
    most = SETTINGS.get().max_length
    settings, examples = read_trajectories(path)
    whole = [example for example in examples if example["blocks"]]
    examples = [x for x in whole if len(x["prompt"]) + len(x["answer"]) <= most]
    if len(examples) < len(whole):
        print(f"{len(whole) - len(examples)} trajectories longer than {most} tokens are left out")
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
          steps: int = 1000, batch: int = 8, states: int = 4, rank: int = 0, w: float = 10.0,
          divergence: str = "forward-kl", local: bool = False, seed: int = 0) -> None:
    """Teach a model to solve its Jacobi iteration in fewer steps. Alg. 2. A stopped run goes on.

    data:   file of trajectories, made by `python cllm.py collect`
    out:    model directory to make, in bfloat16
    work:   folder of checkpoints, by default OUT.work
    steps:  updates of the weights
    batch:  answers of a pass
    states: the most states of each block of an answer
    rank:   train changes of this rank of the layers' matrices, with 0 for all weights. All weights
            are trained in float32, and take 16 bytes a weight
    lr:     learning rate after the warm-up. With 10M parameters 5e-4 worked well. The released
            script for 7B parameters has 2e-5
    w:      weight of the AR loss, Eq. 7. In Table 6 a model is faster with 1, and more accurate
            with 10
    divergence: D of Eq. 4, one of forward-kl, reverse-kl and jsd
    local:  use local consistency, Eq. 5, in place of global consistency, Eq. 4
    seed:   seed of the order of the examples and of the states drawn
    """
    from training.files import save_model
    from training.loop import require, require_training_options
    from training.low_rank import add_low_rank, merge_changes
    require_training_options(lr, steps=steps, batch=batch, states=states)
    require(w >= 0, "w", "0 or more", w)
    require(rank >= 0, "rank", "0 or more", rank)
    require(divergence in DIVERGENCES, "divergence", ", ".join(DIVERGENCES), divergence)
    n, examples, held_out = read_examples(data, model, seed)
    eos = eos_ids(model, tokenizer)
    work = work or Path(f"{out}.work")
    changes = None
    if rank > 0:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            changes = add_low_rank(model.requires_grad_(False), rank)
    else:
        model.float()  # in half precision most steps of AdamW would round to nothing
    fit(model, examples, held_out, eos, n, steps=steps, batch=batch, states=states, lr=lr, w=w,
        divergence=divergence, local=local, seed=seed, changes=changes, work=work)
    merge_changes(model)
    # Sampling settings left from the model before training can make `save_pretrained` fail. So the
    # trained model has settings of its own, which decode greedily
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=sorted(eos) or None,
        pad_token_id=tokenizer.pad_token_id)
    save_model(out, model.to(torch.bfloat16), tokenizer)


# -------------------------------------------------------------- Alg. 1: collecting trajectories

class SideBySide:
    """Solve the blocks of several prompts side by side, with one cache.

    Every prompt leaves out its last token, which is the first root, and is padded on the left to
    `width` rows. All prompts begin a block in the same pass, and end the block in the same pass. So
    a pass writes the same rows for every prompt, and no prompt needs a rollback of its own.
    """

    def __init__(self, model, prompts: list[list[int]]):
        self.model = model
        self.length = CachedLM(model).max_length
        self.cache = KVCache()
        self.width = max(map(len, prompts)) - 1
        # How many rows of padding stand before each prompt
        self.padding = torch.tensor([self.width + 1 - len(p) for p in prompts])[:, None]  # [B, 1]
        padded = [[p[0]] * (self.width + 1 - len(p)) + p[:-1] for p in prompts]
        # Feed the prompts, 128 rows a pass. A mask over all rows at once could need much memory
        for i in range(0, self.width, 128):
            self.forward([row[i:i + 128] for row in padded], i, keep=1)

    def forward(self, ids: list[list[int]], start: int, keep: int | None = None) -> list[list[int]]:
        """Run the model over m rows of every prompt.

        ids      tokens [B, m] of the rows
        start    the place of the first of these rows in the cache, the same for every prompt. Rows
                 that the cache had from there on are overwritten.
        keep     how many of the last rows an argmax is wanted for. None wants all m.

        returns  the argmax after each of these rows, [B, keep]
        """
        m = len(ids[0])
        like = self.model.get_input_embeddings().weight
        slots = torch.arange(start + m)
        rows = slots[start:, None]  # [m, 1]
        causal = slots <= rows  # [m, slots]
        real = slots >= self.padding[:, None]  # [B, 1, slots]
        # A row of padding sees itself, since the softmax of a row that sees nothing is nan
        itself = slots == rows
        visible = (causal & real) | itself  # [B, m, slots]
        positions = (slots - self.padding).clamp(0, self.length - 1)  # [B, slots]
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
        start    the place of the root in the cache

        returns  the trajectory y(0), y(1), …, y* of each prompt, and the token after each y*
        """
        history = [states]
        for final in range(1, len(states[0]) + 1):  # at least `final` leading tokens are right
            # Eq. 3: a token of the new y is the argmax after the tokens before it in the old y. In
            # each step at least one more leading token is right, and its row in the cache stays
            chosen = self.forward([y[final - 1:] for y in states], start + final - 1)
            new = [y[:final] + row[:-1] for y, row in zip(states, chosen)]
            if new == states:  # the fixed points y* of all prompts
                break
            states = new
            history.append(states)
        # A block that is solved before the others repeats its y* until they are: keep the first
        solved = [[y for y, _ in itertools.groupby(steps)] for steps in zip(*history)]
        return solved, [row[-1] for row in chosen]


@torch.inference_mode()
def find_trajectories(model, prompts: list[list[int]], numbers: list[int], *, n: int, limit: int,
                      eos: set[int], seed: int = 0) -> list[list[list[list[int]]]]:
    """Solve block after block of every prompt, until an EOS or at least `limit` new tokens. Alg. 1.

    A block has n tokens. Where y* has an EOS, all states of the block are cut after its place, and
    the block is the last one.

    prompts  token ids of the prompts, which are solved side by side
    numbers  the number of each prompt in the file

    n        tokens of a block
    limit    how many new tokens are enough, though the last block may bring a few more
    eos      token ids that end an answer

    seed     first guesses are seeded by this, the prompt's number and the block's number. So they
             do not depend on which prompts are solved together.

    returns  nested lists of tokens: [prompt][block][state][place in the block]
    """
    side = SideBySide(model, prompts)
    roots = [p[-1] for p in prompts]
    found = [[] for _ in prompts]
    ended = [False] * len(prompts)
    # Alg. 1's while. The first root is no new token, so that b blocks have b n - 1 new tokens
    for block in range(limit // n + 1):
        # The first guesses are random tokens of the prompt, as in decoding
        states = [[root, *random.Random(f"{seed} {i} {block}").choices(p, k=n - 1)]
                  for root, i, p in zip(roots, numbers, prompts)]
        solved, roots = side.solve(states, side.width + block * n)
        # Only new tokens can end the answer. The first block's root is the prompt's last token
        new = range(0 if block else 1, n)
        for b, trajectory in enumerate(solved):
            if not ended[b]:
                y_star = trajectory[-1]
                ends = [i for i in new if y_star[i] in eos]
                if ends:
                    # Nothing after the EOS of y* is ever decoded, so nothing there is learnt. Once
                    # they are cut, states that are the same count once
                    cut = (y[:ends[0] + 1] for y in trajectory)
                    trajectory = [y for y, _ in itertools.groupby(cut)]
                    ended[b] = True
                found[b].append(trajectory)
        if all(ended):
            break
    return found


def count_right(y: list[int], y_star: list[int]) -> int:
    """Count the leading tokens of y that are right, which means equal to those of y*."""
    right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(y, y_star))
    return len(list(right))


def augment_states(trajectory: list[list[int]], share: float,
                   rng: random.Random) -> list[list[int]]:
    """Set some wrong tokens right, in half of the states before y*. Alg. 1.

    The first wrong token of a state stays wrong, as in the released code. That code adds a
    corrected copy and keeps the state too. Here the copy takes the state's place.

    trajectory  the states of a block, y* last
    share       the probability that a wrong token after the first one is set right
    rng         the source of randomness

    returns     the trajectory with the corrected states
    """
    *states, y_star = trajectory
    for j, y in enumerate(states):
        if rng.random() < 0.5:  # the other half stays as decoding meets it
            first_wrong = count_right(y, y_star)
            states[j] = [goal if i > first_wrong and token != goal and rng.random() < share
                         else token for i, (token, goal) in enumerate(zip(y, y_star))]
    return [*states, y_star]


def repeats(tokens: list[int], text: str) -> bool:
    """Tell whether an answer repeats itself. Section 3.2.1 uses a rule, but does not give it.

    The rule here has two halves, and one of them is enough. Token by token: the same 1 to 8 tokens
    stand five times or more in a row, and have 12 tokens or more in all. Sentence by sentence: the
    same line or sentence of 20 characters or more stands three times anywhere. Ordinary code
    passes, since its lines that recur are short.

    tokens  token ids of the answer
    text    the same answer as a string
    """
    for period in range(1, 9):
        length = period  # how many tokens up to here have repeated every `period` tokens
        for before, token in zip(tokens, tokens[period:]):
            length = length + 1 if token == before else period
            if length >= max(12, 5 * period):
                return True
    sentences = [s for s in map(str.strip, re.split(r"\n|(?<=[.!?])\s", text)) if len(s) >= 20]
    return any(sentences.count(s) >= 3 for s in sentences)


def read_trajectories(path: Path) -> tuple[dict, list[dict]]:
    """Read a file that `collect` wrote, and leave out a last line that was cut off.

    path     the file
    returns  the settings, from the first line, and a list of the other lines. Such a line is what
             `make_example` returned. InputError is raised if the file is not of this kind.
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
    """Prepare the file of trajectories, so that lines can be added to it.

    A new file gets a line with the settings. A file that exists loses a last line that was cut off.

    out       the file
    settings  what the trajectories depend on
    prompts   token ids of all prompts

    returns   the numbers of the prompts that the file has already. InputError is raised if the file
              has other settings or other prompts.
    """
    from training.files import write_text
    before, examples = settings, []
    if out.exists():
        before, examples = read_trajectories(out)

    def is_ours(example: dict) -> bool:
        number = example["number"]
        return number < len(prompts) and prompts[number] == example["prompt"]
    if before != settings or not all(map(is_ours, examples)):
        found = before if before != settings else "other prompts"
        raise InputError(f"expected {str(out)!r} to hold trajectories of this model, these prompts "
                         f"and {settings}, got {found}")
    write_text(out, "".join(json.dumps(line) + "\n" for line in [settings, *examples]))
    return {example["number"] for example in examples}


def make_example(number: int, prompt: list[int], solved: list[list[list[int]]], tokenizer,
                 augment: float, seed: int) -> dict:
    """Make a line of the file. An answer that repeats itself gets no blocks.

    number     the number of the prompt
    prompt     token ids of the prompt
    solved     the trajectory of each block
    tokenizer  turns the answer into text, in which repeated sentences are looked for
    augment    the probability of setting a wrong token right
    seed       the augmentation is seeded by this and the prompt's number

    returns    {"number", "prompt", "answer", "blocks"}. A block is a pair of start, which is the
               place of its root in prompt + answer, and its augmented trajectory.
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

    out:     the file to make. It has a line for the settings, then one for each prompt
    n:       tokens of a block, its root included
    max_new_tokens: tokens of an answer (N). An answer may run on to the end of its last block
    batch:   how many prompts are solved side by side
    augment: probability of setting a wrong token right, in half of the states
    seed:    seed of the first guesses and of the augmentation
    """
    from training.loop import digest, require
    from training.layers import context_length
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
    # Prompts of similar lengths are solved together, so that they need little padding
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
    """Count fast-forwarded and stationary tokens of Jacobi decoding, for a model before training
    and for the trained model. Table 3.

    after: directory of the trained model
    n:     tokens of a block, its root included
    max_new_tokens: the most tokens of an answer
    """
    if n < 2:
        raise InputError(f"--n must be 2 or more, got {n}")
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be 1 or more, got {max_new_tokens}")
    eos = eos_ids(model, tokenizer)
    trained, _ = load(after, str(model.device), model.dtype)
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
    from cli.main import main  # the command line is in cli/, a folder of this project
    sys.exit(main([cllm], report, target="cllm", commands=[collect, train, profile],
                  folders=[train], ranges={"n": (4, 8, 16, 32, 64)}))
