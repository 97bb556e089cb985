"""Options, refusals, collectives and checkpoints of sharded models. Called on every rank."""

import copy
import random
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard as Placed

import anybatch as ab
from anybatch.core.errors import RankError
from anybatch.parallel import Shard, checkpoint, rank as rank_of, ranks
from tests.parallel.cases import digest, draw_sizes, share
from tests.parallel.sharded import OPTIMIZERS, WORDS, error_of, make, rows, said_by, shard, tokens, whole

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
        "by length": ({}, {"options": {"order": "length"}}),
    }
    for name, (sharding, options) in cases.items():
        dtype = torch.float32 if "bf16" in name or "policy" in name else torch.float64
        model = make().to(dtype)
        model.words.padding_idx = 0 if name == "by length" else None
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
        flows = [ab.GradientFlow(one, every=1) for one in (parts, model)]
        mine.attach([watchers[0], flows[0]])
        twin.attach([watchers[1], flows[1]])
        for number in range(3):
            batch = rows(7, seed=number)
            if name == "by length":
                batch = batch[0].remainder(WORDS - 1).add(1).masked_fill(batch[1] == -100, 0), batch[1]
            with torch.no_grad():  # a forward alone leaves the root unsharded
                parts(batch[0])
            mine(share(batch, [5, 2, *[0] * (size - 2)], rank))
            twin(batch)
        found[name] = error_of(parts, model)
        if name == "plain":
            found["shown"] = max(abs(one - other) for one, other in zip(*shown, strict=True))
            ratios = zip(*[one.last.ratio for one in flows if one.last], strict=True)
            found["flow"] = max(abs(one - other) for one, other in ratios)
    model, batch = make(), rows(7)
    parts = shard(model)
    loss, optimizer = ab.BatchLoss(parts, tokens, micro_batch=2), OPTIMIZERS["momentum"](parts.parameters())
    loss(share(batch, [5, 2, *[0] * (size - 2)], rank)).backward()
    optimizer.step()
    steps(parts, model)[1](batch)
    found["BatchLoss"] = error_of(parts, model)
    return found


def poisoned(rank: int, size: int) -> list[bool]:
    """Updates made after a first batch of NaN: on rank 1, and on rank 0, from which rank 1 has its rows."""
    found: list[bool] = []
    for bad, split in ((1, [5, 2]), (0, [7, 0])):
        parts = fully_shard(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
        options = ab.Options(non_finite="skip")
        step = ab.Step(parts, nn.MSELoss(), optimizer, micro_batch=2, options=options)
        x, y = share((torch.randn(7, 3), torch.randn(7, 2)), split, rank)
        found.append(step((x * torch.nan if rank == bad else x, y)).updated)
        found.append(step((x, y)).updated)
    return found


def named(rank: int, size: int) -> list[str]:
    """The errors of copies of shards where rank 1 fails in its first forward; then where all wait."""
    mesh, told = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards")), list[str]()

    def fails(*args: Any, **options: Any) -> Any:
        if rank == 1 and not told:
            raise ValueError("no")
        time.sleep(1.0)  # as long as rank 1 needs to leave its error
        raise RuntimeError("Timed out")

    for _ in range(2):
        step = steps(shard(make(), mesh), make())[0]
        with mock.patch.object(dist, "all_gather_single", side_effect=fails):
            try:
                step(share(rows(size), [1] * size, rank))
            except (RankError, ValueError) as error:
                told.append(str(error))
    return told


class Watcher(ab.Callback):
    """A callback that takes the norm of each gradient."""

    def __init__(self, norms: list[float]) -> None:
        self.norms = norms

    def gradients(self, gradients: Any) -> None:
        self.norms += [float(one.norm()) for one in gradients.values()]


class MicroWatcher(ab.Callback):
    def micro_gradients(self, micro: Any, gradients: Any, scale: float) -> None:
        raise AssertionError


OPTIONS = "strategy", "non_finite", "recompute"


def refused(rank: int, size: int) -> dict[str, str]:
    """What every rank is told."""
    batch = share(rows(8), [4, 4], rank)

    def stepped(model: Any = None, loss: Any = tokens, **options: Any) -> Callable[[], object]:
        model = shard(make()) if model is None else model
        given = {name: options.pop(name) for name in [*options] if name in OPTIONS}
        optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
        return lambda: ab.Step(model, loss, optimizer, options=ab.Options(**given), micro_batch=2, **options)(
            batch
        )

    def in_parts() -> Any:
        model = make()
        fully_shard(model.blocks[0])
        return model

    def nested() -> Any:
        model = make()
        fully_shard(model.blocks[0].up)
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

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

    parts = shard(make())
    cases: dict[str, Callable[[], object]] = {
        "local": stepped(strategy="local"),
        "replicate": stepped(strategy="replicate"),
        "Shard": stepped(make(), strategy=Shard()),
        "parts": stepped(in_parts()),
        "ignored": stepped(ignoring()),
        "nested": stepped(nested(), recompute="all"),
        "meshes": stepped(on_two_meshes()),
        "fp16-mixed": stepped(precision="fp16-mixed"),
        "bf16-true": stepped(precision="bf16-true"),
        "drop": stepped(non_finite="drop"),
        "memory": stepped(memory="1GB", strategy=Shard(hold=True)),
        "micro_gradients": stepped(callbacks=[MicroWatcher()]),
        "callbacks": stepped(callbacks=[Watcher([])] if rank else []),
        "hold": stepped(strategy=Shard(hold=rank == 0)),
        "terms": stepped(loss=two),
        "FSDP1": lambda: stepped(FullyShardedDataParallel(make(), device_id=torch.device("cpu")))(),
        "check": lambda: ab.check(parts, tokens, batch),
        "plan": lambda: ab.plan(parts, tokens, torch.optim.SGD(parts.parameters()), batch, memory="1GB"),
        "flow": lambda: ab.gradient_flow(parts, tokens, batch),
    }
    return said_by(cases)


def only_in_words(model: Any, mesh: Any) -> Any:
    model.blocks[0].requires_grad_(requires_grad=False)
    return shard(model, mesh)


POLICY = MixedPrecisionPolicy(reduce_dtype=torch.float32)
# What rank 1 does otherwise: how it shards, the options of its step, and those of `ab.Options`.
ODD: dict[str, tuple[Callable[[Any, Any], Any], dict[str, Any], dict[str, Any]]] = {
    "micro_batch": (shard, {"micro_batch": 1}, {}),
    "no micro_batch": (shard, {"micro_batch": None}, {}),
    "recompute": (shard, {}, {"recompute": "all"}),
    "clip_norm": (shard, {"clip_norm": 0.1}, {}),
    "precision": (shard, {"precision": "bf16-mixed"}, {}),
    "non_finite": (shard, {}, {"non_finite": "skip"}),
    "accumulate": (shard, {}, {"accumulate": torch.float64}),
    "resharding": (lambda model, mesh: shard(model, mesh, reshard_after_forward=False), {}, {}),
    "policy": (lambda model, mesh: shard(model, mesh, mp_policy=POLICY), {}, {}),
    "modules": (lambda model, mesh: fully_shard(copy.deepcopy(model), mesh=mesh), {}, {}),
    "trained": (only_in_words, {}, {}),
}


def odd(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    """The error of an update, or what is said, where rank 1 does something otherwise."""
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (size,))
    for name in names:
        model = make()
        make_parts, given, options = ODD[name] if rank == 1 else (shard, {}, {})
        parts = make_parts(model, mesh)
        mine = steps(parts, model, **{"micro_batch": 2, **given}, options=options)[0]
        twin = steps(parts, model)[1]
        batch = rows(7)
        try:
            mine(share(batch, [4, 3, *[0] * (size - 2)], rank))
            twin(batch)
            found[name] = error_of(parts, model)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def left_out(rank: int, size: int) -> str:
    """What the ranks of a mesh of two axes are told that leaves others out."""
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("copies", "shards"))
    try:
        if rank < 2:
            steps(shard(make(), mesh), make())
    except ab.AnybatchError as error:
        return str(error)
    return ""


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


def accumulated(rank: int, size: int) -> dict[str, Any]:
    """Laws of accumulation on sharded models: the error of three updates in each way to shard and to call.

    After the tests of gradient accumulation of PyTorch (fully_shard), torchtitan and accelerate.
    """

    def grouped(model: Any) -> Any:
        fully_shard([model.blocks[0], model.blocks[1]])
        return fully_shard([model.words, model.out]) and fully_shard(model)

    def unsynced(parts: Any) -> None:
        parts.set_requires_gradient_sync(False)
        parts.blocks[0].set_gradient_divide_factor(2.0)
        parts.set_is_last_backward(False)

    def only_root(parts: Any) -> None:
        parts.set_requires_gradient_sync(False, recurse=False)
        parts.set_requires_all_reduce(False)

    copies = {"mesh": init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))}
    hold = {"strategy": Shard(hold=True)}
    ways: dict[str, tuple[Callable[[Any], Any], dict[str, Any], Callable[[Any], None]]] = {
        "blocks": (shard, {}, id),
        "root only": (lambda model: fully_shard(copy.deepcopy(model)), {}, id),
        "modules in one group": (lambda model: grouped(copy.deepcopy(model)), hold, id),
        "gathered once per micro-batch": (lambda model: shard(model, reshard_after_forward=False), hold, id),
        "gathered again from fewer ranks": (lambda model: shard(model, reshard_after_forward=2), {}, id),
        "copies": (lambda model: shard(model, **copies), {}, id),
        "copies, held": (lambda model: shard(model, **copies), hold, id),
        "flags of the caller": (shard, {}, unsynced),
        "flags of the caller, held": (shard, hold, unsynced),
        "flags of the caller, copies": (lambda model: shard(model, **copies), {}, only_root),
    }
    found: dict[str, Any] = {}
    for name, (make_parts, options, between) in ways.items():
        model = make()
        try:
            parts = make_parts(model)
            mine, twin = steps(parts, model, micro_batch=2, options=options)
            for number in range(3):
                batch = rows(9, seed=number)  # of one to five tokens that count
                between(parts)
                mine(share(batch, [5, 3, 1, 0][:size] if size > 2 else [6, 3], rank))
                twin(batch)
            found[name] = error_of(parts, model)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def sums_over_copies(rank: int, size: int, hold: bool) -> list[list[int]]:
    """Reduce-scatters, and sums over copies but for the norm, of steps of one and of three micro-batches."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))
    parts, found = shard(make(), mesh), list[list[int]]()
    step = steps(parts, make(), micro_batch=1, options={"strategy": Shard(hold=hold)})[0]
    for count in (1, 1, 3):
        names = "reduce_scatter_single", "all_reduce"
        with ExitStack() as patches:
            made = [
                patches.enter_context(mock.patch.object(dist, one, wraps=getattr(dist, one))) for one in names
            ]
            step(share(rows(size * count), [count] * size, rank))
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
        done = loaded(path, **everything)["done"]
        found["loaded"] = bits(parts, optimizer) + str(optimizer.param_groups[0]["lr"])
    size, rank = ranks(group), rank_of(group)
    for number in range(updates):
        batch = rows(7, seed=number)
        step(share(batch, draw_sizes(random.Random(number), 7, size), rank))
    if updates or save_at:
        checkpoint.save(
            path, save_at or done + updates, progress={"done": done + updates}, keep=2, **everything
        )
        found["saved"] = bits(parts, optimizer) + str(optimizer.param_groups[0]["lr"])
    return found


def loaded(path: str, *, group: Any = None, **everything: Any) -> dict[str, Any]:
    """Load the newest checkpoint by all ranks; return what the caller had saved in it."""
    found = checkpoint.load(path, is_many=True, group=group)
    checkpoint.restore(found, **everything, group=group)
    return found.progress


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


LAYOUTS: dict[str, tuple[tuple[int, ...], int]] = {  # a mesh, and the dimension that is cut
    "rows": ((4,), 0),
    "columns": ((4,), 1),
    "replicas of rows": ((2, 2), 0),
    "replicas of columns": ((2, 2), 1),
}


def laid_out(rank: int, size: int, path: str) -> list[str]:
    """Save in each layout and load into each other one, also of fewer rows than ranks; what went wrong."""

    def make(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        shape, dim = LAYOUTS[layout]
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6)).double()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "cuts")[-len(shape) :])
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda one: Placed(min(dim, one.ndim - 1)))
        return model, torch.optim.AdamW(model.parameters())

    wrong: list[str] = []
    for there in LAYOUTS:
        model, optimizer = make(there, 0)
        model(torch.randn(3, 8).double()).sum().backward()
        optimizer.step()
        checkpoint.save(f"{path}/{there}", 1, model=model, optimizers=[optimizer])
        expected = bits(model, optimizer)
        for here in LAYOUTS:
            model, optimizer = make(here, 1)
            loaded(f"{path}/{there}", model=model, optimizers=[optimizer])
            if bits(model, optimizer) != expected:
                wrong.append(f"{there} -> {here}")
    found = checkpoint.load(f"{path}/columns").model  # by this rank alone, and whole
    expected = {name: one.full_tensor() for name, one in model.state_dict().items()}
    return wrong + [name for name, one in found.items() if not torch.equal(one, expected[name])]


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
            progress = loaded(path, model=parts, optimizers=[optimizer])
        return progress["done"], " ".join(str(one.message) for one in caught)

    attempt("nothing", load)
    for number in (1, 2):
        attempt(f"saved {number}", lambda: trained(shard(make()), path, group=None, updates=1, name="adamw"))
    with mock.patch("anybatch.parallel.checkpoint.os.replace", side_effect=OSError(28, "No space left")):
        attempt("full", lambda: trained(shard(make()), path, group=None, updates=1, name="adamw"))
    attempt("after full", load)
    dist.barrier()
    newest = max(Path(path).glob("step-*"))
    if not rank:
        file = next(one for one in newest.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    attempt("damaged", load)
    wide = shard(make(blocks=1))
    attempt("another model", lambda: loaded(path, model=wide))
    sgd = torch.optim.SGD((same := shard(make())).parameters())
    attempt("another optimizer", lambda: loaded(path, model=same, optimizers=[sgd]))
    return told
