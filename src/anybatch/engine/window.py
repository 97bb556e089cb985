"""Window: from one update to the next. READ FIRST: forward, backward, end, update, failure."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from time import perf_counter
from typing import NamedTuple

from torch import Tensor
from torch.autograd.profiler import record_function

from anybatch import core
from anybatch.core import torch_private as private
from anybatch.engine.gradients import Gradient, clear
from anybatch.engine.part import NOTHING_TRIED, Part, Tried, Ways
from anybatch.engine.plan import Plan
from anybatch.engine.recover import NotUndoneError, Restart, recover, restart_after_end
from anybatch.engine.sums import Sums
from anybatch.engine.task import Reader, Task, context
from anybatch.engine.update import (
    TornUpdateError,
    clip,
    clip_entries,
    learning_rate_of,
    schedule_learning_rates,
    step_optimizers,
    zero_gradients,
)
from anybatch.losses import Share
from anybatch.state import Snapshot, rng


def fold(part: Part, before: Snapshot) -> None:
    """Run forward and backward of every micro-batch: THE LOOP."""
    strategy, has_profiler = part.task.strategy, private.has_caller_profiler()  # a label takes 11 us
    begun, done = part.listeners(before)  # most steps have none
    lockstep = strategy.is_lockstep  # then each micro-batch holds collectives
    if lockstep:
        strategy.open(part)
    with ExitStack() as passes:
        while part.left:
            try:
                if not (part.ways.is_plain or part.is_open):
                    part.first_pass(passes, before)
                for micro in part.micro_batches(before):
                    for heard in begun:
                        heard()
                    if has_profiler:
                        with record_function("anybatch.micro_batch"):
                            part.backward(part.evaluate(micro))
                    else:
                        part.backward(part.evaluate(micro))
                    part.done()
                    del micro  # before the next one is made
                    for heard in done:
                        heard()
            except Exception as error:
                recover(error, part, before)
        for rows in strategy.missing(part) if lockstep else ():
            if not part.is_open:
                part.first_pass(passes, before)
            part.accompany(rows)


class Finished(NamedTuple):
    """The finished gradient of a window, before anything is written."""

    gradient: Gradient
    weights: Mapping[str, float]
    norm: float  # 2-norm before clipping; NaN if nothing counts
    size: Tensor  # the same, on its device


class Window:
    """The micro-batches and sums of one update. A step has one `fold`, a window one for each `add`.

    Phases: open -> updated -> closed.
    """

    __slots__ = (
        "__weakref__",
        "_before",
        "_has_written",
        "_is_whole",
        "_phase",
        "_rows",
        "_settings",
        "_share",
        "_skipped",
        "_sums",
        "_task",
        "_ways",
        "reader",
    )

    def __init__(self, task: Task, settings: Plan, batch: core.Batch | None = None) -> None:
        self._task, self._settings, self._is_whole = task, settings, batch is not None
        self._before: Snapshot = snapshot(task, core.OpenBatch() if batch is None else batch)
        self._sums = Sums(settings, task, batch)
        self._phase, self._rows, self._has_written = "open", 0, False
        self._ways: Ways | None = None  # of the last plan
        self._share: Share | None = None  # returns the loss of some rows; of a window
        self.reader: Reader | None = None  # of the cost of an `add`
        self._skipped: core.NonFiniteLossError | None = None

    # ---- forward and backward

    def add_rows(
        self, plan: Plan, batch: core.Batch, tried: Tried = NOTHING_TRIED, *, is_dry: bool = False
    ) -> Part:
        """Run forward and backward of all rows; if this fails, all is as before it.

        A step may divide early and use torch's uncut loss; `discard` puts its snapshot back.
        """
        task, wanted, is_whole = self._task, plan, self._is_whole
        while True:
            before = self._before if is_whole else snapshot(task, batch)
            if self._ways is None or self._ways.plan is not plan:
                self._ways = Ways(plan, task, is_whole=is_whole, is_dry=is_dry)
            sums, others = Sums(plan, task, batch), None if is_whole else self._sums
            part = Part(task, self._ways, batch, sums, others, share=self._share, tried=tried)
            part.reader = self.reader or part.reader
            if is_whole:  # moved, not copied
                self._sums, self._rows = sums, batch.rows
            try:
                clear(task.network.everyone if is_whole else task.network.reached)
                fold(part, before)
                if task.network.reached and not is_whole:
                    before.put_gradients_back(task.network.reached)
                return part
            except Restart as again:
                put_back(before, part.sums)
                plan, tried = again.plan, again.tried
                if is_whole:
                    self._before = snapshot(task, batch)
            except BaseException as error:
                is_lasting = isinstance(error, NotUndoneError) or core.is_final(error)
                if (
                    plan.non_finite == "skip"
                    and isinstance(error, core.NonFiniteLossError)
                    and not is_lasting
                ):
                    reached = error.reached or rng.capture_process()
                    put_back(before, part.sums, error)
                    rng.restore_process(reached)  # the same random numbers would be as bad again
                    self._skipped = error.with_traceback(None)  # whose frames hold this window
                    return part
                if not is_whole:
                    put_back(before, part.sums, error)
                is_of_cut = isinstance(error, core.LossError) and not isinstance(
                    error, core.NonFiniteLossError
                )
                if is_of_cut and plan.is_cut != wanted.is_cut:
                    raise core.OutOfMemoryError(
                        f"Expected {batch.rows} rows to fit into memory uncut, got none left, and the loss "
                        f"does not allow a cut: {error}"
                    ) from error
                raise
            finally:
                sums.close()
                if part.reader is not None:
                    part.reader.close()

    def try_again(self, error: BaseException, part: Part) -> Restart | None:
        """Put all back after an end that failed, and return how the rows are run again; None if they are not.

        Raises:
            AnybatchError: they were run again already.
        """
        if self._phase != "open":  # an optimizer has written
            return None
        failed: core.AnybatchError | None = core.NonFiniteLossError(
            f"Expected a finite sum of gradients, got NaN or infinity from {self._rows} rows, though "
            "that of each micro-batch is finite. No update was made. Accumulate in a wider dtype, or make "
            "the loss smaller."
        )
        if not isinstance(error, core.NonFinite):
            failed = no_room_for_update(error, self._sums)
        again = error if isinstance(error, Restart) else None  # of another rank
        if failed is None and again is None:
            return None
        put_back(self._before, self._sums)
        again = again or restart_after_end(part, is_memory=isinstance(failed, core.OutOfMemoryError))
        if again is None:
            raise failed or error from None
        self._before = snapshot(self._task, part.batch)
        self._sums = Sums(again.plan, self._task, part.batch)
        return again

    # ---- the end, before the update: nothing is written yet

    def end(self, *, is_ours: bool = True) -> Finished:
        """Divide once, sum over ranks, and look at the gradient.

        Raises:
            NonFinite: the gradient is not finite.
            LossError, NonFiniteLossError: see `Sums.read`.
        """
        task, sums, judge = self._task, self._sums, self._task.progress.judge
        if judge is not None and task.strategy.is_many:  # before others wait for this rank
            judge(sums.rows, None)
        weights = task.strategy.close(sums)
        gradient = task.strategy.reduce(sums.finish(weights))
        if task.callbacks.gradients:
            observe(gradient, task)
        for parameter, found in self._before.gradients_found() if is_ours else ():
            if parameter in task.network.trained:
                gradient[parameter] = found + gradient[parameter] if parameter in gradient else found.clone()
        size = task.strategy.norm(values := [*gradient.values()])
        known, (norm,) = sums.read(weights, size)
        if not any(known.values()):
            return Finished({}, known, math.nan, size)
        if not math.isfinite(norm):
            if task.strategy.is_lockstep or not core.all_finite(values):  # ranks see other shards
                raise core.NonFinite("gradient")
            if is_ours and not math.isinf(sums.plan.clip_norm):
                raise core.NonFiniteLossError(
                    f"Expected a gradient whose norm can be clipped, got a norm of {norm}. No update was "
                    "made. Make the loss smaller, or accumulate in a wider dtype."
                )
        if judge is not None and not task.strategy.is_many:
            judge(sums.rows, report_of(sums, known, norm, updated=False))
        return Finished(gradient, known, norm, size)

    def show(self) -> core.StepReport:
        """End a dry run: only callbacks see the gradient."""
        task, sums = self._task, self._sums
        weights = task.strategy.close(sums)
        observe(task.strategy.reduce(sums.finish(weights)), task)
        known, _ = sums.read(weights, is_dry=True)
        return report_of(sums, known, math.nan, updated=False)

    def hand_over(self, take: Callable[[Gradient], object]) -> core.StepReport:
        """End before the update: hand the unscaled gradient to `take`; gradients found stay the caller's."""
        ended = self.end(is_ours=False)
        if any(ended.weights.values()):
            self._task.scale.updated()
        report = report_of(self._sums, ended.weights, ended.norm, updated=False)
        self._phase = "updated"
        take(ended.gradient)
        return report

    def give_sums(self, take: Callable[[Sums], object]) -> core.StepReport:
        """End before the division: the sums are handed to `take`, undivided, for a server that divides."""
        take(self._sums)
        return report_of(self._sums, {}, math.nan, updated=False)

    # ---- the update

    def write(self) -> core.StepReport:
        """End, clip, and step optimizers and schedulers. The gradients stay in `.grad` until `discard`."""
        gradient, weights, norm, size = self.end()
        task, sums, plan, reader = self._task, self._sums, self._sums.plan, self._task.reader
        if not any(weights.values()):
            self._phase = "updated"
            return report_of(sums, weights, norm, updated=False)
        if not math.isinf(plan.clip_norm):
            clip(gradient.values(), size, plan.clip_norm)
        if not math.isinf(plan.clip_value):
            clip_entries(gradient, plan.clip_value)
        try:
            if reader is not None:
                reader.begin_update()
            label = record_function if private.has_caller_profiler() else nullcontext
            with label("anybatch.update"), task.masters.raised(gradient, task.optimizers):
                step_optimizers(gradient, task.optimizers, plan.foreach)
                self._phase, self._has_written = "updated", True
                task.progress.updates += 1
            if reader is not None:
                reader.update_done()
            if task.scale.is_dynamic:
                task.scale.updated()
            report = report_of(sums, weights, norm, updated=True)  # the rate of this update
            if task.schedulers:
                try:
                    schedule_learning_rates(task.schedulers)
                finally:
                    task.progress.note(task.schedulers)
            if task.callbacks.parameters:
                core.call(task.callbacks.parameters, {name: one for one, name in task.names().items()})
        except TornUpdateError as torn:  # nothing can be put back
            self._phase, self._has_written = "updated", True
            core.mark_written(torn.error)
            raise torn.error from None
        except BaseException as error:
            if self._has_written:
                core.note_update(error, task.progress.updates)
            raise
        return report

    def finish(self, end: Callable[["Window"], core.StepReport]) -> core.StepReport:
        """End in this way, unless something was not finite and such an update is to be skipped."""
        try:
            if self._skipped is None:
                return end(self)
        except (core.NonFinite, core.NonFiniteLossError) as error:
            if self._settings.non_finite != "skip" or self._phase != "open" or core.is_final(error):
                raise
            found = error if isinstance(error, core.NonFiniteLossError) else self.not_finite()
            self._skipped = found.with_traceback(None)  # whose frames hold this window
        self._task.strategy.abandon(self._skipped)  # then the other ranks skip it, too
        reached = rng.capture_process()
        self._before.put_back()
        rng.restore_process(reached)  # the same random numbers would be as bad again
        self._phase = "updated"
        return report_of(self._sums, {}, math.nan, updated=False, rows=self._rows)

    def not_finite(self) -> core.NonFiniteLossError:
        """Return the error for a sum that is not finite, without the rows at fault."""
        return core.NonFiniteLossError(
            f"Expected a finite gradient, got NaN or infinity in the sum of {self._rows} rows. No update "
            'was made. A step on all rows at once names those that are bad, and non_finite="drop" or '
            '"skip" looks at each micro-batch as it comes.'
        )

    # ---- when it is over

    def discard(self, error: BaseException | None = None) -> None:
        """End the window. Without an update, model, gradients and random state are as before it.

        Args:
            error: the reason, which other ranks are told.
        """
        if self._phase == "closed":
            return
        task, sums = self._task, self._sums
        sums.close()
        if task.reader is not None:
            task.reader.close()
        if error is not None or self._phase == "open":
            task.strategy.abandon(error or core.WindowError(f"A window of {self._rows} rows was discarded."))
        if self._phase == "open":
            put_back(self._before, sums, error)
        else:
            if self._has_written:
                zero_gradients(task.optimizers)
                clear(task.network.parameters)
            else:
                self._before.put_gradients_back(task.network.parameters)
            if self._is_whole and task.network.others:  # a step has cleared theirs, too
                self._before.put_gradients_back(task.network.others)
        self._phase = "closed"
        sums.gradients = None  # a closed window that someone still holds keeps no gradient


def carry_out(
    plan: Plan,
    task: Task,
    batch: core.Batch,
    end: Callable[[Window], core.StepReport] = Window.write,
    *,
    is_dry: bool = False,
) -> core.StepReport:
    """Carry out one step: a window with one `add`. On any failure before the update all is as before.

    A step still has its rows. So it runs them again if memory runs out after the last micro-batch (in
    halves), or if the gradient is not finite (looking at each micro-batch, which names the rows).

    Raises:
        OutOfMemoryError: one row does not fit, the update does not, or a smaller cut would change the result.
    """
    end, task.progress.began = Window.show if is_dry else end, perf_counter()
    with context(plan, task):
        window = Window(task, plan, batch)
        try:
            tried = NOTHING_TRIED
            while True:
                part = window.add_rows(plan, batch, tried, is_dry=is_dry)
                try:
                    report = window.finish(end)
                    break
                except BaseException as error:
                    again = window.try_again(error, part)
                    if again is None:
                        raise
                    plan, tried = again.plan, again.tried
                del part  # and with it the sums that are not used
        except BaseException as error:
            window.discard(error)
            raise
        window.discard()
    if task.callbacks.update:
        task.callbacks.tell(report)
    return report


def accompany(sums: Sums) -> None:
    """Take part in an `add` of other ranks to a window, with micro-batches of weight 0."""
    task, plan = sums.task, sums.plan
    ways = Ways(plan, task, is_whole=False, is_dry=False)
    with task.loss.along(core.OpenBatch(), (), task.model, lambda: None) as share:
        own = Sums(plan, task, core.NoRows())
        part = Part(task, ways, core.NoRows(), own, sums, share=share, tried=NOTHING_TRIED)
        try:
            fold(part, snapshot(task, core.OpenBatch()))
            sums.take(part.sums)
        except Restart:  # another rank begins again
            clear(task.network.everyone)
        finally:
            own.close()


def observe(gradient: Gradient, task: Task) -> None:
    """Show the finished gradient to callbacks: whole, unscaled, before clipping."""
    names = task.names()
    core.call(task.callbacks.gradients, {names[one]: core.whole(value) for one, value in gradient.items()})


def put_back(before: Snapshot, sums: Sums, error: BaseException | None = None) -> None:
    """Put back all that a step may have changed, its loss scale too; the error names what cannot be."""
    sums.close()
    names = sums.task.names()
    lost = [*before.written_tensors(), *[names.get(one, "a parameter") for one in before.written()]]
    if before.written_rows():
        lost.append("rows of the batch")
    if lost and error is not None:
        error.add_note(
            f"All is as before the step but for {lost}, which the forward has written to in place."
        )
    before.put_back()
    if sums.scale_before is not None:
        sums.task.scale.load(sums.scale_before)


def report_of(
    sums: Sums, weights: Mapping[str, float], norm: float, *, updated: bool, rows: int | None = None
) -> core.StepReport:
    """Return the report of these sums."""
    (loss, terms), agreed, task = sums.value(weights), sums.agreed, sums.task
    return core.StepReport(
        loss=loss,
        terms=terms if weights else {},
        weights=weights,
        rows=(sum(sums.rows) if agreed is None else agreed.rows) if rows is None else rows,
        micro_batches=len(sums.rows),
        grad_norm=norm,
        updated=updated,
        cut=tuple(sums.rows),
        redone=len(sums.redone),
        too_large=sums.too_large() if sums.redone else 0,
        dropped=sums.dropped if agreed is None else agreed.dropped,
        scale=task.scale.value,
        update=task.progress.updates,
        learning_rate=learning_rate_of(task.optimizers),
        held=task.strategy.is_held,
        seconds=perf_counter() - task.progress.began,
        compared=task.progress.compared,
        unchecked=task.progress.unchecked,
    )


def snapshot(task: Task, batch: core.Batch) -> Snapshot:
    """Snapshot the state before a step; if memory runs out free caches and try once more."""
    said = ""
    for _ in range(2):
        try:
            return Snapshot(
                task.network.state,
                task.effects,
                parameters=task.network.everyone,
                rows=batch.leaves,
                draws=batch.draws,
            )
        except Exception as error:
            if not core.ran_out_of_memory(error):
                raise
            said = core.released(error)
            core.free_caches()
    raise core.OutOfMemoryError(
        f"Expected room for copies of buffers, which a failed step puts back, got none left ({said}). "
        "Nothing was changed. Free memory."
    )


def no_room_for_update(error: BaseException, sums: Sums) -> core.OutOfMemoryError | None:
    """Free caches and return the error for memory that ran out after the last micro-batch; else None."""
    if isinstance(error, core.AnybatchError) or not core.ran_out_of_memory(error):
        return None
    said = core.released(error)
    core.free_caches()  # before anything is put back, which takes memory
    return core.OutOfMemoryError(
        f"Expected room to divide, clip or hand over the gradient of {sum(sums.rows)} rows, got none left "
        f"({said}). No update was made, and everything is as before. Free memory, or accumulate in "
        "a narrower dtype."
    )
