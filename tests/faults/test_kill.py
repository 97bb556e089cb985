"""Killed at any moment, a training goes on to the very same end."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anybatch.train import checkpoint
from tests.snapshots import assert_same
from tests.train.runs import EPOCHS, UPDATES

ROOT = Path(__file__).parents[2]
NUMBERED = [f"step-{number:08}" for number in (EPOCHS * UPDATES - 1, EPOCHS * UPDATES)]
SAVES = EPOCHS * UPDATES + EPOCHS  # of the last checkpoint in a whole life: after each update and each epoch

PLACES = ["forward", "backward", "micro-batch", "update"]
PLACES += [f"{when} {what}" for when in ("before", "after") for what in ("last", "best")]
PLACES += ["before deleting", "while deleting"]


def draw_scenarios(draw: random.Random, count: int = 1) -> dict[str, list[list[Any]]]:
    """Deaths at places, and at times, of trainings that go on each time: ten for each count."""
    drawn: dict[str, list[list[Any]]] = {}
    for number in range(count):
        drawn[f"at places, {number}"] = [[draw.choice(PLACES[:-4]), draw.randint(1, 3)] for _ in range(4)]
        drawn[f"while saving, {number}"] = [[draw.choice(PLACES[-6:]), 1] for _ in range(2)]
        drawn[f"at times, {number}"] = [["time", 0.6 * draw.random()] for _ in range(4)]
    return drawn


SCENARIOS: dict[str, list[list[Any]]] = {
    "first update": [["update", 1]],
    "first save": [["before last", 1], ["after last", 1]],
    "last save": [["before last", SAVES], ["after last", 1]],
    "between best and last": [["after best", 1], ["before best", 1], ["after best", 1]],
    "every save but one": [["before last", 2]] * 6,
    "while deleting": [["before deleting", 3], ["while deleting", 5], ["while deleting", 4]],
    "forward and backward": [["forward", 5], ["backward", 7], ["backward", 40]],
    "at places": draw_scenarios(random.Random(0))["at places, 0"],
}


Lives = tuple[Path, dict[str, list[int]]]  # where they left their files, and how each ended


def played(folder: Path, what: str) -> Lives:
    """All lives, played by one program: to load torch for each would take a minute."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    asked, variables = [sys.executable, "-m", "tests.faults.mortal", str(folder), what], {"PYTHONPATH": path}
    done = subprocess.run(asked, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    return played(tmp_path_factory.mktemp("lives"), json.dumps(SCENARIOS))


def assert_same_end(folder: Path, name: str) -> None:
    """The last and the best checkpoint are those of the training that was not disturbed."""
    last, best = (
        [checkpoint.load(folder / one / file) for one in ("undisturbed", name)] for file in ("", "best")
    )
    for one in last:
        del one.progress["seconds"]  # a clock says it
    for part in ("model", "optimizers", "schedulers", "progress"):
        assert_same(*({part: getattr(one, part)} for one in last))
    assert_same(*(one.model | {"cpu": one.random["cpu"]} for one in last))
    assert_same(*(one.model | {"epoch": one.progress["epoch"]} for one in best))
    lines = [json.loads(line) for line in (folder / name / "log.jsonl").read_text().splitlines()]
    for event, count in (("step", EPOCHS * UPDATES), ("epoch", EPOCHS)):
        assert [one[event] for one in lines if one["event"] == event] == list(range(1, count + 1))


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_training_comes_to_the_same_end(name: str, lives: Lives) -> None:
    """It leaves no half-written files, and whole logs."""
    folder, ends = lives[0] / name, lives[1][name]
    assert ends == [-signal.SIGKILL] * len(SCENARIOS[name]) + [0]
    assert_same_end(lives[0], name)
    names = sorted({path.name.partition("+")[0] for path in folder.iterdir()})
    assert names[:2] + names[-2:] == ["best", "log.jsonl", *NUMBERED]
    assert len(names) <= 5  # killed before it deleted an old one, a run that is done has it still
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json", ".jsonl"}
