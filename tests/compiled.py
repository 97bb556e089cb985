"""A compiler that counts what it is asked to compile, and sees with how many rows that is called."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Counting:
    """A backend of `torch.compile` that runs what it is given as it is."""

    def __init__(self) -> None:
        torch.compiler.reset()
        self.graphs, self.rows = 0, list[int]()
        self.fails: Callable[[int], bool] = lambda rows: False

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs += 1
        held = {id(one) for one in inputs if isinstance(one, nn.Parameter)}
        place, *_ = (at for at, one in enumerate(inputs) if isinstance(one, Tensor) and id(one) not in held)

        def call(*arguments: Any) -> Any:
            self.rows.append(len(arguments[place]))
            if self.fails(self.rows[-1]):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return module(*arguments)

        return call

    def compile(self, model: nn.Module, **options: Any) -> Any:
        return torch.compile(model, backend=self, **options)
