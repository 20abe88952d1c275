"""Predictive Pipelined Decoding, a table and no decoding: Yang et al., arXiv 2307.05908.

    python results/ppd.py --prompts FILE

While a model goes on above layer d of L, k workers begin the next token, one from each of the k
likeliest tokens of an exit at layer d. A worker that began from the right token is L - d layers
ahead, so with p_correct, how often one is right, a token takes 1 - p_correct (L - d) / L of the L
layers. With one worker nothing is faster, so nothing is decoded here. (SPEED, Hooper et al., arXiv
2310.12072, pipelines early exits likewise.)
"""
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from cli.main import main  # noqa: E402  (the path is set above)
from common import eos_ids  # noqa: E402
from models.training import generate_answers  # noqa: E402
from survey.layerskip import measure_exit  # noqa: E402
from survey.views import depth_of  # noqa: E402


def ppd(model, tokenizer, prompts: list[list[int]], *, max_new_tokens: int = 60) -> None:
    """Print p_correct and the latency of a token, by d and k, on a model's own answers.

    max_new_tokens: of an answer
    """
    batches = generate_answers(model, eos_ids(model, tokenizer), prompts, max_new_tokens)
    answers = [answer for batch in batches for answer in batch]
    data = [(prompt, answer) for prompt, answer in zip(prompts, answers) if answer]
    L = depth_of(model)
    depths = sorted({max(1, round(L * share)) for share in (0.25, 0.5, 0.75)})
    print("| layers | k | right | latency |\n| --- | --- | --- | --- |")
    for d, k in itertools.product(depths, (1, 3, 5)):
        right = measure_exit(model, data, d, k)
        print(f"| {d} of {L} | {k} | {right:.3f} | {1 - right * (L - d) / L:.3f} |")


if __name__ == "__main__":
    sys.exit(main([], None, ["ppd", *sys.argv[1:]], commands=[ppd]))
