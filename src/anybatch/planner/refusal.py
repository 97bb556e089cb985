"""Why nothing fits: the smallest budget that would, what holds it up, and what could be allowed."""

from collections.abc import Sequence
from dataclasses import replace

from anybatch.batchnorm import BatchNorm
from anybatch.core import Batch, BudgetError, PlanError, TraceError, counted, format_bytes, ran_out_of_memory
from anybatch.engine import Plan, Task
from anybatch.memory import Ledger
from anybatch.planner.report import Option
from anybatch.planner.trace import trace
from anybatch.precision import Precision
from anybatch.recompute import find_blocks

_LITTLE = 0.01  # of the peak: what frees less is not worth a choice that changes the result


def refusal(least: Option, budget: int, batch_norms: Sequence[BatchNorm], cut_refused: str) -> BudgetError:
    """The error that says why nothing fits.

    Args:
        least: the plan that takes fewest bytes; with its ledger, unless it could not be run to measure it.
        budget: what there is.
        batch_norms: modules in which rows meet.
        cut_refused: why the batch may not be cut; "" where it may.
    """
    held = least.ledger.largest(4) if least.ledger else ()
    holders = ", ".join(f"{format_bytes(one.bytes)} {one.owner} of {_quoted(one.module)}" for one in held)
    ways = suggestions(least.ledger, batch_norms, cut_refused, least.plan.precision)
    told = " ".join(ways) or "Allow that much, or make rows smaller or the model."
    largest = (
        f"Largest first: {holders}."
        if held
        else "It was not run, being over the budget, or memory ran out in it."
    )
    is_known = least.source == "predicted"  # what was measured need not be all that could be tried
    near = "" if is_known else "about " if held or least.source == "composed" else "at least "
    return BudgetError(
        f"Expected a plan within {format_bytes(budget)}, got none: the smallest budget for a batch of "
        f"{counted(least.plan.rows, 'row')} is {near}{format_bytes(least.peak)} ({least.peak} bytes), with "
        f"{counted(least.plan.micro_batch, 'row')} at a time. {largest} {told}",
        smallest=least.peak,
        ledger=least.ledger,
    )


def suggestions(
    ledger: Ledger | None, batch_norms: Sequence[BatchNorm], cut_refused: str, precision: Precision
) -> list[str]:
    """What would free bytes but changes the result, and so is the caller's to choose.

    Args:
        ledger: of the smallest plan; None where nobody knows.
        batch_norms: modules in which rows meet.
        cut_refused: why the batch may not be cut; "" where it may.
        precision: in which it is made.
    """
    held, little = (ledger.at_peak, _LITTLE * ledger.peak) if ledger else ({}, 0.0)
    ways: list[str] = []
    if cut_refused:
        ways.append(f"The batch may not be cut: {cut_refused}")
    if batch_norms and cut_refused:
        ways.append("With ab.batch_norm_to_group_norm(model), or batch_norm=..., it may be cut.")
    state = held.get("optimizer state", 0) * 3 / 4
    if state > little:
        ways.append(f"8-bit optimizer states would free about {format_bytes(state)}.")
    half = held.get("activations", 0) / 2
    if half > little and not precision.is_short:
        words = f'Activations in 16 bits, precision="bf16-mixed", would free up to {format_bytes(half)}.'
        ways.append(words)
    return ways


def _quoted(module: str) -> str:
    return repr(module) if module else "the model"


def single_rows(task: Task, batch: Batch, settings: Plan) -> Ledger | None:
    """Where the bytes of a step of single rows go, every block rebuilt; None where nobody knows.

    Args:
        task: what a step is carried out on.
        batch: the logical batch.
        settings: a plan without rows.
    """
    every = tuple((name, "recompute") for name in find_blocks(task.model))
    plan = replace(settings, rows=batch.rows, micro_batch=1, cut=(), blocks=settings.blocks or every)
    try:
        return trace(plan, task, batch).ledger
    except Exception as error:
        # It is asked for where memory is short, so it may run out here, too.
        if isinstance(error, PlanError | TraceError) or ran_out_of_memory(error):
            return None
        raise
