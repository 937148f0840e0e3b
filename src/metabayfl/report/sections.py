"""The sections of a report: what to look for, and the pictures that show it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metabayfl.report import choices, figures
from metabayfl.report.figures import Picture, Sign
from metabayfl.report.labels import labels
from metabayfl.report.runs import Run
from metabayfl.report.series import RECEIVED, candidate_curves, reliability

Groups = Mapping[str, Sequence[Run]]
TEXTS = {
    "curves": """G/G is the global model on the common test set, P/L the clients' own models on their own test
parts (mean weighted by size). A line is the mean over seeds, the band one standard deviation to either side.""",
    "calibration": """Predictions of the global model on the common test set by their confidence, after the
last evaluated round, all seeds together. On the dashed line confidence is earned; below it a
model is too confident. Dots: mean confidence and accuracy of a bin, larger where more predictions lie.""",
    "costs": """The same metric against what was spent until then, on average over seeds. Bytes are what was
really encoded. Seconds are those of the machines that ran it, whatever else they did: compare them only within
one machine.""",
    "rates": """The rate that each client chose in each round: larger rates are larger and stronger squares. A
blank: the client did not take part, or its update did not count. The first seed is shown.""",
    "candidates": """Loss on d_n, the samples that a client sets aside for choosing (no KL), of the received
model and after a short trial with each candidate; mean over clients and seeds. A rate that the guard forbids
has no point in that round, nor has a trial that left the finite numbers.""",
    "labels": """How many training samples of each class a client holds. The more the rows differ, the more the
clients disagree about what there is to learn.""",
}


@dataclass(frozen=True)
class Section:
    """A heading, pictures, and the legend that they share."""

    key: str
    title: str
    pictures: Sequence[Picture]
    missing: str
    """What to say if there is no picture."""
    legend: Sequence[Sign] = ()
    narrow: bool = False

    @property
    def text(self) -> str:
        """What to look for."""
        return TEXTS[self.key]


def sections(groups: Groups) -> list[Section]:
    """Return the sections in the order of the page."""
    return [make(groups) for make in (_curves, _calibration, _costs, _rates, _candidates, _labels)]


def _curves(groups: Groups) -> Section:
    legend = figures.series_legend(list(groups), "legend-curves")
    return Section("curves", "Over the rounds", figures.curves(groups), "No round has been evaluated yet.", legend)


def _calibration(groups: Groups) -> Section:
    bins = {label: reliability(runs) for label, runs in groups.items()}
    found = [figures.reliability(label, n, b) for n, (label, b) in enumerate(bins.items()) if b is not None]
    classifies = any(run.is_classifier for group in groups.values() for run in group)
    why = "Not recorded." if classifies else "These runs predict values: there is no confidence in a class to compare."
    return Section("calibration", "Is confidence earned?", found, why, narrow=True)


def _costs(groups: Groups) -> Section:
    legend = figures.series_legend(list(groups), "legend-costs")
    return Section("costs", "What it takes", figures.costs(groups), "No round has been evaluated yet.", legend)


def _rates(groups: Groups) -> Section:
    choosing = {label: next((run for run in group if run.choices), None) for label, group in groups.items()}
    runs = {label: run for label, run in choosing.items() if run is not None}
    scale = choices.Scale.of(list(runs.values()))
    found = [choices.rate_map(label, n, run, scale) for n, (label, run) in enumerate(runs.items())]
    legend = choices.rate_legend(scale, [event for run in runs.values() for event in run.choices])
    return Section("rates", "Chosen rates", found, "No method here chooses its rate.", legend)


def _candidates(groups: Groups) -> Section:
    found = {label: curves for label, group in groups.items() if (curves := candidate_curves(group))}
    names = list(dict.fromkeys(name for curves in found.values() for name in curves if name != RECEIVED))
    pictures = [figures.candidates(label, n, curves, names) for n, (label, curves) in enumerate(found.items())]
    legend = figures.candidates_legend(names)
    return Section("candidates", "What was tried", pictures, "No method here tries rates.", legend)


def _labels(groups: Groups) -> Section:
    first = min((run for group in groups.values() for run in group), key=lambda run: run.seed)
    found = labels(first)
    why = "Not recorded." if first.is_classifier else "These runs predict values: there are no classes to count."
    return Section("labels", "Who holds what", [] if found is None else [found], why)
