"""Small models with everything that makes a second forward differ from the first, and how they are run."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybatch.recompute import Choice, apply_policies, find_blocks
from benchmarks.nets import ResNet
from tests import device
from tests.snapshots import STREAMS, seed
from tests.zoo import u_net

ROWS = 4


class DoubleConv(nn.Module):
    """A U-Net's, with activations in place right behind the convolutions."""

    def __init__(self, maps: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(maps, out, 3, padding=1), nn.SiLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1), nn.SiLU(inplace=True), nn.Dropout2d(0.3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@dataclass
class Two:
    hidden: Tensor
    extra: dict[str, Tensor]


class Odd(nn.Module):
    """A block with all that a second run must not do twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))

        self.attention = nn.MultiheadAttention(width, 2, dropout=0.2, batch_first=True)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.own, self.calls = torch.Generator().manual_seed(1), 0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: Tensor, *, seen: list[Tensor], places: dict[str, Tensor]) -> Two:
        self.seen = self.seen + x.detach().mean()
        self.calls += 1
        self.mask.mul_(1.01)
        noise = random.random() + np.random.rand() + torch.rand((), generator=self.own)
        y = self.attention(x, x, x, need_weights=False)[0] + sum(seen) + places["first"]
        y = torch.tanh(self.first(y) if self.calls % 2 else y) * noise + x * self.mask.clone()
        y = self.norm(y.transpose(1, 2)).transpose(1, 2) * (1 + self.seen)
        self.last = self.drop(y)
        return Two(self.last, {"square": y.square()})


class Odds(nn.Module):
    """Odd blocks, one of them called twice, one frozen, the first on inputs without gradient."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Odd(width) for _ in range(3)])
        self.blocks[1].requires_grad_(False)
        self.blocks[2].first.requires_grad_(False)
        self.tied, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.out.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        total = torch.zeros((), dtype=x.dtype)
        for block in (self.blocks[0], self.blocks[1], self.blocks[2], self.blocks[2]):
            two = block(x, seen=seen, places={"first": x})
            x = self.tied(two.hidden)
            seen.append(x)
            total = total + two.extra["square"].mean()
        return self.out(x) + total


def resnet() -> nn.Module:
    return ResNet(blocks=(2, 2), width=4, classes=3).to(device.KIND)


def unet() -> nn.Module:
    return u_net(block=DoubleConv)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 3)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (resnet, (ROWS, 3, 16, 16)),
    "unet": (unet, (ROWS, 3, 8, 8)),
    "odd": (Odds, (ROWS, 5, 6)),
    "encoder": (encoder, (ROWS, 5, 8)),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    kind, shape = MODELS[name]
    torch.manual_seed(0)
    return kind().to(dtype), torch.randn(shape, dtype=dtype)


def streams() -> dict[str, Any]:
    return {"torch": torch.get_rng_state()} | {name: read() for name, read in STREAMS.items()}


def every(model: nn.Module, policy: str) -> Choice:
    return tuple((name, policy) for name in find_blocks(model))


def run(
    model: nn.Module, x: Tensor, choice: Choice, *, passes: int = 1, context: Any = nullcontext
) -> dict[str, Any]:
    model = copy.deepcopy(model)
    seed(3)
    with apply_policies(model, choice):
        for _ in range(2):  # the second finds what the first has left
            with context():
                loss = model(x).float().square().mean()
            for left in reversed(range(passes)):
                torch.autograd.backward(loss, retain_graph=left > 0)
    found = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found |= {f"attributes of {name}": set(vars(module)) for name, module in model.named_modules()}
    return {"loss": loss.detach(), **found, **streams(), **dict(model.named_buffers())}
