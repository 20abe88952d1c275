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
- Sampling. Released code: only greedy decoding. Here: sampling too, exactly. Why: LayerSkip's loop
  has the rule of speculative sampling already.
- Training data. Paper: ShareGPT. Here: the tokens of the model's own greedy answers. Why:
  these are the tokens that the exit has to guess.
"""
import copy
import random
import sys
from pathlib import Path
from typing import Callable, Iterator

from common import Sampler, greedy
from support.layers import FeatureLM, depth_of, name_norm, split_layers
from support.parts import MODELS, Part, load_trained, save_trained, score_with
from survey.layerskip import collect_states, self_speculate
from training.loop import (compute_frozen, divergence_in_parts, fit_part, prepare_training,
                           sample_rows)

import torch
import torch.nn.functional as F

EXIT = f"{MODELS}/exit.safetensors"


# --------------------------------------------------------------------- the exit and its loss

class Exit(Part):
    """Turn the hidden states x [n, d] after layer E into what the model's LM head reads.

    model  the model that the exit is for. The exit begins with a copy of its last norm
    E      how many layers stand before the exit
    width  the width of the exit's MLP
    right  how often its likeliest token is the model's on held-out answers, once it is trained
    vocab  None, since it can guess all tokens of the model
    """
    title = "an early exit"
    facts = ("right",)
    vocab = None

    def __init__(self, model, E: int, width: int):
        super().__init__()
        decoder = model.get_decoder()
        d = model.get_output_embeddings().weight.shape[1]
        self.E = E
        self.norm = copy.deepcopy(decoder._modules[name_norm(decoder)]).float()  # norm_2
        self.before = torch.nn.LayerNorm(d)  # norm_1
        self.W_1 = torch.nn.Linear(d, width)
        self.W_2 = torch.nn.Linear(width, d)
        # At first the MLP adds nothing, so training begins with the exit that the model has.
        torch.nn.init.zeros_(self.W_2.weight)
        torch.nn.init.zeros_(self.W_2.bias)
        self.requires_grad_(True).to(model.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.W_2(F.silu(self.W_1(self.before(x)))))


def exit_loss(score: Callable, network: Exit, early: torch.Tensor, last: torch.Tensor,
              vocab: int) -> torch.Tensor:
    """Compute the cross-entropy of an exit's distribution q with the model's own distribution p.

    score    turns what the LM head reads into logits (parts.score_with)
    network  the exit
    early    [n, d], hidden states after layer E, float32
    last     [n, d], hidden states of the same positions after the last norm
    vocab    the number of logits
    returns  the mean over the n positions, in nats
    """
    return divergence_in_parts("cross-entropy", score, score, vocab, last, network(early)).mean()


# ---------------------------------------------------------------------------------- decoding

def early_exit(target: FeatureLM, prompt: list[int], *, gamma: int = 6, exit: str = EXIT,
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
    trained = trained or target.once(load_exit, exit, target.model)
    early, late = target.once(split_layers, target, trained.E, trained)
    yield from self_speculate(target, early, late, prompt, gamma, sample, log)


# ------------------------------------------------------------------------------------ training

def fit(model, network: Exit, data: list, held_out: list, *, batch: int, **how) -> None:
    """Train an exit in place, while the model stays as it is.

    data      pairs of a prompt and its answer, to train on
    held_out  pairs on which the exit is only measured
    batch     how many positions a step learns from
    how       other arguments of `fit_part`

    The exit's `right` is then how often its likeliest token is the model's.
    """
    model.requires_grad_(False)
    score = score_with(model)
    L, (V, d) = depth_of(model), model.get_output_embeddings().weight.shape

    def collect(pairs: list) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compute the states after layer E and after the last norm, [n, d] each, of each answer."""
        return [*zip(collect_states(model, pairs, network.E), collect_states(model, pairs, L))]
    states_of, texts = compute_frozen(collect, data, 2 * d)  # two states of d numbers a token
    lengths = [len(answer) for _, answer in data]
    # All states of all held-out answers, 512 at a time: more logits could fill the memory.
    held_early, held_last = (torch.cat(x).split(512) for x in zip(*collect(held_out)))

    def loss_of(rng: random.Random) -> torch.Tensor:
        early, last = sample_rows(states_of, texts, lengths, batch, rng)
        return exit_loss(score, network, early.float(), last, V)

    @torch.inference_mode()
    def evaluate() -> tuple[dict, str]:
        same = [score(network(early.float())).argmax(-1) == score(last).argmax(-1)
                for early, last in zip(held_early, held_last)]
        right = torch.cat(same).float().mean().item()
        return {"right": right}, f"held-out guesses right {right:.3f}"

    fit_part(network, model, (network.E, batch, texts), data, held_out, loss_of, evaluate,
             name="exit", **how)


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None, E: int = 2,
          width: int = 512, max_new_tokens: int = 200, steps: int = 2000, batch: int = 512,
          lr: float = 2e-3, seed: int = 0) -> None:
    """Train an exit for a frozen model, on the model's own answers to prompts.

    A stopped run goes on where it was.

    out:   the safetensors file to make
    work:  the folder of the answers and the checkpoints. The default is OUT.work
    E:     how many layers stand before the exit, 1 or more
    width: the width of the exit's MLP, 1 or more
    max_new_tokens: the most tokens of an answer
    batch: how many positions a step learns from
    lr:    the learning rate at the beginning, which falls along a cosine. 2e-3 was found for models
           of 10M to 135M parameters
    """
    split_layers(FeatureLM(model), E)  # refuses an E or a model that does not fit
    work, data, held_out = prepare_training(model, tokenizer, prompts, out, work, seed=seed,
                                            max_new_tokens=max_new_tokens)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Exit(model, E, width)
    fit(model, network, data, held_out, steps=steps, batch=batch, lr=lr, seed=seed, work=work)
    save_trained(out, network, model, E=E, width=width)


# ------------------------------------------------------------------------------------- its file

def load_exit(path: str | Path, model) -> Exit:
    """Load an exit that `train` made for this model.

    path     the file
    model    the model
    returns  the exit. InputError if the file is damaged, or for another model
    """
    return load_trained(path, Exit.title, model,
                        lambda header: Exit(model, header["E"], header["width"]))


if __name__ == "__main__":
    from cli.main import main  # the command line is in cli/, a folder of this project
    sys.exit(main([early_exit], commands=[train],
                  ranges={"gamma": (1, 2, 3, 4, 5, 6, 8)}))
