"""Stops of the host, and operations of the device, as exact counts: the table of docs/speed.md."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from tests.accelerator.programs import batch, moved, perceptron, sgd
from tests.accelerator.simulated import counted, load

MICRO, PARTS = 4, 4
ROWS = MICRO * PARTS
STOPS = "items", "waits", "copies_out"  # single numbers, waits for a result or a stream, copies to the host


def stops(run: Callable[[], object]) -> tuple[int, ...]:
    """Count the stops of a call; (0, 0, 1) is one copy."""
    with counted() as found:
        run()
    return tuple(found[name] for name in STOPS)


def ready(**keywords: Any) -> tuple[ab.Step, Any]:
    """A step that has made three updates, and its batch; the first one compares splits, which reads a lot."""
    load()
    model = perceptron().to("sim")
    rows = moved(batch(0, ROWS))
    if "precision" in keywords:
        model, rows = model.float(), (rows[0].float(), rows[1])
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd(model), micro_batch=MICRO, **keywords)
    for _ in range(3):
        step(rows)
    return step, rows


def of_step(**keywords: Any) -> tuple[int, ...]:
    step, rows = ready(**keywords)
    return stops(lambda: step(rows))


def own_total(model: nn.Module, rows: Any) -> ab.Total:
    losses = nn.functional.cross_entropy(model(rows[0]), rows[1], reduction="sum")
    return ab.Total(losses, (rows[1] != -100).sum())


def of_own_loss() -> tuple[int, ...]:
    load()
    model, rows = perceptron().to("sim"), moved(batch(0, ROWS))
    step = ab.Step(model, own_total, sgd(model), micro_batch=MICRO)
    for _ in range(3):
        step(rows)
    return stops(lambda: step(rows))


def of_window() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The stops of four `add`s together, and of the close."""
    step, (x, y) = ready()
    window = step.window()
    opened = window.__enter__()
    adding = stops(lambda: [opened.add(one) for one in zip(x.split(MICRO), y.split(MICRO), strict=True)])
    return adding, stops(lambda: window.__exit__(None, None, None))


def bad() -> tuple[int, ...]:
    """A batch with a NaN, which is skipped."""
    step, (x, y) = ready(options=ab.Options(non_finite="skip"))
    x = x.clone()
    x[5] = torch.nan
    return stops(lambda: step((x, y)))


ONCE = (0, 0, 1)


@pytest.mark.parametrize(
    ("expected", "keywords"),
    [
        (ONCE, {}),
        (ONCE, {"clip_norm": 0.1}),
        (ONCE, {"options": ab.Options(non_finite="skip")}),
        (ONCE, {"options": ab.Options(clip_value=0.1)}),
        ((PARTS, 0, 1), {"options": ab.Options(non_finite="drop")}),
        ((PARTS, 0, 1), {"precision": "fp16-mixed"}),
        (ONCE, {"precision": "bf16-mixed"}),
    ],
    ids=["plain", "clip_norm", "skip", "clip_value", "drop", "loss scale", "bf16-mixed"],
)
def test_a_step_reads_its_device_once(sim: Any, expected: Any, keywords: dict[str, Any]) -> None:
    assert sim(named, "of_step", keywords) == expected


def named(name: str, keywords: dict[str, Any]) -> Any:
    return globals()[name](**keywords)


def test_weights_on_the_device_are_read_with_the_losses(sim: Any) -> None:
    assert sim(of_own_loss) == ONCE


def test_adds_of_a_window_read_nothing_and_its_close_reads_once(sim: Any) -> None:
    assert sim(of_window) == ((0, 0, 0), ONCE)


def test_a_batch_that_is_skipped_is_read_once(sim: Any) -> None:
    assert sim(bad) == ONCE


def by_hand_and_by_step() -> tuple[int, int]:
    """Operations of an update: of the loop that one writes by hand, and of a step."""
    step, (x, y) = ready()
    model, optimizer, loss = step.model, step.optimizers[0], nn.CrossEntropyLoss(reduction="sum")

    def loop() -> None:
        optimizer.zero_grad()
        weight = (y != -100).sum()
        for rows, targets in zip(x.split(MICRO), y.split(MICRO), strict=True):
            (loss(model(rows), targets) / weight).backward()
        optimizer.step()

    found: list[int] = []
    for run in (loop, lambda: step((x, y))):
        with counted() as counts:
            run()
        found.append(counts["operations"])
    return found[0], found[1]


def test_a_step_asks_few_operations_more_than_the_loop_by_hand(sim: Any) -> None:
    by_hand, by_step = sim(by_hand_and_by_step)
    assert by_step <= by_hand + 8, (by_hand, by_step)
