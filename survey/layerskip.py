"""A model drafts for itself with fewer of its layers: no second model, its own cache.

layerskip     Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative
              Decoding", arXiv 2404.16710: with the first E layers, and the others verify
adapter       the same of a frozen model, whose exit is a small network (the idea of Kangaroo,
              Liu et al., arXiv 2404.18911, whose exit is a layer)
ppd           Yang et al., "Predictive Pipelined Decoding", arXiv 2307.05908: a table, no decoding

    python -m survey.layerskip train --prompts FILE --out my.safetensors        # an adapter
    python -m survey.layerskip --method adapter --adapter my.safetensors --prompt "..."

    early = layers 1 … E and an exit:  root -> x̂_1 -> … -> x̂_γ    kept: the hidden state of each
    late  = layers E + 1 … L:          all of these at once       p_1 … p_{γ+1}, as the whole model

The late layers go on where the early ones stopped: no layer runs twice for a token, and a round of
γ guesses costs γ E + L layers one after the other, for up to γ + 1 tokens.

Lossless by the rule of speculative sampling. layerskip decodes the TUNED model, whose output it
equals. Departures: see `search`, `train` and `tune`.
"""
import copy
import itertools
import random
import sys
from pathlib import Path
from typing import Callable, Iterator

import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import WIDTHS, CachedLM, InputError, Sampler, eos_ids, greedy
from speculative import verify
from survey.low_rank import add_low_rank, merge_changes
from survey.parts import MODELS, fill, load_part, logits_of, save_part
from survey.views import depth_of, move_counts, open_model, split_layers, view

ADAPTER = f"{MODELS}/exit.safetensors"
TUNED = f"{MODELS}/layerskip.safetensors"


# --------------------------------------------------------------------------------- early exits

def by_halves(target: CachedLM, early: CachedLM, late: CachedLM, prompt: list[int], gamma: int,
              sample: Sampler, log: list | None) -> Iterator[list[int]]:
    """The early layers draft; the late ones go on from their hidden states and verify. What the
    late layers do counts as the target's calls."""
    early.start(prompt[:-1])
    late.start([])
    for i in range(0, len(prompt) - 1, WIDTHS[-1]):  # a long prompt comes in parts
        late.forward(early.features[i:i + WIDTHS[-1]], keep=1, counts=False)
        late.commit(range(len(late.parents)))
    root = prompt[-1]
    while True:
        guesses, draft_probs, hidden = [], [], []
        for _ in range(gamma):
            draft_probs.append(sample.probs(early.forward(guesses[-1:] or [root])))  # [1, V]
            hidden.append(early.features)
            guesses += sample.draw(draft_probs[-1])
        early.forward(guesses[-1:])  # its exit is not used
        hidden.append(early.features)
        target_probs = sample.probs(late.forward(torch.cat(hidden)))  # [γ+1, V]
        accepted, root = verify(target_probs, torch.cat(draft_probs), guesses, sample)
        for lm in (early, late):
            lm.commit(range(1 + accepted))
        move_counts(late, target)
        if log is not None:
            log.append({"drafted": gamma, "accepted": accepted,
                        "layers": gamma * depth_of(early.model) + depth_of(target.model)})
        yield guesses[:accepted] + [root]


def adapter(target: CachedLM, prompt: list[int], *, gamma: int = 6, adapter: str = ADAPTER,
            trained: "Exit | None" = None, sample: Sampler = greedy,
            log: list | None = None) -> Iterator[list[int]]:
    """Draft with the first layers and a trained exit before the frozen LM head; verify with the
    others. Lossless for the model as it is.

    gamma:   tokens drafted a round
    adapter: file of an exit, made by `python -m survey.layerskip train`
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted", "layers"} a round, the
    last run one after the other. `trained`: for the file.
    """
    if gamma < 1:
        raise InputError(f"expected gamma of 1 or more, got {gamma}")
    trained = trained or target.once(("exit", adapter), lambda: load_exit(adapter, target.model))
    early, late = target.once((trained, "halves"), lambda: split_layers(target, trained.E, trained))
    yield from by_halves(target, early, late, prompt, gamma, sample, log)


def layerskip(target: CachedLM, prompt: list[int], *, E: int = 0, gamma: int = 4,
              tuning: str = TUNED, sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Draft with the first layers of a model tuned for it and its own norm and head; verify with
    the others. Section 4.3. Lossless for the TUNED model, whose text this is.

    E:      layers of the draft; 0: as the tuning's file says
    gamma:  tokens drafted a round
    tuning: file of low-rank changes, made by `python -m survey.layerskip tune`; empty: the model
            as it is, where E is given
    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted", "layers"} a round.
    """
    if gamma < 1 or E < 0 or not (tuning or E):
        raise InputError(f"expected gamma of 1 or more and E of 0 or more, got {gamma} and {E}")
    model, its_E = target.once(("layerskip", tuning), lambda: load_tuned(tuning, target.model))
    E = E or its_E
    early, late = target.once((model, E), lambda: split_layers(CachedLM(model, target.vocab), E))
    yield from by_halves(target, early, late, prompt, gamma, sample, log)


# --------------------------------------------------------------------------- a trained exit

class Exit(torch.nn.Module):
    """After E layers, x -> norm(x + W_2 SiLU(W_1 norm'(x))), which the model's LM head reads."""

    def __init__(self, model, E: int, width: int):
        super().__init__()
        _, decoder, _, norm = open_model(model)
        self.E = E
        d = model.get_output_embeddings().weight.shape[1]
        self.norm = copy.deepcopy(decoder._modules[norm]).float()
        self.before = torch.nn.LayerNorm(d)
        self.W_1 = torch.nn.Linear(d, width)
        self.W_2 = torch.nn.Linear(width, d)
        torch.nn.init.zeros_(self.W_2.weight)  # at first the model's own exit
        torch.nn.init.zeros_(self.W_2.bias)
        self.requires_grad_(True).to(model.device)

    def own(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.named_parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.W_2(F.silu(self.W_1(self.before(x)))))


def load_exit(path: str | Path, model) -> Exit:
    """InputError where the file was made for another model."""
    header, tensors = load_part(path, "an early exit", model)
    exit = Exit(model, header["E"], header["width"])
    fill(exit.own(), tensors, path)
    return exit.requires_grad_(False).to(model.dtype)


@torch.inference_mode()
def hidden_states(model, data: list[tuple[list[int], list[int]]], layers: int):
    """[N, d] in bfloat16 on the CPU: what the first `layers` layers, or with all of them the last
    norm, make of the position before each token of an answer, of (prompt, answer) pairs."""
    L, found = depth_of(model), []
    lm = CachedLM(view(model, 0, layers) if layers < L else model)
    for prompt, answer in tqdm(data, desc=f"{layers} layers"):
        lm.start(prompt + answer[:-1])
        found.append(lm.features[len(prompt) - 1:].cpu().to(torch.bfloat16))
    return torch.cat(found)


@torch.inference_mode()
def exit_accuracy(model, data: list, layers: int, ranks: int = 1) -> float:
    """How often one of the `ranks` likeliest tokens after so many layers, by the model's last norm
    and LM head, is the next token of an answer."""
    head = (view(model, 0, layers) if layers < depth_of(model) else model).get_output_embeddings()
    tokens = torch.tensor([token for _, answer in data for token in answer])[:, None]
    states = hidden_states(model, data, layers).to(model.dtype)
    best = [head(x.to(model.device)).topk(ranks).indices.cpu() for x in states.split(512)]
    return (torch.cat(best) == tokens).any(1).float().mean().item()


def fit(model, exit: Exit, data: list, held_out: list, *, steps: int, batch: int, lr: float,
        seed: int = 0, work: Path | None = None) -> dict:
    """Train an exit on (prompt, answer) pairs, the model frozen: cross-entropy with the model's own
    distribution. Returns {step: {"right"}}: how often its likeliest token is the model's."""
    from models.training import Training, digest
    model.requires_grad_(False)
    own, head = logits_of(model), model.get_output_embeddings()
    known, others = ([hidden_states(model, some, layers) for layers in (exit.E, depth_of(model))]
                     for some in (data, held_out))

    def logits(x: torch.Tensor, after: torch.nn.Module) -> torch.Tensor:
        return own(head(after(x.to(model.device).float()).to(head.weight.dtype)).float())

    def loss_of(rng: random.Random) -> torch.Tensor:
        some = rng.choices(range(len(known[0])), k=batch)
        p = logits(known[1][some], torch.nn.Identity()).softmax(-1)
        return F.cross_entropy(logits(known[0][some], exit), p)

    @torch.inference_mode()
    def evaluate() -> tuple[dict, str]:
        guessed, true = ([logits(part, after).argmax(-1) for part in x.split(512)]
                         for x, after in zip(others, (exit, torch.nn.Identity())))
        right = (torch.cat(guessed) == torch.cat(true)).float().mean().item()
        return {"right": right}, f"held-out guesses right {right:.3f}"
    of = digest(model.state_dict()), exit.E, data, held_out, batch
    return Training(exit.own(), of, name="exit", steps=steps, lr=lr, seed=seed,
                    folder=work).train(loss_of, evaluate)


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None, E: int = 2,
          width: int = 512, max_new_tokens: int = 200, steps: int = 2000, batch: int = 512,
          lr: float = 2e-3, seed: int = 0) -> None:
    """Train an exit for a frozen model on its own answers. A stopped run goes on.

    out:   the safetensors file to make
    work:  folder of answers and checkpoints (default: OUT.work)
    E:     layers before the exit
    width: of its MLP
    max_new_tokens: of an answer
    batch: positions a step
    lr:    where the cosine begins
    """
    from models.training import collect_examples
    if min(E, width, steps, batch, max_new_tokens) < 1 or E >= depth_of(model) or not lr > 0:
        raise InputError(f"expected E of 1 to {depth_of(model) - 1}, width, steps, batch and "
                         "max-new-tokens of 1 or more, lr above 0")
    work = work or Path(f"{out}.work")
    split_layers(CachedLM(model), E)
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        exit = Exit(model, E, width)
    print(f"{sum(x.numel() for x in exit.own().values()):,} parameters")
    curve = fit(model, exit, data, held_out, steps=steps, batch=batch, lr=lr, seed=seed, work=work)
    save_part(out, "an early exit", model, exit.own(), E=E, width=width, **curve[steps])


# ----------------------------------------------------------------------- a tuned model: LayerSkip

def load_tuned(path: str | Path, model):
    """(the tuned model, E); for an empty path the model as it is."""
    if not path:
        return model, 0
    header, tensors = load_part(path, "a LayerSkip tuning", model)
    tuned = copy.deepcopy(model)
    fill(add_low_rank(tuned, header["rank"]), tensors, path)
    return merge_changes(tuned), header["E"]


def tuning_loss(model, own: Callable, some: list[tuple[list[int], list[int]]],
                rng: random.Random) -> torch.Tensor:
    """Section 4.1 and 4.2 on (prompt, answer) pairs, on tokens of the answers: the cross-entropies
    (nats) of a third of the exits and of the last layer, exit l weighted by 1 + … + (l - 1), over
    the sum of weights; layer l of 0 … L - 1 is left out with 0.1 (2^{l / (L - 1)} - 1)."""
    from models.training import pad_pairs
    _, decoder, layers, norm = open_model(model)
    L, head, last = depth_of(model), model.get_output_embeddings(), decoder._modules[norm]
    kept = {}  # of layer l from 1 on its output
    hooks = []
    for l, layer in enumerate(decoder._modules[layers]):
        left_out = rng.random() < 0.1 * (2 ** (l / max(1, L - 1)) - 1)

        def hook(_, given, out, l=l, left_out=left_out):
            x = out[0] if isinstance(out, tuple) else out
            kept[l + 1] = given[0] if left_out else x
            return (kept[l + 1], *out[1:]) if isinstance(out, tuple) else kept[l + 1]
        hooks.append(layer.register_forward_hook(hook))
    ids, learns = (x.to(model.device) for x in pad_pairs(some))  # [B, T], [B, T - 1]
    labels = ids[:, 1:][learns]
    model.get_decoder()(input_ids=ids[:, :-1], use_cache=False)
    for hook in hooks:
        hook.remove()
    turn = rng.randrange(3)
    weights = {l: l * (l - 1) / 2 for l in range(1, L) if l % 3 == turn} | {L: L * (L - 1) / 2}
    loss = sum(weight * F.cross_entropy(own(head(last(kept[l][learns])).float()), labels)
               for l, weight in weights.items())
    return loss / sum(weights.values())


def tune(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None, E: int = 3,
         rank: int = 16, max_new_tokens: int = 200, steps: int = 150, batch: int = 16,
         lr: float = 5e-4, seed: int = 0) -> None:
    """LayerSkip's training on a model's own answers, of low-rank changes of its layers (the paper
    trains all weights). A stopped run goes on.

    out:   the safetensors file to make
    work:  folder of answers and checkpoints (default: OUT.work)
    E:     layers of the draft
    rank:  of the change of each matrix
    max_new_tokens: of an answer
    batch: answers a step
    lr:    the highest rate, after a warm-up
    """
    from models.training import (Training, collect_examples, count_tokens, digest, sample_alike,
                                 warm_linear)
    if min(E, rank, steps, batch, max_new_tokens) < 1 or E >= depth_of(model) or not lr > 0:
        raise InputError(f"expected E of 1 to {depth_of(model) - 1}, rank, steps, batch and "
                         "max-new-tokens of 1 or more, lr above 0")
    work = work or Path(f"{out}.work")
    split_layers(CachedLM(model), E)
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed)
    own, of = logits_of(model), digest(model.state_dict())
    tuned = copy.deepcopy(model).requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        part = add_low_rank(tuned, rank)
    print(f"{sum(x.numel() for x in part.values()):,} parameters")

    def loss_of(rng: random.Random) -> torch.Tensor:
        return tuning_loss(tuned, own, sample_alike(data, batch, rng, count_tokens), rng)

    def evaluate() -> tuple[dict, str]:
        right = [exit_accuracy(tuned, held_out, layers) for layers in (E, depth_of(model))]
        return ({"right": right}, f"held-out tokens right after {E} layers {right[0]:.3f}, "
                f"after all {right[1]:.3f}")
    settings = of, data, held_out, batch
    Training(part, settings, name="layerskip", steps=steps, lr=lr, rate=warm_linear, seed=seed,
             folder=work).train(loss_of, evaluate)
    save_part(out, "a LayerSkip tuning", model, part, E=E, rank=rank)


def ppd(model, tokenizer, prompts: list[list[int]], *, max_new_tokens: int = 60) -> None:
    """Predictive Pipelined Decoding: while the model goes on above layer d of L, k workers begin
    the next token from each of the k likeliest tokens of an exit there. A table by d and k: how
    often one of them is right (p_correct), and the latency of a token that this gives, as a share
    of L layers: a right start is L - d layers ahead, so 1 - p_correct (L - d) / L. With one worker
    nothing is faster. (SPEED, Hooper et al., arXiv 2310.12072, pipelines early exits likewise.)

    max_new_tokens: of an answer
    """
    from models.training import generate_answers
    batches = generate_answers(model, eos_ids(model, tokenizer), prompts, max_new_tokens)
    answers = [a for some in batches for a in some]
    data = [(p, a) for p, a in zip(prompts, answers) if a]
    L = depth_of(model)
    layers = sorted({max(1, round(L * share)) for share in (0.25, 0.5, 0.75)})
    print("| layers | k | right | latency |\n| --- | --- | --- | --- |")
    for d, k in itertools.product(layers, (1, 3, 5)):
        right = exit_accuracy(model, data, d, k)
        print(f"| {d} of {L} | {k} | {right:.3f} | {1 - right * (L - d) / L:.3f} |")


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    drafted, accepted, layers = (sum(r[x] for r in run.log) for x in run.log[0])
    n = len(run.log)
    return (f"a round: {drafted / n:.1f} guesses, {accepted / n:.2f} accepted; "
            f"{layers / run.tokens:.1f} layers run a token")


if __name__ == "__main__":
    from cli import main
    sys.exit(main([adapter, layerskip], report, lossy=[layerskip],
                  commands=[train, tune, ppd], ranges={"gamma": (1, 2, 3, 4, 5, 6, 8)}))
