"""Count what each method asks of a GPU, on a simulated one. Nothing is timed, and no GPU is needed.

    make gpu-dry
    python results/gpu_dry.py --temperature 0.7 --max-new-tokens 60

A small model on a fast GPU waits more than it computes. Four numbers say for what:

    launches   kernels that Python starts. An eager call takes about as long as its launches where
               its kernels are short. Of AR they are those of a call of the target
    waits      how often Python waits until the GPU has given it numbers: the tokens that were
               chosen, coins, indices
    copies     how often numbers of Python go to the GPU
    ends       how often Python waits until a call of any model has ended, so as to time the call

The prompt is left out, and with it the first round. A method whose first round makes all tokens has
no figures (nan). tests/fake_cuda.py describes what is simulated, and how it is counted.
"""
import math
import sys
from collections import Counter

from bench import ALL, ROOT, Bench, Ours, keep_fitting, parser_of, run_script, table

sys.path.append(str(ROOT / "tests"))
from fake_cuda import FakeCuda  # noqa: E402  (the path is set in bench.py and above)


def count(gpu: FakeCuda, name: str, method: Ours, prompts: list[list[int]]) -> list[str]:
    """Run a method on prompts; return its row of the table."""
    method(prompts[0])  # whatever is made once is made now
    counts, tokens = Counter(), 0
    for prompt in prompts:
        chunks = method.start_run().decode(prompt, method.limit, method.sample)
        next(chunks)
        gpu.counts.clear()
        tokens += sum(map(len, chunks))
        counts += gpu.counts
    tokens = tokens or math.nan
    print(name, file=sys.stderr)
    return [name, f"{counts['launches'] / tokens:.0f}",
            *(f"{counts[kind] / tokens:.1f}" for kind in ("waits", "copies", "syncs"))]


def main() -> None:
    parser = parser_of(__doc__)
    parser.set_defaults(device="cuda", dtype="float32", n=1, max_new_tokens=40, nodes=16)
    args = parser.parse_args()
    with FakeCuda() as gpu:
        bench = Bench(args)
        prompts = [prompt for _, prompt in bench.pairs]
        runs = keep_fitting(ALL, bench.row)
        rows = keep_fitting(runs, lambda name: count(gpu, name, runs[name], prompts)).values()
    print("Counted on a simulated GPU; nothing was measured on one.\n")
    heads = ["launches a token", "waits a token", "copies a token", "ends a token"]
    print(table([["method", *heads], *rows]))


if __name__ == "__main__":
    sys.exit(run_script(main))
