"""What a client leaves in a round, as one record: what it sent, its private state, its own model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metabayfl import tensorfile
from metabayfl.types import Fit, Params


def encode_client(
    client: int, fit: Fit, cost: Mapping[str, float], keep_personal: bool, origin: Mapping[str, str] | None = None
) -> bytes:
    """Return what a client leaves as a record; a tensor that is sent and also kept is stored once.

    The bytes of the update are counted unless the cost says otherwise: not everything is sent.
    """
    payload, weight, metrics = fit.update
    tensors = {f"payload.{name}": tensor for name, tensor in payload.items()}
    same: dict[str, list[str]] = {}
    for part, named in (("state", fit.state), ("personal", fit.personal if keep_personal else {})):
        same[part] = [name for name, tensor in named.items() if tensor is payload.get(name)]
        tensors |= {f"{part}.{name}": tensor for name, tensor in named.items() if name not in same[part]}
    bytes_up = tensorfile.encoded_size(payload, {"weight": weight, "metrics": metrics})
    meta = {"client": client, "same": same, "weight": weight, "metrics": metrics, **(origin or {})}
    return tensorfile.encode_checked(tensors, meta | {"cost": {"bytes_up": bytes_up, **cost}})


@dataclass(frozen=True)
class ClientRecord:
    """What a client left in a round."""

    tensors: Params
    meta: dict[str, Any]

    @property
    def client(self) -> int:
        """Whose it is."""
        return int(self.meta["client"])

    @property
    def weight(self) -> float:
        """How much the client counts."""
        return float(self.meta["weight"])

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers that the client sent along."""
        return dict(self.meta["metrics"])

    @property
    def cost(self) -> dict[str, float]:
        """Seconds in the hook, bytes up and down."""
        return dict(self.meta["cost"])

    @property
    def payload(self) -> Params:
        """Tensors that the client sent."""
        return self._part("payload")

    @property
    def state(self) -> Params:
        """Tensors that stay with the client."""
        return self._part("state")

    @property
    def personal(self) -> Params | None:
        """Return the client's own model, if it is kept."""
        return self._part("personal") or None

    def _part(self, part: str) -> Params:
        start = f"{part}."
        own = {name.removeprefix(start): value for name, value in self.tensors.items() if name.startswith(start)}
        return own | {name: self.tensors[f"payload.{name}"] for name in self.meta["same"].get(part, ())}
