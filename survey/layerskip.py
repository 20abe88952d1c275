"""LayerSkip: a model drafts with its first layers and verifies with the others.

Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", arXiv
2404.16710. There is no second model, and the two parts have one cache: no layer runs twice for a
token.

    python -m survey.layerskip --prompt "..."
    python -m survey.layerskip tune --prompts FILE --out my.safetensors
    python -m survey.layerskip --tuning my.safetensors --prompt "..."

A round with γ = 2, where ● is the row that one token has in the cache of some layers:

                           root    x̂_1     x̂_2
    early, layers 1 … E      ●       ●       ●     one token after another; the norm and the LM
                             │ ↘     │ ↘     │     head after layer E give the next guess (↘)
                             │ x̂_1   │ x̂_2   │     the hidden states after layer E are kept (│)
    late, layers E + 1 … L   ●       ●       ●     all tokens at once, from these hidden states
                            p_1     p_2     p_3    the whole model's distributions judge the guesses

A column is a row of the whole model's cache. If x̂_1 is accepted and x̂_2 is not, then the first two
columns stay in all layers. The late layers go on where the early ones stopped. So p is the whole
model's, and a round of γ guesses runs γ E + L layers one after the other, for up to γ + 1 tokens.

Training makes early layers say more (Section 4.1): later layers are left out at random, and exits
share the loss. Output is that of the TUNED model, exactly, by the rule of speculative sampling.

Departures:
- What is trained. Paper: all weights. Here: changes of low rank (low_rank.py), on the model's own
  answers. Why: a tuning of minutes, in a small file.
- Layer dropout. Paper: drawn for each sample. Here: for a batch. Why: the samples of a batch go
  through a layer together. A layer that is left out is run all the same, so no time is saved.
- Exits of a step. Paper: every R-th layer, in rotation, with R of 8 to 39. Here: every third, of a
  random turn. Why: with 12 layers a larger R leaves no exit. A turn that is drawn does not depend
  on the number of the step, so a stopped run goes on alike.
- Highest rate of dropout, and scale of early losses. Paper: several, by the data. Here: 0.1 and 1,
  which are the paper's for fine-tuning on code.

Left out: the curriculum that raises dropout in the course of pretraining.
"""
import copy
import functools
import random
import sys
from pathlib import Path
from typing import Callable, Iterator

from common import WIDTHS, CachedLM, InputError, Sampler, greedy
from speculative import verify
from survey.low_rank import add_low_rank, merge_changes
from survey.parts import MODELS, fill, load_part, logits_of, save_part
from survey.views import depth_of, move_counts, open_model, split_layers, view

import torch
import torch.nn.functional as F
from tqdm import tqdm

TUNED = f"{MODELS}/layerskip.safetensors"
R = 3  # every R-th layer has an exit in a training step


# ---------------------------------------------------------------------------------- decoding

def self_speculate(target: CachedLM, early: CachedLM, late: CachedLM, prompt: list[int],
                   gamma: int, sample: Sampler, log: list | None) -> Iterator[list[int]]:
    """Draft with the early layers, and verify with the late ones. Section 4.3.

    target  whose calls those of the late layers count as
    early   layers 1 … E with an exit; features are the hidden states after layer E
    late    the other layers, which read these hidden states
    yields  chunks of 1 to gamma + 1 tokens
    """
    early.start(prompt[:-1])
    late.start([])
    for i in range(0, len(prompt) - 1, WIDTHS[-1]):  # a long prompt comes in parts
        part = early.features[i:i + WIDTHS[-1]]
        late.forward(part, keep=0, counts=False)
        late.commit(range(len(part)))
    root = prompt[-1]
    while True:
        # Self-drafting (4.3.1): an exit after layer E
        guesses, draft_probs, hidden = [], [], []
        token = root
        for _ in range(gamma):
            logits = early.forward([token])  # [1, V]
            hidden.append(early.features)  # [1, d]
            draft_probs.append(sample.probs(logits))
            [token] = sample.draw(draft_probs[-1])
            guesses.append(token)
        early.forward([token], keep=0)  # the last guess needs a hidden state, but no guess after it
        hidden.append(early.features)
        # Self-verification (4.3.2): the other layers for all of these, at once
        logits = late.forward(torch.cat(hidden))  # [γ+1, V]
        target_probs = sample.probs(logits)
        accepted, root = verify(target_probs, torch.cat(draft_probs), guesses, sample)
        # One cache (4.3.3): the rows of the accepted tokens stay, in all layers
        early.commit(range(1 + accepted))
        late.commit(range(1 + accepted))
        move_counts(late, target)
        if log is not None:
            layers = gamma * depth_of(early.model) + depth_of(target.model)
            log.append({"drafted": gamma, "accepted": accepted, "layers": layers})
        yield guesses[:accepted] + [root]


def layerskip(target: CachedLM, prompt: list[int], *, E: int = 0, gamma: int = 4,
              tuning: str = TUNED, sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Draft with the first layers of a model that was tuned for it, through the model's own norm
    and LM head, and verify with the other layers. Section 4.3. Lossless for the TUNED model, whose
    text this is.

    E:      layers of the draft; 0: as the file of the tuning says
    gamma:  tokens drafted a round
    tuning: file of low-rank changes, made by `python -m survey.layerskip tune`; empty: the model
            as it is, and E is to be given
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted", "layers"} a round. The last
    is how many layers ran one after the other.
    """
    if gamma < 1:
        raise InputError(f"--gamma must be 1 or more, got {gamma}")
    if E < 0:
        raise InputError(f"--E must be 0 or more, got {E}")
    if E == 0 and not tuning:
        raise InputError("--E must be 1 or more without --tuning, got 0")
    model, tuned_E = target.once(("layerskip", tuning), lambda: load_tuned(tuning, target.model))
    if E == 0:
        E = tuned_E
    early, late = target.once((model, E), lambda: split_layers(CachedLM(model, target.vocab), E))
    yield from self_speculate(target, early, late, prompt, gamma, sample, log)


# -------------------------------------------------------------------------------------- the loss

def run_with_dropout(model, ids: torch.Tensor, rng: random.Random) -> dict[int, torch.Tensor]:
    """Run all layers over ids [B, T], where some hand on their input in place of their output.

    Section 4.1.1: layer l of 0 … L - 1 does so with the probability 0.1 (2^{l / (L - 1)} - 1).

    returns  {l: [B, T, d], what layer l of 1 … L handed on}
    """
    _, decoder, layers, _ = open_model(model)
    L = depth_of(model)
    handed_on, hooks = {}, []

    def hand_on(l: int, left_out: bool, layer, inputs: tuple, output):
        in_tuple = isinstance(output, tuple)
        x = output[0] if in_tuple else output
        if left_out:
            x = inputs[0]
        handed_on[l] = x
        if in_tuple:
            return (x, *output[1:])
        return x
    for l, layer in enumerate(decoder._modules[layers]):
        chance = 0.1 * (2 ** (l / max(1, L - 1)) - 1)
        left_out = rng.random() < chance
        hooks.append(layer.register_forward_hook(functools.partial(hand_on, l + 1, left_out)))
    try:
        model.get_decoder()(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return handed_on


def tuning_loss(model, to_logits: Callable, pairs: list[tuple[list[int], list[int]]],
                rng: random.Random) -> torch.Tensor:
    """Compute LayerSkip's loss of (prompt, answer) pairs, on the tokens of the answers.

    Section 4.1.2: the mean cross-entropy (nats) of the exits after every third layer and after the
    last one. The exit after layer l weighs 1 + … + (l - 1).

    to_logits  turns the LM head's output into logits (parts.logits_of)
    rng        draws the layers that are left out, and the turn of the exits
    """
    from models.training import pad_pairs
    _, decoder, _, norm = open_model(model)
    L = depth_of(model)
    head = model.get_output_embeddings()
    last_norm = decoder._modules[norm]
    ids, learns = pad_pairs(pairs)  # [B, T], [B, T - 1]
    ids, learns = ids.to(model.device), learns.to(model.device)
    labels = ids[:, 1:][learns]  # [tokens of answers]
    handed_on = run_with_dropout(model, ids[:, :-1], rng)
    turn = rng.randrange(R)
    exits = [l for l in range(1, L) if l % R == turn] + [L]
    weights = [l * (l - 1) / 2 for l in exits]
    loss = 0.0
    for l, weight in zip(exits, weights):
        hidden = last_norm(handed_on[l][learns])
        loss = loss + weight * F.cross_entropy(to_logits(head(hidden).float()), labels)
    return loss / sum(weights)


# --------------------------------------------------------------------------- what an exit says

@torch.inference_mode()
def collect_states(model, data: list[tuple[list[int], list[int]]], layers: int) -> torch.Tensor:
    """Collect the hidden states from which the tokens of answers are guessed.

    data     pairs of a prompt and its answer
    layers   after how many layers. After all of them, the states are behind the last norm
    returns  [tokens of answers, d], the state of the position before each, bfloat16 on the CPU
    """
    if layers < depth_of(model):
        model = view(model, 0, layers)
    lm = CachedLM(model)
    states = []
    for prompt, answer in tqdm(data, desc=f"{layers} layers"):
        lm.start(prompt + answer[:-1])
        states.append(lm.features[len(prompt) - 1:].cpu().to(torch.bfloat16))
    return torch.cat(states)


@torch.inference_mode()
def measure_exit(model, data: list, layers: int, ranks: int = 1) -> float:
    """Measure how often an exit through the model's last norm and LM head has the next token.

    data    pairs of a prompt and its answer
    layers  how many layers are before the exit
    ranks   how many of the likeliest tokens may be the next one
    """
    exit_model = model
    if layers < depth_of(model):
        exit_model = view(model, 0, layers)
    head = exit_model.get_output_embeddings()
    tokens = torch.tensor([token for _, answer in data for token in answer])[:, None]
    states = collect_states(model, data, layers).to(model.dtype)
    best = [head(x.to(model.device)).topk(ranks).indices.cpu() for x in states.split(512)]
    return (torch.cat(best) == tokens).any(1).float().mean().item()


# ------------------------------------------------------------------------------------ training

def tune(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None, E: int = 3,
         rank: int = 16, max_new_tokens: int = 200, steps: int = 150, batch: int = 16,
         lr: float = 5e-4, seed: int = 0) -> None:
    """Train a model's layers for early exits, on the model's own answers to prompts. A stopped run
    goes on.

    out:   the safetensors file to make
    work:  folder of answers and checkpoints (default: OUT.work)
    E:     layers of the draft
    rank:  of the change of each matrix
    max_new_tokens: of an answer
    batch: answers a step
    lr:    the highest rate, after a warm-up
    """
    from models.training import (Training, collect_examples, count_tokens, digest, require,
                                 require_training_options, sample_alike, warm_linear)
    require_training_options(lr, rank=rank, max_new_tokens=max_new_tokens, steps=steps, batch=batch)
    require(1 <= E < depth_of(model), "E", f"1 to {depth_of(model) - 1}", E)
    if work is None:
        work = Path(f"{out}.work")
    split_layers(CachedLM(model), E)
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed)
    to_logits = logits_of(model)
    fingerprint = digest(model.state_dict()), data, held_out, batch
    tuned = copy.deepcopy(model).requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        changes = add_low_rank(tuned, rank)
    print(f"{sum(p.numel() for p in changes.values()):,} parameters")

    def loss_of(rng: random.Random) -> torch.Tensor:
        pairs = sample_alike(data, batch, rng, count_tokens)
        return tuning_loss(tuned, to_logits, pairs, rng)

    def evaluate() -> tuple[dict, str]:
        right = [measure_exit(tuned, held_out, layers) for layers in (E, depth_of(model))]
        return ({"right": right}, f"held-out tokens right after {E} layers {right[0]:.3f}, "
                f"after all {right[1]:.3f}")
    Training(changes, fingerprint, name="layerskip", steps=steps, lr=lr, rate=warm_linear,
             seed=seed, folder=work).train(loss_of, evaluate)
    save_part(out, "a LayerSkip tuning", model, changes, E=E, rank=rank)


# ------------------------------------------------------------------------------------- its file

def load_tuned(path: str | Path, model):
    """Load the changes of a tuning, and make a model that has them in its weights.

    path     of the file; an empty one means no tuning
    returns  the tuned model, a copy, and E. Without a tuning: the model itself, and 0. InputError
             where the file was made for another model
    """
    if not path:
        return model, 0
    header, tensors = load_part(path, "a LayerSkip tuning", model)
    tuned = copy.deepcopy(model)
    fill(add_low_rank(tuned, header["rank"]), tensors, path)
    return merge_changes(tuned), header["E"]


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    """Say how many guesses were made and accepted, and how many layers ran for a token."""
    drafted = sum(record["drafted"] for record in run.log)
    accepted = sum(record["accepted"] for record in run.log)
    layers = sum(record["layers"] for record in run.log)
    n = len(run.log)
    return (f"a round: {drafted / n:.1f} guesses, {accepted / n:.2f} accepted; "
            f"{layers / run.tokens:.1f} layers run a token")


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([layerskip], report, lossy=[layerskip], commands=[tune],
                  ranges={"gamma": (1, 2, 3, 4, 5, 6, 8)}))
