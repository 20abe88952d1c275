"""This file measures on a model's own answers how far to trust guesses of several sources.

    python -m hybrid fit --prompts FILE --out hybrid.json

Before each token of an answer, n-grams and trained parts are asked as in decoding. Their guesses
are replayed, and these are fitted to them:

    fit_trust      the trust of each class of n-grams, by EM (ngrams.py)
    fit_pool       the three numbers that make one chance of the n-grams' and of a trained part's,
                   by logistic regression (guessers.py)
"""
import math
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

from common import InputError
from hybrid.guessers import FLOOR, KINDS, Trained
from hybrid.ngrams import SEEN, SOURCES, NGrams, mix_entries
from support.engine import MODELS, EngineLM, depth_of, vocab_size
from support.layers import tap_widths
from support.parts import save_facts, score_with
from survey.recycling import Successors
from survey.rest import BEGIN, BOUNDARY, DATASTORE, Datastore, as_text, as_tokens, load_datastore
from training.texts import collect_pairs

import torch
from tqdm import tqdm

CLASSES = len(SOURCES), len(SEEN) + 1, 3  # of entries: ngrams.py
LIKELY = 0.1  # the least chance of a token that does not end a round of `replay_part`


@torch.inference_mode()
def replay_answers(lm: EngineLM, data: list[tuple], store: Datastore,
                   parts: dict[str, Trained]) -> tuple[list[int], list[list], dict]:
    """Ask n-grams and trained parts before each token of answers, as decoding would.

    lm       the target
    data     pairs of a prompt and an answer
    store    the datastore of the n-grams
    parts    {kind of part: the part}
    returns  tokens, those of all answers. entries, for each token the list of what `list_entries`
             yields before it. guessed, for each kind of part a list of what `predict` returns
             before each token
    """
    tokens = []
    entries = []
    guessed = {kind: [] for kind in parts}
    # The input of the LM head is always tapped, since it gives the target's logits.
    top = depth_of(lm.model)
    read = sorted({top, *chain(*(part.taps for part in parts.values()))})
    successors, score = Successors(), score_with(lm.model)
    for prompt, answer in tqdm(data, desc="answers"):
        ngrams = NGrams(prompt, store, [], successors)
        lm.start(prompt + answer, taps=read)
        tapped = dict(zip(read, lm.features.split(tap_widths(lm.model, read), -1)))
        said = score(tapped[top][len(prompt) - 1:])[:, :lm.vocab]  # [answer + 1, V]
        for i, token in enumerate(answer):
            # The counts are copied, because they change as the text grows.
            entries.append([(group, Counter(x)) for group, x in ngrams.list_entries(())])
            successors.learn(as_tokens(ngrams.text[-1]), said[i][None])
            ngrams.add([token])
        for kind, part in parts.items():
            features = torch.cat([tapped[i] for i in part.taps], -1)
            guessed[kind] += replay_part(part, prompt, answer, features)
        tokens += answer
    return tokens, entries, guessed


def replay_part(part: Trained, prompt: list[int], answer: list[int],
                features: torch.Tensor) -> list[dict[int, float]]:
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
    part.start(features[:len(prompt) - 1], prompt[1:])
    root = len(prompt) - 1  # its place in the text
    guessed = []
    for i in range(len(prompt), len(text)):
        path = text[root + 1:i]
        guessed.append(part.predict(path))
        likely = guessed[-1].get(text[i], 0.0) >= LIKELY
        if not likely or len(path) + 1 == part.depth:
            # Row j of the features led to token j + 1.
            part.add(features[root:i], text[root + 1:i + 1])
            root = i
    return guessed


def fit_trust(chains: list, classes: tuple[int, ...], rounds: int = 15) -> list:
    """Find the trust that makes tokens likeliest, by EM.

    A token has a chain of entries 1, 2, …, n. Entry i has the trust t_i of its class. So it takes
    t_i r_i, where r_i is the mass that is left, and it gives the share s_i of this to the token:

        r_1 = 1,    r_{i+1} = (1 - t_i) r_i
        part_i = r_i t_i s_i                       what entry i gives to the token
        total  = Σ_i part_i + r_{n+1} · 1e-4       the chance of the token. From the mass that is
                                                   left each token gets a little

    E step. Given the token, these are the chances that it came from entry i, and that the mass it
    came from got as far as entry i:

        took_i    = part_i / total
        reached_i = (total - part_1 - … - part_{i-1}) / total

    M step. Sums over all entries of a class c, in all chains, give its new trust:

        t_c = (1/2 + Σ took_i) / (1 + Σ reached_i)

    The pseudo-counts 1/2 and 1 keep a class that never occurred at 1/2.

    chains    for each token a chain, which has for each entry, in order, its class and its share.
              The share is the token's count over the counts of all followers
    classes   how many classes there are: sources, values of `often`, values of `variety`
    rounds    steps of EM
    returns   the trust [source][often][variety], numbers from 0 to 0.99
    """
    trust = torch.full(classes, 0.5)
    for _ in range(rounds):
        # Both sums begin with the pseudo-counts.
        reached = torch.ones_like(trust)
        took = reached / 2
        table = trust.tolist()
        for chain in chains:
            left = 1.0  # the mass that is left
            parts = []  # what each entry gives to the token
            for (source, often, variety), share in chain:
                taken = table[source][often][variety]
                parts.append(left * taken * share)
                left *= 1 - taken
            # The E step asks which entry this token came from. It may have come from none.
            total = sum(parts) + left * 1e-4
            remaining = total  # what this entry and all after it gave
            for (group, _), part in zip(chain, parts):
                reached[group] += remaining / total
                took[group] += part / total
                remaining -= part
        # The M step. An entry with a trust of 1 would leave nothing to the entries after it.
        trust = (took / reached).clamp(max=0.99)
    return trust.tolist()


def fit_pool(tokens: list[int], guessed: list[dict], chances: list[dict]) -> list[float]:
    """Find the c, a and b with which `pool_chances` makes tokens likeliest.

    log score is linear in them, so there is one best choice. A little decay keeps it finite.

    tokens    the right tokens
    guessed   for each of them what a trained part gave before it
    chances   for each of them what the n-grams gave before it
    returns   c, a and b
    """
    # Each token that is to be guessed is a case. Each token that is named in a case has one row.
    features, cases, right = [], [], []
    for case, (token, p, q) in enumerate(zip(tokens, guessed, chances)):
        for x in p | q:
            features.append([1.0, *(math.log(max(y.get(x, 0.0), FLOOR)) for y in (p, q))])
            cases.append(case)
            right.append(x == token)
    X = torch.tensor(features, dtype=torch.float64).view(-1, 3)
    cases, right = torch.tensor(cases, dtype=torch.long), torch.tensor(right, dtype=torch.bool)
    exponents = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([exponents], max_iter=200, line_search_fn="strong_wolfe")

    def compute_loss() -> torch.Tensor:
        optimizer.zero_grad()
        scores = X @ exponents
        totals = torch.ones(len(tokens), dtype=torch.float64).index_add(0, cases, scores.exp())
        loss = totals.log().sum() - scores[right].sum()
        loss = loss / (1 + len(tokens)) + 1e-5 * exponents.square().sum()
        loss.backward()
        return loss
    optimizer.step(compute_loss)
    return exponents.tolist()


def fit(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
        datastore: str = DATASTORE, adapters: str = MODELS, max_new_tokens: int = 200) -> None:
    """Measure on a model's own answers how far to trust n-grams, and trained parts beside them.

    The result is the trust of each class of entries (ngrams.py), and for each trained part how its
    guesses are joined with theirs. The parts should not have been trained on these prompts.

    out:       the JSON file to make
    work:      the folder of answers, by default OUT.work
    datastore: a file made by `python -m survey.rest build`, from which these answers are left out
    adapters:  the folder of medusa.safetensors, hydra.safetensors, dflash.safetensors and
               mtp.safetensors, or of some of them. In place of the last one, an MTP block of the
               target's own files is taken
    max_new_tokens: the most tokens of an answer
    """
    data = collect_pairs(model, tokenizer, prompts, max_new_tokens, work or Path(f"{out}.work"))
    # Leave these answers out of the datastore, which would know them all by heart. A text of the
    # datastore begins with BEGIN tokens of a prompt. The tokens after these tell whether it is one
    # of the answers.
    few = min(32, max_new_tokens)
    begins = {as_text(answer[:few]) for _, answer in data}
    texts = load_datastore(datastore, model).text.split(BOUNDARY)
    store = Datastore(BOUNDARY.join(x for x in texts if x[BEGIN:BEGIN + few] not in begins))
    lm = EngineLM(model, vocab_size(model, tokenizer))
    parts = {}
    for kind, make in KINDS.items():
        path = Path(adapters) / f"{kind}.safetensors"
        file = str(path) if path.exists() else ""
        if file or kind == "mtp":  # whose block may be in the target's own files
            try:
                parts[kind] = make(lm, kind, file)
            except InputError as error:  # there is no block, or it is a part of another model
                print(f"{kind} is left out: {error}", file=sys.stderr)
    tokens, entries, guessed = replay_answers(lm, data, store, parts)
    # For each entry before a token: its class, and the token's share of the followers.
    chains = []
    for token, found in zip(tokens, entries):
        chains.append([(group, counts[token] / counts.total()) for group, counts in found])
    trust = fit_trust(chains, CLASSES)
    by_ngrams = [mix_entries(found, trust) for found in entries]
    pools = {kind: fit_pool(tokens, p, by_ngrams) for kind, p in guessed.items()}
    save_facts(out, {"model": model}, trust=trust, pools={"none": []} | pools)
    print(f"{len(tokens):,} tokens; c, a and b of each part: {pools}")
