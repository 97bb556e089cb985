"""Budgets hold: fewer rows, then blocks that run again, then refusal; the same result, told before a step."""

import copy
import random
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import BudgetError, PlanError
from anybatch.engine import Plan, admit, strategy, window
from anybatch.testing import relative_error, tolerance
from tests import budgets
from tests.budgets import adamw, foreach, metered, refused, rows_of, sgd
from tests.options import flat
from tests.snapshots import assert_same, same_as_before, snapshot
from tests.zoo import Limited, Made, Perceptron

ROWS, WIDTH = 24, 64


def wide(dropout: float = 0.0) -> nn.Module:
    """Return a model of a megabyte of activations per row, nearly; tensors are most of what it takes."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x).sin())
        return x.mean((1, 2))

    layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    return Made(forward, layers=layers, drop=nn.Dropout(dropout))


def batch_of(rows: int = ROWS, length: int = 100) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, length, WIDTH, generator=draw), torch.randn(rows, generator=draw)


def make(memory: str | int | None, *, dropout: float = 0.0, **options: Any) -> ab.Step:
    torch.manual_seed(0)
    model = options.pop("model", None) or wide(dropout)
    loss = options.pop("loss", nn.MSELoss())
    optimizer = options.pop("optimizer", torch.optim.AdamW)(model.parameters())
    return ab.Step(model, loss, optimizer, memory=memory, **flat(options))


def parameters(step: ab.Step) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in step.model.named_parameters()}


def run(seed: int) -> None:
    """Let memory run out in drawn steps of a drawn budget: all updates are made, as without it."""
    drawn = random.Random(seed)
    rows, memory = drawn.randint(5, 70), drawn.choice(["auto", 200_000, 400_000, 10_000_000])
    torch.manual_seed(seed)
    model, loss = Limited(body=Perceptron(6, 4, width=64)).double(), drawn.choice([F.cross_entropy, over_all])
    options = {
        "loss": ab.WholeBatch(loss) if loss is over_all else loss,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
    }
    step, plain = make(memory, model=model, **options), make(None, model=copy.deepcopy(model), **options)
    for index in range(12):
        batch = torch.randn(rows, 6).double(), torch.randint(4, (rows,))
        model.most = drawn.randint(1, rows) if index and drawn.random() < 0.4 else model.most
        assert step(batch).updated
        assert plain(batch).updated
    assert relative_error(parameters(step), parameters(plain)) <= tolerance(torch.float64, 12 * rows)


@pytest.mark.parametrize("seed", range(3))
def test_a_budget_survives_any_number_of_out_of_memory_errors(seed: int) -> None:
    run(seed)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("memory", [2_500_000, 4_000_000])
def test_steps_keep_to_a_budget_and_are_those_of_the_whole_batch(memory: int, check: bool, made: Any) -> None:
    step, whole, batch = make(memory, check=check), make(None), batch_of()
    cuts = [step(batch).cut for _ in range(4)]
    assert 0.6 * memory < metered(step, lambda: step(batch), batch) <= memory
    assert all(len(cut) > 1 for cut in cuts)
    assert not made
    for _ in range(5):
        whole(batch)
    assert relative_error(parameters(step), parameters(whole)) <= 1e-3


def test_rows_that_meet_are_not_cut_and_the_reason_is_told_where_they_do_not_fit() -> None:
    def loss(model: nn.Module, micro: Any) -> ab.Total:
        out = model(micro[0])
        return ab.Total(((out - 9 * out.mean()) ** 2).sum(), len(out))

    torch.manual_seed(0)
    batch = batch_of(8)
    assert make(10**8, loss=loss)(batch).cut == (8,)
    with pytest.raises(BudgetError, match="Rows affect each other"):
        make(1_000_000, loss=loss)(batch)


def over_all(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs @ outputs.T).logsumexp(1).mean() + F.mse_loss(outputs[:, 0], targets)


def test_a_loss_over_all_rows_is_read_and_counts(made: list[Any]) -> None:
    """The similarities of 256 rows take half a megabyte, three times for a moment."""

    def trained(memory: int | None) -> ab.Step:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Sigmoid(), nn.Linear(512, 16)).double()
        step = make(memory, model=model, loss=ab.WholeBatch(over_all))
        assert (memory is None) is (max(step(batch).micro_batches for _ in range(2)) == 1)
        return step

    x = torch.randn(256, 64).double()
    batch, least = (x, x[:, 0]), 2_000_000
    while True:
        try:
            trained(least)
            break
        except BudgetError as error:  # the loss over a few rows is read first, and may promise too much
            least = error.smallest
    whole = trained(None)
    whole(batch)
    for memory in (least, 3 * least // 2):
        step = trained(memory)
        assert 0.5 * memory < metered(step, lambda step=step: step(batch), batch) <= memory
        assert relative_error(parameters(step), parameters(whole)) <= 1e-9
    assert not made


def test_where_random_numbers_are_drawn_the_cut_stays() -> None:
    step = make("auto", dropout=0.5)
    cuts = [step(batch_of()).cut for _ in range(9)]
    assert len(set(cuts[3:])) == 1


def test_beside_a_profiler_of_the_callers_a_step_needs_readings_from_before(made: list[Any]) -> None:
    step = make(4_000_000)
    with torch.profiler.profile(), same_as_before(step), pytest.raises(PlanError, match="a profiler is open"):
        step(batch_of())
    cut = step(batch_of()).cut
    with torch.profiler.profile():
        assert sum(step(batch_of()).cut) == sum(cut)
    assert not made


def heavy() -> nn.Module:
    """Return a model of many parameters and few activations."""
    body = nn.Sequential(nn.Linear(WIDTH, 512), *[nn.Linear(512, 512) for _ in range(6)], nn.Linear(512, 1))
    return Made(lambda self, x: self.body(x.mean(1))[:, 0], body=body)


HEAVY = 4 * sum(parameter.numel() for parameter in heavy().parameters())  # bytes of its weights


def test_a_budget_below_what_is_always_held_is_refused_with_one_that_holds(made: list[Any]) -> None:
    """Also the state of the optimizer counts, which the first update is still to make."""
    batch, model = batch_of(96, 1), heavy()
    floor = 4 * HEAVY + sum(leaf.nbytes for leaf in batch)
    for memory in (1_000, floor - 10_000):
        told = "above parameters, gradients, optimizer state"
        least = refused(make(memory, model=model), batch, told)
        assert floor < least < 1.3 * floor
    step = make(least, model=copy.deepcopy(model))
    assert [step(batch).updated for _ in range(4)] == [True] * 4
    assert metered(step, lambda: step(batch), batch) <= least
    refused(make(int(0.9 * least), model=model), batch, "smallest")
    assert not made


def test_what_the_update_takes_for_a_moment_is_within_the_budget() -> None:
    batch, memory = batch_of(96, 1), 4 * HEAVY + 5_000_000
    tight = make(memory, model=heavy(), optimizer=foreach)
    for _ in range(3):  # the second update is read; all parameters at once do not fit
        tight(batch)
    task = tight.task()
    assert tight.planning.plan_for(task, admit(batch, task, None))[0].foreach is False
    assert metered(tight, lambda: tight(batch), batch) <= memory


def test_what_collate_makes_is_within_the_budget(made: list[Any]) -> None:
    batch, memory = batch_of(ROWS, 1000), 4_000_000
    samples = [*zip(*batch, strict=True)]
    model = Made(lambda self, x: self.layer(x.mean(1))[:, 0], layer=nn.Linear(WIDTH, 1))
    step = make(memory, model=model, collate=torch.utils.data.default_collate)
    for _ in range(3):
        step(samples)
    found = metered(step, lambda: step(samples), ()) - sum(leaf.nbytes for leaf in batch)
    assert 0.6 * memory < found <= memory
    assert not made


@pytest.mark.parametrize(("where", "place"), [(strategy, "norm_of"), (window, "clip")])
def test_memory_that_runs_out_after_the_last_micro_batch_is_tried_in_smaller_parts(
    where: ModuleType, place: str, monkeypatch: Any
) -> None:
    found, calls = getattr(where, place), list[int]()

    def fails_once(*values: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("planted")
        return found(*values)

    model, batch = Perceptron().double(), (torch.randn(9, 6).double(), torch.randint(4, (9,)))
    given: Any = {"loss": nn.CrossEntropyLoss(), "optimizer": sgd, "clip_norm": 0.1}
    twin = make(None, model=copy.deepcopy(model), **given)
    step = make(None, model=model, check=False, **given)
    monkeypatch.setattr(where, place, fails_once)
    report = step(batch)
    twin(batch)
    assert (report.updated, report.micro_batches, len(calls) > 1) == (True, 2, True)
    assert relative_error(parameters(step), parameters(twin)) <= tolerance(torch.float64, 9)


def test_auto_keeps_the_cut_by_length() -> None:
    tokens = (torch.arange(40) <= torch.arange(32)[:, None]).long()
    model = nn.Sequential(nn.Embedding(3, 4, padding_idx=0), nn.Linear(4, 3))

    def loss(model: nn.Module, micro: Any) -> ab.Total:
        scores = model(micro[0])
        lengths.append(scores.shape[:2])
        return ab.Total((scores.square().sum(-1) * (micro[0] != 0)).sum(), (micro[0] != 0).sum())

    lengths: list[Any] = []
    step = make("auto", model=model, loss=loss, order="length")
    step((tokens, torch.zeros(32)))
    lengths.clear()
    assert step((tokens, torch.zeros(32))).micro_batches > 1
    assert sum(rows * length for rows, length in lengths) < 0.75 * 32 * 32


# ---- cuts, and what is told before there is a step

LIMIT = 1e-12
TIGHT = [(sgd, 2_000_000, 0), (adamw, 875_000, 1), (foreach, 770_000, 2)]  # blocks that run again


def net() -> nn.Module:
    return budgets.net(blocks=2)


def long(dtype: torch.dtype = torch.float32) -> Any:
    """Rows of 300 KB in `net`, or 600 KB in float64: tensors are most of the memory that is read."""
    return rows_of(6, 400, 8, dtype=dtype)


@pytest.mark.parametrize(("optimizer", "memory", "again"), TIGHT)
def test_result_is_that_of_the_whole_batch_and_of_the_same_cut_to_the_bit(
    optimizer: Any, memory: int, again: int, made: list[Any]
) -> None:
    double = torch.float64
    batch = long(double)
    steps = [budgets.make(net, optimizer, dtype=double, memory=one) for one in (None, memory, None)]
    whole, planned, obeyed = steps
    for _ in range(3):
        expected, report = whole(batch), planned(batch)
        assert len(report.cut) > 1
        assert (f"{again} block" in planned.planning.explain()) is (again > 0)
        blocks = tuple((f"body.blocks.{number}", "recompute") for number in range(again))
        plan = Plan(rows=6, micro_batch=max(report.cut), cut=report.cut, blocks=blocks)
        budgets.carried_out(obeyed, plan, batch)
        assert relative_error(report.loss, expected.loss) <= LIMIT
    assert not made
    assert relative_error(parameters(planned), parameters(whole)) <= LIMIT
    assert_same(snapshot(obeyed), snapshot(planned))


@pytest.mark.parametrize("options", [{}, {"recompute": "all"}, {"micro_batch": 2}, {"clip_norm": 0.1}])
def test_the_real_step_takes_what_was_foreseen(options: dict[str, Any]) -> None:
    step, batch, memory = budgets.make(net, memory=1_500_000, **options), long(), 1_500_000
    for _ in range(10):
        step(batch)
    report = step.foresee(batch)
    found = metered(step, lambda: step(batch), batch)
    assert abs(report.peak - found) <= 0.01 * memory
    assert 0.5 * memory < found <= memory
    assert report.plan.micro_batch == options.get("micro_batch", report.plan.micro_batch)
    assert "recompute" not in options or report.plan.blocks == step.planning.settings.blocks


def test_a_size_that_was_asked_for_is_kept_or_refused_and_few_rows_foresee_many() -> None:
    asked = lambda memory: budgets.make(net, memory=memory, micro_batch=5)  # noqa: E731
    batch = rows_of(12, 400, 8)
    for memory in (3_000_000, refused(asked(1_000_000), batch, "room for 5 rows at a time")):
        step = asked(memory)
        assert {step(batch).cut for _ in range(3)} == {(5, 5, 2)}
    for few in (1, 4):
        assert step.foresee(rows_of(few, 400, 8), rows=12).plan.sizes == (5, 5, 2)


def test_batch_norm_is_never_cut(made: list[Any]) -> None:
    batch = rows_of(8, 8, 64, 16)  # half a megabyte each
    meeting = lambda memory=None, **more: budgets.make(budgets.meeting, memory=memory, **more)  # noqa: E731
    most = budgets.measured(meeting(), batch)
    assert meeting(int(1.3 * most))(batch).cut == (8,)
    for memory in (int(0.8 * most), refused(meeting(most // 3), batch, "4 BatchNorm layers")):
        step = meeting(memory)
        assert {step(batch).cut for _ in range(2)} == {(8,)}
        assert metered(step, lambda step=step: step(batch), batch) <= memory
        assert "recomputed, as no row fits without" in step.planning.explain()
    with pytest.raises(PlanError, match=r"frozen.*batch_norm_to_group_norm"):
        meeting(2 * most, micro_batch=2)(batch)
    assert not made


def test_single_rows_that_batch_norm_refuses_are_nobodys_plan() -> None:
    def step(memory: int) -> ab.Step:
        layers = nn.Linear(8, 8192), nn.BatchNorm1d(8192), nn.Sigmoid(), nn.Tanh(), nn.Linear(8192, 4)
        return budgets.make(lambda: nn.Sequential(*layers), sgd, memory=memory, batch_norm="micro")

    assert step(1_600_000)(rows_of(3)).cut == (3,)
    for rows in (4, 31):
        least = refused(step(1_600_000), rows_of(rows))
        assert min(step(least)(rows_of(rows)).cut) > 1
