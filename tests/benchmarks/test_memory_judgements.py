"""Tests of the judgements of memory: every limit can be passed, and each breach is named once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import nan
from typing import Any

import pytest

from benchmarks import memory_gpt2, memory_peers, memory_planner, memory_predicted
from benchmarks.memory_contestants import OURS, ROWS, UPDATES
from benchmarks.thresholds import Verdict

Judge = Callable[[Sequence[Mapping[str, Any]]], Iterable[Verdict]]


def failed(judge: Judge, records: Sequence[Mapping[str, Any]]) -> list[str]:
    return [verdict.what for verdict in judge(records) if not verdict.holds]


# ---- predicted

STEP: dict[str, Any] = {"model": "gpt2", "device": "cpu", "optimizer": "sgd", "policy": "half", "blocks": 6}
STEP |= {"rows": 8, "micro_batch": 4, "measured": 1_000_000, "traced": 1_000_000}
STEP |= {"composed": 996_000, "seconds": 2.0, "source": "predicted"}
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

DONE: dict[str, Any] = {"device": "cpu", "failed": "", "first_s": 1.0, "seconds": 2.0, "lost": 0, "rows": 300}
DONE |= {"limit": 9, "made": [ROWS] * UPDATES, "deviation": 1e-6}
REFERENCE = DONE | {"model": memory_peers.REFERENCE}
TRAINED = [DONE | {"model": name} for name in OURS]

LAST = TRAINED[-1]["model"]
PEERS = [REFERENCE, *TRAINED]

#: A change of the last of sound records, and the one threshold that it fails.
BREACHES: list[tuple[Any, Sequence[Mapping[str, Any]], Mapping[str, Any], str]] = [
    (memory_predicted, PREDICTED, {"traced": 1_000_101}, "gpt2: traced, worst"),
    (memory_predicted, PREDICTED, {"composed": 994_000}, "gpt2: composed, worst"),
    (memory_predicted, [STEP], {"seconds": 3.1}, "gpt2: CPU seconds of a prediction"),
    (memory_predicted, CUDA, {"traced": 1_081_000}, "traced, worst"),
    (memory_predicted, CUDA, {"away": 919_000}, "away, worst"),
    (memory_planner, PLANNER, {"peak": 1_001}, "bert at 50%: peak over budget"),
    (memory_planner, PLANNER, raced(1.11), "time over the best plan's, worst"),
    (memory_planner, PLANNER, {"error": "nothing fits"}, "bert: nothing fits"),
    (memory_gpt2, GPT2, {"peak": 1_001}, "peak over the budget of 25%"),
    (memory_gpt2, GPT2, within(0.25, 1.36), "time at 25% over the plain step's"),
    (memory_peers, PEERS, {"lost": 1}, f"{LAST}: updates lost"),
    (memory_peers, PEERS, {"made": [ROWS]}, f"{LAST}: updates missing"),
    (memory_peers, PEERS, {"deviation": nan}, f"{LAST}: parameters away from the wanted ones"),
    (memory_peers, PEERS, {"failed": "MemoryError: "}, f"{LAST}: MemoryError: "),
]


@pytest.mark.parametrize(("study", "records", "change", "what"), BREACHES)
def test_one_breach_fails_one_threshold(
    study: Any, records: Sequence[Mapping[str, Any]], change: Mapping[str, Any], what: str
) -> None:
    *others, last = records
    assert failed(study.judge, records) == []
    assert failed(study.judge, [*others, last | change]) == [what]


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
    assert failed(memory_peers.judge, [*PEERS, peer]) == []
    assert "RuntimeError: no" in "\n".join(memory_peers.sections([*PEERS, peer]))
