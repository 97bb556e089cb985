"""How batches are read: every accepted form, and what is refused."""

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.core.errors import LossError
from anybatch.losses.inputs import TARGET_KEYS, call_model, split_batch

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


class Echo(nn.Module):
    def forward(self, *inputs: Any, **named: Any) -> Any:
        return inputs + tuple(named.values()) if named or len(inputs) > 1 else inputs[0]


A, B = torch.zeros(1), torch.ones(1)


def test_a_model_is_called() -> None:
    calls = [
        (A, (A,)),
        ((A, B), (A, B)),
        ([A, B], (A, B)),
        ({"b": B}, (B,)),
        (((A, None),), (A,)),
        (([A],), (A,)),
    ]
    for inputs, outputs in calls:
        assert call_model(Echo(), inputs) == outputs


def test_other_outputs_are_refused() -> None:
    with pytest.raises(LossError, match=r"got dict.*ab.ModelLoss\(\).*\(model, micro\)"):
        call_model(Echo(), ({"logits": A},))
