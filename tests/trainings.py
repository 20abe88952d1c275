"""The table of all trainings as command lines, and a function that runs one on a tiny model.

Each command line stands for a training, and beside it is what decodes with the file or folder OUT
that the training leaves."""
import importlib
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import cllm
from cli.commands import parse_command
from cli.options import read_options, select_options
from families import deep
from training.settings import SETTINGS, Settings
from training.texts import digest

TRAININGS = {  # a training: the decoding that reads OUT
    "bita train --P 3 --M 2": "bita --adapter OUT --tree full --k 2",
    "bita train --P 0 --M 2": "survey.masks --tokens OUT",
    "cllm train --lr 1e-2 --states 2": "cllm --target OUT --n 4",
    "survey.medusa train --K 2": "survey.medusa --adapter OUT --nodes 5",
    "survey.medusa train --K 2 --heads hydra --vocab 9":
        "survey.medusa --adapter OUT --heads hydra --nodes 5",
    "survey.eagle train": "survey.eagle --adapter OUT --nodes 5",
    "survey.eagle train --mlp 24 --vocab 9": "survey.eagle --adapter OUT --nodes 5",
    "survey.eagle3 train --taps 0,1 --passes 2 --vocab 9": "survey.eagle3 --adapter OUT --nodes 5",
    "survey.mtp train --passes 2 --vocab 9": "survey.mtp --adapter OUT --nodes 5",
    "survey.dflash train --taps 0,1 --layers 1 --B 3 --markov 4 --anchors 3":
        "survey.dflash --adapter OUT",
    "survey.dflash train --taps 0,1 --layers 1 --B 3 --markov 0": "survey.dflash --adapter OUT",
    "survey.early_exit train --E 1": "survey.early_exit --exit OUT",
    "survey.layerskip tune --E 1 --rank 2": "survey.layerskip --tuning OUT",
    "survey.masks tune --k 2 --rank 2": "survey.masks --method space --tuning OUT",
    "train distil --layers 0": "speculative --draft OUT"}
TWINS = {  # another line runs all the code of each
    "bita train --P 0 --M 2", "survey.medusa train --K 2", "survey.eagle train",
    "survey.dflash train --taps 0,1 --layers 1 --B 3 --markov 0"}
FLAT = {x for x in TRAININGS if x.startswith(("bita", "cllm"))}  # their loops are in these files
CHOICES = {"heads": ("medusa", "hydra"), "taps": ("0,1", "0,2", "2")}
PROMPTS = [[x, 3, 7] for x in range(4, 12)]


@contextmanager
def use_settings(**settings):
    """Let all trainings inside a `with` have these settings."""
    before = SETTINGS.set(Settings(**settings))
    try:
        yield
    finally:
        SETTINGS.reset(before)


DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3, 30], [4, 4, 2, 11, 17, 40]), ([7], [5, 2])]
WORDLESS = SimpleNamespace(  # a tokenizer, as far as needed
    eos_token_id=None, decode=lambda ids, **_: str(ids), save_pretrained=str,
    get_vocab=lambda: {f"t{n}": n for n in range(61)})
LITTLE = dict(steps=4, batch=2, lr=1e-2, max_new_tokens=6)


def make_llama(noise: float = 0.0):
    """Make a model; noise in its last layer makes another one that begins alike."""
    model = deep("llama", 3)
    model.model.layers[-1].mlp.down_proj.weight.data.add_(noise)
    return model


def find_command(line: str):
    """Return the function that a training's command line calls, and the options that are given."""
    file, name, *argv = line.split()
    command = getattr(importlib.import_module(file), name)
    for required in {"out", "data"} & {*read_options(command)}:
        argv += [f"--{required}", "x"]
    given = select_options(parse_command(command, argv), command)
    return command, {name: x for name, x in given.items() if x != Path("x")}


def run(line: str, folder: Path, model, prompts=PROMPTS, **changes) -> Path:
    """Run a training with little of everything; return the file or the folder that it leaves.

    changes   options that differ from those of the line and from LITTLE
    """
    command, given = find_command(line)
    known, folder = read_options(command), folder / "new"
    options = {name: x for name, x in LITTLE.items() if name in known} | given | changes
    options |= {name: folder / name for name in ("out", "work") if name in known}
    folder.mkdir(parents=True, exist_ok=True)
    if "data" in known:  # a CLLM learns from trajectories
        options["data"] = folder / f"data-{digest(model.state_dict(), prompts)}"
        cllm.collect(model, WORDLESS, prompts, out=options["data"], n=4, max_new_tokens=6)
    else:
        options["prompts"] = prompts
    shutil.rmtree(folder / "out", ignore_errors=True)  # of an earlier run
    Path(folder / "out").unlink(missing_ok=True)
    command(model, WORDLESS, **options)
    return folder / "out"


def list_changes(line: str) -> list[dict]:
    """Return for each option of a training, and for its prompts, a change that makes it another."""
    command, given = find_command(line)
    changes = [{"prompts": PROMPTS[::-1]}]
    for name, (kind, default) in read_options(command).items():
        value = given.get(name, LITTLE.get(name, default))
        if (line.split()[0], name) == ("survey.layerskip", "E"):
            continue  # the file keeps it, and no loss reads it
        if name in CHOICES:
            changes += [{name: x} for x in CHOICES[name] if x != value]
        elif kind is bool:
            changes.append({name: not value})
        elif kind in (int, float):
            changes.append({name: 2 * value or 1})
    return changes
