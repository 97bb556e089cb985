"""Tests of the zoo: sizes as published, small copies that train, the same for the same seed."""

import math

import pytest
import torch
from torch import Tensor

from anybatch.core import tree
from benchmarks.zoo import OPTIMIZERS, SCALES, ZOO, Made

# As published with the models; those of our own heads and widths are counted by hand.
PARAMETERS = {
    "lenet5": 61_706,
    "resnet50": 25_557_032,
    "bert": 109_484_547,  # 109,482,240 without the head
    "gpt2": 124_439_808,
    "vit": 86_567_656,
    "unet": 31_038_933,
    "lstm": 19_780_400,
    "mixtral": 30_025_984,
    "t5": 60_506_624,
}
FEW = 250_000  # parameters of a small copy, at most
ROWS = 3


def num_parameters(made: Made) -> int:
    return sum(parameter.numel() for parameter in made.model.parameters())


def leaves(made: Made) -> tuple[Tensor, ...]:
    return tree.flatten(made.batch_of(ROWS, torch.Generator().manual_seed(0))).leaves


@pytest.mark.parametrize("name", ZOO)
def test_full_size_is_that_of_the_paper(name: str) -> None:
    with torch.device("meta"):  # shapes without memory
        made = ZOO[name].make("full")
    assert num_parameters(made) == PARAMETERS[name]


@pytest.mark.parametrize("name", ZOO)
def test_a_small_copy_trains_cut(name: str) -> None:
    entry = ZOO[name]
    made = entry.build("small")
    before = [parameter.detach().clone() for parameter in made.model.parameters()]
    step = entry.step(made, OPTIMIZERS["sgd"](made.model), micro_batch=2)
    report = step(made.batch_of(ROWS, torch.Generator().manual_seed(0)))
    assert num_parameters(made) <= FEW
    assert (report.rows, report.micro_batches, report.updated) == (ROWS, 2, True)
    assert math.isfinite(report.loss)
    after = list(made.model.parameters())
    assert not all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale != "full"])
@pytest.mark.parametrize("name", ZOO)
def test_same_seed_same_model_and_batch(name: str, scale: str) -> None:
    state = torch.get_rng_state()
    one, other, third = (ZOO[name].build(scale, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    if name != "lenet5":  # its weights come from a generator of their own
        pairs = zip(one.model.parameters(), third.model.parameters(), strict=True)
        assert not all(torch.equal(a, b) for a, b in pairs)
    assert all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))
    assert {leaf.shape[0] for leaf in leaves(one)} == {ROWS}
