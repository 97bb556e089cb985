"""Tests of the judgements of memory: every limit can be passed, and each breach is named once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks import memory_gpt2, memory_peers, memory_planner, memory_predicted
from benchmarks.memory_contestants import OURS, ROWS, UPDATES
from benchmarks.thresholds import Verdict

Judge = Callable[[Sequence[Mapping[str, Any]]], Iterable[Verdict]]


def failed(judge: Judge, records: Sequence[Mapping[str, Any]]) -> list[str]:
    return [verdict.what for verdict in judge(records) if not verdict.holds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A change of the sound records that must fail one threshold."""

    judge: Judge
    records: Sequence[Mapping[str, Any]]
    change: Mapping[str, Any]
    what: str


# ---- predicted

STEP = {
    "model": "gpt2",
    "device": "cpu",
    "optimizer": "sgd",
    "policy": "half",
    "blocks": 6,
    "rows": 8,
    "micro_batch": 4,
    "measured": 1_000_000,
    "traced": 1_000_000,
    "composed": 996_000,
    "seconds": 2.0,
    "source": "predicted",
}
CARD = STEP | {"device": "cuda", "traced": 1_070_000, "away": 1_070_000}
NEAR = STEP | {"device": "cuda", "traced": 1_010_000, "away": 1_010_000}
PREDICTED, CUDA = [STEP, STEP], [NEAR, NEAR, CARD]

# ---- planner

DUEL = {
    "model": "bert",
    "rows": 16,
    "fraction": 0.5,
    "budget": 1_000,
    "best": "8 keep",
    "best_peak": 990,
    "chosen": {"micro_batch": 8, "blocks": []},
    "predicted": 1_000,
    "peak": 1_000,
    "asked_s": 1.0,
}
TIMES = [1.0, 1.2, 0.9]


def raced(factor: float) -> Mapping[str, Any]:
    return {"raced": {"best": TIMES, "chosen": [factor * time for time in TIMES]}}


PLANNER = [DUEL | raced(1.02), DUEL | {"raced": {}}, DUEL | {"raced": {}}, DUEL | raced(1.08)]

# ---- GPT-2


def within(fraction: float, factor: float) -> dict[str, Any]:
    return {
        "model": "gpt2",
        "device": "cpu",
        "rows": 8,
        "fraction": fraction,
        "budget": 1_000,
        "peak": 999,
        "predicted": 999,
        "chosen": {"micro_batch": 8, "blocks": []},
        "words": "blocks       all kept\n",
        "plain_s": TIMES,
        "seconds": [factor * time for time in TIMES],
    }


GPT2 = [within(0.25, 1.3)]

# ---- peers

DONE = {
    "device": "cpu",
    "failed": "",
    "first_s": 1.0,
    "seconds": 2.0,
    "lost": 0,
    "rows": 300,
    "limit": 9,
    "made": [ROWS] * UPDATES,
    "deviation": 1e-6,
}
REFERENCE = DONE | {"model": memory_peers.REFERENCE}
TRAINED = [DONE | {"model": name} for name in OURS]
OTHERS = [REFERENCE, *TRAINED[:-1]]

BREACHES = {
    "traced": Breach(
        judge=memory_predicted.judge,
        records=PREDICTED,
        change={"traced": 1_000_101},
        what="gpt2: traced, worst",
    ),
    "composed": Breach(
        judge=memory_predicted.judge,
        records=PREDICTED,
        change={"composed": 994_000},
        what="gpt2: composed, worst",
    ),
    "prediction time": Breach(
        judge=memory_predicted.judge,
        records=[STEP],
        change={"seconds": 3.1},
        what="gpt2: CPU seconds of a prediction",
    ),
    "card, worst": Breach(
        judge=memory_predicted.judge, records=CUDA, change={"traced": 1_081_000}, what="traced, worst"
    ),
    "card, away": Breach(
        judge=memory_predicted.judge, records=CUDA, change={"away": 919_000}, what="away, worst"
    ),
    "over budget": Breach(
        judge=memory_planner.judge,
        records=PLANNER,
        change={"peak": 1_001},
        what="bert at 50%: peak over budget",
    ),
    "slow at worst": Breach(
        judge=memory_planner.judge,
        records=PLANNER,
        change=raced(1.11),
        what="time over the best plan's, worst",
    ),
    "refused": Breach(
        judge=memory_planner.judge,
        records=PLANNER,
        change={"error": "nothing fits"},
        what="bert: nothing fits",
    ),
    "GPT-2 over budget": Breach(
        judge=memory_gpt2.judge, records=GPT2, change={"peak": 1_001}, what="peak over the budget of 25%"
    ),
    "GPT-2 slow": Breach(
        judge=memory_gpt2.judge,
        records=GPT2,
        change=within(0.25, 1.36),
        what="time at 25% over the plain step's",
    ),
    "updates lost": Breach(
        judge=memory_peers.judge,
        records=[*OTHERS, TRAINED[-1]],
        change={"lost": 1},
        what=f"{TRAINED[-1]['model']}: updates lost",
    ),
    "updates missing": Breach(
        judge=memory_peers.judge,
        records=[*OTHERS, TRAINED[-1]],
        change={"made": [ROWS]},
        what=f"{TRAINED[-1]['model']}: updates missing",
    ),
    "another result": Breach(
        judge=memory_peers.judge,
        records=[*OTHERS, TRAINED[-1]],
        change={"deviation": float("nan")},
        what=f"{TRAINED[-1]['model']}: parameters away from the wanted ones",
    ),
    "died": Breach(
        judge=memory_peers.judge,
        records=[*OTHERS, TRAINED[-1]],
        change={"failed": "MemoryError: "},
        what=f"{TRAINED[-1]['model']}: MemoryError: ",
    ),
}


@pytest.mark.parametrize("name", BREACHES)
def test_one_breach_fails_one_threshold(name: str) -> None:
    breach = BREACHES[name]
    *others, last = breach.records
    assert failed(breach.judge, breach.records) == []
    assert failed(breach.judge, [*others, last | breach.change]) == [breach.what]


def test_medians_have_limits_of_their_own() -> None:
    assert failed(memory_predicted.judge, [CARD] * 3) == ["traced, median", "away, median"]
    assert failed(memory_planner.judge, [DUEL | raced(1.05)] * 3) == ["time over the best plan's, median"]


def test_time_rises_as_budgets_shrink() -> None:
    rising = [within(1.0, 1.0), within(0.5, 1.1), within(0.25, 1.2)]
    assert failed(memory_gpt2.judge, rising) == []
    falling = [within(1.0, 1.0), within(0.5, 1.2), within(0.25, 1.1)]
    assert failed(memory_gpt2.judge, falling) == ["time at 50% over that at 25%"]


def test_peers_are_shown_and_not_judged() -> None:
    peer = DONE | {"model": "accelerate", "lost": 12, "made": [8] * 24, "failed": "RuntimeError: no"}
    assert failed(memory_peers.judge, [REFERENCE, *TRAINED, peer]) == []
    assert "RuntimeError: no" in "\n".join(memory_peers.sections([REFERENCE, *TRAINED, peer]))


@pytest.mark.parametrize(
    ("sections", "records", "shown"),
    [
        (memory_predicted.sections, PREDICTED, "-0.400%"),
        (memory_planner.sections, PLANNER, "8 keep"),
        (memory_gpt2.sections, GPT2, "99.9%"),
    ],
)
def test_reports_show_every_record(sections: Any, records: Sequence[Mapping[str, Any]], shown: str) -> None:
    text = "\n".join(sections(records))
    assert text.count(shown) >= len(records)
