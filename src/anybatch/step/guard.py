"""What must hold before a batch is cut: no meeting that was not allowed, and a loss that adds up."""

from anybatch.batchnorm import refuse_batch_norms
from anybatch.core import Batch
from anybatch.engine import Task
from anybatch.losses import refuse_what_does_not_add_up


class Guard:
    """Refuses a cut that would change the result.

    Args:
        batch_norm: what a step does with BatchNorm in training mode; None for nothing.
        check: whether a loss of the caller's own is looked at before the first update.
        has_budget: whether that look takes no more rows than fit, or as few as tell anything.
    """

    def __init__(self, *, batch_norm: str | None, check: bool, has_budget: bool = False) -> None:
        self.batch_norm, self._has_budget = batch_norm, has_budget
        self._looks = 3 if check else 0  # some batches tell nothing

    def before_cut(self, task: Task, batch: Batch, micro_batch: int) -> None:
        """Refuse what would change the result.

        Raises:
            PlanError: rows meet in the model.
            LossError: the loss does not add up.
        """
        self.refuse_meetings(task)
        self.check_loss(task, batch, micro_batch)

    def check_loss(self, task: Task, batch: Batch, micro_batch: int) -> None:
        """Before the first update: whether a loss of the caller's own adds up. Once, if the rows can tell."""
        if self._looks:
            most = micro_batch if self._has_budget else batch.rows
            said = refuse_what_does_not_add_up(
                task.loss, task.model, task.modules, batch, micro_batch, most=most
            )
            self._looks = 0 if said else self._looks - 1

    def refuse_meetings(self, task: Task) -> None:
        """Where there is more than one micro-batch: no BatchNorm in training mode unless one was chosen."""
        if self.batch_norm is None:
            refuse_batch_norms(task.model, task.batch_norms)
