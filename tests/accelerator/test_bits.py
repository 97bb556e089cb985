"""On an accelerator, too, recompute, offload and callbacks give the same bits; and mistakes are refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import BatchError
from anybatch.recompute import offload
from tests.accelerator.programs import CLASSES, Batch, moved
from tests.accelerator.simulated import load
from tests.options import flat
from tests.snapshots import same_as_before
from tests.zoo import Made

WIDTH, ROWS = 512, 96  # tensors of 32 rows are large enough to wait in host memory


def block() -> nn.Module:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2))
    return Made(lambda self, x: x + self.layers(x), layers=layers)


def build(**options: Any) -> tuple[ab.Step, Batch]:
    """A step on the device, the same each time, and a batch."""
    load()
    torch.manual_seed(1)
    model = nn.Sequential(*[block() for _ in range(3)], nn.Linear(WIDTH, CLASSES)).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"micro_batch": 32, "check": False} | options
    batch = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
    return ab.Step(model, nn.CrossEntropyLoss(), optimizer, **flat(options)), moved(batch)


def after(**options: Any) -> list[Tensor]:
    """The parameters after three steps."""
    step, batch = build(**options)
    for number in range(3):
        torch.manual_seed(number)
        step(batch)
    return [one.detach().cpu() for one in step.model.parameters()]


def are_same(**options: Any) -> bool:
    return all(map(torch.equal, after(), after(**options)))


SAME: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": ["0", "1", "2"]},
    "offload": {"recompute": {"0": "offload", "1": "offload", "2": "recompute"}},
}


@pytest.mark.parametrize("options", SAME.values(), ids=SAME)
def test_the_same_bits(sim: Any, options: dict[str, Any]) -> None:
    assert sim(partial(are_same, **options))


def without_a_wait(place: str) -> bool:
    """Whether an update is as it should be if this wait is left out."""
    expected = after()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.StreamLink, place, lambda *_: None)
        try:
            found = after(recompute={"0": "offload", "1": "offload"})
        except ab.AnybatchError:  # the gradient is not finite: memory that is new or freed holds NaN
            return False
    return all(map(torch.equal, expected, found))


def test_a_wait_that_is_left_out_is_seen(sim: Any) -> None:
    assert not sim(without_a_wait, "wait")


def mistakes() -> bool:
    """Rows on the host, or on two devices, are refused, and all is as before."""
    step, (x, y) = build()
    for rows in (x.cpu(), y.cpu()), (x, y.cpu()):
        with same_as_before(step), pytest.raises(BatchError, match=r"Expected .*device sim:0, got cpu"):
            step(rows)
    return step((x, y)).updated


def test_rows_on_the_host_are_refused(sim: Any) -> None:
    assert sim(mistakes)
