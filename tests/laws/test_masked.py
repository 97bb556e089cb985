"""A batch in which no row has weight: no NaN, no update, everything as it was."""

import math

import pytest
import torch
from torch import nn

from anybatch import Step
from tests.laws.cases import Case
from tests.laws.check import parts
from tests.laws.losses import CASES
from tests.laws.totals import TOTALS
from tests.options import flat
from tests.snapshots import same_as_before

ROWS = 5
# Those whose targets can all be masked: a weight of 0 needs a mean over what counts.
MASKED = [case for case in CASES if "ignore_index" in case.name and "reduction=mean" in case.name]
MASKED += [case for case in TOTALS if case.name == "total"]


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_nothing_changes(case: Case) -> None:
    """Half-way through a training: an optimizer with state, a scheduler."""
    form = next(iter(case.forms))
    for micro_batch, clip_norm in ((1, math.inf), (2, 0.1), (None, math.inf), (None, 0.1)):
        problem = case.problem(form, ROWS, mask="none")
        masked = case.problem(form, ROWS, mask="all").batch
        inside = problem.loss.parameters() if isinstance(problem.loss, nn.Module) else ()
        parameters = [*problem.model.parameters(), *inside]
        optimizer = torch.optim.AdamW(parameters, weight_decay=0.1, amsgrad=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        options = {"micro_batch": micro_batch, "clip_norm": clip_norm, "scheduler": scheduler}
        step = Step(problem.model, problem.loss, optimizer, **flat(options))
        assert step(problem.batch).updated
        own = [p.detach().clone() for p in parameters]
        with same_as_before(step):
            window = step.window()
            for micro in parts(masked, [2, ROWS - 2]):
                window.add(micro)
            for report in (window.close(), step(masked)):
                assert (report.updated, report.weights, report.rows) == (False, {"loss": 0}, ROWS)
                assert math.isnan(report.loss)
        assert all(map(torch.equal, parameters, own))
        assert all(p.grad is None for p in parameters)
