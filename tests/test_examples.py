"""Every example runs, and the README's snippets are of names that exist."""

import re
import runpy
from pathlib import Path

import pytest

import anybatch as ab

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_says_something(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert "loss" in capsys.readouterr().out


def test_examples_exist_and_are_short() -> None:
    assert EXAMPLES
    assert all(len(path.read_text().splitlines()) < 80 for path in EXAMPLES)


PAGES = ["README.md", *[f"docs/{name}.md" for name in ("guide", "check", "heads", "memory")]]


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_what_exists(page: str) -> None:
    names = set(re.findall(r"\bab\.([A-Za-z_]+)", (ROOT / page).read_text()))
    assert names
    assert names <= set(ab.__all__)
