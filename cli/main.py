"""This file does what the command line of a method file says: load, decode, print, compare, tune.

A method file tells in its COMMAND_LINE what it has, and `main` of commands.py is given that table.
Every script ends in `run_script`, so that all of them end alike. Text goes to stdout. Figures and
messages go to stderr.

Read this file from its end. There `perform` does what a command line says. These do the work:

    parse_decoding   makes options of the methods' keyword arguments, and parses them (options.py)
    Session          loads the models that the method takes, and encodes the prompts (prompts.py)
    Session.decode   gives each prompt to the method, in one Run (run.py)
    stream           prints the chunks as text while they come (text.py)
"""
import io
import itertools
import os
import signal
import sys
from argparse import ArgumentTypeError, Namespace
from contextlib import suppress
from functools import partial
from inspect import signature
from logging import getLogger
from pathlib import Path
from typing import Callable, Iterable, Iterator, NamedTuple

from safetensors import SafetensorError
from transformers.utils import logging

from cli.options import MODELS, make_sampler, parse_decoding, read_options, select_options
from cli.prompts import encode_prompts, read_texts
from cli.run import Run, count_guesses, kind_for
from cli.text import MOST, stream
from cli.trace import make_page, watch
from cli.trajectory import show_trajectory
from common import InputError, autoregressive, context_length, eos_ids
from support.engine import EngineLM, require, vocab_size
from support.files import check_result, explain_errors, shorten, write_text
from support.graphs import GraphedLM
from support.invariant import make_invariant
from support.loading import check, load_checked
from support.packed import pack
from support.recurrent import has_states


class Table(NamedTuple):
    """Hold what the COMMAND_LINE of a method file says.

    methods   the file's methods. The first one is the default
    report    a function that says in a line what a run did
    lossy     methods, and names of options, with which the output may differ from autoregressive
              text, so --compare only warns
    shared    for an argument of methods, the function that makes what all prompts of a run share
    ranges    for an option, the values that --tune tries
    target    the default target, a folder of models/
    commands  functions that train, collect or measure, which --help names (commands.py)
    graphs    whether the methods can run by CUDA graphs
    """
    methods: list
    report: Callable = count_guesses
    lossy: Iterable = ()
    shared: dict[str, Callable] = {}
    ranges: dict[str, list] = {}
    target: str = "target"
    commands: tuple = ()
    graphs: bool = True


# -------------------------------------------------------------------------------- the models

def load_models(args: Namespace, method) -> dict[str, tuple]:
    """Load the target and as many drafts as the method takes.

    returns  a model and its tokenizer for each of the names "target", "draft", "draft 2", ….
             InputError for drafts that the method or the target cannot use
    """
    takes, given = signature(method).parameters, args.draft or []
    if given and "draft" not in takes:
        raise InputError(f"--draft is no option of {method.__name__}, got {given[0]!r}")
    require(len(given) < 2 or "more_drafts" in takes, "draft",
            f"given once for {method.__name__}", len(given))
    usual = [f"{MODELS}/draft"] if "draft" in takes else []
    paths = [args.target, *(given or usual)]
    names = ["target", "draft", *(f"draft {n}" for n in range(2, len(paths)))]
    models = {name: load_checked(path, args.device, args.dtype) for name, path in zip(names, paths)}
    vocabularies = [tokenizer.get_vocab() for _, tokenizer in models.values()]
    if "tokenizers" not in takes and any(x != vocabularies[0] for x in vocabularies):
        raise InputError("expected a draft with the target's tokenizer, got another vocabulary; "
                         "survey/another_tokenizer.py takes it")
    return models


# ---------------------------------------------------------------------------------- decoding

class Session:
    """Hold the loaded models and prompts of a command line, and run methods on them.

    args    the parsed command line
    method  the method that is asked for, which decides how many drafts are loaded
    table   the COMMAND_LINE of the method's file

    models      by the names "target", "draft", "draft 2", …, and so the tokenizers
    run_as      the kind of CachedLM that models run as
    traced      the records of all runs, which stay empty without --trace
    """

    def __init__(self, args: Namespace, method, table: Table):
        self.args = args
        self.table = table
        self.traced = []
        require(args.max_new_tokens > 0, "max_new_tokens", "1 or more", args.max_new_tokens)
        with explain_errors("options to sample with", "--temperature, --top-k, --top-p, --min-p"):
            make_sampler(args)  # transformers checks them
        self.talks = args.chat is not None and not (args.prompt or args.prompts)
        require(not (self.talks and (args.compare or args.tune)), "prompt",
                "given with --chat and --compare or --tune", "a conversation")
        models = load_models(args, method)
        self.tokenizers = {name: tokenizer for name, (_, tokenizer) in models.items()}
        self.models = {name: pack(model) if args.pack else model
                       for name, (model, _) in models.items()}
        target, tokenizer = models["target"]
        self.on_gpu = target.device.type == "cuda"
        self.run_as = EngineLM
        usual = self.on_gpu and table.graphs and not any(map(has_states, self.models.values()))
        wanted = usual if args.graphs is None else args.graphs
        if wanted:
            self.run_as = GraphedLM
            for model in self.models.values():
                check(model, partial(GraphedLM, waits=False))  # once more, by what a replay gives
        if args.invariant:
            make_invariant(target, self.run_as)
        self.texts = [] if self.talks else read_texts(args.prompt or [], args.prompts)
        self.prompts = encode_prompts(target, tokenizer, self.texts, args.chat)
        self.eos = eos_ids(target, tokenizer)
        self.context = min(map(context_length, self.models.values()))
        self.require_room(self.prompts)

    def require_room(self, prompts: list[list[int]]) -> None:
        """Raise an InputError for prompts that leave no room for an answer."""
        longest = max(map(len, prompts), default=0)
        require(longest < self.context, "prompt",
                f"shorter than the context of {self.context} tokens", longest)

    def converse(self, run: Run) -> Iterator[tuple[str, list[int]]]:
        """Yield each message that is typed, and the token ids of the conversation up to it."""
        target, tokenizer = self.models["target"], self.tokenizers["target"]
        for lm in run.models.values():
            lm.keeps = True  # so a turn costs only what is new
        said = []
        with suppress(EOFError):  # Ctrl-D ends a conversation as an empty line does
            for text in iter(lambda: input("\n> "), ""):
                prompts = encode_prompts(target, tokenizer, [text], self.args.chat, said)
                self.require_room(prompts)
                yield text, prompts[0]
                answer = tokenizer.decode(run.outputs[-1], skip_special_tokens=True)
                said += [{"role": "user", "content": text},
                         {"role": "assistant", "content": answer}]

    def start_run(self, method, options: dict) -> Run:
        """Make a run of a method, with fresh caches of the models that the method takes.

        method   a method of the file, or `autoregressive`, which takes the target only
        options  the method's own options that were given
        """
        takes = signature(method).parameters
        lms = {name: kind_for(method, self.run_as, name)(
            model, vocab_size(model, self.tokenizers[name]))
            for name, model in self.models.items() if name == "target" or "draft" in takes}
        filled = {name: make() for name, make in self.table.shared.items()}
        filled |= {"eos": self.eos, "tokenizers": [*self.tokenizers.values()],
                   "more_drafts": [*lms.values()][2:]}
        filled = {name: value for name, value in filled.items() if name in takes}
        return Run(method, lms, filled | options, self.eos)

    def answer(self, run: Run, prompt: list[int]) -> Iterator[list[int]]:
        """Yield the chunks of an answer that a run gives to a prompt, as the options say."""
        limit = min(self.args.max_new_tokens, self.context - len(prompt))
        return run.decode(prompt, limit, make_sampler(self.args))

    def decode(self, method, options: dict, show: Callable | None = None) -> Run:
        """Let a method answer all prompts.

        options  the method's own options
        show     prints an answer: show(chunks, tokenizer, colour, log). None prints nothing
        returns  the run, which has the outputs
        """
        args = self.args
        colour = args.show == "always" or (args.show == "auto" and sys.stdout.isatty())
        if args.compare and self.on_gpu:  # it loads each kernel when the kernel is first needed
            list(self.answer(self.start_run(method, options), self.prompts[0]))
        run = self.start_run(method, options)
        try:
            turns = self.converse(run) if self.talks else zip(self.texts, self.prompts)
            for text, prompt in turns:
                chunks = self.answer(run, prompt)
                if args.trace:
                    chunks = watch(self.traced, run, prompt, chunks)
                # Wrong options are refused by the first chunk, before anything is printed.
                chunks = itertools.chain([next(chunks)], chunks)
                if show and len(self.prompts) > 1:
                    print(text, file=sys.stderr, flush=True)
                if show:
                    show(chunks, self.tokenizers["target"], colour, run.log)
                else:
                    list(chunks)
        finally:  # also after Ctrl-C
            if show and run.tokens:
                print(run, file=sys.stderr)  # now: a report may make more calls
                print(self.table.report(run), file=sys.stderr)
        return run


def compare(session: Session, run: Run) -> int:
    """Decode token by token too, and print both speeds and whether the outputs are equal.

    A method that writes another model's text than the target's, such as a tuned model's, puts this
    model into the target's memo as "writer". Then this model decodes token by token.

    run      the run of the method
    returns  1 if outputs differ though model and seed determine them, in float32 or with
             --invariant, and else 0
    """
    session.models["target"] = run.models["target"].memo.get("writer", session.models["target"])
    ar = session.decode(autoregressive, {})
    # This is said now, since the search for a difference makes more calls.
    print(f"{ar}\nspeed-up {run.tokens / run.seconds * ar.seconds / ar.tokens:.2f}x; ", end="",
          file=sys.stderr)
    fixed = run.sample.sure or not run.sample.rngs  # no rule drew a coin
    exact = fixed and not {run.method, *run.options} & {*session.table.lossy}
    found = run.find_difference(ar) if exact else "outputs may differ"
    rounds = session.models["target"].dtype.itemsize < 4 and not session.args.invariant
    if exact and found and rounds:
        found += ("\ncalls of more rows round otherwise in half precision; with --invariant all "
                  "calls round alike")
    print(found or "output equals autoregressive output", file=sys.stderr)
    return int(exact and found != "" and not rounds)


def tune(session: Session, method, options: dict) -> None:
    """Search the fastest value of one option after the other, and print them (Ouroboros, App. B).

    The fastest of three runs with a value counts, since a slow one may be chance.

    options  the options to begin with, which get the values that are found
    """
    ranges = session.table.ranges
    session.decode(method, options)  # refuses wrong options, and warms up
    for name in [name for name in ranges if name in read_options(method)]:
        speeds = {}
        for value in ranges[name]:
            with suppress(InputError):  # a value that does not go with the other options
                runs = [session.decode(method, options | {name: value}) for _ in range(3)]
                speeds[value] = max(run.tokens / run.seconds for run in runs)
                print(f"--{name} {value}: {speeds[value]:.1f} tokens/s", flush=True)
        if speeds:  # else no value of this option goes with those found so far
            options[name] = max(speeds, key=speeds.get)
    print("fastest:", *(f"--{name} {options[name]}" for name in ranges if name in options))


# ---------------------------------------------------------------------------------- the steps

def perform(table: Table, argv: list[str] | None) -> int | None:
    """Do what a command line says: answer prompts with a method, or tune the method's options."""
    args = parse_decoding(table.methods, table.commands, table.target, argv)
    method = next(f for f in table.methods if f.__name__ == args.method)
    require(not (args.tune and (args.compare or args.trace)), "tune",
            "given without --compare and --trace", "one of them")
    if args.trace:
        check_result("trace", args.trace)
    options = select_options(args, method, table.methods)
    session = Session(args, method, table)
    if args.tune:
        return tune(session, method, options)
    blocks = args.show == "always" and method.__name__ == "jacobi"  # whose log has trajectories
    try:
        run = session.decode(method, options, show_trajectory if blocks else stream)
        return compare(session, run) if args.compare else 0
    finally:  # also after Ctrl-C. If nothing was decoded, an older page stays as it is
        if any(record["rounds"] for record in session.traced):
            write_text(args.trace, make_page(session.traced, session.tokenizers))
            print(f"trace: {args.trace.resolve()}", file=sys.stderr)


# The errors that wrong input may raise. A RuntimeError may say that the memory is full
MISTAKES = (InputError, ArgumentTypeError, OSError, SafetensorError, UnicodeError, RuntimeError)


def stop(number: int, _) -> None:
    """End a run as Ctrl-C ends it, which leaves a checkpoint; a second such signal is ignored."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def prepare_process() -> None:
    """Set what all of a process shares as a script needs it.

    stdout and stderr take every character then, since no print must end a run. A file or a pipe
    gets UTF-8. A terminal may read another encoding, so it keeps its own, and what this encoding
    lacks is printed as a question mark.
    """
    for out in sys.stdout, sys.stderr:
        if isinstance(out, io.TextIOWrapper):  # not what a notebook puts there
            encoding = out.encoding if out.isatty() else "utf-8"
            out.reconfigure(encoding=encoding, errors="replace")
    for name in "transformers", "huggingface_hub":  # they say much
        getLogger(name).setLevel("ERROR")
    logging.disable_progress_bar()  # here and of the hub
    signal.signal(signal.SIGTERM, stop)


def run_script(act: Callable[[], int | None]) -> int:
    """Run the main function of a script, and end as every script of the project ends.

    act      what is run. It returns the exit status, or nothing if all went well
    returns  the exit status. It is 2 for wrong input, which one line on stderr then names. It
             is 128 and the signal's number after Ctrl-C, SIGTERM and a closed pipe. Otherwise it is
             what `act` returned
    """
    prepare_process()
    try:
        status = act() or 0
        print(end="", flush=True)  # what is still to be printed may meet a closed pipe, too
        return status
    except BrokenPipeError:  # as of `| head`, which asks for no more words
        return 128 + 13  # SIGPIPE, which Windows does not have
    except MISTAKES as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise  # a mistake of this project, not of its user
        file = Path(sys.argv[0])
        name = f"python -m {file.parent.name}" if file.name == "__main__.py" else file.name
        print(f"{name}: {shorten(error, MOST)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print("\ninterrupted", file=sys.stderr)
        return 128 + (stopped.args or [signal.SIGINT])[0]
    finally:
        try:
            print(end="", flush=True)
        except OSError:  # Python would try once more when it ends, and would complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
