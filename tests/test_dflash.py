"""The loss of a block draft is that of the guesses one by one, as decoding computes them. The tree
has the likeliest of all paths. test_released.py compares its network with formulas."""
import random

import pytest
import torch

from common import KVCache
from fake_models import paths_of
from families import rand, tiny
from support.clock import list_sizes
from support.engine import depth_of
from support.parts import score_with
from support.released import describe_dflash
from survey.dflash import (BlockDraft, block_loss, grow_block, guess_blocks, run_block,
                           sample_roots)
from training.texts import Text, compute_features

MODEL = tiny("llama", num_hidden_layers=3)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def make_draft(model=MODEL, scale=0.3) -> BlockDraft:
    """Make a draft whose every weight is random."""
    return rand(BlockDraft(model, describe_dflash(model, [0, 1], 60, 2, 5, 8)), scale)


def test_at_first_the_markov_head_adds_nothing():
    fresh, z = BlockDraft(MODEL, make_draft().config), torch.randn(2, 50)
    assert torch.equal(fresh.add_markov(z, torch.tensor([9, 11])), z)


# ------------------------------------------------------------------------------------- the loss

@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_the_loss_by_hand(family):
    """Guess by guess, as decoding computes them, with the target's distribution before each token.
    Blocks of two texts of different lengths are packed. The last token of a text counts once."""
    model = tiny(family)
    draft, anchors = make_draft(model, scale=1.0), [[4, 8, 13], [0, 1, 5]]
    texts = compute_features(model, [(TEXT[:5], TEXT[5:]), (TEXT[3:4], TEXT[4:11])],
                             [*draft.taps, depth_of(model)])
    total, weights, tokens = 0.0, 0.0, []
    for text, places in zip(texts, anchors):
        hidden = model(text.ids[None], output_hidden_states=True).hidden_states
        tapped = torch.cat([hidden[i][0] for i in draft.taps], -1).bfloat16()
        for anchor in places:
            z = run_block(draft, KVCache(), tapped[:anchor], text.ids[anchor].item())
            for k, token in enumerate(text.ids[anchor + 1:anchor + 5].tolist()):
                before = text.ids[:anchor + 1 + k]
                q = draft.add_markov(z[k], before[-1]).softmax(-1)
                p = model(before[None]).logits[0, -1].softmax(-1)
                weight = 2.718281828 ** (-k / 4)
                total, weights = total - weight * (p * q.log()).sum(), weights + weight
                tokens.append(token)
    found = block_loss(draft, score_with(model), texts, anchors)
    assert found.item() == pytest.approx((total / weights).item(), rel=2e-3)
    assert guess_blocks(draft, texts, anchors)[1].tolist() == tokens


def test_anchors_are_those_of_the_answer():
    text = Text(torch.tensor(TEXT), torch.zeros(16, 96), 5)
    few, many = (sample_roots(text, n, random.Random(0)) for n in (11, 30))
    assert sorted(few) == [*range(4, 15)] != few and len(many) == 30
    assert {many.count(x) for x in range(4, 15)} == {2, 3}


# ------------------------------------------------------------------------------------- the tree

def test_a_tree_has_the_likeliest_of_all_paths():
    """Every path's chance is the product of what the block says along it. The tree's nodes are the
    likeliest n of all, in their order. Here no node has a likelier eleventh child."""
    draft = make_draft()
    z = 4 * torch.randn(4, 61, generator=torch.Generator().manual_seed(3))
    ids, parents = grow_block(draft, z, 7, 40)
    known = {(): 1.0}
    for k in range(4):
        for path in [path for path in known if len(path) == k and known[path] > 1e-4]:
            logits = draft.add_markov(z[k], torch.tensor([7, *path][-1]))
            for row, p in enumerate(logits.softmax(-1).tolist()):
                known[(*path, row)] = known[path] * p
    likeliest = sorted(known, key=lambda path: -known[path])
    assert ids[0] == 7 and paths_of(ids, parents) == likeliest[:40]
    for n in (2, 5, 17):
        assert grow_block(draft, z, 7, n) == (ids[:n], parents[:n])


def test_sizes_are_planned_by_rates():
    """No block is needed for a tree of one node."""
    plans = [(len(tree), *figures) for tree, *figures in list_sizes([0.8, 0.1], 2)]
    assert plans[:3] == [(1, 1.0, 1, 0, 1), (2, 1.8, 2, 1, 2),
                         (3, pytest.approx(2.44), 3, 1, 3)] and len(plans) == 7
