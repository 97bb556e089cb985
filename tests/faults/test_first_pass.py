"""Whole-batch losses: their first pass in float16, and what cannot be exact in two passes is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step, Total, WholeBatch
from anybatch.core.errors import LossError
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests.losses.whole_losses import encoder, labelled, sup_con, take
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
