"""The kit for a GPU runs all of its steps on a simulated one."""
import argparse
import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from fake_cuda import FakeCuda
from results import gpu


@pytest.mark.parametrize("step", [gpu.decode, gpu.sizes, gpu.trainings, gpu.python])
def test_steps_run_on_the_simulated_gpu(step, models, tmp_path, monkeypatch):
    def with_tiny_models(doc):
        parser = whole(doc)
        parser.set_defaults(**vars(parser.parse_args(models)))
        return parser
    real, whole = gpu.Timer.timeit, gpu.parser_of
    monkeypatch.setattr(gpu, "parser_of", with_tiny_models)
    monkeypatch.setattr(gpu, "ALL", gpu.ALL[:2])
    monkeypatch.setattr(gpu, "KINDS", [("float32", "graphs")])
    monkeypatch.setattr(gpu.Timer, "timeit", lambda timer, n: real(timer, 1))
    monkeypatch.setattr(gpu, "WIDTHS", (1, 2))
    monkeypatch.setattr(gpu.memory, "SMALL", gpu.memory.SMALL | {"num_hidden_layers": 1})
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
        first, *_, last = rows.values()
        assert last["x generate"] == pytest.approx(last["tokens/s"] / first["tokens/s"], rel=0.02)


@pytest.mark.parametrize("ends, status", [([0] * 5, 0), ([1] * 5, 1), ([0, 0, None, 0, 0], 1)])
def test_a_step_that_fails_or_never_ends_makes_the_status(ends, status, monkeypatch, tmp_path):
    """Each step is a process. One that does not end in its time is killed, and the next begins."""
    def wait(limit: int) -> int:
        end = left.pop(0)
        if end is None:
            raise subprocess.TimeoutExpired("step", limit)
        return end
    left, killed = [*ends], []
    process = SimpleNamespace(wait=wait, kill=lambda: killed.append(5 - len(left)))
    monkeypatch.setattr(subprocess, "Popen", lambda command: process)
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path / "gpu.json")]) == status
    assert left == [] and killed == [3] * (None in ends)
