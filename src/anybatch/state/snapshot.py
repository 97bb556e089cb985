"""Snapshots of what a forward may change: buffers, modes, attributes, gradients and random streams"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.core import torch_private as private
from anybatch.state import rng
from anybatch.state.objects import ATOMS, CONTAINERS, ITEMS, OF_MODULES, Contents, is_equal, put_value_back


class ModuleState:
    """The attributes, buffers, containers and generators of some modules, gathered once.

    Args:
        modules: the modules; children must be listed themselves.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.attributes = [vars(module) for module in modules]
        self.buffers = [private.buffers_of(module) for module in modules]
        # Hooks and an attribute that says that they are set must be put back together.
        self.tables = [*self.buffers, *chain.from_iterable(map(private.hooks_of_module, modules))]
        names = [(own, name) for own in self.attributes for name in own if name not in OF_MODULES]
        # Stored by name: a caller may assign another list before each step.
        self.places = [(own, name) for own, name in names if isinstance(own[name], (*CONTAINERS, Tensor))]
        self.generators = tuple(
            [
                one
                for own, name in names
                for one in _with_items(own[name])
                if type(one) not in ATOMS and rng.is_generator(type(one))
            ]
        )

    def containers(self) -> list[Any]:
        """Return lists, dicts, sets and deques that are attributes now."""
        values = [own.get(name) for own, name in self.places]
        return [value for value in values if type(value) in CONTAINERS]

    def buffers_now(self) -> list[Tensor]:
        """Return tensors that are buffers now."""
        return [one for slots in self.buffers for one in slots.values() if one is not None]

    def tensors(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Return plain tensors that are attributes now, or items of containers that are, and where."""
        return [
            (own, name, one)
            for own, name in self.places
            for one in _with_items(own.get(name))
            if isinstance(one, Tensor) and not is_lazy(one)
        ]


class Effects:
    """The changes that forwards of a step were seen to make, to be captured before each micro-batch.

    Capturing everything each time would cost more than a small layer. Steps that are due look: they compare
    after each micro-batch, and what has changed is captured from then on. If
    something else has changed when a micro-batch fails, the whole step begins again.

    Attributes:
        is_looking: True if this step compares.
        draws: True if a forward draws random numbers.
        draws_process: True if one draws from Python's or NumPy's stream.
        attributes: True if one changes attributes of modules.
        buffers: buffers that a forward changes.
        parameters: parameters that a forward writes to, as in a momentum encoder or an embedding with
            `max_norm`.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self.is_looking = self.draws = self.draws_process = self.attributes = False
        self.buffers: tuple[Tensor, ...] = ()
        self.parameters: tuple[Tensor, ...] = ()

    def __reduce__(self) -> tuple[type["Effects"], tuple[()]]:
        return Effects, ()  # deep copies start with empty statistics

    def begin(self, modules: Sequence[nn.Module], *, looks: bool = True) -> None:
        """Begin a step, which compares if it `looks`."""
        self.is_looking = looks
        if not self._has_begun:  # torch's only modules whose forward writes to a parameter
            embeddings = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
            self.writes([one.weight for one in embeddings if one.max_norm is not None])
            self._has_begun = True

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
        self._state, self._effects = state, effects or Effects()
        effects = self._effects
        process = rng.of_process() if draws or effects.draws_process or effects.is_looking else ()
        self._generators = (*state.generators, *process)
        self._random = rng.capture(self._generators)
        self._attributes = _contents(state)
        buffers = [one for slots in state.buffers for one in slots.values() if one is not None]
        self._copies = _copied((*buffers, *effects.parameters)) if buffers or effects.parameters else {}
        self._parameters, self._rows = parameters, rows
        self._gradients = [*map(_gradient_of, parameters)]
        self._tensors = state.tensors() if state.places else []
        self._watched = (*rows, *parameters, *[one for _, _, one in self._tensors])
        self._versions = private.versions(self._watched)
        known = effects.draws, self._generators, effects.buffers, effects.attributes, effects.parameters
        self.notes = draws or effects.is_looking or any(known)
        self._micro: _BeforeForward | None = None

    def begin(self) -> None:
        """Begin a micro-batch that `notes`: capture what its forward is known to change."""
        self._micro = None  # frees the copies of the last micro-batch
        effects, attributes, placed = self._effects, None, list[Tensor]()
        if effects.attributes or effects.is_looking:
            attributes = _contents(self._state)
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
        self._learn()
        effects.writes(self.written())

    def _learn(self) -> bool:
        """Learn what has changed; return True if anything has that was not captured."""
        micro = self._micro or _BeforeForward(self._random, {}, None)
        pairs = [(one, value) for one, value in self._copies.items() if one not in micro.copies]
        new = [one for one, value in pairs if not is_equal(one, value)]
        self._effects.changes(new)
        has_moved = any(True for _ in (micro.attributes or self._attributes).changed())
        self._effects.attributes |= has_moved
        return bool(new) or has_moved

    def _written(self) -> set[int]:
        """Return the ids of the tensors that were written to."""
        now = private.versions(self._watched)
        versions = zip(self._watched, self._versions, now, strict=True)
        return {id(one) for one, before, version in versions if version != before}

    def written(self) -> list[nn.Parameter]:
        """Return parameters that a forward has written to and that were not captured."""
        found = self._written().difference(map(id, self._effects.parameters))
        return [one for one in self._parameters if id(one) in found]

    def written_rows(self) -> bool:
        """Return True if a forward has written to the rows of the batch."""
        return not self._written().isdisjoint(map(id, self._rows))

    def written_tensors(self) -> list[str]:
        """Return names of plain tensors in attributes of modules that a forward has written to."""
        found = self._written()
        kinds = {id(vars(module)): type(module).__name__ for module in self._state.modules}
        names = [f"{kinds[id(own)]}.{name}" for own, name, one in self._tensors if id(one) in found]
        return [*dict.fromkeys(names)]

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
        return not self._learn()

    def put_back(self) -> None:
        """Put back the state before the step; first what needs no memory."""
        self.put_gradients_back()
        rng.restore(self._random)
        self.put_modules_back()

    def put_gradients_back(self, only: Sequence[nn.Parameter] | None = None) -> None:
        """Put back the gradients found before the step, of all parameters or only of these."""
        chosen = set(self._parameters if only is None else only)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter in chosen:
                parameter.grad = gradient

    def put_modules_back(self) -> None:
        """Put back attributes and buffers only."""
        self._attributes.put_back()
        _put_values_back(self._copies)

    def gradients_found(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the gradients found before the step."""
        pairs = zip(self._parameters, self._gradients, strict=True)
        return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]


def _contents(state: ModuleState) -> Contents:
    """Note attributes, the items of containers among them, and the tables of buffers and hooks."""
    return Contents([*state.attributes, *(state.containers() if state.places else ())], state.tables)


class _BeforeForward(NamedTuple):
    random: rng.RandomState
    copies: dict[Tensor, Tensor]
    attributes: Contents | None


_gradient_of: Callable[[nn.Parameter], Tensor | None] = attrgetter("grad")


def _with_items(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, ITEMS) else ()
    return [value, *items]


def _copied(tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    return {one: one.detach().clone() for one in tensors if not is_lazy(one)}


def _put_values_back(copies: dict[Tensor, Tensor]) -> None:
    for tensor, value in copies.items():
        put_value_back(tensor, value)


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
