"""What is counted by shapes is what real tensors would take."""
from unittest.mock import patch

import pytest

from helpers import said_in_one_line, script
from results import memory


@pytest.mark.parametrize("line, megabytes", [
    ("medusa", 108.451336), ("layerskip --recompute --batch 2", 16.835168)])
def test_the_peak_of_a_training(line, megabytes):
    """Those that the allocator of a CPU gave out, when the same commands ran with numbers."""
    shape = memory.SMALL | dict(num_hidden_layers=4)
    peak = memory.count_by_shapes(line, shape, (30, 20))
    assert peak / 1e6 == pytest.approx(megabytes, rel=0.02)


def test_adamw_takes_no_copy_of_what_is_trained():
    """On a GPU torch's AdamW would work on all parameters at once, in copies of all of them."""
    peaks = []
    for at_once in (False, True):
        # No fused kernel is chosen: all parameters change at once, or one by one.
        with patch("torch.optim.adam._default_to_fused_or_foreach", return_value=(False, at_once)):
            # Many trained numbers beside short texts: the peak is in the optimizer.
            shape = memory.SMALL | dict(hidden_size=1024, vocab_size=1024, num_hidden_layers=2)
            peaks.append(memory.count_by_shapes("medusa --batch 1", shape, (4, 4)))
    assert peaks[0] == peaks[1]


def test_a_training_that_there_is_not_is_refused(capfd):
    assert script("results.memory", "nonsense") == 2
    said_in_one_line("expected a training, one of answers, medusa, ", capfd)
