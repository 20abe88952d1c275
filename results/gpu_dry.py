"""Count what each method asks of a GPU, on a simulated one. Nothing is timed, and no GPU is needed.

    make gpu-dry
    python results/gpu_dry.py --temperature 0.7 --max-new-tokens 60

A small model on a fast GPU waits more than it computes. Four numbers say for what:

    launches   kernels that Python starts, for each call of the target and for each token. An eager
               call takes about as long as its launches where its kernels are short
    waits      how often Python waits until the GPU has given it numbers: the tokens that were
               chosen, coins, indices
    copies     how often numbers of Python go to the GPU
    ends       how often Python waits until a call of any model has ended, so as to time the call

The prompt is left out. tests/fake_cuda.py says what is simulated and how it is counted.
"""
import sys
from collections import Counter

from bench import ALL, ROOT, Bench, Ours, keep_fitting, options, run_script, table

sys.path.append(str(ROOT / "tests"))
from fake_cuda import FakeCuda  # noqa: E402  (the path is set in bench.py and above)


class Meter:
    """Count the kernels of the target's calls, and forget what a prompt takes.

    gpu       the simulated GPU
    launches  kernels of the target's calls so far
    """

    def __init__(self, gpu: FakeCuda, target):
        self.gpu, self.launches = gpu, 0
        self.forward, self.start = target.forward, target.start
        target.forward, target.start = self.count_call, self.forget_prompt

    def count_call(self, *args, counts: bool = True, **options):
        before = self.gpu.counts["launches"]
        logits = self.forward(*args, counts=counts, **options)
        self.launches += counts * (self.gpu.counts["launches"] - before)
        return logits

    def forget_prompt(self, *args, **options) -> None:
        before = Counter(self.gpu.counts)
        self.start(*args, **options)
        self.gpu.counts = before


def count(gpu: FakeCuda, name: str, method: Ours, prompts: list[list[int]]) -> list[str]:
    """Run a method on prompts; return its row of the table."""
    meter = Meter(gpu, method.models["target"])
    method(prompts[0])  # whatever is made once is made now
    gpu.counts.clear()
    meter.launches = 0
    counts = [method(prompt) for prompt in prompts]
    tokens, calls = sum(x.tokens for x in counts), sum(x.calls for x in counts)
    launches, *others = (gpu.counts[kind] / tokens
                         for kind in ("launches", "waits", "copies", "syncs"))
    print(name, file=sys.stderr)
    return [name, f"{meter.launches / calls:.0f}", f"{launches:.0f}",
            *(f"{a_token:.1f}" for a_token in others)]


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(device="cuda", dtype="float32", n=1, max_new_tokens=40, nodes=16)
    args = parser.parse_args()
    with FakeCuda() as gpu:
        bench = Bench(args)
        prompts = [prompt for _, prompt in bench.pairs()]
        rows = [count(gpu, *row, prompts) for row in keep_fitting(ALL, bench.row).items()]
    print("Counted on a simulated GPU; nothing was measured on one.\n")
    print(table([["method", "launches a target call", "launches a token", "waits a token",
                  "copies a token", "ends a token"], *rows]))


if __name__ == "__main__":
    sys.exit(run_script(main))
