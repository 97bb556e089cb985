"""The log of a run, read back: updates, epochs, plans and gradient flow; incomplete files too."""

import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from anybatch.core import DataError
from anybatch.observe.flow_figures import FIGURES

LOG = "log.jsonl"  # in the folder of a run
SETTINGS = "settings.json"
FORMATS = (1, 2)  # a start line without a format has format 1
_LARGEST = 1e300  # larger differences overflow

Numbers = NDArray[np.float64]
Line = Mapping[str, Any]


class FlowLog:
    """The gradient flow of a run: of each recorded update the figures of all layers.

    Attributes:
        layers: names of the layers.
        classes: class names of their modules; empty in a log of an earlier version.
        updates: numbers of the recorded updates, ascending.
        values: [figures, layers] of each; NaN for no value.
    """

    def __init__(self) -> None:
        self.layers: tuple[str, ...] = ()
        self.classes: tuple[str, ...] = ()
        self.updates: list[int] = []
        self.values: list[Numbers] = []

    def add(self, step: int, record: Line) -> bool:
        """Add a record; return False if it cannot be read."""
        layers = tuple(texts(record.get("layers"))) or self.layers
        try:
            rows = [record.get(name) or [None] * len(layers) for name in FIGURES]
            values = np.array(rows, np.float64)  # None becomes NaN
        except (ValueError, TypeError):
            return False
        if not layers or values.shape != (len(FIGURES), len(layers)):
            return False
        values[~((values >= 0) & (values <= _LARGEST))] = math.nan
        if layers != self.layers:  # the model has changed
            self.forget(-1)
        self.layers, self.classes = layers, tuple(texts(record.get("classes"))) or self.classes
        self.updates.append(step)
        self.values.append(values)
        return True

    def forget(self, done: int) -> None:
        """Drop the records after an update."""
        kept = bisect_right(self.updates, done)
        del self.updates[kept:], self.values[kept:]


class RunLog:
    """The contents of a run's folder, written by this version of anybatch or an earlier one.

    An incomplete last line, lines of other events and missing fields are no errors: a run may be in progress,
    or was killed. Unreadable lines are counted in `notes`.

    Attributes:
        folder, name: its path, and its name.
        starts: the first start and each resume.
        steps: numbers of the updates, ascending.
        values: [updates] by name, such as "loss" or "terms.ce"; NaN for no value.
        epochs, plans: their lines.
        flow: gradient flow, which may have no records.
        test: loss and metrics on the test rows at the end, and the updates before; empty if there is none.
        stopped: the reason of a stop, may be empty; None without a stop line.
        settings: the options of the command; empty if there are none.
        notes: sentences about unreadable parts.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        if not self.folder.is_dir():
            raise DataError(f"{folder}: expected the folder of a run, got no folder. Check the path.")
        self.starts: list[Line] = []
        self.steps: list[int] = []
        self.epochs: list[Line] = []
        self.plans: list[Line] = []
        self.flow = FlowLog()
        self.test: Line = {}
        self.stopped: str | None = None
        self.settings: Line = {}
        self.notes: list[str] = []
        self._columns: dict[str, array[float]] = {}
        self._unread = self._again = 0
        self._read_settings()
        self._read_log(self.folder / LOG)
        self.values = {name: np.array(self._filled(one), np.float64) for name, one in self._columns.items()}

    def column(self, name: str, missing: float = math.nan) -> Numbers:
        """Return the values of a name; for a name without any the missing value for each update."""
        return self.values.get(name, np.full(len(self.steps), missing))

    def _read_settings(self) -> None:
        try:
            self.settings = dict(json.loads((self.folder / SETTINGS).read_bytes()))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, RecursionError):
            self.notes.append(f"{SETTINGS} could not be read.")

    def _read_log(self, path: Path) -> None:
        count, has_events = 0, False
        try:
            with path.open("rb") as file:
                for line in file:
                    count += 1
                    has_events |= self._read(line)
        except OSError as error:
            raise DataError(
                f"{path}: expected the log of a run, got: {error.strerror}. Name the folder that `anybatch "
                "train` wrote to, or give `ab.Trainer` the argument out=."
            ) from None
        if not has_events:
            got = f"{count} lines that are none of a log" if count else "an empty file"
            raise DataError(
                f"{path}: expected the log of a run, got {got}. Train first, or name another folder."
            )
        if self._unread:
            self.notes.append(f"Lines of the log that could not be read, or only in part: {self._unread:,}.")
        if self._again:
            self.notes.append(f"Lines of updates that were in the log already, left out: {self._again:,}.")

    def _read(self, line: bytes) -> bool:
        """Store a line; return True if it is one of a log."""
        try:
            record = dict[str, Any](json.loads(line))
        except (ValueError, TypeError, RecursionError):
            self._unread += line.endswith(b"\n")  # an incomplete last line is being written
            return False
        match record.get("event"):
            case "start":
                self._start(record)
            case "step":
                self._step(record)
            case "epoch":
                self.epochs.append(record)
            case "plan":
                self.plans.append(record)
            case "test":  # after the stop
                self.test = {name: value for name, value in record.items() if name != "event"}
                return True
            case "stop":
                self.stopped = str(record.get("reason") or "")
                return True
            case str():  # an event of a later version or of the user
                pass
            case _:
                self._unread += 1
                return False
        self.stopped = None
        return True

    def _start(self, record: Line) -> None:
        """Store a start, and drop lines of updates that are repeated and logged again after it."""
        written = record.get("format", 1)
        if written not in FORMATS:
            raise DataError(
                f"{self.folder / LOG}: expected a log of format {' or '.join(map(str, FORMATS))}, got format "
                f"{written!r}. Install a version of anybatch that knows it."
            )
        done = whole(record.get("done_updates")) or 0
        kept = bisect_right(self.steps, done)
        for column in (self.steps, *self._columns.values()):
            del column[kept:]
        self.flow.forget(done)
        self.plans = [plan for plan in self.plans if (whole(plan.get("step")) or 0) <= done]
        epochs = whole(record.get("done_epochs")) or 0
        self.epochs = [one for one in self.epochs if (whole(one.get("epoch")) or 0) <= epochs]
        self.starts.append(record)

    def _step(self, record: Line) -> None:
        step = whole(record.get("step"))
        if step is None:
            self._unread += 1
        elif self.steps and step <= self.steps[-1]:
            self._again += 1
        else:
            for name, value in _numbers(record):
                self._filled(self._columns.setdefault(name, array("d"))).append(value)
            self.steps.append(step)
            flow = mapping(mapping(record.get("observed")).get("flow"))
            self._unread += bool(flow) and not self.flow.add(step, flow)

    def _filled(self, column: "array[float]") -> "array[float]":
        """Return a column, with NaN for the updates so far that had no value."""
        column.extend([math.nan] * (len(self.steps) - len(column)))
        return column


def _numbers(record: Line, inside: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name == "cut" and isinstance(value, list):
            sizes = [number(one[0]) for one in cast("list[Any]", value) if isinstance(one, list) and one]
            yield "micro_batch", max(sizes, default=math.nan)
        elif isinstance(value, dict) and inside.count(".") < 2:  # a hostile log may nest without end
            yield from _numbers(mapping(value), f"{inside}{name}.")
        elif isinstance(value, int | float | None):
            yield f"{inside}{name}", number(value)


def evenly(count: int, most: int) -> list[int]:
    """Return the start index of each of at most `most` equal groups of `count` values."""
    shown = min(count, most)
    return [index * count // shown for index in range(shown)]


def number(value: object) -> float:
    """Convert a JSON value to float; NaN if missing or invalid."""
    return float(value) if isinstance(value, int | float) and abs(value) <= _LARGEST else math.nan


def whole(value: object) -> int | None:
    """Return a JSON value if it is a non-negative int, else None."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53:  # exact in a browser
        return value
    return None


def mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON value if it is an object, else an empty mapping."""
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def texts(value: object) -> Sequence[str]:
    """Return the entries of a JSON list as strings; empty for other values."""
    return [str(one) for one in cast("list[Any]", value)] if isinstance(value, list) else []
