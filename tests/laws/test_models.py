"""The law holds for models that use their parameters in unusual ways."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.device import needs_sparse
from tests.laws.cases import Problem
from tests.laws.check import check, cut, reference, windowed
from tests.laws.draw import FEATURES, Draw
from tests.toys import Perceptron

ROWS = 7


class SharedMemory(nn.Module):
    """Gradients of two parameters flow through views of one tensor: autograd lets them share its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.high = nn.Parameter(torch.randn(2, FEATURES)), nn.Parameter(torch.randn(FEATURES, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.wide.view(-1) + self.high.view(-1)).view(FEATURES, 2)


class Joined(nn.Module):
    """Gradients are slices of one tensor, and one of them is all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(1, 2)), nn.Parameter(torch.randn(FEATURES - 1, 2))
        self.both = nn.Parameter(torch.randn(FEATURES * 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (torch.cat([self.left, self.right]) + self.both.view(FEATURES, 2))


class Tied(nn.Module):
    """One parameter under two names, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, 2)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.again(self.first(self.first(x).tanh()).tanh()))


class Routed(nn.Module):
    """Each row goes to one of two experts, so that many a micro-batch leaves one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Perceptron(FEATURES, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 2)
        for expert, rows in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            if rows.any():
                out = out.index_put((rows.nonzero().squeeze(1),), expert(x[rows]))
        return out


class Recomputed(nn.Module):
    """Activations are rebuilt in backward; the reentrant way runs a backward inside the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layers = nn.ModuleList([Perceptron(FEATURES, FEATURES), Perceptron(FEATURES, 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Sparse(nn.Module):
    """An embedding whose gradient holds only the rows it used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, FEATURES, sparse=True), Perceptron(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding((x[:, 0] * 100).long() % 5))


class Spread(nn.Module):
    """One number for all rows and outputs: its gradient is an expanded one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] * self.scale + self.shift


MODELS: dict[str, Callable[[], nn.Module]] = {
    "shared memory": SharedMemory,
    "joined": Joined,
    "tied": Tied,
    "routed": Routed,
    "recomputed": lambda: Recomputed(use_reentrant=False),
    "recomputed-reentrant": lambda: Recomputed(use_reentrant=True),
    "sparse": Sparse,
    "frozen": lambda: nn.Sequential(  # a layer in the middle
        nn.Linear(FEATURES, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)
    ),
    "spread": Spread,
    "batch norm in evaluation": lambda: nn.Sequential(
        nn.BatchNorm1d(FEATURES), Perceptron(FEATURES, 2)
    ).eval(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "own": {},
    "float64 sums": {"accumulate": torch.float64},
    "looked at": {"non_finite": "drop"},
}


def problem(name: str) -> Problem:
    draw = Draw(ROWS, seed=1, mask="none", dtype=torch.float64, options={})
    batch = draw.normal(FEATURES), draw.normal(2)
    return Problem(model=MODELS[name]().double(), loss=F.mse_loss, batch=batch, rows=ROWS)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[needs_sparse] * (one == "sparse")) for one in MODELS]
)
def test_any_cut_gives_the_whole_batch(name: str, options: dict[str, Any]) -> None:
    given = problem(name)
    whole = reference(given)
    for micro_batch in range(1, ROWS + 1):
        check(cut(given, micro_batch, **options), whole)
    for sizes in ([ROWS], [1] * ROWS, [4, 1, 2]):
        check(windowed(given, sizes, **options), whole)


@pytest.mark.parametrize("name", ["shared memory", "joined", "tied"])
def test_clipping_scales_each_gradient_once(name: str) -> None:
    given = problem(name)
    whole = reference(given)
    norm = torch.cat([gradient.flatten() for gradient in whole.gradients.values()]).norm()
    factor = 0.1 / (norm + 1e-6)
    clipped = {name: gradient * factor for name, gradient in whole.gradients.items()}
    ways = (partial(cut, given, 2), partial(cut, given, ROWS), partial(windowed, given, [4, 1, 2]))
    for take in ways:
        check(take(clip_norm=0.1), type(whole)(loss=whole.loss, gradients=clipped))
