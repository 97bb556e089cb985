"""What a step finds and must not lose: gradients, and attributes that its forward changes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import anybatch as ab
from anybatch.core.errors import NonFiniteLossError, WindowError
from anybatch.testing import relative_error
from tests.faults.faulty import (
    BEGIN,
    SIZE,
    ZOO,
    Net,
    assert_same,
    build,
    by_hand,
    everything,
    make_batch,
    parts,
    said,
    seed,
    windowed,
)

EXACT = 1e-12  # additions in another order, in float64


def give_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Somebody's own, none of them zero."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


# ---- gradients found before a step


@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("kind", [kind for kind in ZOO if kind not in ("float64 sums", "compensated")])
def test_gradients_found_before_an_uncut_step_are_added_to_the_bit(
    kind: str, clip_norm: float | None
) -> None:
    step, twin = (build(kind, micro_batch=None, clip_norm=clip_norm) for _ in range(2))
    give_gradients(step.model)
    give_gradients(twin.model)
    by_hand(twin, make_batch(), (16,), clip_norm)
    other = everything(twin)
    seed(BEGIN)
    step(make_batch())
    assert_same(other, everything(step))


@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("kind", ZOO)
def test_gradients_found_before_a_cut_step_are_added(kind: str, clip_norm: float | None) -> None:
    step, twin = (build(kind, clip_norm=clip_norm, dtype=torch.float64) for _ in range(2))
    give_gradients(step.model)
    give_gradients(twin.model)
    by_hand(twin, make_batch(dtype=torch.float64), (SIZE,) * 4, clip_norm)
    seed(BEGIN)
    step(make_batch(dtype=torch.float64))
    assert relative_error(list(step.model.parameters()), list(twin.model.parameters())) <= EXACT
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_gradients_found_are_in_the_norm_that_is_reported() -> None:
    step, twin = build("dropout", clip_norm=1e9), build("dropout", clip_norm=1e9)
    give_gradients(step.model)
    assert step(make_batch()).grad_norm > twin(make_batch()).grad_norm + 1


@pytest.mark.parametrize("micro_batch", [SIZE, None])
def test_gradients_found_that_are_not_finite_are_refused_and_stay(micro_batch: int | None) -> None:
    step = build("dropout", micro_batch=micro_batch)
    found = give_gradients(step.model)
    found["leave.weight"][0] = math.nan
    before = everything(step)
    with pytest.raises(NonFiniteLossError):
        step(make_batch())
    assert_same(before, everything(step))


@pytest.mark.parametrize("micro_batch", [SIZE, None])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_step_that_fails_or_is_skipped_gives_gradients_back(policy: str, micro_batch: int | None) -> None:
    step = build("dropout", micro_batch=micro_batch, non_finite=policy)
    found = give_gradients(step.model)
    values = {name: gradient.clone() for name, gradient in found.items()}
    x, y = make_batch()
    x[9, 0] = math.nan
    if policy == "skip":
        assert not step((x, y)).updated
    else:
        with pytest.raises(NonFiniteLossError):
            step((x, y))
    assert all(step.model.get_parameter(name).grad is gradient for name, gradient in found.items())
    assert_same(values, found)


@pytest.mark.parametrize("way", ["step", "uncut", "window"])
def test_parameters_that_a_step_does_not_train_keep_their_gradients(way: str) -> None:
    """They take part in the forward and require a gradient, or are frozen."""
    model = Net("dropout")
    model.inner.bias.requires_grad_(False)
    trained = [model.enter.weight, model.enter.bias]
    step = ab.Step(
        model,
        nn.CrossEntropyLoss(),
        SGD(trained, 0.1),
        micro_batch=None if way == "uncut" else 4,
        check=False,
    )
    found = give_gradients(model)
    model.large.grad = None
    for parameter in trained:
        parameter.grad = None
    others = {name: found[name] for name in found if not name.startswith(("enter", "large"))}
    values = {name: gradient.clone() for name, gradient in others.items()}
    if way == "window":
        with step.window() as window:
            for micro in parts(make_batch()):
                window.add(micro)
                assert all(model.get_parameter(name).grad is others[name] for name in others)
            assert window.close().updated
    else:
        assert step(make_batch()).updated
    assert all(model.get_parameter(name).grad is others[name] for name in others)
    assert_same(values, others)
    assert [parameter.grad for parameter in (*trained, model.large)] == [None] * 3


# ---- gradients and windows


@pytest.mark.parametrize("added", [0, 2])
@pytest.mark.parametrize("kind", ["dropout", "tied", "float64 sums", "compensated"])
def test_a_gradient_that_a_window_finds_is_refused_by_name(kind: str, added: int) -> None:
    step, twin = build(kind), build(kind)
    window, micros = step.window(), parts(make_batch())
    for micro in micros[:added]:
        window.add(micro)
    step.model.leave.weight.grad = torch.ones_like(step.model.leave.weight)
    before = everything(step)
    with pytest.raises(WindowError, match=r"leave\.weight"):
        window.add(micros[added])
    assert_same(before, everything(step))
    step.optimizers[0].zero_grad(set_to_none=False)  # zeros are dropped
    for micro in micros[added:]:
        window.add(micro)
        assert all(parameter.grad is None for parameter in step.model.parameters())
    window.close()
    found = everything(step)
    seed(BEGIN)
    windowed(twin, make_batch(), (SIZE,) * 4)
    assert_same(everything(twin), found)


def test_a_gradient_found_at_close_is_refused() -> None:
    step = build("dropout")
    window = step.window()
    window.add(make_batch())
    step.model.leave.weight.grad = torch.ones_like(step.model.leave.weight)
    with pytest.raises(WindowError):
        window.close()


# ---- attributes


class Cached(nn.Module):
    """Changes tensors that are attributes: one in place, one in a list, one that is deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.average = torch.zeros(())
        self.seen: list[Any] = [0]
        self.first, self.fails = torch.ones(()), False

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().sum())
        if hasattr(self, "first"):
            del self.first
        self.average += x.detach().mean()
        if self.fails:
            raise ValueError("no")
        return self.layer(x)


@pytest.mark.parametrize("warm", [0, 5])
@pytest.mark.parametrize("way", ["step", "window"])
def test_attributes_come_back_or_the_error_names_them(way: str, warm: int) -> None:
    model = Cached()
    step = ab.Step(model, nn.CrossEntropyLoss(), SGD(model.parameters(), 0.1), micro_batch=2, check=False)
    batch = torch.randn(8, 3), torch.randint(4, (8,))
    for _ in range(warm):
        step(batch)
    model.first, model.fails = torch.ones(()), True
    seen, first, average = list(model.seen), model.first, model.average.clone()
    act = step if way == "step" else step.window().add
    with pytest.raises(ValueError, match="no") as caught:
        act(batch)
    assert model.first is first
    assert len(model.seen) == len(seen)
    assert all(one is other for one, other in zip(model.seen, seen, strict=True))
    # Attributes are noted by reference: one that is changed in place cannot be put back.
    assert torch.equal(model.average, average) or "average" in said(caught.value)
