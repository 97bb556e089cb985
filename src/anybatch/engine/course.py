"""Micro-batches one after the other; one in which memory runs out is undone, and its rows come again."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.checkpoint import CheckpointError

from anybatch.core import Batch, MicroBatchDone, MicroBatchRedone, OutOfMemoryError, PlanError, tensors_in
from anybatch.engine.conditions import Blocks, conditions
from anybatch.engine.plan import Plan
from anybatch.engine.run import Redone, Run
from anybatch.engine.scaled import Adder
from anybatch.engine.smaller import begin_again, halves, out_of_memory, put_back, why_not_cut
from anybatch.engine.task import Task
from anybatch.losses import Share
from anybatch.recompute import find_blocks

_WINDOW = "the rows before it are in the sums of a window, so it cannot begin again"


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
        self._adder = Adder(run, plan, task, tensors_in(batch.whole))

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
        micros, draws = self.batch.parts(list(self.sizes), start), self.batch.draws
        while self.sizes:
            said = self._adder.begin(draws=draws, in_window=self.in_window) or self._add(micros, start)
            if said:
                return start, said
            start += self._done()
        return start, ""

    def _add(self, micros: Iterator[Any], start: int, *, again: bool = False) -> str:
        rows, place = self.sizes[0], self.offset + start
        return self._adder.add(
            lambda: (next(micros), self.share(place, place + rows)),
            place=place,
            left=self.sizes,
            again=again,
        )

    def _done(self) -> int:
        self.run.at_hand.look()
        rows = self.sizes.popleft()
        if self.task.listeners:
            self.task.tell(MicroBatchDone(index=len(self.run.rows) - 1, rows=rows))
        return rows

    def _mend(self, start: int, blocks: Blocks, said: str) -> tuple[int, Blocks]:
        """Undo the micro-batch at hand, and do it again or cut what is left; where and how to go on."""
        rows = self.sizes[0]
        is_random_known = put_back(self.run, self.task, said, OutOfMemoryError)
        self.task.tell(MicroBatchRedone(index=len(self.run.rows), rows=rows, reason=said))
        is_part_held = self.run.gradients.holds_part
        reason = self._why_not_cut(rows)
        self.run.redone.append(Redone(rows, may_be_cut=not reason))
        if not is_random_known:
            as_it_was = [*self.run.rows, *self.sizes]
            raise begin_again(self.run, self.task, as_it_was if reason else halves(self.batch.rows, rows))
        is_tied = self.share(self.offset + start, self.offset + start + rows).tied
        if not (is_part_held or is_tied or reason):
            self._cut(start, rows)
            return start, blocks
        every = tuple((name, "recompute") for name in find_blocks(self.task.model))
        try:
            again = self._add_again(start, every, is_part_held=is_part_held)
        except (PlanError, CheckpointError):  # a block cannot be run again, or is compiled with others
            every = self.plan.blocks
            self.run.at_hand.noted.put_back()
            is_part_held = self.run.gradients.holds_part
            again = self._add_again(start, every, is_part_held=is_part_held)
        if again:
            if reason or self.in_window:
                raise out_of_memory(said, rows, reason or _WINDOW)
            raise begin_again(self.run, self.task, halves(self.batch.rows, rows))
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
                return str(error)

    def _cut(self, start: int, rows: int) -> None:
        """Cut what is left into halves of what was too large."""
        if self._is_uncut:  # which is another form of the loss
            raise begin_again(self.run, self.task, halves(self.batch.rows, rows))
        self.sizes = deque(halves(self.batch.rows - start, rows))

    @property
    def _is_uncut(self) -> bool:
        return not (self.in_window or self.plan.is_cut)

    def _why_not_cut(self, rows: int) -> str:
        return why_not_cut(self.plan, self.task, self.batch, rows, is_uncut=self._is_uncut)
