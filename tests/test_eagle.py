"""EAGLE: a token is one ahead of its feature, right guesses are accepted whole, and trees are those
of a draft without any cache. tests/test_lossless.py checks the output, whatever the draft is."""
import copy
import functools
import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch

from cli.graphs import GraphedLM
from common import InputError, Sampler, autoregressive
from survey.clock import best_tree
from fake_models import path_to
from families import FAMILIES, SCALED, tiny
from helpers import per_call, script, tokens_of
from survey import eagle as module
from survey.eagle import (DEPTH, RANKS, EagleLayer, Pairs, compute_features, count_levels, eagle,
                          eagle_loss, feed, fit, load_draft, measure_acceptance,
                          plan_eagle, save_draft, train)
from training import acceptance
from training import loop as training
from training.layers import FeatureLM

PROMPT = [3, 14, 15]
ACCEPT = [[0.50, 0.42, 0.05], [0.48, 0.31, 0.07], [0.45, 0.28, 0.05], [0.41, 0.21, 0.03]]
llama = functools.cache(lambda: tiny("llama"))


def random_draft(model, mlp=0) -> EagleLayer:
    draft = EagleLayer(model, "last", mlp)  # of a random model, and sometimes right
    draft.accept = ACCEPT
    return draft


def same_logits(x: torch.Tensor) -> torch.Tensor:
    """What most models make of their LM head's output."""
    return x


def test_another_width_of_the_mlp():
    """Refused where no option of the family widens it."""
    shapes = {p.shape for p in EagleLayer(llama(), begin="last", mlp=24).trainable().values()}
    assert torch.Size([24, 32]) in shapes and torch.Size([48, 32]) not in shapes
    for family in ("gpt2", "opt", "qwen3-moe"):
        with pytest.raises(InputError, match="--mlp must be .* that changes the MLP of .*, got 24"):
            EagleLayer(tiny(family), mlp=24)


# ---------------------------------------------------------------------------------- decoding

def test_the_draft_runs_as_the_target_does():
    """With graphs too, at a few widths, and makes the same trees."""
    seen = []
    for run_as in (FeatureLM, GraphedLM):
        model = tiny("llama", vocab_size=20, run_as=run_as)
        target, log, draft = run_as(model), [], random_draft(model)
        seen.append((tokens_of(eagle(target, PROMPT, nodes=12, trained=draft, log=log), 16), log))
        assert type(target.memo[draft, "cached"]) is run_as
    assert seen[0] == seen[1]


LONG = [3 + i * 7 % 50 for i in range(24)]  # two layers with windows of 9 see 17 tokens


@functools.cache
def windowed():
    """A model, and its answer to LONG."""
    model = tiny("mistral", max_position_embeddings=400)
    return model, tokens_of(autoregressive(FeatureLM(model), LONG), 40)


def perfect(vocab) -> EagleLayer:
    """The model itself in place of the draft layer, which reads tokens alone: of a text whose
    first tokens no window reaches any more, all guesses are right."""
    model = copy.deepcopy(windowed()[0])
    draft, e = EagleLayer(model), 32
    draft.lm = model
    draft.fc.weight.data, draft.fc.bias.data = torch.eye(e, 2 * e), torch.zeros(e)
    draft.keep([*vocab])
    draft.lm.get_output_embeddings().weight.data *= 100  # it is sure, so that its tree is a chain
    draft.accept = [[1.0]] * 4
    return draft


def guesses_accepted(vocab, dynamic=False, temperature=0.0) -> list[int]:
    (model, expected), log = windowed(), []
    chunks = eagle(FeatureLM(model), LONG, nodes=5, dynamic=dynamic, trained=perfect(vocab),
                   sample=Sampler(temperature), log=log)
    assert tokens_of(chunks, 40) == expected
    return [r["accepted"] for r in log]


@pytest.mark.parametrize("dynamic, temperature", [(False, 0), (True, 0), (False, 1e-3)])
@pytest.mark.parametrize("few", [False, True])
def test_a_perfect_draft_is_accepted_whole(dynamic, temperature, few):
    """5 tokens a call, of a chain of 4 guesses: a token that were not one ahead of its feature
    would guess what is known already. A draft of few tokens knows them in an order of its own."""
    vocab = sorted({*windowed()[1]}, reverse=True) if few else range(61)
    assert guesses_accepted(vocab, dynamic, temperature) == [4] * 8


def test_a_draft_that_lacks_a_token_is_wrong_there():
    assert min(guesses_accepted(sorted({*windowed()[1]})[1:])) < 4


@functools.cache
@torch.inference_mode()
def features(model, *text) -> torch.Tensor:
    return model.get_decoder()(input_ids=torch.tensor([text]), use_cache=False)[0]


@torch.inference_mode()
def guesses(model, draft, text, path, ranks=3) -> tuple[list[float], list[int]]:
    """(probabilities of the likeliest tokens, these tokens) after the text and the tokens of a path
    in the tree: features of the text and all rows of the draft are computed anew."""
    f = features(model, *text[:-1])  # [1, n, f]
    embed, tokens = model.get_input_embeddings(), text + path
    for n in range(len(text), len(tokens) + 1):  # the last row's feature is guessed
        reads = torch.cat([embed(torch.tensor([tokens[1:n]])), f], -1)
        out = draft.lm.get_decoder()(inputs_embeds=draft.fc(reads), use_cache=False)[0]
        f = torch.cat([f, out[:, -1:]], 1)
    best = draft.lm.get_output_embeddings()(out[0, -1]).softmax(-1).topk(ranks)
    return best.values.tolist(), draft.vocab[best.indices].tolist()


def static(model, draft, text, n) -> list[list[int]]:
    """The paths of the best tree of n nodes."""
    paths = []
    for _, parent, _, rank in best_tree(draft.accept, n):
        above = paths[parent] if paths else []
        paths.append(above + [guesses(model, draft, text, above)[1][rank]] if paths else [])
    return paths


def dynamic(model, draft, text, n, expanded=None) -> list[list[int]]:
    """EAGLE-2: of each level the nodes of the largest product of draft probabilities are expanded,
    10 in a tree of 60 nodes; of all nodes the n of the largest are kept."""
    paths, level = [([], 1.0)], [([], 1.0)]
    for _ in range(DEPTH):
        level = sorted(level, key=lambda x: -x[1])[:expanded or max(1, n // 6)]
        level = [(path + [token], chance * p) for path, chance in level
                 for p, token in zip(*guesses(model, draft, text, path, ranks=5))]
        paths += level
    return [path for path, _ in sorted(paths, key=lambda x: -x[1])[:n]]


@pytest.mark.parametrize("family, reference, n", [
    ("llama", static, 40), ("gpt2", dynamic, 24), ("gemma3", static, 20), ("mistral", dynamic, 20),
    ("opt", static, 20), ("neox", dynamic, 20)])
def test_trees_are_those_without_caches(family, reference, n, monkeypatch):
    """Round by round: a stale row, one of a guess that was kept, or a shifted pair shows here."""
    model, trees, text, log = tiny(family, vocab_size=5), [], [3, 1, 4], []
    draft, target = random_draft(model), FeatureLM(model)
    if family == "opt":
        draft.keep([4, 0, 3])
    nodes = 20 if reference is dynamic else 9  # of each level three nodes get children, or any
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda ids, parents=None, **options: trees.append(
        (ids, parents)) or forward(ids, parents, **options))
    chunks = eagle(target, text, nodes=nodes, dynamic=reference is dynamic, trained=draft, log=log)
    while len(text) < n:
        chunk = next(chunks)
        ids, parents = trees[-1]
        found = {tuple(ids[x] for x in path_to(i, parents)) for i in range(len(ids))}
        assert found == {(text[-1], *path) for path in reference(model, draft, text, nodes)}
        assert len(found) == len(ids) == nodes
        text = text + chunk
    assert len({r["accepted"] for r in log}) > 1


def test_a_prompt_comes_in_parts():
    """The pairs of a long prompt, and of many chunks at once: as one pass over all of them."""
    model, n = windowed()[0], 300
    draft, ids = random_draft(model), [3 + i * 7 % 50 for i in range(n + 1)]
    pairs = Pairs(torch.randn(n, 32, generator=torch.Generator().manual_seed(0)), ids[1:])
    lm = FeatureLM(draft.lm)
    logits = feed(draft, lm, [pairs.part(slice(130)), pairs.part(slice(130, None))])
    with torch.inference_mode():
        [expected] = draft.lm(inputs_embeds=draft.join(*pairs)[None], use_cache=False).logits
    assert lm.length == n and lm.parents == []
    torch.testing.assert_close(logits, expected[-1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_draft_that_overflows_at_some_nodes(dynamic, monkeypatch):
    """What hangs below them comes after them, and the output is autoregressive text."""
    model, forward, rng = llama(), FeatureLM.forward, random.Random(2)
    target, draft = FeatureLM(model), random_draft(model)
    draft.accept = [[0.5, 0.42, 0.05, 0.04, 0.03, 0.02, 0.01]] * 6
    expected = tokens_of(autoregressive(target, PROMPT), 30)

    def broken(lm, *given, **options):
        logits = forward(lm, *given, **options).clone()
        some = [lm.model is draft.lm and rng.random() < 0.3 for _ in logits]
        logits[torch.tensor(some, dtype=torch.bool)] = math.nan
        return logits
    monkeypatch.setattr(FeatureLM, "forward", broken)
    chunks = eagle(target, PROMPT, nodes=64, dynamic=dynamic, trained=draft)
    assert tokens_of(chunks, 30) == expected


# ------------------------------------------------------------------------- the tree that pays

def test_levels_of_a_tree():
    tree = best_tree([[0.9, 0.5], [0.8, 0.1], [0.5]], 6)
    assert [(node.parent, node.depth) for node in tree] == [
        (-1, 0), (0, 1), (1, 2), (0, 1), (3, 2), (2, 3)]
    assert count_levels(tree) == [1, 2, 1] and count_levels(tree[:4]) == [1, 1]
    assert count_levels(tree[:1]) == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_plans_are_trees_of_each_size_and_depth(dynamic, monkeypatch):
    """A plan costs a call of the target, a first pass of a row for each token of a chunk, and
    passes of a row for each node expanded, whose guesses are ranked. A dynamic tree expands at most
    a sixth of its nodes on a level."""
    costs = {"target": [5.0 * n for n in range(65)], "draft": [2.0 + 0.3 * n for n in range(65)]}
    monkeypatch.setattr(module, "row_costs", lambda lm, most: costs[lm])
    monkeypatch.setattr(module.timeit, "repeat", lambda call, **_: [call() and 0.7, 0.1])
    draft = SimpleNamespace(accept=ACCEPT, vocab=torch.arange(20))
    expected = []
    for depth in range(5):
        for n in range(1, 1 + len(best_tree(ACCEPT[:depth], 64))):
            tree = best_tree(ACCEPT[:depth], n)
            tokens, levels = sum(node.chance for node in tree), count_levels(tree)
            if dynamic:
                levels = [1, *[max(1, n // 6)] * (depth - 1)][:depth]
            passes = [math.ceil(tokens), *levels[1:]] if levels else []
            seconds = 5 * n + sum(2.1 + 0.3 * rows for rows in passes)
            expected.append(((n, levels, dynamic), pytest.approx(tokens), pytest.approx(seconds)))
    assert [*plan_eagle(draft, "draft", "target", dynamic)] == expected
    draft.accept = []
    assert [x for x, *_ in plan_eagle(draft, "draft", "target", dynamic)] == [(1, [], dynamic)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_clock_plans_the_trees_that_the_user_wants(dynamic, monkeypatch):
    """Static or dynamic ones. What it chooses is grown."""
    draft, grown, grow = random_draft(llama()), [], module.grow_eagle
    target = FeatureLM(llama())
    monkeypatch.setattr(module, "row_costs",
                        lambda lm, most: [1.0 if lm is target else 0.01] * 65)
    monkeypatch.setattr(module, "grow_eagle",
                        lambda *given: grown.append(given[-1]) or grow(*given))
    for wanted in (dynamic, not dynamic):  # one choice is not taken for the other
        next(eagle(target, PROMPT, dynamic=wanted, trained=draft))
    assert grown == [dynamic, not dynamic]


def test_without_nodes_the_clock_chooses_anew_at_each_call(monkeypatch):
    """The context grows, and a row costs more. What a call without guesses gives is read later."""
    model, log = llama(), []
    target, expected = FeatureLM(model), tokens_of(autoregressive(FeatureLM(model), PROMPT), 20)
    draft = random_draft(model)
    assert tokens_of(eagle(target, PROMPT, trained=draft), 20) == expected
    plans = itertools.cycle([(1, [], False), (7, count_levels(best_tree(ACCEPT, 7)), False)])
    monkeypatch.setattr(module, "fastest", lambda *_: next(plans))
    assert tokens_of(eagle(target, PROMPT, trained=draft, log=log), 20) == expected
    assert [r["guessed"] for r in log][:4] == [0, 6, 0, 6]


# ------------------------------------------------------------------------------------ training

DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3, 30], [4, 4, 2, 11, 17, 40]), ([7], [5, 2])]
HELD_OUT = [([50, 51], [52, 53, 54])]
FIT = dict(steps=5, batch=2, lr=1e-2)


def test_texts_are_learnt_from_with_their_features():
    model = llama()
    for (prompt, answer), (ids, f, n) in zip(DATA, compute_features(model, DATA), strict=True):
        assert ids.tolist() == prompt + answer and n == len(prompt)
        expected = features(model, *prompt, *answer)[0]
        assert (f - expected).norm() < 0.01 * expected.norm()  # kept in bfloat16


def loss_by_hand(model, draft, texts):
    """Row by row, without padding: SmoothL1 of each row that guesses a token of the answer, and the
    cross-entropy of its guess."""
    regression, classes, embed = [], [], model.get_input_embeddings()
    for ids, f, n in texts:
        f = f.float()
        rows = torch.stack([draft.fc(torch.cat([embed(ids[i + 1]), f[i]]))
                            for i in range(len(ids) - 1)])
        out = draft.lm.get_decoder()(inputs_embeds=rows[None], use_cache=False)[0][0]
        for i in range(len(ids) - 2):
            if i + 2 >= n:  # token i + 2 is one of the answer
                error = (out[i] - f[i + 1]).abs()
                regression.append(torch.where(error < 1, error ** 2 / 2, error - 0.5).mean())
                p, q = (model.get_output_embeddings()(x).softmax(-1) for x in (f[i + 1], out[i]))
                classes.append(-(p * q.log()).sum())
    return sum(regression) / len(regression), sum(classes) / len(classes), len(classes)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_the_loss_by_hand(family, monkeypatch):
    """Of a padded batch, without noise. Only the draft gets gradients."""
    model = tiny(family).requires_grad_(False)
    draft, texts = EagleLayer(model), [*compute_features(model, DATA)]
    monkeypatch.setattr(module, "NOISE", 0)
    found = eagle_loss(draft, same_logits, texts, torch.Generator())
    regression, classes, n = loss_by_hand(model, draft, texts)
    torch.testing.assert_close(found, regression + 0.1 * classes, atol=1e-4, rtol=1e-4)
    assert n == 4 + 6 + 1
    found.backward()
    assert all(p.grad is not None for p in draft.trainable().values())
    assert all(p.grad is None for p in model.parameters())


def test_the_cross_entropy_is_of_sampled_rows(monkeypatch):
    draft, texts = EagleLayer(llama()), [*compute_features(llama(), DATA)]
    monkeypatch.setattr(module, "NOISE", 0)
    monkeypatch.setattr(module, "SAMPLED", 1)  # a row of 11
    rngs = (torch.Generator().manual_seed(i) for i in range(40))
    losses = {round(eagle_loss(draft, same_logits, texts, rng).item(), 4) for rng in rngs}
    assert len(losses) > 5


def test_noise_on_input_features_alone(monkeypatch):
    """Uniform, at most 0.1. The features that are learnt have none."""
    draft, [text], read, learnt = EagleLayer(llama()), compute_features(llama(), DATA[:1]), [], []
    join, loss = EagleLayer.join, torch.nn.functional.smooth_l1_loss
    monkeypatch.setattr(EagleLayer, "join",
                        lambda self, f, tokens: read.append(f) or join(self, f, tokens))
    monkeypatch.setattr(torch.nn.functional, "smooth_l1_loss", lambda guessed, features:
                        learnt.append(features) or loss(guessed, features))
    eagle_loss(draft, same_logits, [text], torch.Generator())
    noise = read[0][0] - text[1][:-2]
    assert 0.095 < noise.max() <= 0.1 and -0.1 <= noise.min() < -0.095 and abs(noise.mean()) < 0.02
    assert torch.equal(learnt[0], text[1][1:-1].float())


@pytest.mark.parametrize("vocab", [range(11), [10, 3, 0, 5, 4, 8, 2]], ids=len)
def test_acceptance_by_hand(vocab):
    """True rows up to a place, then n rows of guessed features and true tokens, all computed anew.
    A guess counts where the likeliest guesses above it are right."""
    model, rng = tiny("llama", vocab_size=11), random.Random(0)
    data = [([rng.randrange(11) for _ in range(n)], [rng.randrange(11) for _ in range(m)])
            for n, m in ((4, 9), (1, 3), (3, 5))]
    draft, right, total = EagleLayer(model), torch.zeros(DEPTH, 11), torch.zeros(DEPTH, 1)
    draft.keep([*vocab])
    for prompt, answer in data:
        text = prompt + answer
        for end in range(max(2, len(prompt)), len(text)):  # the first token that is guessed
            for d in range(min(DEPTH, len(text) - end)):
                _, ranked = guesses(model, draft, text[:end], text[end:end + d], len(vocab))
                total[d] += 1
                if text[end + d] in vocab:
                    right[d, ranked.index(text[end + d])] += 1
                if text[end + d] != ranked[0]:
                    break
    found = torch.tensor(measure_acceptance(draft, [
        (torch.tensor(p + a), features(model, *p, *a)[0], len(p)) for p, a in data]))
    expected = (right / total.clamp(min=1))[:, :min(RANKS, len(vocab))]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_training_lowers_the_loss_and_reaches_nothing_else():
    model, rng = tiny("llama"), random.Random(0)
    data = [([rng.randrange(61) for _ in range(3)], [rng.randrange(61) for _ in range(6)])
            for _ in range(4)]
    before = {name: p.clone() for name, p in model.named_parameters()}
    draft, texts = EagleLayer(model), [*compute_features(model, data)]

    def loss():
        with torch.no_grad():
            return eagle_loss(draft, same_logits, texts, torch.Generator()).item()
    start = loss()
    fit(model, draft, data, data[:1], steps=20, batch=4, lr=1e-2)
    assert loss() < 0.6 * start
    assert all(torch.equal(p, before[name]) and p.grad is None
               for name, p in model.named_parameters())


def test_held_out_answers_are_measured_and_never_learnt_from(monkeypatch):
    learnt, measured, loss = [], [], eagle_loss
    monkeypatch.setattr(module, "eagle_loss", lambda *given: learnt.extend(given[2])
                        or loss(*given))
    monkeypatch.setattr(acceptance, "measure_acceptance", lambda draft, texts: measured.append(
        [ids.tolist() for ids, *_ in texts]) or ACCEPT)
    draft = EagleLayer(llama())
    fit(llama(), draft, DATA, HELD_OUT, **FIT | dict(steps=9))
    assert {tuple(ids.tolist()) for ids, *_ in learnt} == {(*p, *a) for p, a in DATA}
    assert measured == [[p + a for p, a in HELD_OUT]] * 10 and draft.accept == ACCEPT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_targets_in_half_precision_can_be_learned_from(family, dtype):
    model = tiny(family).to(dtype)
    draft = EagleLayer(model)
    fit(model, draft, DATA, HELD_OUT, **FIT | {"steps": 1})
    assert all(p.isfinite().all() for p in draft.trainable().values())


@pytest.mark.parametrize("family, begin, scaled", [
    ("llama", "random", True), ("llama", "last", False),
    ("gemma3", "random", True)])  # its embedding is √d times its weights
def test_tokens_and_features_are_as_large_at_first(family, begin, scaled):
    """Random weights of the embedding are scaled."""
    model, ids = tiny(family), sum(DATA[0], [])
    draft = EagleLayer(model, begin)
    expected = draft.fc.weight.detach().clone()
    if scaled:
        read = model.get_input_embeddings()(torch.tensor(ids)).std()
        expected[:, :32] *= features(model, *ids)[0].std() / read
    fit(model, draft, DATA[:1], HELD_OUT, **FIT | {"steps": 0})
    torch.testing.assert_close(draft.fc.weight, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name, config", SCALED.items())
def test_training_is_on_the_models_own_distribution(name, config, monkeypatch):
    """Of logits that are scaled or capped: soft targets are what the model says."""
    monkeypatch.setitem(FAMILIES, name, config)
    model, seen = tiny(name), []
    draft, cross_entropy = EagleLayer(model, begin="last"), torch.nn.functional.cross_entropy
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda q, p, **options: seen.append(
        (q, p)) or cross_entropy(q, p, **options))
    ids = torch.tensor([DATA[1][0] + DATA[1][1]])
    fit(model, draft, DATA[1:2], HELD_OUT, **FIT | {"steps": 1})
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits[0].softmax(-1)[2:-1]
    [(q, p)] = seen
    assert p.shape == q.shape == expected.shape
    nearest = (p[:, None] - expected).abs().sum(-1).min(1).values  # in any order
    assert nearest.max() < 0.05 and (p.argmax(-1)[:, None] == expected.argmax(-1)).any(1).all()


def test_answers_of_a_step_are_alike_in_length(monkeypatch):
    rows, steps, draft = [([3] * n, [5, 7]) for n in range(1, 31)], [], EagleLayer(llama())

    def spy(draft, to_logits, some, rng):
        steps.append(sorted(n for _, _, n in some))
        return draft.fc.bias.sum()
    monkeypatch.setattr(module, "eagle_loss", spy)
    fit(llama(), draft, rows, HELD_OUT, steps=80, batch=4, lr=1e-2)
    assert {len(some) for some in steps} == {4}
    assert sum(some[-1] - some[0] for some in steps) / 80 < 11  # any four: 19


def test_each_value_of_a_gradient_is_cut(monkeypatch):
    largest, loss, step = [], eagle_loss, torch.optim.AdamW.step

    def spy(self):
        largest.append(max(p.grad.abs().max().item() for p in self.param_groups[0]["params"]))
        step(self)
    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    monkeypatch.setattr(module, "eagle_loss", lambda *given: 1000 * loss(*given))
    fit(llama(), EagleLayer(llama()), DATA, HELD_OUT, **FIT)
    assert largest == [0.5] * 5


def test_train_makes_the_draft_that_was_asked_for(tmp_path, monkeypatch):
    """With the most frequent tokens of prompts and answers, held-out ones aside. At most 50 answers
    are held out."""
    model, asked, seen = llama(), [], []
    data, held_out = [([9, 9], [7, 7, 7])], [([2, 2], [2] * 9)]
    options = dict(steps=7, batch=3, lr=0.5, seed=9)
    monkeypatch.setattr(training, "collect_examples", lambda *_, **given: asked.append(given) or (
        data, held_out))
    monkeypatch.setattr(module, "fit", lambda model, draft, *given, **named: seen.append(
        (draft, given, named)))
    train(model, None, [[3], [4]], out=tmp_path / "o", begin="last", mlp=24, vocab=2,
          work=tmp_path, **options)
    [(draft, given, named)] = seen
    assert (draft.begin, draft.mlp) == ("last", 24)
    assert torch.equal(draft.fc.weight, EagleLayer(model, mlp=24, seed=9).fc.weight)
    assert draft.vocab.tolist() == [7, 9]
    assert given == (data, held_out) and named == options | {"work": tmp_path}
    assert asked == [{"seed": 9, "most": 50}]


# ------------------------------------------------------------------------- files of draft layers

@pytest.mark.parametrize("dtype, later, mlp, vocab", [
    (torch.float32, torch.bfloat16, 24, [9, 2, 60]), (torch.bfloat16, torch.float32, 0, range(61))])
def test_a_file_belongs_to_its_model(dtype, later, mlp, vocab, tmp_path):
    """Whatever types the model is loaded in, when the layer is trained and later."""
    path, model = tmp_path / "d.safetensors", tiny("llama").to(dtype)
    draft = random_draft(model, mlp)
    draft.keep([*vocab])
    save_draft(path, draft, model)
    loaded = load_draft(str(path), model.to(later))
    assert (loaded.mlp, loaded.accept) == (mlp, ACCEPT)
    assert torch.equal(loaded.vocab, draft.vocab)
    heads = [x.lm.get_output_embeddings().weight.float() for x in (loaded, draft)]
    torch.testing.assert_close(*heads, atol=1e-3, rtol=1e-2)
    for name, p in draft.trainable().items():
        assert loaded.trainable()[name].dtype == later
        torch.testing.assert_close(loaded.trainable()[name].float(), p, atol=1e-3, rtol=1e-2)
    assert next(eagle(FeatureLM(model), PROMPT, nodes=5, adapter=str(path)))
    with pytest.raises(InputError, match="an EAGLE layer for this model, got .* another's"):
        load_draft(str(path), tiny("llama", seed=3))


@pytest.mark.parametrize("family, changes", [("qwen2", {}), ("llama", dict(head_dim=16)),
                                             ("gpt2", {}), ("llama", dict(intermediate_size=40))])
def test_another_layer_on_the_same_embeddings_is_refused(family, changes, tmp_path):
    path, like = tmp_path / "d.safetensors", tiny(family, **changes)
    save_draft(path, EagleLayer(llama()), llama())
    like.get_input_embeddings().weight.data.copy_(llama().get_input_embeddings().weight)
    with pytest.raises(InputError, match="expected tensors"):
        load_draft(str(path), like)


# ---------------------------------------------------- the command line, the embedded draft layer

@pytest.mark.parametrize("options, decoding, said", [
    ([], ["--nodes", "6", "--compare"], "output equals autoregressive output"),
    (["--dtype", "bfloat16", "--vocab", "12"],
     ["--nodes", "6", "--no-dynamic", "--dtype", "bfloat16"], "tokens per call")], ids=len)
def test_train_and_decode_from_the_command_line(options, decoding, said, small_llama, tmp_path,
                                                capfd):
    (tmp_path / "prompts").write_text("How many cats?\nHow many dogs are there?\n")
    out = str(tmp_path / "o")
    argv = ["--target", small_llama, "--device", "cpu", "--max-new-tokens", "8", "--prompts",
            str(tmp_path / "prompts")]
    training = ["--steps", "2", "--batch", "2", "--out", out]
    assert script("survey.eagle", "train", *argv, *training, *options) == 0
    text = capfd.readouterr().out
    said_of_training = ("step 2: held-out acceptance", "trained numbers", "1 answers of")
    assert all(words in text for words in said_of_training)
    assert script("survey.eagle", *argv, "--adapter", out, *decoding) == 0
    err = capfd.readouterr().err
    assert said in err and "a round: 5.0 guesses" in err


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_embedded_draft_layer(embedded, held_out, dynamic):
    """Held-out prompts: autoregressive text, and many tokens a call."""
    assert per_call(eagle, embedded[0], held_out[::3], nodes=16, dynamic=dynamic) > 3.5
