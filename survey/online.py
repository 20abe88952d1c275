"""A draft that learns from the traffic that it serves: it is trained where the target corrects it.

online   Liu et al., "Online Speculative Decoding", arXiv 2310.07177
boost    Miao et al., "SpecInfer", arXiv 2305.09781: a second draft, for what the first gets wrong

    python -m survey.online serve --prompts FILE --out answers.jsonl     # a stream, in its order
    python -m survey.online boost --prompts FILE --out DRAFT2            # then:
    python speculative.py --method specinfer --draft DRAFT --draft DRAFT2 --prompt "..."

    request     … a  b  x̂         the target's row of b gave another token: it is kept
    some later  a step on all rows kept, D(the target there, the draft there); then they are dropped

The draft changes between requests only, for what it has cached is its own. Whatever it learns, the
output is the target's (../speculative.py).

Departures: learnt is the row that predicts the corrected token (the released code: one later); what
the first draft gets right is left out of boosting place by place, not by whole prompts.
"""
import copy
import json
import random
import sys
from pathlib import Path
from typing import Iterator

import torch
from tqdm import tqdm

from common import (CachedLM, InputError, Sampler, context_length, eos_ids, greedy, until,
                    vocab_size)
from models.training import (Training, collect_examples, count_tokens, digest, divergence,
                             sample_alike, score_answers, warm_linear)
from speculative import report, speculative
from survey.parts import MODELS, draft_for, logits_of
from survey.views import move_counts

KINDS = ("forward-kl", "reverse-kl", "jsd")


# ---------------------------------------------------------------------------- serve and learn

def constant(done: int, steps: int) -> float:
    return 1.0


class Learner:
    """A copy of a draft that learns. `kept`: of each request since the last step its text and where
    the draft failed, {place of the last right token: the target's hidden state there}."""

    def __init__(self, target: CachedLM, draft: CachedLM, kind: str, lr: float,
                 folder: Path | None = None, settings: tuple = ()):
        if kind not in KINDS or not lr > 0:
            raise InputError(f"expected a divergence of {', '.join(KINDS)} and lr above 0, "
                             f"got {kind} and {lr}")
        self.target, self.kind = target, kind
        self.logits = logits_of(target.model)
        model = copy.deepcopy(draft.model).float().requires_grad_(True)
        of = digest(target.model.state_dict()), kind, settings
        self.training = Training(dict(model.named_parameters()), of, name="online", steps=1, lr=lr,
                                 rate=constant, folder=folder)
        self.lm = CachedLM(model, draft.vocab)
        self.kept = []

    def serve(self, prompt: list[int], gamma: int, sample: Sampler,
              log: list) -> Iterator[list[int]]:
        """Speculative decoding; failures are kept."""
        text, failed = list(prompt), {}
        self.kept.append((text, failed))
        for chunk in speculative(self.target, self.lm, prompt, gamma=gamma, sample=sample, log=log):
            accepted = log[-1]["accepted"]
            if accepted < gamma:
                failed[len(text) - 1 + accepted] = self.target.features[accepted].clone()
            text += chunk
            yield chunk

    def learn(self) -> None:
        """One step on all failures that were kept."""
        kept, self.kept = [some for some in self.kept if some[1]], []
        head, device = self.target.model.get_output_embeddings(), self.training.device

        def loss_of(rng: random.Random) -> torch.Tensor:
            states = torch.stack([x for _, failed in kept for x in failed.values()])
            with torch.no_grad():
                teacher = self.logits(head(states).float()).to(device)  # [failures, V]
            texts = [torch.tensor([text[:max(failed) + 1]], device=device) for text, failed in kept]
            rows = torch.cat([self.lm.model(input_ids=ids, use_cache=False).logits[0, [*failed]]
                              for ids, (_, failed) in zip(texts, kept)])
            vocab = slice(self.lm.vocab)
            return divergence(self.kind, teacher[:, vocab], rows[:, vocab]).mean()
        if kept:
            self.training.update(loss_of)
        else:
            self.training.done += 1


def online(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6, every: int = 2,
           divergence: str = "forward-kl", lr: float = 3e-4, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Speculative decoding with a draft that goes on learning from one prompt to the next, as long
    as this process lives. Liu et al., Alg. 2.

    gamma: tokens drafted a round
    every: prompts between two steps
    divergence: of the target from the draft: forward-kl, reverse-kl or jsd
    lr:    the learning rate
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted"} a round.
    """
    if gamma < 1 or every < 1:
        raise InputError(f"expected gamma and every of 1 or more, got {gamma} and {every}")
    learner = draft.once(("online", target, divergence, lr),
                         lambda: Learner(target, draft, divergence, lr))
    if len(learner.kept) >= every:
        learner.learn()
    lm = learner.lm
    for chunk in learner.serve(prompt, gamma, sample, [] if log is None else log):
        move_counts(lm, draft)
        yield chunk


# ---------------------------------------------------------------------------------- a stream

def answered_before(file, prompts: list[list[int]], requests: int, every: int) -> None:
    """Leave the answers to so many requests in a file, the first of `prompts`; InputError where it
    has others, or anything else."""
    file.seek(0)
    lines = [line for line in file if line.endswith(b"\n")]  # not one that was cut off
    try:
        right = [json.loads(line)["prompt"] for line in lines] == prompts[:len(lines)]
    except (ValueError, LookupError, TypeError):
        right = False
    if not (right and requests <= len(lines) <= requests + every):
        raise InputError(f"expected the answers to the first {requests} prompts in {file.name}, of "
                         "which the draft has learnt, or a new file")
    file.truncate(sum(map(len, lines[:requests])))


def serve(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          draft: str = f"{MODELS}/draft", gamma: int = 6, every: int = 2,
          divergence: str = "forward-kl", lr: float = 3e-4, max_new_tokens: int = 200,
          temperature: float = 0.0, seed: int = 0) -> None:
    """Answer prompts in their order, and learn on the way. A stopped run goes on: requests since
    the last step are answered again, none is lost.

    out:   file of answers, JSON lines: {"prompt", "answer": token ids, "drafted", "accepted"}
    work:  folder of the draft's checkpoints, and of the draft in the end (default: OUT.work)
    draft: the small model to begin with
    gamma, every, divergence: as in `online`
    temperature: of an answer; 0: greedy
    """
    small, eos = draft_for(model, tokenizer, draft), eos_ids(model, tokenizer)
    longest = min(map(context_length, (model, small))) - max_new_tokens
    if min(gamma, every, max_new_tokens) < 1 or max(gamma, *map(len, prompts)) > longest:
        raise InputError("expected gamma, every and max-new-tokens of 1 or more, and gamma and "
                         f"prompts of at most {longest} tokens")
    work = work or Path(f"{out}.work")
    work.mkdir(parents=True, exist_ok=True)
    target, first = (CachedLM(x, vocab_size(x, tokenizer)) for x in (model, small))
    settings = gamma, every, max_new_tokens, temperature, seed
    learner = Learner(target, first, divergence, lr, work, settings)
    begun = learner.training.done * every
    with open(out, "a+b") as file:
        answered_before(file, prompts, begun, every)
        for i in tqdm(range(begun, len(prompts)), desc="requests"):
            log, sample = [], Sampler(temperature, seed=seed + i)
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
    """A second draft: a copy of the first, trained on the target's own answers where the first does
    not guess its next token. A stopped run goes on.

    out:   directory of the second draft
    work:  folder of answers and checkpoints (default: OUT.work)
    draft: the first one
    batch: answers a step
    """
    if min(max_new_tokens, steps, batch) < 1 or not lr > 0:
        raise InputError("expected max-new-tokens, steps, batch of 1 or more and lr above 0")
    first = draft_for(model, tokenizer, draft).float()
    work = work or Path(f"{out}.work")
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed)
    second = copy.deepcopy(first).requires_grad_(True)

    def loss_of(rng: random.Random) -> torch.Tensor:
        some = sample_alike(data, batch, rng, count_tokens)
        with torch.no_grad():
            teacher, labels = score_answers(model, some)
            wrong = score_answers(first, some)[0].argmax(-1) != labels
        rows, _ = score_answers(second, some)
        wrong[0] |= not wrong.any()  # a mean of nothing is none
        return divergence("forward-kl", teacher[wrong], rows[wrong]).mean()

    @torch.inference_mode()
    def evaluate() -> tuple[dict, str]:
        (a, labels), (b, _) = (score_answers(x, held_out) for x in (first, second))
        right = torch.stack([x.argmax(-1) == labels for x in (a, b)])  # [2, N]
        shares = [*right.float().mean(1).tolist(), right.any(0).float().mean().item()]
        return {"right": shares}, "held-out right: {:.3f}, {:.3f}, either {:.3f}".format(*shares)
    of = digest(model.state_dict()), digest(first.state_dict()), data, held_out, batch
    Training(dict(second.named_parameters()), of, name="boost", steps=steps, lr=lr,
             rate=warm_linear, seed=seed, folder=work).train(loss_of, evaluate)
    second.to(model.dtype).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([online], report, commands=[serve, boost], ranges={"gamma": (2, 4, 6, 8)}))
