"""Parameter servers on Ray itself: processes that end, the command, and the driver killed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import anybatch as ab
from anybatch.cli import main
from anybatch.parallel.on_ray import RayCluster
from anybatch.train import load_newest

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: anybatch[server]")
TRIES = 600  # looks at what another process does, with a tenth of a second between them
ROOT = Path(__file__).parents[2]


@pytest.fixture
def marked() -> Iterator[dict[str, str]]:
    """An environment for processes, none of which may stay."""
    mark = f"ANYBATCH_TEST={uuid.uuid4()}"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    yield os.environ | dict([mark.split("=")]) | {"PYTHONPATH": path}
    for _ in range(TRIES):
        if not (left := having(mark)):
            return
        subprocess.run(["sleep", "0.1"], check=True)
    for process in left:
        os.kill(process, signal.SIGKILL)
    raise AssertionError(f"processes stay: {left}")


def having(mark: str) -> list[int]:
    """Processes with this in their environment."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


@needs_ray
@pytest.mark.slow
def test_processes_that_end_on_ray_change_nothing(marked: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tests.parallel.deadly", "6", "3"]
    done = subprocess.run(command, env=marked, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"], found
    assert found["killed"], found


@needs_ray
@pytest.mark.slow
def test_the_driver_is_killed_and_the_command_goes_on(marked: dict[str, str], tmp_path: Path) -> None:
    def command(*more: str) -> list[str]:
        return [sys.executable, "-m", "anybatch", "train", *more, "--quiet"]

    def started(*more: str) -> subprocess.Popen[bytes]:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command(*more), env=marked, cwd=tmp_path, **quiet)

    options = ("lenet5", "--servers", "1", "--workers", "2", "--epochs", "2", "--save-minutes", "1e-9")
    killed = started(*options, "--out", "killed")
    log = tmp_path / "killed" / "log.jsonl"
    for _ in range(TRIES):
        if log.is_file() and len(log.read_text().splitlines()) > 5:
            break
        assert killed.poll() is None, "it ended by itself"
        subprocess.run(["sleep", "0.1"], check=True)
    killed.kill()
    killed.wait()
    assert json.loads(log.read_text().splitlines()[-1]).get("epoch") != 2
    assert started("--resume", "killed").wait() == 0
    assert started(*options, "--out", "whole").wait() == 0
    one, other = (load_newest(tmp_path / name / "last.safetensors") for name in ("killed", "whole"))
    assert one.progress["updates"] == other.progress["updates"]
    assert all(one.model[name].equal(value) for name, value in other.model.items())


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ab.AnybatchError, match="pip install"):
        RayCluster()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--servers", "0"], "Expected servers of at least 1, got 0"),
        (["--servers", "1", "--workers", "0"], "Expected workers of at least 1, got 0"),
        (["--servers", "1", "--ranks", "2"], "Expected --ranks to be 1 with --servers, got 2"),
        (["--workers", "2"], "Expected --servers with --workers, got none"),
        (["--local-steps", "2"], "Expected --servers with --local-steps, got none"),
        (["--servers", "1", "--local-steps", "2"], "Expected a rule with steps=2 and staleness=0, got none"),
        (["--servers", "1", "--rule", "dynsgd", "--staleness", "-1"], "Expected staleness of at least 0"),
    ],
)
def test_the_command_refuses(
    options: list[str], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["train", "lenet5", "--out", str(tmp_path / "run"), *options]) == 1
    assert match in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@needs_ray
@pytest.mark.slow
def test_an_address_that_nobody_answers(marked: dict[str, str], tmp_path: Path) -> None:
    command = ["train", "lenet5", "--servers", "1", "--cluster", "127.0.0.1:9", "--out", "run"]
    run = [sys.executable, "-m", "anybatch", *command]
    done = subprocess.run(run, env=marked, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "Expected a Ray cluster at 127.0.0.1:9, got none" in done.stderr
    assert not (tmp_path / "run").exists()
