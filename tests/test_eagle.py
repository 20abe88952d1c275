"""EAGLE: the model's own output whatever the draft layer is; a token is one ahead of its feature;
trees are those of a draft without any cache; training starts over where it must or goes on."""
import copy
import functools
import itertools
import json
import math
import random
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from cli.graphs import GraphedLM
from common import CachedLM, InputError, Sampler, autoregressive, best_tree, encode
from fake_models import path_to
from families import FAMILIES, MORE_FAMILIES, SCALED, tiny
from helpers import ROOT, interrupting, main, said_in_one_line, tokens_of
from models import training
from survey import eagle as module
from survey.eagle import (DEPTH, RANKS, Draft, Pairs, compute_features, count_levels, eagle,
                          eagle_loss, feed, fit, load_draft, measure_acceptance, plan_trees,
                          save_draft, train)

PROMPT = [3, 14, 15]
ACCEPT = [[0.50, 0.42, 0.05], [0.48, 0.31, 0.07], [0.45, 0.28, 0.05], [0.41, 0.21, 0.03]]
CHAIN = [[1.0]] * 4
WORDLESS = SimpleNamespace(eos_token_id=None)  # a tokenizer, as far as needed


def random_draft(model, inputs="shifted", accept=ACCEPT, mlp=0) -> Draft:
    draft = Draft(model, inputs, "last", mlp)  # of a random model, and sometimes right
    draft.accept = accept
    return draft


def same_logits(x: torch.Tensor) -> torch.Tensor:
    """What most models make of their LM head's output."""
    return x


def test_another_width_of_the_mlp():
    """Refused where no option of the family widens it."""
    for family in ("gpt2", "opt", "qwen3-moe"):
        with pytest.raises(InputError, match="--mlp must be .* that changes the MLP of .*, got 24"):
            Draft(tiny(family), mlp=24)
    shapes = {p.shape for p in Draft(tiny("llama"), begin="last", mlp=24).trainable().values()}
    assert torch.Size([24, 32]) in shapes and torch.Size([48, 32]) not in shapes


# ---------------------------------------------------------------------------------- decoding

@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_peculiar_families(family):
    model = tiny(family)
    target, draft = CachedLM(model), random_draft(model)
    expected = tokens_of(autoregressive(target, PROMPT), 8)
    assert tokens_of(eagle(target, PROMPT, nodes=8, trained=draft), 8) == expected


def test_static_shapes():
    """The draft runs as the target does: with graphs at a few widths, and makes the same trees."""
    seen = []
    for run_as in (CachedLM, GraphedLM):
        model = tiny("llama", vocab_size=20, run_as=run_as)
        target, log, draft = run_as(model), [], random_draft(model)
        seen.append((tokens_of(eagle(target, PROMPT, nodes=12, trained=draft, log=log), 16), log))
        assert type(target.memo[draft, "cached"]) is run_as
    assert seen[0] == seen[1]


def perfect(model) -> Draft:
    """The model itself in place of the draft layer, which reads tokens alone: of a text whose
    first tokens no window reaches any more, all guesses are right."""
    draft = Draft(model, "token")
    draft.lm, e = model, draft.fc.weight.shape[0]
    draft.fc.weight.data, draft.fc.bias.data = torch.eye(e), torch.zeros(e)
    return draft


LONG = [3 + i * 7 % 50 for i in range(24)]  # two layers with windows of 9 see 17 tokens


def test_a_perfect_draft_is_accepted_whole():
    """Greedy and sampled from nearly one token: 5 of a chain of 4 and one more. A token that were
    not one ahead of its feature would guess what is known already."""
    model = tiny("mistral", max_position_embeddings=400)
    target, draft = CachedLM(model), perfect(model)
    draft.accept, expected = CHAIN, tokens_of(autoregressive(target, LONG), 60)
    for dynamic, sample in ((False, Sampler(0)), (True, Sampler(0)), (False, Sampler(1e-3))):
        log = []
        chunks = eagle(target, LONG, nodes=5, dynamic=dynamic, trained=draft, sample=sample,
                       log=log)
        assert tokens_of(chunks, 60) == expected
        assert len(log) == 12 and all(r["accepted"] == 4 for r in log), dynamic


def test_a_draft_of_few_tokens_guesses_those():
    """A perfect one that knows the answer's tokens, in an order of its own, is accepted whole; one
    that lacks a token is wrong there, and the text is the model's all the same."""
    model = tiny("mistral", max_position_embeddings=400)
    target, accepted = CachedLM(model), []
    expected = tokens_of(autoregressive(target, LONG), 60)
    known = sorted({*expected}, reverse=True)
    for vocab, dynamic in ((known, False), (known, True), (known[:-1], True)):
        log, draft = [], perfect(copy.deepcopy(model))
        draft.keep(vocab)
        draft.accept = [row[:len(vocab)] for row in CHAIN]
        chunks = eagle(target, LONG, nodes=5, dynamic=dynamic, trained=draft, log=log)
        assert tokens_of(chunks, 60) == expected
        accepted.append(sum(r["accepted"] for r in log) / len(log))
    assert accepted[:2] == [4, 4] and accepted[2] < 4


# ------------------------------------------------------------------- without caches, from scratch

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
        known, after = embed(torch.tensor([tokens[:n - 1]])), embed(torch.tensor([tokens[1:n]]))
        reads = {"shifted": [after, f], "unshifted": [known, f], "feature": [f],
                 "token": [after]}[draft.inputs]
        out = draft.lm.get_decoder()(inputs_embeds=draft.fc(torch.cat(reads, -1)),
                                     use_cache=False)[0]
        f = torch.cat([f, out[:, -1:]], 1)
    best = draft.lm.get_output_embeddings()(out[0, -1]).softmax(-1).topk(ranks)
    return best.values.tolist(), draft.vocab[best.indices].tolist()


def static(model, draft, text, n) -> list[tuple[list[int], float]]:
    """The paths and chances of the best tree of n nodes."""
    paths = []
    for chance, parent, _, rank in best_tree(draft.accept, n):
        path = paths[parent][0] if paths else []
        paths.append((path + [guesses(model, draft, text, path)[1][rank]] if paths else [], chance))
    return paths


def dynamic(model, draft, text, n) -> list[tuple[list[int], float]]:
    """EAGLE-2: of each level the nodes of the largest product of draft probabilities are expanded;
    of all nodes the n of the largest are kept."""
    paths, level = [([], 1.0)], [([], 1.0)]
    for expanded in count_levels(best_tree(draft.accept, n)):
        level = sorted(level, key=lambda x: -x[1])[:expanded]
        level = [(path + [token], chance * p) for path, chance in level
                 for p, token in zip(*guesses(model, draft, text, path))]
        paths += level
    return sorted(paths, key=lambda x: -x[1])[:n]


@pytest.mark.parametrize("family, inputs, reference, n", [
    ("llama", "shifted", static, 103), ("gpt2", "shifted", dynamic, 24),
    ("gemma3", "unshifted", static, 20), ("mistral", "feature", dynamic, 20),
    ("opt", "token", static, 20), ("neox", "shifted", dynamic, 20)])
def test_trees_are_those_without_caches(family, inputs, reference, n, monkeypatch):
    """Round by round: a stale row, one of a guess that was kept, or a shifted pair shows here."""
    model, trees, text, log = tiny(family, vocab_size=5), [], [3, 1, 4], []
    draft, target = random_draft(model, inputs), CachedLM(model)
    if inputs == "token":
        draft.keep([4, 0, 3])
    forward = target.forward

    def spy(ids, parents=None, **options):
        trees.append((ids, parents))
        return forward(ids, parents, **options)
    target.forward = spy
    chunks = eagle(target, text, nodes=9, dynamic=reference is dynamic, trained=draft, log=log)
    while len(text) < n:
        trees.clear()
        chunk = next(chunks)
        ids, parents = trees[-1]
        got = {tuple(ids[x] for x in path_to(i, parents)) for i in range(len(ids))}
        expected = reference(model, draft, text, 9)
        assert got == {(text[-1], *path) for path, _ in expected} and len(got) == len(ids) == 9
        text = text + chunk
    assert len({r["accepted"] for r in log}) > 1


# ------------------------------------------------------------------------- the tree that pays

def test_levels_of():
    tree = best_tree([[0.9, 0.5], [0.8, 0.1], [0.5]], 6)
    assert [(node.parent, node.depth) for node in tree] == [
        (-1, 0), (0, 1), (1, 2), (0, 1), (3, 2), (2, 3)]
    assert count_levels(tree) == [1, 2, 1] and count_levels(tree[:4]) == [1, 1]
    assert count_levels(tree[:1]) == []


def test_the_tree_that_pays(monkeypatch):
    """Against all trees, by hand, at costs that make rows of the target or passes dear."""
    costs, draft = {}, SimpleNamespace(accept=ACCEPT)
    monkeypatch.setattr(module, "row_costs", lambda lm, most: costs[lm])

    def plan():
        return max(plan_trees(draft, "draft", "target"), key=lambda x: x[1] / x[2])[0]
    cases = [(1, 0, 1, 0), (1, 1, 0, 0), (1, 0.01, 0.2, 0), (1, 0.05, 0.01, 0.02),
             (1, 0.01, 0.01, 0.1), (1, 0, 0.05, 0.05), (1, 0.02, 0, 0.2), (1, 0, 0, 0)]
    for target, target_row, own, own_row in cases:
        costs["target"] = [target + n * target_row for n in range(65)]
        costs["draft"] = [own + n * own_row for n in range(65)]
        speeds = {}
        for depth, n in itertools.product(range(5), range(1, 65)):
            tree = best_tree(ACCEPT[:depth], n)
            tokens, levels = sum(node.chance for node in tree), count_levels(tree)
            passes = [math.ceil(tokens), *levels[1:]] if levels else []
            seconds = costs["target"][len(tree)] + sum(costs["draft"][rows] for rows in passes)
            speeds[len(tree), tuple(levels)] = tokens / seconds
        n, levels = plan()
        assert speeds[n, tuple(levels)] == max(speeds.values())
    assert (n, levels) == (64, count_levels(best_tree(ACCEPT, 64)))  # all is free
    draft.accept = []
    assert plan() == (1, [])


def test_costs_are_measured_once_for_all_prompts(monkeypatch):
    """And the draft is loaded once; another target has its own."""
    model = tiny("llama")
    draft, target = random_draft(model), CachedLM(model)
    loads, measured = [], []
    monkeypatch.setattr(module, "load_draft", lambda *given: loads.append(given) or draft)
    costs = module.row_costs
    monkeypatch.setattr(module, "row_costs", lambda lm, n: measured.append(n) or costs(lm, n))
    for prompt in (PROMPT, [9, 9, 9, 4]):
        chunks = eagle(target, prompt, adapter="file")
        expected = tokens_of(autoregressive(CachedLM(model), prompt), 20)
        assert tokens_of(chunks, 20) == expected
    assert loads == [("file", model)] and measured == [64, 64]
    assert target.setup_seconds > 0
    next(eagle(CachedLM(model), PROMPT, adapter="file"))
    assert len(loads) == 2 and len(measured) == 4


def test_a_prompt_comes_in_parts():
    """The pairs of a long prompt, and of many chunks at once: as one pass over all of them."""
    model = tiny("mistral", max_position_embeddings=400)
    draft, n = random_draft(model), 300
    ids = [3 + i * 7 % 50 for i in range(n + 1)]
    features = torch.randn(n, 32, generator=torch.Generator().manual_seed(0))
    pairs = Pairs(ids[:-1], features, ids[1:])
    lm = CachedLM(draft.lm)
    logits = feed(draft, lm, [pairs.part(slice(130)), pairs.part(slice(130, None))])
    with torch.inference_mode():
        [expected] = draft.lm(inputs_embeds=draft.join(pairs)[None], use_cache=False).logits
    assert lm.length == n and lm.parents == []
    torch.testing.assert_close(logits, expected[-1:], atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------ training

DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3, 30], [4, 4, 2, 11, 17, 40]), ([7], [5, 2])]


def test_features_are_what_the_head_reads(family):
    model = tiny(family)
    for (prompt, answer), (ids, f, n) in zip(DATA, compute_features(model, DATA)):
        assert ids.tolist() == prompt + answer and n == len(prompt)
        with torch.inference_mode():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            again = model.get_output_embeddings()(f.float())
        scale = logits.abs().max()
        assert (again - logits).abs().max() < 0.02 * scale  # kept in bfloat16


def loss_by_hand(model, draft, texts):
    """Row by row, without padding: SmoothL1 and cross-entropy of each row that guesses a token of
    the answer."""
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


def test_noise_on_input_features_alone(monkeypatch):
    """Uniform, at most 0.1."""
    model, seen = tiny("llama"), []
    draft, texts, rows = Draft(model), [*compute_features(model, DATA[:1])], Draft.join
    monkeypatch.setattr(Draft, "join", lambda self, x: seen.append(x.features) or rows(self, x))
    eagle_loss(draft, same_logits, texts, torch.Generator())
    noise = seen[0][0] - texts[0][1][:-2]
    assert 0.095 < noise.max() <= 0.1 and -0.1 <= noise.min() < -0.095 and abs(noise.mean()) < 0.02


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_the_loss_by_hand(family, monkeypatch):
    """Of a padded batch, without noise; no gradient but the draft's."""
    model = tiny(family).requires_grad_(False)
    draft, texts = Draft(model), [*compute_features(model, DATA)]
    monkeypatch.setattr(module, "NOISE", 0)
    loss = eagle_loss(draft, same_logits, texts, torch.Generator())
    regression, classes, n = loss_by_hand(model, draft, texts)
    torch.testing.assert_close(loss, regression + 0.1 * classes, atol=1e-4, rtol=1e-4)
    assert n == 4 + 6 + 1
    loss.backward()
    assert all(p.grad is not None for p in draft.trainable().values())
    assert all(p.grad is None for p in model.parameters())
    monkeypatch.setattr(module, "SAMPLED", 1)  # a row of 11
    rngs = (torch.Generator().manual_seed(i) for i in range(40))
    sampled = {round(eagle_loss(draft, same_logits, texts, rng).item(), 4) for rng in rngs}
    assert len(sampled) > 5


def test_acceptance_by_hand():
    """n-α from its definition: true rows up to a place, then n rows of guessed features and true
    tokens, all computed anew."""
    model, rng = tiny("llama", vocab_size=11), random.Random(0)
    data = [([rng.randrange(11) for _ in range(n)], [rng.randrange(11) for _ in range(m)])
            for n, m in ((4, 9), (1, 3), (3, 5))]
    for inputs, vocab in (("shifted", range(11)), ("unshifted", [10, 3, 0, 5, 4, 8, 2])):
        draft, right, total = Draft(model, inputs), torch.zeros(DEPTH, 11), torch.zeros(DEPTH, 1)
        draft.keep([*vocab])
        for prompt, answer in data:
            text = prompt + answer
            for end in range(max(2, len(prompt)), len(text)):  # the first token that is guessed
                for d in range(min(DEPTH, len(text) - end)):
                    _, ranked = guesses(model, draft, text[:end], text[end:end + d], len(vocab))
                    if text[end + d] in vocab:
                        right[d, ranked.index(text[end + d])] += 1
                    total[d] += 1
        found = torch.tensor(measure_acceptance(draft, [
            (torch.tensor(p + a), features(model, *p, *a)[0], len(p)) for p, a in data]))
        expected = (right / total)[:, :min(RANKS, len(vocab))]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


# ------------------------------------------------------------------ what is kept, and for whom

HELD_OUT = [([50, 51], [52, 53, 54])]
FIT = dict(steps=5, batch=2, lr=1e-2, seed=0)


llama = functools.cache(lambda seed: tiny("llama", seed=seed))


def fitted(work=None, model=0, data=DATA, inputs="shifted", begin="random", mlp=0,
           vocab=range(61), **options) -> dict:
    """What was trained, and the acceptance that was measured."""
    model = llama(model)
    draft = Draft(model, inputs, begin, mlp)
    draft.keep([*vocab])
    fit(model, draft, data, HELD_OUT, work=work, **FIT | options)
    return draft.trainable() | {"accept": torch.tensor(draft.accept)}


whole = functools.cache(fitted)


def test_training_lowers_the_loss_and_reaches_nothing_else():
    model, rng = tiny("llama"), random.Random(0)
    data = [([rng.randrange(61) for _ in range(3)], [rng.randrange(61) for _ in range(6)])
            for _ in range(4)]
    before = {name: p.clone() for name, p in model.named_parameters()}
    draft, texts = Draft(model), [*compute_features(model, data)]

    def loss():
        with torch.no_grad():
            return eagle_loss(draft, same_logits, texts, torch.Generator()).item()
    start = loss()
    fit(model, draft, data, data[:1], steps=20, batch=4, lr=1e-2)
    assert loss() < 0.6 * start
    assert all(torch.equal(p, before[name]) and p.grad is None
               for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_targets_in_half_precision_can_be_learned_from(dtype):
    for family in ("llama", "gemma3", "gpt2"):
        model = tiny(family).to(dtype)
        draft = Draft(model)
        fit(model, draft, DATA, HELD_OUT, **FIT | {"steps": 1})
        assert all(p.isfinite().all() for p in draft.trainable().values())


def test_tokens_and_features_are_as_large_at_first():
    """Random weights of the embedding are scaled, where there is a feature too; the others not."""
    model, data = llama(0), DATA[:1]
    size = features(model, *sum(data[0], []))[0].to(torch.bfloat16).float().std()
    ratio = size / model.get_input_embeddings()(torch.tensor(sum(data[0], []))).std()
    for inputs, begin, expected in (("shifted", "random", ratio), ("unshifted", "random", ratio),
                                    ("token", "random", 1), ("feature", "random", 1),
                                    ("shifted", "last", 1)):
        found = fitted(data=data, inputs=inputs, begin=begin, steps=0)["fc.weight"]
        fresh = Draft(model, inputs, begin).fc.weight
        torch.testing.assert_close(found[:, :32], fresh[:, :32] * expected)
        assert torch.equal(found[:, 32:], fresh[:, 32:])


def test_a_scaled_embedding_counts_as_it_is_read():
    """Gemma's is √d times its weights."""
    model, data = tiny("gemma3"), DATA[:1]
    draft = Draft(model)
    fresh = draft.fc.weight.detach().clone()
    fit(model, draft, data, HELD_OUT, **FIT | {"steps": 0})
    read = model.get_input_embeddings()(torch.tensor(sum(data[0], []))).std()
    weights = model.get_input_embeddings().weight[sum(data[0], [])].std()
    size = compute_features(model, data)[0][1].float().std()
    assert read / weights == pytest.approx(32 ** 0.5, rel=1e-3)
    torch.testing.assert_close(draft.fc.weight[:, :32], fresh[:, :32] * size / read)


@pytest.mark.parametrize("name, config", SCALED.items())
def test_training_is_on_the_models_own_distribution(name, config, monkeypatch):
    """Of logits that are scaled or capped: soft targets are what the model says."""
    monkeypatch.setitem(FAMILIES, name, config)
    model, seen = tiny(name), []
    draft, cross_entropy = Draft(model, begin="last"), torch.nn.functional.cross_entropy
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
    """All are learnt from, in each step from as many as were asked for."""
    rows, steps = [([3] * n, [5, 7]) for n in range(1, 31)], []

    def spy(draft, to_logits, some, rng):
        steps.append(sorted(n for _, _, n in some))
        return sum(p.sum() for p in draft.trainable().values())
    monkeypatch.setattr(module, "eagle_loss", spy)
    for batch in (4, 8):
        steps.clear()
        fitted(data=rows, steps=80, batch=batch)
        assert {len(some) for some in steps} == {batch} and {*sum(steps, [])} == {*range(1, 31)}
        assert sum(some[-1] - some[0] for some in steps) / 80 < 11  # any four: 19, any eight: 24


def test_gradients_are_clipped_and_the_rate_is_a_cosine(monkeypatch):
    rates, most = [], []

    class Spy(torch.optim.AdamW):
        def step(self):
            [group] = self.param_groups
            rates.append(group["lr"])
            most.append(max(p.grad.abs().max().item() for p in group["params"]))
            super().step()
    monkeypatch.setattr(torch.optim, "AdamW", Spy)
    loss = eagle_loss
    monkeypatch.setattr(module, "eagle_loss", lambda *given: 1000 * loss(*given))
    fitted(steps=3)
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.25e-2]) and max(most) == 0.5


# ------------------------------------------------------------------------- files of draft layers

def test_a_file_belongs_to_its_model(tmp_path):
    """Whatever types the model is loaded in, when the layer is trained and later."""
    path, other, dtypes = tmp_path / "d.safetensors", tiny("llama", seed=3), (torch.float32,
                                                                              torch.bfloat16)
    for dtype, later, mlp in zip(dtypes, dtypes[::-1], (24, 0)):
        model = tiny("llama").to(dtype)
        draft = random_draft(model, "unshifted", mlp=mlp)
        if mlp:
            draft.keep([9, 2, 60])
        save_draft(path, draft, model)
        loaded = load_draft(str(path), model.to(later))
        assert (loaded.inputs, loaded.mlp, loaded.accept) == ("unshifted", mlp, ACCEPT)
        assert torch.equal(loaded.vocab, draft.vocab)
        heads = [x.lm.get_output_embeddings().weight.float() for x in (loaded, draft)]
        torch.testing.assert_close(*heads, atol=1e-3, rtol=1e-2)
        for name, p in draft.trainable().items():
            assert loaded.trainable()[name].dtype == later
            torch.testing.assert_close(loaded.trainable()[name].float(), p, atol=1e-3, rtol=1e-2)
        assert next(eagle(CachedLM(model), PROMPT, nodes=5, adapter=str(path)))
        with pytest.raises(InputError, match="an EAGLE layer for this model, got .* another's"):
            load_draft(str(path), other.to(later))
    for family, options in (("qwen2", {}), ("llama", dict(head_dim=16)), ("gpt2", {}),
                            ("llama", dict(intermediate_size=40))):
        like = tiny(family, **options)  # another layer on the same embeddings
        like.get_input_embeddings().weight.data.copy_(model.get_input_embeddings().weight)
        with pytest.raises(InputError, match="expected tensors"):
            load_draft(str(path), like)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "bad").write_text("x" * 100)
    for bad in ("bad", "none", ROOT / "models/draft/model.safetensors"):
        with pytest.raises(InputError, match="expected a file of an EAGLE layer, got"):
            load_draft(str(tmp_path / bad), tiny("llama"))


def test_bad_options_are_refused(tmp_path):
    for nodes in (-1, 65):
        with pytest.raises(InputError, match=f"--nodes must be 0 to 64, got {nodes}"):
            next(eagle(None, PROMPT, nodes=nodes))
    with pytest.raises(InputError, match="--inputs must be shifted, .* or token, got x"):
        Draft(tiny("llama"), "x")
    with pytest.raises(InputError, match="--begin must be random or last, got x"):
        Draft(tiny("llama"), begin="x")
    for option, number, least in (("steps", 0, "1 or more"), ("batch", 0, "1 or more"),
                                  ("lr", 0, "above 0"), ("max_new_tokens", 0, "1 or more"),
                                  ("mlp", -1, "0 or more"), ("vocab", -1, "0 or more")):
        said = f"--{option.replace('_', '-')} must be {least}, got {number}"
        with pytest.raises(InputError, match=said):
            train(tiny("llama"), WORDLESS, [[2], [3]], out=tmp_path / "o", **{option: number})


def test_the_most_frequent_tokens_are_kept(tmp_path, monkeypatch):
    """Of prompts and answers."""
    monkeypatch.setattr(training, "collect_answers", lambda *given: [[7, 2, 7, 7]] * 2)
    train(tiny("llama"), WORDLESS, [[9, 9, 4], [9, 4, 9]], out=tmp_path / "o", steps=1, vocab=2,
          max_new_tokens=9, work=tmp_path)
    assert load_draft(tmp_path / "o", tiny("llama")).vocab.tolist() == [7, 9]


def test_options_reach_the_draft(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(training, "collect_answers", lambda *given: [[7, 2, 7, 7]] * 2)
    monkeypatch.setattr(module, "fit", lambda model, draft, *_, **__: made.append(draft))
    for options in (dict(begin="last"), dict(mlp=24), dict(inputs="token"), dict(seed=1), {}):
        train(tiny("llama"), WORDLESS, [[9, 9, 4], [9, 4]], out=tmp_path / "o", max_new_tokens=9,
              work=tmp_path, **options)
    assert [x.begin for x in made] == ["last"] + ["random"] * 4
    assert [x.mlp for x in made] == [0, 24, 0, 0, 0]
    assert [x.inputs == "token" for x in made] == [False, False, True, False, False]
    assert not torch.equal(made[3].fc.weight, made[4].fc.weight)


def test_acceptance_is_measured_on_held_out_answers(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "measure_acceptance", lambda draft, texts: seen.append(
        [ids.tolist() for ids, _, _ in texts]) or ACCEPT)
    fit(tiny("llama"), Draft(tiny("llama")), DATA, HELD_OUT, steps=1, batch=1, lr=1e-3)
    assert seen == [[p + a for p, a in HELD_OUT]] * 2


def test_tokens_of_held_out_answers_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "collect_examples", lambda *_, **__: (
        [([9, 9], [7, 7, 7])], [([2, 2], [2] * 9)]))
    train(tiny("llama"), WORDLESS, [[3], [4]], out=tmp_path / "o", steps=1, vocab=2,
          max_new_tokens=9, work=tmp_path)
    assert load_draft(tmp_path / "o", tiny("llama")).vocab.tolist() == [7, 9]


def test_a_plan_costs_its_passes_and_its_call(monkeypatch):
    """A first pass of a row for each token of a chunk; then one row for each node expanded."""
    costs = {"target": [5.0 * n for n in range(65)], "draft": [2.0 + 0.3 * n for n in range(65)]}
    monkeypatch.setattr(module, "row_costs", lambda lm, most: costs[lm])
    draft = SimpleNamespace(accept=ACCEPT)
    for (n, levels), tokens, seconds in plan_trees(draft, "draft", "target"):
        rows = [math.ceil(tokens), *levels[1:]] if levels else []
        assert seconds == pytest.approx(5 * n + sum(2 + 0.3 * x for x in rows))


def test_at_most_50_answers_are_held_out(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(training, "collect_answers", lambda *given: [[7, 2, 7]] * 600)
    monkeypatch.setattr(module, "fit", lambda model, draft, data, held_out, **_: seen.append(
        len(held_out)))
    train(tiny("llama"), WORDLESS, [[n % 50, n // 50] for n in range(600)], out=tmp_path / "o",
          work=tmp_path, max_new_tokens=9)
    assert seen == [50]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_draft_that_overflows_at_some_nodes(dynamic, monkeypatch):
    """What hangs below them comes after them, and the output is AR's."""
    model = tiny("llama")
    forward, rng = CachedLM.forward, random.Random(2)
    target, draft = CachedLM(model), random_draft(model)
    draft.accept = [[0.5, 0.42, 0.05, 0.04, 0.03, 0.02, 0.01]] * 6

    def broken(lm, *given, **options):
        logits = forward(lm, *given, **options).clone()
        for row in logits if lm.model is draft.lm else ():
            if rng.random() < 0.3:
                row[:] = math.nan
        return logits
    expected = tokens_of(autoregressive(target, PROMPT), 100)
    monkeypatch.setattr(CachedLM, "forward", broken)
    chunks = eagle(target, PROMPT, nodes=64, dynamic=dynamic, trained=draft)
    assert tokens_of(chunks, 100) == expected


# ---------------------------------------------------------------------- the embedded draft layer

def test_the_embedded_draft_layer(embedded):
    """Held-out prompts: AR's output, and many tokens a call."""
    import tasks
    model, _, tokenizer = embedded
    target, eos, tokens, calls = CachedLM(model), {tokenizer.eos_token_id}, 0, 0
    for i, task in enumerate(tasks.TASKS):
        [example] = tasks.take(task, "test", 1, seed=40)
        prompt = encode(tokenizer, example.prompt)
        expected, before = tokens_of(autoregressive(target, prompt), 40, eos), target.calls
        chunks = eagle(target, prompt, nodes=16, dynamic=i == 1)
        assert tokens_of(chunks, 40, eos) == expected
        tokens, calls = tokens + len(expected), calls + target.calls - before
    assert tokens / calls > 3.5
    assert (ROOT / "models/eagle.safetensors").stat().st_size < 2_500_000


# ------------------------------------------------------------------------- the command line

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Directories of tiny models with the embedded target's tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/target")
    for family in ("llama", "qwen2"):
        tiny(family, vocab_size=len(tokenizer)).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    (folder / "two").write_text('How many cats?\n{"prompt": "How many dogs are there?"}\n')
    (folder / "one").write_text("hello\n")
    return folder


def command(*argv) -> int:
    """As the last lines of eagle.py, on a CPU."""
    return main([eagle], module.report, [*map(str, argv), "--device", "cpu"], commands=[train],
                ranges={"nodes": (4, 8, 16, 32, 64)})


def test_train_and_decode_from_the_command_line(small, tmp_path, capfd):
    """In half precision too; a stopped run makes what a whole one makes."""
    out, whole, target = tmp_path / "o", tmp_path / "whole", ("--target", small / "llama")
    options = ["train", *target, "--prompts", small / "two", "--batch", "2", "--max-new-tokens",
               "8", "--steps", "3", "--out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_value_",
                      interrupting(torch.nn.utils.clip_grad_value_, 2))
        assert command(*options, out) == 130 and not out.exists()
    assert command(*options, out) == command(*options, whole) == 0
    assert out.read_bytes() == whole.read_bytes()
    text = capfd.readouterr().out
    assert "step 3: held-out n-α" in text and "parameters" in text and "1 answers of" in text
    assert command(*target, "--prompts", small / "two", "--adapter", out, "--nodes", "6",
                   "--max-new-tokens", "12", "--compare") == 0
    err = capfd.readouterr().err
    assert "output equals autoregressive output" in err and "a call: 5.0 guesses" in err
    assert command(*options, tmp_path / "half", "--dtype", "bfloat16", "--inputs", "token",
                   "--vocab", "12") == 0
    kept = json.loads(header(tmp_path / "half"))
    assert kept["inputs"] == "token" and len(kept["vocab"]) == 12
    assert command(*target, "--prompt", "x", "--adapter", tmp_path / "half", "--dtype", "bfloat16",
                   "--dynamic", "--max-new-tokens", "6") == 0


def header(path) -> str:
    with safe_open(path, "pt") as file:
        return file.metadata()["part"]


def test_the_file_itself_decodes(small, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["eagle.py", "--prompt", "x", "--target",
                                      str(small / "llama"), "--device", "cpu"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "survey/eagle.py"), run_name="__main__")
    assert end.value.code == 2
    assert "a file of an EAGLE layer for this model, got" in capfd.readouterr().err


@pytest.mark.parametrize("argv, said", [
    (["train"], "the following arguments are required: --out"),
    (["train", "--out", "o", "--prompts", "one"], "prompts or more of at most 120 tokens, got 1"),
    (["train", "--out", "o", "--steps", "0"], "--steps must be 1 or more, got 0"),
    (["train", "--out", "o", "--inputs", "wide"], "--inputs must be shifted, unshifted"),
    (["--prompt", "x", "--adapter", "none"], "expected a file of an EAGLE layer, got 'none'"),
    (["--prompt", "x", "--target", "qwen2"], "a file of an EAGLE layer for this model, got"),
    (["--prompt", "x", "--nodes", "65"], "--nodes must be 0 to 64, got 65")])
def test_wrong_input_is_one_line_and_status_2(argv, said, small, monkeypatch, capfd):
    monkeypatch.chdir(small)
    target = [] if "--target" in argv else ["--target", "llama"]
    limit = ["--max-new-tokens", "40"] if argv[0] == "train" else []
    assert command(*argv, *target, *limit) == 2
    said_in_one_line(said, capfd)
