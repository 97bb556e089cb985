"""Messages: of 60 mistakes and more, what was expected, what came, and what to do, in three sentences."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)

import anybatch as ab
from tests.messages.mistakes import MISTAKES, PRELUDE
from tests.snapshots import same


def inner_classes() -> set[str]:
    """The names of classes of anybatch that nobody needs to know."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "anybatch"]
    kinds = [one for module in modules for one in vars(module).values() if isinstance(one, type)]
    inner = {one.__name__ for one in kinds if one.__module__.startswith("anybatch.")}
    return inner - {*ab.__all__, "ByLength"}


def raised_by(program: str, names: dict[str, Any]) -> Exception:
    try:
        exec(program, names)
    except Exception as error:
        return error
    raise AssertionError("it ran through")


def test_the_table_has_at_least_sixty_mistakes() -> None:
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *words = MISTAKES[name]
    (tmp_path / "notes.txt").write_text("no checkpoint\n" * 9)
    names, twin = dict[str, Any](), dict[str, Any]()
    for made in (twin, names):
        exec(PRELUDE, made)
    before = {key: value.clone() for key, value in names["model"].state_dict().items()}
    error = raised_by(program, names)
    notes = getattr(error, "__notes__", [])
    told = "\n".join([str(error), *notes])
    for word in words:
        assert word in told
    message = str(error)
    if not isinstance(error, ab.AnybatchError):  # raised by the model or the loss, which get a note
        message = next(note for note in notes if note.startswith("anybatch call"))
    else:
        assert re.search(r"[Ee]xpected .*, got:? .*([.;:] |\n)", message, re.DOTALL)
    sentences = message.partition(":\ndef ")[0].partition("\ndef ")[0].split(". ")
    assert len(sentences) <= 3
    named = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", message))
    assert named & inner_classes() == set()
    assert "Traceback" not in told
    if "fit(" not in program:
        assert same(before, dict(names["model"].state_dict()))
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    if window := names["step"].open_window:
        window.discard()
    names["model"].requires_grad_(True).zero_grad()
    reports = [made["step"]((made["x"], made["y"])) for made in (names, twin)]
    if "fit(" not in program:  # to the bit, what a good batch gives where nobody was mistaken
        assert reports[0] == reports[1]
        assert same(*(dict(made["model"].state_dict()) for made in (names, twin)))
