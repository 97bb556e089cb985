"""A window whose micro-batches are too large for memory: cut, learned, or discarded as a whole."""

import pytest
import torch
from torch import nn

from anybatch import Step
from anybatch.errors import OutOfMemoryError
from anybatch.run import Run
from tests.faults.scarce import scarce
from tests.snapshots import changes, make_batch, make_model, snapshot


def make() -> Step:
    model = nn.Sequential(*[layer for layer in make_model() if not isinstance(layer, nn.BatchNorm1d)])
    return Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))


def test_what_did_not_fit_comes_in_parts_and_so_does_what_follows() -> None:
    step = make()
    window = step.window()
    with scarce(Run, "add", {1}):
        window.add(make_batch())
    window.add(make_batch())
    assert window.rows == 16
    report = window.close()
    assert report.cut == (4, 4, 4, 4)
    assert (report.redone, report.too_large) == (1, 8)


def test_a_micro_batch_of_which_nothing_fits_leaves_the_window_as_it_was() -> None:
    step, twin = make(), make()
    torch.manual_seed(5)
    window = step.window()
    window.add(make_batch())
    with scarce(Run, "add", set(range(1000))), pytest.raises(OutOfMemoryError, match="one row is the least"):
        window.add(make_batch(seed=1))
    assert window.rows == 8
    window.close()
    torch.manual_seed(5)
    with twin.window() as other:
        other.add(make_batch())
    assert changes(snapshot(twin), snapshot(step)) == []


def test_a_micro_batch_of_which_a_part_is_in_the_sums_takes_the_window_with_it() -> None:
    step = make()
    before = snapshot(step)
    window = step.window()
    window.add(make_batch())
    with scarce(Run, "add") as counted:
        window.add(make_batch())
    late = {counted.count - 4, *range(counted.count, 1000)}  # the last layer has accepted it by then
    with scarce(Run, "add", late), pytest.raises(OutOfMemoryError, match="the sums of a window"):
        window.add(make_batch())
    assert step.open_window is None
    assert changes(before, snapshot(step)) == []
