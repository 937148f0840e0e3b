"""The federation's hand on the rates: how large they may be, from how the averaged model fares. docs/methods.md 3.1."""

from typing import NamedTuple

from metabayfl.methods.evidence import BEYOND_NOISE

SHRINK, GROW, FORGET = 0.5, 2.0, 1.05
"""Factors on the largest allowed rate when the model got much worse, and when it got better; and, each round, on the
ceiling that a setback leaves."""
FURTHEST = 2.2
"""How much further than at the start a client may go in a round, in the end."""
SETBACK, LOST = 0.03, 0.5
"""Share of the score by which it must have risen for a model to be taken back, as averages of skewed clients wander;
and share of what was gained since the start that is enough too: a dead network is hardly worse than a young one."""


class Change(NamedTuple):
    """What has become of the averaged model's score on the clients' d_n in a round, the standard error of that change,
    and the score itself."""

    score: float
    error: float
    level: float

    @property
    def is_better(self) -> bool:
        """Whether the score fell beyond noise."""
        return self.score < -BEYOND_NOISE * self.error


class Guard(NamedTuple):
    """Largest allowed rate, its ceiling, what that may rise to; and how the score of the averaged model went so far."""

    largest: float
    ceiling: float
    limit: float
    score: float = 0.0

    def is_setback(self, change: Change) -> bool:
        """Whether the score rose beyond noise, and by as much as matters."""
        matters = SETBACK * abs(change.level)
        if self.score < 0:
            matters = min(matters, -LOST * self.score)
        return change.score > max(BEYOND_NOISE * change.error, matters)

    def after_first_round(self, cautious: float) -> "Guard":
        """Begin with what is cautious for so many steps, if that is above the start; a little further is the limit."""
        limit = min(max(self.largest, FURTHEST * cautious), self.limit)
        return self._replace(largest=min(max(self.largest, cautious), limit), ceiling=limit, limit=limit)

    def after_setback(self, change: Change, used: float, smallest: float) -> "Guard":
        """Allow half of what was used, but the smallest candidate always; the next change will undo this one."""
        largest = max(min(used, self.largest) * SHRINK, smallest)
        return self._replace(largest=largest, ceiling=largest, score=self.score + change.score)

    def after_round(self, change: Change) -> "Guard":
        """Go on; grow if the score got better beyond noise."""
        grown = min(self.largest * (GROW if change.is_better else 1.0), self.ceiling)
        ceiling = min(self.ceiling * FORGET, self.limit)
        return self._replace(largest=grown, ceiling=ceiling, score=self.score + change.score)
