"""Segments of a step under each policy of its blocks, and how policies that differ go together."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from anybatch.memory import Device
from anybatch.planner.cost import Born, Recorded, bytes_at
from anybatch.planner.mixture import KEEP, Mix, Output, Segment, Shared
from anybatch.recompute import offload

_STAYS = 0.01  # of the bytes that a policy moves: what may stay at another size, too small for it


def _times(segment: Segment, later: float) -> Segment:
    """A segment of the second micro-batch stands for those of all later ones, if there are any."""
    if not later:
        return replace(segment, net=0, peak=0, seconds=0.0, cheap=0.0, ends={}, peak_without=0, others={})
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
        self._others: dict[str, dict[int, list[tuple[str, Born]]]] = {}  # by policy and stretch
        self._outputs = self._find_outputs()
        self._find_what_comes_back()

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
        share = self._recorded[KEEP].share(micro_batch)
        for policy, one in self._recorded.items():
            if policy == "offload" and not self._is_moved_alike(policy, share):
                continue
            ends: dict[int, dict[Shared, Born]] = {}
            for shared, crossings in self._outputs.items():
                crossing = crossings.get(policy)
                if crossing is not None and shared in outputs and not self._is_own(shared, crossing):
                    ends.setdefault(crossing.ends, {})[shared] = crossing
            found = one.segments(micro_batch, device, half=half, ends=ends, others=self._others.get(policy))
            if spare:
                found = [s for s in found if s.place[0] != "update"]
                found += [s for s in spare if s.place[0] == "update"]
            segments[policy] = [
                _times(segment, later) if segment.place[1] > 0 else segment for segment in found
            ]
        return Mix(start=input_bytes, segments=segments, outputs=outputs)

    def _is_moved_alike(self, policy: str, share: float) -> bool:
        """Whether a policy moves at this size nearly all that it moves where it was recorded.

        What is smaller than `offload.SMALLEST` stays, so its bytes are no line in the rows.
        """
        others = self._others.get(policy, {}).values()
        sizes = [(bytes_at(born, share), max(born.bytes)) for one in others for _, born in one]
        stays = sum(size for size, known in sizes if size < offload.SMALLEST <= known)
        return stays <= _STAYS * sum(size for size, _ in sizes)

    def _find_outputs(self) -> dict[Shared, dict[str, Born]]:
        """What blocks hand on, by policy: whatever ends elsewhere than in their own backward, under any."""
        births = {policy: one.births("forward") for policy, one in self._recorded.items()}
        found: dict[Shared, dict[str, Born]] = {}
        for made in births[KEEP]:
            number, is_block = 0, bool(self._recorded[KEEP].parts[0][made].place.block)
            for alike in self._alike(made, {policy: one.get(made, []) for policy, one in births.items()}):
                same = {policy: one for policy, one in alike.items() if one.ends != made}
                moved = [policy for policy in same if policy != KEEP and self._is_moved(same, policy)]
                for policy in moved:
                    self._note_other(policy, same[policy].ends, same[KEEP].ends, same[policy])
                # What one block holds and may move ends as the policy of this block has it.
                if is_block and not moved and any(not self._is_own((made, 0), one) for one in same.values()):
                    found[made, number] = same
                    number += 1
        return found

    def _alike(self, made: int, births: Mapping[str, Sequence[Born]]) -> Iterator[Mapping[str, Born]]:
        """Each storage of a forward, under all policies that make it."""
        # A forward is the same operations, whatever becomes of their results; a block that will run again
        # notes before them what it starts from.
        count = len(births[KEEP])
        last = [every[max(0, len(every) - count) :] for every in births.values()]
        if len({tuple([one.bytes for one in every]) for every in last}) == 1:
            yield from [dict(zip(births, every, strict=True)) for every in zip(*last, strict=True)]
            return
        left = {policy: [one for one in every[::-1] if one.ends != made] for policy, every in births.items()}
        for candidates in list(left.values()):
            for output in [one for one in candidates if not self._is_own((made, 0), one)]:
                same: dict[str, Born] = {}
                for policy, others in left.items():
                    # The last one of that size: what a block hands on is made last.
                    like = next((one for one in others if one.bytes == output.bytes), None)
                    like = output if output in others else like
                    if like is not None:
                        same[policy] = like
                        others.remove(like)
                yield same

    def _find_what_comes_back(self) -> None:
        """What a backward makes for another block, and does not make where all blocks are kept."""
        kept = self._recorded[KEEP].births("backward")
        for policy, one in self._recorded.items() if kept else ():  # else nothing tells them from gradients
            for made, every in one.births("backward").items():
                flows = Counter([(born.bytes, born.ends) for born in kept.get(made, ()) if born.ends != made])
                unlike: list[Born] = []
                for born in every:
                    if flows[born.bytes, born.ends] > 0:
                        flows[born.bytes, born.ends] -= 1
                    elif born.ends != made:
                        unlike.append(born)
                left = Counter([size for size, _ in flows.elements()])
                for born in unlike:
                    if left[born.bytes] > 0:  # a gradient that ends elsewhere is still one
                        left[born.bytes] -= 1
                    elif born.ends < len(one.parts[0]):
                        self._note_other(policy, made, born.ends, born)

    def _is_moved(self, same: Mapping[str, Born], policy: str) -> bool:
        """Whether one block holds it until its own backward, but under one policy lets it go in a forward.

        What more than one holds is not: how long they do depends on the policies of all of them.
        """
        places = [part.place for part in self._recorded[KEEP].parts[0]]
        ends = {one.ends if one.ends < len(places) else -1 for other, one in same.items() if other != policy}
        last = same[policy].ends
        return (
            KEEP in same
            and {places[end].phase for end in ends} == {"backward"}
            and len({places[end].block for end in ends}) == 1
            and last < len(places)
            and places[last].phase == "forward"
        )

    def _note_other(self, policy: str, at: int, owner: int, crossing: Born) -> None:
        """In one stretch a storage comes or goes for the sake of the block of another stretch."""
        block = self._recorded[KEEP].parts[0][owner].place.block
        if block:
            self._others.setdefault(policy, {}).setdefault(at, []).append((block, crossing))

    def _is_own(self, shared: Shared, crossing: Born) -> bool:
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
                    bytes=bytes_at(last, share),
                    kept_by=frozenset(kept),
                    user=parts[last.ends].place.block,
                    ends={policy: one.ends for policy, one in others.items()},
                )
        return found
