"""The ladder of a step in a budget: fewer rows, then blocks that run again, then refusal; all are read."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step
from anybatch.testing import relative_error
from tests.budgets import metered, refused
from tests.options import flat
from tests.zoo import Made

ROWS, WIDTH = 24, 64


def wide() -> nn.Module:
    """Return a model of a megabyte of activations per row, nearly; tensors are most of what it takes."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x.mean((1, 2))

    return Made(forward, layers=nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)]))


def batch_of(rows: int = ROWS, length: int = 100) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, length, WIDTH, generator=draw), torch.randn(rows, generator=draw)


def make(memory: int | None, model: nn.Module | None = None, **options: Any) -> Step:
    torch.manual_seed(0)
    model = model or wide()
    return Step(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()), memory=memory, **flat(options))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("memory", [2_500_000, 4_000_000])
def test_steps_keep_to_the_budget_and_are_those_of_the_batch(memory: int, check: bool, made: Any) -> None:
    step, whole, batch = make(memory, check=check), make(None), batch_of()
    cuts = [step(batch).cut for _ in range(4)]
    assert 0.6 * memory < metered(step, lambda: step(batch), batch) <= memory
    assert all(len(cut) > 1 for cut in cuts)
    assert not made
    for _ in range(5):
        whole(batch)
    assert relative_error(dict(step.model.named_parameters()), dict(whole.model.named_parameters())) <= 1e-3


def heavy() -> nn.Module:
    """Return a model of many parameters and few activations."""
    layers = [nn.Linear(512, 512) for _ in range(6)]
    body = nn.Sequential(nn.Linear(WIDTH, 512), *layers, nn.Linear(512, 1))
    return Made(lambda self, x: self.body(x.mean(1))[:, 0], body=body)


HEAVY = 4 * sum(parameter.numel() for parameter in heavy().parameters())  # bytes of its weights


def test_a_budget_below_what_is_always_held_is_refused_with_one_that_holds(made: list[Any]) -> None:
    """Also the state of the optimizer counts, which the first update is still to make."""
    batch, model = batch_of(96, 1), heavy()
    floor = 4 * HEAVY + sum(leaf.nbytes for leaf in batch)
    for memory in (1_000, floor - 10_000):
        told = "above parameters, gradients, optimizer state"
        least = refused(make(memory, model=model), batch, told)
        assert floor < least < 1.3 * floor
    step = make(least, model=copy.deepcopy(model))
    assert [step(batch).updated for _ in range(4)] == [True] * 4
    assert metered(step, lambda: step(batch), batch) <= least
    refused(make(int(0.9 * least), model=model), batch, "smallest")
    assert not made


def test_what_collate_makes_is_within_the_budget(made: list[Any]) -> None:
    batch = batch_of(ROWS, 1000)
    samples = [*zip(*batch, strict=True)]

    memory = 4_000_000
    model = Made(lambda self, x: self.layer(x.mean(1))[:, 0], layer=nn.Linear(WIDTH, 1))
    step = make(memory, model=model, collate=torch.utils.data.default_collate)
    for _ in range(3):
        step(samples)
    own = sum(x.nbytes + y.nbytes for x, y in [batch])
    assert 0.6 * memory < metered(step, lambda: step(samples), ()) - own <= memory
    assert not made
