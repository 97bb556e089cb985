"""What planning says where it takes long."""

import itertools

import pytest

from anybatch.planner.candidates import Candidates
from anybatch.planner.progress import PlanningProgress
from tests.budgets import make, request, rows_of


def test_candidates_tell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = request(make(), rows_of(24))
    for seconds, least, most in ((0, 0, 0), (3, 2, 9)):
        clock = itertools.count(0, seconds)
        monkeypatch.setattr(PlanningProgress.__init__, "__defaults__", (lambda clock=clock: next(clock),))
        assert Candidates(asked).trace(asked.uniform(5, "keep")).peak
        assert least <= capsys.readouterr().err.count("has been planning for") <= most
