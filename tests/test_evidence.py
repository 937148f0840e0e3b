"""Choosing between rates: by hand, with one client's trials and with everybody's."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from metabayfl.methods.evidence import HOPELESS, Choice, Evidence, choose, combine, nothing, unpack, weigh

RATES = (1e-3, 1e-2, 1e-1)


def evidence(scores: Sequence[Tensor | None]) -> Evidence:
    return weigh(scores, [True] * len(scores), torch.ones(4))


def pick(scores: Sequence[Tensor | None], choice: Choice) -> int | None:
    return choose(evidence(scores), RATES, [losses is not None for losses in scores], choice)


class TestChoice:
    small, middle, large = torch.full((4,), 1.0), torch.full((4,), 0.9), torch.tensor([0.6, 1.4, 0.7, 1.3])

    def test_by_hand(self) -> None:
        """Mean losses 1.0, 0.9, 1.0: the last is within one paired standard error, 0.204, of the best."""
        found = evidence([self.small, self.middle, self.large])
        assert found.variance[1, 2].sqrt().item() == pytest.approx(0.2041, abs=1e-4)
        assert pick([self.small, self.middle, self.large], "best") == 1
        assert pick([self.small, self.middle, self.large], "one-se") == 2
        assert pick([self.small - 0.8, self.middle - 0.8, self.large - 0.5], "one-se") == 1

    def test_what_does_no_harm_is_taken_if_it_is_large(self) -> None:
        """Losses of 1 before: up to 1.05 is harmless; if everything harms, the best is taken."""
        assert pick([self.middle, self.small + 0.04], "harmless") == 1
        assert pick([self.middle, self.small + 0.06], "harmless") == 0
        assert pick([self.small + 0.2, self.small + 0.1, self.small + 0.3], "harmless") == 1

    def test_ties_go_to_the_smaller_rate_unless_the_larger_is_as_good(self) -> None:
        assert pick([self.small, self.small], "best") == 0
        assert pick([self.small, self.small], "one-se") == 1

    def test_what_failed_or_is_not_known_is_never_chosen(self) -> None:
        assert pick([self.small, None], "one-se") == 0
        assert pick([None, None], "best") is None
        assert choose(nothing(2), RATES, [True, True], "best") is None

    def test_candidates_need_not_be_in_order(self) -> None:
        found = evidence([self.small, self.small])
        assert choose(found, (1e-1, 1e-3), [True, True], "one-se") == 0
        assert choose(found, (1e-1, 1e-3), [True, True], "best") == 1


class TestEvidence:
    def test_it_is_measured_against_the_received_model(self) -> None:
        before = torch.tensor([1.0, 3.0])
        found = weigh([before - 0.5, before + 0.25, None], [True, True, True], before)
        assert found.mean.tolist() == [-0.25, 0.125, HOPELESS]
        assert not found.variance.any()

    def test_what_is_far_worse_is_just_hopeless(self) -> None:
        assert weigh([torch.full((3,), 1e30)], [True], torch.ones(3)).mean.tolist() == [HOPELESS]

    def test_one_sample_has_no_spread(self) -> None:
        assert not weigh([torch.ones(1), torch.zeros(1)], [True, True], torch.zeros(1)).variance.any()

    def test_it_survives_sending(self) -> None:
        found = weigh([torch.rand(9), torch.rand(9), None], [True, True, False], torch.zeros(9))
        again = unpack(found.pack())
        assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
        assert found.pack().isfinite().all()


class TestPooling:
    def test_two_halves_are_the_whole(self) -> None:
        """Means add up by samples, and errors as those of independent samples do."""
        rng = torch.Generator().manual_seed(0)
        losses = [torch.randn(4000, generator=rng, dtype=torch.float64).div(10) for _ in range(2)]
        whole = weigh(losses, [True, True], torch.ones(4000))
        halves = [weigh([one[part] for one in losses], [True, True], torch.ones(2000))
                  for part in (slice(2000), slice(2000, None))]  # fmt: skip
        pooled = combine([(0.5, half) for half in halves])
        torch.testing.assert_close(pooled.mean, whole.mean)
        torch.testing.assert_close(pooled.variance, whole.variance, rtol=0.01, atol=0)

    def test_only_those_count_who_have_tried(self) -> None:
        one = weigh([torch.tensor([2.0, 2.0]), None], [True, False], torch.ones(2))
        two = weigh([torch.tensor([1.0, 1.0]), torch.tensor([1.5, 1.5])], [True, True], torch.ones(2))
        pooled = combine([(3.0, one), (1.0, two), (9.0, nothing(2))])
        assert pooled.mean.tolist() == [0.75, 0.5]
        assert pooled.known.tolist() == [True, True]
        assert combine([(1.0, nothing(2))]).known.tolist() == [False, False]

    def test_many_small_clients_tell_what_none_of_them_can(self) -> None:
        """The larger rate is worse by 0.1, in noise of 1: 20 samples cannot see it, 50 clients of 20 can."""
        rng = torch.Generator().manual_seed(0)
        seen = [weigh([torch.ones(20), 1.1 + torch.randn(20, generator=rng)], [True, True], torch.ones(20))
                for _ in range(50)]  # fmt: skip
        alone = [choose(one, RATES, [True, True], "one-se") for one in seen]
        assert sum(index == 1 for index in alone) > 25
        assert choose(combine([(1.0, one) for one in seen]), RATES, [True, True], "one-se") == 0
