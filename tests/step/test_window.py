"""Windows with a budget of memory; what they hold, and what lies there beside them, counts."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step
from anybatch.core.errors import BudgetError
from tests.budgets import metered
from tests.options import flat

WIDTH = 400  # the weight takes eight rows' worth of input
CASES = ((8, 8), {}), ((6, 6, 6), {"accumulate": torch.float64}), ((3, 13), {"non_finite": "drop"})


def rows_of(rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 50, WIDTH)
    return x, x.sin()


def make(memory: int | None, **options: Any) -> Step:
    gc.collect()  # what other tests have left must not be freed while memory is read
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Step(model, nn.MSELoss(), optimizer, memory=memory, **flat(options, check=False))


def peak_of_window(step: Step, batch: Any, sizes: Any) -> int:
    """Of the third window, when every size has been read; only the largest part counts."""

    def run() -> None:
        with step.window() as window:
            for micro in zip(*(leaf.split(sizes) for leaf in batch), strict=True):
                window.add(micro)

    run()
    run()
    others = 1 - max(sizes) / sum(sizes)
    return metered(step, run, batch) - int(others * sum(leaf.nbytes for leaf in batch))


@pytest.mark.parametrize(("sizes", "options"), CASES, ids=str)
def test_a_window_keeps_to_its_budget(sizes: Any, options: dict[str, Any], made: list[Any]) -> None:
    """A whole batch has no sums beside its gradients, a window has."""
    batch = rows_of(sum(sizes))

    def peak(memory: int | None) -> int:
        return peak_of_window(make(memory, **options), batch, sizes)

    with pytest.raises(BudgetError, match="By readings") as refused:
        make(3_500_000, **options).window().add(rows_of(max(sizes)))
    least = refused.value.smallest
    assert least < (1.4 if "accumulate" in options else 0.9) * peak(None)
    for memory in (least, 3 * least // 2):
        assert 0.5 * memory < peak(memory) <= memory
    assert not made
