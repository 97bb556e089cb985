"""Fake tensors in place of real ones, and what a trace leaves."""

import gc
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from anybatch.core.errors import TraceError
from anybatch.memory.fake import FakeMode, replaced_by_fakes, undisturbed
from tests.recompute.models import streams
from tests.snapshots import same


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


def test_a_bool_is_refused_but_for_code_of_torch() -> None:
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
