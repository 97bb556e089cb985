"""Steps of sharded models, held against the whole batch in one process. Called on every rank."""

import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import anybatch as ab
from anybatch.core import local
from anybatch.engine import Part, norm_of
from anybatch.engine.division import Division
from anybatch.parallel import Shard, rank as rank_of, ranks
from anybatch.train import shards
from tests.parallel.cases import digest, draw_sizes, share

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
            if self.left == -1:
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


def make(blocks: int = 2, *, seed: int = 0) -> Words:
    torch.manual_seed(seed)
    return Words(blocks).double()


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


LOSSES: dict[str, Callable[[], Any]] = {
    "torch": nn.CrossEntropyLoss,
    "tokens": lambda: tokens,
    "rows": lambda: ab.PerRow(lambda logits, y: F.cross_entropy(logits, y, reduction="none").sum(1)),
    "model": lambda: ab.ModelLoss(call=lambda model, micro: F.cross_entropy(model(micro[0]), micro[1])),
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
    model = make(drawn.choice([1, 2]), seed=seed)
    name, way = drawn.choice([*LOSSES]), drawn.choice(["step", "step", "window", "collate"])
    optimizer, micro_batch = drawn.choice([*OPTIMIZERS]), drawn.choice([None, 1, 2, 3])
    clip_norm, compensated, hold = drawn.choice([None, 0.05]), drawn.random() < 0.2, drawn.random() < 0.4
    mesh = (
        init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))
        if size == 4 and drawn.random() < 0.5
        else None
    )
    parts = shard(model, mesh, reshard_after_forward=drawn.choice([True, False]))
    options = ab.Options(compensated=compensated, strategy=Shard(hold=hold and not compensated))
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
    said = f"seed {seed}: {name}, {way}, {optimizer}, {micro_batch}, hold {hold}, {compensated}, {error}"
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
        return made(*given, **{**named, "adds_over_ranks": False})

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


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory.")


def faulted(rank: int, size: int, seed: int, first: bool = False) -> dict[str, Any]:
    """A step in which a drawn rank meets a drawn fault, and one after it; all ranks draw the same."""
    drawn = random.Random(seed)
    model = make(seed=seed)
    mesh = None
    if size == 4 and drawn.random() < 0.5:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    parts = shard(model, mesh, reshard_after_forward=drawn.choice([True, False]))
    way, hold = drawn.choice(["step", "step", "window"]), drawn.random() < 0.5
    options = ab.Options(strategy=Shard(hold=hold))
    step = ab.Step(parts, tokens, OPTIMIZERS["momentum"](parts.parameters()), micro_batch=2, options=options)
    alone = ab.Options(strategy="local", check=False)
    twin = ab.Step(model, tokens, OPTIMIZERS["momentum"](model.parameters()), options=alone)

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

    for number in range(0 if first else 2):
        twin(run(number)[1])
    place = f"{drawn.choice(['forward', 'backward'])} {drawn.choice('01')}"
    what = drawn.choice([NO_MEMORY, NO_MEMORY, ValueError("no"), KeyboardInterrupt()])
    at_rank, passes = drawn.randrange(size), drawn.randrange(3)
    if rank == at_rank:
        parts.fault.arm(place, passes, what)
    before, told = whole(parts), {"at": at_rank, "error": "", "said": "", "what": repr(what)}
    told["seed"] = f"{seed}: {place}, {passes}, {what!r}, {way}, hold {hold}, {mesh}"
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


def all_faulted(rank: int, size: int, seed: int, count: int) -> list[dict[str, Any]]:
    return [faulted(rank, size, seed + index) for index in range(count)]


# ---- what else a step can do, and what is refused


def steps(parts: nn.Module, model: nn.Module, **options: Any) -> tuple[ab.Step, ab.Step]:
    """A step of a sharded model, and one of one process with the whole batch."""
    given = {"strategy": "auto", **options.pop("options", {})}
    sgd = OPTIMIZERS["momentum"]
    return (
        ab.Step(parts, tokens, sgd(parts.parameters()), options=ab.Options(**given), **options),
        ab.Step(
            model,
            tokens,
            sgd(model.parameters()),
            options=ab.Options(strategy="local", check=False),
            **options,
        ),
    )


def features(rank: int, size: int) -> dict[str, float]:
    """The error of three updates with each option."""
    found: dict[str, float] = {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shown: list[list[float]] = [[], []]
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": ({}, {}),
        "recompute": ({}, {"options": {"recompute": "all"}}),
        "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
        "policy": ({"mp_policy": policy}, {}),
        "held in a policy": ({"mp_policy": policy}, {"options": {"strategy": Shard(hold=True)}}),
        "clipped by value": ({}, {"options": {"clip_value": 1e-3}}),
    }
    for name, (sharding, options) in cases.items():
        dtype = torch.float32 if "bf16" in name or "policy" in name else torch.float64
        model = make().to(dtype)
        parts = shard(model, **sharding)
        clip = options.get("options", {}).get("clip_value")
        mine, twin = steps(parts, model, micro_batch=2, **copy.deepcopy(options) if not sharding else options)
        if clip:
            twin = ab.Step(
                model,
                tokens,
                twin.optimizers[0],
                options=ab.Options(strategy="local", check=False, clip_value=clip),
            )
        watchers = [Watcher(one) for one in shown]
        mine.attach(watchers[:1])
        twin.attach(watchers[1:])
        for number in range(3):
            batch = rows(7, seed=number)
            with torch.no_grad():  # a forward alone leaves the root unsharded
                parts(batch[0])
            mine(share(batch, [5, 2, *[0] * (size - 2)], rank))
            twin(batch)
        found[name] = error_of(parts, model)
        if name == "plain":
            found["shown"] = max(abs(one - other) for one, other in zip(*shown, strict=True))
    model, batch = make(), rows(7)
    parts = shard(model)
    loss, optimizer = ab.BatchLoss(parts, tokens, micro_batch=2), OPTIMIZERS["momentum"](parts.parameters())
    loss(share(batch, [5, 2, *[0] * (size - 2)], rank)).backward()
    optimizer.step()
    steps(parts, model)[1](batch)
    found["BatchLoss"] = error_of(parts, model)
    return found


class Watcher(ab.Callback):
    """A callback that takes the norm of each gradient."""

    def __init__(self, norms: list[float]) -> None:
        self.norms = norms

    def gradients(self, gradients: Any) -> None:
        self.norms += [float(one.norm()) for one in gradients.values()]


class MicroWatcher(ab.Callback):
    def micro_gradients(self, micro: Any, gradients: Any, scale: float) -> None:
        raise AssertionError


def refused(rank: int, size: int) -> dict[str, str]:
    """What every rank is told."""
    batch = share(rows(8), [4, 4], rank)

    def stepped(model: Any = None, loss: Any = tokens, **options: Any) -> Callable[[], object]:
        model = shard(make()) if model is None else model
        given = {name: options.pop(name) for name in [*options] if name in ("strategy", "non_finite")}
        optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
        return lambda: ab.Step(model, loss, optimizer, options=ab.Options(**given), micro_batch=2, **options)(
            batch
        )

    def in_parts() -> Any:
        model = make()
        fully_shard(model.blocks[0])
        return model

    def ignoring() -> Any:
        model = make()
        return fully_shard(model, ignored_params={model.out.bias})

    def on_two_meshes() -> Any:
        model = make()
        alone = [dist.new_group([one]) for one in range(size)]
        fully_shard(model.blocks[0], mesh=DeviceMesh.from_group(alone[rank], "cpu"))
        return fully_shard(model)

    def two(model: Any, micro: Any) -> Any:
        return {"one": tokens(model, micro), "two": ab.Total(model(micro[0]).square().sum(), len(micro[0]))}

    def saved() -> object:
        parts = shard(make())
        window = ab.Step(parts, tokens, torch.optim.SGD(parts.parameters())).window()
        window.add(batch)
        try:
            return window.state()
        finally:
            window.discard()

    parts = shard(make())
    cases: dict[str, Callable[[], object]] = {
        "local": stepped(strategy="local"),
        "replicate": stepped(strategy="replicate"),
        "Shard": stepped(make(), strategy=Shard()),
        "parts": stepped(in_parts()),
        "ignored": stepped(ignoring()),
        "meshes": stepped(on_two_meshes()),
        "WholeBatch": stepped(loss=ab.WholeBatch(lambda out, y: out.mean())),
        "fp16-mixed": stepped(precision="fp16-mixed"),
        "bf16-true": stepped(precision="bf16-true"),
        "drop": stepped(non_finite="drop"),
        "memory": stepped(memory="1GB"),
        "micro_gradients": stepped(callbacks=[MicroWatcher()]),
        "callbacks": stepped(callbacks=[Watcher([])] if rank else []),
        "hold": stepped(strategy=Shard(hold=rank == 0)),
        "terms": stepped(loss=two),
        "FSDP1": lambda: stepped(FullyShardedDataParallel(make(), device_id=torch.device("cpu")))(),
        "state": saved,
        "check": lambda: ab.check(parts, tokens, batch),
        "plan": lambda: ab.plan(parts, tokens, torch.optim.SGD(parts.parameters()), batch, memory="1GB"),
        "flow": lambda: ab.gradient_flow(parts, tokens, batch),
        "Trainer": lambda: ab.Trainer(
            ab.Step(parts, tokens, torch.optim.SGD(parts.parameters())), batch, batch_size=2
        ),
    }
    found = {}
    for name, call in cases.items():
        try:
            call()
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def counts(rank: int, size: int, hold: bool) -> list[list[int]]:
    """Messages, all-gathers, reduce-scatters and sums of each of some steps of 1 to 4 micro-batches."""
    parts, found = shard(make()), list[list[int]]()
    step = steps(parts, make(), micro_batch=1, options={"strategy": Shard(hold=hold)})[0]
    names = "all_gather", "all_gather_single", "reduce_scatter_single", "all_reduce"
    for count in (1, 2, 3, 4, 4):
        with ExitStack() as patches:
            made = [
                patches.enter_context(mock.patch.object(dist, one, wraps=getattr(dist, one))) for one in names
            ]
            report = step(share(rows(2 * count, seed=count), [count, count], rank))
            assert report.held == (hold and len(found) > 0)
            found.append([one.call_count for one in made])
    return found


def in_a_half(rank: int, size: int) -> float:
    """The error of an update over half of the ranks."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("halves", "shards"))["shards"]
    first = 0 if rank < size // 2 else size // 2
    model = make()
    parts = shard(model, mesh)
    mine, twin = steps(parts, model, micro_batch=2)
    batch = rows(7, seed=first)
    mine(share(batch, [5, 2], rank - first))
    twin(batch)
    return error_of(parts, model)


# ---- checkpoints


def trained(
    parts: Any, path: str, *, group: Any, updates: int, name: str, save_at: int = 0
) -> dict[str, str]:
    """Go on from the newest checkpoint, if there is one, and save; hashes of what was loaded and saved."""
    optimizer = OPTIMIZERS[name](parts.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = ab.Step(
        parts, tokens, optimizer, micro_batch=2, options=ab.Options(scheduler=scheduler, check=False)
    )
    everything = {"model": parts, "optimizers": [optimizer], "schedulers": [scheduler], "group": group}
    found, done = {}, 0
    if Path(path).exists():
        done = shards.restore(path, **everything)["done"]
        found["loaded"] = bits(parts, optimizer) + str(optimizer.param_groups[0]["lr"])
    size, rank = ranks(group), rank_of(group)
    for number in range(updates):
        batch = rows(7, seed=number)
        step(share(batch, draw_sizes(random.Random(number), 7, size), rank))
    if updates or save_at:
        shards.save(path, save_at or done + updates, progress={"done": done + updates}, **everything)
        found["saved"] = bits(parts, optimizer) + str(optimizer.param_groups[0]["lr"])
    return found


def bits(parts: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    state = [one for p in parts.parameters() for one in optimizer.state[p].values()]
    values = [*whole(parts), *[one.full_tensor() if hasattr(one, "full_tensor") else one for one in state]]
    return digest(values)


def resharded(rank: int, size: int, path: str) -> list[dict[str, str]]:
    """Save and load by 4, 3, 1 and 2 ranks in turn, two updates each; other ranks wait."""
    found: list[dict[str, str]] = []
    for count in (4, 3, 1, 2):
        group = dist.new_group([*range(count)])
        mesh = DeviceMesh("cpu", [*range(count)])
        if rank < count:
            found.append(trained(shard(make(), mesh), path, group=group, updates=2, name="adamw"))
        dist.barrier()
    return found


def broken(rank: int, size: int, path: str) -> dict[str, Any]:
    """A save that fails at the last moment, and one whose files are damaged afterwards."""
    told: dict[str, Any] = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            told[name] = call()
        except (ab.AnybatchError, RuntimeError) as error:
            told[name] = f"{type(error).__name__}: {error}"

    def load() -> Any:
        parts = shard(make(seed=1))
        optimizer = OPTIMIZERS["adamw"](parts.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            progress = shards.restore(path, model=parts, optimizers=[optimizer])
        return progress["done"], " ".join(str(one.message) for one in caught)

    attempt("nothing", load)
    for number in (1, 2):
        attempt(f"saved {number}", lambda: trained(shard(make()), path, group=None, updates=1, name="adamw"))
    with mock.patch("anybatch.train.shards.os.replace", side_effect=OSError(28, "No space left")):
        attempt("full", lambda: trained(shard(make()), path, group=None, updates=1, name="adamw"))
    attempt("after full", load)
    dist.barrier()
    newest = max(Path(path).glob("step-*"))
    if not rank:
        file = next(one for one in newest.glob("*.distcp"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    attempt("damaged", load)
    wide = shard(make(blocks=1))
    attempt("another model", lambda: shards.restore(path, model=wide))
    sgd = torch.optim.SGD((same := shard(make())).parameters())
    attempt("another optimizer", lambda: shards.restore(path, model=same, optimizers=[sgd]))
    return told
