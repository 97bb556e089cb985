"""Forwards that write to their own rows, and a micro-batch that has to come again."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch import AnybatchError, Precision, Step
from tests.faults.scarce import scarce_in_passes

SCALED = Precision(compute="float16", loss_scale=2.0**14)


class InPlace(nn.Module):
    """Adds 1 to its rows where they lie."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.add_(1.0))


def make(precision: Any = "float32") -> Step:
    model = InPlace()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return Step(model, nn.MSELoss(), optimizer, micro_batch=4, precision=precision, check=False)


def rows() -> tuple[Tensor, Tensor]:
    return torch.zeros(8, 4), torch.full((8, 1), 40.0)


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("fault", ["overflow", "memory"])
def test_it_is_said_and_no_update_is_made(fault: str, steps: int) -> None:
    step = make(SCALED if fault == "overflow" else "float32")
    if fault == "memory":
        for _ in range(steps):
            step(rows())
    first = step.model.layer.weight.detach().clone()
    for _ in range(2):
        with (
            pytest.raises(AnybatchError, match=r"rows are not as before: hand them over anew, .*x\.clone"),
            scarce_in_passes({3} if fault == "memory" else set()),
        ):
            step(rows())
        assert torch.equal(step.model.layer.weight, first)


@pytest.mark.parametrize("policy", ["raise", "drop", "skip"])
@pytest.mark.parametrize("kind", ["expanded", "of a file", "with gradient", "sparse"])
def test_rows_that_cannot_be_written_to_are_left_alone(kind: str, policy: str, tmp_path: Path) -> None:
    """Nobody has changed them: they may be one row many times, or a file that can only be read."""
    x, y = torch.full((8, 4), 2.0), torch.full((8, 1), 40.0)
    if kind == "expanded":
        x, y = torch.full((1, 4), 2.0).expand(8, 4), torch.full((1, 1), 40.0).expand(8, 1)
    elif kind == "of a file":
        np.save(tmp_path / "rows.npy", x.numpy())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written to
            x = torch.from_numpy(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    elif kind == "sparse":
        x = x.to_sparse()
    else:
        x.requires_grad_()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    options: dict[str, Any] = {"precision": SCALED} if policy == "raise" else {"non_finite": policy}
    size = None if kind == "sparse" else 4
    step = Step(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=1e-4), micro_batch=size, **options
    )
    if policy != "raise":
        y = torch.full((8, 1), torch.inf)
    report = step((x, y))
    assert (report.redone > 0, report.updated) == (policy == "raise", policy == "raise")
    assert report.dropped == 8 * (policy == "drop")
