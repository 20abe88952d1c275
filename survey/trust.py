"""This file replays answers for `python -m survey.hybrid fit`, and reads the file that `fit` makes.

Before each token of an answer, n-grams and trained parts are asked as in decoding. How far to trust
them is fitted to what they said (training/trust.py).
"""
from collections import Counter
from itertools import chain

from survey.eagle import Pairs
from survey.guessers import Trained
from survey.ngrams import SEEN, SOURCES, NGrams
from survey.recycling import Successors
from survey.rest import Datastore, as_text, as_tokens
from training.layers import FeatureLM, depth_of, tap_widths
from training.parts import load_facts, score_with

import torch
from tqdm import tqdm

CLASSES = len(SOURCES), len(SEEN) + 1, 3  # of entries: ngrams.py
LIKELY = 0.1  # the least chance of a token that does not end a round of `replay_part`


@torch.inference_mode()
def replay_answers(lm: FeatureLM, data: list[tuple], store: Datastore,
                   parts: dict[str, Trained]) -> tuple[str, list[list], dict[str, list[dict]]]:
    """Ask n-grams and trained parts before each token of answers, as decoding would.

    lm       the target
    data     pairs of a prompt and an answer
    store    the datastore of the n-grams
    parts    {kind of part: the part}
    returns  tokens, those of all answers as rest.as_text writes them. entries, for each token the
             list of what `list_entries` yields before it. guessed, for each kind of part a list of
             what `predict` returns before each token
    """
    tokens = ""
    entries = []
    guessed = {kind: [] for kind in parts}
    # The input of the LM head is always tapped, since it gives the target's logits.
    top = depth_of(lm.model)
    read = sorted({top, *chain(*(part.taps for part in parts.values()))})
    successors, score = Successors(), score_with(lm.model)
    for prompt, answer in tqdm(data, desc="answers"):
        ngrams = NGrams(as_text(prompt), store, [], successors)
        lm.start(prompt + answer, taps=read)
        tapped = dict(zip(read, lm.features.split(tap_widths(lm.model, read), -1)))
        said = score(tapped[top][len(prompt) - 1:])[:, :lm.vocab]  # [answer + 1, V]
        for i, token in enumerate(as_text(answer)):
            # The counts are copied, because they change as the text grows.
            entries.append([(group, Counter(x)) for group, x in ngrams.list_entries("")])
            before = as_tokens(ngrams.text[-1])
            ngrams.add(token)
            successors.learn(before, said[i][None], as_tokens(token))
        for kind, part in parts.items():
            features = torch.cat([tapped[i] for i in part.taps], -1)
            guessed[kind] += replay_part(part, prompt, answer, features)
        tokens += as_text(answer)
    return tokens, entries, guessed


def replay_part(part: Trained, prompt: list[int], answer: list[int],
                features: torch.Tensor) -> list[dict[str, float]]:
    """Ask a trained part before each token of an answer, in rounds as decoding has them.

    In decoding, a part often guesses below the root, where it is right less often. So a round goes
    on as long as the part gives the answer's tokens a chance of LIKELY or more. It ends at the
    part's depth at the latest.

    part      the part
    prompt    the tokens of the prompt
    answer    the tokens of the answer
    features  [n, d] of all tokens of the prompt and the answer
    returns   for each token of the answer what `predict` returned before it
    """
    text = prompt + answer
    part.start(Pairs(features[:len(prompt) - 1], prompt[1:]))
    root = len(prompt) - 1  # its place in the text
    guessed = []
    for i in range(len(prompt), len(text)):
        path = as_text(text[root + 1:i])
        guessed.append(part.predict(path))
        likely = guessed[-1].get(as_text(text[i:i + 1]), 0.0) >= LIKELY
        if not likely or len(path) + 1 == part.depth:
            # Row j of the features led to token j + 1.
            part.add(Pairs(features[root:i], text[root + 1:i + 1]))
            root = i
    return guessed


def load_trust(path: str, model) -> dict:
    """Read a file that `fit` made for this model.

    path     the file
    model    the model that the file must be for
    returns  a dictionary with "trust", as for `NGrams`, "pools", {guess: what `fit_pool` returned},
             and "parts", {guess: the part's fingerprint}. InputError if the file is damaged, or for
             another model
    """
    expected = "a file that `python -m survey.hybrid fit` made for this model"
    return load_facts(path, {"model": model}, expected, lambda facts: {
        name: facts[name] for name in ("trust", "pools", "parts")})
