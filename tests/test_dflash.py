"""The block draft: packed blocks are what decoding computes, the loss is that of the guesses one by
one, and the tree has the likeliest of all paths."""
import random

import pytest
import torch

from fake_models import path_to
from families import rand, tiny
from support.layers import depth_of
from support.parts import score_with
from survey import dflash as module
from survey.dflash import (EVERY, BlockDraft, BlockLM, block_loss, count_tree_tokens, grow_block,
                           list_anchors, make_blocks, plan_block, run_block, sample_roots)
from training.acceptance import Text, compute_features

MODEL = tiny("llama", num_hidden_layers=3)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def make_draft(model=MODEL, taps=(1, 2), scale=0.3, **form) -> BlockDraft:
    """Make a draft whose every weight is random."""
    return rand(BlockDraft(model, [*taps], **dict(B=4, markov=8) | form), [], scale)


def texts_of(draft: BlockDraft, model=MODEL, pairs=((TEXT[:5], TEXT[5:]),)) -> list[Text]:
    return compute_features(model, [*pairs], [*draft.taps, depth_of(model)])


def z_by_decoding(draft: BlockDraft, text: Text, anchor: int, model=MODEL) -> torch.Tensor:
    """Compute a block's logits as decoding does, in a cache, with what was tapped before a root."""
    lm, ids = BlockLM(draft.lm), text.ids
    lm.start([])
    hidden = model(ids[None], output_hidden_states=True).hidden_states
    tapped = torch.cat([hidden[i][0, :anchor] for i in draft.taps], -1)
    return run_block(draft, lm, tapped.bfloat16(), ids[anchor].item())


# ---------------------------------------------------------------------------------- the network

@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_packed_blocks_are_what_decoding_computes(family, layers):
    """Each of many anchors of two texts of different lengths."""
    model = tiny(family)
    draft = make_draft(model, (0, 2), layers=layers)
    texts = texts_of(draft, model, [(TEXT[:5], TEXT[5:]), (TEXT[3:4], TEXT[4:11])])
    anchors = [[2, 4, 7, 14], [5, 1, 6, 3]]
    hidden = make_blocks(draft, texts, anchors).hidden
    found = draft.lm.get_output_embeddings()(hidden)
    for text, places, blocks in zip(texts, anchors, found):
        for anchor, z in zip(places, blocks):
            # texts are kept in bfloat16, and both sides read that
            assert torch.allclose(z, z_by_decoding(draft, text, anchor, model), atol=2e-3), anchor


def test_a_draft_begins_as_the_targets_last_layers():
    """It reads the last tap as they do, and the root's embedding, and the mean one as the mask. The
    Markov head adds nothing. A seed makes the rest, whatever was drawn before: otherwise a stopped
    run would never go on."""
    draft, x, z = BlockDraft(MODEL, [0, 2], layers=2), torch.randn(5, 64), torch.randn(2, 61)
    for i, layer in enumerate(draft.lm.model.layers):
        for mine, theirs in zip(layer.parameters(), MODEL.model.layers[1 + i].parameters()):
            assert torch.equal(mine, theirs)
    expected = x[:, 32:] / x[:, 32:].square().mean(-1, keepdim=True).sqrt()
    assert (draft.fuse(x) - expected).abs().mean() < 0.05
    block, table = draft.embed_blocks(torch.tensor(7), x[0, :32]), MODEL.model.embed_tokens.weight
    assert torch.allclose(block[0], table[7], atol=1e-5)
    assert torch.allclose(block[1:], table.mean(0).expand(7, -1), atol=1e-5)
    assert torch.equal(draft.add_markov(z, torch.tensor([3, 4])), z)
    same, other = (BlockDraft(MODEL, [0, 2], layers=2, seed=seed).fc.weight for seed in (0, 1))
    assert torch.equal(same, draft.fc.weight) and not torch.equal(other, draft.fc.weight)


def test_what_the_rows_of_a_block_read():
    """Each a token or the mask, its place, and the H before the root."""
    draft, H = make_draft(), torch.randn(32)
    e = torch.stack([MODEL.get_input_embeddings().weight[7], *[draft.mask] * 3])
    of_root, of_masks = (draft.before.weight @ H).split(32)
    expected = e @ draft.token.weight.T + torch.stack([of_root, *[of_masks] * 3])
    found = draft.embed_blocks(torch.tensor([7, 7]), H.expand(2, 32))
    assert torch.allclose(found, (expected + draft.place).expand(2, 4, 32), atol=1e-4)


def test_the_markov_head_by_hand():
    """Tokens that the draft cannot guess share the last row of W_1."""
    draft = make_draft(vocab=[5, 9, 30])
    z = torch.randn(2, 3)
    found = draft.add_markov(z, torch.tensor([9, 11]))
    for i, row in enumerate((1, 3)):
        assert torch.allclose(found[i], z[i] + draft.W2.weight @ draft.W1.weight[row], atol=1e-5)


# ------------------------------------------------------------------------------------- the loss

def test_the_loss_by_hand():
    """Guess by guess, as decoding computes them, with the target's distribution after each token
    and without tokens that the draft cannot guess. It can guess the last one, which counts once."""
    every = [*range(1, 61, 2)]
    draft = make_draft(vocab=every, scale=1.0)
    [text] = texts_of(draft)
    total = weights = 0.0
    for anchor in (4, 8, 13):
        z = z_by_decoding(draft, text, anchor)
        for k in range(4):
            place = anchor + 1 + k
            if place < len(TEXT) and TEXT[place] in every:
                q = draft.add_markov(z[k], torch.tensor(TEXT[place - 1])).softmax(-1)
                p = MODEL(torch.tensor([TEXT[:place]])).logits[0, -1, every].softmax(-1)
                weight = 2.718281828 ** (-k / 4)
                total, weights = total - weight * (p * q.log()).sum(), weights + weight
    score = score_with(MODEL, draft.lm.get_output_embeddings())
    found = block_loss(draft, score, [text], [[4, 8, 13]])
    assert found.item() == pytest.approx((total / weights).item(), rel=2e-3)


def test_anchors_are_those_of_the_answer():
    [text] = texts_of(make_draft())
    assert list_anchors(text) == range(4, 15)
    few, many = (sample_roots(text, n, random.Random(0)) for n in (11, 30))
    assert sorted(few) == [*range(4, 15)] != few and len(many) == 30
    assert {many.count(x) for x in range(4, 15)} == {2, 3}


# ------------------------------------------------------------------------------------- the tree

def test_a_tree_has_the_likeliest_of_all_paths():
    """Every path's chance is the product of what the block says along it. The tree's nodes are the
    likeliest n of all, in their order. Here no node has a likelier eleventh child."""
    draft = make_draft(vocab=[*range(0, 61, 2)])
    z = 2 * torch.randn(4, len(draft.vocab), generator=torch.Generator().manual_seed(3))
    ids, parents = grow_block(draft, z, 7, 40)
    known = {(): 1.0}
    for k in range(4):
        for path in [path for path in known if len(path) == k and known[path] > 1e-4]:
            before = torch.tensor([7, *path][-1])
            logits = draft.add_markov(z[k], before)
            for row, p in enumerate(logits.softmax(-1).tolist()):
                known[(*path, draft.vocab[row].item())] = known[path] * p
    paths = [tuple(ids[x] for x in path_to(node, parents)[1:]) for node in range(40)]
    assert ids[0] == 7 and paths == sorted(known, key=lambda path: -known[path])[:40]
    for n in (2, 5, 17):
        assert grow_block(draft, z, 7, n) == (ids[:n], parents[:n])


# ----------------------------------------------------------------------------- what is measured

def test_tokens_by_hand(monkeypatch):
    """Trees are asked for at every EVERY-th place, and counted as far as the text goes."""
    draft, asked, ids = make_draft(), [], [*range(5, 26)]

    def chain(draft, z, root, n):
        asked.append((root, n))
        return [root, root + 1, root + 9, root + 2, root + 7], [-1, 0, 0, 1, 3]
    monkeypatch.setattr(module, "grow_block", chain)
    texts = texts_of(draft, pairs=[(ids[:4], ids[4:])])
    tokens = count_tree_tokens(draft, score_with(MODEL), texts)
    assert asked == [(place, 64) for place in range(8, 25, EVERY)]
    # nodes 1 and 3 are right; at the place before the text's last token only node 1 is
    assert asked[-1][0] == 24 and len(tokens) == 64
    assert tokens[:5] == pytest.approx([1, 2, 2, 3 - 1 / len(asked), 3 - 1 / len(asked)])


def test_sizes_are_planned_by_tokens():
    """A tree of one node needs no block."""
    draft = make_draft()
    draft.tokens = [1.0, 1.8, 2.2]
    assert [*plan_block(draft)] == [(1, 1.0, 1, 0, 1), (2, 1.8, 2, 1, 2), (3, 2.2, 3, 1, 3)]
