"""Whatever stream a forward draws from, a micro-batch that comes again draws the same."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from anybatch import Step
from anybatch.state.snapshot import EVERY, FIRST
from tests.faults.faulty import NO_MEMORY, Net, assert_as_unfaulted, build, make_batch, seed, take


class Drawing(Net):
    """Its forward draws a number from the stream of this name."""

    def __init__(self, kind: str) -> None:
        super().__init__("plain")
        self.stream = kind
        self.torch = torch.Generator().manual_seed(0)
        self.numpy = np.random.default_rng(0)
        self.state = np.random.RandomState(0)
        self.python = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + STREAMS[self.stream](self)))


STREAMS: dict[str, Callable[[Drawing], float]] = {
    "nothing": lambda model: 0.5,
    "torch": lambda model: torch.rand(()).item(),
    "Python": lambda model: random.random(),
    "NumPy": lambda model: np.random.rand(),
    "a generator of torch": lambda model: torch.rand((), generator=model.torch).item(),
    "a generator of NumPy": lambda model: model.numpy.random(),
    "a state of NumPy": lambda model: model.state.rand(),
    "a generator of Python": lambda model: model.python.random(),
}


def after(steps: int, kind: str, before: str = "", change_at: int = 0) -> Step:
    """A step after some updates, which has drawn from another stream up to one of them."""
    step = build(before or kind, model=Drawing)
    for number in range(steps):
        step.model.stream = kind if number >= change_at else before or kind
        seed(number)
        step(make_batch(number))
    step.model.stream = kind
    return step


@pytest.mark.parametrize(
    ("kind", "steps", "before", "change_at"),
    [
        *[(kind, steps, "", 0) for kind in STREAMS for steps in (0, FIRST, EVERY + 1)],
        ("Python", EVERY + 1, "nothing", FIRST + 1),  # it begins to draw later, and a looking step sees it
        ("torch", FIRST, "nothing", FIRST),  # nobody has seen it: the step begins again
    ],
)
@pytest.mark.parametrize("place", ["forward", "mid"])
def test_every_stream_that_a_forward_draws_from_comes_back(
    place: str, kind: str, steps: int, before: str, change_at: int
) -> None:
    step, twin = (after(steps, kind, before, change_at) for _ in range(2))
    step.model.fault.arm(place, 1, NO_MEMORY)
    report = take(step, "step", make_batch())
    assert report.redone == 1
    assert_as_unfaulted(step, report, twin, make_batch())
