"""What a step must not lose: gradients it finds, attributes its forward changes, and what it draws."""

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import anybatch as ab
from anybatch.core.errors import NonFiniteLossError, WindowError
from anybatch.state.snapshot import EVERY, FIRST
from anybatch.testing import relative_error
from tests.faults import faulty
from tests.faults.faulty import NO_MEMORY, ROWS, SIZE, VARIANTS, Net, build, make_batch, parts, seed, take
from tests.snapshots import DRAWN, assert_same, same_as_before, snapshot

EXACT = 1e-12  # additions in another order, in float64


def give_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Somebody's own, none of them zero."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("micro_batch", [None, SIZE])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("kind", faulty.ZOO)
def test_gradients_found_before_a_step_are_added(kind: str, clip_norm: Any, micro_batch: int | None) -> None:
    """To the bit where it is not cut, and sums are kept as the gradients are."""
    is_same = micro_batch is None and kind != "float64 sums"
    dtype = torch.float32 if is_same else torch.float64
    step, twin = (build(kind, micro_batch=micro_batch, clip_norm=clip_norm, dtype=dtype) for _ in range(2))
    for one in (step, twin):
        give_gradients(one.model)
    size = micro_batch or ROWS
    faulty.by_hand(twin, make_batch(dtype=dtype), (size,) * (ROWS // size), clip_norm)
    other = snapshot(twin)
    seed(faulty.BEGIN)
    step(make_batch(dtype=dtype))
    if is_same:
        assert_same(other, snapshot(step))
    assert relative_error(list(step.model.parameters()), list(twin.model.parameters())) <= EXACT
    assert all(parameter.grad is None for parameter in step.model.parameters())


@pytest.mark.parametrize("micro_batch", [SIZE, None])
@pytest.mark.parametrize("bad", ["raise", "skip", "found"])
def test_a_step_that_fails_or_is_skipped_gives_gradients_back(bad: str, micro_batch: int | None) -> None:
    """The very same tensors, too; also those found that are not finite."""
    step = build("dropout", micro_batch=micro_batch, non_finite="skip" if bad == "skip" else "raise")
    found = give_gradients(step.model)
    x, y = make_batch()
    (found["leave.weight"] if bad == "found" else x)[0] = math.nan
    expected = nullcontext() if bad == "skip" else pytest.raises(NonFiniteLossError)
    with same_as_before(step, *(() if bad == "found" else DRAWN)), expected:
        assert not step((x, y)).updated


@pytest.mark.parametrize("micro_batch", [SIZE, None])
def test_parameters_that_a_step_does_not_train_keep_their_gradients(micro_batch: int | None) -> None:
    """They take part in the forward and require a gradient, or are frozen."""
    model = Net("dropout")
    model.inner.bias.requires_grad_(False)
    sgd, options = SGD(model.enter.parameters(), 0.1), ab.Options(check=False)
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd, micro_batch=micro_batch, options=options)
    others = give_gradients(model)
    del others["enter.weight"], others["enter.bias"]
    model.enter.zero_grad()
    values = {name: gradient.clone() for name, gradient in others.items()}
    assert step(make_batch()).updated
    assert all(model.get_parameter(name).grad is others[name] for name in others)
    assert_same(values, others)
    assert [parameter.grad for parameter in model.enter.parameters()] == [None] * 2


@pytest.mark.parametrize("added", [0, 2, 4])
@pytest.mark.parametrize("kind", ["dropout", "tied", "float64 sums"])
def test_a_gradient_that_a_window_finds_is_refused_by_name(kind: str, added: int) -> None:
    step, twin = build(kind), build(kind)
    window, micros = step.window(), parts(make_batch())
    for micro in micros[:added]:
        window.add(micro)
    step.model.leave.weight.grad = torch.ones_like(step.model.leave.weight)
    with pytest.raises(WindowError, match=r"leave\.weight"), same_as_before(step):
        window.add(micros[added]) if added < 4 else window.close()
    step.optimizers[0].zero_grad(set_to_none=False)  # zeros are dropped
    for micro in micros[added:]:
        window.add(micro)
        assert all(parameter.grad is None for parameter in step.model.parameters())
    window.close()
    found = snapshot(step)
    seed(faulty.BEGIN)
    faulty.windowed(twin, make_batch())
    assert_same(snapshot(twin), found)


@pytest.mark.parametrize("warm", [0, 5])
@pytest.mark.parametrize("fault", ["none", "forward", "mid", "end"])
@pytest.mark.parametrize("way", ["step", "window", "passes"])
def test_attributes_move_once_for_each_micro_batch(way: str, fault: str, warm: int) -> None:
    """However often one comes again, and whether there is a look before the first cut or a pass before."""
    options = VARIANTS["whole batch"] if way == "passes" else {"check": way == "step"}
    step = build("counting", warm=warm, **options)
    step.model.fault.arm(fault, 2, NO_MEMORY)
    report = take(step, way, make_batch())
    assert report.redone == (fault != "none")
    done = 4 * warm + report.micro_batches
    assert (step.model.calls, step.model.longest, len(step.model.table)) == (done, 2 * done, 2 * done)
    assert step.model.log[-report.micro_batches :] == [*report.cut]


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
    "torch": lambda model: torch.rand(()).item(),
    "Python": lambda model: random.random(),
    "NumPy": lambda model: np.random.rand(),
    "a generator of torch": lambda model: torch.rand((), generator=model.torch).item(),
    "a generator of NumPy": lambda model: model.numpy.random(),
    "a state of NumPy": lambda model: model.state.rand(),
    "a generator of Python": lambda model: model.python.random(),
}


@pytest.mark.parametrize("place", ["forward", "mid"])
@pytest.mark.parametrize("warm", [0, FIRST, EVERY + 1])
@pytest.mark.parametrize("kind", STREAMS)
def test_every_stream_that_a_forward_draws_from_comes_back(kind: str, warm: int, place: str) -> None:
    step, twin = (build(kind, model=Drawing, warm=warm) for _ in range(2))
    step.model.fault.arm(place, 1, NO_MEMORY)
    report = take(step, "step", make_batch())
    assert report.redone == 1
    faulty.assert_as_unfaulted(step, report, twin, make_batch())
