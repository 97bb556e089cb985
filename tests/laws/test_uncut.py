"""The bit promise: a batch that is not cut gives torch's own loss and gradients, to the last bit."""

from typing import Any

import pytest
import torch

from anybatch.losses.inputs import call_model, split_batch
from anybatch.losses.torch_losses import summed_loss
from tests.laws.cases import Case, Problem
from tests.laws.check import ADVICE, cut
from tests.laws.losses import CASES

pytestmark = pytest.mark.filterwarnings(ADVICE)

ROWS = 5


def own(problem: Problem) -> tuple[Any, dict[str, Any]]:
    """Loss and gradients as torch gives them."""
    known = summed_loss(problem.loss)
    assert known is not None
    inputs, targets = split_batch(problem.batch, has_target=known.kind.has_target)
    loss = problem.loss(*known.kind.arrange(call_model(problem.model, inputs), targets))
    loss.backward()
    named = dict(problem.model.named_parameters())
    if isinstance(problem.loss, torch.nn.Module):
        named |= {f"loss.{name}": parameter for name, parameter in problem.loss.named_parameters()}
    gradients = {name: parameter.grad.clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = None
    return loss.detach(), gradients


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_uncut_is_torch_to_the_bit(case: Case) -> None:
    for form in case.forms:
        problem = case.problem(form, ROWS, dtype=torch.float32)
        loss, gradients = own(problem)
        for micro_batch in (None, ROWS) if form == next(iter(case.forms)) else (None,):
            report, ours = cut(problem, micro_batch)
            assert torch.equal(torch.tensor(report.loss, dtype=torch.float32), loss)
            assert ours.keys() == gradients.keys()
            assert all(torch.equal(ours[name], gradients[name]) for name in gradients)
