"""What a trace is fed with: a batch of fakes, and how many of its micro-batches have to be run."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import Batch, SampleBatch, TensorBatch, tree
from anybatch.engine import Plan
from anybatch.integrations import homes, wants_router_loss
from anybatch.losses import Loss, ModelTerms, SummedLoss, Terms


def leaves_of(batch: Batch) -> tuple[Tensor, ...]:
    """The tensors of a batch, as far as they are there before it is cut."""
    return () if batch.whole is None else tree.flatten(batch.whole).leaves


@contextmanager
def rows_kept(batch: Batch) -> Generator[None]:
    """Afterwards the tensors of a batch or its samples hold what they did: a model may work in place on them.

    Example:
        >>> batch = TensorBatch(torch.ones(2))
        >>> with rows_kept(batch):
        ...     _ = batch.whole.zero_()
        >>> batch.whole
        tensor([1., 1.])
    """
    values = [(leaf, leaf.detach().clone()) for leaf in tree.tensors_in(batch.given)]
    try:
        yield
    finally:
        with torch.no_grad():
            for leaf, value in values:
                if not (leaf.is_meta or torch.equal(leaf, value)):
                    leaf.copy_(value)


def run_sizes(plan: Plan, loss: Loss, model: nn.Module) -> tuple[int, ...]:
    """Rows of the micro-batches that are run: of many alike only the first, a middle one and the last.

    With compensated sums the second micro-batch is special too: from there on errors are carried along.
    """
    needed = 4 if plan.compensated else 3
    if plan.cut or plan.micro_batches <= needed or not is_one_pass(loss, model):
        return plan.sizes
    return (*plan.sizes[: needed - 1], plan.sizes[-1])


def is_one_pass(loss: Loss, model: nn.Module) -> bool:
    """Whether nothing but a few bytes is held of every micro-batch."""
    if isinstance(loss, ModelTerms):  # a router's scores are held of all rows
        return not (homes(model) and wants_router_loss(model))
    return isinstance(loss, SummedLoss | Terms)


def grows_in_lines(loss: Loss, model: nn.Module) -> bool:
    """Whether the bytes of a micro-batch are a straight line in its rows, so that two sizes tell all others.

    Not where rows meet in the loss; nor in recurrent layers, whose workspace only their kernel knows.

    Example:
        >>> grows_in_lines(Terms(print), nn.LSTM(2, 2)), grows_in_lines(Terms(print), nn.Linear(2, 2))
        (False, True)
    """
    return is_one_pass(loss, model) and not any(isinstance(one, nn.RNNBase) for one in model.modules())


def fake_batch(batch: Batch, rows: int, traced: int, loss: Loss) -> tuple[Batch, list[Tensor]]:
    """A batch of fakes, and its leaves as far as they are there from the start."""
    if batch.whole is None:
        return _collated(batch, traced), []
    nest = tree.flatten(batch.whole)
    bases: dict[int, Tensor] = {}  # leaves may be views of one tensor
    leaves = [_of_rows(leaf, rows, bases) for leaf in nest.leaves]
    full = TensorBatch(nest.build(iter(leaves)))
    if traced == rows:
        return full, leaves
    # Torch's losses count their weights on the whole batch; what others count must be of the rows that run.
    return _Head(full, traced) if isinstance(loss, SummedLoss) else full.head(traced), leaves


def _of_rows(leaf: Tensor, rows: int, bases: dict[int, Tensor]) -> Tensor:
    """A fake like a leaf of the batch, with another number of rows in storage that lies row after row."""
    step, *inner = leaf.stride()
    storage = leaf.untyped_storage()
    if step < max(inner, default=1):  # rows are not what lies furthest apart
        fake = torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device=_host(leaf))
    else:
        base = bases.get(id(storage))
        if base is None:
            base = torch.empty(rows * step, dtype=leaf.dtype, device=_host(leaf))
            bases[id(storage)] = base
        fake = base.as_strided((rows, *leaf.shape[1:]), leaf.stride(), leaf.storage_offset() % step)
    return fake.requires_grad_(leaf.requires_grad)


def _host(leaf: Tensor) -> torch.device:
    return torch.device("cpu") if leaf.device.type == "meta" else leaf.device


class _Head(TensorBatch):
    """The first rows of a batch, which is there as a whole all the same."""

    __slots__ = ()

    def __init__(self, full: TensorBatch, rows: int) -> None:
        super().__init__(full.head(rows).whole)
        self.given = self.whole = full.whole


def _collated(batch: Batch, rows: int) -> Batch:
    """Samples whose micro-batches are made one by one, as `collate` makes them, but of fakes."""
    head = batch.head(min(batch.rows, rows))
    nest = tree.flatten(next(head.cut(head.rows)))

    def collate(samples: list[Any]) -> Any:
        leaves = [
            _of_rows(leaf, len(samples), {}) if leaf.dim() and len(leaf) == head.rows else leaf
            for leaf in nest.leaves
        ]
        return nest.build(iter(leaves))

    return SampleBatch([batch.given[row % batch.rows] for row in range(rows)], collate)
