"""Pictures of memory over a step."""

from pathlib import Path

from anybatch.memory.ledger import OWNERS, Ledger, Moment
from anybatch.observe.memory import COLOURS, plot
from anybatch.planner.candidates import Candidates
from tests.budgets import make, request, rows_of


def ledger() -> Ledger:
    asked = request(make(), rows_of(4))
    return Candidates(asked).trace(asked.uniform(2, "recompute")).ledger


def test_a_page_needs_nothing_else_and_holds_the_table(tmp_path: Path) -> None:
    found = ledger()
    page = plot(found, str(tmp_path / "memory.html")).read_text(encoding="utf-8")
    assert "</svg>" in page
    assert str(found).splitlines()[0] in page


def test_only_owners_with_bytes_are_drawn_each_in_its_colour(tmp_path: Path) -> None:
    assert set(COLOURS) == set(OWNERS)
    assert len(set(COLOURS.values())) == len(OWNERS)
    moments = tuple(
        Moment(phase=phase, micro_batch=0, module="", bytes=(1024, 0, 0, size, 0, 0, 0))
        for phase, size in (("start", 0), ("forward", 4096), ("backward", 100))
    )
    drawn = Ledger(moments=moments, source="measured", device="cpu", by_module=())
    page = plot(drawn, tmp_path / "memory.svg").read_text(encoding="utf-8").lower()
    alone = Ledger(moments=moments[:1], source="measured", device="cpu", by_module=())
    assert plot(alone, tmp_path / "alone.png").exists()
    used = {owner for owner, colour in COLOURS.items() if colour.lower() in page}
    assert used == {"parameters", "activations"}
    assert "#d55e00" not in page
    assert "#d55e00" in plot(drawn, tmp_path / "with.svg", budget=9000).read_text(encoding="utf-8").lower()
