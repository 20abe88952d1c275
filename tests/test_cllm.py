"""Consistency LLMs: trajectories are those of the iteration, the losses are the paper's, and a
trained model is a plain model directory."""
import itertools
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from cllm import (augment_states, cllm, collect, draw_states, find_trajectories, losses, profile,
                  profile_of, repeats, report, train, training_tree)
from common import CachedLM, autoregressive
from families import tiny
from helpers import check_refused, interrupting, tokens_of
from training.loop import divergence
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


def test_profile_counts_what_decoding_reports(capsys):
    model = tiny("llama")
    profile(model, WORDLESS, PROMPTS[:1], n=8, max_new_tokens=30)
    log = []
    tokens_of(cllm(CachedLM(model), PROMPTS[0], n=8, log=log), 30, {1})
    words = report(SimpleNamespace(log=log, eos={1})).split()
    row = f"|  | {words[0]} | 8 | {words[3]} | {words[7]} |"
    assert capsys.readouterr().out.splitlines()[-1] == row


# -------------------------------------------------------------------------------- collecting

@pytest.mark.parametrize("ends", [False, True])
def test_trajectories_follow_the_iteration_to_the_autoregressive_output(ends):
    """Each state is the model's choice after the one before (Eq. 3). The fixed points are AR's
    output, and no state after its end is kept."""
    lm = CachedLM(tiny("llama"))
    for prompt in PROMPTS[1:]:
        eos = {tokens_of(autoregressive(lm, prompt), 10)[-1]} if ends else set()
        expected = tokens_of(autoregressive(lm, prompt), 15, eos)
        answer, blocks = find_trajectories(lm, prompt, 6, 15, eos)
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


LOOP = "She then has four apples. Tom is here. "


@pytest.mark.parametrize("tokens, text, found", [
    ([3, 4, *[7] * 12, 5], "", True), ([7] * 11, "", False),
    ([1, 2, 3] * 5, "", True), ([1, 2, 3] * 4 + [1, 2], "", False),
    ([], LOOP * 3, True), ([], LOOP * 2, False),
    ([], "        return\n        }\n" * 3, False)])  # lines of ordinary code are short
def test_an_answer_that_repeats_itself_is_seen(tokens, text, found):
    assert repeats(tokens, text) == found


def read(path):
    return [*map(json.loads, path.read_text().splitlines())]


def test_collected_lines(tmp_path):
    """The file has those of `find_trajectories`, with some tokens corrected. A prompt that fills
    the context and an answer that repeats itself have none. An older file is never lost."""
    model, out, rng = tiny("gpt2"), tmp_path / "o.jsonl", random.Random(1)
    how = dict(out=out, n=6, max_new_tokens=12, augment=0.9, seed=1)
    collect(model, WORDLESS, [[3, 4] * 80, *PROMPTS], **how)
    for prompt, row in zip(PROMPTS, read(out), strict=True):
        answer, blocks = find_trajectories(CachedLM(model), prompt, 6, 12, {1}, 1)
        for _, path in blocks:
            augment_states(path, 0.9, rng)
        assert row == {"prompt": prompt, "answer": answer, "blocks": [[*x] for x in blocks]}
    with pytest.raises(FileExistsError):
        collect(model, WORDLESS, PROMPTS, out=out)
    said = "She has four apples now.\n"
    loop = SimpleNamespace(eos_token_id=None, decode=lambda ids, **_: said * 3)
    collect(model, loop, PROMPTS[:1], **how | {"out": tmp_path / "b"})
    assert read(tmp_path / "b") == []


def test_ctrl_c_keeps_the_answers_that_are_collected(tmp_path, monkeypatch):
    """Each line is in the file at once, even if the process is killed."""
    model, seen = tiny("llama"), []

    def decode(ids, **_):
        seen.append((tmp_path / "o").read_text().count("\n"))
        return str(ids)
    tokenizer = SimpleNamespace(eos_token_id=None, decode=interrupting(decode, 3))
    with pytest.raises(KeyboardInterrupt):
        collect(model, tokenizer, PROMPTS, out=tmp_path / "o", n=6, max_new_tokens=12)
    assert seen == [0, 1, 2] and [x["prompt"] for x in read(tmp_path / "o")] == PROMPTS[:2]


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


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma2-capped"])
def test_losses_equal_a_plain_computation(name):
    """The plain computation takes a pass for each position of Eqs. 4 and 6. The gradient must be
    equal too, with a constant teacher. Rows of the prompt become no logits. Answers without states
    have no consistency loss."""
    model, rng = tiny(name), random.Random(1)
    rows, weight = rows_of(model)[:2], model.get_input_embeddings().weight
    drawn = [draw_states(row, 2, rng) for row in rows]

    def logits_after(ids):
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    terms, ar = [], []
    for row, some in zip(rows, drawn):
        text, first = row["prompt"] + row["answer"], len(row["prompt"])
        for start, y in some:
            y_star = text[start:start + len(y)]
            for i in range(1, len(y)):
                if y[:i] != y_star[:i]:
                    teacher = logits_after(text[:start] + y_star[:i]).detach()
                    student = logits_after(text[:start] + y[:i])
                    terms.append(divergence("forward-kl", teacher, student))
        ar += [-logits_after(text[:i]).log_softmax(-1)[text[i]] for i in range(first, len(text))]
    assert len(terms) > 10
    scored = []
    with model.get_output_embeddings().register_forward_hook(
            lambda head, inputs, output: scored.append(output.shape[1])):
        found = losses(model, rows, drawn)
    assert len(scored) == 2 and sum(scored) == len(ar) + 2 + len(terms)
    for loss, expected in zip(found, (sum(terms) / len(terms), sum(ar) / len(ar))):
        torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-4)
        both = [torch.autograd.grad(x, weight, retain_graph=True)[0] for x in (loss, expected)]
        torch.testing.assert_close(*both, atol=1e-5, rtol=1e-3)
    assert losses(model, rows, [[]] * 2)[0].item() == 0


def test_states_are_those_before_the_fixed_point():
    path = [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    row = {"prompt": [1], "answer": [2, 3], "blocks": [(0, path), (3, [[4, 5, 6]])]}
    drawn = {tuple(draw_states(row, 1, random.Random(seed))[0][1]) for seed in range(20)}
    assert drawn == {(1, 0, 0), (1, 2, 0)}
    assert sorted(draw_states(row, 5, random.Random(0))) == [(0, path[0]), (0, path[1])]


# ---------------------------------------------------------------------------------- training

@pytest.fixture
def data(tmp_path):
    """Write a file of trajectories."""
    path = tmp_path / "data"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(tiny("llama"))))
    return path


def test_the_gradient_and_the_rate_of_each_step(data, tmp_path, monkeypatch):
    """The loss is Eq. 7, and the gradient of a step before is forgotten. The rate rises over a
    twentieth of the steps, then falls. A short training has no warm-up."""
    model, clip, lengths, rates = tiny("llama"), torch.nn.utils.clip_grad_norm_, [], []
    p = next(model.parameters())
    monkeypatch.setattr("cllm.losses", lambda *given: (2.0 * p.sum(), 0.5 * p.sum()))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_",
                        lambda *given: lengths.append(clip(*given).item()))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda x: rates.append(x.param_groups[0]["lr"]))
    for steps in 40, 3:
        train(model, WORDLESS, data=data, out=tmp_path / str(steps), lr=0.1, w=100.0, steps=steps)
    expected = [0.05, *(0.1 - 0.1 * t / 40 for t in range(1, 40)), 0.1, 0.2 / 3, 0.1 / 3]
    assert rates == pytest.approx(expected)
    assert lengths == pytest.approx([(2 + 100 * 0.5) * p.numel() ** 0.5] * 43)


def test_a_trained_model_is_a_plain_greedy_model_directory(data, tmp_path, capsys):
    """Twenty steps make one that decodes in fewer calls than before. The model that
    it was made from has settings of sampling, which transformers refuses to save where it does not
    sample. The bar shows both losses."""
    model, out = tiny("llama"), tmp_path / "out"
    model.generation_config = GenerationConfig(temperature=0.9, do_sample=False, top_k=3,
                                               repetition_penalty=2.0, eos_token_id=[1, 3])
    train(model, WORDLESS, data=data, out=out, steps=20, lr=1e-2, w=1.0)
    assert re.search(r"20/20 .*ar=[\d.]+, consistency=[\d.]+", capsys.readouterr().err)
    trained = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    known = trained.generation_config.to_diff_dict()
    assert known.pop("eos_token_id") == [1, 3] and {*known} <= {"transformers_version"}
    for a, b in zip(trained.parameters(), model.parameters()):
        assert torch.equal(a, b.float()) and b.dtype == torch.bfloat16
    lms = CachedLM(trained), CachedLM(tiny("llama"))
    for lm, prompt in itertools.product(lms, PROMPTS):
        tokens_of(cllm(lm, prompt, n=6), 14)
    assert lms[0].calls < lms[1].calls


def test_ctrl_c_saves_the_model_and_training_goes_on_from_it(data, tmp_path, monkeypatch, capsys):
    """A save that is killed leaves no half model."""
    out, given = tmp_path / "out", dict(data=data, lr=1e-2, steps=5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "backward", interrupting(torch.Tensor.backward, 3))
        train(tiny("llama"), WORDLESS, out=out, **given)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"stopped after 2 of 5 steps; {out} has the model"
    stopped = AutoModelForCausalLM.from_pretrained(out)
    assert not any(map(torch.equal, stopped.parameters(), tiny("llama").bfloat16().parameters()))
    killed = SimpleNamespace(eos_token_id=None, save_pretrained=interrupting(str, 1))
    with pytest.raises(KeyboardInterrupt):
        train(stopped, killed, out=tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change, said", [
    ({"lr": 1e30}, "--lr must be below 1e.30: the loss is"),
    ({"out": Path()}, "a new folder as --out"),
    ({"data": Path(__file__).with_name("conftest.py")}, "a file of `cllm.py collect`")])
def test_wrong_input_is_one_line(change, said, data, tmp_path):
    """And no file is made. Numbers outside their ranges are in test_cli.py."""
    given = dict(data=data, out=tmp_path / "out", lr=1e-3, steps=3) | change
    check_refused(said, train, tiny("llama"), WORDLESS, **given)
    assert [*tmp_path.iterdir()] == [data]
