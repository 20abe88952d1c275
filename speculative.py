"""Speculative decoding and sampling: a small draft model guesses, the target checks in one call.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192
Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling",
arXiv 2302.01318
Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444

    accept the draft's x ~ q with probability min(1, p(x) / q(x));
    at the first rejection draw from norm(max(0, p - q)) instead

p is the target's distribution and q the draft's, both after temperature, top-k and top-p. The
letters are Leviathan's, and Chen swaps them. In the code they are `target_probs` and `draft_probs`.

The method is lossless: its output has exactly the target's distribution. At temperature 0 both p
and q are one-hot, and the output is the target's greedy output.

This rule looks at one token after the other (`verify_tokens`). Sun's rule looks at the whole draft
(`verify_block`), has the same distribution, and never accepts fewer tokens on average. So it is the
default. At temperature 0 both rules accept the same guesses.

A round with γ = 3 after "… the cat sat", where "my" is rejected:

    draft, 3 calls    sat ─> on       on ─> my       my ─> hat              x_i drawn from q_i
    target, 1 call    sat ─> p_1      on ─> p_2      my ─> p_3    hat ─> p_4
    verify tokens     on: accepted    my: rejected   hat: not looked at
    chunk             on, the         "the" is drawn from norm(max(0, p_2 - q_2))

The target is fed the root and all guesses, and gives a distribution after each of them. So p_i
stands in the place of the guess x_i. The last one, p_4, is for the token after a draft that is
accepted as a whole.

With --confidence the draft ends after the first guess that it finds less likely than that. The
unsure guess is verified too, since it is drawn already. Whether another guess follows is decided
before it is drawn, by the guesses so far alone. So both rules stay exact at every temperature.
Counted on 18 held-out prompts of the embedded pair, greedy and with γ = 6, a confidence of 0.4
leaves out 22% of the draft's calls, for 3% more of the target's. Its speed was not measured, so the
default is 0.

Departures: none.

Left out:
    batches       one text at a time is what the method makes faster
    lenience      Leviathan's App. A.5 accepts more guesses and is lossy
    beam search   Leviathan's App. A.4
"""
import sys
from typing import Iterator

from common import CachedLM, InputError, Sampler, greedy

import torch
import torch.nn.functional as F


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Compute norm(max(0, p - q)), the distribution that a token is drawn from after a rejection.

    p        [..., V], the target's distribution
    q        [..., V], the distribution that the rejected guess was drawn from
    returns  [..., V]. Where p equals q nothing is left to draw from, and p itself is returned. Only
             rounding can have rejected a guess there
    """
    left = (p - q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    # An `if` on `total` would make the CPU wait until a GPU has computed it.
    return torch.where(total > 0, left / total, p)


def draw_next(probs: torch.Tensor, draft_probs: torch.Tensor, accepted: torch.Tensor,
              sample: Sampler) -> tuple[int, int]:
    """Draw the token that follows the accepted guesses.

    probs         [γ+1, V], the target's distribution in each place, or a share of it
    draft_probs   [γ, V], the draft's distributions, which are taken off and the rest normalised
    accepted      [1], how many guesses are accepted
    sample        the Sampler that draws the token
    returns       how many guesses are accepted, and the token
    """
    # Behind the last guess the draft has no distribution. With 0 in its place nothing is taken off,
    # and the token is drawn from p_{γ+1} itself.
    q = F.pad(draft_probs, (0, 0, 0, 1))  # [γ+1, V]
    token = sample.draw(residual(probs[accepted], q[accepted]))  # [1]
    # Both numbers leave a GPU together, since the CPU waits each time.
    accepted, token = torch.cat([accepted, token]).tolist()
    return accepted, token


def verify_tokens(target_probs: torch.Tensor, draft_probs: torch.Tensor, guesses: list[int],
                  sample: Sampler) -> tuple[int, int]:
    """Accept leading guesses, and draw the token after them. Leviathan, Alg. 1; Chen, Theorem 1.

    target_probs  [γ+1, V], the target's distributions p_1 … p_{γ+1}
    draft_probs   [γ, V], the draft's distributions q_1 … q_γ
    guesses       γ tokens x_1 … x_γ, where x_i was drawn from q_i
    sample        the Sampler that flips the coins and draws the token
    returns       accepted, how many guesses are accepted; and token, which follows the accepted
                  guesses
    """
    x = torch.tensor(guesses, dtype=torch.long, device=target_probs.device)[:, None]  # [γ, 1]
    ratio = target_probs[:-1].gather(1, x) / draft_probs.gather(1, x)  # p(x) / q(x)
    # A coin u ~ U[0, 1) is below the ratio with probability min(1, p(x) / q(x)).
    passed = sample.uniform(ratio.shape, ratio.device) < ratio
    # Count the guesses before the first that does not pass. Guesses behind it do not count, also
    # where they pass, since the target was fed the wrong token before them.
    accepted = passed.cumprod(0).sum(0)  # [1]
    return draw_next(target_probs, draft_probs, accepted, sample)


def verify_block(target_probs: torch.Tensor, draft_probs: torch.Tensor, guesses: list[int],
                 sample: Sampler) -> tuple[int, int]:
    """Accept leading guesses by looking at the whole draft. Sun et al., Algorithm 2.

    Let p(x_1) be half of q(x_1), and p(x_2) twice q(x_2). Then both guesses together are as likely
    under the target as under the draft. `verify_tokens` rejects x_1 half of the time all the same,
    and here both are always accepted. The paper writes p_i for a number (the header's p_i are
    distributions): the probability that the first i guesses are accepted, with or without those
    behind them. Below, p(x) and q(x) are what the target and the draft say of the next token x
    after i guesses, and p(x_i) and q(x_i) what they say of guess i:

        p_0 = 1,    p_i = min(1, p_{i-1} p(x_i) / q(x_i))

    A coin for each i says whether guess i is accepted, and with it all guesses before it. The coin
    passes with the chance h_i. No guess stands behind the last one, so h_γ = p_γ. Any other guess i
    is also accepted if a later one is. The probability of that is the mean of p_{i+1} over the next
    guess x ~ q, which is Σ_x min(p_i p(x), q(x)) = p_i - Z_i. Guess i fails if neither happens:

        Z_i = Σ_x max(0, p_i p(x) - q(x))
        1 - p_i = (1 - h_i) (1 - (p_i - Z_i)),    so    h_i = Z_i / (Z_i + 1 - p_i)

    After i accepted guesses the next token is drawn from norm(max(0, p_i p - q)), and after a whole
    draft from p. The arguments and what is returned are those of `verify_tokens`.
    """
    x = torch.tensor(guesses, dtype=torch.long, device=target_probs.device)[:, None]  # [γ, 1]
    ratios = target_probs[:-1].gather(1, x) / draft_probs.gather(1, x)  # p(x_i) / q(x_i)
    kept = [target_probs.new_ones(1)]  # p_0, p_1, …, p_γ
    for ratio in ratios:
        kept.append((kept[-1] * ratio).clamp(max=1))
    p = torch.stack(kept)  # [γ+1, 1]
    scaled = p * target_probs  # [γ+1, V], p_i p(x) for i = 0 … γ
    Z = (scaled[:-1] - draft_probs).clamp(min=0).sum(-1, keepdim=True)  # [γ, 1], Z_0 … Z_{γ-1}
    # Where p_i is 1 and Z_i is 0, h_i would be 0 / 0. No coin is below that, and none needs to be:
    # the target and the draft say the same of the next token, so that p_{i+1} is 1 as well.
    h = torch.cat([Z / (Z + 1 - p[:-1]), p[-1:]])[1:]  # h_1 … h_γ
    passed = sample.uniform(h.shape, h.device) < h
    # The last coin that passes counts, also where coins before it do not. In front of them stands
    # a coin for i = 0, no guess at all, which always passes.
    numbers = torch.arange(1 + len(guesses), device=h.device)[:, None]
    accepted = (numbers * F.pad(passed, (0, 0, 1, 0), value=True)).amax(0)  # [1]
    # The token is drawn as in verify_tokens, but p_i p(x) stands in the place of p(x).
    return draw_next(scaled, draft_probs, accepted, sample)


VERIFICATIONS = {"token": verify_tokens, "block": verify_block}  # by the option's values


def speculative(target: CachedLM, draft: CachedLM, prompt: list[int], *, gamma: int = 6,
                confidence: float = 0.0, verification: str = "block", sample: Sampler = greedy,
                log: list | None = None) -> Iterator[list[int]]:
    """Draft gamma tokens one by one, and verify all of them in one target call. The chunk is the
    accepted tokens and one more that is drawn from the target.

    gamma: tokens drafted a round (γ), 1 or more
    confidence: a probability. The draft ends after the first guess that is less likely by the
        draft's own distribution, which no temperature changed. With 0 it drafts gamma tokens
    verification: token for Leviathan's and Chen's rule, block for Sun's. At temperature 0 both
        accept the same tokens

    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted"} a round. These are the
    numbers of drafted tokens and of those that the target accepted.
    """
    if gamma < 1:
        raise InputError(f"--gamma must be 1 or more, got {gamma}")
    if not 0 <= confidence < 1:
        raise InputError(f"--confidence must be 0 or more and below 1, got {confidence}")
    if verification not in VERIFICATIONS:
        raise InputError(f"--verification must be token or block, got {verification!r}")
    target.start(prompt[:-1])
    draft.start(prompt[:-1])
    root = prompt[-1]
    unseen = [root]  # final tokens that the draft has not been fed, the root last
    verify = VERIFICATIONS[verification]
    while True:
        # Leviathan, Alg. 1, first step: sample x_1 … x_γ from q_1 … q_γ, with a draft call for each
        drawn = []
        draft_probs = []
        feed = unseen
        for _ in range(gamma):
            logits = draft.forward(feed)
            q = sample.probs(logits[-1:])  # [1, V]
            feed = sample.draw(q)  # [1]; it stays on the device, and the CPU need not wait for it
            draft_probs.append(q)
            drawn.append(feed)
            if confidence > 0 and logits[-1].float().softmax(-1)[feed] < confidence:
                break
        guesses = torch.cat(drawn).tolist()
        # Second step: compute p_1 … p_{γ+1} in one target call
        logits = target.forward([root, *guesses])
        target_probs = sample.probs(logits)  # [γ+1, V]
        # Third and fourth step: count the accepted guesses, and draw one more token. Without that
        # token a round whose first guess is rejected would add nothing to the text.
        accepted, token = verify(target_probs, torch.cat(draft_probs), guesses, sample)
        # Keep the rows of what became final. The target was fed the root and all guesses. The draft
        # was fed `unseen` and all guesses but the last one.
        target.commit(range(1 + accepted))
        draft.commit(range(len(unseen) + min(accepted, len(guesses) - 1)))
        root = token
        unseen = [root]
        if accepted == len(guesses):  # the last guess is final, and the draft was never fed it
            unseen = [guesses[-1], root]
        if log is not None:
            log.append({"drafted": len(guesses), "accepted": accepted})
        # Last step: the text grows by the accepted guesses and the token
        yield [*guesses[:accepted], token]


# ------------------------------------------------------------------------- the command line

def report_acceptance(run) -> str:
    """Return a line that counts the drafted tokens, the accepted tokens and the draft calls.

    run   a run of the command line. Its target may have any number of draft models
    """
    _, *drafts = run.models.values()
    drafted = sum(r["drafted"] for r in run.log)
    accepted = sum(r["accepted"] for r in run.log)
    calls = sum(draft.calls for draft in drafts)
    return (f"accepted {accepted} of {drafted} drafted tokens, {accepted / len(run.log):.2f} a "
            f"round; {calls} draft calls")


def count_tried(record: dict) -> int:
    """Count the guesses of a round that were tried.

    A round tries every guess up to the first rejected one, or all of them where none is rejected.

    record    what the method logged for the round
    returns   a number from 1 to "drafted", or a smaller one where `until` cut the round's chunk
    """
    if "cut" in record:  # every guess that was kept was accepted, and those behind it do not count
        return record["accepted"]
    return min(record["accepted"] + 1, record["drafted"])


def report(run) -> str:
    """Return lines with the acceptance rate α of a run and the speed-up that α predicts.

    The prediction is Leviathan's Theorem 3.8. In the theorem c is the time of a draft call over the
    time of a target call, and both are taken from this run. After block verification α is the rate
    that `verify_tokens` would need to accept as much. If drafts end early, γ is their mean length.

    run   a run of the command line
    """
    target = run.models["target"]
    draft = run.models["draft"]
    tried = sum(map(count_tried, run.log))
    alpha = sum(r["accepted"] for r in run.log) / tried
    gamma = sum(r["drafted"] for r in run.log) / len(run.log)
    c = (draft.seconds / draft.calls) / (target.seconds / target.calls)
    per_call = gamma + 1  # the limit of the formula for α = 1, where it would divide by 0
    if alpha < 1:
        per_call = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return (f"{report_acceptance(run)}\nacceptance rate {alpha:.1%} of {tried} tried; predicted "
            f"from it, a draft call costing {c:.2f} of a target call: {per_call:.2f} tokens per "
            f"call, speed-up {per_call / (gamma * c + 1):.2f}x")


if __name__ == "__main__":
    from cli.main import main  # the command line is in cli/, a folder of this project
    sys.exit(main([speculative], report, ranges={"gamma": (1, 2, 3, 4, 5, 6, 8, 10, 12)}))
