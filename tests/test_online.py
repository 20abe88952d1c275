"""A draft that learns from the rows that predict what it got wrong; a stopped stream goes on as if
it had not been; a second draft learns what the first does not know. That the text never changes is
in test_lossless.py."""
import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from common import InputError, Sampler, autoregressive
from families import near, tiny
from helpers import tokens_of
from survey import online as module
from survey.online import Learner, boost, online, serve
from training import loop as training
from training.layers import FeatureLM

PROMPT = [3, 14, 15]
PROMPTS = [[x, 3, 7] for x in range(4, 10)]


def learner_of(model, draft, kind: str = "forward-kl", *more) -> Learner:
    return Learner(FeatureLM(model), FeatureLM(draft), kind, 1e-3, *more)


# ----------------------------------------------------------------------------- serve and learn

def test_what_is_kept_is_the_row_that_predicts_the_corrected_token():
    """Of each round in which a guess was rejected, and of no other. Its logits are the target's."""
    model, log, expected, at = tiny("llama"), [], [], len(PROMPT) - 1
    learner = learner_of(model, near(model, 0.1))
    text = PROMPT + tokens_of(learner.serve(PROMPT, 4, Sampler(1.0, seed=3), log), 40)
    [(known, failed)] = learner.kept
    for accepted in (record["accepted"] for record in log):
        expected += [at + accepted] if accepted < 4 else []
        at += accepted + 1
    assert known[:len(text)] == text and [*failed] == expected and 3 < len(failed) < len(log)
    logits = learner.score_target(torch.stack([*failed.values()]))
    whole = model(input_ids=torch.tensor([known])).logits[0]
    torch.testing.assert_close(logits, whole[expected], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", module.KINDS)
def test_a_step_brings_the_draft_nearer_there_and_drops_the_rows(kind):
    """The draft that was given stays. A step without rows changes nothing, and counts."""
    model, small = tiny("llama"), near(tiny("llama"), 0.1)
    before, learner = copy.deepcopy(small.state_dict()), learner_of(model, small, kind)
    for prompt in ([3, 14], [9, 9, 2]):
        tokens_of(learner.serve(prompt, 4, Sampler(0), []), 12)

    def distance(kept) -> float:
        rows = [training.divergence(kind, *(x(input_ids=torch.tensor([text])).logits[0, [*some]]
                                            for x in (model, learner.lm.model)))
                for text, some in kept]
        return torch.cat(rows).mean().item()
    kept = list(learner.kept)
    first = distance(kept)
    learner.learn()
    assert distance(kept) < first - 1e-3 and learner.kept == [] and learner.training.done == 1
    learner.learn()
    assert learner.training.done == 2
    assert all(torch.equal(x, before[name]) for name, x in small.state_dict().items())


def test_a_step_is_towards_what_the_target_thought_there(monkeypatch):
    """Also if the model scales its LM head's output, as Cohere does."""
    model, given = tiny("cohere2"), []
    small, divergence = near(model, 0.1), training.divergence
    learner = learner_of(model, small, "reverse-kl")
    tokens_of(learner.serve(PROMPT, 4, Sampler(0), []), 30)
    [(text, places)] = learner.kept
    monkeypatch.setattr(training, "divergence",
                        lambda *x: given.append(x) or divergence(*x))
    learner.learn()
    [(kind, *logits)] = given
    assert kind == "reverse-kl" and len(places) > 2
    for rows, lm in zip(logits, (model, small)):
        expected = lm(input_ids=torch.tensor([text])).logits[0, [*places]]
        torch.testing.assert_close(rows.float(), expected, atol=0.3, rtol=0.05)


def test_the_draft_changes_between_prompts_only():
    model, weights = tiny("llama"), []
    target, draft = FeatureLM(model), FeatureLM(near(model, 0.1))
    for _ in range(7):
        chunks = online(target, draft, PROMPT, every=3, lr=1e-2)
        next(chunks)
        [learner] = [x for key, x in draft.memo.items() if key[0] == "online"]
        weights.append(learner.lm.model.lm_head.weight.detach().clone())
        tokens_of(chunks, 8)
        assert torch.equal(weights[-1], learner.lm.model.lm_head.weight)
    changed = [not torch.equal(a, b) for a, b in zip(weights, weights[1:])]
    assert changed == [False, False, True, False, False, True]


def test_a_request_takes_fewer_calls_once_the_draft_has_learnt_from_it():
    """Every pair of models and every divergence has a learner of its own. The calls of all are the
    draft's."""
    model = tiny("llama")
    target, draft, calls = FeatureLM(model), FeatureLM(near(model, 0.1)), []
    for _ in range(6):
        before = target.calls
        tokens_of(online(target, draft, PROMPT, every=1, lr=1e-2), 20)
        calls.append(target.calls - before)
    assert calls[-1] < 0.8 * calls[0] and draft.calls == 6 * target.calls
    before = draft.calls
    for lm, kind in ((target, "jsd"), (FeatureLM(model), "jsd")):
        tokens_of(online(lm, draft, PROMPT, divergence=kind), 20)
    assert sum(name[0] == "online" for name in draft.memo) == 3 and draft.calls > before


def test_a_checkpoint_is_of_one_target_and_its_settings(tmp_path):
    model, small = tiny("llama"), near(tiny("llama"), 0.1)
    learner = learner_of(model, small, "jsd", tmp_path, (1, 2))
    learner.learn()
    learner.training.save()
    for target, settings, done in ((model, (1, 2), 1), (near(model, 0.01), (1, 2), 0),
                                   (model, (1, 3), 0)):
        assert learner_of(target, small, "jsd", tmp_path, settings).training.done == done


# ----------------------------------------------------------------------------------- a stream

class Tokenizer:
    eos_token_id = None

    def get_vocab(self):
        return {f"t{i}": i for i in range(60)}

    def save_pretrained(self, folder):
        pass


@pytest.fixture
def model(monkeypatch):
    """Make a model, whose draft is loaded from anywhere."""
    model = tiny("llama", max_position_embeddings=64)
    monkeypatch.setattr(module, "draft_for", lambda *_: near(model, 0.1))
    return model


def answer(model, out, prompts=PROMPTS, **changes) -> None:
    stream = dict(gamma=3, every=2, max_new_tokens=12, lr=1e-2)
    serve(model, Tokenizer(), prompts, out=out, **stream | changes)


def stopped(method, call: int):
    """Let Ctrl-C stop a method in the second chunk of its call of this number."""
    calls = []

    def run(*args, **options):
        calls.append(args)
        for i, chunk in enumerate(method(*args, **options), 1):
            if (len(calls), i) == (call, 2):
                raise KeyboardInterrupt
            yield chunk
    return run


def test_a_stopped_stream_goes_on(model, tmp_path, monkeypatch):
    """Its answers, and what the draft has learnt, are those of a whole run, wherever it is stopped.
    A request answered since the last step is answered again. More prompts may come."""
    answer(model, tmp_path / "whole")
    for line, prompt in zip(open(tmp_path / "whole"), PROMPTS, strict=True):
        row = json.loads(line)
        expected = tokens_of(autoregressive(FeatureLM(model), prompt), 12, {1})
        assert (row["prompt"], row["answer"]) == (prompt, expected)
        assert 0 <= row["accepted"] <= row["drafted"]
    for stop in (2, 3, 4):  # before the first step, right after it, and later
        out = tmp_path / f"{stop}"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, "speculative", stopped(module.speculative, stop))
            answer(model, out)
        answer(model, out, PROMPTS[:4])
        with open(out, "a") as file:
            file.write('{"prompt": [8, 3')  # the power failed
        answer(model, out)
        assert out.read_text() == (tmp_path / "whole").read_text(), stop
    learnt, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / f"{x}.work/draft")
                     for x in (4, "whole"))
    assert all(torch.equal(a, b) for a, b in zip(learnt.parameters(), whole.parameters()))
    assert any(not torch.equal(a, b)
               for a, b in zip(learnt.parameters(), near(model, 0.1).parameters()))


def test_answers_that_the_draft_has_learnt_from_must_be_there(model, tmp_path):
    out = tmp_path / "a"
    answer(model, out, PROMPTS[:4])
    with pytest.raises(InputError, match="--out must hold the answers to the first 4 prompts"):
        answer(model, out, PROMPTS[::-1])
    half = out.read_text().splitlines(keepends=True)[:3]
    for text in ("", "".join(half)):
        out.write_text(text)
        with pytest.raises(InputError, match="--out must hold the answers to the first 4 prompts"):
            answer(model, out)
    answer(model, tmp_path / "b", PROMPTS[:4], work=tmp_path / "w")  # a new file begins anew


@pytest.mark.parametrize("text", ["# a text\n", "[1]\n", "{}\n", '{"prompt": [1]}\n'])
def test_no_other_file_is_overwritten(model, tmp_path, text):
    (tmp_path / "a").write_text(text)
    with pytest.raises(InputError, match="or be a new file"):
        answer(model, tmp_path / "a")
    assert (tmp_path / "a").read_text() == text


@pytest.mark.parametrize("change", [dict(lr=1e-3), dict(every=1), dict(temperature=1.0),
                                    dict(gamma=2)])
def test_answers_of_another_run_are_not_overwritten(model, tmp_path, change):
    answer(model, tmp_path / "a", PROMPTS[:4])
    known = (tmp_path / "a").read_text()
    with pytest.raises(InputError, match="or be a new file"):
        answer(model, tmp_path / "a", PROMPTS[:4], **change)
    assert (tmp_path / "a").read_text() == known


def test_each_request_has_coins_of_its_own(model, tmp_path):
    answer(model, tmp_path / "a", [PROMPT] * 4, temperature=1.0)
    answers = [json.loads(line)["answer"] for line in open(tmp_path / "a")]
    assert len({tuple(answer) for answer in answers}) == 4


@pytest.mark.parametrize("said, change", [
    ("--prompts must be texts of at most 2 tokens, got 3", dict(max_new_tokens=62)),
    ("--gamma must be at most 52, got 99", dict(gamma=99))])
def test_what_does_not_fit_in_the_context_is_refused(model, tmp_path, said, change):
    with pytest.raises(InputError, match=said):
        answer(model, tmp_path / "a", **change)


# ----------------------------------------------------------------------------- a second draft

def test_a_second_draft_learns_all_that_the_first_gets_wrong_and_no_more(model, tmp_path, capsys,
                                                                         monkeypatch):
    """At first it is the first draft. In the end one of the two is right more often than the first
    alone."""
    scored, learnt, divergence = [], [], training.divergence
    monkeypatch.setattr(module, "read_answers", lambda *given: scored.append(
        training.read_answers(*given)) or scored[-1])
    monkeypatch.setattr(training, "divergence", lambda kind, p, q: learnt.append(
        (p, q.detach().clone())) or divergence(kind, p, q))
    prompts, first = [[x, y, 7] for x in range(4, 24) for y in (3, 9)], near(model, 0.1)
    boost(model, Tokenizer(), prompts, out=tmp_path / "b", max_new_tokens=8, steps=30, batch=8)
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step")]
    begin, end = ([float(x.strip(",")) for x in line.split("right:")[1].replace("either", "")
                   .split()] for line in (lines[0], lines[-1]))
    assert begin[0] == begin[1] == begin[2] == end[0] < end[2] and len(learnt) == 30
    for i, (p, q) in enumerate(learnt):
        (teacher, labels), (known, _), (student, _) = scored[3 * i:3 * i + 3]
        with torch.no_grad(), training.low_precision(model.device, model):
            wrong = first.lm_head(known).argmax(-1) != labels
            expected = model.lm_head(teacher[wrong]).float()
        assert wrong.any() and not wrong.all()
        torch.testing.assert_close(p, expected)
        assert len(q) == len(p) and (i > 0 or torch.equal(student, known))
    assert torch.equal(scored[1][0], scored[2][0])
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert any(not torch.equal(a, b) for a, b in zip(second.parameters(), first.parameters()))
