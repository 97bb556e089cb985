"""Bad input: expected, got, what to do; everything stays as it was, and the step works afterwards."""

import math
from collections.abc import Callable
from functools import partial
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

SGD = torch.optim.SGD


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

FOREIGN = nn.Linear(2, 2)
MAKE: dict[str, tuple[Callable[[Step], object], type[AnybatchError], str, str]] = {
    "micro-batch 0": (lambda s: make(s, micro_batch=0), PlanError, "got 0", "Leave it out for the uncut"),
    "micro-batch negative": (lambda s: make(s, micro_batch=-2), PlanError, "got -2", "Leave it out"),
    "micro-batch not whole": (lambda s: make(s, micro_batch=2.5), PlanError, "got 2.5", "Pass an int"),
    "micro-batch a text": (lambda s: make(s, micro_batch="4"), PlanError, "got '4'", "Pass an int"),
    "micro-batch a bool": (lambda s: make(s, micro_batch=True), PlanError, "got True", "Pass an int"),
    "clip 0": (lambda s: make(s, clip_norm=0), PlanError, "got 0", "Leave it out"),
    "clip NaN": (lambda s: make(s, clip_norm=math.nan), PlanError, "got nan", "Leave it out"),
    "clip a tensor": (
        lambda s: make(s, clip_norm=torch.ones(())),
        PlanError,
        "got tensor(1.)",
        "Leave it out",
    ),
    "accumulate in integers": (lambda s: make(s, accumulate=torch.int32), PlanError, "'int32'", "Use torch."),
    "no module": (lambda s: Step(torch.sin, nn.MSELoss(), s.optimizers[0]), PlanError, "builtin", "Wrap it"),  # type: ignore[arg-type]
    "unreduced loss": (
        lambda s: make(s, nn.MSELoss(reduction="none")),
        LossError,
        "got 'none'",
        "Choose one",
    ),
    "deprecated reduction": (
        lambda s: make(s, partial(F.mse_loss, size_average=True)),
        LossError,
        "size_average",
        "reduction=",
    ),
    "own module": (lambda s: make(s, nn.Identity()), LossError, "got Identity", "return ab.Total("),
    "own subclass": (lambda s: make(s, Focal()), LossError, "got Focal", "return ab.Total("),
    "no loss": (lambda s: make(s, "mse"), LossError, "got str", "return ab.Total("),
    "class weight with gradient": (
        lambda s: make(s, nn.CrossEntropyLoss(weight=torch.ones(CLASSES, requires_grad=True))),
        LossError,
        "requires grad",
        "Use .detach()",
    ),
    "negative class weight": (
        lambda s: make(s, nn.CrossEntropyLoss(weight=torch.tensor([1.0, -2.0, 1.0, 1.0]))),
        LossError,
        "-2.0",
        "how much a class",
    ),
    "NaN class weight": (
        lambda s: make(s, partial(F.nll_loss, weight=torch.tensor([1.0, math.nan]))),
        LossError,
        "nan",
        "how much a class",
    ),
    "coefficient NaN": (
        lambda s: Terms(as_total, coefficients={"a": math.nan}),
        LossError,
        "got nan",
        "Use 0",
    ),
    "no function": (lambda s: Terms(3), LossError, "got int", "return ab.Total("),  # type: ignore[arg-type]
    "shared parameters": (
        lambda s: make(s, optimizer=[SGD(s.model.parameters(), lr=1), SGD(s.model[4].parameters(), lr=1)]),  # type: ignore[operator]
        OptimizerError,
        "got 2 in optimizers 0 and 1",
        "give it to one",
    ),
    "foreign optimizer": (
        lambda s: make(s, optimizer=SGD(FOREIGN.parameters(), lr=1)),
        OptimizerError,
        "got 2 that are none of its",
        "model.parameters()",
    ),
    "one foreign optimizer": (
        lambda s: make(s, optimizer=[*s.optimizers, SGD(FOREIGN.parameters(), lr=1)]),
        OptimizerError,
        "optimizer 1",
        "model.parameters()",
    ),
    "no optimizer": (lambda s: make(s, optimizer=[]), OptimizerError, "got []", "Pass torch.optim.SGD("),
    "other than an optimizer": (lambda s: make(s, optimizer="sgd"), OptimizerError, "got str", "Pass torch."),
    "LBFGS": (
        lambda s: make(s, optimizer=torch.optim.LBFGS(s.model.parameters())),
        OptimizerError,
        "got LBFGS",
        "use another one",
    ),
    "ReduceLROnPlateau": (
        lambda s: make(s, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(s.optimizers[0])),
        OptimizerError,
        "got ReduceLROnPlateau",
        "step it yourself",
    ),
    "foreign scheduler": (
        lambda s: make(s, scheduler=torch.optim.lr_scheduler.StepLR(SGD(s.model.parameters(), lr=1), 1)),
        OptimizerError,
        "got one for another",
        "from the same optimizer",
    ),
    "other than a scheduler": (
        lambda s: make(s, scheduler=[*s.schedulers, math.cos]),
        OptimizerError,
        "got builtin_function",
        "step it yourself",
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


@pytest.mark.parametrize(("build", "error", "got", "todo"), MAKE.values(), ids=MAKE)
def test_step_that_cannot_be(
    build: Callable[[Step], object], error: type[AnybatchError], got: str, todo: str
) -> None:
    step = make_step()
    refused(step, lambda: build(step), error, got, todo)
    works_afterwards(step, make_step())


# ---- a batch that cannot be cut

X, Y = make_batch()
NO_SAMPLES: list[Tensor] = []
BATCHES: dict[str, tuple[Any, type[AnybatchError], str, str]] = {
    "empty": ((X[:0], Y[:0]), BatchError, "got an empty batch: [0]: (0, 3), [1]: (0,)", "Skip empty batches"),
    "other lengths": ((X, Y[:5]), BatchError, "got [0]: (8, 3), [1]: (5,)", "one entry per row"),
    "a scalar beside": ((X, Y, torch.tensor(2.0)), BatchError, "[2]: ()", "belongs in the model or the loss"),
    "no tensor": ({"x": None}, BatchError, "got 0", "Pass the tensors of all rows"),
    "nothing": (None, BatchError, "got 0", "Pass the tensors of all rows"),
    "of NumPy": ((X.numpy(), Y), BatchError, "got a ndarray (torch.from_numpy", "Turn it into a tensor"),
    "a list of samples": (list(zip(X.tolist(), Y.tolist(), strict=True)), BatchError, "a float", "`collate`"),
    "a loader": (iter([(X, Y)]), BatchError, "got a list_iterator", "Turn it into"),
    "inputs elsewhere": ((X.to("meta"), Y), BatchError, "got meta", "Move the batch there with .to(device)"),
    "targets elsewhere": ((X, Y.to("meta")), BatchError, "device cpu, got meta", "Move the batch there"),
    "no target": ({"x": X}, LossError, "got ['x']", "Or write the loss as a function"),
    "two targets": (
        {"x": X, "y": Y, "labels": Y},
        LossError,
        "got ['x', 'y', 'labels']",
        "Or write the loss",
    ),
    "a single tensor": (X, LossError, "got Tensor", "Or write the loss as a function"),
}


@pytest.mark.parametrize(("batch", "error", "got", "todo"), BATCHES.values(), ids=BATCHES)
def test_batch_that_cannot_be_cut(batch: Any, error: type[AnybatchError], got: str, todo: str) -> None:
    step = make_step(micro_batch=3)
    refused(step, lambda: step(batch), error, got, todo)
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


FIX = "return ab.Total(losses.sum(), losses.numel())"
LOSSES: dict[str, tuple[Callable[[Tensor], Any], type[AnybatchError], str, str]] = {
    "a mean": (lambda x: x.mean(), LossError, "got a tensor of shape ()", FIX),
    "one per row": (lambda x: x, LossError, "got a tensor of shape (", FIX),
    "a float": (lambda x: x.mean().item(), LossError, "got float", FIX),
    "nothing": (lambda x: None, LossError, "got NoneType", FIX),
    "a pair": (lambda x: (x.sum(), len(x)), LossError, "got tuple", FIX),
    "named means": (lambda x: {"a": x.mean()}, LossError, "got {'a': 'Tensor'}", FIX),
    "no terms": (lambda x: {}, LossError, "got an empty one", FIX),
    "total of no scalar": (lambda x: Total(x, 8), LossError, "got a tensor of shape (", "Call .sum() on it"),
    "NaN": (lambda x: Total(x.sum() * math.nan, 8), NonFiniteLossError, "got nan for 'loss'", "bad data"),
    "infinite": (lambda x: Total(x.sum() / 0, 8), NonFiniteLossError, "got inf for 'loss'", "bad data"),
    "weight with gradient": (
        lambda x: Total(x.sum(), x.sum()),
        LossError,
        "without gradient",
        "use .detach()",
    ),
    "negative weight": (lambda x: Total(x.sum(), -1), LossError, "got -1", "counts rows"),
    "negative tensor": (
        lambda x: Total(x.sum(), torch.tensor(-1)),
        LossError,
        "got -1.0 in ",
        "Count rows",
    ),
    "NaN weight": (
        lambda x: Total(x.sum(), torch.tensor(math.nan)),
        LossError,
        "got nan in ",
        "Count rows",
    ),
    "weights": (lambda x: Total(x.sum(), torch.ones(8)), LossError, "got shape (8,)", "Call .sum()"),
    "no gradient": (
        lambda x: Total(x.sum().detach(), 8),
        LossError,
        "['loss'] without gradient",
        ".detach()",
    ),
    "a Total of text": (lambda x: Total("8", 8), LossError, "got str", "Sum the losses"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize(("bad", "error", "got", "todo"), LOSSES.values(), ids=LOSSES)
def test_loss_that_cannot_be_summed(
    bad: Callable[[Tensor], Any],
    error: type[AnybatchError],
    got: str,
    todo: str,
    micro_batch: int | None,
) -> None:
    loss = Switch()
    step = make_step(loss, micro_batch=micro_batch)
    loss.bad = bad
    refused(step, lambda: step(make_batch()), error, got, todo)
    loss.bad = None
    works_afterwards(step, make_step(Switch(), micro_batch=micro_batch))


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("clip_norm", [math.inf, 1.0])
def test_data_that_is_not_finite(micro_batch: int | None, clip_norm: float) -> None:
    step = make_step(micro_batch=micro_batch, clip_norm=clip_norm)
    x, y = make_batch()
    x[4, 1] = math.nan
    where = (
        "[0] of 1 (the first one holds rows 0 to 7)"
        if micro_batch is None
        else "[1] of 3 (the first one holds rows 3 to 5)"
    )
    refused(step, lambda: step((x, y)), NonFiniteLossError, f"got nan for 'loss' in micro-batches {where}")
    works_afterwards(step, make_step(micro_batch=micro_batch, clip_norm=clip_norm))


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


def test_promised_weights_name_the_terms() -> None:
    step = make_step(Terms(as_total, weight=lambda batch: {"other": 8}), micro_batch=3)
    refused(step, lambda: step(make_batch()), LossError, "['loss']", "got ['other']", "Name the same terms")


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
