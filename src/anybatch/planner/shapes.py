"""Shapes of rows, and the longest of many."""

from anybatch.core import BatchError, SampleBatch, tree
from anybatch.state import rng

Shape = tuple[tuple[str, tuple[int, ...]], ...]  # dtype and sizes of each leaf of a row

COLLATED_AT_ONCE = 8  # rows collated together if only shapes are needed


def row_shape(value: object) -> Shape:
    """Return dtype and sizes of each leaf of one row."""
    return tuple([(str(leaf.dtype), tuple(leaf.shape[1:])) for leaf in tree.flatten(value).leaves])


def longest(batch: SampleBatch) -> Shape:
    """Return the largest size of each axis over all samples, collated a few at a time."""
    with rng.preserved():
        shapes = [*map(row_shape, batch.cut(COLLATED_AT_ONCE))]  # each is freed before the next is made
    for shape in shapes:
        if [(name, len(sizes)) for name, sizes in shape] != [(n, len(s)) for n, s in shapes[0]]:
            raise BatchError(
                "Expected collate to return tensors of the same kinds for all rows, got "
                f"{str(shape)[:80]} after {str(shapes[0])[:80]}. Return the same nest each time."
            )
    return tuple(
        (name, tuple(max(sizes) for sizes in zip(*[shape[leaf][1] for shape in shapes], strict=True)))
        for leaf, (name, _) in enumerate(shapes[0])
    )
