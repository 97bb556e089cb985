"""Recipes are found by name; LeNet-5 is the network of 1998, and it learns the digits."""

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)
import torch
from torch import nn
from torch.nn import functional as F

from anybatch.recipes.lenet5 import LeNet5

# Weights and biases of each layer, counted from the paper: 5 x 5 maps, 120, 84, classes.
SHAPES = {1: 61_706, 3: 62_006}


def build(channels: int = 1, classes: int = 10, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LeNet5(channels, classes)


@pytest.mark.parametrize("channels", SHAPES)
def test_size(channels: int) -> None:
    model = build(channels)
    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPES[channels]
    assert model(torch.zeros(5, channels, 32, 32)).shape == (5, 10)
    assert build(channels, classes=3)(torch.zeros(2, channels, 32, 32)).shape == (2, 3)


def test_the_forward_is_written_out() -> None:
    """Against the same network from functions alone, its parameters taken in order."""
    x = torch.randn(3, 1, 32, 32)
    model = build()
    w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = model.parameters()
    expected = F.max_pool2d(F.conv2d(x, w1, b1).relu(), 2)
    expected = F.max_pool2d(F.conv2d(expected, w2, b2).relu(), 2).reshape(3, 400)
    expected = F.linear(F.linear(F.linear(expected, w3, b3).relu(), w4, b4).relu(), w5, b5)
    assert torch.equal(model(x), expected)
