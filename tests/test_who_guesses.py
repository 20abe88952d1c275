"""The comparison of drafters counts what it says, its chains are chains, and its figure can be
read."""
import copy
import itertools
import json
import random
import sys
import xml.etree.ElementTree as xml

import pytest
import torch

import who_guesses as module
import who_picture as picture
from bench import Bench, Ours, options
from common import CachedLM, InputError, autoregressive, greedy
from families import tiny
from speculative import speculative
from survey.rest import Datastore, as_text
from test_bench import PROMPT, column, models, names_of, tables_of  # noqa: F401
from who_picture import Curve, bound_text, draw_figure, find_place, overlap, spread

MODEL = tiny("llama")
SPACE = "{http://www.w3.org/2000/svg}"


# --------------------------------------------------------------------------------- acceptance

def test_acceptance_by_hand():
    """Four rounds of up to three guesses: 0, 3, 1 and 2 are accepted. The last one is cut, so
    nobody knows whether its third guess was right."""
    answers = [{"tokens": 6, "accepted": [0, 3], "cut": False},
               {"tokens": 4, "accepted": [1, 2], "cut": True}]
    counts = module.measure_acceptance(answers, 3)
    assert counts == [(4, 3), (3, 2), (1, 1)]
    assert module.rates_of(counts) == [3 / 4, 2 / 3, 1]
    assert module.rates_of([(2, 0), (0, 0)]) == [0, 0]
    assert module.expect_tokens([0.5, 0.5, 1], 1) == 2 and module.expect_tokens([0.5], 2) == 2.5


def test_tokens_per_round_by_hand():
    """With one guess that is right half of the time two tokens take 1.5 rounds on average."""
    assert module.predict_tokens_per_round([0.5], 1, [2]) == 2 / 1.5
    assert module.predict_tokens_per_round([0.5], 1, [1, 2]) == 3 / 2.5
    assert module.predict_tokens_per_round([0.5], 2, [3]) == 3 / 1.5
    assert module.predict_tokens_per_round([1, 1], 1, [9, 3]) == 3
    assert module.predict_tokens_per_round([0.5, 0.5], 1, [20_000]) == pytest.approx(1.75, rel=1e-3)
    answers = [{"tokens": 6, "accepted": [0, 3], "cut": False},
               {"tokens": 4, "accepted": [1], "cut": True}]
    assert module.count_tokens_per_round(answers) == 10 / 3


def test_the_check_predicts_a_shorter_chain():
    """Guesses that are right by chance are predicted. A drafter that guesses better in short chains
    is not."""
    rng, drafter = random.Random(0), module.Drafter("x", 4, None)

    def decode(rates: list[float]) -> list[dict]:
        answers = []
        for length in rng.choices(range(20, 60), k=200):
            accepted, tokens = [], 0
            while tokens < length:
                right = [*itertools.takewhile(lambda rate: rng.random() < rate, rates)]
                accepted.append(min(len(right), length - tokens))
                cut = tokens + len(right) >= length
                tokens += 1 + accepted[-1]
            answers.append({"tokens": length, "accepted": accepted, "cut": cut})
        return answers
    long, short = decode([0.8, 0.6, 0.7, 0.5]), decode([0.8, 0.6])
    check = module.check_prediction(drafter, long, short)
    assert abs(check.off) < 0.02 and 2 < check.measured < 2.3
    assert module.check_prediction(drafter, long, decode([0.95, 0.9])).off < -0.1
    assert module.Check(2.2, 2.0).off == pytest.approx(0.1)


def test_one_prompt_has_no_other_half(capsys):
    drafter = module.Drafter("x", 2, None)
    one = {"tokens": 4, "accepted": [1, 1], "cut": False}
    answers = {"x": {"long": [one] * 2, "short": [one] * 2}}
    assert module.table_acceptance({"x": drafter}, answers) == []
    assert module.table_acceptance({"x": drafter}, {"x": {"long": [one], "short": [one]}}) == []
    two, alone = ([row[-1] for row in rows[1:]] for rows in tables_of(capsys.readouterr().out))
    assert two == ["+0.0%"] and alone == [""]


def run_of(draft, gamma: int, limit: int = 40) -> Ours:
    lms = {"target": CachedLM(MODEL), "draft": CachedLM(draft)}
    return Ours(speculative, lms, limit, set(), greedy, gamma=gamma)


def test_a_perfect_drafter_and_one_that_is_always_wrong():
    counts = module.measure_acceptance(module.decode_all(run_of(MODEL, 4), [PROMPT]), 4)
    assert {right / tried for tried, right in counts} == {1.0} and counts[0][0] == 8
    opposite = copy.deepcopy(MODEL)
    head = opposite.get_output_embeddings()
    head.weight = torch.nn.Parameter(-head.weight.detach())
    answers = module.decode_all(run_of(opposite, 4, limit=7), [PROMPT, [5, 6]])
    assert answers == [{"tokens": 7, "accepted": [0] * 7, "cut": False}] * 2
    assert module.measure_acceptance(answers, 4) == [(14, 0), (0, 0), (0, 0), (0, 0)]
    # 9 tokens are 5 and 4 of 5: the second round is cut.
    assert module.decode_all(run_of(MODEL, 4, limit=9), [PROMPT]) == [
        {"tokens": 9, "accepted": [4, 4], "cut": True}]


# -------------------------------------------------------------------------------------- costs

def test_a_round_is_timed_without_the_prompt(monkeypatch):
    run = run_of(MODEL, 4, limit=11)
    seconds = iter([5.0, 5.5, 6.5])

    class Timed:
        def __init__(self, *given):
            self.log, self.seconds = [], 0

        def decode(self, prompt, limit, sample):
            for now in itertools.islice(seconds, limit):
                self.seconds = now
                self.log.append({"drafted": 10 * now})
                yield [1]
    monkeypatch.setattr(module, "Run", Timed)
    assert module.time_rounds(run, PROMPT, 3) == (0.75, 60)
    seconds = iter([1.0, 2.0])
    assert module.time_rounds(run, PROMPT, 3) is None


def test_weights_that_are_read():
    """A round of 4 drafted tokens reads the draft four times. Embeddings are not read, and the
    first round is not counted."""
    one = sum(p.nbytes for name, p in MODEL.named_parameters() if "embed" not in name)
    tied = MODEL.get_input_embeddings().weight is MODEL.get_output_embeddings().weight
    one += tied * MODEL.get_output_embeddings().weight.nbytes
    ar = Ours(autoregressive, {"target": CachedLM(MODEL)}, 40, set(), greedy)
    assert module.count_read(ar, PROMPT, 4) == (3 * one, 3, 0)
    assert module.count_read(run_of(MODEL, 4), PROMPT, 15) == (2 * 5 * one, 2, 2 * 4)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_the_best_chain_by_hand():
    """A round of k guesses takes 2 + k seconds where one of AR takes 2."""
    drafter = module.Drafter("x", 4, None)
    costs = {"AR": 2.0, "calls": [2.0, 2.5, 3.0, 3.5, 4.0],
             "rounds": {"x": [[1, 3.0, 1.0], [2, 4.0, 2.0], [4, 6.0, 4.0]]}}
    best = module.find_best(drafter, [0.9, 0.8, 0.1, 0.1], costs)
    assert (best.length, best.cost) == (2, 2.0) and best.tokens == pytest.approx(2.62)
    assert best.guess == 0.25 and best.speed == pytest.approx(1.31)  # 4 - 2 - 1 s for two guesses
    assert module.find_best(drafter, [1, 1, 1, 1], costs).length == 4
    assert [module.interpolate([(1, 3), (2, 4), (4, 8)], x) for x in (0, 1, 1.5, 3, 4, 9)] == [
        3, 3, 3.5, 6, 8, 8]
    half = costs | {"rounds": {"x": [[1, 2.5, 0.5], [2, 2.5, 0.5], [4, 2.5, 0.5]]}}
    # It guesses every other time: half a second more, of which the row takes a half.
    assert module.find_best(drafter, [1, 0, 0, 0], half).guess == 0.25


# --------------------------------------------------------------------------------- the figure

def make_curve(name: str, rates: list[float], cost: float, tokens: float) -> Curve:
    return Curve(name, rates, cost, tokens, tokens / cost)


def make_curves(seed: int) -> list[Curve]:
    rng = random.Random(seed)
    return [make_curve(name, [rng.random() for _ in range(rng.choice([3, 4, 8]))],
                       1 + rng.random() ** 3 * 3, 1 + rng.random() ** 2 * 5)
            for names in picture.GROUPS.values() for name in names]


def boxes_of(root) -> dict[tuple[int, str], tuple]:
    """Return the box of each text of a picture."""
    return {(i, x.text): picture.bound_text(float(x.get("x")), float(x.get("y")), x.text,
                                            x.get("text-anchor"))
            for i, x in enumerate(root.iter(f"{SPACE}text"))}


@pytest.mark.parametrize("seed", range(6))
def test_every_drafter_has_a_line_a_mark_and_a_label_and_no_labels_overlap(seed):
    curves = make_curves(seed)
    root = xml.fromstring(draw_figure(curves))
    lines = [x.get("points").split() for x in root.iter(f"{SPACE}polyline")]
    assert [len(line) for line in lines] == [len(curve.acceptance) for curve in curves]
    words = [x.text for x in root.iter(f"{SPACE}text")]
    plane = {curve.name: f"{curve.name} {curve.speed:.2f}×" for curve in curves}
    assert all(words.count(word) == 1 for both in plane.items() for word in both)
    [bold] = [x.text for x in root.iter(f"{SPACE}text") if x.get("class") == "over head"]
    assert bold == plane[max(curves, key=lambda curve: curve.speed).name]
    boxes = boxes_of(root)
    names = {*plane, *plane.values()}
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        if names & {one[1], other[1]}:
            assert not overlap(a, b), (one, other)
    assert all(0 <= left and right <= picture.WIDTH and 0 <= top and bottom <= picture.HEIGHT
               for (_, name), (left, top, right, bottom) in boxes.items() if name in names)
    for group in range(4):  # within a group all lines differ
        dashes = [x.get("stroke-dasharray") for x in root.iter(f"{SPACE}polyline")]
        assert len({*dashes[4 * group:4 * group + 4]}) == 4


def test_marks_differ_and_are_the_same_in_every_figure():
    """No two drafters have one mark, and who else is drawn does not change it."""
    curves = make_curves(0)
    styles = [picture.find_style(curve.name) for curve in curves]
    marks = {picture.draw_mark(curve.name, 0, 0) for curve in curves}
    assert len(marks) == len({x[:2] for x in styles}) == len(curves) == 16
    assert picture.draw_mark("hybrid", 0, 0) == (
        '<path d="M0.0 -9.0l9 9l-9 9l-9 -9z" class="ink empty"/>'
        '<circle class="full" cx="0.0" cy="0.0" r="2.8"/>')
    few = draw_figure([curve for curve in curves if curve.name in ("PaSS", "BiTA")])
    assert few.count(' l9 15h-18z" class="ink half"'[1:]) == (
        len(next(x for x in curves if x.name == "BiTA").acceptance) + 2)


PAGE = picture.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", picture.read_figures(PAGE))
def test_the_pages_figures_show_its_tables(file):
    """`python results/who_picture.py` would write what is there. The tables' cells are read."""
    curves = picture.read_figures(PAGE)[file]
    assert picture.PAGE.with_name(file).read_text(encoding="utf-8") == draw_figure(curves)
    part = PAGE[PAGE.index(f"({file})"):]
    acceptance, costs = tables_of(part[part.index("| drafter"):])[:2]
    assert names_of(costs) == [curve.name for curve in curves]
    first, speeds = column(acceptance, "guess 1"), column(costs, "x AR")
    for curve in curves:
        assert first[curve.name] == f"{curve.acceptance[0]:.2f}"
        assert speeds[curve.name] == f"{curve.speed:.2f}"
        assert curve.tokens / curve.cost == pytest.approx(curve.speed, abs=0.02)


def test_points_lie_where_they_belong():
    """A drafter twice as fast as AR lies on the line of 2, and acceptance grows upwards."""
    curves = [make_curve("small model", [0.9, 0.2], 1.5, 3.0), make_curve("REST", [0.5], 2.0, 2.0)]
    root = xml.fromstring(draw_figure(curves))
    [line, _] = [[tuple(map(float, point.split(","))) for point in x.get("points").split()]
                 for x in root.iter(f"{SPACE}polyline")]
    left, top = picture.PANELS[0]
    assert line[0] == (left, pytest.approx(top + 0.1 * picture.TALL, abs=0.1))
    assert line[1][0] == pytest.approx(left + picture.PANEL / 7, abs=0.1)
    [mark] = [x for x in root.iter(f"{SPACE}rect")][-1:]
    x, y = (float(mark.get(axis)) + 6.5 for axis in "xy")
    paths = [x.get("d")[1:].replace("L", " ") for x in root.iter(f"{SPACE}path")
             if x.get("stroke-dasharray") == "3 5"]
    ends = [tuple(map(float, path.split())) for path in paths]
    gaps = [abs(y0 + (y1 - y0) * (x - x0) / (x1 - x0) - y) for x0, y0, x1, y1 in ends]
    assert min(gaps) < 1 and gaps.index(min(gaps)) == 3  # of 0.5, 0.75, 1.5, 2, …


def test_labels_are_moved_apart():
    assert spread([5, 5, 50], 10, 0, 100) == [5, 15, 50]
    assert spread([95, 99, 20], 10, 0, 100) == [90, 100, 20]
    assert spread([1, 0, 2], 10, 0, 20) == [10, 0, 20]
    taken = [(42, 42, 58, 58), (55, 0, 400, 400)]
    box = bound_text(*find_place(50, 50, "word", taken, (0, 0, 400, 400)), "word", "middle")
    assert not any(overlap(box, other) for other in taken) and box[0] >= 0
    own, other = (38, 39, 62, 61), (38, 66, 62, 88)  # a mark, and another one below it
    # Only a strip of the page is left, from the mark to below the other one.
    strip = bound_text(*find_place(50, 50, "I", [own, other], (36, 0, 64, 400)), "I", "middle")
    assert strip[3] <= 39
    assert picture.hits((50, 50), (50, 90), [own, other])
    assert not picture.hits((50, 50), (50, 62), [own, other])
    below = bound_text(*find_place(50, 50, "I", [own, other], (36, 62, 64, 400)), "I", "middle")
    assert below[1] >= 88  # no other place is free, so the thin line crosses the other mark
    assert overlap((0, 0, 2, 2), (1, 1, 3, 3)) and not overlap((0, 0, 2, 2), (2, 0, 3, 2))


# ------------------------------------------------------------------------------------- chains

def test_rests_chain_is_what_followed_most_often():
    store = Datastore(as_text([1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 9, 1, 2, 3, 4, 6]))
    ids, parents = module.retrieve_chain([Datastore(), store], as_text([8, 1, 2]), 3, 16)
    assert (ids, parents) == ([2, 3, 4, ids[3]], [-1, 0, 1, 2]) and ids[3] in (5, 6)
    assert module.retrieve_chain([store], as_text([1, 2]), 1, 16) == ([2, 3], [-1, 0])
    assert module.retrieve_chain([store], as_text([8]), 3, 16) == ([8], [-1])
    first = Datastore(as_text([2, 7]))  # an earlier store counts first
    assert module.retrieve_chain([first, store], as_text([2]), 1, 16) == ([2, 7], [-1, 0])
    assert module.retrieve_chain([first, store], as_text([1, 2]), 1, 16) == ([2, 3], [-1, 0])
    assert module.keep_likeliest(lambda x: {"a": 0.2, "b": 0.5, x: 0.3}, "c") == {"b": 0.5}
    assert module.keep_likeliest(dict) == {}


@pytest.fixture(scope="module")
def loaded():
    """Load the embedded models with all their parts, and a prompt of each task."""
    args = options("").parse_args(["-n", "1", "--max-new-tokens", "24", "--device", "cpu"])
    args.distilled = None
    bench = Bench(args)
    with module.only_chains():
        yield bench, module.Drafters(bench).found


def test_every_drafter_guesses_a_chain_and_writes_what_ar_writes(loaded):
    bench, drafters = loaded
    assert {"small model", "Medusa", "Hydra", "EAGLE", "EAGLE-3", "DFlash", "BiTA", "PaSS", "REST",
            "early exit", "Draft & Verify", "n-grams", "recycling", "hybrid"} <= {*drafters}
    assert {*drafters} < {name for names in picture.GROUPS.values() for name in names}
    [_, (_, prompt), _] = bench.pairs()
    expected = bench.ours(autoregressive)(prompt).output
    for name, drafter in drafters.items():
        assert 3 <= drafter.most <= 8
        for k in (1, drafter.most):
            run, trees = drafter.make(k), []
            forward = CachedLM.forward

            def spy(lm, ids, parents=None, **options):
                if lm is run.models["target"] and options.get("counts", True):
                    trees.append(parents)
                return forward(lm, ids, parents, **options)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CachedLM, "forward", spy)
                count = run(prompt)
            assert count.output == expected, name
            guesses = [x.get("guessed", x.get("drafted")) for x in count.log]
            assert max(guesses) == k and max(x["accepted"] for x in count.log) <= k, name
            final = sum(x["accepted"] + drafter.own for x in count.log)
            assert count.tokens <= final <= count.tokens + drafter.own, name
            if name != "BiTA":  # whose masks hang below every node
                chains = [None, *([-1, *range(n)] for n in range(k + 1))]
                assert all(parents in chains for parents in trees), name


def test_a_part_that_is_not_there_is_left_out(loaded, tmp_path, capsys):
    bench = copy.copy(loaded[0])
    bench.args = copy.copy(bench.args)
    bench.args.adapters = tmp_path
    found = module.Drafters(bench).found
    assert {*found} == {"small model", "n-grams", "recycling"}
    assert "REST left out: --adapters must hold rest.safetensors" in capsys.readouterr().out


# ------------------------------------------------------------------------------- all of it

def run_main(monkeypatch, capsys, *argv) -> str:
    monkeypatch.setattr(sys, "argv", ["results/who_guesses.py", *map(str, argv)])
    module.main()
    return capsys.readouterr().out


def test_tables_and_the_figure_are_made_and_kept(
        models, tmp_path, monkeypatch, capsys):  # noqa: F811
    argv = [*models, "--adapters", tmp_path, "--max-new-tokens", "10", "--timed", "1", "--work",
            tmp_path / "work", "--picture", tmp_path / "who.svg"]
    text = run_main(monkeypatch, capsys, *argv)
    acceptance, costs = tables_of(text[text.index("| drafter"):])
    assert names_of(acceptance) == names_of(costs) == ["small model", "n-grams", "recycling"]
    assert {*column(acceptance, "off")} == {"small model", "n-grams", "recycling"}
    assert all(float(x) >= 1 for x in column(costs, "tokens a round").values())
    assert column(costs, "of the target's")["n-grams"] == "0.0%"
    xml.parse(tmp_path / "who.svg")
    monkeypatch.setattr(module, "decode_all", None)  # nothing is decoded again
    made = []
    monkeypatch.setattr(module, "measure_costs", lambda *given: made.append(1) or kept)
    [file] = (tmp_path / "work").iterdir()
    lines = map(json.loads, file.read_text().splitlines())
    [kept] = [value for name, value in lines if name.startswith("costs")]
    again = run_main(monkeypatch, capsys, *argv)
    assert again == text and not made
    assert run_main(monkeypatch, capsys, *argv, "--time-again").partition("\n")[2] == (
        text.partition("\n")[2]) and made == [1]
    with pytest.raises(TypeError):  # another draft decodes anew
        run_main(monkeypatch, capsys, *argv, "--draft", models[1])


@pytest.mark.parametrize("argv, said", [
    (["--temperature", "1"], "--temperature must be 0, got 1.0"),
    (["--timed", "0"], "--timed must be 1 or more, got 0"),
    (["--max-new-tokens", "2"], "--max-new-tokens must be 3 or more")])
def test_what_cannot_be_compared_is_refused(
        argv, said, models, tmp_path, monkeypatch, capsys):  # noqa: F811
    with pytest.raises(InputError, match=said):
        run_main(monkeypatch, capsys, *models, "--adapters", tmp_path, "--work", tmp_path, *argv)
