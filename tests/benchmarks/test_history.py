"""The history of the benchmarks: a line per run and machine, and a picture that is drawn from these lines."""

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


def test_the_picture_of_the_docs_is_that_of_the_history() -> None:
    drawn = history.draw(history.read(ROOT / history.FOLDER))
    assert (ROOT / history.PICTURE).read_text(encoding="utf-8") == drawn
