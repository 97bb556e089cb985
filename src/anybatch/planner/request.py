"""Requests for a plan: the step, the budget, and what may be chosen."""

from dataclasses import dataclass, field

import torch

from anybatch.core import Batch
from anybatch.engine import Plan, Task
from anybatch.memory import Device, find_device
from anybatch.recompute import WHOLE, Choice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A request for a plan."""

    task: Task  # model, loss and optimizers of the step
    batch: Batch  # the logical batch, or a few of its rows
    like: Plan  # a plan of all rows of the batch with the settings that are fixed
    budget: int | None = None  # the most bytes alive at any moment; None for no limit
    device: Device = field(default_factory=lambda: find_device("cpu"))  # the device of the step
    cut_refused: str = ""  # the reason why the batch may not be cut; "" if it may
    blocks: tuple[str, ...] = ()  # blocks whose policy may be chosen; empty if `like` fixes them
    sizes: tuple[int, ...] = ()  # the allowed micro-batch sizes; empty for all

    @property
    def rungs(self) -> list[Choice]:
        """Policies of blocks: as they are; blocks run again; their inputs are offloaded, too; all is."""
        again = tuple((block, "recompute") for block in self.blocks)
        found = [self.like.blocks, again] if again else [self.like.blocks]
        if self.device.link and not self.like.blocks:
            found += dict.fromkeys([(WHOLE, *again), (WHOLE,)])
        return found

    @property
    def depends_on_cut(self) -> bool:
        """True if the result depends on the chosen cut: BatchNorm of micro-batches."""
        is_chosen = not self.cut_refused and not self.sizes
        return is_chosen and self.like.batch_norm == "micro" and bool(self.task.network.batch_norms)

    @property
    def least(self) -> int:
        """The fewest rows of a micro-batch: two with BatchNorm in training mode."""
        norms = self.task.network.batch_norms if self.like.batch_norm != "frozen" else ()
        return 2 if norms and self.like.rows > 1 else 1

    @property
    def all_sizes(self) -> list[int]:
        """Sizes of micro-batches, largest first: one per number of micro-batches."""
        rows = self.like.rows
        if self.sizes:
            return list(self.sizes)
        if self.cut_refused:
            return [rows]
        found = dict.fromkeys(-(-rows // count) for count in range(1, rows // self.least + 1))
        # The last micro-batch has the rest.
        return [size for size in found if self.least == 1 or (rows % size or size) > 1]

    @property
    def may_disable_foreach(self) -> bool:
        """True if an optimizer would update all parameters at once, and foreach=False is possible."""
        default = None if self.device.kind != "cpu" else True  # without a setting, the CPU goes one by one
        return any(
            group.get("foreach", False) in (True, default) and not group.get("fused")
            for one in self.task.optimizers
            for group in one.param_groups
        )


def computes_in_half(task: Task) -> bool:
    """Return True if most of the arithmetic is in 16 bits."""
    kinds = {device.type for device in task.network.devices} - {"meta"}
    if any(torch.is_autocast_enabled(kind) for kind in kinds):
        return True
    sizes = [p.element_size() for p in task.network.parameters]
    return bool(sizes) and sum(size == 2 for size in sizes) > len(sizes) / 2
