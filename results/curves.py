"""Where the papers' claims begin to hold on a real model: curves, not single points.

    python results/curves.py consistency --target MODEL --data FILE --work DIR  # cllm.py, its steps
    python results/curves.py perplexity --target MODEL --draft DIR --prompts FILE --chat --work DIR
    python results/curves.py drafts --target MODEL --drafts DIR ... --prompts FILE --chat --work DIR
    python results/curves.py lengths --target MODEL --adapters DIR --prompts FILE --chat --work DIR

What was measured is kept in --work: a stopped run goes on.
"""
import argparse
import hashlib
import html
import itertools
import json
import math
import random
import sys
from pathlib import Path
from statistics import mean, median
from typing import Callable

import torch
from tqdm import tqdm

from bench import Bench, Results, ROOT, options, perform, table

sys.path[:0] = [str(ROOT), str(ROOT / "models")]
from cli.text import Parser, cut_message, set_encodings  # noqa: E402  (the path is set above)
from cllm import fit, read_examples  # noqa: E402
from common import (CachedLM, InputError, Sampler, autoregressive,  # noqa: E402
                    context_length, eos_ids, greedy, load, row_costs, until, vocab_size)
from jacobi import lookahead  # noqa: E402
from mjsd import mjsd, perplexity  # noqa: E402
from models.training import digest, read_whole_lines  # noqa: E402
from ouroboros import ouroboros  # noqa: E402
from speculative import speculative  # noqa: E402
from survey.lossy import bild  # noqa: E402


class Kept:
    """Keep what was measured, by name, a line of JSON each.

    of  all that the figures depend on besides the target, the prompts and what decodes them

    A figure that is kept is not measured again. A line that was cut off is.
    """

    def __init__(self, bench: Bench, *of):
        args = bench.args
        settings = (digest(bench.target.state_dict()), str(bench.target.dtype),
                    str(bench.target.device), args.graphs, sorted(bench.eos),
                    [prompt for _, prompt in bench.pairs()], args.max_new_tokens, *of)
        args.work.mkdir(parents=True, exist_ok=True)
        self.path = args.work / f"{args.command}-{digest({}, *settings)}.jsonl"
        with open(self.path, "a+b") as file:
            self.known = dict(map(json.loads, read_whole_lines(file)))

    def __call__(self, name: str, make: Callable):
        if name not in self.known:
            self.known[name] = json.loads(json.dumps(make()))
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps([name, self.known[name]]) + "\n")
        return self.known[name]


# ---------------------------------------------------------------------------- consistency LLMs

def choose_one_block(rows: list[dict]) -> list[dict]:
    """Choose one block of each answer at random; the states of the others are not trained on."""
    rng = random.Random(0)
    return [row | {"blocks": rng.sample(row["blocks"], 1)} for row in rows]


RUNS = {"long": {}, "short": {}, "short, w = 1": dict(w=1.0),
        "short, one block of each answer": dict(choose=choose_one_block),
        "short, a quarter of the answers": dict(choose=lambda rows: rows[::4])}


def consistency(args) -> None:
    """Print CLLM's Tables 3 and 6 over the steps of a training run.

    The trained model of the long run stays in the folder `cllm` of --work.
    """
    untrained, tokenizer = load(args.target, args.device, "float32")
    n, rows, held_out = read_examples(args.data, untrained, seed=0)
    rows, held_out = ([row for row in some if len(row["prompt"]) <= args.longest]
                      for some in (rows, held_out))
    if not rows or not held_out:
        raise InputError(f"expected prompts of at most {args.longest} tokens")
    print(f"{len(rows)} answers to train on, {len(held_out)} held out, {n} tokens a block\n")
    before = CachedLM(untrained, vocab_size(untrained, tokenizer))
    eos = eos_ids(untrained, tokenizer)
    prompts = [row["prompt"] for row in held_out[:args.shown]]
    shown = []  # in float32, as what is trained: trajectories may be of bfloat16
    for prompt in prompts:
        chunks = until(autoregressive(before, prompt), args.tokens, eos)
        shown.append({"prompt": prompt, "answer": [x for chunk in chunks for x in chunk]})
    head = ["run", "step", "Jacobi tokens per call", "answers' least and most", "fast-forwarded",
            "stationary", "consistency loss", "AR loss", "answers kept for 32 tokens",
            "perplexity before"]
    lines, answers = [head], {}
    work = args.work / digest({}, shown, args.reports)  # checkpoints keep figures of these
    work.mkdir(parents=True, exist_ok=True)

    def watch(some: list[list[int]]) -> dict:
        return {"perplexity": perplexity(before, prompts, some), "answers": some}

    for name in args.runs:
        model, curve = train_one(args, name, rows, held_out, eos, n, shown=shown, watch=watch,
                                 work=work)
        lines += [format_consistency(name, step, x) for step, x in sorted(curve.items())]
        answers[name] = curve[max(curve)]["answers"]
        if name == "long":
            model.to(torch.bfloat16).save_pretrained(args.work / "cllm")
            tokenizer.save_pretrained(args.work / "cllm")
    print(table(lines))
    for name, some in answers.items():
        print_answers(name, tokenizer, [row["answer"] for row in shown], some)


def train_one(args, name: str, rows: list, held_out: list, eos: set[int], n: int,
              **hooks) -> tuple:
    """Train a fresh copy of the target as the run of this name asks.

    hooks    `shown`, `watch` and `work` of cllm.py's `fit`
    returns  the trained model, and its curve {step: figures}
    """
    own = dict(w=10.0, choose=list) | RUNS[name]
    length = dict(steps=args.short, reports=1)
    if name == "long":
        length = dict(steps=args.steps, reports=args.reports)
    model, _ = load(args.target, args.device, "float32")
    curve = fit(model, own["choose"](rows), held_out, eos, n, batch=args.batch,
                states=args.states, lr=args.lr, w=own["w"], **hooks, **length)
    return model, curve


def format_consistency(name: str, step: int, x: dict) -> list[str]:
    """Format the figures x that a run of this name had after a step."""
    return [name, str(step), f"{x['per_call']:.2f}",
            f"[{min(x['each']):.2f}, {max(x['each']):.2f}]",
            f"{x['fast_forwarded']:.2f}", f"{x['stationary']:.2f}",
            f"{x['consistency']:.3f}", f"{x['ar']:.3f}", f"{x['kept']:.0%}",
            f"{x['perplexity']:.2f}"]


def print_answers(name: str, tokenizer, before: list[list[int]], after: list[list[int]]) -> None:
    """Print the first 40 tokens of each held-out answer, before a run and after it."""
    pairs = [["before", f"after, {name}"]]
    for some in zip(before, after):
        pairs.append([tokenizer.decode(x[:40]).replace("\n", " ").replace("|", "/")
                      for x in some])
    print(table(pairs))


# ---------------------------------------------------------------- MJSD's perplexity, by the draft

class Mixture:
    """Stand in for a draft between two cached models.

    a  the target's share

    The logits (1 - a) log q + a log p are those of the models' geometric mixture.
    """

    def __init__(self, draft: CachedLM, target: CachedLM, a: float):
        self.models, self.a = (draft, target), a

    def __getattr__(self, name: str):
        return getattr(self.models[0], name)

    def forward(self, *given, **how) -> torch.Tensor:
        log_q, log_p = (lm.forward(*given, **how).float().log_softmax(-1) for lm in self.models)
        return (1 - self.a) * log_q + self.a * log_p

    def start(self, *given) -> None:
        for lm in self.models:
            lm.start(*given)

    def commit(self, nodes) -> None:
        nodes = [*nodes]
        for lm in self.models:
            lm.commit(nodes)


def table_perplexity(bench: Bench) -> None:
    """Print the perplexity of MJSD's text under the target, by the quality of the draft.

    p and q are warped as in Appendix D, by top-20 and then top-p 0.9. The perplexity is unwarped.
    """
    args, prompts = bench.args, [prompt for _, prompt in bench.pairs()]
    target = bench.cached(bench.target)
    kept = Kept(bench)
    drafts = {f"a = {a:g}": (digest(bench.draft.state_dict(), a), mixture(bench, a))
              for a in args.shares}
    for path in args.drafts:
        model = bench.load(path)
        drafts[Path(path).name] = (digest(model.state_dict()), bench.cached(model))
    methods = {f"{n} beams": (mjsd, dict(gamma=4, beams=n, eos=bench.eos)) for n in args.beams}
    methods |= {"BiLD": (bild, dict(gamma=10, fallback=0.9, rollback=2.0)),
                "speculative": (speculative, dict(gamma=4))}

    def run(name: str, method, draft: list, seed: int, i: int, **own) -> list:
        def make() -> list:
            sample, log = Sampler(1.0, 20, 0.9, seed), []
            chunks = method(target, *draft, prompts[i], sample=sample, **own,
                            **({"log": log} if draft else {}))
            text = [x for chunk in until(chunks, args.max_new_tokens, bench.eos) for x in chunk]
            accepted = [record["accepted"] for record in log if "accepted" in record]
            nats = len(text) * math.log(perplexity(target, [prompts[i]], [text]))
            return [nats, len(text), mean(accepted) if accepted else 0.0, text]
        return kept(f"{name} {seed} {i}", make)

    def runs(name: str, method, draft: list, **own) -> list[list]:
        """Return (nats, tokens, accepted a round, text) of each seed and each prompt."""
        return [[run(name, method, draft, seed, i, **own) for i in range(len(prompts))]
                for seed in tqdm(args.seeds, desc=name)]
    ar = runs("AR", autoregressive, [])
    texts = [some[-1] for some in ar[0]]
    found, heads = [], ["draft", "1 - TVD", *methods]
    for name, (key, draft) in drafts.items():
        agreement = kept(f"agreement {key} {args.seeds[0]}",
                         lambda: measure_agreement(target, draft, prompts, texts))
        made = [runs(f"{x} {key}", method, [draft], **own) for x, (method, own) in methods.items()]
        found.append(([name, f"{agreement:.2f}"], made))
    for title, cell in (
            (f"AR, sampled: {pool_perplexity(ar):.2f} {format_spread(ar)}; "
             "perplexity, least and most of the seeds",
             lambda some: f"{pool_perplexity(some):.2f} {format_spread(some)}"),
            ("by AR's, and the middle 90% of draws of prompts and seeds",
             lambda some: compare_with_ar(some, ar)),
            ("tokens of drafts accepted a round, texts weighing alike",
             lambda some: f"{mean(x[2] for seed in some for x in seed):.2f}")):
        print(f"{title}:\n")
        print(table([heads, *([*row, *map(cell, made)] for row, made in found)]))


def mixture(bench: Bench, a: float):
    draft = bench.cached(bench.draft)
    if a == 0:
        return draft
    return Mixture(draft, bench.cached(bench.target), a)


@torch.inference_mode()
def measure_agreement(target: CachedLM, draft, prompts: list[list[int]],
                      texts: list[list[int]]) -> float:
    """Return the mean of 1 - TVD of the two models' warped distributions along these texts."""
    warp, found = Sampler(1.0, 20, 0.9), []
    for prompt, text in zip(prompts, texts):
        probs = []
        for lm in (target, draft):
            lm.start(prompt[:-1])
            probs.append(warp.probs(lm.forward([prompt[-1], *text[:-1]])))
        found += torch.minimum(*probs).sum(-1).tolist()
    return mean(found)


def pool_perplexity(runs: list[list]) -> float:
    """Return the perplexity over all tokens of runs [seed][prompt]."""
    return math.exp(sum(x[0] for some in runs for x in some)
                    / sum(x[1] for some in runs for x in some))


def format_spread(runs: list[list]) -> str:
    """Make a text of the least and the largest perplexity of the seeds."""
    each = [pool_perplexity([some]) for some in runs]
    return f"[{min(each):.2f}, {max(each):.2f}]"


def compare_with_ar(runs: list[list], ar: list[list]) -> str:
    """Make a text of a perplexity over AR's on the same prompts and seeds.

    The brackets hold the middle 90% of 1,000 resamples of the prompts and of the seeds. A resample
    takes the same prompts and seeds for the method and for AR.
    """
    rng, ratios = random.Random(0), []
    for _ in range(1000):
        some = rng.choices(range(len(ar[0])), k=len(ar[0]))
        seeds = rng.choices(range(len(ar)), k=len(ar))
        one, other = (pool_perplexity([[x[seed][i] for i in some] for seed in seeds])
                      for x in (runs, ar))
        ratios.append(one / other)
    ratios.sort()
    middle = f"[{ratios[50]:.2f}, {ratios[949]:.2f}]" if len(ar) * len(ar[0]) > 1 else "-"
    return f"{pool_perplexity(runs) / pool_perplexity(ar):.2f} {middle}"


# ------------------------------------------------------------------------------ drafts of any size

GAMMAS = (2, 4, 8)  # tokens of a draft
WIDEST = 16  # rows of a call whose seconds are measured
PAPER = {"HumanEval": (11.16, 12), "MBPP": (6.14, 6), "GSM8K": (5.23, 7),  # Ouroboros, Tables 11
         "CNN/DM": (4.71, 5), "WMT16": (2.41, 2)}  # and 12: Yi-34B/6B, block efficiency and γ
SHARE = 6 / 34  # of that draft's parameters in the target's, taken for its cost


def expect_tokens(alpha: float, gamma: int) -> float:
    """Return the expected tokens of a round (Leviathan et al., Eq. 1)."""
    return gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def predict_speed(alpha: float, c: float, gamma: int, verify: float = 1.0) -> float:
    """Return the expected speed-up.

    alpha   the acceptance
    c       the cost of a draft call, in target calls
    gamma   tokens of a draft
    verify  the cost of a verification, in target calls

    This is Theorem 3.8 of Leviathan et al., and Ouroboros' Eq. 5 with A + 1 tokens a round.
    """
    return expect_tokens(alpha, gamma) / (gamma * c + verify)


def predict_whole(speed: float, target: float, draft: float) -> float:
    """Return the speed-up of whole answers, the passes over their prompts included.

    speed   how many times as fast as AR's the tokens come
    target  the share of AR's time that the target's passes over the prompts take
    draft   the time of the draft's passes over the prompts, as a share of AR's time
    """
    return 1 / ((1 - target) / speed + target + draft)


def table_drafts(bench: Bench) -> None:
    """Print the measured and the predicted speed with drafts of several sizes.

    Speculative decoding, Ouroboros and `generate` are measured. --picture FILE draws the plane of
    acceptance and cost.
    """
    args = bench.args
    every = [prompt for _, prompt in bench.pairs()]
    kept = Kept(bench, torch.get_num_threads(), args.rounds, args.gamma)
    rows = [["draft", "agrees (α)", "cost of a call (c)", *(f"γ {g}: predicted" for g in GAMMAS),
             *(f"γ {g}: x AR" for g in GAMMAS), f"assisted `generate`, γ {args.gamma}", "Ouroboros",
             "predicted, Eq. 6", "Ouroboros / best speculative"]]
    points = {}
    for path in args.drafts:
        bench.draft = bench.load(path)
        x = kept(digest(bench.draft.state_dict()), lambda: measure_draft(bench, path, every))
        guesses = [predict_whole(predict_speed(x["alpha"], x["c"], g, x["verify"][str(g)]),
                                 *x["prompts"])
                   for g in GAMMAS]
        measured = [x["speculative"][str(g)] for g in GAMMAS]
        name = Path(path).name
        points[name] = (x["alpha"], x["c"], max(measured))
        rows.append([name, f"{x['alpha']:.2f}", f"{x['c']:.2f}", *(f"{y:.2f}" for y in guesses),
                     *(f"{x['speculative'][g]:.2f} {x['spread'][g]}" for g in map(str, GAMMAS)),
                     *(f"{x[name]:.2f} {x['spread'][name]}" for name in ("assisted", "ouroboros")),
                     f"{predict_whole(x['eq6'], *x['prompts']):.2f}",
                     f"{x['ouroboros'] / max(measured):.2f}"])
    print(table(rows))
    if args.picture:
        args.picture.write_text(draw_plane(points), encoding="utf-8")


def measure_draft(bench: Bench, path: str, prompts: list[list[int]]) -> dict:
    """Measure the figures of bench.draft.

    path     the directory of that model
    prompts  each a category of its own
    returns  "alpha", the share of the target's greedy tokens that it guesses
             "c" and "verify", the costs of a draft call and of a verification, in target calls
             the speed-ups of each method
             "prompts", the time of the prompts' passes, of target and draft, as a share of AR's
    """
    bench.args.draft = path  # what `theirs` loads
    Bench.plain.cache_clear()  # transformers' own copies: of the last draft
    runs = {"AR": bench.ours(autoregressive)}
    runs |= {g: bench.ours(speculative, gamma=g) for g in GAMMAS}
    runs |= {"ouroboros": bench.ours(ouroboros), "assisted": bench.theirs("draft")}
    results = bench.measure(runs, number_prompts(prompts))
    target, draft = bench.cached(bench.target), bench.cached(bench.draft)
    right = []
    for prompt, (_, count) in zip(prompts, results.counts["AR"][0]):
        target.start(prompt[:-1])
        draft.start(prompt[:-1])
        chosen = greedy(draft.forward([prompt[-1], *count.output[:-1]]))
        draft.truncate(draft.length)
        right += [x == y for x, y in zip(chosen, count.output)]
    costs, c = row_costs(target, WIDEST), row_costs(draft, WIDEST)
    total = median(results.sums("AR", "total"))
    # Ouroboros' Eq. 6 with what was measured: tokens, draft calls and rows of a round
    counts = [count for some in results.rounds("ouroboros") for count in some]
    rows = min(WIDEST, round(mean(count.rows for count in counts)))
    draft_rows = min(WIDEST, round(mean(count.draft_rows for count in counts)))
    a_round = results.log("ouroboros", "calls") * c[draft_rows] + costs[rows]
    return {"alpha": mean(right), "c": c[1] / costs[1],
            "verify": {g: costs[g + 1] / costs[1] for g in GAMMAS},
            "speculative": {g: results.ratio(g, "AR") for g in GAMMAS},
            "assisted": results.ratio("assisted", "AR"),
            "ouroboros": results.ratio("ouroboros", "AR"),
            "spread": {name: format_extremes(results, name) for name in list(runs)[1:]},
            "prompts": [lm.prompt_seconds / total for lm in (target, draft)],
            "eq6": results.per_call("ouroboros") * costs[1] / a_round}


def find_alpha(tokens: float, gamma: int) -> float:
    """Find the acceptance with which a round makes so many tokens, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expect_tokens(middle, gamma) < tokens else (low, middle)
    return low


def draw_plane(points: dict[str, tuple[float, float, float]]) -> str:
    """Draw the plane of acceptance and cost as an SVG picture.

    points  {name: (acceptance, cost, measured speed-up)} of the drafts

    The lines are those of equal speed-up by the best γ up to 16, where a call of γ + 1 rows costs
    what one row does. The pairs of the Ouroboros paper are drawn as well.
    """
    width, height, left, low = 640, 420, 60, 380

    def place(alpha: float, c: float) -> tuple[float, float]:
        return left + alpha * (width - left - 20), low - c / top * (low - 20)
    top = max([1.0, *(c for _, c, _ in points.values())])
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
             'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" '
             'fill="white"/>']
    for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
        x, y = place(tick, tick * top)
        parts.append(f'<text x="{x:.0f}" y="{low + 16}" text-anchor="middle">{tick}</text>'
                     f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{tick * top:.3g}'
                     '</text>')
    parts.append(f'<path d="M{left} 20V{low}H{width - 20}" fill="none" stroke="black"/>'
                 f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">acceptance α'
                 '</text><text x="16" y="200" transform="rotate(-90 16 200)" '
                 'text-anchor="middle">cost c of a draft call, in target calls</text>')
    for speed in (1, 1.5, 2, 3):
        line = []
        for step in range(101):
            alpha = step / 100
            c = max((expect_tokens(alpha, g) / speed - 1) / g for g in range(1, 17))
            if 0 <= c <= 1:
                line.append("{:.1f},{:.1f}".format(*place(alpha, c)))
        x, y = map(float, line[-1].split(","))
        parts.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="gray"/>'
                     f'<text x="{x - 4}" y="{max(32, y + 14)}" text-anchor="end" fill="gray">'
                     f'{speed}x</text>')
    label = 0.0
    for name, (alpha, c, speed) in sorted(points.items(), key=lambda point: -point[1][1]):
        x, y = place(alpha, c)
        label = max(label + 13, y + 4)  # below the one before
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#06c"/><text '
                     f'x="{x + 7:.1f}" y="{label:.1f}" fill="#06c">{html.escape(name)}: '
                     f'{speed:.2f}x</text>')
    for name, (tokens, gamma) in PAPER.items():
        x, y = place(find_alpha(tokens, gamma), SHARE)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#a40"/><text x="{x:.1f}" '
                     f'y="{y + 12:.1f}" text-anchor="end" fill="#a40" '
                     f'transform="rotate(-60 {x:.1f} {y + 12:.1f})">{name}</text>')
    return "\n".join(parts) + "\n</svg>\n"


# -------------------------------------------------------------------------------- long contexts

def table_lengths(bench: Bench) -> None:
    """Print REST, the hybrid, EAGLE, lookahead and AR by the length of the context.

    A context is text of other prompts before the prompt's own.
    """
    args, rng = bench.args, random.Random(0)
    every = [prompt for _, prompt in bench.pairs()]
    kept = Kept(bench, torch.get_num_threads(), args.rounds, args.nodes, digest_parts(args))
    if max(args.lengths) + args.max_new_tokens > context_length(bench.target):
        raise InputError(f"expected --lengths of {context_length(bench.target)} tokens or fewer, "
                         f"{args.max_new_tokens} new ones included")
    rows = [["tokens of context", "AR, ms a token", "8 rows / 1", "16 rows / 1", "method",
             "tokens per call", "x AR", "prompts' least and most"]]
    own = [p for p in every if len(p) <= min(args.lengths)][:args.few]
    if not own:
        raise InputError(f"expected prompts of at most {min(args.lengths)} tokens")
    for length in args.lengths:
        prompts = []
        for prompt in own:
            others = [p for p in rng.sample(every, len(every)) if p != prompt]
            before = list(itertools.chain.from_iterable(others))[:length - len(prompt)]
            prompts.append(before + prompt)
            if len(prompts[-1]) < length:
                raise InputError(f"expected prompts of {length} tokens in all")
        x = kept(f"{length} {digest({}, prompts)}", lambda: measure_length(
            bench, number_prompts(prompts)))
        for name, (tokens, ratio, spread) in x["methods"].items():
            rows.append([f"{length:,}", f"{x['ms']:.1f}", f"{x['rows'][0]:.2f}",
                         f"{x['rows'][1]:.2f}", name, f"{tokens:.2f}", f"{ratio:.2f}", spread])
    print(table(rows))


def digest_parts(args) -> dict[str, str]:
    """Return {name: hash} of the files of --adapters."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(args.adapters.iterdir()) if path.is_file()}


def number_prompts(prompts: list[list[int]]) -> list[tuple[str, list[int]]]:
    """Make each prompt a category of its own, so that a spread can be told."""
    return [(str(i), prompt) for i, prompt in enumerate(prompts)]


def format_extremes(results: Results, name) -> str:
    """Format a method's speed over AR's on the prompts where it is least and most."""
    every = [results.ratio(name, "AR", i) for i, _ in results.counts["AR"][0]]
    return f"[{min(every):.2f}, {max(every):.2f}]"


def measure_length(bench: Bench, pairs: list) -> dict:
    runs = {"AR": bench.ours(autoregressive), "lookahead, W = 0": bench.ours(lookahead, W=0),
            **bench.rest("REST"), **bench.hybrid("none"), **bench.hybrid("hydra"),
            **bench.eagle("EAGLE, dynamic", dynamic=True)}
    results = bench.measure(runs, pairs)
    lm = bench.cached(bench.target)
    lm.start(pairs[0][1][:-1])
    costs = row_costs(lm, 16)
    return {"ms": results.per_token("AR", "total"), "rows": [costs[8] / costs[1],
                                                             costs[16] / costs[1]],
            "methods": {name: (results.per_call(name), results.ratio(name, "AR"),
                               format_extremes(results, name)) for name in list(runs)[1:]}}


# ---------------------------------------------------------------------------- the command line

def consistency_options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="curves.py consistency",
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--target", required=True)
    add("--data", type=Path, required=True, help="trajectories that `cllm.py collect` made")
    add("--work", type=Path, required=True, help="checkpoints, and the trained model")
    add("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    add("--steps", type=int, default=600, help="of the long run")
    add("--short", type=int, default=150, help="steps of a short run")
    add("--batch", type=int, default=4, help="answers a step")
    add("--states", type=int, default=4, help="of each block")
    add("--lr", type=float, default=2e-5)
    add("--longest", type=int, default=300, help="tokens of a prompt")
    add("--shown", type=int, default=10, help="held-out answers that are decoded")
    add("--tokens", type=int, default=96, help="of each of these")
    add("--reports", type=int, default=10, help="of the long run; short ones are measured twice")
    add("--device")
    args = parser.parse_args(argv)
    counts = ("steps", "short", "batch", "states", "shown", "tokens", "reports")
    if wrong := [name for name in counts if getattr(args, name) < 1]:
        parser.error(f"expected 1 or more for --{wrong[0]}")
    return args


TABLES = {"perplexity": table_perplexity, "drafts": table_drafts, "lengths": table_lengths}


def find_mistake(args: argparse.Namespace) -> str | None:
    """Return what is wrong with the command line, before anything is loaded, or None."""
    names = [Path(path).name for path in args.drafts]
    checks = {
        "different names of --drafts": len({*names}) < len(names),
        "a directory for --work": args.work.exists() and not args.work.is_dir()}
    if args.command == "perplexity":
        checks |= {"a --draft": not args.draft, "--seeds": not args.seeds,
                   "--shares between 0 and 1": not all(0 <= a <= 1 for a in args.shares),
                   "--beams of 1 or more": min(args.beams, default=1) < 1}
    else:
        checks["no temperature: greedy text is compared"] = args.temperature != 0
    if args.command == "drafts":
        checks |= {"--drafts": not args.drafts, "a directory for --picture":
                   bool(args.picture) and not args.picture.parent.is_dir()}
    if args.command == "lengths":
        checks |= {"--lengths": not args.lengths, "--few of 1 or more": args.few < 1}
    return next((text for text, wrong in checks.items() if wrong), None)


def main() -> None:
    set_encodings()
    if sys.argv[1:2] == ["consistency"]:
        args = consistency_options(sys.argv[2:])
        try:
            return consistency(args)
        except InputError as error:
            print(f"curves.py consistency: {cut_message(str(error))}", file=sys.stderr)
            sys.exit(2)
    parser = options(__doc__)
    add = parser.add_argument
    add("command", choices=TABLES)
    add("--work", type=Path, required=True, help="folder of what was measured")
    add("--drafts", nargs="*", default=[], help="directories of draft models")
    add("--shares", nargs="*", type=float, default=[0.0, 0.25, 0.5, 0.75, 0.9, 1.0],
        help="perplexity: of the target in the draft")
    add("--beams", nargs="*", type=int, default=[1, 4, 8], help="perplexity: of MJSD")
    add("--seeds", nargs="*", type=int, default=[0, 1, 2, 3], help="perplexity")
    add("--picture", type=Path, help="drafts: the SVG file to make")
    add("--lengths", nargs="*", type=int, default=[300, 600, 1200, 2400, 4000])
    add("--few", type=int, default=4, help="lengths: prompts of each")
    if problem := find_mistake(parser.parse_args()):
        parser.exit(2, f"{parser.prog}: expected {problem}\n")
    perform(parser, lambda bench: TABLES[bench.args.command](bench))


if __name__ == "__main__":
    main()
