"""Snapshots of what a forward may change: buffers, modes, attributes, gradients and random streams"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.core import is_due, ran_out_of_memory, torch_private as private
from anybatch.state import rng
from anybatch.state.objects import Contents, content_of


class ModuleState:
    """The attributes, buffers, containers and generators of some modules, gathered once.

    Args:
        modules: the modules; children must be listed themselves.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.attributes = [vars(module) for module in modules]
        self.buffers = [private.buffers_of(module) for module in modules]
        self.hooks = [table for module in modules for table in private.hooks_of_module(module)]
        # Stored by name: a caller may assign another list before each step.
        kinds = (*_CONTAINERS, Tensor)
        self.places = [
            (own, name)
            for own in self.attributes
            for name, value in own.items()
            if name not in _OF_MODULES and isinstance(value, kinds)
        ]
        self.generators = _generators_of(modules)

    def containers(self) -> list[Any]:
        """Return lists, dicts and sets that are attributes now."""
        values = [own.get(name) for own, name in self.places]
        return [value for value in values if type(value) in _CONTAINERS]

    def buffers_now(self) -> list[Tensor]:
        """Return tensors that are buffers now."""
        return [one for slots in self.buffers if slots for one in slots.values() if one is not None]

    def tensors(self) -> list[Tensor]:
        """Return plain tensors that are attributes now, or items of containers that are."""
        values = [own.get(name) for own, name in self.places]
        values += chain.from_iterable(map(_items_of, self.containers()))
        return [value for value in values if isinstance(value, Tensor) and not is_lazy(value)]


class Effects:
    """The changes that forwards of a step were seen to make, to be captured before each micro-batch.

    Capturing everything each time would cost more than a small layer. Steps that are due look: they compare
    after each micro-batch, and what has changed is captured from then on. If
    something else has changed when a micro-batch fails, the whole step begins again.

    Attributes:
        is_looking: True if this step compares.
        looks_next: True if the next step does.
        draws: True if a forward draws random numbers.
        draws_process: True if one draws from Python's or NumPy's stream.
        attributes: True if one changes attributes of modules.
        buffers: buffers that a forward changes.
        parameters: parameters that a forward writes to, as in a momentum encoder or an embedding with
            `max_norm`.
    """

    def __init__(self) -> None:
        self._steps, self.looks_next = 0, True
        self.is_looking = self.draws = self.draws_process = self.attributes = False
        self.buffers: tuple[Tensor, ...] = ()
        self.parameters: tuple[Tensor, ...] = ()

    def __reduce__(self) -> tuple[type["Effects"], tuple[()]]:
        return Effects, ()  # deep copies start with empty statistics

    def begin(self, modules: Sequence[nn.Module]) -> None:
        """Begin a step."""
        self.is_looking = self.looks_next
        self._steps += 1
        self.looks_next = is_due(self._steps + 1)
        if self._steps == 1:  # torch's only modules whose forward writes to a parameter
            embeddings = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
            self.writes([one.weight for one in embeddings if one.max_norm is not None])

    def changes(self, buffers: Iterable[Tensor]) -> None:
        """Add buffers that a forward changes."""
        self.buffers = tuple(dict.fromkeys((*self.buffers, *buffers)))

    def writes(self, parameters: Iterable[Tensor]) -> None:
        """Add parameters that a forward writes to."""
        self.parameters = tuple(dict.fromkeys((*self.parameters, *parameters)))


class Snapshot:
    """The state before a step, and before the current micro-batch.

    Attributes:
        notes: True if a micro-batch has more to capture than its gradients.

    Args:
        state: of the modules.
        effects: known changes by forwards.
        parameters: their gradients are kept by reference.
        rows: tensors of the batch, which a forward should not write to.
        draws: True if making a micro-batch may draw random numbers, as a `collate` may.
    """

    def __init__(
        self,
        state: ModuleState,
        effects: Effects | None = None,
        *,
        parameters: Sequence[nn.Parameter] = (),
        rows: Sequence[Tensor] = (),
        draws: bool = False,
    ) -> None:
        effects = effects or _NO_EFFECTS
        self._state, self._effects, self._draws = state, effects, draws
        process = rng.of_process() if draws or effects.draws_process or effects.is_looking else ()
        self._generators = (*state.generators, *process)
        self._random = rng.capture(self._generators)
        self._attributes = _Attributes(state)
        buffers = [one for slots in state.buffers for one in slots.values() if one is not None]
        self._copies: dict[Tensor, Tensor] = {}
        if buffers or effects.parameters:
            self._copies = _copied((*buffers, *effects.parameters))
        self._parameters, self._rows = parameters, rows
        self._gradients = [*map(_gradient_of, parameters)]
        self._tensors = state.tensors() if state.places else []
        self._versions = private.versions((*rows, *parameters, *self._tensors))
        self.notes = draws or effects.is_looking or effects.draws or bool(self._generators or effects.buffers)
        self.notes = self.notes or effects.attributes or bool(effects.parameters)
        self._micro: _BeforeForward | None = None

    def begin(self) -> None:
        """Begin a micro-batch that `notes`: capture what its forward is known to change."""
        self._micro = None  # frees the copies of the last micro-batch
        effects = self._effects
        attributes, placed = None, []
        if effects.attributes or effects.is_looking:
            attributes = _Attributes(self._state)
            placed = [one for one in self._state.buffers_now() if one not in self._copies]
        copies = _copied((*effects.buffers, *effects.parameters, *placed))
        self._micro = _BeforeForward(rng.capture(self._generators), copies, attributes)

    def look(self) -> None:
        """Learn what the forward of a micro-batch has changed, in a looking step."""
        effects, micro = self._effects, self._micro
        if not effects.is_looking or micro is None:
            return
        now = rng.capture(self._generators)
        effects.draws |= not rng.is_same(micro.random, now)
        effects.draws_process |= not rng.is_same(micro.random, now, of=rng.of_process())
        self._learn({*effects.buffers, *effects.parameters}, micro.attributes or self._attributes)
        effects.writes(self.written())

    def _learn(self, known: Iterable[Tensor], attributes: "_Attributes") -> bool:
        """Learn what has changed; return True if anything has that was not captured."""
        effects, noted = self._effects, set(known)
        new = [one for one, value in self._copies.items() if one not in noted and not _is_same(one, value)]
        effects.changes(new)
        has_moved = any(True for _ in attributes.changed())
        effects.attributes = effects.attributes or has_moved
        return bool(new) or has_moved

    def written(self) -> list[nn.Parameter]:
        """Return parameters that a forward has written to and that were not captured."""
        known = set(self._effects.parameters)
        first = len(self._rows)
        pairs = zip(self._parameters, self._versions[first:], strict=False)
        return [p for p, version in pairs if p not in known and private.version(p) != version]

    def written_rows(self) -> bool:
        """Return True if a forward has written to the rows of the batch."""
        return any(private.version(one) != was for one, was in zip(self._rows, self._versions, strict=False))

    def written_tensors(self) -> list[str]:
        """Return names of plain tensors in attributes of modules that a forward has written to."""
        first = len(self._rows) + len(self._parameters)
        tensors = zip(self._tensors, self._versions[first:], strict=True)
        moved = {id(one) for one, version in tensors if private.version(one) != version}
        return [
            f"{type(module).__name__}.{name}"
            for module, values in zip(self._state.modules, self._attributes.values, strict=True)
            for name, value in values.items()
            if moved.intersection(map(id, (value, *_items_of(value))))
        ]

    def undo_micro_batch(self) -> bool:
        """Put back the state before the micro-batch; return True if it is complete."""
        micro = self._micro
        if micro is not None:
            rng.restore(micro.random)
            _put_values_back(micro.copies)
            if micro.attributes is not None:
                micro.attributes.put_back()
        elif not rng.is_same(self._random, rng.capture()):  # draws were not expected
            self._effects.draws = True
            return False
        known = () if micro is None else micro.copies
        attributes = self._attributes if micro is None or micro.attributes is None else micro.attributes
        return not self._learn(known, attributes)

    def put_back(self) -> None:
        """Put back the state before the step; first what needs no memory."""
        self.put_gradients_back()
        rng.restore(self._random)
        self.put_modules_back()

    def put_gradients_back(self, only: Sequence[nn.Parameter] | None = None) -> None:
        """Put back the gradients found before the step, of all parameters or only of these."""
        chosen = None if only is None else set(only)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if chosen is None or parameter in chosen:
                parameter.grad = gradient

    def put_modules_back(self) -> None:
        """Put back attributes and buffers only."""
        self._attributes.put_back()
        _put_values_back(self._copies)

    def gradients_found(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the gradients found before the step."""
        if not any(map(is_not, self._gradients, repeat(None))):
            return []
        pairs = zip(self._parameters, self._gradients, strict=True)
        return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]


class _Attributes(Contents):
    """A copy of the attributes of modules, of containers among them, and of tables of buffers and hooks."""

    def __init__(self, state: ModuleState) -> None:
        super().__init__(())
        self._state = state
        self.values = [*map(dict.copy, state.attributes)]
        self._containers = state.containers() if state.places else []
        self._items = [value.copy() for value in self._containers] if self._containers else []
        # Hooks and an attribute that says that they are set must be put back together.
        self._tables: dict[int, Any] = {}
        for tables in (state.buffers, state.hooks):
            if any(tables):
                self._tables |= {id(table): content_of(table) for table in tables if table}

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        yield from zip(self._state.attributes, self.values, strict=True)
        yield from zip(self._containers, self._items, strict=True)
        for table in (*self._state.buffers, *self._state.hooks):
            yield table, self._tables.get(id(table), {})


@dataclass(slots=True)
class _BeforeForward:
    random: rng.RandomState
    copies: dict[Tensor, Tensor]
    attributes: _Attributes | None


_NO_EFFECTS = Effects()
_gradient_of: Callable[[nn.Parameter], Tensor | None] = attrgetter("grad")
_CONTAINERS = (list, dict, set)


def _items_of(value: Any) -> Iterable[Any]:
    if type(value) not in _CONTAINERS:
        return ()
    return value.values() if isinstance(value, dict) else value


def _copied(tensors: Iterable[Tensor | None]) -> dict[Tensor, Tensor]:
    return {one: one.detach().clone() for one in tensors if one is not None and not is_lazy(one)}


def _put_values_back(copies: Mapping[Tensor, Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in copies.items():
            if not _is_same(tensor, value):  # an unchanged one may be expanded, and not writable
                tensor.copy_(value)


def _is_same(one: Tensor, other: Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except Exception as error:
        if not ran_out_of_memory(error):  # comparing needs memory, copying does not
            raise
        return False


def _generators_of(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Return the generators that are attributes of modules, also in lists, tuples and dicts."""
    found: list[Any] = []
    for module in modules:
        for name, value in vars(module).items():
            if name in _OF_MODULES or type(value) in _PLAIN:
                continue
            if isinstance(value, dict):
                value = [*value.values()]
            inner = value if isinstance(value, list | tuple) else [value]
            found += [one for one in inner if type(one) not in _PLAIN and rng.is_generator(type(one))]
    return tuple(found)


_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, Tensor})


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Generator[None]:
    """Evaluate without gradient; restore everything that a forward may change afterwards.

    These are modes, buffers, gradients, and the random streams of torch, Python and NumPy. Modes are set as
    attributes, because some models change their weights in `eval()`.
    """
    everything = Snapshot(
        ModuleState(modules), parameters=[p for m in modules for p in m.parameters(recurse=False)]
    )
    modes = [(module, getattr(module, "training", False)) for module in modules]
    try:
        with rng.preserved(), torch.no_grad():  # collating may draw from Python's or NumPy's
            for module in modules:
                module.training = False
            yield
    finally:
        for module, mode in modes:  # that of TorchScript is no entry of its attributes
            module.training = mode
        everything.put_back()
        # Older torch caches weights cast without a graph, and reuses them where a gradient is wanted.
        torch.clear_autocast_cache()
