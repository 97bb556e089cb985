"""Whole-batch losses: their first pass in float16, and what cannot be exact in two passes is refused."""

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step, WholeBatch
from anybatch.core.errors import LossError
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests.losses.whole_losses import encoder, labelled, sup_con
from tests.snapshots import same_as_before
from tests.zoo import Made

BOUND = tolerance(torch.float16, 8)


def tiny(outputs: Tensor, target: Tensor) -> Tensor:
    """Its gradient is less than float16 can hold."""
    return 1e-9 * ((outputs - target).float() * torch.arange(1.0, 5.0)).sum()


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_a_first_pass_keeps_gradients_that_float16_would_lose(micro_batch: int | None) -> None:
    model, found = nn.Linear(3, 4), []
    for precision in ("float32", "fp16-mixed"):
        recorder = GradientRecorder(model)
        step = Step(model, WholeBatch(tiny), recorder, micro_batch=micro_batch, precision=precision)
        step((torch.ones(8, 3), torch.ones(8, 4)))
        found.append(recorder.gradients)
    assert relative_error(found[1], found[0]) <= BOUND


def test_a_second_pass_that_differs_is_refused() -> None:
    """It draws from a generator that nobody can put back."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(encoder(), Made(lambda _, x: x * torch.rand(x.shape, generator=draw)))
    step = Step(model, WholeBatch(sup_con), torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=4)
    batch = labelled(23)
    with pytest.raises(LossError, match="repeat the first"), same_as_before(step):
        step(batch)
