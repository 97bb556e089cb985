"""Parameter servers: what is refused, and how."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.observe import GradientNoise
from anybatch.parallel import ParameterServer
from tests.options import flat
from tests.parallel.inline import Inline
from tests.parallel.test_server import batch, network


def test_workers_that_have_nothing_to_do_are_told_of() -> None:
    with pytest.warns(UserWarning, match="got workers=3 and units=2"):
        ParameterServer(workers=3, units=2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"loss": ab.WholeBatch(lambda o, y: o.sum())}, "got WholeBatch"),
        ({"optimizer": torch.optim.Adafactor}, "updates each element by itself, got Adafactor"),
        ({"model": network().bfloat16()}, "got \\['bfloat16'\\]"),
        ({"non_finite": "skip"}, "non_finite='skip'"),
        ({"clip_value": 1.0}, "got clip_value=, .* Leave it out"),
        ({"precision": "fp16-mixed"}, "a loss scale"),
        ({"callbacks": [GradientNoise()]}, "got callbacks of gradients .* only workers have. Leave it out"),
        (
            {"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()},
            r"BatchNorm .*Pass Options\(batch",
        ),
    ],
)
def test_what_workers_cannot_do(change: dict[str, Any], match: str) -> None:
    cluster = Inline(0)
    given: dict[str, Any] = {"model": network(), "loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD}
    given |= change
    model = given.pop("model")
    optimizer = given.pop("optimizer")(model.parameters(), lr=0.1)
    step = ab.Step(
        model, given.pop("loss"), optimizer, **flat(given, strategy=ParameterServer(cluster=cluster))
    )
    with pytest.raises(ab.AnybatchError, match=match):
        step(batch())


def test_a_window_is_refused() -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(
        model, nn.CrossEntropyLoss(), sgd, options=ab.Options(strategy=ParameterServer(cluster=Inline(0)))
    )
    with pytest.raises(ab.AnybatchError, match="Expected whole batches with a ParameterServer"):
        step.window()


def test_a_worker_with_another_model_is_refused() -> None:
    """Its code is another one where it is copied to."""

    class Changed(nn.Linear):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            other = nn.Linear(4, 3).double()
            memo |= {id(self.weight): other.weight, id(self.bias): other.bias}
            return nn.Sequential(other)

    model = Changed(4, 3).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(
        model, nn.CrossEntropyLoss(), sgd, options=ab.Options(strategy=ParameterServer(cluster=Inline(0)))
    )
    with pytest.raises(ab.AnybatchError, match="same model on all workers"):
        step(batch())
