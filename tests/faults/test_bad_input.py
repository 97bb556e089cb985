"""Bad input: expected, got, what to do; everything stays as it was, and the step works afterwards."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Step, Terms, Total
from anybatch.core.errors import (
    AnybatchError,
    BatchError,
    LossError,
    NonFiniteLossError,
    OptimizerError,
    PlanError,
)
from tests.snapshots import CLASSES, ROWS, changes, make_batch, make_model, make_step, snapshot

SGD, CE = torch.optim.SGD, nn.CrossEntropyLoss
lr_scheduler = torch.optim.lr_scheduler


def refused(step: Step, call: Callable[[], object], error: type[AnybatchError], *said: str) -> None:
    """The call raises exactly this, says what was expected, what came, what to do, and changes nothing."""
    before = snapshot(step)
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    message = str(caught.value)
    expected, _, rest = message.partition(", got ")
    assert expected.startswith("Expected ")
    for words in said:
        assert words in message
    assert len(rest.split(". ")) > 1 or "\n" in rest, f"what to do? {message}"
    assert changes(before, snapshot(step)) == []


def works_afterwards(step: Step, twin: Step) -> None:
    """The next good batch gives, bit for bit, what it gives a step that never saw bad input."""
    torch.manual_seed(5)
    report = step(make_batch(seed=3))
    torch.manual_seed(5)
    assert report == twin(make_batch(seed=3))
    assert changes(snapshot(twin), snapshot(step)) == []


# ---- a step that cannot be


def ps(step: Step) -> list[nn.Parameter]:
    return list(step.model.parameters())


FOREIGN = nn.Linear(2, 2)
MAKE: dict[str, tuple[Callable[[Step], object], type[AnybatchError], str]] = {
    "micro-batch 0": (lambda s: make(s, micro_batch=0), PlanError, "got 0"),
    "micro-batch not whole": (lambda s: make(s, micro_batch=2.5), PlanError, "got 2.5"),
    "clip 0": (lambda s: make(s, clip_norm=0), PlanError, "got 0"),
    "clip NaN": (lambda s: make(s, clip_norm=math.nan), PlanError, "got nan"),
    "accumulate in integers": (lambda s: make(s, accumulate=torch.int32), PlanError, "'int32'"),
    "no module": (lambda s: Step(torch.sin, nn.MSELoss(), s.optimizers[0]), PlanError, "builtin"),
    "unreduced loss": (lambda s: make(s, nn.MSELoss(reduction="none")), LossError, "got 'none'"),
    "own module": (lambda s: make(s, nn.Identity()), LossError, "got Identity"),
    "own subclass": (lambda s: make(s, Focal()), LossError, "got Focal"),
    "no loss": (lambda s: make(s, "mse"), LossError, "got str"),
    "class weight with gradient": (
        lambda s: make(s, CE(weight=torch.ones(CLASSES, requires_grad=True))),
        LossError,
        "requires grad",
    ),
    "negative class weight": (
        lambda s: make(s, CE(weight=torch.tensor([1.0, -2.0, 1.0, 1.0]))),
        LossError,
        "-2.0",
    ),
    "no function": (lambda s: Terms(3), LossError, "got int"),
    "shared parameters": (
        lambda s: make(s, optimizer=[SGD(ps(s), lr=1), SGD(s.model[4].parameters(), lr=1)]),
        OptimizerError,
        "got 2 in optimizers 0 and 1",
    ),
    "foreign optimizer": (
        lambda s: make(s, optimizer=SGD(FOREIGN.parameters(), lr=1)),
        OptimizerError,
        "got 2 that are none of its",
    ),
    "no optimizer": (lambda s: make(s, optimizer=[]), OptimizerError, "got []"),
    "LBFGS": (
        lambda s: make(s, optimizer=torch.optim.LBFGS(ps(s))),
        OptimizerError,
        "got LBFGS",
    ),
    "ReduceLROnPlateau": (
        lambda s: make(s, scheduler=lr_scheduler.ReduceLROnPlateau(s.optimizers[0])),
        OptimizerError,
        "got ReduceLROnPlateau",
    ),
    "foreign scheduler": (
        lambda s: make(s, scheduler=lr_scheduler.StepLR(SGD(ps(s), lr=1), 1)),
        OptimizerError,
        "got one for another",
    ),
}


class Focal(nn.CrossEntropyLoss):
    """A subclass that brings its own forward is another loss."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target).square()


def as_total(model: nn.Module, micro: Any) -> Total:
    losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")
    return Total(losses.sum(), losses.numel())


def make(like: Step, loss: object = None, **options: Any) -> Step:
    """A step for the same model and, unless told otherwise, the same optimizer."""
    options = {"optimizer": like.optimizers[0]} | options
    return Step(
        like.model,
        nn.CrossEntropyLoss() if loss is None else loss,
        **{"batch_norm": "micro", "check": False} | options,
    )


@pytest.mark.parametrize(("build", "error", "got"), MAKE.values(), ids=MAKE)
def test_step_that_cannot_be(build: Callable[[Step], object], error: type[AnybatchError], got: str) -> None:
    step = make_step()
    refused(step, lambda: build(step), error, got)
    works_afterwards(step, make_step())


# ---- a batch that cannot be cut

X, Y = make_batch()
NO_SAMPLES: list[Tensor] = []
BATCHES: dict[str, tuple[Any, type[AnybatchError], str]] = {
    "empty": ((X[:0], Y[:0]), BatchError, "got an empty batch: [0]: (0, 3), [1]: (0,)"),
    "other lengths": ((X, Y[:5]), BatchError, "got [0]: (8, 3), [1]: (5,)"),
    "a scalar beside": ((X, Y, torch.tensor(2.0)), BatchError, "[2]: ()"),
    "no tensor": ({"x": None}, BatchError, "got 0"),
    "of NumPy": ((X.numpy(), Y), BatchError, "got a ndarray (torch.from_numpy"),
    "a list of samples": (list(zip(X.tolist(), Y.tolist(), strict=True)), BatchError, "a float"),
    "a loader": (iter([(X, Y)]), BatchError, "got a list_iterator"),
    "inputs elsewhere": ((X.to("meta"), Y), BatchError, "got meta"),
    "targets elsewhere": ((X, Y.to("meta")), BatchError, "device cpu, got meta"),
    "no target": ({"x": X}, LossError, "got ['x']"),
    "two targets": ({"x": X, "y": Y, "labels": Y}, LossError, "got ['x', 'y', 'labels']"),
    "a single tensor": (X, LossError, "got Tensor"),
}


@pytest.mark.parametrize(("batch", "error", "got"), BATCHES.values(), ids=BATCHES)
def test_batch_that_cannot_be_cut(batch: Any, error: type[AnybatchError], got: str) -> None:
    step = make_step(micro_batch=3)
    refused(step, lambda: step(batch), error, got)
    works_afterwards(step, make_step(micro_batch=3))


@pytest.mark.parametrize(
    ("samples", "got"),
    [(NO_SAMPLES, "got []"), ((X), "got Tensor"), ({"x": X}, "got dict"), (iter([X]), "got list_iterator")],
)
def test_samples_that_cannot_be_cut(samples: Any, got: str) -> None:
    def collate(rows: list[Any]) -> Any:
        return tuple(torch.stack([row[place] for row in rows]) for place in (0, 1))

    step = make_step(micro_batch=3, collate=collate)
    refused(step, lambda: step(samples), BatchError, got)
    good = make_step(micro_batch=3, collate=collate)
    for one in (step, good):
        torch.manual_seed(5)
        one(list(zip(X, Y, strict=True)))
    assert changes(snapshot(good), snapshot(step)) == []


# ---- a loss that cannot be summed, and data that gives none


class Switch:
    """A loss that is good, until `bad` says what becomes of the losses of the rows."""

    bad: Callable[[Tensor], Any] | None = None

    def __call__(self, model: nn.Module, micro: tuple[Tensor, Tensor]) -> Any:
        losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")
        return Total(losses.sum(), losses.numel()) if self.bad is None else self.bad(losses)


LOSSES: dict[str, tuple[Callable[[Tensor], Any], type[AnybatchError], str]] = {
    "a mean": (lambda x: x.mean(), LossError, "got a tensor of shape ()"),
    "one per row": (lambda x: x, LossError, "got a tensor of shape ("),
    "named means": (lambda x: {"a": x.mean()}, LossError, "got {'a': 'Tensor'}"),
    "no terms": (lambda x: {}, LossError, "got an empty one"),
    "total of no scalar": (lambda x: Total(x, 8), LossError, "got a tensor of shape ("),
    "NaN": (lambda x: Total(x.sum() * math.nan, 8), NonFiniteLossError, "got nan for 'loss'"),
    "infinite": (lambda x: Total(x.sum() / 0, 8), NonFiniteLossError, "got inf for 'loss'"),
    "weight with gradient": (lambda x: Total(x.sum(), x.sum()), LossError, "without gradient"),
    "negative weight": (lambda x: Total(x.sum(), -1), LossError, "got -1"),
    "no gradient": (lambda x: Total(x.sum().detach(), 8), LossError, "['loss'] without gradient"),
}


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize(("bad", "error", "got"), LOSSES.values(), ids=LOSSES)
def test_loss_that_cannot_be_summed(
    bad: Callable[[Tensor], Any], error: type[AnybatchError], got: str, micro_batch: int | None
) -> None:
    loss = Switch()
    step = make_step(loss, micro_batch=micro_batch)
    loss.bad = bad
    refused(step, lambda: step(make_batch()), error, got)
    loss.bad = None
    works_afterwards(step, make_step(Switch(), micro_batch=micro_batch))


def test_gradient_that_is_not_finite_and_is_to_be_clipped() -> None:
    loss = Switch()
    step = make_step(loss, clip_norm=1.0, micro_batch=3)
    loss.bad = lambda x: Total((x - x).abs().sqrt().sum(), 8)  # 0, with a gradient of inf * 0
    told = "Expected a finite gradient", "rows 0 to 2", "division by zero"
    refused(step, lambda: step(make_batch()), NonFiniteLossError, *told)
    loss.bad = None
    works_afterwards(step, make_step(Switch(), clip_norm=1.0, micro_batch=3))


def test_weights_that_do_not_add_up_to_what_was_promised() -> None:
    step = make_step(Terms(as_total, weight=lambda batch: len(batch[1]) - 1), micro_batch=3)
    said = ("batch's 7 for 'loss', got 8", "return ab.Total(sum, number of valid elements)")
    refused(step, lambda: step(make_batch()), LossError, *said)


@pytest.mark.parametrize("weight", [-8, math.nan, torch.ones((), requires_grad=True), torch.ones(2)])
def test_promised_weight_is_checked_before_any_backward(weight: Any) -> None:
    step = make_step(Terms(as_total, weight=lambda batch: weight), micro_batch=3)
    refused(step, lambda: step(make_batch()), LossError)


def test_coefficient_without_its_term() -> None:
    step = make_step(Terms(as_total, coefficients={"other": 1.0}), micro_batch=3)
    refused(
        step, lambda: step(make_batch()), LossError, "got ['loss'] without ['other']", "drop its coefficient"
    )


@pytest.mark.parametrize("late", [{"b": 1}, {"a": 1, "b": 1}])
def test_terms_that_change_from_one_micro_batch_to_the_next(late: dict[str, int]) -> None:
    def loss(model: nn.Module, micro: Any) -> dict[str, Total]:
        total = as_total(model, micro)
        return {"a": total} if len(micro[1]) == 3 else dict.fromkeys(late, total)

    step = make_step(loss, micro_batch=3)
    refused(step, lambda: step(make_batch()), LossError, f"got {sorted(late)} after ['a']", "ab.Total.zero()")
    step((X[:6], Y[:6]))  # both micro-batches of the same terms


# ---- parameters


def test_all_parameters_frozen() -> None:
    step = make_step()
    step.model.requires_grad_(False)
    refused(
        step, lambda: step(make_batch()), OptimizerError, "got 6 that are all frozen", "requires_grad=True"
    )
    refused(step, step.window, OptimizerError, "got 6 that are all frozen", "requires_grad=True")
    step.model.requires_grad_(True)
    works_afterwards(step, make_step())


def test_loss_that_reaches_no_parameter_of_the_optimizer() -> None:
    model = make_model()
    step = Step(
        model, nn.CrossEntropyLoss(), SGD(model.parameters(), lr=0.1), micro_batch=3, batch_norm="micro"
    )
    with torch.no_grad():
        refused(step, lambda: step(make_batch()), LossError, "['loss'] without gradient", "torch.no_grad()")
    assert step(make_batch()).rows == ROWS
