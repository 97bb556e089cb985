"""A compiled model: compiled once, whatever rows are left over, and the same update as without a compiler."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import torch_private as private
from anybatch.core.errors import LossError
from anybatch.engine import Plan
from anybatch.losses import PaddedModel
from anybatch.testing import Perceptron, relative_error, tolerance
from tests.compiled import Counting
from tests.snapshots import same_as_before

RAGGED = (40, 40, 7, 40, 1, 40)  # by 16 rows: two and a half micro-batches, and less than one


class Towers(nn.Module):
    """Two outputs of rows, and a number that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.scale = Perceptron(4, 3), nn.Parameter(torch.zeros(()))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.tower(left), self.tower(right), self.scale.exp()


class Meeting(nn.Module):
    """Rows that affect each other, or outputs that do not have them in front."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 3), how

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.layer(x)
        if self.how == "mean":
            return out - out.mean(0)
        if self.how == "turned":
            return out.T
        return F.cross_entropy(out, y) if y is not None else {"out": out, "flag": 1}


def by_rows(model: Any, micro: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(x=micro[0]), micro[1], reduction="sum"), len(micro[0]))


def contrast(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(scale * left @ right.T, torch.arange(len(left)))


LOSSES = {
    "torch's": (Perceptron(4, 3), nn.CrossEntropyLoss()),
    "own": (Perceptron(4, 3), by_rows),
    "whole batch": (Towers(), ab.WholeBatch(contrast)),
}


def make(model: Any, loss: Any, micro_batch: int | None = 16, **options: Any) -> ab.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return ab.Step(model, loss, optimizer, micro_batch=micro_batch, **options)


def batches(sizes: Sequence[int] = RAGGED, *, is_pair: bool = False) -> list[Any]:
    made = [(torch.randn(rows, 4).double(), torch.randint(3, (rows,))) for rows in sizes]
    return [(x, torch.randn_like(x)) for x, _ in made] if is_pair else made


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    ours, theirs = (dict(enumerate(values)) for values in zip(*pairs, strict=True))
    assert relative_error(ours, theirs) <= tolerance(torch.float64, sum(RAGGED))


@pytest.mark.parametrize("micro_batch", [16, None])
@pytest.mark.parametrize("name", LOSSES)
def test_a_run_compiles_once_and_makes_the_same_updates(name: str, micro_batch: int | None) -> None:
    model, loss = copy.deepcopy(LOSSES[name])
    model, counting = model.double(), Counting()
    twin = copy.deepcopy(model)
    steps = [make(counting.compile(twin), loss, micro_batch), make(model, loss, micro_batch)]
    for batch in batches(is_pair=name == "whole batch"):
        ours, plain = [step(batch) for step in steps]
        assert (ours.rows, ours.cut, ours.weights) == (plain.rows, plain.cut, plain.weights)
        assert ours.loss == pytest.approx(plain.loss, rel=tolerance(torch.float64, sum(RAGGED)))
    assert_alike(twin, model)
    assert counting.graphs == 1
    assert set(counting.rows) == {micro_batch or 40}


def test_windows_of_a_model_compiled_in_place() -> None:
    model, counting = Perceptron(4, 3).double(), Counting()
    twin = copy.deepcopy(model)
    twin.compile(backend=counting)
    steps = [make(one, nn.CrossEntropyLoss()) for one in (twin, model)]
    for x, y in batches():
        for step in steps:
            with step.window() as window:
                for rows, labels in zip(x.split(16), y.split(16), strict=True):
                    window.add((rows, labels))
    assert_alike(twin, model)
    assert (counting.graphs, set(counting.rows)) == (1, {16})


REFUSED = {
    "BatchNorm": (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.CrossEntropyLoss(), r"meet \(1\)"),
    "mean": (Meeting("mean"), nn.CrossEntropyLoss(), "7 rows alone and filled up"),
    "turned": (Meeting("turned"), lambda m, b: ab.Total(m(b[0]).square().sum(), 1), r"output .* \(3, 14\)"),
    "number": (
        Meeting("loss"),
        lambda m, b: ab.Total(m(b[0], b[1]) * len(b[1]), len(b[1])),
        r"got shape \(\)",
    ),
    "flag": (Meeting("loss"), lambda m, b: ab.Total(m(b[0])["out"].sum(), 1), "others in its dict"),
    "table": (
        Towers(),
        lambda m, b: ab.Total(m(b[0], torch.ones(5, 4))[0].square().sum(), 1),
        r"input .* \(5, 4\)",
    ),
    "own loss": (Meeting("loss"), ab.ModelLoss(), "computes its own loss"),
}


@pytest.mark.filterwarnings("ignore")  # of what a model's own loss is watched by
@pytest.mark.parametrize("name", REFUSED)
def test_where_rows_meet_they_are_not_filled_up(name: str) -> None:
    model, loss, said = REFUSED[name]
    step = make(Counting().compile(copy.deepcopy(model)), loss, None)
    first, last = [(x.float(), y) for x, y in batches((40, 7))]
    assert step(first).updated
    with same_as_before(step), pytest.raises(LossError, match=f"(?s){said}.*dynamic=True"):
        step(last)


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_model_compiled_for_any_rows_gets_the_rows_there_are(is_in_place: bool) -> None:
    counting, model = Counting(), Meeting("mean")
    made = counting.compile(model, dynamic=True)
    if is_in_place:
        model.compile(backend=counting, dynamic=True)
        made = model
    assert not private.is_static(made)
    step = make(made, nn.CrossEntropyLoss(), None)
    for x, y in batches((40, 7, 40)):
        step((x.float(), y))
    assert (counting.graphs, counting.rows) == (1, [40, 7, 40])


def test_one_row_cannot_tell_whether_rows_meet() -> None:
    step = make(Counting().compile(Meeting("mean").double()), nn.CrossEntropyLoss(), None)
    first, single, full, last = batches((40, 1, 40, 7))
    for batch in (first, single, full):
        step(batch)
    with pytest.raises(LossError, match="alone and filled up"):
        step(last)


def test_batches_that_stay_smaller_are_the_new_size() -> None:
    counting = Counting()
    step = make(counting.compile(Perceptron(4, 3).double()), nn.CrossEntropyLoss(), None)
    for batch in batches((40, 7, 7, 5, 7, 5, 7)):
        step(batch)
    assert counting.rows == [40, 40, 40, 40, 7, 7, 7]


def test_where_memory_runs_out_nothing_is_filled_up_any_more() -> None:
    model, counting = Perceptron(4, 3).double(), Counting()
    twin = copy.deepcopy(model)
    step, plain = make(counting.compile(twin), nn.CrossEntropyLoss()), make(model, nn.CrossEntropyLoss())
    first, second, third = batches((32, 20, 32))
    step(first)
    counting.fails = lambda rows: rows == 16 and len(counting.rows) == 4  # the last four rows
    report = step(second)
    assert (counting.rows, report.cut, report.too_large) == ([16, 16, 16, 16, 4], (16, 4), 16)
    counting.fails = lambda rows: False
    assert step(third).cut == (8, 8, 8, 8)
    for batch in (first, second, third):
        plain(batch)
    assert_alike(twin, model)


def test_a_budget_with_a_micro_batch_compiles_once_and_reads_what_went_through() -> None:
    counting = Counting()
    step = make(counting.compile(Perceptron(4, 3).double()), nn.CrossEntropyLoss(), memory="1MB")
    for batch in batches((18,) * 6):  # the second micro-batch is read: two rows, and 16 that took memory
        step(batch)
    assert (counting.graphs, set(counting.rows)) == (1, {16})
    assert step.planning.budget is not None
    (law,) = step.planning.budget.state()
    assert 16 in [rows for rows, *_ in law["readings"]]
    assert 2 not in [rows for rows, *_, found in law["readings"] if len(found) > 2]


def test_a_plan_says_how_many_rows_go_through() -> None:
    plan = Plan(rows=10, micro_batch=4, pad_to=4)
    assert "pad_to       4 rows" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert "pad_to" not in str(Plan(rows=10, micro_batch=4))


def test_a_padded_model_takes_names_and_nests_and_is_the_model_otherwise() -> None:
    class Named(nn.Module):
        def forward(self, x: Any, *, is_doubled: bool) -> Any:
            return {"out": (x[0] * 2 if is_doubled else x[0]), "none": None}

    model = Named()
    told: list[Any] = []
    padded = PaddedModel(model, 4, tell=told.append)
    out = padded([torch.ones(3, 2), torch.zeros(())], is_doubled=True)
    assert out["none"] is None
    assert torch.equal(out["out"], 2 * torch.ones(3, 2))
    assert told == [out]
    assert padded.training
    assert len(padded([torch.ones(9)], is_doubled=False)["out"]) == 9
