"""A draft that learns: output never changes; it learns from the row that predicts what was wrong; a
stopped stream goes on as if it had not been; a second draft knows what the first does not."""
import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from common import CachedLM, InputError, Sampler, autoregressive
from families import near, tiny
from helpers import ROOT, main, said_in_one_line, tokens_of
from models import training
from survey import online as module
from survey.online import Learner, boost, online, report_acceptance, serve

PROMPT = [3, 14, 15]
PROMPTS = [[x, 3, 7] for x in range(4, 12)]


def test_what_is_kept_is_the_row_that_predicts_the_corrected_token():
    """Of each round in which a guess was rejected, and of no other; its distribution is the
    target's there."""
    model = tiny("llama")
    target, draft = CachedLM(model), CachedLM(near(model, 0.1))
    learner, log = Learner(target, draft, "forward-kl", 1e-3), []
    text = PROMPT + tokens_of(learner.serve(PROMPT, 4, Sampler(1.0, seed=3), log), 40)
    [(known, failed)] = learner.kept
    assert known[:len(text)] == text
    logits = model(input_ids=torch.tensor([known])).logits[0]
    expected, at = [], len(PROMPT) - 1
    for record in log:
        if record["accepted"] < 4:
            expected.append(at + record["accepted"])
        at += record["accepted"] + 1
    assert [*failed] == expected and 3 < len(failed) < len(log)
    head = model.get_output_embeddings()
    for place, state in failed.items():
        found = learner.to_logits(head(state))
        torch.testing.assert_close(found, logits[place], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", module.KINDS)
def test_a_step_brings_the_draft_nearer_there(kind):
    """The divergence on the rows that were kept falls; they are dropped; the first draft stays."""
    model, small = tiny("llama"), near(tiny("llama"), 0.1)
    before = copy.deepcopy(small.state_dict())
    learner = Learner(CachedLM(model), CachedLM(small), kind, 1e-3)
    for prompt in ([3, 14], [9, 9, 2]):
        tokens_of(learner.serve(prompt, 4, Sampler(0), []), 30)

    def distance(kept) -> float:
        with torch.no_grad():
            rows = [training.divergence(kind, *(x(input_ids=torch.tensor([text])).logits[0, [*some]]
                                                for x in (model, learner.lm.model)))
                    for text, some in kept]
        return torch.cat(rows).mean().item()
    kept = list(learner.kept)
    first = distance(kept)
    learner.learn()
    assert distance(kept) < first - 1e-3 and learner.kept == [] and learner.training.done == 1
    learner.learn()  # nothing was kept
    assert learner.training.done == 2
    assert all(torch.equal(x, before[name]) for name, x in small.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "cohere2"])
def test_a_step_is_towards_what_the_target_thought_there(name, monkeypatch):
    """The loss is D(target, draft) of the rows that were kept, whatever the model makes of its LM
    head's output (Cohere scales it)."""
    model, small = tiny(name), near(tiny(name), 0.1)
    learner, given = Learner(CachedLM(model), CachedLM(small), "reverse-kl", 1e-3), []
    text = PROMPT + tokens_of(learner.serve(PROMPT, 4, Sampler(0), []), 30)
    places = [*learner.kept[0][1]]
    real = training.divergence
    monkeypatch.setattr(module, "measure_divergence", lambda *x: given.append(x) or real(*x))
    learner.learn()
    [(kind, p, q)] = given
    assert kind == "reverse-kl" and len(places) > 2
    ids = torch.tensor([text + [0] * 9])
    for rows, lm in ((p, model), (q, small)):
        expected = lm(input_ids=ids).logits[0, [x for x in places if x < len(text)]]
        torch.testing.assert_close(rows[:len(expected)].float(), expected, atol=0.3, rtol=0.05)


def test_each_pair_and_kind_has_a_learner_and_counts_go_on():
    model, draft = tiny("llama"), CachedLM(near(tiny("llama"), 0.1))
    targets = CachedLM(model), CachedLM(model)
    calls = []
    for target, kind in ((targets[0], "jsd"), (targets[1], "jsd"), (targets[1], "forward-kl"),
                         (targets[0], "jsd")):
        tokens_of(online(target, draft, PROMPT, divergence=kind), 20)
        calls.append(draft.calls)
    assert sum(name[0] == "online" for name in draft.memo) == 3
    assert 0 < calls[0] < calls[1] < calls[2] < calls[3] and draft.seconds > 0


def test_a_checkpoint_is_of_one_target_and_its_settings(tmp_path):
    model, small = tiny("llama"), CachedLM(near(tiny("llama"), 0.1))
    learner = Learner(CachedLM(model), small, "jsd", 1e-2, tmp_path, (1, 2))
    learner.learn()
    learner.training.save()
    for target, settings, done in ((model, (1, 2), 1), (near(model, 0.01), (1, 2), 0),
                                   (model, (1, 3), 0)):
        again = Learner(CachedLM(target), small, "jsd", 1e-2, tmp_path, settings)
        assert again.training.done == done


def test_the_draft_changes_between_prompts_only():
    model, draft = tiny("llama"), CachedLM(near(tiny("llama"), 0.1))
    weights = []
    for i in range(7):
        chunks = online(CachedLM(model) if i == 0 else target, draft, PROMPT, every=3, lr=1e-2)
        if i == 0:
            target = CachedLM(model)
            chunks = online(target, draft, PROMPT, every=3, lr=1e-2)
        next(chunks)
        [learner] = [x for key, x in draft.memo.items() if key[0] == "online"]
        weights.append(learner.lm.model.lm_head.weight.detach().clone())
        tokens_of(chunks, 20)
        assert torch.equal(weights[-1], learner.lm.model.lm_head.weight)
    changed = [not torch.equal(a, b) for a, b in zip(weights, weights[1:])]
    assert changed == [False, False, True, False, False, True]


# ----------------------------------------------------------------------------------- a stream

class Tokenizer:
    eos_token_id = None

    def get_vocab(self):
        return {f"t{i}": i for i in range(60)}

    def save_pretrained(self, folder):
        pass


@pytest.fixture
def pair(monkeypatch):
    """A model; its draft is loaded from anywhere."""
    model = tiny("llama", max_position_embeddings=64)
    monkeypatch.setattr(module, "draft_for", lambda *_: near(model, 0.1))
    return model


STREAM = dict(gamma=3, every=2, max_new_tokens=20, lr=1e-2)


def test_a_stopped_stream_goes_on(pair, tmp_path, monkeypatch):
    """Wherever it is stopped: the answers, and what the draft has learnt, are those of a whole run;
    more prompts may come."""
    serve(pair, Tokenizer(), PROMPTS, out=tmp_path / "whole", **STREAM)
    rows = [json.loads(line) for line in open(tmp_path / "whole")]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        assert row["prompt"] == prompt
        assert row["answer"] == tokens_of(autoregressive(CachedLM(pair), prompt), 20, {1})
        assert 0 <= row["accepted"] <= row["drafted"]
    for stop in (3, 14, 31, 44):
        out = tmp_path / f"{stop}"
        with monkeypatch.context() as patch:
            patch.setattr(module, "speculative", stopped(module.speculative, stop))
            with pytest.raises(KeyboardInterrupt):
                serve(pair, Tokenizer(), PROMPTS, out=out, **STREAM)
        serve(pair, Tokenizer(), PROMPTS[:6], out=out, **STREAM)
        serve(pair, Tokenizer(), PROMPTS, out=out, **STREAM)
        assert out.read_text() == (tmp_path / "whole").read_text(), stop
    learnt, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / f"{x}.work/draft")
                     for x in (44, "whole"))
    assert all(torch.equal(a, b) for a, b in zip(learnt.parameters(), whole.parameters()))
    assert any(not torch.equal(a, b)
               for a, b in zip(learnt.parameters(), near(pair, 0.1).parameters()))


def stopped(method, after: int):
    """Interrupted in the chunk of this number, over all calls."""
    seen = []

    def run(*args, **options):
        for chunk in method(*args, **options):
            seen.append(chunk)
            if len(seen) == after:
                raise KeyboardInterrupt
            yield chunk
    return run


def test_answers_that_the_draft_has_learnt_from_must_be_there(pair, tmp_path):
    serve(pair, Tokenizer(), PROMPTS[:4], out=tmp_path / "a", **STREAM)
    with pytest.raises(InputError, match="--out must hold the answers to the first 4 prompts"):
        serve(pair, Tokenizer(), PROMPTS[::-1], out=tmp_path / "a", **STREAM)
    (tmp_path / "a").write_text("")
    with pytest.raises(InputError, match="--out must hold the answers to the first 4 prompts"):
        serve(pair, Tokenizer(), PROMPTS, out=tmp_path / "a", **STREAM)
    serve(pair, Tokenizer(), PROMPTS, out=tmp_path / "a", work=tmp_path / "w", **STREAM)
    assert len(open(tmp_path / "a").readlines()) == 8


@pytest.mark.parametrize("text", ["# a text\n", "[1]\n", "{}\n", '{"prompt": [1]}\n'])
def test_no_other_file_is_overwritten(pair, tmp_path, text):
    """Nor the answers of another run."""
    (tmp_path / "a").write_text(text)
    with pytest.raises(InputError, match="or be a new file"):
        serve(pair, Tokenizer(), PROMPTS, out=tmp_path / "a", **STREAM)
    assert (tmp_path / "a").read_text() == text
    serve(pair, Tokenizer(), PROMPTS, out=tmp_path / "b", **STREAM)
    known = (tmp_path / "b").read_text()
    for change in (dict(lr=1e-3), dict(every=1), dict(temperature=1.0), dict(gamma=2)):
        with pytest.raises(InputError, match="or be a new file"):
            serve(pair, Tokenizer(), PROMPTS, out=tmp_path / "b", **STREAM | change)
    assert (tmp_path / "b").read_text() == known


def test_a_damaged_checkpoint_is_refused(pair, tmp_path):
    serve(pair, Tokenizer(), PROMPTS, out=tmp_path / "a", **STREAM)
    [file] = (tmp_path / "a.work").glob("online-*.pt")
    for damaged in (file.read_bytes()[:1000], b"", b"hello"):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match="expected a checkpoint, got a damaged one"):
            serve(pair, Tokenizer(), PROMPTS, out=tmp_path / "a", **STREAM)


def test_each_request_has_coins_of_its_own(pair, tmp_path):
    serve(pair, Tokenizer(), [PROMPT] * 4, out=tmp_path / "a", **STREAM | dict(temperature=1.0))
    answers = [json.loads(line)["answer"] for line in open(tmp_path / "a")]
    assert len({tuple(answer) for answer in answers}) == 4


def test_bad_input_is_one_line(capfd, tmp_path):
    for option, value, said in (("gamma", "0", "1 or more, got 0"),
                                ("every", "0", "1 or more, got 0"),
                                ("divergence", "tvd", "forward-kl, reverse-kl, jsd, got tvd"),
                                ("lr", "0", "above 0, got 0.0")):
        assert main([online], report_acceptance, [f"--{option}", value, "--prompt", "x"]) == 2
        said_in_one_line(f"--{option} must be {said}", capfd)
    argv = ["boost", "--prompts", str(ROOT / "models/examples.jsonl"), "--draft", str(tmp_path)]
    argv = [*argv, "--out", str(tmp_path / "c")]
    assert main([online], report_acceptance, argv, commands=[boost]) == 2
    said_in_one_line("expected a model directory", capfd)


def test_bad_settings_are_refused(tmp_path, pair):
    for said, change in (("--every must be 1 or more, got 0", dict(every=0)),
                         ("--gamma must be 1 or more, got 0", dict(gamma=0)),
                         ("--max-new-tokens must be 1 or more, got 0", dict(max_new_tokens=0)),
                         ("--prompts must be texts of at most", dict(max_new_tokens=62)),
                         ("--gamma must be at most .*, got 99", dict(gamma=99))):
        with pytest.raises(InputError, match=said):
            serve(pair, Tokenizer(), PROMPTS, out=tmp_path / "a", **STREAM | change)
    with pytest.raises(InputError, match="--steps must be 1 or more, got 0"):
        boost(pair, Tokenizer(), PROMPTS, out=tmp_path / "b", steps=0)


# ----------------------------------------------------------------------------- a second draft

def test_a_second_draft_learns_where_the_first_is_wrong(pair, tmp_path, capsys, monkeypatch):
    """Each place of a loss is one that the first draft gets wrong, and all of those; what it knows
    in the end is in its folder."""
    places = []
    real = training.divergence
    monkeypatch.setattr(module, "measure_divergence",
                        lambda kind, p, q: places.append((p.argmax(-1), q)) or real(kind, p, q))
    prompts = [[x, y, 7] for x in range(4, 24) for y in (3, 9)]
    small = dict(max_new_tokens=8, steps=40, batch=8)
    boost(pair, Tokenizer(), prompts, out=tmp_path / "b", **small)
    said = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step")]
    first, last = ([float(x.strip(",")) for x in line.split("right:")[1].replace("either", "")
                    .split()] for line in (said[0], said[-1]))
    assert first[0] == first[1] == first[2] == last[0] and last[2] > last[0]
    assert len(places) == 40
    learner = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    data, _ = training.collect_examples(pair, Tokenizer(), prompts, 8, tmp_path / "b.work", seed=0)
    draft = near(pair, 0.1)
    logits, labels = training.score_answers(draft, data)
    wrong = logits.argmax(-1) != labels
    assert max(len(x) for x, _ in places) < 8 * 8 and 0.1 < wrong.float().mean() < 0.98
    first_batch = places[0][1]  # before the first step the second is the first: it is wrong there
    assert (first_batch.argmax(-1) != places[0][0]).all()
    assert any(not torch.equal(a, b) for a, b in zip(learner.parameters(), draft.parameters()))


def test_acceptance_rises_with_traffic(embedded, held_out):
    """The embedded pair, its draft damaged: the same request is answered in fewer calls after the
    draft learnt from it twenty times; the answer is AR's all along."""
    target, draft, _ = embedded
    prompt, expected = held_out[0]
    lm, small = CachedLM(target), CachedLM(near(draft, 0.03))
    calls = []
    for _ in range(20):
        before = lm.calls
        assert tokens_of(online(lm, small, prompt, every=1), len(expected)) == expected
        calls.append(lm.calls - before)
    assert calls[-1] < 0.8 * calls[0]
