"""What a run has cost: its events added up. No torch here."""

from collections.abc import Iterable
from statistics import fmean
from typing import Any

Event = dict[str, Any]


def summarise_costs(events: Iterable[Event]) -> dict[str, Any]:
    """Add up the events of a run: totals, means per round, and means over the clients that reported a number."""
    log = list(events)
    clients, rounds = ([event for event in log if event["event"] == kind] for kind in ("client", "round"))
    names = {key: key for key in ("bytes_up", "bytes_down", "selection_seconds", "comm_seconds")}
    names |= {key: key for key in ("forward_passes", "backward_passes")}
    names["client_seconds"] = "seconds"
    values = {name: [event[key] for event in clients if key in event] for name, key in names.items()}
    per_client = {name: fmean(found or [0]) for name, found in values.items()}
    values |= {key: [event[key] for event in rounds if key in event] for key in ("train_seconds", "eval_seconds")}
    total = {name: sum(found) for name, found in values.items()}
    per_round = {name: value / max(1, len(rounds)) for name, value in total.items()}
    return {"rounds": len(rounds), "total": total, "per_round": per_round, "per_client": per_client}
