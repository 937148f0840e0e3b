"""FedAvgM by hand, FedAvg as a limit, and the page that leads to it."""

import re
from pathlib import Path

import pytest
import torch

from metabayfl.methods import FedAvg, FedAvgM
from metabayfl.types import Context, Update
from quadratics import EYE, fixed_point, line, play, regression

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/add-a-method.md").read_text(encoding="utf-8")
CLIENTS = [regression(0, 8, 8), regression(1, 24, 24)]


def test_two_rounds_by_hand() -> None:
    """From 0, clients at 1 and 3 with equal weight: v = 2, w = 1; then at 2 and 2: v = 0.5 · 2 + 1 = 2, w = 2."""
    method, ctx = FedAvgM(server_momentum=0.5, server_rate=0.5), Context(line(1, 1.0))
    server = method.init_server(ctx)
    for sent, weights, velocity in (((1.0, 3.0), 1.0, 2.0), ((2.0, 2.0), 2.0, 2.0)):
        updates = [Update({"mu": torch.full_like(server["mu"], value)}, 1.0, {}) for value in sent]
        server = method.aggregate(server, updates, ctx)
        assert server["mu"].tolist() == [weights] * 3
        assert server["velocity"].tolist() == [velocity] * 3


def test_the_velocity_is_not_sent() -> None:
    method, ctx = FedAvgM(), Context(line(1, 1.0))
    server = method.init_server(ctx)
    assert method.broadcast(server, ctx).keys() == method.payload_like(server, ctx).keys() == {"mu"}


def test_without_momentum_it_is_fedavg() -> None:
    options = {"rate": 0.2, "epochs": 3, "optimiser": "sgd"}
    plain, other = (
        play(method, line(1, 1.0), CLIENTS, rounds=5).server["mu"]
        for method in (FedAvg(**options), FedAvgM(server_momentum=0.0, server_rate=1.0, **options))
    )
    torch.testing.assert_close(other, plain, rtol=0.0, atol=1e-14)


def test_the_fixed_point_is_that_of_fedavg() -> None:
    method = FedAvgM(rate=0.2, epochs=5, optimiser="sgd", momentum=0.0, server_momentum=0.5)
    expected = fixed_point(CLIENTS, [0.25, 0.75], lambda a: EYE - torch.linalg.matrix_power(EYE - 0.2 * a, 5))
    found = play(method, line(1, 1.0), CLIENTS, rounds=3, mu=expected).server["mu"]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


class TestPage:
    """docs/add-a-method.md shows the files as they are."""

    @pytest.mark.parametrize("name", ["src/metabayfl/methods/fedavgm.py", "tests/test_fedavgm.py"])
    def test_code(self, name: str) -> None:
        text = (ROOT / name).read_text(encoding="utf-8")
        shown = re.search(rf"`{re.escape(name)}`[^`]*```python\n(.*?)```", PAGE, re.S)
        assert shown is not None
        assert shown.group(1) in text
        assert name.startswith("tests") or shown.group(1) == text
        assert len(text.splitlines()) < 100

    def test_name_table(self) -> None:
        table = (ROOT / "src/metabayfl/methods/__init__.py").read_text(encoding="utf-8")
        shown = re.search(r"`src/metabayfl/methods/__init__.py`[^`]*```python\n(.*?)```", PAGE, re.S)
        assert shown is not None
        lines = [line for line in shown.group(1).splitlines() if line.strip(" .") and line.strip() != "..."]
        assert len(lines) == 3
        assert all(line in table.splitlines() for line in lines)
