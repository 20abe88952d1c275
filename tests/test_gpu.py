"""The kit for a GPU goes through its steps on a simulated one, and its predictions are right."""
import argparse
import json

import pytest
import torch

from fake_cuda import FakeCuda
from results import gpu

ARGS = dict(device="cuda", small=True, step=None)
FEW = ["autoregressive", "speculative --gamma 6"]


@pytest.mark.parametrize("step", [gpu.decode, gpu.launches, gpu.sizes, gpu.trainings])
def test_steps_run_on_the_simulated_gpu(step, tmp_path, monkeypatch, capsys):
    kept = {"machine": {"copy": {"GB/s": 1.0}}}
    monkeypatch.setattr(gpu, "ALL", FEW)
    monkeypatch.setattr(gpu, "KINDS", [("float32", "graphs")])
    monkeypatch.setattr(gpu.memory, "ROWS", gpu.memory.ROWS[:2])
    monkeypatch.setattr(gpu.memory, "make_model", gpu.memory.make_model)  # the step replaces it
    for name in "reset_peak_memory_stats", "max_memory_allocated":
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    args = argparse.Namespace(**ARGS, out=tmp_path / "gpu.json")
    args.out.write_text(json.dumps(kept))
    with FakeCuda():
        gpu.perform(args, step)
    rows = json.loads(args.out.read_text())[step.__name__]
    assert rows and not any("error" in row for row in rows.values())
    if step is gpu.decode:  # generate, its two relatives and two methods of ours
        assert [row["as generate"] for row in rows.values()] == [3] * 5
    assert all(name in capsys.readouterr().out for name in [*rows][:1])


def test_predictions_are_the_calls_times_their_cost(tmp_path, monkeypatch):
    costs = {"8B, eager": {"1": 10.0, "8": 12.0}, "1B, eager": {"1": 2.0}, "8B, graphs": {"1": 1.0}}
    run = {"tokens": 90, "calls": 20, "rows": 7.0, "draft_calls": 120, "draft_rows": 1.0,
           "total": 1.0, "target": 0.5, "draft": 0.45}
    busy = run | {"draft": 0.1}  # in which calls are not what takes the time
    (tmp_path / "results").mkdir()
    (tmp_path / "results/x.run.json").write_text(json.dumps({"methods": {"a": run, "b": busy}}))
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (name, row), = gpu.predicted(None, {"sizes": costs})
    assert (name, row["tokens per call"]) == ("x.run: a", 4.5)
    assert row["x AR, eager"] == pytest.approx(90 * 10 / (20 * 12 + 120 * 2))
    assert row["x AR, graphs"] != row["x AR, graphs"]  # nan: the cost is not known
