"""Speculative decoding and sampling: a small draft model guesses, the target checks in one call.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192
Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling",
arXiv 2302.01318
Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444

    accept the draft's x ~ q with probability min(1, p(x) / q(x));
    at the first rejection draw from norm(max(0, p - q)) instead

p is the target's distribution and q the draft's, both after temperature, top-k and top-p. The
letters are Leviathan's. Chen swaps p and q, and writes K for γ. The code says `target_probs` and
`draft_probs`. `verify_tokens` is these two lines.

The default is this rule of the first two papers. Sun's rule is better. It is `verify_block`, below
the method, and `--verification block` asks for it. It judges the draft as a whole. On average it
accepts no fewer guesses, and at temperature 0 the same ones.

The method is lossless: its output has exactly the target's distribution. At temperature 0 p and q
are one-hot, and the output is the target's greedy output. With --coupling they are one-hot at every
temperature: draft and target sample by the numbers of the seed (Sampler in common.py), and a guess
is accepted if it is the target's sample. So the text is that of the seed, as with other methods.

A round with γ = 3 after "… the cat sat", where "the" is rejected:

    draft, 3 calls    sat ─> on       on ─> the       the ─> mat              x_i drawn from q_i
    target, 1 call    sat ─> p_1      on ─> p_2       the ─> p_3    mat ─> p_4
    verify_tokens     on: accepted    the: rejected   mat: not looked at
    chunk             on, my          "my" is drawn from norm(max(0, p_2 - q_2))

p_i is the target's distribution at the position of the guess x_i. The last one, p_4, is for the
token after a draft that is accepted as a whole, which vLLM calls the *bonus token*.

Departure:
- The length of a draft. Paper: always γ. Here: the draft ends after the first guess whose
  probability is below --confidence, if that is given, as transformers' drafts do. Why: guesses
  after an unlikely one are rarely accepted. The output stays exact: the decision to go on reads
  only guesses that are drawn already, so every x_i still comes from q_i. And whether x_i is the
  last guess depends on x_1 … x_i only, which is what `verify_block` needs.

Left out: lenience, which is lossy (Leviathan's App. A.5), and beam search (App. A.4).
"""
import sys
from typing import Iterator

from common import CachedLM, InputError, Sampler, begin, greedy, main

import torch


# ------------------------------------------------------------------- the rule: guess by guess
def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Compute norm(max(0, p - q)), the distribution that a token is drawn from after a rejection.

    p        [V], the target's distribution
    q        [V], the distribution of the rejected guess, or 0 after a draft accepted as a whole
    returns  [V]. If p equals q, nothing is left to draw from. Then only rounding can have rejected
             the guess, and p itself is returned
    """
    left = (p - q).clamp(min=0)
    return left / left.sum() if left.any() else p


def draw_next(probs: torch.Tensor, draft_probs: torch.Tensor, accepted: int,
              sample: Sampler) -> int:
    """Draw and return the token that follows the accepted guesses.

    probs         [γ+1, V], the target's distributions p_i. `verify_block` passes scaled ones
    draft_probs   [γ, V], the draft's distributions, which are subtracted
    accepted      how many guesses are accepted
    sample        the Sampler that draws the token
    """
    # After the last guess the draft has no distribution. With 0 for it nothing is subtracted, so
    # the token is drawn from p_{γ+1} itself.
    q = draft_probs[accepted] if accepted < len(draft_probs) else torch.tensor(0.0)
    return sample.draw(residual(probs[accepted], q)[None]).item()


def verify_tokens(target_probs: torch.Tensor, draft_probs: torch.Tensor, guesses: list[int],
                  sample: Sampler) -> tuple[int, int]:
    """Accept leading guesses, and draw the token after them. Leviathan, Alg. 1; Chen, Alg. 2.

    Why it is exact: x is guessed and accepted with probability q(x) min(1, p(x) / q(x)), which is
    min(p(x), q(x)). The rest, 1 - Σ min(p, q) = Σ max(0, p - q), is how often a guess is rejected.
    The drawn token is then x with probability max(0, p(x) - q(x)) divided by that sum. So x comes
    out with probability min(p(x), q(x)) + max(0, p(x) - q(x)) = p(x).

    target_probs  [γ+1, V], the target's distributions p_1 … p_{γ+1}
    draft_probs   [γ, V], the draft's distributions q_1 … q_γ
    guesses       γ tokens x_1 … x_γ, where x_i was drawn from q_i
    sample        the Sampler that flips the coins and draws the token
    returns       accepted, how many guesses are accepted (n); and token, the one after them (t)
    """
    x = torch.tensor(guesses, dtype=torch.long, device=target_probs.device)[:, None]  # [γ, 1]
    ratio = target_probs[:-1].gather(1, x) / draft_probs.gather(1, x)  # p(x) / q(x)
    # A coin u ~ U[0, 1) is below the ratio with probability min(1, p(x) / q(x)).
    passed = sample.uniform(ratio.shape, ratio.device) < ratio
    # A guess counts only if all before it passed, too.
    accepted = passed.cumprod(0).sum().item()
    return accepted, draw_next(target_probs, draft_probs, accepted, sample)


# --------------------------------------------------------------------------------- the method
def speculative(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6,
                confidence: float = 0.0, verification: str = "token", sample: Sampler = greedy,
                log: list | None = None) -> Iterator[list[int]]:
    """Draft gamma tokens one by one, and verify all of them in one target call.

    gamma: tokens drafted a round (γ), 1 or more
    confidence: the draft ends after the first guess that is less probable than this. The
        probability is the draft's before temperature, top-k and top-p. 0: always gamma tokens
    verification: token for Leviathan's and Chen's rule, block for Sun's

    Yields chunks of 1 to gamma + 1 tokens: the accepted guesses and one token more. For each round
    it logs {"guessed", "accepted"}, the numbers of guesses and of accepted guesses.
    """
    rules = {"token": verify_tokens, "block": verify_block}
    if gamma < 1 or not 0 <= confidence < 1 or verification not in rules:
        raise InputError("--gamma must be 1 or more, --confidence 0 or more and below 1, and "
                         f"--verification token or block, got {gamma=}, {confidence=}, "
                         f"{verification=}")
    verify = rules[verification]
    text = begin(prompt, target, draft)
    while True:
        # Leviathan, Alg. 1, first step: sample x_1 … x_γ from q_1 … q_γ, with a draft call for each
        guesses = []
        draft_probs = []
        while len(guesses) < gamma:
            # The draft model has yet to cache one token, or two after a draft that was accepted as
            # a whole: it was never fed its own last guess.
            unseen = (text + guesses)[draft.length:]
            logits = draft.forward(unseen)[-1:]  # [1, V]
            draft.commit(range(len(unseen)))
            q = sample.probs(logits, draft.places[-1:])  # [1, V]
            guesses += sample.draw(q).tolist()
            draft_probs.append(q)
            if confidence > 0 and logits.float().softmax(-1)[0, guesses[-1]] < confidence:
                break
        # Second step: compute p_1 … p_{γ+1} in one target call, [γ+1, V]
        target_probs = sample.probs(target.forward([text[-1], *guesses]), target.places)
        # Third to fifth step: count the accepted guesses, adjust p if one was rejected, and draw t
        accepted, token = verify(target_probs, torch.cat(draft_probs), guesses, sample)
        chunk = [*guesses[:accepted], token]
        text += chunk
        # Both models forget the rejected guesses. Neither has been fed the new last token. The
        # draft was not fed its last guess either. So after a whole draft it lacks two tokens.
        target.commit(range(1 + accepted))
        draft.truncate(min(draft.length, len(text) - 1))
        if log is not None:
            log.append({"guessed": len(guesses), "accepted": accepted})
        yield chunk


# --------------------------------------------------- the better rule: a draft judged as a whole
def verify_block(target_probs: torch.Tensor, draft_probs: torch.Tensor, guesses: list[int],
                 sample: Sampler) -> tuple[int, int]:
    """Accept leading guesses by looking at the whole draft. Sun et al., Algorithm 2.

    An example: q(x_1) = 0.4, p(x_1) = 0.2, and q(x_2) = 0.3, p(x_2) = 0.6. Both guesses together
    are as likely under the target as under the draft. This rule always accepts them, and
    `verify_tokens` rejects x_1 half of the time.

    The rule makes this true: given x_1 … x_i, with later guesses still random, the probability that
    at least i guesses are accepted is

        joint_0 = 1,    joint_i = min(1, joint_{i-1} p(x_i) / q(x_i))

    here       p      q      joint_i    accepted                 a coin for guess i
    in Sun     M_b    M_s    p_i        τ, the guesses kept      η_i

    A coin for each i says whether guess i is accepted, and with it all guesses before it. The coin
    passes with probability h_i. After the last guess nothing follows, so h_γ = joint_γ. Any other
    guess i is also accepted if a later one is. The probability of that is the mean of joint_{i+1}
    over the next guess x ~ q, where p and q are the distributions after i guesses:

        Σ_x min(joint_i p(x), q(x)) = joint_i - Z_i,    Z_i = Σ_x max(0, joint_i p(x) - q(x))

    Guess i is not accepted if its coin fails and no later guess is accepted. This determines h_i:

        1 - joint_i = (1 - h_i) (1 - (joint_i - Z_i)),    so    h_i = Z_i / (Z_i + 1 - joint_i)

    After i accepted guesses the next token is drawn from norm(max(0, joint_i p - q)), and after a
    whole draft from p. Given the first i guesses, exactly they are accepted with probability
    joint_i - (joint_i - Z_i) = Z_i. A token x follows them as a guess with probability
    min(joint_i p(x), q(x)), and as the drawn token with max(0, joint_i p(x) - q(x)). The sum is
    joint_i p(x). The i guesses stay with probability joint_i, so after them x has probability p(x),
    and the output is exact. Arguments and results are those of `verify_tokens`.
    """
    x = torch.tensor(guesses, dtype=torch.long, device=target_probs.device)[:, None]  # [γ, 1]
    ratios = target_probs[:-1].gather(1, x) / draft_probs.gather(1, x)  # p(x_i) / q(x_i)
    joint = torch.ones_like(target_probs[:, :1])  # [γ+1, 1], joint_0 … joint_γ
    for i, ratio in enumerate(ratios):
        joint[i + 1] = (joint[i] * ratio).clamp(max=1)
    scaled = joint * target_probs  # [γ+1, V], joint_i p(x)
    Z = (scaled[:-1] - draft_probs).clamp(min=0).sum(-1, keepdim=True)  # [γ, 1], Z_0 … Z_{γ-1}
    # If joint_i is 1 and p equals q after guess i, h_i is 0 / 0. Then joint_{i+1} is 1 too, and
    # guess i is accepted by a later coin, so any h_i will do.
    h = (Z / (Z + (1 - joint[:-1]))).nan_to_num(0)
    h = torch.cat([h, joint[-1:]])[1:]  # [γ, 1], h_1 … h_γ, without h_0
    passed = sample.uniform(h.shape, h.device) < h
    # The last coin that passes counts, even if coins before it failed.
    accepted = max((i for i, coin in enumerate(passed[:, 0].tolist(), 1) if coin), default=0)
    return accepted, draw_next(scaled, draft_probs, accepted, sample)


# ------------------------------------------------------------------------- the command line
def predict(gamma: float, alpha: float, c: float) -> tuple[float, float]:
    """Return the tokens per call that Leviathan's Eq. 1 predicts, and Theorem 3.8's speed-up.

    Both assume drafts of equal length, `verify_tokens`, and that each tried guess is accepted with
    probability alpha whatever became of the others. Theorem 3.8 takes a call that verifies to cost
    as much as a call with one row. If it costs more, the speed-up is smaller.

    gamma   guesses of a round (γ)
    alpha   the share of accepted guesses, of those up to the first rejected one of each round (α)
    c       the time of a draft call divided by that of a target call
    """
    per_call = gamma + 1  # the limit of the formula for α = 1, where it would divide by 0
    if alpha < 1:
        per_call = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return per_call, per_call / (gamma * c + 1)


def report(run) -> str:
    """Return two lines: how many guesses were accepted, and the speed-up that this predicts.

    run   the record that cli/ keeps of a run: its models, with their calls and seconds, and its log
    """
    target, draft = run.models.values()
    guessed = sum(r["guessed"] for r in run.log)
    accepted = sum(r["accepted"] for r in run.log)
    # A round rejects one guess, unless all are accepted or the end of the answer cut the round off.
    tried = accepted + sum(r["accepted"] < r["guessed"] and "cut" not in r for r in run.log)
    alpha = accepted / max(tried, 1)
    c = (draft.seconds / draft.calls) / (target.seconds / target.calls)
    per_call, speed_up = predict(guessed / len(run.log), alpha, c)
    return (f"accepted {accepted} of {guessed} drafted tokens, {accepted / len(run.log):.2f} a "
            f"round; {draft.calls} draft calls\nacceptance rate {alpha:.1%} of {tried} tried; "
            f"predicted from it, a draft call costing {c:.2f} of a target call: {per_call:.2f} "
            f"tokens per call, speed-up {speed_up:.2f}x")


COMMAND_LINE = dict(methods=[speculative], report=report,
                    ranges={"gamma": (1, 2, 3, 4, 5, 6, 8, 10, 12)})

if __name__ == "__main__":
    sys.exit(main(**COMMAND_LINE))
