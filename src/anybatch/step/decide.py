"""How a step's batches are cut: as asked, as memory has taught, or as fits a budget."""

import sys
from collections.abc import Generator, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple

import torch

from anybatch import audit, core, planner
from anybatch.core import accelerator
from anybatch.engine import Plan, Task, check_micro_batch
from anybatch.losses import WholeBatch
from anybatch.recompute import find_blocks

_DEPENDS = "with batch_norm='micro' the result depends on the cut"


PATIENCE = 16  # clean steps before a larger micro-batch is tried


class Limit(NamedTuple):
    """The limit of one kind of row, once memory has run out in it."""

    fits: int  # rows of the largest micro-batch that goes through, as far as is known
    clean: int = 0  # steps since it was met, or since the last larger one was tried
    patience: int = PATIENCE  # clean steps after which a larger one is tried


class Limits:
    """The limits met so far, by kind of row. After each failure more is tried half as often."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Limit] = {}

    def size(self, like: Hashable, planned: int) -> int:
        """Return the rows to try: those that fit, or half of the way to the plan if it is time."""
        limit = self.known.get(like) or Limit(planned)
        fits = min(limit.fits, planned)
        return fits if limit.clean < limit.patience else fits + -(-(planned - fits) // 2)

    def learn(self, like: Hashable, planned: int, *, largest: int, failed: int) -> None:
        """Learn from micro-batches of `planned` rows: `largest` went through, `failed` did not (0: none)."""
        old = self.known.get(like)
        if failed:
            half = -(-failed // 2)
            # What went through before a larger one was tried still does.
            fits = half if old is None or old.fits >= failed else max(old.fits, half)
            patience = PATIENCE if old is None else 2 * old.patience
            self.known[like] = Limit(fits, patience=patience)
        elif old is not None and old.fits < planned:
            is_larger = largest > old.fits
            self.known[like] = Limit(max(largest, old.fits), 0 if is_larger else old.clean + 1, old.patience)

    def state(self) -> list[tuple[Hashable, dict[str, int]]]:
        """Return the limits, for a checkpoint."""
        return [(like, one._asdict()) for like, one in self.known.items()]

    def load(self, state: Iterable[tuple[Hashable, Mapping[str, int]]]) -> None:
        """Load the result of `state`."""
        self.known = {like: Limit(*map(one.__getitem__, Limit._fields)) for like, one in state}


class Planning:
    """The decisions of a step about its batches; `limits` remembers the sizes that did not fit."""

    def __init__(
        self,
        settings: Plan,
        audit: "audit.Audit",
        *,
        micro_batch: int | None,
        memory: str | int | None,
        may_choose_blocks: bool,
    ) -> None:
        self.settings, self.audit, self._may_choose_blocks = settings, audit, may_choose_blocks
        self.micro_batch = whole_number(micro_batch)
        self.budget = None if memory is None else planner.Budget(memory)
        self._distrusted: set[tuple[str, str]] = set()  # block and policy
        self.limits = self.audit.known.limits = Limits()
        self._plans: dict[tuple[int, int], Plan] = {}  # without a budget, by rows of batch and micro-batch
        self._wanted = 0  # rows of a micro-batch within the budget, before what memory has taught
        # What chose the cut of this step, and for which rows.
        self._used: tuple[planner.Ladder, planner.Rung, planner.Want] | None = None
        self.limit: tuple[torch.device, int] | None = None  # bytes that an allocator may reserve in a step

    @property
    def is_asked(self) -> bool:
        """Return True if the caller chose the size of micro-batches, and no budget does."""
        return self.budget is None or self.micro_batch is not None

    def by_rows(self, rows: int, like: Hashable = ()) -> Plan:
        """Return the plan of a batch of so many rows; with a budget, a PlanError."""
        if self.budget is not None:
            raise core.PlanError(
                f"Expected a batch, whose shapes the plan depends on with memory={self.budget.memory!r}, "
                f"got {rows} rows. Call step.foresee(batch)."
            )
        return _of_size(self.settings, rows, self.limits.size(like, self._size(rows)))

    def plan_for(self, task: Task, batch: core.Batch, *, is_add: bool = False) -> tuple[Plan, Task]:
        """Return the plan of a batch; and the task, with a reader if micro-batches are to be read.

        One `add` of a window is cut only if it is larger than was asked for, or does not fit.
        """
        rows, asked = batch.rows, self.micro_batch
        if self.budget is None:
            wanted = self._wanted = rows if asked is None or asked > rows else asked
            size = self._limited(task, batch, wanted) if self.limits.known else wanted
            plan = self._plans.get((rows, size))
            if plan is None:
                plan = self._plans[rows, size] = _of_size(self.settings, rows, size)
            return plan, task
        ladder, rung, cut, want = self._within(task, batch, self.budget, is_add=is_add)
        plan = _of_cut(rung.settings, cut)
        self._used, self._wanted = (ladder, rung, want), plan.micro_batch
        task.strategy.spare(rung.spare(want, cut))
        size = self._limited(task, batch, self._wanted)
        reader = rung.reader(want, cut, task)
        task = task if reader is None else replace(task, reader=reader)
        return (_of_size(plan, rows, size) if is_add or size != plan.micro_batch else plan), task

    def _within(
        self, task: Task, batch: core.Batch, budget: planner.Budget, *, is_add: bool = False
    ) -> tuple[planner.Ladder, planner.Rung, tuple[int, ...], planner.Want]:
        """Return the rung of the ladder that fits, and the rows of each micro-batch.

        Raises:
            BudgetError: nothing fits.
            PlanError: memory cannot be read here.
        """
        if task.strategy.is_lockstep and isinstance(task.loss, WholeBatch):
            raise core.PlanError(
                f"Expected micro_batch= for ab.WholeBatch on a sharded model, got memory={budget.memory!r}. "
                "A budget does not read its first pass there: leave memory= out."
            )
        ladder = budget.ladder(task, self.settings, batch.kind)
        want = self._want(task, batch, ladder, is_add=is_add)
        has_looked = ladder.has_looked or batch.rows == 1
        is_again = self.audit.wants(task, batch, self.settings) and ladder.has_looked
        if is_again or not has_looked:
            self._look(task, batch, ladder, want, again=is_again)
            want = self._want(task, batch, ladder, is_add=is_add)
        if has_looked and (found := ladder.known(want)):
            return ladder, *found, want

        def read(rung: planner.Rung, sizes: tuple[int, ...]) -> None:
            run = audit.rehearse if task.strategy.is_lockstep else audit.run_parts
            limits: list[AbstractContextManager[object]] = [NO_LIMIT]
            if len(sizes) == 1:  # what runs within the budget fits; the last rung tells the smallest one
                limits = [self.enforced(task, batch, ladder), *limits[not rung.is_last :]]
            for limit in limits:
                with self._reading(task, rung, want) as running, limit:
                    run(running, batch, _of_size(rung.settings, sum(sizes), max(sizes)), sizes)
                if (want.rows, want.length) in rung.readings.whole:
                    return

        return ladder, *ladder.choose(want, read, lambda: self._blocks(task)), want

    def _want(
        self,
        task: Task,
        batch: core.Batch,
        ladder: planner.Ladder,
        *,
        rows: int | None = None,
        is_add: bool = False,
    ) -> planner.Want:
        """Return `rows` like those of a batch, what is held beside them, and the sizes that are allowed."""
        rows = batch.rows if rows is None else rows
        norms = bool(task.network.batch_norms) and self.settings.batch_norm != "frozen"
        given = sum(one.nbytes for one in batch.leaves)
        own = given * rows // max(1, batch.rows)
        static = ladder.static_bytes(task, batch) + own - given
        if is_add:
            static += ladder.plain.readings.gradients  # sums of the window beside those of one `add`
        ladder.refused = ladder.refused or _why_uncut(task, self.settings)
        is_refused = bool(ladder.refused) and (is_add or self.micro_batch is None)  # else the step refuses
        is_whole = is_refused or rows == 1
        only = None if is_add and not is_whole else rows if is_whole else self.micro_batch
        return planner.Want(
            rows=rows,
            length=planner.length_of(batch),
            static=static,
            own=own,
            only=None if only is None else min(only, rows),
            least=2 if norms and rows > 1 else 1,
            is_fixed=norms,
            is_add=is_add,
            is_shared=task.strategy.is_lockstep,
        )

    @contextmanager
    def _reading(self, task: Task, rung: planner.Rung, want: planner.Want) -> Generator[Task]:
        """Yield a task whose micro-batches are read, a few rows at a time."""
        rows = want.rows if want.is_whole else 0
        reader = planner.MemoryReader(
            rung.readings, task.network.devices, is_look=True, rows=rows, own=want.own
        )
        yield replace(task, reader=reader)
        if reader.is_blind and not rung.readings.law.readings:
            raise planner.refuse_unread()

    def _look(
        self, task: Task, batch: core.Batch, ladder: planner.Ladder, want: planner.Want, *, again: bool
    ) -> None:
        """Read a few rows, and compare loss and gradient of two splits."""
        rung, ladder.looks = ladder.plain, ladder.looks + 1
        like = _of_size(self.settings, batch.rows, min(2, batch.rows))
        leaves = batch.leaves
        copies = sum(one.nbytes for one in leaves) * min(8, batch.rows) // batch.rows
        with self._reading(task, rung, want) as running:

            def fits(rows: int) -> bool:
                # A look holds copies of its rows, and the gradients of two splits.
                room = rung.room(want) - copies - 2 * rung.readings.gradients
                return rung.readings.fits((rows, want.length), room)

            is_tight = isinstance(task.loss, WholeBatch) or not leaves or not fits(16)  # twice its rows
            if again and is_tight:
                return
            try:
                self.audit.read(running, batch, like, fits)
            except core.LossError as error:
                if task.strategy.is_lockstep:  # other ranks wait
                    raise
                ladder.refused = str(error)

    def _blocks(self, task: Task) -> list[str]:
        """Return the blocks that may run again."""
        found = find_blocks(task.model) if self._may_choose_blocks else ()
        return [name for name in found if (name, "recompute") not in self._distrusted]

    def _limited(self, task: Task, batch: core.Batch, wanted: int) -> int:
        """Return the rows that fit, by earlier failures; as wanted if the result depends on the cut."""
        keeps_cut = task.network.batch_norms and self.settings.batch_norm != "frozen"
        return wanted if keeps_cut else self.limits.size(batch.like, wanted)

    def learn(self, task: Task, batch: core.Batch, largest: int, failed: int) -> None:
        """Learn from micro-batches that went through: `failed` rows ran out of memory before, 0 for none."""
        if self._used is not None and not failed:
            ladder, rung, _ = self._used
            ladder.finish(rung, is_random=task.effects.draws or task.effects.draws_process)
        if failed or self.limits.known:
            self.limits.learn(batch.like, self._wanted, largest=largest, failed=failed)

    def explain(self) -> str:
        """Return the basis of the last plan within a budget, in words; "" without one."""
        return "" if self._used is None else self._used[0].note(self._used[1])

    def distrust(self, block: str, plan: Plan) -> bool:
        """Never choose this policy of a block again; return True if it was chosen here."""
        found = block, dict(plan.blocks).get(block, "")
        if self.budget is None or not self._may_choose_blocks or found in self._distrusted:
            return False
        self._distrusted.add(found)
        self.budget.forget()
        return True

    def room(self) -> float | None:
        """Return the bytes that a forward may take in this step; None without a budget."""
        return None if self._used is None else self._used[1].room(self._used[2])

    def enforced(
        self, task: Task, batch: core.Batch, ladder: planner.Ladder | None = None
    ) -> AbstractContextManager[object]:
        """Return a context in which the allocator of an accelerator itself keeps to the budget.

        The `ladder` is by default that of this step, if it has one.
        """
        if ladder is None and self._used is not None:
            ladder = self._used[0]
        # To look a device up takes milliseconds.
        if ladder is None or self.budget is None or task.network.kinds <= {"cpu"}:
            return NO_LIMIT
        places = task.network.devices
        leaves = [one for one in batch.leaves if one.device in places]
        held = ladder.held + sum(one.nbytes for one in leaves)
        self.limit = planner.limit_of(self.budget.memory, task, held)
        return accelerator.capped(*self.limit)

    def lifted(self) -> AbstractContextManager[object]:
        """Return a context without that limit, for the update: one that runs out of memory may be torn."""
        if self.limit is None or self._used is None:
            return NO_LIMIT
        (place, most), rung = self.limit, self._used[1]
        if not rung.steps or accelerator.reserved(place) + max(rung.updates) > most:
            accelerator.free_cache()  # or the update might not find what it needs in it
        return accelerator.capped(place, sys.maxsize)

    def foresee(
        self,
        task: Task,
        batch: core.Batch,
        *,
        memory: str | int | None,
        rows: int | None,
        device: str | torch.device | None,
    ) -> planner.PlanReport:
        """Return the cost of a batch of so many rows like these, on this device, within this much memory."""
        rows = batch.rows if rows is None else _at_least_one(rows)
        size = self._size(rows)
        request = planner.Request(
            task=task.alone(),
            batch=batch,
            like=_of_size(self.settings, rows, size),
            cut_refused=_why_uncut(task, self.settings),
            blocks=tuple(self._blocks(task)),
            sizes=() if self.micro_batch is None else (size,),
        )
        if self.budget is not None and memory is None and device is None:
            ladder = self.budget.ladder(task, self.settings, batch.kind)
            want = self._want(task, batch, ladder, rows=rows)
            if found := ladder.known(want):  # what the step itself will do
                rung, cut = found
                like = _of_cut(rung.settings, cut)
                settled = replace(request, like=like, blocks=(), sizes=(like.micro_batch,), cut_refused="")
                report = planner.find_plan(settled, self.budget.memory, None)
                return replace(report, notes=(ladder.note(rung), *report.notes))
            memory = self.budget.memory
        if memory is not None and request.depends_on_cut:
            with suppress(core.BudgetError):
                return planner.find_plan(replace(request, cut_refused=_DEPENDS), memory, device)
        return planner.find_plan(request, memory, device)

    def _size(self, rows: int) -> int:
        return rows if self.micro_batch is None else min(rows, self.micro_batch)


def whole_number(micro_batch: Any) -> int | None:
    """Rows of a micro-batch as a plain int, which a plan holds; None stays; others are a PlanError."""
    if micro_batch is None:
        return None
    if isinstance(micro_batch, Integral) and not isinstance(micro_batch, int):
        micro_batch = int(micro_batch)  # NumPy's
    check_micro_batch(micro_batch)
    return micro_batch


def _why_uncut(task: Task, settings: Plan) -> str:
    """Return the reason why the batch must not be cut; "" if it may."""
    norms = task.network.batch_norms
    if not norms or settings.batch_norm is not None:
        return ""
    return f"rows meet in {core.counted(len(norms), 'BatchNorm layer')} in training mode."


NO_LIMIT = nullcontext()


def _at_least_one(rows: object) -> int:
    if not isinstance(rows, Integral) or isinstance(rows, bool) or rows < 1:
        raise core.PlanError(
            f"Expected rows to be a whole number of at least 1, got {rows!r}. Leave it out for those of the "
            "batch."
        )
    return int(rows)  # NumPy's too; a plan holds a plain int


@lru_cache(maxsize=64)  # batches of an epoch have one or two sizes
def _of_size(like: Plan, rows: int, micro_batch: int) -> Plan:
    return replace(like, rows=rows, micro_batch=micro_batch, cut=())


def _of_cut(like: Plan, cut: tuple[int, ...]) -> Plan:
    """Return a plan of these micro-batches, the largest first if only the last one differs."""
    rows, size = sum(cut), max(cut)
    is_even = cut == tuple(core.cut_sizes(rows, size))
    return _of_size(like, rows, size) if is_even else replace(like, rows=rows, micro_batch=size, cut=cut)
