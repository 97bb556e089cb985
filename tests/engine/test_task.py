"""The task: what a plan is carried out on, as it stands."""

import pytest
import torch
from torch import nn

from anybatch import Step
from anybatch.precision.loss_scale import LossScale
from anybatch.precision.master_weights import Masters
from tests.engine.test_execute import make_task, total


@pytest.mark.parametrize(
    ("devices", "kinds"),
    [
        ([], set()),
        (["cpu"], {"cpu"}),
        (["meta"], set()),
        (["cpu", "meta"], {"cpu"}),
        (["cuda:0", "cuda:1", "cpu"], {"cuda", "cpu"}),
    ],
)
def test_kinds_of_devices_that_compute(devices: list[str], kinds: set[str]) -> None:
    task = make_task(total)
    object.__setattr__(task, "devices", {torch.device(one) for one in devices})
    assert task.kinds == kinds


def test_a_task_has_neither_backup_nor_scale_of_its_own_accord() -> None:
    one, other = (make_task(total) for _ in range(2))
    assert isinstance(one.masters, Masters)
    assert isinstance(one.scale, LossScale)
    assert (one.masters.tensors, one.scale.value) == ([], 1.0)
    assert one.masters is not other.masters
    assert one.scale is not other.scale


def test_a_step_hands_over_its_backup_and_scale() -> None:
    model = nn.Linear(2, 1)
    step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16-true")
    task = step._task()
    assert task.masters is step.masters
    assert task.scale is step.scale
