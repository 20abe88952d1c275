"""EAGLE-3 reads what enters three layers of the target, and trains on what decoding gives it. Its
released formula and files are in test_released.py."""
import itertools

import pytest
import torch

from families import rand, tiny
from helpers import check_refused
from methods import METHODS, play_rounds
from naive import NaiveLM
from support.engine import EngineLM, depth_of, tap_layers
from support.layers import choose_taps, make_config, read_taps, tap_widths
from support.parts import head_for, score_with
from survey.eagle import Pairs
from survey.eagle3 import Eagle3Layer
from survey.mtp import MTPBlock
from training.loop import pad_pairs
from training.unroll import choose_lessons, read_target, unroll_loss

MODEL = tiny("llama", num_hidden_layers=7)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def make_draft(vocab=range(61)) -> Eagle3Layer:
    """Make a draft whose every trained weight is random."""
    return rand(Eagle3Layer(MODEL, make_config(MODEL), [2, 3, 4], vocab))


# ----------------------------------------------------------------------------------------- taps

def test_widths_of_taps_are_those_of_what_is_tapped():
    """In OPT-350m, for one, layers are wider than what the LM head reads."""
    model = tiny("opt", word_embed_proj_dim=16)
    taps, seen = [0, depth_of(model)], []
    with tap_layers(model, taps, seen):
        model(torch.tensor([TEXT]))
    assert tap_widths(model, taps) == [x.shape[-1] for x in seen] == [32, 16]


def test_which_layers_are_tapped():
    assert choose_taps(MODEL) == [2, 3, 4]
    assert read_taps("0, 5,7", MODEL) == [0, 5, 7]
    for text in ("3,2", "2,2", "1,8", "x", "-1", "\u00b2", ","):
        check_refused("--taps must be numbers from 0 to 7", read_taps, text, MODEL)
    for layers in (2, 3, 6):
        model = tiny("llama", num_hidden_layers=layers)
        check_refused(f"7 layers or more, .* got {layers} layers", choose_taps, model)


# ------------------------------------------------------------------------------ what it is fed

@pytest.mark.parametrize("name, trees", [("eagle", [(9, [1, 2]), (1, []), (1, [])]),
                                         ("dflash", [9, 1, 1])])
def test_a_draft_that_waits_reads_all_that_became_final(name, trees, monkeypatch):
    """The clock may choose a tree of one node, which asks no draft. The next tree is that of a
    draft which is given the whole text. So few tokens are often guessed right. EAGLE-3 decodes in
    EAGLE's loop."""
    model, prompt = tiny("llama", vocab_size=8), [3, 1, 4, 1, 5]
    line, chosen = METHODS[name](model), itertools.cycle(trees)
    line = line._replace(options=line.options | dict(nodes=0))
    monkeypatch.setitem(METHODS, name, lambda _: line)
    monkeypatch.setattr(f"survey.{name}.Clock.choose", lambda *_: next(chosen))
    monkeypatch.setattr(f"survey.{name}.Clock.note", lambda *_: None)
    found = play_rounds(name, model, prompt, EngineLM)
    assert play_rounds(name, model, prompt, NaiveLM, anew=True) == found
    assert {record["accepted"] for _, _, record in found} > {0}


# ------------------------------------------------------------------------------- the training

@pytest.mark.parametrize("make, decay", [(make_draft, 0.8), (lambda: rand(MTPBlock(MODEL)), 0.6)],
                         ids=["EAGLE-3", "MTP"])
def test_training_gives_the_layer_what_decoding_gives_it(make, decay):
    """The loss of three passes is that of guesses made one after the other, as decoding makes
    them: after row j, with the text's tokens and the layer's own features."""
    draft = make()
    ids, answers = pad_pairs([(TEXT[:4], TEXT[4:])])
    features, hidden = read_target(MODEL, draft.taps, ids)
    learns, probs = choose_lessons(draft, ids, answers, hidden, score_with(MODEL))
    assert learns[0].tolist() == [False] * 4 + [True] * 8 and probs.shape == (8, 61)
    losses = {0: [], 1: [], 2: []}
    lm = EngineLM(draft.lm)
    for j in range(len(TEXT) - 2):
        lm.start([])
        logits = lm.forward(draft.join(*Pairs(features[0, :j + 1], TEXT[1:j + 2])))
        for n in range(3):
            if 4 <= j + 2 + n < len(TEXT):
                target = MODEL(ids[:, :j + 2 + n]).logits[0, -1].softmax(-1)
                losses[n].append(-(target * logits[-1].log_softmax(-1)).sum())
            if n < 2 and j + 2 + n < len(TEXT):
                logits = lm.forward(draft.join(*Pairs(lm.features[-1:], [TEXT[j + 2 + n]])))
    expected = sum(decay ** n * torch.stack(some).mean() for n, some in losses.items())
    found = unroll_loss(draft, draft.lm.get_output_embeddings(), ids, features, learns, probs, 3)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_pass_that_learns_nothing_adds_nothing():
    """With a small vocabulary all tokens that a pass would learn may be missing."""
    draft, ids = make_draft(), torch.tensor([TEXT])
    features, _ = read_target(MODEL, draft.taps, ids)
    learns, probs = torch.zeros_like(ids, dtype=torch.bool), torch.full((1, 61), 1 / 61)
    given = draft, draft.lm.lm_head, ids, features, learns
    assert unroll_loss(*given, probs[:0], 3).item() == 0.0
    learns[0, 2] = True  # of pass 0 alone
    one, three = (unroll_loss(*given, probs, n) for n in (1, 3))
    assert one.item() == three.item() > 0.0


def test_tokens_that_the_draft_cannot_guess_are_not_learned():
    draft = make_draft(vocab=range(0, 61, 2))
    ids, answers = pad_pairs([(TEXT[:4], TEXT[4:]), (TEXT[:7], TEXT[7:9])])
    _, hidden = read_target(MODEL, draft.taps, ids)
    score = score_with(MODEL, head_for(MODEL.lm_head, draft.vocab))
    learns, probs = choose_lessons(draft, ids, answers, hidden, score)
    assert learns.tolist() == [[i > 3 and t % 2 == 0 for i, t in enumerate(TEXT)],
                               [i in (7, 8) and t % 2 == 0 for i, t in enumerate(TEXT)]]
    logits = MODEL(ids).logits[:, :-1][learns[:, 1:]]
    assert torch.allclose(probs, logits[:, ::2].softmax(-1), atol=1e-5)


def test_an_lm_head_begins_as_the_targets():
    draft = Eagle3Layer(MODEL, make_config(MODEL), [2, 3, 4], range(0, 61, 2))
    assert torch.equal(draft.trainable()["lm_head.weight"], MODEL.lm_head.weight[::2])
