"""One tree holds all guesses, each node has a measured chance, and rows are added while they pay.

hybrid   of this project: n-grams of REST's datastore (rest.py), what the target said after the
         same token before (recycling.py), and a trained guess, of Medusa or Hydra (medusa.py),
         DFlash (dflash.py) or an MTP block (mtp.py), in one tree. Others choose one source a step
         (SAM-Decoding, arXiv 2411.10666)

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
up in the text and in a datastore. The target's choices the last time that it was fed the node's
token are used as well. A trained part guesses besides, by one pass a round: DFlash for all depths
of its block, a head for the root's children. An MTP block makes a pass for each node after which it
guesses. A part's chance p and the n-grams' q of a token become one chance (guessers.py):

    score = e^c p^a q^b          chance = score / (1 + Σ score)

`fit` finds c, a, b and the trust of the n-grams from answers that are replayed (fit.py).

The tree grows best first. It ends where a node's chance is below the price of a row:

    rate       final tokens a second, by the latest rounds (clock.py)
    row_price  rate · seconds that one more row takes

One more row takes time in which ordinary rounds would have made `row_price` tokens. So a node is
worth its row if its chance is higher. A pass of an MTP block has a price too, `pass_price`. It pays
at a node if RIGHT · its chance · (1 - the n-grams' best chance there) is higher. On the embedded
target this makes 2.48 times AR, the n-grams by themselves 2.29 and the block 2.00
(results/hybrid.md).

In each round the number of rows to verify is chosen by chances and measured costs. This is the
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
Chances are fitted for greedy decoding, and used at every temperature.
"""
import heapq
from typing import Iterator

from common import Sampler, begin, greedy, walk
from hybrid.fit import fit
from hybrid.guessers import GUESSES, Trained, load_guesser, load_trust, pool_chances
from hybrid.ngrams import NGrams
from support.clock import MOST, Clock
from support.engine import MODELS, EngineLM, log_round, run_as_program
from survey.recycling import Successors
from survey.rest import DATASTORE, load_datastore

LEAST = 0.01  # the least chance of a node
PASS = 0.2  # how many tokens a pass of an MTP block costs with --nodes
RIGHT = 2  # how many tokens a right guess brings: itself, and what the n-grams guess after it


# ---------------------------------------------------------------------------------- the tree

def predict_children(ngrams: NGrams, path: tuple[int, ...], trained: Trained | None,
                     pool: list[float], worth: float) -> dict[int, float]:
    """Tell with which chance each token follows a node, if the node itself is accepted.

    ngrams   the n-gram model with the text so far
    path     the guesses from the root's child down to the node. () for the root
    trained  a trained part, or None
    pool     c, a and b (`fit_pool`)
    worth    how many passes of the part the node is worth if the n-grams know nothing
    returns  {token: its chance}
    """
    chances = ngrams.predict(path)
    if trained is None or len(path) >= trained.depth:
        return chances
    unsure = 1 - max(chances.values(), default=0.0)
    guessed = trained.predict(path, worth * unsure)
    if not any(guessed.values()):  # a part without a guess does not change the chances
        return chances
    return pool_chances(guessed, chances, pool)


def grow_hybrid(root: int, ngrams: NGrams, trained: Trained | None, pool: list[float], most: int,
                row_price: float, pass_price: float) -> tuple[list[int], list[int], list[float]]:
    """Grow the tree of the likeliest nodes, best first.

    root        the last token of the text
    most        the most nodes of a tree, the root among them
    row_price   how many tokens a row costs, which is the least chance of a node
    pass_price  how many tokens a pass of the trained part costs, above 0
    returns     ids, parents and chances of the nodes, the root first. The chances never rise, so
                the first n nodes are the best tree of n nodes

    The other arguments are those of `predict_children`.
    """
    ids, parents, chances = [], [], []  # of each node of the tree
    heap = [(-1.0, 0, -1, (root,))]  # (minus the chance, number, parent, tokens from the root down)
    pushed = 0  # a node's number: of equally likely nodes the one that was pushed first comes first
    while heap:
        negative, _, parent, path = heapq.heappop(heap)
        chance = -negative
        ids.append(path[-1])
        parents.append(parent)
        chances.append(chance)
        if len(ids) == most:
            break
        # A pass helps if the node is accepted and the best guess of the n-grams after it is not.
        children = predict_children(ngrams, path[1:], trained, pool, RIGHT * chance / pass_price)
        for token, share in children.items():
            if chance * share >= row_price:
                pushed += 1
                heapq.heappush(heap, (-chance * share, pushed, len(ids) - 1, (*path, token)))
    return ids, parents, chances


def hybrid(target: EngineLM, prompt: list[int], *, guess: str = "dflash", nodes: int = 0,
           adapter: str = "", datastore: str = DATASTORE, trust: str = f"{MODELS}/hybrid.json",
           successors: Successors | None = None, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Verify the likeliest continuations by n-grams and a trained guess, as many as pay.

    guess:     the trained part that guesses beside the n-grams. Medusa and hydra guess the token
               after the root, dflash a whole block, and mtp as far as its passes pay. With none
               only n-grams guess
    nodes:     the most nodes of a tree, the root among them, 0 to 64. With 0, as many as pay in
               each call
    adapter:   the file of the trained part, by default models/GUESS.safetensors. The block of mtp
               is by default that of the target's own files, as in survey/mtp.py
    datastore: a file made by `python -m survey.rest build`
    trust:     a file made by `python -m hybrid fit`

    Yields chunks of 1 token or more; logs {"guessed", "accepted", "chances"} a call.

    The Successors `successors` are what the target said after each token. They are kept from prompt
    to prompt, and changed in place.

    The log's "chances" are those of the guesses.
    """
    store = target.once(load_datastore, datastore, target.model)
    facts = target.once(load_trust, trust, target.model)
    trained = load_guesser(target, guess, adapter, facts, trust)
    pool = facts["pools"][guess]
    prompt = begin(prompt, target, taps=trained.taps if trained else None)
    if trained:
        trained.start(target.features, prompt[1:])
    ngrams = NGrams(prompt, store, facts["trust"], successors)
    root = prompt[-1]
    clock = target.once(Clock, target, key=(hybrid,))
    while True:
        # Guess: add nodes while they pay.
        row_price, pass_price = LEAST, PASS
        if not nodes:
            rate, row_price = clock.find_prices()
            row_price = max(LEAST, row_price)
            pass_price = 1e-9 + rate * (trained.seconds if trained else 0)
        ids, parents, chances = grow_hybrid(root, ngrams, trained, pool, nodes or MOST, row_price,
                                            pass_price)
        # Verify.
        logits = target.forward(ids, parents)
        path, chunk = walk(ids, parents, sample(logits, target.places))
        target.commit(path)
        # Tell all that guesses what became final.
        ngrams.successors.learn(ids, logits)  # rejected nodes too
        ngrams.add(chunk)
        steps = 1
        if trained:
            steps = max(1, len(trained.made))
            trained.add(target.features[path], chunk)
        root = chunk[-1]
        if not nodes:
            clock.note(steps, len(ids), len(chunk))
        log_round(log, guessed=len(ids) - 1, accepted=len(path) - 1, chances=chances[1:])
        yield chunk


COMMAND_LINE = dict(methods=[hybrid], commands=[fit], ranges={"guess": GUESSES},
                    shared={"successors": Successors})

if __name__ == "__main__":
    run_as_program(__file__)
