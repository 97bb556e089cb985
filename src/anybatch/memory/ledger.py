"""Bytes by owner, module and moment of a step, predicted or measured."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from anybatch.core import format_bytes

OWNERS = ("parameters", "gradients", "optimizer state", "activations", "workspace", "input", "other")
"""Owners of bytes; every byte has one. A workspace is freed within its phase, or kept by cuBLAS."""

PHASES = ("start", "forward", "loss", "backward", "recompute", "update")
"""Phases of a step; "recompute" is a forward inside of backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The bytes alive at one moment."""

    phase: str  # one of `PHASES`
    micro_batch: int  # index of the forward in the step, from 0; -1 before the first
    module: str  # name of the innermost module at work; "" for none or the model itself
    bytes: tuple[int, ...]  # bytes alive, for each of `OWNERS`

    @property
    def total(self) -> int:
        """Bytes of all owners."""
        return sum(self.bytes)


class Holding(NamedTuple):
    """Bytes that belong to one owner and were made in one module."""

    module: str
    owner: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The tensor bytes of one step: by owner, by module, by moment.

    A storage counts once, however many views it has. Memory inside one kernel is not seen.
    """

    moments: tuple[Moment, ...]  # the moment of most bytes of each stretch, in order; at least one
    source: str  # "predicted" or "measured"
    device: str
    by_module: tuple[Holding, ...]  # bytes alive at the peak, largest first

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return self.peak_moment.total

    @property
    def peak_moment(self) -> Moment:
        """The first moment at which most bytes were alive."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Bytes by owner at the peak."""
        return dict(zip(OWNERS, self.peak_moment.bytes, strict=True))

    def phases(self) -> dict[str, Moment]:
        """Return the moment of most bytes of each phase that took place, in the order of `PHASES`."""
        found = {phase: [one for one in self.moments if one.phase == phase] for phase in PHASES}
        return {phase: max(ones, key=lambda one: one.total) for phase, ones in found.items() if ones}

    def to_json(self) -> str:
        """Return the ledger as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        peak = self.peak_moment
        columns = {**self.phases(), "peak": peak}
        rows = [[f"{self.source}, {self.device}", *columns]]
        for index, owner in enumerate(OWNERS):
            found = [moment.bytes[index] for moment in columns.values()]
            if any(found):
                rows.append([owner, *map(format_bytes, found)])
        rows.append(["all", *[format_bytes(moment.total) for moment in columns.values()]])
        where = f"{peak.phase} of micro-batch {peak.micro_batch}" if peak.micro_batch >= 0 else peak.phase
        rows += [[], [f"largest at the peak ({where})"]]
        rows += [
            [format_bytes(size), f"{owner} of {module or 'the model'}"]
            for module, owner, size in self.by_module[:8]
        ]
        return "\n".join(_line(row) for row in rows)


def _line(cells: list[str]) -> str:
    first, *rest = [*cells, ""]
    return "".join([f"{first:17}", *[f"{cell:9}" for cell in rest]]).rstrip()
