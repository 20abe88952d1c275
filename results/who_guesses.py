"""Compare all drafters on the same answers: who guesses best, and what a guess costs.

    make who                                    # the embedded target
    python results/who_guesses.py --target DIR --adapters FOLDER --chat --prompts FILE

Every drafter decodes the same held-out prompts greedily, so all of them guess the same answers. In
16 bits the width of a call may decide a near-tie, and an answer then goes on in another way.

A drafter guesses a chain of up to 8 tokens a round, and no tree:

    acceptance of guess k = rounds that accept k guesses or more / rounds that accept k - 1 or more

Each method's own generator decodes, and its log says how many guesses of a round were accepted. So
a round begins where the one before it ended, as in use, and not at places that were chosen here. A
guess that a drafter does not make, since it finds nothing, counts as wrong. A round that the end of
an answer cuts says nothing of the guesses behind the end.

Costs are measured with chains of three lengths. Their unit is a round of AR, which is a call of one
row. A round of a chain of k guesses takes the time to guess and a call of k + 1 rows:

    cost of a guess = (cost of the round - cost of the call's rows) / guesses
"""
import functools
import itertools
import operator
import sys
import timeit
from contextlib import ExitStack
from pathlib import Path
from typing import Callable
from unittest.mock import patch

import numpy as np
import torch
from tqdm import tqdm

from bench import (AR, Bench, Ours, guesses_of, keep_fitting, open_bench, parser_of, run_script,
                   table)  # it sets the path for what follows
from bita import load_tuning
from common import InputError
from hybrid import hybrid
from survey import dflash, eagle, medusa, recycling, rest
from support.clock import Node, best_tree
from support.files import write_text
from training.loop import require
from who_picture import GUESSES, draw_figure, read_curves

FEWEST = 30  # an acceptance of fewer rounds than these is not shown
TIMED = 64  # tokens that a drafter decodes of each prompt while the clock runs
# The row of the bench that lets a drafter guess chains of k tokens, which are n = k + 1 nodes. L is
# k too, except that PaSS calls the longest chain 0
DRAFTERS = {
    "small model": "speculative --gamma {k}", "early exit": "early_exit --gamma {k}",
    "Draft & Verify": "draft_verify --gamma {k} --threshold 0 --no-adaptive",
    "EAGLE": "eagle --nodes {n}", "EAGLE-3": "eagle3 --nodes {n}",
    "Hydra": "medusa --heads hydra --nodes {n}", "Medusa": "medusa --nodes {n}",
    "DFlash": "dflash --nodes {n}", "BiTA": "bita --tree efficient --k 1",
    "PaSS": "pass_sampling --L {L}", "n-grams": "prompt_lookup --G 1 --N {n}",
    "REST": "rest --nodes {n}", "recycling": "recycling --nodes {n}",
    "hybrid": "hybrid --guess hydra --nodes {n}"}
# Tokens of a round that are no guesses. A call of PaSS drafts, and its first token is the target's
# own. So it is final as well.
OWN = dict.fromkeys(DRAFTERS, 1) | {"PaSS": 2}


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
    for prefix in rest.rank_prefixes(following):  # the most frequent one comes first
        if prefix[:-1] == chain and len(chain) < n:
            chain = prefix
    return rest.make_tree(text, [chain])


def keep_likeliest(predict: Callable[..., dict[str, float]], *args) -> dict[str, float]:
    """Return only the likeliest of the children that `predict` gives with their chances."""
    chances = predict(*args)
    best = sorted(chances, key=chances.get)[-1:]
    return {token: chances[token] for token in best}


def plan_likeliest(accept: list[list[float]], n: int) -> list[Node]:
    """Plan a chain of the likeliest children, where `best_tree` would plan a tree."""
    return best_tree([rates[:1] for rates in accept], n)


def only_chains() -> ExitStack:
    """Let methods that have no option for it give every node one child, while a `with` lasts."""
    one = functools.partial(keep_likeliest, hybrid.predict_children)
    stack = ExitStack()
    for file, name, value in (
            (rest, "retrieve", retrieve_chain), (hybrid, "predict_children", one),
            (eagle, "RANKS", 1), (dflash, "RANKS", 1), (medusa, "best_tree", plan_likeliest),
            (recycling, "best_tree", plan_likeliest), (recycling, "DEPTH", GUESSES)):
        stack.enter_context(patch.object(file, name, value))
    return stack


def make_chain(bench: Bench, name: str, k: int = GUESSES) -> Ours:
    """Build a drafter with chains of k guesses, or of as many as it can make, if they are fewer."""
    run = bench.row(DRAFTERS[name].format(k=k, n=k + 1, L=0 if k == GUESSES else k))
    if name == "BiTA":  # which has no option for it
        tuning = load_tuning(run.options["adapter"], bench.target)
        tuning.masks = torch.nn.Parameter(tuning.masks[:k].detach())
        run.options["tuning"] = tuning
    return run


# --------------------------------------------------------------------------------- acceptance

def measure_acceptance(log: list[dict]) -> list[tuple[int, int]]:
    """Count how often each guess of a chain was tried, and how often it was right.

    log       a record of each round of all answers
    returns   for each guess of the longest chain (rounds in which all guesses before it were right,
              those of them in which it was right too)
    """
    counts = []
    for k in range(max(1, *map(guesses_of, log))):
        # The first wrong guess is judged as well, unless the end of the answer cut the round.
        tried = [record for record in log if record["accepted"] + ("cut" not in record) > k]
        counts.append((len(tried), sum(record["accepted"] > k for record in tried)))
    return counts


# -------------------------------------------------------------------------------------- costs

def time_calls(lm) -> list[tuple[int, float]]:
    """Measure what calls of 1 to 16 rows take at the present length of the context.

    returns   (rows, seconds) of each width, the least of four calls
    """
    def call(rows: int) -> float:
        seconds = timeit.timeit(lambda: lm.forward([0] * rows), number=1)
        lm.truncate(lm.length)
        return seconds
    # All widths take turns, so that a busy moment of the machine meets all alike.
    widths = (1, 2, 4, 8, 16)
    return [*zip(widths, map(min, zip(*([call(rows) for rows in widths] for _ in range(4)))))]


def time_rounds(run: Ours, prompt: list[int], limit: int) -> list[tuple[float, float]]:
    """Measure the mean seconds of a round and its mean guesses, the first round left out.

    The first round has the prompt's pass.

    returns   [(seconds, guesses)], or [] if the answer has too few rounds
    """
    job = run.start_run()
    marks = [job.seconds for _ in job.decode(prompt, limit, run.sample)]
    if len(marks) < 3:
        return []
    guesses = sum(map(guesses_of, job.log[1:]))
    return [((marks[-1] - marks[0]) / (len(marks) - 1), guesses / (len(marks) - 1))]


def measure_costs(bench: Bench, mosts: dict[str, int]) -> dict:
    """Measure what rounds cost by the length of the chain.

    mosts    for each drafter the guesses of its longest chain
    returns  {"calls": what `time_calls` returned, "rounds": {name: [[guesses of a chain,
             seconds of a round, guesses that it really has]]}}. AR is a name too, with 0 guesses
    """
    prompts = sorted((prompt for _, prompt in bench.pairs), key=len)[:bench.args.timed]
    limit, lm = min(TIMED, bench.args.max_new_tokens), bench.cache(bench.args.target)
    runs = {(AR, 0): bench.row(AR)} | {
        (name, k): make_chain(bench, name, k) for name, most in mosts.items()
        for k in sorted({1, max(1, most // 2), most})}
    for run in runs.values():  # to warm up
        time_rounds(run, prompts[0], 8)
    spent, calls = {key: [] for key in runs}, []
    for prompt in tqdm(prompts, desc="prompts on the clock", leave=False):
        lm.start(prompt[:-1])
        calls.append(time_calls(lm))
        for key, run in runs.items():
            spent[key] += time_rounds(run, prompt, limit)
    rounds = {}
    for (name, k), measured in spent.items():
        if measured:
            rounds.setdefault(name, []).append([k, *np.median(measured, axis=0)])
    if AR not in rounds:
        raise InputError("--max-new-tokens must be 3 or more, and prompts have answers of as many, "
                         f"got {bench.args.max_new_tokens}")
    return {"calls": np.median(calls, axis=0), "rounds": rounds}


def find_best(name: str, rates: list[float], costs: dict) -> tuple[int, float, float, float]:
    """Find the length of a chain with which a drafter makes most tokens a second.

    name     of the drafter
    rates    its acceptance
    costs    what `measure_costs` returned
    returns  of the fastest chain the length, the tokens of a round, its cost and that of a guess,
             in rounds of AR. Tokens over cost are the speed, in times AR's
    """
    measured, [[_, unit, _]] = costs["rounds"][name], costs["rounds"][AR]
    found = []
    for k in range(1, 1 + len(rates)):
        seconds, guesses = (np.interp(k, *zip(*([x[0], x[i]] for x in measured))) for i in (1, 2))
        rows = np.interp(1 + guesses, *zip(*costs["calls"])) - costs["calls"][0][1]
        guess = max(0.0, seconds - unit - rows) / guesses if guesses else 0.0
        tokens = OWN[name] + sum(itertools.accumulate(rates[:k], operator.mul))
        found.append((k, tokens, seconds / unit, guess / unit))
    return max(found, key=lambda best: best[1] / best[2])


# ------------------------------------------------------------------------------------- tables

def make_tables(answers: dict[str, list], costs: dict) -> str:
    """Make the table of the acceptance of each guess, and that of what the fastest chain gives.

    answers   for each drafter what `measure_acceptance` returned
    costs     what `measure_costs` returned
    """
    rates = [["drafter", *(f"guess {k}" for k in range(1, 1 + GUESSES)), "rounds"]]
    speeds = [["drafter", "a guess costs", "best chain", "tokens a round", "a round costs", "x AR"]]
    for name, counts in answers.items():
        known = [right / max(1, tried) for tried, right in counts]
        cells = [f"{rate:.2f}" if tried >= FEWEST else ""
                 for rate, (tried, _) in zip(known, counts)]
        rates.append([name, *cells, *[""] * (GUESSES - len(cells)), str(counts[0][0])])
        if name in costs["rounds"]:
            length, tokens, cost, guess = find_best(name, known, costs)
            speeds.append([name, f"{guess:.3f}", str(length), f"{tokens:.2f}", f"{cost:.2f}",
                           f"{tokens / cost:.2f}"])
    return f"{table(rates)}\n{table(speeds)}"


def compare(bench: Bench) -> None:
    """Measure all drafters whose models and files are there, print the tables, draw the picture."""
    args, prompts = bench.args, [prompt for _, prompt in bench.pairs]
    require(args.temperature == 0, "temperature", "0", args.temperature)
    require(args.timed >= 1, "timed", "1 or more", args.timed)

    def answer(name: str) -> list[tuple[int, int]]:
        run = make_chain(bench, name)
        return measure_acceptance([record for prompt in prompts for record in run(prompt).log])
    answers = keep_fitting(tqdm(DRAFTERS, desc="drafters", leave=False), answer)
    costs = measure_costs(bench, {name: len(counts) for name, counts in answers.items()})
    tables = make_tables(answers, costs)
    print(f"{tables}\nA round of AR took {1000 * costs['rounds'][AR][0][1]:.1f} ms.\n")
    if args.picture:
        write_text(args.picture, draw_figure(read_curves(tables)))


# ---------------------------------------------------------------------------- the command line

def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="the SVG file to draw")
    parser.add_argument("--timed", type=int, default=6,
                        help="prompts that are decoded while the clock runs")
    parser.set_defaults(rounds=1)
    with only_chains():
        compare(open_bench(parser))


if __name__ == "__main__":
    sys.exit(run_script(main))
