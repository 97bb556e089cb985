"""Python objects that a run may change: found from some roots, captured and restored"""

import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from functools import cache, lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.core import loaded, ran_out_of_memory, torch_private as private
from anybatch.state import rng

MOST_ITEMS, MOST_OF_BLOCKS = 100_000, 1_000  # items of a container that is followed: longer ones are data
MOST_BYTES = 1 << 20  # of a copied tensor
ALL_BYTES = 1 << 26  # of all copies together

_CACHED = type(lru_cache(lambda: None))
_PYTHON = {"numpy", *sys.stdlib_module_names}
_OWN = _PYTHON | {"torch", "anybatch"}
_CLOSED = _PYTHON - {"types", "argparse", "collections"}  # packages whose objects cannot reference user state
_CLOSED_TO_BLOCKS = _CLOSED | {"torch", "transformers", "anybatch"}
# What a step itself learns meanwhile stays.
_MACHINERY = "torch._", "anybatch.engine", "anybatch.audit", "anybatch.planner", "anybatch.step"
_INSTALLED = ("site-packages", "dist-packages")
ATOMS = {
    *(str, int, float, bool, complex, bytes, type(None), type(...), range, slice),
    *(torch.Size, torch.dtype, torch.device),
}
_COPIED = (dict, list, set)
CONTAINERS = (*_COPIED, OrderedDict, deque)
ITEMS = (*CONTAINERS, tuple, frozenset)
_OF_UPDATES = frozenset(private.STEP_HOOKS)  # hooks of optimizers, which never run in a trial
OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module
_PARTS = {
    FunctionType: ("__closure__", "__defaults__", "__kwdefaults__", "__dict__"),
    CellType: (),
    MethodType: ("__self__", "__func__"),
    BuiltinFunctionType: ("__self__",),
    partial: ("func", "args", "keywords", "__dict__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    _CACHED: ("__wrapped__",),
}
_Read = Callable[[Any], Collection[Any] | None]  # notes a value, and returns what it holds


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
        self._contents = Contents([*found.containers, *found.cells], found.empty)
        places = [*map(rng.ways, found.generators)]
        places += [
            (partial(scope.get, name), partial(scope.__setitem__, name))
            for scope, names in found.scopes
            for name in names & scope.keys()
        ]
        places += [
            (partial(vars(kind).get, name), partial(type.__setattr__, kind, name))
            for kind in found.kinds
            for name in vars(kind)
        ]
        self._places = [(read, put, read()) for read, put in places]
        tensors = [one for one in found.values if isinstance(one, Tensor)]
        self._gradients = [(one, one.grad, one.requires_grad) for one in tensors if one.is_leaf]
        caches = (*found.caches, *[one() for one in _caches_of(len(sys.modules))])
        self._caches = [(one, one.cache_info().misses) for one in dict.fromkeys(caches) if one is not None]
        # A traced run writes to NumPy arrays, but not to tensors.
        known = {*map(id, tensors if but_for is None else but_for)}
        self._copies = [*_copies([one for one in found.values if id(one) not in known])]

    def put_back(self) -> None:
        """Put everything back; may be called again."""
        self._contents.put_back()
        for read, put, before in self._places:
            if read() is not before:
                put(before)
        for tensor, gradient, requires_grad in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
            if tensor.is_leaf and tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
        for put, value, before in self._copies:
            put(value, before)
        for one, misses in self._caches:
            if one.cache_info().misses != misses:
                one.cache_clear()


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
        empty: containers that are empty, such as tables of hooks; those of a block are in `containers`.
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
        self._quick = () if is_block else CONTAINERS
        self._open: list[Any] = []
        self._seen: dict[int, object] = {}  # keeps the object, so that its id stays unique
        self._push(roots)
        reads: dict[type, list[_Read]] = {}  # most values are of a few classes
        while self._open:
            value = self._open.pop()
            kind = type(value)  # `isinstance` would run a proxy's own code
            if kind not in reads:
                reads[kind] = self._reads_of(kind)
            for read in reads[kind]:
                self._push(read(value) or ())
        self._seen.clear()

    def joined(self, arguments: Iterable[object]) -> "Reachable":
        """Return a block's state together with that of the arguments of a call, tensors excepted."""
        given = [one for one in arguments if type(one) not in ATOMS and not isinstance(one, Tensor)]
        if not given:
            return self
        other, both = Reachable(given, is_block=True), copy(self)
        both.modules = [*dict.fromkeys((*self.modules, *other.modules))]
        both.generators = self.generators + other.generators
        both.containers = self.containers + other.containers
        return both

    def _push(self, found: Iterable[Any]) -> None:
        seen = self._seen
        for value in found:
            kind = type(value)
            if kind not in ATOMS and id(value) not in seen:
                seen[id(value)] = value
                (self.empty if kind in self._quick and not value else self._open).append(value)

    def _reads_of(self, kind: type) -> list[_Read]:
        """Return the functions that read values of a class."""
        numpy = loaded("numpy")
        if issubclass(kind, type | ModuleType):
            return [self._own] if issubclass(kind, type) and self._has_classes else []
        if issubclass(kind, Tensor):
            return [self._tensor]
        if kind in _PARTS:
            notes: dict[type, list[_Read]] = {
                CellType: [self.cells.append, content_of],
                FunctionType: [self._scope],
                _CACHED: [self.caches.append],
            }
            return [] if self._is_block else [partial(_parts, _PARTS[kind]), *notes.get(kind, ())]
        if rng.is_generator(kind):
            return [self.generators.append]
        if numpy is not None and issubclass(kind, numpy.ndarray):
            return [self.values.append]
        reads: list[_Read] = [self._items] if issubclass(kind, ITEMS) else []
        closed = _CLOSED_TO_BLOCKS if self._is_block else _CLOSED
        if issubclass(kind, nn.Module):
            reads.append(self.modules.append)
            if self._is_block:
                return [*reads, _own_attributes]
        elif kind.__module__.startswith(_MACHINERY) or _top(kind.__module__) in closed:
            return reads
        if self._has_classes or issubclass(kind, nn.Module):
            self._push(self._own(kind))
        slots = [vars(part).get("__slots__", ()) for part in kind.__mro__]
        names = [name for found in slots for name in ((found,) if isinstance(found, str) else found)]
        return [*reads, self._attributes, partial(_parts, names)]

    def _items(self, container: Any) -> Collection[Any]:
        if issubclass(type(container), tuple | frozenset):
            return container if len(container) <= self._most else ()
        content = content_of(container)
        is_table = isinstance(content, dict)
        if len(content) > self._most:
            self.containers += [container] if is_table and not self._is_block else []
            return ()
        self.containers.append(container)
        if not is_table:
            return content
        return [*content, *[one for name, one in content.items() if name not in _OF_UPDATES]]

    def _attributes(self, value: Any) -> Collection[Any]:
        attributes = getattr(value, "__dict__", None)
        return self._items(attributes) if type(attributes) is dict else ()

    def _tensor(self, tensor: Any) -> list[Any]:
        self.values.append(tensor)
        if not tensor.is_leaf or self._is_block:
            return []
        return [*filter(None, (vars(tensor), *private.hooks_of_tensor(tensor))), tensor.grad]

    def _scope(self, function: FunctionType) -> list[Any]:
        scope = function.__globals__
        if not _is_read(scope.get("__name__")):
            return []
        names = {*_names(function.__code__)}
        self.scopes.append((scope, names))
        return [scope[name] for name in names if name in scope]

    def _own(self, kind: type) -> list[Any]:
        """Return the functions and attributes of classes that are the caller's."""
        new = [part for part in kind.__mro__ if part not in self.kinds and _is_read(part.__module__)]
        self.kinds.update(dict.fromkeys(new))
        return [
            one
            for part in new
            for name, one in vars(part).items()
            if name[:2] != "__" or type(one) is FunctionType
        ]


class Contents:
    """The contents of lists, dicts, sets, deques and cells, which can be put back."""

    def __init__(self, containers: Iterable[Any], tables: Sequence[Any] = ()) -> None:
        self._containers: Sequence[Any] = [*containers, *filter(None, tables)]
        # Once per step: a call for each would take as long as the copies.
        self._contents: Sequence[Any] = [
            one.copy() if type(one) in _COPIED else content_of(one) for one in self._containers
        ]
        self._tables = tables

    def changed(self) -> Iterator[tuple[Any, Any]]:
        """Yield the containers that have changed, each with its former content."""
        known = {*map(id, self._containers)}
        pairs = zip(self._containers, self._contents, strict=True)
        yield from (pair for pair in pairs if not holds(*pair))
        yield from ((one, {}) for one in filter(None, self._tables) if id(one) not in known)

    def keep_what_changed(self) -> None:
        """Forget containers that are unchanged."""
        self._containers, self._contents = [*zip(*self.changed(), strict=True)] or ((), ())
        self._tables = ()

    def put_back(self) -> None:
        """Restore containers that have changed."""
        for container, content in self.changed():
            fill(container, content)


def _parts(names: Iterable[str], value: Any) -> list[Any]:
    return [getattr(value, name, None) for name in names]


def _own_attributes(module: nn.Module) -> list[Any]:
    return [*[one for name, one in vars(module).items() if name not in OF_MODULES], *module.children()]


def _top(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else "builtins"


@cache
def _is_read(module: object) -> bool:
    """Return True for a module of the caller's: not this package, torch, Python's own or an installed one."""
    where = str(getattr(loaded(_top(module)), "__file__", None))
    return _top(module) not in _OWN and not any(name in where for name in _INSTALLED)


@lru_cache(maxsize=1)
def _caches_of(_: int) -> set["weakref.ref[Any]"]:
    """Search the caches of modules again for each number of modules."""
    modules = [loaded(name) for name in [*sys.modules] if _top(name) not in _OWN]
    scopes = [vars(module) for module in modules if module is not None]
    found = [value for scope in scopes for value in [*scope.values()] if type(value) in (_CACHED, type)]
    found += [one for kind in found if type(kind) is type for one in vars(kind).values()]
    return {weakref.ref(one) for one in found if type(one) is _CACHED and _top(one.__module__) not in _OWN}


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
    """Return a copy of a list, dict, set or deque, without its class; that of a cell is a list."""
    if type(container) in _COPIED:
        return container.copy()
    if type(container) is CellType:
        return [] if container == CellType() else [container.cell_contents]
    base = _base(container)
    if base is private.ScriptTable:  # its names are other strings in each call
        return {sys.intern(name): one for name, one in container.items()}
    items = base.__iter__(container)
    return {key: dict.__getitem__(container, key) for key in items} if issubclass(base, dict) else base(items)


def holds(container: Any, content: Any) -> bool:
    """Return True if a container holds the same objects as `content`."""
    now = container if type(container) in CONTAINERS else content_of(container)
    if isinstance(content, set):
        return now == content
    return _are_same(now, content) and (
        not isinstance(content, dict) or _are_same(now.values(), content.values())
    )


def _are_same(one: Collection[Any], other: Collection[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def fill(container: Any, content: Any) -> None:
    """Replace the content of a container, in this order."""
    if type(container) is CellType:
        del container.cell_contents
        for one in content:
            container.cell_contents = one
        return
    base = _base(container)
    if not isinstance(content, dict):
        base.clear(container)
        (base.update if base is set else base.extend)(container, content)
        return
    if not _are_same(content_of(container), content):
        base.clear(container)
    for key, value in content.items():
        base.__setitem__(container, key, value)


def _copies(values: Iterable[Any]) -> Iterator[tuple[Callable[[Any, Any], None], Any, Any]]:
    """Yield how to put values back, the values, and copies of them."""
    room = ALL_BYTES
    for value in values:
        if _is_copied(value) and value.nbytes <= min(room, MOST_BYTES):
            room -= value.nbytes
            if isinstance(value, Tensor):
                yield put_value_back, value, value.detach().clone()
            else:
                yield _put_array_back, value, value.copy()


def _is_copied(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return value.flags.writeable and not value.dtype.hasobject
    return not (is_lazy(value) or value.is_meta or value.is_inference() or value.layout is not torch.strided)


def put_value_back(tensor: Tensor, value: Tensor) -> None:
    """Restore the value of a tensor; an unchanged one may be expanded, and is not written to."""
    if tensor.shape != value.shape:
        tensor.data = value.clone()
    elif not is_equal(tensor, value):
        with torch.no_grad():
            tensor.copy_(value)


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same shape and values, as far as memory allows to compare them."""
    try:
        return torch.equal(one, other)
    except Exception as error:
        if not ran_out_of_memory(error):  # comparing needs memory, copying does not
            raise
        return False


def _put_array_back(array: Any, value: Any) -> None:
    if array.shape == value.shape and not (array == value).all():
        array[...] = value
