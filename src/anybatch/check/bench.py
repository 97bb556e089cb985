"""The bench of a check: all passes start from the same values, in float64 if they run, and leave no trace"""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from anybatch.core import Batch, SampleBatch, TensorBatch, tree
from anybatch.losses import module_of
from anybatch.state import ObjectState, plain_kernels, rng
from anybatch.trial import Replayed

T = TypeVar("T")


class OutOfTime(BaseException):
    """Raised in an operation after the deadline; no `Exception`, so that no model catches it."""


class Draws(Replayed):
    """The random draws of a whole batch, replayed for its parts."""

    def __init__(self, *, without_dropout: bool = False, is_wide: bool = False) -> None:
        super().__init__(without_dropout=without_dropout)
        self.is_wide, self.deadline = is_wide, math.inf
        with rng.preserved():
            rng.seed_process(rng.derive_seed(0, "check"))  # no seed that a model may set itself
            self.recorded.start = rng.capture(rng.of_process())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if time.perf_counter() > self.deadline:
            raise OutOfTime
        if self.is_wide and kwargs.get("dtype") is torch.float32 and "_to_copy" in func.__name__:
            kwargs = {**kwargs, "dtype": torch.float64}
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class CheckBench:
    """The caller's model and loss, the dtype and the random draws of passes."""

    model: nn.Module
    loss: Any
    draws: Draws
    dtype: torch.dtype | None  # of all floating tensors; None for their own
    batch_norm: Any  # as for `anybatch.Step`
    deadline: float  # of what runs `in_time`, on the clock of `time.perf_counter`

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name."""
        return named_parameters(self.model, self.loss)

    @contextmanager
    def fresh(self) -> Generator[None]:
        """Give all tensors values of their own and replay draws; put back these and what has changed."""
        inside = module_of(self.loss)
        noted = ObjectState([self.model, self.loss, *self.model.modules(), *inside.modules()])
        held = [(t, t.data) for t in noted.found.values if isinstance(t, Tensor) and _is_copied(t)]
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype or default)  # of tensors that the model makes: states, masks
        try:
            for tensor, data in held:
                tensor.grad, tensor.data = None, widen(data.clone(), self.dtype)
            self.draws.is_watching = True
            with torch.enable_grad(), plain_kernels(), self.draws:
                yield
        finally:
            torch.set_default_dtype(default)
            for tensor, data in held:
                tensor.grad, tensor.data = None, data
            noted.put_back()

    def own(self, batch: Batch) -> Batch:
        """Return copies of rows, with floating tensors in the dtype of the bench."""
        copy = partial(tree.map_leaves, lambda leaf: widen(leaf.detach().clone(), self.dtype))
        if isinstance(batch, SampleBatch):
            collate = batch.collate
            return SampleBatch(batch.given, lambda samples: copy(collate(samples)), batch.order)
        return TensorBatch(copy(batch.whole))

    def in_time(self, look: Callable[[], T]) -> T | None:
        """Return the result of a function; None if it comes to the deadline."""
        self.draws.deadline = self.deadline
        try:
            return look()
        except OutOfTime:
            return None
        finally:
            self.draws.deadline = math.inf


def _is_copied(tensor: Tensor) -> bool:
    is_odd = nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.is_inference()
    return not is_odd and tensor.is_leaf and tensor.layout is torch.strided


def named_parameters(model: nn.Module, loss: object) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of the model by name, and those of the loss under `loss.`."""
    named = dict(model.named_parameters())
    own = set(named.values())
    named |= {f"loss.{name}": p for name, p in module_of(loss).named_parameters() if p not in own}
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def widen(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a real floating tensor to a dtype; return any other unchanged."""
    return value if dtype is None or not value.is_floating_point() else value.to(dtype)
