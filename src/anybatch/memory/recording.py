"""The recording of a meter: beginning, growth and end of each storage, and the phases of the step."""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from anybatch.memory.ledger import OWNERS, Holding, Ledger, Moment

PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, WORKSPACE, INPUT, OTHER = range(len(OWNERS))


class Mark(NamedTuple):
    """A change of phase or module, with running counts of work."""

    event: int  # number of events before it
    phase: str  # the phase that begins, one of `anybatch.memory.ledger.PHASES`
    micro_batch: int  # index of the forward in the step, from 0; -1 before the first
    module: str  # the innermost module at work
    operations: int  # operations so far
    flops: int  # floating-point operations so far, of products, convolutions and attention
    moved: int  # bytes that operations read and wrote so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The events of a meter: a storage begins, changes its size or ends."""

    storages: "array[int]"  # int64, by event: the number of its storage, from 0 in order of first sight
    before: "array[int]"  # int64, by event: bytes of the storage before it
    after: "array[int]"  # int64, by event: bytes of the storage after it; 0 if it ends
    marks: tuple[Mark, ...]  # changes of phase and module, in order; the first at event 0
    owners: tuple[int, ...]  # by storage: index in `OWNERS`
    places: tuple[str, ...]  # by storage: name of the module

    def changes(self, granule: int = 1) -> list[int]:
        """Return the signed change in bytes of each event, sizes rounded up to a granule."""
        pairs = zip(self.before, self.after, strict=True)
        return [(-(-after // granule) + -before // granule) * granule for before, after in pairs]

    def alive(self, granule: int = 1) -> list[int]:
        """Return the bytes alive after each event."""
        return list(accumulate(self.changes(granule)))

    def peak(self, granule: int = 1) -> int:
        """Return the most bytes alive at once."""
        return max(self.alive(granule), default=0)

    @property
    def forwards(self) -> int:
        """Number of forwards of the model; a loss may call it more than once, or never."""
        return self.marks[-1].micro_batch + 1

    def ledger(self, *, source: str, device: str, granule: int = 1) -> Ledger:
        """Return the table: the moment of most bytes of each stretch between two marks."""
        changes, owners = self.changes(granule), [self.owners[one] for one in self.storages]
        ends = [*[mark.event for mark in self.marks[1:]], len(changes)]
        alive, live, peak, peak_event = [0] * len(OWNERS), 0, 0, 0
        moments: list[Moment] = []
        for mark, end in zip(self.marks, ends, strict=True):
            most, found = live, tuple(alive)
            for event in range(mark.event, end):
                live += changes[event]
                alive[owners[event]] += changes[event]
                if live > most:
                    most, found = live, tuple(alive)
                    if live > peak:
                        peak, peak_event = live, event
            moments.append(
                Moment(phase=mark.phase, micro_batch=mark.micro_batch, module=mark.module, bytes=found)
            )
        return Ledger(
            moments=tuple(moments),
            source=source,
            device=device,
            by_module=self._holdings(changes[: peak_event + 1]),
        )

    def _holdings(self, changes: Sequence[int]) -> tuple[Holding, ...]:
        held: Counter[tuple[str, int]] = Counter()
        for storage, change in zip(self.storages, changes, strict=False):
            held[self.places[storage], self.owners[storage]] += change
        return tuple(
            [Holding(place, OWNERS[owner], size) for (place, owner), size in held.most_common() if size]
        )


def find_owners(
    storages: Sequence[int],
    after: Sequence[int],
    marks: Sequence[Mark],
    backward_ends: Sequence[int],
    known: Mapping[int, int],
) -> list[int]:
    """Return the owner of each storage: known, or found from when it began and when it ended.

    An activation is alive when a backward begins, or outlives a recomputed forward; a gradient outlives the
    backward that made it. A storage that ends earlier is workspace.
    """
    begins: list[int] = []
    ends: dict[int, int] = {}
    for event, (number, size) in enumerate(zip(storages, after, strict=True)):
        if number == len(begins):
            begins.append(event)
        if not size:
            ends[number] = event
    places = [mark.event for mark in marks]
    backwards = [
        mark.event
        for before, mark in pairwise(marks)
        if mark.phase == "backward" and before.phase not in ("backward", "recompute")
    ]
    return [
        known[number]
        if number in known
        else _owner_of(
            marks[bisect_right(places, begin) - 1].phase,
            crosses_backward=_is_between(begin, backwards, ends.get(number)),
            outlives_backward=_is_between(begin, backward_ends, ends.get(number)),
            ends_in=None if number not in ends else marks[bisect_right(places, ends[number]) - 1].phase,
        )
        for number, begin in enumerate(begins)
    ]


def _owner_of(phase: str, *, crosses_backward: bool, outlives_backward: bool, ends_in: str | None) -> int:
    if phase in ("forward", "loss"):
        return ACTIVATIONS if crosses_backward else OTHER if ends_in is None else WORKSPACE
    if phase == "recompute":
        return WORKSPACE if ends_in == "recompute" else ACTIVATIONS
    if phase == "backward":
        return GRADIENTS if outlives_backward else WORKSPACE
    return OTHER if phase == "start" or ends_in is None else WORKSPACE


def _is_between(begin: int, events: Sequence[int], end: int | None) -> bool:
    index = bisect_right(events, begin)
    return index < len(events) and (end is None or events[index] <= end)


def modules_at(births: Sequence[int], marks: Sequence[Mark]) -> list[str]:
    """Return the module at work when each storage began."""
    events = [mark.event for mark in marks]
    return [marks[bisect_right(events, birth) - 1].module for birth in births]


def continued(recording: Recording, run: int, wanted: int) -> Recording:
    """Return the recording with more micro-batches like the last but one.

    Each leaves the same few bytes behind (its loss), so those that were not run become one storage that
    begins with the last but one.
    """
    each, marks = recording.forwards // run, recording.marks
    middle_at, last_at = [
        next(index for index, mark in enumerate(marks) if mark.micro_batch >= each * one)
        for one in (run - 2, run - 1)
    ]
    middle, last = marks[middle_at], marks[last_at]
    left = sum(recording.changes()[middle.event : last.event])
    more = wanted - run

    def moved(index: int, mark: Mark) -> Mark:
        times = more if index >= last_at else 0
        return mark._replace(
            event=mark.event + (index > middle_at),
            micro_batch=mark.micro_batch + times * each,
            operations=mark.operations + times * (last.operations - middle.operations),
            flops=mark.flops + times * (last.flops - middle.flops),
            moved=mark.moved + times * (last.moved - middle.moved),
        )

    def with_one(values: "array[int]", one: int) -> "array[int]":
        return values[: middle.event] + array("q", [one]) + values[middle.event :]

    return Recording(
        storages=with_one(recording.storages, len(recording.owners)),
        before=with_one(recording.before, 0),
        after=with_one(recording.after, left * more),
        marks=tuple([moved(index, mark) for index, mark in enumerate(marks)]),
        owners=(*recording.owners, ACTIVATIONS),
        places=(*recording.places, ""),
    )
