"""ResNet-18 and ResNet-50 for images of any size, with GroupNorm or, on request, BatchNorm."""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.batchnorm import batch_norm_to_group_norm
from anybatch.core import PlanError
from anybatch.data import load
from anybatch.recipes.recipe import Recipe, Training, classifier, one_of
from anybatch.step import Options

SMALL = 64  # up to this many pixels the first layer is that for CIFAR-10, which keeps the resolution


def _layer(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(OrderedDict(conv=convolution, norm=nn.BatchNorm2d(outputs)))


class Block(nn.Module):
    """Layers with a shortcut: two of 3 x 3, or a bottleneck of three whose middle one is narrow."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:  # the stride is in the 3 x 3 convolution, as is usual today
            outputs, sizes = 4 * width, ((width, 1, 1), (width, 3, stride), (4 * width, 1, 1))
        else:
            outputs, sizes = width, ((width, 3, stride), (width, 3, 1))
        starts = (inputs, *[outputs for outputs, _, _ in sizes])
        layers = [_layer(start, *size) for start, size in zip(starts, sizes, strict=False)]
        self.layers = nn.ModuleList(layers)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else _layer(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        """Return maps of the same size or half of it: (rows, channels, height, width)."""
        maps = images
        for number, layer in enumerate(self.layers):
            maps = layer(maps if number == 0 else F.relu(maps))
        return F.relu(maps + self.shortcut(images))


class ResNet(nn.Module):
    """Four stages of blocks, each of half the size and twice the width of the previous stage.

    He, Zhang, Ren, Sun 2016, "Deep residual learning for image recognition", table 1; for small images the
    first layer is that of their section 4.2, without the first two halvings (`small`). `blocks` counts the
    blocks of each stage, `width` the channels of the first stage. Bottlenecks have four times as many.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        bottleneck: bool,
        channels: int,
        num_classes: int,
        *,
        small: bool,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.first = _layer(channels, width, 3 if small else 7, 1 if small else 2)
        self.pool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        self.blocks, inputs = nn.ModuleList(), width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage and not number else 1
                self.blocks.append(Block(inputs, width << stage, stride, bottleneck=bottleneck))
                inputs = (width << stage) * (4 if bottleneck else 1)
        self.classes = nn.Linear(inputs, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of the classes, (rows, classes), of images (rows, channels, height, width)."""
        maps = self.pool(F.relu(self.first(images)))
        for block in self.blocks:
            maps = block(maps)
        return self.classes(maps.mean((2, 3)))


#: Norm option -> treatment of BatchNorm in a step. "group": GroupNorm, exact in any cut. "whole": BatchNorm,
#: exact without a cut only. "frozen": running statistics without updates, exact, for trained weights.
#: "micro": statistics of each micro-batch, not exact.
NORMS: dict[str, Any] = {"group": None, "whole": None, "frozen": "frozen", "micro": "micro"}


def _make(
    blocks: tuple[int, ...],
    bottleneck: bool,
    data: str,
    norm: str = "group",
    width: int = 64,
    image_size: int | None = None,
    label_smoothing: float = 0.0,
) -> Training:
    batch_norm = one_of("norm", norm, NORMS)
    if width < 1:
        raise PlanError(f"Expected --width to be at least 1, got {width}. ResNet-18 and -50 have 64.")
    rows = load(data, image_size)
    channels, *size = rows.train.inputs.shape[1:]
    small, classes = min(size) <= SMALL, len(rows.train.classes)
    model: nn.Module = ResNet(blocks, bottleneck, channels, classes, small=small, width=width)
    model = batch_norm_to_group_norm(model) if norm == "group" else model
    return classifier(rows, model, label_smoothing, Options(batch_norm=batch_norm))


RESNET18 = Recipe(name="resnet18", make=partial(_make, (2, 2, 2, 2), False), lr=0.05)
RESNET50 = Recipe(name="resnet50", make=partial(_make, (3, 4, 6, 3), True), lr=0.05)
