"""A recording at another size, told from how the same operations grow in another one."""

from array import array
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

from anybatch.memory import Mark, Recording

_KEPT_AS = {"recompute": "forward"}  # the phase in which a kept step does the same


def resized(recording: Recording, here: Recording, there: Recording) -> Recording | None:
    """What a recording would be with micro-batches of another size.

    A block that is rebuilt or moved makes storages of the sizes that it makes where it is kept. So how a size
    grows with the rows need not be recorded once more for each policy: two recordings of the kept step tell.
    What a policy does only with large storages it is taken to do with their like at the other size, too.

    Args:
        recording: of a step under any policies.
        here: of the same step, all blocks kept, with micro-batches of the same size.
        there: the same with micro-batches of the size that is wanted, event by event like `here`.

    Returns:
        The recording; None where sizes do not tell, because the kept step has no such size, or has two that
        are equal in one recording and not in the other.

    Example:
        >>> def step(rows, *sizes):
        ...     kinds = {"marks": (Mark(0, "start", -1, "", 0, 0, 0),), "owners": (6,), "places": ("",)}
        ...     sizes = {"before": array("q", [0, *sizes]), "after": array("q", [*sizes, 0])}
        ...     return Recording(storages=array("q", [0] * len(sizes["after"])), **sizes, **kinds)
        >>> resized(step(5, 50, 20), here=step(5, 20, 50), there=step(2, 8, 20)).after
        array('q', [20, 8, 0])
        >>> resized(step(5, 60), here=step(5, 50), there=step(2, 20)) is None
        True
    """
    sizes: dict[int, set[int]] = defaultdict(set)
    for one, other in ((here.before, there.before), (here.after, there.after)):
        for size, wanted in zip(one, other, strict=True):
            sizes[size].add(wanted)
    told = {size: next(iter(wanted)) for size, wanted in sizes.items() if len(wanted) == 1}
    if not told.keys() >= {*recording.before, *recording.after}:
        return None
    return replace(
        recording,
        before=array("q", [told[size] for size in recording.before]),
        after=array("q", [told[size] for size in recording.after]),
        marks=_with_work(recording, here, there),
    )


def _with_work(recording: Recording, here: Recording, there: Recording) -> tuple[Mark, ...]:
    """The marks, where each module does in each phase as many times more or less as where it is kept."""
    few, many = _work(there), _work(here)
    flops = moved = 0.0
    marks = list(recording.marks[:1])
    for before, mark in pairwise(recording.marks):
        key = before.module, _KEPT_AS.get(before.phase, before.phase)
        flops += (mark.flops - before.flops) * _ratio(few[0][key], many[0][key])
        moved += (mark.moved - before.moved) * _ratio(few[1][key], many[1][key])
        marks.append(mark._replace(flops=round(flops), moved=round(moved)))
    return tuple(marks)


def _work(recording: Recording) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Floating-point operations and bytes moved of each module in each phase."""
    flops: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    for before, mark in pairwise(recording.marks):
        key = before.module, _KEPT_AS.get(before.phase, before.phase)
        flops[key] += mark.flops - before.flops
        moved[key] += mark.moved - before.moved
    return flops, moved


def _ratio(wanted: int, known: int) -> float:
    return wanted / known if known else 1.0
