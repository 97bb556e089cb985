"""The blocks give what all logits at once give, in every setting, and make no product that nobody needs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anybatch as ab
from anybatch.core.errors import LossError
from anybatch.losses.linear import linear_cross_entropy
from anybatch.testing import relative_error, tolerance
from tests import device

LIMIT = 1e-12  # relative, float64
TOKENS, WIDTH, WORDS = 14, 5, 11

IGNORED = torch.tensor([3, -100, 0, 10, -100, 2, 2, 7, -100, 9, 1, 4, -100, 0])
CLASS_WEIGHT = torch.linspace(0, 2, WORDS, dtype=torch.float64)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.2},
    "weighted": {"class_weight": CLASS_WEIGHT},
    "weighted and smoothed": {"class_weight": CLASS_WEIGHT, "label_smoothing": 0.1},
    "one class ignored": {"ignore_index": 2},
}


def layer(dtype: torch.dtype = torch.float64, *, tokens: int = TOKENS) -> list[Tensor]:
    shapes = (tokens, WIDTH), (WORDS, WIDTH), (WORDS,)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def blocks(values: list[Tensor], target: Tensor, **settings: Any) -> ab.Total:
    return linear_cross_entropy(values[0], values[1], target, bias=values[2], **settings)


def head(values: list[Tensor], target: Tensor, *, reduction: str = "sum", **settings: Any) -> Tensor:
    """The same with all logits at once."""
    settings = {"weight" if name == "class_weight" else name: value for name, value in settings.items()}
    return F.cross_entropy(F.linear(*values), target, reduction=reduction, **settings)


def gradients(values: list[Tensor], loss: Any, factor: float = 1.0) -> list[Tensor]:
    return list(torch.autograd.grad(factor * loss, values))


@pytest.mark.parametrize("rows", [1, 4, TOKENS, 100, None])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_blocks_are_exact(settings: dict[str, Any], rows: int | None) -> None:
    values = layer()
    target = IGNORED.where(IGNORED >= 0, settings.get("ignore_index", -100))
    total, whole = blocks(values, target, rows=rows, **settings), head(values, target, **settings)
    assert relative_error(total.sum, whole) <= LIMIT
    mean = head(values, target, reduction="mean", **settings)
    assert relative_error(total.mean(), mean) <= LIMIT
    found, expected = gradients(values, total.sum, 0.3), gradients(values, whole, 0.3)
    assert all(relative_error(a, b) <= LIMIT for a, b in zip(found, expected, strict=True))


def test_a_gradient_of_the_gradient_is_refused() -> None:
    values = layer()
    with pytest.raises(LossError, match=r"create_graph=True for .*F\.cross_entropy"):
        torch.autograd.grad(blocks(values, IGNORED).sum, values, create_graph=True)


def errors_against_float64(values: list[Tensor], target: Tensor, loss: Any) -> list[float]:
    """Of a mean loss and its gradients, against all logits at once in float64."""
    exact = [value.detach().double().requires_grad_() for value in values]
    whole = head(exact, target, reduction="mean")
    found, expected = [loss, *gradients(values, loss)], [whole, *gradients(exact, whole)]
    return [relative_error(a, b) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_short_dtypes_are_as_exact_as_with_all_logits(dtype: torch.dtype) -> None:
    values, target = layer(dtype, tokens=600), torch.randint(WORDS, (600,))
    total = blocks(values, target, rows=1)
    assert total.sum.dtype == torch.float32
    assert [value.dtype for value in gradients(values, total.sum / 600)] == [dtype] * 3
    ours = errors_against_float64(values, target, blocks(values, target, rows=1).mean())
    assert max(ours) <= tolerance(dtype, 600)
    if dtype != torch.float32:  # a weight's gradient, added up 600 times in bfloat16, is six times worse
        at_once = errors_against_float64(values, target, head(values, target, reduction="mean"))
        assert all(a <= 1.5 * b for a, b in zip(ours, at_once, strict=True))


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("body", ["float32", "autocast"])
def test_autocast_is_that_of_a_linear_layer(short: torch.dtype, body: str) -> None:
    hidden, weight, bias = layer(torch.float32)
    given = hidden if body == "float32" else hidden.to(short)
    with torch.autocast(device.KIND, dtype=short):
        total = linear_cross_entropy(given, weight, IGNORED, bias=bias, rows=4)
        assert total.sum.dtype == torch.float32
    values = [hidden, weight, bias]
    found = gradients(values, total.sum)
    assert [value.dtype for value in found] == [torch.float32] * 3
    exact = [value.detach().double().requires_grad_() for value in values]
    expected = gradients(exact, head(exact, IGNORED))
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    assert all(torch.finfo(torch.float32).eps < error <= tolerance(short, TOKENS) for error in errors)


H, W, Y = torch.zeros(4, 3), torch.zeros(6, 3), torch.zeros(4, dtype=torch.int64)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(4, 2)}, r"'hidden': \(4, 2\), 'weight': \(6, 3\)"),
    ({"bias": torch.zeros(5)}, r"\[\(5,\)\]"),
    ({"target": torch.zeros(4)}, r"int64, got torch\.float32"),
    ({"hidden": H.bfloat16()}, r"'torch\.bfloat16', 'torch\.float32'"),
    ({"label_smoothing": 1.5}, "from 0 to 1, got 1.5"),
    ({"rows": 0}, "at least 1, got 0"),
    ({"class_weight": torch.ones(6, requires_grad=True)}, "without gradient"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(LossError, match=message):
        linear_cross_entropy(**{"hidden": H, "weight": W, "target": Y} | changed)
