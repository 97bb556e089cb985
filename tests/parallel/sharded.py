"""Steps of sharded models, held against the whole batch in one process. Called on every rank."""

import copy
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import anybatch as ab
from anybatch.core import local
from anybatch.core.errors import RankError
from anybatch.engine import Part, norm_of
from anybatch.engine.sums import Division
from anybatch.parallel import Shard
from tests.parallel.cases import digest, draw_sizes, share
from tests.parallel.spawned import Ranks

WIDTH, LENGTH, WORDS = 6, 5, 7


class Fault:
    """An error that is raised when a place is passed; a plain object, so that no snapshot holds its count."""

    def __init__(self) -> None:
        self.place, self.left, self.what = "", 0, ValueError("no")

    def arm(self, place: str, passes: int, what: Any) -> None:
        self.place, self.left, self.what = place, passes, what

    def __call__(self, place: str) -> None:
        if place == self.place:
            self.left -= 1
            if self.left == -1 and isinstance(self.what, signal.Signals):
                os.kill(os.getpid(), self.what)
            elif self.left == -1:
                raise self.what


class Spot(torch.autograd.Function):
    """The identity, which passes a place in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault, place: str) -> Tensor:
        ctx.fault, ctx.place = fault, place
        fault(f"forward {place}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.fault(f"backward {ctx.place}")
        return gradients[0], None, None


class Block(nn.Module):
    """A block of odd width, so that shards differ in size."""

    def __init__(self, place: str, fault: Fault) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.place, self.fault = place, fault

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Spot.apply(torch.tanh(self.up(self.norm(x))), self.fault, self.place))


class Words(nn.Module):
    """Some blocks over an embedding: logits of shape (rows, words, length)."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.words, self.fault = nn.Embedding(WORDS, WIDTH), Fault()
        self.blocks = nn.ModuleList(Block(str(index), self.fault) for index in range(blocks))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden).transpose(1, 2)


class Warm(Words):
    """A second output that all rows share."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__(blocks)
        self.warmth = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.warmth.exp().sum()


def make(blocks: int = 2, *, seed: int = 0, kind: type[Words] = Words) -> Words:
    torch.manual_seed(seed)
    return kind(blocks).double()


def shard(model: Words, mesh: Any = None, **options: Any) -> Any:
    """Shard a copy of the model, block by block."""
    model = copy.deepcopy(model)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def rows(count: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Words and the next ones, of one to all places that count."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randint(WORDS, (count, LENGTH), generator=drawn)
    y = torch.randint(WORDS, (count, LENGTH), generator=drawn)
    lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=drawn)
    return x, y.masked_fill(torch.arange(LENGTH) >= lengths, -100)


def tokens(model: nn.Module, micro: tuple[Tensor, Tensor]) -> ab.Total:
    x, y = micro
    return ab.Total(F.cross_entropy(model(x), y, reduction="sum"), (y != -100).sum())


def contrast(out: Tensor, warmth: Tensor, y: Tensor, rows: Any = None) -> Any:
    """Rows with as many words that count attract each other."""
    pairs = warmth * (each := F.normalize(out.flatten(1))) @ each.T
    likes = ((counts := (y != -100).sum(1, dtype=out.dtype))[:, None] - counts).abs().neg().softmax(1)
    losses = F.cross_entropy(pairs, likes, reduction="none")
    return losses.mean() if rows is None else ab.Total(losses[rows].sum(), len(rows))


LOSSES: dict[str, Callable[[], Any]] = {
    "torch": nn.CrossEntropyLoss,
    "tokens": lambda: tokens,
    "rows": lambda: ab.PerRow(lambda logits, y: F.cross_entropy(logits, y, reduction="none").sum(1)),
    "model": lambda: ab.ModelLoss(call=lambda model, micro: F.cross_entropy(model(micro[0]), micro[1])),
    "whole": lambda: ab.WholeBatch(contrast),
    "whole by rows": lambda: ab.WholeBatch(contrast, loss_rows=3),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def whole(model: nn.Module) -> list[Tensor]:
    """The parameters, gathered."""
    return [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def error_of(parts: nn.Module, model: nn.Module) -> float:
    """The largest difference of a parameter."""
    pairs = zip(whole(parts), whole(model), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def one(rank: int, size: int, seed: int) -> list[Any]:
    """One drawn case of three updates; the error of its parameters, and a hash of those of this rank."""
    drawn = random.Random(seed)
    name, way = drawn.choice([*LOSSES]), drawn.choice(["step", "step", "window", "collate"])
    is_whole = name.startswith("whole")
    way = "step" if is_whole and way == "window" else way
    model = make(drawn.choice([1, 2]), seed=seed, kind=Warm if is_whole else Words)
    optimizer, micro_batch = drawn.choice([*OPTIMIZERS]), drawn.choice([None, 1, 2, 3])
    clip_norm, hold = drawn.choice([None, 0.05]), drawn.random() < 0.4
    mesh = (
        init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))
        if size == 4 and drawn.random() < 0.5
        else None
    )
    parts = shard(model, mesh, reshard_after_forward=drawn.choice([True, False]))
    options = ab.Options(strategy=Shard(hold=hold))
    steps = [
        ab.Step(
            net,
            LOSSES[name](),
            OPTIMIZERS[optimizer](net.parameters()),
            micro_batch=most,
            clip_norm=clip_norm,
            options=chosen,
            collate=stack if way == "collate" and net is parts else None,
        )
        for net, most, chosen in [
            (parts, micro_batch, options),
            (model, None, ab.Options(strategy="local", check=False)),
        ]
    ]
    for index in range(3):
        count = drawn.randint(2, 9)
        sizes = draw_sizes(drawn, count, size)
        batch = rows(count, seed=100 * seed + index)
        mine, is_none = share(batch, sizes, rank), drawn.random() < 0.5
        if way == "window":
            own = random.Random(1000 * seed + rank)  # ranks add in other parts
            with steps[0].window() as window:
                start = 0
                while start < sizes[rank]:
                    stop = min(sizes[rank], start + own.randint(1, 4))
                    window.add(tuple(part[start:stop] for part in mine))
                    start = stop
                report = window.close()
        elif way == "collate":
            report = steps[0]([*zip(*mine, strict=True)] or None)
        else:
            report = steps[0](mine if sizes[rank] or not is_none else None)
        expected = steps[1](batch)
        assert (report.rows, report.updated) == (count, True)
        assert abs(report.loss - expected.loss) < 1e-12 * max(1.0, abs(expected.loss))
        assert abs(report.grad_norm - expected.grad_norm) < 1e-11 * max(1.0, expected.grad_norm)
    error = error_of(parts, model)
    said = f"seed {seed}: {name}, {way}, {optimizer}, {micro_batch}, hold {hold}, {error}"
    assert error < (1e-7 if optimizer == "adamw" else 1e-12), said
    return [error, digest(whole(parts))]


def stack(samples: Sequence[Any]) -> Any:
    return tuple(torch.stack(column) for column in zip(*samples, strict=True))


def several(rank: int, size: int, seed: int, count: int) -> list[Any]:
    return [one(rank, size, seed + index) for index in range(count)]


# ---- mistakes


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Make a mistake."""
    with MUTATIONS[name]():
        yield


def _local_divisor() -> Any:
    made = Division.decide

    def decide(*given: Any, **named: Any) -> Division:
        return made(*given, **{**named, "guess": 1.0})

    return mock.patch.object(Division, "decide", staticmethod(decide))


def _averaged() -> Any:
    return mock.patch.object(FSDPModule, "set_gradient_divide_factor")


def _lost_gradient() -> Any:
    def accompany(self: Part, rows: Any) -> None:
        before = {p: p.grad.clone() for p in self.task.network.parameters if p.grad is not None}
        made(self, rows)
        for p in self.task.network.parameters:
            p.grad = before.get(p)

    made = Part.accompany
    return mock.patch.object(Part, "accompany", accompany)


def _local_norm() -> Any:
    return mock.patch.object(
        Shard, "norm", lambda self, gradients: norm_of([local(one) for one in gradients])
    )


MUTATIONS: dict[str, Callable[[], Any]] = {
    "a divisor of each rank's own": _local_divisor,
    "averaged shards": _averaged,
    "what other ranks send in a micro-batch of weight 0 is lost": _lost_gradient,
    "the norm of this rank's shards": _local_norm,
}


def wrong(rank: int, size: int, seed: int, count: int, mutation: str) -> int:
    """How many cases a mistake breaks on this rank."""
    found = 0
    with mutated(mutation):
        for index in range(count):
            try:
                one(rank, size, seed + index)
            except AssertionError:
                found += 1
    return found


# ---- faults


def wait_at_most(seconds: float) -> None:
    """Shorten the group's timeout, once all ranks have started."""
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory.")


def faulted(rank: int, size: int, seed: int, loss: str = "tokens", first: bool = False) -> dict[str, Any]:
    """A step in which a drawn rank meets a drawn fault, and one after it; all ranks draw the same."""
    drawn = random.Random(seed)
    model = make(seed=seed, kind=Warm if loss == "whole" else Words)
    mesh = None
    if size == 4 and drawn.random() < 0.5:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    parts = shard(model, mesh, reshard_after_forward=drawn.choice([True, False]))
    way, hold = drawn.choice(["step", "step", "window"]), drawn.random() < 0.5
    way = "step" if loss == "whole" else way
    options, sgd = ab.Options(strategy=Shard(hold=hold)), OPTIMIZERS["momentum"]
    step = ab.Step(parts, LOSSES[loss](), sgd(parts.parameters()), micro_batch=2, options=options)
    alone = ab.Options(strategy="local", check=False)
    twin = ab.Step(model, LOSSES[loss](), sgd(model.parameters()), options=alone)

    def run(number: int) -> Any:
        batch, sizes = rows(4 * size, seed=number), [4 - (number + index) % 4 for index in range(size - 1)]
        sizes.append(4 * size - sum(sizes))
        mine = share(batch, sizes, rank)
        if way == "step":
            return step(mine), batch
        with step.window() as window:
            for start in range(0, sizes[rank], 2):
                window.add(tuple(part[start : start + 2] for part in mine))
            return window.close(), batch

    if first:
        wait_at_most(3)
    for number in range(0 if first else 2):
        twin(run(number)[1])
    place = f"{drawn.choice(['forward', 'backward'])} {drawn.choice('01')}"
    what = drawn.choice([NO_MEMORY, NO_MEMORY, ValueError("no"), KeyboardInterrupt()])
    at_rank, passes = drawn.randrange(size), drawn.randrange(5 if loss == "whole" else 3)
    if rank == at_rank:
        parts.fault.arm(place, passes, what)
    before, told = whole(parts), {"at": at_rank, "error": "", "said": "", "what": repr(what)}
    told["seed"] = f"{seed}: {place}, {passes}, {what!r}, {loss}, {way}, hold {hold}, {mesh}"
    began = time.monotonic()
    try:
        report, batch = run(2)
        twin(batch)
        assert report.updated
        told["redone"] = report.redone
    except BaseException as error:
        told |= {"error": type(error).__name__, "said": str(error)}
    told["seconds"] = time.monotonic() - began
    parts.fault.arm("", 0, what)
    if not told["error"]:
        assert error_of(parts, model) < 1e-12, told["seed"]
    elif not first:
        assert all(map(torch.equal, before, whole(parts))), told["seed"]
    if not first:
        twin(run(3)[1])
        assert error_of(parts, model) < 1e-12, told["seed"]
    return told


def all_faulted(rank: int, size: int, seed: int, count: int, loss: str = "tokens") -> list[dict[str, Any]]:
    return [faulted(rank, size, seed + index, loss) for index in range(count)]


def function_fails(rank: int, size: int) -> tuple[str, float]:
    """A loss over all rows fails on rank 1 in the first step; what is said, and the error of the next."""
    model, fault = make(kind=Warm), Fault()

    def function(*given: Any) -> Tensor:
        fault("function")
        return contrast(*given)

    steps = [
        ab.Step(net, ab.WholeBatch(function), OPTIMIZERS["momentum"](net.parameters()), options=options)
        for net, options in [
            (shard(model), ab.Options()),
            (model, ab.Options(strategy="local", check=False)),
        ]
    ]
    batch, said = rows(6), ""
    mine = share(batch, [0, 6, *[0] * (size - 2)], rank)
    if rank == 1:
        fault.arm("function", 0, ValueError("no"))
    try:
        steps[0](mine)
    except (RankError, ValueError) as error:
        said = str(error)
    steps[0](mine)
    steps[1](batch)
    return said, error_of(steps[0].model, model)


def assert_ended(ranks: Ranks, end: signal.Signals, seed: int) -> None:
    """A drawn rank gets a signal: the others name it, and all is as before.

    A rank that still waits elsewhere, for longer than a second, may be named beside it.
    """
    silent = random.Random(seed).randrange(ranks.size)
    ranks.start(ended, end, seed)
    answers = ranks.answers(120.0, silent=silent)
    assert answers[silent][0] == "ended"
    for rank, (kind, told) in enumerate(answers):
        if rank != silent:
            assert kind == "value", told
            named = told["said"].partition("got none from ")[2].partition(":")[0]
            assert f"rank {silent}" in named or "(it sent" in told["said"], told
            assert told["is_as_before"]
            assert told["seconds"] < 10


def ended(rank: int, size: int, end: signal.Signals, seed: int) -> dict[str, Any]:
    """A drawn rank gets a signal at a drawn place; what the others say, and whether all is as before."""
    drawn = random.Random(seed)
    at_rank, loss, hold = drawn.randrange(size), drawn.choice(["tokens", "whole"]), drawn.random() < 0.5
    parts = shard(make(kind=Warm if loss == "whole" else Words))
    options, sgd = ab.Options(strategy=Shard(hold=hold)), OPTIMIZERS["momentum"]
    step = ab.Step(parts, LOSSES[loss](), sgd(parts.parameters()), micro_batch=2, options=options)
    mine = share(rows(4 * size), [4] * size, rank)
    step(mine)
    wait_at_most(3)
    place, passes = f"{drawn.choice(['forward', 'backward'])} {drawn.choice('01')}", drawn.randrange(2)
    if rank == at_rank:
        parts.fault.arm(place, passes, end)
    before = [local(p).clone() for p in parts.parameters()]
    told, began = {"case": f"{place}, {passes}, {loss}, hold {hold}", "said": "no error"}, time.monotonic()
    try:
        step(mine)
    except RankError as error:
        told["said"] = str(error)
    same = all(map(torch.equal, before, map(local, parts.parameters())))
    return told | {"seconds": time.monotonic() - began, "is_as_before": same}


def said_by(cases: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """What each call raises, by name."""
    found: dict[str, str] = {}
    for name, call in cases.items():
        try:
            call()
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
