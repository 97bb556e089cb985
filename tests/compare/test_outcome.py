"""Distances of outcomes: relative to the reference, or to parts of its rows where these cancel."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybatch.compare import distance, limit_of
from anybatch.compare.outcome import differ


def outcome(gradient: float, loss: float = 1.0, **more: Any) -> Any:
    """An outcome of one weight in float32, or of `more` than one."""
    gradients = {"weight": torch.tensor([gradient, 0.0])} | {
        key: torch.tensor(one) for key, one in more.items()
    }
    size = math.hypot(*[one.norm().item() for one in gradients.values()])
    report = SimpleNamespace(loss=loss, terms={"loss": loss})
    return SimpleNamespace(
        gradient=gradients, size=size, scale=abs(loss), report=report, rows=8, dtypes={torch.float32}
    )


def test_distance_is_relative_to_the_reference_or_to_a_larger_part() -> None:
    found = distance(outcome(4.0), outcome(5.0, 1.5))
    assert (found.gradient, found.loss, found.worst) == (0.25, 0.5, "weight")
    found = distance(outcome(4.0), outcome(5.0, 1.5), outcome(10.0, -2.0))
    assert (found.gradient, found.loss) == (0.1, 0.25)
    assert distance(outcome(1.0), outcome(1.0, bias=2.0)).worst == "bias"
    assert distance(outcome(0.0), outcome(1.0)).gradient == math.inf
    assert distance(outcome(0.0, math.nan), outcome(0.0, math.nan))[:2] == (0.0, 0.0)
    assert distance(outcome(1.0), outcome(math.nan, math.nan))[:2] == (math.inf, math.inf)


@pytest.mark.parametrize(("share", "found"), [(0.5, None), (2.0, True), (1e5, False)])
def test_differences_are_rounding_small_or_plain(share: float, found: bool | None) -> None:
    apart = share * limit_of([torch.float32], 8)
    for one in (differ(outcome(1.0), outcome(1.0 + apart)), differ(outcome(1.0), outcome(1.0, 1.0 + apart))):
        assert (None if one is None else one.is_small) is found
