"""Draft & Verify: the model without some of its blocks drafts, the whole model verifies.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding", arXiv 2309.08168

    python -m survey.draft_verify search --prompts FILE --out blocks.json    # what to leave out
    python -m survey.draft_verify --blocks blocks.json --prompt "..."

A block is the attention or the MLP of a layer. Each block adds something to the hidden states, so a
draft can leave a block out by adding nothing. Here the draft leaves out one attention block (A) and
two MLP blocks (M) of three layers; · is a block that is left out:

    layer         1       2       3
    draft       A ─ M ─ A ─ · ─ · ─ · ─ LM head     rows in the cache of layers 1 and 2, not of 3
    verify      A ─ M ─ A ─ M ─ A ─ M ─ LM head     rows in the cache of all three layers

A round, where K is the most guesses that a draft has, and γ is a threshold:

    draft    root → x̂_1 → x̂_2 → …    One call each, without the blocks. The draft ends after K
                                      guesses, or after a guess whose probability was below γ.
    verify   root, x̂_1, x̂_2, …       One call of the whole model judges all guesses.
    adapt    γ                        If 0.9 or less of the guesses was accepted recently, γ rises,
                                      which makes drafts shorter. Otherwise γ falls.

The paper's K is the option `gamma` here, as in speculative.py, and the paper's γ is `threshold`.

The draft and the whole model write into ONE cache. The draft of a round begins after the context,
whose rows are all the whole model's. Verification then writes its own rows over those of the draft.
With a cache of its own the draft would read rows that were made without the blocks, and would agree
with the whole model far less.

The output is the whole model's own, exactly, by the rule of speculative sampling.

Departures:
- Most guesses of a draft, K. Paper: 12, and 8 in the released code. Here: 4. Why: a small model
  is wrong sooner.
- Fall of γ. Paper: after every round in which γ does not rise. Here: not if the draft had K
  guesses, as in the released code. Why: γ did not end that draft, so a lower γ would not make the
  next one longer.
- First share of accepted guesses. Released code: 0. Here: 0.9. Why: with 0 the first rounds of
  a text would raise γ whatever they accept.
- Choice of the blocks. Paper: Bayesian optimization, by the measured speed of each candidate. Here:
  `search` ranks the blocks by how little each is missed, and tries the first n of this ranking for
  all n. Why: it takes two minutes.
- The rule. Paper: guesses are judged one by one. Released code: their coins are tossed before the
  draft, and may end it if `th_random_draft` is below 1. Here: `verify_block` of speculative.py
  judges the draft after it was made. Why: no guess may depend on the coin that judges it.
"""
import re
from pathlib import Path
from typing import Iterator

from common import CachedLM, Sampler, begin, greedy
from speculative import predict, verify_block as verify
from support.engine import (MODELS, EngineLM, depth_of, list_layers, log_round, name_of,
                            require_keys, run_as_program)
from support.layers import share_weights
from support.parts import load_facts, save_facts
from training.texts import collect_pairs

import torch
from tqdm import tqdm

BLOCKS = {"attention": "Attention", "mlp": "MLP|MoE|Moe"}  # kind: what names of its classes hold
MOST = 7  # the search considers drafts of 1 to 7 guesses


# ------------------------------------------------------------------------- a model without blocks

class Skipped(torch.nn.Module):
    """Stand in for a block that is left out, and add nothing to the hidden states.

    A block gives a tensor or a tuple that begins with a tensor, which differs by family. The layer
    unpacks what a block gives. So the first pass runs the block, and its form is kept.

    block   the block, which is forgotten after the first pass
    """

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args, **options):
        hidden = args[0] if args else options["hidden_states"]
        if self.block is not None:
            output = self.block(*args, **options)
            self.size = len(output) if isinstance(output, tuple) else 0
            self.block = None
        # The layer adds what a block gives to the block's input, and zeros change nothing.
        nothing = torch.zeros_like(hidden)
        return (nothing, *[None] * (self.size - 1)) if self.size else nothing


@torch.inference_mode()
def without(model, skipped: dict[str, list[int]] | tuple):
    """Make a model that leaves out some blocks of a model. The other blocks share their weights.

    skipped   for each kind of block, "attention" and "mlp", the layers that lack it: a dictionary,
              or its items. Layers are counted from 0
    returns   the new model. The given one stays as it is
    raises    InputError if a layer has no module for a block, as OPT has none for its MLP
    """
    new = share_weights(model)
    for kind, numbers in dict(skipped).items():
        for number in numbers:
            layer = list_layers(new)[number]
            name = name_of(layer, lambda x: re.search(BLOCKS[kind], type(x).__name__),
                           f"layers whose {kind} is a module, got {type(layer).__name__}")
            layer._modules[name] = Skipped(layer._modules[name])
    new(input_ids=torch.tensor([[0]], device=new.device), use_cache=False)  # the first pass
    return new


# ---------------------------------------------------------------------------------- decoding

def move_threshold(threshold: float, share: float, full: bool) -> float:
    """Compute the value that the threshold should approach after a round (Eq. 6).

    threshold  γ of this round
    share      which share of the guesses was accepted recently. The paper calls it AR
    full       whether the draft had as many guesses as it may have
    returns    γ + ε or γ - ε, with ε = 0.01. After a full draft γ takes the place of γ - ε
    """
    # Eq. 6, with α = 0.9. The released code has < in place of <=.
    if share <= 0.9:  # too many guesses are rejected, so drafts should become shorter
        return threshold + 0.01
    # The threshold did not end a full draft, so a lower one would not make the next one longer.
    return threshold if full else threshold - 0.01


def draft_chain(draft: EngineLM, root: int, gamma: int, threshold: float,
                sample: Sampler) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Draft one token a call, and leave the rows of all but the last guess pending.

    draft      the model that drafts
    root       the token that is fed first
    gamma      the most tokens that are drafted
    threshold  a draft ends after a guess that had a smaller draft probability. 0: it has gamma
    sample     draws the guesses
    returns    the n guesses, the distributions [n, V] that they were drawn from, and the features
               [n, d] of the rows before them
    """
    drawn, draft_probs, features = [], [], []
    token = [root]
    for _ in range(gamma):
        logits = draft.forward(token)  # [1, V]
        features.append(draft.features)
        draft_probs.append(sample.probs(logits, draft.places))
        token = sample.draw(draft_probs[-1])  # [1]; the CPU need not wait for it
        drawn.append(token)
        # This guess is kept, but none comes after it. A broken draft's NaN ends a draft too.
        if threshold and not logits.float().softmax(-1)[0, token] >= threshold:
            break
    return torch.cat(drawn).tolist(), torch.cat(draft_probs), torch.cat(features)


def draft_verify(target: EngineLM, prompt: list[int], *, gamma: int = 4, threshold: float = 0.6,
                 adaptive: bool = True, blocks: str = f"{MODELS}/blocks.json",
                 skipped: dict[str, list[int]] | None = None, sample: Sampler = greedy,
                 log: list | None = None) -> Iterator[list[int]]:
    """Draft with the model without some of its blocks, and verify with the whole model (Section 3).

    gamma:     the most tokens that are drafted in a round (the paper's K), 1 or more
    threshold: a draft ends after a guess that had a smaller draft probability than this number, by
               the draft's distribution before temperature, top-k and top-p (the paper's γ), 0 or
               more
    adaptive:  move the threshold after each round so that 0.9 of the guesses is accepted
    blocks:    the file of the blocks to leave out, made by `python -m survey.draft_verify search`

    Yields chunks of 1 to gamma + 1 tokens; logs {"guessed", "accepted", "layers"} a round.

    In the log "layers" is how many layers ran one after the other, where a block counts as half a
    layer. In Python, `skipped` may name the blocks in place of the file: for each kind of block,
    "attention" and "mlp", the layers that lack it.
    """
    skipped = skipped or target.once(load_blocks, blocks, target.model)
    pairs = tuple((kind, tuple(numbers)) for kind, numbers in skipped.items())
    draft = target.once(type(target), target.once(without, target.model, pairs), target.vocab)
    layers_of_target = depth_of(target.model)
    layers_of_draft = layers_of_target - sum(map(len, skipped.values())) / 2
    draft.cache = target.cache  # so that the draft sees the whole model's rows of final tokens
    root = begin(prompt, target)[-1]
    share = 0.9  # the paper's AR: which share of the guesses was accepted recently
    while True:
        # Draft, one token a call. The draft begins after the rows that the target has committed.
        draft.length = target.length
        draft.parents = []
        guesses, draft_probs, _ = draft_chain(draft, root, gamma, threshold, sample)
        # Verify. The call begins at the same slot, so its rows replace those of the draft.
        target_probs = sample.probs(target.forward([root, *guesses]), target.places)
        accepted, root = verify(target_probs, draft_probs, guesses, sample)
        target.commit(range(1 + accepted))
        # Adapt the threshold.
        if adaptive:
            share = 0.5 * share + 0.5 * accepted / len(guesses)  # Eq. 5, β_1 = 0.5
            goal = move_threshold(threshold, share, len(guesses) == gamma)  # Eq. 6
            threshold = 0.9 * threshold + 0.1 * goal  # Eq. 7, β_2 = 0.9
        log_round(log, guessed=len(guesses), accepted=accepted,
                  layers=len(guesses) * layers_of_draft + layers_of_target)
        yield guesses[:accepted] + [root]


# -------------------------------------------------------------------------- what to leave out

@torch.inference_mode()
def measure_agreement(model, skipped: dict[str, list[int]], data: list) -> float:
    """Measure how often the model without some blocks guesses the whole model's next token.

    skipped  the layers without attention and those without an MLP, as for `without`
    data     pairs of a prompt and the model's own greedy answer
    returns  which share of the tokens is guessed

    One pass of the draft covers an answer. Each row sees the whole model's rows of the text before
    it, and of the draft's rows only itself. That is what the first guess of a round sees. Later
    guesses of a round also see rows of the draft, which is not measured here.
    """
    correct = total = 0
    whole = CachedLM(model)
    draft = CachedLM(without(model, skipped))
    draft.cache = whole.cache
    for prompt, answer in data:
        # The whole model reads the root and the answer as a chain of pending nodes. Each row of the
        # draft hangs below the node of the token before its own.
        tokens = [prompt[-1], *answer[:-1]]
        whole.start(prompt[:-1])
        whole.forward(tokens, keep=0)
        draft.length = whole.length
        draft.parents = whole.parents
        logits = draft.forward(tokens, whole.parents)
        correct += sum(guess == token for guess, token in zip(greedy(logits), answer))
        total += len(answer)
    return correct / total


def time_call(model) -> float:
    """Measure the seconds of a call of one row: the least of four, since others may be busy."""
    lm = EngineLM(model)
    for _ in range(4):
        lm.start([])
        lm.forward([0])
    return min(seconds for *_, seconds in lm.passes)


def search(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
           max_new_tokens: int = 60) -> None:
    """Choose the blocks that the draft leaves out, and write them into a file.

    1. Rank the blocks by how often the model without this one block agrees with the whole model.
    2. Leave out the first n blocks of this ranking, for the n with the best predicted speed. At
       most half of all blocks are left out.

    Agreement is measured on the model's own answers. A prompt that leaves no room for one within
    2,048 tokens is left out, as in a training.

    out:    the JSON file to make
    work:   folder of answers, by default OUT.work
    max_new_tokens: the most tokens of an answer on which agreement is measured
    """
    require_keys(model)  # `measure_agreement` picks rows of the cache
    data = collect_pairs(model, tokenizer, prompts, max_new_tokens, work or Path(f"{out}.work"))
    blocks = [(kind, layer) for kind in BLOCKS for layer in range(depth_of(model))]
    # Step 1
    # The agreement when only one block is left out
    alone = {block: measure_agreement(model, by_kind({block}), data)
             for block in tqdm(blocks, desc="blocks")}
    ranked = sorted(blocks, key=lambda block: -alone[block])
    # Step 2
    whole, found = time_call(model), []
    for n in range(1, len(blocks) // 2 + 1):
        skipped = by_kind({*ranked[:n]})
        agreement = measure_agreement(model, skipped, data)
        cost = time_call(without(model, skipped)) / whole
        # For each number of guesses in a round the speed, as a multiple of token by token
        found += [(predict(gamma, agreement, cost)[1], gamma, n) for gamma in range(1, MOST + 1)]
    speed, gamma, n = max(found)
    print(f"{n} of {len(blocks)} blocks, gamma {gamma}: {speed:.2f}x token by token")
    save_facts(out, {"model": model}, **by_kind({*ranked[:n]}))


def by_kind(blocks: set[tuple[str, int]]) -> dict[str, list[int]]:
    """List for each kind of block the layers of some blocks that are of this kind.

    blocks   pairs of a kind, "attention" or "mlp", and the number of a layer
    returns  for each kind its layers, in order
    """
    return {kind: sorted(layer for k, layer in blocks if k == kind) for kind in BLOCKS}


def load_blocks(path: str, model) -> dict[str, list[int]]:
    """Read from a file which blocks of a model the draft leaves out.

    path     a file that `search` wrote
    model    the model that the file must be for
    returns  the layers without attention and those without an MLP, as for `without`. InputError if
             the file is damaged or for another model
    """
    def parse(facts: dict) -> dict[str, list[int]]:
        numbers = {layer for kind in BLOCKS for layer in facts[kind]}
        if not numbers <= {*range(depth_of(model))}:
            raise ValueError("the model does not have all of its layers")
        return {kind: list(facts[kind]) for kind in BLOCKS}

    expected = "blocks that `python -m survey.draft_verify search` found for this model"
    return load_facts(path, {"model": model}, expected, parse)


COMMAND_LINE = dict(
    methods=[draft_verify], commands=[search], ranges={"gamma": (1, 2, 3, 4, 6, 8, 12)})

if __name__ == "__main__":
    run_as_program(__file__)
