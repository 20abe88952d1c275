"""Medusa and Hydra: trees hold what the heads guess, and the loss is that of their
papers. That the text is the model's own is in test_lossless.py."""
import pytest
import torch

from common import Sampler
from fake_models import path_to
from families import rand, tiny
from helpers import note_calls
from support.engine import EngineLM
from support.trees import best_tree
from survey import medusa as module
from survey.medusa import KINDS, Heads, accuracy, collect_features, fill_tree, medusa, typical_path
from trainings import DATA

def random_heads(model, kind: str, K: int = 3) -> Heads:
    return rand(Heads(model, kind, K), 1.0)


def random_features(n: int) -> torch.Tensor:
    return torch.randn(n, 32, generator=torch.Generator().manual_seed(2))


# ---------------------------------------------------------------------------------- decoding

def test_a_head_of_hydra_by_hand():
    """It adds to a linear map of all that it reads. Medusa's heads are in test_released.py."""
    model, f = tiny("llama"), random_features(2)
    heads = random_heads(model, "hydra")
    embedded = model.get_input_embeddings()(torch.tensor([[3, 9, 14], [2, 7, 30]]))
    for k in (1, 2, 3):
        z = torch.cat([f, embedded[:, :k].flatten(1)], 1)
        gate = z @ heads.W[k - 1].weight.T + heads.W[k - 1].bias
        base = z @ heads.R[k - 1].weight.T + heads.R[k - 1].bias
        torch.testing.assert_close(heads(k, f, embedded[:, :k]), base + gate * gate.sigmoid())


@pytest.mark.parametrize("kind, own", [("medusa", False), ("medusa", True), ("hydra", False)])
def test_a_tree_holds_the_likeliest_tokens_of_each_head(kind, own):
    """Heads may have LM heads of their own. Hydra's read the tokens down to the parent. The
    tokenizer knows the first 20 alone."""
    model, f = tiny("llama"), random_features(1)
    heads = rand(Heads(model, kind, 3, own), 1.0)
    tree = best_tree([[0.5, 0.3, 0.1]] * 3, 16)
    ids = fill_tree(heads, EngineLM(model, 20), f, 3, tree)
    parents = [node.parent for node in tree]
    for token, node in zip(ids[1:], tree[1:], strict=True):
        above = torch.tensor([[ids[x] for x in path_to(node.parent, parents)]])
        x = heads(node.depth, f, model.get_input_embeddings()(above))
        lm_head = heads.lm_heads[node.depth - 1] if own else heads.lm_head
        ranked = lm_head(x)[0, :20].argsort(descending=True)
        assert token == ranked[node.rank]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_few_tokens_guess_each_of_them_once(kind):
    model, log = tiny("llama", vocab_size=4), []
    next(medusa(EngineLM(model), [3, 1, 2], nodes=64, trained=random_heads(model, kind), log=log))
    assert log[0]["guessed"] == 63


@pytest.mark.parametrize("epsilon, delta, path", [
    (0.09, 0.3, [0, 2, 4]),  # 0.07 < min(0.09, 0.3 exp(-0.39))
    (0.06, 0.3, [0, 2, 4]),  # 0.07 > 0.06, but 0.2 · 0.07 < 0.3 · 0.34
    (9.0, 0.5, [0, 2, 4]),   # 0.07 < 0.5 exp(-0.39) = 0.34
    (9.0, 0.6, [0, 2, 4]),   # 0.2 < 0.6 exp(-1.03) = 0.21 < 0.3
    (0.32, 9.0, [0]), (9.0, 1.2, [0])])
def test_typical_acceptance_by_hand(epsilon, delta, path):
    """Its path is the longest one whose tokens are likelier than min(ε, δ exp(-H)), and the token
    after it the likeliest. At temperature 0 that is the greedy path. What is at the threshold is
    not typical."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.07, 0.03], [0.34, 0.33, 0.33], [0.2, 0.3, 0.5],
                      [1.0, 0.0, 0.0]])
    ids, parents = [2, 2, 1, 1, 0], [-1, 0, 0, 1, 2]
    found, chunk = typical_path(ids, parents, p.log(), Sampler(1.0), epsilon, delta)
    assert found == path
    assert chunk == [ids[n] for n in path[1:]] + [p[path[-1]].argmax().item()]
    assert typical_path(ids, parents, p.log(), Sampler(0.0), 0.09, 0.3)[0] == [0]
    assert typical_path([0, 1], [-1, 0], torch.zeros(2, 2), Sampler(1.0), 0.5, 9.0)[0] == [0]


def test_typical_options_reach_the_rule(monkeypatch):
    model, seen = tiny("llama"), note_calls(monkeypatch, module, "typical_path")
    next(medusa(EngineLM(model), [3, 4], nodes=5, trained=random_heads(model, "medusa"),
                typical=True, epsilon=0.2, delta=0.7))
    assert [given[-2:] for given in seen] == [(0.2, 0.7)]


# ------------------------------------------------------------------------------------ training

def test_features_stand_beside_the_tokens_after_them():
    """From the last position but one of a prompt on, as long as head 1 has a token to guess."""
    model = tiny("llama")
    lm = EngineLM(model)
    for (prompt, answer), (f, tokens) in zip(DATA, collect_features(model, DATA, 2), strict=True):
        text, first = prompt + answer, max(0, len(prompt) - 2)
        lm.start(text)
        torch.testing.assert_close(f.float(), lm.features[first:-2], atol=0.02, rtol=0.02)
        expected = [(text + [-100])[i + 1:i + 4] for i in range(first, len(text) - 2)]
        assert tokens.tolist() == expected


@pytest.mark.parametrize("kind, weights", [("medusa", (0.8, 0.64)), ("hydra", (1, 1))])
def test_the_loss_by_hand(kind, weights):
    """Over the logits of the tokens that are kept, which the model doubles. What a head guesses
    right is counted over all tokens."""
    model = tiny("llama")
    f, tokens = (torch.cat(x) for x in zip(*collect_features(model, DATA, 2)))
    heads, f, expected = random_heads(model, kind, 2), f.float(), 0
    heads.keep(vocab := [8, 2, 4, 11, 30])
    right = accuracy(heads, model, f, tokens)
    embedded, whole = model.get_input_embeddings(), model.get_output_embeddings()
    for k in (1, 2):
        said = 2 * whole(heads(k, f, embedded(tokens[:, :k].clamp(min=0))))[:, vocab]
        guessed = [(z, vocab.index(x)) for z, x in zip(said, tokens[:, k].tolist()) if x in vocab]
        losses = [-z.log_softmax(-1)[row].item() for z, row in guessed]
        expected += weights[k - 1] * sum(losses) / len(losses)
        hits, counted = sum(z.argmax() == row for z, row in guessed), (tokens[:, k] >= 0).sum()
        assert right[k - 1] == pytest.approx((hits / counted).item())
    given = heads, model, lambda x: 2 * heads.lm_head(x), f
    assert module.heads_loss(*given, tokens).item() == pytest.approx(expected, rel=1e-4)
    assert module.heads_loss(*given, tokens * 0 + 60).item() == 0  # no head can guess 60
    assert accuracy(heads, model, f, tokens * 0 + 60) == [0, 0]
