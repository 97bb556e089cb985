"""The log of a training: a callback that writes JSON lines."""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from anybatch.core import DataError, EpochReport, RunInfo, StepReport, accelerator
from anybatch.losses import function_of
from anybatch.step import Step
from anybatch.train.callbacks import TrainerCallback, records
from anybatch.train.files import write
from anybatch.train.progress import peak_bytes

FORMAT = 2  # of `JsonLog`; the first format had no number
_FIELDS = ("loss", "terms", "weights", "rows", "micro_batches", "grad_norm", "updated", "learning_rate")
_TRIVIAL = {"scale": 1.0, "redone": 0, "dropped": 0, "counts": {}}  # values that are not logged


class JsonLog(TrainerCallback):
    """A callback that appends one JSON object per update and per epoch to a file, each of them once.

    A resume drops the lines written after its checkpoint. NaN and infinity are written as null.

    | event | content |
    |---|---|
    | start | `RunInfo`, machine, command, names of model, loss and optimizer |
    | step | the report of an update, the training time so far, peak bytes, records of callbacks |
    | plan | a memory budget changed the micro-batches: the reason, and bytes by owner |
    | epoch | `EpochReport` |
    | stop | the reason, if a callback stopped the training |
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._layers: dict[str, object] = {}  # last logged layer names of each callback
        self._planned = 0  # last logged rows of a micro-batch
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._at = {"step": 0, "epoch": -1}  # numbers of the last lines; -1 before the start

    def start(self, trainer: Any, info: RunInfo) -> None:
        """Write the start line; drop lines of updates and epochs that will be repeated."""
        super().start(trainer, info)
        done = {"step": info.done_updates, "epoch": info.done_epochs}
        if self._at != done:  # else it continues at the end of this log
            before = self._path.read_bytes() if self._path.exists() else b""
            lines = [line for line in before.splitlines(keepends=True) if line.endswith(b"\n")]
            kept = b"".join(line for line in lines if not _is_redone(line, done))
            if kept != before:
                write(self._path, lambda file: file.write_bytes(kept), kind=DataError)
        self._at, self._layers, self._planned = done, {}, 0
        self._add("start", {"format": FORMAT, **asdict(info), **describe(trainer)})
        self.flush()

    def update(self, report: StepReport) -> None:
        """Buffer the update's line; the buffer is written once a second, so that small steps stay fast."""
        trainer = self._trainer
        self._at["step"] += 1
        values = {name: getattr(report, name) for name in (*_FIELDS, *_TRIVIAL)}
        values = {name: one for name, one in values.items() if one != _TRIVIAL.get(name, "")}
        # Runs of equal micro-batches, as pairs of rows and count.
        cut = [(rows, len([*alike])) for rows, alike in groupby(report.cut)]
        values |= {"step": self._at["step"], "cut": cut}
        self._tell_plan(trainer, report)
        values |= {"seconds": trainer.seconds, "memory": peak_bytes(_device(trainer.step))}
        observed = self._observed(records(trainer))
        values |= {"observed": observed} if observed else {}
        self._add("step", values)
        if time.monotonic() - self._flushed > 1:
            self.flush()

    def epoch(self, trainer: Any, report: EpochReport) -> None:
        """Write the epoch's line and the buffered lines."""
        self._at["epoch"] = report.epoch
        self._add("epoch", asdict(report))
        self.flush()

    def flush(self) -> None:
        """Write the buffered lines."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in self._lines)
        self._lines.clear()
        self._flushed = time.monotonic()

    def stop(self, trainer: Any) -> None:
        """Write the stop line, with the reason if a callback stopped the training."""
        self._add("stop", {"reason": trainer.stopped} if trainer.stopped else {})
        self.flush()
        super().stop(trainer)

    def _observed(self, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, record in found.items():
            layers = record.get("layers")
            if layers and layers == self._layers.get(name):
                del record["layers"]
                record.pop("classes", None)
            self._layers[name] = layers or self._layers.get(name)
        return {name: record for name, record in found.items() if record}

    def _tell_plan(self, run: Any, report: StepReport) -> None:
        size = max(report.cut, default=0)
        is_tail = report.rows != (run.batch_size or report.rows)
        if run.step.planning.budget is None or size == self._planned or is_tail:
            return
        self._planned = size
        text = f"micro-batches of {size} rows: {run.step.planning.explain()}"
        self._add("plan", {"step": self._at["step"], "text": text, "bytes": _held(run.step)})

    def _add(self, event: str, values: Mapping[str, object]) -> None:
        self._lines.append(to_json({"event": event, **values}))


def describe(run: Any) -> dict[str, Any]:
    """Return start time, machine, command, and the names of model, loss and optimizer."""
    step, device = run.step, _device(run.step)
    is_command = Path(sys.argv[0]).parts[-2:] == ("anybatch", "__main__.py")
    is_command = is_command or Path(sys.argv[0]).stem == "anybatch"
    loss = function_of(step.loss)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "anybatch": version(),
            "device": platform.machine() if device.type == "cpu" else accelerator.name_of(device),
            "cores": os.cpu_count(),
        },
        "command": ["anybatch", *sys.argv[1:]] if is_command else None,
        "model": type(step.model).__name__,
        "parameters": sum(one.numel() for one in _parameters(step)),
        "loss": getattr(loss, "__name__", type(loss).__name__),
        "optimizer": ", ".join(type(one).__name__ for one in step.optimizers),
        "precision": str(step.precision),
        "seed": run.seed,
        "batch_size": run.batch_size,
    }


def version() -> str | None:
    """Return the version of anybatch; None if it is not installed."""
    try:
        return metadata.version("anybatch")
    except metadata.PackageNotFoundError:
        return None


def _device(step: Step) -> torch.device:
    return next(step.model.parameters()).device


def _parameters(step: Step) -> list[torch.nn.Parameter]:
    return [one for one in step.model.parameters() if not is_lazy(one)]


def _held(step: Step) -> dict[str, int]:
    parameters = _parameters(step)
    states = [value for one in step.optimizers for held in one.state.values() for value in held.values()]
    return {
        "parameters": sum(one.nbytes for one in parameters),
        "gradients": sum(one.nbytes for one in parameters if one.requires_grad),
        "optimizer state": sum(one.nbytes for one in states if isinstance(one, torch.Tensor)),
    }


def to_json(value: Any) -> str:
    """Return one line of standard JSON: NaN and infinity are null."""
    return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in cast("Sequence[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_redone(line: bytes, done: Mapping[str, int]) -> bool:
    with suppress(ValueError, TypeError, LookupError, AttributeError):  # not a line of this log
        record = json.loads(line)
        return record[record["event"]] > done[record["event"]]
    return False
