"""The clock that chooses a tree: what calls cost here, and what pays."""
from types import SimpleNamespace

import pytest
import torch

from families import tiny
from support.clock import Choice, Clock, Costs
from support.engine import EngineLM


def test_a_line_goes_through_what_was_noted():
    """One note and the given slope make a line; many notes make their own. Old ones fade, and a
    busy moment counts at most twice."""
    costs = Costs(0.1)
    assert costs.line() == (0.0, 0.0)
    costs.note(10, 4.0)
    a, b = costs.line()
    assert (a, b) == pytest.approx((2.0, 0.2))
    for rows in [1, 20, 40] * 200:
        costs.note(rows, 3 + 0.5 * rows)
    assert costs.line() == pytest.approx((3, 0.5), rel=0.1)
    costs.note(20, 9999.0)
    assert costs.line() == pytest.approx((3, 0.5), rel=0.2)
    for rows in [1, 20, 40] * 200:
        costs.note(rows, 30 + 0.0 * rows)
    assert costs.line() == pytest.approx((30, 0.0), rel=0.1, abs=0.2)


def test_what_makes_the_most_tokens_a_second_is_chosen(now):
    """Passes of the draft are the first notes of a step, and those of the model are the calls. All
    else in a round counts as its steps."""
    lm, draft = (SimpleNamespace(weight=torch.zeros(1), passes=[(8, 8, 4.0)] * 50) for _ in "ab")
    clock = Clock(lm, draft)
    assert clock.steps.line() == pytest.approx((4 / 1.24, 0.03 * 4 / 1.24))
    for _ in range(200):
        clock.find_prices()
        now[0] += 7
        lm.passes += [(8, 8, 4.0)]
        clock.note(3, 6)  # 3 s beside the call, in steps of 1 s
    assert clock.steps.line() == pytest.approx((1 / 1.06, 0.03 / 1.06), rel=0.01)
    assert clock.calls.line() == pytest.approx((4 / 1.24, 0.03 * 4 / 1.24))
    clock.steps.line, clock.calls.line = (lambda: (1.0, 0.1)), (lambda: (10.0, 1.0))
    choices = [Choice("x", 1.0, 1), Choice("y", 2.0, 4, 2, 10), Choice("z", 3.0, 20, 2, 10)]
    rates = {"x": 1 / 11, "y": 2 / (14 + 3), "z": 3 / (30 + 3)}
    assert clock.choose(lambda: choices) == "y" == max(rates, key=rates.get)


def test_a_row_costs_what_its_time_would_bring(now):
    """A call takes 2 s and 0.1 s a row, and the guessing 0.5 s a row. At first a call of one row
    with one token stands for the rounds. Older rounds fade."""
    clock = Clock(SimpleNamespace(weight=torch.zeros(1), passes=[]))
    clock.calls.line, clock.steps.line = (lambda: (2.0, 0.1)), (lambda: (7.0, 0.5))
    assert clock.find_prices() == pytest.approx((1 / 2.1, 0.6 / 2.1))
    for tokens, seconds, second in (2, 9, 2 / 9), (4, 1, (1.96 + 4) / (8.82 + 1)):
        now[0] += seconds
        clock.note(1, 5, tokens)
        assert clock.find_prices() == pytest.approx((second, 0.6 * second))


def test_a_choice_is_made_again_when_passes_have_doubled():
    lm, asked = SimpleNamespace(weight=torch.zeros(1), passes=[]), []
    clock = Clock(lm)

    def choices():
        asked.append(len(lm.passes))
        return [Choice("few", 1.0, 1), Choice("many", 9.0, 64)]
    for _ in range(300):
        assert clock.choose(choices) == "many"
        lm.passes.append((64, 64, 1.0))
    assert asked == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


def test_what_is_made_once_is_set_up(now):
    """The time of a nested `once` counts once."""
    lm = EngineLM(tiny("llama"))

    def make():
        now[0] += 3
        return now[0]
    assert [lm.once(make), lm.once(make)] == [3, 3]
    assert lm.once(lambda: lm.once(lambda: make())) == 6
    assert (lm.setup_seconds, lm.seconds) == (6, 0)
