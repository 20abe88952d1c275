"""Draft & Verify: whatever is skipped, output is the whole model's; the draft sees the whole
model's rows of final text; blocks are searched by what they bring."""
import json
import math

import pytest
import torch

from common import CachedLM, InputError, Sampler, autoregressive
from families import near, tiny
from helpers import ROOT, main, said_in_one_line, tokens_of
from survey import draft_verify as module
from survey.draft_verify import (agreement, draft_verify, load_blocks, measure_costs,
                                 predict_speed, report, search, without)

PROMPT = [3, 14, 15]
NOTHING = {"attention": [], "mlp": []}
SOME = {"attention": [1], "mlp": [0]}
DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3, 30], [4, 4, 2, 11, 17, 40]), ([7], [5, 2])]


def zeroed(name: str, skipped: dict):
    """A tiny Llama whose skipped blocks add nothing in the first place."""
    model = tiny(name, num_hidden_layers=3)
    for layer in skipped["attention"]:
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
    for layer in skipped["mlp"]:
        model.model.layers[layer].mlp.down_proj.weight.data.zero_()
    return model


# ------------------------------------------------------------------------------------ the draft

def test_without_blocks_is_the_model_whose_blocks_add_nothing():
    model = tiny("llama", num_hidden_layers=3)
    for skipped in (SOME, {"attention": [0, 2], "mlp": []}, {"attention": [], "mlp": [1, 2]}):
        ids = torch.tensor([PROMPT])
        expected = zeroed("llama", skipped)(input_ids=ids).logits
        before = model(input_ids=ids).logits
        draft = without(model, skipped)
        torch.testing.assert_close(draft(input_ids=ids).logits, expected)
        torch.testing.assert_close(model(input_ids=ids).logits, before)
        assert {id(p) for p in draft.parameters()} <= {id(p) for p in model.parameters()}


def test_blocks_that_have_no_module_of_their_own_are_refused():
    with pytest.raises(InputError, match="expected layers whose mlp is a module, got OPT"):
        without(tiny("opt"), {"attention": [], "mlp": [0]})


# ---------------------------------------------------------------------------------- decoding

def test_with_nothing_skipped_everything_is_accepted():
    model = tiny("llama")
    for sample in (Sampler(0), Sampler(1.0, seed=3)):
        log = []
        chunks = draft_verify(CachedLM(model), PROMPT, gamma=5, threshold=0, skipped=NOTHING,
                              sample=sample, log=log)
        tokens_of(chunks, 30)
        assert log == [{"drafted": 5, "accepted": 5, "layers": 5 * 2 + 2}] * 5
    log = []
    next(draft_verify(CachedLM(model), PROMPT, gamma=1, skipped=SOME, log=log))
    assert log[0]["layers"] == 1 + 2  # half of the blocks


def test_the_draft_sees_the_whole_models_rows():
    """Its logits after a committed text are those of a pass over the whole model's cache; the cache
    after each round equals a fresh one."""
    model = tiny("llama", num_hidden_layers=3)
    target = CachedLM(model)
    chunks = draft_verify(target, PROMPT, gamma=3, threshold=0, skipped=SOME)
    text = list(PROMPT)
    for _ in range(6):
        text += next(chunks)
        fresh = CachedLM(model)
        fresh.start(text[:-1])
        for layer, buffers in target.cache.layers.items():
            for ours, theirs in zip(buffers, fresh.cache.layers[layer]):
                n = len(text) - 1
                torch.testing.assert_close(ours[:, :, :n], theirs[:, :, :n])
        assert target.length == len(text) - 1


def test_a_guess_is_made_on_the_whole_models_rows(monkeypatch):
    model = tiny("llama", num_hidden_layers=3)
    seen = []
    real = module.verify
    monkeypatch.setattr(module, "verify",
                        lambda p, q, *more: seen.append(q.clone()) or real(p, q, *more))
    text = list(PROMPT)
    chunks = draft_verify(CachedLM(model), PROMPT, gamma=1, skipped=SOME, sample=Sampler(1.0))
    for _ in range(5):
        chunk = next(chunks)
        whole = CachedLM(model)
        whole.start(text[:-1])
        draft = CachedLM(without(model, SOME))
        draft.cache, draft.length = whole.cache, whole.length
        torch.testing.assert_close(seen[-1], draft.forward([text[-1]]).softmax(-1))
        text += chunk


def test_drafting_stops_after_a_token_below_the_threshold(monkeypatch):
    """γ moves by a tenth of 0.01, up where less than 0.9 is accepted, down else (Eq. 5 to 7)."""
    model = tiny("llama")
    chances, rounds = iter([0.9, 0.5, 0.7, 0.3, 0.9, 0.9, 0.59995] + [0.0] * 99), []
    target = CachedLM(model)
    real = CachedLM.forward

    def forward(lm, ids, *more, **how):
        logits = real(lm, ids, *more, **how)
        if lm is target or not rounds:
            return logits
        rounds[-1] += 1
        p = next(chances)
        others = math.log(max(1 - p, 1e-9) / (logits.shape[1] - 1))
        return torch.full_like(logits, others).index_fill(1, torch.tensor([5]), math.log(p + 1e-9))
    monkeypatch.setattr(CachedLM, "forward", forward)
    accepted = iter([1, 0, 2])

    def verify(p, q, guesses, sample):
        rounds.append(0)
        return next(accepted), 7
    monkeypatch.setattr(module, "verify", verify)
    rounds.append(0)
    chunks = draft_verify(target, PROMPT, gamma=3, threshold=0.6, skipped=NOTHING)
    next(chunks)
    assert rounds == [2, 0]  # 0.9, then 0.5 < 0.6; right: 0.9 / 2 + 0.5 / 2 = 0.7: γ is 0.601
    next(chunks)
    assert rounds == [2, 2, 0]  # 0.7, then 0.3; right: 0.35: γ is 0.602
    next(chunks)
    assert rounds == [2, 2, 3, 0]  # the most
    assert chunks.gi_frame.f_locals["threshold"] == pytest.approx(0.603)  # right: 0.508


@pytest.mark.parametrize("adaptive, after", [(True, 0.599), (False, 0.6)])
def test_the_threshold_falls_where_all_is_accepted(adaptive, after):
    """By what stops: at a chance of 0.5995 a second token is drafted once the threshold fell."""
    model, log = tiny("llama"), []
    chunks = draft_verify(CachedLM(model), PROMPT, gamma=2, threshold=1.0, skipped=NOTHING,
                          adaptive=adaptive, log=log)
    for _ in range(3):
        next(chunks)
    assert [r["drafted"] for r in log] == [1, 1, 1]  # no token is as likely as 1
    states = chunks.gi_frame.f_locals
    assert states["threshold"] == pytest.approx(1 - 0.003 if adaptive else 1)


def play_rounds(monkeypatch, accepted: list[int], threshold: float) -> list[float]:
    """The threshold after each round of 2 guesses, of which so many are accepted."""
    script = iter(accepted)
    monkeypatch.setattr(module, "verify", lambda p, q, guesses, sample: (next(script), 7))
    chunks = draft_verify(CachedLM(tiny("llama")), PROMPT, gamma=2, threshold=threshold,
                          skipped=NOTHING)
    found = []
    for _ in accepted:
        next(chunks)
        found.append(chunks.gi_frame.f_locals["threshold"])
    return found


def test_a_draft_that_is_too_sure_of_itself_raises_the_threshold(monkeypatch):
    """Every draft is as long as it may be, and its guesses are rejected."""
    assert play_rounds(monkeypatch, [0] * 4, 0.0) == pytest.approx([0.001, 0.002, 0.003, 0.004])


def test_a_full_draft_that_is_accepted_leaves_the_threshold(monkeypatch):
    """The released code: it would not be longer with a lower one. After a bad round the share has
    to recover first: 0.475, 0.7375, 0.86875, 0.934375."""
    expected = [0.0, 0.001, 0.002, 0.003, 0.003]
    assert play_rounds(monkeypatch, [2, 0, 2, 2, 2], 0.0) == pytest.approx(expected)


# --------------------------------------------------------------------------- what is skipped

def test_agreement_by_hand():
    """Each guess from the whole model's rows of what stands before it."""
    model = tiny("llama", num_hidden_layers=3)
    right = 0
    for prompt, answer in DATA:
        for i, token in enumerate(answer):
            text = prompt + answer[:i]
            whole = CachedLM(model)
            whole.start(text[:-1])
            draft = CachedLM(without(model, SOME))
            draft.cache, draft.length = whole.cache, whole.length
            right += draft.forward(text[-1:]).argmax().item() == token
    assert agreement(model, SOME, DATA) == pytest.approx(right / 12)


def test_agreement_of_all_blocks_is_one(tmp_path):
    model = near(tiny("llama"), 0.1)
    answers = []
    for prompt, _ in DATA:
        answers.append((prompt, tokens_of(autoregressive(CachedLM(model), prompt), 12)))
    assert agreement(model, NOTHING, answers) == 1


class Tokenizer:
    eos_token_id = None


def timed(skipped_costs: dict[str, float], rest: float, calls: list):
    """Stand in for `row_costs`: an exact clock of a model with 3 layers. It appends to `calls`."""
    def costs(lm, most):
        calls.append(lm)
        kinds = [type(x).__name__ for x in lm.model.modules()]
        attention = kinds.count("LlamaAttention")
        mlp = kinds.count("LlamaMLP")
        seconds = rest + skipped_costs["attention"] * attention + skipped_costs["mlp"] * mlp
        return [0.0, *[seconds] * 8]
    return costs


def test_a_draft_costs_the_sum_of_its_blocks_and_of_the_rest(monkeypatch):
    model = tiny("llama", num_hidden_layers=3)
    monkeypatch.setattr(module, "row_costs", timed({"attention": 2.0, "mlp": 1.0}, 0.5, []))
    costs = measure_costs(model)
    assert costs.block == pytest.approx({"attention": 2.0, "mlp": 1.0})
    assert costs.whole[1] == 9.5 and costs.rest == pytest.approx(0.5)
    assert costs.of_draft(["attention", "mlp", "mlp"]) == pytest.approx(4.5)


def test_the_predicted_speed_by_hand():
    """Two guesses bring 1 + a + a² tokens for two draft calls and one call of three rows."""
    whole = [0.0, 10.0, 10.0, 10.0, 1000.0, 1000.0, 1000.0, 1000.0, 1000.0]
    times, gamma = predict_speed(0.8, 2.0, whole)
    assert gamma == 2 and times == pytest.approx((1 + 0.8 + 0.64) * 10 / (2 * 2 + 10))


def test_search_asks_the_clock_three_times(monkeypatch, tmp_path):
    """Timings of candidates that differ in one block would differ by noise."""
    calls = []
    monkeypatch.setattr(module, "row_costs", timed({"attention": 2.0, "mlp": 1.0}, 0.5, calls))
    model = zeroed("llama", {"attention": [1], "mlp": [0, 2]})
    search(model, Tokenizer, [p for p, _ in DATA], out=tmp_path / "x", max_new_tokens=9)
    assert len(calls) == 3


def test_search_finds_the_blocks_that_add_nothing(tmp_path, monkeypatch):
    """Where each block costs the same, all that can go for nothing go; the file is loaded again."""
    nothing = {"attention": [1], "mlp": [0, 2]}
    model = zeroed("llama", nothing)

    def costs(lm, most):
        blocks = sum(type(x).__name__ == "Skipped" for x in lm.model.modules())
        return [0.0, *[6.0 - blocks + 0.5] * 8]
    monkeypatch.setattr(module, "row_costs", costs)
    file = tmp_path / "blocks.json"
    search(model, Tokenizer, [p for p, _ in DATA], out=file, max_new_tokens=20)
    assert load_blocks(str(file), model) == nothing
    with pytest.raises(InputError, match="expected blocks that .* found for this model, got"):
        load_blocks(str(file), tiny("llama", seed=1, num_hidden_layers=3))


@pytest.mark.parametrize("change", [
    lambda x: x.pop("mlp"), lambda x: x.update(mlp=[12]), lambda x: x.update(mlp=["0"]),
    lambda x: x.update(mlp=[-1]), lambda x: x.update(mlp=None), lambda x: x.pop("model"),
    lambda x: x.update(model=[[1, 2]])])
def test_damaged_files_are_refused(tmp_path, change, capfd):
    """And so is one that is no JSON, or not there."""
    file = tmp_path / "blocks.json"
    known = json.loads((ROOT / "models/blocks.json").read_text())
    change(known)
    for text in (json.dumps(known), "{", "[]", "3"):
        file.write_text(text)
        assert main([draft_verify], report, ["--blocks", str(file), "--prompt", "x"]) == 2
        said_in_one_line("expected blocks that", capfd)
    file.unlink()
    assert main([draft_verify], report, ["--blocks", str(file), "--prompt", "x"]) == 2
    said_in_one_line("expected blocks that", capfd)


def test_bad_input_is_one_line(capfd):
    for said, *argv in (("--gamma must be 1 or more, got 0", "--gamma", "0"),
                        ("--threshold must be 0 or more, got -1.0", "--threshold", "-1"),
                        ("--threshold must be 0 or more, got nan", "--threshold", "nan"),
                        ("--graphs cannot be used", "--graphs")):
        assert main([draft_verify], report, [*argv, "--prompt", "x"]) == 2
        said_in_one_line(said, capfd)


def test_the_embedded_blocks(embedded, held_out):
    """AR's output on held-out prompts; half of what is drafted passes, or more."""
    model, _, tokenizer = embedded
    assert sum(map(len, load_blocks(f"{ROOT}/models/blocks.json", model).values())) > 0
    for prompt, answer in held_out[:6]:
        log = []
        chunks = draft_verify(CachedLM(model, len(tokenizer)), prompt, log=log)
        assert tokens_of(chunks, len(answer)) == answer
        assert sum(r["accepted"] for r in log) > 0.5 * sum(r["drafted"] for r in log)
