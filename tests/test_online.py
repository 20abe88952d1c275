"""A draft that learns from the rows that predict what it got wrong; a stopped stream goes on as if
it had not been. That the text never changes is in test_lossless.py."""
import copy
import json

import pytest
import torch
from safetensors.torch import load_file

from common import InputError, Sampler, autoregressive
from families import near, tiny
from helpers import interrupting, tokens_of
from support.layers import FeatureLM
from survey import online as module
from survey.online import Learner, online, serve
from training import loop as training
from trainings import WORDLESS

PROMPT = [3, 14, 15]
PROMPTS = [[x, 3, 7] for x in range(4, 10)]


def learner_of(model, draft, kind: str = "forward-kl", *more) -> Learner:
    return Learner(FeatureLM(model, 50), FeatureLM(draft, 50), kind, 1e-3, *more)


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


def test_nothing_is_learnt_beyond_the_context():
    """A table of positions ends there. The text goes on, as the last guesses do."""
    model = tiny("opt", max_position_embeddings=20)
    learner = learner_of(model, near(model, 0.1))
    tokens_of(learner.serve(PROMPT, 4, Sampler(0), []), 40)
    assert 3 < max(learner.kept[0][1]) < 20
    learner.learn()


def test_a_step_is_towards_what_the_target_thought_there(monkeypatch):
    """Also if the model scales its LM head's output, as Cohere does. The copy is nearer to it after
    that, and the draft that was given stays. The rows are dropped. A step without rows changes
    nothing, and counts."""
    model, kind, given = tiny("cohere2"), "reverse-kl", []
    small, divergence = near(model, 0.1), training.divergence
    before, learner = copy.deepcopy(small.state_dict()), learner_of(model, small, kind)
    for prompt in PROMPT, [9, 9, 2]:
        tokens_of(learner.serve(prompt, 4, Sampler(0), []), 15)
    kept = list(learner.kept)
    monkeypatch.setattr(training, "divergence", lambda *x: given.append(x) or divergence(*x))
    learner.learn()
    learner.learn()
    assert learner.kept == [] and learner.training.done == 2
    [(used, *logits)] = given
    assert used == kind and min(len(places) for _, places in kept) > 2

    def read_rows(model):
        return torch.cat([model(input_ids=torch.tensor([text])).logits[0, [*places], :50]
                          for text, places in kept])
    for rows, lm in zip(logits, (model, small)):
        torch.testing.assert_close(rows.float(), read_rows(lm), atol=0.3, rtol=0.05)
    before_and_after = (read_rows(x) for x in (small, learner.lm.model))
    far, near_to = (divergence(kind, logits[0], rows).mean() for rows in before_and_after)
    assert near_to < far
    assert all(torch.equal(x, before[name]) for name, x in small.state_dict().items())


def test_the_draft_changes_between_prompts_only():
    model, weights = tiny("llama"), []
    target, draft = FeatureLM(model), FeatureLM(near(model, 0.1))
    for _ in range(5):
        chunks = online(target, draft, PROMPT, every=2, lr=1e-2)
        next(chunks)
        [learner] = [x for key, x in draft.memo.items() if key[0] == "online"]
        weights.append(learner.lm.model.lm_head.weight.detach().clone())
        tokens_of(chunks, 8)
        assert torch.equal(weights[-1], learner.lm.model.lm_head.weight)
    changed = [not torch.equal(a, b) for a, b in zip(weights, weights[1:])]
    assert changed == [False, True, False, True]
    assert draft.calls > target.calls  # those of the copy


# ----------------------------------------------------------------------------------- a stream

@pytest.fixture
def model(monkeypatch):
    """Make a model, whose drafts are near it as the name of each says."""
    model = tiny("llama", max_position_embeddings=64)
    monkeypatch.setattr(module, "draft_for", lambda *given: near(model, float(given[-1])))
    return model


def answer(model, out, prompts=PROMPTS, **changes) -> None:
    stream = dict(draft="0.1", gamma=3, every=2, max_new_tokens=12, lr=1e-2)
    serve(model, WORDLESS, prompts, out=out, **stream | changes)


def test_a_stopped_stream_goes_on(model, tmp_path, monkeypatch):
    """Its answers, and what the draft has learnt, are those of a whole run, wherever it is stopped.
    A request answered since the last step is answered again. More prompts may come."""
    answer(model, tmp_path / "whole")
    for line, prompt in zip(open(tmp_path / "whole"), PROMPTS, strict=True):
        row = json.loads(line)
        expected = tokens_of(autoregressive(FeatureLM(model), prompt), 12, {1})
        assert (row["prompt"], row["answer"]) == (prompt, expected)
        assert 0 <= row["accepted"] <= row["drafted"]
    for stop in (2, 5):  # in a request before the first step, and in the second step
        out = tmp_path / f"{stop}"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, "speculative", interrupting(module.speculative, stop))
            patch.setattr(Learner, "learn", interrupting(Learner.learn, 2))
            answer(model, out)
        answer(model, out, PROMPTS[:4])
        with open(out, "a") as file:
            file.write('{"prompt": [8, 3')  # the power failed
        answer(model, out)
        assert out.read_text() == (tmp_path / "whole").read_text(), stop
        learnt, whole = (load_file(tmp_path / f"{x}.work/draft/model.safetensors")
                         for x in (stop, "whole"))
        assert learnt.keys() and all(torch.equal(x, whole[name]) for name, x in learnt.items())


OTHERS = [  # another run
    dict(lr=1e-3), dict(every=1), dict(gamma=2), dict(divergence="jsd"), dict(seed=1),
    dict(temperature=1.0), dict(max_new_tokens=9), dict(draft="0.2"),
    dict(model=tiny("llama", 1, max_position_embeddings=64)), dict(prompts=PROMPTS[::-1])]
TEXTS = ["", "# a text\n", '{"prompt": [4, 3, 7], "answer": [5]}\n', '{"prompt": [1]}\n']


def test_no_other_file_is_gone_on_with_or_overwritten(model, tmp_path):
    """Neither answers of another run nor less than what the draft has learnt from."""
    out = tmp_path / "a"
    answer(model, out, PROMPTS[:3])
    known = out.read_text()
    for change, text in [*((x, known) for x in OTHERS), *(({}, x) for x in TEXTS)]:
        out.write_text(text)
        with pytest.raises(InputError, match="the answers to the first [02] prompts|in line 1; "):
            answer(**dict(model=model, out=out) | change)
        assert out.read_text() == text, change


def test_guesses_that_were_cut_off_are_not_accepted(model, tmp_path):
    """All are right. A chunk of 7 tokens has 6 guesses, and the cut one of 5 tokens has 5."""
    answer(model, tmp_path / "a", [PROMPT], draft="0", gamma=6)
    assert json.loads((tmp_path / "a").read_text())["accepted"] == 6 + 5


def test_each_request_has_coins_of_its_own(model, tmp_path):
    out = tmp_path / "new/folder/a"
    answer(model, out, [PROMPT] * 4, temperature=1.0)
    answers = [json.loads(line)["answer"] for line in open(out)]
    assert len({tuple(answer) for answer in answers}) == 4
