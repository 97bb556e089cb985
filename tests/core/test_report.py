"""Events: a callback hears each of them once and in order, the report after the update."""

from typing import Any

import torch
from torch import nn

from anybatch import Step
from anybatch.core import MicroBatchDone
from tests.train.runs import listening


def test_a_callback_hears_every_micro_batch_then_the_report() -> None:
    heard: list[Any] = []
    model = nn.Linear(2, 1)
    listen = listening(lambda event: heard.append((event, model.weight.detach().clone())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, nn.MSELoss(), optimizer, micro_batch=3, callbacks=[listen])
    report = step((torch.randn(7, 2), torch.randn(7, 1)))
    events, (start, *weights) = zip(*heard, strict=True)
    assert events == (*(MicroBatchDone(index=i, rows=rows) for i, rows in enumerate([3, 3, 1])), report)
    assert [torch.equal(weight, start) for weight in weights] == [True, True, False]
    heard.clear()
    with step.window() as window:
        for rows in (2, 1):
            window.add((torch.randn(rows, 2), torch.randn(rows, 1)))
        report = window.update()
    made = (MicroBatchDone(index=i, rows=rows) for i, rows in enumerate([2, 1]))
    assert [event for event, _ in heard] == [*made, report]
