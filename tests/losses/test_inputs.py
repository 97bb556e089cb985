"""How batches are read: every accepted form, and what is refused."""

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.core.errors import LossError
from anybatch.losses.inputs import TARGET_KEYS, call_model, split_batch

Pair = namedtuple("Pair", "image label")

READINGS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "pair": ((1, 2), 1, (2,)),
    "pair in a list, as loaders collate it": ([1, 2], 1, (2,)),
    "named tuple": (Pair(1, 2), 1, (2,)),
    "nested inputs": (((1, 2), 3), (1, 2), (3,)),
    "inputs by name": (({"a": 1}, 3), {"a": 1}, (3,)),
    "several inputs": ((1, 2, 3), (1, 2), (3,)),
    "several targets": ((1, (2, 3, 4)), 1, (2, 3, 4)),
    "several targets in a list": ([1, [2, 3, 4]], 1, (2, 3, 4)),
    "several of both": ((1, 2, (3, 4)), (1, 2), (3, 4)),
    "no target": ((1,), 1, ()),
    "no target, nested": (((1, 2, 3),), (1, 2, 3), ()),
    "mapping": ({"a": 1, "b": 2, "target": 3}, {"a": 1, "b": 2}, (3,)),
    "mapping of another type": (UserDict({"a": 1, "labels": 3}), {"a": 1}, (3,)),
    "mapping with several targets": ({"a": 1, "y": (2, 3)}, {"a": 1}, (2, 3)),
}


@pytest.mark.parametrize(("micro", "inputs", "targets"), READINGS.values(), ids=READINGS)
def test_a_batch_is_read(micro: Any, inputs: Any, targets: tuple[Any, ...]) -> None:
    assert split_batch(micro) == (inputs, targets)


@pytest.mark.parametrize("key", TARGET_KEYS)
def test_a_target_has_several_names(key: str) -> None:
    assert split_batch({"x": 1, key: 2}) == ({"x": 1}, (2,))


@pytest.mark.parametrize(
    ("micro", "inputs"),
    [
        ((1, 2, 3), (1, 2, 3)),
        ([1, 2, 3], (1, 2, 3)),
        (((1, 2, 3),), (1, 2, 3)),
        ((1,), 1),
        ({"a": 1, "y": 2}, {"a": 1, "y": 2}),
    ],
    ids=str,
)
def test_without_a_target_all_goes_into_the_model(micro: Any, inputs: Any) -> None:
    assert split_batch(micro, has_target=False) == (inputs, ())


REFUSED: dict[str, tuple[Any, str]] = {
    "a tensor": (torch.ones(2), "got Tensor"),
    "nothing": (None, "got NoneType"),
    "no part": ((), "got tuple"),
    "no target by name": ({"a": 1, "b": 2}, "got ['a', 'b']"),
    "two targets by name": ({"a": 1, "y": 2, "labels": 3}, "got ['a', 'y', 'labels']"),
}


@pytest.mark.parametrize(("micro", "got"), REFUSED.values(), ids=REFUSED)
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
