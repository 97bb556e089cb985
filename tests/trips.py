"""A step that fails at a chosen place, and what it must equal afterwards."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Step, Total
from anybatch.core.report import Event, MicroBatchDone
from tests.snapshots import changes, make_batch, make_model, make_step, snapshot


class Trip:
    """Raises once, when its place has been passed `at` times."""

    def __init__(self) -> None:
        self.place, self.left, self.error = "", 0, RuntimeError("tripped")

    def arm(self, place: str, at: int = 0, error: BaseException | None = None) -> None:
        self.place, self.left = place, at
        self.error: BaseException = error or RuntimeError("tripped")

    def __call__(self, place: str) -> None:
        if place == self.place:
            self.left -= 1
            if self.left < 0:
                self.place = ""
                raise self.error


class Pass(torch.autograd.Function):
    """The identity that trips in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.trip("backward")
        return gradients[0], None


class Model(nn.Module):
    """Draws random numbers and changes buffers before it trips; backward trips when half of it is done."""

    def __init__(self, trip: Trip) -> None:
        super().__init__()
        self.first, self.second, self.trip = make_model()[:4], make_model()[4:], trip

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.trip("forward")
        return self.second(Pass.apply(hidden, self.trip))


def single(model: nn.Module, micro: Any) -> Total:
    losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")
    model.trip("loss")
    return Total(losses.sum(), len(losses))


def several(model: nn.Module, micro: Any) -> dict[str, Total]:
    total = single(model, micro)
    return {"fit": total, "size": Total(model.second[0].weight.square().sum() * len(micro[0]), len(micro[0]))}


def collate(samples: list[tuple[Tensor, Tensor]]) -> Any:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


# How the same step may be carried out: with gradients in .grad, or in accumulators of one bank or several.
MODES: dict[str, dict[str, Any]] = {
    "early": {},
    "late": {"loss": single},
    "several terms": {"loss": several},
    "float64": {"accumulate": torch.float64},
    "compensated": {"loss": single, "compensated": True},
}


def build(trip: Trip, *, micro_batch: int | None = 3, **options: Any) -> Step:
    loss = options.pop("loss", nn.CrossEntropyLoss())

    def listen(event: Event) -> None:
        trip("listener" if isinstance(event, MicroBatchDone) else "report")

    return make_step(loss, Model(trip), micro_batch=micro_batch, listeners=[listen], **options)


def assert_same_step(step: Step, twin: Step) -> None:
    """The next batch gives, bit for bit, what it gives a step that never failed."""
    torch.manual_seed(5)
    report = step(make_batch(seed=3))
    torch.manual_seed(5)
    assert report == twin(make_batch(seed=3))
    assert changes(snapshot(twin), snapshot(step)) == []


def step_once(step: Step, by_window: bool) -> None:
    if not by_window:
        step(make_batch())
        return
    window = step.window()
    window.add(make_batch())
    window.close()
