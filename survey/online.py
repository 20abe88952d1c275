"""A draft that learns from the traffic that it serves: it is trained where the target corrects it.

Liu et al., "Online Speculative Decoding", arXiv 2310.07177

    python -m survey.online --prompts FILE     # a stream of requests, in its order

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
- The row of a failure. Released code: it learns one row later. Here: the row that predicts
  the corrected token. Why: only this row was wrong.
- The type of the draft. Paper: any. Here: the copy that learns and serves is float32, whatever
  --dtype says. Why: half precision would lose the small steps of its weights. The price: on a GPU a
  draft call reads twice the bytes.

Left out: a draft for each topic, and keeping what was learnt after the process.
"""
import copy
from typing import Iterator

from common import Sampler, context_length, greedy
from speculative import speculative
from support.engine import EngineLM, require, run_as_program
from support.layers import move_counts
from support.parts import score_with
from training.loop import Training, divergence_in_parts

import torch

KINDS = ("forward-kl", "reverse-kl", "jsd")


class Learner:
    """Serve requests with a float32 copy of a draft, which learns from its failures.

    target    the model that verifies
    draft     the model that is copied. It does not change itself
    kind      the divergence that a step reduces: forward-kl, reverse-kl or jsd
    lr        the learning rate
    lm        the copy, with a cache of its own
    training  changes the weights of the copy in a step
    kept      [(text, failed)] for each request since the last step. text is all its tokens. failed
              is {place: feature}, for each rejection the place in the text of the last token before
              the rejected guess, and the target's feature there
    """

    def __init__(self, target: EngineLM, draft: EngineLM, kind: str, lr: float):
        require(kind in KINDS, "divergence", ", ".join(KINDS), kind)
        self.target = target
        self.kind = kind
        self.score_target = score_with(target.model)
        model = copy.deepcopy(draft.model).float().requires_grad_(True)
        self.score_draft = score_with(model)
        self.training = Training(dict(model.named_parameters()), (), name="online", steps=1, lr=lr,
                                 models=(target.model, model))
        self.lm = EngineLM(model, draft.vocab)
        self.kept = []

    def serve(self, prompt: list[int], gamma: int, sample: Sampler, log: list) -> Iterator[list]:
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
        """Make one step on all failures that were kept, and drop them."""
        kept = [(text, failed) for text, failed in self.kept if failed]
        self.kept = []
        if kept:
            self.training.update(lambda rng: self.compute_loss(kept))

    def compute_loss(self, kept: list) -> torch.Tensor:
        """Compute the mean of D over all failures of some requests.

        The target's features were kept and not its logits, which are as many as the vocabulary.

        kept   as `self.kept`, where each request has failures
        """
        device, vocab = self.lm.model.device, slice(self.lm.vocab)
        features = torch.stack([x for _, failed in kept for x in failed.values()])
        # The draft has to run again, because decoding keeps no gradients.
        student = []
        for text, failed in kept:
            ids = torch.tensor([text[:max(failed) + 1]], device=device)
            states = self.lm.model.get_decoder()(input_ids=ids, use_cache=False)[0][0]
            student.append(states[[*failed]])  # rows of failures, in the order of the features
        return divergence_in_parts(
            self.kind, lambda x: self.score_target(x).to(device)[:, vocab],
            lambda x: self.score_draft(x)[:, vocab], len(self.lm.weight), features,
            torch.cat(student)).mean()


def online(target: EngineLM, draft: EngineLM, prompt: list[int], *, gamma: int = 6, every: int = 2,
           divergence: str = "forward-kl", lr: float = 3e-4, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Decode speculatively with a draft that learns from one prompt to the next (Alg. 2).

    All that the draft has learnt is lost when the process ends.

    gamma: tokens drafted a round, 1 or more
    every: how many prompts are served before each step, 1 or more
    divergence: what a step reduces, D(target, draft), which is forward-kl, reverse-kl or jsd
    lr:    the learning rate of a step

    Yields chunks of 1 to gamma + 1 tokens; logs {"guessed", "accepted"} a round.
    """
    learner = draft.once(Learner, target, draft, divergence, lr)
    # A step comes before a prompt, since nobody says when the last chunk of a prompt was taken.
    if len(learner.kept) >= every:
        learner.learn()
    log = [] if log is None else log  # the learner reads what it logs
    for chunk in learner.serve(prompt, gamma, sample, log):
        move_counts(learner.lm, draft)  # the copy's calls are reported as the draft's
        yield chunk


COMMAND_LINE = dict(methods=[online], ranges={"gamma": (2, 4, 6, 8)})

if __name__ == "__main__":
    run_as_program(__file__)
