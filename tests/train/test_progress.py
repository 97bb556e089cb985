"""The progress bar: figures while it runs, a line per epoch, and nothing left on the screen."""

import math
import random
import re
import sys
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

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
EPOCH = EpochReport(
    epoch=2,
    updates=6,
    loss=0.25,
    validation={"accuracy [top 5]": 0.75},
    learning_rate=0.1,
    seconds=2.0,
    samples_per_second=1500,
)
LINE = "epoch   2  loss 0.2500  validation accuracy [top 5] 0.7500  lr 0.1  1,500 samples/s  2 s"


def make_console(terminal: bool) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=120, legacy_windows=False, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def screen(text: str) -> list[str]:
    """What a terminal shows in the end: the few control codes that rich uses, carried out."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif token == "\r" or token.endswith(("m", "h", "l")):  # colours, and the cursor shown or hidden
            continue
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            lines[row] = ""
        else:
            assert not token.startswith("\x1b"), f"unknown control code {token!r}"
            lines[row] += token
    return [line.rstrip() for line in lines if line.strip()]


class Clock:
    """Moves on by so many seconds whenever it is looked at."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


def run_bar(console: Console, *, tick: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> ProgressBar:
    """A bar that has seen some updates."""
    monkeypatch.setattr(progress, "time", Clock(tick))
    bar = ProgressBar(CPU, console)
    bar.start(COURSE)
    for _ in range(steps):
        bar.step(STEP)
    return bar


def test_terminal_shows_loss_throughput_and_memory_and_is_clean_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "current_bytes", lambda device: 3 * 2**20)
    console = make_console(terminal=True)
    bar = run_bar(console, tick=0.25, steps=2, monkeypatch=monkeypatch)
    bar._bar.refresh()
    assert "loss 0.5000  400 samples/s  3.0 MiB" in screen(written(console))[-1]
    assert "5/6" in screen(written(console))[-1]
    bar.epoch(EPOCH)
    bar._bar.refresh()
    assert screen(written(console))[0] == LINE
    assert screen(written(console))[1].startswith("epoch 2/2")
    bar.stop()
    assert screen(written(console)) == [LINE]
    assert written(console).rindex("\x1b[?25h") > written(console).rindex("\x1b[?25l")  # the cursor is back


def test_figures_are_refreshed_at_most_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(progress, "current_bytes", lambda device: len(asked.append(device) or asked))
    bar = run_bar(make_console(terminal=True), tick=0.04, steps=5, monkeypatch=monkeypatch)
    bar.step(replace(STEP, loss=math.nan, terms={}, weights={}, updated=False))  # has no loss to show
    assert asked == [CPU, CPU]
    figures = bar._bar.tasks[0].fields["figures"]
    assert figures == "loss 0.5000  2,500 samples/s  2 B"  # 3 updates of 100 rows in 0.12 s
    bar.stop()


@pytest.mark.parametrize(
    "event", [("never", 0), ("start", 1), ("step", UPDATES + 2), ("epoch", 1), ("stop", 1)], ids=str
)
def test_bar_of_a_whole_training_and_of_one_that_is_broken_off(event: tuple[str, int]) -> None:
    console = make_console(terminal=True)
    bar, diary = ProgressBar(CPU, console), Diary(event, raising(KeyboardInterrupt()))
    trainer = make_trainer(watchers=[bar, diary])
    if event[1]:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(epochs=2)
        assert all(line.startswith("epoch   ") for line in screen(written(console)))
    else:
        assert list(map(str, trainer.fit(epochs=2))) == screen(written(console))
    assert not bar._bar.live.is_started


@pytest.mark.parametrize("shown", [True, False])
def test_trainer_shows_a_bar_unless_told_not_to(shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    reports = make_trainer(progress=shown).fit(epochs=2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [str(report) for report in reports if shown]


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
