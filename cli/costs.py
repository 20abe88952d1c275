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
import json
import math
from pathlib import Path

PANEL = Path(__file__).with_name("costs.html")
SLIDERS = ((1, 1, 1), (0.5, 1, 1), (1.5, 1, 1), (1, 0, 1), (1, 2.5, 1), (1, 1, 0), (1, 1, 3),
           (0.8, 0.3, 2))  # positions for which the page's script is checked


def read_table(table: list[tuple[int, float]], rows: float) -> float:
    """Return the seconds of a call of so many rows, on straight lines between measured widths.

    table   (rows, seconds) by rising rows
    rows    of the call; beyond the table the last line goes on
    """
    if len(table) == 1:
        return table[0][1]
    last = next((i for i, (width, _) in enumerate(table) if width >= rows), len(table) - 1)
    (low, before), (high, after) = table[max(0, last - 1):max(2, last + 1)]
    return before + (after - before) * (rows - low) / (high - low)


# -------------------------------------------------------------------------------- smaller rounds

def find_tokens(call: dict) -> list[int]:
    """Return the rows of a recorded call that hold a token, and no mask.

    If no row holds one, the target was fed hidden states. Each of them counts as a token then.
    """
    rows = [row for row, token in enumerate(call["ids"]) if token >= 0]
    return rows or [*range(len(call["ids"]))]


def time_of(call: dict) -> float:
    """Return the seconds that a recorded call took."""
    return (call["time"][1] - call["time"][0]) / 1000


def cut_round(step: dict, target: int, most: int) -> dict:
    """Say what a recorded round would have been with fewer rows.

    step      an entry of a run's "rounds", as trace.py describes it
    target    the number of the model that verifies
    most      the most rows of a call that hold a token; masks remain
    returns   "rows" of each call of the target, "accepted" tokens with the root, and "draft", the
              seconds of the draft calls that remain. A tree of half the depth needs half the calls
    """
    rows, path, drafts = [], [], []
    depths = {}  # of each pending row
    whole, left = 0, 0  # the depth of the whole tree, and of what remains of it
    for call in step["calls"]:
        if call["lm"] != target:
            drafts.append(time_of(call))
            continue
        tokens = find_tokens(call)
        remain = {*tokens[:most]}
        rows.append(len(call["ids"]) - len(tokens) + len(remain))
        path += [row in remain for row in call["kept"]]
        for row, parent in enumerate(call["parents"]):
            depths[call["first"] + row] = depth = depths.get(parent, -1) + 1
            whole = max(whole, depth)
            left = max(left, depth * (row in remain))
    accepted = path.index(False) if False in path else len(path)
    share = left / whole if whole else 1
    return {"rows": rows, "accepted": accepted,
            "draft": sum(drafts[:math.ceil(share * len(drafts))])}


def count_rows(step: dict, target: int) -> int:
    """Count the rows with a token of the widest call of the target in a round."""
    return max(len(find_tokens(call)) for call in step["calls"] if call["lm"] == target)


def list_sizes(widest: int) -> list[int]:
    """List the sizes of rounds that are compared: each up to 16 rows, then fewer and fewer."""
    sizes = [n for n in range(1, widest) if n <= 16 or n % (1 << (n.bit_length() - 3)) == 0]
    return [*sizes, widest]


def measure_size(steps: list[tuple[dict, int]], table: list, most: int) -> dict:
    """Say what all rounds of a run would have been with calls of so many rows at most.

    steps     rounds of all answers, each with the number of the model that verifies
    table     (rows, seconds) of calls
    most      rows of a call
    returns   "most", of a round the mean "rows", the "call" and the "draft" in seconds, and the
              "acceptance" of each depth
    """
    cut = [cut_round(step, target, most) for step, target in steps]
    n = len(cut)
    # The seconds of a round in which no model was called, as those of a lookup, count as drafting.
    others = sum(step["seconds"] - sum(map(time_of, step["calls"])) for step, _ in steps)
    reached = [sum(x["accepted"] > depth for x in cut)
               for depth in range(max(x["accepted"] for x in cut))]
    reached[:1] = [n]  # a round gives a token, whatever its calls have kept
    return {"most": most, "rows": sum(sum(x["rows"]) for x in cut) / n,
            "call": sum(read_table(table, rows) for x in cut for rows in x["rows"]) / n,
            "draft": max(0.0, others + sum(x["draft"] for x in cut)) / n,
            "acceptance": [b / a for a, b in zip(reached, reached[1:])]}


# ------------------------------------------------------------------------------------- the speed

def expected_tokens(acceptance: list[float], right: float = 1.0) -> float:
    """Return the tokens to be expected of a round.

    acceptance  for each depth how often a guess is right, where those before it are
    right       what each acceptance is multiplied by; none exceeds 1
    """
    chance, tokens = 1.0, 1.0
    for rate in acceptance:
        chance *= min(1.0, right * rate)
        tokens += chance
    return tokens


def expected_speed(size: dict, one: float, right: float = 1.0, row: float = 1.0,
                   draft: float = 1.0) -> float:
    """Return the tokens a second to be expected of rounds of a size.

    size     as `measure_size` returns it
    one      the seconds of a call of one row
    right    what acceptance is multiplied by
    row      what a call's seconds beyond those of one row are multiplied by
    draft    what the seconds of the guessing are multiplied by
    """
    seconds = one + row * (size["call"] - one) + draft * size["draft"]
    return expected_tokens(size["acceptance"], right) / seconds


def know_ahead(steps: list[tuple[dict, int]], table: list) -> float:
    """Return the speed of an oracle, which feeds in each call only those guesses that are right.

    The oracle drafts as the run did. The table was timed after the run, when the machine may have
    been slower or faster. So the table says only by what share the run's own calls would have been
    shorter, and an oracle is never slower than its run.

    steps, table   as for `measure_size`. In the table no call costs less than a narrower one
    """
    calls = [call for step, target in steps for call in step["calls"] if call["lm"] == target]
    all_rows = sum(read_table(table, len(call["ids"])) for call in calls)
    right_rows = sum(read_table(table, max(1, len(call["kept"]))) for call in calls)
    saved = sum(map(time_of, calls)) * (1 - right_rows / all_rows)
    seconds = sum(step["seconds"] for step, _ in steps)
    return sum(len(step["chunk"]) for step, _ in steps) / (seconds - saved)


def find_reason(rows: float, call: float, guessing: float, tokens: float) -> str:
    """Say what makes rounds slower than token by token decoding: rows, draft or guesses.

    A round takes a call of the target over some rows, and the guessing. If one right guess a round
    would have paid for both, the guesses are to blame. Otherwise the larger cost is.

    rows       of the call
    call       what it costs, in calls of one row
    guessing   what the guesses of a round cost, in calls of one row
    tokens     that a round gives
    """
    gives = f"and a call gives {tokens:.1f} tokens"
    if call + guessing < 2:
        return (f"guesses are seldom right: a call and its guesses cost {call + guessing:.1f} "
                f"calls of one row, {gives}")
    if call - 1 > guessing:
        return f"a call of {rows:.0f} rows costs {call:.1f} calls of one, {gives}"
    return f"the guesses of a call cost {guessing:.1f} calls of one row, {gives}"


def average(steps: list[tuple[dict, int]]) -> dict:
    """Average what was measured of recorded rounds, for each call of the target.

    returns   "rows" of the call, its seconds as "call", the seconds of all else in a round as
              "guessing", and the "tokens" that the call gives
    """
    calls = [call for step, target in steps for call in step["calls"] if call["lm"] == target]
    n, seconds = len(calls), sum(map(time_of, calls))
    return {"rows": sum(len(call["ids"]) for call in calls) / n, "call": seconds / n,
            "guessing": (sum(step["seconds"] for step, _ in steps) - seconds) / n,
            "tokens": sum(len(step["chunk"]) for step, _ in steps) / n}


# -------------------------------------------------------------------------------------- the panel

def list_rounds(runs: list[dict]) -> list[tuple[dict, int]]:
    """List the rounds of recorded runs that have a call of the model that verifies."""
    return [(step, run["target"]) for run in runs for step in run["rounds"]
            if any(call["lm"] == run["target"] for call in step["calls"])]


def measure_speed(steps: list[tuple[dict, int]]) -> float:
    """Return the tokens a second that rounds really made."""
    return sum(len(step["chunk"]) for step, _ in steps) / sum(step["seconds"] for step, _ in steps)


def say_why(steps: list[tuple[dict, int]], one: float, ratio: float) -> str:
    """Say in a sentence why a run was slower than token by token decoding, or what made it faster.

    steps   the rounds of the run
    one     the seconds of a call of one row
    ratio   the speed of the run beside that of token by token decoding
    """
    mean = average(steps)
    call, guessing = mean["call"] / one, mean["guessing"] / one
    if ratio < 1:
        return f"slower here because {find_reason(mean['rows'], call, guessing, mean['tokens'])}"
    return (f"{ratio:.1f} times as fast here: a call of {mean['rows']:.0f} rows costs {call:.1f} "
            f"calls of one, its guesses cost {guessing:.1f}, "
            f"and it gives {mean['tokens']:.1f} tokens")


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
    own, steps, alone = (list_rounds(some) for some in (runs, tried or runs, ar))
    # A width that was timed in a busy moment costs no more than a wider one.
    table = [(rows, min(x for n, x in table if n >= rows)) for rows, _ in table]
    one = table[0][1]
    widest = max(count_rows(*step) for step in steps)
    sizes = [measure_size(steps, table, most) for most in list_sizes(widest)]
    chosen = measure_size(own, table, max(count_rows(*step) for step in own))
    speed = measure_speed(own)
    plain = measure_speed(alone) if alone else 1 / one
    said = say_why(own, average(alone)["call"] if alone else one, speed / plain)
    checks = [[i, *factors, expected_speed(sizes[i], one, *factors)]
              for i in sorted({0, len(sizes) // 2, len(sizes) - 1}) for factors in SLIDERS]
    return {"name": name, "one": one, "table": table, "sizes": sizes, "chosen": chosen,
            "speed": speed, "plain": plain, "compared": bool(alone), "said": said,
            "checks": checks, "oracle": know_ahead(own, table)}


def write_panel(entries: list[dict]) -> str:
    """Write the panel of some methods as HTML, with its script."""
    data = json.dumps(entries).replace("<", "\\u003c")
    return PANEL.read_text(encoding="utf-8").replace("NUMBERS", data, 1)
