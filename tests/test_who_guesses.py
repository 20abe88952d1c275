"""The comparison of drafters counts what it says, its chains are chains, and its figure can be
read."""
import copy
import itertools
import random
import sys
import xml.etree.ElementTree as xml

import pytest
import torch

import who_guesses as module
import who_picture as picture
from bench import AR, Bench, Ours, options
from cli.run import TimedLM
from common import InputError, autoregressive, greedy
from families import tiny
from helpers import script
from speculative import speculative
from survey.rest import Datastore, as_text
from test_bench import PROMPT, column, models, tables_of  # noqa: F401
from who_picture import Curve, draw_figure, overlap, read_figures

MODEL = tiny("llama")
SPACE = "{http://www.w3.org/2000/svg}"


# --------------------------------------------------------------------------------- acceptance

def test_acceptance_by_hand():
    """Four rounds of up to three guesses: 0, 3, 1 and 2 are accepted. The last one is cut, so
    nobody knows whether its third guess was right."""
    logs = [[{"accepted": 0}, {"accepted": 3}], [{"accepted": 1}, {"accepted": 2, "cut": True}]]
    counts = module.measure_acceptance(logs, 3)
    assert counts == [(4, 3), (3, 2), (1, 1)]
    assert module.rates_of([*counts, (0, 0)]) == [3 / 4, 2 / 3, 1, 0]


def run_of(draft, gamma: int, limit: int = 40) -> Ours:
    lms = {"target": TimedLM(MODEL), "draft": TimedLM(draft)}
    return Ours(speculative, lms, limit, set(), greedy, gamma=gamma)


def test_a_perfect_drafter_and_one_that_is_always_wrong():
    perfect = module.decode_all(run_of(MODEL, 4), [PROMPT])
    assert perfect == {"most": 4, "counts": [(8, 8)] * 4}
    opposite = copy.deepcopy(MODEL)
    head = opposite.get_output_embeddings()
    head.weight = torch.nn.Parameter(-head.weight.detach())
    assert module.decode_all(run_of(opposite, 4, limit=7), [PROMPT, [5, 6]]) == {
        "most": 4, "counts": [(14, 0), *[(0, 0)] * 3]}
    # 8 tokens are 5 and 3 of 5: the second round is cut, and its fourth guess is not judged.
    assert module.decode_all(run_of(MODEL, 4, limit=8), [PROMPT])["counts"] == [
        *[(2, 2)] * 3, (1, 1)]


# -------------------------------------------------------------------------------------- costs

def test_a_round_is_timed_without_the_prompt(monkeypatch):
    class Timed:
        def __init__(self, *given):
            self.log, self.seconds = [], 0

        def decode(self, prompt, limit, sample):
            for self.seconds in [5.0, 5.5, 6.5][:limit]:
                self.log.append({"drafted": 10 * self.seconds})
                yield [1]
    monkeypatch.setattr(Ours, "start_run", Timed)
    run = run_of(MODEL, 4)
    assert module.time_rounds(run, PROMPT, 3) == (0.75, 60)
    assert module.time_rounds(run, PROMPT, 2) is None


def test_weights_that_are_read():
    """A round of 4 drafted tokens reads the draft four times. Embeddings are not read, and the
    first round is not counted."""
    one = sum(p.nbytes for name, p in MODEL.named_parameters() if "embed" not in name)
    tied = MODEL.get_input_embeddings().weight is MODEL.get_output_embeddings().weight
    one += tied * MODEL.get_output_embeddings().weight.nbytes
    ar = Ours(autoregressive, {"target": TimedLM(MODEL)}, 40, set(), greedy)
    assert module.count_read(ar, PROMPT, 4) == (3 * one, 3, 0)
    assert module.count_read(run_of(MODEL, 4), PROMPT, 15) == (2 * 5 * one, 2, 2 * 4)


def test_the_best_chain_by_hand():
    """A round of k guesses takes 2 + k seconds where one of AR takes 2."""
    costs = {"AR": 2.0, "calls": [(1, 2.0), (2, 2.5), (4, 3.5), (8, 5.5)],
             "rounds": {"EAGLE": [[1, 3.0, 1.0], [2, 4.0, 2.0], [4, 6.0, 4.0]]}}
    best = module.find_best("EAGLE", [0.9, 0.8, 0.1, 0.1], costs)
    assert (best["length"], best["cost"], best["tokens"]) == (2, 2, pytest.approx(2.62))
    assert best["guess"] == 0.25 and best["speed"] == pytest.approx(1.31)  # 4 - 2 - 1 s for two
    assert module.find_best("EAGLE", [1, 1, 1, 1], costs)["length"] == 4
    half = costs | {"rounds": {"EAGLE": [[1, 2.5, 0.5], [2, 2.5, 0.5], [4, 2.5, 0.5]]}}
    # It guesses every other time: half a second more, of which the row takes a half.
    assert module.find_best("EAGLE", [1, 0, 0, 0], half)["guess"] == 0.25


# --------------------------------------------------------------------------------- the figure

def make_curves(seed: int) -> list[Curve]:
    rng, curves = random.Random(seed), []
    for name in itertools.chain(*picture.GROUPS.values()):
        rates = [rng.random() for _ in range(rng.choice([3, 4, 8]))]
        cost, tokens = 1 + rng.random() ** 3 * 3, 1 + rng.random() ** 2 * 5
        curves.append(Curve(name, rates, cost, tokens, tokens / cost))
    return curves


@pytest.mark.parametrize("seed", range(4))
def test_every_drafter_has_a_line_and_a_label_and_no_labels_overlap(seed):
    curves = make_curves(seed)
    root = xml.fromstring(draw_figure(curves))
    lines = [x.get("points").split() for x in root.iter(f"{SPACE}polyline")]
    assert [len(line) for line in lines] == [len(curve.acceptance) for curve in curves]
    assert len({picture.draw_mark(curve.name, 0, 0) for curve in curves}) == 16
    boxes = [(x.text, picture.bound_text(float(x.get("x")), float(x.get("y")), x.text,
                                         x.get("text-anchor")))
             for x in root.iter(f"{SPACE}text")]
    names = {name for curve in curves for name in (curve.name, f"{curve.name} {curve.speed:.2f}×")}
    assert names < {name for name, _ in boxes}
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not (names & {one, other} and overlap(a, b)), (one, other)
    assert all(0 <= left and right <= picture.WIDTH and 0 <= top and bottom <= picture.HEIGHT
               for name, (left, top, right, bottom) in boxes if name in names)


PAGE = picture.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", read_figures(PAGE))
def test_the_pages_figures_show_its_tables(file):
    """`python results/who_picture.py` would write what is there."""
    figure = draw_figure(read_figures(PAGE)[file])
    assert picture.PAGE.with_name(file).read_text(encoding="utf-8") == figure


# ------------------------------------------------------------------------------------- chains

def test_rests_chain_is_what_followed_most_often():
    store = Datastore(as_text([1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 9, 1, 2, 3, 4, 6]))
    ids, parents = module.retrieve_chain([Datastore(), store], as_text([8, 1, 2]), 3, 16)
    assert (ids, parents) == ([2, 3, 4, ids[3]], [-1, 0, 1, 2]) and ids[3] in (5, 6)
    assert module.retrieve_chain([store], as_text([8]), 3, 16) == ([8], [-1])
    first = Datastore(as_text([2, 7]))  # an earlier store counts first
    assert module.retrieve_chain([first, store], as_text([2]), 1, 16) == ([2, 7], [-1, 0])
    assert module.retrieve_chain([first, store], as_text([1, 2]), 1, 16) == ([2, 3], [-1, 0])


def test_every_drafter_guesses_a_chain_and_writes_what_ar_writes():
    args = options("").parse_args(["-n", "1", "--max-new-tokens", "24", "--device", "cpu"])
    args.distilled = None
    bench = Bench(args)
    [_, (_, prompt), _] = bench.pairs()
    expected, forward = bench.row(AR)(prompt).output, TimedLM.forward
    with module.only_chains():
        drafters = module.find_drafters(bench)
        assert {*module.DRAFTERS} - {*drafters} == {"distilled", "MTP"}
        for name, k in itertools.product(drafters, (1, 8)):
            run, trees = module.make_chain(bench, name, k), []

            def spy(lm, ids, parents=None, **given):
                if lm is run.models["target"] and given.get("counts", True):
                    trees.append(parents)
                return forward(lm, ids, parents, **given)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TimedLM, "forward", spy)
                count = run(prompt)
            assert count.output == expected, name
            most = max(map(module.guesses_of, count.log))
            assert most == 1 if k == 1 else 3 <= most <= 8, name
            final = sum(x["accepted"] + module.OWN[name] for x in count.log)
            assert count.tokens <= final <= count.tokens + module.OWN[name], name
            if name != "BiTA":  # whose masks hang below every node
                chains = [None, *([-1, *range(n)] for n in range(k + 1))]
                assert all(parents in chains for parents in trees), name


# ------------------------------------------------------------------------------- all of it

def test_tables_and_the_figure_are_made_and_kept(
        models, tmp_path, monkeypatch, capfd):  # noqa: F811
    monkeypatch.setattr(module, "FEWEST", 3)
    argv = [*models, "--adapters", str(tmp_path), "--max-new-tokens", "10", "--timed", "1",
            "--work", str(tmp_path / "work"), "--picture", str(tmp_path / "who.svg")]
    # What is kept is not measured again, but for costs, and for another draft.
    for more, kept in ([], 4), ([], 4), (["--time-again"], 5), (["--draft", models[1]], 7):
        monkeypatch.setattr(sys, "argv", ["x", *argv, *more])
        module.main()
        out = capfd.readouterr().out
        assert "REST left out: expected " in out
        acceptance, costs = tables_of(out[out.index("| drafter"):])
        assert [*column(acceptance, "guess 1")] == [*column(costs, "x AR")] == [
            "small model", "n-grams", "recycling"]
        [file] = (tmp_path / "work").iterdir()
        lines = file.read_text().splitlines()
        assert len(lines) == kept
    xml.parse(tmp_path / "who.svg")
    file.write_text("\n".join(lines[:2]) + "\nnonsense\n")
    assert script("who_guesses", *argv) == 2
    assert "got a damaged line 3 in " in capfd.readouterr().err


@pytest.mark.parametrize("argv, said", [
    (["--temperature", "1"], "--temperature must be 0, got 1.0"),
    (["--timed", "0"], "--timed must be 1 or more, got 0"),
    (["--max-new-tokens", "2"], "--max-new-tokens must be 3 or more")])
def test_what_cannot_be_compared_is_refused(
        argv, said, models, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sys, "argv", ["x", *models, "--work", str(tmp_path), "--adapters",
                                      str(tmp_path), *argv])
    with pytest.raises(InputError, match=said):
        module.main()


def test_no_figure_is_made_of_too_few_rounds():
    with pytest.raises(InputError, match="enough rounds for a picture"):
        draw_figure([Curve("EAGLE", [], 1.0, 1.0, 1.0)])
