"""Measure tables of the survey's other systems.

    python results/survey_tables.py --table medusa              # or another of TABLES, at the end
    python results/survey_tables.py --table inputs --adapters FOLDER
    python results/survey_tables.py --table losses --adapters FOLDER

For --table inputs FOLDER holds a draft layer for each choice of `survey.eagle train --inputs`,
named shifted.safetensors and so on. For --table losses it holds what both choices of --loss made,
named medusa-ce.safetensors, medusa-tv.safetensors and so on, of Medusa, Hydra and EAGLE or of some
of them. All parts must have been trained equally long. Prompts, rounds and medians are those of
bench.py.
"""
import copy
import functools
import itertools
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch

from bench import Bench, ROOT, options, perform, table

sys.path[:0] = [str(ROOT), str(ROOT / "models")]
from bita import bita, load_tuning  # noqa: E402  (path: set above)
from common import WIDTHS, Sampler, autoregressive, row_costs, vocab_size  # noqa: E402
from jacobi import lookahead  # noqa: E402
from models.training import LOSSES, collect_answers, total_variation  # noqa: E402
from speculative import speculative  # noqa: E402
from survey import triforce as triforce_file  # noqa: E402
from survey.cascade import cascade  # noqa: E402
from survey.draft_verify import draft_verify, load_blocks, without  # noqa: E402
from survey.eagle import Pairs, compute_features, eagle, load_draft  # noqa: E402
from survey.early_exit import early_exit, load_exit  # noqa: E402
from survey.hybrid import GUESSES, grow, hybrid, load_trust  # noqa: E402
from survey.layerskip import layerskip, load_tuned, measure_exit  # noqa: E402
from survey.lossy import specdec  # noqa: E402
from survey.masks import load_space, measure_all_right, pass_sampling, space  # noqa: E402
from survey.medusa import collect_features, head_states, load_heads, medusa  # noqa: E402
from survey.ngrams import NGrams  # noqa: E402
from survey.parts import logits_of  # noqa: E402
from survey.online import online  # noqa: E402
from survey.rest import (BOUNDARY, Datastore, as_text, load_datastore,  # noqa: E402
                         rest)
from survey.sequoia import draw_children, load_rates, sequoia, tabulate, verify  # noqa: E402
from survey.several_drafts import k_seq, multi_step, specinfer, spectr  # noqa: E402
from survey.triforce import choose_ends, triforce  # noqa: E402
from survey.views import depth_of  # noqa: E402


def rates(bench: Bench, results, names, what: str = "rows") -> list[list[str]]:
    """Make a row for each method: tokens per call, nodes a call, speed, equality with AR.

    what  the entry of the log that counts the nodes
    """
    lines = []
    for name in names:
        per_call = [results.per_call(name, x) for x in (None, *bench.prompts)]
        lines.append([name, *(f"{x:.2f}" for x in per_call), f"{results.log(name, what):.1f}",
                      f"{results.ratio(name, 'AR'):.2f}", results.same(name, "AR")])
    return lines


def costs(bench: Bench, most: int = 64) -> None:
    """Print what a call of more rows costs on this machine.

    most  the most rows
    """
    lm = bench.cached(bench.target)
    lm.start(bench.pairs()[0][1][:-1])
    measured = row_costs(lm, most)
    found = {n: measured[n] for n in WIDTHS if n <= most}
    print(table([["rows of a call", *map(str, found)],
                 ["milliseconds", *(f"{1000 * x:.1f}" for x in found.values())],
                 ["of a call of one", *(f"{x / found[1]:.2f}" for x in found.values())]]))


def grades(bench: Bench, results, name) -> str:
    """Count the right answers of all rounds."""
    prompts = [prompt for _, prompt in bench.pairs()]
    right = [x for some in results.rounds(name)
             for x in bench.graded(prompts, [count.output for count in some])]
    return f"{sum(right)} of {len(right)}"


# ------------------------------------------------------------------------------ Medusa and Hydra

def table_medusa(bench: Bench) -> None:
    """Print how good the heads are, what trees make of them, and typical acceptance."""
    costs(bench)
    head = ["tree", "tokens per target call", *bench.prompts, "rows a call", "x AR",
            "output as AR's"]
    runs, rows = {"AR": bench.ours(autoregressive)}, [["heads", "guess", *map(str, range(1, 5))]]
    for kind in ("medusa", "hydra"):
        heads = load_heads(bench.args.adapters / f"{kind}.safetensors", kind, bench.target)
        for rank in range(3):
            rows.append([kind, f"of rank {rank + 1}",
                         *(f"{accept[rank]:.2f}" for accept in heads.accept)])
        chain, full = copy.copy(heads), copy.copy(heads)
        chain.accept = [accept[:1] for accept in heads.accept]
        full.accept = [[1.0] * 2] * heads.K
        runs |= {f"{kind}, {name}": bench.ours(medusa, heads=kind, trained=trained, nodes=nodes)
                 for name, trained, nodes in (
                     ("chain", chain, 1 + heads.K), ("full tree, 2 guesses a node", full, 31),
                     *((f"best tree of {n}", heads, n) for n in (4, 8, 16, 31, 64)),
                     ("as many nodes as pay", heads, 0))}
    print(table(rows))
    results = bench.measure(runs)
    print(table([head, *rates(bench, results, list(runs)[1:])]))

    rows = [["hydra, 31 nodes", "tokens per target call", "x AR", "right answers"]]
    for temperature in (0.3, 0.7, 1.0):
        sample = Sampler(temperature, seed=bench.args.seed)
        runs = {"AR": bench.ours(autoregressive, sample)}
        for name, typical in (("exact", False), ("typical", True)):
            runs[name] = bench.ours(medusa, sample, heads="hydra", trained=heads, nodes=31,
                                    typical=typical)
        results = bench.measure(runs)
        for name in runs:
            rows.append([f"temperature {temperature}, {name}", f"{results.per_call(name):.2f}",
                         f"{results.ratio(name, 'AR'):.2f}", grades(bench, results, name)])
    print(table(rows))


# ----------------------------------------------------------------------------------------- EAGLE

def alphas(draft) -> list[str]:
    return [f"{ranks[0]:.2f}" for ranks in draft.accept]


def table_eagle(bench: Bench) -> None:
    """Print static and dynamic trees by their nodes."""
    costs(bench)
    draft = load_draft(bench.args.adapters / "eagle.safetensors", bench.target)
    print(table([["features guessed", *map(str, range(len(draft.accept)))],
                 ["n-α, held-out answers", *alphas(draft)]]))
    runs = {"AR": bench.ours(autoregressive)}
    runs |= {f"{('static', 'dynamic')[dynamic]}, {n or 'as many as pay'}":
             bench.ours(eagle, trained=draft, nodes=n, dynamic=dynamic)
             for dynamic in (False, True) for n in (4, 8, 16, 32, 64, 0)}
    results = bench.measure(runs)
    print(table([["tree, nodes", "tokens per target call", *bench.prompts, "guesses a call", "x AR",
                  "output as AR's"], *rates(bench, results, list(runs)[1:], "guessed")]))


def table_inputs(bench: Bench) -> None:
    """Print what inputs of the draft layer bring: Section 3.1's reason for the shifted token."""
    names = {"shifted": "feature, token after it", "unshifted": "feature, its own token",
             "feature": "feature", "token": "token"}
    drafts = {name: load_draft(bench.args.adapters / f"{name}.safetensors", bench.target)
              for name in names}
    results = bench.measure({(name, dynamic): bench.ours(eagle, trained=draft, nodes=16,
                                                         dynamic=dynamic)
                             for name, draft in drafts.items() for dynamic in (False, True)})
    rows = [["inputs", *(f"{n}-α" for n in range(len(drafts["shifted"].accept))),
             "tokens per target call, static tree of 16", "dynamic"]]
    rows += [[names[name], *alphas(draft),
              *(f"{results.per_call((name, dynamic)):.2f}" for dynamic in (False, True))]
             for name, draft in drafts.items()]
    print(table(rows))


# ------------------------------------------------------------------------ the loss of a training

def find_logits(bench: Bench, part, prompt: list[int], answer: list[int]) -> tuple:
    """Compute what a part and the target say of the token after each root of an answer.

    part     heads of Medusa or Hydra, or a draft of EAGLE
    prompt   token ids
    answer   token ids, two or more
    returns  the logits [n, V] of the part and of the target
    """
    model, pair = bench.target, (prompt, answer)
    to_logits, head = logits_of(model), model.get_output_embeddings()
    if hasattr(part, "K"):
        [(f, tokens, ahead)] = collect_features(model, [pair], part.K, "tv")
        [x, *_] = [x for _, x, _ in head_states(part, model, f.to(model.dtype), tokens)]
        return to_logits(part.lm_head_of(1)(x)), to_logits(head(ahead[:, 0].to(model.dtype)))
    [(ids, f, length)] = compute_features(model, [pair])
    lm, f = bench.cached(part.lm), f.to(model.dtype)
    lm.start([])
    said = lm.forward(part.join(Pairs(ids[:-2], f[:-2], ids[1:-1])))
    first = max(0, length - 2)
    return said[first:], to_logits(head(f[1:-1]))[first:]


@torch.inference_mode()
def overlap(bench: Bench, part, texts: list[tuple]) -> float:
    """Return the mean of 1 - ½‖p - q‖₁ for the token after the root, over texts (prompt, answer).

    This is how often speculative sampling would accept a guess that is drawn from the part.
    """
    found = []
    for prompt, answer in texts:
        q, p = find_logits(bench, part, prompt, answer)
        found.append(1 - total_variation(p.float().softmax(-1), q.float().softmax(-1)))
    return torch.cat(found).mean().item()


def ratio_interval(ours: list, theirs: list) -> str:
    """Return by what factor tokens per call rise, with its 95% interval by bootstrap over prompts.

    ours, theirs  Counts of the same prompts
    """
    def factor(chosen: list[int]) -> float:
        a, b = (sum(some[i].tokens for i in chosen) / sum(some[i].calls for i in chosen)
                for some in (ours, theirs))
        return a / b
    rng, every = random.Random(0), range(len(ours))
    found = sorted(factor(rng.choices(every, k=len(every))) for _ in range(1000))
    return f"{factor([*every]):.3f} [{found[25]:.3f}, {found[974]:.3f}]"


def table_losses(bench: Bench) -> None:
    """Print what parts make that learned by cross-entropy (ce) and by the distance (tv)."""
    folder, runs, parts, rows = bench.args.adapters, {}, {}, []
    for kind, loss in itertools.product(("medusa", "hydra", "eagle"), LOSSES):
        path = folder / f"{kind}-{loss}.safetensors"
        if not path.exists():
            print(f"{path} left out, which is not there")
        elif kind == "eagle":
            parts[kind, loss] = load_draft(path, bench.target)
            runs[kind, loss] = functools.partial(bench.ours, eagle)
        else:
            parts[kind, loss] = load_heads(path, kind, bench.target)
            runs[kind, loss] = functools.partial(bench.ours, medusa, heads=kind)
    greedy, warm = (Sampler(t, seed=bench.args.seed) for t in (0.0, 1.0))
    ar = bench.ours(autoregressive, warm)
    texts = [(prompt, ar(prompt).output) for _, prompt in bench.pairs()]
    texts = [(prompt, answer) for prompt, answer in texts if len(answer) > 1]
    counts = {}
    for t, sample in ((0, greedy), (1, warm)):
        results = bench.measure({name: run(sample, trained=parts[name], nodes=16)
                                 for name, run in runs.items()})
        for name in runs:
            counts[*name, t] = [count for some in results.rounds(name) for count in some]
    for kind, loss in runs:
        cells = [kind, loss, f"{overlap(bench, parts[kind, loss], texts):.3f}"]
        for t in (0, 1):
            some = counts[kind, loss, t]
            accepted = [record["accepted"] for count in some for record in count.log]
            reached = [sum(a >= k for a in accepted) for k in range(5)]
            cells += [f"{sum(x.tokens for x in some) / sum(x.calls for x in some):.3f}",
                      ratio_interval(some, counts[kind, "ce", t]),
                      " ".join(f"{b / a:.2f}" for a, b in zip(reached, reached[1:]))]
        rows.append(cells)
    print(table([["part", "loss", "1 - ½‖p - q‖₁",
                  *(f"{x}, temperature {t}" for t in (0, 1) for x in (
                      "tokens per call", "ratio to ce [95%]", "accepted of level 1, 2, 3, 4"))],
                 *rows]))


# --------------------------------------------------------------------------------------- Sequoia

TREES = {4: ((1, 3), (3, 1)), 8: ((1, 7), (2, 3)), 16: ((1, 15), (3, 5)),  # nodes: drafts, tokens
         32: ((2, 15), (5, 6)), 64: ((4, 15), (7, 9))}


class Failing:
    """Stand in for random numbers that accept nothing.

    missed  missed[k] is the probability that none of k draws is accepted
    """

    def __init__(self):
        self.missed = [1.0]

    def uniform(self, n: int, device) -> list:
        return [self] * n

    def __lt__(self, ratio) -> bool:
        self.missed.append(self.missed[-1] * (1 - min(1.0, ratio.item())))
        return False


@torch.inference_mode()
def rejections(bench: Bench, t: float, ks: tuple = (1, 2, 4, 8)) -> None:
    """Print Fig. 3: how often none of k children of a node is accepted.

    t   the temperature
    ks  the numbers of children

    Counted is the next token at all places of what the target writes. Children are drawn twice at
    each place, and the probability is exact given the draws.
    """
    sample, found = Sampler(t, seed=bench.args.seed), {"Sequoia": [], "SpecInfer": [], "SpecTr": []}
    ar, vocab = bench.ours(autoregressive, sample), vocab_size(bench.target, bench.tokenizer)
    for _, prompt in bench.pairs():
        text = torch.tensor([prompt + ar(prompt).output], device=bench.target.device)
        p, q = (model(input_ids=text, use_cache=False).logits[0, len(prompt) - 1:-1, :vocab]
                for model in (bench.target, bench.draft))
        for p, q, log_q in list(zip(sample.probs(p), sample.probs(q), q.double() / (t or 1))) * 2:
            coins = Failing()
            verify(p, log_q.clone(), draw_children(log_q[None], ks[-1], sample)[0], coins)
            found["Sequoia"].append([coins.missed[k] for k in ks])
            # With replacement; greedily one token
            draws = sample.draw(q.expand(ks[-1], -1)).tolist()
            for name, rule in (("SpecInfer", multi_step), ("SpecTr", k_seq)):
                found[name].append([(1 - rule(p, q.expand(k, -1), draws[:k])[0]).prod().item()
                                    for k in ks])
    print(table([[f"temperature {t}: no child accepted", *(f"of {k}" for k in ks)],
                 *([name, *(f"{mean(x):.4f}" for x in zip(*some))]
                   for name, some in found.items())]), flush=True)


def per_call(bench: Bench, run) -> tuple[float, float]:
    """Run a method and return its tokens per target call and its drafted nodes a round."""
    counts = [run(prompt) for _, prompt in bench.pairs() for _ in range(bench.args.rounds)]
    drafted = [record["drafted"] for count in counts for record in count.log]
    return sum(c.tokens for c in counts) / sum(c.calls for c in counts), mean(drafted)


def table_sequoia(bench: Bench) -> None:
    """Print Fig. 4: tokens per target call by the nodes of a tree of any depth.

    Several drafts of SpecInfer and SpecTr stand beside it, with as many nodes at most.
    """
    path = str(bench.args.adapters / "sequoia.json")
    measured = load_rates(path, bench.target, bench.draft)
    for t in (0.0, 0.3, 0.6, 1.0):
        rejections(bench, t)
        rows = [[f"temperature {t}: tokens per target call", *(f"{n} nodes" for n in TREES)]]
        sample = Sampler(t, seed=bench.args.seed)
        rows.append(["Sequoia, expected from the rates",
                     *(f"{tabulate(measured[t], n, n - 1)[n - 1].G[n]:.2f}" for n in TREES)])
        cells = [per_call(bench, bench.ours(sequoia, sample, nodes=n, depth=n - 1, rates=path))
                 for n in TREES]
        rows.append(["Sequoia", *(f"{tokens:.2f}" for tokens, _ in cells)])
        for method in (specinfer, spectr):
            for which in (0, 1):
                row = [f"{method.__name__}, {('long', 'short')[which]} drafts"]
                for K, gamma in (shapes[which] for shapes in TREES.values()):
                    tokens, drafted = per_call(bench, bench.ours(method, sample, gamma=gamma, K=K))
                    row.append(f"{tokens:.2f} ({K} x {gamma}, {1 + drafted:.1f} nodes)")
                rows.append(row)
        print(table(rows), flush=True)


# ------------------------------------------------------------------------------------------ REST

def table_rest(bench: Bench) -> None:
    """Print REST by the size of the datastore, the longest suffix and the guesses of a call.

    Rows have the datastore alone, where they do not say otherwise.
    """
    whole, nodes = load_datastore(bench.args.adapters / "rest.safetensors", bench.target), 15
    texts = [text + BOUNDARY for text in whole.text.split(BOUNDARY)[:-1]]
    parts = {n: Datastore("".join(texts[::n])) for n in (8, 4, 2, 1)}
    alone = functools.partial(bench.ours, rest, grow=False)
    runs = {"AR": bench.ours(autoregressive), "lookahead, W = 0": bench.ours(lookahead, W=0)}
    runs |= {f"1/{n} of the datastore: {len(part.text):,} tokens":
             alone(store=part, nodes=nodes) for n, part in parts.items()}
    runs |= {f"suffix of at most {n}": alone(store=whole, nodes=nodes, longest=n)
             for n in (1, 2, 4, 8, 16)}
    runs |= {f"{m - 1} guesses": alone(store=whole, nodes=m - 1) for m in WIDTHS if 1 < m <= 64}
    runs["as many as pay"] = alone(store=whole)
    runs["with the text itself"] = bench.ours(rest, store=whole, nodes=nodes)
    runs["the text alone"] = bench.ours(rest, store=Datastore(), nodes=nodes)
    runs |= {f"with the text itself, SuffixDecoding's score, alpha {alpha}":
             bench.ours(rest, store=whole, nodes=nodes, alpha=alpha) for alpha in (1, 2, 4, 16)}
    results = bench.measure(runs)
    print(table([[f"REST, {nodes} guesses a call", "tokens per target call", *bench.prompts,
                  "guesses a call", "x AR", "output as AR's"],
                 *rates(bench, results, list(runs)[1:], "guessed")]))


# --------------------------------------------------------------------------------------- SpecDec

def table_specdec(bench: Bench) -> None:
    """Print what relaxed verification costs and brings, over β and τ."""
    runs = {"AR": bench.ours(autoregressive)}
    runs |= {f"β = {beta}, τ = {tau}": bench.ours(specdec, beta=beta, tau=tau)
             for beta, tau in [(1, 1.0), *((b, t) for b in (3, 5) for t in (0.5, 1.0, 3.0))]}
    results = bench.measure(runs)
    rows = [["SpecDec", "tokens per target call", "x AR", "right answers", "output as AR's"]]
    for name in runs:
        rows.append([name, f"{results.per_call(name):.2f}", f"{results.ratio(name, 'AR'):.2f}",
                     grades(bench, results, name), results.same(name, "AR")])
    print(table(rows))


# ------------------------------------------------------------------------ fewer layers: layerskip

def table_layerskip(bench: Bench) -> None:
    """Print exits untouched, tuned and trained, by their layers and by guesses a round.

    The folder of --adapters may have more exits, exit*.safetensors.
    """
    folder, L = bench.args.adapters, depth_of(bench.target)
    runs = {"AR": bench.ours(autoregressive)}
    tuned, exits = folder / "layerskip.safetensors", sorted(folder.glob("exit*.safetensors"))
    depths = sorted({max(1, L * n // 12) for n in (1, 2, 3, 4, 6)})
    runs |= {f"untouched, exit after {E}": bench.ours(layerskip, E=E, tuning="") for E in depths}
    if tuned.exists():
        runs |= {f"LayerSkip's tuning, exit after {E}":
                 bench.ours(layerskip, E=E, tuning=str(tuned)) for E in depths}
    for path in exits:
        trained = load_exit(path, bench.target)
        for gamma in (2, 4, 6, 8):
            runs[f"trained exit after {trained.E}, γ {gamma}"] = bench.ours(
                early_exit, trained=trained, gamma=gamma)
    results = bench.measure(runs)
    rows = [["draft (γ 4)", "accepted a round", "tokens per call", *bench.prompts,
             "layers run a token", "x AR", "output as AR's"]]
    for name in [*runs][1:]:
        per_call = [results.per_call(name, x) for x in (None, *bench.prompts)]
        rows.append([name, f"{results.log(name, 'accepted'):.2f}", *(f"{x:.2f}" for x in per_call),
                     f"{results.layers(name, L):.1f}", f"{results.ratio(name, 'AR'):.2f}",
                     results.same(name, "AR")])
    print(table(rows))


def table_exits(bench: Bench) -> None:
    """Print how often an exit's likeliest token is the next of the model's own answer."""
    tuned = bench.args.adapters / "layerskip.safetensors"
    models = {"untouched": bench.target}
    if tuned.exists():
        models["LayerSkip's tuning"] = load_tuned(tuned, bench.target)[0]
    L = depth_of(bench.target)
    depths = range(L // 12, L + 1, L // 12)
    rows = [["right after layers", *map(str, depths)]]
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as work:
            prompts = [prompt for _, prompt in bench.pairs()]
            answers = collect_answers(model, bench.tokenizer, prompts, bench.args.max_new_tokens,
                                  Path(work))
        data = [(p, a) for p, a in zip(prompts, answers) if a]
        rows.append([name, *(f"{measure_exit(model, data, E):.3f}" for E in depths)])
    print(table(rows))


def table_draft_verify(bench: Bench) -> None:
    """Print thresholds, fixed and adaptive, and how long a draft call takes."""
    path = str(bench.args.adapters / "blocks.json")
    skipped, blocks = load_blocks(path, bench.target), 2 * depth_of(bench.target)
    few = bench.cached(without(bench.target, skipped))
    whole = bench.cached(bench.target)
    for lm in (few, whole):
        lm.start(bench.pairs()[0][1])
    share = row_costs(few, 1)[1] / row_costs(whole, 1)[1]
    print(f"{sum(map(len, skipped.values()))} of {blocks} blocks skipped; a draft call takes "
          f"{share:.2f} of one of the whole model\n")
    runs = {"AR": bench.ours(autoregressive)}
    for gamma in (1, 2, 4, 8):
        runs |= {f"γ {gamma}, threshold {threshold} {'adaptive' if adaptive else 'fixed'}":
                 bench.ours(draft_verify, gamma=gamma, threshold=threshold, adaptive=adaptive,
                            blocks=path)
                 for threshold, adaptive in ((0.0, False), (0.3, False), (0.6, False), (0.6, True),
                                             (0.9, False)) if gamma > 1 or threshold == 0}
    results = bench.measure(runs)
    rows = [["Draft & Verify", "drafted a round", "accepted", "tokens per call",
             "layers run a token", "x AR",
             "output as AR's"]]
    for name in [*runs][1:]:
        rows.append([name, f"{results.log(name, 'drafted'):.2f}",
                     f"{results.log(name, 'accepted'):.2f}", f"{results.per_call(name):.2f}",
                     f"{results.layers(name, depth_of(bench.target)):.1f}",
                     f"{results.ratio(name, 'AR'):.2f}", results.same(name, "AR")])
    print(table(rows))


def table_accuracy(bench: Bench) -> None:
    """Print the right answers of the target and of the models that are tuned from it."""
    folder = bench.args.adapters
    models = {"the target": bench.target}
    if (path := folder / "layerskip.safetensors").exists():
        models["LayerSkip's tuning"] = load_tuned(path, bench.target)[0]
    if (path := folder / "space.safetensors").exists():
        models["SPACE's tuning"] = load_space(path, bench.cached(bench.target))[0].model
    rows = [["right answers", *bench.prompts]]
    for name, model in models.items():
        cells = []
        for prompts in bench.prompts.values():
            with tempfile.TemporaryDirectory() as work:
                outputs = collect_answers(model, bench.tokenizer, prompts,
                                          bench.args.max_new_tokens, Path(work))
            right = bench.graded(prompts, outputs)
            cells.append(f"{sum(right)} of {len(right)}")
        rows.append([name, *cells])
    print(table(rows))


# ------------------------------------------------------------- mask tokens: PaSS, SPACE and BiTA

def table_masks(bench: Bench) -> None:
    """Print what each part of a method with masks brings, and PaSS's formula.

    The parts are a call for drafting, groups of masks behind candidates, prompt tokens, a tuned
    model.
    """
    folder, M = bench.args.adapters, 3
    tokens = load_tuning(folder / "pass.safetensors", bench.target)
    deep = load_tuning(folder / "bita.safetensors", bench.target)
    few = copy.copy(tokens)
    few._parameters = tokens._parameters | {"masks": torch.nn.Parameter(tokens.masks[:M], False)}
    runs = {"AR": bench.ours(autoregressive)}
    lengths = range(1, len(tokens.masks) + 1)
    runs |= {f"PaSS, L {L}": bench.ours(pass_sampling, L=L, trained=tokens) for L in lengths}
    for (name, tuning), (tree, k) in itertools.product(
            (("PaSS's tokens", few), ("BiTA", deep)),
            (("chain", 0), ("efficient", 1), ("efficient", 5))):
        which = "one group" if tree == "chain" else f"groups behind each, k {k}"
        runs[f"{name}, {which}"] = bench.ours(bita, tuning=tuning, tree=tree, k=k)
    if (path := folder / "space.safetensors").exists():
        most = len(load_space(path, bench.cached(bench.target))[2])
        runs |= {f"SPACE (another model), k {k or 'as pays'}":
                 bench.ours(space, tuning=str(path), k=k) for k in range(most + 1)}
    results = bench.measure(runs)
    rows = [["masks", "tokens per call", *bench.prompts, "rows a call", "x AR", "output as AR's"]]
    for name in [*runs][1:]:
        per_call = [results.per_call(name, x) for x in (None, *bench.prompts)]
        width = (1 + results.log(name, "drafted") if name.startswith("PaSS, L")
                 else results.log(name, "rows"))
        rows.append([name, *(f"{x:.2f}" for x in per_call), f"{width:.1f}",
                     f"{results.ratio(name, 'AR'):.2f}", results.same(name, "AR")])
    print(table(rows))
    with tempfile.TemporaryDirectory() as work:
        prompts = [prompt for _, prompt in bench.pairs()]
        answers = collect_answers(bench.target, bench.tokenizer, prompts, bench.args.max_new_tokens,
                              Path(work))
    data = list(zip(prompts, answers))
    rows = [["PaSS: L", "all right", "tokens per call, (2 + Σ) / 2", "measured"]]
    for L in lengths:
        masks = tokens.masks[:L].to(bench.target.dtype)
        right = measure_all_right(bench.target, masks, data, 10 ** 6)
        rows.append([str(L), f"{right[-1]:.3f}", f"{(2 + sum(right)) / 2:.2f}",
                     f"{results.per_call(f'PaSS, L {L}'):.2f}"])
    print("\n" + table(rows))


# ------------------------------------------------------------------------------ drafts for drafts

def table_cascade(bench: Bench) -> None:
    """Print what drafts for the draft bring, and worse drafts for later tokens.

    Draft calls are weighed by the draft's share of the target's weights.
    """
    grams = str(bench.args.adapters / "rest.safetensors")
    share = bench.draft.num_parameters() / bench.target.num_parameters()
    print(f"the draft has {share:.3f} of the target's weights\n")
    runs = {"AR": bench.ours(autoregressive)}
    runs |= {f"speculative, γ {gamma}": bench.ours(speculative, gamma=gamma) for gamma in (4, 6, 8)}
    for name, gamma, inner, tail in (
            ("the draft alone", 5, 0, 0), ("vertical", 5, 3, 0), ("horizontal", 5, 0, 3),
            ("both", 5, 3, 3), ("both", 3, 3, 3), ("both", 8, 4, 4), ("Max-Gram alone", 0, 0, 5)):
        runs[f"{name}: γ {gamma}, inner {inner}, tail {tail}"] = bench.ours(
            cascade, gamma=gamma, inner=inner, tail=tail, grams=grams)
    runs["both, bigrams of the text alone: γ 5, inner 3, tail 3"] = bench.ours(
        cascade, gamma=5, inner=3, tail=3, grams="")
    results = bench.measure(runs)
    rows = [["cascade", "tokens per call", "accepted a round", "draft calls a token",
             "weighed by size", "x AR", "output as AR's"]]
    for name in [*runs][1:]:
        calls = sum(results.sums(name, "draft_calls")) / sum(results.sums(name, "tokens"))
        rows.append([name, f"{results.per_call(name):.2f}", f"{results.log(name, 'accepted'):.2f}",
                     f"{calls:.2f}", f"{calls * share:.3f}", f"{results.ratio(name, 'AR'):.2f}",
                     results.same(name, "AR")])
    print(table(rows))


def by_ends(target, draft, prompt, *, budget: int, sample, log):
    """TriForce whose middle level keeps the first and the newest rows, retrieving none."""
    retrieve = triforce_file.retrieve
    triforce_file.retrieve = lambda lm, token, budget, chunk: choose_ends(lm, 16, budget - 16)
    chunks = triforce(target, draft, prompt, budget=budget, sample=sample, log=log)
    try:
        first = next(chunks)
    finally:
        triforce_file.retrieve = retrieve
    yield first
    yield from chunks


def table_triforce(bench: Bench) -> None:
    """Print what TriForce brings over long prompts, each a category of its own.

    A row has what a call of the target costs there and on 512 tokens. It has the accepted tokens of
    the middle level, by how many rows the level keeps, and which ones.
    """
    rows = [["tokens of the prompt", "milliseconds of a call", "of one on 512", "rows kept",
             "accepted of 5, retrieved", "first and newest", "x AR, retrieved", "first and newest",
             "speculative"]]
    for name, prompts in bench.prompts.items():
        lm, costs = bench.cached(bench.target), []
        for n in (len(prompts[0]) - 1, 512):
            lm.start(prompts[0][:n])
            costs.append(f"{1000 * row_costs(lm, 1)[1]:.0f}")
        runs = {"AR": bench.ours(autoregressive), "speculative": bench.ours(speculative)}
        budgets = (256, 1024)
        for budget in budgets:
            runs[budget] = bench.ours(triforce, budget=budget)
            runs[-budget] = bench.ours(by_ends, budget=budget)
        one = copy.copy(bench)
        one.prompts = {name: prompts}
        results = one.measure(runs)
        for budget in budgets:
            rows.append([str(len(prompts[0])), *costs, str(budget),
                         *(f"{results.log(x, 'accepted'):.2f}" for x in (budget, -budget)),
                         *(f"{results.ratio(x, 'AR'):.2f}" for x in (budget, -budget,
                                                                    "speculative"))])
    print(table(rows))


# ---------------------------------------------------------------------------- drafts that learn

def table_online(bench: Bench) -> None:
    """Print the share of the draft's tokens that is accepted as traffic changes its task.

    Each task is shown in quarters, with the draft as it is and with one that learns. One round is
    run.
    """
    quarters = [prompts[i * len(prompts) // 4:(i + 1) * len(prompts) // 4]
                for prompts in bench.prompts.values() for i in range(4)]
    head = [f"{name} {i + 1}" for name in bench.prompts for i in range(4)]
    rows = [["accepted in quarter", *head]]
    runs = {"the draft as it is": bench.ours(speculative)}
    for kind in ("forward-kl", "reverse-kl", "jsd"):
        runs[f"online, {kind}"] = bench.ours(online, divergence=kind)
    outputs = {}
    for name, run in runs.items():
        cells = []
        for prompts in quarters:
            counts = [run(prompt) for prompt in prompts]
            outputs.setdefault(name, []).extend(count.output for count in counts)
            drafted, accepted = (sum(r[what] for count in counts for r in count.log)
                                 for what in ("drafted", "accepted"))
            cells.append(f"{accepted / drafted:.2f}")
        rows.append([name, *cells])
    print(table(rows))
    same = all(some == outputs["the draft as it is"] for some in outputs.values())
    print(f"outputs {'are the same' if same else 'DIFFER'}\n")


def table_boost(bench: Bench) -> None:
    """Print what two drafts bring: the first one twice, or the first and FOLDER/draft2.

    The second draft was trained for what the first gets wrong.
    """
    second = bench.load(str(bench.args.adapters / "draft2"))
    rows = [["two drafts of 5 tokens", "temperature", "tokens per call", "accepted a round",
             "nodes a round"]]
    for temperature in (0.0, 1.0):
        sample = Sampler(temperature, seed=bench.args.seed)
        runs = {"the first alone": bench.ours(speculative, sample=sample, gamma=5),
                "the first, twice": bench.ours(specinfer, sample=sample),
                "the first and the second": bench.ours(
                    specinfer, sample=sample, more_drafts=[bench.cached(second)])}
        results = bench.measure(runs)
        rows += [[name, str(temperature), f"{results.per_call(name):.2f}",
                  f"{results.log(name, 'accepted'):.2f}", f"{results.log(name, 'drafted'):.1f}"]
                 for name in runs]
    print(table(rows))


# ---------------------------------------------------------------------------------- the hybrid

BINS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.01)  # of predicted chances
SPANS = (0, 8, 16, 32, 64, 10**9)  # of tokens of an answer


def table_hybrid(bench: Bench) -> None:
    """Print the hybrid's trees, chances, widths, datastores, and the time of a lookup."""
    costs(bench)
    ladder = {**bench.rest("REST"), **{name: run for guess in GUESSES
                                       for name, run in bench.hybrid(guess).items()}}
    names = [name for name in ladder if name.startswith("hybrid")]
    results = bench.measure({"AR": bench.ours(autoregressive)} | ladder)
    print(table([["one tree", "tokens per target call", *bench.prompts, "guesses a call", "x AR",
                  "output as AR's"], *rates(bench, results, ladder, "guessed")]))
    rows = [["predicted chance", *(f"{a} to {b}" for a, b in itertools.pairwise((*BINS[:-1], 1)))]]
    spans = [f"{a} to {b}" for a, b in itertools.pairwise((*SPANS[:-1], "the end"))]
    widths = [["guesses a call, from token", *spans]]
    for name in names:
        counts = [count for some in results.rounds(name) for count in some]
        rows.append([name, *honesty(counts)])
        widths.append([name, *widths_of(counts)])
    print(table(rows) + "\n" + table(widths))
    sizes(bench)
    lookups(bench)


def honesty(counts: list) -> list[str]:
    """Compare predicted chances with what was accepted, and return a cell for each bin.

    A cell has the mean of the predicted chances, the share that was accepted, and the nodes.
    """
    seen = [(chance, i in record["path"]) for count in counts for record in count.log
            for i, chance in enumerate(record["chances"])]
    cells = []
    for low, high in itertools.pairwise(BINS):
        some = [(chance, hit) for chance, hit in seen if low <= chance < high]
        predicted, share = (mean(x) for x in zip(*some)) if some else (math.nan, math.nan)
        cells.append(f"{predicted:.3f}, true {share:.3f} ({len(some):,})")
    return cells


def widths_of(counts: list) -> list[str]:
    """Return the guesses a call by how many tokens of the answer came before."""
    found = {low: [] for low in SPANS[:-1]}
    for count in counts:
        place = 0
        for record in count.log:
            found[max(low for low in found if low <= place)].append(record["guessed"])
            place += 1 + record["accepted"]
    return [f"{mean(some):.1f}" if some else "-" for some in found.values()]


def sizes(bench: Bench) -> None:
    """Print the hybrid of n-grams alone by the size of the datastore."""
    path = str(bench.args.adapters / "rest.safetensors")
    whole = load_datastore(path, bench.target)
    texts = [text + BOUNDARY for text in whole.text.split(BOUNDARY)[:-1]]
    runs = {"AR": bench.ours(autoregressive)}
    trust = str(bench.args.adapters / "hybrid.json")
    for n in (0, 16, 8, 4, 2, 1):
        part = Datastore("".join(texts[::n] if n else []))
        name = f"{len(part.text):,} tokens"
        runs[name] = bench.ours(hybrid, guess="none", datastore=name, trust=trust)
        runs[name].models["target"].memo["rest", name] = part
    results = bench.measure(runs)
    print(table([["datastore", "tokens per target call", *bench.prompts, "guesses a call", "x AR",
                  "output as AR's"], *rates(bench, results, list(runs)[1:], "guessed")]))


def lookups(bench: Bench) -> None:
    """Print the milliseconds a call to grow a tree of n-grams, by the tokens of the text."""
    folder = bench.args.adapters
    store = load_datastore(folder / "rest.safetensors", bench.target)
    known = load_trust(str(folder / "hybrid.json"), bench.target)
    ar = bench.ours(autoregressive)
    some = "".join(as_text(prompt + ar(prompt).output) for _, prompt in bench.pairs())
    written = some * math.ceil(9000 / len(some))
    rows = [[f"text, with a datastore of {len(store.text):,} tokens", "nodes", "ms a call",
             "ms a node"]]
    for length in (500, 1000, 2000, 4000, 8000):
        ngrams = NGrams(written[:length], store, known["trust"])
        spent, nodes = 0.0, 0
        for token in written[length:length + 200]:
            began = time.perf_counter()
            nodes += len(grow(ngrams, None, [], 64, 0.05)[0])
            ngrams.add(token)
            spent += time.perf_counter() - began
        rows.append([f"{length:,}", f"{nodes / 200:.1f}", f"{1000 * spent / 200:.2f}",
                     f"{1000 * spent / nodes:.3f}"])
    print(table(rows))


# ---------------------------------------------------------------------------- the command line

TABLES = {"medusa": table_medusa, "eagle": table_eagle, "inputs": table_inputs,
          "losses": table_losses, "sequoia": table_sequoia, "rest": table_rest,
          "specdec": table_specdec,
          "layerskip": table_layerskip, "exits": table_exits, "draft_verify": table_draft_verify,
          "accuracy": table_accuracy, "masks": table_masks, "cascade": table_cascade,
          "triforce": table_triforce, "online": table_online, "boost": table_boost,
          "hybrid": table_hybrid}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--table", required=True, choices=TABLES)
    perform(parser, lambda bench: TABLES[bench.args.table](bench))


if __name__ == "__main__":
    main()
