"""The zoo: every small copy trains, cut."""

import math

import pytest
import torch

from benchmarks.zoo import OPTIMIZERS, ZOO

FEW = 250_000  # parameters of a small copy, at most
ROWS = 3


@pytest.mark.parametrize("name", ZOO)
def test_a_small_copy_trains_cut(name: str) -> None:
    entry = ZOO[name]
    made = entry.build("small")
    before = [parameter.detach().clone() for parameter in made.model.parameters()]
    step = entry.step(made, OPTIMIZERS["sgd"](made.model), micro_batch=2)
    report = step(made.batch_of(ROWS, torch.Generator().manual_seed(0)))
    assert sum(parameter.numel() for parameter in before) <= FEW
    assert (report.rows, report.micro_batches, report.updated) == (ROWS, 2, True)
    assert math.isfinite(report.loss)
    after = list(made.model.parameters())
    assert not all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
