"""Which rows to check on: a few that differ, because equal rows hide a wrong denominator."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.core import Collate, SampleBatch, TensorBatch, tree

CANDIDATES = 64  # rows that are looked at where each costs something: a `collate`, or many numbers
ENTRIES = 2**22  # as many rows as have this many numbers are looked at anyway
FEW = 8  # numbers of a row whose sum says something: weights, flags


def choose(signatures: Mapping[int, Sequence[float]], rows: int) -> list[int]:
    """Rows whose signatures lie far apart, in the order of the batch.

    Each next one is the farthest from those that were taken (Gonzalez 1985, "Clustering to minimize the
    maximum intercluster distance").

    Args:
        signatures: a few numbers of each row, by its place in the batch.
        rows: how many to choose.

    Example:
        >>> choose({0: [3.0], 10: [3.0], 20: [1.0], 30: [2.0]}, 3)
        [0, 20, 30]
    """
    places = list(signatures)
    table = torch.tensor(list(signatures.values()), dtype=torch.float64).view(len(places), -1)
    spread = table.amax(0) - table.amin(0) if table.shape[1] else table.new_zeros(0)
    table = table / torch.where(spread > 0, spread, 1)
    taken = [0]
    distance = (table - table[0]).norm(dim=1)
    while len(taken) < min(rows, len(table)):
        distance[taken] = -1.0
        taken.append(int(distance.argmax()))
        distance = torch.minimum(distance, (table - table[taken[-1]]).norm(dim=1))
    return sorted(places[row] for row in taken)


def rows_of(batch: Any, collate: Collate | None) -> int:
    """How many rows a batch has.

    Raises:
        BatchError: it is no batch.
    """
    return (TensorBatch(batch) if collate is None else SampleBatch(batch, collate)).rows


def signatures(batch: Any, collate: Collate | None, at_least: int = 0) -> dict[int, list[float]]:
    """A few numbers for rows all over the batch: how much of each is valid, masked, zero; its class.

    Example:
        >>> signatures((torch.zeros(2, 9), torch.tensor([[5, -100], [5, 6]])), None)
        {0: [9.0, 0.0, 1.0, 0.0, -95.0, 2.0], 1: [9.0, 0.0, 2.0, 0.0, 11.0, 2.0]}
    """
    if collate is not None:
        places = _spread(len(batch), max(CANDIDATES, at_least))
        found = [
            _of_row([leaf[0] for leaf in tree.flatten(collate([batch[row]])).leaves if leaf.dim()])
            for row in places
        ]
        alike = len({len(one) for one in found}) == 1
        return dict(zip(places, found if alike else [[0.0] for _ in found], strict=True))
    leaves = tree.flatten(batch).leaves
    total = leaves[0].shape[0]
    entries = sum(leaf.numel() for leaf in leaves) // max(total, 1)
    places = _spread(total, max(CANDIDATES, at_least, min(ENTRIES // max(entries, 1), 8 * CANDIDATES)))
    return {row: _of_row([leaf[row] for leaf in leaves]) for row in places}


def _spread(total: int, most: int) -> list[int]:
    """Places all over a batch, at even distances."""
    count = min(total, most)
    return [place * total // count for place in range(count)]


def _of_row(leaves: Sequence[Tensor]) -> list[float]:
    numbers: list[Tensor | int] = []
    for leaf in leaves:
        leaf = leaf.detach()
        if leaf.is_floating_point() or leaf.is_complex():
            # A mask or a weight may be real, and a missing target NaN.
            numbers += [(leaf == 0).sum(), (~leaf.isfinite()).sum()]
            numbers += [leaf.abs().nan_to_num().sum()] if leaf.numel() <= FEW else []
        else:
            numbers += [(leaf != -100).sum(), (leaf == 0).sum(), leaf.sum(), leaf.numel()]
    return [float(number) for number in numbers]


def subset(batch: Any, collate: Collate | None, rows: Sequence[int]) -> Any:
    """These rows of a batch; tensors of their own.

    Example:
        >>> subset((torch.arange(4), None), None, [1, 3])
        (tensor([1, 3]), None)
    """
    if collate is not None:
        return [batch[row] for row in rows]
    return tree.map_leaves(lambda leaf: leaf.detach()[list(rows)], batch)
