"""Peak tensor bytes of one update, for few and for many micro-batches of the same size."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from anybatch.memory.meter import Meter
from benchmarks.config import MemoryCase
from benchmarks.contestants import Entry, Update
from benchmarks.race import quiet_collector
from benchmarks.results import Memory
from benchmarks.tasks import TASKS, make_batch, make_model


def memory(case: MemoryCase, builders: Mapping[str, Callable[[Entry], Update]], *, seed: int) -> Memory:
    """Measure every contestant at both numbers of micro-batches."""
    few = {name: _peak(case, build, case.few, seed=seed) for name, build in builders.items()}
    many = {name: _peak(case, build, case.many, seed=seed) for name, build in builders.items()}
    return Memory(
        case=case,
        held=few["hand"].held,
        batch=(few["hand"].batch, many["hand"].batch),
        few={name: found.peak for name, found in few.items()},
        many={name: found.peak for name, found in many.items()},
    )


class _Bytes(NamedTuple):
    """The batch itself is in none but its own."""

    peak: int
    held: int
    batch: int


def _peak(case: MemoryCase, build: Callable[[Entry], Update], micro_batches: int, *, seed: int) -> _Bytes:
    """The second update is measured: the optimizer has made its state in the first.

    The logical batch is the caller's and grows with the number of micro-batches, so it stays out of the
    peak; a copy of it would not. The garbage collector is off: what hangs in a reference cycle counts.
    """
    task = TASKS[case.task]
    model = make_model(task, seed=seed)
    optimizer = task.optimizer(model.parameters())
    entry = Entry(task=task, model=model, optimizer=optimizer, rows=case.rows, micro_batches=micro_batches)
    update = build(entry)
    batch = make_batch(task, case.rows * micro_batches, seed=seed, ragged=case.ragged)
    with quiet_collector():
        update((batch[0][: case.rows], batch[1][: case.rows]))
        with Meter(model, [optimizer], batch_leaves=batch) as meter:
            update(batch)
    given = sum(leaf.nbytes for leaf in batch)
    return _Bytes(peak=meter.peak - given, held=meter.held - given, batch=given)
