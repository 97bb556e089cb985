"""What must hold before a batch is cut: no meeting that was not allowed, and a loss that adds up."""

from functools import partial

from anybatch.batchnorm import refuse_batch_norms
from anybatch.core import Batch, TraceError
from anybatch.core import torch_private as private
from anybatch.engine import Plan, Task
from anybatch.losses import LEAST_ROWS, compare_cuts, refuse_what_does_not_add_up
from anybatch.memory import drop_left_fakes, find_device, parse_memory, undisturbed
from anybatch.planner import CUDA_GRANULE, device_of, quiet, roots_of, run_on_fakes


def has_room(memory: str | int | None, task: Task, batch: Batch, micro_batch: int, rows: int) -> bool:
    """Whether a look at the loss of so many rows fits into a budget.

    Where it cannot be traced nobody knows. Then what fits with a backward does without, and as few rows as
    tell anything are taken to fit: more are really run to plan such a step.

    Args:
        memory: as for a step; None for no limit.
        task: what a step is carried out on.
        batch: whose first rows are looked at.
        micro_batch: rows that fit in a step.
        rows: how many.
    """
    if memory is None:
        return True
    try:
        return bytes_of_look(task, batch, rows) <= parse_memory(memory, find_device(device_of(task, None)))
    except TraceError:
        return rows <= max(LEAST_ROWS, micro_batch)


def bytes_of_look(task: Task, batch: Batch, rows: int) -> int:
    """The most bytes alive during a look at the loss of so many rows, with the optimizers' state there.

    Raises:
        TraceError: it cannot be run without values.

    Example:
        >>> import torch
        >>> from anybatch import Step, Total
        >>> from anybatch.core.batch import TensorBatch
        >>> model = torch.nn.Linear(3, 2)
        >>> def loss(model, micro):
        ...     return Total(model(micro).sum(), len(micro))
        >>> step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> bytes_of_look(step.task(), TensorBatch(torch.zeros(9, 3)), 5)  # weights, rows, outputs and sum
        184
    """

    def look(plan: Plan, fake: Task, logical: Batch) -> None:
        compare_cuts(fake.loss, fake.model, fake.modules, logical)

    target = device_of(task, None)
    with (
        private.disable_current_modes(),
        undisturbed([*task.parameters, *task.others], roots=roots_of(task, batch)) as noted,
    ):
        recording, _, _ = run_on_fakes(
            Plan(rows=rows, micro_batch=rows),
            rows=batch.rows,
            task=quiet(task),
            batch=batch,
            target=target,
            modules=list(dict.fromkeys((*task.modules, *noted.modules))),
            idle=frozenset(),
            run=look,
        )
        noted.put_back()
        drop_left_fakes()
    return recording.peak(CUDA_GRANULE if target.type == "cuda" else 1)


class Guard:
    """Refuses a cut that would change the result.

    Args:
        batch_norm: what a step does with BatchNorm in training mode; None for nothing.
        check: whether a loss of the caller's own is looked at before the first update.
        memory: the budget that this look has to keep to, too; None for none.
    """

    def __init__(self, *, batch_norm: str | None, check: bool, memory: str | int | None = None) -> None:
        self.batch_norm, self._memory = batch_norm, memory
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
            fits = partial(has_room, self._memory, task, batch, micro_batch)
            said = refuse_what_does_not_add_up(
                task.loss, task.model, task.modules, batch, micro_batch, fits=fits
            )
            self._looks = 0 if said else self._looks - 1

    def refuse_meetings(self, task: Task) -> None:
        """Where there is more than one micro-batch: no BatchNorm in training mode unless one was chosen."""
        if self.batch_norm is None:
            refuse_batch_norms(task.model, task.batch_norms)
