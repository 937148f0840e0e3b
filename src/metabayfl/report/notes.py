"""What a reader must know before believing a report: what is missing, and what cannot be compared."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from metabayfl.diagnosis import diagnose
from metabayfl.report.runs import Run

MOST_NAMED = 5
"""Runs that a note names one by one."""


def notes(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return one sentence for each thing that limits what the report says."""
    runs = [run for group in groups.values() for run in group]
    found = [*_not_comparable(runs), *_unfinished(runs), *_collapsed(runs)]
    if found and any(len(group) > 1 and not all(run.finished for run in group) for group in groups.values()):
        found.append("Late rounds of unfinished repetitions average fewer seeds.")
    if any(not run.history for run in runs):
        found.append("Runs without any evaluated round yet have no curves and no row in the table.")
    without = [
        label for label, group in groups.items() if not any("G/G" in e["metrics"] for r in group for e in r.history)
    ]
    if without and any(run.history for label in without for run in groups[label]):
        found.append(f"No global model, so no G/G numbers: {', '.join(without)}.")
    if all(len(group) == 1 for group in groups.values()):
        found.append("One seed for each method: there are no bands, and chance may explain any difference.")
    if any(len({run.seed for run in group}) != len({run.seed for run in runs}) for group in groups.values()):
        found.append("Not every method ran with every seed: means over different seeds are compared.")
    return found


def _not_comparable(runs: Sequence[Run]) -> list[str]:
    """Runs of one seed must have seen the same samples at the same clients; of different seeds, the same options."""
    hashes: dict[int, set[str]] = defaultdict(set)
    for run in runs:
        hashes[run.seed].add(str(run.environment.get("data_hash")))
    different = [seed for seed, found in sorted(hashes.items()) if len(found) > 1]
    if different:
        return [f"Not comparable: with seed {different[0]} these runs saw different data (their data hashes differ)."]
    if len({run.data_options for run in runs if run.config}) > 1:
        return ["Not comparable: the configs differ in [data], [corrupt] or [drift]."]
    if len({str(run.about["likelihood"]) for run in runs}) > 1 or len({run.about["clients"] for run in runs}) > 1:
        return ["Not comparable: the runs differ in their kind of labels or in their number of clients."]
    return []


def _unfinished(runs: Sequence[Run]) -> list[str]:
    open_ = [run for run in runs if not run.finished]
    if not open_:
        return []
    named = [
        f"{run.label} seed {run.seed} (round {run.last_round} of {run.about['rounds']})" for run in open_[:MOST_NAMED]
    ]
    more = [f"{len(open_) - MOST_NAMED} more"] if len(open_) > MOST_NAMED else []
    return [f"Unfinished, shown as far as they are: {', '.join(named + more)}."]


def _collapsed(runs: Sequence[Run]) -> list[str]:
    """Name the runs whose posteriors say nothing."""
    found = [(run, words) for run in runs for words in diagnose(run.events, run.about["method"])]
    named = [f"{run.label} seed {run.seed}: {words}." for run, words in found[:MOST_NAMED]]
    return named + ([f"{len(found) - MOST_NAMED} more like these."] if len(found) > MOST_NAMED else [])
