"""Every example runs, and the README's snippets are of names that exist."""

import doctest
import re
import runpy
from pathlib import Path

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)

import anybatch as ab

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_says_something(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write pictures
    runpy.run_path(str(path), run_name="__main__")
    assert "loss" in capsys.readouterr().out


def test_examples_exist_and_are_short() -> None:
    assert EXAMPLES
    assert all(len(path.read_text().splitlines()) < 80 for path in EXAMPLES)


PAGES = ["README.md", *[f"docs/{name}.md" for name in ("guide", "check", "heads", "memory", "precision")]]


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_what_exists(page: str) -> None:
    names = set(re.findall(r"\bab\.([A-Za-z_]+)", (ROOT / page).read_text()))
    assert names
    assert names <= set(ab.__all__)


SESSIONS = [page for page in PAGES if "```pycon" in (ROOT / page).read_text()]


@pytest.mark.parametrize("page", SESSIONS)
def test_sessions_on_pages_go_as_they_say(page: str) -> None:
    text = "\n".join(re.findall(r"^```pycon\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL))
    session = doctest.DocTestParser().get_doctest(text, {}, page, page, 0)
    said: list[str] = []
    found = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(session, out=said.append)
    assert found.attempted
    assert not found.failed, "".join(said)


def test_there_are_sessions() -> None:
    assert SESSIONS == ["docs/precision.md"]
