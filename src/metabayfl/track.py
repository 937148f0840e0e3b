"""Curves in TensorBoard (extra `track`)."""

from pathlib import Path
from typing import Any

from metabayfl.options import InputError

Event = dict[str, Any]


class TensorBoard:
    """Follows the events of a run and writes the metrics of each view as scalars."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("--track needs TensorBoard: pip install 'metabayfl[track]'") from None
        self.writer = SummaryWriter(str(directory))

    def __call__(self, event: Event) -> None:
        """Take notice of an event."""
        if event["event"] != "round":
            return
        for view, metrics in event["metrics"].items():
            for name, summary in metrics.items():
                for column, value in summary.items():
                    tag = f"{name}/{view}" if column == "value" else f"{name}/{view} {column}"
                    self.writer.add_scalar(tag, value, event["round"])
        self.writer.flush()
