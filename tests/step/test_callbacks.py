"""Callbacks of steps, windows, batch losses and trainers: who is accepted, called when, and may raise."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core import NonFiniteLossError, PlanError
from anybatch.observe import GradientNoise
from tests.options import flat
from tests.snapshots import same_as_before
from tests.zoo import dropout

NO_MEMORY = torch.OutOfMemoryError
X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])
BEFORE = ("begin", "micro_gradients", "micro_batch", "gradients")
STEP = ["begin", *["micro_gradients", "micro_batch"] * 2, "gradients", "parameters", "update"]
SILENT = {"attached", "validation", "metrics", "state_dict", "load_state_dict", "record"}
METHODS = {name for name, one in vars(ab.Callback).items() if name[0] != "_" and callable(one)} - SILENT


class Told:
    """An object without base class, with every method; raises in one of them."""

    def __init__(self, at: str = "", error: BaseException | None = None) -> None:
        self.events, self.at, self.error = list[str](), at, error
        for name in METHODS:
            setattr(self, name, partial(self._tell, name))

    def _tell(self, name: str, *given: object) -> None:
        self.events.append(name)
        if name == self.at and self.error is not None:
            raise self.error


def make(*callbacks: object, **options: Any) -> ab.Step:
    torch.manual_seed(0)
    model = options.pop("model", None) or dropout(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"micro_batch": 2, "check": False, "callbacks": callbacks} | options
    return ab.Step(model, nn.CrossEntropyLoss(), optimizer, **flat(settings))


def in_step(step: ab.Step) -> None:
    step((X, Y))


def in_window(step: ab.Step) -> None:
    with step.window() as window:
        for rows in (slice(0, 2), slice(2, 4)):
            window.add((X[rows], Y[rows]))


def in_batch_loss(step: ab.Step) -> None:
    given: Any = {"micro_batch": 2, "options": ab.Options(check=False), "callbacks": step.callbacks}
    ab.BatchLoss(step.model, step.loss, **given)((X, Y)).backward()
    step.optimizers[0].step()


def in_trainer(step: ab.Step) -> None:
    ab.Trainer(step, (X, Y), batch_size=4, progress=False).fit(epochs=1)


WAYS: dict[str, tuple[Callable[[ab.Step], object], list[str]]] = {
    "step": (in_step, STEP),
    "window": (in_window, ["begin", *STEP[1:3], *STEP[:3], *STEP[5:]]),
    "batch loss": (in_batch_loss, [name for name in STEP if name != "parameters"]),
    "trainer": (in_trainer, ["start", *STEP, "epoch", "stop"]),
}


def seeded(use: Callable[[ab.Step], object], step: ab.Step) -> None:
    torch.manual_seed(1)
    use(step)


@pytest.mark.parametrize("precision", ["float32", "bf16-true"])
@pytest.mark.parametrize("way", WAYS)
def test_each_method_is_called_in_order_and_changes_no_bit(way: str, precision: str) -> None:
    use, expected = WAYS[way]
    told, watched, noise = Told(), dropout(3, 2), GradientNoise(every=1)
    plain = make(model=copy.deepcopy(watched), precision=precision)
    watching = told, noise, ab.GradientFlow(watched, every=1), list[object]().append
    step = make(*watching, model=watched, precision=precision)
    seeded(use, plain)
    seeded(use, step)
    assert told.events == expected
    assert all(map(torch.equal, step.model.parameters(), plain.model.parameters()))


@pytest.mark.parametrize("error", [ValueError, NO_MEMORY, NonFiniteLossError])
@pytest.mark.parametrize("name", [*BEFORE, "parameters", "update"])
@pytest.mark.parametrize("way", ["step", "window"])
def test_what_a_callback_raises_is_raised_and_never_recovered_from(way: str, name: str, error: Any) -> None:
    raised = error("no memory left: out of memory")
    told = Told(name, raised)
    step, twin, use = make(told, non_finite="skip"), make(non_finite="skip"), WAYS[way][0]
    is_before = name in BEFORE
    seeded(use, twin)
    with pytest.raises(error) as caught, same_as_before(step) if is_before else nullcontext():
        use(step) if is_before else seeded(use, step)
    assert is_before or all(map(torch.equal, step.model.parameters(), twin.model.parameters()))
    assert caught.value is raised
    assert told.events.count(name) == 1
    assert "redone" not in told.events
    notes = " ".join(getattr(raised, "__notes__", ()))
    assert ("Update 1 was made" in notes) is not is_before


def test_a_loss_for_another_loop_is_refused() -> None:
    with pytest.raises(PlanError, match=r"got an ab\.BatchLoss of Linear\. Your loop makes the update"):
        ab.BatchLoss(nn.Linear(2, 1), nn.MSELoss(), callbacks=[ab.EMA()])
