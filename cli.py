"""The command line of the method files. A method's own options are its keyword arguments; --help
prints its docstring, which explains them. Text goes to stdout, figures and mistakes to stderr."""
import itertools
import signal
import sys
import time
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, RawDescriptionHelpFormatter
from contextlib import suppress
from inspect import Parameter, getdoc, signature
from pathlib import Path

from transformers.utils import logging

from common import (CachedLM, InputError, Sampler, autoregressive, context_length, encode, eos_ids,
                    load, until)
from models.tasks import read_prompts

MODELS = Path(__file__).resolve().parent / "models"


class Run:
    """What one method did: outputs, seconds, a log, and its models (target, draft, draft 2, …)."""
    def __init__(self, method, models: dict[str, CachedLM], options: dict, eos: set[int]):
        self.method, self.models, self.options, self.eos = method, models, options, eos
        self.prompts, self.outputs, self.log, self.tokens, self.seconds = [], [], [], 0, 0

    def chunks(self, prompt: list[int], limit: int, sample: Sampler):
        """The final chunks for one more prompt; what the caller does between them is not timed."""
        self.prompts, self.outputs = self.prompts + [prompt], self.outputs + [[]]
        chunks = until(self.method(*list(self.models.values())[:2], prompt=prompt, sample=sample,
                                   log=self.log, **self.options), limit, self.eos, self.log)
        began = time.perf_counter()
        for chunk in chunks:
            self.seconds += time.perf_counter() - began
            self.outputs[-1] += chunk
            self.tokens += len(chunk)
            yield chunk
            began = time.perf_counter()

    def __str__(self) -> str:
        n, t, calls = self.tokens, self.seconds, self.models["target"].calls
        spent = [f"{x} {(lm.seconds + lm.prompt_seconds) / t:.0%}" for x, lm in self.models.items()]
        return (f"{self.method.__name__}: {n} tokens in {t:.2f} s ({n / t:.1f} tokens/s), {calls} "
                f"target calls ({n / calls:.2f} tokens per call); of the time {', '.join(spent)}")

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


def stream(chunks, tokenizer, colour: bool, log: list) -> None:
    """Print chunks as text as they come; with `colour` guessed tokens are green."""
    ids, shown, text = [], 0, ""
    for chunk in chunks:
        for i, token in enumerate(chunk):
            ids.append(token)
            before, after = tokenizer.batch_decode([ids[:shown], ids], skip_special_tokens=True)
            text = after[len(before):]
            if not after.endswith("\N{REPLACEMENT CHARACTER}"):  # a character still incomplete
                green = colour and text and i < len(chunk) - 1
                print(f"\033[32m{text}\033[0m" if green else text, end="", flush=True)
                ids, shown, text = ids[shown:], len(ids) - shown, ""
    print(text, flush=True)  # the half of a character that the limit cut in two


def options_of(function) -> dict[str, tuple[type, object]]:
    """{name: (type, default)} of the keyword arguments that a command line can give."""
    return {x: (p.annotation, p.default) for x, p in signature(function).parameters.items()
            if p.kind is p.KEYWORD_ONLY and p.annotation in (bool, int, float, str, Path)}


def parse(functions: list, argv: list[str], target: str | bool):
    """Options, the functions' own only where given; `target`: default of methods, not commands."""
    parser = ArgumentParser(description=sys.modules[functions[0].__module__].__doc__,
                            formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False,
                            usage=SUPPRESS, conflict_handler="resolve")  # methods share options
    add = parser.add_argument
    add("--target", default=str(MODELS / (target or "target")), help="model directory or hub id")
    add("--device", help="cpu, cuda, cuda:N or auto (default: cuda if there is one)")
    add("--dtype", default=None if target else "float32", help="float32, bfloat16 or float16")
    if target or "prompts" in signature(functions[0]).parameters:
        add("--prompts", type=read_prompts, default=f"{MODELS}/examples.jsonl", help="a file")
        add("--chat", action="store_true", help="put prompts into the model's chat template")
    if target:
        add("--draft", action="append", help="a small model with its tokenizer; repeatable")
        add("--prompt", action="append", help="a text, or - for standard input; repeatable")
        add("--max-new-tokens", type=int, default=256, help="at most; 256 (default)")
        add("--temperature", type=float, default=0.0, help="0 (default): greedy")
        add("--top-k", type=int, default=0, help="draw from the k likeliest; 0 (default): from all")
        add("--top-p", type=float, default=1.0, help="draw from the likeliest of this mass")
        add("--seed", type=int, default=0)
        add("--graphs", action="store_true", help="passes of few widths, on a GPU as CUDA graphs")
        add("--show", nargs="?", const="always", default="auto",
            choices=["auto", "always", "never"], help="colour guessed tokens (auto: on a terminal)")
        add("--compare", action="store_true", help="also decode token by token, and compare")
        add("--tune", action="store_true", help="search the fastest options for these prompts")
        add("--method", default=functions[0].__name__, choices=[f.__name__ for f in functions])
    for f in functions:
        shown = (x if y is Parameter.empty else f"{x}={y!r}" for x, (_, y) in options_of(f).items())
        group = parser.add_argument_group(f"{f.__name__}({', '.join(shown)})", getdoc(f))
        for name, (kind, default) in options_of(f).items():
            how = {"action": BooleanOptionalAction} if kind is bool else {"type": kind}
            group.add_argument(f"--{name.replace('_', '-')}", default=SUPPRESS,
                               required=default is Parameter.empty, **how)
    return parser.parse_args(argv)


def tune(decoded, method, options: dict, ranges: dict) -> None:
    """Search one option after the other by clock time, the best of three: Ouroboros, App. B."""
    decoded(method, options)  # they can be used; and a first run is a slow one
    for name in [name for name in ranges if name in options_of(method)]:
        speeds = {}
        for value in ranges[name]:
            with suppress(InputError):  # a value that does not go with the other options
                runs = [decoded(method, options | {name: value}) for _ in range(3)]
                speeds[value] = max(run.tokens / run.seconds for run in runs)
                print(f"--{name} {value}: {speeds[value]:.1f} tokens/s", flush=True)
        options[name] = max(speeds, key=speeds.get, default=options.get(name))
    print("fastest:", *(f"--{name} {options[name]}" for name in ranges if name in options))


def perform(methods: list, report, argv: list[str], *, lossy=(), viewers={}, shared={}, ranges={},
            target="target", commands=()) -> int:
    """Train, tune or decode with one of `methods`, the first the default; report(run): figures."""
    command = next((f for f in commands if argv[:1] == [f.__name__]), None)
    args = parse([command] if command else methods, argv[bool(command):], not command and target)
    method = command or next(f for f in methods if f.__name__ == args.method)
    options = {x: vars(args)[x] for f in [method, *methods] for x in options_of(f) if x in args}
    if others := options.keys() - options_of(method).keys():
        raise InputError(f"expected options of {method.__name__}, got {', '.join(others)}")
    one, *more = not command and args.draft or [f"{MODELS}/draft"]
    if more and "more_drafts" not in signature(method).parameters:
        raise InputError(f"expected one draft for {method.__name__}, got {1 + len(more)}")
    dirs = {"target": args.target, "draft": one} | {f"draft {i}": x for i, x in enumerate(more, 2)}
    loaded = {x: load(at, args.device, args.dtype, getattr(args, "graphs", False))
              for x, at in dirs.items() if x == "target" or "draft" in signature(method).parameters}
    model, tokenizer = loaded["target"]
    if any(other.get_vocab() != tokenizer.get_vocab() for _, other in loaded.values()):
        raise InputError("expected a draft with the target's tokenizer, got another vocabulary")
    texts = getattr(args, "prompt", None) or getattr(args, "prompts", [])
    texts = [sys.stdin.read() if text == "-" else text for text in texts]
    prompts = [encode(tokenizer, text.encode().decode(), args.chat) for text in texts]
    if command:
        return command(model, tokenizer, *([prompts] if prompts else []), **options) or 0
    longest, new, eos = max(map(len, prompts)), args.max_new_tokens, eos_ids(model, tokenizer)
    if longest >= (context := min(context_length(lm) for lm, _ in loaded.values())) or new < 1:
        raise InputError(f"expected prompts shorter than the context of {context} tokens and 1 new "
                         f"token or more, got {longest} and {new}")
    def decoded(method, options: dict, show=None) -> Run:  # all prompts, with fresh caches
        takes, size = signature(method).parameters, (longest + new, len(tokenizer), args.graphs)
        lms = {x: CachedLM(loaded[x][0], *size) for x in loaded if "draft" in takes or x in takes}
        own = {x: f() for x, f in shared.items()} | {"eos": eos, "more_drafts": [*lms.values()][2:]}
        run = Run(method, lms, {x: y for x, y in own.items() if x in takes} | options, eos)
        try:
            for text, prompt in zip(texts, prompts):
                sample = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
                chunks = run.chunks(prompt, min(new, context - len(prompt)), sample)
                chunks = itertools.chain([next(chunks)], chunks)  # checks options before it prints
                if show and len(prompts) > 1:
                    print(text, file=sys.stderr, flush=True)
                show(chunks, tokenizer, colour, run.log) if show else list(chunks)
        finally:  # also after Ctrl-C
            if show and run.tokens:
                print(f"{run}\n{report(run)}", file=sys.stderr)
        return run
    if args.tune:
        return tune(decoded, method, options, ranges) or 0
    colour = args.show == "always" or args.show == "auto" and sys.stdout.isatty()
    run = decoded(method, options, args.show == "always" and viewers.get(method) or stream)
    if not args.compare:
        return 0
    ar, exact = decoded(autoregressive, {}), args.temperature == 0 and method not in lossy
    figures, found = str(ar), run.difference(ar) if exact else "outputs may differ"
    print(f"{figures}\nspeed-up {run.tokens / run.seconds * ar.seconds / ar.tokens:.2f}x; "
          f"{found or 'output equals autoregressive output'}", file=sys.stderr)
    return int(exact and found != "" and model.dtype.itemsize == 4)


def main(methods: list, report, argv: list[str] | None = None, **special) -> int:
    """Exit status: 0, 1 (--compare found a difference), 2 (wrong input) or 130 (interrupted)."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    signal.signal(getattr(signal, "SIGPIPE", signal.SIGTERM), signal.SIG_DFL)  # for `| head`
    try:
        return perform(methods, report, sys.argv[1:] if argv is None else argv, **special)
    except (InputError, OSError, UnicodeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise  # our mistake, not the caller's
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
