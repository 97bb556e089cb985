"""Faults on one rank of several, and what follows on all of them. Called on every rank."""

import functools
import math
import os
import random
import signal
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import anybatch as ab
from anybatch.core.errors import BatchError, RankError
from anybatch.testing import tolerance
from tests.faults.faulty import (
    NO_MEMORY,
    ROWS,
    SIZE,
    VARIANTS,
    assert_as_unfaulted,
    build,
    make_batch,
    spread,
    take,
)
from tests.parallel.cases import WAYS, digest, sending
from tests.snapshots import DRAWN, changes, snapshot

NO = ValueError("no")
PLACES = ("forward", "mid", "end")
WHATS = (NO_MEMORY, NO_MEMORY, math.inf, math.nan, NO, KeyboardInterrupt())
HALVED = tolerance(torch.float32, 8)  # additions in another order


def faulted(
    rank: int,
    size: int,
    at_rank: int,
    planted: tuple[str, int, Any],
    way: str = "step",
    kind: str = "dropout",
    variant: str = "divided early",
    **options: Any,
) -> dict[str, Any]:
    """A step with a fault on one rank, then one without; what came of both."""
    options = VARIANTS[variant] | {"momentum": 0.5, "lr": 2.0**-6} | options
    step, twin = (build(kind, warm=1, **options) for _ in range(2))
    batch = make_batch(20 + rank)
    place, at, what = planted
    if rank == at_rank:
        if place == "row":
            batch[0][at, 0] = what
        else:
            step.model.fault.arm(place, at, what)
    before, told = snapshot(step), {"error": "", "said": ""}
    try:
        report = take(step, way, batch)
    except BaseException as error:
        told |= {"error": type(error).__name__, "said": str(error)}
        assert not changes(before, snapshot(step))
    else:
        told |= {"updated": report.updated, "dropped": report.dropped, "redone": report.redone}
        if not report.updated:
            assert not set(changes(before, snapshot(step))) - DRAWN - {"scale"}
        elif not report.dropped:
            is_same_bits = what is not NO_MEMORY and not math.isinf(what if isinstance(what, float) else 0)
            assert_as_unfaulted(step, report, twin, batch, way=way, bound=0.0 if is_same_bits else HALVED)
    step.model.fault.planted = []
    again = take(step, "step", make_batch(30 + rank))
    assert (again.updated, again.rows) == (True, ROWS * size)
    return told | {"bits": digest([*step.model.parameters(), step.scale.state(), again.loss])}


def drawn(rank: int, size: int, seed: int) -> dict[str, Any]:
    """A drawn fault on a drawn rank; the same on all ranks."""
    draws = random.Random(seed)
    at_rank = draws.randrange(size)
    what = draws.choice(WHATS)
    place = "row" if what is math.nan else draws.choice(PLACES if what is not math.inf else ("mid", "end"))
    at = draws.randrange(ROWS if place == "row" else ROWS // SIZE)
    variant = draws.choice(["divided early", "divided late", "several terms", "whole batch", "clipped"])
    way = draws.choice(["step", "step", "window"]) if variant != "whole batch" else "step"
    options: dict[str, Any] = {"non_finite": draws.choice(["raise", "drop", "skip"])}
    if draws.random() < 0.5:
        options["precision"] = draws.choice(["bf16-mixed", "fp16-mixed"])
    kind = draws.choice(["plain", "counting", "dropout"])
    try:
        return faulted(rank, size, at_rank, (place, at, what), way, kind, variant, **options)
    except BaseException as error:
        said = f"seed {seed}, rank {at_rank}: {place} {at} {what!r} {way} {kind} {variant} {options}"
        raise AssertionError(said) from error


def several(rank: int, size: int, seed: int, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index in range(count):
        with sending(WAYS[index % len(WAYS)]):
            found.append(drawn(rank, size, seed + index))
    return found


class Layers(nn.Module):
    """Many layers, which may fail behind each in backward, skip one, or run in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        # A plain object, so that no snapshot holds it: errors by forward and layer.
        self.fault = SimpleNamespace(fails=[], forwards=0)
        self.skipped, self.reversed = -1, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fault.forwards += 1
        layers = [*enumerate(self.layers)]
        for at, layer in layers[::-1] if self.reversed else layers:
            if at != self.skipped:
                x = layer(x).tanh()
                x.register_hook(functools.partial(self._meet, self.fault.forwards, at))
        return x

    def _meet(self, number: int, layer: int, gradient: torch.Tensor) -> None:
        for *place, error in self.fault.fails:
            if place == [number, layer]:
                raise error


def in_the_last(rank: int, size: int, seed: int, count: int) -> list[dict[str, Any]]:
    """Steps whose last micro-batch fails on drawn ranks while buckets are summed, beside steps without it."""
    return [_last(rank, size, number) for number in range(seed, seed + count)]


def _last(rank: int, size: int, seed: int) -> dict[str, Any]:
    draws = random.Random(seed)
    found, losses, told = dict[bool, Any](), dict[bool, float](), {"error": "", "said": ""}
    failing = draws.choice([[draws.randrange(size)], [*range(size)]])
    parts, times = draws.choice([1, 2, 3]), draws.choice([1, 1, 2])
    errors = [draws.choice([NO_MEMORY, NO_MEMORY, NO, KeyboardInterrupt()]) for _ in range(size)]
    layers = [draws.randrange(6) for _ in range(2)]
    skipped, is_reversed = draws.choice([-1, -1, 3]), draws.random() < 0.3
    rows = 4 * parts * draws.choice([1, 2]) if rank else 4 * parts
    drawn = torch.Generator().manual_seed(100 * seed + rank)
    batch = torch.randn(rows, 6, generator=drawn), torch.randint(6, (rows,), generator=drawn)
    for is_faulty in (True, False):
        with sending("under backward" if is_faulty else "in buckets"):
            model = Layers()
            adam = torch.optim.AdamW(model.parameters(), lr=0.1)
            step = ab.Step(model, nn.CrossEntropyLoss(), adam, micro_batch=4, options=ab.Options(check=False))
            for _ in range(3):  # the order is learned and agreed upon
                step(batch)
            model.skipped, model.reversed = (skipped, is_reversed) if rank == 0 else (-1, is_reversed)
            if is_faulty and rank in failing:
                last = model.fault.forwards + rows // 4
                places = [(last + number, layers[number]) for number in range(times)]
                model.fault.fails = [(*place, errors[rank]) for place in places]
            before = snapshot(step)
            try:
                losses[is_faulty] = step(batch).loss
            except BaseException as error:
                told |= {"error": type(error).__name__, "said": str(error)}
                assert not changes(before, snapshot(step)), seed
            model.fault.fails, model.skipped = [], -1
            found[is_faulty] = [p.detach().clone() for p in model.parameters()]
            step(batch)
    if not told["error"]:
        assert math.isclose(losses[True], losses[False], rel_tol=1e-5), seed  # that of all rows, once
        again = any(one is NO_MEMORY for one in errors)  # in halves
        for one, other in zip(found[True], found[False], strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-5 if again else 0.0), seed
    return told | {"bits": digest(found[True]), "seed": seed}


def assert_agreed(answers: list[dict[str, Any]]) -> None:
    """All ranks made the same update or none did, and each of them raised or none did."""
    assert len({one["bits"] for one in answers}) == 1, answers
    assert len({bool(one["error"]) for one in answers}) == 1, answers
    assert len({one.get("updated") for one in answers}) == 1, answers
    assert len({one.get("dropped") for one in answers}) == 1, answers


def ended(rank: int, size: int, at_rank: int) -> str:
    """A rank that is killed in its forward; what the others say."""
    step = build("plain")
    if rank == at_rank:
        step.model.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    before = snapshot(step)
    try:
        step(make_batch(rank))
    except RankError as error:
        assert not changes(before, snapshot(step))
        return str(error)
    return "no error"


def in_windows(rank: int, size: int, seed: int, count: int) -> list[dict[str, Any]]:
    """Windows with a drawn fault on one rank, each followed by a step; what each rank says, and its wait."""
    found: list[dict[str, Any]] = []
    for number in range(seed, seed + count):
        drawn = random.Random(number)
        at_rank, adds = drawn.randrange(size), drawn.randint(1, 3)
        what, place = drawn.choice([NO, KeyboardInterrupt(), "discarded"]), drawn.choice(PLACES[:2])
        is_with, at = drawn.random() < 0.5, drawn.randrange(adds)
        step = build("plain")
        before, told = snapshot(step), {"at": at_rank, "said": "", "seconds": 0.0}
        window = step.window()
        try:
            with window if is_with else nullcontext():
                for index in range(adds):
                    if rank == at_rank and index == at:
                        if what == "discarded":
                            window.discard()
                            break
                        step.model.fault.arm(place, 0, what)
                    window.add(make_batch(10 * number + rank))
                began = time.monotonic()
                if not (rank == at_rank and what == "discarded"):
                    window.close()
        except BaseException as error:
            told["said"] = f"{type(error).__name__}: {error}"
        told["seconds"] = time.monotonic() - began if rank != at_rank else 0.0
        step.model.fault.planted = []
        assert step.open_window is None
        assert not changes(before, snapshot(step))
        assert step(make_batch(number)).updated
        found.append(told)
    return found


def assert_windows_ended(found: list[list[dict[str, Any]]]) -> None:
    """The others raise within a second, by the name of the rank."""
    for told in zip(*found, strict=True):
        at_rank = told[0]["at"]
        for rank, one in enumerate(told):
            assert rank == at_rank or f"on rank {at_rank}" in one["said"], one
            assert one["seconds"] < 1.0


def left_alone(rank: int, size: int) -> str:
    """What is said of an add without rows."""
    window = build("plain").window()
    try:
        window.add((torch.zeros(0, 4), torch.zeros(0, 3)))
    except BatchError as error:
        return str(error)
    return ""


def contrast(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(one @ other.T, torch.arange(len(one)))


class Towers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (torch.nn.Linear(6, 64).double() for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x).tanh(), self.other(y).tanh()


def whole_batch_in_a_budget(rank: int, size: int) -> tuple[float, int]:
    """The error of an update beside one process with all rows, and micro-batches."""
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 40 * size, 6, generator=drawn).double()
    model, same = Towers(), Towers()
    loss, sgd = ab.WholeBatch(contrast), torch.optim.SGD
    mine = slice(40 * rank, 40 * rank + 40)
    report = ab.Step(model, loss, sgd(model.parameters(), lr=1.0), memory="300KB")((x[mine], y[mine]))
    ab.Step(same, loss, sgd(same.parameters(), lr=1.0), options=ab.Options(strategy="local"))((x, y))
    pairs = zip(model.parameters(), same.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs), report.micro_batches


def in_the_update(rank: int, size: int) -> list[str]:
    """A scheduler that fails on rank 1; what each rank says at this step and at the next."""
    fails = [rank == 1]

    def factor(epoch: int) -> float:
        if epoch and fails.pop():
            raise NO
        return 1.0

    step, said = build("plain", scheduler=lambda optimizer: LambdaLR(optimizer, factor)), []
    fails[:] = [rank == 1]
    for _ in range(2):
        try:
            step(make_batch(rank))
            said.append("")
        except (ValueError, RankError) as error:
            said.append(str(error))
            if rank == 1:
                break
        fails[:] = [False]
    return said


def one_rank_has_rows(rank: int, size: int) -> float:
    """The loss of a batch whose rows meet and are all on rank 0, cut there: only that rank looks."""
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 4).double(), (torch.randn(9, 3).double(), torch.arange(9))
    step = ab.Step(model, ab.WholeBatch(spread), torch.optim.SGD(model.parameters(), 0.1), micro_batch=2)
    return step(None if rank else batch).loss
