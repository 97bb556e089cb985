"""Stops of the host as exact counts: the table of docs/speed.md."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from torch import nn

import anybatch as ab
from tests.accelerator.programs import batch, contrast, moved, perceptron, sgd
from tests.accelerator.simulated import counted, load
from tests.zoo import own_loss

MICRO, PARTS = 5, 4  # not as many rows as classes: those might be each other's classes, which is looked at
ROWS = MICRO * PARTS
#: Single numbers, waits for a result or a stream, copies to the host; and copies to the device.
STOPS = "items", "waits", "copies_out", "copies_in"


def stops(run: Callable[[], object]) -> tuple[int, ...]:
    """Count the stops of a call; (0, 0, 1, 0) is one copy to the host."""
    with counted() as found:
        run()
    return tuple(found[name] for name in STOPS)


def own_total(model: nn.Module, rows: Any) -> ab.Total:
    losses = nn.functional.cross_entropy(model(rows[0]), rows[1], reduction="sum")
    return ab.Total(losses, (rows[1] != -100).sum())


LOSSES: dict[str, Any] = {
    "Total": own_total, "ModelLoss": ab.ModelLoss(), "WholeBatch": ab.WholeBatch(contrast),
}  # fmt: skip


def ready(name: str = "", micro_batch: int = MICRO, **keywords: Any) -> tuple[ab.Step, Any]:
    """A step that has made four updates, and its batch; of these all but the third compare splits."""
    load()
    model = own_loss(perceptron()) if name == "ModelLoss" else perceptron()
    loss, model, rows = LOSSES.get(name, nn.CrossEntropyLoss()), model.to("sim"), moved(batch(0, ROWS))
    if "precision" in keywords:
        model, rows = model.float(), (rows[0].float(), rows[1])
    step = ab.Step(model, loss, sgd(model), micro_batch=micro_batch, **keywords)
    for _ in range(4):
        step(rows)
    return step, rows


def of_step(*given: Any, **keywords: Any) -> tuple[int, ...]:
    step, rows = ready(*given, **keywords)
    return stops(lambda: step(rows))


def of_trainer(is_on_device: bool) -> list[tuple[int, ...]]:
    """The stops from one update of a trainer to the next, loading included."""
    native, seen = load().native, list[dict[str, int]]()
    model, rows = perceptron().to("sim"), batch(0, ROWS)
    note = lambda report: seen.append(native.counts())  # noqa: E731
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd(model), micro_batch=MICRO, callbacks=[note])
    trainer = ab.Trainer(step, moved(rows) if is_on_device else rows, batch_size=ROWS // 2, progress=False)
    trainer.fit(epochs=4)
    # The 8th compares.
    return [tuple(new[one] - old[one] for one in STOPS) for old, new in pairwise(seen[4:7])]


def plan_for_add(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The stops of four `add`s together, and of the close, in a second window: the first may compare."""
    step, (x, y) = ready(name)
    micros = [*zip(x.split(MICRO), y.split(MICRO), strict=True)]
    for window in (step.window() for _ in range(2)):
        add = window.add
        found = stops(lambda add=add: [add(one) for one in micros]), stops(window.close)
    return found


NONE, ONCE = (0, 0, 0, 0), (0, 0, 1, 0)


@pytest.mark.parametrize(
    ("expected", "keywords"),
    [
        (ONCE, {}),
        (ONCE, {"clip_norm": 0.1}),
        (ONCE, {"options": ab.Options(non_finite="skip")}),
        (ONCE, {"options": ab.Options(clip_value=0.1)}),
        ((PARTS, 0, 1, 0), {"options": ab.Options(non_finite="drop")}),
        ((PARTS, 0, 1, 0), {"precision": "fp16-mixed"}),
        (ONCE, {"precision": "bf16-mixed"}),
    ],
    ids=str,
)
def test_a_step_reads_its_device_once(sim: Any, expected: Any, keywords: dict[str, Any]) -> None:
    assert sim(partial(of_step, **keywords)) == expected


@pytest.mark.parametrize("micro_batch", [MICRO, ROWS], ids=["cut", "uncut"])
@pytest.mark.parametrize("name", LOSSES)
def test_weights_on_the_device_are_read_with_the_losses(sim: Any, name: str, micro_batch: int) -> None:
    is_two_pass = name == "WholeBatch" and micro_batch < ROWS  # its loss, and the distance of both passes
    assert sim(of_step, name, micro_batch) == ((1, 0, 2, 0) if is_two_pass else ONCE)


@pytest.mark.parametrize("name", ["", "Total", "ModelLoss"])
def test_adds_of_a_window_read_nothing_and_its_close_reads_once(sim: Any, name: str) -> None:
    assert sim(plan_for_add, name) == (NONE, ONCE)


def test_a_trainer_copies_rows_or_their_indices_and_reads_once(sim: Any) -> None:
    on_host, on_device = sim(of_trainer, False), sim(of_trainer, True)
    assert {*on_host} == {(0, 0, 1, 2)}  # inputs and targets
    assert {*on_device} == {(0, 0, 1, 1)}


def by_hand_and_by_step(name: str) -> tuple[int, int]:
    """Operations of an update: of the loop that one writes by hand, and of a step."""
    step, (x, y) = ready(name)
    model, optimizer, loss = step.model, step.optimizers[0], nn.CrossEntropyLoss(reduction="sum")

    def loop() -> None:
        optimizer.zero_grad()
        weight = (y != -100).sum()
        for rows, targets in zip(x.split(MICRO), y.split(MICRO), strict=True):
            if name == "ModelLoss":  # a mean of the model's own, so its divisor is undone
                (model(rows, targets)["loss"] * ((targets != -100).sum() / weight)).backward()
            else:
                (loss(model(rows), targets) / weight).backward()
        optimizer.step()

    found: list[int] = []
    for run in (loop, lambda: step((x, y))):
        with counted() as counts:
            run()
        found.append(counts["operations"])
    return found[0], found[1]


@pytest.mark.parametrize(("name", "more"), [("", 6), ("Total", 25), ("ModelLoss", 25)])
def test_a_step_asks_so_many_operations_more_than_the_loop_by_hand(sim: Any, name: str, more: int) -> None:
    by_hand, by_step = sim(by_hand_and_by_step, name)
    assert by_step == by_hand + more
