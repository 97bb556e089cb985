"""Bytes and seconds of a step at any size and with any policies, and the cheapest policies that fit."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anybatch.core import TraceError
from anybatch.memory import Device, Recording

KEEP = "keep"
_EVEN = 1.02  # estimates within this factor count as equally fast

Array = NDArray[np.float64]


class Section(NamedTuple):
    """The block, phase and micro-batch of a stretch of a recording."""

    block: str  # name of the block; "" between blocks
    phase: str
    micro_batch: int


class Stretch(NamedTuple):
    """Consecutive events of one place, and the work done in them."""

    place: Section
    start: int
    stop: int
    work: Array  # operations, FLOPs, bytes moved


def stretches(recording: Recording, blocks: Sequence[str]) -> list[Stretch]:
    """Cut a recording at each change of block or phase."""

    @cache
    def block_of(module: str) -> str:
        return next((one for one in blocks if module == one or module.startswith(f"{one}.")), "")

    marks = recording.marks
    end = marks[-1]._replace(event=len(recording.storages))
    found: list[Stretch] = []
    for mark, following in pairwise((*marks, end)):
        work = np.subtract(following[4:], mark[4:], dtype=float)
        phase = "backward" if mark.phase == "recompute" else mark.phase
        place = Section(
            block_of(mark.module), phase, -1 if phase in ("start", "update") else mark.micro_batch
        )
        if found and found[-1].place == place:
            found[-1] = found[-1]._replace(stop=following.event, work=found[-1].work + work)
        elif found and not place.block and not work.any() and found[-1].place[1:] == place[1:]:
            # Storages that a block's caller frees after it belong to the block.
            found[-1] = found[-1]._replace(stop=following.event)
        elif following.event > mark.event or work.any():
            found.append(Stretch(place, mark.event, following.event, work))
    return found


class _Side:
    def __init__(self, recording: Recording, blocks: Sequence[str]) -> None:
        parts = stretches(recording, blocks)
        self.places = [part.place for part in parts]
        self.starts = [part.start for part in parts]
        self.stops = [part.stop for part in parts]
        self.work = np.stack([part.work for part in parts])
        self.before, self.after = np.asarray(recording.before), np.asarray(recording.after)
        storages = np.asarray(recording.storages)
        columns = {block: index for index, block in enumerate(("", *blocks))}
        begins: dict[int, int] = {}
        ends: dict[int, int] = {}
        for event, (storage, after) in enumerate(zip(recording.storages, recording.after, strict=True)):
            begins.setdefault(storage, event)
            if not after:
                ends[storage] = event
        owners = np.array([columns[self._owner(at, ends.get(one))] for one, at in begins.items()])
        self.owners, self.columns = owners[storages], len(columns)

    def _at(self, event: int) -> Section:
        return self.places[bisect_right(self.starts, event) - 1]

    def _owner(self, begin: int, end: int | None) -> str:
        """Return the block that makes a storage; for one made between blocks, the block that uses it."""
        made = self._at(begin)
        if end is not None and (made.phase == "backward" or not made.block):
            used = self._at(end)
            if used.phase == "backward":
                return used.block or made.block
        return made.block

    def held(self, changes: Array) -> Array:
        alive = np.concatenate([[0.0], np.cumsum(changes)])
        pairs = zip(self.starts, self.stops, strict=True)
        tops = np.array([start + int(np.argmax(alive[start : stop + 1])) for start, stop in pairs])
        place = np.searchsorted(tops, np.arange(len(changes)), side="right") * self.columns + self.owners
        found = np.bincount(place, changes, (len(tops) + 1) * self.columns)
        return found.reshape(-1, self.columns).cumsum(0)[: len(tops)]


class Recorded:
    """Two recordings of a step of two micro-batches that differ in size only, or a TraceError.

    If the first is None, it is derived from `like`, the step with all blocks kept: a block that is recomputed
    or offloaded makes storages of the same sizes. `sizes` are the rows of a micro-batch in each recording.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        recordings: tuple[Recording | None, Recording],
        blocks: Sequence[str],
        like: "Recorded | None" = None,
    ) -> None:
        self._sizes, first = sizes, recordings[0]
        high = _Side(recordings[1], blocks)
        low = high if first is None else _Side(first, blocks)
        if low.places != high.places or (like and like.places != high.places):
            places = f"{len(low.places)} and {len(high.places)} places"
            raise TraceError(f"Expected recordings of one step, got {places}. Trace each size itself.")
        self.places, self._sides = high.places, (low, high)
        self.is_aligned = low.starts == high.starts and len(low.after) == len(high.after)
        self._changes = [(side.after - side.before).astype(float) for side in self._sides]
        self._works = [low.work, high.work]
        if first is None and like is not None:
            told = like.told
            if not told.keys() >= {*high.after.tolist(), *high.before.tolist()}:
                raise TraceError(
                    f"Expected bytes that sizes tell, got {len(told)} known. Trace each size itself."
                )
            pairs = zip(high.before.tolist(), high.after.tolist(), strict=True)
            self._changes[0] = np.array([told[after] - told[before] for before, after in pairs], float)
            few, many = like._works
            self._works[0] = high.work * np.divide(few, many, np.ones_like(few), where=many > 0)

    @cached_property
    def told(self) -> dict[int, int]:
        """Size of a storage in the first recording by its size in the second, if unique."""
        if not self.is_aligned:
            return {}
        found: dict[int, set[int]] = {}
        low, high = self._sides
        for few, many in ((low.before, high.before), (low.after, high.after)):
            for one, size in zip(few.tolist(), many.tolist(), strict=True):
                found.setdefault(size, set()).add(one)
        return {size: next(iter(ones)) for size, ones in found.items() if len(ones) == 1}

    def share(self, micro_batch: int) -> float:
        """Return the position of a size between the first and the second, as a fraction."""
        return (micro_batch - self._sizes[0]) / (self._sizes[1] - self._sizes[0])

    def held(self, micro_batch: int) -> Array:
        """Return the bytes at another size by stretch and block, linear in the rows of each storage."""
        (low, high), share = self._sides, self.share(micro_batch)
        few, many = self._changes
        if self.is_aligned:
            return high.held(few + share * (many - few))
        one, other = low.held(few), high.held(many)
        return one + share * (other - one)

    def work(self, micro_batch: int) -> Array:
        """Return operations, FLOPs and bytes moved (columns) of each stretch at another size."""
        few, many = self._works
        return few + self.share(micro_batch) * (many - few)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """Memory and time of a step at one micro-batch size, for any recompute policy per block.

    The bytes of a block depend on its own policy, nearly: an output may end a little earlier or later if its
    user has another. So bytes of any choice are sums, and the chosen plan is traced to make sure.
    """

    blocks: tuple[str, ...]
    start: int  # bytes alive at every moment, added to the recorded ones
    held: Mapping[str, Array]  # by policy: bytes by stretch (rows) and block (columns; first of none)
    extra: Mapping[str, Array]  # by policy: seconds by block (first of none) added to a kept one
    kept_s: float  # seconds of the step with all blocks kept
    is_update: NDArray[np.bool_]  # by stretch

    def alive(self, choice: Mapping[str, str]) -> Array:
        """Return the most bytes alive in each stretch."""
        found = self.start + self.held[KEEP].sum(1)
        for block, policy in choice.items():
            column = self.blocks.index(block) + 1
            found += self.held[policy][:, column] - self.held[KEEP][:, column]
        return found

    def peak(self, choice: Mapping[str, str]) -> int:
        """Return the most bytes alive at any moment; blocks not named are kept."""
        return round(float(self.alive(choice).max()))

    def seconds(self, choice: Mapping[str, str]) -> float:
        """Return the seconds of the step."""
        extra = [float(self.extra[policy][self.blocks.index(one) + 1]) for one, policy in choice.items()]
        return self.kept_s + sum(extra)

    def fastest(self, budget: int) -> dict[str, str] | None:
        """Return policies with which a step fits into the budget; None if none were found.

        The cheapest seconds per byte freed at the peak come first, until the budget holds; then policies that
        are not needed are reverted, the dearest first. Choices with all blocks under one policy are tried as
        well. Of choices equally fast by estimate, return the one with the fewest bytes.
        """
        first = next((one for one in self.cheapest_first() if self.peak(one) <= budget), None)
        starts = [one for one in (first, *self._uniform()) if one is not None and self.peak(one) <= budget]
        found = [self._given_back(one, budget) for one in starts]
        least = min(map(self.seconds, found), default=0.0)
        return min([one for one in found if self.seconds(one) <= _EVEN * least], key=self.peak, default=None)

    def smallest(self) -> dict[str, str]:
        """Return the policies of the smallest peak found."""
        tried = [*self._uniform(), *self.cheapest_first()]
        return min(tried, key=lambda choice: (self.peak(choice), self.seconds(choice)))

    def cheapest_first(self) -> Iterator[dict[str, str]]:
        """Yield choices ordered by memory saved per second lost, one more block changed each time."""
        choice: dict[str, str] = {}
        alive = self.alive(choice)
        untried = {(block, policy) for block in self.blocks for policy in self.held if policy != KEEP}
        while True:
            yield dict(choice)
            top, best = int(alive.argmax()), (inf, "", "")
            for block, policy in untried:
                now, column = choice.get(block, KEEP), self.blocks.index(block) + 1
                freed = self.held[now][top, column] - self.held[policy][top, column]
                if freed > 0:
                    price = float((self.extra[policy][column] - self.extra[now][column]) / freed)
                    best = min(best, (price, block, policy))
            _, block, policy = best
            if not block:
                return
            choice[block] = policy
            untried.remove((block, policy))
            alive = self.alive(choice)

    def _uniform(self) -> list[dict[str, str]]:
        return [dict.fromkeys(self.blocks, policy) for policy in self.held if policy != KEEP and self.blocks]

    def _given_back(self, choice: Mapping[str, str], budget: int) -> dict[str, str]:
        extra = {one: self.extra[policy][self.blocks.index(one) + 1] for one, policy in choice.items()}
        for block in sorted(extra, key=extra.__getitem__, reverse=True):
            without = {one: policy for one, policy in choice.items() if one != block}
            if self.peak(without) <= budget:
                choice = without
        return dict(choice)


def costs_of(
    recorded: Mapping[str, Recorded],
    blocks: tuple[str, ...],
    *,
    rows: int,
    micro_batch: int,
    device: Device,
    half: bool,
    start: int,
    update: Recorded | None = None,
) -> Costs:
    """Return the costs of a batch; `start` bytes are added, and `update` replaces the recorded update."""
    places = recorded[KEEP].places
    numbers = np.array([place.micro_batch for place in places])
    columns = np.array([("", *blocks).index(place.block) for place in places])
    # From the second micro-batch on there are gradients. An uncut batch has no such micro-batch.
    later = (rows - micro_batch) / micro_batch
    times, is_there = np.where(numbers > 0, later, 1.0), (numbers <= 0) | (later > 0)
    is_update = np.array([place.phase == "update" for place in places])

    def by_block(seconds: Array) -> Array:
        return np.bincount(columns, seconds * times, len(blocks) + 1).astype(float)

    held: dict[str, Array] = {}
    took: dict[str, Array] = {}
    seconds: Any = device.seconds  # works on arrays, too
    for policy, one in recorded.items():
        held[policy], work = one.held(micro_batch), one.work(micro_batch)
        if update is not None and update.places == places:
            held[policy][is_update] = update.held(micro_batch)[is_update]
            work[is_update] = update.work(micro_batch)[is_update]
        took[policy] = np.maximum(0.0, seconds(*work.T, half=half))
    if "offload" in held and device.link:  # copies overlap with computation: the slower counts
        freed = np.maximum(0.0, (held[KEEP] - held["offload"]).max(0))
        for phase in ("forward", "backward"):
            at = np.array([place.phase == phase and bool(place.block) for place in places])
            moving = np.where(at, freed[columns] / device.link, 0.0)
            took["offload"] = np.maximum(took["offload"], moving)
    kept = took[KEEP]
    return Costs(
        blocks=blocks,
        start=start,
        held={policy: one[is_there] for policy, one in held.items()},
        extra={policy: np.maximum(0.0, by_block(one) - by_block(kept)) for policy, one in took.items()},
        kept_s=float((kept * times).sum()),
        is_update=is_update[is_there],
    )
