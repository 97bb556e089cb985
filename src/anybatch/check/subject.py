"""The caller's model and loss in a pass: in float64 if they run in it, and as before when it is over"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.losses import module_of
from anybatch.state import ObjectState


class Subject:
    """Model and loss, with tensors in `dtype` unless it is None; every pass begins in the same state."""

    def __init__(self, model: nn.Module, loss: object, dtype: torch.dtype | None) -> None:
        self.model, self.loss, self.dtype = model, loss, dtype
        self.named = named_parameters(model, loss)

    @contextmanager
    def fresh(self) -> Generator[None]:
        """Give all tensors that they reach values of their own; put back these and what has changed."""
        inside = module_of(self.loss)
        noted = ObjectState([self.model, self.loss, *self.model.modules(), *inside.modules()])
        reached = [t for t in noted.found.values if isinstance(t, Tensor)]
        reached += [*self.model.parameters(), *self.model.buffers(), *inside.parameters()]
        held = [(t, t.data) for t in {id(t): t for t in reached if is_copied(t)}.values()]
        try:
            for tensor, data in held:
                tensor.grad = None
                tensor.data = widen(data.clone(), self.dtype)
            yield
        finally:
            for tensor, data in held:
                tensor.grad, tensor.data = None, data
            noted.put_back()


def is_copied(tensor: Tensor) -> bool:
    """Return True for a tensor with values that a pass may change."""
    is_odd = nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.is_inference()
    return not is_odd and tensor.is_leaf and tensor.layout is torch.strided


def named_parameters(model: nn.Module, loss: object) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of the model by name, and those of the loss under `loss.`."""
    named = dict(model.named_parameters())
    own = set(named.values())
    named |= {f"loss.{name}": p for name, p in module_of(loss).named_parameters() if p not in own}
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def widen(value: Any, dtype: torch.dtype | None) -> Any:
    """Convert a real floating tensor to a dtype; return any other unchanged."""
    return value if dtype is None or not value.is_floating_point() else value.to(dtype)
