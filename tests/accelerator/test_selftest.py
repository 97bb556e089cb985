"""The table of small models passes on a sound device, and names the row of what is broken."""

from collections.abc import Sequence
from typing import Any

import pytest

from anybatch.planner import budget
from anybatch.recompute import offload
from benchmarks.gpu import selftest
from tests.accelerator.simulated import load
from tests.laws import mutations

pytestmark = pytest.mark.slow
Found = dict[str, tuple[str, str]]  # of each row its result and what it says


def run(device: str, *mistakes: str) -> Found:
    """The self-test, with mistakes planted."""
    load()
    with pytest.MonkeyPatch.context() as patch:
        if "wait" in mistakes:
            patch.setattr(offload.StreamLink, "wait", lambda link, mark: None)
        if "budget" in mistakes:
            parse = budget.parse_memory
            patch.setattr(budget, "parse_memory", lambda *given: int(1.7 * parse(*given)))
        if "divisor" in mistakes:
            mutations.rows_instead_of_valid_targets(patch)
        return selftest.selftest(device)[0]


def failed(found: Found) -> list[str]:
    return [name for name, (result, _) in found.items() if result == "FAILED"]


def test_a_sound_device_passes(sim: Any) -> None:
    found = sim(run, "sim")
    assert failed(found) == [], found
    left_out = [name for name, (result, _) in found.items() if result == "left out"]
    assert left_out == ["ranks"], found  # there is one device


@pytest.mark.parametrize(
    ("mistakes", "rows"),
    [
        (["wait"], ["offload"]),
        (["budget"], ["budget"]),
        (["divisor"], ["perceptron", "convolution", "decoder", "LSTM", "window"]),
    ],
    ids=["a wait left out", "a budget that is passed", "a wrong divisor"],
)
def test_a_mistake_fails_its_row(sim: Any, mistakes: Sequence[str], rows: Sequence[str]) -> None:
    found = sim(run, "sim", *mistakes)
    assert {*rows} <= {*failed(found)}
    assert "recompute" not in failed(found)


def test_a_computer_without_an_accelerator_passes() -> None:
    _, told = selftest.selftest("cpu")
    assert " 0 FAILED, 1 left out" in told  # torch cannot limit the memory of a CPU
    assert all(len(line) < 120 for line in told.splitlines())
