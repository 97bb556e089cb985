"""`anybatch train --ranks N`: the run of one process, and one sentence when a rank ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.parallel.checkpoint import load
from anybatch.testing import tolerance

FLOAT64 = tolerance(torch.float64, 1000)
TARGET = """
import os
from pathlib import Path
import torch
from torch import nn

def task():
    Path("rank" + os.environ.get("RANK", "")).write_text(str(os.getpid()))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(29, 4, generator=generator).double()
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    rows = x, x[:, :1].sin()
    return model, nn.MSELoss(), rows, rows
"""
EPOCH = '"event": "epoch"'
WAIT = 120.0  # seconds until a test gives up


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])}
    command = [sys.executable, "-m", "anybatch", "train", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **streams) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # its ranks end with it
                process.communicate(timeout=WAIT)


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    with running(folder, *arguments) as process:
        out, err = process.communicate(timeout=WAIT)
    return process.returncode, out, err


def wait_for_more_than(done: int, folder: Path, process: Any) -> None:
    end = time.monotonic() + WAIT
    log = folder / "run" / "log.jsonl"
    while not log.exists() or log.read_text().count(EPOCH) <= done:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "no epoch was finished"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_rank_ends_all_with_one_sentence_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TARGET)
    options, own = ["--quiet", "--epochs"], ["own:task", "--batch-size", "6", "--out"]
    with running(tmp_path, *own, "run", "--ranks", "2", *options, "100000") as one:
        wait_for_more_than(2, tmp_path, one)
        os.kill(int((tmp_path / "rank1").read_text()), signal.SIGKILL)
        _, err = one.communicate(timeout=WAIT)
    assert one.returncode == 1
    go_on = "Go on with: anybatch train --resume run\n"
    said = "Expected all ranks to finish, got rank 1 that ended with SIGKILL."
    assert err == f"anybatch train: {said} {go_on}"
    with running(tmp_path, "--resume", "run", "--ranks", "3", *options, "100000") as one:
        wait_for_more_than((tmp_path / "run" / "log.jsonl").read_text().count(EPOCH), tmp_path, one)
        one.send_signal(signal.SIGINT)
        _, err = one.communicate(timeout=WAIT)
    assert one.returncode == 130
    assert err == f"anybatch train: interrupted. {go_on}"
    epochs = str(load(tmp_path / "run").progress["epoch"] + 2)
    assert run(tmp_path, "--resume", "run", *options, epochs)[0] == 0  # on two ranks, as it was started
    assert run(tmp_path, *own, "alone", *options, epochs)[0] == 0
    found, expected = [load(tmp_path / name) for name in ("run", "alone")]
    assert found.progress["updates"] == expected.progress["updates"]
    for name, weight in expected.model.items():
        torch.testing.assert_close(found.model[name], weight, rtol=FLOAT64, atol=FLOAT64)
