"""Faults on one rank of several, and what follows on all of them. Called on every rank."""

import math
import random
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import anybatch as ab
from anybatch.core import local
from anybatch.core.errors import RankError
from anybatch.parallel import Shard
from anybatch.testing import tolerance
from tests.faults import faulty
from tests.faults.faulty import NO_MEMORY, ROWS, SIZE, VARIANTS, Fault, build, make_batch, take
from tests.parallel import pairs
from tests.parallel.drawn import WAYS, sending
from tests.parallel.pairs import Pair, copies, digest, draw_sizes, make, rows, shard, share
from tests.parallel.spawned import Ranks
from tests.snapshots import DRAWN, changes, snapshot
from tests.zoo import Made

NO = ValueError("no")
PLACES = ("forward", "mid", "end")
WHATS = (NO_MEMORY, NO_MEMORY, math.inf, math.nan, NO, KeyboardInterrupt())
HALVED = tolerance(torch.float32, 8)  # additions in another order
Told = dict[str, Any]


def said(error: BaseException) -> Told:
    return {"error": type(error).__name__, "said": str(error)}


def assert_agreed(answers: Sequence[Told], at_rank: int = -1) -> None:
    """All ranks made the same update or none did, and each raised or none did: by the name of one rank."""
    for name in ("updated", "dropped", "bits"):
        assert len({one.get(name) for one in answers}) == 1, answers
    assert len({bool(one["error"]) for one in answers}) == 1, answers
    for rank, one in enumerate(answers):
        assert at_rank in (-1, rank) or not one["error"] or f"on rank {at_rank}" in one["said"], answers
        assert one.get("seconds", 0) < 10, answers


# ---- replicas


def faulted(
    rank: int, size: int, at_rank: int, planted: Any, way: str, kind: str, variant: str, **options: Any
) -> Told:
    """A step with a fault on one rank, then one without; what came of both."""
    options = VARIANTS[variant] | {"momentum": 0.5, "lr": 2.0**-6} | options
    step, twin = (build(kind, warm=1, **options) for _ in range(2))
    batch = make_batch(20 + rank)
    place, at, what = planted
    if rank == at_rank and place == "row":
        batch[0][at, 0] = what
    elif rank == at_rank:
        step.model.fault.arm(place, at, what)
    before, told = snapshot(step), {"error": "", "said": ""}
    try:
        report = take(step, way, batch)
    except BaseException as error:
        told |= said(error)
        assert not changes(before, snapshot(step))
    else:
        told |= {"updated": report.updated, "dropped": report.dropped, "redone": report.redone}
        if not report.updated:
            assert not set(changes(before, snapshot(step))) - DRAWN - {"scale"}
        elif not report.dropped:
            is_same_bits = what is not NO_MEMORY and not math.isinf(what if isinstance(what, float) else 0)
            faulty.assert_as_unfaulted(
                step, report, twin, batch, way=way, bound=0.0 if is_same_bits else HALVED
            )
    step.model.fault.planted = []
    again = take(step, "step", make_batch(30 + rank))
    assert (again.updated, again.rows) == (True, ROWS * size)
    return told | {"bits": digest([*step.model.parameters(), step.scale.state(), again.loss])}


def drawn(rank: int, size: int, seed: int) -> Told:
    """A drawn fault on a drawn rank; the same on all ranks."""
    draws = random.Random(seed)
    at_rank, what = draws.randrange(size), draws.choice(WHATS)
    place = "row" if what is math.nan else draws.choice(PLACES if what is not math.inf else ("mid", "end"))
    at = draws.randrange(ROWS if place == "row" else ROWS // SIZE)
    variant = draws.choice(["divided early", "divided late", "several terms", "whole batch", "clipped"])
    way = draws.choice(["step", "step", "window"]) if variant != "whole batch" else "step"
    options: dict[str, Any] = {"non_finite": draws.choice(["raise", "drop", "skip"])}
    if draws.random() < 0.5:
        options["precision"] = draws.choice(["bf16-mixed", "fp16-mixed"])
    kind = draws.choice(["plain", "counting", "dropout"])
    try:
        with sending(WAYS[seed % len(WAYS)]):
            return faulted(rank, size, at_rank, (place, at, what), way, kind, variant, **options)
    except BaseException as error:
        case = f"seed {seed}, rank {at_rank}: {place} {at} {what!r} {way} {kind} {variant} {options}"
        raise AssertionError(case) from error


def through(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Go through layers behind each of which a backward may fail, by forward and layer."""
    self.fault.ran.append(len(x))
    number = len(self.fault.ran)
    for at in self.order:
        x = self.layers[at](x).tanh()
        x.register_hook(lambda _, place=f"{number} {at}": self.fault(place) and None)
    return x


def last(rank: int, size: int, seed: int) -> Told:
    """A step whose last micro-batch fails on drawn ranks while buckets are summed, beside one without it."""
    draws = random.Random(seed)
    found, losses, told = dict[bool, Any](), dict[bool, float](), {"error": "", "said": ""}
    failing = draws.choice([[draws.randrange(size)], [*range(size)]])
    parts, times = draws.choice([1, 2, 3]), draws.choice([1, 1, 2])
    errors = [draws.choice([NO_MEMORY, NO_MEMORY, NO, KeyboardInterrupt()]) for _ in range(size)]
    places = [draws.randrange(6) for _ in range(2)]
    skipped, is_reversed = draws.choice([-1, -1, 3]), draws.random() < 0.3
    count = 4 * parts * draws.choice([1, 2]) if rank else 4 * parts
    generator = torch.Generator().manual_seed(100 * seed + rank)
    batch = torch.randn(count, 6, generator=generator), torch.randint(6, (count,), generator=generator)
    order = [at for at in range(6) if rank or at != skipped]
    for is_faulty in (True, False):
        with sending("under backward" if is_faulty else "in buckets"):
            torch.manual_seed(0)
            layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
            model: Any = Made(through, layers=layers, order=[*range(6)], fault=Fault())
            adam = torch.optim.AdamW(model.parameters(), lr=0.1)
            step = ab.Step(model, nn.CrossEntropyLoss(), adam, micro_batch=4, options=ab.Options(check=False))
            for _ in range(3):  # the order is learned and agreed upon
                step(batch)
            model.order = order[::-1] if is_reversed else order
            if is_faulty and rank in failing:
                final = len(model.fault.ran) + count // 4
                model.fault.planted = [(f"{final + n} {places[n]}", 0, errors[rank], 1) for n in range(times)]
            before = snapshot(step)
            try:
                losses[is_faulty] = step(batch).loss
            except BaseException as error:
                told |= said(error)
                assert not changes(before, snapshot(step)), seed
            model.fault.planted, model.order = [], [*range(6)]
            found[is_faulty] = [p.detach().clone() for p in model.parameters()]
            step(batch)
    if not told["error"]:
        assert math.isclose(losses[True], losses[False], rel_tol=1e-5), seed  # that of all rows, once
        again = any(one is NO_MEMORY for one in errors)  # in halves
        for one, other in zip(found[True], found[False], strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-5 if again else 0.0), seed
    return told | {"bits": digest(found[True]), "seed": seed}


def window(rank: int, size: int, seed: int) -> Told:
    """A window with a drawn fault on one rank, and a step; the others raise within a second, by its name."""
    drawn = random.Random(seed)
    at_rank, adds = drawn.randrange(size), drawn.randint(1, 3)
    what, place = drawn.choice([NO, KeyboardInterrupt(), "discarded"]), drawn.choice(PLACES[:2])
    is_with, at = drawn.random() < 0.5, drawn.randrange(adds)
    step = build("plain")
    before, error = snapshot(step), ""
    opened = step.window()
    try:
        with opened if is_with else nullcontext():
            for index in range(adds):
                if rank == at_rank and index == at:
                    if what == "discarded":
                        opened.discard()
                        break
                    step.model.fault.arm(place, 0, what)
                opened.add(make_batch(10 * seed + rank))
            else:
                began = time.monotonic()
                opened.close()
    except BaseException as found:
        error = str(found)
    if rank != at_rank:
        assert f"on rank {at_rank}" in error
        assert time.monotonic() - began < 1.0
    step.model.fault.planted = []
    assert step.open_window is None
    assert not changes(before, snapshot(step))
    assert step(make_batch(seed)).updated
    return {"error": "raised"}  # or discarded


# ---- shards


def wait_at_most(seconds: float) -> None:
    """Shorten the group's timeout, once all ranks have started."""
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


PASSES = ("forward 0", "forward 1"), ("backward 0", "backward 1")


def sharded(rank: int, size: int, seed: int, loss: str, first: bool = False, budgets: Any = ()) -> Told:
    """A step in which a drawn rank meets a drawn fault, the first one or the third, and some after it.

    With budgets each rank draws one of its own, and there may be no fault; then the first error is the end.
    """
    draws = random.Random(seed)
    mesh, is_whole = copies(size) if size == 4 and draws.random() < 0.5 else None, loss == "whole"
    model = make(seed=seed, is_warm=is_whole)
    parts = shard(model, mesh, reshard_after_forward=draws.choice([True, False]))
    way, hold = draws.choice(["step"] if is_whole else ["step", "step", "window"]), draws.random() < 0.5
    place, what = (
        draws.choice(draws.choice(PASSES)),
        draws.choice([NO_MEMORY, NO_MEMORY, NO, KeyboardInterrupt()]),
    )
    at_rank, passes = draws.randrange(size), draws.randrange(5 if is_whole else 3)
    memory, options = None, {"strategy": Shard(hold=hold)}
    if budgets:
        own = [draws.choice(budgets) for _ in range(size)]
        memory, what, options = own[rank], draws.choice([None, None, NO_MEMORY, NO]), {}
    pair = Pair(model, loss, parts=parts, memory=memory, micro_batch=None if memory else 2, **options)
    case = f"{seed}: {place}, {passes}, {what!r} on {at_rank}, {loss}, {way}, hold {hold}, {mesh}"

    told: Told = {"error": "", "case": case}
    if first:
        wait_at_most(3)
    for number in (2,) if first else range(5 if budgets else 4):
        if number == 2 and rank == at_rank and what is not None:
            parts.fault.arm(place, passes, what)
        sizes = [4 - (number + index) % 4 for index in range(size - 1)]
        sizes.append(4 * size - sum(sizes))
        if budgets:
            sizes = draw_sizes(draws, draws.randint(size, 9 * size), size)
        batch, began = rows(sum(sizes), seed=100 * seed + number), time.monotonic()
        try:
            pair.update(batch, sizes, rank, way=way, pieces=lambda: 7 if budgets else 2)
        except BaseException as error:
            assert number == 2 or budgets, case
            told |= said(error)
            assert first or pair.error < pairs.CLOSE, case  # as one process that has not made it
            if budgets:
                return told
        if number == 2:
            told |= {"at": at_rank, "seconds": time.monotonic() - began}
            parts.fault.arm("", 0, what)
    return told


BUDGETS = "1GB", "1GB", 100_000, 145_000, 160_000, 200_000, 200_000, None


def ends(rank: int, size: int, end: signal.Signals, seed: int, is_sharded: bool = True) -> Told:
    """A drawn rank gets a signal at a drawn place; what the others say, and whether all is as before."""
    draws = random.Random(seed)
    at_rank, loss, hold = draws.randrange(size), draws.choice(["tokens", "whole"]), draws.random() < 0.5
    model = make(is_warm=loss == "whole")
    parts, strategy = (shard(model), Shard(hold=hold)) if is_sharded else (model, "auto")
    step = Pair(model, loss, parts=parts, micro_batch=2, strategy=strategy).step
    mine = share(rows(4 * size), [4] * size, rank)
    step(mine)
    wait_at_most(3)
    if rank == at_rank:
        parts.fault.arm(draws.choice(draws.choice(PASSES)), draws.randrange(2), end)
    before, told, began = [local(p).clone() for p in parts.parameters()], Told(), time.monotonic()
    try:
        step(mine)
    except RankError as error:
        told = said(error)
    told["is_as_before"] = all(map(torch.equal, before, map(local, parts.parameters())))
    return told | {"seconds": time.monotonic() - began}


def assert_ended(ranks: Ranks, end: signal.Signals, seed: int, is_sharded: bool = True) -> None:
    """A drawn rank gets a signal: the others name it, or one that waits elsewhere; all is as before."""
    silent = random.Random(seed).randrange(ranks.size)
    ranks.start(ends, end, seed, is_sharded)
    answers = ranks.answers(120.0, silent=silent)
    assert answers[silent][0] == "ended"
    for rank, (kind, told) in enumerate(answers):
        if rank != silent:
            assert kind == "value", told
            named = told["said"].partition("got none from ")[2].partition(":")[0]
            assert f"rank {silent}" in named or "(it sent" in told["said"], told
            assert told["is_as_before"]
            assert told["seconds"] < 10


def several(rank: int, size: int, kind: str, seed: int, count: int, *args: Any) -> list[Told]:
    return [globals()[kind](rank, size, number, *args) for number in range(seed, seed + count)]


def assert_all_agreed(ranks: Ranks, kind: str, seed: int, count: int, *args: Any) -> None:
    """Each of some faults ends the update on all ranks with one reason, or is nothing to any of them."""
    for told in zip(*ranks.run(several, kind, seed, count, *args, seconds=600.0), strict=True):
        first = [rank for rank, one in enumerate(told) if one["error"] not in ("", "RankError")]
        assert_agreed(told, first[0] if first and kind == "sharded" else -1)
