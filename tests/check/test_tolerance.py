"""The table of tolerances and the error that is held against it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Total, check, testing
from anybatch.check.tolerance import relative_error, tolerance


def test_shorter_dtypes_and_longer_sums_are_given_more() -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    limits = [tolerance(dtype, 10) for dtype in dtypes]
    assert limits == sorted(limits)
    assert tolerance(torch.float64, 4000) < 1e-12
    assert tolerance(torch.float32, 100) > tolerance(torch.float32, 10)
    with pytest.raises(KeyError):
        tolerance(torch.int64, 1)


def test_error_is_of_all_tensors_as_one_vector() -> None:
    one = {"a": torch.tensor([3.0]), "b": (torch.tensor([4.0]), 0.0)}
    other = {"a": torch.tensor([3.0]), "b": (torch.tensor([4.5]), 0.0)}
    assert relative_error(other, one) == 0.1
    assert relative_error(one, {"a": torch.tensor([3.0])}) == math.inf
    assert relative_error(0.0, 0.0) == 0.0


def test_testing_tells_the_same() -> None:
    assert testing.tolerance is tolerance
    assert testing.relative_error is relative_error


def test_a_model_in_float64_is_held_to_the_limit_of_float64() -> None:
    def nearly(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Total:
        return Total(F.mse_loss(model(micro[0]), micro[1], reduction="sum"), len(micro[0]) + 1e-4)

    batch = torch.randn(12, 5), torch.randn(12, 2)
    sound = check(nn.Linear(5, 2), nn.MSELoss(), batch)
    assert sound.exact
    assert sound.limit < 1e-10
    assert not check(nn.Linear(5, 2), nearly, batch).exact
