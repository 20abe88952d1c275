"""Consistency LLMs: a model learns to map any state of its own Jacobi iteration to the fixed point.

Kou et al., "CLLMs: Consistency Large Language Models", arXiv 2403.00835

    python cllm.py collect --prompts FILE --out trajectories.jsonl     # Alg. 1: Jacobi trajectories
    python cllm.py train --data trajectories.jsonl --lr 5e-4 --out my-cllm     # Alg. 2: two losses
    python cllm.py --target my-cllm --prompt "..."                     # Alg. 3: Jacobi decoding
    python cllm.py profile --target my-cllm --prompts FILE             # Table 3

    L_GC = sum_i D( stopgrad q(. | y*_<i, x) || q(. | y_<i, x) )        global consistency, Eq. 4
    L_AR = - sum_i log q(l_i | l_<i, x)                                                      Eq. 6
    L    = L_GC + w L_AR                                                                     Eq. 7

q is the model in training. A block is the paper's n-token sequence, and x is the text before it (in
Eq. 6 before the answer). The first token of a block, the root, is y_1 in Eq. 4, y_0 in Alg. 3 and
y[0] in the code. Alg. 3 spends a call on it (line 4). The code knows it: it is the last token of
the prompt, or comes from the block before. y is a state on the block's Jacobi trajectory. The last
state is the fixed point y*, the greedy output of the model before training. The fixed points of all
blocks make up the answer l. D(p || q) is the forward KL divergence, the sum of p log(p / q) over
all tokens. Eq. 7's w becomes --w (Departures, Losses).

On the left is a trajectory with n = 4. On the right is the tree that the loss makes of the state
y(1), which is wrong from its third token on:

    y(0)   root  w1  w2  w3         root ── a1 ─┬─ a2 ── a3     the answer: y* is the teacher
    y(1)   root  a1  x2  x3                     └─ x2           y(1) is the student
    y(2)   root  a1  a2  z3
    y*     root  a1  a2  a3         D compares what follows a2 with what follows x2

Up to a1 teacher and student are the same nodes, and D is 0 there. Eq. 4 has no term for the token
after x3, which lies beyond the block, so x3 is left out. Only the last token of y(2) is wrong,
so y(2) adds nothing to the loss. One tree holds an answer and states of all its blocks, so one
forward pass reads them all. A pass for each state would read the same tokens again and again.

Decoding is lossless for the trained model at every temperature. But training changes what the model
says, and repetitive text decodes fast. So measure the quality of the text together with the speed.

Departures (smaller ones are in results/cllm.md):
- States. Paper: Alg. 2 draws one block of an answer, and one state of it, which may be y*. Here:
  all blocks, and up to --states of each, but never y*, which the released code never draws either.
  Why: one pass reads all of them, and the loss of y* is 0.
- Losses. Paper: Eqs. 4 and 6 are sums over tokens. Here: they are means over the tokens of all
  answers of a batch. D is averaged only over places where a token before them in the block is
  wrong, since it is 0 elsewhere. Why: the released code has means too. With k such places of a
  state and N tokens of an answer, --w is the w of Eq. 7 times N / k.
- Blocks. Paper: they tile the answer, n tokens each (Alg. 1). Here: a block begins with a known
  token, often the last one of the block before, so it adds n - 1 or n tokens. The answer's end cuts
  the last block. Why: no call is spent only on a root, and nothing after that end is learnt.
- The end of a block. Paper: iteration ends when a call changes nothing (Section 3.1), and Alg. 3
  when n_t = n (line 15). As printed it never ends, since i* (line 9) keeps n_t below n. Here: a
  block ends when all of its tokens are final. Why: one more call would only confirm the last one.
- Line 9 of Alg. 3. Paper: z_next is compared with z_current place by place. Here: z_next is first
  shifted right by one place, behind the known first token. Why: LLM(z) gives the token after each
  token of z.
- Table 3. Paper: fast-forwarded tokens are counted for each pass (Section 3.3), or for each n-token
  sequence (the caption). Here: for each call.
- The first state. Paper: 𝒥 begins with y(1) in Section 3.1, and with y(0) in Alg. 1. Here: y(0) is
  learnt from, too.
- First guesses. Paper: Algs. 1 and 3 draw them from x, which grows with the answer. Here: they come
  from the prompt. Why: the loop need not keep the text.
- Corrections. Paper: Alg. 1 corrects random tokens of all states. Here: half of the states are
  corrected, never in their first wrong token. Why: the other half stays as decoding meets it, and
  no state can become y*.
- Sampling. Paper: only greedy decoding. Here: above temperature 0 too, as in jacobi.py.
- Choices that the paper leaves open: AdamW and its numbers, the warm-up, clipped gradients, what
  counts as a repetition, and which share of the wrong tokens is corrected.

Left out: several GPUs, other distances D, and local consistency (Eq. 5), which makes a slower model
(Table 6).
"""
import json
import random
import re
import sys
from pathlib import Path
from typing import Iterator

from common import (CachedLM, InputError, Sampler, ancestor_mask, attention_mask, begin, eos_ids,
                    greedy, main, trie, until, windows_of)

import torch
from tqdm import tqdm
from transformers import GenerationConfig


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
        record = {"states": [y], "final": [final]}
        if log is not None:
            log.append(record)
        while final < n:  # lines 6 and 15
            # Line 8: one call on the last final token and all guesses after it
            logits = target.forward(y[final - 1:])  # [n - final + 1, V]
            chosen = sample(logits, target.places)
            # Line 9: count the leading guesses that the target chooses too. i* counts y[final - 1]
            # as well
            agreed = 0
            while final + agreed < n and y[final + agreed] == chosen[agreed]:
                agreed += 1
            # They are final, and so is the token that the target chooses after them
            chunk = chosen[:agreed + 1]
            # Line 13: keep the cache of the last final token and of the guesses that agreed
            target.commit(range(agreed + 1))
            # Lines 10 and 14: each guess becomes what the target chose after the token before it.
            # Above temperature 0 a place keeps its random numbers, so an equal text before it
            # always gets the same token
            y = (y[:final] + chosen)[:n]
            final += agreed + 1  # line 11
            record["states"].append(y)  # line 12
            record["final"].append(final)
            yield chunk
        root = chunk[-1]  # the last final token: y[-1], or the token after it


# ----------------------------------------------------------------- Alg. 1: the trajectories
def find_trajectories(lm: CachedLM, prompt: list[int], n: int, limit: int, eos: set[int],
                      seed: int = 0) -> tuple[list[int], list]:
    """Decode an answer, and take the Jacobi trajectories of its blocks from the log.

    A block begins with the last token that the block before made final: the last token of that
    block, or the token after it. With n = 4 and a prompt of two tokens:

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
    blocks = []
    start = len(prompt) - 1
    for record in log:
        y_star = (prompt + answer)[start:start + n]  # fewer than n at the answer's end
        states = [y[:len(y_star)] for y in record["states"]]
        # A state that equals y* is dropped. All its guesses were right, or its wrong ones are cut
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


def repeats(answer: list[int], text: str) -> bool:
    """Tell whether an answer repeats itself, by tokens or by sentences. Section 3.2.1.

    By tokens: one token comes 12 times in a row, two tokens 6 times, or three to eight 5 times. By
    sentences: a line or sentence of 20 characters or more comes three times anywhere.

    answer   the tokens of the answer
    text     the same answer as a string
    """
    # Each token becomes a character, so that a pattern can find it again
    again = re.search(r"(?s)(.)\1{11}|(..)\2{5}|(.{3,8})\3{4}", "".join(map(chr, answer)))
    sentences = [x.strip() for x in re.split(r"\n|(?<=[.!?])\s", text)]
    return bool(again) or any(len(x) >= 20 and sentences.count(x) >= 3 for x in sentences)


def collect(model, tokenizer, prompts: list[list[int]], *, out: Path, n: int = 16,
            max_new_tokens: int = 128, augment: float = 0.3, seed: int = 0) -> None:
    """Collect the Jacobi trajectories of a model's own answers. Alg. 1. Ctrl-C keeps the lines that
    are written already. Files of several runs can be joined.

    out: the file to make. It has a line for each answer that does not repeat itself
    n: tokens of a block, its root included, 3 or more. For 2 Eq. 4 has no term
    max_new_tokens: the most tokens of an answer, 1 or more
    augment: probability of correcting a wrong token after the first, in half of the states, 0 to 1
    seed: another seed begins with other guesses, and corrects other tokens
    """
    if n < 3 or max_new_tokens < 1 or not 0 <= augment <= 1:
        raise InputError("expected --n of 3 or more, --max-new-tokens of 1 or more and --augment "
                         f"of 0 to 1, got {n}, {max_new_tokens} and {augment}")
    lm = CachedLM(model)
    eos = eos_ids(model, tokenizer)
    rng = random.Random(seed)
    with open(out, "x", buffering=1) as file:  # a new file, which gets each line at once
        for prompt in tqdm(prompts, "collect"):
            # A prompt that fills the context gets no answer
            limit = min(max_new_tokens, lm.max_length - len(prompt))
            answer, blocks = find_trajectories(lm, prompt, n, limit, eos, seed)
            if answer and not repeats(answer, tokenizer.decode(answer, skip_special_tokens=True)):
                for _, trajectory in blocks:
                    augment_states(trajectory, augment, rng)
                line = {"prompt": prompt, "answer": answer, "blocks": blocks}
                file.write(json.dumps(line) + "\n")


# ------------------------------------------------------------------------- Alg. 2: the training
def draw_states(example: dict, most: int, rng: random.Random) -> list[tuple[int, list[int]]]:
    """Draw up to `most` states before y* from each block of an example, all equally likely.

    example   {"prompt", "answer", "blocks"}, a line that `collect` wrote
    returns   for each state a pair (start, y), its root's place in prompt + answer and its tokens
    """
    return [(start, y) for start, (*states, _) in example["blocks"]
            for y in rng.sample(states, min(most, len(states)))]


def training_tree(text: list[int], drawn: list) -> tuple[list[int], list[int], list]:
    """Build one tree of a text, its trunk, and of states of its blocks.

    A state follows the trunk up to its first wrong token. There it branches off for good, since a
    wrong token changes all that follows. States with equal beginnings share nodes.

    text      the tokens of a prompt and its answer
    drawn     (start, y) of each state, as `draw_states` returns them
    returns   ids and parents of the tree; and pairs (teacher, student) of nodes. D compares what
              follows the one node with what follows the other
    """
    # The last token of a state is left out, since it predicts a token after the block
    branches = [text[1:start + 1] + y[1:-1] for start, y in drawn]
    ids, parents, (_, *paths) = trie(text[0], [text[1:], *branches])
    # The trunk comes first, so its nodes are the places of the text: the teacher's
    compared = [(teacher, student) for path in paths for teacher, student in enumerate(path)
                if student != teacher]
    return ids, parents, compared


def read_tree(model, ids: list[int], parents: list[int], first: int) -> torch.Tensor:
    """Run a model once over a tree; return its logits after the nodes from `first` on, [m, V]."""
    like = model.get_input_embeddings().weight
    visible = ancestor_mask(parents)  # a node sees its path from the first token down
    # A branch has the positions of the tokens that it replaces, as in decoding
    positions = visible.sum(-1)[None] - 1
    mask = attention_mask(windows_of(model), visible[None], positions, positions, like)
    return model(input_ids=torch.tensor([ids], device=like.device),
                 position_ids=positions.to(like.device), attention_mask=mask, use_cache=False,
                 logits_to_keep=len(ids) - first).logits[0]


def losses(model, examples: list[dict], drawn: list[list]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the consistency loss (Eq. 4) and the AR loss (Eq. 6) of some examples, in nats.

    examples   {"prompt", "answer", …}, lines that `collect` wrote
    drawn      for each example the states to learn from, as `draw_states` returns them
    returns    the mean of D over all nodes that are compared, or 0 if there are none; and the mean
               cross-entropy of all tokens of the answers
    """
    distances = []
    surprises = []
    for example, states in zip(examples, drawn):
        prompt, answer = example["prompt"], example["answer"]
        ids, parents, compared = training_tree(prompt + answer, states)
        # The last token of the prompt predicts the answer's first. No loss reads an earlier node
        first = len(prompt) - 1
        log_q = read_tree(model, ids, parents, first).log_softmax(-1)  # [m, V]
        # Eq. 6: - log q(l_i | l_<i, x), for all i
        surprises.append(-log_q[range(len(answer)), answer])
        # Eq. 4: D( stopgrad q(. | y*_<i, x) || q(. | y_<i, x) ), for all i of all states
        log_teacher = log_q[[teacher - first for teacher, _ in compared]].detach()
        log_student = log_q[[student - first for _, student in compared]]
        distances.append((log_teacher.exp() * (log_teacher - log_student)).sum(-1))
    distances = torch.cat(distances)
    return distances.sum() / max(1, len(distances)), torch.cat(surprises).mean()


def save(model, tokenizer, out: Path) -> None:
    """Save a model in bfloat16: in OUT.new first, so that OUT never has half a model."""
    eos = sorted(eos_ids(model, tokenizer))
    # The old generation settings, such as a temperature, can make `save_pretrained` fail
    model.generation_config = GenerationConfig(eos_token_id=eos or None)
    fresh = out.with_name(f"{out.name}.new")
    model.to(torch.bfloat16).save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    fresh.rename(out)


def train(model, tokenizer, *, data: Path, out: Path, lr: float, steps: int = 1000, batch: int = 8,
          states: int = 4, w: float = 10.0, seed: int = 0) -> None:
    """Teach a model to solve its Jacobi iteration in fewer steps. Alg. 2. Ctrl-C saves the model as
    it is. To go on from a saved model, name it as --target. The model itself is changed, and is in
    bfloat16 in the end.

    data: file of trajectories, made by `python cllm.py collect`
    out: model directory to make, in bfloat16
    lr: learning rate, above 0. The warm-up rises nearly to it. With 10M parameters 5e-4 worked
        well. The released script for 7B parameters has 2e-5
    steps: updates of the parameters, 1 or more
    batch: answers of a step, 1 or more. Fewer of them take less memory
    states: the most states of each block of an answer, 1 or more
    w: weight of the AR loss, 0 or more. In Table 6, read as weights of means, a model is faster
        with 1, and more accurate with 10
    seed: another seed draws other answers and states
    """
    if min(steps, batch, states) < 1 or not (lr > 0 and w >= 0):
        raise InputError("expected --steps, --batch and --states of 1 or more, --lr above 0 and "
                         f"--w of 0 or more, got {steps}, {batch}, {states}, {lr} and {w}")
    if out.exists():
        raise InputError(f"expected a new folder as --out, got {str(out)!r}")
    examples = [json.loads(x) for x in data.read_text().splitlines() if '"blocks"' in x]
    if not examples:
        raise InputError(f"expected a file of `cllm.py collect` as --data, got {str(data)!r}")
    CachedLM(model)  # refuses layers that read no mask, which would let states see each other
    rng = random.Random(seed)
    # The model stays in eval mode, without dropout. In bfloat16 most steps of AdamW would round to
    # nothing
    model.float().requires_grad_(True)
    adam = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)
    # The rate rises over a twentieth of the steps, then falls to 0
    rate = torch.optim.lr_scheduler.LambdaLR(adam, lambda t: min(20 * (t + 1), steps - t) / steps)
    bar = tqdm(range(steps), "train")
    try:
        for _ in bar:
            # Alg. 2: sample prompts x, Jacobi trajectories J and full responses l
            sampled = rng.sample(examples, min(batch, len(examples)))
            # Alg. 2: sample states y from each J
            drawn = [draw_states(example, states, rng) for example in sampled]
            consistency, ar = losses(model, sampled, drawn)  # Alg. 2: Eqs. 4 and 6
            loss = consistency + w * ar  # Eq. 7
            if not loss.isfinite():
                raise InputError(f"--lr must be below {lr}: the loss is {loss.item()}")
            # Alg. 2: update the parameters
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            rate.step()
            bar.set_postfix(consistency=f"{consistency:.3f}", ar=f"{ar:.3f}")
    except KeyboardInterrupt:
        save(model, tokenizer, out)
        print(f"stopped after {bar.n} of {steps} steps; {out} has the model", file=sys.stderr)
        raise
    save(model, tokenizer, out)


# ------------------------------------------------------------- Table 3: what decoding gained
def profile_of(log: list[dict], eos: set[int] = frozenset()) -> tuple[int, float, float]:
    """Count what Jacobi decoding gained, over the complete blocks of a log. Section 3.3, Table 3.

    All tokens that a call makes final count as fast-forwarded. As in Table 3, these include the one
    that would be right without any guess. A token is stationary if a state after y(0) has it
    right while a token before it is still wrong. Every later state must have it right, too.

    log       what `cllm` logged, a record for each block
    eos       token ids that end an answer. A block that has one after its root is left out
    returns   the number of complete blocks, the fast-forwarded tokens per call, and the stationary
              tokens per block
    """
    blocks = [block for block in log if block["final"][-1] >= len(block["states"][0])
              and not eos & set(block["states"][-1][1:])]
    calls = sum(len(block["states"]) - 1 for block in blocks)
    gained = sum(block["final"][-1] - 1 for block in blocks)
    stationary = 0
    for block in blocks:
        states = block["states"]
        y_star = states[-1]
        for i, token in enumerate(y_star):
            # y(0) is random, so it counts as wrong even where it is right by chance
            last_wrong = max(j for j, y in enumerate(states) if j == 0 or y[i] != token)
            stationary += any(y[:i] != y_star[:i] for y in states[last_wrong + 1:])
    return len(blocks), gained / max(calls, 1), stationary / max(len(blocks), 1)


def profile(model, tokenizer, prompts: list[list[int]], *, n: int = 16,
            max_new_tokens: int = 128) -> None:
    """Count what Jacobi decoding gains with a model. Table 3. Run it with the model before training
    and with the trained one.

    n: tokens of a block, its root included, 2 or more
    max_new_tokens: the most tokens of an answer
    """
    target = CachedLM(model)
    eos = eos_ids(model, tokenizer)
    log = []
    for prompt in tqdm(prompts, "profile"):
        limit = min(max_new_tokens, target.max_length - len(prompt))
        list(until(cllm(target, prompt, n=n, log=log), limit, eos))
    blocks, per_call, per_block = profile_of(log, eos)
    print("| model | complete blocks | n | fast-forwarded | stationary |\n" + 5 * "| --- " + "|")
    print(f"| {model.name_or_path} | {blocks} | {n} | {per_call:.2f} | {per_block:.2f} |")


# --------------------------------------------------------------------------- the command line
def report(run) -> str:
    """Return a line that says what the complete blocks of a run gained.

    run   a finished run, with the log of `cllm` and the tokens `eos`
    """
    blocks, per_call, per_block = profile_of(run.log, run.eos)
    return f"{blocks} full blocks: {per_call:.2f} tokens a call, {per_block:.2f} stationary a block"


COMMAND_LINE = dict(methods=[cllm], commands=[collect, train, profile], report=report,
                    target="cllm", ranges={"n": (4, 8, 16, 32, 64)})

if __name__ == "__main__":
    sys.exit(main(**COMMAND_LINE))
