"""Tests of the judgements of precision: every limit can be passed, and each breach is named once."""

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import pytest

from benchmarks import precision
from benchmarks.memory_report import Raw
from benchmarks.precision_lenet5 import PRECISIONS
from benchmarks.precision_overflow import AGAIN, OURS, SCALER

Records = Sequence[Mapping[str, Any]]

LESSON: dict[str, Any] = {"part": "lenet5", "accuracy": [0.9, 0.985], "updates": 900, "redone": 0}
LESSON |= {"seconds": 30.0, "points": 0.4, "worst": 2.0, "rows": 60_000, "batch": 128}
LESSON |= {"micro_batch": 64, "scale": 1.0}
LENET5 = [LESSON | {"precision": name} for name in PRECISIONS]
OUTCOME: dict[str, Any] = {"part": "overflow", "computed": 9, "updates": 1, "redone": 1, "scale": 2.0**15}
OUTCOME |= {"distance": 0.001, "from_float32": 0.002, "calm_redone": 0, "limit": 0.0078}
LOST = {"computed": 8, "updates": 0, "redone": 0, "distance": 1.0}
OVERFLOW = [
    OUTCOME | {"way": OURS},
    OUTCOME | LOST | {"way": SCALER},
    OUTCOME | {"way": AGAIN, "computed": 16, "redone": 0},
]
SUMS = [
    {"part": "sums", "what": what, "against": "against float32", "off": off}
    for what, off in (
        ("plain .grad, bfloat16 weights", 0.5),
        ("anybatch, bf16-true", 5e-4),
        ("plain .grad, float32 weights", 4e-7),
        ("anybatch, float32", 4e-7),
        ("anybatch, float32, compensated", 3e-8),
    )
]
MASTERS = [
    {"part": "masters", "what": what, "arrived": arrived, "off": off}
    for what, arrived, off in (
        ("float32 weights behind", 1.0, 2e-4),
        ("float16 weights rounded from them", 0.997, 4e-3),
        ("float16 weights without backup", 0.0, 1.0),
    )
]
COST = [
    {
        "part": "cost",
        "duel": duel,
        "judged": duel != "float32 over itself",
        "wall": [[1.02, 1.04, 1.01], [1.0, 1.0, 1.0]],
        "cpu": [[1.02, 1.04, 1.01], [1.0, 1.0, 1.0]],
        "updates": 6,
    }
    for duel in ('non_finite="drop" over "raise"', "float32 over itself")
]
ALL = [*OVERFLOW, *SUMS, *MASTERS, *COST, *LENET5]
SLOW = {"wall": [[1.02, 1.04, 1.05], [1.0, 1.0, 1.0]]}


def failed(records: Records) -> list[str]:
    return [verdict.what for verdict in precision.judge(records) if not verdict.holds]


#: A change of one of the sound records, by its place, and the one threshold that it fails.
BREACHES: list[tuple[Records, int, Mapping[str, Any], str]] = [
    (LENET5, 2, {"accuracy": [0.985, 0.9809]}, "lenet5 in fp16-mixed: points from float32"),
    (LENET5, 3, {"accuracy": [0.985, 0.9891]}, "lenet5 in bf16-true: points from float32"),
    (OVERFLOW, 0, {"calm_redone": 1}, "overflow: redone without it"),
    (OVERFLOW, 0, {"redone": 0}, "overflow: redone besides one"),
    (OVERFLOW, 0, {"computed": 16}, "overflow: computed besides nine"),
    (OVERFLOW, 0, {"updates": 0}, "overflow: windows lost"),
    (OVERFLOW, 0, {"distance": 0.0079}, "overflow: distance from the update without it"),
    (OVERFLOW, 1, {"updates": 1}, "overflow: updates of torch's scaler"),
    (SUMS, 1, {"off": nan}, "sums: bf16-true against float32"),
    (SUMS, 4, {"off": 1.1e-7}, "sums: compensated against float64"),
    (SUMS, 2, {"off": 2e-8}, "sums: compensated over plain float32"),
    (MASTERS, 0, {"off": 1.1e-3}, "masters: off the way"),
    (MASTERS, 1, {"off": 7e-3}, "masters: float16 weights off the way"),
    (MASTERS, 2, {"arrived": 0.02}, "masters: share that arrives without"),
    (COST, 0, SLOW, 'cost: non_finite="drop" over "raise"'),
]


@pytest.mark.parametrize(("sound", "place", "change", "what"), BREACHES)
def test_every_limit_can_be_passed(sound: Records, place: int, change: Mapping[str, Any], what: str) -> None:
    assert failed(ALL) == []
    records = list(sound)
    records[place] = {**records[place], **change}
    assert failed(records) == [what]


def test_who_learns_nothing_agrees_with_everybody_and_fails() -> None:
    who = [record | {"accuracy": [0.1, 0.1]} for record in LENET5]
    assert failed(who) == ["lenet5 in float32: test error in percent"]


def report(records: Records) -> str:
    run = {"kind": "precision", "config": "full", "date": "2026-11-21", "hardware": "A processor"}
    raw = Raw(**run, versions={"torch": "2.13.0"}, records=[dict(record) for record in records])
    return precision.STUDY.render(raw)


def test_report_shows_every_part_that_ran_and_no_other() -> None:
    text = report(ALL)
    assert " 98.50% |" in text
    assert "FAIL" not in text
    for part in ("An overflow", "1,024 micro-batches", "1,000 updates", "What looking", "LeNet-5 on MNIST"):
        assert f"## {part}" in text
    assert "FAIL" in report([COST[0] | SLOW])
    assert "LeNet-5" not in report(SUMS)
