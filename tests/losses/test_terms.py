"""Losses of a user's own: totals by name, coefficients, promised weights."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch import Step, Terms, Total
from anybatch.check.check import check
from anybatch.core.errors import LossError
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests.check.conftest import unhurried as unhurried
from tests.options import flat

ROWS = 5
X = torch.randn(ROWS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def rows_and_size(model: nn.Module, micro: Tensor) -> dict[str, Total]:
    return {"mean": Total(model(micro).sum(), len(micro)), "size": Total(model.weight.square().sum(), 1.0)}


def rows(model: nn.Module, micro: Tensor) -> Total:
    return Total(model(micro).sum(), len(micro))


def take(loss: Any, batch: Any = X, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    model = nn.Linear(2, 1).double()
    recorder = GradientRecorder(model)
    step = Step(model, loss, recorder, **flat({"micro_batch": 2} | options))
    return step(batch), recorder.gradients


def test_each_term_is_reported_with_its_weight() -> None:
    report, _ = take(Terms(rows_and_size, coefficients={"size": 0.5}))
    assert report.terms.keys() == report.weights.keys() == {"mean", "size"}
    assert report.weights == {"mean": ROWS, "size": 3}  # one for each micro-batch
    expected = report.terms["mean"] + 0.5 * report.terms["size"]
    assert relative_error(report.loss, expected) <= tolerance(torch.float64, 2)


@pytest.mark.parametrize(
    ("made", "got"),
    [
        ({"coefficients": {"size": math.nan}}, "coefficient for 'size', got nan"),
        ({"coefficients": {"size": -math.inf}}, "coefficient for 'size', got -inf"),
        ({"function": 3}, "got int"),
        ({"weight": {"mean": ROWS}}, "got ['mean']. Name the same terms in both"),
        ({"weight": {"mean": ROWS, "size": 3, "more": 1}}, "got ['mean', 'more', 'size']"),
        ({"weight": {"mean": "5", "size": 3}}, "got str"),
        *(
            ({"function": rows, "weight": one}, f"add up to the batch's {int(one)} for 'loss', got {ROWS}")
            for one in (ROWS + 1, torch.tensor(ROWS - 1), float(ROWS) * 2)
        ),
    ],
    ids=range(9),
)
def test_terms_and_promises_that_do_not_fit_are_refused(made: dict[str, Any], got: str) -> None:
    weight = made.get("weight")
    made = {"function": rows_and_size} | made | {"weight": None if weight is None else lambda batch: weight}
    with pytest.raises(LossError, match=re.escape(got)):
        take(Terms(**made))


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (1.0, "got float"),
        (None, "got NoneType"),
        ([Total(1, 1)], "got list"),
    ],
    ids=str,
)
def test_a_bare_mean_is_refused_with_the_two_lines(returned: Any, got: str) -> None:
    with pytest.raises(LossError) as caught:
        take(lambda model, micro: returned)
    assert got in str(caught.value)
    assert 'losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")' in str(caught.value)
    assert "return ab.Total(losses.sum(), losses.numel())" in str(caught.value)


def test_the_promise_is_asked_with_the_batch_as_it_was_given() -> None:
    given: list[Any] = []

    def weigh(batch: Any) -> int:
        given.append(batch)
        return len(batch)

    samples = list(X)
    take(Terms(rows, weight=weigh), samples, collate=torch.stack)
    take(Terms(rows, weight=weigh), X)
    assert given[0] is samples
    assert given[1] is X
    take(Terms(rows, weight=weigh), X, micro_batch=None)  # uncut: the only micro-batch says it
    assert len(given) == 2


def test_numbers_are_as_exact_as_they_are() -> None:
    tenth = lambda model, micro: {"fit": rows(model, micro), "tenth": Total(0.1 * len(micro), len(micro))}  # noqa: E731
    assert relative_error(take(tenth)[0].terms["tenth"], 0.1) <= tolerance(torch.float64, ROWS)


def test_nothing_in_the_first_micro_batch_is_no_loss_of_digits() -> None:
    """What flows back has the dtype of the first sum, and that may be a number."""

    def late(model: nn.Module, micro: Tensor) -> Total:
        return Total.zero() if torch.equal(micro, X[:2]) else Total(model(micro).sum(), len(micro))

    _, gradients = take(Terms(late, weight=lambda batch: 3), check=False)
    expected = {"weight": X[2:].mean(0, keepdim=True), "bias": torch.ones(1)}
    assert relative_error(gradients, expected) <= tolerance(torch.float64, ROWS)


OTHERWISE = [
    lambda a, b: (a - b).mean(),
    lambda a, b: nn.functional.mse_loss(a, b),
    lambda a: a.mean(),
    lambda x, target: target.long(x),
    lambda logits, micro: micro.long(logits),
]


@pytest.mark.parametrize("loss", OTHERWISE, ids=range(5))
@pytest.mark.parametrize("inner", [False, True], ids=["step", "check"])
def test_a_function_of_outputs_and_targets_is_told_how_it_is_called(loss: Any, *, inner: bool) -> None:
    with pytest.raises((TypeError, AttributeError)) as caught:
        check(nn.Linear(2, 1), loss, X.float()) if inner else take(loss)
    note, *_ = caught.value.__notes__
    assert "as loss(model, micro), not as loss(outputs, targets)" in note
    assert "pass ab.PerRow(loss); if a mean, pass ab.ModelLoss(call=lambda model, micro: " in note
    assert "Else pass a loss of torch, such as nn.CrossEntropyLoss()" in note
    assert "return ab.Total(losses.sum(), losses.numel())" in note


@pytest.mark.parametrize("loss", OTHERWISE[:2], ids=range(2))
def test_a_mean_in_model_loss_is_told_how_it_is_called(loss: Any) -> None:
    with pytest.raises((TypeError, AttributeError)) as caught:
        take(ab.ModelLoss(call=loss))
    assert "as loss(model, micro), not as loss(outputs, targets)" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("value", "came"),
    [
        (lambda out: 1.0, "float"),
        (lambda out: Total(out.sum(), 1), "Total"),
        (lambda out: out, r"a tensor of shape \(\d, 1\)"),
        (lambda out: out.detach().mean(), r"a tensor of shape \(\), torch.float64"),
    ],
    ids=range(4),
)
def test_what_is_no_mean_is_told_in_model_loss(value: Any, came: str) -> None:
    with pytest.raises(LossError, match=rf"function in ab\.ModelLoss\(call=\.\.\.\), got {came}"):
        take(ab.ModelLoss(call=lambda model, micro: value(model(micro))))


def test_an_error_inside_of_a_wrapper_is_told_as_it_was_called() -> None:
    class Two(nn.Linear):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return super().forward(a) + b

    step = ab.Step(two := Two(2, 1), ab.PerRow(lambda out: out), torch.optim.SGD(two.parameters(), lr=0.1))
    with pytest.raises(TypeError) as caught:
        step((X.float(),))
    assert "anybatch called Two with" in caught.value.__notes__[0]
    step = ab.Step(two, lambda model, micro: model(micro), torch.optim.SGD(two.parameters(), lr=0.1))  # pyright: ignore
    with pytest.raises(TypeError) as other:
        step(X.float())
    assert "as loss(model, micro), not" not in "".join((*caught.value.__notes__, *other.value.__notes__))


def test_other_errors_of_a_function_stay_as_they_are() -> None:
    def mistaken(model: nn.Module, micro: Tensor) -> Total:
        return Total(model(micro).sum(), micro.rows)  # type: ignore[attr-defined]

    for loss in (mistaken, lambda out, y: {}["missing"]):
        with pytest.raises((AttributeError, KeyError)) as caught:
            take(loss)
        assert "as loss(model, micro)" not in "".join(caught.value.__notes__)
