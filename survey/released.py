"""Read heads that others have trained and released, as their files are."""
import json
from pathlib import Path

from common import InputError, shorten

import torch
from safetensors.torch import load_file
from transformers.utils import cached_file

# In this order: a repository may have its weights in two forms. Those of a large head may come in
# parts, which an index lists.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
           "pytorch_model.bin.index.json", "medusa_lm_head.safetensors", "medusa_lm_head.pt")


def find_file(path: str, name: str) -> Path | None:
    """Find a file of a directory or of a hub id; None if it has none of this name."""
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.exists() else None
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Read a file of tensors. A pickled file may hold tensors alone: no code of it is run."""
    if file.suffix == ".safetensors":
        return load_file(file)
    return torch.load(file, weights_only=True, map_location="cpu")


def read_released(path: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Read a released head.

    path     a directory or hub id
    returns  what its config.json says, and its tensors by name. InputError if something is missing
             or damaged
    """
    try:
        config = json.loads(find_file(path, "config.json").read_text(encoding="utf-8"))
        found = ((name, find_file(path, name)) for name in WEIGHTS)  # none after the first is asked
        name, first = next((name, file) for name, file in found if file)
        files = [first]
        if name.endswith(".index.json"):
            parts = json.loads(first.read_text(encoding="utf-8"))["weight_map"].values()
            files = [find_file(path, part) for part in sorted({*parts})]
        tensors = {}
        for file in files:
            tensors |= read_weights(file)
        return config, {name: x for name, x in tensors.items() if x.numel() > 0}
    except Exception as error:  # the readers of the file formats raise all kinds
        raise InputError(f"expected a trained file, or a directory or hub id with config.json and "
                         f"weights, got {path!r}: {shorten(error)}") from error
