"""The embedded models guess as well as results/all_methods.md says, and write the target's text.

A row is a command line as results/bench.py takes it. The sizes of trees are given, since the clock
of another machine would choose others than that of the page."""
import re

import pytest

from bench import AR, Bench, parser_of
from helpers import ROOT

ROWS = {  # calls of the target for the first 24 tokens of three answers
    "speculative --gamma 6": 15, "ouroboros": 14, "bita --tree efficient": 44,
    "medusa --nodes 8": 28, "medusa --heads hydra --nodes 16": 21, "eagle --nodes 16": 12,
    "eagle3 --nodes 16": 11, "mtp --nodes 16": 12, "dflash --nodes 16": 11,
    "sequoia --nodes 8 --depth 5": 15, "early_exit": 13, "draft_verify": 18, "layerskip": 19,
    "pass_sampling": 66, "space --k 3": 30, "rest --nodes 16": 17, "cascade": 15, "cllm": 16,
    "hybrid --guess none --nodes 16": 17, "hybrid --guess medusa --nodes 16": 18,
    "hybrid --guess hydra --nodes 16": 18, "hybrid --guess dflash --nodes 16": 9}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(parser_of("").parse_args("--device cpu -n 1 --max-new-tokens 24".split()))


@pytest.fixture(scope="module")
def outputs(bench) -> list[list[int]]:
    """Write autoregressive text after each prompt."""
    run = bench.row(AR)
    return [run(prompt).output for _, prompt in bench.pairs]


@pytest.mark.parametrize("line", ROWS)
def test_calls_of_the_embedded_models(bench, outputs, line):
    """One call more or less may come of how a machine rounds. These prompts are three of the page's
    21, so the page's tokens per call are near. And the hybrid's chances are honest: their sum is
    about the number of accepted guesses."""
    run = bench.row(line)
    counts = [run(prompt) for _, prompt in bench.pairs]
    calls = sum(count.calls for count in counts)
    assert abs(calls - ROWS[line]) <= 1
    if not line.startswith(("layerskip", "space", "cllm")):  # they write a tuned model's text
        assert [count.output for count in counts] == outputs
    page = (ROOT / "results/all_methods.md").read_text()
    row = re.sub(" --(nodes|depth|k) [0-9]+", "", line)
    known = re.search(rf"^\| {re.escape(row)} \| ([0-9.]+) \|", page, re.MULTILINE)
    assert sum(map(len, outputs)) / calls > 0.85 * float(known[1])
    rounds = [record for count in counts for record in count.log if "chances" in record]
    expected = sum(sum(record["chances"]) for record in rounds)
    assert expected == pytest.approx(sum(record["accepted"] for record in rounds), rel=0.2)
