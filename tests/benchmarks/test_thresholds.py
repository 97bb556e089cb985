"""Tests of the judgement and the exit code: every threshold can fail."""

from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from anybatch.engine import is_due
from benchmarks.__main__ import main
from benchmarks.config import HeadCase, MemoryCase, RaceCase
from benchmarks.ratios import total
from benchmarks.report import BEGIN, END, page, rewrite
from benchmarks.results import Exactness, Head, Memory, Race, Raw
from benchmarks.thresholds import judge

HAND = [1.0, 2.0, 1.5, 1.0, 1.0, 2.0, 1.0, 1.0]  # seconds by block


def spent(update: int) -> float:
    """Seconds of an update of a step that compares."""
    return 4.0 if is_due(update) else 1.0


FIRST = [spent(update) for update in range(1, 201)]


def times(factor: float) -> list[float]:
    return [factor * seconds for seconds in HAND]


def race(
    factor: float = 1.02, *, luckiest: float | None = None, difference: float = 0.0, slow: float = 0.0
) -> Race:
    ours = times(factor)
    ours[0] *= (luckiest or factor) / factor
    seconds = {"hand": HAND, "anybatch": ours, "peer": [3.0, 4.0]}
    every = list(range(8))
    return Race(
        case=RaceCase(
            name="mlp", task="mlp", rows=8, micro_batches=16, threshold=1.03, or_equal=True, thousand=1.2
        ),
        blocks={"hand": every, "anybatch": every, "peer": [2, 6]},
        wall=seconds,
        cpu=seconds,
        step_s=0.1,
        garbage={"hand": 0.0, "anybatch": 0.0, "peer": 12.5},
        updates=10,
        difference=difference,
        training={"hand": [[1.0] * 200] * 2, "anybatch": [FIRST, [one + slow for one in FIRST]]},
    )


def memory(many: int = 5_000) -> Memory:
    return Memory(
        case=MemoryCase(task="lenet5", rows=32),
        held=4_000,
        batch=(10, 160),
        few={"hand": 5_000, "anybatch": 5_000},
        many={"hand": 5_000, "anybatch": many},
    )


def exactness(gradient: float = 1e-15, parameters: float = 1e-16) -> Exactness:
    return Exactness(
        task="gpt",
        gradient={"hand": 1e-15, "anybatch": gradient, "peer": 0.3},  # no threshold for peers
        parameters={"hand": 0.0, "anybatch": 0.0, "peer": parameters},
    )


def head(time: float = 0.5, peak: int = 100, error: float = 1e-15) -> Head:
    return Head(
        case=HeadCase(),
        error={"loss": 1e-16, "weight": error},
        held=50,
        peak={"hand": 400, "anybatch": peak},
        wall={"hand": HAND, "anybatch": times(time)},
    )


def raw() -> Raw:
    return Raw(
        config="quick",
        date="2026-11-21",
        hardware="A processor (R) @ 2 GHz, 2 cores",
        versions={"torch": "2.13.0"},
        gradient_error=1e-12,
        parameter_error=1e-9,
        races=[race()],
        exactness=[exactness()],
        memory=[memory()],
        heads=[head()],
    )


BREACHES: dict[str, Callable[[Raw], Raw]] = {
    "CPU time": lambda raw: replace(raw, races=[race(1.04)]),
    "1,000 updates": lambda raw: replace(raw, races=[race(slow=0.5)]),
    "trained weights": lambda raw: replace(raw, races=[race(difference=1e-3)]),
    "growth of the peak": lambda raw: replace(raw, memory=[memory(5_011)]),
    "gradient error of anybatch": lambda raw: replace(raw, exactness=[exactness(gradient=2e-12)]),
    "same parameters": lambda raw: replace(raw, exactness=[exactness(parameters=1e-8)]),
    "words: time": lambda raw: replace(raw, heads=[head(time=1.16)]),
    "words: peak bytes": lambda raw: replace(raw, heads=[head(peak=101)]),
    "words: error": lambda raw: replace(raw, heads=[head(error=nan)]),
    "same parameters,": lambda raw: replace(raw, exactness=[exactness(parameters=nan)]),
}


@pytest.mark.parametrize("what", BREACHES)
def test_one_breach_fails_the_run(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = BREACHES[what](raw())
    failed = [verdict.what for verdict in judge(broken) if not verdict.holds]
    assert len(failed) == 1
    assert what in failed[0]
    broken.save(tmp_path / "raw.json")
    assert main(["--raw", str(tmp_path / "raw.json"), "--folder", str(tmp_path)]) == 1
    assert f"FAILED: {failed[0]}" in capsys.readouterr().out


def test_updates_that_were_not_run_are_summed_by_the_calendar_of_a_step() -> None:
    for updates in (1, 20, 200, 201, 1_000):
        assert total(FIRST, updates) == sum(map(spent, range(1, updates + 1)))


def test_the_table_of_a_page_is_replaced(tmp_path: Path) -> None:
    found, path = raw(), tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        rewrite(found, [path])
        assert path.read_text(encoding="utf-8") == f"before\n{BEGIN}\n\n{page(found)}\n\n{END}\nafter\n"
    assert "| tiny MLP, 8 x 16 " in page(found)
