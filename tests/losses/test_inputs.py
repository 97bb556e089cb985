"""How batches are read: every accepted form, and what is refused."""

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.core.errors import LossError
from anybatch.losses.inputs import TARGET_KEYS, call_model, split_batch
from tests.zoo import Made

Pair = namedtuple("Pair", "image label")

READINGS: list[tuple[Any, Any, tuple[Any, ...]]] = [
    ((1, 2), 1, (2,)),
    ([1, 2], 1, (2,)),  # as loaders collate it
    (Pair(1, 2), 1, (2,)),
    (((1, 2), 3), (1, 2), (3,)),
    (({"a": 1}, 3), {"a": 1}, (3,)),
    ((1, 2, 3), (1, 2), (3,)),
    ((1, (2, 3, 4)), 1, (2, 3, 4)),
    ([1, [2, 3, 4]], 1, (2, 3, 4)),
    ((1, 2, (3, 4)), (1, 2), (3, 4)),
    ((1,), 1, ()),
    (((1, 2, 3),), (1, 2, 3), ()),
    ({"a": 1, "b": 2, "target": 3}, {"a": 1, "b": 2}, (3,)),
    (UserDict({"a": 1, "labels": 3}), {"a": 1}, (3,)),
    ({"a": 1, "y": (2, 3)}, {"a": 1}, (2, 3)),
    *[({"x": 1, key: 2}, {"x": 1}, (2,)) for key in TARGET_KEYS],
]
WHOLE = [
    ((1, 2, 3), (1, 2, 3)),
    ([1, 2, 3], (1, 2, 3)),
    (((1, 2, 3),), (1, 2, 3)),
    ((1,), 1),
    ({"a": 1, "y": 2}, {"a": 1, "y": 2}),
]


def test_a_batch_is_read() -> None:
    for micro, inputs, targets in READINGS:
        assert split_batch(micro) == (inputs, targets)
    for micro, inputs in WHOLE:
        assert split_batch(micro, has_target=False) == (inputs, ())


def test_a_model_is_called() -> None:
    def echo(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        return inputs + tuple(named.values()) if named or len(inputs) > 1 else inputs[0]

    a, b, model = torch.zeros(1), torch.ones(1), Made(echo)
    for inputs, outputs in (
        (a, (a,)), ((a, b), (a, b)), ([a, b], (a, b)), ({"b": b}, (b,)), (((a, None),), (a,)), (([a],), (a,)),
    ):  # fmt: skip
        assert call_model(model, inputs) == outputs
    with pytest.raises(LossError, match=r"got dict.*ab.ModelLoss\(\).*\(model, micro\)"):
        call_model(model, ({"logits": a},))
