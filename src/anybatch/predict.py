"""Segments of a step at any size of its micro-batches, read off two recordings of small ones."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from anybatch.compose import KEEP, Mix, Output, Segment, Shared
from anybatch.device import Device
from anybatch.meter import Recording
from anybatch.resized import resized

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


class Crossing(NamedTuple):
    """A storage made in the forward of a block and alive after it."""

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

    def __post_init__(self) -> None:
        one, other = [stretches(recording, self.blocks) for recording in self.recordings]
        if [part.place for part in one] != [part.place for part in other]:
            raise ValueError("Expected two recordings of the same step, got others. Trace each size itself.")
        object.__setattr__(self, "parts", (one, other))

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

    def crossings(self) -> dict[int, list[Crossing]]:
        """What is made in each forward of a block and alive after it, by stretch."""
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
        found: dict[int, list[Crossing]] = {}
        for storage, event in births.items():
            made = bisect_right(starts, event) - 1
            place = self.parts[0][made].place
            ends = bisect_right(starts, deaths[storage]) - 1 if storage in deaths else total
            if place.block and place.phase == "forward" and ends != made:
                found.setdefault(made, []).append(
                    Crossing(storage, (one.after[event], other.after[event]), ends)
                )
        return found

    def segments(
        self,
        micro_batch: int,
        device: Device,
        *,
        half: bool,
        ends: Mapping[int, Mapping[Shared, Crossing]] | None = None,
    ) -> list[Segment]:
        """The segments at another size: each storage's bytes are a line in the rows of a micro-batch.

        Args:
            micro_batch: rows of a micro-batch.
            device: whose seconds are estimated.
            half: whether its arithmetic is in 16 bits.
            ends: outputs of blocks that end in a stretch and are told apart there.
        """
        share = self.share(micro_batch)
        changes = [recording.changes() for recording in self.recordings]
        found: list[Segment] = []
        for index, (one, other) in enumerate(zip(*self.parts, strict=True)):
            shared = (ends or {}).get(index, {})
            without = 0.0
            low, high = changes[0][one.start : one.stop], changes[1][other.start : other.stop]
            if len(low) == len(high):
                mixed = [a + (b - a) * share for a, b in zip(low, high, strict=True)]
                net, peak = _net_and_peak(mixed)
                if shared:
                    ending = {crossing.storage for crossing in shared.values()}
                    storages = self.recordings[0].storages[one.start : one.stop]
                    rest = [0.0 if s in ending else c for s, c in zip(storages, mixed, strict=True)]
                    without = _net_and_peak(rest)[1]
            else:  # an event more here or there: lines through what the stretches add up to
                ends_at = zip(_net_and_peak(low), _net_and_peak(high), strict=True)
                net, peak = (a + (b - a) * share for a, b in ends_at)
            work = [a + (b - a) * share for a, b in zip(one[3:], other[3:], strict=True)]
            found.append(
                Segment(
                    block=one.place.block,
                    place=(one.place.phase, one.place.micro_batch),
                    net=round(net),
                    peak=max(0, round(peak)),
                    seconds=max(0.0, device.seconds(*work, half=half)),
                    cheap=max(0.0, device.seconds(work[0], 0.0, work[2], half=half)),
                    ends={key: _at(crossing, share) for key, crossing in shared.items()},
                    peak_without=max(0, round(without)),
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


def _at(crossing: Crossing, share: float) -> int:
    low, high = crossing.bytes
    return round(low + (high - low) * share)


def _times(segment: Segment, later: float) -> Segment:
    """A segment of the second micro-batch stands for those of all later ones, if there are any."""
    if not later:
        return replace(segment, net=0, peak=0, seconds=0.0, cheap=0.0, ends={}, peak_without=0)
    return replace(segment, seconds=later * segment.seconds, cheap=later * segment.cheap)


class Family:
    """The recordings of one step under each policy, and what they say of all mixtures and sizes.

    Args:
        recorded: of each policy, "keep" among them.
        update: where the update is to be taken from, if not from each recording itself.

    Raises:
        ValueError: the recordings are not of the same step.
    """

    def __init__(self, recorded: Mapping[str, Recorded], update: Recorded | None = None) -> None:
        self._recorded, self._update = recorded, update
        places = [part.place for part in recorded[KEEP].parts[0]]
        if any([part.place for part in one.parts[0]] != places for one in recorded.values()):
            raise ValueError("Expected recordings of the same step, got others. Trace each plan itself.")
        self._outputs = self._find_outputs()

    def mix(self, rows: int, micro_batch: int, device: Device, *, half: bool, input_bytes: int) -> Mix:
        """The step of a batch of so many rows, whose blocks may each have one of the recorded policies.

        Args:
            rows: of the batch.
            micro_batch: rows of each micro-batch.
            device: whose seconds are estimated.
            half: whether its arithmetic is in 16 bits.
            input_bytes: of the batch, beyond what the recordings hold at their start.
        """
        # The second micro-batch finds gradients; all later ones are like it. An uncut batch has none.
        later = (rows - micro_batch) / micro_batch
        spare = [] if self._update is None else self._update.segments(micro_batch, device, half=half)
        outputs = self._mixed_outputs(micro_batch, later > 0)
        segments: dict[str, list[Segment]] = {}
        for policy, one in self._recorded.items():
            ends: dict[int, dict[Shared, Crossing]] = {}
            for shared, crossings in self._outputs.items():
                crossing = crossings.get(policy)
                if crossing is not None and shared in outputs and not self._is_own(shared, crossing):
                    ends.setdefault(crossing.ends, {})[shared] = crossing
            found = one.segments(micro_batch, device, half=half, ends=ends)
            if spare:
                found = [s for s in found if s.place[0] != "update"]
                found += [s for s in spare if s.place[0] == "update"]
            segments[policy] = [
                _times(segment, later) if segment.place[1] > 0 else segment for segment in found
            ]
        return Mix(start=input_bytes, segments=segments, outputs=outputs)

    def _find_outputs(self) -> dict[Shared, dict[str, Crossing]]:
        """What blocks hand on, by policy: whatever ends elsewhere than in their own backward, under any."""
        crossings = {policy: one.crossings() for policy, one in self._recorded.items()}
        found: dict[Shared, dict[str, Crossing]] = {}
        for made in dict.fromkeys(made for one in crossings.values() for made in one):
            left = {policy: one.get(made, [])[::-1] for policy, one in crossings.items()}
            number = 0
            for candidates in list(left.values()):
                handed_on = [one for one in candidates if not self._is_own((made, 0), one)]
                for output in handed_on:
                    same: dict[str, Crossing] = {}
                    for policy, others in left.items():
                        # The last one of that size: what a block hands on is made last.
                        like = next((one for one in others if one.bytes == output.bytes), None)
                        like = output if output in others else like
                        if like is not None:
                            same[policy] = like
                            others.remove(like)
                    found[made, number] = same
                    number += bool(same)
        return {shared: same for shared, same in found.items() if same}

    def _is_own(self, shared: Shared, crossing: Crossing) -> bool:
        """Whether it ends in the backward of the block that made it."""
        parts = self._recorded[KEEP].parts[0]
        return crossing.ends < len(parts) and parts[crossing.ends].place.block == parts[shared[0]].place.block

    def _mixed_outputs(self, micro_batch: int, is_cut: bool) -> dict[Shared, Output]:
        parts = self._recorded[KEEP].parts[0]
        share = self._recorded[KEEP].share(micro_batch)
        found: dict[Shared, Output] = {}
        for shared, crossings in self._outputs.items():
            others = {
                policy: one
                for policy, one in crossings.items()
                if not self._is_own(shared, one) and one.ends < len(parts)
            }
            # Nor does it end elsewhere under a policy that does not make it at all.
            kept = [policy for policy in self._recorded if policy not in others]
            place = parts[shared[0]].place
            if others and (is_cut or place.micro_batch <= 0):
                last = max(others.values(), key=lambda one: one.ends)
                found[shared] = Output(
                    block=place.block,
                    bytes=_at(last, share),
                    kept_by=frozenset(kept),
                    user=parts[last.ends].place.block,
                    ends={policy: one.ends for policy, one in others.items()},
                )
        return found
