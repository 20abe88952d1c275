"""What is counted by shapes is what real tensors would take."""
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from helpers import said_in_one_line, script
from results import memory
from results.memory import Ledger

KB = 1024


def test_a_storage_counts_until_nobody_has_it():
    with Ledger() as ledger:
        x = torch.zeros(16, 16)
        view = x.view(256)  # of the same storage
        y = x * 2
        assert (ledger.now, ledger.peak) == (2 * KB, 2 * KB)
        del y
        assert (ledger.now, ledger.peak) == (KB, 2 * KB)
        chosen = x[torch.arange(16) < 3]  # as many rows as a mask has
        assert chosen.shape == (3, 16) and chosen.argmax(-1).tolist() == [0, 0, 0]
        assert view.numel() == 256 and not x.any()


def test_autocast_and_autograd_keep_what_they_keep():
    with Ledger() as ledger:
        w, x = torch.zeros(16, 16, requires_grad=True), torch.zeros(16, 16)
        loss = (w * 2).exp().sum()  # exp keeps its result
        assert ledger.now == 3 * KB + 4
        loss.backward()
        del loss
        assert ledger.now == 3 * KB  # the weight, its gradient and x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(F.linear(F.linear(x, w), w), w)
            assert y.dtype == torch.bfloat16
            # The copies of w and x, one each, kept for the gradients, and three outputs
            assert ledger.now - 3 * KB == 5 * KB // 2


@pytest.mark.parametrize("line, megabytes", [
    ("medusa", 108.451336), ("layerskip --recompute --batch 2", 16.835168),
    ("cllm --rank 4 --batch 2", 26.305856)])
def test_the_peak_of_a_training(line, megabytes, monkeypatch):
    """Those that the allocator of a CPU gave out, when the same commands ran with numbers."""
    shape = memory.SMALL | dict(num_hidden_layers=4)
    assert memory.count_by_shapes(line, shape, (30, 20))[0] / 1e6 == pytest.approx(
        megabytes, rel=0.02)


def test_adamw_takes_no_copy_of_what_is_trained():
    """On a GPU torch's AdamW would work on all parameters at once, in copies of all of them."""
    peaks = []
    for at_once in (False, True):
        chosen = (False, at_once)  # no fused kernel; all parameters at once, or one by one
        with patch("torch.optim.adam._default_to_fused_or_foreach", lambda *_, **__: chosen):
            # Many trained numbers beside short texts: the peak is in the optimizer.
            peaks.append(memory.count_by_shapes(
                "layerskip --rank 200 --batch 1", memory.SMALL, (4, 4))[0])
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("argv, said", [
    (["nonsense"], "expected a training, one of answers, medusa, "), (["  "], "got ''"),
    (["medusa --foo 3"], "unrecognized arguments: --foo"),
    (["cllm --rank x"], "argument --rank: invalid int"),
    (["medusa --batch 0"], "--batch must be 1 or more, got 0"),
    (["exit", "--answer", "0"], "--answer must be 1 or more, got 0")])
def test_a_line_that_cannot_be_run_is_refused(argv, said, monkeypatch, capfd):
    monkeypatch.setattr(memory, "BIG", memory.SMALL)
    assert script("results.memory", *argv) == 2
    said_in_one_line(said, capfd)
