"""What models/train.py makes: the embedded models from generated tasks, and for any target a draft
of some of its layers and prompts of its own."""
import copy
import functools
import itertools
import json
import random
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from families import near, tiny
from helpers import ROOT, interrupting, said_in_one_line, tokens_of

sys.path.append(str(ROOT / "models"))
import train as recipe  # noqa: E402  (the path is set above)
from common import CachedLM, InputError, autoregressive, load  # noqa: E402
from models import training  # noqa: E402
from tasks import read_prompts  # noqa: E402

PROMPTS = ["Tom has 3 apples.", "Ann has 4 cakes.", "He buys 7 pens.", "SELECT name"]
IDS = torch.tensor([[5, 9, 30, 2], [8, 7, 1, 1]])
WEIGHTS = torch.tensor([[0.0, 0, 1, 1], [1, 0.5, 0, 0]])
SQL = {"sql": 1.0, "math": 0.0, "code": 0.0}


class Letters:
    """A tokenizer, as far as needed."""
    eos_token_id, all_special_ids, chat_template = 1, [0], None

    def encode(self, text, add_special_tokens=True):
        return [5 + ord(x) % 50 for x in text]

    def __call__(self, texts):
        return {"input_ids": [self.encode(text) for text in texts]}

    def decode(self, ids, skip_special_tokens):
        return "".join(map(str, ids))

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"ab{messages[0]['content']}c"

    def save_pretrained(self, folder):
        pass


@pytest.fixture(autouse=True)
def no_default_device(monkeypatch):
    """Under a default device of cuda transformers loads no model unless accelerate is there."""
    def refuse(device):
        raise AssertionError(device)
    monkeypatch.setattr(torch, "set_default_device", refuse)


def script(monkeypatch, *argv) -> int:
    """What `python models/train.py ARGV` ends with."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, argv)])
    try:
        runpy.run_path(str(ROOT / "models/train.py"), run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


def test_models_are_made_and_loaded_on_the_device(embedded):
    assert recipe.make_model("draft", embedded[2], "meta").device.type == "meta"
    assert recipe.load(ROOT / "models/draft", "meta").device.type == "meta"


# ------------------------------------------------------------------------------------- batches

def test_rows_of_a_batch(embedded):
    """A prompt's tokens count a tenth where examples are learnt, and not at all where answers are;
    what fills a row up counts nothing."""
    tokenizer = embedded[2]
    rows = recipe.encode_examples(tokenizer, ["2 +", "a"], [" 2", "bc d"])
    for (ids, weights), text, n in zip(rows, ("<s>2 + 2</s>", "<s>abc d</s>"), (2, None)):
        answer = weights.count(1.0)
        assert tokenizer.decode(ids) == text and n in (answer, None)
        assert weights == [0.1] * (len(ids) - answer) + [1.0] * answer
    rows = recipe.weigh_answers([[3], [4, 5]], [[6, 7, 1], [8]])
    assert rows == [([3, 6, 7, 1], [0, 1, 1, 1]), ([4, 5, 8], [0, 0, 1])]
    ids, weights = recipe.pad_rows(rows)
    assert ids[:, :3].tolist() == [[3, 6, 7], [4, 5, 8]] and ids.shape == (2, 4)
    assert weights.tolist() == [[0, 1, 1, 1], [0, 0, 1, 0]]


@pytest.mark.parametrize("split, mix", [("train", recipe.MIX), ("test", SQL)])
def test_a_batch_of_tasks(split, mix, embedded, monkeypatch):
    """Examples of the split and the mix that are next to each other in length, of not many fewer
    tokens than were asked for; one where that is less than an example, all where it is more."""
    tokenizer, begins = embedded[2], []
    monkeypatch.setattr(recipe, "POOL", 100)
    for seed, size in itertools.product(range(4), (1, 900, 3000, 10 ** 6)):
        some = recipe.mix_examples(split, random.Random(seed).getrandbits(60), mix)
        rows = recipe.encode_examples(tokenizer, *zip(*((e.prompt, e.answer)
                                               for e in itertools.islice(some, recipe.POOL))))
        lengths = sorted(len(x) for x, _ in rows)
        ids, weights = recipe.sample_batch(tokenizer, split, size, mix, random.Random(seed))
        found = [(x[w > 0].tolist(), w[w > 0].tolist()) for x, w in zip(ids, weights)]
        for x, w in found:
            assert (x, pytest.approx(w)) in rows
        own = [len(x) for x, _ in found]
        [begin, *_] = [i for i in range(recipe.POOL) if lengths[i:i + len(own)] == own]
        if size in (1, 10 ** 6):
            assert len(found) == (1 if size == 1 else recipe.POOL)
        else:
            assert 0.7 * size < ids.numel() <= size
            begins.append(begin)
    assert min(begins) < 30 < 60 < max(begins) and len({*begins}) > 4


def test_a_batch_of_samples(embedded, monkeypatch):
    """Training prompts next to each other in length, with answers that the seed alone decides."""
    tokenizer, asked = embedded[2], []

    def answer_prompts(source, tokenizer, prompts, temperature):
        asked.append((source, prompts, temperature))
        return torch.randint(5, 60, (len(prompts), 3)).tolist()
    monkeypatch.setattr(recipe, "answer_prompts", answer_prompts)
    batches, begins = [], []
    for seed in (0, 1, 2, 3, 0):
        some = recipe.mix_examples("train", random.Random(seed).getrandbits(60))
        known = sorted((e.prompt for e in itertools.islice(some, 40)), key=len)
        ids, weights = recipe.sample_answers("the source", tokenizer, 960, random.Random(seed))
        batches.append(ids.tolist())
        source, prompts, temperature = asked[-1]
        assert (source, temperature, len(prompts)) == ("the source", 1.0, 10)
        begins.append(known.index(prompts[0]))
        assert known[begins[-1]:][:10] == prompts
        for prompt, x, w in zip(tokenizer(prompts)["input_ids"], ids, weights):
            assert x[:len(prompt)].tolist() == prompt
            assert w.tolist() == [0] * len(prompt) + [1] * 3 + [0] * (len(x) - len(prompt) - 3)
    assert batches[0] == batches[4] != batches[1] and len({*begins}) > 2


def test_answers_stand_in_the_order_of_their_prompts():
    """The shorter prompts are asked first."""
    model, prompts = tiny("llama"), ["one of four", "two", "three of them", "4"]
    tokenizer, lm = Letters(), CachedLM(model)
    texts = [tokens_of(autoregressive(lm, tokenizer.encode(p)), 20) for p in prompts]
    tokenizer.eos_token_id = texts[0][6]
    expected = [text[:text.index(texts[0][6]) + 1] if texts[0][6] in text else text
                for text in texts]
    assert recipe.answer_prompts(model, tokenizer, prompts, 0.0, limit=20) == expected
    assert 1 < len({*map(len, expected)})
    torch.manual_seed(0)
    sampled = recipe.answer_prompts(model, tokenizer, ["the same"] * 30, 3.0, limit=5)
    assert len({*map(tuple, sampled)}) > 20


def test_answers_leave_the_generation_settings_alone():
    """A model that is trained on its own samples is saved with the settings that it had."""
    model = tiny("llama")
    before = model.generation_config.to_dict()
    recipe.answer_prompts(model, Letters(), ["one"], 1.0, limit=3)
    assert model.generation_config.to_dict() == before


# -------------------------------------------------------------------------------------- losses

def test_the_next_tokens_loss_by_hand():
    model = tiny("llama")
    logp = model(IDS).logits.log_softmax(-1)
    terms = [WEIGHTS[b, t] * logp[b, t - 1, IDS[b, t]] for b in range(2) for t in (1, 2, 3)]
    torch.testing.assert_close(recipe.next_token_loss(model, IDS, WEIGHTS), -sum(terms) / 2.5)


def test_divergences_by_hand():
    p, q = torch.tensor([[[0.5, 0.3, 0.2]]]), torch.tensor([[[0.1, 0.6, 0.3]]])
    m = (p + q) / 2

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)
    expected = {"forward-kl": kl(p, q), "reverse-kl": kl(q, p), "jsd": (kl(p, m) + kl(q, m)) / 2,
                "tvd": torch.tensor([[0.4]])}
    assert {*expected} == {*recipe.DIVERGENCES}
    for kind, value in expected.items():
        torch.testing.assert_close(recipe.divergence(kind, p.log() + 3, q.log() - 2), value)
    with pytest.raises(ValueError, match="got 'hellinger'"):
        recipe.divergence("hellinger", p, q)


def test_logits_are_those_before_tokens_that_have_a_weight():
    model = tiny("llama")
    weights = torch.tensor([[0.0, 0, 1, 1], [1, 1, 0, 0]])
    torch.testing.assert_close(recipe.score_tokens(model, IDS, weights),
                               model(IDS).logits[[0, 0, 1], [1, 2, 0]])


# ------------------------------------------------------------------------------------ training

def drawn_loss(model, rng: random.Random) -> torch.Tensor:
    ids = torch.tensor([[rng.randrange(61) for _ in range(6)]])
    return recipe.next_token_loss(model, ids, torch.ones(1, 6))


def test_three_steps_by_hand(tmp_path, capsys):
    """Muon moves the matrices of the layers, AdamW embeddings and norms, nothing what is frozen;
    the gradient is cut to 1; rates are 1, 2/3 and 1/3; what is held out is four batches."""
    model, plain = tiny("llama"), tiny("llama")
    for each in model, plain:
        each.lm_head.requires_grad_(False)
    recipe.fit("x", model, lambda rng: drawn_loss(model, rng),
               lambda rng: 2 * drawn_loss(model, rng), (), lr=1e-2, steps=3, work=tmp_path)
    said, held_out = capsys.readouterr().out, 0.0
    matrices = [p for p in plain.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in plain.model.parameters() if p.ndim == 1]
    assert len(matrices) == 14 and len(norms) == 5
    by_hand = [torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
               torch.optim.AdamW([plain.model.embed_tokens.weight, *norms], betas=(0.9, 0.95),
                                 weight_decay=0.0)]
    for step, rate in enumerate((1, 2 / 3, 1 / 3)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if step == 0:
                held_out = sum(2 * drawn_loss(plain, random.Random(i)).item() for i in range(4)) / 4
            drawn_loss(plain, random.Random(f"x 0 {step}")).backward()
        trained = [p for p in plain.parameters() if p.requires_grad]
        assert torch.nn.utils.clip_grad_norm_(trained, 1.0) > 1
        for optimizer in by_hand:
            optimizer.param_groups[0]["lr"] = 1e-2 * rate
            optimizer.step()
            optimizer.zero_grad()
    assert f"step 0: held-out loss {held_out:.4f}\n" in said and said.count("held-out") == 4
    start = tiny("llama")
    for name, p in model.state_dict().items():
        torch.testing.assert_close(p, plain.state_dict()[name], atol=1e-6, rtol=1e-5)
        assert torch.equal(p, start.state_dict()[name]) == (name == "lm_head.weight"), name


def test_training_on_tasks(tmp_path, monkeypatch):
    """Training batches for the steps, as many as the tokens are worth, and test batches for the
    reports; another mix, size, rate or number of tokens starts over."""
    seen = []

    def sample_batch(tokenizer, *what):
        seen.append((tokenizer, *what[:3]))
        return torch.tensor([[what[3].randrange(61) for _ in range(4)]]), torch.ones(1, 4)
    monkeypatch.setattr(recipe, "sample_batch", sample_batch)

    def trained(folder, mix=recipe.MIX, size=50, lr=1e-2, tokens=199, fresh=True):
        folder.mkdir(exist_ok=True)
        seen.clear()
        model = tiny("llama")
        recipe.train_on_tasks("x", model, "words", mix, size, lr=lr, tokens=tokens, work=folder)
        steps = max(1, tokens // size)
        expected = {"train": steps, "test": 4 * (1 + steps)} if fresh else {}
        assert {x[1]: seen.count(x) for x in seen} == expected
        assert {*map(repr, seen)} == {repr(("words", x, size, mix)) for x in expected}
        return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    whole = trained(tmp_path / "x")
    assert trained(tmp_path / "x", fresh=False) == whole
    for change in (dict(mix=recipe.LATER), dict(size=60), dict(lr=0.02), dict(tokens=250)):
        trained(tmp_path / "x", **change)
    trained(tmp_path / "x", tokens=7)
    still = tiny("llama")
    assert trained(tmp_path / "y", lr=0.0) == torch.nn.utils.parameters_to_vector(
        still.parameters()).tolist()


def test_distillation(tmp_path, monkeypatch):
    """The mean divergence of what the source writes; another kind, source, target, size, number of
    tokens or draft starts over."""
    seen, of = [], []

    def sample_answers(source, tokenizer, size, rng):
        seen.append((source, tokenizer, size))
        return IDS, WEIGHTS
    monkeypatch.setattr(recipe, "sample_answers", sample_answers)
    monkeypatch.setattr(recipe, "divergence", lambda kind, *logits: of.append(kind)
                        or KINDS[kind](*logits))

    def distilled(kind="tvd", own=False, target=0, size=50, tokens=100, draft=1, fresh=True):
        target, draft = tiny("llama", seed=target), tiny("llama", seed=draft)
        source = draft if own else target
        seen.clear(), of.clear()
        recipe.distill("x", target, draft, kind, source, "words", tokens=tokens, size=size,
                       work=tmp_path)
        passes = 4 * 3 + 2 if fresh else 0  # held out three times, and trained on twice
        assert seen == [(source, "words", size)] * passes and of == [kind] * passes
        assert all(p.grad is None for p in target.parameters())
        return torch.nn.utils.parameters_to_vector(draft.parameters()).tolist()
    whole = distilled()
    assert distilled(fresh=False) == whole
    for change in (dict(kind="jsd"), dict(own=True), dict(target=2), dict(size=34, tokens=101),
                   dict(draft=3)):
        assert (distilled(**change) == whole) == (change.keys() == {"own"} or "size" in change)
    assert len([*tmp_path.glob("*.pt")]) == 6


KINDS = {kind: functools.partial(recipe.divergence, kind) for kind in recipe.DIVERGENCES}


def test_the_loss_of_distillation_by_hand(monkeypatch):
    """Over the tokens that have a weight, each as much as any other; at a rate of 0.002."""
    target, draft, given = tiny("llama"), tiny("llama", seed=1), []
    monkeypatch.setattr(recipe, "fit", lambda *args, **options: given.append((args, options)))
    monkeypatch.setattr(recipe, "sample_answers", lambda *_: (IDS, WEIGHTS))
    recipe.distill("x", target, draft, "forward-kl", target, None, tokens=9000, work=None)
    (name, model, loss_of, held_out, _), options = given[0]
    assert (name, model, options) == ("x", draft, dict(lr=2e-3, steps=2, work=None))
    log_p, log_q = (x(IDS).logits.log_softmax(-1)[[0, 0, 1], [1, 2, 0]] for x in (target, draft))
    expected = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    for loss in loss_of, held_out:
        torch.testing.assert_close(loss(random.Random(0)), expected)


# ------------------------------------------------------------------------------ for any target

def test_a_draft_of_layers_learns_in_its_layers_alone():
    """And in float32; its embeddings and LM head stay the target's."""
    model = tiny("llama").to(torch.bfloat16)
    draft = recipe.make_draft_of_layers(model, [1])
    trained = {name for name, p in draft.named_parameters() if p.requires_grad}
    assert {*draft.state_dict()} - trained == {"model.embed_tokens.weight", "lm_head.weight"}
    assert draft.dtype == torch.float32 and not draft.training
    for name in "down_proj.weight", "up_proj.weight":
        layers = (x.model.layers[-1].mlp.get_parameter(name) for x in (model.float(), draft))
        assert torch.equal(*layers)


def test_agreement_by_hand():
    """Over all tokens of all answers: of one of 1 token and one of 3."""
    target, draft = tiny("llama"), near(tiny("llama"), 0.05)
    rows = recipe.weigh_answers([[5, 9, 30], [8]], [[2], [7, 1, 12]])
    right, accepted = [], []
    for ids, weights in rows:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            p, q = (model(torch.tensor([ids])).logits[0] for model in (target, draft))
        for at in range(len(ids) - 1):
            if weights[at + 1]:
                right.append(bool(p[at].argmax() == q[at].argmax()))
                accepted.append(torch.minimum(p[at].float().softmax(-1),
                                              q[at].float().softmax(-1)).sum().item())
    assert len(right) == 4 and 0 < sum(right) < 4
    expected = (sum(right) / 4, pytest.approx(sum(accepted) / 4, abs=1e-4))
    assert recipe.measure_agreement(target, draft, rows, lambda x: x) == expected


def test_distil_makes_a_draft_that_guesses_better_than_the_bare_layers(tmp_path, embedded, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    argv = ["--target", str(ROOT / "models/target"), "--layers", "0", "11", "--prompts", str(file),
            "--max-new-tokens", "12", "--work", str(tmp_path / "work"), "--device", "cpu"]
    shares = []
    for steps in "1", "45":
        recipe.distil_layers([*argv, "--steps", steps, "--out", str(tmp_path / steps)])
        shares.append(float(capsys.readouterr().out.split("1 - TVD ")[1]))
    assert shares[1] > shares[0] + 0.1
    draft, _ = load(str(tmp_path / "45"), "cpu", "float32")
    assert draft.config.num_hidden_layers == 2
    assert torch.equal(draft.get_input_embeddings().weight,
                       embedded[0].get_input_embeddings().weight)
    said = "--prompts must hold 2 prompts or more of at most 2 tokens, got 0"
    with pytest.raises(InputError, match=said):
        recipe.distil_layers([*argv, "--max-new-tokens", "2046", "--out", str(tmp_path / "none")])
    said = "--layers must be different numbers from 0 to 11 in ascending order, got "
    for wrong in (["12"], ["-1"], ["3", "1"], ["2", "2"]):
        with pytest.raises(InputError, match=said + " ".join(wrong)):
            recipe.distil_layers([*argv, "--out", str(tmp_path / "none"), "--layers", *wrong])


@pytest.fixture
def small(monkeypatch):
    """A tiny target, with `small.noise` in its last layer; it answers with the first token of a
    prompt."""
    small = SimpleNamespace(noise=0.0)

    def loaded(*_):
        model = tiny("llama")
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.add_(small.noise)
        return model, Letters()
    monkeypatch.setattr(recipe, "load_checked", loaded)
    monkeypatch.setattr("cli.loading.load_checked", loaded)  # of a new run of the script
    def collect(model, tokenizer, prompts, limit, work, _):
        work.mkdir(exist_ok=True)
        return [p[:1] * min(limit, 4) for p in prompts]
    monkeypatch.setattr(training, "collect_answers", collect)
    return small


def distil_argv(folder, work, texts=PROMPTS, **options) -> list[str]:
    """Of the first layer; the draft is made in folder/draft."""
    (folder / "prompts").write_text("\n".join(texts) + "\n")
    options = dict(steps=3, batch=2, lr=3e-3, max_new_tokens=8) | options
    return ["--target", "x", "--layers", "0", "--prompts", str(folder / "prompts"),
            "--out", str(folder / "draft"), "--work", str(work),
            *(str(x) for name, value in options.items()
              for x in (f"--{name.replace('_', '-')}", value))]


def distilled(folder, work, **options) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    recipe.distil_layers(distil_argv(folder, work, **options))
    return load_file(folder / "draft/model.safetensors")


def same(a: dict, b: dict) -> bool:
    return all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.mark.parametrize("change", [
    dict(noise=0.1), dict(texts=PROMPTS[::-1]), dict(steps=2), dict(batch=1), dict(lr=1e-2),
    dict(max_new_tokens=2)], ids=lambda change: next(iter(change)))
def test_another_distillation_in_the_same_folder_starts_over(change, small, tmp_path, monkeypatch):
    """And the same one is only loaded. It is of a layer that the change of the target spares."""
    work, options = tmp_path / "work", dict(change)
    first = distilled(tmp_path / "first", work)
    small.noise = options.pop("noise", 0.0)
    alone = distilled(tmp_path / "alone", tmp_path / "other", **options)
    assert same(distilled(tmp_path / "again", work, **options), alone) and not same(alone, first)
    monkeypatch.setattr(recipe.Training, "update", None)
    assert same(distilled(tmp_path / "loaded", work, **options), alone)


def test_a_stopped_distillation_goes_on(small, tmp_path, monkeypatch, capfd):
    """On the command line: stopped in the third of five updates, it makes the other three."""
    whole, steps = distilled(tmp_path, tmp_path / "whole", steps=5), []
    argv = ["distil", *distil_argv(tmp_path, tmp_path / "work", steps=5)]
    step = torch.optim.AdamW.step
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", interrupting(step, 3))
        assert script(patch, *argv) == 130
    assert capfd.readouterr().err.endswith("\ninterrupted\n")
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", lambda *args: steps.append(args) or step(*args))
        assert script(patch, *argv) == 0
    assert len(steps) == 3 and "on 1 held-out answers: " in capfd.readouterr().out
    assert same(load_file(tmp_path / "draft/model.safetensors"), whole)


def test_prompts_in_the_chat_template(small, tmp_path, monkeypatch):
    asked = []

    def encode(models, tokenizer, texts, chat):
        asked.append((texts, chat))
        return [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr(recipe, "encode_prompts", encode)
    argv = distil_argv(tmp_path, tmp_path / "work", steps=1)
    for more in [], ["--chat"]:
        recipe.distil_layers([*argv, *more])
    assert asked == [(PROMPTS, chat) for chat in (False, True)]


def test_a_tenth_is_held_out(small, tmp_path, monkeypatch, capsys):
    """It is never trained on, and the last line is of it alone."""
    batches, rows, pad = [], [], recipe.pad_rows
    monkeypatch.setattr(recipe, "pad_rows", lambda some: batches.append(some) or pad(some))
    monkeypatch.setattr(recipe, "measure_agreement",
                        lambda target, draft, some, _: rows.extend(some) or (0.25, 0.5))
    distilled(tmp_path, tmp_path / "work", steps=9)
    assert len(rows) == 1 and [len(some) for some in batches].count(2) == 9
    assert all((rows[0] in some) == (len(some) == 1) for some in batches)
    assert {len(some) for some in batches} == {1, 2}
    assert capsys.readouterr().out.endswith(
        "on 1 held-out answers: 0.250 of the tokens guessed, 1 - TVD 0.500\n")


@pytest.mark.parametrize("command, option, value", [
    *(("distil", name, "0") for name in ("steps", "batch", "max-new-tokens", "lr")),
    *(("prompts", name, "0") for name in ("count", "batch", "max-new-tokens", "temperature")),
    ("distil", "lr", "nan"), ("prompts", "temperature", "nan")])
def test_bad_options_are_refused(command, option, value, small, tmp_path, monkeypatch, capfd):
    argv = distil_argv(tmp_path, tmp_path) if command == "distil" else [
        "--target", "x", "--out", tmp_path / "out"]
    assert script(monkeypatch, command, *argv, f"--{option}", value) == 2
    least = "above 0" if option in ("lr", "temperature") else "1 or more"
    number = float(value) if option in ("lr", "temperature") else value
    said_in_one_line(f"train.py: --{option} must be {least}, got {number}", capfd)


def test_a_model_that_ends_no_prompt_is_refused(small, tmp_path, monkeypatch):
    """Before it runs for ever."""
    argv = ["--target", "x", "--out", str(tmp_path / "out"), "--batch", "3", "--count", "2",
            "--temperature", "0.5", "--max-new-tokens", "7"]
    monkeypatch.setattr(Letters, "chat_template", "{{ messages }}")
    for row, said in (([5, 6], "no new one of 3, 0 before"), ([1], "no new one of 3, 0 before"),
                      ([7, 1], "no new one of 3, 1 before")):
        def generate_answers(model, *asked, size):
            assert asked == ({1}, [Letters().encode("ab")] * 3, 7, 0.5)
            return iter([[row] * size])
        monkeypatch.setattr(recipe, "generate_answers", generate_answers)
        with pytest.raises(InputError, match=said):
            recipe.make_prompts(argv)
    assert read_prompts(tmp_path / "out") == ["7"]


def test_a_model_writes_prompts_in_the_users_place(tmp_path, embedded, monkeypatch):
    """It goes on from where the template has the user speak, here the text's beginning."""
    target, _, tokenizer = embedded
    asked, seen = ["--target", str(tmp_path / "chat"), "--device", "cpu"], []
    with pytest.raises(InputError, match="expected a model with a chat template"):
        recipe.make_prompts(["--target", str(ROOT / "models/target"), "--out", str(tmp_path / "x")])
    target.save_pretrained(tmp_path / "chat")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "<s>def {% for m in messages %}{{ m.content }}</s>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    generate = type(target).generate

    def spy(model, ids, **options):
        seen.append((ids, generate(model, ids, **options)))
        return seen[-1][1]
    monkeypatch.setattr(type(target), "generate", spy)
    for name, count, seed in (("one", 5, 0), ("again", 2, 0), ("other", 2, 1)):
        recipe.make_prompts([*asked, "--out", str(tmp_path / name), "--max-new-tokens", "64",
                            "--batch", "4", "--count", str(count), "--seed", str(seed)])
    one, again, other = (read_prompts(tmp_path / name) for name in ("one", "again", "other"))
    assert one[:2] == again != other and len(other) == 2 and len(set(one)) == len(one) == 5
    before, eos = tokenizer.encode("def "), tokenizer.eos_token_id
    assert all(row == before for ids, _ in seen for row in ids.tolist())
    written = [tokenizer.decode(row[len(before):], skip_special_tokens=True).strip()
               for _, rows in seen for row in rows.tolist() if eos in row]
    assert {*one, *other} <= {*written} and not any("</s>" in text for text in one)


# --------------------------------------------------------------------------- the embedded models

@pytest.fixture
def stages(monkeypatch, tmp_path):
    """run(argv) gives what the stages ask for."""
    done = []

    def run(*argv) -> list:
        done.clear()
        monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cpu", *argv])
        recipe.main()
        return done[:]
    fakes = dict(
        HERE=tmp_path, make_tokenizer=lambda: "words",
        make_model=lambda name, _, device: [name] if device == "cpu" else None,
        train_on_tasks=lambda name, model, tokenizer, mix, size, *, lr, tokens, work: done.append(
            (name, *model, mix, size, lr, tokens, work.name)),
        distill=lambda name, target, draft, kind, source, tokenizer, *, tokens, work: done.append(
            (name, *target, *draft, kind, "own" if source is draft else source[0], tokens))
        or draft.append("distilled"),
        save=lambda model, tokenizer, folder: done.append(("save", *model, folder.name)),
        load=lambda folder, device: [f"saved {folder.name}"] if device == "cpu" else None,
        measure_acceptance=lambda target, draft, tokenizer, prompts:
            done.append(len(prompts)) or 0.5,
        evaluate=lambda model, tokenizer: [*model])
    for name, fake in fakes.items():
        monkeypatch.setattr(recipe, name, fake)
    return run


def test_the_stages(stages, tmp_path, capsys):
    """What each one trains, on how much, and what it saves."""
    work = ("--work", str(tmp_path / "kept"))
    target = [("target", "target", recipe.MIX, 3072, 1.5e-3, 900, "kept"),
              ("target-later", "target", recipe.LATER, 3072, 5e-4, 450, "kept"),
              ("save", "target", "target")]
    draft = [("draft", "draft", recipe.MIX, 4096, 4e-3, 70, "kept")]
    assert stages("--stage", "target", "--target-tokens", "900", *work) == target
    assert stages("--stage", "plain-draft", "--draft-tokens", "70", *work) == draft
    for argv, kind, source in (([], "forward-kl", "saved target"),
                               (["--source", "draft", "--divergence", "tvd"], "tvd", "own")):
        assert stages("--stage", "draft", "--draft-tokens", "70", "--distill-tokens", "80", *argv,
                      *work) == [*draft, ("distilled", "saved target", "draft", kind, source, 80),
                                 ("save", "draft", "distilled", "draft")]
    capsys.readouterr()
    assert stages("--stage", "evaluate", *work) == [150]
    assert (tmp_path / "evaluation.json").read_text() == capsys.readouterr().out == json.dumps(
        {"target": ["saved target"], "draft": ["saved draft"], "acceptance": 0.5}, indent=1) + "\n"
    compared = stages("--stage", "compare", "--draft-tokens", "70", "--compare-tokens", "9", *work)
    assert compared[:2] == [*draft, 150] and compared[3::2] == [150] * 8
    assert compared[2::2] == [
        (f"compare-{kind}-{source}", "saved target", "draft", kind, name, 9)
        for kind in recipe.DIVERGENCES for source, name in (("draft", "own"),
                                                            ("target", "saved target"))]
    names = [x[0] for x in stages(*work) if isinstance(x, tuple)]
    assert names[:4] == ["target", "target-later", "save", "draft"]
    assert names[-2:] == ["distilled", "save"] and len(names) == 4 + 9 + 3


def test_the_second_phase_has_other_examples(embedded, monkeypatch, tmp_path):
    """No example is seen twice."""
    fit, mix_examples, pools = recipe.fit, recipe.mix_examples, {}

    def fitted(name, *args, **options):
        def kept(split, *how):
            for example in mix_examples(split, *how):
                if split == "train":
                    pools.setdefault(name, []).append((example.task, example.prompt))
                yield example
        monkeypatch.setattr(recipe, "mix_examples", kept)
        fit(name, *args, **options)
    monkeypatch.setattr(recipe, "fit", fitted)
    monkeypatch.setattr(recipe, "POOL", 80)
    monkeypatch.setattr(recipe, "next_token_loss", lambda model, *_: model.lm_head.weight.sum())
    monkeypatch.setattr(recipe, "make_model", lambda *_: tiny("llama"))
    monkeypatch.setattr(recipe, "save", lambda *_: None)
    args = SimpleNamespace(target_tokens=6 * 3072, work=tmp_path, device="cpu")
    recipe.make_target(embedded[2], args)
    one, two = pools["target"], pools["target-later"]
    assert (len(one), len(two)) == (6 * 80, 3 * 80)
    assert len({*one}) > 0.95 * len(one) and len({*two}) > 0.95 * len(two)
    assert len({*one} & {*two}) < 0.05 * len(two)
