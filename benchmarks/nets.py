"""Networks of the zoo that are written here: ResNet, U-Net, an LSTM language model."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1 down to `width`, 3x3 (with the stride), 1x1 up to four times as many maps, added to the input."""

    expansion = 4

    def __init__(self, maps: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(maps, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential()  # the identity, where shapes agree
        if stride > 1 or maps != 4 * width:
            projection = nn.Conv2d(maps, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + self.downsample(x))


class BasicBlock(nn.Module):
    """Twice 3x3 (the first with the stride), added to the input."""

    expansion = 1

    def __init__(self, maps: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(maps, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential()  # the identity, where shapes agree
        if stride > 1 or maps != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(maps, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet(nn.Module):
    """Residual network; with `blocks` (3, 4, 6, 3) and width 64 it is ResNet-50.

    With BasicBlock, `blocks` (2, 2, 2, 2) and width 64 it is ResNet-18.

    Source: K. He et al., "Deep residual learning for image recognition", CVPR 2016, table 1; the stride sits
    on the 3x3 convolution, as in today's implementations.
    """

    def __init__(
        self,
        *,
        block: type[Bottleneck] | type[BasicBlock] = Bottleneck,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        maps = width
        stages: list[nn.Module] = []
        for stage, count in enumerate(blocks):
            inner = width << stage
            layers: list[nn.Module] = []
            for index in range(count):
                layers.append(block(maps, inner, 2 if stage and not index else 1))
                maps = block.expansion * inner
            stages.append(nn.Sequential(*layers))
        self.layers = nn.ModuleList(stages)
        self.fc = nn.Linear(maps, classes)

    def forward(self, images: Tensor) -> Tensor:  # (rows, 3, height, width) -> (rows, classes)
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for layer in self.layers:
            x = layer(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class DoubleConv(nn.Sequential):
    """Twice: convolution 3x3, BatchNorm, ReLU."""

    def __init__(self, maps: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(maps, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Down and up again, each level of the way up joined with the same level of the way down.

    Source: O. Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation", MICCAI
    2015; padded convolutions and BatchNorm, as it is trained today.
    """

    def __init__(self, *, width: int = 64, depth: int = 4, classes: int = 21) -> None:
        super().__init__()
        sizes = [width << level for level in range(depth + 1)]
        self.first = DoubleConv(3, width)
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(sizes))
        self.join = nn.ModuleList(DoubleConv(2 * a, a) for a in sizes[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:  # (rows, 3, height, width) -> (rows, classes, height, width)
        levels = [self.first(images)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([levels.pop(), up(x)], dim=1))
        return self.head(x)


class LSTM(nn.Module):
    """Language model of stacked LSTM layers with dropout between them, and a linear head.

    The defaults are the medium model of W. Zaremba et al., "Recurrent neural network regularization" (2014).
    """

    def __init__(self, *, words: int = 10_000, width: int = 650, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.drop = nn.Dropout(0.5)
        self.lstm = nn.LSTM(width, width, layers, dropout=0.5, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:  # (rows, tokens) int64 -> (rows, tokens, words)
        hidden, _ = self.lstm(self.drop(self.embed(tokens)))
        return self.head(self.drop(hidden))
