"""Precision: names, what is refused at the door, and torch's switches put back."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Precision, Step
from anybatch.core.errors import NonFiniteLossError, PlanError
from anybatch.precision.policy import NAMED, find_precision
from tests import device
from tests.options import flat
from tests.train.runs import raising
from tests.zoo import Made

MATMUL: Any = torch.backends.cuda.matmul
BATCH = torch.ones(4, 2), torch.zeros(4, 1)
SHORT_SUMS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    *(["allow_fp16_accumulation"] if hasattr(MATMUL, "allow_fp16_accumulation") else []),
)
CUDNN: Any = torch.backends.cudnn
# Before torch 2.9: two flags.
NEW = hasattr(CUDNN, "conv")
TF32, WORD, NO_WORD = ("fp32_precision", "tf32", "ieee") if NEW else ("allow_tf32", True, False)
HOLDERS = [MATMUL, *([CUDNN.conv, CUDNN.rnn] if NEW else [CUDNN])]


def switches() -> dict[str, Any]:
    return {
        **{name: getattr(MATMUL, name) for name in SHORT_SUMS},
        "tf32": [getattr(holder, TF32) for holder in HOLDERS],
        "autocast": [torch.is_autocast_enabled(kind) for kind in (device.KIND, "xpu")],
        "autocast dtype": [torch.get_autocast_dtype(kind) for kind in (device.KIND, "xpu")],
        "autocast cache": torch.is_autocast_cache_enabled(),
    }


@pytest.fixture(params=[False, True], ids=["as found", "the other way"])
def before(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Switches as torch has them, or as a caller may have set them."""
    wanted = [(MATMUL, name, True) for name in SHORT_SUMS]
    wanted += [(holder, TF32, NO_WORD) for holder in HOLDERS[1:]]
    found = [(holder, name, getattr(holder, name)) for holder, name, _ in wanted]
    for holder, name, value in wanted if request.param else ():
        setattr(holder, name, value)
    yield switches()
    for holder, name, value in found:
        setattr(holder, name, value)


def looking(precision: Any, **options: Any) -> tuple[Step, Any]:
    """Return a step of a model that reads the switches while it runs, in the forward and in the backward."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.seen.append(switches())
        if out.requires_grad:
            out.register_hook(lambda gradient: self.seen.append(switches()))
        return out

    model = Made(forward, linear=nn.Linear(2, 1), seen=[])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step(model, nn.MSELoss(), optimizer, precision=precision, **flat(options)), model


def carried_out(step: Step, *, windowed: bool) -> None:
    if not windowed:
        step(BATCH)
        return
    with step.window() as window:
        before = switches()
        window.add(BATCH)
        assert switches() == before


@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("precision", [*NAMED])
def test_switches_hold_within_a_step_and_are_put_back_whatever_happens(
    precision: str, windowed: bool, before: dict[str, Any]
) -> None:
    step, model = looking(precision, micro_batch=2)
    carried_out(step, windowed=windowed)
    assert switches() == before
    for index, seen in enumerate(model.seen):
        is_short = find_precision(precision).is_short
        assert [seen[name] for name in SHORT_SUMS] == [not is_short and before[name] for name in SHORT_SUMS]
        assert seen["tf32"] == ([WORD] * len(HOLDERS) if precision == "tf32" else before["tf32"])
        assert seen["autocast"] == [index % 2 == 0 and precision.endswith("mixed"), False]  # in a forward
    for error in (RuntimeError("the model's own"), KeyboardInterrupt()):
        handle = model.linear.register_forward_hook(lambda *_, error=error: raising(error)())
        with pytest.raises(type(error)):
            carried_out(step, windowed=windowed)
        handle.remove()
        assert switches() == before
    with pytest.raises(NonFiniteLossError):
        step((torch.full((4, 2), math.nan), BATCH[1]))
    assert switches() == before


@pytest.mark.parametrize(("values", "message"), [
    ({"store": "float32"}, "store to be one of .* got 'float32'"),
    ({"store": "float16", "compute": "bfloat16"}, "computed with in float16, got compute='bfloat16'"),
    ({"accumulate": "int32"}, "accumulate to name a floating dtype, got 'int32'"),
    ({"keep_float32": ("LayerNorm",)}, r"a shorter dtype beside keep_float32, .*got \['LayerNorm'\]"),
    ({"store": "float16", "keep_float32": "LayerNorm"}, "a list of patterns.* got 'LayerNorm'"),
    *(({"loss_scale": one}, f"a power of two.* got {one!r}") for one in (3, 0.5, "static")),
], ids=str)  # fmt: skip
def test_what_cannot_be_carried_out_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=rf"^Expected (.|\n)*{message}(.|\n)*\. "):  # and then what to do
        Precision(**values)
