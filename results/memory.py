"""Compute the peak memory of every training for a model of 8B, by shapes alone: without a GPU.

    python results/memory.py                    # the table of results/memory.md
    python results/memory.py "bita --batch 4"   # one training with options: what fills the memory
    python results/memory.py --check            # small models, beside this CPU's own allocator

Each command of the project runs for two updates, with all its models, losses and optimizers. What
is missing are the numbers:

    floats         have a shape, a type and bytes that are counted, but no numbers ("meta" tensors)
    ints, bools    are real: token ids, masks, positions, the rows that a loss reads
    argmax, x < y  and whatever else turns floats into ints or bools sees zeros in their place

    command ──> operation ──> a tensor with a new storage: its bytes are added
                              a storage that nobody has any more: its bytes are taken off
                                   └──> the largest sum, and the lines that made its tensors

An operation's own scratch memory is not seen, nor are CUDA's context and the gaps between tensors.
So a training fits a GPU here only where 2 GB are left over. Everything is counted as if it were on
the GPU, also what a program keeps beside it. Attention counts as a kernel that keeps no scores.
"""
import argparse
import contextlib
import functools
import inspect
import io
import itertools
import json
import logging
import random
import sys
import tempfile
import weakref
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "models")]

import torch  # noqa: E402  (the path is set above)
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import bita  # noqa: E402
import cllm  # noqa: E402
from cli.main import run_script  # noqa: E402
from cli.text import Parser  # noqa: E402
from common import CachedLM, InputError, prepare  # noqa: E402
from models import files, train, training  # noqa: E402
from results.bench import table  # noqa: E402
from survey import eagle, eagle3, early_exit, layerskip, masks, medusa, online  # noqa: E402

aten, CPU, META = torch.ops.aten, torch.device("cpu"), torch.device("meta")
COMPARISONS = {aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# What autocast computes in bfloat16
LOW = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm,
       F.scaled_dot_product_attention}
SPARE = 2e9  # bytes of a GPU that are left for what is not counted
BIG = dict(vocab_size=128256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
           num_key_value_heads=8, intermediate_size=14336, max_position_embeddings=131072)
DRAFT = BIG | dict(hidden_size=2048, num_hidden_layers=16, head_dim=64, intermediate_size=8192,
                   tie_word_embeddings=True)  # as Llama 3.2 1B
SMALL = dict(vocab_size=8192, hidden_size=128, num_hidden_layers=8, num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=352, max_position_embeddings=1024)


# ------------------------------------------------------------------------ tensors without numbers

def change(value, of: Callable):
    """Apply `of` to all that is in lists, tuples and dictionaries."""
    if isinstance(value, (list, tuple)):
        return type(value)(change(x, of) for x in value)
    if isinstance(value, dict):
        return {name: change(x, of) for name, x in value.items()}
    return of(value)


def tensors_in(*values) -> list[Tensor]:
    """Find the tensors in lists, tuples and dictionaries."""
    found = []
    change(values, lambda x: found.append(x) if isinstance(x, Tensor) else None)
    return found


def is_shape(x) -> bool:
    """Say whether something is a tensor without numbers."""
    return isinstance(x, Tensor) and x.is_meta


def to_shape(x):
    """Take the numbers away from a tensor."""
    return torch.empty_like(x, device=META) if isinstance(x, Tensor) and not x.is_meta else x


def to_zeros(x):
    """Give zeros to a tensor without numbers."""
    return torch.zeros(x.shape, dtype=x.dtype) if is_shape(x) else x


@functools.cache
def is_composite(operation) -> bool:
    """Say whether an operation is no kernel, but a function of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(),
                                                          "CompositeImplicitAutograd")


@functools.cache
def is_ours(file: str) -> bool:
    """Say whether a file is one of the project's own, and not this one."""
    return file.startswith(str(ROOT)) and ".venv" not in file and file != __file__


def find_place() -> str:
    """Name the function and the line of the project that runs now."""
    frame = sys._getframe(1)
    while frame and not is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "the weights of models"
    file = Path(frame.f_code.co_filename).relative_to(ROOT)
    return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"


class Functions(TorchFunctionMode):
    """Answer what Python asks of tensors without numbers, and do what autocast would do to them.

    casts   the bfloat16 copies of trained parameters, which autocast keeps until it ends
    """

    def __init__(self):
        super().__init__()
        self.casts = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            return CPU  # for no code should know that they are peculiar
        if func in (Tensor.tolist, Tensor.numpy) and is_shape(args[0]):
            n = args[0].numel()
            zeros = torch.frombuffer(bytearray(4 * n + 4), dtype=torch.float32)
            return func(zeros[:n].view(args[0].shape))
        if func in (Tensor.cpu, Tensor.cuda):
            return args[0]
        if func is Tensor.to:  # another type; there is only one device
            values = [*args[1:], *kwargs.values()]
            types = [x.dtype if isinstance(x, Tensor) else x for x in values
                     if isinstance(x, (Tensor, torch.dtype))]
            copy = {"copy": True} if kwargs.get("copy") else {}
            return func(args[0], *types, **copy) if types or copy else args[0]
        if func is Tensor.__deepcopy__:
            x, memo = args
            memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
            return memo[id(x)]
        if func in LOW and torch.is_autocast_enabled("cpu"):
            args, kwargs = change(args, self.cast), change(kwargs, self.cast)
        if func is F.scaled_dot_product_attention and is_shape(args[0]):
            return attend(*args, **kwargs)
        return func(*args, **kwargs)

    def cast(self, x):
        """Make a float32 tensor bfloat16; a trained parameter only once."""
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            return x
        if not (x.is_leaf and x.requires_grad):
            return x.to(torch.bfloat16)
        if id(x) not in self.casts:
            self.casts[id(x)] = x.to(torch.bfloat16)
        return self.casts[id(x)]


def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Stand in for attention by a kernel that keeps its output and a number for each row."""
    mask = attn_mask if attn_mask is None else attn_mask.to(q.dtype)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]


class Ledger(TorchDispatchMode):
    """Run operations on shapes, and count the bytes of all storages.

    now      the bytes at present
    peak     the most bytes that there were
    places   for each place of the code the bytes that were made there and are still there
    at_peak  the same at the peak
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.places, self.at_peak = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "aten":  # a mark of torch's profiler
            return func(*args, **kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = self.run(func, args, kwargs)
        for x in tensors_in(out):
            self.count(x.untyped_storage())
        return out

    def run(self, func, args: tuple, kwargs: dict):
        """Run an operation on real numbers if its inputs have them, else on shapes."""
        tensors = tensors_in(args, kwargs)
        if not tensors:  # it makes a tensor of nothing, as torch.zeros does
            out = func(*args, **kwargs | {"device": META} | dict.fromkeys(
                kwargs.keys() & {"generator"}))
            return out if out.is_floating_point() else func(*args, **kwargs)
        if not any(map(is_shape, tensors)):
            return func(*args, **kwargs)
        kind = func.overloadpacket
        if kind is aten._local_scalar_dense:
            return 0.0
        if kind in COMPARISONS:
            return func(*change(args, to_zeros), **kwargs)
        if func._schema.is_mutable and isinstance(args[0], Tensor) and not is_shape(args[0]):
            return args[0]  # real numbers stay as they are
        if kind in INDEXING:  # how many rows a mask chooses is known, since masks are real
            rows = [x.nonzero().unbind(1) if isinstance(x, Tensor) and x.dtype == torch.bool
                    else (x,) for x in args[1]]
            args = (args[0], [x for each in rows for x in each], *args[2:])
        out = func(*change(args, to_shape), **change(kwargs, to_shape))
        return change(out, lambda x: x if is_shape(x) and x.is_floating_point() else to_zeros(x))

    def count(self, storage) -> None:
        """Count a storage, unless it was counted before, until nobody has it any more."""
        if hasattr(storage, "counted"):
            return
        storage.counted = True
        size, place = storage.nbytes(), find_place()
        self.now += size
        self.places[place] += size
        if self.now > self.peak:
            self.peak = self.now
            self.at_peak = self.places.copy()
        weakref.finalize(storage, self.free, size, place).atexit = False

    def free(self, size: int, place: str) -> None:
        """Take the bytes of a storage off that nobody has any more."""
        self.now -= size
        self.places[place] -= size


# -------------------------------------------------------------------------------------- trainings

class Texts(NamedTuple):
    """Say how many tokens each prompt and each answer has; all are of one length."""
    prompt: int = 312
    answer: int = 200

    def make(self, n: int) -> list:
        """Make n pairs of a prompt and its answer, token ids from 3 to 999."""
        rng = random.Random(n)
        return [tuple([rng.randrange(3, 1000) for _ in range(k)] for k in self) for _ in range(n)]


class Tokenizer:
    """Stand in for a tokenizer where texts are made already."""
    eos_token_id, bos_token_id, pad_token_id = 2, 1, 0

    def save_pretrained(self, folder) -> None:
        """Do nothing."""


def make_model(shape: dict, device: str = "cpu"):
    """Make a Llama of this shape with random weights in bfloat16, on the device at once."""
    config = LlamaConfig(**shape, pad_token_id=0, dtype=torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return prepare(model.eval())


def make_draft(model, *_):
    """Make the draft that goes with a target, big or small."""
    return make_model(DRAFT if model.config.vocab_size == BIG["vocab_size"] else SMALL)


def collect_answers(model, tokenizer, prompts: list, *, steps: int, out: Path, work=None,
                    texts: Texts) -> None:
    """Answer a whole batch of prompts. At the last of its tokens the cache is largest."""
    prompts = [prompt + answer[:-2] for prompt, answer in texts.make(training.TOKENS)[:64]]
    training.answer_all(model, {2}, prompts, 2)


def learn_online(model, tokenizer, prompts: list, *, steps: int, out: Path, work=None,
                 every: int = 2, texts: Texts) -> None:
    """Make the steps of `online.Learner`, where every third token was a failure."""
    learner = online.Learner(CachedLM(model), CachedLM(make_draft(model)), "forward-kl", 1e-4)
    d = model.config.hidden_size
    for _ in range(steps):
        learner.kept = [(p + a, {i: torch.zeros(d).to(model.lm_head.weight)
                                 for i in range(len(p), len(p + a), 3)})
                        for p, a in texts.make(every)]
        learner.learn()


def distil(model, tokenizer, prompts: list, *, steps: int, out: Path, work=None, layers: int = 4,
           batch: int = 2) -> None:
    """Distil a draft out of some of the layers."""
    train.distil_on(model, tokenizer, prompts, SimpleNamespace(
        layers=[*range(layers)], batch=batch, steps=steps, lr=1e-3, out=out, work=None,
        max_new_tokens=2))


def train_cllm(model, tokenizer, prompts: list, *, steps: int, out: Path, work=None, texts: Texts,
               batch: int = 8, **options) -> None:
    """Train a consistency model on trajectories of blocks that become right token by token."""
    n, examples = 16, []
    for prompt, answer in texts.make(batch + 2):
        text, blocks = prompt + answer, []
        for start in range(len(prompt) - 1, len(text) - n, n):
            y = text[start:start + n]
            blocks.append((start, [y[:i] + [2] * (n - i) for i in range(2, n)] + [y]))
        examples.append({"prompt": prompt, "answer": answer, "blocks": blocks})
    with patch.object(cllm, "read_examples", lambda *_: (n, examples[2:], examples[:2])):
        cllm.train(model, tokenizer, data=None, out=out, lr=1e-4, steps=steps, batch=batch,
                   **options)


COMMANDS = {"answers": collect_answers, "medusa": medusa.train, "eagle": eagle.train,
            "eagle3": eagle3.train, "bita": bita.train, "pass": masks.train, "space": masks.tune,
            "layerskip": layerskip.tune, "exit": early_exit.train, "cllm": train_cllm,
            "distil": distil, "boost": online.boost, "online": learn_online}
SMALLER = "--batch 4 --accumulate 4 --recompute"
# The name of a training, its command, and the options with which it fits 24 GB, or None where it
# cannot: the weights of the target, what is trained and AdamW's moments take more by themselves
ROWS = [("Collecting answers", "answers", ""), ("Medusa", "medusa", ""),
        ("Hydra", "medusa --heads hydra", "--K 3"),
        ("EAGLE", "eagle", "--batch 2 --accumulate 8"),
        ("EAGLE-3", "eagle3", "--batch 1 --accumulate 16 --mlp 4096 --vocab 8000"),
        ("BiTA", "bita", SMALLER), ("PaSS", "pass", SMALLER),
        ("SPACE", "space", SMALLER), ("LayerSkip", "layerskip", SMALLER), ("exit", "exit", ""),
        ("CLLM, low rank", "cllm --rank 16", SMALLER), ("distil, 4 layers", "distil", None),
        ("boost, draft of 1B", "boost", None), ("online, draft of 1B", "online", None)]

CHECKED = ["medusa", "medusa --heads hydra", "eagle", "eagle3", "bita --recompute", "pass", "space",
           "layerskip --accumulate 2", "layerskip --recompute", "exit", "cllm --batch 2",
           "cllm --rank 4 --batch 2", "boost --batch 4", "online"]


def read_options(line: str) -> tuple[str, dict, dict]:
    """Read `name --option value --switch`.

    returns  the name, which is one of COMMANDS, the command's own options, and those of Settings
    raises   InputError for another name, for an option that the command does not have, and for a
             value of another type
    """
    name, *words = line.split() or [""]
    if name not in COMMANDS:
        raise InputError(f"expected a training, one of {', '.join(COMMANDS)}, got {name!r}")
    options = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            value = words[i + 1] if i + 1 < len(words) else "--"
            options[word[2:]] = True if value[:2] == "--" else (
                int(value) if value.isdigit() else value)
    known = inspect.signature(training.Settings).parameters | inspect.signature(
        cllm.train if name == "cllm" else COMMANDS[name]).parameters
    for option, value in options.items():
        if option not in known or option == "steps":  # two steps have the memory of all
            raise InputError(f"--{option} is no option of {name}")
        kind = known[option].annotation
        training.require(type(value) is kind, option, f"of type {kind.__name__}", value)
    settings = {x: options.pop(x) for x in ("accumulate", "recompute") if x in options}
    # Gradients of earlier passes are there from the second pass on. More passes take no more.
    return name, options, settings | {"accumulate": min(2, settings.get("accumulate", 1))}


# ------------------------------------------------------------------------------------ measuring

def run_training(line: str, shape: dict, texts: Texts) -> int:
    """Run a command for two updates, on texts of one length; return how many numbers it trained.

    line     the command's name and options
    shape    of the target. The draft of the trainings that have one goes with it
    """
    name, options, settings = read_options(line)
    command, update, trained = COMMANDS[name], training.Training.update, [0]
    acceptance = eagle.measure_acceptance
    if "texts" in inspect.signature(command).parameters:
        options["texts"] = texts
    data = texts.make(64), texts.make(8 if name == "eagle3" else 32)

    def count_trained(self, loss_of) -> float:
        trained.append(sum(p.numel() for p in self.parameters.values()))
        return update(self, loss_of)
    with ExitStack() as stack:
        def replace(owner, name: str, new) -> None:
            stack.enter_context(patch.object(owner, name, new))
        for owner, function in (training.Training, "save"), (files, "write_whole"):
            replace(owner, function, lambda *_, **__: None)
        for module in (training, online, train):
            replace(module, "collect_examples", lambda *_, **__: data)
        replace(online, "draft_for", make_draft)
        # Acceptance is measured text by text, so two texts say what it needs.
        replace(eagle, "measure_acceptance", lambda draft, held_out: acceptance(
            draft, held_out[:2]))
        replace(training.Training, "update", count_trained)
        replace(training, "KEPT", 0)  # the states of this little data would be kept
        replace(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")  # bfloat16, as on a GPU
        stack.enter_context(training.use_settings(training.Settings(**settings)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command(make_model(shape), Tokenizer(), [], out=folder / "part", steps=2, **options)
    return trained[-1]


def count_by_shapes(line: str, shape: dict, texts: Texts) -> tuple[Ledger, int]:
    """Run a command on shapes; return its ledger, and how many numbers it trained."""
    functions, ledger, run_backward = Functions(), Ledger(), torch.autograd._engine_run_backward

    def run_backward_here(*args, **kwargs):
        with functions:  # which layers that are computed again need, and which torch had taken off
            return run_backward(*args, **kwargs)
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    with (patch.object(torch.autograd, "_engine_run_backward", run_backward_here),
          patch.dict(checks, {"default": lambda x: None}),  # it reads devices where no mode is
          patch.object(torch, "clear_autocast_cache", functions.casts.clear),
          functions, ledger):
        trained = run_training(line, shape, texts)
    return ledger, trained


def count_by_allocator(line: str, shape: dict, texts: Texts) -> int:
    """Run a command with numbers on this CPU; return the peak that torch's allocator reports."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        run_training(line, shape, texts)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.load(open(file.name, encoding="utf-8"))["traceEvents"]
    found = sorted((x["ts"], x["args"]["Bytes"]) for x in events if x["name"] == "[memory]")
    return max(itertools.accumulate(size for _, size in found))


def check(lines: list[str], texts: Texts = Texts(60, 40)) -> tuple[list[list[str]], bool]:
    """Compare both counts on small models, where the parts of a loss are small too.

    lines    the commands, each with its options
    texts    how long the texts are
    returns  the rows of a table, and whether the counts are within 15% of each other for every
             command
    """
    rows, worst = [["training", "by shapes, MB", "by the allocator, MB", "ratio"]], 0.0
    with (patch.object(training, "LOGITS", 2 ** 20),
          contextlib.redirect_stdout(io.StringIO())):  # what the commands themselves say
        for line in lines:
            shapes = count_by_shapes(line, SMALL, texts)[0].peak
            real = count_by_allocator(line, SMALL, texts)
            worst = max(worst, abs(shapes / real - 1))
            rows.append([line, f"{shapes / 1e6:.1f}", f"{real / 1e6:.1f}", f"{shapes / real:.3f}"])
    return rows, worst < 0.15


def make_table(texts: Texts) -> str:
    """Make the table of peaks at 8B."""
    rows = [["training", "trained numbers", "peak, GB", "on 80 GB", "options for 24 GB", "peak, GB",
             "on 24 GB"]]
    for title, line, options in ROWS:
        ledger, trained = count_by_shapes(line, BIG, texts)
        row = [title, f"{trained:,}", f"{ledger.peak / 1e9:.1f}", fits(ledger.peak, 80)]
        if options:
            ledger, _ = count_by_shapes(f"{line} {options}", BIG, texts)
        said = "none would do" if options is None else options or "as before"
        row += [said, f"{ledger.peak / 1e9:.1f}", fits(ledger.peak, 24)]
        print(" | ".join(row), file=sys.stderr, flush=True)
        rows.append(row)
    return table(rows)


def fits(peak: int, gigabytes: int) -> str:
    """Say whether a peak leaves enough of a GPU free."""
    return "yes" if peak + SPARE <= gigabytes * 1e9 else "no"


def main() -> int:
    """Print the table, the places of one training's peak, or the check; return the exit status."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("training", nargs="?", help="one of " + ", ".join(COMMANDS) + ", with its options")
    add("--prompt", type=int, default=312, help="tokens of each prompt")
    add("--answer", type=int, default=200, help="tokens of each answer")
    add("--check", action="store_true", help="compare with this CPU's allocator")
    args = parser.parse_args()
    for option in "prompt", "answer":
        training.require(vars(args)[option] >= 1, option, "1 or more", vars(args)[option])
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if args.check:
        rows, right = check([args.training] if args.training else CHECKED)
        print(table(rows))
        return 0 if right else 1
    texts = Texts(args.prompt, args.answer)
    with contextlib.redirect_stdout(io.StringIO()):  # what the commands themselves say
        if not args.training:
            said = make_table(texts)
        else:
            ledger, trained = count_by_shapes(args.training, BIG, texts)
            said = f"{trained:,} trained numbers, peak {ledger.peak / 1e9:.2f} GB, made of\n"
            for place, size in ledger.at_peak.most_common(12):
                said += f"{size / 1e9:8.2f} GB  {place}\n"
    print(said)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
