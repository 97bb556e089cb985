"""The ladder of a step within a budget: fewer rows, recomputed blocks, offload, then refusal; all read."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import core
from anybatch.core import torch_private as private
from anybatch.engine import Plan, Task
from anybatch.memory import Following, room_of
from anybatch.planner.rung import FROZEN, RAN_OUT, SURE, Rung, Want, even
from anybatch.recompute import WHOLE, Choice

Read = Callable[[Rung, tuple[int, ...]], None]  # runs micro-batches of a few rows, and puts all back
Find = Callable[[], Sequence[str]]  # returns the blocks that may run again, in the order of the model

_LOOKS = 3  # looks without a reading, before they are given up
_FEW = 4  # rows that are read at most where fewer raise an error
_TRIES = 3  # rungs that are read between two others
_SLACK = 1.02  # factor on the smallest budget, because another reading may be a little larger
_AGAIN = (
    0.4  # work of the second forward of all blocks, in that of forward and backward: a third, and overhead
)
_CLOSE = 1.02  # factor that a rung between two others leaves free of the room


class Ladder:
    """The rungs of one kind of rows.

    The first rung keeps all blocks of the model. If not even its smallest micro-batch fits, all blocks run
    again in backward; then as many of the last blocks are kept as a straight line between the two readings
    promises. Below are two rungs of devices with streams: all blocks run again and what is saved beside them,
    their inputs, waits in host memory; no block runs again and all that is saved waits there. Each rung is
    read before it is used, and again in steps.
    """

    def __init__(self, num_bytes: int, settings: Plan) -> None:
        self.num_bytes = num_bytes
        # By the number of the first blocks that run again; the rungs with offload have higher numbers.
        self.rungs = {0: Rung(num_bytes, settings)}
        self.offloads = False  # the device has a host that copies run to
        self.refused = ""  # the reason why the batch must not be cut
        self.short = ""  # the reason why nothing is offloaded: the host lacks memory
        self.looks = 0  # looks at a few rows, with readings or without
        self.held = 0  # bytes of parameters, buffers and optimizer state, as of the last step
        self._task: Task | None = None  # that holds them
        self._states = self._at_first = 0  # of its optimizers, and before the first step
        self._to_come = 0  # bytes of optimizer state to be made

    @property
    def has_looked(self) -> bool:
        """True if a few rows were read, or could not be, as those of a wrong batch."""
        return bool(self.plain.law.readings) or self.looks >= _LOOKS

    @property
    def plain(self) -> Rung:
        """The rung that keeps all blocks."""
        return self.rungs[0]

    def static_bytes(self, task: Task, batch: core.Batch) -> int:
        """Return the bytes alive throughout a step, without its gradient sums."""
        states = sum(len(one.state) for one in task.optimizers)
        is_early = sum(one.steps for one in self.rungs.values()) < FROZEN
        if is_early or (self._task, self._states) != (task, states):
            if self._task is None:
                self._to_come, update = update_to_come(task, as_set=self.plain.settings.foreach is None)
                self._at_first = states
                self.plain.updates.append(update)
            self._task, self._states = task, states
            self.held = _held(task) + self._to_come * (states == self._at_first)
        grads = [core.local(p.grad) for p in task.network.everyone if p.grad is not None]
        found = [one for one in grads if one.layout is torch.strided]
        # Existing gradients are kept and added to the step's, hence twice.
        return self.held + sum(one.nbytes for one in (*batch.leaves, *found, *found))

    def known(self, want: Want) -> tuple[Rung, tuple[int, ...]] | None:
        """Return the rung with the least work of those that fit by what was read, and its cut."""
        found = [(rung, cut) for _, rung in sorted(self.rungs.items()) if (cut := rung.sizes(want))]
        if len(found) > 1 and not want.is_fixed:
            found.sort(key=lambda one: self._work(one[0], want, one[0].parts(want)))
        return found[0] if found else None

    def choose(self, want: Want, read: Read, find: Find) -> tuple[Rung, tuple[int, ...]]:
        """Return the first rung that fits, and its cut; read further rungs if none does.

        Raises:
            BudgetError: nothing fits; names the smallest budget that would.
        """
        while True:
            self._update_one_by_one(want)
            found = self.known(want)
            if found is not None:
                if self._read_blocks(found[0], want, read, find):
                    continue
                return found
            if self._climb(want, read, find):
                continue
            last = self.rungs[max(self.rungs)]
            if not last.has_read(want):  # the step itself will tell why
                smallest_parts = even(want.rows, -(-want.rows // want.size))
                return last, tuple(core.cut_sizes(want.rows, want.only)) if want.only else smallest_parts
            if not self._read_more_rows(want, read):
                raise self._refusal(want)

    def finish(self, rung: Rung, *, is_random: bool) -> None:
        """End a step on a rung."""
        rung.steps, rung.is_random = rung.steps + 1, rung.is_random or is_random

    def _work(self, rung: Rung, want: Want, parts: int) -> float:
        """Return the work of a step in that of the uncut batch, by counts, which no clock disturbs.

        Each micro-batch goes over the parameters once more, as its rows go over their activations. To
        recompute all blocks is a little more than a third of forward and backward; to offload is dearer.
        """
        law, blocks = self.plain.law, max(one.again for one in self.rungs.values())
        each = self.plain.gradients / law((want.rows, want.length)) if law.readings else 0.0
        return parts * each + _AGAIN * rung.again / max(1, blocks) + (WHOLE in rung.settings.blocks)

    def _read_blocks(self, rung: Rung, want: Want, read: Read, find: Find) -> bool:
        """Read the rung with all blocks recomputed if its larger micro-batches may be less work than these.

        Return True if it was read.
        """
        may_gain = self._work(rung, want, rung.parts(want)) > self._work(self.plain, want, 1) + _AGAIN
        if rung.again or not may_gain or want.is_fixed or self._may_not_change(want):
            return False
        blocks = find()
        if not blocks or len(blocks) in self.rungs:
            return False
        return self._read_smallest(self._rung(len(blocks), _again(blocks)), want, read)

    def _climb(self, want: Want, read: Read, find: Find) -> bool:
        """Read something that may fit where nothing known does; return False if there is nothing left."""
        top, last = max(self.rungs), self.rungs[max(self.rungs)]
        blocks = () if self._may_not_change(want) else find()
        for level, choice in self._levels(blocks, want):
            if level >= top:
                rung = last = self._rung(level, choice)
                if self._read_smallest(rung, want, read) or self._read_whole(rung, want, read):
                    if level == len(blocks) and rung.sizes(want):
                        self._give_back(blocks, want, read)
                    return True
        first = last.first
        if not first or want.rows in first:
            return False
        read(last, even(want.rows, -(-want.rows // want.size)))  # the loss over all rows was only guessed at
        return want.rows in first

    def _may_not_change(self, want: Want) -> bool:
        """Return True if policies of blocks are given, or micro-batches hold collectives of all ranks."""
        return bool(self.plain.settings.blocks) or want.is_shared

    def _levels(self, blocks: Sequence[str], want: Want) -> Iterator[tuple[int, Choice]]:
        """Yield number and policies of the rungs but for those that keep some blocks, the fastest first."""
        yield 0, self.plain.settings.blocks
        again = _again(blocks)
        if blocks:
            yield len(blocks), again
        # A cut that must stay is chosen once, and what offload takes is not in proportion to the rows.
        may_differ = want.is_whole or not want.is_fixed
        if self.offloads and may_differ and not self._may_not_change(want):
            needed, free = self.plain.takes(want), room_of(torch.device("cpu"))
            self.short = ""
            if free is not None and needed > free:
                self.short = f" On the host {core.format_bytes(free)} are free, and offload takes up to "
                self.short += f"{core.format_bytes(int(needed))}."
            else:
                if blocks:
                    yield len(blocks) + 1, (WHOLE, *again)
                yield len(blocks) + 2, (WHOLE,)

    def _read_smallest(self, rung: Rung, want: Want, read: Read) -> bool:
        """Read the smallest micro-batch if that is new; return True if it was."""
        size = want.size if want.size < want.rows else 1
        size = max(size if 2 * size <= want.rows else 1, want.least)
        is_known = (size, want.length) in rung.law.readings
        if 2 * size > want.rows or is_known or (want.is_whole and WHOLE in rung.settings.blocks):
            return False
        before = len(rung.law.readings)
        read(rung, (size, size))
        while not rung.law.readings and size < _FEW and 4 * size <= want.rows:
            size *= 2  # a model may refuse fewer
            read(rung, (size, size))
        if want.is_whole and 8 * size <= want.rows and rung is not self.plain:  # two sizes tell what is fixed
            read(rung, (4 * size, 4 * size))
        return len(rung.law.readings) > before

    def _read_whole(self, rung: Rung, want: Want, read: Read) -> bool:
        """Read a batch that may not be cut, unless a few rows tell that it fits or does not."""
        size = want.rows, want.length
        if not want.is_whole or size in rung.whole or not (rung.law.readings or rung is not self.plain):
            return False
        if rung.law.readings:
            share = rung.law.expected(size) / max(1.0, rung.room(want) + rung.gradients)
            if not SURE < share < 1 / SURE:
                return False
        read(rung, (want.rows,))
        rung.whole.setdefault(size, RAN_OUT)
        return True

    def _read_more_rows(self, want: Want, read: Read) -> bool:
        """Read two and four rows where one may take more; return True if that is new."""
        rung = self.rungs[max(self.rungs)]
        found = rung.law.readings
        for size in (2, 4):
            fewer = found.get((size // 2, want.length))
            if want.only is None and 2 * size <= want.rows and fewer and (size, want.length) not in found:
                if size > 2 and min(fewer) > min(found.get((1, want.length), [0.0])):
                    return False
                read(rung, (size, size))
                return (size, want.length) in found
        return False

    def _update_one_by_one(self, want: Want) -> None:
        """Update parameter by parameter from now on if common operations take too much."""
        task, updates = self._task, self.plain.updates
        if task and self.plain.settings.foreach is None and max(updates) > self.plain.room(want):
            updates[:] = [update_to_come(task)[1]]
            for rung in self.rungs.values():
                rung.settings = replace(rung.settings, foreach=False)

    def _give_back(self, blocks: Sequence[str], want: Want, read: Read) -> None:
        """Find the fewest blocks that must run again, by a line between two rungs of which one fits."""
        low, high = 0, len(blocks)  # `high` fits, `low` does not
        for _ in range(_TRIES):
            more, less = [self.rungs[one].takes(want) for one in (low, high)]
            if not more > less > 0:
                return
            free = self.rungs[high].room(want) / _CLOSE - less
            again = max(low + 1, high - int(max(0.0, free) / ((more - less) / (high - low))))
            if again >= high:
                return
            rung = self._rung(again, _again(blocks[:again]))
            while self._read_smallest(rung, want, read) or self._read_whole(rung, want, read):
                pass
            low, high = (low, again) if rung.sizes(want) else (again, high)

    def _rung(self, level: int, choice: Choice) -> Rung:
        """Return the rung of a level, which is new at first; what no policy changes is known from above."""
        if level not in self.rungs:
            made = Rung(self.num_bytes, replace(self.plain.settings, blocks=choice))
            made.gradients = self.plain.gradients
            made.updates = self.plain.updates
            made.first = self.plain.first
            self.rungs[level] = made
        return self.rungs[level]

    def _refusal(self, want: Want) -> core.BudgetError:
        found = [one for one in (rung.smallest(want) for rung in self.rungs.values()) if one < RAN_OUT]
        size = int(min(max(want.size, self.plain.law.least), want.rows))
        last = self.rungs[max(self.rungs)].settings.blocks
        how = ", all that is saved offloaded" if WHOLE in last else ", all blocks recomputed" * bool(last)
        how += " (a budget on shards recomputes nothing; Options(recompute=...) does)" * want.is_shared
        why = f" The batch may not be cut: {self.refused.rstrip('.')}." if self.refused else ""
        floor = int(want.static + self.plain.gradients)
        least = int(_SLACK * min(found, default=floor))
        rows = core.counted(want.rows, "row")
        told = f"By readings the smallest budget for {rows} is {core.format_bytes(least)} ({least} bytes)."
        if not found:
            told = f"The device itself had too little for {rows}; a budget must be above {least} bytes."
        expected = f"room for {core.counted(size, 'row')} at a time{how}"
        if floor > self.num_bytes:
            expected = "a budget above parameters, gradients, optimizer state and batch, which take "
            expected += f"{core.format_bytes(floor)} together"
        return core.BudgetError(
            f"Expected {expected}, got {core.format_bytes(self.num_bytes)}. {told}{why}{self.short} Allow "
            "that much, or use a smaller model or smaller rows.",
            smallest=least,
        )

    def note(self, rung: Rung) -> str:
        """Return the basis of a cut, for a report."""
        count = sum(map(len, rung.law.readings.values())) + len(rung.whole)
        allowed = "" if rung.is_exact else ", with an allowance for what readings cannot see here"
        blocks = ""
        if rung is not self.plain and rung.again:
            why = "for larger micro-batches" if self.plain.has_cut else "as no row fits without"
            blocks = f"; {core.counted(rung.again, 'block')} recomputed, {why}"
        if WHOLE in rung.settings.blocks and rung is not self.plain:
            blocks += f"; {core.format_bytes(rung.host)} saved for backward wait in host memory"
        return f"cut by memory that was read in {count} runs of micro-batches{allowed}{blocks}"

    def state(self) -> list[dict[str, Any]]:
        """Return the rungs as JSON values."""
        return [{"again": again, **rung.state()} for again, rung in self.rungs.items()]

    def load(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Load the output of `state`."""
        for one in state:
            rung = Rung(self.num_bytes, self.plain.settings)
            rung.updates = self.plain.updates
            rung.load(one)
            self.rungs[int(one["again"])] = rung


def _again(blocks: Sequence[str]) -> Choice:
    return tuple((name, "recompute") for name in blocks)


def refuse_unread() -> core.PlanError:
    """Return the error for a step whose memory cannot be read."""
    return core.PlanError(
        "Expected to read the memory of a few micro-batches for memory=, got none: a profiler is open, or "
        "another reading. Make one step before the profiler starts, or choose micro_batch= yourself."
    )


def _held(task: Task) -> int:
    held: list[Any] = [*task.network.everyone, *task.masters.tensors]
    for module in task.network.modules:
        held += [*private.buffers_of(module).values()]
    for optimizer in task.optimizers:
        held += core.tensors_in([*optimizer.state.values()])
    found = [core.local(one) for one in held if isinstance(one, Tensor) and one.layout is torch.strided]
    here = [one.untyped_storage() for one in found if one.device in task.network.devices]
    return sum({one.data_ptr(): one.nbytes() for one in here}.values())


def update_to_come(task: Task, *, as_set: bool = False) -> tuple[int, float]:
    """Return the bytes of state that the first update makes, and those that later ones take for a moment.

    Parameters without data are updated: one by one, one of each shape; with `as_set` all of them in common
    operations (foreach), if the optimizer would use those. Only optimizers of torch are asked: another may
    count its calls.
    """
    default = True if task.network.kinds <= {"cpu"} else None
    total, most = 0, 0.0
    for optimizer in task.optimizers:
        if not type(optimizer).__module__.startswith("torch."):
            continue
        twin: Any = object.__new__(type(optimizer))
        vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=[])
        lacking = Counter[Tensor]()  # parameters without state, by the one of the twin that stands for them
        for group in optimizer.param_groups:
            is_common = as_set and group.get("foreach", False) in (True, default) and not group.get("fused")
            metas = dict[Any, nn.Parameter]()
            for index, p in enumerate(group["params"]):
                if p.requires_grad:
                    full = core.local(p if (master := task.masters.of(p)) is None else master)
                    made = nn.Parameter(torch.empty_like(full, device="meta"))
                    one = metas.setdefault((full.shape, full.dtype, index * is_common), made)
                    one.grad = torch.empty_like(one)
                    lacking[one] += not optimizer.state.get(p)
            twin.param_groups.append(
                {**group, "foreach": is_common, "fused": False, "params": [*metas.values()]}
            )
        try:
            private.step_without_hooks(twin)
            following = Following({torch.device("meta")})
            try:
                private.step_without_hooks(twin)
            finally:
                changes = following()
        except Exception:
            continue
        for one, count in lacking.items():
            total += count * sum(value.nbytes for value in core.tensors_in(twin.state[one]))
        most = max(most, *accumulate(changes, initial=0))
    return total, most
