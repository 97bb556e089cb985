"""A worker of a parameter server: pulls parameters, folds the rows of a unit exactly, returns the sums"""

import copy
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from math import fsum
from types import CellType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from anybatch.core import AnybatchError, PlanError, tree
from anybatch.engine import Plan, Single, Task, tally, undivided
from anybatch.parallel.fingerprint import fingerprint
from anybatch.parallel.server import Array, Layout
from anybatch.state import Reachable, rng


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What the rows of a unit add up to, besides the sums of gradients, which go to the shards.

    Attributes:
        weights, totals: of each term.
        is_shared: whether the weights are those of all rows, as 1 for a plain sum.
        coefficients: the factor of each row of the sums in the loss; none where they are divided already.
        used: positions of the parameters that have a gradient.
        pulled: the version of each shard that a unit of an asynchronous round began with.
        steps: local updates.
        sent: bytes that go to each shard.
    """

    weights: dict[str, float]
    totals: dict[str, float]
    rows: int
    cut: tuple[int, ...]
    is_shared: bool = False
    coefficients: dict[str, float] = field(default_factory=dict[str, float])
    used: frozenset[int] = frozenset()
    pulled: tuple[int, ...] = ()
    steps: int = 1
    sent: tuple[int, ...] = ()


class HandOver(Single):
    """A strategy that keeps what the rows here add up to, so that somebody else divides it."""

    is_many = True  # nobody knows the weight of all rows here

    def __init__(self) -> None:
        self.folded: Folded | None = None
        self.banks: list[list[Tensor | None]] = []

    def close(self, sums: Any) -> dict[str, float]:
        """Keep the sums; no weights, so that nothing is divided."""
        here, (banks, coefficients) = tally(sums), undivided(sums)
        parameters: Sequence[nn.Parameter] = sums.task.parameters
        self.banks = [[bank.get(p) for p in parameters] for bank in banks]
        self.folded = Folded(
            weights=here.weights,
            totals=here.totals,
            rows=sum(sums.rows),
            cut=tuple(sums.rows),
            is_shared=here.is_shared,
            coefficients=coefficients,
            used=frozenset(i for i, p in enumerate(parameters) if any(p in bank for bank in banks)),
        )
        return {}

    def reduce(self, gradients: Any) -> Any:
        """Nothing is left to do."""
        return {}


def _told(method: Callable[..., Any]) -> Callable[..., Any]:
    """Errors in the code of the model or the loss say where, and can be sent to the driver."""

    @wraps(method)
    def call(*args: Any) -> Any:
        try:
            return method(*args)
        except AnybatchError:
            raise
        except Exception as error:
            said = f"On a worker:\n{traceback.format_exc()}"
            try:
                found: Exception = copy.copy(error)  # made anew from its arguments, as a copy that is sent
            except Exception:
                found = RuntimeError(f"{type(error).__name__}: {error}")
            found.add_note(said)
            raise found from None

    return call


class Worker:
    """Computes the rows that it is given, with the parameters of one version.

    Args:
        make: makes a step with a strategy of its own.
        layout: of the parameters in shards.
        expected: the driver's `identity`.
        is_alone: whether it makes updates of its own, for asynchronous rules.
    """

    def __init__(
        self, make: Callable[[Any], Any], layout: Layout, expected: Mapping[str, str], is_alone: bool
    ) -> None:
        self._layout, self._hand = layout, HandOver()
        self._codecs = [copy.deepcopy(layout.codec) for _ in layout.pieces]  # what waits is of one shard
        self._version = -1
        self._room: dict[int, Array] = {}
        # Raised when there is something to do: who makes the worker does not wait for it.
        self._failed: Exception | None = None
        try:
            self._step = make("local" if is_alone else self._hand)
            here = identity(self._step.task())
        except Exception as error:
            self._failed = error
            return
        if odd := [part for part in expected if here[part] != expected[part]]:
            self._failed = PlanError(
                f"Expected the same {odd[0]} on all workers as on the driver, got another on a worker. No "
                "update was made. Install the same versions of torch and of your code on all machines."
            )

    def _task(self) -> Task:
        """The parts of the step; raises why there is none."""
        if self._failed is not None:
            raise self._failed
        return self._step.task()

    def _here(self, rows: Any, task: Task) -> Any:
        """Tensors on the device of the model; samples are for `collate` to bring there."""
        device = task.parameters[0].device
        return rows if self._step.collate else tree.map_leaves(lambda leaf: leaf.to(device), rows)

    def fix(self, settings: Sequence[Mapping[str, Any]], *tensors: Tensor) -> None:
        """Take over what is not trained, as `settings_of` and `fixed_of` read it from the driver."""
        try:
            task = self._task()
            for module, given in zip(task.modules, settings, strict=True):
                vars(module).update(given)
            with torch.no_grad():
                for mine, value in zip(fixed_of(task), tensors, strict=True):
                    mine.copy_(value)
        except Exception as error:
            self._failed = error

    def _refuse_writes(self) -> None:
        effects = self._step.effects
        if odd := (*effects.buffers, *effects.parameters):
            raise PlanError(
                f"Expected a forward that writes to no buffer or parameter, got writes to {len(odd)}, "
                "as in spectral_norm and Embedding(max_norm=...): only workers would have what it writes. No "
                'update was made. Train it with strategy="local".'
            )

    @_told
    def fold(self, version: int, seed: int, rows: Any, *values: Array) -> tuple[Any, ...]:
        """Fold the rows of a unit.

        Args:
            version: of the parameters.
            seed: of what is drawn in the model: a unit done again draws the same.
            rows: of the unit, as for a step.
            values: the parameters, shard by shard.

        Returns:
            A `Folded`, and the sums for each shard, `(terms, elements)`; with a codec `(terms, bytes)`.
        """
        task = self._task()
        if version != self._version:
            self._layout.write(values, task.parameters)
            self._version = version
        with _seeded(seed):
            self._step.fold(self._here(rows, task))
        self._refuse_writes()
        folded, banks = self._hand.folded, self._hand.banks
        self._hand.folded, self._hand.banks = None, []
        terms = banks or [[None] * len(task.parameters)]
        return self._pushed(folded, [self._sums(terms, shard) for shard in range(len(self._layout.pieces))])

    def _sums(self, terms: Sequence[Sequence[Tensor | None]], shard: int) -> Array:
        """What goes to a shard, in memory of before: that of a new array takes longer than the copy."""
        first, end = self._layout.bounds[shard : shard + 2]
        out = self._room.get(shard)
        if out is None or len(out) != len(terms):
            out = self._room[shard] = np.empty((len(terms), end - first), self._layout.sum_dtype)
        for bank, row in zip(terms, out, strict=True):
            self._layout.flat(bank, shard, self._layout.sum_dtype, row)
        return out

    @_told
    def run(self, seed: int, parts: Sequence[Any], options: Any, *pulled: Any) -> tuple[Any, ...]:
        """Make an update of its own with each part of a unit.

        Args:
            seed: of what is drawn in the model.
            parts: rows of each update.
            options: of each group of each optimizer.
            pulled: version and parameters of each shard, one after the other.

        Returns:
            A `Folded`, and how far each shard's parameters have moved, as one term of sums.
        """
        task = self._task()
        versions, values = pulled[::2], pulled[1::2]
        self._layout.write(values, task.parameters)
        for optimizer, groups in zip(task.optimizers, options, strict=True):
            for group, given in zip(optimizer.param_groups, groups, strict=True):
                group.update(given)
        with _seeded(seed):
            reports = [self._step(self._here(part, task)) for part in parts]
        self._refuse_writes()
        totals = [{name: one.weights[name] * one.terms[name] for name in one.weights} for one in reports]
        folded = Folded(
            weights=added([one.weights for one in reports]),
            totals=added(totals),
            rows=sum(report.rows for report in reports),
            cut=tuple(size for report in reports for size in report.cut),
            pulled=versions,
            steps=max(1, sum(report.updated for report in reports)),
        )
        moved = [
            (self._layout.flat(task.parameters, shard, self._layout.dtype) - before)[np.newaxis]
            for shard, before in enumerate(values)
        ]
        return self._pushed(folded, moved)

    def _pushed(self, folded: Folded | None, parts: list[Array]) -> tuple[Any, ...]:
        """What goes to the driver and to each shard, through the codec, if there is one."""
        assert folded is not None  # noqa: S101 - a fold without an error has made it
        for shard, codec in enumerate(self._codecs):
            if codec is not None:
                parts[shard] = self._layout.encode(codec, parts[shard], shard)
        return replace(folded, sent=tuple(part.nbytes for part in parts)), *parts


def identity(task: Task) -> dict[str, str]:
    """A short hash of what workers and driver must have in common."""
    found = fingerprint(task, Plan(rows=0, micro_batch=0), None)
    return {part: found[part] for part in ("torch", "model", "loss")}


def added(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Numbers of the same name, added up."""
    names = {name: None for one in several for name in one}
    return {name: fsum(one.get(name, 0.0) for one in several) for name in names}


def fixed_of(task: Task) -> list[Tensor]:
    """Tensors that workers read and servers do not update: other parameters, and buffers."""
    return [*task.others, *[one for module in task.modules for one in module.buffers(recurse=False)]]


def settings_of(task: Task) -> list[dict[str, Any]]:
    """Modes, numbers and strings of each module: they may change between steps."""
    return [
        {name: value for name, value in vars(module).items() if _is_plain(value)} for module in task.modules
    ]


class Outside:
    """Numbers and strings that a model and a loss read outside their modules and arguments.

    Such as globals, variables of closures, and attributes of other objects: workers have those of the start.
    """

    def __init__(self, task: Task) -> None:
        found = Reachable([task.loss, task.model])
        named = set[str]().union(*[names for _, names in found.scopes])
        groups = [group for one in task.optimizers for group in one.param_groups]  # are sent, too
        own = {id(one) for one in (*map(vars, task.modules), *groups)}
        tables = [(one, named) for one in found.containers if isinstance(one, dict) and id(one) not in own]
        self._read = [(one, sorted(names & one.keys())) for one, names in (*found.scopes, *tables)]
        self._cells = [cell for cell in found.cells if cell != CellType()]  # filled
        self._first = self._now()

    def _now(self) -> list[tuple[str, Any]]:
        found = [(name, table.get(name)) for table, names in self._read for name in names]
        found += [("a variable of a closure", cell.cell_contents) for cell in self._cells]
        return [(name, tuple(one) if isinstance(one, list) else one) for name, one in found if _is_plain(one)]

    def refuse_changes(self) -> None:
        """Raises PlanError: something there is another than at the start."""
        odd = [now for now, first in zip(self._now(), self._first, strict=False) if now != first]
        if odd:
            raise PlanError(
                "Expected what the model and the loss read to stay as it was when workers started, got "
                f"another value of {odd[0][0]}: {odd[0][1]!r}. No update was made. Make it an attribute of "
                "the model or of a loss that is a module, put it in the batch, or call stop() first."
            )


def _is_plain(value: Any) -> bool:
    kinds = bool | int | float | str | None
    return isinstance(value, kinds) or (
        isinstance(value, list) and all(isinstance(one, kinds) for one in cast("list[Any]", value))
    )


@contextmanager
def _seeded(seed: int) -> Generator[None]:
    """What is drawn inside depends on the seed alone; outside all streams are as before."""
    with rng.preserved():
        rng.seed_process(seed)
        yield
