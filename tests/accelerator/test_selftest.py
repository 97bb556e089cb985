"""The table of small models passes on a sound device, and names the row of what is broken."""

from typing import Any

import pytest

from anybatch.planner import budget
from benchmarks.gpu import selftest
from tests.accelerator.simulated import load
from tests.laws import mutations

pytestmark = pytest.mark.slow
Found = dict[str, tuple[str, str]]  # of each row its result and what it says


def run(is_wrong: bool) -> Found:
    load()
    with pytest.MonkeyPatch.context() as patch:
        if is_wrong:
            parse = budget.parse_memory
            patch.setattr(budget, "parse_memory", lambda *given: int(1.7 * parse(*given)))
            mutations.rows_instead_of_valid_targets(patch)
        return selftest.selftest("sim")[0]


def failed(found: Found) -> list[str]:
    return [name for name, (result, _) in found.items() if result == "FAILED"]


def test_a_sound_device_passes(sim: Any) -> None:
    found = sim(run, False)
    assert failed(found) == [], found
    assert [name for name, (result, _) in found.items() if result == "left out"] == ["ranks"]  # one device


def test_mistakes_fail_their_rows(sim: Any) -> None:
    found = failed(sim(run, True))
    assert {"budget", "perceptron", "convolution", "decoder", "LSTM", "window"} <= {*found}
    assert "recompute" not in found
