"""Watchers of a training, and two of them: a log as text and one as JSON lines."""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, cast

from anybatch.core import StepReport, format_count, format_seconds
from anybatch.train.checkpoint import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What is to be done when training starts or goes on."""

    epochs: int  # the last epoch's number
    done_epochs: int  # epochs finished already, before this start
    done_updates: int  # updates made already, before this start
    total_updates: int  # updates when all epochs are done
    rows: int  # rows of an epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """One epoch is over."""

    epoch: int  # 1 for the first
    updates: int  # since the very start
    loss: float  # mean over all rows of the epoch, each at the weights its batch met
    validation: Mapping[str, float]  # loss, terms and metrics; empty where there are no validation rows
    learning_rate: float  # of the first parameter group after the epoch
    seconds: float  # wall time of this epoch's training, without validation
    samples_per_second: float  # rows trained per second of it
    dropped: int = 0  # rows that were left out, because they were not finite
    skipped: int = 0  # steps without an update: fully masked, left out as a whole, or skipped

    def __str__(self) -> str:
        held_out = "".join(f"  validation {name} {value:.4f}" for name, value in self.validation.items())
        lost = f"  {format_count(self.dropped)} rows left out" if self.dropped else ""
        lost += f"  {format_count(self.skipped)} steps without update" if self.skipped else ""
        return (
            f"epoch {self.epoch:3}  loss {self.loss:.4f}{held_out}  lr {self.learning_rate:.3g}  "
            f"{format_count(self.samples_per_second)} samples/s  {format_seconds(self.seconds)}{lost}"
        )


class Watcher(Protocol):
    """Is told of every event of a training; changes nothing."""

    def start(self, info: RunInfo) -> None:
        """Training starts or goes on."""
        ...

    def step(self, report: StepReport) -> None:
        """An update was made."""
        ...

    def epoch(self, report: EpochReport) -> None:
        """An epoch is over, validated and saved."""
        ...

    def stop(self) -> None:
        """Training stops: done, or by an exception."""
        ...


class TextLog:
    """One line per epoch for people, appended to a file; each epoch once, as in `JsonLog`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, info: RunInfo) -> None:
        """Write how much is to be done; drop epochs that will be trained once more."""

        def is_redone(line: bytes) -> bool:
            found = re.match(rb"epoch +(\d+) ", line)
            return found is not None and int(found[1]) > info.done_epochs

        _drop(self._path, is_redone)
        rows = format_count(info.rows)
        self._write(f"start at update {info.done_updates} of {info.total_updates}, {rows} rows an epoch")

    def step(self, report: StepReport) -> None:
        """Nothing: the JSON-lines log has the updates."""

    def epoch(self, report: EpochReport) -> None:
        """Write the epoch's line."""
        self._write(str(report))

    def flush(self) -> None:
        """Nothing is kept back."""

    def stop(self) -> None:
        """Note that training stopped here."""
        self._write("stop")

    def _write(self, line: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


_FIELDS = ("loss", "terms", "weights", "rows", "micro_batches", "grad_norm", "updated")
_TRIVIAL = {"scale": 1.0, "redone": 0, "dropped": 0}  # told only where they are something else


class JsonLog:
    """One JSON object per update and per epoch, appended to a file, for programs and plots.

    Each update, numbered by `step` from 1 on, and each epoch is there once: what was written after the
    checkpoint from which a run goes on is dropped. NaN and infinity are written as null.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._at = {"step": 0, "epoch": -1}  # of the last lines; nowhere before the start

    def start(self, info: RunInfo) -> None:
        """Write how much is to be done; drop updates and epochs that will be trained once more."""
        done = {"step": info.done_updates, "epoch": info.done_epochs}

        def is_redone(line: bytes) -> bool:
            with suppress(ValueError, TypeError, LookupError, AttributeError):  # not a line of ours
                record = json.loads(line)
                return record[record["event"]] > done[record["event"]]
            return False

        if self._at != done:  # else it goes on at the end of this log
            _drop(self._path, is_redone)
        self._at = dict(done)
        self._add("start", asdict(info))
        self.flush()

    def step(self, report: StepReport) -> None:
        """Keep the update's line; lines are written once a second, so that small steps stay fast."""
        self._at["step"] += 1
        values = {"step": self._at["step"]} | {name: getattr(report, name) for name in _FIELDS}
        # Runs of equal micro-batches, as pairs of rows and how many in a row.
        values["cut"] = [(rows, len([*alike])) for rows, alike in groupby(report.cut)]
        told = {name: getattr(report, name) for name in _TRIVIAL}
        self._add("step", values | {name: told[name] for name in told if told[name] != _TRIVIAL[name]})
        if time.monotonic() - self._flushed > 1:
            self.flush()

    def epoch(self, report: EpochReport) -> None:
        """Write the epoch's line and those of its updates."""
        self._at["epoch"] = report.epoch
        self._add("epoch", asdict(report))
        self.flush()

    def flush(self) -> None:
        """Write what is still kept."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in self._lines)
        self._lines.clear()
        self._flushed = time.monotonic()

    def stop(self) -> None:
        """Note that training stopped here."""
        self._add("stop", {})
        self.flush()

    def _add(self, event: str, values: Mapping[str, object]) -> None:
        self._lines.append(to_json({"event": event, **values}))


def to_json(value: Any) -> str:
    """One line of JSON as every program reads it: NaN and infinity are null."""
    return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in cast("Sequence[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop(path: Path, is_redone: Callable[[bytes], bool]) -> None:
    """Take lines out of a log, and one that a process did not live to finish."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith(b"\n") and not is_redone(line)]
    if kept != lines:
        write_whole(path, lambda file: file.write_bytes(b"".join(kept)))
