"""A batch in which no row has weight: no NaN, no update, everything as it was."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from anybatch import Step
from tests.laws.cases import Case, Problem
from tests.laws.check import parts
from tests.laws.losses import CASES
from tests.laws.totals import TOTALS

ROWS = 5
# Those whose targets can all be masked: a weight of 0 needs a mean over what counts.
MASKED = [case for case in CASES if "ignore_index" in case.name and "reduction=mean" in case.name]
MASKED += [case for case in TOTALS if case.name == "total"]
ADAM = {"weight_decay": 0.1, "amsgrad": True}


class Training:
    """A model half-way through its training: an optimizer with state, a scheduler."""

    def __init__(self, problem: Problem, full: Any, **options: Any) -> None:
        inside = problem.loss.parameters() if isinstance(problem.loss, nn.Module) else ()
        self.parameters = [*problem.model.parameters(), *inside]
        self.model, self.optimizer = problem.model, torch.optim.AdamW(self.parameters, **ADAM)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.step = Step(problem.model, problem.loss, self.optimizer, scheduler=self.scheduler, **options)
        assert self.step(full).updated

    def state(self) -> Any:
        everything = (
            self.model.state_dict(),
            self.optimizer.state_dict(),
            self.scheduler.state_dict(),
            self.parameters,
        )
        return copy.deepcopy(everything)


def equal(left: Any, right: Any) -> bool:
    """Bit for bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_nothing_changes(case: Case) -> None:
    form = next(iter(case.forms))
    for micro_batch, clip_norm in ((1, math.inf), (2, 0.1), (None, math.inf), (None, 0.1)):
        problem = case.problem(form, ROWS, mask="none")
        masked = case.problem(form, ROWS, mask="all")
        training = Training(problem, problem.batch, micro_batch=micro_batch, clip_norm=clip_norm)
        before = training.state()
        window = training.step.window()
        for micro in parts(masked.batch, [2, ROWS - 2]):
            window.add(micro)
        for report in (window.close(), training.step(masked.batch)):
            assert not report.updated
            assert math.isnan(report.loss)
            assert report.weights == {"loss": 0}
            assert report.rows == ROWS
            assert equal(before, training.state())
            assert all(parameter.grad is None for parameter in training.parameters)
