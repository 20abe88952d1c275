"""BiTA: trees, positions, labels and loss by hand. Masks are trained on what they see in decoding.
That they change no token of the text is in test_lossless.py."""
import itertools
import random
from types import SimpleNamespace

import pytest
import torch

import bita as module
from bita import Tuning, accuracy, bita, build_tree, sample_anchors, sar_loss
from common import CachedLM
from fake_models import Decoder, path_to
from families import CONTEXT, FAMILIES, MORE_FAMILIES, tiny
from helpers import mask_logits
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
        text = SimpleNamespace(max_position_embeddings=CONTEXT, vocab_size=61, num_hidden_layers=1)
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


def for_position(M: int) -> Tuning:
    """Make M masks and no prompt tokens for a Position, which has no layers."""
    tuning = Tuning(LLAMA, 0, M)
    tuning.accept = [[0.9]] * M
    tuning.prompts.data, tuning.masks.data = torch.zeros(0, 2, 1, 0, 1), torch.zeros(M, 8)
    return tuning


def test_positions_and_labels_of_figure_4(monkeypatch):
    """A model that really looks ahead is recognised: all masks right in training batches, and all
    M drafts accepted in decoding, since they come from the masks after the last accepted token."""
    monkeypatch.setattr("survey.clock.row_costs", lambda *_: [1.0] * 65)
    tuning, text = for_position(3), [p * 7 % 61 for p in range(60)]
    data = [(text[:4], text[4:30]), (text[:9], text[9:13]), (text[:2], text[2:40])]
    for shift, right in ((1, 1.0), (2, 0.0)):
        accept = accuracy(Position(shift), tuning, data, 8)[1]
        assert [ranks[0] for ranks in accept] == [right] * 3
    tuning.accept = accuracy(Position(), tuning, data, 8)[1]
    for tree, lengths, guessed in (
            ("efficient", [1, 4, 4, 4], [0, 6, 6, 6]), ("full", [1, 4, 4, 4], [0, 14, 14, 14]),
            ("best", [1, 4, 4, 4], [0, 3, 3, 3]), ("chain", [1, 4, 1, 4], [0, 3, 0, 3])):
        log = []  # a chain's only masks are the root's, so that its guesses are used up (Fig. 4)
        method = bita(CachedLM(Position()), text[:5], tree=tree, k=2, tuning=tuning, log=log)
        chunks = list(itertools.islice(method, 4))
        assert [1 + r["accepted"] for r in log] == lengths == [len(chunk) for chunk in chunks]
        assert [r["guessed"] for r in log] == guessed
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
    target = CachedLM(model)
    for late in False, True:
        tuning, log = for_position(3), []
        chunks = list(itertools.islice(bita(target, text[:240], tuning=tuning, log=log), 40))
        assert sum(chunks, []) == text[240:240 + len(sum(chunks, []))]
        lengths = itertools.accumulate(map(len, chunks), initial=239)
        planned = [16 if (n < 256) != late else 1 for n in lengths][:len(log)]
        rows = [r["rows"] for r in log]
        first = planned.index(16)  # a call without candidates
        assert rows[:first] + rows[first + 1:] == planned[:first] + planned[first + 1:]
        assert rows[first] == 4 and {*planned} == {16, 1}


# ------------------------------------------------------------------------- what training sees

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


class Watched(CachedLM):
    """Keep the logits of the last call."""

    def forward(self, *args, **options):
        self.logits = super().forward(*args, **options)
        return self.logits


@pytest.mark.parametrize("family, P", [
    ("llama", 0), ("mistral", 0),
    *((name, 4) for name in {**FAMILIES, **MORE_FAMILIES} if name != "deepseek-v3")])
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
    """Eq. 1 over the labels that there are, each as much as any other."""
    labels = torch.tensor([[[2, 0], [1, -100]], [[-100, -100], [0, -100]]])
    logits = torch.randn(2, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    terms = [-logits[at].softmax(-1)[labels[at]].log()
             for at in itertools.product(range(2), repeat=3) if labels[at] >= 0]
    assert len(terms) == 4
    loss = sar_loss(logits, labels, lambda x: x, 3)
    torch.testing.assert_close(loss, sum(terms) / 4)


# ------------------------------------------------------------------------------------- tuning

def test_accuracy_by_hand():
    """Each label counts alike, however many its answer has."""
    tuning, data = tuning_of(LLAMA, 4, 3), DATA
    loss, accept = accuracy(LLAMA, tuning, data, 9)
    terms, right = [], torch.zeros(3, module.RANKS)
    for pair in data:
        ids, anchors, labels = sample_anchors([pair], 3, 9, random.Random(0))
        logits = mask_logits(LLAMA, tuning.masks, tuning.prompts, ids, anchors)
        for g, j in (labels[0] >= 0).nonzero().tolist():
            label = labels[0, g, j]
            terms.append(-logits[0, g, j].log_softmax(-1)[label])
            rank = logits[0, g, j].argsort(descending=True).tolist().index(label)
            right[j, rank:rank + 1] += 1 if rank < module.RANKS else 0
    counts = torch.tensor([3 + 3 + 2, 2 + 2 + 1, 1 + 1])  # labels of each mask, answer by answer
    assert len(terms) == 15 and loss == pytest.approx(sum(terms).item() / 15, rel=1e-4)
    torch.testing.assert_close(torch.tensor(accept), right / counts[:, None])
