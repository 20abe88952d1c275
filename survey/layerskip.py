"""LayerSkip: a model drafts with its first layers and verifies with the others.

Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", arXiv
2404.16710. There is no second model, and no layer runs twice for a token.

    python -m survey.layerskip --prompt "..."
    python -m survey.layerskip tune --prompts FILE --out my.safetensors
    python -m survey.layerskip --tuning my.safetensors --prompt "..."

The models that the authors released are tuned already, so they need no file. For one of 32 layers
the authors exit after 8 layers and draft 6 tokens (not tried here):

    python -m survey.layerskip --target facebook/layerskip-llama2-7B --tuning "" --E 8 --gamma 6

`export` makes such a model of a tuning. transformers decodes it with `assistant_early_exit=E` of
`generate`. An engine would serve it as any other model, without early exits (not tried here):

    python -m survey.layerskip export --tuning my.safetensors --out tuned

A round with γ = 2, where ● is the row that one token has in the cache of some layers:

                           root    x̂_1     x̂_2
    early, layers 1 … E      ●       ●       ●     one token after another; the norm and the LM
                             │ ↘     │ ↘     │     head after layer E give the next guess (↘);
                             │ x̂_1   │ x̂_2   │     the hidden states after layer E are kept (│)
    late, layers E + 1 … L   ●       ●       ●     all tokens at once, from these hidden states
                            p_1     p_2     p_3    the whole model's distributions judge the guesses

The late layers go on where the early layers stopped, so p_i is the whole model's distribution. They
run in one call, and so a round of γ guesses runs γ E + L layers one after the other, for up to
γ + 1 tokens.

The early and the late rows of a column are together one row of the whole model's cache. If x̂_1 is
accepted and x̂_2 is not, then the first two columns stay, in all layers.

Training teaches the exits after early layers to guess the next token (Section 4.1).
Layers are left out at random, late layers more often than early ones, and several exits share the
loss. The output is that of the TUNED model, exactly.

Departures:
- Verification. Paper: guesses are kept up to the first that the whole model would not say (Section
  4.3.2). Here: `verify_block` of speculative.py judges them. Why: it is exact at every temperature.
- What is trained. Paper: all weights, on given texts. Here: changes of low rank
  (training/low_rank.py), on the model's own answers. Why: a tuning takes minutes, and its file is
  small.
- Layer dropout. Paper: each sample of a batch draws the layers that it leaves out. Here: a batch
  draws them once. Why: the samples of a batch go through a layer together. A layer that is left out
  runs all the same, and its output is thrown away, so no time is saved.
- Exits of a step. Paper: every R-th layer, with R of 8 to 39, and the first of them changes from
  step to step. Here: every third layer from a first one that is drawn, and always the last one.
  Why: with R of 8 or more, 12 layers would have one or two early exits in a step, or none. A first
  layer that is drawn does not depend on the number of the step, so a stopped run goes on as if it
  had not stopped.
- Highest rate of dropout, and scale of early losses. Paper: they differ with the data. Here: 0.1
  and 1. Why: these are the paper's for fine-tuning on code.

Left out: the curriculum that raises dropout in the course of pretraining, and the one that adds
exits one by one.
"""
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Callable, Iterator

from common import Sampler, begin, greedy
from speculative import verify_block as verify
from support.engine import (MODELS, EngineLM, depth_of, list_layers, log_round, run_as_program,
                            tap_layers)
from support.files import save_model
from support.layers import move_counts, name_norm, pass_on, split_layers, view
from support.parts import load_trained, score_with
from survey.draft_verify import draft_chain
from training.loop import cross_entropy_in_parts, fit_part, warm_linear
from training.texts import measure_right, pad_pairs, prepare_training, sample_alike
from training.low_rank import Tuned, merge_changes, prepare_changes

import torch

TUNED = f"{MODELS}/layerskip.safetensors"
TITLE = "a LayerSkip tuning"  # in its file, and in error messages
R = 3  # in a training step every R-th layer has an exit


# ---------------------------------------------------------------------------------- decoding

def self_speculate(target: EngineLM, early: EngineLM, late: EngineLM, prompt: list[int],
                   gamma: int, threshold: float, sample: Sampler,
                   log: list | None) -> Iterator[list[int]]:
    """Draft with the early layers, and verify with the late layers (Section 4.3).

    target     the whole model. The calls of the late layers count as its calls; it does not run
               itself
    early      layers 1 … E with an exit
    late       layers E + 1 … L, which read the hidden states after layer E in place of tokens
    prompt     the tokens of the prompt
    gamma      the most tokens that are drafted in a round
    threshold  a draft ends after a guess that had a smaller draft probability (early_exit.py).
               0: no draft ends before gamma tokens
    sample     draws the guesses and judges them
    log        gets {"guessed", "accepted", "layers"} of each round. None: nothing is logged
    yields     chunks of 1 to gamma + 1 tokens
    """
    E = depth_of(target.model) - depth_of(late.model)
    # The features of the early layers are then the hidden states after layer E, from which the late
    # layers cache the context.
    root = begin(prompt, early, taps=[E])[-1]
    late.start(early.features)
    while True:
        # Self-drafting (4.3.1): the early layers run once a token, and their exit guesses the next.
        # The hidden states [γ, d] of its rows are the paper's exit query cache.
        guesses, draft_probs, hidden = draft_chain(early, root, gamma, threshold, sample)
        # The last guess needs a hidden state too, but the exit does not guess after it.
        early.forward(guesses[-1:], keep=0)
        # Self-verification (4.3.2): the late layers run once, for the root and all guesses.
        logits = late.forward(torch.cat([hidden, early.features]))  # [γ+1, V]
        target_probs = sample.probs(logits, late.places)
        accepted, root = verify(target_probs, draft_probs, guesses, sample)
        # Reusing the cache (4.3.3): the rows of the accepted tokens stay, in all layers.
        early.commit(range(1 + accepted))
        late.commit(range(1 + accepted))
        move_counts(late, target)
        adapter = (depth_of(early.model) - E) / 2  # early_exit.py has one: attention, and no MLP
        layers = (1 + len(guesses)) * (E + adapter) + depth_of(late.model)  # without it: γ E + L
        log_round(log, guessed=len(guesses), accepted=accepted, layers=layers)
        yield guesses[:accepted] + [root]


def layerskip(target: EngineLM, prompt: list[int], *, E: int = 0, gamma: int = 4,
              tuning: str = TUNED, sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Draft with the first layers of a tuned model, and verify with its other layers (Section 4.3).

    The first layers guess through the model's own last norm and LM head. The output is that of the
    TUNED model, exactly.

    E:      how many layers draft, 0 or more. 0 takes the number that the file of the tuning says
    gamma:  how many tokens are drafted in a round, 1 or more
    tuning: the file of the low-rank changes, made by `python -m survey.layerskip tune`. If it is
            empty, the target decodes as it is, and E must be given

    Yields chunks of 1 to gamma + 1 tokens; logs {"guessed", "accepted", "layers"} a round.

    In the log "layers" is how many layers ran one after the other.
    """
    model, tuned_E = target.once(load_tuned, tuning, target.model)
    target.memo["writer"] = model
    E = E or tuned_E
    whole = target.once(type(target), model, target.vocab)
    early, late = target.once(split_layers, whole, E)
    yield from self_speculate(target, early, late, prompt, gamma, 0.0, sample, log)


# -------------------------------------------------------------------------------------- the loss

def run_with_dropout(model, ids: torch.Tensor, rng: random.Random) -> list[torch.Tensor]:
    """Run a model over texts, where some layers are left out at random (layer dropout, 4.1.1).

    Such a layer hands on its input in place of its output. Section 4.1.1 counts layers from 0, and
    leaves layer l out with the probability 0.1 (2^{l / (L - 1)} - 1). So the first layer is never
    left out, and the last one in a tenth of all steps.

    ids      [B, T]
    rng      draws the layers that are left out
    returns  for each l of 1 … L what l layers handed on, [B, T, d]. For l = L this went
             through the last norm, too
    """
    L = depth_of(model)
    handed_on = []
    with ExitStack() as hooks, tap_layers(model, [*range(1, L + 1)], handed_on):
        for l, layer in enumerate(list_layers(model)):
            chance = 0.1 * (2 ** (l / max(1, L - 1)) - 1)
            if rng.random() < chance:
                hooks.enter_context(layer.register_forward_hook(pass_on, with_kwargs=True))
        model.get_decoder()(input_ids=ids, use_cache=False)
    return handed_on


def tuning_loss(model, score: Callable, pairs: list[tuple[list[int], list[int]]],
                rng: random.Random) -> torch.Tensor:
    """Compute LayerSkip's loss of pairs, on the tokens of the answers (early exit loss, 4.1.2).

    The loss is a weighted mean of the cross-entropy at several exits: after every R-th layer, and
    after the last one.

    score    turns what the LM head reads into logits (parts.score_with)
    pairs    each a prompt and its answer
    rng      draws the layers that are left out and the exits
    returns  the loss, in nats
    """
    decoder = model.get_decoder()
    L = depth_of(model)
    V = len(model.get_output_embeddings().weight)
    last_norm = decoder._modules[name_norm(decoder)]
    ids, learns = (x.to(model.device) for x in pad_pairs(pairs))  # [B, T], [B, T - 1]
    labels = ids[:, 1:][learns]  # [tokens of answers]
    handed_on = run_with_dropout(model, ids[:, :-1], rng)
    first = rng.randrange(R)  # the paper goes through these numbers in turn
    exits = [l for l in range(1, L) if l % R == first] + [L]
    weights = [l * (l - 1) / 2 for l in exits]  # 1 + … + (l - 1): the paper's e(l - 1), scale 1
    loss = 0.0
    for l, weight in zip(exits, weights):
        x = handed_on[l - 1][learns]
        if l < L:
            x = last_norm(x)
        loss = loss + weight * cross_entropy_in_parts(score, V, x, labels).mean()
    return loss / sum(weights)


# ------------------------------------------------------------------------------------ training

def tune(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None, E: int = 3,
         rank: int = 16, max_new_tokens: int = 200, steps: int = 150, batch: int = 16,
         lr: float = 5e-4, seed: int = 0) -> None:
    """Train low-rank changes of a model's layers for early exits, on the model's own answers.

    A stopped run goes on where it was.

    E:     how many layers are to draft, which the file keeps, 1 or more. Training itself does not
           use it, but measures the exit after E layers on held-out answers
    rank:  the rank of the change of each matrix, 1 or more
    lr:    the highest learning rate. It is reached after a twentieth of the steps, and falls to 0.
           5e-4 was found for 10M parameters
    """
    split_layers(EngineLM(model), E)  # refuses an E or a model that does not fit
    lessons = prepare_training(model, tokenizer, prompts, out, work, max_new_tokens, seed)
    score = score_with(model)
    tuning = Tuned(TITLE, model, rank, seed, E=E)
    tuned = tuning.model

    def loss_of(rng: random.Random) -> torch.Tensor:
        return tuning_loss(tuned, score, sample_alike(lessons.data, batch, rng), rng)

    def evaluate() -> tuple[dict, str]:
        # A view that ends early has the exit: its LM head reads the states through the last norm.
        right = [measure_right(view(tuned, 0, n), lessons.held_out) for n in (E, depth_of(model))]
        return ({"right": right}, f"held-out tokens right after {E} layers {right[0]:.3f}, "
                f"after all {right[1]:.3f}")
    fit_part(tuning, model, (batch,), lessons, loss_of, evaluate, name="layerskip", out=out,
             steps=steps, lr=lr, rate=warm_linear, seed=seed)


# ------------------------------------------------------------------------------------- its file

def load_tuned(path: str | Path, model):
    """Load the changes of a tuning, and make a model that has them in its weights.

    path     the file that `tune` made. If it is empty, there is no tuning
    model    the model that the tuning must be for. It stays as it is
    returns  the tuned model, which shares what it can with the model, and E. Without a tuning they
             are the model itself and 0. InputError if the file is damaged, or for another model
    """
    if not path:
        return model, 0
    tuning = load_trained(path, TITLE, model,
                          lambda header: Tuned(TITLE, model, header["rank"], E=header["E"]))
    return prepare_changes(tuning.model), tuning.facts["E"]


def export(model, tokenizer, *, tuning: Path, out: Path) -> None:
    """Write a tuned model as a directory of its own, which needs no file of the tuning.

    tuning: the file of the low-rank changes, made by `python -m survey.layerskip tune`
    out:    the directory to make
    """
    tuned, E = load_tuned(tuning, model)
    save_model(out, merge_changes(tuned), tokenizer)
    print(f"python -m survey.layerskip --target {out} --tuning \"\" --E {E}")


COMMAND_LINE = dict(
    methods=[layerskip], commands=[tune, export], ranges={"gamma": (1, 2, 3, 4, 5, 6, 8)})

if __name__ == "__main__":
    run_as_program(__file__)
