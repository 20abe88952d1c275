"""Draft & Verify: drafts end where they should, and blocks are searched by what they bring. That
the text is the whole model's is in test_lossless.py."""
import math

import pytest
import torch

from families import tiny
from helpers import check_refused, note_calls, take
from support.engine import EngineLM
from support.parts import save_facts
from survey import draft_verify as module
from survey.draft_verify import (draft_verify, load_blocks, measure_agreement, move_threshold,
                                 search, without)
from trainings import DATA, WORDLESS

PROMPT = [3, 14, 15]
SOME = {"attention": [1], "mlp": [0]}


def three_layers(seed: int = 0):
    return tiny("llama", seed, num_hidden_layers=3)


def zeroed(skipped: dict):
    """Make a tiny Llama whose skipped blocks add nothing in the first place."""
    model = three_layers()
    for layer in skipped["attention"]:
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
    for layer in skipped["mlp"]:
        model.model.layers[layer].mlp.down_proj.weight.data.zero_()
    return model


def draft_logits(model, text: list[int]) -> torch.Tensor:
    """Compute the draft's logits [1, V] after a text, on the whole model's rows of it."""
    whole, draft = EngineLM(model), EngineLM(without(model, SOME))
    whole.start(text[:-1])
    draft.cache, draft.length = whole.cache, whole.length
    return draft.forward(text[-1:])


# ------------------------------------------------------------------------------------ the draft

def test_a_model_without_blocks_is_one_whose_blocks_add_nothing():
    """It shares the model's weights, and leaves the model as it is."""
    model, ids, skipped = three_layers(), torch.tensor([PROMPT]), {"attention": [0], "mlp": [0, 2]}
    before, draft = model(input_ids=ids).logits, without(model, skipped)
    torch.testing.assert_close(draft(input_ids=ids).logits, zeroed(skipped)(input_ids=ids).logits)
    torch.testing.assert_close(model(input_ids=ids).logits, before)
    assert {id(p) for p in draft.parameters()} <= {id(p) for p in model.parameters()}


# ------------------------------------------------------------------------------- the threshold

def test_a_draft_ends_after_a_guess_below_the_threshold_or_when_it_is_full(monkeypatch):
    """Chances of the draft's tokens are written down."""
    chances, log = iter([0.9, 0.5, 0.7, 0.3, 0.9, 0.9, 0.59, 0.4]), []
    target, forward = EngineLM(tiny("llama")), EngineLM.forward

    def forward_by_chances(lm, ids, **how):
        logits = forward(lm, ids, **how)
        if lm is target:
            return logits
        chance = next(chances)
        others = torch.full_like(logits, (1 - chance) / (logits.shape[1] - 1)).log()
        return others.index_fill(1, torch.tensor([5]), math.log(chance))
    monkeypatch.setattr(EngineLM, "forward", forward_by_chances)
    take(draft_verify(target, PROMPT, gamma=3, threshold=0.6, log=log, adaptive=False,
                      skipped={"attention": [], "mlp": []}), 4)
    assert [r["guessed"] for r in log] == [2, 2, 3, 1]


def test_the_threshold_rises_where_too_little_is_accepted():
    """The threshold moves by Eq. 6. A full draft that is accepted would not be longer with a lower
    one."""
    for share, moved, moved_if_full in (0.9, 0.51, 0.51), (0.91, 0.49, 0.5):
        assert move_threshold(0.5, share, False) == pytest.approx(moved)
        assert move_threshold(0.5, share, True) == pytest.approx(moved_if_full)


@pytest.mark.parametrize("guesses, thresholds", [
    (2, [0.0, 0.0, 0.001, 0.002, 0.003]), (1, [1.5, 1.499, 1.5, 1.501, 1.502])])
def test_the_threshold_moves_by_a_tenth_and_the_share_by_a_half(guesses, thresholds, monkeypatch):
    """These are Eqs. 5 and 7 after rounds that accept all, no, all, all and all guesses. The
    guesses are two, or one with a threshold above 1. A block that is left out counts as half a
    layer."""
    script, log = iter([guesses, 0, guesses, guesses, guesses]), []
    shares = [0.95, 0.475, 0.7375, 0.86875, 0.934375]
    given = note_calls(monkeypatch, module, "move_threshold")
    monkeypatch.setattr(module, "verify", lambda *_: (next(script), 7))
    take(draft_verify(EngineLM(three_layers()), PROMPT, gamma=2, threshold=thresholds[0],
                      skipped=SOME, log=log), len(shares))
    expected = [x for row in zip(thresholds, shares) for x in row]
    assert [x for row in given for x in row[:2]] == pytest.approx(expected)
    assert {full for *_, full in given} == {guesses == 2}
    assert {r["layers"] for r in log} == {guesses * 2 + 3}


# --------------------------------------------------------------------------- what is skipped

def test_agreement_by_hand():
    """Each guess comes from the whole model's rows of what stands before it. So an answer of such
    guesses is guessed whole, and one with other tokens in a part."""
    model, guessed = three_layers(), []
    for _ in range(8):
        guessed.append(draft_logits(model, PROMPT + guessed).argmax().item())
    assert measure_agreement(model, SOME, [(PROMPT, guessed)]) == 1
    right = sum(draft_logits(model, prompt + answer[:i]).argmax().item() == token
                for prompt, answer in DATA for i, token in enumerate(answer))
    found = measure_agreement(model, SOME, DATA + [(PROMPT, guessed)])
    assert found == pytest.approx((right + 8) / 20)


def test_search_finds_the_blocks_that_add_nothing(tmp_path, monkeypatch):
    """A call takes 2 s for each attention, 1 s for each MLP and 0.5 s besides. A prompt without
    room is left out. The file is only for this model, and names no layer that the model lacks."""
    def cost(model):
        kinds = [type(x).__name__ for x in model.modules()]
        return 0.5 + 2 * kinds.count("LlamaAttention") + kinds.count("LlamaMLP")
    monkeypatch.setattr(module, "time_call", cost)
    nothing, file = {"attention": [1], "mlp": [0, 2]}, tmp_path / "blocks.json"
    model = zeroed(nothing)
    search(model, WORDLESS, [*(p for p, _ in DATA), [3] * 999], out=file, max_new_tokens=8)
    assert load_blocks(str(file), model) == nothing
    save_facts(tmp_path / "more", {"model": model}, attention=[1], mlp=[3])  # MLPs are 0, 1 and 2
    for name, other in ("blocks.json", three_layers(seed=1)), ("more", model):
        check_refused("blocks that .* for this model, got", load_blocks, tmp_path / name, other)
