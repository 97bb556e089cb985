"""Requests for a plan, and the candidates: traced steps, and their costs at any size."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from anybatch.core import Batch, TraceError, tree
from anybatch.engine import Plan, Task
from anybatch.memory import Device, find_device
from anybatch.planner.cost import KEEP, Costs, Recorded, costs_of
from anybatch.planner.trace import Trace, is_linear_in_rows, trace
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
    def largest(self) -> int:
        """Rows of the largest micro-batch; in a window the rows of one `add`."""
        return self.task.add_rows or self.like.rows

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
        found = dict.fromkeys(-(-rows // count) for count in counts)
        return [size for size in found if size <= self.largest]

    @property
    def may_disable_foreach(self) -> bool:
        """True if an optimizer would update all parameters at once, and foreach=False is possible."""
        groups = [group for one in self.task.optimizers for group in one.param_groups]
        return any(
            not group.get("fused")
            and (group["foreach"] or (self.device.kind == "cuda" and group["foreach"] is None))
            for group in groups
            if "foreach" in group
        )

    def uniform(self, size: int, policy: str) -> Plan:
        """Return a plan of this micro-batch, with all blocks under one policy."""
        choice = () if policy == KEEP else tuple((block, policy) for block in self.blocks)
        return replace(self.like, micro_batch=size, blocks=choice or self.like.blocks)


LOW, HIGH = 2, 5  # rows of the recorded micro-batches; a single row may run other kernels


class Candidates:
    """The costs of the plans of one request: traced, or (`is_composed`) composed from a few traced steps."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._traces: dict[Plan, Trace] = {}
        self._half = request.like.precision.is_short or _computes_in_half(request.task)
        self._recorded: dict[str, Recorded] = {}  # by policy of all blocks
        self._spare: Recorded | None = None  # with foreach=False
        self._costs: dict[tuple[int, bool | None], Costs] = {}  # by size and foreach
        self._idle: frozenset[nn.Parameter] = frozenset()  # parameters that get no gradient
        settled = len(request.sizes) == 1 and not request.blocks
        even = is_linear_in_rows(request.task.loss, request.task.model)
        self.is_composed = bool(request.like.rows >= 2 * LOW and even and not settled)
        self.add_policies([KEEP])

    def costs(self, micro_batch: int, foreach: bool | None = None) -> Costs:
        """Return the costs of policies at one size."""
        request, rows, key = self._request, self._request.like.rows, (micro_batch, foreach)
        if foreach is False and self._spare is None:
            try:
                self._spare = self._record(KEEP, foreach=False)
            except TraceError:
                self._spare = self._recorded[KEEP]  # an upper bound
        if key not in self._costs:
            self._costs[key] = costs_of(
                self._recorded,
                self._blocks,
                rows=rows,
                micro_batch=micro_batch,
                device=request.device,
                half=self._half,
                start=self._input_per_row() * (rows - 2 * micro_batch),
                update=self._spare if foreach is False else None,
            )
        return self._costs[key]

    def updates(self, micro_batch: int) -> tuple[bool | None, ...]:
        """Return the values of foreach to try at one size: False only if the update exceeds the budget."""
        request = self._request
        if request.budget is None or not request.may_disable_foreach:
            return (None,)
        costs = self.costs(micro_batch)
        taken = costs.alive({})[costs.is_update].max(initial=0.0)  # blocks hold nothing then
        return (None,) if taken <= request.budget else (None, False)

    def trace(self, plan: Plan) -> Trace:
        """Trace one plan. Raise TraceError if it cannot be traced."""
        if plan not in self._traces:
            request = self._request
            kind = request.device.kind
            found = trace(plan, request.task, request.batch, device=kind, idle=self._idle)
            self._traces[plan], self._idle = found, found.idle
        return self._traces[plan]

    def seconds(self, found: Trace) -> float:
        """Return the seconds of a traced step, from the work that its marks count."""
        last = found.marks[-1]
        return self._request.device.seconds(last.operations, last.flops, last.moved, half=self._half)

    @property
    def unrecorded(self) -> tuple[str, ...]:
        """Policies whose costs are not known yet."""
        return tuple([policy for policy in self._request.policies if policy not in self._recorded])

    def add_policies(self, policies: Sequence[str]) -> None:
        """Record the costs of policies, with one trace each."""
        try:
            for policy in policies if self.is_composed else ():
                self._recorded[policy] = self._record(policy)
                self._costs.clear()
        except TraceError:
            self.is_composed = False

    @property
    def _blocks(self) -> tuple[str, ...]:
        return self._request.blocks or tuple([name for name, _ in self._request.like.blocks])

    def _input_per_row(self) -> int:
        whole = self._request.batch.whole
        leaves = () if whole is None else tree.flatten(whole).leaves
        sizes = {
            id(one.untyped_storage()): max(one.stride(0), one[0].numel()) * one.itemsize for one in leaves
        }
        return sum(sizes.values())

    def _plan(self, policy: str, size: int, foreach: bool | None = None) -> Plan:
        like = self._request.uniform(1, policy)
        return replace(like, rows=2 * size, micro_batch=size, foreach=foreach)

    def _record(self, policy: str, foreach: bool | None = None) -> Recorded:
        few, many = [self._plan(policy, size, foreach) for size in (LOW, HIGH)]
        last, kept = self.trace(many).recording, self._recorded.get(KEEP)
        if kept is not None:
            try:
                return Recorded((LOW, HIGH), (None, last), self._blocks, kept)
            except TraceError:  # the bytes do not follow from the kept step
                pass
        return Recorded((LOW, HIGH), (self.trace(few).recording, last), self._blocks, kept)


def without_single_rows(request: Request) -> Request:
    """Return the request without sizes that leave a single row, if BatchNorm refuses to run one."""
    like = replace(request.like, rows=1, micro_batch=1)
    try:
        trace(like, request.task, request.batch, device=request.device.kind)
    except ValueError:
        # The last micro-batch has the remainder, of all rows and of the rows of one `add`.
        ends = request.like.rows, request.largest
        left = [size for size in request.all_sizes if all((end % size or size) > 1 for end in ends)]
        return replace(request, sizes=tuple(left))
    return request


def _computes_in_half(task: Task) -> bool:
    kinds = {device.type for device in task.network.devices} - {"meta"}
    if any(torch.is_autocast_enabled(kind) for kind in kinds):
        return True
    sizes = [p.element_size() for p in task.network.parameters]
    return bool(sizes) and sum(size == 2 for size in sizes) > len(sizes) / 2
