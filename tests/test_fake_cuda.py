"""The simulated GPU of fake_cuda.py refuses what CUDA refuses. It finds mistakes that are planted
in the project's code, and every training runs on it for two steps. Every method runs on it in
test_lossless.py."""
import copy
import inspect
import textwrap

import pytest
import torch
from transformers import AutoTokenizer

import bita
import cllm
import common
import speculative
import train
from bench import Ours
from cli.graphs import GraphedLM, StaticCache, capture
from cli.run import TimedLM
from common import CachedLM, InputError, Sampler, autoregressive
from fake_cuda import FakeCuda
from families import tiny
from gpu_dry import count
from helpers import ROOT, main
from survey import (dflash, draft_verify, eagle, eagle3, early_exit, hybrid, layerskip, masks,
                    medusa, online, rest, sequoia)
from training.loop import Settings, use_settings
from test_lossless import texts_on


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


# ---------------------------------------------------------------------------- planted mistakes

def plant(monkeypatch, owner, name: str, old: str, new: str) -> None:
    """Replace a text in the source of a function, for one test."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, (name, old)
    made = {}
    exec(source.replace(old, new), inspect.unwrap(function).__globals__, made)
    monkeypatch.setattr(owner, name, made[name])
    for table in [x for x in vars(owner).values() if isinstance(x, dict)]:
        for key in [key for key, value in table.items() if value is function]:
            monkeypatch.setitem(table, key, made[name])


def decode(name: str, run_as=TimedLM):
    return lambda folder: texts_on("cuda", name, run_as)


PLANTED = {
    "tokens stay on the CPU": (
        CachedLM, "forward", ".to(self.weight.device)", "",
        decode("speculative")),
    "positions and mask stay on the CPU": (
        CachedLM, "layout", ".to(self.weight.device)", "", decode("jacobi")),
    "the mask of a training stays on the CPU": (
        bita, "attention_mask", ".to(like)", ".to(like.dtype)",
        lambda folder: run("bita train", folder)),
    "a generator is the CPU's": (
        Sampler, "uniform", "torch.Generator(device)", "torch.Generator()", decode("jacobi")),
    "coins stay on the CPU": (
        speculative, "verify_block", "h.shape, h.device", 'h.shape, "cpu"',
        decode("speculative")),
    "guesses stay on the CPU": (
        speculative, "verify_block", ", device=target_probs.device", "",
        decode("speculative")),
    "numpy reads the draws": (
        Sampler, "__call__", "(-1).tolist()", "(-1).numpy().tolist()", decode("jacobi")),
    "a head's tokens stay on the CPU": (
        medusa, "fill_hydra_tree", ", device=f.device", "", decode("hydra")),
    "a layer's tokens stay on the CPU": (
        eagle.EagleLayer, "join", ", device=features.device", "", decode("eagle")),
    "an item in a capture": (
        StaticCache, "update", "if written is None:", "if int(written[0]) < 0:",
        decode("jacobi", GraphedLM)),
    "the paths that loading checks stay on the CPU": (
        common, "check", ", device=lm.weight.device", "", lambda folder: load_tiny(folder)),
    "labels stay on the CPU": (
        bita, "sar_loss", "labels.to(states.device)", "labels",
        lambda folder: run("bita train", folder)),
    "the tokens behind features stay on the CPU": (
        medusa, "collect_features", ", device=f.device", "",
        lambda folder: run("medusa train", folder)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(name, monkeypatch, folder):
    *mistake, act = PLANTED[name]
    errors = RuntimeError, TypeError, InputError
    with FakeCuda(), pytest.raises(errors, match="cuda|capturing|indices"):
        plant(monkeypatch, *mistake)
        act(folder)


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
