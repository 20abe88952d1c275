"""Writes the page of `--trace FILE.html`, which steps through every call of a run.

No method knows that it is recorded. While a run lasts, four methods of the class CachedLM (PATCHED)
are replaced: each replacement calls the original, then writes down what happened. Afterwards the
originals are put back. The recording's own time is in no call's time, and counts as set-up.

An example is the round of a method that guesses 7 or 8 after the root 5:

    target.forward([5, 7, 8], [-1, 0, 0])    one call of three rows, 7 and 8 below the root
    target.commit([0, 1])                    the rows of 5 and 7 join the context
    yield [7, 11]                            7 was right, and 11 is the target's own choice

It becomes this record, an entry of the run's "rounds":

    {"chunk": [7, 11],
     "log": {"accepted": 1},           the method's own record of the round
     "seconds": 0.0041,                of the round, without the pass over the prompt
     "calls": [{
         "lm": 0,                      which model, a place in the run's "lms"
         "time": [12.1, 15.3],         milliseconds since the first call
         "ids": [5, 7, 8],             the token of each row; -1 is no token, but a trained vector
         "parents": [-1, 0, 0],        the row above each row; -1 is the end of the text
         "first": 0,                   the number of the first row among all rows not committed yet
         "best": [7, 11, 4],           the likeliest token after each row
         "kept": [0, 1]}]}             which rows became final

A draft of two tokens takes two calls before anything is committed. The row of the second call has
number 1 there, so its "first" is 1, and commit([0, 1]) puts a 0 into "kept" of both calls. If the
draft is then truncated by one token, the newest kept row is taken back: the second call loses it.

A run is {"method", "prompt", "lms", "target", "rounds"}: token ids of the prompt, the models'
names, and which of them verifies.
"""
import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch

from cli.costs import describe, write_panel
from cli.text import split_text
from common import CachedLM
from survey.clock import WIDTHS, time_calls

PAGE = Path(__file__).with_name("trace.html")
PATCHED = ("start", "forward", "commit", "truncate")


class Recorder:
    """Write down the calls of all CachedLMs."""

    def __init__(self):
        self.originals = {name: getattr(CachedLM, name) for name in PATCHED}
        self.spent = 0.0  # seconds that the recording itself took
        self.forget(None)

    def forget(self, target: CachedLM | None) -> None:
        """Begin another run; the time that recording takes is set-up of its target."""
        self.target = target
        self.began = None  # when the first call began
        self.prompts = 0.0  # seconds that passes over the prompt took
        self.lms = []  # models in the order of their first call
        self.calls = []  # of the present round
        self.waiting = {}  # lm: calls whose rows are not committed
        self.final = {}  # lm: (call, place in the text) of each committed row, the newest last
        self.tables = {}  # of a model: the embeddings of all tokens

    @contextmanager
    def patch(self):
        """Record all CachedLMs inside a `with`."""
        for name in PATCHED:
            setattr(CachedLM, name, self.wrap(name))
        try:
            yield
        finally:
            for name, original in self.originals.items():
                setattr(CachedLM, name, original)

    def wrap(self, name: str):
        """Return what takes the place of a method of CachedLM: the method, then its note."""
        original, note = self.originals[name], getattr(self, f"note_{name}")

        def recorded(lm, *args, **options):
            if name == "commit":
                args = [list(args[0])]  # a path may be an iterator, and is read twice
            length, pending = lm.length, len(lm.parents)
            began = time.perf_counter()
            result = original(lm, *args, **options)
            ended = time.perf_counter()
            if options.get("counts", True):  # else a part of a prompt, or a call of the clock
                note(lm, args, result, length, pending, (began, ended))
                self.add_spent(time.perf_counter() - ended)
            return result
        return recorded

    def add_spent(self, seconds: float) -> None:
        """Count seconds of the recording, which are no part of decoding."""
        self.spent += seconds
        if self.target is not None:
            self.target.setup_seconds += seconds

    # Each note gets the model, the arguments and the result of the method, the length of the
    # context and the number of pending nodes before it, and when it began and ended.

    def note_start(self, lm, args, result, length, pending, times) -> None:
        if lm not in self.lms:
            self.lms.append(lm)
        self.waiting[lm], self.final[lm] = [], []
        self.prompts += times[1] - times[0]

    def note_forward(self, lm, args, logits, length, pending, times) -> None:
        if lm not in self.lms:  # a model that goes on from another one's cache is never started
            self.lms.append(lm)
        if self.began is None:
            self.began = times[0] - self.spent
        ids = self.find_tokens(lm, args[0])
        best = logits.argmax(-1).tolist()
        best = [-1] * (len(ids) - len(best)) + best  # the first rows may have no logits
        call = {"lm": self.lms.index(lm), "ids": ids, "first": pending,
                "time": [round(1000 * (x - self.began - self.spent), 3) for x in times],
                "parents": lm.parents[pending:], "best": best, "kept": []}
        self.waiting.setdefault(lm, []).append(call)
        self.calls.append(call)

    def note_commit(self, lm, args, result, length, pending, times) -> None:
        for place, node in enumerate(args[0], length):
            for call in self.waiting.get(lm, []):
                row = node - call["first"]
                if 0 <= row < len(call["ids"]):
                    call["kept"].append(row)
                    self.final.setdefault(lm, []).append((call, place))
        self.waiting[lm] = []

    def note_truncate(self, lm, args, result, length, pending, times) -> None:
        final = self.final.get(lm, [])
        while final and final[-1][1] >= args[0]:
            call, _ = final.pop()
            call["kept"].pop()
        self.waiting[lm] = []

    def find_tokens(self, lm: CachedLM, ids) -> list[int]:
        """Return the tokens of rows.

        ids      token ids, or embeddings [n, d]: those of a token are found in the model's table,
                 and those of a mask or of a hidden state are -1
        """
        if not torch.is_tensor(ids) or ids.ndim == 1:
            return [int(x) for x in ids]
        embed = lm.model.get_input_embeddings()
        if embed not in self.tables:
            with torch.inference_mode():
                every = torch.arange(len(embed.weight), device=embed.weight.device)
                self.tables[embed] = embed(every)  # some families scale what the weights say
        table, found = self.tables[embed], []
        for row in ids:
            near = (table[:, :4] == row[:4]).all(1).nonzero()[:, 0]  # whole rows take long
            same = [i for i in near.tolist() if torch.equal(table[i], row)]
            found.append(same[0] if same else -1)
        return found


class Trace:
    """Hold the runs of a command, each with its calls."""

    def __init__(self):
        self.recorder = Recorder()
        self.runs = []
        self.verifier = None  # the model that verified in the method's runs
        self.table = []  # (rows, seconds) of its calls, which are timed in the end

    def watch(self, run, prompt: list[int], chunks: Iterator[list[int]]) -> Iterator[list[int]]:
        """Yield the chunks of an answer, and keep the calls that made them.

        run     the `Run` that answers
        chunks  what run.decode gives for this prompt
        """
        recorder = self.recorder
        recorder.forget(run.models["target"])
        rounds, verifies = [], None
        logged, spent = len(run.log), run.seconds
        record = {"method": run.method.__name__, "prompt": prompt, "rounds": rounds}
        self.runs.append(record)
        with recorder.patch():
            for chunk in chunks:
                calls, recorder.calls = recorder.calls, []
                if verifies is None:  # a round ends with a call of the model that verifies
                    verifies = calls[-1]["lm"]
                    if record["method"] != "autoregressive":
                        self.verifier = recorder.lms[verifies]
                log = run.log[-1] if len(run.log) > logged else {}
                logged = len(run.log)
                took = run.seconds - spent - recorder.prompts
                spent, recorder.prompts = run.seconds, 0.0
                rounds.append({"chunk": list(chunk), "log": dict(log), "calls": calls,
                               "seconds": took})
                record |= {"lms": self.name_models(run.models), "target": verifies}
                yield chunk
        for step in rounds:
            trim_round(step, verifies)

    def time_calls(self) -> None:
        """Time calls of the model that verified, up to the widest that was recorded."""
        widest = max((len(call["ids"]) for run in self.runs for step in run["rounds"]
                      for call in step["calls"] if call["lm"] == run["target"]), default=0)
        if self.verifier:
            self.table = time_calls(self.verifier, min(widest, WIDTHS[-1]))

    def describe_costs(self) -> list[dict]:
        """Collect what the panel of costs shows: the method that was compared with AR, if any.

        returns   a list of one entry, or of none where no call was timed
        """
        ar = [run for run in self.runs if run["method"] == "autoregressive" and run["rounds"]]
        own = [run for run in self.runs if run["method"] != "autoregressive" and run["rounds"]]
        if not self.table or not own:
            return []
        return [describe(own[0]["method"], own, self.table, ar)]

    def name_models(self, models: dict[str, CachedLM]) -> list[str]:
        """Return the names of all recorded models.

        models   the run's models by name. A model that a method made itself is called by the number
                 of its layers
        """
        known = {id(lm): name for name, lm in models.items()}
        names = []
        for lm in self.recorder.lms:
            layers = lm.model.config.get_text_config().num_hidden_layers
            names.append(known.get(id(lm), f"{layers} layers"))
        return names


def trim_round(step: dict, target: int) -> None:
    """Fit a round's calls to the answer, in place.

    Kept rows beyond the answer's end go. If the verifying model was given hidden states, its rows
    have no tokens: they are the tokens that the drafting calls were given.

    step    a record of "rounds"
    target  the number of the verifying model
    """
    left = len(step["chunk"])
    drafted = [x for call in step["calls"] if call["lm"] != target for x in call["ids"]]
    for call in step["calls"]:
        if call["lm"] == target:
            del call["kept"][left:]
            left -= len(call["kept"])
            if len(drafted) == len(call["ids"]) and set(call["ids"]) == {-1}:
                call["ids"] = drafted


# ------------------------------------------------------------------------------------ the page

def collect_tokens(runs: list[dict], names: list[str]) -> dict[str, set[int]]:
    """Collect the tokens that the page shows, those of each model by its name.

    names   the models that have a tokenizer. Any other model reads the target's tokens
    """
    found = {name: set() for name in names}
    for run in runs:
        found["target"].update(run["prompt"])
        for step in run["rounds"]:
            found["target"].update(step["chunk"])
            for call in step["calls"]:
                name = run["lms"][call["lm"]]
                found[name if name in found else "target"].update(call["ids"] + call["best"])
    return found


def say_tokens(ids: set[int], tokenizer) -> dict[int, str]:
    """Return the text of each token, as it is in the middle of a text."""
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    start = tokenizer.decode(before)
    said = {}
    for token in sorted(ids - {-1}):
        both = tokenizer.decode([*before, token])
        # the first word of a text often loses its blank, so a token is decoded after another one
        said[token] = both[len(start):] if both.startswith(start) else tokenizer.decode([token])
    return said


def say_text(run: dict, tokenizer) -> list[str]:
    """Return a piece of text for each token of the prompt and of the answer.

    The pieces joined are the whole text.
    """
    answer = [token for step in run["rounds"] for token in step["chunk"]]
    return split_text(tokenizer, run["prompt"] + answer, skip_special_tokens=False)


def make_page(runs: list[dict], tokenizers: dict, costs: list[dict] = ()) -> str:
    """Write the runs into one HTML file that needs no other: its script draws them.

    tokenizers  those of the target and of drafts by name, since a draft may have its own tokens
    costs       what the panel of costs shows, as `describe` of costs.py returns it; without any the
                page has no panel
    """
    said = [run | {"said": say_text(run, tokenizers["target"])} for run in runs]
    texts = {name: say_tokens(ids, tokenizers[name])
             for name, ids in collect_tokens(runs, [*tokenizers]).items()}
    data = json.dumps({"runs": said, "texts": texts}, ensure_ascii=True)
    page = PAGE.read_text(encoding="utf-8").replace("DATA", data.replace("<", "\\u003c"), 1)
    panel = write_panel(costs) if costs else ""
    return page.replace("<noscript>", f"{panel}<noscript>", 1)
