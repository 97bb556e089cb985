"""BatchNorm in training mode: named at the door where a batch is cut, unless the caller chose."""

from typing import Any

import pytest
import torch
from torch import nn

from anybatch import Step
from anybatch.core.errors import PlanError
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests.snapshots import changes, snapshot

X = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(4, (10,), generator=torch.Generator().manual_seed(1))


def normed() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)).double()
    model(torch.randn(64, 3, dtype=torch.float64) + 1)  # running statistics that are not the batch's
    return model


def of_normed(model: nn.Module, micro_batch: int | None, **options: Any) -> tuple[Step, GradientRecorder]:
    recorder = GradientRecorder(model)
    return Step(model, nn.CrossEntropyLoss(), recorder, micro_batch=micro_batch, **options), recorder


def test_batch_norm_is_refused_where_a_batch_is_cut() -> None:
    model = normed()
    step, _ = of_normed(model, 3)
    before = snapshot(step)
    with pytest.raises(PlanError, match=r"got 1: .*batch_norm_to_group_norm.*frozen.*micro") as error:
        step((X, Y))
    assert "uncut" in str(error.value)
    assert changes(before, snapshot(step)) == []
    assert of_normed(model, None)[0]((X, Y)).updated  # uncut, nothing is wrong
    model.eval()
    assert step((X, Y)).updated


def test_batch_norm_is_refused_with_the_second_micro_batch_of_a_window() -> None:
    step, _ = of_normed(normed(), None)
    window = step.window()
    window.add((X[:4], Y[:4]))
    before = snapshot(step)
    with pytest.raises(PlanError, match="BatchNorm"):
        window.add((X[4:], Y[4:]))
    assert changes(before, snapshot(step)) == []
    assert window.close().rows == 4


def test_frozen_batch_norm_is_exact_and_keeps_its_statistics() -> None:
    model = normed()
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    uncut, recorder = of_normed(model, None, batch_norm="frozen")
    uncut((X, Y))
    whole = recorder.gradients
    for micro_batch in (1, 3):
        step, recorder = of_normed(model, micro_batch, batch_norm="frozen")
        step((X, Y))
        assert relative_error(recorder.gradients, whole) <= tolerance(torch.float64, 1)
    step, recorder = of_normed(model, None, batch_norm="frozen")
    with step.window() as window:
        for rows in (slice(0, 3), slice(3, None)):
            window.add((X[rows], Y[rows]))
    assert relative_error(recorder.gradients, whole) <= tolerance(torch.float64, 1)
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())
    assert all(module.training for module in model.modules())


def test_micro_batch_norm_updates_its_statistics_once_per_micro_batch() -> None:
    model, twin = normed(), normed()
    of_normed(model, 5, batch_norm="micro")[0]((X, Y))
    with torch.no_grad():
        for part in X.split(5):
            twin(part)
    assert all(torch.equal(buffer, twin.get_buffer(name)) for name, buffer in model.named_buffers())


def test_other_choices_for_batch_norm_are_refused() -> None:
    with pytest.raises(PlanError, match="not available yet"):
        of_normed(normed(), 3, batch_norm="exact")
    with pytest.raises(PlanError, match="frozen"):
        of_normed(normed(), 3, batch_norm="yes")
