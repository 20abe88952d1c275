"""Compare all drafters on the same answers: who guesses best, and what a guess costs.

    make who                                    # the embedded target
    python results/who_guesses.py --target DIR --adapters FOLDER --chat --prompts FILE --work DIR

Every drafter decodes the same held-out prompts greedily, so all of them guess the same answers. In
16 bits the width of a call may decide a near-tie, and an answer then goes on in another way.

A drafter guesses a chain of up to 8 tokens a round, and no tree:

    acceptance of guess k = rounds that accept k guesses or more / rounds that accept k - 1 or more

Each method's own generator decodes, and its log says how many guesses of a round were accepted. So
a round begins where the one before it ended, as in use, and not at places that were chosen here. A
guess that a drafter does not make, since it finds nothing, counts as wrong. A round that the end of
an answer cuts says nothing of the guesses behind the end.

The check decodes once more, with chains of half as many guesses. The acceptance of the long chains
must predict the tokens per round of these, and that of one half of the prompts those of the other.

Costs are measured with chains of three lengths. Their unit is a round of AR, which is a call of one
row. A round of a chain of k guesses takes the time to guess and a call of k + 1 rows:

    cost of a guess = (cost of the round - cost of the call's rows) / guesses

The weights that a guess reads are those of all modules that run in a round beyond those of one
call of the target.
"""
import contextlib
import copy
import functools
import hashlib
import itertools
import json
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Callable, Iterator, NamedTuple
from unittest.mock import patch

import torch
from tqdm import tqdm

from bench import Bench, Ours, ROOT, check_results, clock, options, run_script, table
from who_picture import Curve, draw_figure

sys.path.insert(0, str(ROOT))
from bita import bita, load_tuning  # noqa: E402  (the path is set above)
from cli.run import Run  # noqa: E402
from common import CachedLM, InputError, autoregressive, greedy  # noqa: E402
from survey.clock import Node, best_tree  # noqa: E402
from jacobi import prompt_lookup  # noqa: E402
from models.files import write_text  # noqa: E402
from models.training import digest, read_whole_lines  # noqa: E402
from speculative import speculative  # noqa: E402
from survey import dflash as dflash_file, eagle as eagle_file, eagle3 as eagle3_file  # noqa: E402
from survey import hybrid as hybrid_file, recycling as recycling_file  # noqa: E402
from survey import rest as rest_file  # noqa: E402
from survey.draft_verify import draft_verify, load_blocks  # noqa: E402
from survey.early_exit import early_exit, load_exit  # noqa: E402
from survey.masks import pass_sampling  # noqa: E402
from survey.medusa import load_heads, medusa  # noqa: E402

LONGEST = 8  # guesses of a chain, at most
FEWEST = 30  # an acceptance of fewer rounds than these is not shown
NEAR = 0.05  # how far a prediction may be off
TIMED = 64  # tokens that a drafter decodes of each prompt while the clock runs


class Kept:
    """Keep what was measured, by name, a line of JSON each.

    A figure that is kept is not measured again. A line that was cut off is.
    """

    def __init__(self, bench: Bench):
        args = bench.args
        settings = (digest(bench.target.state_dict()), str(bench.target.dtype),
                    str(bench.target.device), args.graphs, sorted(bench.eos),
                    [prompt for _, prompt in bench.pairs()], args.max_new_tokens)
        args.work.mkdir(parents=True, exist_ok=True)
        self.path = args.work / f"{digest({}, *settings)}.jsonl"
        with open(self.path, "a+b") as file:
            self.known = dict(map(json.loads, read_whole_lines(file)))

    def __call__(self, name: str, make: Callable):
        if name not in self.known:
            self.known[name] = json.loads(json.dumps(make()))
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps([name, self.known[name]]) + "\n")
        return self.known[name]


class Drafter(NamedTuple):
    """Describe who guesses.

    name    what it is called in tables, one of those in GROUPS of who_picture.py
    most    guesses of its longest chain
    make    a function of a number of guesses that builds the method with chains of as many
    files   what was trained or collected for it
    own     tokens of a round that are no guesses
    draft   the small model, where there is one
    """
    name: str
    most: int
    make: Callable[[int], Ours]
    files: tuple[Path, ...] = ()
    own: int = 1
    draft: torch.nn.Module | None = None

    def lengths(self) -> list[int]:
        """Return the lengths of the chains that the clock measures."""
        return sorted({1, self.half, self.most})

    @property
    def half(self) -> int:
        """Return half of the guesses of the longest chain, which the check decodes with."""
        return max(1, self.most // 2)


# ------------------------------------------------------------------------------------- chains

def retrieve_chain(stores: list, text: str, n: int, longest: int) -> tuple[list, list]:
    """Look up what most often followed the longest suffix that occurs: REST's tree as a chain.

    The arguments and what is returned are those of `retrieve` in survey/rest.py.
    """
    suffixes = itertools.product(range(min(longest, len(text)), 0, -1), stores)
    found = (store.find_following(text[-size:]) for size, store in suffixes)
    # The end of the text itself is found as well, and nothing follows it.
    following = next(filter(any, found), [])
    chain = ""
    for prefix in rest_file.rank_prefixes(following):  # the most frequent one comes first
        if prefix[:-1] == chain and len(chain) < n:
            chain = prefix
    return rest_file.make_tree(text, [chain])


def keep_likeliest(predict: Callable[..., dict[str, float]], *args) -> dict[str, float]:
    """Return only the likeliest of the children that `predict` gives with their chances."""
    chances = predict(*args)
    best = sorted(chances, key=chances.get)[-1:]
    return {token: chances[token] for token in best}


def plan_likeliest(accept: list[list[float]], n: int) -> list[Node]:
    """Plan a chain of the likeliest children, where `best_tree` would plan a tree."""
    return best_tree([rates[:1] for rates in accept], n)


@contextlib.contextmanager
def only_chains() -> Iterator[None]:
    """Let methods that have no option for it give every node one child, while this lasts."""
    one = functools.partial(keep_likeliest, hybrid_file.predict_children)
    changes = ((rest_file, "retrieve", retrieve_chain), (hybrid_file, "predict_children", one),
               (dflash_file, "RANKS", 1), (recycling_file, "best_tree", plan_likeliest),
               (recycling_file, "DEPTH", LONGEST))
    with contextlib.ExitStack() as stack:
        for file, name, value in changes:
            stack.enter_context(patch.object(file, name, value))
        yield


def plan_chain(part, k: int):
    """Copy heads or a draft so that their tree is a chain of k guesses, whatever was measured."""
    new = copy.copy(part)
    new.accept = [[0.5]] * k
    return new


def take_masks(tuning, k: int):
    """Copy BiTA's tuning with its first k mask tokens."""
    new = copy.deepcopy(tuning)
    new.masks = torch.nn.Parameter(new.masks[:k].detach())
    return new


# ----------------------------------------------------------------------------------- drafters

class Drafters:
    """Build the drafters, each if what it needs is there.

    bench   the loaded models and prompts
    """

    def __init__(self, bench: Bench):
        self.bench, self.found = bench, {}
        self.add_models()
        self.add_layers()
        self.add_parallel()
        self.add_lookups()

    def run(self, method, draft=None, **settings) -> Ours:
        """Build a method with caches of its own."""
        bench = self.bench
        models = {"target": bench.cached(bench.target)}
        if draft is not None:
            models["draft"] = bench.cached(draft)
        return Ours(method, models, bench.args.max_new_tokens, bench.eos, greedy, **settings)

    def add(self, name: str, make: Callable[[], tuple], *names: str, own: int = 1,
            draft=None) -> None:
        """Add a drafter, or say what is missing.

        make    a function that returns the drafter's `most` and its `make`
        names   files of --adapters. All must be there

        The other arguments are those of `Drafter`.
        """
        files = tuple(self.bench.args.adapters / file for file in names)

        def build() -> Drafter:
            if lacking := [path for path in files if not path.exists()]:
                raise InputError(f"--adapters must hold {lacking[0].name}")
            return Drafter(name, *make(*files), files, own, draft)
        try:
            self.found[name] = build()
        except InputError as error:
            print(f"{name} left out: {error}\n")

    def add_draft(self, name: str, draft) -> None:
        """Add a small model that guesses."""
        self.add(name, lambda: (LONGEST, lambda k: self.run(speculative, draft, gamma=k)),
                 draft=draft)

    def add_models(self) -> None:
        """Add what runs layers of a model for each guess."""
        bench = self.bench
        if bench.draft:
            self.add_draft("small model", bench.draft)
        if bench.args.distilled:
            self.add_draft("distilled", bench.load(bench.args.distilled))

        def load(path: Path):
            trained = load_exit(path, bench.target)
            return LONGEST, lambda k: self.run(early_exit, trained=trained, gamma=k)

        def skip(path: Path):
            skipped = load_blocks(str(path), bench.target)
            return LONGEST, lambda k: self.run(draft_verify, skipped=skipped, gamma=k,
                                               threshold=0.0, adaptive=False)
        self.add("early exit", load, "exit.safetensors")
        self.add("Draft & Verify", skip, "blocks.json")

    def add_layers(self) -> None:
        """Add what runs a layer or a head on the target's features for each guess."""
        model = self.bench.target

        def features(method, load: Callable, path: Path):
            draft = load(path, model)
            return LONGEST, lambda k: self.run(method, trained=plan_chain(draft, k), nodes=1 + k,
                                               dynamic=False)
        one, three = (functools.partial(features, method, load) for method, load in (
            (eagle_file.eagle, eagle_file.load_draft),
            (eagle3_file.eagle3, eagle3_file.load_draft)))
        self.add("EAGLE", one, "eagle.safetensors")
        self.add("EAGLE-3", three, "eagle3.safetensors")
        self.add("MTP", three, "mtp.safetensors")
        self.add("Hydra", functools.partial(self.load_heads, "hydra"), "hydra.safetensors")

    def load_heads(self, kind: str, path: Path):
        """Load heads of Medusa or Hydra."""
        heads = load_heads(path, kind, self.bench.target)
        return heads.K, lambda k: self.run(medusa, heads=kind, trained=plan_chain(heads, k),
                                           nodes=1 + k)

    def add_parallel(self) -> None:
        """Add what makes all guesses of a round in one pass."""
        model = self.bench.target

        def block(path: Path):
            draft = dflash_file.load_draft(path, model)
            return min(draft.B, LONGEST), lambda k: self.run(dflash_file.dflash, trained=draft,
                                                             nodes=1 + k)

        def masks(path: Path):
            tuning = load_tuning(path, model)
            return len(tuning.masks), lambda k: self.run(
                bita, tuning=take_masks(tuning, k), tree="efficient", k=1)

        def lookahead_tokens(path: Path):
            trained = load_tuning(path, model)
            return len(trained.masks), lambda k: self.run(pass_sampling, trained=trained, L=k)
        self.add("Medusa", functools.partial(self.load_heads, "medusa"),
                 "medusa.safetensors")
        self.add("DFlash", block, "dflash.safetensors")
        self.add("BiTA", masks, "bita.safetensors")
        # A call of PaSS drafts, and its first token is the target's own. So it is final as well.
        self.add("PaSS", lookahead_tokens, "pass.safetensors", own=2)

    def add_lookups(self) -> None:
        """Add what looks its guesses up, and the hybrid."""
        model = self.bench.target

        def store(path: Path):
            texts = rest_file.load_datastore(path, model)
            return LONGEST, lambda k: self.run(rest_file.rest, store=texts, nodes=1 + k)

        def both(datastore: Path, trust: Path, heads: Path):
            if "hydra" not in hybrid_file.load_trust(str(trust), model)["pools"]:
                raise InputError(f"--adapters must hold a {trust.name} with a weight for hydra")
            return LONGEST, lambda k: self.run(
                hybrid_file.hybrid, guess="hydra", nodes=1 + k, datastore=str(datastore),
                trust=str(trust), adapter=str(heads))
        self.add("n-grams", lambda: (LONGEST, lambda k: self.run(prompt_lookup, N=1 + k, G=1)))
        self.add("REST", store, "rest.safetensors")
        self.add("recycling", lambda: (LONGEST, lambda k: self.run(
            recycling_file.recycling, nodes=1 + k)))
        self.add("hybrid", both, "rest.safetensors", "hybrid.json", "hydra.safetensors")


# --------------------------------------------------------------------------------- acceptance

def decode_all(run: Ours, prompts: list[list[int]]) -> list[dict]:
    """Decode prompts, and return for each its tokens and what its rounds accepted.

    returns  {"tokens": of the answer, "accepted": [guesses of each round], "cut": whether the
             answer's end cut the last round}
    """
    run.new_round()
    answers = []
    for prompt in prompts:
        count = run(prompt)
        answers.append({"tokens": count.tokens, "accepted": [x["accepted"] for x in count.log],
                        "cut": "cut" in count.log[-1]})
    return answers


def measure_acceptance(answers: list[dict], most: int) -> list[tuple[int, int]]:
    """Count how often each guess of a chain was tried, and how often it was right.

    answers   what `decode_all` returned
    most      guesses of a chain
    returns   for each guess (rounds in which all guesses before it were right, those of them in
              which it was right too)
    """
    tried, right = [0] * most, [0] * most
    for answer in answers:
        last = len(answer["accepted"]) - 1
        for i, accepted in enumerate(answer["accepted"]):
            judged = accepted + 1  # the first wrong guess is judged as well
            if answer["cut"] and i == last:
                judged = accepted
            for k in range(min(judged, most)):
                tried[k] += 1
                right[k] += k < accepted
    return list(zip(tried, right))


def rates_of(counts: list[tuple[int, int]]) -> list[float]:
    """Return the acceptance of each guess, 0 where it was never tried."""
    return [right / max(1, tried) for tried, right in counts]


def expect_tokens(rates: list[float], own: int) -> float:
    """Compute the tokens that a round of a long text is expected to give.

    rates   the acceptance of each guess of the chain
    own     tokens of a round that are no guesses
    """
    return own + sum(itertools.accumulate(rates, lambda chance, rate: chance * rate))


def predict_tokens_per_round(rates: list[float], own: int, lengths: list[int]) -> float:
    """Predict the tokens per round of answers whose last round is cut at their end.

    rates     the acceptance of each guess of the chain
    own       tokens of a round that are no guesses
    lengths   tokens of each answer
    """
    reached = [1.0, *itertools.accumulate(rates, lambda chance, rate: chance * rate), 0.0]
    chances = [here - after for here, after in itertools.pairwise(reached)]  # of 0, 1, … accepted
    rounds = [0.0]  # rounds[t] are expected for t tokens
    for t in range(1, 1 + max(lengths)):
        left = [rounds[max(0, t - own - accepted)] for accepted in range(len(chances))]
        rounds.append(1 + sum(chance * more for chance, more in zip(chances, left)))
    return sum(lengths) / sum(rounds[t] for t in lengths)


def count_tokens_per_round(answers: list[dict]) -> float:
    """Count the tokens per round that answers really had."""
    tokens = sum(answer["tokens"] for answer in answers)
    return tokens / sum(len(answer["accepted"]) for answer in answers)


class Check(NamedTuple):
    """Hold a prediction of tokens per round beside what was measured."""
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """Return how far the prediction is off, as a share of what was measured."""
        return self.predicted / self.measured - 1


def check_prediction(drafter: Drafter, long: list[dict], short: list[dict]) -> Check:
    """Compare the tokens per round of short chains with what the long ones' acceptance predicts.

    long, short   what `decode_all` returned, for the longest chain and for half of it
    """
    rates = rates_of(measure_acceptance(long, drafter.most))[:drafter.half]
    lengths = [answer["tokens"] for answer in short]
    return Check(predict_tokens_per_round(rates, drafter.own, lengths),
                 count_tokens_per_round(short))


# -------------------------------------------------------------------------------------- costs

def time_rounds(run: Ours, prompt: list[int], limit: int) -> tuple[float, float] | None:
    """Measure the mean seconds of a round and its mean guesses, the first round left out.

    The first round has the prompt's pass.

    returns   (seconds, guesses), or None if the answer has too few rounds
    """
    job = Run(run.method, run.models, run.shared | run.options, run.eos)
    marks = [job.seconds for _ in job.decode(prompt, limit, run.sample)]
    if len(marks) < 3:
        return None
    guesses = sum(map(guesses_of, job.log[1:]))
    return (marks[-1] - marks[0]) / (len(marks) - 1), guesses / (len(marks) - 1)


def time_calls(lm: CachedLM, prompt: list[int], widths: range) -> list[float]:
    """Measure the seconds of calls of these many rows behind a prompt, medians of five each."""
    lm.start(prompt[:-1])
    seconds = {n: [] for n in widths}
    for n in 5 * [*widths]:
        began = clock(lm.model.device)
        lm.forward([prompt[-1]] * n)
        seconds[n].append(clock(lm.model.device) - began)
        lm.truncate(lm.length)
    return [median(some) for some in seconds.values()]


def count_read(run: Ours, prompt: list[int], limit: int) -> tuple[int, int, int]:
    """Count the weights that run in the rounds of a prompt after the first one.

    A module that runs twice is read twice. Embeddings are left out, of which a row is read a token.

    returns  bytes of weights, rounds, and guesses
    """
    read = []

    def note(module, args) -> None:
        empty = bool(args) and torch.is_tensor(args[0]) and args[0].numel() == 0
        if not isinstance(module, torch.nn.Embedding) and not empty:
            read.extend(p.nbytes for p in module.parameters(recurse=False))
    job = Run(run.method, run.models, run.shared | run.options, set())
    chunks = job.decode(prompt, limit, run.sample)
    next(chunks)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        rounds = sum(1 for _ in chunks)
    finally:
        hook.remove()
    return sum(read), rounds, sum(map(guesses_of, job.log[1:]))


def guesses_of(record: dict) -> int:
    """Return how many guesses a round had, which some methods call drafted tokens."""
    return record.get("guessed", record.get("drafted"))


def measure_costs(bench: Bench, drafters: dict[str, Drafter]) -> dict:
    """Measure what rounds cost by the length of the chain, and what a guess reads.

    returns  {"AR": seconds of a round of AR, "calls": seconds of calls of 1, 2, … rows, "rounds":
             {name: [[guesses of a chain, seconds of a round, guesses that it really has]]}, "read":
             {name: bytes of weights for each guess}, "weights": bytes that a call reads}
    """
    prompts = sorted((prompt for _, prompt in bench.pairs()), key=len)[:bench.args.timed]
    limit = min(TIMED, bench.args.max_new_tokens)
    ar, lm = bench.ours(autoregressive), bench.cached(bench.target)
    runs = {(name, k): x.make(k) for name, x in drafters.items() for k in x.lengths()}
    for run in (ar, *runs.values()):  # to warm up
        run.new_round()
        time_rounds(run, prompts[0], 8)
    spent, alone, calls = {key: [] for key in runs}, [], []
    for prompt in tqdm(prompts, desc="prompts on the clock", leave=False):
        alone.append(time_rounds(ar, prompt, limit))
        calls.append(time_calls(lm, prompt, range(1, 2 + LONGEST)))
        for key, run in runs.items():
            spent[key].append(time_rounds(run, prompt, limit))
    if not any(alone):
        raise InputError("--max-new-tokens must be 3 or more, and prompts have answers of as many, "
                         f"got {bench.args.max_new_tokens}")
    rounds, read = {name: [] for name in drafters}, {}
    for (name, k), measured in spent.items():
        if whole := [x for x in measured if x is not None]:
            rounds[name].append([k, *map(median, zip(*whole))])
    both, alone_rounds, _ = count_read(ar, prompts[-1], limit)
    weights = both // alone_rounds
    for name, x in drafters.items():
        both, n, guesses = count_read(runs[name, x.most], prompts[-1], limit)
        read[name] = (both - n * weights) / max(1, guesses)
    seconds = median(x[0] for x in alone if x is not None)
    return {"AR": seconds, "calls": [*map(median, zip(*calls))], "rounds": rounds, "read": read,
            "weights": weights}


def interpolate(points: list[tuple[float, float]], x: float) -> float:
    """Return the value at x of a line through points, which are in order.

    Before the first point and behind the last one the line is level.
    """
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[0][1] if x < points[0][0] else points[-1][1]


class Best(NamedTuple):
    """Hold what is known of the fastest chain of a drafter. Costs are in rounds of AR."""
    length: int
    tokens: float  # of a round
    cost: float  # of a round
    guess: float  # of a guess

    @property
    def speed(self) -> float:
        """Return the speed in times AR's."""
        return self.tokens / self.cost


def find_best(drafter: Drafter, rates: list[float], costs: dict) -> Best:
    """Find the length of a chain with which a drafter makes most tokens a second.

    rates   its acceptance
    costs   what `measure_costs` returned
    """
    measured, unit = costs["rounds"][drafter.name], costs["AR"]
    calls = list(enumerate(costs["calls"], 1))
    found = []
    for k in range(1, 1 + drafter.most):
        seconds = interpolate([(x[0], x[1]) for x in measured], k)
        guesses = interpolate([(x[0], x[2]) for x in measured], k)
        rows = interpolate(calls, 1 + guesses) - calls[0][1]
        guess = max(0.0, seconds - unit - rows) / guesses if guesses else 0.0
        found.append(Best(k, expect_tokens(rates[:k], drafter.own), seconds / unit, guess / unit))
    return max(found, key=lambda best: best.speed)


# ------------------------------------------------------------------------------------- tables

def table_acceptance(drafters: dict[str, Drafter], answers: dict[str, dict]) -> list[str]:
    """Print the acceptance of each guess and the check of the prediction.

    answers   for each drafter what `decode_all` returned, for the "long" and the "short" chains
    returns   the names of the drafters whose prediction is off by more than NEAR
    """
    rows = [["drafter", *(f"guess {k}" for k in range(1, 1 + LONGEST)), "rounds",
             "tokens a round, half the chain", "predicted", "off", "off, other prompts"]]
    misses = []
    for name, x in drafters.items():
        long, short = answers[name]["long"], answers[name]["short"]
        counts = measure_acceptance(long, x.most)
        cells = [f"{right / tried:.2f}" if tried >= FEWEST else "" for tried, right in counts]
        check = check_prediction(x, long, short)
        other = ""
        if len(long) > 1:
            other = f"{check_prediction(x, long[::2], short[1::2]).off:+.1%}"
        if abs(check.off) > NEAR:
            misses.append(name)
        rows.append([name, *cells, *[""] * (LONGEST - x.most), str(counts[0][0]),
                     f"{check.measured:.2f}", f"{check.predicted:.2f}", f"{check.off:+.1%}",
                     other])
    print(table(rows))
    return misses


def table_costs(drafters: dict[str, Drafter], rates: dict, costs: dict) -> dict[str, Best]:
    """Print what a guess costs, and what the fastest chain makes of it.

    rates     the acceptance of each drafter
    costs     what `measure_costs` returned
    returns   for each drafter its fastest chain
    """
    rows = [["drafter", "a guess costs", "weights a guess reads, MB", "of the target's",
             "best chain", "tokens a round", "a round costs", "x AR"]]
    found = {}
    for name, x in drafters.items():
        if not costs["rounds"].get(name):
            continue
        best = found[name] = find_best(x, rates[name], costs)
        read = costs["read"][name]
        rows.append([name, f"{best.guess:.3f}", f"{read / 1e6:.1f}",
                     f"{read / costs['weights']:.1%}", str(best.length), f"{best.tokens:.2f}",
                     f"{best.cost:.2f}", f"{best.speed:.2f}"])
    print(table(rows))
    return found


def digest_parts(drafter: Drafter) -> str:
    """Return a hash of what was trained or collected for a drafter."""
    hashed = hashlib.sha256()
    for path in drafter.files:
        hashed.update(path.read_bytes())
    if drafter.draft is not None:
        hashed.update(digest(drafter.draft.state_dict()).encode())
    return hashed.hexdigest()[:16]


def compare(bench: Bench, kept: Kept) -> None:
    """Measure all drafters, or take what is kept, and print the tables and draw the picture."""
    drafters, args = Drafters(bench).found, bench.args
    prompts = [prompt for _, prompt in bench.pairs()]
    names = {name: f"{name} {digest_parts(x)}" for name, x in drafters.items()}
    answers = {}
    for name, x in tqdm(drafters.items(), desc="drafters", leave=False):
        answers[name] = kept(names[name], lambda: {
            "long": decode_all(x.make(x.most), prompts), "short": decode_all(x.make(x.half),
                                                                             prompts)})
    timed = f"costs {torch.get_num_threads()} {args.timed} {sorted(names.values())}"
    if args.time_again:
        kept.known.pop(timed, None)
    costs = kept(timed, lambda: measure_costs(bench, drafters))
    misses = table_acceptance(drafters, answers)
    counts = {name: measure_acceptance(answers[name]["long"], x.most)
              for name, x in drafters.items()}
    found = table_costs(drafters, {name: rates_of(some) for name, some in counts.items()}, costs)
    print(f"A round of AR took {1000 * costs['AR']:.1f} ms. The prediction is off by more than "
          f"{NEAR:.0%} for: {', '.join(misses) or 'none'}.\n")
    if args.picture:
        write_text(args.picture, draw_figure([
            make_curve(name, counts[name], best) for name, best in found.items()]))


def make_curve(name: str, counts: list[tuple[int, int]], best: Best) -> Curve:
    """Collect what the figure shows of a drafter, with the digits that the tables have.

    counts   what `measure_acceptance` returned
    """
    rates = [round(right / tried, 2) for tried, right in counts if tried >= FEWEST]
    return Curve(name, rates, *(round(x, 2) for x in (best.cost, best.tokens, best.speed)))


# ---------------------------------------------------------------------------- the command line

def main() -> None:
    parser = options(__doc__)
    add = parser.add_argument
    add("--distilled", help="directory of a second draft model")
    add("--work", type=Path, default=ROOT / "models/work/who", help="folder of what was measured")
    add("--picture", type=Path, metavar="FILE", help="the SVG file to draw")
    add("--timed", type=int, default=6, help="prompts that are decoded while the clock runs")
    add("--time-again", action="store_true", help="measure the costs anew, though they are kept")
    parser.set_defaults(rounds=1)
    args = parser.parse_args()
    check_results(args)
    if args.temperature != 0:
        raise InputError(f"--temperature must be 0, got {args.temperature}")
    if args.timed < 1:
        raise InputError(f"--timed must be 1 or more, got {args.timed}")
    bench = Bench(args)
    print(f"`{shlex.join(['python', *sys.argv])}`\n\n{bench.target.device.type}, "
          f"{bench.target.dtype}, {torch.get_num_threads()} threads, torch "
          f"{torch.__version__}; {len(bench.pairs())} prompts ({bench.dropped} left out for "
          "loops)\n")
    with only_chains():
        compare(bench, Kept(bench))


if __name__ == "__main__":
    sys.exit(run_script(main))
