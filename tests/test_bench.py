"""The benchmark's counts, ratios and medians are right, its rows run as command lines do, and the
embedded models guess as well as its page says."""
import json
import re
import shlex
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

import bench as module
from bench import AR, Bench, Count, Ours, Results, Theirs, make_line, make_parser
from common import Sampler
from fake_cuda import FakeCuda
from families import near, tiny
from helpers import ROOT, check_refused, script
from ouroboros import COMMAND_LINE, ouroboros
from sources import tables_of
from support.engine import EngineLM


def made(*argv) -> Bench:
    return Bench(make_parser().parse_args(argv))


def test_a_count_is_of_one_prompt_and_a_pool_of_one_round():
    model = tiny("llama")
    lms = {"target": EngineLM(model), "draft": EngineLM(near(model, 0.05))}
    run, pools = Ours(ouroboros, lms, 12, set(), Sampler(0), COMMAND_LINE["shared"]), set()
    for prompt in ([3, 14, 15] * 20, [3, 14, 15]):
        run.new_round()
        for lm in lms.values():  # what another prompt has left there
            lm.passes += [(999, 999, 999.0), (999, 0, 999.0)]
        before, target = len(lms["target"].passes), lms["target"]
        count = run(prompt)
        assert count.calls == len(count.log) and count.tokens == 12 and count.rows < 999
        assert count.target == sum(seconds for *_, seconds in target.passes[before:]) > 0
        assert 0 < count.target + count.draft < count.total
        pools.add(id(run.shared["pool"]))
    assert run.shared["pool"].ngrams and len(pools) == 2


def test_transformers_own_passes_are_timed(models):
    bench = made(*models, "--max-new-tokens", "24")
    (_, prompt), *_ = bench.pairs
    count, alone = Theirs(bench, "draft")(prompt), Theirs(bench)(prompt)
    assert alone.draft == 0 < count.draft < count.target + count.draft < count.total
    torch.manual_seed(0)
    assert Theirs(made(*models, "--temperature", "1.5"))(prompt).output[:24] != alone.output


# ------------------------------------------------------------------------- rounds and their ratios

def test_rounds_interleave_the_methods():
    """With graphs all prompts warm up, since every width is captured then."""
    bench, methods = Bench.__new__(Bench), Mock()
    bench.pairs = [("a", 1), ("a", 2), ("b", 3), ("b", 4), ("b", 5)]
    one = [call.x.new_round(), call.y.new_round()]
    one += [getattr(call, name)(i) for i in (1, 2, 3, 4, 5) for name in "xy"]
    for graphs, warming in ([], (1, 2, 3)), (["--graphs"], (1, 2, 3, 4, 5)):
        bench.args = make_parser().parse_args(["--rounds", "2", *graphs])
        methods.reset_mock()
        counts = bench.measure({"x": methods.x, "y": methods.y}).counts
        warm = [getattr(call, name)(i) for name in "xy" for i in warming]
        assert methods.mock_calls == warm + one * 2
        assert [*map(len, counts["x"])] == [5, 5]


def test_ratios_are_taken_within_a_round():
    """The method and AR are slow in different rounds: a ratio of their medians would be 1."""
    def counts(seconds, b, output):
        return [[("a", Count(10, 4, s, s / 2, s / 4, [1], [{"layers": 28}], 8)),
                 ("b", Count(30, 6, b * s, s, 0.0, output, [{"guessed": 1}, {"guessed": 2}], 12))]
                for s in seconds]
    results = Results({"x": counts([1.0, 5.0, 2.0], 3, [2]), AR: counts([4.0, 5.0, 1.0], 1, [3])})
    bench = SimpleNamespace(target=tiny("llama"), categories=["a", "b"], examples={})
    assert [*make_line(bench, results, "x").values()] == [
        "x", "4.00", "2.0", "0.3", "0.7", "5", "0.50", "0.25 to 2.00", "1.00", "0.33", "12%",
        "75.00", "12.50", "112.50", "", "1 of 2"]


def test_prompts_whose_answers_loop_are_left_out(tmp_path, monkeypatch, models):
    file = tmp_path / "prompts"
    file.write_text("".join(json.dumps({"prompt": f"Mia {i}", "category": c}) + "\n"
                            for i, c in enumerate("aabbcc")))
    answers = iter([True, False, False, False] + [True] * 8)
    monkeypatch.setattr(module.tasks, "loops", lambda output: next(answers))
    argv = [*models, "--prompts", str(file), "-n", "2", "--max-new-tokens", "2"]
    bench = made(*argv)
    bench.drop_loops()
    assert bench.dropped == 3 and not bench.examples
    texts = [(name, bench.tokenizer.decode(p, skip_special_tokens=True)) for name, p in bench.pairs]
    assert texts == [("a", "Mia 1"), ("b", "Mia 2"), ("b", "Mia 3")]
    check_refused("expected a prompt whose AR output does not loop, got 6", made(*argv).drop_loops)


# -------------------------------------------------------------------------------- all methods

def test_make_bench_prints_rows_beside_transformers_own(models, capfd):
    speculation = "speculative --gamma 6"
    argv = [*models, "--max-new-tokens", "12", "--only", "speculative", "prompt_lookup", "--row",
            "medusa --nodes 4"]
    assert script("bench", *argv) == 0
    text = capfd.readouterr().out
    assert text.startswith(f"`python bench.py {shlex.join(argv)}`\n\ncpu, torch.float32, ")
    assert "medusa --nodes 4 left out: expected " in text  # there is no such file
    rows, ratios = tables_of(text)
    assisted = "`generate`, assistant, draft of 6 tokens"
    assert [*rows] == ["autoregressive", speculation, "prompt_lookup", "`generate`", assisted,
                       "`generate`, prompt lookup of 4"]
    assert {row["output as AR's"] for row in rows.values()} == {"3 of 3"}
    assert rows["autoregressive"]["target layers a token"] == "2.0"
    per_call = {name: float(row["tokens per target call"]) for name, row in rows.items()}
    assert per_call["autoregressive"] == per_call["`generate`"] == 1
    assert per_call[speculation] == per_call[assisted] > 2
    assert (rows[speculation]["guesses a call"], rows[speculation]["rows a call"]) == ("6.0", "7.0")
    assert [*ratios] == [
        "autoregressive / `generate`", f"{speculation} / {assisted}",
        "prompt_lookup / `generate`, prompt lookup of 4"]


def test_captured_rows_run_on_the_simulated_gpu(models, capfd):
    """These are the options of `make gpu`."""
    how = "--device cuda --graphs --dtype float32 --max-new-tokens 4 --only speculative --prompts"
    with FakeCuda() as gpu:
        assert script("bench", *models, *how.split(), str(ROOT / "models/examples.jsonl")) == 0
    text = capfd.readouterr().out
    assert "\n\ncuda, torch.float32, " in text and gpu.counts["replays"] > 10
    rows, _ = tables_of(text)
    assert [row["output as AR's"] for row in rows.values()] == ["1 of 1"] * 5


@pytest.fixture(scope="module")
def bench():
    return made(*"--device cpu -n 1 --rounds 1 --max-new-tokens 24 --nodes 5".split())


def test_rows_say_what_the_bench_does_not(bench):
    """A row's own options replace those of the bench: nodes, sampling, length and model."""
    (_, prompt), *_ = bench.pairs
    for line, most in (("medusa --heads hydra", 4), ("medusa --nodes 3", 2)):  # all but the root
        assert max(record["guessed"] for record in bench.row(line)(prompt).log) == most
    warm = bench.row("jacobi --temperature 0.7 --seed 3 --max-new-tokens 5")
    assert (warm.sample.temperature, warm.sample.seed, warm.limit) == (0.7, 3, 5)
    assert bench.row("jacobi").sample.temperature == 0 and bench.row("jacobi").limit == 24
    assert bench.row("cllm").models["target"].model is bench.load(str(module.MODELS / "cllm"))
    more = bench.row("specinfer --draft models/draft --draft models/draft")
    assert len(more.options["more_drafts"]) == 1
    check_refused("expected a row of one of", bench.row, "medusas")


def test_every_method_has_a_row():
    missing = {*module.METHODS} - {line.split()[0] for line in module.ALL}
    # The first is for long texts, the second learns from prompts, the third is mjsd's reference.
    missing -= {"triforce", "online", "mjgd"}
    assert missing == set(), (f"{missing}: add a row to ALL of results/bench.py. survey/README.md, "
                              "\"A new method\", has all steps")


@pytest.mark.parametrize("line", module.ALL)
def test_every_row_is_a_command_line(line, bench):
    assert bench.row(line).method.__name__ == line.split()[0]


def test_an_mtp_block_is_the_folders_or_the_targets_own(tmp_path):
    """For the embedded target the block of its own files is that in models/."""
    file = tmp_path / "with" / "mtp.safetensors"
    file.parent.mkdir()
    file.touch()
    for folder, adapter in (file.parent, str(file)), (tmp_path, None), (ROOT / "models", None):
        bench = SimpleNamespace(args=SimpleNamespace(adapters=folder))
        for name, options in ("mtp", {}), ("hybrid", {"guess": "mtp"}):
            found = Bench.find_files(bench, module.METHODS[name][0], options)
            assert found.get("adapter") == adapter, (name, folder)


def test_answers_are_graded(bench):
    (_, prompt), *others = bench.pairs
    answer = bench.tokenizer.encode(bench.examples[tuple(prompt)].answer, add_special_tokens=False)
    assert bench.grade([answer, *[[5]] * len(others)]) == [True] + [False] * len(others)


# --------------------------------------------------------------------------- the embedded models

# The sizes of trees are given, since the clock of another machine would choose others than that of
# the page.
ROWS = {  # calls of the target for the first 24 tokens of three answers
    "speculative --gamma 6": 15, "ouroboros": 14, "bita": 44,
    "medusa --nodes 8": 28, "medusa --heads hydra --nodes 16": 21, "eagle --nodes 16": 12,
    "eagle3 --nodes 16": 11, "mtp --nodes 16": 12, "dflash --nodes 16": 11,
    "sequoia --nodes 8 --depth 5": 15, "early_exit": 13, "draft_verify": 18, "layerskip": 19,
    "pass_sampling": 66, "space --k 3": 30, "rest --nodes 16": 17, "cascade": 15, "cllm": 16,
    "hybrid --guess none --nodes 16": 17,
    "hybrid --guess hydra --nodes 16": 18, "hybrid --guess dflash --nodes 16": 9,
    "hybrid --guess mtp --nodes 16": 9}


@pytest.mark.parametrize("line", ROWS)
def test_calls_of_the_embedded_models(bench, line):
    """One call more or less may come of how a machine rounds. These prompts are three of the page's
    21, so the page's tokens per call are near. And the hybrid's chances are honest: their sum is
    about the number of accepted guesses."""
    run = bench.row(line)
    counts = [run(prompt) for _, prompt in bench.pairs]
    calls = sum(count.calls for count in counts)
    assert abs(calls - ROWS[line]) <= 1
    page, *_ = tables_of((ROOT / "results/all_methods.md").read_text())
    known = page[re.sub(" --(nodes|depth|k) [0-9]+", "", line)]["tokens per target call"]
    assert sum(count.tokens for count in counts) / calls > 0.85 * float(known)
    # The last round of an answer is cut.
    rounds = [record for count in counts for record in count.log[:-1] if "chances" in record]
    expected = sum(sum(record["chances"]) for record in rounds)
    assert expected == pytest.approx(sum(record["accepted"] for record in rounds), rel=0.25)
