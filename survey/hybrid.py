"""One tree from all that guesses, each node with a measured chance, as wide as it pays right now.

hybrid   of this project: the n-grams of REST (rest.py) and a trained guess of Medusa or Hydra
         (medusa.py) in one tree. Others choose one source a step (SAM-Decoding, arXiv 2411.10666)

    python -m survey.hybrid fit --prompts FILE --out hybrid.json              # the trust
    python -m survey.hybrid --guess hydra --prompt "..."

    … the cat ── sat 1.00 ─┬─ on .71 ─┬─ the .52 ── mat .30          a child's chance is that of
                           ├─ in .12  └─ a .11                       its parent times its own
                           └─ there .06

A node's children are asked of an interpolated n-gram model: of its last 8, 4, 2 and 1 tokens, each
looked up in the text, then in a datastore, every entry that was seen takes `trust` of the belief
that is left, by the share of each next token, and leaves the rest to the next one. Trust depends on
the store, on how often an entry was seen and on how many different tokens followed it: 30 numbers,
fitted by EM on held-out answers.

At the root a trained guess enters as a mixture, w p_guess + (1 - w) p_ngram, where the n-grams are
not sure. The tree is grown best first and ends where a node's chance is worth less than the time of
its row: the m best nodes with the largest Σ chance - λ cost(m), λ the tokens a second of late.

Lossless: the tree depends on final text, features and measured costs alone (`walk`).
"""
import heapq
import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Callable, Iterator

import torch
from tqdm import tqdm

from common import WIDTHS, CachedLM, InputError, Sampler, greedy, row_costs, walk
from survey.medusa import Heads, load_heads
from survey.parts import MODELS, belongs, some_embeddings
from survey.rest import BOUNDARY, DATASTORE, Datastore, as_text, as_tokens, load_datastore

LENGTHS = (8, 4, 2, 1)  # of suffixes, in tokens
SEEN = (1, 2, 5, 15)  # how often: up to each of these, or more
MOST = 64  # nodes of a tree
LEAST = 0.01  # chance of a node
RANKS = 10  # guesses of a head
SURE = 0.5  # an n-gram's chance with which no head is asked
GUESSES = ("none", "medusa", "hydra")


# ---------------------------------------------------------------------------- n-grams and trust

class NGrams:
    """Of stores, the text's own first, what follows a suffix. `trust[store][seen][variety]`."""

    def __init__(self, stores: list[Datastore], trust: list):
        self.stores, self.trust = stores, trust
        self.known = {}  # of the last store, which does not grow

    def followers(self, k: int, s: str) -> Counter:
        last = k == len(self.stores) - 1
        if last and s in self.known:
            return self.known[s]
        store = self.stores[k]
        counts = Counter(store.text[i:i + 1] for i in store.places(s))
        del counts[BOUNDARY], counts[""]
        if last:
            self.known[s] = counts
        return counts

    def entries(self, text: str) -> Iterator[tuple[tuple[int, int, int], Counter]]:
        """(its place in `trust`, its followers) of each entry that was seen, the longest first."""
        for n in LENGTHS:
            for k in range(len(self.stores) if n <= len(text) else 0):
                counts = self.followers(k, text[-n:])
                if counts:
                    seen = counts.total()
                    often = sum(seen > limit for limit in SEEN)
                    variety = 0 if len(counts) == 1 else 1 if 3 * len(counts) <= seen else 2
                    yield (k, often, variety), counts

    def predict(self, text: str) -> dict[str, float]:
        """{next token: its chance}; the sum is below 1."""
        left, chances = 1.0, {}
        for (k, often, variety), counts in self.entries(text):
            trust, seen = self.trust[k][often][variety], counts.total()
            for token, n in counts.items():
                chances[token] = chances.get(token, 0.0) + left * trust * n / seen
            left *= 1 - trust
            if left < LEAST:
                break
        return chances


# ---------------------------------------------------------------------------------- the tree

def grow(ngrams: NGrams, text: str, guess: Callable[[], dict[str, float]], w: float, most: int,
         least: float) -> tuple[list[int], list[int], list[float]]:
    """(ids, parents, chances) of the `most` likeliest nodes with a chance of `least`, the root, the
    text's last token, first. `guess`: the chances of its children by a trained guess, which count
    by w."""
    nodes, parents, chances = [], [], []  # of a node its path as text
    heap, pushed = [(-1.0, 0, -1, "")], 0  # of equals the first that was pushed
    while heap and len(nodes) < most:
        negative, _, parent, path = heapq.heappop(heap)
        nodes.append(path)
        parents.append(parent)
        chances.append(-negative)
        below = ngrams.predict(text + path)
        if not path and w and max(below.values(), default=0.0) < SURE:
            guessed = guess()
            below = {x: w * guessed.get(x, 0.0) + (1 - w) * below.get(x, 0.0)
                     for x in below | guessed}
        for token, chance in below.items():
            if -negative * chance >= least:
                pushed += 1
                heapq.heappush(heap, (negative * chance, pushed, len(nodes) - 1, path + token))
    return as_tokens(text[-1] + "".join(path[-1] for path in nodes[1:])), parents, chances


def smooth(costs: list[float]) -> list[float]:
    """Of `row_costs` those between the widths that were measured, on a line between them."""
    widths = [n for n in WIDTHS if n < len(costs) - 1]
    between = list(costs)
    for a, b in zip(widths, widths[1:]):
        for n in range(a, b):
            between[n] = costs[a] + (n - a) / (b - a) * (costs[b] - costs[a])
    return between


def width(chances: list[float], costs: list[float], rate: float) -> int:
    """How many of the best nodes are worth their rows, at so many tokens a second."""
    best, worth, tokens = 1, -torch.inf, 0.0
    for m, chance in enumerate(chances, 1):
        tokens += chance
        if tokens - rate * costs[m] > worth:
            best, worth = m, tokens - rate * costs[m]
    return best


def guess_of(trained: Heads, embed, f: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """log p [n, V'] of the token after each root [n], by the first head, from the features [n, d]
    before the roots."""
    between = embed(root)[:, None]
    return trained.lm_head(trained(1, f, between)).float().log_softmax(-1)


@torch.inference_mode()
def likeliest(trained: Heads, embed, f: torch.Tensor, root: str) -> dict[str, float]:
    """{token: chance} of the best guesses for what comes after a root."""
    ids = torch.tensor(as_tokens(root), device=f.device)
    best = guess_of(trained, embed, f, ids)[0].topk(RANKS)
    return dict(zip(as_text(trained.vocab[best.indices].tolist()), best.values.exp().tolist()))


# ---------------------------------------------------------------------------------- decoding

def hybrid(target: CachedLM, prompt: list[int], *, guess: str = "hydra", nodes: int = 0,
           adapter: str = "", datastore: str = DATASTORE, trust: str = f"{MODELS}/hybrid.json",
           sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Verify the likeliest continuations by n-grams and a trained guess, as many as pay.

    guess:     none, medusa or hydra: whose first head guesses the root's next token
    nodes:     of a tree, the root among them; 0: as many as pay at each call
    adapter:   file of the heads; default: models/GUESS.safetensors
    datastore: a file made by `python -m survey.rest build`
    trust:     a file made by `python -m survey.hybrid fit`
    Yields chunks of 1 token or more; logs {"guessed", "accepted", "expected"} a call, the last the
    sum of the guesses' chances.
    """
    if guess not in GUESSES or not 0 <= nodes <= MOST:
        raise InputError(f"expected a guess of {', '.join(GUESSES)} and nodes of 0 to {MOST}, got "
                         f"{guess} and {nodes}")
    store = target.once(("rest", datastore), lambda: load_datastore(datastore, target.model))
    known = target.once(("trust", trust), lambda: load_trust(trust, target.model))
    path = adapter or f"{MODELS}/{guess}.safetensors"
    trained = None if guess == "none" else target.once(
        (guess, path), lambda: load_heads(path, guess, target.model))
    embed, w = target.model.get_input_embeddings(), known["w"].get(guess, 0.0)
    target.start(prompt[:-1])
    text = as_text(prompt)
    own = Datastore(text)
    ngrams = NGrams([own, store], known["trust"])
    f = target.features[-1:]
    final, spent = 1.0, 0.0  # tokens and seconds of late, by the measured costs
    while True:
        power = max(target.length, 255).bit_length()
        costs = target.once(("row costs", power), lambda: smooth(row_costs(target, MOST)))
        rate = final / (spent or costs[1])
        row = min((costs[b] - costs[a]) / (b - a) for a, b in pairwise(WIDTHS[:7]))
        least = LEAST if nodes else max(LEAST, rate * row)
        ids, parents, chances = grow(ngrams, text, lambda: likeliest(trained, embed, f, text[-1]),
                                     w if len(f) else 0.0, nodes or MOST, least)
        m = nodes or width(chances, costs, rate)
        ids, parents = ids[:m], parents[:m]
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents)))
        target.commit(path)
        f = target.features[path[-1:]]
        text += as_text(chunk)
        own.add(as_text(chunk))
        final, spent = 0.9 * final + len(chunk), 0.9 * spent + costs[len(ids)]
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1,
                        "expected": sum(chances[1:m])})
        yield chunk


# ------------------------------------------------------------------------------- how far to trust

def made(chain: list, trust: list) -> tuple[list[float], float]:
    """(how much of a token's chance each entry of its chain makes, the belief left in the end)."""
    left, parts = 1.0, []
    for (k, often, variety), share in chain:
        parts.append(left * trust[k][often][variety] * share)
        left *= 1 - trust[k][often][variety]
    return parts, left


def fitted(chains: list, rounds: int = 15) -> list:
    """The trust that makes tokens likeliest, by EM. Of each token its `chain`: for the entries that
    were seen, (place in the trust, the token's share of it)."""
    trust = torch.full((2, len(SEEN) + 1, 3), 0.5)
    for _ in range(rounds):
        took, reached = torch.zeros_like(trust), torch.full_like(trust, 1e-6)
        table = trust.tolist()
        for chain in chains:
            parts, left = made(chain, table)
            rest = total = sum(parts) + left * 1e-4  # by none of them any token may come
            for (place, _), part in zip(chain, parts):
                reached[place] += rest / total
                took[place] += part / total
                rest -= part
        trust = (took / reached).clamp(max=0.99)
    return trust.tolist()


@torch.inference_mode()
def weight(model, trained: Heads, data: list, ngrams: torch.Tensor) -> float:
    """w of the mixture that makes tokens likeliest, by EM; `ngrams`: p of each by n-grams."""
    lm, found = CachedLM(model), []
    for prompt, answer in data:
        lm.start(prompt + answer)
        f = lm.features[len(prompt) - 2:-2]  # before the root of each
        roots = torch.tensor(prompt[-1:] + answer[:-1], device=f.device)
        log_p = guess_of(trained, model.get_input_embeddings(), f, roots)
        rows = trained.row_of[torch.tensor(answer, device=f.device)]
        p = log_p.gather(1, rows.clamp(min=0)[:, None])[:, 0].exp()
        found.append(torch.where(rows < 0, 0.0, p).cpu())
    p, w = torch.cat(found), 0.5
    for _ in range(30):
        w = (w * p / (w * p + (1 - w) * ngrams + 1e-6)).mean().item()
    return w


def fit(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
        datastore: str = DATASTORE, heads: str = MODELS, max_new_tokens: int = 200) -> None:
    """Measure, on a model's own answers to prompts, how far n-grams are to be trusted, and heads,
    whose training should not have seen them, beside n-grams.

    out:       the JSON file to make
    work:      folder of answers (default: OUT.work)
    datastore: a file made by `python -m survey.rest build`; what it has of these answers is left
               out of it
    heads:     folder of medusa.safetensors and hydra.safetensors
    max_new_tokens: of an answer
    """
    from models.training import examples
    data = sum(examples(model, tokenizer, prompts, max_new_tokens, work or Path(f"{out}.work"),
                        seed=0), [])
    begins = {as_text(answer[:8]) for _, answer in data}
    texts = load_datastore(datastore, model).text.split(BOUNDARY)
    others = Datastore(BOUNDARY.join(x for x in texts if x[2:10] not in begins))
    chains = []
    for prompt, answer in tqdm(data, desc="n-grams"):
        text = as_text(prompt)
        known = NGrams([Datastore(text), others], [])
        for token in as_text(answer):
            chains.append([(place, counts[token] / counts.total())
                           for place, counts in known.entries(text)])
            text += token
            known.stores[0].add(token)
    trust = fitted(chains)
    ngrams = torch.tensor([sum(made(chain, trust)[0]) for chain in chains])
    w = {kind: weight(model, load_heads(f"{heads}/{kind}.safetensors", kind, model), data, ngrams)
         for kind in GUESSES[1:]}
    out.write_text(json.dumps({"model": some_embeddings(model)[:16, :16].tolist(), "trust": trust,
                               "w": w}) + "\n")
    print(f"{len(chains):,} tokens; weights of heads: {w}")


def load_trust(path: str, model) -> dict:
    """InputError for what is no such file, or another model's."""
    try:
        known = json.loads(Path(path).read_text())
        numbers = torch.tensor(known["trust"])
        if not belongs(torch.tensor(known["model"]), model):
            raise ValueError("another model's")
        if numbers.shape != (2, len(SEEN) + 1, 3) or not all(
                0 <= x <= 1 for x in (*numbers.flatten(), *(known["w"][x] for x in GUESSES[1:]))):
            raise ValueError("no numbers of 0 to 1")
        return known
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError("expected a file that `python -m survey.hybrid fit` made for this model, "
                         f"got {path!r}: {error}") from error


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    guessed, accepted, expected = (sum(r[x] for r in run.log) / len(run.log) for x in run.log[0])
    return (f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted, {expected:.2f} expected by "
            "their chances")


if __name__ == "__main__":
    from cli import main
    sys.exit(main([hybrid], report, commands=[fit], ranges={"guess": GUESSES}))
