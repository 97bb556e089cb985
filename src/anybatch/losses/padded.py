"""A compiled model that sees one number of rows: fewer are filled up, and cut off from what it returns."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import BatchError, LossError, tree

ANY_ROWS = (
    "Compile it for any number of rows, with torch.compile(..., dynamic=True), or pass batches that "
    "micro_batch divides (drop_last=True)."
)


class PaddedModel:
    """Stands for a model in a loss. Of fewer rows the last one is repeated, so that nothing is compiled anew.

    The outputs have the rows that came: no gradient flows into the others. A repeated row is finite where the
    row is, which zeros need not be. More rows than `rows` go through as they are.

    Args:
        model: in which rows do not meet.
        rows: rows that go through the model. 0 for as many as come.
        shares_numbers: whether an output without axes is one that all rows share, as `ab.WholeBatch` allows.
        tell: called with the outputs of each call.

    Raises:
        LossError: a tensor has no entry per row in its first axis, so it cannot be filled up or cut off.

    Example:
        >>> model = PaddedModel(nn.Linear(3, 2), 8)
        >>> model(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        *,
        shares_numbers: bool = False,
        tell: Callable[[Any], object] = lambda outputs: None,
    ) -> None:
        self._model, self._rows, self._shares_numbers, self._tell = model, rows, shares_numbers, tell

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        first = next(tree.tensors_in((args, kwargs)), None)
        came = 0 if first is None or not first.dim() else len(first)
        is_short = 0 < came < self._rows
        if is_short or not torch.is_grad_enabled():
            args = tuple([self._filled(one, came) for one in args])
            kwargs = {name: self._filled(one, came) for name, one in kwargs.items()}
        outputs = self._model(*args, **kwargs)
        outputs = self._cut(outputs, came) if is_short else outputs
        self._tell(outputs)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _filled(self, value: Any, came: int) -> Any:
        def fill(leaf: Tensor) -> Tensor:
            if came >= self._rows:
                return leaf.detach()  # no view: compiled code would look at what it is a view of
            if not leaf.dim():
                return leaf
            if len(leaf) != came:
                raise self._refused("input", leaf, came)
            return torch.cat([leaf, leaf[-1:].expand(self._rows - came, *leaf.shape[1:])])

        is_flag = next(tree.tensors_in(value), None) is None
        return value if is_flag else tree.map_leaves(fill, value)

    def _cut(self, outputs: Any, came: int) -> Any:
        def cut(leaf: Tensor) -> Tensor:
            if leaf.dim() and len(leaf) == self._rows:
                return leaf[:came]
            if not leaf.dim() and self._shares_numbers:
                return leaf
            raise self._refused("output", leaf, self._rows)

        try:
            return tree.map_leaves(cut, outputs)
        except BatchError as error:
            raise LossError(
                "Expected nothing but tensors and None from a compiled model whose rows are filled up, got "
                f"others in its {type(outputs).__name__}. {ANY_ROWS}"
            ) from error

    def _refused(self, what: str, leaf: Tensor, rows: int) -> LossError:
        return LossError(
            f"Expected every {what} of a compiled model whose rows are filled up to {self._rows} to have one "
            f"entry per row in its first axis, {rows} of them, got shape {tuple(leaf.shape)}. {ANY_ROWS}"
        )
