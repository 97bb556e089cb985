"""What planning says where it takes long."""

import itertools

import pytest

from anybatch.engine import Plan
from anybatch.planner.candidates import Candidates
from anybatch.planner.progress import PlanningProgress
from tests.budgets import make, request, rows_of


def test_a_line_a_second_after_two_and_none_before(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([10.0, 10.1, 11.9, 12.0, 12.9, 13.0, 15.0])
    progress = PlanningProgress(lambda: next(now))
    for traced in range(6):
        progress.tell(Plan(rows=8, micro_batch=2), traced)
    output, errors = capsys.readouterr()
    lines = errors.splitlines()
    assert (output, [line.partition(": ")[2][:8] for line in lines]) == (
        "",
        ["2 steps ", "4 steps ", "5 steps "],
    )
    assert lines[0].endswith(": 2 steps traced, next 8 rows in micro-batches of 2.")
    assert " for 2" in lines[0]


def test_candidates_tell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = request(make(), rows_of(24))
    for seconds, least, most in ((0, 0, 0), (3, 2, 9)):
        clock = itertools.count(0, seconds)
        monkeypatch.setattr(PlanningProgress.__init__, "__defaults__", (lambda clock=clock: next(clock),))
        assert Candidates(asked).trace(asked.uniform(5, "keep")).peak
        assert least <= capsys.readouterr().err.count("has been planning for") <= most
