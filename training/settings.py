"""This file has what every training can be told. cli/ prints OPTIONS, and checks their values."""
from contextvars import ContextVar
from dataclasses import dataclass
from textwrap import fill

Pair = tuple[list[int], list[int]]  # token ids of a prompt and of its answer


# For each option of trainings: its meaning, unless the training's docstring has it, and its values
OPTIONS = {
    "accumulate": ("passes of a step, which takes the mean of their gradients. Four passes of 4 "
                   "answers need the memory of 4, and learn about what a pass of 16 learns",
                   "1 or more"),
    "max_length": ("the most tokens of a prompt and its answer together. A prompt that leaves no "
                   "room for the longest answer is left out. An answer of --data is cut",
                   "3 or more"),
    "out": ("the file or the folder to make, which must be new", ""),
    "work": ("the folder of the answers and the checkpoints. The default is OUT.work", ""),
    "vocab": ("how many of the most frequent tokens a part can guess. 0 stands for all",
              "0 or more"),
    "max_new_tokens": ("the most tokens of an answer", "1 or more"),
    "steps": ("how many updates are made", "1 or more"),
    "batch": ("how many answers a pass has", "1 or more"),
    "lr": ("the highest learning rate", "above 0"),
    "seed": ("another seed samples other data", "")}
RANGES = {name: values for name, (_, values) in OPTIONS.items() if values}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hold the options of a training that are not its arguments."""
    accumulate: int = 1
    max_length: int = 2048
    # Prompts with answers that were made elsewhere, in place of the model's own answers
    pairs: list[Pair] | None = None


# --help prints this docstring, and so all options are explained in one place.
Settings.__doc__ += "\n\n" + "\n".join(
    fill(f"{name}: {meaning} ({values})".removesuffix(" ()"), 96, subsequent_indent="    ")
    for name, (meaning, values) in OPTIONS.items())


# The settings of the training that runs now. They are no arguments, since a method would only pass
# them on.
SETTINGS = ContextVar("settings", default=Settings())
