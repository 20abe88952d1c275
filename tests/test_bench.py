"""The benchmark's counts, ratios and medians are right, and its rows run as command lines do."""
import json
import shlex
import sys
import time

import pytest
import torch

import bench as module
from bita import Tuning, save_tuning
from bench import Bench, Count, Ours, Results, by_category, options
from common import CachedLM, InputError, Sampler, autoregressive
from families import near, tiny
from jacobi import jacobi
from mjsd import mjsd
from ouroboros import ouroboros
from speculative import speculative

PROMPT = [3, 14, 15]
TINY = ["--device", "cpu", "-n", "1", "--rounds", "1"]


def tables_of(text: str) -> list[list[list[str]]]:
    """Return the tables of a text, each as rows of cells without the line under the head."""
    blocks = ([line for line in block.split("\n") if line.startswith("| ")]
              for block in text.split("\n\n"))
    rows = [[[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]
            for lines in blocks if lines]
    assert all(len(row) == len(some[0]) for some in rows for row in some)
    assert all(set(some[1]) == {"---"} and len(some) > 2 for some in rows)
    return [[some[0], *some[2:]] for some in rows]


def column(rows: list[list[str]], head: str) -> dict[str, str]:
    """Return for each row of a table its first cell and its cell under this head."""
    return {row[0]: row[rows[0].index(head)] for row in rows[1:]}


def names_of(rows: list[list[str]]) -> list[str]:
    return [row[0] for row in rows[1:]]


@pytest.fixture(scope="module")
def models(tmp_path_factory, embedded):
    """The command line's arguments for random models with the embedded tokenizer."""
    *_, tokenizer = embedded
    path = tmp_path_factory.mktemp("models")
    target = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=400)
    for name, model in (("target", target), ("draft", near(target, 0.01)),
                        ("cllm", near(target, 0.02))):
        model.save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    save_tuning(path / "bita.safetensors", Tuning(target, P=4), target)
    return ["--target", str(path / "target"), "--draft", str(path / "draft"), "--adapters",
            str(path), *TINY]


def made(*argv) -> Bench:
    return Bench(options("").parse_args(argv))


# ------------------------------------------------------------------------------- what is counted

def ours(method, limit: int, eos=(), noise=0.0, **own) -> Ours:
    model = tiny("llama")
    models = {"target": model} if method in (autoregressive, jacobi) else {
        "target": model, "draft": near(model, noise)}
    lms = {name: CachedLM(m) for name, m in models.items()}
    return Ours(method, lms, limit, set(eos), Sampler(0), **own)


def test_guesses_that_the_end_cuts_off_do_not_count_as_accepted():
    for limit, accepted in (10, [3, 3, 2]), (11, [3, 3, 3]), (16, [3, 3, 3, 3]):
        count = ours(speculative, limit, gamma=3)(PROMPT)  # the draft is the target itself
        assert [r["accepted"] for r in count.log] == accepted
        assert count.tokens == len(count.output) == limit and count.calls == len(accepted)
    first = count.output.index(count.output[5])
    short = ours(speculative, 20, [count.output[5]], gamma=3)(PROMPT)
    assert short.output == count.output[:first + 1]
    assert [r["accepted"] for r in short.log] == [3] * (first // 4) + [min(3, first % 4 + 1)]


def test_a_count_is_of_one_prompt_and_its_seconds_hold_the_prompts_own_pass():
    run = ours(ouroboros, 12, noise=0.05)
    for prompt in (PROMPT * 20, PROMPT):
        for lm in run.models.values():  # what another prompt has left there
            lm.calls, lm.seconds, lm.prompt_seconds = 99, 99.0, 99.0
        count = run(prompt)
        target, draft = run.models["target"], run.models["draft"]
        assert count.calls == target.calls == len(count.log) and count.tokens == 12
        assert count.target == target.seconds + target.prompt_seconds > target.seconds
        assert count.draft == draft.seconds + draft.prompt_seconds > draft.seconds
        assert count.target + count.draft < count.total
        assert count.draft_calls == draft.calls and count.draft_rows == draft.rows / draft.calls
        assert count.rows == target.rows / target.calls
    alone = ours(autoregressive, 12)(PROMPT)
    assert alone.draft == 0 and alone.calls == alone.tokens == 12 and alone.log == []
    assert alone.output == count.output


def test_the_seconds_of_a_count_are_those_of_decoding(monkeypatch):
    """What is prepared once is not counted, and is still there in the next round."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    def preparing(target, draft, prompt, *, sample=None, log=None):
        target.once("it", lambda: passes(100))
        passes(2)
        yield from autoregressive(target, prompt)
    run = ours(preparing, 4)
    assert [run(PROMPT).total, run.new_round(), run(PROMPT).total] == [2, None, 2]
    assert now == [104] and run.models["target"].setup_seconds == 100


def test_methods_get_what_they_share_and_a_round_begins_without_it():
    run = ours(ouroboros, 20, noise=0.05)
    pool = run.shared["pool"]
    run(PROMPT)
    assert pool.phrases and run.shared == {"pool": pool}
    run.new_round()
    assert run.shared["pool"] is not pool and not run.shared["pool"].phrases
    assert ours(mjsd, 20, eos=[7]).shared == {"eos": {7}} and ours(jacobi, 20).shared == {}


def test_transformers_own_passes_are_counted_and_its_models_left_as_they_were(models):
    """With the same drafts it takes as many target calls as ours, for the same text."""
    bench = made(*models, "--max-new-tokens", "24")
    (_, prompt), *_ = bench.pairs()
    ar, ours = bench.ours(autoregressive)(prompt), bench.row("speculative --gamma 6")(prompt)
    runs = {
        "plain": bench.theirs(), "assistant": bench.theirs("draft"),
        "lookup": bench.theirs(prompt_lookup_num_tokens=4)}
    counts = {name: run(prompt) for name, run in runs.items()}
    assert all(c.output == ar.output and c.tokens == ar.tokens == 24 for c in counts.values())
    assert counts["plain"].calls == 24 and counts["assistant"].calls == ours.calls < 12
    assert counts["lookup"].calls <= 24 and counts["plain"].draft == 0 < counts["assistant"].draft
    assert all(0 < count.target + count.draft < count.total for count in counts.values())
    assert runs["assistant"](prompt).calls == ours.calls
    target = runs["plain"].models["target"]
    assert target is runs["assistant"].models["target"]
    assert not target._forward_hooks and not target._forward_pre_hooks
    sampled = made(*models, "--max-new-tokens", "24", "--temperature", "1.5", "--top-k", "5")
    torch.manual_seed(0)
    assert sampled.theirs()(prompt).output != ar.output


# ------------------------------------------------------------------------- rounds and their ratios

class Made:
    """Stand in for a method, and note its calls and rounds."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def new_round(self):
        self.seen.append(self.name)

    def __call__(self, prompt):
        self.seen.append((self.name, *prompt))
        return Count(len(prompt), 1, 1.0)


def test_rounds_interleave_the_methods():
    seen, bench = [], Bench.__new__(Bench)
    bench.args = options("").parse_args(["--rounds", "2"])
    bench.prompts = {"a": [[1], [2]], "b": [[3], [4], [5]]}
    results = bench.measure({name: Made(name, seen) for name in "xy"})
    warm, one = [(name, i) for name in "xy" for i in (1, 2, 3)], ["x", "y"]
    one += [(name, i) for i in (1, 2, 3, 4, 5) for name in "xy"]
    assert seen == warm + one * 2
    assert [[name for name, _ in some] for some in results.counts["y"]] == [[*"aabbb"]] * 2
    seen.clear()
    bench.args.graphs = True  # all prompts to warm up: every width is captured then
    bench.measure({"x": Made("x", seen)}, [("b", [i]) for i in (9, 8, 7, 6)])
    assert seen == [("x", i) for i in (9, 8, 7, 6)] + ["x", *(("x", i) for i in (9, 8, 7, 6))] * 2


def test_ratios_are_taken_within_a_round_and_medians_over_the_rounds():
    """x and y are slow in different rounds: a ratio of their medians would be another number."""
    def counts(seconds):
        return [[("a", Count(10, 4, s, s / 2, s / 4, [1], [{"accepted": s}])),
                 ("b", Count(30, 6, 3 * s, s, 0.0, [2], [{"accepted": 1}, {"accepted": 2}]))]
                for s in seconds]
    results = Results({"x": counts([1.0, 5.0, 2.0]), "y": counts([4.0, 5.0, 1.0])})
    assert results.speeds("x") == [10.0, 2.0, 5.0] and results.speed("x") == 5.0
    assert results.speeds("y", "a") == [2.5, 2.0, 10.0]
    assert results.ratio("x", "y") == 1.0  # the median of 4, 1 and 0.5; of the speeds: 5 / 2.5
    assert results.ratio("y", "x", "b") == 1.0
    assert [results.per_call("x", name) for name in (None, "a", "b")] == [4.0, 2.5, 5.0]
    assert [results.per_token("x", part) for part in ("total", "target", "draft")] == [
        1000 * 8 / 40, 1000 * 3 / 40, 1000 * 0.5 / 40]
    assert results.ratios("x", "y") == [4.0, 1.0, 0.5] and results.guesses("x") == 0
    results.counts["y"][0][1][1].output = [3]
    assert results.same("x", "y") == "1 of 2" and results.same("x", "x") == "2 of 2"


def test_layers_that_run_for_a_token():
    """A method that runs some layers alone counts them in its log."""
    own = Count(6, 2, 1.0, log=[{"layers": 20}, {"layers": 22}])
    results = Results({"plain": [[("a", Count(8, 4, 1.0))]], "own": [[("a", own)]]})
    assert (results.layers("plain", 12), results.layers("own", 12)) == (6, 7)


@pytest.mark.parametrize("text, prompts", [
    ('{"question": "one", "category": "qa"}\n\n  plain text\n{"prompt": "four"}\n'
     '{"turns": ["two", "three"], "category": "qa"}\n{"prompt": "five", "category": 7}\n',
     {"qa": ["one", "two"], "prompts": ["  plain text", "four"], "7": ["five"]}),
    ("[]\n\n", {"prompts": ["[]"]})])
def test_prompts_come_by_category(text, prompts, tmp_path):
    (tmp_path / "prompts").write_text(text)
    assert by_category(tmp_path / "prompts") == prompts


def test_prompts_whose_answers_loop_are_left_out(tmp_path, monkeypatch, models):
    file = tmp_path / "prompts"
    rows = [{"prompt": f"Mia has {i} apples.", "category": c} for i, c in enumerate("aabbcc")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = iter([True, False, False, False, True, True])
    monkeypatch.setattr(module.tasks, "loops", lambda output: next(answers))
    bench = made(*models, "--prompts", str(file), "-n", "2", "--max-new-tokens", "2")
    assert bench.dropped == 3 and [*map(len, bench.prompts.values())] == [1, 2]
    texts = [bench.tokenizer.decode(p, skip_special_tokens=True) for _, p in bench.pairs()]
    assert texts == [rows[i]["prompt"] for i in (1, 2, 3)] and not bench.examples


@pytest.mark.parametrize("argv, said", [
    (["--max-new-tokens", "2"], "does not loop"), (["-n", "0"], "got 0, 1 and 200"),
    (["--max-new-tokens", "399"], "context of 400")])
def test_without_a_prompt_there_is_no_benchmark(argv, said, monkeypatch, models):
    monkeypatch.setattr(module.tasks, "loops", lambda output: True)
    with pytest.raises(InputError, match=said):
        made(*models, *argv)


# -------------------------------------------------------------------------------- all methods

def test_make_bench_prints_rows_beside_transformers_own(models, monkeypatch, capsys):
    folder = models[models.index("--target") + 1].removesuffix("target")
    another = f"cllm --target {folder}cllm"
    argv = ["results/bench.py", *models, "--max-new-tokens", "12", "--only", "speculative",
            "lookahead --W", "--row", another, "--row", "medusa --nodes 4"]
    monkeypatch.setattr(sys, "argv", argv)
    module.main()
    text = capsys.readouterr().out
    assert text.startswith(f"`python {shlex.join(argv)}`\n\ncpu, torch.float32, ")
    assert "medians of 1 rounds over 3 prompts (0 left out for loops)" in text
    assert "medusa --nodes 4 left out: expected " in text  # there is no such file
    rows, ratios = tables_of(text)
    speculation = "speculative --gamma 6"
    assisted = "`generate`, assistant, draft of 6 tokens"
    assert names_of(rows) == [
        "autoregressive", speculation, "lookahead --W 0", another, "`generate`", assisted,
        "`generate`, prompt lookup of 4"]
    same, per_call = column(rows, "output as AR's"), column(rows, "tokens per target call")
    assert same.pop(another) != "3 of 3" and set(same.values()) == {"3 of 3"}
    x_ar = column(rows, "x AR")
    assert per_call["autoregressive"] == per_call["`generate`"] == "1.00"
    assert x_ar["autoregressive"] == "1.00"
    assert float(per_call[speculation]) == float(per_call[assisted]) > 2
    assert column(rows, "guesses a call")[speculation] == "6.0"
    assert column(rows, "rows a call")[speculation] == "7.0"
    assert column(rows, "range")[another] == " to ".join([x_ar[another]] * 2)
    layers = column(rows, "target layers a token")
    for name, count in layers.items():
        once = float(layers["autoregressive"]) / float(per_call[name])
        assert float(count) == pytest.approx(once, abs=0.1)
    place = rows[0].index("ms a token: target")
    for row in rows[1:]:
        target, draft, rest = map(float, row[place:place + 3])
        assert target > 0 and rest > 0 and (draft > 0) == (row[0] in (speculation, assisted))
        speed = float(column(rows, "tokens/s")[row[0]])
        assert 1000 / (target + draft + rest) == pytest.approx(speed, rel=0.1)
        share = 100 * float(x_ar[row[0]]) / float(per_call[row[0]])
        assert float(row[place - 1].rstrip("%")) == pytest.approx(share, abs=2)
    assert names_of(ratios) == ["autoregressive / `generate`", f"{speculation} / {assisted}",
                                "lookahead --W 0 / `generate`, prompt lookup of 4"]


def test_without_a_draft_there_are_the_methods_that_need_none(models, monkeypatch, capsys):
    """Sampled outputs are not compared with AR's, and are graded all the same."""
    only = ["--max-new-tokens", "4", "--temperature", "1", "--only", "look", "specu"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *models[:2], *models[4:], *only])
    module.main()
    text = capsys.readouterr().out
    assert "speculative --gamma 6 left out: expected a --draft\n" in text
    rows, ratios = tables_of(text)
    assert rows[0][-2:] == ["rest", "right answers"] and len(ratios) == 3
    assert names_of(rows) == ["autoregressive", "lookahead", "lookahead --W 0", "`generate`",
                              "`generate`, prompt lookup of 4"]


def test_rows_say_what_the_bench_does_not():
    """A row's own options come first: nodes, sampling, length and model."""
    bench = made(*TINY, "--max-new-tokens", "8", "--nodes", "5")
    (_, prompt), *_ = bench.pairs()
    for line, most in (("medusa --heads hydra", 4), ("eagle --dynamic", 4),
                       ("medusa --nodes 3", 2)):  # all but the root
        log = bench.row(line)(prompt).log
        assert max(record["guessed"] for record in log) == most
    warm = bench.row("jacobi --temperature 0.7 --seed 3 --max-new-tokens 5")
    assert (warm.sample.temperature, warm.sample.seed, warm.limit) == (0.7, 3, 5)
    assert bench.row("cllm").models["target"].model is bench.load(str(module.MODELS / "cllm"))
    more = bench.row("specinfer --draft models/draft --draft models/draft")
    assert len(more.options["more_drafts"]) == 1
    with pytest.raises(InputError, match="expected a row of one of"):
        bench.row("medusas")


@pytest.mark.parametrize("line", [*dict.fromkeys(
    line for lines in (module.ALL, *module.TABLES.values()) for line in lines)])
def test_every_row_is_a_command_line(line, bench):
    assert bench.row(line).method.__name__ == line.split()[0]


@pytest.fixture(scope="module")
def bench():
    return made(*TINY, "--max-new-tokens", "2")


@pytest.fixture(scope="module")
def small(models):
    """A benchmark of one prompt and a few tokens."""
    bench = made(*models, "--max-new-tokens", "7")
    bench.prompts.pop("math"), bench.prompts.pop("code")
    return bench


def test_answers_to_tasks_are_graded_and_no_others(small):
    prompt, example = next(iter(small.examples.items()))
    answer = small.tokenizer.encode(example.answer, add_special_tokens=False)
    assert small.graded([prompt, [5], prompt], [answer, answer, [5]]) == [True, False]
