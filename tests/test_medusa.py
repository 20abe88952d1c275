"""Medusa and Hydra: every right guess is accepted, trees hold what the heads guess, and training
sees what decoding sees. tests/test_lossless.py checks the output, whatever the heads are."""
import itertools
from types import SimpleNamespace

import pytest
import torch

from common import InputError, Sampler, autoregressive
from survey.clock import best_tree
from fake_models import Decoder, path_to
from families import CONTEXT, FAMILIES, SCALED, tiny
from helpers import per_call, script, tokens_of
from survey import medusa as module
from survey.medusa import (Heads, accuracy, collect_features, fit, fill_tree, load_heads, medusa,
                           save_heads, train, typical_path)
from training import loop as training
from training.layers import FeatureLM
from training.parts import save_part

KINDS = ("medusa", "hydra")
ACCEPT = [[0.5, 0.2, 0.1], [0.4, 0.3], [0.3, 0.1]]  # trees of up to three levels


def same_logits(x: torch.Tensor) -> torch.Tensor:
    """What most models make of their LM head's output."""
    return x


def random_heads(model, kind: str, K: int = 3, residual: str = "") -> Heads:
    heads, rng = Heads(model, kind, K, residual), torch.Generator().manual_seed(0)
    for p in heads.trainable().values():
        p.data = torch.randn(p.shape, generator=rng)
    heads.accept = ACCEPT
    return heads


def random_features(n: int) -> torch.Tensor:
    return torch.randn(n, 32, generator=torch.Generator().manual_seed(2))


# ---------------------------------------------------------------------------------- decoding

STEP = torch.tensor([(7 * token + 3) % 31 for token in range(31)])  # the token that comes next
TEXT = [5]  # it repeats after 15 tokens
while len(TEXT) < 40:
    TEXT.append(STEP[TEXT[-1]].item())


class Follower(Decoder):
    """Stand in for the inside of Successor, also where it is asked alone."""

    def forward(self, features=None, input_ids=None, **_):
        return (torch.eye(31)[STEP[input_ids]] if features is None else features,)


class Successor(torch.nn.Module):
    """A model whose next token depends on the last one alone. Its feature is the next token's
    one-hot vector, and its LM head the identity."""
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.table, self.decoder = torch.nn.Embedding.from_pretrained(torch.eye(31)), Follower()
        self.head = torch.nn.Linear(31, 31, bias=False)
        self.head.weight.data = torch.eye(31)
        text = SimpleNamespace(max_position_embeddings=CONTEXT)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.get_input_embeddings = lambda: self.table
        self.get_output_embeddings, self.get_decoder = lambda: self.head, lambda: self.decoder

    def forward(self, input_ids, logits_to_keep, **_):
        [features] = self.decoder(torch.eye(31)[STEP[input_ids]])
        return SimpleNamespace(logits=features[:, logits_to_keep])


def right_heads(model, kind: str, reads: int, vocab) -> Heads:
    """Heads that know what follows: of the feature (`reads` 0), or of token `reads` after it."""
    heads, ahead = Heads(model, kind, 3), torch.eye(31)[STEP].T  # what comes after a one-hot token
    for k, layer in enumerate(heads.W, 1):
        j = min(reads, k)
        known = max(j, 1)  # both the feature and token 1 tell of position t + 1
        guess = torch.linalg.matrix_power(ahead, k + 1 - known)
        layer.weight.data[:, 31 * j:31 * (j + 1)] = 10 * guess
    heads.accept = [[1.0, 0.9]] * 3  # 15 nodes: two children of each, down to the third level
    heads.keep([*vocab])
    return heads.requires_grad_(False)


VOCABS = [range(31), sorted({*TEXT}, reverse=True)]  # all tokens, or those of the text
READS = pytest.mark.parametrize("kind, reads", [("medusa", 0), ("hydra", 0), ("hydra", 1),
                                                ("hydra", 2), ("hydra", 3)])


@READS
@pytest.mark.parametrize("vocab", VOCABS, ids=len)
def test_right_heads_are_accepted_whole(kind, reads, vocab):
    """Each call makes K + 1 tokens final. The log does not count the root as a guess."""
    model = Successor()
    heads = right_heads(model, kind, reads, vocab)
    for n, typical in (2, False), (5, False), (2, True):
        log = []
        chunks = medusa(FeatureLM(model), TEXT[:n], nodes=15, trained=heads, typical=typical,
                        log=log)
        assert list(itertools.islice(chunks, 4)) == [TEXT[i:i + 4] for i in range(n, n + 16, 4)]
        assert log == [{"guessed": 14, "accepted": 3, "rows": 15}] * 4


def gather(model, data, K: int) -> list[torch.Tensor]:
    """Return the features and tokens of all pairs together."""
    return [torch.cat(x) for x in zip(*collect_features(model, data, K))]


@READS
@pytest.mark.parametrize("vocab", VOCABS, ids=len)
def test_right_heads_are_right_in_training(kind, reads, vocab):
    """At every position where a head has a token of the answer to guess."""
    model = Successor()
    data = [(TEXT[:4], TEXT[4:9]), (TEXT[:1], TEXT[1:20]), (TEXT[:7], TEXT[7:9])]
    f, tokens = gather(model, data, 3)
    assert len(f) == 5 + 18 + 2 and (tokens >= 0).sum(0).tolist() == [25, 25, 22, 19]
    heads = right_heads(model, kind, reads, vocab)
    assert accuracy(heads, model, same_logits, f, tokens)[1] == [[1.0] + [0.0] * 9] * 3


@READS
def test_heads_that_lack_a_token_are_wrong_there(kind, reads):
    model = Successor()
    f, tokens = gather(model, [(TEXT[:1], TEXT[1:20])], 3)
    heads = right_heads(model, kind, reads, {*TEXT} - {TEXT[4]})
    share = (tokens[:, 1] != TEXT[4]).float().mean().item()
    assert accuracy(heads, model, same_logits, f, tokens)[1][0] == [share] + [0.0] * 9 and share < 1
    chunks = medusa(FeatureLM(model), TEXT[:2], nodes=15, trained=heads)
    assert next(chunks) == TEXT[2:5]  # two guesses and what the model says after them


@pytest.mark.parametrize("kind, residual", [("medusa", ""), ("hydra", ""), ("hydra", "feature")])
def test_a_head_by_hand(kind, residual):
    """Medusa adds to the feature. Hydra adds to a linear map of all that it reads, as released.
    Older files add to the feature."""
    model, f = tiny("llama"), random_features(2)
    heads = random_heads(model, kind, residual=residual)
    embedded = model.get_input_embeddings()(torch.tensor([[3, 9, 14], [2, 7, 30]]))
    for k in (1, 2, 3):
        z = torch.stack([torch.cat([row, *x[:k]]) for row, x in zip(f, embedded)])
        z = f if kind == "medusa" else z
        base, gate = f, z @ heads.W[k - 1].weight.T + heads.W[k - 1].bias
        if kind == "hydra" and not residual:
            base = z @ heads.R[k - 1].weight.T + heads.R[k - 1].bias
        torch.testing.assert_close(heads(k, f, embedded[:, :k]), base + gate * gate.sigmoid())


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_holds_the_likeliest_tokens_of_each_head(kind):
    """Hydra's heads read the tokens down to the parent. The tokenizer knows the first 20 alone."""
    model, f = tiny("llama"), random_features(1)
    heads, tree = random_heads(model, kind), best_tree(ACCEPT, 16)
    ids = fill_tree(heads, FeatureLM(model, 20), f, 3, tree)
    parents = [node.parent for node in tree]
    for token, node in zip(ids[1:], tree[1:], strict=True):
        above = torch.tensor([[ids[x] for x in path_to(node.parent, parents)]])
        x = heads(node.depth, f, model.get_input_embeddings()(above))
        ranked = model.get_output_embeddings()(x)[0, :20].argsort(descending=True)
        assert token == ranked[node.rank]


@pytest.mark.parametrize("epsilon, delta, path", [
    (0.09, 0.3, [0, 2, 4]),  # 0.07 < min(0.09, 0.3 exp(-0.39))
    (0.06, 0.3, [0, 2, 4]),  # 0.07 > 0.06, but 0.2 · 0.07 < 0.3 · 0.34
    (9.0, 0.5, [0, 2, 4]),   # 0.07 < 0.5 exp(-0.39) = 0.34
    (9.0, 0.6, [0, 2, 4]),   # 0.2 < 0.6 exp(-1.03) = 0.21 < 0.3
    (0.32, 9.0, [0]), (9.0, 1.2, [0])])
def test_typical_acceptance_by_hand(epsilon, delta, path):
    """Its path is the longest one whose tokens are likelier than min(ε, δ exp(-H)), and the token
    after it the likeliest. At temperature 0 that is the greedy path."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.07, 0.03], [0.34, 0.33, 0.33], [0.2, 0.3, 0.5],
                      [1.0, 0.0, 0.0]])
    ids, parents = [2, 2, 1, 1, 0], [-1, 0, 0, 1, 2]
    found, chunk = typical_path(ids, parents, p.log(), Sampler(1.0), epsilon, delta)
    assert found == path
    assert chunk == [ids[n] for n in path[1:]] + [p[path[-1]].argmax().item()]
    assert typical_path(ids, parents, p.log(), Sampler(0.0), 0.09, 0.3)[0] == [0]


def test_what_is_exactly_at_the_threshold_is_not_typical():
    assert typical_path([0, 1], [-1, 0], torch.zeros(2, 2), Sampler(1.0), 0.5, 9.0)[0] == [0]


def test_typical_text_at_temperature_0_is_the_greedy_text():
    model = tiny("llama")
    chunks = medusa(FeatureLM(model), [3, 4], nodes=9, typical=True,
                    trained=random_heads(model, "medusa"))
    assert tokens_of(chunks, 20) == tokens_of(autoregressive(FeatureLM(model), [3, 4]), 20)


def test_typical_options_reach_the_rule(monkeypatch):
    seen, model = [], tiny("llama")
    monkeypatch.setattr(module, "typical_path",
                        lambda *given: seen.append(given[-2:]) or typical_path(*given))
    next(medusa(FeatureLM(model), [3, 4], nodes=5, trained=random_heads(model, "medusa"),
                typical=True, epsilon=0.2, delta=0.7))
    assert seen == [(0.2, 0.7)]


@pytest.mark.parametrize("cost, level, nodes", [
    (lambda n: 1, 0.01, 22),  # a call of many rows costs no more: all nodes
    (lambda n: 1, 9, 1),  # growing costs too much
    (lambda n: 1 if n <= 3 else 9, 0.01, 3),  # three rows are cheap
    (lambda n: n, 0, 1)])  # no guess is worth its row
def test_the_tree_that_pays(cost, level, nodes, monkeypatch):
    heads = random_heads(tiny("llama"), "medusa")
    clock = SimpleNamespace(repeat=lambda fill, number, repeat: fill())
    monkeypatch.setattr(module, "timeit", clock)
    monkeypatch.setattr(module, "row_costs", lambda lm, most: [cost(n) for n in range(65)])
    monkeypatch.setattr(module, "fill_tree", lambda trained, lm, f, root, tree: [
        level * max(node.depth for node in tree)])
    tree, *_ = max(module.plan_medusa(heads, None, None), key=lambda x: x[1] / x[2])
    assert len(tree) == nodes


def test_without_nodes_the_clock_chooses_anew_at_each_call(monkeypatch):
    """The context grows, and a row costs more."""
    model, log, trees = tiny("llama"), [], itertools.cycle([best_tree(ACCEPT, n) for n in (1, 7)])
    target, expected = FeatureLM(model), tokens_of(autoregressive(FeatureLM(model), [3, 4]), 20)
    heads = random_heads(model, "hydra")
    assert tokens_of(medusa(target, [3, 4], trained=heads), 20) == expected
    monkeypatch.setattr(module, "fastest", lambda *_: next(trees))
    assert tokens_of(medusa(target, [3, 4], trained=heads, log=log), 20) == expected
    assert [r["rows"] for r in log][:4] == [1, 7, 1, 7]


def test_a_tree_of_128_nodes():
    model, log = tiny("llama"), []
    heads = random_heads(model, "medusa")
    heads.accept = [[0.1] * 10] * 3
    chunks = medusa(FeatureLM(model), [3, 4], nodes=128, trained=heads, log=log)
    assert tokens_of(chunks, 8) == tokens_of(autoregressive(FeatureLM(model), [3, 4]), 8)
    assert {r["rows"] for r in log} == {128}


# ------------------------------------------------------------------------------------ training

DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3], [4, 4, 2, 11]), ([1], [2, 3, 4, 5, 6])]
HELD_OUT = [([50, 51], [52, 53, 54])]


@pytest.mark.parametrize("kind", KINDS)
def test_new_heads_guess_what_the_lm_head_says(kind):
    model = tiny("llama")
    f, tokens = gather(model, DATA, 2)
    heads = Heads(model, kind, 2)
    for _, x, _ in module.head_states(heads, model, f.float(), tokens):
        torch.testing.assert_close(x, f.float())


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_reaches_nothing_else(kind):
    model = tiny("llama")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    heads = Heads(model, kind, 2)
    curve = fit(model, heads, DATA, DATA, steps=20, batch=16, lr=4e-2)
    assert sum(curve[20]["loss"]) < 0.7 * sum(curve[0]["loss"])
    assert heads.accept == curve[20]["accept"]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())


def test_held_out_answers_are_measured_and_never_learnt_from(monkeypatch):
    model, learnt, measured = tiny("llama"), [], []
    loss, measure = module.heads_loss, module.accuracy
    monkeypatch.setattr(module, "heads_loss", lambda *given: learnt.append(given[-1])
                        or loss(*given))
    monkeypatch.setattr(module, "accuracy", lambda *given: measured.append(given[-1])
                        or measure(*given))
    fit(model, Heads(model, "medusa", 2), DATA, HELD_OUT, steps=9, batch=9, lr=1e-2)
    own, others = (gather(model, data, 2)[1] for data in (DATA, HELD_OUT))
    assert {*map(tuple, torch.cat(learnt).tolist())} == {*map(tuple, own.tolist())}
    assert len(measured) == 10 and all(torch.equal(x, others) for x in measured)


@pytest.mark.parametrize("kind, weights", [("medusa", (0.8, 0.64, 0.512)), ("hydra", (1, 1, 1))])
def test_later_heads_of_medusa_weigh_less(kind, weights):
    model = tiny("llama")
    heads, (f, tokens) = random_heads(model, kind), gather(model, DATA, 3)
    losses, _ = accuracy(heads, model, same_logits, f.float(), tokens)
    loss = module.heads_loss(heads, model, same_logits, f.float(), tokens)
    assert loss.item() == pytest.approx(sum(w * x for w, x in zip(weights, losses)), rel=1e-4)


def test_the_loss_is_of_the_tokens_that_are_kept():
    """Over their logits alone. What is right is counted over all tokens."""
    model = tiny("llama")
    (f, tokens), heads = gather(model, DATA, 2), random_heads(model, "hydra", 2)
    heads.keep(vocab := [8, 2, 4, 11, 30])
    losses, accept = accuracy(heads, model, same_logits, f.float(), tokens)
    embedded, whole = model.get_input_embeddings(), model.get_output_embeddings()
    for k in (1, 2):
        found, right, counted = [], torch.zeros(5), 0
        for some, after in zip(f.float(), tokens):
            said = whole(heads(k, some[None], embedded(after[None, :k])))[0, vocab]
            above = all(token in vocab for token in after[1:k])  # one of all five is right
            counted += above and after[k] >= 0
            if after[k] in vocab:
                found.append(-said.log_softmax(-1)[vocab.index(after[k])].item())
                right += above * (said.argsort(descending=True) == vocab.index(after[k]))
        assert losses[k - 1] == pytest.approx(sum(found) / len(found), rel=1e-4)
        assert accept[k - 1] == pytest.approx((right / counted).tolist()) and 0 < sum(right)
        assert counted < (tokens[:, k] >= 0).sum() or k == 1


def test_heads_that_are_never_right_learn_nothing():
    model = tiny("llama")
    heads = Heads(model, "hydra", 2)
    heads.keep([60])
    assert fit(model, heads, DATA, HELD_OUT, steps=1, batch=5, lr=1e-2)[1]["loss"] == [0, 0]
    new = Heads(model, "hydra", 2).trainable()
    assert all(torch.equal(p, new[name]) for name, p in heads.trainable().items())


def test_guesses_count_where_those_before_them_are_right():
    """Of three positions the first head is right in two, the second in one of these. The third's
    label is never known."""
    model, f = tiny("llama"), random_features(4)
    heads = random_heads(model, "medusa")
    ranked = [heads.rank_tokens(heads.lm_head(heads(k, f, None)), None) for k in (1, 2)]
    one, two = ([row[rank] for row, rank in zip(rows, ranks)]
                for rows, ranks in zip(ranked, ((0, 9, 0, 0), (2, 0, 2, 0))))
    wrong = next(token for token in range(61) if token not in ranked[0][2])
    tokens = torch.tensor([[0, one[0], two[0], -100], [0, one[1], 60 - two[1], -100],
                           [0, wrong, two[2], -100], [0, one[3], -100, -100]])
    assert 60 - two[1] not in ranked[1][1]
    _, accept = accuracy(heads, model, same_logits, f, tokens)
    assert accept == [[0.5, *[0.0] * 8, 0.25], [0.0, 0.0, 0.5, *[0.0] * 7], [0.0] * 10]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_fewer_tokens_than_ranks(kind):
    """Trees have the ranks that there are."""
    model = tiny("llama")
    heads = random_heads(model, kind)
    heads.keep([7, 30, 5])
    f, tokens = gather(model, DATA, 3)
    found = accuracy(heads, model, same_logits, f.float(), tokens)[1]
    assert [len(ranks) for ranks in found] == [3, 3, 3]
    heads.accept = [[0.3, 0.2, 0.1]] * 3
    chunks = medusa(FeatureLM(model), [3, 4], nodes=40, trained=heads)
    assert tokens_of(chunks, 12) == tokens_of(autoregressive(FeatureLM(model), [3, 4]), 12)


@pytest.mark.parametrize("name, config", SCALED.items())
def test_the_loss_is_of_the_models_own_logits(name, config, monkeypatch):
    """Where these are scaled or capped: new heads say what the model says."""
    monkeypatch.setitem(FAMILIES, name, config)
    model, data = tiny(name), [([3, 4], [5, 6, 7, 8])]
    curve = fit(model, Heads(model, "medusa", 1), data, data, steps=0, batch=1, lr=1e-2)
    with torch.inference_mode():
        said = model(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8]])).logits[0, :4].log_softmax(-1)
    labels = torch.tensor([5, 6, 7, 8])  # by the first head, from a position two before each
    expected = -said[torch.arange(4), labels].mean().item()
    assert curve[0]["loss"][0] == pytest.approx(expected, rel=0.05)


def test_train_makes_the_heads_that_were_asked_for(tmp_path, monkeypatch):
    """With the most frequent tokens of prompts and answers, held-out ones aside."""
    model, out, seen = tiny("llama"), tmp_path / "o", []
    data, held_out = [([9, 9], [7, 7, 7])], [([2, 2], [2] * 9)]
    options = dict(steps=7, batch=3, lr=0.5, seed=9)
    monkeypatch.setattr(training, "collect_examples", lambda *_, **__: (data, held_out))
    monkeypatch.setattr(module, "fit", lambda model, heads, *given, **named: seen.append(
        (given, named)))
    train(model, None, [[3], [4]], out=out, heads="hydra", K=2, vocab=2, work=tmp_path, **options)
    heads = load_heads(out, "hydra", model)
    assert seen == [((data, held_out), options | {"work": tmp_path})]
    assert heads.K == 2 and heads.vocab.tolist() == [7, 9]


# ------------------------------------------------------------------------- files of heads

@pytest.mark.parametrize("kind, vocab", [("medusa", range(61)), ("hydra", [9, 2, 60])])
def test_a_file_belongs_to_its_model(kind, vocab, tmp_path):
    model, path, f = tiny("llama"), tmp_path / "folder" / "h.safetensors", random_features(1)
    heads = random_heads(model, kind)
    heads.keep([*vocab])
    save_heads(path, heads, model)
    between = model.get_input_embeddings()(torch.tensor([[5, 6]]))
    expected = heads.lm_head(heads(2, f, between))
    for dtype in (torch.bfloat16, torch.float32):
        loaded = load_heads(path, kind, model.to(dtype))
        assert (loaded.kind, loaded.K, loaded.accept) == (kind, 3, ACCEPT)
        assert torch.equal(loaded.vocab, heads.vocab) and loaded.W[0].bias.dtype == dtype
    found = loaded.lm_head(loaded(2, f, between))
    assert (found - expected).norm() < 0.02 * expected.norm()  # kept in bfloat16
    assert next(medusa(FeatureLM(model), [3, 4], heads=kind, adapter=str(path), nodes=3))
    with pytest.raises(InputError, match="heads for this model, got .* another's"):
        load_heads(path, kind, tiny("llama", seed=3))
    with pytest.raises(InputError, match=f"got .*, one of {kind} heads"):
        load_heads(path, KINDS[kind == "medusa"], model)


def test_the_header_tells_the_form_of_the_residual(tmp_path):
    """Files without it were made when Hydra's heads added to the feature: these guess as before."""
    model, path, f = tiny("llama"), tmp_path / "h.safetensors", random_features(1)
    between = model.get_input_embeddings()(torch.tensor([[5, 6]]))
    for residual, header in (("trained", {"residual": "trained"}), ("feature", {}),
                             ("feature", {"residual": "feature"})):
        heads = random_heads(model, "hydra", residual=residual)
        save_heads(path, heads, model)
        assert load_heads(path, "hydra", model).residual == residual
        save_part(path, "hydra heads", model, heads.trainable(), K=3, accept=ACCEPT, **header)
        found = load_heads(path, "hydra", model)(2, f, between)
        torch.testing.assert_close(found, heads(2, f, between), atol=0.1, rtol=0.1)


# ------------------------------------------------------------- the command line, the embedded heads

def test_train_and_decode_from_the_command_line(small_llama, tmp_path, capfd):
    (tmp_path / "prompts").write_text("How many cats?\nHow many dogs are there?\n")
    argv = ["--target", small_llama, "--prompts", str(tmp_path / "prompts"), "--heads", "hydra",
            "--max-new-tokens", "8", "--device", "cpu"]
    out = str(tmp_path / "h.safetensors")
    assert script("survey.medusa", "train", *argv, "--steps", "2", "--out", out) == 0
    assert "step 2: held-out loss" in capfd.readouterr().out
    assert script("survey.medusa", *argv, "--adapter", out, "--nodes", "5", "--compare") == 0
    err = capfd.readouterr().err
    assert "output equals autoregressive output" in err and "a round: 4.0 guesses" in err


@pytest.mark.parametrize("kind, least", [("medusa", 2.5), ("hydra", 2.8)])
def test_the_embedded_heads(embedded, held_out, kind, least):
    """Held-out prompts: autoregressive text, and well over two tokens a call."""
    assert per_call(medusa, embedded[0], held_out[::3], heads=kind, nodes=32) > least
