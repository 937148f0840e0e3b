"""Networks as strangers write them: three classes, and each with inputs that it takes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class NormedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


class Cnn(nn.Module):
    """One input channel and one depthwise layer: shapes for which memory formats are ambiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4, bias=False)
        self.mix = nn.Conv2d(4, 5, 2, stride=2)
        self.bn_out = nn.BatchNorm2d(5)
        self.head = nn.Linear(5 * 3 * 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu()
        x = self.bn_out(self.mix(self.depthwise(x))).relu()
        return self.head(x.flatten(1))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.block = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], dim=1)
        return self.head(self.block(tokens)[:, 0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.gru = nn.GRU(5, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(x))[0].mean(1))


class Tied(nn.Module):
    """A tiny language model over three words, whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x).mean(1)).tanh())


class FrozenBackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).mean((2, 3)))


class Constants(nn.Module):
    """Counts its passes in an integer buffer and keeps a cache that grows; both enter the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)
        self.register_buffer("passes", torch.tensor(3))
        self.register_buffer("cache", torch.ones(1), persistent=False)
        self.register_buffer("scale", torch.full((2, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.cache = torch.cat([self.cache, self.cache[-1:] + 1])
        hidden = self.first(x).tanh() * self.passes / 4 + self.cache.mean()
        return self.last(hidden) * self.scale.sum()


def vectors(batch: int) -> Tensor:
    return torch.randn(batch, 4)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 1, 8, 8)


def words(batch: int) -> Tensor:
    return torch.randint(0, 3, (batch, 6))


STRANGERS: dict[type[nn.Module], Callable[[int], Tensor]] = {
    NormedMlp: vectors,
    Cnn: images,
    Vit: images,
    Recurrent: words,
    Tied: words,
    FrozenBackbone: images,
    Constants: vectors,
}


def meet(kind: type[nn.Module], batch: int = 9, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    """A stranger's module with inputs and labels, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, x, y = kind().to(dtype), STRANGERS[kind](batch), torch.randint(0, 3, (batch,))
    return module, x.to(dtype) if x.is_floating_point() else x, y
