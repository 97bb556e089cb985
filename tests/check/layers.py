"""Layers that differ when they are cut, each in its own way."""

import numpy as np
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


class Led(nn.Module):
    """Rows look at the one in their middle."""

    def forward(self, x: Tensor) -> Tensor:
        """Adds it."""
        return x + x[len(x) // 2]


class Twins(nn.Module):
    """Rows look whether there is another like them."""

    def forward(self, x: Tensor) -> Tensor:
        """Scales by the number of equal rows."""
        return x * (x[:, None] == x).all(2).sum(1, keepdim=True)


class Crowded(nn.Module):
    """Rows count each other."""

    def forward(self, x: Tensor) -> Tensor:
        """Divides by the number of rows."""
        return x / len(x)


class Marking(nn.Module):
    """Rows meet behind a switch that only leaves have."""

    def forward(self, x: Tensor) -> Tensor:
        """Subtracts the mean of the batch."""
        if not x.requires_grad or x.is_leaf:
            x.requires_grad = True
            return x - x.mean(0)
        raise RuntimeError("you can only change requires_grad flags of leaf variables")


class Leaving(nn.Module):
    """Rows decide together."""

    def forward(self, x: Tensor) -> Tensor:
        """Scales where their mean is small, as it is for one of them alone."""
        return x if x.square().mean() > x.square().mean(1).min() * 1.01 else 2 * x


class FromNumpy(nn.Module):
    """Draws from NumPy's stream."""

    def forward(self, x: Tensor) -> Tensor:
        """Adds noise."""
        return x + torch.as_tensor(np.random.rand(*x.shape), dtype=x.dtype)


class ByTurns(nn.Module):
    """Draws for one row after the other."""

    def forward(self, x: Tensor) -> Tensor:
        """Adds a number to each."""
        return torch.stack([row + torch.rand(()) for row in x])


class Iterated(nn.Module):
    """Keeps a state that only gradients depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The same numbers."""
        level = self.level
        self.level = 0.9 * level
        return x.detach() + (x - x.detach()) * level


FAULTS = {
    "meeting": Centred,
    "state": Drifting,
    "position": Placed,
    "dropped rows": Shortened,
    "detached": Halved,
}
