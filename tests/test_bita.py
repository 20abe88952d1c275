"""BiTA: real tokens see no prompt and mask tokens; trees, positions, labels and loss by hand; masks
are trained on what they see in decoding."""
import itertools
import random
from types import SimpleNamespace

import pytest
import torch

import bita as module
from bita import Tuning, accuracy, bita, build_tree, sample_anchors, sar_loss
from common import CachedLM, InputError
from survey.clock import MASK_ROWS, best_tree, fill_tree, list_mask_trees
from fake_models import Decoder, path_to
from families import CONTEXT, FAMILIES, MORE_FAMILIES, tiny
from helpers import mask_logits

PROMPT = [3, 14, 15]
DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3], [4, 4, 2, 11]), ([50, 51], [52, 53, 54])]
LLAMA = tiny("llama")


def random_tuning(model, P=4, M=3, seed=0) -> Tuning:
    """Far from zero, so that a real token that saw any of it would notice."""
    tuning = Tuning(model, P, M)
    tuning.accept = [[0.5, 0.3, 0.1]] * M  # as if it were good, so that trees are large
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in tuning.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    return tuning.requires_grad_(False)


def embeddings(model, ids: list[int], tuning: Tuning, groups: int = 1) -> torch.Tensor:
    """Of real tokens, and of groups of mask tokens after them."""
    real = model.get_input_embeddings()(torch.tensor(ids))
    return torch.cat([real, tuning.masks.repeat(groups, 1)]).detach()


# ---------------------------------------------------------------------------------- decoding

def test_prompt_and_mask_tokens_leave_real_tokens_alone(family):
    """Bit for bit: logits of the tree's real nodes under two tunings."""
    model, seen, lm = tiny(family), [], CachedLM(tiny(family))
    parents = [-1, 0, 0, 0, 3, 1, 5]  # three real nodes, two groups of two masks
    for seed in (1, 2):
        tuning = random_tuning(model, M=2, seed=seed)
        lm.start(PROMPT, prefix=tuning.prompts)
        embeds = embeddings(model, [5, 6, 7], tuning, groups=2)
        seen.append(lm.forward(embeds, parents, sees_prefix=[False] * 3 + [True] * 4))
    assert torch.equal(seen[0][:3], seen[1][:3])
    assert not torch.allclose(seen[0][3:], seen[1][3:], atol=1e-2)


@pytest.mark.parametrize("tree", module.TREES)
def test_candidates_are_those_of_the_masks_after_the_last_accepted_token(tree, monkeypatch):
    """Call by call against the logits of training; a chain's one group is the root's, and of its
    M = 3 predictions those of accepted tokens are stale."""
    monkeypatch.setattr(module, "build_tree", lambda x, *rest, **full: calls.append([*x])
                        or build_tree(x, *rest, **full))
    monkeypatch.setattr("survey.clock.fill_tree", lambda plan, x, root: calls.append([*x])
                        or fill_tree(plan, x, root))
    monkeypatch.setattr("survey.clock.fastest", lambda *_: (best_tree([[0.5, 0.3], [0.4]], 5), 2))
    M, k = {"chain": (3, 1), "best": (2, 5)}.get(tree, (3, 2))
    for family in "llama", "mistral":
        model, calls, log, text = tiny(family, vocab_size=5), [], [], [3, 1, 4]
        tuning = random_tuning(model)
        method = bita(CachedLM(model), text, tree=tree, k=2, tuning=tuning, log=log)
        chunks = list(itertools.islice(method, 25))
        for chunk, candidates in zip(chunks, calls[1:]):
            known, stale = (text, len(chunk) - 1) if tree == "chain" else (text + chunk[:-1], 0)
            ids, at = torch.tensor([known]), torch.tensor([[len(known) - 1]])
            logits = mask_logits(model, tuning.masks, tuning.prompts, ids, at)
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
    ids, parents = build_tree(levels, "?")
    assert ids == ["?", *sum(levels, [])]
    assert parents == [-1, 0, 0, 0, 1, 1, 1, 4, 4, 4, 7, 7, 7]
    assert [ids[i] for i in path_to(12, parents)[1:]] == ["Yeah", ",", "I", "am"]


def test_the_full_tree():
    tree = build_tree([[1, 2], [3, 4]], 9, full=True)
    assert tree == ([9, 1, 2, 3, 4, 3, 4], [-1, 0, 0, 1, 1, 2, 2])
    assert build_tree([], 9, full=True) == build_tree([], 9) == ([9], [-1])


def test_the_tree_that_pays(monkeypatch):
    """As many nodes and masks as a call's rows are worth."""
    accept = [[0.5, 0.2], [0.4, 0.1]]
    for costs, nodes, M in (([1] * 7, 7, 2), ([1, 1, 1, 1.2, 9, 9, 9], 2, 1),
                            ([1, 1.6, 2, 4, 9, 9, 9], 1, 0), ([1, 1, 1, 1, 1.1, 9, 9], 5, 2)):
        costs = [costs[max(n - 1, 0).bit_length()] for n in range(MASK_ROWS + 1)]
        monkeypatch.setattr("survey.clock.row_costs", lambda *_: costs)
        tree, found = max(list_mask_trees(None, accept), key=lambda plan: plan[1] / plan[2])[0]
        assert (len(tree), found) == (nodes, M) and tree == best_tree(accept[:M], nodes)
    costs = list(range(MASK_ROWS + 1))  # a row a second
    for (tree, M), tokens, seconds in list_mask_trees(None, [[0.5] * 10] * 3):
        assert seconds == len(tree) * (1 + M) and tokens == sum(node.chance for node in tree)


SMALL = best_tree([[0.5, 0.2], [0.4, 0.1]], 4)
LARGE = best_tree([[0.6, 0.2], [0.8, 0.1], [0.45, 0.05]], 7)


@pytest.mark.parametrize("plan, candidates, ids, parents", [
    (SMALL, [[7, 8], [9]], [7, 8, 9], [-1, 0, 0, 1]),
    (SMALL, [[7, 8]], [7, 8], [-1, 0, 0]),
    (SMALL, [], [], [-1]),
    # planned for 3 masks, and the last call had 2: deeper nodes are left out
    (LARGE, [[7, 8], [5, 6]], [7, 5, 8, 5], [-1, 0, 1, 0, 3])])
def test_a_planned_tree_is_filled(plan, candidates, ids, parents):
    assert fill_tree(plan, candidates, 4) == ([4, *ids], parents)


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


def for_position(M: int) -> Tuning:
    """Make M masks and no prompt tokens for a Position, which has no layers."""
    tuning = Tuning(LLAMA, 0, M)
    tuning.accept = [[0.9]] * M
    tuning.prompts.data, tuning.masks.data = torch.zeros(0, 2, 1, 0, 1), torch.zeros(M, 8)
    return tuning


def test_positions_and_labels_of_figure_4(monkeypatch):
    """A model that really looks ahead is recognised: all masks right in training batches, and all
    M drafts accepted in decoding."""
    monkeypatch.setattr("survey.clock.row_costs", lambda *_: [1.0] * 65)
    tuning, text = for_position(3), [p * 7 % 61 for p in range(60)]
    data = [(text[:4], text[4:30]), (text[:9], text[9:13]), (text[:2], text[2:40])]
    for shift, right in ((1, 1.0), (2, 0.0)):
        accept = accuracy(Position(shift), tuning, data, 8)[1]
        assert [ranks[0] for ranks in accept] == [right] * 3
    tuning.accept = accuracy(Position(), tuning, data, 8)[1]
    for tree, lengths in (("efficient", [1, 4, 4, 4]), ("full", [1, 4, 4, 4]),
                          ("best", [1, 4, 4, 4]), ("chain", [1, 4, 1, 4])):  # Fig. 4: 1, 4, 1, …
        method = bita(CachedLM(Position()), text[:5], tree=tree, k=2, tuning=tuning)
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
    target = CachedLM(model)
    for late, M in ((False, 3), (False, 1), (True, 3)):
        tuning, log = for_position(M), []
        chunks = list(itertools.islice(bita(target, text[:240], tuning=tuning, log=log), 40))
        assert sum(chunks, []) == text[240:240 + len(sum(chunks, []))]
        lengths = itertools.accumulate(map(len, chunks), initial=239)
        planned = [(1 + M) ** 2 if (n < 256) != late else 1 for n in lengths][:len(log)]
        rows = [r["rows"] for r in log]
        first = planned.index((1 + M) ** 2)  # a call without candidates
        assert rows[:first] + rows[first + 1:] == planned[:first] + planned[first + 1:]
        assert rows[first] == 1 + M and {*planned} == {(1 + M) ** 2, 1}


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


@pytest.mark.parametrize("family, P", [
    ("llama", 0), ("mistral", 0),
    *((name, 4) for name in {**FAMILIES, **MORE_FAMILIES} if name != "deepseek-v3")])
def test_training_sees_what_decoding_sees(family, P):
    """The mask logits of an anchored, padded batch equal those of the cached tree, group by group;
    the first text is longer than the windows of 9 tokens."""
    model, rng = tiny(family), random.Random(5)
    data = [([rng.randrange(2, 61) for _ in range(n)], [rng.randrange(2, 61) for _ in range(m)])
            for n, m in ((13, 5), (1, 3), (7, 4))]
    tuning, lm = random_tuning(model, P), CachedLM(model)
    ids, anchors, labels = sample_anchors(data, 3, 9, random.Random(0))
    with torch.inference_mode():
        logits = mask_logits(model, tuning.masks, tuning.prompts, ids, anchors)
    for b, (prompt, answer) in enumerate(data):
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 2)
        assert (labels[b, :, 0] >= 0).sum() == len(places)
        for g, place in enumerate(places):
            text = (prompt + answer)[:place + 1]
            lm.start(text[:-1], prefix=tuning.prompts)
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

def test_accuracy_by_hand():
    """Each label counts alike, however many its answer has."""
    tuning, data = random_tuning(LLAMA), DATA
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


def test_models_with_keys_and_values_of_two_sizes_are_refused():
    with pytest.raises(InputError, match="expected keys and values of one size, got Deepseek"):
        Tuning(tiny("deepseek-v3"))
