"""Tests of the judgements of memory and precision: every limit can be passed, each breach is named once."""

from collections.abc import Mapping, Sequence
from functools import cache
from math import nan
from typing import Any

import pytest

from benchmarks import memory_gpt2, memory_peers, memory_planner, memory_predicted, precision
from benchmarks.memory_contestants import OURS, ROWS, UPDATES
from benchmarks.precision_config import FULL
from benchmarks.precision_lenet5 import PRECISIONS

Record = Mapping[str, Any]
Records = Sequence[Record]


@cache
def measured(part: str) -> Records:
    return [*precision.measure(part, FULL)]


def failed(study: Any, records: Records) -> list[str]:
    return [verdict.what for verdict in study.judge(records) if not verdict.holds]


# ---- predicted

STEP: dict[str, Any] = {"model": "gpt2", "device": "cpu", "optimizer": "sgd", "policy": "half", "blocks": 6}
STEP |= {"rows": 8, "micro_batch": 4, "measured": 1_000_000, "traced": 1_000_000}
STEP |= {"seconds": 2.0, "source": "predicted"}
CARD = STEP | {"device": "cuda", "traced": 1_070_000, "away": 1_070_000}
NEAR = STEP | {"device": "cuda", "traced": 1_010_000, "away": 1_010_000}
PREDICTED, CUDA = [STEP, STEP], [NEAR, NEAR, CARD]

# ---- planner

DUEL: dict[str, Any] = {"model": "bert", "rows": 16, "fraction": 0.5, "budget": 1_000, "best": "8 keep"}
DUEL |= {"best_peak": 990, "chosen": {"micro_batch": 8, "blocks": []}, "predicted": 1_000}
DUEL |= {"peak": 1_000, "asked_s": 1.0}
TIMES = [1.0, 1.2, 0.9]


def raced(factor: float) -> Mapping[str, Any]:
    return {"raced": {"best": TIMES, "chosen": [factor * time for time in TIMES]}}


PLANNER = [DUEL | raced(1.02), DUEL | {"raced": {}}, DUEL | {"raced": {}}, DUEL | raced(1.08)]

# ---- GPT-2


def within(fraction: float, factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {"model": "gpt2", "device": "cpu", "rows": 8, "fraction": fraction}
    found |= {"budget": 1_000, "peak": 999, "predicted": 999, "chosen": {"micro_batch": 8, "blocks": []}}
    found |= {"words": "blocks       all kept\n", "plain_s": TIMES}
    return found | {"seconds": [factor * time for time in TIMES]}


GPT2 = [within(0.25, 1.3)]

# ---- peers

DONE: dict[str, Any] = {"device": "cpu", "failed": "", "first_s": 1.0, "seconds": 2.0, "lost": 0, "rows": 300}
DONE |= {"limit": 9, "made": [ROWS] * UPDATES, "deviation": 1e-6}
REFERENCE = DONE | {"model": memory_peers.REFERENCE}
TRAINED = [DONE | {"model": name} for name in OURS]

LAST = TRAINED[-1]["model"]
PEERS = [REFERENCE, *TRAINED]

# ---- precision

LESSON: dict[str, Any] = {"part": "lenet5", "accuracy": [0.9, 0.985], "updates": 900, "redone": 0}
LESSON |= {"seconds": 30.0, "points": 0.4, "worst": 2.0, "rows": 60_000, "batch": 128}
LESSON |= {"micro_batch": 64, "scale": 1.0}
LENET5 = [LESSON | {"precision": name} for name in PRECISIONS]
CALM = {clock: [[1.02, 1.04, 1.01], [1.0, 1.0, 1.0]] for clock in ("wall", "cpu")}
COST = [
    {"part": "cost", "duel": duel, "judged": duel != "float32 over itself", "updates": 6} | CALM
    for duel in ('non_finite="drop" over "raise"', "float32 over itself")
]
SLOW = {"wall": [[1.02, 1.04, 1.05], [1.0, 1.0, 1.0]]}

#: A change of one of sound records, by its place, and the one threshold that it fails; a part by its name is
#: measured.
BREACHES: list[tuple[Any, Records | str, int, Record, str]] = [
    (memory_predicted, PREDICTED, -1, {"traced": 1_000_101}, "gpt2: traced, worst"),
    (memory_predicted, [STEP], -1, {"seconds": 3.1}, "gpt2: CPU seconds of a prediction"),
    (memory_predicted, CUDA, -1, {"traced": 1_081_000}, "traced, worst"),
    (memory_predicted, CUDA, -1, {"away": 919_000}, "away, worst"),
    (memory_planner, PLANNER, -1, {"peak": 1_001}, "bert at 50%: peak over budget"),
    (memory_planner, PLANNER, -1, raced(1.11), "time over the best plan's, worst"),
    (memory_planner, PLANNER, -1, {"error": "nothing fits"}, "bert: nothing fits"),
    (memory_gpt2, GPT2, -1, {"peak": 1_001}, "peak over the budget of 25%"),
    (memory_gpt2, GPT2, -1, within(0.25, 1.36), "time at 25% over the plain step's"),
    (memory_peers, PEERS, -1, {"lost": 1}, f"{LAST}: updates lost"),
    (memory_peers, PEERS, -1, {"made": [ROWS]}, f"{LAST}: updates missing"),
    (memory_peers, PEERS, -1, {"deviation": nan}, f"{LAST}: parameters away from the wanted ones"),
    (memory_peers, PEERS, -1, {"failed": "MemoryError: "}, f"{LAST}: MemoryError: "),
    (precision, LENET5, 2, {"accuracy": [0.985, 0.9809]}, "lenet5 in fp16-mixed: points from float32"),
    (precision, LENET5, 3, {"accuracy": [0.985, 0.9891]}, "lenet5 in bf16-true: points from float32"),
    (precision, "overflow", 0, {"calm_redone": 1}, "overflow: redone without it"),
    (precision, "overflow", 0, {"redone": 0}, "overflow: redone besides one"),
    (precision, "overflow", 0, {"computed": 16}, "overflow: computed besides nine"),
    (precision, "overflow", 0, {"updates": 0}, "overflow: windows lost"),
    (precision, "overflow", 0, {"distance": 0.0079}, "overflow: distance from the update without it"),
    (precision, "overflow", 1, {"updates": 1}, "overflow: updates of torch's scaler"),
    (precision, "sums", 1, {"off": nan}, "sums: bf16-true against float32"),
    (precision, "sums", 4, {"off": 1.1e-7}, "sums: float64 against float64"),
    (precision, "sums", 2, {"off": 2e-8}, "sums: float64 over plain float32"),
    (precision, "masters", 0, {"off": 1.1e-3}, "masters: off the way"),
    (precision, "masters", 1, {"off": 7e-3}, "masters: float16 weights off the way"),
    (precision, "masters", 2, {"arrived": 0.02}, "masters: share that arrives without"),
    (precision, COST, 0, SLOW, 'cost: non_finite="drop" over "raise"'),
]


@pytest.mark.parametrize(("study", "sound", "place", "change", "what"), BREACHES)
def test_one_breach_fails_one_threshold(
    study: Any, sound: Records | str, place: int, change: Record, what: str
) -> None:
    sound = measured(sound) if isinstance(sound, str) else sound
    assert failed(study, sound) == []
    records = list(sound)
    records[place] = {**records[place], **change}
    assert failed(study, records) == [what]


def test_medians_have_limits_of_their_own() -> None:
    assert failed(memory_predicted, [CARD] * 3) == ["traced, median", "away, median"]
    assert failed(memory_planner, [DUEL | raced(1.05)] * 3) == ["time over the best plan's, median"]
