"""A model drafts for itself through mask tokens after its text: no second model, no more layers.

pass_sampling  Monea et al., "PaSS: Parallel Speculative Sampling", arXiv 2311.13581. The model is
               frozen, and L look-ahead tokens are trained. One call drafts, the next one verifies
space          Yi et al., "Generation Meets Verification: Accelerating Large Language Model
               Inference with Smart Parallel Auto-Correct Decoding", arXiv 2402.11809. The model
               itself is tuned to fill in one mask token. Every call verifies and drafts

    python -m cli bita train --P 0 --M 4 --steps 300 --prompts FILE --out my.safetensors    # PaSS
    python -m survey.masks --tokens my.safetensors --prompt "..."
    python -m survey.masks tune --prompts FILE --out tuned.safetensors                      # SPACE
    python -m survey.masks --method space --tuning tuned.safetensors --prompt "..."

PaSS drafts with a chain of L look-ahead tokens LA. The output after each row is the token that
comes next there. With L = 3:

    draft call     sees: context  root  LA1  LA2  LA3     output
        root                x      x                      y0, from the model itself, so it is final
        LA1                 x      x     x                ŷ1, a guess
        LA2                 x      x     x    x           ŷ2, a guess
        LA3                 x      x     x    x    x      ŷ3, a guess

    next call      verifies the chain y0 ŷ1 ŷ2 ŷ3, and gives the accepted guesses and one token more

So two calls give 2 to L + 2 tokens: y0, up to L guesses, and the last one.

SPACE feeds the guesses of the last call, which its paper calls candidates. It puts k masks M after
the root and after each guess. With two guesses and k = 2:

                            context  root  ŷ1  ŷ2    M M    M M    M M
        root                   x      x                                     a chain, which is
        ŷ1                     x      x    x                                verified
        ŷ2                     x      x    x   x
        M M after the root     x      x              x x                    the next guesses, one
        M M after ŷ1           x      x    x                x x             group for each place
        M M after ŷ2           x      x    x   x                   x x      where the chain may end

Within a group the second M sees the first, and not the other way round. Suppose that ŷ1 is accepted
and ŷ2 is not. Then the next root is the token that the model chose after ŷ1. The first M after ŷ1
stands where this root will stand, so the group's outputs are guesses of the tokens after the root.
The other groups are thrown away.

Both methods are BiTA (../bita.py) with parts left out, and use its training:

    BiTA     prompt tokens, M different mask tokens, and a group of them after every guess. The
             model is frozen
    PaSS     no prompt tokens and only one group. After a guess that is still to be verified there
             are no masks, so that drafting needs a call of its own
    SPACE    no prompt tokens, and the same mask token k times. Instead the model itself is tuned

PaSS's tokens are trained by bita.py itself, with `--P 0`. SPACE is trained here.

Both trainings need `bita.mask_logits`. In one pass it puts a group of masks after each of many
places of an answer, and gives the logits of each mask. A mask sees the text up to its place, the
masks of its group before it, and itself.

PaSS is lossless. SPACE is lossless for the TUNED model, whose output it equals.

Departures:
- Training. Paper: PaSS and SPACE learn from given data, SPACE at one random place of an answer.
  Here: from the model's own answers, at many places, as BiTA does. Why: decoding meets these, and a
  pass over an answer teaches more. PaSS's settings are our own, since its code is unknown to us.
- The rule of PaSS. Paper: tokens are judged one by one. Here: `verify_block` of speculative.py
  judges them. Why: it is as exact, and on average accepts no fewer guesses.
- What SPACE tunes. Paper: all weights. Here: changes of low rank. Why: they are a small file.
- The loss of SPACE. Paper: a step has masks or plain text, with a cross-entropy, and gradients go
  through the text. Here: it has both, plain text has the divergence from the untuned model, and
  gradients stop at the text. Why: the tuned model should write what the untuned one wrote, and keys
  and values of the text are computed once for many places.
- k of SPACE. Paper: fixed. Here: the clock chooses it. Why: rows cost time on a CPU.
"""
import random
from pathlib import Path
from typing import Iterator

from bita import Tuning, attach_masks, load_tuning, mask_logits, sample_anchors, sar_loss
from common import CachedLM, Sampler, begin, greedy, walk
from speculative import verify_block as verify
from support.clock import Choice, recall
from support.engine import MODELS, EngineLM, log_round, require, run_as_program
from support.layers import move_counts
from support.parts import load_trained, score_with
from training.loop import divergence_in_parts, fit_part, report_right, warm_linear
from training.texts import measure_right, prepare_training, read_answers, sample_alike
from training.low_rank import Tuned, prepare_changes

import torch

TOKENS = f"{MODELS}/pass.safetensors"
TUNED = f"{MODELS}/space.safetensors"
TITLE = "a SPACE tuning"  # in its file, and in error messages
MOST = 4  # the most guesses of SPACE's calls, unless --k asks for more: `tune`'s default
PRIOR = 0.7  # for `Acceptance`. The embedded model's mask guesses 0.72 of the held-out tokens


# ---------------------------------------------------------------------------------- decoding

@torch.inference_mode()
def embed(lm: CachedLM, ids: list[int], masks: torch.Tensor) -> torch.Tensor:
    """Return the input embeddings [n + m, d] of n tokens and, after them, of masks [m, d]."""
    tokens = lm.model.get_input_embeddings()(torch.tensor(ids, device=masks.device))
    return torch.cat([tokens, masks])


def pass_sampling(target: EngineLM, prompt: list[int], *, L: int = 0, tokens: str = TOKENS,
                  trained: Tuning | None = None, sample: Sampler = greedy,
                  log: list | None = None) -> Iterator[list[int]]:
    """Draft in a call with look-ahead tokens, and verify in the next one (PaSS).

    L:      look-ahead tokens, 0 or more. With 0, all that were trained
    tokens: the file of the look-ahead tokens, made by `python -m cli bita train --P 0`

    Yields chunks of 2 to L + 2 tokens; logs {"guessed", "accepted"} a round.

    `trained` is used instead of the file.
    """
    trained = trained or target.once(load_tuning, tokens, target.model)
    lookahead = trained.masks.detach().to(target.weight)  # [L, d]
    require(trained.prompts.numel() == 0, "tokens", "a file without prompt tokens", repr(tokens))
    require(L <= len(lookahead), "L", f"at most {len(lookahead)}", L)
    lookahead = lookahead[:L or None]  # 0: all of them
    root = begin(prompt, target)[-1]
    while True:
        # Draft. The first token is sampled from the model's own row of the root, so it is final.
        # The others are guesses, each sampled from the row of a look-ahead token.
        logits = target.forward(embed(target, [root], lookahead))
        probs = sample.probs(logits, target.places)  # [1+L, V]
        first, *guesses = sample.draw(probs).tolist()
        target.commit([0])  # the rows of look-ahead tokens are no text, so they are dropped
        # Verify. `probs[1:]` are the distributions that the guesses were drawn from. One token more
        # comes from the residual of the rejected guess, or from the row of the last guess.
        target_probs = sample.probs(target.forward([first, *guesses]), target.places)  # [1+L, V]
        accepted, root = verify(target_probs, probs[1:], guesses, sample)
        target.commit(range(1 + accepted))
        log_round(log, guessed=len(guesses), accepted=accepted)
        yield [first, *guesses[:accepted], root]


def space(target: EngineLM, prompt: list[int], *, k: int = 0, tuning: str = TUNED,
          sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Verify guesses and make the next ones in the same call, with the tuned model (SPACE).

    Each row of root and guesses is sampled once, and the guesses were made before that. So the
    output has exactly the tuned model's distribution.

    k:      masks after the root and after each guess, 0 or more. With 0, as many as pay on this
            machine
    tuning: the file of the model's changes, made by `python -m survey.masks tune`

    Yields chunks of 1 to k + 1 tokens; logs {"guessed", "accepted", "rows"} a call.
    """
    lm, mask = target.once(load_space, tuning, target)
    target.memo["writer"] = lm.model
    chunk = begin(prompt, lm)[-1:]  # the last token of a chunk is the root of the next call
    move_counts(lm, target)  # the tuned model's passes are the target's in all figures
    learnt, clock = recall(target, PRIOR, (lm,))
    candidates = []  # guesses of the tokens after the root. The first call has none
    while True:
        m = k or clock.choose(lambda: plan_space(learnt.rates()[0]))
        candidates = candidates[:m]
        # Lay out a chain of root and guesses, then a group of m masks after each of these n.
        ids = [chunk[-1], *candidates]
        n = len(ids)
        chain = range(-1, n - 1)  # the parents of root and candidates
        parents = attach_masks(chain, range(n), m)
        logits = lm.forward(embed(lm, ids, mask.expand(n * m, -1)), parents)  # [n + n m, V]
        move_counts(lm, target)
        # Verify. The masks' rows have no part in it.
        path, chunk = walk(ids, chain, sample(logits[:n], lm.places[:n]))
        lm.commit(path)
        learnt.learn(chain, path)
        # The group after the last accepted node has the next guesses.
        groups = logits[n:].view(n, m, logits.shape[1])
        candidates = greedy(groups[path[-1]])
        log_round(log, guessed=n - 1, accepted=len(path) - 1, rows=len(parents))
        yield chunk


def plan_space(rate: float) -> Iterator[Choice]:
    """Yield what the clock chooses from, for SPACE: plans that are numbers k of guesses.

    A call has the root and k guesses, with k masks after each. These are (1 + k) (1 + k) rows.

    rate   how often a guess is right if all before it are
    """
    for k in range(1, 1 + MOST):
        # The i-th guess adds a token if it and all guesses before it are right.
        yield Choice(k, sum(rate ** i for i in range(1 + k)), (1 + k) ** 2)


# ---------------------------------------------------------------------------------- training

def tune(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None, k: int = 4,
         rank: int = 16, max_new_tokens: int = 200, steps: int = 300, batch: int = 8,
         anchors: int = 32, lr: float = 1e-3, seed: int = 0) -> None:
    """Train SPACE's mask token and low-rank changes of a model's layers on its own answers.

    This is the paper's semi-autoregressive fine-tuning, SAR-SFT. A stopped run goes on.

    k:       how many masks stand after a token, 1 or more
    rank:    the rank of each matrix's change, 1 or more
    anchors: the most tokens of an answer that have masks after them, 1 or more
    lr:      the highest learning rate, after a warm-up. 1e-3 was found for 10M parameters
    """
    # Masks are embeddings. A model that cannot be fed any is refused now.
    CachedLM(model).forward(model.get_input_embeddings().weight[:1])
    lessons = prepare_training(model, tokenizer, prompts, out, work, max_new_tokens, seed)
    tuning = make_tuning(model, rank, seed)
    tuned = tuning.model
    mask = tuning.changes["mask"]  # [1, d]
    score, V = score_with(model), len(model.get_output_embeddings().weight)

    def loss_of(rng: random.Random) -> torch.Tensor:
        pairs = sample_alike(lessons.data, batch, rng)
        ids, at, labels = sample_anchors(pairs, k, anchors, rng)
        masked = mask_logits(tuned, mask.expand(k, -1), [], ids, at)
        # On plain text the tuned model should say what the untuned one, its teacher, says.
        with torch.no_grad():
            teacher, _ = read_answers(model, pairs)
        student, _ = read_answers(tuned, pairs)
        plain = divergence_in_parts("forward-kl", score, score, V, teacher, student)
        return plain.mean() + sar_loss(masked, labels)

    @torch.inference_mode()
    def evaluate() -> tuple[dict, str]:
        right, same = [], random.Random(0)  # the same anchors each time
        for pair in lessons.held_out:
            ids, at, labels = sample_anchors([pair], k, anchors, same)
            guesses = mask_logits(tuned, mask.expand(k, -1), [], ids, at).argmax(-1).cpu()
            right.append((guesses == labels)[labels >= 0])  # no label is after the answer's end
        figures, line = report_right(right)
        kept = measure_right(tuned, lessons.held_out)
        return figures | {"kept": kept}, f"{line}, tokens kept {kept:.3f}"
    fit_part(tuning, model, (k, batch, anchors), lessons, loss_of, evaluate, name="space",
             steps=steps, lr=lr, rate=warm_linear, seed=seed, out=out)


def make_tuning(model, rank: int, seed: int = 0) -> Tuned:
    """Make a model that is tuned for SPACE. Its changes have the embedding "mask" [1, d], too.

    The arguments are those of `Tuned`.
    """
    tuning = Tuned(TITLE, model, rank, seed)
    # The mask is float32, because in bfloat16 a step of AdamW would round to nothing.
    mask = model.get_input_embeddings().weight.mean(0, keepdim=True, dtype=torch.float32)
    tuning.changes["mask"] = torch.nn.Parameter(mask)
    return tuning


def load_space(path: str | Path, target: EngineLM) -> tuple[EngineLM, torch.Tensor]:
    """Read a file that `tune` made for this model.

    path     the file
    target   the model that is not tuned. It stays as it is
    returns  the tuned model, and the embedding [1, d] of the mask token. InputError if the file is
             damaged, or for another model
    """
    tuning = load_trained(path, TITLE, target.model,
                          lambda header: make_tuning(target.model, header["rank"]))
    lm = type(target)(prepare_changes(tuning.model), target.vocab)
    return lm, tuning.changes["mask"].detach()


COMMAND_LINE = dict(methods=[pass_sampling, space], commands=[tune],
                    ranges={"L": (1, 2, 3, 4), "k": (1, 2, 3, 4)})

if __name__ == "__main__":
    run_as_program(__file__)
