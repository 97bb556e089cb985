"""What a step is given is checked before anything is touched."""

from typing import Any

import pytest
import torch
from torch import nn

from anybatch import Step, Total
from anybatch.core.errors import BatchError
from anybatch.engine import admit


def task(loss: Any = None) -> Any:
    model = nn.Linear(2, 1)
    step = Step(model, loss or nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    return step.task()


def test_a_batch_elsewhere_is_refused_where_torch_would_fail() -> None:
    there = torch.zeros(3, 2, device="meta"), torch.zeros(3, 1, device="meta")
    with pytest.raises(BatchError, match="device cpu, got meta"):
        admit(there, task(), None)
    meta = nn.Linear(2, 1, device="meta")
    step = Step(meta, nn.MSELoss(), torch.optim.SGD(meta.parameters(), lr=0.1))
    with pytest.raises(BatchError, match=r"device meta, got cpu\. To plan, name the device .*--device"):
        admit((torch.zeros(3, 2), torch.zeros(3, 1)), step.task(), None)
    own = task(lambda model, micro: Total(0.0, 1))  # a function may move each micro-batch itself
    assert admit(there, own, None).rows == 3
