"""The page of `--trace` shows what was decoded, for every method, and nothing in it is ever run."""
import json
import re

import pytest
import torch

from cli.run import Run
from cli.trace import ORIGINALS, PAGE, make_page, watch
from common import autoregressive, greedy
from families import tiny
from helpers import ROOT, loaded, main, tokens_of
from support.engine import EngineLM
from sources import FILES, functions_of

TEXT = "Tom has 3 apples. He buys 4 apples. How many apples does Tom have now?"
METHODS = [method for name in FILES for method in functions_of(name)[0]]
OWN = {"cllm": ["--target", str(ROOT / "models/cllm")], "speculative": ["--compare"]}


def checked(run: dict) -> list[int]:
    """Return the output of a run, and check its record. The kept rows of the verifying model are
    the root and the output without its last token. Parents come before their rows, and
    times rise."""
    output = [token for step in run["rounds"] for token in step["chunk"]]
    calls = [call for step in run["rounds"] for call in step["calls"]]
    kept = [x["ids"][row] for x in calls if x["lm"] == run["target"] for row in x["kept"]]
    assert kept == [run["prompt"][-1], *output[:-1]]
    for call in calls:
        assert len(call["ids"]) == len(call["parents"]) == len(call["best"]) > 0
        assert all(-1 <= parent < call["first"] + i for i, parent in enumerate(call["parents"]))
        assert call["time"][0] < call["time"][1] and 0 <= call["lm"] < len(run["lms"])
    times = [x for call in calls for x in call["time"]]
    assert times == sorted(times) and times[0] >= 0
    return output


@pytest.mark.parametrize("method", METHODS, ids=[method.__name__ for method in METHODS])
def test_every_method_writes_a_page(method, tmp_path, capsys, monkeypatch, embedded):
    """The page shows the method and, with --compare, token by token too."""
    monkeypatch.setattr("support.loading.load", loaded)
    page, given = tmp_path / "x.html", OWN.get(method.__name__, [])
    argv = ["--prompt", TEXT, "--trace", str(page), "--max-new-tokens", "5", *given]
    assert main([method], lambda run: "", argv, lossy=[method]) == 0
    # The data are parsed back, as a browser's script does it.
    data = re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1]
    own, *others = json.loads(data)["runs"]
    assert own["method"] == method.__name__ and 0 < len(checked(own)) <= 5
    assert capsys.readouterr().out.strip() == embedded[2].decode(
        checked(own), skip_special_tokens=True).strip()
    assert len(others) == ("--compare" in given)
    for ar in others:  # greedy calls of one row: the likeliest token is the choice
        assert (ar["method"], ar["lms"]) == ("autoregressive", ["target"])
        best = [call["best"] for step in ar["rounds"] for call in step["calls"]]
        assert best == [[token] for token in checked(ar)]


def test_a_tree_is_what_was_forwarded():
    """The record has rows, parents, likeliest tokens and the path that was kept. Rows that
    `truncate` dropped, or that come after the last chunk, are not kept."""
    model = tiny("llama")
    whole = model(input_ids=torch.tensor([[3, 5, 7, 9, 4]])).logits[0].argmax(-1).tolist()

    def method(target, prompt, sample, log):
        target.start(prompt[:-2])
        target.forward(prompt[-2:-1], keep=0)  # a part of a prompt
        target.commit([0])
        target.forward([5, 7, 8], [-1, 0, 0])
        target.forward([9, 4], [1, 3], keep=1)  # logits of only the last row
        log.append({"accepted": 1})
        target.commit([0, 1, 3])
        target.truncate(3)
        yield [7, 11, 10]
        target.forward([11])
        target.commit([0])
        yield [12]
    run = Run(method, {"target": EngineLM(model)}, {}, set())
    records, chunks = [], []
    for chunk in watch(records, run, [3, 5], run.decode([3, 5], 4, None)):
        chunks.append(chunk)
        assert EngineLM.forward is ORIGINALS["forward"]  # an error of the caller ends it here
    assert chunks == [[7, 11, 10], [12]]
    [known] = records
    first, second = known["rounds"]
    tree, more = first["calls"]
    found = [[call[x] for x in ("ids", "parents", "first", "kept")] for call in (tree, more)]
    assert found == [[[5, 7, 8], [-1, 0, 0], 0, [0, 1]], [[9, 4], [1, 3], 3, []]]
    assert [*tree["best"][:2], more["best"]] == [*whole[1:3], [-1, whole[4]]]
    assert [call["ids"] for call in second["calls"]] == [[11]] and first["log"] == {"accepted": 1}
    assert known["lms"] == ["target"]


def test_text_is_shown_and_never_run(embedded):
    """A prompt of HTML is in the page as data only."""
    target, _, tokenizer = embedded
    prompt = tokenizer.encode("</script><img src=x onerror=alert(1)><!-- \u202e \u4e2d")
    run, records = Run(autoregressive, {"target": EngineLM(target)}, {}, set()), []
    answer = tokens_of(watch(records, run, prompt, run.decode(prompt, 3, greedy)), 3)
    written = make_page(records, {"target": tokenizer})
    script, empty = PAGE.read_text().split("DATA")
    assert written.startswith(script) and written.endswith(empty)
    inside = written[len(script):len(written) - len(empty)]
    assert "<" not in inside and inside.isascii()
    assert "".join(json.loads(inside)["runs"][0]["said"]) == tokenizer.decode(prompt + answer)
    assert "innerHTML" not in script + empty and "http" not in (script + empty).replace(
        "http://www.w3.org/2000/svg", "")


def test_a_step_of_a_long_page_takes_no_longer():
    """A step reaches no function that goes through all rounds of a run, and the text is not laid
    out anew. A browser takes only some 100,000 arguments, so no list of calls is spread into them.
    In Chromium a step of a page of 20,000 tokens then takes about as long as one of 20."""
    script = PAGE.read_text().split("<script>")[1]
    functions = dict(re.findall(r"^function (\w+)\([^)]*\) \{(.*?)\}$", script, re.M | re.S))
    assert re.findall(r"[(,] ?\.\.\.(\w+)", re.sub(r"\[\.\.\.", "", script)) == ["Object"]

    def list_reached(name: str) -> set[str]:
        called = {x for x in functions if x != name and re.search(rf"\b{x}\(", functions[name])}
        return {name}.union(*map(list_reached, called))
    step = list_reached("go")
    assert {"draw", "drawText", "drawRound", "drawTree", "drawHere"} <= step
    assert [x for x in step if re.search(r"rounds(\.(?!length)|\))", functions[x])] == []
    assert {"layText", "drawLanes"} <= list_reached("choose") - step
