"""Every method and transformers' own `generate` on the same prompts in one run, as Markdown tables.

    make bench                                          # the embedded pair on held-out prompts of each task
    python tests/bench.py --table ouroboros             # ablations of one method
    python tests/bench.py --target DIR --draft DIR --prompts FILE --chat

Each round gives every method every prompt, one after another, so that a noisy machine slows all alike; a ratio is taken within a
round and the median over the rounds is shown. Prompts whose AR output loops are left out: a model in a loop accepts every guess.
FILE holds a prompt a line, or JSON lines with "prompt", "question" or "turns" (the first turn is taken) and perhaps "category".
"""
import argparse
import inspect
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "models")]
import tasks  # noqa: E402
import train as recipe  # noqa: E402
from bita import bita, load_tuning  # noqa: E402
from cllm import cllm, profile_of, repeats  # noqa: E402
from common import CachedLM, InputError, Run, Sampler, autoregressive, encode, eos_ids, load  # noqa: E402
from jacobi import jacobi, lookahead  # noqa: E402
from mjsd import EnergyMeter, mjgd, mjsd, perplexity  # noqa: E402
from ouroboros import ouroboros  # noqa: E402
from speculative import bild, specinfer, spectr, speculative  # noqa: E402


@dataclass
class Count:
    """What one method did on one prompt in one round."""
    tokens: int = 0
    calls: int = 0
    total: float = 0.0  # seconds
    target: float = 0.0
    draft: float = 0.0
    output: list[int] = field(default_factory=list)
    log: list[dict] = field(default_factory=list)


class Ours:
    """A generator of this project; what its `shared` makes lasts a round."""

    def __init__(self, method, models, limit, eos, capacity, vocab, sample, **options):
        self.method, self.limit, self.eos, self.sample, self.options = method, limit, eos, sample, options
        self.models = {name: CachedLM(model, capacity, vocab) for name, model in models.items()}
        self.new_round()

    def new_round(self):
        self.shared = Run(self.method, {}, {}).options

    def __call__(self, prompt) -> Count:
        for lm in self.models.values():
            lm.calls, lm.rows, lm.seconds = 0, 0, 0.0
        run = Run(self.method, self.models, self.shared | self.options)
        for _ in run.chunks(prompt, self.limit, self.eos, self.sample):
            pass
        return Count(run.tokens, self.models["target"].calls, run.seconds, self.models["target"].seconds,
                     self.models["draft"].seconds if "draft" in self.models else 0.0, run.outputs[0], run.log)


class Theirs:
    """transformers' generate, its forward passes counted and timed by hooks."""

    def __init__(self, models, limit, sample, **options):
        self.models, self.options, self.spent = models, dict(options, max_new_tokens=limit), {}
        if sample.temperature == 0:
            self.options |= dict(do_sample=False)
        else:
            self.options |= dict(do_sample=True, temperature=sample.temperature, top_k=sample.top_k, top_p=sample.top_p)
        for name, model in models.items():
            model.register_forward_pre_hook(lambda *_, name=name: self.start(name))
            model.register_forward_hook(lambda *_, name=name: self.stop(name))

    def new_round(self):
        pass

    def start(self, name):
        calls, seconds = self.spent.get(name, (0, 0.0))
        self.spent[name] = calls + 1, seconds - self.clock()

    def stop(self, name):
        calls, seconds = self.spent[name]
        self.spent[name] = calls, seconds + self.clock()

    def clock(self) -> float:
        if self.models["target"].device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self, prompt) -> Count:
        self.spent = {}
        ids = torch.tensor([prompt], device=self.models["target"].device)
        helper = {"assistant_model": self.models["draft"]} if "draft" in self.models else {}
        began = time.perf_counter()
        output = self.models["target"].generate(ids, attention_mask=torch.ones_like(ids), **helper, **self.options)[0, len(prompt):].tolist()
        total = time.perf_counter() - began
        return Count(len(output), self.spent["target"][0], total, self.spent["target"][1], self.spent.get("draft", (0, 0.0))[1], output)


def read_prompts(path: Path, n: int) -> dict[str, list[str]]:
    """{category: prompts}, at most n each."""
    groups = {}
    for line in filter(str.strip, path.read_text().splitlines()):
        row = json.loads(line) if line.startswith("{") else {"prompt": line}
        text = row["prompt"] if "prompt" in row else row["question"] if "question" in row else row["turns"][0]
        groups.setdefault(row.get("category", "prompts"), []).append(text)
    return {name: texts[:n] for name, texts in groups.items()}


class Bench:
    """Loaded models and prompts, and the methods that can be run on them."""

    def __init__(self, args):
        self.args = args
        self.target, self.tokenizer = load(args.target, args.device, args.dtype)
        self.draft, _ = load(args.draft, args.device, args.dtype)
        self.eos, self.sample = eos_ids(self.target, self.tokenizer), Sampler(args.temperature, args.top_k, args.top_p, args.seed)
        examples = {} if args.prompts else {t: tasks.take(t, "test", args.n, args.seed) for t in tasks.TASKS}
        texts = read_prompts(args.prompts, args.n) if args.prompts else {t: [e.prompt for e in some] for t, some in examples.items()}
        self.prompts = {name: [encode(self.tokenizer, text, args.chat) for text in some] for name, some in texts.items()}
        self.examples = {tuple(p): e for t, some in examples.items() for p, e in zip(self.prompts[t], some)}  # graded by mjsd's table
        self.capacity = max(len(p) for some in self.prompts.values() for p in some) + args.max_new_tokens
        self.vocab = min(m.get_output_embeddings().weight.shape[0] for m in (self.target, self.draft))
        self.prompts, self.dropped = self.without_loops()

    def without_loops(self):
        """(prompts whose AR output does not loop, how many were dropped)."""
        ar = self.ours(autoregressive, sample=Sampler(0))
        kept = {name: [p for p in tqdm(some, desc=f"{name}: AR", leave=False) if not tasks.loops(ar(p).output)] for name, some in self.prompts.items()}
        return kept, sum(map(len, self.prompts.values())) - sum(map(len, kept.values()))

    def ours(self, method, sample=None, limit=None, target=None, **options) -> Ours:
        models = {name: model for name, model in (("target", target or self.target), ("draft", self.draft)) if name in inspect.signature(method).parameters}
        return Ours(method, models, limit or self.args.max_new_tokens, self.eos, self.capacity, self.vocab, sample or self.sample, **options)

    def bita(self, name, adapter=None, **options) -> dict:
        """{name: the method}, or nothing, and a line that says why, where the tuning is of another model."""
        try:
            tuning = load_tuning(str(adapter or self.args.adapter), self.target)
        except InputError as error:
            print(f"{name} left out: {error}\n")
            return {}
        return {name: self.ours(bita, tuning=tuning, **options)}

    def theirs(self, draft=False, **options) -> Theirs:
        """transformers gets models of its own, with its own attention."""
        def plain(path):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=self.target.dtype).to(self.target.device).eval()
            model.generation_config.pad_token_id = model.generation_config.pad_token_id or min(self.eos, default=0)
            return model
        models = {"target": plain(self.args.target)}
        if draft:
            models["draft"] = plain(self.args.draft)
            models["draft"].generation_config.update(num_assistant_tokens=self.args.gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
        return Theirs(models, self.args.max_new_tokens, self.sample, eos_token_id=sorted(self.eos), **options)

    def measure(self, runs: dict, order=None) -> "Results":
        """Every method on every prompt, `rounds` times; `order` gives the prompts of a round as (name, prompt) pairs."""
        pairs = order or [(name, prompt) for name, some in self.prompts.items() for prompt in some]
        counts = {method: [] for method in runs}  # [round] of [(name, Count)]
        for _, prompt in pairs[:3]:  # warm-up
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
    """counts[method][round]: a list of (task, Count)."""

    def __init__(self, counts):
        self.counts, self.rounds = counts, range(len(next(iter(counts.values()))))

    def add(self, method, what, r, task=None):
        return sum(getattr(count, what) for name, count in self.counts[method][r] if task in (None, name))

    def speed(self, method, r, task=None):
        return self.add(method, "tokens", r, task) / self.add(method, "total", r, task)

    def ratio(self, method, other, task=None) -> str:
        return f"{median(self.speed(method, r, task) / self.speed(other, r, task) for r in self.rounds):.2f}"

    def median_speed(self, method) -> str:
        return f"{median(self.speed(method, r) for r in self.rounds):.0f}"

    def per_call(self, method, task=None) -> str:
        """Tokens per target call (block efficiency)."""
        return f"{sum(self.add(method, 'tokens', r, task) for r in self.rounds) / sum(self.add(method, 'calls', r, task) for r in self.rounds):.2f}"

    def per_token(self, method, what) -> float:
        return median(1000 * self.add(method, what, r) / self.add(method, "tokens", r) for r in self.rounds)

    def log(self, method, what, task=None) -> float:
        """The mean of a log entry over all rounds of decoding."""
        return mean(record[what] for r in self.rounds for name, count in self.counts[method][r] if task in (None, name) for record in count.log)

    def same(self, method, other) -> str:
        """How many outputs of the first round equal another method's."""
        pairs = [(a.output, b.output) for (_, a), (_, b) in zip(self.counts[method][0], self.counts[other][0])]
        return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def table(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows[:1] + [["---"] * len(rows[0])] + rows[1:]) + "\n"


def table_all(bench: Bench):
    """Every method at its defaults beside transformers' own."""
    gamma, draft = bench.args.gamma, f"draft of {bench.args.gamma} tokens"
    runs = {"AR": bench.ours(autoregressive), f"speculative, {draft}": bench.ours(speculative, gamma=gamma), "ouroboros": bench.ours(ouroboros),
            "jacobi": bench.ours(jacobi), "lookahead": bench.ours(lookahead), "lookahead, window 0": bench.ours(lookahead, window=0), **bench.bita("bita", tree="efficient"),
            **bench.bita("bita, chain", tree="chain"), "specinfer": bench.ours(specinfer, gamma=gamma), "spectr": bench.ours(spectr, gamma=gamma),
            "bild (lossy)": bench.ours(bild), "mjsd (lossy)": bench.ours(mjsd)}
    trained = load(bench.args.cllm, bench.args.device, bench.args.dtype)[0]
    if trained.config.vocab_size == bench.target.config.vocab_size:
        runs["cllm (another model)"] = bench.ours(cllm, target=trained)
    runs = {name: run for name, run in runs.items() if name == "AR" or not bench.args.only or name.startswith(tuple(bench.args.only))}
    peers = {"`generate`": bench.theirs(), f"`generate`, assistant, {draft}": bench.theirs(draft=True), "`generate`, prompt lookup of 4": bench.theirs(prompt_lookup_num_tokens=4)}
    pairs = [(a, b) for a, b in zip(("AR", f"speculative, {draft}", "lookahead, window 0"), peers) if a in runs]
    results, names = bench.measure(runs | peers), list(bench.prompts)
    greedy = bench.args.temperature == 0
    rows = [["method", "tokens per target call", "tokens/s", "x AR", *(f"x AR, {name}" for name in names), "realised share", "ms a token: target", "draft", "rest",
             *(["output as AR's"] if greedy else [])]]
    for method in runs | peers:
        target, draft, total = (results.per_token(method, what) for what in ("target", "draft", "total"))
        rows.append([method, results.per_call(method), results.median_speed(method), results.ratio(method, "AR"), *(results.ratio(method, "AR", name) for name in names),
                     f"{float(results.ratio(method, 'AR')) / float(results.per_call(method)):.0%}", f"{target:.2f}", f"{draft:.2f}", f"{total - target - draft:.2f}",
                     *([results.same(method, "AR")] if greedy else [])])
    print(table(rows))
    print(table([["ratio of tokens/s", "all", *names]] + [[f"{a} / {b}", results.ratio(a, b), *(results.ratio(a, b, name) for name in names)] for a, b in pairs]))


PARTS = {"inputs, masks, positions": (CachedLM, ("forward",)), "cache": (CachedLM, ("start", "commit", "truncate")),
         "argmax, sampling, transfer": (Sampler, ("__call__", "probs", "draw", "uniform"))}


class Stopwatch:
    """Seconds spent in the functions of PARTS, without what they call of one another; a context."""

    def __init__(self):
        self.seconds, self.inside = dict.fromkeys(PARTS, 0.0), False

    def timed(self, function, part):
        def wrapper(*args, **options):
            if self.inside:
                return function(*args, **options)
            self.inside, began = True, time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.inside = False
                self.seconds[part] += time.perf_counter() - began
        return wrapper

    def __enter__(self):
        self.before = [(owner, name, getattr(owner, name), part) for part, (owner, names) in PARTS.items() for name in names]
        for owner, name, function, part in self.before:
            setattr(owner, name, self.timed(function, part))
        return self

    def __exit__(self, *_):
        for owner, name, function, _ in self.before:
            setattr(owner, name, function)


def table_profile(bench: Bench):
    """Where the time of a round goes: a target call and all that leads to it."""
    sampled = Sampler(1.0, seed=bench.args.seed)
    runs = {"AR": (autoregressive, None, {}), "speculative": (speculative, None, dict(gamma=bench.args.gamma)), "ouroboros": (ouroboros, None, {}), "jacobi": (jacobi, None, {}),
            "lookahead": (lookahead, None, {}), "lookahead, window 0": (lookahead, None, dict(window=0)), "mjsd": (mjsd, None, {}), "mjgd": (mjgd, None, {}), "bild": (bild, None, {}),
            "AR, sampled": (autoregressive, sampled, {}), "speculative, sampled": (speculative, sampled, dict(gamma=bench.args.gamma)),
            "specinfer, sampled": (specinfer, sampled, {}), "spectr, sampled": (spectr, sampled, {}), "mjsd, sampled": (mjsd, sampled, {})}
    runs = {name: bench.ours(method, sample, **options) for name, (method, sample, options) in runs.items()} | bench.bita("bita")
    prompts = [prompt for some in bench.prompts.values() for prompt in some]
    rows = [["a round", "ms", "target", "draft", *PARTS, "Python", "outside forward passes"]]
    for name, run in tqdm(runs.items(), desc="profile", leave=False):
        for prompt in prompts:  # warm-up
            run(prompt)
        run.new_round()
        with Stopwatch() as watch:
            counts = [run(prompt) for prompt in prompts]
        calls, total, target, draft = (sum(getattr(count, what) for count in counts) for what in ("calls", "total", "target", "draft"))
        spent = watch.seconds | {"inputs, masks, positions": watch.seconds["inputs, masks, positions"] - target - draft}
        parts = [target, draft, *spent.values(), total - target - draft - sum(spent.values())]
        rows.append([name, *(f"{1000 * x / calls:.2f}" for x in (total, *parts)), f"{1 - (target + draft) / total:.1%}"])
    print(table(rows))


def table_ouroboros(bench: Bench):
    """The paper's ablations: Table 4, Table 16 (locality), Fig. 6 (suffixes), Table 1 (#Match), Table 14 (lengths), Table 3 (temperatures)."""
    off = dict(phrases=False, lengthen=False, verification=False, history=False)
    steps = {"none (greedy draft, token by token)": off, "+ phrases": off | dict(phrases=True), "+ lengthen": off | dict(phrases=True, lengthen=True),
             "+ verification": dict(history=False), "+ history": {}}
    runs = {"AR": bench.ours(autoregressive)} | {name: bench.ours(ouroboros, **options) for name, options in steps.items()}
    runs |= {f"speculative, gamma {gamma}": bench.ours(speculative, gamma=gamma) for gamma in (bench.args.gamma,)}
    results = bench.measure(runs)
    rows = [["Table 4: mechanisms", "tokens per target call", "tokens/s", "x AR", "tokens drafted a round", "accepted", "draft calls per drafted token"]]
    for method in runs:
        logged = ["-"] * 3
        if method in steps:
            logged = [f"{results.log(method, 'drafted'):.2f}", f"{results.log(method, 'accepted'):.2f}", f"{results.log(method, 'calls') / results.log(method, 'drafted'):.2f}"]
        elif method != "AR":
            logged = [f"{results.log(method, 'drafted'):.2f}", f"{results.log(method, 'accepted'):.2f}", "1.00"]
        rows.append([method, results.per_call(method), results.median_speed(method), results.ratio(method, "AR"), *logged])
    print(table(rows))

    pairs = [(name, prompt) for name, some in bench.prompts.items() for prompt in some]
    mixed = random.Random(0).sample(pairs, len(pairs))
    rows = [["Table 16: the tasks", "pool", "tokens per target call", "tokens/s", "x AR"]]
    for how, order in (("shuffled", mixed), ("one after another", pairs)):
        runs = {"AR": bench.ours(autoregressive), "fresh for each prompt": bench.ours(ouroboros, history=False), "kept": bench.ours(ouroboros)}
        results = bench.measure(runs, order)
        rows += [[how, pool, results.per_call(pool), results.median_speed(pool), results.ratio(pool, "AR")] for pool in list(runs)[1:]]
    print(table(rows))

    runs = {"AR": bench.ours(autoregressive), "0": bench.ours(ouroboros, history=False, lengthen=False)}
    runs |= {str(k): bench.ours(ouroboros, history=False, suffixes=k) for k in (1, 2, 3, 5, 8)}
    results = bench.measure(runs)
    print(table([["Fig. 6: suffixes K", "tokens per target call", "tokens/s", "x AR"]] +
                [[k, results.per_call(k), results.median_speed(k), results.ratio(k, "AR")] for k in list(runs)[1:]]))

    results = bench.measure({"ouroboros": bench.ours(ouroboros, gamma=20, **off)})
    print(table([["Table 1: draft of 20 tokens", *bench.prompts], *([what, *(f"{results.log('ouroboros', key, name):.1f}" for name in bench.prompts)]
                                                                    for what, key in (("A", "accepted"), ("#Match", "matched")))]))

    rows = [["Table 14: at most", "tokens an answer", "speculative, x AR", "ouroboros, x AR", "tokens per target call: speculative", "ouroboros"]]
    for limit in (64, 128, 256, 512):
        bench.capacity += max(0, limit - bench.args.max_new_tokens)
        runs = {"AR": bench.ours(autoregressive, limit=limit), "speculative": bench.ours(speculative, limit=limit, gamma=bench.args.gamma), "ouroboros": bench.ours(ouroboros, limit=limit)}
        results = bench.measure(runs)
        rows.append([str(limit), f"{results.add('AR', 'tokens', 0) / len(pairs):.0f}", *(results.ratio(m, "AR") for m in list(runs)[1:]), *(results.per_call(m) for m in list(runs)[1:])])
    print(table(rows))

    rows = [["Table 3: temperature", "speculative, x AR", "lookahead, x AR", "ouroboros, x AR", "tokens per target call: speculative", "lookahead", "ouroboros"]]
    for temperature in (0.0, 0.5, 1.0):
        sample = Sampler(temperature, top_p=0.8 if temperature else 1.0, seed=bench.args.seed)
        runs = {"AR": bench.ours(autoregressive, sample), "speculative": bench.ours(speculative, sample, gamma=bench.args.gamma),
                "lookahead": bench.ours(lookahead, sample), "ouroboros": bench.ours(ouroboros, sample)}
        results = bench.measure(runs)
        rows.append([str(temperature), *(results.ratio(m, "AR") for m in list(runs)[1:]), *(results.per_call(m) for m in list(runs)[1:])])
    print(table(rows))


def quality(bench: Bench, run: Ours) -> dict:
    """Speed, energy, perplexity and accuracy of one method over all prompts."""
    prompts = [prompt for some in bench.prompts.values() for prompt in some]
    run(prompts[0])
    run.new_round()
    with EnergyMeter(bench.target.device) as meter:
        counts = [run(prompt) for prompt in prompts]
    tokens, outputs = sum(c.tokens for c in counts), [c.output for c in counts]
    lm = CachedLM(bench.target, bench.capacity, bench.vocab)
    graded = [tasks.grade(bench.examples[tuple(p)], bench.tokenizer.decode(o, skip_special_tokens=True)) for p, o in zip(prompts, outputs) if tuple(p) in bench.examples]
    return {"speed": tokens / sum(c.total for c in counts), "per call": tokens / sum(c.calls for c in counts), "perplexity": perplexity(lm, prompts, outputs),
            "joules": None if meter.joules is None else meter.joules / tokens, "accuracy": mean(graded) if graded else None,
            "accepted": mean(r["accepted"] for c in counts for r in c.log) if counts[0].log and "accepted" in counts[0].log[0] else 0.0}


def quality_rows(bench: Bench, runs: dict) -> list[list[str]]:
    """A row of figures for each method: medians over the rounds, the methods of a round one after another."""
    rounds = [{name: quality(bench, run) for name, run in runs.items()} for _ in tqdm(range(bench.args.rounds), leave=False)]
    first, rows = next(iter(runs)), []
    for name in runs:
        def middle(what):
            return median(r[name][what] for r in rounds)
        rows.append([name, f"{middle('speed'):.0f}", f"{median(r[name]['speed'] / r[first]['speed'] for r in rounds):.2f}",
                     "not measured" if rounds[0][name]["joules"] is None else f"{middle('joules'):.3f}", f"{middle('perplexity'):.3f}",
                     "-" if rounds[0][name]["accuracy"] is None else f"{middle('accuracy'):.0%}", f"{middle('per call'):.2f}", f"{middle('accepted'):.2f}"])
    return rows


def table_mjsd(bench: Bench):
    """The paper's Table 2 (sampled with its warps, and greedy), Table 3 (beams), Fig. 4 (τ), Fig. 1 (MJGD), Table 1 (rows a call), and
    the acceptance of several drafts."""
    head = ["tokens/s", "speed-up", "J/token", "perplexity", "accuracy", "tokens per target call", "accepted a round (Fig. 3)"]
    for title, sample in (("Table 2: temperature 1, top-k 20, top-p 0.9", Sampler(1.0, 20, 0.9, bench.args.seed)), ("Table 2: temperature 0", Sampler(0))):
        runs = {"AR": bench.ours(autoregressive, sample), "speculative": bench.ours(speculative, sample, gamma=4),
                "BiLD": bench.ours(bild, sample, gamma=10, fallback=0.9, rollback=2.0), "SpecTr, 4 drafts": bench.ours(spectr, sample, gamma=4, num_drafts=4),
                "MJSD": bench.ours(mjsd, sample), "MJSD, width 4": bench.ours(mjsd, sample, width=4)}
        print(table([[title, *head], *quality_rows(bench, runs)]))
    sample = Sampler(1.0, 20, 0.9, bench.args.seed)
    for title, options in (("Table 3: beams", [dict(beams=n) for n in (2, 4, 6, 8)]), ("Fig. 4: τ", [dict(tau=t) for t in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)])):
        runs = {"AR": bench.ours(autoregressive, sample)} | {str(*o.values()): bench.ours(mjsd, sample, **o) for o in options}
        print(table([[title, *head], *quality_rows(bench, runs)]))
    runs = {f"MJGD, K = {k}": bench.ours(mjgd, Sampler(0), k=k) for k in range(1, 6)}
    print(table([["Fig. 1", *head], *quality_rows(bench, runs)]))

    lm, prompt, rows = CachedLM(bench.target, bench.capacity, bench.vocab), next(p for some in bench.prompts.values() for p in some), []
    lm.prefill(prompt, width=64)
    for n in (1, 2, 4, 8, 16, 32, 64):
        times, calls = [], 50
        for _ in range(2):  # on a GPU the second one is captured
            lm.forward([5] * n)
            lm.truncate(len(prompt))
        with EnergyMeter(bench.target.device) as meter:
            for _ in range(calls):
                began = time.perf_counter()
                lm.forward([5] * n)
                times.append(time.perf_counter() - began)
                lm.truncate(len(prompt))
        rows.append([str(n), f"{1000 * median(times):.2f}", f"{1000 * median(times) / n:.2f}", "not measured" if meter.joules is None else f"{meter.joules / calls:.3f}"])
    print(table([["Table 1: rows a call", "ms a call", "ms a row", "J a call"], *rows]))

    rows, sample = [], Sampler(1.0, seed=bench.args.seed)
    for name, method in (("SpecInfer", specinfer), ("SpecTr", spectr)):
        for k in (1, 2, 4):
            run = bench.ours(method, sample, gamma=4, num_drafts=k)
            accepted = [r["accepted"] for some in bench.prompts.values() for p in some for _ in range(bench.args.rounds) for r in run(p).log]
            rows.append([f"{name}, {k} drafts", f"{mean(accepted):.3f} ± {stdev(accepted) / len(accepted) ** 0.5:.3f}"])
    print(table([["temperature 1, gamma 4", "accepted a round, mean ± standard error"], *rows]))


def table_bita(bench: Bench):
    """The paper's Table 4 (trees) and Table 3 (prompting designs; give their files with --adapters)."""
    trees = {"straightforward": dict(tree="chain")} | {f"full tree, k = {k}": dict(tree="full", k=k) for k in (1, 2, 3, 4)}
    trees |= {f"efficient tree, k = {k}": dict(tree="efficient", k=k) for k in (1, 3, 5)}
    tunings = {path: load_tuning(path, bench.target)[0] for path in bench.args.adapters}
    adapters = {f"{Path(path).stem}: {tuning.design}, {len(tuning.masks)} masks": path for path, tuning in tunings.items()}
    for title, some in (("Table 4: tree", [bench.bita(name, **options) for name, options in trees.items()]), ("Tables 3, Figs. 8 and 9: tuning", [bench.bita(name, path) for name, path in adapters.items()])):
        runs = {"AR": bench.ours(autoregressive)} | {name: run for each in some for name, run in each.items()}
        if len(runs) > 1:
            results = bench.measure(runs)
            print(table([[title, "tokens per target call", *bench.prompts, "rows a call", "tokens/s", "x AR", "output as AR's"]] +
                        [[name, results.per_call(name), *(results.per_call(name, task) for task in bench.prompts), f"{results.log(name, 'rows'):.1f}",
                          results.median_speed(name), results.ratio(name, "AR"), results.same(name, "AR")] for name in list(runs)[1:]]))


def table_cllm(bench: Bench):
    """The paper's Table 1 and Table 3, before and after consistency training, and for more models (--cllms) how they do at other lengths (Table 4, Table 6, Fig. 3).
    Only prompts count whose AR output passes the repetition filter for both models; accuracy and loss are of 100 held-out prompts of each task."""
    def loaded(path):
        return load(path, bench.args.device, bench.args.dtype)[0]

    def quality(model):
        if not bench.examples:
            return ["-"] * (len(bench.prompts) + 1)
        figures = recipe.evaluate(model, bench.tokenizer)
        return [*(f"{figures[task]['accuracy']:.0%}" for task in bench.prompts), f"{mean(figures[task]['loss'] for task in bench.prompts):.4f}"]

    def repeating(ar, prompt):
        output = ar(prompt).output
        return tasks.loops(output) or repeats(output, bench.tokenizer.decode(output))
    models, methods = {"target": bench.target, "CLLM": loaded(bench.args.cllm)}, {"AR": autoregressive, "Jacobi": cllm, "lookahead": lookahead}
    ars = [bench.ours(autoregressive, Sampler(0), target=model) for model in models.values()]
    before, bench.prompts = bench.prompts, {name: [p for p in some if not any(repeating(ar, p) for ar in ars)] for name, some in bench.prompts.items()}
    print(f"{sum(map(len, before.values())) - sum(map(len, bench.prompts.values()))} more prompts left out for repetition by either model\n")
    qualities = {name: quality(model) for name, model in models.items()}
    runs = {(name, how): bench.ours(method, target=model) for name, model in models.items() for how, method in methods.items()}
    results = bench.measure(runs)
    rows = [["Table 1", "tokens per call", *bench.prompts, "tokens/s", "x its AR", "x AR of the target", "output as its AR's", *(f"accuracy, {name}" for name in bench.prompts), "held-out loss"]]
    for name, how in runs:
        rows.append([f"{name} + {how}", results.per_call((name, how)), *(results.per_call((name, how), task) for task in bench.prompts), results.median_speed((name, how)),
                     results.ratio((name, how), (name, "AR")), results.ratio((name, how), ("target", "AR")), results.same((name, how), (name, "AR")), *qualities[name]])
    print(table(rows))
    rows = [["Table 3", "complete blocks", "fast-forward token count", "stationary token count"]]
    for name in models:
        blocks, gained, stationary = profile_of([record for _, count in results.counts[name, "Jacobi"][0] for record in count.log], bench.eos)
        rows.append([name, str(blocks), f"{gained:.2f}", f"{stationary:.2f}"])
    print(table(rows))
    lengths, rows, known = (4, 8, 16, 32, 64), [], dict(zip((bench.args.target, bench.args.cllm), models))
    for path in [*known, *bench.args.cllms]:
        model = models[known[path]] if path in known else loaded(path)
        runs = {n: bench.ours(cllm, target=model, block=n) for n in lengths}
        results = bench.measure({"AR": bench.ours(autoregressive)} | runs)
        rows.append([Path(path).name, *(f"{results.per_call(n)} ({results.ratio(n, 'AR')}x)" for n in lengths), *(qualities[known[path]] if path in known else quality(model))])
    print(table([["tokens per call (x AR of the target)", *(f"n = {n}" for n in lengths), *(f"accuracy, {name}" for name in bench.prompts), "held-out loss"], *rows]))


TABLES = {"all": table_all, "profile": table_profile, "ouroboros": table_ouroboros, "mjsd": table_mjsd, "bita": table_bita, "cllm": table_cllm}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--table", default="all", choices=TABLES)
    parser.add_argument("--target", default=str(ROOT / "models/target"))
    parser.add_argument("--draft", default=str(ROOT / "models/draft"))
    parser.add_argument("--adapter", default=str(ROOT / "models/bita.safetensors"), help="bita's prompt and mask tokens")
    parser.add_argument("--cllm", default=str(ROOT / "models/cllm"), help="the target after consistency training")
    parser.add_argument("--cllms", nargs="*", default=[], help="more such models for --table cllm to compare")
    parser.add_argument("--adapters", nargs="*", default=[], help="tunings for --table bita to compare")
    parser.add_argument("--prompts", type=Path, help="a file of prompts in place of the held-out tasks")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("-n", type=int, default=10, help="prompts of each task or category")
    parser.add_argument("--only", nargs="*", default=[], help="of --table all the methods of ours whose names begin so, and AR")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gamma", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the held-out prompts and of sampling")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    bench = Bench(args)
    print(f"`{' '.join(['python', *sys.argv])}`\n\n{bench.target.device.type}, {bench.target.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}; medians of "
          f"{args.rounds} rounds over {sum(map(len, bench.prompts.values()))} prompts ({bench.dropped} left out for loops)\n")
    TABLES[args.table](bench)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"bench: {error}")
