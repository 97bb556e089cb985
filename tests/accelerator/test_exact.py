"""A step on an accelerator is the CPU's whole batch: every kind of step, in float64."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.accelerator.programs import clipped, mixed, offloaded

LIMIT = 1e-12  # relative to the largest parameter, after two updates with SGD
ROUGH = {"bf16-mixed": 2**-6, "fp16-mixed": 2**-9}  # a few roundings of the dtype


@pytest.mark.parametrize("program", [clipped, offloaded])  # others: tests/laws, `make test-device`
def test_steps_on_a_device_are_the_whole_batch_on_the_cpu(sim: Any, program: Callable[[], float]) -> None:
    assert sim(program) <= LIMIT


@pytest.mark.parametrize("precision", ROUGH)
def test_mixed_precision_uses_the_autocast_of_the_device(sim: Any, precision: str) -> None:
    error, is_short = sim(mixed, precision)
    assert is_short
    assert error <= ROUGH[precision]
