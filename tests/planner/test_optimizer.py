"""An update alone, on fake tensors."""

import pytest
import torch
from torch import nn

from anybatch import Plan, Step
from anybatch.core.errors import TraceError
from anybatch.memory.meter import Meter
from anybatch.planner.measure import Watcher, has_state, trace_update


def make(**options: object) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    return Step(model, nn.MSELoss(), optimizer, check=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["float32", "bf16-true"])
def test_it_counts_the_state_to_come_and_makes_none(precision: str) -> None:
    step = make(precision=precision)
    task = step.task()
    recording, state, made = trace_update(
        Plan(rows=2, micro_batch=2, precision=step.precision), task, set(), []
    )
    moments = [one for one in state if one.dim()]
    numbers = sum(p.numel() for p in task.parameters)
    assert sum(one.numel() for one in moments) == 2 * numbers
    assert {one.dtype for one in moments} == {torch.float32}
    assert made == set(task.parameters)
    assert recording.peak() > 0
    assert not has_state(task)
    assert all(p.grad is None for p in task.parameters)


def test_state_that_is_there_is_seen() -> None:
    step = make()
    step((torch.randn(2, 4), torch.randn(2, 2)))
    assert has_state(step.task())


def test_a_watcher_sees_who_got_no_gradient_and_updates_nothing() -> None:
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    one.grad = torch.ones(2)
    watcher = Watcher([one, other])
    watcher.step()
    assert watcher.idle == {other}
    assert torch.equal(one, torch.ones(2))


class Asking(torch.optim.SGD):
    """Wants a value that only a real step has."""

    def step(self, closure: object = None) -> None:  # pyright: ignore
        1 / (self.param_groups[0]["params"][0].grad.max().item() - 1)


def test_an_update_that_cannot_be_traced_says_what_to_do() -> None:
    step = make()
    alone = Step(step.model, nn.MSELoss(), Asking(step.model.parameters(), lr=0.1), check=False)
    with pytest.raises(TraceError, match=r"an update .* ZeroDivisionError .*choose micro_batch= yourself"):
        trace_update(Plan(rows=2, micro_batch=2), alone.task(), set(), [])
    assert all(p.grad is None for p in step.model.parameters())


def test_whoever_measures_does_not_see_it() -> None:
    step = make()
    with Meter(step.model, step.optimizers) as meter:
        trace_update(Plan(rows=2, micro_batch=2), step.task(), set(), [])
    assert meter.peak == sum(p.nbytes for p in step.model.parameters())
