"""Sharded models within a memory budget, their memory measured as the heap. Called on every rank."""

import copy
import gc
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch as ab
from anybatch.core import local
from anybatch.core.errors import BudgetError, OutOfMemoryError, RankError
from anybatch.memory.reading import held_by_malloc
from tests.parallel import sharded as small
from tests.parallel.cases import draw_sizes, share
from tests.parallel.sharded import error_of

LAYERS, WIDTH, LENGTH, WORDS = 12, 32, 48, 40


class Layer(nn.Module):
    """A block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """Twelve blocks over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden).transpose(1, 2)


def make() -> Gpt:
    torch.manual_seed(0)
    return Gpt().double()


def shard(model: Gpt, mesh: Any = None) -> Any:
    model = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def rows(count: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randint(WORDS, (count, LENGTH), generator=drawn)
    return x, torch.randint(WORDS, (count, LENGTH), generator=drawn)


class Heap(TorchDispatchMode):
    """The most bytes that malloc has given out, looked at after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, held_by_malloc())
        return result


def within(rank: int, size: int, count: int, memory: int | None) -> dict[str, Any]:
    """Three updates of the GPT, `count` rows per rank: heap, cuts, whether held, the error; or a refusal."""
    model = make()
    parts = shard(model)
    loss, sgd = nn.CrossEntropyLoss(), small.OPTIMIZERS["momentum"]
    optimizer = sgd(parts.parameters())
    step = ab.Step(parts, loss, optimizer, memory=memory)
    twin = ab.Step(model, loss, sgd(model.parameters()), options=ab.Options(strategy="local", check=False))
    told: dict[str, Any] = {"heap": [], "cut": [], "held": [], "error": 0.0}
    for number in range(3):
        batch = rows(count * size, seed=number)
        mine = tuple(one[count * rank : count * (rank + 1)].clone() for one in batch)
        gc.collect()
        held = [*map(local, parts.parameters()), *mine]
        held += [local(one) for slots in optimizer.state.values() for one in slots.values()]
        others = held_by_malloc() - sum(
            {one.data_ptr(): one.untyped_storage().nbytes() for one in held}.values()
        )
        del held
        try:
            with Heap() as heap:
                report = step(mine)
        except BudgetError as error:
            return {"said": str(error), "smallest": error.smallest}
        told["heap"].append(heap.peak - others)
        told["cut"].append(report.cut)
        told["held"].append(report.held)
        twin(batch)
    return {**told, "error": error_of(parts, model)}


def drawn(rank: int, size: int, seed: int) -> str:
    """Some steps or windows within drawn budgets, held against one process; the error that ended them."""
    dice = random.Random(seed)
    model = small.make(seed=seed)
    mesh = None
    if size == 4 and dice.random() < 0.5:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    parts, way = small.shard(model, mesh), dice.choice(["step", "step", "window"])
    budgets = [
        dice.choice(["1GB", "1GB", 100_000, 145_000, 160_000, 200_000, 200_000, None]) for _ in range(size)
    ]
    memory, what = budgets[rank], dice.choice([None, None, small.NO_MEMORY, ValueError("no")])
    at_rank, place, passes = (
        dice.randrange(size),
        f"{dice.choice(['forward', 'backward'])} 1",
        dice.randrange(9),
    )
    step = ab.Step(
        parts,
        small.tokens,
        small.OPTIMIZERS["momentum"](parts.parameters()),
        memory=memory,
        micro_batch=2 if memory is None else None,
    )
    alone = ab.Options(strategy="local", check=False)
    twin = ab.Step(model, small.tokens, small.OPTIMIZERS["momentum"](model.parameters()), options=alone)
    said = f"{seed}: {way}, {budgets}, {what!r} on {at_rank} at {place} after {passes}, {mesh}"
    cuts: list[Any] = []
    for number in range(5):
        sizes = draw_sizes(dice, dice.randint(size, 9 * size), size)
        batch = small.rows(sum(sizes), seed=100 * seed + number)
        mine = share(batch, sizes, rank)
        if number == 2 and rank == at_rank and what is not None:
            parts.fault.arm(place, passes, what)
        try:
            if way == "step":
                report = step(mine if sizes[rank] else None)
            else:
                with step.window() as window:
                    for start in range(0, sizes[rank], 7):
                        window.add(tuple(part[start : start + 7] for part in mine))
                    report = window.close()
        except (BudgetError, OutOfMemoryError, RankError, ValueError) as error:
            assert error_of(parts, model) < 1e-12, said
            return f"{type(error).__name__}: {error}"
        twin(batch)
        cuts.append((report.cut, report.held, report.redone))
        assert report.rows == sum(sizes), said
        assert error_of(parts, model) < 1e-12, said
    return str(cuts)


def several(rank: int, size: int, seed: int, count: int) -> list[str]:
    return [drawn(rank, size, seed + index) for index in range(count)]
