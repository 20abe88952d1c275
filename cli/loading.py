"""Tells which file of a model is at fault when loading fails.

`load` of support/engine.py says what transformers says. Here a directory that could not be loaded
is looked at, so that its user learns which file is wrong and what to do about it."""
import sys
from pathlib import Path

from safetensors import safe_open

from common import InputError
from support.engine import load
from support.files import ask_hub, check_file, explain_errors


def load_checked(path: str, device: str | None, dtype: str | None) -> tuple:
    """Load a model and its tokenizer, and say in one line which file is wrong where one is.

    path, device, dtype   as `load` takes them
    returns               the model and its tokenizer; InputError for what cannot be used. If the
                          model is on a GPU, a line says on which
    """
    folder = Path(path)
    if (folder / "adapter_config.json").exists():  # transformers may load it, or may ignore it
        raise InputError(f"expected a whole model, got {path!r} with adapter_config.json: a LoRA "
                         "adapter must be merged into its base model first")
    ask_hub(path, ["config.json"])
    try:
        model, tokenizer = load(path, device, dtype)
    except InputError as error:
        if "trust_remote_code" in str(error.__cause__):  # whole: the error's own text is cut
            raise InputError("expected a model that needs no code of its own, which is never run "
                             f"here, got {path!r}") from error
        for file in sorted(folder.glob("*.safetensors")):
            with explain_errors("a file of weights that is not cut off or damaged", file):
                check_file(file)
                safe_open(file, "pt")  # it reads where each tensor lies
        raise
    if model.device.type != "cpu":
        print(f"{path} on {model.device} in {str(model.dtype).removeprefix('torch.')}",
              file=sys.stderr)
    return model, tokenizer
