"""Pictures written to files, and that of memory over a step."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from anybatch.core.errors import PlanError
from anybatch.memory.ledger import OWNERS, Ledger, Moment
from anybatch.observe.figure import FORMATS, checked, new_figure, save
from anybatch.observe.memory import COLOURS, plot

STARTS = {".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!DOCTYPE html>", ".pdf": b"%PDF"}


@pytest.mark.parametrize("ending", [*FORMATS, ".SVG", ".Html"])
def test_the_ending_chooses_the_format(tmp_path: Path, ending: str) -> None:
    path = save(new_figure(2, 1), checked(tmp_path / f"a{ending}"), title="", text="")
    assert path.read_bytes().startswith(STARTS[ending.lower()])
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_needs_nothing_else_and_shows_its_text_as_it_is(tmp_path: Path) -> None:
    path = save(new_figure(2, 1), tmp_path / "a.html", title="a < b", text="1 < 2 & <b>")
    page = path.read_text(encoding="utf-8")
    assert "<title>a &lt; b</title>" in page
    assert "<pre>1 &lt; 2 &amp; &lt;b&gt;</pre>" in page
    assert page.count("<svg") == page.count("</svg>") == 1
    assert not any(word in page for word in ("<?xml", "<script", "src="))


@pytest.mark.parametrize("name", ["memory", "memory.jpeg", "memory.txt"])
def test_other_endings_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=rf"\.html, \.pdf, got '{name}'"):
        checked(name)
    with pytest.raises(PlanError, match=r"Expected a folder .*, got nowhere, which does not exist"):
        checked("nowhere/a.png")


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(PlanError, match=r"pip install 'anybatch\[plot\]'"):
        new_figure(1, 1)


def test_only_owners_with_bytes_are_drawn_each_in_its_colour(tmp_path: Path) -> None:
    assert set(COLOURS) == set(OWNERS)
    assert len(set(COLOURS.values())) == len(OWNERS)
    moments = tuple(
        Moment(phase=phase, micro_batch=0, module="", bytes=(1024, 0, 0, size, 0, 0, 0))
        for phase, size in (("start", 0), ("forward", 4096), ("backward", 100))
    )
    drawn, alone = (
        Ledger(moments=some, source="measured", device="cpu", by_module=()) for some in (moments, moments[:1])
    )
    page = plot(drawn, str(tmp_path / "memory.html")).read_text(encoding="utf-8")
    assert "</svg>" in page
    assert str(drawn).splitlines()[0] in page
    assert plot(alone, tmp_path / "alone.png").exists()
    used = {owner for owner, colour in COLOURS.items() if colour.lower() in page.lower()}
    assert used == {"parameters", "activations"}
    assert "#d55e00" not in page.lower()
    assert "#d55e00" in plot(drawn, tmp_path / "with.svg", budget=9000).read_text(encoding="utf-8").lower()
