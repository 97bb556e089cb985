"""Raw results: what was measured, before anybody divides or judges; round-trips through JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.config import HeadCase, MemoryCase, RaceCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Seconds by block: `wall[name][i]` is that of block `blocks[name][i]`, the same work for every name."""

    case: RaceCase
    blocks: Mapping[str, list[int]]
    wall: Mapping[str, list[float]]
    cpu: Mapping[str, list[float]]
    step_s: float  # one update of the hand-written loop, median wall time
    garbage: Mapping[str, float]  # objects per update that only the garbage collector could free
    updates: int  # of the hand-written loop and of anybatch, warm-up included
    difference: (
        float  # relative, of anybatch's trained parameters to the hand-written loop's; 0: the same bits
    )
    training: Mapping[str, list[list[float]]] = field(
        default_factory=dict[str, list[list[float]]]
    )  # CPU seconds by name, training and update, from the first one on

    def paired(self, name: str, clock: str) -> tuple[list[float], list[float]]:
        """Seconds of `name` and of the hand-written loop in the blocks that both took part in."""
        seconds: Mapping[str, list[float]] = getattr(self, clock)
        hand = dict(zip(self.blocks["hand"], seconds["hand"], strict=True))
        return seconds[name], [hand[block] for block in self.blocks[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Relative errors in float64, by contestant."""

    task: str  # the name of a case
    gradient: Mapping[str, float]  # unequal weights, against one whole-batch backward
    parameters: Mapping[str, float]  # equal weights, a few updates, against the hand-written loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes by contestant, for few and for many micro-batches."""

    case: MemoryCase
    held: int  # parameters and optimizer state
    batch: tuple[int, int]  # the logical batch itself, not in the peaks
    few: Mapping[str, int]
    many: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Cross-entropy of a linear layer: in blocks (anybatch), and with all logits at once (hand)."""

    case: HeadCase
    error: Mapping[str, float]  # relative, float64, of the loss and the gradients
    held: int  # hidden and weight
    peak: Mapping[str, int]
    wall: Mapping[str, list[float]]  # seconds of twice forward and backward, by pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """Everything one run measured, and on what."""

    config: str
    date: str
    hardware: str
    versions: Mapping[str, str]
    gradient_error: float  # the thresholds that do not belong to a case
    parameter_error: float
    races: list[Race]
    exactness: list[Exactness]
    memory: list[Memory]
    heads: list[Head]
    commit: str = ""

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Raw":
        """Read what `save` wrote."""
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        record["races"] = [Race(**{**race, "case": RaceCase(**race["case"])}) for race in record["races"]]
        record["exactness"] = [Exactness(**entry) for entry in record["exactness"]]
        record["memory"] = [
            Memory(**{**entry, "case": MemoryCase(**entry["case"]), "batch": tuple(entry["batch"])})
            for entry in record["memory"]
        ]
        record["heads"] = [Head(**{**entry, "case": HeadCase(**entry["case"])}) for entry in record["heads"]]
        return cls(**record)


def names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """All contestants that occur, in order of appearance."""
    return list(dict.fromkeys(name for record in records for name in record))
