"""Compute the peak memory of every training for a model of 8B, by shapes alone: without a GPU.

    python results/memory.py "bita --batch 4"   # one training with options, or several
    python results/memory.py                    # those of results/memory.md at their defaults

Each command of the project runs for two updates, with all its models, losses and optimizers. What
is missing are the numbers:

    floats         have a shape, a type and bytes that are counted, but no numbers (fake tensors)
    ints, bools    are real: token ids, masks, positions, the rows that a loss reads
    argmax, x < y  and whatever else turns floats into ints or bools sees zeros in their place

    command ──> operation ──> a tensor with a new storage: its bytes are added
                              a storage that nobody has any more: its bytes are taken off

An operation's own scratch memory is not seen, nor are CUDA's context and the gaps between tensors.
So a training fits a GPU only if 2 GB are left over. Everything is counted as if it were on
the GPU, also what a program keeps beside it. Attention counts as a kernel that keeps no scores.
"""
import random
import shlex
import sys
import tempfile
import warnings
import weakref
from contextlib import contextmanager, redirect_stdout
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Iterator
from unittest.mock import Mock, patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import LlamaConfig, LlamaForCausalLM

from bench import Parser, run_script  # it sets the path for what follows
import bita
from cli.commands import parse_command
from cli.options import select_options
from common import InputError
from support.engine import check
from survey import eagle, eagle3, early_exit, layerskip, masks, medusa
from support import files, parts
from training import acceptance, loop as training

aten = torch.ops.aten
COMPARISONS = {aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
LENGTHS = 312, 200  # tokens of each prompt and of each answer
BIG = dict(vocab_size=128256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
           num_key_value_heads=8, intermediate_size=14336, max_position_embeddings=131072)
SMALL = dict(vocab_size=8192, hidden_size=128, num_hidden_layers=8, num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=352, max_position_embeddings=1024)


# ------------------------------------------------------------------------ tensors without numbers

def is_shape(x) -> bool:
    """Say whether something is a tensor without numbers."""
    return isinstance(x, FakeTensor)


def to_zeros(x):
    """Give zeros to a tensor without numbers."""
    return torch.zeros(x.shape, dtype=x.dtype) if is_shape(x) else x


def find_rows(x) -> tuple:
    """Return the numbers of the rows that a mask chooses, which are known, since masks are real."""
    mask = isinstance(x, torch.Tensor) and x.dtype == torch.bool
    return x.nonzero().unbind(1) if mask else (x,)


class Ledger(TorchDispatchMode):
    """Run operations on shapes, and count the bytes of all storages: `now`, and their `peak`."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.shapes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "aten" and func._can_decompose():  # a function of others
            with self:
                return func.decompose(*args, **kwargs)
        out = self.run(func, args, kwargs)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.count(x.untyped_storage())
        return out

    def run(self, func, args: tuple, kwargs: dict):
        """Run an operation on real numbers if its inputs have them, else on shapes."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        kind = func.overloadpacket
        if func.namespace != "aten" or (tensors and not any(map(is_shape, tensors))):
            return func(*args, **kwargs)
        if kind is aten._local_scalar_dense:
            return 0.0
        if kind is aten._fused_sdp_choice:
            return 1  # attention that keeps no scores
        if kind in COMPARISONS:
            return func(*tree_map(to_zeros, args), **kwargs)
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and not is_shape(args[0]):
            return args[0]  # real numbers stay as they are
        if kind in INDEXING:
            args = (args[0], [row for x in args[1] for row in find_rows(x)], *args[2:])
        with self.shapes:
            out = func(*args, **kwargs)
        if not tensors and not out.is_floating_point():  # it makes ints of nothing
            return func(*args, **kwargs)
        return tree_map(lambda x: x if is_shape(x) and x.is_floating_point() else to_zeros(x), out)

    def count(self, storage) -> None:
        """Count a storage until it is freed, unless it was counted before."""
        if not hasattr(storage, "counted"):
            storage.counted = True
            self.add(storage.nbytes())
            weakref.finalize(storage, self.add, -storage.nbytes()).atexit = False

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def convert(self, change, recurse: bool = True):
    """Replace Module._apply, which cannot change parameters without numbers."""
    made = {}  # by what it was made of: tied weights stay tied
    for module in self.modules():
        for name, x in module._parameters.items():
            if x is not None and x not in made:
                new = change(x)
                made[x] = x if new is x else torch.nn.Parameter(new, x.requires_grad)
            module._parameters[name] = made.get(x)
    return self


# -------------------------------------------------------------------------------------- trainings

def make_texts(lengths: tuple[int, int], n: int) -> list:
    """Make n pairs of a prompt and its answer of these lengths, token ids from 3 to 999."""
    rng = random.Random(n)
    return [tuple([rng.randrange(3, 1000) for _ in range(k)] for k in lengths) for _ in range(n)]


def make_model(shape: dict, device: str):
    """Make a Llama of this shape with random weights in bfloat16, on the device at once."""
    config = LlamaConfig(**shape, pad_token_id=0, dtype=torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return check(model.eval())


def run_answers(model, tokenizer, prompts: list, *, steps: int, lr: float, out: Path) -> None:
    """Let a model answer a whole batch of prompts. At the last token the cache is largest."""
    training.answer_all(model, {2}, [prompt + answer[:-2] for prompt, answer in prompts], 2)


COMMANDS = {"answers": run_answers, "medusa": medusa.train, "bita": bita.train,
            "pass": masks.train, "space": masks.tune, "exit": early_exit.train,
            "eagle": eagle.train, "eagle3": eagle3.train, "layerskip": layerskip.tune}
LINES = ["medusa --heads hydra", *COMMANDS]  # the slow ones last


@contextmanager
def leave_out(data: list) -> Iterator[None]:
    """Replace what a training of made-up texts does not do, while a `with` lasts.

    data   the texts. A training holds a tenth of them out
    """
    # A hash reads numbers, and the states of this little data would be kept.
    given = {"collect_pairs": Mock(return_value=data), "digest": Mock(return_value=""),
             "write_whole": Mock(), "KEPT": 0}
    # Acceptance is measured text by text. Without numbers a text would have a round a token.
    measured = {"measure_acceptance": Mock(return_value=[[0.5]])}
    with (patch.multiple(training, **given), patch.multiple(acceptance, **measured),
          patch.multiple(files, write_whole=Mock()), patch.multiple(parts, write_whole=Mock()),
          patch.object(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")):  # as on a GPU
        yield


def run_training(line: str, shape: dict, lengths: tuple[int, int], device: str) -> None:
    """Run a command for two updates, on texts of one length.

    line     the command's name and options
    shape    of the target. The draft of the trainings that have one goes with it
    lengths  tokens of each prompt and of each answer
    device   where the model is
    """
    name, *words = shlex.split(line) or [""]
    if name not in COMMANDS:
        raise InputError(f"expected a training, one of {', '.join(COMMANDS)}, got {name!r}")
    command, data = COMMANDS[name], make_texts(lengths, 80 if name == "eagle3" else 320)
    with tempfile.TemporaryDirectory() as folder, leave_out(data):
        given = ["--steps", "2", "--lr", "1e-4", "--out", f"{folder}/part"]
        args = parse_command(command, [*words, *given])
        if "accumulate" in args:  # gradients are there from the second pass on. More take no more
            args.accumulate = min(2, args.accumulate)
        options = select_options(args, command)
        if "prompts" in signature(command).parameters:
            options["prompts"] = data[:64]
        tokenizer = SimpleNamespace(eos_token_id=2, bos_token_id=1, pad_token_id=0,
                                    save_pretrained=lambda folder: None)
        with training.use_settings(training.Settings(**select_options(args, training.Settings))):
            command(make_model(shape, device), tokenizer, **options)


def count_by_shapes(line: str, shape: dict, lengths: tuple[int, int] = LENGTHS) -> int:
    """Run a command on shapes, and return the peak in bytes.

    The training's own lines, such as how many numbers it trains, go to stderr.
    """
    with (patch.object(torch.nn.Module, "_apply", convert), warnings.catch_warnings(),
          redirect_stdout(sys.stderr), Ledger() as ledger):
        warnings.simplefilter("ignore")  # what has no numbers is asked where they are
        run_training(line, shape, lengths, "cpu")
    return ledger.peak


def main() -> None:
    """Print the peak of each training."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("trainings", nargs="*", metavar="TRAINING", default=LINES,
                        help="with its options, one of " + ", ".join(COMMANDS))
    for line in parser.parse_args().trainings:
        print(f"{line}: peak {count_by_shapes(line, BIG) / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
