"""ab.BatchLoss: the gradient of the whole batch through `loss.backward()`, for other loops."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
from anybatch.testing import relative_error, tolerance
from tests import device
from tests.faults.faulty import spread
from tests.options import flat
from tests.snapshots import same_as_before
from tests.zoo import own_loss

EXACT, ROWS, CROSS, CUT = 1e-12, 37, nn.CrossEntropyLoss(), {"micro_batch": 5}
WAYS: dict[str, Any] = {"uncut": {}, "window": {}, "scarce": {}, "cut": CUT, "budget": {"memory": "300KB"}}
WAYS["drop"] = CUT | {"non_finite": "drop"}


def fail(_: nn.Module, args: tuple[Tensor]) -> None:
    if args[0].isnan().any():
        raise ValueError("wrong")
    if len(args[0]) > 10:
        raise torch.OutOfMemoryError("injected")


def make(dtype: torch.dtype = torch.float64) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 4)).to(dtype)
    target = torch.randint(4, (ROWS,)).where(torch.arange(ROWS) > 15, -100)  # the first rows do not count
    return model, torch.randn(ROWS, 6, dtype=dtype), target


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def whole(model: nn.Module, loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    alone = copy.deepcopy(model)
    loss(alone).backward()
    return gradients(alone)


def error(model: nn.Module, expected: dict[str, Tensor]) -> float:
    return relative_error(gradients(model), expected)


def windowed(batch_loss: ab.BatchLoss, x: Tensor, y: Tensor) -> Tensor:
    window = batch_loss.window()
    for micro in zip(x.split(9), y.split(9), strict=True):
        window.add(micro)
    return batch_loss(window)


@pytest.mark.parametrize("way", WAYS)
def test_gradient_is_that_of_the_whole_batch_times_what_flows_in_and_is_added(way: str) -> None:
    model, x, y = make()
    value = F.cross_entropy(model(x), y).item()
    expected = whole(model, lambda one: 4 * F.cross_entropy(one(x), y) + one[0].weight.pow(2).sum())
    if way == "scarce":
        model.register_forward_pre_hook(fail)
    batch_loss = ab.BatchLoss(model, CROSS, **flat(WAYS[way]))
    for count in (1, 2, 3):
        if way == "window":  # it refuses gradients that it finds
            model.zero_grad()
            count = 1
        before = gradients(model)
        loss = windowed(batch_loss, x, y) if way == "window" else batch_loss((x, y))
        assert error(model, before) == 0
        (4 * loss + model[0].weight.pow(2).sum()).backward()
        assert error(model, {name: count * one for name, one in expected.items()}) <= EXACT
        assert relative_error(loss.item(), value) <= EXACT
    assert (batch_loss.report.micro_batches > 1) is (way != "uncut")


@pytest.mark.parametrize("micro_batch", [None, 9])
@pytest.mark.parametrize("kind", ["summed", "whole batch", "own"])
def test_every_kind_of_loss_also_without_gradient(kind: str, micro_batch: int | None) -> None:
    model, x, y = make()
    net, loss, batch, plain = {
        "summed": (model, CROSS, (x, y), lambda one: F.cross_entropy(one(x), y)),
        "whole batch": (model, ab.WholeBatch(spread), (x, y), lambda one: spread(one(x), y)),
        "own": (own_loss(model), ab.ModelLoss(), {"x": x, "labels": y}, lambda one: one(x, y)["loss"]),
    }[kind]
    batch_loss = ab.BatchLoss(net, loss, micro_batch=micro_batch)
    batch_loss(batch).backward()
    with torch.no_grad():
        value = batch_loss(batch)
    assert not value.requires_grad
    assert relative_error(value.item(), plain(net).item()) <= EXACT
    assert error(net, whole(net, plain)) <= EXACT


def test_uncut_is_torchs_own_to_the_bit() -> None:
    model, x, y = make(torch.float32)
    ab.BatchLoss(model, CROSS)((x, y)).backward()
    assert error(model, whole(model, lambda one: F.cross_entropy(one(x), y))) == 0


def test_host_scales_clips_and_steps_also_after_a_skipped_batch() -> None:
    model, x, y = make()
    other, scaler = copy.deepcopy(model), torch.amp.GradScaler(device.KIND, init_scale=1024.0)
    batch_loss = ab.BatchLoss(model, CROSS, micro_batch=5, options=ab.Options(non_finite="skip"))
    mine, theirs = (torch.optim.AdamW(one.parameters(), 1e-2) for one in (model, other))
    for _ in range(4):
        for net, optimizer in ((model, mine), (other, theirs)):
            optimizer.zero_grad()
            scaler.scale(batch_loss((x, y)) if net is model else F.cross_entropy(net(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
        scaler.update()
    assert relative_error([*model.parameters()], [*other.parameters()]) <= EXACT
    for batch in ((x * math.nan, y), (x, torch.full_like(y, -100))):  # skipped; no row has weight
        mine.zero_grad()
        scaler.scale(batch_loss(batch)).backward()
        assert error(model, {name: torch.zeros_like(p) for name, p in model.named_parameters()}) == 0
        scaler.step(mine)  # which has something to check
        scaler.update()


def on_rank(rank: int, size: int, is_wrapped: bool) -> float:
    model, x, y = make()
    rows = slice(0, 30) if rank else slice(30, ROWS)
    batch_loss = ab.BatchLoss(DistributedDataParallel(model) if is_wrapped else model, CROSS)
    loss = batch_loss((x[rows], y[rows]))
    loss.backward()
    off = error(model, whole(model, lambda one: F.cross_entropy(one(x), y)))
    return max(off, relative_error(loss.item(), F.cross_entropy(model(x), y).item()))


def test_two_ranks_with_unequal_rows_have_the_gradient_of_all(two: Any) -> None:
    assert max(two.run(on_rank, False) + two.run(on_rank, True)) <= EXACT


@pytest.mark.parametrize("way", ["step", "window"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1.0), (torch.float16, 1e-6)])
def test_autocast_of_the_host(dtype: torch.dtype, size: float, way: str) -> None:
    def small(model: nn.Module, micro: Any) -> ab.Total:
        outputs = model(micro[0])
        assert outputs.dtype == dtype
        loss = F.cross_entropy(outputs, micro[1], reduction="sum")
        return ab.Total(size * loss, (micro[1] != -100).sum())

    def host(one: nn.Module, *, is_on: bool = True) -> Tensor:
        with torch.autocast(device.KIND, dtype, enabled=is_on):
            return size * F.cross_entropy(one(x), y)

    model, x, y = make(torch.float32)
    plain, exact = whole(model, host), whole(model, lambda one: host(one, is_on=False))
    zeros = torch.cat([one.flatten() == 0 for one in plain.values()])
    assert (float(zeros.double().mean()) > 0.5) is (dtype == torch.float16)
    batch_loss = ab.BatchLoss(model, small, micro_batch=5)
    with torch.autocast(device.KIND, dtype):
        value = windowed(batch_loss, x, y) if way == "window" else batch_loss((x, y))
        assert torch.is_autocast_enabled(device.KIND)
    value.backward()
    assert error(model, plain if dtype == torch.bfloat16 else exact) <= tolerance(dtype, ROWS)


def test_failed_call_leaves_all_as_before() -> None:
    model, x, y = make()
    model.extend([nn.BatchNorm1d(4).double(), nn.Dropout(0.5)])
    model.register_forward_pre_hook(fail)
    model(x[:9]).sum().backward()
    batch_loss = ab.BatchLoss(model, CROSS, **flat(micro_batch=9, batch_norm="micro", check=False))
    x[30] = math.nan
    step = ab.Step(model, CROSS, torch.optim.SGD(model.parameters(), lr=1.0))
    with same_as_before(step), pytest.raises(ValueError, match="wrong"):
        batch_loss((x, y))
