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
from anybatch.core.errors import NonFiniteLossError, OutOfMemoryError, WindowError
from anybatch.testing import relative_error
from tests import snapshots
from tests.faults import faulty
from tests.faults.faulty import NO_MEMORY, ROWS, SIZE, VARIANTS, Net, build, make_batch, parts, seed, take
from tests.snapshots import DRAWN, assert_same, changes, same, same_as_before, snapshot

EXACT = 1e-12  # additions in another order, in float64


def give_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Somebody's own, none of them zero."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


# ---- gradients found before a step


@pytest.mark.parametrize("micro_batch", [None, SIZE])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("kind", faulty.ZOO)
def test_gradients_found_before_a_step_are_added(
    kind: str, clip_norm: float | None, micro_batch: int | None
) -> None:
    """To the bit where it is not cut, and sums are kept as the gradients are."""
    is_same = micro_batch is None and kind != "float64 sums"
    dtype = torch.float32 if is_same else torch.float64
    step, twin = (build(kind, micro_batch=micro_batch, clip_norm=clip_norm, dtype=dtype) for _ in range(2))
    for one in (step, twin):
        give_gradients(one.model)
    faulty.by_hand(
        twin, make_batch(dtype=dtype), (micro_batch or ROWS,) * (ROWS // (micro_batch or ROWS)), clip_norm
    )
    other = snapshot(twin)
    seed(faulty.BEGIN)
    step(make_batch(dtype=dtype))
    if is_same:
        assert_same(other, snapshot(step))
    assert relative_error(list(step.model.parameters()), list(twin.model.parameters())) <= EXACT
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_gradients_found_are_in_the_norm_that_is_reported() -> None:
    step, twin = build("dropout", clip_norm=1e9), build("dropout", clip_norm=1e9)
    give_gradients(step.model)
    assert step(make_batch()).grad_norm > twin(make_batch()).grad_norm + 1


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


@pytest.mark.parametrize("way", ["step", "uncut", "window"])
def test_parameters_that_a_step_does_not_train_keep_their_gradients(way: str) -> None:
    """They take part in the forward and require a gradient, or are frozen."""
    model, size = Net("dropout"), None if way == "uncut" else SIZE
    model.inner.bias.requires_grad_(False)
    trained = [model.enter.weight, model.enter.bias]
    sgd, options = SGD(trained, 0.1), ab.Options(check=False)
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd, micro_batch=size, options=options)
    found = give_gradients(model)
    for parameter in (*trained, model.large):
        parameter.grad = None
    others = {name: found[name] for name in found if not name.startswith(("enter", "large"))}
    values = {name: gradient.clone() for name, gradient in others.items()}
    if way == "window":
        with step.window() as window:
            for micro in parts(make_batch()):
                window.add(micro)
                assert all(model.get_parameter(name).grad is others[name] for name in others)
    else:
        assert step(make_batch()).updated
    assert all(model.get_parameter(name).grad is others[name] for name in others)
    assert_same(values, others)
    assert [parameter.grad for parameter in (*trained, model.large)] == [None] * 3


def test_gradients_found_come_back_unclipped_where_the_update_fails() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    model.extra = nn.Parameter(torch.ones(3))
    model.extra.grad = torch.full((3,), 5.0)
    step = ab.Step(model, nn.MSELoss(), torch.optim.Adam(model.parameters()), micro_batch=2, clip_norm=0.01)
    with pytest.raises(RuntimeError, match="sparse"):
        step((torch.tensor([0, 1, 2, 3]), torch.ones(4, 1)))
    assert model.extra.grad.tolist() == [5.0, 5.0, 5.0]


# ---- gradients and windows


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


# ---- attributes and buffers that a forward changes


def caching(model: Any, args: tuple[Tensor]) -> None:
    """Change tensors that are attributes: one in place, one in a list, one that is deleted."""
    model.history.append(args[0].detach().sum())
    vars(model).pop("first", None)
    model.average += args[0].detach().mean()


@pytest.mark.parametrize("warm", [0, 5])
@pytest.mark.parametrize("way", ["step", "window"])
def test_attributes_come_back_or_the_error_names_them(way: str, warm: int) -> None:
    step = build("counting")
    step.model.history, step.model.average = [0], torch.zeros(())
    step.model.register_forward_pre_hook(caching)
    for index in range(warm):
        step(make_batch(index))
    step.model.first = torch.ones(())
    step.model.fault.arm("end", int(way == "step"), ValueError("no"))
    act = step if way == "step" else step.window().add
    # Attributes are noted by reference: one that is changed in place cannot be put back, and is named.
    with pytest.raises(ValueError, match="no") as caught, same_as_before(step, "attribute .average"):
        act(make_batch())
    assert "average" in faulty.said(caught.value) or not step.model.average


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


@pytest.mark.parametrize("policy", ["raise", "drop", "skip"])
@pytest.mark.parametrize("way", ["step", "window"])
def test_a_table_that_grows_does_not_keep_a_bad_row_coming_for_ever(way: str, policy: str) -> None:
    step = build("counting", non_finite=policy)
    x, y = make_batch()
    x[9, 0] = math.nan
    if policy == "drop":
        assert take(step, way, (x, y)).dropped == SIZE
        assert (step.model.calls, len(step.model.table)) == (3, 6)
        return
    expected = pytest.raises(NonFiniteLossError) if policy == "raise" else nullcontext()
    with same_as_before(step, *DRAWN), expected:
        assert not take(step, way, (x, y)).updated


def restless(model: Any, _: Any) -> None:
    """Put buffers in the place of others, add and remove some; one cannot be written to."""
    model.table = model.table + 1
    model.empty = torch.ones(3)
    model.register_buffer("added", torch.ones(1))
    model._buffers.pop("removed", None)


def test_buffers_that_a_forward_puts_in_place_adds_or_removes_come_back() -> None:
    step = build()
    for name, value in (("empty", None), ("removed", torch.ones(2)), ("fixed", torch.ones(1).expand(9))):
        step.model.register_buffer(name, value)
    step.model.register_forward_pre_hook(restless)
    table = step.model.table
    with same_as_before(step):
        step.model.fault.arm("end", 1, ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            step(make_batch())
        window = step.window()
        window.add(make_batch())
        window.discard()
    assert step.model.table is table


def test_a_cache_that_is_renewed_before_each_step_comes_back() -> None:
    step = build("counting")
    for number in range(6):
        step.model.log = []
        step.model.fault.arm("forward", 1, NO_MEMORY, number == 5)
        report = step(make_batch())
    assert report.redone == 1
    assert step.model.log == [*report.cut]


def test_a_tensor_in_a_dict_that_a_forward_writes_to_is_named() -> None:
    step = build()
    step.model.store = {"count": torch.zeros(1)}
    step.model.register_forward_pre_hook(lambda model, _: model.store["count"].add_(1) and None)
    step.model.fault.arm("forward", 1, NO_MEMORY)
    with pytest.raises(OutOfMemoryError, match="store"):
        step(make_batch())


# ---- random streams


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


def after(steps: int, kind: str, before: str = "", change_at: int = 0) -> ab.Step:
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
        *[(kind, steps, "", 0) for kind in STREAMS for steps in (0, 4)],
        ("Python", 8, "nothing", 5),  # it begins to draw later, and a looking step sees it
        ("torch", 4, "nothing", 4),  # nobody has seen it: the step begins again
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
    faulty.assert_as_unfaulted(step, report, twin, make_batch())


# ---- the snapshot


def momentum(step: ab.Step) -> dict[str, Any]:
    return next(iter(step.optimizers[0].state.values()))


CHANGES: dict[str, Callable[[ab.Step], Any]] = {
    "buffer 1.running_mean": lambda step: step.model[1].running_mean.add_(1e-6),
    "parameter 0.weight": lambda step: step.model[0].weight.data[0, 0].add_(1e-6),
    "gradient 0.weight": lambda step: step.model[0].weight.grad.add_(1),
    "identity 4.bias": lambda step: setattr(step.model[4].bias, "grad", step.model[4].bias.grad.clone()),
    "buffer 1.new": lambda step: step.model[1].register_buffer("new", torch.ones(1)),
    "mode of 3": lambda step: step.model[3].eval(),
    "0": lambda step: step.optimizers[0].param_groups[0].update(lr=0.2),
    "optimizer 0": lambda step: momentum(step)["momentum_buffer"].add_(1),
    "scheduler 0": lambda step: setattr(step.schedulers[0], "last_epoch", 9),
    "random state": lambda step: torch.rand(1),
    "on gradient 0.weight": lambda s: s.model[0].weight.register_post_accumulate_grad_hook(print),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen_alone(name: str) -> None:
    step = snapshots.make_step()
    before = snapshot(step)
    assert changes(before, snapshot(step)) == []
    CHANGES[name](step)
    (changed,) = changes(before, snapshot(step))
    assert changed.endswith(name)


def test_sameness_is_of_bits() -> None:
    nan = torch.tensor(float("nan"))
    assert same({"a": [nan, float("nan")]}, {"a": [nan.clone(), float("nan")]})
    assert not same(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same((1, 2), [1, 2])
    assert not same({"a": 1}, {"a": 1, "b": 2})
