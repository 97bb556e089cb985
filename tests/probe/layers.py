"""Layers that differ when they are cut, each in its own way."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Centred(nn.Module):
    """Rows meet."""

    def forward(self, x: Tensor) -> Tensor:
        """Subtracts the mean of the batch."""
        return x - x.mean(0)


class Drifting(nn.Module):
    """Keeps a state that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Scales by what it has seen."""
        out = x * self.level
        self.level = 0.9 * self.level
        return out


class Placed(nn.Module):
    """Looks at the place of a row."""

    def forward(self, x: Tensor) -> Tensor:
        """Scales by the place."""
        return x * torch.arange(1, len(x) + 1, device=x.device)[:, None]


class Seeded(nn.Module):
    """Draws by position."""

    def forward(self, x: Tensor) -> Tensor:
        """Dropout after a seed."""
        torch.manual_seed(0)
        return F.dropout(x, 0.5)


class Shortened(nn.Module):
    """Leaves rows out."""

    def forward(self, x: Tensor) -> Tensor:
        """An even number of rows."""
        return x[: len(x) // 2 * 2]


class Halved(nn.Module):
    """Lets no gradient into half of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        """The same numbers."""
        half = len(x) // 2
        return torch.cat([x[:half].detach(), x[half:]])


class Pooled(nn.Module):
    """Returns a number for all rows beside its rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and its mean square."""
        return x, x.square().mean().sqrt()


FAULTS = {
    "meeting": Centred,
    "state": Drifting,
    "position": Placed,
    "dropped rows": Shortened,
    "detached": Halved,
}
