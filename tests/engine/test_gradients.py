"""Sums of gradients: each in its own memory, nothing left hanging. That they add up is a law."""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step
from anybatch.engine import Apart
from anybatch.engine.gradients import InPlace, finish
from tests.options import flat

Ways = InPlace | Apart


def apart(parameters: Sequence[nn.Parameter], **options: Any) -> Apart:
    plain = {"dtype": None, "is_looked_at": False, "is_whole": True}
    return Apart(parameters, names=("loss",), **plain | options)


# Each way to accumulate; those that are not whole take a gradient as soon as it is finished.
WAYS: dict[str, Callable[..., Ways]] = {
    "in place": lambda parameters: InPlace(parameters, "loss"),
    "apart, one by one": lambda parameters: apart(parameters, is_whole=False),
    "apart, as a whole": apart,
    "looked at": lambda parameters: apart(parameters, is_looked_at=True),
}


def add(gradients: Ways, value: Tensor) -> None:
    gradients.begin()
    gradients.add([value], [torch.ones((), dtype=value.dtype)])


def found(gradients: Ways, factors: Mapping[str, float] | None = None) -> dict[nn.Parameter, Tensor]:
    return finish(gradients.parted(), factors or {})


@pytest.mark.parametrize("mode", [{}, {"accumulate": torch.float64}], ids=str)
def test_an_abandoned_window_leaves_parameters_as_anybody_finds_them(mode: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    batch = (torch.randn(4, 3), torch.randn(4, 2))

    def make_step() -> Step:
        return Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), **flat(mode))

    window = make_step().window()
    window.add(batch)
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()  # somebody else's, while it is open
    expected = torch.autograd.grad(nn.functional.mse_loss(model(batch[0]), batch[1]), model.weight)[0]
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, expected)
    model.zero_grad()
    assert make_step()(batch).updated  # another step on the same parameters
    gone = weakref.ref(window)
    del window
    gc.collect()
    assert gone() is None
    assert not model.weight._post_accumulate_grad_hooks


SHARED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "with the cotangent": lambda a, b, _: a.sum() + b[0].view(()),
    "with each other": lambda a, b, _: (a.view(-1) + b.view(-1)).square().sum(),
    "parts of one": lambda a, b, _: torch.cat([a, b]).square().sum(),
    "with a leaf of nobody's": lambda a, b, leaf: ((a.view(-1) + leaf.view(-1)) * b).square().sum(),
    "with what a hook holds": lambda a, b, _: (a * b).sum(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHARED)
def test_first_gradients_that_share_memory_are_summed_apart(name: str, way: str) -> None:
    a, b, leaf = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(3))
    if name == "with what a hook holds":
        held = torch.zeros(2)
        a.register_hook(lambda gradient: held.copy_(gradient).detach())
    gradients = WAYS[way]([a, b])
    cotangent = torch.ones(())  # the same for all micro-batches
    for _ in range(3):
        gradients.begin()
        gradients.add([SHARED[name](a, b, leaf)], [cotangent])
    total = found(gradients)
    if isinstance(gradients, Apart):
        gradients.close()
    once = torch.autograd.grad(SHARED[name](a, b, leaf), [a, b])
    assert [total[one].tolist() for one in (a, b)] == [(3 * one).tolist() for one in once]
    assert cotangent.item() == 1.0
