"""A layer that guesses on from its own guesses is trained on what it guessed itself.

EAGLE-3's layer (eagle3.py) and an MTP block (mtp.py) read a feature of the target and the token
after it. Below a guess there is no such feature, and they read what they made themselves. A layer
that was trained on the target's features alone has never read that. So training does what decoding
will do, the *training-time test* of Li et al., arXiv 2503.01840, Section 3.2. The layer makes
several passes over a text, and pass n reads what pass n - 1 gave. Row j of pass n stands for the
row of a guess, n levels below row j of the text:

    pass 0   reads g_j      and t_{j+1}   sees pass 0 up to j               guesses t_{j+2}
    pass 1   reads a of j   and t_{j+2}   sees pass 0 up to j, itself       guesses t_{j+3}
    pass 2   reads a of j   and t_{j+3}   sees pass 0 up to j, rows j of    guesses t_{j+4}
                                          pass 1 and pass 2

    g_j   the target's feature
    a     what the layer gave in the pass before

    loss = Σ_n decay^n CrossEntropy(target's distribution, the guess of pass n)
"""
import math
import random
from typing import Callable

from support.engine import tap_layers
from support.parts import Part
from training.loop import fit_part, measure_guesses, warm_linear
from training.texts import Lessons, compute_features, pad_pairs, sample_alike

import torch
import torch.nn.functional as F
from transformers import DynamicCache


@torch.no_grad()
def read_target(model, taps: list | None, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the frozen target over texts [B, T] that were padded at their ends.

    returns  what is tapped [B, T, t], where t is the width of all taps, and what the target's LM
             head reads [B, T, f]
    """
    seen, last = [], []
    with tap_layers(model, taps, seen), tap_layers(model, None, last):
        model.get_decoder()(input_ids=ids, use_cache=False)
    return torch.cat(seen, -1), last[0]


@torch.no_grad()
def choose_lessons(draft: Part, ids: torch.Tensor, answers: torch.Tensor,
                   hidden: torch.Tensor, score: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the tokens to be learned, and compute the target's distributions of them.

    ids        [B, T]
    answers    bool [B, T - 1], where the next token is of an answer (`pad_pairs`)
    hidden     [B, T, f], what the target's LM head reads
    score      turns rows of `hidden` into logits of the draft's vocabulary (parts.score_with)
    returns    learns and probs, as `unroll_loss` takes them
    """
    # A token that the draft cannot guess teaches it nothing. Rows are chosen before the LM head,
    # which is most of the work.
    learns = answers & torch.isin(ids[:, 1:], draft.vocab)
    probs = score(hidden[:, :-1][learns]).softmax(-1)
    return F.pad(learns, (1, 0)), probs  # by the token's place, not by the row before it


def unroll_loss(draft: Part, score: Callable, ids: torch.Tensor, features: torch.Tensor,
                learns: torch.Tensor, probs: torch.Tensor, passes: int) -> torch.Tensor:
    """Compute the loss of the training-time test.

    draft     the layer, whose `decay` is the weight of a pass over that of the pass before
    score     turns what the layer gives into logits of the draft's vocabulary
    ids       [B, T], texts that were padded at their ends
    features  [B, T, t], what was tapped, where t is the width of all taps
    learns    bool [B, T], which tokens are learned
    probs     [N, D], for each learned token the target's distribution over the draft's vocabulary
    passes    how often the layer runs
    returns   Σ_n decay^n times the mean loss of the guesses of pass n that are learned
    """
    R = ids.shape[1] - 2
    number = learns.flatten().cumsum(0).view(learns.shape) - 1  # the row of `probs` of each token
    cache = DynamicCache()  # holds the rows of all passes, and gradients flow through it
    total = 0.0
    own = torch.eye(R, dtype=torch.bool, device=ids.device)
    sees = [torch.ones_like(own).tril()]  # for each pass so far, which of its rows a row sees
    g = features[:, :R]
    for n in range(min(passes, R)):
        # Row j reads t_{j+1+n}. The last n rows have none: they read any token, and learn nothing.
        tokens = F.pad(ids[:, 1 + n:-1], (0, n))
        inputs = draft.join(g, tokens)
        mask = torch.where(torch.cat(sees, 1), 0.0, -torch.inf).to(inputs)
        mask = mask.expand(len(ids), 1, -1, -1)  # [B, 1, R, (n + 1) R]
        places = torch.arange(n, R + n, device=ids.device)[None]
        g = draft.lm.get_decoder()(inputs_embeds=inputs, position_ids=places, attention_mask=mask,
                                   past_key_values=cache, use_cache=True)[0]  # a of pass n
        # Row j guesses t_{j+2+n}.
        learned = learns[:, 2 + n:]
        logits = score(g[:, :R - n][learned]).float()
        each = F.cross_entropy(logits, probs[number[:, 2 + n:][learned]], reduction="none")
        # The draft's vocabulary may lack all tokens of a pass. The mean of none would be NaN.
        total = total + draft.decay ** n * (each.mean() if len(each) else each.sum())
        sees.append(own)
    return total


def fit_unrolled(draft: Part, model, lessons: Lessons, score_target: Callable, score: Callable, *,
                 batch: int, passes: int, **how) -> None:
    """Train a draft beside a frozen model by the training-time test.

    draft         the draft, of EAGLE-3 or MTP
    score_target  as `score` of `choose_lessons`
    score         as for `unroll_loss`
    batch         how many pairs a step learns from
    passes        how often the layer runs in a step

    The other arguments are those of `fit_part`.
    """
    texts = compute_features(model, lessons.held_out, draft.taps)

    def loss_of(rng: random.Random) -> torch.Tensor:
        pairs = sample_alike(lessons.data, batch, rng)
        ids, answers = (x.to(model.device) for x in pad_pairs(pairs))
        features, hidden = read_target(model, draft.taps, ids)
        learns, probs = choose_lessons(draft, ids, answers, hidden, score_target)
        return unroll_loss(draft, score, ids, features, learns, probs, passes)
    # Each value of a gradient is cut to ± 0.5, as in EAGLE's released code.
    fit_part(draft, model, (batch, passes), lessons, loss_of, lambda: measure_guesses(draft, texts),
             rate=warm_linear, max_norm=math.inf, max_value=0.5, **how)
