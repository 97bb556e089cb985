"""A failure in the middle of a step, at every place, leaves everything as it was."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step
from anybatch.core.errors import NonFiniteLossError
from tests.snapshots import changes, make_batch, make_model, make_step, snapshot
from tests.trips import MODES, Trip, assert_same_step, build, collate, single, step_once


@pytest.mark.parametrize(
    "error", [RuntimeError("tripped"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("place", ["forward", "backward", "listener"])
@pytest.mark.parametrize("mode", MODES)
def test_failed_step_changes_nothing(mode: str, place: str, at: int, error: BaseException) -> None:
    trip = Trip()
    step, twin = build(trip, **MODES[mode]), build(Trip(), **MODES[mode])
    trip.arm(place, at, error)
    before = snapshot(step)
    with pytest.raises(type(error)) as caught:
        step(make_batch())
    assert caught.value is error
    assert changes(before, snapshot(step)) == []
    assert_same_step(step, twin)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("place", ["loss", "collate"])
def test_failed_loss_and_collate_change_nothing(place: str, at: int) -> None:
    trip = Trip()

    def collate_or_trip(samples: list[Any]) -> Any:
        trip("collate")
        return collate(samples)

    step = build(trip, loss=single, collate=collate_or_trip)
    trip.arm(place, at, OSError("tripped"))
    before = snapshot(step)
    with pytest.raises(OSError, match="tripped"):
        step(list(zip(*make_batch(), strict=True)))
    assert changes(before, snapshot(step)) == []
    assert step(list(zip(*make_batch(), strict=True))).micro_batches == 3


def test_buffers_that_a_forward_puts_in_place_adds_or_removes_come_back() -> None:
    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.register_buffer("replaced", torch.zeros(2))
            self.register_buffer("changed", torch.zeros(2))
            self.register_buffer("empty", None)
            self.register_buffer("removed", torch.zeros(2))
            self.register_buffer("constant", torch.zeros(1).expand(9))  # cannot be written to

        def forward(self, x: Tensor) -> Tensor:
            self.replaced = self.replaced + 1
            self.changed += 1
            self.empty = torch.ones(3)
            self.register_buffer("added", torch.ones(1))
            if "removed" in self._buffers:
                del self.removed
            return self.layer(x) * math.nan

    model = Restless()
    step = Step(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        micro_batch=3,
        batch_norm="micro",
    )
    before, replaced = snapshot(step), model.replaced
    with pytest.raises(NonFiniteLossError):
        step(make_batch())
    assert changes(before, snapshot(step)) == []
    assert model.replaced is replaced
    window = step.window()
    window.add(make_batch())
    window.discard()
    assert changes(before, snapshot(step)) == []


# ---- the update


class Refusing(torch.optim.SGD):
    """An optimizer that finds something wrong with its gradients, before any update."""

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("not these gradients")


@pytest.mark.parametrize("by_window", [False, True])
def test_scheduler_past_its_end_leaves_a_whole_update(by_window: bool) -> None:
    step, twin = build(Trip()), build(Trip())
    end = torch.optim.lr_scheduler.LambdaLR(step.optimizers[0], lambda epoch: [1.0][epoch])
    vars(step).update(schedulers=(end,))
    vars(twin).update(schedulers=())
    torch.manual_seed(5)
    with pytest.raises(IndexError):
        step_once(step, by_window)
    torch.manual_seed(5)
    step_once(twin, by_window)
    assert set(changes(snapshot(twin), snapshot(step))) == {"scheduler 0"}
    assert step.open_window is None


@pytest.mark.parametrize("by_window", [False, True])
def test_listener_that_fails_on_the_report_leaves_the_update_made(by_window: bool) -> None:
    trip = Trip()
    step, twin = build(trip), build(Trip())
    trip.arm("report", 0, OSError("disk full"))
    torch.manual_seed(5)
    with pytest.raises(OSError, match="disk full"):
        step_once(step, by_window)
    torch.manual_seed(5)
    step_once(twin, by_window)
    assert changes(snapshot(twin), snapshot(step)) == []
    assert step.open_window is None


# ---- leftovers


def test_gradients_of_parameters_outside_the_optimizer_are_kept() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[union-attr]
    step = Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=3, batch_norm="micro")
    found = {name: torch.full_like(parameter, 0.5) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = found[name]
    step(make_batch())
    for name, parameter in model.named_parameters():
        assert parameter.grad is (None if name.startswith("0.") else found[name])
    assert all(bool((found[name] == 0.5).all()) for name in found)


def test_gradient_of_a_frozen_parameter_is_kept_and_never_used() -> None:
    step = make_step(micro_batch=3)
    frozen = step.model[0].weight  # type: ignore[union-attr, index]
    frozen.requires_grad_(False)
    gradient, value = frozen.grad, frozen.detach().clone()
    step(make_batch())
    assert torch.equal(frozen, value)
    assert frozen.grad is gradient
