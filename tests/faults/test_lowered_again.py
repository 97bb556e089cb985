"""Models that are lowered more than once: in parts, as parts, by several steps, or that were short before."""

import copy
import gc
import threading
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import anybatch as ab
from anybatch import Options, Precision, Step, Total
from anybatch.core.errors import PlanError
from anybatch.precision.apply import lower
from anybatch.precision.policy import find_precision
from tests.zoo import Made

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


# ---- one inside another


@pytest.mark.parametrize("outer", [BF16, NORMS], ids=str)
@pytest.mark.parametrize("inner", [BF16, NORMS], ids=str)
@pytest.mark.parametrize("is_first", [True, False], ids=["part first", "whole first"])
def test_a_part_and_the_whole_may_both_be_trained(inner: Precision, outer: Precision, is_first: bool) -> None:
    model = make_model()
    chosen = [(model[0], inner), (model, outer)]
    steps = [make_step(*one) for one in (chosen if is_first else chosen[::-1])]
    for step in (*steps, *reversed(steps)):
        assert trains(step)


def lowered() -> tuple[nn.Sequential, nn.Module]:
    """A model of which a part is lowered, too, and another one."""
    model, other = make_model(), nn.Linear(4, 2)
    for one in (model[0], model, other):
        lower(one, BF16, [])
    return model, other


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_every_model_casts_again(error: type[BaseException]) -> None:
    model, other = lowered()
    handle = model[0][1].register_forward_hook(Mock(side_effect=error))
    with pytest.raises(error):
        model(X)
    handle.remove()
    assert [one(X).dtype for one in (other, model[0], model)] == [torch.float32] * 3


def test_only_the_outermost_casts_and_threads_do_not_meet() -> None:
    """Between two parts values stay short, while another model begins in another thread."""
    (model, other), found = lowered(), []

    def look(_: nn.Module, args: Any) -> None:
        found.append(args[0].dtype)
        thread = threading.Thread(target=lambda: found.append(other(X).dtype))
        thread.start()
        thread.join()

    model[1].register_forward_pre_hook(look)
    assert model(X).dtype == model[0](X).dtype == torch.float32
    assert found == [torch.bfloat16, torch.float32]


def test_another_model_may_be_asked_in_between() -> None:
    """A teacher, which is no part of it and is stored in another dtype."""
    teacher = nn.Linear(4, 2)
    lower(teacher, FP16, [])
    layers = {"linear": nn.Linear(4, 4), "head": nn.Linear(2, 2)}
    student = Made(lambda self, x: self.head(self.others[0](self.linear(x))), others=[teacher], **layers)
    lower(student, BF16, [])
    assert student(X).dtype == torch.float32


@pytest.mark.parametrize("is_whole", [True, False], ids=["model.compile()", "torch.compile(model)"])
def test_lowered_models_may_be_compiled(is_whole: bool) -> None:
    torch.compiler.reset()
    model = make_model()
    if not is_whole:
        lower(model[0], NORMS, [])
    expected = copy.deepcopy(model)
    compiled: Any = model if is_whole else torch.compile(model, backend="eager", fullgraph=True)
    for one in (expected, compiled):
        lower(one, NORMS, [])
    if is_whole:
        model.compile(backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(X), expected(X))
    torch.compiler.reset()


@pytest.mark.parametrize(("first", "then"), [(NORMS, BF16), (BF16, NORMS)], ids=["kept first", "kept then"])
def test_what_stays_in_float32_may_change_and_gets_its_digits_back(first: Precision, then: Precision) -> None:
    model = make_model()
    norm = model[0][1]
    nn.init.constant_(norm.weight, 0.3)  # no short dtype holds it
    norm.register_buffer("shift", torch.ones(8))
    digits = norm.weight.detach().clone()
    before = make_step(model, first)
    after = make_step(model, then)
    dtype = torch.float32 if then is NORMS else torch.bfloat16
    assert (norm.weight.dtype, norm.shift.dtype) == (dtype, dtype)
    assert torch.equal(norm.weight, digits.to(dtype))
    assert ("forward" in vars(norm)) == (then is NORMS)
    for step in (after, before):
        assert trains(step)
    if then is NORMS:
        assert torch.equal(before.masters.of(norm.weight), norm.weight)


# ---- one backup for all


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


def test_what_was_written_meanwhile_counts_for_all_and_nothing_is_kept_once_they_are_gone() -> None:
    model = make_model()
    first = make_step(model, BF16)
    weight = model[1].weight
    digits = first.masters.of(weight).clone()
    with torch.no_grad():
        weight[0] = digits[0] = 0.5
    second = make_step(model, BF16)
    for step in (first, second):
        assert torch.equal(step.masters.of(weight), digits)
    assert first.masters.tensors[0] is second.masters.tensors[0]
    del first, second, step
    gc.collect()
    again = make_step(model, BF16)
    assert all(torch.equal(again.masters.of(one), one.float()) for one in model.parameters())


@pytest.mark.parametrize("precision", ["fp16-true", NORMS], ids=str)
def test_a_plan_in_another_precision_takes_no_digit(precision: str | Precision) -> None:
    model = make_model()
    step = make_step(model, BF16)
    before = [one.clone() for one in step.masters.tensors]
    result = model(X)
    optimizer = torch.optim.Adagrad(model.parameters())
    ab.plan(model, squares, optimizer, (X, Y), precision=precision)
    assert torch.equal(model(X), result)
    assert all(map(torch.equal, map(step.masters.of, model.parameters()), before))
    assert {slots["sum"].dtype for slots in optimizer.state.values()} == {torch.bfloat16}


# ---- made short by others


def dtypes(of: Any) -> set[torch.dtype]:
    """Of the parameters of a model, or the state of an optimizer."""
    if isinstance(of, nn.Module):
        return {parameter.dtype for parameter in of.parameters()}
    values = [value for slots in of.state.values() for value in slots.values()]
    return {value.dtype for value in values if isinstance(value, Tensor)}


@pytest.mark.parametrize("precision", [BF16, FP16, NORMS], ids=str)
@pytest.mark.parametrize("kind", [partial(SGD, momentum=0.9), torch.optim.Adam, torch.optim.Adagrad])
def test_an_optimizer_with_short_state_goes_on_in_float32(kind: Any, precision: Precision) -> None:
    model = make_model().bfloat16()
    optimizer = kind(model.parameters(), lr=0.01)
    model(X.bfloat16()).sum().backward()
    optimizer.step()  # of a plain loop
    optimizer.zero_grad()
    assert make_step(model, precision, optimizer)((X, Y)).updated
    assert dtypes(optimizer) == {torch.float32}


# ---- made as it was again

STORED = "Expected a model that stores its weights as it was made, got one that an earlier step stores in "


@pytest.mark.parametrize("second", ["float32", "tf32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize(("name", "dtype"), [("fp16-true", torch.float16), ("bf16-true", torch.bfloat16)])
def test_weights_that_an_earlier_step_stores_short_are_brought_back_first(
    name: str, dtype: torch.dtype, second: str
) -> None:
    """Each update is less than half of what weights of 16 bits are apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3))
    optimizer = SGD(model.parameters(), lr=1e-5, momentum=0.9)
    batch = torch.rand(4, 3), torch.ones(4, 3)

    def make(precision: str) -> Step:
        return Step(model, nn.MSELoss(), optimizer, precision=precision, options=Options(batch_norm="micro"))

    step = make(name)
    step(batch)
    with pytest.raises(PlanError, match=STORED + str(dtype)[6:]) as caught:
        make(second)
    assert dtypes(model) == {dtype}
    digits = [step.masters.of(p).clone() for p in model[2].parameters()]
    # As the message says it.
    done = "weights = step.masters.state_dict(model); model.float(); model.load_state_dict(weights)"
    assert done in str(caught.value)
    exec(done, {"step": step, "model": model})
    assert all(map(torch.equal, model[2].parameters(), digits))
    assert make(second)(batch).updated
    assert not any(map(torch.equal, model[2].parameters(), digits))
    assert dtypes(model) == {torch.float32}
    assert model(torch.ones(2, 3)).dtype == torch.float32


def test_a_short_model_of_the_callers_and_a_part_that_nobody_trains_are_left_as_they_are() -> None:
    own, model = nn.Linear(4, 2).bfloat16(), make_model()
    lower(model[0], BF16, [])
    for one, trained in ((own, own), (model, model[1])):
        lower(one, find_precision("float32"), trained.parameters())
    assert dtypes(own) == dtypes(model[0]) == {torch.bfloat16}
    assert model(X).dtype == torch.float32
