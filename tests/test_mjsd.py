"""Joint decoding: the likeliest tokens together, the longest prefix that passes, and what the paper measures."""
import itertools
import math
import os
import time

import pytest
import torch

import mjsd as module
from common import CachedLM, InputError, Sampler, autoregressive, main
from conftest import CONTEXT, ScriptedLM, markov, near, tiny, tokens_of
from mjsd import EnergyMeter, integral, longest_prefix, mjgd, mjsd, perplexity

PROMPT = [3, 14, 15]


def recomputed(model):
    """A stand-in for a CachedLM that runs every path from its beginning: no cache, no tree."""
    @torch.inference_mode()
    def logits_of(tokens):
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return ScriptedLM(logits_of)


def joint(logits_of, context, tokens):
    """log p(tokens | context)."""
    return sum(logits_of(context + list(tokens[:i])).log_softmax(-1)[token].item() for i, token in enumerate(tokens))


def drifting(seed):
    """Logits that depend on the last two tokens and on the length, so that greedy text does not repeat."""
    tables = [markov(100 * seed + i, vocab=5, scale=1.0) for i in range(31)]
    return lambda tokens: tables[len(tokens) % 31](tokens)


# ---------------------------------------------------------------- MJGD

def test_mjgd_of_one_token_is_greedy_decoding(family):
    model = tiny(family)
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT), PROMPT), 100)
    assert tokens_of(mjgd(CachedLM(model, CONTEXT), PROMPT, k=1, beams=3), 100) == expected


@pytest.mark.parametrize("seed", range(5))
def test_mjgd_with_enough_beams_is_the_joint_argmax(seed):
    """V = 5, K = 3: against all 125 sequences, chunk after chunk; greedy decoding gives another text."""
    model, context, log = drifting(seed), [0, 1], []
    for chunk in itertools.islice(mjgd(ScriptedLM(model), context, k=3, beams=25, log=log), 6):
        best = max(itertools.product(range(5), repeat=3), key=lambda tokens: joint(model, context, tokens))
        assert tuple(chunk) == best and abs(log[-1]["logp"] - joint(model, context, best)) < 1e-4
        context = context + chunk
    assert context[2:] != tokens_of(autoregressive(ScriptedLM(model), [0, 1]), 18)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3"])
def test_mjgd_on_a_real_cache(name):
    model = tiny(name)
    assert tokens_of(mjgd(CachedLM(model, CONTEXT), PROMPT, k=3, beams=4), 40) == tokens_of(mjgd(recomputed(model), PROMPT, k=3, beams=4), 40)


# ---------------------------------------------------------------- MJSD

def test_tau_1_is_greedy_decoding(family):
    model = tiny(family)
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT), PROMPT), 60)
    for tau in (1.0, 2.0):
        assert tokens_of(mjsd(CachedLM(model, CONTEXT), CachedLM(near(model, 0.02), CONTEXT), PROMPT, gamma=3, beams=4, tau=tau), 60) == expected


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_target_as_its_own_draft_is_always_accepted(family, temperature):
    """For every τ below 1, up to the end of the context: the two models' rows of a path are the same, in whatever tree they stand."""
    model = tiny(family)
    for tau, width in ((0.0, 1), (0.5, 3), (0.99, 1)):
        log = []
        tokens_of(mjsd(CachedLM(model, CONTEXT), CachedLM(model, CONTEXT), PROMPT, gamma=3, beams=4, tau=tau, width=width, sample=Sampler(temperature), log=log), CONTEXT - 10)
        assert len(log) >= 37 and all(r["accepted"] == 3 for r in log)
        assert all(abs(p - q) < 1e-3 for r in log for p, q in zip(r["target_logp"], r["draft_logp"]))


def test_tau_0_accepts_what_the_target_gives_a_chance():
    """Token 3 has probability 0 in the target and is likely in the draft: exactly the prefixes with it do not pass."""
    def without(tokens):
        return target(tokens).index_fill(0, torch.tensor([3]), -torch.inf)
    target, log = drifting(1), []
    next(itertools.islice(mjsd(ScriptedLM(without), ScriptedLM(drifting(2)), [0, 1], gamma=4, beams=4, tau=0.0, log=log), 60, None))
    assert {r["accepted"] for r in log} >= {4} and len({r["accepted"] for r in log}) > 1
    assert all(r["accepted"] == sum(p > -math.inf for p in r["target_logp"]) for r in log)


@pytest.mark.parametrize("temperature, width", [(0, 1), (0, 3), (1.0, 1), (0.7, 2)])
def test_accepted_length_equals_an_independent_computation(temperature, width):
    """Joint probabilities of the chosen beam from the scripted tables; the longest prefix that passes, whatever stands before it."""
    target, draft, sample = drifting(1), drifting(2), Sampler(temperature, seed=3)
    context, log, skipped = [0, 1], [], 0
    for chunk in itertools.islice(mjsd(ScriptedLM(target), ScriptedLM(draft), context, gamma=4, beams=4, tau=0.6, width=width, sample=sample, log=log), 150):
        record, scale = log[-1], temperature or 1
        accepted = len(chunk) - 1
        assert accepted == record["accepted"]
        for name, model in (("target_logp", target), ("draft_logp", draft)):
            for i in range(accepted):
                assert abs(record[name][i] - joint(lambda tokens: model(tokens) / scale, context, chunk[:i + 1])) < 1e-4
        passes = [math.exp(p - q) > 0.6 for p, q in zip(record["target_logp"], record["draft_logp"])]
        assert accepted == max((i + 1 for i, well in enumerate(passes) if well), default=0)
        skipped += not all(passes[:accepted])
        context = context + chunk
    assert skipped > 2  # a prefix failed and a longer one passed


def test_the_longest_prefix_may_follow_a_failing_one():
    assert longest_prefix([-1.0, -3.0, -3.1, -9.0], [-1.0, -1.0, -3.0, -4.0], 0.5) == 3
    assert longest_prefix([-5.0], [-1.0], 0.5) == 0 and longest_prefix([-5.0], [-1.0], 0.0) == 1 and longest_prefix([-1.0], [-5.0], 1.0) == 0


def test_the_best_beam_is_the_likeliest_draft():
    """Enough beams: the draft is the joint argmax of the draft model. A wider verification accepts no less."""
    target, draft = markov(1), markov(2)
    best = max(itertools.product(range(4), repeat=3), key=lambda tokens: joint(draft, [0, 1], tokens))
    log = []
    chunk = next(mjsd(ScriptedLM(target), ScriptedLM(draft), [0, 1], gamma=3, beams=16, tau=0.0, log=log))
    assert tuple(chunk[:3]) == best and abs(log[0]["draft_logp"][-1] - joint(draft, [0, 1], best)) < 1e-4
    for seed in range(20):
        lengths = [len(next(mjsd(ScriptedLM(markov(seed)), ScriptedLM(markov(seed + 50)), [0, 1], gamma=4, beams=6, tau=0.7, width=width))) for width in (1, 3, 6)]
        assert lengths == sorted(lengths)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3"])
def test_mjsd_on_real_caches(name):
    model, draft = tiny(name), near(tiny(name), 0.05)
    for width in (1, 3):
        logs = [], []
        outputs = [tokens_of(mjsd(make(model), make(draft), PROMPT, gamma=3, beams=4, width=width, tau=0.3, log=log), 50)
                   for make, log in zip((lambda m: CachedLM(m, CONTEXT), recomputed), logs)]
        assert outputs[0] == outputs[1]
        assert len({r["accepted"] for r in logs[0]}) > 1


@pytest.mark.parametrize("method, options, message", [
    (mjgd, dict(k=0), "k and beams of 1 or more"), (mjgd, dict(sample=Sampler(0.5)), "temperature 0"), (mjsd, dict(gamma=0), "got 0, 8"),
    (mjsd, dict(width=9), "width of 1 to beams"), (mjsd, dict(tau=-0.1), "-0.1")])
def test_bad_options_are_refused(method, options, message):
    models = [ScriptedLM(markov(1))] * (1 if method is mjgd else 2)
    with pytest.raises(InputError, match=message):
        next(method(*models, [0, 1], **options))


# ---------------------------------------------------------------- perplexity and energy

def test_perplexity_is_that_of_the_model_itself():
    model, prompts, outputs = tiny("llama"), [[3, 4, 5], [7]], [[8, 9, 10, 11], [2]]
    with torch.inference_mode():
        nll = -sum(model(input_ids=torch.tensor([p + o])).logits[0].log_softmax(-1)[len(p) - 1 + i, token].item()
                   for p, o in zip(prompts, outputs) for i, token in enumerate(o))
    assert perplexity(CachedLM(model, 20), prompts, outputs) == pytest.approx(math.exp(nll / 5), rel=1e-4)


def test_power_is_integrated_over_time():
    assert integral([], 0.0, 1.0) is None
    assert integral([(0.5, 100.0)], 0.0, 2.0) == 200
    assert integral([(-1.0, 0.0), (1.0, 100.0), (2.0, 200.0), (9.0, 0.0)], 0.0, 3.0) == pytest.approx(50 + 150 + 100)


def test_a_gpus_power_is_read_while_it_works(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\ncase "$*" in *--id=GPU-7*--loop-ms=20*) ;; *) exit 3;; esac\nwhile true; do echo 80.0; sleep 0.02; done\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("Properties", (), {"uuid": "GPU-7"}))
    began = time.perf_counter()
    with EnergyMeter(torch.device("cuda"), interval=0.02) as meter:
        inside = time.perf_counter()
        while not meter.watts:
            time.sleep(0.01)
    assert 80 * (time.perf_counter() - began) > meter.joules > 0 and meter.joules < 80 * (time.perf_counter() - began) and inside >= began
    assert all(watts == 80 for _, watts in meter.watts)


def test_a_cpus_counters_may_wrap_or_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "COUNTERS", tmp_path)
    with EnergyMeter(torch.device("cpu")) as meter:
        pass
    assert meter.joules is None
    for zone, before in (("intel-rapl:0", 9_000_000), ("intel-rapl:1", 1_000_000), ("intel-rapl:0:0", 5)):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "energy_uj").write_text(str(before))
        (tmp_path / zone / "max_energy_range_uj").write_text("9999999")
    with EnergyMeter(torch.device("cpu")) as meter:
        (tmp_path / "intel-rapl:0/energy_uj").write_text("2000000")  # wrapped: 3 J
        (tmp_path / "intel-rapl:1/energy_uj").write_text("1500000")
    assert meter.joules == pytest.approx(3.5)


def test_command_line(capfd):
    def run(*argv):
        status = main([mjsd, mjgd], module.report, ["--device", "cpu", "--prompt", "Mia has 12 apples. She buys 3 bags of 4 apples each. How many apples does Mia have now?", *argv])
        return status, *capfd.readouterr()
    status, out, err = run("--compare")
    assert status == 0 and "####" in out and "perplexity" in err and "speed-up" in err and "equals" not in err
    status, out, err = run("--method", "mjgd", "--k", "2")
    assert status == 0 and "####" in out and "perplexity" in err
    assert run("--method", "mjgd", "--temperature", "1")[0] == 2
