"""Torch's losses as sums: what a step reads from the caller's object, and reads anew each time."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Step
from anybatch.core.errors import LossError
from anybatch.losses.torch_losses import summed_loss
from anybatch.testing import GradientRecorder, Perceptron, reference_step, relative_error, tolerance

ROWS, CLASSES = 6, 4
X = torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
Z = torch.rand(ROWS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Trial:
    """A step that records, and the reference of the same."""

    def __init__(self, loss: Any, batch: Any, model: nn.Module | None = None, **options: Any) -> None:
        self.loss, self.batch = loss, batch
        self.model = (Perceptron(3, CLASSES) if model is None else model).double()
        self.recorder = GradientRecorder(self.model, loss)
        self.step = Step(self.model, loss, self.recorder, **{"micro_batch": 4} | options)

    def error(self) -> float:
        report = self.step(self.batch)
        whole = reference_step(self.model, self.loss, self.batch)
        return relative_error([report.loss, self.recorder.gradients], [whole.loss, whole.gradients])

    def is_exact(self) -> bool:
        return self.error() <= tolerance(torch.float64, ROWS)


# ---- settings are read anew at each step


def weighted() -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0, 4.0]).double())


def scale_in_place(loss: nn.CrossEntropyLoss) -> None:
    loss.weight[0] = 7.0  # type: ignore[index]


def replace_weight(loss: nn.CrossEntropyLoss) -> None:
    loss.weight = torch.tensor([3.0, 1.0, 0.0, 4.0]).double()


def weight_as_parameter(loss: nn.CrossEntropyLoss) -> None:
    loss.weight = nn.Parameter(torch.tensor([3.0, 1.0, 0.0, 4.0]).double(), requires_grad=False)


def drop_weight(loss: nn.CrossEntropyLoss) -> None:
    loss.weight = None


def smooth(loss: nn.CrossEntropyLoss) -> None:
    loss.label_smoothing = 0.2


def ignore(loss: nn.CrossEntropyLoss) -> None:
    loss.ignore_index = int(Y[0])


def add_up(loss: nn.CrossEntropyLoss) -> None:
    loss.reduction = "sum"


CHANGES = [scale_in_place, replace_weight, weight_as_parameter, drop_weight, smooth, ignore, add_up]


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_settings_take_effect(change: Callable[[Any], None], micro_batch: int | None) -> None:
    trial = Trial(weighted(), (X, Y), micro_batch=micro_batch)
    assert trial.is_exact()
    before = copy.deepcopy(trial.recorder.gradients)
    change(trial.loss)
    assert trial.is_exact()
    assert relative_error(trial.recorder.gradients, before) > tolerance(torch.float32, ROWS)


def test_settings_changed_for_the_worse_are_refused() -> None:
    trial = Trial(weighted(), (X, Y))
    trial.loss.weight.requires_grad_()
    with pytest.raises(LossError, match="without gradient"):
        trial.step((X, Y))
    trial.loss.weight.requires_grad_(False)
    trial.loss.reduction = "none"
    with pytest.raises(LossError, match="got 'none'"):
        trial.step((X, Y))


def test_the_callers_loss_is_left_as_it_is() -> None:
    loss = nn.BCEWithLogitsLoss(weight=Z, pos_weight=Z[:1])
    before = {name: value for name, value in vars(loss).items() if name != "_buffers"}, dict(loss._buffers)
    assert Trial(loss, (X, Z)).is_exact()
    after = {name: value for name, value in vars(loss).items() if name != "_buffers"}, dict(loss._buffers)
    assert before[0] == after[0]
    assert all(before[1][name] is after[1][name] for name in before[1])


# ---- what the caller's object may be


class Renamed(nn.MSELoss):
    """Another name for the same loss."""


@pytest.mark.parametrize(
    "loss", [Renamed(), F.mse_loss, partial(partial(F.mse_loss, reduction="sum"), reduction="mean")]
)
def test_one_loss_in_other_clothes(loss: Any) -> None:
    trial = Trial(loss, (X, Z))
    assert trial.is_exact()
    assert trial.step((X, Z)).weights == {"loss": ROWS * CLASSES}


def test_a_loss_may_have_parameters_of_its_own() -> None:
    loss = nn.Linear(1, 1)
    if hasattr(nn, "LinearCrossEntropyLoss"):
        loss = nn.LinearCrossEntropyLoss(CLASSES, 5, bias=True).double()
        trial = Trial(loss, (X, Y))
        assert trial.is_exact()
        assert {"loss.linear.weight", "loss.linear.bias"} <= trial.recorder.gradients.keys()


def test_hooks_of_the_loss_are_called() -> None:
    loss, seen = nn.MSELoss(), []
    loss.register_forward_hook(lambda module, arguments, output: seen.append(len(arguments[0])))
    Trial(loss, (X, Z), micro_batch=4).step((X, Z))
    assert seen == [4, 2]


# ---- weights with one entry per row


@pytest.mark.parametrize("shape", [(ROWS, CLASSES), (ROWS, 1), (1, CLASSES), (CLASSES,), ()], ids=str)
@pytest.mark.parametrize("micro_batch", [1, 4, 6])
def test_a_weight_is_cut_where_it_reaches_the_rows(shape: tuple[int, ...], micro_batch: int) -> None:
    weight = torch.rand(shape, dtype=torch.float64)
    for loss in (
        nn.BCEWithLogitsLoss(weight=weight, pos_weight=weight),
        partial(F.binary_cross_entropy_with_logits, weight=weight, pos_weight=weight),
        nn.MultiLabelSoftMarginLoss(weight=weight),
    ):
        assert Trial(loss, (X, Z), micro_batch=micro_batch).is_exact()


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_weight_for_each_row_of_single_numbers(micro_batch: int) -> None:
    model = nn.Sequential(Perceptron(3, 1), nn.Flatten(0))
    loss = nn.BCEWithLogitsLoss(weight=torch.rand(ROWS, dtype=torch.float64))
    assert Trial(loss, (X, Z[:, 0]), model, micro_batch=micro_batch).is_exact()


def test_a_square_weight_is_one_of_rows() -> None:
    """As many classes as rows: a weight of classes has one axis, one of rows has two."""
    model, target = Perceptron(3, ROWS), torch.rand(ROWS, ROWS, dtype=torch.float64)
    for shape in ((ROWS,), (ROWS, 1), (ROWS, ROWS)):
        loss = nn.BCEWithLogitsLoss(weight=torch.rand(shape, dtype=torch.float64))
        assert Trial(loss, (X, target), model).is_exact()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_weight_of_rows_that_come_one_by_one_is_refused(rows: int, reduction: str) -> None:
    """Broadcast over a single row it would repeat its loss; over more it fits nowhere."""
    trial = Trial(nn.MultiLabelSoftMarginLoss(weight=Z, reduction=reduction), (X, Z), micro_batch=None)
    window = trial.step.window()
    with pytest.raises((LossError, RuntimeError)) as caught:
        window.add((X[:rows], Z[:rows]))
    assert rows > 1 or "an entry for every row" in str(caught.value)
    window.discard()


# ---- what the loss compares


class Outputs(nn.Module):
    """As many outputs as asked for."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.net, self.number = Perceptron(3, CLASSES), number

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.net(inputs[0]),) * self.number


COUNTS: list[tuple[Any, int, Any, str]] = [
    (
        F.cross_entropy,
        2,
        (X, Y),
        "Expected 2 tensors for cross_entropy, got 2 from the model and 1 as target",
    ),
    (nn.MSELoss(), 1, (X, (Z, Z)), "Expected 2 tensors for MSELoss, got 1 from the model and 2 as target"),
    (nn.MSELoss(), 1, (X,), "Expected 2 tensors for MSELoss, got 1 from the model and 0 as target"),
    (nn.GaussianNLLLoss(), 1, (X, Z), "Expected 3 tensors for GaussianNLLLoss, got 1 from the model"),
    (F.ctc_loss, 1, (X, Y), "Expected 4 tensors for ctc_loss, got 1 from the model and 1 as target"),
    (
        F.triplet_margin_loss,
        2,
        (X, X, X),
        "Expected 3 tensors for triplet_margin_loss, got 2 from the model and 0",
    ),
]


@pytest.mark.parametrize(("loss", "number", "batch", "got"), COUNTS)
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_too_few_or_too_many_tensors(
    loss: Any, number: int, batch: Any, got: str, micro_batch: int | None
) -> None:
    with pytest.raises(LossError) as caught:
        Trial(loss, batch, Outputs(number), micro_batch=micro_batch).step(batch)
    assert got in str(caught.value)
    assert "write the loss as a function (model, micro) -> ab.Total" in str(caught.value)


def test_a_constant_variance_is_a_setting() -> None:
    assert Trial(partial(F.gaussian_nll_loss, var=2.0), (X, Z)).is_exact()


@pytest.mark.parametrize(
    "batch", [(X, X + 1, X - 1), [X, X + 1, X - 1], ((X, X + 1, X - 1),)], ids=["three", "list", "one"]
)
def test_a_triplet_has_no_target(batch: Any) -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Perceptron(3, 3)

        def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(map(self.net, inputs))

    assert Trial(nn.TripletMarginLoss(), batch, Embed()).is_exact()


def test_ctc_takes_its_targets_from_a_loader() -> None:
    """Loaders collate tuples to lists."""

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Perceptron(3, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).log_softmax(-1).transpose(0, 1)

    x = torch.randn(ROWS, 5, 3, dtype=torch.float64)
    targets = torch.randint(1, CLASSES, (ROWS, 2)), torch.full((ROWS,), 5), torch.tensor([2, 1, 0, 2, 1, 2])
    dataset = torch.utils.data.TensorDataset(x, *targets)
    loader = torch.utils.data.DataLoader([(x, tuple(rest)) for x, *rest in dataset], batch_size=ROWS)
    batch = next(iter(loader))
    assert isinstance(batch, list)
    assert isinstance(batch[1], list)
    trial = Trial(nn.CTCLoss(), batch, TimeFirst())
    assert trial.is_exact()
    assert trial.step(batch).weights == {"loss": ROWS}


def test_targets_of_one_byte() -> None:
    assert Trial(weighted(), (X, Y.to(torch.uint8))).is_exact()


def test_rows_that_do_not_weigh_the_same_are_refused() -> None:
    """Samples of different length, padded micro-batch by micro-batch: what is a mean over padding?"""
    samples = [torch.ones(length) for length in (1, 1, 2, 2)]

    def collate(samples: list[Tensor]) -> Any:
        padded = nn.utils.rnn.pad_sequence(samples, batch_first=True).unsqueeze(-1)
        return padded, padded

    model = nn.Linear(1, 1)
    step = Step(model, nn.MSELoss(), GradientRecorder(model), micro_batch=2, collate=collate)
    with pytest.raises(LossError, match=r"add up to the batch's 4 for 'loss', got 6\. .*padding"):
        step(samples)


def test_what_is_no_loss_of_torch_is_left_to_others() -> None:
    assert summed_loss(nn.Linear(1, 1)) is None
    assert summed_loss(lambda model, micro: None) is None
    assert summed_loss(None) is None


BROADCAST = [
    nn.MSELoss(),
    nn.L1Loss(),
    nn.HuberLoss(),
    nn.SmoothL1Loss(),
    nn.PoissonNLLLoss(),
    nn.KLDivLoss(),
]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("loss", BROADCAST, ids=lambda loss: type(loss).__name__)
def test_output_and_target_that_meet_row_against_row_are_refused(loss: nn.Module, rows: int) -> None:
    model = nn.Linear(3, 1)
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(LossError, match=r"as many axes.*target\[:, None\]"):
        step((torch.ones(rows, 3), torch.ones(rows)))


@pytest.mark.filterwarnings("ignore:Using a target size")  # which torch broadcasts rightly
def test_a_model_that_squeezes_the_rows_away_is_not_refused_for_a_last_row() -> None:
    class Squeezed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze()

    model = Squeezed(4, 1)
    trial = Trial(
        nn.MSELoss(), (torch.randn(7, 5, 4).double(), torch.randn(7, 5).double()), model, micro_batch=3
    )
    assert trial.is_exact()
