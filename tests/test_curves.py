"""curves.py: what was measured is kept, mixtures of models, predictions, and that its tables are
of what they say."""
import json
import random
import sys
import xml.etree.ElementTree as xml

import pytest
import torch

import curves
from cllm import collect
from common import CachedLM, InputError, Sampler, autoregressive, until
from conftest import near, tiny, tokens_of
from speculative import speculative
from test_bench import column, made, models, tables_of  # noqa: F401  (models: a fixture)


def test_what_was_measured_is_kept(tmp_path):
    """Once for each name; not for other settings; a line that was cut off is measured again."""
    made = []

    def make(x):
        return lambda: made.append(x) or {"value": (x, 2)}
    kept = curves.Kept(tmp_path, "table", "settings")
    assert kept("a", make(1)) == kept("a", make(3)) == {"value": [1, 2]}
    kept("b", make(4))
    [file] = tmp_path.iterdir()
    file.write_text(file.read_text()[:-3])
    kept = curves.Kept(tmp_path, "table", "settings")
    assert kept("a", make(5)) == {"value": [1, 2]} and kept("b", make(6)) == {"value": [6, 2]}
    assert curves.Kept(tmp_path, "table", "settings").known == kept.known
    assert curves.Kept(tmp_path, "table", "others")("a", make(7)) == {"value": [7, 2]}
    assert made == [1, 4, 6, 7]


# ------------------------------------------------------------------------------------- mixtures

def test_a_mixture_is_between_its_models():
    """Its distribution, over what was committed and over pending trees; as cached as both."""
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


def test_the_target_as_its_own_draft_is_always_right():
    model, log = tiny("llama"), []
    mixed = curves.Mixture(CachedLM(near(model, 0.1)), CachedLM(model), 1.0)
    tokens_of(speculative(CachedLM(model), mixed, [3, 14], gamma=3, log=log), 20)
    assert {record["accepted"] for record in log} == {3}
    prompts, texts = [[3, 14]], [tokens_of(autoregressive(CachedLM(model), [3, 14]), 20)]
    assert curves.agree(CachedLM(model), mixed, prompts, texts) == pytest.approx(1, abs=1e-4)
    far = CachedLM(near(model, 0.3))
    assert curves.agree(CachedLM(model), far, prompts, texts) < 0.99


# ---------------------------------------------------------------------------------- predictions

def test_predictions():
    assert curves.expected(0.5, 2) == 1.75 and curves.expected(1, 4) == 5
    assert curves.predicted(0.5, 0.25, 2) == pytest.approx(1.75 / 1.5)
    assert curves.predicted(0.5, 0.25, 2, verify=1.25) == 1
    for alpha in (0.05, 0.6, 0.97):
        assert curves.alpha_of(curves.expected(alpha, 7), 7) == pytest.approx(alpha, abs=1e-4)


def test_the_plane_is_a_picture_with_all_points():
    root = xml.fromstring(curves.plane({"four layers": (0.43, 0.2, 0.9), "eight": (0.6, 0.3, 1)}))
    space = "{http://www.w3.org/2000/svg}"
    texts = [x.text for x in root.iter(space + "text")]
    assert {"four layers: 0.90x", "eight: 1.00x", "HumanEval", "1.5x", "acceptance α"} <= {*texts}
    assert len([*root.iter(space + "circle")]) == 2 + len(curves.PAPER)
    lines = [x.get("points").split() for x in root.iter(space + "polyline")]
    assert len(lines) == 4
    for speed, line in zip((1, 1.5, 2, 3), lines):
        x, y = map(float, line[len(line) // 2].split(","))
        alpha, c = (x - 60) / 560, (380 - y) / 360
        best = max(curves.predicted(alpha, c, g) for g in range(1, 17))
        assert best == pytest.approx(speed, rel=0.02)


def test_ratios_are_of_the_same_prompts_and_seeds():
    ar = [[[10.0, 5, 0, []], [3.0, 5, 0, []]], [[8.0, 5, 0, []], [5.0, 5, 0, []]]]
    half = [[[x[0] / 2, *x[1:]] for x in some] for some in ar]
    assert curves.pooled(ar) == pytest.approx(2.718281828 ** 1.3)
    text = curves.beside(half, ar)
    assert text.startswith("1.92 [1.92, 1.92], 0.52 [")
    assert curves.beside(ar, ar).endswith("1.00 [1.00, 1.00]")


# --------------------------------------------------------------------------------------- tables

@pytest.fixture
def small(models, tmp_path):  # noqa: F811
    """Two prompts, a few tokens."""
    bench = made(*models, "--max-new-tokens", "8", "--rounds", "1")
    bench.prompts.pop("code")
    for name, value in dict(work=tmp_path, drafts=[], picture=None, shares=[0, 1], beams=[1, 2],
                            seeds=[0, 1], lengths=[60, 120], few=2).items():
        setattr(bench.args, name, value)
    return bench


def test_perplexity_by_the_draft(small, capsys, monkeypatch):
    small.args.drafts = [small.args.draft]
    curves.table_perplexity(small)
    first = capsys.readouterr().out
    [rows] = tables_of(first)
    assert [row[0] for row in rows[1:]] == ["a = 0", "a = 1", "draft"]
    assert column(rows, "1 - TVD")["a = 1"] == "1.00"
    assert column(rows, "1 beams: accepted")["a = 1"] == "4.00"
    # The mixture without a share of the target's is the draft
    same = [[cell for head, cell in zip(rows[0][1:], row[1:])] for row in rows[1:]]
    assert same[0] == same[2]
    monkeypatch.setattr(curves, "mjsd", None)
    monkeypatch.setattr(curves, "perplexity", None)
    curves.table_perplexity(small)  # nothing is decoded a second time
    assert capsys.readouterr().out == first
    kept = [json.loads(line) for file in small.args.work.iterdir()
            for line in file.read_text().split("\n")[:-1]]
    found = {name: value for name, value in kept}
    prompt = small.pairs()[0][1]
    chunks = autoregressive(small.cached(small.target), prompt, sample=Sampler(1.0, 20, 0.9, 1))
    text = [x for chunk in until(chunks, 8, small.eos) for x in chunk]
    nats, tokens, _, kept_text = found["AR 1 0"]
    assert kept_text == text and tokens == len(text)
    logits = small.target(torch.tensor([prompt + text])).logits[0, len(prompt) - 1:-1]
    p = logits.float().log_softmax(-1)[torch.arange(len(text)), text]
    assert nats == pytest.approx(-p.sum().item(), rel=1e-4)


def test_drafts_of_several_sizes(small, capsys, tmp_path):
    small.args.drafts = [small.args.draft, small.args.target]
    small.args.picture = tmp_path / "plane.svg"
    curves.table_drafts(small)
    [rows] = tables_of(capsys.readouterr().out)
    assert [row[0] for row in rows[1:]] == ["draft", "target"]
    assert column(rows, "agrees (α)")["target"] == "1.00"
    assert float(column(rows, "agrees (α)")["draft"]) < 1
    assert all(float(x.split()[0]) > 0 for row in rows[1:] for x in row[1:])
    assert "target: " in (tmp_path / "plane.svg").read_text()


def test_contexts_of_several_lengths(small, capsys, monkeypatch):
    seen = []
    real = curves.at_length
    monkeypatch.setattr(curves, "at_length", lambda bench, pairs: seen.append(pairs) or real(
        bench, pairs))
    rng = random.Random(0)
    small.prompts = {"some": [rng.choices(range(300), k=50) for _ in range(4)]}
    curves.table_lengths(small)
    [rows] = tables_of(capsys.readouterr().out[-2000:].partition("\n\n")[2])
    own = small.prompts["some"][:2]
    assert [[len(p) for _, p in pairs] for pairs in seen] == [[60] * 2, [120] * 2]
    assert all(p[-50:] == q and q[:5] != p[:5] for pairs in seen for (_, p), q in zip(pairs, own))
    assert {row[0] for row in rows[1:]} == {"60", "120"}
    for *_, ratio, spread in rows[1:]:
        least, most = map(float, spread.strip("[]").split(", "))
        assert least <= float(ratio) <= most
    small.args.lengths = [60, 400]
    with pytest.raises(InputError, match="of 400 tokens in all"):
        curves.table_lengths(small)


def test_consistency_training_over_its_steps(tmp_path, embedded, capsys, monkeypatch):
    *_, tokenizer = embedded
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=400)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    collect(model, tokenizer, [[5, x, 9] for x in range(20)], out=tmp_path / "data.jsonl", n=5,
            max_new_tokens=10)
    argv = ["--target", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl"), "--work",
            str(tmp_path / "work"), "--steps", "4", "--short", "2", "--shown", "2", "--batch", "2",
            "--tokens", "7", "--reports", "2"]
    monkeypatch.setattr(sys, "argv", ["curves.py", "consistency", *argv])
    capsys.readouterr()
    curves.main()
    first = capsys.readouterr().out
    curve, *answers = tables_of(first)
    assert [(row[0], row[1]) for row in curve[1:]] == [
        *(("long", str(i)) for i in (0, 2, 4)), *((name, str(i)) for name in list(curves.RUNS)[1:]
                                                  for i in (0, 2))]
    assert len({tuple(row[1:]) for row in curve[1:] if row[1] == "0"}) <= 3
    assert all(row[8] == "100%" for row in curve[1:] if row[1] == "0")
    lm = CachedLM(model)
    for row in curve[1:]:
        least, most = map(float, row[3].strip("[]").split(", "))
        assert least <= float(row[2]) <= most
    rows = curves.training_rows(tmp_path / "data.jsonl", model, seed=0)[2][:2]
    expected = [tokens_of(autoregressive(lm, row["prompt"]), 7) for row in rows]
    assert [row[0] for row in answers[0][1:]] == [
        tokenizer.decode(x).replace("\n", " ").replace("|", "/").strip() for x in expected]
    assert len(answers) == len(curves.RUNS) and all(len(rows) == 3 for rows in answers)
    assert (tmp_path / "work/cllm/model.safetensors").exists()
    curves.main()  # a run that is done is shown again
    assert capsys.readouterr().out.partition("\n| ")[2] == first.partition("\n| ")[2]
