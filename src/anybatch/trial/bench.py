"""Bench: some rows, and all that a run on them reaches, which is put back when it is over"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import CellType
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from anybatch import core
from anybatch.engine import Task
from anybatch.losses import ModelTerms, WholeBatch
from anybatch.state import ObjectState, Reachable, rng
from anybatch.trial.rows import choose_rows, numbered_anew

PLAIN = {int, float, bool, str}
_MOST = 256  # items of a container whose numbers, strings and flags are read; a longer one is data


class Place(NamedTuple):
    """A number, string or flag that model or loss hold."""

    read: Callable[[Any], Any]
    key: Any
    holder: Any  # a dict or a list, or the variable of a closure

    @property
    def name(self) -> tuple[int, Any]:
        """The holder and the key."""
        return id(self.holder), None if isinstance(self.holder, CellType) else self.key

    def __hash__(self) -> int:
        return hash(self.name)

    def put(self, value: Any) -> None:
        """Put another value there."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


class Bench(NamedTuple):
    """Some rows, and what a run on them reaches beside the modules of its task."""

    task: Task
    rows: core.Batch
    noted: ObjectState

    def only(self, rows: Sequence[int]) -> "Bench":
        """Return some of the rows; with a loss over all rows, columns of row numbers number these."""
        few = self.rows.only(rows)
        is_mixed = isinstance(self.task.loss, WholeBatch)
        return self._replace(rows=numbered_anew(few, self.rows) if is_mixed else few)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that a run reaches; subclasses may have no memory of their own."""
        return [one for one in self.noted.found.values if type(one) in (Tensor, nn.Parameter)]


@contextmanager
def bench(task: Task, batch: core.Batch, rows: int = 0) -> Generator[Bench]:
    """Yield a bench with some rows of a batch, as different as possible, or with all; put everything back.

    Raises:
        OutOfMemoryError: the rows did not fit.
    """
    # A loss of the model's counts the rows of a step.
    loss = task.loss.call if isinstance(task.loss, ModelTerms) else task.loss
    modules, known = task.network.modules, [*task.network.everyone, *task.network.state.buffers_now()]
    known += [one.grad for one in task.network.everyone if one.grad is not None]
    with rng.preserved():  # `collate` may draw
        try:
            made = Bench(
                task,
                batch,
                ObjectState(
                    [task.model, loss, *modules, getattr(batch, "collate", None)],
                    but_for=known,
                ),
            )
            made = made.only(choose_rows(batch)(rows)) if 0 < rows < batch.rows else made
        except Exception as error:
            if not core.ran_out_of_memory(error):
                raise
            raise core.OutOfMemoryError(core.released(error)) from None  # to look at rows takes memory, too
        try:
            yield made
        finally:
            made.noted.put_back()


def places_of(found: Reachable) -> Iterator[Place]:
    """Yield the places of numbers, strings and flags; modules of torch have none that meet rows."""
    own = {id(vars(one)) for one in found.modules if type(one).__module__.startswith("torch.nn.")}
    for container in [one for one in found.containers if id(one) not in own and len(one) <= _MOST]:
        if isinstance(container, dict):
            table = cast("dict[Any, Any]", container)
            yield from [Place(table.get, key, table) for key, one in table.items() if type(one) in PLAIN]
        elif isinstance(container, list):
            items = enumerate(cast("list[Any]", container))
            yield from [Place(_item_of(container), at, container) for at, one in items if type(one) in PLAIN]
    yield from [Place(_content, cell, cell) for cell in found.cells if _has_content(cell)]
    for scope, names in found.scopes:
        yield from [Place(scope.get, name, scope) for name in names if type(scope.get(name)) in PLAIN]


def plain(value: Any) -> Any:
    """Return a number, string or flag; None for all else."""
    return value if type(value) in PLAIN else None


_content: Callable[[Any], Any] = attrgetter("cell_contents")


def _has_content(cell: object) -> bool:
    return hasattr(cell, "cell_contents")


def _item_of(items: Any) -> Callable[[int], Any]:
    return lambda at: items[at] if at < len(items) else None
