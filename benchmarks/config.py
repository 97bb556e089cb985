"""What is measured, how long, and which thresholds must hold: frozen values, nothing else."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceCase:
    """A task, its cut, and the highest median ratio to the hand-written loop that passes."""

    task: str
    rows: int  # of one micro-batch
    micro_batches: int
    threshold: float
    ragged: bool = False  # unequal weights: padded tokens, rows without a label


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """A task whose peak bytes must be the same for few and for many micro-batches of the same size."""

    task: str
    rows: int
    few: int = 4
    many: int = 64
    tolerance: float = 0.01
    ragged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCase:
    """The head of a language model, and how it may compare with holding all logits at once."""

    vocabulary: int = 50_257
    tokens: int = 2_048
    width: int = 256
    pairs: int = 3
    time: float = 1.15
    peak: float = 0.25  # of all bytes, what both hold included
    error: float = 1e-12  # relative, float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """When a race stops: it is settled, or its blocks or its share of the seconds are used up."""

    least_blocks: int
    most_blocks: int
    seconds: float  # of all races together
    warm_up: int  # updates of every contestant before the first block, twice
    peers_every: int  # peers join every so many blocks
    interval: float = 0.01  # settled: the 95 % interval of the median ratio is narrower than this, relative
    decided: bool = False  # settled too: the threshold lies outside that interval
    segment_s: float = 0.02  # a timed segment repeats the update until it lasts about this long


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One run of the benchmarks."""

    name: str
    effort: Effort
    races: tuple[RaceCase, ...] = (
        # From the steadiest to the noisiest: a race that is over early leaves its time to the next ones.
        RaceCase(task="mlp", rows=8, micro_batches=16, threshold=1.15),
        RaceCase(task="lenet5", rows=32, micro_batches=4, threshold=1.03),
        RaceCase(task="gpt", rows=4, micro_batches=8, threshold=1.03, ragged=True),
    )
    memory: tuple[MemoryCase, ...] = (
        MemoryCase(task="lenet5", rows=32),
        MemoryCase(task="gpt", rows=4, ragged=True),
    )
    heads: tuple[HeadCase, ...] = (HeadCase(),)
    gradient_error: float = 1e-12  # relative, float64, against one whole-batch backward
    parameter_error: float = 1e-9  # relative, float64, after a few updates with equal weights
    seed: int = 0


FULL = Config(
    name="full",
    effort=Effort(least_blocks=20, most_blocks=400, seconds=190.0, warm_up=3, peers_every=4),
)
QUICK = Config(
    name="quick",
    heads=(HeadCase(tokens=1_024, width=64),),
    effort=Effort(least_blocks=6, most_blocks=100, seconds=14.0, warm_up=1, peers_every=10, decided=True),
)
