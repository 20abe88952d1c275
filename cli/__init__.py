"""The command line of the method files. A method's own options are its keyword arguments; --help
prints its docstring, which explains them. Text goes to stdout, figures and mistakes to stderr."""
import itertools
import signal
import sys
import time
from argparse import (SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace,
                      RawDescriptionHelpFormatter)
from contextlib import contextmanager, suppress
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Callable, Iterator

from transformers.utils import logging

from cli.loading import encode_prompts, load_checked
from cli.text import Parser, cut_message, read_texts, set_encodings, stream
from common import (CachedLM, InputError, Sampler, autoregressive, context_length, eos_ids, prepare,
                    until, vocab_size)
from models.tasks import read_prompts

MODELS = Path(__file__).resolve().parent.parent / "models"


# ------------------------------------------------------------------------- what a method did

class Run:
    """What one method did: outputs, seconds, a log, and its models (target, draft, draft 2, …).
    `seconds` are those of decoding: what is prepared once, for all prompts, is `setup`."""

    def __init__(self, method, models: dict[str, CachedLM], options: dict, eos: set[int]):
        self.method = method
        self.models = models
        self.options = options
        self.eos = eos
        self.prompts, self.outputs, self.log = [], [], []
        self.tokens = 0
        self.seconds, self.setup = 0.0, 0.0

    def chunks(self, prompt: list[int], limit: int, sample: Sampler) -> Iterator[list[int]]:
        """The final chunks for one more prompt; what the caller does between them is not timed."""
        self.prompts.append(prompt)
        self.outputs.append([])
        models = list(self.models.values())[:2]
        chunks = self.method(*models, prompt=prompt, sample=sample, log=self.log, **self.options)
        chunks = until(chunks, limit, self.eos, self.log)
        began, prepared = time.perf_counter(), self.prepared()
        for chunk in chunks:
            setup = self.prepared() - prepared
            self.setup += setup
            self.seconds += time.perf_counter() - began - setup
            self.outputs[-1] += chunk
            self.tokens += len(chunk)
            yield chunk
            began, prepared = time.perf_counter(), self.prepared()

    def prepared(self) -> float:
        return sum(lm.setup_seconds for lm in self.models.values())

    def __str__(self) -> str:
        n, t, calls = self.tokens, self.seconds, self.models["target"].calls
        spent = [f"{x} {(lm.seconds + lm.prompt_seconds) / t:.0%}" for x, lm in self.models.items()]
        setup = f"; set-up {self.setup:.1f} s" if self.setup else ""
        return (f"{self.method.__name__}: {n} tokens in {t:.2f} s ({n / t:.1f} tokens/s), {calls} "
                f"target calls ({n / calls:.2f} tokens per call); of the time {', '.join(spent)}"
                f"{setup}")

    def difference(self, ar: "Run") -> str:
        """Where an output first differs from that of autoregressive decoding; "" if none does."""
        for prompt, ours, theirs in zip(self.prompts, self.outputs, ar.outputs):
            if ours != theirs:
                n = next(i for i, (a, b) in enumerate(zip(ours + [-1], theirs + [-1])) if a != b)
                *context, root = prompt + theirs[:n]
                ar.models["target"].start(context)
                first, second = ar.models["target"].forward([root]).topk(2).values[0].tolist()
                return f"output differs at token {n + 1}: largest logits {first:.5g}, {second:.5g}"
        return ""


# ------------------------------------------------------------------------------- the options

def options_of(function) -> dict[str, tuple[type, object]]:
    """{name: (type, default)} of the keyword arguments that a command line can give."""
    return {x: (p.annotation, p.default) for x, p in signature(function).parameters.items()
            if p.kind is p.KEYWORD_ONLY and p.annotation in (bool, int, float, str, Path)}


def new_parser(functions: list) -> ArgumentParser:
    """It explains itself by the docstring of the functions' file; they may share options."""
    return Parser(description=sys.modules[functions[0].__module__].__doc__,
                  formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False,
                  usage=SUPPRESS, conflict_handler="resolve")


def add_model_options(parser: ArgumentParser, target: str, dtype: str | None) -> None:
    add = parser.add_argument
    add("--target", default=str(MODELS / target), help="model directory or hub id")
    add("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--dtype", default=dtype, help="float32, bfloat16 or float16")


def add_prompt_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=read_prompts, default=f"{MODELS}/examples.jsonl", help="a file")
    add("--chat", action="store_true", help="put prompts into the model's chat template")


def add_decoding_options(parser: ArgumentParser, methods: list) -> None:
    add = parser.add_argument
    add("--draft", action="append", help="a small model with its tokenizer; repeatable")
    add("--prompt", action="append", help="a text, or - for standard input; repeatable")
    add("--max-new-tokens", type=int, default=256, help="at most; 256 (default)")
    add("--temperature", type=float, default=0.0, help="0 (default): greedy")
    add("--top-k", type=int, default=0, help="draw from the k likeliest; 0 (default): from all")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest of this mass")
    add("--seed", type=int, default=0)
    add("--graphs", action="store_true", help="passes of few widths, on a GPU as CUDA graphs")
    add("--show", nargs="?", const="always", default="auto", choices=["auto", "always", "never"],
        help="colour guessed tokens (auto: on a terminal)")
    add("--compare", action="store_true", help="also decode token by token, and compare")
    add("--trace", type=Path, metavar="FILE.html", help="a page that steps through every call")
    add("--tune", action="store_true", help="search the fastest options for these prompts")
    add("--method", default=methods[0].__name__, choices=[f.__name__ for f in methods])


def add_own_options(parser: ArgumentParser, function) -> None:
    """Those of a method or command; absent from what is parsed where they are not given."""
    options = options_of(function)
    shown = (x if y is Parameter.empty else f"{x}={y!r}" for x, (_, y) in options.items())
    group = parser.add_argument_group(f"{function.__name__}({', '.join(shown)})", getdoc(function))
    for name, (kind, default) in options.items():
        how = {"action": BooleanOptionalAction} if kind is bool else {"type": kind}
        group.add_argument(f"--{name.replace('_', '-')}", default=SUPPRESS,
                           required=default is Parameter.empty, **how)


def parse_command(command, argv: list[str]) -> Namespace:
    parser = new_parser([command])
    add_model_options(parser, "target", "float32")
    if "prompts" in signature(command).parameters:
        add_prompt_options(parser)
    add_own_options(parser, command)
    return parser.parse_args(argv)


def parse_decoding(methods: list, target: str, argv: list[str]) -> Namespace:
    parser = new_parser(methods)
    add_model_options(parser, target, None)
    add_prompt_options(parser)
    add_decoding_options(parser, methods)
    for method in methods:
        add_own_options(parser, method)
    return parser.parse_args(argv)


def given(args: Namespace, function, others: list) -> dict:
    """The function's own options that were given; InputError for one of `others` alone."""
    names = {x for f in [function, *others] for x in options_of(f) if x in args}
    if wrong := names - options_of(function).keys():
        raise InputError(f"expected options of {function.__name__}, got {', '.join(sorted(wrong))}")
    return {x: vars(args)[x] for x in names}


# -------------------------------------------------------------------------------- the models

def load_model(path: str, args: Namespace) -> tuple:
    """Load a model and its tokenizer as the options say; the first user of a GPU is told of it."""
    model, tokenizer = load_checked(path, args.device, args.dtype)
    if model.device.type != "cpu":
        print(f"{path} on {model.device} in {str(model.dtype).removeprefix('torch.')}",
              file=sys.stderr)
    return model, tokenizer


def load_models(args: Namespace, method) -> dict[str, tuple]:
    """{target, draft, draft 2, …: (model, tokenizer)}, as many drafts as the method takes."""
    takes, drafts = signature(method).parameters, args.draft
    if drafts and "draft" not in takes:
        raise InputError(f"expected no draft for {method.__name__}, got {drafts[0]!r}")
    drafts = drafts or [f"{MODELS}/draft"]
    if len(drafts) > 1 and "more_drafts" not in takes:
        raise InputError(f"expected one draft for {method.__name__}, got {len(drafts)}")
    models = {"target": load_model(args.target, args)}
    for i, path in enumerate(drafts if "draft" in takes else [], 1):
        models["draft" if i == 1 else f"draft {i}"] = load_model(path, args)
    vocabulary = models["target"][1].get_vocab()
    if any(tokenizer.get_vocab() != vocabulary for _, tokenizer in models.values()):
        raise InputError("expected a draft with the target's tokenizer, got another vocabulary")
    sizes = [vocab_size(*pair) for pair in models.values()]
    if len({*sizes}) > 1:
        raise InputError(f"expected a draft with logits of the target's {sizes[0]} tokens, got "
                         f"{min(sizes[1:])}")
    return models


# ---------------------------------------------------------------------------------- decoding

class Session:
    """What a command line decodes: loaded models, prompts, and how. `shared`: {name: what makes an
    object that all prompts of a run have in common}."""

    def __init__(self, args: Namespace, method, report: Callable, shared: dict):
        self.args = args
        self.report = report
        self.shared = shared
        self.trace = None
        models = load_models(args, method)
        self.tokenizer = models["target"][1]
        self.models = {name: model for name, (model, _) in models.items()}
        self.run_as = self.graphed() if args.graphs else CachedLM
        self.texts = read_texts(args.prompt) if args.prompt else args.prompts
        self.prompts = encode_prompts([*self.models.values()], self.tokenizer, self.texts,
                                      args.chat)
        self.eos = eos_ids(self.models["target"], self.tokenizer)
        self.context = min(map(context_length, self.models.values()))
        longest = max(map(len, self.prompts))
        if longest >= self.context or args.max_new_tokens < 1:
            raise InputError(f"expected prompts shorter than the context of {self.context} tokens "
                             f"and 1 new token or more, got {longest} and {args.max_new_tokens}")

    def check(self, options: dict) -> None:
        """Numbers that no text has room for would take all memory, or all day."""
        for name, value in options.items():
            if isinstance(value, int) and value > self.context:
                raise InputError(f"expected {name} of at most the context of {self.context} "
                                 f"tokens, got {value}")

    def graphed(self) -> type[CachedLM]:
        """Checks the models once more, by what a replay gives."""
        from cli.graphs import GraphedLM
        for model in self.models.values():
            prepare(model, GraphedLM)
        return GraphedLM

    def run_of(self, method, options: dict) -> Run:
        """With fresh caches, of the models that the method takes."""
        takes = signature(method).parameters
        vocab = vocab_size(self.models["target"], self.tokenizer)
        lms = {x: self.run_as(model, vocab) for x, model in self.models.items()
               if x in takes or "draft" in takes}
        own = {name: make() for name, make in self.shared.items()}
        own["eos"] = self.eos
        own["more_drafts"] = list(lms.values())[2:]
        return Run(method, lms, {x: y for x, y in own.items() if x in takes} | options, self.eos)

    def decode(self, method, options: dict, show: Callable | None = None) -> Run:
        """All prompts; show(chunks, tokenizer, colour, log) prints each answer."""
        args = self.args
        colour = args.show == "always" or args.show == "auto" and sys.stdout.isatty()
        run = self.run_of(method, options)
        try:
            for text, prompt in zip(self.texts, self.prompts):
                sample = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
                limit = min(args.max_new_tokens, self.context - len(prompt))
                chunks = run.chunks(prompt, limit, sample)
                if self.trace:
                    chunks = self.trace.watch(run, prompt, chunks)
                chunks = itertools.chain([next(chunks)], chunks)  # checks options before it prints
                if show and len(self.prompts) > 1:
                    print(text, file=sys.stderr, flush=True)
                show(chunks, self.tokenizer, colour, run.log) if show else list(chunks)
        finally:  # also after Ctrl-C
            if show and run.tokens:
                print(f"{run}\n{self.report(run)}", file=sys.stderr)
        return run


def compare(session: Session, run: Run, lossy) -> int:
    """Decode token by token too; 1 where a lossless method's greedy output differs in float32."""
    ar = session.decode(autoregressive, {})
    figures = str(ar)  # before more calls are made
    exact = session.args.temperature == 0 and run.method not in lossy
    found = run.difference(ar) if exact else "outputs may differ"
    print(f"{figures}\nspeed-up {run.tokens / run.seconds * ar.seconds / ar.tokens:.2f}x; "
          f"{found or 'output equals autoregressive output'}", file=sys.stderr)
    return int(exact and found != "" and session.models["target"].dtype.itemsize == 4)


def tune(session: Session, method, options: dict, ranges: dict) -> None:
    """Search one option after the other by clock time, the best of three: Ouroboros, App. B."""
    session.decode(method, options)  # they can be used; and a first run is a slow one
    for name in [name for name in ranges if name in options_of(method)]:
        speeds = {}
        for value in ranges[name]:
            with suppress(InputError):  # a value that does not go with the other options
                runs = [session.decode(method, options | {name: value}) for _ in range(3)]
                speeds[value] = max(run.tokens / run.seconds for run in runs)
                print(f"--{name} {value}: {speeds[value]:.1f} tokens/s", flush=True)
        options[name] = max(speeds, key=speeds.get, default=options.get(name))
    print("fastest:", *(f"--{name} {options[name]}" for name in ranges if name in options))


@contextmanager
def traced(session: Session) -> Iterator[None]:
    """With --trace: keep what is decoded, and write its page, also after Ctrl-C."""
    path = session.args.trace
    if path is None:
        yield
        return
    from cli.trace import Trace, page
    session.trace = Trace()
    try:
        yield
    finally:
        shown = page(session.trace.runs, session.tokenizer)
        path.write_text(shown, encoding="utf-8")
        print(f"trace: {path.resolve()}", file=sys.stderr)


# ---------------------------------------------------------------------------------- the steps

def perform_command(command, argv: list[str]) -> int:
    """Train, collect, measure: command(model, tokenizer, prompts if it takes them, **options)."""
    args = parse_command(command, argv)
    options = given(args, command, [])
    model, tokenizer = load_model(args.target, args)
    if "prompts" in args:
        options["prompts"] = encode_prompts([model], tokenizer, args.prompts, args.chat)
    return command(model, tokenizer, **options) or 0


def perform(methods: list, report, argv: list[str], *, lossy=(), viewers={}, shared={}, ranges={},
            target="target", commands=()) -> int:
    """Run a command, or tune or decode with one of `methods`, the first the default."""
    for command in commands:
        if argv[:1] == [command.__name__]:
            return perform_command(command, argv[1:])
    args = parse_decoding(methods, target, argv)
    method = next(f for f in methods if f.__name__ == args.method)
    if args.trace:
        args.trace.open("ab").close()  # it can be written, before anything is decoded
    options = given(args, method, methods)
    session = Session(args, method, report, shared)
    session.check(options)
    if args.tune:
        tune(session, method, options, ranges)
        return 0
    show = viewers.get(method, stream) if args.show == "always" else stream
    with traced(session):
        run = session.decode(method, options, show)
        return compare(session, run, lossy) if args.compare else 0


def main(methods: list, report, argv: list[str] | None = None, **special) -> int:
    """Exit status: 0, 1 (--compare found a difference), 2 (wrong input) or 130 (interrupted)."""
    set_encodings()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    signal.signal(getattr(signal, "SIGPIPE", signal.SIGTERM), signal.SIG_DFL)  # for `| head`
    try:
        return perform(methods, report, sys.argv[1:] if argv is None else argv, **special)
    except (InputError, OSError, UnicodeError, RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise  # our mistake, not the caller's
        said = cut_message(str(error)) or "out of memory"
        print(f"{Path(sys.argv[0]).name}: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
