"""The self-test: what it finds and says, what it replays, and that it leaves everything as it was."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Total, check
from anybatch.core import BatchError, LossError, PlanError
from tests.corpus.case import layer
from tests.options import flat
from tests.zoo import Perceptron

ROWS = 12


def rows(outputs: int = 2, count: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 5), torch.randn(count, outputs)


def sum_of_squares(model: nn.Module, micro: Any) -> Total:
    x, y = micro
    errors = (model(x) - y).square()
    return Total(errors.sum(), errors.numel())


def computed(function: Callable[[Tensor], Any]) -> nn.Module:
    return layer("Computed", function)


def centred() -> nn.Module:
    return computed(lambda x: x - x.mean(0))


def kinds(model: nn.Module, loss: Any, batch: Any, **more: Any) -> list[tuple[str, str]]:
    """Of each finding its kind and its culprit."""
    report = check(model, loss, batch, **more)
    assert report.exact == (not report.findings)
    return [(finding.kind, finding.culprit) for finding in report.findings]


def test_report_in_words_and_in_json() -> None:
    exact = check(Perceptron(5, 2), nn.MSELoss(), rows(), rows=5)
    assert str(exact).startswith("exact: split equals whole on 5 rows, cut as 2+2+1, 3+2 and 1 by 1")
    broken = check(nn.Sequential(*[nn.BatchNorm1d(5) for _ in range(12)]), nn.MSELoss(), rows(5))
    told = json.loads(broken.to_json())
    assert (told["exact"], told["findings"][0]["kind"], len(told["findings"])) == (False, "meeting", 1)
    assert str(broken).startswith("NOT exact: gradient error ")
    assert "\n  meeting: 0, 1, 2 and 9 more (BatchNorm1d)\n    `0` normalises by mean" in str(broken)


@pytest.mark.parametrize(
    ("options", "count"), [({"rows": 5}, 5), ({"micro_batch": 7}, 20), ({"rows": 100}, 20), ({}, 20)]
)
def test_rows_as_asked(options: dict[str, Any], count: int) -> None:
    assert check(Perceptron(5, 2), nn.MSELoss(), rows(2, 20), **options).rows == count


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch": (torch.zeros(1, 5), torch.zeros(1, 2))}, BatchError, "at least 2 rows"),
        ({"batch": (torch.zeros(3), torch.zeros(2))}, BatchError, "rows"),
        ({"micro_batch": 0}, PlanError, "micro_batch"),
        ({"batch_norm": "half"}, PlanError, "batch_norm"),
        ({"loss": nn.Identity()}, LossError, "Identity"),
        ({"loss": lambda m, micro: Total(0 * m(micro[0]).sum(), 0)}, BatchError, "whose weight is 0"),
        ({"model": nn.Identity()}, PlanError, "trainable parameters"),
        ({"model": nn.Sequential(nn.Linear(5, 2), torch.jit.ScriptModule())}, PlanError, "TorchScript at 1"),
    ],
)
def test_what_no_step_takes_is_refused(arguments: Any, error: Any, message: str) -> None:
    given = {"model": Perceptron(5, 2), "loss": nn.MSELoss(), "batch": rows()} | arguments
    with pytest.raises(error, match=message):
        check(**flat(given))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout and noise": lambda x: F.dropout(x, 0.3) + torch.randn_like(x) + torch.rand(x.shape),
    "dropout of heads": lambda x: F.dropout(x.repeat_interleave(3, 0), 0.5).view(len(x), -1),
    "dropout by time": lambda x: F.dropout(x.repeat(3, 1, 1), 0.5).transpose(0, 1),
    "normal": lambda x: x.clone().normal_() + torch.normal(x, 1.0),
    "whole numbers": lambda x: torch.randint(0, 1000, x.shape),
    "coins": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "classes": lambda x: torch.multinomial(torch.ones(len(x), 50), 5),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[:, None].double()] * 3, dropout_p=0.5),
    "noise of a distribution": lambda x: torch.distributions.Gamma(torch.ones_like(x), 1.0).sample(),
    "one number for all": lambda x: x * torch.rand(()),
    "in one kernel": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "slopes": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_rows_keep_the_numbers_that_were_drawn_for_them(draw: Callable[[Tensor], Tensor]) -> None:
    noise = computed(lambda x: x + draw(x).to(x.dtype).flatten(1)[:, :5])
    report = check(nn.Sequential(nn.Linear(5, 5), noise, Perceptron(5, 2)), nn.MSELoss(), rows())
    assert report.exact, str(report)
    assert report.notes == ()
    assert (report.dtype, report.cuts) == ("float64", ("5+5+2", "7+5", "1 by 1"))
    assert report.error <= report.limit
