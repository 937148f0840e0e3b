"""The federation's hand on the rates: how large they may be, from how the averaged model fares. docs/methods.md 3.1."""

from typing import NamedTuple

from metabayfl.methods.evidence import BEYOND_NOISE

SHRINK, GROW, FORGET = 0.5, 2.0, 1.02
"""Factors on the largest allowed rate when the model got much worse or no better, and when it got better; and, each
round, on the ceiling that this leaves."""
PATIENCE = 6
"""Rounds without a new lowest NLL or score after which the rates are too large."""
FURTHEST = 2.0
"""How much further than at the start a client may go in a round, in the end."""
SETBACK, LOST = 0.03, 0.5
"""Share of the score by which it must have risen for a model to be taken back, as averages of skewed clients wander;
and share of what was gained since the start that is enough too: a dead network is hardly worse than a young one."""


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


class Guard(NamedTuple):
    """Largest allowed rate, its ceiling, and how the averaged model's NLL and score went since the start."""

    largest: float
    ceiling: float
    limit: float
    """What the ceiling rises to."""
    nll: float = 0.0
    lowest_nll: float = 0.0
    score: float = 0.0
    lowest_score: float = 0.0
    waiting: float = 0.0
    """Rounds since one of them was lowest."""

    def is_setback(self, change: Change) -> bool:
        """Whether the score rose beyond noise, and by as much as matters."""
        matters = SETBACK * abs(change.level)
        if self.score < 0:
            matters = min(matters, -LOST * self.score)
        return change.score > max(BEYOND_NOISE * change.error, matters)

    def after_first_round(self, cautious: float) -> "Guard":
        """Begin with the rate that is cautious for so many steps, if it is above the start; its double is the limit."""
        limit = min(max(self.largest, FURTHEST * cautious), self.limit)
        return self._replace(largest=min(max(self.largest, cautious), limit), ceiling=limit, limit=limit)

    def after_setback(self, change: Change, used: float, smallest: float) -> "Guard":
        """Go back to the model before: the next change will undo this one."""
        return self.moved(change).shrunk(used, smallest)

    def after_round(self, change: Change, used: float, smallest: float) -> "Guard":
        """Go on: grow while the score gets better beyond noise, shrink if there has been no new low for a while."""
        now = self.moved(change)
        if now.nll < self.lowest_nll or now.score < self.lowest_score:
            lowest_nll, lowest_score = min(now.nll, self.lowest_nll), min(now.score, self.lowest_score)
            now = now._replace(lowest_nll=lowest_nll, lowest_score=lowest_score, waiting=0.0)
        elif now.waiting + 1 >= PATIENCE:
            return now.shrunk(used, smallest)
        else:
            now = now._replace(waiting=now.waiting + 1)
        grown = min(self.largest * (GROW if change.is_better else 1.0), self.ceiling)
        return now._replace(largest=grown, ceiling=min(self.ceiling * FORGET, self.limit))

    def moved(self, change: Change) -> "Guard":
        """Add a change to what is known."""
        return self._replace(nll=self.nll + change.nll, score=self.score + change.score)

    def shrunk(self, used: float, smallest: float) -> "Guard":
        """Allow at most half of what was used, but the smallest candidate always."""
        largest = max(min(used, self.largest) * SHRINK, smallest)
        return self._replace(largest=largest, ceiling=largest, waiting=0.0)
