"""Two recordings of one step, cut into stretches, and what they say of it at any size of a micro-batch."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anybatch.memory import Device, Recording
from anybatch.planner.mixture import Segment, Shared
from anybatch.planner.resize import resized

REBUILT = "recompute"  # a phase that belongs to the backward of its block
ONCE = ("start", "update")  # phases of a step, not of a micro-batch


class Place(NamedTuple):
    """What a stretch of a recording belongs to."""

    block: str
    phase: str
    micro_batch: int


class Stretch(NamedTuple):
    """Consecutive events of one place: from this event to that one, and the work done meanwhile."""

    place: Place
    start: int
    stop: int
    operations: float
    flops: float
    moved: float


def stretches(recording: Recording, blocks: Sequence[str]) -> list[Stretch]:
    """A recording cut where one block hands over to another, or one phase to the next.

    Args:
        recording: of one step.
        blocks: names of the modules that count as blocks; what is inside belongs to them.
    """
    inside: dict[str, str] = {}

    def block_of(module: str) -> str:
        if module not in inside:
            inside[module] = next((b for b in blocks if module == b or module.startswith(f"{b}.")), "")
        return inside[module]

    marks = recording.marks
    total = len(recording.storages)
    found: list[Stretch] = []
    for index, mark in enumerate(marks):
        following = marks[index + 1] if index + 1 < len(marks) else None
        stop = total if following is None else following.event
        work = (0.0, 0.0, 0.0)
        if following is not None:
            work = (
                following.operations - mark.operations,
                following.flops - mark.flops,
                following.moved - mark.moved,
            )
        phase = "backward" if mark.phase == REBUILT else mark.phase
        place = Place(block_of(mark.module), phase, -1 if phase in ONCE else mark.micro_batch)
        if found and found[-1].place == place:
            last = found[-1]
            added = [one + more for one, more in zip(last[3:], work, strict=True)]
            found[-1] = Stretch(place, last.start, stop, *added)
        elif found and not place.block and not any(work) and found[-1].place[1:] == place[1:]:
            found[-1] = found[-1]._replace(stop=stop)  # what a block's caller lets go after it is the block's
        elif stop > mark.event or any(work):
            found.append(Stretch(place, mark.event, stop, *work))
    return found


class Born(NamedTuple):
    """A storage, made in one of the stretches."""

    storage: int
    bytes: tuple[int, int]  # in either recording
    ends: int  # the stretch in which it ends, or the number of all


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """Two recordings of a step of two micro-batches, alike but for their size.

    Attributes:
        sizes: rows of a micro-batch in each.
        recordings: what happened.
        blocks: names of the blocks.

    Raises:
        ValueError: the two recordings are not of the same step.
    """

    sizes: tuple[int, int]
    recordings: tuple[Recording, Recording]
    blocks: tuple[str, ...]
    parts: tuple[list[Stretch], list[Stretch]] = field(init=False)
    changes: tuple[list[int], list[int]] = field(init=False)  # in bytes, of each event

    def __post_init__(self) -> None:
        one, other = [stretches(recording, self.blocks) for recording in self.recordings]
        if [part.place for part in one] != [part.place for part in other]:
            raise ValueError("Expected two recordings of the same step, got others. Trace each size itself.")
        object.__setattr__(self, "parts", (one, other))
        object.__setattr__(self, "changes", tuple([recording.changes() for recording in self.recordings]))

    @property
    def is_aligned(self) -> bool:
        """Whether each event of one recording has its like in the other."""
        one, other = self.parts
        lengths = {len(recording.storages) for recording in self.recordings}
        return len(lengths) == 1 and [part.start for part in one] == [part.start for part in other]

    def beside(self, recording: Recording) -> "Recorded | None":
        """The same step under another policy, of which only the second size was recorded.

        Args:
            recording: of micro-batches of the second size.

        Returns:
            None where the sizes of storages here do not tell those at the first size.
        """
        if not self.is_aligned:
            return None
        there, here = self.recordings
        first = resized(recording, here=here, there=there)
        if first is None:
            return None
        return Recorded(sizes=self.sizes, recordings=(first, recording), blocks=self.blocks)

    def share(self, micro_batch: int) -> float:
        """How far a size lies from the first towards the second."""
        return (micro_batch - self.sizes[0]) / (self.sizes[1] - self.sizes[0])

    def births(self, phase: str) -> dict[int, list[Born]]:
        """The storages made in each stretch of a phase, in order."""
        if not self.is_aligned:
            return {}
        one, other = self.recordings
        total = len(self.parts[0])
        births: dict[int, int] = {}
        deaths: dict[int, int] = {}
        for event, (storage, after) in enumerate(zip(one.storages, one.after, strict=True)):
            births.setdefault(storage, event)
            if not after:
                deaths[storage] = event
        starts = [part.start for part in self.parts[0]]
        found: dict[int, list[Born]] = {}
        for storage, event in births.items():
            made = bisect_right(starts, event) - 1
            if self.parts[0][made].place.phase == phase:
                ends = bisect_right(starts, deaths[storage]) - 1 if storage in deaths else total
                found.setdefault(made, []).append(Born(storage, (one.after[event], other.after[event]), ends))
        return found

    def segments(
        self,
        micro_batch: int,
        device: Device,
        *,
        half: bool,
        ends: Mapping[int, Mapping[Shared, Born]] | None = None,
        others: Mapping[int, Sequence[tuple[str, Born]]] | None = None,
    ) -> list[Segment]:
        """The segments at another size: each storage's bytes are a line in the rows of a micro-batch.

        Args:
            micro_batch: rows of a micro-batch.
            device: whose seconds are estimated.
            half: whether its arithmetic is in 16 bits.
            ends: outputs of blocks that end in a stretch and are told apart there.
            others: storages that come or go in a stretch for the sake of another block.
        """
        share = self.share(micro_batch)
        found: list[Segment] = []
        for index, (one, other) in enumerate(zip(*self.parts, strict=True)):
            shared = (ends or {}).get(index, {})
            without = 0.0
            low, high = self.changes[0][one.start : one.stop], self.changes[1][other.start : other.stop]
            if len(low) == len(high):
                mixed = [a + (b - a) * share for a, b in zip(low, high, strict=True)]
                net, peak = _net_and_peak(mixed)
                if shared:
                    ending = {born.storage for born in shared.values()}
                    storages = self.recordings[0].storages[one.start : one.stop]
                    rest = [0.0 if s in ending else c for s, c in zip(storages, mixed, strict=True)]
                    without = _net_and_peak(rest)[1]
            else:  # an event more here or there: lines through what the stretches add up to
                ends_at = zip(_net_and_peak(low), _net_and_peak(high), strict=True)
                net, peak = (a + (b - a) * share for a, b in ends_at)
            work = [a + (b - a) * share for a, b in zip(one[3:], other[3:], strict=True)]
            moved = _summed((others or {}).get(index, ()), share, one.place.phase)
            seconds = max(0.0, device.seconds(*work, half=half))
            if moved and device.link:  # copies run beside what is computed, so the slower of both counts
                seconds = max(seconds, sum(map(abs, moved.values())) / device.link)
            found.append(
                Segment(
                    block=one.place.block,
                    place=(one.place.phase, one.place.micro_batch),
                    net=round(net),
                    peak=max(0, round(peak)),
                    seconds=seconds,
                    cheap=max(0.0, device.seconds(work[0], 0.0, work[2], half=half)),
                    ends={key: bytes_at(born, share) for key, born in shared.items()},
                    peak_without=max(0, round(without)),
                    others=moved,
                )
            )
        return found


def _net_and_peak(changes: Sequence[float]) -> tuple[float, float]:
    live = highest = 0.0
    for change in changes:
        live += change
        if live > highest:
            highest = live
    return live, highest


def bytes_at(born: Born, share: float) -> int:
    """Bytes of a storage at a size that lies so far from the first towards the second."""
    low, high = born.bytes
    return round(low + (high - low) * share)


def _summed(others: Sequence[tuple[str, Born]], share: float, phase: str) -> dict[str, int]:
    """Bytes that come in a backward, or go in a forward, by block."""
    found: dict[str, int] = {}
    for block, born in others:
        size = bytes_at(born, share)
        found[block] = found.get(block, 0) + (size if phase == "backward" else -size)
    return found
