"""BiTA: the model's own output whatever the prompt and mask tokens are; positions and labels;
tuning sees what decoding sees, reaches nothing else, starts over where it must and else goes on."""
import contextlib
import functools
import itertools
import json
import random
import runpy
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

import bita as module
from bita import (Tuning, accuracy, anchored, bita, efficient_tree, fit, full_tree, load_tuning,
                  mask_logits, own_answers, sar_loss, save_tuning, shape_of, train)
from common import CachedLM, InputError, Sampler, autoregressive, best_tree, encode
from conftest import (CONTEXT, FAMILIES, MORE_FAMILIES, ROOT, Decoder, chi_square_ok, interrupting,
                      main, path_to, per_call, prefill, said_in_one_line, tiny, tokens_of)

PROMPT = [3, 14, 15]
DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3], [4, 4, 2, 11])]
HELD_OUT = [([50, 51], [52, 53, 54])]
TREES = [("efficient", 3, 2), ("full", 2, 3), ("chain", 1, 3), ("best", 5, 4), ("chain", 1, 1)]
PROMPTS = [("deep", 5), ("shallow", 3), ("none", 1), ("shallow", 1), ("deep", 1)]
WORDLESS = SimpleNamespace(eos_token_id=None, pad_token_id=None)  # a tokenizer, as far as needed


def random_tuning(model, design="deep", P=4, M=3, seed=0) -> Tuning:
    """Far from zero, so that a real token that saw any of it would notice."""
    tuning = Tuning(shape_of(model), design, P, M)
    tuning.accept = [[0.5, 0.3, 0.1]] * M  # as if it were good, so that trees are large
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in tuning.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    return tuning


def embeddings(model, ids: list[int], tuning: Tuning, groups: int = 1) -> torch.Tensor:
    """Of real tokens, and of groups of mask tokens after them."""
    real = model.get_input_embeddings()(torch.tensor(ids))
    return torch.cat([real, tuning.masks.repeat(groups, 1)]).detach()


@torch.inference_mode()
def prompt_rows(tuning: Tuning, model) -> list:
    return tuning.rows(model)


def equal(a: Tuning, b: Tuning) -> bool:
    return torch.equal(a.masks, b.masks) and torch.equal(a.prompts, b.prompts)


# ---------------------------------------------------------------------------------- decoding

def test_greedy_equals_autoregressive(family):
    """Untrained: five trees in llama and gemma3, two or three of them in each of the others; the
    first one up to the last token of the context."""
    model, n = tiny(family), CONTEXT - len(PROMPT)
    expected = tokens_of(autoregressive(CachedLM(model, CONTEXT), PROMPT), n)
    cases = [*zip(TREES, PROMPTS)]
    if family not in ("llama", "gemma3"):
        cases = cases[len(family) % 2::2]
    target = CachedLM(model, CONTEXT)
    for (tree, k, M), (design, P) in cases:
        tuning = random_tuning(model, design, P, M)
        tokens = tokens_of(bita(target, PROMPT, tree=tree, k=k, tuning=tuning), n)
        assert tokens == expected[:n], (tree, design)
        n = 40


def test_prompt_and_mask_tokens_leave_real_tokens_alone(family):
    """Bit for bit: logits of the tree's real nodes under two tunings."""
    model, seen, lm = tiny(family), [], CachedLM(tiny(family), CONTEXT)
    parents = [-1, 0, 0, 0, 3, 1, 5]  # three real nodes, two groups of two masks
    for seed in (1, 2):
        tuning = random_tuning(model, M=2, seed=seed)
        lm.start(PROMPT, width=8, prefix=prompt_rows(tuning, model))
        embeds = embeddings(model, [5, 6, 7], tuning, groups=2)
        seen.append(lm.forward(embeds, parents, sees_prefix=[False] * 3 + [True] * 4))
    assert torch.equal(seen[0][:3], seen[1][:3])
    assert not torch.allclose(seen[0][3:], seen[1][3:], atol=1e-2)


@pytest.mark.parametrize("tree", module.TREES)
def test_candidates_are_those_of_the_masks_after_the_last_accepted_token(tree, monkeypatch):
    """Call by call against the logits of training; a chain's one group is the root's, and of its
    M = 3 predictions those of accepted tokens are stale."""
    for name in ("efficient_tree", "full_tree"):
        make = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, make=make: calls.append(x) or make(x))
    monkeypatch.setattr(module, "placed_tree", lambda tree, x, make=module.placed_tree:
                        calls.append(x) or make(tree, x))
    monkeypatch.setattr(module, "tree_that_pays", lambda *_: (best_tree([[0.5, 0.3], [0.4]], 5), 2))
    M, k = {"chain": (3, 1), "best": (2, 5)}.get(tree, (3, 2))
    for family, design in (("llama", "deep"), ("mistral", "shallow")):
        model, calls, log, text = tiny(family, vocab_size=5), [], [], [3, 1, 4]
        tuning = random_tuning(model, design)
        method = bita(CachedLM(model, CONTEXT), text, tree=tree, k=2, tuning=tuning, log=log)
        chunks = list(itertools.islice(method, 25))
        for chunk, candidates in zip(chunks, calls[1:]):
            known, stale = (text, len(chunk) - 1) if tree == "chain" else (text + chunk[:-1], 0)
            ids, at = torch.tensor([known]), torch.tensor([[len(known) - 1]])
            logits = mask_logits(model, tuning, ids, at)[0, 0, stale:M]
            assert candidates == logits.topk(k).indices.tolist()
            text = text + chunk
        assert {len(chunk) for chunk in chunks} >= {1, 2}
        assert [r["accepted"] + 1 for r in log] == [len(chunk) for chunk in chunks]
        guessed = {"efficient": 6, "full": 14, "best": 4}.get(tree)
        for before, after in zip(log, log[1:]):
            assert after["guessed"] == (guessed or 3 - before["accepted"])
            assert after["rows"] == 1 + after["guessed"] + M * (1 + guessed if guessed else 1)


def test_the_tree_of_figure_5():
    """M = 4, k = 3: of each level only the first node has children."""
    levels = [["Yeah", "Yes", "Sure"], [",", "!", "."], ["I", "they", "LLMs"],
              ["have", "read", "am"]]
    ids, parents = efficient_tree(levels)
    assert ids[1:] == sum(levels, [])
    assert parents == [-1, 0, 0, 0, 1, 1, 1, 4, 4, 4, 7, 7, 7]
    assert [ids[i] for i in path_to(12, parents)[1:]] == ["Yeah", ",", "I", "am"]


def test_the_tree_that_pays(monkeypatch):
    """As many nodes and masks as a call's rows are worth."""
    tuning = SimpleNamespace(accept=[[0.5, 0.2], [0.4, 0.1]])
    for costs, nodes, M in (([1] * 7, 7, 2), ([1, 1, 1, 1.2, 9, 9, 9], 2, 1),
                            ([1, 1.6, 2, 4, 9, 9, 9], 1, 0), ([1, 1, 1, 1, 1.1, 9, 9], 5, 2)):
        costs = {2 ** i: x for i, x in enumerate(costs)}
        monkeypatch.setattr(module, "row_costs", lambda *_: costs)
        tree, found = module.tree_that_pays(None, tuning)
        assert (len(tree), found) == (nodes, M)
    assert module.placed_tree(best_tree(tuning.accept, 4), [[7, 8], [9]]) == ([-1, 7, 8, 9],
                                                                              [-1, 0, 0, 1])


def test_the_full_tree():
    ids, parents = full_tree([[1, 2], [3, 4]])
    assert ids[1:] == [1, 2, 3, 4, 3, 4] and parents == [-1, 0, 0, 1, 1, 2, 2]
    assert len(full_tree([[1, 2, 3]] * 3)[0]) == 1 + 3 + 9 + 27 and full_tree([])[1] == [-1]


class Position(torch.nn.Module):
    """A model whose next token depends on the position alone: after position p comes
    (p + 1) * 7 % 61. A mask at position a + j is right about the token of a + j + 1 exactly if it
    stands where it should."""
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, shift=1):
        super().__init__()
        self.shift, self.table, self.decoder = shift, torch.nn.Embedding(61, 8), Decoder()
        text = SimpleNamespace(max_position_embeddings=CONTEXT, vocab_size=61)
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def get_input_embeddings(self):
        return self.table

    def get_decoder(self):
        return self.decoder

    def forward(self, position_ids, logits_to_keep=slice(None), **_):
        following = (position_ids + self.shift) * 7 % 61
        [features] = self.decoder(torch.nn.functional.one_hot(following, 61).float())
        return SimpleNamespace(logits=features[:, logits_to_keep])


def test_positions_and_labels_of_figure_4(monkeypatch):
    """A model that really looks ahead is recognised: all masks right in training batches, and all
    M drafts accepted in decoding."""
    monkeypatch.setattr(module, "row_costs", lambda *_: {16: 1.0})
    shape = dict(layers=1, heads=1, head_dim=1, width=8)
    tuning, text = Tuning(shape, "none", 1, 3), [p * 7 % 61 for p in range(60)]
    data = [(text[:4], text[4:30]), (text[:9], text[9:13]), (text[:2], text[2:40])]
    for shift, right in ((1, 1.0), (2, 0.0)):
        accept = accuracy(Position(shift), tuning, data, 8)[1]
        assert [ranks[0] for ranks in accept] == [right] * 3
    tuning.accept = accuracy(Position(), tuning, data, 8)[1]
    for tree, lengths in (("efficient", [1, 4, 4, 4]), ("full", [1, 4, 4, 4]),
                          ("best", [1, 4, 4, 4]), ("chain", [1, 4, 1, 4])):  # Fig. 4: 1, 4, 1, …
        method = bita(CachedLM(Position(), CONTEXT), text[:5], tree=tree, k=2, tuning=tuning)
        chunks = list(itertools.islice(method, 4))
        assert [len(chunk) for chunk in chunks] == lengths
        assert sum(chunks, []) == text[5:5 + sum(lengths)]


class Remembered:
    """A CachedLM that runs each pass once: what it gives depends on text and tree alone."""

    def __init__(self, lm):
        self.lm, self.model, self.passes = lm, lm.model, {}
        self.token = {row.numpy().tobytes(): i for i, row in enumerate(lm.weight.detach())}

    def start(self, ids, width, prefix):
        self.text, self.options = list(ids), (width, prefix)

    def forward(self, embeds, parents, sees_prefix):
        self.rows = [row.tobytes() for row in embeds.numpy()]
        key = (*self.text, *self.rows, *parents)
        if key not in self.passes:
            self.lm.start(self.text, *self.options)
            self.passes[key] = self.lm.forward(embeds, parents, sees_prefix=sees_prefix)
        return self.passes[key]

    def commit(self, path):
        self.text += [self.token[self.rows[node]] for node in path]


def test_sampled_output_has_the_targets_distribution():
    """2,000 seeded runs on a tiny transformer: chi-square test of three tokens at a false-failure
    probability of 1e-6. An efficient tree, since its nodes differ in what is below them."""
    model, sample, log = tiny("llama", vocab_size=5), Sampler(2.0, seed=3), []
    tuning, target = random_tuning(model, M=2), Remembered(CachedLM(model, 12))
    counts, expected = torch.zeros(5, 5, 5), torch.ones(5, 5, 5)
    for _ in range(2000):
        method = bita(target, [3, 4], tree="efficient", k=2, tuning=tuning, sample=sample, log=log)
        counts[tuple(tokens_of(method, 3))] += 1
    for n in range(3):
        for before in itertools.product(range(5), repeat=n):
            probs = sample.probs(prefill(CachedLM(model, 12), [3, 4, *before]))[0]
            expected[before] *= probs.view(-1, *[1] * (2 - n))
    assert chi_square_ok(counts.flatten(), expected.flatten())
    assert sum(r["accepted"] for r in log) > 250


@pytest.mark.parametrize("options", [dict(tree="round"), dict(k=0)])
def test_bad_options_are_refused(options):
    with pytest.raises(InputError, match="tree of best, efficient, full, chain and k of 1 or more"):
        next(bita(None, [1], tuning=(None, None), **options))


# ------------------------------------------------------------------------- what training sees

def test_the_number_of_parameters():
    """P x layers x 2 x key heads x head size (deep), P x width (shallow), and M x width."""
    shape = shape_of(tiny("llama"))  # 2 layers, 2 key heads of 8, width 32
    for design, prompts in (("deep", 16 * 2 * 2 * 2 * 8), ("shallow", 16 * 32), ("none", 0)):
        parameters = Tuning(shape, design, 16, 3).parameters()
        assert sum(p.numel() for p in parameters) == prompts + 3 * 32


def test_an_anchored_batch_by_hand():
    data = [([5, 6], [7, 8, 9]), ([4], [3, 2, 1, 0])]
    ids, anchors, labels = anchored(data, 2, 9, random.Random(0))
    assert ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, 2, 1, 0]]
    assert anchors.tolist() == [[1, 2, 0], [0, 1, 2]]  # the third of the first is none
    assert labels.tolist() == [[[8, 9], [9, -100], [-100, -100]], [[2, 1], [1, 0], [0, -100]]]


def test_anchors_are_capped_and_drawn_evenly():
    """`most` of them, all different, in order, any of the 18 places alike: each is expected in
    2,000 / 6 draws, with a standard deviation of 17."""
    data, counts, rng = [([1, 2], list(range(3, 22))), ([1], [2, 3, 4])], [0] * 18, random.Random(0)
    for _ in range(2000):
        _, anchors, labels = anchored(data, 2, 3, rng)
        first, second = anchors.tolist()
        assert len(first) == 3 and first == sorted(set(first)) and second == [0, 1, 0]
        assert (labels[:, :, 0] >= 0).tolist() == [[True] * 3, [True, True, False]]
        for place in first:
            counts[place - 1] += 1
    assert max(abs(count - 2000 / 6) for count in counts) < 100


@pytest.mark.parametrize("family, design", [
    *itertools.product(FAMILIES, module.DESIGNS),
    *itertools.product(sorted(MORE_FAMILIES.keys() - {"deepseek-v3"}), ["deep"])])
def test_training_sees_what_decoding_sees(family, design):
    """The mask logits of an anchored, padded batch equal those of the cached tree, group by group;
    the first text is longer than the windows of 9 tokens."""
    model, rng = tiny(family), random.Random(5)
    data = [([rng.randrange(2, 61) for _ in range(n)], [rng.randrange(2, 61) for _ in range(m)])
            for n, m in ((13, 5), (1, 3), (7, 4))]
    tuning, lm = random_tuning(model, design), CachedLM(model, CONTEXT)
    rows = prompt_rows(tuning, model)
    ids, anchors, labels = anchored(data, 3, 9, random.Random(0))
    with torch.inference_mode():
        logits = mask_logits(model, tuning, ids, anchors)
    for b, (prompt, answer) in enumerate(data):
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 2)
        assert (labels[b, :, 0] >= 0).sum() == len(places)
        for g, place in enumerate(places):
            text = (prompt + answer)[:place + 1]
            lm.start(text[:-1], width=4, prefix=rows)
            embeds = embeddings(model, text[-1:], tuning)
            alone = lm.forward(embeds, sees_prefix=[False] + [True] * 3)[1:]
            torch.testing.assert_close(logits[b, g], alone, atol=1e-4, rtol=1e-4)


def test_nothing_is_kept_of_the_context(monkeypatch):
    """Of a longer prompt the backward pass keeps no more than the keys, the values and the mask
    that the mask tokens' own attention is made of, even where the model's weights want gradients;
    and no gradient reaches those keys and values."""
    model, kept, passes = tiny("llama"), [], []
    forward, tuning = module.forward, random_tuning(model)

    def spy(*args, **options):
        passes.append(forward(*args, **options))
        return passes[-1]
    monkeypatch.setattr(module, "forward", spy)
    assert all(p.requires_grad for p in model.parameters())
    for n in (20, 120):
        ids, anchors, _ = anchored([([7] * n, [1, 2, 3, 4])], 3, 2, random.Random(0))
        seen = {}  # by storage: some tensors are views of one

        def keep(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            mask_logits(model, tuning, ids, anchors)
        kept.append(sum(storage.nbytes() for storage in seen.values()))
        context, masks = passes[-2:]
        assert context[0] is None and masks[0] is not None  # the head is a large part of a model
        assert not any(x.requires_grad for pair in context[1] for x in pair)
        assert all(x.requires_grad for pair in masks[1] for x in pair)
    per_layer = 2 * 2 * 8 + 2 * 6  # keys and values of 2 heads of 8; a mask for 2 x 2 groups of 3
    assert 0 < kept[1] - kept[0] <= 100 * 2 * per_layer * 4


# ------------------------------------------------------------------------------------- tuning

@pytest.mark.parametrize("design", module.DESIGNS)
def test_tuning_lowers_the_loss_and_reaches_nothing_else(design):
    model, rng = tiny("llama"), random.Random(0)
    prompts, lm = [[rng.randrange(2, 61) for _ in range(4)] for _ in range(16)], CachedLM(model, 20)
    data = [(p, tokens_of(autoregressive(lm, p), 12)) for p in prompts]
    before = {name: p.clone() for name, p in model.named_parameters()}
    tuning = Tuning(shape_of(model), design, 4, 2)
    start = accuracy(model, tuning, data, 12)[0]
    curve = fit(model, tuning, data, data, steps=40, batch=8, anchors=12, lr=3e-2,
                say=lambda _: None)
    assert [done for done, *_ in curve] == list(range(8, 41, 8)) and curve[-1][1] < start - 0.1
    assert all(torch.equal(p, before[name]) and p.grad is None
               for name, p in model.named_parameters())
    ids, anchors, labels = anchored(data, 2, 12, rng)
    sar_loss(mask_logits(model, tuning, ids, anchors), labels).backward()
    assert all(p.numel() == 0 or p.grad.abs().sum() > 0 for p in tuning.parameters())


class Plain(torch.optim.SGD):
    """In AdamW's place: a step as long as its gradient, so that the gradient's scale counts."""

    def __init__(self, parameters, lr, **_):
        super().__init__(parameters, lr)


@pytest.mark.parametrize("scale, clipped", [(1, True), (0.001, False)])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, Plain])
def test_three_steps_by_hand(optimizer, scale, clipped, monkeypatch):
    """Two passes of all the data are one; a gradient longer than 1 is cut to 1, a shorter one left
    alone; the rate is a cosine: (1 + cos 0) / 2, (1 + cos 60°) / 2, (1 + cos 120°) / 2."""
    model, curve = tiny("llama"), []
    with torch.no_grad():  # smaller logits, smaller gradients
        model.lm_head.weight.mul_(scale)
    tuning, plain = (Tuning(shape_of(model), M=2) for _ in range(2))
    steps = optimizer(plain.parameters(), lr=1e-2, weight_decay=0.0)
    monkeypatch.setattr(torch.optim, "AdamW", optimizer)
    fit(model, tuning, DATA, DATA, steps=3, batch=2, accumulate=2, anchors=9, lr=1e-2,
        say=curve.append)
    for factor in (1, 0.75, 0.25):
        ids, anchors, labels = anchored(DATA, 2, 9, random.Random(0))
        with torch.autocast("cpu", torch.bfloat16):
            loss = sar_loss(mask_logits(model, plain, ids, anchors), labels)
        loss.backward()
        length = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
        assert length > 2 if clipped else length < 0.5  # also where it is doubled
        for p in plain.parameters():
            p.grad /= max(1, length)
        steps.param_groups[0]["lr"] = 1e-2 * factor
        steps.step()
        steps.zero_grad()
    start = Tuning(shape_of(model), M=2)
    for a, b, c in zip(tuning.parameters(), plain.parameters(), start.parameters()):
        moved, apart = (b - c).abs(), (a - b).abs()  # bfloat16 sums in another order
        assert moved.max() > 0 and apart.median() <= 0.01 * moved.median()
    assert len(curve) == 3


def test_options_reach_the_batches(monkeypatch):
    """Passes a step, answers a pass, anchors an answer; of the held-out answers nothing."""
    passes, rows = [], DATA * 3

    def spy(data, M, most, rng):
        made = anchored(data, M, most, rng)
        passes.append((data, most, made[1].shape[1]))
        return made
    model = tiny("llama")
    monkeypatch.setattr(module, "anchored", spy)
    monkeypatch.setattr(module, "accuracy", lambda *args: evaluated.append(args[2:]) or (0.0, []))
    for batch, accumulate, anchors in ((2, 3, 1), (4, 1, 2)):
        evaluated, passes[:] = [], []
        fit(model, Tuning(shape_of(model)), rows, HELD_OUT, steps=2, batch=batch, lr=1e-2,
            accumulate=accumulate, anchors=anchors, say=lambda _: None)
        assert len(passes) == 2 * accumulate and evaluated == [(HELD_OUT, anchors)] * 2
        for data, most, widest in passes:
            assert len(data) == batch and most == widest == anchors
            assert all(row in rows for row in data)


def test_answers_of_a_pass_are_alike_in_length(monkeypatch):
    """All are learnt from, each pass from as many as were asked for."""
    rows, passes = [([3] * n, [5, 7]) for n in range(30)], []
    tuning = Tuning(shape_of(tiny("llama")))
    none = torch.zeros(1)
    monkeypatch.setattr(module, "anchored", lambda data, *_: passes.append(data) or [none] * 3)
    monkeypatch.setattr(module, "mask_logits", lambda *_: none)
    monkeypatch.setattr(module, "sar_loss", lambda *_: sum(p.sum() for p in tuning.parameters()))
    monkeypatch.setattr(module, "accuracy", lambda *_: (0.0, []))
    for batch in (4, 8):
        passes.clear()
        fit(tiny("llama"), tuning, rows, HELD_OUT, steps=80, batch=batch, anchors=1, lr=1e-2,
            say=lambda _: None)
        lengths = [sorted(len(p) for p, _ in data) for data in passes]
        assert {len(some) for some in lengths} == {batch} and {*sum(lengths, [])} == {*range(30)}
        assert sum(some[-1] - some[0] for some in lengths) / 80 < 11  # any four: 19, any eight: 24


# ------------------------------------------------------------------ what is kept, and for whom

FIT = dict(steps=4, batch=2, anchors=2, lr=1e-2, accumulate=2, seed=0, say=lambda _: None)


def fitted(work=None, model=0, data=DATA, design="deep", P=3, M=2, seed=0, **options):
    """(tuning, curve)."""
    model = tiny("llama", seed=model)
    tuning = Tuning(shape_of(model), design, P, M, seed)
    return tuning, fit(model, tuning, data, HELD_OUT, work=work, **FIT | {"seed": seed} | options)


whole = functools.cache(fitted)


def same(a, b) -> bool:
    return equal(a[0], b[0]) and a[1] == b[1]


@pytest.mark.parametrize("change", [
    dict(model=1), dict(lr=2e-2), dict(seed=1), dict(data=DATA[::-1] + DATA), dict(steps=3),
    dict(design="shallow"), dict(design="none"), dict(P=4), dict(M=3), dict(batch=1),
    dict(accumulate=1), dict(anchors=1)], ids=lambda change: next(iter(change)))
def test_another_tuning_in_the_same_folder_starts_over(change, worked):
    """And the same one is only loaded."""
    options, said = {"steps": 2} | change, []
    alone = fitted(**options)
    assert same(fitted(worked, **options), alone)
    assert same(fitted(worked, **options, say=said.append), alone) and not said


@contextlib.contextmanager
def interrupted(place):
    """Ctrl-C in the third step: in its second pass, before its update, or once it is reported."""
    with pytest.MonkeyPatch.context() as patch:
        if place == "pass":  # 2 a step, 1 a report
            patch.setattr(module, "mask_logits", interrupting(mask_logits, 8))
        if place == "update":
            clip = torch.nn.utils.clip_grad_norm_
            patch.setattr(torch.nn.utils, "clip_grad_norm_", interrupting(clip, 3))
        yield dict(say=interrupting(lambda _: None, 3)) if place == "report" else {}


@pytest.mark.parametrize("place, done", [("pass", 2), ("update", 2), ("report", 3)])
def test_an_interrupted_tuning_goes_on_where_it_was(place, done, tmp_path):
    """And ends where a whole run does, with the same curve."""
    with interrupted(place) as options, pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, **options)
    [file], said = tmp_path.iterdir(), []
    assert torch.load(file)["done"] == done
    assert same(fitted(tmp_path, say=said.append), whole())
    assert [text.split(":")[0] for text in said] == [f"step {n}" for n in range(done + 1, 5)]


@pytest.mark.parametrize("place", ["update", "evaluation"])
def test_interrupted_where_the_work_is_not_whole(place, tmp_path, monkeypatch):
    """In the middle of an update, which is then made neither by half nor twice, and in the middle
    of an evaluation, which is then made."""
    owner, name = (torch.optim.AdamW, "step") if place == "update" else (module, "accuracy")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupting(getattr(owner, name), 3, after=True))
        fitted(tmp_path)
    assert len(list(tmp_path.iterdir())) == (place == "evaluation")
    assert same(fitted(tmp_path), whole())


def test_a_killed_tuning_goes_on_from_the_last_checkpoint(tmp_path, monkeypatch):
    """One is written every two minutes: here after every step."""
    files, (work, copy) = [], (tmp_path / "work", tmp_path / "copy")
    work.mkdir()
    copy.mkdir()

    def say(text):
        if text.startswith("step 3"):
            files.extend(shutil.copy(file, copy) for file in work.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "time", itertools.count(0, 1000).__next__)
        fitted(work, say=say)
    assert torch.load(files[0])["done"] == 2 and same(fitted(copy), whole())


def test_answers_are_greedy_whatever_the_generation_settings_say(tmp_path):
    """Also where prompts of different lengths stand side by side; an answer ends with its EOS."""
    for family in ("llama", "mistral", "gpt2"):
        model, prompts = tiny(family), [[5, 9, 3], [7], [4, 4, 17, 30, 2, 8, 11, 6, 25], [7]]
        lm = CachedLM(model, CONTEXT)
        free = [tokens_of(autoregressive(lm, p), 20) for p in prompts]
        eos = [free[0][7], free[2][12]]
        model.generation_config = GenerationConfig(
            repetition_penalty=5.0, temperature=0.3, do_sample=True, top_k=3, num_beams=2,
            no_repeat_ngram_size=1, suppress_tokens=free[1][:1], max_new_tokens=3,
            min_new_tokens=18, eos_token_id=eos)
        expected = [tokens_of(autoregressive(lm, p), 20, eos) for p in prompts]
        (tmp_path / family).mkdir()  # of llama and mistral the weights are the same
        answers = own_answers(model, WORDLESS, prompts, 20, tmp_path / family, size=2)
        assert answers == expected, family
        assert len(set(map(len, expected))) > 1


def test_the_embedded_models_answers(tmp_path, embedded):
    import tasks
    model, _, tokenizer = embedded
    prompts = [encode(tokenizer, e.prompt) for e in tasks.take("sql", "test", 3, seed=3)]
    answers, lm = own_answers(model, tokenizer, prompts, 30, tmp_path, size=2), CachedLM(model, 400)
    for prompt, answer in zip(prompts, answers):
        assert answer == tokens_of(autoregressive(lm, prompt), 30, {tokenizer.eos_token_id})


def test_answers_are_kept(tmp_path):
    """What is done is not done again; a last line that was cut off is."""
    model, prompts = tiny("llama"), [[5, 9, 3], [7], [4, 4, 17], [8, 2]]
    first = own_answers(model, WORDLESS, prompts[:3], 8, tmp_path, size=2)
    [file] = tmp_path.iterdir()
    lines = file.read_text()
    answers = own_answers(model, WORDLESS, prompts, 8, tmp_path, size=2)
    whole = file.read_text()
    assert answers[:3] == first and whole.startswith(lines) and whole.count("\n") == 4
    marked = whole.splitlines()
    marked[0] = json.dumps(json.loads(marked[0]) | {"answer": [1, 2, 3]})
    for cut in (1, 30, len(marked[3])):
        file.write_text("\n".join([*marked[:3], marked[3][:cut]]))
        again = own_answers(model, WORDLESS, prompts, 8, tmp_path)
        assert [a == b for a, b in zip(again, answers)].count(False) == 1 and [1, 2, 3] in again
        assert file.read_text() == "\n".join([*marked, ""])


def test_answers_of_another_model_or_length_are_not_taken(tmp_path):
    prompts = [[5, 9, 3], [7]]
    for seed, limit in ((0, 8), (1, 8), (0, 6), (0, 12)):
        model = tiny("llama", seed=seed)
        lm = CachedLM(model, CONTEXT)
        expected = [tokens_of(autoregressive(lm, p), limit, {1}) for p in prompts]
        assert own_answers(model, WORDLESS, prompts, limit, tmp_path) == expected
    assert len(list(tmp_path.iterdir())) == 4


# -------------------------------------------------------------------------- files of tunings

DTYPES = torch.float32, torch.bfloat16, torch.float16


def test_a_file_belongs_to_its_model(tmp_path):
    """Whatever types the model is loaded in, when it is tuned and later."""
    path, other = tmp_path / "t.safetensors", tiny("llama", seed=3)
    for dtype in DTYPES:
        model = tiny("llama").to(dtype)
        tuning = Tuning(shape_of(model), "shallow", 3, 2)
        save_tuning(path, tuning, model)
        for later in DTYPES:
            loaded = load_tuning(str(path), model.to(later))
            assert loaded.design == "shallow" and not loaded.masks.requires_grad
            torch.testing.assert_close(loaded.masks, tuning.masks, atol=1e-3, rtol=1e-2)
            torch.testing.assert_close(loaded.prompts, tuning.prompts, atol=1e-3, rtol=1e-2)
            assert prompt_rows(loaded, model)[0][0].shape == (2, 3, 8)
            assert next(bita(CachedLM(model, 20), PROMPT, adapter=str(path)))
            with pytest.raises(InputError, match="one of another: embeddings differ"):
                load_tuning(str(path), other.to(later))
    for family, options, message in (
            ("qwen2", {}, "model is LlamaForCausalLM there and Qwen2ForCausalLM here"),
            ("llama", dict(num_hidden_layers=3), "layers is 2 there and 3"),
            ("llama", dict(num_key_value_heads=4), "heads is 2 there and 4"),
            ("llama", dict(head_dim=16), "head_dim is 8 there and 16"),
            ("llama", dict(hidden_size=64, head_dim=8), "width is 32 there and 64")):
        with pytest.raises(InputError, match=message):
            load_tuning(str(path), tiny(family, **options))


def test_a_second_tuning_replaces_the_first(tmp_path):
    model, path = tiny("llama"), tmp_path / "folder" / "t.safetensors"
    for seed in (1, 2):
        tuning = random_tuning(model, seed=seed)
        save_tuning(path, tuning, model)
        torch.testing.assert_close(load_tuning(str(path), model).masks, tuning.masks,
                                   atol=1e-2, rtol=1e-2)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "bad").write_text("x" * 100)
    for bad in ("bad", "none", ROOT / "models/draft/model.safetensors"):
        with pytest.raises(InputError, match="made by `python bita.py train`"):
            load_tuning(str(tmp_path / bad), tiny("llama"))


def test_the_embedded_tuning(embedded, held_out):
    """Held-out prompts: AR's output, and well over a token a call (1.87 was measured on 30 other
    prompts), also with a tree that this machine chooses."""
    assert per_call(bita, embedded[0], held_out[::2], tree="efficient") > 1.5
    assert per_call(bita, embedded[0], held_out[:1]) >= 1
    assert (ROOT / "models/bita.safetensors").stat().st_size < 1_000_000


# ------------------------------------------------------------------------- the command `train`

LLAMA = tiny("llama")


def trained(monkeypatch, tmp_path, prompts, limit=20, answers=None, **options):
    """What `train` gives to `fit`: (tuning, data, held out, options)."""
    given = []

    def spy(model, tuning, data, held_out, **rest):
        given.append((tuning, data, held_out, rest))
    monkeypatch.setattr(module, "fit", spy)
    monkeypatch.setattr(module, "own_answers", lambda model, tokenizer, prompts, limit, work, size:
                        answers or [p[:1] * min(limit, 4) for p in prompts])
    train(LLAMA, WORDLESS, prompts, out=tmp_path / "o", max_new_tokens=limit, **options)
    return given[0]


def test_held_out_answers_are_drawn_from_the_whole_file(tmp_path, monkeypatch, capsys):
    """One in ten, of each half alike, and none of them is trained on."""
    prompts, early = [[n, 5] for n in range(50)], 0
    splits = set()
    for seed in range(30):
        _, data, held_out, _ = trained(monkeypatch, tmp_path, prompts, seed=seed)
        numbers = [p[0] for p, _ in held_out]
        splits.add(tuple(sorted(numbers)))
        assert len(numbers) == 5 and sorted(p[0] for p, _ in data + held_out) == list(range(50))
        early += sum(n < 25 for n in numbers)
    assert len(splits) == 30  # each seed has its own
    assert 50 < early < 100  # of 150: a standard deviation is 6
    assert "45 answers of 180 tokens, 5 held out, 0 prompts too long" in capsys.readouterr().out


def test_prompts_without_room_for_an_answer_are_skipped(tmp_path, monkeypatch, capsys):
    """Of 160 tokens an answer may take 20; too short an answer has nothing to predict."""
    prompts = [[3] * 140, [4] * 141, [5] * 2, [6] * 500, [7]]
    _, data, held_out, _ = trained(monkeypatch, tmp_path, prompts,
                                   answers=[[3, 3, 3], [5, 5], [7]])
    assert sorted(len(p) for p, _ in data + held_out) == [2, 140]
    assert "1 answers of 2 tokens, 1 held out, 2 prompts too long" in capsys.readouterr().out
    with pytest.raises(InputError, match="2 prompts or more of at most 140 tokens, got 1"):
        train(LLAMA, WORDLESS, prompts[:2], out=tmp_path / "o", max_new_tokens=20)


def test_train_hands_its_options_on(tmp_path, monkeypatch):
    options = dict(steps=7, batch=3, accumulate=2, anchors=5, lr=0.1, seed=4)
    tuning, _, _, given = trained(monkeypatch, tmp_path, [[2], [3]], **options, design="shallow",
                                  P=6, M=2, work=tmp_path / "here")
    given.pop("say")
    assert given == options | {"work": tmp_path / "here"}
    assert equal(tuning, Tuning(shape_of(LLAMA), "shallow", 6, 2, seed=4))
    _, _, _, given = trained(monkeypatch, tmp_path, [[2], [3]])
    assert given["work"] == tmp_path / "o.work"  # the default


def test_wrong_numbers_are_refused(tmp_path):
    for wrong in (dict(steps=0), dict(batch=0), dict(accumulate=0), dict(anchors=0), dict(lr=0),
                  dict(max_new_tokens=0), dict(design="wide"), dict(P=0), dict(M=0)):
        with pytest.raises(InputError, match="expected (steps|a design)"):
            train(LLAMA, WORDLESS, [[2], [3]], out=tmp_path / "o",
                  **{"max_new_tokens": 9} | wrong)


# ------------------------------------------------------------------------- the command line

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Directories of tiny models with the embedded target's tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/target")
    for family in ("llama", "qwen2", "deepseek-v3"):
        tiny(family, vocab_size=len(tokenizer)).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    (folder / "two").write_text('How many cats?\n{"prompt": "How many dogs are there?"}\n')
    (folder / "one").write_text("hello\n")
    (folder / "long").write_text("one two three " * 200 + "\nhello\n")
    return folder


def command(*argv) -> int:
    """As the last lines of bita.py, on a CPU."""
    return main([bita], module.report, [*map(str, argv), "--device", "cpu"], commands=[train],
                    ranges={"tree": module.TREES, "k": (1, 2, 3, 5)})


def test_train_and_decode_from_the_command_line(small, tmp_path, capfd):
    out, target = tmp_path / "tuned.safetensors", ("--target", small / "llama")
    options = ["train", *target, "--prompts", small / "two", "--out", out, "--batch", "2", "--P",
               "2", "--max-new-tokens", "12"]
    assert command(*options, "--steps", "2") == 0
    text = capfd.readouterr().out
    assert "step 2: held-out loss" in text and out.stat().st_size < 10_000
    assert f"{2 * 2 * 2 * 2 * 8 + 3 * 32:,} parameters; 1 answers of" in text  # two layers
    first = out.read_bytes()
    assert command(*options, "--steps", "3") == 0 and out.read_bytes() != first
    assert command(*options, "--steps", "2") == 0 and out.read_bytes() == first
    assert "step 1:" not in capfd.readouterr().out.split("step 3:")[1]  # it was kept
    for tree in module.TREES:
        assert command(*target, "--prompts", small / "two", "--adapter", out, "--tree", tree,
                       "--k", "2", "--max-new-tokens", "20", "--compare") == 0
        err = capfd.readouterr().err
        assert "output equals autoregressive output" in err and "of them candidates" in err


def test_interrupted_from_the_command_line(small, tmp_path, capfd):
    """Ctrl-C is status 130; the same command then makes what an uninterrupted one makes."""
    def options(out):
        return ["train", "--target", small / "llama", "--prompts", small / "two", "--out", out,
                "--steps", "3", "--batch", "1", "--max-new-tokens", "12"]
    out, whole = tmp_path / "out", tmp_path / "whole"
    with interrupted("update"):
        assert command(*options(out)) == 130 and not out.exists()
    assert command(*options(out)) == command(*options(whole)) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert capfd.readouterr().out.count("step 1:") == 2


def test_the_file_itself_trains_tunes_and_decodes(small, tmp_path, monkeypatch, capfd):
    out = tmp_path / "t"
    for argv, said in (
            (["train", "--prompts", small / "two", "--out", out, "--steps", "1",
              "--max-new-tokens", "8"], "step 1: held-out loss"),
            (["--prompt", "Hello", "--adapter", out, "--max-new-tokens", "3", "--tune"],
             "--tree full")):
        argv = ["bita.py", *argv, "--target", small / "llama", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "bita.py"), run_name="__main__")
        assert end.value.code == 0 and said in capfd.readouterr().out
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("argv, said", [
    (["train"], "the following arguments are required: --out"),
    (["train", "--out", "o", "--prompts", "none"], "expected a file of prompts"),
    (["train", "--out", "o", "--prompts", "one"], "2 prompts or more of at most 120 tokens, got 1"),
    (["train", "--out", "o", "--prompts", "long"], "or more of at most 120 tokens, got 1"),
    (["train", "--out", "o", "--steps", "0"], "expected steps"),
    (["train", "--out", "o", "--steps", "x"], "invalid int value: 'x'"),
    (["train", "--out", "o", "--design", "wide"], "expected a design of deep, shallow, none"),
    (["train", "--out", "one/o"], "one"),
    (["train", "--out", "o", "--target", "deepseek-v3"], "expected keys and values of one size"),
    (["train", "--out", "o", "--target", "no/such/directory"], "expected a model directory"),
    (["--prompt", "x", "--adapter", "none"], "made by `python bita.py train`"),
    (["--prompt", "x", "--adapter", "one"], "made by `python bita.py train`"),
    (["--prompt", "x", "--target", "qwen2"], "there and Qwen2ForCausalLM here"),
    (["--prompt", "x"], "expected a tuning of this model"),
    (["--prompt", "x", "--target", "deepseek-v3"], "expected keys and values of one size"),
    (["--prompt", "x", "--tree", "round"], "expected a tree of best, efficient"),
    (["--prompt", "x", "--k", "0"], "expected a tree of best, efficient"),
    (["--prompt", "x", "--steps", "1"], "unrecognized arguments: --steps 1")])
def test_wrong_input_is_one_line_and_status_2(argv, said, small, monkeypatch, capfd):
    monkeypatch.chdir(small)
    target = [] if "--target" in argv else ["--target", "llama"]
    limit = ["--max-new-tokens", "40"] if argv[0] == "train" else []
    assert command(*argv, *target, *limit) == 2
    said_in_one_line(said, capfd)


def test_every_pass_has_its_own_batch(monkeypatch):
    """Drawn by the seed and the number of the step."""
    rows, seen = [([n, 4], [5, 6, 7, 8]) for n in range(40)], []

    def spy(data, *rest):
        seen[-1].append([prompt[0] for prompt, _ in data])
        return anchored(data, *rest)
    monkeypatch.setattr(module, "anchored", spy)
    monkeypatch.setattr(module, "accuracy", lambda *_: (0.0, []))
    for seed in (0, 1, 0):
        seen.append([])
        fitted(data=rows, seed=seed, batch=3)
    first, other, again = seen
    assert first == again and len({*map(tuple, first + other)}) == 16  # 4 steps of 2 passes each


def test_a_parameter_without_a_gradient_stays(monkeypatch):
    """No weight decay."""
    monkeypatch.setattr(module, "sar_loss", lambda logits, labels: logits.sum() * 0)
    tuning, _ = fitted(steps=2)
    assert equal(tuning, Tuning(shape_of(LLAMA), "deep", 3, 2, 0))


def test_accuracy_does_not_depend_on_the_batches():
    """Two answers of equal length, together and one by one."""
    model = tiny("llama")
    tuning = random_tuning(model)
    loss, right = accuracy(model, tuning, DATA, 9)
    again, each = accuracy(model, tuning, DATA, 9, size=1)
    assert again == pytest.approx(loss, rel=1e-4) and each == right
