"""Random rows: the same for the same seed, in any dtype."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FEATURES = 3
CLASSES = 5
MASKS = ("none", "some", "rows", "half", "one", "all")


class Draw:
    """The rows of one batch, drawn one tensor after the other; `mask` says which targets count."""

    def __init__(
        self, rows: int, *, seed: int, mask: str, dtype: torch.dtype, options: Mapping[str, Any]
    ) -> None:
        self.rows, self.mask, self.dtype, self.options = rows, mask, dtype, options
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.rows, *shape, generator=self._generator, dtype=torch.float64).to(self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return self._uniform(self.rows, *shape).to(self.dtype)

    def signs(self, *shape: int) -> Tensor:
        return self.uniform(*shape).round() * 2 - 1

    def counts(self, *shape: int) -> Tensor:
        return (self.uniform(*shape) * 4).round()

    def probabilities(self, classes: int, *shape: int) -> Tensor:
        return self.normal(classes, *shape).softmax(1)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (self.rows, *shape), generator=self._generator)

    def classes(self, *shape: int) -> Tensor:
        """Class indices; where the mask says so, the index that the loss ignores."""
        target, ignored = self.integers(0, CLASSES, *shape), self.options.get("ignore_index", -100)
        target = torch.where(target == ignored, (target + 1) % CLASSES, target)
        return torch.where(self.valid(*shape), target, ignored)

    def valid(self, *shape: int) -> Tensor:
        """True where a target counts."""
        shape = (self.rows, *shape)
        first = torch.zeros(shape, dtype=torch.bool)
        first.view(-1)[self.integers(0, first.numel())[0]] = True
        by_row = (self._uniform(self.rows) < 0.6).view(-1, *[1] * (len(shape) - 1)).expand(shape)
        late = (torch.arange(self.rows) >= self.rows // 2).view(by_row.shape[0], *[1] * (len(shape) - 1))
        return {
            "none": torch.ones(shape, dtype=torch.bool),
            "some": (self._uniform(*shape) < 0.6) | first,
            "rows": by_row | first,
            "half": late.expand(shape),
            "one": first,
            "all": torch.zeros(shape, dtype=torch.bool),
        }[self.mask]

    def per_class(self) -> Tensor:
        """Weights of classes, one of them 0."""
        weights = self._uniform(CLASSES) + 0.1
        weights[1] = 0
        return weights.to(self.dtype)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator, dtype=torch.float64)
