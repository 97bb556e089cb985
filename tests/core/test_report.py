"""Events: a callback hears each of them once and in order, the report after the update."""

import torch
from torch import Tensor, nn

from anybatch import Step
from anybatch.core import MicroBatchDone
from tests.train.runs import listening


def test_a_callback_hears_every_micro_batch_then_the_report() -> None:
    heard: list[tuple[object, Tensor]] = []
    model = nn.Linear(2, 1)
    listen = listening(lambda event: heard.append((event, model.weight.detach().clone())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, nn.MSELoss(), optimizer, micro_batch=3, callbacks=[listen])
    start = model.weight.detach().clone()
    report = step((torch.randn(7, 2), torch.randn(7, 1)))
    events, weights = zip(*heard, strict=True)
    assert events == (*(MicroBatchDone(index=i, rows=rows) for i, rows in enumerate([3, 3, 1])), report)
    assert [torch.equal(weight, start) for weight in weights] == [True, True, True, False]
    heard.clear()
    with step.window() as window:
        for rows in (2, 1):
            window.add((torch.randn(rows, 2), torch.randn(rows, 1)))
        report = window.update()
    events = tuple(event for event, _ in heard)
    assert events == (MicroBatchDone(index=0, rows=2), MicroBatchDone(index=1, rows=1), report)
