"""What a client did and why, in words, from what it reported."""

from pathlib import Path
from typing import Any

import pytest

from federations import command, federation, network, plan
from metabayfl.api import run_job
from metabayfl.explanation import explain, find_event, trials_grid, warnings_of
from metabayfl.methods import FedAvg, MetaBayFL
from metabayfl.options import InputError

ABOUT: dict[str, Any] = {
    "method": {"name": "meta-bayfl", "choice": "one-se", "rates": [1e-3, 1e-2, 1e-1, 1.0],
               "prior": "fixed", "initial_sigma": 0.02},
    "rounds": 5,
}  # fmt: skip
EVENT: dict[str, Any] = {
    "event": "client", "round": 2, "client": 3, "fault": "", "rate": 0.01, "nll": 0.3, "kl": 50.0, "kl_scale": 0.002,
    "noisy_weights": 100, "sigma": 0.05, "prior_sigma": 0.1, "incoming_nll": 0.9, "scored_samples": 64,
    "allowed_rate": 0.5, "trained_nll": 0.4,
    "trial_nll.0.001": 0.70, "trial_error.0.001": 0.0, "trial_nll.0.01": 0.72, "trial_error.0.01": 0.05,
    "trial_nll.0.1": 0.95, "trial_error.0.1": 0.1,
}  # fmt: skip


def said(**changes: Any) -> str:
    return "\n".join(explain(EVENT | changes, ABOUT))


def warned(**changes: Any) -> str:
    return "\n".join(warnings_of(EVENT | {"allowed_rate": 1.0} | changes, ABOUT))


def without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in EVENT.items() if key not in names}


class TestTrials:
    def test_each_candidate_has_a_verdict(self) -> None:
        verdicts = {row[0]: row[-1] for row in trials_grid(EVENT, ABOUT)[1:]}
        assert verdicts == {
            "0.001": "best",
            "0.01": "as good as the best, by one standard error, chosen",
            "0.1": "worse by more than that",
            "1": "not tried: above what the guard allows",
        }

    def test_losses_are_compared_with_the_best(self) -> None:
        assert trials_grid(EVENT, ABOUT)[2][:4] == ["0.01", "0.7200", "0.0200", "0.0500"]

    def test_a_trial_without_a_score(self) -> None:
        found = trials_grid(without("trial_nll.0.1", "trial_error.0.1"), ABOUT)
        assert found[3] == ["0.1", "", "", "", "no score: it diverged or was given up"]

    def test_rates_that_fall_with_the_rounds(self) -> None:
        about = ABOUT | {"method": {"rates": ["1/k"]}}
        assert trials_grid(without() | {"trial_nll.0.5": 0.6, "rate": 0.5}, about)[1][0] == "0.5"


class TestWords:
    def test_the_rule_is_named(self) -> None:
        assert "It chose 0.01: the largest rate whose loss on d_n is within one standard error" in said()
        best = "\n".join(explain(EVENT, ABOUT | {"method": {"choice": "best"}}))
        assert "the rate with the lowest loss on d_n" in best

    def test_nll_against_kl(self) -> None:
        assert "NLL 0.3000 + 0.002 x KL 50.0 = 0.3000 + 0.1000: the KL is 25% of the loss." in said()
        assert "KL per weight 0.5000 nats" in said()

    def test_what_became_of_the_model(self) -> None:
        assert "The trained model has NLL 0.4000 on d_n against 0.9000 of the received one, and was sent." in said()
        assert "much worse: it was rejected" in said(rejected=1, trained_nll=2.0)
        diverged = "\n".join(explain(without("trained_nll") | {"rejected": 1}, ABOUT))
        assert "Training with that rate diverged" in diverged
        assert "No trial stayed finite" in "\n".join(explain(without("rate", "trained_nll") | {"diverged": 1}, ABOUT))

    def test_a_fixed_rate(self) -> None:
        fixed = {"event": "client", "round": 1, "client": 0, "fault": "", "rate": 0.1, "nll": 0.5}
        words = explain(fixed, {"method": {"name": "fedavg"}, "rounds": 1})
        assert words[0] == "The rate was fixed: 0.1. This method does not choose."
        assert "no posterior" in words[1]
        assert warnings_of(fixed, {"method": {"name": "fedavg"}, "rounds": 1}) == []

    def test_an_update_that_did_not_count(self) -> None:
        assert explain({"fault": "missed the deadline"}, ABOUT) == ["Its update did not count: missed the deadline."]


class TestWarnings:
    def test_nothing_to_warn_of(self) -> None:
        assert warned() == ""

    def test_collapse_to_the_prior_and_to_a_point(self) -> None:
        assert "collapsed to the prior" in warned(kl=0.5)
        assert "collapsed to a point" in warned(sigma=5e-4)
        about = ABOUT | {"method": ABOUT["method"] | {"prior": "global"}}
        assert warnings_of(EVENT | {"kl": 0.5, "allowed_rate": 1.0}, about) == []

    def test_the_guard(self) -> None:
        assert "the rate guard allows nothing above 0.5 in this round" in warned(allowed_rate=0.5)

    def test_few_samples(self) -> None:
        assert "only 12 samples of d_n" in warned(scored_samples=12)


class TestFind:
    EVENTS = ({"event": "client", "round": 1, "client": 0}, {"event": "client", "round": 4, "client": 0})

    def test_the_last_round_unless_another_is_asked_for(self) -> None:
        assert find_event(self.EVENTS, 0, None, 2)["round"] == 4
        assert find_event(self.EVENTS, 0, 1, 2)["round"] == 1

    @pytest.mark.parametrize(
        ("client", "round_", "message"),
        [(7, None, "0 to 1 is accepted"), (-1, None, "0 to 1"), (1, None, "has not taken part"), (0, 2, "did: 1, 4")],
    )
    def test_mistakes(self, client: int, round_: int | None, message: str) -> None:
        with pytest.raises(InputError, match=message):
            find_event(self.EVENTS, client, round_, 2)


@pytest.mark.parametrize("method", [FedAvg(epochs=1), MetaBayFL(epochs=1)])
def test_a_run_explains_itself(tmp_path: Path, method: FedAvg | MetaBayFL, capsys: pytest.CaptureFixture[str]) -> None:
    run_job(network(), federation(), method, plan(), out=tmp_path / "run")
    assert command(["explain", str(tmp_path / "run"), "--client=1", "--round=2"]) == 0
    said = capsys.readouterr().out
    assert f"{method.name}, seed 0: client 1, round 2 of 3" in said
    if isinstance(method, MetaBayFL):
        for word in ("0.001", "chosen", "less than a twentieth", "KL per weight", "samples of d_n"):
            assert word in said
    else:
        assert "The rate was fixed: 0.001" in said
