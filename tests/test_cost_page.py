"""What smaller trees would have made, and what the page's script makes of it, by hand."""
import json
import re
import shutil
import subprocess

import pytest

from cli.costs import describe, expected_tokens, measure_size, write_panel
from cli.run import Run, TimedLM
from cli.trace import Trace
from common import encode, greedy
from cost_page import write_page
from helpers import script
from speculative import speculative

TABLE = [(1, 0.1), (2, 0.12), (4, 0.2), (8, 0.6)]
DRAFT = {"lm": 0, "ids": [1], "parents": [-1], "first": 0, "best": [1], "kept": []}


def call(ids, parents, kept, time=(0.0, 100.0)) -> dict:
    return {"lm": 1, "ids": ids, "parents": parents, "first": 0, "best": ids, "kept": kept,
            "time": time}


def step(target_call, chunk, drafts=(), others=0.0) -> dict:
    """A round whose draft calls take so many milliseconds, and all else `others` seconds."""
    calls = [DRAFT | {"time": [0.0, x]} for x in drafts]
    seconds = others + sum(drafts) / 1000 + (target_call["time"][1] - target_call["time"][0]) / 1000
    return {"chunk": chunk, "log": {}, "calls": [*calls, target_call], "seconds": seconds}


#     0 ─┬─ 1 ── 3        The first round accepts 1 and 3, and the second 2 alone.
#        └─ 2
TREE = [-1, 0, 0, 1]
ROUNDS = [(step(call([5, 6, 7, 8], TREE, [0, 1, 3]), [6, 8, 9], (10.0, 30.0), 0.02), 1),
          (step(call([9, 6, 7, 8], TREE, [0, 2]), [7, 4], (10.0, 30.0), 0.04), 1)]
RUNS = [{"method": "medusa", "target": 1, "rounds": [x for x, _ in ROUNDS]}]


def test_a_smaller_tree_is_the_first_rows():
    """Rows, seconds, draft calls and acceptance by hand, for each size."""
    sizes = [measure_size(ROUNDS, TABLE, most) for most in (1, 2, 3, 4)]
    assert [x["rows"] for x in sizes] == [1, 2, 3, 4]
    assert [x["call"] for x in sizes] == pytest.approx([0.1, 0.12, 0.16, 0.2])
    # Nothing, one level or both are drafted; the other 0.03 s stay.
    assert [x["draft"] for x in sizes] == pytest.approx([0.03, 0.04, 0.04, 0.07])
    assert [x["acceptance"] for x in sizes] == [[], [0.5], [1.0], [1.0, 0.5]]
    tokens = [expected_tokens(x["acceptance"]) for x in sizes]
    assert tokens == [1, 1.5, 2, 2.5]


def test_masks_are_no_guesses_and_hidden_states_are():
    """A mask stays in a smaller call, and is not one of its rows with a token."""
    masked = step(call([5, -1, 6, -1, 7], [-1, 0, 0, 2, 2], [0, 2, 4]), [6, 7, 8])
    two = measure_size([(masked, 1)], TABLE, 2)
    assert (two["rows"], two["acceptance"]) == (4, [1.0])
    hidden = step(call([-1, -1, -1], [-1, 0, 1], [0, 1]), [6, 7])
    assert measure_size([(hidden, 1)], TABLE, 2)["rows"] == 2


def test_a_width_that_met_a_busy_moment_costs_no_more_than_a_wider_one():
    busy = [(1, 0.5), (2, 0.1), (4, 0.2)]
    entry = describe("x", RUNS, busy)
    seconds = sum(step["seconds"] for step, _ in ROUNDS)
    assert entry["one"] == 0.1 and entry["speed"] == pytest.approx(5 / seconds)


def test_a_chain_is_described_as_it_was(embedded):
    """Recorded rounds: the whole size has the run's tokens, and no round has a prompt's seconds."""
    target, draft, tokenizer = embedded
    lms, trace = {"target": TimedLM(target), "draft": TimedLM(draft)}, Trace()
    run = Run(speculative, lms, {"gamma": 4}, set())
    prompt = encode(tokenizer, "Tom has 3 apples. He buys 4 apples. How many apples does he have?")
    output = [x for some in trace.watch(run, prompt, run.decode(prompt, 40, greedy)) for x in some]
    trace.time_calls()
    [entry], [known] = trace.describe_costs(), trace.runs
    assert [x["most"] for x in entry["sizes"]] == [1, 2, 3, 4, 5]
    tokens = expected_tokens(entry["chosen"]["acceptance"])
    assert tokens == pytest.approx(len(output) / len(known["rounds"]))
    seconds = run.seconds - sum(lm.prompt_seconds for lm in lms.values())
    assert sum(x["seconds"] for x in known["rounds"]) == pytest.approx(seconds, rel=0.02)


ENTRIES = [describe("</script><b>", RUNS, TABLE, RUNS), describe("tried", RUNS, TABLE)]


def test_the_page_is_one_file_and_a_name_is_only_text():
    page = write_page(ENTRIES)
    assert "</script><b>" not in page and r"\u003c/script>\u003cb>" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "") and "innerHTML" not in page


def test_a_page_of_the_methods_whose_files_fit(models, tmp_path, capfd):
    """The largest draft says what smaller ones bring, and the draft of the row made the run's
    speed. Its figures are of the same prompts as AR's."""
    page = tmp_path / "page.html"
    assert script("cost_page", *models, "--max-new-tokens", "20", "--out", str(page)) == 0
    data = re.search(r'id="costs-data">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)[1]
    first = json.loads(data)[0]
    assert first["name"] == "speculative" and first["compared"]
    assert [x["most"] for x in first["sizes"]] == [*range(1, 14)] and first["chosen"]["rows"] <= 7


def test_the_formula_of_the_script():
    """By hand: 1 + 0.5 + 0.5 · 0.4 tokens in 0.3 s; acceptance stays below 1. The sliders stand for
    acceptance, what rows cost beyond the first, and the seconds of the guessing."""
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    panel = write_panel(ENTRIES)
    script = re.search(r'<script id="costs-formula">(.*?)</script>', panel, re.S)[1]
    ask = f"""{script}
        const size = {{call: 0.2, draft: 0.1, acceptance: [0.5, 0.4]}};
        for (const now of [[1, 1, 1], [3, 1, 1], [1, 2, 0]])
            console.log(expectedSpeed(size, 0.1, ...now));"""
    said = subprocess.run(["node", "-e", ask], capture_output=True, text=True, check=True)
    assert [*map(float, said.stdout.split())] == pytest.approx([1.7 / 0.3, 3 / 0.3, 1.7 / 0.3])
