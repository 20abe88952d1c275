"""A draft that learns from the traffic that it serves: it is trained where the target corrects it.

online   Liu et al., "Online Speculative Decoding", arXiv 2310.07177
boost    Miao et al., "SpecInfer", arXiv 2305.09781: a second draft, for what the first gets wrong

    python -m survey.online serve --prompts FILE --out answers.jsonl     # a stream, in its order
    python -m survey.online boost --prompts FILE --out DRAFT2            # then:
    python -m survey.several_drafts --draft DRAFT --draft DRAFT2 --prompt "..."

    request     … a  b  x̂         after b the target chose another token than x̂: its row is kept
    some later  a step on all rows kept, D(the target there, the draft there); then they are dropped

The draft changes between requests only, because its cached keys and values were computed with the
weights of the request. Whatever it learns, the output is the target's (../speculative.py).

Departures (paper or released code / here / why):
- the released code learns one row later / the row that predicts the corrected token / that is the
  row which was wrong.
- the released code trains a draft that is loaded in float32 / the copy that learns is float32 and
  also serves, whatever --dtype says / half precision would lose the small steps of its weights. On
  a GPU a draft call then reads twice the bytes.
- SpecInfer leaves whole prompts that the first draft gets right out of boosting / single places / a
  prompt is seldom all right.
"""
import copy
import json
import random
import sys
from pathlib import Path
from typing import Iterator

from common import (CachedLM, InputError, Sampler, context_length, eos_ids, greedy, until,
                    vocab_size)
from models.training import (Training, collect_examples, count_tokens, digest, guess_answers,
                             require, require_training_options, sample_alike, score_answers,
                             warm_linear)
from models.training import divergence as measure_divergence
from speculative import report_acceptance, speculative
from survey.parts import MODELS, draft_for, logits_of
from survey.views import move_counts

import torch
from tqdm import tqdm

KINDS = ("forward-kl", "reverse-kl", "jsd")


# ---------------------------------------------------------------------------- serve and learn

def constant(done: int, steps: int) -> float:
    """Return the same rate for all steps."""
    return 1.0


class Learner:
    """A float32 copy of a draft that serves requests and learns from its failures.

    kind      the divergence that a step reduces: forward-kl, reverse-kl or jsd
    lr        the learning rate
    folder    of checkpoints; None keeps none
    settings  everything else that a checkpoint must belong to

    `training` counts the steps and makes checkpoints. It has no end and no plan of its own, because
    each step is made when enough requests were served.

    `kept` has (text, failed) for each request since the last step. `failed` is {place of the last
    correct token: the target's feature there} for each rejection.
    """

    def __init__(self, target: CachedLM, draft: CachedLM, kind: str, lr: float,
                 folder: Path | None = None, settings: tuple = ()):
        require(kind in KINDS, "divergence", ", ".join(KINDS), kind)
        require(lr > 0, "lr", "above 0", lr)
        self.target = target
        self.kind = kind
        self.to_logits = logits_of(target.model)
        model = copy.deepcopy(draft.model).float().requires_grad_(True)
        fingerprint = digest(target.model.state_dict()), kind, settings
        self.training = Training(dict(model.named_parameters()), fingerprint, name="online",
                                 steps=1, lr=lr, rate=constant, folder=folder)
        self.lm = CachedLM(model, draft.vocab)
        self.kept = []

    def serve(self, prompt: list[int], gamma: int, sample: Sampler,
              log: list) -> Iterator[list[int]]:
        """Decode speculatively without end, yield the chunks, and keep the failures."""
        text = list(prompt)
        failed = {}
        self.kept.append((text, failed))  # both grow below
        for chunk in speculative(self.target, self.lm, prompt, gamma=gamma, sample=sample, log=log):
            accepted = log[-1]["accepted"]
            if accepted < gamma:
                place = len(text) - 1 + accepted
                failed[place] = self.target.features[accepted].clone()
            text += chunk
            yield chunk

    def learn(self) -> None:
        """Make one step on all failures that were kept, and drop them."""
        kept = [(text, failed) for text, failed in self.kept if failed]
        self.kept = []
        head = self.target.model.get_output_embeddings()
        device = self.training.device

        def loss_of(rng: random.Random) -> torch.Tensor:
            features = torch.stack([x for _, failed in kept for x in failed.values()])
            with torch.no_grad():
                teacher = self.to_logits(head(features).float()).to(device)  # [failures, V]
            student = []
            for text, failed in kept:
                ids = torch.tensor([text[:max(failed) + 1]], device=device)
                logits = self.lm.model(input_ids=ids, use_cache=False).logits[0]
                student.append(logits[[*failed]])
            student = torch.cat(student)  # [failures, V]
            vocab = slice(self.lm.vocab)
            return measure_divergence(self.kind, teacher[:, vocab], student[:, vocab]).mean()
        if kept:
            self.training.update(loss_of)
        else:
            self.training.done += 1  # a step without failures counts, and changes nothing


def online(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6, every: int = 2,
           divergence: str = "forward-kl", lr: float = 3e-4, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Decode speculatively with a draft that learns from one prompt to the next (Alg. 2).

    What it learnt is lost when the process ends. `serve` keeps it.

    gamma: tokens drafted a round
    every: prompts between two steps
    divergence: of the target from the draft: forward-kl, reverse-kl or jsd
    lr:    the learning rate
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted"} a round.
    """
    require(gamma >= 1, "gamma", "1 or more", gamma)
    require(every >= 1, "every", "1 or more", every)
    learner = draft.once(("online", target, divergence, lr),
                         lambda: Learner(target, draft, divergence, lr))
    if len(learner.kept) >= every:
        learner.learn()
    for chunk in learner.serve(prompt, gamma, sample, [] if log is None else log):
        move_counts(learner.lm, draft)
        yield chunk


# ---------------------------------------------------------------------------------- a stream

def cut_answers(file, prompts: list[list[int]], requests: int, every: int) -> None:
    """Cut a file of answers after those that the draft has learnt from.

    file      of JSON lines, opened with "a+b"
    prompts   the stream
    requests  how many of them the draft has learnt from. InputError unless the file has the answers
              to these, to at most `every` more, and to nothing else.
    """
    file.seek(0)
    lines = [line for line in file if line.endswith(b"\n")]  # not one that was cut off
    try:
        answered = [json.loads(line)["prompt"] for line in lines]
    except (ValueError, LookupError, TypeError):
        answered = None
    ours = answered == prompts[:len(lines)]
    if not (ours and requests <= len(lines) <= requests + every):
        raise InputError(f"expected the answers to the first {requests} prompts in {file.name}, of "
                         "which the draft has learnt, or a new file")
    file.truncate(sum(map(len, lines[:requests])))


def serve(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          draft: str = f"{MODELS}/draft", gamma: int = 6, every: int = 2,
          divergence: str = "forward-kl", lr: float = 3e-4, max_new_tokens: int = 200,
          temperature: float = 0.0, seed: int = 0) -> None:
    """Answer prompts in their order, and learn on the way.

    A stopped run goes on. It answers the requests since the last step again, so that none is lost.

    out:   file of answers, JSON lines: {"prompt", "answer": token ids, "drafted", "accepted"}
    work:  folder of the draft's checkpoints, and of the draft in the end (default: OUT.work)
    draft: the small model to begin with
    gamma, every, divergence: as in `online`
    temperature: of an answer; 0: greedy
    """
    require_training_options(lr, gamma=gamma, every=every, max_new_tokens=max_new_tokens)
    small = draft_for(model, tokenizer, draft)
    eos = eos_ids(model, tokenizer)
    longest = min(map(context_length, (model, small))) - max_new_tokens
    most = max(map(len, prompts))
    require(most <= longest, "prompts", f"texts of at most {longest} tokens", most)
    require(gamma <= longest, "gamma", f"at most {longest}", gamma)
    work = work or Path(f"{out}.work")
    work.mkdir(parents=True, exist_ok=True)
    target = CachedLM(model, vocab_size(model, tokenizer))
    first = CachedLM(small, vocab_size(small, tokenizer))
    settings = gamma, every, max_new_tokens, temperature, seed
    learner = Learner(target, first, divergence, lr, work, settings)
    served = learner.training.done * every  # requests that an earlier run learnt from
    with open(out, "a+b") as file:
        cut_answers(file, prompts, served, every)
        for i in tqdm(range(served, len(prompts)), desc="requests"):
            log = []
            sample = Sampler(temperature, seed=seed + i)
            chunks = until(learner.serve(prompts[i], gamma, sample, log), max_new_tokens, eos, log)
            row = {"prompt": prompts[i], "answer": [token for chunk in chunks for token in chunk]}
            row |= {name: sum(r[name] for r in log) for name in ("drafted", "accepted")}
            file.write((json.dumps(row) + "\n").encode())
            file.flush()
            if (i + 1) % every == 0:
                learner.learn()
                learner.training.save()
    learner.lm.model.save_pretrained(work / "draft")
    tokenizer.save_pretrained(work / "draft")


# --------------------------------------------------------------------- SpecInfer's second draft

def boost(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          draft: str = f"{MODELS}/draft", max_new_tokens: int = 200, steps: int = 500,
          batch: int = 8, lr: float = 1e-3, seed: int = 0) -> None:
    """Train a second draft, a copy of the first, where the first does not guess the next token.

    It learns from the target's own answers. A stopped run goes on.

    out:   directory of the second draft
    work:  folder of answers and checkpoints (default: OUT.work)
    draft: the first one
    batch: answers a step
    """
    require_training_options(lr, max_new_tokens=max_new_tokens, steps=steps, batch=batch)
    first = draft_for(model, tokenizer, draft).float()
    work = work or Path(f"{out}.work")
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed)
    second = copy.deepcopy(first).requires_grad_(True)

    def loss_of(rng: random.Random) -> torch.Tensor:
        pairs = sample_alike(data, batch, rng, count_tokens)
        with torch.no_grad():
            teacher, labels = score_answers(model, pairs)
            guessed, _ = score_answers(first, pairs)
            wrong = guessed.argmax(-1) != labels
        student, _ = score_answers(second, pairs)
        if not wrong.any():  # a mean of nothing would be no number
            wrong[0] = True
        return measure_divergence("forward-kl", teacher[wrong], student[wrong]).mean()

    @torch.inference_mode()
    def evaluate() -> tuple[dict, str]:
        hits = []
        for draft_model in (first, second):
            guesses, labels = guess_answers(draft_model, held_out)
            hits.append(guesses == labels)
        hits = torch.stack(hits)  # [2, N]
        shares = [*hits.float().mean(1).tolist(), hits.any(0).float().mean().item()]
        return {"right": shares}, "held-out right: {:.3f}, {:.3f}, either {:.3f}".format(*shares)
    weights = digest(model.state_dict()), digest(first.state_dict())
    fingerprint = (*weights, data, held_out, batch)
    Training(dict(second.named_parameters()), fingerprint, name="boost", steps=steps, lr=lr,
             rate=warm_linear, seed=seed, folder=work).train(loss_of, evaluate)
    second.to(model.dtype).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([online], report_acceptance, commands=[serve, boost],
                  ranges={"gamma": (2, 4, 6, 8)}))
