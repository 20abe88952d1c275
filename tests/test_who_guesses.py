"""The comparison of drafters counts what it says, its chains are chains, and its figure can be
read."""
import itertools
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import pytest

import who_guesses as module
import who_picture as picture
from bench import AR, Bench, parser_of
from cli.run import TimedLM
from common import InputError
from helpers import script
from survey.rest import Datastore, as_text
from test_bench import tables_of
from who_picture import Curve, draw_figure, read_figures


# --------------------------------------------------------------------------------- acceptance

def test_acceptance_by_hand():
    """Four rounds of up to three guesses: 0, 3, 1 and 2 are accepted. The last one is cut, so
    nobody knows whether its third guess was right."""
    log = [{"accepted": 0, "guessed": 3}, {"accepted": 3, "drafted": 3},
           {"accepted": 1, "guessed": 2}, {"accepted": 2, "guessed": 3, "cut": True}]
    assert module.measure_acceptance(log) == [(4, 3), (3, 2), (1, 1)]


# -------------------------------------------------------------------------------------- costs

def test_a_round_is_timed_without_the_prompt():
    job = SimpleNamespace(log=[{"drafted": 1}, {"drafted": 50}, {"drafted": 70}])

    def decode(prompt, limit, sample):
        for job.seconds in [5.0, 5.5, 6.5][:limit]:
            yield [1]
    job.decode = decode
    run = SimpleNamespace(start_run=lambda: job, sample=None)
    assert module.time_rounds(run, [1], 3) == [(0.75, 60)]
    assert module.time_rounds(run, [1], 2) == []


def test_the_best_chain_by_hand():
    """A round of k guesses takes 2 + k seconds where one of AR takes 2."""
    costs = {"calls": [(1, 2.0), (2, 2.5), (4, 3.5), (8, 5.5)],
             "rounds": {AR: [[0, 2.0, 0]], "EAGLE": [[1, 3.0, 1.0], [2, 4.0, 2.0], [4, 6.0, 4.0]]}}
    best = module.find_best("EAGLE", [0.9, 0.8, 0.1, 0.1], costs)
    assert best == (2, pytest.approx(2.62), 2, 0.25)  # 4 - 2 - 1 s for two guesses
    assert module.find_best("EAGLE", [1, 1, 1, 1], costs)[0] == 4
    costs["rounds"]["EAGLE"] = [[1, 2.5, 0.5], [2, 2.5, 0.5], [4, 2.5, 0.5]]
    # It guesses every other time: half a second more, of which the row takes a half.
    assert module.find_best("EAGLE", [1, 0, 0, 0], costs)[3] == 0.25


# --------------------------------------------------------------------------------- the figure

def test_every_drafter_has_a_mark_of_its_own_and_two_labels():
    names = {*module.DRAFTERS}
    assert names == {*picture.MARKS} and len({*picture.MARKS.values()}) == len(names)
    figure = draw_figure([Curve(name, [0.5], 1.0, 2.0, 1.5) for name in names])
    texts = [x.text for x in xml.fromstring(figure).findall("{*}text")]
    assert all(texts.count(name) == texts.count(f"{name} 1.50×") == 1 for name in names)
    few = "| drafter | guess 1 | x AR |\n| --- | --- | --- |\n| EAGLE |  | 1.00 |"
    with pytest.raises(InputError, match="enough rounds for a picture"):
        draw_figure(picture.read_curves(few))


def test_the_pages_figures_show_its_tables():
    """`python results/who_picture.py` would write what is there."""
    figures = read_figures(picture.PAGE.read_text(encoding="utf-8"))
    assert len(figures) == 2
    for file, curves in figures.items():
        assert picture.PAGE.with_name(file).read_text(encoding="utf-8") == draw_figure(curves)


# ------------------------------------------------------------------------------------- chains

def test_rests_chain_is_what_followed_most_often():
    store = Datastore(as_text([1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 9, 1, 2, 3, 4, 6]))
    ids, parents = module.retrieve_chain([Datastore(), store], as_text([8, 1, 2]), 3, 16)
    assert (ids, parents) == ([2, 3, 4, ids[3]], [-1, 0, 1, 2]) and ids[3] in (5, 6)
    assert module.retrieve_chain([store], as_text([8]), 3, 16) == ([8], [-1])
    first = Datastore(as_text([2, 7]))  # an earlier store counts first
    assert module.retrieve_chain([first, store], as_text([2]), 1, 16) == ([2, 7], [-1, 0])
    assert module.retrieve_chain([first, store], as_text([1, 2]), 1, 16) == ([2, 3], [-1, 0])


def test_every_drafter_guesses_a_chain_and_writes_what_ar_writes(monkeypatch):
    bench = Bench(parser_of("").parse_args("-n 1 --max-new-tokens 11 --device cpu".split()))
    [_, (_, prompt), _] = bench.pairs
    expected, forward, calls = bench.row(AR)(prompt).output, TimedLM.forward, []

    def spy(lm, ids, parents=None, **given):
        if given.get("counts", True):
            calls.append((lm, parents))
        return forward(lm, ids, parents, **given)
    monkeypatch.setattr(TimedLM, "forward", spy)
    with module.only_chains():
        for name, k in itertools.product(module.DRAFTERS, (1, 8)):
            run = module.make_chain(bench, name, k)
            calls.clear()
            count = run(prompt)
            assert count.output == expected, name
            most = max(map(module.guesses_of, count.log))
            assert most == 1 if k == 1 else 3 <= most <= 8, name
            final = sum(x["accepted"] + module.OWN[name] for x in count.log)
            assert count.tokens <= final <= count.tokens + module.OWN[name], name
            chains = [None, *([-1, *range(n)] for n in range(k + 1))]
            trees = [parents for lm, parents in calls if lm is run.models["target"]]
            # The masks of BiTA hang below every node.
            assert name == "BiTA" or all(parents in chains for parents in trees), name


# ------------------------------------------------------------------------------- all of it

def test_tables_and_the_figure_are_made(models, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(module, "FEWEST", 3)
    assert script("who_guesses", *models, "--adapters", str(tmp_path), "--max-new-tokens", "10",
                  "--timed", "1", "--picture", str(tmp_path / "who.svg")) == 0
    out = capfd.readouterr().out
    assert "REST left out: expected " in out
    acceptance, costs = tables_of(out[out.index("| drafter"):])
    assert [*acceptance] == [*costs] == ["small model", "n-grams", "recycling"]
    assert acceptance["small model"]["guess 1"] and costs["recycling"]["x AR"]
    xml.parse(tmp_path / "who.svg")


@pytest.mark.parametrize("argv, said", [
    (["--temperature", "1"], "--temperature must be 0, got 1.0"),
    (["--max-new-tokens", "2"], "--max-new-tokens must be 3 or more")])
def test_what_cannot_be_compared_is_refused(argv, said, models, capfd):
    assert script("who_guesses", *models, *argv) == 2
    assert said in capfd.readouterr().err
