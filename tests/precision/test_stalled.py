"""What a forward writes to in 16 bits is told once, and nothing else is."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Precision, Step, Total
from anybatch.precision.apply import lower
from anybatch.precision.policy import find_precision

BF16 = find_precision("bf16-true")
TOLD = "Expected no steps in 16 bits, where small ones vanish, got a forward that writes to "


class Counted(nn.Module):
    """Writes to what it holds as it is told."""

    def __init__(self, write: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.linear, self.key = nn.Linear(2, 2), nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self)
        return self.linear(x)


def add(module: Any) -> None:
    module.seen += 1


def replace(module: Any) -> None:
    module.seen = module.seen + 1


def average(module: Any) -> None:
    module.key.weight.mul_(0.999)


def average_data(module: Any) -> None:
    module.key.weight.data = module.key.weight.data * 0.999


def count(module: Any) -> None:
    module.calls += 1


def lengthen(module: Any) -> None:
    module.seen = module.seen.float() + 1


def cache(module: Any) -> None:
    if module.seen.dim() == 0:
        module.seen = torch.ones(2, dtype=module.seen.dtype)


def nothing(module: Any) -> None:
    pass


def told(model: nn.Module, calls: int = 4) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(calls):
            model(torch.ones(2, 2))
    return [str(one.message) for one in found]


@pytest.mark.parametrize(
    ("write", "name"),
    [(add, "seen"), (replace, "seen"), (average, "key.weight"), (average_data, "key.weight")],
)
@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true"])
def test_what_is_written_to_is_told_once(write: Any, name: str, precision: str) -> None:
    model = nn.Sequential(Counted(write))
    lower(model, find_precision(precision), model[0].linear.parameters())
    message = f"{TOLD}'0.{name}', stored in {find_precision(precision).store}."
    found = told(model)
    assert len(found) == 1
    assert found[0].startswith(message)
    assert f"in keep_float32, as in ['{'0' if name == 'seen' else '0.key'}']" in found[0]
    assert told(model) == []


@pytest.mark.parametrize("write", [count, lengthen, cache, nothing])
def test_nothing_else_is(write: Any) -> None:
    """Whole numbers, what has become long by itself, and tables that are made in the first call."""
    model = nn.Sequential(Counted(write))
    lower(model, BF16, model[0].linear.parameters())
    assert told(model) == []


def test_what_the_model_itself_holds_needs_a_module_of_its_own() -> None:
    model = Counted(add)
    lower(model, BF16, [])
    assert [one.partition(". ")[2] for one in told(model)] == [
        "Put it into a module of its own, and name that in keep_float32."
    ]


@pytest.mark.parametrize("kept", ["0", "0.key"])
def test_the_way_out_is_one(kept: str) -> None:
    model = nn.Sequential(Counted(average if kept == "0.key" else add))
    lower(model, Precision(store="bfloat16", keep_float32=(kept,)), [])
    assert told(model) == []


@pytest.mark.parametrize("name", ["float32", "bf16-mixed", "fp16-mixed"])
def test_what_is_not_stored_short_is_not_looked_at(name: str) -> None:
    model = nn.Sequential(Counted(add))
    lower(model, find_precision(name), [])
    assert told(model) == []


def test_evaluation_does_not_count() -> None:
    model = nn.Sequential(Counted(add))
    lower(model, BF16, [])
    assert told(model.eval()) == []
    assert len(told(model.train())) == 1


def test_a_call_that_fails_does_not_count() -> None:
    def fail(module: Any) -> None:
        raise ValueError("no rows")

    model = nn.Sequential(Counted(fail))
    lower(model, BF16, [])
    for _ in range(3):
        with pytest.raises(ValueError, match="no rows"):
            model(torch.ones(2, 2))
    model[0].write = add
    assert len(told(model)) == 1


def test_a_copy_is_told_by_itself() -> None:
    model = nn.Sequential(Counted(add))
    lower(model, BF16, [])
    twin = copy.deepcopy(model)
    assert [len(told(one)) for one in (model, twin)] == [1, 1]


def squares(model: nn.Module, micro: Any) -> Total:
    return Total(model(micro[0]).square().sum(), len(micro[0]))


@pytest.mark.parametrize("options", [{}, {"memory": "1GiB"}, {"recompute": {"0": "recompute"}}], ids=str)
def test_a_step_tells_it_once_however_it_was_planned(options: dict[str, Any]) -> None:
    """What a trace or a measurement runs before is none of the first calls."""
    model = nn.Sequential(Counted(add), nn.Linear(2, 1))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step = Step(model, squares, optimizer, precision="bf16-true", check=False, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            step((torch.ones(4, 2),))
    assert [str(one.message).startswith(TOLD) for one in found] == [True]
