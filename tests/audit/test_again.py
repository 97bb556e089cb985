"""When a comparison is made again; what changes later is in the corpus."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import LossError
from tests.zoo import Perceptron


def rows(count: int = 40) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4), torch.randint(1, 3, (count,))


def by_step(model: nn.Module, loss: Any) -> Callable[[Any], Any]:
    return ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), micro_batch=5)


def by_window(model: nn.Module, loss: Any) -> Callable[[Any], Any]:
    step = ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.01))

    def update(batch: Any) -> Any:
        with step.window() as window:
            for micro in zip(*[one.split(5) for one in batch], strict=True):
                window.add(micro)
        return window.report

    return update


def by_batch_loss(model: nn.Module, loss: Any) -> Callable[[Any], Any]:
    batch_loss = ab.BatchLoss(model, loss, micro_batch=5)

    def update(batch: Any) -> Any:
        batch_loss(batch).backward()
        model.zero_grad()
        return batch_loss.report

    return update


DOORS = (by_step, by_window, by_batch_loss)


class Loud:
    """A loss that prints how many rows it gets, and counts its calls."""

    calls = 0

    def __call__(self, model: nn.Module, micro: Any) -> ab.Total:
        print(len(micro[0]))
        self.calls += 1
        return ab.Total(F.cross_entropy(model(micro[0]), micro[1], reduction="sum"), len(micro[0]))


def test_parts_that_become_smaller_are_compared_again() -> None:
    def pairs(model: nn.Module, micro: Any) -> ab.Total:
        out = model(micro[0])
        return ab.Total(out.square().sum() * (1 if len(out) > 1 else 0.5), len(out))

    step = by_step(Perceptron(4, 3), pairs)
    assert step(rows()).checked
    with pytest.raises(LossError, match=r"as \d\+1 "):
        step(rows(41))


@pytest.mark.parametrize("door", DOORS)
def test_a_counter_makes_no_comparison_in_every_step(door: Any, capsys: Any) -> None:
    loss = Loud()
    update, compared = door(Perceptron(4, 3), loss), []
    for at in range(1, 17):
        update(rows())
        if len(capsys.readouterr().out.split()) > 8:
            compared.append(at)
    assert loss.calls == 16 * 8  # and the comparison put it back
    assert compared == [1, 2, 3, 4, 8, 16]  # then its values are many


def mean_as_sum(model: nn.Module, micro: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(micro[0]), micro[1]), 1)


@pytest.mark.parametrize("sizes", [(22, 1), (1, 22), (1, 1), (16, 16, 8), (20, 20), (6, 6, 1)])
@pytest.mark.parametrize("collate", [None, torch.utils.data.default_collate])
def test_the_first_add_of_a_window_is_compared_with_the_second(sizes: Any, collate: Any) -> None:
    def add_all(loss: Any) -> Any:
        model = Perceptron(4, 3)
        step = ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), collate=collate)
        with step.window() as window:
            for size in sizes:
                window.add(rows(size) if collate is None else [*zip(*rows(size), strict=True)])
        return window.report

    assert add_all(nn.CrossEntropyLoss()).checked
    with pytest.raises(LossError, match=r"for every split|that add up"):
        add_all(mean_as_sum)
