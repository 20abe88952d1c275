"""BiTA: the model's own output whatever the prompt and mask tokens are; positions and labels;
tuning sees what decoding sees, reaches nothing else, starts over where it must and else goes on."""
import functools
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

import bita as module
from bita import (Tuning, accuracy, bita, build_efficient_tree, build_full_tree, build_planned_tree,
                  fit, list_plans, load_tuning, mask_states, sample_anchors, sar_loss,
                  save_tuning, shape_of, train)
from common import CachedLM, InputError, autoregressive
from survey.clock import best_tree
from fake_models import Decoder, path_to
from families import CONTEXT, FAMILIES, MORE_FAMILIES, tiny
from helpers import ROOT, main, mask_logits, per_call, said_in_one_line, tokens_of
from training import loop as training
from training.parts import score_with

PROMPT = [3, 14, 15]
DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3], [4, 4, 2, 11])]
HELD_OUT = [([50, 51], [52, 53, 54])]
WORDLESS = SimpleNamespace(eos_token_id=None)  # a tokenizer, as far as needed
LLAMA = tiny("llama")


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
    return tuning.soft_rows(model)


def equal(a: Tuning, b: Tuning) -> bool:
    return torch.equal(a.masks, b.masks) and torch.equal(a.soft_prompt, b.soft_prompt)


# ---------------------------------------------------------------------------------- decoding

def test_prompt_and_mask_tokens_leave_real_tokens_alone(family):
    """Bit for bit: logits of the tree's real nodes under two tunings."""
    model, seen, lm = tiny(family), [], CachedLM(tiny(family))
    parents = [-1, 0, 0, 0, 3, 1, 5]  # three real nodes, two groups of two masks
    for seed in (1, 2):
        tuning = random_tuning(model, M=2, seed=seed)
        lm.start(PROMPT, prefix=prompt_rows(tuning, model))
        embeds = embeddings(model, [5, 6, 7], tuning, groups=2)
        seen.append(lm.forward(embeds, parents, sees_prefix=[False] * 3 + [True] * 4))
    assert torch.equal(seen[0][:3], seen[1][:3])
    assert not torch.allclose(seen[0][3:], seen[1][3:], atol=1e-2)


@pytest.mark.parametrize("tree", module.TREES)
def test_candidates_are_those_of_the_masks_after_the_last_accepted_token(tree, monkeypatch):
    """Call by call against the logits of training; a chain's one group is the root's, and of its
    M = 3 predictions those of accepted tokens are stale."""
    for name in ("build_efficient_tree", "build_full_tree"):
        make = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, make=make: calls.append(x) or make(x))
    monkeypatch.setattr(module, "build_planned_tree", lambda plan, x: calls.append(x)
                        or build_planned_tree(plan, x))
    monkeypatch.setattr("survey.clock.fastest", lambda *_: (best_tree([[0.5, 0.3], [0.4]], 5), 2))
    M, k = {"chain": (3, 1), "best": (2, 5)}.get(tree, (3, 2))
    for family, design in (("llama", "deep"), ("mistral", "shallow")):
        model, calls, log, text = tiny(family, vocab_size=5), [], [], [3, 1, 4]
        tuning = random_tuning(model, design)
        asked = k if tree in ("efficient", "full") else 0
        method = bita(CachedLM(model), text, tree=tree, k=asked, tuning=tuning, log=log)
        chunks = list(itertools.islice(method, 25))
        for chunk, candidates in zip(chunks, calls[1:]):
            known, stale = (text, len(chunk) - 1) if tree == "chain" else (text + chunk[:-1], 0)
            ids, at = torch.tensor([known]), torch.tensor([[len(known) - 1]])
            logits = mask_logits(model, tuning.masks, tuning.soft_rows(model), ids, at)
            assert candidates == logits[0, 0, stale:M].topk(k).indices.tolist()
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
    ids, parents = build_efficient_tree(levels)
    assert ids[1:] == sum(levels, [])
    assert parents == [-1, 0, 0, 0, 1, 1, 1, 4, 4, 4, 7, 7, 7]
    assert [ids[i] for i in path_to(12, parents)[1:]] == ["Yeah", ",", "I", "am"]


def test_the_tree_that_pays(monkeypatch):
    """As many nodes and masks as a call's rows are worth."""
    accept = [[0.5, 0.2], [0.4, 0.1]]
    for costs, nodes, M in (([1] * 7, 7, 2), ([1, 1, 1, 1.2, 9, 9, 9], 2, 1),
                            ([1, 1.6, 2, 4, 9, 9, 9], 1, 0), ([1, 1, 1, 1, 1.1, 9, 9], 5, 2)):
        costs = [costs[max(n - 1, 0).bit_length()] for n in range(module.MOST + 1)]
        monkeypatch.setattr("survey.clock.row_costs", lambda *_: costs)
        tree, found = max(list_plans(None, accept), key=lambda plan: plan[1] / plan[2])[0]
        assert (len(tree), found) == (nodes, M) and tree == best_tree(accept[:M], nodes)
    costs = list(range(module.MOST + 1))  # a row a second
    for (tree, M), tokens, seconds in list_plans(None, [[0.5] * 10] * 3):
        assert seconds == len(tree) * (1 + M) and tokens == sum(node.chance for node in tree)


SMALL = best_tree([[0.5, 0.2], [0.4, 0.1]], 4)
LARGE = best_tree([[0.6, 0.2], [0.8, 0.1], [0.45, 0.05]], 7)


@pytest.mark.parametrize("make, candidates, ids, parents", [
    (build_full_tree, [[1, 2], [3, 4]], [1, 2, 3, 4, 3, 4], [-1, 0, 0, 1, 1, 2, 2]),
    (build_full_tree, [], [], [-1]),
    (functools.partial(build_planned_tree, SMALL), [[7, 8], [9]], [7, 8, 9], [-1, 0, 0, 1]),
    (functools.partial(build_planned_tree, SMALL), [[7, 8]], [7, 8], [-1, 0, 0]),
    (functools.partial(build_planned_tree, SMALL), [], [], [-1]),
    # planned for 3 masks, and the last call had 2: deeper nodes are left out
    (functools.partial(build_planned_tree, LARGE), [[7, 8], [5, 6]], [7, 5, 8, 5],
     [-1, 0, 1, 0, 3])])
def test_full_and_planned_trees(make, candidates, ids, parents):
    assert make(candidates) == ([-1, *ids], parents)


class Looker(Decoder):
    """Stand in for the inside of Position: features are the token after the position, one-hot."""

    def forward(self, position_ids, **_):
        following = (position_ids + self.shift) * 7 % 61
        return (torch.nn.functional.one_hot(following, 61).float(),)


class Position(torch.nn.Module):
    """A model whose next token depends on the position alone: after position p comes
    (p + 1) * 7 % 61. A mask at position a + j is right about the token of a + j + 1 exactly if it
    stands where it should."""
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, shift=1):
        super().__init__()
        self.table, self.decoder = torch.nn.Embedding(61, 8), Looker()
        self.decoder.shift = shift
        text = SimpleNamespace(max_position_embeddings=CONTEXT, vocab_size=61)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.head = torch.nn.Linear(61, 61, bias=False)
        self.head.weight.data = torch.eye(61)

    def get_output_embeddings(self):
        return self.head

    def get_input_embeddings(self):
        return self.table

    def get_decoder(self):
        return self.decoder

    def forward(self, position_ids, logits_to_keep=slice(None), **_):
        [features] = self.decoder(position_ids=position_ids)
        return SimpleNamespace(logits=features[:, logits_to_keep])


def test_positions_and_labels_of_figure_4(monkeypatch):
    """A model that really looks ahead is recognised: all masks right in training batches, and all
    M drafts accepted in decoding."""
    monkeypatch.setattr("survey.clock.row_costs", lambda *_: [1.0] * 65)
    shape = dict(layers=1, heads=1, head_dim=1, width=8)
    tuning, text = Tuning(shape, "none", 1, 3), [p * 7 % 61 for p in range(60)]
    data = [(text[:4], text[4:30]), (text[:9], text[9:13]), (text[:2], text[2:40])]
    for shift, right in ((1, 1.0), (2, 0.0)):
        accept = accuracy(Position(shift), tuning, data, 8)[1]
        assert [ranks[0] for ranks in accept] == [right] * 3
    tuning.accept = accuracy(Position(), tuning, data, 8)[1]
    for tree, lengths in (("efficient", [1, 4, 4, 4]), ("full", [1, 4, 4, 4]),
                          ("best", [1, 4, 4, 4]), ("chain", [1, 4, 1, 4])):  # Fig. 4: 1, 4, 1, …
        k = 2 if tree in ("efficient", "full") else 0
        method = bita(CachedLM(Position()), text[:5], tree=tree, k=k, tuning=tuning)
        chunks = list(itertools.islice(method, 4))
        assert [len(chunk) for chunk in chunks] == lengths
        assert sum(chunks, []) == text[5:5 + sum(lengths)]


def test_a_tree_is_planned_for_a_tuning_and_a_length(monkeypatch):
    """Rows cost nothing until the context has 256 tokens, then each as much as the first; masks
    that are gone, or are new, leave the output as it is."""
    def costs_of(lm, most):
        assert most == 64
        cheap = lm.length < 256
        return [1.0 if cheap != late else float(n) for n in range(65)]
    monkeypatch.setattr("survey.clock.row_costs", costs_of)
    model, text = Position(), [p * 7 % 61 for p in range(400)]
    model.config.get_text_config().max_position_embeddings = 999
    shape, target = dict(layers=1, heads=1, head_dim=1, width=8), CachedLM(model)
    for late, M in ((False, 3), (False, 1), (True, 3)):
        tuning, log = Tuning(shape, "none", 1, M), []
        tuning.accept = [[0.9]] * M
        chunks = list(itertools.islice(bita(target, text[:240], tuning=tuning, log=log), 40))
        assert sum(chunks, []) == text[240:240 + len(sum(chunks, []))]
        lengths = itertools.accumulate(map(len, chunks), initial=239)
        planned = [(1 + M) ** 2 if (n < 256) != late else 1 for n in lengths][:len(log)]
        rows = [r["rows"] for r in log]
        first = planned.index((1 + M) ** 2)  # a call without candidates
        assert rows[:first] + rows[first + 1:] == planned[:first] + planned[first + 1:]
        assert rows[first] == 1 + M and {*planned} == {(1 + M) ** 2, 1}


# ------------------------------------------------------------------------- what training sees

def test_the_number_of_parameters():
    """P x layers x 2 x key heads x head size (deep), P x width (shallow), and M x width."""
    shape = shape_of(tiny("llama"))  # 2 layers, 2 key heads of 8, width 32
    for design, prompts in (("deep", 16 * 2 * 2 * 2 * 8), ("shallow", 16 * 32), ("none", 0)):
        parameters = Tuning(shape, design, 16, 3).parameters()
        assert sum(p.numel() for p in parameters) == prompts + 3 * 32


def test_an_anchored_batch_by_hand():
    data = [([5, 6], [7, 8, 9]), ([4], [3, 2, 1, 0])]
    ids, anchors, labels = sample_anchors(data, 2, 9, random.Random(0))
    assert ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, 2, 1, 0]]
    assert anchors.tolist() == [[1, 2, 0], [0, 1, 2]]  # the third of the first is none
    assert labels.tolist() == [[[8, 9], [9, -100], [-100, -100]], [[2, 1], [1, 0], [0, -100]]]


def test_anchors_are_capped_and_drawn_evenly():
    """`most` of them, all different, in order, any of the 18 places alike: each is expected in
    2,000 / 6 draws, with a standard deviation of 17."""
    data, counts, rng = [([1, 2], list(range(3, 22))), ([1], [2, 3, 4])], [0] * 18, random.Random(0)
    for _ in range(2000):
        _, anchors, labels = sample_anchors(data, 2, 3, rng)
        first, second = anchors.tolist()
        assert len(first) == 3 and first == sorted(set(first)) and second == [0, 1, 0]
        assert (labels[:, :, 0] >= 0).tolist() == [[True] * 3, [True, True, False]]
        for place in first:
            counts[place - 1] += 1
    assert max(abs(count - 2000 / 6) for count in counts) < 100


@pytest.mark.parametrize("family, design", [
    ("llama", "shallow"), ("llama", "none"), ("mistral", "shallow"), ("mistral", "none"),
    *((name, "deep") for name in {**FAMILIES, **MORE_FAMILIES} if name != "deepseek-v3")])
def test_training_sees_what_decoding_sees(family, design):
    """The mask logits of an anchored, padded batch equal those of the cached tree, group by group;
    the first text is longer than the windows of 9 tokens."""
    model, rng = tiny(family), random.Random(5)
    data = [([rng.randrange(2, 61) for _ in range(n)], [rng.randrange(2, 61) for _ in range(m)])
            for n, m in ((13, 5), (1, 3), (7, 4))]
    tuning, lm = random_tuning(model, design), CachedLM(model)
    rows = prompt_rows(tuning, model)
    ids, anchors, labels = sample_anchors(data, 3, 9, random.Random(0))
    with torch.inference_mode():
        logits = mask_logits(model, tuning.masks, tuning.soft_rows(model), ids, anchors)
    for b, (prompt, answer) in enumerate(data):
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 2)
        assert (labels[b, :, 0] >= 0).sum() == len(places)
        for g, place in enumerate(places):
            text = (prompt + answer)[:place + 1]
            lm.start(text[:-1], prefix=rows)
            embeds = embeddings(model, text[-1:], tuning)
            alone = lm.forward(embeds, sees_prefix=[False] + [True] * 3)[1:]
            torch.testing.assert_close(logits[b, g], alone, atol=1e-4, rtol=1e-4)


def test_the_loss_by_hand():
    """Eq. 1 over the labels that there are, each as much as any other."""
    labels = torch.tensor([[[2, 0], [1, -100]], [[-100, -100], [0, -100]]])
    logits = torch.randn(2, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    terms = [-logits[at].softmax(-1)[labels[at]].log()
             for at in itertools.product(range(2), repeat=3) if labels[at] >= 0]
    assert len(terms) == 4
    loss = sar_loss(logits, labels, lambda x: x, 3)
    torch.testing.assert_close(loss, sum(terms) / 4)


# ------------------------------------------------------------------------------------- tuning

@pytest.mark.parametrize("design", module.DESIGNS)
def test_tuning_lowers_the_loss_and_reaches_nothing_else(design):
    model, rng = tiny("llama"), random.Random(0)
    prompts, lm = [[rng.randrange(2, 61) for _ in range(4)] for _ in range(16)], CachedLM(model)
    data = [(p, tokens_of(autoregressive(lm, p), 12)) for p in prompts]
    before = {name: p.clone() for name, p in model.named_parameters()}
    tuning = Tuning(shape_of(model), design, 4, 2)
    score = score_with(model)
    start = accuracy(model, tuning, data, 12)[0]
    curve = fit(model, tuning, data, data, steps=40, batch=8, anchors=12, lr=3e-2)
    assert list(curve) == list(range(0, 41, 4)) and curve[0]["loss"] == start
    assert curve[40]["loss"] < start - 0.1 and tuning.accept == curve[40]["accept"]
    assert accuracy(model, tuning, data, 12) == tuple(curve[40].values())
    assert all(torch.equal(p, before[name]) and p.grad is None
               for name, p in model.named_parameters())
    ids, anchors, labels = sample_anchors(data, 2, 12, rng)
    states = mask_states(model, tuning.masks, tuning.soft_rows(model), ids, anchors)
    sar_loss(states, labels, score, 61).backward()
    assert all(p.numel() == 0 or p.grad.abs().sum() > 0 for p in tuning.parameters())


# ------------------------------------------------------------------ what is kept, and for whom

FIT = dict(steps=4, batch=2, anchors=2, lr=1e-2)


def fitted(work=None, model=0, data=DATA, held_out=HELD_OUT, design="deep", P=3, M=2, seed=0,
           **options):
    """(tuning, curve)."""
    model = tiny("llama", seed=model)
    tuning = Tuning(shape_of(model), design, P, M, seed)
    return tuning, fit(model, tuning, data, held_out, seed=seed, work=work, **FIT | options)


@pytest.mark.parametrize("change", [
    dict(model=1), dict(data=DATA[::-1] + DATA), dict(held_out=DATA), dict(design="none"),
    dict(design="shallow", P=6), dict(P=4), dict(M=3), dict(batch=1), dict(anchors=1)],
    ids=lambda change: next(iter(change)))
def test_another_tuning_in_the_same_folder_has_a_checkpoint_of_its_own(change, worked):
    """6 shallow prompt tokens have as many numbers as 3 deep ones."""
    before = {*worked.iterdir()}
    fitted(worked, steps=2)  # the same tuning again
    assert {*worked.iterdir()} == before
    fitted(worked, **{"steps": 2} | change)
    assert len({*worked.iterdir()}) == len(before) + 1


# -------------------------------------------------------------------------- files of tunings

DTYPES = torch.float32, torch.bfloat16


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
            torch.testing.assert_close(loaded.soft_prompt, tuning.soft_prompt, atol=1e-3, rtol=1e-2)
            assert prompt_rows(loaded, model)[0][0].shape == (2, 3, 8)
            assert next(bita(CachedLM(model), PROMPT, adapter=str(path)))
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


def test_the_embedded_tuning(embedded, held_out):
    """Held-out prompts: AR's output, and well over a token a call (1.87 was measured on 30 other
    prompts), also with a tree that this machine chooses."""
    assert per_call(bita, embedded[0], held_out[::2], tree="efficient") > 1.5
    assert per_call(bita, embedded[0], held_out[:1]) >= 1
    assert (ROOT / "models/bita.safetensors").stat().st_size < 1_000_000


# ------------------------------------------------------------------------- the command `train`

def test_train_hands_its_options_on(tmp_path, monkeypatch, capsys):
    """To what asks the model for answers, and to what learns from them."""
    asked, given, prompts = [], [], [[2], [3]]

    def examples(model, tokenizer, *some, **rest):
        asked.append((model is LLAMA, tokenizer is WORDLESS, *some, rest))
        return DATA, HELD_OUT
    monkeypatch.setattr(training, "collect_examples", examples)
    monkeypatch.setattr(module, "fit", lambda model, *some, **rest: given.append((*some, rest)))
    for work, made in ((None, tmp_path / "o.work"), (tmp_path / "here", tmp_path / "here")):
        options = dict(steps=7, batch=3, anchors=5, lr=0.1, seed=4)
        train(LLAMA, WORDLESS, prompts, out=tmp_path / "o", work=work, design="shallow", P=6, M=2,
              max_new_tokens=20, **options)
        assert asked.pop() == (True, True, prompts, 20, made, {"seed": 4})
        tuning, *data, rest = given.pop()
        assert data == [DATA, HELD_OUT] and rest == options | {"work": made}
        assert equal(tuning, Tuning(shape_of(LLAMA), "shallow", 6, 2, seed=4))
        torch.testing.assert_close(load_tuning(str(tmp_path / "o"), LLAMA).masks, tuning.masks,
                                   atol=1e-3, rtol=1e-2)
    assert capsys.readouterr().out == f"{6 * 32 + 2 * 32} parameters\n" * 2


@pytest.mark.parametrize("tree, k, expected", [
    ("efficient", 0, 5), ("efficient", 2, 2), ("full", 0, 5), ("full", 1, 1), ("chain", 0, 1),
    ("best", 0, module.RANKS)])
def test_candidates_of_each_tree(tree, k, expected):
    assert module.count_candidates(tree, k) == expected


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
    assert f"{2 * 2 * 2 * 2 * 8 + 3 * 32:,} trained numbers" in text and "1 answers of" in text
    first = out.read_bytes()
    assert command(*options, "--steps", "3") == 0 and out.read_bytes() != first
    assert command(*options, "--steps", "2") == 0 and out.read_bytes() == first
    assert "step 1:" not in capfd.readouterr().out.split("step 3:")[1]  # it was kept
    for tree in module.TREES:
        k = ("--k", "2") if tree in ("efficient", "full") else ()
        assert command(*target, "--prompts", small / "two", "--adapter", out, "--tree", tree,
                       *k, "--max-new-tokens", "20", "--compare") == 0
        err = capfd.readouterr().err
        assert "output equals autoregressive output" in err and "of them candidates" in err


@pytest.mark.parametrize("argv, said", [
    ("train --prompts none", "expected a file of prompts"),
    ("train --prompts one", "2 prompts or more of at most 120 tokens, got 1"),
    ("train --prompts long", "or more of at most 120 tokens, got 1"),
    ("train --accumulate 0", "--accumulate must be 1 or more, got 0"),
    ("train --P 0", "--P must be 1 or more, got 0"),
    ("train --M 0", "--M must be 1 or more, got 0"),
    ("train --lr 0", "--lr must be above 0, got 0"),
    ("train --design wide", "--design must be deep, shallow, none, got wide"),
    ("train --target deepseek-v3", "expected keys and values of one size"),
    ("--adapter one", "made by `python bita.py train`"),
    ("--target qwen2", "there and Qwen2ForCausalLM here"),
    ("", "expected a tuning of this model"),
    ("--k 1 --tree chain", "left out with --tree chain, got 1")])
def test_wrong_input_is_one_line_and_status_2(argv, said, small, monkeypatch, capfd):
    monkeypatch.chdir(small)
    argv = argv.split()
    argv += ["--out", "o", "--max-new-tokens", "40"] if "train" in argv else ["--prompt", "x"]
    if "--target" not in argv:
        argv += ["--target", "llama"]
    assert command(*argv) == 2
    said_in_one_line(said, capfd)


def test_every_pass_has_its_own_batch(monkeypatch):
    """It is drawn by the seed and the number of the step, from what is learnt alone."""
    rows, seen, measured = [([n, 4], [5, 6, 7, 8]) for n in range(40)], [], []

    def spy(data, M, most, rng):
        assert len(data) == 3 and most == FIT["anchors"]
        seen[-1].append([prompt[0] for prompt, _ in data])
        return sample_anchors(data, M, most, rng)
    monkeypatch.setattr(module, "sample_anchors", spy)
    monkeypatch.setattr(module, "accuracy", lambda *args: measured.append(args[2]) or (0.0, []))
    for seed in (0, 1, 0):
        seen.append([])
        with training.use_settings(training.Settings(accumulate=2)):
            fitted(data=rows, seed=seed, batch=3)
    first, other, again = seen
    assert first == again and len({*map(tuple, first + other)}) == 16  # 4 steps of 2 passes each
    assert all(data is HELD_OUT for data in measured)


def test_accuracy_does_not_depend_on_the_batches():
    """Two answers of equal length are measured together and one by one."""
    tuning = random_tuning(LLAMA)
    loss, right = accuracy(LLAMA, tuning, DATA, 9)
    again, each = accuracy(LLAMA, tuning, DATA, 9, size=1)
    assert again == pytest.approx(loss, rel=1e-4) and each == right
