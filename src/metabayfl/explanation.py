"""Why a client did what it did in a round, in plain words, from what it reported."""

from collections.abc import Mapping, Sequence
from typing import Any

from metabayfl.comparison import Grid
from metabayfl.diagnosis import collapses_of
from metabayfl.optim import rate_at
from metabayfl.options import InputError

Event = dict[str, Any]
FEW_SAMPLES = 30
RULES = {
    "best": "the rate with the lowest loss on d_n",
    "one-se": "the largest rate whose loss on d_n is within one standard error of the best: trials favour small ones",
    "harmless": "the largest rate that raises the loss on d_n by less than a twentieth: what pays shows only later",
}


def find_event(events: Sequence[Event], client: int, round_: int | None, clients: int) -> Event:
    """Return what a client left in a round, or in its last one."""
    if not 0 <= client < clients:
        raise InputError(f"--client {client}: 0 to {clients - 1} is accepted")
    found = {event["round"]: event for event in events if event["event"] == "client" and event["client"] == client}
    if not found:
        raise InputError(f"client {client} has not taken part in any round so far")
    wanted = max(found) if round_ is None else round_
    if wanted not in found:
        near = ", ".join(map(str, sorted(sorted(found, key=lambda number: abs(number - wanted))[:5])))
        raise InputError(f"--round {round_}: client {client} did not take part; rounds near it in which it did: {near}")
    return found[wanted]


def trials_grid(event: Event, about: Mapping[str, Any]) -> Grid:
    """Return a row for each candidate, with what became of it; only the header for a method that does not choose."""
    header = ["rate", "NLL on d_n", "above the best", "standard error", "verdict"]
    if "incoming_nll" not in event:
        return [header]
    return [header, *(_trial_row(event, rate) for rate in _candidates(event, about))]


def _candidates(event: Event, about: Mapping[str, Any]) -> list[float]:
    rates = about["method"].get("rates", ())
    return sorted({rate_at(rate, event["round"] - 1, int(about["rounds"])) for rate in rates})


def _trial_row(event: Event, rate: float) -> list[str]:
    losses = [value for key, value in event.items() if key.startswith("trial_nll.")]
    loss, error = event.get(f"trial_nll.{rate:g}"), event.get(f"trial_error.{rate:g}")
    if loss is None:
        return [f"{rate:g}", "", "", "", _why_no_score(event, rate, any_trial=bool(losses) or "diverged" in event)]
    excess = loss - min(losses)
    words = [] if excess else ["best"]
    if excess and error is not None:
        words.append("as good as the best, by one standard error" if excess <= error else "worse by more than that")
    words += ["chosen"] if event.get("rate") == rate else []
    shown = "" if error is None else f"{error:.4f}"
    return [f"{rate:g}", f"{loss:.4f}", f"{excess:.4f}" if excess else "", shown if excess else "", ", ".join(words)]


def _why_no_score(event: Event, rate: float, any_trial: bool) -> str:
    if rate > event.get("allowed_rate", rate) * (1 + 1e-9):
        return "not tried: above what the guard allows"
    if any_trial:
        return "no score: it diverged or was given up"
    return "chosen" if event.get("rate") == rate else "not tried in this round"


def explain(event: Event, about: Mapping[str, Any]) -> list[str]:
    """Return sentences: how the rate came about, what became of the model, NLL against KL."""
    words = [f"Its update did not count: {event['fault']}."] if event["fault"] else []
    if "incoming_nll" in event:
        words += [*_received(event), *_choice(event, about["method"]), *_outcome(event)]
    elif "rate" in event:
        words.append(f"The rate was fixed: {event['rate']:g}. This method does not choose.")
    return [*words, *_loss(event)]


def _received(event: Event) -> list[str]:
    samples = f" on {event['scored_samples']:g} samples of d_n" if "scored_samples" in event else " on d_n"
    return [f"The received model has NLL {event['incoming_nll']:.4f}{samples}."]


def _choice(event: Event, method: Mapping[str, Any]) -> list[str]:
    if event.get("diverged"):
        return ["No trial stayed finite: the received model was kept and sent."]
    if "rate" not in event:
        return []
    rule = RULES[method.get("choice", "best")]
    whose = ", in the trials of all clients together, its own among them" if method.get("pooled") else ""
    when = "" if any(key.startswith("trial_nll.") for key in event) else " (there was no trial in this round)"
    return [f"It chose {event['rate']:g}: {rule}{whose}{when}."]


def _outcome(event: Event) -> list[str]:
    if "trained_nll" not in event:
        return (
            ["Training with that rate diverged: the received model was kept and sent."] if event.get("rejected") else []
        )
    change = f"NLL {event['trained_nll']:.4f} on d_n against {event['incoming_nll']:.4f} of the received one"
    if event.get("rejected"):
        return [f"The trained model has {change}, much worse: it was rejected, and the received model sent."]
    return [f"The trained model has {change}, and was sent."]


def _loss(event: Event) -> list[str]:
    """Weigh the two parts of what was trained against each other."""
    if "nll" not in event:
        return []
    if "kl" not in event:
        return [f"It trained the NLL alone, {event['nll']:.4f} in the last epoch: this model has no posterior."]
    penalty = event["kl_scale"] * event["kl"]
    share = penalty / (abs(event["nll"]) + penalty) if penalty > 0 else 0.0
    words = [f"It trained NLL {event['nll']:.4f} + {event['kl_scale']:.3g} x KL {event['kl']:.1f} = "
             f"{event['nll']:.4f} + {penalty:.4f}: the KL is {share:.0%} of the loss."]  # fmt: skip
    if "noisy_weights" in event:
        each = event["kl"] / event["noisy_weights"]
        words.append(f"KL per weight {each:.4f} nats, mean standard deviation of the weights {event['sigma']:.3g}.")
    return words


def warnings_of(event: Event, about: Mapping[str, Any]) -> list[str]:
    """Return what deserves a second look."""
    collapses = [f"the posterior has {kind}" for kind in collapses_of(event, about["method"])]
    return [*_selection_warnings(event, _candidates(event, about)), *collapses]


def _selection_warnings(event: Event, candidates: Sequence[float]) -> list[str]:
    found = []
    allowed = event.get("allowed_rate")
    if allowed is not None and candidates and candidates[-1] > allowed * (1 + 1e-9):
        found.append(
            f"the rate guard allows nothing above {allowed:.3g} in this round: it starts where a round of so many "
            "steps is cautious, at most doubles while the averaged model gets better on d_n, and falls when that got "
            "much worse"
        )
    if event.get("scored_samples", FEW_SAMPLES) < FEW_SAMPLES:
        found.append(
            f"scores use only {event['scored_samples']:g} samples of d_n: chance has a large say in the choice"
        )
    return found
