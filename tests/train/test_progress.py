"""The progress bar: figures while it runs, a line per epoch, and nothing left on the screen."""

import math
import random
import re
import sys
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from anybatch.core.report import StepReport
from anybatch.train import progress
from anybatch.train.loggers import EpochReport, RunInfo
from anybatch.train.progress import ProgressBar, current_bytes, peak_bytes
from tests.train.runs import UPDATES, Diary, make_trainer, raising

CPU = torch.device("cpu")
COURSE = RunInfo(epochs=2, done_epochs=1, done_updates=3, total_updates=6, rows=300)
STEP = StepReport(loss=0.5, terms={}, weights={}, rows=100, micro_batches=1, grad_norm=0.0, updated=True)
VALUES: Any = {"validation": {"accuracy [top 5]": 0.75}, "learning_rate": 0.1}
EPOCH = EpochReport(epoch=2, updates=6, loss=0.25, seconds=2.0, samples_per_second=1500, **VALUES)
LINE = "epoch   2  loss 0.2500  validation accuracy [top 5] 0.7500  lr 0.1  1,500 samples/s  2 s"


def make_console(terminal: bool) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=120, legacy_windows=False, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_terminal_shows_loss_throughput_and_memory_and_a_line_for_each_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "current_bytes", lambda device: 3 * 2**20)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=iter(range(99)).__next__))
    console = make_console(terminal=True)
    bar = ProgressBar(CPU, console)
    bar.start(COURSE)
    bar.step(STEP)
    bar.step(replace(STEP, loss=math.nan, updated=False))  # has no loss to show
    bar.epoch(EPOCH)
    bar.stop()
    shown = re.sub(r"\x1b\[\??[\d;]*[A-Za-z]", "", written(console))
    assert re.search(r"5/6.*loss 0\.5000  [\d,]+ samples/s  3\.0 MiB", shown)
    assert LINE in shown
    assert "epoch 2/2" in shown
    assert written(console).rindex("\x1b[?25h") > written(console).rindex("\x1b[?25l")  # the cursor is back


@pytest.mark.parametrize("event", [("start", 1), ("step", UPDATES + 2), ("epoch", 1), ("stop", 1)], ids=str)
def test_bar_is_stopped_where_a_training_is_broken_off(event: tuple[str, int]) -> None:
    console = make_console(terminal=True)
    bar = ProgressBar(CPU, console)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(watchers=[bar, Diary(event, raising(KeyboardInterrupt()))]).fit(epochs=2)
    assert written(console).rindex("\x1b[?25h") > written(console).rindex("\x1b[?25l")


@pytest.mark.parametrize("shown", [True, False])
def test_trainer_shows_a_bar_unless_told_not_to(shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    reports = make_trainer(progress=shown).fit(epochs=2)
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", [str(report) for report in reports if shown])


def test_bar_moves_no_random_state_not_even_by_the_first_import_of_rich(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    before = random.getstate()
    ProgressBar(CPU)
    assert random.getstate() == before


# ---- memory


def test_bytes_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = current_bytes(CPU)
    held = torch.ones(2**25)  # 128 MiB, written to, so that they are really there
    grown = current_bytes(CPU) - before
    assert held.nbytes / 2 < grown < held.nbytes * 2
    assert peak_bytes(CPU) >= held.nbytes

    def missing(*args: object, **options: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(progress, "open", missing, raising=False)
    assert current_bytes(CPU) == peak_bytes(CPU)  # where no file tells the bytes in use
    tells = SimpleNamespace(memory_allocated=lambda device: 5, max_memory_allocated=lambda device: 6)
    monkeypatch.setattr(torch, "cuda", tells)
    assert (current_bytes(torch.device("cuda")), peak_bytes(torch.device("cuda"))) == (5, 6)
