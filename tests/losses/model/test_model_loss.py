"""Models that compute their own loss: exact in every cut, or refused by name."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Options, Step
from anybatch.core.errors import LossError, NonFiniteLossError
from anybatch.losses.model.model_loss import ModelLoss
from anybatch.testing import GradientRecorder, relative_error
from tests.device import needs_cpu
from tests.losses import own_losses
from tests.losses.own_losses import BATCH, LABELS, REFUSED, Layer, Own, X, or_nothing, size, tokens, whole_of
from tests.options import flat
from tests.snapshots import same_as_before

LIMIT = 1e-12
UNCHECKED = Options(check=False)


def take(loss: Callable[..., Any], batch: Any = BATCH, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    recorder = GradientRecorder(model := Own(loss))
    return Step(model, ModelLoss(), recorder, **flat({"micro_batch": 2} | options))(batch), recorder.gradients


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=needs_cpu) if one == own_losses.MASKED else one for one in REFUSED]
)
def test_refused_by_name_and_nothing_is_left(name: str, micro_batch: int) -> None:
    loss, message = REFUSED[name]
    model = Own(loss)
    step = Step(model, ModelLoss(), torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=micro_batch)
    with same_as_before(step), pytest.raises(LossError, match=message):
        step(BATCH)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_sum_of_parameters_would_be_added_once_per_micro_batch(micro_batch: int) -> None:
    square = lambda weight: nn.functional.mse_loss(weight, torch.zeros_like(weight), reduction="sum")  # noqa: E731
    model = Layer(lambda weight, scores, x, labels: tokens(scores, labels) + square(weight))
    step = Step(model, ModelLoss(), GradientRecorder(model), micro_batch=micro_batch, options=UNCHECKED)
    with pytest.raises(LossError, match=r"Layer to be made of means .* a sum of parameters"):
        step(BATCH)


@pytest.mark.parametrize("loss", [or_nothing, lambda s, y: {"loss": or_nothing(s, y)}], ids=range(2))
@pytest.mark.parametrize("first", [True, False])
def test_a_micro_batch_without_a_loss_adds_nothing(loss: Callable[..., Any], first: bool) -> None:
    batch = {"x": X, "labels": LABELS.roll(-2 if first else 0, 0)}
    assert first == bool((batch["labels"][:2] < 0).all())
    value, gradients = whole_of(Own(loss), batch)
    report, found = take(loss, batch)
    assert relative_error([report.loss, found], [value, gradients]) <= LIMIT
    report, found = take(loss, {"x": X, "labels": torch.full_like(LABELS, -100)})
    assert (report.updated, found) == (False, {})


@pytest.mark.parametrize("micro_batch", [1, 2, 8, None])
@pytest.mark.parametrize("beside", [lambda s: size(s).detach(), lambda s: size(s) / 2 + 2], ids="ab")
def test_constants_and_detached_parts_are_in_the_reported_loss(beside: Any, micro_batch: int | None) -> None:
    loss = lambda scores, labels: tokens(scores, labels) + beside(scores)  # noqa: E731
    batch = BATCH | {"labels": LABELS.clamp(min=0)}
    value, gradients = whole_of(Own(loss), batch)
    report, found = take(loss, batch, micro_batch=micro_batch)
    assert report.checked
    assert relative_error([report.loss, found], [value, gradients]) <= LIMIT


def test_a_detached_part_that_is_not_a_number_is_not_hidden() -> None:
    with pytest.raises(NonFiniteLossError):
        take(lambda scores, labels: size(scores) + torch.tensor(math.nan), check=False)
