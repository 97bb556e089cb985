"""Checkpoints of sharded models: saved in any layout, loaded into any other, never loaded where not whole."""

import json
import random
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as Placed

import anybatch as ab
from anybatch.parallel import checkpoint
from tests.parallel.pairs import OPTIMIZERS, digest, draw_sizes, make, rows, shard, share, tokens, told, whole
from tests.parallel.spawned import on_ranks


def loaded(path: Path, *, group: Any = None, **everything: Any) -> dict[str, Any]:
    """Load the newest checkpoint by all ranks; return what the caller had saved in it."""
    found = checkpoint.load(path, is_many=True, group=group)
    checkpoint.restore(found, **everything, group=group)
    return found.progress


def bits(parts: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    state = [one for p in parts.parameters() for one in optimizer.state[p].values()]
    return digest(
        [*whole(parts), *[one.full_tensor() if hasattr(one, "full_tensor") else one for one in state]]
    )


def train(
    parts: Any, path: Path, *, updates: int, group: Any = None, size: int = 2, rank: int = 0
) -> list[str]:
    """Go on from the newest checkpoint, if there is one, and save; hashes of what was loaded and saved."""
    optimizer = OPTIMIZERS["adamw"](parts.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    options = ab.Options(scheduler=scheduler, check=False)
    step = ab.Step(parts, tokens, optimizer, micro_batch=2, options=options)
    everything = {"model": parts, "optimizers": [optimizer], "schedulers": [scheduler], "group": group}
    done = loaded(path, **everything)["done"] if path.exists() else 0
    found = [bits(parts, optimizer) + str(optimizer.param_groups[0]["lr"])]
    for number in range(updates):
        step(share(rows(7, seed=number), draw_sizes(random.Random(number), 7, size), rank))
    done += updates
    checkpoint.save(path, done, progress={"done": done}, keep=2, **everything)
    return [*found, bits(parts, optimizer) + str(optimizer.param_groups[0]["lr"])]


@on_ranks(4, seconds=120.0)
def test_a_checkpoint_is_loaded_by_any_number_of_ranks(rank: int, size: int, tmp_path: Path) -> None:
    """Saved and loaded by 4, 3, 1 and 2 ranks in turn, two updates each; other ranks wait."""
    before = ""
    for count in (4, 3, 1, 2):
        group, mesh = dist.new_group([*range(count)]), DeviceMesh("cpu", [*range(count)])
        if rank < count:
            parts, where = shard(make(), mesh), tmp_path / "run"
            first, last = train(parts, where, updates=2, group=group, size=count, rank=rank)
            assert rank or before in ("", first)  # rank 0 is always there
            before = last
        dist.barrier()


LAYOUTS: dict[str, tuple[tuple[int, ...], int]] = {  # a mesh, and the dimension that is cut
    "rows": ((4,), 0),
    "columns": ((4,), 1),
    "replicas of rows": ((2, 2), 0),
    "replicas of columns": ((2, 2), 1),
}


@on_ranks(4, seconds=120.0)
def test_checkpoints_of_any_layout_load_into_any_other(rank: int, size: int, tmp_path: Path) -> None:
    """Also of fewer rows than ranks."""

    def make(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        shape, dim = LAYOUTS[layout]
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6)).double()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "cuts")[-len(shape) :])
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda one: Placed(min(dim, one.ndim - 1)))
        return model, torch.optim.AdamW(model.parameters())

    for there in LAYOUTS:
        model, optimizer = make(there, 0)
        model(torch.randn(3, 8).double()).sum().backward()
        optimizer.step()
        checkpoint.save(tmp_path / there, 1, model=model, optimizers=[optimizer])
        expected = bits(model, optimizer)
        for here in LAYOUTS:
            model, optimizer = make(here, 1)
            loaded(tmp_path / there, model=model, optimizers=[optimizer])
            assert bits(model, optimizer) == expected, (there, here)
    found = checkpoint.load(tmp_path / "columns").model  # by this rank alone, and whole
    assert all(torch.equal(found[name], one.full_tensor()) for name, one in model.state_dict().items())
    slices = json.loads((tmp_path / "rows" / "step-00000001" / "checkpoint.json").read_text())["tensors"]
    files = [f"rank-{rank}.safetensors" for rank in range(4)]
    assert slices["model/0.bias"]["slices"] == [[files[at], 3 * at, 3 * at + 3] for at in range(4)]
    assert slices["model/1.bias"]["slices"] == [[files[at], 2 * at, 2 * at + 2] for at in range(3)]


@on_ranks(2, seconds=120.0)
def test_a_checkpoint_that_is_not_whole_is_never_loaded(rank: int, size: int, tmp_path: Path) -> None:
    """A save that fails at the last moment, and one whose files are damaged afterwards."""
    path = tmp_path / "run"

    def load(model: Any = None, kind: Any = OPTIMIZERS["adamw"]) -> int:
        model = model or shard(make(seed=1))
        return loaded(path, model=model, optimizers=[kind(model.parameters())])["done"]

    def update() -> None:
        train(shard(make()), path, updates=1, rank=rank)

    assert "got no folder with one" in told(load)
    for _ in range(2):
        update()
    with mock.patch("anybatch.parallel.checkpoint.os.replace", side_effect=OSError(28, "No space left")):
        assert "No space left" in told(update)
    with warnings.catch_warnings(record=True) as caught:
        assert load() == 2
    assert not caught
    dist.barrier()
    if not rank:
        file = next(max(path.glob("step-*")).glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load() == 1
        assert "inner.1" in told(lambda: load(shard(make(blocks=1))))
        assert "optimizer 0: AdamW there, SGD here" in told(lambda: load(kind=torch.optim.SGD))
