"""sentence-transformers: any of its losses over the whole batch, cut into micro-batches"""

from collections.abc import Iterable
from typing import Any

from sentence_transformers.base.losses.merged_forward import column_merging_disabled
from torch import Tensor, nn

from anybatch.core import PlanError, StepReport
from anybatch.homes.split_loss import SplitLoss
from anybatch.step import BatchLoss


class CutLoss(nn.Module):
    """A loss of sentence-transformers over the whole batch, whose model runs in micro-batches.

    Loss and gradient are those of `loss` on the whole batch, for each loss that computes with
    `sentence_embedding` of its model. If the batch is cut, the model runs twice on each micro-batch. On
    several ranks the batches of all ranks are one batch: every other row is a negative.

    Args:
        loss: a loss of sentence-transformers, not one of its cached losses.
        micro_batch: rows per micro-batch. None for the whole batch, or, with `memory`, for what fits.
        memory: budget in bytes, as for `anybatch.BatchLoss`.
        options: further options of `anybatch.BatchLoss`.

    Raises:
        PlanError: the loss is cached already, or is a `CutLoss`.

    Example:
        >>> from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
        >>> def loss_of(model):
        ...     return CutLoss(MultipleNegativesRankingLoss(model), micro_batch=32)
    """

    def __init__(
        self, loss: nn.Module, micro_batch: int | None = None, memory: str | int | None = None, **options: Any
    ) -> None:
        super().__init__()
        if isinstance(loss, CutLoss) or type(loss).__name__.startswith("Cached"):
            raise PlanError(
                f"Expected a loss that does not cut its batch, got {type(loss).__name__}. Pass the loss of the "
                "same name without Cached."
            )
        self.loss = loss
        split = SplitLoss(loss, self._run, keys=("sentence_embedding",)).whole()
        self._batch_loss = BatchLoss(loss, split, micro_batch=micro_batch, memory=memory, **options)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the loss of the whole batch."""
        return self._batch_loss({"features": [*sentence_features], "labels": labels})

    @property
    def report(self) -> StepReport | None:
        """The report of the last batch; None before."""
        return self._batch_loss.report

    def _run(self, rows: Any, *, keeps: bool) -> Any:
        with column_merging_disabled():  # it would put several columns into one batch
            return self.loss(rows["features"], rows["labels"])
