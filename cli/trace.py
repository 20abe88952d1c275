"""Writes the page of `--trace FILE.html`, which steps through every call of a run.

No method knows that it is recorded. While a run lasts, methods of the class EngineLM are replaced:
each replacement calls the original, then writes down what happened. Afterwards the originals are
put back. They are also put back inside `once`, whose calls are no part of decoding. Slow work waits
until the round is over, when no clock runs.

An example is the round of a method that guesses 7 or 8 after the root 5:

    target.forward([5, 7, 8], [-1, 0, 0])    one call of three rows, 7 and 8 below the root
    target.commit([0, 1])                    the rows of 5 and 7 join the context
    yield [7, 11]                            7 was right, and 11 is the target's own choice

It becomes this record, an entry of the run's "rounds":

    {"chunk": [7, 11],
     "log": {"accepted": 1},           the method's own record of the round
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

README has a picture of a page, .github/trace.png. It is of ouroboros.py, by `chromium --headless
--window-size=1200,690 --screenshot=FILE.png`. The picture .github/decode.svg was drawn from such
records by results/picture.py, which is there at commit 9382b29.
"""
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Callable, Iterator
from unittest.mock import patch

import torch

from cli.text import split_text
from support.engine import EngineLM, depth_of

PAGE = Path(__file__).with_name("trace.html")
ORIGINALS = {name: getattr(EngineLM, name) for name in ("forward", "commit", "truncate", "once")}
TOLD = 16  # the first numbers of an embedding, which tell its token


class Recorder:
    """Write down the calls of all CachedLMs while a run answers a prompt."""

    def __init__(self):
        self.began = None  # when the first call began
        self.lms = {}  # lm: its number, in the order of their first call
        self.calls = []  # of the present round
        self.pending = defaultdict(dict)  # by lm, {row: its call} of rows not committed
        self.final = defaultdict(dict)  # by lm, {place in the text: its call} of committed rows

    def wrap(self, name: str) -> Callable:
        """Return what takes the place of a method of CachedLM: the method, then its note.

        A note gets the model, the method's first argument, its result, and when it began and ended.
        """
        note = getattr(self, f"note_{name}")

        def recorded(lm, given, *args, **options):
            given = given if isinstance(given, (int, torch.Tensor)) else [*given]
            began = time.perf_counter()
            result = ORIGINALS[name](lm, given, *args, **options)
            ended = time.perf_counter()
            # Before a model's first call, passes whose logits nobody reads are parts of a prompt.
            if lm in self.lms or options.get("keep") != 0:
                note(lm, given, result, began, ended)
            return result
        return recorded

    def note_forward(self, lm, ids, logits, began, ended) -> None:
        if self.began is None:
            self.began = began
        first = len(lm.parents) - len(ids)
        call = {"lm": self.lms.setdefault(lm, len(self.lms)), "parents": lm.parents[first:],
                "time": [round(1000 * (x - self.began), 3) for x in (began, ended)],
                "ids": ids, "best": logits.argmax(-1), "first": first, "kept": []}
        self.pending[lm] |= dict.fromkeys(range(first, len(lm.parents)), call)
        self.calls.append(call)

    def take_calls(self) -> list[dict]:
        """Return the calls of the round that is over, with their tokens and the likeliest ones."""
        lms = [*self.lms]
        calls, self.calls = self.calls, []
        for call in calls:
            best = call["best"].tolist()
            call["ids"] = find_tokens(lms[call["lm"]], call["ids"])
            # The first rows may have no logits.
            call["best"] = [-1] * (len(call["ids"]) - len(best)) + best
        return calls

    def note_commit(self, lm, path, *_) -> None:
        pending = self.pending.pop(lm, {})
        for place, node in enumerate(path, lm.length - len(path)):
            if node in pending:
                call = self.final[lm][place] = pending[node]
                call["kept"].append(node - call["first"])

    def note_truncate(self, lm, length, *_) -> None:
        self.pending.pop(lm, None)
        final = self.final[lm]  # in the order of their places, so the last ones go
        while final and next(reversed(final)) >= length:
            final.popitem()[1]["kept"].pop()


def call_unrecorded(*given, **options):
    """Take the place of `EngineLM.once` in a run that is recorded."""
    with patch.multiple(EngineLM, **ORIGINALS):
        return ORIGINALS["once"](*given, **options)


def embed_all(embed: torch.nn.Module) -> torch.Tensor:
    """Return the first TOLD numbers of the embeddings of all tokens [V, TOLD].

    Some families scale what the weights say, so the module is asked.
    """
    return embed(torch.arange(len(embed.weight), device=embed.weight.device))[:, :TOLD]


@torch.inference_mode()
def find_tokens(lm: EngineLM, ids) -> list[int]:
    """Return the tokens of rows.

    ids      token ids, or embeddings [n, d]: those of a token are found in the model's table, and
             those of a mask or of a hidden state are -1
    """
    if not torch.is_tensor(ids) or ids.ndim == 1:
        return [int(x) for x in ids]
    table = lm.once(embed_all, lm.model.get_input_embeddings())
    same = [(table == row).all(1).nonzero()[:, 0].tolist() for row in ids[:, :TOLD]]
    return [found[0] if found else -1 for found in same]


def watch(runs: list[dict], run, prompt: list[int],
          chunks: Iterator[list[int]]) -> Iterator[list[int]]:
    """Yield the chunks of an answer, and keep the calls that made them.

    runs    the records, which get one of this answer
    run     the `Run` that answers
    chunks  what run.decode gives for this prompt
    """
    recorder = Recorder()
    known = {lm: name for name, lm in run.models.items()}
    record = {"method": run.method.__name__, "prompt": prompt, "rounds": []}
    runs.append(record)
    logged = len(run.log)
    wrapped = {name: recorder.wrap(name) for name in ("forward", "commit", "truncate")}

    def advance() -> list[int] | None:
        # While the caller has a chunk, whose error may end all, the class is as it was.
        with patch.multiple(EngineLM, once=call_unrecorded, **wrapped):
            return next(chunks, None)
    for chunk in iter(advance, None):
        calls = recorder.take_calls()
        if not record["rounds"]:  # a round ends with a call of the model that verifies
            record["target"] = calls[-1]["lm"]
        # A model that the method made itself is called by the number of its layers.
        record["lms"] = [known.get(lm, f"{depth_of(lm.model)} layers") for lm in recorder.lms]
        log = run.log[-1] if len(run.log) > logged else {}
        record["rounds"].append({"chunk": list(chunk), "log": dict(log), "calls": calls})
        logged = len(run.log)
        yield chunk
    for step in record["rounds"]:
        trim_round(step, record["target"])


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
    """Collect the tokens of all calls, those of each model by its name.

    names   the models that have a tokenizer. Any other model reads the target's tokens
    """
    found = {name: set() for name in names}
    for run in runs:
        for step in run["rounds"]:
            for call in step["calls"]:
                name = run["lms"][call["lm"]]
                found[name if name in found else "target"].update(call["ids"] + call["best"])
    return found


def say_tokens(ids: set[int], tokenizer) -> dict[int, str]:
    """Return the text of each token, as it is in the middle of a text."""
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    start = tokenizer.decode(before)
    # The first word of a text often loses its blank, so a token is decoded after another one.
    return {token: tokenizer.decode([*before, token]).removeprefix(start)
            for token in sorted(ids - {-1})}


def make_page(runs: list[dict], tokenizers: dict) -> str:
    """Write the runs into one HTML file that needs no other: its script draws them.

    tokenizers  those of the target and of drafts by name, since a draft may have its own tokens
    """
    texts = {name: say_tokens(ids, tokenizers[name])
             for name, ids in collect_tokens(runs, [*tokenizers]).items()}
    said = []
    for run in runs:  # the pieces of all tokens, joined, are the whole text
        answer = [token for step in run["rounds"] for token in step["chunk"]]
        pieces = split_text(tokenizers["target"], run["prompt"] + answer, skip_special_tokens=False)
        said.append(run | {"said": pieces})
    data = json.dumps({"runs": said, "texts": texts}).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("DATA", data, 1)
