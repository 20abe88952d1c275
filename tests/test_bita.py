"""BiTA's trees, positions, labels and loss are checked by hand. Masks are trained on what they see
in decoding. That they change no token of the text is in test_lossless.py."""
import itertools
import random

import pytest
import torch

import bita as module
from bita import PrefixLM, bita, build_tree, measure, sample_anchors, sar_loss
from fake_models import path_to
from families import FAMILIES, tiny
from helpers import mask_logits, note_calls
from test_lossless import tuning_of

DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3], [4, 4, 2, 11]), ([50, 51], [52, 53, 54])]
LLAMA = tiny("llama")


# ---------------------------------------------------------------------------------- decoding

def test_the_tree_of_figure_5():
    """M = 4, k = 3: of each level only the first node has children."""
    levels = [["Yeah", "Yes", "Sure"], [",", "!", "."], ["I", "they", "LLMs"],
              ["have", "read", "am"]]
    ids, parents = build_tree(levels, "?")
    assert ids == ["?", *sum(levels, [])]
    assert parents == [-1, 0, 0, 0, 1, 1, 1, 4, 4, 4, 7, 7, 7]
    assert [ids[i] for i in path_to(12, parents)[1:]] == ["Yeah", ",", "I", "am"]


def test_the_full_tree():
    tree = build_tree([[1, 2], [3, 4]], 9, full=True)
    assert tree == ([9, 1, 2, 3, 4, 3, 4], [-1, 0, 0, 1, 1, 2, 2])
    assert build_tree([], 9, full=True) == build_tree([], 9) == ([9], [-1])


@pytest.mark.parametrize("tree, k, guessed", [
    ("efficient", 2, 6), ("full", 2, 14), ("chain", 1, 3)])
def test_candidates_are_those_of_the_masks_after_the_last_accepted_token(tree, k, guessed,
                                                                         monkeypatch):
    """The masks must see what training sees. The tokens are few, so candidates are often accepted.
    A chain has only the root's masks, and the first ones are used up (Fig. 4)."""
    model, expected, log = tiny("llama", vocab_size=8), [[]], []
    used = note_calls(monkeypatch, module, "build_tree")
    tuning, text = tuning_of(model, 4, 3), [5, 3, 4, 1, 2, 6]
    chunks = bita(PrefixLM(model), text, tree=tree, k=2, tuning=tuning, log=log)
    for chunk in itertools.islice(chunks, 12):
        ids, text = text, text + chunk
        anchor = len(text) - 2 if tree != "chain" else len(ids) - 1
        with torch.inference_mode():
            logits = mask_logits(model, tuning.masks, tuning.prompts, torch.tensor([text]),
                                 torch.tensor([[anchor]]))[0, 0]
        left = logits[len(chunk) - 1:] if tree == "chain" else logits
        expected.append(left.topk(k).indices.tolist())
    assert [given[0] for given in used] == expected[:-1] and max(r["accepted"] for r in log) > 0
    assert max(r["guessed"] for r in log) == guessed


# ------------------------------------------------------------------------- what training sees

def test_an_anchored_batch_by_hand():
    data = [([5, 6], [7, 8, 9]), ([4], [3, 2, 1, 0])]
    ids, anchors, labels = sample_anchors(data, 2, 9, random.Random(0))
    assert ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, 2, 1, 0]]
    assert anchors.tolist() == [[1, 2, 0], [0, 1, 2]]  # the third of the first is none
    assert labels.tolist() == [[[8, 9], [9, -100], [-100, -100]], [[2, 1], [1, 0], [0, -100]]]


def test_anchors_are_capped_and_drawn_evenly():
    """An answer has up to `most` anchors, all different and in order. Its 18 places are equally
    likely: each is expected in 2,000 / 6 draws, with a standard deviation of 17."""
    data, counts, rng = [([1, 2], list(range(3, 22))), ([1], [2, 3, 4])], [0] * 18, random.Random(0)
    for _ in range(2000):
        _, anchors, labels = sample_anchors(data, 2, 3, rng)
        first, second = anchors.tolist()
        assert len(first) == 3 and first == sorted(set(first)) and second == [0, 1, 0]
        assert (labels[:, :, 0] >= 0).tolist() == [[True] * 3, [True, True, False]]
        for place in first:
            counts[place - 1] += 1
    assert max(abs(count - 2000 / 6) for count in counts) < 100


class Watched(PrefixLM):
    """Keep the logits of the last call."""

    def forward(self, *args, **options):
        self.logits = super().forward(*args, **options)
        return self.logits


@pytest.mark.parametrize("family, P", [
    ("llama", 0), *((name, 4) for name in [*FAMILIES, "gemma2", "gpt-oss", "cohere2"])])
def test_training_sees_what_decoding_sees(family, P):
    """The mask logits of an anchored, padded batch equal those of the cached tree, group by group;
    the first text is longer than the windows of 9 tokens."""
    model, rng = tiny(family), random.Random(5)
    data = [([rng.randrange(2, 61) for _ in range(n)], [rng.randrange(2, 61) for _ in range(m)])
            for n, m in ((13, 5), (1, 3), (7, 4))]
    tuning, lm = tuning_of(model, P, 3), Watched(model)
    ids, anchors, labels = sample_anchors(data, 3, 9, random.Random(0))
    with torch.inference_mode():
        logits = mask_logits(model, tuning.masks, tuning.prompts, ids, anchors)
    for b, (prompt, answer) in enumerate(data):
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 2)
        assert (labels[b, :, 0] >= 0).sum() == len(places)
        for g, place in enumerate(places):
            next(bita(lm, (prompt + answer)[:place + 1], tree="chain", tuning=tuning))
            torch.testing.assert_close(logits[b, g], lm.logits[1:], atol=1e-4, rtol=1e-4)


def test_the_loss_by_hand():
    """The loss is Eq. 1 over the labels that there are, each as much as any other."""
    labels = torch.tensor([[[2, 0], [1, -100]], [[-100, -100], [0, -100]]])
    logits = torch.randn(2, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    terms = [-logits[at].softmax(-1)[labels[at]].log()
             for at in itertools.product(range(2), repeat=3) if labels[at] >= 0]
    assert len(terms) == 4
    loss = sar_loss(logits, labels, lambda x: x)
    torch.testing.assert_close(loss, sum(terms) / 4)


# ------------------------------------------------------------------------------------- tuning

def test_what_is_measured_by_hand():
    """Each label counts alike, however many its answer has. Right is a mask's likeliest token."""
    tuning, data = tuning_of(LLAMA, 4, 3), DATA
    loss, shares = measure(LLAMA, tuning, data, 9)
    terms, right = [], torch.zeros(3)
    for pair in data:
        ids, anchors, labels = sample_anchors([pair], 3, 9, random.Random(0))
        logits = mask_logits(LLAMA, tuning.masks, tuning.prompts, ids, anchors)
        for g, j in (labels[0] >= 0).nonzero().tolist():
            label = labels[0, g, j]
            terms.append(-logits[0, g, j].log_softmax(-1)[label])
            right[j] += logits[0, g, j].argmax() == label
    counts = torch.tensor([3 + 3 + 2, 2 + 2 + 1, 1 + 1])  # labels of each mask, answer by answer
    assert len(terms) == 15 and loss == pytest.approx(sum(terms).item() / 15, rel=1e-4)
    torch.testing.assert_close(torch.tensor(shares), right / counts)
