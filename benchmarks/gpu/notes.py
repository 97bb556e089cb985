"""Figures of a section, written as they are found, and what is asked of them."""

import gc
import json
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from anybatch.core import accelerator

_FORGET = accelerator.forget_peak

#: The largest figure that holds, by section and name; figures without a limit are for information.
LIMITS: dict[tuple[str, str], float] = {
    ("selftest", "failed"): 0,
    ("selftest", "device tests"): 0,
    ("exact", "float64"): 1e-12,
    ("exact", "float64, loss in float32"): 1e-6,
    ("exact", "float32"): 3e-5,
    ("exact", "other bits uncut"): 0,
    ("precision", "weights"): 0.03,
    ("budgets", "allocated 2"): 1.0,
    ("budgets", "allocated 3"): 1.0,
    ("budgets", "allocated 10"): 1.0,
    ("budgets", "reserved 2"): 1.0,
    ("budgets", "reserved 3"): 1.0,
    ("budgets", "reserved 10"): 1.0,
    ("budgets", "settled / by hand"): 1.05,
    ("budgets", "named, refused again"): 0,
    ("budgets", "update out of memory"): 0,
    ("plan", "bytes off"): 0.03,
    ("oom", "error"): 1e-12,
    ("oom", "state changed"): 0,
    ("speed", "step"): 1.03,
    ("speed", "window"): 1.05,
    ("speed", "batch loss"): 1.05,
    ("offload", "other bits"): 0,
}


class Notes:
    """What one section has found so far, on its device."""

    def __init__(
        self, section: str, device: torch.device, path: Path, *, small: bool, seconds: float
    ) -> None:
        self.section, self.device, self.path, self.small = section, device, path, small
        self.end = time.monotonic() + seconds
        self._most = [0, 0]  # bytes allocated and reserved, before peaks began anew
        accelerator.forget_peak = self._note_peaks
        self.figures: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {"crashed": [], "needs": [], "late": [], "done": False}

    def add(self, case: str, name: str, value: float | str | None) -> None:
        """Note a figure, and write the file."""
        limit = LIMITS.get((self.section, name))
        self.figures.append({"case": case, "name": name, "value": value, "limit": limit})
        self.write()

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"figures": self.figures, **self.state}), encoding="utf-8")
        part.replace(self.path)

    @property
    def is_late(self) -> bool:
        """True if the section's time is nearly over."""
        return time.monotonic() > self.end

    @contextmanager
    def case(self, name: str) -> Generator[None]:
        """Run a case; one that crashes or lacks a package is noted, and the next one runs."""
        try:
            yield
        except ImportError as error:
            package = (error.name or str(error)).partition(".")[0]
            if package not in self.state["needs"]:
                self.state["needs"].append(package)
        except Exception as error:
            traceback.print_exc()
            told = (str(error).splitlines() or [""])[0][:200]
            self.state["crashed"].append(f"{name}: {type(error).__name__}: {told}")
        gc.collect()  # what a traceback held
        accelerator.free_cache()
        self.write()

    def each(self, cases: dict[str, Callable[[], None]]) -> None:
        """Run cases by name while there is time."""
        for name, run in cases.items():
            if self.is_late:
                self.state["late"].append(name)
                continue
            with self.case(name):
                run()

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds of a call, the device's work included."""
        self.sync()
        began = time.perf_counter()
        call()
        self.sync()
        return time.perf_counter() - began

    def forget(self, *, keep_cache: bool = False) -> None:
        """Begin new peaks of what is allocated and reserved."""
        self.sync()
        if not keep_cache:
            gc.collect()
            accelerator.free_cache()
        _FORGET(self.device)
        self._most = [0, 0]

    def _note_peaks(self, device: torch.device) -> int | None:
        """Keep the peaks so far: readings within a step begin new ones."""
        self._most = [max(self._most[0], self.allocated() or 0), max(self._most[1], self.reserved() or 0)]
        return _FORGET(device)

    def allocated(self) -> int | None:
        """Return the peak of allocated bytes."""
        found = accelerator.peak_bytes(self.device)
        return None if found is None else max(found, self._most[0])

    def reserved(self) -> int | None:
        """Return the peak of reserved bytes; of allocated ones where a device does not tell."""
        read = getattr(accelerator.module_of(self.device), "max_memory_reserved", None)
        return self.allocated() if read is None else max(read(self.device), self._most[1])
