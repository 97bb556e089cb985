"""Batches whose rows meet run uncut within a budget: blocks run again, or what is saved waits on the host."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from tests.accelerator.programs import CLASSES, sgd
from tests.accelerator.simulated import load
from tests.zoo import Made

ROWS = 32


def block(width: int) -> nn.Module:
    """A block of a ResNet."""
    first, second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
    relu = nn.ReLU(inplace=True)
    body = nn.Sequential(first, nn.BatchNorm2d(width), relu, second, nn.BatchNorm2d(width))
    return Made(lambda self, x: self.relu(self.body(x) + x), body=body, relu=relu)


def head(width: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def residual() -> nn.Module:
    stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
    return nn.Sequential(*stem, *[block(16) for _ in range(6)], head(16))


def plain() -> nn.Module:
    """A DCGAN's judge: no block occurs twice."""
    layers: list[nn.Module] = []
    for before, width in ((3, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(before, width, 3, 1, 1), nn.BatchNorm2d(width), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, head(32))


MODELS: dict[str, Callable[[], nn.Module]] = {"residual": residual, "plain": plain}


def trained(name: str, memory: int | None) -> tuple[list[Tensor], int, ab.Step]:
    """Parameters and buffers after four updates, the peak of the last one, and the step."""
    native = load().native
    gc.collect()
    torch.manual_seed(0)
    model = MODELS[name]().to("sim")
    batch = torch.randn(ROWS, 3, 32, 32).to("sim"), torch.randint(CLASSES, (ROWS,)).to("sim")
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd(model), memory=memory)
    state = [*model.parameters(), *model.buffers()]
    held, peak = sum(one.nbytes for one in (*state, *batch)), 0
    for _ in range(4):
        gc.collect()
        others = native.in_use() - held
        native.reset_peak()
        assert step(batch).micro_batches == 1
        peak = native.peak() - others
    return [one.detach().cpu() for one in state], peak, step


def uncut(name: str) -> list[str]:
    """What is wrong with steps within shares of the plain peak."""
    expected, most, _ = trained(name, None)
    wrong, refused, step = list[str](), 0, None
    for share in (0.9, 0.7, 0.5, 0.4, 0.2, "smallest"):
        memory = refused if share == "smallest" else int(share * most)
        try:
            found, peak, step = trained(name, memory)
        except ab.BudgetError as error:
            refused = error.smallest
            wrong += [] if refused > memory else [f"{share}: {refused} is named"]
            continue
        wrong += [] if all(map(torch.equal, expected, found)) else [f"{share}: other bits"]
        wrong += [f"{share}: {peak} of {memory}"] if peak > memory else []
    is_moved = "wait in host memory" in step.planning.explain()
    wrong += [] if is_moved else ["smallest: nothing is moved"]
    try:
        trained(name, int(0.9 * refused))
        wrong.append("0.9 of the smallest is not refused")
    except ab.BudgetError:
        pass
    return wrong


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_that_may_not_be_cut_keeps_to_its_budget_to_the_bit(sim: Any, name: str) -> None:
    assert sim(uncut, name) == []
