"""One tree holds all guesses, each node has a measured chance, and rows are added while they pay.

hybrid   of this project: n-grams of REST's datastore (rest.py), what the target said after the
         same token before (recycling.py), and a trained guess, of Medusa or Hydra (medusa.py),
         EAGLE (eagle.py), EAGLE-3 (eagle3.py) or DFlash (dflash.py), in one tree. Others choose
         one source a step (SAM-Decoding, arXiv 2411.10666)

    python -m hybrid fit --prompts FILE --out hybrid.json              # the trust
    python -m hybrid --prompt "..."

    … the cat ── sat 1.00 ─┬─ on .71 ─┬─ the .52 ── mat .30     A node's chance is its parent's,
                           │          └─ a .11                  times that of following it.
                           ├─ in .12
                           ╎                                    The price of a row is .10 here, so
                           ╎  there .06                         "there" is not grown.

    The nodes are added in the order on, the, mat, in, a. The call is expected to give
    1 + .71 + .52 + .30 + .12 + .11 = 2.76 tokens.

The children of a node come from n-grams (ngrams.py). The last tokens of the node's path are looked
up in the text and in a datastore. What the target said the last time that it was fed the node's
token counts as well. A trained part guesses besides (guessers.py). Its chance p and the n-grams' q
of a token become one chance (guessers.py):

    score = e^c p^a q^b          chance = score / (1 + Σ score)

`fit` finds c, a, b and the trust of the n-grams from answers that are replayed (fit.py).

A pass of DFlash's draft guesses for all depths of its block, and one of EAGLE's layer only for the
children of one node. Passes are bought like rows, below. A pass helps only if its node is accepted
and the n-grams' likeliest token after the node is wrong. In a measured share of these cases the
part makes the right token one of the two likeliest:

    a pass brings   chance of the node · (1 - q of the n-grams' likeliest token) · share
    it must bring   seconds of a pass · final tokens a second

So the part is asked at likely nodes where the n-grams are not sure, and always if asking takes
no pass. If passes are expensive, it is asked only at the root, or never. With --nodes nothing is
measured, and a pass must bring PASS tokens.

The tree grows best first. It ends where a node's chance is below the price of a row:

    price = seconds that one more row takes · final tokens a second, by the latest calls

One more row takes time in which ordinary calls would have made `price` tokens. So a node is worth
its row if its chance is higher.

The price assumes that time grows linearly with rows. It grows in steps, so the finished tree is cut
once more by measured costs. The n best nodes are kept for which this is largest:

    worth(n) = Σ chances of the n best nodes - final tokens a second · seconds of a call of n rows

So the number of rows to verify is chosen by chances and measured costs in each round. This is the
small readable form of a rule that others found for batches of texts and for other guesses:

    adaptive verification in vLLM   ranks guesses by their chance to survive, a product of
                                    confidences along a draft, and verifies as many as give the
                                    most expected tokens a millisecond, by profiled costs
    the scheduler of DSpark         arXiv 2607.05147: the same for drafts whose confidences come
                                    from a trained head
    CaDDTree                        arXiv 2606.01813: chooses a tree and its number of nodes in
                                    each round, by expected tokens and modelled latencies

Here the chances come from counts and from a trained part, there is one text, and guesses are nodes
of a tree.

The output is lossless, because a tree is complete before the target's tokens are sampled (`walk`).
Chances are fitted for greedy decoding, and used at every temperature. EAGLE makes 1.5% more tokens
a call at temperature 1 if its tree is planned for this temperature. That was not tried here.
"""
import heapq
import sys
import time
from collections import deque
from itertools import accumulate
from statistics import linear_regression
from typing import Iterable, Iterator

from common import CachedLM, Sampler, greedy, walk
from hybrid.fit import fit
from hybrid.guessers import GUESSES, MOST, Trained, load_guesser, load_trust, pool_chances
from hybrid.ngrams import NGrams
from support.clock import count_doublings, row_costs
from support.layers import FeatureLM
from support.parts import MODELS, require
from survey.eagle import Pairs
from survey.recycling import Successors
from survey.rest import DATASTORE, as_text, as_tokens, load_datastore

LEAST = 0.01  # the least chance of a node
PASS = 0.05  # the tokens that a pass of the part must bring where --nodes is given, without a clock
RECENT = 64  # the latest calls, from which prices are estimated


# ---------------------------------------------------------------------------------- the tree

def predict_children(ngrams: NGrams, path: str, chance: float, trained: Trained | None,
                     pool: list[float], price: float) -> dict[str, float]:
    """Tell with which chance each token follows a node, if the node itself is accepted.

    The part is asked if that takes no pass, or if its passes bring as much as they cost.

    ngrams   the n-gram model with the text so far
    path     the guesses from the root's child down to the node, as rest.as_text writes them. ""
             for the root
    chance   the node's chance
    trained  a trained part, or None
    pool     c, a, b, and mended, the share of the n-grams' errors that the part mends (`fit_pool`)
    price    what a pass costs, in tokens
    returns  {token: its chance}
    """
    chances = ngrams.predict(path)
    if trained is None or len(path) >= trained.depth:
        return chances
    *exponents, mended = pool
    wrong = 1 - max(chances.values(), default=0.0)
    if chance * wrong * mended < price * trained.count_passes(path):
        return chances
    guessed = trained.predict(path)
    if not any(guessed.values()):  # a part without a guess does not change the chances
        return chances
    return pool_chances(guessed, chances, exponents)


def grow_hybrid(ngrams: NGrams, trained: Trained | None, pool: list[float], most: int, least: float,
                price: float = 0.0) -> tuple[list[int], list[int], list[float]]:
    """Grow the tree of the likeliest nodes, best first.

    most     the most nodes of a tree, the root among them
    least    the least chance of a node
    returns  ids, parents and chances of the nodes, the root first. The chances never rise, so the
             first n nodes are the best tree of n nodes

    The other arguments are those of `predict_children`.
    """
    paths, parents, chances = [], [], []  # of each node of the tree
    heap = [(-1.0, 0, -1, "")]  # (minus the chance, number, parent, path)
    pushed = 0  # a node's number: of equally likely nodes the one that was pushed first comes first
    while heap:
        negative, _, parent, path = heapq.heappop(heap)
        chance = -negative
        paths.append(path)
        parents.append(parent)
        chances.append(chance)
        if len(paths) == most:
            break
        children = predict_children(ngrams, path, chance, trained, pool, price)
        for token, share in children.items():
            if chance * share >= least:
                pushed += 1
                heapq.heappush(heap, (-chance * share, pushed, len(paths) - 1, path + token))
    root = ngrams.text[-1]
    return as_tokens(root + "".join(path[-1] for path in paths[1:])), parents, chances


def estimate_prices(costs: list[float], recent: Iterable[tuple]) -> tuple[float, float]:
    """Estimate what a row costs and how fast tokens become final.

    row  = the slope of a line through the (rows, seconds) of calls
    rate = final tokens of all calls / their seconds

    Two calls are added to the latest ones, with the seconds that the clock measured:

    - One of 1 row, which gave 1 token, as every call of autoregressive decoding does. Without it
      the first round of a text would have no rate, since there are no latest calls yet.
    - One of 16 rows, for the slope alone. A line needs calls of two widths. Without this call there
      would be no slope in the first round, nor in a text whose calls all have one row. It gave no
      tokens, so the rate leaves it out.

    costs    costs[n]: the seconds of a call of n rows, as the clock measured them
    recent   (rows, seconds, seconds of the part's passes, final tokens) of each of the latest
             calls. A wider tree takes more passes, which must not count as a price of its rows
    returns  row, the seconds of one more row, and rate, the final tokens a second
    """
    one, sixteen = costs[1], costs[16]
    calls = [(1, one, 0.0, 1), (16, sixteen, 0.0, 0), *recent]
    rows, seconds, passes, tokens = zip(*calls)
    slope = linear_regression(rows, [x - y for x, y in zip(seconds, passes)]).slope
    # A noisy clock can make the slope negative. More rows would then seem to save time.
    return max(0.0, slope), sum(tokens) / (sum(seconds) - sixteen)


def choose_width(chances: list[float], costs: list[float], rate: float) -> int:
    """Choose how many of the best nodes to verify.

    The chosen n has the largest worth, the tokens that the call is expected to give beyond those
    that the same time gives on average:

        worth(n) = Σ chances of the first n nodes - rate · costs[n]

    Costs rise in steps. So one more node can be worth less than nothing where it begins a step,
    and the nodes after it can make up for this. Therefore all n are compared.

    chances  the chances of the nodes, the best first
    costs    costs[n]: the seconds of a call of n rows
    rate     the final tokens a second, on average
    returns  n, 1 or more
    """
    worth = [tokens - rate * cost for tokens, cost in zip(accumulate(chances), costs[1:])]
    return worth.index(max(worth)) + 1


def measure_costs(target: CachedLM, trained: Trained | None) -> tuple[list[float], float]:
    """Measure what calls and passes cost, again after each doubling of the context.

    returns  costs, as `row_costs` returns them, and the seconds of a pass of the part
    """
    doublings = count_doublings(target)
    costs = target.once(("row costs", doublings), lambda: row_costs(target, MOST))
    if trained is None:
        return costs, 0.0
    return costs, target.once(("pass", trained.part, doublings), trained.time_pass)


def choose_tree(ngrams: NGrams, trained: Trained | None, pool: list[float], costs: list[float],
                a_pass: float, recent: Iterable[tuple]) -> tuple[list[int], list[int], list[float]]:
    """Grow the tree as far as a node's chance is above the price of a row, then cut it.

    a_pass    the seconds of a pass of the part
    returns   ids, parents and chances of the nodes

    The other arguments are those of `predict_children` and `estimate_prices`.
    """
    row, rate = estimate_prices(costs, recent)
    least = max(LEAST, row * rate)
    ids, parents, chances = grow_hybrid(ngrams, trained, pool, MOST, least, a_pass * rate)
    n = choose_width(chances, costs, rate)
    return ids[:n], parents[:n], chances[:n]


def hybrid(target: FeatureLM, prompt: list[int], *, guess: str = "eagle", nodes: int = 0,
           adapter: str = "", datastore: str = DATASTORE, trust: str = f"{MODELS}/hybrid.json",
           successors: Successors | None = None, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Verify the likeliest continuations by n-grams and a trained guess, as many as pay.

    guess:     the trained part that guesses beside the n-grams. Medusa and hydra guess the token
               after the root, and dflash a whole block. Eagle and eagle3 guess after any node, by
               a pass for each. With none only n-grams guess
    nodes:     the most nodes of a tree, the root among them, 0 to 64. A pass of the part must then
               bring 0.05 tokens. With 0, nodes and passes are as many as pay in each call
    adapter:   the file of the trained part, by default models/GUESS.safetensors
    datastore: a file made by `python -m survey.rest build`
    trust:     a file made by `python -m hybrid fit`

    Yields chunks of 1 token or more; logs {"guessed", "accepted", "chances", "passes"} a call.

    The Successors `successors` are what the target said after each token. They are kept from prompt
    to prompt, and changed in place.

    The log's "chances" are those of the guesses, and its "passes" are those of the part.
    """
    require(guess in GUESSES, "guess", ", ".join(GUESSES), guess)
    store = target.once(("rest", datastore), lambda: load_datastore(datastore, target.model))
    facts = target.once(("trust", trust), lambda: load_trust(trust, target.model))
    trained = load_guesser(target, guess, adapter, facts, trust)
    pool = facts["pools"][guess]
    target.start(prompt[:-1], taps=trained.taps if trained else None)
    if trained:
        trained.start(Pairs(target.features, prompt[1:]))
    ngrams = NGrams(as_text(prompt), store, facts["trust"], successors)
    recent = deque(maxlen=RECENT)  # calls
    while True:
        # Measuring costs is no part of the call, so `began` comes after it.
        costs, a_pass = ([], 0.0) if nodes else measure_costs(target, trained)
        began = time.perf_counter()
        if nodes:
            ids, parents, chances = grow_hybrid(ngrams, trained, pool, nodes, LEAST, PASS)
        else:
            ids, parents, chances = choose_tree(ngrams, trained, pool, costs, a_pass, recent)
        # Verify.
        logits = target.forward(ids, parents)
        path, chunk = walk(ids, parents, sample(logits))
        target.commit(path)
        # Tell all that guesses what became final.
        ngrams.successors.learn(ids, logits, chunk)  # rejected nodes too
        ngrams.add(as_text(chunk))
        passes = 0
        if trained:
            passes = len(trained.passes)
            trained.add(Pairs(target.features[path], chunk))
        recent.append((len(ids), time.perf_counter() - began, passes * a_pass, len(chunk)))
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1, "passes": passes,
                        "chances": chances[1:]})
        yield chunk


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    """Say what a run's calls were like, on average."""
    guessed, accepted, passes = (sum(r[x] for r in run.log) / len(run.log)
                                 for x in ("guessed", "accepted", "passes"))
    expected = sum(sum(r["chances"]) for r in run.log) / len(run.log)
    return (f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted, {expected:.2f} expected by "
            f"their chances, {passes:.2f} passes of the part")


if __name__ == "__main__":
    from cli.main import main  # the command line is in cli/, a folder of this project
    sys.exit(main([hybrid], report, commands=[fit], ranges={"guess": GUESSES},
                  shared={"successors": Successors}))
