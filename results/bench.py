"""Measure every method and transformers' own `generate` on the same prompts in one run.

    make bench                            # the embedded models on held-out prompts of each task
    python results/bench.py --target DIR --draft DIR --adapters FOLDER --prompts FILE --chat

The figures are printed as Markdown tables. Each round gives every prompt to every method, one
method after another, so that a noisy machine slows all methods alike. A ratio is taken within a
round, and the median over the rounds is shown. Prompts whose AR output loops are left out and
counted, since a model in a loop accepts every guess. All rows warm up with a few prompts. So a
method that learns from its calls has learned already, and graphs are captured.

A line of the tables is a command line without `python`: a method and its options. ALL has the usual
ones. --only and --row replace them: then AR runs, and what they name. A new method file is found by
itself, and needs a line in ALL. A new kind of figure is a cell in `make_line`. The rows of a call
are the tokens that it has. The realised share is the speed-up divided by the tokens per call: 100%
if a call cost what one of AR costs.

FILE holds a prompt a line. A line may also be JSON. Its prompt is its "prompt", or else its
"question", or else the first of its "turns". It may have a "category", which gets a column.
"""
import argparse
import functools
import importlib
import inspect
import json
import shlex
import sys
import time
import timeit
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Callable, NamedTuple

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED = str(ROOT / "models/target")
sys.path.insert(0, str(ROOT))
from cli.__main__ import list_files  # noqa: E402  (the path is set above)
from cli.main import Table, run_script  # noqa: E402
from cli.options import (MODELS, make_sampler, parse_decoding, read_options,  # noqa: E402
                         select_options)
from cli.prompts import encode_prompts, read_rows  # noqa: E402
from cli.run import Run, kind_for  # noqa: E402
from cli.text import Parser  # noqa: E402
from common import InputError, Sampler, autoregressive, context_length, eos_ids  # noqa: E402
from hybrid.hybrid import GUESSES  # noqa: E402
from models import tasks  # noqa: E402
from support.engine import EngineLM, depth_of, require, vocab_size  # noqa: E402
from support.graphs import GraphedLM  # noqa: E402
from support.invariant import make_invariant  # noqa: E402
from support.loading import check, load_checked  # noqa: E402
from support.packed import is_packed, pack  # noqa: E402
from training.texts import answer_all  # noqa: E402


# ----------------------------------------------------------------------------- what is measured

class Count(NamedTuple):
    """Hold what one method did on one prompt in one round."""
    tokens: int
    calls: int  # of the target
    total: float  # seconds
    target: float  # seconds in passes of the target, the prompt's own among them
    draft: float
    output: list[int]
    log: list[dict]
    rows: int  # of all calls of the target


class Ours:
    """Run a method of this project with caches of its own.

    method   the method, a generator
    models   the cached models by the names of the method's arguments
    limit    the most tokens of an answer
    shared   for an argument of the method, what makes it. The prompts of a round share the result
    options  further arguments of the method
    """

    def __init__(self, method, models: dict[str, EngineLM], limit: int, eos: set[int],
                 sample: Sampler, shared: dict, **options):
        self.method, self.models, self.limit, self.eos = method, models, limit, eos
        self.sample, self.make_shared, self.options = sample, shared, options
        self.new_round()

    def new_round(self) -> None:
        """Make what the prompts of the next round share, such as a pool of phrases."""
        takes = inspect.signature(self.method).parameters
        makes = {**self.make_shared, "eos": lambda: self.eos}
        self.shared = {name: make() for name, make in makes.items() if name in takes}

    def __call__(self, prompt: list[int]) -> Count:
        run = Run(self.method, self.models, self.shared | self.options, self.eos)
        before = {lm: len(lm.passes) for lm in self.models.values()}
        list(run.decode(prompt, self.limit, self.sample))
        new = {name: lm.passes[before[lm]:] for name, lm in self.models.items()}
        spent = {name: sum(seconds for _, _, seconds in some) for name, some in new.items()}
        rows = [rows for rows, read, _ in new["target"] if read]  # without passes over the prompt
        return Count(run.tokens, len(rows), run.seconds, spent["target"], spent.get("draft", 0.0),
                     run.outputs[0], run.log, sum(rows))


class Theirs:
    """Run transformers' generate.

    bench    has its models
    names    the models that it runs beside the target: "draft", or none
    packed   whether its models have packed weights, as those of our methods do
    options  further arguments of generate

    The pass over the prompt is a call like any other, since it gives a token.
    """

    def __init__(self, bench: "Bench", *names: str, packed: bool = False, **options):
        self.models = {name: bench.plain(name, packed) for name in ("target", *names)}
        temperature = bench.args.temperature
        self.options = options | {
            "max_new_tokens": bench.args.max_new_tokens, "do_sample": temperature > 0,
            "temperature": temperature or 1.0, "top_k": 0,
            "assistant_model": self.models.get("draft")}

    def new_round(self) -> None:
        """Do nothing, since prompts share nothing here."""

    def __call__(self, prompt: list[int]) -> Count:
        target = self.models["target"]
        for model in self.models.values():
            model.times.clear()
        ids, began = torch.tensor([prompt], device=target.device), time.perf_counter()
        rows = target.generate(ids, attention_mask=torch.ones_like(ids), **self.options)
        output = rows[0, len(prompt):].tolist()
        total = time.perf_counter() - began
        spent = {name: sum(model.times[1::2]) - sum(model.times[::2])
                 for name, model in self.models.items()}
        return Count(len(output), len(target.times) // 2, total, spent["target"],
                     spent.get("draft", 0.0), output, [], 0)


def by_category(path: str) -> dict[str, list[str]]:
    """Read a file of prompts and return {category: prompts}.

    A line without a category belongs to "prompts".
    """
    groups = defaultdict(list)
    for row in read_rows(path):
        groups[str(row.get("category", "prompts"))].append(row["prompt"])
    return groups


def keep_fitting(names, act: Callable) -> dict:
    """Return what act(name) gives for each name, unless it refuses its files or models."""
    found = {}
    for name in names:
        try:
            found[name] = act(name)
        except InputError as error:
            print(f"{name} left out: {error}\n")
    return found


def find_methods() -> dict[str, tuple[Callable, Table]]:
    """Find the methods by their names, each with what its file's COMMAND_LINE says.

    A method that takes `tokenizers` is left out, since all models of the bench have one tokenizer.
    """
    found = {"autoregressive": (autoregressive, Table([autoregressive]))}
    for module in list_files().values():
        table = Table(**importlib.import_module(module).COMMAND_LINE)
        found |= {method.__name__: (method, table) for method in table.methods
                  if "tokenizers" not in inspect.signature(method).parameters}
    return found


METHODS = find_methods()
ALL = ["autoregressive", "speculative --gamma 6", "ouroboros", "jacobi", "lookahead",
       "prompt_lookup", "bita", "bita --tree chain", "medusa", "medusa --heads hydra",
       "eagle", "eagle3", "mtp", "dflash", "sequoia", "early_exit", "draft_verify", "layerskip",
       "pass_sampling", "space", "recycling", "rest", "rest --no-grow",
       *(f"hybrid --guess {guess}" for guess in GUESSES), "cascade", "specinfer --gamma 6",
       "spectr --gamma 6", "bild", "specdec", "mjsd", "cllm"]
AR = ALL[0]


class Bench:
    """Hold the loaded models and the prompts, and build the methods that can be run on them.

    args   the parsed command line
    pairs  all (category, prompt), category after category
    """

    def __init__(self, args: argparse.Namespace):
        for option in "n", "rounds", "max_new_tokens":
            require(vars(args)[option] >= 1, option, "1 or more", vars(args)[option])
        self.args, self.tokenizer = args, None
        self.run_as = GraphedLM if args.graphs else EngineLM
        if args.draft is None and Path(args.target).resolve() == Path(EMBEDDED):
            args.draft = str(ROOT / "models/draft")
        models = [self.load(path) for path in (args.target, args.draft) if path]
        self.target = models[0]
        self.eos = eos_ids(self.target, self.tokenizer)
        texts, taken = args.prompts, {}
        if not texts:
            taken = {task: tasks.take(task, "test", args.n, args.seed) for task in tasks.TASKS}
            texts = {task: [example.prompt for example in some] for task, some in taken.items()}
        self.pairs = [(name, prompt) for name, some in texts.items() for prompt in
                      encode_prompts(self.target, self.tokenizer, some[:args.n], args.chat)]
        every = [prompt for _, prompt in self.pairs]
        context = min(map(context_length, models))
        room = context - max(map(len, every))
        require(args.max_new_tokens <= room, "max_new_tokens",
                f"at most {room} for these prompts and a context of {context}",
                args.max_new_tokens)
        self.dropped = 0
        # The task of each prompt, by which an answer can be graded. Prompts of a file have none.
        examples = [example for some in taken.values() for example in some]
        self.examples = {tuple(prompt): example for prompt, example in zip(every, examples)}

    def drop_loops(self) -> None:
        """Drop the prompts whose AR output loops."""
        every = [prompt for _, prompt in self.pairs]
        answers = answer_all(self.target, self.eos, every, self.args.max_new_tokens)
        kept = [pair for pair, answer in zip(self.pairs, answers) if not tasks.loops(answer)]
        self.dropped, self.pairs = len(every) - len(kept), kept
        if not self.pairs:
            raise InputError(f"expected a prompt whose AR output does not loop, got {self.dropped} "
                             "that do")
        self.categories = [*dict.fromkeys(name for name, _ in self.pairs)]

    @functools.cache
    def load(self, path: str):
        """Load a model, which must have the tokenizer of the first one that was loaded."""
        if path is None:
            raise InputError("expected a --draft")
        model, tokenizer = load_checked(path, self.args.device, self.args.dtype)
        self.tokenizer = self.tokenizer or tokenizer
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise InputError(f"expected a model with the target's tokenizer, got {path!r}, which "
                             "has another vocabulary")
        if self.args.graphs:
            check(model, functools.partial(GraphedLM, waits=False))  # once more, by replays
        return self.prepare(model, self.args.pack, path == self.args.target)

    def prepare(self, model, packed: bool, is_target: bool):
        """Pack a model if asked for, and make the target batch-invariant if the bench has to."""
        model = pack(model) if packed else model
        return make_invariant(model, self.run_as) if self.args.invariant and is_target else model

    def cache(self, path: str, kind: type[EngineLM] | None = None) -> EngineLM:
        """Give a model a cache of its own, as the kind of CachedLM that a method asks for."""
        model = self.load(path)
        return (kind or self.run_as)(model, vocab_size(model, self.tokenizer))

    def row(self, line: str) -> Ours:
        """Build the method that a command line names, as a user's own command would run it.

        line     a command line without `python`: a method and its options. The bench's own models,
                 sampling and lengths take the place of those that it does not give
        returns  the method. It reads its files in its first call
        """
        name, *words = shlex.split(line)
        if name not in METHODS:
            raise InputError(f"expected a row of one of {', '.join(METHODS)}, got {line!r}")
        (method, said), asked = METHODS[name], self.args
        usual = [f"--max-new-tokens={asked.max_new_tokens}", f"--temperature={asked.temperature}",
                 f"--seed={asked.seed}"]
        if said.target == "target":  # CLLM decodes a model of its own
            usual.append(f"--target={asked.target}")
        # Of an option that is given twice the last value counts, so the line's own ones win.
        args = parse_decoding([method], (), said.target, usual + words)
        lms = {"target": self.cache(args.target, kind_for(method, self.run_as))}
        given = self.find_files(method, select_options(args, method))
        if "nodes" in read_options(method):
            given.setdefault("nodes", asked.nodes)
        if "draft" in inspect.signature(method).parameters:
            lms["draft"], *more = map(self.cache, args.draft or [asked.draft])
            if more:
                given["more_drafts"] = more
        return Ours(method, lms, args.max_new_tokens, self.eos, make_sampler(args), said.shared,
                    **given)

    def find_files(self, method, options: dict) -> dict:
        """Let options that name files of models/ by default name those of --adapters.

        options  the options that a row gives, which stay as they are
        returns  these, and the options that name files
        """
        every = {name: default for name, (_, default) in read_options(method).items()} | options
        files = {name: file for name, file in every.items()
                 if isinstance(file, str) and file.startswith(f"{MODELS}/")}
        # Medusa's option `heads` and the hybrid's option `guess` say which file it is.
        kind = every.get("heads") or every.get("guess") or method.__name__
        adapter = self.args.adapters / f"{kind}.safetensors"
        # Without --adapter, mtp reads the block of the target's own files, and for the embedded
        # target that of models/. So it gets one only if --adapters is another folder with a block.
        another = adapter.exists() and self.args.adapters.resolve() != ROOT / "models"
        if every.get("adapter") == "" and kind != "none" and (kind != "mtp" or another):
            files["adapter"] = adapter.name
        return {name: str(self.args.adapters / Path(file).name)
                for name, file in files.items()} | options

    @functools.cache
    def plain(self, name: str, packed: bool):
        """Load the target or the draft as transformers has it, with packed weights if asked for.

        Its attention is transformers' own. The penalties that a checkpoint may ask for are dropped.
        Its `times` tell when its passes began and ended.
        """
        model = AutoModelForCausalLM.from_pretrained(
            getattr(self.args, name), dtype=self.target.dtype, trust_remote_code=False)
        model = model.to(self.target.device).eval()
        model.generation_config = GenerationConfig(
            eos_token_id=sorted(self.eos) or None, num_assistant_tokens=6,
            num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
        model.times = []

        def note(*_) -> None:
            torch.get_device_module(model.device).synchronize(model.device)
            model.times.append(time.perf_counter())
        model.register_forward_pre_hook(note)
        model.register_forward_hook(note)
        return self.prepare(model, packed, name == "target")

    def share_of_bandwidth(self) -> float:
        """Return the share of the memory's bandwidth that calls of one row reach.

        A call reads all weights but the embeddings, and the cache. A copy of a large tensor tells
        the bandwidth. At a share near 1 a call of more rows costs the same, since it reads no more.
        """
        model, lm = self.target, self.row(AR).models["target"]
        lm.start(self.pairs[0][1])
        for _ in range(9):
            lm.forward([0])
        seconds = median(taken for _, read, taken in lm.passes if read)
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        read = [x.nbytes for x in model.parameters() if x is not table.weight or x is head.weight]
        read += [x[:, :, :lm.length].nbytes for pair in lm.cache.layers.values() for x in pair]
        x, y = torch.ones(2, 2 ** 28, dtype=torch.uint8, device=model.device)
        copies = timeit.repeat(lambda: y.copy_(x)[0].item(), number=1, repeat=5)
        return sum(read) / seconds / (2 * x.nbytes / min(copies))

    def grade(self, outputs: list[list[int]]) -> list[bool]:
        """Grade the answers to all prompts, which are tasks: return whether each is right."""
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        examples = [self.examples[tuple(prompt)] for _, prompt in self.pairs]
        return [*map(tasks.grade, examples, texts)]

    def measure(self, runs: dict) -> "Results":
        """Run every method on every prompt in each round, after a few prompts to warm up.

        runs     {name: method}
        returns  the counts of all runs, without methods that refuse their files or models

        With graphs all prompts warm up, so that no graph is captured while the clock runs.
        """
        def warm_up(name: str):
            for _, prompt in self.pairs if self.args.graphs else self.pairs[:3]:
                runs[name](prompt)
            return runs[name]
        runs = keep_fitting(runs, warm_up)
        counts = {method: [] for method in runs}
        for _ in tqdm(range(self.args.rounds), desc="rounds", leave=False):
            for method, run in runs.items():
                run.new_round()
                counts[method].append([])
            for name, prompt in self.pairs:
                for method, run in runs.items():
                    counts[method][-1].append((name, run(prompt)))
        return Results(counts)


class Results:
    """Compute figures from the counts of a measurement.

    counts  counts[method][round] is a list of (category, Count)

    A figure without a category is of all prompts.
    """

    def __init__(self, counts: dict):
        self.counts = counts

    def sums(self, method, what: str, category: str | None = None) -> np.ndarray:
        """Sum a field of Count, such as `tokens`, over each round's prompts."""
        return np.array([
            sum(getattr(count, what) for name, count in some if category in (None, name))
            for some in self.counts[method]])

    def speeds(self, method, category: str | None = None) -> np.ndarray:
        """Return the tokens a second of each round."""
        return self.sums(method, "tokens", category) / self.sums(method, "total", category)

    def ratios(self, method, other, category: str | None = None) -> np.ndarray:
        """Return how many times as fast a method is as another in each round."""
        return self.speeds(method, category) / self.speeds(other, category)

    def per_call(self, method, what: str = "tokens") -> float:
        """Return the tokens, or the rows, per target call of all rounds together."""
        return sum(self.sums(method, what)) / sum(self.sums(method, "calls"))

    def per_token(self, method, what: str) -> float:
        """Return the milliseconds a token in `total`, or in passes of `target` or `draft`."""
        return 1000 * median(self.sums(method, what) / self.sums(method, "tokens"))

    def same(self, method, other) -> str:
        """Count the outputs of the first round that equal another method's."""
        pairs = [*zip(self.counts[method][0], self.counts[other][0])]
        return f"{sum(a.output == b.output for (_, a), (_, b) in pairs)} of {len(pairs)}"


def table(lines: list[list[str]]) -> str:
    """Format lines of cells as a Markdown table; the first line is its head."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# -------------------------------------------------------------------------------- the tables

def build_peers(bench: Bench) -> list[tuple[str, str, Theirs]]:
    """Build transformers' own `generate` in each of its forms.

    returns  for each form the nearest row of ours, its name, and the form. Where our methods have
             packed weights, each form is there with and without them
    """
    peers = []
    for packed in sorted({False, is_packed(bench.target)}):
        weights = ", packed" if packed else ""
        peers.append(("autoregressive", f"`generate`{weights}", Theirs(bench, packed=packed)))
        if bench.target._is_stateful:  # with recurrent layers `generate` takes no guesses
            continue
        if bench.args.draft:
            peers.append(("speculative --gamma 6",
                          f"`generate`, assistant, draft of 6 tokens{weights}",
                          Theirs(bench, "draft", packed=packed)))
        peers.append(("prompt_lookup", f"`generate`, prompt lookup of 4{weights}",
                      Theirs(bench, packed=packed, prompt_lookup_num_tokens=4)))
    return peers


def choose_lines(args: argparse.Namespace) -> list[str]:
    """List the lines of the table that the command line asks for; the first one is AR."""
    lines = [*ALL] if not (args.only or args.row) else ALL[:1]
    for name in args.only:
        found = [name] if name in ALL else [line for line in ALL if line.startswith(name)]
        require(found != [], "only", "rows, or how their names begin", repr(name))
        lines += found
    return [*dict.fromkeys(lines + args.row)]


def make_line(bench: Bench, results: Results, method: str) -> dict[str, str]:
    """Make the line of a method in the table: a cell under each head."""
    per_call, ratios = results.per_call(method), results.ratios(method, AR)
    calls, rows = sum(results.sums(method, "calls")), results.per_call(method, "rows")
    total, target, draft = (results.per_token(method, x) for x in ("total", "target", "draft"))
    log = [record for some in results.counts[method] for _, x in some for record in x.log]
    # How many layers ran one after the other. A method whose calls run all layers logs no number.
    layers = (sum(record.get("layers", 0) for record in log)
              or depth_of(bench.target) * calls)
    guesses = sum(record.get("guessed", 0) for record in log) / calls
    cells = {"method": method, "tokens per target call": f"{per_call:.2f}",
             "rows a call": f"{rows:.1f}" if rows else "",  # `generate` does not count them
             "guesses a call": f"{guesses:.1f}" if guesses else "",
             "target layers a token": f"{layers / sum(results.sums(method, 'tokens')):.1f}",
             "tokens/s": f"{median(results.speeds(method)):.0f}",
             "x AR": f"{median(ratios):.2f}", "range": f"{min(ratios):.2f} to {max(ratios):.2f}"}
    for name in bench.categories:
        cells[f"x AR, {name}"] = f"{median(results.ratios(method, AR, name)):.2f}"
    cells |= {"realised share": f"{median(ratios) / per_call:.0%}",
              "ms a token: target": f"{target:.2f}", "draft": f"{draft:.2f}",
              "rest": f"{total - target - draft:.2f}"}
    cells["of the bandwidth"] = f"{bench.share_of_bandwidth():.0%}" if method == AR else ""
    cells["output as AR's"] = results.same(method, AR)
    if bench.examples:
        right = bench.grade([count.output for _, count in results.counts[method][0]])
        cells["right answers"] = f"{sum(right)} of {len(right)}"
    return cells


def print_tables(bench: Bench) -> None:
    """Measure the methods that are asked for beside transformers' own, and print two tables."""
    runs = keep_fitting(choose_lines(bench.args), bench.row)
    peers = build_peers(bench)
    results = bench.measure(runs | {name: form for _, name, form in peers})
    lines = [make_line(bench, results, method) for method in results.counts]
    print(table([[*lines[0]], *([*line.values()] for line in lines)]))
    compared = [["ratio of tokens/s", "all", *bench.categories]]
    for ours, theirs, _ in peers:
        if ours in results.counts:
            ratios = [results.ratios(ours, theirs, name) for name in (None, *bench.categories)]
            compared.append([f"{ours} / {theirs}", *(f"{median(x):.2f}" for x in ratios)])
    print(table(compared) if compared[1:] else "")


# ---------------------------------------------------------------------------- the command line

def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the bench's own options."""
    parser = Parser(description=__doc__.partition("\n")[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, models = parser.add_argument, ROOT / "models"
    add("--target", default=EMBEDDED)
    add("--draft", help="default: for the embedded target the embedded draft, else none")
    add("--adapters", type=Path, default=models, help="folder of what is trained for the target")
    add("--prompts", type=by_category, metavar="FILE", help="in place of the held-out tasks")
    add("--chat", nargs="?", const={}, type=json.loads, metavar="JSON",
        help="put prompts into the model's chat template, with these settings of it")
    add("-n", type=int, default=10, help="prompts of each task or category")
    add("--rounds", type=int, default=5)
    add("--nodes", type=int, default=0,
        help="of all trees whose rows do not say it; 0: the methods' own defaults")
    add("--max-new-tokens", type=int, default=200)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0, help="of the held-out prompts and of sampling")
    add("--device")
    add("--dtype", choices=["float32", "bfloat16", "float16"])
    add("--graphs", action="store_true", help="passes of few widths, on a GPU as CUDA graphs")
    add("--pack", action=argparse.BooleanOptionalAction, default=True,
        help="on a CPU, put large weights into blocks where that is faster (support/packed.py)")
    add("--invariant", action="store_true",
        help="make the target batch-invariant, also for `generate` (support/invariant.py)")
    add("--only", nargs="*", default=[], help="AR and the rows named so, or whose names begin so")
    add("--row", action="append", default=[],
        help='another row, such as "medusa --nodes 16", repeatable')
    return parser


def main() -> None:
    bench = Bench(make_parser().parse_args())
    bench.drop_loops()
    print(f"`{shlex.join(['python', *sys.argv])}`\n\n"
          f"{bench.target.device.type}, {bench.target.dtype}, {torch.get_num_threads()} "
          f"threads, torch {torch.__version__}; medians of {bench.args.rounds} rounds over "
          f"{len(bench.pairs)} prompts ({bench.dropped} left out for loops)\n")
    print_tables(bench)


if __name__ == "__main__":
    sys.exit(run_script(main))
