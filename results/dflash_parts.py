"""Train DFlash's draft in several forms, and measure the guesses of drafts place by place.

    python results/dflash_parts.py --prompts FILE --work FOLDER --steps 150
    python results/dflash_parts.py --target MODEL --adapters FOLDER --prompts FILE --work FOLDER

All forms of VARIANTS learn for equally many steps from the target's own answers to the prompts.
Beside them stand the parts that --adapters has for the target. All are measured at the same places
of the same held-out answers. WORK keeps answers, features and checkpoints, so that a run that was
stopped goes on.
"""
import argparse
import sys
from itertools import accumulate
from pathlib import Path
from typing import Iterator

import torch

from bench import EMBEDDED, ROOT, table

sys.path.insert(0, str(ROOT))
from cli.loading import encode_prompts, load_checked  # noqa: E402  (the path is set above)
from cli.text import Parser, set_encodings  # noqa: E402
from common import InputError  # noqa: E402
from models import tasks  # noqa: E402
from models.training import collect_examples  # noqa: E402
from survey import dflash, eagle, eagle3, medusa  # noqa: E402
from survey.parts import logits_of  # noqa: E402

TAPS = [2, 6, 11]
PLACES = 8  # how many places of a block the table shows
VARIANTS = {  # what it is called: the form of the draft, the loss, and the share of the answers
    "both ways, Markov head, two layers, B = 8": ({}, "ce", 1),
    "causal": (dict(causal=True), "ce", 1),
    "without a Markov head": (dict(markov=0), "ce", 1),
    "one layer": (dict(layers=1), "ce", 1),
    "B = 4": (dict(B=4), "ce", 1),
    "B = 16": (dict(B=16), "ce", 1),
    "half of the answers": ({}, "ce", 1 / 2),
    "a quarter of the answers": ({}, "ce", 1 / 4),
    "factors in place of matrices": (dict(gains=True), "ce", 1),
    "loss tv": ({}, "tv", 1),
}
Guesses = Iterator[tuple[torch.Tensor, torch.Tensor]]  # what `dflash.rate_guesses` takes


def guess_levels(draft, texts: list) -> Guesses:
    """Yield which guesses of a chain of EAGLE or EAGLE-3 are right, text by text."""
    for text in texts:
        steps = [*eagle.guess_text(draft, text)]
        right = torch.zeros(len(steps[0][1]), eagle.DEPTH, dtype=torch.bool)
        inside = torch.zeros_like(right)
        for n, (best, labels) in enumerate(steps):
            right[:len(labels), n] = (best[:, 0] == labels).cpu()
            inside[:len(labels), n] = True
        yield right[::dflash.EVERY], inside[::dflash.EVERY]


@torch.inference_mode()
def guess_heads(trained, model, held_out: list) -> Guesses:
    """Yield which guesses of Medusa's or Hydra's heads are right, text by text."""
    to_logits = logits_of(model)
    for f, after in medusa.collect_features(model, held_out, trained.K):
        f, after = f[::dflash.EVERY], after[::dflash.EVERY].to(trained.vocab.device)
        states = medusa.head_states(trained, model, f.to(trained.W[0].weight), after)
        right = [to_logits(trained.lm_head_of(k)(x).float()).argmax(-1) == labels
                 for k, x, labels in states]
        yield torch.stack(right, -1), after[:, 1:] >= 0


def measure_parts(model, adapters: Path, held_out: list, work: Path) -> dict[str, list[float]]:
    """Measure each part that a folder has for the model, in bfloat16 as at the end of a training.

    model      the target
    adapters   the folder
    held_out   pairs of a prompt and its answer
    work       the folder of features
    returns    {name: a rate for each place}
    """
    found, to_logits = {}, logits_of(model)
    autocast = torch.autocast(model.device.type, dtype=torch.bfloat16)
    if (adapters / "dflash.safetensors").exists():
        draft = dflash.load_draft(adapters / "dflash.safetensors", model)
        texts = dflash.compute_texts(model, draft.taps, held_out, work)
        with autocast:
            found["DFlash, the file"] = dflash.measure_acceptance(draft, to_logits, texts)
    if (adapters / "eagle3.safetensors").exists():
        draft = eagle3.load_draft(adapters / "eagle3.safetensors", model)
        texts = eagle3.compute_texts(model, draft, held_out)
        with autocast:
            found["EAGLE-3, the file"] = dflash.rate_guesses(guess_levels(draft, texts))
    if (adapters / "eagle.safetensors").exists():
        draft = eagle.load_draft(adapters / "eagle.safetensors", model)
        texts = [(ids, f.to(model.dtype), length)
                 for ids, f, length in eagle.compute_features(model, held_out)]
        with autocast:
            found["EAGLE, the file"] = dflash.rate_guesses(guess_levels(draft, texts))
    if (adapters / "hydra.safetensors").exists():
        heads = medusa.load_heads(adapters / "hydra.safetensors", "hydra", model)
        with autocast:
            found["Hydra, the file"] = dflash.rate_guesses(guess_heads(heads, model, held_out))
    return found


def train_variants(model, data: list, held_out: list, steps: int, batch: int, anchors: int,
                   work: Path) -> dict:
    """Train each of VARIANTS.

    data, held_out   pairs to learn from, and to measure by
    steps            how many steps each learns for
    batch            how many answers a step learns from
    anchors          how many blocks each answer of a step has
    work             the folder of features and checkpoints
    returns          {name: a rate for each place of its block}
    """
    found = {}
    for name, (form, loss, share) in VARIANTS.items():
        print(f"{name}:", flush=True)
        draft = dflash.Draft(model, TAPS, **form)
        dflash.fit(model, draft, data[:round(share * len(data))], held_out, loss=loss,
                   anchors=anchors, steps=steps, batch=batch, lr=3e-3, work=work)
        found[name] = draft.accept
    return found


def print_rates(rates: dict[str, list[float]]) -> None:
    """Print a row for each draft: its first places, and how many guesses of a block are accepted.

    rates   for each draft how often the guess of each place is right, where those before it are
    """
    rows = [["draft", *(str(k + 1) for k in range(PLACES)), f"accepted of {PLACES}",
             "accepted of all", "all"]]
    for name, accept in rates.items():
        shown = [f"{x:.3f}" for x in accept[:PLACES]]
        # The mean number of guesses before the first wrong one
        products = [*accumulate(accept, lambda a, b: a * b)]
        rows.append([name, *shown, *[""] * (PLACES - len(shown)), f"{sum(products[:PLACES]):.2f}",
                     f"{sum(products):.2f}", str(len(accept))])
    print(table(rows))


def main() -> None:
    set_encodings()
    parser = Parser(description=__doc__.partition("\n")[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--target", default=EMBEDDED)
    add("--dtype", choices=["float32", "bfloat16", "float16"])
    add("--chat", action="store_true", help="put prompts into the model's chat template")
    add("--prompts", required=True, metavar="FILE", help="of which answers are learned")
    add("--work", type=Path, required=True, help="folder of answers, features and checkpoints")
    add("--adapters", type=Path, default=ROOT / "models", help="folder of the parts beside")
    add("--max-new-tokens", type=int, default=200)
    add("--steps", type=int, default=0, help="of each form; 0: none is trained")
    add("--batch", type=int, default=16, help="how many answers a step learns from")
    add("--anchors", type=int, default=24, help="how many blocks each answer of a step has")
    args = parser.parse_args()
    try:
        model, tokenizer = load_checked(args.target, None, args.dtype)
        texts = [tasks.prompt_of(row) for row in tasks.read_rows(args.prompts)]
        prompts = encode_prompts([model], tokenizer, texts, args.chat)
        data, held_out = collect_examples(model, tokenizer, prompts, args.max_new_tokens,
                                          args.work, seed=0, most=50)
        rates = measure_parts(model, args.adapters, held_out, args.work)
        print_rates(rates)
        if args.steps:
            print_rates(train_variants(model, data, held_out, args.steps, args.batch, args.anchors,
                                       args.work))
    except InputError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
