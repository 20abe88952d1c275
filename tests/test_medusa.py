"""Medusa and Hydra: the model's own output whatever the heads are, every right guess accepted,
training that sees what decoding sees and goes on only where it may."""
import itertools
from types import SimpleNamespace

import pytest
import torch

from common import CachedLM, InputError, Sampler, autoregressive, best_tree
from fake_models import Decoder
from families import CONTEXT, FAMILIES, SCALED, tiny
from helpers import ROOT, interrupting, main, per_call, tokens_of
from models import training
from survey import medusa as module
from survey.medusa import (Heads, accuracy, collect_features, fit, load_heads, medusa, save_heads,
                           train, typical_path)
from survey.parts import save_part

KINDS = ("medusa", "hydra")


def same_logits(x: torch.Tensor) -> torch.Tensor:
    """What most models make of their LM head's output."""
    return x


ACCEPT = [[0.5, 0.2, 0.1], [0.4, 0.3], [0.3, 0.1]]  # trees of up to three levels
WORDLESS = SimpleNamespace(eos_token_id=None)  # a tokenizer, as far as needed


def random_heads(model, kind: str, K: int = 3, seed: int = 0, residual: str = "") -> Heads:
    heads, rng = Heads(model, kind, K, residual), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in heads.trainable().values():
            p.copy_(torch.randn(p.shape, generator=rng))
    heads.accept = ACCEPT
    return heads


# ---------------------------------------------------------------------------------- decoding

STEP = torch.tensor([(7 * token + 3) % 31 for token in range(31)])  # the token that comes next


class Successor(torch.nn.Module):
    """A model whose next token depends on the last one alone; its feature is the next token's
    one-hot vector, and its LM head the identity."""
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.table, self.decoder = torch.nn.Embedding.from_pretrained(torch.eye(31)), Decoder()
        self.head = torch.nn.Linear(31, 31, bias=False)
        self.head.weight.data = torch.eye(31)
        text = SimpleNamespace(max_position_embeddings=CONTEXT)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.get_input_embeddings = lambda: self.table
        self.get_output_embeddings, self.get_decoder = lambda: self.head, lambda: self.decoder

    def forward(self, input_ids, logits_to_keep, **_):
        [features] = self.decoder(torch.eye(31)[STEP[input_ids]])
        return SimpleNamespace(logits=features[:, logits_to_keep])


def right_heads(model, kind: str, reads: int) -> Heads:
    """Heads that know what follows: of the feature (`reads` 0), or of token `reads` after it."""
    heads, ahead = Heads(model, kind, 3), torch.eye(31)[STEP].T  # what comes after a one-hot token
    for k, layer in enumerate(heads.W, 1):
        j = min(reads, k)
        known = max(j, 1)  # both the feature and token 1 tell of position t + 1
        guess = torch.linalg.matrix_power(ahead, k + 1 - known)
        layer.weight.data[:, 31 * j:31 * (j + 1)] = 10 * guess
    heads.accept = [[1.0]] * 3
    return heads.requires_grad_(False)


@pytest.mark.parametrize("kind, reads", [("medusa", 0), ("hydra", 0), ("hydra", 1), ("hydra", 2),
                                         ("hydra", 3)])
def test_right_heads_are_accepted_whole(kind, reads):
    """Each call makes K + 1 tokens final, and in training all of them are right; also of heads that
    know only tokens of the text, in an order of their own, and without one of these fewer."""
    model, text = Successor(), [5]
    heads = right_heads(model, kind, reads)
    while len(text) < 40:
        text.append(STEP[text[-1]].item())
    for n in (2, 5):
        chunks = medusa(CachedLM(model), text[:n], nodes=4, trained=heads)
        assert list(itertools.islice(chunks, 4)) == [text[i:i + 4] for i in range(n, n + 16, 4)]
    data = [(text[:4], text[4:9]), (text[:1], text[1:20]), (text[:7], text[7:9])]
    f, tokens = collect_features(model, data, 3)
    assert len(f) == len(tokens) == 5 + 18 + 2
    assert (tokens >= 0).sum(0).tolist() == [25, 25, 22, 19]
    assert accuracy(heads, model, same_logits, f, tokens)[1] == [[1.0] + [0.0] * 9] * 3
    heads.keep(sorted({*text}, reverse=True))
    assert accuracy(heads, model, same_logits, f, tokens)[1] == [[1.0] + [0.0] * 9] * 3
    assert len(heads.vocab) < 31
    chunks = medusa(CachedLM(model), text[:2], nodes=4, trained=heads)
    assert list(itertools.islice(chunks, 4)) == [text[i:i + 4] for i in range(2, 18, 4)]
    heads = right_heads(model, kind, reads)
    heads.keep([*{*text} - {text[4]}])
    share = (tokens[:, 1] != text[4]).float().mean().item()
    assert accuracy(heads, model, same_logits, f, tokens)[1][0] == [share] + [0.0] * 9 and share < 1
    chunks = medusa(CachedLM(model), text[:2], nodes=4, trained=heads)
    assert next(chunks) == text[2:5]  # two guesses and what the model says after them


@pytest.mark.parametrize("kind, residual", [("medusa", ""), ("hydra", ""), ("hydra", "feature")])
def test_a_head_by_hand(kind, residual):
    """Medusa adds to the feature. Hydra adds to a linear map of all that it reads, as released;
    older files add to the feature."""
    model = tiny("llama")
    heads = random_heads(model, kind, residual=residual)
    rng = torch.Generator().manual_seed(7)
    f, tokens = torch.randn(2, 32, generator=rng), torch.tensor([[3, 9, 14], [2, 7, 30]])
    embedded = model.get_input_embeddings()(tokens)
    for k in (1, 2, 3):
        z = torch.stack([torch.cat([row, *x[:k]]) for row, x in zip(f, embedded)])
        z = f if kind == "medusa" else z
        W, R = heads.W[k - 1], heads.R[k - 1] if heads.R else None
        gate = z @ W.weight.T + W.bias
        base = f if R is None else z @ R.weight.T + R.bias
        expected = base + gate * gate.sigmoid()
        torch.testing.assert_close(heads(k, f, embedded[:, :k]), expected)
    assert len(heads.R) == (3 if kind == "hydra" and not residual else 0)


EYE = torch.nn.Linear(3, 3, bias=False).requires_grad_(False)
EYE.weight.data = torch.eye(3)


def test_typical_acceptance():
    """Its path is the longest whose tokens are likelier than min(ε, δ exp(-H)), the token after it
    the likeliest; at temperature 0 that is the greedy path."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.07, 0.03], [0.34, 0.33, 0.33], [0.2, 0.3, 0.5],
                      [1.0, 0.0, 0.0]])
    ids, parents = [2, 2, 1, 1, 0], [-1, 0, 0, 1, 2]
    cases = ((0.09, 0.3, [0, 2, 4]),  # 0.07 < min(0.09, 0.3 exp(-0.39))
             (0.06, 0.3, [0, 2, 4]),  # 0.07 > 0.06, but 0.2 · 0.07 < 0.3 · 0.34
             (9.0, 0.5, [0, 2, 4]),   # 0.07 < 0.5 exp(-0.39) = 0.34
             (9.0, 0.6, [0, 2, 4]),   # 0.2 < 0.6 exp(-1.03) = 0.21 < 0.3
             (0.32, 9.0, [0]), (9.0, 1.2, [0]))
    for epsilon, delta, path in cases:
        found, chunk = typical_path(ids, parents, p.log(), Sampler(1.0), epsilon, delta)
        assert found == path
        assert chunk == [ids[n] for n in path[1:]] + [p[path[-1]].argmax().item()]
    assert typical_path(ids, parents, p.log(), Sampler(0.0), 0.09, 0.3)[0] == [0]
    model = tiny("llama")
    heads = random_heads(model, "hydra")
    chunks = medusa(CachedLM(model), [3, 4], nodes=9, trained=heads, typical=True)
    assert tokens_of(chunks, 20) == tokens_of(autoregressive(CachedLM(model), [3, 4]), 20)


def test_the_tree_that_pays(monkeypatch):
    """Where a call of many rows costs no more, all of them; where each row costs, the best few; and
    none where none is worth it, or growing costs too much. Costs are stubs here."""
    heads = random_heads(tiny("llama"), "medusa")
    clock = SimpleNamespace(repeat=lambda grow, number, repeat: grow())
    monkeypatch.setattr(module, "timeit", clock)
    for cost, level, n in ((lambda n: 1, 0.01, 22), (lambda n: 1, 9, 1),
                           (lambda n: 1 if n <= 3 else 9, 0.01, 3), (lambda n: n, 0, 1)):
        monkeypatch.setattr(module, "row_costs", lambda lm, most: [cost(n) for n in range(65)])
        monkeypatch.setattr(module, "grow", lambda trained, lm, f, root, tree: [
            level * max(node.depth for node in tree)])
        tree = max(module.list_plans(heads, None, None), key=lambda x: x[1] / x[2])[0]
        assert len(tree) == n


def test_a_fixed_tree_is_planned_once(monkeypatch):
    """With --nodes no call plans again; without, the clock is asked at each call, for the context
    grows."""
    planned, asked, model = [], [], tiny("llama")
    heads, plan = random_heads(model, "medusa"), module.best_tree
    monkeypatch.setattr(module, "best_tree", lambda *given: planned.append(given) or plan(*given))
    monkeypatch.setattr(module, "fastest", lambda *given: asked.append(given) or plan(ACCEPT, 3))
    tokens_of(medusa(CachedLM(model), [3, 4], nodes=5, trained=heads), 20)
    assert planned == [(ACCEPT, 5)] and asked == []
    log = []
    tokens_of(medusa(CachedLM(model), [3, 4], trained=heads, log=log), 20)
    assert len(asked) == len(log) > 5 and {r["rows"] for r in log} == {3}


def test_the_tree_is_planned_once_for_all_prompts(monkeypatch):
    """And the heads are loaded once; what that takes is set-up. Another target has its own."""
    model, loads, measured = tiny("llama"), [], []
    heads, target = random_heads(model, "medusa"), CachedLM(model)
    monkeypatch.setattr(module, "load_heads", lambda *given: loads.append(given) or heads)
    costs = module.row_costs
    monkeypatch.setattr(module, "row_costs", lambda lm, n: measured.append(n) or costs(lm, n))
    for prompt in ([3, 14, 15], [9, 9, 9, 4]):
        expected = tokens_of(autoregressive(CachedLM(model), prompt), 20)
        assert tokens_of(medusa(target, prompt, adapter="file"), 20) == expected
    assert loads == [("file", "medusa", model)] and measured == [64] and target.setup_seconds > 0
    next(medusa(CachedLM(model), [3], adapter="file"))
    assert len(loads) == len(measured) == 2


def test_bad_options_are_refused():
    for wrong, said in ((dict(heads="three"), "--heads must be medusa or hydra, got three"),
                        (dict(nodes=-1), "--nodes must be 0 to 128, got -1"),
                        (dict(nodes=129), "--nodes must be 0 to 128, got 129"),
                        (dict(epsilon=0.0), "--epsilon must be above 0, got 0.0"),
                        (dict(delta=-1.0), "--delta must be above 0, got -1.0")):
        with pytest.raises(InputError, match=said):
            next(medusa(None, [1], trained=object(), **wrong))
    with pytest.raises(InputError, match="--K must be 1 or more, got 0"):
        Heads(None, "medusa", 0)


# ------------------------------------------------------------------------------------ training

DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3], [4, 4, 2, 11]), ([1], [2, 3, 4, 5, 6])]
HELD_OUT = [([50, 51], [52, 53, 54])]


def fitted(work=None, kind="hydra", model=0, data=DATA, K=2, vocab=range(61), **options):
    """(weights, accept, curve)."""
    model = tiny("llama", seed=model)
    heads = Heads(model, kind, K)
    heads.keep([*vocab])
    curve = fit(model, heads, data, HELD_OUT, work=work,
                **dict(steps=4, batch=5, lr=1e-2) | options)
    return {name: x.tolist() for name, x in heads.trainable().items()}, heads.accept, curve


def test_new_heads_guess_what_the_lm_head_says():
    model = tiny("llama")
    f, tokens = collect_features(model, DATA, 2)
    for kind in KINDS:
        for logits, _ in module.head_logits(Heads(model, kind, 2), model, same_logits,
                                                f.float(), tokens):
            torch.testing.assert_close(logits, model.get_output_embeddings()(f.float()))


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_reaches_nothing_else(kind):
    model = tiny("llama")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    heads = Heads(model, kind, 2)
    curve = fit(model, heads, DATA, DATA, steps=40, batch=16, lr=2e-2)
    assert sum(curve[40]["loss"]) < 0.7 * sum(curve[4]["loss"])
    assert list(curve) == [*range(0, 41, 4)]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())
    assert heads.accept == curve[40]["accept"]


def test_a_stopped_training_goes_on_and_another_starts_over(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "backward", interrupting(torch.Tensor.backward, 3))
        fitted(tmp_path)
    [file] = tmp_path.iterdir()
    assert torch.load(file)["done"] == 2
    assert fitted(tmp_path) == fitted()
    for change in (dict(kind="medusa"), dict(model=1), dict(K=1), dict(lr=2e-2), dict(seed=1),
                   dict(batch=4), dict(steps=3), dict(data=DATA[:2]), dict(vocab=range(60))):
        assert fitted(tmp_path, **change) == fitted(**change)


def test_a_file_belongs_to_its_model(tmp_path):
    model, path = tiny("llama"), tmp_path / "folder" / "h.safetensors"
    for kind in KINDS:
        heads = random_heads(model, kind)
        if kind == "hydra":
            heads.keep([9, 2, 60])
        save_heads(path, heads, model)
        for dtype in (torch.bfloat16, torch.float32):
            loaded = load_heads(path, kind, model.to(dtype))
            assert loaded.kind == kind and loaded.accept == ACCEPT
            assert loaded.W[0].bias.dtype == dtype
            assert torch.equal(loaded.vocab, heads.vocab)
            torch.testing.assert_close(loaded.lm_head.weight.float(), heads.lm_head.weight.float(),
                                       atol=1e-2, rtol=1e-2)
            torch.testing.assert_close(loaded.W[2].weight.float(), heads.W[2].weight, atol=1e-2,
                                       rtol=1e-2)
        assert next(medusa(CachedLM(model), [3, 4], heads=kind, adapter=str(path), nodes=3))
        for other in (tiny("llama", seed=3), tiny("qwen2"), tiny("llama", hidden_size=64)):
            with pytest.raises(InputError, match="heads for this model, got .* another's"):
                load_heads(path, kind, other)
        with pytest.raises(InputError, match="got .*, one of"):
            load_heads(path, KINDS[kind == "medusa"], model)
    path.write_text("x" * 100)
    for bad in (path, tmp_path / "none", ROOT / "models/draft/model.safetensors"):
        with pytest.raises(InputError, match="expected a file of hydra heads, got"):
            load_heads(bad, "hydra", model)


def test_the_header_tells_the_form_of_the_residual(tmp_path):
    """Files without it were made when Hydra's heads added to the feature: these guess as before."""
    model, path = tiny("llama"), tmp_path / "h.safetensors"
    f = torch.randn(1, 32, generator=torch.Generator().manual_seed(2))
    between = model.get_input_embeddings()(torch.tensor([[5, 6]]))
    for residual in ("feature", "trained"):
        heads = random_heads(model, "hydra", residual=residual)
        save_heads(path, heads, model)
        loaded = load_heads(path, "hydra", model)
        assert loaded.residual == residual
        torch.testing.assert_close(loaded(2, f, between), heads(2, f, between), atol=0.1, rtol=0.1)
    heads = random_heads(model, "hydra", residual="feature")
    save_part(path, "hydra heads", model, heads.trainable(), K=3, accept=ACCEPT)
    loaded = load_heads(path, "hydra", model)
    expected = f + torch.nn.functional.silu(heads.W[1](torch.cat([f, between.flatten(1)], 1)))
    torch.testing.assert_close(loaded(2, f, between), expected, atol=0.1, rtol=0.1)
    save_part(path, "hydra heads", model, heads.trainable(), K=3, accept=ACCEPT, residual="trained")
    with pytest.raises(InputError, match="expected tensors"):
        load_heads(path, "hydra", model)


def test_wrong_numbers_are_refused(tmp_path):
    for wrong, said in ((dict(steps=0), "--steps must be 1 or more, got 0"),
                        (dict(batch=0), "--batch must be 1 or more, got 0"),
                        (dict(lr=0), "--lr must be above 0, got 0"),
                        (dict(max_new_tokens=0), "--max-new-tokens must be 1 or more, got 0"),
                        (dict(K=0), "--K must be 1 or more, got 0"),
                        (dict(heads="three"), "--heads must be medusa or hydra, got three"),
                        (dict(vocab=-1), "--vocab must be 0 or more, got -1")):
        with pytest.raises(InputError, match=said):
            train(tiny("llama"), WORDLESS, [[2], [3]], out=tmp_path / "o",
                  **{"max_new_tokens": 9} | wrong)
    with pytest.raises(InputError, match="must hold 2 prompts or more"):
        train(tiny("llama"), WORDLESS, [[2]], out=tmp_path / "o", max_new_tokens=9)


def test_the_most_frequent_tokens_are_kept(tmp_path, monkeypatch):
    """Of prompts and answers."""
    monkeypatch.setattr(training, "collect_answers", lambda *given: [[7, 2, 7, 7]] * 2)
    train(tiny("llama"), WORDLESS, [[9, 9, 4], [9, 4, 9]], out=tmp_path / "o", steps=1, vocab=2,
          max_new_tokens=9, work=tmp_path)
    assert load_heads(tmp_path / "o", "medusa", tiny("llama")).vocab.tolist() == [7, 9]


def test_the_loss_is_of_the_tokens_that_are_kept():
    """Over their logits alone; what is right is counted over all tokens."""
    model = tiny("llama")
    (f, tokens), heads = collect_features(model, DATA, 2), random_heads(model, "hydra", 2)
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
    weights, _, curve = fitted(vocab=[60])  # none of it is ever right: nothing is learnt
    new = Heads(tiny("llama"), "hydra", 2).trainable()
    assert weights == {name: x.tolist() for name, x in new.items()} and curve[4]["loss"] == [0, 0]


def test_guesses_count_where_those_before_them_are_right():
    """Of three positions the first head is right in two, the second in one of these; the third's
    label is never known."""
    model, heads = tiny("llama"), None
    heads = random_heads(model, "medusa")
    f = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    ranked = [heads.rank_tokens(heads(k, f, None), None) for k in (1, 2)]
    one, two = ([row[rank] for row, rank in zip(rows, ranks)]
                for rows, ranks in zip(ranked, ((0, 9, 0, 0), (2, 0, 2, 0))))
    wrong = next(token for token in range(61) if token not in ranked[0][2])
    tokens = torch.tensor([[0, one[0], two[0], -100], [0, one[1], 60 - two[1], -100],
                           [0, wrong, two[2], -100], [0, one[3], -100, -100]])
    assert 60 - two[1] not in ranked[1][1]
    _, accept = accuracy(heads.requires_grad_(False), model, same_logits, f, tokens)
    assert accept == [[0.5, *[0.0] * 8, 0.25], [0.0, 0.0, 0.5, *[0.0] * 7], [0.0] * 10]


def test_heads_of_fewer_tokens_than_ranks():
    """Trees have the ranks that there are."""
    model = tiny("llama")
    for kind in KINDS:
        heads = random_heads(model, kind)
        heads.keep([7, 30, 5])
        f, tokens = collect_features(model, DATA, 3)
        found = accuracy(heads.requires_grad_(False), model, same_logits, f.float(), tokens)[1]
        assert [len(ranks) for ranks in found] == [3, 3, 3]
        heads.accept = [[0.3, 0.2, 0.1]] * 3
        for nodes in (0, 40):
            chunks = medusa(CachedLM(model), [3, 4], nodes=nodes, trained=heads)
            assert tokens_of(chunks, 12) == tokens_of(autoregressive(CachedLM(model), [3, 4]), 12)


@pytest.mark.parametrize("name, config", SCALED.items())
def test_the_loss_is_of_the_models_own_logits(name, config, monkeypatch):
    """Where these are scaled or capped: new heads say what the model says."""
    monkeypatch.setitem(FAMILIES, name, config)
    model = tiny(name)
    heads, ids = Heads(model, "medusa", 1), torch.tensor([[3, 4, 5, 6, 7, 8]])
    curve = fit(model, heads, [([3, 4], [5, 6, 7, 8])], [([3, 4], [5, 6, 7, 8])], steps=0, batch=1,
                lr=1e-2)
    with torch.inference_mode():
        said = model(input_ids=ids, use_cache=False).logits[0, :4].log_softmax(-1)
    labels = torch.tensor([5, 6, 7, 8])  # by the first head, from a position two before each
    expected = -said[torch.arange(4), labels].mean().item()
    assert curve[0]["loss"][0] == pytest.approx(expected, rel=0.05)


def test_typical_options_reach_the_rule(monkeypatch):
    seen, model = [], tiny("llama")
    monkeypatch.setattr(module, "typical_path",
                        lambda *given: seen.append(given[-2:]) or typical_path(*given))
    next(medusa(CachedLM(model), [3, 4], nodes=5, trained=random_heads(model, "medusa"),
                typical=True, epsilon=0.2, delta=0.7))
    assert seen == [(0.2, 0.7)]


@pytest.mark.parametrize("typical", [False, True])
def test_the_log_counts_guesses(typical):
    """Not the root, which is a row, but neither guessed nor accepted."""
    log, model = [], Successor()
    chunks = medusa(CachedLM(model), [5, 7], nodes=4, trained=right_heads(model, "medusa", 0),
                    typical=typical, log=log)
    lengths = [len(chunk) for chunk in itertools.islice(chunks, 3)]
    assert lengths == [4, 4, 4] and log == [{"guessed": 3, "accepted": 3, "rows": 4}] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_rows_beyond_the_tokenizer_are_never_guessed(kind):
    model = tiny("llama")
    f = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    ids = module.grow(random_heads(model, kind), CachedLM(model, 20), f, 3, best_tree(ACCEPT, 16))
    assert len(ids) == 16 and max(ids) < 20


def test_tokens_of_held_out_answers_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "collect_examples", lambda *_, **__: (
        [([9, 9], [7, 7, 7])], [([2, 2], [2] * 9)]))
    train(tiny("llama"), WORDLESS, [[3], [4]], out=tmp_path / "o", steps=1, vocab=2,
          max_new_tokens=9, work=tmp_path)
    assert load_heads(tmp_path / "o", "medusa", tiny("llama")).vocab.tolist() == [7, 9]


def test_what_is_exactly_at_the_threshold_is_not_typical():
    assert typical_path([0, 1], [-1, 0], torch.zeros(2, 2), Sampler(1.0), 0.5, 9.0)[0] == [0]


def test_a_tree_of_128_nodes():
    model = tiny("llama")
    expected = tokens_of(autoregressive(CachedLM(model), [3, 4]), 8)
    heads, log = random_heads(model, "medusa"), []
    heads.accept = [[0.1] * 10] * 3
    chunks = medusa(CachedLM(model), [3, 4], nodes=128, trained=heads, log=log)
    assert tokens_of(chunks, 8) == expected and {r["rows"] for r in log} == {128}


@pytest.mark.parametrize("kind, weights", [("medusa", (0.8, 0.64, 0.512)), ("hydra", (1, 1, 1))])
def test_later_heads_of_medusa_weigh_less(kind, weights):
    model = tiny("llama")
    heads, (f, tokens) = random_heads(model, kind), collect_features(model, DATA, 3)
    losses, _ = accuracy(heads, model, same_logits, f.float(), tokens)
    loss = module.heads_loss(heads, model, same_logits, f.float(), tokens)
    expected = sum(weight * x for weight, x in zip(weights, losses))
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_each_seed_learns_from_positions_of_its_own():
    assert fitted(seed=1)[0] != fitted(seed=0)[0]


def test_options_reach_the_training(tmp_path, monkeypatch):
    seen, options = [], dict(steps=7, batch=3, lr=0.5, seed=9)
    monkeypatch.setattr(training, "collect_answers", lambda *given: [[7, 2, 7, 7]] * 2)
    monkeypatch.setattr(module, "fit", lambda *_, **given: seen.append(given))
    train(tiny("llama"), WORDLESS, [[9, 9, 4], [9, 4, 9]], out=tmp_path / "o", work=tmp_path,
          max_new_tokens=9, **options)
    assert seen == [options | {"work": tmp_path}]


def test_figures_are_of_held_out_answers(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "accuracy", lambda heads, model, own, f, tokens: seen.append(
        tokens.tolist()) or ([0.0] * 2, [[1.0]] * 2))
    fitted()
    assert seen == [collect_features(tiny("llama"), HELD_OUT, 2)[1].tolist()] * 5


# ------------------------------------------------------------------------- the command line

def command(*argv) -> int:
    return main([medusa], module.report, [*map(str, argv), "--device", "cpu"], commands=[train])


def test_train_and_decode_from_the_command_line(tmp_path, capfd):
    out, prompts = tmp_path / "h.safetensors", ("--prompts", ROOT / "models/examples.jsonl")
    assert command("train", *prompts, "--out", out, "--heads", "hydra", "--steps", "2",
                   "--max-new-tokens", "8") == 0
    assert "step 2: held-out loss" in capfd.readouterr().out
    assert command(*prompts, "--heads", "hydra", "--adapter", out, "--max-new-tokens", "8",
                   "--nodes", "5", "--compare") == 0
    err = capfd.readouterr().err
    assert "output equals autoregressive output" in err and "a call: 4.0 guesses" in err
    assert command("--adapter", tmp_path / "none") == 2
    assert "expected a file of medusa heads, got" in capfd.readouterr().err


@pytest.mark.parametrize("kind, least", [("medusa", 2.5), ("hydra", 2.8)])
def test_the_embedded_heads(embedded, held_out, kind, least):
    """Held-out prompts: AR's output, and well over two tokens a call."""
    assert per_call(medusa, embedded[0], held_out, heads=kind, nodes=32) > least
