"""Tests of the benchmarks of precision: what they measure, and that a part can be left out or break."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import precision
from benchmarks.config import Effort, RaceCase
from benchmarks.memory_report import Record
from benchmarks.precision_config import QUICK

FEW = Effort(least_blocks=2, most_blocks=3, seconds=0.0, warm_up=1, peers_every=1)
SMALL = replace(
    QUICK,
    effort=FEW,
    spare=FEW,
    lessons=replace(QUICK.lessons, epochs=2, rows=8, micro_batch=4, points=100.0, worst=100.0),
    race=RaceCase(name="mlp", task="mlp", rows=2, micro_batches=3, threshold=1e9),
)


def without_child(monkeypatch: pytest.MonkeyPatch, broken: Sequence[str] = ()) -> None:
    def measured(module: str, arguments: Sequence[str], *, environment: Mapping[str, str]) -> list[Record]:
        assert environment["OMP_NUM_THREADS"] == "1"
        name = arguments[-1]
        error = [{"model": name, "error": "exit code 9"}] if name in broken else []
        return [*precision.measure(name, SMALL), *error]

    monkeypatch.setattr(precision, "child", measured)


def test_a_run_writes_what_it_could_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_child(monkeypatch)
    arguments = ["--quick", "--folder", str(tmp_path)]
    assert precision.main([*arguments, "--only", "overflow", "lenet5"]) == 0
    (path,) = tmp_path.glob("precision-quick-overflow-lenet5_*.md")
    assert "lenet5: left out. Expected --data" in capsys.readouterr().out
    text = path.read_text()
    assert "## An overflow in micro-batch 3 of 8" in text
    assert "Left out: Expected --data" in text
    assert precision.main(["--only", "lenet5", "--folder", str(tmp_path)]) == 1
    assert "nothing was measured" in capsys.readouterr().out
    path.unlink()
    assert precision.main(["--raw", str(path.with_suffix(".json")), "--folder", str(tmp_path)]) == 0
    assert path.read_text() == text
