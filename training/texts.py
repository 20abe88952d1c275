"""This file makes the data of most trainings: the model's own answers, and what a frozen model
computes of their texts. survey/rest.py keeps answers too, and trains nothing.

    prompts ── the model answers ──> answers-<hash>.jsonl ── split ──> data, held-out examples
"""
import functools
import hashlib
import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from common import InputError, context_length, eos_ids, until
from support.engine import tap_layers
from support.files import read_kept
from training.settings import SETTINGS, Pair

TOKENS = 16_384  # the most tokens of a batch of texts, with padding, and of their answers
TEXTS = 16  # the most texts that a frozen model reads for one pass, if no states are kept
KEPT = 2 ** 30  # the most bytes that the states of a frozen model may take if they are kept
# Put tensors into one batch, and fill them up with zeros.
pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)


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


# --------------------------------------------------------------------------------- their answers

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
                              pad_token_id=0)  # it is masked in prompts, and cut off from answers
    for numbers in split_by_tokens(prompts, limit):
        batch = [torch.tensor(prompts[number]) for number in numbers]
        # Prompts are filled up on the left, so that all answers begin at the same place.
        ids = pad(batch, padding_side="left").to(model.device)
        real = pad([torch.ones_like(x) for x in batch], padding_side="left").to(model.device)
        # `generate` adds the model's own settings to those it is given, so they are taken away.
        settings = model.generation_config
        model.generation_config = config
        try:
            rows = model.generate(ids, attention_mask=real)[:, ids.shape[1]:].tolist()
        finally:  # also after Ctrl-C
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
        answer_of = dict(read_kept(file, lambda row: (tuple(row["prompt"]), row["answer"])))
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
        fitting = [p for p in prompts if len(p) <= longest - limit]
        pairs = [*zip(fitting, collect_answers(model, tokenizer, fitting, limit, work))]
    answer_of = {}
    for prompt, answer in pairs:
        answer_of.setdefault(tuple(prompt), answer[:max(0, longest - len(prompt))])
    data = [([*prompt], answer) for prompt, answer in answer_of.items() if len(answer) > 1]
    if len(data) < 2:
        raise InputError(f"expected 2 prompts or more with room for {limit} tokens of {longest}, "
                         f"and answers of 2 tokens or more, got {len(data)}")
    print(f"{len(data)} answers of {sum(len(a) for _, a in data):,} tokens; "
          f"{len(prompts) - len(data)} others repeated, without room or too short")
    random.Random(seed).shuffle(data)
    return data


class Lessons(NamedTuple):
    """Hold what a training learns from."""
    work: Path  # the folder of answers and checkpoints
    data: list[Pair]  # to train on
    held_out: list[Pair]  # to measure by


def prepare_training(model, tokenizer, prompts: list[list[int]], out: Path, work: Path | None,
                     max_new_tokens: int, seed: int, most: int = 100) -> Lessons:
    """Collect what a training learns from, and hold out some of it.

    out      the file that the training makes
    work     the folder of answers and checkpoints. None: OUT.work
    most     a tenth of the pairs is held out, but no more than this number

    The other arguments are those of `collect_pairs`.
    """
    work = work or Path(f"{out}.work")
    data = collect_pairs(model, tokenizer, prompts, max_new_tokens, work, seed)
    few = max(1, min(most, len(data) // 10))
    return Lessons(work, data[few:], data[:few])


def count_tokens(pair: Pair) -> int:
    """Count the tokens of a prompt and its answer."""
    return len(pair[0]) + len(pair[1])


def sample_alike(data: list, batch: int, rng: random.Random, size: Callable = count_tokens) -> list:
    """Sample `batch` items at random but alike in length, so that little is padding.

    data    all items
    batch   how many are sampled, or all where there are fewer
    rng     the generator
    size    a function that gives an item's length. By default an item is a pair
    """
    pool = sorted(rng.sample(data, min(4 * batch, len(data))), key=size)
    first = min(rng.randrange(0, len(pool), batch), max(0, len(pool) - batch))
    return pool[first:first + batch]


def mark_answers(spans: list[tuple[int, int]]) -> torch.Tensor:
    """Say where the next token of a text is one of its answer.

    spans    for each of B texts the place where its answer begins, and the length of the text
    returns  bool [B, T - 1], where T is the largest length
    """
    place = torch.arange(1, max(end for _, end in spans))  # of the next token
    return torch.stack([(place >= begin) & (place < end) for begin, end in spans])


def pad_pairs(pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put pairs into one batch, and return ids [B, T] and what `mark_answers` says of them."""
    texts = [torch.tensor(prompt + answer) for prompt, answer in pairs]
    return pad(texts), mark_answers([(len(p), len(p) + len(a)) for p, a in pairs])


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


# --------------------------------------------------------------- what a frozen model computes

class Text(NamedTuple):
    """Hold a prompt with its answer, and what the target computed of it."""
    ids: torch.Tensor  # [T]
    features: torch.Tensor  # bfloat16 [T, f], what was tapped, or what the LM head read
    length: int  # of the prompt


def pad_texts(texts: list[Text]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put texts into one batch on the device of their features.

    returns  ids [B, T], features [B, T, f], and what `mark_answers` says of the texts
    """
    features = pad([text.features for text in texts])
    learns = mark_answers([(text.length, len(text.ids)) for text in texts])
    ids = pad([text.ids for text in texts])
    return ids.to(features.device), features, learns.to(features.device)


def compute_features(model, data: list[Pair], taps: list[int] | None) -> list[Text]:
    """Run the target over pairs of a prompt and its answer.

    taps   the layers whose inputs are the features. None: the features are what the LM head reads
    """
    texts = [prompt + answer for prompt, answer in data]
    return [Text(torch.tensor(text), f, len(prompt))
            for (prompt, _), text, f in zip(data, texts, read_texts(model, texts, taps))]


@torch.no_grad()
def read_texts(model, texts: list[list[int]], taps: list[int] | None = None) -> list[torch.Tensor]:
    """Run a frozen model over texts, and return what is tapped of each in bfloat16, [T, d].

    Autocast would round what a float32 model computes, and decoding computes it without autocast.

    taps   numbers of layers, as for `tap_layers`. None: what the LM head would read
    """
    states = {}
    for numbers in split_by_tokens(texts, 0):
        rows = [torch.tensor(texts[number]) for number in numbers]
        ids = pad(rows).to(model.device)
        seen = []
        with torch.autocast(model.device.type, enabled=False), tap_layers(model, taps, seen):
            model.get_decoder()(input_ids=ids, use_cache=False)
        for number, row, x in zip(numbers, rows, torch.cat(seen, -1)):
            # A copy, since a part of a tensor keeps all of it in memory.
            states[number] = x[:len(row)].to(torch.bfloat16, copy=True)
    return [states[number] for number in range(len(texts))]


def measure_right(model, data: list[Pair]) -> float:
    """Measure how often a model's likeliest token is the next one of an answer.

    returns  for which share of the tokens of all answers it is right
    """
    head, right = model.get_output_embeddings(), []
    for (prompt, answer), x in zip(data, read_texts(model, [p + a[:-1] for p, a in data])):
        # Scaling and capping of logits would leave the likeliest token as it is.
        best = head(x[len(prompt) - 1:].to(model.dtype)).argmax(-1)
        right.append(best.cpu() == torch.tensor(answer))
    return torch.cat(right).float().mean().item()


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
