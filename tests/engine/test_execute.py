"""A plan carried out: what is reported, what is divided, what is put back."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step, Terms, Total
from tests.options import flat
from tests.zoo import Made

X = torch.tensor([1.0, 2.0, 3.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 4.0])  # a cut of 3 has one that weighs 0


def scale() -> Any:
    """Return x -> w x, so that gradients can be written down; and a parameter that nothing uses."""
    parts = {"w": nn.Parameter(torch.tensor(2.0)), "unused": nn.Parameter(torch.tensor(1.0))}
    return Made(lambda self, x: self.w * x, **parts)


def terms(model: Any, x: Tensor) -> Mapping[str, Total]:
    valid = x > 0
    return {
        "fit": Total((model(x) * valid).sum(), valid.sum()),
        "size": Total(model.w.square() * len(x), len(x)),
        "seen": Total(7.0, 1) if x[0] == 1 else Total.zero(),  # a number, and from one micro-batch
        "odd": Total((model.w - model.w).sqrt(), (x == 1).sum()),  # its gradient is NaN
        "none": Total(model.w * 5, (x > 9).sum()),  # weighs nothing, so it counts for nothing
    }


def weights(x: Tensor) -> Mapping[str, Tensor | int]:
    return {"fit": (x > 0).sum(), "size": len(x), "seen": 1, "odd": 1, "none": (x > 9).sum()}


@pytest.mark.parametrize("options", [{}, {"accumulate": torch.float64}], ids=str)
@pytest.mark.parametrize("weight", [None, weights], ids=["late", "promised"])
@pytest.mark.parametrize("micro_batch", [1, 3, 4, 10])
def test_each_term_is_divided_by_its_own_weight(micro_batch: int, weight: Any, options: Any) -> None:
    model, seen = scale(), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    noted = lambda *_: seen.extend(p.grad and p.grad.item() for p in model.parameters())  # noqa: E731
    optimizer.register_step_pre_hook(noted)
    loss = Terms(terms, coefficients={"size": 0.5, "seen": 0.0, "odd": 0.0}, weight=weight)
    report = Step(model, loss, optimizer, micro_batch=micro_batch, **flat(options, check=False))(X)
    assert seen == [2.5 + 0.5 * 4, None]
    assert model.w.grad is None
    assert report.weights == {"fit": 4, "size": 10, "seen": 1, "odd": 1, "none": 0}
    assert report.loss == 5.0 + 0.5 * 4
    assert (report.rows, sum(report.cut), report.updated) == (10, 10, True)
    values = dict(report.terms)
    assert math.isnan(values.pop("none"))
    assert values == {"fit": 5.0, "size": 4.0, "seen": 7.0, "odd": 0.0}
