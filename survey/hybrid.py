"""One tree holds all guesses, each node has a measured chance, and rows are added while they pay.

hybrid   of this project: n-grams of REST's datastore (rest.py), what the target said after the
         same token before (recycling.py), and a trained guess, of Medusa or Hydra (medusa.py),
         EAGLE (eagle.py) or DFlash (dflash.py), in one tree. Others choose one source a step
         (SAM-Decoding, arXiv 2411.10666)

    python -m survey.hybrid fit --prompts FILE --out hybrid.json              # the trust
    python -m survey.hybrid --prompt "..."

    … the cat ── sat 1.00 ─┬─ on .71 ─┬─ the .52 ── mat .30     A child's chance is its parent's
                           │          └─ a .11                  times its own.
                           ├─ in .12
                           ╎                                    The price of a row is .10 here, so
                           ╎  there .06                         "there" is not grown.

    The nodes are added in the order on, the, mat, in, a. The call is expected to give
    1 + .71 + .52 + .30 + .12 + .11 = 2.76 tokens.

The children of a node come from n-grams of the text and of a datastore, and from what the target
said the last time that it was fed the node's token (ngrams.py). They are looked up after the text
and the node's path. At the root a trained part guesses as well, unless the n-grams give a
token a chance of 1/2 or more. The chance of a child is then w p_guess + (1 - w) p_ngram. One pass
of DFlash's draft guesses for all depths of its block, so it is asked at deeper nodes in the same
way. The other parts would need a pass for each depth.

The tree grows best first. It ends where a node's chance is below the price of a row:

    price = seconds that one more row takes · final tokens a second, by the latest calls

The price is a number of tokens: those that the seconds of a row would bring if they were spent on
more calls. A row should bring as many itself, and it brings its node's chance.

The price is that of a straight line. Measured costs rise in steps instead, so a second rule may cut
the tree once more. It keeps the n best nodes for which this is largest:

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

Here the chances come from counts, there is one text, and guesses are nodes of a tree.

The output is lossless, because the tree depends on final text, features and measured costs alone
(`walk`).
"""
import heapq
import sys
import time
from collections import deque
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from statistics import linear_regression
from typing import Callable, Iterable, Iterator

from common import CachedLM, InputError, Sampler, greedy, row_costs, walk
from survey.dflash import BlockLM, run_block
from survey.dflash import load_draft as load_block_draft
from survey.eagle import Pairs, feed, load_draft
from survey.medusa import load_heads
from survey.ngrams import SEEN, SOURCES, NGrams, fit_trust, fit_weight, mix_entries
from survey.parts import MODELS, load_facts, logits_of, save_facts
from survey.recycling import Successors
from survey.rest import BEGIN, BOUNDARY, DATASTORE, Datastore, as_text, as_tokens, load_datastore
from survey.taps import tap_target, tap_widths
from survey.views import depth_of

import torch
from tqdm import tqdm

MOST = 64  # the most nodes of a tree
LEAST = 0.01  # the least chance of a node
RANKS = 10  # how many guesses a trained part gives
SURE = 0.5  # where n-grams give a token this chance or more, no trained part is asked
RECENT = 64  # the latest calls, from which prices are estimated
GUESSES = ("none", "medusa", "hydra", "eagle", "dflash")


# ------------------------------------------------------------------------------ a trained part

class Trained:
    """Hold a trained part that guesses what comes after the text.

    A pair is a token, and the target's feature of the token before it. The part reads pairs. They
    wait until the part is asked. A first head of Medusa or Hydra reads the last pair alone. EAGLE's
    layer and DFlash's draft read all waiting pairs, because their caches have the earlier ones.

    target   the model whose features the part reads
    kind     medusa, hydra, eagle or dflash
    path     the file of the heads, of the layer or of the draft

    taps     the layers whose inputs are this part's features, side by side. []: a feature is what
             the LM head reads
    depth    for how many levels of a tree the part guesses
    """

    def __init__(self, target: CachedLM, kind: str, path: str):
        model = target.model
        self.embed = model.get_input_embeddings()
        self.vocab = target.vocab
        self.kind = kind
        self.layer = None  # EAGLE's layer or DFlash's draft, with its cache
        self.taps, self.depth = [], 1
        if kind == "dflash":
            self.part = target.once((kind, path), lambda: load_block_draft(path, model))
            self.layer = target.once((self.part, "cached"),
                                     lambda: BlockLM(self.part.lm, target.vocab))
            self.taps, self.depth = self.part.taps, self.part.B
        elif kind == "eagle":
            self.part = target.once((kind, path), lambda: load_draft(path, model))
            self.layer = target.once((self.part, "cached"),
                                     lambda: type(target)(self.part.lm, target.vocab))
        else:
            self.part = target.once((kind, path), lambda: load_heads(path, kind, model))
            self.to_logits = target.once((self.part, "logits"), lambda: logits_of(model))

    def start(self, pairs: Pairs) -> None:
        """Forget everything and begin a text.

        pairs    the pairs of the prompt. A prompt of one token has none
        """
        self.waiting = [pairs] if pairs.tokens else []
        self.block = None  # the logits of DFlash's block behind the text, if it was asked
        if self.layer:
            self.layer.start([])

    def add(self, pairs: Pairs) -> None:
        """Append pairs.

        pairs    the pairs of the tokens that became final, one or more
        """
        self.waiting = [*self.waiting, pairs] if self.layer else [pairs]
        self.block = None

    def predict(self, path: str = "") -> dict[str, float]:
        """Guess the next token after the text, or after a path of guesses below its root.

        path     the guesses, fewer than `depth`
        returns  {next token: its chance} for the RANKS likeliest tokens. {} if no pair waits
        """
        if self.block is None and not self.waiting:
            return {}
        logits = self.compute_block_logits(path) if self.kind == "dflash" else self.compute_logits()
        p = logits[:self.vocab].float().softmax(-1)
        p = p.nan_to_num(0.0)  # so that a part that overflows guesses nothing
        best = p.topk(min(RANKS, len(p)))
        guessed = as_text(self.part.vocab[best.indices].tolist())
        return dict(zip(guessed, best.values.tolist()))

    @torch.inference_mode()
    def compute_block_logits(self, path: str) -> torch.Tensor:
        """Compute the logits [V'] after a path. The first path of a round runs the block."""
        if self.block is None:
            features = torch.cat([pairs.features for pairs in self.waiting])
            self.root = self.waiting[-1].tokens[-1]
            self.block = run_block(self.part, self.layer, self.part.fuse(features), self.root)
            self.waiting = []
        before = torch.tensor([self.root, *as_tokens(path)][-1], device=self.block.device)
        k = len(path)
        return self.part.add_markov(self.block[k], before) / self.part.temperatures[k]

    @torch.inference_mode()
    def compute_logits(self) -> torch.Tensor:
        """Compute the logits [V'] after the text, by a head or by EAGLE's layer."""
        before, features, tokens = zip(*self.waiting)
        if self.layer:
            pairs = Pairs(sum(before, []), torch.cat(features), sum(tokens, []))
            logits = feed(self.part, self.layer, [pairs])
            self.waiting = []
        else:
            feature = features[-1][-1:]  # [1, d]
            between = self.embed(torch.tensor(tokens[-1][-1:], device=feature.device))[:, None]
            logits = self.to_logits(self.part.lm_head_of(1)(self.part(1, feature, between)))
        return logits[0]


# ---------------------------------------------------------------------------------- the tree

def predict_children(ngrams: NGrams, path: str, ask: Callable | None, w: float,
                     depth: int) -> dict[str, float]:
    """Tell with which chance each token follows a node, if the node itself is accepted.

    ngrams   the n-gram model with the text so far
    path     the tokens from below the root down to the node, "" for the root
    ask      a function of a path. It returns a trained part's {token: its chance} after the path.
             None: there is no part
    w        the weight of the part's chances
    depth    the part is asked after paths of fewer tokens than this
    returns  {token: its chance}
    """
    chances = ngrams.predict(path)
    sure = max(chances.values(), default=0.0) >= SURE
    if len(path) >= depth or ask is None or sure:
        return chances
    guessed = ask(path)
    if not any(guessed.values()):  # a part without a guess takes no weight
        return chances
    return {x: w * guessed.get(x, 0.0) + (1 - w) * chances.get(x, 0.0) for x in chances | guessed}


def grow(ngrams: NGrams, ask: Callable[[str], dict[str, float]] | None, w: float, most: int,
         least: float, depth: int = 1) -> tuple[list[int], list[int], list[float]]:
    """Grow the tree of the likeliest nodes, best first.

    ngrams   the n-gram model with the text so far
    ask      as for `predict_children`
    w        the weight of the trained part's chances
    most     the most nodes, the root among them
    least    the least chance of a node
    depth    for how many levels the part is asked
    returns  ids, parents and chances of the nodes, the root first. The chances never rise, so the
             first n nodes are the best tree of n nodes
    """
    nodes, parents, chances = [], [], []  # nodes: the path of each
    heap = [(-1.0, 0, -1, "")]  # (minus the chance, number, parent, path)
    pushed = 0  # a node's number: of equally likely nodes the one that was pushed first comes first
    while heap:
        negative, _, parent, path = heapq.heappop(heap)
        chance = -negative
        nodes.append(path)
        parents.append(parent)
        chances.append(chance)
        if len(nodes) == most:
            break
        for token, share in predict_children(ngrams, path, ask, w, depth).items():
            if chance * share >= least:
                pushed += 1
                heapq.heappush(heap, (-chance * share, pushed, len(nodes) - 1, path + token))
    root = ngrams.text[-1]
    return as_tokens(root + "".join(path[-1] for path in nodes[1:])), parents, chances


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
    recent   (rows, seconds, final tokens) of each of the latest calls
    returns  row, the seconds of one more row, and rate, the final tokens a second
    """
    one, sixteen = costs[1], costs[16]
    calls = [(1, one, 1), (16, sixteen, 0), *recent]
    rows, seconds, tokens = zip(*calls)
    slope = linear_regression(rows, seconds).slope
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


def choose_tree(ngrams: NGrams, trained: Trained | None, w: float, nodes: int, costs: list[float],
                recent: Iterable[tuple]) -> tuple[list[int], list[int], list[float]]:
    """Grow the tree as far as a node's chance is above the price of a row, then cut it.

    trained   a trained part that guesses, or None
    w         the weight of its chances
    nodes     how many nodes the tree has. 0: as many as pay
    costs     costs[n]: the seconds of a call of n rows
    recent    as for `estimate_prices`
    returns   ids, parents and chances of the nodes
    """
    ask, depth = (trained.predict, trained.depth) if trained else (None, 0)
    row, rate = estimate_prices(costs, recent)
    least = LEAST if nodes else max(LEAST, row * rate)
    ids, parents, chances = grow(ngrams, ask, w, nodes or MOST, least, depth)
    m = nodes or choose_width(chances, costs, rate)
    return ids[:m], parents[:m], chances[:m]


def hybrid(target: CachedLM, prompt: list[int], *, guess: str = "eagle", nodes: int = 0,
           adapter: str = "", datastore: str = DATASTORE, trust: str = f"{MODELS}/hybrid.json",
           successors: Successors | None = None, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Verify the likeliest continuations by n-grams and a trained guess, as many as pay.

    guess:     the trained part that guesses beside the n-grams. Medusa, hydra and eagle guess the
               token after the root, and dflash a whole block. With none n-grams guess alone
    nodes:     nodes of a tree, the root among them. With 0, as many as pay in each call
    adapter:   the file of the trained part, by default models/GUESS.safetensors
    datastore: a file made by `python -m survey.rest build`
    trust:     a file made by `python -m survey.hybrid fit`

    Yields chunks of 1 token or more; logs {"guessed", "accepted", "chances", "path"} a call.

    The Successors `successors` are what the target said after each token, kept from prompt to
    prompt, and are changed in place.

    The log's "chances" are those of the guesses, in the order of the tree. Its "path" has the
    numbers of the accepted guesses in this order, from 0.
    """
    if guess not in GUESSES:
        raise InputError(f"--guess must be {', '.join(GUESSES)}, got {guess}")
    if not 0 <= nodes <= MOST:
        raise InputError(f"--nodes must be 1 to {MOST}, or 0, got {nodes}")
    store = target.once(("rest", datastore), lambda: load_datastore(datastore, target.model))
    facts = target.once(("trust", trust), lambda: load_trust(trust, target.model))
    if guess not in facts["w"]:
        raise InputError(f"--guess must be one that {trust!r} has a weight for, got {guess}")
    trained, taps = None, []
    if guess != "none":
        trained = Trained(target, guess, adapter or f"{MODELS}/{guess}.safetensors")
        taps = trained.taps
    with tap_target(target, taps) if taps else nullcontext():
        target.start(prompt[:-1])
        if trained:
            trained.start(Pairs(prompt[:-1], target.features, prompt[1:]))
        ngrams = NGrams(as_text(prompt), store, facts["trust"], successors)
        recent = deque(maxlen=RECENT)  # calls
        while True:
            # The costs of rows are measured again whenever the context has doubled. This is no part
            # of the call, so `began` comes after it.
            power = max(target.length, 255).bit_length()
            costs = target.once(("row costs", power), lambda: row_costs(target, MOST))
            began = time.perf_counter()
            ids, parents, chances = choose_tree(ngrams, trained, facts["w"][guess], nodes, costs,
                                                recent)
            # Verify.
            logits = target.forward(ids, parents)
            path, chunk = walk(ids, parents, sample(logits))
            target.commit(path)
            # Tell all that guesses what became final.
            ngrams.add(as_text(chunk))
            ngrams.learn(ids, logits)  # rejected nodes too
            if trained:
                trained.add(Pairs([ids[x] for x in path], target.features[path], chunk))
            recent.append((len(ids), time.perf_counter() - began, len(chunk)))
            if log is not None:
                log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1,
                            "chances": chances[1:], "path": [x - 1 for x in path[1:]]})
            yield chunk


# ------------------------------------------------------------------------------- how far to trust

def fit(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
        datastore: str = DATASTORE, adapters: str = MODELS, max_new_tokens: int = 200) -> None:
    """Measure on a model's own answers how far to trust n-grams, and trained parts beside them.

    The result is the trust of each class of entries (ngrams.py), and for each trained part its
    weight w. The parts should not have been trained on these prompts.

    out:       the JSON file to make
    work:      the folder of answers, by default OUT.work
    datastore: a file made by `python -m survey.rest build`, from which these answers are left out
    adapters:  the folder of medusa.safetensors, hydra.safetensors, eagle.safetensors and
               dflash.safetensors, or of some of them
    max_new_tokens: the most tokens of an answer
    """
    from models.training import collect_examples
    work = work or Path(f"{out}.work")
    data = sum(collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=0), [])
    # Leave these answers out of the datastore, which would know them all by heart. A text of the
    # datastore begins with BEGIN tokens of a prompt. The tokens behind these tell whether it is one
    # of the answers.
    few = min(32, max_new_tokens)
    begins = {as_text(answer[:few]) for _, answer in data}
    texts = load_datastore(datastore, model).text.split(BOUNDARY)
    store = Datastore(BOUNDARY.join(x for x in texts if x[BEGIN:BEGIN + few] not in begins))
    lm = CachedLM(model)
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
    trust = fit_trust(chains)
    # The weight of a part is fitted to the tokens before which it would be asked.
    by_ngrams = [mix_entries(found, trust) for found in entries]
    asked = [i for i, chances in enumerate(by_ngrams) if max(chances.values(), default=0.0) < SURE]
    q = [by_ngrams[i].get(tokens[i], 0.0) for i in asked]
    w = {kind: fit_weight([p[i] for i in asked], q) for kind, p in guessed.items()}
    save_facts(out, {"model": model}, trust=trust, w={"none": 0.0} | w)
    print(f"{len(tokens):,} tokens; weights of the trained parts where n-grams are not sure, for "
          f"{len(asked):,} of them: {w}")


def replay_answers(lm: CachedLM, data: list[tuple], store: Datastore,
                   parts: dict[str, Trained]) -> tuple[str, list[list], dict[str, list[float]]]:
    """Ask n-grams and trained parts before each token of answers, as decoding would.

    lm       the target
    data     pairs of a prompt and an answer
    store    the datastore of the n-grams
    parts    {kind of part: the part}
    returns  tokens, those of all answers as one text, entries, which has for each token what
             `list_entries` yields before it, and {kind of part: its chance of each token}
    """
    tokens = ""
    entries = []
    guessed = {kind: [] for kind in parts}
    taps = parts["dflash"].taps if "dflash" in parts else []
    last = depth_of(lm.model)
    *widths, read_width = tap_widths(lm.model, [*taps, last])
    successors = Successors()
    for prompt, answer in tqdm(data, desc="answers"):
        ngrams = NGrams(as_text(prompt), store, [], successors)
        # What the LM head reads is tapped too, for the target's logits and for the other parts.
        with tap_target(lm, sorted({*taps, last})):
            lm.start(prompt + answer)
        tapped, read = lm.features[:, :sum(widths)], lm.features[:, -read_width:]
        said = read_logits(lm, read[len(prompt) - 1:])
        features = {kind: tapped if kind == "dflash" else read for kind in parts}
        for kind, part in parts.items():
            part.start(Pairs(prompt[:-1], features[kind][:len(prompt) - 1], prompt[1:]))
        for i, token in enumerate(as_text(answer), len(prompt) - 1):
            entries.append([*ngrams.list_entries("")])
            before = as_tokens(ngrams.text[-1])
            ngrams.add(token)
            successors.learn(before, said[i + 1 - len(prompt)][None])
            for kind, part in parts.items():
                guessed[kind].append(part.predict().get(token, 0.0))
                # Here i is the place of the token before this one, so row i led to this token.
                part.add(Pairs(before, features[kind][i:i + 1], as_tokens(token)))
        tokens += as_text(answer)
    return tokens, entries, guessed


@torch.inference_mode()
def read_logits(lm: CachedLM, features: torch.Tensor) -> torch.Tensor:
    """Return the logits [n, V] that a model makes of features [n, d]."""
    head = lm.model.get_output_embeddings()
    return logits_of(lm.model)(head(features))[:, :lm.vocab]


def load_trust(path: str, model) -> dict:
    """Read a file that `fit` made for this model.

    path     the file
    model    the model that the file must be for
    returns  a dictionary with "trust", as for `NGrams`, and "w", {guess: its weight}. InputError if
             the file is damaged, or for another model
    """
    def parse(facts: dict) -> dict:
        # An older file has two sources. Nothing that the target said is trusted then.
        numbers = torch.tensor(facts["trust"])
        if len(numbers) == len(SOURCES) - 1:
            numbers = torch.cat([numbers, torch.zeros_like(numbers[:1])])
            facts["trust"] = numbers.tolist()
        right_shape = numbers.shape == (len(SOURCES), len(SEEN) + 1, 3)
        if not right_shape or not all(
                0 <= x <= 1 for x in (*numbers.flatten(), *facts["w"].values())):
            raise ValueError("not 3 x 5 x 3 numbers and weights of 0 to 1")
        return facts
    expected = "a file that `python -m survey.hybrid fit` made for this model"
    return load_facts(path, {"model": model}, expected, parse)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    """Say what a run's calls were like, on average."""
    guessed, accepted = (sum(r[x] for r in run.log) / len(run.log) for x in ("guessed", "accepted"))
    expected = sum(sum(r["chances"]) for r in run.log) / len(run.log)
    return (f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted, {expected:.2f} expected by "
            "their chances")


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([hybrid], report, commands=[fit], ranges={"guess": GUESSES},
                  shared={"successors": Successors}))
