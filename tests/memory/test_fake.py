"""Fake tensors in place of real ones, and likely values."""

import gc
import logging
import logging.handlers
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from anybatch import Step, Total
from anybatch.core.batch import TensorBatch
from anybatch.core.errors import PlanError, TraceError
from anybatch.engine.plan import Plan
from anybatch.memory.fake import (
    FakeMode,
    Fakes,
    dense_only,
    drop_left_fakes,
    likely_value,
    replaced_by_fakes,
    undisturbed,
)
from anybatch.memory.meter import Meter
from anybatch.planner.trace import trace


class Holder(nn.Module):
    """Tensors in all the places where modules keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(3)
        self.plain = torch.ones(3)
        self.nested = {"a": [torch.ones(2), "text"], "b": (self.plain,)}
        self.cache: dict[str, Tensor] = {}
        self.recurrent = nn.LSTM(3, 3)

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
            if isinstance(value, dict):
                found += [(key, id(held)) for key, held in cast("dict[Any, Any]", value).items()]
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_as_before(fails: bool) -> None:
    model = Holder()
    before = contents(model)
    mode = FakeMode()
    try:
        with replaced_by_fakes(mode, model.modules(), []):
            assert model.one.weight is model.other.weight
            assert isinstance(model.one.weight, FakeTensor)
            assert isinstance(model.one.weight, nn.Parameter)
            assert model.nested["b"][0] is model.plain
            assert isinstance(model.recurrent._flat_weights[0], FakeTensor)
            with mode:
                model(torch.zeros(4, 3)).sum().backward()
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
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
    first.set_likely_value = "mine"  # pyright: ignore
    mode = FakeMode()
    fakes = Fakes(mode)
    one, other = fakes.of(first), fakes.of(second)
    assert one.untyped_storage()._cdata == other.untyped_storage()._cdata
    assert one.untyped_storage().nbytes() == flat.nbytes
    assert one.set_likely_value == "mine"  # pyright: ignore
    with mode:
        (one * 2).sum().backward()
    assert called == [1]


def test_values_are_likely_ones() -> None:
    with FakeMode():
        valid = torch.ones(3, 4) > 0
        assert bool(valid.all())
        assert torch.equal(valid, valid)
        assert valid.sum().item() == 12  # a count of what is valid
        assert float(valid.sum().float().clamp(min=1)) == 12.0
        assert torch.rand(3).max().item() == 1.0
        assert torch.ones(3).tolist() == [1.0, 1.0, 1.0]
        assert torch.tensor(2.5).item() == 2.5  # known


def test_surroundings_are_as_before() -> None:
    parameter = nn.Parameter(torch.ones(1))
    gradient = parameter.grad = torch.ones(1)
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    filters = list(warnings.filters)
    with undisturbed([parameter]):
        torch.rand(1), random.random(), np.random.rand()
        parameter.grad = None
        warnings.warn("not heard", stacklevel=1)
        assert not gc.isenabled()
    assert gc.isenabled()
    assert warnings.filters == filters
    assert parameter.grad is gradient
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1] == random.getstate()
    assert np.array_equal(streams[2], np.random.get_state()[1])


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


@contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_fakes_that_are_left_are_taken_out() -> None:
    table: dict[str, Any] = {"known": 1}
    kept: list[Any] = [1]
    box = SimpleNamespace()
    with collector_off():
        with FakeMode():
            table["x"] = torch.ones(1)
            kept.append(table["x"])
            box.made = torch.ones(2)
        drop_left_fakes()
    assert (table, kept, vars(box)) == ({"known": 1}, [1], {})


def test_what_keeps_a_fake_for_good_is_named() -> None:
    with collector_off():
        with FakeMode():
            kept = (torch.ones(1),)
        with pytest.raises(TraceError, match="got a tensor that a tuple keeps"):
            drop_left_fakes()
    del kept


def test_what_fails_is_told_once() -> None:
    """Not by torch's logger, too: what cannot be traced is measured, and no fault."""
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


@pytest.mark.parametrize("is_fake", [False, True])
def test_sparse_gradients_are_refused_for_a_while(is_fake: bool) -> None:
    layer, ids, mode = nn.EmbeddingBag(5, 2, sparse=True), torch.zeros(3, 2, dtype=torch.long), FakeMode()

    def run() -> None:
        if not is_fake:
            layer(ids).sum().backward()
            return
        with replaced_by_fakes(mode, [layer], []), mode.explained(), mode:
            layer(torch.zeros(3, 2, dtype=torch.long)).sum().backward()

    with dense_only(layer.parameters()), pytest.raises(PlanError, match=r"sparse ones of shape \(5, 2\)"):
        run()
    layer.zero_grad()
    run()  # nobody minds any more
    layer.sparse = False
    layer.zero_grad()
    with dense_only([*layer.parameters(), nn.Parameter(torch.ones(1), requires_grad=False)]):
        run()


# ---- likely


def bad(x: Tensor) -> None:
    if x.isnan().any():
        raise ValueError


def not_all(x: Tensor) -> None:
    if not x.isfinite().all():
        raise ValueError


def negated(x: Tensor) -> None:
    assert (~x.isfinite()).sum() == 0
    assert not (~torch.isfinite(x)).any()
    assert torch.logical_not(x.isnan().any(1)).all()


def either(x: Tensor) -> None:
    assert not (x.isinf() | x.isnan()).any()
    assert not (x.isinf().any() | x.isnan().any())
    assert (x.isinf().any() | (x > 0).any()).item()  # any other bool is true


def differs(x: Tensor) -> None:
    assert not (x != x).any()
    assert (x == x).all()
    assert (x != x + 1).any()


def counted(x: Tensor) -> None:
    if x.isnan().sum() > 0 or x.isnan().sum().item() > 0:
        raise ValueError
    if (x > 0).sum() == 0 or (x > 0).sum() < 7:
        raise ValueError
    n = (x > 0).sum()
    assert torch.where(n == 0, torch.ones_like(n), n).item() == x.numel()
    assert x.numel() - x.isnan().sum() > 0
    assert (x.numel() - (x < 0).sum()).item() > 0  # what is not known to be 0 weighs something


GUARDS = [bad, not_all, negated, either, differs, counted]


@pytest.mark.parametrize("guard", GUARDS)
def test_no_number_is_broken_and_counts_are_compared(guard: Callable[[Tensor], None]) -> None:
    with FakeMode():
        guard(torch.ones(3, 4, requires_grad=True))
    guard(torch.ones(3, 4))  # as real ones say


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x)
        bad(outputs)
        return outputs.clamp(-9, 9) if outputs.isinf().any() else outputs


def test_a_model_with_a_guard_against_nan_is_traced() -> None:
    model = Guarded()
    step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), check=False)
    rows = TensorBatch((torch.ones(3, 4), torch.ones(3, 2)))
    assert trace(Plan(rows=3, micro_batch=3), step.task(), rows).source == "predicted"


def flipped(x: Tensor) -> Tensor:
    return x.isnan().logical_not_()


def joined(x: Tensor) -> Tensor:
    broken = x.isnan()
    broken |= x > 0
    return broken


def written(x: Tensor) -> Tensor:
    broken = x.isnan()
    broken[:, 0] = True
    return broken


@pytest.mark.parametrize("write", [flipped, joined, written])
def test_what_was_written_to_is_not_known_any_more(write: Callable[[Tensor], Tensor]) -> None:
    with FakeMode():
        changed = write(torch.ones(3, 4))
        assert likely_value(changed) is None
        assert changed.any()
        total = torch.zeros(())
        total += torch.ones(3).sum()
        assert likely_value(total + torch.ones(2).sum()) == likely_value(total) + 2


def test_rows_without_labels_weigh_as_much_as_others() -> None:
    """A weight that came to 0 would leave all parameters without gradient, and without state."""

    def loss(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Total:
        bad = micro[1].isnan()
        losses = (model(micro[0]) - micro[1].nan_to_num()).square() * ~bad
        weight = bad.numel() - bad.sum()
        return Total(losses.sum(), weight) if weight > 0 else Total(model(micro[0]).sum() * 0, weight)

    model = nn.Linear(4, 2)
    step = Step(model, loss, torch.optim.AdamW(model.parameters()))
    rows = torch.ones(3, 4), torch.tensor([[1.0, float("nan")]]).repeat(3, 1)
    step(rows)
    with Meter(model, step.optimizers, batch_leaves=rows) as meter:
        step(rows)
    assert trace(Plan(rows=3, micro_batch=3), step.task(), TensorBatch(rows)).peak == meter.peak
