"""What holds while micro-batches go through the model: BatchNorms are frozen, blocks are not kept."""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from anybatch.batchnorm import BatchNorm, frozen_batch_norms
from anybatch.engine.plan import Plan
from anybatch.engine.task import Task
from anybatch.recompute import apply_policies

Blocks = tuple[tuple[str, str], ...]


def conditions(plan: Plan, task: Task, blocks: Blocks) -> AbstractContextManager[None]:
    """What holds while micro-batches go through the model: some BatchNorms are frozen, blocks recomputed."""
    norms = task.batch_norms if plan.batch_norm == "frozen" else ()
    return _conditions(norms, task.model, blocks) if norms or blocks else nullcontext()


@contextmanager
def _conditions(norms: Sequence[BatchNorm], model: nn.Module, blocks: Blocks) -> Generator[None]:
    with frozen_batch_norms(norms), apply_policies(model, blocks):
        yield
