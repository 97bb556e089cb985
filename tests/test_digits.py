"""What short tensors were rounded from is known as long as they are what they were, and no longer."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.digits import Digits

FULL = torch.tensor([1 / 3, 2017.0])


def made(full: Tensor = FULL) -> tuple[Digits, Tensor]:
    digits = Digits()
    return digits, digits.shortened(full, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_digits_are_known(dtype: torch.dtype) -> None:
    full = FULL.to(dtype)
    digits, short = made(full)
    assert torch.equal(short, FULL.bfloat16())
    assert digits.behind(short) is full


def test_of_what_is_not_shortened_nothing_is_known() -> None:
    digits, short = made(FULL.bfloat16())
    assert digits.behind(short) is None
    assert digits.behind(torch.ones(2)) is None


WRITERS: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda one: one.mul_(1),
    "a part": lambda one: one[:1].fill_(0),
    "asked for gradients": lambda one: one.requires_grad_(),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITERS)
def test_of_what_was_written_to_nothing_is_known(name: str, mode: Callable[[], Any]) -> None:
    with mode():
        digits, short = made()
        WRITERS[name](short)
        assert digits.behind(short) is None


@pytest.mark.parametrize(
    "wait",
    [lambda one: one.retain_grad(), lambda one: one.register_hook(lambda _: None)],
    ids=["retain_grad", "register_hook"],
)
def test_who_waits_for_a_gradient_keeps_the_tensor(wait: Callable[[Tensor], Any]) -> None:
    digits, short = made(FULL.clone().requires_grad_())
    assert digits.behind(short) is not None
    wait(short)
    assert digits.behind(short) is None


def test_what_got_a_graph_later_is_another() -> None:
    """As an output of torch's older checkpoint."""
    with torch.no_grad():
        digits, short = made()
    short.requires_grad_()
    assert digits.behind(short) is None


def test_with_the_short_tensor_goes_what_is_known() -> None:
    full = FULL.clone()
    digits, short = made(full)
    gone = weakref.ref(full), weakref.ref(short)
    del full, short
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert digits.behind(FULL) is None


def test_all_may_be_forgotten() -> None:
    digits, short = made()
    digits.forget()
    assert digits.behind(short) is None
