"""The progress bar: epochs, loss, throughput and memory."""

import math
import shutil
import sys
import time
from typing import Any, TextIO

import torch

from anybatch.core import Callback, EpochReport, RunInfo, StepReport, accelerator, format_bytes, format_count


class ProgressBar(Callback):
    """A line about the last update on standard error, and one for every finished epoch; no bar in a file."""

    def __init__(self, device: torch.device, file: TextIO | None = None) -> None:
        self._device, self._file, self._loss = device, file or sys.stderr, math.nan

    def start(self, trainer: Any, info: RunInfo) -> None:
        """Begin to measure at the start or resume of a training."""
        self._epochs, self._epoch, self._done = info.epochs, info.done_epochs, info.done_updates
        self._all = "" if info.total_updates is None else f"/{info.total_updates}"
        self._last, self._rows = time.perf_counter(), 0

    def update(self, report: StepReport) -> None:
        """Write the line anew, at most ten times a second."""
        self._done += 1
        self._rows += report.rows
        self._loss = report.loss if report.updated else self._loss  # a step without update has no loss
        now = time.perf_counter()
        if now - self._last < 0.1 or not self._file.isatty():
            return
        speed = self._rows / (now - self._last)
        self._last, self._rows = now, 0
        line = f"epoch {min(self._epoch + 1, self._epochs)}/{self._epochs}  update {self._done}{self._all}  "
        line += f"loss {self._loss:.4f}  {format_count(speed)} samples/s  "
        line += f"peak {format_bytes(peak_bytes(self._device))}"
        self._write(line[: shutil.get_terminal_size().columns - 1])

    def epoch(self, trainer: Any, report: EpochReport) -> None:
        """Write the epoch's line in the place of the bar."""
        self._epoch = report.epoch
        self._write(f"{report}\n")

    def stop(self, trainer: Any) -> None:
        """Remove the bar; write the reason if a callback stopped the training."""
        self._write(f"stopped: {trainer.stopped}\n" if trainer.stopped else "")

    def _write(self, text: str) -> None:
        self._file.write("\r\x1b[K" * self._file.isatty() + text)  # clears the line of a terminal
        self._file.flush()


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
