"""A rung of the ladder: the cuts of rows within a budget, with one choice of blocks that run again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anybatch.core import cut_sizes
from anybatch.engine import Plan, Task
from anybatch.planner.law import Size
from anybatch.planner.readings import BEYOND, MemoryReader, Readings
from anybatch.recompute import WHOLE

FROZEN = 3  # steps after which a model that draws random numbers keeps its cut
_EARLY = 8  # steps in which micro-batches are read; later at every power of two
_GROWTH, _NEAR, _NEAR_GROWTH = 4, 0.6, 2  # largest growth beyond the readings; less near the budget
_MISFIT = 0.05  # relative error of a law that is not trusted for more than twice the readings
SURE = 0.8  # share of the room below which an uncut batch runs without a reading
RAN_OUT = float(2**62)  # bytes of an uncut batch in which memory ran out
_PER_TENSOR = 33_000  # bytes of the host that a reading of the update takes for each parameter
_PROPORTION = 0.25  # share of the room that rows may use if their bytes are proportional to rows


@dataclass(frozen=True, slots=True)
class Want:
    """The rows that a step is to cut, and the bytes that are held beside them."""

    rows: int
    length: int  # numbers in a row
    static: int  # bytes alive throughout, without gradient sums
    own: int = 0  # of these, bytes of the batch
    only: int | None = None  # the one size that is allowed
    least: int = 1  # rows of the smallest micro-batch: two with BatchNorm
    is_fixed: bool = False  # the result depends on the cut, so the first cut is kept
    is_add: bool = False  # rows of one `add` of a window
    is_shared: bool = False  # micro-batches hold collectives of all ranks

    @property
    def size(self) -> int:
        """Rows of the smallest micro-batch that may be chosen."""
        return min(self.rows, self.only or -(-self.rows // max(1, self.rows // self.least)))

    @property
    def is_whole(self) -> bool:
        """True if the batch may not be cut."""
        return self.only == self.rows and not self.is_add


class Rung:
    """The cuts of one kind of rows with one choice of blocks, by readings.

    Cuts are even. A size far beyond the readings is approached in steps. Early, and rarely afterwards, a
    micro-batch is read again. Where the forward draws random numbers, the cut stays from the third step on.
    """

    def __init__(self, num_bytes: int, settings: Plan) -> None:
        self.num_bytes, self.settings = num_bytes, settings
        self.readings = Readings()
        self.updates = [0.0]  # temporary bytes of the update, foretold and read; all rungs share the list
        self.steps, self.is_random = 0, False
        self.fixed: dict[tuple[int, int], tuple[int, ...]] = {}  # cuts that are kept, by rows and length
        # Cuts by these readings, each with the number of micro-batches of the cut that it approaches.
        self._cuts: dict[Want, tuple[tuple[int, ...], int]] = {}
        self._known: tuple[float, ...] = ()  # the readings on which these are based

    def room(self, want: Want) -> float:
        """Return the bytes for a micro-batch, beside what a step holds."""
        left = self.readings.first_pass(want.rows)[1]
        return self.num_bytes - want.static - self.readings.gradients - self.readings.spare - left

    def takes(self, want: Want) -> float:
        """Return the bytes of the smallest micro-batch beside gradient sums; 0 if nothing was read."""
        read, size = self.readings, (want.size, want.length)
        if want.is_whole and read.whole.get(size, RAN_OUT) < RAN_OUT:
            return read.whole[size] - read.gradients
        return read.expected(size) if read.law.readings else 0.0

    def has_read(self, want: Want) -> bool:
        """Return True if a reading tells what these rows take."""
        whole = self.readings.whole.get((want.rows, want.length)) if want.is_whole else None
        return bool(self.readings.law.readings) if whole is None else whole < RAN_OUT

    @property
    def is_last(self) -> bool:
        """True if no other takes less."""
        return self.settings.blocks == (WHOLE,)

    def sizes(self, want: Want) -> tuple[int, ...]:
        """Return the rows of each micro-batch; empty if not even the smallest is known to fit."""
        read, key, keeps = self.readings, (want.rows, want.length), want.is_fixed and want.only is None
        count = sum(map(len, read.law.readings.values())), len(read.whole), len(read.first)
        known = (*count, read.ran, max(self.updates), read.gradients)
        if known != self._known:
            self._known = known
            self._cuts.clear()
        if keeps and key in self.fixed:
            return self.fixed[key]
        if want not in self._cuts:
            self._cuts[want] = self._fitting(want)
        found = self._cuts[want][0]
        if keeps and found:
            self.fixed[key] = found
        return found

    @property
    def again(self) -> int:
        """Number of blocks that run again in backward."""
        return len(self.settings.blocks) - (WHOLE in self.settings.blocks)

    @property
    def has_cut(self) -> bool:
        """True if rows of some step fit."""
        return any(cut for cut, _ in self._cuts.values())

    def parts(self, want: Want) -> int:
        """Return the number of micro-batches of the cut that is approached."""
        cut = self.sizes(want)
        return self._cuts.get(want, (cut, len(cut)))[1]

    def spare(self, want: Want, cut: Sequence[int]) -> float:
        """Return the bytes that each micro-batch of a cut leaves free; 0 if none as large was read or ran."""
        read, room, largest = self.readings, self.room(want), (max(cut), want.length)
        if len(cut) == 1 and largest in read.whole:
            return room + read.gradients - read.whole[largest]
        if not read.law.readings or max(cut) * want.length > read.seen:
            return 0.0
        return room - max([read.bound((size, want.length)) for size in cut])

    def reader(self, want: Want, cut: Sequence[int], task: Task) -> MemoryReader | None:
        """Return the reader of a step with this cut; None if nothing is to be read."""
        if self._is_frozen or not cut:
            return None
        is_early = self.steps < _EARLY or self.steps & (self.steps - 1) == 0
        if not (is_early or self.readings.is_new((max(cut), want.length))):
            return None
        room = self.room(want)
        needs = _PER_TENSOR * len(task.network.parameters) if task.network.kinds <= {"cpu"} else 0
        return MemoryReader(
            self.readings,
            task.network.devices,
            room=room,
            most=max(cut),
            updates=self.updates if 0 < self.steps <= 2 and needs <= room - max(self.updates) else None,
            rows=want.rows,
            own=want.own,
        )

    def state(self) -> dict[str, Any]:
        """Return readings and decisions as JSON values."""
        return {
            **self.readings.state(),
            "update": max(self.updates),
            "blocks": list(self.settings.blocks),
            "foreach": self.settings.foreach,
            "steps": self.steps,
            "is_random": self.is_random,
            "fixed": [[*size, list(cut)] for size, cut in self.fixed.items()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the output of `state`."""
        self.readings.load(state)
        self.updates.append(state["update"])
        blocks = tuple((str(name), str(policy)) for name, policy in state["blocks"])
        self.settings = replace(self.settings, blocks=blocks, foreach=state["foreach"])
        self.steps, self.is_random = int(state["steps"]), bool(state["is_random"])
        self.fixed = {(rows, length): tuple(cut) for rows, length, cut in state["fixed"]}

    @property
    def _is_frozen(self) -> bool:
        return self.is_random and self.steps >= FROZEN

    def _fitting(self, want: Want) -> tuple[tuple[int, ...], int]:
        """Return the largest even cut that fits, or one on the way to it; and the parts of that largest."""
        read, room, length = self.readings, self.room(want), want.length
        peak, left = read.first_pass(want.rows)
        if max(self.updates) > room + left or peak > room + left + read.gradients:
            return (), 0
        if want.only is not None:
            cut = tuple(cut_sizes(want.rows, want.only)) if self._may_run(want.size, want) else ()
            return cut, len(cut)
        most = max(1, want.rows // want.least)
        for top in dict.fromkeys(-(-want.rows // count) for count in range(1, most + 1)):
            cut, is_uncut = even(want.rows, -(-want.rows // top)), top == want.rows
            if all(read.fits((size, length), room, is_uncut=is_uncut) for size in {*cut}):
                break
        else:
            return (), 0
        is_far = top * length > BEYOND * read.seen and not self._is_frozen
        if not is_far or want.is_add or want.is_fixed:
            return cut, len(cut)
        near = max(want.least, min(top, self._next(top, length, room)))
        return even(want.rows, -(-want.rows // near)), len(cut)

    def _may_run(self, size: int, want: Want) -> bool:
        """Return True if the one size that is allowed fits, or may be run because nothing else tells."""
        read, room = self.readings, self.room(want)
        one = size, want.length
        if size < want.rows or one in read.whole:
            return read.fits(one, room, is_uncut=size == want.rows)
        share = 1.0 if want.is_add else SURE
        return not read.law.readings or read.expected(one) <= share * (room + read.gradients)

    def _next(self, top: int, length: int, room: float) -> int:
        """Return the most rows to try next, far beyond the readings."""
        law, seen = self.readings.law, max(1, self.readings.seen // length)
        is_near = law((top, length)) > _NEAR * room or law.misfit > _MISFIT
        sure = int(_PROPORTION * room / law((seen, length)) * seen)
        return max(2, sure, seen * (_NEAR_GROWTH if is_near else _GROWTH))


def even(rows: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of so many parts that differ by at most one row, the larger first."""
    size, more = divmod(rows, min(rows, parts))
    return (size + 1,) * more + (size,) * (min(rows, parts) - more)


def smallest(rung: Rung, want: Want) -> float:
    """Return the smallest budget that would do, by the sizes of this length that were read."""
    read = rung.readings
    sizes: list[Size] = [(want.size, want.length), *([] if want.only else read.law.readings)]
    sizes = [size for size in sizes if size[1] == want.length and size[0] >= want.size]
    found = [read.bound(size) for size in sizes if read.law.readings]
    if want.is_whole and sizes[0] in read.whole:
        found = [read.whole[sizes[0]] - read.gradients]
    peak, left = read.first_pass(want.rows)
    held = want.static + read.gradients + (0 if want.is_whole else read.spare)
    return max(held + max(rung.updates), want.static + peak, held + left + min(found, default=float("inf")))
