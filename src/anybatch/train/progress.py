"""The progress bar: epochs, loss, throughput and memory."""

import math
import sys
import time
from typing import Any

import torch

from anybatch.core import Callback, EpochReport, RunInfo, StepReport, accelerator, format_bytes, format_count
from anybatch.state import rng


class ProgressBar(Callback):
    """A bar over all updates on standard error, and a line for every finished epoch; no bar in a file."""

    def __init__(self, device: torch.device, console: Any = None) -> None:
        with rng.preserved():  # the import draws random numbers
            import rich.progress  # noqa: F401  # pyright: ignore[reportUnusedImport]
            from rich.console import Console

        self._device = device
        self._console = Console(stderr=True) if console is None else console
        self._loss = math.nan

    def start(self, trainer: Any, info: RunInfo) -> None:
        """Draw the bar at the start or resume of a training."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._epochs = info.epochs
        epoch, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
        count, left = (
            (TextColumn("update"), MofNCompleteColumn()),
            (TimeRemainingColumn(), TextColumn("left")),
        )
        columns = epoch, BarColumn(bar_width=None), *count, figures, *left
        is_file = not self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, disable=is_file, transient=True)
        self._done, told = info.done_updates, self._epoch_after(info.done_epochs)
        self._task = self._bar.add_task(told, total=info.total_updates, completed=self._done, figures="")
        self._last, self._rows = time.perf_counter(), 0
        self._bar.start()

    def update(self, report: StepReport) -> None:
        """Advance the bar, at most ten times a second."""
        self._done += 1
        self._rows += report.rows
        self._loss = report.loss if report.updated else self._loss  # a step without update has no loss
        now = time.perf_counter()
        if now - self._last < 0.1:
            return
        speed = self._rows / (now - self._last)
        self._last, self._rows = now, 0
        figures = f"loss {self._loss:.4f}  {format_count(speed)} samples/s"
        if self._console.width >= 100:
            figures += f"  peak {format_bytes(peak_bytes(self._device))}"
        self._bar.update(self._task, completed=self._done, figures=figures)

    def epoch(self, trainer: Any, report: EpochReport) -> None:
        """Print the epoch's line above the bar."""
        self._bar.update(self._task, completed=self._done, description=self._epoch_after(report.epoch))
        self._print(str(report))

    def stop(self, trainer: Any) -> None:
        """Remove the bar; print the reason if a callback stopped the training."""
        self._bar.stop()
        if trainer.stopped:
            self._print(f"stopped: {trainer.stopped}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _epoch_after(self, done: int) -> str:
        return f"epoch {min(done + 1, self._epochs)}/{self._epochs}"


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated on an accelerator, resident elsewhere; 0 if unknown."""
    allocated = accelerator.peak_bytes(device)
    if allocated is not None:
        return allocated
    if sys.platform == "win32":
        return 0
    import resource  # not available on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
