"""A step of this rank beside one of a process with all rows: models, losses, and what is compared."""

import copy
import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import anybatch as ab
from anybatch.core import tree
from tests import zoo
from tests.faults.faulty import Fault
from tests.laws.check import samples
from tests.options import flat

WIDTH, LENGTH, WORDS = 6, 5, 7
CLOSE = 1e-12  # of numbers near 1 in float64


def share(batch: Any, sizes: Sequence[int], rank: int) -> Any:
    """The rows of a rank."""
    stops = [sum(sizes[:end]) for end in range(len(sizes) + 1)]
    return tree.map_leaves(itemgetter(slice(*[*pairwise(stops)][rank])), batch)


def draw_sizes(drawn: random.Random, rows: int, size: int) -> list[int]:
    """Rows of each rank, often none."""
    stops = sorted(drawn.choice([0, rows, drawn.randint(0, rows)]) for _ in range(size - 1))
    return [stop - start for start, stop in pairwise([0, *stops, rows])]


def rows(count: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Words and the next ones, of one to all places that count."""
    drawn = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(WORDS, (count, LENGTH), generator=drawn) for _ in range(2))
    lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=drawn)
    return x, y.masked_fill(torch.arange(LENGTH) >= lengths, -100)


def digest(values: Sequence[Any]) -> str:
    """The bits of values."""
    plain = [value.tolist() if isinstance(value, Tensor) else value for value in values]
    return hashlib.blake2b(repr(plain).encode()).hexdigest()


def told(call: Callable[[], object]) -> str:
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def passing(self: Any, x: Tensor) -> Tensor:
    """Return `x`, and pass a place in forward and in backward."""
    self.fault(f"forward {self.name}")
    if x.requires_grad:
        x.register_hook(lambda _: self.fault(f"backward {self.name}") and None)
    return x


def make(blocks: int = 2, *, seed: int = 0, is_warm: bool = False) -> Any:
    """Some blocks of odd width over an embedding; a warm one has a second output that all rows share."""
    torch.manual_seed(seed)
    fault, n = Fault(), WIDTH
    parts = list[nn.Module]()
    for name in map(str, range(blocks)):
        place = zoo.Made(passing, name=name, fault=fault)
        parts.append(nn.Sequential(nn.LayerNorm(n), nn.Linear(n, 9), nn.Tanh(), place, nn.Linear(9, n)))
    model: Any = zoo.words(nn.Sequential(*parts), width=n, count=WORDS)
    if is_warm:
        scores, named = type(model).forward, dict(model.named_children(), warmth=nn.Parameter(torch.ones(1)))
        model = zoo.Made(lambda self, x: (scores(self, x), self.warmth.exp().sum()), **named)
    model.fault = fault
    return model.double()


def shard(model: Any, mesh: Any = None, **options: Any) -> Any:
    """Shard a copy of the model, block by block."""
    model = copy.deepcopy(model)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.inner:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def copies(size: int) -> Any:
    """A mesh of two copies of shards."""
    return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))


def tokens(model: nn.Module, micro: tuple[Tensor, Tensor]) -> ab.Total:
    x, y = micro
    return ab.Total(F.cross_entropy(model(x), y, reduction="sum"), (y != -100).sum())


def contrast(out: Tensor, warmth: Tensor, y: Tensor, rows: Any = None) -> Any:
    """Rows with as many words that count attract each other."""
    pairs = warmth * (each := F.normalize(out.flatten(1))) @ each.T
    likes = ((counts := (y != -100).sum(1, dtype=out.dtype))[:, None] - counts).abs().neg().softmax(1)
    losses = F.cross_entropy(pairs, likes, reduction="none")
    return losses.mean() if rows is None else ab.Total(losses[rows].sum(), len(rows))


def outputs(model: nn.Module, micro: Any) -> Any:
    return (*model(micro[0]), micro[1])


LOSSES: dict[str, Callable[[], Any]] = {
    "torch": nn.CrossEntropyLoss,
    "tokens": lambda: tokens,
    "rows": lambda: ab.PerRow(lambda logits, y: F.cross_entropy(logits, y, reduction="none").sum(1)),
    "model": lambda: ab.ModelLoss(call=lambda model, micro: F.cross_entropy(model(micro[0]), micro[1])),
    "whole": lambda: ab.WholeBatch(contrast, outputs=outputs),
    "whole by rows": lambda: ab.WholeBatch(contrast, outputs=outputs, loss_rows=3),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


def whole(model: nn.Module, state: Sequence[Tensor] = ()) -> list[Tensor]:
    """Parameters and buffers, and what else there is, gathered."""
    values = *model.parameters(), *(one for one in model.buffers() if one.is_floating_point()), *state
    return [one.detach().full_tensor() if hasattr(one, "full_tensor") else one.detach() for one in values]


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Those of a model and the state of its optimizer."""
    return digest(whole(model, [one for p in model.parameters() for one in optimizer.state[p].values()]))


def error_of(parts: nn.Module, model: nn.Module) -> float:
    """The largest difference of a parameter."""
    pairs = zip(whole(parts), whole(model), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def take(step: ab.Step, mine: Any, way: str = "step", pieces: Callable[[], int] = lambda: 2) -> ab.StepReport:
    """An update of the rows of this rank: of a step, of samples, or of a window with so many a time."""
    if way == "step":
        return step(mine)
    if way == "collate":
        return step(samples(mine) or None)
    with step.window() as window:
        while left := len(tree.flatten(mine).leaves[0]):
            count = min(pieces(), left)
            micro, mine = (share(mine, [count, left - count], at) for at in range(2))
            window.add(micro)
        return window.close()


class Pair:
    """A step of this rank (`parts`, or a copy of the model), and one of a process with the whole batch.

    Losses and optimizers are names in the tables or what makes one. Options are those of the rank's step, or
    of `both`; where `bound` is None nothing is compared."""

    def __init__(
        self, model: Any, loss: Any = "tokens", optimizer: Any = "momentum", *, parts: Any = None,
        both: dict[str, Any] | None = None, bound: float | None = CLOSE, **options: Any,
    ) -> None:  # fmt: skip
        self.parts, self.model, self.bound = copy.deepcopy(model) if parts is None else parts, model, bound

        def make_step(one: Any, **own: Any) -> ab.Step:
            made = OPTIMIZERS.get(optimizer, optimizer)(one.parameters())
            return ab.Step(one, LOSSES.get(loss, loss)(), made, **flat(dict(both or {}), **own))

        self.step = make_step(self.parts, **options)
        self.twin = make_step(model, strategy="local", check=False)

    def update(self, batch: Any, sizes: Sequence[int], rank: int, **ways: Any) -> ab.StepReport:
        """Update both, or none where this rank raises; the results and what was told are the same."""
        report, expected = take(self.step, share(batch, sizes, rank), **ways), self.twin(batch)
        assert report.rows == sum(sizes)
        if self.bound is not None:
            assert report.updated
            for name in ("loss", "grad_norm"):
                one, other = getattr(report, name), getattr(expected, name)
                assert abs(one - other) <= self.bound * max(1.0, abs(other)), (name, one, other)
            assert self.error <= self.bound, self.error
        return report

    @property
    def error(self) -> float:
        """The largest difference of a parameter."""
        return error_of(self.parts, self.model)

    @property
    def bits(self) -> str:
        return digest(whole(self.parts))
