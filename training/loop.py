"""All trainings share what is around their loops. texts.py has the data that they learn from.

    prompts ── the model answers ──> answers-<hash>.jsonl ── split ──> data, held-out examples
                                                                         │           │
    training.train(loss_of, evaluate)                                    │           │
          │    └── an update: losses of `data`, backward, step <──────────┘          │
          └─────── between updates, now and then: evaluate() <───────────────────────┘
                       └──> a point of the curve, and a checkpoint <name>-<hash>.pt

The trainings of bita.py and cllm.py are a part of their papers, and stand whole in these two files.
All others run the loop of `Training.train`, to which a method brings the parameters that it trains,
`loss_of(rng)` and `evaluate()`. The `train` function of such a method, as in survey/eagle.py,
mostly has these steps:

    lessons = prepare_training(model, tokenizer, prompts, out, work, max_new_tokens, seed)
    def loss_of(rng): …        # sample some of `lessons.data` by `rng`, and return their loss
    def evaluate(): …          # return ({"right": figures of held_out}, "a line to print")
    fit_part(part, model, form, lessons, loss_of, evaluate, name=…, out=out, steps=steps, …)

A checkpoint never holds an update that is half made. The hash in its name is of the parameters as
they begin, the frozen model, the data and all settings. So a run goes on only from a checkpoint of
exactly the same run.

Three things keep the memory of a training small if the model is large:

    Settings          every training can accumulate passes, and limit its texts
    compute_in_parts  a loss can do without the logits of all its rows at once
    compute_frozen    what a frozen model computes of texts is kept only if it is small (texts.py)
"""
import functools
import math
import random
import time
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import PreTrainedModel

from common import InputError
from support.engine import EngineLM
from support.files import explain_errors, write_whole
from support.layers import tap_widths
from support.parts import save_trained
from training.settings import SETTINGS
from training.texts import (Lessons, Text, compute_features, compute_frozen, count_tokens, digest,
                            sample_alike)

PAUSE = 600  # the seconds after which a checkpoint is written. One of a large model takes a minute
LOGITS = 2 ** 25  # the most logits that a loss has at once: 128 MiB in float32


def low_precision(device: torch.device, *models: PreTrainedModel) -> torch.autocast:
    """Compute products of matrices in bfloat16, except where float32 models are faster without it.

    device   where the products are computed
    models   all that take part
    returns  what a `with` takes
    """
    # What is trained is float32. It could not be multiplied with a model of half precision, unless
    # autocast gives both one type.
    half = any(model.dtype != torch.float32 for model in models)
    # On a CPU without AVX-512 products of large matrices take tens of times longer in bfloat16.
    fast = device.type != "cpu" or torch.backends.cpu.get_cpu_capability() == "AVX512"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=half or fast)


# ------------------------------------------------------------------------------------- losses

def divergence(kind: str, target_logits, draft_logits):
    """Compute D(target, draft) in nats at each position (DistillSpec, Table 1).

    kind                         forward-kl, reverse-kl, jsd, tvd or cross-entropy. The acceptance
                                 rate of speculative sampling is 1 - tvd (Leviathan et al.,
                                 Cor. 3.6). Cross-entropy is forward-kl plus the target's entropy
    target_logits, draft_logits  [..., V], or [N, V] for cross-entropy
    returns                      [...]
    """
    if kind == "cross-entropy":
        return F.cross_entropy(draft_logits, target_logits.softmax(-1), reduction="none")
    log_p, log_q = F.log_softmax(target_logits.float(), -1), F.log_softmax(draft_logits.float(), -1)

    def kl(log_a, log_b):  # PyTorch takes the two in the other order
        return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)
    if kind == "forward-kl":
        return kl(log_p, log_q)
    if kind == "reverse-kl":
        return kl(log_q, log_p)
    if kind == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return (kl(log_p, log_m) + kl(log_q, log_m)) / 2
    if kind == "tvd":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    raise ValueError(f"there is no divergence {kind!r}")


def compute_in_parts(compute: Callable, vocab: int, *rows: torch.Tensor) -> torch.Tensor:
    """Compute something of the logits of N rows, without the logits of all rows at once.

    If N rows have more than LOGITS logits, they come in parts. The logits of a part are dropped,
    and computed a second time for the gradients.

    compute  compute(*part) makes logits of n of the rows, and returns numbers [n, ...] for them
    vocab    the number of logits of a row
    rows     tensors whose first dimension is N
    returns  [N, ...]
    """
    size = max(1, LOGITS // vocab)
    if len(rows[0]) <= size:
        return compute(*rows)
    # Nothing in a loss is random, so no state of a generator has to be brought back.
    again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(compute, *part) for part in zip(*(x.split(size) for x in rows))])


def cross_entropy_in_parts(score: Callable, vocab: int, read: torch.Tensor,
                           labels: torch.Tensor) -> torch.Tensor:
    """Compute the cross-entropy of N rows with labels, each from what its LM head reads.

    score    turns what the LM head reads into logits
    vocab    the number of logits of a row
    read     [N, d], what the LM head reads
    labels   [N]. A row with -100 has a loss of 0
    returns  [N], in nats
    """
    def losses_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(score(x), y, ignore_index=-100, reduction="none")
    return compute_in_parts(losses_of, vocab, read, labels)


def divergence_in_parts(kind: str, score_target: Callable, score_draft: Callable, vocab: int,
                        target_read: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Compute the `divergence` D(target, draft) of N rows, each from what its LM head reads.

    score_target, score_draft  turn what LM heads read into logits
    vocab                      the number of logits of a row
    target_read, read          [N, d], what the LM heads of target and draft read
    returns                    [N], in nats
    """
    def losses_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = score_target(x)
        return divergence(kind, logits, score_draft(y))
    return compute_in_parts(losses_of, vocab, target_read, read)


# --------------------------------------------------------------------------- the rates of steps

def cosine(done: int, steps: int) -> float:
    """Return the factor of the learning rate after `done` of `steps` updates.

    It falls from 1 to 0 along a cosine.
    """
    return 0.5 * (1 + math.cos(math.pi * done / steps))


def warm_cosine(done: int, steps: int) -> float:
    """Return a factor that rises over a twentieth of the steps, then falls to 0.

    It falls along the same cosine that a run without a warm-up would fall along.
    """
    return min((done + 1) / max(1, 0.05 * steps), cosine(done, steps))


def warm_linear(done: int, steps: int) -> float:
    """Return a factor that rises over a twentieth of the steps, then falls to 0 in a line."""
    return min((done + 1) / max(1, 0.05 * steps), 1 - done / steps)


# ------------------------------------------------------------------------------------ the loop

class Training:
    """Train parameters: resume, evaluate and save.

    parameters   what is trained, tensors by name; a checkpoint keeps them
    fingerprint  everything else that the loss depends on: frozen weights, data, settings
    name         the name of the run, of its checkpoints and of its progress bar
    steps        the number of updates
    lr           the learning rate
    rate         rate(done, steps) is a factor of the learning rate after `done` of `steps` updates
    max_norm     `train` scales a longer gradient down to this length
    max_value    it then cuts larger values of the gradient to this size
    optimizers   what updates the parameters, all with the same rate. None: AdamW without weight
                 decay
    seed         another seed samples other data
    folder       the folder of checkpoints; None keeps none
    models       the models that losses run

    passes       how many passes an update has, which is --accumulate
    done         the number of updates that are made
    curve        for a number of updates, the figures after them
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], fingerprint: tuple, *, name: str,
                 steps: int, lr: float, rate: Callable = cosine, max_norm: float = 1.0,
                 max_value: float = math.inf, optimizers: list | None = None, seed: int = 0,
                 folder: Path | None = None, models: tuple = ()):
        self.parameters = parameters
        self.name = name
        self.steps = steps
        self.lr = lr
        self.rate = rate
        self.passes = SETTINGS.get().accumulate
        self.models = models
        self.max_norm = max_norm
        self.max_value = max_value
        # One parameter after another: all at once would take a float32 copy of all of them.
        self.optimizers = optimizers or [
            torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0, foreach=False)]
        self.seed = seed
        self.device = next(iter(parameters.values())).device
        self.done = 0
        self.curve = {}
        self.inside_update = False
        settings = (fingerprint, name, steps, lr, rate.__name__, self.passes, max_norm, max_value,
                    seed, [type(x).__name__ for x in self.optimizers])
        self.file = folder / f"{name}-{digest(parameters, settings)}.pt" if folder else None
        self.saved_at = time.monotonic()
        if self.file and self.file.exists():
            self.load()

    def load(self) -> None:
        """Read the checkpoint, so that the run goes on from there."""
        with explain_errors("a checkpoint; without it the run begins anew", self.file):
            state = torch.load(self.file, weights_only=True, map_location="cpu")
            with torch.no_grad():
                for name, p in self.parameters.items():
                    p.copy_(state["parameters"][name])
            for optimizer, saved in zip(self.optimizers, state["optimizers"]):
                optimizer.load_state_dict(saved)
            self.done = state["done"]
            self.curve = state["curve"]

    def save(self) -> None:
        """Write a checkpoint, unless an update is half made; at any time the file is whole.

        raises  InputError if the folder does not take it, as on a disk that is full
        """
        if self.file is None or self.inside_update:
            return
        state = {"parameters": self.parameters, "done": self.done, "curve": self.curve,
                 "optimizers": [x.state_dict() for x in self.optimizers]}
        with explain_errors("a folder that takes a checkpoint", self.file.parent):
            write_whole(self.file, lambda fresh: torch.save(state, fresh))
        self.saved_at = time.monotonic()

    def train(self, loss_of: Callable, evaluate: Callable) -> dict[int, dict]:
        """Make all updates that are left, and return the curve, {step: figures}.

        Ctrl-C may come at any line, and so may the other signals that `run_script` of cli/main.py
        takes for it. It leaves a checkpoint, except while an update changes weights. Then the
        checkpoint before stays.

        loss_of   a function of a random generator that gives a loss, in `low_precision`;
                  whatever is random in it comes from the generator
        evaluate  a function that gives figures of held-out data, and a line to print. The figures
                  of about ten steps, the last one among them, make up the curve
        """
        numbers = sum(p.numel() for p in self.parameters.values())
        # A number that is trained has a gradient and the two moments of AdamW beside it, all as
        # large as the number itself. Activations come on top, and grow with the tokens of a pass.
        size = sum(4 * p.nbytes for p in self.parameters.values()) / 1e9
        print(f"{self.name}: {self.steps:,} steps, {numbers:,} trained numbers, {size:.3g} GB with "
              "gradients and moments", flush=True)
        with tqdm(total=self.steps, initial=self.done, desc=self.name) as bar:
            try:
                self.evaluate_when_due(evaluate)
                while self.done < self.steps:
                    loss = self.update(loss_of)
                    self.done += 1
                    self.inside_update = False
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                    bar.update()
                    if time.monotonic() - self.saved_at > PAUSE:
                        self.save()
                    self.evaluate_when_due(evaluate)
            finally:
                self.save()
        return self.curve

    def evaluate_when_due(self, evaluate: Callable) -> None:
        """Add a point to the curve at the steps of a report, and after the last step."""
        due = self.done % max(1, self.steps // 10) == 0 or self.done == self.steps
        if due and self.done not in self.curve:
            figures, line = evaluate()
            self.curve[self.done] = figures
            tqdm.write(f"step {self.done}: {line}")
            self.save()

    def update(self, loss_of: Callable) -> float:
        """Make an update, and return its loss. An InputError is raised for one that is not finite.

        loss_of   as for `train`
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = self.lr * self.rate(self.done, self.steps)
        # Each update has a generator of its own. Otherwise a run that goes on from a checkpoint
        # would sample other data than one that was never stopped.
        rng, total = random.Random(f"{self.name} {self.seed} {self.done}"), 0.0
        for _ in range(self.passes):
            with low_precision(self.device, *self.models):
                loss = loss_of(rng) / self.passes
            if not loss.isfinite():
                raise InputError(f"--lr must be below {self.lr}: the loss is {loss.item()}")
            total += loss.item()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.max_norm)
        torch.nn.utils.clip_grad_value_(self.parameters.values(), self.max_value)
        # From here on weights change. A checkpoint that is written before the update is counted
        # would hold an update that is half made, or one that is made and not counted.
        self.inside_update = True
        for optimizer in self.optimizers:
            optimizer.step()
        return total


def fit_part(part, model, form: tuple, lessons: Lessons, loss_of: Callable, evaluate: Callable, *,
             out: Path, **how) -> None:
    """Train a part beside a frozen model, and write its file.

    part      the part, which is one of parts.py
    model     the frozen model
    form      all else that the loss depends on, beside the part's own header
    lessons   what it learns from
    loss_of   as for `Training.train`
    evaluate  as for `Training.train`
    out       the file, which `load_trained` of parts.py reads
    how       other arguments of `Training`
    """
    vocab = None if part.vocab is None else part.vocab.tolist()
    fingerprint = (digest(model.state_dict()), part.header(), vocab, form, lessons.data,
                   lessons.held_out)
    training = Training(part.trainable(), fingerprint, folder=lessons.work, models=(model,), **how)
    training.train(loss_of, evaluate)
    save_trained(out, part, model)


def fit_on_texts(part, model, taps: list[int], form: tuple, lessons: Lessons, loss_of: Callable,
                 evaluate: Callable, *, batch: int, **how) -> None:
    """Train a part, as `fit_part` does, on what a frozen model computes of whole texts.

    taps      the layers whose inputs are read, as for `tap_layers`
    form      all else that the loss depends on, beside `batch`
    loss_of   a function of some texts and a random generator that gives their loss
    evaluate  a function of the held-out texts that gives what `Training.train` asks for
    batch     how many texts a pass has

    The other arguments are those of `fit_part`.
    """
    compute = functools.partial(compute_features, model, taps=taps)
    data = lessons.data
    texts_of, _ = compute_frozen(compute, data, sum(tap_widths(model, taps)))
    held_out = compute(lessons.held_out)

    def sample_loss(rng: random.Random) -> torch.Tensor:
        numbers = sample_alike(range(len(data)), batch, rng, lambda i: count_tokens(data[i]))
        return loss_of(texts_of(numbers), rng)
    fit_part(part, model, (batch, *form), lessons, sample_loss, lambda: evaluate(held_out), **how)


def report_right(right: list[torch.Tensor]) -> tuple[dict, str]:
    """Return figures as `Training.train` asks for them.

    right    for each text bool [n], which of its guesses are right
    """
    share = torch.cat(right).float().mean().item()
    return {"right": share}, f"held-out guesses right {share:.3f}"


@torch.inference_mode()
def measure_guesses(draft, held_out: list[Text]) -> tuple[dict, str]:
    """Measure how often the likeliest guess of a draft is right, as `Training` asks for it.

    The draft reads true features here, and none that it guessed.

    draft     the draft, of EAGLE, EAGLE-3 or MTP
    held_out  texts with what the draft reads of them
    returns   the share of the tokens of all answers that are guessed, and a line to print
    """
    right = []
    with low_precision(draft.lm.device, draft.lm):
        for ids, features, length in held_out:
            rows = len(ids) - max(2, length)  # row i guesses token i + 2
            if rows > 0:
                inputs = draft.join(features[:-2].to(draft.lm.device), ids[1:-1])
                logits = EngineLM(draft.lm).forward(inputs, keep=rows)
                right.append(draft.vocab[logits.argmax(-1)].cpu() == ids[-rows:])
    return report_right(right)
