"""Consistency LLMs: a model learns to map any state of its own Jacobi iteration to the fixed point.

Kou et al., "CLLMs: Consistency Large Language Models", arXiv 2403.00835

    python cllm.py collect --prompts FILE --out trajectories.jsonl     # Alg. 1: Jacobi trajectories
    python cllm.py train --data trajectories.jsonl --lr 5e-4 --out my-cllm     # Alg. 2: two losses
    python cllm.py --target my-cllm --prompt "..."                     # Alg. 3: Jacobi decoding
    python cllm.py profile --after my-cllm --prompts FILE              # Table 3

    L_GC = sum_i D( stopgrad q(. | y*_<i, x) || q(. | y_<i, x) )        global consistency, Eq. 4
    L_AR = - sum_i log q(l_i | l_<i, x)                                                      Eq. 6
    L    = L_GC + w L_AR                                                                     Eq. 7

q is the model in training. A block is the paper's n-token sequence, and x is the text before it (in
Eq. 6 before the answer). The block's first token, the root, is known already. Alg. 3 computes it in
line 4, as y_0. y is a state on the block's Jacobi trajectory. The last state is the fixed point y*,
the greedy output of the model before training. The fixed points of all blocks make up the answer l.
D is a distance between two distributions (--divergence), and w is --w.

On the left is a trajectory with n = 4. On the right is the tree that the loss makes of the state
y(1), which is wrong from its third token on:

    y(0)   root  w1  w2  w3         root ── a1 ─┬─ a2 ── a3     the answer: y* is the teacher
    y(1)   root  a1  x2  x3                     └─ x2           y(1) is the student
    y(2)   root  a1  a2  z3
    y*     root  a1  a2  a3         D compares what follows a2 with what follows x2

Up to a1 teacher and student are the same nodes, and D is 0 there. Only a token after the block
follows x3, and Eq. 4 ends with the block. So x3 is left out. Only the last token of y(2) is wrong,
so y(2) adds nothing to the loss. One tree holds an answer and states of all its blocks, so one
forward pass reads them all. A pass for each state would read the same tokens again and again.

Decoding is lossless for the trained model at every temperature. But training changes what the model
says, and repetitive text decodes fast. So measure the quality of the text together with the speed.

Departures (smaller ones are in results/cllm.md):
- States. Paper: Alg. 2 draws one block of an answer, and one state of it, which may be y*. Here:
  all blocks, and up to --states of each, but never y*, which the released code never draws either.
  Why: one pass reads all of them, and the loss of y* is 0.
- Losses. Paper: Eqs. 4 and 6 are sums over tokens. Here: they are means over all tokens of a batch,
  as in the released code, and D counts only from the first wrong token on. Why: answers differ in
  length, and before the first wrong token D is 0.
- Blocks. Paper: they tile the answer, n tokens each (Alg. 1). Here: a block begins with a known
  token, often the last one of the block before, so it adds n - 1 or n tokens. The answer's end cuts
  the last block. Why: no call is spent only on a root, and nothing after that end is learnt.
- First guesses. Paper: Algs. 1 and 3 draw them from x, which grows with the answer. Here: they come
  from the prompt. Why: the loop need not keep the text.
- Corrections. Paper: Alg. 1 corrects random tokens of all states. Here: half of the states are
  corrected, never in their first wrong token. Why: the other half stays as decoding meets it, and
  no state can become y*.
- Low rank. Paper: all weights are trained. Here: with `--rank R` only LoRA changes of rank R are.
  Why: all weights need 16 bytes each, with their gradients and the moments of AdamW.
- Sampling. Paper: only greedy decoding. Here: above temperature 0 too, as in jacobi.py.

Left out: several GPUs, and local consistency (Eq. 5), which makes a slower model (Table 6).
"""
import json
import random
import sys
from pathlib import Path
from typing import Callable, Iterator

from common import (CachedLM, InputError, Sampler, ancestor_mask, attention_mask, begin, eos_ids,
                    greedy, load, main, until, windows_of)

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import GenerationConfig

TRAINED = str(Path(__file__).resolve().parent / "models/cllm")


# ------------------------------------------------------------------------- Alg. 3: the decoding

def cllm(target: CachedLM, prompt: list[int], *, n: int = 16, sample: Sampler = greedy,
         log: list | None = None) -> Iterator[list[int]]:
    """Guess the n - 1 tokens that follow the root in a block, and recompute in each call all
    guesses that are not final yet. The block ends when all are final. Alg. 3 and Eq. 3. The loop is
    the one of jacobi.py, word for word.

    n: tokens of a block, its root included, 2 or more. Use the n of the training

    Yields chunks of 1 to n tokens. For each block it logs {"states", "final"}, lists that each call
    extends. The state y(j) of the Jacobi trajectory is states[j], n tokens with the root first. Its
    leading final[j] tokens are final. The last entry of `final` is n + 1 if the token after the
    block is final too.
    """
    if n < 2:
        raise InputError(f"--n must be 2 or more, got {n}")
    rng = random.Random(sample.seed)
    prompt = begin(prompt, target)
    root = prompt[-1]
    while True:
        # Alg. 3, lines 2 and 5: a block is the root and n - 1 random tokens of the prompt
        y = [root, *rng.choices(prompt, k=n - 1)]
        final = 1  # line 3: how many leading tokens of y are final, n_t + 1
        trajectory = {"states": [y], "final": [final]}
        if log is not None:
            log.append(trajectory)
        while final < n:  # lines 6 and 15, without the call that only confirms the last token
            # Line 8: one call on the last final token and all guesses after it
            logits = target.forward(y[final - 1:])  # [n - final + 1, V]
            guesses = greedy(logits)
            chosen = sample(logits)  # at temperature 0 these are the argmaxes too
            # Line 9: count the leading guesses that the target chooses too, i* - 1 of them
            agreed = 0
            while final + agreed < n and y[final + agreed] == chosen[agreed]:
                agreed += 1
            # They are final, and so is the token that the target chooses after them
            chunk = chosen[:agreed + 1]
            # Line 13: keep the cache of the last final token and of the guesses that agreed
            target.commit(range(agreed + 1))
            # Lines 10 and 14: the other guesses become argmaxes, even with sampling. The next call
            # draws every token again, and the argmax is the likeliest to be drawn
            y = (y[:final] + chunk + guesses[agreed + 1:])[:n]
            final += agreed + 1  # line 11
            trajectory["states"].append(y)  # line 12
            trajectory["final"].append(final)
            yield chunk
        root = chunk[-1]  # the last final token: y[-1], or the token after it


# ------------------------------------------------------------- Table 3: what decoding gained

def profile_of(log: list[dict], eos: set[int] = frozenset()) -> tuple[int, float, float]:
    """Count what Jacobi decoding gained, over the complete blocks of a log. Section 3.3, Table 3.

    All tokens that a call makes final count as fast-forwarded. One of them autoregressive decoding
    would give too. They are counted per call, as in Section 3.3, over all calls together. A
    stationary token is right in some state in which a token before it is wrong,
    and it is right in every later state.

    log       what `cllm` logged, a record for each block
    eos       token ids that end an answer. A block that has one after its root is left out
    returns   the number of complete blocks, the fast-forwarded tokens per call, and the stationary
              tokens per block
    """
    blocks = [r for r in log if r["final"][-1] >= len(r["states"][0])
              and not eos & set(r["states"][-1][1:])]
    calls = sum(len(r["states"]) - 1 for r in blocks)
    gained = sum(r["final"][-1] - 1 for r in blocks)
    stationary = 0
    for states in (r["states"] for r in blocks):
        y_star = states[-1]
        for i, token in enumerate(y_star):
            # y(0) is random, so it counts as wrong even where it is right by chance
            last_wrong = 0
            for j, y in enumerate(states):
                if y[i] != token:
                    last_wrong = j
            stationary += any(y[:i] != y_star[:i] for y in states[last_wrong + 1:])
    return len(blocks), gained / max(calls, 1), stationary / max(len(blocks), 1)


def profile(model, tokenizer, prompts: list[list[int]], *, after: str = TRAINED, n: int = 16,
            max_new_tokens: int = 128) -> None:
    """Count what Jacobi decoding gains with a model before training and after it. Table 3.

    after: directory of the trained model
    n:     tokens of a block, its root included, 2 or more
    max_new_tokens: the most tokens of an answer, 1 or more
    """
    eos = eos_ids(model, tokenizer)
    trained, _ = load(after, str(model.device), model.dtype)
    table = ("| model | complete blocks | n-token sequence length | fast-forward token count | "
             "stationary token count |\n| --- | --- | --- | --- | --- |")
    for name, lm in (model.name_or_path, model), (after, trained):
        target, log = CachedLM(lm), []
        for prompt in prompts:
            limit = min(max_new_tokens, target.max_length - len(prompt))
            list(until(cllm(target, prompt, n=n, log=log), limit, eos))
        blocks, gained, stationary = profile_of(log, eos)
        table += f"\n| {name} | {blocks} | {n} | {gained:.2f} | {stationary:.2f} |"
    print(table)


def report(run) -> str:
    """Return a line that says what the complete blocks of a run gained.

    run   a finished run, with the log of `cllm` and the tokens `eos`
    """
    blocks, gained, stationary = profile_of(run.log, run.eos)
    return (f"{blocks} complete blocks: {gained:.2f} tokens fast-forwarded a call, "
            f"{stationary:.2f} stationary tokens a block")


# ----------------------------------------------------------------- Alg. 1: the trajectories

def find_trajectories(lm: CachedLM, prompt: list[int], n: int, limit: int, eos: set[int],
                      seed: int = 0) -> tuple[list[int], list]:
    """Decode an answer, and take the Jacobi trajectories of its blocks from the log.

    A block begins with the last token that the block before made final: its own last token, or the
    token after it. With n = 4 and a prompt of two tokens:

        prompt + answer   0  1  2  3  4  5  6  7  8  9
        first block          1  2  3  4                 start 1, the last token of the prompt
        second block                  4  5  6  7        start 4: the block before ended with final 4
        third block                               8  9  start 8: the block before ended with final 5

    n, limit, eos   tokens of a block, the most tokens of the answer, and tokens that end it
    seed            the seed of the first guesses
    returns         the answer's tokens, and for each block a pair (start, trajectory): the place
                    of its root in prompt + answer, and its states y(0), y(1), …, y*
    """
    log = []
    chunks = until(cllm(lm, prompt, n=n, sample=Sampler(0, seed=seed), log=log), limit, eos)
    answer = [token for chunk in chunks for token in chunk]
    blocks, start = [], len(prompt) - 1
    for record in log:
        y_star = (prompt + answer)[start:start + n]  # fewer than n at the answer's end
        states = [y[:len(y_star)] for y in record["states"]]
        # A state that is cut at the answer's end may equal y* before the last call
        blocks.append((start, [*(y for y in states if y != y_star), y_star]))
        start += record["final"][-1] - 1  # the last token that is final is the next root
    return answer, blocks


def augment_states(trajectory: list[list[int]], share: float, rng: random.Random) -> None:
    """Set some wrong tokens right in half of the states before y*, in place.

    The first wrong token of a state stays wrong. Otherwise the state could become y*.

    trajectory   the states of a block, y* last
    share        the probability that a wrong token after the first one is corrected
    """
    *states, y_star = trajectory
    for y in states:
        if rng.random() < 0.5:  # the other half stays as decoding meets it
            wrong = [i for i, token in enumerate(y) if token != y_star[i]]
            for i in wrong[1:]:
                if rng.random() < share:
                    y[i] = y_star[i]


def collect(model, tokenizer, prompts: list[list[int]], *, out: Path, n: int = 16,
            max_new_tokens: int = 128, augment: float = 0.3, seed: int = 0) -> None:
    """Collect the Jacobi trajectories of a model's own answers. Alg. 1. Run it again to resume a
    stopped run.

    out:     the file to make. It has a line for the settings, then one for each prompt
    n:       tokens of a block, its root included, 2 or more
    max_new_tokens: the most tokens of an answer, 1 or more
    augment: probability of correcting a wrong token after the first, in half of the states, 0 to 1
    seed:    another seed begins with other guesses, and corrects other tokens
    """
    from support.files import read_kept
    from training.loop import digest, repeats
    settings = {"model": digest(model.state_dict()), "n": n, "max_new_tokens": max_new_tokens,
                "augment": augment, "seed": seed}
    lm, eos = CachedLM(model), eos_ids(model, tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "a+b") as file:
        # Of the first line all settings are needed, and of the others only the prompt
        kept = read_kept(file, lambda row: row if "model" in row else tuple(row["prompt"]))
        if not kept:
            file.write(json.dumps(settings).encode() + b"\n")
        elif kept[0] != settings:
            raise InputError(f"expected a file of {settings}, got {str(out)!r} of others")
        done = {*kept[1:]}
        todo = [p for p in dict.fromkeys(map(tuple, prompts)) if p not in done]
        for prompt in map(list, tqdm(todo, desc="trajectories")):
            # A prompt that fills the context gets no answer, and so has no blocks
            limit = min(max_new_tokens, lm.max_length - len(prompt))
            answer, blocks = find_trajectories(lm, prompt, n, limit, eos, seed)
            if repeats(answer, tokenizer.decode(answer)):  # Section 3.2.1, post-processing
                blocks = []
            for start, trajectory in blocks:
                augment_states(trajectory, augment, random.Random(f"{seed} {start} {prompt}"))
            line = {"prompt": prompt, "answer": answer, "blocks": blocks}
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()


# ------------------------------------------------------------------------- Alg. 2: the training

def draw_states(example: dict, most: int, rng: random.Random) -> list[tuple[int, list[int]]]:
    """Draw up to `most` of the states before y* from each block of an example, equally likely.

    example   {"prompt", "answer", "blocks"}, a line that `collect` wrote
    returns   for each state a pair (start, y), its root's place in prompt + answer and its tokens
    """
    drawn = []
    for start, (*states, _) in example["blocks"]:
        drawn += [(start, y) for y in rng.sample(states, min(most, len(states)))]
    return drawn


def training_tree(text: list[int], states: list) -> tuple[list[int], list[int], list]:
    """Build one tree of a text, its trunk, and of states of its blocks.

    A state follows the trunk up to its first wrong token. There it branches off for good, since a
    wrong token changes all that follows.

    text      the tokens of a prompt and its answer
    states    (start, y) of each state, as `draw_states` returns them
    returns   ids and parents of the tree; and pairs (teacher, student) of nodes. D compares what
              follows the one node with what follows the other
    """
    ids, parents, compared = [*text], [*range(-1, len(text) - 1)], []
    for start, y in states:
        student = start
        # The last token is left out, since it predicts a token after the block
        for teacher, token in enumerate(y[1:-1], start + 1):
            # On the trunk, the student so far is the node just before the teacher
            if student == teacher - 1 and token == text[teacher]:
                student = teacher
            else:
                ids.append(token)
                parents.append(student)
                student = len(ids) - 1
                compared.append((teacher, student))
    return ids, parents, compared


def read_tree(model, ids: list[int], parents: list[int]) -> torch.Tensor:
    """Run a model over a tree; return [nodes, d], what its LM head would read at each node."""
    like = model.get_input_embeddings().weight
    visible = ancestor_mask(parents)  # a node sees its path from the first token down
    # A branch has the positions of the tokens that it replaces, as in decoding
    positions = visible.sum(-1)[None] - 1
    mask = attention_mask(windows_of(model), visible[None], positions, positions, like)
    return model.get_decoder()(input_ids=torch.tensor([ids], device=like.device),
                               position_ids=positions.to(like.device), attention_mask=mask,
                               use_cache=False)[0][0]


def losses(model, score: Callable, examples: list[dict], states: list[list],
           kind: str = "forward-kl") -> tuple[torch.Tensor, torch.Tensor]:
    """Return the consistency loss (Eq. 4) and the AR loss (Eq. 6) of some examples, in nats.

    score      a function from what the model's LM head reads to logits
    examples   {"prompt", "answer", …}, lines that `collect` wrote
    states     for each example the states to learn from, as `draw_states` returns them
    kind       the distance D: forward-kl, reverse-kl or jsd
    returns    the mean of D over all nodes that are compared, or 0 if there are none; and the mean
               cross-entropy of all tokens of the answers
    """
    from training.loop import divergence
    answer_rows, tokens, teachers, students = [], [], [], []
    for example, drawn in zip(examples, states):
        prompt, answer = example["prompt"], example["answer"]
        ids, parents, compared = training_tree(prompt + answer, drawn)
        hidden = read_tree(model, ids, parents)  # [nodes, d]
        teacher, student = torch.tensor(compared, dtype=torch.long).reshape(-1, 2).T
        teachers.append(hidden[teacher])
        students.append(hidden[student])
        # The node before a token of the answer predicts it
        answer_rows.append(hidden[len(prompt) - 1:len(prompt) + len(answer) - 1])
        tokens += answer
    # Eq. 6: - log q(l_i | l_<i, x), for all tokens of all answers
    labels = torch.tensor(tokens, device=hidden.device)
    ar = F.cross_entropy(score(torch.cat(answer_rows)), labels)
    # Eq. 4: D( stopgrad q(. | y*_<i, x) || q(. | y_<i, x) ), for all i of all states
    teacher_logits = score(torch.cat(teachers)).detach()
    student_logits = score(torch.cat(students))
    distance = divergence(kind, teacher_logits, student_logits)
    return distance.sum() / max(1, len(distance)), ar


def read_examples(path: Path, seed: int, vocab: int) -> tuple[int, list[dict], list[dict]]:
    """Read what `collect` wrote, and hold out a tenth of the answers, 20 at most.

    Answers that repeat themselves or are empty have no blocks, and are left out. So are texts that
    are longer than `--max-length`.

    seed      another seed holds out other answers
    vocab     how many tokens the model knows
    returns   tokens of a block, the examples to train on, and the examples held out
    """
    from support.engine import require
    from support.settings import SETTINGS
    most = SETTINGS.get().max_length
    try:
        settings, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        n = settings["n"]
        examples = [x for x in lines if x["blocks"] and len(x["prompt"] + x["answer"]) <= most]
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"expected a file made by `python cllm.py collect`, got {str(path)!r}: "
                         f"{error}") from error
    if len(examples) < 2:
        raise InputError(f"--data must have trajectories of 2 prompts or more, got {len(examples)} "
                         f"in {str(path)!r}")
    largest = max(max(x["prompt"] + x["answer"]) for x in examples)
    require(largest < vocab, "data", f"of tokens below {vocab}", largest)
    print(f"{len(lines)} answers, {len(lines) - len(examples)} repetitive, empty or too long")
    random.Random(seed).shuffle(examples)
    few = max(1, min(20, len(examples) // 10))
    return n, examples[few:], examples[:few]


def train(model, tokenizer, *, data: Path, out: Path, lr: float, work: Path = None,
          steps: int = 1000, batch: int = 8, states: int = 4, rank: int = 0, w: float = 10.0,
          divergence: str = "forward-kl", seed: int = 0) -> None:
    """Teach a model to solve its Jacobi iteration in fewer steps. Alg. 2. Run it again to resume a
    stopped run.

    data:   file of trajectories, made by `python cllm.py collect`
    out:    model directory to make, in bfloat16
    work:   folder of checkpoints, by default OUT.work
    batch:  answers of a pass. The logits of all rows that a loss reads are in memory at
            once. If they do not fit, take fewer answers, and --accumulate more passes
    states: the most states of each block of an answer, 1 or more
    rank:   train a change of this rank (LoRA) for each matrix of the layers, 0 or more. With 0 all
            weights are trained
    lr:     learning rate after the warm-up. With 10M parameters 5e-4 worked well. The released
            script for 7B parameters has 2e-5
    w:      weight of the AR loss, 0 or more. In Table 6 a model is faster with 1, and more accurate
            with 10
    divergence: D of Eq. 4, one of forward-kl, reverse-kl and jsd
    """
    from support.files import save_model
    from support.parts import score_with
    from support.engine import require
    from training.loop import Training, digest, warm_linear
    from training.low_rank import choose_weights, merge_changes
    require(divergence in ("forward-kl", "reverse-kl", "jsd"), "divergence",
            "forward-kl, reverse-kl or jsd", divergence)
    CachedLM(model)  # refuses layers that read no mask, which would let states see each other
    n, examples, held_out = read_examples(data, seed, len(model.get_input_embeddings().weight))
    eos = eos_ids(model, tokenizer)
    weights = choose_weights(model, rank, seed)
    score = score_with(model.eval())  # dropout is not wanted
    # A stopped run is resumed only if nothing that the trained weights depend on has changed
    fingerprint = (digest(model.state_dict()), n, sorted(eos), examples, held_out, batch, states, w,
                   divergence)
    adam = torch.optim.AdamW(weights.values(), lr, (0.9, 0.95), weight_decay=0.0, foreach=False)
    training = Training(weights, fingerprint, name="cllm", steps=steps, lr=lr, rate=warm_linear,
                        optimizers=[adam], seed=seed, folder=work or Path(f"{out}.work"),
                        models=(model,))

    def evaluate() -> tuple[dict, str]:
        rng = random.Random(0)
        drawn = [draw_states(example, states, rng) for example in held_out]
        with torch.inference_mode(), training.precision():
            pairs = [losses(model, score, [x], [y], divergence) for x, y in zip(held_out, drawn)]
        consistency, ar = (sum(map(float, values)) / len(pairs) for values in zip(*pairs))
        lm = CachedLM(model)
        said = [find_trajectories(lm, x["prompt"], n, len(x["answer"]), eos)[0] for x in held_out]
        figures = {"consistency": consistency, "ar": ar, "per_call": sum(map(len, said)) / lm.calls}
        return figures, "held out: " + ", ".join(f"{k} {x:.4g}" for k, x in figures.items())
    # A turn of this loop is an update. `training` has the rate, the checkpoints and the precision
    for rng in training.updates(evaluate):
        adam.zero_grad()
        for _ in range(training.passes):  # one, or more with --accumulate
            # Alg. 2: sample prompts x, Jacobi trajectories J and full responses l from D
            some = rng.sample(examples, min(batch, len(examples)))
            # Alg. 2: sample states y from each J
            drawn = [draw_states(example, states, rng) for example in some]
            with training.precision():
                consistency, ar = losses(model, score, some, drawn, divergence)  # Eqs. 4 and 6
            loss = (consistency + w * ar) / training.passes  # Eq. 7
            training.check(loss)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        adam.step()  # Alg. 2: update the parameters
    # The old generation settings, such as a temperature, can make `save_pretrained` fail
    model.generation_config = GenerationConfig(eos_token_id=sorted(eos) or None)
    save_model(out, merge_changes(model).to(torch.bfloat16), tokenizer)


COMMAND_LINE = dict(methods=[cllm], commands=[collect, train, profile], report=report, target="cllm",
                    ranges={"n": (4, 8, 16, 32, 64)})

if __name__ == "__main__":
    sys.exit(main(**COMMAND_LINE))
