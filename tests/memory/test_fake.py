"""Fake tensors in place of real ones, and what a trace leaves."""

import gc
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch.core.errors import TraceError
from anybatch.memory.fake import FakeMode, drop_left_fakes, replaced_by_fakes, undisturbed
from tests.recompute.models import streams
from tests.snapshots import same


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.recurrent = nn.Linear(3, 3), nn.Linear(3, 3), nn.LSTM(3, 3)
        self.other.weight = self.one.weight
        self.norm, self.plain = nn.BatchNorm1d(3), torch.ones(3)
        self.nested = {"a": [torch.ones(2), "text"], "b": (self.plain,)}
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.cache["x"] = x
        self.lazy = x + 1
        self.norm.running_mean = self.norm.running_mean + 1
        return self.other(self.one(x)) * self.plain


def test_surroundings_are_as_before() -> None:
    parameter = nn.Parameter(torch.ones(1))
    gradient = parameter.grad = torch.ones(1)
    before, filters = streams(), list(warnings.filters)
    with undisturbed([parameter]):
        torch.rand(1), random.random(), np.random.rand()
        parameter.grad = None
        warnings.warn("not heard", stacklevel=1)
        assert not gc.isenabled()
    assert gc.isenabled()
    assert warnings.filters == filters
    assert parameter.grad is gradient
    assert same(before, streams())


def test_fakes_that_are_left_are_taken_out_or_named() -> None:
    table, kept, box = {"known": 1}, [1], SimpleNamespace()
    with undisturbed([]):  # without the collector
        with FakeMode():
            table["x"] = box.made = torch.ones(1)
            kept.append(table["x"])
        drop_left_fakes()
        assert (table, kept, vars(box)) == ({"known": 1}, [1], {})
        with FakeMode():
            for_good = (torch.ones(1),)
        with pytest.raises(TraceError, match="got a tensor that a tuple keeps"):
            drop_left_fakes()
        del for_good


def test_a_bool_is_refused_but_for_code_of_torch() -> None:
    """No branch is guessed: in code of the caller's it may lead elsewhere than in a real step."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4), 1, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    mode = FakeMode()
    with replaced_by_fakes(mode, encoder.modules(), []), mode:
        x = torch.ones(3, 2, 4)
        assert encoder(x, mask=torch.empty_like(mask)).shape == x.shape
        with pytest.raises(TraceError, match="got a bool asked of a tensor in a loss"):
            bool(x.isnan().any())
        with pytest.raises(TraceError, match=r"aten\.equal"), mode.explained():
            torch.equal(x, x)
