"""The kit for a GPU goes through its steps on a simulated one."""
import argparse
import json

import pytest
import torch

from fake_cuda import FakeCuda
from results import gpu


@pytest.mark.parametrize("step", [gpu.decode, gpu.sizes, gpu.trainings])
def test_steps_run_on_the_simulated_gpu(step, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ALL", gpu.ALL[:2])
    monkeypatch.setattr(gpu, "KINDS", [("float32", "graphs")])
    monkeypatch.setattr(gpu.memory, "LINES", gpu.memory.LINES[:2])
    for name in "reset_peak_memory_stats", "max_memory_allocated":
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    args = argparse.Namespace(device="cuda", small=True, out=tmp_path / "gpu.json")
    with FakeCuda():
        gpu.perform(args, step)
    rows = json.loads(args.out.read_text())[step.__name__]
    assert rows and not any("error" in row for row in rows.values())
    if step is gpu.decode:  # generate, its two relatives and two methods of ours
        assert [row["as generate"] for row in rows.values()] == ["3 of 3"] * 5
