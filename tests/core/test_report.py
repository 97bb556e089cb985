"""Events: frozen records, and a listener hears each of them once and in order."""

import dataclasses

import pytest
import torch
from torch import nn

from anybatch import Step, StepReport
from anybatch.core.report import Event, MicroBatchDone

REPORT = StepReport(
    loss=0.5, terms={"loss": 0.5}, weights={"loss": 4.0}, rows=4, micro_batches=2, grad_norm=1.0, updated=True
)


@pytest.mark.parametrize(
    "record", [MicroBatchDone(index=0, rows=2), REPORT], ids=lambda one: type(one).__name__
)
def test_records_are_frozen_and_slotted(record: Event) -> None:
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field.name, 0)
    assert not hasattr(record, "__dict__")
    assert dataclasses.replace(record) == record


def test_records_take_keywords_only() -> None:
    with pytest.raises(TypeError):
        MicroBatchDone(0, 2)  # type: ignore[misc]


def make_step(listener: object, micro_batch: int | None = None) -> Step:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step(model, nn.MSELoss(), optimizer, micro_batch=micro_batch, listeners=[listener])  # type: ignore[list-item]


def test_listener_hears_every_micro_batch_then_the_report() -> None:
    heard: list[Event] = []
    report = make_step(heard.append, micro_batch=3)((torch.randn(7, 2), torch.randn(7, 1)))
    assert heard == [*(MicroBatchDone(index=i, rows=rows) for i, rows in enumerate([3, 3, 1])), report]


def test_listener_hears_the_report_after_the_update() -> None:
    seen: list[torch.Tensor] = []
    step = make_step(lambda event: seen.append(step.model.weight.detach().clone()))  # type: ignore[union-attr]
    before = step.model.weight.detach().clone()  # type: ignore[union-attr]
    step((torch.randn(4, 2), torch.randn(4, 1)))
    assert torch.equal(seen[0], before)
    assert torch.equal(seen[1], step.model.weight)  # type: ignore[arg-type]
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("by_phases", [True, False])
def test_listener_hears_a_window(by_phases: bool) -> None:
    heard: list[Event] = []
    window = make_step(heard.append).window()
    window.add((torch.randn(2, 2), torch.randn(2, 1)))
    window.add((torch.randn(1, 2), torch.randn(1, 1)))
    report = window.update() if by_phases else window.close()
    if by_phases:
        window.clear()
    assert heard == [MicroBatchDone(index=0, rows=2), MicroBatchDone(index=1, rows=1), report]
