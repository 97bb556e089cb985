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
from anybatch.planner.candidates import Survey
from anybatch.planner.mixture import KEEP
from anybatch.planner.solve import fastest, smallest
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
    question,
    rows_of,
    sgd,
)

LIMIT = 0.005  # of the bytes, where they are composed


@pytest.mark.parametrize(("policy", "size"), [(KEEP, 24), (KEEP, 10), ("recompute", 24), ("selective", 5)])
def test_a_trace_is_a_real_second_step_to_the_byte(policy: str, size: int) -> None:
    step, batch = make(optimizer=foreach), rows_of(24, 5, 8)
    asked = question(step, batch)
    for chosen in (None, False):
        plan = replace(asked.uniform(size, policy), foreach=chosen)
        predicted = Survey(asked).trace(plan)
        carried_out(step, plan, batch)
        assert predicted.peak == metered(step, lambda plan=plan: carried_out(step, plan, batch), batch)


@pytest.mark.parametrize("size", [24, 5])
def test_mixtures_are_traces_to_a_few_scalars(size: int) -> None:
    survey = Survey(asked := question(make(optimizer=foreach), rows_of(24, 5, 8)))
    assert survey.is_composed
    assert survey.mix(size, None).policies == (KEEP,)  # the others cost, and are often not needed
    survey.add_policies(survey.unrecorded)
    for chosen in (None, False):
        mix = survey.mix(size, chosen)
        for choice in ({}, {"blocks.0": "recompute"}, {"blocks.2": "selective", "blocks.1": "recompute"}):
            blocks = tuple((name, choice[name]) for name in asked.blocks if name in choice)
            plan = replace(asked.like, micro_batch=size, blocks=blocks, foreach=chosen)
            exact = survey.trace(plan).peak
            assert abs(mix.peak(choice) - exact) <= LIMIT * exact


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
    survey = Survey(question(make(model), batch))
    survey.add_policies(survey.unrecorded)
    for size in sizes:
        mix = survey.mix(size, None)
        least, most = mix.peak(smallest(mix)), mix.peak({})
        for part in range(9):
            choice = fastest(mix, budget := least + part * (most - least) // 8)
            assert choice is not None
            assert mix.seconds(choice) >= mix.least_seconds(budget)
        assert mix.least_seconds(most) == mix.seconds({}) < mix.least_seconds(least)


def test_where_blocks_may_be_moved_only_the_kept_step_bounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is recorded what moving takes."""
    monkeypatch.setattr(offload, "SMALLEST", 0)
    asked = replace(question(make(Towers), rows_of(512, 512)), budget=50_000_000)
    here = Survey(asked)
    there = Survey(replace(asked, device=find_device("cuda:a100")))
    still = Survey(replace(asked, device=find_device("cuda:a100"), without=("offload",)))
    kept = [one.mix(512, None).seconds({}) for one in (here, there, still)]
    assert here.least_seconds(512) > kept[0]
    assert there.least_seconds(512) == kept[1]
    assert still.least_seconds(512) > kept[2]
    assert there.unrecorded == ("recompute", "selective", "offload")
    there.add_policies(["offload"])
    assert there.unrecorded == ("recompute", "selective")
    assert kept[1] < there.least_seconds(512) <= still.least_seconds(512)


def test_nothing_bounds_what_cannot_fit() -> None:
    """To free all that blocks leave is not enough."""
    asked = question(make(), rows_of(24, 40, 8))
    mix = Survey(asked).mix(24, None)
    left = sum(one.net for one in mix.segments[KEEP] if one.block and one.place == ("forward", 0))
    assert mix.least_seconds(mix.peak({}) - left) < inf
    assert mix.least_seconds(mix.peak({}) - left - 1) == inf


def test_the_sparing_update_is_recorded_only_where_the_update_takes_too_much() -> None:
    asked = question(make(optimizer=foreach), rows_of(24, 40, 8))
    mix = Survey(asked).mix(2, None)
    update, most = mix.peak({}, phase="update"), mix.peak({})
    assert update < most
    budgets = (update - 1, update, most - 1, most)
    found = [Survey(replace(asked, budget=budget)).updates(2) for budget in budgets]
    assert found == [(None, False), (None,), (None,), (None,)]
    assert Survey(asked).updates(2) == (None,)


def test_an_update_one_by_one_takes_less_where_it_decides() -> None:
    survey = Survey(question(make(optimizer=foreach), rows_of(24)))
    assert survey.mix(1, False).peak({}) < survey.mix(1, None).peak({})


def test_each_plan_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    survey = Survey(asked := question(make(), rows_of()))
    own: Callable[..., Any] = survey._traced
    monkeypatch.setattr(Survey, "_traced", lambda self, plan: calls.append(plan) or own(plan))
    assert survey.trace(asked.like) is survey.trace(asked.uniform(24, KEEP))
    assert len(calls) == 1


@pytest.mark.parametrize("why", ["few rows", "all settled", "rows meet in the loss"])
def test_nothing_is_composed_where_it_would_be_wrong_or_idle(why: str) -> None:
    if why == "few rows":
        asked = question(make(), rows_of(3))
    elif why == "all settled":
        asked = question(make(), rows_of(), sizes=(4,), blocks=())
    else:
        step = make()
        loss = WholeBatch(lambda outputs, target: nn.functional.cross_entropy(outputs @ outputs.T, target))
        asked = question(type(step)(step.model, loss, step.optimizers), rows_of())
    survey = Survey(asked)
    assert not survey.is_composed
    assert survey.notes == []


def test_a_step_that_cannot_be_traced_is_measured_and_says_so() -> None:
    step, batch = make(Untraceable), rows_of(24)
    survey = Survey(asked := question(step, batch))
    assert survey.is_measured
    assert survey.is_composed
    assert [note for note in survey.notes if "nonzero" in note] == survey.notes != []
    for size in (24, 12):  # of smaller ones only two are run, and what a step keeps of each is not seen
        found = survey.trace(plan := asked.uniform(size, KEEP))
        assert found.source == "measured"
        assert abs(survey.mix(size, None).peak({}) - found.peak) <= LIMIT * found.peak
        carried_out(step, plan, batch)
        assert found.peak == metered(step, lambda plan=plan: carried_out(step, plan, batch), batch)


def test_what_cannot_be_traced_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = tracing.run_on_fakes
    monkeypatch.setattr(
        tracing, "run_on_fakes", lambda *given, **more: (runs.append(len(given)), run(*given, **more))[1]
    )
    survey = Survey(asked := question(make(Untraceable), rows_of(24)))
    survey.add_policies(survey.unrecorded)
    assert {survey.trace(asked.uniform(size, KEEP)).source for size in (24, 12, 5)} == {"measured"}
    assert len(runs) == 1


def test_no_more_rows_are_run_than_are_known_to_be_too_many() -> None:
    asked = question(make(Untraceable), rows_of(24))
    low = Survey(asked).trace(replace(asked.uniform(2, KEEP), rows=4)).peak
    short, enough = (Survey(replace(asked, budget=budget)) for budget in (low - 1, low))
    assert not short.is_composed
    assert any("2 rows at a time within the budget" in note for note in short.notes)
    assert any("no bound where bytes depend on the data" in note for note in short.notes)
    assert short.is_over(short.trace(asked.uniform(2, KEEP)))
    assert enough.is_composed
    plans = [asked.uniform(size, KEEP) for size in (2, 24)]
    assert [short.may_run(plan, low) for plan in plans] == [True, False]
    assert [enough.may_run(plan, low) for plan in plans] == [True, True]
    assert Survey(question(make(), rows_of(24), budget=1)).may_run(plans[1], low)  # nothing is run


def test_real_rows_are_counted_as_all_of_the_batch() -> None:
    """What is measured holds views of the whole batch, whatever the size of its micro-batches."""
    survey = Survey(asked := question(make(Untraceable), rows_of(400)))
    for size in (100, 10):
        assert abs(survey.mix(size, None).peak({}) - survey.trace(asked.uniform(size, KEEP)).peak) <= 400


def test_what_cannot_be_traced_for_a_device_that_is_not_here_is_refused() -> None:
    survey = Survey(asked := question(make(Untraceable), rows_of(), device=find_device("cuda:a100")))
    assert not survey.is_composed
    with pytest.raises(TraceError, match="nonzero"):
        survey.trace(asked.like)


def test_seconds_follow_the_work() -> None:
    survey = Survey(asked := question(make(ConvNet), images()))
    kept, rebuilt = [survey.seconds(survey.trace(asked.uniform(24, one))) for one in (KEEP, "recompute")]
    assert 0 < kept < rebuilt < 2 * kept


def test_half_precision_is_seen() -> None:
    class Slow(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    card = replace(find_device("cpu"), flops=1.0, half_flops=2.0)
    seconds = [
        (
            survey := Survey(asked := question(make(Slow, dtype=dtype), rows_of(4, dtype=dtype), device=card))
        ).seconds(survey.trace(asked.like))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert seconds[0] > 1.9 * seconds[1]


def test_measured_is_the_second_step() -> None:
    step, batch = make(), rows_of()
    assert Survey(asked := question(step, batch)).trace(asked.like).peak == measured(step, batch)


def test_parameters_without_gradient_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = tracing.run_on_fakes
    monkeypatch.setattr(
        tracing, "run_on_fakes", lambda *given, **more: (runs.append(len(given)), run(*given, **more))[1]
    )
    step = make()
    step.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(100))]})
    step.model.register_parameter("unused", step.optimizers[0].param_groups[-1]["params"][0])
    survey = Survey(asked := question(step, rows_of(24), sizes=(24,), blocks=()))
    counts = []
    for size in (24, 12, 5):
        survey.trace(replace(asked.like, micro_batch=size))
        counts.append(len(runs))
    assert counts == [2, 3, 4]


# ---- request


@pytest.mark.parametrize("rows", [1, 2, 7, 24, 1000, 10**6])
def test_sizes_fall_from_all_rows_to_one_and_each_makes_another_number(rows: int) -> None:
    sizes = question(make(), rows_of(2), rows).all_sizes
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
    assert question(step, batch, sizes=(5,)).all_sizes == [5]
    assert question(step, batch, cut_refused="rows meet").all_sizes == [24]


def test_offload_is_no_choice_where_the_device_is_the_host() -> None:
    step, batch = make(), rows_of()
    assert question(step, batch).policies == ("recompute", "selective")
    assert question(step, batch, device=find_device("cuda:a100")).policies == (
        "recompute",
        "selective",
        "offload",
    )
    assert question(step, batch, blocks=()).policies == ()


def test_uniform_plans_keep_what_is_settled() -> None:
    step, batch = make(), rows_of(24)
    found = question(step, batch).uniform(6, "selective")
    assert (found.rows, found.micro_batch) == (24, 6)
    assert found.blocks == tuple((f"blocks.{index}", "selective") for index in range(3))
    assert question(step, batch).uniform(6, "keep").blocks == ()
    settled = Plan(rows=24, micro_batch=24, blocks=(("blocks.1", "recompute"),))
    assert question(step, batch, like=settled, blocks=()).uniform(6, "keep").blocks == settled.blocks


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
    assert question(make(optimizer=optimizer), rows_of(), device=find_device(device)).may_spare is expected
