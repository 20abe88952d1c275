"""Consistency LLMs: trajectories are those of the iteration, the losses are the paper's, and a
trained model is a plain model directory."""
import itertools
import json
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from cllm import (augment_states, cllm, collect, draw_states, find_trajectories, losses, profile,
                  profile_of, read_examples, report, train, training_tree)
from common import CachedLM, InputError, autoregressive
from families import tiny
from helpers import tokens_of
from support.parts import score_with
from support.settings import Settings, use_settings
from training.loop import Training, divergence
from trainings import WORDLESS

PROMPTS = [[5, 9, 3], [7], [4, 4, 17, 30, 2, 8, 11, 6, 25, 40, 12], [2, 33]]


# ---------------------------------------------------------------------------------- decoding

# In the first block the 4 was right early and stayed, in the second it was lost again.
STABLE = {"states": [[1, 9, 9, 9, 5], [1, 2, 9, 4, 8], [1, 2, 3, 4, 5]], "final": [1, 2, 5]}
UNSTABLE = {"states": [[1, 9, 9, 9, 9], [1, 2, 9, 4, 9], [1, 2, 3, 9, 9], [1, 2, 3, 4, 5]],
            "final": [1, 2, 3, 5]}
OPEN = {"states": [[1, 2, 3, 4, 5]] * 2, "final": [1, 3]}


def test_profile_counts_fast_forwarded_and_stationary_tokens():
    """Only complete blocks without an EOS count. The root of a block is of the text before it."""
    assert profile_of([STABLE]) == profile_of([STABLE], {1}) == (1, 2.0, 1.0)
    assert profile_of([STABLE, UNSTABLE, OPEN]) == (2, 8 / 5, 0.5)
    assert profile_of([STABLE], {4}) == (0, 0.0, 0.0)


def test_profile_counts_what_decoding_reports(monkeypatch, capsys):
    model = tiny("llama")
    monkeypatch.setattr("cllm.load", lambda *_: (model, None))
    profile(model, WORDLESS, PROMPTS[:1], after="new", n=8, max_new_tokens=30)
    *_, before, after = capsys.readouterr().out.replace("new", "").splitlines()
    log = []
    tokens_of(cllm(CachedLM(model), PROMPTS[0], n=8, log=log), 30, {1})
    words = report(SimpleNamespace(log=log, eos={1})).split()
    assert before == after == f"|  | {words[0]} | 8 | {words[3]} | {words[8]} |"


# -------------------------------------------------------------------------------- collecting

@pytest.mark.parametrize("limit, ends", [(15, False), (15, True)])
def test_trajectories_follow_the_iteration_to_the_autoregressive_output(limit, ends):
    """Each state is the model's choice after the one before (Eq. 3). The fixed points are AR's
    output, and no state after its end is kept."""
    lm = CachedLM(tiny("llama"))
    for prompt in PROMPTS[1:]:
        expected = tokens_of(autoregressive(lm, prompt), limit)
        eos = {expected[9]} if ends else set()
        expected = tokens_of(autoregressive(lm, prompt), limit, eos)
        answer, blocks = find_trajectories(lm, prompt, 6, limit, eos)
        text = prompt + answer
        assert answer == expected and blocks[0][0] == len(prompt) - 1
        for start, path in blocks:
            assert {*map(len, path)} == {min(6, len(text) - start)}
            assert path[-1] == text[start:start + 6] and path[-1] not in path[:-1]
            assert {*path[0][1:]} <= {*prompt}
            for before, after in itertools.pairwise(path):
                lm.start(text[:start])
                assert lm.forward(before[:-1]).argmax(-1).tolist() == after[1:]
        for (start, path), (following, _) in itertools.pairwise(blocks):
            assert following - start in (5, 6)  # the last token of the block, or the one after it
        assert blocks[-1][0] + len(blocks[-1][1][-1]) == len(text)


def test_augmentation_only_sets_wrong_tokens_right():
    """About half of 200 states are changed. About 0.3 of their wrong tokens are corrected, and
    never the first one."""
    path = [[1, *[0] * 10]] * 200 + [[1, *range(2, 12)]]
    new = [[*y] for y in path]
    augment_states(new, 0.3, random.Random(0))
    assert new[-1] == path[-1] and all(y[:2] == [1, 0] for y in new[:-1])
    assert all(token in (0, i) for y in new for i, token in enumerate(y, 1))
    changed = [y for y in new[:-1] if y != path[0]]
    assert 50 < len(changed) < 110
    assert 0.2 < sum(token > 0 for y in changed for token in y[2:]) / (9 * len(changed)) < 0.45


def read(path):
    return [*map(json.loads, path.read_text().splitlines())]


def test_collected_lines(tmp_path):
    """Those of `find_trajectories`, each prompt once; a prompt that fills the context, and an
    answer that repeats itself, have no blocks."""
    model, out, prompts = tiny("gpt2"), tmp_path / "folder" / "o.jsonl", [*PROMPTS, [3, 4] * 80]
    collect(model, WORDLESS, [*prompts, PROMPTS[0]], out=out, n=6, max_new_tokens=12, augment=0)
    for prompt, row in zip(prompts, read(out)[1:], strict=True):
        answer, blocks = find_trajectories(CachedLM(model), prompt, 6, min(12, 160 - len(prompt)),
                                           {1})
        assert row == {"prompt": prompt, "answer": answer, "blocks": [[*x] for x in blocks]}
    loop = SimpleNamespace(eos_token_id=None, decode=lambda ids: "She has four apples now.\n" * 3)
    collect(model, loop, PROMPTS[:1], out=tmp_path / "b", n=6, max_new_tokens=9)
    assert read(tmp_path / "b")[1]["blocks"] == []


def test_collecting_goes_on_where_it_was(tmp_path):
    """A run that stopped, say while it wrote the third answer, ends with the file of a whole run.
    With other settings a run does not go on."""
    model, whole, half = tiny("llama"), tmp_path / "whole", tmp_path / "half"
    options = dict(n=6, max_new_tokens=12, augment=1.0)
    collect(model, WORDLESS, PROMPTS, out=whole, **options)
    lines = whole.read_text().splitlines(keepends=True)
    for kept in "", lines[0][:9], "".join(lines[:3]) + lines[3][:-1]:
        half.write_text(kept)
        collect(model, WORDLESS, PROMPTS, out=half, **options)
        assert half.read_text() == whole.read_text()
    for lm, other in (tiny("llama", seed=1), {}), (model, {"augment": 0}):
        with pytest.raises(InputError, match="expected a file of {'model': .* of others"):
            collect(lm, WORDLESS, PROMPTS, out=half, **options | other)
        assert half.read_text() == whole.read_text()
    half.write_text(lines[0] + '{"prompt": 5}\n')
    with pytest.raises(InputError, match="that an earlier run kept in line 2"):
        collect(model, WORDLESS, PROMPTS, out=half, **options)
    collect(model, WORDLESS, PROMPTS, out=tmp_path / "plain", **options | {"augment": 0})
    assert read(tmp_path / "plain")[1:] != read(whole)[1:]


# -------------------------------------------------------------------------------- the losses

def rows_of(model, n=6):
    found = [find_trajectories(CachedLM(model), prompt, n, 14, {3}) for prompt in PROMPTS]
    return [{"prompt": p, "answer": a, "blocks": b} for p, (a, b) in zip(PROMPTS, found)]


def test_a_state_leaves_the_answer_at_its_first_wrong_token():
    """The first tree is the header's picture. In the last one 3 and the second 0 predict nothing,
    since they are the last tokens of their blocks. The 9 after a wrong token does not come back to
    the answer."""
    root, a1, a2, a3, x2, x3 = range(6)
    ids, parents, compared = training_tree([root, a1, a2, a3], [(0, [root, a1, x2, x3])])
    assert (ids, parents) == ([root, a1, a2, a3, x2], [-1, 0, 1, 2, 1]) and compared == [(2, 4)]
    text = [5, 6, 7, 8, 9, 10, 11]
    assert training_tree(text, [(1, text[1:])]) == (text, [*range(-1, 6)], [])
    ids, parents, compared = training_tree(text, [(1, [6, 7, 0, 9, 2, 3]), (1, text[1:6] + [0])])
    assert ids == text + [0, 9, 2] and parents == [-1, 0, 1, 2, 3, 4, 5, 2, 7, 8]
    assert compared == [(3, 7), (4, 8), (5, 9)]


@pytest.mark.parametrize("name, kind", [("gpt2", "forward-kl"), ("mistral", "reverse-kl")])
def test_losses_equal_a_plain_computation(name, kind):
    """The plain computation takes a pass for each position of Eqs. 4 and 6. The gradient must be
    equal too, with a constant teacher. Only rows that a loss reads become logits. Answers without
    states have no consistency loss."""
    model, rng = tiny(name), random.Random(1)
    rows, weight = rows_of(model)[:2], model.get_input_embeddings().weight
    states = [draw_states(row, 2, rng) for row in rows]

    def logits_after(ids):
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    terms, ar = [], []
    for row, some in zip(rows, states):
        text, first = row["prompt"] + row["answer"], len(row["prompt"])
        for start, y in some:
            y_star = text[start:start + len(y)]
            for i in range(1, len(y)):
                if y[:i] != y_star[:i]:
                    teacher = logits_after(text[:start] + y_star[:i]).detach()
                    terms.append(divergence(kind, teacher, logits_after(text[:start] + y[:i])))
        ar += [-logits_after(text[:i]).log_softmax(-1)[text[i]] for i in range(first, len(text))]
    assert len(terms) > 10
    score, scored = score_with(model), []
    found = losses(model, lambda x: scored.append(len(x)) or score(x), rows, states, kind)
    assert scored == [len(ar), len(terms), len(terms)]
    for loss, expected in zip(found, (sum(terms) / len(terms), sum(ar) / len(ar))):
        torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-4)
        both = [torch.autograd.grad(x, weight, retain_graph=True)[0] for x in (loss, expected)]
        torch.testing.assert_close(*both, atol=1e-5, rtol=1e-3)
    assert losses(model, score_with(model), rows, [[]] * 2)[0].item() == 0


def test_states_are_those_before_the_fixed_point():
    path = [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    row = {"prompt": [1], "answer": [2, 3], "blocks": [(0, path), (3, [[4, 5, 6]])]}
    drawn = {tuple(draw_states(row, 1, random.Random(seed))[0][1]) for seed in range(20)}
    assert drawn == {(1, 0, 0), (1, 2, 0)}
    assert sorted(draw_states(row, 5, random.Random(0))) == [(0, path[0]), (0, path[1])]


# ---------------------------------------------------------------------------------- training

def write(path, rows):
    """Write a file of trajectories."""
    lines = [{"model": "m", "n": 6}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_w_is_the_weight_of_the_ar_loss(tmp_path, monkeypatch):
    """The loss of the training is Eq. 7. Each of two passes has a half of it."""
    found, one = [], torch.ones((), requires_grad=True)
    monkeypatch.setattr(Training, "updates", lambda self, evaluate: [random.Random(0)])
    monkeypatch.setattr(Training, "check", lambda self, loss: found.append(loss.item()))
    monkeypatch.setattr("cllm.losses", lambda *given: (2.0 * one, 0.5 * one))
    data = write(tmp_path / "data", rows_of(tiny("llama")))
    with use_settings(Settings(accumulate=2)):
        train(tiny("llama"), WORDLESS, data=data, out=tmp_path / "out", lr=1e-3, w=100.0)
    assert found == [(2 + 100 * 0.5) / 2] * 2 and one.grad == 2 + 100 * 0.5


def test_examples_are_split_at_random(tmp_path):
    """One in ten is held out, 20 at most. Answers without blocks and long texts are left out."""
    row, file = rows_of(tiny("llama"))[0], tmp_path / "data"
    rows = [row | {"prompt": [i, 9, 3]} for i in range(50)]
    rows += [row | {"blocks": []}, row | {"prompt": [9] * 60}]
    with use_settings(Settings(max_length=len(row["answer"]) + 3)):
        (n, examples, held_out), another = (read_examples(write(file, rows), x, 61) for x in (0, 1))
    assert n == 6 and len(held_out) == 5 and another[2] != held_out
    assert sorted(x["prompt"][0] for x in examples + held_out) == [*range(50)]
    assert len(read_examples(write(file, [row] * 300), 0, 61)[2]) == 20
    with pytest.raises(InputError, match="must have trajectories of 2 prompts or more"):
        read_examples(write(file, []), 0, 61)
    with pytest.raises(InputError, match="--data must be of tokens below 61, got 61"):
        read_examples(write(file, [row, row | {"prompt": [61]}]), 0, 61)
    file.write_text("{}\n")
    with pytest.raises(InputError, match="a file made by `python cllm.py collect`, got "):
        read_examples(file, 0, 61)


def test_a_cllm_is_a_plain_greedy_model_directory(tmp_path):
    """Though the model that it was trained from has settings of sampling, which transformers
    refuses to save where it does not sample; nothing is lost after the training."""
    model, out = tiny("llama"), tmp_path / "out"
    data = write(tmp_path / "data", rows_of(model))
    model.generation_config = GenerationConfig(temperature=0.9, do_sample=False, top_k=3,
                                               repetition_penalty=2.0, eos_token_id=[1, 3])
    train(model, WORDLESS, data=data, out=out, steps=2, lr=5e-4)
    trained = AutoModelForCausalLM.from_pretrained(out)
    known = trained.generation_config.to_diff_dict()
    assert known.pop("eos_token_id") == [1, 3] and {*known} <= {"transformers_version"}
    for a, b in zip(trained.parameters(), model.parameters()):
        assert torch.equal(a, b) and a.dtype == torch.bfloat16
