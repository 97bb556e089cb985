"""Before the first cut a few rows must give the same loss and gradient for every split."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import LossError
from tests.options import flat
from tests.snapshots import assert_same, same_as_before, snapshot
from tests.zoo import Made, Perceptron, dropout

ROWS = 13


def make_batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    labels = torch.randint(3, (rows,))
    labels[::3] = -100
    return torch.randn(rows, 4), labels


def make(model: nn.Module, loss: Any, micro_batch: int | None = 4, **options: Any) -> ab.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Step(model, loss, optimizer, micro_batch=micro_batch, **flat(options))


def step_on(model: nn.Module, loss: Any, batch: Any, micro_batch: int = 4, **options: Any) -> Any:
    step = make(model, loss, micro_batch, **options)
    return step, step(batch)


def by_rows(model: nn.Module, micro: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(micro[0]), micro[1]) * len(micro[0]), len(micro[0]))


def mean_of_means(model: nn.Module, micro: Any) -> ab.Total:
    return ab.Total(model(micro[0]).square().mean(), 1)


def broadcast(model: nn.Module, micro: Any) -> ab.Total:
    errors = (model(micro[0])[:, :1] - micro[1].float()).square()  # (rows, 1) and (rows,)
    return ab.Total(errors.sum(), errors.numel())


@pytest.mark.parametrize("micro_batch", [1, 12])
@pytest.mark.parametrize("loss", [by_rows, mean_of_means, broadcast])
def test_a_wrong_weight_is_refused_where_the_batch_is_cut(loss: Any, micro_batch: int) -> None:
    model, batch = Perceptron(4, 3), make_batch()
    step = make(model, loss, micro_batch)
    for _ in range(2):  # and it stays refused
        told = rf"{loss.__name__} for every split.*check=False"
        with same_as_before(step), pytest.raises(LossError, match=told):
            step(batch)
    for allowed in ({"micro_batch": None}, {"check": False}):
        assert make(model, loss, **allowed)(make_batch(12)).updated


def test_it_changes_nothing() -> None:
    """One step with the look gives the very weights, buffers and numbers of one without it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls, self.seen = self.calls + 1, self.seen + len(x)
        self.key.data.mul_(0.9).add_(self.body[0].weight.data.mean(0), alpha=0.1)
        return self.body(x) * (1 + random.random())

    found = []
    for check in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        key = nn.Parameter(torch.ones(4), requires_grad=False)
        model: Any = Made(forward, key=key, body=dropout(4, 3), calls=0, seen=torch.zeros(()))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        step, _ = step_on(model, nn.CrossEntropyLoss(), make_batch(), check=check)
        assert (model.calls, model.seen) == (4, ROWS)
        found.append({name: one for name, one in snapshot(step).items() if "identity" not in name})
    assert_same(*found)


def by_numbers(out: Tensor, numbers: Tensor) -> Tensor:
    return F.cross_entropy(out @ out.T, numbers)


@pytest.mark.parametrize(
    "numbers",
    [torch.arange(40), torch.arange(40).roll(20), torch.arange(40) ^ 1, torch.arange(40).clamp(max=33)],
    ids=["each its own", "halves", "pairs", "some the same"],
)
@pytest.mark.parametrize("options", [{"micro_batch": 8}, {"micro_batch": None, "memory": "1GiB"}])
def test_targets_that_number_the_rows_number_those_that_are_compared(numbers: Tensor, options: Any) -> None:
    """A number of a row that is not there is an error, and on an accelerator the end of the process."""
    batch, loss = (torch.randn(40, 4), numbers), ab.WholeBatch(by_numbers)
    assert make(Perceptron(4, 3), loss, **options)(batch).checked
    with pytest.raises(LossError, match="Rows affect"):
        make(Made(lambda self, x: self.of(x - x.mean(0)), of=Perceptron(4, 3)), loss)(batch)
    assert ab.check(Perceptron(4, 3), loss, batch, rows=8).exact
