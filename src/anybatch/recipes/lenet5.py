"""LeNet-5 for images of 32 x 32 pixels, the first convolutional network that read cheques."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.core import DataError
from anybatch.data import Dataset
from anybatch.recipes.recipe import Recipe


class LeNet5(nn.Module):
    """Two convolutions (6 and 16 maps of 5 x 5, valid) and three linear layers (120, 84, classes).

    The layout of LeCun et al. 1998, "Gradient-based learning applied to document recognition", section II.B,
    with ReLU and max-pooling, as it is trained today.

    Args:
        channels: of the images, 1 or 3.
        num_classes: how many classes are told apart.
        generator: where the initial weights come from; torch's global stream is not touched.

    Example:
        >>> LeNet5(1, 10, torch.Generator().manual_seed(0))(torch.zeros(4, 1, 32, 32)).shape
        torch.Size([4, 10])
    """

    def __init__(self, channels: int, num_classes: int, generator: torch.Generator) -> None:
        super().__init__()
        layers = torch.nn.utils.skip_init
        self.conv1 = layers(nn.Conv2d, channels, 6, 5)
        self.conv2 = layers(nn.Conv2d, 6, 16, 5)
        self.linear1 = layers(nn.Linear, 16 * 5 * 5, 120)
        self.linear2 = layers(nn.Linear, 120, 84)
        self.linear3 = layers(nn.Linear, 84, num_classes)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all weights and biases uniformly within 1 / sqrt(inputs of the layer), torch's own default."""
        for layer in self.children():
            weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
            bound = 1 / math.sqrt(weight[0].numel())
            nn.init.uniform_(weight, -bound, bound, generator)
            nn.init.uniform_(bias, -bound, bound, generator)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes.

        Args:
            images: float, (rows, channels, 32, 32).

        Returns:
            (rows, classes).
        """
        maps = F.max_pool2d(F.relu(self.conv1(images)), 2)  # (rows, 6, 14, 14)
        maps = F.max_pool2d(F.relu(self.conv2(maps)), 2)  # (rows, 16, 5, 5)
        hidden = F.relu(self.linear1(maps.flatten(1)))
        return self.linear3(F.relu(self.linear2(hidden)))


def _build_model(data: Dataset, generator: torch.Generator) -> nn.Module:
    channels, *size = data.inputs.shape[1:]
    if size != [32, 32]:
        raise DataError(
            f"{data.name}: expected images of 32 x 32 pixels for LeNet-5, got {size}. Pad or scale them."
        )
    return LeNet5(channels, len(data.classes), generator)


LENET5 = Recipe(
    name="lenet5",
    build_model=_build_model,
    build_loss=lambda label_smoothing: nn.CrossEntropyLoss(label_smoothing=label_smoothing),
    source="LeCun, Bottou, Bengio, Haffner 1998, Gradient-based learning applied to document recognition",
)
