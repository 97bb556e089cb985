"""Tests of the zoo: sizes as published, small copies that train, the same for the same seed."""

import math

import pytest
import torch

from benchmarks.zoo import OPTIMIZERS, ZOO, Made

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
