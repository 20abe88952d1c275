"""Consistency LLMs: decoding gives AR's output; trajectories are the iteration's, the losses the
paper's; training starts over where it must and else goes on; out comes a plain model directory."""
import itertools
import json
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import cllm as module
import jacobi
from cllm import (StatePair, augment_states, cllm, collect, distance, find_trajectories, fit,
                  profile, profile_of, read_trajectories, repeats, sample_pairs, train,
                  training_tree)
from common import CachedLM, InputError, Sampler, autoregressive, check, load
from fake_models import ScriptedLM, path_to
from families import CONTEXT, tiny
from helpers import ROOT, main, said_in_one_line, tokens_of
from training import loop as training
from training.loop import Settings, digest, use_settings
from training.low_rank import add_low_rank
from training.parts import score_with



def losses(model, examples, pairs, *kind):
    """Return both losses, with the model's own LM head."""
    return module.losses(model, examples, pairs, score_with(model), *kind)


PROMPTS = [[5, 9, 3], [7], [4, 4, 17, 30, 2, 8, 11, 6, 25, 40, 12], [2, 33]]
KINDS = module.DIVERGENCES


class Wordless:
    """A tokenizer, as far as collecting needs one."""
    eos_token_id = None

    def decode(self, ids):
        return ""


def collected(model, n=6, limit=20, eos=frozenset(), numbers=(0, 1, 2, 3), **options):
    prompts = [PROMPTS[i] for i in numbers]
    return find_trajectories(model, prompts, list(numbers), n=n, limit=limit, eos=set(eos),
                             **options)


# ---------------------------------------------------------------------------------- decoding

def test_guesses_are_seeded_by_the_sampler():
    model, first = tiny("llama"), []
    for seed in (0, 0, 1):
        log = []
        method = cllm(CachedLM(model), PROMPTS[2], sample=Sampler(0, seed=seed), log=log)
        tokens_of(method, 5)
        first.append(log[0]["states"][0])
    assert first[0] == first[1] != first[2]


def test_what_a_perfect_model_fast_forwards():
    """A block and the next root in every second call: 4 tokens a call at n = 8, and the profile
    says so. A root that is fed twice would show."""
    def by_position(tokens):
        token = 11 if tokens[-1:] == tokens[-2:-1] != [11] else len(tokens) * 7 % 11
        return torch.nn.functional.one_hot(torch.tensor(token), 12).float()
    target, log = ScriptedLM(by_position), []
    tokens = tokens_of(cllm(target, [11, 11], n=8, log=log), 32)
    assert tokens == [i * 7 % 11 for i in range(2, 34)]
    assert len(tokens) / target.calls == 4 and profile_of(log) == (4, 4.0, 0.0)


# In the first block the 4 was right early and stayed, in the second it was lost again.
STABLE = {"states": [[1, 9, 9, 9, 5], [1, 2, 9, 4, 8], [1, 2, 3, 4, 5]], "final": [1, 2, 5]}
UNSTABLE = {"states": [[1, 9, 9, 9, 9], [1, 2, 9, 4, 9], [1, 2, 3, 9, 9], [1, 2, 3, 4, 5]],
            "final": [1, 2, 3, 5]}


OPEN = {"states": [[1, 2, 3, 4, 5]] * 2, "final": [1, 3]}


@pytest.mark.parametrize("log, eos, figures", [
    ([], set(), (0, 0.0, 0.0)), ([STABLE], set(), (1, 2.0, 1.0)),
    ([STABLE, UNSTABLE], set(), (2, 8 / 5, 0.5)),
    ([STABLE, UNSTABLE, OPEN], set(), (2, 8 / 5, 0.5)),  # complete blocks alone count
    ([STABLE], {4}, (0, 0.0, 0.0)),  # a block with an EOS does not count
    ([STABLE], {1}, (1, 2.0, 1.0))])  # but its root is of the text before
def test_profile_counts_fast_forwarded_and_stationary_tokens(log, eos, figures):
    assert profile_of(log, eos) == figures


# -------------------------------------------------------------------------------- collecting

def test_trajectories_follow_the_iteration_to_the_autoregressive_output(family):
    """Every state is the model's choice after the one before (Eq. 3) and has more final tokens, y*
    is what AR gives."""
    model, lm = tiny(family), CachedLM(tiny(family))
    for prompt, paths in zip(PROMPTS, collected(model)):
        expected, context = tokens_of(autoregressive(lm, prompt), 23), prompt[:-1]
        assert [token for *_, y_star in paths for token in y_star] == [prompt[-1], *expected]
        assert len(paths) == 4  # 20 tokens take 4 blocks of 6
        for path in paths:
            for before, after in itertools.pairwise(path):
                lm.start(context)
                assert lm.forward(before[:-1]).argmax(-1).tolist() == after[1:]
            final = [module.count_right(y, path[-1]) for y in path]
            assert final == sorted(set(final)) and final[-1] == 6
            assert set(path[0][1:]) <= set(prompt)
            context = context + path[-1]


def test_batched_collection_equals_one_by_one(family):
    model = tiny(family)
    together = collected(model)
    assert together == [collected(model, numbers=[i])[0] for i in range(4)]
    assert together != collected(model, seed=1)
    assert together[0] != collected(model, numbers=[1, 2])[0]


def test_answers_end_with_the_first_eos():
    """Wherever in a block it stands, as its root too, and whatever other prompts do; states end
    where y* does."""
    model = tiny("llama")
    lm = CachedLM(model)
    expected = [tokens_of(autoregressive(lm, prompt), 23) for prompt in PROMPTS]
    for where in (0, 3, 5, 11, 19):  # with the prompt's token 5 is the root of the second block
        eos = expected[2][where]
        for paths, ar in zip(collected(model, eos={eos}), expected):
            end = ar.index(eos) + 1 if eos in ar else len(ar)
            assert [token for path in paths for token in path[-1]][1:] == ar[:end]
            for path in paths:
                assert {len(y) for y in path} == {len(path[-1])}
                assert all(a != b for a, b in itertools.pairwise(path))


def test_augmentation_only_sets_wrong_tokens_right():
    """In half of 200 states, but for those with nothing to set right; of the wrong tokens of the
    changed ones a little over 0.3: states that did not change are not counted. Never the first one:
    no state comes nearer to its goal than the next state is."""
    rng, wrong, righted = random.Random(0), 0, 0
    path = [[1, *(rng.choice([0, i]) for i in range(2, 12))] for _ in range(200)]
    path.append([1, *range(2, 12)])
    new = augment_states(path, 0.3, rng)
    assert new[-1] == path[-1] and len(new) == len(path)
    changed = [(before, after) for before, after in zip(path, new) if before != after]
    assert 50 < len(changed) < 110
    for before, after in changed:
        first = next(i for i, (x, right) in enumerate(zip(before, path[-1])) if x != right)
        assert after[:first + 1] == before[:first + 1]
        for old, token, right in list(zip(before, after, path[-1]))[first + 1:]:
            assert token in (old, right)
            wrong, righted = wrong + (old != right), righted + (token != old)
    assert 0.2 < righted / wrong < 0.45
    assert augment_states(path, 0, rng) == path


LOOP = "She then has four apples. Tom is here. "


@pytest.mark.parametrize("tokens, text, found", [
    ([3, 4, *[7] * 12, 5], "", True), ([7] * 11, "", False),
    ([1, 2, 3] * 5, "", True), ([1, 2, 3] * 4 + [1, 2], "", False),
    ([9, *[1, 2, 3, 4, 5, 6, 7, 8] * 5, 9, 9], "", True),
    ([], LOOP * 3, True), ([], LOOP * 2, False),
    ([], "    result.append(first_item)\n" * 3, True),
    ([], "        return\n        }\n" * 3, False)])  # lines of ordinary code are short
def test_an_answer_that_repeats_itself_is_seen(tokens, text, found):
    assert repeats(tokens, text) == found


def test_collected_rows(tmp_path):
    """By hand: the answer is AR's, and every block stands where its root does."""
    model, out = tiny("llama"), tmp_path / "folder" / "o.jsonl"
    lm, free = CachedLM(model), collected(model, limit=20, eos={1})
    collect(model, Wordless(), PROMPTS, out=out, n=6, max_new_tokens=20, augment=0)
    settings, rows = read_trajectories(out)
    assert settings == {"model": digest(model.state_dict()), "n": 6, "max_new_tokens": 20,
                        "augment": 0, "seed": 0}
    assert sorted(row["number"] for row in rows) == [0, 1, 2, 3]
    for row in rows:
        assert row["prompt"] == PROMPTS[row["number"]]
        assert row["answer"] == tokens_of(autoregressive(lm, row["prompt"]), 23, {1})
        assert [path for _, path in row["blocks"]] == free[row["number"]]
        for root, path in row["blocks"]:
            assert (row["prompt"] + row["answer"])[root:root + len(path[-1])] == path[-1]


def test_collecting_goes_on_where_it_was(tmp_path, capsys):
    """Stopped while it wrote the third answer; with another batch size too; with more prompts."""
    model, whole, half = tiny("llama"), tmp_path / "whole", tmp_path / "half"
    options = dict(n=6, max_new_tokens=20, batch=2)
    collect(model, Wordless(), PROMPTS, out=whole, **options)
    lines = whole.read_text().splitlines(keepends=True)
    for cut in (1, 40, len(lines[3]) - 1):
        half.write_text("".join(lines[:3]) + lines[3][:cut])
        collect(model, Wordless(), PROMPTS, out=half, **options | {"batch": 1})
        assert half.read_text() == whole.read_text()
    assert "2 prompts, 0 answers dropped" in capsys.readouterr().out
    collect(model, Wordless(), [*PROMPTS, [3, 3]], out=half, **options)
    assert half.read_text().startswith(whole.read_text()) and len(read_trajectories(half)[1]) == 5


def test_trajectories_of_something_else_are_not_gone_on_with(tmp_path):
    model, out, options = tiny("llama"), tmp_path / "o", dict(n=6, max_new_tokens=20, augment=0.5)
    collect(model, Wordless(), PROMPTS, out=out, **options)
    before = out.read_bytes()
    for lm, prompts, other in (
            (tiny("llama", seed=1), PROMPTS, {}), (model, PROMPTS[::-1], {}),
            (model, PROMPTS[:2], {}), (model, PROMPTS, {"n": 5}), (model, PROMPTS, {"seed": 1}),
            (model, PROMPTS, {"max_new_tokens": 19}), (model, PROMPTS, {"augment": 0})):
        with pytest.raises(InputError, match="to hold trajectories of this model, these prompts"):
            collect(lm, Wordless(), prompts, out=out, **options | other)
    assert out.read_bytes() == before


def test_augmentation_reaches_the_states_of_the_file_and_no_answer(tmp_path):
    found = []
    for augment in (0, 1):
        out = tmp_path / str(augment)
        collect(tiny("llama"), Wordless(), PROMPTS, out=out, n=6, max_new_tokens=20,
                augment=augment)
        found.append(read_trajectories(out)[1])
    plain, augmented = found
    assert plain != augmented
    assert [row["answer"] for row in plain] == [row["answer"] for row in augmented]


def test_answers_that_repeat_themselves_are_dropped(tmp_path, capsys):
    """One model writes the same token for ever, for another the text tells."""
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    collect(model, Wordless(), PROMPTS, out=tmp_path / "a", n=6, max_new_tokens=20)
    _, rows = read_trajectories(tmp_path / "a")
    assert [row["blocks"] for row in rows] == [[]] * 4 and rows[0]["answer"] == [0] * 23
    assert "4 prompts, 4 answers dropped for repetition" in capsys.readouterr().out
    with pytest.raises(InputError, match="--data must have trajectories of 2 prompts .* got 0"):
        train(model, Wordless(), data=tmp_path / "a", out=tmp_path / "out", lr=1e-3)
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids: LOOP * 3)
    collect(tiny("llama"), tokenizer, PROMPTS, out=tmp_path / "b", n=6, max_new_tokens=20)
    assert [row["blocks"] for row in read_trajectories(tmp_path / "b")[1]] == [[]] * 4


def test_prompts_without_room_for_an_answer_are_skipped(tmp_path, capsys):
    """Of 160 tokens an answer may take 20, and run on to the end of a block of 6."""
    prompts = [[3, 4] * 67, [5] * 135, [6, 2], [7] * 500]
    collect(tiny("gpt2"), Wordless(), prompts, out=tmp_path / "o", n=6, max_new_tokens=20)
    _, rows = read_trajectories(tmp_path / "o")
    assert sorted(row["number"] for row in rows) == [0, 2]
    assert "2 prompts, 0 answers dropped for repetition, 2 prompts too long" in (
        capsys.readouterr().out)


# -------------------------------------------------------------------------------- the losses

def rows_of(model):
    rows = []
    for prompt, paths in zip(PROMPTS, collected(model, eos={3})):
        answer = [token for path in paths for token in path[-1]][1:]
        blocks = [(len(prompt) - 1 + 6 * j, path) for j, path in enumerate(paths)]
        rows.append({"prompt": prompt, "answer": answer, "blocks": blocks})
    return rows


ROWS = rows_of(tiny("llama"))


@pytest.mark.parametrize("name, local, kind", [
    ("llama", False, "reverse-kl"), ("gpt2", False, "forward-kl"), ("mistral", True, "jsd"),
    ("gemma3", True, "forward-kl")])
def test_losses_equal_a_plain_computation(name, local, kind):
    """Eqs. 4 to 6 position by position, a forward pass each, in float64."""
    model = tiny(name).double()
    rows, pairs = sample_pairs(rows_of(model), 4, 2, local, random.Random(1))

    def q(ids):
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].softmax(-1)

    def kl(a, b):
        return (a * (a / b).log()).sum()
    terms, ar = [], []
    with torch.inference_mode():
        for row, some in zip(rows, pairs):
            text, start = row["prompt"] + row["answer"], len(row["prompt"])
            for root, y, y_goal in some:
                for i in range(1, len(y)):
                    if y[:i] != y_goal[:i]:
                        p, s = q(text[:root] + y_goal[:i]), q(text[:root] + y[:i])
                        mean = (p + s) / 2
                        terms.append({"forward-kl": kl(p, s), "reverse-kl": kl(s, p),
                                      "jsd": (kl(p, mean) + kl(s, mean)) / 2}[kind])
            ar += [-q(text[:i])[text[i]].log() for i in range(start, len(text))]
    consistency, cross_entropy = losses(model, rows, pairs, kind)
    assert len(terms) > 20
    assert consistency.item() == pytest.approx((sum(terms) / len(terms)).item(), rel=1e-4)
    assert cross_entropy.item() == pytest.approx((sum(ar) / len(ar)).item(), rel=1e-5)


def test_no_gradient_flows_through_the_teacher(monkeypatch):
    wants = []
    monkeypatch.setattr(module, "distance", lambda kind, teacher, student: wants.append(
        (teacher.requires_grad, student.requires_grad)) or student.sum(-1))
    losses(tiny("llama"), *sample_pairs(ROWS, 4, 2, False, random.Random(1)))
    assert wants == [(False, True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_is_0_for_equals_alone(kind):
    p, q = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    assert (distance(kind, p, p) < 1e-6).all() and (distance(kind, p, q) > 0).all()


def test_a_state_that_is_the_fixed_point_costs_nothing():
    model = tiny("llama")
    rows = rows_of(model)
    pairs = [[StatePair(root, path[-1], path[-1]) for root, path in row["blocks"]] for row in rows]
    consistency, ar = losses(model, rows, pairs)
    (consistency + ar).backward()
    assert consistency.item() == 0 and ar.item() > 0
    assert training_tree(rows[0], pairs[0])[0] == rows[0]["prompt"] + rows[0]["answer"]


def test_a_state_leaves_the_answer_at_its_first_wrong_token():
    row, y_star = {"prompt": [5, 6], "answer": [7, 8, 9, 10, 11]}, [6, 7, 8, 9, 10, 11]
    y = [6, 7, 0, 9, 2, 3]
    ids, parents, compared = training_tree(row, [StatePair(1, y, y_star)])
    assert ids == [5, 6, 7, 8, 9, 10, 11, 0, 9, 2]  # the 3 predicts nothing in its block
    assert parents == [-1, 0, 1, 2, 3, 4, 5, 2, 7, 8]
    assert compared == [(3, 7), (4, 8), (5, 9)]
    local = StatePair(1, [6, 0, 0, 9, 2, 3], [6, 7, 4, 9, 2, 3])  # the next state is the teacher
    ids, parents, compared = training_tree(row, [local])
    assert ids[7:] == [4, 9, 2, 0, 0, 9, 2] and parents[7:] == [2, 7, 8, 1, 10, 11, 12]
    assert compared == [(2, 10), (7, 11), (8, 12), (9, 13)]
    assert [ids[node] for node in path_to(13, parents)] == [5, 6, 0, 0, 9, 2]


def test_states_are_drawn_evenly_and_never_the_fixed_point():
    """Of 1,000 draws a fair one has fewer than 420 of a kind with probability below 1e-6."""
    path, counts = [[1, 0, 0], [1, 2, 0], [1, 2, 3]], [0, 0]
    rows = [{"prompt": [1], "answer": [2, 3], "blocks": [(0, path), (3, [[4, 5, 6]])]}] * 2
    for seed in range(500):
        local = seed % 2 == 0
        for _, pairs in zip(*sample_pairs(rows, 2, 1, local, random.Random(seed))):
            [pair] = pairs
            j = path.index(pair.y)
            assert pair.start == 0
            assert pair.y_goal == path[j + 1 if local else 2]
            counts[j] += 1
    both = sample_pairs(rows, 2, 5, False, random.Random(0))[1]
    assert [sorted(pair.y for pair in pairs) for pairs in both] == [sorted(path[:2])] * 2
    assert min(counts) > 420


# ---------------------------------------------------------------------------------- training

def test_training_raises_the_tokens_per_call():
    """A tiny model learns its own few trajectories."""
    model = tiny("llama")
    rows = rows_of(model)
    curve = fit(model, rows, rows, {3}, 6, steps=120, batch=4, lr=3e-3, w=1.0)
    assert list(curve) == list(range(0, 121, 12))
    first, last = curve[0], curve[120]
    assert last["consistency"] < 0.2 * first["consistency"] and last["ar"] < first["ar"]
    assert last["per_call"] > 1.3 * first["per_call"]
    answers, figures = module.decode_examples(model, rows, {3}, 6)
    assert figures.items() <= last.items() and first["kept"] == 1  # they are its own answers
    changed = [row | {"answer": [9] + row["answer"][1:]} for row in rows[:1]] + rows[1:]
    assert module.decode_examples(model, changed, {3}, 6)[1]["kept"] == (
        pytest.approx(figures["kept"] - (answers[0][:32] == rows[0]["answer"][:32]) / len(rows)))
    log = []
    for row in rows:
        tokens_of(cllm(CachedLM(model), row["prompt"], n=6, log=log), len(row["answer"]), {3})
    assert module.profile_of(log, {3})[1:] == (figures["fast_forwarded"], figures["stationary"])
    assert [len(x) for x in answers] == [len(row["answer"]) for row in rows]


def test_the_loss_of_a_step(monkeypatch):
    """Eq. 7 on what is drawn for the step, the optimizer of the released code, held-out examples
    measured alike."""
    seen, draws, ours = [], [], []

    def spy(examples, *options):
        draws.append((examples, *options[:3]))
        return sample_pairs(examples, *options)

    class Loop:
        def __init__(self, weights, fingerprint, **options):
            ours.append(options)

        def train(self, loss_of, evaluate):
            return loss_of(random.Random(5)), evaluate()[0]
    monkeypatch.setattr(module, "sample_pairs", spy)
    monkeypatch.setattr(training, "Training", Loop)
    monkeypatch.setattr(module, "decode_examples", lambda model, some, *_: seen.append(some) or (
        "answers", {"per_call": 1.0, "kept": 1.0}))
    model, held_out = tiny("llama"), ROWS[:1]
    loss, figures = fit(model, ROWS[1:], held_out, {3}, 6, steps=3, batch=2, states=3, w=0.3,
                        lr=0.1, divergence="jsd", local=True,
                        watch=lambda answers: {"answers": answers})
    drawn = sample_pairs(ROWS[1:], 2, 3, True, random.Random(5))
    consistency, ar = losses(model, *drawn, "jsd")
    torch.testing.assert_close(loss, consistency + 0.3 * ar)
    assert draws == [(ROWS[1:], 2, 3, True)] + [(held_out, 2, 3, True)] * 4
    assert seen == [held_out] and figures["answers"] == "answers"
    [adam] = ours[0]["optimizers"]
    assert adam.defaults["betas"] == (0.9, 0.95) and adam.defaults["weight_decay"] == 0
    assert ours[0]["rate"] is training.warm_linear


# ------------------------------------------------------------------ what is kept, and for whom

FIT = dict(steps=4, batch=2, states=2, lr=1e-3, w=10.0)


def fitted(work=None, model=0, rows=ROWS[1:], held_out=ROWS[:1], eos=frozenset({3}), n=6,
           **options):
    """(weights, curve) of a training."""
    model = tiny("llama", seed=model)
    curve = fit(model, rows, held_out, {*eos}, n, work=work, **FIT | options)
    return torch.nn.utils.parameters_to_vector(model.parameters()), curve


@pytest.mark.parametrize("change", [
    dict(model=1), dict(rows=ROWS[:0:-1]), dict(held_out=ROWS[1:]), dict(eos=ROWS[0]["answer"][:3]),
    dict(n=3), dict(batch=1), dict(states=1), dict(w=3.0), dict(divergence="jsd"), dict(local=True),
    dict(seed=1)], ids=lambda change: next(iter(change)))
def test_another_training_in_the_same_folder_has_a_checkpoint_of_its_own(change, worked):
    before = {*worked.iterdir()}
    fitted(worked, steps=2)  # the same training again
    assert {*worked.iterdir()} == before
    fitted(worked, **{"steps": 2} | change)
    assert len({*worked.iterdir()}) == len(before) + 1


def test_changes_of_another_model_have_a_checkpoint_of_their_own(tmp_path):
    for seed, files in (0, 1), (0, 1), (1, 2):
        model = tiny("llama", seed=seed).requires_grad_(False)
        torch.manual_seed(0)
        fit(model, ROWS, ROWS, {3}, 6, **FIT | {"steps": 1}, changes=add_low_rank(model, 2),
            work=tmp_path)
        assert len([*tmp_path.iterdir()]) == files


@pytest.mark.parametrize("rank", [0, 2])
def test_recomputed_activations_are_the_same(rank):
    """Each layer runs once more for a pass, in the backward pass, and not where it is evaluated;
    no model is in the mode of training, where dropout would be on."""
    models, calls = [tiny("llama"), tiny("llama")], [[], []]
    for i, model in enumerate(models):
        def count(layer, *_, i=i):
            calls[i].append(layer.training)
        model.model.layers[0].self_attn.register_forward_pre_hook(count)
        torch.manual_seed(0)
        changes = add_low_rank(model.requires_grad_(False), rank) if rank else None
        with use_settings(Settings(accumulate=2, recompute=i == 1)):
            fit(model, ROWS, ROWS, {3}, 6, **FIT, changes=changes)
        assert not model.training
    assert len(calls[1]) == len(calls[0]) + 2 * FIT["steps"]
    assert sum(calls[0]) == sum(calls[1]) == 0
    for a, b in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


# ------------------------------------------------------------------------- the command `train`

def written(path, rows, **settings):
    """A file of trajectories."""
    settings = {"model": "m", "n": 6, "max_new_tokens": 20, "augment": 0, "seed": 0} | settings
    rows = [{"number": i, **row} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [settings, *rows]))
    return path


class Saved(Wordless):
    """A tokenizer, as far as training needs one."""
    eos_token_id, bos_token_id, pad_token_id = 3, 0, 1

    def save_pretrained(self, folder):
        pass


def given_to_fit(monkeypatch, tmp_path, rows, **options):
    """What `train` gives to `fit`: (rows, held out, eos, n, options)."""
    given = []
    monkeypatch.setattr(module, "fit", lambda model, *args, **rest: given.append((*args, rest)))
    data = written(tmp_path / "data", rows)
    train(LLAMA, Saved(), data=data, out=tmp_path / "out", **dict(lr=5e-4) | options)
    return given[0]


LLAMA = tiny("llama")


def test_held_out_rows_are_drawn_from_the_whole_file(tmp_path, monkeypatch):
    """One in ten, of each half alike, and none of them is trained on."""
    rows, early = [ROWS[0] | {"prompt": [n, 9, 3]} for n in range(50)], 0
    splits = set()
    monkeypatch.setattr(LLAMA, "save_pretrained", lambda folder: folder.mkdir())
    for seed in range(30):
        data, held_out, eos, n, _ = given_to_fit(monkeypatch, tmp_path, rows, seed=seed)
        numbers = [row["number"] for row in held_out]
        splits.add(tuple(sorted(numbers)))
        assert len(numbers) == 5 and eos == {1, 3} and n == 6
        assert sorted(row["number"] for row in data + held_out) == list(range(50))
        early += sum(n < 25 for n in numbers)
    assert len(splits) == 30  # each seed has its own
    assert 50 < early < 100  # of 150: a standard deviation is 6


def test_train_hands_its_options_on(tmp_path, monkeypatch):
    options = dict(steps=7, batch=3, states=5, lr=0.1, w=0.0, divergence="jsd", local=True, seed=4)
    rows = [*ROWS, ROWS[0] | {"blocks": []}]  # the last repeats itself
    *parts, given = given_to_fit(monkeypatch, tmp_path, rows, **options, work=tmp_path / "here")
    assert given == options | {"work": tmp_path / "here", "changes": None}
    assert sorted(row["number"] for row in parts[0] + parts[1]) == [0, 1, 2, 3]
    given = given_to_fit(monkeypatch, tmp_path, rows)[-1]
    assert given["work"] == tmp_path / "out.work"  # the default


def test_texts_have_a_greatest_length(tmp_path, monkeypatch, capsys):
    rows = [ROWS[0] | {"prompt": [9] * length} for length in (3, 4, 5, 60)]
    most = len(ROWS[0]["answer"]) + 5
    with use_settings(Settings(max_length=most)):
        data, held_out, *_ = given_to_fit(monkeypatch, tmp_path, rows)
    assert sorted(len(row["prompt"]) for row in data + held_out) == [3, 4, 5]
    assert f"1 trajectories longer than {most} tokens are left out" in capsys.readouterr().out


@pytest.mark.parametrize("rank, expected", [(0, torch.float32), (2, torch.bfloat16)])
def test_what_is_trained_is_in_float32(rank, expected, tmp_path, monkeypatch):
    """Steps of AdamW would round to nothing. What is frozen stays as it is."""
    model, seen = tiny("llama").bfloat16(), []

    def watched(model, *_, changes, **__):
        trained = changes or dict(model.named_parameters())
        seen.append((model.dtype, {x.dtype for x in trained.values()}))
    monkeypatch.setattr(module, "fit", watched)
    train(model, Saved(), data=written(tmp_path / "data", ROWS), out=tmp_path / "out", lr=5e-4,
          rank=rank)
    assert seen == [(expected, {torch.float32})]


def test_a_cllm_is_a_plain_greedy_model_directory(tmp_path):
    """Though the model that it was trained from has settings of sampling, which transformers
    refuses to save where it does not sample; nothing is lost after the training."""
    model, out = tiny("llama"), tmp_path / "out"
    model.generation_config = GenerationConfig(temperature=0.9, do_sample=False, top_k=3,
                                               repetition_penalty=2.0, eos_token_id=[1, 3])
    with pytest.raises(ValueError, match="[Gg]eneration"):
        model.save_pretrained(tmp_path / "other")
    train(model, Saved(), data=written(tmp_path / "data", ROWS), out=out, steps=2, batch=2, lr=5e-4)
    trained, prompt = AutoModelForCausalLM.from_pretrained(out), PROMPTS[2]
    assert trained.config.dtype == torch.bfloat16 and trained.config._attn_implementation == "sdpa"
    settings = trained.generation_config
    assert settings.eos_token_id == [1, 3] and settings.bos_token_id == 0
    assert not settings.do_sample and settings.temperature in (None, 1.0)
    assert settings.repetition_penalty in (None, 1.0)
    for a, b in zip(trained.parameters(), model.parameters()):
        assert torch.equal(a, b) and a.dtype == torch.bfloat16
    answer = trained.float().generate(torch.tensor([prompt]), max_new_tokens=20)[0].tolist()
    lm = CachedLM(check(model.float()), CONTEXT)
    assert answer == prompt + tokens_of(autoregressive(lm, prompt), 20, {1, 3})


def test_files_of_other_kinds_are_refused(tmp_path):
    for text in ("", "x", "[1]\n[2]\n", '{"prompt": "a"}\n', '{"model": "a"}\n',
                 '{"model": "a", "n": 4}\n{"number": 1}\n'):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(InputError, match="expected a file made by `python cllm.py collect`"):
            read_trajectories(tmp_path / "bad")


# ------------------------------------------------------------------------- the command line

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a tiny model that has the embedded target's tokenizer, and with prompts."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/target")
    tiny("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    settings = {"temperature": 0.9, "do_sample": False, "eos_token_id": 1}
    (folder / "llama/generation_config.json").write_text(json.dumps(settings))
    (folder / "good").write_text("Mia has 12 apples.\nCount the cats.\n\nTom has 4 dogs.\n")
    (folder / "one").write_text("Mia has 12 apples.\n")
    (folder / "long").write_text("one two three " * 200 + "\n")
    (folder / "empty").write_text("\n")
    (folder / "null").write_text('{"prompt": null}\n')
    written(folder / "few", [])
    written(folder / "others", [{"prompt": [5, 9999], "answer": [2],
                                 "blocks": [[1, [[9999, 2]]]]}] * 2)
    return folder


def command(*argv) -> int:
    """As the last lines of cllm.py, on a CPU."""
    return main([cllm], module.report, [*map(str, argv), "--device", "cpu"], target="cllm",
                    commands=[collect, train, profile], folders=[train],
                    ranges={"n": (4, 8, 16, 32, 64)})


def test_collect_train_decode_and_profile_from_the_command_line(small, tmp_path, capfd):
    """jacobi.py decodes with a CLLM too."""
    data, out = tmp_path / "data.jsonl", tmp_path / "cllm-v1.5"
    target, prompts = ("--target", small / "llama"), ("--prompts", small / "good")
    assert command("collect", *target, *prompts, "--max-new-tokens", "20", "--n", "8", "--out",
                   data) == 0
    assert "3 prompts, 0 answers dropped" in capfd.readouterr().out
    training = ["train", *target, "--data", data, "--out", out, "--steps", "3", "--batch", "2",
                "--lr", "5e-4"]
    assert command(*training) == 0
    weights = out / "model.safetensors"
    first = weights.read_bytes()
    assert command(*training, "--seed", "1") == 0 and weights.read_bytes() != first
    assert capfd.readouterr().out.count("step 3: held-out consistency loss") == 2
    assert command(*training) == 0 and weights.read_bytes() == first
    assert capfd.readouterr().out == ""
    assert len(list(out.with_name("cllm-v1.5.work").iterdir())) == 2
    decoding = ("--target", out, "--prompt", "Tom has 4 dogs.", "--max-new-tokens", "40")
    assert command(*decoding, "--compare") == 0
    text, err = capfd.readouterr()
    assert "output equals autoregressive output" in err and "tokens fast-forwarded a call" in err
    for name in ("jacobi", "lookahead"):
        methods = [jacobi.jacobi, jacobi.lookahead]
        argv = [*map(str, decoding), "--device", "cpu", "--method", name]
        assert main(methods, jacobi.report, argv) == 0
        assert capfd.readouterr().out == text
    assert command("profile", "--target", small / "llama", "--after", out, *prompts, "--n", "8",
                   "--max-new-tokens", "40") == 0
    table = capfd.readouterr().out.splitlines()
    assert len(table) == 4 and table[0].startswith("| model |")
    assert f"| {small / 'llama'} |" in table[2] and f"| {out} |" in table[3] and "| 8 |" in table[2]


def test_profile_is_that_of_the_decoding(small, tmp_path, capfd):
    """And goes to the end of the context, however many tokens are asked for."""
    options = ["--target", small / "llama", "--n", "4", "--max-new-tokens", "500"]
    prompts = ["--prompts", small / "one"]
    assert command("profile", *options, *prompts, "--after", small / "llama") == 0
    *_, first, second = capfd.readouterr().out.splitlines()
    assert first == second and command(*options, *prompts) == 0
    words = capfd.readouterr().err.splitlines()[-1].split()
    assert first.split(" | ")[1:] == [words[0], "4", words[3], f"{words[8]} |"]


@pytest.mark.parametrize("argv, said", [
    ("collect --prompts good --out .", "it is a folder"),
    ("collect --prompts good --out good/below", "Not a directory"),
    ("collect --prompts good --out good", "--out must be no file that the command itself reads"),
    ("collect --prompts good --out few", "to hold trajectories of this model"),
    ("collect --out o --max-new-tokens 0", "--max-new-tokens must be 1 or more, got 0"),
    ("collect --out o --batch 0", "--batch must be 1 or more, got 0"),
    ("collect --out o --augment 1.5", "--augment must be 0 to 1, got 1.5"),
    ("profile --max-new-tokens 0", "--max-new-tokens must be 1 or more, got 0"),
    ("train --out o --lr 1 --data few", "must have trajectories of 2 prompts or more, got 0 in"),
    ("train --out o --lr 1 --data others", "token ids beyond its vocabulary"),
    ("train --out o --lr 0 --data few", "--lr must be above 0, got 0"),
    ("train --out o --lr 1 --data few --w -1", "--w must be 0 or more, got -1"),
    ("train --out o --lr 1 --data few --states 0", "--states must be 1 or more, got 0"),
    ("train --out o --lr 1 --data few --divergence tvd",
     "--divergence must be forward-kl, reverse-kl, jsd, got tvd")])
def test_wrong_input_is_one_line_and_status_2(argv, said, small, monkeypatch, capfd):
    monkeypatch.chdir(small)
    assert command(*argv.split(), "--target", "llama") == 2
    said_in_one_line(said, capfd)


def test_the_embedded_cllm():
    """Held-out prompts: Jacobi decoding gives its own AR output, in less than half of the calls."""
    import tasks
    model, tokenizer = load(ROOT / "models/cllm", "cpu", "float32")
    ar, lm, eos, tokens, right = CachedLM(model), CachedLM(model), {1}, 0, 0
    assert tokenizer.eos_token_id == 1
    for example in (e for task in tasks.TASKS for e in tasks.take(task, "test", 2, seed=40)):
        prompt = tokenizer(example.prompt)["input_ids"]
        expected = tokens_of(autoregressive(ar, prompt), 120, eos)
        assert tokens_of(cllm(lm, prompt), 120, eos) == expected
        text = tokenizer.decode(expected, skip_special_tokens=True)
        tokens, right = tokens + len(expected), right + tasks.grade(example, text)
    assert tokens / lm.calls > 2.1 and right >= 4
    assert sum(file.stat().st_size for file in (ROOT / "models/cllm").iterdir()) <= 22_000_000


def test_the_seed_of_collecting_reaches_the_guesses(tmp_path):
    model = tiny("llama")
    for seed in (0, 1):
        out = tmp_path / str(seed)
        collect(model, Wordless(), PROMPTS, out=out, n=6, max_new_tokens=20, augment=0, seed=seed)
        expected = collected(model, seed=seed, eos={1})
        for row in read_trajectories(out)[1]:
            assert [path for _, path in row["blocks"]] == expected[row["number"]]
