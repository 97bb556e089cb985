"""The loss scale: powers of two that give way by halves, and grow after many updates."""

import pytest
import torch
from torch import Tensor, nn

from anybatch import Precision, Step, Total
from anybatch.precision.loss_scale import FIRST_SCALE, MOST, PATIENCE, LossScale
from anybatch.precision.policy import find_precision
from anybatch.testing import GradientRecorder, relative_error, tolerance


def dynamic() -> LossScale:
    return LossScale(find_precision("fp16-mixed"))


def grown(scale: LossScale, updates: int) -> float:
    for _ in range(updates):
        scale.updated()
    return scale.value


def test_a_dynamic_one_gives_way_down_to_one_and_grows_after_many_updates() -> None:
    scale = dynamic()
    assert scale.value == FIRST_SCALE == 2.0**16
    assert [scale.value for _ in range(16) if scale.give_way()] == [2.0**n for n in range(15, -1, -1)]
    assert not scale.give_way()
    scale = dynamic()
    assert [grown(scale, PATIENCE - 1), grown(scale, 1)] == [FIRST_SCALE, 2 * FIRST_SCALE]
    assert grown(scale, PATIENCE - 1) == 2 * FIRST_SCALE
    scale.give_way()  # and the count begins anew
    assert grown(scale, 1) == FIRST_SCALE
    scale.begin()
    assert scale.value == FIRST_SCALE
    assert grown(dynamic(), 20 * PATIENCE) == MOST


def small(model: nn.Module, micro: tuple[Tensor]) -> Total:
    return Total(model(micro[0]).float().sum() * 2.0**-26, len(micro[0]))


@pytest.mark.parametrize("precision", ["mixed", "true"])
def test_small_gradients_vanish_without_it_and_not_with_it(precision: str) -> None:
    dtype = {"compute": "float16"} if precision == "mixed" else {"store": "float16"}
    for scale in (1.0, 2.0**10, "dynamic"):
        recorder = GradientRecorder(model := nn.Linear(2, 1, bias=False))
        precise = Precision(**dtype, loss_scale=scale)
        Step(model, small, recorder, precision=precise, micro_batch=1)((torch.ones(2, 2),))
        found = recorder.gradients["weight"]
        if scale == 1.0:
            assert found.count_nonzero() == 0
        else:
            assert relative_error(found, torch.full((1, 2), 2.0**-26)) <= tolerance(torch.float16, 2)
