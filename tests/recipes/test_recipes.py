"""Recipes are found by name; LeNet-5 is the network of 1998, and it learns the digits."""

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)
import torch
from torch import nn
from torch.nn import functional as F

from anybatch import Step
from anybatch.core.errors import DataError
from anybatch.data.dataset import Dataset
from anybatch.data.load import load
from anybatch.recipes import find_recipe

# Weights and biases of each layer, counted from the paper: 5 x 5 maps, 120, 84, classes.
SHAPES = {1: 61_706, 3: 62_006}


def rows(channels: int = 1, size: int = 32, classes: int = 10) -> Dataset:
    return Dataset(
        inputs=torch.zeros(4, channels, size, size),
        targets=torch.zeros(4, dtype=torch.int64),
        name="toy",
        classes=tuple(map(str, range(classes))),
    )


def build(data: Dataset, seed: int = 0) -> nn.Module:
    return find_recipe("lenet5").build_model(data, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("channels", SHAPES)
def test_size(channels: int) -> None:
    model = build(rows(channels))
    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPES[channels]
    assert model(torch.zeros(5, channels, 32, 32)).shape == (5, 10)
    assert build(rows(channels, classes=3))(torch.zeros(2, channels, 32, 32)).shape == (2, 3)


def test_one_seed_gives_one_model() -> None:
    before = torch.get_rng_state()
    one, again, other = (torch.cat([p.flatten() for p in build(rows(), s).parameters()]) for s in (7, 7, 8))
    assert (torch.equal(one, again), torch.equal(one, other)) == (True, False)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_forward_is_written_out() -> None:
    """Against the same network from functions alone, its parameters taken in order."""
    x = torch.randn(3, 1, 32, 32)
    model = build(rows())
    w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = model.parameters()
    expected = F.max_pool2d(F.conv2d(x, w1, b1).relu(), 2)
    expected = F.max_pool2d(F.conv2d(expected, w2, b2).relu(), 2).reshape(3, 400)
    expected = F.linear(F.linear(F.linear(expected, w3, b3).relu(), w4, b4).relu(), w5, b5)
    assert torch.equal(model(x), expected)


def test_the_start_is_uniform_within_one_over_the_root_of_the_inputs() -> None:
    inputs = {"conv1": 25, "conv2": 150, "linear1": 400, "linear2": 120, "linear3": 84}
    for name, parameter in build(rows()).named_parameters():
        bound = inputs[name.partition(".")[0]] ** -0.5
        values = parameter.detach() / bound
        assert float(values.abs().max()) <= 1 + torch.finfo(torch.float32).eps, name
        if parameter.numel() >= 100:
            assert float(values.abs().max()) > 0.9, name
            assert 0.25 < float(values.square().mean()) < 0.42, name  # 1/3 for uniform values


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(DataError, match=r"^toy: expected .*32.*got .*28"):
        build(rows(size=28))


def test_it_learns_the_digits() -> None:
    """Three passes with the options of the demo; chance is 10 %, a network that learns has over 90 %."""
    split = load("digits")
    recipe = find_recipe("lenet5")
    model = build(split.train)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    step = Step(model, recipe.build_loss(0.1), optimizer, micro_batch=16)
    for _ in range(3):
        for index in torch.randperm(len(split.train)).split(32):
            step((split.train.inputs[index], split.train.targets[index]))
    with torch.no_grad():
        right = model(split.test.inputs).argmax(1) == split.test.targets
    assert int(right.sum()) > 0.85 * len(right)
