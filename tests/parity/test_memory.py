"""Peak tensor bytes: flat in the number of micro-batches, and not above the hand-written loop's."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from anybatch import Options, Step, Terms, Total
from anybatch.losses.whole_batch import WholeBatch
from anybatch.memory.meter import Meter
from tests.options import flat
from tests.zoo import Made, Transformer

ROWS, FEW, MANY = 4, 4, 32  # rows of a micro-batch; numbers of micro-batches


def terms(model: nn.Module, micro: Any) -> dict[str, Total]:
    """Two terms with divisors of their own, so that each has a bank of gradients."""
    x, y = micro
    scores = model(x)
    return {
        "fit": Total(F.cross_entropy(scores, y, reduction="sum"), (y != -100).sum()),
        "size": Total(scores.float().square().sum(), scores.numel()),
    }


Batch = tuple[Tensor, Tensor]
Update = Callable[[Batch], object]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What hangs in a reference cycle counts: it would hang there for a while in a training, too."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 20))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 200))


def labels(rows: int, classes: int) -> Tensor:
    return torch.randint(classes, (rows,))


def tokens(rows: int) -> Batch:
    return torch.randint(1, 50, (rows, 12)), torch.randint(50, (rows, 12))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Any]] = {
    "conv": (conv_net, lambda rows: (torch.randn(rows, 1, 8, 8), labels(rows, 10)), nn.CrossEntropyLoss()),
    "transformer": (lambda: Transformer(50, width=16), tokens, nn.CrossEntropyLoss()),
    "labels": (mlp, lambda rows: (torch.randn(rows, 16), labels(rows, 200)), nn.CrossEntropyLoss()),
    "values": (mlp, lambda rows: (torch.randn(rows, 16), torch.randn(rows, 200)), nn.MSELoss()),
}


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def peak_bytes(update: Update, batch: Batch, model: nn.Module, optimizer: Optimizer) -> int:
    """Of the second update, as the first makes the optimizer's state; the batch is counted apart."""
    update((batch[0][:ROWS], batch[1][:ROWS]))
    with Meter(model, [optimizer], batch_leaves=batch) as meter:
        update(batch)
    return meter.peak - sum(leaf.nbytes for leaf in batch)


def by_hand(model: nn.Module, optimizer: Optimizer, criterion: Any) -> Update:
    summed = copy.copy(criterion)
    summed.reduction = "sum"

    def update(batch: Batch) -> float:
        x, y = batch
        running = torch.zeros(())
        for part, target in zip(x.split(ROWS), y.split(ROWS), strict=True):
            uncut = len(x) == ROWS
            loss = criterion(model(part), target) if uncut else summed(model(part), target) / y.numel()
            loss.backward()
            running += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return running.item()

    return update


def measure(
    case: str,
    micro_batches: int,
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd,
    make_update: Callable[[nn.Module, Optimizer, Any], Update] = by_hand,
    dtype: torch.dtype = torch.float32,
) -> int:
    build, make_batch, criterion = CASES[case]
    torch.manual_seed(0)
    model = build().to(dtype)
    optimizer = make_optimizer(model)
    x, y = make_batch(ROWS * micro_batches)
    batch = tuple(one.to(dtype) if one.is_floating_point() else one for one in (x, y))  # both, for torch 2.6
    return peak_bytes(make_update(model, optimizer, criterion), batch, model, optimizer)


def by_step(model: nn.Module, optimizer: Optimizer, criterion: Any, **options: Any) -> Update:
    return Step(
        model, criterion, optimizer, micro_batch=ROWS, **flat(options, batch_norm="micro", check=False)
    )


def by_window(model: nn.Module, optimizer: Optimizer, criterion: Any) -> Update:
    step = by_step(model, optimizer, criterion)

    def update(batch: Batch) -> None:
        with step.window() as window:
            for micro in zip(batch[0].split(ROWS), batch[1].split(ROWS), strict=True):
                window.add(micro)

    return update


def total(model: nn.Module, micro: Batch) -> Total:
    losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")
    return Total(losses.sum(), losses.numel())


def squares(model: nn.Module, micro: Batch) -> Total:
    """On the CPU `mse_loss` returns a scalar in a storage of the size of its input."""
    return Total(F.mse_loss(model(micro[0]), micro[1], reduction="sum"), micro[1].numel())


def by_total(model: nn.Module, optimizer: Optimizer, criterion: Any) -> Update:
    return by_step(model, optimizer, total)


def by_terms(model: nn.Module, optimizer: Optimizer, criterion: Any) -> Update:
    return by_step(model, optimizer, Terms(terms, coefficients={"size": 0.5}))


def by_samples(model: nn.Module, optimizer: Optimizer, criterion: Any) -> Update:
    step = by_step(model, optimizer, criterion, collate=default_collate)
    return lambda batch: step(list(zip(*batch, strict=True)))


WAYS: dict[str, Callable[[nn.Module, Optimizer, Any], Update]] = {
    "step": by_step,
    "clipped": lambda *given: by_step(*given, clip_norm=1.0),
    "float64": lambda *given: by_step(*given, accumulate=torch.float64),
    "short": lambda *given: by_step(*given, precision="bf16-true"),
    "total": by_total,
    "squares": lambda model, optimizer, _: by_step(model, optimizer, squares),
    "terms": by_terms,
    "samples": by_samples,
    "window": by_window,
}


@pytest.mark.parametrize(
    ("case", "way"),
    [
        *[("conv", way) for way in WAYS if way != "squares"],
        ("transformer", "window"),
        ("labels", "samples"),
        ("labels", "terms"),
        ("values", "squares"),
    ],
)
def test_peak_is_flat_in_the_number_of_micro_batches(case: str, way: str) -> None:
    few, many = (measure(case, number, make_update=WAYS[way]) for number in (FEW, MANY))
    assert abs(many - few) <= few / 100


def overhead(case: str, micro_batches: int) -> int:
    """A step may hold, beyond the loop, a number per micro-batch and the buffers as they were twice."""
    buffers = sum(buffer.nbytes for buffer in CASES[case][0]().buffers())
    return 2 * buffers + 4 * micro_batches + 64


@pytest.mark.parametrize(("make_optimizer", "micro_batches"), [(sgd, 1), (sgd, MANY), (adamw, FEW)])
@pytest.mark.parametrize("case", CASES)
def test_peak_is_not_above_the_hand_written_loop(
    case: str, make_optimizer: Callable[[nn.Module], Optimizer], micro_batches: int
) -> None:
    hand = measure(case, micro_batches, make_optimizer)
    step = measure(case, micro_batches, make_optimizer, by_step)
    assert step <= hand + overhead(case, micro_batches)
    assert step > hand / 2  # something was measured


@pytest.mark.parametrize("case", CASES)
def test_what_half_precision_and_a_further_term_cost(case: str) -> None:
    """One float32 sum for each parameter; a bank, and the gradient under way."""
    sums = sum(4 * parameter.numel() for parameter in CASES[case][0]().parameters())
    hand, step = (measure(case, FEW, sgd, one, torch.bfloat16) for one in (by_hand, by_step))
    assert step <= hand + sums + overhead(case, FEW)
    if case in ("conv", "labels"):
        one, two = (measure(case, FEW, make_update=way) for way in (by_total, by_terms))
        assert two <= one + 2 * sums + 4096


def test_two_passes_are_flat_apart_from_the_outputs() -> None:
    """A loss over the outputs of all rows holds them, and their gradient, and no graph of the other rows."""
    width = 4

    def contrast(model: nn.Module, micro_batches: int) -> int:
        loss = WholeBatch(by_rows, loss_rows=ROWS)
        step = Step(model, loss, sgd(model), micro_batch=ROWS, options=Options(check=False))
        batch = torch.randn(ROWS * micro_batches, 16), torch.randn(ROWS * micro_batches, 16)
        return peak_bytes(step, batch, model, step.optimizers[0])

    def by_rows(one: Tensor, other: Tensor, rows: Tensor) -> Total:
        losses = F.cross_entropy(one[rows] @ other.T, rows, reduction="sum")
        return Total(losses, len(rows))

    def twins() -> nn.Module:
        layers = nn.Linear(16, 1024), nn.Tanh(), nn.Dropout(0.2), nn.Linear(1024, width)
        forward = lambda self, one, other: (self.layers(one), self.layers(other))  # noqa: E731
        return Made(forward, layers=nn.Sequential(*layers))

    torch.manual_seed(0)
    few, many = (contrast(twins(), number) for number in (FEW, MANY))
    outputs = 2 * ROWS * (MANY - FEW) * width * 4
    # The outputs, their gradient, and while a micro-batch is cut out or joined, one of the two again; the
    # scores of a few rows against all; the places of the rows.
    assert many <= few * 1.01 + 3 * outputs + ROWS * ROWS * MANY * 4 * 4 + 8 * ROWS * MANY
