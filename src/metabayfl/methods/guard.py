"""The federation's hand on the rates: how large they may be, from how the averaged model fares. docs/methods.md 3.1."""

from typing import NamedTuple

from metabayfl.methods.trials import BEYOND_NOISE

SHRINK, GROW, FORGET = 0.5, 2.0, 1.05
"""Factors on the largest allowed rate when the model got much worse or no better, and when it got better; and, each
round, on the ceiling that this leaves."""
PATIENCE = 6
"""Rounds without a new lowest NLL after which the rates are too large."""
SETBACK = 0.03
"""Share of the score by which it must have risen for a model to be taken back: averages of skewed clients wander."""


class Change(NamedTuple):
    """What has become of the averaged model on the clients' d_n in a round: its score, by which rates are chosen, the
    standard error of that change and the score itself; and its NLL, which also sees a model become too sure."""

    score: float
    error: float
    level: float
    nll: float

    @property
    def is_better(self) -> bool:
        """Whether the score fell beyond noise."""
        return self.score < -BEYOND_NOISE * self.error

    @property
    def is_setback(self) -> bool:
        """Whether the score rose beyond noise, and by a share that matters."""
        return self.score > max(BEYOND_NOISE * self.error, SETBACK * abs(self.level))


class Guard(NamedTuple):
    """Largest allowed rate, its ceiling, and how the averaged model's NLL went since the start."""

    largest: float
    ceiling: float
    nll: float = 0.0
    lowest: float = 0.0
    waiting: float = 0.0
    """Rounds since the lowest NLL."""

    def after_setback(self, change: Change, used: float) -> "Guard":
        """Go back to the model before: the next change will undo this one."""
        return self._replace(nll=self.nll + change.nll).shrunk(used)

    def after_round(self, change: Change, used: float, limit: float) -> "Guard":
        """Go on: grow while the score gets better beyond noise, shrink if the NLL has found no new low for a while."""
        nll = self.nll + change.nll
        waiting = 0.0 if nll < self.lowest else self.waiting + 1
        now = self._replace(nll=nll, lowest=min(nll, self.lowest), waiting=waiting)
        if waiting >= PATIENCE:
            return now.shrunk(used)
        grown = min(self.largest * (GROW if change.is_better else 1.0), self.ceiling)
        return now._replace(largest=grown, ceiling=min(self.ceiling * FORGET, limit))

    def shrunk(self, used: float) -> "Guard":
        """Allow at most half of what was used."""
        largest = min(used, self.largest) * SHRINK
        return self._replace(largest=largest, ceiling=largest, waiting=0.0)
