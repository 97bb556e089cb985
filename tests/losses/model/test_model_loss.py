"""Models that compute their own loss: exact in every cut, or refused by name."""

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
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
from tests.snapshots import same, same_as_before
from tests.zoo import own_loss, words

LIMIT = 1e-12
UNCHECKED = Options(check=False)


def take(loss: Callable[..., Any], batch: Any = BATCH, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    recorder = GradientRecorder(model := Own(loss))
    return Step(model, ModelLoss(), recorder, **flat({"micro_batch": 2} | options))(batch), recorder.gradients


def assert_exact(loss: Callable[..., Any], batch: Any, given: Any = None) -> Any:
    """Gradients of the batch cut are those of the whole; `given` is the same batch in another form."""
    value, gradients = whole_of(Own(loss), batch)
    report, found = take(loss, batch if given is None else given)
    assert relative_error(found, gradients) <= LIMIT
    assert relative_error(report.loss, value) <= LIMIT
    return report


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


@needs_cpu
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_a_compiled_model_that_returns_its_loss_is_refused_as_compiled() -> None:
    """A loss module is compiled as a whole, as in heads of transformers under `torch_compile=True`."""
    torch.compiler.reset()
    loss = lambda scores, labels: nn.CrossEntropyLoss()(scores.flatten(0, 1), labels.flatten())  # noqa: E731
    model: Any = torch.compile(Own(loss), backend="aot_eager")
    step = Step(model, ModelLoss(), torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=2)
    message = r"the loss of Own outside of compiled code, .*torch_compile.*block\.compile\(\)"
    with same_as_before(step), pytest.raises(LossError, match=message):
        step(BATCH)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_sum_of_parameters_would_be_added_once_per_micro_batch(micro_batch: int) -> None:
    square = lambda weight: nn.functional.mse_loss(weight, torch.zeros_like(weight), reduction="sum")  # noqa: E731
    for penalty in (lambda weight: weight.flatten().abs().sum(), square):
        model = Layer(lambda weight, scores, x, labels, p=penalty: tokens(scores, labels) + p(weight))
        step = Step(model, ModelLoss(), GradientRecorder(model), micro_batch=micro_batch, options=UNCHECKED)
        with pytest.raises(LossError, match=r"Layer to be made of means .* a sum of parameters"):
            step(BATCH)


@pytest.mark.parametrize("loss", [or_nothing, lambda s, y: {"loss": or_nothing(s, y)}], ids=range(2))
@pytest.mark.parametrize("first", [True, False])
def test_a_micro_batch_without_a_loss_adds_nothing(loss: Callable[..., Any], first: bool) -> None:
    batch = {"x": X, "labels": LABELS.roll(-2 if first else 0, 0)}
    assert first == bool((batch["labels"][:2] < 0).all())
    assert_exact(loss, batch)
    report, found = take(loss, {"x": X, "labels": torch.full_like(LABELS, -100)})
    assert (report.updated, found) == (False, {})


BESIDE: dict[str, Callable[[Tensor], Any]] = {
    "constant": lambda scores: 3.0,
    "detached": lambda scores: scores.square().mean().detach(),
    "after two terms": lambda scores: 0.5 * scores.square().mean() + 2,
}


@pytest.mark.parametrize("micro_batch", [1, 2, 8, None])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
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
