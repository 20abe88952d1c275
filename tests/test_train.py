"""What models/train.py makes: the embedded models from generated tasks, and for any target a draft
of some of its layers and prompts of its own."""
import copy
import functools
import itertools
import random

import pytest
import torch

import train as recipe
from cli.files import read_prompts
from common import InputError
from families import near, tiny
from training import loop as training

IDS = torch.tensor([[5, 9, 30, 2], [8, 7, 1, 1]])
WEIGHTS = torch.tensor([[0.0, 0, 1, 1], [1, 0.5, 0, 0]])
SQL = {"sql": 1.0, "math": 0.0, "code": 0.0}


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


def test_a_batch_of_tasks(embedded, monkeypatch):
    """It has examples of the split and the mix that are next to each other in length.

    They have nearly as many tokens as were asked for: one example at least, and at most all."""
    monkeypatch.setattr(recipe, "POOL", 60)
    for seed, size in itertools.product(range(3), (1, 900, 10 ** 6)):
        pool = itertools.islice(recipe.mix_examples(
            "test", random.Random(seed).getrandbits(60), SQL), recipe.POOL)
        rows = recipe.encode_examples(embedded[2], *zip(*((e.prompt, e.answer) for e in pool)))
        lengths = sorted(len(x) for x, _ in rows)
        ids, weights = recipe.sample_batch(embedded[2], "test", size, SQL, random.Random(seed))
        own = (weights > 0).sum(1).tolist()
        assert all((x[:n].tolist(), pytest.approx(w[:n].tolist())) in rows
                   for x, w, n in zip(ids, weights, own))
        assert own in [lengths[i:i + len(own)] for i in range(recipe.POOL)]
        assert len(own) == {1: 1, 10 ** 6: 60}.get(size, len(own))
        assert size != 900 or 0.7 * size < ids.numel() <= size


def test_a_batch_of_samples(embedded, monkeypatch):
    """Training prompts that are alike in length get answers that the seed decides."""
    asked = []

    def answer_all(source, eos, prompts, limit, temperature):
        assert (source, temperature, len(prompts)) == ("the source", 1.0, 10)
        asked.append([embedded[2].decode(x, skip_special_tokens=True) for x in prompts])
        return torch.randint(5, 60, (len(prompts), 3)).tolist()
    monkeypatch.setattr(recipe, "answer_all", answer_all)
    batches = [recipe.sample_answers("the source", embedded[2], 960, random.Random(seed))
               for seed in (0, 0, 1)]
    assert [x.tolist() for x in batches[0]] == [x.tolist() for x in batches[1]]
    assert asked[0] == asked[1] != asked[2]
    pool = recipe.mix_examples("train", random.Random(0).getrandbits(60))
    known = sorted((e.prompt for e in itertools.islice(pool, 40)), key=len)
    assert asked[0] == known[known.index(asked[0][0]):][:10]
    assert (batches[0][1].sum(1) == 3).all()


# -------------------------------------------------------------------------------------- losses

def test_the_next_tokens_loss_by_hand():
    model = tiny("llama")
    logp = model(IDS).logits.log_softmax(-1)
    terms = [WEIGHTS[b, t] * logp[b, t - 1, IDS[b, t]] for b in range(2) for t in (1, 2, 3)]
    torch.testing.assert_close(recipe.next_token_loss(model, IDS, WEIGHTS), -sum(terms) / 2.5)


# ------------------------------------------------------------------------------------ training

def sampled_loss(model, rng: random.Random) -> torch.Tensor:
    ids = torch.tensor([[rng.randrange(61) for _ in range(6)]])
    return recipe.next_token_loss(model, ids, torch.ones(1, 6))


def test_three_steps_by_hand(tmp_path, monkeypatch):
    """Muon moves the matrices of the layers, AdamW the embeddings and norms.

    Frozen weights stay, the gradient is cut to 1, and the rates are 1, 2/3 and 1/3."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    model, plain, start = tiny("llama"), tiny("llama"), tiny("llama")
    for each in model, plain:
        each.lm_head.requires_grad_(False)
    loss_of = functools.partial(sampled_loss, model)
    recipe.fit("x", model, loss_of, loss_of, (), lr=1e-2, steps=3, work=tmp_path)
    matrices = [p for p in plain.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in plain.model.parameters() if p.ndim == 1]
    by_hand = [torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
               torch.optim.AdamW([plain.model.embed_tokens.weight, *norms], betas=(0.9, 0.95),
                                 weight_decay=0.0)]
    for step, rate in enumerate((1, 2 / 3, 1 / 3)):
        with training.low_precision(plain.device, plain):
            sampled_loss(plain, random.Random(f"x 0 {step}")).backward()
        assert torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0) > 1
        for optimizer in by_hand:
            optimizer.param_groups[0]["lr"] = 1e-2 * rate
            optimizer.step()
            optimizer.zero_grad()
    for name, p in model.state_dict().items():
        torch.testing.assert_close(p, plain.state_dict()[name], atol=1e-6, rtol=1e-5)
        assert torch.equal(p, start.state_dict()[name]) == (name == "lm_head.weight"), name


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_muon_multiplies_in_float32_where_bfloat16_is_slow(monkeypatch, capability):
    """The matrix moves along its gradient, whose singular values Newton-Schulz brings near 1.

    By hand in float64 the same: to float32's precision on AVX2, to bfloat16's on AVX-512."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    matrix = torch.nn.Parameter(torch.zeros(4, 6))
    matrix.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    near = matrix.grad.double() / matrix.grad.double().norm()
    for _ in range(5):
        gram = near @ near.T
        near = 3.4445 * near + (-4.7750 * gram + 2.0315 * gram @ gram) @ near
    recipe.Muon([matrix], lr=1.0, weight_decay=0.0).step()
    error = (matrix.detach() + near).abs().max().item()
    assert error < 1e-5 if capability == "AVX2" else 1e-4 < error < 3e-2


def test_training_on_tasks_reports_on_test_batches(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(recipe, "sample_batch", lambda *asked: seen.append(asked[:4]) or (
        torch.tensor([[5, 9, 30, 2]]), torch.ones(1, 4)))
    recipe.train_on_tasks("x", tiny("llama"), "words", SQL, 50, lr=0.01, tokens=199, work=tmp_path)
    assert seen.count(("words", "train", 50, SQL)) == 3
    assert seen.count(("words", "test", 50, SQL)) == len(seen) - 3 == 16


def test_the_loss_of_distillation_by_hand(monkeypatch):
    """It is the mean of KL(target, draft) over the tokens with a weight of the target's answers."""
    target, draft, given = tiny("llama"), tiny("llama", seed=1), []
    monkeypatch.setattr(recipe, "fit", lambda *args, **options: given.append((args, options)))
    monkeypatch.setattr(recipe, "sample_answers", lambda *args: (IDS, WEIGHTS))
    recipe.distil_on_tasks("x", target, draft, "words", tokens=9000, work=None)
    [((name, model, loss_of, held_out, _), options)] = given
    assert (name, model) == ("x", draft) and options["steps"] == 2
    p, q = (x(IDS).logits.softmax(-1)[[0, 0, 1], [1, 2, 0]] for x in (target, draft))
    for loss in loss_of, held_out:
        torch.testing.assert_close(loss(random.Random(0)), (p * (p / q).log()).sum(-1).mean())


# ------------------------------------------------------------------------------ for any target

def test_a_draft_of_layers_learns_in_its_layers_alone():
    """It is in float32, and its embeddings and LM head stay the target's."""
    model = tiny("llama").to(torch.bfloat16)
    draft = recipe.make_draft_of_layers(model, [1])
    trained = {name for name, p in draft.named_parameters() if p.requires_grad}
    assert {*draft.state_dict()} - trained == {"model.embed_tokens.weight", "lm_head.weight"}
    assert draft.dtype == torch.float32 and not draft.training


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


@pytest.mark.parametrize("layers", [[2], [-1], [1, 0], [1, 1]])
def test_layers_that_cannot_be_taken_are_refused(layers, tmp_path):
    with pytest.raises(InputError, match="--layers must be different numbers from 0 to 1 in asc"):
        recipe.distil(tiny("llama"), None, [], layers=layers, out=tmp_path / "out")


@pytest.mark.parametrize("ended, said", [(False, 0), (True, 1)])
def test_a_model_that_writes_no_new_prompt_is_refused(ended, said, tmp_path, monkeypatch, embedded):
    """It would run for ever. What it wrote before is kept beside the file of an earlier run."""
    tokenizer = copy.deepcopy(embedded[2])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    row = tokenizer.encode("apples", add_special_tokens=False) + [tokenizer.eos_token_id] * ended
    monkeypatch.setattr(recipe, "answer_all", lambda *_: [row] * 3)
    (tmp_path / "out").write_text('{"prompt": "old"}\n')
    with pytest.raises(InputError, match=f"no new one of 3, {said} before"):
        recipe.prompts(tiny("llama"), tokenizer, out=tmp_path / "out", batch=3, count=2)
    kept = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert kept.pop("out") == '{"prompt": "old"}\n'
    assert kept == ({"out.part": '{"prompt": "apples"}\n'} if said else {})


def test_a_model_writes_prompts_in_the_users_place(tmp_path, embedded, monkeypatch):
    """It continues its template from where the user speaks, here at the text's beginning."""
    target, _, tokenizer = embedded
    seen, answer_all = [], recipe.answer_all
    with pytest.raises(InputError, match="expected a model with a chat template"):
        recipe.prompts(target, tokenizer, out=tmp_path / "x")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "<s>def {% for m in messages %}{{ m.content }}</s>{% endfor %}"
    monkeypatch.setattr(recipe, "answer_all", lambda model, eos, rows, *how: seen.extend(
        rows) or answer_all(model, eos, rows, *how))
    for name, count, seed in (("one", 3, 0), ("again", 2, 0), ("other", 2, 1)):
        recipe.prompts(target, tokenizer, out=tmp_path / name, max_new_tokens=64, batch=4,
                       count=count, seed=seed)
    one, again, other = (read_prompts(tmp_path / name) for name in ("one", "again", "other"))
    assert one[:2] == again != other and len(other) == 2 and len(set(one)) == len(one) == 3
    assert all(row == tokenizer.encode("def ") for row in seen)
    assert not any("</s>" in text or text.startswith("def ") for text in one)


# --------------------------------------------------------------------------- the embedded models
