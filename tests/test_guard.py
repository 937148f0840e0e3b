"""The guard by hand: it grows while models get better, shrinks when they do not, and forgets slowly."""

import pytest

from metabayfl.methods.guard import PATIENCE, Change, Guard

SMALLEST = 1e-3


def changed(by: float) -> Change:
    """A change that is beyond noise from 0.01 on."""
    return Change(score=by, error=0.005, level=1.0, nll=by)


def after(guard: Guard, *changes: float, used: float = 1e-2) -> Guard:
    for change in changes:
        guard = guard.after_round(changed(change), used, SMALLEST)
    return guard


def test_it_doubles_while_the_model_gets_better_beyond_noise() -> None:
    assert after(Guard(1e-2, 1e-1, 1e-1), -0.02, -0.02).largest == pytest.approx(4e-2)
    assert after(Guard(1e-2, 1e-1, 1e-1), -0.005).largest == 1e-2
    assert after(Guard(1e-2, 1e-1, 1e-1), *[-0.02] * 9).largest == 1e-1


def test_without_a_new_lowest_loss_for_a_while_it_halves_what_was_used() -> None:
    stalled = after(Guard(4e-2, 1e-1, 1e-1), -0.05, *[0.001] * (PATIENCE - 1))
    assert stalled.largest == pytest.approx(8e-2)
    stalled = after(stalled, 0.0)
    assert (stalled.largest, stalled.ceiling, stalled.waiting) == (5e-3, 5e-3, 0)


def test_slow_progress_is_progress() -> None:
    assert after(Guard(1e-2, 1e-1, 1e-1), *[-0.001] * 20).largest == 1e-2


def test_ceilings_rise_slowly_to_the_largest_candidate() -> None:
    shrunk = Guard(1e-2, 1e-1, 1e-1).shrunk(1e-2, SMALLEST)
    assert after(shrunk, -0.02, -0.02).largest == pytest.approx(5e-3 * 1.02)
    assert after(shrunk, *[-0.02] * 200).ceiling == 1e-1


def test_a_setback_is_undone_by_the_change_that_follows() -> None:
    """The model is taken back: its change and the way back cancel, so the lowest loss stays what it was."""
    good = after(Guard(1e-2, 1e-1, 1e-1), -0.1)
    again = after(good.after_setback(changed(0.5), 3e-2, SMALLEST), -0.5)
    assert (again.nll, again.lowest_nll) == (pytest.approx(-0.1), pytest.approx(-0.1))
    assert good.after_setback(changed(0.5), 1e-2, SMALLEST).largest == 5e-3


def test_averages_that_drift_off_in_nll_but_tell_classes_apart_better_make_progress() -> None:
    """Under label skew the first averages do that; shrinking then would end the learning before it began."""
    guard = Guard(1e-2, 1e-1, 1e-1)
    for _ in range(2 * PATIENCE):
        guard = guard.after_round(Change(score=-0.001, error=0.01, level=1.0, nll=0.02), 1e-2, SMALLEST)
    assert guard.largest == 1e-2


def test_it_never_shrinks_below_the_smallest_candidate() -> None:
    assert after(Guard(1.5e-3, 1e-1, 1e-1), *[0.0] * (4 * PATIENCE), used=1.5e-3).largest == SMALLEST


def test_setbacks_are_beyond_noise_and_matter() -> None:
    young = Guard(1e-2, 1e-1, 1e-1)
    assert young.is_setback(Change(0.05, 0.01, 1.0, 0.0))
    assert not young.is_setback(Change(0.05, 0.03, 1.0, 0.0))
    assert not young.is_setback(Change(0.02, 0.001, 1.0, 0.0))


def test_losing_half_of_what_was_gained_is_a_setback() -> None:
    """A network whose units died predicts what an untrained one does, which is hardly worse in the first rounds."""
    gained = after(Guard(1e-2, 1e-1, 1e-1), -0.02)
    assert gained.is_setback(Change(0.011, 0.001, 1.0, 0.0))
    assert not gained.is_setback(Change(0.009, 0.001, 1.0, 0.0))
    assert not gained.is_setback(Change(0.011, 0.006, 1.0, 0.0))


def test_where_more_than_the_start_is_cautious_it_begins_there_and_may_double() -> None:
    start = Guard(1e-2, 1e-1, 1e-1)
    assert start.after_first_round(cautious=4e-2)[:3] == (4e-2, 8e-2, 8e-2)
    assert start.after_first_round(cautious=7e-2)[:3] == (7e-2, 1e-1, 1e-1)
    assert start.after_first_round(cautious=7e-3)[:3] == (1e-2, 1.4e-2, 1.4e-2)
    assert start.after_first_round(cautious=1e-3)[:3] == (1e-2, 1e-2, 1e-2)
