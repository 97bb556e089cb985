"""Steps of sharded models on drawn rows, held against the whole batch in one process. Called on every rank."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import anybatch as ab
from anybatch.parallel import Shard
from anybatch.testing import relative_error
from tests.parallel.cases import digest, draw_sizes, share

WIDTH, LENGTH, WORDS = 6, 5, 7


class Block(nn.Module):
    """An odd width, so that shards differ in size."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.faults: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    """Some blocks over an embedding: logits of shape (rows, words, length)."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
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


def one(rank: int, size: int, seed: int) -> list[Any]:
    """One drawn case of three updates; the error of its parameters, and a hash of those of this rank."""
    drawn = random.Random(seed)
    model = make(drawn.choice([1, 2]), seed=seed)
    name, way = drawn.choice([*LOSSES]), drawn.choice(["step", "step", "window", "collate"])
    optimizer, micro_batch = drawn.choice([*OPTIMIZERS]), drawn.choice([None, 1, 2, 3])
    clip_norm, compensated, hold = drawn.choice([None, 0.05]), drawn.random() < 0.2, drawn.random() < 0.4
    mesh = init_device_mesh("cpu", (2, size // 2)) if size == 4 and drawn.random() < 0.5 else None
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
    error = relative_error(whole(parts), whole(model))
    said = f"seed {seed}: {name}, {way}, {optimizer}, {micro_batch}, hold {hold}, {compensated}, {sizes} rows: {error}"
    assert error < (1e-7 if optimizer == "adamw" else 1e-12), said
    return [error, digest(whole(parts))]


def stack(samples: Sequence[Any]) -> Any:
    return tuple(torch.stack(column) for column in zip(*samples, strict=True))


def several(rank: int, size: int, seed: int, count: int) -> list[Any]:
    return [one(rank, size, seed + index) for index in range(count)]
