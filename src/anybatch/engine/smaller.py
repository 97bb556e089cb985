"""What is too large: whether it may be cut, into which parts, and whether a step may begin again."""

from collections.abc import Sequence

from anybatch.batchnorm import names_of_batch_norms
from anybatch.core import AnybatchError, Batch, LossError, OutOfMemoryError, PlanError, cut_sizes
from anybatch.engine.plan import Plan
from anybatch.engine.run import Run
from anybatch.engine.task import Task


class Smaller(Exception):  # noqa: N818
    """What cannot be mended on the way: the step is to begin again, cut into these parts."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(f"to be cut into {tuple(sizes)}")
        self.sizes = tuple(sizes)


def begin_again(run: Run, task: Task, sizes: Sequence[int]) -> Exception:
    """What lets the step begin again, cut into these parts; an error where not all would be as it was."""
    if run.before.holds(task.streams.written):
        return Smaller(sizes)
    return OutOfMemoryError(
        f"Expected a step that can begin again, got {len(task.streams.written)} parameters that its "
        "forward has written to for the first time. No update was made, but these are not as before: "
        "load them again. From now on they are noted."
    )


def put_back(run: Run, task: Task, said: str, kind: type[AnybatchError]) -> bool:
    """Undo the micro-batch at hand; whether it would draw the same random numbers again.

    Args:
        run: whose micro-batch it is.
        task: what it is carried out on.
        said: why it is undone.
        kind: of the error.

    Raises:
        AnybatchError: the forward has written to parameters the very first time, so they were not noted.
    """
    written = run.at_hand.written()
    task.streams.write(written)  # next time they are noted before
    if written:
        raise kind(
            f"Expected a forward that writes to no parameter, got {len(written)} that it had changed when it "
            f"was to be undone ({said}). No update was made, but these are not as before: load them again. "
            "From now on they are noted before each micro-batch."
        )
    is_known = run.at_hand.is_random_known
    run.at_hand.noted.put_back()
    if not is_known:  # a forward has begun to draw that never did
        task.streams.is_torchs_moved = True
    return is_known


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
    if plan.batch_norm != "frozen" and task.batch_norms:
        return (
            f"BatchNorm ({names_of_batch_norms(task.model, task.batch_norms)}) takes the statistics of each "
            "micro-batch, so the result would depend on the cut "
            '(batch_norm="frozen" and ab.batch_norm_to_group_norm do not)'
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
