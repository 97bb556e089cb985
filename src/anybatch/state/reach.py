"""What a block can reach and change: modules, generators, containers and plain tensors."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

MOST_ITEMS = 1000  # of a container that is looked into: longer ones are data

_OWN = frozenset(vars(nn.Module()))  # what torch keeps in every module
_ATOMS = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device)
_CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_INTERNAL = {"torch", "numpy", "transformers", "anybatch", *sys.stdlib_module_names} - {
    "collections",
    "types",
}


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """Where the state of a block lives.

    Attributes:
        modules: the block and all in it, also in lists, dicts and objects that a module holds.
        generators: the random generators held there: torch's, NumPy's and Python's.
        containers: the lists, dicts, sets and deques held there, and the attributes of objects as dicts.
        values: the tensors and arrays held there that are neither parameters nor buffers.
    """

    modules: tuple[nn.Module, ...]
    generators: tuple[Any, ...] = ()
    containers: tuple[Any, ...] = ()
    values: tuple[Any, ...] = ()

    @staticmethod
    def of(*roots: object) -> "Inside":
        """Look into a block, or into the arguments of one.

        Example:
            >>> len(Inside.of(nn.Sequential(nn.Dropout())).modules)
            2
        """
        walk = _Walk()
        walk.through(roots)
        return Inside(*map(tuple, (walk.modules, walk.generators, walk.containers, walk.values)))

    def joined(self, arguments: Iterable[object]) -> "Inside":
        """With the state of what a call is given; tensors there are the caller's."""
        values = [one for one in arguments if not isinstance(one, (Tensor, *_ATOMS))]
        if not values:
            return self
        other = Inside.of(*values)
        return Inside(
            tuple(dict.fromkeys((*self.modules, *other.modules))),
            (*self.generators, *other.generators),
            (*self.containers, *other.containers),
            self.values,
        )


def ways(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """How to read where a generator stands, and how to set it.

    Example:
        >>> read, put = ways(random.Random(0))
        >>> put(read())
    """
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    return generator.get_state, generator.set_state


class _Walk:
    """Visits everything once."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.generators: list[Any] = []
        self.containers: list[Any] = []
        self.values: list[Any] = []
        self._seen: dict[int, object] = {}

    def through(self, roots: Iterable[Any]) -> None:
        """Visit what can be reached, in order."""
        left = list(roots)[::-1]
        while left:
            value = left.pop()
            if not isinstance(value, (*_ATOMS, *_CODE)) and id(value) not in self._seen:
                self._seen[id(value)] = value
                left.extend(self._visit(value)[::-1])

    def _visit(self, value: Any) -> list[Any]:
        """Note it; what it holds."""
        if isinstance(value, nn.Module):
            self.modules.append(value)
            held = [one for name, one in vars(value).items() if name not in _OWN]
            return [*held, *value.children()]
        if isinstance(value, Tensor) or _is_numpy(value, "ndarray"):
            self.values.append(value)
        elif isinstance(value, (torch.Generator, random.Random)) or _is_numpy(value, "Generator"):
            self.generators.append(value)
        elif isinstance(value, tuple):
            return list(value) if len(value) <= MOST_ITEMS else []
        elif isinstance(value, (list, dict, set, deque)):
            return self._container(value)
        elif not _is_internal(type(value)) and type(getattr(value, "__dict__", None)) is dict:
            return self._container(vars(value))
        return []

    def _container(self, value: Any) -> list[Any]:
        if len(value) > MOST_ITEMS:
            return []
        self.containers.append(value)
        return list(value.values()) if isinstance(value, dict) else list(value)


def _is_numpy(value: object, kind: str) -> bool:
    """Whether it is an array, or a generator of the new or the old kind."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if kind == "ndarray":
        return isinstance(value, numpy.ndarray)
    return isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _is_internal(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _INTERNAL
