"""An early exit of a frozen model: a small network after its first layers, through which it drafts.

This is Kangaroo with another exit. Liu et al., "Kangaroo: Lossless Self-Speculative Decoding via
Double Early Exiting", arXiv 2404.18911, with released code in Equationliu/Kangaroo. The model stays
as it is, and so does its output, since the other layers verify what the exit guesses. The loop is
LayerSkip's (layerskip.py).

    python -m survey.early_exit --prompt "..."
    python -m survey.early_exit train --prompts FILE --out my.safetensors
    python -m survey.early_exit --exit my.safetensors --prompt "..."

    layers 1 … E ── x ──┬── layers E + 1 … L ── norm ── LM head      p, the model's own distribution
                        └── exit ── LM head                          q, from which a guess is drawn

    exit(x) = norm_2(x + W_2 SiLU(W_1 norm_1(x)))
    loss    = - Σ_v p(v) log q(v), the cross-entropy of q with p

The LM head is the same in both lines. Only the exit is trained: norm_1, W_1, W_2 and norm_2, which
begins as a copy of the model's last norm. W_2 begins as 0, so that at first q is what LayerSkip's
exit would say.

Departures:
- The exit. Paper: one block of attention between two norms, without an MLP. Here: an MLP without
  attention, the opposite half. Why: an exit without attention has no cache.
- End of a draft. Paper: a second "early exit" ends a draft after a guess of low confidence (0.6 in
  the released code), or after 6 guesses. Here: a draft always has γ guesses. Why: one loop serves
  LayerSkip too.
- Sampling. Paper: greedy decoding alone, in the released code. Here: sampling too, exactly. Why:
  LayerSkip's loop has the rule of speculative sampling already.
- Training data. Paper: ShareGPT. Here: the model's own greedy answers, on their tokens alone. Why:
  these are the tokens that the exit has to guess.
"""
import copy
import random
import sys
from pathlib import Path
from typing import Callable, Iterator

from common import CachedLM, InputError, Sampler, greedy
from survey.layerskip import collect_states, report, self_speculate
from survey.parts import MODELS, fill, load_part, logits_of, save_part
from survey.views import depth_of, open_model, split_layers

import torch
import torch.nn.functional as F

EXIT = f"{MODELS}/exit.safetensors"


# --------------------------------------------------------------------- the exit and its loss

class Exit(torch.nn.Module):
    """Turn the hidden states x [n, d] after layer E into what the model's LM head reads.

    model  the model that the exit is for. The exit begins with a copy of its last norm
    E      how many layers stand before the exit
    width  the width of the exit's MLP
    """

    def __init__(self, model, E: int, width: int):
        super().__init__()
        _, decoder, _, norm = open_model(model)
        d = model.get_output_embeddings().weight.shape[1]
        self.E = E
        self.norm = copy.deepcopy(decoder._modules[norm]).float()  # norm_2
        self.before = torch.nn.LayerNorm(d)  # norm_1
        self.W_1 = torch.nn.Linear(d, width)
        self.W_2 = torch.nn.Linear(width, d)
        # At first the MLP adds nothing, so training begins with the exit that the model has.
        torch.nn.init.zeros_(self.W_2.weight)
        torch.nn.init.zeros_(self.W_2.bias)
        self.requires_grad_(True).to(model.device)

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Name the parameters that are trained and saved: all of the exit's."""
        return dict(self.named_parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.W_2(F.silu(self.W_1(self.before(x)))))


def score_states(model, to_logits: Callable, x: torch.Tensor) -> torch.Tensor:
    """Compute the logits that a model's LM head makes of hidden states.

    to_logits  turns the LM head's output into logits (parts.logits_of)
    x          [n, d], hidden states behind the last norm or behind an exit
    returns    [n, V], float32
    """
    head = model.get_output_embeddings()
    return to_logits(head(x.to(head.weight.dtype)).float())


def exit_loss(model, to_logits: Callable, network: Exit, early: torch.Tensor,
              last: torch.Tensor) -> torch.Tensor:
    """Compute the cross-entropy of an exit's distribution q with the model's own distribution p.

    to_logits  turns the LM head's output into logits (parts.logits_of)
    network    the exit
    early      [n, d], hidden states after layer E, float32
    last       [n, d], hidden states of the same positions behind the last norm
    returns    the mean over the n positions, in nats
    """
    p = score_states(model, to_logits, last).softmax(-1)
    q_logits = score_states(model, to_logits, network(early))
    return F.cross_entropy(q_logits, p)


# ---------------------------------------------------------------------------------- decoding

def early_exit(target: CachedLM, prompt: list[int], *, gamma: int = 6, exit: str = EXIT,
               trained: Exit | None = None, sample: Sampler = greedy,
               log: list | None = None) -> Iterator[list[int]]:
    """Draft with the first layers and a trained exit, and verify with the other layers.

    The exit stands before the frozen LM head. The output is the model's own, exactly.

    gamma: how many tokens are drafted in a round, 1 or more
    exit:  the file of an exit, made by `python -m survey.early_exit train`

    Yields chunks of 1 to gamma + 1 tokens; logs {"drafted", "accepted", "layers"} a round.

    In the log "layers" is how many layers ran one after the other. In Python, `trained` may be an
    Exit, which takes the place of the file.
    """
    if gamma < 1:
        raise InputError(f"--gamma must be 1 or more, got {gamma}")
    if trained is None:
        trained = target.once(("exit", exit), lambda: load_exit(exit, target.model))
    early, late = target.once((trained, "halves"), lambda: split_layers(target, trained.E, trained))
    yield from self_speculate(target, early, late, prompt, gamma, sample, log)


# ------------------------------------------------------------------------------------ training

def fit(model, network: Exit, data: list, held_out: list, *, steps: int, batch: int, lr: float,
        seed: int = 0, work: Path | None = None) -> dict:
    """Train an exit in place, while the model stays as it is.

    network   the exit
    data      pairs of a prompt and its answer, to train on
    held_out  pairs on which the exit is only measured
    steps     how many updates there are
    batch     how many positions a step learns from
    lr        the learning rate at the beginning, which falls along a cosine
    seed      another seed draws other positions
    work      the folder of the checkpoints. None: there are none
    returns   the figure {"right": r} of some steps and of the last one. r is how often the exit's
              likeliest token is the model's
    """
    from models.training import Training, digest
    model.requires_grad_(False)
    to_logits = logits_of(model)
    L = depth_of(model)
    # The frozen model's states never change, so the model runs only once over all answers.
    train_early = collect_states(model, data, network.E)
    train_last = collect_states(model, data, L)
    held_early = collect_states(model, held_out, network.E)
    held_last = collect_states(model, held_out, L)

    def to_device(x: torch.Tensor) -> torch.Tensor:
        return x.to(model.device).float()

    def loss_of(rng: random.Random) -> torch.Tensor:
        rows = rng.choices(range(len(train_early)), k=batch)
        return exit_loss(model, to_logits, network, to_device(train_early[rows]),
                         to_device(train_last[rows]))

    @torch.inference_mode()
    def evaluate() -> tuple[dict, str]:
        same = []
        for early, last in zip(held_early.split(512), held_last.split(512)):
            guesses = score_states(model, to_logits, network(to_device(early))).argmax(-1)
            choices = score_states(model, to_logits, to_device(last)).argmax(-1)
            same.append(guesses == choices)
        right = torch.cat(same).float().mean().item()
        return {"right": right}, f"held-out guesses right {right:.3f}"

    fingerprint = digest(model.state_dict()), network.E, data, held_out, batch
    return Training(network.trainable(), fingerprint, name="exit", steps=steps, lr=lr, seed=seed,
                    folder=work).train(loss_of, evaluate)


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None, E: int = 2,
          width: int = 512, max_new_tokens: int = 200, steps: int = 2000, batch: int = 512,
          lr: float = 2e-3, seed: int = 0) -> None:
    """Train an exit for a frozen model, on the model's own answers to prompts.

    A stopped run goes on where it was.

    out:   the safetensors file to make
    work:  the folder of the answers and the checkpoints. The default is OUT.work
    E:     how many layers stand before the exit
    width: the width of the exit's MLP
    max_new_tokens: the most tokens of an answer
    batch: how many positions a step learns from
    lr:    the learning rate at the beginning, which falls along a cosine
    """
    from models.training import collect_examples, require, require_training_options
    require_training_options(lr, width=width, max_new_tokens=max_new_tokens, steps=steps,
                             batch=batch)
    require(1 <= E < depth_of(model), "E", f"1 to {depth_of(model) - 1}", E)
    if work is None:
        work = Path(f"{out}.work")
    split_layers(CachedLM(model), E)  # refuses a model that cannot be split
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Exit(model, E, width)
    parameters = network.trainable()
    print(f"{sum(p.numel() for p in parameters.values()):,} parameters")
    curve = fit(model, network, data, held_out, steps=steps, batch=batch, lr=lr, seed=seed,
                work=work)
    save_part(out, "an early exit", model, parameters, E=E, width=width, **curve[steps])


# ------------------------------------------------------------------------------------- its file

def load_exit(path: str | Path, model) -> Exit:
    """Load an exit and give it the type and the device of a model.

    path     the file that `train` made
    model    the model that the exit must be for
    returns  the exit. InputError if the file was made for another model
    """
    header, tensors = load_part(path, "an early exit", model)
    network = Exit(model, header["E"], header["width"])
    fill(network.trainable(), tensors, path)
    return network.requires_grad_(False).to(model.dtype)


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([early_exit], report, commands=[train],
                  ranges={"gamma": (1, 2, 3, 4, 5, 6, 8)}))
