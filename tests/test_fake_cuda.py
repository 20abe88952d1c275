"""The simulated GPU of fake_cuda.py refuses what CUDA refuses, and every training runs on it for a
few steps. Every method runs on it in test_lossless.py."""
import copy

import pytest
import torch

import speculative
from bench import Ours
from cli.graphs import capture
from common import InputError, Sampler, autoregressive
from fake_cuda import FakeCuda
from families import tiny
from gpu_dry import count
from helpers import main
from support.engine import EngineLM
from support.settings import Settings, use_settings
from trainings import PROMPTS, TRAININGS, make_llama, run


# -------------------------------------------------------------------------- what CUDA refuses

def on_both() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(3.0), torch.arange(3.0, device="cuda")


def in_a_capture(function):
    return capture(function, (torch.arange(3.0, device="cuda"),))


REFUSED = {
    "a sum": lambda here, there: here + there,
    "a table and its index": lambda here, there: here[there.long()],
    "numbers that are put": lambda here, there: there.index_put_((there.long(),), here),
    "a layer": lambda here, there: torch.nn.Linear(3, 3)(there),
    "numpy": lambda here, there: there.numpy(),
    "the CPU's generator": lambda here, there: there.uniform_(generator=torch.Generator()),
    "the GPU's generator": lambda here, there: here.uniform_(generator=torch.Generator("cuda")),
    "an item in a capture": lambda here, there: in_a_capture(lambda x: x * x[0].item()),
    "a list in a capture": lambda here, there: in_a_capture(lambda x: x * x.new_tensor([2.0])),
    "a mask in a capture": lambda here, there: in_a_capture(lambda x: x[x > 1]),
    "a stream": lambda here, there: torch.cuda.current_stream(),
    "a choice of GPUs": lambda here, there: torch.accelerator.set_device_index(0),
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
        there[1:] = here[1:].cuda()  # copied by `cuda`; then a kernel copies on the GPU
        assert gpu.counts == {"launches": 4, "waits": 1, "copies": 2}
        assert not there.cpu().is_cuda and copy.deepcopy(there).is_cuda and not there.is_cpu


# ----------------------------------------------------------------------------------- trainings

TWINS = {  # another line runs all the code of each
    "bita train --P 3 --M 2", "cllm train --lr 1e-2 --states 2", "survey.medusa train --K 2",
    "survey.eagle train", "survey.dflash train --taps 0,1 --layers 1 --B 3 --markov 0"}
OTHERS = ["survey.draft_verify search", "hybrid.hybrid fit"]


@pytest.mark.parametrize("line", [*(x for x in TRAININGS if x not in TWINS), *OTHERS])
def test_a_training_runs_on_the_simulated_gpu(line, tmp_path):
    """It makes a step, and whatever comes before and after it."""
    changes = {"steps": 1} if line in TRAININGS else {}
    with FakeCuda() as gpu, use_settings(Settings(recompute=True)):
        model = make_llama().to("cuda")
        if line == "hybrid.hybrid fit":
            store = run("survey.rest build", tmp_path / "store", model, PROMPTS[:2])
            changes = dict(datastore=store, adapters=tmp_path)
        gpu.counts.clear()
        made = run(line, tmp_path, model, PROMPTS[:2], **changes)
    assert gpu.counts["launches"] > 100 and made.exists()


# ---------------------------------------------------------------------------- command lines

@pytest.mark.parametrize("graphs", [["--no-graphs"], []], ids=["eager", "graphs"])
def test_a_command_line_runs_on_the_simulated_gpu(graphs, small_llama, capsys):
    """The GPU is the default where there is one. --compare fails if AR writes another text."""
    argv = ["--target", small_llama, "--draft", small_llama, "--dtype", "float32", "--compare",
            "--prompt", "Tom has 3", "--max-new-tokens", "5", *graphs]
    with FakeCuda() as gpu:
        assert main([speculative.speculative], speculative.report, argv) == 0
    assert gpu.counts["launches"] > 100 and bool(graphs) == (gpu.counts["replays"] == 0)
    assert "cuda" in capsys.readouterr().err


# ------------------------------------------------------------------------------- make gpu-dry

def test_what_a_method_asks_of_a_gpu_is_counted_without_its_prompt():
    """Autoregressive decoding makes a call for each token, and waits only for that token."""
    with FakeCuda() as gpu:
        lm = EngineLM(tiny("llama").to("cuda"))
        methods = [Ours(autoregressive, {"target": lm}, n, set(), Sampler(0)) for n in (1, 3, 9)]
        none, *rows = [count(gpu, "AR", method, [[5] * 9]) for method in methods]
    assert none == ["AR", *["nan"] * 4]  # the first round makes all tokens
    assert rows[0] == rows[1] and rows[0][0] == "AR" and rows[0][2] == "1.0"
    assert int(rows[0][1]) > 20
