"""The log of a run, read back: updates, epochs, plans and gradient flow; incomplete files too."""

import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from anybatch.core import DataError
from anybatch.observe.flow_figures import FIGURES

LOG = "log.jsonl"  # in the folder of a run
SETTINGS = "settings.json"
FORMATS = (1, 2)  # a start line without a format has format 1
MOST_COLUMNS, MOST_CELLS = 150, 20_000  # limits of a figure's gradient flow over time, all layers together
_LARGEST = 1e300  # larger differences overflow

Numbers = NDArray[np.float64]
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowLog:
    """Gradient flow over time: the smallest and the largest value of each figure in each column."""

    layers: tuple[str, ...]
    classes: tuple[str, ...]  # of the layers' modules; empty texts in a log of an earlier version
    updates: tuple[int, ...]  # first update of each column
    low: Numbers  # [columns, figures, layers]; NaN for no value
    high: Numbers
    records: int  # most records in a column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunLog:
    """The contents of a run's folder."""

    folder: Path
    starts: tuple[Line, ...]  # the first start and each resume
    steps: tuple[int, ...]  # numbers of the updates, ascending
    values: Mapping[str, Numbers]  # [updates] by name, such as "loss" or "terms.ce"; NaN for no value
    epochs: tuple[Line, ...]
    plans: tuple[Line, ...]
    flow: FlowLog | None
    test: Line  # loss and metrics on the test rows at the end, and the updates before; empty if there is none
    stopped: str | None  # the reason of a stop, may be empty; None without a stop line
    settings: Line  # the options of the command; empty if there are none
    notes: tuple[str, ...]  # about unreadable parts


def read_run(folder: str | Path) -> RunLog:
    """Read the log of a run, of this version of anybatch or an earlier one.

    An incomplete last line, lines of other events and missing fields are no errors: a run may be in progress,
    or was killed. Unreadable lines are counted in `notes`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a run, got no folder. Check the path.")
    path = folder / LOG
    reader = _LogReader(path)
    try:
        with path.open("rb") as file:
            for line in file:
                reader.read(line)
    except OSError as error:
        raise DataError(
            f"{path}: expected the log of a run, got: {error.strerror}. Name the folder that `anybatch "
            "train` wrote to, or give `ab.Trainer` the argument out=."
        ) from None
    settings, notes = _settings(folder / SETTINGS)
    return reader.log(folder, settings, notes)


def _settings(path: Path) -> tuple[Line, list[str]]:
    try:
        return dict(json.loads(path.read_bytes())), []
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, TypeError, RecursionError):
        return {}, [f"{SETTINGS} could not be read."]


class _LogReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts: list[Line] = []
        self._steps: list[int] = []
        self._values: dict[str, array[float]] = {}
        self._epochs: list[Line] = []
        self._plans: list[Line] = []
        self._test: Line = {}
        self._flow = _FlowReader()
        self._last = self._reason = ""  # last event, reason of the last stop
        self._lines = self._unread = self._again = 0

    def read(self, line: bytes) -> None:
        self._lines += 1
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            self._unread += line.endswith(b"\n")  # an incomplete last line is being written
            return
        event = record.get("event") if isinstance(record, dict) else None
        if not isinstance(event, str):
            self._unread += 1
            return
        last, self._last = self._last, event
        match event:
            case "start":
                self._start(record)
            case "step":
                self._step(record)
            case "epoch":
                self._epochs.append(record)
            case "plan":
                self._plans.append(record)
            case "test":
                self._test, self._last = record, last
            case "stop":
                self._reason = str(record.get("reason") or "")
            case _:  # an event of a later version or of the user
                pass

    def _start(self, record: Line) -> None:
        """Store a start, and drop lines of updates that are repeated and logged again after it."""
        written = record.get("format", 1)
        if written not in FORMATS:
            raise DataError(
                f"{self._path}: expected a log of format {' or '.join(map(str, FORMATS))}, got format "
                f"{written!r}. Install a version of anybatch that knows it."
            )
        done = whole(record.get("done_updates")) or 0
        kept = bisect_right(self._steps, done)
        del self._steps[kept:]
        for column in self._values.values():
            del column[kept:]
        self._flow.forget(done)
        self._plans = [plan for plan in self._plans if (whole(plan.get("step")) or 0) <= done]
        epochs = whole(record.get("done_epochs")) or 0
        self._epochs = [one for one in self._epochs if (whole(one.get("epoch")) or 0) <= epochs]
        self._starts.append(record)

    def _step(self, record: Line) -> None:
        step = whole(record.get("step"))
        if step is None:
            self._unread += 1
        elif self._steps and step <= self._steps[-1]:
            self._again += 1
        else:
            for name, value in _numbers(record):
                column = self._values.setdefault(name, array("d"))
                column.extend([math.nan] * (len(self._steps) - len(column)))
                column.append(value)
            self._steps.append(step)
            flow = mapping(mapping(record.get("observed")).get("flow"))
            self._unread += bool(flow) and not self._flow.add(step, flow)

    def log(self, folder: Path, settings: Line, notes: list[str]) -> RunLog:
        if not self._last:
            got = "an empty file" if not self._lines else f"{self._lines} lines that are none of a log"
            raise DataError(
                f"{self._path}: expected the log of a run, got {got}. Train first, or name another folder."
            )
        if self._unread:
            notes = [*notes, f"Lines of the log that could not be read, or only in part: {self._unread:,}."]
        if self._again:
            notes = [*notes, f"Lines of updates that were in the log already, left out: {self._again:,}."]
        for column in self._values.values():
            column.extend([math.nan] * (len(self._steps) - len(column)))
        return RunLog(
            folder=folder,
            starts=tuple(self._starts),
            steps=tuple(self._steps),
            values={name: np.array(column, np.float64) for name, column in self._values.items()},
            epochs=tuple(self._epochs),
            plans=tuple(self._plans),
            flow=self._flow.log(),
            test={name: value for name, value in self._test.items() if name != "event"},
            stopped=self._reason if self._last == "stop" else None,
            settings=settings,
            notes=tuple(notes),
        )


def _numbers(record: Line) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name in ("event", "step", "weights"):
            continue
        if name == "observed":
            for callback, seen in mapping(value).items():
                found = {} if callback == "flow" else mapping(seen)
                yield from ((f"observed.{callback}.{key}", number(one)) for key, one in found.items())
        elif name == "cut" and isinstance(value, list):
            sizes = [number(one[0]) for one in cast("list[Any]", value) if isinstance(one, list) and one]
            yield "micro_batch", max(sizes, default=math.nan)
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", number(one)) for key, one in mapping(value).items())
        else:
            yield name, number(value)


class _FlowReader:
    def __init__(self) -> None:
        self._layers: tuple[str, ...] = ()
        self._classes: tuple[str, ...] = ()
        self._updates: list[int] = []
        self._values: list[Numbers] = []  # [figures, layers] each

    def add(self, step: int, record: Line) -> bool:
        lists = {name: record[name] for name in FIGURES if isinstance(record.get(name), list)}
        lengths = {len(values) for values in lists.values()}
        names = tuple(texts(record.get("layers"))) or self._layers
        if len(lengths) != 1 or (names and lengths != {len(names)}) or lengths == {0}:
            return False
        try:
            rows = [lists.get(name, [math.nan] * max(lengths)) for name in FIGURES]
            values = np.array(rows, np.float64)  # None becomes NaN
        except (ValueError, TypeError):
            return False
        if values.ndim != 2:
            return False
        values[~((values >= 0) & (values <= _LARGEST))] = math.nan
        names = names or tuple(f"layer {index + 1}" for index in range(values.shape[1]))
        if names != self._layers:  # the model has changed
            self.forget(-1)
        self._classes = tuple(texts(record.get("classes"))) or self._classes
        self._layers = names
        self._updates.append(step)
        self._values.append(values)
        return True

    def forget(self, done: int) -> None:
        kept = bisect_right(self._updates, done)
        del self._updates[kept:], self._values[kept:]

    def log(self) -> FlowLog | None:
        if not self._updates:
            return None
        most = max(40, min(MOST_COLUMNS, MOST_CELLS // len(self._layers)))
        starts, values = evenly(len(self._updates), most), np.stack(self._values)
        return FlowLog(
            layers=self._layers,
            classes=(*self._classes, *[""] * len(self._layers))[: len(self._layers)],
            updates=tuple(self._updates[start] for start in starts),
            low=np.fmin.reduceat(values, starts),
            high=np.fmax.reduceat(values, starts),
            records=-(-len(values) // len(starts)),
        )


def evenly(count: int, most: int) -> list[int]:
    """Return the start index of each of at most `most` equal groups of `count` values."""
    shown = min(count, most)
    return [index * count // shown for index in range(shown)]


def number(value: object) -> float:
    """Convert a JSON value to float; NaN if missing or invalid."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        value = float(value)
    except OverflowError:
        return math.nan
    return value if abs(value) <= _LARGEST else math.nan


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
