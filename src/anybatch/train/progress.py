"""The progress bar: epochs, loss, throughput and memory at a glance."""

from __future__ import annotations

import math
import mmap
import random
import sys
import time
from typing import TYPE_CHECKING

import torch

from anybatch.core import StepReport, format_bytes, format_count
from anybatch.train.loggers import EpochReport, RunInfo

if TYPE_CHECKING:
    from rich.console import Console


class ProgressBar:
    """A bar over all updates, and a line for every finished epoch.

    Args:
        device: whose memory is shown: allocated bytes on CUDA, the process's resident bytes on the CPU.
        console: where it is drawn; standard error by default, so that standard output stays for results.
            Where that is no terminal, only the epochs' lines are printed.
    """

    def __init__(self, device: torch.device, console: Console | None = None) -> None:
        _import_rich()
        from rich.console import Console

        self._device = device
        self._console = Console(stderr=True) if console is None else console
        self._loss = math.nan

    def start(self, info: RunInfo) -> None:
        """Draw the bar where training starts or goes on."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._epochs = info.epochs
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(
            "training", total=info.total_updates, completed=info.done_updates, figures=""
        )
        self._done = info.done_updates
        self._last, self._rows = time.perf_counter(), 0
        self._bar.start()

    def step(self, report: StepReport) -> None:
        """Move the bar, at most ten times a second."""
        self._done += 1
        self._rows += report.rows
        self._loss = report.loss if report.updated else self._loss  # a step without update has none
        now = time.perf_counter()
        if now - self._last < 0.1:
            return
        speed = self._rows / (now - self._last)
        self._last, self._rows = now, 0
        memory = format_bytes(current_bytes(self._device))
        figures = f"loss {self._loss:.4f}  {format_count(speed)} samples/s  {memory}"
        self._bar.update(self._task, completed=self._done, figures=figures)

    def epoch(self, report: EpochReport) -> None:
        """Print the epoch's line above the bar."""
        self._bar.update(self._task, completed=self._done, description=f"epoch {report.epoch}/{self._epochs}")
        self._console.print(str(report), markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def _import_rich() -> None:
    """Import rich where a bar is wanted: doing so draws random numbers, and those are the caller's."""
    state = random.getstate()
    try:
        import rich.progress  # noqa: F401  # pyright: ignore[reportUnusedImport]
    finally:
        random.setstate(state)


def current_bytes(device: torch.device) -> int:
    """Bytes in use: allocated on CUDA; resident in the process elsewhere, its peak where no more is told."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return peak_bytes(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes ever in use: allocated on CUDA, resident in the process elsewhere; 0 where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
