"""Tests of the contestants: one loss, one place to end; peers only where they are installed."""

from dataclasses import replace

import pytest

from benchmarks import contestants
from benchmarks.config import FULL, RaceCase
from benchmarks.contestants import PEERS, RIVALS, installed
from benchmarks.exactness import exactness

CASES = [replace(case, rows=2, micro_batches=4) for case in FULL.races if case.threshold is not None]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_anybatch_does_what_the_hand_written_loop_does(case: RaceCase) -> None:
    errors = exactness(case, RIVALS, seed=0)
    assert errors.gradient["anybatch"] <= FULL.gradient_error
    assert errors.parameters["anybatch"] <= FULL.parameter_error


def test_a_peer_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contestants, "PACKAGES", dict.fromkeys(PEERS, "no-such-package"))
    assert installed() == RIVALS
    assert "not installed, left out" in capsys.readouterr().out
