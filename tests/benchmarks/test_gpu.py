"""The benchmark of a device: each section in a process of its own, rehearsed on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import page
from benchmarks.gpu.__main__ import BROKEN, SECTIONS

ROOT = Path(__file__).parents[2]


def started(folder: Path, *sections: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--device", "cpu", "--out", str(folder)]
    command += ["--only", *sections] if sections else []
    paths = os.pathsep.join([environment.pop("first", ""), str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def verdicts(folder: Path) -> Any:
    return json.loads((folder / "gpu.json").read_text(encoding="utf-8"))["verdicts"]


@pytest.mark.slow
def test_all_sections_are_rehearsed(tmp_path: Path) -> None:
    with started(tmp_path) as run:
        told, _ = run.communicate(timeout=600)
    assert run.returncode == 0, told
    assert [*verdicts(tmp_path)] == [*SECTIONS]
    assert not [one for one in verdicts(tmp_path).values() if one.startswith(("crashed", "not reached"))]
    assert "## speed" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_broken_section_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    with started(tmp_path, "precision", "oom", **{BROKEN: "precision"}) as run:
        told, _ = run.communicate(timeout=300)
    assert run.returncode == 1
    assert "broken on purpose" in verdicts(tmp_path)["precision"]
    assert "precision" in told
    assert verdicts(tmp_path)["oom"].startswith("holds")


@pytest.mark.slow
def test_what_is_done_is_kept_when_a_signal_comes(tmp_path: Path) -> None:
    with started(tmp_path, "oom", "precision", "exact") as run:
        for _ in range(3000):
            with suppress(FileNotFoundError):
                if verdicts(tmp_path)["oom"].startswith("holds"):
                    break
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert run.returncode == 143
    assert verdicts(tmp_path)["oom"].startswith("holds")
    assert verdicts(tmp_path)["exact"] == "not reached"


def test_the_status_of_readme_is_that_of_the_runs_that_are_there(tmp_path: Path) -> None:
    rows = page.rows_of(ROOT / "benchmarks" / "results" / "gpu")
    assert page.status(rows) in (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(row[1] in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8") for row in rows)
    assert "Nobody" in page.status(page.rows_of(tmp_path))
