"""Tests of what the benchmarks of memory share: files, the report, a child that dies."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.memory_report import Raw, Record, Study, broken, child, sound
from benchmarks.thresholds import Verdict


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    yield from broken(records)
    for record in sound(records):
        yield Verdict(what=record["model"], measured=record["value"], limit=1.0)


STUDY = Study(kind="memory-test", title="A test", judge=judge, sections=lambda _: ["", "## Records"])
WHEN = {"config": "quick", "date": "2026-11-21", "hardware": "A processor (R) @ 2 GHz, 2 cores"}


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (1.01, 1), (float("nan"), 1)])
def test_exit_code_is_the_judgement(
    value: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"model": "bert", "value": value}]
    raw = Raw(
        kind="memory-test", **WHEN, versions={"torch": "2.13.0"}, records=records, notes=["None left out"]
    )
    assert STUDY.finish(raw, tmp_path) == code
    name = "memory-test-quick_a-processor-r-2-ghz-2-cores_2026-11-21"
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.md", f"{name}.json"}
    assert ("FAILED: bert" in capsys.readouterr().out) == bool(code)


def test_a_child_that_ends_early_is_an_error() -> None:
    assert child("this", ["--child", "bert"]) == []  # `import this` ends well but writes nothing
    assert child("benchmarks.no_such_module", ["--child", "bert"]) == [
        {"model": "bert", "error": "exit code 1"}
    ]
