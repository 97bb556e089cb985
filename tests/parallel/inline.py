"""A cluster in one process: calls run one by one, in a drawn order; processes end where a test says so."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from anybatch.parallel.on_ray import Ended, Lost


class Reference:
    value: Any = None
    is_there = False
    error: BaseException | None = None


class Process:
    def __init__(self, number: int, kind: type) -> None:
        self.number, self.kind, self.calls, self.has_ended = number, kind, list[Any](), False
        self.made: Any = kind.__new__(kind)
        self.given: list[Reference] = []  # what it has returned


class Inline:
    """Runs calls in an order drawn by `seed`; `end` is called with (process, method, "before" or "after")
    around each call, and ends the process by True."""

    def __init__(self, seed: int = 0, end: Callable[..., bool] = lambda *_: False) -> None:
        self.drawn, self.end = random.Random(seed), end
        self.processes, self.calls = list[Process](), list[tuple[str, str]]()
        self.slow: set[int] = set()  # numbers of processes
        self.time = 0.0  # calls so far

    def put(self, value: Any) -> Any:
        reference = Reference()
        reference.value, reference.is_there = copy.deepcopy(value), True
        return reference

    def start(self, kind: type, *args: Any) -> Any:
        self.processes.append(process := Process(len(self.processes), kind))
        process.calls.append(("__init__", args, [Reference()]))
        return process

    def call(self, process: Any, method: str, *args: Any, returns: int = 1) -> list[Any]:
        references = [Reference() for _ in range(returns)]
        if process.has_ended:
            self._fail(references)
        else:
            process.calls.append((method, args, references))
        return references

    def wait(self, references: Sequence[Any], seconds: float | None = None) -> Any:
        until = None if seconds is None else self.time + seconds
        while not (there := [one for one in references if one.is_there]):
            if until is not None and self.time >= until:
                return None
            self._advance(until)
        return self.drawn.choice(there)

    def clock(self) -> float:
        return self.time

    def get(self, reference: Any) -> Any:
        while not reference.is_there:
            self._advance()
        if reference.error is not None:
            raise reference.error
        return copy.deepcopy(reference.value)

    def kill(self, process: Any) -> None:
        process.has_ended = True
        for *_, references in process.calls:
            self._fail(references)
        process.calls, process.made = [], None

    def lose(self, process: Any) -> None:
        """A machine is gone, with all that its process has returned."""
        self.kill(process)
        self._fail(process.given, Lost("it was on another machine"))

    def close(self) -> None:
        for process in self.processes:
            self.kill(process)

    def _fail(self, references: Sequence[Any], error: BaseException | None = None) -> None:
        for one in references:
            one.is_there, one.error = True, error or Ended("it was ended")

    def _advance(self, until: float | None = None) -> None:
        """One call of one process; a slow one gets on only where nothing else can happen."""
        self.time += 1
        calling = [one for one in self.processes if one.calls]
        assert calling, "nothing is under way"
        ready = [one for one in calling if one.number not in self.slow]
        if not ready and until is not None:
            self.time = until
            return
        process = self.drawn.choice(ready or calling)
        method, args, references = process.calls.pop(0)
        self.calls.append((process.kind.__name__, method))
        if self.end(process, method, "before"):
            self._fail(references)
            self.kill(process)
            return
        try:
            values = [self.get(one) if isinstance(one, Reference) else copy.deepcopy(one) for one in args]
            found = getattr(process.made, method)(*values)
        except Exception as error:
            self._fail(references, Lost(str(error)) if isinstance(error, Ended | Lost) else error)
            return
        if self.end(process, method, "after"):
            self._fail(references)
            self.kill(process)
            return
        found = copy.deepcopy(found) if len(references) > 1 else [copy.deepcopy(found)]
        for reference, value in zip(references, found, strict=True):
            reference.value, reference.is_there = value, True
        process.given += references
