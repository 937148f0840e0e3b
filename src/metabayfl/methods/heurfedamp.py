"""HeurFedAMP (Huang et al., AAAI 2021): FedAMP with attention by the angle between models. docs/methods.md 5.3."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from metabayfl.methods.base import NotNegative
from metabayfl.methods.fedamp import AttentiveMessages


class HeurFedAMP(AttentiveMessages):
    """Clients go from a mixture of a fixed share of their own model and of others by their angle to it."""

    name: ClassVar[str] = "heurfedamp"
    paper: ClassVar[str] = "Huang et al., AAAI 2021"

    own_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the client's own model in its mixture."""
    sharpness: NotNegative = 100.0
    """How fast attention grows with the cosine of two models; 0 is the same for all others."""

    def attention(self, weights: Tensor) -> Tensor:
        """xi_ij = (1 - xi_ii) exp(sharpness cos(w_i, w_j)) / Z for others, xi_ii fixed."""
        if len(weights) == 1:
            return torch.ones(1, 1, dtype=weights.dtype)
        unit = torch.nn.functional.normalize(weights, dim=1)
        others = (self.sharpness * unit @ unit.T).fill_diagonal_(-torch.inf).softmax(1)
        return (1.0 - self.own_share) * others + self.own_share * torch.eye(len(weights), dtype=weights.dtype)
