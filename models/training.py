"""How anything here is trained: on a model's own greedy answers, by one loop that can be stopped.

A method brings its part (named parameters), `loss_of(rng)` and `evaluate()`; `Training` does the
rest: the rate, accumulation, clipping, checkpoints, the curve. Nothing half made is ever saved, and
another model, data or setting never goes on from a checkpoint: its name is made of all of them."""
import hashlib
import json
import math
import os
import random
import time
from collections import Counter
from pathlib import Path
from pickle import UnpicklingError
from typing import Callable

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import GenerationConfig

from common import InputError, context_length, eos_ids

Pair = tuple[list[int], list[int]]  # token ids of a prompt and of its answer


def digest(weights: dict[str, torch.Tensor], *settings) -> str:
    """A name for files that belong to these weights and settings, and to no others."""
    of = hashlib.sha256(repr(settings).encode())
    for name, x in weights.items():
        of.update(repr((name, x.shape)).encode())
        some = x.detach().flatten()[::1 + x.numel() // 1009]
        of.update(some.float().cpu().numpy().tobytes())
    return of.hexdigest()[:16]


# ------------------------------------------------------------------------------------ the data

@torch.inference_mode()
def generate_answers(model, eos: set[int], prompts: list[list[int]], limit: int,
                     temperature: float = 0.0, size: int = 64):
    """Answers, token ids up to `limit` or to an EOS, which stays, in lists of `size`: greedy ones,
    or samples; no penalties."""
    how = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else {}
    config = GenerationConfig(max_new_tokens=limit, eos_token_id=sorted(eos) or None,
                              pad_token_id=0, **how)  # pads are masked or cut
    for i in range(0, len(prompts), size):
        some = prompts[i:i + size]
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in some], device=model.device)
        padding = torch.tensor([[width - len(p)] for p in some], device=model.device)
        real = torch.arange(width, device=model.device) >= padding
        before, model.generation_config = model.generation_config, config  # penalties of its own
        rows = model.generate(ids, attention_mask=real.long())[:, width:].tolist()
        model.generation_config = before
        ends = [next((n + 1 for n, x in enumerate(row) if x in eos), limit) for row in rows]
        yield [row[:end] for row, end in zip(rows, ends)]


def whole_lines(file) -> list[str]:
    """The lines of a file opened with "a+", without one that was cut off, which it loses."""
    file.seek(0)
    lines = [line for line in file if line.endswith("\n")]
    file.truncate(sum(map(len, lines)))
    return lines


def collect_answers(model, tokenizer, prompts: list[list[int]], limit: int, work: Path,
                size: int = 64) -> list[list[int]]:
    """The model's own greedy answers, which drafters learn from; a file in `work` keeps them."""
    eos = eos_ids(model, tokenizer)
    work.mkdir(parents=True, exist_ok=True)
    with open(work / f"answers-{digest(model.state_dict(), limit)}.jsonl", "a+") as kept:
        rows = map(json.loads, whole_lines(kept))
        known = {tuple(row["prompt"]): row["answer"] for row in rows}
        todo = sorted({tuple(p) for p in prompts} - known.keys(), key=lambda p: (len(p), p))
        with tqdm(total=len(todo), desc="answers") as bar:
            left = iter(todo)
            for answers in generate_answers(model, eos, todo, limit, size=size):
                for answer, prompt in zip(answers, left):
                    known[prompt] = answer
                    kept.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
                kept.flush()
                bar.update(len(answers))
    return [known[tuple(p)] for p in prompts]


def examples(model, tokenizer, prompts: list[list[int]], limit: int, work: Path, *, seed: int,
             most: int = 100, size: int = 64) -> tuple[list[Pair], list[Pair]]:
    """(to train on, held out): pairs of a prompt and the model's own answer. A tenth of them, at
    random and at most `most`, are held out; each prompt counts once."""
    longest = context_length(model) - limit
    fitting = [list(p) for p in dict.fromkeys(map(tuple, prompts)) if len(p) <= longest]
    if len(fitting) < 2:
        raise InputError(f"expected 2 prompts or more of at most {longest} tokens, "
                         f"got {len(fitting)}")
    answers = collect_answers(model, tokenizer, fitting, limit, work, size)
    data = [(p, a) for p, a in zip(fitting, answers) if len(a) > 1]
    if len(data) < 2:
        raise InputError(f"expected 2 answers or more of 2 tokens or more, got {len(data)}")
    random.Random(seed).shuffle(data)
    few = max(1, min(most, len(data) // 10))
    print(f"{len(data) - few} answers of {sum(len(a) for _, a in data[few:]):,} tokens, {few} held "
          f"out, {len(prompts) - len(fitting)} prompts too long or repeated")
    return data[few:], data[:few]


def sample_alike(data: list, batch: int, rng: random.Random, length: Callable) -> list:
    """Some of the data, at random but alike in length: little is padding."""
    pool = sorted(rng.sample(data, min(4 * batch, len(data))), key=length)
    first = min(rng.randrange(0, len(pool), batch), max(0, len(pool) - batch))
    return pool[first:first + batch]


def length_of(pair: Pair) -> int:
    return len(pair[0]) + len(pair[1])


def pad_pairs(some: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [B, T], bool [B, T - 1]: where the next token is of an answer)."""
    texts = [torch.tensor(prompt + answer) for prompt, answer in some]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    place = torch.arange(1, ids.shape[1])
    learns = [(place >= len(p)) & (place < len(p) + len(a)) for p, a in some]
    return ids, torch.stack(learns)


def answer_logits(model, some: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [N, V], labels [N]) of the tokens of answers, one answer after the other."""
    ids, learns = (x.to(model.device) for x in pad_pairs(some))
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return logits[learns].float(), ids[:, 1:][learns]


def most_frequent(data: list[Pair], n: int) -> list[int]:
    """The n most frequent tokens of prompts and answers, fewer where there are fewer; [] for 0."""
    seen = Counter(token for prompt, answer in data for token in prompt + answer)
    return [token for token, _ in seen.most_common(n)] if n else []


# ------------------------------------------------------------------------------------ the loop

def divergence(kind: str, target_logits, draft_logits):
    """D(target, draft) in nats at each position: [..., V], [..., V] -> [...]. DistillSpec, Table 1;
    `tvd` is 1 - acceptance rate."""
    log_p, log_q = F.log_softmax(target_logits.float(), -1), F.log_softmax(draft_logits.float(), -1)
    if kind == "forward-kl":  # by itself: V may be large
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "reverse-kl":
        return (q * (log_q - log_p)).sum(-1)
    if kind == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))
        return 0.5 * (p * (log_p - log_m)).sum(-1) + 0.5 * (q * (log_q - log_m)).sum(-1)
    if kind == "tvd":
        return 0.5 * (p - q).abs().sum(-1)
    raise ValueError(f"expected forward-kl, reverse-kl, jsd or tvd, got {kind!r}")


def cosine(done: int, steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * done / steps))


def warm_linear(done: int, steps: int) -> float:
    """A warm-up over a twentieth of the steps, then linearly to 0."""
    return min((done + 1) / max(1, 0.05 * steps), 1 - done / steps)


class Training:
    """A training run of `steps` updates, which goes on where it was stopped.

    part:       the parameters that are trained, by name; a checkpoint keeps them
    of:         all that the loss depends on besides: the frozen model's weights, data, settings
    lr, rate:   the learning rate, and rate(done, steps), what it is multiplied with
    accumulate: losses an update, of which the mean counts
    norm:       gradients are cut to this length; value: and each of their values to this
    optimizers: in place of AdamW without weight decay; all with the same rate
    folder:     of checkpoints; None: there are none
    """

    def __init__(self, part: dict[str, torch.nn.Parameter], of: tuple, *, name: str, steps: int,
                 lr: float, rate: Callable = cosine, accumulate: int = 1, norm: float = 1.0,
                 value: float = math.inf, optimizers: list | None = None, seed: int = 0,
                 reports: int = 10, folder: Path | None = None):
        self.part, self.name = part, name
        self.steps, self.accumulate, self.seed = steps, accumulate, seed
        self.lr, self.rate, self.norm, self.value = lr, rate, norm, value
        self.optimizers = optimizers or [torch.optim.AdamW(part.values(), lr=lr, weight_decay=0.0)]
        self.between = max(1, steps // reports)
        self.device = next(iter(part.values())).device
        self.done, self.curve, self.whole = 0, {}, True
        settings = (of, name, steps, lr, rate.__name__, accumulate, norm, value, seed,
                    [type(x).__name__ for x in self.optimizers])
        self.file = folder and folder / f"{name}-{digest(part, settings)}.pt"
        self.saved = time.time()
        if self.file and self.file.exists():
            self.load()

    def load(self) -> None:
        try:
            state = torch.load(self.file, weights_only=True, map_location="cpu")
            with torch.no_grad():
                for name, p in self.part.items():
                    p.copy_(state["part"][name])
            for optimizer, saved in zip(self.optimizers, state["optimizers"]):
                optimizer.load_state_dict(saved)
            self.done, self.curve = state["done"], state["curve"]
        except (RuntimeError, LookupError, EOFError, UnpicklingError) as error:
            raise InputError(f"expected a checkpoint, got a damaged one in {self.file}; without it "
                             "the run begins anew") from error

    def save(self) -> None:
        """Unless an update is half made. The file is whole at any time."""
        if self.file and self.whole:
            torch.save({"part": self.part, "done": self.done, "curve": self.curve,
                        "optimizers": [x.state_dict() for x in self.optimizers]},
                       self.file.with_suffix(".new"))
            os.replace(self.file.with_suffix(".new"), self.file)
            self.saved = time.time()

    def run(self, loss_of: Callable, evaluate: Callable) -> dict[int, dict]:
        """{step: figures} of ten or so steps, the last among them.

        loss_of(rng):  a loss, in bfloat16 autocast; what is random in it, by `rng` alone
        evaluate():    (figures, a line that says them), on held-out data
        """
        with tqdm(total=self.steps, initial=self.done, desc=self.name) as bar:
            try:
                while True:
                    self.report(evaluate)
                    if self.done == self.steps:
                        return self.curve
                    loss = self.update(loss_of)
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                    bar.update()
                    if time.time() - self.saved > 120:
                        self.save()
            finally:  # Ctrl-C, too
                self.save()

    def report(self, evaluate: Callable) -> None:
        due = self.done % self.between == 0 or self.done == self.steps
        if due and self.done not in self.curve:
            figures, line = evaluate()
            self.curve[self.done] = figures
            tqdm.write(f"step {self.done}: {line}")
            self.save()

    def update(self, loss_of: Callable) -> float:
        """One step; the loss before it."""
        rng = random.Random(f"{self.name} {self.seed} {self.done}")
        total = 0.0
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = self.lr * self.rate(self.done, self.steps)
        for _ in range(self.accumulate):
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = loss_of(rng) / self.accumulate
            if not loss.isfinite():
                raise InputError(f"expected a learning rate below {self.lr}: the loss is {loss}")
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.part.values(), self.norm)
        torch.nn.utils.clip_grad_value_(self.part.values(), self.value)
        self.whole = False
        for optimizer in self.optimizers:
            optimizer.step()
        self.done += 1
        self.whole = True
        return total
