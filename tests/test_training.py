"""The one training loop, each training that uses it, and the answers that drafts learn from."""
import itertools
import json
import math
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from transformers import AutoModelForCausalLM, GenerationConfig

from common import InputError, autoregressive
from families import FAMILIES, SCALED, tiny
from helpers import interrupting, script, tokens_of
from survey import masks
from training import loop as training
from training.files import write_text, write_whole
from training.layers import FeatureLM
from training.loop import (Settings, Training, answer_all, collect_answers, collect_examples,
                           compute_frozen, compute_in_parts, cosine, divergence, find_frequent,
                           low_precision, read_texts, recompute_layers, sample_alike, sample_rows,
                           score_answers, use_settings, warm_cosine, warm_linear)
from trainings import PROMPTS, TRAININGS, WORDLESS, list_changes, make_llama, run


# ------------------------------------------------------------------------------------ the loop

class Toy:
    """Weights that move towards random points: all that the loop needs."""

    def __init__(self, folder=None, fingerprint=(), scale=1.0, begin=3.0, **options):
        self.parameters = {"w": torch.nn.Parameter(torch.tensor([begin, -2.0, 0.5])),
                           "b": torch.nn.Parameter(torch.tensor([[0.1]]))}
        self.scale, self.sampled, self.evaluated = scale, [], 0
        options = dict(name="toy", steps=4, lr=0.1, accumulate=2, reports=2) | options
        with use_settings(Settings(accumulate=options.pop("accumulate"))):
            self.training = Training(self.parameters, fingerprint, folder=folder, **options)

    def loss_of(self, rng: random.Random) -> torch.Tensor:
        self.sampled.append([rng.random() for _ in range(3)])
        apart = self.parameters["w"] - torch.tensor(self.sampled[-1])
        return self.scale * (apart.square().sum() + self.parameters["b"].square())[0, 0]

    def evaluate(self) -> tuple[dict, str]:
        self.evaluated += 1
        total = sum(p.sum().item() for p in self.parameters.values())
        return {"total": total, "list": [[total]]}, f"in all {total:.3f}"

    def train(self) -> dict:
        return self.training.train(self.loss_of, self.evaluate)

    def weights(self) -> list[float]:
        return parameters_to_vector(self.parameters.values()).tolist()


def train_toy(*args, **options) -> tuple:
    """Return the curve and the weights of a whole run."""
    toy = Toy(*args, **options)
    return toy.train(), toy.weights()


@pytest.mark.parametrize("scale, norm, value", [
    (1.0, 1.0, math.inf), (100.0, 1.0, math.inf), (1.0, math.inf, 0.5), (1e-3, 1.0, math.inf)])
def test_updates_are_adamws_on_the_mean_loss_with_a_cut_gradient(scale, norm, value):
    toy, plain = (Toy(scale=scale, max_norm=norm, max_value=value, steps=6) for _ in range(2))
    adam = torch.optim.AdamW(plain.parameters.values(), lr=0.1, weight_decay=0.0)
    toy.train()
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
    assert toy.weights() == pytest.approx(plain.weights(), abs=1e-5)


@pytest.mark.parametrize("dtype, capability, low", [
    (torch.float32, "AVX2", False), (torch.float32, "AVX512", True), (torch.float16, "AVX2", True)])
def test_products_are_in_bfloat16_where_that_is_fast(dtype, capability, low, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with low_precision(torch.device("cpu"), SimpleNamespace(dtype=dtype)):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if low else torch.float32)


def test_rates():
    """A cosine falls from the first step on; a warm-up takes a twentieth of the steps."""
    assert [cosine(n, 4) for n in range(4)] == pytest.approx([1, 0.5 + 0.5 ** 1.5, 0.5,
                                                              0.5 - 0.5 ** 1.5])
    expected = [0.5, *(1 - n / 40 for n in range(1, 40))]
    assert [warm_linear(n, 40) for n in range(40)] == pytest.approx(expected)
    expected = [0.5, *(cosine(n, 40) for n in range(1, 40))]
    assert [warm_cosine(n, 40) for n in range(40)] == pytest.approx(expected)
    assert warm_linear(0, 3) == warm_cosine(0, 3) == 1  # three steps have no warm-up


def test_what_is_sampled_depends_on_the_name_the_seed_and_the_step_alone():
    toys = [Toy(seed=0), Toy(seed=1), Toy(name="another"), Toy(seed=0, lr=0.2)]
    for toy in toys:
        toy.train()
    one, two, three, again = (toy.sampled for toy in toys)
    assert one == again and len({*map(tuple, one + two + three)}) == 24


def test_reports(capsys):
    """A run says what it takes: 4 numbers of 4 bytes, each with its gradient and two moments, and
    another model's weights. Figures are made before the first step, as often as was asked, and at
    the end."""
    model = tiny("llama")
    toy = Toy(steps=7, reports=3, models=(model, model), tokens=250.0)
    assert list(toy.train()) == [0, 2, 4, 6, 7] and toy.evaluated == 5
    first, *lines = [line for line in capsys.readouterr().out.splitlines() if line]
    frozen = 4 * sum(p.numel() for p in model.parameters()) / 1e9
    assert "toy: 7 steps, 14 passes of about 250 tokens, 3,500 in all; 6.4e-08 GB for 4 " in first
    assert f"{frozen:.3g} GB for frozen weights" in first and lines[0] == "step 0: in all 1.600"


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_refused(scale):
    with pytest.raises(InputError, match="--lr must be below 0.1: the loss is"):
        Toy(scale=scale).train()


# ------------------------------------------------------- what a large model has no room for

def test_parts_of_rows_are_computed_again_for_their_gradient(monkeypatch):
    """With 7 logits at once there are two rows in a part, and one in the last."""
    monkeypatch.setattr(training, "LOGITS", 7)
    x, sizes = torch.randn(5, requires_grad=True), []
    losses = compute_in_parts(lambda x: sizes.append(len(x)) or x.square(), 3, x)
    losses.sum().backward()
    assert sizes[:3] == [2, 2, 1] and sorted(sizes[3:]) == [1, 2, 2]
    torch.testing.assert_close(losses, x.square())
    torch.testing.assert_close(x.grad, 2 * x)
    assert compute_in_parts(torch.square, 3, x[:0]).shape == (0,)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_keep_only_their_inputs_until_the_end_of_the_with(family):
    model, ids, kept = tiny(family), torch.tensor([[3, 14, 15, 9] * 5]), []
    for recompute in recompute_layers([model, model]), nullcontext():
        seen = {}

        def keep(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), recompute:
            model(input_ids=ids, use_cache=False).logits.sum().backward()
        kept.append(sum(seen.values()))
    assert kept[0] < 0.8 * kept[1]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_texts_are_read_in_batches_as_decoding_reads_them(family, monkeypatch):
    monkeypatch.setattr(training, "TOKENS", 40)
    model, texts = tiny(family), [[5] * n + [7, 8] for n in (3, 17, 1, 9, 30, 2)]
    lm, found = FeatureLM(model), read_texts(model, texts)
    for text, states in zip(texts, found, strict=True):
        lm.start(text)
        assert states.dtype == torch.bfloat16 and states.untyped_storage().nbytes() == 64 * len(
            text)
        torch.testing.assert_close(states.float(), lm.features, atol=0.02, rtol=0.02)


def test_states_are_kept_where_they_are_small(monkeypatch):
    """Two bytes a number: 20 tokens of 8 numbers are 320 bytes."""
    data = [([1, 2], [n]) for n in range(5)] + [([1] * 4, [9])]
    for most, made in ((320, [6]), (319, [1, 2])):
        monkeypatch.setattr(training, "KEPT", most)
        calls = []
        states_of, _ = compute_frozen(lambda pairs: calls.append(len(pairs)) or [
            answer for _, answer in pairs], data, 8)
        assert states_of([3]) == [[3]] and states_of([5, 0]) == [[9], [0]] and calls == made


def test_rows_of_few_texts_are_sampled_and_all_rows_alike():
    """A text of 9 rows is sampled nine times as often as one of 1: each row is expected in 180."""
    lengths, counts = [1, 9, 2, 4, 4], Counter()

    def states_of(numbers):
        assert len({*numbers}) == len(numbers) <= 3
        return [(torch.arange(lengths[n]) + 10 * n, torch.arange(lengths[n])) for n in numbers]
    for seed in range(900):
        one, other = sample_rows(states_of, 3, lengths, 4, random.Random(seed))
        assert len(one) == 4 and (one % 10 == other).all()
        counts.update(one.tolist())
    assert len(counts) == 20 and 100 < min(counts.values()) and max(counts.values()) < 270


# ------------------------------------------------------------------------------ what is kept

@pytest.mark.parametrize("state", [
    b"x", None, [1], {}, {"parameters": {"w": torch.ones(5)}}, {"optimizers": [{"state": {}}]}])
def test_a_checkpoint_that_cannot_be_read_is_refused(state, tmp_path):
    """A file of other bytes, one that is cut off, and files of torch that hold something else."""
    train_toy(tmp_path)
    [file] = tmp_path.glob("*.pt")
    if state is None or isinstance(state, bytes):
        file.write_bytes(state or file.read_bytes()[:500])
    else:
        torch.save(torch.load(file) | state if state and isinstance(state, dict) else state, file)
    with pytest.raises(InputError, match="expected a checkpoint that can be read, got .*toy-"):
        Toy(tmp_path)


def test_a_checkpoint_that_cannot_be_written_is_said_in_a_line(tmp_path, monkeypatch):
    """Where a disk is full torch raises a RuntimeError, and one of several lines. Nothing stays."""
    def fill_disk(state, file):
        file.write_text("half of it")
        raise RuntimeError("unexpected pos 407680\nvs 407568")
    monkeypatch.setattr(torch, "save", fill_disk)
    with pytest.raises(InputError, match="a folder that takes a checkpoint, got .* 407680 vs 40"):
        train_toy(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_result_is_whole_or_the_old_one_stays(tmp_path):
    """A file, a link to it, and a folder, whose older weights go with the older model."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "old")
    (folder := tmp_path / "folder").mkdir()
    for name in "model-1.safetensors", "config.json", "notes":
        (folder / name).write_text("old")

    def write(fresh):
        fresh.mkdir()
        for name in "model.safetensors", "config.json":
            (fresh / name).write_text("new")
    for place, act in ("file", lambda fresh: fresh.write_text("half")), ("folder", write):
        with pytest.raises(KeyboardInterrupt):
            write_whole(tmp_path / place, interrupting(act, 1, after=True))
    assert (tmp_path / "file").read_text() == "old" and not (folder / "model.safetensors").exists()
    write_whole(folder, write)
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        "model.safetensors": "new", "config.json": "new", "notes": "old"}
    assert {file.name for file in tmp_path.iterdir()} == {"file", "folder", "link"}


def interrupted_at(number: int, act) -> None:
    """Call act(), with Ctrl-C at the line of this number that runs in training/loop.py.

    It runs in a thread of its own: an interrupted `with torch.autocast` would leave the type of
    this thread's passes changed.
    """
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
    """The run that goes on ends like one that was never stopped, and repeats no kept update."""
    expected, stopped = train_toy(steps=2, reports=1), 0
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        toy = Toy(folder, steps=2, reports=1)
        try:
            interrupted_at(number, toy.train)
            break
        except KeyboardInterrupt:
            stopped += 1
        kept = [torch.load(file)["done"] for file in folder.glob("*.pt")]
        if not toy.training.inside_update:
            assert sum(kept) == toy.training.done
        again = Toy(folder, steps=2, reports=1)
        assert again.training.done == sum(kept)
        assert (again.train(), again.weights()) == expected, number
        assert len(again.sampled) == 2 * (2 - sum(kept))
    assert stopped > 50


@pytest.mark.parametrize("step, cost, kept", [
    (60, 1, [0, 3, 6]),  # after two steps 120 seconds have passed, and more are asked for
    (70, 11, [0, 4, 6])])  # a checkpoint that takes 11 seconds is written after 220 or later
def test_checkpoints_are_written_every_two_minutes_or_rarer(step, cost, kept, tmp_path,
                                                            monkeypatch):
    now, written = [0.0], []
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    toy = Toy(tmp_path, steps=6, reports=1, accumulate=1)

    def pass_time(seconds, result):
        now[0] += seconds
        return result
    monkeypatch.setattr(training, "write_whole", lambda *_: pass_time(
        cost, written.append(toy.training.done)))
    toy.training.train(lambda rng: pass_time(step, toy.loss_of(rng)), toy.evaluate)
    assert [*dict.fromkeys(written)] == kept


LOOP = "She then has four apples. Tom is here. "


@pytest.mark.parametrize("tokens, text, found", [
    ([3, 4, *[7] * 12, 5], "", True), ([7] * 11, "", False),
    ([1, 2, 3] * 5, "", True), ([1, 2, 3] * 4 + [1, 2], "", False),
    ([], LOOP * 3, True), ([], LOOP * 2, False),
    ([], "        return\n        }\n" * 3, False)])  # lines of ordinary code are short
def test_an_answer_that_repeats_itself_is_seen(tokens, text, found):
    assert training.repeats(tokens, text) == found


# ------------------------------------------------------------------------------ every training

EACH = pytest.mark.parametrize("line", TRAININGS)


def watch(monkeypatch, act) -> None:
    """Let act(training, train, loss_of, evaluate) take the place of every call of `train`.

    Where it returns nothing, the curve has figures that mean nothing."""
    train = Training.train
    monkeypatch.setattr(Training, "train", lambda self, *given: act(
        self, lambda: train(self, *given), *given) or {self.steps: {"accept": [], "right": []}})


def read_result(out) -> dict[str, bytes]:
    """Read the file that a training left, or all weights of the folder."""
    files = [out] if out.is_file() else out.glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


@EACH
def test_a_training_that_ctrl_c_stopped_goes_on(line, tmp_path, monkeypatch):
    """It leaves what one leaves that was never stopped; a third run only loads what is there."""
    made, update, backward = [], Training.update, torch.Tensor.backward

    def count(self, *given):
        loss = update(self, *given)
        made[-1] += 1
        return loss
    monkeypatch.setattr(Training, "update", count)
    results = []
    for name, stops in ("whole", False), ("half", True), ("half", False), ("half", False):
        made.append(0)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            if stops:
                patch.setattr(torch.Tensor, "backward", interrupting(backward, 3))
            results.append(read_result(run(line, tmp_path / name, make_llama())))
    assert made == [4, 2, 2, 0] and results[0] == results[1] == results[2] != {}


@EACH
def test_another_training_never_goes_on_from_what_is_there(line, tmp_path, monkeypatch):
    """Its checkpoint has another name for another model, other prompts and each other option."""
    files = []
    watch(monkeypatch, lambda training, *_: files.append(training.file.name))
    for given in {}, {}, {"noise": 0.1}, {"accumulate": 2}, *list_changes(line):
        with use_settings(Settings(accumulate=given.pop("accumulate", 1))):
            run(line, tmp_path, make_llama(given.pop("noise", 0.0)), **given)
    assert files[0] == files[1] and len({*files}) == len(files) - 1, files


@EACH
def test_recomputing_layers_and_parts_of_logits_change_nothing(line, tmp_path, monkeypatch):
    """Though mask tokens see rows of an earlier pass, and changes hang on hooks.

    AdamW makes whole steps of gradients that are nearly 0, so a few weights may differ."""
    ends, asked, enter = [], [], training.recompute_layers

    def note_end(training, train, *_):
        curve = train()
        ends.append(parameters_to_vector(training.parameters.values()).detach().clone())
        return curve
    watch(monkeypatch, note_end)
    monkeypatch.setattr(training, "recompute_layers",
                        lambda models: asked.append(len(models)) or enter(models))
    for recompute, most in (False, training.LOGITS), (True, 61 * 3):  # then three rows at once
        monkeypatch.setattr(training, "LOGITS", most)
        with use_settings(Settings(recompute=recompute)):
            run(line, tmp_path / str(recompute), make_llama(), steps=2)
    assert len(asked) == 2 and min(asked) > 0  # each pass of the second run
    assert (ends[0] - ends[1]).abs().mean() < 1e-4  # a step moves a weight by up to 1e-2


@EACH
def test_what_is_trained_for_a_model_in_bfloat16_is_float32(line, tmp_path, monkeypatch):
    """A step of AdamW is about lr: bfloat16, whose numbers near 0.02 are 1e-4 apart, rounds most of
    it to nothing."""
    types = []
    watch(monkeypatch, lambda training, *_: types.extend(
        p.dtype for p in training.parameters.values()))
    run(line, tmp_path, make_llama().bfloat16())
    assert {*types} == {torch.float32}


@EACH
def test_the_loss_falls_and_neither_the_model_nor_held_out_answers_are_touched(line, tmp_path,
                                                                               monkeypatch):
    """The loss is of the same batch before and after the training. All that is trained moves.

    Of eight prompts one is held out. Another one in its place changes figures alone."""
    curves, ends, falls, order = [], [], [], [*range(8)]
    random.Random(0).shuffle(order)

    def compare(training, train, loss_of, evaluate):
        training.steps_between_reports = training.steps
        begin = {name: p.detach().clone() for name, p in training.parameters.items()}
        before = loss_of(random.Random(0)).item()
        curves.append(train())
        falls.append(loss_of(random.Random(0)).item() / before)
        ends.append(parameters_to_vector(training.parameters.values()).tolist())
        assert not [name for name, p in training.parameters.items()
                    if p.numel() and torch.equal(p, begin[name])]
        return curves[-1]
    watch(monkeypatch, compare)
    for changed in None, order[0]:
        model, plain = make_llama(), make_llama()
        prompts = [[50, 51] if n == changed else p for n, p in enumerate(PROMPTS)]
        run(line, tmp_path / str(changed), model, prompts, steps=6, batch=8)
        if not line.startswith("cllm"):  # which trains the model itself
            assert all(map(torch.equal, model.parameters(), plain.parameters()))
            assert all(p.grad is None for p in model.parameters())
    assert max(falls) < 1 and ends[0] == ends[1], falls
    assert curves[0] != curves[1] or "dflash" in line  # which guesses nothing right so early


@EACH
def test_train_and_decode_from_the_command_line(line, small_llama, tmp_path, capfd):
    """The line of the first step is printed, and what decodes reads what the training leaves."""
    (tmp_path / "prompts").write_text("How many cats?\nHow many dogs are there?\n")
    out, data = str(tmp_path / "out"), str(tmp_path / "data")
    device = ["--device", "cpu", "--target", small_llama]
    file, *argv = line.split()
    read = ["--prompts", str(tmp_path / "prompts"), "--max-new-tokens", "8"]
    if file == "cllm":
        assert script("cllm", "collect", *device, *read, "--n", "4", "--out", data) == 0
        read = ["--data", data]
    assert script(file, *argv, *device, *read, "--steps", "1", "--out", out) == 0
    assert "step 1: " in capfd.readouterr().out
    file, *argv = TRAININGS[line].replace("OUT", out).split()
    argv = [*device, *argv, "--prompts", str(tmp_path / "prompts"), "--max-new-tokens", "8"]
    assert script(file, *argv, "--compare") == 0
    assert "tokens per call" in capfd.readouterr().err


# ------------------------------------------------------------------------------------ the data

@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_answers_are_greedy_whatever_the_generation_settings_say(family, tmp_path, monkeypatch):
    """Prompts of different lengths stand side by side; an answer ends with its EOS. All come in the
    prompts' order, and a prompt that is repeated is answered once."""
    model, prompts = tiny(family), [[5, 9, 3], [7], [4, 4, 17, 30, 2, 8, 11, 6, 25], [7]]
    lm = FeatureLM(model)
    free = [tokens_of(autoregressive(lm, p), 20) for p in prompts]
    eos = [free[0][7], free[2][12]]
    model.generation_config = before = GenerationConfig(
        repetition_penalty=5.0, temperature=0.3, do_sample=True, top_k=3, num_beams=2,
        no_repeat_ngram_size=1, suppress_tokens=free[1][:1], max_new_tokens=3,
        min_new_tokens=18, eos_token_id=eos)
    expected = [tokens_of(autoregressive(lm, p), 20, eos) for p in prompts]
    monkeypatch.setattr(training, "TOKENS", 46)  # two short prompts at once, and the long one alone
    assert collect_answers(model, WORDLESS, prompts, 20, tmp_path) == expected
    assert answer_all(model, {*eos}, prompts, 20) == expected
    assert model.generation_config is before and len({*map(len, expected)}) > 1
    [file] = tmp_path.iterdir()
    assert len(file.read_text().splitlines()) == 3


def test_sampled_answers_differ():
    torch.manual_seed(0)
    answers = answer_all(tiny("llama"), set(), [[5, 9, 3], [7]] * 20, 12, temperature=3.0)
    assert len({*map(tuple, answers)}) > 30


def test_batches_have_a_number_of_tokens_and_the_longest_prompts_come_first(monkeypatch):
    """A batch that does not fit then fails at once, or never. A prompt beyond it is alone."""
    monkeypatch.setattr(training, "TOKENS", 60)  # two of 20 and 10 tokens, or four of 5 and 10
    prompts = [[5] * n for n in (2, 3, 90, 4, 20, 5, 19)]
    assert training.split_by_tokens(prompts, 10) == [[2], [4, 6], [5, 3, 1, 0]]


def test_answers_are_kept_but_for_a_line_that_was_cut_off(tmp_path):
    """In a folder that is made. A prompt that is kept is not answered again."""
    model, prompts, work = tiny("llama"), [[5, 9, 3], [7], [4, 4, 17], [8, 2]], tmp_path / "a" / "b"
    answers = collect_answers(model, WORDLESS, prompts, 8, work)
    [file] = work.iterdir()
    marked = file.read_text().splitlines()
    marked[0] = json.dumps(json.loads(marked[0]) | {"answer": [1, 2, 3]})
    for cut in (1, 30, len(marked[3])):
        file.write_text("\n".join([*marked[:3], marked[3][:cut]]))
        again = collect_answers(model, WORDLESS, prompts, 8, work)
        assert [a == b for a, b in zip(again, answers)].count(False) == 1 and [1, 2, 3] in again
        assert file.read_text() == "\n".join([*marked, ""])


@pytest.mark.parametrize("line", ["xx", "{}", '{"prompt": 3, "answer": [4]}', "\udcff"])
def test_a_damaged_line_among_the_answers_is_refused(line, tmp_path):
    model, prompts = tiny("llama"), [[5, 9, 3], [7]]
    collect_answers(model, WORDLESS, prompts, 8, tmp_path)
    [file] = tmp_path.iterdir()
    before = file.read_bytes()
    file.write_bytes(before + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(InputError, match="got a damaged line 3 in .*answers-"):
        collect_answers(model, WORDLESS, prompts, 8, tmp_path)


def test_answers_of_another_model_type_or_length_are_not_taken(tmp_path):
    for seed, limit in ((0, 8), (1, 8), (0, 6), (0, 12)):
        model = tiny("llama", seed=seed)
        expected = [tokens_of(autoregressive(FeatureLM(model), [7]), limit, {1})]
        assert collect_answers(model, WORDLESS, [[7]], limit, tmp_path) == expected
    collect_answers(tiny("llama").bfloat16(), WORDLESS, [[7]], 8, tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


LLAMA = tiny("llama")
TEN = [([3, 4], [5, 6, 7]), ([9, 3, 30], [4])] * 5


@pytest.fixture
def split(monkeypatch, tmp_path):
    """A function that splits prompts; the model answers each with its first token, four times."""
    def answer(model, tokenizer, prompts, limit, work):
        return [p[:1] if p == [7] else p[:1] * 4 for p in prompts]
    monkeypatch.setattr(training, "collect_answers", answer)
    return lambda prompts, **options: collect_examples(LLAMA, WORDLESS, prompts, 20, tmp_path,
                                                       **dict(seed=0) | options)


def test_held_out_answers_are_drawn_from_the_whole_file(split, capsys):
    """One in ten is held out, from each half alike, and never trained on."""
    prompts = [[n, 5] for n in range(50)]
    splits = [split(prompts, seed=seed) for seed in range(30)]
    numbers = [[p[0] for p, _ in held_out] for _, held_out in splits]
    for (data, _), few in zip(splits, numbers):
        assert len(few) == 5 and sorted([p[0] for p, _ in data] + few) == list(range(50))
    assert len({*map(str, numbers)}) == 30
    assert 50 < sum(n < 25 for n in sum(numbers, [])) < 100  # of 150: a standard deviation is 6
    assert "45 answers of 180 tokens, 5 held out, 0 prompts too long" in capsys.readouterr().out


def test_prompts_without_room_for_an_answer_are_skipped(split, capsys):
    """20 tokens of an answer leave 10 of 30 for the prompt, and 140 of the context's 160."""
    for most, room in (2048, 140), (30, 10):
        with use_settings(Settings(max_length=most)):
            data, held_out = split([[3] * room, [4] * (room + 1), [5] * 2, [3] * room])
        assert sorted(len(p) for p, _ in data + held_out) == [2, room]
        assert "1 held out, 2 prompts too long or repeated" in capsys.readouterr().out
    with pytest.raises(InputError, match="that the model answers with 2 tokens or more, got 1"):
        split([[5] * 2, [7]])  # nothing predicts an answer of one token
    with use_settings(Settings(max_length=20)), pytest.raises(InputError, match=(
            "--max-new-tokens must be below 20, the most tokens of a text, got 20")):
        split([[3]])


def test_given_pairs_take_the_place_of_answers(split, capsys):
    """Long answers are cut, and a prompt counts once."""
    pairs = [([1] * 4, [6, 7, 8]), ([2] * 8, [6, 7, 8]), ([3] * 9, [6, 7, 8]), ([1] * 4, [9, 9]),
             ([4], [5, 6])]
    with use_settings(Settings(max_length=10, pairs=pairs)):
        data, held_out = split([[7]])
    assert sorted(data + held_out) == [([1] * 4, [6, 7, 8]), ([2] * 8, [6, 7]), ([4], [5, 6])]
    assert "2 repeated or without room for an answer, 2 longer than 10" in capsys.readouterr().out
    with use_settings(Settings(pairs=pairs[:1])), pytest.raises(InputError, match=(
            "--data must hold 2 prompts or more with answers of 2 tokens or more, got 1")):
        split([])


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


@pytest.mark.parametrize("name", [*SCALED, "llama", "gpt2"])
def test_scores_of_answers_are_the_models_logits_and_its_head_reads_no_other_rows(name):
    torch.manual_seed(0)
    model, rows = AutoModelForCausalLM.from_config((SCALED | FAMILIES)[name]).eval(), []
    with model.get_output_embeddings().register_forward_hook(
            lambda head, inputs, output: rows.append(output.shape[:-1].numel())):
        logits, tokens = score_answers(model, TEN)
    assert rows == [20] and tokens.tolist() == [5, 6, 7, 4] * 5
    expected = [model(torch.tensor([p + a])).logits[0, len(p) - 1:-1] for p, a in TEN]
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_no_training_scores_all_held_out_answers_at_once(monkeypatch, tmp_path):
    """Logits of a hundred answers do not fit in memory where a vocabulary is large."""
    sizes, pad, pairs = [], training.pad_pairs, [([n], [5, 6, 7]) for n in range(30)]
    monkeypatch.setattr(training, "collect_examples", lambda *_, **__: (pairs, pairs))
    monkeypatch.setattr(training, "pad_pairs", lambda pairs: sizes.append(len(pairs)) or pad(pairs))
    masks.tune(tiny("llama"), WORDLESS, [], out=tmp_path / "out", work=tmp_path, steps=1, batch=4,
               k=1, rank=1)
    assert max(sizes) == 8


@pytest.mark.parametrize("kind, expected", [
    ("forward-kl", lambda p, q, m: (p * (p / q).log()).sum(-1)),
    ("reverse-kl", lambda p, q, m: (q * (q / p).log()).sum(-1)),
    ("jsd", lambda p, q, m: ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2),
    ("tvd", lambda p, q, m: torch.tensor([[0.4]]))])
def test_divergences_by_hand(kind, expected):
    p, q = torch.tensor([[[0.5, 0.3, 0.2]]]), torch.tensor([[[0.1, 0.6, 0.3]]])
    torch.testing.assert_close(divergence(kind, p.log() + 3, q.log() - 2),
                               expected(p, q, (p + q) / 2))
    with pytest.raises(ValueError, match="got 'hellinger'"):
        divergence("hellinger", p, q)
