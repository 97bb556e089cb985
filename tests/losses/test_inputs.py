"""How batches are read: every accepted form, and what is refused."""

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


@pytest.mark.parametrize(
    ("micro", "got"),
    [
        (torch.ones(2), "got Tensor"),
        (None, "got NoneType"),
        ((), "got tuple"),
        ({"a": 1, "b": 2}, "got ['a', 'b']"),
        ({"a": 1, "y": 2, "labels": 3}, "got ['a', 'y', 'labels']"),
    ],
    ids=range(5),
)
def test_a_batch_without_target_is_refused(micro: Any, got: str) -> None:
    with pytest.raises(LossError) as caught:
        split_batch(micro)
    assert got in str(caught.value)
    assert "ab.Total(losses.sum(), losses.numel())" in str(caught.value)


class Echo(nn.Module):
    """Returns what it was called with."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return inputs + tuple(named.values())


class One(nn.Module):
    """Returns the one thing it was called with."""

    def forward(self, x: Any) -> Any:
        return x


A, B = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        (Echo(), A, (A,)),
        (Echo(), (A, B), (A, B)),
        (Echo(), [A, B], (A, B)),
        (Echo(), {"b": B}, (B,)),
        (One(), A, (A,)),
        (One(), ((A, None),), (A,)),
        (One(), ([A],), (A,)),
    ],
    ids=range(7),
)
def test_a_model_is_called(model: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
    assert call_model(model, inputs) == outputs


def test_other_outputs_are_refused() -> None:
    with pytest.raises(LossError, match=r"got dict(.|\n)*def loss\(model, micro\)"):
        call_model(One(), ({"logits": A},))
