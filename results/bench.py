"""Measure every method and transformers' own `generate` on the same prompts in one run.

    make bench                            # the embedded models on held-out prompts of each task
    python results/bench.py --target DIR --draft DIR --adapters FOLDER --prompts FILE --chat

The figures are printed as Markdown tables. Each round gives every prompt to every method, one
method after another, so that a noisy machine slows all methods alike. A ratio is taken within a
round, and the median over the rounds is shown. Prompts whose AR output loops are left out and
counted, since a model in a loop accepts every guess.

FILE holds a prompt a line. A line may also be JSON with "prompt", "question" or "turns", of which
the first counts, and with a "category". The papers' own tables are in paper_tables.py.
"""
import argparse
import functools
import inspect
import json
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED = str(ROOT / "models/target")
sys.path.insert(0, str(ROOT))
from bita import bita, load_tuning  # noqa: E402  (the path is set above)
from cli.graphs import GraphedLM  # noqa: E402
from cli.loading import encode_prompts, load_checked  # noqa: E402
from cli.main import run_script  # noqa: E402
from cli.run import Run  # noqa: E402
from cli.text import Parser  # noqa: E402
from cllm import cllm  # noqa: E402
from common import (CachedLM, InputError, Sampler, autoregressive, context_length,  # noqa: E402
                    eos_ids, prepare, vocab_size)
from jacobi import jacobi, lookahead  # noqa: E402
from mjsd import mjsd  # noqa: E402
from models import tasks  # noqa: E402
from models.files import check_result, write_text  # noqa: E402
from models.training import collect_answers  # noqa: E402
from ouroboros import PhrasePool, ouroboros  # noqa: E402
from speculative import speculative  # noqa: E402
from survey.cascade import cascade  # noqa: E402
from survey.draft_verify import draft_verify, load_blocks  # noqa: E402
from survey.early_exit import early_exit, load_exit  # noqa: E402
from survey.eagle import eagle, load_draft  # noqa: E402
from survey import dflash, eagle3  # noqa: E402
from survey.hybrid import hybrid, load_trust  # noqa: E402
from survey.layerskip import layerskip, load_tuned  # noqa: E402
from survey.lossy import bild, specdec  # noqa: E402
from survey.masks import load_space, pass_sampling, space  # noqa: E402
from survey.medusa import load_heads, medusa  # noqa: E402
from survey.recycling import Successors, recycling  # noqa: E402
from survey.rest import load_datastore, rest  # noqa: E402
from survey.sequoia import load_rates, sequoia  # noqa: E402
from survey.several_drafts import specinfer, spectr  # noqa: E402
from survey.views import depth_of  # noqa: E402


# ----------------------------------------------------------------------------- what is measured

@dataclass
class Count:
    """Hold what one method did on one prompt in one round."""
    tokens: int
    calls: int  # of the target
    total: float  # seconds
    target: float = 0.0  # seconds in passes of the target, the prompt's own among them
    draft: float = 0.0
    output: list[int] = field(default_factory=list)
    log: list[dict] = field(default_factory=list)
    draft_calls: int = 0
    rows: float = 0.0  # of a call of the target
    draft_rows: float = 0.0  # of a call of the draft


class Ours:
    """Run a method of this project with caches of its own.

    method   the method, a generator
    models   the cached models by the names of the method's arguments
    limit    tokens of an answer
    options  further arguments of the method

    What the prompts of a round share, like a pool of phrases, begins anew with each round.
    """

    def __init__(self, method, models: dict[str, CachedLM], limit: int, eos: set[int],
                 sample: Sampler, **options):
        self.method, self.models, self.limit, self.eos = method, models, limit, eos
        self.sample, self.options = sample, options
        self.new_round()

    def new_round(self) -> None:
        takes = inspect.signature(self.method).parameters
        made = {"pool": PhrasePool(), "successors": Successors(), "eos": self.eos}
        self.shared = {name: x for name, x in made.items() if name in takes}

    def __call__(self, prompt: list[int]) -> Count:
        for lm in self.models.values():
            lm.calls, lm.rows, lm.seconds, lm.prompt_seconds = 0, 0, 0.0, 0.0
        run = Run(self.method, self.models, self.shared | self.options, self.eos)
        for _ in run.decode(prompt, self.limit, self.sample):
            pass
        spent = {name: lm.seconds + lm.prompt_seconds for name, lm in self.models.items()}
        rows = {name: lm.rows / max(1, lm.calls) for name, lm in self.models.items()}
        draft_calls = self.models["draft"].calls if "draft" in self.models else 0
        return Count(run.tokens, self.models["target"].calls, run.seconds, spent["target"],
                     spent.get("draft", 0.0), run.outputs[0], run.log, draft_calls,
                     rows["target"], rows.get("draft", 0.0))


class Theirs:
    """Run transformers' generate.

    models   its models, "target" and perhaps "draft"
    limit    tokens of an answer
    options  further arguments of generate

    Hooks count and time the passes of the models. The pass over the prompt is a call like any
    other, since it gives a token.
    """

    def __init__(self, models: dict, limit: int, sample: Sampler, **options):
        self.models, self.limit, self.options = models, limit, options | {"do_sample": False}
        if sample.temperature > 0:
            self.options |= dict(do_sample=True, temperature=sample.temperature,
                                 top_k=sample.top_k, top_p=sample.top_p)
        if "draft" in models:
            self.options["assistant_model"] = models["draft"]

    def new_round(self) -> None:
        pass

    def __call__(self, prompt: list[int]) -> Count:
        target, hooks = self.models["target"], []
        calls, seconds = dict.fromkeys(self.models, 0), dict.fromkeys(self.models, 0.0)

        def before(name, *_):
            calls[name] += 1
            seconds[name] -= clock(target.device)

        def after(name, *_):
            seconds[name] += clock(target.device)
        for name, model in self.models.items():
            hooks.append(model.register_forward_pre_hook(functools.partial(before, name)))
            hooks.append(model.register_forward_hook(functools.partial(after, name)))
        ids, began = torch.tensor([prompt], device=target.device), time.perf_counter()
        rows = target.generate(ids, attention_mask=torch.ones_like(ids),
                               max_new_tokens=self.limit, **self.options)
        output = rows[0, len(prompt):].tolist()
        total = time.perf_counter() - began
        for hook in hooks:
            hook.remove()
        return Count(len(output), calls["target"], total, seconds["target"],
                     seconds.get("draft", 0.0), output, draft_calls=calls.get("draft", 0))


def clock(device: torch.device) -> float:
    """Return the time in seconds, after the GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def by_category(path: str) -> dict[str, list[str]]:
    """Read a file of prompts and return {category: prompts}.

    A line without a category belongs to "prompts".
    """
    groups = {}
    for row in tasks.read_rows(path):
        category = str(row.get("category", "prompts"))
        groups.setdefault(category, []).append(tasks.prompt_of(row))
    return groups


class Bench:
    """Hold the loaded models and the prompts, and build the methods that can be run on them.

    args  the parsed command line
    """

    def __init__(self, args: argparse.Namespace):
        if min(args.n, args.rounds, args.max_new_tokens) < 1:
            raise InputError("expected prompts, rounds and max-new-tokens of 1 or more, got "
                             f"{args.n}, {args.rounds} and {args.max_new_tokens}")
        self.args, self.sample = args, Sampler(args.temperature, args.top_k, args.top_p, args.seed)
        self.run_as = GraphedLM if args.graphs else CachedLM
        self.target, self.tokenizer = self.prepared(args.target)
        if args.draft is None and args.target == EMBEDDED:
            args.draft = str(ROOT / "models/draft")
        self.draft = self.load(args.draft) if args.draft else None
        self.eos = eos_ids(self.target, self.tokenizer)
        self.examples = {}  # of the tasks, by prompt: their answers can be graded
        if args.prompts:
            prompts = {name: self.encode(texts[:args.n]) for name, texts in args.prompts.items()}
        else:
            prompts = dict.fromkeys(tasks.TASKS, ())
            for task in tasks.TASKS:
                some = tasks.take(task, "test", args.n, args.seed)
                prompts[task] = self.encode([example.prompt for example in some])
                self.examples |= zip(map(tuple, prompts[task]), some)
        every = [prompt for some in prompts.values() for prompt in some]
        longest = max(map(len, every))
        context = min(context_length(model) for model in (self.target, self.draft) if model)
        if longest + args.max_new_tokens > context:
            raise InputError(f"expected prompts and {args.max_new_tokens} new tokens within the "
                             f"context of {context}, got a prompt of {longest} tokens")
        with tempfile.TemporaryDirectory() as work:  # AR's output, many prompts at once
            answers = collect_answers(self.target, self.tokenizer, every, args.max_new_tokens,
                                  Path(work))
        loops = [prompt for prompt, answer in zip(every, answers) if tasks.loops(answer)]
        kept = {name: [p for p in some if p not in loops] for name, some in prompts.items()}
        self.prompts = {name: some for name, some in kept.items() if some}
        self.dropped = len(loops)
        if not self.prompts:
            raise InputError(f"expected a prompt whose AR output does not loop, got {self.dropped} "
                             "that do")

    def prepared(self, path: str) -> tuple:
        """Load a model and its tokenizer, and check the model as it will be run."""
        model, tokenizer = load_checked(path, self.args.device, self.args.dtype)
        return prepare(model, self.run_as), tokenizer

    def load(self, path: str):
        """Load another model, which must have the target's tokenizer."""
        model, tokenizer = self.prepared(path)
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise InputError(f"expected a model with the target's tokenizer, got {path!r}, which "
                             "has another vocabulary")
        return model

    def cached(self, model) -> CachedLM:
        return self.run_as(model, vocab_size(model, self.tokenizer))

    def encode(self, texts: list[str]) -> list[list[int]]:
        models = [model for model in (self.target, self.draft) if model]
        return encode_prompts(models, self.tokenizer, texts, self.args.chat)

    def ours(self, method, sample: Sampler | None = None, limit: int | None = None, target=None,
             **options) -> Ours:
        models = {"target": target or self.target}
        if "draft" in inspect.signature(method).parameters:
            if self.draft is None:
                raise InputError("expected a --draft")
            models["draft"] = self.draft
        return Ours(method, {name: self.cached(model) for name, model in models.items()},
                    limit or self.args.max_new_tokens, self.eos, sample or self.sample, **options)

    def fitting(self, name: str, make) -> dict[str, Ours]:
        """Build a method and return {name: method}.

        Where something that the method needs does not fit, a line says why and {} is returned.
        """
        try:
            return {name: make()}
        except InputError as error:
            print(f"{name} left out: {error}\n")
            return {}

    def run(self, name: str, method, **options) -> dict[str, Ours]:
        return self.fitting(name, lambda: self.ours(method, **options))

    def bita(self, name: str, path=None, **options) -> dict[str, Ours]:
        path = path or self.args.adapters / "bita.safetensors"
        return self.fitting(name, lambda: self.ours(
            bita, tuning=load_tuning(path, self.target), **options))

    def heads(self, kind: str, **options) -> dict[str, Ours]:
        path = self.args.adapters / f"{kind}.safetensors"
        return self.fitting(kind, lambda: self.ours(
            medusa, heads=kind, trained=load_heads(path, kind, self.target),
            nodes=self.args.nodes, **options))

    def eagle(self, name: str, **options) -> dict[str, Ours]:
        path = self.args.adapters / "eagle.safetensors"
        return self.fitting(name, lambda: self.ours(
            eagle, trained=load_draft(path, self.target), nodes=self.args.nodes, **options))

    def eagle3(self, name: str, **options) -> dict[str, Ours]:
        path = self.args.adapters / "eagle3.safetensors"
        return self.fitting(name, lambda: self.ours(
            eagle3.eagle3, trained=eagle3.load_draft(path, self.target), nodes=self.args.nodes,
            **options))

    def dflash(self, name: str, **options) -> dict[str, Ours]:
        path = self.args.adapters / "dflash.safetensors"
        return self.fitting(name, lambda: self.ours(
            dflash.dflash, trained=dflash.load_draft(path, self.target), nodes=self.args.nodes,
            **options))

    def rest(self, name: str, **options) -> dict[str, Ours]:
        path = self.args.adapters / "rest.safetensors"
        return self.fitting(name, lambda: self.ours(
            rest, store=load_datastore(path, self.target), nodes=self.args.nodes, **options))

    def hybrid(self, guess: str) -> dict[str, Ours]:
        files = {name: str(self.args.adapters / file) for name, file in (
            ("datastore", "rest.safetensors"), ("trust", "hybrid.json"),
            ("adapter", f"{guess}.safetensors"))}

        def make() -> Ours:
            load_trust(files["trust"], self.target)
            return self.ours(hybrid, guess=guess, **files)
        return self.fitting(f"hybrid, {guess}", make)

    def sequoia(self, name: str, **options) -> dict[str, Ours]:
        path = str(self.args.adapters / "sequoia.json")

        def make() -> Ours:
            run = self.ours(sequoia, rates=path, **options)
            load_rates(path, self.target, self.draft)
            return run
        return self.fitting(name, make)

    def masks(self) -> dict[str, Ours]:
        """Build PaSS and SPACE; SPACE decodes another model."""
        tokens, tuning = (self.args.adapters / f"{x}.safetensors" for x in ("pass", "space"))

        def tuned() -> Ours:
            load_space(tuning, self.cached(self.target))
            return self.ours(space, tuning=str(tuning))
        return {**self.fitting("pass", lambda: self.ours(
                    pass_sampling, trained=load_tuning(tokens, self.target))),
                **self.fitting("space (another model)", tuned)}

    def fewer_layers(self) -> dict[str, Ours]:
        """Build the methods with which the target drafts for itself.

        LayerSkip's target is another model, tuned for it.
        """
        exit_file, tuning, blocks = (self.args.adapters / name for name in (
            "exit.safetensors", "layerskip.safetensors", "blocks.json"))

        def tuned() -> Ours:
            load_tuned(tuning, self.target)
            return self.ours(layerskip, tuning=str(tuning))

        def with_blocks() -> Ours:
            return self.ours(draft_verify, skipped=load_blocks(str(blocks), self.target))
        return {**self.fitting("trained exit", lambda: self.ours(
                    early_exit, trained=load_exit(exit_file, self.target))),
                **self.fitting("draft & verify", with_blocks),
                **self.fitting("layerskip (another model)", tuned)}

    def cllm(self, name: str) -> dict[str, Ours]:
        return self.fitting(name, lambda: self.ours(cllm, target=self.load(self.args.cllm)))

    @functools.cache
    def plain(self, name: str):
        """Load the target or the draft as transformers has it.

        Its attention is transformers' own. The penalties that a checkpoint may ask for are dropped.
        """
        path, like = getattr(self.args, name), self.target
        model = AutoModelForCausalLM.from_pretrained(path, dtype=like.dtype,
                                                     trust_remote_code=False)
        model = model.to(like.device).eval()
        pad, eos = model.generation_config.pad_token_id, sorted(self.eos)
        model.generation_config = GenerationConfig(
            eos_token_id=eos or None, pad_token_id=min(eos, default=0) if pad is None else pad)
        if name == "draft":
            model.generation_config.update(num_assistant_tokens=self.args.gamma,
                                           num_assistant_tokens_schedule="constant",
                                           assistant_confidence_threshold=0.0)
        return model

    def theirs(self, *names: str, **options) -> Theirs:
        models = {name: self.plain(name) for name in ("target", *names)}
        return Theirs(models, self.args.max_new_tokens, self.sample, **options)

    def graded(self, prompts: list[list[int]], outputs: list[list[int]]) -> list[bool]:
        """Grade the answers of those prompts that are tasks: return whether each is right."""
        known = [(self.examples[tuple(prompt)], output) for prompt, output in zip(prompts, outputs)
                 if tuple(prompt) in self.examples]
        return [tasks.grade(example, self.tokenizer.decode(output, skip_special_tokens=True))
                for example, output in known]

    def pairs(self) -> list[tuple[str, list[int]]]:
        """Return all (category, prompt), category after category."""
        return [(name, prompt) for name, some in self.prompts.items() for prompt in some]

    def measure(self, runs: dict, pairs: list | None = None) -> "Results":
        """Run every method on every prompt in each round, after a few prompts to warm up.

        runs     {name: method}
        pairs    (category, prompt) of each prompt, all prompts of the benchmark by default
        returns  the counts of all runs

        With graphs all prompts warm up, so that no graph is captured while the clock runs.
        """
        pairs, counts = pairs or self.pairs(), {method: [] for method in runs}
        for _, prompt in pairs if self.args.graphs else pairs[:3]:
            for run in runs.values():
                run(prompt)
        for _ in tqdm(range(self.args.rounds), desc="rounds", leave=False):
            for method, run in runs.items():
                run.new_round()
                counts[method].append([])
            for name, prompt in pairs:
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

    def rounds(self, method, category: str | None = None) -> list[list[Count]]:
        return [[count for name, count in some if category in (None, name)]
                for some in self.counts[method]]

    def sums(self, method, what: str, category: str | None = None) -> list[float]:
        """Sum `tokens`, `calls`, `total`, `target` or `draft` over each round's prompts."""
        return [sum(getattr(count, what) for count in some)
                for some in self.rounds(method, category)]

    def speeds(self, method, category: str | None = None) -> list[float]:
        """Return the tokens a second of each round."""
        return [tokens / seconds for tokens, seconds in zip(self.sums(method, "tokens", category),
                                                            self.sums(method, "total", category))]

    def speed(self, method) -> float:
        return median(self.speeds(method))

    def ratio(self, method, other, category: str | None = None) -> float:
        """Return how many times as fast a method is as another, the median over the rounds."""
        return median(a / b for a, b in zip(self.speeds(method, category),
                                            self.speeds(other, category)))

    def per_call(self, method, category: str | None = None) -> float:
        """Return the tokens per target call of all rounds together."""
        return (sum(self.sums(method, "tokens", category))
                / sum(self.sums(method, "calls", category)))

    def per_token(self, method, what: str) -> float:
        """Return the milliseconds a token in `total`, or in passes of `target` or `draft`."""
        return median(1000 * seconds / tokens for seconds, tokens
                      in zip(self.sums(method, what), self.sums(method, "tokens")))

    def log(self, method, what: str, category: str | None = None) -> float:
        """Return the mean of a log entry over all records of all rounds."""
        return mean(record[what] for some in self.rounds(method, category)
                    for count in some for record in count.log)

    def layers(self, method, L: int) -> float:
        """Count the layers of the target that run one after the other for each token.

        L  all layers of the target
        """
        records = [record for some in self.rounds(method) for count in some for record in count.log]
        run = sum(record.get("layers", 0) for record in records)
        return (run or L * sum(self.sums(method, "calls"))) / sum(self.sums(method, "tokens"))

    def same(self, method, other) -> str:
        """Count the outputs of the first round that equal another method's."""
        ours, theirs = self.rounds(method)[0], self.rounds(other)[0]
        return f"{sum(a.output == b.output for a, b in zip(ours, theirs))} of {len(ours)}"


def save(path: str, bench: Bench, results: Results, methods) -> None:
    """Write what gpu.py reads: the counts of all methods, and the sizes of the models."""
    counted = {}
    for method in methods:
        counts = [count for some in results.rounds(method) for count in some]
        sums = {x: sum(results.sums(method, x))
                for x in ("tokens", "calls", "draft_calls", "total", "target", "draft")}
        rows = sum(count.rows * count.calls for count in counts)
        draft_rows = sum(count.draft_rows * count.draft_calls for count in counts)
        counted[method] = sums | {"rows": rows / sums["calls"],
                                  "draft_rows": draft_rows / max(1, sums["draft_calls"])}
    models = {}
    for name, model in (("target", bench.target), ("draft", bench.draft)):
        if model:
            tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
            unread = 0 if tied else model.get_input_embeddings().weight.numel()
            models[name] = {"weights": sum(p.numel() for p in model.parameters()) - unread,
                            "layers": depth_of(model), "bytes": model.dtype.itemsize}
    lengths = [len(prompt) for _, prompt in bench.pairs()]
    facts = {"prompts": len(lengths) * bench.args.rounds, "prompt_rows": mean(lengths),
             "models": models, "methods": counted}
    write_text(Path(path), json.dumps(facts, indent=1) + "\n")


def table(rows: list[list[str]]) -> str:
    """Format rows of cells as a Markdown table; the first row is its head."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# --------------------------------------------------------------------------------- all methods

def all_methods(bench: Bench) -> dict[str, Ours]:
    """Build every method at its defaults; without a draft, those that need none."""
    gamma, grams = bench.args.gamma, str(bench.args.adapters / "rest.safetensors")
    return {
        "AR": bench.ours(autoregressive),
        **bench.run(f"speculative, draft of {gamma} tokens", speculative, gamma=gamma),
        **bench.run("ouroboros", ouroboros),
        "jacobi": bench.ours(jacobi),
        "lookahead": bench.ours(lookahead),
        "lookahead, W = 0": bench.ours(lookahead, W=0),
        **bench.bita("bita"),
        **bench.bita("bita, efficient tree", tree="efficient"),
        **bench.heads("medusa"),
        **bench.heads("hydra"),
        **bench.eagle("eagle"),
        **bench.eagle("eagle, dynamic", dynamic=True),
        **bench.eagle3("eagle3"),
        **bench.dflash("dflash"),
        **bench.sequoia("sequoia"),
        **bench.fewer_layers(),
        **bench.masks(),
        "recycling": bench.ours(recycling, nodes=bench.args.nodes),
        **bench.rest("rest"),
        **bench.rest("rest, datastore alone", grow=False),
        **bench.hybrid("none"),
        **bench.hybrid("medusa"),
        **bench.hybrid("hydra"),
        **bench.hybrid("eagle"),
        **bench.hybrid("dflash"),
        **bench.run("cascade", cascade, grams=grams),
        **bench.run("specinfer", specinfer, gamma=gamma),
        **bench.run("spectr", spectr, gamma=gamma),
        **bench.run("bild (lossy)", bild),
        **bench.run("specdec (lossy)", specdec),
        **bench.run("mjsd (lossy)", mjsd),
        **bench.cllm("cllm (another model)")}


def peers_of(bench: Bench) -> dict[str, tuple[str, "Theirs"]]:
    """Build transformers' own `generate` in each of its forms.

    returns  {a method of ours: (the name of what is nearest to it in transformers, that)}
    """
    gamma = bench.args.gamma
    peers = {"AR": ("`generate`", bench.theirs())}
    if bench.draft:
        peers[f"speculative, draft of {gamma} tokens"] = (
            f"`generate`, assistant, draft of {gamma} tokens", bench.theirs("draft"))
    peers["lookahead, W = 0"] = ("`generate`, prompt lookup of 4",
                                 bench.theirs(prompt_lookup_num_tokens=4))
    return peers


def table_methods(bench: Bench) -> None:
    """Measure every method, or those of --only, beside transformers' own and print two tables."""
    only, runs = bench.args.only, all_methods(bench)
    starts = tuple(set(only) - runs.keys())  # a whole name means itself alone
    runs = {name: run for name, run in runs.items()
            if not only or name in ("AR", *only) or name.startswith(starts)}
    peers = peers_of(bench)
    both = runs | dict(peers.values())
    results, names = bench.measure(both), list(bench.prompts)
    if bench.args.save:
        save(bench.args.save, bench, results, runs)
    exact = bench.args.temperature == 0
    rows = [["method", "tokens per target call", "target layers a token", "tokens/s", "x AR",
             *(f"x AR, {name}" for name in names), "realised share", "ms a token: target", "draft",
             "rest", *(["output as AR's"] if exact else [])]]
    for method in both:
        per_call, ratio = results.per_call(method), results.ratio(method, "AR")
        ratios = [ratio, *(results.ratio(method, "AR", name) for name in names)]
        total, *parts = (results.per_token(method, x) for x in ("total", "target", "draft"))
        layers = results.layers(method, depth_of(bench.target))
        rows.append([method, f"{per_call:.2f}", f"{layers:.1f}", f"{results.speed(method):.0f}",
                     *(f"{x:.2f}" for x in ratios), f"{ratio / per_call:.0%}",
                     *(f"{x:.2f}" for x in (*parts, total - sum(parts))),
                     *([results.same(method, "AR")] if exact else [])])
    print(table(rows))
    rows = [["ratio of tokens/s", "all", *names]]
    for ours, (theirs, _) in peers.items():
        if ours in runs:
            ratios = [results.ratio(ours, theirs, name) for name in (None, *names)]
            rows.append([f"{ours} / {theirs}", *(f"{x:.2f}" for x in ratios)])
    print(table(rows))


# ---------------------------------------------------------------------------- the command line

def options(description: str) -> argparse.ArgumentParser:
    """Make a parser with the options that all tables take."""
    parser = Parser(description=description.partition("\n")[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, models = parser.add_argument, ROOT / "models"
    add("--target", default=EMBEDDED)
    add("--draft", help="default: for the embedded target the embedded draft, else none")
    add("--adapters", type=Path, default=models, help="folder of what is trained for the target")
    add("--cllm", default=str(models / "cllm"), help="the target after consistency training")
    add("--prompts", type=by_category, metavar="FILE", help="in place of the held-out tasks")
    add("--chat", action="store_true", help="put prompts into the model's chat template")
    add("-n", type=int, default=10, help="prompts of each task or category")
    add("--rounds", type=int, default=5)
    add("--gamma", type=int, default=6, help="tokens of a draft")
    add("--nodes", type=int, default=0,
        help="of the trees of Medusa, Hydra, EAGLE and REST; 0: as many as pay on this machine")
    add("--max-new-tokens", type=int, default=200)
    add("--temperature", type=float, default=0.0)
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--seed", type=int, default=0, help="of the held-out prompts and of sampling")
    add("--device")
    add("--dtype", choices=["float32", "bfloat16", "float16"])
    add("--graphs", action="store_true", help="passes of few widths, on a GPU as CUDA graphs")
    return parser


def check_results(args: argparse.Namespace) -> None:
    """Refuse, before any work, the places of a script's results that `check_result` refuses."""
    given = vars(args)
    for option in "save", "out", "picture":
        if given.get(option):
            check_result(option, Path(given[option]))


def perform(parser: argparse.ArgumentParser, tables) -> None:
    """Load what the command line asks for, print the command and the machine, and print the tables.

    tables  a function of the loaded Bench that prints them
    """
    args = parser.parse_args()
    check_results(args)
    bench = Bench(args)
    print(f"`{shlex.join(['python', *sys.argv])}`\n\n"
          f"{bench.target.device.type}, {bench.target.dtype}, {torch.get_num_threads()} "
          f"threads, torch {torch.__version__}; medians of {args.rounds} rounds over "
          f"{len(bench.pairs())} prompts ({bench.dropped} left out for loops)\n")
    tables(bench)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="*", default=[],
                        help="AR and the methods of ours named so, or whose names begin so")
    parser.add_argument("--save", metavar="FILE", help="write the counts, which gpu.py reads")
    perform(parser, table_methods)


if __name__ == "__main__":
    sys.exit(run_script(main))
