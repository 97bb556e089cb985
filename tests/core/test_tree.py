"""Nests of every kind come apart into their tensors and back, with nothing of the caller's changed."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from anybatch.core import tree


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any


class Encoding(UserDict[str, Any]):
    """As a BatchEncoding of Hugging Face: a mapping that carries more than its items."""

    def __init__(self, data: dict[str, Any], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings


X, Y = torch.arange(8.0).reshape(4, 2), torch.arange(4)

NESTS: dict[str, tuple[Any, list[str]]] = {
    "tensor": (X, ["the batch itself"]),
    "tuple": ((X, Y), ["[0]", "[1]"]),
    "named tuple": (Pair(X, Y), ["[0]", "[1]"]),
    "dict": ({"x": X, 3: Y}, ["['x']", "[3]"]),
    "OrderedDict": (OrderedDict(y=Y, x=X), ["['y']", "['x']"]),
    "defaultdict": (defaultdict(list, x=X, y=Y), ["['x']", "['y']"]),
    "UserDict": (Encoding({"x": X, "y": Y}, "kept"), ["['x']", "['y']"]),
    "frozen dataclass": (Frozen(X, Y), [".x", ".y"]),
    "None beside": ({"x": X, "mask": None, "y": (None, Y)}, ["['x']", "['y'][1]"]),
    "deep": (Frozen([{"x": Pair(X, None)}], ((Y,),)), [".x[0]['x'][0]", ".y[0][0]"]),
    "empty": ((), []),
}


def shape(value: Any) -> Any:
    """The nest without its tensors: types, keys and order."""
    if isinstance(value, Tensor | None):
        return type(value)
    keys = list(value) if isinstance(value, dict | UserDict) else None
    return type(value), keys, [shape(part) for part in tree.parts(value) or ()]


def are(some: Any, others: Any) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize(("nest", "paths"), NESTS.values(), ids=NESTS)
def test_nests_come_apart_and_back(nest: Any, paths: list[str]) -> None:
    flat, found = tree.flatten(nest), tree.parts(nest)
    assert list(flat.paths) == paths
    if found is not None:
        again = tree.mould(nest)(found)
        assert again is not nest or not found
        assert shape(again) == shape(nest)
        assert are(tree.parts(again), found)
    assert all(leaf is X or leaf is Y for leaf in flat.leaves)
    changed = [leaf[:1] + 1 for leaf in flat.leaves]
    built = flat.build(iter(changed))
    assert shape(built) == shape(nest)
    assert are(tree.flatten(built).leaves, changed)
    assert are(tree.flatten(nest).leaves, flat.leaves)  # the caller's own
