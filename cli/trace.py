"""`--trace FILE.html`: what every call of a run did, as a page that can be stepped through.

While a trace is being recorded, the passes of all CachedLMs, drafts too, are kept with their times;
no method knows of it. What the recording takes is not in those times, and counts as set-up.

A run is {"method", "prompt", "lms", "target", "rounds"}: token ids of the prompt, what the models
are called, which of them verifies, and for each chunk

    {"chunk": token ids, "log": the method's record, "calls": [{
        "lm", "time": [from, to] in milliseconds since the prompt was read,
        "ids": of its rows, -1 for what is no token, "parents": earlier rows, -1 the text's end,
        "first": the number of its first row among those that wait for a commit,
        "best": the likeliest token after each row, "kept": rows that became final}]}
"""
import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch

from cli.text import split_text
from common import CachedLM

PAGE = Path(__file__).with_name("trace.html")
PATCHED = ("start", "forward", "commit", "truncate")


class Recorded:
    """What the CachedLMs do between `begin` and the end of a run."""

    def __init__(self):
        self.own = {name: getattr(CachedLM, name) for name in PATCHED}
        self.spent = 0.0  # seconds that the recording itself took
        self.begin(None)

    def begin(self, target: CachedLM | None) -> None:
        self.target = target
        self.began = None  # the first call's time
        self.lms, self.calls = [], []
        self.waiting = {}  # lm: calls whose rows are not committed
        self.final = {}  # lm: [(call, row, its place in the text)]
        self.tables = {}  # of a model: all its embeddings

    @contextmanager
    def on(self):
        """All CachedLMs are recorded."""
        for name in PATCHED:
            setattr(CachedLM, name, self.wrapped(name))
        try:
            yield
        finally:
            for name, method in self.own.items():
                setattr(CachedLM, name, method)

    def wrapped(self, name: str):
        def method(lm, *args, **options):
            before = lm.length, len(lm.parents)
            began = time.perf_counter()
            result = self.own[name](lm, *args, **options)
            ended = time.perf_counter()
            if name != "forward" or options.get("counts", True):
                getattr(self, f"after_{name}")(lm, before, result, began, ended, *args)
                spent = time.perf_counter() - ended
                self.spent += spent
                if self.target is not None:
                    self.target.setup_seconds += spent
            return result
        return method

    def after_start(self, lm, before, result, began, ended, *args) -> None:
        if lm not in self.lms:
            self.lms.append(lm)
        self.waiting[lm], self.final[lm] = [], []

    def after_forward(self, lm, before, logits, began, ended, ids, parents=None, *_) -> None:
        if lm not in self.lms:  # one that begins with another's cache
            self.lms.append(lm)
        if self.began is None:
            self.began = began - self.spent
        first, n = before[1], len(ids)
        best = logits.argmax(-1).tolist()
        call = {"lm": self.lms.index(lm), "ids": self.tokens(lm, ids), "first": first,
                "time": [round(1000 * (x - self.began - self.spent), 3) for x in (began, ended)],
                "parents": lm.parents[first:], "best": [-1] * (n - len(best)) + best, "kept": []}
        self.waiting.setdefault(lm, []).append(call)
        self.calls.append(call)

    def after_commit(self, lm, before, result, began, ended, path) -> None:
        for place, node in enumerate(path if isinstance(path, (list, range)) else [], before[0]):
            for call in self.waiting.get(lm, []):
                if 0 <= node - call["first"] < len(call["ids"]):
                    call["kept"].append(node - call["first"])
                    self.final.setdefault(lm, []).append((call, place))
        self.waiting[lm] = []

    def after_truncate(self, lm, before, result, began, ended, length) -> None:
        final = self.final.get(lm, [])
        while final and final[-1][1] >= length:
            final.pop()[0]["kept"].pop()
        self.waiting[lm] = []

    def tokens(self, lm: CachedLM, ids) -> list[int]:
        """Of rows that are given as embeddings those that are tokens'."""
        if not torch.is_tensor(ids) or ids.ndim == 1:
            return [int(x) for x in ids]
        embed = lm.model.get_input_embeddings()
        if embed not in self.tables:
            with torch.inference_mode():
                every = torch.arange(len(embed.weight), device=embed.weight.device)
                self.tables[embed] = embed(every)
        table, found = self.tables[embed], []
        for row in ids:
            near = (table[:, :4] == row[:4]).all(1).nonzero()[:, 0]
            same = [i for i in near.tolist() if torch.equal(table[i], row)]
            found.append(same[0] if same else -1)
        return found


class Trace:
    """The runs of a command, each with its calls."""

    def __init__(self):
        self.recorded = Recorded()
        self.runs = []

    def watch(self, run, prompt: list[int], chunks: Iterator[list[int]]) -> Iterator[list[int]]:
        """The chunks of a `Run`, whose calls are kept on the way."""
        recorded, models = self.recorded, run.models
        recorded.begin(models["target"])
        rounds, verifies = [], None
        logged = len(run.log)
        known = {"method": run.method.__name__, "prompt": prompt, "rounds": rounds}
        self.runs.append(known)
        with recorded.on():
            for chunk in chunks:
                calls, recorded.calls = recorded.calls, []
                verifies = calls[-1]["lm"] if verifies is None else verifies
                log = run.log[-1] if len(run.log) > logged else {}
                logged = len(run.log)
                rounds.append({"chunk": list(chunk), "log": dict(log), "calls": calls})
                known |= {"lms": self.names(models), "target": verifies}
                yield chunk
        for step in rounds:
            fit(step, verifies)

    def names(self, models: dict[str, CachedLM]) -> list[str]:
        known = {id(lm): name for name, lm in models.items()}
        return [known.get(id(lm)) or f"{lm.model.config.get_text_config().num_hidden_layers} layers"
                for lm in self.recorded.lms]


def fit(step: dict, target: int) -> None:
    """Of a round only what the output has is kept; rows that the verifying model was given as
    hidden states are the tokens of the drafting calls."""
    left = len(step["chunk"])
    drafted = [x for call in step["calls"] if call["lm"] != target for x in call["ids"]]
    for call in step["calls"]:
        if call["lm"] == target:
            del call["kept"][left:]
            left -= len(call["kept"])
            if len(drafted) == len(call["ids"]) and set(call["ids"]) == {-1}:
                call["ids"] = drafted


# ------------------------------------------------------------------------------------ the page

def say_tokens(runs: list[dict], tokenizer) -> dict[int, str]:
    """Return the text of each token that occurs in a tree, as it is in the middle of a text."""
    ids = {token for run in runs for step in run["rounds"] for call in step["calls"]
           for token in call["ids"] + call["best"]}
    ids |= {token for run in runs for step in run["rounds"] for token in step["chunk"]}
    ids |= {token for run in runs for token in run["prompt"]}
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    start = tokenizer.decode(before)
    said = {}
    for token in sorted(ids - {-1}):
        both = tokenizer.decode([*before, token])
        # the first word of a text often loses its blank, so a token is decoded after another one
        said[token] = both[len(start):] if both.startswith(start) else tokenizer.decode([token])
    return said


def say_text(run: dict, tokenizer) -> list[str]:
    """Return a piece of text for each token of the prompt and of the answer; together the text."""
    answer = [token for step in run["rounds"] for token in step["chunk"]]
    return split_text(tokenizer, run["prompt"] + answer, skip_special_tokens=False)


def page(runs: list[dict], tokenizer) -> str:
    """One HTML file that needs no other: its script draws the data that stands in it."""
    said = [run | {"said": say_text(run, tokenizer)} for run in runs]
    data = json.dumps({"runs": said, "texts": say_tokens(runs, tokenizer)}, ensure_ascii=True)
    return PAGE.read_text(encoding="utf-8").replace("DATA", data.replace("<", "\\u003c"), 1)
