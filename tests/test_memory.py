"""The peak of a training, as results/memory.py counts it by shapes, is what real tensors take."""
from unittest.mock import patch

import pytest

from helpers import script
from results import memory


@pytest.mark.parametrize("line, megabytes", [
    ("medusa --batch 4", 26.803), ("layerskip --E 1 --recompute --batch 16", 15.962)])
def test_the_peak_of_a_training(line, megabytes):
    """The megabytes are those of a CPU's allocator when the same commands ran with numbers.

    On a GPU torch's AdamW would work on all parameters at once, in copies of all of them, so it is
    told not to. The peak of the Medusa heads, with many numbers and short texts, is there."""
    shape = memory.SMALL | dict(num_hidden_layers=2, hidden_size=512, vocab_size=1024)
    with patch("torch.optim.adam._default_to_fused_or_foreach", return_value=(False, True)):
        peak = memory.count_by_shapes(line, shape, (12, 6))
    assert peak / 1e6 == pytest.approx(megabytes, rel=0.01)


def test_a_training_that_there_is_not_is_refused(capfd):
    assert script("results.memory", "nonsense") == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "expected a training, one of answers, medusa, " in err
