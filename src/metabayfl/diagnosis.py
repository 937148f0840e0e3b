"""Posteriors that say nothing: as wide as the prior, or no wider than a point. From what clients reported."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]
SMALL_KL = 0.01
"""Nats per weight under which a posterior says little more than its prior."""
SMALL_SIGMA = 0.01
"""Share of the prior's (or the initial) spread under which a posterior is a point."""
TO_PRIOR = "collapsed to the prior: it has learnt next to nothing (lower method.kl_weight)"
TO_POINT = "collapsed to a point: it knows no uncertainty (raise method.kl_weight)"


def collapses_of(event: Event, method: Mapping[str, Any]) -> list[str]:
    """Return to what a client's posterior has collapsed in a round."""
    if "noisy_weights" not in event:
        return []
    found = []
    fixed = method.get("prior") == "fixed"
    if fixed and event["kl"] < SMALL_KL * event["noisy_weights"]:
        found.append(TO_PRIOR)
    reference = event.get("prior_sigma", 0.0) if fixed else method.get("initial_sigma", 0.0)
    if event["sigma"] < SMALL_SIGMA * reference:
        found.append(TO_POINT)
    return found


def diagnose(events: Iterable[Event], method: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each kind of collapse that at least half of the clients of the last round show."""
    reports = [event for event in events if event["event"] == "client" and "noisy_weights" in event]
    last = max((event["round"] for event in reports), default=0)
    clients = [event for event in reports if event["round"] == last]
    found = Counter(kind for event in clients for kind in collapses_of(event, method))
    return [
        f"in round {last} the posterior of {count} of {len(clients)} clients has {kind}"
        for kind, count in found.items()
        if 2 * count >= len(clients)
    ]
