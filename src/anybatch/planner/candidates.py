"""What is to be planned, and the candidates: steps that are traced, and mixtures of them at any size."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from anybatch.core import Batch, OutOfMemoryError, TraceError
from anybatch.engine import Plan, Task
from anybatch.memory import Device, find_device
from anybatch.planner.cost import PolicyRecordings, Recorded
from anybatch.planner.measure import measure_step, repeated
from anybatch.planner.mixture import KEEP, Mixture
from anybatch.planner.progress import Progress
from anybatch.planner.trace import Trace, is_linear_in_rows, trace
from anybatch.recompute import POLICIES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What is to be planned."""

    task: Task  # what a step is carried out on
    batch: Batch  # the logical batch, or a few of its rows
    like: Plan  # a plan of all rows of the batch with every setting that is not to be chosen
    budget: int | None = None  # the most bytes alive at any moment; None for as many as there are
    device: Device = field(default_factory=lambda: find_device("cpu"))  # where the step will run
    cut_refused: str = ""  # why the batch may not be cut; "" where it may
    # names of the blocks whose policy may be chosen; none where it is settled in `like`
    blocks: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()  # the only micro-batch there may be; empty where it is to be chosen
    # micro-batches that these rows come in at least, all alike but the last: 1 where they may stay whole,
    # more where they stand for a micro-batch that finds the sums of others there already
    parts: int = 1
    fewest: int = 1  # rows that a micro-batch has at least
    # policies that are not to be chosen, because a block did not run again as it did under them
    without: tuple[str, ...] = ()
    measure: bool = True  # whether the fastest plans are raced for a moment, where the device is here
    rivals: bool = False  # whether plans to be raced in real steps are asked for

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies that blocks may have besides being kept."""
        if not self.blocks:
            return ()
        # Where the device is the host itself, nothing is gained by moving there.
        known = [one for one in POLICIES if one != "offload" or self.device.link]
        return tuple([one for one in known if one not in self.without])

    @property
    def depends_on_cut(self) -> bool:
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
    def may_disable_foreach(self) -> bool:
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


# ---- candidates


LOW, HIGH = 2, 5  # rows of the micro-batches that are recorded; a single row may be a case of its own


class Candidates:
    """The bytes of the plans of one request: traced, or composed of a few traced steps.

    Args:
        request: what is to be planned.

    Attributes:
        notes: what the reader of the answer should know.
        is_composed: whether there are mixtures; where not, each plan has to be traced by itself.
        is_measured: whether the step cannot be traced, so that plans are measured on real rows.
    """

    def __init__(self, request: Request) -> None:
        self._request, self._progress = request, Progress()
        self.notes: list[str] = []
        self._traces: dict[Plan, Trace] = {}
        self._half = request.like.precision.is_short or _computes_in_half(request.task)
        self._pure: dict[str, Recorded] = {}  # by policy of all blocks
        self._by_foreach: dict[bool | None, PolicyRecordings] = {}  # by foreach
        self._input_per_row = 0.0
        self._idle: frozenset[nn.Parameter] = frozenset()  # parameters that get no gradient
        self.is_composed = self.is_measured = False
        settled = request.sizes and not request.blocks
        even = is_linear_in_rows(request.task.loss, request.task.model)
        if request.like.rows >= 2 * LOW and even and not settled:
            self._record()

    def mixture(self, micro_batch: int, foreach: bool | None) -> Mixture:
        """The mixtures at one size, where there are any."""
        request = self._request
        rows = request.like.rows
        if foreach not in self._by_foreach:
            self._by_foreach[foreach] = self._without_foreach()
        return self._by_foreach[foreach].mixture(
            rows,
            micro_batch,
            request.device,
            half=self._half,
            input_bytes=round(self._input_per_row * (rows - 2 * micro_batch)),
        )

    def updates(self, micro_batch: int) -> tuple[bool | None, ...]:
        """Values of foreach worth a try at one size: the sparing one only where the update takes too much."""
        request = self._request
        if request.budget is None or not request.may_disable_foreach:
            return (None,)
        taken = self.mixture(micro_batch, None).peak({}, phase="update")  # by then blocks hold nothing
        return (None,) if taken <= request.budget else (None, False)

    def least_seconds(self, micro_batch: int) -> float:
        """What hardly any policies stay below at one size within the budget, where there are mixtures."""
        request = self._request
        # Policies free nothing of an update, so it is the one that takes least.
        mixture = self.mixture(micro_batch, self.updates(micro_batch)[-1])
        if request.budget is None:
            return mixture.seconds({})
        return mixture.least_seconds(request.budget, may_move="offload" in self.unrecorded)

    def trace(self, plan: Plan) -> Trace:
        """One plan as it is; measured on real rows where it cannot be traced."""
        if plan not in self._traces:
            self._progress.tell(plan, len(self._traces))
            self._traces[plan] = found = self._traced(plan)
            self._idle = found.idle
        return self._traces[plan]

    def seconds(self, found: Trace) -> float:
        """Of a traced step, from the work that its marks count."""
        last = found.marks[-1]
        return self._request.device.seconds(last.operations, last.flops, last.moved, half=self._half)

    def may_run(self, plan: Plan, peak: int) -> bool:
        """Whether a plan may be run only to say how many bytes it takes."""
        within = self._request.budget is None or peak <= self._request.budget
        return within or not self.is_measured or plan.micro_batch <= LOW or plan in self._traces

    def disable_mixtures(self, why: str) -> None:
        """From now on each plan is traced by itself."""
        self.is_composed = False
        self.notes.append(f"each size was traced by itself: {why}")

    @property
    def unrecorded(self) -> tuple[str, ...]:
        """Policies that blocks of mixtures may not have yet."""
        return tuple([policy for policy in self._request.policies if policy not in self._pure])

    def add_policies(self, policies: Sequence[str]) -> None:
        """Let blocks be rebuilt or moved in mixtures, too: one trace for each policy, only if need be."""
        if self.is_composed and policies:
            self._record(policies)

    def _record(self, policies: Sequence[str] = ()) -> None:
        request = self._request
        try:
            recorded = dict(self._pure)
            for policy in (KEEP, *policies) if not recorded else policies:
                recorded[policy] = self._recorded(policy)
            self._pure = recorded
            self._by_foreach = {None: PolicyRecordings(recorded)}
            if request.batch.whole is not None:
                # Not what one of them holds: where rows are real, they are views of the whole batch.
                low, high = [one.input_bytes for one in recorded[KEEP].recordings]
                self._input_per_row = (high - low) / (2 * (HIGH - LOW))
            self.is_composed = True
        except (TraceError, ValueError, OutOfMemoryError) as error:
            self.disable_mixtures(str(error))

    def _without_foreach(self) -> PolicyRecordings:
        try:
            return PolicyRecordings(self._pure, update=self._recorded(KEEP, foreach=False))
        except (TraceError, ValueError, OutOfMemoryError):
            return self._by_foreach[None]  # which takes no less

    def _recorded(self, policy: str, foreach: bool | None = None) -> Recorded:
        request = self._request
        few, many = [
            replace(request.uniform(size, policy), rows=2 * size, foreach=foreach) for size in (LOW, HIGH)
        ]
        kept = self._pure.get(KEEP)
        if kept is not None and not self.is_measured:
            found = kept.under_policy(self.trace(many).recording)
            if found is not None:
                return found
        low = self.trace(few)
        is_over = request.budget is not None and low.peak > request.budget
        if low.source == "measured" and is_over:  # then so are more rows, and these would really be run
            raise TraceError(f"Expected {LOW} rows at a time within the budget, got {low.peak} bytes.")
        names = request.blocks or tuple(name for name, _ in request.like.blocks)
        recordings = low.recording, self.trace(many).recording
        return Recorded(sizes=(LOW, HIGH), recordings=recordings, blocks=names)

    def _traced(self, plan: Plan) -> Trace:
        request = self._request
        if not self.is_measured:  # else it would fail again: all plans are of the same model and rows
            try:
                kind = request.device.kind
                return trace(plan, request.task, request.batch, device=kind, idle=self._idle)
            except TraceError as error:
                if not request.device.is_here:
                    raise
                self.is_measured = True
                self.notes.append(
                    "measured on some of the rows given, and no bound where bytes depend on the data, "
                    f"because it cannot be traced: {error}"
                )
        rows = min(plan.rows, 2 * plan.micro_batch)
        return measure_step(plan, request.task, repeated(request.batch, rows), idle=self._idle)


def takes_single_rows(request: Request) -> bool:
    """Whether a row may come alone, as far as can be told: BatchNorm refuses a single value per channel."""
    return _can_be_traced(request, 1) or not _can_be_traced(request, 2)


def _can_be_traced(request: Request, rows: int) -> bool:
    plan = replace(request.like, rows=rows, micro_batch=rows)
    try:
        trace(plan, request.task, request.batch, device=request.device.kind)
    except (ValueError, TraceError):
        return False
    return True


def _computes_in_half(task: Task) -> bool:
    kinds = {device.type for device in task.devices} - {"meta"}
    if any(torch.is_autocast_enabled(kind) for kind in kinds):
        return True
    sizes = [p.element_size() for p in task.parameters]
    return bool(sizes) and sum(size == 2 for size in sizes) > len(sizes) / 2
