"""Tests of the judgements of precision: every limit can be passed, and each breach is named once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import pytest

from benchmarks import precision
from benchmarks.memory_report import Raw
from benchmarks.precision_lenet5 import PRECISIONS
from benchmarks.precision_overflow import AGAIN, OURS, SCALER

Records = Sequence[Mapping[str, Any]]

LESSON = {
    "part": "lenet5",
    "accuracy": [0.9, 0.985],
    "updates": 900,
    "redone": 0,
    "scale": 1.0,
    "seconds": 30.0,
    "points": 0.4,
    "worst": 2.0,
    "rows": 60_000,
    "batch": 128,
    "micro_batch": 64,
}
LENET5 = [LESSON | {"precision": name} for name in PRECISIONS]
OUTCOME = {
    "part": "overflow",
    "computed": 9,
    "updates": 1,
    "redone": 1,
    "scale": 2.0**15,
    "distance": 0.001,
    "from_float32": 0.002,
    "calm_redone": 0,
    "limit": 0.0078,
}
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


def raw(records: Records) -> Raw:
    return Raw(
        kind="precision",
        config="full",
        date="2026-11-21",
        hardware="A processor, 2 cores",
        versions={"torch": "2.13.0"},
        records=[dict(record) for record in records],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A change of one of the sound records that must fail one threshold."""

    records: Records
    place: int
    change: Mapping[str, Any]
    what: str


BREACHES = [
    Breach(
        records=LENET5,
        place=2,
        change={"accuracy": [0.985, 0.9809]},
        what="lenet5 in fp16-mixed: points from float32",
    ),
    Breach(
        records=LENET5,
        place=3,
        change={"accuracy": [0.985, 0.9891]},
        what="lenet5 in bf16-true: points from float32",
    ),
    Breach(records=OVERFLOW, place=0, change={"calm_redone": 1}, what="overflow: redone without it"),
    Breach(records=OVERFLOW, place=0, change={"redone": 0}, what="overflow: redone besides one"),
    Breach(records=OVERFLOW, place=0, change={"redone": 2}, what="overflow: redone besides one"),
    Breach(records=OVERFLOW, place=0, change={"computed": 16}, what="overflow: computed besides nine"),
    Breach(records=OVERFLOW, place=0, change={"updates": 0}, what="overflow: windows lost"),
    Breach(
        records=OVERFLOW,
        place=0,
        change={"distance": 0.0079},
        what="overflow: distance from the update without it",
    ),
    Breach(records=OVERFLOW, place=1, change={"updates": 1}, what="overflow: updates of torch's scaler"),
    Breach(records=SUMS, place=1, change={"off": 1.1e-3}, what="sums: bf16-true against float32"),
    Breach(records=SUMS, place=1, change={"off": nan}, what="sums: bf16-true against float32"),
    Breach(records=SUMS, place=4, change={"off": 1.1e-7}, what="sums: compensated against float64"),
    Breach(records=SUMS, place=2, change={"off": 2e-8}, what="sums: compensated over plain float32"),
    Breach(records=MASTERS, place=0, change={"off": 1.1e-3}, what="masters: off the way"),
    Breach(records=MASTERS, place=1, change={"off": 7e-3}, what="masters: float16 weights off the way"),
    Breach(records=MASTERS, place=2, change={"arrived": 0.02}, what="masters: share that arrives without"),
    Breach(records=COST, place=0, change=SLOW, what='cost: non_finite="drop" over "raise"'),
]


def test_sound_records_pass() -> None:
    assert failed(ALL) == []
    assert len(list(precision.judge(ALL))) == 5 + 6 + 3 + 3 + 1


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: f"{breach.what}-{breach.change}")
def test_every_limit_can_be_passed(breach: Breach) -> None:
    records = list(breach.records)
    records[breach.place] = {**records[breach.place], **breach.change}
    assert failed(records) == [breach.what]


def test_who_learns_nothing_agrees_with_everybody_and_fails() -> None:
    assert failed([record | {"accuracy": [0.1, 0.1]} for record in LENET5]) == [
        "lenet5 in float32: test error in percent"
    ]


def test_what_is_not_judged_may_be_slow() -> None:
    assert failed([COST[0], COST[1] | SLOW]) == []


def test_report_shows_every_part() -> None:
    text = precision.STUDY.render(raw(ALL))
    for line in (
        "# Precision: what is learned, what is lost, what it costs (full), 2026-11-21",
        "A processor, 2 cores, one thread. torch 2.13.0.",
        "## An overflow in micro-batch 3 of 8, fp16-mixed",
        "## 1,024 micro-batches that each add about 0.001 to a gradient",
        "## 1,000 updates of 0.0001 on weights near 1, fp16-true",
        "## What looking and scaling cost, and what short dtypes gain",
        "## LeNet-5 on MNIST, from one seed",
    ):
        assert line in text
    assert "FAIL" not in text
    assert " 98.50% |" in text
    assert "FAIL" in precision.STUDY.render(raw([COST[0] | SLOW]))


def test_report_of_a_part_alone_has_no_other() -> None:
    text = precision.STUDY.render(raw(SUMS))
    assert "micro-batches that each add" in text
    assert "LeNet-5" not in text
