"""What models/train.py makes: the embedded models from generated tasks, and for any target a draft
of some of its layers and prompts of its own."""
import copy
import itertools
import random
from types import SimpleNamespace

import pytest
import torch

import train as recipe
from cli.files import read_prompts
from common import InputError
from families import near, tiny
from helpers import ROOT
from tasks import take
from training import loop as training
from trainings import run

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

    def apply_chat_template(self, messages, **_):
        return f"HERE {messages[0]['content']}c"


def test_models_are_made_and_loaded_on_the_device(embedded):
    assert recipe.make_model("draft", embedded[2], "meta").device.type == "meta"
    assert recipe.load(ROOT / "models/draft", "meta").device.type == "meta"


# ------------------------------------------------------------------------------------- batches

def test_rows_of_a_batch(embedded):
    """A prompt's tokens count a tenth in examples and nothing in answers."""
    tokenizer = embedded[2]
    [(ids, weights)] = recipe.encode_examples(tokenizer, ["2 +"], [" 2"])
    assert tokenizer.decode(ids) == "<s>2 + 2</s>"
    assert weights == [0.1] * (len(ids) - 2) + [1.0] * 2
    rows = recipe.weigh_answers([[3], [4, 5]], [[6, 7, 1], [8]])
    assert rows == [([3, 6, 7, 1], [0, 1, 1, 1]), ([4, 5, 8], [0, 0, 1])]
    ids, weights = recipe.pad_rows(rows)
    assert ids[:, :3].tolist() == [[3, 6, 7], [4, 5, 8]] and ids.shape == (2, 4)
    assert weights.tolist() == [[0, 1, 1, 1], [0, 0, 1, 0]]


@pytest.mark.parametrize("split, mix", [("train", recipe.MIX), ("test", SQL)])
def test_a_batch_of_tasks(split, mix, embedded, monkeypatch):
    """It has examples of the split and the mix that are next to each other in length.

    They have nearly as many tokens as were asked for: one example at least, and at most all."""
    tokenizer, begins = embedded[2], set()
    monkeypatch.setattr(recipe, "POOL", 60)
    for seed, size in itertools.product(range(4), (1, 900, 2000, 10 ** 6)):
        pool = itertools.islice(recipe.mix_examples(
            split, random.Random(seed).getrandbits(60), mix), recipe.POOL)
        rows = recipe.encode_examples(tokenizer, *zip(*((e.prompt, e.answer) for e in pool)))
        lengths = sorted(len(x) for x, _ in rows)
        ids, weights = recipe.sample_batch(tokenizer, split, size, mix, random.Random(seed))
        found = [(x[w > 0].tolist(), w[w > 0].tolist()) for x, w in zip(ids, weights)]
        assert all((x, pytest.approx(w)) in rows for x, w in found)
        own = [len(x) for x, _ in found]
        assert own in [lengths[i:i + len(own)] for i in range(recipe.POOL)]
        if size in (1, 10 ** 6):
            assert len(found) == (1 if size == 1 else recipe.POOL)
        else:
            assert 0.7 * size < ids.numel() <= size
            begins.add(lengths.index(own[0]))
    assert len(begins) > 3


def test_a_batch_of_samples(embedded, monkeypatch):
    """Training prompts that are alike in length get answers that the seed alone decides."""
    tokenizer, batches = embedded[2], []

    def answer_prompts(source, tokenizer, prompts, temperature):
        assert (source, temperature, len(prompts)) == ("the source", 1.0, 10)
        asked.extend(prompts)
        return torch.randint(5, 60, (len(prompts), 3)).tolist()
    monkeypatch.setattr(recipe, "answer_prompts", answer_prompts)
    for seed in (0, 1, 2, 3, 0):
        pool = recipe.mix_examples("train", random.Random(seed).getrandbits(60))
        known = sorted((e.prompt for e in itertools.islice(pool, 40)), key=len)
        asked = []
        ids, weights = recipe.sample_answers("the source", tokenizer, 960, random.Random(seed))
        batches.append((known.index(asked[0]), ids.tolist()))
        assert known[batches[-1][0]:][:10] == asked
        for prompt, x, w in zip(tokenizer(asked)["input_ids"], ids, weights):
            assert x[:len(prompt)].tolist() == prompt
            assert w.tolist() == [0] * len(prompt) + [1] * 3 + [0] * (len(x) - len(prompt) - 3)
    assert batches[0] == batches[4] != batches[1] and len({begin for begin, _ in batches}) > 2


def test_sampled_answers_differ():
    torch.manual_seed(0)
    sampled = recipe.answer_prompts(tiny("llama"), Letters(), ["the same"] * 30, 3.0, limit=5)
    assert len({*map(tuple, sampled)}) > 20


# -------------------------------------------------------------------------------------- losses

def test_the_next_tokens_loss_by_hand():
    model = tiny("llama")
    logp = model(IDS).logits.log_softmax(-1)
    terms = [WEIGHTS[b, t] * logp[b, t - 1, IDS[b, t]] for b in range(2) for t in (1, 2, 3)]
    torch.testing.assert_close(recipe.next_token_loss(model, IDS, WEIGHTS), -sum(terms) / 2.5)


def test_the_measured_loss_is_of_the_tokens_of_answers(embedded):
    _, draft, tokenizer = embedded
    [example] = take("code", "test", 1)
    [(ids, weights)] = recipe.encode_examples(tokenizer, [example.prompt], [example.answer])
    n = weights.count(1.0)
    logp = draft(torch.tensor([ids])).logits[0, -n - 1:-1].log_softmax(-1)
    expected = -logp.gather(-1, torch.tensor(ids[-n:])[:, None]).mean().item()
    found = recipe.evaluate(draft, tokenizer, n=1)["code"]["loss"]
    assert found == pytest.approx(expected, abs=1e-3)


def test_states_are_those_before_tokens_that_have_a_weight():
    model = tiny("llama")
    weights = torch.tensor([[0.0, 0, 1, 1], [1, 1, 0, 0]])
    torch.testing.assert_close(model.lm_head(recipe.read_tokens(model, IDS, weights)),
                               model(IDS).logits[[0, 0, 1], [1, 2, 0]])


# ------------------------------------------------------------------------------------ training

def sampled_loss(model, rng: random.Random) -> torch.Tensor:
    ids = torch.tensor([[rng.randrange(61) for _ in range(6)]])
    return recipe.next_token_loss(model, ids, torch.ones(1, 6))


def test_three_steps_by_hand(tmp_path, capsys, monkeypatch):
    """Muon moves the matrices of the layers, AdamW the embeddings and norms.

    Frozen weights stay, the gradient is cut to 1, and the rates are 1, 2/3 and 1/3. The held-out
    loss is the mean over four batches."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    model, plain = tiny("llama"), tiny("llama")
    for each in model, plain:
        each.lm_head.requires_grad_(False)
    recipe.fit("x", model, lambda rng: sampled_loss(model, rng),
               lambda rng: 2 * sampled_loss(model, rng), (), lr=1e-2, steps=3, work=tmp_path)
    said, held_out = capsys.readouterr().out, 0.0
    matrices = [p for p in plain.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in plain.model.parameters() if p.ndim == 1]
    assert len(matrices) == 14 and len(norms) == 5
    by_hand = [torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
               torch.optim.AdamW([plain.model.embed_tokens.weight, *norms], betas=(0.9, 0.95),
                                 weight_decay=0.0)]
    for step, rate in enumerate((1, 2 / 3, 1 / 3)):
        with training.low_precision(plain.device, plain):
            if step == 0:
                held_out = sum(sampled_loss(plain, random.Random(i)).item() for i in range(4)) / 2
            sampled_loss(plain, random.Random(f"x 0 {step}")).backward()
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


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_muon_multiplies_in_float32_where_bfloat16_is_slow(monkeypatch, capability):
    """The matrix moves along its gradient, whose singular values Newton-Schulz brings near 1.

    By hand in float64 the same: to float32's precision on AVX2, to bfloat16's on AVX-512."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.zeros(4, 6))
    matrix.grad = torch.randn(4, 6)
    near = matrix.grad.double() / matrix.grad.double().norm()
    for _ in range(5):
        gram = near @ near.T
        near = 3.4445 * near + (-4.7750 * gram + 2.0315 * gram @ gram) @ near
    recipe.Muon([matrix], lr=1.0, weight_decay=0.0).step()
    error = (matrix.detach() + near).abs().max().item()
    assert error < 1e-5 if capability == "AVX2" else 1e-4 < error < 3e-2
    assert matrix.dtype == torch.float32


def test_training_on_tasks_reports_on_test_batches(tmp_path, monkeypatch):
    seen = []

    def sample_batch(*asked):
        seen.append(asked[:4])
        return torch.tensor([[5, 9, 30, 2]]), torch.ones(1, 4)
    monkeypatch.setattr(recipe, "sample_batch", sample_batch)
    recipe.train_on_tasks("x", tiny("llama"), "words", SQL, 50, lr=0.01, tokens=199, work=tmp_path)
    assert [x for x in seen if x[1] == "train"] == [("words", "train", 50, SQL)] * 3
    assert [x for x in seen if x[1] != "train"] == [("words", "test", 50, SQL)] * 4 * 4


def test_the_loss_of_distillation_by_hand(monkeypatch):
    """It is the mean of KL(target, draft) over the tokens with a weight of the target's answers."""
    target, draft, given, asked = tiny("llama"), tiny("llama", seed=1), [], []
    monkeypatch.setattr(recipe, "fit", lambda *args, **options: given.append((args, options)))
    monkeypatch.setattr(recipe, "sample_answers", lambda *args: asked.append(args[:3])
                        or (IDS, WEIGHTS))
    recipe.distil_on_tasks("x", target, draft, "words", tokens=9000, work=None)
    [((name, model, loss_of, held_out, _), options)] = given
    assert (name, model) == ("x", draft)
    assert options == dict(lr=2e-3, steps=2, work=None, models=(target, draft), tokens=4096)
    p, q = (x(IDS).logits.softmax(-1)[[0, 0, 1], [1, 2, 0]] for x in (target, draft))
    for loss in loss_of, held_out:
        torch.testing.assert_close(loss(random.Random(0)), (p * (p / q).log()).sum(-1).mean())
    assert asked == [(target, "words", 4096)] * 2
    assert all(x.grad is None for x in target.parameters())


# ------------------------------------------------------------------------------ for any target

def test_a_draft_of_layers_learns_in_its_layers_alone():
    """It is in float32, and its embeddings and LM head stay the target's."""
    model = tiny("llama").to(torch.bfloat16)
    draft = recipe.make_draft_of_layers(model, [1])
    trained = {name for name, p in draft.named_parameters() if p.requires_grad}
    assert {*draft.state_dict()} - trained == {"model.embed_tokens.weight", "lm_head.weight"}
    assert draft.dtype == torch.float32 and not draft.training
    for name in "down_proj.weight", "up_proj.weight":
        layers = (x.model.layers[-1].mlp.get_parameter(name) for x in (model.float(), draft))
        assert torch.equal(*layers)


def test_agreement_by_hand():
    """Each token of each answer counts alike, here of an answer of 1 token and one of 3."""
    target, draft = tiny("llama"), near(tiny("llama"), 0.05)
    rows = recipe.weigh_answers([[5, 9, 30], [8]], [[2], [7, 1, 12]])
    right, accepted = [], []
    for (ids, _), places in zip(rows, (slice(2, 3), slice(0, 3))):
        with torch.inference_mode(), training.low_precision(target.device, target):
            p, q = (x(torch.tensor([ids])).logits[0, places].float() for x in (target, draft))
        right += (p.argmax(-1) == q.argmax(-1)).tolist()
        accepted += torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).tolist()
    assert len(right) == 4 and 0 < sum(right) < 4
    expected = (sum(right) / 4, pytest.approx(sum(accepted) / 4, abs=1e-4))
    assert recipe.measure_agreement(target, draft, rows) == expected


def test_what_a_draft_is_worth_is_measured_on_held_out_answers(tmp_path, monkeypatch, capsys):
    rows = []
    monkeypatch.setattr(recipe, "measure_agreement",
                        lambda target, draft, some: rows.extend(some) or (0.25, 0.5))
    run("train distil --layers 0", tmp_path, tiny("llama"), steps=1)
    assert capsys.readouterr().out.endswith(
        "on 1 held-out answers: 0.250 of the tokens guessed, 1 - TVD 0.500\n") and len(rows) == 1


@pytest.mark.parametrize("layers", [[2], [-1], [1, 0], [1, 1]])
def test_layers_that_cannot_be_taken_are_refused(layers, tmp_path):
    with pytest.raises(InputError, match="--layers must be different numbers from 0 to 1 in asc"):
        recipe.distil(tiny("llama"), Letters(), [], layers=layers, out=tmp_path / "out")


@pytest.mark.parametrize("row, said", [([5, 6], 0), ([1], 0), ([7, 1], 1)])
def test_a_model_that_writes_no_new_prompt_is_refused(row, said, tmp_path, monkeypatch):
    """It would run for ever. What it wrote before is kept beside the file of an earlier run."""
    def answer_all(model, *asked):
        assert asked == ({1}, [Letters().encode("HERE ")] * 3, 7, 0.5)
        return [row] * 3
    monkeypatch.setattr(Letters, "chat_template", "{{ messages }}")
    monkeypatch.setattr(recipe, "answer_all", answer_all)
    (tmp_path / "out").write_text('{"prompt": "old"}\n')
    with pytest.raises(InputError, match=f"no new one of 3, {said} before"):
        recipe.prompts(tiny("llama"), Letters(), out=tmp_path / "out", batch=3, count=2,
                       temperature=0.5, max_new_tokens=7)
    kept = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert kept.pop("out") == '{"prompt": "old"}\n'
    assert kept == ({"out.part": '{"prompt": "7"}\n'} if said else {})


def test_a_model_writes_prompts_in_the_users_place(tmp_path, embedded, monkeypatch):
    """It continues its template from where the user speaks, here at the text's beginning."""
    target, _, tokenizer = embedded
    seen = []
    with pytest.raises(InputError, match="expected a model with a chat template"):
        recipe.prompts(target, tokenizer, out=tmp_path / "x")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "<s>def {% for m in messages %}{{ m.content }}</s>{% endfor %}"
    generate = type(target).generate

    def spy(model, ids, **options):
        seen.append((ids, generate(model, ids, **options)))
        return seen[-1][1]
    monkeypatch.setattr(type(target), "generate", spy)
    for name, count, seed in (("one", 3, 0), ("again", 2, 0), ("other", 2, 1)):
        recipe.prompts(target, tokenizer, out=tmp_path / name, max_new_tokens=64, batch=4,
                       count=count, seed=seed)
    one, again, other = (read_prompts(tmp_path / name) for name in ("one", "again", "other"))
    assert one[:2] == again != other and len(other) == 2 and len(set(one)) == len(one) == 3
    before, eos = tokenizer.encode("def "), tokenizer.eos_token_id
    assert all(row == before for ids, _ in seen for row in ids.tolist())
    written = [tokenizer.decode(row[len(before):], skip_special_tokens=True).strip()
               for _, rows in seen for row in rows.tolist() if eos in row]
    assert {*one, *other} <= {*written} and not any("</s>" in text for text in one)


# --------------------------------------------------------------------------- the embedded models

def test_the_target_learns_arithmetic_last(monkeypatch):
    """Its second phase has another mix, and goes on with the model of the first."""
    done = []
    monkeypatch.setattr(recipe, "make_model", lambda name, tokenizer, device: [name, device])
    monkeypatch.setattr(recipe, "train_on_tasks", lambda name, model, tokenizer, mix, size, **how:
                        done.append((name, model, mix, how["tokens"])))
    monkeypatch.setattr(recipe, "save", lambda model, tokenizer, folder: done.append(
        (model, folder.name)))
    recipe.make_target("words", SimpleNamespace(device="cpu", work=None))
    model = ["target", "cpu"]
    assert done == [("target", model, recipe.MIX, 6_000_000),
                    ("target-later", model, recipe.LATER, 3_000_000), (model, "target")]
