"""A step is, bit for bit, the loop a person would have written: uncut five lines, cut the same sums."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch import Step
from tests.snapshots import same

UPDATES, ROWS, CLASSES, LENGTH = 20, 12, 5, 6
Batch = tuple[Any, Tensor]
Update = Callable[[Batch], float]


# ---- models


class Tied(nn.Module):
    """A language model whose input and output embeddings are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.block(self.embedding(tokens)), self.embedding.weight).transpose(1, 2)


class ConvNet(nn.Sequential):
    """With running statistics and random numbers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, CLASSES),
        )


def mlp(last: nn.Module | None = None, outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs), last or nn.Identity())


def features(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, 4, dtype=dtype)


def classes(shape: Sequence[int] = (ROWS,)) -> Tensor:
    return torch.randint(CLASSES, tuple(shape))


def mlp_batch(dtype: torch.dtype) -> Batch:
    return features(dtype), classes()


def image_batch(dtype: torch.dtype) -> Batch:
    return torch.randn(ROWS, 1, 8, 8, dtype=dtype), classes()


def token_batch(dtype: torch.dtype) -> Batch:
    target = classes((ROWS, LENGTH))
    target[torch.rand(ROWS, LENGTH) < 0.3] = -100
    return classes((ROWS, LENGTH)), target


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.dtype], Batch]]] = {
    "mlp": (mlp, mlp_batch),
    "conv": (ConvNet, image_batch),
    "tied": (Tied, token_batch),
}


# ---- the loop a person writes, and the comparison


def five_lines(
    model: nn.Module,
    criterion: Callable[..., Tensor],
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    clip_norm: float,
) -> Update:
    def update(batch: Batch) -> float:
        x, y = batch
        loss = criterion(model(x), y)
        loss.backward()
        if clip_norm < math.inf:
            clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        return loss.item()

    return update


def assert_identical(
    build: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizer],
    make_batch: Callable[[torch.dtype], Batch],
    by_hand: Callable[[nn.Module, Optimizer], Update],
    by_step: Callable[[nn.Module, Optimizer], Update],
    *,
    dtype: torch.dtype = torch.float32,
    compare_loss: bool = True,
) -> None:
    """Losses, parameters, buffers and optimizer state after all updates, bit for bit."""
    torch.manual_seed(0)
    batches = [make_batch(dtype) for _ in range(UPDATES)]
    models = [build().to(dtype)]
    models.append(copy.deepcopy(models[0]))
    start = copy.deepcopy(models[0].state_dict())
    ends: list[Any] = []
    for model, make in zip(models, (by_hand, by_step), strict=True):
        optimizer = make_optimizer(model)
        update = make(model, optimizer)
        torch.manual_seed(1)
        losses = [update(batch) for batch in batches]
        ends.append([losses, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])
    if not compare_loss:
        ends[0][0] = ends[1][0]
    assert all(map(math.isfinite, ends[1][0]))
    for what, hand, step in zip(("losses", "model", "optimizer", "random state"), *ends, strict=True):
        assert same(hand, step), what
    assert not all(same(start[name], value) for name, value in ends[0][1].items()), "nothing was trained"


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def assert_same_as_five_lines(
    build: Callable[[], nn.Module],
    make_batch: Callable[[torch.dtype], Batch],
    loss: Any,
    *,
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd,
    dtype: torch.dtype = torch.float32,
    clip_norm: float = math.inf,
    make_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
) -> None:
    def by_hand(model: nn.Module, optimizer: Optimizer) -> Update:
        scheduler = None if make_scheduler is None else make_scheduler(optimizer)
        return five_lines(model, loss, optimizer, scheduler, clip_norm)

    def by_step(model: nn.Module, optimizer: Optimizer) -> Update:
        scheduler = () if make_scheduler is None else make_scheduler(optimizer)
        step = Step(model, loss, optimizer, clip_norm=clip_norm, scheduler=scheduler)
        return lambda batch: step(batch).loss

    assert_identical(build, make_optimizer, make_batch, by_hand, by_step, dtype=dtype)


# ---- uncut


DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize(("build", "make_batch"), MODELS.values(), ids=MODELS)
def test_uncut_step_is_the_five_lines(
    build: Callable[[], nn.Module],
    make_batch: Callable[[torch.dtype], Batch],
    make_optimizer: Callable[[nn.Module], Optimizer],
    dtype: torch.dtype,
) -> None:
    loss = nn.CrossEntropyLoss()
    assert_same_as_five_lines(build, make_batch, loss, make_optimizer=make_optimizer, dtype=dtype)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
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


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_uncut_step_is_the_five_lines_for_every_optimizer(
    make_optimizer: Callable[[nn.Module], Optimizer],
) -> None:
    assert_same_as_five_lines(ConvNet, image_batch, nn.CrossEntropyLoss(), make_optimizer=make_optimizer)


def to_values(make: Callable[[torch.Size, torch.dtype], Tensor]) -> Callable[[torch.dtype], Batch]:
    """A batch whose target has a value for each output."""
    return lambda dtype: (features(dtype), make(torch.Size((ROWS, CLASSES)), dtype))


def normal(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def zero_or_one(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.randint(2, shape).to(dtype)


def distribution(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.rand(shape, dtype=dtype).softmax(-1)


WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.0, 3.0])
LOG, SIGMOID = partial(nn.LogSoftmax, dim=-1), nn.Sigmoid
LOSSES: dict[str, tuple[Any, Callable[[torch.dtype], Batch], Callable[[], nn.Module]]] = {
    "CE all": (nn.CrossEntropyLoss(WEIGHT, ignore_index=2, label_smoothing=0.2), mlp_batch, nn.Identity),
    "MSE": (nn.MSELoss(), to_values(normal), nn.Identity),
    "L1": (nn.L1Loss(), to_values(normal), nn.Identity),
    "SmoothL1": (nn.SmoothL1Loss(beta=0.5), to_values(normal), nn.Identity),
    "BCEWithLogits": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), to_values(zero_or_one), nn.Identity),
    "KLDiv batchmean": (nn.KLDivLoss(reduction="batchmean"), to_values(distribution), LOG),
}


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, UPDATES),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=UPDATES + 1),
}


@pytest.mark.parametrize("clip_norm", [0.5, 1e6])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_clipped_and_scheduled_step_is_the_loop(
    make_scheduler: Callable[[Optimizer], LRScheduler],
    make_optimizer: Callable[[nn.Module], Optimizer],
    clip_norm: float,
) -> None:
    assert_same_as_five_lines(
        ConvNet,
        image_batch,
        nn.CrossEntropyLoss(),
        make_optimizer=make_optimizer,
        clip_norm=clip_norm,
        make_scheduler=make_scheduler,
    )


# ---- cut


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("clip_norm", [math.inf, 0.5])
@pytest.mark.parametrize("micro_batch", [1, 4, 5])
@pytest.mark.parametrize(("build", "make_batch"), MODELS.values(), ids=MODELS)
def test_cut_step_is_the_loop_with_the_same_cut(
    build: Callable[[], nn.Module],
    make_batch: Callable[[torch.dtype], Batch],
    micro_batch: int,
    clip_norm: float,
    make_optimizer: Callable[[nn.Module], Optimizer],
) -> None:
    def by_hand(model: nn.Module, optimizer: Optimizer) -> Update:
        def update(batch: Batch) -> float:
            x, y = batch
            tokens = (y != -100).sum()
            for part, target in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
                (F.cross_entropy(model(part), target, reduction="sum") / tokens).backward()
            if clip_norm < math.inf:
                clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            return 0.0

        return update

    def by_step(model: nn.Module, optimizer: Optimizer) -> Update:
        step = Step(
            model,
            nn.CrossEntropyLoss(),
            optimizer,
            micro_batch=micro_batch,
            clip_norm=clip_norm,
            batch_norm="micro",
        )
        return lambda batch: step(batch).loss

    assert_identical(build, make_optimizer, make_batch, by_hand, by_step, compare_loss=False)


@pytest.mark.parametrize("micro_batch", [1, 4, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_cut_step_is_the_loop_with_the_same_cut_for_more_losses(name: str, micro_batch: int) -> None:
    loss, make_batch, last = LOSSES[name]

    def weight(target: Tensor) -> Tensor | int:
        if name == "CE all":
            return WEIGHT[target[target != 2]].sum()
        return len(target) if "batchmean" in name else target.numel()

    def by_hand(model: nn.Module, optimizer: Optimizer) -> Update:
        criterion = copy.copy(loss)
        criterion.reduction = "sum"

        def update(batch: Batch) -> float:
            x, y = batch
            divisor = weight(y)
            for part, target in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
                (criterion(model(part), target) / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()
            return 0.0

        return update

    def by_step(model: nn.Module, optimizer: Optimizer) -> Update:
        step = Step(model, loss, optimizer, micro_batch=micro_batch)
        return lambda batch: step(batch).loss

    assert_identical(lambda: mlp(last()), sgd, make_batch, by_hand, by_step, compare_loss=False)
