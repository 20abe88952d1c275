"""States of recurrent layers are checked: folding, going back, and other passes of the same model.

That trees equal their paths is in test_common.py, and every method's text in test_lossless.py."""
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common import CachedLM
from families import RECURRENT, VOCAB, tiny
from fake_models import path_to
from helpers import check_refused, note_calls
from support.recurrent import KEEP, RecurrentCache, RecurrentLM, running

LONG = [i * i * 7 % 59 for i in range(9 * KEEP)]


@torch.inference_mode()
@pytest.mark.parametrize("name, changes", [
    *((name, {}) for name in RECURRENT), ("lfm2", {"conv_L_cache": 1}),
    ("qwen3.5", {"linear_conv_kernel_dim": 1}), ("granite4", {"mamba_d_conv": 1})])
def test_states_are_those_of_one_pass(name, changes, monkeypatch):
    """After a prompt in parts, trees, commits and truncates, with tokens that are kept and such
    that are not. Then the text goes back as far as rows are kept, and on by a long pass. Nothing
    is left of an earlier prompt. A convolution may read one input."""
    rng, model = random.Random(0), tiny(name, max_position_embeddings=1000, **changes)
    monkeypatch.setattr(CachedLM, "PART", 50)
    lm = RecurrentLM(model)
    for context in LONG[:130], LONG[90:220]:
        lm.start(context)
        for _ in range(40):
            ids = rng.choices(range(VOCAB), k=9)
            lm.forward(ids, [rng.randrange(max(-1, i - 3), i) for i in range(9)])
            path = path_to(rng.randrange(9), lm.parents)
            lm.commit(path)
            context = context + [ids[i] for i in path]
            context = context[:len(context) - rng.choice([0, 0, 0, 2])]
            lm.truncate(len(context))
        assert len(context) > 130 + 2 * KEEP > lm.cache.kept
        lm.truncate(len(context) - KEEP + 1)
        lm.forward([3, 7])
        lm.commit([])  # no guess was right, and the root is fed again
        lm.forward(LONG[60:160])
        lm.commit(range(100))
        text = [*context[:1 - KEEP], *LONG[60:160], 5, 6]
        expected = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -2:]
        for kept in 5, 0:  # rows that are not in the states
            lm.cache.fold(lm.cache.kept - kept)
            torch.testing.assert_close(lm.forward([5, 6]), expected, atol=1e-3, rtol=1e-3)
            lm.commit([])


def test_other_threads_run_the_same_model_as_if_we_were_not_there(monkeypatch):
    model, ids = tiny("qwen3.5"), torch.tensor([LONG[:50]])

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits
    expected = run()
    monkeypatch.setattr(running, "cache", RecurrentCache(model))
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(run).result(), expected)


def test_a_text_is_read_anew_once_if_the_states_have_gone_too_far(monkeypatch):
    """After that so many rows are kept that a round of the same length goes back by itself."""
    lm, fresh = RecurrentLM(tiny("qwen3.5")), RecurrentLM(tiny("qwen3.5"))
    started = note_calls(monkeypatch, CachedLM, "start")
    lm.start(LONG[:20])
    for _ in range(3):
        lm.forward(LONG[20:128])
        lm.commit(range(108))
        lm.truncate(20)
        lm.forward([3, 4], [-1, -1])
        lm.commit([1])
        fresh.start(LONG[:20] + [4])
        torch.testing.assert_close(lm.forward([5]), fresh.forward([5]), atol=1e-4, rtol=1e-4)
        lm.truncate(20)
    assert [args[0] for args in started].count(lm) == 2
    lm.forward(lm.weight[[7] * 108].detach())
    lm.commit(range(108))
    lm.cache.fold(100)
    check_refused("that was fed tokens, got embeddings", lm.truncate, 21)
