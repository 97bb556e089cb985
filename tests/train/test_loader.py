"""Rows, each once per epoch in an order of seed and epoch alone; and metrics, exact on every cut of them."""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from anybatch import Step, Terms, Total, WholeBatch
from anybatch.core.errors import BatchError, CheckpointError
from anybatch.testing import relative_error, tolerance
from anybatch.train.loader import Rows, open_data
from anybatch.train.metrics import RunningLoss, accuracy, evaluate
from tests.options import flat
from tests.snapshots import same_as_before
from tests.zoo import Made, Perceptron


def make_rows(data: Any, collate: Any = None) -> Any:
    optimizer = torch.optim.SGD((model := nn.Linear(1, 1)).parameters(), lr=0.1)
    return open_data(data, Step(model, nn.MSELoss(), optimizer, collate=collate))


def epoch(rows: Any, batch_size: int | None = 4, seed: int = 0, epoch: int = 0, start: int = 0) -> list[Any]:
    batches = rows.batches(batch_size=batch_size, seed=seed, epoch=epoch, start=start)
    return [batch.tolist() if isinstance(batch, Tensor) else batch for batch in batches]


counts, sizes, seeds = st.integers(1, 40), st.integers(1, 45), st.integers(-(2**63), 2**64)


@given(count=counts, size=sizes, seed=seeds, samples=st.booleans(), data=st.data())
def test_every_row_comes_exactly_once_and_an_epoch_goes_on_at_any_batch(
    count: int, size: int, seed: int, samples: bool, data: st.DataObject
) -> None:
    rows = make_rows(list(range(count)), torch.tensor) if samples else make_rows(torch.arange(count))
    number = data.draw(st.integers(0, 1000))
    batches = epoch(rows, size, seed, number)
    assert rows.count == count
    assert sorted(chain(*batches)) == list(range(count))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert 0 < len(batches[-1]) <= size
    start = data.draw(st.integers(0, len(batches)))
    assert epoch(rows, size, seed, number, start) == batches[start:]
    parts = [list(map(int, part)) for part in rows.in_order(size)]  # for an evaluation
    assert list(chain(*parts)) == list(range(count))
    assert {len(part) for part in parts[:-1]} <= {size}


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def order(size: int = 4, **where: int) -> tuple[int, ...]:
        return tuple(chain(*epoch(rows, size, **where)))

    rows, before = make_rows(torch.arange(30)), torch.get_rng_state()
    first = order(seed=1, epoch=2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    torch.set_default_device("meta")  # as those set theirs to "cuda" who want everything there
    try:
        assert order(size=7, seed=1, epoch=2) == first
    finally:
        torch.set_default_device("cpu")
    others = [order(seed=seed, epoch=number) for seed, number in ((1, 3), (2, 2), (2, 1), (0, 0))]
    assert len({first, *others, tuple(range(30))}) == 6
    # A checkpoint of today must go on tomorrow: this order was written down once.
    assert epoch(make_rows(torch.arange(7)), 3, seed=1, epoch=1) == [[1, 3, 4], [6, 0, 5], [2]]


class Numbers(IterableDataset[Tensor]):
    """Rows that are their own numbers, in batches of some sizes, in an order drawn while they are read."""

    def __init__(self, sizes: tuple[int, ...] = (3, 1, 5, 2)) -> None:
        self.sizes, self.epoch, self.left = sizes, 0, 10**9

    set_epoch = lambda self, epoch: setattr(self, "epoch", epoch)  # noqa: E731

    def __iter__(self) -> Iterator[Tensor]:
        start = 100 * self.epoch
        for size in self.sizes[: self.left]:
            rows = torch.arange(start, start + size)
            yield rows[torch.randperm(size)] if random.random() < 0.7 else rows
            start += size


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(range(11), **{"batch_size": 3, "shuffle": True} | options)  # pyright: ignore


LOADERS: dict[str, Any] = {
    "its own generator": lambda: loader(generator=torch.Generator().manual_seed(8)),
    "no generator": loader,
    "a worker": lambda: loader(num_workers=1),
    "an iterable data set": Numbers,
}


@pytest.mark.parametrize("size", [None, 1, 4, 100])
@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_of_a_loader_can_be_repeated_and_draws_nothing_of_the_models(name: str, size: Any) -> None:
    streams = torch.get_rng_state(), random.getstate()
    rows = make_rows(LOADERS[name]())
    epochs = [epoch(rows, size, seed=1, epoch=number) for number in (0, 1)]
    assert epochs[0] != epochs[1] or size == 100
    assert (min(chain(*epochs[1])) >= 100) == ("iterable" in name)  # it is told of the epoch
    for batches in epochs:
        assert len([*chain(*batches)]) == 11
        if size is not None:
            assert [len(batch) for batch in batches] == [size] * (11 // size) + [11 % size] * (11 % size > 0)
    torch.manual_seed(7)  # another process
    random.seed(7)
    again = make_rows(LOADERS[name]())
    for start in (1,) if name == "a worker" else range(len(epochs[1])):
        assert epoch(again, size, seed=1, epoch=1, start=start) == epochs[1][start:]
    assert epoch(again, size, seed=2, epoch=0) != epochs[0] or (size == 100 and "iter" in name)
    held_out = [[int(one) for one in part] for part in rows.in_order(size)]
    assert held_out == [[int(one) for one in part] for part in again.in_order(size)]
    torch.set_rng_state(streams[0])
    random.setstate(streams[1])
    epoch(rows, size, seed=1)
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]


def test_samples_are_gathered_whether_they_come_one_by_one_or_in_lists() -> None:
    samples = [{"x": number} for number in range(7)]
    source = type("Source", (IterableDataset,), {"__iter__": lambda self: iter(samples)})
    for data in (source(), DataLoader(source(), batch_size=2, collate_fn=list)):
        assert epoch(make_rows(data, list), 3) == [samples[:3], samples[3:6], samples[6:]]
    with pytest.raises(BatchError, match=r"lists of samples from the loader.*got a tuple.*collate_fn=list"):
        epoch(make_rows(DataLoader(source(), batch_size=2, collate_fn=tuple), list))


def test_data_that_cannot_be_repeated_is_said_so() -> None:
    rows = make_rows(numbers := Numbers())
    batches = rows.batches(batch_size=4, seed=0, epoch=0)
    next(batches), next(batches)
    digest = rows.digest()

    def again() -> list[int]:
        return [len(one) for one in rows.batches(batch_size=4, seed=0, epoch=0, start=2, digest=digest)]

    assert again() == [3]
    numbers.sizes = (4, 5, 2)  # as many rows, but in another order
    with pytest.raises(CheckpointError, match="Numbers to give epoch 1 as before, got other rows in batch 2"):
        again()
    numbers.left = 0
    with pytest.raises(BatchError, match=r"Expected a batch in epoch 2, got none from the Numbers"):
        next(rows.batches(batch_size=4, seed=0, epoch=1))


# ---- metrics

ROWS = 11
X = torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LIMIT = tolerance(torch.float64, terms=ROWS)
CLASS_WEIGHT = torch.tensor([1.0, 5.0, 0.25, 2.0], dtype=torch.float64)
TWO = "fit", "size"


def targets(masked: list[bool]) -> Tensor:
    """The first row always counts; the masked ones stand together, so that means of means go wrong."""
    y = torch.randint(4, (ROWS,), generator=torch.Generator().manual_seed(1))
    return torch.where(torch.tensor([False, *masked]), -100, y)


UNEVEN = targets([False, True, True, True, False, False, False, True, False, False])
LOSSES: dict[str, Callable[..., Any]] = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "class weights": nn.CrossEntropyLoss(weight=CLASS_WEIGHT),
    "smoothed": partial(F.cross_entropy, label_smoothing=0.1),
    "smoothed sum": partial(F.cross_entropy, label_smoothing=0.1, reduction="sum"),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@settings(max_examples=25)
@given(masked=st.lists(st.booleans(), min_size=ROWS - 1, max_size=ROWS - 1), cut=st.integers(1, ROWS + 1))
def test_loss_and_accuracy_are_those_of_all_rows_at_once(loss: Any, masked: list[bool], cut: int) -> None:
    torch.manual_seed(0)
    y, model = targets(masked), Perceptron(3, 4).double()
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    found = evaluate(step, Rows((X, y), step), {"accuracy": accuracy}, micro_batch=cut, batch_size=4)
    scores, valid = model(X).detach(), y != -100
    assert relative_error(found["loss"], loss(scores, y)) <= LIMIT
    right = int((scores.argmax(1) == y)[valid].sum())
    assert found == {"loss": found["loss"], "accuracy": right / int(valid.sum())}


@pytest.mark.parametrize(("precision", "is_short"), [("float32", 0), ("bf16-mixed", 1), ("bf16-true", 0)])
@pytest.mark.parametrize("loss", [F.cross_entropy, WholeBatch(lambda a, b: F.cross_entropy(a.float(), b))])
def test_validation_computes_as_training_does(loss: Any, precision: Any, is_short: int) -> None:
    found, model = set[Any](), Perceptron(3, 4)
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)
    look = lambda outputs, targets: (found.add(outputs.dtype), Total(0.0, 1))[1]  # noqa: E731
    evaluate(step, Rows((X.float(), UNEVEN.clamp(0)), step), {"look": look}, micro_batch=4, batch_size=4)
    assert found == {[torch.float32, torch.bfloat16][is_short]}


def named(model: nn.Module, micro: Any) -> dict[str, Total]:
    """Two terms that are divided by different weights, and one that has nothing to say about these rows."""
    x, y = micro
    scores, valid = model(x), y != -100
    return {
        "fit": Total(F.cross_entropy(scores, y, reduction="sum"), valid.sum()),
        "size": Total(scores.square().sum(), scores.numel()),
        "other": Total.zero(),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_one_forward_per_micro_batch_and_all_as_before(fails: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.forwards += 1
        assert not any(module.training for module in self.modules())
        assert not torch.is_grad_enabled()
        return self.layers(x) + torch.rand(4) * random.random() * float(np.random.rand())

    def metric(scores: Tensor, y: Tensor) -> Total:
        met.append(len(y))
        if fails and len(met) == 3:
            raise ZeroDivisionError
        return Total(0, len(y))

    forwards, met = list[Any](), list[int]()  # not in an attribute, which an evaluation puts back
    layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    layers[1].eval()  # a layer that somebody froze
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    model = Made(forward, forwards=0, layers=layers)
    model.register_forward_pre_hook(lambda model, args: forwards.append(args))
    options = flat(batch_norm="micro", collate=default_collate)
    step = Step(model, nn.CrossEntropyLoss(), optimizer, **options)
    rows = Rows(list(zip(X.float(), UNEVEN, strict=True)), step)
    with same_as_before(step), pytest.raises(ZeroDivisionError) if fails else nullcontext():
        evaluate(step, rows, {"one": metric, "two": accuracy}, micro_batch=4, batch_size=4)
    assert (met, len(forwards)) == ([4, 4, 3], 3)


@pytest.mark.parametrize("size", [1, 4, 11])
@pytest.mark.parametrize("loss", [LOSSES["class weights"], named, Terms(named, {"size": 0.5})])
def test_running_loss_is_that_of_all_rows(loss: Any, size: int) -> None:
    model = Perceptron(3, 4).double()
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.0))
    running = RunningLoss()
    for x, y in zip(X.split(size), UNEVEN.split(size), strict=True):
        running = RunningLoss(running.totals)  # as through a checkpoint
        running.add(step((x, y)))
    report = step((X, UNEVEN))
    assert relative_error(running.value(step.coefficients), report.loss) <= LIMIT
    found = evaluate(step, Rows((X, UNEVEN), step), {}, micro_batch=4, batch_size=size)
    assert relative_error(found["loss"], report.loss) <= LIMIT
    if "fit" in found:  # each term is divided by its own weight; a term of no weight is NaN
        assert math.isnan(found["other"])
        assert relative_error([found[one] for one in TWO], [report.terms[one] for one in TWO]) <= LIMIT
    assert math.isnan(RunningLoss().value({}))
