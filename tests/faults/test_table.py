"""The fault table: a step recovers to the bits of the same cut without the fault, or nothing has changed."""

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.optim import SGD

import anybatch as ab
from anybatch.core.errors import BatchError, NonFiniteLossError, OutOfMemoryError, WindowError
from anybatch.testing import tolerance
from tests.faults import faulty
from tests.faults.faulty import (
    NO_MEMORY,
    ROWS,
    SIZE,
    assert_as_unfaulted,
    build,
    make_batch,
    seed,
    take,
    windowed,
)
from tests.snapshots import DRAWN, assert_same, changes, same_as_before, snapshot

WHOLE_BATCH = faulty.VARIANTS["whole batch"]
HALVES = (SIZE // 2,) * (ROWS // 2)
STATEFUL = ["dropout", "counting", "drawing"]
ROUNDED = tolerance(torch.float32, 8)  # additions in another order


COLUMNS = ("step", "window", "passes")
# Where the fault is, what it is, and how the rows come in each column.
RECOVERS: dict[str, tuple[str, Any, tuple[str, str, str]]] = {
    "out of memory in forward": ("forward", NO_MEMORY, ("rest halved", "rest halved", "halved")),
    "... in backward, nothing accepted": ("end", NO_MEMORY, ("rest halved", "rest halved", "even")),
    "... after something reached .grad": ("mid", NO_MEMORY, ("halved", "rest halved", "halved")),
    "overflow at a loss scale": ("mid", math.inf, ("same", "same", "same")),
}
SCALED = {"precision": ab.Precision(compute="float16", loss_scale=2.0**8)}


# Each kind once, and those that a forward changes at each moment.
MOMENTS = [(kind, 2, 5) for kind in faulty.ZOO]
MOMENTS += [(kind, *moment) for kind in STATEFUL for moment in ((0, 1), (2, 0))]


@pytest.mark.parametrize(("kind", "at", "warm"), MOMENTS)
@pytest.mark.parametrize("way", COLUMNS)
@pytest.mark.parametrize("row", RECOVERS)
def test_recovers(row: str, kind: str, way: str, at: int, warm: int) -> None:
    place, what, cells = RECOVERS[row]
    options = (WHOLE_BATCH if way == "passes" else {}) | (SCALED if what == math.inf else {})
    step, twin = (build(kind, warm=warm, **options) for _ in range(2))
    batch = make_batch()
    step.model.fault.arm(place, at, what)
    report = take(step, way, batch)
    assert report.redone == 1
    expected = cells[COLUMNS.index(way)]
    if expected == "halved":
        assert report.cut == HALVES
    elif expected == "same":
        assert report.cut == (SIZE,) * 4
    elif expected == "rest halved" and (way == "window" or (warm and kind != "counting")):
        # In a step, what was noted only once may have changed in the micro-batches before: it begins again.
        assert report.cut == (SIZE,) * at + HALVES[2 * at :]
    is_halved = way == "window" and what is NO_MEMORY
    assert_as_unfaulted(step, report, twin, batch, way=way, bound=ROUNDED * is_halved)


@pytest.mark.parametrize("place", ["forward", "end", "mid"])
@pytest.mark.parametrize("way", COLUMNS)
def test_a_size_that_was_too_large_is_not_tried_again(way: str, place: str) -> None:
    step = build("dropout", **(WHOLE_BATCH if way == "passes" else {}))
    step.model.fault.arm(place, 1, NO_MEMORY)
    assert take(step, way, make_batch()).too_large == SIZE
    report = take(step, way, make_batch())
    assert (report.cut, report.redone, report.too_large) == (HALVES, 0, 0)


ERRORS: dict[str, BaseException] = {
    "anything else": ValueError("no"),
    "Ctrl-C": KeyboardInterrupt(),
    "one row is too large": NO_MEMORY,
}
# Places, how often they are passed before, and updates before.
PLACES = [("forward", 0, 0), ("forward", 2, 5), ("end", 2, 0), ("mid", 0, 0), ("mid", 2, 5)]
OTHERS = [("collate", 2, 0), ("loss", 2, 0), ("MicroBatchDone", 0, 0), ("MicroBatchDone", 3, 5)]
WAYS = [("step", kind, *place) for kind in STATEFUL for place in PLACES]
WAYS += [("passes", kind, *place) for kind in STATEFUL for place in [*PLACES, ("forward", 5, 0)]]
WAYS += [(name, "dropout", *place) for name in ("divided late", "several terms") for place in OTHERS[1:]]
WAYS += [("float64 sums", "counting", "mid", 2, 0), ("collated", "dropout", *OTHERS[0])]


def expected(row: str) -> type[BaseException]:
    return OutOfMemoryError if ERRORS[row] is NO_MEMORY else type(ERRORS[row])


# Memory that a callback lacks is not the step's.
RAISES = [
    (row, *one)
    for row in ERRORS
    for one in WAYS
    if row == "anything else" or (one[1] == "dropout" and (one[2:] not in OTHERS or row == "Ctrl-C"))
]


@pytest.mark.parametrize(("row", "way", "kind", "place", "at", "warm"), RAISES)
def test_what_raises_changes_nothing(row: str, way: str, kind: str, place: str, at: int, warm: int) -> None:
    options = WHOLE_BATCH if way == "passes" else faulty.VARIANTS.get(way, {})
    step, twin = (build(kind, warm=warm, **options) for _ in range(2))
    for parameter in step.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    step.model.fault.arm(place, at, ERRORS[row], math.inf)
    with pytest.raises(expected(row)) as caught, same_as_before(step):
        step(faulty.of_form(step, make_batch()))
    assert expected(row) is OutOfMemoryError or caught.value is ERRORS[row]
    step.model.fault.arm("")
    step.optimizers[0].zero_grad()
    assert_as_unfaulted(step, take(step, "step", make_batch()), twin, make_batch())


ADDS = [("Ctrl-C", "float64 sums"), *[("anything else", kind) for kind in STATEFUL]]
ADDS += [("one row is too large", kind) for kind in ("dropout", "several terms")]


@pytest.mark.parametrize(("place", "at", "warm"), [*PLACES, ("refused", 2, 0)])
@pytest.mark.parametrize(("row", "kind"), ADDS)
def test_an_add_that_raises_loses_only_itself(row: str, kind: str, place: str, at: int, warm: int) -> None:
    step, twin = (build(kind, warm=warm, **faulty.VARIANTS.get(kind, {})) for _ in range(2))
    micros = faulty.parts(make_batch())
    window = step.window()
    for micro in micros[:at]:
        window.add(micro)
    step.model.fault.arm(place, 0, ERRORS[row], math.inf)
    with pytest.raises(BatchError if place == "refused" else expected(row)), same_as_before(step):
        window.add((micros[at][0], micros[at][1][:1]) if place == "refused" else micros[at])
    assert (window.rows, step.open_window) == (at * SIZE, window)
    step.model.fault.arm("")
    for micro in micros[at:]:
        window.add(micro)
    assert_as_unfaulted(step, window.close(), twin, make_batch(), way="window")


BAD = 2 * SIZE + 1  # a row of the third micro-batch


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("way", COLUMNS)
@pytest.mark.parametrize("kind", STATEFUL)
def test_not_finite_is_raised(kind: str, way: str, where: str) -> None:
    step, twin = (build(kind, **(WHOLE_BATCH if way == "passes" else {})) for _ in range(2))
    batch = faulty.spoiled(step, where, [BAD])
    # A window looks at its end only, and a gradient of a second pass is that of all rows.
    named = {"step": r"\b8\b.*\b11\b", "passes": r"\b9\b" if where == "loss" else None}.get(way)
    with pytest.raises(NonFiniteLossError, match=named), same_as_before(step):
        take(step, way, batch)
    assert step.open_window is None
    step.model.fault.spoil = 1.0
    assert_as_unfaulted(step, step(make_batch()), twin, make_batch())


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_not_finite_is_dropped(kind: str, way: str, where: str) -> None:
    """The bad micro-batch draws random numbers, and has no other effect. 16 rows are left."""
    step, twin = build(kind, non_finite="drop"), build(kind)
    batch = faulty.spoiled(step, where, [BAD], rows=ROWS + SIZE)
    report = take(step, way, batch)
    assert (report.dropped, report.updated, report.weights) == (SIZE, True, {"loss": ROWS})
    found = snapshot(step)
    seed(faulty.BEGIN)
    with twin.window() as window:
        for index, micro in enumerate(faulty.parts(batch)):
            if index == BAD // SIZE:
                copy.deepcopy(twin.model)(micro[0])
            else:
                window.add(micro)
        assert window.close().loss == report.loss
    assert_same(snapshot(twin), found)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize(
    ("bad", "precision", "kind"),
    [(0, "bf16-mixed", "drawing"), (BAD, "float32", "counting"), (ROWS - 1, "bf16-true", "dropout")],
)
def test_not_finite_is_skipped(bad: int, precision: str, kind: str, way: str, where: str) -> None:
    step = build(kind, non_finite="skip", precision=precision)
    with same_as_before(step, *DRAWN):  # what was drawn is drawn, or what made this one bad would come again
        report = take(step, way, faulty.spoiled(step, where, [bad]))
    assert (report.updated, report.rows, report.dropped) == (False, ROWS, 0)
    assert step.model.fault.ran == [SIZE] * (ROWS // SIZE)  # one look, at the end
    step.model.fault.spoil = 1.0
    assert take(step, way, make_batch()).updated


class Rate(float):
    """A learning rate that fails when it is used."""

    left, error = math.inf, ValueError("no")

    def __neg__(self) -> float:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return -float(self)


def failing(kind: str, how: str, error: BaseException, **options: Any) -> ab.Step:
    """A step whose update fails."""
    step = build(kind, momentum=0.0, **options)
    optimizer, parameters = step.optimizers[0], list(step.model.parameters())
    if how == "hooked":
        optimizer.register_step_post_hook(lambda *_: None)
    elif how == "second optimizer":
        first, optimizer = SGD(parameters[:2], lr=0.125), SGD(parameters[2:], lr=0.125)
        both, options = [first, optimizer], {"options": ab.Options(check=False)}
        step = ab.Step(step.model, step.loss, both, micro_batch=SIZE, **options)
    optimizer.param_groups[0]["foreach"] = False  # one parameter after the other, on a device too
    rate = optimizer.param_groups[0]["lr"] = Rate(0.125)
    rate.left, rate.error = 2 if how == "after the first write" else 0, error
    return step


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), MemoryError("no room")], ids=repr)
@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_an_update_failing_before_a_write_changes_nothing(kind: str, way: str, error: BaseException) -> None:
    step, twin = failing(kind, "before", error), build(kind, momentum=0.0)
    twin.optimizers[0].param_groups[0]["foreach"] = False
    kinds = OutOfMemoryError if isinstance(error, MemoryError) else type(error)
    with pytest.raises(kinds) as caught, same_as_before(step):
        take(step, way, make_batch())
    assert "checkpoint" not in faulty.said(caught.value)
    step.optimizers[0].param_groups[0]["lr"] = 0.125
    assert_as_unfaulted(step, step(make_batch()), twin, make_batch())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize("how", ["after the first write", "second optimizer", "hooked"])
def test_a_torn_update_is_named_so_and_nothing_is_put_back(how: str, way: str, error: Any) -> None:
    step, twin = failing("counting", how, error("CUDA out of memory.")), build("counting", momentum=0.0)
    with pytest.raises((error, ab.AnybatchError)) as caught:
        take(step, way, make_batch())
    assert "go on from a checkpoint" in faulty.said(caught.value)
    found = snapshot(step)
    take(twin, way, make_batch())
    ahead = set(changes(snapshot(twin), found))
    updated = how in ("after the first write", "second optimizer")
    assert ("parameter enter.weight" in ahead) is not updated
    assert "parameter large" in ahead or updated
    assert not {name for name in ahead if name.startswith(("buffer", "attribute")) or name in DRAWN}
    assert step.open_window is None


@pytest.mark.parametrize("error", [MemoryError("no room for a rate"), OSError("disk full")])
@pytest.mark.parametrize("way", ["step", "window"])
def test_what_fails_after_the_update_leaves_it_made(way: str, error: Exception) -> None:
    """Who listens to the report."""
    step, twin = build("dropout"), build("dropout")
    step.model.fault.arm("StepReport", 0, error)
    with pytest.raises(type(error)) as caught:
        take(step, way, make_batch())
    assert caught.value is error
    assert "Update 1 was made" in faulty.said(error)
    take(twin, way, make_batch())
    assert_same(snapshot(twin), snapshot(step))
    assert step.open_window is None


# ---- windows


def refused(uses: list[Callable[[], Any]], said: str) -> None:
    for use in uses:
        with pytest.raises(WindowError, match=said):
            use()


def test_a_window_that_is_over_takes_nothing_more() -> None:
    step = build()
    window = step.window()
    window.add(make_batch())
    refused([window.clear], "that is updated to clear, got one that is open")
    window.update()
    add = lambda: window.add(make_batch())  # noqa: E731
    refused([add, window.update, window.close], r"got one that is updated\. Open a new")
    window.clear()
    with same_as_before(step):
        refused([add, window.update, window.clear, window.close], r"got one that is closed\. Open a new")
        window.discard()  # may be said twice


@pytest.mark.parametrize("rows", [0, ROWS])
def test_a_window_left_open_is_named_and_can_be_ended(rows: int) -> None:
    step = build("counting")
    with same_as_before(step):
        window = step.window()
        if rows:
            window.add(make_batch())
        del window  # the caller's own name for it is gone
        with same_as_before(step):
            refused([lambda: step(make_batch()), step.window], f"no open window, got one with {rows} rows")
        assert step.open_window is not None
        step.open_window.discard()
    assert take(step, "step", make_batch()).updated


def test_a_window_as_a_context_manager_is_closed_at_its_end_and_discarded_by_an_error() -> None:
    step, twin = build("counting"), build("counting")
    with step.window() as window:
        window.add(make_batch())
    seed(faulty.BEGIN)
    windowed(twin, make_batch(), ROWS)
    assert_same(snapshot(twin), snapshot(step))
    with same_as_before(step):
        with suppress(KeyboardInterrupt), step.window() as window:
            window.add(make_batch())
            raise KeyboardInterrupt
        with pytest.raises(WindowError, match="at least one micro-batch"), step.window():
            pass
    assert step.open_window is None
