"""Drafts that are checked less strictly than lossless decoding asks for: BiLD and SpecDec.

bild      Kim et al., "Speculative Decoding with Big Little Decoder", arXiv 2302.07863
specdec   Xia et al., "Speculative Decoding: Exploiting Speculative Execution for Accelerating
          Seq2seq Generation", arXiv 2203.16487

    bild:     draft while the draft's largest probability is `fallback` or more;
              a guess passes if -log p(guess) <= rollback
    specdec:  a guess passes if it is among the β tokens that the target finds likeliest, and if
              log p(best) - log p(guess) <= τ

p is the target's distribution at temperature 1. The target's own choice replaces the first guess
that does not pass. Both are lossy: a token that passes may be one that the target would not choose.
The docstring of each method says with which options its greedy output is the target's.

A greedy round with γ = 3 after "… the cat sat". The target is fed sat, on, a, mat, and each column
shows what it makes of one guess after the guesses before it:

    draft     on      a       mat       the guesses
    p         0.9     0.3     0.6       the target's probability of each guess
    best      on 0.9  the 0.5 mat 0.6   the target's likeliest token in this place, and its p
    lossless  on      the               "a" is rejected, as it is not the target's choice
    bild      on      a       mat       -log 0.3 = 1.2 passes with rollback 2, and so do the others
    specdec   on      a       mat       log 0.5 - log 0.3 = 0.5 passes with τ = 3, and "a" is among
                                        the β likeliest

The chunk of bild and specdec is on, a, mat and one more token, the target's choice after "mat".

Departures:
- The length of BiLD's drafts. Paper: as long as the draft is sure. Here: at most γ tokens. Why: a
  draft that is always sure must be verified too.
- Sampling. Paper: SpecDec is greedy. Here: guesses and replacements are drawn at a temperature, and
  the test stays that of temperature 1. Why: every method here takes a temperature.
- SpecDec's drafter. Paper: an encoder-decoder that writes a block of 25 tokens in one pass. Here: a
  small model that writes token by token. Why: what is compared is the test.

Left out: BiLD's training of the draft. `models/train.py distil` trains one on what the target
writes.
"""
from typing import Callable, Iterator

from common import Sampler, begin, greedy
from support.engine import EngineLM, log_round, run_as_program

import torch


def decode_by_test(passes: Callable, target: EngineLM, draft: EngineLM, prompt: list[int],
                   gamma: int, fallback: float, sample: Sampler,
                   log: list | None) -> Iterator[list[int]]:
    """Draft up to gamma tokens, and replace the first that does not pass by the target's choice.

    passes     a function that is given the target's logits [n, V] in the places of n guesses, and
               the guesses [n, 1]. It returns bool [n, 1], which of them pass
    target     the model whose output is wanted
    draft      the model that drafts
    prompt     token ids
    gamma      tokens drafted a round, at most
    fallback   drafting stops where the draft's largest probability (at temperature 1) is below this
    sample     `greedy`, or a Sampler
    log        a list that gets {"guessed", "accepted"} a round, or None
    Yields chunks of 1 to gamma + 1 tokens.
    """
    text = begin(prompt, target, draft)
    while True:
        guesses = []
        while len(guesses) < gamma:
            unseen = (text + guesses)[draft.length:]  # what the draft has not been fed
            logits = draft.forward(unseen)[-1:]  # [1, V]
            draft.commit(range(len(unseen)))
            # With a fallback of 0 the answer is known, and a GPU need not be waited for.
            if fallback > 0 and logits.float().softmax(-1).max() < fallback:
                break
            guesses += sample(logits, draft.places[-1:])
        logits = target.forward([text[-1], *guesses]).float()  # [n + 1, V]
        column = torch.tensor(guesses, dtype=torch.long, device=logits.device)[:, None]  # [n, 1]
        # Count the guesses before the first that does not pass
        accepted = int(passes(logits[:-1], column).cumprod(0).sum())
        [token] = sample(logits[accepted:accepted + 1], target.places[accepted:accepted + 1])
        chunk = [*guesses[:accepted], token]
        text += chunk
        target.commit(range(1 + accepted))
        # Both models forget the rejected guesses. After gamma guesses the draft was never fed the
        # last one. If it was too unsure to give another guess, it was fed all of them.
        draft.truncate(min(draft.length, len(text) - 1))
        log_round(log, guessed=len(guesses), accepted=accepted)
        yield chunk


def bild(target: EngineLM, draft: EngineLM, prompt: list[int], *, gamma: int = 5,
         fallback: float = 0.5, rollback: float = 2.0, sample: Sampler = greedy,
         log: list | None = None) -> Iterator[list[int]]:
    """Draft while the draft model is sure, and replace the first guess that the target finds too
    unlikely. Kim et al., Section 3. The method is lossy. Greedy output is the target's with
    rollback 0, or with a fallback above 1, where nothing is drafted.

    gamma:    tokens drafted a round, at most, 1 or more
    fallback: stop before a token where the draft's largest probability (at temperature 1) is below
              this, 0 or more
    rollback: reject a guess whose -log p under the target (nats, at temperature 1) is above this, 0
              or more

    Yields chunks of 1 to gamma + 1 tokens; logs {"guessed", "accepted"} a round.
    """
    def passes(logits: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
        log_p = logits.log_softmax(-1).gather(-1, guesses)
        return -log_p <= rollback
    return decode_by_test(passes, target, draft, prompt, gamma, fallback, sample, log)


def specdec(target: EngineLM, draft: EngineLM, prompt: list[int], *, gamma: int = 6, beta: int = 5,
            tau: float = 3.0, sample: Sampler = greedy, log: list | None = None):
    """Accept a guess if it is among the target's beta likeliest tokens and nearly as likely as the
    best of them. The target replaces the first guess that does not pass. Xia et al.,
    "Spec-Verification". The method is lossy. A guess that ends the answer passes by the same test,
    so an answer may end too early. Greedy output is the target's with beta 1 or tau 0. Then only
    the argmax passes, and no token that ties with it.

    gamma: tokens drafted a round (the paper's block), 1 or more
    beta:  a guess must be among this many likeliest tokens (β), 1 or more
    tau:   log p of a guess may be lower than log p of the best by this much (τ, in nats, at
           temperature 1), 0 or more

    Yields chunks of 1 to gamma + 1 tokens; logs {"guessed", "accepted"} a round.
    """
    def passes(logits: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
        if beta == 1 or tau == 0:
            return guesses == logits.argmax(-1, keepdim=True)
        # A row's logits are log p plus the same number for all tokens. Differences of logits are
        # differences of log p.
        guessed = logits.gather(-1, guesses)
        best = logits.amax(-1, keepdim=True)
        better = (logits > guessed).sum(-1, keepdim=True)
        return (better < beta) & (best - guessed <= tau)
    return decode_by_test(passes, target, draft, prompt, gamma, 0.0, sample, log)


COMMAND_LINE = dict(methods=[bild, specdec], lossy=[bild, specdec],
                    ranges={"gamma": (1, 2, 3, 4, 5, 6, 8, 10, 12)})

if __name__ == "__main__":
    run_as_program(__file__)
