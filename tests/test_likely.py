"""What is likely in tensors without values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step
from anybatch.batch import TensorBatch
from anybatch.fakes import FakeMode
from anybatch.likely import known, note
from anybatch.plan import Plan
from anybatch.trace import trace


def bad(x: Tensor) -> None:
    if x.isnan().any():
        raise ValueError


def not_all(x: Tensor) -> None:
    if not x.isfinite().all():
        raise ValueError


def negated(x: Tensor) -> None:
    assert (~x.isfinite()).sum() == 0
    assert not (~torch.isfinite(x)).any()
    assert torch.logical_not(x.isnan().any(1)).all()


def either(x: Tensor) -> None:
    assert not (x.isinf() | x.isnan()).any()
    assert not (x.isinf().any() | x.isnan().any())
    assert (x.isinf().any() | (x > 0).any()).item()  # any other bool is true


def differs(x: Tensor) -> None:
    assert not (x != x).any()
    assert (x == x).all()
    assert (x != x + 1).any()


def counted(x: Tensor) -> None:
    if x.isnan().sum() > 0 or x.isnan().sum().item() > 0:
        raise ValueError
    if (x > 0).sum() == 0 or (x > 0).sum() < 7:
        raise ValueError
    assert torch.where(x.isnan().any(), x.sum(), (x[0] > 0).sum()).item() == x.shape[1]


GUARDS = [bad, not_all, negated, either, differs, counted]


@pytest.mark.parametrize("guard", GUARDS)
def test_no_number_is_broken_and_counts_are_compared(guard: Callable[[Tensor], None]) -> None:
    with FakeMode():
        guard(torch.ones(3, 4, requires_grad=True))
    guard(torch.ones(3, 4))  # as real ones say


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x)
        bad(outputs)
        return outputs.clamp(-9, 9) if outputs.isinf().any() else outputs


def test_a_model_with_a_guard_against_nan_is_traced() -> None:
    model = Guarded()
    step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), check=False)
    rows = TensorBatch((torch.ones(3, 4), torch.ones(3, 2)))
    assert trace(Plan(rows=3, micro_batch=3), step._task(), rows).source == "predicted"


def test_what_is_not_known_stays_so() -> None:
    with FakeMode():
        x = torch.ones(3)
        assert known(x.max()) is known(x > 0) is known(x.isnan() & (x > 0)) is None
        result = torch.ones(())
        note(torch.ops.aten.sum.default, [x], result)
    assert known(result) == 3
    assert known(7) is None
