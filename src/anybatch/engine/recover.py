"""Recovery: undo the micro-batch that failed; then cut the rest smaller, restart the `add`, or raise."""

from collections.abc import Sequence
from dataclasses import replace

from anybatch import core
from anybatch.batchnorm import names_of_batch_norms
from anybatch.engine.part import Part
from anybatch.losses import EvaluateAgain
from anybatch.state import Snapshot, rng

_ALONE = "Expected more than 1 value per channel"  # of batch_norm and instance_norm
_AT_END = -2  # in `Tried.last`: memory ran out after the last micro-batch


class Restart(Exception):  # noqa: N818
    """A request to undo this `add` and begin it again, with another plan and what was tried so far."""

    def __init__(self, part: Part, sizes: Sequence[int]) -> None:
        super().__init__(f"to be cut into {tuple(sizes)}")
        self.plan = replace(part.ways.plan, cut=tuple(sizes))
        redone = tuple(part.sums.redone)
        self.tried = part.tried._replace(redone=redone, scale_limit=part.scale_limit)


class NotUndoneError(core.NonFiniteLossError):
    """An error for values that are not finite, and a forward that cannot be undone: it is never skipped."""


def recover(error: Exception, part: Part, before: Snapshot) -> None:
    """Undo the micro-batch that failed and change what is left; or ask for a restart; or raise.

    | failure | what comes next |
    |---|---|
    | memory ran out, nothing of the micro-batch accepted | its rows, and those that follow, in halves |
    | memory ran out, part of it accepted, a first pass, or shards | the `add` again, at half the size |
    | a gradient overflowed at a loss scale | the micro-batch again at half the scale, or the `add` |
    | a model's loss has another form than it had | the micro-batch again |
    | not finite at scale 1 | raise, drop the micro-batch, or skip the update: as asked |
    | anything else, of callbacks too, and all of these where other ranks wait | raised: all is as before |
    """
    if part.reader is not None:
        part.reader.close()
    if isinstance(error, EvaluateAgain):
        if not _undo(part, before, "to be evaluated again", core.LossError) or part.ways.is_lockstep:
            raise Restart(part, part.sizes())
    elif isinstance(error, core.NonFinite):
        _recover_from_overflow(error.where, part, before)
    elif not isinstance(error, core.AnybatchError) and core.ran_out_of_memory(error):
        said = core.released(error)
        core.free_caches()  # before anything is put back, which takes memory
        _recover_memory(said, part, before)
    else:
        place = part.place()
        if str(error).startswith(_ALONE) and " leaves one row" in place:
            raise core.PlanError(
                f"Expected two rows or more in a micro-batch, as BatchNorm needs, got one: {place}. No "
                "update was made. Take another micro_batch, or leave the row out."
            ) from error
        core.note(error, f"This error was raised in {place}.")
        if isinstance(error, RuntimeError) and (told := part.devices()):
            core.note(error, told)
        try:
            raise error
        finally:
            del error  # this frame would hold it, and it the frame: a circle that keeps the step's tensors


def _recover_memory(said: str, part: Part, before: Snapshot) -> None:
    task, batch, left = part.task, part.batch, part.left
    is_first_pass = not part.is_open
    rows = max(map(len, left)) if is_first_pass else len(left[0])
    is_complete = _undo(part, before, said, core.OutOfMemoryError)
    core.call(task.callbacks.redone, core.MicroBatchRedone(index=part.count, rows=rows, reason=said))
    reason = why_not_cut(part, rows)
    part.sums.redone.append(0 if reason else rows)
    first = -1 if is_first_pass else left[0][0]
    if reason and first in part.tried.last:
        raise core.OutOfMemoryError(
            f"Expected a micro-batch of {rows} rows to fit into memory, got none left ({said}). It was tried "
            f"again with caches freed, and {reason}. No update was made. Free memory, make rows or the model "
            "smaller, recompute, or offload: ab.plan tells what takes the memory."
        )
    must_restart = is_first_pass or part.has_accepted or not is_complete or part.ways.is_lockstep
    if reason:  # once more, with caches freed
        part.tried = part.tried._replace(last=part.tried.last | {first})
        if must_restart:
            raise Restart(part, part.sizes())
        return
    half = -(-rows // 2)
    is_whole_loss = part.ways.is_whole and not part.ways.plan.is_cut  # another form of the loss than a part's
    if must_restart or is_whole_loss or part.loss_of(left[0]).tied:
        halves = core.Cut.of_sizes(part.sizes()).halved().sizes  # parts of as many tokens
        raise Restart(part, halves if batch.order else core.cut_sizes(batch.rows, half))
    part.cut_smaller(half)


def _recover_from_overflow(where: str, part: Part, before: Snapshot) -> None:
    plan, task = part.ways.plan, part.task
    scale, at = task.scale, task.scale.value
    reached = rng.capture_process()
    said = f"the {where} overflowed at a loss scale of {at:g}"
    is_complete = _undo(part, before, said, NotUndoneError)
    rows = part.left[0]
    part.scale_before = part.scale_before or scale.state()
    if where == "gradient" and scale.give_way():
        core.call(task.callbacks.redone, core.MicroBatchRedone(index=part.count, rows=len(rows), reason=said))
        part.sums.redone.append(0)
        part.scale_limit = scale.value
        if part.has_accepted or not is_complete:
            raise Restart(part, part.sizes())
        return
    scale.load(part.scale_before)  # it was not at fault, and would take many updates to come back
    is_tied = part.loss_of(rows).tied
    if plan.non_finite == "drop" and not is_tied:
        if not is_complete:
            raise Restart(part, part.sizes())
        rng.restore_process(reached)  # with the same random numbers the next attempt might fail again
        part.leave_out()
        return
    meet = ", and rows that meet in the loss cannot be left out" if plan.non_finite == "drop" else ""
    failed = core.NonFiniteLossError(
        f"Expected a finite {where}, got NaN or infinity in micro-batch {part.count} "
        f"({part.rows_in_words(rows)} of the batch) at a loss scale of {at:g}{meet}. No update was made. "
        "Look for bad data in these rows, a division by zero (a mean over no valid target), or "
        'too high a learning rate; Options(non_finite="drop") leaves such rows out, "skip" the update.'
    )
    failed.reached = reached
    try:
        raise failed
    finally:
        del failed  # as in `recover`


def _undo(part: Part, before: Snapshot, said: str, kind: type[core.AnybatchError]) -> bool:
    """Undo the current micro-batch; return True if everything is as before it.

    Raises:
        AnybatchError: the forward has changed what cannot be put back; the message names it.
    """
    part.task.strategy.undo(said, kind)
    if written := before.written():
        part.task.effects.writes(written)  # next time they are noted before
        what, got, lost = "to no parameter", f"{len(written)} that it had changed", "these"
        advice = "load them again. From now on they are noted before each micro-batch."
    elif before.written_rows():
        what, got, lost = "not to its rows", "rows changed", "the rows"
        advice = "hand them over anew, and let the model work on a copy (x = x.clone())."
    elif tensors := before.written_tensors():
        what, got, lost = "to no tensor but buffers", f"{tensors} changed", "these"
        advice = "register them as buffers, which are put back."
    else:
        return before.undo_micro_batch()
    raise kind(
        f"Expected a forward that writes {what}, got {got} when a micro-batch was to be undone ({said}). "
        f"No update was made, but {lost} are not as before: {advice}"
    )


def why_not_cut(part: Part, rows: int) -> str:
    """Return the reason why parts of fewer rows are impossible or inexact; empty if they are neither."""
    plan, task = part.ways.plan, part.task
    if rows == 1:
        return "one row is the least that can go through the model"
    if plan.batch_norm != "frozen" and task.network.batch_norms:
        return (
            f"BatchNorm ({names_of_batch_norms(task.model, task.network.batch_norms)}) takes the statistics "
            "of each micro-batch, so the result would depend on the cut "
            '(batch_norm="frozen" and ab.batch_norm_to_group_norm do not)'
        )
    if part.ways.is_whole and not plan.is_cut:
        try:
            task.before_cut(task, part.batch, plan, -(-rows // 2))
        except (core.PlanError, core.LossError) as error:
            return f"the batch must not be cut: {error}"
    return ""


def restart_after_end(part: Part, *, is_memory: bool) -> Restart | None:
    """Return a restart after a failure behind the last micro-batch; None if the rows were run again before.

    Memory that ran out is met with parts of half the size, in one process only. A gradient that is not finite
    is met with a look at each micro-batch, which names the rows.
    """
    sums = part.sums
    if not is_memory:
        if part.is_guarded or part.ways.adds_over_ranks:
            return None
        part.tried = part.tried._replace(is_guarded=True)
        return Restart(part, sums.rows)
    rows = max(sums.rows, default=0)
    if _AT_END in part.tried.last or part.task.strategy.is_many or not rows or why_not_cut(part, rows):
        return None
    part.tried = part.tried._replace(last=part.tried.last | {_AT_END})
    sums.redone.append(rows)
    return Restart(part, core.Cut.of_sizes(sums.rows).halved().sizes)
