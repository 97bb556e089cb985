"""The law in lower precision: against the float64 reference, within the one table of tolerances."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.core import tree
from anybatch.testing import relative_error, tolerance
from tests.laws.cases import Case, Problem
from tests.laws.check import ADVICE, check, cut, reference, windowed
from tests.laws.losses import CASES
from tests.laws.totals import TOTALS
from tests.zoo import Made

pytestmark = pytest.mark.filterwarnings(ADVICE)

ROWS = 6
EXACT = {"accumulate": torch.float64}
# In 8 or 11 bits a distance next to a kink falls on the wrong side, in torch's own whole batch too; and some
# losses torch computes on the CPU only in wider dtypes.
SMOOTH = "cross_entropy", "nll", "linear", "bce", "mse", "smooth_l1", "huber", "poisson", "gaussian", "kl_div"
HALF = [case for case in CASES if case.name.startswith(SMOOTH)]


def assert_exact(case: Case, dtype: torch.dtype) -> None:
    for seed, form in enumerate(case.forms):
        problem = case.problem(form, ROWS, seed=seed, dtype=dtype)
        whole = reference(problem)
        for micro_batch, options in ((1, {}), (4, EXACT)) if not seed else ((4, {}),):
            check(cut(problem, micro_batch, **options), whole, dtype=dtype, terms=ROWS)
        check(windowed(problem, [3, 1, 2]), whole, dtype=dtype, terms=ROWS)


@pytest.mark.parametrize("case", [*CASES, *TOTALS], ids=lambda case: case.name)
def test_float32(case: Case) -> None:
    assert_exact(case, torch.float32)


def in_turn(choices: Sequence[Any]) -> list[Any]:
    """Each case with every other choice; of its mean and its sum each with the others."""
    cases = enumerate([*HALF, *TOTALS])
    return [
        pytest.param(case, one, id=f"{case.name}-{one}")
        for at, case in cases
        for number, one in enumerate(choices)
        if (at + at // 2 + number) % 2 == 0
    ]


@pytest.mark.parametrize(("case", "dtype"), in_turn([torch.bfloat16, torch.float16]))
def test_half(case: Case, dtype: torch.dtype) -> None:
    if case.name.startswith("smooth_l1") and dtype == torch.float16 and torch.__version__ < "2.7":
        pytest.skip("torch 2.6 has no smooth_l1_loss in float16 on the CPU")
    assert_exact(case, dtype)


def slope(addends: Tensor, *, dtype: torch.dtype) -> Problem:
    """At slope 0, soft_margin_loss(slope x, -1) has the gradient x / 2: addends come out as they went in."""
    model = Made(lambda self, x: x * self.slope, slope=nn.Parameter(torch.zeros((), dtype=dtype)))
    batch = 2 * addends.to(dtype), -torch.ones(len(addends), dtype=dtype)
    return Problem(model=model, loss=nn.SoftMarginLoss(), batch=batch, rows=len(addends))


# In float16 each is divided by 1,024 and still a normal number.
EQUAL = torch.full((1024,), 0.1)
LARGE_THEN_SMALL = torch.cat([torch.ones(1), torch.full((1023,), 2.0**-9)])


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {}),
        (torch.float32, {}),
        (torch.float32, {"accumulate": torch.float64}),
        (torch.bfloat16, {"accumulate": torch.float64}),
        (torch.bfloat16, {"precision": "bf16-true"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("addends", [EQUAL, LARGE_THEN_SMALL], ids=["equal", "large then small"])
def test_a_thousand_micro_batches_add_up(
    addends: Tensor, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Where `.grad` itself, in bfloat16, is about half off; stored short by the caller or by us."""
    problem = slope(addends, dtype=torch.float32 if "precision" in options else dtype)
    whole = reference(problem)
    check(cut(problem, 1, **options), whole, dtype=dtype, terms=len(addends))
    check(windowed(problem, [1] * len(addends), **options), whole, dtype=dtype, terms=len(addends))


@pytest.mark.parametrize("addends", [EQUAL, LARGE_THEN_SMALL], ids=["equal", "large then small"])
def test_bfloat16_sums_are_lost_only_when_asked_for(addends: Tensor) -> None:
    problem = slope(addends, dtype=torch.bfloat16)
    _, gradients = cut(problem, 1, accumulate=torch.bfloat16)
    error = relative_error(gradients, reference(problem).gradients)
    assert error > tolerance(torch.bfloat16, len(addends))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_sums_keep_what_one_addition_rounds_away(dtype: torch.dtype) -> None:
    """A thousand additions to 1, each a quarter of the last digit: in float32 all are lost."""
    addends = torch.cat([torch.ones(1), torch.full((1023,), 2.0**-25)])
    problem = slope(addends, dtype=torch.float32)
    expected = reference(problem).gradients
    for policy in ("raise", "drop"):  # nobody looks at each micro-batch, or somebody does
        options = {"accumulate": dtype, "non_finite": policy}
        for _, gradients in (cut(problem, 1, **options), windowed(problem, [1] * len(addends), **options)):
            error = relative_error(gradients, expected)
            assert (error <= torch.finfo(torch.float32).eps) == (dtype == torch.float64)


@pytest.mark.parametrize(("case", "name"), in_turn(["fp16-mixed", "fp16-true", "bf16-true", "bf16-mixed"]))
def test_by_name(case: Case, name: str) -> None:
    """Each precision gives the gradient of float64 as well as its dtype can."""
    dtype = torch.float16 if name.startswith("fp16") else torch.bfloat16
    for seed, form in enumerate(case.forms):
        problem = case.problem(form, ROWS, seed=seed, dtype=torch.float32)
        problem = replace(problem, batch=tree.map_leaves(partial(rounded, dtype=dtype), problem.batch))
        for parameter in problem.model.parameters():
            parameter.data = rounded(parameter.data, dtype=dtype)
        whole = reference(problem)
        options: dict[str, Any] = {"precision": name}
        check(cut(problem, 4, **options), whole, dtype=dtype, terms=ROWS)
        if not seed:
            check(cut(problem, 4, **options, non_finite="drop"), whole, dtype=dtype, terms=ROWS)
        check(windowed(problem, [3, 1, 2], **options), whole, dtype=dtype, terms=ROWS)


def rounded(value: Tensor, *, dtype: torch.dtype) -> Tensor:
    """What the short dtype makes of it, so that the reference starts from the same numbers."""
    return value.to(dtype).to(value.dtype) if value.is_floating_point() else value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(), nn.L1Loss(reduction="sum")], ids=str)
def test_sums_of_losses_outgrow_float16(loss: nn.Module, dtype: torch.dtype) -> None:
    """Four rows of 8,192 losses above 10 do not fit in float16."""
    rows, places = 4, 8192
    model = nn.Sequential(nn.Linear(1, 2 * places), nn.Unflatten(1, (2, places))).to(dtype)
    with torch.no_grad():
        model[0].weight.fill_(16.0)[:places].zero_()
        model[0].bias[:places].zero_()
    is_class = isinstance(loss, nn.CrossEntropyLoss)
    target = torch.zeros(rows, *[2] * (not is_class), places, dtype=torch.long if is_class else dtype)
    problem = Problem(model=model, loss=loss, batch=(torch.ones(rows, 1, dtype=dtype), target), rows=rows)
    report, _ = cut(problem, 1)
    assert relative_error(report.loss, reference(problem).loss) <= tolerance(dtype, rows * places)
