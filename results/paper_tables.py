"""Measure the papers' own tables and figures, and where the time of a round goes.

    python results/paper_tables.py --table ouroboros            # or mjsd, bita, cllm, profile

Prompts, rounds and medians are those of bench.py. The energy of MJSD's tables comes from nvidia-smi
or from the CPU's own counters. Where a machine has neither, the table says "not measured".
"""
import itertools
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import mean, median, stdev

import torch
from tqdm import tqdm

from bench import Bench, Ours, ROOT, clock, options, perform, run_script, table

sys.path[:0] = [str(ROOT), str(ROOT / "models")]
import common  # noqa: E402  (the path is set above)
import train as recipe  # noqa: E402
from bita import load_tuning  # noqa: E402
from cllm import cllm, profile_of, repeats  # noqa: E402
from common import CachedLM, InputError, Sampler, autoregressive, greedy  # noqa: E402
from jacobi import jacobi, lookahead  # noqa: E402
from mjsd import mjgd, mjsd, perplexity  # noqa: E402
from models import tasks  # noqa: E402
from ouroboros import ouroboros  # noqa: E402
from speculative import speculative  # noqa: E402
from survey.lossy import bild  # noqa: E402
from survey.several_drafts import specinfer, spectr  # noqa: E402

GRADED = 100  # held-out prompts of each task that a model's accuracy and loss are of


# ------------------------------------------------------------------------- where the time goes

class Stopwatch:
    """Measure the time that functions take while the context lasts.

    parts    for each part (owner, name) pairs: functions of a class, an object or a module
    now      the clock
    seconds  the time spent in each part, without what its functions call of another part
    """

    def __init__(self, parts: dict[str, list[tuple]], now=time.perf_counter):
        self.parts, self.now, self.seconds = parts, now, dict.fromkeys(parts, 0.0)
        self.running, self.since = [], 0.0  # parts that have been entered and not left

    def switch(self) -> None:
        """Add the time since the last switch to the innermost part."""
        now = self.now()
        if self.running:
            self.seconds[self.running[-1]] += now - self.since
        self.since = now

    def timed(self, function, part: str):
        def wrapper(*args, **options):
            self.switch()
            self.running.append(part)
            try:
                return function(*args, **options)
            finally:
                self.switch()
                self.running.pop()
        return wrapper

    def __enter__(self):
        self.replaced = [(owner, name, getattr(owner, name))
                         for pairs in self.parts.values() for owner, name in pairs]
        for part, pairs in self.parts.items():
            for owner, name in pairs:
                setattr(owner, name, self.timed(getattr(owner, name), part))
        return self

    def __exit__(self, *_):
        for owner, name, function in self.replaced:
            setattr(owner, name, function)


PARTS = {
    "inputs, masks, positions": [(CachedLM, "forward"), (common, "attention_mask")],
    "cache": [(CachedLM, "start"), (CachedLM, "commit"), (CachedLM, "truncate")],
    "argmax, sampling, transfer": [(Sampler, x) for x in ("__call__", "probs", "draw", "uniform")]}


def table_profile(bench: Bench) -> None:
    """Print where the milliseconds of a round go.

    A round is a target call and all that leads to it. The passes over the prompts are shared out.
    """
    gamma, sampled = dict(gamma=bench.args.gamma), Sampler(1.0, seed=bench.args.seed)
    methods = {"AR": (autoregressive, {}), "speculative": (speculative, gamma),
               "ouroboros": (ouroboros, {}), "jacobi": (jacobi, {}), "lookahead": (lookahead, {}),
               "lookahead, W = 0": (lookahead, dict(W=0)), "mjsd": (mjsd, {}), "mjgd": (mjgd, {}),
               "bild": (bild, {})}
    runs = {name: bench.ours(method, greedy, **own) for name, (method, own) in methods.items()}
    runs |= bench.bita("bita", sample=greedy)
    methods = {"AR": (autoregressive, {}), "speculative": (speculative, gamma),
               "specinfer": (specinfer, {}), "spectr": (spectr, {}), "mjsd": (mjsd, {})}
    runs |= {f"{name}, sampled": bench.ours(method, sampled, **own)
             for name, (method, own) in methods.items()}
    rows = [["a round", "ms", "target", "draft", *PARTS, "Python", "outside forward passes"]]
    for name, run in tqdm(runs.items(), desc="profile", leave=False):
        for _, prompt in bench.pairs():  # warm-up
            run(prompt)
        run.new_round()
        passes = {model: [(lm, "run_model")] for model, lm in run.models.items()}
        with Stopwatch(passes | PARTS, lambda: clock(bench.target.device)) as watch:
            counts = [run(prompt) for _, prompt in bench.pairs()]
        calls, total = sum(c.calls for c in counts), sum(c.total for c in counts)
        spent = {"target": 0.0, "draft": 0.0} | watch.seconds
        spent["Python"] = total - sum(spent.values())
        rows.append([name, *(f"{1000 * x / calls:.2f}" for x in (total, *spent.values())),
                     f"{1 - (spent['target'] + spent['draft']) / total:.1%}"])
    print(table(rows))


# ----------------------------------------------------------------------------------- Ouroboros

def table_ouroboros(bench: Bench) -> None:
    for part in (print_mechanisms, print_locality, print_suffixes, print_matches, print_lengths,
                 print_temperatures):
        part(bench)


OFF = dict(phrases=False, lengthen=False, verification=False, history=False)
STEPS = {"none (greedy draft, token by token)": OFF, "+ phrases": OFF | dict(phrases=True),
         "+ lengthen": OFF | dict(phrases=True, lengthen=True),
         "+ verification": dict(history=False), "+ history": {}}
LENGTHS = (64, 128, 256, 512)  # new tokens of an answer, at most


def print_mechanisms(bench: Bench) -> None:
    """Print Table 4, one mechanism after the other."""
    runs = {"AR": bench.ours(autoregressive)}
    runs |= {name: bench.ours(ouroboros, **own) for name, own in STEPS.items()}
    speculation = f"speculative, gamma {bench.args.gamma}"
    runs[speculation] = bench.ours(speculative, gamma=bench.args.gamma)
    results = bench.measure(runs)
    rows = [["Table 4: mechanisms", "tokens per target call", "tokens/s", "x AR",
             "tokens drafted a round", "accepted", "draft calls per drafted token"]]
    for name in runs:
        logged = ["-"] * 3
        if name != "AR":
            drafted, accepted = (results.log(name, key) for key in ("drafted", "accepted"))
            calls = drafted if name == speculation else results.log(name, "calls")
            logged = [f"{x:.2f}" for x in (drafted, accepted, calls / drafted)]
        rows.append([*make_speed_row(results, name), *logged])
    print(table(rows))


def make_speed_row(results, name: str) -> list[str]:
    return [name, f"{results.per_call(name):.2f}", f"{results.speed(name):.0f}",
            f"{results.ratio(name, 'AR'):.2f}"]


def print_locality(bench: Bench) -> None:
    """Print Table 16, phrases of earlier prompts, with the tasks mixed and one after another."""
    pairs = bench.pairs()
    mixed = random.Random(0).sample(pairs, len(pairs))
    rows = [["Table 16: the tasks", "pool", "tokens per target call", "tokens/s", "x AR"]]
    for how, order in (("shuffled", mixed), ("one after another", pairs)):
        runs = {"AR": bench.ours(autoregressive),
                "fresh for each prompt": bench.ours(ouroboros, history=False),
                "kept": bench.ours(ouroboros)}
        results = bench.measure(runs, order)
        rows += [[how, *make_speed_row(results, name)] for name in list(runs)[1:]]
    print(table(rows))


def print_suffixes(bench: Bench) -> None:
    """Print Fig. 6, how many phrases are tried behind a draft."""
    runs = {"AR": bench.ours(autoregressive),
            "0": bench.ours(ouroboros, history=False, lengthen=False)}
    runs |= {str(K): bench.ours(ouroboros, history=False, K=K) for K in (1, 2, 3, 5, 8)}
    results = bench.measure(runs)
    print(table([["Fig. 6: suffixes K", "tokens per target call", "tokens/s", "x AR"],
                 *(make_speed_row(results, name) for name in list(runs)[1:])]))


def print_matches(bench: Bench) -> None:
    """Print Table 1: how much of a long draft is accepted (A) and how much matches."""
    results = bench.measure({"ouroboros": bench.ours(ouroboros, gamma=20, **OFF)})
    rows = [["Table 1: draft of 20 tokens", *bench.prompts]]
    for what, key in (("A", "accepted"), ("#Match", "matched")):
        rows.append([what, *(f"{results.log('ouroboros', key, x):.1f}" for x in bench.prompts)])
    print(table(rows))


def print_lengths(bench: Bench) -> None:
    """Print Table 14, longer and longer answers."""
    rows = [["Table 14: at most", "tokens an answer", "speculative, x AR", "ouroboros, x AR",
             "tokens per target call: speculative", "ouroboros"]]
    for limit in LENGTHS:
        runs = {"AR": bench.ours(autoregressive, limit=limit),
                "speculative": bench.ours(speculative, limit=limit, gamma=bench.args.gamma),
                "ouroboros": bench.ours(ouroboros, limit=limit)}
        results, (_, *names) = bench.measure(runs), runs
        rows.append([str(limit), f"{results.sums('AR', 'tokens')[0] / len(bench.pairs()):.0f}",
                     *(f"{results.ratio(name, 'AR'):.2f}" for name in names),
                     *(f"{results.per_call(name):.2f}" for name in names)])
    print(table(rows))


def print_temperatures(bench: Bench) -> None:
    """Print Table 3, greedy and sampled, with top-p 0.8."""
    rows = [["Table 3: temperature", "speculative, x AR", "lookahead, x AR", "ouroboros, x AR",
             "tokens per target call: speculative", "lookahead", "ouroboros"]]
    for temperature in (0.0, 0.5, 1.0):
        sample = Sampler(temperature, top_p=0.8 if temperature else 1.0, seed=bench.args.seed)
        runs = {"AR": bench.ours(autoregressive, sample),
                "speculative": bench.ours(speculative, sample, gamma=bench.args.gamma),
                "lookahead": bench.ours(lookahead, sample),
                "ouroboros": bench.ours(ouroboros, sample)}
        results, (_, *names) = bench.measure(runs), runs
        rows.append([str(temperature), *(f"{results.ratio(name, 'AR'):.2f}" for name in names),
                     *(f"{results.per_call(name):.2f}" for name in names)])
    print(table(rows))


# -------------------------------------------------------------------------------- joint decoding

COUNTERS = Path("/sys/class/powercap")  # a CPU's energy counters, where the kernel offers them


class EnergyMeter:
    """Measure the energy that is used while the context lasts.

    device    whose energy counts
    interval  seconds between two readings of a GPU
    joules    the energy after the context, or None where it cannot be measured

    A GPU's power, as nvidia-smi reports it, is integrated over time (the paper's App. B). Otherwise
    the counters of the CPU packages are read, which count all that runs on them.
    """

    def __init__(self, device: torch.device, interval: float = 0.1):
        self.device, self.interval, self.joules = device, interval, None

    def __enter__(self):
        self.process, self.before = None, []
        if self.device.type != "cuda":
            self.before = self._counters()
            return self
        uuid = str(torch.cuda.get_device_properties(self.device.index or 0).uuid)
        command = ["nvidia-smi", f"--id=GPU-{uuid.removeprefix('GPU-')}",  # torch leaves it out
                   "--query-gpu=power.draw", "--format=csv,noheader,nounits",
                   f"--loop-ms={round(1000 * self.interval)}"]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE,
                                            encoding="utf-8")
        except OSError:  # no such program
            return self
        self.watts, self.heard = [], threading.Event()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        self.heard.wait(10)  # it takes a while to start: what is short would have no reading
        self.began = time.perf_counter()
        return self

    def _read(self) -> None:
        """Read the watts that nvidia-smi prints, a line each, until it ends.

        A reading is a number like "80.25", the power of the whole board. A GPU without a reading
        gives "[N/A]" or "[Not Supported]", and a driver that fails gives a sentence. These lines
        are left out.
        """
        for line in self.process.stdout:
            try:
                self.watts.append((time.perf_counter(), float(line)))
            except ValueError:
                pass
            self.heard.set()
        self.heard.set()  # it has ended

    def _counters(self) -> list[tuple[int, int]]:
        """Read the counter of each CPU package.

        returns  (microjoules, the last value before the counter begins again) of each package, or
                 [] where no counter may be read
        """
        names = ("energy_uj", "max_energy_range_uj")
        try:
            return [tuple(int((zone / name).read_text(encoding="utf-8")) for name in names)
                    for zone in sorted(COUNTERS.glob("intel-rapl:?"))]
        except OSError:
            return []

    def __exit__(self, *_):
        if self.process:
            ended = time.perf_counter()
            with self.process:
                self.process.terminate()
                self.reader.join()
            self.joules = integrate(self.watts, self.began, ended)
        elif self.before:
            used = ((after - before) % (top + 1)
                    for (before, top), (after, _) in zip(self.before, self._counters()))
            self.joules = sum(used) / 1e6


def integrate(readings: list[tuple[float, float]], began: float, ended: float) -> float | None:
    """Compute the energy in joules from readings of the power, by the trapezoid rule.

    readings  (seconds, watts); before the first and after the last reading the power stays the same
    began     the first second
    ended     the last second
    returns   joules, or None without any reading
    """
    if not readings:
        return None
    readings = [(began, readings[0][1]), *(r for r in readings if began < r[0] < ended),
                (ended, readings[-1][1])]
    return sum((t1 - t0) * (p0 + p1) / 2
               for (t0, p0), (t1, p1) in itertools.pairwise(readings))


CALLS = 50  # that Table 1 takes the median of
HEAD = ["tokens/s", "speed-up", "J/token", "perplexity", "accuracy", "tokens per target call",
        "accepted a round (Fig. 3)"]


def measure_quality(bench: Bench, run: Ours, lm: CachedLM) -> dict[str, float | None]:
    """Run one method over all prompts and return the figures of HEAD, without the speed-up.

    lm  the target, under which the perplexity is
    """
    prompts = [prompt for _, prompt in bench.pairs()]
    run(prompts[0])  # warm-up
    run.new_round()
    with EnergyMeter(bench.target.device) as meter:
        counts = [run(prompt) for prompt in prompts]
    tokens, outputs = sum(c.tokens for c in counts), [c.output for c in counts]
    graded = bench.graded(prompts, outputs)
    accepted = [record["accepted"] for c in counts for record in c.log if "accepted" in record]
    return {"speed": tokens / sum(c.total for c in counts),
            "joules": None if meter.joules is None else meter.joules / tokens,
            "perplexity": perplexity(lm, prompts, outputs),
            "accuracy": mean(graded) if graded else None,
            "per call": tokens / sum(c.calls for c in counts),
            "accepted": mean(accepted) if accepted else None}


def make_quality_table(bench: Bench, title: str, runs: dict[str, Ours]) -> str:
    """Make a table with a row for each method, medians over the rounds.

    runs  methods by name, of which the first is the one that speed-ups are over

    In a round each method gets all prompts before the next method does, since the energy of a
    method can only be read over a longer time.
    """
    lm, first, rows = bench.cached(bench.target), next(iter(runs)), [[title, *HEAD]]
    rounds = [{name: measure_quality(bench, run, lm) for name, run in runs.items()}
              for _ in tqdm(range(bench.args.rounds), desc=title, leave=False)]
    for name in runs:
        def cell(what: str, form: str, missing: str = "-") -> str:
            values = [figures[name][what] for figures in rounds]
            return missing if None in values else format(median(values), form)
        speed_up = median(figures[name]["speed"] / figures[first]["speed"] for figures in rounds)
        rows.append([name, cell("speed", ".0f"), f"{speed_up:.2f}",
                     cell("joules", ".3f", "not measured"), cell("perplexity", ".3f"),
                     cell("accuracy", ".0%"), cell("per call", ".2f"), cell("accepted", ".2f")])
    return table(rows)


def table_mjsd(bench: Bench) -> None:
    warped = Sampler(1.0, 20, 0.9, bench.args.seed)
    for title, sample in (("Table 2: temperature 1, top-k 20, top-p 0.9", warped),
                          ("Table 2: temperature 0", greedy)):
        print(make_quality_table(bench, title, {
            "AR": bench.ours(autoregressive, sample),
            "speculative": bench.ours(speculative, sample, gamma=4),
            "BiLD": bench.ours(bild, sample, gamma=10, fallback=0.9, rollback=2.0),
            "SpecTr, 4 drafts": bench.ours(spectr, sample, gamma=4, K=4),
            "MJSD": bench.ours(mjsd, sample), "MJSD, width 4": bench.ours(mjsd, sample, width=4)}))
    for title, name, values in (("Table 3: beams", "beams", (2, 4, 6, 8)),
                                ("Fig. 4: τ", "tau", (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0))):
        runs = {str(x): bench.ours(mjsd, warped, **{name: x}) for x in values}
        print(make_quality_table(bench, title, {"AR": bench.ours(autoregressive, warped)} | runs))
    runs = {f"MJGD, K = {K}": bench.ours(mjgd, greedy, K=K) for K in range(1, 6)}
    print(make_quality_table(bench, "Fig. 1", runs))
    print_rows_a_call(bench)
    print_several_drafts(bench)


def print_rows_a_call(bench: Bench) -> None:
    """Print Table 1, what a call costs that has more rows."""
    rows = [["Table 1: rows a call", "ms a call", "ms a row", "J a call"]]
    (_, prompt), lm = bench.pairs()[0], bench.cached(bench.target)
    lm.start(prompt)
    for n in (1, 2, 4, 8, 16, 32, 64):
        times = []
        lm.forward([prompt[-1]] * n)  # on a GPU the first one is captured
        lm.truncate(len(prompt))
        with EnergyMeter(bench.target.device) as meter:
            for _ in range(CALLS):
                began = time.perf_counter()
                lm.forward([prompt[-1]] * n)
                times.append(1000 * (time.perf_counter() - began))
                lm.truncate(len(prompt))
        joules = "not measured" if meter.joules is None else f"{meter.joules / CALLS:.3f}"
        rows.append([str(n), f"{median(times):.2f}", f"{median(times) / n:.2f}", joules])
    print(table(rows))


def print_several_drafts(bench: Bench) -> None:
    """Print what more drafts bring at temperature 1."""
    rows = [["temperature 1, gamma 4", "accepted a round, mean ± standard error"]]
    sample = Sampler(1.0, seed=bench.args.seed)
    for name, method in (("SpecInfer", specinfer), ("SpecTr", spectr)):
        for K in (1, 2, 4):
            run = bench.ours(method, sample, gamma=4, K=K)
            accepted = [record["accepted"] for _, prompt in bench.pairs()
                        for _ in range(bench.args.rounds) for record in run(prompt).log]
            error = stdev(accepted) / len(accepted) ** 0.5
            rows.append([f"{name}, {K} drafts", f"{mean(accepted):.3f} ± {error:.3f}"])
    print(table(rows))


# ----------------------------------------------------------------------------------------- BiTA

def table_bita(bench: Bench) -> None:
    """Print Table 4, and with --tunings Table 3 and Figs. 8 and 9."""
    trees = {"straightforward": dict(tree="chain")}
    trees |= {f"full tree, k = {k}": dict(tree="full", k=k) for k in (1, 2, 3, 4)}
    trees |= {f"efficient tree, k = {k}": dict(tree="efficient", k=k) for k in (1, 3, 5)}
    trees["best tree"] = dict(tree="best")
    runs, tuned = {}, {}
    for name, own in trees.items():
        runs |= bench.bita(name, **own)
    for path in bench.args.tunings:
        tuning = load_tuning(path, bench.target)
        name = f"{Path(path).stem}: {tuning.design}, {len(tuning.masks)} masks"
        tuned |= bench.bita(name, path)
    for title, some in (("Table 4: tree", runs), ("Table 3, Figs. 8 and 9: tuning", tuned)):
        if some:
            results = bench.measure({"AR": bench.ours(autoregressive)} | some)
            rows = [[title, "tokens per target call", *bench.prompts, "rows a call", "tokens/s",
                     "x AR", "output as AR's"]]
            for name in some:
                per_call = [results.per_call(name, x) for x in (None, *bench.prompts)]
                rows.append([name, *(f"{x:.2f}" for x in per_call),
                             f"{results.log(name, 'rows'):.1f}", f"{results.speed(name):.0f}",
                             f"{results.ratio(name, 'AR'):.2f}", results.same(name, "AR")])
            print(table(rows))


# ---------------------------------------------------------------------------- consistency LLMs

def grades(bench: Bench, model) -> list[str]:
    """Grade GRADED held-out prompts: return the accuracy on each task, and the loss."""
    if not bench.examples:
        return ["-"] * (len(bench.prompts) + 1)
    figures = recipe.evaluate(model, bench.tokenizer, GRADED)
    return [*(f"{figures[task]['accuracy']:.0%}" for task in bench.prompts),
            f"{mean(figures[task]['loss'] for task in bench.prompts):.4f}"]


def table_cllm(bench: Bench) -> None:
    """Print Tables 1, 3, 4 and 6 and Fig. 3, before and after consistency training.

    The last table has other lengths of a block, and the models of --cllms. Those prompts count that
    neither of the two models answers with repetition.
    """
    models = {"target": bench.target, "CLLM": bench.load(bench.args.cllm)}
    ars = [bench.ours(autoregressive, greedy, target=model) for model in models.values()]

    def repeating(prompt: list[int]) -> bool:
        outputs = [ar(prompt).output for ar in ars]
        return any(tasks.loops(x) or repeats(x, bench.tokenizer.decode(x)) for x in outputs)
    kept = {name: [prompt for prompt in some if not repeating(prompt)]
            for name, some in bench.prompts.items()}
    kept, before = {name: some for name, some in kept.items() if some}, len(bench.pairs())
    if not kept:
        raise InputError("expected a prompt that neither model answers with repetition")
    bench.prompts = kept
    print(f"{before - len(bench.pairs())} more prompts left out for repetition by either model\n")
    graded = {name: grades(bench, model) for name, model in models.items()}
    of_quality = [*(f"accuracy, {name}" for name in bench.prompts), "held-out loss"]

    methods = {"AR": autoregressive, "Jacobi": cllm, "lookahead": lookahead}
    results = bench.measure({(name, how): bench.ours(method, target=model)
                             for name, model in models.items() for how, method in methods.items()})
    rows = [["Table 1", "tokens per call", *bench.prompts, "tokens/s", "x its AR",
             "x AR of the target", "output as its AR's", *of_quality]]
    for name, how in results.counts:
        per_call = [results.per_call((name, how), x) for x in (None, *bench.prompts)]
        ratios = [results.ratio((name, how), (other, "AR")) for other in (name, "target")]
        rows.append([f"{name} + {how}", *(f"{x:.2f}" for x in per_call),
                     f"{results.speed((name, how)):.0f}", *(f"{x:.2f}" for x in ratios),
                     results.same((name, how), (name, "AR")), *graded[name]])
    print(table(rows))

    rows = [["Table 3", "complete blocks", "fast-forward token count", "stationary token count"]]
    for name in models:
        log = [record for _, count in results.counts[name, "Jacobi"][0] for record in count.log]
        blocks, gained, stationary = profile_of(log, bench.eos)
        rows.append([name, str(blocks), f"{gained:.2f}", f"{stationary:.2f}"])
    print(table(rows))

    sizes, files = (4, 8, 16, 32, 64), dict(zip((bench.args.target, bench.args.cllm), models))
    rows = [["tokens per call (x AR of the target)", *(f"n = {n}" for n in sizes), *of_quality]]
    for path in [*files, *bench.args.cllms]:
        model = models[files[path]] if path in files else bench.load(path)
        runs = {n: bench.ours(cllm, target=model, n=n) for n in sizes}
        results = bench.measure({"AR": bench.ours(autoregressive)} | runs)
        cells = [f"{results.per_call(n):.2f} ({results.ratio(n, 'AR'):.2f}x)" for n in sizes]
        figures = graded[files[path]] if path in files else grades(bench, model)
        rows.append([Path(path).name, *cells, *figures])
    print(table(rows))


# ---------------------------------------------------------------------------- the command line

TABLES = {"ouroboros": table_ouroboros, "mjsd": table_mjsd, "bita": table_bita, "cllm": table_cllm,
          "profile": table_profile}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--table", required=True, choices=TABLES)
    parser.add_argument("--cllms", nargs="*", default=[], help="more models for --table cllm")
    parser.add_argument("--tunings", nargs="*", default=[], help="tunings for --table bita")
    perform(parser, lambda bench: TABLES[bench.args.table](bench))


if __name__ == "__main__":
    sys.exit(run_script(main))
