"""What is to be planned: which rows, on which device, within how many bytes, and what may be chosen."""

from dataclasses import dataclass, field, replace

from anybatch.core import Batch
from anybatch.engine import Plan, Task
from anybatch.memory import Device, find_device
from anybatch.planner.mixture import KEEP
from anybatch.recompute import POLICIES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """What is to be planned.

    Attributes:
        task: what a step is carried out on.
        batch: the logical batch, or a few of its rows.
        like: a plan of all rows of the batch with every setting that is not to be chosen.
        budget: the most bytes alive at any moment; None for as many as there are.
        device: where the step will run.
        cut_refused: why the batch may not be cut; "" where it may.
        blocks: names of the blocks whose policy may be chosen; none where it is settled in `like`.
        sizes: the only micro-batch there may be; empty where it is to be chosen.
        parts: micro-batches that these rows come in at least, all alike but the last: 1 where they may stay
            whole, more where they stand for a micro-batch that finds the sums of others there already.
        fewest: rows that a micro-batch has at least.
        without: policies that are not to be chosen, because a block did not run again as it did under them.
        measure: whether the fastest plans are raced for a moment, where the device is here.
        rivals: whether plans to be raced in real steps are asked for.
    """

    task: Task
    batch: Batch
    like: Plan
    budget: int | None = None
    device: Device = field(default_factory=lambda: find_device("cpu"))
    cut_refused: str = ""
    blocks: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    parts: int = 1
    fewest: int = 1
    without: tuple[str, ...] = ()
    measure: bool = True
    rivals: bool = False

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies that blocks may have besides being kept."""
        if not self.blocks:
            return ()
        # Where the device is the host itself, nothing is gained by moving there.
        known = [one for one in POLICIES if one != "offload" or self.device.link]
        return tuple([one for one in known if one not in self.without])

    @property
    def is_cut_felt(self) -> bool:
        """Whether the result depends on the cut that is chosen: BatchNorm of micro-batches."""
        is_chosen = not self.cut_refused and not self.sizes
        return is_chosen and self.like.batch_norm == "micro" and bool(self.task.batch_norms)

    @property
    def all_sizes(self) -> list[int]:
        """Sizes of micro-batches, largest first: one for each number of them up to 8, then ever fewer."""
        rows = self.like.rows
        if self.sizes:
            return list(self.sizes)
        if self.cut_refused:
            return [rows]
        counts, count = [1], 1
        while count < rows:
            count = max(count + 1, count * 5 // 4)
            counts.append(min(count, rows))
        different = dict.fromkeys(-(-rows // count) for count in counts)
        found = [size for size in different if size * self.parts <= rows]
        # The last micro-batch has what is left, of these rows and of those that they stand for.
        ends = [rows, rows // self.parts]
        return [size for size in found if all((end % size or size) >= self.fewest for end in ends)] or found

    @property
    def may_spare(self) -> bool:
        """Whether an optimizer would update all parameters at once, and could go one by one."""
        groups = [group for one in self.task.optimizers for group in one.param_groups]
        return any(
            not group.get("fused")
            and (group["foreach"] or (self.device.kind == "cuda" and group["foreach"] is None))
            for group in groups
            if "foreach" in group
        )

    def uniform(self, size: int, policy: str) -> Plan:
        """A plan of this micro-batch, with all blocks under one policy."""
        choice = () if policy == KEEP else tuple((block, policy) for block in self.blocks)
        return replace(self.like, micro_batch=size, blocks=choice or self.like.blocks)
