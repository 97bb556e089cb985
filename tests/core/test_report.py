"""Events: a listener hears each of them once and in order."""

import torch
from torch import nn

from anybatch import Step
from anybatch.core.report import Event, MicroBatchDone


def make_step(listener: object, micro_batch: int | None = None) -> Step:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step(model, nn.MSELoss(), optimizer, micro_batch=micro_batch, listeners=[listener])  # type: ignore[list-item]


def test_listener_hears_every_micro_batch_then_the_report() -> None:
    heard: list[Event] = []
    step = make_step(heard.append, micro_batch=3)
    report = step((torch.randn(7, 2), torch.randn(7, 1)))
    assert heard == [*(MicroBatchDone(index=i, rows=rows) for i, rows in enumerate([3, 3, 1])), report]
    heard.clear()
    with step.window() as window:
        for rows in (2, 1):
            window.add((torch.randn(rows, 2), torch.randn(rows, 1)))
        report = window.update()
    assert heard == [MicroBatchDone(index=0, rows=2), MicroBatchDone(index=1, rows=1), report]


def test_listener_hears_the_report_after_the_update() -> None:
    seen: list[torch.Tensor] = []
    step = make_step(lambda event: seen.append(step.model.weight.detach().clone()))  # type: ignore[union-attr]
    before = step.model.weight.detach().clone()  # type: ignore[union-attr]
    step((torch.randn(4, 2), torch.randn(4, 1)))
    assert torch.equal(seen[0], before)
    assert torch.equal(seen[1], step.model.weight)  # type: ignore[arg-type]
    assert not torch.equal(seen[0], seen[1])
