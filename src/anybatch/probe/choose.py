"""Which rows to check on: a few that differ, because equal rows hide a wrong denominator."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch import tree
from anybatch.batch import Collate, SampleBatch, TensorBatch

CANDIDATES = 64  # rows that are looked at


def choose(signatures: Sequence[Sequence[float]], rows: int) -> list[int]:
    """Rows whose signatures lie far apart, in the order of the batch.

    Each next one is the farthest from those that were taken (Gonzalez 1985, "Clustering to minimize the
    maximum intercluster distance").

    Args:
        signatures: a few numbers of each row.
        rows: how many to choose.

    Example:
        >>> choose([[3.0], [3.0], [1.0], [2.0]], 3)
        [0, 2, 3]
    """
    table = torch.tensor(signatures, dtype=torch.float64).view(len(signatures), -1)
    spread = table.amax(0) - table.amin(0) if table.shape[1] else table.new_zeros(0)
    table = table / torch.where(spread > 0, spread, 1)
    taken = [0]
    distance = (table - table[0]).norm(dim=1)
    while len(taken) < min(rows, len(table)):
        distance[taken] = -1.0
        taken.append(int(distance.argmax()))
        distance = torch.minimum(distance, (table - table[taken[-1]]).norm(dim=1))
    return sorted(taken)


def rows_of(batch: Any, collate: Collate | None) -> int:
    """How many rows a batch has.

    Raises:
        BatchError: it is no batch.
    """
    return (TensorBatch(batch) if collate is None else SampleBatch(batch, collate)).rows


def signatures(batch: Any, collate: Collate | None, at_least: int = 0) -> list[list[float]]:
    """A few numbers for each of the first rows: how much of it is valid, masked, distinct; its class.

    Example:
        >>> signatures((torch.zeros(2, 3), torch.tensor([[5, -100], [5, 6]])), None)
        [[1.0, 0.0, -95.0, 2.0], [2.0, 0.0, 11.0, 2.0]]
    """
    candidates = max(CANDIDATES, at_least)
    if collate is not None:
        found = [
            _of_row([leaf[0] for leaf in tree.flatten(collate([batch[row]])).leaves if leaf.dim()])
            for row in range(min(candidates, len(batch)))
        ]
        return found if len({len(one) for one in found}) == 1 else [[0.0] for _ in found]
    leaves = tree.flatten(batch).leaves
    return [_of_row([leaf[row] for leaf in leaves]) for row in range(min(candidates, leaves[0].shape[0]))]


def _of_row(leaves: Sequence[Tensor]) -> list[float]:
    numbers: list[float] = []
    for leaf in leaves:
        if not (leaf.is_floating_point() or leaf.is_complex()):
            counts = [(leaf != -100).sum(), (leaf == 0).sum(), leaf.sum()]
            numbers += [float(count) for count in counts] + [float(leaf.numel())]
    return numbers


def subset(batch: Any, collate: Collate | None, rows: Sequence[int]) -> Any:
    """These rows of a batch; tensors of their own.

    Example:
        >>> subset((torch.arange(4), None), None, [1, 3])
        (tensor([1, 3]), None)
    """
    if collate is not None:
        return [batch[row] for row in rows]
    return tree.map_leaves(lambda leaf: leaf.detach()[list(rows)], batch)


def affordable(run: Callable[[], object], rows: int, *, passes: int, budget_s: float) -> int:
    """How many rows can be checked in a time.

    Args:
        run: a pass over two rows; not the first one, which pays for what is made once.
        rows: the most that are wanted.
        passes: how many passes over all rows there will be.
        budget_s: seconds for all of them.

    Returns:
        From 3 to `rows`.
    """
    start = time.perf_counter()
    run()
    per_row = (time.perf_counter() - start) / 2
    return int(min(rows, max(3.0, budget_s / (passes * per_row or 1e-9))))
