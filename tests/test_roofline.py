"""The prediction for another machine is the arithmetic that its file states."""
import json

import pytest

from results.roofline import MACHINES, Machine, Model, call_seconds, list_methods, main, predict

MODEL = Model(weights=1e9, layers=10, bytes=2)
SLOW = Machine(bandwidth=1e9, flops=1e12, launch=1e-3)  # reads for 2 s, launches for 0.42 s
COUNTS = {"tokens": 100, "calls": 100, "rows": 1.0, "draft_calls": 0, "draft_rows": 0.0,
          "total": 10.0, "target": 10.0, "draft": 0.0}
RUN = {"prompts": 0, "prompt_rows": 0.0, "models": {"target": MODEL._asdict()},
       "methods": {"rest": COUNTS | {"calls": 50, "rows": 11.0, "total": 8.0, "target": 7.5},
                   "eagle": COUNTS | {"target": 8.0}, "AR": COUNTS}}


def test_a_call_reads_the_weights_or_waits_for_launches():
    assert call_seconds(SLOW, MODEL, 0) == 2.0
    assert call_seconds(SLOW, MODEL, 500) == pytest.approx(2.0 + 1.0)  # 2 · 10⁹ · 500 operations
    assert call_seconds(SLOW._replace(launch=0.1), MODEL, 0) == pytest.approx(42.0)


def test_every_call_and_every_prompt_counts():
    models = {"target": MODEL, "draft": Model(1e8, 1, 2)}
    counts = COUNTS | {"draft_calls": 30, "draft_rows": 1.0}
    run = RUN | {"methods": {"AR": counts}, "prompts": 2, "prompt_rows": 500}
    target, draft = 100 * (2 + 0.002) + 2 * 3.0, 30 * (0.2 + 0.0002) + 2 * (0.2 + 0.1)
    assert predict(SLOW, models, run, "AR") == pytest.approx(100 / (target + draft))


def test_methods_whose_time_is_not_that_of_calls_are_left_out():
    assert [*list_methods(RUN)] == ["rest", "AR"]


@pytest.mark.parametrize("published, machine, layers", [
    (93.89, "a100", 32),  # gpt-fast's README: Llama 3.1 8B, bfloat16, A100 80 GB
    (54.34, "4090", 32),  # GPU-Benchmarks-on-LLM-Inference: Llama 3 8B, F16, llama.cpp
    (36.25, "m2-ultra", 32)])
def test_published_speeds_are_predicted_within_a_fifth(published, machine, layers):
    """Autoregressive decoding. Both programs launch nothing one by one."""
    free = MACHINES[machine]._replace(launch=0.0)
    assert 1 / call_seconds(free, Model(7.5e9, layers, 2), 1) == pytest.approx(published, rel=0.2)


def test_the_command_prints_a_prediction(tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(RUN))
    assert main([str(file), "--machine", "h100", "--weights", "7.5e9", "--layers", "32"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("A prediction. Nothing of it was measured on this machine: H100 SXM\n")
    assert "| rest | 2.00 | 11.0 |" in out and "eagle" not in out and "measured x AR" not in out
    assert main([str(file), "--machine", "cpu"]) == 0
    assert "| rest | 2.00 | 11.0 | 2 | 1.28 | 1.25 |" in capsys.readouterr().out


NO_COUNTS = json.dumps(RUN | {"methods": {"AR": {}}})
NO_TARGET = json.dumps(RUN | {"models": {}})


@pytest.mark.parametrize("option", ["--bandwidth 0", "--flops -1", "--launch -1", "--weights nan",
                                    "--layers 0", "--bytes 0", "--draft-layers -2"])
def test_figures_that_no_machine_has_are_refused(tmp_path, capsys, option):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "run.json"), *option.split()])
    assert stop.value.code == 2 and option.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"models": {}, "methods": {}}', NO_COUNTS,
                                  NO_TARGET])
def test_a_file_of_something_else_is_refused(tmp_path, capsys, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "x.json")])
    assert stop.value.code == 2 and "that results/bench.py --save wrote" in capsys.readouterr().err
