"""The command line: what goes where, and wrong input."""
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import common
from common import CachedLM, autoregressive, encode, eos_ids, main
from conftest import ROOT, tokens_of
from speculative import report, speculative

PROMPT = common.PROMPTS[1]


def run(*argv):
    return main([speculative], report, list(argv))


def stdin(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_text_on_stdout_and_figures_on_stderr(capsys, embedded):
    target, _, tokenizer = embedded
    assert run("--prompt", PROMPT, "--compare") == 0
    out, err = capsys.readouterr()
    expected = tokens_of(autoregressive(CachedLM(target, 400), encode(tokenizer, PROMPT)), 256, eos_ids(target, tokenizer))
    assert out == tokenizer.decode(expected, skip_special_tokens=True) + "\n" and "\033" not in out
    for figure in ("tokens/s", "tokens per call", "target calls", "draft calls", "acceptance rate", "predicted", "speed-up", "equals autoregressive output"):
        assert figure in err
    assert f"speculative: {len(expected)} tokens" in err and f"autoregressive: {len(expected)} tokens" in err


def test_show_colours_guessed_tokens(capsys):
    run("--prompt", PROMPT)
    plain = capsys.readouterr().out
    run("--prompt", PROMPT, "--show")
    coloured = capsys.readouterr().out
    assert "\033[32m" in coloured and re.sub(r"\033\[\d+m", "", coloured) == plain


def test_several_prompts_and_stdin(capsys, monkeypatch):
    run("--prompt", PROMPT)
    one = capsys.readouterr().out
    stdin(monkeypatch, PROMPT.encode())
    assert run("--prompt", "-", "--prompt", PROMPT) == 0
    assert capsys.readouterr().out == one + one


def test_limits_seeds_and_temperature(capsys):
    outs = []
    for more in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--seed", "3"]):
        assert run("--prompt", PROMPT, "--temperature", "4", "--max-new-tokens", "40", "--top-k", "50", "--top-p", "0.95", *more) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] and len(set(outs)) > 1
    run("--prompt", PROMPT, "--max-new-tokens", "1")
    assert "speculative: 1 tokens in" in capsys.readouterr().err


def test_compare_in_half_precision_reports_a_difference_without_failing(capsys, monkeypatch):
    assert run("--prompt", PROMPT, "--compare", "--dtype", "bfloat16") == 0

    def wrong(target, draft, prompt, *, sample=None, log=None):
        for chunk in autoregressive(target, prompt):
            yield [chunk[0] + (target.length > len(prompt))]
    capsys.readouterr()
    assert main([wrong], None, ["--prompt", PROMPT, "--compare", "--dtype", "bfloat16"]) == 0
    assert "differs from autoregressive output at token 2, where the target's two largest logits are" in capsys.readouterr().err
    assert main([wrong], None, ["--prompt", PROMPT, "--compare"]) == 1


def test_the_end_of_the_context(capsys, tmp_path):
    """A prompt that leaves room for 20 tokens."""
    model, folder = AutoModelForCausalLM.from_pretrained(ROOT / "models/draft"), tmp_path / "short"
    prompt = len(encode(AutoTokenizer.from_pretrained(ROOT / "models/draft"), PROMPT))
    model.config.max_position_embeddings = prompt + 20
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "models/draft").save_pretrained(folder)
    assert run("--prompt", PROMPT, "--draft", str(folder), "--compare") == 0
    err = capsys.readouterr().err
    assert "speculative: 20 tokens" in err and f"stopped at the end of the context of {prompt + 20} tokens" in err


def test_chat(capsys, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for name in ("target", "draft"):
        shutil.copytree(ROOT / "models" / name, tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        tokenizer.chat_template = "<s>" + template
        tokenizer.save_pretrained(tmp_path / name)
    run("--prompt", PROMPT)
    plain = capsys.readouterr().out
    assert run("--prompt", PROMPT, "--chat", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")) == 0
    assert capsys.readouterr().out == plain


def test_methods_and_their_options(capsys):
    def other(target, draft, prompt, *, width: int = 3, sample=None, log=None):
        """width: a number"""
        yield from autoregressive(target, prompt)
    assert main([speculative, other], None, ["--prompt", PROMPT, "--method", "other", "--width", "4"]) == 0
    capsys.readouterr()
    assert main([speculative, other], None, ["--prompt", PROMPT, "--method", "other", "--gamma", "4"]) == 2
    assert capsys.readouterr().err.strip().endswith("expected --gamma with --method speculative, got --method other")
    with pytest.raises(SystemExit) as end:
        main([speculative, other], None, ["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert re.search(r"--gamma GAMMA\s+tokens drafted a round", out) and "a number" in out


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Directories that are no usable models: empty, a broken file, another tokenizer, ALiBi."""
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
    return top


WRONG = [
    (["--target", "no/such/model"], "model directory or hub id, got 'no/such/model'"),
    (["--target", "/no/such/model"], "model directory or hub id, got '/no/such/model'"),
    (["--draft", "no such model"], "model directory or hub id, got 'no such model'"),
    (["--target", "{odd}/empty"], "model directory or hub id, got '{odd}/empty'"),
    (["--target", "{odd}/file"], "model directory or hub id, got '{odd}/file'"),
    (["--draft", "{odd}/broken"], "model directory or hub id, got '{odd}/broken'"),
    (["--target", "{odd}/unknown"], "model directory or hub id, got '{odd}/unknown'"),
    (["--draft", "{odd}/tokenizer"], "a draft with the target's tokenizer, got vocabularies"),
    (["--prompt", ""], "a prompt with some text, got ''"),
    (["--prompt", "<s></s>"], "a prompt with some text, got '<s></s>'"),
    (["--prompt", "caf\udce9"], "a prompt in UTF-8"),
    (["--prompt", "count the apples " * 1000], "shorter than the context of 2048 tokens, got"),
    (["--prompt", "-", "--prompt", "-"], "- once"),
    (["--gamma", "0"], "gamma of 1 or more, got 0"),
    (["--gamma", "-3"], "gamma of 1 or more, got -3"),
    (["--gamma", "many"], "argument --gamma: invalid int value: 'many'"),
    (["--temperature", "-0.1"], "a temperature of 0 (greedy) or more, got -0.1"),
    (["--temperature", "nan"], "a temperature of 0 (greedy) or more, got nan"),
    (["--top-p", "0"], "top-p above 0 and at most 1, got 0.0"),
    (["--top-p", "1.5"], "top-p above 0 and at most 1, got 1.5"),
    (["--top-k", "-1"], "top-k of 0 (off) or more, got -1"),
    (["--max-new-tokens", "0"], "--max-new-tokens of 1 or more, got 0"),
    (["--dtype", "int3"], "dtype of float32, bfloat16 or float16, got 'int3'"),
    (["--device", "tpu"], "a device of cpu, cuda, cuda:N or auto, got 'tpu'"),
    (["--chat"], "a chat template for --chat"),
    (["--beams", "3"], "unrecognized arguments: --beams 3"),
    (["--show", "sometimes"], "invalid choice: 'sometimes'"),
]


@pytest.mark.parametrize("argv, said", WRONG, ids=[" ".join(a)[:30] for a, _ in WRONG])
def test_wrong_input_is_one_line_and_status_2(argv, said, odd, capsys):
    argv = [a.replace("{odd}", str(odd)) for a in argv]
    assert run(*(argv if "--prompt" in argv else ["--prompt", PROMPT, *argv])) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said.replace("{odd}", str(odd)) in err, err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_is_one_line_and_status_2(capsys):
    assert run("--prompt", PROMPT, "--device", "cuda") == 2
    assert capsys.readouterr().err.strip().endswith("expected a device that is there, got 'cuda' with 0 CUDA devices")


def test_stdin_that_is_not_utf_8(capsys, monkeypatch):
    stdin(monkeypatch, b"caf\xe9")
    assert run("--prompt", "-") == 2
    assert "standard input in UTF-8" in capsys.readouterr().err
    stdin(monkeypatch, b"")
    assert run("--prompt", "-") == 2
    assert "a prompt with some text" in capsys.readouterr().err


def test_the_script_bare_and_interrupted():
    """`python speculative.py` needs no arguments; Ctrl-C leaves what was decoded, the figures and status 130."""
    done = subprocess.run([sys.executable, ROOT / "speculative.py", "--show"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "SELECT" in done.stdout and "####" in done.stdout and "return" in done.stdout and "tokens per call" in done.stderr
    process = subprocess.Popen([sys.executable, ROOT / "speculative.py"] + ["--prompt", PROMPT] * 500, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # where a background job ignores it
    process.stdout.readline()
    first = process.stdout.readline()
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert first and process.returncode == 130 and "interrupted" in err and "tokens per call" in err and "Traceback" not in err


def test_a_closed_pipe_ends_quietly():
    process = subprocess.Popen(f"{sys.executable} {ROOT / 'speculative.py'} --prompt '{PROMPT}' | head -c 5", shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=60)
    assert len(out) == 5 and "Traceback" not in err and "Broken" not in err
