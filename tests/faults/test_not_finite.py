"""Losses and gradients that are not finite: told with their rows, left out exactly, or the update skipped."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Options, Step
from anybatch.core.errors import NonFiniteLossError
from anybatch.testing import relative_error
from tests.faults import faulty
from tests.faults.faulty import BEGIN, ROWS, SIZE, VARIANTS, build, make_batch, parts, seed, take, windowed
from tests.snapshots import assert_same, same_as_before, snapshot
from tests.zoo import Made

EXACT = 1e-12
WHERE = ["loss", "gradient"]
MANY = 2 * ROWS  # eight micro-batches
DOUBLE: dict[str, Any] = {"dtype": torch.float64, "kind": "plain"}
NAMES = ("divided early", "divided late", "several terms", "sum", "clipped")
CLASSES = torch.tensor([1.0, 2, 3, 4]).double()
LOSSES: dict[str, dict[str, Any]] = {
    **{name: VARIANTS[name] for name in NAMES},
    "weighted classes": {"loss": nn.CrossEntropyLoss(CLASSES, ignore_index=2)},
    "BatchNorm": {"kind": "BatchNorm", "batch_norm": "micro"},
}


def spoiled(step: Step, where: str, bad: Sequence[int], rows: int = MANY, **options: Any) -> Any:
    """A batch of which one row in each of these micro-batches is bad, for this step alone."""
    return faulty.spoiled(step, where, [SIZE * index + 1 for index in bad], rows=rows, **options)


def without(batch: tuple[Tensor, Tensor], bad: Sequence[int]) -> tuple[Tensor, Tensor]:
    kept = [index for index in range(len(batch[0])) if index // SIZE not in bad]
    return batch[0][kept], batch[1][kept]


@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize(("bad", "rows", "where"), [([0, 1], MANY, "loss"), ([2], 10, "gradient")], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_drop_is_the_step_on_the_others(name: str, bad: list[int], rows: int, where: str, way: str) -> None:
    options = DOUBLE | LOSSES[name]
    step, same = (build(**options, non_finite="drop") for _ in range(2))
    plain = build(**options)
    start = faulty.weights(step)
    batch = spoiled(step, where, bad, rows, dtype=torch.float64)
    dropped = rows - len(without(batch, bad)[0])
    report = take(step, way, batch)
    others = [take(one, way, without(batch, bad)) for one in (same, plain)]
    assert (report.updated, report.dropped, report.rows) == (True, dropped, rows)
    assert_same(snapshot(same), snapshot(step))  # buffers and random state, too
    assert relative_error(faulty.moved(step, start), faulty.moved(plain, start)) <= EXACT
    for other in others:
        assert relative_error(report.weights, other.weights) == 0
        assert relative_error([report.loss, report.terms], [other.loss, other.terms]) <= EXACT


@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("micro_batch", [SIZE, None], ids=str)
@pytest.mark.parametrize("name", ["divided early", "several terms", "sum"])
def test_all_dropped_makes_no_update(name: str, micro_batch: int | None, where: str, way: str) -> None:
    step = build(**DOUBLE | LOSSES[name], micro_batch=micro_batch, non_finite="drop")
    batch = spoiled(step, where, range(8), dtype=torch.float64)
    with same_as_before(step):
        report = take(step, way, batch)
    assert (report.updated, report.dropped, report.rows) == (False, MANY, MANY)
    assert math.isnan(report.loss)
    assert take(step, way, make_batch(dtype=torch.float64)).updated


@pytest.mark.parametrize("policy", ["drop", "skip"])
@pytest.mark.parametrize("way", ["uncut", "cut", "window"])
def test_bad_luck_does_not_come_again_for_ever(way: str, policy: str) -> None:
    torch.manual_seed(0)
    model = Made(lambda self, x: self.linear(x) / (torch.rand(()) > 1 / 3), linear=nn.Linear(2, 1))
    size, sgd = None if way == "uncut" else 4, torch.optim.SGD(model.parameters(), lr=1e-3)
    options = Options(non_finite=policy, check=False)
    step = Step(model, nn.MSELoss(), sgd, micro_batch=size, options=options)
    batch, act = (torch.ones(8, 2), torch.ones(8, 1)), windowed if way == "window" else type(step).__call__
    assert 5 < sum(act(step, batch).updated for _ in range(40)) < 40


@pytest.mark.parametrize("policy", ["drop", "skip", "raise"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
def test_bad_data_does_not_wear_the_scale_out(precision: str, where: str, policy: str) -> None:
    """No smaller scale makes it finite: that it was halved down to 1 was in vain."""
    step = build("plain", precision=precision, non_finite=policy)
    step.scale.load({"value": 1024.0, "clean": 0})
    state, batch = step.scale.state(), spoiled(step, where, [3])
    with pytest.raises(NonFiniteLossError) if policy == "raise" else nullcontext():
        report = take(step, "step", batch)
        assert (report.scale, report.dropped) == (1024.0, SIZE if policy == "drop" else 0)
        assert report.redone == 0 or where == "gradient"
    assert step.scale.value == 1024.0
    assert policy == "drop" or step.scale.state() == state  # no update was made


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("micro_batch", "index", "rows"), [(4, 7, "28 to 31"), (None, 4, "0 to 31")])
@pytest.mark.parametrize("precision", ["float32", "bf16-mixed", "bf16-true", "fp16-mixed", "fp16-true"])
def test_raise_names_the_rows(precision: str, micro_batch: Any, index: int, rows: str, where: str) -> None:
    step = build("BatchNorm", precision=precision, micro_batch=micro_batch, batch_norm="micro")
    batch = spoiled(step, where, [index])
    with pytest.raises(NonFiniteLossError, match=rf"rows {rows}\b"), same_as_before(step):
        take(step, "step", batch)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
def test_where_an_add_is_looked_at_a_window_goes_on_without_the_bad_one(precision: str, where: str) -> None:
    step, twin = (build(precision=precision) for _ in range(2))
    first, bad, third, *_ = parts(spoiled(step, where, [1]))
    window = step.window()
    window.add(first)
    with pytest.raises(NonFiniteLossError, match="rows 4 to 7 of the batch"):
        window.add(bad)
    window.add(third)
    assert window.close().rows == 2 * SIZE
    seed(BEGIN)
    windowed(twin, tuple(torch.cat(both) for both in zip(first, third, strict=True)))  # type: ignore[arg-type]
    assert_same(snapshot(twin), snapshot(step))
