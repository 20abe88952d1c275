"""All trainings share what is around their loops, and most learn from a model's own answers.

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

    work, data, held_out = prepare_training(model, tokenizer, prompts, out, work, …)
    def loss_of(rng): …        # sample some of `data` by `rng`, and return their loss
    def evaluate(): …          # return ({"right": figures of held_out}, "a line to print")
    fit_part(part, model, form, data, held_out, loss_of, evaluate, name=…, out=out, work=work, …)

A checkpoint never holds an update that is half made. The hash in its name is of the parameters as
they begin, the frozen model, the data and all settings. So a run goes on only from a checkpoint of
exactly the same run.

Three things keep the memory of a training small if the model is large:

    Settings          every training can accumulate passes, and limit its texts
    compute_in_parts  a loss can do without the logits of all its rows at once
    compute_frozen    what a frozen model computes of all texts is kept only if it is small
"""
import functools
import hashlib
import itertools
import json
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from common import InputError, context_length, eos_ids, until
from support.engine import require, tap_layers
from support.files import explain_errors, read_kept, write_whole
from support.parts import save_trained
from training.settings import SETTINGS, Pair

PAUSE = 600  # the seconds after which a checkpoint is written. One of a large model takes a minute
TOKENS = 16_384  # the most tokens of a batch of texts, with padding, and of their answers
LOGITS = 2 ** 25  # the most logits that a loss has at once: 128 MiB in float32
TEXTS = 16  # the most texts that a frozen model reads for one pass, if no states are kept
KEPT = 2 ** 30  # the most bytes that the states of a frozen model may take if they are kept


def digest(weights: dict[str, torch.Tensor], *settings) -> str:
    """Name what belongs to these weights and settings, and to no others.

    weights   tensors by name. Every number is read, which takes a second for 1.4 GB
    settings  anything whose `repr` says what it is
    returns   16 hexadecimal digits
    """
    found = hashlib.sha256(repr(settings).encode())
    for name, x in weights.items():
        # The same numbers in another type make other answers, so the type counts too.
        found.update(repr((name, x.shape, x.dtype)).encode())
        found.update(x.detach().cpu().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


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


# ------------------------------------------------------------------------------------ the data

def split_by_tokens(prompts: list[list[int]], limit: int) -> list[list[int]]:
    """Split prompts into batches of at most TOKENS tokens; a longer prompt is alone in its batch.

    The longest prompts come first. Their batch takes the most memory, so that a machine on which it
    does not fit says so at once and not after hours.

    prompts  token ids of each prompt
    limit    the most tokens of an answer, for which each prompt of a batch has room
    returns  for each batch the numbers of its prompts
    """
    left = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    batches = []
    while left:
        # All prompts of a batch are filled up to its first one, the longest.
        size = max(1, TOKENS // (len(prompts[left[0]]) + limit))
        batches.append(left[:size])
        left = left[size:]
    return batches


@torch.inference_mode()
def generate_answers(model, eos: set[int], prompts: list[list[int]], limit: int,
                     temperature: float = 0.0):
    """Let the model answer prompts, without any of its generation settings (such as penalties).

    model        the model that answers
    eos          token ids that end an answer
    prompts      token ids of each prompt
    limit        the most tokens of an answer
    temperature  0 for greedy answers; above 0 for samples at this temperature
    yields       for each prompt its number and the token ids of its answer, in the order of
                 `split_by_tokens`. An EOS that ended an answer stays
    """
    config = GenerationConfig(max_new_tokens=limit, eos_token_id=sorted(eos) or None,
                              do_sample=temperature > 0, temperature=temperature or 1.0, top_k=0,
                              pad_token_id=0)  # padding is masked before, cut off after
    # Prompts are filled up on the left, so that all answers begin at the same place.
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
    for numbers in split_by_tokens(prompts, limit):
        batch = [torch.tensor(prompts[number]) for number in numbers]
        ids = pad(batch).to(model.device)
        real = pad([torch.ones_like(x) for x in batch]).to(model.device)
        # `generate` adds the model's own settings to those it is given, so they are taken away.
        settings = model.generation_config
        model.generation_config = config
        rows = model.generate(ids, attention_mask=real)[:, ids.shape[1]:].tolist()
        model.generation_config = settings
        for number, row in zip(numbers, rows):
            yield number, next(until(iter([row]), limit, eos))


def answer_all(model, eos: set[int], prompts: list[list[int]], limit: int,
               temperature: float = 0.0) -> list[list[int]]:
    """Let the model answer prompts, and return the answers in the prompts' order.

    The arguments are those of `generate_answers`, which is for those who keep each answer at once.
    """
    answer_of = dict(generate_answers(model, eos, prompts, limit, temperature))
    return [answer_of[number] for number in range(len(prompts))]


def read_answer(model, row: dict) -> tuple[tuple[int, ...], list[int]]:
    """Return the prompt and the answer of a kept line; ValueError for what are no tokens."""
    ids = row["prompt"] + row["answer"]
    rows = len(model.get_input_embeddings().weight)
    if {*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= rows:
        raise ValueError(f"it has others than tokens from 0 to {rows - 1}")
    return tuple(row["prompt"]), row["answer"]


def collect_answers(model, tokenizer, prompts: list[list[int]], limit: int,
                    work: Path) -> list[list[int]]:
    """Collect the model's own greedy answer to each prompt; a file in `work` keeps all answers.

    prompts  token ids of each prompt
    limit    the most tokens of an answer
    work     the folder of the file, whose name holds a hash of the model and the limit
    returns  token ids of each answer, in the prompts' order
    """
    eos = eos_ids(model, tokenizer)
    work.mkdir(parents=True, exist_ok=True)
    path = work / f"answers-{digest(model.state_dict(), limit)}.jsonl"
    with open(path, "a+b") as file:
        answer_of = dict(read_kept(file, functools.partial(read_answer, model)))
        todo = [p for p in dict.fromkeys(map(tuple, prompts)) if p not in answer_of]
        answers = generate_answers(model, eos, todo, limit)
        for number, answer in tqdm(answers, "answers", len(todo)):
            answer_of[todo[number]] = answer
            file.write(json.dumps({"prompt": todo[number], "answer": answer}).encode() + b"\n")
            file.flush()
    return [answer_of[tuple(p)] for p in prompts]


def collect_pairs(model, tokenizer, prompts: list[list[int]], limit: int, work: Path,
                  seed: int = 0) -> list[Pair]:
    """Collect the model's own answers to prompts, in random order.

    Where the settings have pairs, these take the place of the prompts and the model's answers. They
    are cut to the most tokens of a text. Of equal prompts only the first one counts.

    prompts  token ids of each prompt. One that leaves no room for an answer of `limit` is left out
    limit    the most tokens of an answer
    work     the folder in which `collect_answers` keeps the answers
    seed     another seed gives another order
    returns  pairs of a prompt and its answer, which has two tokens or more
    raises   InputError if there are fewer than two of these pairs
    """
    longest = min(context_length(model), SETTINGS.get().max_length)
    pairs = SETTINGS.get().pairs
    if pairs is None:
        require(limit < longest, "max_new_tokens", f"below {longest}, the most tokens of a text",
                limit)
        fitting = [p for p in prompts if len(p) <= longest - limit]
        pairs = [*zip(fitting, collect_answers(model, tokenizer, fitting, limit, work))]
    answer_of = {}
    for prompt, answer in pairs:
        answer_of.setdefault(tuple(prompt), answer[:max(0, longest - len(prompt))])
    data = [([*prompt], answer) for prompt, answer in answer_of.items() if len(answer) > 1]
    if len(data) < 2:
        raise InputError("expected 2 prompts or more with room for an answer of 2 tokens or more, "
                         f"got {len(data)}")
    print(f"{len(data)} answers of {sum(len(a) for _, a in data):,} tokens; "
          f"{len(prompts) - len(data)} others repeated, without room or too short")
    random.Random(seed).shuffle(data)
    return data


def prepare_training(model, tokenizer, prompts: list[list[int]], out: Path, work: Path | None, *,
                     max_new_tokens: int, seed: int,
                     most: int = 100) -> tuple[Path, list[Pair], list[Pair]]:
    """Collect what a training learns from, and hold out some of it.

    out      the file that the training makes
    work     the folder of answers and checkpoints. None: OUT.work
    most     a tenth of the pairs is held out, but no more than this number
    returns  the folder, the pairs to train on, and the held-out pairs

    The other arguments are those of `collect_pairs`.
    """
    work = work or Path(f"{out}.work")
    data = collect_pairs(model, tokenizer, prompts, max_new_tokens, work, seed)
    few = max(1, min(most, len(data) // 10))
    return work, data[few:], data[:few]


def sample_alike(data: list, batch: int, rng: random.Random, length: Callable) -> list:
    """Sample `batch` items at random but alike in length, so that little is padding.

    data    all items
    batch   how many are sampled, or all where there are fewer
    rng     the generator
    length  a function that gives an item's length
    """
    pool = sorted(rng.sample(data, min(4 * batch, len(data))), key=length)
    first = min(rng.randrange(0, len(pool), batch), max(0, len(pool) - batch))
    return pool[first:first + batch]


def count_tokens(pair: Pair) -> int:
    """Count the tokens of a prompt and its answer."""
    return len(pair[0]) + len(pair[1])


def pad_pairs(pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put pairs into one batch.

    returns  ids [B, T], and bool [B, T - 1], which is true where the next token is of an answer
    """
    texts = [torch.tensor(prompt + answer) for prompt, answer in pairs]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    place = torch.arange(1, ids.shape[1])
    learns = [(place >= len(p)) & (place < len(p) + len(a)) for p, a in pairs]
    return ids, torch.stack(learns)


def read_answers(model, pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model over pairs of a prompt and its answer, up to its LM head.

    The LM head has to read only the rows that are returned. A model has many more rows, of prompts
    and of padding, and their logits would take more memory than all else.

    returns  [N, d], what the LM head would read before the tokens of all answers, one answer after
             the other, and these N tokens
    """
    ids, learns = (x.to(model.device) for x in pad_pairs(pairs))
    hidden = model.get_decoder()(input_ids=ids[:, :-1], use_cache=False)[0]
    return hidden[learns], ids[:, 1:][learns]


def find_frequent(data: list[Pair], n: int) -> list[int]:
    """Find the n most frequent tokens of prompts and answers, or all where there are fewer."""
    counts = Counter(token for prompt, answer in data for token in prompt + answer)
    return [token for token, _ in counts.most_common(n)]


# ------------------------------------------------------------- what a large model has no room for

def compute_in_parts(compute: Callable, vocab: int, *rows: torch.Tensor) -> torch.Tensor:
    """Compute something of the logits of N rows, without the logits of all rows at once.

    Where N rows have more than LOGITS logits, they come in parts. The logits of a part are dropped,
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
            p = score_target(x)
        return divergence(kind, p, score_draft(y))
    return compute_in_parts(losses_of, vocab, target_read, read)


@torch.no_grad()
def read_texts(model, texts: list[list[int]], taps: list[int] | None = None) -> list[torch.Tensor]:
    """Run a frozen model over texts, and return what is tapped of each in bfloat16, [T, d].

    Autocast would round what a float32 model computes, and decoding computes it without autocast.

    taps   numbers of layers, as for `tap_layers`. None: what the LM head would read
    """
    states = {}
    for numbers in split_by_tokens(texts, 0):
        rows = [torch.tensor(texts[number]) for number in numbers]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        seen = []
        with torch.autocast(model.device.type, enabled=False), tap_layers(model, taps, seen):
            model.get_decoder()(input_ids=ids, use_cache=False)
        for number, row, x in zip(numbers, rows, torch.cat(seen, -1)):
            # A copy, since a part of a tensor keeps all of it in memory.
            states[number] = x[:len(row)].to(torch.bfloat16, copy=True)
    return [states[number] for number in range(len(texts))]


def compute_frozen(compute: Callable, data: list[Pair], width: int) -> tuple[Callable, float]:
    """Give what a frozen model computes of some pairs, kept from the beginning or computed now.

    The states of a frozen model never change. Those of a small model are computed once, since a
    head learns in a tenth of the time that the model needs for its states. Those of a model of 8B
    are 8 KB a token: 40 GB for 5 million tokens. There each step computes those that it reads.

    compute  compute(pairs) returns something for each pair
    data     all pairs
    width    how many numbers a token's states have
    returns  a function from numbers of pairs to a list of what is computed of these pairs, and how
             many pairs a pass should read at most: any number, where all is computed already
    """
    if 2 * width * sum(map(count_tokens, data)) > KEPT:  # in bfloat16
        return lambda numbers: compute([data[number] for number in numbers]), TEXTS
    kept = compute(data)
    return lambda numbers: [kept[number] for number in numbers], math.inf


def sample_rows(states_of: Callable, texts: float, lengths: list[int], batch: int,
                rng: random.Random) -> list[torch.Tensor]:
    """Sample rows of a few texts, so that a frozen model has to read no more than these texts.

    states_of  gives for numbers of texts a tuple of tensors [rows of the text, ...] each, as
               `compute_frozen` returns it
    texts      the most texts whose rows are sampled
    lengths    how many rows each text has
    batch      how many rows are sampled
    rng        the generator
    returns    for each tensor of the tuples [batch, ...]
    """
    # A text of n rows is drawn n times as often as one of 1 row. So all rows are equally likely.
    drawn = rng.choices(range(len(lengths)), lengths, k=min(texts, batch))
    numbers = [*dict.fromkeys(drawn)]
    states = [torch.cat(x) for x in zip(*states_of(numbers))]
    firsts = dict(zip(numbers, itertools.accumulate((lengths[x] for x in numbers), initial=0)))
    chosen = [firsts[x] + rng.randrange(lengths[x]) for x in rng.choices(drawn, k=batch)]
    return [x[chosen] for x in states]


# ------------------------------------------------------------------------------------ the loop

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
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def cosine(done: int, steps: int) -> float:
    """Return the rate of a step that falls from 1 to 0 along a cosine."""
    return 0.5 * (1 + math.cos(math.pi * done / steps))


def warm_cosine(done: int, steps: int) -> float:
    """Return the rate of a step that rises over a twentieth of the steps, then falls to 0.

    It falls along the same cosine that a run without a warm-up would fall along.
    """
    return min((done + 1) / max(1, 0.05 * steps), cosine(done, steps))


def warm_linear(done: int, steps: int) -> float:
    """Return the rate of a step that rises over a twentieth of the steps, then falls to 0."""
    return min((done + 1) / max(1, 0.05 * steps), 1 - done / steps)


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
        adam = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0, foreach=False)
        self.optimizers = optimizers or [adam]
        self.seed = seed
        self.device = next(iter(parameters.values())).device
        self.done = 0
        self.curve = {}
        self.inside_update = False
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self.note_step)
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

        Ctrl-C may come at any line, and leaves a checkpoint too. So do the other signals that
        `run_script` of cli/main.py takes for Ctrl-C.

        loss_of   a function of a random generator that gives a loss, in `low_precision`;
                  whatever is random in it comes from the generator
        evaluate  a function that gives figures of held-out data, and a line to print. The figures
                  of about ten steps, the last one among them, make up the curve
        """
        self.print_size()
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

    def print_size(self) -> None:
        """Print how many numbers are trained, and how much memory they take."""
        numbers = sum(p.numel() for p in self.parameters.values())
        # A number that is trained has a gradient and the two moments of AdamW beside it, all as
        # large as the number itself. Activations come on top, and grow with the tokens of a pass.
        size = sum(4 * p.nbytes for p in self.parameters.values()) / 1e9
        print(f"{self.name}: {self.steps:,} steps, {numbers:,} trained numbers, {size:.3g} GB with "
              "gradients and moments", flush=True)

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
        for optimizer in self.optimizers:
            optimizer.step()
        return total

    def note_step(self, *_) -> None:
        """Note that an update has begun to change weights. Each optimizer calls this before a step.

        A checkpoint that is written before the update is counted would hold an update that is half
        made, or one that is made and not counted.
        """
        self.inside_update = True


def fit_part(part, model, form: tuple, data: list[Pair], held_out: list[Pair], loss_of: Callable,
             evaluate: Callable, *, out: Path, work: Path, models: tuple = (), **how) -> None:
    """Train a part beside a frozen model, and write its file.

    part      the part, which is one of parts.py
    model     the frozen model
    form      all else that the loss depends on, beside the part's own header
    data      pairs to learn from
    held_out  pairs to measure by
    loss_of   as for `Training.train`
    evaluate  as for `Training.train`
    out       the file, which `load_trained` of parts.py reads
    work      the folder of checkpoints
    models    other models that run
    how       other arguments of `Training`
    """
    vocab = None if part.vocab is None else part.vocab.tolist()
    fingerprint = digest(model.state_dict()), part.header(), vocab, form, data, held_out
    training = Training(part.trainable(), fingerprint, folder=work, models=(model, *models), **how)
    training.train(loss_of, evaluate)
    save_trained(out, part, model)
