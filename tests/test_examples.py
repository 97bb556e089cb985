"""Every example runs."""

import runpy
from pathlib import Path

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)

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
