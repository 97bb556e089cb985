"""Ranges: equal parts of a whole, and what each of several tensors has in a part of all of them."""

from collections.abc import Iterable, Iterator


def even(total: int, parts: int) -> list[range]:
    """Cut a whole into ranges of equal size, but for one element."""
    return [range(total * at // parts, total * (at + 1) // parts) for at in range(parts)]


def within(sizes: Iterable[int], part: range) -> Iterator[tuple[int, int, int]]:
    """Yield which tensors are in a part of all, laid end to end, and the start and stop of each in itself."""
    first = 0
    for place, size in enumerate(sizes):
        start, stop = max(first, part.start), min(first + size, part.stop)
        if start < stop:
            yield place, start - first, stop - first
        first += size
