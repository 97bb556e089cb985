"""sentence-transformers: any of its losses over the whole batch, whose model runs in micro-batches."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from anybatch.core import PlanError, loaded
from anybatch.homes.entries import apart
from anybatch.homes.split_loss import SplitLoss
from anybatch.step import BatchLoss


class CutLoss(nn.Module):
    """A loss of sentence-transformers over the whole batch, whose model runs in micro-batches.

    Loss and gradient are those of `loss` on the whole batch, for each loss that computes with the
    `sentence_embedding` of its model. If the batch is cut, the model runs twice on each micro-batch. On
    several ranks the batches of all ranks are one batch, so rows of other ranks are negatives, too.

    Args:
        loss: a loss of sentence-transformers, not one of its cached losses.
        options: micro_batch, memory and further options of `anybatch.BatchLoss`.

    Attributes:
        batch_loss: the `anybatch.BatchLoss`; its `report` is that of the last batch.

    Raises:
        PlanError: the loss is cached already, or is a `CutLoss`.

    Example:
        >>> def loss_of(model, losses):
        ...     return CutLoss(losses.MultipleNegativesRankingLoss(model), micro_batch=32)
    """

    def __init__(self, loss: nn.Module, **options: Any) -> None:
        super().__init__()
        if isinstance(loss, CutLoss) or type(loss).__name__.startswith("Cached"):
            raise PlanError(
                f"Expected a loss that does not cut its batch, got {type(loss).__name__}. Pass the loss of "
                "the same name without Cached."
            )
        self.loss, self._joined = loss, list[Any]()  # of each column: gives back what is no tensor
        self.batch_loss = BatchLoss(
            loss, SplitLoss(loss, self._run, ("sentence_embedding",)).whole(), **options
        )

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the loss of the whole batch."""
        parts = [apart(column, has_lists=False) for column in sentence_features]
        self._joined = [joined for _, joined in parts]
        return self.batch_loss({"features": [columns for columns, _ in parts], "labels": labels})

    def _run(self, rows: Any, *, keeps: bool) -> Any:
        merging = loaded("sentence_transformers.base.losses.merged_forward")
        with merging.column_merging_disabled() if merging else nullcontext():  # several columns in one batch
            columns = zip(self._joined, rows["features"], strict=True)
            return self.loss([joined(column) for joined, column in columns], rows["labels"])
