"""Torch's losses as sums: what a step reads from the caller's object, and reads anew each time."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Step
from anybatch.core.errors import LossError
from anybatch.testing import GradientRecorder, reference_step, relative_error, tolerance
from tests.options import flat
from tests.zoo import Perceptron

ROWS, CLASSES = 6, 4
X = torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
Z = torch.rand(ROWS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Trial:
    def __init__(self, loss: Any, batch: Any, model: nn.Module | None = None, **options: Any) -> None:
        self.loss, self.batch, self.model = loss, batch, (model or Perceptron(3, CLASSES)).double()
        self.recorder = GradientRecorder(self.model, loss)
        self.step = Step(self.model, loss, self.recorder, **flat({"micro_batch": 4} | options))

    def is_exact(self) -> bool:
        report, whole = self.step(self.batch), reference_step(self.model, self.loss, self.batch)
        found = [report.loss, self.recorder.gradients]
        return relative_error(found, [whole.loss, whole.gradients]) <= tolerance(torch.float64, ROWS)


NEW = torch.tensor([3.0, 1.0, 0.0, 4.0]).double()
CHANGES: list[Callable[[Any], Any]] = [
    lambda loss: loss.weight.mul_(NEW + 1),
    lambda loss: setattr(loss, "weight", NEW),
    lambda loss: setattr(loss, "weight", None),
    lambda loss: setattr(loss, "label_smoothing", 0.2),
    lambda loss: setattr(loss, "ignore_index", int(Y[0])),
    lambda loss: setattr(loss, "reduction", "sum"),
]


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("change", CHANGES, ids=range(6))
def test_changed_settings_take_effect(change: Callable[[Any], None], micro_batch: int | None) -> None:
    trial = Trial(nn.CrossEntropyLoss(weight=NEW.flip(0) + 0.5), (X, Y), micro_batch=micro_batch)
    assert trial.is_exact()
    before = copy.deepcopy(trial.recorder.gradients)
    change(trial.loss)
    assert trial.is_exact()
    assert relative_error(trial.recorder.gradients, before) > tolerance(torch.float32, ROWS)


def test_the_callers_loss_is_left_as_it_is_and_its_hooks_are_called() -> None:
    loss, seen = nn.BCEWithLogitsLoss(weight=Z[0], pos_weight=Z[:1]), []
    loss.register_forward_hook(lambda module, arguments, output: seen.append(len(arguments[0])))
    before, buffers = {**vars(loss), "_buffers": 0}, dict(loss._buffers)
    trial = Trial(loss, (X, Z))
    trial.step((X, Z))
    assert seen == [4, 2]
    assert trial.is_exact()
    assert before == {**vars(loss), "_buffers": 0}
    assert all(buffers[name] is one for name, one in loss._buffers.items())


PER_ROW: dict[str, tuple[Any, tuple[int, ...]]] = {
    "labels": (nn.MultiLabelSoftMarginLoss(weight=Z, reduction="sum"), (CLASSES,)),
    "single numbers": (partial(F.binary_cross_entropy_with_logits, pos_weight=Z[:, 0]), ()),
    "elements": (partial(F.mse_loss, weight=Z), (CLASSES,)),
    "variance": (partial(F.gaussian_nll_loss, var=Z + 0.1), (CLASSES,)),
}


@pytest.mark.parametrize(("loss", "shape"), PER_ROW.values(), ids=PER_ROW)
def test_a_setting_with_an_entry_for_every_row_is_refused(loss: Any, shape: tuple[int, ...]) -> None:
    batch = rows_of(ROWS, (3,), shape)
    refused = pytest.raises(LossError, match="without an entry for every row, got shape")
    for micro_batch in (None, 1, 4):
        with refused:
            Trial(loss, batch, Shaped(shape), micro_batch=micro_batch).step(batch)
    window = Trial(loss, batch, Shaped(shape), micro_batch=None).step.window()
    with refused:
        window.add(tuple(part[:2] for part in batch))


class Shaped(nn.Module):
    def __init__(self, *shapes: tuple[int, ...], squeezes: bool = False, mixes: bool = False) -> None:
        super().__init__()
        self.net, self.shapes, self.squeezes, self.mixes = nn.Linear(3, 24), shapes, squeezes, mixes

    def forward(self, *inputs: Tensor) -> Any:
        outputs: list[Tensor] = []
        for x, shape in zip(inputs * len(self.shapes), self.shapes, strict=False):
            y = self.net(x)[:, : math.prod(shape)].sigmoid().view(len(x), *shape)
            y = y.mean(0, keepdim=True) if self.mixes and (outputs or len(self.shapes) == 1) else y
            outputs.append(y.squeeze() if self.squeezes else y)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


ELEMENTWISE = [
    *(nn.MSELoss(), F.l1_loss, F.smooth_l1_loss, nn.HuberLoss(), F.binary_cross_entropy, F.soft_margin_loss),
    *(nn.BCEWithLogitsLoss(), nn.PoissonNLLLoss(), partial(F.gaussian_nll_loss, var=0.3)),
    *(nn.HingeEmbeddingLoss(), nn.KLDivLoss(reduction="batchmean"), nn.MultiLabelSoftMarginLoss()),
    partial(F.mse_loss, weight=torch.ones(())),
]


def called(loss: Any) -> str:
    """Of a function its name: an address would be another one in each process of the tests."""
    return getattr(getattr(loss, "func", loss), "__name__", str(loss))


def rows_of(rows: int, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.rand(rows, *shape, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("loss", ELEMENTWISE, ids=called)
@pytest.mark.parametrize("rows", [1, 4])
def test_another_number_of_axes_or_no_rows_is_refused(loss: Any, rows: int) -> None:
    for output, target in (((1,), ()), ((), (1,)), ((3, 1), (3,)), ((3,), (3, 1)), ((4,), ())):
        with pytest.raises(LossError, match="axes"):
            Trial(loss, (), Shaped(output)).step(rows_of(rows, (3,), target))
    for shape, target in (((3,), (3,)), ((1,), (3,)), ((1,), (1,)), ((), ())) if rows > 1 else ():
        with pytest.raises(LossError, match="axes"):
            Trial(loss, (), Shaped(shape, mixes=True, squeezes=not shape)).step(rows_of(rows, (3,), target))


ONE_ROW: dict[str, tuple[Any, nn.Module, Any]] = {  # of all rows torch would make one
    "probabilities": (F.cross_entropy, Shaped(()), rows_of(4, (3,), ())),
    "many labels": (nn.MultiLabelMarginLoss(), Shaped(()), (X[:4], torch.tensor([1, 0, -1, 2]))),
    "triplet": (nn.TripletMarginLoss(), Shaped((), (), ()), rows_of(4, (3,), (3,), (3,))),
    "sequence": (F.ctc_loss, Shaped((5,)), (X[:4], (torch.ones(4, 2).long(), Y[:4], Y[:4]))),
    "one of a pair": (F.cosine_embedding_loss, Shaped((3,), (3,), mixes=True), rows_of(4, (3,), ())),
    "one of two ranked": (F.margin_ranking_loss, Shaped((), (), mixes=True), rows_of(4, (3,), ())),
}


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize(("loss", "model", "batch"), ONE_ROW.values(), ids=ONE_ROW)
def test_rows_that_torch_would_take_for_one_are_refused(
    loss: Any, model: nn.Module, batch: Any, micro_batch: int | None
) -> None:
    with pytest.raises(LossError, match="axes"):
        Trial(loss, batch, model, micro_batch=micro_batch).step(batch)


@pytest.mark.filterwarnings("ignore:Using a target size")  # which torch broadcasts rightly
@pytest.mark.parametrize("loss", [nn.MSELoss(), F.poisson_nll_loss, nn.KLDivLoss(reduction="sum")])
@pytest.mark.parametrize(("output", "target"), [((1,), (3,)), ((3,), (1,)), ((3, 1), (1, 2))], ids=str)
def test_axes_other_than_rows_may_be_broadcast(loss: Any, output: Any, target: Any) -> None:
    for micro_batch in (None, 1, 4):
        assert Trial(loss, rows_of(6, (3,), target), Shaped(output), micro_batch=micro_batch).is_exact()
