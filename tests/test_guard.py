"""The guard by hand: it grows while models get better, shrinks when one is taken back, and forgets slowly."""

import pytest

from metabayfl.methods.guard import Change, Guard

SMALLEST = 1e-3
START = Guard(1e-2, 1e-1, 1e-1)


def changed(by: float) -> Change:
    """A change that is beyond noise from 0.01 on."""
    return Change(score=by, error=0.005, level=1.0)


def after(guard: Guard, *changes: float) -> Guard:
    for change in changes:
        guard = guard.after_round(changed(change))
    return guard


def test_it_doubles_while_the_model_gets_better_beyond_noise() -> None:
    assert after(START, -0.02, -0.02).largest == pytest.approx(4e-2)
    assert after(START, -0.005).largest == 1e-2
    assert after(START, *[-0.02] * 9).largest == 1e-1


def test_a_setback_halves_what_was_used_but_leaves_the_smallest_candidate() -> None:
    assert START.after_setback(changed(0.5), 1e-2, SMALLEST)[:2] == (5e-3, 5e-3)
    assert START.after_setback(changed(0.5), 1e-3, SMALLEST)[:2] == (SMALLEST, SMALLEST)


def test_ceilings_rise_slowly_to_the_limit() -> None:
    shrunk = START.after_setback(changed(0.5), 1e-2, SMALLEST)
    assert after(shrunk, -0.02, -0.02).largest == pytest.approx(5e-3 * 1.05)
    assert after(shrunk, *[-0.02] * 100).ceiling == 1e-1


def test_a_setback_is_undone_by_the_change_that_follows() -> None:
    """The model is taken back: its change and the way back cancel, so what was gained stays what it was."""
    good = after(START, -0.1)
    again = after(good.after_setback(changed(0.5), 3e-2, SMALLEST), -0.5)
    assert again.score == pytest.approx(-0.1)


def test_setbacks_are_beyond_noise_and_matter() -> None:
    assert START.is_setback(Change(0.05, 0.01, 1.0))
    assert not START.is_setback(Change(0.05, 0.03, 1.0))
    assert not START.is_setback(Change(0.02, 0.001, 1.0))


def test_losing_half_of_what_was_gained_is_a_setback() -> None:
    """A network whose units died predicts what an untrained one does, which is hardly worse in the first rounds."""
    gained = after(START, -0.02)
    assert gained.is_setback(Change(0.011, 0.001, 1.0))
    assert not gained.is_setback(Change(0.009, 0.001, 1.0))
    assert not gained.is_setback(Change(0.011, 0.006, 1.0))


def test_where_more_than_the_start_is_cautious_it_begins_there_and_may_double() -> None:
    assert START.after_first_round(cautious=4e-2)[:3] == pytest.approx((4e-2, 8.8e-2, 8.8e-2))
    assert START.after_first_round(cautious=7e-2)[:3] == (7e-2, 1e-1, 1e-1)
    assert START.after_first_round(cautious=7e-3)[:3] == pytest.approx((1e-2, 1.54e-2, 1.54e-2))
    assert START.after_first_round(cautious=1e-3)[:3] == (1e-2, 1e-2, 1e-2)
