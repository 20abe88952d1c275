"""This file reads texts with the target, for drafts that learn from its features."""
from typing import NamedTuple

import torch

from support.engine import EngineLM
from training.loop import low_precision, read_texts


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
def evaluate(draft, held_out: list[Text]) -> tuple[dict, str]:
    """Measure how often the likeliest guess of a draft is right, as `Training` asks for it.

    The draft reads true features here, and none that it guessed.

    draft     the draft, of EAGLE, EAGLE-3 or MTP
    held_out  texts with what the draft reads of them
    returns   the share of the tokens of all answers that are guessed, and a line to print
    """
    right = total = 0
    with low_precision(draft.lm.device, draft.lm):
        for ids, features, length in held_out:
            rows = len(ids) - max(2, length)  # row i guesses token i + 2
            if rows > 0:
                inputs = draft.join(features[:-2].to(draft.lm.device), ids[1:-1])
                logits = EngineLM(draft.lm).forward(inputs, keep=rows)
                guesses = draft.vocab[logits.argmax(-1)].cpu()
                right += (guesses == ids[-rows:]).sum().item()
                total += rows
    share = right / max(1, total)
    return {"right": share}, f"held-out guesses right {share:.3f}"
