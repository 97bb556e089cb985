"""Micro-batches one after the other; one in which memory runs out is undone, and its rows come again."""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointError

from anybatch.batch import Batch, cut_sizes
from anybatch.errors import AnybatchError, LossError, NonFiniteLossError, OutOfMemoryError, PlanError
from anybatch.events import Event, MicroBatchDone, MicroBatchRedone
from anybatch.exhausted import free_caches, ran_out_of_memory, released
from anybatch.gradients import NonFinite
from anybatch.losses.loss import Share
from anybatch.meetings import BatchNorm, frozen, names
from anybatch.plan import Plan
from anybatch.recompute import applied, find_blocks
from anybatch.run import Redone, Run
from anybatch.task import Task

Blocks = tuple[tuple[str, str], ...]

_WINDOW = "the rows before it are in the sums of a window, so it cannot begin again"


class Smaller(Exception):  # noqa: N818
    """What cannot be mended on the way: the step is to begin again, cut into these parts."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(f"to be cut into {tuple(sizes)}")
        self.sizes = tuple(sizes)


class Skipped(Exception):  # noqa: N818
    """No update is to be made: values were not finite, and that is what was asked for then."""


class Course:
    """The way of a batch, or of one micro-batch of a window, through the model.

    Where memory runs out, the micro-batch at hand is undone: buffers, random streams, what is cached. Those
    before it stay in the sums. What comes next depends on how far it got:

    - no parameter has accepted it: its rows, and all that follow, are cut to half the size;
    - some have, half-way through a backward: they hold all of its rows, so its cut stays. It is done once
      more with every block recomputed, and sent into the others only. What follows is cut to half the size;
    - that fails too: the step begins again at half the size, the one case in which work is lost.

    So the result is, bit for bit, that of the same cut without the fault.

    Args:
        run: what the micro-batches are added to.
        plan: what was decided.
        task: what it is carried out on.
        batch: whose rows they are.
        share: gives the loss of any of these rows.
        sizes: how the rows are cut.
        offset: rows of the window before these.
        in_window: the rows of earlier micro-batches are gone, so nothing can begin again.
    """

    def __init__(
        self,
        *,
        run: Run,
        plan: Plan,
        task: Task,
        batch: Batch,
        share: Share,
        sizes: Sequence[int],
        offset: int = 0,
        in_window: bool = False,
    ) -> None:
        self.run, self.plan, self.task, self.batch, self.share = run, plan, task, batch, share
        self.sizes, self.offset, self.in_window = deque(sizes), offset, in_window

    def go(self) -> None:
        """Add all rows.

        Raises:
            OutOfMemoryError: nothing that keeps the result is left to try.
            Smaller: the step is to begin again.
        """
        start, blocks = 0, self.plan.blocks
        while self.sizes:
            with conditions(self.plan, self.task, blocks):
                start, said = self._add_as_far_as_it_goes(start)
            if said:
                start, blocks = self._mend(start, blocks, said)

    def _add_as_far_as_it_goes(self, start: int) -> tuple[int, str]:
        """Where it has come to, and what the allocator said if memory ran out."""
        micros = self.batch.parts(list(self.sizes), start)
        while self.sizes:
            said = self._begin() or self._add(micros, start)
            if said:
                return start, said
            start += self._done()
        return start, ""

    def _begin(self) -> str:
        """Note what the next micro-batch may change; what the allocator said if there is no room for it."""
        try:
            self.run.begin(draws=self.batch.draws, in_window=self.in_window)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return released(error)
        return ""

    def _add(self, micros: Iterator[Any], start: int, *, again: bool = False) -> str:
        rows, place = self.sizes[0], self.offset + start
        try:
            micro = next(micros)
            loss = self.share(place, place + rows)
            self.task.scale.begin()
            while True:
                try:
                    self.run.add(micro, loss, rows, again=again)
                    break
                except NonFinite as found:
                    where = found.where
                if self._is_given_up(where, place, rows):
                    break
                again = self.run.gradients.holds_part
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return released(error)
        return ""

    def _is_given_up(self, where: str, place: int, rows: int) -> bool:
        """Undo a micro-batch that is not finite; it comes again at a smaller loss scale, if there is one.

        What was accepted of it stays: that was finite, and is without scale.
        """
        scale = self.task.scale
        said = f"the {where} overflowed at a loss scale of {scale.value:g}"
        self._refuse_written(said, NonFiniteLossError)
        self._put_back_random()
        self.run.noted.put_back()
        if where == "gradient" and scale.give_way():
            self._tell(MicroBatchRedone(index=len(self.run.rows), rows=rows, reason=said))
            self.run.rescaled += 1
            return False
        match self.plan.non_finite:
            case "skip":
                raise Skipped
            case "drop" if not self.share(place, place + rows).tied:
                self.run.leave_out(rows)
                return True
            case policy:
                meet = ", and rows that meet in the loss cannot be left out" if policy == "drop" else ""
                raise NonFiniteLossError(
                    f"Expected a finite {where}, got NaN or infinity in micro-batch {len(self.run.rows)} "
                    f"(rows {place} to {place + rows - 1} of the batch) at a loss scale of "
                    f"{scale.value:g}{meet}. "
                    "No update was made. Look for bad data in these rows, a division by zero, or too high a "
                    'learning rate; Step(non_finite="drop") leaves such rows out, "skip" the update.'
                )

    def _refuse_written(self, said: str, kind: type[AnybatchError]) -> None:
        """Say so where a forward has written to parameters the very first time, and was not expected to."""
        written = self.run.written()
        self.task.streams.write(written)  # next time they are noted before
        if written:
            raise kind(
                f"Expected a forward that writes to no parameter, got {len(written)} that it had changed when "
                f"it was to be undone ({said}). No update was made, but these are not as before: load them again. "
                "From now on they are noted before each micro-batch."
            )

    def _put_back_random(self) -> None:
        """Begin the step again where it is not known from where a micro-batch drew."""
        if not self.run.is_random_known:  # a forward has begun to draw that never did
            self.task.streams.is_torchs_moved = True
            raise self._again(self._all_sizes)

    def _done(self) -> int:
        if self.task.streams.is_looking:
            self.task.streams.look(self.run.noted)
            self.task.streams.write(self.run.written())
        rows = self.sizes.popleft()
        if self.task.listeners:
            self._tell(MicroBatchDone(index=len(self.run.rows) - 1, rows=rows))
        return rows

    def _mend(self, start: int, blocks: Blocks, said: str) -> tuple[int, Blocks]:
        """Undo the micro-batch at hand, and do it again or cut what is left; where and how to go on."""
        rows = self.sizes[0]
        free_caches()
        is_random_known = self.run.is_random_known
        self._refuse_written(said, OutOfMemoryError)
        self.run.noted.put_back()
        self._tell(MicroBatchRedone(index=len(self.run.rows), rows=rows, reason=said))
        is_part_held = self.run.gradients.holds_part
        reason = self._why_not_cut(rows)
        self.run.redone.append(Redone(rows, may_be_cut=not reason))
        if not is_random_known:  # a forward has begun to draw that never did
            self.task.streams.is_torchs_moved = True
            raise self._again(self._all_sizes if reason else halves(self.batch.rows, rows))
        is_tied = self.share(self.offset + start, self.offset + start + rows).tied
        if not (is_part_held or is_tied or reason):
            self._cut(start, rows)
            return start, blocks
        every = tuple((name, "recompute") for name in find_blocks(self.task.model))
        try:
            again = self._add_again(start, every, is_part_held=is_part_held)
        except (
            PlanError,
            CheckpointError,
        ):  # of a block that cannot be run again, or is compiled with others
            every = self.plan.blocks
            self.run.noted.put_back()
            is_part_held = self.run.gradients.holds_part
            again = self._add_again(start, every, is_part_held=is_part_held)
        if again:
            if reason or self.in_window:
                raise out_of_memory(said, rows, reason or _WINDOW)
            raise self._again(halves(self.batch.rows, rows))
        start += self._done()
        if self.sizes and not (is_tied or reason):
            self._cut(start, rows)
            return start, blocks
        return start, every

    def _add_again(self, start: int, blocks: Blocks, *, is_part_held: bool) -> str:
        with conditions(self.plan, self.task, blocks):
            try:
                return self._add(self.batch.parts(list(self.sizes), start), start, again=is_part_held)
            except RuntimeError as error:
                if not is_part_held or isinstance(error, CheckpointError):
                    raise
                # Not every graph can be asked for some parameters only: reentrant checkpoints cannot.
                return released(error)

    def _cut(self, start: int, rows: int) -> None:
        """Cut what is left into halves of what was too large."""
        if self._is_uncut:  # which is another form of the loss
            raise self._again(halves(self.batch.rows, rows))
        self.sizes = deque(halves(self.batch.rows - start, rows))

    def _again(self, sizes: Sequence[int]) -> Exception:
        """What lets the step begin again; an error where not all would be as it was."""
        if self.run.before.holds(self.task.streams.written):
            return Smaller(sizes)
        return OutOfMemoryError(
            f"Expected a step that can begin again, got {len(self.task.streams.written)} parameters that its "
            "forward has written to for the first time. No update was made, but these are not as before: "
            "load them again. From now on they are noted."
        )

    @property
    def _all_sizes(self) -> list[int]:
        return [*self.run.rows, *self.sizes]

    @property
    def _is_uncut(self) -> bool:
        return not (self.in_window or self.plan.is_cut)

    def _why_not_cut(self, rows: int) -> str:
        return why_not_cut(self.plan, self.task, self.batch, rows, is_uncut=self._is_uncut)

    def _tell(self, event: Event) -> None:
        for listener in self.task.listeners:
            listener(event)


def conditions(plan: Plan, task: Task, blocks: Blocks) -> AbstractContextManager[None]:
    """What holds while micro-batches go through the model: some BatchNorms are frozen, blocks recomputed."""
    norms = task.batch_norms if plan.batch_norm == "frozen" else ()
    return _conditions(norms, task.model, blocks) if norms or blocks else nullcontext()


@contextmanager
def _conditions(norms: Sequence[BatchNorm], model: nn.Module, blocks: Blocks) -> Generator[None]:
    with frozen(norms), applied(model, blocks):
        yield


def halves(rows: int, too_large: int) -> list[int]:
    """A cut into parts of half the size of one that was too large.

    Example:
        >>> halves(10, 7)
        [4, 4, 2]
    """
    return cut_sizes(rows, -(-too_large // 2))


def why_not_cut(plan: Plan, task: Task, batch: Batch, rows: int, *, is_uncut: bool) -> str:
    """Why parts smaller than these rows would be impossible, or would change the result; empty if neither."""
    if rows == 1:
        return "one row is the least that can go through the model"
    if plan.batch_norm == "micro" and task.batch_norms:
        return (
            f"BatchNorm ({names(task.model, task.batch_norms)}) takes the statistics of each micro-batch, so "
            'the result would depend on the cut (batch_norm="frozen" and ab.batch_norm_to_group_norm do not)'
        )
    if is_uncut:
        try:
            task.before_cut(task, batch, -(-rows // 2))
        except (PlanError, LossError) as error:
            return f"the batch must not be cut: {error}"
    return ""


def out_of_memory(said: str, rows: int, reason: str) -> OutOfMemoryError:
    """The error for what cannot be mended.

    Args:
        said: the allocator's words.
        rows: of the micro-batch in which memory ran out.
        reason: why it is not cut further.
    """
    return OutOfMemoryError(
        f"Expected a micro-batch of {rows} rows to fit into memory, got none left ({said}). It was tried "
        f"again with caches freed and every block recomputed, and {reason}. No update was made. Free memory, "
        "make rows smaller or the model, or keep less: recompute, offload, a smaller optimizer state."
    )
