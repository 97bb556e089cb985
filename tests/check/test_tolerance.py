"""The table of tolerances and the error that is held against it."""

import math

import pytest
import torch

from anybatch import testing
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
