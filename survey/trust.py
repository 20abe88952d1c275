"""`python -m survey.hybrid fit` measures how far hybrid.py trusts n-grams and trained parts.

The answers of a model are replayed: before each of their tokens, n-grams and parts are asked as in
decoding. What makes these tokens likeliest is fitted (training/trust.py) and kept in a file.
"""
from collections import Counter
from itertools import chain
from pathlib import Path

from survey.eagle import Pairs
from survey.guessers import GUESSES, Trained
from survey.ngrams import SEEN, SOURCES, NGrams, mix_entries
from survey.recycling import Successors
from survey.rest import BEGIN, BOUNDARY, DATASTORE, Datastore, as_text, as_tokens, load_datastore
from training.layers import FeatureLM, depth_of, tap_target, tap_widths
from training.loop import collect_all
from training.parts import MODELS, load_facts, save_facts, score_with
from training.released import some_weights
from training.trust import fit_pool, fit_trust

import torch
from tqdm import tqdm

CLASSES = len(SOURCES), len(SEEN) + 1, 3  # of entries: ngrams.py
LIKELY = 0.1  # the least chance of a token that does not end a round of `replay_part`


def fit(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
        datastore: str = DATASTORE, adapters: str = MODELS, max_new_tokens: int = 200) -> None:
    """Measure on a model's own answers how far to trust n-grams, and trained parts beside them.

    The result is the trust of each class of entries (ngrams.py), and for each trained part how its
    guesses are joined with theirs. The parts should not have been trained on these prompts.

    out:       the JSON file to make
    work:      the folder of answers, by default OUT.work
    datastore: a file made by `python -m survey.rest build`, from which these answers are left out
    adapters:  the folder of medusa.safetensors, hydra.safetensors, eagle.safetensors,
               eagle3.safetensors and dflash.safetensors, or of some of them
    max_new_tokens: the most tokens of an answer
    """
    data = collect_all(model, tokenizer, prompts, out, work, max_new_tokens)
    # Leave these answers out of the datastore, which would know them all by heart. A text of the
    # datastore begins with BEGIN tokens of a prompt. The tokens behind these tell whether it is one
    # of the answers.
    few = min(32, max_new_tokens)
    begins = {as_text(answer[:few]) for _, answer in data}
    texts = load_datastore(datastore, model).text.split(BOUNDARY)
    store = Datastore(BOUNDARY.join(x for x in texts if x[BEGIN:BEGIN + few] not in begins))
    lm = FeatureLM(model)
    parts = {}
    for kind in GUESSES[1:]:
        path = Path(adapters) / f"{kind}.safetensors"
        if path.exists():
            parts[kind] = Trained(lm, kind, str(path))
    tokens, entries, guessed = replay_answers(lm, data, store, parts)
    # For each entry before a token: its class, and the token's share of the followers.
    chains = []
    for token, found in zip(tokens, entries):
        chains.append([(group, counts[token] / counts.total()) for group, counts in found])
    trust = fit_trust(chains, CLASSES)
    by_ngrams = [mix_entries(found, trust) for found in entries]
    pools = {kind: fit_pool(tokens, p, by_ngrams) for kind, p in guessed.items()}
    fingerprints = {kind: some_weights(part.part) for kind, part in parts.items()}
    save_facts(out, {"model": model}, trust=trust, pools={"none": []} | pools, parts=fingerprints)
    print(f"{len(tokens):,} tokens; c, a, b and the share of the n-grams' errors that each part "
          f"mends: {pools}")


@torch.inference_mode()
def replay_answers(lm: FeatureLM, data: list[tuple], store: Datastore,
                   parts: dict[str, Trained]) -> tuple[str, list[list], dict[str, list[float]]]:
    """Ask n-grams and trained parts before each token of answers, as decoding would.

    lm       the target
    data     pairs of a prompt and an answer
    store    the datastore of the n-grams
    parts    {kind of part: the part}
    returns  tokens, those of all answers as one text, entries, which has for each token what
             `list_entries` yields before it, and {kind of part: what `predict` gave before each}
    """
    tokens = ""
    entries = []
    guessed = {kind: [] for kind in parts}
    # What the LM head reads is tapped in any case, for the target's logits.
    read = sorted({depth_of(lm.model), *chain(*(part.taps for part in parts.values()))})
    successors, score = Successors(), score_with(lm.model)
    for prompt, answer in tqdm(data, desc="answers"):
        ngrams = NGrams(as_text(prompt), store, [], successors)
        with tap_target(lm, read):
            lm.start(prompt + answer)
        tapped = dict(zip(read, lm.features.split(tap_widths(lm.model, read), -1)))
        said = score(tapped[read[-1]][len(prompt) - 1:])[:, :lm.vocab]
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

    Deeper guesses are worth less than those at the root. So a round goes on as long as the part
    gives the answer's tokens a chance of LIKELY or more, and it has guesses for the depth.

    part      the part
    features  of all tokens of the prompt and the answer
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
    def parse(facts: dict) -> dict:
        numbers = torch.tensor(facts["trust"])
        pools = torch.tensor([pool for pool in facts["pools"].values() if pool])
        if numbers.shape != CLASSES or pools.shape[1:] not in ((), (4,)):
            raise ValueError("not 3 x 5 x 3 numbers, and 4 numbers a part")
        if facts["parts"].keys() | {"none"} != facts["pools"].keys():
            raise ValueError("not a fingerprint for each part")
        return facts
    expected = "a file that `python -m survey.hybrid fit` made for this model"
    return load_facts(path, {"model": model}, expected, parse)
