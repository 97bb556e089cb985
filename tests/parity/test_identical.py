"""A step is, bit for bit, the loop a person would have written: uncut five lines, cut the same sums."""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch import Step, StepReport
from tests.options import flat
from tests.snapshots import same
from tests.zoo import Made

UPDATES, ROWS, CLASSES, LENGTH = 8, 12, 5, 6
CLIPS = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}
Batch = tuple[Any, Tensor]
MakeBatch = Callable[[torch.dtype], Batch]
MakeOptimizer = Callable[[nn.Module], Optimizer]


# ---- models


def tied() -> nn.Module:
    """A language model whose input and output embeddings are one parameter."""
    return Made(
        lambda self, tokens: F.linear(self.block(self.words(tokens)), self.words.weight).transpose(1, 2),
        words=nn.Embedding(CLASSES, 8),
        block=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
    )


def conv_net() -> nn.Module:
    """With running statistics and random numbers."""
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, CLASSES))


def mlp(last: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES), last or nn.Identity())


def classes(*shape: int) -> Tensor:
    return torch.randint(CLASSES, (ROWS, *shape))


def mlp_batch(dtype: torch.dtype) -> Batch:
    return torch.randn(ROWS, 4, dtype=dtype), classes()


def image_batch(dtype: torch.dtype) -> Batch:
    return torch.randn(ROWS, 1, 8, 8, dtype=dtype), classes()


def token_batch(dtype: torch.dtype) -> Batch:
    target = classes(LENGTH)
    target[torch.rand(ROWS, LENGTH) < 0.3] = -100
    return classes(LENGTH), target


class Problem(NamedTuple):
    """A model, its rows, and a loss with what its sum over all rows is divided by."""

    build: Callable[[], nn.Module]
    make_batch: MakeBatch
    loss: Any = nn.CrossEntropyLoss()
    weight: Callable[[Tensor], Any] = lambda target: (target != -100).sum()


MODELS = {
    "mlp": Problem(mlp, mlp_batch),
    "conv": Problem(conv_net, image_batch),
    "tied": Problem(tied, token_batch),
}


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# ---- the loop a person writes, and the comparison


def assert_identical(
    problem: Problem,
    make_optimizer: MakeOptimizer = sgd,
    *,
    dtype: torch.dtype = torch.float32,
    micro_batch: int | None = None,
    clip: tuple[str, float] = ("norm", math.inf),
    make_scheduler: Callable[[Optimizer], Any] = lambda optimizer: (),
) -> None:
    """Losses where uncut, parameters, buffers and optimizer state after all updates, bit for bit."""
    summed = copy.copy(problem.loss)
    summed.reduction = "sum"

    def by_hand(model: nn.Module, optimizer: Optimizer) -> Callable[[Batch], Tensor]:
        scheduler = make_scheduler(optimizer)

        def update(batch: Batch) -> Tensor:
            x, y = batch
            if micro_batch is None:
                loss = problem.loss(model(x), y)
                loss.backward()
            else:
                loss, weight = torch.zeros(()), problem.weight(y)
                for part, target in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
                    (summed(model(part), target) / weight).backward()
            if clip[1] < math.inf:
                CLIPS[clip[0]](model.parameters(), clip[1])
            optimizer.step()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
            return loss

        return update

    def by_step(model: nn.Module, optimizer: Optimizer) -> Callable[[Batch], StepReport]:
        norm = None if micro_batch is None else "micro"
        options = {"micro_batch": micro_batch, f"clip_{clip[0]}": clip[1], "batch_norm": norm}
        return Step(model, problem.loss, optimizer, **flat(options, scheduler=make_scheduler(optimizer)))

    torch.manual_seed(0)
    batches = [problem.make_batch(dtype) for _ in range(UPDATES)]
    models = [problem.build().to(dtype)]
    models.append(copy.deepcopy(models[0]))
    start = copy.deepcopy(models[0].state_dict())
    ends: list[Any] = []
    for model, make in zip(models, (by_hand, by_step), strict=True):
        optimizer = make_optimizer(model)
        update = make(model, optimizer)
        torch.manual_seed(1)
        told = [update(batch) for batch in batches]
        losses = [one.loss if isinstance(one, StepReport) else one.item() for one in told]
        ends.append([losses, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])
    if micro_batch is not None:
        ends[0][0] = ends[1][0]
    assert all(map(math.isfinite, ends[1][0]))
    for what, hand, step in zip(("losses", "model", "optimizer", "random state"), *ends, strict=True):
        assert same(hand, step), what
    assert not all(same(start[name], value) for name, value in ends[0][1].items()), "nothing was trained"


# ---- uncut

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("name", MODELS)
def test_uncut_step_is_the_five_lines(name: str, make_optimizer: MakeOptimizer, dtype: torch.dtype) -> None:
    assert_identical(MODELS[name], make_optimizer, dtype=dtype)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "SGD foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, foreach=True),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True, amsgrad=True),
    "AdamW for-loop": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(1e-2), weight_decay=1e-2),
    "groups": lambda m: torch.optim.SGD(
        [{"params": list(m.parameters())[2:], "lr": 0.01}, {"params": list(m.parameters())[:2]}], lr=0.1
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_uncut_step_is_the_five_lines_for_every_optimizer(name: str) -> None:
    assert_identical(MODELS["conv"], OPTIMIZERS[name])


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, UPDATES),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=UPDATES + 1),
}


@pytest.mark.parametrize("clip", [("norm", 0.5), ("norm", 1e6), ("value", 0.05)])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_clipped_and_scheduled_step_is_the_loop(
    name: str, make_optimizer: MakeOptimizer, clip: tuple[str, float]
) -> None:
    assert_identical(MODELS["conv"], make_optimizer, clip=clip, make_scheduler=SCHEDULERS[name])


# ---- cut


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize(
    ("micro_batch", "clip"),
    [(1, ("norm", 0.5)), (4, ("norm", math.inf)), (5, ("norm", 0.5)), (5, ("value", 0.05))],
)
@pytest.mark.parametrize("name", MODELS)
def test_cut_step_is_the_loop_with_the_same_cut(
    name: str, micro_batch: int, clip: tuple[str, float], make_optimizer: MakeOptimizer
) -> None:
    assert_identical(
        MODELS[name], make_optimizer, micro_batch=micro_batch, clip=clip, make_scheduler=SCHEDULERS["step"]
    )
