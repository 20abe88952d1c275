"""The simulated GPU of fake_cuda.py refuses what CUDA refuses, and every training runs on it for
two steps. Every method runs on it in test_lossless.py."""
import copy
import inspect

import pytest
import torch
from transformers import AutoTokenizer

import bita
import cllm
import common
import speculative
import train
from bench import Ours
from cli.graphs import capture
from cli.run import TimedLM
from common import InputError, Sampler, autoregressive
from fake_cuda import FakeCuda
from families import tiny
from gpu_dry import count
from helpers import ROOT, main
from survey import (dflash, draft_verify, eagle, eagle3, early_exit, hybrid, layerskip, masks,
                    medusa, online, rest, sequoia)
from training.loop import Settings, use_settings


# -------------------------------------------------------------------------- what CUDA refuses

def on_both() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(3.0), torch.arange(3.0, device="cuda")


def in_a_capture(function):
    return capture(function, (torch.arange(3.0, device="cuda"),))


REFUSED = {
    "a sum": lambda here, there: here + there,
    "a table and its index": lambda here, there: here[there.long()],
    "numbers that are put": lambda here, there: there.index_put_((there.long(),), here),
    "searching": lambda here, there: torch.searchsorted(there, here),
    "a layer": lambda here, there: torch.nn.Linear(3, 3)(there),
    "numpy": lambda here, there: there.numpy(),
    "the CPU's generator": lambda here, there: there.uniform_(generator=torch.Generator()),
    "the GPU's generator": lambda here, there: here.uniform_(generator=torch.Generator("cuda")),
    "an item in a capture": lambda here, there: in_a_capture(lambda x: x * x[0].item()),
    "a list in a capture": lambda here, there: in_a_capture(lambda x: x * x.new_tensor([2.0])),
    "a mask in a capture": lambda here, there: in_a_capture(lambda x: x[x > 1]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses(name):
    with FakeCuda(), pytest.raises((RuntimeError, TypeError, InputError),
                                   match="cuda|cpu|capturing"):
        REFUSED[name](*on_both())


def test_what_cuda_takes_and_what_is_counted():
    with FakeCuda() as gpu:
        here, there = on_both()
        assert there.device == torch.device("cuda:0") and there[1:].is_cuda and not here.is_cuda
        gpu.counts.clear()
        assert (there * 2).tolist() == [0, 2, 4]  # a kernel, and the wait for three numbers
        assert (there + torch.tensor(1.0)).device.type == "cuda"  # a single number
        assert there[torch.tensor([2, 0])].device.type == "cuda"  # an index is copied
        there[1:] = here[1:].to("cuda")  # copied by `to`; then a kernel copies on the GPU
        assert gpu.counts == {"launches": 4, "waits": 1, "copies": 2}
        assert not there.cpu().is_cuda and copy.deepcopy(there).is_cuda


def test_a_replay_is_blind_to_what_is_no_input():
    with FakeCuda() as gpu:
        numbers = [2.0]
        replay = in_a_capture(lambda x: x * numbers[0] + 1)
        numbers[0] = 3.0
        assert replay(torch.ones(3, device="cuda")).tolist() == [3, 3, 3]
        assert gpu.counts["replays"] == 1


# ----------------------------------------------------------------------------------- trainings

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that is a tiny Llama with the embedded tokenizer, where trainings work."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/target")
    tiny("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_tiny(folder):
    return common.load(str(folder), "cuda", "float32")


TRAININGS = {  # a command, and its options besides those of all
    "bita train": (bita.train, dict(P=2, M=2, anchors=4)),
    "medusa train": (medusa.train, dict(K=2)),
    "hydra train, few tokens": (medusa.train, dict(K=2, heads="hydra", vocab=9)),
    "eagle train": (eagle.train, {}),
    "eagle train, few tokens": (eagle.train, dict(vocab=9)),
    "eagle3 train": (eagle3.train, dict(taps="0,1", passes=2, vocab=9)),
    "dflash train": (dflash.train, dict(taps="0,1", B=3, markov=4, anchors=3)),
    "dflash train, few tokens": (dflash.train, dict(layers=1, vocab=9, loss="tv", causal=True,
                                                    markov=0, anchors=3)),
    "early_exit train": (early_exit.train, dict(E=1, width=8)),
    "layerskip tune": (layerskip.tune, dict(E=1, rank=2)),
    "masks train": (masks.train, dict(L=2, anchors=4)),
    "masks tune": (masks.tune, dict(k=2, rank=2, anchors=4)),
    "cllm collect": (cllm.collect, dict(n=4)),
    "cllm train": (cllm.train, dict(states=2)),
    "cllm train, low rank": (cllm.train, dict(states=2, rank=1)),
    "draft_verify search": (draft_verify.search, {}),
    "rest build": (rest.build, {}),
    "hybrid fit": (hybrid.fit, {}),
    "sequoia calibrate": (sequoia.calibrate, {}),
    "online serve": (online.serve, dict(every=1, gamma=2)),
    "online boost": (online.boost, {}),
}
NEEDS = {"cllm train": ("data", "cllm collect"),
         "cllm train, low rank": ("data", "cllm collect"),
         "hybrid fit": ("datastore", "rest build")}
FEW = dict(steps=2, batch=2, lr=1e-3, max_new_tokens=6)  # for commands that have these options


def run(name: str, folder, work=None) -> None:
    """Run a training with little of everything, on a tiny model that is loaded onto the GPU."""
    command, options = TRAININGS[name]
    work = work or folder
    known = inspect.signature(command).parameters
    given = FEW | dict(out=work / name, work=work / "work", draft=str(folder), adapters=str(work))
    options = {key: value for key, value in given.items() if key in known} | options
    if name in NEEDS:
        key, before = NEEDS[name]
        run(before, folder, work)
        options[key] = work / before
    if "prompts" in known:
        options["prompts"] = [[5 * i, 7, 9 + i] for i in range(1, 4)]
    with use_settings(Settings(recompute=True)):
        command(*load_tiny(folder), **options)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_runs_on_the_simulated_gpu(name, folder, tmp_path, monkeypatch):
    """It makes two steps, and whatever comes before and after them."""
    monkeypatch.setattr(sequoia, "TOKENS", 4)
    with FakeCuda() as gpu:
        run(name, folder, tmp_path)
    assert gpu.counts["launches"] > 100 and (tmp_path / name).exists()


def test_models_are_made_and_loaded_on_the_simulated_gpu(folder):
    """transformers loads nothing under a default device of cuda, so none is set."""
    with FakeCuda():
        model, tokenizer = load_tiny(folder)
        assert model.device.type == train.load(folder, "cuda").device.type == "cuda"
        assert train.make_model("draft", tokenizer, "cuda").device.type == "cuda"


def test_a_draft_is_distilled_on_the_simulated_gpu(folder, tmp_path):
    prompts = [[5 + i, 9, 30] for i in range(4)]
    with FakeCuda() as gpu:
        train.distil(*load_tiny(folder), prompts, layers=[0], out=tmp_path / "out", work=tmp_path,
                     steps=2, batch=2, max_new_tokens=6)
    assert gpu.counts["launches"] > 100 and (tmp_path / "out").exists()


# ---------------------------------------------------------------------------- command lines

@pytest.mark.parametrize("graphs", [["--no-graphs"], []], ids=["eager", "graphs"])
def test_a_command_line_runs_on_the_simulated_gpu(graphs, folder, capsys):
    """The GPU is the default where there is one. --compare fails if AR writes another text."""
    argv = ["--target", folder, "--draft", folder, "--dtype", "float32", "--prompt", "Tom has 3",
            "--max-new-tokens", "5", "--compare", *graphs]
    with FakeCuda() as gpu:
        assert main([speculative.speculative], speculative.report, [*map(str, argv)]) == 0
    assert gpu.counts["launches"] > 100 and bool(graphs) == (gpu.counts["replays"] == 0)
    assert "cuda" in capsys.readouterr().err


# ------------------------------------------------------------------------------- make gpu-dry

def test_what_a_method_asks_of_a_gpu_is_counted_without_its_prompt():
    """Autoregressive decoding makes a call for each token, and waits for that token alone."""
    with FakeCuda() as gpu:
        lm = TimedLM(tiny("llama").to("cuda"))
        method = Ours(autoregressive, {"target": lm}, 6, set(), Sampler(0))
        rows = [count(gpu, "AR", method, [[5] * n]) for n in (3, 30)]
    assert rows[0] == rows[1] and rows[0][0] == "AR" and rows[0][3] == "1.0"
    assert int(rows[0][2]) == int(rows[0][1]) + 1 > 20  # the argmax is no part of the call
