"""Requests and candidates."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Plan, WholeBatch
from anybatch.core.batch import cut_sizes
from anybatch.core.errors import TraceError
from anybatch.memory.device import find_device
from anybatch.planner import trace as tracing
from anybatch.planner.candidates import Candidates
from anybatch.planner.mixture import KEEP, fastest, smallest
from anybatch.recompute import offload
from tests.budgets import (
    Build,
    ConvNet,
    Net,
    Untraceable,
    adamw,
    carried_out,
    foreach,
    images,
    make,
    measured,
    metered,
    request,
    rows_of,
    sgd,
)

LIMIT = 0.005  # of the bytes, where they are composed


@pytest.mark.parametrize(("policy", "size"), [(KEEP, 24), (KEEP, 10), ("recompute", 24), ("selective", 5)])
def test_a_trace_is_a_real_second_step_to_the_byte(policy: str, size: int) -> None:
    step, batch = make(optimizer=foreach), rows_of(24, 5, 8)
    asked = request(step, batch)
    for chosen in (None, False):
        plan = replace(asked.uniform(size, policy), foreach=chosen)
        predicted = Candidates(asked).trace(plan)
        carried_out(step, plan, batch)
        assert predicted.peak == metered(step, lambda plan=plan: carried_out(step, plan, batch), batch)


@pytest.mark.parametrize("size", [24, 5])
def test_mixtures_are_traces_to_a_few_scalars(size: int) -> None:
    candidates = Candidates(asked := request(make(optimizer=foreach), rows_of(24, 5, 8)))
    assert candidates.is_composed
    assert candidates.mixture(size, None).policies == (KEEP,)  # the others cost, and are often not needed
    candidates.add_policies(candidates.unrecorded)
    for chosen in (None, False):
        mixture = candidates.mixture(size, chosen)
        for choice in ({}, {"blocks.0": "recompute"}, {"blocks.2": "selective", "blocks.1": "recompute"}):
            blocks = tuple((name, choice[name]) for name in asked.blocks if name in choice)
            plan = replace(asked.like, micro_batch=size, blocks=blocks, foreach=chosen)
            exact = candidates.trace(plan).peak
            assert abs(mixture.peak(choice) - exact) <= LIMIT * exact


class Wide(nn.Module):
    """Products that are worth keeping, between much that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).sin().tanh().sigmoid().tanh().sin()


class Towers(nn.Module):
    """Each block is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*[Wide() for _ in range(4)]), nn.Linear(512, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x) - self.blocks(-x))


@pytest.mark.parametrize(
    ("model", "batch", "sizes"),
    [
        (Net, rows_of(24, 40, 8), (24, 8, 3)),
        (ConvNet, images(24), (24, 8, 3)),
        (lambda: nn.Sequential(*[Wide() for _ in range(4)], nn.Linear(512, 4)), rows_of(512, 512), (512, 64)),
        (Towers, rows_of(512, 512), (512, 64, 8)),
    ],
    ids=["net", "conv", "wide", "towers"],
)
def test_no_mixture_is_faster_than_the_kept_step_says_that_any_can_be(
    model: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], sizes: Sequence[int]
) -> None:
    candidates = Candidates(request(make(model), batch))
    candidates.add_policies(candidates.unrecorded)
    for size in sizes:
        mixture = candidates.mixture(size, None)
        least, most = mixture.peak(smallest(mixture)), mixture.peak({})
        for part in range(9):
            choice = fastest(mixture, budget := least + part * (most - least) // 8)
            assert choice is not None
            assert mixture.seconds(choice) >= mixture.least_seconds(budget)
        assert mixture.least_seconds(most) == mixture.seconds({}) < mixture.least_seconds(least)


def test_where_blocks_may_be_moved_only_the_kept_step_bounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is recorded what moving takes."""
    monkeypatch.setattr(offload, "SMALLEST", 0)
    asked = replace(request(make(Towers), rows_of(512, 512)), budget=50_000_000)
    here = Candidates(asked)
    there = Candidates(replace(asked, device=find_device("cuda:a100")))
    still = Candidates(replace(asked, device=find_device("cuda:a100"), without=("offload",)))
    kept = [one.mixture(512, None).seconds({}) for one in (here, there, still)]
    assert here.least_seconds(512) > kept[0]
    assert there.least_seconds(512) == kept[1]
    assert still.least_seconds(512) > kept[2]
    assert there.unrecorded == ("recompute", "selective", "offload")
    there.add_policies(["offload"])
    assert there.unrecorded == ("recompute", "selective")
    assert kept[1] < there.least_seconds(512) <= still.least_seconds(512)


def test_nothing_bounds_what_cannot_fit() -> None:
    """To free all that blocks leave is not enough."""
    asked = request(make(), rows_of(24, 40, 8))
    mixture = Candidates(asked).mixture(24, None)
    left = sum(one.net for one in mixture.segments[KEEP] if one.block and one.place == ("forward", 0))
    assert mixture.least_seconds(mixture.peak({}) - left) < inf
    assert mixture.least_seconds(mixture.peak({}) - left - 1) == inf


def test_the_sparing_update_is_recorded_only_where_the_update_takes_too_much() -> None:
    asked = request(make(optimizer=foreach), rows_of(24, 40, 8))
    mixture = Candidates(asked).mixture(2, None)
    update, most = mixture.peak({}, phase="update"), mixture.peak({})
    assert update < most
    budgets = (update - 1, update, most - 1, most)
    found = [Candidates(replace(asked, budget=budget)).updates(2) for budget in budgets]
    assert found == [(None, False), (None,), (None,), (None,)]
    assert Candidates(asked).updates(2) == (None,)


def test_an_update_one_by_one_takes_less_where_it_decides() -> None:
    candidates = Candidates(request(make(optimizer=foreach), rows_of(24)))
    assert candidates.mixture(1, False).peak({}) < candidates.mixture(1, None).peak({})


def test_each_plan_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    candidates = Candidates(asked := request(make(), rows_of()))
    own: Callable[..., Any] = candidates._traced
    monkeypatch.setattr(Candidates, "_traced", lambda self, plan: calls.append(plan) or own(plan))
    assert candidates.trace(asked.like) is candidates.trace(asked.uniform(24, KEEP))
    assert len(calls) == 1


@pytest.mark.parametrize("why", ["few rows", "all settled", "rows meet in the loss"])
def test_nothing_is_composed_where_it_would_be_wrong_or_idle(why: str) -> None:
    if why == "few rows":
        asked = request(make(), rows_of(3))
    elif why == "all settled":
        asked = request(make(), rows_of(), sizes=(4,), blocks=())
    else:
        step = make()
        loss = WholeBatch(lambda outputs, target: nn.functional.cross_entropy(outputs @ outputs.T, target))
        asked = request(type(step)(step.model, loss, step.optimizers), rows_of())
    candidates = Candidates(asked)
    assert not candidates.is_composed
    assert candidates.notes == []


def test_a_step_that_cannot_be_traced_is_measured_and_says_so() -> None:
    step, batch = make(Untraceable), rows_of(24)
    candidates = Candidates(asked := request(step, batch))
    assert candidates.is_measured
    assert candidates.is_composed
    assert [note for note in candidates.notes if "nonzero" in note] == candidates.notes != []
    for size in (24, 12):  # of smaller ones only two are run, and what a step keeps of each is not seen
        found = candidates.trace(plan := asked.uniform(size, KEEP))
        assert found.source == "measured"
        assert abs(candidates.mixture(size, None).peak({}) - found.peak) <= LIMIT * found.peak
        carried_out(step, plan, batch)
        assert found.peak == metered(step, lambda plan=plan: carried_out(step, plan, batch), batch)


def test_what_cannot_be_traced_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = tracing.run_on_fakes
    monkeypatch.setattr(
        tracing, "run_on_fakes", lambda *given, **more: (runs.append(len(given)), run(*given, **more))[1]
    )
    candidates = Candidates(asked := request(make(Untraceable), rows_of(24)))
    candidates.add_policies(candidates.unrecorded)
    assert {candidates.trace(asked.uniform(size, KEEP)).source for size in (24, 12, 5)} == {"measured"}
    assert len(runs) == 1


def test_no_more_rows_are_run_than_are_known_to_be_too_many() -> None:
    asked = request(make(Untraceable), rows_of(24))
    low = Candidates(asked).trace(replace(asked.uniform(2, KEEP), rows=4)).peak
    short, enough = (Candidates(replace(asked, budget=budget)) for budget in (low - 1, low))
    assert not short.is_composed
    assert any("2 rows at a time within the budget" in note for note in short.notes)
    assert any("no bound where bytes depend on the data" in note for note in short.notes)
    assert enough.is_composed
    plans = [asked.uniform(size, KEEP) for size in (2, 24)]
    assert [short.may_run(plan, low) for plan in plans] == [True, False]
    assert [enough.may_run(plan, low) for plan in plans] == [True, True]
    assert Candidates(request(make(), rows_of(24), budget=1)).may_run(plans[1], low)  # nothing is run


def test_real_rows_are_counted_as_all_of_the_batch() -> None:
    """What is measured holds views of the whole batch, whatever the size of its micro-batches."""
    candidates = Candidates(asked := request(make(Untraceable), rows_of(400)))
    for size in (100, 10):
        assert (
            abs(candidates.mixture(size, None).peak({}) - candidates.trace(asked.uniform(size, KEEP)).peak)
            <= 400
        )


def test_what_cannot_be_traced_for_a_device_that_is_not_here_is_refused() -> None:
    candidates = Candidates(asked := request(make(Untraceable), rows_of(), device=find_device("cuda:a100")))
    assert not candidates.is_composed
    with pytest.raises(TraceError, match="nonzero"):
        candidates.trace(asked.like)


def test_seconds_follow_the_work() -> None:
    candidates = Candidates(asked := request(make(ConvNet), images()))
    kept, rebuilt = [
        candidates.seconds(candidates.trace(asked.uniform(24, one))) for one in (KEEP, "recompute")
    ]
    assert 0 < kept < rebuilt < 2 * kept


def test_half_precision_is_seen() -> None:
    class Slow(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    card = replace(find_device("cpu"), flops=1.0, half_flops=2.0)
    seconds = [
        (
            candidates := Candidates(
                asked := request(make(Slow, dtype=dtype), rows_of(4, dtype=dtype), device=card)
            )
        ).seconds(candidates.trace(asked.like))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert seconds[0] > 1.9 * seconds[1]


def test_measured_is_the_second_step() -> None:
    step, batch = make(), rows_of()
    assert Candidates(asked := request(step, batch)).trace(asked.like).peak == measured(step, batch)


def test_parameters_without_gradient_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = tracing.run_on_fakes
    monkeypatch.setattr(
        tracing, "run_on_fakes", lambda *given, **more: (runs.append(len(given)), run(*given, **more))[1]
    )
    step = make()
    step.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(100))]})
    step.model.register_parameter("unused", step.optimizers[0].param_groups[-1]["params"][0])
    candidates = Candidates(asked := request(step, rows_of(24), sizes=(24,), blocks=()))
    counts = []
    for size in (24, 12, 5):
        candidates.trace(replace(asked.like, micro_batch=size))
        counts.append(len(runs))
    assert counts == [2, 3, 4]


# ---- request


@pytest.mark.parametrize("rows", [1, 2, 7, 24, 1000, 10**6])
def test_sizes_fall_from_all_rows_to_one_and_each_makes_another_number(rows: int) -> None:
    sizes = request(make(), rows_of(2), rows).all_sizes
    counts = [-(-rows // size) for size in sizes]
    assert (sizes[0], sizes[-1]) == (rows, 1)
    assert sizes == sorted(set(sizes), reverse=True)
    assert counts == sorted(set(counts))
    assert len(sizes) < 80
    # The fewest rows that make so many micro-batches: with one row less there would be one more.
    assert all(
        len(cut_sizes(rows, size - 1)) > count for size, count in zip(sizes, counts, strict=True) if size > 1
    )


def test_sizes_that_are_settled_or_refused() -> None:
    step, batch = make(), rows_of(24)
    assert request(step, batch, sizes=(5,)).all_sizes == [5]
    assert request(step, batch, cut_refused="rows meet").all_sizes == [24]


def test_offload_is_no_choice_where_the_device_is_the_host() -> None:
    step, batch = make(), rows_of()
    assert request(step, batch).policies == ("recompute", "selective")
    assert request(step, batch, device=find_device("cuda:a100")).policies == (
        "recompute",
        "selective",
        "offload",
    )
    assert request(step, batch, blocks=()).policies == ()


def test_uniform_plans_keep_what_is_settled() -> None:
    step, batch = make(), rows_of(24)
    found = request(step, batch).uniform(6, "selective")
    assert (found.rows, found.micro_batch) == (24, 6)
    assert found.blocks == tuple((f"blocks.{index}", "selective") for index in range(3))
    assert request(step, batch).uniform(6, "keep").blocks == ()
    settled = Plan(rows=24, micro_batch=24, blocks=(("blocks.1", "recompute"),))
    assert request(step, batch, like=settled, blocks=()).uniform(6, "keep").blocks == settled.blocks


def fused(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)  # type: ignore[arg-type]


def scarcely(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "device", "expected"),
    [
        (adamw, "cpu", False),
        (adamw, "cuda:t4", True),
        (foreach, "cpu", True),
        (scarcely, "cuda:t4", False),
        (fused, "cpu", False),
        (fused, "cuda:t4", False),
        (sgd, "cuda:t4", True),
    ],
)
def test_optimizers_that_could_go_one_by_one(optimizer: Build, device: str, expected: bool) -> None:
    assert (
        request(make(optimizer=optimizer), rows_of(), device=find_device(device)).may_disable_foreach
        is expected
    )
