"""The bytes of a step whose blocks differ in policy, composed of steps in which all have the same."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

KEEP = "keep"


Shared = tuple[int, int]  # an output of a block: segment in which it is made, and which of its outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a step that belongs to one block, or to none."""

    block: str  # name of the block; "" for what lies between blocks
    place: tuple[str, int]  # what tells it from the other segments of the step: phase and micro-batch
    net: int  # bytes more alive at its end than at its start
    peak: int  # bytes more alive at its highest moment than at its start, at least 0
    seconds: float = 0.0  # how long it takes
    cheap: float = 0.0  # of these, all but those of matrix products, convolutions and attention
    # outputs of other blocks that end here, and their bytes
    ends: Mapping[Shared, int] = field(default_factory=dict[Shared, int])
    peak_without: int = 0  # the highest moment if they did not
    # bytes that come here for the sake of another block, by its name, or go if negative: what is moved to
    # the host goes while the next block computes, and comes back just before its own backward
    others: Mapping[str, int] = field(default_factory=dict[str, int])

    def with_others(self, wanted: Mapping[str, int]) -> "Segment":
        """The segment when other blocks have other policies."""
        if wanted == self.others:
            return self
        come = sum(size for size in wanted.values() if size > 0)
        come -= sum(size for size in self.others.values() if size > 0)  # before the highest moment
        return replace(
            self,
            net=self.net + sum(wanted.values()) - sum(self.others.values()),
            peak=max(0, self.peak + come),
            peak_without=max(0, self.peak_without + come),
            others=wanted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a block hands on, and others may hold longer than itself."""

    block: str  # that makes it
    bytes: int  # of it
    kept_by: frozenset[str]  # policies under which the block itself holds it until its own backward
    user: str  # the block that needs it last, if not itself; "" for what lies between blocks
    # the segment with which it then ends, by policy of that block, where that is known
    ends: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """Steps that differ only in the policy of all their blocks, segment by segment.

    What a block leaves alive, and needs for a moment, depends on its own policy only. So bytes of any mixture
    are sums of those of the pure steps, but for outputs, which are counted one by one.
    """

    start: int  # bytes alive before the first segment
    # of each policy, the same segments in the same order; "keep" is among them
    segments: Mapping[str, Sequence[Segment]]
    outputs: Mapping[Shared, Output] = field(default_factory=dict[Shared, Output])  # what blocks hand on
    blocks: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        blocks = dict.fromkeys(segment.block for segment in self.segments[KEEP] if segment.block)
        object.__setattr__(self, "blocks", tuple(blocks))

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies there are, "keep" among them."""
        return tuple(self.segments)

    def of(self, choice: Mapping[str, str]) -> list[Segment]:
        """The segments of one mixture; blocks not named are kept."""
        found: list[Segment] = []
        for kept, every in zip(self.segments[KEEP], self.places(), strict=True):
            wanted = {
                block: size
                for policy, segment in every.items()
                for block, size in segment.others.items()
                if choice.get(block, KEEP) == policy
            }
            found.append(every[choice.get(kept.block, KEEP)].with_others(wanted))
        return found

    def places(self) -> list[dict[str, Segment]]:
        """The segments in order, each under all policies."""
        return [
            dict(zip(self.segments, every, strict=True))
            for every in zip(*self.segments.values(), strict=True)
        ]

    def peak(self, choice: Mapping[str, str], *, phase: str = "") -> int:
        """The most bytes alive at any moment, or at any of one phase."""
        live = self.start
        highest = 0 if phase else live
        due = self._due(choice)
        for index, segment in enumerate(self.of(choice)):
            peak, net = segment.peak, segment.net
            for shared, size in segment.ends.items():
                if shared not in due.get(index, ()):  # in this mixture it does not end here
                    peak, net = max(peak, segment.peak_without), net + size
            if segment.place[0] == phase or not phase:
                highest = max(highest, live + peak)
            ending = [shared for shared in due.get(index, ()) if shared not in segment.ends]
            live += net - sum(self.outputs[shared].bytes for shared in ending)
        return highest

    def seconds(self, choice: Mapping[str, str]) -> float:
        """How long all segments take."""
        return sum(segment.seconds for segment in self.of(choice))

    def least_seconds(self, budget: int, *, may_move: bool = False) -> float:
        """Seconds that hardly any choice within the budget stays below, also of policies not recorded here.

        Bytes are freed where that costs least, down to the last one, as in the continuous knapsack problem.
        """
        left = dict.fromkeys(self.blocks, 0)  # bytes, of one micro-batch
        spent = dict.fromkeys(self.blocks, 0.0)  # seconds, of all of them
        for segment in self.segments[KEEP]:
            if segment.block and segment.place[0] == "forward":
                spent[segment.block] += 0.0 if may_move else segment.cheap
                left[segment.block] += segment.net if segment.place[1] <= 0 else 0  # for each call
        for policy in self.policies[1:]:
            for block in self.blocks:
                spent[block] = min(spent[block], self.more_seconds(block, policy))
        over, least = self.peak({}) - budget, self.seconds({})
        if over > sum(max(0, size) for size in left.values()):
            return inf
        for price, size in sorted((spent[block] / size, size) for block, size in left.items() if size > 0):
            least += price * max(0, min(size, over))
            over -= size
        return least

    def more_seconds(self, block: str, policy: str) -> float:
        """How much longer a block takes under a policy than where it is kept."""
        pairs = zip(self.segments[policy], self.segments[KEEP], strict=True)
        return max(0.0, sum(one.seconds - kept.seconds for one, kept in pairs if kept.block == block))

    def _due(self, choice: Mapping[str, str]) -> dict[int, list[Shared]]:
        """Outputs that end with a segment of others, because their own blocks do not hold them."""
        due: dict[int, list[Shared]] = {}
        for shared, output in self.outputs.items():
            if choice.get(output.block, KEEP) not in output.kept_by:
                at = output.ends.get(choice.get(output.user, KEEP), max(output.ends.values()))
                due.setdefault(at, []).append(shared)
        return due


# ---- the fastest mixture within a budget


def fastest(mixture: Mixture, budget: int) -> dict[str, str] | None:
    """Policies with which a step fits into the budget, by seconds per byte freed; None if none was found."""
    choice = next((one for one in cheapest_first(mixture) if mixture.peak(one) <= budget), None)
    if choice is None:
        choice = smallest(mixture)
        return choice if mixture.peak(choice) <= budget else None
    extra = {block: mixture.more_seconds(block, policy) for block, policy in choice.items()}
    for block in sorted(choice, key=extra.__getitem__, reverse=True):
        without = {one: policy for one, policy in choice.items() if one != block}
        if mixture.peak(without) <= budget:
            choice = without
    return choice


def smallest(mixture: Mixture) -> dict[str, str]:
    """The policies with which the peak is least, as far as was found."""
    uniform = [dict.fromkeys(mixture.blocks, policy) for policy in mixture.policies if policy != KEEP]
    tried = [*cheapest_first(mixture), *uniform]
    return min(tried, key=lambda choice: (mixture.peak(choice), mixture.seconds(choice)))


def cheapest_first(mixture: Mixture) -> Iterator[dict[str, str]]:
    """From the kept step on, each with one more block changed: what frees bytes at the peak most cheaply."""
    moments = bytes_by_choice(mixture)
    seconds = {
        (block, policy): mixture.more_seconds(block, policy)
        for block in mixture.blocks
        for policy in mixture.policies
    }
    choice = dict.fromkeys(("", *mixture.blocks), KEEP)
    untried = {one for one in seconds if one[1] != KEEP}
    while True:
        yield {block: policy for block, policy in choice.items() if policy != KEEP}
        peak = max(moments, key=lambda parts: sum(parts[one] for one in choice.items()))
        prices: dict[tuple[str, str], float] = {}
        for block, policy in untried:
            now = block, choice[block]
            freed = peak[now] - peak[block, policy]
            if freed > 0:
                prices[block, policy] = (seconds[block, policy] - seconds[now]) / freed
        if not prices:
            return
        block, policy = min(prices, key=lambda one: (prices[one], one))
        choice[block] = policy
        untried.remove((block, policy))


def bytes_by_choice(mixture: Mixture) -> list[Counter[tuple[str, str]]]:
    """At the highest moment of each segment, the bytes that each block adds under each policy."""
    alive = Counter({("", KEEP): mixture.start})
    found: list[Counter[tuple[str, str]]] = []
    for place in mixture.places():
        highest = alive.copy()
        for policy, segment in place.items():
            alone = segment.with_others({})
            highest[segment.block, policy] += alone.peak
            alive[segment.block, policy] += alone.net
            for other, size in segment.others.items():
                highest[other, policy] += max(0, size)
                alive[other, policy] += size
        found.append(highest)
    return found
