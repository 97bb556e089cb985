"""Fake tensors in place of real ones, and likely values."""

import gc
import logging
import logging.handlers
import random
import warnings
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from anybatch import Step, Total
from anybatch.core.batch import TensorBatch
from anybatch.core.errors import TraceError
from anybatch.engine.plan import Plan
from anybatch.memory.fake import (
    FakeMode,
    Fakes,
    drop_left_fakes,
    likely_value,
    replaced_by_fakes,
    undisturbed,
)
from anybatch.memory.meter import Meter
from anybatch.planner.trace import trace
from tests.recompute.models import streams
from tests.snapshots import same


class Holder(nn.Module):
    """Tensors in all the places where modules keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.recurrent = nn.Linear(3, 3), nn.Linear(3, 3), nn.LSTM(3, 3)
        self.other.weight = self.one.weight
        self.norm, self.plain = nn.BatchNorm1d(3), torch.ones(3)
        self.nested = {"a": [torch.ones(2), "text"], "b": (self.plain,)}
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.cache["x"] = x
        self.lazy = x + 1
        self.norm.running_mean = self.norm.running_mean + 1
        return self.other(self.one(x)) * self.plain


def contents(module: nn.Module) -> list[Any]:
    found: list[Any] = []
    for one in module.modules():
        for name, value in vars(one).items():
            found += [name, id(value)]
            found += [(key, id(held)) for key, held in value.items()] if isinstance(value, dict) else []
    return found


def test_modules_are_as_before_though_the_step_fails() -> None:
    model, mode = Holder(), FakeMode()
    before = contents(model)
    with suppress(ZeroDivisionError), replaced_by_fakes(mode, model.modules(), []):
        assert model.one.weight is model.other.weight
        assert isinstance(model.one.weight, FakeTensor)
        assert isinstance(model.one.weight, nn.Parameter)
        assert model.nested["b"][0] is model.plain
        assert isinstance(model.recurrent._flat_weights[0], FakeTensor)
        with mode:
            model(torch.zeros(4, 3)).sum().backward()
        raise ZeroDivisionError
    assert contents(model) == before
    assert model.one.weight.grad is None
    assert not model.cache
    assert not hasattr(model, "lazy")


def test_optimizers_are_as_before_and_their_scalars_keep_their_values() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.NAdam(model.parameters(), lr=torch.tensor(0.25))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    groups, state, mode = optimizer.param_groups, optimizer.state, FakeMode()

    def scalars() -> list[float]:
        return [slots[name].item() for slots in optimizer.state.values() for name in ("step", "mu_product")]

    before = scalars()
    assert before[1] not in (0.0, 1.0)
    with replaced_by_fakes(mode, [model], [optimizer]) as fakes, mode:
        assert optimizer.param_groups[0]["params"][0] is model.weight
        assert isinstance(optimizer.param_groups[0]["lr"], FakeTensor)
        assert optimizer.param_groups[0]["lr"].item() == 0.25
        assert scalars() == before
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        assert fakes.settings({"lr": 0.5}) == {"lr": 0.5}
    assert optimizer.param_groups is groups
    assert len(groups) == 1
    assert optimizer.state is state
    assert scalars() == before


def test_shared_memory_stays_shared_and_hooks_come_along() -> None:
    flat = torch.zeros(6)
    first, second = nn.Parameter(flat[:3]), nn.Parameter(flat[3:])
    called: list[int] = []
    first.register_hook(lambda gradient: called.append(1))
    first.set_likely_value = "mine"
    mode = FakeMode()
    fakes = Fakes(mode)
    one, other = fakes.of(first), fakes.of(second)
    assert one.untyped_storage()._cdata == other.untyped_storage()._cdata
    assert one.untyped_storage().nbytes() == flat.nbytes
    assert one.set_likely_value == "mine"
    with mode:
        (one * 2).sum().backward()
    assert called == [1]


def test_surroundings_are_as_before() -> None:
    parameter = nn.Parameter(torch.ones(1))
    gradient = parameter.grad = torch.ones(1)
    before, filters = streams(), list(warnings.filters)
    with undisturbed([parameter]):
        torch.rand(1), random.random(), np.random.rand()
        parameter.grad = None
        warnings.warn("not heard", stacklevel=1)
        assert not gc.isenabled()
    assert gc.isenabled()
    assert warnings.filters == filters
    assert parameter.grad is gradient
    assert same(before, streams())


def test_an_int_is_a_count_or_refused() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> int:
            return int((x > 0).sum())

    with FakeMode():
        valid = torch.ones(7).bool()
        assert int(valid.sum()) == 7
        assert int(torch.ones(1).bool().sum()) == 1
        with pytest.raises(TraceError, match="asked of a tensor in a loss; its shapes depend on values"):
            int(torch.arange(3).max())
        with pytest.raises(TraceError, match=r"in the model \(Asks\); its shapes depend on values"):
            Asks()(torch.ones(2))
        assert bool(valid.all())


def test_fakes_that_are_left_are_taken_out_or_named() -> None:
    table, kept, box = {"known": 1}, [1], SimpleNamespace()
    with undisturbed([]):  # without the collector
        with FakeMode():
            table["x"] = box.made = torch.ones(1)
            kept.append(table["x"])
        drop_left_fakes()
        assert (table, kept, vars(box)) == ({"known": 1}, [1], {})
        with FakeMode():
            for_good = (torch.ones(1),)
        with pytest.raises(TraceError, match="got a tensor that a tuple keeps"):
            drop_left_fakes()
        del for_good


def test_what_fails_is_told_once() -> None:
    """Not by torch's logger, too: what cannot be traced is refused with a reason."""
    log, heard = logging.getLogger("torch._subclasses.fake_tensor"), logging.handlers.BufferingHandler(100)
    before = list(log.filters)
    log.addHandler(heard)
    try:
        mode = FakeMode()
        with pytest.raises(TraceError, match=r"aten\.mm"), mode.explained(), mode:
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert heard.buffer == []
        assert log.filters == before
        with mode.explained():
            log.warning("for somebody else")
        assert [record.getMessage() for record in heard.buffer] == ["for somebody else"]
        with pytest.raises(RuntimeError), FakeMode():
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert "failed while attempting to run meta" in heard.buffer[-1].getMessage()
    finally:
        log.removeHandler(heard)


# ---- likely


def questions(x: Tensor) -> list[Any]:
    """What models and losses ask of their numbers; the answer to each is yes, in a step that goes well."""
    broken, valid = x.isnan(), (x > 0).sum()
    return [
        not broken.any(),
        x.isfinite().all(),
        (~x.isfinite()).sum() == 0,
        not (~torch.isfinite(x)).any(),
        torch.logical_not(x.isnan().any(1)).all(),
        not (x.isinf() | broken).any(),
        not (x.isinf().any() | broken.any()),
        (x.isinf().any() | (x > 0).any()).item(),  # any other bool is true
        not (x != x).any(),
        (x == x).all(),
        (x != x + 1).any(),
        not broken.sum() > 0,
        not broken.sum().item() > 0,
        valid != 0,
        not bool(valid == 0),
        not valid < 7,
        torch.where(valid == 0, torch.ones_like(valid), valid).item() == x.numel(),
        x.numel() - broken.sum() > 0,
        (x.numel() - (x < 0).sum()).item() > 0,  # what is not known to be 0 weighs something
        torch.equal(x, x),
        float(valid.float().clamp(min=1)) == x.numel(),
        x.tolist() == [[1.0] * x.shape[1]] * len(x),
        torch.tensor(2.5).item() == 2.5,  # known
    ]


def test_no_number_is_broken_and_counts_are_compared() -> None:
    with FakeMode():
        assert all(map(bool, questions(torch.ones(3, 4, requires_grad=True))))
        assert torch.rand(3).max().item() == 1.0
    assert all(map(bool, questions(torch.ones(3, 4))))  # as real ones say


def test_what_was_written_to_is_not_known_any_more() -> None:
    with FakeMode():
        x = torch.ones(3, 4)
        flipped, joined, written = x.isnan().logical_not_(), x.isnan(), x.isnan()
        joined |= x > 0
        written[:, 0] = True
        for changed in (flipped, joined, written):
            assert likely_value(changed) is None
            assert changed.any()
        total = torch.zeros(())
        total += torch.ones(3).sum()
        assert likely_value(total + torch.ones(2).sum()) == likely_value(total) + 2


def test_rows_without_labels_weigh_as_much_as_others() -> None:
    """A weight that came to 0 would leave all parameters without gradient, and without state."""

    def loss(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Total:
        bad, outputs = micro[1].isnan(), model(micro[0])
        if outputs.isnan().any() or outputs.isinf().any():
            raise ValueError
        losses = (outputs - micro[1].nan_to_num()).square() * ~bad
        weight = bad.numel() - bad.sum()
        return Total(losses.sum(), weight) if weight > 0 else Total(outputs.sum() * 0, weight)

    model = nn.Linear(4, 2)
    step = Step(model, loss, torch.optim.AdamW(model.parameters()))
    rows = torch.ones(3, 4), torch.tensor([[1.0, float("nan")]]).repeat(3, 1)
    step(rows)
    with Meter(model, step.optimizers, batch_leaves=rows) as meter:
        step(rows)
    assert trace(Plan(rows=3, micro_batch=3), step.task(), TensorBatch(rows)).peak == meter.peak
