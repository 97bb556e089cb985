"""Whole-batch losses: their first pass in float16, and what cannot be exact in two passes is refused."""

from collections.abc import Iterator
from dataclasses import make_dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step, Total, WholeBatch
from anybatch.core.errors import LossError, NonFiniteLossError
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests.device import needs_sparse
from tests.losses.whole_losses import encoder, labelled, ranked, sup_con, take
from tests.snapshots import same_as_before
from tests.zoo import Made

BOUND = tolerance(torch.float16, 8)


def tiny(outputs: Tensor, target: Tensor) -> Tensor:
    """Its gradient is less than float16 can hold."""
    return 1e-9 * ((outputs - target).float() * torch.arange(1.0, 5.0)).sum()


@pytest.mark.parametrize("loss_rows", [None, 3])
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_a_first_pass_keeps_gradients_that_float16_would_lose(
    micro_batch: int | None, loss_rows: int | None
) -> None:
    def by_rows(outputs: Tensor, target: Tensor, rows: Tensor) -> Total:
        return Total(len(outputs) * tiny(outputs[rows], target[rows]), len(rows))

    model, found = nn.Linear(3, 4), []
    for precision in ("float32", "fp16-mixed"):
        loss = WholeBatch(tiny if loss_rows is None else by_rows, loss_rows=loss_rows)
        recorder = GradientRecorder(model)
        step = Step(model, loss, recorder, micro_batch=micro_batch, precision=precision)
        step((torch.ones(8, 3), torch.ones(8, 4)))
        found.append(recorder.gradients)
    assert relative_error(found[1], found[0]) <= BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("precision", ["fp16-mixed", "float32"])
def test_a_first_pass_takes_gradients_of_any_kind(precision: str, dtype: torch.dtype) -> None:
    """Expanded ones, as of a sum; wider ones; complex ones."""
    found: list[Tensor] = []
    for micro_batch in (None, 2):
        weight = torch.arange(1.0, 4.0).to(dtype) * (1 + 2j if dtype.is_complex else 1)
        model = Made(lambda self, x: x * self.weight, weight=nn.Parameter(weight))
        recorder = GradientRecorder(model)
        loss = WholeBatch(lambda outputs: outputs.abs().sum() + outputs.real.sum())
        Step(model, loss, recorder, micro_batch=micro_batch, precision=precision)((torch.ones(4, 3),))
        found.append(next(iter(recorder.gradients.values())))
    assert found[0].dtype == found[1].dtype
    one, two = map(torch.view_as_real, found) if dtype.is_complex else found
    assert relative_error(two, one) <= BOUND


class Clusters(nn.Embedding):
    """A loss with a table of its own, whose gradient is sparse."""

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - super().forward(target)).square().mean()


@needs_sparse
def test_a_first_pass_takes_sparse_gradients_of_the_loss() -> None:
    model, loss = nn.Linear(3, 4), Clusters(4, 4, sparse=True)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    step = Step(model, WholeBatch(loss), optimizer, micro_batch=2, precision="fp16-mixed")
    assert step((torch.ones(4, 3), torch.arange(4))).updated


def test_an_exception_of_the_callers_own_comes_through_as_it_is() -> None:
    error = make_dataclass("Frozen", ["why"], bases=(Exception,), frozen=True)("no")
    model, loss = nn.Linear(3, 4), WholeBatch(Mock(side_effect=error))
    with pytest.raises(type(error)):
        Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)((torch.ones(4, 3),))


# ---- what is refused


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
def test_a_second_pass_that_differs_is_refused() -> None:
    """It draws from a generator that nobody can put back."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(encoder(), Made(lambda _, x: x * torch.rand(x.shape, generator=draw)))
    step = Step(model, WholeBatch(sup_con), torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=4)
    batch = labelled(23)
    with pytest.raises(LossError, match="repeat the first"), same_as_before(step):
        step(batch)


@pytest.mark.usefixtures("double")
def test_a_forward_that_writes_to_parameters_is_refused() -> None:
    def write(*_: Any) -> None:
        model[-1].weight.mul_(0.5)

    model = encoder().append(nn.Linear(4, 4).requires_grad_(False))
    model.register_forward_pre_hook(write)
    with pytest.raises(LossError, match=r"leave parameters alone.*\b4\.weight"):
        take(model, WholeBatch(sup_con), labelled(23), 4)


@pytest.mark.usefixtures("double")
def test_rank_losses_name_their_bad_rows_too() -> None:
    model, batch = nn.Sequential(encoder(outputs=1), nn.Flatten(0)), ranked(23)
    batch["input"][7] = torch.nan
    loss = WholeBatch(lambda scores, relevance: (scores[:, None] - scores[None]).square().mean())
    with pytest.raises(NonFiniteLossError, match=r"rows \[7\]"):
        take(model, loss, batch, 4)
