"""LeNet-5 for images of 32 x 32 pixels."""

import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.core import DataError
from anybatch.data import load
from anybatch.recipes.recipe import Recipe, Training, classifier


class LeNet5(nn.Module):
    """Two convolutions (6 and 16 maps of 5 x 5, valid) and three linear layers (120, 84, classes).

    The layout of LeCun et al. 1998, "Gradient-based learning applied to document recognition", section II.B,
    with ReLU and max-pooling, as it is trained today.
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 6, 5), nn.Conv2d(6, 16, 5)
        self.linear1, self.linear2 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84)
        self.linear3 = nn.Linear(84, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of the classes, (rows, classes), of images (rows, channels, 32, 32)."""
        maps = F.max_pool2d(F.relu(self.conv1(images)), 2)  # (rows, 6, 14, 14)
        maps = F.max_pool2d(F.relu(self.conv2(maps)), 2)  # (rows, 16, 5, 5)
        hidden = F.relu(self.linear1(maps.flatten(1)))
        return self.linear3(F.relu(self.linear2(hidden)))


def _make(data: str, label_smoothing: float = 0.0) -> Training:
    rows = load(data)
    channels, *size = rows.train.inputs.shape[1:]
    if size != [32, 32]:
        raise DataError(
            f"{rows.train.name}: expected images of 32 x 32 pixels for LeNet-5, got {size}. Pad or scale "
            "them."
        )
    return classifier(rows, LeNet5(channels, len(rows.train.classes)), label_smoothing)


LENET5 = Recipe(name="lenet5", make=_make)
