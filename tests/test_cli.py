"""The command line: what goes where, wrong input, tuning, commands, interruptions."""
import ast
import functools
import importlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

import bita
from cli.graphs import GraphedLM
from cli.run import Run
from cli.trajectory import show_trajectory
from common import CachedLM, InputError, autoregressive, encode, eos_ids, greedy, load
from families import near, tiny
from helpers import ROOT, fork, main, script, tokens_of
from models.tasks import read_prompts
from speculative import report, speculative
from test_structure import METHODS

PROMPTS = read_prompts(ROOT / "models/examples.jsonl")
PROMPT, SHORT, LONG = PROMPTS[1], "count the apples", "count the apples " * 1000


@functools.cache
def loaded(*how):
    return load(*how)


@pytest.fixture(autouse=True)
def load_once(monkeypatch):
    monkeypatch.setattr("cli.loading.load", loaded)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but where a test moves it: clock[0] is its time."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def nothing(run) -> str:
    return ""


def run(*argv, method=speculative, report=None, **special) -> int:
    """Run a command line of one method; a test's own method reports nothing."""
    reports = importlib.import_module("speculative").report if method is speculative else nothing
    return main([method], report or reports, list(argv), **special)


def wrong_line(capsys, status: int) -> str:
    """The one line on stderr that wrong input leaves, and nothing on stdout."""
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1 and "Traceback" not in err, (out, err)
    return err


def stdin(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def same(target, prompt, *, sample=greedy, log=None):
    """Stands in for a method: token by token."""
    yield from autoregressive(target, prompt, sample=sample)


def saying(chunks: list[list[int]]):
    """A method that says this, whatever the prompt, for one call."""
    def said(target, prompt, *, sample=None, log=None):
        target.start(prompt[:-1])
        target.forward(prompt[-1:])
        yield from chunks
    return said


def other_from(n: int):
    """A method whose output is wrong from its token n on."""
    def wrong(target, prompt, *, sample=None, log=None):
        for i, [token] in enumerate(autoregressive(target, prompt), 1):
            yield [token + (i >= n)]
    return wrong


# ----------------------------------------------------------------------- what goes where

def test_text_on_stdout_and_figures_on_stderr(capsys, embedded):
    target, _, tokenizer = embedded
    assert run("--prompt", PROMPT) == 0
    out, err = capsys.readouterr()
    prompt, eos = encode(tokenizer, PROMPT), eos_ids(target, tokenizer)
    expected = tokens_of(autoregressive(CachedLM(target), prompt), 256, eos)
    assert out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert "\033" not in out and PROMPT not in err
    assert f"speculative: {len(expected)} tokens" in err and "acceptance rate" in err


@pytest.fixture
def costs(clock):
    """A pass of the target takes 4 s on the clock, one of the draft 1 s, all else no time."""
    hooks = []
    for name, seconds in ("target", 4), ("draft", 1):
        def tick(*_, seconds=seconds):
            clock[0] += seconds
        model, _ = loaded(str(ROOT / "models" / name), None, None)
        hooks.append(model.register_forward_hook(tick))
    yield
    for hook in hooks:
        hook.remove()


def test_figures_add_up(capsys, costs):
    """The time of the prompt is in the seconds and the shares, but it is no call."""
    assert run("--prompt", PROMPT, "--compare", "--max-new-tokens", "30") == 0
    err = capsys.readouterr().err
    calls, drafts = (int(re.search(rf"(\d+) {name} calls", err)[1]) for name in ("target", "draft"))
    target, draft = 4 * (calls + 1), drafts + 1
    t = target + draft
    assert (f"speculative: 30 tokens in {t:.2f} s ({30 / t:.1f} tokens/s), {calls} target calls "
            f"({30 / calls:.2f} tokens per call); of the time target {target / t:.0%}, "
            f"draft {draft / t:.0%}\n") in err
    assert "a draft call costing 0.25 of a target call" in err
    assert ("autoregressive: 30 tokens in 124.00 s (0.2 tokens/s), 30 target calls "
            "(1.00 tokens per call); of the time target 100%\n") in err
    assert f"speed-up {124 / t:.2f}x; output equals autoregressive output\n" in err


def test_only_the_method_is_timed_and_no_further_than_needed(clock):
    """Its set-up is told apart, and is not what others prepare between its chunks."""
    def slow(target, draft, prompt, *, sample=None, log=None):
        for i in range(9):
            clock[0] += 2
            target.setup_seconds += 0.25
            draft.setup_seconds += 0.5
            yield [i, i]
    models = {name: SimpleNamespace(setup_seconds=7.0) for name in ("target", "draft")}
    run = Run(slow, models, {}, {3})
    for prompt, limit in ([5] * 10, 5), ([5] * 46, 4), ([5] * 5, 100):
        for _ in run.decode(prompt, limit, greedy):
            clock[0] += 1000
            models["target"].setup_seconds += 1000
    assert run.outputs == [[0, 0, 1, 1, 2], [0, 0, 1, 1], [0, 0, 1, 1, 2, 2, 3]]  # the last: EOS
    assert run.tokens == 16 and run.seconds == 9 * 1.25 and run.setup == 9 * 0.75


def test_what_is_prepared_once_is_shown_and_is_no_decoding(capsys, clock, costs):
    """Neither its time nor its passes are in the seconds, the shares or the speed-up. It is made
    once for all prompts of a run."""
    made = []

    def preparing(target, draft, prompt, *, sample=greedy, log=None):
        def make(lm, seconds):
            made.append(seconds)
            clock[0] += seconds
            lm.forward([5], counts=False)
            lm.truncate(lm.length)
        target.once("before the first token", lambda: make(target, 100))
        draft.start(prompt[:-1])
        for i, chunk in enumerate(autoregressive(target, prompt)):
            if i == 2:
                draft.once("before the third", lambda: make(draft, 50.5))
            yield chunk
    argv = ["--prompt", SHORT, "--prompt", PROMPT, "--max-new-tokens", "3", "--compare"]
    assert run(*argv, method=preparing) == 0
    *_, figures, _, ar, end = capsys.readouterr().err.splitlines()
    assert figures == ("preparing: 6 tokens in 34.00 s (0.2 tokens/s), 6 target calls (1.00 tokens "
                       "per call); of the time target 94%, draft 6%; set-up 155.5 s")
    assert ar == ("autoregressive: 6 tokens in 32.00 s (0.2 tokens/s), 6 target calls (1.00 tokens "
                  "per call); of the time target 100%")
    assert end == "speed-up 0.94x; output equals autoregressive output" and made == [100, 50.5]


@pytest.mark.parametrize("name, reads, argv", [
    ("bita", "load_tuning", "--tree chain"), ("survey.medusa", "load_heads", "--nodes 3"),
    ("survey.eagle", "load_draft", "--nodes 3"), ("survey.rest", "load_datastore", "--nodes 3"),
    ("survey.sequoia", "load_rates", "--nodes 3 --depth 2")])
def test_a_trained_file_is_read_once_for_all_prompts(capsys, monkeypatch, name, reads, argv):
    module, read = importlib.import_module(name), []
    load_file = getattr(module, reads)
    monkeypatch.setattr(module, reads, lambda *x: read.append(x) or load_file(*x))
    texts = ["--prompt", SHORT, "--prompt", PROMPT, "--max-new-tokens", "2"]
    assert script(name, *texts, *argv.split()) == 0 and len(read) == 1
    assert re.search(r" \d+%; set-up \d+\.\d s$", capsys.readouterr().err, re.M)


def test_the_report_comes_last_and_its_own_calls_do_not_count(capsys):
    def busy(run):
        run.models["target"].start(run.prompts[0][:-1])
        for _ in range(7):
            run.models["target"].forward([5])
        return "a busy report"
    assert run("--prompt", SHORT, "--max-new-tokens", "5", method=same, report=busy) == 0
    figures, last = capsys.readouterr().err.splitlines()
    assert "same: 5 tokens" in figures and "5 target calls (1.00 tokens per call)" in figures
    assert last == "a busy report"


def test_show_colours_all_of_a_chunk_but_its_last_token(capsys, embedded):
    """auto: on a terminal alone, and stdout is none here."""
    words = [embedded[2].encode(x, add_special_tokens=False) for x in (" Tom", " has", " apples")]
    ids = [token for word in words for token in word]
    argv = ["--prompt", SHORT, "--max-new-tokens", "4"]
    coloured = "\033[32m Tom\033[0m\033[32m has\033[0m apples Tom\n"
    for show, text in ([], coloured), (["always"], coloured), (["auto"], None), (["never"], None):
        assert run(*argv, "--show", *show, method=saying([ids, ids[:1]])) == 0
        assert capsys.readouterr().out == (text or " Tom has apples Tom\n")


def test_prompts_go_to_stderr_before_their_answers(capsys):
    """Where there are several; a single one is not repeated."""
    few = ["--max-new-tokens", "10", "--show", "always"]
    alone = []
    for text in (PROMPT, SHORT):
        run("--prompt", text, *few)
        out, err = capsys.readouterr()
        alone.append(out)
        assert text not in err
    assert run("--prompt", PROMPT, "--prompt", SHORT, *few) == 0
    out, err = capsys.readouterr()
    assert out == "".join(alone) and out.count("\033[32m") > 2
    assert err.startswith(f"{PROMPT}\n{SHORT}\nspeculative: 20 tokens in")


def test_viewers(capsys):
    """They print in place of the text, but only with --show always."""
    seen = []

    def viewer(chunks, tokenizer, colour, log):
        seen.append((list(chunks), colour, log))
        print("seen")

    def logging(target, prompt, *, sample=greedy, log=None):
        for chunk in autoregressive(target, prompt):
            log.append({"chunk": chunk})
            yield chunk
    argv = ["--prompt", SHORT, "--prompt", SHORT, "--max-new-tokens", "3", "--show"]
    for show, viewed in ("never", 0), ("auto", 0), ("always", 2):
        assert run(*argv, show, method=logging, viewers={logging: viewer}) == 0
        assert len(seen) == viewed and capsys.readouterr().out.count("seen\n") == viewed
    (chunks, colour, log), (more, _, _) = seen
    assert len(chunks) == 3 and colour and [r["chunk"] for r in log] == chunks + more
    assert run(*argv, "always", method=same, viewers={logging: viewer}) == 0
    assert "seen" not in capsys.readouterr().out


def test_the_jacobi_viewer_on_the_command_line(capsys):
    """Each prompt's trajectories, then its text."""
    few, alone = ["--max-new-tokens", "18"], []
    for text in (PROMPT, SHORT):
        assert script("jacobi", "--prompt", text, *few) == 0
        answer = capsys.readouterr().out
        assert script("jacobi", "--prompt", text, *few, "--show", "always") == 0
        alone.append(capsys.readouterr().out)
        assert alone[-1].startswith("  0: ") and alone[-1].endswith(answer) and answer[:3] != "  0"
    assert script("jacobi", "--prompt", PROMPT, "--prompt", SHORT, *few, "--show", "always") == 0
    assert capsys.readouterr().out == "".join(alone)


def test_the_jacobi_viewer_shows_a_block_as_soon_as_it_is_final(capsys, embedded):
    """Also if the token after the block, the next root, is not final yet."""
    def chunks():
        yield [3]
        assert "  1: " in capsys.readouterr().out
    log = [{"states": [[7, 8], [7, 3]], "final": [1, 2]}]
    show_trajectory(chunks(), embedded[2], False, log)


def test_where_prompts_come_from(capsys, monkeypatch, tmp_path):
    """Arguments, standard input, a file of either format, or else the examples."""
    def said(*argv) -> str:
        assert run(*argv, "--max-new-tokens", "6") == 0
        return capsys.readouterr().out
    first, second, third = (said("--prompt", text) for text in PROMPTS)
    assert said() == first + second + third
    stdin(monkeypatch, PROMPTS[1].encode())
    assert said("--prompt", "-", "--prompt", PROMPTS[2]) == second + third
    file = tmp_path / "prompts"
    file.write_text(json.dumps({"prompt": PROMPTS[0]}) + f"\n{SHORT}\n")
    assert said("--prompts", str(file)) == first + said("--prompt", SHORT)
    assert said("--prompts", str(file), "--prompt", PROMPTS[2]) == third  # in place of the file


def test_samples_are_those_of_the_seed(capsys):
    """Whatever prompts were answered before."""
    how = ["--temperature", "4", "--max-new-tokens", "12", "--top-k", "50", "--top-p", "0.95"]
    outs = []
    for seed in "1123":
        assert run("--prompt", SHORT, *how, "--seed", seed) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] and len({*outs}) > 1
    assert run("--prompt", SHORT, "--prompt", SHORT, *how, "--seed", "1", "--compare") == 0
    out, err = capsys.readouterr()
    assert out == outs[0] + outs[0] and "outputs may differ" in err


# ---------------------------------------------------------------------------- comparing

@pytest.mark.parametrize("dtype, status", [("bfloat16", 0), ("float32", 1)])
def test_compare_reports_the_first_difference(capsys, dtype, status):
    """With the two largest logits there; in half precision near-ties are rounded, and it is no
    failure."""
    argv = ["--prompt", PROMPT, "--compare", "--dtype", dtype]
    assert run(*argv, "--max-new-tokens", "8", method=other_from(3)) == status
    err = capsys.readouterr().err
    model, tokenizer = loaded(str(ROOT / "models/target"), None, dtype)
    lm, prompt = CachedLM(model), encode(tokenizer, PROMPT)
    text = prompt + tokens_of(autoregressive(lm, prompt), 2)
    lm.start(text[:-1])
    first, second = lm.forward(text[-1:])[0].sort(descending=True).values[:2].tolist()
    assert f"output differs at token 3: largest logits {first:.5g}, {second:.5g}\n" in err
    assert "equals" not in err and "may differ" not in err
    [figures] = [line for line in err.splitlines() if line.startswith("autoregressive: 8 tokens")]
    assert "8 target calls (1.00 tokens per call); " in figures
    assert re.search(r"of the time target (9.|100)%", figures)


def test_compare_looks_at_every_prompt_and_at_the_end(capsys):
    """Also a second prompt's output, one that stops early and one that goes on count."""
    def second(target, prompt, *, sample=None, log=None):
        yield from (other_from(2) if len(prompt) > 30 else other_from(99))(target, prompt)
    few = ["--max-new-tokens", "4", "--compare"]
    assert run("--prompt", SHORT, *few, method=second) == 0
    assert run("--prompt", SHORT, "--prompt", PROMPT, *few, method=second) == 1
    assert "differs at token 2" in capsys.readouterr().err
    model, _ = loaded(str(ROOT / "models/target"))
    ar = Run(autoregressive, {"target": CachedLM(model)}, {}, {})
    ours = Run(same, ar.models, {}, {})
    ours.prompts, ar.outputs = [[5, 6], [5, 6]], [[7, 8], [7, 8, 9]]
    for outputs, said in ([[7, 8], [7, 8, 9]], ""), ([[7, 8], [7, 8]], "differs at token 3"), (
            [[7, 8, 9], [7, 8, 9]], "differs at token 3"), ([[7, 8], [6]], "differs at token 1"):
        ours.outputs = outputs
        assert (said in ours.find_difference(ar)) if said else ours.find_difference(ar) == ""


def test_a_lossy_method_may_differ(capsys):
    wrong = other_from(2)
    argv = ["--prompt", SHORT, "--compare", "--max-new-tokens", "4"]
    assert run(*argv, method=wrong, lossy=[wrong]) == 0
    assert "outputs may differ" in capsys.readouterr().err
    for lossy in ["mjsd"], ["survey.lossy"], ["survey.lossy", "--method", "specdec"]:
        assert script(*lossy, *argv) == 0 and "outputs may differ" in capsys.readouterr().err


# --------------------------------------------------------------------- context and memory

def test_the_end_of_the_context(capsys, tmp_path):
    """A prompt that leaves room for 20 tokens in the draft: so many come, and they are compared."""
    model, folder = AutoModelForCausalLM.from_pretrained(ROOT / "models/draft"), tmp_path / "short"
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/draft")
    model.config.max_position_embeddings = len(encode(tokenizer, PROMPT)) + 20
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    capsys.readouterr()
    assert run("--prompt", PROMPT, "--draft", str(folder), "--compare") == 0
    err = capsys.readouterr().err
    assert "speculative: 20 tokens" in err and "equals autoregressive output" in err
    status = run("--prompt", PROMPT + " " + PROMPT, "--draft", str(folder))
    context = model.config.max_position_embeddings
    assert f"shorter than the context of {context} tokens" in wrong_line(capsys, status)


def test_each_prompt_has_its_own_room_in_the_context(capsys, embedded):
    prompts = [SHORT, "count the apples " * 300]
    room = sum(2048 - len(encode(embedded[2], text)) for text in prompts)
    argv = ["--prompt", prompts[0], "--prompt", prompts[1], "--max-new-tokens", "9999"]
    assert run(*argv, method=saying([[7] * 3000])) == 0
    assert f"said: {room} tokens" in capsys.readouterr().err


def test_a_prompt_that_fills_the_context_is_refused(capsys, monkeypatch, embedded):
    n = len(encode(embedded[2], PROMPT))
    for context, status in ((n, 2), (n + 1, 0)):
        monkeypatch.setattr("cli.main.context_length", lambda lm: context)
        assert run("--prompt", PROMPT, method=same) == status
    assert "same: 1 tokens" in capsys.readouterr().err


def test_a_limit_beyond_the_context_allocates_nothing(capsys):
    lms = []

    def stingy(target, prompt, *, sample=None, log=None):
        lms.append(target)
        for i, chunk in enumerate(autoregressive(target, prompt)):
            yield chunk if i < 5 else [1]  # an EOS
    assert run("--prompt", SHORT, "--max-new-tokens", "9" * 20, method=stingy) == 0
    assert "stingy: 6 tokens" in capsys.readouterr().err
    [lm] = lms
    slots = {buffer.shape[2] for pair in lm.cache.layers.values() for buffer in pair}
    assert lm.length <= min(slots) and max(slots) <= 2 * lm.length + 1


OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB"),
                 RuntimeError("can't allocate memory:\nyou tried to allocate 9 GiB")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["gpu", "cpu"])
def test_memory_that_is_used_up(capsys, monkeypatch, error):
    """While a model is read, while it is moved to its device, while it decodes: one line."""
    def full(*_, **__):
        raise error

    def greedy_for_memory(target, prompt, *, sample=None, log=None):
        yield full()
    status = run("--prompt", SHORT, "--prompt", SHORT, method=greedy_for_memory)
    assert "allocate 9 GiB" in wrong_line(capsys, status)
    monkeypatch.setattr("cli.loading.load", full)
    assert "allocate 9 GiB" in wrong_line(capsys, run("--prompt", SHORT))
    monkeypatch.setattr("cli.loading.load", load)
    monkeypatch.setattr("common.AutoModelForCausalLM.from_pretrained",
                        lambda *_, **__: (SimpleNamespace(to=full), {}))  # and a report of weights
    assert "allocate 9 GiB" in wrong_line(capsys, run("--prompt", SHORT))


def test_chat(capsys, tmp_path):
    """The prompt is put into the model's template, whose own special tokens count alone."""
    folders = []
    for name in ("target", "draft"):
        shutil.copytree(ROOT / "models" / name, tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        tokenizer.chat_template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
        tokenizer.save_pretrained(tmp_path / name)
        folders += [f"--{name}", str(tmp_path / name)]
    few = ["--prompt", PROMPT, "--max-new-tokens", "20"]
    run(*few)
    text = capsys.readouterr().out
    assert run(*few, "--chat", *folders) == 0
    assert capsys.readouterr().out == text


# --------------------------------------------------------------------- methods and options

def test_methods_and_their_options(capsys):
    given = []

    def other(target, draft, prompt, room: int = 0, *, width: int = 3, name: str = "x",
              share: float = 0.5, local: bool = True, file: Path = None, eos: set = frozenset(),
              sample=None, log=None):
        """width: a number"""
        given.append((width, name, share, local, file))
        yield from autoregressive(target, prompt)

    def tunable(target, prompt, *, beta: int = 1, sample=None, log=None):
        """beta: a number"""
    argv = ["--prompt", SHORT, "--max-new-tokens", "2", "--method", "other"]
    methods = [speculative, tunable, other]
    for own in "--width 4", "--width -4 --name 1 --share 2 --no-local --file a/b", "--width 0":
        assert main(methods, nothing, [*argv, *own.split()]) == 0
    assert given == [(4, "x", 0.5, True, None), (-4, "1", 2.0, False, Path("a/b")),
                     (0, "x", 0.5, True, None)]
    capsys.readouterr()
    for wrong in ["--gamma", "4"], ["--width", "4", "--gamma", "4", "--beta", "2"]:
        err = wrong_line(capsys, main(methods, nothing, [*argv, *wrong]))
        assert err.endswith("--gamma is no option of other\n")
    for argv in (["--help"], ["--method", "other", "-h"]):
        assert main(methods, nothing, argv) == 0
        out = capsys.readouterr().out
        assert re.search(r"gamma: tokens drafted a round", out) and "width: a number" in out
        assert "other(width=3, name='x', share=0.5, local=True, file=None)" in out
        assert "--no-local" in out and "--eos" not in out


def test_what_a_run_shares(capsys):
    """Shared objects are made anew for each run and are the same for all of its prompts; a method
    that takes `eos` gets it."""
    pools = []

    def pooled(target, prompt, *, pool=None, eos=None, sample=greedy, log=None):
        pools.append((pool, eos))
        yield from autoregressive(target, prompt)
    argv = ["--prompt", SHORT, "--prompt", PROMPT, "--max-new-tokens", "2"]
    special = {"method": pooled, "shared": {"pool": list}}
    assert run(*argv, **special) == run(*argv, "--tune", **special, ranges={}) == 0
    (one, _), (other, _), (later, _), _ = pools
    assert one is other and one == [] and later is not one and len(pools) == 4
    assert all(eos == {1} for _, eos in pools)
    assert run(*argv, **special | {"method": same}) == 0  # which takes neither


def test_what_a_method_is_given(capsys, embedded, monkeypatch):
    """The tokenizer's size, for embeddings are often padded beyond it; with --graphs models that
    run so and have been checked so."""
    seen, checked = [], []
    monkeypatch.setattr("cli.main.prepare",
                        lambda model, run_as: checked.append((model, run_as)))

    def spying(target, draft, prompt, *, sample=None, log=None):
        seen.extend((lm.model, lm.vocab, type(lm)) for lm in (target, draft))
        yield from saying([[7]])(target, prompt)
    argv = ["--prompt", SHORT, "--max-new-tokens", "1"]
    assert run(*argv, method=spying) == 0 and checked == []
    assert run(*argv, "--graphs", method=spying) == 0
    models = [loaded(str(ROOT / "models" / name), None, None)[0] for name in ("target", "draft")]
    assert checked == [(model, GraphedLM) for model in models]
    assert seen == [(model, len(embedded[2]), run_as) for run_as in (CachedLM, GraphedLM)
                    for model in models]


# --------------------------------------------------------------------------- wrong input

@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Directories that are no usable models: empty, a broken file, another tokenizer, no model."""
    top = tmp_path_factory.mktemp("odd")
    (top / "empty").mkdir()
    shutil.copytree(ROOT / "models/draft", top / "broken")
    (top / "broken/model.safetensors").write_bytes(b"nonsense")
    shutil.copytree(ROOT / "models/draft", top / "tokenizer")
    file = top / "tokenizer/tokenizer.json"
    entries = json.loads(file.read_text())
    vocab = entries["model"]["vocab"]
    last, other = list(vocab)[-1], list(vocab)[-2]
    vocab[last], vocab[other] = vocab[other], vocab[last]
    file.write_text(json.dumps(entries))
    shutil.copytree(ROOT / "models/draft", top / "unknown")
    (top / "unknown/config.json").write_text('{"model_type": "perceptron"}')
    (top / "file").write_text("no directory")
    (top / "latin").write_bytes(b"caf\xe9")
    return top


# A command line of a method file, and what its one line on stderr says: both sides of a " … ".
# {odd} is the folder above, {long} a prompt that is longer than the context.
REFUSED = [
    ("speculative --gamma 0", "--gamma must be 1 or more, got 0"),
    ("speculative --gamma -3", "--gamma must be 1 or more, got -3"),
    ("speculative --gamma many", "argument --gamma: invalid int value: 'many'"),
    ("speculative --gamma 1000000000000", "--gamma must be at most the context of 2048 tokens"),
    ("speculative --gam 3", "unrecognized arguments: --gam 3"),
    ("speculative --fallback 0.5", "unrecognized arguments: --fallback"),
    ("speculative tune", "unrecognized arguments: tune (--help lists all options)"),
    ("speculative --trace {odd}/no/x", "--trace must be a file that can be written, got '{odd}/no"),
    ("speculative --trace {odd}", "--trace must be a file that can be written, got '{odd}'"),
    ("speculative --method spectr", "invalid choice: 'spectr'"),
    ("speculative --show sometimes", "invalid choice: 'sometimes'"),
    ("speculative --max-new-tokens 0", "--max-new-tokens must be 1 or more, got 0"),
    ("speculative --temperature -0.1", "--temperature must be 0 or 1e-6 to 1e6, got -0.1"),
    ("speculative --temperature 1e-9", "--temperature must be 0 or 1e-6 to 1e6, got 1e-09"),
    ("speculative --temperature nan", "--temperature must be 0 or 1e-6 to 1e6, got nan"),
    ("speculative --temperature inf", "--temperature must be 0 or 1e-6 to 1e6, got inf"),
    ("speculative --top-k -1", "--top-k must be 0 or more, got -1"),
    ("speculative --top-p 0", "--top-p must be above 0 and at most 1, got 0.0"),
    ("speculative --top-p 1.5", "--top-p must be above 0 and at most 1, got 1.5"),
    ("speculative --dtype int3", "model directory or hub id that … can load as int3"),
    ("speculative --device tpu", "model directory or hub id that tpu can load"),
    ("speculative --target no/such/model", "hub id that can be reached, got 'no/such/model'"),
    ("speculative --target /no/such", "hub id that can be reached, got '/no/such'"),
    ("speculative --draft 'no such model'", "model directory or hub id … got 'no such model'"),
    ("speculative --target {odd}/empty", "got '{odd}/empty': it has no config.json"),
    ("speculative --target {odd}/file", "got '{odd}/file': it is a file, not a directory"),
    ("speculative --target {odd}/unknown", "model directory or hub id … got '{odd}/unknown'"),
    ("speculative --draft {odd}/broken", "model.safetensors is cut off or damaged"),
    ("speculative --draft {odd}/tokenizer", "a draft with the target's tokenizer, got another"),
    ("speculative --draft a --draft b", "--draft must be given once for speculative, got 2"),
    ("speculative --chat", "a chat template for --chat"),
    ("speculative --prompt ''", "a prompt with some text, got ''"),
    ("speculative --prompt '<s></s>'", "a prompt with some text, got '<s></s>'"),
    ("speculative --prompt Tom --prompt ''", "a prompt with some text, got ''"),
    ("speculative --prompt caf\udce9", "--prompt must be UTF-8 text, got 'caf\\udce9'"),
    ("speculative --prompt '{long}'", "--prompt must be shorter than the context of 2048 tokens"),
    ("speculative --prompt Tom --prompt '{long}'", "--prompt must be shorter than the context"),
    ("speculative --prompts {odd}/latin", "a file of prompts … '{odd}/latin'"),
    ("speculative --prompts {odd}/empty", "a file of prompts … '{odd}/empty'"),
    ("speculative --prompts {odd}/none", "a file of prompts … '{odd}/none'"),
    ("jacobi --n 1", "--n must be 2 or more, got 1"),
    ("jacobi --W 4", "--W is no option of jacobi"),
    ("jacobi --draft a --draft b --draft c", "--draft is no option of jacobi, got 'a'"),
    ("jacobi --method lookahead --n 4", "--n is no option of lookahead"),
    ("jacobi --method lookahead --W -1", "--W must be 0 or more, got -1"),
    ("jacobi --method lookahead --N 1", "--N must be 2 or more, got 1"),
    ("jacobi --method lookahead --G 0", "--G must be 1 or more, got 0"),
    ("jacobi --method lookahead --W 0 --no-prompt-ngrams", "nothing is left to guess from"),
    ("ouroboros --gamma 0", "--gamma must be 1 or more, got 0"),
    ("ouroboros --W 0", "--W must be 1 or more, got 0"),
    ("ouroboros --beta 1", "--beta must be 2 or more, got 1"),
    ("ouroboros --K 0", "--K must be 1 or more, got 0"),
    ("ouroboros --G 0", "--G must be 1 or more, got 0"),
    ("ouroboros --history maybe", "unrecognized arguments: maybe"),
    ("ouroboros --draft a --draft b", "--draft must be given once for ouroboros, got 2"),
    ("mjsd --gamma 0", "--gamma must be 1 or more, got 0"),
    ("mjsd --beams 0", "--beams must be 1 or more, got 0"),
    ("mjsd --width 9", "--width must be 1 to the 8 of --beams, got 9"),
    ("mjsd --tau -1", "--tau must be 0 or more, got -1.0"),
    ("mjsd --tau nan", "--tau must be 0 or more, got nan"),
    ("mjsd --K 3", "--K is no option of mjsd"),
    ("mjsd --method mjgd --K 0", "--K must be 1 or more, got 0"),
    ("mjsd --method mjgd --beams 0", "--beams must be 1 or more, got 0"),
    ("mjsd --method mjgd --temperature 1", "--temperature must be 0 for joint greedy"),
    ("bita --tree oak", "--tree must be best, efficient, full, chain, got oak"),
    ("bita --k -1", "--k must be 0 or more, got -1"),
    ("bita --k 3", "--k must be left out with --tree best, got 3"),
    ("bita --adapter /no/such", "a file made by `python bita.py train`, got '/no/such'"),
    ("bita --P 3", "unrecognized arguments: --P 3"),
    ("bita train", "the following arguments are required: --out"),
    ("bita train --out /no/such/x --k 3", "unrecognized arguments: --k 3"),
    ("bita train --out /no/such/x --prompt x", "unrecognized arguments: --prompt x"),
    ("bita train --out /no/such/x --steps 0", "--steps must be 1 or more, got 0"),
    ("bita --tree full train", "unrecognized arguments: train"),
    ("cllm --n 1", "--n must be 2 or more, got 1"),
    ("cllm collect", "the following arguments are required: --out"),
    ("cllm collect --out /no/such/x --n 1", "--n must be 2 or more, got 1"),
    ("cllm train --out /no/such/x", "the following arguments are required: --data, --lr"),
    ("cllm train --data x --out x --lr 1 --prompts x", "unrecognized arguments: --prompts x"),
    ("cllm train --data /no/such --out x --lr 1", "a file made by `python cllm.py collect`"),
    ("cllm profile --after /no/such/model", "got '/no/such/model'"),
    ("cllm profile --n 1", "--n must be 2 or more, got 1"),
    ("survey.several_drafts --K 0", "--K must be 1 or more, got 0"),
    ("survey.several_drafts --method spectr --gamma 0", "--gamma must be 1 or more, got 0"),
    ("survey.several_drafts --method spectr --draft a --draft b",
     "--draft must be given once for spectr, got 2"),
    ("survey.lossy --gamma 0", "--gamma must be 1 or more, got 0"),
    ("survey.lossy --fallback -1", "--fallback must be 0 or more, got -1.0"),
    ("survey.lossy --fallback nan", "--fallback must be 0 or more, got nan"),
    ("survey.lossy --rollback -1", "--rollback must be 0 or more, got -1.0"),
    ("survey.lossy --rollback nan", "--rollback must be 0 or more, got nan"),
    ("survey.lossy --method specdec --gamma 0", "--gamma must be 1 or more, got 0"),
    ("survey.lossy --method specdec --beta 0", "--beta must be 1 or more, got 0"),
    ("survey.lossy --method specdec --tau -1", "--tau must be 0 or more, got -1.0"),
    ("survey.lossy --method specdec --tau nan", "--tau must be 0 or more, got nan"),
    ("survey.lossy --method specdec --fallback 1", "--fallback is no option of specdec"),
    ("survey.lossy --method specdec --draft a --draft a", "given once for specdec, got 2"),
    ("survey.medusa --heads three", "--heads must be medusa or hydra, got three"),
    ("survey.medusa --nodes -1", "--nodes must be 0 to 128, got -1"),
    ("survey.medusa --nodes 129", "--nodes must be 0 to 128, got 129"),
    ("survey.medusa --epsilon 0", "--epsilon must be above 0, got 0.0"),
    ("survey.medusa --epsilon nan", "--epsilon must be above 0, got nan"),
    ("survey.medusa --delta -1", "--delta must be above 0, got -1.0"),
    ("survey.medusa --adapter {odd}/none", "expected a file of medusa heads, got '{odd}/none'"),
    ("survey.medusa --adapter models/hydra.safetensors", "one of hydra heads"),
    ("survey.medusa train --out /no/such/x --heads x", "--heads must be medusa or hydra, got x"),
    ("survey.medusa train --out /no/such/x --K 0", "--K must be 1 or more, got 0"),
    ("survey.medusa train --out /no/such/x --vocab -1", "--vocab must be 0 or more, got -1"),
    ("survey.medusa train --out /no/such/x --steps 0", "--steps must be 1 or more, got 0"),
    ("survey.medusa train --out /no/such/x --batch 0", "--batch must be 1 or more, got 0"),
    ("survey.medusa train --out /no/such/x --lr 0", "--lr must be above 0, got 0.0"),
    ("survey.medusa train --out /no/such/x --max-new-tokens 0",
     "--max-new-tokens must be 1 or more, got 0"),
    ("survey.eagle --nodes -1", "--nodes must be 0 to 64, got -1"),
    ("survey.eagle --nodes 65", "--nodes must be 0 to 64, got 65"),
    ("survey.eagle --adapter {odd}/none", "expected a file of an EAGLE layer, got '{odd}/none'"),
    ("survey.eagle train", "the following arguments are required: --out"),
    ("survey.eagle train --out /no/such/x --inputs x", "--inputs must be shifted, … token, got x"),
    ("survey.eagle train --out /no/such/x --begin x", "--begin must be random or last, got x"),
    ("survey.eagle train --out /no/such/x --mlp -1", "--mlp must be 0 or more, got -1"),
    ("survey.eagle train --out /no/such/x --vocab -1", "--vocab must be 0 or more, got -1"),
    ("survey.eagle train --out /no/such/x --steps 0", "--steps must be 1 or more, got 0"),
    ("survey.eagle train --out /no/such/x --batch 0", "--batch must be 1 or more, got 0"),
    ("survey.eagle train --out /no/such/x --lr 0", "--lr must be above 0, got 0.0"),
    ("survey.eagle train --out /no/such/x --max-new-tokens 0",
     "--max-new-tokens must be 1 or more, got 0"),
    ("survey.sequoia --nodes 1", "--nodes must be 2 to 128, or 0, got 1"),
    ("survey.sequoia --nodes 129", "--nodes must be 2 to 128, or 0, got 129"),
    ("survey.sequoia --depth -1", "--depth must be 1 to 127, or 0, got -1"),
    ("survey.sequoia --depth 128", "--depth must be 1 to 127, or 0, got 128"),
    ("survey.rest --nodes -1", "--nodes must be 0 or more, got -1"),
    ("survey.rest --longest 0", "--longest must be 1 to 16, got 0"),
    ("survey.rest --longest 17", "--longest must be 1 to 16, got 17"),
    ("survey.rest --alpha -1", "--alpha must be 0 or more, got -1.0"),
    ("survey.rest --alpha nan", "--alpha must be 0 or more, got nan"),
    ("survey.rest --datastore {odd}/none", "expected a file of a REST datastore, got '{odd}/none'"),
    ("survey.rest build --out /no/such/x --max-new-tokens -1",
     "--max-new-tokens must be 1 or more, got -1"),
    ("survey.hybrid --guess rest", "--guess must be none, medusa, hydra, eagle, got rest"),
    ("survey.hybrid --nodes 65", "--nodes must be 1 to 64, or 0, got 65"),
    ("survey.hybrid --nodes -1", "--nodes must be 1 to 64, or 0, got -1"),
    ("survey.hybrid --trust {odd}/none", "expected a file … made for this model"),
    ("survey.hybrid --datastore {odd}/none", "expected a file of a REST datastore, got"),
    ("survey.hybrid --adapter {odd}/none", "expected a file of"),
    ("survey.masks --L -1", "--L must be 1 to 5, or 0, got -1"),
    ("survey.masks --L 9", "--L must be 1 to 5, or 0, got 9"),
    ("survey.masks --tokens {odd}/none", "expected"),
    ("survey.masks --tokens models/bita.safetensors",
     "--tokens must be a file without prompt tokens, got"),
    ("survey.masks --method space --k -1", "--k must be 1 or more, or 0, got -1"),
    ("survey.masks --method space --tuning {odd}/none", "expected a file of a SPACE tuning, got"),
    ("survey.masks tune --out /no/such/x --rank 0", "--rank must be 1 or more, got 0"),
    ("survey.masks tune --out /no/such/x --k 0", "--k must be 1 or more, got 0"),
]


@pytest.mark.parametrize("line, said", REFUSED, ids=[line[:60] for line, _ in REFUSED])
def test_wrong_input_is_one_line_and_status_2(line, said, odd, capsys):
    """Before anything is printed, the three example prompts included."""
    names = {"odd": odd, "long": LONG}
    name, *argv = [word.format(**names) for word in shlex.split(line)]
    err = wrong_line(capsys, script(name, *argv))
    assert all(words in err for words in said.format(**names).split(" … ")), err


DRAFTLESS = [(name, method) for name, method in METHODS if "draft" not in
             inspect.signature(getattr(importlib.import_module(name), method)).parameters]


@pytest.mark.parametrize("name, method", DRAFTLESS)
def test_a_draft_for_a_method_that_takes_none(name, method, capsys, monkeypatch):
    """Also one that there is; before any model is loaded."""
    monkeypatch.setattr("cli.loading.load", None)
    draft = str(ROOT / "models/draft")
    err = wrong_line(capsys, script(name, "--method", method, "--draft", draft))
    assert err == f"{name}.py: --draft is no option of {method}, got {draft!r}\n"


def test_a_hub_that_cannot_be_reached(capsys, monkeypatch):
    """It is asked before anything is loaded, but not for what is a directory or cached."""
    asked, loads = [], []

    def away(url, timeout):
        asked.append((url, timeout < 30))
        raise OSError("no route\nto host")

    def load_none(path, device, dtype):
        loads.append((path, device, dtype))
        raise InputError("loaded")
    monkeypatch.setattr("cli.loading.load", load_none)
    monkeypatch.setattr("cli.loading.get_session", lambda: SimpleNamespace(head=away))
    argv = ["--prompt", SHORT, "--device", "cpu", "--dtype", "bfloat16", "--target"]
    err = wrong_line(capsys, run(*argv, "nope/model"))
    assert "directory or hub id that can be reached, got 'nope/model': no route to host\n" in err
    assert asked == [(constants.ENDPOINT, True)] and loads == []
    assert "loaded" in wrong_line(capsys, run(*argv, str(ROOT / "models/target")))
    monkeypatch.setattr("cli.loading.try_to_load_from_cache",
                        lambda path, file: f"/hub/{path}/{file}")
    assert "loaded" in wrong_line(capsys, run(*argv, "nope/model")) and len(asked) == 1
    monkeypatch.setattr("cli.loading.try_to_load_from_cache", lambda path, file: None)
    there = SimpleNamespace(head=lambda url, timeout: None)
    monkeypatch.setattr("cli.loading.get_session", lambda: there)
    assert "loaded" in wrong_line(capsys, run(*argv, "nope/other"))
    assert loads == [(path, "cpu", "bfloat16")
                     for path in (str(ROOT / "models/target"), "nope/model", "nope/other")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_is_one_line_and_status_2(capsys):
    err = wrong_line(capsys, run("--prompt", PROMPT, "--device", "cuda"))
    assert "expected a model directory or hub id that cuda can load" in err
    assert "CUDA" in err or "NVIDIA" in err


def test_stdin_that_is_no_text(capsys, monkeypatch):
    stdin(monkeypatch, b"caf\xe9")
    err = wrong_line(capsys, run("--prompt", "-"))
    assert "--prompt - must be UTF-8 text, got byte 0xe9 at position 3" in err
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input, which is closed" in wrong_line(capsys, run("--prompt", "-"))
    stdin(monkeypatch, b"")
    assert "a prompt with some text" in wrong_line(capsys, run("--prompt", "-"))
    stdin(monkeypatch, SHORT.encode())  # it can be read once
    err = wrong_line(capsys, run("--prompt", "-", "--prompt", "-"))
    assert "a prompt with some text" in err


# --------------------------------------------------------------------------- right input

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Random models that take no time, with the embedded tokenizer, and a tuning of the target."""
    top = tmp_path_factory.mktemp("small")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/target")
    target = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)
    for name, model in ("target", target), ("cllm", target), ("draft", near(target, 0.02)):
        model.save_pretrained(top / name)
        tokenizer.save_pretrained(top / name)
    bita.save_tuning(top / "bita.safetensors", bita.Tuning(bita.shape_of(target), P=4), target)
    return top


@pytest.fixture
def quick(small, monkeypatch):
    """The small models take the place of the embedded ones: a run of a method file."""
    def of(path: str, *how):
        path = Path(path)
        return loaded(str(small / path.name if path.parent == ROOT / "models" else path), *how)

    def quick(name: str, *argv) -> int:
        own = ["--adapter", str(small / "bita.safetensors")] if name == "bita" else []
        return script(name, *own, *argv)
    monkeypatch.setattr("cli.loading.load", of)
    return quick


ACCEPTED = [  # command lines with values at the ends of what each option takes
    "speculative --gamma 4 --temperature 3 --top-k 100000 --top-p 0.3 --seed " + "9" * 30,
    "speculative --gamma 1 --temperature 0.7 --top-k 5 --top-p 1 --seed -7 --show never",
    "speculative --dtype bfloat16 --device cpu --show --graphs --compare",
    "survey.several_drafts --K 1 --gamma 1",
    "survey.several_drafts --method spectr --K 2 --temperature 1 --graphs",
    "survey.lossy --fallback 0 --rollback 0", "survey.lossy --fallback 2 --rollback inf",
    "survey.lossy --method specdec --beta 1 --tau 0 --compare",
    "survey.lossy --method specdec --beta 2000 --tau inf --temperature 1",
    "jacobi --n 2 --temperature 1", "jacobi --n 16 --show always --compare",
    "jacobi --method lookahead --W 1 --N 2 --G 1 --no-prompt-ngrams",
    "jacobi --method lookahead --W 0 --N 4 --G 5 --prompt-ngrams --temperature 1",
    "ouroboros --W 1 --beta 2 --K 1 --G 1 --no-phrases --no-lengthen --no-history",
    "ouroboros --W 3 --beta 4 --K 3 --no-verification --temperature 1",
    "mjsd --beams 2 --width 1 --tau 0", "mjsd --beams 8 --width 2 --tau 7 --temperature 1",
    "mjsd --method mjgd --K 3 --beams 4 --temperature 0",
    "bita --tree efficient --temperature 1", "bita --tree full --k 0", "bita --tree chain --graphs",
    "cllm --n 2 --compare", "cllm --n 16 --temperature 1 --dtype bfloat16"]


@pytest.mark.parametrize("line", ACCEPTED)
def test_right_options_are_taken(line, quick, capsys):
    name, *argv = line.split()
    assert quick(name, *argv, "--prompt", "cakes", "--max-new-tokens", "6") == 0
    assert " tokens per call); of the time target" in capsys.readouterr().err


# ---------------------------------------------------------------------- several draft models

def test_several_drafts(quick, small, capsys):
    """A share of the time and a cache for each, on all prompts; AR has neither. Text as AR's."""
    drafts = ["--draft", str(small / "draft"), "--draft", str(ROOT / "models/target")]
    argv = [*drafts, "--prompt", SHORT, "--prompt", "cakes", "--max-new-tokens", "12", "--gamma",
            "3", "--compare"]
    assert quick("survey.several_drafts", *argv) == 0
    figures, kept, ar, end = capsys.readouterr().err.splitlines()[2:]
    shares = re.search(r"of the time target (\d+)%, draft (\d+)%, draft 2 (\d+)%$", figures)
    assert 50 < sum(map(int, shares.groups())) <= 101 and min(map(int, shares.groups())) > 0
    assert "24 tokens" in figures and "6 target calls (4.00 tokens per call)" in figures
    assert kept.endswith("; 36 draft calls")  # 3 of each model a round: the second is the target
    assert re.search(r"of the time target \d+%$", ar)
    assert end.endswith("; output equals autoregressive output")
    wrong = quick("survey.several_drafts", *argv, "--draft", str(small / "draft"))
    assert "--K must be 3 or more with 3 drafts, got 2" in wrong_line(capsys, wrong)
    assert quick("survey.several_drafts", *argv, "--draft", str(small / "draft"), "--K", "3") == 0
    assert re.search(r"draft \d+%, draft 2 \d+%, draft 3 \d+%\n", capsys.readouterr().err)


def test_every_draft_has_the_targets_tokens(quick, small, odd, capsys, tmp_path):
    """Its tokenizer's, and as many logits: a tokenizer may know more tokens than its model has."""
    drafts = ["--draft", str(small / "draft"), "--draft", str(odd / "tokenizer")]
    status = quick("survey.several_drafts", *drafts, "--prompt", SHORT)
    assert "a draft with the target's tokenizer, got another" in wrong_line(capsys, status)
    tokenizer = AutoTokenizer.from_pretrained(small / "draft")
    tiny("llama", vocab_size=len(tokenizer) - 7).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for method in ("speculative", "mjsd", "ouroboros"):
        wrong = quick(method, "--draft", str(tmp_path), "--prompt", SHORT)
        assert "logits of the target's 1536 tokens, got 1529" in wrong_line(capsys, wrong)


# ------------------------------------------------------------------------------- tuning

def test_tune_finds_the_fastest(capsys, clock):
    """One option after the other, the best of three runs each: a slow run is chance. Options given
    stay, and one that is searched begins with what was given."""
    seen, seconds = [], {2: (9, 1, 9), 3: (2, 2, 2), 5: (9, 9, 9)}

    def tunable(target, prompt, *, gamma: int = 5, K: int = 1, width: int = 0, sample=None,
                log=None):
        """gamma, K, width: numbers"""
        seen.append((gamma, K, width))
        clock[0] += seconds[gamma][len(seen) % 3] * {1: 1, 2: 0.5, 4: 2}[K]
        yield from saying([[7, 7]] * 9)(target, prompt)
    special = {"method": tunable, "ranges": {"gamma": (3, 2, 5), "beta": (1, 2), "K": (1, 2, 4)}}
    argv = ["--prompt", SHORT, "--max-new-tokens", "4"]
    assert run(*argv, "--tune", **special) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.splitlines() == [
        "--gamma 3: 2.0 tokens/s", "--gamma 2: 4.0 tokens/s", "--gamma 5: 0.4 tokens/s",
        "--K 1: 4.0 tokens/s", "--K 2: 8.0 tokens/s", "--K 4: 2.0 tokens/s",
        "fastest: --gamma 2 --K 2"]
    tried = [(3, 1), (2, 1), (5, 1), (2, 1), (2, 2), (2, 4)]
    assert seen == [(5, 1, 0), *((gamma, K, 0) for gamma, K in tried for _ in range(3))]
    seen.clear()
    assert run(*argv, "--tune", "--K", "4", "--width", "7", **special) == 0
    tried = [(3, 4), (2, 4), (5, 4), (2, 1), (2, 2), (2, 4)]
    assert seen == [(5, 4, 7), *((gamma, K, 7) for gamma, K in tried for _ in range(3))]
    assert capsys.readouterr().out.splitlines()[-1] == "fastest: --gamma 2 --K 2"


QUICK = {line.split()[0] for line in ACCEPTED}


@pytest.mark.parametrize("name, method", [x for x in METHODS if x[0] in QUICK])
def test_tuned_options_are_accepted(quick, capsys, name, method):
    argv = ["--prompt", SHORT, "--max-new-tokens", "1", "--method", method]
    assert quick(name, *argv, "--tune") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    tried = re.findall(r"^(--\w+ \S+): [\d.]+ tokens/s$", "\n".join(lines), re.M)
    assert len(tried) == len(lines) == len({*tried}) >= 4
    kind, *fastest = last.split()
    assert kind == "fastest:" and len(fastest) >= 2
    assert {*map(" ".join, zip(fastest[::2], fastest[1::2]))} <= {*tried}
    assert quick(name, *argv, *fastest) == 0


def test_tune_leaves_out_values_that_do_not_go_with_the_others(quick, small, capsys):
    """A K that leaves a model without a draft; any of an option that goes with no other."""
    argv = ["--tune", "--prompt", "Tom", "--max-new-tokens", "1"]
    drafts = ["--draft", str(small / "draft")] * 2
    assert quick("survey.several_drafts", *drafts, *argv) == 0
    tried = re.findall(r"^--K (\d)", capsys.readouterr().out, re.M)
    assert tried == ["2", "3", "4"]
    for name, own in ("mjsd", "--width 2"), ("jacobi", "--method lookahead --no-prompt-ngrams"):
        assert quick(name, *own.split(), *argv) == 0
        assert "fastest: " in capsys.readouterr().out


# ----------------------------------------------------------------------------- commands

def test_commands(capsys, tmp_path):
    """Functions (model, tokenizer, **options): their options alone are theirs, and the prompts
    where they take them."""
    given = []

    def learn(model, tokenizer, *, out: Path, work: Path = None, name: str = "x",
              rate: float = 0.5, local: bool = False, gamma: int = 3, other=None, prompts):
        """out: what to make"""
        given.append((model, prompts, out, work, name, rate, local, gamma))

    def count(model, tokenizer, *, size: int, max_new_tokens: int = 9):
        given.append((size, max_new_tokens))
        return 1

    def command(line: str) -> int:
        return run(*line.split(), commands=[learn, count])
    file = tmp_path / "prompts.txt"
    file.write_text(f"{SHORT}\n{PROMPT}\n")
    assert command(f"learn --out a/b --prompts {file}") == 0
    assert command("learn --out a/b --work w --name 5 --rate 2 --local --gamma -4 "
                   "--dtype bfloat16") == 0
    model, tokenizer = loaded(str(ROOT / "models/target"), None, "float32")
    half, _ = loaded(str(ROOT / "models/target"), None, "bfloat16")
    prompts = [[encode(tokenizer, text) for text in texts] for texts in ([SHORT, PROMPT], PROMPTS)]
    assert given == [(model, prompts[0], Path("a/b"), None, "x", 0.5, False, 3),
                     (half, prompts[1], Path("a/b"), Path("w"), "5", 2.0, True, -4)]
    assert model.dtype == torch.float32 and half.dtype == torch.bfloat16
    assert command("count --size 5 --max-new-tokens 2") == 1 and given[2:] == [(5, 2)]
    capsys.readouterr()
    for line, said in (
            ("learn", "the following arguments are required: --out"),
            ("count --size 5 --prompts x", "unrecognized arguments: --prompts x"),
            ("count --size 5 --chat", "unrecognized arguments: --chat"),
            ("count --size 5.5", "invalid int value: '5.5'"),
            ("learn --out x --other y", "unrecognized arguments: --other y"),
            ("learn --out x --draft y", "unrecognized arguments: --draft y"),
            ("learn --out x --prompts /no/such", "a file of prompts"),
            ("learn --out x --target /no/such", "hub id that can be reached, got '/no/such'"),
            ("learn --out x --chat", "a chat template for --chat"),
            ("--gamma 3 learn", "unrecognized arguments: learn"),
            ("teach", "unrecognized arguments: teach")):
        assert said in wrong_line(capsys, command(line)), line
    assert len(given) == 3
    assert command("learn --help") == 0
    out = capsys.readouterr().out
    assert "out: what to make" in out and "--no-local" in out and "--gamma" in out
    assert out.startswith("usage: python test_cli.py learn [options]\n")
    assert "--compare" not in out and "tokens drafted a round" not in out
    assert command("count --help") == 0 and "--prompts" not in capsys.readouterr().out
    assert command("--help") == 0
    assert "python speculative.py count --help\n" in capsys.readouterr().out
    assert command("--prompt Tom --gamma 2 --max-new-tokens 2") == 0


# -------------------------------------------------------------------------- interruptions

def stopping(n: int):
    """A method that Ctrl-C stops before its n-th chunk, over all prompts."""
    left = [n]

    def stopped(target, prompt, *, gamma: int = 1, sample=None, log=None):
        for chunk in autoregressive(target, prompt):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            yield chunk
    return stopped


@pytest.mark.parametrize("n, texts, tokens", [(1, 1, 0), (1, 2, 0), (4, 2, 3), (3, 2, 2),
                                              (2, 1, 1)])
def test_interrupted_in_the_middle(capsys, n, texts, tokens):
    """Ctrl-C before any chunk, before the first of the second prompt, and later: what is there
    stays, its figures come where there is a token, and the status is 130."""
    argv = ["--prompt", SHORT, "--prompt", "Tom has"][:2 * texts]
    how = {"method": stopping(n), "report": lambda run: f"report of {run.tokens}"}
    assert run(*argv, "--max-new-tokens", "2", **how) == 130
    out, err = capsys.readouterr()
    assert err.endswith("\ninterrupted\n") and "Traceback" not in err
    assert (f"stopped: {tokens} tokens in" in err) == (f"report of {tokens}" in err) == (tokens > 0)
    assert ("Tom has" in err) == (n == 4) and ("apples" in err) == (texts > 1 and n > 1)
    assert (out == "") == (tokens == 0)


def test_interrupted_while_loading_comparing_and_tuning(capsys, monkeypatch):
    few = ["--prompt", SHORT, "--max-new-tokens", "2"]
    tuning = {"method": stopping(9), "ranges": {"gamma": (1, 2)}}  # 2 to warm up, then 6
    assert run(*few, "--tune", **tuning) == 130
    out, err = capsys.readouterr()
    assert out.startswith("--gamma 1: ") and out.count("\n") == 1 and err == "\ninterrupted\n"

    def stop(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(Run, "find_difference", stop)
    assert run(*few, "--compare") == 130
    assert "speculative: 2 tokens" in capsys.readouterr().err
    monkeypatch.setattr("cli.loading.load", stop)
    assert run(*few) == 130 and capsys.readouterr() == ("", "\ninterrupted\n")


# ------------------------------------------------------------------------ other processes

SCRIPTS = """
import runpy, sys
prompt, folder = sys.argv[1], sys.path[0]
for argv in (["speculative.py", "--help"], ["bita.py", "--help"], ["speculative.py", "--show"],
             ["speculative.py", "--prompt", prompt, "--prompt", "-", "--max-new-tokens", "8",
              "--trace", "page.html"]):
    sys.argv = argv
    try:
        runpy.run_path(folder + "/" + argv[0], run_name="__main__")
    except SystemExit as end:
        print(f"status {end.code}", flush=True)
"""


def test_scripts_in_a_folder_with_an_odd_name_and_a_locale_of_ascii(tmp_path):
    """The folder's name has signs that formats might read. --help prints the module's docstring and
    the methods'; `python speculative.py` alone decodes the examples; a prompt with any characters
    is the same as an argument and on standard input."""
    top, prompt = tmp_path / "100% %s %(prog)s {x}", "Zoë counts 漢字 🙂"
    (top / "models").mkdir(parents=True)
    shutil.copytree(ROOT / "cli", top / "cli")
    for name in ("common.py", "speculative.py", "bita.py", "models/tasks.py",
                 "models/examples.jsonl"):
        shutil.copy(ROOT / name, top / name)
    for name in ("target", "draft"):
        (top / "models" / name).symlink_to(ROOT / "models" / name)
    (top / "scripts.py").write_text(SCRIPTS)
    ascii = dict(LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = subprocess.run([sys.executable, top / "scripts.py", os.fsencode(prompt)], cwd=tmp_path,
                          input=prompt.encode(), capture_output=True, env=os.environ | ascii)
    errors = done.stderr.decode()
    assert done.returncode == 0 and "tokens per call" in errors, errors
    first, second, text, answers, end = done.stdout.decode().split("status 0\n")
    for doc in sys.modules["speculative"].__doc__, speculative.__doc__:
        assert all(line.strip() in first for line in doc.splitlines())
    assert "prompt and mask tokens" in second and str(top) in second and "--adapter" in second
    assert "SELECT" in text and "####" in text and "return" in text and "\033[32m" in text
    one, other = answers[:len(answers) // 2], answers[len(answers) // 2:]
    assert one == other != "" and errors.count(prompt) == 2 and end == ""
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    said = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"][0]["said"]
    assert "".join(said).removeprefix("<s>").startswith(prompt)


@pytest.mark.parametrize("name, option", [("speculative", "--gamma"), ("survey.lossy", "--tau")])
def test_help_without_docstrings(name, option, capsys, monkeypatch):
    """As under `python -OO`."""
    file = ROOT / f"{name.replace('.', '/')}.py"
    code = compile(file.read_text(), name, "exec", optimize=2)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        exec(code, {"__name__": "__main__", "__file__": str(file)})
    out, err = capsys.readouterr()
    assert end.value.code == 0 and err == "" and "Yields chunks" not in out and option in out


def test_ctrl_c_leaves_what_was_decoded_the_figures_and_status_130():
    process, _, out, err = fork(script, "speculative", *["--prompt", PROMPT] * 500)
    first = out.readline(), out.readline()
    os.kill(process.pid, signal.SIGINT)
    out.read()
    errors = err.read()
    process.join(120)
    assert all(first) and process.exitcode == 130 and "Traceback" not in errors
    assert "interrupted" in errors and "tokens per call" in errors


def test_a_closed_pipe_ends_quietly():
    """As before `| head -c 5`."""
    process, _, out, err = fork(script, "speculative", *["--prompt", PROMPT] * 500)
    assert out.read(5)
    out.close()
    errors = err.read()
    process.join(120)
    assert process.exitcode == -signal.SIGPIPE and errors.replace(PROMPT, "").isspace()
