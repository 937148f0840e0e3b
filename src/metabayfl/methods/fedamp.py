"""FedAMP (Huang et al., AAAI 2021): each client receives its own mixture of models. docs/methods.md 5.3."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import ValidationInfo, field_validator
from torch import Tensor

from metabayfl import aggregate
from metabayfl.methods.base import Method, NotNegative, Positive, get, model_of, put
from metabayfl.methods.needs import Need
from metabayfl.optim import Objective, PointLoss, rate_at
from metabayfl.proximal import Proximal
from metabayfl.types import Context, Params, Received, TrainData, Update


class AttentiveMessages(Method):
    """The server keeps all clients' models and sends each client its own mixture of them; there is no global model."""

    is_personal: ClassVar[bool] = True

    prox: NotNegative = 0.1
    """Strength of the pull to the received mixture (lambda / alpha in the paper); 0 is none."""

    @field_validator("prox")
    @classmethod
    def _is_stable(cls, prox: float, others: ValidationInfo) -> float:
        """Refuse a pull whose steps grow on a flat loss."""
        product = prox * rate_at(others.data.get("rate", 0.0), 0, 1)
        if product >= 2 and others.data.get("optimiser") == "sgd":
            raise ValueError(f"rate * prox = {product:g}: below 2 is accepted")
        return prox

    @property
    def needs(self) -> frozenset[Need]:
        """The server knows the clients' models one by one and keeps them."""
        return frozenset({Need.INDIVIDUAL, Need.MODELS})

    @abstractmethod
    def attention(self, weights: Tensor) -> Tensor:
        """Return the share of each model in each client's mixture, given the weights [clients, weights] in float64."""

    def init_server(self, ctx: Context) -> Params:
        """Return the common start and nobody's attention; models come later."""
        everybody = len(ctx.clients)
        return super().init_server(ctx) | {"attention": torch.zeros(everybody, everybody, dtype=torch.float64)}

    def broadcast(self, server: Params, ctx: Context) -> Params:
        """u_i = sum over j of xi_ij w_j; a newcomer gets the mean, and the first ones the common start."""
        number, known = ctx.client or 0, clients_known(server)
        if not known:
            return model_of(server)
        shares = server["attention"][number].tolist() if number in known else [1.0] * len(ctx.clients)
        return aggregate.mean([Update(get(server, str(other)), shares[other], {}) for other in known])

    def objective(self, model: Params, data: TrainData, ctx: Context) -> Objective:
        """Return NLL(w) + prox/2 |w - u_i|²."""
        return Proximal(PointLoss(ctx.task, model), model["mu"], self.prox)

    def payload_like(self, server: Params, ctx: Context) -> Params:
        """Return a model."""
        return model_of(server)

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Keep each client's newest model, and see how near they are to each other."""
        after = dict(server)
        for update in updates:
            after |= put(model_of(update.payload), str(update.client))
        known = clients_known(after)
        shares = self.attention(torch.stack([after[f"{number}.mu"] for number in known]).double())
        table = torch.zeros_like(server["attention"])
        table[torch.tensor(known)[:, None], torch.tensor(known)] = shares
        return after | {"attention": table}

    def global_model(self, server: Params, ctx: Context) -> Params | None:
        """There is none."""
        return None

    def received_model(self, down: Params, state: Params, ctx: Context) -> Params | None:
        """There is none: each client receives its own."""
        return None


class FedAMP(AttentiveMessages):
    """Clients go from a mixture in which models count the more the nearer they are to their own."""

    name: ClassVar[str] = "fedamp"
    paper: ClassVar[str] = "Huang et al., AAAI 2021"

    kernel_width: Positive = 1.0
    """At which squared distance attention falls, in units of the median one between two clients' models."""
    server_step: Positive | None = None
    """Factor on the attention to others, in the same units (alpha); by default kernel_width / number of models."""

    def attention(self, weights: Tensor) -> Tensor:
        """xi_ij = (step / width) exp(-d_ij² / width) for others, scaled where they sum to more than 1; xi_ii the rest.

        Relative to the median: d² of two networks grows with their size, and exp(-d²) would underflow to 0.
        """
        squares = torch.cdist(weights, weights, compute_mode="donot_use_mm_for_euclid_dist").square()
        pairs = squares[tuple(torch.triu_indices(len(weights), len(weights), 1))]
        median = pairs.median().item() if len(pairs) else 0.0
        step = self.kernel_width / len(weights) if self.server_step is None else self.server_step
        others = step / self.kernel_width * torch.exp(-squares / ((median or 1.0) * self.kernel_width))
        return with_own_share(others.fill_diagonal_(0.0))


def with_own_share(others: Tensor) -> Tensor:
    """Give each client what others leave of 1; if they leave less than nothing they are scaled down to 1."""
    others = others / others.sum(1, keepdim=True).clamp_min(1.0)
    return others + torch.diag((1.0 - others.sum(1)).clamp_min(0.0))


def clients_known(server: Params) -> list[int]:
    """Return the clients whose models the server has."""
    return sorted(int(number) for number, _, part in (name.partition(".") for name in server) if part == "mu")
