"""The law holds for models that use their parameters in unusual ways."""

from typing import Any

import pytest
import torch

from tests.device import needs_kernels
from tests.laws.cases import Problem
from tests.laws.check import check, cut, reference, windowed
from tests.zoo import ZOO

ROWS = 7
EXACT = [name for name, kind in ZOO.items() if not (kind.meets or kind.draws)]
OPTIONS: dict[str, dict[str, Any]] = {
    "own": {},
    "float64 sums": {"accumulate": torch.float64},
    "looked at": {"non_finite": "drop"},
}


def problem(name: str) -> Problem:
    torch.manual_seed(1)
    kind = ZOO[name]
    batch = tuple(column.double() if column.is_floating_point() else column for column in kind.rows(ROWS))
    return Problem(model=kind.make().double(), loss=kind.loss, batch=batch, rows=ROWS)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[needs_kernels] * (one in ("sparse", "GRU"))) for one in EXACT]
)
def test_any_cut_gives_the_whole_batch(name: str, options: dict[str, Any]) -> None:
    given = problem(name)
    whole = reference(given)
    for micro_batch in range(1, ROWS + 1):
        check(cut(given, micro_batch, **options), whole)
    for sizes in ([ROWS], [1] * ROWS, [4, 1, 2]):
        check(windowed(given, sizes, **options), whole)


@pytest.mark.parametrize("name", ["shared memory", "joined", "tied"])
def test_clipping_scales_each_gradient_once(name: str) -> None:
    given = problem(name)
    whole = reference(given)
    norm = torch.cat([gradient.flatten() for gradient in whole.gradients.values()]).norm()
    factor = 0.1 / (norm + 1e-6)
    clipped = {name: gradient * factor for name, gradient in whole.gradients.items()}
    for take, size in ((cut, 2), (cut, ROWS), (windowed, [4, 1, 2])):
        taken: Any = take(given, size, clip_norm=0.1)  # pyright: ignore
        check(taken, type(whole)(loss=whole.loss, gradients=clipped))
