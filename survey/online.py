"""A draft that learns from the traffic that it serves: it is trained where the target corrects it.

Liu et al., "Online Speculative Decoding", arXiv 2310.07177

    python -m survey.online serve --prompts FILE --out answers.jsonl     # a stream, in its order

Every rejection of a request is a failure of the draft, and one row is kept for it. With γ = 3:

    text       … the cat sat     "sat" is the root
    guesses    on  my  hat       "on" is accepted, "my" is rejected, "hat" is not looked at
    kept       the row of "on"   the draft should have guessed like the target after "on"

After some requests the draft makes one training step on all rows that are kept. The step reduces
the mean of D(p, q) over these rows, where p is the target's distribution and q the draft's. Then
the rows are dropped.

The draft changes between requests only, because its cached keys and values were computed with the
weights that it had when the request began. Whatever it learns, the output is the target's
(../speculative.py).

Departures:
- The row of a failure. Paper: the released code learns one row later. Here: the row that predicts
  the corrected token. Why: only this row was wrong.
- The type of the draft. Paper: any. Here: the copy that learns and serves is float32, whatever
  --dtype says. Why: half precision would lose the small steps of its weights. The price: on a GPU a
  draft call reads twice the bytes.

Left out: a draft for each topic.
"""
import copy
import json
import random
import sys
from pathlib import Path
from typing import Iterator

from common import CachedLM, InputError, Sampler, eos_ids, greedy, until, vocab_size
from speculative import speculative
from support.files import check_result, read_kept, save_model
from support.layers import FeatureLM, context_length, move_counts
from support.parts import MODELS, draft_for, require, score_with
from training.loop import Training, digest, divergence_in_parts

import torch
from tqdm import tqdm

KINDS = ("forward-kl", "reverse-kl", "jsd")
KEPT = r'{"prompt": \[[^"]*"answer": [^"]*"drafted": '  # how the answers of a stream begin


# ---------------------------------------------------------------------------- serve and learn

def constant(done: int, steps: int) -> float:
    """Return 1, so that all steps have the same learning rate.

    done    how many steps are made
    steps   how many there will be
    """
    return 1.0


class Learner:
    """Serve requests with a float32 copy of a draft, which learns from its failures.

    target    the model that verifies
    draft     the model that is copied. It does not change itself
    kind      the divergence that a step reduces: forward-kl, reverse-kl or jsd
    lr        the learning rate
    folder    the folder of checkpoints. None: no checkpoints are written
    settings  everything else on which the weights of the copy will depend. A checkpoint of other
              settings is not read
    lm        the copy, with a cache of its own
    training  makes the steps, counts them in `done`, and writes checkpoints. Its own loop is not
              run, because a step is made when enough requests were served. So its `steps` mean
              nothing here
    kept      [(text, failed)] for each request since the last step. text is all its tokens. failed
              is {place: feature}, for each rejection the place in the text of the last token before
              the rejected guess, and the target's feature there
    """

    def __init__(self, target: FeatureLM, draft: CachedLM, kind: str, lr: float,
                 folder: Path | None = None, settings: tuple = ()):
        require(kind in KINDS, "divergence", ", ".join(KINDS), kind)
        self.target = target
        self.kind = kind
        self.score_target = score_with(target.model)
        model = copy.deepcopy(draft.model).float().requires_grad_(True)
        self.score_draft = score_with(model)
        fingerprint = digest(target.model.state_dict()), kind, settings
        self.training = Training(dict(model.named_parameters()), fingerprint, name="online",
                                 steps=1, lr=lr, rate=constant, folder=folder,
                                 models=(target.model, model))
        self.lm = CachedLM(model, draft.vocab)
        self.kept = []

    def serve(self, prompt: list[int], gamma: int, sample: Sampler,
              log: list) -> Iterator[list[int]]:
        """Decode speculatively without end, and keep the failures.

        prompt   the tokens of the request
        gamma    how many tokens are drafted a round
        sample   makes distributions and draws tokens
        log      gets a record for each round, from which this function reads as well
        yields   the chunks
        """
        text = list(prompt)
        failed = {}
        longest = min(map(context_length, (self.target.model, self.lm.model)))
        # Both objects grow below, so that what is kept is right whenever the caller stops.
        self.kept.append((text, failed))
        for chunk in speculative(self.target, self.lm, prompt, gamma=gamma, sample=sample, log=log):
            accepted = log[-1]["accepted"]
            # Row 0 of the target's call was the root, at the end of the text. Row `accepted` gave
            # the token in place of the rejected guess.
            place = len(text) - 1 + accepted
            # The last guesses may lie beyond the context, where the models are not made to read.
            if accepted < gamma and place < longest:
                failed[place] = self.target.features[accepted]
            text += chunk
            yield chunk

    def learn(self) -> None:
        """Make one step on all failures that were kept, and drop them.

        The target's features were kept and not its logits, which are as many as the vocabulary.
        """
        kept = [(text, failed) for text, failed in self.kept if failed]
        self.kept = []
        device, vocab = self.training.device, slice(self.lm.vocab)

        def loss_of(rng: random.Random) -> torch.Tensor:
            features = torch.stack([x for _, failed in kept for x in failed.values()])
            # The draft has to run again, because decoding keeps no gradients.
            student = []
            for text, failed in kept:
                ids = torch.tensor([text[:max(failed) + 1]], device=device)
                states = self.lm.model.get_decoder()(input_ids=ids, use_cache=False)[0][0]
                student.append(states[[*failed]])  # rows of failures, in the order of the features
            V = len(self.lm.model.get_output_embeddings().weight)
            return divergence_in_parts(
                self.kind, lambda x: self.score_target(x).to(device)[:, vocab],
                lambda x: self.score_draft(x)[:, vocab], V, features, torch.cat(student)).mean()
        if kept:
            self.training.update(loss_of)
        else:
            self.training.done += 1  # a step without failures counts, and changes nothing


def online(target: FeatureLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6, every: int = 2,
           divergence: str = "forward-kl", lr: float = 3e-4, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Decode speculatively with a draft that learns from one prompt to the next (Alg. 2).

    The process loses what the draft learnt when it ends. `serve` keeps it.

    gamma: tokens drafted a round, 1 or more
    every: how many prompts are served before each step, 1 or more
    divergence: what a step reduces, D(target, draft), which is forward-kl, reverse-kl or jsd
    lr:    the learning rate of a step

    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted"} a round.
    """
    learner = draft.once(("online", target, divergence, lr),
                         lambda: Learner(target, draft, divergence, lr))
    # A step comes before a prompt, since nobody says when the last chunk of a prompt was taken.
    if len(learner.kept) >= every:
        learner.learn()
    if log is None:
        log = []  # the learner reads what it logs
    for chunk in learner.serve(prompt, gamma, sample, log):
        move_counts(learner.lm, draft)  # the copy's calls are reported as the draft's
        yield chunk


# ---------------------------------------------------------------------------------- a stream

def cut_stream(file, prompts: list[list[int]], requests: int, every: int) -> None:
    """Cut a file of answers after the last answer that the draft has learnt from.

    file      a file of JSON lines, opened with "a+b"
    prompts   all prompts of the stream, in their order
    requests  how many of the first prompts the draft has learnt from
    every     how many prompts are served before each step. An earlier run may have answered up to
              this many prompts since its last step
    raises    InputError unless the file has the answers to the first prompts and nothing else, from
              `requests` to `requests` + `every` of them
    """
    answered = read_kept(file, lambda row: row["prompt"])
    few = requests <= len(answered) <= requests + every
    if not few or answered != prompts[:len(answered)]:
        raise InputError(f"--out must hold the answers to the first {requests} prompts, of which "
                         f"the draft has learnt, or be a new file, got {file.name}")
    file.seek(0)
    for _ in range(requests):
        file.readline()
    file.truncate()


def serve(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          draft: str = f"{MODELS}/draft", gamma: int = 6, every: int = 2,
          divergence: str = "forward-kl", lr: float = 3e-4, max_new_tokens: int = 200,
          temperature: float = 0.0, seed: int = 0) -> None:
    """Answer prompts in their order, and learn on the way.

    A stopped run goes on. It answers the requests since the last step again, so that the draft
    learns from all of them.

    out:   file of the answers. Each line is JSON with "prompt" and "answer", both token ids, and
           the numbers "drafted" and "accepted"
    work:  folder of the draft's checkpoints. When all prompts are answered, the draft is saved in
           its folder draft (default: OUT.work)
    draft: the directory or hub id of the small model that the stream begins with
    gamma, every: as in `online`, 1 or more
    divergence: as in `online`
    temperature: 0 makes answers greedy. Above 0 they are sampled
    """
    work = work or Path(f"{out}.work")
    if not [*work.glob("online-*.pt")]:  # else an earlier run has saved its draft there
        check_result("work", work / "draft", folder=True)
    small = draft_for(model, tokenizer, draft)
    eos = eos_ids(model, tokenizer)
    longest = min(map(context_length, (model, small))) - max_new_tokens
    most = max(map(len, prompts))
    require(most <= longest, "prompts", f"texts of at most {longest} tokens", most)
    out.parent.mkdir(parents=True, exist_ok=True)
    target = FeatureLM(model, vocab_size(model, tokenizer))
    first = CachedLM(small, vocab_size(small, tokenizer))
    settings = gamma, every, max_new_tokens, temperature, seed
    learner = Learner(target, first, divergence, lr, work, settings)
    # A checkpoint is written after each step, so an earlier run has learnt from this many requests.
    served = learner.training.done * every
    with open(out, "a+b") as file:
        cut_stream(file, prompts, served, every)
        for i in tqdm(range(served, len(prompts)), desc="requests"):
            log = []
            # The coins of a request depend only on its number, even if the run was stopped before.
            sample = Sampler(temperature, seed=seed + i)
            answer, accepted = [], 0
            for chunk in until(learner.serve(prompts[i], gamma, sample, log), max_new_tokens, eos):
                answer += chunk
                accepted += min(len(chunk), log[-1]["accepted"])  # none that was cut off
            row = {"prompt": prompts[i], "answer": answer,
                   "drafted": sum(record["drafted"] for record in log), "accepted": accepted}
            file.write((json.dumps(row) + "\n").encode())
            file.flush()
            if (i + 1) % every == 0:
                learner.learn()
                learner.training.save()
    save_model(work / "draft", learner.lm.model, tokenizer)


if __name__ == "__main__":
    from cli.main import main  # the command line is in cli/, a folder of this project
    sys.exit(main([online], commands=[serve], ranges={"gamma": (2, 4, 6, 8)},
                  kept={serve: KEPT}))
