"""What the benchmarks of precision measure, how long, and which limits must hold."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.config import Effort, RaceCase
from benchmarks.memory_report import Record
from benchmarks.thresholds import Verdict

LIMITS = {
    "bf16 sums": 1e-3,  # relative, against float32
    "float64 sums": 1e-7,  # relative, against float64
    "masters": 1e-3,  # of the way that 1,000 updates go
    "cost": 1.03,  # of a step
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """How LeNet-5 is trained in each precision."""

    epochs: int = 3
    train_rows: int = 60_000
    test_rows: int = 10_000
    rows: int = 128  # of one batch
    micro_batch: int = 64
    lr: float = 0.02  # falls to 0 along a line, so that the last updates are small
    points: float = 0.4  # how far a test accuracy may be from float32's, in percent of all rows
    worst: float = 2.0  # test error of float32, in percent: whoever learns nothing agrees with everybody


GPT = RaceCase(name="gpt", task="gpt", rows=4, micro_batches=8, threshold=LIMITS["cost"], ragged=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run of the benchmarks of precision."""

    name: str
    effort: Effort  # of each race
    spare: Effort  # of races whose ratio has no limit
    lessons: Lessons = Lessons()
    race: RaceCase = GPT
    data: Path | None = None  # the folder of MNIST
    seed: int = 0


FULL = Settings(
    name="full",
    effort=Effort(least_blocks=30, most_blocks=60, seconds=600.0, warm_up=2, peers_every=1),
    spare=Effort(least_blocks=12, most_blocks=12, seconds=600.0, warm_up=2, peers_every=1),
)
QUICK = Settings(
    name="quick",
    effort=Effort(least_blocks=6, most_blocks=6, seconds=600.0, warm_up=1, peers_every=1),
    spare=Effort(least_blocks=2, most_blocks=2, seconds=600.0, warm_up=1, peers_every=1),
    lessons=Lessons(epochs=1, train_rows=12_800, test_rows=2_000, points=2.0, worst=20.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the studies: what it measures, how that is judged and shown.

    Attributes:
        measure: yields each record as soon as it is there.
        judge: every threshold with what was measured.
        sections: lines of Markdown.
    """

    measure: Callable[[Settings], Iterable[Record]]
    judge: Callable[[Sequence[Record]], Iterable[Verdict]]
    sections: Callable[[Sequence[Record]], Iterable[str]]
