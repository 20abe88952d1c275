"""This file reads texts with the target, and measures how often drafts guess right on them."""
from typing import NamedTuple

import torch

from support.clock import RANKS
from support.engine import EngineLM
from training.loop import low_precision, read_texts

LEVELS = 8  # the most levels of guesses that a tree has


class Text(NamedTuple):
    """Hold a prompt with its answer, and what the target computed of it."""
    ids: torch.Tensor  # [T]
    features: torch.Tensor  # bfloat16 [T, f], what was tapped, or what the LM head read
    length: int  # of the prompt


def compute_features(model, data: list[tuple[list[int], list[int]]],
                     taps: list[int] | None) -> list[Text]:
    """Run the target over pairs of a prompt and its answer.

    taps   the layers whose inputs are the features. None: the features are what the LM head reads
    """
    texts = [prompt + answer for prompt, answer in data]
    return [Text(torch.tensor(text), f, len(prompt))
            for (prompt, _), text, f in zip(data, texts, read_texts(model, texts, taps))]


@torch.inference_mode()
def measure_acceptance(draft, held_out: list[Text]) -> list[list[float]]:
    """Measure how often guesses are right on the path that a static tree reaches most often.

    draft     the draft, of EAGLE, EAGLE-3 or MTP
    held_out  texts with their features
    returns   accept[n][r]: how often guess r is right after n guessed features. Only rows count
              whose n earlier likeliest guesses are all right

    The tokens of an answer are guessed again, step by step. All steps of a text are one pending
    tree of the draft, here of a text t_0 … t_5:

        guesses      t_2  t_3  t_4  t_5
        step 0 rows   0 ── 1 ── 2 ── 3    row i reads the text's f_i
                        ╲    ╲    ╲
        step 1 rows       1'   2'   3'    row i' reads what row i-1 guessed
                             ╲    ╲
        step 2 rows            2"   3"    row i" reads what row (i-1)' guessed

    A line leads from a row down to the row that hangs below it. Every row reads the text's own
    token t_{i+1}. So row 3" sees the rows 0, 1, 2' and itself, which read two features of the text
    and then two guessed ones.
    """
    ranks = min(RANKS, len(draft.vocab))
    hits, total = torch.zeros(LEVELS, ranks), torch.zeros(LEVELS, 1)
    for ids, features, length in held_out:
        first = max(0, length - 2)  # the first row that guesses a token of the answer
        lm = EngineLM(draft.lm)
        features, tokens = features[:-2].to(draft.lm.device), ids[1:-1]
        above = None  # the rows of step 0 are a chain
        reached = torch.ones(len(ids), 1, dtype=torch.bool, device=draft.vocab.device)
        for n in range(min(LEVELS, len(ids) - 2 - first)):
            logits = lm.forward(draft.join(features, tokens), above)
            labels = ids[first + n + 2:].to(logits.device)
            rows = len(labels)
            best = draft.vocab[logits[-rows:].topk(ranks).indices]  # [rows, ranks]
            reached = reached[:rows]
            right = (best == labels[:, None]) & reached
            hits[n] += right.sum(0).cpu()
            total[n] += reached.sum().cpu()
            reached = right[:, :1]
            # The next step's rows hang below all rows of this step but its last. That one has no
            # successor: the text ends.
            above = range(len(lm.parents) - rows, len(lm.parents) - 1)
            features, tokens = lm.features[-rows:-1], ids[first + n + 2:-1]
    return (hits / total.clamp(min=1)).tolist()


def evaluate(draft, held_out: list[Text]) -> tuple[dict, str]:
    """Measure the acceptance of a draft that is being trained, as `Training` asks for it.

    draft     the draft, of EAGLE, EAGLE-3 or MTP
    held_out  texts with what the draft reads of them
    returns   {"accept": the table}, and a line to print
    """
    with low_precision(draft.lm.device, draft.lm):
        accept = measure_acceptance(draft, held_out)
    return {"accept": accept}, f"held-out acceptance {[round(ranks[0], 3) for ranks in accept]}"
