"""From gradient to update: clip as torch does, update once and in order, with what belongs together."""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from anybatch import Options, Step, Total


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_inside_of_a_callers_autocast_no_step_goes_on_with_old_weights(
    precision: str, enabled: bool, windowed: bool
) -> None:
    """Torch casts a weight once, and knows no better before the outermost autocast is over."""
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=enabled)

    def losses(around: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        step = Step(model, nn.MSELoss(), SGD(model.parameters(), lr=0.01), precision=precision)
        rows, found = (torch.ones(8, 4), torch.ones(8, 1)), list[float]()
        for _ in range(4):
            with around(), step.window() if windowed else nullcontext(step) as door:
                found.append((door.add(rows) or door.close() if windowed else door(rows)).loss)
        return found

    with autocast():
        inside = losses(nullcontext)
    assert inside == losses(autocast)
    assert len(set(inside)) == 4


@pytest.mark.parametrize("sparse", [False, True])
def test_entries_are_clamped_where_all_of_the_gradient_is_there(sparse: bool) -> None:
    model = nn.Embedding(3, 2, sparse=sparse)
    before = model.weight.detach().clone()
    model(torch.tensor([0, 1])).sum().backward()  # found: 1 in the rows 0 and 1
    loss = lambda model, micro: Total(model(micro[0]).sum(), len(micro[0]) / 2)  # noqa: E731
    step = Step(model, loss, SGD(model.parameters(), lr=1.0), options=Options(clip_value=1.25))
    report = step((torch.tensor([0, 2, 2, 2]),))  # adds 1/2 in row 0 and three times 1/2 in row 2
    assert torch.allclose(before - model.weight, torch.tensor([[1.25], [1.0], [1.25]]).expand(3, 2))
    assert report.grad_norm == pytest.approx(math.sqrt(2 * (1.5**2 + 1 + 1.5**2)))
