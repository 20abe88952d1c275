"""This script compares the two rules that verify a draft: token by token, and the whole block.

    python results/verification.py
    python results/verification.py --target DIR --draft DIR --chat --dtype bfloat16 --prompts FILE
    python results/verification.py --target DIR --blocks FILE --chat --dtype bfloat16 --prompts FILE

Sampled text differs from run to run, and so does the number of accepted guesses. The difference of
the rules would drown in that. So both rules are asked about the same drafts. For a draft and its
distributions the number of guesses that a rule accepts on average follows from the chances of its
coins, without tossing any:

    token    Σ_i Π_{j <= i} min(1, p(x_j) / q(x_j))     guess i and all before it pass
    block    Σ_i (1 - Π_{j >= i} (1 - h_j))             the coin of guess i or of a later one passes

The rounds are those of a text that block verification writes. A round's tokens are the accepted
guesses and one more. The interval of the gain is a bootstrap over the prompts. With --blocks the
draft is the target itself without some of its blocks (survey/draft_verify.py), drafting γ tokens
whatever their probability.
"""
import argparse
import random
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import speculative  # noqa: E402  (the path is set above)
from cli.loading import encode_prompts, load_checked  # noqa: E402
from common import CachedLM, Sampler, eos_ids, until, vocab_size  # noqa: E402
from models import tasks  # noqa: E402
from survey import draft_verify  # noqa: E402


class Chances(Sampler):
    """Keep the chances of a rule's coins instead of tossing them, and draw no token."""

    def uniform(self, shape, device):
        return self

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(probs), dtype=torch.long)

    def __lt__(self, chances: torch.Tensor) -> torch.Tensor:
        self.chances = chances.clamp(max=1).nan_to_num(0).flatten()
        return torch.zeros_like(chances, dtype=torch.bool)


def expect_tokens(p: torch.Tensor, q: torch.Tensor, guesses: list[int]) -> tuple[float, float]:
    """Compute how many tokens each rule makes of a draft on average.

    p, q     the target's distributions [γ+1, V] and the draft's [γ, V]
    guesses  the draft
    returns  the tokens of `verify_tokens` and of `verify_block`
    """
    coins = Chances()
    speculative.verify_tokens(p, q, guesses, coins)
    of_token = coins.chances.cumprod(0).sum()
    speculative.verify_block(p, q, guesses, coins)
    none_from_here = (1 - coins.chances).flip(0).cumprod(0)
    of_block = (1 - none_from_here).sum()
    return 1 + of_token.item(), 1 + of_block.item()


def run_prompt(decode, prompt: list[int], eos: set[int], most: int) -> list[tuple[float, float]]:
    """Write a text, and return each round's tokens to be expected of both rules.

    decode   a function (prompt, verify) that gives the chunks of a method with this rule
    """
    rounds = []

    def verify(p, q, guesses, sample):
        rounds.append(expect_tokens(p, q, guesses))
        return speculative.verify_block(p, q, guesses, sample)
    for _ in until(decode(prompt, verify), most, eos):
        pass
    return rounds


def decode_with_draft(target: CachedLM, draft: CachedLM, gamma: int, sample: Sampler):
    """Return a function (prompt, verify) that decodes with a draft model."""
    def decode(prompt, verify):
        speculative.VERIFICATIONS["both"] = verify
        return speculative.speculative(target, draft, prompt, gamma=gamma, verification="both",
                                       sample=sample)
    return decode


def decode_without_blocks(target: CachedLM, blocks: str, gamma: int, sample: Sampler):
    """Return a function (prompt, verify) that decodes with the target's own blocks."""
    def decode(prompt, verify):
        draft_verify.verify = verify
        return draft_verify.draft_verify(target, prompt, gamma=gamma, threshold=0.0,
                                         blocks=blocks, sample=sample)
    return decode


def compare(runs: list[list[tuple[float, float]]]) -> tuple[float, float, list[float]]:
    """Compute tokens per call of both rules and their ratio.

    runs     each prompt's rounds
    returns  the mean of `verify_tokens`, of `verify_block`, and the 95% interval of the ratio
    """
    def means(chosen) -> tuple[float, float]:
        rounds = torch.tensor([pair for run in chosen for pair in run])
        return tuple(rounds.mean(0).tolist())
    rng = random.Random(0)
    ratios = []
    for _ in range(1000):
        of_token, of_block = means(rng.choices(runs, k=len(runs)))
        ratios.append(of_block / of_token)
    ratios.sort()
    return *means(runs), [ratios[25], ratios[974]]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=str(ROOT / "models/target"))
    parser.add_argument("--draft", default=str(ROOT / "models/draft"))
    parser.add_argument("--blocks", metavar="FILE", help="draft without these blocks instead")
    parser.add_argument("--gammas", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="in place of held-out tasks")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("-n", type=int, default=30, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    args = parser.parse_args(argv)
    model, tokenizer = load_checked(args.target, None, args.dtype)
    target = CachedLM(model, vocab_size(model, tokenizer))
    if args.blocks:
        start, source = decode_without_blocks, args.blocks
    else:
        draft, _ = load_checked(args.draft, None, args.dtype)
        start, source = decode_with_draft, CachedLM(draft, target.vocab)
    if args.prompts:
        texts = tasks.read_prompts(args.prompts)[:args.n]
    else:
        texts = [example.prompt for task in tasks.TASKS
                 for example in tasks.take(task, "test", args.n // len(tasks.TASKS), 0)]
    prompts = encode_prompts([model], tokenizer, texts, args.chat)
    print("| temperature | γ | token by token | block | ratio | 95% interval | rounds |\n"
          "| --- | --- | --- | --- | --- | --- | --- |")
    for temperature in args.temperatures:
        for gamma in args.gammas:
            runs = [run_prompt(start(target, source, gamma, Sampler(temperature, seed=i)), prompt,
                               eos_ids(model, tokenizer), args.max_new_tokens)
                    for i, prompt in enumerate(prompts)]
            of_token, of_block, (low, high) = compare(runs)
            print(f"| {temperature} | {gamma} | {of_token:.3f} | {of_block:.3f} | "
                  f"{of_block / of_token:.3f} | {low:.3f} to {high:.3f} | "
                  f"{sum(map(len, runs))} |", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
