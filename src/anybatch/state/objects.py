"""What a run may change in Python, noted and put back: attributes, containers, closures, globals, caches."""

import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from anybatch.core import torch_private as private

MOST_ITEMS = 100_000  # of a list that is looked into: longer ones are data
MOST_BYTES = 1 << 20  # of a tensor that is copied
ALL_BYTES = 1 << 26  # of all copies together

_MISSING = object()
_CACHED = type(lru_cache(lambda: None))
_PYTHON = {"numpy", *sys.stdlib_module_names}
_CLOSED = _PYTHON - {"types", "argparse", "collections"}  # whose objects hold nothing of the caller's
_INSTALLED = ("site-packages", "dist-packages")
_PLAIN = {str, int, float, bool, complex, bytes, type(None), type(...), range, slice}
_ATOMS = _PLAIN | {torch.Size, torch.dtype, torch.device}


class Remembered:
    """All that can be reached from some objects, as it is now, so that it can be put back in place.

    Attributes and slots of objects, lists, dicts, sets, closures, defaults, globals that the code names and
    random generators of one's own; small arrays; gradients of all tensors. Values of tensors only if it is
    said. Only what has changed is written to. What a function cached meanwhile (`functools.lru_cache`) is
    dropped, with all that it had cached before.

    Args:
        roots: models, losses, functions, optimizers.
        but_for: copy the values of small tensors too, all but these; None for those of NumPy's arrays only.

    Attributes:
        modules: all modules that were reached.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> noted = Remembered([model])
        >>> model.calls = 1
        >>> noted.put_back()
        >>> hasattr(model, "calls")
        False
    """

    def __init__(self, roots: Iterable[object], *, but_for: Iterable[Tensor] | None = None) -> None:
        walk = _Walk()
        walk.all_from(roots)
        self.modules: tuple[nn.Module, ...] = tuple(walk.modules)
        self._undo = walk.undo
        caches = {id(one): one for one in (*walk.caches, *_known_caches())}
        self._caches = [(one, one.cache_info().misses) for one in caches.values()]
        # NumPy's arrays are written to even where tensors are only traced.
        values = [one for one in walk.values if but_for is not None or not isinstance(one, Tensor)]
        self._undo += _copies(values, {id(tensor) for tensor in but_for or ()})

    def put_back(self) -> None:
        """Make everything what it was, as often as wanted."""
        for undo in self._undo:
            undo()
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


class _Walk:
    """Goes through everything once, and notes how each thing is put back."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], object]] = []
        self.modules: list[nn.Module] = []
        self.values: list[Any] = []  # tensors and arrays
        self.caches: list[Any] = []
        self._open: list[Any] = []
        self._seen: dict[int, object] = {}  # the object too, so that its id stays its own
        self._scopes: dict[int, dict[str, Any]] = {}
        self._methods: dict[str, list[object]] = {}  # of classes, until code is found that names them
        self._names: set[str] = set()

    def all_from(self, roots: Iterable[object]) -> None:
        """Visit what can be reached, each thing once."""
        self._push(roots)
        while self._open:
            self._visit(self._open.pop())

    def _push(self, found: Iterable[object]) -> None:
        for value in found:
            if type(value) not in _ATOMS and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._open.append(value)

    def _visit(self, value: Any) -> None:
        kind = type(value)  # what a proxy says of itself would run code of its own
        if issubclass(kind, dict):
            self._table(value)
        elif issubclass(kind, list | deque | set):
            if len(value) <= MOST_ITEMS:
                base: Any = next(one for one in (list, deque, set) if issubclass(kind, one))
                content = base.copy(value)
                self.undo.append(partial(_refill, base, value, content))
                self._push(content)
        elif issubclass(kind, tuple | frozenset):
            self._push(value)
        elif issubclass(kind, Tensor):
            self._tensor(value)
        elif kind is FunctionType:
            self._function(value)
        elif kind in _PARTS:
            self.caches += [value] if kind is _CACHED else []
            self._push(getattr(value, name) for name in _PARTS[kind])
        elif issubclass(kind, type):
            self._class(value)
        elif issubclass(kind, ModuleType) or self._stream(value, kind):
            return
        if not issubclass(kind, Tensor | type):
            self._object(value, kind)

    def _table(self, table: dict[Any, Any], *unused: str) -> None:
        content = _content(table)
        self.undo.append(partial(_refill_table, table, content))
        if len(content) <= MOST_ITEMS:
            self._push(content)
            self._push(value for key, value in content.items() if key not in unused)

    def _tensor(self, tensor: Any) -> None:
        self.values.append(tensor)
        if not tensor.is_leaf:
            return
        self.undo.append(partial(_put_gradient_back, tensor, tensor.grad, tensor.requires_grad))
        tables = vars(tensor), *private.hooks_of_tensor(tensor)
        self._push(table for table in tables if table)
        if tensor.grad is not None:
            self._push([tensor.grad])

    def _function(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # still empty
                content = _MISSING
            self.undo.append(partial(_put_cell_back, cell, content))
            self._push([content])
        self._push([function.__defaults__, function.__kwdefaults__, vars(function)])
        scope = function.__globals__
        if not _is_read(scope.get("__name__")):
            return
        names = set(_names(function.__code__))
        self._scope(scope, names)
        for name in names - self._names:
            self._push(self._methods.pop(name, ()))
        self._names |= names

    def _scope(self, scope: dict[str, Any], names: Collection[str]) -> None:
        """The globals that code names, and what it may name of modules among them."""
        noted = self._scopes.get(id(scope))
        if noted is None:
            noted = self._scopes[id(scope)] = {}
            self.undo.append(partial(_put_names_back, scope, noted))
        for name in names:
            value = scope.get(name, _MISSING)
            if type(value) is ModuleType and _is_read(value.__name__):
                self._scope(vars(value), [one for one in names if one in vars(value)])
            elif name not in noted:
                self._push([value])
            noted.setdefault(name, value)

    def _class(self, kind: type) -> None:
        if not _is_read(kind.__module__):
            return
        self._push(kind.__mro__)
        attributes = {name: value for name, value in vars(kind).items() if name not in _OF_CLASSES}
        self.undo.append(partial(_put_class_back, kind, attributes))
        for name, value in attributes.items():
            is_called = type(value) in _CALLED and not name.startswith("__") and name != "forward"
            if is_called and name not in self._names:
                self._methods.setdefault(name, []).append(value)
            else:
                self._push([value])

    def _stream(self, value: Any, kind: type) -> bool:
        """Whether it is a generator of random numbers, or an array."""
        numpy = sys.modules.get("numpy")
        if issubclass(kind, torch.Generator):
            self.undo.append(partial(value.set_state, value.get_state()))
        elif issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
            self.undo.append(partial(value.setstate, value.getstate()))
        elif numpy is None:
            return False
        elif issubclass(kind, numpy.random.Generator):
            self.undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif issubclass(kind, numpy.random.RandomState):
            self.undo.append(partial(value.set_state, value.get_state()))
        elif issubclass(kind, numpy.ndarray):
            self.values.append(value)
        else:
            return False
        return True

    def _object(self, value: Any, kind: type) -> None:
        if issubclass(kind, nn.Module):
            self.modules.append(value)
        elif kind in _PARTS or kind.__module__.startswith("torch._") or _top(kind.__module__) in _CLOSED:
            return
        for part in kind.__mro__:
            slots = vars(part).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                descriptor = vars(part).get(name)
                if type(descriptor) is _SLOT:
                    content = _slot(descriptor, value)
                    self.undo.append(partial(_put_slot_back, descriptor, value, content))
                    self._push([content])
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            # Their hooks are called around an update, never where a step is tried out.
            self._table(attributes, *(private.STEP_HOOKS if issubclass(kind, Optimizer) else ()))
        self._push([kind])


class _Slotted:
    __slots__ = ("one",)


_SLOT = type(vars(_Slotted)["one"])
_PARTS = {
    MethodType: ("__self__", "__func__"),
    BuiltinFunctionType: ("__self__",),
    partial: ("func", "args", "keywords", "__dict__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    _CACHED: ("__wrapped__",),
}
_CALLED = {FunctionType, staticmethod, classmethod, property, _CACHED}
_OF_CLASSES = {"__dict__", "__weakref__", "__module__", "__doc__", "__abstractmethods__", "_abc_impl"}


def _top(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else "builtins"


def _is_read(module: object) -> bool:
    """Whether code and classes of a module are looked into: not ours, Python's, or an installed package's."""
    return _is_top_read(_top(module))


@lru_cache
def _is_top_read(top: str) -> bool:
    where = getattr(sys.modules.get(top), "__file__", None) or ""
    return top not in _PYTHON | {"torch", "anybatch"} and not any(name in where for name in _INSTALLED)


def _known_caches() -> list[Any]:
    """The caches of all modules that are loaded, torch's and Python's left out."""
    return [cache for one in _caches_of(len(sys.modules)) if (cache := one()) is not None]


@lru_cache(maxsize=1)
def _caches_of(_: int) -> list["weakref.ref[Any]"]:
    """Searched for once for each number of modules."""
    own = _PYTHON | {"torch", "anybatch"}
    scopes = [vars(module) for name, module in list(sys.modules.items()) if _top(name) not in own]
    found = [value for scope in scopes for value in list(scope.values()) if type(value) in (_CACHED, type)]
    kinds = [vars(kind).values() for kind in found if type(kind) is type]
    caches = [one for values in ([*found], *kinds) for one in values if type(one) is _CACHED]
    return [weakref.ref(one) for one in caches if _top(one.__module__) not in own]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _refill(base: Any, container: Any, content: Any) -> None:
    """What a list, deque or set held."""
    is_same = len(container) == len(content)
    if base is set:
        if not (is_same and container == content):
            set.clear(container)
            set.update(container, content)
    elif not (is_same and all(map(is_, container, content))):
        base.clear(container)
        base.extend(container, content)


def _content(table: dict[Any, Any]) -> dict[Any, Any]:
    """What a dict holds, in its order, without any code of its own."""
    if type(table) is dict:
        return table.copy()
    keys = OrderedDict.__iter__(table) if isinstance(table, OrderedDict) else dict.__iter__(table)
    return {key: dict.__getitem__(table, key) for key in keys}


def _refill_table(table: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    now = table if type(table) is dict else _content(table)
    is_same = len(now) == len(content) and all(map(is_, now.values(), content.values()))
    if is_same and all(map(is_, now, content)):
        return
    base: Any = OrderedDict if isinstance(table, OrderedDict) else dict
    base.clear(table)
    for key, value in content.items():
        base.__setitem__(table, key, value)


def _put_gradient_back(tensor: Tensor, gradient: Tensor | None, requires_grad: bool) -> None:
    if tensor.grad is not gradient:
        tensor.grad = gradient
    if tensor.is_leaf and tensor.requires_grad is not requires_grad:
        tensor.requires_grad_(requires_grad)


def _put_cell_back(cell: CellType, content: Any) -> None:
    if content is not _MISSING:
        cell.cell_contents = content
        return
    try:
        del cell.cell_contents
    except ValueError:  # empty as it was
        return


def _put_names_back(scope: dict[str, Any], noted: Mapping[str, Any]) -> None:
    for name, value in noted.items():
        if value is _MISSING:
            scope.pop(name, None)
        elif scope.get(name, _MISSING) is not value:
            scope[name] = value


def _put_class_back(kind: type, attributes: Mapping[str, Any]) -> None:
    now = vars(kind)
    for name in [one for one in now if one not in attributes and one not in _OF_CLASSES]:
        type.__delattr__(kind, name)
    for name, value in attributes.items():
        if now.get(name, _MISSING) is not value:
            type.__setattr__(kind, name, value)


def _slot(descriptor: Any, value: object) -> Any:
    try:
        return descriptor.__get__(value)
    except AttributeError:  # not filled
        return _MISSING


def _put_slot_back(descriptor: Any, value: object, content: Any) -> None:
    if _slot(descriptor, value) is content:
        return
    if content is _MISSING:
        descriptor.__delete__(value)
    else:
        descriptor.__set__(value, content)


def _copies(values: Iterable[Any], known: Collection[int]) -> Iterator[Callable[[], object]]:
    """How the small ones are put back, as many as may be copied."""
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
