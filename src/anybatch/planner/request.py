"""Requests for a plan: the step, the budget, and what may be chosen."""

from dataclasses import dataclass, field, replace

import torch

from anybatch.core import Batch
from anybatch.engine import Plan, Task
from anybatch.memory import Device, find_device
from anybatch.planner.trace import trace
from anybatch.recompute import POLICIES


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
    without: tuple[str, ...] = ()  # excluded policies: a block's recomputation differed under them

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies that a block may have, besides "keep"."""
        if not self.blocks:
            return ()
        # If the device is the host itself, offload gains nothing.
        known = [one for one in POLICIES if one != "offload" or self.device.link]
        return tuple([one for one in known if one not in self.without])

    @property
    def depends_on_cut(self) -> bool:
        """True if the result depends on the chosen cut: BatchNorm of micro-batches."""
        is_chosen = not self.cut_refused and not self.sizes
        return is_chosen and self.like.batch_norm == "micro" and bool(self.task.network.batch_norms)

    @property
    def all_sizes(self) -> list[int]:
        """Sizes of micro-batches, largest first: one per number of micro-batches up to 8, then ever fewer."""
        rows = self.like.rows
        if self.sizes:
            return list(self.sizes)
        if self.cut_refused:
            return [rows]
        counts, count = [1], 1
        while count < rows:
            count = max(count + 1, count * 5 // 4)
            counts.append(min(count, rows))
        return [*dict.fromkeys(-(-rows // count) for count in counts)]

    @property
    def may_disable_foreach(self) -> bool:
        """True if an optimizer would update all parameters at once, and foreach=False is possible."""
        groups = [group for one in self.task.optimizers for group in one.param_groups]
        return any(
            not group.get("fused")
            and (group["foreach"] or (self.device.kind != "cpu" and group["foreach"] is None))
            for group in groups
            if "foreach" in group
        )

    def uniform(self, size: int, policy: str, again: int | None = None) -> Plan:
        """Return a plan of this micro-batch, with all blocks under one policy, or only the first `again`."""
        choice = () if policy == "keep" else tuple((block, policy) for block in self.blocks[:again])
        return replace(self.like, micro_batch=size, blocks=choice or self.like.blocks)


def without_single_rows(request: Request) -> Request:
    """Return the request without sizes that leave a single row, if BatchNorm refuses to run one."""
    like = replace(request.like, rows=1, micro_batch=1)
    try:
        trace(like, request.task, request.batch, device=request.device.kind)
    except ValueError:
        rows = request.like.rows
        left = [size for size in request.all_sizes if (rows % size or size) > 1]  # the last has the remainder
        return replace(request, sizes=tuple(left))
    return request


def computes_in_half(task: Task) -> bool:
    """Return True if most of the arithmetic is in 16 bits."""
    kinds = {device.type for device in task.network.devices} - {"meta"}
    if any(torch.is_autocast_enabled(kind) for kind in kinds):
        return True
    sizes = [p.element_size() for p in task.network.parameters]
    return bool(sizes) and sum(size == 2 for size in sizes) > len(sizes) / 2
