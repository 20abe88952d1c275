import itertools
import json
import random
import runpy
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import cllm as module
from cllm import augmented, cllm, divergence, drawn, fit, losses, profile_of, read_trajectories, repeats, training_tree, trajectories
from common import CachedLM, InputError, Sampler, autoregressive, load
from conftest import CONTEXT, ROOT, ScriptedLM, chi_square_ok, markov, tiny, tokens_of

PROMPTS = [[5, 9, 3], [7], [4, 4, 17, 30, 2, 8, 11, 6, 25, 40, 12], [2, 33]]


def collected(model, block=6, limit=20, eos=frozenset(), numbers=(0, 1, 2, 3), **options):
    return trajectories(model, [PROMPTS[i] for i in numbers], list(numbers), block=block, limit=limit, eos=set(eos), **options)


# ---------------------------------------------------------------- decoding

def test_greedy_equals_autoregressive(family):
    model = tiny(family)
    for prompt, n, block in (([5, 9, 3, 14, 7], 120, 8), ([7], 40, 2), (PROMPTS[2], 149, 16)):  # the last one up to the end of the context
        expected = tokens_of(autoregressive(CachedLM(model, CONTEXT), prompt), n)
        assert tokens_of(cllm(CachedLM(model, CONTEXT), prompt, block=block), n) == expected
        assert tokens_of(cllm(CachedLM(model, CONTEXT), prompt, block=block), n, {expected[n // 2]}) == expected[:expected.index(expected[n // 2]) + 1]


def test_profile_counts_fast_forwarded_and_stationary_tokens():
    complete = {"states": [[1, 9, 9, 9, 5], [1, 2, 9, 4, 8], [1, 2, 3, 4, 5]], "final": [1, 2, 5]}  # the 4 was right early and stayed
    unstable = {"states": [[1, 9, 9, 9, 9], [1, 2, 9, 4, 9], [1, 2, 3, 9, 9], [1, 2, 3, 4, 5]], "final": [1, 2, 3, 5]}  # here it was lost again
    assert profile_of([complete]) == (1, 2.0, 1.0) and profile_of([complete, unstable]) == (2, 8 / 5, 0.5)
    assert profile_of([{"states": [[1, 2]], "final": [1]}]) == (0, 0.0, 0.0)


# ---------------------------------------------------------------- collecting

def test_trajectories_follow_the_iteration_to_the_autoregressive_output(family):
    """Every state is the model's choice after the one before (Eq. 3) and has more final tokens, y* is what AR gives."""
    model = tiny(family)
    for prompt, paths in zip(PROMPTS, collected(model)):
        expected, context = tokens_of(autoregressive(CachedLM(model, CONTEXT), prompt), 23), list(prompt[:-1])
        assert [token for path in paths for token in path[-1]] == [prompt[-1], *expected] and len(paths) == 4  # 20 tokens take 4 blocks of 6
        lm = CachedLM(model, CONTEXT)
        for path in paths:
            for before, after in zip(path, path[1:]):
                lm.start(context, width=6)
                assert lm.forward(before[:-1]).argmax(-1).tolist() == after[1:]
            final = [next((i for i in range(6) if state[i] != path[-1][i]), 6) for state in path]
            assert final == sorted(set(final)) and final[-1] == 6 and set(path[0][1:]) <= set(prompt)
            context += path[-1]


def test_batched_collection_equals_one_by_one(family):
    model = tiny(family)
    together = collected(model)
    assert together == [collected(model, numbers=[i])[0] for i in range(4)]
    assert together != collected(model, seed=1) and together[0] != collected(model, numbers=[1, 2])[0]


def test_answers_end_with_the_first_eos():
    """Wherever in a block it stands, as its root too, and whatever other prompts do; states end where y* does."""
    model = tiny("llama")
    expected = [tokens_of(autoregressive(CachedLM(model, CONTEXT), prompt), 23) for prompt in PROMPTS]
    for where in (0, 3, 5, 11, 19):  # with the prompt's token 5 is the root of the second block
        eos = expected[2][where]
        for paths, ar in zip(collected(model, eos={eos}), expected):
            end = ar.index(eos) + 1 if eos in ar else len(ar)
            assert [token for path in paths for token in path[-1]][1:] == ar[:end]
            for path in paths:
                assert {len(state) for state in path} == {len(path[-1])} and all(a != b for a, b in zip(path, path[1:]))


def test_augmentation_only_sets_wrong_tokens_right():
    rng = random.Random(0)
    path = [[1, *(rng.choice([0, i]) for i in range(2, 12))] for _ in range(200)] + [[1, *range(2, 12)]]
    new = augmented(path, 0.3, rng)
    assert new[-1] == path[-1] and len(new) == len(path)
    changed = [(before, after) for before, after in zip(path, new) if before != after]
    assert 70 < len(changed) < 130  # half of 200, but for those with nothing to set right
    assert all(t == b or t == right for before, after in changed for b, t, right in zip(before, after, path[-1]))
    wrong, righted = (sum(b != right and (either or t != b) for before, after in changed for b, t, right in zip(before, after, path[-1])) for either in (True, False))
    assert 0.2 < righted / wrong < 0.45  # a little over 0.3: states that did not change were not counted
    assert augmented(path, 0, rng) == path


@pytest.mark.parametrize("text", [
    "SELECT name FROM player WHERE name = 'name name name';",
    "    total = 0\n    for x in nums:\n        if x % 2 == 0:\n            total += x * x\n    return total\n",
    "    if n == 1:\n        return 1\n    if n == 2:\n        return 1\n    if n == 3:\n        return 2\n    return f(n - 1) + f(n - 2)\n",
    "Mia has 12 apples. 3 bags of 4 apples each are 3 * 4 = 12 apples. 12 + 12 = 24. Half of 24 is 24 / 2 = 12.\n#### 12",
    "x = [[0, 0, 0], [0, 0, 0]]\n" "        return\n        }\n        return\n        }\n"])
def test_ordinary_answers_stay(text):
    assert not repeats([ord(c) for c in text.replace("    ", "\t")], text)


@pytest.mark.parametrize("tokens, text", [
    ([3, 4, *[7] * 12, 5], ""),
    ([1, 2, 3] * 5, ""),
    ([9, *[1, 2, 3, 4, 5, 6, 7, 8] * 5, 9, 9], ""),
    ([], "She then has four apples. Tom is here. She then has four apples. Mia is there.\nShe then has four apples."),
    ([], "    result.append(first_item)\n    x = 1\n    result.append(first_item)\n    y = 2\n    result.append(first_item)\n")])
def test_repetition_is_dropped(tokens, text):
    assert repeats(tokens, text)


@pytest.mark.parametrize("tokens, text", [([7] * 11, ""), ([1, 2, 3] * 4 + [1, 2], ""), ([], "A line of some length\nA line of some length\n")])
def test_a_little_less_repetition_stays(tokens, text):
    assert not repeats(tokens, text)


def test_collecting_goes_on_where_it_was(tmp_path, embedded, capfd):
    import tasks
    prompts, whole, half = tmp_path / "p.jsonl", tmp_path / "whole.jsonl", tmp_path / "half.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": e.prompt}) + "\n" for e in tasks.take("sql", "train", 5, seed=9)))
    options = ["collect", "--prompts", str(prompts), "--max-new-tokens", "40", "--batch", "2", "--device", "cpu"]
    assert module.collect([*options[1:], "--out", str(whole)]) == 0
    lines = whole.read_text().splitlines(keepends=True)
    half.write_text("".join(lines[:3]) + lines[3][:40])  # stopped while it wrote the third answer
    assert module.collect([*options[1:], "--out", str(half)]) == 0
    assert half.read_text() == whole.read_text() and "3 prompts, 0 answers dropped" in capfd.readouterr().out
    target, _, tokenizer = embedded
    settings, rows = read_trajectories(whole)
    assert settings == {"target": str(ROOT / "models/target"), "block": 16, "max_new_tokens": 40, "augment": 0.3, "seed": 0} and len(rows) == 5
    for other in (["--block", "8"], ["--seed", "1"]):
        with pytest.raises(InputError, match="to hold trajectories of these prompts and settings"):
            module.collect([*options[1:], "--out", str(half), *other])
    prompts.write_text("Another prompt.\n" * 5)
    with pytest.raises(InputError, match="to hold trajectories of these prompts and settings"):
        module.collect([*options[1:], "--out", str(half)])
    for row in rows:
        ar = tokens_of(autoregressive(CachedLM(target, 400), row["prompt"]), len(row["answer"]), {tokenizer.eos_token_id})
        assert row["answer"] == ar and row["blocks"][0][0] == len(row["prompt"]) - 1
        for root, path in row["blocks"]:
            assert (row["prompt"] + row["answer"])[root:root + len(path[-1])] == path[-1]


# ---------------------------------------------------------------- the losses

def rows_of(model):
    rows = []
    for prompt, paths in zip(PROMPTS, collected(model, eos={3})):
        answer = [token for path in paths for token in path[-1]][1:]
        rows.append({"prompt": prompt, "answer": answer, "blocks": [(len(prompt) - 1 + 6 * n, path) for n, path in enumerate(paths)]})
    return rows


@pytest.mark.parametrize("kind", ["forward-kl", "reverse-kl", "jsd"])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3"])
def test_losses_equal_a_plain_computation(name, local, kind):
    """Eqs. 4 to 6 position by position, a forward pass each, in float64."""
    model = tiny(name).double()
    rows, pairs = drawn(rows_of(model), 4, 2, local, random.Random(1))

    def q(ids):
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].softmax(-1)

    def kl(a, b):
        return (a * (a / b).log()).sum()
    terms, ar = [], []
    with torch.inference_mode():
        for row, some in zip(rows, pairs):
            for root, state, goal, right in some:
                prefix = (row["prompt"] + row["answer"])[:root]
                for i in range(1, len(state)):
                    if state[:i] != goal[:i]:
                        p, s = q(prefix + goal[:i]), q(prefix + state[:i])
                        terms.append({"forward-kl": kl(p, s), "reverse-kl": kl(s, p), "jsd": (kl(p, (p + s) / 2) + kl(s, (p + s) / 2)) / 2}[kind])
            ar += [-q(row["prompt"] + row["answer"][:i])[token].log() for i, token in enumerate(row["answer"])]
    consistency, cross_entropy = losses(model, rows, pairs, kind)
    assert len(terms) > 20
    torch.testing.assert_close(consistency, sum(terms) / len(terms), atol=1e-8, rtol=1e-5)
    torch.testing.assert_close(cross_entropy, sum(ar) / len(ar), atol=1e-8, rtol=1e-5)


def test_no_gradient_flows_through_the_stopped_side():
    p, q = (torch.randn(3, 5, requires_grad=True) for _ in range(2))
    model = tiny("llama")
    rows, pairs = drawn(rows_of(model), 4, 2, False, random.Random(1))
    seen = []

    def spy(kind, teacher, student):
        seen.append((teacher.requires_grad, student.requires_grad))
        return divergence(kind, teacher, student)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "divergence", spy)
        consistency, _ = losses(model, rows, pairs)
    assert seen == [(False, True)]
    # the gradient is that of the students alone: with the teacher's logits as constants
    consistency.backward()
    grads = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    teachers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "divergence", lambda kind, teacher, student: (teachers.append(teacher), divergence(kind, teacher, student))[1])
        with torch.no_grad():
            losses(model, rows, pairs)
        patch.setattr(module, "divergence", lambda kind, teacher, student: divergence(kind, teachers[0].clone(), student))
        losses(model, rows, pairs)[0].backward()
    for grad, x in zip(grads, model.parameters()):
        torch.testing.assert_close(grad, x.grad)
    for kind in ("forward-kl", "reverse-kl", "jsd"):
        assert (divergence(kind, p, p) < 1e-6).all() and (divergence(kind, p, q) > 0).all()


def test_a_state_that_is_the_fixed_point_costs_nothing():
    model = tiny("llama")
    rows = rows_of(model)
    pairs = [[(root, path[-1], path[-1], path[-1]) for root, path in row["blocks"]] for row in rows]
    consistency, ar = losses(model, rows, pairs)
    (consistency + ar).backward()
    assert consistency.item() == 0 and ar.item() > 0
    assert training_tree(rows[0], pairs[0])[0] == rows[0]["prompt"] + rows[0]["answer"]


def test_a_state_leaves_the_answer_at_its_first_wrong_token():
    row, right = {"prompt": [5, 6], "answer": [7, 8, 9, 10, 11]}, [6, 7, 8, 9, 10, 11]
    ids, parents, compared = training_tree(row, [(1, [6, 7, 0, 9, 2, 3], right, right)])
    assert ids == [5, 6, 7, 8, 9, 10, 11, 0, 9, 2]  # the 3 is the last: it predicts nothing in its block
    assert parents == [-1, 0, 1, 2, 3, 4, 5, 2, 7, 8]
    assert compared == [(3, 7), (4, 8), (5, 9)]
    ids, parents, compared = training_tree(row, [(1, [6, 0, 0, 9, 2, 3], [6, 7, 4, 9, 2, 3], right)])  # local: the next state is the teacher
    assert ids[7:] == [4, 9, 2, 0, 0, 9, 2] and parents[7:] == [2, 7, 8, 1, 10, 11, 12]
    assert compared == [(2, 10), (7, 11), (8, 12), (9, 13)]


def test_states_are_drawn_evenly_and_never_the_fixed_point():
    path = [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    rows, counts = [{"prompt": [1], "answer": [2, 3], "blocks": [(0, path), (3, [[4, 5, 6]])]}] * 2, [0, 0]
    for seed in range(500):
        for _, pairs in zip(*drawn(rows, 2, 1, seed % 2 == 0, random.Random(seed))):
            assert len(pairs) == 1 and pairs[0][0] == 0 and pairs[0][3] == path[-1]
            j = path.index(pairs[0][1])
            assert pairs[0][2] == path[j + 1 if seed % 2 == 0 else 2]
            counts[j] += 1
    both = drawn(rows, 2, 5, False, random.Random(0))[1]
    assert [sorted(state for _, state, _, _ in pairs) for pairs in both] == [sorted(path[:2])] * 2
    assert min(counts) > 420  # of 1,000; a fair draw fails with probability below 1e-6


def test_augmented_states_are_never_ahead_of_their_goal():
    """Augmentation may bring a state to y* or past the next state: such a state is not drawn."""
    path = [[1, 2, 3, 0], [1, 2, 0, 0], [1, 2, 3, 4], [1, 2, 3, 4]]
    row = {"prompt": [1], "answer": [2, 3, 4], "blocks": [(0, path)]}
    local, whole = (sorted(pair[1:3] for pair in drawn([row], 1, 9, local, random.Random(0))[1][0]) for local in (True, False))
    assert local == [(path[1], path[2])] and whole == [(path[1], path[3]), (path[0], path[3])]


# ---------------------------------------------------------------- training

def test_training_raises_the_tokens_per_call():
    """A tiny model learns its own few trajectories."""
    model = tiny("llama")
    rows, said = rows_of(model), []
    curve = fit(model, rows, rows, {3}, 6, steps=120, batch=4, lr=3e-3, w=1.0, say=said.append)
    assert [point[0] for point in curve] == list(range(0, 121, 12)) and len(said) == 11
    assert curve[-1][1] < 0.2 * curve[0][1] and curve[-1][2] < curve[0][2] and curve[-1][3] > 1.3 * curve[0][3]


def test_a_stopped_training_goes_on(tmp_path, monkeypatch):
    """Stopped in step 3 with the checkpoint of step 2, it ends where a whole run does."""
    def stop(text):
        if text.startswith("step 3"):
            raise KeyboardInterrupt
    models, rows = [tiny("llama") for _ in range(3)], rows_of(tiny("llama"))
    options = dict(steps=4, batch=2, states=2, accumulate=2, lr=1e-3, w=10.0, checkpoint=tmp_path / "c.pt")
    whole = fit(models[0], rows, rows, {3}, 6, say=lambda _: None, **options | {"checkpoint": None})
    monkeypatch.setattr(module.time, "time", iter(range(0, 10 ** 6, 1000)).__next__)  # every step is saved
    with pytest.raises(KeyboardInterrupt):
        fit(models[1], rows, rows, {3}, 6, say=stop, **options)
    assert torch.load(tmp_path / "c.pt")["step"] == 2
    assert fit(models[2], rows, rows, {3}, 6, say=lambda _: None, **options) == whole
    for a, b in zip(models[0].parameters(), models[2].parameters()):
        torch.testing.assert_close(a, b)


def test_one_step_by_hand():
    """Eq. 7 with w = 3 and two accumulated batches, clipped, by AdamW at the rate that the schedule gives its first step."""
    model, plain, rows = tiny("llama"), tiny("llama"), rows_of(tiny("llama"))
    fit(model, rows, rows, {3}, 6, steps=1, batch=4, states=9, accumulate=2, lr=1e-2, w=3.0, say=lambda _: None)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            consistency, ar = losses(plain, *drawn(rows, 4, 9, False, random.Random(0)))  # all rows and states: any order
        ((consistency + 3 * ar) / 2).backward()
    assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0) > 1
    optimizer.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(plain.parameters(), tiny("llama").parameters())]).abs()
    apart = torch.cat([(a - b).flatten() for a, b in zip(plain.parameters(), model.parameters())]).abs()
    assert moved.median() > 9e-3 and (apart > 1e-3).float().mean() < 0.02  # bfloat16 sums in another order: the sign of the smallest gradients


def test_train_profile_and_decode_from_the_command_line(tmp_path, capfd):
    """A CLLM is an ordinary model directory, whose Jacobi output is its own AR output; jacobi.py decodes with it too."""
    import tasks
    from jacobi import jacobi, lookahead
    prompts, data, out = tmp_path / "p.txt", tmp_path / "data.jsonl", tmp_path / "cllm-v1.5"
    prompts.write_text("Mia has 12 apples and buys 3.\nCount the cats.\n\nTom has 4 dogs.\n")
    assert module.collect(["--prompts", str(prompts), "--max-new-tokens", "20", "--block", "8", "--out", str(data), "--device", "cpu"]) == 0
    assert module.train(["--data", str(data), "--out", str(out), "--steps", "3", "--batch", "2", "--device", "cpu"]) == 0
    assert "step 3: held-out consistency loss" in capfd.readouterr().out and (tmp_path / "cllm-v1.5.work/checkpoint.pt").exists()
    with pytest.raises(InputError, match="expected a checkpoint of this model and of"):
        module.train(["--data", str(data), "--out", str(out), "--steps", "3", "--batch", "2", "--device", "cpu", "--seed", "1"])
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.dtype == torch.bfloat16 and model.config._attn_implementation == "sdpa"
    text = tasks.take("math", "test", 1, seed=9)[0].prompt
    assert module.main([cllm], module.report, ["--target", str(out), "--prompt", text, "--max-new-tokens", "40", "--device", "cpu", "--compare"]) == 0
    captured = capfd.readouterr()
    assert "output equals autoregressive output" in captured.err and "tokens fast-forwarded a call" in captured.err
    for method in (jacobi, lookahead):
        assert module.main([method], argv=["--target", str(out), "--prompt", text, "--max-new-tokens", "40", "--device", "cpu"]) == 0
        assert capfd.readouterr().out == captured.out
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": text}) + "\n")
    assert module.profile(["--target", str(out), "--prompts", str(tmp_path / "q.jsonl"), "--block", "8", "--max-new-tokens", "40", "--device", "cpu"]) == 0
    table = capfd.readouterr().out.splitlines()
    assert len(table) == 4 and table[0].startswith("| model |") and f"| {out} |" in table[3] and "| 8 |" in table[2]


def test_what_a_perfect_model_fast_forwards():
    """A block and the next root in every second call: 4 tokens a call at n = 8, and the profile says so."""
    target, log = ScriptedLM(lambda tokens: torch.nn.functional.one_hot(torch.tensor(len(tokens) * 7 % 11), 11).float()), []
    tokens = tokens_of(cllm(target, [1, 1], block=8, log=log), 32)
    assert len(tokens) / target.calls == 4 and profile_of(log) == (4, 4.0, 0.0)


def test_blocks_with_an_eos_are_not_profiled():
    done, log = {"states": [[1, 9, 9], [1, 2, 3]], "final": [1, 3]}, {"states": [[4, 9, 9], [4, 5, 0]], "final": [1, 3]}
    assert profile_of([done, log])[0] == 2
    assert profile_of([done, log], {5})[0] == 1 and profile_of([log], {4})[0] == 1  # the root is of the text before


def test_sampled_output_has_the_targets_distribution():
    """4,000 seeded runs on a chain of states: chi-square test of three tokens at a false-failure probability of 1e-6."""
    logits_of, sample, counts = markov(4), Sampler(0.9, seed=2), torch.zeros(4, 4, 4)
    target = ScriptedLM(logits_of)
    for _ in range(4000):
        counts[tuple(tokens_of(cllm(target, [1, 2], block=3, sample=sample), 3))] += 1
    expected = torch.zeros(4, 4, 4)
    for a, b, c in itertools.product(range(4), repeat=3):
        expected[a, b, c] = torch.stack([sample.probs(logits_of(before))[token] for before, token in (([1, 2], a), ([2, a], b), ([a, b], c))]).prod()
    assert chi_square_ok(counts.flatten(), expected.flatten())


def test_guesses_are_seeded_by_the_sampler():
    model, first = tiny("llama"), []
    for seed in (0, 0, 1):
        log = []
        tokens_of(cllm(CachedLM(model, CONTEXT), PROMPTS[2], sample=Sampler(0, seed=seed), log=log), 5)
        first.append(log[0]["states"][0])
    assert first[0] == first[1] != first[2]
    with pytest.raises(InputError, match="expected a block of 2 tokens or more, got 1"):
        next(cllm(None, [1], block=1))


def test_files_of_other_kinds_are_refused(tmp_path):
    for text in ("x", "[1]\n[2]\n", '{"prompt": "a"}\n', '{"target": "a", "block": 4}\n{"number": 1}\n'):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(InputError, match="expected a file made by"):
            read_trajectories(tmp_path / "bad")


FEW = {"target": "t", "block": 4, "max_new_tokens": 4, "augment": 0, "seed": 0}
ROW = {"number": 0, "prompt": [5, 9999], "answer": [2], "blocks": [[1, [[9999, 2]]]]}


@pytest.mark.parametrize("argv, said", [
    (["collect"], "the following arguments are required"),
    (["collect", "--prompts", "none", "--out", "o"], "expected a file of prompts"),
    (["collect", "--prompts", "empty", "--out", "o"], "expected one prompt or more"),
    (["collect", "--prompts", "null", "--out", "o"], "expected one prompt or more, all of them text"),
    (["collect", "--prompts", "good", "--out", "."], "Is a directory"),
    (["collect", "--prompts", "good", "--out", "good/below"], "File exists"),
    (["collect", "--prompts", "good", "--out", "good"], "expected a file made by"),
    (["collect", "--prompts", "good", "--out", "o", "--block", "1"], "expected a block of 2"),
    (["collect", "--prompts", "good", "--out", "o", "--max-new-tokens", "2040"], "expected prompts of at most"),
    (["train", "--data", "none", "--out", "o"], "expected a file made by"),
    (["train", "--data", "few", "--out", "o"], "expected trajectories of 2 prompts or more"),
    (["train", "--data", "others", "--out", "o"], "expected trajectories of this model, got some of t"),
    (["train", "--data", "few", "--out", "o", "--steps", "0"], "expected steps"),
    (["train", "--data", "few", "--out", "o", "--divergence", "tvd"], "invalid choice"),
    (["profile", "--max-new-tokens", "0"], "expected max-new-tokens of 1 or more"),
    (["profile", "--max-new-tokens", "2048"], "in a context of 2048"),
    (["profile", "--target", "models/target", "--block", "1", "--max-new-tokens", "4"], "expected a block of 2"),
    (["--prompt", "x", "--target", "none"], "expected a model directory")])
def test_wrong_input_is_one_line_and_status_2(argv, said, tmp_path, monkeypatch, capfd):
    for name, text in (("empty", "\n"), ("null", '{"prompt": null}\n'), ("good", "How many?\n"), ("few", json.dumps(FEW) + "\n"),
                       ("others", "".join(json.dumps(line) + "\n" for line in (FEW, ROW, ROW)))):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cllm.py", *(str(ROOT / a) if a.startswith("models/") else a for a in argv)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "cllm.py"), run_name="__main__")
    captured = capfd.readouterr()
    lines = [line for line in captured.err.replace("\r", "\n").splitlines() if line and "it/s" not in line and "%|" not in line]
    assert end.value.code == 2 and captured.out == "" and len(lines) == 1 and said in lines[0], captured.err


def test_the_embedded_cllm():
    """Held-out prompts: Jacobi decoding gives its own AR output, in less than half of the calls."""
    import tasks
    model, tokenizer = load(ROOT / "models/cllm", "cpu", "float32")
    lm, tokens, right = CachedLM(model, 500), 0, 0
    for example in (e for task in tasks.TASKS for e in tasks.take(task, "test", 4, seed=40)):
        prompt = tokenizer(example.prompt)["input_ids"]
        expected = tokens_of(autoregressive(CachedLM(model, 500), prompt), 120, {tokenizer.eos_token_id})
        assert tokens_of(cllm(lm, prompt), 120, {tokenizer.eos_token_id}) == expected
        tokens, right = tokens + len(expected), right + tasks.grade(example, tokenizer.decode(expected, skip_special_tokens=True))
    assert tokens / lm.calls > 2.1 and right >= 8
    assert sum(file.stat().st_size for file in (ROOT / "models/cllm").iterdir()) <= 22_000_000
