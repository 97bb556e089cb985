"""The picture of the history of the benchmarks is drawn from the lines that are kept."""

from pathlib import Path

from benchmarks import history

ROOT = Path(__file__).parents[2]


def test_the_picture_of_the_docs_is_that_of_the_history() -> None:
    drawn = history.draw(history.read(ROOT / history.FOLDER))
    assert (ROOT / history.PICTURE).read_text(encoding="utf-8") == drawn
