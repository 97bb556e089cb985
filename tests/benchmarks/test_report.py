"""Tests of the report: aligned tables and its file name."""

from benchmarks.report import file_name, render, table
from benchmarks.thresholds import judge
from tests.benchmarks.test_thresholds import raw


def test_columns_are_aligned() -> None:
    assert table(("name", "n"), [("a", "1"), ("longer", "1,000")]) == [
        "| name   |     n |",
        "| ------ | ----: |",
        "| a      |     1 |",
        "| longer | 1,000 |",
    ]


def test_report_says_what_was_measured() -> None:
    text = render(raw(), list(judge(raw())))
    assert "A processor (R) @ 2 GHz, 2 cores, one thread. torch 2.13.0." in text
    assert "anybatch (identical)" in text
    assert "1.020..1.020" in text
    assert "FAIL" not in text
    for line in text.splitlines():
        assert line == line.rstrip()


def test_file_name_is_what_hardware_date() -> None:
    assert file_name(raw()) == "steps-quick_a-processor-r-2-ghz-2-cores_2026-11-21.md"
