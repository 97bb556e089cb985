"""The conditions of a cut: no rows that meet, unless that was asked for"""

import warnings
from typing import Any

from torch import nn

from anybatch.batchnorm import refuse_batch_norms
from anybatch.core import PlanError
from anybatch.engine import Plan, Task


def refuse_meetings(task: Task, plan: Plan) -> None:
    """Refuse BatchNorm in training mode in more than one micro-batch, unless `batch_norm` was chosen."""
    if plan.batch_norm is None:
        refuse_batch_norms(task.model, task.network.batch_norms, over_ranks=task.strategy.is_many)


def refuse_in_synced(task: Task, settings: Plan, *, has_budget: bool) -> None:
    """Refuse what runs a forward twice, or on one rank alone, where rows of all ranks meet in it."""
    plain = [norm for norm in task.network.batch_norms if not isinstance(norm, nn.SyncBatchNorm)]
    refuse_batch_norms(task.model, plain, over_ranks=True)
    asked = {
        "memory": has_budget,
        "recompute": bool(settings.blocks),
        f"precision={str(settings.precision)!r}": settings.precision.loss_scale is not None,
        f"non_finite={settings.non_finite!r}": settings.non_finite != "raise",
    }
    if found := [name for name, is_asked in asked.items() if is_asked]:
        raise PlanError(
            "Expected one forward and backward of each rank with SyncBatchNorm over ranks, got "
            f"{' and '.join(found)}, which may run one again while others wait in the layer. Leave it "
            'out, or use batch_norm="frozen" or ab.batch_norm_to_group_norm(model).'
        )


def warn_of_use(check: object, planning: Any) -> None:
    """Warn of batches that were never cut, though micro-batches of some size were asked for."""
    if check and planning.budget is None and planning.micro_batch is not None:
        warnings.warn(
            f"Expected batches of more than micro_batch={planning.micro_batch} rows, got 64 that were not "
            "cut. Pass whole batches: each call makes an update. Or leave micro_batch out.",
            stacklevel=5,
        )
