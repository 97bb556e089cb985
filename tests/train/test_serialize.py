"""Packing: what goes in comes out, tied tensors once, and what needs pickle is refused by its path."""

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.errors import CheckpointError
from anybatch.train.serialize import Packer, digest_of, unpack

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers()
NESTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.just("$"), inner)
    ),
    max_leaves=12,
)


def round_trip(value: Any) -> Any:
    """Through the packer and real JSON text."""
    packer = Packer()
    return unpack(json.loads(json.dumps(packer.pack(value, "here"), allow_nan=False)), packer.tensors)


def typed(value: Any) -> Any:
    """A nest with the type of each part, because True == 1 == 1.0 and (1,) is no list."""
    if isinstance(value, dict):
        return "dict", [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [typed(item) for item in value]
    return type(value).__name__, repr(value)


@given(NESTS)
def test_plain_values_come_back_the_same(value: Any) -> None:
    assert typed(round_trip(value)) == typed(value)


def test_floats_that_json_does_not_know() -> None:
    assert math.isnan(round_trip([math.nan])[0])
    assert round_trip((math.inf, -math.inf)) == (math.inf, -math.inf)


def test_counter_stays_a_counter() -> None:
    back = round_trip(Counter({3: 2, 5: 1}))
    assert isinstance(back, Counter)
    assert back == {3: 2, 5: 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_tensors_come_back_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).to(dtype)
    back = round_trip({"a": [value]})["a"][0]
    assert back.dtype == dtype
    assert torch.equal(back, value)


def test_tied_tensors_are_kept_once_and_views_apart() -> None:
    packer = Packer()
    weight = torch.randn(4, 3)
    back = unpack(
        packer.pack({"a": weight, "tied": weight, "view": weight.t(), "row": weight[0]}, "m"), packer.tensors
    )
    assert back["a"] is back["tied"]
    assert torch.equal(back["view"], weight.t())
    assert torch.equal(back["row"], weight[0])
    assert len(packer.tensors) == 3


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: None, {(1, 2): 3}, {True: 1}, b"bytes"])
def test_what_needs_pickle_is_refused_by_its_path(value: object) -> None:
    with pytest.raises(CheckpointError, match="state/0/x"):
        Packer().pack([{"x": value}], "state")


def test_digest_depends_on_everything() -> None:
    one = {"a": torch.zeros(2), "b": torch.ones(2)}
    others: list[tuple[dict[str, torch.Tensor], str]] = [
        ({"a": torch.zeros(2), "b": torch.tensor([1.0, 1.0000001])}, "text"),
        ({"a": torch.zeros(2), "c": torch.ones(2)}, "text"),
        ({"a": torch.zeros(2, 1), "b": torch.ones(2)}, "text"),
        ({"a": torch.zeros(2, dtype=torch.int32), "b": torch.ones(2)}, "text"),
        (one, "texts"),
    ]
    digests = {digest_of(tensors, text) for tensors, text in [(one, "text"), *others]}
    assert len(digests) == 1 + len(others)
    assert digest_of(dict(reversed(one.items())), "text") == digest_of(one, "text")
