"""The loss scale: powers of two that give way by halves, and grow after many updates."""

import math

import pytest
import torch
from torch import Tensor, nn

from anybatch import Precision, Step, Total
from anybatch.precision.loss_scale import FIRST_SCALE, MOST, PATIENCE, LossScale
from anybatch.precision.policy import find_precision
from anybatch.testing import GradientRecorder, relative_error, tolerance


def dynamic() -> LossScale:
    return LossScale(find_precision("fp16-mixed"))


@pytest.mark.parametrize(
    ("precision", "value", "is_dynamic"),
    [
        (Precision(), 1.0, False),
        (find_precision("bf16-true"), 1.0, False),
        (find_precision("fp16-mixed"), FIRST_SCALE, True),
        (find_precision("fp16-true"), FIRST_SCALE, True),
        (Precision(compute="float16", loss_scale=1024), 1024.0, False),
        (Precision(loss_scale="dynamic"), FIRST_SCALE, True),
    ],
    ids=str,
)
def test_where_it_begins(precision: Precision, value: float, is_dynamic: bool) -> None:
    scale = LossScale(precision)
    assert (scale.value, scale.is_dynamic) == (value, is_dynamic)


def test_it_gives_way_down_to_one() -> None:
    scale = dynamic()
    values = []
    while scale.give_way():
        values.append(scale.value)
        assert math.frexp(scale.value)[0] == 0.5
    assert values == [2.0**power for power in range(15, -1, -1)]
    assert scale.value == 1.0
    assert not scale.give_way()


def test_only_a_fixed_one_begins_anew() -> None:
    fixed, following = LossScale(Precision(compute="float16", loss_scale=8.0)), dynamic()
    for scale, after in ((fixed, 8.0), (following, FIRST_SCALE / 2)):
        assert scale.give_way()
        scale.begin()
        assert scale.value == after


def test_it_grows_after_many_updates_without_overflow() -> None:
    scale = dynamic()
    for _ in range(PATIENCE - 1):
        scale.updated()
    assert scale.value == FIRST_SCALE
    scale.updated()
    assert scale.value == 2 * FIRST_SCALE
    for _ in range(PATIENCE - 1):
        scale.updated()
    assert scale.value == 2 * FIRST_SCALE
    scale.give_way()  # and the count begins anew
    scale.updated()
    assert scale.value == FIRST_SCALE


def test_it_grows_no_further_than_float32_sums_bear() -> None:
    scale = dynamic()
    for _ in range(20 * PATIENCE):
        scale.updated()
    assert scale.value == MOST


def test_a_fixed_one_never_grows() -> None:
    scale = LossScale(Precision(compute="float16", loss_scale=4.0))
    for _ in range(PATIENCE + 1):
        scale.updated()
    assert scale.value == 4.0


def test_a_loaded_one_goes_on_where_it_was() -> None:
    scale, other = dynamic(), dynamic()
    scale.give_way()
    for _ in range(PATIENCE - 1):
        scale.updated()
    other.load(scale.state())
    assert other.state() == scale.state()
    for one in (scale, other):
        one.updated()
        assert one.value == FIRST_SCALE


def test_updates_are_counted_by_steps() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = Step(model, nn.MSELoss(), optimizer, precision="fp16-mixed", micro_batch=2)
    step.scale.load({"value": 4.0, "clean": PATIENCE - 1})
    batch = torch.randn(6, 2), torch.randn(6, 1)
    assert step(batch).scale == 8.0
    assert step(batch).scale == 8.0


def small(model: nn.Module, micro: tuple[Tensor]) -> Total:
    return Total(model(micro[0]).float().sum() * 2.0**-26, len(micro[0]))


@pytest.mark.parametrize("precision", ["mixed", "true"])
def test_small_gradients_vanish_without_it_and_not_with_it(precision: str) -> None:
    """Of 2^-26, which float16 does not hold: its smallest number is 2^-24."""
    dtype = {"compute": "float16"} if precision == "mixed" else {"store": "float16"}
    found = {}
    for scale in (1.0, 2.0**10, "dynamic"):
        model = nn.Linear(2, 1, bias=False)
        recorder = GradientRecorder(model)
        setting = Precision(**dtype, loss_scale=scale)
        step = Step(model, small, recorder, precision=setting, micro_batch=1)
        step((torch.ones(2, 2),))
        found[scale] = recorder.gradients["weight"]
    assert found[1.0].count_nonzero() == 0
    for scale in (2.0**10, "dynamic"):
        error = relative_error(found[scale], torch.full((1, 2), 2.0**-26))
        assert error <= tolerance(torch.float16, 2)
