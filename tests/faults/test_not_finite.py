"""Losses and gradients that are not finite: told with their rows, left out exactly, or the update skipped."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Step, Terms, WholeBatch
from anybatch.core.errors import LossError, NonFiniteLossError
from anybatch.testing import relative_error
from tests.faults.overflowing import (
    FIRST,
    ROWS,
    SIZE,
    fit,
    make,
    make_batch,
    moved,
    parts,
    take,
    terms,
    weights,
)
from tests.snapshots import changes, make_step, snapshot
from tests.snapshots import make_batch as other_batch

EXACT = 1e-12
NAN = math.nan
WHERE = ["loss", "gradient"]
PLACES = {"first": 0, "middle": 3, "last": 7}
LOSSES: dict[str, dict[str, Any]] = {
    "divided early": {},
    "weighted classes": {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3, 4]).double(), ignore_index=2)},
    "divided late": {"loss": fit},
    "several terms": {"loss": Terms(terms, coefficients={"size": 0.25, "first": 2.0})},
    "sum": {"loss": nn.CrossEntropyLoss(reduction="sum")},
    "compensated": {"compensated": True},
    "clipped": {"clip_norm": 0.01},
    "BatchNorm": {"norm": True, "batch_norm": "micro"},
}


def spoiled(step: Step, where: str, rows: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Any:
    """A batch of which one row in each of these micro-batches is bad, for this step alone."""
    x, y = make_batch([SIZE * index + 1 for index in rows], dtype=dtype)
    if where == "gradient":
        step.model.spoil = NAN
    else:
        x[x[:, -1] != 0, 0] = NAN
    return x, y


def without(batch: tuple[Tensor, Tensor], micro_batches: Sequence[int]) -> tuple[Tensor, Tensor]:
    kept = torch.ones(len(batch[0]), dtype=torch.bool)
    for index in micro_batches:
        kept[SIZE * index : SIZE * (index + 1)] = False
    return batch[0][kept], batch[1][kept]


# ---- drop


@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("bad", [[0], [3], [7], [0, 1], [2, 5, 7]], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_drop_is_the_step_on_the_other_rows(name: str, bad: list[int], where: str, windowed: bool) -> None:
    options = LOSSES[name] | {"dtype": torch.float64}
    step = make(**options, non_finite="drop")
    same, plain = make(**options, non_finite="drop"), make(**options)
    start = weights(step)
    batch = spoiled(step, where, bad)
    report = take(step, batch, windowed=windowed)
    others = [take(one, without(batch, bad), windowed=windowed) for one in (same, plain)]
    assert (report.updated, report.dropped, report.rows) == (True, SIZE * len(bad), ROWS)
    assert changes(snapshot(same), snapshot(step)) == []  # buffers and random state, too
    assert relative_error(moved(step, start), moved(plain, start)) <= EXACT
    for other in others:
        assert relative_error(report.weights, other.weights) == 0
        assert relative_error([report.loss, report.terms], [other.loss, other.terms]) <= EXACT


@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("bad", [[0], [3], [2, 5, 7]], ids=str)
def test_drop_leaves_the_others_what_they_draw(bad: list[int], where: str, windowed: bool) -> None:
    """As where the bad rows had been fine, and without a target."""
    step, plain = (make(dropout=0.5, dtype=torch.float64, non_finite="drop") for _ in range(2))
    x, y = make_batch([], dtype=torch.float64)
    for index in bad:
        y[SIZE * index : SIZE * (index + 1)] = -100
    take(plain, (x, y), windowed=windowed)
    report = take(step, spoiled(step, where, bad), windowed=windowed)
    assert report.dropped == SIZE * len(bad)
    assert relative_error(weights(step), weights(plain)) <= EXACT
    assert torch.equal(snapshot(step)["random state"], snapshot(plain)["random state"])


class Rooted(nn.Module):
    """Its output is finite, and its gradient is not for one number out of three that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * (torch.rand(()) > 1 / 3)).abs().sqrt()


class Noisy(nn.Module):
    """Its output is infinite for one number out of three that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / (torch.rand(()) > 1 / 3)


def noisy_loss(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().mean() / (torch.rand(()) > 1 / 3)


@pytest.mark.parametrize("policy", ["drop", "skip"])
@pytest.mark.parametrize("way", ["uncut", "cut", "window", "whole-batch loss", "second pass"])
def test_bad_luck_does_not_come_again_for_ever(way: str, policy: str) -> None:
    torch.manual_seed(0)
    is_tied = way in ("whole-batch loss", "second pass")
    model = {"whole-batch loss": nn.Linear(2, 1), "second pass": Rooted()}.get(way, Noisy())
    loss: Any = nn.MSELoss()
    if is_tied:
        loss = WholeBatch(noisy_loss if way == "whole-batch loss" else nn.functional.mse_loss)
    size = None if way == "uncut" else 4
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = Step(model, loss, optimizer, micro_batch=size, non_finite="skip" if is_tied else policy)
    x, y = torch.ones(8, 2), torch.ones(8, 1)
    updated = 0
    for _ in range(40):
        if way == "window":
            with step.window() as window:
                for micro in parts((x, y), [4, 4]):
                    window.add(micro)
                updated += window.close().updated
        else:
            updated += step((x, y)).updated
    assert 5 < updated < 40


def test_drop_leaves_a_short_tail_out_with_its_own_weight() -> None:
    step, plain = make(dtype=torch.float64, non_finite="drop"), make(dtype=torch.float64)
    start = weights(step)
    batch = make_batch([9], rows=10, dtype=torch.float64)
    batch[0][9, 0] = NAN
    report = take(step, batch)
    take(plain, without(batch, [2]))
    assert (report.dropped, report.weights) == (2, {"loss": 8.0})
    assert relative_error(moved(step, start), moved(plain, start)) <= EXACT


@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("micro_batch", [SIZE, None, ROWS], ids=str)
@pytest.mark.parametrize("name", ["divided early", "divided late", "several terms", "sum"])
def test_where_all_is_dropped_no_update_is_made(
    name: str, micro_batch: int | None, where: str, windowed: bool
) -> None:
    step = make(**LOSSES[name], micro_batch=micro_batch, dtype=torch.float64, non_finite="drop")
    batch = spoiled(step, where, range(8))
    torch.manual_seed(3)
    before = snapshot(step)
    report = take(step, batch, windowed=windowed, size=micro_batch or ROWS)
    assert (report.updated, report.dropped, report.rows) == (False, ROWS, ROWS)
    assert math.isnan(report.loss)
    assert changes(before, snapshot(step)) == []
    good = make_batch([], dtype=torch.float64)
    assert take(step, good, windowed=windowed, size=micro_batch or ROWS).updated


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
def test_a_loss_that_is_not_finite_is_dropped_at_once(precision: str) -> None:
    """No smaller loss scale would make the forward finite."""
    step = make(precision=precision, non_finite="drop")
    report = take(step, spoiled(step, "loss", [2], dtype=torch.float32))
    assert (report.dropped, report.redone, report.scale) == (SIZE, 0, FIRST)


@pytest.mark.parametrize("policy", ["drop", "skip", "raise"])
@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
def test_bad_data_does_not_wear_the_scale_out(precision: str, policy: str) -> None:
    """That it was halved down to 1 was in vain, and says nothing about other rows."""
    step = make(precision=precision, non_finite=policy)
    batch = spoiled(step, "gradient", [3], dtype=torch.float32)
    state = step.scale.state()
    if policy == "raise":
        with pytest.raises(NonFiniteLossError):
            take(step, batch)
    else:
        assert take(step, batch).scale == FIRST
    assert step.scale.value == FIRST
    if policy != "drop":  # an update was made
        assert step.scale.state() == state


# ---- skip


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("precision", ["float32", "bf16-mixed", "bf16-true"])
def test_skip_leaves_everything_but_random_streams_as_it_was(
    precision: str, windowed: bool, place: str, where: str
) -> None:
    step, twin = (
        make(precision=precision, dropout=0.5, norm=True, batch_norm="micro", non_finite="skip")
        for _ in range(2)
    )
    good = make_batch([])
    for one in (step, twin):
        take(one, good)
    batch = spoiled(step, where, [PLACES[place]], dtype=torch.float32)
    torch.manual_seed(3)
    before = snapshot(step)
    report = take(step, batch, windowed=windowed)
    assert (report.updated, report.rows, report.dropped) == (False, ROWS, 0)
    assert step.model.ran == [SIZE] * (8 + PLACES[place] + 1)  # nothing runs in vain
    assert changes(before, snapshot(step)) == ["random state"]  # what was drawn is drawn
    for one in (step, twin):
        one.model.spoil = 1.0
        assert take(one, good, windowed=windowed).updated
    assert changes(snapshot(twin), snapshot(step)) == []


@pytest.mark.parametrize("micro_batch", [2, 3, 8, None])
def test_skip_finds_somebody_elses_gradients_again(micro_batch: int | None) -> None:
    step = make_step(non_finite="skip", micro_batch=micro_batch)
    x, y = other_batch()
    x[5] = NAN
    before = snapshot(step)
    assert not step((x, y)).updated
    assert set(changes(before, snapshot(step))) <= {"random state"}


# ---- raise


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("precision", ["float32", "bf16-mixed", "bf16-true", "fp16-mixed", "fp16-true"])
def test_raise_names_the_rows_and_leaves_everything(precision: str, place: str, where: str) -> None:
    step = make(precision=precision, dropout=0.5, norm=True, batch_norm="micro")
    index = PLACES[place]
    batch = spoiled(step, where, [index], dtype=torch.float32)
    for parameter in step.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.manual_seed(3)
    before = snapshot(step)
    with pytest.raises(NonFiniteLossError, match=rf"rows {SIZE * index} to {SIZE * index + 3}\b"):
        take(step, batch)
    assert changes(before, snapshot(step)) == []


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("micro_batch", [None, ROWS])
def test_raise_in_the_only_micro_batch(micro_batch: int | None, where: str) -> None:
    step = make(micro_batch=micro_batch)
    batch = spoiled(step, where, [4], dtype=torch.float32)
    torch.manual_seed(3)
    before = snapshot(step)
    with pytest.raises(NonFiniteLossError, match="rows 0 to 31"):
        take(step, batch)
    assert changes(before, snapshot(step)) == []


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("precision", ["float32", "bf16-true", "fp16-mixed", "fp16-true"])
def test_raise_in_a_window(precision: str, where: str) -> None:
    """Where micro-batches are looked at, the window goes on without the bad one; else it is over."""
    options = {"precision": precision, "dropout": 0.5}
    step, twin = make(**options), make(**options)
    batch = spoiled(step, where, [1], dtype=torch.float32)
    first, bad, third, *_ = parts(batch, [SIZE] * 8)
    torch.manual_seed(3)
    before = snapshot(step)
    window = step.window()
    window.add(first)
    if not precision.startswith("fp16"):
        window.add(bad)
        with pytest.raises(NonFiniteLossError):
            window.close()
        assert changes(before, snapshot(step)) == []
        assert step.open_window is None
        return
    with pytest.raises(NonFiniteLossError, match="rows 4 to 7 of the batch"):
        window.add(bad)
    window.add(third)
    assert window.close().rows == 2 * SIZE
    torch.manual_seed(3)
    with twin.window() as other:
        other.add(first)
        other.add(third)
    found = changes(snapshot(twin), snapshot(step))
    assert found == []


def test_nobody_looks_twice_where_all_is_finite() -> None:
    step = make()
    take(step, make_batch())
    assert step.model.ran == [SIZE] * 8


# ---- where the loss is one of all rows


def spread(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, target)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("micro_batch", [SIZE, None], ids=str)
@pytest.mark.parametrize("policy", ["raise", "drop", "skip"])
def test_rows_that_meet_in_the_loss_are_not_left_out_of_a_part_of_it(
    policy: str, micro_batch: int | None, where: str
) -> None:
    """The others' losses know of them. Uncut, all rows may be left out, and so may the update."""
    options = {"loss": WholeBatch(spread), "dtype": torch.float64, "micro_batch": micro_batch}
    step = make(**options, non_finite=policy)
    batch = spoiled(step, where, [3])
    torch.manual_seed(3)
    before = snapshot(step)
    if policy == "skip" or (policy == "drop" and micro_batch is None):
        assert not take(step, batch).updated
    else:
        with pytest.raises(LossError):
            take(step, batch)
    assert changes(before, snapshot(step)) == []
