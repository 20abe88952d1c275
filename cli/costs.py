"""Say what the calls of a run cost, and what rounds of another size would have made of them.

--trace and results/cost_page.py show these figures (costs.html). Nothing is decoded again. A
smaller tree is the first rows of the trees that the run had, since methods put their likeliest
guesses first. A round that has m rows at most keeps those accepted rows that are among its first m:

    rows of a round     0 root   1   2   3   4   5      3 rows at most:   0   1   2
    accepted            0        1       3              accepted          0   1

The tokens, the rows and the draft calls of such rounds are counted. The seconds of a call come from
calls of some widths that are timed after the run. So a speed is expected, and not measured:

    tokens  =  1 + a_1 + a_1 a_2 + a_1 a_2 a_3 + …
    speed   =  tokens / (seconds of the call + seconds of the guessing)

Here a_d is the share of the rounds with d - 1 right guesses in which the next one is right as well.
The page's sliders multiply a_d, what rows cost beyond the first, and the seconds of the guessing.
"""
import itertools
import json
import math
import operator
from pathlib import Path

import numpy as np

PANEL = Path(__file__).with_name("costs.html")


def read_table(table: list[tuple[int, float]], rows: float) -> float:
    """Return the seconds of a call of so many rows, on straight lines between measured widths.

    table   (rows, seconds) by rising rows
    rows    of the call; beyond the table the last width counts
    """
    return float(np.interp(rows, *zip(*table)))


# ------------------------------------------------------------------------------------ the rounds

def list_rounds(runs: list[dict]) -> list[tuple[dict, int]]:
    """List the rounds of recorded runs that have a call of the model that verifies.

    returns   entries of a run's "rounds", as trace.py describes them, each with the number of the
              model that verifies
    """
    return [(step, run["target"]) for run in runs for step in run["rounds"]
            if calls_of([(step, run["target"])])]


def calls_of(rounds: list[tuple[dict, int]]) -> list[dict]:
    """Collect the calls of the model that verifies."""
    return [call for step, target in rounds for call in step["calls"] if call["lm"] == target]


def time_of(call: dict) -> float:
    """Return the seconds that a recorded call took."""
    return (call["time"][1] - call["time"][0]) / 1000


def average(rounds: list[tuple[dict, int]]) -> dict:
    """Average what was measured of recorded rounds, for each call of the target.

    returns   "rows" of the call, its seconds as "call", the seconds of all else in a round as
              "guessing", the "tokens" that the call gives, and the "speed", tokens a second
    """
    calls = calls_of(rounds)
    in_calls = sum(map(time_of, calls))
    seconds = sum(step["seconds"] for step, _ in rounds)
    tokens = sum(len(step["chunk"]) for step, _ in rounds)
    return {"rows": sum(len(call["ids"]) for call in calls) / len(calls),
            "call": in_calls / len(calls), "guessing": max(0.0, seconds - in_calls) / len(calls),
            "tokens": tokens / len(calls), "speed": tokens / seconds}


def say_costs(rows: float, call: float, guessing: float, tokens: float) -> str:
    """Say what a call of the target costs and gives.

    rows       of the call
    call       what it costs, in calls of one row
    guessing   what the guesses of a round cost, in calls of one row
    tokens     that the call gives
    """
    return (f"a call of {rows:.0f} rows costs {call:.1f} calls of one, its guesses cost "
            f"{guessing:.1f}, and it gives {tokens:.1f} tokens")


# -------------------------------------------------------------------------------- smaller rounds

def find_tokens(call: dict) -> list[int]:
    """Return the rows of a recorded call that hold a token, and no mask.

    If no row holds one, the target was fed hidden states. Each of them counts as a token then.
    """
    rows = [row for row, token in enumerate(call["ids"]) if token >= 0]
    return rows or [*range(len(call["ids"]))]


def find_widest(rounds: list[tuple[dict, int]]) -> int:
    """Count the rows with a token of the widest call of the target."""
    return max(len(find_tokens(call)) for call in calls_of(rounds))


def cut_round(step: dict, target: int, most: int) -> dict:
    """Say what a recorded round would have been with fewer rows.

    step      an entry of a run's "rounds", as trace.py describes it
    target    the number of the model that verifies
    most      the most rows of a call that hold a token; masks remain
    returns   "rows" of each call of the target, "accepted" tokens with the root, and "draft", the
              seconds of the draft calls that remain. A tree of half the depth needs half the calls
    """
    rows, path = [], []
    depths = {}  # of each pending row
    whole, left = 0, 0  # the depth of the whole tree, and of what remains of it
    for call in calls_of([(step, target)]):
        tokens = find_tokens(call)
        remain = {*tokens[:most]}
        rows.append(len(call["ids"]) - len(tokens) + len(remain))
        path += [row in remain for row in call["kept"]]
        for row, parent in enumerate(call["parents"]):
            depths[call["first"] + row] = depth = depths.get(parent, -1) + 1
            whole = max(whole, depth)
            left = max(left, depth * (row in remain))
    drafts = [time_of(call) for call in step["calls"] if call["lm"] != target]
    share = left / whole if whole else 1
    return {"rows": rows, "accepted": len([*itertools.takewhile(bool, path)]),
            "draft": sum(drafts[:math.ceil(share * len(drafts))])}


def measure_size(rounds: list[tuple[dict, int]], table: list, most: int) -> dict:
    """Say what all rounds of a run would have been with calls of so many rows at most.

    rounds    rounds of all answers, as `list_rounds` returns them
    table     (rows, seconds) of calls
    most      rows of a call
    returns   "most", of a round the mean "rows", the "call" and the "draft" in seconds, and the
              "acceptance" of each depth
    """
    cut = [cut_round(step, target, most) for step, target in rounds]
    n = len(cut)
    # The seconds of a round in which no model was called, as those of a lookup, count as drafting.
    others = sum(step["seconds"] - sum(map(time_of, step["calls"])) for step, _ in rounds)
    deepest = max(x["accepted"] for x in cut)
    # A round gives a token, whatever its calls have kept.
    reached = [n, *(sum(x["accepted"] > depth for x in cut) for depth in range(1, deepest))]
    return {"most": most, "rows": sum(sum(x["rows"]) for x in cut) / n,
            "call": sum(read_table(table, rows) for x in cut for rows in x["rows"]) / n,
            "draft": max(0.0, others + sum(x["draft"] for x in cut)) / n,
            "acceptance": [b / a for a, b in zip(reached, reached[1:])]}


def expected_tokens(acceptance: list[float]) -> float:
    """Return the tokens to be expected of a round.

    acceptance  for each depth how often a guess is right, where those before it are
    """
    return sum(itertools.accumulate(acceptance, operator.mul, initial=1.0))


# -------------------------------------------------------------------------------------- the panel

def describe(name: str, runs: list[dict], table: list, ar: list[dict] = (),
             tried: list[dict] = ()) -> dict:
    """Collect what the panel shows of a method.

    name    of the method
    runs    its recorded runs
    table   (rows, seconds) of the target's calls
    ar      recorded runs of AR. Without them a call of one row stands for a token of AR
    tried   recorded runs with larger trees, which say what each size is worth. Without them `runs`
            do, and no size beyond theirs is known
    """
    own, larger, alone = (list_rounds(some) for some in (runs, tried or runs, ar))
    # A width that was timed in a busy moment costs no more than a wider one.
    table = [(rows, min(x for n, x in table if n >= rows)) for rows, _ in table]
    one = table[0][1]
    mean = average(own)
    plain = average(alone) if alone else {"call": one, "speed": 1 / one}
    said = say_costs(mean["rows"], mean["call"] / plain["call"], mean["guessing"] / plain["call"],
                     mean["tokens"])
    return {"name": name, "one": one, "table": table, "speed": mean["speed"],
            "plain": plain["speed"], "compared": bool(alone),
            "said": f"{mean['speed'] / plain['speed']:.1f} times as fast here: {said}",
            "chosen": measure_size(own, table, find_widest(own)),
            "sizes": [measure_size(larger, table, most)
                      for most in range(1, 1 + find_widest(larger))]}


def write_panel(entries: list[dict]) -> str:
    """Write the panel of some methods as HTML, with its script."""
    data = json.dumps(entries).replace("<", "\\u003c")
    return PANEL.read_text(encoding="utf-8").replace("NUMBERS", data, 1)
