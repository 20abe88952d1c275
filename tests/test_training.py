"""The one training loop, the answers that drafters learn from, and how they are split."""
import itertools
import json
import math
import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GenerationConfig

from common import CachedLM, InputError, autoregressive, encode
from families import tiny
from helpers import interrupting, tokens_of
from models import training
from models.training import (Training, collect_answers, collect_examples, cosine, digest,
                             find_frequent, generate_answers, sample_alike, warm_linear)


class WORDLESS:
    """A tokenizer, as far as needed."""
    eos_token_id = None


# ------------------------------------------------------------------------------------ the loop

class Toy:
    """Weights that move towards random points; all that the loop asks of it."""

    def __init__(self, folder=None, of=(), scale=1.0, **options):
        self.part = {"w": torch.nn.Parameter(torch.tensor([3.0, -2.0, 0.5])),
                     "b": torch.nn.Parameter(torch.tensor([[0.1]]))}
        self.scale, self.drawn, self.evaluated = scale, [], 0
        options = dict(name="toy", steps=4, lr=0.1, accumulate=2, reports=2) | options
        self.training = Training(self.part, of, folder=folder, **options)

    def loss_of(self, rng: random.Random) -> torch.Tensor:
        self.drawn.append([rng.random() for _ in range(3)])
        apart = self.part["w"] - torch.tensor(self.drawn[-1])
        return self.scale * (apart.square().sum() + self.part["b"].square())[0, 0]

    def evaluate(self) -> tuple[dict, str]:
        self.evaluated += 1
        total = sum(p.sum().item() for p in self.part.values())
        return {"total": total, "list": [[total]]}, f"in all {total:.3f}"

    def run(self) -> dict:
        return self.training.train(self.loss_of, self.evaluate)

    def weights(self) -> list[float]:
        return torch.nn.utils.parameters_to_vector(self.part.values()).tolist()


def result(*args, **options) -> tuple:
    toy = Toy(*args, **options)
    return toy.run(), toy.weights()


def test_updates_are_adamws_on_the_mean_loss_cut_to_length_1():
    """By hand, with the rate of each step; a value instead of a length where it is asked for."""
    for scale, norm, value in ((1.0, 1.0, math.inf), (100.0, 1.0, math.inf),
                               (1.0, math.inf, 0.5), (1e-3, 1.0, math.inf)):
        toy = Toy(scale=scale, max_norm=norm, max_value=value, steps=6)
        plain = Toy(scale=scale).part
        adam = torch.optim.AdamW(plain.values(), lr=0.1, weight_decay=0.0)
        toy.run()
        drawn = iter(toy.drawn)
        for step in range(6):
            for points in (next(drawn), next(drawn)):
                loss = (plain["w"] - torch.tensor(points)).square().sum() + plain["b"].square()
                (scale * loss / 2).sum().backward()
            grads = torch.cat([p.grad.flatten() for p in plain.values()])
            for p in plain.values():
                p.grad /= max(1, grads.norm() / norm)
                p.grad.clamp_(-value, value)
            adam.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / 6))
            adam.step()
            adam.zero_grad()
        expected = torch.nn.utils.parameters_to_vector(plain.values()).tolist()
        assert toy.weights() == pytest.approx(expected, abs=1e-5)


def test_rates():
    """A cosine from the first step on; a warm-up over a twentieth of the steps, and down to 0."""
    assert [cosine(n, 4) for n in range(4)] == pytest.approx([1, 0.5 + 0.5 ** 1.5, 0.5,
                                                              0.5 - 0.5 ** 1.5])
    expected = [0.5, *(1 - n / 40 for n in range(1, 40))]
    assert [warm_linear(n, 40) for n in range(40)] == pytest.approx(expected)
    assert warm_linear(0, 3) == 1  # no step is a warm-up's
    rates = []

    class Spy(torch.optim.SGD):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
    part = {"w": torch.nn.Parameter(torch.ones(1))}
    for rate in cosine, warm_linear:
        spies = [Spy(part.values(), lr=1.0), Spy(part.values(), lr=1.0)]
        Training(part, (), name="x", steps=5, lr=0.3, rate=rate, optimizers=spies).train(
            lambda rng: part["w"].sum(), lambda: ({}, ""))
        assert rates == pytest.approx([0.3 * rate(n, 5) for n in range(5) for _ in spies])
        rates.clear()


def test_a_weight_without_a_gradient_stays():
    toy = Toy(scale=0.0)
    toy.run()
    assert toy.weights() == Toy().weights()


def test_what_is_drawn_depends_on_the_seed_and_the_step_alone():
    runs = []
    for seed in (0, 1, 0):
        toy = Toy(seed=seed)
        toy.run()
        runs.append(toy.drawn)
    assert runs[0] == runs[2] and len({*map(tuple, runs[0] + runs[1])}) == 16


def test_reports(capsys):
    """Before the first step, so often as was asked, and at the end; each is made once."""
    toy = Toy(steps=7, reports=3)
    curve = toy.run()
    assert list(curve) == [0, 2, 4, 6, 7] and toy.evaluated == 5
    assert curve[0] == {"total": pytest.approx(1.6), "list": [[pytest.approx(1.6)]]}
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line.split(":")[0] for line in lines] == [f"step {n}" for n in curve]
    assert lines[0] == "step 0: in all 1.600"
    assert list(Toy(steps=1).run()) == [0, 1]


def test_a_loss_that_is_not_finite_is_one_line(tmp_path):
    for scale in (math.inf, math.nan):
        with pytest.raises(InputError, match="--lr must be below 0.1: the loss is"):
            Toy(tmp_path, scale=scale).run()


@pytest.mark.parametrize("change", [
    dict(of=("model", 1)), dict(of=([([1, 2], [3])],)), dict(steps=5), dict(lr=0.2), dict(seed=1),
    dict(accumulate=1), dict(max_norm=2.0), dict(max_value=0.5), dict(rate=warm_linear)],
    ids=lambda change: next(iter(change)))
def test_another_training_in_the_same_folder_starts_over(change, tmp_path):
    """And the same one is only loaded."""
    result(tmp_path)
    assert result(tmp_path, **change) == result(**change)
    again = Toy(tmp_path, **change)
    assert (again.run(), again.weights()) == result(**change)
    assert not again.drawn and not again.evaluated


def test_another_beginning_is_another_training(tmp_path):
    """As its seed, or what it begins with, made it."""
    result(tmp_path)
    toy = Toy()
    with torch.no_grad():
        toy.part["w"][1] += 0.5
    training = Training(toy.part, (), name="toy", steps=4, lr=0.1, accumulate=2, reports=2,
                        folder=tmp_path)
    assert training.done == 0


def interrupted_at(number: int, act) -> None:
    """act(), with Ctrl-C at this line of those that run in models/training.py. In a thread of its
    own: an interrupted `with torch.autocast` would leave the type of this one's passes changed."""
    count = itertools.count(1)

    def trace(frame, event, _):
        if frame.f_code.co_filename != training.__file__:
            return None
        if event == "line" and next(count) == number:
            raise KeyboardInterrupt
        return trace

    def traced():
        sys.settrace(trace)
        act()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(traced).result()


def test_ctrl_c_at_any_line(tmp_path):
    """What goes on from there ends with the weights and the curve of an uninterrupted run; no step
    and no report is made twice where it was kept."""
    expected, stopped = result(), 0
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        toy = Toy(folder)
        try:
            interrupted_at(number, toy.run)
            break
        except KeyboardInterrupt:
            stopped += 1
        kept = [torch.load(file)["done"] for file in folder.glob("*.pt")]
        again = Toy(folder)
        assert again.training.done == sum(kept)
        assert (again.run(), again.weights()) == expected, number
        assert len(again.drawn) == 2 * (4 - sum(kept))
    assert stopped > 100


def test_an_update_is_never_half_made(tmp_path, monkeypatch):
    """Stopped between the optimizer's step and its count: the checkpoint before it stays."""
    step = torch.optim.AdamW.step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.optim.AdamW, "step", interrupting(step, 4, after=True))
        Toy(tmp_path).run()
    [file] = tmp_path.glob("*.pt")
    assert torch.load(file)["done"] == 2  # the last report
    assert result(tmp_path) == result()


def test_a_killed_training_goes_on_from_the_last_checkpoint(tmp_path, monkeypatch):
    """One is written every two minutes: here after every step."""
    now = [0]
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    for minutes, kept in ((1, [0, 0, 0]), (3, [0, 1, 2])):  # after each step, of a minute or three
        toy = Toy(tmp_path, of=(minutes,), reports=1, steps=3)
        files = []

        def loss_of(rng):
            if len(toy.drawn) % 2 == 0:
                files.append(shutil.copy(toy.training.file, tmp_path / f"{minutes} {len(files)}"))
                now[0] += 60 * minutes
            return toy.loss_of(rng)
        curve = toy.training.train(loss_of, toy.evaluate)
        assert [torch.load(file)["done"] for file in files] == kept
        for file in files:
            shutil.copy(file, toy.training.file)
            again = result(tmp_path, of=(minutes,), reports=1, steps=3)
            assert again == (curve, toy.weights())


@pytest.mark.parametrize("cost, kept", [(1, [0, 2, 4, 6]), (11, [0, 4, 6])])
def test_checkpoints_are_rarer_where_they_take_long(cost, kept, tmp_path, monkeypatch):
    """Steps of 70 seconds: after 120 seconds where writing takes 1, but after 220 where it takes
    11. The first and the last checkpoint are those of the two reports."""
    now, made, save = [0.0], [], torch.save
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    toy = Toy(tmp_path, steps=6, reports=1, accumulate=1)

    def slow_save(state, file):
        now[0] += cost
        made.append(state["done"])
        save(state, file)
    monkeypatch.setattr(torch, "save", slow_save)

    def slow_loss(rng):
        now[0] += 70
        return toy.loss_of(rng)
    toy.training.train(slow_loss, toy.evaluate)
    assert list(dict.fromkeys(made)) == kept


def test_a_checkpoint_is_whole_at_any_time(tmp_path, monkeypatch):
    """Where writing one fails, the one before it stays."""
    save, calls = torch.save, itertools.count(1)

    def cut(state, file):
        if next(calls) == 2:
            file.write_bytes(b"cut off")
            raise KeyboardInterrupt
        save(state, file)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", cut)
        Toy(tmp_path).run()
    assert result(tmp_path) == result()


def test_digests_tell_weights_and_settings_apart():
    weights = {"a": torch.arange(3000.0), "b": torch.ones(1)}
    found = {digest(weights), digest(weights, 1), digest(weights, "1"), digest(weights, [1]),
             digest(weights | {"b": torch.zeros(1)}), digest({"a": torch.arange(3000.0) + 1})}
    assert len(found) == 6 and digest(dict(weights), [1]) in found


# ------------------------------------------------------------------------------------ the data

def test_answers_are_greedy_whatever_the_generation_settings_say(tmp_path):
    """Also where prompts of different lengths stand side by side; an answer ends with its EOS."""
    for family in ("llama", "mistral", "gpt2"):
        model, prompts = tiny(family), [[5, 9, 3], [7], [4, 4, 17, 30, 2, 8, 11, 6, 25], [7]]
        lm = CachedLM(model)
        free = [tokens_of(autoregressive(lm, p), 20) for p in prompts]
        eos = [free[0][7], free[2][12]]
        model.generation_config = before = GenerationConfig(
            repetition_penalty=5.0, temperature=0.3, do_sample=True, top_k=3, num_beams=2,
            no_repeat_ngram_size=1, suppress_tokens=free[1][:1], max_new_tokens=3,
            min_new_tokens=18, eos_token_id=eos)
        expected = [tokens_of(autoregressive(lm, p), 20, eos) for p in prompts]
        (tmp_path / family).mkdir()  # of llama and mistral the weights are the same
        answers = collect_answers(model, WORDLESS, prompts, 20, tmp_path / family, size=2)
        assert answers == expected and model.generation_config is before, family
        assert len(set(map(len, expected))) > 1


def test_sampled_answers():
    """At a high temperature they differ, and end with an EOS or at the limit."""
    torch.manual_seed(0)
    eos, prompts = {*range(0, 60, 9)}, [[5, 9, 3], [7]] * 20
    batches = [*generate_answers(tiny("llama"), eos, prompts, 12, temperature=3.0, size=16)]
    assert [len(some) for some in batches] == [16, 16, 8]
    answers = [tuple(answer) for some in batches for answer in some]
    assert len({*answers}) > 30
    for answer in answers:
        ends = [i for i, token in enumerate(answer) if token in eos]
        assert ends == ([len(answer) - 1] if len(answer) < 12 else ends) and len(answer) <= 12


def test_the_embedded_models_answers(tmp_path, embedded):
    import tasks
    model, _, tokenizer = embedded
    prompts = [encode(tokenizer, e.prompt) for e in tasks.take("sql", "test", 3, seed=3)]
    answers, lm = collect_answers(model, tokenizer, prompts, 30, tmp_path, size=2), CachedLM(model)
    for prompt, answer in zip(prompts, answers):
        assert answer == tokens_of(autoregressive(lm, prompt), 30, {tokenizer.eos_token_id})


def test_answers_are_kept(tmp_path):
    """What is done is not done again; a last line that was cut off is."""
    model, prompts = tiny("llama"), [[5, 9, 3], [7], [4, 4, 17], [8, 2]]
    work = tmp_path / "made" / "here"
    first = collect_answers(model, WORDLESS, prompts[:3], 8, work, size=2)
    [file] = work.iterdir()
    lines = file.read_text()
    answers = collect_answers(model, WORDLESS, prompts, 8, work, size=2)
    whole = file.read_text()
    assert answers[:3] == first and whole.startswith(lines) and whole.count("\n") == 4
    marked = whole.splitlines()
    marked[0] = json.dumps(json.loads(marked[0]) | {"answer": [1, 2, 3]})
    for cut in (1, 30, len(marked[3])):
        file.write_text("\n".join([*marked[:3], marked[3][:cut]]))
        again = collect_answers(model, WORDLESS, prompts, 8, work)
        assert [a == b for a, b in zip(again, answers)].count(False) == 1 and [1, 2, 3] in again
        assert file.read_text() == "\n".join([*marked, ""])


def test_answers_of_another_model_or_length_are_not_taken(tmp_path):
    prompts = [[5, 9, 3], [7]]
    for seed, limit in ((0, 8), (1, 8), (0, 6), (0, 12)):
        model = tiny("llama", seed=seed)
        lm = CachedLM(model)
        expected = [tokens_of(autoregressive(lm, p), limit, {1}) for p in prompts]
        assert collect_answers(model, WORDLESS, prompts, limit, tmp_path) == expected
    assert len(list(tmp_path.iterdir())) == 4


LLAMA = tiny("llama")


@pytest.fixture
def answers(monkeypatch):
    """What the model answers: {prompt: answer}, else a few tokens."""
    known = {}

    def own(model, tokenizer, prompts, limit, work, size):
        return [known.get(tuple(p), p[:1] * min(limit, 4)) for p in prompts]
    monkeypatch.setattr(training, "collect_answers", own)
    return known


def test_held_out_answers_are_drawn_from_the_whole_file(tmp_path, answers, capsys):
    """One in ten, of each half alike, and none of them is trained on."""
    prompts, early, splits = [[n, 5] for n in range(50)], 0, set()
    for seed in range(30):
        data, held_out = collect_examples(LLAMA, WORDLESS, prompts, 20, tmp_path, seed=seed)
        numbers = [p[0] for p, _ in held_out]
        splits.add(tuple(sorted(numbers)))
        assert len(numbers) == 5 and sorted(p[0] for p, _ in data + held_out) == list(range(50))
        assert [p[0] for p, _ in data] != sorted(p[0] for p, _ in data)  # shuffled
        early += sum(n < 25 for n in numbers)
    assert len(splits) == 30  # each seed has its own
    assert 50 < early < 100  # of 150: a standard deviation is 6
    assert "45 answers of 180 tokens, 5 held out, 0 prompts too long" in capsys.readouterr().out
    for most, few in ((3, 3), (100, 5)):
        data, held_out = collect_examples(LLAMA, WORDLESS, prompts, 20, tmp_path, seed=0,
                                          most=most)
        assert len(held_out) == few and len(data) == 50 - few


def test_a_prompt_counts_once(tmp_path, answers):
    """It never stands on both sides."""
    prompts = [[n % 7, 5] for n in range(60)]
    data, held_out = collect_examples(LLAMA, WORDLESS, prompts, 20, tmp_path, seed=0)
    assert sorted(p[0] for p, _ in data + held_out) == list(range(7))


def test_prompts_without_room_for_an_answer_are_skipped(tmp_path, answers, capsys):
    """Of 160 tokens an answer may take 20; too short an answer has nothing to predict."""
    prompts = [[3] * 140, [4] * 141, [5] * 2, [6] * 500, [7]]
    answers[7,] = [7]
    data, held_out = collect_examples(LLAMA, WORDLESS, prompts, 20, tmp_path, seed=0)
    assert sorted(len(p) for p, _ in data + held_out) == [2, 140]
    assert "1 answers of 4 tokens, 1 held out, 2 prompts too long" in capsys.readouterr().out
    with pytest.raises(InputError, match="2 prompts or more of at most 140 tokens, got 1"):
        collect_examples(LLAMA, WORDLESS, prompts[:2], 20, tmp_path, seed=0)
    with pytest.raises(InputError, match="that the model answers with 2 tokens or more, got 1"):
        collect_examples(LLAMA, WORDLESS, prompts[2::2], 20, tmp_path, seed=0)


def test_a_batch_is_alike_in_length():
    """All are learnt from, and each batch is as large as was asked for."""
    rows, rng = [[3] * n for n in range(30)], random.Random(0)
    for batch in (4, 8):
        lengths = [sorted(map(len, sample_alike(rows, batch, rng, len))) for _ in range(80)]
        assert {len(some) for some in lengths} == {batch} and {*sum(lengths, [])} == {*range(30)}
        assert sum(some[-1] - some[0] for some in lengths) / 80 < 11  # any four: 19, any eight: 24
    assert sorted(map(len, sample_alike(rows[:3], 8, rng, len))) == [0, 1, 2]


def test_the_most_frequent_tokens():
    data = [([1, 2, 2], [3, 3, 3]), ([2], [9])]
    assert find_frequent(data, 2) == [2, 3] and find_frequent(data, 0) == []
    assert sorted(find_frequent(data, 10)) == [1, 2, 3, 9]
