"""This script prints a table of Predictive Pipelined Decoding (Yang et al., arXiv 2307.05908).

    python results/ppd.py --prompts FILE

    model      layers 1 .. d ──┬── layers d + 1 .. L ──> the token
                               │
    worker 1   likeliest token └── layers 1 .. d, … of the next token
    worker k   k-th token      └── layers 1 .. d, … of the next token

An exit after layer d of L layers names the k likeliest tokens. While the model goes on, k workers
begin the next token, each from one of these tokens. A worker that began from the right token is
L - d layers ahead when the model has chosen it. Let p_correct say how often one of them is right.
Then a token takes this share of the time of all L layers:

    latency = 1 - p_correct (L - d) / L

Nothing is decoded here, since one machine has no workers that compute at the same time. SPEED
(Hooper et al., arXiv 2310.12072) pipelines early exits in a similar way.
"""
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from cli.main import main  # noqa: E402  (the path is set above)
from common import eos_ids  # noqa: E402
from models.training import answer_all  # noqa: E402
from survey.layerskip import measure_exit  # noqa: E402
from survey.views import depth_of  # noqa: E402


def ppd(model, tokenizer, prompts: list[list[int]], *, max_new_tokens: int = 60) -> None:
    """Print p_correct and the latency of a token, by d and k, on a model's own answers.

    max_new_tokens: the most tokens of an answer
    """
    answers = answer_all(model, eos_ids(model, tokenizer), prompts, max_new_tokens)
    data = [*zip(prompts, answers)]
    L = depth_of(model)
    depths = sorted({max(1, round(L * share)) for share in (0.25, 0.5, 0.75)})
    print("| layers | k | right | latency |\n| --- | --- | --- | --- |")
    for d, k in itertools.product(depths, (1, 3, 5)):
        right = measure_exit(model, data, d, k)
        print(f"| {d} of {L} | {k} | {right:.3f} | {1 - right * (L - d) / L:.3f} |")


if __name__ == "__main__":
    sys.exit(main([], None, ["ppd", *sys.argv[1:]], commands=[ppd]))
