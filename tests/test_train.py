"""models/train.py makes the embedded models from generated tasks. It also makes a draft for any
target, of some of its layers."""
import itertools
import random

import pytest
import torch

import train as recipe
from families import near, tiny
from helpers import check_refused

PAIRS = [([5, 9], [30, 2]), ([8], [7, 1, 12])]
SQL = {"sql": 1.0, "math": 0.0, "code": 0.0}


# ------------------------------------------------------------------------------------- batches

def test_rows_of_a_batch(embedded):
    """A prompt's tokens count a tenth, and what fills a row up counts nothing."""
    tokenizer = embedded[2]
    [(ids, weights)] = rows = recipe.encode_examples(tokenizer, ["2 +"], [" 2"])
    assert tokenizer.decode(ids) == "<s>2 + 2</s>"
    assert weights == [0.1] * (len(ids) - 2) + [1.0] * 2
    both, weights = recipe.pad_rows([*rows, ([3], [1.0])])
    assert both[:, 0].tolist() == [ids[0], 3] and weights[1].tolist() == [1] + [0] * (len(ids) - 1)


def test_a_trained_tokenizer_gives_texts_back(monkeypatch):
    """It has tokens for every text, and no token spans two digits or goes on after a newline."""
    take = recipe.tasks.take
    monkeypatch.setattr(recipe.tasks, "take", lambda task, split, n, seed: take(task, split, 9))
    tokenizer = recipe.make_tokenizer(400)
    ids = tokenizer.encode("def é(x):\n    return 12\n12")
    pieces = [tokenizer.decode([x]) for x in ids]
    assert tokenizer.decode(ids) == "<s>def é(x):\n    return 12\n12"
    assert pieces[:2] == ["<s>", "def"] and pieces[-5:] == [" 1", "2", "\n", "1", "2"]
    assert len(tokenizer) == 400 and tokenizer.eos_token_id == 1


def test_a_batch_of_tasks(embedded, monkeypatch):
    """It has examples of the split and the mix that are next to each other in length.

    They have nearly as many tokens as were asked for: one example at least, and at most all."""
    monkeypatch.setattr(recipe, "POOL", 60)
    pool = itertools.islice(recipe.mix_examples("test", random.Random(0).getrandbits(60), SQL), 60)
    rows = recipe.encode_examples(embedded[2], *zip(*((e.prompt, e.answer) for e in pool)))
    lengths = sorted(len(x) for x, _ in rows)
    for size in (1, 900, 10 ** 6):
        ids, weights = recipe.sample_batch(embedded[2], "test", size, SQL, random.Random(0))
        own = (weights > 0).sum(1).tolist()
        assert all(x[:n].tolist() in [ids for ids, _ in rows] for x, n in zip(ids, own))
        assert own in [lengths[i:i + len(own)] for i in range(60)]
        assert len(own) == {1: 1, 10 ** 6: 60}.get(size, len(own))
        assert size != 900 or 0.7 * size < ids.numel() <= size


def test_a_batch_of_samples(embedded, monkeypatch):
    """Training prompts, which the seed chooses, get answers that it decides, too."""
    def answer_all(source, eos, prompts, limit, temperature):
        assert temperature == 1.0
        return torch.randint(5, 60, (len(prompts), 3)).tolist()
    monkeypatch.setattr(recipe, "answer_all", answer_all)
    one, again, other = (recipe.sample_answers(None, embedded[2], 960, random.Random(seed))
                         for seed in (0, 0, 1))
    assert one == again and [p for p, _ in one] != [p for p, _ in other] and len(one) == 10
    pool = recipe.mix_examples("train", random.Random(0).getrandbits(60))
    known = [e.prompt for e in itertools.islice(pool, 40)]
    assert {*embedded[2].batch_decode([p for p, _ in one], skip_special_tokens=True)} <= {*known}


# -------------------------------------------------------------------------------------- losses

def test_the_next_tokens_loss_by_hand():
    model = tiny("llama")
    ids = torch.tensor([[5, 9, 30, 2], [8, 7, 1, 1]])
    weights = torch.tensor([[0.0, 0, 1, 1], [1, 0.5, 0, 0]])
    logp = model(ids).logits.log_softmax(-1)
    terms = [weights[b, t] * logp[b, t - 1, ids[b, t]] for b in range(2) for t in (1, 2, 3)]
    torch.testing.assert_close(recipe.next_token_loss(model, ids, weights), -sum(terms) / 2.5)


def logits_of_answers(model) -> torch.Tensor:
    """Compute [5, V], the logits before the tokens of the answers of PAIRS."""
    return torch.cat([model(torch.tensor([p + a])).logits[0, len(p) - 1:-1] for p, a in PAIRS])


def test_distance_and_agreement_by_hand():
    """The loss of distillation is the mean of KL(target, draft) over the tokens of the answers."""
    target, draft = tiny("cohere2"), near(tiny("cohere2"), 0.01)  # which scale their logits
    p, q = (logits_of_answers(model).softmax(-1) for model in (target, draft))
    torch.testing.assert_close(recipe.make_distance(target, draft)(PAIRS),
                               (p * (p / q).log()).sum(-1).mean())
    right = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    accepted = torch.minimum(p, q).sum(-1).mean().item()
    assert 0 < right < 1
    assert recipe.measure_draft(target, draft, PAIRS) == pytest.approx((right, accepted))


# ------------------------------------------------------------------------------------ training

def test_training_on_tasks_reports_on_test_batches(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(recipe, "sample_batch", lambda *asked: seen.append(asked[:4]) or (
        torch.tensor([[5, 9, 30, 2]]), torch.ones(1, 4)))
    recipe.train_on_tasks("x", tiny("llama"), "words", SQL, 50, lr=0.01, tokens=199, work=tmp_path)
    assert seen.count(("words", "train", 50, SQL)) == 3
    assert seen.count(("words", "test", 50, SQL)) == len(seen) - 3 == 16


def test_a_draft_that_was_made_comes_nearer_to_the_target(embedded, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "sample_answers", lambda *_: PAIRS)
    target, _, tokenizer = embedded
    draft = recipe.make_model("draft", tokenizer, "cpu")
    measure = recipe.make_distance(target, draft)
    before = measure(PAIRS).item()
    recipe.distil_on_tasks("x", target, draft, tokenizer, tokens=8, size=2, work=tmp_path)
    assert measure(PAIRS).item() < before


# ------------------------------------------------------------------------------ for any target

def test_a_draft_of_layers_learns_in_its_layers_alone(tmp_path):
    """It is in float32, and its embeddings and LM head stay the target's. Layers that cannot be
    taken are refused."""
    model = tiny("llama").to(torch.bfloat16)
    draft = recipe.make_draft_of_layers(model, [1])
    trained = {name for name, p in draft.named_parameters() if p.requires_grad}
    assert {*draft.state_dict()} - trained == {"model.embed_tokens.weight", "lm_head.weight"}
    assert draft.dtype == torch.float32 and not draft.training
    for layers in [2], [-1], [1, 0], [1, 1]:
        check_refused("--layers must be different numbers from 0 to 1 in asc", recipe.distil,
                      model, None, [], layers=layers, out=tmp_path / "out")
