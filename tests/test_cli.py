"""These tests run command lines: where input and output go, right and wrong options, tuning,
commands and interruptions."""
import copy
import importlib
import io
import re
import shlex
import shutil
import signal
import sys
from argparse import ArgumentTypeError, Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from logging import getLogger
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from transformers.utils import logging

from cli.commands import RANGES, main as call_command_line
from cli.main import run_script
from cli.options import fits, read_options, read_ranges, select_options, write_option
from cli.prompts import read_prompts
from cli.run import Run
from common import CachedLM, InputError, autoregressive, greedy
from fake_models import counting
from families import tiny
from helpers import ROOT, check_refused, fork, loaded, main, script, take, tokens_of
from speculative import speculative
from support.engine import EngineLM
from support.graphs import GraphedLM
from sources import FILES, SIX, functions_of
from training import loop as training
from training.settings import Settings
from trainings import WORDLESS

PROMPTS = read_prompts(ROOT / "models/examples.jsonl")
PROMPT, SHORT, LONG = PROMPTS[1], "count the apples", "count the apples " * 1000
TARGET, DRAFT = str(ROOT / "models/target"), str(ROOT / "models/draft")
ONE, TWO = ["--prompt", SHORT], ["--prompt", SHORT, "--prompt", PROMPT]


@pytest.fixture(autouse=True)
def load_once(monkeypatch):
    monkeypatch.setattr("support.loading.load", loaded)


@pytest.fixture
def ask(capsys):
    """Give a command line to a method, which reports nothing, or to a file; return the status,
    stdout and stderr."""
    def ask(*argv, method=speculative, file=None, report=lambda run: "", **extras):
        capsys.readouterr()  # a model that was read here before shows how far it was read
        status = script(file, *argv) if file else main([method], report, [*argv], **extras)
        return status, *capsys.readouterr()
    return ask


def refusal(answer: tuple[int, str, str]) -> str:
    """Check that wrong input leaves a short line on stderr and nothing on stdout; return it."""
    status, out, err = answer
    assert status == 2 and out == "" and err.count("\n") == 1 and len(err) < 700, (out, err[:2000])
    return err


def saying(chunks: list[list[int]]):
    """Make a method that says this, whatever the prompt, for one call."""
    def said(target, prompt, *, sample=None, log=None):
        target.start(prompt[:-1])
        target.forward(prompt[-1:])
        yield from chunks
    return said


def wrong(target, prompt, *, late: int = 2, sample, log=None):
    """Decode by a method whose output is wrong after its first tokens."""
    for i, [token] in enumerate(autoregressive(target, prompt, sample=sample)):
        yield [token + (i >= late)]


# ----------------------------------------------------------------------- what goes where

def test_figures_add_up(ask, now):
    """A pass of the target takes 4 s on the clock, one of the draft 1 s, all else no time. The
    prompt's time is in the seconds and the shares, but it is no call. Only the text is on stdout.
    """
    def tick(seconds: int, *_) -> None:
        now[0] += seconds
    (big, tokenizer), (small, _) = (loaded(path, None, None) for path in (TARGET, DRAFT))
    text = tokens_of(autoregressive(CachedLM(big), tokenizer.encode(PROMPT)), 30)
    with big.register_forward_hook(partial(tick, 4)), small.register_forward_hook(partial(tick, 1)):
        status, out, err = ask("--prompt", PROMPT, "--compare", "--max-new-tokens", "30",
                               file="speculative")
    assert out == tokenizer.decode(text) + "\n" and PROMPT not in err
    calls, drafts = (int(re.search(rf"(\d+) {name} calls", err)[1]) for name in ("target", "draft"))
    target, draft = 4 * (calls + 1), drafts + 1
    t = target + draft
    assert status == 0 and (
        f"speculative: 30 tokens in {t:.2f} s ({30 / t:.1f} tokens/s), {calls} target calls "
        f"({30 / calls:.2f} tokens per call); of the time target {target / t:.0%}, "
        f"draft {draft / t:.0%}\n") in err
    assert ("autoregressive: 30 tokens in 124.00 s (0.2 tokens/s), 30 target calls "
            "(1.00 tokens per call); of the time target 100%\n") in err
    assert f"speed-up {124 / t:.2f}x; output equals autoregressive output\n" in err


def test_only_the_method_is_timed_and_no_further_than_needed(now):
    """Its set-up is told apart."""
    def slow(target, draft, prompt, *, sample=None, log=None):
        for i in range(9):
            now[0] += 2
            target.setup_seconds += 0.25
            draft.setup_seconds += 0.5
            yield [i, i]
    models = {name: SimpleNamespace(setup_seconds=0.0) for name in ("target", "draft")}
    run = Run(slow, models, {}, {3})
    for prompt, limit in ([5] * 10, 5), ([5] * 46, 4), ([5] * 5, 100):
        for _ in run.decode(prompt, limit, greedy):
            now[0] += 1000
    assert run.outputs == [[0, 0, 1, 1, 2], [0, 0, 1, 1], [0, 0, 1, 1, 2, 2, 3]]  # the last: EOS
    assert run.tokens == 16 and run.seconds == 9 * 1.25 and run.setup == 9 * 0.75


def test_show_colours_all_of_a_chunk_but_its_last_token(ask):
    """auto: on a terminal alone, and stdout is none here."""
    _, tokenizer = loaded(TARGET, None, None)
    ids = tokenizer.encode(" Tom has apples", add_special_tokens=False)
    coloured = "\033[32m Tom\033[0m\033[32m has\033[0m apples Tom\n"
    for show, text in ([], coloured), (["always"], coloured), (["auto"], None), (["never"], None):
        out = ask(*ONE, "--show", *show, "--max-new-tokens", "4", method=saying([ids, ids[:1]]))[1]
        assert out == (text or " Tom has apples Tom\n")


def test_a_viewer_prints_in_place_of_the_text_but_only_with_show_always(ask):
    """Jacobi decoding has one, which shows each prompt's trajectories and then its text."""
    def said(*argv) -> str:
        return ask(*argv, "--max-new-tokens", "9", file="jacobi")[1]
    shown = [said("--prompt", text, "--show", "always") for text in (PROMPT, SHORT)]
    assert shown[0].startswith("  0: ") and shown[0].endswith(said("--prompt", PROMPT))
    both = ["--prompt", PROMPT, "--prompt", SHORT, "--show", "always"]
    assert said(*both) == "".join(shown) and "  0: " not in said(*both, "--method", "lookahead")


def test_samples_are_those_of_the_seed_whatever_was_answered_before(ask):
    how = ["--temperature", "4", "--max-new-tokens", "5", "--top-k", "50", "--top-p", "0.95"]
    outs = [ask(*ONE, *how, "--seed", seed)[1] for seed in ("1", "1", "-7", "9" * 30)]
    assert outs[0] == outs[1] and len({*outs}) > 1
    _, out, err = ask(*ONE, *ONE, *how, "--seed", "1", "--compare")
    assert out == outs[0] + outs[0] and "outputs may differ" in err
    runs = [ask(*ONE, *ONE, *how, "--compare", *more, file=file) for file, *more in (
        ["speculative", "--coupling"], ["jacobi"])]
    assert runs[0][1] == runs[1][1]  # the text of the seed
    assert all("output equals autoregressive output" in err for _, _, err in runs)


# ---------------------------------------------------------------------------- comparing

@pytest.mark.parametrize("how, expected", [
    (["--dtype", "bfloat16"], 0), ([], 1), (["--temperature", "1"], 1),
    (["--dtype", "bfloat16", "--invariant"], 1)])
def test_compare_reports_the_first_difference(ask, how, expected, monkeypatch):
    """With the two largest scores there; in half precision near-ties are rounded, and it is no
    failure unless rows have the same bits. Without that option, --compare names it. A lossy method
    is not checked, nor is one with a lossy option."""
    changed = []
    monkeypatch.setattr("cli.main.make_invariant", lambda *given: changed.append(given))
    argv = ["--prompt", PROMPT, "--compare", "--max-new-tokens", "8"]
    status, _, err = ask(*argv, *how, method=wrong)
    assert re.search(r"output differs at token 3: largest scores [\d.e-]+, [\d.e-]+\n", err)
    assert status == expected and "autoregressive: 8 tokens" in err and "8 target calls (1." in err
    assert ("--invariant" in err) == (status == 0)
    assert changed == [(loaded(TARGET, None, "bfloat16")[0], EngineLM)] * how.count("--invariant")
    for lossy in wrong, "late":
        status, _, err = ask(*argv, "--late", "1", method=wrong, lossy=[lossy])
        assert status == 0 and "outputs may differ" in err


def test_compare_takes_the_model_whose_text_a_method_writes(ask):
    """The tuned model of LayerSkip says something else than the target."""
    how = [*ONE, "--max-new-tokens", "40"]
    plain = ask(*how, file="jacobi")[1]
    status, out, err = ask(*how, "--compare", file="survey.layerskip")
    assert status == 0 and "output equals autoregressive" in err and out != plain


def test_compare_looks_at_every_prompt_and_at_the_end(ask):
    """A second prompt's output counts, and one that stops early or goes on."""
    ar = Run(autoregressive, {"target": EngineLM(loaded(TARGET, None, None)[0])}, {}, {})
    ours = Run(autoregressive, ar.models, {}, {})
    ours.prompts, ar.outputs = [[5, 6], [5, 6]], [[7, 8], [7, 8, 9]]
    for first, second, place in ([7, 8], [7, 8], 3), ([7, 8, 9], [7, 8, 9], 3), ([7, 8], [6], 1):
        ours.outputs = [first, second]
        assert f"differs at token {place}" in ours.find_difference(ar)


# --------------------------------------------------------------------- context and memory

def test_an_answer_ends_with_the_shortest_context(ask, monkeypatch):
    """Each prompt has its own room in it, and a prompt that fills it is refused."""
    _, tokenizer = loaded(TARGET, None, None)
    short, long = (len(tokenizer.encode(text)) for text in (SHORT, PROMPT))
    for room in 5, 0:
        lengths = {loaded(TARGET, None, None)[0]: 2048, loaded(DRAFT, None, None)[0]: long + room}
        monkeypatch.setattr("cli.main.context_length", lengths.get)
        answer = ask(*TWO, "--max-new-tokens", "9" * 20, "--compare")
        if room:
            assert f"speculative: {long - short + 2 * room} tokens" in answer[2]
            assert answer[2].startswith(f"{SHORT}\n{PROMPT}\nspeculative: ")
            assert answer[0] == 0 and "equals autoregressive output" in answer[2]
    assert f"shorter than the context of {long} tokens, got {long}" in refusal(answer)


@pytest.mark.parametrize("kind", [RuntimeError, ArgumentTypeError, SafetensorError, OSError])
def test_memory_that_is_used_up_and_what_a_reader_of_a_file_raises(kind, ask, monkeypatch):
    """It is said in one line."""
    error = kind("can't allocate memory:\nyou tried 9 GiB")
    monkeypatch.setattr("support.loading.load", Mock(side_effect=error))
    assert "9 GiB" in refusal(ask(*ONE))


# --------------------------------------------------------------------- methods and options

def test_what_a_method_is_given(ask, monkeypatch):
    """A method gets models with the tokenizer's size, since embeddings are often padded beyond it.
    They are packed unless --no-pack is given. With --graphs they run as graphs, and were checked as
    such. Objects that prompts share are made anew for each run, and `eos` is passed on."""
    seen, checked, packed = [], [], []
    monkeypatch.setattr("cli.main.check", lambda *checks: checked.append(checks))
    monkeypatch.setattr("cli.main.pack", lambda model: packed.append(model) or model)

    def spy(target, draft, prompt, *, pool=None, eos=None, sample=None, log=None):
        seen.append((pool, eos, *((lm.model, lm.vocab, type(lm)) for lm in (target, draft))))
        yield from saying([[7]])(target, prompt)
    target, draft = (loaded(path, None, None)[0] for path in (TARGET, DRAFT))
    for more in [], ["--graphs", "--no-pack"]:
        assert checked == []
        assert ask(*TWO, "--max-new-tokens", "1", *more, method=spy, shared={"pool": list})[0] == 0
        assert len(packed) == 2
    assert [(model, run_as.func, run_as.keywords) for model, run_as in checked] == [
        (model, GraphedLM, {"waits": False}) for model in (target, draft)]
    assert seen[::2] == [([], {1}, (target, 1536, kind), (draft, 1536, kind))
                         for kind in (EngineLM, GraphedLM)]
    pools = [pool for pool, *_ in seen]
    assert pools[0] is pools[1] and pools[2] is pools[3] is not pools[0]


# --------------------------------------------------------------------------- wrong input

@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Make files and folders that are no usable models, or that must not be lost."""
    top = tmp_path_factory.mktemp("odd")
    shutil.copytree(DRAFT, top / "tokenizer")
    tokenizer = copy.deepcopy(loaded(DRAFT, None, None)[1])
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(top / "tokenizer")
    (top / "file").write_text("no directory")
    (top / "pairs").write_text('{"prompt": "a", "answer": "b"}\n')
    return top


def outside(words: str, kind: type) -> list[float]:
    """Return values of a kind outside a range that a docstring says in words."""
    least, *most = (float(x) for x in re.findall(r"[\d.]+", words))
    below = least if words.startswith("above") else least - 1
    found = [below, *(x + 1 for x in most), *([float("nan")] if kind is float else [])]
    return [kind(value) for value in found]


@pytest.mark.parametrize("file", FILES)
def test_a_number_outside_its_range_is_named_with_the_value(file):
    """Each number that a method, a command or any training takes has a range in a docstring. The
    ends of the range are in it, and so is all that --tune tries. Every option that it tries is one
    of a method."""
    methods, commands = functions_of(file)
    tried = importlib.import_module(file).COMMAND_LINE["ranges"]
    assert {*tried} <= {name for method in methods for name in read_options(method)}
    for function in [*methods, *commands, Settings]:
        ranges = RANGES | read_ranges(function)
        for name, (kind, _) in read_options(function).items():
            # The three have no range of this kind.
            if kind not in (int, float) or name in ("seed", "temperature", "confidence"):
                continue
            ends = [float(x) for x in re.findall(r"[\d.]+", ranges[name])]
            assert all(fits(x, ranges[name]) for x in ends) != ranges[name].startswith("above")
            assert all(fits(x, ranges[name]) for x in tried.get(name, ()))
            for value in outside(ranges[name], kind):
                with pytest.raises(InputError) as refused:
                    select_options(Namespace(**{name: value}), function, ranges=RANGES)
                expected = f"{write_option(name)} must be {ranges[name]}, got {value}"
                assert str(refused.value) == expected


@pytest.mark.parametrize("function", [
    function for name in SIX for some in functions_of(name) for function in some])
def test_a_function_of_the_six_checks_its_numbers_itself(function, tmp_path):
    """So who calls it from Python reads the same as who gives an option. No file is made."""
    given = dict(target=counting(), draft=counting(), prompt=[1], model=tiny("llama"), lr=1.0,
                 tokenizer=WORDLESS, prompts=[[1]], data=tmp_path, out=tmp_path / "out")
    given = {name: x for name, x in given.items() if name in signature(function).parameters}
    for name, words in read_ranges(function).items():
        for value in outside(words, read_options(function)[name][0]):
            # bita.train sees how long its answers are, which may be given ones.
            said = rf"{write_option(name)}\b.*, got .*{value}|answers of 2 tokens or more, got"
            with pytest.raises(InputError, match=said):
                next(function(**given | {name: value}))
    assert not [*tmp_path.iterdir()]


# The refusals that a user meets first: a command line, and what its line on stderr says.
# {odd} is the folder above, and {long} a prompt that is longer than the context.
FIRST = [
    ("speculative tune", "unrecognized arguments: tune (--help lists all options)"),
    ("speculative --target '{long}'", "File name too long: 'count the apples"),
    ("speculative --max-new-tokens '{long}'", "--max-new-tokens: invalid int value: 'count"),
    ("speculative --prompt '\udce9'", "'utf-8' codec can't encode character"),
    ("speculative --prompt '{long}'", "--prompt must be shorter than the context of 2048 tokens"),
    ("speculative --draft {odd}/tokenizer", "a draft with the target's tokenizer, got another"),
    ("jacobi --draft x", "--draft is no option of jacobi, got 'x'"),
    ("jacobi --method lookahead --n 0", "--n is no option of lookahead")]

# These are refused as well. The line on stderr names the last option or the last value.
REFUSED = """
speculative --gam 3
speculative --max-new-tokens 0
jacobi --temperature -1
jacobi --temperature nan
jacobi --top-k -1
jacobi --top-p 2
speculative --device cuda:99
speculative --prompt text --chat
speculative --chat enable_thinking=false
speculative --draft a --draft b
jacobi --chat --compare
jacobi --chat --tune
mjsd --method mjgd --temperature 1
bita --tree oak
survey.masks tune --data {odd}/pairs --prompts models/examples.jsonl
survey.several_drafts --K 1537
survey.medusa --heads three
survey.medusa --adapter models/hydra.safetensors
hybrid.hybrid --guess rest
survey.masks --L 9
survey.triforce --budget 7
survey.online --divergence tvd
speculative --trace models/medusa.safetensors
speculative --tune --trace {odd}/x.html
speculative --tune --compare
bita train --out {odd}/file/x
survey.medusa train --out {odd}/x --work {odd}/x
survey.medusa train --out {odd}/tokenizer/config.json
survey.layerskip export --tuning x --out {odd}/file
""".strip().splitlines()


@pytest.mark.parametrize("line, said", [*FIRST, *((line, "") for line in REFUSED)])
def test_wrong_input_is_one_line_and_status_2(line, said, odd, ask):
    """Before anything is printed, the three example prompts included."""
    file, *argv = [word.format(odd=odd, long=LONG) for word in shlex.split(line)]
    err = refusal(ask(*argv, file=file))
    option = next((word for word in argv[::-1] if word.startswith("--")), "")
    assert said in err and (said or option in err or argv[-1] in err), err


# ------------------------------------------------------------------------- several drafts, tuning

def test_several_drafts(ask):
    """Each draft has a cache of its own and a share of the time in the report, over all prompts.
    The text is AR's."""
    status, _, err = ask(*ONE, "--draft", DRAFT, "--draft", TARGET, "--prompt", "cakes", "--gamma",
                         "3", "--max-new-tokens", "12", "--compare", file="survey.several_drafts")
    assert re.search(r"24 tokens .* 6 target calls .* target \d+%, draft \d+%, draft 2 \d+%\n", err)
    assert status == 0 and err.endswith("; output equals autoregressive output\n")


def test_tune_finds_the_fastest(ask, now):
    """One option after the other, the best of three runs each: a slow run is chance. Options given
    stay, and one that is searched begins with what was given."""
    seen, seconds = [], {2: (9, 1, 9), 3: (2, 2, 2), 5: (9, 9, 9)}

    def slow(target, prompt, *, gamma: int = 5, K: int = 1, width: int = 0, sample=None, log=None):
        """Decode with gamma, K, width: numbers"""
        seen.append((gamma, K, width))
        now[0] += seconds[gamma][len(seen) % 3] * {1: 1, 2: 0.5, 4: 2}[K]
        yield from saying([[7, 7]] * 9)(target, prompt)
    how = dict(method=slow, ranges={"gamma": (3, 2, 5), "beta": (1, 2), "K": (1, 2, 4)})
    argv = [*ONE, "--max-new-tokens", "4", "--tune", "--K", "4", "--width", "7"]
    status, out, err = ask(*argv, **how)
    assert (status, err) == (0, "") and out.splitlines()[3:] == [
        "--K 1: 4.0 tokens/s", "--K 2: 8.0 tokens/s", "--K 4: 2.0 tokens/s",
        "fastest: --gamma 2 --K 2"]
    tried = [(3, 4), (2, 4), (5, 4), (2, 1), (2, 2), (2, 4)]
    assert seen == [(5, 4, 7), *((gamma, K, 7) for gamma, K in tried for _ in range(3))]


# ----------------------------------------------------------------------------- commands

def test_commands(ask, tmp_path):
    """Functions (model, tokenizer, **options): their options alone are theirs, and the prompts
    where they take them. One that trains takes pairs too, and what all trainings can be told."""
    given = []

    def learn(model, tokenizer, *, out: Path, work: Path = None, steps: int = 3, lr: float = 0.1,
              other=None, prompts):
        """out: what to make"""
        given.append((model.dtype, prompts, out, steps, training.SETTINGS.get()))

    def count(model, tokenizer, *, size: int, max_new_tokens: int = 9):
        given.append((size, max_new_tokens))
        return 1

    def command(line: str):
        return ask(*line.split(), commands=[learn, count])
    file, pairs = tmp_path / "prompts.txt", tmp_path / "pairs.jsonl"
    file.write_text(f"{SHORT}\n{PROMPT}\n")
    pairs.write_text('{"prompt": [5, 6], "answer": [8, 9]}')
    assert command(f"learn --out a/b --prompts {file}")[0] == 0
    given_more = f"--out c --steps 4 --dtype bfloat16 --data {pairs} --max-length 9"
    assert command(f"learn {given_more}")[0] == 0
    prompts = [loaded(TARGET, None, None)[1].encode(text) for text in (SHORT, PROMPT)]
    told = Settings(max_length=9, pairs=[([5, 6], [8, 9])])
    assert given == [(torch.float32, prompts, Path("a/b"), 3, Settings()),
                     (torch.bfloat16, [[5, 6]], Path("c"), 4, told)]
    assert command("count --size 5 --max-new-tokens 2")[0] == 1 and given[2:] == [(5, 2)]
    for line in "learn", "count --size 5 --prompts x", "learn --out x --other y", "--gamma 3 learn":
        refusal(command(line))
    _, out, _ = command("learn --help")
    assert out.startswith("usage: python -m cli test_cli learn [options]\n")
    assert "python -m cli speculative count --help\n" in command("--help")[1]


# -------------------------------------------------------------------------- interruptions

def stopping(n: int, number: int = signal.SIGINT):
    """Make a method that Ctrl-C or another signal stops after n chunks of a prompt."""
    def stopped(target, prompt, *, gamma: int = 1, sample=None, log=None):
        yield from take(autoregressive(target, prompt), n)
        signal.raise_signal(number)
        yield from ()
    return stopped


@pytest.fixture
def heed():
    """Let Ctrl-C interrupt. A shell that runs the tests in the background lets them ignore it."""
    before = [signal.signal(signal.SIGINT, signal.default_int_handler),
              signal.getsignal(signal.SIGTERM)]
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before):
        signal.signal(number, handler)


def test_a_command_line_that_python_calls_leaves_the_process_as_it_is(heed, monkeypatch):
    """A notebook or a server goes on, and gets errors. The command line may run in a thread."""
    def read_shared() -> list:
        return [sys.stdout.encoding, signal.getsignal(signal.SIGTERM),
                getLogger("transformers").level, logging.is_progress_bar_enabled()]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    getLogger("transformers").setLevel("INFO")
    logging.enable_progress_bar()
    before, call = read_shared(), partial(call_command_line, methods=[speculative])
    argv = [*ONE, "--max-new-tokens", "2", "--gamma"]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(call, [*argv, "3"]).result() == 0
    check_refused("--gamma must be 1 or more", call, [*argv, "0"])
    assert read_shared() == before


@pytest.mark.parametrize("terminal, printed", [(False, "é漢\n".encode()), (True, b"??\n")])
def test_a_script_prints_every_character_and_ends_by_mistakes(terminal, printed, heed, monkeypatch):
    """A file or a pipe gets UTF-8. A terminal keeps its encoding."""
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    out.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", out)
    assert run_script(lambda: print("é漢")) == 0 and out.buffer.getvalue() == printed
    with pytest.raises(RuntimeError):
        run_script(Mock(side_effect=RuntimeError("a mistake of this project")))


@pytest.mark.parametrize("n, tuned, number", [
    (0, False, signal.SIGINT), (2, False, signal.SIGINT), (2, False, signal.SIGTERM),
    (2, True, signal.SIGINT)])
def test_interrupted_in_the_middle(ask, heed, tmp_path, n, tuned, number):
    """What is there stays. Its figures and the page of --trace come where there is a token. The
    status says what stopped it."""
    page = tmp_path / "x.html"
    more = ["--tune"] if tuned else ["--trace", str(page)]
    status, out, err = ask(*ONE, *more, "--max-new-tokens", "5", method=stopping(n, number),
                           ranges={"gamma": (1, 2)}, report=lambda run: f"report of {run.tokens}")
    assert status == 128 + number and err.endswith("\ninterrupted\n") and "Traceback" not in err
    figures = "stopped: 2 tokens in" in err and "report of 2" in err
    assert figures == (out != "") == page.exists() == (n > 0 and not tuned)


# ------------------------------------------------------------------------ other processes

def test_a_closed_pipe_ends_as_ctrl_c_does(tmp_path):
    """The process must end as before `| head -c 5`. It writes the page of what was decoded, and
    says nothing of the pipe."""
    page = tmp_path / "x.html"
    process, out, err = fork(script, "speculative", "--trace", str(page),
                                *["--prompt", PROMPT] * 500)
    assert out.read(5)
    out.close()
    errors = err.read()
    process.join(120)
    assert process.exitcode == 128 + signal.SIGPIPE and page.exists(), errors
    assert "speculative: " in errors and errors.endswith(f"\ntrace: {page}\n")
    assert not re.search("Traceback|Broken|interrupted", errors)
