"""What each loss divides by, counted from shapes and targets."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.losses.reductions import CLASSES, FUNCTIONS, GAUSSIANS, MODULES, VECTORS

# Its value is no sum over rows: it returns a named tuple, and its head is chosen by the targets.
NOT_SUMMED = {nn.AdaptiveLogSoftmaxWithLoss}


def test_every_loss_of_torch_is_known() -> None:
    losses = {value for name, value in vars(nn).items() if name.endswith("Loss") and inspect.isclass(value)}
    assert losses - NOT_SUMMED == set(MODULES)


def test_module_and_function_are_of_one_kind() -> None:
    called = {module: inspect.getsource(module.forward) for module in MODULES}
    for module, kind in MODULES.items():
        names = [function.__name__ for function in FUNCTIONS if f"F.{function.__name__}(" in called[module]]
        assert len(names) == 1, module
        assert FUNCTIONS[getattr(F, names[0])].weigh is kind.weigh


def weigh(target: Tensor, **settings: Any) -> float:
    return float(CLASSES.weigh(settings, (), (target,)))


TARGET = torch.tensor([[0, 1, 2], [-100, 2, -100]])
WEIGHT = torch.tensor([0.5, 0.0, 2.0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4),
        ({"ignore_index": None}, 4),
        ({"ignore_index": 2}, 4),  # then -100 is no valid target, but that is for torch to say
        ({"weight": WEIGHT}, 4.5),
        ({"weight": WEIGHT.double()}, 4.5),
    ],
    ids=str,
)
def test_classes_are_weighed(settings: dict[str, Any], expected: float) -> None:
    assert weigh(TARGET, **settings) == expected


def test_an_ignored_index_may_be_a_class() -> None:
    target = torch.tensor([0, 2, 2, 1])
    assert weigh(target, ignore_index=2, weight=WEIGHT) == 0.5
    assert weigh(target, ignore_index=2) == 2
    assert weigh(torch.full((4,), -1), ignore_index=-1, weight=WEIGHT) == 0


def test_targets_of_one_byte_are_indices() -> None:
    """As an index, uint8 would be a mask."""
    target = torch.tensor([0, 1, 2, 2], dtype=torch.uint8)
    scores = torch.randn(4, 3, dtype=torch.float64)
    sums = F.cross_entropy(scores, target, weight=WEIGHT.double(), reduction="sum")
    mean = F.cross_entropy(scores, target, weight=WEIGHT.double())
    assert weigh(target, weight=WEIGHT) == 4.5
    assert torch.equal(sums / weigh(target, weight=WEIGHT), mean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_class_weights_are_summed_in_float32(dtype: torch.dtype) -> None:
    """In bfloat16 the sum would be 1,000 or 1,004, in float16 it has no room above 65,504."""
    weights = torch.ones(1, dtype=dtype)
    assert weigh(torch.zeros(1001, dtype=torch.long), weight=weights) == 1001
    assert weigh(torch.zeros(70_001, dtype=torch.long), weight=weights) == 70_001


@pytest.mark.parametrize(("shape", "expected"), [((4, 3), 4), ((4, 3, 2), 8), ((4, 3, 2, 5), 40)])
def test_soft_targets_weigh_one_for_each_place(shape: tuple[int, ...], expected: int) -> None:
    scores, target = torch.randn(shape), torch.rand(shape)
    assert F.cross_entropy(scores, target, reduction="none").numel() == expected
    assert weigh(target) == weigh(target, weight=torch.rand(3)) == expected


def zeros(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape) for shape in shapes]


SHAPES: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "mse": (F.mse_loss, zeros((4, 3), (4, 3))),
    "mse of numbers": (F.mse_loss, zeros((4,), (4,))),
    "poisson, broadcast": (F.poisson_nll_loss, zeros((4, 1), (4, 3))),
    "hinge, broadcast": (F.hinge_embedding_loss, zeros((4, 3), (4, 1))),
    "ranking": (F.margin_ranking_loss, zeros((4,), (4,), (4,))),
    "ranking, broadcast": (F.margin_ranking_loss, zeros((4, 1), (4, 3), (4, 3))),
    "cosine": (F.cosine_embedding_loss, zeros((4, 3), (4, 3), (4,))),
    "triplet": (F.triplet_margin_loss, zeros((4, 3), (4, 3), (4, 3))),
    "triplet, many negatives": (F.triplet_margin_loss, zeros((4, 1, 3), (4, 1, 3), (4, 6, 3))),
    "multi margin": (F.multi_margin_loss, [torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)]),
    "multi-label margin": (
        F.multilabel_margin_loss,
        [torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.long)],
    ),
    "multi-label soft margin": (F.multilabel_soft_margin_loss, zeros((4, 5, 3), (4, 5, 3))),
    "gaussian": (F.gaussian_nll_loss, [*zeros((4, 3), (4, 3)), torch.ones(4, 3)]),
    "gaussian, one variance": (F.gaussian_nll_loss, [*zeros((4, 3), (4, 3)), torch.ones(4, 1)]),
    "gaussian, variance of rows": (F.gaussian_nll_loss, [*zeros((4, 3), (4, 3)), torch.ones(4)]),
    "gaussian, many targets": (F.gaussian_nll_loss, [*zeros((4, 1), (4, 3)), torch.ones(4, 1)]),
}


@pytest.mark.parametrize(("function", "arguments"), SHAPES.values(), ids=SHAPES)
def test_shapes_tell_how_many_losses_there_are(
    function: Callable[..., Tensor], arguments: list[Tensor]
) -> None:
    losses = function(*arguments, reduction="none")
    assert FUNCTIONS[function].weigh({}, tuple(arguments), ()) == losses.numel()


def test_sequences_are_counted_along_the_second_axis() -> None:
    scores = torch.zeros(7, 4, 3).log_softmax(-1)
    assert FUNCTIONS[F.ctc_loss].weigh({}, (scores,), ()) == 4


def test_ctc_losses_are_divided_by_their_own_length() -> None:
    terms = FUNCTIONS[F.ctc_loss].terms
    losses = torch.tensor([6.0, 6.0, 6.0])
    for lengths in (torch.tensor([3, 1, 0]), [3, 1, 0]):
        assert terms(losses, (None, None, None, lengths)).tolist() == [2, 6, 6]


def test_a_model_gives_mean_and_variance() -> None:
    assert GAUSSIANS.arrange(("mean", "variance"), ("target",)) == ("mean", "target", "variance")
    assert VECTORS.arrange(("scores",), ("target",)) == ("scores", "target")
