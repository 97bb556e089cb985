"""Pictures of memory over a step."""

from pathlib import Path

import pytest

from anybatch.core.errors import PlanError
from anybatch.memory.ledger import OWNERS, Ledger, Moment
from anybatch.observe.figure import FORMATS
from anybatch.observe.memory import COLOURS, plot
from anybatch.planner.candidates import Candidates
from tests.budgets import make, request, rows_of

STARTS = {".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!DOCTYPE html>", ".pdf": b"%PDF"}


def ledger() -> Ledger:
    asked = request(make(), rows_of(4))
    return Candidates(asked).trace(asked.uniform(2, "recompute")).ledger


@pytest.mark.parametrize("ending", [*FORMATS, ".SVG"])
def test_the_ending_chooses_the_format(tmp_path: Path, ending: str) -> None:
    path = plot(ledger(), tmp_path / f"memory{ending}", budget=10**6)
    assert path.read_bytes().startswith(STARTS[ending.lower()])
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_needs_nothing_else_and_holds_the_table(tmp_path: Path) -> None:
    found = ledger()
    page = plot(found, str(tmp_path / "memory.html")).read_text(encoding="utf-8")
    assert "<svg" in page
    assert "</svg>" in page
    assert str(found).splitlines()[0] in page
    assert "<?xml" not in page
    assert "<script" not in page
    assert "src=" not in page


def test_only_owners_with_bytes_are_drawn_each_in_its_colour(tmp_path: Path) -> None:
    assert set(COLOURS) == set(OWNERS)
    assert len(set(COLOURS.values())) == len(OWNERS)
    moments = tuple(
        Moment(phase=phase, micro_batch=0, module="", bytes=(1024, 0, 0, size, 0, 0, 0))
        for phase, size in (("start", 0), ("forward", 4096), ("backward", 100))
    )
    drawn = Ledger(moments=moments, source="measured", device="cpu", by_module=())
    page = plot(drawn, tmp_path / "memory.svg").read_text(encoding="utf-8").lower()
    used = {owner for owner, colour in COLOURS.items() if colour.lower() in page}
    assert used == {"parameters", "activations"}
    assert "#d55e00" not in page
    assert "#d55e00" in plot(drawn, tmp_path / "with.svg", budget=9000).read_text(encoding="utf-8").lower()


def test_a_single_moment_can_be_drawn(tmp_path: Path) -> None:
    one = Moment(phase="start", micro_batch=-1, module="", bytes=(1, 0, 0, 0, 0, 0, 0))
    assert plot(
        Ledger(moments=(one,), source="measured", device="cpu", by_module=()), tmp_path / "a.png"
    ).exists()


@pytest.mark.parametrize("name", ["memory", "memory.jpeg", "memory.txt"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlanError, match=rf"\.html, \.pdf, got '{name}'"):
        plot(ledger(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []
