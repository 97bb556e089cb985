"""Bytes and seconds of a step at any size and with any mixture of policies, from a few recorded steps."""

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from anybatch.memory import Device, Mark, Recording
from anybatch.planner.mixture import KEEP, Mixture, Output, Segment, Shared
from anybatch.recompute import offload

_KEPT_AS = {"recompute": "forward"}  # the phase in which a kept step does the same


def resized(recording: Recording, here: Recording, there: Recording) -> Recording | None:
    """What a recording would be with micro-batches of another size; None where sizes do not tell.

    A block that is rebuilt or moved makes storages of the sizes that it makes where it is kept, so two
    recordings of the kept step tell how a size grows with the rows.
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


# ---- two recordings


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
    """A recording cut where one block hands over to another, or one phase to the next."""

    @cache
    def block_of(module: str) -> str:
        return next((one for one in blocks if module == one or module.startswith(f"{one}.")), "")

    marks = recording.marks
    end = marks[-1]._replace(event=len(recording.storages))
    found: list[Stretch] = []
    for mark, following in pairwise((*marks, end)):
        stop = following.event
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


class Allocation(NamedTuple):
    """A storage, made in one of the stretches."""

    storage: int
    bytes: tuple[int, int]  # in either recording
    ends: int  # the stretch in which it ends, or the number of all

    def bytes_at(self, share: float) -> int:
        """Its bytes at a size that lies so far from the first towards the second."""
        low, high = self.bytes
        return round(low + (high - low) * share)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """Two recordings of a step of two micro-batches, alike but for their size."""

    sizes: tuple[int, int]  # rows of a micro-batch in each
    recordings: tuple[Recording, Recording]  # what happened
    blocks: tuple[str, ...]  # names of the blocks
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

    def under_policy(self, recording: Recording) -> "Recorded | None":
        """The same step under a policy recorded at the second size only; None where that does not tell."""
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

    def allocations(self, phase: str) -> dict[int, list[Allocation]]:
        """The storages made in each stretch of a phase, in order."""
        if not self.is_aligned:
            return {}
        one, other = self.recordings
        total = len(self.parts[0])
        allocations: dict[int, int] = {}
        deaths: dict[int, int] = {}
        for event, (storage, after) in enumerate(zip(one.storages, one.after, strict=True)):
            allocations.setdefault(storage, event)
            if not after:
                deaths[storage] = event
        starts = [part.start for part in self.parts[0]]
        found: dict[int, list[Allocation]] = {}
        for storage, event in allocations.items():
            made = bisect_right(starts, event) - 1
            if self.parts[0][made].place.phase == phase:
                ends = bisect_right(starts, deaths[storage]) - 1 if storage in deaths else total
                found.setdefault(made, []).append(
                    Allocation(storage, (one.after[event], other.after[event]), ends)
                )
        return found

    def segments(
        self,
        micro_batch: int,
        device: Device,
        half: bool,
        ends: Mapping[int, Mapping[Shared, Allocation]],
        others: Mapping[int, Sequence[tuple[str, Allocation]]],
    ) -> list[Segment]:
        """The segments at another size: each storage's bytes are a line in the rows of a micro-batch."""
        share = self.share(micro_batch)
        found: list[Segment] = []
        for index, (one, other) in enumerate(zip(*self.parts, strict=True)):
            shared = ends.get(index, {})
            without = 0.0
            low, high = self.changes[0][one.start : one.stop], self.changes[1][other.start : other.stop]
            if len(low) == len(high):
                mixed = [a + (b - a) * share for a, b in zip(low, high, strict=True)]
                net, peak = _net_and_peak(mixed)
                if shared:
                    ending = {alloc.storage for alloc in shared.values()}
                    storages = self.recordings[0].storages[one.start : one.stop]
                    rest = [0.0 if s in ending else c for s, c in zip(storages, mixed, strict=True)]
                    without = _net_and_peak(rest)[1]
            else:  # an event more here or there: lines through what the stretches add up to
                sums = zip(_net_and_peak(low), _net_and_peak(high), strict=True)
                net, peak = (a + (b - a) * share for a, b in sums)
            work = [a + (b - a) * share for a, b in zip(one[3:], other[3:], strict=True)]
            moved = _summed(others.get(index, ()), share, one.place.phase)
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
                    ends={key: alloc.bytes_at(share) for key, alloc in shared.items()},
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


def _summed(others: Sequence[tuple[str, Allocation]], share: float, phase: str) -> dict[str, int]:
    """Bytes that come in a backward, or go in a forward, by block."""
    found: dict[str, int] = {}
    for block, alloc in others:
        size = alloc.bytes_at(share)
        found[block] = found.get(block, 0) + (size if phase == "backward" else -size)
    return found


# ---- several policies


_STAYS = 0.01  # of the bytes that a policy moves: what may stay at another size, too small for it


def _times(segment: Segment, later: float) -> Segment:
    """A segment of the second micro-batch, which stands for those of all later ones, if there are any."""
    if not later:
        return replace(segment, net=0, peak=0, seconds=0.0, cheap=0.0, ends={}, peak_without=0, others={})
    return replace(segment, seconds=later * segment.seconds, cheap=later * segment.cheap)


class PolicyRecordings:
    """The recordings of one step by policy, "keep" among them; what they say of mixtures and sizes."""

    def __init__(self, recorded: Mapping[str, Recorded], update: Recorded | None = None) -> None:
        self._recorded, self._update = recorded, update
        self._places = [part.place for part in recorded[KEEP].parts[0]]  # the same under all policies
        if any([part.place for part in one.parts[0]] != self._places for one in recorded.values()):
            raise ValueError("Expected recordings of the same step, got others. Trace each plan itself.")
        self._others: dict[str, dict[int, list[tuple[str, Allocation]]]] = {}  # by policy and stretch
        self._outputs = self._find_outputs()
        self._find_fetched()

    def mixture(
        self, rows: int, micro_batch: int, device: Device, *, half: bool, input_bytes: int
    ) -> Mixture:
        """The step of a batch of so many rows, whose blocks may each have one of the recorded policies."""
        # The second micro-batch finds gradients; all later ones are like it. An uncut batch has none.
        later = (rows - micro_batch) / micro_batch
        spare = self._update.segments(micro_batch, device, half, {}, {}) if self._update else []
        outputs = self._mixed_outputs(micro_batch, later > 0)
        segments: dict[str, list[Segment]] = {}
        share = self._recorded[KEEP].share(micro_batch)
        for policy, one in self._recorded.items():
            if policy == "offload" and not self._is_moved_alike(policy, share):
                continue
            ends: dict[int, dict[Shared, Allocation]] = {}
            for shared, crossings in self._outputs.items():
                crossing = crossings.get(policy)
                if crossing is not None and shared in outputs and not self._is_own(shared, crossing):
                    ends.setdefault(crossing.ends, {})[shared] = crossing
            found = one.segments(micro_batch, device, half, ends, self._others.get(policy, {}))
            if spare:
                found = [s for s in found if s.place[0] != "update"]
                found += [s for s in spare if s.place[0] == "update"]
            segments[policy] = [
                _times(segment, later) if segment.place[1] > 0 else segment for segment in found
            ]
        return Mixture(start=input_bytes, segments=segments, outputs=outputs)

    def _is_moved_alike(self, policy: str, share: float) -> bool:
        """Whether a policy moves nearly all that it moved where it was recorded: what is small stays."""
        others = self._others.get(policy, {}).values()
        sizes = [(alloc.bytes_at(share), max(alloc.bytes)) for one in others for _, alloc in one]
        stays = sum(size for size, known in sizes if size < offload.SMALLEST <= known)
        return stays <= _STAYS * sum(size for size, _ in sizes)

    def _find_outputs(self) -> dict[Shared, dict[str, Allocation]]:
        """What blocks hand on, by policy: whatever ends elsewhere than in their own backward, under any."""
        allocations = {policy: one.allocations("forward") for policy, one in self._recorded.items()}
        found: dict[Shared, dict[str, Allocation]] = {}
        for made in allocations[KEEP]:
            number, is_block = 0, bool(self._places[made].block)
            made_here = {policy: one.get(made, []) for policy, one in allocations.items()}
            for alike in self._alike(made, made_here):
                same = {policy: one for policy, one in alike.items() if one.ends != made}
                moved = [policy for policy in same if policy != KEEP and self._is_moved(same, policy)]
                for policy in moved:
                    self._add_other(policy, same[policy].ends, same[KEEP].ends, same[policy])
                # What one block holds and may move ends as the policy of this block has it.
                if is_block and not moved and any(not self._is_own((made, 0), one) for one in same.values()):
                    found[made, number] = same
                    number += 1
        return found

    def _alike(
        self, made: int, allocations: Mapping[str, Sequence[Allocation]]
    ) -> Iterator[Mapping[str, Allocation]]:
        """Each storage of a forward, under all policies that make it."""
        # A forward is the same operations, whatever becomes of their results; a block that will run again
        # notes before them what it starts from.
        count = len(allocations[KEEP])
        last = [every[max(0, len(every) - count) :] for every in allocations.values()]
        if len({tuple([one.bytes for one in every]) for every in last}) == 1:
            yield from [dict(zip(allocations, every, strict=True)) for every in zip(*last, strict=True)]
            return
        left = {
            policy: [one for one in every[::-1] if one.ends != made] for policy, every in allocations.items()
        }
        for candidates in list(left.values()):
            for output in [one for one in candidates if not self._is_own((made, 0), one)]:
                same: dict[str, Allocation] = {}
                for policy, others in left.items():
                    # The last one of that size: what a block hands on is made last.
                    like = next((one for one in others if one.bytes == output.bytes), None)
                    like = output if output in others else like
                    if like is not None:
                        same[policy] = like
                        others.remove(like)
                yield same

    def _find_fetched(self) -> None:
        """What a backward makes for another block, and does not make where all blocks are kept."""
        kept = self._recorded[KEEP].allocations("backward")
        for policy, one in self._recorded.items() if kept else ():  # else nothing tells them from gradients
            for made, every in one.allocations("backward").items():
                outlive = [alloc for alloc in kept.get(made, ()) if alloc.ends != made]
                flows = Counter([(alloc.bytes, alloc.ends) for alloc in outlive])
                unlike: list[Allocation] = []
                for alloc in every:
                    if flows[alloc.bytes, alloc.ends] > 0:
                        flows[alloc.bytes, alloc.ends] -= 1
                    elif alloc.ends != made:
                        unlike.append(alloc)
                left = Counter([size for size, _ in flows.elements()])
                for alloc in unlike:
                    if left[alloc.bytes] > 0:  # a gradient that ends elsewhere is still one
                        left[alloc.bytes] -= 1
                    elif alloc.ends < len(self._places):
                        self._add_other(policy, made, alloc.ends, alloc)

    def _is_moved(self, same: Mapping[str, Allocation], policy: str) -> bool:
        """Whether one block alone holds it until its backward, but a policy lets it go in a forward."""
        places = self._places
        ends = {one.ends if one.ends < len(places) else -1 for other, one in same.items() if other != policy}
        last = same[policy].ends
        return (
            KEEP in same
            and {places[end].phase for end in ends} == {"backward"}
            and len({places[end].block for end in ends}) == 1
            and last < len(places)
            and places[last].phase == "forward"
        )

    def _add_other(self, policy: str, at: int, owner: int, crossing: Allocation) -> None:
        """In one stretch a storage comes or goes for the sake of the block of another stretch."""
        block = self._places[owner].block
        if block:
            self._others.setdefault(policy, {}).setdefault(at, []).append((block, crossing))

    def _is_own(self, shared: Shared, crossing: Allocation) -> bool:
        """Whether it ends in the backward of the block that made it."""
        places = self._places
        return crossing.ends < len(places) and places[crossing.ends].block == places[shared[0]].block

    def _mixed_outputs(self, micro_batch: int, is_cut: bool) -> dict[Shared, Output]:
        share = self._recorded[KEEP].share(micro_batch)
        found: dict[Shared, Output] = {}
        for shared, crossings in self._outputs.items():
            others = {
                policy: one
                for policy, one in crossings.items()
                if not self._is_own(shared, one) and one.ends < len(self._places)
            }
            # Nor does it end elsewhere under a policy that does not make it at all.
            kept = [policy for policy in self._recorded if policy not in others]
            place = self._places[shared[0]]
            if others and (is_cut or place.micro_batch <= 0):
                last = max(others.values(), key=lambda one: one.ends)
                found[shared] = Output(
                    block=place.block,
                    bytes=last.bytes_at(share),
                    kept_by=frozenset(kept),
                    user=self._places[last.ends].block,
                    ends={policy: one.ends for policy, one in others.items()},
                )
        return found
