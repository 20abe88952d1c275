"""Runs one method on one prompt after another, and keeps what it wrote and what that took."""
import time
from os.path import commonprefix
from statistics import mean
from typing import Iterator

from common import Sampler, greedy, until
from support.engine import EngineLM


def kind_for(method, run_as: type[EngineLM], name: str = "target") -> type[EngineLM]:
    """Return the kind of CachedLM that a model of a method runs as.

    method   the method. bita.py, for one, asks for a target of its own kind, a PrefixLM
    run_as   what any model runs as
    name     "target", "draft", "draft 2", …
    returns  `run_as`, with all that the method's own kind adds
    """
    own = method.__annotations__.get(name, run_as)
    return run_as if issubclass(run_as, own) else type(own.__name__, (own, run_as), {})


def count_guesses(run) -> str:
    """Say in a line what the rounds of a run were like on average, and count the draft calls.

    run   the run. A record of its log has "guessed", "accepted", and "layers" where a model drafts
          with some of its own: how many of them ran one after the other
    """
    guesses, accepted = (mean(record[x] for record in run.log) for x in ("guessed", "accepted"))
    said = f"a round: {guesses:.1f} guesses, {accepted:.2f} accepted"
    if "layers" in run.log[0]:
        layers = sum(record["layers"] for record in run.log) / run.tokens
        said += f"; {layers:.1f} layers run a token"
    drafts = [*run.models.values()][1:]
    if drafts:
        said += f"; {sum(draft.calls for draft in drafts)} draft calls"
    return said


class Run:
    """Runs a method and keeps what it did.

    method   a function that yields chunks, as each method file has one
    models   the models that it takes, by the names "target", "draft", "draft 2", …
    options  its other keyword arguments, among them all drafts but the first
    eos      the tokens that end an answer

    After decoding, a run has these:

    prompts  token ids of each prompt
    outputs  token ids of each answer
    tokens   the number of tokens of all answers
    log      the method's records, one of each round
    seconds  the time of decoding, all but the set-up: the reading of files
    sample   the Sampler of the newest answer
    """

    def __init__(self, method, models: dict[str, EngineLM], options: dict, eos: set[int]):
        self.method = method
        self.models = models
        self.options = options
        self.eos = eos
        self.prompts, self.outputs, self.log = [], [], []
        self.tokens = 0
        self.seconds = 0.0
        self.sample = greedy

    def decode(self, prompt: list[int], limit: int, sample: Sampler) -> Iterator[list[int]]:
        """Yield the chunks of an answer to one more prompt, up to its end or to `limit` tokens.

        The time that the caller takes between two chunks is not counted.
        """
        self.prompts.append(prompt)
        self.sample = sample
        self.outputs.append([])
        models = [self.models[name] for name in ("target", "draft") if name in self.models]
        chunks = self.method(*models, prompt=prompt, sample=sample, log=self.log, **self.options)
        began = self.read_clock()
        for chunk in until(chunks, limit, self.eos):
            # A whole chunk has one token more than were accepted. If the end of the answer cut a
            # chunk, only tokens that are left of it count as accepted.
            if self.log and self.log[-1].get("accepted", -1) >= len(chunk):
                self.log[-1] |= {"accepted": len(chunk), "cut": True}
            self.seconds += self.read_clock() - began
            self.outputs[-1] += chunk
            self.tokens += len(chunk)
            yield chunk
            began = self.read_clock()

    @property
    def setup(self) -> float:
        """Return the seconds that all models have spent on what is prepared once."""
        return sum(lm.setup_seconds for lm in self.models.values())

    def read_clock(self) -> float:
        """Return the time in seconds of a clock that stands still while something is prepared."""
        return time.perf_counter() - self.setup

    def __str__(self) -> str:
        """Say in one line how fast the run was, and which model took how much of the time."""
        calls = self.models["target"].calls
        shares = [f"{name} {sum(seconds for *_, seconds in lm.passes) / self.seconds:.0%}"
                  for name, lm in self.models.items()]
        setup = f"; set-up {self.setup:.1f} s" if self.setup else ""
        return (f"{self.method.__name__}: {self.tokens} tokens in {self.seconds:.2f} s "
                f"({self.tokens / self.seconds:.1f} tokens/s), {calls} target calls "
                f"({self.tokens / calls:.2f} tokens per call); of the time {', '.join(shares)}"
                f"{setup}")

    def find_difference(self, ar: "Run") -> str:
        """Compare all outputs with those of a token-by-token run of the same prompts.

        ar       the token-by-token run
        returns  where the first output differs, with the target's two largest scores there: logits,
                 or p / E of `Sampler.race`. If they are nearly equal, rounding chose. An empty text
                 if no output differs
        """
        for prompt, ours, theirs in zip(self.prompts, self.outputs, ar.outputs):
            if ours == theirs:
                continue
            n = len(commonprefix([ours, theirs]))
            *context, root = prompt + theirs[:n]
            target = ar.models["target"]
            target.start(context)
            scores = self.sample.race(target.forward([root]), target.places)
            first, second = scores.topk(2).values[0].tolist()
            return f"output differs at token {n + 1}: largest scores {first:.5g}, {second:.5g}"
        return ""
