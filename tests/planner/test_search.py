"""The fastest plan that fits, the smallest budget for which there is one, and the law of bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from anybatch import PlanReport, Step, WholeBatch
from anybatch.core.errors import BudgetError
from anybatch.planner.law import Law
from anybatch.planner.request import Request
from anybatch.planner.search import choose
from anybatch.planner.trace import trace
from tests import budgets
from tests.budgets import adamw, conv_net, foreach, images, make, net, request, rows_of, sgd


def within(asked: Request, budget: int) -> PlanReport:
    return choose(replace(asked, budget=budget))


def smallest(asked: Request) -> int:
    """The smallest budget, named where parameters, gradients and optimizer state fit and nothing else."""
    least = 1
    for _ in range(2):
        with pytest.raises(BudgetError) as refused:
            within(asked, least)
        least = int(refused.value.smallest)
    assert "; largest: " in str(refused.value)
    assert len(str(refused.value)) <= 300
    return least


def peak_of(step: Step, report: PlanReport, batch: Any) -> int:
    run = lambda: budgets.carried_out(step, report.plan, batch)  # noqa: E731
    run()
    return budgets.metered(step, run, batch)


def contrast(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs @ outputs.T, target)


def vectors() -> Any:
    return rows_of(12, 5, 8)


def small(optimizer: Any = adamw) -> Step:
    return make(lambda: net(blocks=2), optimizer)


def whole_batch() -> Step:
    step = small()
    return Step(step.model, WholeBatch(contrast), step.optimizers)


CASES: dict[str, tuple[Callable[[], Step], Callable[[], Any], dict[str, Any]]] = {
    "sgd": (lambda: small(sgd), vectors, {}),
    "foreach": (lambda: small(foreach), lambda: rows_of(12), {}),
    "rows meet": (lambda: make(conv_net), images, {"cut_refused": "rows meet"}),
    "no blocks": (small, vectors, {"blocks": ()}),
    "a loss over all rows": (whole_batch, lambda: rows_of(6), {"blocks": ()}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_chosen_fits_to_the_byte_and_the_smallest_budget_is_the_smallest(name: str) -> None:
    build, batch_of, options = CASES[name]
    step, batch = build(), batch_of()
    asked = request(step, batch, **options)
    found: list[int] = []
    assert budgets.changed_by(step, lambda: found.append(smallest(asked))) == []
    (least,), most = found, trace(asked.like, asked.task, asked.batch, device=asked.device).peak
    for budget in (least, (least + max(least, most)) // 2):
        report = within(asked, budget)
        assert report.peak <= budget
        assert report.plan.micro_batch in options.get("sizes", asked.all_sizes)
        assert not (report.plan.is_cut and "cut_refused" in options)
        assert all(option.peak <= budget for option in report.options)
        assert peak_of(step, report, batch) == report.peak
    with pytest.raises(BudgetError, match=rf"\({least} bytes\)") as refused:
        within(asked, least - 1)
    assert refused.value.smallest == least


def test_a_budget_above_all_changes_nothing_and_one_below_rebuilds_or_cuts() -> None:
    asked = request(small(), vectors())
    whole = within(asked, 2**40)
    assert whole.plan == asked.like
    assert within(asked, whole.peak).plan == asked.like
    tight = within(asked, whole.peak - 1)
    assert tight.plan.is_cut or tight.plan.blocks


def test_an_optimizer_goes_one_by_one_only_where_that_is_needed() -> None:
    step, batch = make(lambda: net(blocks=2), foreach), rows_of(12)
    asked = request(step, batch)
    least = smallest(asked)
    assert within(asked, 2**40).plan.foreach is None
    report = within(asked, least)
    assert report.plan.foreach is False
    assert peak_of(step, report, batch) == report.peak <= least
    plain = request(make(lambda: net(blocks=2)), batch)
    assert least == smallest(plain)


LIMIT = 1e-3  # relative


FORMS = {
    "rows": lambda m, n: 1e6 + 5e5 * m,
    "rows and length": lambda m, n: 1e6 + 3e3 * m * n,
    "attention": lambda m, n: 2e3 * m * n + 20 * m * n * n,
    "recurrent": lambda m, n: 1e5 * n + 2e3 * m * n,
}
READ = [(2, 64), (5, 64), (11, 64), (4, 96), (8, 32), (3, 120), (6, 50)]


@pytest.mark.parametrize("form", FORMS)
def test_sizes_that_were_not_read_follow_from_those_that_were(form: str) -> None:
    law = Law()
    for size in READ:
        law.add(size, FORMS[form](*size))
    for size in [(22, 64), (12, 120), (7, 90), (16, 30)]:
        true = FORMS[form](*size)
        assert law(size) == pytest.approx(true, rel=LIMIT)
        assert true < law.bound(size) < 1.25 * true
