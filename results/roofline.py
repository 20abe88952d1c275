"""Predict what a machine with other figures would make of a benchmark's run.

    python results/bench.py --save run.json                       # measured here
    python results/roofline.py run.json --machine h100 --weights 7.5e9 --layers 32
    python results/roofline.py run.json --bandwidth 2000e9 --flops 300e12 --launch 6e-6

NOTHING HERE IS MEASURED ON THE MACHINE THAT IT SPEAKS OF. How many tokens a call makes, and how
many rows it has, are taken from the run. What a call takes is computed:

    seconds of a call = max(bytes of the weights / bandwidth, launches × seconds of a launch)
                        + rows × 2 × weights / flops

The run's guesses are those of the run's models. A larger model has another acceptance, which no
arithmetic tells. Trees and drafts keep the sizes that paid on the machine of the run.

Left out: the cache's bytes, attention's arithmetic, sampling and Python. Methods in which these, or
the passes of trained heads and layers, take more than 10% of the measured time are left out too.
"""
import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from cli.text import Parser  # noqa: E402  (the path is set above)
from results.bench import table  # noqa: E402


class Machine(NamedTuple):
    """Hold what a machine does in a second."""
    bandwidth: float  # bytes that it reads
    flops: float  # operations, in the type of the weights
    launch: float  # seconds from one operation's start to the next one's
    name: str = "this machine"


COUNTS = {"tokens", "calls", "rows", "draft_calls", "draft_rows", "total", "target", "draft"}
REACHED = 0.75  # of a GPU's nominal bandwidth, what decoding programs reach (roofline.md)
MACHINES = {
    "h100": Machine(REACHED * 3350e9, 990e12, 6e-6, "H100 SXM"),
    "a100": Machine(REACHED * 2039e9, 312e12, 6e-6, "A100 SXM 80 GB"),
    "4090": Machine(REACHED * 1008e9, 165e12, 6e-6, "RTX 4090"),
    "m2-ultra": Machine(REACHED * 800e9, 27e12, 6e-6, "M2 Ultra"),
    "cpu": Machine(3.6e9, 60e9, 1.8e-5, "two CPU cores, float32"),  # fitted to embedded.json
}
OTHERS = 0.1  # of a method's time: how much may be no pass of a whole model
OPERATIONS = 42  # that one layer launches in an eager call, counted on a simulated GPU


class Model(NamedTuple):
    """Hold what a call of a model costs."""
    weights: float  # parameters that a call reads: all but the rows of the input embedding
    layers: int
    bytes: int = 2  # of a parameter


def call_seconds(machine: Machine, model: Model, rows: float) -> float:
    """Compute the seconds of one call.

    rows   of the call
    """
    reading = model.weights * model.bytes / machine.bandwidth
    launching = OPERATIONS * model.layers * machine.launch
    return max(reading, launching) + rows * 2 * model.weights / machine.flops


def predict(machine: Machine, models: dict[str, Model], run: dict, method: str) -> float:
    """Compute the tokens a second of a method, the passes over its prompts included.

    models   "target" and, where the run had one, "draft"
    run      as `read_run` gives it
    """
    counts, seconds = run["methods"][method], 0.0
    kinds = [("target", counts["calls"], counts["rows"]),
             ("draft", counts["draft_calls"], counts["draft_rows"])]
    for name, calls, rows in kinds:
        if calls:
            seconds += calls * call_seconds(machine, models[name], rows)
            seconds += run["prompts"] * call_seconds(machine, models[name], run["prompt_rows"])
    return counts["tokens"] / seconds


def list_methods(run: dict) -> dict[str, dict]:
    """List the methods whose time is that of whole passes of the target and the draft.

    The passes of trained heads and layers are not counted in a run. Where they, or Python, take
    more than OTHERS of the measured time, calls do not explain the method's speed.
    """
    return {name: counts for name, counts in run["methods"].items()
            if 1 - (counts["target"] + counts["draft"]) / counts["total"] <= OTHERS}


def show(run: dict, machine: Machine, models: dict[str, Model], measured: bool) -> str:
    """Make the table of a run's methods.

    measured   whether to put the measured speed-up beside the predicted one
    """
    head = ["method", "tokens per call", "rows a call", "tokens/s", "x AR"]
    rows = [head + ["measured x AR"] * measured]
    counts = run["methods"]["AR"]
    plain, measured_plain = predict(machine, models, run, "AR"), counts["tokens"] / counts["total"]
    for name, counts in list_methods(run).items():
        speed = predict(machine, models, run, name)
        row = [name, f"{counts['tokens'] / counts['calls']:.2f}", f"{counts['rows']:.1f}",
               f"{speed:.0f}", f"{speed / plain:.2f}"]
        real = counts["tokens"] / counts["total"] / measured_plain
        rows.append(row + [f"{real:.2f}"] * measured)
    return table(rows)


def read_run(path: str) -> dict:
    """Read what `results/bench.py --save` wrote."""
    try:
        run = json.loads(Path(path).read_text(encoding="utf-8"))
        models = {name: Model(**facts) for name, facts in run["models"].items()}
        run["methods"] = {"AR": run["methods"]["AR"], **run["methods"]}
        if "target" not in models or not all(COUNTS <= x.keys() for x in run["methods"].values()):
            raise ValueError("a part is missing")
        for name in ("prompts", "prompt_rows"):
            run[name] = float(run[name])
        return {**run, "models": models}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise argparse.ArgumentTypeError(
            f"expected a file that results/bench.py --save wrote, got {path!r}") from error


def positive(text: str) -> float:
    """Read a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def launch_cost(text: str) -> float:
    """Read the seconds of a launch, which may be 0."""
    return 0.0 if float(text) == 0 else positive(text)


def whole_number(text: str) -> int:
    """Read a whole number, 1 or more."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def choose_models(args: argparse.Namespace) -> dict[str, Model]:
    """Put the sizes of the command line in place of the run's.

    Without a size of its own the draft keeps its proportion to the target.
    """
    models = dict(args.run["models"])
    before = models["target"]
    size, depth = args.weights or before.weights, args.layers or before.layers
    models["target"] = Model(size, depth, args.bytes or before.bytes)
    if "draft" in models:
        draft = models["draft"]
        models["draft"] = Model(
            args.draft_weights or draft.weights * size / before.weights,
            args.draft_layers or max(1, round(draft.layers * depth / before.layers)),
            args.bytes or draft.bytes)
    return models


def main(argv: list[str] | None = None) -> int:
    """Print a prediction; return the exit status."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", type=read_run, help="written by results/bench.py --save")
    add("--machine", choices=MACHINES, default="h100", help="whose figures to begin with")
    add("--bandwidth", type=positive, help="bytes a second that the machine really reads")
    add("--flops", type=positive, help="operations a second in the type of the weights")
    add("--launch", type=launch_cost, help="seconds of a launch; 0: CUDA graphs")
    add("--weights", type=positive, help="the target's parameters (default: those of the run)")
    add("--layers", type=whole_number, help="the target's layers (default: those of the run)")
    add("--draft-weights", type=positive,
        help="the draft's parameters (default: in proportion to the target's)")
    add("--draft-layers", type=whole_number, help="the draft's layers (default: in proportion)")
    add("--bytes", type=whole_number, help="of a parameter: 4, 2 or 1 (default: those of the run)")
    args = parser.parse_args(argv)
    given = {name: getattr(args, name) for name in ("bandwidth", "flops", "launch")
             if getattr(args, name) is not None}
    machine, models = MACHINES[args.machine]._replace(**given), choose_models(args)
    own = args.machine == "cpu" and models == args.run["models"]
    print("A prediction. Nothing of it was measured on this machine:" if not own else
          "The machine of the run:", MACHINES[args.machine].name)
    for name, model in models.items():
        print(f"{name}: {model.weights:.3g} parameters, {model.layers} layers, a call of one row "
              f"{1000 * call_seconds(machine, model, 1):.2f} ms")
    print(f"\n{show(args.run, machine, models, own)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
