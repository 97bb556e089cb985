"""The fault table of the design: what follows when something fails, at each place of a step.

A cell either recovers, and then gives what the same cut gives without the fault, bit for bit; or it raises,
and then all is as it was before.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.optim import SGD

import anybatch as ab
from anybatch.core.errors import LossError, NonFiniteLossError, OutOfMemoryError
from tests.faults.faulty import (
    BEGIN,
    ROWS,
    SIZE,
    ZOO,
    assert_as_unfaulted,
    assert_same,
    build,
    by_hand,
    everything,
    make_batch,
    parts,
    said,
    seed,
    spread,
    windowed,
)
from tests.snapshots import changes

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory.")
WHOLE_BATCH = {"loss": ab.WholeBatch(spread)}
HALVES = (SIZE // 2,) * (ROWS // 2)
STATEFUL = ["dropout", "counting", "drawing"]
STREAMS = {"random state", "random state of Python", "random state of NumPy"}


def take(step: ab.Step, way: str, batch: Any) -> ab.StepReport:
    return windowed(step, batch, (SIZE,) * (len(batch[0]) // SIZE)) if way == "window" else step(batch)


@pytest.mark.parametrize("kind", [kind for kind in ZOO if kind not in ("float64 sums", "compensated")])
def test_what_faulted_steps_are_compared_with_is_the_loop_by_hand(kind: str) -> None:
    step, twin, cut, batch = build(kind), build(kind), (4, 2, 2, 4, 2, 1, 1), make_batch()
    by_hand(twin, batch, cut)
    expected = everything(twin)
    seed(BEGIN)
    windowed(step, batch, cut)
    assert_same(expected, everything(step))


# ---- what recovers


@dataclass(frozen=True)
class Recovers:
    """A row of the table, in those columns where the step goes on or begins again.

    Attributes:
        place: where the fault is.
        what: the fault.
        step, window, passes: how the rows come there: "same", "rest halved", "halved", or "even" parts.
    """

    place: str
    what: BaseException | float
    step: str
    window: str
    passes: str


RECOVERS = {
    "out of memory in forward": Recovers("forward", NO_MEMORY, "rest halved", "rest halved", "halved"),
    "... in backward, nothing accepted": Recovers("end", NO_MEMORY, "rest halved", "rest halved", "even"),
    "... after something reached .grad": Recovers("mid", NO_MEMORY, "halved", "rest halved", "halved"),
    "overflow at a loss scale": Recovers("mid", math.inf, "same", "same", "same"),
}


@pytest.mark.parametrize(("at", "warm"), [(0, 1), (2, 0), (2, 5)])
@pytest.mark.parametrize("way", ["step", "window", "passes"])
@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("row", RECOVERS)
def test_recovers(row: str, kind: str, way: str, at: int, warm: int) -> None:
    fault, options = RECOVERS[row], WHOLE_BATCH if way == "passes" else {}
    if fault.what == math.inf:
        options = options | {"precision": ab.Precision(compute="float16", loss_scale=2.0**8)}
    step, twin = (build(kind, warm=warm, **options) for _ in range(2))
    batch = make_batch()
    step.model.fault.arm(fault.place, at, fault.what)
    report = take(step, way, batch)
    assert report.redone == 1
    expected = getattr(fault, way)
    if expected == "halved":
        assert report.cut == HALVES
    elif expected == "same":
        assert report.cut == (SIZE,) * 4
    elif expected == "rest halved" and (way == "window" or (warm and kind != "counting")):
        # In a step, what was noted only once may have changed in the micro-batches before: it begins again.
        assert report.cut == (SIZE,) * at + HALVES[2 * at :]
    is_halved = way == "window" and fault.what is NO_MEMORY
    assert_as_unfaulted(step, report, twin, batch, reordered=is_halved)


@pytest.mark.parametrize("place", ["forward", "end", "mid"])
@pytest.mark.parametrize("kind", ZOO)
def test_memory_that_runs_out_in_an_uncut_step_cuts_it(kind: str, place: str) -> None:
    step, twin = (build(kind, micro_batch=None) for _ in range(2))
    step.model.fault.arm(place, 0, NO_MEMORY)
    report = step(make_batch())
    assert (report.cut, report.redone) == ((8, 8), 1)
    assert_as_unfaulted(step, report, twin, make_batch())


@pytest.mark.parametrize("place", ["forward", "end", "mid"])
@pytest.mark.parametrize("way", ["step", "window", "passes"])
def test_a_size_that_was_too_large_is_not_tried_again(way: str, place: str) -> None:
    step = build("dropout", **(WHOLE_BATCH if way == "passes" else {}))
    step.model.fault.arm(place, 1, NO_MEMORY)
    assert take(step, way, make_batch()).too_large == SIZE
    report = take(step, way, make_batch())
    assert (report.cut, report.redone, report.too_large) == (HALVES, 0, 0)


@pytest.mark.parametrize("at", [4, 6])
@pytest.mark.parametrize("kind", ZOO)
def test_memory_that_runs_out_in_the_forward_of_a_second_pass(kind: str, at: int) -> None:
    step, twin = (build(kind, **WHOLE_BATCH) for _ in range(2))
    step.model.fault.arm("forward", at, NO_MEMORY)
    assert_as_unfaulted(step, step(make_batch()), twin, make_batch())


def test_an_overflow_where_gradients_are_too_large_to_be_held() -> None:
    """Some are added before the overflow shows, so the step begins again."""
    precision = ab.Precision(compute="float16", loss_scale=2.0**8)
    step, twin = (build("large", momentum=0.0, precision=precision) for _ in range(2))
    step.model.fault.arm("mid", 2, math.inf)
    report = step(make_batch())
    assert (report.cut, report.redone) == ((SIZE,) * 4, 1)
    assert_as_unfaulted(step, report, twin, make_batch())


@pytest.mark.parametrize("kind", ["dropout", "counting", "compensated"])
def test_a_first_pass_has_a_loss_scale_of_its_own(kind: str) -> None:
    """Its gradient overflows where the scale of a first pass begins, and the second pass does not."""
    precision = ab.Precision(compute="float16", loss_scale=2.0)
    step, twin = (
        build(kind, precision=precision, momentum=0.0, loss=ab.WholeBatch(lambda x, y, f=f: f * spread(x, y)))
        for f in (2.0**8, 1.0)
    )
    found = []
    for one, rate in ((step, 2.0**-10), (twin, 2.0**-2)):
        one.optimizers[0].param_groups[0]["lr"] = rate
        seed(BEGIN)
        assert one(make_batch()).redone == 0
        one.optimizers[0].param_groups[0]["lr"] = 0.0
        found.append(everything(one))
    assert_same(*found)


# ---- what raises


ERRORS: dict[str, BaseException] = {
    "anything else": ValueError("no"),
    "Ctrl-C": KeyboardInterrupt(),
    "one row is too large": NO_MEMORY,
}


PLACES = [("forward", 0, 0), ("forward", 2, 5), ("end", 2, 0), ("mid", 0, 0), ("mid", 2, 5)]
IN_SECOND_PASS = ("passes", "forward", 5, 0)


def expected(row: str) -> type[BaseException]:
    return OutOfMemoryError if ERRORS[row] is NO_MEMORY else type(ERRORS[row])


@pytest.mark.parametrize(
    ("way", "place", "at", "warm"),
    [(way, *place) for way in ("step", "passes") for place in PLACES] + [IN_SECOND_PASS],
)
@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("row", ERRORS)
def test_a_step_that_raises_changes_nothing(
    row: str, kind: str, way: str, place: str, at: int, warm: int
) -> None:
    options = WHOLE_BATCH if way == "passes" else {}
    step, twin = (build(kind, warm=warm, **options) for _ in range(2))
    for parameter in step.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    before = everything(step)
    step.model.fault.arm(place, at, ERRORS[row], math.inf)
    with pytest.raises(expected(row)) as caught:
        step(make_batch())
    assert expected(row) is OutOfMemoryError or caught.value is ERRORS[row]
    assert_same(before, everything(step))
    step.model.fault.arm("")
    step.optimizers[0].zero_grad()
    assert_as_unfaulted(step, step(make_batch()), twin, make_batch())


@pytest.mark.parametrize(("place", "at", "warm"), PLACES)
@pytest.mark.parametrize("kind", [*STATEFUL, "float64 sums", "compensated"])
@pytest.mark.parametrize("row", ERRORS)
def test_an_add_that_raises_loses_only_itself(row: str, kind: str, place: str, at: int, warm: int) -> None:
    step, twin = (build(kind, warm=warm) for _ in range(2))
    micros = parts(make_batch())
    window = step.window()
    for micro in micros[:at]:
        window.add(micro)
    before = everything(step)
    step.model.fault.arm(place, 0, ERRORS[row], math.inf)
    with pytest.raises(expected(row)):
        window.add(micros[at])
    assert_same(before, everything(step))
    assert (window.rows, step.open_window) == (at * SIZE, window)
    step.model.fault.arm("")
    for micro in micros[at:]:
        window.add(micro)
    assert_as_unfaulted(step, window.close(), twin, make_batch())


# ---- not finite at a loss scale of 1

BAD = 2 * SIZE + 1  # a row of the third micro-batch


def spoiled(step: ab.Step, where: str, rows: int = ROWS, bad: int = BAD) -> Any:
    """A batch with a bad row, whose loss is not finite or only its gradient."""
    x, y = make_batch(rows=rows, marked=[bad])
    step.model.fault.spoils = where == "gradient"
    if where == "loss":
        x[bad, 0] = math.nan
    return x, y


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("way", ["step", "window", "passes"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_not_finite_is_raised(kind: str, way: str, where: str) -> None:
    step, twin = (build(kind, **(WHOLE_BATCH if way == "passes" else {})) for _ in range(2))
    batch, before = spoiled(step, where), everything(step)
    named = {"step": r"\b8\b.*\b11\b", "window": None, "passes": r"\b9\b" if where == "loss" else None}[way]
    if way == "window":  # nobody looks before the end
        window = step.window()
        for micro in parts(batch):
            window.add(micro)
        with pytest.raises(NonFiniteLossError):
            window.close()
    else:
        with pytest.raises(NonFiniteLossError, match=named):
            step(batch)
    assert_same(before, everything(step))
    step.model.fault.spoils = False
    assert_as_unfaulted(step, step(make_batch()), twin, make_batch())


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_not_finite_is_dropped(kind: str, way: str, where: str) -> None:
    """The bad micro-batch draws random numbers, and has no other effect. 16 rows are left."""
    step, twin = build(kind, non_finite="drop"), build(kind)
    batch = spoiled(step, where, rows=ROWS + SIZE)
    report = take(step, way, batch)
    assert (report.dropped, report.updated, report.weights) == (SIZE, True, {"loss": ROWS})
    found = everything(step)
    seed(BEGIN)
    with twin.window() as window:
        for index, micro in enumerate(parts(batch)):
            if index == BAD // SIZE:
                copy.deepcopy(twin.model)(micro[0])
            else:
                window.add(micro)
        assert window.close().loss == report.loss
    assert_same(everything(twin), found)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("bad", [0, BAD])
def test_not_finite_is_skipped(bad: int, kind: str, way: str, where: str) -> None:
    step = build(kind, non_finite="skip")
    batch, before = spoiled(step, where, bad=bad), everything(step)
    report = take(step, way, batch)
    assert (report.updated, report.rows) == (False, ROWS)
    changed = set(changes(before, everything(step)))
    assert "random state" in changed  # or the next one would meet what made this one bad
    assert changed <= STREAMS


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_rows_that_meet_in_the_loss_are_not_dropped(where: str) -> None:
    step = build("counting", non_finite="drop", **WHOLE_BATCH)
    batch, before = spoiled(step, where), everything(step)
    with pytest.raises(LossError):
        step(batch)
    assert_same(before, everything(step))


# ---- an error in the update


class Rate(float):
    """A learning rate that fails when it is used."""

    left, error = math.inf, ValueError("no")

    def __neg__(self) -> float:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return -float(self)


class Foreign(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise self.error


def failing(kind: str, how: str, error: BaseException, **options: Any) -> ab.Step:
    """A step whose update fails."""
    step = build(kind, momentum=0.0, **options)
    optimizer, parameters = step.optimizers[0], list(step.model.parameters())
    if how == "second optimizer":
        optimizers = [SGD(parameters[:2], lr=0.125), SGD(parameters[2:], lr=0.125)]
        step = ab.Step(step.model, step.loss, optimizers, micro_batch=SIZE, check=False)
        optimizer = step.optimizers[1]
    elif how == "foreign":
        optimizer = Foreign(parameters, lr=0.125)
        optimizer.error = error
        step = ab.Step(step.model, step.loss, optimizer, micro_batch=SIZE, check=False)
    elif how == "hooked":
        optimizer.register_step_post_hook(lambda *_: None)
    rate = optimizer.param_groups[0]["lr"] = Rate(0.125)
    rate.left, rate.error = 2 if how == "after the first write" else 0, error
    return step


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_an_update_that_fails_before_its_first_write_changes_nothing(
    kind: str, way: str, error: BaseException
) -> None:
    step, twin = failing(kind, "before", error), build(kind, momentum=0.0)
    before = everything(step)
    with pytest.raises(type(error)) as caught:
        take(step, way, make_batch())
    assert caught.value is error
    assert "checkpoint" not in said(error)
    assert_same(before, everything(step))
    step.optimizers[0].param_groups[0]["lr"] = 0.125
    assert_as_unfaulted(step, step(make_batch()), twin, make_batch())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize("how", ["after the first write", "second optimizer", "hooked", "foreign"])
def test_an_update_that_may_be_torn_is_named_so_and_nothing_is_put_back(
    how: str, way: str, error: type[BaseException]
) -> None:
    step, twin = failing("counting", how, error("CUDA out of memory.")), build("counting", momentum=0.0)
    with pytest.raises((error, ab.AnybatchError)) as caught:
        take(step, way, make_batch())
    assert "go on from a checkpoint" in said(caught.value)
    found = everything(step)
    seed(BEGIN)
    take(twin, way, make_batch())
    ahead = set(changes(everything(twin), found))
    updated = how in ("after the first write", "second optimizer")
    assert ("parameter enter.weight" in ahead) is not updated
    assert "parameter large" in ahead or updated
    assert not {name for name in ahead if name.startswith(("buffer", "attribute")) or name in STREAMS}
    assert step.open_window is None
