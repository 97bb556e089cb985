"""A worker of a parameter server: pulls parameters, folds the rows of a unit, returns the sums."""

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from types import CellType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from anybatch.core import AnybatchError, PlanError, tree
from anybatch.engine import Gradient, Plan, Strategy, Sums, Task, finish
from anybatch.parallel.fingerprint import fingerprint
from anybatch.parallel.server import Array, Layout
from anybatch.state import Reachable, rng


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The sums of a unit's rows, besides the gradient sums, which go to the shards."""

    weights: dict[str, float]
    totals: dict[str, float]
    cut: tuple[int, ...]
    is_shared: bool  # the weights are those of all rows, such as 1 for a plain sum
    coefficients: dict[str, float]  # of each row of the sums in the loss; empty if divided already
    used: frozenset[int]  # positions of the parameters that have a gradient
    sent: tuple[int, ...] = ()  # bytes to each shard


class _Unit(Strategy):
    """A strategy for some rows of a batch whose weight is unknown here, so nothing is divided."""

    is_many = True


def _told(method: Callable[..., Any]) -> Callable[..., Any]:
    """Add the traceback to errors of model and loss, and make them sendable to the driver."""

    @wraps(method)
    def call(*args: Any) -> Any:
        try:
            return method(*args)
        except AnybatchError:
            raise
        except Exception as error:
            said = f"On a worker:\n{traceback.format_exc()}"
            try:
                found: Exception = copy.copy(error)  # rebuilt from its arguments, like a pickled one
            except Exception:
                found = RuntimeError(f"{type(error).__name__}: {error}")
            found.add_note(said)
            raise found from None

    return call


class Worker:
    """A worker: computes rows with one version of the parameters. Its identity must equal the driver's."""

    def __init__(self, make: Callable[[Any], Any], layout: Layout, expected: Mapping[str, str]) -> None:
        self._make, self._layout, self._expected = make, layout, expected
        self._version, self._fixed = -1, tuple[Any, ...]()
        self._room: list[Array] = []  # sums of each shard, reused: allocation takes longer than the copy

    @cached_property
    def _step(self) -> Any:
        """The step, made by the first `fold`, as the driver does not wait for `__init__`."""
        step = self._make(_Unit())
        here = identity(step.task())
        if odd := [part for part in self._expected if here[part] != self._expected[part]]:
            raise PlanError(
                f"Expected the same {odd[0]} on all workers as on the driver, got another on a worker. No "
                "update was made. Install the same versions of torch and of your code on all machines."
            )
        return step

    def fix(self, *fixed: Any) -> None:
        """Set the state that is not trained, as returned by `settings_of` and `fixed_of`, before a `fold`."""
        self._fixed = fixed

    @_told
    def fold(self, version: int, seed: int, rows: Any, *values: Array) -> tuple[Any, ...]:
        """Return a unit's `Folded`, and its sums for each shard, `(terms, elements)`; draw from `seed`."""
        task, found = self._step.task(), list[tuple[Folded, list[Gradient]]]()
        parameters: Sequence[nn.Parameter] = task.network.parameters
        if self._fixed:
            settings, *tensors = self._fixed
            for module, given in zip(task.network.modules, settings, strict=True):
                vars(module).update(given)
            with torch.no_grad():
                for mine, value in zip(fixed_of(task), tensors, strict=True):
                    mine.copy_(value)
            self._fixed = ()
        if version != self._version:
            self._layout.write(values, parameters)
            self._version = version
        if not self._step.collate:
            rows = tree.map_leaves(lambda leaf: leaf.to(parameters[0].device), rows)
        take: Callable[[Sums], None] = lambda sums: found.append(_undivided(sums))  # noqa: E731
        with rng.preserved():
            rng.seed_process(seed)
            self._step.sums_of(rows, take)
        effects = self._step.effects
        if odd := (*effects.buffers, *effects.parameters):
            raise PlanError(
                f"Expected a forward that writes to no buffer or parameter, got writes to {len(odd)}, "
                "as in spectral_norm and Embedding(max_norm=...): only workers would have what it writes. No "
                'update was made. Train it with strategy="local".'
            )
        ((folded, banks),) = found
        terms = [[bank.get(p) for p in parameters] for bank in banks or [{}]]
        layout = self._layout
        if not self._room or len(self._room[0]) != len(terms):
            self._room = [np.empty((len(terms), size), layout.sum_dtype) for size in layout.sizes]
        for shard, part in enumerate(self._room):
            for bank, row in zip(terms, part, strict=True):
                layout.flat(bank, shard, row)
        return replace(folded, sent=tuple(part.nbytes for part in self._room)), *self._room


def _undivided(sums: Sums) -> tuple[Folded, list[Gradient]]:
    """Return what the driver is told of a unit, and its gradient sums, times their provisional divisors."""
    weights, _ = sums.read(sums.weigh())
    division, gradients = sums.division, sums.gradients
    banks: list[Gradient] = []
    coefficients: dict[str, float] = {}
    if gradients is not None:
        sums.close()
        parted = gradients.parted()
        sums.gradients = None
        if division.divisors is not None:
            banks = [*parted.values()]
        else:
            for name, one in division.provisional.items():
                banks.append(finish({name: parted.get(name, {})}, {name: one}))
                coefficients[name] = float(division.coefficients[name])
    folded = Folded(
        weights=weights,
        totals=sums.totals,
        cut=tuple(sums.rows),
        is_shared=division.divisors is not None,
        coefficients=coefficients,
        used=frozenset(
            i for i, p in enumerate(sums.task.network.parameters) if any(p in bank for bank in banks)
        ),
    )
    return folded, banks


def identity(task: Task) -> dict[str, str]:
    """Return short hashes that must be equal on workers and driver."""
    found = fingerprint(task, Plan(rows=0, micro_batch=0), None)
    return {part: found[part] for part in ("torch", "model", "loss")}


def fixed_of(task: Task) -> list[Tensor]:
    """Return tensors that workers read and servers do not update: other parameters, and buffers."""
    return [
        *task.network.others,
        *[one for module in task.network.modules for one in module.buffers(recurse=False)],
    ]


def settings_of(task: Task) -> list[dict[str, Any]]:
    """Return modes, numbers and strings of each module: they may change between steps."""
    return [
        {name: value for name, value in vars(module).items() if _is_plain(value)}
        for module in task.network.modules
    ]


class OutsideValues:
    """Globals, closure variables and foreign attributes that model and loss read; workers have copies."""

    def __init__(self, task: Task) -> None:
        found = Reachable([task.loss, task.model], has_classes=False)  # other methods may count steps
        named = set[str]().union(*[names for _, names in found.scopes])
        groups = [group for one in task.optimizers for group in one.param_groups]  # sent to workers
        own = {id(one) for one in (*map(vars, task.network.modules), *groups)}
        tables = [(one, named) for one in found.containers if isinstance(one, dict) and id(one) not in own]
        self._read = [(one, sorted(names & one.keys())) for one, names in (*found.scopes, *tables)]
        self._cells = [cell for cell in found.cells if cell != CellType()]  # filled
        self._first = self._now()

    def _now(self) -> list[tuple[str, Any]]:
        found = [(name, table.get(name)) for table, names in self._read for name in names]
        found += [("a variable of a closure", cell.cell_contents) for cell in self._cells]
        return [(name, tuple(one) if isinstance(one, list) else one) for name, one in found if _is_plain(one)]

    def refuse_changes(self) -> None:
        """Raise PlanError if such a value has changed."""
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
