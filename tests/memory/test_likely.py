"""What is likely in tensors without values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step, Total
from anybatch.core.batch import TensorBatch
from anybatch.engine.plan import Plan
from anybatch.memory.fake import FakeMode, known, note
from anybatch.memory.meter import Meter
from anybatch.planner.trace import trace


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
    n = (x > 0).sum()
    assert torch.where(n == 0, torch.ones_like(n), n).item() == x.numel()
    assert x.numel() - x.isnan().sum() > 0
    assert (x.numel() - (x < 0).sum()).item() > 0  # what is not known to be 0 weighs something


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
    assert trace(Plan(rows=3, micro_batch=3), step.task(), rows).source == "predicted"


def flipped(x: Tensor) -> Tensor:
    return x.isnan().logical_not_()


def joined(x: Tensor) -> Tensor:
    broken = x.isnan()
    broken |= x > 0
    return broken


def written(x: Tensor) -> Tensor:
    broken = x.isnan()
    broken[:, 0] = True
    return broken


@pytest.mark.parametrize("write", [flipped, joined, written])
def test_what_was_written_to_is_not_known_any_more(write: Callable[[Tensor], Tensor]) -> None:
    with FakeMode():
        changed = write(torch.ones(3, 4))
        assert known(changed) is None
        assert changed.any()
        total = torch.zeros(())
        total += torch.ones(3).sum()
        assert known(total + torch.ones(2).sum()) == known(total) + 2


def test_rows_without_labels_weigh_as_much_as_others() -> None:
    """A weight that came to 0 would leave all parameters without gradient, and without state."""

    def loss(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Total:
        bad = micro[1].isnan()
        losses = (model(micro[0]) - micro[1].nan_to_num()).square() * ~bad
        weight = bad.numel() - bad.sum()
        return Total(losses.sum(), weight) if weight > 0 else Total(model(micro[0]).sum() * 0, weight)

    model = nn.Linear(4, 2)
    step = Step(model, loss, torch.optim.AdamW(model.parameters()))
    rows = torch.ones(3, 4), torch.tensor([[1.0, float("nan")]]).repeat(3, 1)
    step(rows)
    with Meter(model, step.optimizers, batch_leaves=rows) as meter:
        step(rows)
    assert trace(Plan(rows=3, micro_batch=3), step.task(), TensorBatch(rows)).peak == meter.peak


def test_what_is_not_known_stays_so() -> None:
    with FakeMode():
        x = torch.ones(3)
        assert known(x.max()) is known(x > 0) is known(x.isnan() & (x > 0)) is None
        result = torch.ones(())
        note(torch.ops.aten.sum.default, [x], result)
    assert known(result) == 3
    assert known(7) is None
