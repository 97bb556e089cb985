"""Models that are lowered more than once: in parts, as parts, by several steps, or that were short before."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from anybatch import Options, Precision, Step, Total
from anybatch.core.errors import PlanError
from anybatch.precision.policy import find_precision

BF16, FP16 = find_precision("bf16-true"), find_precision("fp16-true")
NORMS = Precision(store="bfloat16", keep_float32=("LayerNorm",))
X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.ones(8, 2)


def squares(model: nn.Module, micro: Any) -> Total:
    return Total(((model(micro[0]) - micro[1]) ** 2).sum(), len(micro[0]))


def make_step(model: nn.Module, precision: Any, optimizer: Any = None, loss: Any = squares) -> Step:
    optimizer = optimizer or SGD(model.parameters(), lr=0.01)
    return Step(model, loss, optimizer, precision=precision, options=Options(check=False))


def trains(step: Step) -> bool:
    out = step.model(X)
    batch = X, torch.ones_like(out).detach()
    return out.dtype == torch.float32 and step(batch).loss > step(batch).loss


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    return nn.Sequential(encoder, nn.Linear(8, 2))


@pytest.mark.parametrize("outer", [BF16, NORMS], ids=str)
@pytest.mark.parametrize("inner", [BF16, NORMS], ids=str)
@pytest.mark.parametrize("is_first", [True, False], ids=["part first", "whole first"])
def test_a_part_and_the_whole_may_both_be_trained(inner: Precision, outer: Precision, is_first: bool) -> None:
    model = make_model()
    chosen = [(model[0], inner), (model, outer)]
    steps = [make_step(*one) for one in (chosen if is_first else chosen[::-1])]
    for step in (*steps, *reversed(steps)):
        assert trains(step)


@pytest.mark.parametrize("way", ["alternating", "made anew", "of a copy"])
def test_a_second_step_begins_where_the_first_one_stands(way: str) -> None:
    """100 updates of 1e-4 on a weight of 1: each by itself is lost in float16."""
    model, one = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    nn.init.ones_(model.weight)
    optimizer = SGD(model.parameters(), lr=1e-4, fused=True)
    slope = lambda model, micro: Total(model(micro[0]).sum(), len(micro[0]))  # noqa: E731
    step, other = (make_step(model, "fp16-true", optimizer, slope) for _ in range(2))
    if way == "of a copy":
        step = copy.deepcopy(step)
    expected = one.clone()
    for _ in range(100):
        step((one,))
        expected -= 1e-4
        again = make_step(step.model, "fp16-true", step.optimizers, slope)
        step, other = (other, step) if way == "alternating" else (again, step)
    weight = step.model.weight
    assert torch.equal(step.masters.of(weight), expected)
    assert torch.equal(weight, expected.half())


@pytest.mark.parametrize("second", ["float32", "tf32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize(("name", "dtype"), [("fp16-true", torch.float16), ("bf16-true", torch.bfloat16)])
def test_weights_stored_short_are_brought_back_first(name: str, dtype: torch.dtype, second: str) -> None:
    """Each update is less than half of what weights of 16 bits are apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3))
    optimizer = SGD(model.parameters(), lr=1e-5, momentum=0.9)
    batch = torch.rand(4, 3), torch.ones(4, 3)

    def make(precision: str) -> Step:
        return Step(model, nn.MSELoss(), optimizer, precision=precision, options=Options(batch_norm="micro"))

    step = make(name)
    step(batch)
    with pytest.raises(PlanError, match=f"an earlier step stores in {str(dtype)[6:]}") as caught:
        make(second)
    assert {one.dtype for one in model.parameters()} == {dtype}
    digits = [step.masters.of(p).clone() for p in model[2].parameters()]
    # As the message says it.
    done = "weights = step.masters.state_dict(model); model.float(); model.load_state_dict(weights)"
    assert done in str(caught.value)
    exec(done, {"step": step, "model": model})
    assert all(map(torch.equal, model[2].parameters(), digits))
    assert make(second)(batch).updated
    assert {one.dtype for one in model.parameters()} == {torch.float32}
