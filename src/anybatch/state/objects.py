"""Python objects that a run may change: found from some roots, captured and restored"""

import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from anybatch.core import loaded, torch_private as private
from anybatch.state import rng

MOST_ITEMS, MOST_OF_BLOCKS = 100_000, 1_000  # items of a container that is followed: longer ones are data
MOST_BYTES = 1 << 20  # of a copied tensor
ALL_BYTES = 1 << 26  # of all copies together

_CACHED = type(lru_cache(lambda: None))
_PYTHON = {"numpy", *sys.stdlib_module_names}
_CLOSED = _PYTHON - {"types", "argparse", "collections"}  # packages whose objects cannot reference user state
_CLOSED_TO_BLOCKS = _CLOSED | {"torch", "transformers", "anybatch"}
_INSTALLED = ("site-packages", "dist-packages")
_PLAIN = {str, int, float, bool, complex, bytes, type(None), type(...), range, slice}
_ATOMS = _PLAIN | {torch.Size, torch.dtype, torch.device}
_CONTAINERS = {dict, OrderedDict, list, set, deque}
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module
_PARTS = {
    MethodType: ("__self__", "__func__"),
    BuiltinFunctionType: ("__self__",),
    partial: ("func", "args", "keywords", "__dict__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    _CACHED: ("__wrapped__",),
}


class ObjectState:
    """The state of everything that can be reached from some objects, which can be put back in place.

    It covers attributes of objects, lists, dicts, sets, closures, random generators, small arrays, and the
    gradients of all tensors; with `but_for` also the values of small tensors except these. Only what has
    changed is written to. A `functools.lru_cache` that was filled meanwhile is cleared. Slots are followed
    but not put back, and names that are new in a module or class stay.
    """

    def __init__(self, roots: Iterable[object], *, but_for: Iterable[Tensor] | None = None) -> None:
        self.found = found = Reachable(roots)
        self.modules: tuple[nn.Module, ...] = tuple(found.modules)
        self._undo: list[Callable[[], object]] = [Contents(found.containers, found.empty).put_back]
        self._undo += [partial(_put_cell_back, cell, *_held_by(cell)) for cell in found.cells]
        self._undo += [
            partial(
                _put_names_back, scope, scope.__setitem__, {one: scope[one] for one in names & scope.keys()}
            )
            for scope, names in found.scopes
        ]
        self._undo += [
            partial(_put_names_back, vars(one), partial(type.__setattr__, one), dict(vars(one)))
            for one in found.kinds
        ]
        self._undo += [partial(put, read()) for read, put in map(rng.ways, found.generators)]
        tensors = [one for one in found.values if isinstance(one, Tensor)]
        self._undo += [partial(_put_gradient_back, t, t.grad, t.requires_grad) for t in tensors if t.is_leaf]
        caches = {id(one): one for one in (*found.caches, *_known_caches())}
        self._caches = [(one, one.cache_info().misses) for one in caches.values()]
        # A traced run writes to NumPy arrays, but not to tensors.
        values = [one for one in found.values if but_for is not None or not isinstance(one, Tensor)]
        self._undo += _copies(values, {id(tensor) for tensor in but_for or ()})

    def put_back(self) -> None:
        """Put everything back; may be called again."""
        for undo in self._undo:
            undo()
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


class Reachable:
    """Everything that can be reached from some objects, each once.

    Args:
        roots: the objects to start from.
        is_block: follow only the state of a block that its forward may change: no code, hooks, parameters
            or buffers, and no objects of torch or transformers.

    Attributes:
        modules: also those in lists, dicts and objects that a module holds.
        generators: random generators: torch's, NumPy's and Python's.
        containers: lists, dicts, sets and deques, and the attributes of objects as dicts.
        empty: attributes of modules that are empty containers, such as tables of hooks; none for a block.
        values: tensors and arrays; for a block those that are neither parameters nor buffers.
        cells: the variables of closures.
        scopes: the globals of functions, and the names that they read.
        kinds: the caller's classes.
        caches: functions under `functools.lru_cache`.
    """

    def __init__(self, roots: Iterable[object], *, is_block: bool = False, has_classes: bool = True) -> None:
        self.modules: list[nn.Module] = []
        self.generators: list[Any] = []
        self.containers: list[Any] = []
        self.empty: list[Any] = []
        self.values: list[Any] = []
        self.cells: list[CellType] = []
        self.scopes: list[tuple[dict[str, Any], set[str]]] = []
        self.kinds: dict[type, None] = {}
        self.caches: list[Any] = []
        self._has_classes = has_classes and not is_block  # those of modules are read in any case
        self._is_block, self._most = is_block, MOST_OF_BLOCKS if is_block else MOST_ITEMS
        self._open: list[Any] = []
        self._seen: dict[int, object] = {}  # keeps the object, so that its id stays unique
        self._visits: dict[type, Callable[[Any], object]] = {}  # most values are of a few classes
        self._push(roots)
        while self._open:
            value = self._open.pop()
            kind = type(value)  # `isinstance` would run a proxy's own code
            (self._visits.get(kind) or self._visit_of(kind))(value)
        self._seen.clear()
        self._visits.clear()

    def joined(self, arguments: Iterable[object]) -> "Reachable":
        """Return a block's state together with that of the arguments of a call, tensors excepted."""
        given = [one for one in arguments if type(one) not in _ATOMS and not isinstance(one, Tensor)]
        if not given:
            return self
        other, both = Reachable(given, is_block=True), copy(self)
        both.modules = [*dict.fromkeys((*self.modules, *other.modules))]
        both.generators = self.generators + other.generators
        both.containers = self.containers + other.containers
        return both

    def _push(self, found: Iterable[object]) -> None:
        seen, still_open = self._seen, self._open
        for value in found:
            if type(value) not in _ATOMS and id(value) not in seen:
                seen[id(value)] = value
                still_open.append(value)

    def _visit_of(self, kind: type) -> Callable[[Any], object]:
        """Return the visit to the values of a class, which is kept."""
        numpy = loaded("numpy")
        if issubclass(kind, type) and self._has_classes:
            visit = self._class
        elif issubclass(kind, type | ModuleType):
            visit = _pass
        elif issubclass(kind, Tensor):
            visit = self._tensor
        elif kind is FunctionType or kind in _PARTS:
            visit = _pass if self._is_block else self._function if kind is FunctionType else self._code
        elif rng.is_generator(kind):
            visit = self.generators.append
        elif numpy is not None and issubclass(kind, numpy.ndarray):
            visit = self.values.append
        else:
            visit = self._visit_of_object(kind)
        self._visits[kind] = visit
        return visit

    def _visit_of_object(self, kind: type) -> Callable[[Any], object]:
        visits: list[Callable[[Any], object]] = []
        if issubclass(kind, dict | list | deque | set):
            visits.append(self._container)
        elif issubclass(kind, tuple | frozenset):
            visits.append(self._tuple)
        closed = _CLOSED_TO_BLOCKS if self._is_block else _CLOSED
        if issubclass(kind, nn.Module):
            visits.append(self._module_of_block if self._is_block else self._module)
        elif not kind.__module__.startswith("torch._") and _top(kind.__module__) not in closed:
            # Hooks of an update never run in a trial.
            unused = private.STEP_HOOKS if issubclass(kind, Optimizer) else ()
            visits.append(partial(self._attributes, unused))
        else:
            return visits[0] if visits else _pass
        if not (issubclass(kind, nn.Module) and self._is_block):
            slots = [vars(part).get("__slots__", ()) for part in kind.__mro__]
            names = [name for found in slots for name in ((found,) if isinstance(found, str) else found)]
            visits += [partial(self._slots, names)] if names else []
            if self._has_classes or issubclass(kind, nn.Module):
                self._class(kind)
        return visits[0] if len(visits) == 1 else partial(_each, visits)

    def _attributes(self, unused: Collection[str], value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._container(attributes, unused)

    def _slots(self, names: Iterable[str], value: Any) -> None:
        self._push([getattr(value, name, None) for name in names])

    def _module(self, module: nn.Module) -> None:
        self.modules.append(module)
        own = vars(module)
        self.containers.append(own)
        self.empty += [one for one in own.values() if type(one) in _CONTAINERS and not one]
        self._push([one for one in own.values() if type(one) not in _CONTAINERS or one])

    def _module_of_block(self, module: nn.Module) -> None:
        self.modules.append(module)
        self._push([one for name, one in vars(module).items() if name not in _OF_MODULES])
        self._push(module.children())

    def _container(self, container: Any, unused: Collection[str] = ()) -> None:
        content = content_of(container)
        is_table = isinstance(content, dict)
        if len(content) <= self._most:
            self.containers.append(container)
            self._push(content)
            self._push([value for key, value in content.items() if key not in unused] if is_table else ())
        elif is_table and not self._is_block:
            self.containers.append(container)

    def _tuple(self, items: Any) -> None:
        if len(items) <= self._most:
            self._push(items)

    def _tensor(self, tensor: Any) -> None:
        self.values.append(tensor)
        if tensor.is_leaf and not self._is_block:
            tables = vars(tensor), *private.hooks_of_tensor(tensor)
            self._push([*filter(None, tables), tensor.grad])

    def _code(self, code: Any) -> None:
        kind = type(code)
        self.caches += [code] if kind is _CACHED else []
        self._push([getattr(code, name) for name in _PARTS[kind]])

    def _function(self, function: FunctionType) -> None:
        cells = function.__closure__ or ()
        self.cells += cells
        self._push([content for cell in cells for content in _held_by(cell)])
        self._push([function.__defaults__, function.__kwdefaults__, vars(function)])
        scope = function.__globals__
        if _is_read(scope.get("__name__")):
            names = {*_names(function.__code__)}
            self.scopes.append((scope, names))
            self._push([scope[name] for name in names if name in scope])

    def _class(self, kind: type) -> None:
        self._push(self._own(kind))

    def _own(self, kind: type) -> list[Any]:
        """Return the functions and attributes of classes that are the caller's."""
        new = [] if self._is_block else [part for part in kind.__mro__ if part not in self.kinds]
        new = [part for part in new if _is_read(part.__module__)]
        self.kinds.update(dict.fromkeys(new))
        found = [pair for part in new for pair in vars(part).items()]
        return [one for name, one in found if name[:2] != "__" or type(one) is FunctionType]


class Contents:
    """The contents of lists, dicts, sets and deques, which can be put back.

    Args:
        containers: the containers.
        empty: others that are empty.
    """

    def __init__(self, containers: Iterable[Any], empty: Sequence[Any] = ()) -> None:
        self._noted = [(one, content_of(one)) for one in containers]
        self._empty = empty

    def pairs(self) -> Iterable[tuple[Any, Any]]:
        """Return each container with its former content."""
        return self._noted

    def changed(self) -> Iterator[tuple[Any, Any]]:
        """Yield the pairs whose container has changed."""
        yield from (pair for pair in self.pairs() if not holds(*pair))
        if any(self._empty):
            yield from ((one, {}) for one in self._empty if one)

    def keep_what_changed(self) -> None:
        """Forget containers that are unchanged."""
        self._noted, self._empty = [*self.changed()], ()

    def put_back(self) -> None:
        """Restore containers that have changed."""
        for container, content in self.changed():
            fill(container, content)


def _pass(_: object) -> None:
    """Leave out values of this class."""


def _each(visits: Iterable[Callable[[Any], object]], value: Any) -> None:
    for visit in visits:
        visit(value)


def _top(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else "builtins"


def _is_read(module: object) -> bool:
    """Return True for a module of the caller's: not this package, torch, Python's own or an installed one."""
    return _is_top_read(_top(module))


@lru_cache
def _is_top_read(top: str) -> bool:
    module = loaded(top)
    where = "" if module is None else str(vars(module).get("__file__"))
    return top not in _PYTHON | {"torch", "anybatch"} and not any(name in where for name in _INSTALLED)


def _known_caches() -> list[Any]:
    return [cache for one in _caches_of(len(sys.modules)) if (cache := one()) is not None]


@lru_cache(maxsize=1)
def _caches_of(_: int) -> list["weakref.ref[Any]"]:
    """Search the caches again for each number of modules."""
    own = _PYTHON | {"torch", "anybatch"}
    modules = [one for one in [*sys.modules.values()] if isinstance(one, ModuleType)]
    scopes = [vars(module) for module in modules if _top(vars(module).get("__name__")) not in own]
    found = [value for scope in scopes for value in list(scope.values()) if type(value) in (_CACHED, type)]
    kinds = [vars(kind).values() for kind in found if type(kind) is type]
    caches = [one for values in ([*found], *kinds) for one in values if type(one) is _CACHED]
    return [weakref.ref(one) for one in caches if _top(one.__module__) not in own]


def _names(code: CodeType) -> Iterator[str]:
    """Yield what code reads: globals, attributes, and literal keys."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant


def _base(container: Any) -> Any:
    """Return the builtin class whose methods run no code of a subclass; or that of a table of TorchScript."""
    return next(
        one
        for one in (OrderedDict, dict, list, deque, set, private.ScriptTable)
        if isinstance(container, one)
    )


def content_of(container: Any) -> Any:
    """Return a copy of a list, dict, set or deque, without its class."""
    if type(container) in (dict, list, set):
        return container.copy()
    if isinstance(container, private.ScriptTable):  # its names are other strings in each call
        return {sys.intern(name): one for name, one in container.items()}
    base = _base(container)
    items = base.__iter__(container)
    if issubclass(base, dict):
        return {key: dict.__getitem__(container, key) for key in items}
    return set(items) if base is set else list(items)


def holds(container: Any, content: Any) -> bool:
    """Return True if a container holds the same objects as `content`."""
    now = container if type(container) in _CONTAINERS else content_of(container)
    if isinstance(content, set):
        return now == content
    return _are_same(now, content) and (
        not isinstance(content, dict) or _are_same(now.values(), content.values())
    )


def _are_same(one: Collection[Any], other: Collection[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def fill(container: Any, content: Any) -> None:
    """Replace the content of a container, in this order."""
    base = _base(container)
    if not isinstance(content, dict):
        base.clear(container)
        (base.update if base is set else base.extend)(container, content)
        return
    if not _are_same(content_of(container), content):
        base.clear(container)
    for key, value in content.items():
        base.__setitem__(container, key, value)


def _put_gradient_back(tensor: Tensor, gradient: Tensor | None, requires_grad: bool) -> None:
    if tensor.grad is not gradient:
        tensor.grad = gradient
    if tensor.is_leaf and tensor.requires_grad is not requires_grad:
        tensor.requires_grad_(requires_grad)


def _held_by(cell: CellType) -> list[Any]:
    """Return the content of a cell in a list; an empty list for an empty cell."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _put_cell_back(cell: CellType, *content: Any) -> None:
    if content:
        cell.cell_contents = content[0]
    elif _held_by(cell):
        del cell.cell_contents


def _put_names_back(
    table: Mapping[str, Any], put: Callable[[str, Any], None], before: dict[str, Any]
) -> None:
    for name, value in before.items():
        if table.get(name) is not value:
            put(name, value)


def _copies(values: Iterable[Any], known: Collection[int]) -> Iterator[Callable[[], object]]:
    room = ALL_BYTES
    for value in values:
        if id(value) in known or not _is_copied(value) or value.nbytes > min(room, MOST_BYTES):
            continue
        room -= value.nbytes
        if isinstance(value, Tensor):
            yield partial(_put_value_back, value, value.detach().clone())
        else:
            yield partial(_put_array_back, value, value.copy())


def _is_copied(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return value.flags.writeable and not value.dtype.hasobject
    is_odd = is_lazy(value) or value.is_meta or value.is_inference() or value.layout is not torch.strided
    return not is_odd


def _put_value_back(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if tensor.shape != value.shape:
            tensor.data = value.clone()
        elif not torch.equal(tensor, value):
            tensor.copy_(value)


def _put_array_back(array: Any, value: Any) -> None:
    if array.shape == value.shape and not (array == value).all():
        array[...] = value
