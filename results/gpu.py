"""Measure the project on a GPU in six minutes: whether it is exact there, and how fast.

    make gpu                                      # no .venv is needed: python3 results/gpu.py
    python results/gpu.py --step calls            # a step that make gpu leaves out
    python results/gpu.py --device cpu --small    # rehearse all steps on a CPU

Each step is a process of its own with a limit of time, so no step can stop those that follow. A
step saves each row as soon as it is measured. So a run that was cut off is still worth having:

    machine     the GPU, its driver, the versions, and the bandwidth of its memory by a copy
    exact       tests/test_lossless.py with all models on the GPU, and all tests marked `cuda`
    decode      every method on the embedded models by graphs, in float32 and bfloat16, and some
                methods without graphs
    sizes       milliseconds of calls of 1 to 64 rows, and the weights that a call of 1 row reads in
                a second, of models as large as Llama's 1B, 3B and 8B, whose weights are random
                numbers in bfloat16
    trainings   the peak memory of every training of memory.md at 8B

Three more steps are for whoever wants to make calls faster. Each runs by --step alone:

    calls       where the milliseconds of a captured call at 8B go: its kernels by time, and what
                torch.compile makes of the call if it compiles all that has no cache
    python      where Python's part of an AR token of the embedded target goes
    recurrent   a model with recurrent layers: whether it is exact, and its calls by rows
"""
import gc
import json
import subprocess
import sys
import tempfile
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

import torch
import transformers
from torch.utils.benchmark import Timer

import memory  # it sets the path for what follows
from bench import (ALL, ROOT, Bench, Parser, Results, build_peers, keep_fitting, parser_of,
                   run_script)
from cli.graphs import WIDTHS, GraphedLM
from common import autoregressive, greedy, until
from support.engine import EngineLM, list_layers
from support.files import check_result, shorten, write_text

SHARDS = 8  # processes that share the tests
KINDS = [("float32", "graphs"), ("bfloat16", "graphs"), ("float32", "eager"), ("bfloat16", "eager")]
# The methods that run without graphs as well:
FEW = {"autoregressive", "speculative --gamma 6", "ouroboros", "jacobi", "bita", "medusa", "eagle",
       "rest", "hybrid --guess none", "cllm", "`generate`"}
TIED = memory.BIG | {"intermediate_size": 8192, "tie_word_embeddings": True}
SIZES = {"8B": memory.BIG,
         "1B": TIED | {"hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64},
         "3B": TIED | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
                       "head_dim": 128}}


def seconds_of(act) -> float:
    """Return the mean seconds of ten calls of act(), after two to warm up."""
    return Timer("act()", globals={"act": act}).timeit(10).mean


def try_row(make, *args) -> dict:
    """Return the row that make(*args) measures, or one that says why it could not be measured."""
    try:
        return make(*args)
    except Exception as error:  # a GPU fails in many ways, and the next row may work
        return {"error": f"{type(error).__name__}: {shorten(error)}"}


def machine(args):
    yield "torch", {"said": f"python {sys.version.split()[0]}, torch {torch.__version__}, "
                            f"transformers {transformers.__version__}"}
    if args.device == "cuda" and torch.version.cuda:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]
        said = subprocess.run(asked, capture_output=True, encoding="utf-8").stdout
        yield "GPU", {"said": said.splitlines()[-1]}
    source = torch.ones(2 ** (20 if args.small else 32), dtype=torch.uint8, device=args.device)
    copied = torch.empty_like(source)
    seconds = seconds_of(lambda: copied.copy_(source))
    yield "copy", {"GB/s": 2 * len(source) / seconds / 1e9}


def exact(args):
    chosen = "llama and speculative and greedy" if args.small else "not law"
    lossless = ["--device", args.device, "tests/test_lossless.py", "-k", chosen]
    shards, processes = 1 if args.small else SHARDS, []
    with tempfile.TemporaryDirectory() as folder:  # where each process says what it has begun
        for tests in [*[lossless] * shards, ["-m", "cuda", "tests"]]:
            # Interrupted, pytest says which tests have failed so far. If it goes on, it is killed.
            command = ["timeout", "-k", "9", "-s", "INT", str(STEPS[exact] - 20), sys.executable,
                       "-m", "pytest", "-q", "-rf", "--tb=line", "--share", folder, *tests]
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE,
                                              stderr=subprocess.STDOUT, encoding="utf-8"))
        for part, process in enumerate(processes):
            lines = process.communicate()[0].splitlines()
            failed = [line[:400] for line in lines if line.startswith(("FAILED", "ERROR", "E  "))]
            yield f"part {part}", {"said": lines[-1], "failed": "; ".join(failed)}


def decode(args):
    line = ["--device", args.device, "-n", "1", "--rounds", "1", "--nodes", "16",
            "--max-new-tokens", "4" if args.small else "48"]
    for dtype, how in KINDS:
        more = ["--dtype", dtype, *["--graphs"] * (how == "graphs")]
        bench = Bench(parser_of(__doc__).parse_args(line + more))
        runs = dict(build_peers(bench).values()) | keep_fitting(ALL, bench.row)
        if how == "eager":
            runs = {name: run for name, run in runs.items() if name in FEW}
        found, plain = Results({}), "`generate`"

        def measure(name: str) -> dict:
            found.counts |= bench.measure({name: runs[name]}).counts
            return {"tokens per call": found.per_call(name), "tokens/s": found.speeds(name)[0],
                    "x generate": found.ratios(name, plain)[0],
                    "ms a call": 1000 * found.per_call(name, "target"),
                    "as generate": found.same(name, plain)}
        for name in runs:  # `generate` is the first
            yield f"{dtype}, {how}: {name}", try_row(measure, name)


@torch.inference_mode()
def sizes(args):
    for name, shape in ({"8B": memory.SMALL} if args.small else SIZES).items():
        model = memory.make_model(shape, args.device)
        read = sum(p.numel() for p in model.parameters())
        if not model.config.tie_word_embeddings:  # of the input's embedding a few rows are read
            read -= model.get_input_embeddings().weight.numel()

        def measure(run_as) -> dict:
            lm = run_as(model)
            lm.start([5] * (9 if args.small else 512))
            row = {str(n): 1000 * seconds_of(lambda: (lm.forward([7] * n), lm.truncate(lm.length)))
                   for n in WIDTHS[:7]}
            return row | {"GB/s of 1": 2 * read / row["1"] / 1e6}
        for how, run_as in ("eager", EngineLM), ("graphs", GraphedLM):
            yield f"{name}, {how}", try_row(measure, run_as)
        del model
        gc.collect()


@torch.inference_mode()
def calls(args):
    activities = [torch.profiler.ProfilerActivity.CPU]
    if args.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    model = memory.make_model(memory.SMALL if args.small else memory.BIG, args.device)

    def time_call(n: int) -> dict:
        lm = GraphedLM(model, waits=False)
        lm.start([5] * (9 if args.small else 512))

        def call() -> None:
            lm.forward([7] * n)
            lm.truncate(lm.length)
        row = {"ms": 1000 * seconds_of(call)}
        with torch.profiler.profile(activities=activities) as profile:
            call()
        spent = {x.key[:60]: x.self_device_time_total or x.self_cpu_time_total
                 for x in profile.key_averages()}
        best = sorted(spent, key=spent.get, reverse=True)[:12]
        return row | {name: round(spent[name] / 1000, 3) for name in best}
    for n in 1, 16:
        yield f"{n} rows", try_row(time_call, n)
    for layer in list_layers(model):  # attention asks for the cache, which no compiler should see
        for name, part in layer.named_children():
            if "attn" not in name:
                part.compile()
    for n in 1, 16:
        yield f"{n} rows, MLPs and norms compiled", try_row(time_call, n)


@torch.inference_mode()
def python(args):
    bench = Bench(parser_of(__doc__).parse_args(["--device", args.device, "-n", "1", "--graphs"]))
    lm = bench.row("autoregressive").models["target"]
    tokens = [token for chunk in until(autoregressive(lm, bench.pairs[0][1]), 40)
              for token in chunk]
    lm.start(bench.pairs[0][1] + tokens[:-1])  # from here on the model serves this step
    logits = lm.forward(tokens[-1:])
    lm.truncate(lm.length)
    positions, mask = lm.layout([-1], 1)
    inputs = torch.tensor([tokens[-1:]], device=lm.weight.device)
    parts = {"a call": lambda: (lm.forward([7]), lm.truncate(lm.length)),
             "its mask and positions": lambda: lm.layout([-1], 1),
             "its pass, with what is copied in and out": lambda: lm.run_model(
                 inputs, positions, mask, 1),
             "the choice of a token": lambda: greedy(logits)}
    for name, act in parts.items():
        yield name, {"ms": 1000 * seconds_of(act)}


@torch.inference_mode()
def recurrent(args):
    line = ["--device", args.device, "--dtype", "float32", "-n", "1", "--rounds", "1",
            "--max-new-tokens", "40", "--target", str(ROOT / "models/recurrent"),
            "--draft", str(ROOT / "models/draft")]
    bench = Bench(parser_of(__doc__).parse_args(line))
    runs = keep_fitting([ALL[0], "speculative --gamma 6", "ouroboros", "recycling --nodes 16"],
                        bench.row)
    plain = {"`generate`": build_peers(bench)["autoregressive"][1]}
    results = bench.measure(runs | plain)
    for name in runs:
        yield name, {"as generate": results.same(name, "`generate`"),
                     "x generate": results.ratios(name, "`generate`")[0]}
    lm = bench.cache(bench.args.target)
    lm.start([5] * 99)
    for n in WIDTHS[:7]:
        seconds = seconds_of(lambda: (lm.forward([7] * n), lm.truncate(lm.length)))
        yield f"a call of {n}", {"ms": 1000 * seconds}


def trainings(args):
    size = (memory.SMALL, (9, 6)) if args.small else (memory.BIG, memory.LENGTHS)

    def measure(line: str) -> dict:
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        memory.run_training(line, *size, args.device)
        peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
        return {"peak, GB": peak / 1e9}
    for line in memory.LINES:
        yield line, try_row(measure, line)
        gc.collect()


# Each step yields rows, a name and a dictionary of figures. It may take so many seconds:
STEPS = {machine: 30, exact: 110, decode: 130, sizes: 35, trainings: 40}
ALONE = (calls, python, recurrent)


def perform(args, step) -> None:
    """Run a step in this process, and save and print each of its rows."""
    kept = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    rows = kept[step.__name__] = {}
    for name, row in step(args):
        rows[name] = row
        write_text(args.out, json.dumps(kept, indent=1) + "\n")
        print(f"{step.__name__}: {name}: {json.dumps(row)}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the step that is asked for, or all of them, each in a process with a limit of time."""
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny models and few tokens")
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu.json")
    parser.add_argument("--step", choices=[step.__name__ for step in (*STEPS, *ALONE)],
                        help="run this step alone, here and without a limit")
    args = parser.parse_args(argv)
    check_result("out", args.out)
    command = [sys.executable, __file__, "--device", args.device, "--out", str(args.out),
               *["--small"] * args.small]
    failed = 0
    for step in (*STEPS, *ALONE):
        if args.step == step.__name__:
            perform(args, step)
    for step, limit in STEPS.items():
        if not args.step:
            process = subprocess.Popen([*command, "--step", step.__name__])
            try:
                failed += process.wait(limit) != 0
            except subprocess.TimeoutExpired:
                process.kill()  # nobody waits for it, since a driver may hold it for ever
                print(f"{step.__name__}: stopped after {limit} s", flush=True)
                failed += 1
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(run_script(main))
