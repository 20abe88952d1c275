"""The simulated GPU of fake_cuda.py refuses what CUDA refuses, and every training runs on it for a
few steps. Every method runs on it in test_lossless.py."""
import copy

import pytest
import torch

import speculative
from cli.graphs import capture
from common import InputError
from fake_cuda import FakeCuda
from helpers import main
from trainings import PROMPTS, TRAININGS, TWINS, make_llama, run


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


def test_what_cuda_takes_and_how_many_launches_that_are():
    with FakeCuda() as gpu:
        here, there = on_both()
        assert there.device == torch.device("cuda:0") and there[1:].is_cuda and not here.is_cuda
        gpu.counts.clear()
        assert (there * 2).tolist() == [0, 2, 4]  # a launch
        assert (there + torch.tensor(1.0)).device.type == "cuda"  # a single number
        assert there[torch.tensor([2, 0])].device.type == "cuda"  # an index is copied
        there[1:] = here[1:].cuda()  # copied by `cuda`, and then on the GPU
        assert gpu.counts == {"launches": 4}
        assert not there.cpu().is_cuda and copy.deepcopy(there).is_cuda and not there.is_cpu


# ----------------------------------------------------------------------------------- trainings

OTHERS = ["survey.draft_verify search", "hybrid.hybrid fit"]


@pytest.mark.parametrize("line", [*(x for x in TRAININGS if x not in TWINS), *OTHERS])
def test_a_training_runs_on_the_simulated_gpu(line, tmp_path):
    """It makes a step, and whatever comes before and after it."""
    changes = {"steps": 1} if line in TRAININGS else {}
    with FakeCuda() as gpu:
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
