"""Bad input: expected, got, what to do; everything stays as it was, and the step works afterwards."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from anybatch import AnybatchError, Options, Step, Terms, Total
from anybatch.core.errors import BatchError, LossError, NonFiniteLossError, OptimizerError, PlanError
from tests.snapshots import ROWS, assert_same, make_batch, make_model, make_step, same_as_before, snapshot

X, Y = make_batch()


def refused(step: Step, call: Callable[[], object], error: type[AnybatchError], *said: str) -> None:
    """The call raises exactly this, says what was expected, what came, what to do, and changes nothing."""
    with same_as_before(step), pytest.raises(error) as caught:
        call()
    assert caught.type is error
    message = str(caught.value)
    expected, _, rest = message.partition(", got ")
    assert expected.startswith("Expected ")
    for words in said:
        assert words in message
    assert len(rest.split(". ")) > 1 or "\n" in rest, f"what to do? {message}"


def works_afterwards(step: Step, twin: Step, batch: Any = (X, Y)) -> None:
    """A good batch gives, bit for bit, what it gives a step that never saw bad input."""
    reports = []
    for one in (step, twin):
        torch.manual_seed(5)
        reports.append(one(batch))
    assert reports[0] == reports[1]
    assert_same(snapshot(twin), snapshot(step))


# ---- a batch that cannot be cut


def collate(rows: list[Any]) -> Any:
    return tuple(torch.stack([row[place] for row in rows]) for place in (0, 1))


ROW, COLLATED = {"micro_batch": 3}, {"micro_batch": 3, "collate": collate}
BATCHES: dict[str, tuple[Any, dict[str, Any], type[AnybatchError], str]] = {
    "empty": ((X[:0], Y[:0]), ROW, BatchError, "got an empty batch: [0]: (0, 3), [1]: (0,)"),
    "a list of samples": (list(zip(X.tolist(), Y.tolist(), strict=True)), ROW, BatchError, "a float"),
    "no samples": ([], COLLATED, BatchError, "got []"),
    "a dict for samples": ({"x": X}, COLLATED, BatchError, "got dict"),
    "an iterator for samples": (iter([X]), COLLATED, BatchError, "got list_iterator"),
    "BatchNorm": ((X, Y), ROW | {"batch_norm": None}, PlanError, "batch_norm_to_group_norm"),
}


@pytest.mark.parametrize(("batch", "options", "error", "got"), BATCHES.values(), ids=BATCHES)
def test_batch_that_cannot_be_cut(
    batch: Any, options: dict[str, Any], error: type[AnybatchError], got: str
) -> None:
    step, twin = (make_step(**options) for _ in range(2))
    refused(step, lambda: step(batch), error, got)
    for one in (step, twin):
        one.model.train("batch_norm" not in options)  # in evaluation rows do not meet
    works_afterwards(step, twin, list(zip(X, Y, strict=True)) if options is COLLATED else (X, Y))


def test_batch_norm_in_training_mode_takes_one_add_of_a_window() -> None:
    step = make_step(batch_norm=None)
    for parameter in step.model.parameters():
        parameter.grad = None
    with step.window() as window:
        window.add((X, Y))
        refused(step, lambda: window.add((X, Y)), PlanError, "BatchNorm")
        assert window.close().rows == ROWS


# ---- a loss that cannot be summed, and data that gives none


class Switch:
    """A loss that is good, until `bad` says what becomes of the losses of the rows."""

    bad: Callable[[Tensor], Any] | None = None

    def __call__(self, model: nn.Module, micro: tuple[Tensor, Tensor]) -> Any:
        losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")
        return Total(losses.sum(), losses.numel()) if self.bad is None else self.bad(losses)


LOSSES: dict[str, tuple[Callable[[Tensor], Any], type[AnybatchError], str]] = {
    "a mean": (lambda x: x.mean(), LossError, "got a tensor of shape ()"),
    "named means": (lambda x: {"a": x.mean()}, LossError, "got {'a': 'Tensor'}"),
    "no terms": (lambda x: {}, LossError, "got an empty one"),
    "total of no scalar": (lambda x: Total(x, 8), LossError, "got a tensor of shape ("),
    "NaN": (lambda x: Total(x.sum() * math.nan, 8), NonFiniteLossError, "got nan for 'loss'"),
    "infinite": (lambda x: Total(x.sum() / 0, 8), NonFiniteLossError, "got inf for 'loss'"),
    "inf * 0": (lambda x: Total((x - x).abs().sqrt().sum(), 8), NonFiniteLossError, "division by zero"),
    "weight with gradient": (lambda x: Total(x.sum(), x.sum()), LossError, "without gradient"),
    "negative weight": (lambda x: Total(x.sum(), -1), LossError, "got -1"),
    "no gradient": (lambda x: Total(x.sum().detach(), 8), LossError, "['loss'] without gradient"),
}


@pytest.mark.parametrize("options", [{}, {"micro_batch": 3}, {"micro_batch": 3, "clip_norm": 1.0}], ids=str)
@pytest.mark.parametrize(("bad", "error", "got"), LOSSES.values(), ids=LOSSES)
def test_loss_that_cannot_be_summed(
    bad: Callable[[Tensor], Any], error: type[AnybatchError], got: str, options: dict[str, Any]
) -> None:
    loss = Switch()
    step = make_step(loss, **options)
    loss.bad = bad
    refused(step, lambda: step((X, Y)), error, got)
    loss.bad = None
    works_afterwards(step, make_step(Switch(), **options))


def promising(weight: Any) -> Terms:
    return Terms(Switch(), weight=lambda batch: weight)


def changing(model: nn.Module, micro: Any) -> dict[str, Total]:
    """Terms that are others in the last micro-batch, of two rows."""
    return {"a" if len(micro[1]) == 3 else "b": Switch()(model, micro)}


TERMS: dict[str, tuple[Any, str]] = {
    "another weight": (promising(7), "batch's 7 for 'loss', got 8"),
    "a negative one": (promising(-8), "got -8"),
    "one that is no number": (promising(math.nan), "got nan"),
    "one with gradient": (promising(torch.ones((), requires_grad=True)), ""),
    "one for each row": (promising(torch.ones(2)), ""),
    "a coefficient of none": (Terms(Switch(), coefficients={"other": 1.0}), "got ['loss'] without ['other']"),
    "others in the last one": (changing, "got ['b'] after ['a']"),
}


@pytest.mark.parametrize(("loss", "got"), TERMS.values(), ids=TERMS)
def test_terms_that_do_not_fit(loss: Any, got: str) -> None:
    step = make_step(loss, micro_batch=3)
    refused(step, lambda: step((X, Y)), LossError, got)
    if loss is changing:
        step((X[:6], Y[:6]))  # both micro-batches of the same terms


# ---- parameters


def test_all_parameters_frozen() -> None:
    step = make_step()
    step.model.requires_grad_(False)
    for use in (lambda: step((X, Y)), step.window):
        refused(step, use, OptimizerError, "got 6 that are all frozen", "requires_grad=True")
    step.model.requires_grad_(True)
    works_afterwards(step, make_step())


def test_loss_that_reaches_no_parameter_of_the_optimizer() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    step = Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=3, options=Options(batch_norm="micro"))
    with torch.no_grad():
        refused(step, lambda: step((X, Y)), LossError, "['loss'] without gradient", "torch.no_grad()")
    assert step((X, Y)).rows == ROWS
