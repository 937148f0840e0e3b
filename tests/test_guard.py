"""The guard by hand: it grows while models get better, shrinks when they do not, and forgets slowly."""

import pytest

from metabayfl.methods.guard import PATIENCE, Change, Guard


def changed(by: float) -> Change:
    """A change that is beyond noise from 0.01 on."""
    return Change(score=by, error=0.005, level=1.0, nll=by)


def after(guard: Guard, *changes: float, used: float = 1e-2) -> Guard:
    for change in changes:
        guard = guard.after_round(changed(change), used, limit=1e-1)
    return guard


def test_it_doubles_while_the_model_gets_better_beyond_noise() -> None:
    assert after(Guard(1e-2, 1e-1), -0.02, -0.02).largest == pytest.approx(4e-2)
    assert after(Guard(1e-2, 1e-1), -0.005).largest == 1e-2
    assert after(Guard(1e-2, 1e-1), *[-0.02] * 9).largest == 1e-1


def test_without_a_new_lowest_loss_for_a_while_it_halves_what_was_used() -> None:
    stalled = after(Guard(4e-2, 1e-1), -0.05, *[0.001] * (PATIENCE - 1))
    assert stalled.largest == pytest.approx(8e-2)
    stalled = after(stalled, 0.0)
    assert (stalled.largest, stalled.ceiling, stalled.waiting) == (5e-3, 5e-3, 0)


def test_slow_progress_is_progress() -> None:
    assert after(Guard(1e-2, 1e-1), *[-0.001] * 20).largest == 1e-2


def test_ceilings_rise_slowly_to_the_largest_candidate() -> None:
    shrunk = Guard(1e-2, 1e-1).shrunk(used=1e-2)
    assert after(shrunk, -0.02, -0.02).largest == pytest.approx(5e-3 * 1.05)
    assert after(shrunk, *[-0.02] * 100).ceiling == 1e-1


def test_a_setback_is_undone_by_the_change_that_follows() -> None:
    """The model is taken back: its change and the way back cancel, so the lowest loss stays what it was."""
    good = after(Guard(1e-2, 1e-1), -0.1)
    again = after(good.after_setback(changed(0.5), used=3e-2), -0.5)
    assert (again.nll, again.lowest) == (pytest.approx(-0.1), pytest.approx(-0.1))
    assert good.after_setback(changed(0.5), used=1e-2).largest == 5e-3


def test_a_model_that_becomes_too_sure_is_seen_by_its_nll() -> None:
    guard = Guard(1e-2, 1e-1)
    for _ in range(PATIENCE):
        guard = guard.after_round(Change(score=-0.001, error=0.01, level=1.0, nll=0.02), used=1e-2, limit=1e-1)
    assert guard.largest == 5e-3


def test_setbacks_are_beyond_noise_and_matter() -> None:
    assert Change(0.05, 0.01, 1.0, 0.0).is_setback
    assert not Change(0.05, 0.03, 1.0, 0.0).is_setback
    assert not Change(0.02, 0.001, 1.0, 0.0).is_setback
