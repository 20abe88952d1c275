"""What curves.py measures: mixtures of models, predictions, tables, and what it keeps of them."""
import json
import math
import random
import sys
import xml.etree.ElementTree as xml

import pytest
import torch

import curves
from bench import Count, Results
from cllm import collect
from common import CachedLM, InputError, Sampler, autoregressive, until
from families import near, tiny
from helpers import tokens_of
from speculative import speculative
from test_bench import column, made, models, tables_of  # noqa: F401  (models: a fixture)

E = math.exp(1)


# ------------------------------------------------------------------------------------- mixtures

def test_a_mixture_is_between_its_models():
    """Its distribution is the geometric mixture, over committed text and over pending trees."""
    p, q = tiny("llama"), near(tiny("llama"), 0.05)
    for a in (0.3, 1.0):
        mixed = curves.Mixture(CachedLM(q), CachedLM(p), a)
        mixed.start([3, 14])
        mixed.forward([15, 9, 2], [-1, 0, 0])
        mixed.commit(iter([0, 2]))
        found = mixed.forward([6, 5], [-1, -1])
        assert mixed.length == 4 and mixed.parents == [-1, -1]
        logits = []
        for model in (q, p):
            lm = CachedLM(model)
            lm.start([3, 14, 15, 2])
            logits.append(lm.forward([6, 5], [-1, -1]).log_softmax(-1))
        torch.testing.assert_close(found, (1 - a) * logits[0] + a * logits[1])


# ---------------------------------------------------------------------------------- predictions

def test_predictions():
    assert curves.expect_tokens(0.5, 2) == 1.75 and curves.expect_tokens(1, 4) == 5
    assert curves.predict_speed(0.5, 0.25, 2) == pytest.approx(1.75 / 1.5)
    assert curves.predict_speed(0.5, 0.25, 2, verify=1.25) == 1
    for alpha in (0.05, 0.6, 0.97):
        tokens = curves.expect_tokens(alpha, 7)
        assert curves.find_alpha(tokens, 7) == pytest.approx(alpha, abs=1e-4)


def test_the_plane_is_a_picture_with_all_points():
    points = {"four & more": (0.43, 0.2, 0.9), "eight": (0.6, 0.3, 1)}
    root, space = xml.fromstring(curves.draw_plane(points)), "{http://www.w3.org/2000/svg}"
    texts = {x.text for x in root.iter(space + "text")}
    assert {"four & more: 0.90x", "eight: 1.00x", "HumanEval", "1.5x", "acceptance α"} <= texts
    assert len([*root.iter(space + "circle")]) == 2 + len(curves.PAPER)
    for speed, line in zip((1, 1.5, 2, 3), root.iter(space + "polyline"), strict=True):
        middle = line.get("points").split()
        x, y = map(float, middle[len(middle) // 2].split(","))
        best = max(curves.predict_speed((x - 60) / 560, (380 - y) / 360, g) for g in range(1, 17))
        assert best == pytest.approx(speed, rel=0.02)
    root = xml.fromstring(curves.draw_plane({"slower than its target": (0.5, 2, 0.3)}))
    assert all(float(x.get("cy")) >= 20 for x in root.iter(space + "circle"))


def test_ratios_are_of_the_same_prompts_and_seeds():
    ar = [[[10.0, 5, 0, []], [3.0, 5, 0, []]], [[8.0, 5, 0, []], [5.0, 5, 0, []]]]
    half = [[[x[0] / 2, *x[1:]] for x in some] for some in ar]
    assert curves.pool_perplexity(ar) == pytest.approx(E ** 1.3)
    assert curves.format_spread(half) == "[1.92, 1.92]"
    assert curves.format_spread(ar[:1] + half) == "[1.92, 3.67]"
    assert curves.compare_with_ar(half, ar).startswith("0.52 [")
    assert curves.compare_with_ar(ar, ar) == "1.00 [1.00, 1.00]"
    # In one of two seeds one prompt of eight has a nat more. With that prompt drawn k times of 8
    # and that seed j times of 2 the ratio is exp(jk / 16); P(jk > 4) = 0.02, P(jk >= 4) = 0.07
    flat = [[[1.0, 1, 0, []]] * 8, [[2.0, 1, 0, []]] * 8]
    odd = [[[1.0 + (i == 0), 1, 0, []] for i in range(8)], flat[1]]
    assert curves.compare_with_ar(odd, flat) == "1.06 [1.00, 1.28]"


# --------------------------------------------------------------------------------------- tables

@pytest.fixture
def small(models, tmp_path):  # noqa: F811
    """A benchmark of two prompts and a few tokens."""
    bench = made(*models, "--max-new-tokens", "8", "--rounds", "1")
    bench.prompts.pop("code")
    for name, value in dict(command="small", work=tmp_path / "work", drafts=[], picture=None,
                            shares=[0, 1], beams=[1, 2], seeds=[0, 1], lengths=[60, 120],
                            few=2).items():
        setattr(bench.args, name, value)
    return bench


def test_what_was_measured_is_kept(small):
    """Each name is measured once for the same settings and models."""
    made = []

    def make(x):
        return lambda: made.append(x) or {"value": (x, 2)}
    kept = curves.Kept(small, "settings")
    assert kept("a", make(1)) == kept("a", make(3)) == {"value": [1, 2]}
    kept("b", make(4))
    [file] = small.args.work.iterdir()
    file.write_text(file.read_text()[:-3])  # the last line was cut off
    kept = curves.Kept(small, "settings")
    assert kept("a", make(5)) == {"value": [1, 2]} and kept("b", make(6)) == {"value": [6, 2]}
    curves.Kept(small, "others")("a", make(7))
    small.target = near(small.target, 0.1)
    curves.Kept(small, "settings")("a", make(8))
    assert made == [1, 4, 6, 7, 8]


@pytest.mark.parametrize("command, settings", [
    ("perplexity", {"max_new_tokens"}), ("drafts", {"max_new_tokens", "rounds", "gamma"}),
    ("lengths", {"max_new_tokens", "rounds", "nodes"})])
def test_what_was_measured_is_of_these_settings(command, settings, small, monkeypatch):
    """Figures of other settings or of another table are in another file."""
    files = []

    def kept(*given):
        files.append(curves_kept(*given).path.name)
        raise InputError
    curves_kept, small.args.command = curves.Kept, command
    monkeypatch.setattr(curves, "Kept", kept)
    for changed in "few", "max_new_tokens", "rounds", "gamma", "nodes":  # the first one counts not
        setattr(small.args, changed, getattr(small.args, changed) + 1)
        with pytest.raises(InputError):
            curves.TABLES[command](small)
        assert changed == "few" or (files[-1] != files[-2]) == (changed in settings)


def measured(seconds: dict, output: list[int], log: list[dict]) -> Results:
    """Make counts of two prompts: 12 tokens in 3 calls of 5 and 6 rows; AR takes 4 calls."""
    def count(name, i: int) -> Count:
        return Count(12, 3 + (name == "AR"), seconds[name] * (1 + i), 0.5, output=output, log=log,
                     rows=5 + i, draft_rows=2)
    return Results({name: [[(str(i), count(name, i)) for i in range(2)]] for name in seconds})


def test_the_figures_of_a_draft(small, tmp_path, monkeypatch):
    """Known seconds give the cost of a draft call, of a verification, and Ouroboros' Eq. 6."""
    near(small.target, 0.1).save_pretrained(tmp_path / "far")
    small.tokenizer.save_pretrained(tmp_path / "far")
    small.draft = small.load(str(tmp_path / "far"))
    prompts = [prompt for _, prompt in small.pairs()]
    output, asked = tokens_of(autoregressive(CachedLM(small.target), prompts[0]), 8), {}
    log = [{"accepted": 3, "calls": 5}, {"accepted": 1, "calls": 3}]

    def measure(runs, pairs):
        asked.update(runs)
        return measured({"AR": 12, 2: 6, 4: 4, 8: 3, "ouroboros": 2, "assisted": 8}, output, log)

    def costs(lm, most):
        one = 0.1 if lm.model is small.draft else 1.0
        return {n: one * (1 + 0.1 * (n - 1)) for n in range(1, most + 1)}
    monkeypatch.setattr(small, "measure", measure)
    monkeypatch.setattr(curves, "row_costs", costs)
    started = CachedLM.start

    def start(lm, prompt):
        before = lm.prompt_seconds
        started(lm, prompt)
        lm.prompt_seconds = before + (9.0 if lm.model is small.target else 4.5)
    monkeypatch.setattr(CachedLM, "start", start)
    x = curves.measure_draft(small, str(tmp_path / "far"), prompts)
    guesses = [small.draft(torch.tensor([p + output[:-1]])).logits[0, len(p) - 1:].argmax(-1)
               for p in prompts]
    right = torch.stack(guesses) == torch.tensor(output)
    assert 0 < right.float().mean() < 1
    assert x["alpha"] == pytest.approx(right.float().mean().item())
    assert x["c"] == pytest.approx(0.1)
    assert x["verify"] == pytest.approx({2: 1.2, 4: 1.4, 8: 1.8})
    assert x["speculative"] == pytest.approx({2: 2, 4: 3, 8: 4})
    assert x["assisted"] == pytest.approx(1.5) and x["ouroboros"] == pytest.approx(6)
    assert x["eq6"] == pytest.approx(4 / (4 * 0.11 + 1.5))
    assert x["prompts"] == pytest.approx([0.5, 0.25])
    assert [asked[gamma].options["gamma"] for gamma in curves.GAMMAS] == [*curves.GAMMAS]
    assistant = asked["assisted"].models["draft"].state_dict()
    assert all(torch.equal(assistant[name], p) for name, p in small.draft.state_dict().items())


def test_the_figures_of_a_length(small, monkeypatch):
    asked = {}

    def measure(runs, pairs):
        asked.update(runs)
        return measured({name: 12 / (1 + i) for i, name in enumerate(runs)}, [], [])
    monkeypatch.setattr(small, "measure", measure)
    monkeypatch.setattr(curves, "row_costs", lambda lm, most: {
        n: lm.length + n for n in range(1, most + 1)})
    monkeypatch.setattr(small, "fitting", lambda name, make: {name: None})  # nothing is trained
    pairs = small.pairs()
    length = len(pairs[0][1]) - 1
    x = curves.measure_length(small, pairs)
    assert x["ms"] == pytest.approx(1000 * 36 / 24)
    assert x["rows"] == pytest.approx([(length + n) / (length + 1) for n in (8, 16)])
    names = ["lookahead, W = 0", "REST", "hybrid, none", "hybrid, hydra", "EAGLE, dynamic"]
    assert list(x["methods"]) == names and list(asked) == ["AR", *names]
    for i, name in enumerate(names):
        assert x["methods"][name][:2] == (4, pytest.approx(2 + i))


def test_agreement_is_of_warped_distributions(small):
    prompts = [prompt for _, prompt in small.pairs()][:1]
    text = tokens_of(autoregressive(CachedLM(small.target), prompts[0], sample=Sampler(1.0)), 6)
    far, ids = near(small.target, 0.1), torch.tensor([prompts[0] + text[:-1]])
    warp = Sampler(1.0, 20, 0.9)
    p, q = (warp.probs(model(ids).logits[0, -len(text):]) for model in (small.target, far))
    expected = (1 - (p - q).abs().sum(-1) / 2).mean().item()
    assert 0 < expected < 1
    found = curves.measure_agreement(CachedLM(small.target), CachedLM(far), prompts, [text])
    assert found == pytest.approx(expected, abs=1e-4)


def test_what_methods_are_given(small, monkeypatch):
    seen = []

    def stand_in(name):
        def method(target, draft, prompt, *, sample, log, **own):
            seen.append((name, sample.seed, own))
            yield from autoregressive(target, prompt, sample=sample)
        return method
    for name in ("mjsd", "bild", "speculative"):
        monkeypatch.setattr(curves, name, stand_in(name))
    small.args.shares = [0]
    curves.table_perplexity(small)
    given = [*(("mjsd", dict(gamma=4, beams=n, eos=small.eos)) for n in (1, 2)),
             ("bild", dict(gamma=10, fallback=0.9, rollback=2.0)), ("speculative", dict(gamma=4))]
    assert seen == [(name, seed, own) for name, own in given for seed in (0, 1)
                    for _ in small.pairs()]


def test_perplexity_by_the_draft(small, capsys, monkeypatch):
    small.args.drafts = [small.args.draft]
    curves.table_perplexity(small)
    first = capsys.readouterr().out
    tables = tables_of(first)
    for rows in tables:
        assert [row[0] for row in rows[1:]] == ["a = 0", "a = 1", "draft"]
        assert column(rows, "1 - TVD")["a = 1"] == "1.00"
        assert rows[1][1:] == rows[3][1:]  # without a share of the target's it is the draft
    assert column(tables[2], "1 beams")["a = 1"] == "4.00"
    [file] = small.args.work.iterdir()
    kept = dict(map(json.loads, file.read_text().splitlines()))
    key = curves.digest(small.draft.state_dict())
    ar, beams = ([[kept[f"{name} {seed} {i}"] for i in range(2)] for seed in (0, 1)]
                 for name in ("AR", f"2 beams {key}"))
    assert f"AR, sampled: {curves.pool_perplexity(ar):.2f} {curves.format_spread(ar)}" in first
    found = column(tables[0], "2 beams")["draft"]
    assert found == f"{curves.pool_perplexity(beams):.2f} {curves.format_spread(beams)}"
    assert column(tables[1], "2 beams")["draft"] == curves.compare_with_ar(beams, ar)
    prompt = small.pairs()[0][1]
    chunks = autoregressive(small.cached(small.target), prompt, sample=Sampler(1.0, 20, 0.9, 1))
    text = [x for chunk in until(chunks, 8, small.eos) for x in chunk]
    nats, tokens, _, kept_text = kept["AR 1 0"]
    assert kept_text == text and tokens == len(text)
    logits = small.target(torch.tensor([prompt + text])).logits[0, len(prompt) - 1:-1]
    p = logits.float().log_softmax(-1)[torch.arange(len(text)), text]
    assert nats == pytest.approx(-p.sum().item(), rel=1e-4)


def test_a_draft_beside_its_predictions(small, capsys, tmp_path, monkeypatch):
    """Predictions count a verification and the prompts' passes; Ouroboros is over the best γ."""
    x = {"alpha": 0.5, "c": 0.25, "verify": {2: 1.25, 4: 1.5, 8: 2}, "eq6": 2.0,
         "speculative": {2: 0.5, 4: 0.8, 8: 0.6}, "assisted": 0.4, "ouroboros": 1.2,
         "spread": dict.fromkeys((2, 4, 8, "assisted", "ouroboros"), "-"), "prompts": [0.2, 0.05]}
    monkeypatch.setattr(curves, "measure_draft", lambda *given: x)
    small.args.drafts, small.args.picture = [small.args.draft], tmp_path / "plane.svg"
    curves.table_drafts(small)
    [rows] = tables_of(capsys.readouterr().out)
    found = dict(zip(rows[0], rows[1]))
    assert found["Ouroboros / best speculative"] == "1.50"
    assert found["γ 2: predicted"] == f"{1 / (0.8 + 0.25):.2f}"  # 1.75 tokens in 1.75 calls
    assert found["predicted, Eq. 6"] == f"{1 / (0.8 / 2 + 0.25):.2f}"
    assert "draft: 0.80x" in small.args.picture.read_text()


def test_contexts_of_several_lengths(small, capsys, monkeypatch):
    seen, rng = [], random.Random(0)
    figures = {"ms": 1.0, "rows": [1.0, 2.0], "methods": {"REST": (2.0, 1.5, "[1.00, 2.00]")}}
    monkeypatch.setattr(curves, "measure_length",
                        lambda bench, pairs: seen.append(pairs) or figures)
    small.prompts = {"some": [rng.choices(range(300), k=50) for _ in range(4)]}
    curves.table_lengths(small)
    [rows] = tables_of(capsys.readouterr().out)
    own = small.prompts["some"][:2]
    assert [[len(p) for _, p in pairs] for pairs in seen] == [[60] * 2, [120] * 2]
    assert all(p[-50:] == q and q[:5] != p[:5] for pairs in seen for (_, p), q in zip(pairs, own))
    assert [row[0] for row in rows[1:]] == ["60", "120"]


@pytest.fixture
def trajectories(tmp_path, embedded, capsys):
    """A model, and the arguments of a short run of `consistency`."""
    *_, tokenizer = embedded
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=400)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    collect(model, tokenizer, [[5, x, 9] for x in range(20)], out=tmp_path / "data.jsonl", n=5,
            max_new_tokens=10)
    capsys.readouterr()
    return model, ["--target", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl"),
                   "--work", str(tmp_path / "work"), "--steps", "4", "--short", "2", "--shown",
                   "2", "--batch", "2", "--tokens", "7", "--reports", "2"]


def test_what_a_run_is_trained_on(trajectories, monkeypatch, tmp_path, capsys):
    """The ablations change what they say and nothing else; perplexity is under the model before."""
    model, argv = trajectories
    runs = []

    def fit(new, rows, held_out, eos, n, *, shown, watch, **how):
        new.load_state_dict(near(model, 0.5).state_dict())
        answers = [row["answer"] for row in shown]
        runs.append((rows, how, watch(answers)["perplexity"]))
        figures = dict(per_call=2, fast_forwarded=3, stationary=4, consistency=5, ar=6, kept=0.5)
        return {0: figures | {"perplexity": 7, "answers": answers, "each": [1.5, 2.5]}}
    monkeypatch.setattr(curves, "fit", fit)
    monkeypatch.setattr(sys, "argv", ["curves.py", "consistency", *argv])
    curves.main()
    rows, held_out = curves.read_examples(tmp_path / "data.jsonl", model, seed=0)[1:]
    assert [len(x[0]) for x in runs] == [len(rows)] * 4 + [(len(rows) + 3) // 4]
    assert [x[1]["w"] for x in runs] == [10, 10, 1, 10, 10]
    assert [(x[1]["steps"], x[1]["reports"]) for x in runs] == [(4, 2)] + [(2, 1)] * 4
    assert all(x[1]["states"] == 4 for x in runs) and all(x[0] == rows for x in runs[:3])
    assert all(len(a["blocks"]) == 1 and a["blocks"][0] in b["blocks"]
               for a, b in zip(runs[3][0], rows))
    line = "| long | 0 | 2.00 | [1.50, 2.50] | 3.00 | 4.00 | 5.000 | 6.000 | 50% | 7.00 |"
    assert line in capsys.readouterr().out
    lm, prompts = CachedLM(model), [row["prompt"] for row in held_out[:2]]
    texts = [tokens_of(autoregressive(lm, prompt), 7) for prompt in prompts]
    assert [x[2] for x in runs] == pytest.approx([curves.perplexity(lm, prompts, texts)] * 5)


def test_without_a_short_prompt_the_command_is_refused(trajectories, monkeypatch, capsys):
    _, argv = trajectories
    monkeypatch.setattr(sys, "argv", ["curves.py", "consistency", *argv, "--longest", "2"])
    with pytest.raises(SystemExit) as stop:
        curves.main()
    assert stop.value.code == 2
    assert "expected prompts of at most 2 tokens\n" in capsys.readouterr().err


def test_consistency_training_over_its_steps(trajectories, embedded, capsys, monkeypatch,
                                             tmp_path):
    model, argv = trajectories
    *_, tokenizer = embedded
    monkeypatch.setattr(sys, "argv", ["curves.py", "consistency", *argv])
    curves.main()
    curve, *answers = tables_of(capsys.readouterr().out)
    assert [(row[0], row[1]) for row in curve[1:]] == [
        *(("long", str(i)) for i in (0, 2, 4)), *((name, str(i)) for name in list(curves.RUNS)[1:]
                                                  for i in (0, 2))]
    assert all(row[8] == "100%" for row in curve[1:] if row[1] == "0")
    for row in curve[1:]:
        least, most = map(float, row[3].strip("[]").split(", "))
        assert least <= float(row[2]) <= most
    lm = CachedLM(model)
    rows = curves.read_examples(tmp_path / "data.jsonl", model, seed=0)[2][:2]
    expected = [tokens_of(autoregressive(lm, row["prompt"]), 7) for row in rows]
    assert [row[0] for row in answers[0][1:]] == [
        tokenizer.decode(x).replace("\n", " ").replace("|", "/").strip() for x in expected]
    assert (tmp_path / "work/cllm/model.safetensors").exists()
