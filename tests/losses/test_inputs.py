"""How batches are read: every accepted form, and what is refused."""

from collections import UserDict, namedtuple
from typing import Any

from anybatch.losses.inputs import TARGET_KEYS, split_batch

Pair = namedtuple("Pair", "image label")

READINGS: list[tuple[Any, Any, tuple[Any, ...]]] = [
    ((1, 2), 1, (2,)),
    ([1, 2], 1, (2,)),  # as loaders collate it
    (Pair(1, 2), 1, (2,)),
    (((1, 2), 3), (1, 2), (3,)),
    (({"a": 1}, 3), {"a": 1}, (3,)),
    ((1, 2, 3), (1, 2), (3,)),
    ((1, 2, (3, 4)), (1, 2), (3, 4)),
    ((1,), 1, ()),
    ({"a": 1, "b": 2, "target": 3}, {"a": 1, "b": 2}, (3,)),
    (UserDict({"a": 1, "labels": 3}), {"a": 1}, (3,)),
    *[({"x": 1, key: 2}, {"x": 1}, (2,)) for key in TARGET_KEYS],
]
WHOLE = [((1, 2, 3), (1, 2, 3)), ([1, 2, 3], (1, 2, 3)), ((1,), 1), ({"a": 1, "y": 2}, {"a": 1, "y": 2})]


def test_a_batch_is_read() -> None:
    for micro, inputs, targets in READINGS:
        assert split_batch(micro) == (inputs, targets)
    for micro, inputs in WHOLE:
        assert split_batch(micro, has_target=False) == (inputs, ())
