"""Tests of the contestants: one loss, one place to end; peers only where they are installed."""

from dataclasses import replace

import pytest
import torch

from anybatch.testing import tolerance
from benchmarks import contestants
from benchmarks.config import FULL, Effort, RaceCase
from benchmarks.contestants import PEERS, RIVALS, installed
from benchmarks.exactness import exactness
from benchmarks.race import race

CASES = [replace(case, rows=2, micro_batches=4) for case in FULL.races]
EXACT = [case for case in CASES if case.threshold is not None]
EFFORT = Effort(least_blocks=1, most_blocks=1, seconds=0.0, warm_up=1, peers_every=1, segment_s=0.0)


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_anybatch_does_what_the_hand_written_loop_does(case: RaceCase) -> None:
    errors = exactness(case, RIVALS, seed=0)
    assert errors.gradient["anybatch"] <= FULL.gradient_error
    assert errors.parameters["anybatch"] <= FULL.parameter_error


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_anybatch_trains_as_the_hand_written_loop_does(case: RaceCase) -> None:
    found = race(case, EFFORT, RIVALS, seconds=0.0, seed=0)
    assert found.difference <= tolerance(torch.float32, found.updates * case.micro_batches)


def test_a_peer_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contestants, "PACKAGES", dict.fromkeys(PEERS, "no-such-package"))
    assert installed() == RIVALS
    assert "not installed, left out" in capsys.readouterr().out
