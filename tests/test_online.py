"""A draft that learns from the rows that predict what it got wrong. That the text never changes is
in test_lossless.py."""
import copy

import torch

from common import Sampler
from families import near, tiny
from helpers import tokens_of
from support.engine import EngineLM
from survey.online import Learner, online
from training import loop as training

PROMPT = [3, 14, 15]


def learner_of(model, draft, kind: str = "forward-kl") -> Learner:
    return Learner(EngineLM(model, 50), EngineLM(draft, 50), kind, 1e-3)


def test_what_is_kept_is_the_row_that_predicts_the_corrected_token():
    """Of each round in which a guess was rejected, and of no other. Its logits are the target's."""
    model, log, expected, at = tiny("llama"), [], [], len(PROMPT) - 1
    learner = learner_of(model, near(model, 0.03))
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
    """A table of positions has no place beyond it. The text goes on, as the last guesses do."""
    model = tiny("opt", max_position_embeddings=20)
    learner = learner_of(model, near(model, 0.1))
    tokens_of(learner.serve(PROMPT, 4, Sampler(0), []), 40)
    assert 3 < max(learner.kept[0][1]) < 20
    learner.learn()


def test_a_step_is_towards_what_the_target_thought_there(monkeypatch):
    """Also if the model scales its LM head's output, as Cohere does. The copy is nearer to it after
    that, and the draft that was given stays. The rows are dropped. Without rows nothing changes."""
    model, kind, given = tiny("cohere2"), "reverse-kl", []
    small, divergence = near(model, 0.1), training.divergence
    before, learner = copy.deepcopy(small.state_dict()), learner_of(model, small, kind)
    for prompt in PROMPT, [9, 9, 2]:
        tokens_of(learner.serve(prompt, 4, Sampler(0), []), 15)
    kept = list(learner.kept)
    monkeypatch.setattr(training, "divergence", lambda *x: given.append(x) or divergence(*x))
    learner.learn()
    learner.learn()
    [adam] = learner.training.optimizers
    assert learner.kept == [] and {x["step"].item() for x in adam.state.values()} == {1}
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
    target, draft = EngineLM(model), EngineLM(near(model, 0.1))
    for _ in range(5):
        chunks = online(target, draft, PROMPT, every=2, lr=1e-2)
        next(chunks)
        [learner] = [x for x in draft.memo.values() if isinstance(x, Learner)]
        weights.append(learner.lm.model.lm_head.weight.detach().clone())
        tokens_of(chunks, 8)
        assert torch.equal(weights[-1], learner.lm.model.lm_head.weight)
    changed = [not torch.equal(a, b) for a, b in zip(weights, weights[1:])]
    assert changed == [False, True, False, True]
    assert draft.calls > target.calls  # those of the copy
