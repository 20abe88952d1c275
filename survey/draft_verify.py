"""Draft & Verify: the model without some of its blocks drafts, the whole model verifies.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding", arXiv 2309.08168

    python -m survey.draft_verify search --prompts FILE --out blocks.json    # what to skip
    python -m survey.draft_verify --blocks blocks.json --prompt "..."

A block is the attention or the MLP of a layer. A layer without a block hands on what it read. Here
the draft leaves out one attention block (A) and two MLP blocks (M) of three layers:

    layer         1       2       3
    draft       A ─ M ─ A ─ · ─ · ─ ·  ─ LM head     two attention blocks write rows, layer 3 none
    verify      A ─ M ─ A ─ M ─ A ─ M  ─ LM head     all three write rows, over the draft's

    draft    root -> x̂_1 -> x̂_2 -> …    one call each, without the blocks; up to K guesses, or
                                        until a guess had less than the draft probability γ
    verify   root, x̂_1, x̂_2, …          one call of the whole model
    γ        rises after a round if less than 0.9 of the guesses was accepted recently, else falls

The paper's K is the option `gamma` here, as in speculative.py, and the paper's γ is `threshold`.

The draft and the whole model write into ONE cache. Verification overwrites what the draft wrote, so
the draft sees the whole model's rows of all final tokens. With a cache of its own it would agree
with the whole model far less.

Lossless, by the rule of speculative sampling.

Departures (paper / here / why):
- K is 12 (released code: 8) / gamma is 4 / a small model is wrong sooner.
- γ falls after every good round / not after one that drafted K guesses, as in the released code /
  the threshold did not end that draft, so a lower one would not make it longer.
- the share of accepted guesses starts at 0 in the released code / at 0.9 / the first rounds of a
  text should not raise γ whatever they accept.
- Bayesian optimization of measured tokens a second chooses the blocks / `search` ranks and flips
  blocks by measured agreement and by costs that are a sum over blocks / two timings of drafts that
  differ in one block differ by noise.
- the released code draws the coins of a round before it drafts, and can let them end a draft / a
  coin is drawn when a guess is judged / no guess depends on the coin that judges it.
"""
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Iterable, Iterator, NamedTuple

from common import (CachedLM, InputError, KVCache, Sampler, attention_mask, eos_ids, greedy,
                    row_costs)
from speculative import verify
from survey.parts import MODELS, load_facts, save_facts
from survey.views import copy_shallow, depth_of, name_of, open_model

import torch
from tqdm import tqdm

BLOCKS = {"attention": "Attention", "mlp": "MLP|MoE|Moe"}  # what their classes are called
MOST = 7  # guesses a round that the search considers


# ------------------------------------------------------------------------- a model without blocks

class Skipped(torch.nn.Module):
    """Stand in for a block: add nothing to the hidden states.

    output  what the block gave in some pass, a tensor or a tuple that begins with one
    """

    def __init__(self, output):
        super().__init__()
        self.is_tuple = isinstance(output, tuple)
        self.others = len(output) - 1 if self.is_tuple else 0

    def forward(self, *args, **options):
        hidden = args[0] if args else options["hidden_states"]
        nothing = torch.zeros_like(hidden)
        return (nothing, *[None] * self.others) if self.is_tuple else nothing


def record_outputs(model, modules: list[torch.nn.Module]) -> list:
    """Run the model once on one token and return what each of its modules gave."""
    outputs = {}

    def keep(module, args, output) -> None:
        outputs[module] = output
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(keep))
        model(input_ids=torch.tensor([[3]], device=model.device), use_cache=False)
    return [outputs[module] for module in modules]


@torch.inference_mode()
def without(model, skipped: dict[str, list[int]]):
    """Return the model without some of its blocks; it shares the weights of the others.

    skipped  {"attention": layers, "mlp": layers}, the first layer being 0
    """
    new, decoder, layers, _ = open_model(model)
    decoder._modules[layers] = torch.nn.ModuleList(map(copy_shallow, decoder._modules[layers]))
    places = []  # (layer, name of a block in it)
    for kind, numbers in skipped.items():
        for number in numbers:
            layer = decoder._modules[layers][number]
            name = name_of(layer.named_children(),
                           lambda x: re.search(BLOCKS[kind], type(x).__name__),
                           f"layers whose {kind} is a module, got {type(layer).__name__}")
            places.append((layer, name))
    outputs = record_outputs(model, [layer._modules[name] for layer, name in places])
    for (layer, name), output in zip(places, outputs):
        layer._modules[name] = Skipped(output)
    return new


# ---------------------------------------------------------------------------------- decoding

def move_threshold(threshold: float, share: float, full: bool) -> float:
    """Return the threshold that a round calls for (Eq. 6, with the released code's exception).

    threshold  the threshold of the round
    share      which share of the guesses was accepted recently
    full       whether the round drafted as many tokens as it may
    """
    if share <= 0.9:
        return threshold + 0.01
    # A full draft was not ended by the threshold, so a lower one would not lengthen it.
    return threshold if full else threshold - 0.01


def draft_verify(target: CachedLM, prompt: list[int], *, gamma: int = 4, threshold: float = 0.6,
                 adaptive: bool = True, blocks: str = f"{MODELS}/blocks.json",
                 skipped: dict[str, list[int]] | None = None, sample: Sampler = greedy,
                 log: list | None = None) -> Iterator[list[int]]:
    """Draft with the model without some of its blocks, verify with the whole model (Section 3).

    gamma:     tokens drafted a round, at most (the paper's K)
    threshold: a draft ends after a guess with a draft probability below this (the paper's γ)
    adaptive:  move the threshold so that 0.9 of the guesses is accepted (Eq. 5 to 7)
    blocks:    a file of blocks to skip, made by `python -m survey.draft_verify search`
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted", "layers"} a round.

    "layers" counts the layers that run one after the other. `skipped`, {"attention": layers, "mlp":
    layers}, is used instead of the file.
    """
    if gamma < 1:
        raise InputError(f"--gamma must be 1 or more, got {gamma}")
    if not threshold >= 0:
        raise InputError(f"--threshold must be 0 or more, got {threshold}")
    if type(target.cache) is not KVCache:
        raise InputError("--graphs cannot be used, because draft and target write into one cache")
    draft = target.once(("draft_verify", blocks, repr(skipped)), lambda: CachedLM(
        without(target.model, skipped or load_blocks(blocks, target.model)), target.vocab))
    layers_of_target = depth_of(target.model)
    blocks_skipped = sum(isinstance(part, Skipped) for part in draft.model.modules())
    layers_of_draft = layers_of_target - blocks_skipped / 2
    draft.cache = target.cache  # so that the draft sees the whole model's rows of final tokens
    target.start(prompt[:-1])
    root = prompt[-1]
    share = 0.9  # of the guesses, accepted recently
    while True:
        # Draft: one token a call
        draft.length = target.length
        draft.parents = []
        guesses, draft_probs = [], []
        last = root
        for _ in range(gamma):
            logits = draft.forward([last])  # [1, V]
            draft_probs.append(sample.probs(logits))
            [last] = sample.draw(draft_probs[-1])
            guesses.append(last)
            chance = logits.float().softmax(-1)[0, last].item()
            if not chance >= threshold:  # a broken draft's chance, NaN, ends the draft, too
                break
        # Verify: the rows of this call replace the draft's
        target_probs = sample.probs(target.forward([root, *guesses]))
        accepted, root = verify(target_probs, torch.cat(draft_probs), guesses, sample)
        target.commit(range(1 + accepted))
        # Move the threshold
        if adaptive:
            share = 0.5 * share + 0.5 * accepted / len(guesses)  # Eq. 5
            goal = move_threshold(threshold, share, len(guesses) == gamma)  # Eq. 6
            threshold = 0.9 * threshold + 0.1 * goal  # Eq. 7
        if log is not None:
            log.append({"drafted": len(guesses), "accepted": accepted,
                        "layers": len(guesses) * layers_of_draft + layers_of_target})
        yield guesses[:accepted] + [root]


# ------------------------------------------------------------------------------ what to skip

@torch.inference_mode()
def agreement(model, skipped: dict[str, list[int]], data: list) -> float:
    """Measure how often the model without some blocks guesses the whole model's next token.

    skipped  {"attention": layers, "mlp": layers}
    data     pairs of a prompt and the model's own greedy answer

    One pass of the draft covers an answer. As in decoding, each row sees the whole model's rows of
    the text before it, and of the draft's rows only itself.
    """
    correct = total = 0
    whole = CachedLM(model)
    draft = CachedLM(without(model, skipped))
    draft.cache = whole.cache
    for prompt, answer in data:
        whole.start(prompt + answer[:-1])
        T, n = whole.length, len(answer)
        before = torch.ones(T, T).tril(-1)[T - n:]  # [n, T], the whole model's rows
        visible = torch.cat([before, torch.eye(n)], 1).bool()  # [n, T + n]
        rows = torch.arange(T - n, T)
        slots = torch.cat([torch.arange(T), rows])
        mask = attention_mask(whole.windows, visible[None], rows[None], slots[None], whole.weight)
        whole.cache.start = T
        ids = torch.tensor([(prompt + answer)[T - n:T]], device=whole.weight.device)
        logits, _ = draft.run_model(ids, rows[None].to(ids.device), mask, None)
        correct += sum(guess == token for guess, token in zip(greedy(logits[0]), answer))
        total += n
    return correct / total


class Costs(NamedTuple):
    """What a call takes: the cost of a draft is the sum of its blocks' costs and of the rest."""
    block: dict[str, float]  # seconds of one attention block and of one MLP block, on one row
    rest: float  # seconds of all that no draft skips, on one row
    whole: list[float]  # [n]: seconds of the whole model on n rows

    def of_draft(self, kept: list[str]) -> float:
        """Return the seconds of a draft call; `kept` has the kind of each block that runs."""
        return self.rest + sum(self.block[kind] for kind in kept)


def measure_costs(model) -> Costs:
    """Time three models, the whole one and the one without all blocks of each kind."""
    L = depth_of(model)
    whole = row_costs(CachedLM(model), MOST + 1)
    block = {}
    for kind in BLOCKS:
        seconds = row_costs(CachedLM(without(model, {kind: [*range(L)]})), 1)[1]
        block[kind] = max(0.0, whole[1] - seconds) / L
    rest = max(0.0, whole[1] - L * sum(block.values()))
    return Costs(block, rest, whole)


def predict_speed(agreement: float, draft: float, whole: list[float]) -> tuple[float, int]:
    """Return how many times as fast as token by token a draft is, and its best guesses a round.

    agreement  how often the draft guesses right
    draft      seconds of a draft call
    whole      [n]: seconds of a call of the whole model on n rows
    """
    speeds = []
    for gamma in range(1, MOST + 1):
        tokens = sum(agreement ** i for i in range(gamma + 1))
        seconds = gamma * draft + whole[gamma + 1]
        speeds.append((tokens * whole[1] / seconds, gamma))
    return max(speeds)


def search(model, tokenizer, prompts: list[list[int]], *, out: Path, max_new_tokens: int = 60,
           passes: int = 1) -> None:
    """Choose the blocks to skip, by measured agreement and by costs that are a sum over blocks.

    Rank the blocks by how often the model agrees with itself when only this one is skipped. Skip
    the first n of them, where n is the one with the best predicted speed. Then flip each block once
    more, and keep the flip if the prediction improves.

    out:    the JSON file to make
    max_new_tokens: length of the answers on which agreement is measured
    passes: how often each block is flipped
    """
    from models.training import generate_answers
    batches = generate_answers(model, eos_ids(model, tokenizer), prompts, max_new_tokens)
    answers = [answer for batch in batches for answer in batch]
    data = [(prompt, answer) for prompt, answer in zip(prompts, answers) if answer]
    costs = measure_costs(model)
    blocks = [(kind, layer) for kind in BLOCKS for layer in range(depth_of(model))]

    def agree(skipped: Iterable[tuple[str, int]]) -> float:
        return agreement(model, by_kind(skipped), data)

    def speed(skipped: list[tuple[str, int]]) -> tuple[float, int]:
        kept = [kind for kind, layer in blocks if (kind, layer) not in skipped]
        return predict_speed(agree(skipped), costs.of_draft(kept), costs.whole)
    alone = {block: agree([block]) for block in tqdm(blocks, desc="blocks")}
    ranked = sorted(blocks, key=lambda block: -alone[block])
    speeds = [speed(ranked[:n]) for n in range(1, len(blocks) // 2 + 1)]
    fastest = max(speeds)
    best = ranked[:1 + speeds.index(fastest)]
    for block in tqdm(blocks * passes, desc="flips"):
        flipped = [x for x in best if x != block] if block in best else [*best, block]
        predicted = speed(flipped)
        if predicted > fastest:
            fastest, best = predicted, flipped
    times, gamma = fastest
    print(f"{len(best)} of {len(blocks)} blocks, gamma {gamma}: {times:.2f}x token by token")
    save_facts(out, {"model": model}, **by_kind(best))


def by_kind(blocks: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Return {"attention": layers, "mlp": layers} of blocks, each a kind and a layer."""
    return {kind: sorted(layer for k, layer in blocks if k == kind) for kind in BLOCKS}


def load_blocks(path: str, model) -> dict[str, list[int]]:
    """Read which blocks of a model to skip, {"attention": layers, "mlp": layers}; InputError for a
    file that is damaged or for another model."""
    def parse(facts: dict) -> dict[str, list[int]]:
        numbers = {layer for kind in BLOCKS for layer in facts[kind]}
        if not numbers <= {*range(depth_of(model))}:
            raise ValueError("the model does not have all of its layers")
        return {kind: list(facts[kind]) for kind in BLOCKS}
    expected = "blocks that `python -m survey.draft_verify search` found for this model"
    return load_facts(path, {"model": model}, expected, parse)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    """Say what a run's rounds were like, on average."""
    drafted, accepted, layers = (sum(r[x] for r in run.log) for x in run.log[0])
    n = len(run.log)
    return (f"a round: {drafted / n:.1f} guesses, {accepted / n:.2f} accepted; "
            f"{layers / run.tokens:.1f} layers run a token")


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([draft_verify], report, commands=[search],
                  ranges={"gamma": (1, 2, 3, 4, 6, 8, 12)}))
