"""The witness: the loss of all rows at once, beside that of the micro-batches, both without a graph."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor
from torch.nn.parameter import is_lazy

from anybatch.compare.covers import Doubt
from anybatch.compare.look import reached_by, tensors_of
from anybatch.compare.outcome import Looked, Split, differ, outcome_of
from anybatch.core import Batch, LossError, OutOfMemoryError, SampleBatch, cut_sizes
from anybatch.engine import Plan, Task
from anybatch.memory import MemoryReading, find_device, parse_memory
from anybatch.state import rng

_SHARE = 0.5  # of the free memory that all rows may take where there is no budget
_LEAST = 2  # times the rows of the largest micro-batch


def refuse_another_loss(
    task: Task, batch: Batch, plan: Plan, room: float | None, *, held: int
) -> Doubt | None:
    """Compare the loss of all rows, at once or in the largest parts that fit, with that of the micro-batches.

    It shows what a few rows cannot: a mean of the 16 largest losses, a router whose capacity depends on the
    rows. Both sides run without a graph, with dropout at its expected value, and all is put back. Return the
    reason why nothing can be said, or None.

    Args:
        task: model and loss.
        batch: all rows of an update.
        plan: how they are cut.
        room: bytes that forwards may take; None for half of the memory that is free.
        held: the last update at which the losses were the same; 0 for none.

    Raises:
        LossError: the losses differ by more than rounding.
    """
    if task.network.batch_norms and plan.batch_norm != "frozen":
        return Doubt('batch_norm="micro" takes the statistics of each micro-batch', is_quiet=True)
    if any(map(is_lazy, task.network.everyone)):
        return Doubt("parameters are lazy", is_quiet=True)
    copies = sum(one.nbytes for one in getattr(batch, "leaves", ()))  # a forward may write to its rows
    if room is not None and 2 * copies > room:
        return Doubt("the budget has no room for copies of all rows")
    plan = replace(plan, blocks=())  # recomputation changes nothing without a graph
    with rng.preserved():
        noted = reached_by(task, batch)
        try:
            return _compare(task, batch, plan, room, held, tensors_of(noted))
        except OutOfMemoryError:
            return Doubt("memory ran out in a forward of all rows")
        finally:
            noted.put_back()


def _compare(
    task: Task, batch: Batch, plan: Plan, room: float | None, held: int, reached: Sequence[Tensor]
) -> Doubt | None:
    cut = Split(plan.sizes)
    if room is not None and isinstance(batch, SampleBatch):  # collated rows are copied, and held twice
        cut = Split(tuple(cut_sizes(batch.rows, max(1, max(cut.sizes) // 3))))
    reading = MemoryReading.begin(task.network.devices)
    try:
        parts = outcome_of(task, batch, plan, cut, reached=reached, has_graph=False)
    finally:
        read = reading.end() if reading is not None else None
    if not isinstance(parts, Looked):  # the step itself will tell
        return Doubt(f"the loss without a graph gave {type(parts).__name__}: {parts}", is_quiet=True)
    if room is None:
        room = _SHARE * parse_memory("auto", find_device(next(iter(task.network.devices))))
    largest = max(cut.sizes)
    bytes_of_all = (read[0] if read else room * largest) * batch.rows / largest
    size = batch.rows if bytes_of_all <= room else int(batch.rows * room / bytes_of_all)
    if min(size, batch.rows) < min(_LEAST * largest, batch.rows):
        return Doubt("no memory is free for a forward of more rows than a micro-batch has")
    again = partial(
        outcome_of,
        task,
        batch.padded(),
        plan,
        is_watched=not parts.is_quiet,
        like=parts.seen,
        reached=reached,
        has_graph=False,
    )
    whole = again(Split(tuple(cut_sizes(batch.rows, size))))
    if not isinstance(whole, Looked):
        return Doubt(f"{batch.rows} rows at once gave {type(whole).__name__}: {whole}", is_quiet=True)
    found = differ(whole, parts)
    if not (whole.is_weighed and parts.is_weighed):
        return Doubt("no row has weight", is_quiet=True)
    if found is None:
        return None
    same = again(whole.cut)
    if whole.is_random or parts.is_random or not isinstance(same, Looked) or differ(whole, same):
        return Doubt("the same rows give another loss the second time", is_quiet=True)
    if found.is_small:
        return Doubt(f"the losses of all rows and of micro-batches are {found.words}, near rounding")
    since = f"It was the same at update {held}. " if held else ""
    raise LossError(
        f"Expected the same loss from {batch.rows} rows as {_told(whole.cut)} and as {_told(cut)}, got "
        f"{found.words}. {since}Rows affect each other, in the loss or in the model: see ab.WholeBatch. "
        "No update was made; ab.check(model, loss, batch) names the place, Options(check=False) skips this."
    )


def _told(cut: Split) -> str:
    """Return the rows of each part, shortened."""
    sizes = cut.sizes
    return str(cut) if len(sizes) <= 4 else f"{sizes[0]}+{sizes[1]}+...+{sizes[-1]}"
