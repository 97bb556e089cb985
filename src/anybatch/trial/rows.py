"""Rows that differ, chosen from all over a batch: by labels, masks, weights and lengths"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from anybatch.core import Batch, SampleBatch, TensorBatch, tree

ROWS = 8  # of a few

CANDIDATES = 64  # rows to choose from if each is expensive: a `collate`, or many numbers
_ENTRIES = 2**22  # numbers in the rows to choose from, if they are cheap
_PIECE, _FEWEST = 2**17, 8  # numbers, and rows, that are copied at once
_FEW = 8  # a row with at most as many numbers is summed (weights, flags), or read in all rows (labels)
_RAREST = 8  # rows with the rarest labels, taken from all rows


def choose_rows(batch: Batch, at_least: int = 0) -> Callable[[int], list[int]]:
    """Return a function that chooses a number of rows, whose signatures lie far apart.

    Each row is the farthest from those taken before (Gonzalez 1985). A signature counts what is valid,
    masked and zero in a row, and has its class and how rare that is in the batch.

    Args:
        batch: tensors or samples. Samples are collated one by one.
        at_least: rows that are looked at, if there are as many.
    """
    if isinstance(batch, SampleBatch):
        places = _spread(batch.rows, max(CANDIDATES, at_least))
        samples = [batch.given[row] for row in batch.callers(places)]
        found = list[Tensor]()
        with suppress(Exception):  # a `collate` may want several samples: then rows are taken evenly
            found = [_signatures(_leaves(batch.collate([one]))) for one in samples]
        alike = len({one.shape for one in found}) == 1
        table = torch.cat(found) if alike else torch.zeros(len(places), 1)
    else:
        leaves: Sequence[Tensor] = batch.leaves
        entries = sum(leaf.numel() for leaf in leaves) // batch.rows
        most = min(_ENTRIES // max(entries, 1), 8 * CANDIDATES)
        rarity = _rarity(leaves)
        rare = {row for one in rarity for row in one.topk(min(_RAREST, batch.rows)).indices.tolist()}
        rare = {batch.order.index(row) for row in rare} if batch.order else rare
        places = sorted({*_spread(batch.rows, max(CANDIDATES, at_least, most)), *rare})
        rows = torch.tensor(batch.callers(places))
        pieces = rows.split(max(_FEWEST, _PIECE // max(entries, 1)))  # a copy of all of them takes memory
        table = torch.cat([_signatures(_taken(leaves, one)) for one in pieces])
        table = torch.cat([table, *[one[rows, None] for one in rarity]], 1)
    spread = table.amax(0) - table.amin(0) if table.shape[1] else table.new_zeros(0)
    table = table / torch.where(spread > 0, spread, 1)

    def choose(rows: int) -> list[int]:
        taken, distance = [0], (table - table[0]).norm(dim=1)
        while len(taken) < min(rows, len(table)):
            distance[taken] = -1.0
            taken.append(int(distance.argmax()))
            distance = torch.minimum(distance, (table - table[taken[-1]]).norm(dim=1))
        return sorted(places[row] for row in taken)

    return choose


def numbered_anew(few: Batch, batch: Batch) -> Batch:
    """Return rows of a batch whose columns of row numbers (the positives of a contrast) number these rows.

    A number beyond the rows is an error on the CPU, and on an accelerator it ends the use of the device.
    A column holds one integer per row, below the number of rows; classes keep which of them are equal.
    """
    pairs = zip(few.leaves, batch.leaves, strict=True)
    places = [at for at, (one, of) in enumerate(pairs) if _numbers_rows(one, of, few.rows)]
    few = few.copied() if places else few
    for at in places:
        column: Tensor = few.leaves[at]
        column[column >= 0] = column[column >= 0].unique(return_inverse=True)[1].to(column.dtype)
    return few


def _numbers_rows(few: Tensor, column: Tensor, rows: int) -> bool:
    is_integer = not (few.is_floating_point() or few.is_complex() or few.dtype == torch.bool)
    return is_integer and few.numel() == rows and rows <= int(few.max()) and int(column.max()) < len(column)


def _leaves(value: object) -> list[Tensor]:
    """Return the first row of each dense tensor of a collated sample; zeros of an empty one (no boxes)."""
    first = [leaf.detach()[:1] for leaf in tree.flatten(value).leaves if leaf.dim() and tree.is_dense(leaf)]
    return [one if len(one) else one.new_zeros(1, *one.shape[1:]) for one in first]


def _taken(leaves: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    return [leaf.detach().index_select(0, rows.to(leaf.device)) for leaf in leaves]


def _spread(total: int, most: int) -> list[int]:
    count = min(total, most)
    return [place * total // count for place in range(count)]


def _rarity(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return one over the count of the rarest value of each row, for tensors of few integers per row."""
    found: list[Tensor] = []
    for leaf in leaves:
        is_real = leaf.is_floating_point() or leaf.is_complex()
        if not is_real and leaf.numel() <= _FEW * len(leaf):
            flat = leaf.detach().to("cpu").reshape(len(leaf), -1)
            _, places, counts = torch.unique(flat, return_inverse=True, return_counts=True)
            found += [1.0 / counts.double()[places].amin(1)] if flat.shape[1] else []
    return found


def _signatures(leaves: Sequence[Tensor]) -> Tensor:
    numbers: list[Tensor] = []
    for leaf in leaves:
        flat = leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]
        if flat.is_floating_point() or flat.is_complex():
            # A mask or a weight may be real, and a missing target NaN.
            numbers += [(flat == 0).sum(1), (~flat.isfinite()).sum(1)]
            numbers += [flat.abs().nan_to_num().sum(1)] if flat.shape[1] <= _FEW else []
        else:
            numbers += [(flat != -100).sum(1), (flat == 0).sum(1), flat.sum(1)]
            numbers += [torch.full((len(flat),), flat.shape[1])]
    if not numbers:
        return torch.zeros(len(leaves[0]) if leaves else 1, 0, dtype=torch.float64)
    return torch.stack([one.to("cpu", torch.float64) for one in numbers], 1)


def whole_of(batches: Sequence[Batch]) -> Batch | None:
    """Return several batches as one; None if the shapes of their rows differ."""
    first = batches[0]
    if isinstance(first, SampleBatch):
        return SampleBatch([row for one in batches for row in getattr(one, "given", ())], first.collate)
    if any(one.like != first.like for one in batches):
        return None
    nests = [tree.flatten(one.whole) for one in batches]
    columns = zip(*[nest.leaves for nest in nests], strict=True)
    return TensorBatch(nests[0].build(torch.cat(column) for column in columns))
