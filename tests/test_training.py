"""The one training loop, each training that uses it, and the answers that drafts learn from."""
import itertools
import json
import math
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.optim import AdamW, adam
from transformers import GenerationConfig

from common import InputError, autoregressive
from fake_cuda import FakeCuda
from families import SCALED, tiny
from helpers import check_refused, interrupting, note_calls, script, tokens_of
from support.engine import EngineLM
from training import loop as training, texts as reading
from training.loop import Training, divergence
from training.texts import (answer_all, collect_answers, find_frequent, measure_right,
                            prepare_training, read_texts, sample_alike)
from trainings import (FLAT, PROMPTS, TRAININGS, TWINS, WORDLESS, list_changes, make_llama, run,
                       use_settings)


# ------------------------------------------------------------------------------------ the loop

class Toy:
    """Weights that move towards random points: all that the loop needs."""

    def __init__(self, folder=None, fingerprint=(), scale=1.0, two=False, **options):
        self.parameters = {"w": torch.nn.Parameter(torch.tensor([3.0, -2.0, 0.5])),
                           "b": torch.nn.Parameter(torch.tensor([[0.1]]))}
        if two:
            options["optimizers"] = [AdamW([p]) for p in self.parameters.values()]
        self.scale, self.sampled = scale, []
        options = dict(name="toy", steps=4, lr=0.1, accumulate=2) | options
        with use_settings(accumulate=options.pop("accumulate")):
            self.training = Training(self.parameters, fingerprint, folder=folder, **options)

    def loss_of(self, rng: random.Random) -> torch.Tensor:
        self.sampled.append([rng.random() for _ in range(3)])
        apart = self.parameters["w"] - torch.tensor(self.sampled[-1])
        return self.scale * (apart.square().sum() + self.parameters["b"].square())[0, 0]

    def evaluate(self) -> tuple[dict, str]:
        total = sum(p.sum().item() for p in self.parameters.values())
        return {"total": total, "list": [[total]]}, f"in all {total:.3f}"

    def train(self) -> tuple[dict, list[float]]:
        """Return the curve and the weights of a whole run."""
        curve = self.training.train(self.loss_of, self.evaluate)
        return curve, parameters_to_vector(self.parameters.values()).tolist()


@pytest.mark.parametrize("scale, norm, value", [
    (1.0, 1.0, math.inf), (100.0, 1.0, math.inf), (1.0, math.inf, 0.5), (1e-3, 1.0, math.inf)])
def test_updates_are_adamws_on_the_mean_loss_with_a_cut_gradient(scale, norm, value):
    toy, plain = (Toy(scale=scale, max_norm=norm, max_value=value, steps=6) for _ in range(2))
    adam = AdamW(plain.parameters.values(), lr=0.1, weight_decay=0.0)
    _, weights = toy.train()
    for step in range(6):
        for w in toy.sampled[2 * step:2 * step + 2]:
            loss = (plain.parameters["w"] - torch.tensor(w)).square().sum()
            (scale * (loss + plain.parameters["b"].square()) / 2).sum().backward()
        length = torch.cat([p.grad.flatten() for p in plain.parameters.values()]).norm()
        for p in plain.parameters.values():
            p.grad /= max(1, length / norm)
            p.grad.clamp_(-value, value)
        adam.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / 6))
        adam.step()
        adam.zero_grad()
    expected = parameters_to_vector(plain.parameters.values()).tolist()
    assert weights == pytest.approx(expected, abs=1e-5)


def test_rates():
    """A warm-up takes a twentieth of the steps, and three steps have none."""
    for rate, later in ((training.warm_linear, lambda n, steps: 1 - n / steps),
                        (training.warm_cosine, training.cosine)):
        expected = [0.5, *(later(n, 40) for n in range(1, 40))]
        assert [rate(n, 40) for n in range(40)] == pytest.approx(expected) and rate(0, 3) == 1


def test_what_is_sampled_depends_on_the_name_the_seed_and_the_step_alone():
    toys = [Toy(seed=0), Toy(seed=1), Toy(name="another"), Toy(seed=0, lr=0.2)]
    for toy in toys:
        toy.train()
    one, two, three, again = (toy.sampled for toy in toys)
    assert one == again and len({*map(tuple, one + two + three)}) == 24


def test_reports(capsys):
    """A run says what it takes: 4 numbers of 4 bytes, each with its gradient and two moments.

    Figures are made before the first step, about ten times on the way, and at the end."""
    assert list(Toy(steps=25).train()[0]) == [*range(0, 25, 2), 25]
    first, *lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert first == "toy: 25 steps, 4 trained numbers, 6.4e-08 GB with gradients and moments"
    assert lines[0] == "step 0: in all 1.600" and len(lines) == 14


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_refused(scale):
    check_refused("--lr must be below 0.1: the loss is", Toy(scale=scale).train)


# ------------------------------------------------------- what a large model has no room for

def test_parts_of_rows_are_computed_again_for_their_gradient(monkeypatch):
    """With 7 logits at once there are two rows in a part, and one in the last."""
    monkeypatch.setattr(training, "LOGITS", 7)
    x, sizes = torch.randn(5, requires_grad=True), []
    training.compute_in_parts(lambda x: sizes.append(len(x)) or x.square(), 3, x).sum().backward()
    assert sizes[:3] == [2, 2, 1] and len(sizes) == 6
    torch.testing.assert_close(x.grad, 2 * x)


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_texts_are_read_in_batches_as_decoding_reads_them(family, monkeypatch):
    """Batches give the states that decoding gives, even if a training multiplies in bfloat16. No
    text keeps the states of its batch in memory."""
    monkeypatch.setattr(reading, "TOKENS", 40)
    model, texts = tiny(family), [[5] * n + [7, 8] for n in (3, 17, 1, 9, 30, 2)]
    lm, found = EngineLM(model), read_texts(model, texts)
    for text, states in zip(texts, found, strict=True):
        lm.start(text)
        assert states.dtype == torch.bfloat16
        torch.testing.assert_close(states.float(), lm.features, atol=0.02, rtol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, found, read_texts(model, texts)))
    for text, states in zip(texts, read_texts(model.bfloat16(), texts)):
        assert states.untyped_storage().nbytes() == 64 * len(text)


def test_states_of_a_frozen_model_are_kept_only_if_they_are_small(monkeypatch):
    """Five texts of 4 tokens with 3 numbers each are 120 bytes in bfloat16."""
    data = [([n], [5, 6, 7]) for n in range(5)]
    for most, computed, limit in (120, [5], math.inf), (119, [2], reading.TEXTS):
        monkeypatch.setattr(reading, "KEPT", most)
        sizes = []
        states_of, few = reading.compute_frozen(
            lambda pairs: sizes.append(len(pairs)) or [prompt for prompt, _ in pairs], data, 3)
        assert states_of([3, 1]) == [[3], [1]] and sizes == computed and few == limit


def test_rows_of_few_texts_are_sampled_and_all_rows_alike():
    """A text of 9 rows is sampled nine times as often as one of 1: each row is expected in 180."""
    lengths, counts = [1, 9, 2, 4, 4], Counter()

    def states_of(numbers):
        assert len({*numbers}) == len(numbers) <= 3
        return [(torch.arange(lengths[n]) + 10 * n, torch.arange(lengths[n])) for n in numbers]
    for seed in range(900):
        one, other = reading.sample_rows(states_of, 3, lengths, 4, random.Random(seed))
        assert len(one) == 4 and (one % 10 == other).all()
        counts.update(one.tolist())
    assert len(counts) == 20 and 100 < min(counts.values()) and max(counts.values()) < 270


# ------------------------------------------------------------------------------ what is kept

@pytest.mark.parametrize("size", [1, 500])
def test_a_checkpoint_that_cannot_be_read_is_refused(size, tmp_path):
    Toy(tmp_path).train()
    [file] = tmp_path.glob("*.pt")
    file.write_bytes(file.read_bytes()[:size])
    check_refused("expected a checkpoint; without it .*, got .*toy-", Toy, tmp_path)


def interrupted_at(number: int, act) -> None:
    """Call act(), with Ctrl-C at the line of this number that runs in training/loop.py, or where
    AdamW changes a weight.

    It runs in a thread of its own: an interrupted `with torch.autocast` would leave the type of
    this thread's passes changed.
    """
    count = itertools.count(1)

    def trace(frame, event, _):
        code = frame.f_code
        if training.__file__ != code.co_filename and code != adam._single_tensor_adam.__code__:
            return None
        if event == "line" and next(count) == number:
            raise KeyboardInterrupt
        return trace
    with ThreadPoolExecutor(1, initializer=sys.settrace, initargs=[trace]) as thread:
        thread.submit(act).result()


def test_ctrl_c_at_any_line(tmp_path):
    """The run that goes on ends like one that was never stopped, and repeats no kept update. Lines
    of an optimizer's step and those between two optimizers are among them. A traceback has the
    frame of the loop, and must not keep the loop open."""
    expected, known = Toy(steps=2, two=True).train(), {}
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        toy = Toy(folder, steps=2, two=True)
        try:
            interrupted_at(number, toy.train)
            break
        except KeyboardInterrupt:
            files = tuple(file.read_bytes() for file in folder.glob("*"))
        if files not in known:  # what goes on is the same after the same files
            again = Toy(folder, steps=2, two=True)
            known[files] = again.training.done
            assert again.train() == expected, number
            assert len(again.sampled) == 2 * (2 - known[files])
        assert known[files] == toy.training.done or toy.training.inside_update
    assert number > 250 and {*known.values()} == {0, 1, 2}


# ------------------------------------------------------------------------------ every training

DISTINCT = [line for line in TRAININGS if line not in TWINS]
LOOPED = [line for line in DISTINCT if line not in FLAT]  # by training/loop.py


def read_result(out) -> dict[str, bytes]:
    """Read the file that a training left, or all weights of the folder."""
    files = [out] if out.is_file() else out.glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("line", LOOPED)
def test_a_training_that_ctrl_c_stopped_goes_on(line, tmp_path, monkeypatch):
    """It leaves what one leaves that was never stopped; a third run only loads what is there. Of
    the run that is stopped two updates are kept, since the third one has begun only."""
    begun, backward = note_calls(monkeypatch, Training, "update"), torch.Tensor.backward
    results, counts = [], []
    for name, stops in ("whole", False), ("half", True), ("half", False), ("half", False):
        begun.clear()
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            if stops:
                patch.setattr(torch.Tensor, "backward", interrupting(backward, 3))
            results.append(read_result(run(line, tmp_path / name, make_llama())))
        counts.append(len(begun))
    assert counts == [4, 3, 2, 0] and results[0] == results[1] == results[2] != {}


@pytest.mark.parametrize("line", LOOPED)
def test_another_training_never_goes_on_from_what_is_there(line, tmp_path, monkeypatch):
    """Its checkpoint has another name for another model, other prompts and each other option.

    The same numbers in bfloat16 are another model, too. The numbers trained for it are float32:
    a step of AdamW is about lr, and bfloat16 would round most of it to nothing."""
    files = []

    def note(training, *_) -> None:
        files.append(training.file.name)
        assert {p.dtype for p in training.parameters.values()} == {torch.float32}
    monkeypatch.setattr(Training, "train", note)
    models = [make_llama(), make_llama(), make_llama(0.1), make_llama().bfloat16()]
    for model, given in [*((model, {}) for model in models),
                         *((make_llama(), x) for x in ({"accumulate": 2}, *list_changes(line)))]:
        with use_settings(accumulate=given.pop("accumulate", 1)):
            run(line, tmp_path, model, **given)
    assert files[0] == files[1] and len({*files}) == len(files) - 1, files


@pytest.mark.parametrize("line", [line for line in TRAININGS if line not in FLAT])
def test_the_loss_falls_and_the_model_and_held_out_answers_stay(line, tmp_path, monkeypatch):
    """Every update has the same batch, whose loss falls. All that is trained moves.

    Of eight prompts one is held out. Another one in its place changes figures alone. Parts of
    logits, of three rows, change nothing. But AdamW makes whole steps of gradients that are nearly
    0, so a few weights may differ."""
    curves, ends, order = [], [], [*range(8)]
    random.Random(0).shuffle(order)
    train = Training.train

    def compare(training, loss_of, evaluate) -> None:
        begin = {name: p.detach().clone() for name, p in training.parameters.items()}
        losses = []

        def note_loss(_) -> torch.Tensor:
            losses.append(loss_of(random.Random(0)))
            return losses[-1]
        curves.append(train(training, note_loss, evaluate))
        assert len(losses) == 4 and losses[-1] < losses[0]
        ends.append(parameters_to_vector(training.parameters.values()).detach())
        assert not [name for name, p in training.parameters.items()
                    if p.numel() and torch.equal(p, begin[name])]
    monkeypatch.setattr(Training, "train", compare)
    for changed, rows in ((None, 999), (order[0], 999), (None, 3))[:3 if line in DISTINCT else 1]:
        monkeypatch.setattr(training, "LOGITS", 61 * rows)
        model, plain = make_llama(), make_llama()
        prompts = [[50, 51] if n == changed else p for n, p in enumerate(PROMPTS)]
        run(line, tmp_path / f"{changed} {rows}", model, prompts, steps=4, batch=8)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert ends[1:] == [] or torch.equal(*ends[:2])
    assert (ends[0] - ends[-1]).abs().mean() < 1e-4  # a step moves a weight by up to 1e-2
    # So short answers have no right guess of a block or of EAGLE before or after.
    if line in DISTINCT and not line.startswith(("survey.dflash", "survey.eagle train")):
        assert curves[0] != curves[1]


@pytest.mark.parametrize("line", TRAININGS)
def test_train_and_decode_from_the_command_line(line, models, tmp_path, capfd):
    """A method decodes with the file that the training leaves. The loop prints a line of its first
    step."""
    (tmp_path / "prompts").write_text("How many cats?\nHow many dogs are there?\n")
    out, data = str(tmp_path / "out"), str(tmp_path / "data")
    device = ["--device", "cpu", *models[:2]]
    file, *argv = line.split()
    read = ["--prompts", str(tmp_path / "prompts"), "--max-new-tokens", "8"]
    if file == "cllm":
        assert script("cllm", "collect", *device, *read, "--n", "4", "--out", data) == 0
        read = ["--data", data]
    assert script(file, *argv, *device, *read, "--steps", "1", "--out", out) == 0
    assert "step 1: " in capfd.readouterr().out or line in FLAT
    file, *argv = TRAININGS[line].replace("OUT", out).split()
    argv = [*device, *argv, "--prompts", str(tmp_path / "prompts"), "--max-new-tokens", "8"]
    assert script(file, *argv, "--compare") == 0
    assert "tokens per call" in capfd.readouterr().err


MEASURING = ["survey.draft_verify search", "hybrid.hybrid fit"]


@pytest.mark.parametrize("line", [*DISTINCT, *MEASURING])
def test_a_training_runs_on_the_simulated_gpu(line, tmp_path):
    """It makes a step, and whatever comes before and after it."""
    changes = {"steps": 1} if line in TRAININGS else {}
    with FakeCuda() as gpu:
        model = make_llama().to("cuda")
        if line == "hybrid.hybrid fit":
            store = run("survey.rest build", tmp_path / "store", model, PROMPTS[:2])
            changes = dict(datastore=store, adapters=tmp_path)
        gpu.counts.clear()
        made = run(line, tmp_path, model, PROMPTS[:2], **changes)
    assert gpu.counts["launches"] > 100 and made.exists()


# ------------------------------------------------------------------------------------ the data

@pytest.mark.parametrize("family", ["gemma4-sizes", "gemma4-shared", "gemma3n-shared"])
@pytest.mark.parametrize("line", [*DISTINCT, MEASURING[0]])
def test_layers_that_look_up_embeddings_of_their_own(line, family, tmp_path):
    """A training goes through or is refused in one line. One that feeds masks is refused before any
    answer is made."""
    model, fed = tiny(family), line.startswith(("bita", "survey.masks"))
    with pytest.raises(InputError, match="embeddings, got G") if fed else suppress(InputError):
        run(line, tmp_path, model, PROMPTS[:2], **({"steps": 1} if line in TRAININGS else {}))
    assert not fed or not [*tmp_path.rglob("answers*")]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_answers_are_greedy_whatever_the_generation_settings_say(family, tmp_path, monkeypatch):
    """Prompts of different lengths are answered side by side, and an answer ends with its EOS. The
    answers have the prompts' order, and a prompt that is repeated is answered once."""
    model, prompts = tiny(family), [[5, 9, 3], [7], [4, 4, 17, 30, 2, 8, 11, 6, 25], [7]]
    lm = EngineLM(model)
    free = [tokens_of(autoregressive(lm, p), 20) for p in prompts]
    eos = [free[0][7], free[2][12]]
    model.generation_config = before = GenerationConfig(
        repetition_penalty=5.0, temperature=0.3, do_sample=True, top_k=3, num_beams=2,
        no_repeat_ngram_size=1, suppress_tokens=free[1][:1], max_new_tokens=3,
        min_new_tokens=18, eos_token_id=eos)
    expected = [tokens_of(autoregressive(lm, p), 20, eos) for p in prompts]
    monkeypatch.setattr(reading, "TOKENS", 46)  # two short prompts at once, and the long one alone
    assert collect_answers(model, WORDLESS, prompts, 20, tmp_path) == expected
    assert answer_all(model, {*eos}, prompts, 20) == expected
    assert model.generation_config is before and len({*map(len, expected)}) > 1
    [file] = tmp_path.iterdir()
    assert len(file.read_text().splitlines()) == 3


def test_answers_are_kept_but_for_a_line_that_was_cut_off(tmp_path):
    """A prompt that is kept is not answered again. A damaged line in the middle is refused."""
    model, prompts = tiny("llama"), [[5, 9, 3], [7], [4, 4, 17], [8, 2]]
    answers = collect_answers(model, WORDLESS, prompts, 8, tmp_path / "a" / "b")
    [file] = tmp_path.rglob("*.jsonl")
    marked = file.read_text().splitlines()
    marked[0] = json.dumps(json.loads(marked[0]) | {"answer": [1, 2, 3]})
    for cut in (1, 30, len(marked[3])):
        file.write_text("\n".join([*marked[:3], marked[3][:cut]]))
        again = collect_answers(model, WORDLESS, prompts, 8, file.parent)
        assert [a == b for a, b in zip(again, answers)].count(False) == 1 and [1, 2, 3] in again
        assert file.read_text() == "\n".join([*marked, ""])
    whole = file.read_bytes()
    for damaged in b"\xff\n", b"{}\n", b"5\n":
        file.write_bytes(whole + damaged)
        with pytest.raises(InputError, match="an earlier run kept in line 5; .*, got .*answers-"):
            collect_answers(model, WORDLESS, prompts, 8, file.parent)


def test_answers_of_another_model_type_or_length_are_not_taken(tmp_path):
    """One number of one row of the last model is another one."""
    models = [tiny("llama"), tiny("llama", 1), tiny("llama").bfloat16(), tiny("llama").bfloat16()]
    models[-1].get_input_embeddings().weight.data[60, 3] += 1
    for number, (model, limit) in enumerate(itertools.product(models, (6, 8, 12)), 1):
        collect_answers(model, WORDLESS, [[7]], limit, tmp_path)
        assert len([*tmp_path.iterdir()]) == number


@pytest.fixture
def split(monkeypatch, tmp_path):
    """A function that splits prompts; the model answers each with its first token, four times."""
    monkeypatch.setattr(reading, "collect_answers", lambda model, tokenizer, prompts, *_: [
        p[:1] if p == [7] else p[:1] * 4 for p in prompts])
    return lambda prompts, seed=0: prepare_training(
        tiny("llama"), WORDLESS, prompts, tmp_path / "out", None, max_new_tokens=20, seed=seed)[1:]


def test_held_out_answers_are_drawn_from_the_whole_file(split, capsys):
    """One in ten is held out, and never trained on."""
    data, held_out = split([[n, 5] for n in range(50)])
    assert sorted(p[0] for p, _ in data + held_out) == list(range(50)) and len(held_out) == 5
    assert max(p[0] for p, _ in held_out) - min(p[0] for p, _ in held_out) > 20
    assert "50 answers of 200 tokens; 0 others repeated, with" in capsys.readouterr().out
    assert split([[n, 5] for n in range(50)], seed=1)[1] != held_out
    assert len(split([[n, 5] for n in range(1500)])[1]) == 100  # and no more


def test_prompts_without_room_for_an_answer_are_skipped(split):
    """An answer of 20 tokens must fit. So a prompt has at most 10 of 30 tokens, or 140 of the
    context's 160."""
    for most, room in (2048, 140), (30, 10):
        with use_settings(max_length=most):
            data, held_out = split([[3] * room, [4] * (room + 1), [5] * 2, [3] * room])
        assert sorted(len(p) for p, _ in data + held_out) == [2, room]
    # Nothing predicts an answer of one token.
    check_refused("expected 2 prompts or more .* 2 tokens .* got 1", split, [[5] * 2, [7]])
    with use_settings(max_length=20), pytest.raises(InputError, match="20 tokens of 20"):
        split([[3]])


def test_given_pairs_take_the_place_of_answers(split):
    """Long answers are cut, and a prompt counts once."""
    pairs = [([1] * 4, [6, 7, 8]), ([2] * 8, [6, 7, 8]), ([3] * 9, [6, 7, 8]), ([1] * 4, [9, 9])]
    with use_settings(max_length=10, pairs=pairs):
        data, held_out = split([])
    assert sorted(data + held_out) == [([1] * 4, [6, 7, 8]), ([2] * 8, [6, 7])]


def test_a_batch_is_alike_in_length():
    """All are learnt from, and each batch is as large as was asked for."""
    rows, rng = [[3] * n for n in range(30)], random.Random(0)
    for batch in (4, 8):
        lengths = [sorted(map(len, sample_alike(rows, batch, rng, len))) for _ in range(80)]
        assert {len(some) for some in lengths} == {batch} and {*sum(lengths, [])} == {*range(30)}
        assert sum(some[-1] - some[0] for some in lengths) / 80 < 11  # any four give 19, eight 24
    assert sorted(map(len, sample_alike(rows[:3], 8, rng, len))) == [0, 1, 2]


def test_the_most_frequent_tokens():
    data = [([1, 2, 2], [3, 3, 3]), ([2], [9])]
    assert find_frequent(data, 2) == [2, 3] and find_frequent(data, 0) == []
    assert sorted(find_frequent(data, 10)) == [1, 2, 3, 9]


@pytest.mark.parametrize("name", [*SCALED, "llama", "gpt2"])
def test_guesses_are_the_models_and_its_head_reads_few_rows(name):
    """The head reads only the rows before tokens of answers."""
    model, rows = tiny(name), []
    said = [model(torch.tensor([x])).logits[0, -1].argmax().item() for x in ([3, 4], [9, 3, 30])]
    pairs = [([3, 4], [said[0], 6, 7]), ([9, 3, 30], said[1:])]
    right = [model(torch.tensor([p + a])).logits[0, len(p) - 1:-1].argmax(-1) == torch.tensor(a)
             for p, a in pairs]
    with model.get_output_embeddings().register_forward_hook(
            lambda head, inputs, output: rows.append(len(output))):
        assert measure_right(model, pairs) == torch.cat(right).float().mean().item() >= 0.5
    assert rows == [3, 1]


@pytest.mark.parametrize("kind, value", [
    ("forward-kl", lambda p, q, m: (p * (p / q).log()).sum(-1)),
    ("reverse-kl", lambda p, q, m: (q * (q / p).log()).sum(-1)),
    ("jsd", lambda p, q, m: ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2),
    ("cross-entropy", lambda p, q, m: -(p * q.log()).sum(-1)),
    ("tvd", lambda p, q, m: torch.tensor([0.4]))])
def test_divergences_by_hand(kind, value):
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.1, 0.6, 0.3]])
    torch.testing.assert_close(divergence(kind, p.log() + 3, q.log() - 2), value(p, q, (p + q) / 2))
