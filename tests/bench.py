"""Every method and transformers' own `generate` on the same prompts in one run, as a Markdown table.

    make bench                                          # the embedded pair on held-out prompts of each task
    python tests/bench.py --target DIR --draft DIR --prompts FILE --chat

Each round gives every method every prompt, one after another, so that a noisy machine slows all alike; a ratio is taken within a
round and the median over the rounds is shown. Prompts whose AR output loops are left out: a model in a loop accepts every guess.
FILE holds a prompt a line, or JSON lines with "prompt", "question" or "turns" (the first turn is taken) and perhaps "category".
"""
import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "models")]
import tasks  # noqa: E402
from common import CachedLM, InputError, Run, Sampler, autoregressive, encode, eos_ids, load  # noqa: E402
from speculative import speculative  # noqa: E402


@dataclass
class Count:
    """What one method did on one prompt in one round."""
    tokens: int = 0
    calls: int = 0
    total: float = 0.0  # seconds
    target: float = 0.0
    draft: float = 0.0
    output: list[int] = field(default_factory=list)


class Ours:
    """A generator of this project."""

    def __init__(self, method, models, limit, eos, capacity, vocab, sample, **options):
        self.method, self.limit, self.eos, self.sample, self.options = method, limit, eos, sample, options
        self.models = {name: CachedLM(model, capacity, vocab) for name, model in models.items()}

    def __call__(self, prompt) -> Count:
        for lm in self.models.values():
            lm.calls, lm.rows, lm.seconds = 0, 0, 0.0
        run = Run(self.method, self.models, self.options)
        for _ in run.chunks(prompt, self.limit, self.eos, self.sample):
            pass
        return Count(run.tokens, self.models["target"].calls, run.seconds, self.models["target"].seconds,
                     self.models["draft"].seconds if "draft" in self.models else 0.0, run.outputs[0])


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


def methods(args, target, draft, eos, capacity, vocab) -> dict:
    """{name: callable from a prompt's ids to its Count}; transformers gets models of its own, with its own attention."""
    def plain(path):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype).to(target.device).eval()
        model.generation_config.pad_token_id = model.generation_config.pad_token_id or min(eos, default=0)
        return model
    sample = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
    ours, pair = (args.max_new_tokens, eos, capacity, vocab, sample), {"target": target, "draft": draft}
    assistant = plain(args.draft)
    assistant.generation_config.update(num_assistant_tokens=args.gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    return {"AR": Ours(autoregressive, {"target": target}, *ours),
            f"speculative, gamma {args.gamma}": Ours(speculative, pair, *ours, gamma=args.gamma),
            "generate": Theirs({"target": plain(args.target)}, args.max_new_tokens, sample, eos_token_id=sorted(eos)),
            f"generate, assistant, {args.gamma} tokens": Theirs({"target": plain(args.target), "draft": assistant}, args.max_new_tokens, sample, eos_token_id=sorted(eos))}


def table(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows[:1] + [["---"] * len(rows[0])] + rows[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", default=str(ROOT / "models/target"))
    parser.add_argument("--draft", default=str(ROOT / "models/draft"))
    parser.add_argument("--prompts", type=Path, help="a file of prompts in place of the held-out tasks")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("-n", type=int, default=10, help="prompts of each task or category")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gamma", type=int, default=5)
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

    target, tokenizer = load(args.target, args.device, args.dtype)
    draft, _ = load(args.draft, args.device, args.dtype)
    texts = read_prompts(args.prompts, args.n) if args.prompts else {t: [e.prompt for e in tasks.take(t, "test", args.n, args.seed)] for t in tasks.TASKS}
    prompts = {name: [encode(tokenizer, text, args.chat) for text in some] for name, some in texts.items()}
    capacity = max(len(p) for some in prompts.values() for p in some) + args.max_new_tokens
    vocab = min(m.get_output_embeddings().weight.shape[0] for m in (target, draft))
    runs = methods(args, target, draft, eos_ids(target, tokenizer), capacity, vocab)

    kept, dropped = {}, 0
    for name, some in prompts.items():  # also the warm-up of every method
        outputs = [{method: run(prompt).output for method, run in runs.items()} for prompt in tqdm(some, desc=f"{name}: warm-up", leave=False)]
        kept[name] = [prompt for prompt, output in zip(some, outputs) if not tasks.loops(output["AR"])]
        dropped += len(some) - len(kept[name])
        if args.temperature == 0:
            for method in runs:
                differ = sum(output[method] != output["AR"] for output in outputs)
                if differ:
                    print(f"{method}: output differs from AR's on {differ} of {len(some)} {name} prompts")
    results = {method: {name: [] for name in kept} for method in runs}  # [round][prompt] of Counts
    bar = tqdm(total=args.rounds * sum(map(len, kept.values())), desc="prompts")
    for _ in range(args.rounds):
        for name, some in kept.items():
            counts = {method: [] for method in runs}
            for prompt in some:
                for method, run in runs.items():
                    counts[method].append(run(prompt))
                bar.update()
            for method in runs:
                results[method][name].append(counts[method])
    bar.close()

    def add(method, what, r, names):
        return sum(getattr(count, what) for name in names for count in results[method][name][r])

    def speed(method, r, names):
        return add(method, "tokens", r, names) / add(method, "total", r, names)

    def ratio(method, other, names):
        return f"{median(speed(method, r, names) / speed(other, r, names) for r in range(args.rounds)):.2f}"

    def per_token(method, what):
        return median(1000 * add(method, what, r, kept) / add(method, "tokens", r, kept) for r in range(args.rounds))

    head = ["method", "tokens per target call", "tokens/s", "x AR", *(f"x AR, {name}" for name in kept), "ms a token: target", "draft", "rest"]
    lines = [head]
    for method in runs:
        tokens, calls = (sum(add(method, what, r, kept) for r in range(args.rounds)) for what in ("tokens", "calls"))
        target_ms, draft_ms, total_ms = (per_token(method, what) for what in ("target", "draft", "total"))
        lines.append([method, f"{tokens / calls:.2f}", f"{median(speed(method, r, kept) for r in range(args.rounds)):.0f}", ratio(method, "AR", kept),
                      *(ratio(method, "AR", [name]) for name in kept), f"{target_ms:.2f}", f"{draft_ms:.2f}", f"{total_ms - target_ms - draft_ms:.2f}"])
    print(f"\n{' '.join(sys.argv)}\n{target.device.type}, {target.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}; medians of {args.rounds} rounds over "
          f"{sum(map(len, kept.values()))} prompts ({dropped} left out for loops)\n\n{table(lines)}\n")
    us, them = list(runs)[:2], list(runs)[2:]
    print(table([["ratio of tokens/s", "all", *kept]] + [[f"{a} / {b}", ratio(a, b, kept), *(ratio(a, b, [name]) for name in kept)] for a, b in zip(us, them)]))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"bench: {error}")
