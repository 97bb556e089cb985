"""Graphs in which a function runs a backward of its own."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anybatch.core.nested import runs_backward_inside


class Doubled(torch.autograd.Function):
    """Written in Python, and without a backward inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class Inside(torch.autograd.Function):
    """Asks autograd for its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.exp(), x, gradients[0])[0]


def test_reentrant_checkpoints_are_found_and_others_are_not() -> None:
    x = torch.ones(2, requires_grad=True)
    once = checkpoint(torch.exp, x, use_reentrant=False)
    assert not runs_backward_inside([once.sum(), x.sum(), torch.ones(())])
    assert not runs_backward_inside([Doubled.apply(x)])
    again: Any = checkpoint(torch.exp, Doubled.apply(once), use_reentrant=True)
    assert runs_backward_inside([x.sum(), (again * 2).sum()])


def test_functions_that_ask_autograd_are_found() -> None:
    x = torch.ones(2, requires_grad=True)
    assert runs_backward_inside([(Inside.apply(x) + 1).sum()])
