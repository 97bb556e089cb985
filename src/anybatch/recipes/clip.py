"""Two towers on the halves of images: contrastive matching of left and right halves."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.core import DataError, Total
from anybatch.data import load
from anybatch.losses import WholeBatch
from anybatch.recipes.recipe import Recipe, Training

LOSS_ROWS = 256  # rows of the table of all pairs held at once


def _tower(channels: int) -> nn.Module:
    """Return two convolutions and a linear layer: half an image to a vector in 64 dimensions."""
    first, second = nn.Conv2d(channels, 32, 5, 2, 2), nn.Conv2d(32, 64, 5, 2, 2)
    last = nn.AdaptiveAvgPool2d((4, 2)), nn.Flatten(), nn.Linear(512, 64)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), *last)


class TwoTowers(nn.Module):
    """A tower for each half, and a learned scale of their products."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.left, self.right = _tower(channels), _tower(channels)
        self.log_scale = nn.Parameter(torch.tensor(1 / 0.07).log())  # as in CLIP, section 2.5

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return unit vectors of both halves, (rows, 64) each, and the scale."""
        return F.normalize(self.left(left)), F.normalize(self.right(right)), self.log_scale.exp()


def info_nce(left: Tensor, right: Tensor, scale: Tensor, rows: Tensor) -> Total:
    """Return the loss of some rows: cross-entropy of the true half among all, in both directions.

    Radford et al. 2021, figure 3; the loss of a batch is between 0 and about the logarithm of its rows.
    """
    there = F.cross_entropy(scale * left[rows] @ right.T, rows, reduction="sum")
    back = F.cross_entropy(scale * right[rows] @ left.T, rows, reduction="sum")
    return Total((there + back) / 2, len(rows))


def _make(data: str, image_size: int | None = None) -> Training:
    rows = load(data, image_size)
    channels, height, width = rows.train.inputs.shape[1:]
    if min(height, width) < 8:
        raise DataError(
            f"{rows.train.name}: expected images of 8 pixels or more, got {height} x {width}; scale them"
        )
    train, test = [
        tuple(half.contiguous() for half in part.inputs[..., : width // 2 * 2].chunk(2, dim=3))
        for part in rows
    ]
    return Training(
        model=TwoTowers(channels),
        loss=WholeBatch(info_nce, loss_rows=LOSS_ROWS),
        train=train,
        test=test,
        name=f"{rows.train.name}, in halves",
    )


CLIP = Recipe(name="clip", make=_make, optimizer="adamw", lr=1e-3)
