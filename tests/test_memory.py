"""What is counted by shapes is what the allocator of this CPU gives out."""
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from helpers import said_in_one_line, script
from models import training
from results import memory
from results.memory import Functions, Ledger, Texts

KB = 1024


@pytest.fixture
def ledger():
    with Functions(), Ledger() as ledger:
        yield ledger


def test_a_storage_counts_until_nobody_has_it(ledger):
    x = torch.zeros(16, 16)
    view = x.view(256)  # of the same storage
    y = x * 2
    assert (ledger.now, ledger.peak) == (2 * KB, 2 * KB)
    del y
    assert (ledger.now, ledger.peak) == (KB, 2 * KB)
    x += 1
    del x
    assert (ledger.now, view.numel()) == (KB, 256)


def test_what_autograd_keeps_counts(ledger):
    w = torch.zeros(16, 16, requires_grad=True)
    loss = (w * 2).exp().sum()  # exp keeps its result
    assert ledger.now == 2 * KB + 4
    loss.backward()
    del loss
    assert ledger.now == 2 * KB  # the weight and its gradient
    assert w.detach().sum().item() == 0


def test_a_mask_chooses_as_many_rows_as_it_has(ledger):
    x, chosen = torch.zeros(4, 256), torch.tensor([True, False, False, True])
    before = ledger.now
    rows = x[chosen]
    assert ledger.now - before == 2 * KB
    assert rows.argmax(-1).tolist() == [0, 0]


def test_autocast_keeps_one_copy_of_a_trained_weight(ledger):
    w, x = torch.zeros(16, 16, requires_grad=True), torch.zeros(16, 16)
    before = ledger.now
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(F.linear(F.linear(x, w), w), w)
        assert y.dtype == torch.bfloat16
        # The copies of w and x, kept for the gradients, and three outputs
        assert ledger.now - before == 5 * KB // 2


@pytest.mark.parametrize("line", ["medusa", "layerskip --recompute --batch 2"])
def test_shapes_take_what_the_allocator_gives(line, monkeypatch):
    monkeypatch.setattr(memory, "SMALL", memory.SMALL | dict(num_hidden_layers=4))
    assert memory.check([line], Texts(30, 20))[1]


def test_states_are_not_kept_as_they_are_not_at_a_real_size(monkeypatch):
    """The little data of a count would fit, so the limit is 0 while a training runs."""
    limits, update = [], training.Training.update

    def watch(self, loss_of) -> float:
        limits.append(training.KEPT)
        return update(self, loss_of)
    monkeypatch.setattr(training.Training, "update", watch)
    shape = memory.SMALL | dict(vocab_size=1024, hidden_size=16, num_hidden_layers=1)
    memory.run_training("medusa", shape, Texts(3, 2))
    assert limits == [0, 0] and training.KEPT > 0


def test_options_and_settings_are_told_apart():
    """Two passes take what eight take, since gradients are there from the second on."""
    name, options, settings = memory.read_options("bita --batch 4 --recompute --P 2")
    assert (name, options) == ("bita", {"batch": 4, "P": 2})
    assert settings == {"recompute": True, "accumulate": 1}
    assert memory.read_options("eagle --accumulate 8")[2] == {"accumulate": 2}


@pytest.mark.parametrize("argv, said", [
    (["nonsense"], "expected a training, one of answers, medusa, "), (["  "], "got ''"),
    (["medusa --foo 3"], "--foo is no option of medusa"),
    (["medusa --steps 5"], "--steps is no option of medusa"),
    (["medusa --K"], "--K must be of type int, got True"),
    (["bita --accumulate x"], "--accumulate must be of type int, got x"),
    (["cllm --rank x"], "--rank must be of type int, got x"),
    (["medusa --batch 0"], "--batch must be 1 or more, got 0"),
    (["exit", "--answer", "0"], "--answer must be 1 or more, got 0")])
def test_a_line_that_cannot_be_run_is_refused(argv, said, monkeypatch, capfd):
    monkeypatch.setattr(memory, "BIG", memory.SMALL)
    assert script("results.memory", *argv) == 2
    said_in_one_line(said, capfd)


def test_each_training_of_the_tables_has_its_options():
    lines = [*memory.CHECKED, *(f"{line} {more or ''}" for _, line, more in memory.ROWS)]
    assert {memory.read_options(line)[0] for line in lines} <= memory.COMMANDS.keys()


def test_adamw_takes_no_copy_of_what_is_trained(monkeypatch):
    """On a GPU torch's AdamW would work on all parameters at once, in copies of all of them."""
    monkeypatch.setattr(memory, "SMALL", memory.SMALL | dict(num_hidden_layers=4))
    peaks = []
    for at_once in (False, True):
        chosen = (False, at_once)  # no fused kernel; all parameters at once, or one by one
        with patch("torch.optim.adam._default_to_fused_or_foreach", lambda *_, **__: chosen):
            # Many trained numbers beside short texts: the peak is in the optimizer.
            ledger, _ = memory.count_by_shapes("layerskip --rank 200 --batch 1", memory.SMALL,
                                               Texts(4, 4))
        peaks.append(ledger.peak)
    assert peaks[0] == peaks[1]
