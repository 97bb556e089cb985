"""A loss by itself: outputs are the whole batch's, so that a model that differs does not count."""

from typing import Any

import pytest
import torch
from torch import nn

from anybatch.check.outputs import evaluate
from anybatch.core.total import Total
from anybatch.testing import relative_error
from tests.check.benches import LIMIT, ROWS, bench, calls, cut

BATCH = (torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)),)


class Outputs(nn.Module):
    """One output by row and one for all rows; both depend on the cut."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, features) to the same, and a scalar."""
        return x - x.mean(0), x.std()


def loss(model: nn.Module, micro: Any) -> dict[str, Total]:
    by_row, for_all = model(micro[0])
    return {
        "rows": Total(by_row.square().sum(), len(by_row)),
        "all": Total(for_all * len(by_row), len(by_row)),
    }


@pytest.mark.parametrize("pooled", [True, False])
def test_rows_get_the_outputs_of_the_whole_batch(pooled: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Outputs())
    ours, whole = bench(model, loss), cut(BATCH, ROWS)
    outermost = calls(ours, whole).parts[whole.part]
    reference = evaluate(ours, outermost, [whole], pooled=pooled)[0]
    parts = evaluate(ours, outermost, [cut(BATCH)], pooled=pooled)
    assert relative_error(sum(part.sums["rows"] for part in parts), reference.sums["rows"]) <= LIMIT
    same = relative_error(sum(part.sums["all"] for part in parts), reference.sums["all"]) <= LIMIT
    assert same == pooled
    joined = torch.cat([part.gradients["rows"][0] for part in parts])
    assert relative_error(joined, reference.gradients["rows"][0]) <= LIMIT
    assert [part.weights["rows"] for part in parts] == [3, 3, 2]
    assert parts[0].mean("rows") == parts[0].sums["rows"] / 3


def test_without_given_outputs_the_model_would_count() -> None:
    ours = bench(nn.Sequential(nn.Linear(4, 4), Outputs()), loss)
    whole = evaluate(ours, [], [cut(BATCH, ROWS)], pooled=True)[0]
    parts = evaluate(ours, [], [cut(BATCH)], pooled=True)
    assert relative_error(sum(part.sums["rows"] for part in parts), whole.sums["rows"]) > LIMIT


def test_module_that_runs_inside_another_before_it_is_called_by_the_loss() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), Outputs())
            self.first = self.body[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the loss calls the parts of this model, never the whole")

    def by_parts(model: nn.Module, micro: Any) -> Total:
        by_row = model.body(micro[0])[0] + model.first(micro[0])
        return Total(by_row.square().sum(), len(by_row))

    ours, whole = bench(Tied(), by_parts), cut(BATCH, ROWS)
    outermost = calls(ours, whole).parts[whole.part]
    assert [call.key for call in outermost] == [("body", 0), ("body.0", 1)]
    parts = evaluate(ours, outermost, [cut(BATCH)], pooled=False)
    assert len(parts[0].gradients["loss"]) == 2
