"""`anybatch selftest` passes on a sound device, and names the row of what is broken."""

import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest

from anybatch.cli import main as cli
from anybatch.planner import budget
from anybatch.recompute import offload
from tests.accelerator.simulated import load
from tests.laws import mutations

pytestmark = pytest.mark.slow
Found = tuple[int, dict[str, tuple[str, str]]]  # the exit code; of each row its result and what it says


def run(device: str, *mistakes: str) -> Found:
    """The self-test, with mistakes planted."""
    load()
    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        if "wait" in mistakes:
            patch.setattr(offload.StreamLink, "wait", lambda link, mark: None)
        if "budget" in mistakes:
            parse = budget.parse_memory
            patch.setattr(budget, "parse_memory", lambda *given: int(1.7 * parse(*given)))
        if "divisor" in mistakes:
            mutations.rows_instead_of_valid_targets(patch)
        code = cli.main(["selftest", "--device", device, "--json"])
    return code, {name: (result, told) for name, result, told in json.loads(printed.getvalue())["rows"]}


def failed(found: Found) -> list[str]:
    return [name for name, (result, _) in found[1].items() if result == "FAILED"]


def test_a_sound_device_passes(sim: Any) -> None:
    found = sim(run, "sim")
    assert (found[0], failed(found)) == (0, []), found
    left_out = [name for name, (result, _) in found[1].items() if result == "left out"]
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
def test_a_mistake_gives_exit_code_1_and_its_row(
    sim: Any, mistakes: Sequence[str], rows: Sequence[str]
) -> None:
    found = sim(run, "sim", *mistakes)
    assert found[0] == 1
    assert {*rows} <= {*failed(found)}
    assert "recompute" not in failed(found)


def test_a_computer_without_an_accelerator_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert " 0 FAILED, 1 left out" in told  # torch cannot limit the memory of a CPU
    assert all(len(line) < 120 for line in told.splitlines())
