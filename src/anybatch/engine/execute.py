"""One logical step: forward, backward, accumulate, update; and the one place where a failure is handled."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor, nn

from anybatch.batchnorm import names_of_batch_norms
from anybatch.core import (
    AnybatchError,
    Batch,
    Cut,
    LossError,
    MicroBatchDone,
    MicroBatchRedone,
    NonFinite,
    NonFiniteLossError,
    OutOfMemoryError,
    PlanError,
    StepReport,
    all_finite,
    cut_sizes,
    free_caches,
    ran_out_of_memory,
    released,
)
from anybatch.engine.accumulate import Accumulator, Redone
from anybatch.engine.gradients import Sums
from anybatch.engine.observer import Reader
from anybatch.engine.plan import Plan
from anybatch.engine.schedule import Schedule
from anybatch.engine.task import Task, context, label_for_profiler
from anybatch.engine.update import (
    TornUpdateError,
    clip,
    norm_of,
    note,
    note_update,
    schedule_learning_rates,
    step_optimizers,
)
from anybatch.losses import EvaluateAgain
from anybatch.state import Snapshot, rng


class Restart(Exception):  # noqa: N818
    """The step is to begin again, under `plan`, with an `Accumulator` that is given `again`."""

    def __init__(
        self, sums: Accumulator, sizes: Sequence[int], *, is_guarded: bool = False, scale: float = math.inf
    ) -> None:
        super().__init__(f"to be cut into {tuple(sizes)}")
        self.plan = replace(sums.plan, cut=tuple(sizes))
        self.again: dict[str, Any] = {
            "redone": sums.redone,
            "is_guarded": is_guarded or sums.is_guarded,
            "scale_limit": min(scale, sums.scale_limit),
            "last_tries": sums.last_tries,
        }


class NotUndoneError(NonFiniteLossError):
    """Values were not finite, and the forward has changed what cannot be put back: that is never skipped."""


def carry_out(plan: Plan, task: Task, batch: Batch, *, is_dry: bool = False) -> StepReport:
    """One logical step, begun again where it must be; see `execute`.

    Raises:
        OutOfMemoryError: one row does not fit, the update does not, or a smaller cut would change the result.
    """
    wanted, again = plan, dict[str, Any]()
    task.progress.began = time.perf_counter()
    while True:
        try:
            report = execute(plan, task, batch, is_dry=is_dry, **again)
        except Restart as restart:
            plan, again = restart.plan, restart.again
        except NonFiniteLossError:
            raise
        except LossError as error:
            if plan.is_cut == wanted.is_cut:
                raise
            raise OutOfMemoryError(
                f"Expected {batch.rows} rows to fit into memory uncut, got none left, and the loss does not "
                f"allow a cut: {error}"
            ) from error
        else:
            task.tell(report)
            return report


def execute(plan: Plan, task: Task, batch: Batch, *, is_dry: bool = False, **again: Any) -> StepReport:
    """Carry out one logical step; on any failure before the update everything is put back.

    Args:
        plan: what was decided.
        task: on what.
        batch: the rows.
        is_dry: show the gradients to observers, make no update, and put everything back.
        again: what a `Restart` said.
    """
    with context(plan, task):
        before = snapshot(task, batch)
        sums = Accumulator(plan, task, batch, is_dry=is_dry, **again)
        try:
            clear(task.everyone)
            with Schedule(plan, sums, before) as schedule:
                accumulate(schedule, sums, before)
            weights = task.strategy.close(sums)
            gradient = task.strategy.reduce(sums.finish(weights))
            observe(gradient, task)
            if is_dry:
                sums.read(weights)
                put_back(before, sums)
                return report_of(sums, weights, math.nan, updated=False)
            report = update(gradient, weights, sums, before)
            finish(sums, before)
            return report
        except NonFiniteLossError as error:
            reached = error.reached or rng.capture_process()
            put_back(before, sums, error)
            if plan.non_finite != "skip" or isinstance(error, NotUndoneError):
                raise
            task.strategy.abandon(error)  # then the others skip it, too
            rng.restore_process(reached)  # or the next step would draw what made this one bad
            return report_of(sums, {}, math.nan, updated=False, rows=batch.rows)
        except TornUpdateError as torn:  # nothing can be put back
            finish(sums, before)
            raise torn.error from None
        except BaseException as error:
            failed = no_room_for_update(error, sums)
            put_back(before, sums, error)
            if failed is None:
                raise
            raise _smaller(sums) or failed from None
        finally:
            sums.close()
            (task.reader or _NO_READER).close()


def accumulate(schedule: Schedule, sums: Accumulator, before: Snapshot) -> None:
    """Forward and backward of every micro-batch."""
    listeners, labelled = sums.task.listeners, label_for_profiler()
    while schedule.left:
        try:
            for micro in schedule:
                with labelled("anybatch.micro_batch"):
                    sums.begin(micro)
                    sums.backward(sums.evaluate(micro))
                schedule.done()
                before.look()
                for listener in listeners:
                    listener(MicroBatchDone(index=sums.count - 1, rows=len(micro.indices)))
                del micro  # before the next one is made
        except Exception as error:
            (sums.task.reader or _NO_READER).close()
            recover(error, schedule, sums, before)


def observe(gradient: Sums, task: Task) -> None:
    """Show the finished gradient to observers, unscaled, before clipping."""
    if task.observers:
        names = task.names()
        for observer in task.observers:
            observer.update({names[parameter]: value for parameter, value in gradient.items()})


def update(gradient: Sums, weights: Mapping[str, float], sums: Accumulator, before: Snapshot) -> StepReport:
    """Add gradients found before, look, clip once, update optimizers and schedulers.

    The gradients stay in `.grad`, so that they can be looked at, until `finish`.

    Raises:
        Restart: the gradient is not finite, and nobody has looked at the micro-batches.
    """
    task, plan = sums.task, sums.plan
    if not any(weights.values()):
        sums.read(weights)
        return report_of(sums, weights, math.nan, updated=False)
    for parameter, found in before.gradients_found():
        if parameter in task.trained:
            gradient[parameter] = found + gradient[parameter] if parameter in gradient else found.clone()
    norm = _look(gradient, weights, sums)
    reader = task.reader or _NO_READER
    try:
        reader.begin_update()
        with label_for_profiler()("anybatch.update"), task.masters.raised(gradient, task.optimizers):
            step_optimizers(gradient, task.optimizers, plan.foreach)
            sums.is_updated = True
            task.progress.updates += 1
        reader.update_done()
        task.scale.updated()
        report = report_of(sums, weights, norm, updated=True)  # with the learning rate of this update
        try:
            schedule_learning_rates(task.schedulers)
        finally:
            task.progress.note(task.schedulers)
        for observer in task.observers:
            if observer.wants_updated:
                observer.updated({name: parameter for parameter, name in task.names().items()})
    except TornUpdateError:
        sums.is_updated = True
        raise
    except BaseException as error:
        if not sums.is_updated:
            raise
        note_update(error, task.progress.updates)
        raise TornUpdateError(error) from None
    return report


def recover(error: Exception, schedule: Schedule, sums: Accumulator, before: Snapshot) -> None:
    """Undo the micro-batch that failed and change what is left of the schedule; or restart; or raise.

    | failure | what comes next |
    |---|---|
    | memory ran out, nothing of the micro-batch accepted | its rows, and those that follow, in halves |
    | memory ran out, part of it accepted, or in a first pass | the step again, at half the size |
    | a gradient overflowed at a loss scale | the micro-batch again at half the scale, or the step |
    | a model's loss has another form than it had | the micro-batch again |
    | not finite at scale 1 | raise, drop the micro-batch, or skip the update: as asked |
    | anything else, and all of these where other ranks wait | raised: all is as before |
    """
    if isinstance(error, EvaluateAgain):
        if not _undo(before, sums.task, "to be evaluated again", LossError):
            raise Restart(sums, [*sums.rows, *map(len, schedule.left)])
    elif isinstance(error, NonFinite):
        _recover_from_overflow(error.where, schedule, sums, before)
    elif not isinstance(error, AnybatchError) and ran_out_of_memory(error):
        said = released(error)
        free_caches()  # before anything is put back, which takes memory
        _recover_memory(said, schedule, sums, before)
    else:
        note(error, f"This error was raised in {schedule.place()}.")
        try:
            raise error
        finally:
            del error  # this frame would hold it, and it the frame: a circle that keeps the step's tensors


def _recover_memory(said: str, schedule: Schedule, sums: Accumulator, before: Snapshot) -> None:
    plan, task, batch = sums.plan, sums.task, sums.batch
    is_first_pass = not schedule.is_open
    sizes = [*map(len, schedule.left)]
    rows = max(sizes) if is_first_pass else sizes[0]
    is_complete = _undo(before, task, said, OutOfMemoryError)
    task.tell(MicroBatchRedone(index=sums.count, rows=rows, reason=said))
    reason = why_not_cut(sums, rows)
    sums.redone.append(Redone(rows, may_be_cut=not reason))
    first = -1 if is_first_pass else schedule.left[0][0]
    if reason and first in sums.last_tries:
        raise OutOfMemoryError(
            f"Expected a micro-batch of {rows} rows to fit into memory, got none left ({said}). It was tried "
            f"again with caches freed, and {reason}. No update was made. Free memory, make rows smaller or "
            "the model, or keep less: recompute, offload, a smaller optimizer state."
        )
    must_restart = is_first_pass or sums.has_accepted or not is_complete
    if reason:  # once more, with caches freed
        sums.last_tries = sums.last_tries | {first}
        if must_restart:
            raise Restart(sums, [*sums.rows, *sizes])
        return
    half = -(-rows // 2)
    is_whole_loss = not (sums.is_in_window or plan.is_cut)  # another form of the loss than that of a part
    if must_restart or is_whole_loss or sums.share(schedule.left[0]).tied:
        halves = Cut.of_sizes([*sums.rows, *sizes]).halved().sizes  # parts of as many tokens
        raise Restart(sums, halves if batch.order else cut_sizes(batch.rows, half))
    schedule.cut_smaller(half)


def _recover_from_overflow(where: str, schedule: Schedule, sums: Accumulator, before: Snapshot) -> None:
    plan, task = sums.plan, sums.task
    scale, at = task.scale, task.scale.value
    reached = rng.capture_process()
    said = f"the {where} overflowed at a loss scale of {at:g}"
    is_complete = _undo(before, task, said, NotUndoneError)
    rows = schedule.left[0]
    schedule.scale_before = schedule.scale_before or scale.state()
    same = [*sums.rows, *map(len, schedule.left)]
    if where == "gradient" and scale.give_way():
        task.tell(MicroBatchRedone(index=sums.count, rows=len(rows), reason=said))
        sums.redone.append(Redone(len(rows), may_be_cut=False))
        if sums.has_accepted or not is_complete:
            raise Restart(sums, same, scale=scale.value)
        sums.scale_limit = scale.value
        return
    scale.load(schedule.scale_before)  # it was not at fault, and would take many updates to come back
    is_tied = sums.share(rows).tied
    if plan.non_finite == "drop" and not is_tied:
        if not is_complete:
            raise Restart(sums, same)
        rng.restore_process(reached)  # who goes on draws other numbers: the same might be as bad again
        sums.leave_out(len(rows))
        schedule.done()
        return
    meet = ", and rows that meet in the loss cannot be left out" if plan.non_finite == "drop" else ""
    named = sums.batch.rows_in_words(sums.offset + rows[0], sums.offset + rows[-1] + 1)
    failed = NonFiniteLossError(
        f"Expected a finite {where}, got NaN or infinity in micro-batch {sums.count} "
        f"({named} of the batch) at a loss scale of {at:g}{meet}. No update was made. "
        "Look for bad data in these rows, a division by zero (a mean over no valid target), or "
        'too high a learning rate; Step(non_finite="drop") leaves such rows out, "skip" the update.'
    )
    failed.reached = reached
    raise failed


def _undo(before: Snapshot, task: Task, said: str, kind: type[AnybatchError]) -> bool:
    """Undo the micro-batch at hand; whether everything is as it was before it.

    Raises:
        AnybatchError: the forward has changed what cannot be put back; the message names it.
    """
    task.strategy.undo(said, kind)
    if written := before.written():
        task.effects.writes(written)  # next time they are noted before
        raise kind(
            f"Expected a forward that writes to no parameter, got {len(written)} that it had changed when it "
            f"was to be undone ({said}). No update was made, but these are not as before: load them again. "
            "From now on they are noted before each micro-batch."
        )
    if before.written_rows():
        raise kind(
            f"Expected a forward that leaves its rows as they are, got one that had changed them when a "
            f"micro-batch was to be undone ({said}). No update was made, but the rows are not as before: "
            "hand them over anew, and let the model work on a copy (x = x.clone())."
        )
    if tensors := before.written_tensors():
        raise kind(
            f"Expected a forward that writes to no tensor but buffers, got {tensors} changed when a "
            f"micro-batch was to be undone ({said}). No update was made, but these are not as before. "
            "Register them as buffers, which are put back."
        )
    return before.undo_micro_batch()


def why_not_cut(sums: Accumulator, rows: int) -> str:
    """Why parts smaller than these rows would be impossible, or would change the result; empty if neither."""
    plan, task = sums.plan, sums.task
    if rows == 1:
        return "one row is the least that can go through the model"
    if plan.batch_norm != "frozen" and task.batch_norms:
        return (
            f"BatchNorm ({names_of_batch_norms(task.model, task.batch_norms)}) takes the statistics of each "
            "micro-batch, so the result would depend on the cut "
            '(batch_norm="frozen" and ab.batch_norm_to_group_norm do not)'
        )
    if not (sums.is_in_window or plan.is_cut):
        try:
            task.before_cut(task, sums.batch, plan, -(-rows // 2))
        except (PlanError, LossError) as error:
            return f"the batch must not be cut: {error}"
    return ""


_NO_READER = Reader()


def put_back(before: Snapshot, sums: Accumulator, error: BaseException | None = None) -> None:
    """Put back all that a step may have changed, its loss scale too; the error names what cannot be."""
    sums.close()
    lost = [
        *before.written_tensors(),
        *[sums.task.names().get(one, "a parameter") for one in before.written()],
    ]
    if before.written_rows():
        lost.append("rows of the batch")
    if lost and error is not None:
        error.add_note(
            f"All is as before the step but for {lost}, which the forward has written to in place."
        )
    before.put_back()
    sums.task.scale.load(sums.scale_before)


def report_of(
    sums: Accumulator, weights: Mapping[str, float], norm: float, *, updated: bool, rows: int | None = None
) -> StepReport:
    """What is reported of these sums."""
    (loss, terms), agreed = sums.value(weights), sums.agreed
    return StepReport(
        loss=loss,
        terms=terms if weights else {},
        weights=weights,
        rows=(sum(sums.rows) if agreed is None else agreed.rows) if rows is None else rows,
        micro_batches=len(sums.rows),
        grad_norm=norm,
        updated=updated,
        cut=tuple(sums.rows),
        redone=len(sums.redone),
        too_large=too_large(sums.redone),
        dropped=sums.dropped if agreed is None else agreed.dropped,
        scale=sums.task.scale.value,
        update=sums.task.progress.updates,
        learning_rate=sums.task.learning_rate(),
        seconds=time.perf_counter() - sums.task.progress.began,
        unchecked=sums.task.progress.unchecked,
    )


def too_large(redone: Sequence[Redone]) -> int:
    """Rows of the smallest micro-batch that is to be smaller from now on; 0 where there is none."""
    return min([one.rows for one in redone if one.may_be_cut], default=0) if redone else 0


def snapshot(task: Task, batch: Batch) -> Snapshot:
    """All noted that surrounds the step; with caches freed, where there is no room otherwise."""
    rows: Sequence[Tensor] = getattr(batch, "leaves", ())
    said = ""
    for _ in range(2):
        try:
            before = Snapshot(
                task.state, task.effects, parameters=task.everyone, rows=rows, draws=batch.draws
            )
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            said = released(error)
            free_caches()
        else:
            return before
    raise OutOfMemoryError(
        f"Expected room for copies of buffers, which a failed step puts back, got none left ({said}). "
        "Nothing was changed. Free memory."
    )


def no_room_for_update(error: BaseException, sums: Accumulator) -> OutOfMemoryError | None:
    """The error for memory that ran out after the last micro-batch, with caches freed; None for others."""
    if isinstance(error, AnybatchError) or not ran_out_of_memory(error):
        return None
    said = released(error)
    free_caches()  # before anything is put back, which takes memory
    return OutOfMemoryError(
        f"Expected room to divide, clip or hand over the gradient of {sum(sums.rows)} rows, got none left "
        f"({said}). No update was made, and everything is as before. Free memory, or accumulate in "
        "a narrower dtype."
    )


_AT_END = -2  # in `last_tries`: memory ran out after the last micro-batch


def _smaller(sums: Accumulator) -> Restart | None:
    """Return a restart in parts of half the size, once a step, where one process may choose them."""
    rows = max(sums.rows, default=0)
    if _AT_END in sums.last_tries or sums.task.strategy.is_many or not rows or why_not_cut(sums, rows):
        return None
    sums.last_tries = sums.last_tries | {_AT_END}
    sums.redone.append(Redone(rows, may_be_cut=True))
    return Restart(sums, Cut.of_sizes(sums.rows).halved().sizes)


def finish(sums: Accumulator, before: Snapshot) -> None:
    """The step is over: drop the gradients; those that were found and not used come back."""
    task = sums.task
    if sums.is_updated:
        clear(task.parameters)
    before.put_gradients_back(task.others if sums.is_updated else None)


def _look(gradient: dict[nn.Parameter, Tensor], weights: Mapping[str, float], sums: Accumulator) -> float:
    """The norm before clipping, read with the loss; where it is not finite the gradients are looked at."""
    values, most = list(gradient.values()), sums.plan.clip_norm
    norm = norm_of(values)
    (size,) = sums.read(weights, norm)
    if not math.isfinite(size):
        if not all_finite(values):
            _refuse(sums)
        if not math.isinf(most):
            raise NonFiniteLossError(
                f"Expected a gradient whose norm can be clipped, got a norm of {size}. No update was made. "
                "Make the loss smaller, or accumulate in a wider dtype."
            )
    if not math.isinf(most):
        clip(values, norm, most)
    return size


def _refuse(sums: Accumulator) -> NoReturn:
    """The sum of gradients is not finite."""
    if sums.is_in_window:
        raise NonFinite("gradient")
    if not (sums.is_guarded or sums.is_synced):
        raise Restart(sums, sums.rows, is_guarded=True)  # which sees in which rows
    raise NonFiniteLossError(
        f"Expected a finite sum of gradients, got NaN or infinity from {sum(sums.rows)} rows, though "
        "that of each micro-batch is finite. No update was made. Accumulate in a wider dtype, or make "
        "the loss smaller."
    )


def clear(parameters: Iterable[nn.Parameter]) -> None:
    """Drop the gradients of these parameters."""
    for parameter in parameters:
        parameter.grad = None
