"""The federation's hand on the rates: how large they may be, from how the averaged model fares. docs/methods.md 3.1."""

from typing import NamedTuple

SHRINK, GROW, FORGET = 0.5, 2.0, 1.05
"""Factors on the largest allowed rate when the model got much worse or no better, and when it got better; and, each
round, on the ceiling that this leaves."""
PATIENCE = 6
"""Rounds without a new lowest loss after which the rates are too large."""


class Guard(NamedTuple):
    """Largest allowed rate, its ceiling, and how the averaged model's loss on the clients' d_n went since the start."""

    largest: float
    ceiling: float
    change: float = 0.0
    lowest: float = 0.0
    waiting: float = 0.0
    """Rounds since the lowest loss."""

    def after_setback(self, change: float, used: float) -> "Guard":
        """Go back to the model before: the next change will undo this one."""
        return self._replace(change=self.change + change).shrunk(used)

    def after_round(self, change: float, noise: float, used: float, limit: float) -> "Guard":
        """Go on: grow while the model gets better beyond noise, shrink if it has not for a while."""
        total = self.change + change
        waiting = 0.0 if total < self.lowest else self.waiting + 1
        now = self._replace(change=total, lowest=min(total, self.lowest), waiting=waiting)
        if waiting >= PATIENCE:
            return now.shrunk(used)
        grown = min(self.largest * (GROW if change < -noise else 1.0), self.ceiling)
        return now._replace(largest=grown, ceiling=min(self.ceiling * FORGET, limit))

    def shrunk(self, used: float) -> "Guard":
        """Allow at most half of what was used."""
        largest = min(used, self.largest) * SHRINK
        return self._replace(largest=largest, ceiling=largest, waiting=0.0)
