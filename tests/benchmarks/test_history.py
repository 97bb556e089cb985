"""The history of the benchmarks: a line per run and machine, and a picture that is drawn from these lines."""

import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks import history
from benchmarks.config import RaceCase
from benchmarks.results import Race, Raw

ROOT = Path(__file__).parents[2]
CASE = RaceCase(name="mlp", task="mlp", rows=8, micro_batches=4, threshold=1.1)


def run(date: str, hardware: str, slower: float) -> Raw:
    """A run in which anybatch takes `slower` times as long as the hand-written loop."""
    seconds = {"hand": [1.0] * 9, "anybatch": [slower] * 9}
    blocks = {name: [*range(9)] for name in seconds}
    race = Race(
        case=CASE,
        blocks=blocks,
        wall=seconds,
        cpu=seconds,
        step_s=1.0,
        garbage={},
        updates=9,
        difference=0.0,
    )
    return Raw(
        config="full",
        date=date,
        hardware=hardware,
        versions={"torch": "2", "anybatch": "0"},
        gradient_error=0.0,
        parameter_error=0.0,
        races=[race],
        exactness=[],
        memory=[],
        heads=[],
    )


def test_runs_are_kept_by_machine_and_drawn(tmp_path: Path) -> None:
    """Mutations: one file for all machines; a file that is written anew; a limit that is not looked at."""
    for date, hardware, slower in (
        ("2026-01-01", "Old <1>", 1.0),
        ("2026-01-02", "Old <1>", 1.25),
        ("2026-01-03", "New", 1.0),
    ):
        history.append(run(date, hardware, slower), tmp_path)
    machines = history.read(tmp_path)
    assert [[one["cpu"]["mlp"][0] for one in runs] for runs in machines] == [[1.0], [1.0, 1.25]]
    picture = ET.fromstring(history.draw(machines))
    told = ["".join(one.itertext()) for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "Old <1>" in told
    kinds = [one.get("class") for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [kind for kind in kinds if kind in ("good", "over")] == ["good", "over"]


def test_the_picture_of_the_docs_is_that_of_the_history() -> None:
    drawn = history.draw(history.read(ROOT / history.FOLDER))
    assert (ROOT / history.PICTURE).read_text(encoding="utf-8") == drawn
