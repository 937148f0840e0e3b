"""The same methods over Flower's messages: same bits, nothing but updates on the wire, faults named."""

from pathlib import Path
from typing import Any

import pytest

from federations import log
from grids import InProcessGrid, node_configs, over_grid
from metabayfl.config import RunConfig
from metabayfl.experiment import Experiment
from metabayfl.methods import METHODS

BYTES = {"bytes_up", "bytes_down"}


def config(method: str = "fedavg", **changes: Any) -> RunConfig:
    """A small federation of digits."""
    values: dict[str, Any] = {
        "rounds": 3,
        "method": {"name": method, "epochs": 1},
        "data": {"clients": 3, "fraction": 0.1, "unlabelled": 20},
        "model": {"hidden": [4], "dropout": 0.1} if "dropout" in method else {"hidden": [4]},
        "eval": {"every": 2, "samples": 2},
    }
    return RunConfig(**(values | changes))


def without_bytes(path: Path) -> list[dict[str, Any]]:
    """The log without the sizes of messages, which have more in them than a simulated one counts."""
    return [{key: value for key, value in event.items() if key not in BYTES} for event in log(path)]


class TestSameBits:
    @pytest.mark.parametrize("method", sorted(METHODS.keys() - {"central"}))
    def test_as_the_local_engine(self, method: str, tmp_path: Path) -> None:
        plan = config(method)
        Experiment.of(plan).run(tmp_path / "local", 1)
        over_grid(plan, tmp_path / "run", InProcessGrid(node_configs(tmp_path)))
        model = (tmp_path / "run" / "model.safetensors").read_bytes()
        assert model == (tmp_path / "local" / "model.safetensors").read_bytes()
        assert without_bytes(tmp_path / "run") == without_bytes(tmp_path / "local")
