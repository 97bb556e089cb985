"""Checkpoints of sharded models: saved in any layout, loaded into any other, never loaded where not whole."""

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as Placed

import anybatch as ab
from anybatch.parallel import checkpoint
from tests.parallel.pairs import OPTIMIZERS, bits_of, make, rows, shard, share, tokens, told
from tests.parallel.spawned import on_ranks


def loaded(path: Path, **everything: Any) -> dict[str, Any]:
    """Load the newest checkpoint by all ranks; return what the caller had saved in it."""
    checkpoint.restore(found := checkpoint.load(path, is_many=True), **everything)
    return found.progress


#: a mesh, and the dimension that is cut
LAYOUTS = {"rows": ((4,), 0), "columns": ((4,), 1), "copies": ((2, 2), 0), "copies of columns": ((2, 2), 1)}


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
        expected = bits_of(model, optimizer)
        for here in LAYOUTS:
            model, optimizer = make(here, 1)
            loaded(tmp_path / there, model=model, optimizers=[optimizer])
            assert bits_of(model, optimizer) == expected, (there, here)
    found = checkpoint.load(tmp_path / "columns").model  # by this rank alone, and whole
    assert all(torch.equal(found[name], one.full_tensor()) for name, one in model.state_dict().items())


@on_ranks(2, seconds=120.0)
def test_a_checkpoint_that_is_not_whole_is_never_loaded(rank: int, size: int, tmp_path: Path) -> None:
    """A save that fails at the last moment, and one whose files are damaged afterwards."""
    path = tmp_path / "run"

    def load(model: Any = None, kind: Any = OPTIMIZERS["adamw"]) -> int:
        model = model or shard(make(seed=1))
        return loaded(path, model=model, optimizers=[kind(model.parameters())])["done"]

    def update(number: int = 3) -> None:
        parts = shard(make())
        optimizer = OPTIMIZERS["adamw"](parts.parameters())
        step = ab.Step(parts, tokens, optimizer, micro_batch=2, options=ab.Options(check=False))
        step(share(rows(7), [4, 3], rank))
        progress = {"done": number}
        checkpoint.save(path, number, progress=progress, keep=2, model=parts, optimizers=[optimizer])

    assert "got no folder with one" in told(load)
    update(1)
    update(2)
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
