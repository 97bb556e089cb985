"""The look before the first split: faults are refused, warned of, or rounding; what is sound passes."""

import pytest

from tests.laws import planted


@pytest.mark.parametrize("seed", range(24))
def test_nothing_wrong_is_silent(seed: int) -> None:
    planted.assert_said(seed)
