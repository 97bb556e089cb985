"""The fastest plan that fits, and the smallest budget for which there is one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from anybatch import PlanReport, Step, WholeBatch
from anybatch.core.errors import BudgetError
from anybatch.engine import Plan
from anybatch.memory.device import find_device
from anybatch.planner import search
from anybatch.planner.request import Request
from anybatch.planner.search import choose
from anybatch.planner.trace import trace
from anybatch.recompute import offload
from anybatch.recompute.blocks import choose_blocks as settle
from tests import budgets
from tests.budgets import ConvNet, Net, adamw, foreach, images, make, request, rows_of, sgd
from tests.zoo import Made


def within(asked: Request, budget: int) -> PlanReport:
    return choose(replace(asked, budget=budget))


def smallest(asked: Request) -> int:
    """The smallest budget, named where parameters, gradients and optimizer state fit and nothing else."""
    least = 1
    for _ in range(2):
        with pytest.raises(BudgetError) as refused:
            within(asked, least)
        least = int(refused.value.smallest)
    return least


def peak_of(step: Step, report: PlanReport, batch: Any) -> int:
    run = lambda: budgets.carried_out(step, report.plan, batch)  # noqa: E731
    run()
    return budgets.metered(step, run, batch)


def linear(optimizer: Any = torch.optim.SGD) -> Step:
    """Its gradient is far larger than what it keeps of a row."""
    model = nn.Linear(128, 128)
    return Step(model, nn.MSELoss(), optimizer(model.parameters(), lr=0.1))


def pairs(rows: int = 8) -> Any:
    return torch.randn(rows, 128), torch.randn(rows, 128)


def wide() -> nn.Module:
    """Return blocks whose products are worth keeping, between much that is not."""

    def block() -> nn.Module:
        of = lambda self, x: x + self.layer(x).sin().tanh().sigmoid().tanh().sin()  # noqa: E731
        return Made(of, layer=nn.Linear(512, 512))

    return nn.Sequential(nn.Sequential(*[block() for _ in range(4)]), nn.Linear(512, 4))


def squares() -> nn.Module:
    """Return a model whose bytes are no straight line in the rows."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(x)
        return outputs + (outputs @ outputs.T).tanh().mean(1, keepdim=True)

    return Made(forward, layer=nn.Linear(8, 4))


def contrast(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs @ outputs.T, target)


def vectors() -> Any:
    return rows_of(12, 5, 8)


def small(optimizer: Any = adamw) -> Step:
    return make(lambda: Net(blocks=2), optimizer)


def whole_batch() -> Step:
    step = small()
    return Step(step.model, WholeBatch(contrast), step.optimizers)


CASES: dict[str, tuple[Callable[[], Step], Callable[[], Any], dict[str, Any]]] = {
    "sgd": (lambda: small(sgd), vectors, {}),
    "foreach": (lambda: small(foreach), lambda: rows_of(12), {}),
    "few rows": (small, lambda: rows_of(3, 5, 8), {}),
    "rows meet": (lambda: make(ConvNet), images, {"cut_refused": "rows meet"}),
    "no blocks": (small, vectors, {"blocks": ()}),
    "settled size": (small, vectors, {"sizes": (5,)}),
    "large gradients": (linear, pairs, {}),
    "no straight line": (lambda: make(squares), rows_of, {}),
    "a loss over all rows": (whole_batch, lambda: rows_of(6), {"blocks": ()}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_chosen_fits_to_the_byte_and_the_smallest_budget_is_the_smallest(name: str) -> None:
    build, batch_of, options = CASES[name]
    step, batch = build(), batch_of()
    asked = request(step, batch, **options)
    found: list[int] = []
    assert budgets.changed_by(step, lambda: found.append(smallest(asked))) == []
    (least,), most = found, trace(asked.like, asked.task, asked.batch).peak
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


def test_a_plan_climbs_as_a_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows, then as few recomputed blocks as needed, then their inputs offloaded, then all that is."""
    monkeypatch.setattr(offload, "SMALLEST", 0)
    step, batch = make(wide), rows_of(512, 512)
    host, card = [request(step, batch, device=find_device(one)) for one in ("cpu", "cuda:a100")]
    assert host.policies == ("recompute",)
    assert card.policies == ("recompute", "inputs", "offload")
    whole = within(card, 2**40).peak
    cut = within(card, whole - 1).plan
    assert cut.micro_batch == 256
    assert not cut.blocks
    uncut = replace(card, cut_refused="rows meet")
    plans = [uncut.uniform(512, policy) for policy in card.policies]
    peaks = [trace(plan, uncut.task, uncut.batch, device=card.device).peak for plan in plans]
    assert whole > peaks[0] > peaks[2]
    found = [within(uncut, budget).plan.blocks for budget in (whole - 1, peaks[0], peaks[2])]
    again = uncut.uniform(512, "recompute").blocks
    assert found[0] == again[: len(found[0])] != again
    assert found[1:] == [plans[0].blocks, plans[2].blocks]


def test_a_budget_below_the_floor_is_refused_before_any_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make(wide)
    asked = request(step, rows_of(512, 512), device=find_device("cuda:a100"))
    floor = 16 * sum(parameter.numel() for parameter in step.model.parameters())  # and four step counts
    plans: list[Plan] = []
    monkeypatch.setattr(search, "trace", lambda plan, *a, **k: (plans.append(plan), trace(plan, *a, **k))[1])
    with pytest.raises(BudgetError, match=r"state, got .* without a single row") as refused:
        within(asked, floor - 1)
    assert floor <= refused.value.smallest <= floor + 64
    assert not plans
    least = smallest(asked)
    assert len(plans) <= 6
    assert within(asked, least).peak <= least


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.7])
def test_few_plans_are_traced_and_a_line_says_that_it_goes_on(
    share: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = request(make(wide), rows_of(512, 512), device=find_device("cuda:a100"))
    least, most = smallest(asked), within(asked, 2**40).peak
    capsys.readouterr()
    plans: list[Plan] = []
    monkeypatch.setattr(search, "trace", lambda plan, *a, **k: (plans.append(plan), trace(plan, *a, **k))[1])
    monkeypatch.setattr(search, "SILENT_S", 0.0)
    within(asked, int(least + share * (most - least)))
    assert 2 <= len(plans) <= 11
    assert capsys.readouterr().err.count("planning") == 1


def test_a_budget_above_all_changes_nothing_and_one_below_rebuilds_or_cuts() -> None:
    asked = request(small(), vectors())
    whole = within(asked, 2**40)
    assert whole.plan == asked.like
    seconds = [one.seconds for one in whole.options]
    assert seconds == sorted(seconds)
    assert len(seconds) <= 7
    assert whole.plan not in [option.plan for option in whole.options]
    assert within(asked, whole.peak).plan == asked.like
    tight = within(asked, whole.peak - 1)
    assert tight.plan.is_cut or tight.plan.blocks


def test_no_more_is_rebuilt_of_a_slow_step_than_of_a_fast_one() -> None:
    asked = request(make(ConvNet), images(), cut_refused="rows meet.")
    device, most = asked.device, within(asked, 2**40).peak
    slow = replace(device, flops=device.flops / 1e9, bandwidth=device.bandwidth / 1e9, launch_s=5e3)
    fast, late = within(asked, most - 1), within(replace(asked, device=slow), most - 1)
    assert late.seconds > 10
    assert late.plan == fast.plan
    assert 0 < len(late.plan.blocks) < 4


@pytest.mark.parametrize("asked_for", ["all", {"blocks.1": "selective"}])
def test_settled_blocks_leave_only_the_size(asked_for: Any) -> None:
    step, batch = small(), vectors()
    blocks = settle(step.model, asked_for)
    asked = request(step, batch, blocks=(), like=replace(request(step, batch).like, blocks=blocks))
    # Just below a size that would fit by what was composed: the last bytes come out in the trace.
    exact = within(replace(asked, sizes=(3,)), 2**40).peak
    assert within(asked, exact).plan.micro_batch >= 3
    report = within(asked, exact - 1)
    assert report.plan.blocks == blocks
    assert report.peak < exact


def test_an_optimizer_goes_one_by_one_only_where_that_is_needed() -> None:
    step, batch = make(lambda: Net(blocks=2), foreach), rows_of(12)
    asked = request(step, batch)
    least = smallest(asked)
    assert within(asked, 2**40).plan.foreach is None
    report = within(asked, least)
    assert report.plan.foreach is False
    assert peak_of(step, report, batch) == report.peak <= least
    plain = request(make(lambda: Net(blocks=2)), batch)
    assert least == smallest(plain)


def test_the_uncut_batch_may_take_less_than_any_cut() -> None:
    """Its gradients need no second copy to be added to."""
    asked = request(linear(), pairs())
    uncut = within(asked, 2**40).peak
    assert smallest(asked) == uncut < within(replace(asked, sizes=(1,)), 2**40).peak
    assert not within(asked, uncut).plan.is_cut


def test_what_a_kept_block_lets_go_in_a_forward_is_there_at_every_size() -> None:
    """Its bytes cross the size from which on things are moved; nothing is moved on the host."""

    keeper = lambda: nn.Sequential(nn.Sigmoid(), nn.Linear(64, 64), nn.Linear(64, 64))  # noqa: E731
    keepers = [Made(lambda self, x: self.inner(x), inner=keeper()) for _ in range(6)]
    inner = [nn.Linear(64, 64), nn.Sequential(*keepers), nn.Flatten(), nn.Linear(5120, 4)]
    step = make(lambda: nn.Sequential(*inner))
    batch = torch.randn(16, 80, 64), torch.randint(4, (16,))
    assert offload.SMALLEST in range(2 * 80 * 64 * 4, 5 * 80 * 64 * 4)
    peak = choose(request(step, batch)).peak
    for share in (0.6, 0.5):
        budget = int(share * peak)
        assert choose(request(step, batch, budget=budget)).peak <= budget


# ---- costs


def seconds_of(asked: Request, plan: Plan) -> float:
    return within(replace(asked, like=plan, blocks=(), sizes=(plan.micro_batch,)), 2**40).seconds


def test_seconds_follow_the_work() -> None:
    asked = request(make(ConvNet), images())
    kept, rebuilt = [seconds_of(asked, asked.uniform(24, policy)) for policy in ("keep", "recompute")]
    assert 0 < kept < rebuilt < 2 * kept
    card, took = replace(find_device("cpu"), flops=1.0, half_flops=2.0), list[float]()
    for dtype in (torch.float32, torch.bfloat16):
        asked = request(make(Net, dtype=dtype), rows_of(4, dtype=dtype), device=card)
        took.append(seconds_of(asked, asked.like))
    assert took[0] > 1.9 * took[1]


def test_optimizers_that_could_go_one_by_one() -> None:
    for given, device, expected in (
        ({}, "cpu", False),
        ({}, "cuda:t4", True),
        ({"foreach": True}, "cpu", True),
        ({"foreach": False}, "cuda:t4", False),
        ({"fused": True}, "cuda:t4", False),
    ):
        step = make()
        step.optimizers[0].param_groups[0].update(given)
        assert request(step, rows_of(), device=find_device(device)).may_disable_foreach is expected
