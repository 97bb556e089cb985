"""Sharded models within a memory budget, their memory measured as the heap. Called on every rank."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.memory.reading import held_by_malloc

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
        self.peak = self.before = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, held_by_malloc())
        return result
