"""Obeys a Plan on a logical batch; contains no doubt."""

from contextlib import ExitStack
from dataclasses import replace

from anybatch.core import (
    AnybatchError,
    Batch,
    LossError,
    NonFinite,
    NonFiniteLossError,
    OutOfMemoryError,
    StepReport,
    free_caches,
    ran_out_of_memory,
    released,
)
from anybatch.engine.conditions import conditions
from anybatch.engine.course import Course
from anybatch.engine.plan import Plan
from anybatch.engine.run import Redone, Run, without_update
from anybatch.engine.scaled import Skipped
from anybatch.engine.smaller import Smaller, halves, out_of_memory, why_not_cut
from anybatch.engine.task import Task
from anybatch.losses import Loss


def execute(plan: Plan, task: Task, batch: Batch) -> StepReport:
    """Carry out one logical step; on any failure before the update everything is put back.

    Where memory runs out in a micro-batch, the rows from there on are cut to half the size and the step goes
    on (`anybatch.engine.course`). The result is, bit for bit, that of a plan with the cut that is reported.

    Raises:
        OutOfMemoryError: one row does not fit, the update does not, or a smaller cut would change the result.
    """
    redone: list[Redone] = []
    found: StepReport | Plan = plan
    is_guarded = False
    while isinstance(found, Plan):
        try:
            with plan.precision.arithmetic():
                found = _attempt(found, task, batch, redone, is_guarded=is_guarded)
        except NonFinite:  # in the sum of all; once more, to see in which rows
            if is_guarded or plan.is_guarded:
                raise NonFiniteLossError(
                    f"Expected a finite sum of gradients, got NaN or infinity from {batch.rows} rows, though "
                    "that of each micro-batch is finite. No update was made. Accumulate in a wider dtype, or "
                    "make the loss smaller."
                ) from None
            is_guarded = True
        except NonFiniteLossError:
            raise
        except LossError as error:
            if plan.is_cut or found is plan:
                raise
            raise OutOfMemoryError(
                f"Expected {batch.rows} rows to fit into memory uncut, got none left, and the loss does not "
                f"allow a cut: {error}"
            ) from error
    for listener in task.listeners:
        listener(found)
    return found


def _attempt(
    plan: Plan, task: Task, batch: Batch, redone: list[Redone], *, is_guarded: bool
) -> StepReport | Plan:
    """The report, or the plan to begin again with."""
    loss = task.loss if plan.is_cut else task.loss.uncut()
    run = _begun(plan, task, batch, loss, is_guarded=is_guarded)
    run.redone = redone
    try:
        with ExitStack() as stack:
            computing = plan.precision.computing(task.kinds)
            with conditions(plan, task, plan.blocks), computing:  # in a first pass, too
                along = loss.along(batch, plan.sizes, task.model, run.before.put_buffers_back)
                share = stack.enter_context(along)
            sizes = plan.sizes
            Course(run=run, plan=plan, task=task, batch=batch, share=share, sizes=sizes).go()
        report = run.update()
    except Smaller as smaller:
        run.undo()
        return replace(plan, cut=smaller.sizes)
    except (
        Skipped,
        NonFinite,
        NonFiniteLossError,
    ) as error:  # in a micro-batch, in their sum, in a first pass
        run.undo(is_skipped=plan.non_finite == "skip")
        if plan.non_finite != "skip":
            raise
        getattr(error, "go_on", lambda: None)()  # where a loss has put streams back
        return without_update(run, batch.rows)
    except Exception as error:
        if run.is_updated or isinstance(error, AnybatchError) or not ran_out_of_memory(error):
            run.undo()
            raise
        said = released(error)
        free_caches()  # before anything is put back, which takes memory
        run.undo()
    except BaseException:
        run.undo()
        raise
    else:
        run.clear()
        return report
    return _after_first_pass(plan, task, batch, run, said)


def _begun(plan: Plan, task: Task, batch: Batch, loss: Loss, *, is_guarded: bool) -> Run:
    """All noted that surrounds the step; with caches freed, where there is no room otherwise."""
    said = ""
    for _ in range(2):
        try:
            return Run(plan, task, batch, loss, is_guarded=is_guarded)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            said = released(error)
        free_caches()
    raise OutOfMemoryError(
        f"Expected room for copies of buffers, which a failed step puts back, got none left ({said}). "
        "Nothing was changed. Free memory."
    )


def _after_first_pass(plan: Plan, task: Task, batch: Batch, run: Run, said: str) -> Plan:
    """Memory ran out outside of any micro-batch: a first pass of a loss can be had in smaller parts."""
    if run.rows:
        written = "" if run.before.holds(task.streams.written) else " but for what the forward has written to"
        raise OutOfMemoryError(
            f"Expected room to divide, clip or hand over the gradient of {batch.rows} rows, got none left "
            f"({said}). No update was made, and everything is as before{written}. Free memory, or accumulate "
            "in a narrower dtype."
        )
    rows = max(plan.sizes)
    reason = why_not_cut(plan, task, batch, rows, is_uncut=not plan.is_cut)
    if reason:
        raise out_of_memory(said, rows, reason)
    run.redone.append(Redone(rows, may_be_cut=True))
    return replace(plan, cut=tuple(halves(batch.rows, rows)))
