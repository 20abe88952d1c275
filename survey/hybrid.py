"""One tree from all that guesses, each node with a measured chance, as wide as it pays right now.

hybrid   of this project: n-grams of REST's datastore (rest.py) and a trained guess, of Medusa or
         Hydra (medusa.py) or EAGLE (eagle.py), in one tree. Others choose one source a step
         (SAM-Decoding, arXiv 2411.10666)

    python -m survey.hybrid fit --prompts FILE --out hybrid.json              # the trust
    python -m survey.hybrid --prompt "..."

    … the cat ── sat 1.00 ─┬─ on .71 ─┬─ the .52 ── mat .30          a child's chance is that of
                           ├─ in .12  └─ a .11                       its parent times its own
                           └─ there .06

A node's children are asked of n-grams of the text and of a datastore (ngrams.py), with text and
path as their context. At the root a trained guess enters as a mixture, w p_guess + (1 - w) p_ngram,
where the n-grams are not sure. The tree is grown best first and ends where a node's chance is below
its price, the seconds of one more row over those that a final token takes of late.

Lossless: the tree depends on final text, features and measured costs alone (`walk`).
"""
import heapq
import json
import sys
import time
from collections import deque
from itertools import accumulate
from pathlib import Path
from statistics import linear_regression
from typing import Callable, Iterable, Iterator

import torch
from tqdm import tqdm

from common import CachedLM, InputError, Sampler, greedy, row_costs, walk
from survey.eagle import Pairs, feed, load_draft
from survey.medusa import load_heads
from survey.ngrams import NGrams, fitted, interpolated, load_trust, weight
from survey.parts import MODELS, logits_of, some_embeddings
from survey.rest import BEGIN, BOUNDARY, DATASTORE, Datastore, as_text, as_tokens, load_datastore

MOST = 64  # nodes of a tree
LEAST = 0.01  # chance of a node
RANKS = 10  # guesses of a trained part
SURE = 0.5  # an n-gram's chance with which no trained part is asked
GUESSES = ("none", "medusa", "hydra", "eagle")


# ------------------------------------------------------------------------------ a trained part

class Trained:
    """A trained part, asked for what comes after the text: a first head of Medusa or Hydra, which
    reads the last of the `pairs`, or EAGLE's layer, which reads all since it was asked last."""

    def __init__(self, target: CachedLM, kind: str, path: str):
        model = target.model
        self.embed = model.get_input_embeddings()
        self.vocab = target.vocab
        self.layer = None  # EAGLE's, cached
        if kind == "eagle":
            self.part = target.once((kind, path), lambda: load_draft(path, model))
            self.layer = target.once((self.part, "cached"),
                                     lambda: type(target)(self.part.lm, target.vocab))
        else:
            self.part = target.once((kind, path), lambda: load_heads(path, kind, model))
            self.logits = target.once((self.part, "logits"), lambda: logits_of(model))

    def start(self, pairs: Pairs) -> None:
        self.waiting = [pairs] if pairs.tokens else []
        if self.layer:
            self.layer.start([])

    def add(self, pairs: Pairs) -> None:  # heads read the last pair alone
        self.waiting = [*self.waiting, pairs] if self.layer else [pairs]

    @torch.inference_mode()
    def predict(self) -> dict[str, float]:
        """{next token: its chance}, the likeliest ones; none without a pair."""
        if not self.waiting:
            return {}
        before, features, tokens = zip(*self.waiting)
        if self.layer:
            pairs = Pairs(sum(before, []), torch.cat(features), sum(tokens, []))
            logits = feed(self.part, self.layer, [pairs])
            self.waiting = []
        else:
            feature = features[-1][-1:]
            between = self.embed(torch.tensor(tokens[-1][-1:], device=feature.device))[:, None]
            logits = self.logits(self.part.lm_head(self.part(1, feature, between)))
        p = logits[0, :self.vocab].float().softmax(-1).nan_to_num(0.0)  # of a part that overflows
        best = p.topk(min(RANKS, len(p)))
        return dict(zip(as_text(self.part.vocab[best.indices].tolist()), best.values.tolist()))


# ---------------------------------------------------------------------------------- the tree

def grow(ngrams: NGrams, ask: Callable[[], dict[str, float]], w: float, most: int,
         least: float) -> tuple[list[int], list[int], list[float]]:
    """(ids, parents, chances) of the `most` likeliest nodes with a chance of `least`, the root, the
    text's last token, first. ask(), if any: a trained part's chances of the root's children, which
    enter with the weight w."""
    nodes, parents, chances = [], [], []  # of a node its path as text
    heap, pushed = [(-1.0, 0, -1, "")], 0  # of equals the first that was pushed
    while heap:
        negative, _, parent, path = heapq.heappop(heap)
        here = -negative
        nodes.append(path)
        parents.append(parent)
        chances.append(here)
        if len(nodes) == most:
            break
        below = ngrams.predict(path)
        if not path and ask and max(below.values(), default=0.0) < SURE:
            guessed = ask()
            if any(guessed.values()):
                below = {x: w * guessed.get(x, 0.0) + (1 - w) * below.get(x, 0.0)
                         for x in below | guessed}
        for token, chance in below.items():
            if here * chance >= least:
                pushed += 1
                heapq.heappush(heap, (-here * chance, pushed, len(nodes) - 1, path + token))
    root = ngrams.text[-1]
    return as_tokens(root + "".join(path[-1] for path in nodes[1:])), parents, chances


def prices(costs: list[float], late: Iterable[tuple]) -> tuple[float, float]:
    """(seconds that a row more takes, final tokens a second) by the latest calls, each (rows,
    seconds, tokens). Two calls that the clock measured come first, of 1 and of 16 rows."""
    calls = [(1, costs[1], 1), (16, costs[16], 0), *late]
    rows, seconds, tokens = zip(*calls)
    row = linear_regression(rows, seconds).slope
    return max(0.0, row), sum(tokens) / (sum(seconds) - costs[16])


def width(chances: list[float], costs: list[float], rate: float) -> int:
    """How many of the best nodes are worth `rate` times the seconds of their call: a call's cost
    rises in steps."""
    worth = [tokens - rate * cost for tokens, cost in zip(accumulate(chances), costs[1:])]
    return worth.index(max(worth)) + 1


def hybrid(target: CachedLM, prompt: list[int], *, guess: str = "eagle", nodes: int = 0,
           adapter: str = "", datastore: str = DATASTORE, trust: str = f"{MODELS}/hybrid.json",
           sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Verify the likeliest continuations by n-grams and a trained guess, as many as pay.

    guess:     none, medusa, hydra or eagle: what guesses the root's next token
    nodes:     of a tree, the root among them; 0: as many as pay at each call
    adapter:   file of the heads or the layer; default: models/GUESS.safetensors
    datastore: a file made by `python -m survey.rest build`
    trust:     a file made by `python -m survey.hybrid fit`
    Yields chunks of 1 token or more; logs {"guessed", "accepted", "chances", "path"} a call: the
    chances of the guesses and which of them, from 0, were accepted.
    """
    if guess not in GUESSES or not 0 <= nodes <= MOST:
        raise InputError(f"expected a guess of {', '.join(GUESSES)} and nodes of 0 to {MOST}, got "
                         f"{guess} and {nodes}")
    store = target.once(("rest", datastore), lambda: load_datastore(datastore, target.model))
    known = target.once(("trust", trust), lambda: load_trust(trust, target.model))
    if guess not in known["w"]:
        raise InputError(f"expected a guess that {trust!r} has a weight of, got {guess}")
    w = known["w"][guess]
    trained = None
    target.start(prompt[:-1])
    if guess != "none":
        trained = Trained(target, guess, adapter or f"{MODELS}/{guess}.safetensors")
        trained.start(Pairs(prompt[:-1], target.features, prompt[1:]))
    ngrams = NGrams(as_text(prompt), store, known["trust"])
    late = deque(maxlen=64)  # calls
    while True:
        power = max(target.length, 255).bit_length()
        costs = target.once(("row costs", power), lambda: row_costs(target, MOST))
        began = time.perf_counter()
        row, rate = prices(costs, late)
        least = LEAST if nodes else max(LEAST, row * rate)
        ids, parents, chances = grow(ngrams, trained and trained.predict, w, nodes or MOST, least)
        m = nodes or width(chances, costs, rate)
        ids, parents, chances = ids[:m], parents[:m], chances[:m]
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents)))
        target.commit(path)
        ngrams.add(as_text(chunk))
        if trained:
            trained.add(Pairs([ids[x] for x in path], target.features[path], chunk))
        late.append((len(ids), time.perf_counter() - began, len(chunk)))
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1,
                        "chances": chances[1:], "path": [x - 1 for x in path[1:]]})
        yield chunk


# ------------------------------------------------------------------------------- how far to trust

def fit(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
        datastore: str = DATASTORE, adapters: str = MODELS, max_new_tokens: int = 200) -> None:
    """Measure, on a model's own answers to prompts, how far n-grams are to be trusted, and trained
    parts, whose training should not have seen them, beside n-grams.

    out:       the JSON file to make
    work:      folder of answers (default: OUT.work)
    datastore: a file made by `python -m survey.rest build`; what it has of these answers is left
               out of it
    adapters:  folder of medusa.safetensors, hydra.safetensors, eagle.safetensors or some of them
    max_new_tokens: of an answer
    """
    from models.training import collect_examples
    work = work or Path(f"{out}.work")
    data = sum(collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=0), [])
    few = min(32, max_new_tokens)  # tokens that an answer is known by
    begins = {as_text(answer[:few]) for _, answer in data}
    texts = load_datastore(datastore, model).text.split(BOUNDARY)
    others = Datastore(BOUNDARY.join(x for x in texts if x[BEGIN:BEGIN + few] not in begins))
    lm = CachedLM(model)
    parts = {kind: Trained(lm, kind, str(path)) for kind in GUESSES[1:]
             if (path := Path(adapters) / f"{kind}.safetensors").exists()}
    tokens, entries, guessed = replayed(lm, data, others, parts)
    trust = fitted([[(place, counts[token] / counts.total()) for place, counts in some]
                    for token, some in zip(tokens, entries)])
    q = [interpolated(some, trust) for some in entries]
    asked = [i for i, chances in enumerate(q) if max(chances.values(), default=0.0) < SURE]
    by_ngrams = [q[i].get(tokens[i], 0.0) for i in asked]
    w = {kind: weight([p[i] for i in asked], by_ngrams) for kind, p in guessed.items()}
    facts = {"model": some_embeddings(model)[:16, :16].tolist(), "trust": trust,
             "w": {"none": 0.0} | w}
    out.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    print(f"{len(tokens):,} tokens; weights of the trained parts where n-grams are not sure, for "
          f"{len(asked):,} of them: {w}")


def replayed(lm: CachedLM, data: list[tuple], store: Datastore, parts: dict[str, Trained]):
    """(tokens, entries, guessed): all tokens of the answers of (prompt, answer) pairs; of each what
    the n-grams have before it, and by each part its chance."""
    tokens, entries, guessed = "", [], {kind: [] for kind in parts}
    for prompt, answer in tqdm(data, desc="answers"):
        ngrams = NGrams(as_text(prompt), store, [])
        lm.start(prompt + answer)
        features = lm.features
        for part in parts.values():
            part.start(Pairs(prompt[:-1], features[:len(prompt) - 1], prompt[1:]))
        for i, token in enumerate(as_text(answer), len(prompt) - 1):
            entries.append([*ngrams.entries("")])
            pair = Pairs(as_tokens(ngrams.text[-1]), features[i:i + 1], as_tokens(token))
            ngrams.add(token)
            for kind, part in parts.items():
                guessed[kind].append(part.predict().get(token, 0.0))
                part.add(pair)
        tokens += as_text(answer)
    return tokens, entries, guessed


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    guessed, accepted = (sum(r[x] for r in run.log) / len(run.log) for x in ("guessed", "accepted"))
    expected = sum(sum(r["chances"]) for r in run.log) / len(run.log)
    return (f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted, {expected:.2f} expected by "
            "their chances")


if __name__ == "__main__":
    from cli import main
    sys.exit(main([hybrid], report, commands=[fit], ranges={"guess": GUESSES}))
