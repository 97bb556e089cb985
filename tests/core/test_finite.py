"""Whether numbers are finite: all kinds of tensors at once."""

import math
from functools import partial

import pytest
import torch

from anybatch.core import all_finite
from tests.device import needs_cpu

KINDS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_one_number_that_is_not_finite_is_found_anywhere(dtype: torch.dtype, bad: float) -> None:
    largest = torch.finfo(dtype).max
    tensors = [torch.full((3, 2), largest, dtype=dtype), torch.tensor(-largest, dtype=dtype), torch.ones(5)]
    assert all_finite(tensors)
    assert [tensor.flatten()[0].item() for tensor in tensors] == [largest, -largest, 1.0]  # none is changed
    for tensor in tensors:
        place = tensor.view(-1)[-1:]
        kept = place.clone()
        place.fill_(bad)
        assert not all_finite(tensors)
        place.copy_(kept)
    assert all_finite(tensors)
    assert all_finite([])
    assert all_finite([torch.ones(0)])


@needs_cpu  # sparse tensors warn on CUDA, and the simulated device has none
def test_sparse_gradients_are_looked_at() -> None:
    places, make = torch.tensor([[0, 0, 2]]), partial(torch.sparse_coo_tensor, check_invariants=True)
    values = torch.ones(3, 2), torch.tensor([[1.0, 1], [1, 1], [1, math.nan]]), torch.full((3, 2), 3e38)
    found = [all_finite([make(places, one, (4, 2))]) for one in values]
    assert found == [True, False, False]  # the last one has two numbers in one place
