"""The recording of a meter: beginning, growth and end of each storage, and the phases of the step."""

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from anybatch.memory.ledger import OWNERS, Holding, Ledger, Moment

PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, WORKSPACE, INPUT, OTHER = range(len(OWNERS))


class Mark(NamedTuple):
    """A change of phase or module, with running counts."""

    event: int  # number of events before it
    phase: str  # the phase that begins, one of `anybatch.memory.ledger.PHASES`
    micro_batch: int  # index of the forward in the step, from 0; -1 before the first
    module: str  # the innermost module at work
    operations: int = 0  # operations so far
    flops: int = 0  # floating-point operations so far, of products, convolutions and attention
    moved: int = 0  # bytes that operations read and wrote so far
    begun: int = 0  # backward passes begun so far
    ended: int = 0  # backward passes ended so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The events of a meter: a storage begins, changes its size or ends."""

    storages: "array[int]"  # int64, by event: the number of its storage, from 0 in order of first sight
    changes: "array[int]"  # int64, by event: the signed change in bytes
    marks: tuple[Mark, ...]  # changes of phase and module, in order; the first at event 0
    owners: tuple[int, ...]  # by storage: index in `OWNERS`
    places: tuple[str, ...]  # by storage: name of the module
    work: tuple[int, ...]  # operations, FLOPs and bytes moved before the last mark

    @property
    def forwards(self) -> int:
        """Number of forwards of the model; a loss may call it more than once, or never."""
        return self.marks[-1].micro_batch + 1

    def ledger(self, *, source: str, device: str) -> Ledger:
        """Return the table: the moment of most bytes of each stretch between two marks."""
        ends = [*[mark.event for mark in self.marks[1:]], len(self.changes)]
        alive, live, peak, peak_event = [0] * len(OWNERS), 0, 0, 0
        moments: list[Moment] = []
        for mark, end in zip(self.marks, ends, strict=True):
            most, found = live, tuple(alive)
            for event in range(mark.event, end):
                live += self.changes[event]
                alive[self.owners[self.storages[event]]] += self.changes[event]
                if live > most:
                    most, found = live, tuple(alive)
                    if live > peak:
                        peak, peak_event = live, event
            moments.append(
                Moment(phase=mark.phase, micro_batch=mark.micro_batch, module=mark.module, bytes=found)
            )
        held: Counter[tuple[str, int]] = Counter()
        for storage, change in zip(self.storages[: peak_event + 1], self.changes, strict=False):
            held[self.places[storage], self.owners[storage]] += change
        largest = [Holding(place, OWNERS[owner], size) for (place, owner), size in held.most_common() if size]
        return Ledger(moments=tuple(moments), source=source, device=device, by_module=tuple(largest))


def find_owner(born: Mark, died: Mark, *, has_ended: bool) -> int:
    """Return the owner of a storage by the marks before its beginning and its end.

    An activation is alive when a backward begins, or outlives a recomputed forward; a gradient outlives the
    backward that made it. A storage that ends earlier is workspace.
    """
    if born.phase in ("forward", "loss"):
        return ACTIVATIONS if died.begun > born.begun else WORKSPACE if has_ended else OTHER
    if born.phase == "recompute":
        return WORKSPACE if has_ended and died.phase == "recompute" else ACTIVATIONS
    if born.phase == "backward":
        return GRADIENTS if died.ended > born.ended else WORKSPACE
    return WORKSPACE if has_ended and born.phase != "start" else OTHER


def continued(recording: Recording, wanted: int) -> Recording:
    """Return the recording of two micro-batches with more micro-batches like the second.

    Each leaves the same few bytes behind (its loss), so those that were not run become one storage that
    begins with the second.
    """
    each, marks, more = recording.forwards // 2, recording.marks, wanted - 2
    at = next(index for index, mark in enumerate(marks) if mark.micro_batch >= each)
    end = next((mark for mark in marks[at:] if mark.phase == "update"), marks[-1])
    second = marks[at]
    # Both backward passes end with the same gradients.
    first_ended, ended = [next(m.event for m in marks if m.ended >= end.ended * k // 2) for k in (1, 2)]
    storages, changes = recording.storages[:], recording.changes[:]
    storages.insert(second.event, len(recording.owners))
    changes.insert(second.event, more * sum(recording.changes[first_ended:ended]))
    moved, added = more * each, second.event  # forwards, and where the new event is
    later = [
        one._replace(event=one.event + (one.event > added), micro_batch=one.micro_batch + moved)
        for one in marks[at:]
    ]
    counts = zip(recording.work, second[4:7], end[4:7], strict=True)
    return Recording(
        storages=storages,
        changes=changes,
        marks=(*marks[:at], *later),
        owners=(*recording.owners, ACTIVATIONS),
        places=(*recording.places, ""),
        work=tuple([total + more * (after - before) for total, before, after in counts]),
    )
